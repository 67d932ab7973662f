"""The executor on one rank: order, overlap and failure."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from drawn_plans import legal_plans
from hypothesis import given
from hypothesis import strategies as st
from pretended import CPU, IN_THREAD, STEP, Pretended, QuietWatch, execute
from tiers import examples
from timeouts import TIMEOUT_S
from traces import plan_of

from real.buffers.memory import Memory
from real.execution.executor import Executor
from real.execution.streams import Lanes
from real.programs.emulated import EmulatedProgram
from real.recording.recorder import Recorder
from real.recording.timing import now_s
from simdist.errors import RunError
from simdist.plan import (
    AllReduce,
    Backward,
    Copy,
    Delay,
    Densify,
    Forward,
    Load,
    Merge,
    Op,
    Optimize,
    Pack,
    Plan,
    Select,
    Tick,
    Unpack,
)
from simdist.plan.group import Group
from simdist.plan.lanes import COMM, COMPUTE, Lane
from simdist.plan.ops import tick_s
from simdist.plan.walk import walk
from simdist.schedules import InputPath, Job, Schedule, Sync
from simdist.schedules.fsdp import FSDP

IN_CALLER = Lanes(CPU, collectives_block=True, compute_in_caller=True)
both_modes = pytest.mark.parametrize("lanes", [IN_THREAD, IN_CALLER], ids=["compute thread", "compute in caller"])


@both_modes
@examples(60)
@given(plan=legal_plans(max_times=2, max_runs=2))
def test_every_instance_runs_once_and_after_what_it_depends_on(lanes: Lanes, plan: Plan) -> None:
    (ready_s, _, end_s), _ = execute(plan, Pretended(), lanes)
    assert not np.isnan(end_s).any()
    last_of = dict.fromkeys(plan.streams, -np.inf)
    for instance in walk(plan):
        for before in instance.after:
            assert ready_s[instance.index] >= end_s[before], f"{instance} began before {before} was done"
        assert ready_s[instance.index] >= last_of[instance.lane.stream], f"{instance} overtook its own stream"
        assert end_s[instance.index] >= ready_s[instance.index]
        last_of[instance.lane.stream] = end_s[instance.index]


@examples(30)
@given(plan=legal_plans(max_times=3), data=st.data())
def test_execution_may_begin_at_any_step(plan: Plan, data: st.DataObject) -> None:
    first_step = data.draw(st.integers(0, plan.n_steps - 1))
    (_, _, end_s), _ = execute(plan, Pretended(), first_step=first_step)
    first = plan.first_instances()[first_step]
    before = [each.index for each in walk(plan) if each.index < first and not isinstance(each.op, Load)]
    assert np.isnan(end_s[before]).all()  # a load before it may bring a batch that is still to be used
    assert not np.isnan(end_s[first:]).any()


class Loading(Pretended):
    """Knows which batch is in which buffer, and which one each step has copied."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, int] = {}
        self.loaded: list[int] = []
        self.copied: dict[int, int] = {}

    def load(self, op: Load, number: int) -> None:
        self.loaded.append(number)
        self.held[op.dst] = number

    def perform(self, op: Op, step: object) -> None:
        if isinstance(op, Copy):
            self.copied[step] = self.held[op.src]


@both_modes
@pytest.mark.parametrize("prefetch", [1, 2, 3, 4])
@pytest.mark.parametrize("first_step", [0, 1, 2, 5, 6])
def test_every_step_finds_its_own_batch_wherever_execution_begins(prefetch: int, first_step: int, lanes: Lanes) -> None:
    path = InputPath(source="storage", prefetch=prefetch)
    plan = Sync().plan(Job(1, 1, 7, tensor_counts=(4,), input_path=path, delay_channels=frozenset({"io"})))
    program = Loading()
    execute(plan, program, lanes, first_step=first_step)
    assert program.loaded == list(range(first_step, 7))
    assert program.copied == {step: step for step in range(first_step, 7)}


def ticking(*, n_ticks: int = 1, period_s: float = 0.2) -> Plan:
    step = (STEP[0], STEP[3], *[Tick(("grad.0",), period_s)] * n_ticks, AllReduce("grad.0", Group(2)))
    return plan_of(step, world_size=2)


@both_modes
def test_what_comes_after_a_tick_begins_at_a_multiple_of_its_period(lanes: Lanes) -> None:
    start_s = now_s() - 0.05
    (ready_s, _, end_s), _ = execute(ticking(), Pretended(), lanes, start_s=start_s)
    assert ready_s[3] - start_s >= tick_s(end_s[1] - start_s, 0.2) >= 0.2
    assert ready_s[3] >= end_s[2]


def test_a_tick_ends_early_when_the_run_has_failed() -> None:
    class Failing(Pretended):
        def backward(self, buckets: Sequence[Backward], complete: Callable[[], object]) -> None:
            super().backward(buckets, complete)
            watch.failed.set()

    watch = QuietWatch()
    begin_s = time.monotonic()
    with pytest.raises(RunError, match="rank 7 failed: it rained"):
        execute(ticking(period_s=4 * TIMEOUT_S), Failing(), watch=watch)
    assert time.monotonic() - begin_s < TIMEOUT_S


@pytest.mark.parametrize("lane", [COMPUTE, COMM])
def test_kernels_run_in_the_lane_that_the_plan_says(lane: Lane) -> None:
    ops = (
        Select("grad.0", "top", "residual", 1, lane=lane),
        Merge("top", "top.1", "residual", lane=lane),
        Densify("top.1", "grad.0", lane=lane),
    )
    program = Pretended()
    execute(plan_of((STEP[0], STEP[3], *ops), world_size=2), program)
    assert {program.threads[op] for op in ops} == {lane.name}


def test_fusion_runs_in_the_comm_stream() -> None:
    ops = (Pack(("grad.0",), "fused"), AllReduce("fused", Group(2)), Unpack("fused", ("grad.0",)))
    program = Pretended()
    execute(plan_of((STEP[0], STEP[3], *ops), world_size=2), program)
    assert {program.threads[op] for op in ops} == {"comm"}


def test_an_emulated_program_holds_up_the_stream_of_an_operation() -> None:
    held: list[tuple[str, float]] = []
    ops = (
        Select("grad", "top", "residual", 1),
        Merge("top", "top.1", "residual", lane=COMM),
        Densify("top.1", "grad", lane=COMM),
        Pack(("grad",), "fused"),
        Unpack("fused", ("grad",)),
    )
    program = EmulatedProgram(
        {op: float(number) for number, op in enumerate(ops)},
        compute=lambda seconds: held.append(("compute", seconds)),
        comm=lambda seconds: held.append(("comm", seconds)),
        interrupted=threading.Event(),
    )
    for op in ops:
        program.perform(op, 0)
    assert held == [("compute", 0.0), *[("comm", float(number)) for number in (1, 2, 3, 4)]]


@both_modes
def test_a_bucket_is_reduced_while_the_backward_pass_goes_on(lanes: Lanes) -> None:
    """The second bucket can only be computed if the first all-reduce has begun, and cannot have ended."""
    began, may_end = threading.Event(), threading.Event()

    class Overlapping(Pretended):
        def backward(self, buckets: Sequence[Backward], complete: Callable[[], object]) -> None:
            assert len(buckets) == 2
            complete()
            assert began.wait(60), "the all-reduce of the first bucket did not begin during the backward pass"
            may_end.set()
            complete()

        def perform(self, op: Op, _step_or_memory: object) -> None:
            if isinstance(op, AllReduce) and op.buffer == "grad.0":
                began.set()
                assert may_end.wait(60)

    execute(plan_of(STEP, world_size=2), Overlapping(), lanes)
    assert may_end.is_set()


def test_operations_between_buckets_run_in_the_hook_of_the_bucket() -> None:
    step = (*STEP[:4], Copy("grad.0", "spare"), *STEP[5:6], STEP[7])
    program = Pretended()
    execute(plan_of(step, world_size=2), program)
    places = [program.seen.index(what) for what in ("grad.0", Copy("grad.0", "spare"), "grad.1")]
    assert places == sorted(places)
    assert len({program.threads[what] for what in ("grad.0", Copy("grad.0", "spare"), "grad.1")}) == 1


def test_a_delay_of_the_host_holds_up_what_comes_after_it_only() -> None:
    (ready_s, _, end_s), _ = execute(plan_of(STEP, world_size=2), Pretended(), delay_s=0.03)
    assert end_s[2] - ready_s[2] >= 0.03
    assert ready_s[3] >= end_s[2]
    assert ready_s[0] < ready_s[2]


def test_every_step_and_rank_is_delayed_by_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr("real.execution.executor.sleep_s", lambda seconds, interrupted: slept_s.append(seconds))
    plan, program = plan_of((Delay("host"),), (Delay("host"),), (Delay("host"),), world_size=2), Pretended()
    executor = Executor(
        plan,
        rank=1,
        delays={"host": np.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])},
        world=program,
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=IN_THREAD,
        recorder=Recorder(plan),
        watch=QuietWatch(),
    )
    executor.run()
    assert slept_s == [2.0, 4.0, 6.0]


@both_modes
@pytest.mark.parametrize("schedule", [Sync(), FSDP()], ids=lambda each: each.name)
def test_each_micro_batch_is_delayed_in_its_own_pass(
    schedule: Schedule, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is late in the second of three micro-batches, before its forward pass and before its backward pass."""
    job = Job(2, 1, 2, tensor_counts=(4,), micro_batches=3, delay_channels=frozenset({"compute", "backward"}))
    plan = schedule.plan(job)
    late_s = np.zeros((1, 2, 3, 2))
    late_s[0, 1, 1] = 3.0, 7.0
    program = Pretended()
    monkeypatch.setattr("real.execution.executor.sleep_s", lambda seconds, interrupted: program.seen.append(seconds))
    executor = Executor(
        plan,
        rank=1,
        delays={"compute": late_s, "backward": late_s / 2},
        world=program,
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=lanes,
        recorder=None,
        watch=QuietWatch(),
    )
    executor.run()
    seen = ["F" if isinstance(each, Forward) else each for each in program.seen]
    of_computing = [each for each in seen if each in ("F", "grad.0") or isinstance(each, float)]
    on_time: list[object] = [0.0, "F", 0.0, "grad.0"]
    assert of_computing == [*on_time * 4, 7.0, "F", 3.5, "grad.0", *on_time]


def test_the_host_runs_ahead_of_its_computation() -> None:
    """The second step's delay of the host begins while the first forward pass is still held up."""
    slept = threading.Event()

    def act(op: Op) -> None:
        if isinstance(op, Forward) and not slept.is_set():
            assert slept.wait(60), "the host waits for its device although the plan does not say so"

    class Sleeping(Pretended):
        def load(self, op: Load, number: int) -> None:
            slept.set()

    step = (STEP[0], Load("batch"))
    execute(plan_of(step, step, world_size=2), Sleeping(act))


@both_modes
@pytest.mark.parametrize("where", [Forward, AllReduce, Optimize, Load])
def test_an_error_in_any_lane_ends_the_run(where: type[Op], lanes: Lanes) -> None:
    def act(op: Op) -> None:
        if isinstance(op, where):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        execute(plan_of(*[(Load("batch"), *STEP)] * 3, world_size=2), Pretended(act), lanes)


@both_modes
def test_who_waits_for_a_stuck_collective_stops_when_another_rank_fails(lanes: Lanes) -> None:
    never = threading.Event()

    class Stuck(Pretended):
        def perform(self, op: Op, _step_or_memory: object) -> None:
            if isinstance(op, AllReduce):
                watch.failed.set()
                never.wait(4 * TIMEOUT_S)

    plan, program, watch = plan_of(STEP, world_size=2), Stuck(), QuietWatch()
    executor = Executor(
        plan,
        rank=0,
        delays={"host": np.zeros((1, 1, 2))},
        world=program,
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=lanes,
        recorder=Recorder(plan),
        watch=watch,
    )
    begin_s = time.monotonic()
    with pytest.raises(RunError, match="rank 7 failed: it rained"):
        executor.run()
    never.set()
    assert time.monotonic() - begin_s < TIMEOUT_S


def test_the_watch_is_told_how_far_the_collectives_are() -> None:
    _, watch = execute(plan_of(STEP, STEP, world_size=2), Pretended())
    assert watch.position == 2 * len(STEP) - 2


def test_memory_that_does_not_fit_is_refused_before_it_is_allocated() -> None:
    plan = plan_of((AllReduce("huge", Group(2)),), world_size=2, count=2**50)
    with pytest.raises(RunError, match=r"needs 4\.5e\+06 GB for its buffers; the host|has .* GB free"):
        Memory(plan, CPU, {"huge"})
