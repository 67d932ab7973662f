"""How long tests wait for what hangs, and how they wait for processes that are not theirs."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOAD = os.getloadavg()[0] / (os.cpu_count() or 1)  # processes that want each core
# For what is meant to be late; who is not late needs longer where others work, too. Each process that imports this
# finds another load: pass the value on to ranks.
SOON_S = 4.0 * max(1.0, _LOAD)
TIMEOUT_S = 180.0  # a machine under load starts processes in tens of seconds


def await_end(pids: Sequence[int]) -> None:
    """Wait until processes have ended that are not our children."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and is not yet collected by its parent does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (ProcessLookupError, FileNotFoundError):
        return False


@contextmanager
def within_cpu_s(limit_s: float) -> Iterator[None]:
    """Fail if what is inside takes more CPU time, also if it would never end."""

    def stop(*_: object) -> None:
        raise AssertionError(f"it has not ended after {limit_s:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
