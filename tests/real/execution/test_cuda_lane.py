"""Lanes on CUDA streams, the clock of a GPU and waiting for it, with a GPU that a test pretends."""

from collections.abc import Callable

import numpy as np
import pytest
from traces import plan_of

from real.execution.gpu import GpuClock, await_event
from real.execution.lanes import CudaLane, OnEnd
from real.recording.recorder import Recorder
from simdist.errors import RunError
from simdist.plan import Forward, Instance
from simdist.plan.walk import walk

LOOK_S = 2e-6
"""Seconds of a call of the host."""


class Gpu:
    """A GPU and its host: one time, which passes with every call, and the GPU's clock, which may drift."""

    def __init__(self, drift: float = 0.0) -> None:
        self.time_s = 1000.0
        self.drift = drift

    def now(self) -> float:
        self.time_s += LOOK_S
        return self.time_s

    def event(self) -> "Event":
        return Event(self)

    def clock_ms(self, at_s: float) -> float:
        return (at_s - 777.0) * (1 + self.drift) * 1e3


class Stream:
    """Does what it is given, in order: it is busy until it has done so."""

    def __init__(self) -> None:
        self.free_at_s = 0.0

    def work(self, gpu: Gpu, seconds: float) -> None:
        self.free_at_s = max(self.free_at_s, gpu.now()) + seconds

    def wait_event(self, event: "Event") -> None:
        self.free_at_s = max(self.free_at_s, event.at_s)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self, stream: Stream) -> None:
        self.at_s = max(self.gpu.now(), stream.free_at_s)

    def query(self) -> bool:
        return self.gpu.now() >= self.at_s

    def elapsed_time(self, later: "Event") -> float:
        assert self.query(), "torch refuses the difference of events that have not happened"
        assert later.query()
        assert later.at_s >= self.at_s, "CUDA does not promise negative differences"
        return float(np.float32(self.gpu.clock_ms(later.at_s) - self.gpu.clock_ms(self.at_s)))


def healthy() -> None:
    pass


def ignore_end(instance: Instance, ended: Callable[[], float]) -> None:
    pass


class Rig:
    """Two lanes on one GPU. `lane.submit` enqueues as many seconds of work as `seconds` says for the instance."""

    def __init__(self, n_instances: int, drift: float = 0.0, failed: Callable[[], None] = healthy) -> None:
        self.gpu = Gpu(drift)
        plan = plan_of(*[(Forward(("param",), ("loss",)),)] * n_instances, world_size=1)
        self.instances = list(walk(plan))
        self.recorder = Recorder(plan)
        self.clock = GpuClock(Stream(), new_event=self.gpu.event, now=self.gpu.now)
        self.seconds: dict[int, float] = {}
        self.compute, self.comm = (self.lane(Stream(), failed) for _ in range(2))

    def lane(self, stream: Stream, failed: Callable[[], None], on_end: OnEnd = ignore_end) -> CudaLane:
        def perform(instance: Instance) -> None:
            lane.begin(instance)
            stream.work(self.gpu, self.seconds.get(instance.index, 0.0))
            lane.end(instance)

        lane = CudaLane(
            perform, self.recorder, on_end, stream, clock=self.clock, failed=failed, new_event=self.gpu.event
        )
        return lane

    def submit(self, lane: CudaLane, index: int, seconds: float) -> None:
        self.seconds[index] = seconds
        lane.submit(self.instances[index])


def close_to(seconds: float, within_s: float = 50e-6) -> object:
    return pytest.approx(seconds, abs=within_s)


def test_times_are_those_of_the_gpu_and_not_of_the_host() -> None:
    rig = Rig(2)
    begin_s = rig.gpu.time_s
    rig.submit(rig.compute, 0, 0.002)
    rig.submit(rig.compute, 1, 0.003)
    assert rig.gpu.time_s < begin_s + 0.0005, "the host waited"
    rig.compute.drain()
    ready_s, start_s, end_s = rig.recorder.times_s - begin_s
    assert ready_s == close_to([0, 0.002])
    assert start_s.tolist() == ready_s.tolist()
    assert end_s == close_to([0.002, 0.005])


def test_whoever_asks_learns_when_an_instance_ended_although_its_event_is_gone() -> None:
    rig = Rig(2)
    ended: dict[int, Callable[[], float]] = {}
    lane = rig.lane(Stream(), healthy, lambda instance, when: ended.update({instance.index: when}))
    rig.submit(lane, 0, 0.002)
    rig.submit(lane, 1, 0.003)
    assert np.isnan(rig.recorder.times_s[2]).all(), "the GPU has not got there yet"
    lane.drain()
    assert [ended[0](), ended[1]()] == rig.recorder.times_s[2].tolist()


def test_times_are_recorded_as_the_gpu_goes_on() -> None:
    rig = Rig(3)
    rig.submit(rig.compute, 0, 0.001)
    rig.submit(rig.compute, 1, 1.0)
    rig.gpu.time_s += 0.01
    rig.submit(rig.compute, 2, 0.0)
    assert np.isnan(rig.recorder.times_s[2]).tolist() == [False, True, True]


def test_a_stream_waits_for_an_event_without_holding_up_the_host() -> None:
    rig = Rig(2)
    begin_s = rig.gpu.time_s
    rig.submit(rig.compute, 0, 0.004)
    rig.compute.order(0, rig.comm.cuda_stream)
    rig.submit(rig.comm, 1, 0.001)
    assert rig.gpu.time_s < begin_s + 0.0005, "the host waited"
    rig.comm.drain()
    rig.compute.drain()
    ready_s, _, end_s = rig.recorder.times_s - begin_s
    assert ready_s[1] == close_to(0.004)
    assert end_s[1] == close_to(0.005)


def test_the_host_waits_until_an_instance_is_done() -> None:
    rig = Rig(2)
    begin_s = rig.gpu.time_s
    rig.submit(rig.compute, 0, 0.0005)
    rig.submit(rig.compute, 1, 10.0)
    rig.compute.order(0, None)
    assert begin_s + 0.0005 <= rig.gpu.time_s < begin_s + 1


def test_nobody_waits_for_what_is_recorded_already() -> None:
    rig = Rig(2)
    rig.submit(rig.compute, 0, 0.001)
    rig.compute.drain()
    before_s = rig.gpu.time_s
    rig.compute.order(0, None)
    rig.compute.order(0, rig.comm.cuda_stream)
    assert rig.gpu.time_s == before_s


def test_the_host_stops_waiting_for_a_gpu_that_hangs_when_the_run_has_failed() -> None:
    n_checks = 0

    def failed() -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks == 3:
            raise RunError("rank 7 failed: it rained")

    rig = Rig(1, failed=failed)
    rig.submit(rig.compute, 0, 1e9)
    with pytest.raises(RunError, match="rank 7 failed: it rained"):
        rig.compute.order(0, None)
    n_checks = 0
    with pytest.raises(RunError, match="rank 7 failed: it rained"):
        rig.compute.drain()


def test_waiting_reports_what_cuda_reports() -> None:
    class Broken(Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        await_event(Broken(Gpu()), healthy)


def test_hours_later_times_are_right_although_the_clock_of_the_gpu_drifts() -> None:
    """Without new marks, a drift of 1e-5 would be 100 ms after 10000 s."""
    rig = Rig(1001, drift=1e-5)
    begins_s = []
    for index in range(1001):
        begins_s.append(rig.gpu.time_s)
        rig.submit(rig.compute, index, 0.001)
        rig.gpu.time_s += 10
    rig.compute.drain()
    assert rig.recorder.times_s[0] == close_to(np.array(begins_s))
    assert (rig.recorder.times_s[2] - rig.recorder.times_s[0]) == close_to(0.001, 5e-6)


def test_a_host_that_is_always_ahead_gets_new_marks_too_and_does_not_wait_for_them() -> None:
    rig = Rig(100, drift=1e-5)
    begin_s = rig.gpu.time_s
    for index in range(100):
        before_s = rig.gpu.time_s
        rig.submit(rig.compute, index, 10.0)
        assert rig.gpu.time_s < before_s + 0.001, "the host waited for its stream"
        rig.gpu.time_s += 9.0 if index else 0.0
    rig.gpu.time_s += 200.0
    rig.compute.drain()
    ready_s, _, end_s = rig.recorder.times_s - begin_s
    assert ready_s == close_to(10.0 * np.arange(100), 110 * 1e-5)  # the last mark may be 110 s old
    assert (ready_s[1:] - end_s[:-1]) == close_to(0, 110 * 1e-5)


def test_a_gpu_that_others_keep_busy_holds_up_nobody_who_wants_a_new_mark() -> None:
    gpu, stream = Gpu(), Stream()
    clock = GpuClock(stream, new_event=gpu.event, now=gpu.now)
    first = clock.mark()
    gpu.time_s += 2.0
    stream.work(gpu, 0.5)
    before_s = gpu.time_s
    assert clock.mark() is first
    assert gpu.time_s - before_s < 2.0 * 1e-3
    gpu.time_s += 2.0
    assert clock.mark() is not first


def test_a_gpu_that_does_not_answer_is_reported() -> None:
    gpu, stuck = Gpu(), Stream()
    stuck.free_at_s = gpu.time_s + 1e6
    gpu.now = lambda: advance(gpu, 0.1)
    with pytest.raises(RunError, match="has not got to an event on an empty stream for 1 s: see nvidia-smi"):
        GpuClock(stuck, new_event=gpu.event, now=gpu.now)


def advance(gpu: Gpu, seconds: float) -> float:
    gpu.time_s += seconds
    return gpu.time_s
