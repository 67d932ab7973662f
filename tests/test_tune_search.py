"""How the tuner searches, and what it makes of what it finds."""

import sys
from functools import cache

import pytest
from commandline import edited

from simdist import compare
from simdist.compare import find_baseline
from simdist.errors import ScenarioError
from simdist.scenario import loads
from simdist.tune import Constraints, Extras, Wanted, tune
from simdist.tune.evaluating import Evaluated, Evaluator
from simdist.tune.searching import search, starts
from simdist.tune.space import Space, space
from simdist.tune.verdict import WORTHWHILE, culprits

TRANSIENT = "{kind: transient, probability: 10%, delay: 50 ms}"
LONGER = ("steps: 12", "steps: 48")
FEW = {"n_seeds": 6, "n_search_seeds": 3}
GPUS_64 = """\
cluster: {preset: gcp-t4x4-32gbit, nodes: 16}
workload:
  tensors: [{name: first, count: 2000000}, {name: last, count: 2000000}]
  batch_size: 32
  forward: 18.3 ms
  backward: 36.7 ms
disturbances:
  - {kind: transient, on: host, probability: 2%, delay: 1 s}
host: {waits_for: update}
schedules:
  - kind: sync
steps: 24
"""
QUIET_64 = edited(("disturbances:\n  - {kind: transient, on: host, probability: 2%, delay: 1 s}\n", ""), text=GPUS_64)


def small(*edits):
    return loads(edited(*edits))


@cache
def tuned_small():
    return tune(small(LONGER), Wanted(Constraints(8), **FEW))


class Spy:
    """Measures, and remembers what."""

    def __init__(self):
        self.plans, self.seeds = [], []

    def __call__(self, scenario, built, n_seeds):
        self.plans.append(built.plan.digest())
        self.seeds.append(tuple(range(scenario.seed, scenario.seed + n_seeds)))
        return compare.measure(scenario, built, n_seeds=n_seeds)


@cache
def every(text: str, constraints: Constraints, extras: Extras) -> tuple[Space, dict[object, Evaluated | None]]:
    """Return the space of a scenario, and what each of its candidates achieves."""
    scenario = loads(text)
    evaluator = Evaluator(scenario, constraints, lambda its, built: compare.measure(its, built, n_seeds=1))
    found = space(scenario, constraints, extras)
    return found, {place.candidate: evaluator.evaluate(place.candidate) for place in found.places}


@pytest.mark.parametrize(
    ("text", "constraints", "extras"),
    [
        (GPUS_64, Constraints(8, ((8, 2),)), Extras()),
        (QUIET_64, Constraints(4), Extras(min_density=0.01, allows_fp16=True)),
    ],
    ids=["stragglers: hierarchical", "none: sparse"],
)
def test_a_fifth_of_the_evaluations_find_the_optimum_of_64_gpus_with_every_seed_of_the_sampler(
    text, constraints, extras
):
    found, table = every(text, constraints, extras)
    plans = {id(each): each for each in table.values() if each}.values()
    best_s = min(each.step_s for each in plans)
    assert len(plans) > 60
    for seed in range(10):
        evaluated = search(found, table.__getitem__, budget=len(plans) // 5, seed=seed)
        assert len(evaluated) <= len(plans) // 5
        assert min(each.step_s for each in evaluated) == best_s, f"seed {seed}"


def test_the_same_seed_searches_in_the_same_order_and_tries_nothing_twice():
    found, table = every(GPUS_64, Constraints(8, ((8, 2),)), Extras())

    def tried(seed):
        order = []
        search(found, lambda candidate: order.append(candidate) or table[candidate], budget=40, seed=seed)
        return order

    assert tried(3) == tried(3)
    assert tried(3) != tried(4)
    assert len(tried(3)) == len(set(tried(3)))


def test_starts_are_one_for_each_family_and_each_time_between_exchanges_of_all():
    found, _ = every(GPUS_64, Constraints(8, ((8, 2),)), Extras())
    begun = starts(found.places)
    averaging = [each.levels[-1][0] for each in begun if each.levels]
    assert sorted(averaging) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {each.kind for each in begun if not each.levels} == {"sync", "torus"}


def test_a_small_space_is_searched_in_full_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    tuned = tune(small(LONGER), Wanted(Constraints(2), **FEW))
    assert tuned.n_evaluated == tuned.n_candidates == 10


def test_a_budget_without_optuna_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ScenarioError, match=r"10 candidates .* pip install 'simdist\[tune\]'.*--exhaustive"):
        tune(small(LONGER), Wanted(Constraints(2), evaluations=5, **FEW))


def test_finalists_meet_seeds_that_the_search_has_not_seen_and_all_the_same_ones():
    spy = Spy()
    tuned = tune(small(LONGER), Wanted(Constraints(4), **FEW), measure=spy)
    searched, fresh = spy.seeds[: -len(tuned.finalists)], spy.seeds[-len(tuned.finalists) :]
    assert set(searched) == {(1, 2, 3)}
    assert set(fresh) == {(4, 5, 6, 7, 8, 9)}


def test_equal_plans_are_simulated_once():
    spy = Spy()
    tuned = tune(small(LONGER), Wanted(Constraints(4), **FEW), measure=spy)
    searched = spy.plans[: -len(tuned.finalists)]
    assert len(searched) == len(set(searched))


def test_what_breaks_a_constraint_is_not_simulated():
    spy = Spy()
    constraints = Constraints(8, max_nbytes=100_000)  # in 48 steps, periods of 7 and 8 average six times: 88,375 B
    tuned = tune(small(LONGER), Wanted(constraints, Extras(only=("local_sgd",)), **FEW), measure=spy)
    assert tuned.n_evaluated == 2
    assert tuned.excluded == {"--max-bytes '100 kB'": 6}
    assert len(set(spy.plans)) == 3  # and the baseline
    assert {each.schedule.name for each in tuned.finalists} == {"local-7", "local-8", "sync"}


def test_random_stragglers_are_worth_a_change():
    tuned = tuned_small()
    assert tuned.verdict.winner.schedule.name == "local-8"
    assert tuned.verdict.winner.row.speedup > WORTHWHILE
    low, high = tuned.verdict.winner.row.speedup_ci95
    assert tuned.verdict.sentence == (
        f"local-8 is {tuned.verdict.winner.row.speedup:.2f} ({low:.2f}-{high:.2f}) times as fast as sync"
    )


def test_groups_that_have_to_exchange_more_often_make_it_hierarchical():
    tuned = tune(small(LONGER), Wanted(Constraints(8, ((4, 2),)), **FEW))
    assert tuned.verdict.sentence.startswith("hierarchical_sgd {2: 4, ")
    assert all(len(each.facts.group_sizes) == 48 for each in tuned.finalists)


def test_finalists_are_ordered_and_the_front_falls():
    tuned = tuned_small()
    assert [each.row.step_s for each in tuned.finalists] == sorted(each.row.step_s for each in tuned.finalists)
    shown = sorted((each for each in tuned.finalists if each.on_front), key=lambda each: each.facts.global_gap)
    assert shown[0].facts.global_gap == 1
    assert shown[-1].schedule.name == "local-8"
    assert [each.row.step_s for each in shown] == sorted((each.row.step_s for each in shown), reverse=True)
    assert {each.schedule.kind for each in tuned.finalists} == {"sync", "torus", "local_sgd", "hierarchical_sgd"}


def test_a_persistent_straggler_is_a_reason_to_stay():
    slow = small(LONGER, (TRANSIENT, "{kind: persistent, on: compute, ranks: [5], factor: 1.5}"))
    tuned = tune(slow, Wanted(Constraints(8), **FEW))
    assert tuned.verdict.winner is None
    assert tuned.verdict.sentence == "stay with sync"
    (reason,) = (each for each in tuned.verdict.reasons if "straggler" in each)
    assert reason.startswith("a persistent straggler, rank 5: 100% of the waiting is for it, in 100% of the steps")


def test_without_stragglers_and_with_a_fast_network_the_shares_of_a_step_are_the_reason():
    quiet = small(LONGER, (f"disturbances:\n  - {TRANSIENT}\n", ""))
    tuned = tune(quiet, Wanted(Constraints(8), **FEW))
    assert tuned.verdict.winner is None
    assert not any("straggler" in each for each in tuned.verdict.reasons)
    assert tuned.verdict.reasons[-1].startswith("of a step of sync, computing is 99")


def test_random_stragglers_are_no_culprits():
    scenario = small(LONGER)
    assert culprits(scenario, find_baseline(scenario, "sync")) is None


def test_a_rank_that_is_late_now_and_then_is_no_persistent_straggler():
    now_and_then = small(LONGER, (TRANSIENT, "{kind: transient, ranks: [5], probability: 40%, delay: 50 ms}"))
    assert culprits(now_and_then, find_baseline(now_and_then, "sync")) is None


def test_a_persistent_straggler_is_the_same_with_a_schedule_that_seldom_synchronises():
    slow = small(LONGER, (TRANSIENT, "{kind: persistent, on: compute, ranks: [5], delay: 10 ms}"))
    for schedule in slow.schedules[:2]:
        found = culprits(slow, schedule)
        assert (found.ranks, found.share, found.steps) == ((5,), pytest.approx(1), 1)
        assert found.waited_s == pytest.approx(10e-3 * 7 / 8)  # of 8 ranks, 7 wait


def test_nothing_left_names_the_constraint_that_excluded_most():
    constraints = Constraints(8, ((4, 2),), max_nbytes=1000)
    with pytest.raises(
        ScenarioError, match=r"--max-bytes '1 kB' excludes most, \d+ candidates \(--group-every 4:2 \d+"
    ):
        tune(small(LONGER), Wanted(constraints, **FEW))


def test_a_baseline_that_breaks_a_constraint_is_compared_with_all_the_same():
    tuned = tune(small(LONGER), Wanted(Constraints(4, max_nbytes=400_000), **FEW))
    assert tuned.verdict.reasons[0] == "sync itself breaks --max-bytes '400 kB'"
    assert sum(each.is_baseline for each in tuned.finalists) == 1
    assert all(each.facts.sent_nbytes <= 400_000 for each in tuned.finalists if not each.is_baseline)


def test_a_scenario_without_sync_is_compared_with_it_as_it_is_by_default():
    scenario = small(LONGER).changed(schedules=[{"kind": "local_sgd", "period": 4}])
    tuned = tune(scenario, Wanted(Constraints(2), **FEW))
    assert [each.schedule.name for each in tuned.finalists if each.is_baseline] == ["sync"]
    with pytest.raises(ScenarioError, match="no schedule is called 'torus'"):
        tune(scenario, Wanted(Constraints(2), baseline="torus", **FEW))


def test_tuning_twice_says_the_same():
    wanted = Wanted(Constraints(4), evaluations=15, **FEW)
    one, other = (tune(small(LONGER), wanted) for _ in range(2))
    assert one.verdict.sentence == other.verdict.sentence
    assert [each.row for each in one.finalists] == [each.row for each in other.finalists]
