"""How the tuner searches, and what it makes of what it finds."""

import sys
from functools import cache

import numpy as np
import pytest
from commandline import edited

from simdist.cost import compute_s
from simdist.errors import ScenarioError
from simdist.runs.building import build
from simdist.scenario import loads
from simdist.scenario.sampling import run_seeds
from simdist.schedules import LocalSGD, Sync
from simdist.stragglers import find_gains
from simdist.studies import measuring
from simdist.studies.comparison import find_baseline
from simdist.studies.resampling import WORTHWHILE, Runs
from simdist.tuning import Constraints, Extras, TuneOptions, tune, verdict
from simdist.tuning.evaluating import Evaluated, Evaluator
from simdist.tuning.searching import search, starts
from simdist.tuning.space import Space, space
from simdist.tuning.tuning import simulate_candidates
from simdist.tuning.verdict import culprits

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
    return tune(small(LONGER), TuneOptions(Constraints(8), **FEW))


@pytest.fixture
def measured(monkeypatch):
    """What is simulated, in order: the plan, and the seeds."""
    found = []

    def spied(simulate):
        def spy(scenario, built, *, n_seeds):
            found.append((built.plan.digest(), tuple(run_seeds(scenario.seed, n_seeds))))
            return simulate(scenario, built, n_seeds=n_seeds)

        return spy

    for name in ("measure", "step_times_s"):
        monkeypatch.setattr(measuring, name, spied(getattr(measuring, name)))
    return found


def unknown(candidate):
    """Return no bound of a candidate's time."""
    return 0.0


@cache
def every(text: str, constraints: Constraints, extras: Extras) -> tuple[Space, dict[object, Evaluated | None]]:
    """Return the space of a scenario, and what each of its candidates achieves."""
    scenario = loads(text)
    evaluator = Evaluator(
        Runs(scenario, None, constraints.global_every),
        constraints,
        lambda its, built: measuring.step_times_s(its, built, n_seeds=1),
    )
    found = space(scenario, constraints, extras)
    return found, {each: evaluator.evaluate(each) for each in found.candidates}


@pytest.mark.parametrize(
    ("text", "constraints", "extras"),
    [
        (GPUS_64, Constraints(8, ((8, 2),)), Extras()),
        (QUIET_64, Constraints(4), Extras(min_density=0.01, allow=("fp16",))),
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
        evaluated = search(found, table.__getitem__, least_s=unknown, budget=len(plans) // 5, seed=seed)
        assert len(evaluated) <= len(plans) // 5
        assert min(each.step_s for each in evaluated) == best_s, f"seed {seed}"


def test_gradients_are_dropped_only_if_they_may_be():
    with pytest.raises(ScenarioError, match=r"--only backup_workers: .* --allow backup"):
        Extras(only=("backup_workers",)).kinds()
    assert [kind for kind in Extras(allow=("backup",)).kinds() if kind not in Extras().kinds()] == ["backup_workers"]


def test_the_same_seed_searches_in_the_same_order_and_tries_nothing_twice():
    found, table = every(GPUS_64, Constraints(8, ((8, 2),)), Extras())

    def tried(seed):
        order = []
        search(
            found,
            lambda candidate: order.append(candidate) or table[candidate],
            least_s=unknown,
            budget=40,
            seed=seed,
        )
        return order

    assert tried(3) == tried(3)
    assert tried(3) != tried(4)
    assert len(tried(3)) == len(set(tried(3)))


def test_starts_are_one_for_each_family_and_each_time_between_exchanges_of_all():
    found, _ = every(GPUS_64, Constraints(8, ((8, 2),)), Extras())
    begun = starts(found.candidates)
    averaging = [each.levels[-1][0] for each in begun if each.levels]
    assert sorted(averaging) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {each.kind for each in begun if not each.levels} == {"sync", "torus"}


def test_a_small_space_is_searched_in_full_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    tuned = tune(small(LONGER), TuneOptions(Constraints(2), **FEW))
    assert tuned.search.n_evaluated == tuned.search.n_candidates == 10


def test_a_budget_without_optuna_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ScenarioError, match=r"10 candidates .* pip install .*\[tune\].*--evaluations 10 to try"):
        tune(small(LONGER), TuneOptions(Constraints(2), evaluations=5, **FEW))


def test_finalists_meet_seeds_that_the_search_has_not_seen_and_all_the_same_ones(measured):
    tuned = tune(small(LONGER), TuneOptions(Constraints(4), **FEW))
    seeds = [seeds for _, seeds in measured]
    searched, fresh = seeds[: -len(tuned.finalists)], seeds[-len(tuned.finalists) :]
    assert set(searched) == {tuple(run_seeds(1, 3))}
    assert set(fresh) == {tuple(run_seeds(*run_seeds(1, 1, first=3), 6))}
    assert not set(*searched[:1]) & set(*fresh[:1])


def test_equal_plans_are_simulated_once(measured):
    tuned = tune(small(LONGER), TuneOptions(Constraints(4), **FEW))
    searched = measured[: -len(tuned.finalists)]
    assert len(searched) == len(set(searched))


SHARDED = edited(
    ("steps: 12", "steps: 24"),
    (
        "    - {name: weight, count: 100000}\n    - {name: bias, count: 1000}\n",
        "".join(f"    - {{name: h.{number}.weight, count: 100000}}\n" for number in range(4)),
    ),
)


def test_shardings_that_take_the_same_course_are_simulated_once_and_would_take_the_same_times():
    scenario = loads(SHARDED)
    extras = Extras(only=("fsdp", "hsdp"), allow=("sharding",))
    found = space(scenario, Constraints(4), extras)
    timed = []

    def times_s(its, built):
        timed.append(built.schedule.name)
        return measuring.step_times_s(its, built, n_seeds=3)

    evaluator = Evaluator(Runs(scenario, None, 4), Constraints(4), times_s)
    evaluated = [evaluator.evaluate(each) for each in found.candidates]
    n_twins = 0
    for each in evaluated:
        if each.schedule.name not in timed:
            n_twins += 1
            its = each.scenario(Runs(scenario, None, 4))
            alone_s = measuring.step_times_s(its, build(its, each.schedule), n_seeds=3)
            np.testing.assert_allclose(each.times_s, alone_s, rtol=1e-9)
    assert n_twins > 3
    assert len({id(each) for each in evaluated}) > len(timed)


def test_of_finalists_with_the_same_times_the_one_nearest_to_the_baseline_is_shown():
    scenario = loads(SHARDED).changed(schedules=["fsdp"])
    extras = Extras(only=("fsdp",), allow=("sharding",))
    tuned = tune(scenario, TuneOptions(Constraints(1), extras, n_seeds=2, n_search_seeds=1))
    times_s = [each.search_step_s for each in tuned.finalists]
    assert len(set(times_s)) == len(times_s)
    assert len(times_s) < tuned.search.n_evaluated


def test_what_breaks_a_constraint_is_not_simulated(measured):
    constraints = Constraints(8, max_nbytes=100_000)  # 88,375 B with a period of 8, 101,000 B with one of 7
    tuned = tune(small(LONGER), TuneOptions(constraints, Extras(only=("local_sgd",)), **FEW))
    assert tuned.search.n_evaluated == 1
    assert tuned.search.excluded == {"--max-bytes '100 kB'": 7}
    assert len({plan for plan, _ in measured}) == 2  # and the baseline
    assert {each.schedule.name for each in tuned.finalists} == {"local-8", "sync"}


def test_random_stragglers_are_worth_a_change():
    tuned = tuned_small()
    assert tuned.verdict.winner.schedule.name == "local-8"
    assert tuned.verdict.winner.row.speedup > WORTHWHILE
    low, high = tuned.verdict.winner.row.speedup_ci95
    assert tuned.verdict.sentence == (
        f"local-8 is {tuned.verdict.winner.row.speedup:.2f} ({low:.2f}-{high:.2f}) times as fast as sync"
    )


def test_groups_that_have_to_exchange_more_often_make_it_hierarchical():
    tuned = tune(small(LONGER), TuneOptions(Constraints(8, ((4, 2),)), **FEW))
    assert tuned.verdict.sentence.startswith("hierarchical_sgd {2: 4, ")
    assert all(len(each.facts.group_sizes) in range(80, 88) for each in tuned.finalists)


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
    tuned = tune(slow, TuneOptions(Constraints(8), **FEW))
    assert tuned.verdict.winner is None
    assert tuned.verdict.sentence == "stay with sync"
    (reason,) = (each for each in tuned.verdict.reasons if "straggler" in each)
    assert reason.startswith("a persistent straggler, rank 5: 100% of the waiting is for it, in 100% of the steps")


def test_steps_of_several_micro_batches_are_compared_per_micro_batch():
    """A step of k passes has k times their computing, and exchanges and updates once."""
    quiet = small((f"disturbances:\n  - {TRANSIENT}\n", ""))
    tuned = tune(quiet, TuneOptions(Constraints(1), Extras(only=("sync",), micro_batches=(1, 4)), **FEW))
    (four, one) = tuned.finalists
    assert (one.schedule.name, one.micro_batches) == ("sync", 1)
    assert (four.schedule.name, four.micro_batches) == ("sync-one-bucket-mb4", 4)
    pass_s = float(compute_s(quiet.workload, quiet.cluster)[0])
    assert 4 * four.row.step_s == pytest.approx(one.row.step_s + 3 * pass_s)
    assert four.row.speedup == pytest.approx(one.row.step_s / four.row.step_s)
    assert 4 * four.row.comm_s == pytest.approx(one.row.comm_s)


def test_without_stragglers_and_with_a_fast_network_the_shares_of_a_step_are_the_reason():
    quiet = small(LONGER, (f"disturbances:\n  - {TRANSIENT}\n", ""))
    tuned = tune(quiet, TuneOptions(Constraints(8), **FEW))
    assert tuned.verdict.winner is None
    assert not any("straggler" in each for each in tuned.verdict.reasons)
    assert tuned.verdict.reasons[-1].startswith("of a step of sync, computing is 99")


LOADING = """\
cluster:
  nodes: 1
  gpus_per_node: 2
  fabric: ideal
  network: ideal
  storage: {latency: 30 ms, bandwidth: unlimited}
workload: {tensors: [{name: w, count: 1000}], batch_size: 8, sample_size: 1 B, forward: 10 ms, backward: 20 ms}
steps: 40
input: {source: storage, prefetch: 1}
schedules: [{kind: sync}]
"""


def test_of_candidates_that_are_as_fast_the_one_that_changes_least_is_proposed():
    winner = tune(loads(LOADING), TuneOptions(Constraints(8), **FEW)).verdict.winner
    settings = winner.schedule.model_dump(exclude_defaults=True)
    # averaging seldom gains 0.1 % beside loading ahead
    assert (winner.schedule.kind, settings["input"]["prefetch"]) == ("sync", 2)


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


def test_ranks_that_cannot_differ_are_not_traced_for_culprits(monkeypatch):
    monkeypatch.setattr(verdict, "simulate", None)
    scenario = small(LONGER, (f"disturbances:\n  - {TRANSIENT}\n", ""))
    assert culprits(scenario, find_baseline(scenario, "sync")) is None


def test_a_scenario_is_compared_with_its_first_schedule_and_with_sync_if_one_says_so():
    scenario = small(LONGER).changed(schedules=[{"kind": "local_sgd", "period": 4}])
    for baseline, name in ((None, "local-4"), ("sync", "sync")):
        tuned = tune(scenario, TuneOptions(Constraints(2), Extras(only=("local_sgd",)), baseline=baseline, **FEW))
        assert [each.schedule.name for each in tuned.finalists if each.is_baseline] == [name]
    with pytest.raises(ScenarioError, match="no schedule is called 'torus'"):
        tune(scenario, TuneOptions(Constraints(2), baseline="torus", **FEW))


def test_tuning_twice_says_the_same():
    wanted = TuneOptions(Constraints(4), evaluations=15, **FEW)
    one, other = (tune(small(LONGER), wanted) for _ in range(2))
    assert one.verdict.sentence == other.verdict.sentence
    assert [each.row for each in one.finalists] == [each.row for each in other.finalists]


def recorded(folder, n_steps, *, late_s=0.05):
    """Return a scenario that plays a recording of pauses."""
    np.savez(folder / "late.npz", np.where(np.random.default_rng(0).random((n_steps, 8)) < 0.1, late_s, 0.0))
    return small().changed(
        disturbances=[{"kind": "recorded", "on": "host", "file": str(folder / "late.npz")}], steps=12
    )


def test_more_seeds_do_not_make_a_recording_longer(tmp_path):
    """Of a model that is drawn, the interval of the mean gets narrower; of a recording it stays."""
    constraints, extras = Constraints(4), Extras(only=("local_sgd",))
    widths = {}
    for name, scenario in (("recorded", recorded(tmp_path, 60)), ("drawn", small(LONGER))):
        for n_seeds in (20, 160):
            tuned = tune(scenario, TuneOptions(constraints, extras, n_seeds=n_seeds, n_search_seeds=1))
            low, high = tuned.finalists[0].row.speedup_ci95
            widths[name, n_seeds] = high - low
    assert widths["recorded", 160] == pytest.approx(widths["recorded", 20], rel=0.35)
    assert widths["drawn", 160] < 0.5 * widths["drawn", 20]


def test_intervals_are_about_those_of_the_analysis_of_stragglers(tmp_path):
    scenario = recorded(tmp_path, 60)
    tuned = tune(scenario, TuneOptions(Constraints(4), Extras(only=("local_sgd",)), n_seeds=200, n_search_seeds=1))
    (row,) = (each.row for each in tuned.finalists if each.row.schedule == "local-4")
    (other,) = find_gains(scenario, [LocalSGD(period=4)], baseline=Sync(), n_runs=200).rows
    assert row.speedup == pytest.approx(other.speedup, rel=0.01)
    low, high = row.speedup_ci95
    assert high - low == pytest.approx(other.interval[1] - other.interval[0], rel=0.2)


def test_what_a_recording_is_too_short_for_is_not_proposed_but_told(tmp_path):
    scenario = recorded(tmp_path, 20).changed(steps=20)
    tuned = tune(scenario, TuneOptions(Constraints(16), Extras(only=("local_sgd",)), **FEW))
    (long,) = (each for each in tuned.finalists if each.schedule.name == "local-16")
    assert long.row.speedup_ci95 is None
    assert long.problem == "20 recorded steps are too few to be sure with a period of 16 steps: record 32 or more"
    assert tuned.verdict.best is long
    assert tuned.verdict.winner is not long
    assert any(long.problem in reason for reason in tuned.verdict.reasons)


def test_a_run_is_as_long_as_ten_periods_take():
    tuned = tune(small(), TuneOptions(Constraints(12), Extras(only=("local_sgd",)), **FEW))
    assert "local-12" in {each.schedule.name for each in tuned.finalists}
    assert tuned.runs.scenario.steps == 120


@pytest.mark.parametrize("global_every", [13, 1000, 2**63])
def test_exchanges_further_apart_than_the_scenario_has_steps_are_refused(global_every):
    with pytest.raises(ScenarioError, match=rf"--global-every {global_every}: .* 12 steps.*write 12 or less"):
        tune(small(), TuneOptions(Constraints(global_every), **FEW))


def test_too_few_seeds_are_not_nothing_to_gain():
    """With a rare and long pause, two seeds cannot tell; with a steady job, nothing gains, and that is sure."""
    rare = small((TRANSIENT, "{kind: transient, probability: 1%, delay: 200 ms}")).changed(seed=2)
    only = Extras(only=("local_sgd",))
    unsure = tune(rare, TuneOptions(Constraints(2), only, n_seeds=2, n_search_seeds=1)).verdict
    assert (unsure.winner, unsure.outcome) == (None, "unsure")
    assert unsure.sentence == "stay with sync until something is surely faster"
    assert "2 seeds are too few to be sure of that: write more with --seeds" in unsure.reasons
    quiet = small((f"disturbances:\n  - {TRANSIENT}\n", ""))
    steady = tune(quiet, TuneOptions(Constraints(2), only, n_seeds=2, n_search_seeds=1)).verdict
    assert (steady.sentence, steady.outcome) == ("stay with sync", "stay")


def test_nobody_is_called_late_in_every_step_of_a_few(tmp_path):
    """Resampled, one recorded step in which rank 0 is late is a run in which it always is."""
    for n_steps, n_told in ((1, 0), (20, 1)):
        np.savez(tmp_path / "late.npz", np.eye(1, 8).repeat(n_steps, axis=0) / 10)
        played = {"kind": "recorded", "on": "compute", "file": str(tmp_path / "late.npz")}
        scenario = small().changed(disturbances=[played], steps=n_steps)
        reasons = tune(scenario, TuneOptions(Constraints(1), Extras(only=("local_sgd",)), **FEW)).verdict.reasons
        assert sum("persistent straggler" in each for each in reasons) == n_told


def test_interrupted_search_answers_with_the_candidates_so_far():
    shown = []

    def interrupt(what, *_):
        shown.append(what)
        if sum(each.startswith("search") for each in shown) > 3:
            raise KeyboardInterrupt

    options = TuneOptions(Constraints(8), n_seeds=2, n_search_seeds=1)
    found = simulate_candidates(small(LONGER), options, progress=interrupt)
    whole = simulate_candidates(small(LONGER), options)
    assert not found.is_complete
    assert whole.is_complete
    assert len(found.evaluated) == 3
    assert {each.schedule for each in found.evaluated} <= {each.schedule for each in whole.evaluated}
    best = min(found.evaluated, key=lambda each: each.step_s)
    assert shown[-1].startswith(f"search, best so far {best.schedule.name}, ")


def test_search_interrupted_before_the_first_candidate_has_no_answer():
    def interrupt(what, *_):
        if what == "search":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate_candidates(small(LONGER), TuneOptions(Constraints(8)), progress=interrupt)
