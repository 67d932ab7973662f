"""Ticks fall where the plan says, counted from the start of the run."""

import dataclasses
import threading
from collections.abc import Collection, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from pretended import Pretended, execute
from traces import plan_of

pytest.importorskip("torch")
from engine_runs import fast

from real.collectives.worlds import check_order_of_issue
from real.execution.ticks import Ticks
from real.recording.timing import now_s
from real.session import open_session
from simdist.cost import Costs, Local, price
from simdist.errors import RunError
from simdist.plan import AllReduce, Backward, Delay, Instance, Plan, Tick, Wait
from simdist.plan.group import Group
from simdist.plan.lanes import AVERAGE
from simdist.plan.ops import tick_s
from simdist.plan.walk import walk
from simdist.scenario.cluster import Cluster, Link
from simdist.scenario.workload import Tensor, Workload

START_S = 100.0
TICK = Tick(("grad.0", "grad.1"), 0.25)


def ticks_of(plan: Plan, start_s: float = START_S) -> Ticks:
    ticks = Ticks(plan, threading.Event())
    ticks.start_s = start_s
    return ticks


def all_due_s(plan: Plan, ended_s: Collection[float], start_s: float = START_S) -> Iterator[tuple[Instance, float]]:
    """Yield the ticks of a plan and when they fall, if its instances end then; the host runs ahead of all ticks."""
    instances, ticks = list(walk(plan)), ticks_of(plan, start_s)
    for instance, at_s in zip(instances, ended_s, strict=True):
        if isinstance(instance.op, Tick):
            ticks.submitted(instance)
        elif instance.lane.kind == "host":
            ticks.ended(instance, lambda at_s=at_s: at_s)
    for instance, at_s in zip(instances, ended_s, strict=True):
        if isinstance(instance.op, Tick):
            yield instance, ticks.due_s(instance)
        elif instance.lane.kind != "host":
            ticks.ended(instance, lambda at_s=at_s: at_s)


def due_s(plan: Plan, ended_s: Collection[float]) -> float:
    """Return when the last operation of a plan falls, a tick, if those before it ended then."""
    return list(all_due_s(plan, [*ended_s, np.nan]))[-1][1]


BACKWARD = (Backward(("param",), "grad.0"), Backward(("param",), "grad.1"))


@pytest.mark.parametrize(
    ("ended_s", "expected"),
    [((100.01, 100.02), 100.25), ((100.01, 100.26), 100.5), ((100.0, 100.25), 100.25), ((100.0, 100.0), 100.0)],
)
def test_a_tick_is_the_first_one_after_all_data_was_written(ended_s: tuple[float, float], expected: float) -> None:
    assert due_s(plan_of((*BACKWARD, TICK), world_size=2), ended_s) == expected


def test_what_else_took_time_does_not_count() -> None:
    step = (*BACKWARD, AllReduce("other", Group(2)), TICK)
    assert due_s(plan_of(step, world_size=2), (100.01, 100.02, 107.0)) == 100.25


def test_what_the_comm_stream_has_waited_for_before_needs_no_tick() -> None:
    step = (*BACKWARD, AllReduce("grad.1", Group(2)), TICK)
    assert due_s(plan_of(step, world_size=2), (100.01, 100.02, 100.3)) == START_S


def test_the_newest_data_counts() -> None:
    step = (*BACKWARD, TICK)
    assert due_s(plan_of(step, step, world_size=2), (100.01, 100.02, 100.25, 101.1, 101.2)) == 101.25


def test_what_the_host_has_waited_for_before_it_asked_counts() -> None:
    step = (*BACKWARD, Wait("grad.1"), TICK)
    assert due_s(plan_of(step, world_size=2), (100.01, 100.02, 100.3)) == 100.5


def test_rounding_does_not_cost_a_period() -> None:
    ready_s = (0.1 + 0.2) / 0.3 * 0.75  # a little more than three periods
    assert ready_s > 0.75
    plan = plan_of((*BACKWARD, TICK), world_size=2)
    assert [at_s for _, at_s in all_due_s(plan, (0.0, ready_s, np.nan), start_s=0.0)] == [ready_s]


NETWORK = Link(latency_s=0.15, bandwidth_Bps=np.inf)
WORKLOAD = Workload(tensors=(Tensor(name="weight", count=1),), batch_size=1, forward_s=1.0, backward_s=1.0)
REDUCE = AllReduce("grad.1", Group(2))
PLANS = {
    "of data": [(*BACKWARD, TICK)] * 3,
    "of what the host has waited for": [(Backward(("param",), "grad.1"), Wait("grad.1"), TICK, REDUCE)] * 3,
    "of what the host was late for": [(*BACKWARD, Delay("host"), TICK, REDUCE)] * 3,
    "of what was waited for before": [(*BACKWARD, REDUCE, TICK, AllReduce("grad.0", Group(2)), TICK)] * 3,
    "of a stream that is busy": [(BACKWARD[0], AllReduce("grad.0", Group(2)), BACKWARD[1], TICK, REDUCE)] * 3,
    "of nothing new": [(TICK, TICK), (*BACKWARD, TICK, TICK)],
}


def costs_of(plan: Plan) -> Costs:
    """Return costs at which rank 1 computes longer, and all-reduces take 0.3 s."""
    costs = price(plan, Cluster(nodes=2, gpus_per_node=1, fabric=Link.ideal(), network=NETWORK), WORKLOAD)
    computed = {op: Local(np.array([0.125, 0.21])) for op in costs.of if isinstance(op, Backward)}
    return dataclasses.replace(costs, of={**costs.of, **computed})


@pytest.mark.parametrize("steps", PLANS.values(), ids=PLANS)
def test_ticks_fall_as_in_the_simulation(steps: list[tuple]) -> None:
    """To the last bit, on every rank; operations take so long that some end at a tick, and ranks differ."""
    plan = plan_of(*steps, world_size=2)
    delays = {"host": np.array([[[0.3, 0.01]] * plan.n_steps])}
    trace = fast.simulate(plan, costs_of(plan), delays)
    for rank in range(2):
        for instance, at_s in all_due_s(plan, trace.end_s[:, rank], start_s=0.0):
            assert trace.end_s[instance.index, rank] == max(trace.ready_s[instance.index, rank], at_s)


def test_a_run_waits_for_the_tick_after_what_the_host_has_waited_for() -> None:
    """As in the simulation: of a gradient that the comm stream knows already, and a host that is late."""
    step = (BACKWARD[1], AllReduce("grad.1", Group(1)), Delay("host"), Tick(("grad.1",), 0.1))
    plan = plan_of(step, world_size=1)
    start_s = now_s() - 0.07  # the host is late for the tick after this
    (_, _, end_s), _ = execute(plan, Pretended(), delay_s=0.04, start_s=start_s)
    due_s = start_s + float(tick_s(end_s[2] - start_s, 0.1))
    assert end_s[3] >= due_s


def test_who_never_ticks_is_known() -> None:
    assert ticks_of(plan_of((*BACKWARD, TICK), world_size=2))
    assert not ticks_of(plan_of(BACKWARD, world_size=2))


def test_nccl_is_not_given_collectives_of_two_streams_by_threads_that_take_turns_by_chance() -> None:
    everyone = Group(2)
    one_stream = (*BACKWARD, TICK, AllReduce("grad.0", everyone))
    two_streams = (*one_stream, AllReduce("param", everyone, lane=AVERAGE))
    alone = (*one_stream, AllReduce("param", Group(1), lane=AVERAGE))
    without_ticks = tuple(op for op in two_streams if op is not TICK)
    for step in (one_stream, alone, without_ticks):
        check_order_of_issue(plan_of(step, world_size=2), "nccl")
    check_order_of_issue(plan_of(two_streams, world_size=2), "gloo")
    over_nccl = SimpleNamespace(backend="nccl")
    with pytest.raises(RunError, match="has ticks, and collectives on the streams comm and average: threads would"):
        open_session(over_nccl, plan_of(two_streams, world_size=2), {}, buffers=())
