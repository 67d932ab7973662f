"""Threads that give way to others of their process."""

import os
import sys
import threading

import pytest

pytest.importorskip("torch")

from real.recording.timing import give_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def after_giving_way(policy: int, priority: int) -> tuple[int, int]:
    """Return policy and priority of a thread that had these, and gave way."""
    found: list[tuple[int, int] | str] = []

    def act() -> None:
        try:
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        except PermissionError as error:
            found.append(str(error))
            return
        give_way()
        found.append((os.sched_getscheduler(0), os.sched_getparam(0).sched_priority))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    (answer,) = found
    if isinstance(answer, str):
        pytest.skip(f"real-time priorities take root: {answer}")
    return answer


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (1, 1)])
def test_a_real_time_thread_gives_way_by_one_and_stays_real_time(before, after):
    assert after_giving_way(os.SCHED_RR, before) == (os.SCHED_RR, after)
    assert after_giving_way(os.SCHED_FIFO, before) == (os.SCHED_FIFO, after)


def test_others_stay_as_they_are():
    assert after_giving_way(os.SCHED_OTHER, 0) == (os.SCHED_OTHER, 0)
    assert after_giving_way(os.SCHED_BATCH, 0) == (os.SCHED_BATCH, 0)
