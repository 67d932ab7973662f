"""What ranks wait because they are late in turn within a step, by noise, is told from what stragglers cost."""

import numpy as np
import pytest

from simdist.profiles.job.matching import CollectiveKey, Matched, RankClocks, in_turn_s

N_STEPS, N_PLACES, N_RANKS = 40, 12, 4
TRANSFER_S = 0.002
SKEW_S = np.array([0.0, 5.0, -3.0, 0.5])


def lived(work_s: np.ndarray) -> tuple[Matched, RankClocks]:
    """Return the exchanges of a job whose ranks work, `[n_steps, n_places, n_ranks]`, and wait in each exchange."""
    n_steps, n_places, n_ranks = work_s.shape
    flat_s = work_s.reshape(-1, n_ranks)
    end_s = np.cumsum(flat_s.max(axis=1) + TRANSFER_S)
    arrival_s = np.concatenate([[0.0], end_s[:-1]])[:, None] + flat_s + SKEW_S[:n_ranks]
    ends_s = end_s[:, None] + SKEW_S[:n_ranks]
    keys = tuple(CollectiveKey("all_gather", 1000, tuple(range(n_ranks)), place) for place in range(n_places)) * n_steps
    matched = Matched(keys, np.repeat(np.arange(n_steps), n_places), arrival_s, ends_s, arrival_s, ())
    zeros = np.zeros(n_ranks)
    return matched, RankClocks(SKEW_S[:n_ranks], zeros, zeros, 0.0, zeros, ())


def noise_s(n_places: int = N_PLACES) -> np.ndarray:
    return 0.010 + np.random.default_rng(2).exponential(0.003, (N_STEPS, n_places, N_RANKS))


def in_turn(work_s: np.ndarray) -> float:
    """Return by how much steps are longer than their latest rank works."""
    return float((work_s.max(axis=2).sum(axis=1) - work_s.sum(axis=1).max(axis=1))[1:].mean())


def test_noise_makes_ranks_late_in_turn() -> None:
    work_s = noise_s()
    assert in_turn_s(*lived(work_s), N_STEPS) == pytest.approx(in_turn(work_s), rel=0.1)
    assert in_turn(work_s) > 0.02


def test_one_exchange_in_a_step_has_no_turns() -> None:
    assert in_turn_s(*lived(noise_s(1)), N_STEPS) == pytest.approx(0.0, abs=1e-9)


def test_a_rank_that_is_slow_throughout_is_not_late_in_turn() -> None:
    work_s = np.full((N_STEPS, N_PLACES, N_RANKS), 0.010)
    work_s[:, :, 1] += 0.005
    assert in_turn_s(*lived(work_s), N_STEPS) == pytest.approx(0.0, abs=1e-9)


def test_stragglers_in_the_same_places_of_all_steps_are_not_noise() -> None:
    plain = noise_s()
    work_s = plain.copy()
    work_s[:, 2, 0] += 0.060
    work_s[:, 7, 3] += 0.060
    assert in_turn(work_s) > in_turn(plain) + 0.030
    assert in_turn_s(*lived(work_s), N_STEPS) < in_turn(plain)


def test_exchanges_that_overlap_with_others_are_left_out() -> None:
    matched, clocks = lived(noise_s())
    matched.end_s[5] += 0.050
    assert in_turn_s(matched, clocks, N_STEPS) == 0.0


def test_a_rank_without_a_trace_leaves_it_open() -> None:
    matched, clocks = lived(noise_s())
    matched.arrival_s[:, 2] = np.nan
    assert in_turn_s(matched, clocks, N_STEPS) == 0.0
