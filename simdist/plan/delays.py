"""Sources of injected delays for the engines: chunk by chunk, so that memory does not grow with the steps.

The delays of a channel have the shape `[n_seeds, n_steps, world_size]`. If a step has several micro-batches, each has
its own: `[n_seeds, n_steps, n_micro_batches, world_size]`. A `Delay` takes those of its micro-batch or, if it names
none, their sum. For a single run, `n_seeds` is 1. Only files omit the seed, because each holds one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.errors import PlanError
from simdist.plan.ops import Channel, Delay, forward_passes
from simdist.plan.plan import Plan

Floats: TypeAlias = NDArray[np.float64]
#: Channel -> float64 `[n_seeds, n_steps, world_size]` or `[n_seeds, n_steps, n_micro_batches, world_size]`, seconds.
Delays: TypeAlias = Mapping[Channel, Floats]


class DelaySource(Protocol):
    """Hands out the delays of the next steps."""

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps."""
        ...


class DrawnDelays:
    """Delays that were drawn in advance."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self._step = 0

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps."""
        first = self._step
        self._step = self._step + n_steps
        return {channel: array[:, first : self._step] for channel, array in self._delays.items()}


class SideBySide:
    """The delays of several sources, the seeds of one after those of the other."""

    def __init__(self, sources: Sequence[DelaySource]) -> None:
        self._sources = sources

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps."""
        taken = [each.take(n_steps) for each in self._sources]
        return {channel: np.concatenate([each[channel] for each in taken]) for channel in taken[0]}


class SomeSeeds:
    """The delays of some seeds of a source, by number. A number may recur."""

    def __init__(self, source: DelaySource, numbers: NDArray[np.int64]) -> None:
        self._source = source
        self._numbers = numbers

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps, in memory with the seeds side by side."""
        taken = self._source.take(n_steps)
        return {
            channel: np.moveaxis(np.moveaxis(each, 0, -1)[..., self._numbers], -1, 0) for channel, each in taken.items()
        }


#: Returns the delays of seeds, from step 0 on.
Draw: TypeAlias = Callable[[Sequence[int]], DelaySource]


@dataclass(frozen=True, slots=True)
class SeedDelays:
    """The delays of some seeds, drawn when they are needed.

    Args:
        seeds: The seeds.
        draw: Returns the delays of some of them. Equal seeds give equal delays.
        is_random: Whether seeds differ. If not, one stands for all.
    """

    seeds: Sequence[int]
    draw: Draw
    is_random: bool = True

    @classmethod
    def of(cls, delays: Delays, seeds: Sequence[int] | None = None) -> "SeedDelays":
        """Return delays that were drawn in advance, with these seeds; by default 0, 1, ..."""

        def draw(some: Sequence[int]) -> DelaySource:
            source = DrawnDelays(delays)
            if len(some) == len(its):
                return source
            return SomeSeeds(source, np.array(some if seeds is None else [places[each] for each in some]))

        its = range(next((len(each) for each in delays.values()), 1)) if seeds is None else seeds
        places = {seed: place for place, seed in enumerate(its)}
        return cls(its, draw)

    @property
    def different(self) -> "SeedDelays":
        """The seeds that differ: all or, if they do not, the first."""
        return self if self.is_random else replace(self, seeds=self.seeds[:1])

    def take_all(self, plan: Plan) -> Delays:
        """Return the delays of all seeds in all steps of a plan."""
        return self.draw(self.seeds).take(plan.n_steps)


def delays_of(plan: Plan) -> tuple[Delay, ...]:
    """Return the operations of a plan that delay ranks, each once, in order of channels and micro-batches."""
    found = (op for op in plan.distinct_ops if isinstance(op, Delay))
    return tuple(sorted(found, key=lambda op: (op.channel, op.micro_batch or 0)))


def seconds_of(op: Delay, delays: Delays) -> Floats:
    """Return the delays that an operation takes, seconds `[n_seeds, n_steps, world_size]`.

    Raises:
        PlanError: It takes those of a micro-batch, and the delays are those of whole steps.
    """
    found = delays[op.channel]
    if op.micro_batch is None:
        return found if found.ndim == 3 else np.asarray(found.sum(axis=2))
    if found.ndim == 3:
        raise PlanError(
            f"{op.channel} delays have shape {found.shape}, a row for each step; the plan delays single micro-batches: "
            f"give seeds x steps x micro-batches x ranks"
        )
    return found[:, :, op.micro_batch]


def n_micro_batches(plan: Plan) -> int:
    """Return the number of micro-batches of a step, 1 or more."""
    passes = max((len(forward_passes(body)) for body in plan.bodies), default=1)
    named = (op.micro_batch + 1 for op in delays_of(plan) if op.micro_batch is not None)
    return max(1, passes, *named)


def no_delays(plan: Plan, *, n_seeds: int = 1) -> Delays:
    """Return delays of no time for a plan, which cannot be changed."""
    _, *of_one = delay_shapes(plan)[-1]
    return {op.channel: np.broadcast_to(0.0, (n_seeds, *of_one)) for op in delays_of(plan)}


def of_micro_batches(channel: Channel, seconds: Floats, n: int) -> Floats:
    """Return delays of whole steps as delays of micro-batches: on compute of the first one, otherwise of the last.

    Args:
        channel: The channel.
        seconds: Delays of steps, `[..., n_steps, world_size]`. With n = 1, they are returned as they are.
        n: Micro-batches of a step.
    """
    if n == 1:
        return seconds
    found = np.zeros((*seconds.shape[:-1], n, seconds.shape[-1]))
    found[..., 0 if channel == "compute" else n - 1, :] = seconds
    return found


def check_delays(plan: Plan, delays: Delays) -> None:
    """Refuse delays that do not fit one run of a plan.

    Raises:
        PlanError: A channel is missing, too short, for another world, of several seeds or of another number of
            micro-batches, negative or not a number.
    """
    split = {op.channel for op in delays_of(plan) if op.micro_batch is not None}
    for channel in sorted({op.channel for op in delays_of(plan)} | delays.keys()):
        if channel not in delays:
            found = ", ".join(sorted(delays)) or "none"
            raise PlanError(f"plan {plan.name} delays the {channel}; no such delays are given, only: {found}")
        array = delays[channel]
        shapes = delay_shapes(plan)
        if channel in split:
            shapes = shapes[-1:]  # delays of whole steps do not tell those of micro-batches
        if not any(_covers(array.shape, shape) for shape in shapes):
            axes = "seeds x steps x micro-batches x ranks" if len(shapes[0]) == 4 else "seeds x steps x ranks"
            raise PlanError(
                f"{channel} delays have shape {array.shape}; a run of plan {plan.name} takes {shapes[0]}: {axes}"
            )
        bad = np.argwhere(~(np.isfinite(array) & (array >= 0)))
        if len(bad):
            _, step, *of_step, rank = (int(index) for index in bad[0])
            where = f"step {step}, " + "".join(f"micro-batch {number}, " for number in of_step)
            raise PlanError(
                f"{channel} delay {array[tuple(bad[0])]} at {where}rank {rank}; delays are seconds, 0 or more"
            )


def delay_shapes(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the delays of a run: a row for each step or, if it has several, for each micro-batch."""
    n = n_micro_batches(plan)
    whole = (1, plan.n_steps, plan.world_size)
    return (whole, (1, plan.n_steps, n, plan.world_size)) if n > 1 else (whole,)


def _covers(found: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    """Tell whether delays have a shape, or that of more steps."""
    return len(found) == len(needed) and found[1] >= needed[1] and found[:1] + found[2:] == needed[:1] + needed[2:]
