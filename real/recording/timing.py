"""Clocks and sleeping.

All times are from the monotonic clock, which all processes of a machine share.
"""

import ctypes
import os
import sys
import threading
import time
from contextlib import suppress

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1
_LEARNING = 0.1
_MOST_LATE_S = 2e-4  # larger delays are due to other processes, and are not systematic


def now_s() -> float:
    """Return the seconds of the monotonic clock."""
    return time.perf_counter()


def precise_sleeps() -> None:
    """Make the calling thread, and threads that it starts, wake up on time.

    Linux may wake a sleeper up to 50 us late in order to wake several together. A step has about ten sleeps.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)


def sleep_s(seconds: float, interrupted: threading.Event | None = None) -> None:
    """Sleep, and return early only when `interrupted` is set.

    Args:
        seconds: Seconds to sleep; 0 or less returns immediately.
        interrupted: Checked every half second.
    """
    end_s = now_s() + seconds
    while (left_s := end_s - now_s()) > 0:
        if interrupted is not None and interrupted.is_set():
            return
        time.sleep(min(left_s, 0.5))


class Sleeper:
    """Sleeps that end on time: each asks for less, by the lateness of earlier ones, and spends the rest awake.

    After a sleep, a thread needs 50 to 100 us to get a core and Python's lock back.
    """

    def __init__(self, interrupted: threading.Event) -> None:
        self._interrupted = interrupted
        self._late_s = 0.0

    def __call__(self, seconds: float) -> None:
        """Sleep, never for less than `seconds` unless interrupted."""
        end_s = now_s() + seconds
        asked_s = seconds - self._late_s
        if asked_s > 0:
            asked_at_s = now_s()
            sleep_s(asked_s, self._interrupted)
            late_s = now_s() - asked_at_s - asked_s
            self._late_s += _LEARNING * (min(late_s, _MOST_LATE_S) - self._late_s)
        while now_s() < end_s and not self._interrupted.is_set():
            pass


def share_cores(n_processes: int) -> None:
    """Make this process take turns with others instead of interrupting them, if gloo has more threads than cores.

    A receiving thread of gloo spins on a lock that the sending thread holds. With fewer cores than threads, it may keep
    the holder off the core until the next tick of the kernel, which costs 4 ms per message. Under Linux's batch policy,
    a thread that wakes up does not interrupt another one, and these loops disappear.

    Args:
        n_processes: Processes of this kind on this machine.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return  # another program has already chosen
    if 2 * n_processes > (os.cpu_count() or 1):
        with suppress(PermissionError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def give_way() -> None:
    """Give the calling thread a lower priority than its parent under real-time scheduling; else do nothing.

    A thread that wakes up does not interrupt another one of its priority. So if one machine emulates several, a thread
    that decodes for 10 ms blocks threads that should compute or communicate meanwhile.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) not in (os.SCHED_RR, os.SCHED_FIFO):
        return
    priority = os.sched_getparam(0).sched_priority
    if priority > 1:
        os.sched_setscheduler(0, os.sched_getscheduler(0), os.sched_param(priority - 1))
