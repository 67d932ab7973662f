"""How long ranks wait because they are late in turn within a step, by noise: first one of them, then another.

A scenario plays one delay for each rank and step, or micro-batch. If ranks meet once in it, it takes as long as its
latest rank. In a job that waits in each of many exchanges, as `fully_shard` does on CPUs, it takes longer. With the own
work w[k, r] of rank r before exchange k, on busy cores

    sum over k of max over r of w[k, r]  >  max over r of sum over k of w[k, r]

The difference is measured here. What ranks lose in the same place of all steps is no noise and does not count: it
belongs to stragglers, which a scenario plays throughout the step or not at all.
"""

import numpy as np

from simdist.profiles.job.matching import Matched, RankClocks
from simdist.profiles.kineto.columns import Floats

_ERRORS = 3.0  # standard errors by which the mean of a rank in a place is not noise


def in_turn_s(matched: Matched, clocks: RankClocks, n_steps: int) -> float:
    """Return the seconds of a step that ranks wait in turn by noise, mean.

    It is 0 if not all ranks take part in all exchanges, one after the other and equally many in each step.

    Args:
        matched: The exchanges of all ranks.
        clocks: Corrects the clocks of ranks.
        n_steps: Traced steps.
    """
    arrival_s = clocks.corrected_s(matched.arrival_s)
    end_s = clocks.corrected_s(matched.end_s)
    n_calls, n_ranks = arrival_s.shape
    if n_steps < 2 or n_ranks < 2 or n_calls % n_steps or not np.isfinite(arrival_s).all():
        return 0.0
    order = np.lexsort((arrival_s.min(axis=1), matched.step))
    arrival_s = arrival_s[order]
    end_s = end_s[order]
    of_steps = matched.step[order].reshape(n_steps, -1)
    if (of_steps != of_steps[:, :1]).any() or (arrival_s[1:] < end_s[:-1]).any():
        return 0.0
    work_s = (arrival_s[1:] - end_s[:-1])[of_steps.shape[1] - 1 :].reshape(n_steps - 1, -1, n_ranks)
    in_turn = work_s.max(axis=2).sum(axis=1) - work_s.sum(axis=1).max(axis=1)
    usual_s = _usual_s(work_s)
    return max(0.0, float(in_turn.mean() - (usual_s.max(axis=1).sum() - usual_s.sum(axis=0).max())))


def _usual_s(work_s: Floats) -> Floats:
    """Return the mean work of each rank in each place, `[n_places, n_ranks]`; within noise, that of all ranks."""
    mean_s = work_s.mean(axis=0)
    error_s = work_s.std(axis=0, ddof=1) / np.sqrt(len(work_s)) if len(work_s) > 1 else np.zeros_like(mean_s)
    all_s = mean_s.mean(axis=1, keepdims=True)
    is_usual = np.abs(mean_s - all_s) > _ERRORS * np.sqrt(error_s**2 + (error_s**2).mean(axis=1, keepdims=True))
    return np.asarray(np.where(is_usual, mean_s, all_s))
