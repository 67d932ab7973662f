"""Own work is the time of a step without waiting, by the host's clock or by events of a GPU."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from real.watching import work  # noqa: E402
from real.watching.work import CudaStepClock, HostStepClock, StepClock, StepMoments, WorkRecorder, measured  # noqa: E402


class Script(StepClock[float]):
    """A clock that goes on by the next of some durations whenever it is read."""

    def __init__(self, durations_s: list[float]) -> None:
        self.now_s = 0.0
        self._durations_s = iter(durations_s)

    def take(self) -> float:
        self.now_s += next(self._durations_s)
        return self.now_s

    def has_passed(self, moment: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_a_step_lasts_from_its_predecessors_last_leave_to_its_own() -> None:
    clock = Script([1.0, 1.0] * 2 + [3.0, 0.5, 2.0, 4.0])  # work, wait, work, wait
    recorder = WorkRecorder(clock)
    for step in range(2):
        with recorder.waiting():
            pass
        assert recorder.end_step(step) is None
    for _ in range(2):
        with recorder.waiting():
            pass
    moments = recorder.end_step(2)
    assert moments is not None
    assert measured(moments, clock) == work.StepWork(step=2, work_s=5.0, step_s=9.5)


def test_a_step_without_an_exchange_is_work_until_its_end() -> None:
    clock = Script([1.0, 2.0, 7.0])
    recorder = WorkRecorder(clock)
    assert [recorder.end_step(step) for step in range(2)] == [None, None]
    moments = recorder.end_step(2)
    assert moments is not None
    assert measured(moments, clock) == work.StepWork(step=2, work_s=7.0, step_s=7.0)


def test_an_exchange_within_another_is_one_wait() -> None:
    recorder = WorkRecorder(Script([1.0, 2.0]))
    with recorder.waiting(), recorder.waiting():
        pass
    assert recorder.n_waits == 1


def test_an_exchange_that_is_never_left_is_over_with_its_step() -> None:
    recorder = WorkRecorder(Script([1.0] * 6))
    for step in range(2):
        recorder.arrive()
        recorder.end_step(step)
    with recorder.waiting():
        pass
    moments = recorder.end_step(2)
    assert moments is not None
    assert moments.waits == ((5.0, 6.0),)


def test_an_exchange_that_fails_leaves_no_half_wait_behind() -> None:
    recorder = WorkRecorder(Script([1.0] * 9))
    recorder.arrive()
    recorder.end_step(0)
    recorder.leave()
    assert recorder.n_waits == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=5))
def test_work_and_waiting_are_all_of_a_step(parts_s: list[tuple[float, float]]) -> None:
    at_s = 0.0
    waits = []
    for work_s, wait_s in parts_s:
        waits.append((at_s + work_s, at_s + work_s + wait_s))
        at_s = waits[-1][1]
    found = measured(StepMoments(0, 0.0, at_s, tuple(waits)), HostStepClock())
    assert found.work_s == pytest.approx(math.fsum(work_s for work_s, _ in parts_s), abs=1e-9)
    assert found.step_s == pytest.approx(at_s)


class FakeEvent:
    """An event of a GPU that has got as far as `reached`."""

    reached = 0
    recorded: list["FakeEvent"] = []  # noqa: RUF012

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "current"
        self.recorded.append(self)

    def query(self) -> bool:
        return self.recorded.index(self) < self.reached

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert later.query()
        return 10.0 * (self.recorded.index(later) - self.recorded.index(self))

    def synchronize(self) -> None:
        raise AssertionError


def test_moments_of_a_gpu_are_events_that_nothing_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "recorded", [])
    monkeypatch.setattr(FakeEvent, "reached", 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    clock = CudaStepClock(torch.device("cuda", 0))
    recorder = WorkRecorder(clock)
    for step in range(3):
        with recorder.waiting():
            pass
        moments = recorder.end_step(step)
    assert moments is not None
    assert not clock.has_passed(moments.end)
    FakeEvent.reached = 6
    assert clock.has_passed(moments.end)
    assert measured(moments, clock) == work.StepWork(step=2, work_s=0.01, step_s=0.02)
