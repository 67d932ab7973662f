"""What the parts of this experiment share: their rows, where they run, and ranks that are started together."""

import contextlib
import io
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simdist.runs.run_directory import RunDirectory
    from simdist.traces.trace import Trace

ROOT = Path(__file__).resolve().parents[2]

#: A row of results: what JSON can hold.
Row = dict[str, object]
LOADED = ["torch", "torch._dynamo", "real.cli", "real.calibrate", "simdist.schedules.hitopk"]  # what ranks import
ENDS = "SIMDIST_GPU_PART_ENDS_S"  # variable: when the part that runs is ended, by time.monotonic
REPORT_S = 3.0  # before that, ranks are ended, so that what they printed can be told
# Plans of one rank do not depend on these numbers: they are performed, and nothing is predicted.
ONE_GPU: Row = {
    "nodes": 1,
    "gpus_per_node": 1,
    "fabric": {"latency": "1 us", "bandwidth": "1 GB/s"},
    "network": "ideal",
    "device": {"name": "any", "memory_bandwidth": "1 GB/s", "host_bandwidth": "1 GB/s"},
}
GRACE_S = 5.0  # between the failure of a rank and the end of the others, which may know more


class PartError(Exception):
    """A part cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """How a part runs.

    Args:
        emit: Takes each row as soon as it is measured. What was emitted is kept, whatever happens after.
        dry_run: On CPUs at toy sizes, to see that the part works.
        kept: Folder of what results keep beside their rows, which later parts find.
    """

    emit: Callable[[Row], None]
    dry_run: bool
    kept: Path

    @property
    def device(self) -> str:
        """The kind of device, as torch names it."""
        return "cpu" if self.dry_run else "cuda"


def simdist(*arguments: object) -> str:
    """Run a command of simdist in this process and return what it prints.

    Raises:
        PartError: It failed.
    """
    from simdist.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main([str(each) for each in arguments])
    if code:
        raise PartError(f"simdist {' '.join(map(str, arguments))}: exit status {code}: {errors.getvalue().strip()}")
    return out.getvalue()


def planned(scenario: Row, folder: Path) -> Path:
    """Write the run directory of each schedule of a scenario, and return the folder that holds them.

    Raises:
        PartError: The command failed.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    simdist("plan", file, "-o", folder / "runs")
    return folder / "runs"


def performed(document: Row, *options: object) -> tuple["RunDirectory", "Trace"]:
    """Perform the plan of a scenario with one rank, and return the run and its trace.

    Args:
        document: The scenario without its cluster, which is one GPU, and with one schedule.
        options: Of `python -m real`.

    Raises:
        PartError: A command failed.
    """
    from simdist.runs import run_directory

    with tempfile.TemporaryDirectory() as folder:
        runs = planned({"cluster": ONE_GPU, **document}, Path(folder))
        ranks(("real", runs, *options), 1, ranks_per_node=1, timeout_s=30.0)
        run = run_directory.read(next(iter(run_directory.find(runs))))
        return run, run_directory.read_trace(run.path / run_directory.REAL, plan=run.plan)


@dataclass(frozen=True, slots=True)
class World:
    """Ranks that were started together.

    Args:
        command: What they run.
        processes: One for each rank.
        output: File with all that they print.
    """

    command: str
    processes: Sequence[BaseProcess]
    output: Path

    def said(self) -> str:
        """Return what the ranks have printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def until(self, reached: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait until something is so.

        Raises:
            PartError: It takes too long, or a rank has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > deadline_s or any(each.exitcode is not None for each in self.processes):
                raise PartError(f"{self.command}: did not get far enough: {self.said()[-4000:].strip()}")
            time.sleep(0.05)

    def codes(
        self, deadline_s: float, *, grace_s: float = GRACE_S, meanwhile: Callable[[], None] = lambda: None
    ) -> list[int | None]:
        """Return the exit status of each rank; None if it has not ended by a moment of `time.monotonic`.

        Args:
            deadline_s: The moment.
            grace_s: If a rank fails, the others have this long to say so too.
            meanwhile: Called again and again.
        """
        has_failed = False
        while True:
            codes = [process.exitcode for process in self.processes]
            if None not in codes or time.monotonic() > deadline_s:
                return codes
            if any(codes) and not has_failed:
                deadline_s, has_failed = min(deadline_s, time.monotonic() + grace_s), True
            meanwhile()
            time.sleep(0.05)


def ranks(
    command: Sequence[object],
    n_ranks: int,
    *,
    ranks_per_node: int,
    timeout_s: float,
    module: bool = True,
    environ: Mapping[str, object] = MappingProxyType({}),
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Start the ranks of a world on this machine as torchrun would, and wait for them.

    Args:
        command: See `started`, likewise the other arguments.
        n_ranks: See there.
        ranks_per_node: See there.
        timeout_s: Until all ranks must have ended.
        module: See there.
        environ: See there.
        meanwhile: Called again and again until they have ended, and once after that.

    Raises:
        PartError: A rank failed, or they took too long. The message ends with what was printed last.
    """
    left_s = float(os.environ.get(ENDS, "inf")) - time.monotonic() - REPORT_S
    timeout_s = max(1.0, min(timeout_s, left_s))
    with started(command, n_ranks, ranks_per_node=ranks_per_node, module=module, environ=environ) as world:
        codes = world.codes(time.monotonic() + timeout_s, meanwhile=meanwhile)
        said = world.said()
    meanwhile()
    if any(code != 0 for code in codes):
        late = [rank for rank, code in enumerate(codes) if code is None]
        what = f"ranks {late} did not end within {timeout_s:.0f} s" if late else f"exit statuses {codes}"
        raise PartError(f"{world.command}: {what}: {said[-4000:].strip()}")


@contextlib.contextmanager
def started(
    command: Sequence[object],
    n_ranks: int,
    *,
    ranks_per_node: int,
    module: bool = True,
    environ: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[World]:
    """Start the ranks of a world on this machine as torchrun would; they are ended at the end.

    A fork server has torch loaded, so that they start at once. It has not touched the GPU.

    Args:
        command: A module of this repository and its arguments; a script if `module` is false.
        n_ranks: Of the world.
        ranks_per_node: As if every so many of them were on a machine of their own.
        module: Whether the first of `command` is a module.
        environ: Variables of the ranks.
    """
    words = [str(each) for each in command]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    shared = {"WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": ranks_per_node, "OMP_NUM_THREADS": 1}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # a host's name may not resolve
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCH_CPP_LOG_LEVEL": "ERROR", **environ}
    with tempfile.NamedTemporaryFile() as output:
        processes = []
        for rank in range(n_ranks):
            of_rank = shared | {"RANK": rank, "LOCAL_RANK": rank % ranks_per_node}
            texts = {name: str(value) for name, value in of_rank.items()}
            processes.append(context.Process(target=_be_rank, args=(words, module, texts, output.name)))
        try:
            for process in processes:
                process.start()
            yield World(" ".join(words), processes, Path(output.name))
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
                    process.close()


def _be_rank(words: list[str], module: bool, environ: dict[str, str], output: str) -> None:
    """Run a module or a script as the main program of this process."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environ)
    os.chdir(ROOT)
    sys.argv[:] = words
    if module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
