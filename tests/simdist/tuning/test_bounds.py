"""Lower bounds of time and memory hold, are sharp where nothing is exposed, and change no answer of a search."""

import pytest
from commandline import SMALL, edited
from engine_runs import alike, des, fast
from hypothesis import given
from priced_runs import runs
from random_scenarios import random_scenario
from tiers import examples

from simdist.cost import price
from simdist.errors import UnsupportedError
from simdist.plan import Plan
from simdist.plan.delays import DrawnDelays
from simdist.runs.building import build, delays
from simdist.runs.memory import least_nbytes, memory_of
from simdist.scenario import loads
from simdist.scenario.cluster import Cluster, Link
from simdist.scenario.workload import Tensor, Workload
from simdist.tuning import Constraints, Extras, TuneOptions, tune
from simdist.tuning.bounds import least_chain_step_s, least_step_s
from simdist.tuning.evaluating import finalists
from simdist.tuning.tuning import simulate_candidates

STRAGGLERS = {"kind": "transient", "on": "compute", "probability": 0.2, "delay_s": 0.02}
SLOW_LINKS = {"kind": "persistent", "on": "link", "link": "nic", "share": 0.3}
N_CHEAP = 40
WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1)
BOUNDS = (least_step_s, least_chain_step_s)
LAYERS = "".join(f"    - {{name: h.{number}.weight, count: 4000000}}\n" for number in range(3))
EXPOSED = edited(
    ("    - {name: weight, count: 100000}\n    - {name: bias, count: 1000}\n", LAYERS),
    ("bandwidth: 25 Gbit/s", "bandwidth: 2 Gbit/s"),
    ("steps: 12", "steps: 6"),
)
QUIET = edited(("disturbances:\n  - {kind: transient, probability: 10%, delay: 50 ms}\n", ""), text=EXPOSED)
SHARDINGS = Extras(only=("fsdp", "hsdp"), allow=("sharding",))


def shares_of_the_bound(number):
    """Return the bound of a random scenario as a share of its step time by each engine, as it is and disturbed."""
    scenario = random_scenario(number)
    shares = []
    for disturbances in (scenario.disturbances, [STRAGGLERS], [SLOW_LINKS]):
        its = scenario.changed(disturbances=disturbances)
        built = build(its, its.schedules[0], proves=False)
        least_s = max(bound(built.plan, built.costs) for bound in BOUNDS)
        drawn = delays(its)
        for engine, source in ((des, drawn), (fast, drawn), (alike, DrawnDelays(drawn))):
            try:
                trace = engine.simulate(built.plan, built.costs, source)
            except UnsupportedError:
                continue
            shares.append(least_s * its.steps / trace.makespan_s)
    return shares


@pytest.mark.parametrize("number", range(N_CHEAP))
def test_no_run_takes_less_than_the_bound(number):
    assert all(share <= 1 for share in shares_of_the_bound(number))


@examples(40)
@given(runs())
def test_no_run_of_a_legal_plan_takes_less_than_the_bounds(run):
    plan, costs, drawn = run
    makespan_s = des.simulate(plan, costs, drawn).makespan_s
    assert all(bound(plan, costs) * plan.n_steps <= makespan_s for bound in BOUNDS)


def test_steps_without_operations_have_a_bound():
    plan = Plan.from_steps("empty", world_size=1, buffers=(), steps=[()] * 5)
    costs = price(plan, Cluster(nodes=1, gpus_per_node=1, fabric=Link.ideal(), network=Link.ideal()), WORKLOAD)
    assert [bound(plan, costs) for bound in BOUNDS] == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize("first", range(N_CHEAP, 1000, 40))
def test_no_run_of_forty_scenarios_takes_less_than_the_bound(first):
    for number in range(first, first + 40):
        assert all(share <= 1 for share in shares_of_the_bound(number)), number


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("engine", [des, fast])
def test_bounds_are_the_time_of_a_step_that_exposes_nothing(engine, bound):
    scenario = loads(edited(("network: {latency: 25 us, bandwidth: 25 Gbit/s}", "network: ideal")))
    scenario = scenario.changed(disturbances=[], cluster=scenario.cluster.model_copy(update={"nodes": 2}))
    built = build(scenario, scenario.schedules[0])
    step_s = engine.simulate(built.plan, built.costs, {}).makespan_s / scenario.steps
    assert bound(built.plan, built.costs) == pytest.approx(step_s)


@pytest.mark.parametrize("steps", [1, 2, 3, 30])
@pytest.mark.parametrize("schedule", ["fsdp", "sync", "local-3"])
def test_a_chain_is_as_long_as_a_run_in_which_nothing_disturbs(schedule, steps):
    scenario = loads(QUIET).changed(schedules=[schedule], steps=steps)
    built = build(scenario, scenario.schedules[0])
    makespan_s = des.simulate(built.plan, built.costs, {}).makespan_s
    assert least_chain_step_s(built.plan, built.costs) * steps == pytest.approx(makespan_s)


def test_a_slow_rank_alone_makes_the_bound_longer():
    scenario = loads(SMALL).changed(disturbances=[])
    slow = scenario.changed("cluster.slow_devices", [{"ranks": [3], "speed": 0.5}])
    one, other = (build(each, each.schedules[0]) for each in (scenario, slow))
    assert least_step_s(other.plan, other.costs) > 1.9 * least_step_s(one.plan, one.costs)


def test_ranks_that_may_leave_out_a_step_have_no_bound():
    scenario = loads(SMALL).changed(schedules=[{"kind": "backup_workers", "backup": 1}])
    built = build(scenario, scenario.schedules[0])
    assert [bound(built.plan, built.costs) for bound in BOUNDS] == [0, 0]


@pytest.mark.parametrize("number", range(N_CHEAP))
def test_no_peak_of_memory_is_below_its_bound(number):
    scenario = random_scenario(number).changed("workload.activation_nbytes", 3_000_000)
    built = build(scenario, scenario.schedules[0], proves=False)
    assert least_nbytes(built.plan, scenario.workload) <= memory_of(scenario, built).peak_nbytes


def test_bound_of_memory_counts_what_stays_gathered():
    scenario = loads(QUIET).changed("workload.activation_nbytes", 1000)
    scenario = scenario.changed(schedules=["fsdp", {"kind": "fsdp", "reshard_after_forward": False}])
    built = [build(scenario, each) for each in scenario.schedules]
    given_back, kept = (least_nbytes(each.plan, scenario.workload) for each in built)
    unit_nbytes = 4 * scenario.workload.tensor_counts[0]
    assert kept - given_back == 2 * unit_nbytes  # of 3 units
    assert kept <= memory_of(scenario, built[1]).peak_nbytes < kept + unit_nbytes


@pytest.mark.parametrize(
    ("text", "constraints", "extras"),
    [
        (QUIET, Constraints(2), SHARDINGS),
        (EXPOSED, Constraints(2), SHARDINGS),
        (QUIET, Constraints(4), Extras(min_density=0.01, allow=("fp16",))),
        (EXPOSED, Constraints(2), Extras(only=("sync", "local_sgd"), micro_batches=(1, 2, 4))),
    ],
    ids=["shardings", "shardings, stragglers", "sparse", "micro-batches, stragglers"],
)
def test_finalists_are_those_of_a_search_that_simulates_all(text, constraints, extras):
    options = TuneOptions(constraints, extras, n_search_seeds=2, evaluations=500)
    whole = simulate_candidates(loads(text), options, skips=False)
    found = simulate_candidates(loads(text), options)
    assert not whole.too_slow
    assert found.too_slow
    assert len(found.too_slow) + found.n_evaluated == whole.n_evaluated
    ours, theirs = (finalists(each.evaluated, each.baseline.schedule) for each in (found, whole))
    assert [each.schedule for each in ours] == [each.schedule for each in theirs]
    assert [each.step_s for each in ours] == pytest.approx([each.step_s for each in theirs], rel=1e-10)


def test_answer_says_what_was_not_simulated_and_how_long_that_takes_at_least():
    tuned = tune(loads(QUIET), TuneOptions(Constraints(1), SHARDINGS, n_seeds=2, n_search_seeds=1, evaluations=500))
    document = tuned.document()
    n_left_out = document["not_simulated"]
    assert n_left_out == len(tuned.search.too_slow) > 0
    assert document["not_simulated_least_s"] == min(each.step_s for each in tuned.search.too_slow)
    assert document["not_simulated_least_s"] > document["rows"][0]["search_step_s"]
    n_tried = n_left_out + document["evaluated"]
    counts = f"{n_tried} plans of {document['candidates']} candidates tried"
    said = f"{counts}, {n_left_out} of them not simulated: at least "
    assert said in " ".join(tuned.text().split())
