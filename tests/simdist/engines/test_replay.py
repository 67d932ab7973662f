"""A replay with a trace's own durations gives the trace back; with others, what the rules of a plan say."""

import numpy as np
import pytest
from engine_runs import AllTimes, des, fast
from hypothesis import given
from priced_runs import runs
from tiers import examples
from traces import STEP, plan_of, trace_of, two_steps

from simdist.engines.recurrence import Durations
from simdist.engines.replay import Timing, replay, replayed_step_end_s, timing
from simdist.errors import TraceError, UnsupportedError
from simdist.plan import AllReduce, Plan
from simdist.plan.group import Group
from simdist.plan.walk import drops_late
from simdist.runs.building import build, delays
from simdist.scenario import load
from simdist.scenario.presets import path as preset_path
from simdist.traces.trace import Trace
from simdist.traces.waiting import step_end_s as traced_step_end_s

ARRAYS = ("ready_s", "start_s", "end_s")


def replayed_trace(trace: Trace, durations: Durations) -> Trace:
    """Return the trace of the same plan with other durations, of which there is one variant."""
    found = AllTimes(trace.plan)
    replay(trace.plan, durations, found, n_variants=1)
    return Trace(trace.plan, *found.times_s, source="replayed")


def assert_same(found: Trace, expected: Trace) -> None:
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


@examples(150)
@given(runs().filter(lambda run: not drops_late(run[0])))
def test_a_simulated_trace_is_replayed_as_it_was(run) -> None:
    plan, costs, drawn = run
    trace = des.simulate(plan, costs, drawn)
    assert_same(replayed_trace(trace, timing(trace)), trace)


@examples(60)
@given(runs().filter(lambda run: not drops_late(run[0])))
def test_step_ends_of_a_replay_are_those_of_the_trace(run) -> None:
    plan, costs, drawn = run
    try:
        trace = fast.simulate(plan, costs, drawn)
    except UnsupportedError:
        trace = des.simulate(plan, costs, drawn)
    expected = traced_step_end_s(trace).max(axis=1)
    np.testing.assert_allclose(
        replayed_step_end_s(plan, timing(trace), n_variants=1)[:, 0], expected, rtol=1e-12, atol=1e-12
    )


def test_a_long_simulation_has_no_gaps_and_is_replayed_as_it_was() -> None:
    scenario = load(preset_path("scenarios", "cloud-stragglers")).changed(steps=60)
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        trace = fast.simulate(built.plan, built.costs, delays(scenario))
        found = timing(trace)
        assert found.gaps_s is None
        assert_same(replayed_trace(trace, found), trace)


def test_a_collective_lasts_from_its_last_member_and_a_gap_is_what_nothing_explains() -> None:
    found = timing(two_steps())
    assert found.durations_s.tolist() == [[1, 1], [1, 3], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1]]
    assert found.gaps_s is not None
    assert np.argwhere(found.gaps_s).tolist() == [[4, 1]]
    assert found.gaps_s[4, 1] == 1
    assert_same(replayed_trace(two_steps(), found), two_steps())


def test_without_its_slow_backward_pass_and_its_late_start_nobody_waits() -> None:
    trace = two_steps()
    ideal = Timing(None, np.ones_like(trace.end_s))
    replayed = replayed_trace(trace, ideal)
    assert replayed.makespan_s == 8
    assert (replayed.ready_s == replayed.start_s).all()


def test_variants_do_not_touch_each_other() -> None:
    trace = two_steps()
    found = timing(trace)

    class Scaled:
        def gap_s(self, index: int) -> None:
            return None

        def seconds(self, index: int) -> np.ndarray:
            return found.durations_s[index, :, None] * np.array([1.0, 0.0, 2.0])

    assert replayed_step_end_s(trace.plan, Scaled(), n_variants=3).tolist() == [[6, 0, 12], [10, 0, 20]]


def test_members_of_a_collective_may_end_apart_as_on_real_machines() -> None:
    plan = plan_of((AllReduce("grad", Group(2)),), world_size=2)
    trace = trace_of(plan, [([0, 1], 1, [3, 2])])
    assert timing(trace).durations_s.tolist() == [[2, 1]]
    assert_same(replayed_trace(trace, timing(trace)), trace)


def test_times_that_clocks_contradict_give_no_negative_durations() -> None:
    plan = plan_of(STEP, world_size=2)
    trace = trace_of(plan, [(0, 0, 1), (0.5, 0.5, 2), (2, 2, 3), (2.5, 2.5, 2.4)])
    found = timing(trace)
    assert found.gaps_s is None
    assert (found.durations_s >= 0).all()


def test_an_operation_that_did_not_run_is_named() -> None:
    trace = two_steps()
    trace.end_s[5, 1] = np.nan
    with pytest.raises(TraceError, match=r"1 operations did not run, the first of them on rank 1: only complete steps"):
        timing(trace)


def test_a_long_run_of_equal_steps_takes_so_many_times_as_long() -> None:
    plan: Plan = plan_of(*[STEP] * 500, world_size=2)
    ones = Timing(None, np.ones((plan.n_instances, 2)))
    assert replayed_step_end_s(plan, ones, n_variants=1)[-1, 0] == 2000
