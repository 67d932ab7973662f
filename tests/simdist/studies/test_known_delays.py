"""Corrections of means by what is known of rare and heavy delays."""

import numpy as np
import pytest
from commandline import edited

from simdist import scenario
from simdist.runs.building import build
from simdist.scenario.disturbances import Bursts, Drawn, HeavyTail, Jitter, Pauses, Transient
from simdist.scenario.expectations import expected_delays, is_heavy, long_delay_s, share_of_largest
from simdist.scenario.sampling import run_seeds, sampler
from simdist.studies.comparison import compare
from simdist.studies.known_delays import corrected, known_delays
from simdist.studies.measuring import measure

STRAGGLERS = "\n  - {kind: transient, probability: 10%, delay: 50 ms}"


def scenario_with(disturbances: str) -> scenario.Scenario:
    return scenario.loads(edited((STRAGGLERS, f" [{disturbances}]"), ("steps: 12", "steps: 40"), ("seed: 1\n", "")))


@pytest.mark.parametrize(
    ("disturbance", "bound"),
    [
        (Transient(probability=0.02, delay_s=0.3), 0.02),
        (HeavyTail(scale_s=0.1, shape=3.5, probability=0.3), 0.02),
        (Jitter(median_s=0.1, sigma=1.0), 0.02),
        (Drawn(values=(0.0, 0.0, 0.1, 0.4)), 0.01),
        (Drawn(quantile=lambda numbers: np.where(numbers > 0.93, numbers**2, 0.0)), 0.02),
        (Drawn(quantile=lambda numbers: 0.01 * numbers ** (-1 / 2.5)), 0.02),
        (Pauses(every=(50, 50), delay_s=(0.5, 1.5)), 0.02),
        (Pauses(every=(20, 90), delay_s=(0.5, 1.5), covered_s=(0.3, 1.2)), 0.02),
        (Pauses(every=(7, 9), delay_s=(0.5, 0.5), covered_s=(0.2, 0.2)), 0.02),
        (Bursts(enter=0.01, leave=0.2, delay_s=0.4), 0.05),
    ],
)
def test_what_is_expected_is_the_mean_of_many_runs(disturbance, bound) -> None:
    n_steps, n_ranks = 40, 8
    drawn = sampler(
        [disturbance], seeds=range(1500), world_size=n_ranks, ranks_per_node=n_ranks, compute_s=np.ones(n_ranks)
    )
    (seconds,) = drawn.take(n_steps).values()
    late = seconds > 0
    begun = late.sum(axis=(1, 2)) if not isinstance(disturbance, Bursts) else _onsets(late)
    found = expected_delays(disturbance, n_steps=n_steps, n_ranks=n_ranks)
    assert found is not None
    assert found.seconds == pytest.approx(seconds.sum(axis=(1, 2)).mean(), rel=bound)
    assert found.late_steps == pytest.approx(late.sum(axis=(1, 2)).mean(), rel=bound)
    assert found.delays == pytest.approx(begun.mean(), rel=bound)
    assert 0 < long_delay_s(disturbance, 100.0) <= seconds.max()


def _onsets(late: np.ndarray) -> np.ndarray:
    before = np.concatenate([np.zeros_like(late[:, :1]), late[:, :-1]], axis=1)
    return (late & ~before).sum(axis=(1, 2))


def same_size(shape: float) -> Drawn:
    """Return delays like those of `HeavyTail(scale_s=1.0, shape=shape)`, as a user may draw them."""
    return Drawn(quantile=lambda numbers: (1 - numbers) ** (-1 / shape))


@pytest.mark.parametrize("shape", [0.9, 1.5, 2.0, 2.5, 6.0])
def test_a_users_own_distribution_is_as_heavy_as_it_is_by_name(shape) -> None:
    named, own = HeavyTail(scale_s=1.0, shape=shape), same_size(shape)
    assert is_heavy(own) == is_heavy(named)
    assert share_of_largest(own) == pytest.approx(share_of_largest(named), abs=2e-3)
    (found, known) = (expected_delays(each, n_steps=40, n_ranks=8) for each in (own, named))
    assert found is not None
    assert known is not None
    assert (found.delays, found.seconds) == pytest.approx((known.delays, known.seconds), rel=1e-4)
    assert long_delay_s(own, 1000.0) == pytest.approx(long_delay_s(named, 1000.0), rel=0.02)


@pytest.mark.parametrize(
    "drawn",
    [
        Drawn(quantile=lambda numbers: numbers - 1.0),
        Drawn(quantile=lambda numbers: np.sin(1e9 * numbers) ** 2),
        Drawn(quantile=lambda numbers: numbers / 0),
    ],
)
def test_nothing_is_expected_of_a_function_that_gives_no_delays_or_has_no_shape(drawn) -> None:
    with np.errstate(divide="ignore"):
        assert expected_delays(drawn, n_steps=40, n_ranks=8) is None
        assert not is_heavy(drawn)


def test_recorded_values_are_heavy_if_few_of_them_carry_most_of_the_variance() -> None:
    many = np.full(1000, 0.01)
    assert not is_heavy(Drawn(values=many))
    assert is_heavy(Drawn(values=[*many, 10.0]))
    assert not is_heavy(Drawn(values=[*np.zeros(1000), 10.0])), "rare delays of one length are no tail"


@pytest.mark.parametrize(("shape", "share"), [(0.9, 1.0), (1.1, 0.658), (1.5, 0.215), (2.0, 0.1), (2.5, None)])
def test_share_of_the_largest_delays_is_that_of_a_pareto_tail(shape, share) -> None:
    found = share_of_largest(HeavyTail(scale_s=1.0, shape=shape))
    assert found == share if share is None else found == pytest.approx(share, abs=5e-4)


def test_rare_delays_count_as_often_as_they_are_expected_however_few_fell() -> None:
    """A delay of sync holds all up for its whole length, so 32 delays in 1,000 steps of ranks tell the time exactly."""
    rare = scenario_with("{kind: transient, probability: 0.01%, delay: 10 s}")
    calm_s = compare(rare.changed(disturbances=()), n_seeds=1)[0].step_s
    mean_s = calm_s + 8 * 0.0001 * 10
    for n_seeds in (2, 3, 20):
        rows = compare(rare, n_seeds=n_seeds)
        assert rows[0].step_s == pytest.approx(mean_s, rel=1e-3)
        for row in rows:
            assert sum(row.states_s.values()) == pytest.approx(row.step_s, rel=1e-9)
            assert row.step_s_ci95 is not None
            assert row.step_s_ci95[1] - row.step_s_ci95[0] > 1e-3 * row.step_s
    (fell,) = [each.text for each in compare(rare, n_seeds=3).remarks if "fell into" in each.text]
    assert fell.startswith("no delay of disturbances[0] fell into these runs, 0.096 expected")


def test_frequent_delays_and_single_seeds_stay_as_they_are_drawn() -> None:
    often = scenario_with("{kind: transient, probability: 20%, delay: 100 ms}")
    built = build(often, often.schedules[1])
    measured = measure(often, built, n_seeds=3)
    assert corrected(often, built, measured) is measured
    rare = scenario_with("{kind: transient, probability: 0.1%, delay: 100 ms}")
    once = measure(rare, built, n_seeds=1)
    assert corrected(rare, built, once) is once


def holds(interval: tuple[float, float] | None, truth: float) -> bool:
    return interval is not None and interval[0] - 1e-9 <= truth <= interval[1] + 1e-9


@pytest.mark.parametrize(
    "disturbance",
    [
        "{kind: transient, probability: 0.1%, delay: 2 s}",
        "{kind: heavy_tail, scale: 5 ms, shape: 1.5}",
        "{kind: heavy_tail, scale: 100 ms, shape: 1.2, probability: 0.5%}",
        "{kind: bursts, enter: 0.05%, leave: 20%, delay: 300 ms}",
    ],
)
@pytest.mark.parametrize("n_seeds", [3, 5])
def test_intervals_hold_as_often_as_they_say(disturbance, n_seeds) -> None:
    """Each of 20 repeats has other seeds. `experiments/coverage` has the whole grid."""
    one, n_repeats = scenario_with(disturbance), 20
    truth = compare(one.changed(seed=10**6), n_seeds=200)
    held = np.zeros((n_repeats, len(truth), 2), dtype=bool)
    for repeat in range(n_repeats):
        rows = compare(one.changed(seed=n_seeds * repeat), n_seeds=n_seeds)
        for number, (row, true) in enumerate(zip(rows, truth, strict=True)):
            held[repeat, number] = holds(row.step_s_ci95, true.step_s), holds(row.speedup_ci95, true.speedup)
    assert held.mean(axis=0).min() >= 0.8


@pytest.mark.parametrize(
    ("shape", "said"), [(1.1, "have no variance"), (1.5, "have no variance"), (0.9, "have no mean")]
)
def test_tails_without_a_variance_are_said_with_quantiles_of_runs(shape, said) -> None:
    rows = compare(scenario_with(f"{{kind: heavy_tail, scale: 5 ms, shape: {shape}}}"), n_seeds=5)
    (sentence,) = [each.text for each in rows.remarks if said in each.text]
    assert sentence.count(" to ") >= len(rows)
    assert all(f"{row.schedule} " in sentence for row in rows)


def test_runs_that_do_not_differ_have_no_interval_where_chance_is_unknown() -> None:
    rows = compare(scenario_with("{kind: pauses, every: 200000, first: [39, 200000], delay: 1 s}"), n_seeds=3)
    assert [row.step_s_ci95 for row in rows] == [None] * 3
    assert [row.speedup_ci95 for row in rows] == [(1.0, 1.0), None, None]
    assert any(each.text.startswith("no two runs of sync, local-4, hsgd-2-4,4-world differ") for each in rows.remarks)


def test_delays_of_a_disturbance_are_counted_alone() -> None:
    both = scenario_with("{kind: exponential, mean: 1 ms}, {kind: transient, probability: 0.5%, delay: 1 s}")
    (found,) = known_delays(both, run_seeds(0, 4))
    assert found.index == 1
    assert found.drawn_s == pytest.approx(found.n_late * 1.0)
    assert found.n_expected == pytest.approx(4 * 8 * 40 * 0.005)
