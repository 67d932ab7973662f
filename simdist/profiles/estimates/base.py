"""What an undisturbed step takes, part by part: a low quantile over all ranks and steps.

Recorded delays are what a step took beyond that, and delays are 0 or more. So the quantile is low; and it is not the
minimum, which would be the luckiest moment of all.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.job.job import TracedJob
from simdist.profiles.steps.model import RankStep

_LOW = 0.05
_NOTICEABLE = 0.01  # of a step, for input to be more than fetching what is there


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of the parts of every step, each `[n_steps, n_traced_ranks]`."""

    input_s: NDArray[np.float64]
    forward_s: NDArray[np.float64]
    host_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    optimize_s: NDArray[np.float64]

    @property
    def step_s(self) -> NDArray[np.float64]:
        """Seconds of every step."""
        return self.input_s + self.forward_s + self.host_s + self.backward_s + self.wait_s + self.optimize_s

    @property
    def compute_s(self) -> NDArray[np.float64]:
        """Seconds of computing."""
        return self.forward_s + self.backward_s + self.optimize_s


@dataclass(frozen=True, slots=True)
class BaseTimes:
    """Seconds of an undisturbed step.

    Args:
        input_s: Until the batch is there.
        forward_s: Forward pass and loss.
        host_s: Device idle, for the host's sake.
        buckets_s: Backward pass up to each gradient bucket, from the one before; one number without buckets.
        buckets_nbytes: Bytes of each; None if the traces do not tell; empty without buckets.
        optimize_s: Update.
        is_loaded: The input takes noticeable time.
        notes: What was assumed.
    """

    input_s: float
    forward_s: float
    host_s: float
    buckets_s: tuple[float, ...]
    buckets_nbytes: tuple[int | None, ...]
    optimize_s: float
    is_loaded: bool
    notes: tuple[str, ...]

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass."""
        return sum(self.buckets_s)

    @property
    def compute_s(self) -> float:
        """Seconds of computing."""
        return self.forward_s + self.backward_s + self.optimize_s


def parts(job: TracedJob) -> Parts:
    """Return the parts of all steps as arrays."""
    rows = [[_seconds(step) for step in profile.steps] for profile in job.profiles]
    return Parts(*np.array(rows).transpose(2, 1, 0))


def _seconds(step: RankStep) -> tuple[float, ...]:
    return step.input_s, step.forward_s, step.host_s, step.backward_s, step.wait_s, step.optimize_s


def base_times(job: TracedJob, of: Parts) -> BaseTimes:
    """Return what an undisturbed step takes."""
    step_s = float(np.median(of.step_s))
    input_s = _low_s(of.input_s)
    buckets_s, nbytes, notes = _buckets(job, of)
    return BaseTimes(
        input_s=input_s,
        forward_s=_low_s(of.forward_s),
        host_s=_low_s(of.host_s),
        buckets_s=buckets_s,
        buckets_nbytes=nbytes,
        optimize_s=_low_s(of.optimize_s),
        is_loaded=max(input_s, float((of.input_s - input_s).mean())) > _NOTICEABLE * step_s,
        notes=tuple(notes),
    )


def _low_s(seconds: NDArray[np.float64]) -> float:
    return max(0.0, float(np.quantile(seconds, _LOW)))


def _buckets(job: TracedJob, of: Parts) -> tuple[tuple[float, ...], tuple[int | None, ...], list[str]]:
    """Return backward seconds and bytes of the buckets that most steps have."""
    layouts = Counter(_sizes(step) for profile in job.profiles for step in profile.steps)
    silent = layouts.pop((), 0)
    nbytes, times = layouts.most_common(1)[0] if layouts else ((), silent)
    notes = []
    if silent and layouts:
        notes.append(
            f"{silent} of {silent + layouts.total()} steps of ranks exchange no gradients; synchronous SGD in the "
            f"scenario does so in every step"
        )
    if len(layouts) > 1:
        others = layouts.total() - times
        notes.append(
            f"{others} of {others + times} steps of ranks have other gradient buckets than the {len(nbytes)} of most; "
            f"the backward pass up to each bucket is from the latter"
        )
    seconds = [
        step.buckets_s
        for profile in job.profiles
        for step in profile.steps
        if _sizes(step) == nbytes and len(step.buckets_s) == len(nbytes)
    ]
    if nbytes and seconds:
        return _together(np.array(seconds)), nbytes, notes
    if nbytes:
        notes.append("the traces do not tell when each gradient bucket was ready: the backward pass is shared by bytes")
        shares = np.array([each or 1 for each in nbytes], dtype=np.float64)
        return tuple((_low_s(of.backward_s) * shares / shares.sum()).tolist()), nbytes, notes
    return (_low_s(of.backward_s),), (), notes


def _together(buckets_s: NDArray[np.float64]) -> tuple[float, ...]:
    """Return low quantiles of the buckets, scaled to that of their sum: they are not all at their lowest at once."""
    lows_s = np.maximum(0.0, np.quantile(buckets_s, _LOW, axis=0))
    sum_s = float(lows_s.sum())
    scale = _low_s(buckets_s.sum(axis=1)) / sum_s if sum_s > 0 else 1.0
    return tuple((lows_s * scale).tolist())


def _sizes(step: RankStep) -> tuple[int | None, ...]:
    return tuple(call.nbytes for call in step.calls if call.of_gradients)
