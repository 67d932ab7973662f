"""Whatever a rank does, its simulated peers do what the engines would let them do."""

import numpy as np
import pytest
from engine_runs import AllTimes, des
from hypothesis import given
from hypothesis import strategies as st
from priced_runs import runs
from random_scenarios import random_scenario
from tiers import examples

from simdist.engines.observers import WholeTrace
from simdist.engines.peers import find_peers, trace_of_rank
from simdist.engines.replay import Timing, replay, timing
from simdist.engines.run import run as run_engine
from simdist.plan import Tick
from simdist.plan.walk import drops_late
from simdist.runs.building import build, delays
from simdist.traces.peers import PeerArrivals
from simdist.traces.trace import Trace


def with_other_rank(trace: Trace, rank: int, factors: np.ndarray, late_s: np.ndarray) -> Trace:
    """Return what the engines' rules make of a trace if the operations of one rank take other times."""
    took = timing(trace)
    gaps_s = np.zeros_like(trace.end_s) if took.gaps_s is None else took.gaps_s.copy()
    durations_s = took.durations_s.copy()
    rows = find_peers(trace, rank).rows
    computes = np.setdiff1d(np.arange(trace.plan.n_instances), rows)
    durations_s[computes, rank] *= factors[computes]
    gaps_s[:, rank] += late_s
    found = AllTimes(trace.plan)
    replay(trace.plan, Timing(gaps_s, durations_s), found, n_variants=1)
    return Trace(trace.plan, *found.times_s, source="other")


def check_peers(trace: Trace, rank: int, seed: int, *, atol: float = 1e-9) -> PeerArrivals:
    """Compare what is known of a rank's peers with what they do when the rank is slower, faster, or late."""
    draw = np.random.default_rng(seed)
    n = trace.plan.n_instances
    late_s = np.where(draw.random(n) < 0.2, draw.uniform(0, trace.makespan_s / 5, n), 0.0)
    other = with_other_rank(trace, rank, draw.uniform(0, 3, n), late_s)
    found = find_peers(trace, rank)
    ends_s = np.concatenate([[0.0], other.end_s[found.rows, rank]])
    measured = np.stack([other.ready_s[:, rank], other.end_s[:, rank]])
    met = trace_of_rank(trace, rank, measured, ends_s[1:], "real")
    for number, row in enumerate(found.rows):
        expected_s = max(found.ready_s(number, ends_s), other.ready_s[row, rank])
        assert expected_s == pytest.approx(other.start_s[row, rank], abs=atol), number
    for name in ("ready_s", "start_s", "end_s"):
        ours, theirs = getattr(met, name), getattr(other, name)
        known = np.isfinite(ours)
        np.testing.assert_allclose(ours[known], theirs[known], atol=atol)
    return found


@examples(150)
@given(runs().filter(lambda run: not drops_late(run[0])), st.integers(0, 2**16))
def test_peers_of_a_rank_that_takes_other_times(run, seed) -> None:
    plan, costs, drawn = run
    if any(isinstance(op, Tick) for body in plan.bodies for op in body):
        return
    check_peers(des.simulate(plan, costs, drawn), seed % plan.world_size, seed)


@pytest.mark.parametrize("number", range(12))
def test_peers_under_every_schedule(number: int) -> None:
    scenario = random_scenario(number)
    built = build(scenario, scenario.schedules[0], proves=False)
    if drops_late(built.plan):
        return
    trace = run_engine(built.plan, built.costs, delays(scenario), observe=WholeTrace())
    check_peers(trace, number % built.plan.world_size, number)
