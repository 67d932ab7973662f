"""Rows computed on a Dask cluster: a running one, found by its address, or one made of jobs of a batch system.

If a worker dies, Dask runs its batch again on another worker. It gives up after several deaths
(`distributed.scheduler.allowed-failures`). Then the driver tries the rows of the batch one at a time.
"""

import importlib
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

from simdist.errors import RunError, ScenarioError
from simdist.settings.base import nearest, shown

if TYPE_CHECKING:
    from distributed import Client


#: Batch systems, and the class of `dask_jobqueue` that submits jobs to each. `local` starts them on this machine.
SYSTEMS = {
    "htcondor": "HTCondorCluster",
    "local": "LocalCluster",
    "lsf": "LSFCluster",
    "oar": "OARCluster",
    "pbs": "PBSCluster",
    "sge": "SGECluster",
    "slurm": "SLURMCluster",
}

_INSTALL = "pip install 'simdist-training[dask]'"
_REFRESH_S = 5.0


@contextmanager
def connected(address: str, *, timeout_s: float = 60.0, worker_timeout_s: float = 60.0) -> Iterator["DaskCluster"]:
    """Connect to a Dask cluster, and leave it at the end of a `with` statement.

    Args:
        address: Address of its scheduler, such as `tcp://host:8786`, or the path of its scheduler file.
        timeout_s: Seconds to wait for the scheduler.
        worker_timeout_s: Seconds to wait then for the first worker.

    Raises:
        ScenarioError: Dask is not installed, or the address is invalid.
        RunError: There is no scheduler or no worker, or a worker has another version of simdist.
    """
    distributed = _imported("distributed")
    where = _where(address)
    try:
        client = distributed.Client(**where, timeout=timeout_s, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise RunError(f"no Dask scheduler answers at {address} within {timeout_s:g} s: {error}") from None
    with client:
        _await_worker(client, f"the cluster at {address}", worker_timeout_s)
        yield DaskCluster(client)


@contextmanager
def jobs(system: str, n_jobs: int, *, timeout_s: float = math.inf) -> Iterator["DaskCluster"]:
    """Submit jobs that make a Dask cluster, and end them with a `with` statement.

    Args:
        system: A key of `SYSTEMS`. The user's `jobqueue.yaml` has the resources of a job, as dask-jobqueue reads it.
        n_jobs: Number of jobs. Each waits in the queue on its own. Work begins when the first one starts.
        timeout_s: Seconds to wait for the first job.

    Raises:
        ScenarioError: Dask is not installed, or its configuration does not state the resources of a job.
        RunError: Jobs cannot be submitted here, none starts in time, or a worker has another version of simdist.
    """
    distributed = _imported("distributed")
    module = _imported("dask_jobqueue")
    cls = vars(_imported("dask_jobqueue.local") if system == "local" else module)[SYSTEMS[system]]
    command = (cls.job_cls.submit_command or "").split()
    if command and shutil.which(command[0]) is None:
        raise RunError(f"{system}: there is no command {command[0]} here: run this where jobs are submitted")
    try:
        cluster = cls(python=_python(system, cls.job_cls.config_name))
    except ValueError as error:
        raise ScenarioError(f"{system}: {error}; write it in ~/.config/dask/jobqueue.yaml") from None
    with cluster:
        cluster.scale(jobs=n_jobs)
        with distributed.Client(cluster, set_as_default=False) as client:
            _await_worker(client, f"{n_jobs} jobs of {system}", timeout_s)
            yield DaskCluster(client)


def _python(system: str, config_name: str) -> str:
    """Return the Python of the workers, quoted for a job's script: the user's choice, or the running one."""
    dask = _imported("dask")
    configured: str | None = dask.config.get(f"jobqueue.{config_name}.python", None)
    if configured is not None:
        return configured
    if system == "local" and len(sys.executable.split()) > 1:  # its "script" is split at spaces, without a shell
        raise RunError(f"{system}: dask-jobqueue starts no Python whose path has a space: {sys.executable}")
    return shlex.quote(sys.executable)


@final
class DaskCluster:
    """The workers of a Dask cluster."""

    def __init__(self, client: "Client") -> None:
        """Use a connection, which the caller still owns.

        Raises:
            RunError: A worker has another version of simdist, or lacks it.
        """
        self.may_wait = True
        self._client = client
        self._n_threads = 0
        self._counted_s = 0.0
        # Dask must treat all batches as different. For equal ones it would return the first result, even a failure.
        self.executor: Executor = client.get_executor(pure=False)  # type: ignore[no-untyped-call]

    @property
    def n_underway(self) -> int:
        """Two batches for each thread of the current workers."""
        now_s = time.monotonic()
        if not self._n_threads or now_s - self._counted_s > _REFRESH_S:
            try:
                self._n_threads = sum(self._client.nthreads().values())  # type: ignore[no-untyped-call]
            except (OSError, RuntimeError, AttributeError) as error:  # a closed client raises the last
                raise RunError(f"the connection to Dask is lost ({error}); run it again to go on") from None
            self._counted_s = now_s
        return 2 * max(1, self._n_threads)

    def up_s(self, batch: Future[Any]) -> float:
        """Return -inf, because Dask gives batches only to workers that are up."""
        return -math.inf

    def end(self, batch: Future[Any]) -> None:
        """Do nothing: the worker may run work of others, so the driver waits for a row that hangs in C."""


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ScenarioError(f"--scheduler needs the package {error.name}: {_INSTALL}") from None


def _where(address: str) -> dict[str, str]:
    """Return the arguments with which a client finds a scheduler."""
    if ":" not in address:
        if Path(address).is_file():
            return {"scheduler_file": address}
        raise ScenarioError(
            f"scheduler {shown(address)}: neither an address such as tcp://host:8786, nor a scheduler file that is "
            f"there, nor a batch system: {nearest(address, SYSTEMS)}"
        )
    try:
        _imported("distributed.comm").get_address_host_port(address, strict=True)
    except ValueError as error:
        raise ScenarioError(f"scheduler {shown(address)}: {error}; write e.g. tcp://host:8786") from None
    return {"address": address}


def _await_worker(client: "Client", what: str, timeout_s: float) -> None:
    try:
        client.wait_for_workers(1, timeout=None if math.isinf(timeout_s) else timeout_s)
    except TimeoutError:
        raise RunError(f"{what}: no worker within {timeout_s:g} s: start one, e.g. dask worker ADDRESS") from None
