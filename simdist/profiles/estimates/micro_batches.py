"""Delays of steps, divided among their micro-batches.

A micro-batch reaches from the end of the backward pass before it to the end of its own. The *excess* of a micro-batch
is what it takes beyond the low quantile of all ranks and steps at its place in the step, at least 0. A delay of a step
is divided in proportion to the excess of its micro-batches, channel by channel. Its sum stays as it is.

What has no excess stays where a recording of whole steps plays it: on compute of the first micro-batch, otherwise of
the last. So do delays of the update, of loading from storage, and those due to exchanges.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from simdist.plan.delays import of_micro_batches
from simdist.plan.ops import Channel
from simdist.profiles.estimates.base import LOW, BaseTimes, HostModel, Parts, filled, routed_to
from simdist.profiles.estimates.stragglers import DelayTable, Straggler
from simdist.profiles.job.job import TracedJob
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.steps.model import RankStep

_UNEVEN = 0.5  # of its share: the quieter half of the micro-batches of a slow device has about all of its share
_in_order = attrgetter("input_s", "forward_s", "host_s", "backward_s")


@dataclass(frozen=True, slots=True)
class LateMicroBatches:
    """What micro-batches take longer.

    Args:
        of: Channel -> excess as measured, seconds `[n_steps, n_micro_batches, n_traced_ranks]`.
        backward_s: The part of compute in backward passes, of the same shape.
        update_s: Excess of updates, `[n_steps, n_traced_ranks]`.
        n_unknown: Steps of ranks whose trace does not show micro-batches.
    """

    of: dict[Channel, Floats]
    backward_s: Floats
    update_s: Floats
    n_unknown: int

    @property
    def n(self) -> int:
        """Micro-batches of a step."""
        return int(self.backward_s.shape[1])

    @property
    def note(self) -> str | None:
        """Say how many delays are not divided, if any."""
        if self.n == 1 or not self.n_unknown:
            return None
        n_steps = len(self.update_s) * self.update_s.shape[1]
        return (
            f"{self.n_unknown} of {n_steps} steps of ranks do not show their {self.n} micro-batches: their delays are "
            f"recorded on compute of the first micro-batch, otherwise of the last"
        )

    def has_even(self, straggler: Straggler, delays: DelayTable) -> bool:
        """Tell whether a straggler is late in most micro-batches of a step, as on a slow device."""
        n_quiet = self.n // 2
        columns = [delays.ranks.index(rank) for rank in straggler.ranks]
        excess_s = np.sort(self.of[straggler.channel][:, :, columns].mean(axis=2), axis=1)
        quiet_s = excess_s[:, :n_quiet].sum(axis=1) - _UNEVEN * n_quiet / self.n * excess_s.sum(axis=1)
        return n_quiet == 0 or bool(np.median(quiet_s) >= 0)

    def without(self, slow: tuple[Straggler, ...], delays: DelayTable) -> "LateMicroBatches":
        """Return the excess without that of slow devices, which each micro-batch has."""
        kept = {channel: seconds.copy() for channel, seconds in self.of.items()}
        for each in slow:
            rows, columns = delays.cells(each)
            kept[each.channel][rows, :, columns] -= each.step_seconds[:, None, None] / self.n
        return replace(self, of={channel: np.maximum(0.0, seconds) for channel, seconds in kept.items()})

    def evenly(self) -> "LateMicroBatches":
        """Return the same with alike computing in all micro-batches."""
        return replace(self, of=self.of | {"compute": np.ones_like(self.of["compute"])})


def undisturbed_passes(base: BaseTimes, job: TracedJob, of: Parts) -> BaseTimes:
    """Return the times of a step of undisturbed micro-batches, which are rarely all in one step."""
    seconds = _seconds(job, base.micro_batches)
    if base.micro_batches == 1 or not np.isfinite(seconds).all():
        return base
    _, forward_s, host_s, backward_s = np.quantile(seconds, LOW, axis=(1, 3)).sum(axis=1).tolist()
    of_steps_s = float(np.quantile(of.backward_s, LOW))
    shorter = backward_s / of_steps_s if of_steps_s else 1.0
    buckets_s = tuple(shorter * each_s for each_s in base.buckets_s)
    return replace(base, forward_s=forward_s, host_s=host_s, buckets_s=buckets_s)


def late_micro_batches(job: TracedJob, of: Parts, base: BaseTimes) -> LateMicroBatches:
    """Return what the micro-batches of all steps take longer than an undisturbed one."""
    seconds = _seconds(job, base.micro_batches)
    is_known = np.isfinite(seconds[0, :, 0])
    input_s, forward_s, host_s, backward_s = (_excess_s(each) for each in seconds)
    return LateMicroBatches(
        of={"host": host_s, "compute": forward_s + backward_s, "io": input_s},
        backward_s=backward_s,
        update_s=np.where(is_known, np.maximum(0.0, of.optimize_s - base.optimize_s), 0.0),
        n_unknown=int(np.sum(~is_known)),
    )


def _seconds(job: TracedJob, n: int) -> Floats:
    """Return input, forward, host and backward seconds of each micro-batch, `[4, n_steps, n, n_ranks]`.

    They are not a number where a step does not show `n` micro-batches.
    """
    unknown = ((np.nan,) * 4,) * n
    rows = [[_row(step, n) or unknown for step in profile.steps] for profile in job.profiles]
    return np.array(rows, np.float64).transpose(3, 1, 2, 0)


def _row(step: RankStep, n: int) -> tuple[tuple[float, ...], ...] | None:
    """Return the parts of each micro-batch; None if the step does not show as many."""
    return tuple(map(_in_order, step.of_passes)) if len(step.of_passes) == n else None


def _excess_s(seconds: Floats) -> Floats:
    """Return the excess of each micro-batch, `[n_steps, n_micro_batches, n_ranks]`; 0 if it is unknown."""
    known = np.isfinite(seconds[:, 0])
    if not known.any():
        return np.zeros_like(seconds)
    low_s = np.nanquantile(seconds, LOW, axis=(0, 2), keepdims=True)
    excess_s: Floats = np.nan_to_num(np.maximum(0.0, seconds - low_s))
    return excess_s


def divided(
    delays: Mapping[Channel, Floats], late: LateMicroBatches, job: TracedJob, host: HostModel
) -> dict[Channel, Floats]:
    """Return the delays of steps as delays of their micro-batches, if they have several.

    Args:
        delays: Channel -> seconds that the simulator plays, `[n_steps, world_size]`.
        late: What micro-batches take longer.
        job: The traced job.
        host: How the simulated host behaves.

    Returns:
        Channel -> seconds, `[n_steps, n_micro_batches, world_size]`; `io` and `overlap` stay as they are.
    """
    if late.n == 1:
        return dict(delays)
    shares = {key: filled(each, job.ranks, job.world_size) for key, each in routed_to(late.of, host).items()}
    shares["backward"] = filled(late.backward_s, job.ranks, job.world_size)
    shares["compute"][:, 0] += filled(late.update_s, job.ranks, job.world_size)
    moved: dict[Channel, Floats] = {}
    if "overlap" in delays:
        moved["overlap"] = of_micro_batches("overlap", delays["overlap"], late.n)
        shares["backward"] = np.maximum(0.0, shares["backward"] - moved["overlap"])
    if "backward" in delays:
        moved["backward"] = _divide("backward", delays["backward"], shares["backward"])
    shares["compute"] = np.maximum(0.0, shares["compute"] - sum(moved.values()))
    divided_s = {
        channel: _divide(channel, delays[channel], shares[channel])
        for channel in ("host", "compute", "backward")
        if channel in delays
    }
    return {channel: divided_s.get(channel, seconds) for channel, seconds in delays.items()}


def _divide(channel: Channel, seconds: Floats, shares: Floats) -> Floats:
    """Return delays of steps in proportion to shares, `[n_steps, n_micro_batches, world_size]`."""
    whole = shares.sum(axis=1, keepdims=True)
    of_each = seconds[:, None] * np.divide(shares, whole, out=np.zeros_like(shares), where=whole > 0)
    known_s: Floats = np.where(whole > 0, of_each, of_micro_batches(channel, seconds, shares.shape[1]))
    return known_s.round(9)
