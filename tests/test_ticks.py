"""Ticks fall where the plan says, counted from the start of the run."""

import threading
from collections.abc import Collection

import pytest
from traces import plan_of

pytest.importorskip("torch")
from real.ticks import Ticks, next_tick_s
from simdist.groups import Group
from simdist.plan import AllReduce, Backward, Plan, Tick, walk

START_S = 100.0
TICK = Tick(("grad.0", "grad.1"), 0.25)


def ticks_of(plan: Plan) -> Ticks:
    ticks = Ticks(plan, threading.Event())
    ticks.start_s = START_S
    return ticks


def due_s(plan: Plan, ended_s: Collection[float]) -> float:
    """Return when the last tick of a plan falls, if its operations before it ended then."""
    instances, ticks = list(walk(plan)), ticks_of(plan)
    for instance, at_s in zip(instances, ended_s, strict=False):
        ticks.ended(instance, lambda at_s=at_s: at_s)
    last = max((each for each in instances if isinstance(each.op, Tick)), key=lambda each: each.index)
    assert len(ended_s) == last.index
    return ticks.due_s(last.op, last.after)


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


def test_rounding_does_not_cost_a_period() -> None:
    ready_s = (0.1 + 0.2) / 0.3 * 3e-3  # a little more than three periods
    assert ready_s > 3e-3
    assert next_tick_s(ready_s, 1e-3) == 3e-3


def test_who_never_ticks_is_known() -> None:
    assert ticks_of(plan_of((*BACKWARD, TICK), world_size=2))
    assert not ticks_of(plan_of(BACKWARD, world_size=2))
