"""Rows computed on a Dask cluster: one that runs, found by its address, or one of jobs of a batch system.

Dask runs a batch again whose worker died, on another one, and gives it up after some deaths
(`distributed.scheduler.allowed-failures`); the driver then tries its rows one at a time.
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


#: Batch systems, and the class of `dask_jobqueue` that submits jobs to each; `local` starts them on this machine.
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
        address: Of its scheduler, such as `tcp://host:8786`, or the path of its scheduler file.
        timeout_s: Seconds to wait for the scheduler.
        worker_timeout_s: Seconds to wait for a first worker then.

    Raises:
        ScenarioError: Dask is not installed, or this is no address.
        RunError: There is no scheduler, or no worker, or one that has not this version of simdist.
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
        n_jobs: How many; each waits in the queue by itself, and the first that starts is enough to begin.
        timeout_s: Seconds to wait for the first.

    Raises:
        ScenarioError: Dask is not installed, or its configuration does not say what to ask for.
        RunError: Jobs cannot be submitted here, or none starts in time, or has not this version of simdist.
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
    """Return the Python of the workers as a job's script must have it: the user's, or the one that runs this.

    Raises:
        RunError: Its path has a space, and a job of this system cannot quote it.
    """
    dask = _imported("dask")
    configured: str | None = dask.config.get(f"jobqueue.{config_name}.python", None)
    if configured is not None:
        return configured
    if system == "local" and len(sys.executable.split()) > 1:  # its "script" is split at spaces, and no shell reads it
        raise RunError(f"{system}: dask-jobqueue starts no Python whose path has a space: {sys.executable}")
    return shlex.quote(sys.executable)


@final
class DaskCluster:
    """The workers of a Dask cluster."""

    def __init__(self, client: "Client") -> None:
        """Take a connection, which stays the caller's.

        Raises:
            RunError: A worker has another version of simdist, or none.
        """
        self.may_wait = True
        self._client = client
        self._n_threads = 0
        self._counted_s = 0.0
        # Two batches are never the same to Dask: of equal ones it would give the outcome of the first, also a failure.
        self.executor: Executor = client.get_executor(pure=False)  # type: ignore[no-untyped-call]

    @property
    def n_underway(self) -> int:
        """Two batches for each thread of the workers that are there now."""
        now_s = time.monotonic()
        if not self._n_threads or now_s - self._counted_s > _REFRESH_S:
            try:
                self._n_threads = sum(self._client.nthreads().values())  # type: ignore[no-untyped-call]
            except (OSError, RuntimeError, AttributeError) as error:  # the last is how a closed client says so
                raise RunError(f"the connection to Dask is lost ({error}); run it again to go on") from None
            self._counted_s = now_s
        return 2 * max(1, self._n_threads)

    def up_s(self, batch: Future[Any]) -> float:
        """Return that it always was: Dask gives batches to workers that are up."""
        return -math.inf

    def end(self, batch: Future[Any]) -> None:
        """Do nothing: Dask may have others' work on that worker, so a row that hangs in C is waited for."""


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ScenarioError(f"--scheduler needs the package {error.name}: {_INSTALL}") from None


def _where(address: str) -> dict[str, str]:
    """Return how a client finds a scheduler."""
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
