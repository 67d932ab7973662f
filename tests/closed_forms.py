"""Step times that can be computed without simulating anything: what the simulator is held to.

All of them are for free communication. t step seconds, d delay, p probability per worker and step, N workers.
"""

import itertools
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

Floats = NDArray[np.float64]


def sync_step_s(t_s: float, d_s: float, p: float, n: int) -> float:
    """t + d (1 - (1 - p)^N): the step is late if anybody is."""
    return t_s + d_s * (1 - (1 - p) ** n)


def local_sgd_step_s(t_s: float, d_s: float, p: float, n: int, period: int) -> float:
    """t + (d / H) E[max of N binomials B(H, p)]: no rank waits before the end of the period."""
    k = np.arange(period)
    return float(t_s + d_s / period * (1 - binom.cdf(k, period, p) ** n).sum())


def hierarchical_sgd_step_s(t_s: float, d_s: float, p: float, levels: Mapping[int, int]) -> float:
    """Delays add up over a period (convolution); a group is as late as its latest part (power of the CDF)."""
    pmf: Floats = np.array([1 - p, p])
    before_period = before_size = 1
    for period, size in levels.items():
        summed = np.array([1.0])
        for _ in range(period // before_period):
            summed = np.convolve(summed, pmf)
        cdf = np.cumsum(summed) ** (size // before_size)
        pmf = np.diff(cdf, prepend=0.0)
        before_period, before_size = period, size
    return float(t_s + d_s * (np.arange(len(pmf)) * pmf).sum() / before_period)


def nested_waits_s(delays_s: Floats, levels: Mapping[int, int]) -> Floats:
    """Return the delays that reach the end of the run, of drawn delays `[n_seeds, n_steps, world_size]`: `[n_seeds]`.

    The steps are a multiple of the last period, and the last group is the world.
    """
    before_period = before_size = 1
    for period, size in levels.items():
        n_seeds, n_parts_of_periods, n_parts = delays_s.shape
        n_periods = n_parts_of_periods * before_period // period
        summed = delays_s.reshape(n_seeds, n_periods, period // before_period, n_parts).sum(axis=2)
        delays_s = summed.reshape(n_seeds, n_periods, -1, size // before_size).max(axis=3)
        before_period, before_size = period, size
    return np.asarray(delays_s.sum(axis=(1, 2)))


def harmonic(n: int) -> float:
    """1 + 1/2 + ... + 1/n: the mean of the largest of n exponentials of mean 1."""
    return sum(1 / k for k in range(1, n + 1))


def one_straggler_per_step(n_steps: int, world_size: int) -> Floats:
    """Return every sequence with exactly one rank late by 1 s in each step, `[n_sequences, n_steps, world_size]`."""
    sequences = np.array(list(itertools.product(range(world_size), repeat=n_steps)))
    return np.asarray(sequences[:, :, None] == np.arange(world_size), dtype=np.float64)


def ring_all_reduce_s(n: int, nbytes: float, latency_s: float, bandwidth_Bps: float) -> float:
    """2(n-1) alpha + 2(n-1)/n S beta."""
    return 2 * (n - 1) * latency_s + 2 * (n - 1) / n * nbytes / bandwidth_Bps


def ring_half_s(n: int, nbytes: float, latency_s: float, bandwidth_Bps: float) -> float:
    """(n-1) alpha + (n-1)/n S beta: reduce-scatter or all-gather."""
    return (n - 1) * latency_s + (n - 1) / n * nbytes / bandwidth_Bps


def tree_all_reduce_s(n: int, nbytes: float, latency_s: float, bandwidth_Bps: float) -> float:
    """2 ceil(log2 n) (alpha + S beta)."""
    return 2 * math.ceil(math.log2(n)) * (latency_s + nbytes / bandwidth_Bps)


def halving_doubling_all_reduce_s(n: int, nbytes: float, latency_s: float, bandwidth_Bps: float) -> float:
    """2 log2(n) alpha + 2(n-1)/n S beta."""
    return 2 * math.log2(n) * latency_s + 2 * (n - 1) / n * nbytes / bandwidth_Bps


def halving_doubling_half_s(n: int, nbytes: float, latency_s: float, bandwidth_Bps: float) -> float:
    """log2(n) alpha + (n-1)/n S beta: recursive halving reduce-scatter, recursive doubling all-gather."""
    return math.log2(n) * latency_s + (n - 1) / n * nbytes / bandwidth_Bps
