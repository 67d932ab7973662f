"""The dependencies of a plan, derived once for everybody.

Walk the steps in program order and remember, per buffer, its last writer and its readers since. An operation that
reads a buffer comes after the last writer; one that writes it comes after the last writer and after those readers,
also across steps. Every operation comes after the last host operation before it, because the host enqueues in order.

Of these, `Instance.after` keeps only what does not already follow. A stream runs in order, so an instance that is
known to be done vouches for all before it on its stream, and for everything those waited for. A vector clock per live
instance (the latest instance of each stream that is surely done when this one is) tells which dependencies are
implied. What remains are the events that a CUDA program would record and wait for: rarely more than one per
operation.

>>> from simdist.plan import AllReduce, Backward, Buffer, Forward, Group, Optimize, Plan
>>> step = (Forward(("param",), ("loss",)), Backward(("loss", "param"), "grad"),
...         AllReduce("grad", Group(2)), Optimize(("param",), ("grad",)))
>>> buffers = tuple(Buffer(name, 1) for name in ("param", "loss", "grad"))
>>> plan = Plan.from_steps("tiny", world_size=2, buffers=buffers, steps=[step] * 2)
>>> [instance.after for instance in walk(plan)]
[(), (), (1,), (2,), (), (), (5,), (6,)]

Plans repeat, and so do their dependencies, relative to the instance. `stretches` walks a run of the plan's order
until its state recurs, up to what no later operation can tell apart, and then vouches for the rest without walking
it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from simdist.plan.ops import STREAMS, Op, Stream, reads, stream_of, writes
from simdist.plan.plan import Plan, Run

__all__ = ["Instance", "Stretch", "Template", "stretches", "walk"]


@dataclass(frozen=True, slots=True)
class Instance:
    """One operation of one step.

    Args:
        index: Row in the trace; counts from 0 in program order.
        step: Step, from 0.
        position: Place in the step's body.
        op: The operation.
        stream: Where it runs.
        after: Indices of the instances on other streams, or on the host, that it waits for. Its predecessor on its
            own stream is implied.
    """

    index: int
    step: int
    position: int
    op: Op
    stream: Stream
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """An instance of a stretch, relative to itself.

    Args:
        step: Step within the stretch's pattern.
        position: Place in the step's body.
        op: The operation.
        stream: Where it runs.
        previous: How many instances back its predecessor on its own stream is; None for the first on a stream.
        after: How many instances back those on other streams are that it waits for.
    """

    step: int
    position: int
    op: Op
    stream: Stream
    previous: int | None
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps with the same operations and the same relative dependencies, `times` times over.

    Args:
        first_step: Its first step.
        first_index: Its first instance.
        n_steps: Steps of one repetition.
        times: Repetitions.
        templates: The instances of one repetition.
        live: How many instances before the end of a repetition those are that later instances may refer to.
    """

    first_step: int
    first_index: int
    n_steps: int
    times: int
    templates: tuple[Template, ...]
    live: tuple[int, ...]


def walk(plan: Plan) -> Iterator[Instance]:
    """Yield every operation instance in program order, with the instances that it comes after.

    Memory does not grow with the number of steps.
    """
    for stretch in stretches(plan):
        index, step = stretch.first_index, stretch.first_step
        for _ in range(stretch.times):
            for template in stretch.templates:
                after = tuple(index - back for back in template.after)
                yield Instance(index, step + template.step, template.position, template.op, template.stream, after)
                index += 1
            step += stretch.n_steps


def stretches(plan: Plan) -> Iterator[Stretch]:
    """Yield the plan's instances as stretches of equal repetitions, in order."""
    walker = _Walker(plan)
    step = 0
    for run in plan.order:
        done = 0
        before: object = None
        while done < run.times:
            state = walker.signature()
            recurs, before = state == before, state
            first_index = walker.index
            times = run.times - done if recurs else 1
            templates = walker.walk_steps(run)
            walker.skip((times - 1) * len(templates))
            yield Stretch(step, first_index, len(run.bodies), times, templates, walker.live())
            step += times * len(run.bodies)
            done += times


_NEVER = -1
_Clock: TypeAlias = tuple[int, ...]  # per stream of STREAMS: the latest instance that is surely done
_HOST = STREAMS.index("host")


@dataclass(slots=True)
class _Done:
    """An instance that others may wait for, and what is surely done once it is."""

    index: int
    stream: int
    clock: _Clock


@dataclass(slots=True)
class _History:
    """Who touched a buffer last: its writer, and per stream the latest reader since."""

    writer: _Done | None = None
    readers: dict[int, _Done] = field(default_factory=dict)


class _Walker:
    """The state of a walk."""

    def __init__(self, plan: Plan) -> None:
        self.index = 0
        self._bodies = [
            [(op, STREAMS.index(stream_of(op)), reads(op), writes(op)) for op in body] for body in plan.bodies
        ]
        self._used = sorted({stream for body in self._bodies for _, stream, _, _ in body})
        self._buffers = {buffer.name: _History() for buffer in plan.buffers}
        self._tails: list[_Done | None] = [None] * len(STREAMS)

    def walk_steps(self, run: Run) -> tuple[Template, ...]:
        """Walk one repetition of a run."""
        return tuple(
            self._visit(step, position, *decoded)
            for step, body in enumerate(run.bodies)
            for position, decoded in enumerate(self._bodies[body])
        )

    def _visit(
        self, step: int, position: int, op: Op, stream: int, read: tuple[str, ...], written: tuple[str, ...]
    ) -> Template:
        predecessor = self._tails[stream]
        after, clock = _minimal(self._needed(read, written), predecessor)
        done = _Done(self.index, stream, (*clock[:stream], self.index, *clock[stream + 1 :]))
        self._tails[stream] = done
        for name in read:
            self._buffers[name].readers[stream] = done
        for name in written:
            self._buffers[name] = _History(writer=done)
        previous = self.index - predecessor.index if predecessor else None
        back = tuple(self.index - index for index in after)
        self.index += 1
        return Template(step, position, op, STREAMS[stream], previous, back)

    def _needed(self, read: tuple[str, ...], written: tuple[str, ...]) -> list[_Done]:
        host = self._tails[_HOST]
        needed = [host] if host else []
        for name in read + written:
            writer = self._buffers[name].writer
            if writer:
                needed.append(writer)
        for name in written:
            needed.extend(self._buffers[name].readers.values())
        return needed

    def _floor(self) -> _Clock:
        """Per stream, the latest instance that every stream in use knows to be done: it constrains nobody any more."""
        clocks = [
            tail.clock if tail else (_NEVER,) * len(STREAMS) for tail in (self._tails[used] for used in self._used)
        ]
        return tuple(map(min, zip(*clocks, strict=True)))

    def _live(self) -> Iterator[_Done]:
        floor = self._floor()
        for tail in self._tails:
            if tail:
                yield tail
        for history in self._buffers.values():
            for done in (history.writer, *history.readers.values()):
                if done and done.index > floor[done.stream]:
                    yield done

    def live(self) -> tuple[int, ...]:
        """Return how far back the instances are that a later one may refer to, furthest first."""
        return tuple(sorted({self.index - done.index for done in self._live()}, reverse=True))

    def signature(self) -> object:
        """Return the state relative to now, without what can make no difference any more."""
        floor = self._floor()

        def relative(done: _Done) -> object:
            clock = tuple(self.index - at if at > low else None for at, low in zip(done.clock, floor, strict=True))
            return self.index - done.index, done.stream, clock

        def matters(done: _Done | None) -> bool:
            return done is not None and done.index > floor[done.stream]

        return (
            tuple(relative(tail) if tail else None for tail in self._tails),
            tuple(
                (
                    relative(history.writer) if history.writer and matters(history.writer) else None,
                    tuple(relative(done) for _, done in sorted(history.readers.items()) if matters(done)),
                )
                for history in self._buffers.values()
            ),
        )

    def skip(self, n_instances: int) -> None:
        """Go on as if `n_instances` more had been walked that led to the same relative state."""
        if not n_instances:
            return
        floor = self._floor()
        moved: dict[int, _Done] = {}

        def later(done: _Done) -> _Done:
            if id(done) not in moved:
                clock = tuple(at + n_instances if at > low else at for at, low in zip(done.clock, floor, strict=True))
                moved[id(done)] = _Done(done.index + n_instances, done.stream, clock)
            return moved[id(done)]

        self.index += n_instances
        self._tails = [later(tail) if tail else None for tail in self._tails]
        for name, history in self._buffers.items():
            writer = history.writer if history.writer and history.writer.index > floor[history.writer.stream] else None
            readers = {key: later(done) for key, done in history.readers.items() if done.index > floor[done.stream]}
            self._buffers[name] = _History(later(writer) if writer else None, readers)


def _minimal(needed: list[_Done], predecessor: _Done | None) -> tuple[tuple[int, ...], _Clock]:
    """Drop what is implied: latest first, because only a later instance can vouch for an earlier one."""
    clock = predecessor.clock if predecessor else (_NEVER,) * len(STREAMS)
    after: list[int] = []
    for done in sorted(needed, key=lambda done: -done.index):
        if clock[done.stream] < done.index:
            after.append(done.index)
            clock = tuple(map(max, clock, done.clock))
    return tuple(sorted(after)), clock
