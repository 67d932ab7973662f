"""Recorded delays: what every step of every rank took beyond an undisturbed one, by channel.

Two tables. What was *measured* tells host, compute and io apart, and is what stragglers are looked for in. What is
*recorded* for the simulator puts each delay where the simulator makes it cost what it cost:

* Input that takes no noticeable time is none of the storage's: its excess counts with the host.
* A host that waits for the loss has its delay between forward and backward pass, with the device idle, as measured. One
  that waits for the update instead, because the data loader of the next step must not begin before, would sleep during
  the forward pass. There, a pause of the host counts with compute, which nothing hides.
* A host that never waits is ahead of its device, and what holds it up would not be seen; but what was measured is what
  the device did see. So there everything counts with compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.plan.ops import Channel
from simdist.profiles.estimates.base import BaseTimes, Parts
from simdist.profiles.job.job import TracedJob

_CHANNELS: tuple[Channel, ...] = ("host", "compute", "io")


@dataclass(frozen=True, slots=True)
class HostModel:
    """How the simulated host behaves, so that input and pauses cost what they cost.

    Args:
        waits: For its device, in every step.
        loads: Batches come from storage.
    """

    waits: bool
    loads: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds beyond the base times, each `[n_steps, n_traced_ranks]`, 0 or more.

    Args:
        of: Channel -> seconds.
        clipped_s: What was below the base times and is taken for 0: its mean over steps and ranks.
    """

    of: dict[Channel, NDArray[np.float64]]
    clipped_s: float


def host_model(job: TracedJob, base: BaseTimes) -> HostModel:
    """Return what the host of the scenario does."""
    waits = all(profile.host_waits for profile in job.profiles)
    return HostModel(waits, waits and base.is_loaded)


def measured(of: Parts, base: BaseTimes) -> Measured:
    """Return what was beyond the base times."""
    excess: dict[Channel, NDArray[np.float64]] = {
        "host": of.host_s - base.host_s,
        "compute": of.compute_s - base.compute_s,
        "io": of.input_s - base.input_s,
    }
    clipped_s = sum(float(np.maximum(0.0, -seconds).mean()) for seconds in excess.values())
    return Measured({channel: np.maximum(0.0, seconds) for channel, seconds in excess.items()}, clipped_s)


def recorded(
    excess: dict[Channel, NDArray[np.float64]], host: HostModel, ranks: Sequence[int], world_size: int
) -> dict[Channel, NDArray[np.float64]]:
    """Return the delays that the scenario plays, `[n_steps, world_size]`; channels without any are left out.

    Args:
        excess: Channel -> seconds, `[n_steps, n_known_ranks]`.
        host: How the simulated host behaves.
        ranks: Of the columns; all others have what is typical of these in every step.
        world_size: Ranks of the job.
    """
    zeros = np.zeros_like(excess["compute"])
    if not host.waits:
        routed = {"host": zeros, "compute": excess["host"] + excess["compute"] + excess["io"], "io": zeros}
    elif host.loads:
        routed = {"host": zeros, "compute": excess["host"] + excess["compute"], "io": excess["io"]}
    else:
        routed = {"host": excess["host"] + excess["io"], "compute": excess["compute"], "io": zeros}
    return {channel: _filled(routed[channel], ranks, world_size) for channel in _CHANNELS if routed[channel].any()}


def typical_s(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what a rank without a trace is taken to have: a low quartile, so that it is late for no other's reason.

    Args:
        seconds: Of ranks that were traced, `[n_steps, n_traced_ranks]`.
    """
    return np.asarray(np.quantile(seconds, 0.25, axis=1, method="lower"))


def _filled(seconds: NDArray[np.float64], ranks: Sequence[int], world_size: int) -> NDArray[np.float64]:
    whole = np.repeat(typical_s(seconds)[:, None], world_size, axis=1)
    whole[:, list(ranks)] = seconds
    return np.round(whole, 9)  # a profiler counts nanoseconds at best
