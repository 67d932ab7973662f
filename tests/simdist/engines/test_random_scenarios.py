"""Each engine that does not refuse a random scenario computes what the reference computes, and none goes on forever."""

import numpy as np
import pytest
from engine_runs import alike, des, fast
from random_scenarios import random_scenario
from timeouts import within_cpu_s

from simdist.errors import UnsupportedError
from simdist.plan.delays import DrawnDelays
from simdist.runs.building import build, delays

ARRAYS = ("ready_s", "start_s", "end_s")
LIMIT_S = 60.0  # a scenario takes 0.05 s of CPU time; numba, which may have to compile, ten seconds
REMAINDERS = (1043, 1283, 1865)  # rounding left a transfer with less than no bytes, and it never ended
N_CHEAP = 30
KINDS = {
    *("sync", "torus", "parameter_server", "naive_ag", "hitopk", "gtopk", "powersgd", "backup_workers"),
    *("fsdp", "hsdp", "local_sgd", "hierarchical_sgd", "diloco"),
}


def engines_agree(number):
    scenario = random_scenario(number)
    built = build(scenario, scenario.schedules[0], proves=False)
    drawn = delays(scenario)
    reference = des.simulate(built.plan, built.costs, drawn)
    for name, simulate, source in (("fast", fast.simulate, drawn), ("alike", alike.simulate, DrawnDelays(drawn))):
        try:
            trace = simulate(built.plan, built.costs, source)
        except UnsupportedError:
            continue
        for array in ARRAYS:
            np.testing.assert_allclose(
                getattr(trace, array),
                getattr(reference, array),
                rtol=0,
                atol=1e-12 * reference.makespan_s,
                err_msg=f"scenario {number}, {name}, {array}",
            )


def test_every_wiring_and_schedule_is_drawn():
    """A draw that is never valid is drawn again, so another kind of scenario would take its place unseen."""
    scenarios = [random_scenario(number) for number in range(45)]
    topologies = [each.cluster.topology for each in scenarios]
    assert any(each.rails for each in topologies)
    assert any(each.leaf for each in topologies)
    assert any(each.nodes_per_domain > 1 for each in topologies)
    assert any(np.isfinite(each.host_bridge_Bps) for each in topologies)
    assert any(each.cluster.collectives.library == "gloo" for each in scenarios)
    assert {each.schedules[0].kind for each in scenarios} == KINDS


@pytest.mark.parametrize("number", [*range(N_CHEAP), *REMAINDERS])
def test_engines_agree_on_a_random_scenario(number):
    with within_cpu_s(LIMIT_S):
        engines_agree(number)


@pytest.mark.full
@pytest.mark.parametrize("first", range(N_CHEAP, 2000, 50))
def test_engines_agree_on_fifty_random_scenarios(first):
    for number in range(first, min(first + 50, 2000)):
        with within_cpu_s(LIMIT_S):
            engines_agree(number)
