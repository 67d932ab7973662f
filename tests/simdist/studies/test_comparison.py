"""The speed-up table: intervals, pairing, the choice of the engine."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from simdist import scenario
from simdist.errors import ScenarioError, UnsupportedError
from simdist.runs.building import build, delay_sampler
from simdist.scenario.cluster import Disk
from simdist.scenario.sampling import run_seeds
from simdist.studies.comparison import compare, find_baseline, row, too_few_seeds
from simdist.studies.facets import ADDED
from simdist.studies.measuring import ScheduleTimes, measure, step_times_s
from simdist.studies.remarks import documents

STATES = ("compute", "comm", "wait", "io", "host")

SMALL = """
name: small
cluster: {preset: gcp-t4x4-32gbit, nodes: 2}
workload: {preset: resnet18, forward: 20 ms, backward: 35 ms}
steps: 16
disturbances: [{kind: transient, probability: 10%, delay: 0.3 s}]
schedules:
  - {kind: local_sgd, period: 4}
  - {kind: sync}
  - {kind: hierarchical_sgd, levels: {2: 4, 4: 8}}
  - {kind: sync, label: small buckets, bucket_size: 1 MB}
"""

READING = """
cluster: {preset: gcp-t4x4-32gbit, nodes: 2, storage: {latency: 1 ms, bandwidth: 1 GB/s}}
workload: {preset: resnet18, forward: 20 ms, backward: 35 ms}
input: {source: storage}
steps: 6
disturbances: [{kind: exponential, mean: 5 ms}]
schedules: [{kind: sync}, {kind: local_sgd, period: 2}]
"""


def small():
    return scenario.loads(SMALL)


def measured(step_s, label="made"):
    step_s = np.asarray(step_s, dtype=np.float64)
    states_s = {state: np.zeros_like(step_s) for state in STATES}
    return ScheduleTimes(label, "fast", step_s, {**states_s, "compute": step_s})


def test_rows_stand_in_the_order_of_the_schedules():
    rows = compare(small(), n_seeds=3)
    assert [each.schedule for each in rows] == ["local-4", "sync", "hsgd-2-4,4-8", "small buckets"]
    assert [each.seeds for each in rows] == [3] * 4
    assert {each.engine for each in rows} == {"fast"}


def test_states_of_a_row_add_up_to_its_step():
    for each in compare(small(), n_seeds=3):
        parts = (each.compute_s, each.comm_s, each.wait_s, each.io_s, each.host_s)
        assert sum(parts) == pytest.approx(each.step_s, rel=1e-12)
        assert min(parts) >= 0


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"schedules": ["sync", "local-32"]}, "schedules[1] (local-32) never averages over all ranks in 16 steps"),
        ({"schedules": ["sync", "hsgd-2-4,32-world"]}, "(hsgd-2-4,32-world) never averages over all ranks in 16 steps"),
        ({"schedules": ["sync", "backup-2"]}, "backup-2 uses the gradients of 75.0 % of the batches"),
        ({"disturbances": (), "seed": 3}, "seed has no effect: nothing is random"),
        ({}, "2 seeds are too few to know the times of"),
    ],
)
def test_remarks_of_the_command_are_part_of_the_result(changes, remark):
    rows = compare(small().changed(**changes), n_seeds=2)
    assert any(remark in each.text for each in rows.remarks)
    assert rows.document()["remarks"] == rows.frame().attrs["remarks"] == documents(rows.remarks)
    assert all(remark in text for text in (repr(rows), rows._repr_html_()))


def test_checkpoints_add_what_they_cost_per_step_and_only_where_there_are_some():
    disk = {"read_Bps": 1e9, "write_Bps": 1e8}
    quiet = small().changed(disturbances=())
    quiet = quiet.changed(cluster=quiet.cluster.model_copy(update={"disk": Disk(**disk)}))
    writing = quiet.changed(checkpoint={"every": 4, "nbytes": 10_000_000, "to": "disk", "ranks": "all"})
    (plain, *_), (saving, *_) = (compare(each, n_seeds=2) for each in (quiet, writing))
    copied_s = 1e7 / quiet.cluster.device.staging_bandwidth_Bps
    assert saving.of(ADDED)["checkpoints"] == pytest.approx((copied_s + 4 * 1e7 / 1e8) / 4, rel=1e-9)
    assert saving.step_s - plain.step_s == pytest.approx(saving.of(ADDED)["checkpoints"], rel=1e-9)
    assert (plain.of(ADDED), "added_s" in plain.document()) == ({}, False)
    assert saving.document()["added_s"] == saving.of(ADDED)


def test_baseline_has_a_speedup_of_exactly_one():
    rows = {each.schedule: each for each in compare(small(), n_seeds=3)}
    assert (rows["sync"].speedup, rows["sync"].speedup_ci95) == (1.0, (1.0, 1.0))
    assert rows["local-4"].speedup == rows["sync"].step_s / rows["local-4"].step_s


def test_baseline_is_found_by_label_and_else_by_kind():
    chosen = small()
    assert find_baseline(chosen, "small buckets").name == "small buckets"
    assert find_baseline(chosen, "sync").name == "sync"
    assert find_baseline(chosen, "hierarchical_sgd").name == "hsgd-2-4,4-8"
    rows = {each.schedule: each for each in compare(chosen, baseline="local-4", n_seeds=2)}
    assert rows["local-4"].speedup == 1.0
    assert rows["sync"].speedup < 1.0


@pytest.mark.parametrize(
    ("schedules", "baseline"),
    [
        (["fsdp", "hsdp"], "fsdp"),
        (["local-4", "sync"], "sync"),
        (["local-4", {"kind": "sync", "label": "buckets"}], "buckets"),
        (["hsgd-2-4,4-world", "local-8", "torus"], "hsgd-2-4,4-world"),
    ],
)
def test_without_a_baseline_sync_is_compared_with_or_else_the_first(schedules, baseline):
    named = [{"kind": "hsdp", "shard": 4} if each == "hsdp" else each for each in schedules]
    rows = compare(small().changed(steps=4, schedules=named), n_seeds=1)
    assert f"speed-up over {baseline}" in rows.title
    assert [each.schedule for each in rows if each.speedup == 1.0] == [baseline]


def test_baseline_that_is_not_there_is_an_error():
    labels = "local-4, sync, hsgd-2-4,4-8, small buckets"
    with pytest.raises(
        ScenarioError, match=f"small: no schedule is called 'async' to compare with; there are: {labels}"
    ):
        compare(small(), baseline="async", n_seeds=2)


@pytest.mark.parametrize("n_seeds", [0, -1])
def test_no_seeds_are_an_error(n_seeds):
    with pytest.raises(ScenarioError, match=f"{n_seeds} seeds; must be at least 1"):
        compare(small(), n_seeds=n_seeds)


def test_single_seed_has_no_interval():
    for each in compare(small(), n_seeds=1):
        assert each.step_s_ci95 is None
        assert each.speedup_ci95 is None
        assert each.speedup > 0


@pytest.mark.parametrize("n", [2, 3, 20, 100])
def test_interval_of_a_step_is_students(n):
    step_s = np.random.default_rng(n).gamma(5.0, 0.02, size=n)
    mean_s = step_s.mean()
    of_logarithm = stats.t.interval(0.95, n - 1, loc=np.log(mean_s), scale=stats.sem(step_s) / mean_s)
    expected = tuple(np.exp(of_logarithm))
    assert row(measured(step_s), measured(step_s)).step_s_ci95 == pytest.approx(expected, rel=1e-9)


def test_interval_of_a_speedup_is_that_of_a_ratio_of_paired_means():
    """Delta method: var(r) = (var(b) - 2 r cov(b, s) + r^2 var(s)) / (n mean(s)^2)."""
    rng = np.random.default_rng(1)
    base_s, step_s = rng.multivariate_normal([0.8, 0.4], [[1e-3, 6e-4], [6e-4, 9e-4]], size=12).T
    r = base_s.mean() / step_s.mean()
    (base_var, covariance), (_, step_var) = np.cov(base_s, step_s)
    error = np.sqrt((base_var - 2 * r * covariance + r**2 * step_var) / 12) / step_s.mean()
    half = stats.t.ppf(0.975, 11) * error
    found = row(measured(step_s), measured(base_s))
    assert found.speedup == pytest.approx(r)
    assert found.speedup_ci95 == pytest.approx((r * np.exp(-half / r), r * np.exp(half / r)), rel=1e-9)


def test_interval_of_a_speedup_covers_the_truth_in_95_of_100_cases():
    rng = np.random.default_rng(7)
    covered, truth, n_cases = 0, 2.0, 2000
    for _ in range(n_cases):
        common = rng.normal(0.0, 0.05, size=20)
        base_s, step_s = 0.8 + common + rng.normal(0, 0.02, 20), 0.4 + common / 2 + rng.normal(0, 0.01, 20)
        low, high = row(measured(step_s), measured(base_s)).speedup_ci95
        covered += low <= truth <= high
    assert 0.935 <= covered / n_cases <= 0.965


@pytest.mark.parametrize("n", [2, 3, 20])
def test_few_seeds_are_told_where_little_is_known(n):
    """Two seeds of 0.1 s and 0.3 s gave a speed-up of 1.61 +- 1.74: a speed-up is positive."""
    base = measured(np.linspace(0.1, 0.3, n))
    same = measured(np.full(n, 0.124))
    found = row(same, base)
    low, high = found.speedup_ci95
    assert 0 < low < found.speedup < high
    assert low * high == pytest.approx(found.speedup**2)
    expected = [f"{n} seeds are too few to know the times of {found.schedule}: write --seeds 20 or more"]
    assert [each.text for each in too_few_seeds([found])] == (expected if n < 20 else [])
    assert too_few_seeds([row(same, same)]) == []


def test_pairing_narrows_the_interval_of_a_speedup():
    """Both schedules meet the same stragglers; with the seeds of one of them shuffled, they do not."""
    base, other = (measure(small(), build(small(), each), n_seeds=20) for each in small().schedules[:2])
    shuffled = dataclasses.replace(other, step_s=np.roll(other.step_s, 1))
    (low, high), (wide_low, wide_high) = (row(base, each).speedup_ci95 for each in (other, shuffled))
    assert high - low < 0.8 * (wide_high - wide_low)


def test_every_schedule_meets_the_same_delays():
    """A delay that hits no rank in a seed costs nothing: all rows are then those without disturbances."""
    quiet = small().model_copy(update={"disturbances": ()})
    rare = scenario.loads(SMALL.replace("10%", "0.1%"))
    for schedule in rare.schedules:
        alone_s = measure(quiet, build(quiet, schedule), n_seeds=1).step_s[0]
        step_s = measure(rare, build(rare, schedule), n_seeds=30).step_s
        untouched = np.isclose(step_s, alone_s, rtol=1e-12)
        if schedule is rare.schedules[0]:
            expected = untouched
            assert 5 < expected.sum() < 30
        assert (untouched == expected).all()


@pytest.mark.parametrize("engine", ["fast", "des"])
def test_the_seed_of_a_run_gives_the_same_run_again(engine):
    chosen = small().changed(seed=5, steps=8, schedules=small().schedules[:2])
    runs = compare(chosen, n_seeds=3, engine=engine).frame(per="seed")
    assert runs.seed.tolist() == run_seeds(5, 3) * 2
    for seed, of_seed in runs.groupby("seed"):
        again = compare(chosen.changed(seed=int(seed)), n_seeds=1, engine=engine).frame(per="seed")
        assert again.step_s.tolist() == of_seed.step_s.tolist()


def test_studies_with_neighbouring_seeds_are_independent():
    """If run k of a study had the study's seed plus k, the correlation would be 0.75."""
    chosen, n_studies = small().changed(steps=4), 300
    built = build(chosen, chosen.schedules[1])
    means_s = [step_times_s(chosen.changed(seed=seed), built, n_seeds=4).mean() for seed in range(n_studies)]
    correlation = np.corrcoef(means_s[:-1], means_s[1:])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(n_studies)


def test_batches_of_seeds_do_not_change_any_number(monkeypatch):
    chosen = small()
    built = build(chosen, chosen.schedules[2])
    whole = measure(chosen, built, n_seeds=7)
    monkeypatch.setattr("simdist.engines.vector._BATCH_VALUES", 16)
    split = measure(chosen, built, n_seeds=7)
    np.testing.assert_array_equal(split.step_s, whole.step_s)
    for state in STATES:
        np.testing.assert_allclose(split.states_s[state], whole.states_s[state], rtol=1e-14)


def test_engines_measure_the_same():
    chosen = small()
    for schedule in chosen.schedules:
        built = build(chosen, schedule)
        one, other = (measure(chosen, built, n_seeds=2, engine=engine) for engine in ("fast", "des"))
        assert (one.engine, other.engine) == ("fast", "des")
        np.testing.assert_array_equal(one.step_s, other.step_s)
        for state in STATES:
            np.testing.assert_allclose(one.states_s[state], other.states_s[state], rtol=1e-12, atol=1e-15)


def test_auto_takes_the_discrete_event_engine_where_links_are_contested():
    """Readers that are late one by one share the storage server: only the fluid network knows how."""
    chosen = scenario.loads(READING)
    built = build(chosen, chosen.schedules[0])
    assert built.costs.contested
    rows = compare(chosen, n_seeds=2)
    assert [each.engine for each in rows] == ["des", "des"]
    assert all(each.step_s > 0 for each in rows)
    with pytest.raises(UnsupportedError, match="use --engine des"):
        compare(chosen, n_seeds=2, engine="fast")


@pytest.mark.parametrize(("most_values", "n_draws"), [(16 * 8 * 3, 1), (16 * 8 * 3 - 1, 8)])
def test_delays_are_drawn_once_for_all_schedules_if_they_are_few(most_values, n_draws, monkeypatch):
    drawn = []

    def counting(chosen, seeds):
        drawn.append(list(seeds))
        return delay_sampler(chosen, seeds)

    apart = [measure(small(), build(small(), schedule), n_seeds=3).step_s.mean() for schedule in small().schedules]
    monkeypatch.setattr("simdist.studies.draws.delay_sampler", counting)
    monkeypatch.setattr("simdist.studies.draws._MOST_KEPT_VALUES", most_values)
    assert [each.as_simulated.step_s.mean() for each in compare(small(), n_seeds=3).measured] == apart
    assert drawn == [run_seeds(0, 3)] * n_draws


@pytest.mark.parametrize("engine", ["fast", "des"])
def test_progress_counts_rank_steps_up_to_all_of_them(engine, monkeypatch):
    monkeypatch.setattr("simdist.engines.vector._BATCH_VALUES", 16)
    chosen, told = small(), []
    built = build(chosen, chosen.schedules[0])
    measure(chosen, built, n_seeds=3, engine=engine, progress=lambda *told_now: told.append(told_now))
    assert {(label, total) for label, _, total in told} == {("local-4", 8 * 16 * 3)}
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert done[-1] == 8 * 16 * 3
