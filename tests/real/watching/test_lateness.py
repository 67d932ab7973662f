"""Late ranks are told from noise, and the numbers for dashboards have stable names."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

pytest.importorskip("torch")

from real.watching.lateness import (
    LatenessFinder,
    LatenessWindow,
    WorkTimes,
    find_late,
    lateness_s,
)
from simdist.profiles.estimates.noise import beyond_others_s

WORK = arrays(
    np.float64,
    st.tuples(st.integers(1, 12), st.integers(2, 7)),
    elements=st.floats(0.125, 8.0, allow_nan=False),
)


def times_of(work_s: np.ndarray, first_step: int = 0, ranks: list[int] | None = None) -> WorkTimes:
    """Return the times of a job without transfers: a step takes as long as its last rank."""
    n_steps, n_ranks = work_s.shape
    step_s = np.broadcast_to(work_s.max(axis=1, keepdims=True), work_s.shape)
    return WorkTimes(range(first_step, first_step + n_steps), ranks or range(n_ranks), work_s, step_s)


def found(work_s: np.ndarray) -> LatenessWindow:
    return find_late(times_of(work_s))[0]


def noisy_work_s(n_steps: int = 50, n_ranks: int = 4, sigma: float = 0.03, seed: int = 0) -> np.ndarray:
    return 0.1 * np.random.default_rng(seed).lognormal(0.0, sigma, (n_steps, n_ranks))


# --- properties ---


@given(WORK)
def test_lateness_is_work_beyond_the_median_of_the_others(work_s: np.ndarray) -> None:
    np.testing.assert_allclose(lateness_s(work_s), beyond_others_s(work_s), rtol=0, atol=1e-12)


@given(WORK, st.randoms(use_true_random=False))
def test_numbers_of_ranks_do_not_matter(work_s: np.ndarray, random) -> None:
    order = list(range(work_s.shape[1]))
    random.shuffle(order)
    plain = find_late(times_of(work_s))[0]
    other = find_late(times_of(work_s[:, order], ranks=order))[0]
    by_rank = {each.rank: each for each in other.ranks}
    for each in plain.ranks:
        assert by_rank[each.rank].kind == each.kind
        assert by_rank[each.rank].ms == pytest.approx(each.ms, abs=1e-9)
    assert other.lost_share == pytest.approx(plain.lost_share)


@given(WORK, st.floats(0, 5))
def test_a_step_that_is_long_on_all_ranks_makes_none_late(work_s: np.ndarray, more_s: float) -> None:
    later_s = work_s.copy()
    later_s[0] += more_s
    np.testing.assert_allclose(lateness_s(later_s), lateness_s(work_s), rtol=0, atol=1e-9)


@given(WORK)
def test_what_is_lost_is_less_than_the_window(work_s: np.ndarray) -> None:
    window = found(work_s)
    shares = [each.lost_share for each in window.ranks]
    assert min(shares) >= 0
    assert sum(shares) <= 1 + 1e-9
    assert 0 <= window.lost_share <= 1 + 1e-9


@given(WORK)
def test_more_delay_makes_a_rank_no_less_late(work_s: np.ndarray) -> None:
    later_s = work_s.copy()
    later_s[:, 0] += 1.0
    assert found(later_s).ranks[0].ms >= found(work_s).ranks[0].ms


@given(st.integers(1, 30))
def test_ranks_that_work_equally_long_are_not_late(n_steps: int) -> None:
    window = found(np.full((n_steps, 5), 0.1))
    assert window.late == ()
    assert [each.ms for each in window.ranks] == [0.0] * 5


# --- names ---


def test_persistent_and_transient_ranks_are_named() -> None:
    work_s = noisy_work_s()
    work_s[:, 2] += 0.02
    work_s[17, 1] += 0.1
    window = found(work_s)
    assert [each.kind for each in window.ranks] == [None, "transient", "persistent", None]
    assert window.ranks[2].ms == pytest.approx(20, rel=0.15)
    assert window.ranks[1].late_steps == (17,)
    assert (window.ranks[1].worst_step, window.ranks[1].worst_ms) == (17, pytest.approx(100, rel=0.1))
    assert [each.rank for each in window.late] == [2, 1]
    assert str(window) == (
        f"steps 0-49, {window.step_ms:.3g} ms each: rank 2 is late by {window.ranks[2].ms:.3g} ms "
        f"({window.ranks[2].ms / window.step_ms:.0%} of a step) in most steps; rank 1 is late in 1 step, most in step "
        f"17, by {window.ranks[1].worst_ms:.3g} ms"
    )


def test_noise_names_a_rank_in_few_windows() -> None:
    n_named = 0
    for seed in range(20):
        finder = LatenessFinder()
        for number in range(5):
            window = finder.find(times_of(noisy_work_s(sigma=0.3, seed=100 * seed + number), 50 * number))
            n_named += bool(window.late)
    assert n_named <= 4  # 2 expected at most


def test_a_rank_of_slower_noise_that_changes_no_decision_is_not_named() -> None:
    work_s = noisy_work_s(sigma=0.001)
    work_s[:, 3] += 0.002  # 2 % of a step, far above the noise
    assert found(work_s).late == ()


def test_a_rank_alone_is_never_late() -> None:
    window = found(np.array([[0.1], [0.5], [0.1]]))
    assert window.late == ()
    assert window.ranks[0].ms == 0.0
    assert window.lost_share == 0.0


def test_two_late_ranks_are_both_named_and_lose_nothing_alone() -> None:
    work_s = noisy_work_s(n_ranks=6, sigma=0.001)
    work_s[:, 1] += 0.05
    work_s[:, 4] += 0.05
    window = found(work_s)
    assert [each.rank for each in window.ranks if each.kind == "persistent"] == [1, 4]
    assert max(each.lost_share for each in window.ranks) < 0.01
    assert window.lost_share == pytest.approx(0.05 / 0.15, rel=0.02)


def test_earlier_windows_show_what_is_noise() -> None:
    finder = LatenessFinder()
    for number in range(3):
        finder.find(times_of(noisy_work_s(seed=number), 50 * number))
    work_s = noisy_work_s(n_steps=10, seed=4)
    work_s[5, 1] += 0.03
    assert found(work_s).late == ()  # ten steps alone do not tell
    assert [each.rank for each in finder.find(times_of(work_s, 150)).late] == [1]


@pytest.mark.parametrize(("n_quiet", "late"), [(1, []), (3, [1])])
def test_the_noise_of_150_steps_counts_and_none_before(n_quiet: int, late: list[int]) -> None:
    """After noise of 30 %, windows of 50 steps have noise of 1 %. Then 30 ms of a step of 100 ms stand out."""
    finder = LatenessFinder()
    for number in range(3 + n_quiet):
        finder.find(times_of(noisy_work_s(sigma=0.3 if number < 3 else 0.01, seed=number), 50 * number))
    work_s = noisy_work_s(n_steps=10, sigma=0.01, seed=7)
    work_s[5, 1] += 0.03
    assert [each.rank for each in finder.find(times_of(work_s, 300)).late] == late


def test_a_rank_is_not_late_in_a_step_in_which_the_others_are_early() -> None:
    work_s = noisy_work_s(sigma=0.001)
    work_s[20, 1:] -= 0.03
    assert found(work_s).late == ()


def test_the_slowest_of_ranks_that_always_differ_is_not_late() -> None:
    """It is 10 % above the median of the others, and these differ among themselves by about as much."""
    work_s = noisy_work_s(n_ranks=9, sigma=0.001) * np.linspace(0.9, 1.1, 9)
    assert found(work_s).late == ()


def test_a_finder_forgets_windows_of_other_ranks() -> None:
    finder = LatenessFinder()
    finder.find(times_of(noisy_work_s()))
    work_s = noisy_work_s(n_ranks=3, seed=1)
    work_s[5, 0] += 0.2
    assert finder.find(times_of(work_s, 50)).ranks[0].late_steps == (55,)


def test_the_late_one_of_many_ranks_is_named() -> None:
    work_s = noisy_work_s(n_ranks=600)
    work_s[:, 431] += 0.02
    work_s[7, 12] += 0.3
    window = found(work_s)
    assert {each.rank: each.kind for each in window.late} == {431: "persistent", 12: "transient"}
    names = window.scalars()
    assert len(names) == 3 + 3 * 32
    assert names["simdist/late/rank431"] == names["simdist/late/rank12"] == 1.0


# --- what a window cannot show ---


@pytest.mark.parametrize(
    ("n_steps", "n_ranks", "says"),
    [
        (12, 1, "rank 0 has no other rank to be late for"),
        (1, 4, "1 step cannot show a late rank, 3 can"),
        (2, 4, "2 steps cannot show a late rank, 3 can"),
        (3, 4, "no rank is late"),
    ],
)
def test_a_window_says_that_no_rank_is_late_only_if_it_could_show_one(n_steps: int, n_ranks: int, says: str) -> None:
    window = found(noisy_work_s(n_steps, n_ranks, sigma=0.001))
    assert str(window).endswith(f" ms each: {says}")


def test_a_late_rank_and_what_is_not_visible_stand_side_by_side() -> None:
    work_s = noisy_work_s(n_ranks=4)
    work_s[:, 1] += 0.05
    window = dataclasses.replace(found(work_s), unseen="slow computing is not visible here")
    assert "rank 1 is late by" in str(window)
    assert str(window).endswith("; slow computing is not visible here")
    assert [name for name in window.scalars() if name.startswith("simdist/late/")] == ["simdist/late/rank1"]


# --- scalars ---


def test_scalars_are_plain_floats_with_stable_names() -> None:
    work_s = noisy_work_s(n_ranks=2)
    work_s[:, 1] += 0.05
    window = found(work_s)
    scalars = window.scalars()
    assert list(scalars) == [
        "simdist/step_ms",
        "simdist/lost_share",
        "simdist/late_ranks",
        "simdist/lateness_ms/rank0",
        "simdist/lost_share/rank0",
        "simdist/late/rank0",
        "simdist/lateness_ms/rank1",
        "simdist/lost_share/rank1",
        "simdist/late/rank1",
    ]
    assert {type(each) for each in scalars.values()} == {float}
    assert scalars["simdist/late_ranks"] == 1.0
    assert scalars["simdist/lateness_ms/rank1"] == window.ranks[1].ms


def test_all_of_a_window_is_plain() -> None:
    window = found(noisy_work_s())
    assert {type(each) for rank in window.ranks for each in dataclasses.astuple(rank)} <= {
        int,
        float,
        tuple,
        type(None),
    }
