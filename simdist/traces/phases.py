"""The journey of a gradient from the backward pass to the optimizer, as phases that follow one another.

A *journey* begins when a backward pass has written a gradient bucket (or an optimizer parameters, or LARS its trust
ratios) and follows the data through copies, selections, fusion buffers and collectives until the optimizer or the next
pass reads it. Only what is communicated makes a journey. A plan states no phases; they follow from who reads what:

    phase here               in Horovod's timeline          until
    wait for other tensors   WAIT_FOR_OTHER_TENSOR_DATA     the rest of its fusion buffer is written on this rank
    queue                    QUEUE                          the comm stream takes up the next operation on it
    wait for compute                                        the compute stream does, mostly after backward passes
    wait for the tick        the time to the next CYCLE     the clock ticks (Horovod's cycle time)
    pack                     MEMCPY_IN_FUSION_BUFFER        it is copied into the fusion buffer
    wait for other ranks     NEGOTIATE_ALLREDUCE            the last member of the group is ready for the collective
    all_reduce, ...          ALLREDUCE, NCCL_ALLREDUCE, ... the collective is done
    unpack                   MEMCPY_OUT_FUSION_BUFFER       it is copied out of the fusion buffer
    copy, select, ...                                       that operation on it is done

Horovod negotiates on the CPU, before it packs; here, as in CUDA, ranks meet in the collective itself, so the wait for
other ranks comes after the packing. Horovod's WAIT_FOR_DATA has no phase: a journey begins when the data is there.

Source:
    Horovod, "Analyze Performance", https://horovod.readthedocs.io/en/stable/timeline_include.html, and the names of
    activities in horovod/common/common.h.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from simdist.plan import Body, Op, ops
from simdist.plan.text import op_name

Moment: TypeAlias = Literal["ready", "start", "end"]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a journey, from the end of the phase before it.

    Args:
        name: Action of the data, or the thing it waits for.
        until: Which moment of operations ends it.
        positions: Their places in the body; the latest of the moments counts.
    """

    name: str
    until: Moment
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Journey:
    """The life of a buffer's contents in one step.

    Args:
        buffer: Where the data was written first, such as `grad.3`.
        written: Place in the body of the operation that wrote it.
        phases: In order. A moment may lie before the end of the phase before; then the phase has no length.
    """

    buffer: str
    written: int
    phases: tuple[Phase, ...]


def journeys(body: Body) -> tuple[Journey, ...]:
    """Return the journeys of a step, in the order in which they begin."""
    uses = _uses(body)
    begun = ((position, name) for position, op in enumerate(body) for name in _begins(op))
    followed = (Journey(name, position, tuple(_phases(uses, position, name))) for position, name in begun)
    return tuple(each for each in followed if any(_communicates(body, phase) for phase in each.phases))


def _begins(op: Op) -> tuple[str, ...]:
    return ops.writes(op) if isinstance(op, ops.Backward | ops.Optimize | ops.TrustRatios) else ()


def _communicates(body: Body, phase: Phase) -> bool:
    return any(isinstance(body[position], ops.COLLECTIVES) for position in phase.positions)


@dataclass(frozen=True, slots=True)
class _Uses:
    """A body, and where in it a buffer is used: so a journey looks only at the operations that concern it.

    Args:
        body: The operations of a step.
        reading: Positions of the operations that read a buffer, in order.
        writing: Positions of those that write it, likewise.
        ticks: Positions of all ticks, likewise.
    """

    body: Body
    reading: Mapping[str, Sequence[int]]
    writing: Mapping[str, Sequence[int]]
    ticks: Sequence[int]

    def next(self, held: Collection[str], after: int) -> int | None:
        """Return the next operation that reads or writes one of some buffers; None if there is none."""
        places = (uses[name] for uses in (self.reading, self.writing) for name in held if name in uses)
        following = (_first_after(positions, after) for positions in places)
        return min((position for position in following if position is not None), default=None)

    def writer(self, name: str, before: int) -> int | None:
        """Return the last operation before a position that writes a buffer; None if no operation of this step does."""
        return _last_before(self.writing.get(name, ()), before)

    def tick(self, after: int, before: int) -> int | None:
        """Return the last tick between two operations that holds the stream of the second; None if there is none."""
        if ops.stream_of(self.body[before]) != "comm":
            return None
        tick = _last_before(self.ticks, before)
        return tick if tick is not None and tick > after else None


def _uses(body: Body) -> _Uses:
    reading: defaultdict[str, list[int]] = defaultdict(list)
    writing: defaultdict[str, list[int]] = defaultdict(list)
    for position, op in enumerate(body):
        for name in ops.reads(op):
            reading[name].append(position)
        for name in ops.writes(op):
            writing[name].append(position)
    return _Uses(body, reading, writing, [position for position, op in enumerate(body) if isinstance(op, ops.Tick)])


def _first_after(positions: Sequence[int], after: int) -> int | None:
    place = bisect_right(positions, after)
    return positions[place] if place < len(positions) else None


def _last_before(positions: Sequence[int], before: int) -> int | None:
    place = bisect_left(positions, before)
    return positions[place - 1] if place else None


def _phases(uses: _Uses, written: int, name: str) -> Iterator[Phase]:
    """Follow the data: `held` are the buffers that hold it, or something made of it."""
    held, last, position = {name}, written, uses.next({name}, written)
    while position is not None:
        op = uses.body[position]
        works_on_it = not held.isdisjoint(ops.reads(op))
        if works_on_it and isinstance(op, ops.Forward | ops.Backward | ops.Optimize | ops.TrustRatios):
            return
        if works_on_it and ops.writes(op):
            yield from _waits(uses, position, last, held)
            yield Phase(op_name(op), "end", (position,))
            held |= _taken(op, held)
            last = position
        else:
            held -= {*ops.writes(op)}  # other data takes its place
        position = uses.next(held, position)


def _waits(uses: _Uses, position: int, last: int, held: set[str]) -> Iterator[Phase]:
    """Yield what data waits for between the operations at `last` and at `position`."""
    op, tick = uses.body[position], uses.tick(last, position)
    both = [op] if tick is None else [op, uses.body[tick]]
    needed = {name for each in both if isinstance(each, ops.Pack | ops.Tick) for name in each.srcs} - held
    others = (uses.writer(name, position) for name in needed)
    in_this_step = tuple(sorted({writer for writer in others if writer is not None}))
    if in_this_step:
        yield Phase("wait for other tensors", "end", in_this_step)
    if tick is not None:
        yield Phase("queue", "ready", (tick,))
        yield Phase("wait for the tick", "end", (tick,))
    yield Phase("queue" if ops.stream_of(op) == "comm" else "wait for compute", "ready", (position,))
    if isinstance(op, ops.COLLECTIVES):
        yield Phase("wait for other ranks", "start", (position,))


def _taken(op: Op, held: set[str]) -> set[str]:
    """Return the buffers that hold the data after `op`: of those that a fusion buffer is taken apart into, its own."""
    match op:
        case ops.Unpack():
            return held & {*op.dsts}
        case ops.Select() | ops.Merge():
            return {op.dst}
        case _:
            return {*ops.writes(op)}
