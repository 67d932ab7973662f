"""Sources of injected delays for the engines: chunk by chunk, so that memory does not grow with the steps.

Delays have the shape `[n_seeds, n_steps, world_size]` everywhere. For a single run it is `[1, n_steps, world_size]`.
Only files omit the seed, because each holds one.
"""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.errors import PlanError
from simdist.plan import Channel, Delay, Plan

#: Channel -> float64 `[n_seeds, n_steps, world_size]`, seconds.
Delays: TypeAlias = Mapping[Channel, NDArray[np.float64]]


class DelaySource(Protocol):
    """Hands out the delays of the next steps."""

    def take(self, n_steps: int) -> Delays:
        """Return the next `n_steps` delays, seconds: channel -> float64 `[n_seeds, n_steps, world_size]`."""
        ...


class DrawnDelays:
    """Delays drawn in advance: channel -> float64 `[n_seeds, n_steps, world_size]`."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self._step = 0

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps."""
        first = self._step
        self._step = self._step + n_steps
        return {channel: array[:, first : self._step] for channel, array in self._delays.items()}


def check_delays(plan: Plan, delays: Delays) -> None:
    """Refuse delays that do not fit one run of a plan.

    Raises:
        PlanError: A channel is missing, too short, for another world, of several seeds, negative or not a number.
    """
    needed = {op.channel for body in plan.bodies for op in body if isinstance(op, Delay)}
    for channel in sorted(needed | delays.keys()):
        if channel not in delays:
            found = ", ".join(sorted(delays)) or "none"
            raise PlanError(f"plan {plan.name} delays the {channel}; no such delays are given, only: {found}")
        array = delays[channel]
        if array.ndim != 3 or array.shape[::2] != (1, plan.world_size) or array.shape[1] < plan.n_steps:
            raise PlanError(
                f"{channel} delays have shape {array.shape}; a run of plan {plan.name} takes "
                f"(1, {plan.n_steps}, {plan.world_size}): seeds x steps x ranks"
            )
        bad = np.argwhere(~(np.isfinite(array) & (array >= 0)))
        if len(bad):
            _, step, rank = (int(index) for index in bad[0])
            raise PlanError(
                f"{channel} delay {array[0, step, rank]} at step {step}, rank {rank}; delays are seconds, 0 or more"
            )
