"""Replicas of a job: the store where they meet, and an agent for each, which starts it again when it has ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from real.processes.membership import has_left, is_over
from real.processes.rendezvous import host_job
from simdist.errors import RunError

_POLL_S = 0.1
_END_S = 10.0  # for agents to end their ranks
_LOCAL = "127.0.0.1:0"


def host_replicas(at: str, world_size: int, *, timeout_s: float) -> None:
    """Host the store of a job until it is over, and the replicas have left; start none.

    Args:
        at: Address and port.
        world_size: Replicas.
        timeout_s: For those that have not left, after the job is over.

    Raises:
        RunError: The store cannot be hosted.
    """
    store = host_job(at)
    with _ending_on_sigterm():
        while not is_over(store):
            time.sleep(_POLL_S)
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s and not all(has_left(store, rank) for rank in range(world_size)):
            time.sleep(_POLL_S)


def run_replicas(arguments: Sequence[str], world_size: int, *, max_restarts: int, timeout_s: float) -> None:
    """Start all replicas on this machine, each with an agent of torchrun, and wait for the end of the job.

    Args:
        arguments: Of `python -m real`.
        world_size: Replicas.
        max_restarts: Of each.
        timeout_s: For those that have not ended, after the job is over.

    Raises:
        RunError: All agents have ended, and the job is not over.
    """
    store = host_job(_LOCAL)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", f"--max-restarts={max_restarts}")
    meet = ("--meet", f"{store.host}:{store.port}")
    commands = [
        [sys.executable, *launch, "-m", "real", *arguments, *meet, "--replica", str(rank)] for rank in range(world_size)
    ]
    with _ending_on_sigterm(), _agents(commands) as agents:
        while not is_over(store):
            if all(each.poll() is not None for each in agents):
                codes = ", ".join(f"{each.returncode} of replica {rank}" for rank, each in enumerate(agents))
                raise RunError(f"the agents of all replicas have ended, with codes {codes}; see above")
            time.sleep(_POLL_S)
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s and any(each.poll() is None for each in agents):
            time.sleep(_POLL_S)


@contextmanager
def _agents(commands: Sequence[Sequence[str]]) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Start agents, and end those that are there at the end."""
    environ = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(commands))), **os.environ}
    agents: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            agents.append(subprocess.Popen(command, env=environ, start_new_session=True))
        yield agents
    finally:
        for each in agents:
            if each.poll() is None:
                each.terminate()
        for each in agents:
            with suppress(subprocess.TimeoutExpired):
                each.wait(_END_S)
            if each.poll() is None:
                each.kill()
                each.wait()


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Raise RunError in the main thread on SIGTERM."""

    def end(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise RunError("was ended by SIGTERM")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
