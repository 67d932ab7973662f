"""Run a function or a command in several local processes, as torchrun would: as ranks of one world.

    with start(function, 3, argument) as ranks:      # or start([sys.executable, "-c", code], 3)
        ranks.signal(2, signal.SIGKILL)
        endings = ranks.wait()
    assert "rank 2" in endings[0].output

Functions start fast (a fork server has torch loaded) and must be importable: top level of a test module, plain
arguments. Commands start as a user's would, and run the interpreter's exit, which functions skip.
Whatever happens, nothing outlives the `with` block, and nothing else is touched.
"""

import ctypes
import faulthandler
import functools
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
from timeouts import TIMEOUT_S

ROOT = Path(__file__).parents[1]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
LOADED = [  # all that ranks import
    "calibrations",
    "data_runs",
    "faults",
    "loops",
    "real.learn",
    "simdist.schedules.hitopk",
    "tests.real.processes.test_launch",
    "tests.real.test_running",
    "torch._dynamo",  # with the first optimizer
    "torch.distributed.optim",
]


@dataclass(frozen=True)
class Ending:
    """How one rank ended: exit code (negative: the signal) and all that it printed."""

    code: int
    output: str


@dataclass(frozen=True)
class Ranks:
    """Processes that were started together; `None` in place of one that was not started."""

    children: list["multiprocessing.process.BaseProcess | subprocess.Popen[bytes]"]
    folder: Path
    names: list[int]  # the rank of each child
    deadline_s: float
    port: int

    def pid(self, rank: int) -> int:
        found = self.children[self.names.index(rank)].pid
        assert found is not None
        return found

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def output(self, rank: int) -> str:
        return (self.folder / str(rank)).read_text(encoding="utf-8", errors="replace")

    def until(self, text: str, ranks: Sequence[int] | None = None) -> None:
        """Wait until each of these ranks (all by default) has printed a text."""
        for rank in self.names if ranks is None else ranks:
            code = self.code(rank)  # before its output: who has ended prints no more
            while text not in self.output(rank):
                assert code is None, f"rank {rank} ended without printing {text!r}{self._outputs()}"
                self._pause(f"rank {rank} has not printed {text!r}")
                code = self.code(rank)

    def code(self, rank: int) -> int | None:
        child = self.children[self.names.index(rank)]
        return child.poll() if isinstance(child, subprocess.Popen) else child.exitcode

    def wait(self, ranks: Sequence[int] | None = None) -> dict[int, Ending]:
        """Wait for these ranks (all by default) to end."""
        wanted = self.names if ranks is None else ranks
        while late := [rank for rank in wanted if self.code(rank) is None]:
            self._pause(f"ranks {late} have not ended")
        return {rank: Ending(self.code(rank), self.output(rank)) for rank in wanted}

    def kill(self) -> None:
        for rank, child in zip(self.names, self.children, strict=True):
            if self.code(rank) is None:
                child.kill()
            child.wait() if isinstance(child, subprocess.Popen) else child.join()

    def _pause(self, late: str) -> None:
        if time.monotonic() >= self.deadline_s:
            self._say_where_they_are()
            raise AssertionError(f"{late} in time{self._outputs()}")
        time.sleep(0.02)

    def _say_where_they_are(self) -> None:
        """Let the ranks that run write the stacks of their threads, which ends them, after what the kernel knows."""
        for rank in self.names:
            if self.code(rank) is None:
                threads = _threads(self.pid(rank))
                self.signal(rank, signal.SIGABRT)  # to `faulthandler`
                with (self.folder / str(rank)).open("a", encoding="utf-8") as output:
                    output.write(f"threads:\n{threads}\n")
        time.sleep(1.0)

    def _outputs(self) -> str:
        return "".join(f"\n--- rank {rank} (code {self.code(rank)}):\n{self.output(rank)}" for rank in self.names)


@contextmanager
def start(
    what: Callable[..., None] | Sequence[str],
    world_size: int,
    *args: object,
    ranks: Sequence[int] | None = None,
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Ranks]:
    """Start a function or a command in one process per rank; `ranks` leaves some out, `environ` adds or overrides."""
    names = list(range(world_size)) if ranks is None else list(ranks)
    with tempfile.TemporaryDirectory() as folder, reserved_port() as free:
        port = free if port is None else port
        children = []
        started = Ranks(children, Path(folder), names, time.monotonic() + timeout_s, port)
        try:
            for rank in names:
                output = Path(folder, str(rank))
                output.touch()
                environment = places(rank, world_size, port) | dict(environ or {})
                if callable(what):
                    children.append(_start_function(what, args, environment, output))
                else:
                    children.append(_start_command([*what, *map(str, args)], environment, output))
            yield started
        finally:
            del names[len(children) :]
            started.kill()


def run(what: Callable[..., None] | Sequence[str], world_size: int, *args: object, **options) -> dict[int, Ending]:
    """Start, wait, and return how each rank ended."""
    with start(what, world_size, *args, **options) as ranks:
        return ranks.wait()


def run_module(module: str, world_size: int, *args: object) -> str:
    """Run `python -m MODULE ARGS` on every rank, as torchrun would, and return what rank 0 printed."""
    endings = run(run_as_main, world_size, module, True, *map(str, args))
    assert {ending.code for ending in endings.values()} == {0}, endings
    return endings[0].output


def run_as_main(program: str, is_module: bool, *args: str) -> None:
    """Run a module or a script as the interpreter would, in this process."""
    sys.argv = [program, *args]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def restarting(function: Callable[..., None], world_size: int, *args: object) -> None:
    """Start ranks by torch's agent, as torchrun does, but as forks; it starts all again if one ends early.

    For `start` on one rank, which is the agent. Its ranks inherit its handlers of signals, unlike torchrun's.
    """
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="restarting",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=3,
        start_method="fork",
    )
    elastic_launch(config, function)(*args)


def answer_in_forks(patch: pytest.MonkeyPatch) -> None:
    """Let programs that `simdist.jobs.asking` asks answer in forks, instead of interpreters that first load torch."""

    def run_program(
        command: Sequence[str],
        *,
        input: bytes,  # noqa: A002 (its name in `subprocess.run`)
        capture_output: bool,
        timeout: float,
        env: dict[str, str],
    ) -> subprocess.CompletedProcess[bytes]:
        option, module = command[1:]
        assert option == "-m"
        assert capture_output
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder, "answer")
            given = (module, input.decode(), str(answer))
            ending = run(_answer, 1, *given, environ=env, timeout_s=timeout)[0]
            return subprocess.CompletedProcess(command, ending.code, answer.read_bytes(), ending.output.encode())

    patch.setattr("simdist.jobs.asking.subprocess", SimpleNamespace(run=run_program))


def _answer(module: str, request: str, answer: str) -> None:
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    main = importlib.import_module(module).main
    with Path(answer).open("w", encoding="utf-8") as out:
        sys.exit(main(io.StringIO(request), out))


def torchrun(*args: object) -> None:
    """Be torchrun, as the leader of a process group, as in a shell."""
    from torch.distributed.run import main

    os.setsid()
    main([*map(str, args)])


def torchrun_forks(*args: object) -> None:
    """Be torchrun, but start workers as forks, which need not load torch."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda _, command, environment: _Fork(command, env=environment)  # type: ignore[assignment]
    torchrun(*args)


class _Fork(subprocess.Popen):
    """A fork of this process that does as `python -u -m MODULE ARGS` and `python -u SCRIPT ARGS` in a new session."""

    def _execute_child(self, command, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_: object) -> None:
        self._child_created = True
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(env)
        is_module = command[2] == "-m"
        code = 0
        try:
            run_as_main(command[2 + is_module], is_module, *command[3 + is_module :])
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)


def _threads(pid: int) -> str:
    """Return name, state, and the system call that it waits in, of each thread of a process, on Linux."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with suppress(OSError):  # it has ended
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(" ".join([(task / "comm").read_text().strip(), state, (task / "syscall").read_text().strip()]))
    return "\n".join(found)


def places(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun would give to a rank on one machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # see `Ranks._say_where_they_are`
    }


def leave_group() -> None:
    """Destroy the process group, but never free it, so that a rank under `DistributedDataParallel` ends.

    Where it is freed with the model, torch 2.13 waits for a thread of gloo and holds the GIL. That thread wants the GIL
    if it is the last to hold the work of a backward pass, which has a Python object.
    """
    import torch.distributed as dist

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Give a port that is given to no other meanwhile, for connections neither; a store may listen to it, on Linux."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as stores do
        holder.bind(("", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


@functools.cache
def fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the process that the ranks are forks of; it has loaded what takes longer than what most of them do.

    Before Python 3.13 it loads nothing from `sys.path` of this process, so the environment says where to look.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATH)
        forkserver.ensure_running()
    return context


def _start_command(command: Sequence[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen:
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": PATH} | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _start_function(function: Callable[..., None], args: tuple, environment: Mapping[str, str], output: Path):
    child = fork_server().Process(target=_enter, args=(function, args, dict(environment), str(output)))
    child.start()
    return child


def _enter(function: Callable[..., None], args: tuple, environment: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable(2)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    function(*args)
