"""The dependencies of a plan, derived once for all interpreters.

Walk the steps in program order. Remember, per buffer, its last writer and its readers since. An operation that reads a
buffer comes after the last writer. One that writes it comes after the last writer and after those readers, also across
steps. Every operation comes after the last host operation before it, because the host enqueues in order.

`Instance.after` keeps only the dependencies that do not already follow from others. A lane runs in order. So an
instance that is known to be done implies that all before it on its lane are done, with everything that those waited
for. Each live instance has a vector clock: the latest instance of each lane that is surely done when this one is. The
clock tells which dependencies are implied. The rest are the events that a CUDA program would record and wait for:
rarely more than one per operation.

>>> from simdist.plan import AllReduce, Backward, Buffer, Forward, Group, Optimize, Plan
>>> step = (Forward(("param",), ("loss",)), Backward(("loss", "param"), "grad"),
...         AllReduce("grad", Group(2)), Optimize(("param",), ("grad",)))
>>> buffers = tuple(Buffer(name, 1) for name in ("param", "loss", "grad"))
>>> plan = Plan.from_steps("tiny", world_size=2, buffers=buffers, steps=[step] * 2)
>>> [instance.after for instance in walk(plan)]
[(), (), (1,), (2,), (), (), (5,), (6,)]

Plans repeat, and so do their dependencies, relative to the instance. `stretches` walks a run of the plan's order until
one repetition leaves the state as it was, or shifted by the repetition's length. The remaining repetitions need no
walk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.plan.lanes import HOST, LANES, Lane
from simdist.plan.ops import Op, Wait, drops, lane_of, micro_batches, reads, writes
from simdist.plan.plan import Plan, Run


@dataclass(frozen=True, slots=True)
class Instance:
    """One operation of one step.

    Args:
        index: Row in the trace; counts from 0 in program order.
        step: Step, from 0.
        position: Place in the step's body.
        op: The operation.
        lane: Where it runs.
        after: Indices of the instances on other lanes, or on the host, that it waits for. Its predecessor on its lane
            is implied.
    """

    index: int
    step: int
    position: int
    op: Op
    lane: Lane
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """An instance of a stretch, relative to itself.

    Args:
        step: Step within the stretch's pattern.
        position: Place in the step's body.
        op: The operation.
        lane: Where it runs.
        previous: Distance to its predecessor on its own lane, in instances; None for the first on a lane.
        after: Distances to the instances on other lanes that it waits for.
    """

    step: int
    position: int
    op: Op
    lane: Lane
    previous: int | None
    after: tuple[int, ...]

    def moved(self, n_steps: int) -> "Template":
        """Return the same instance, some steps later."""
        return Template(self.step + n_steps, self.position, self.op, self.lane, self.previous, self.after)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps with the same operations and the same relative dependencies, `times` times over.

    Args:
        first_step: Its first step.
        first_index: Its first instance.
        n_steps: Steps of one repetition.
        times: Repetitions.
        templates: The instances of one repetition.
        live: Distances from the end of the stretch to the instances that later ones may refer to.
    """

    first_step: int
    first_index: int
    n_steps: int
    times: int
    templates: tuple[Template, ...]
    live: tuple[int, ...]


def walk(plan: Plan, first_step: int = 0) -> Iterator[Instance]:
    """Yield every operation instance from a step on in program order, with the instances that it comes after.

    Memory does not grow with the number of steps.
    """
    for stretch in stretches(plan):
        skipped = max(0, min(stretch.times, (first_step - stretch.first_step) // stretch.n_steps))
        index = stretch.first_index + skipped * len(stretch.templates)
        step = stretch.first_step + skipped * stretch.n_steps
        for _ in range(stretch.times - skipped):
            for template in stretch.templates:
                after = tuple(index - back for back in template.after)
                if step + template.step >= first_step:
                    place = step + template.step, template.position
                    yield Instance(index, *place, template.op, template.lane, after)
                index += 1
            step += stretch.n_steps


def stretches(plan: Plan) -> Iterator[Stretch]:
    """Yield the plan's instances as stretches of equal repetitions, in order. Those of a few short plans are kept."""
    n_instances = sum(len(plan.bodies[body]) for run in plan.order for body in run.bodies)
    yield from _kept_stretches(plan) if n_instances <= _MOST_KEPT else _walked(plan)


@lru_cache(maxsize=8)
def _kept_stretches(plan: Plan) -> tuple[Stretch, ...]:
    like, found = _stretches_like(_Structure.of(plan))
    return found if like is plan else tuple(_with_operations(plan, found))


@dataclass(frozen=True, slots=True)
class _Structure:
    """All of a plan that its walk depends on. The sizes of groups and buffers, for example, do not matter."""

    plan: Plan = field(compare=False)
    lanes: tuple[Lane, ...]
    bodies: tuple[tuple[tuple[str, tuple[str, ...], tuple[str, ...], bool], ...], ...]
    order: tuple[Run, ...]

    @classmethod
    def of(cls, plan: Plan) -> "_Structure":
        """Return the structure of a plan."""
        bodies = tuple(
            [
                tuple([(lane_of(op).name, reads(op), writes(op), isinstance(op, Wait)) for op in body])
                for body in plan.bodies
            ]
        )
        return cls(plan, plan.lanes, bodies, plan.order)


@lru_cache(maxsize=32)
def _stretches_like(structure: _Structure) -> tuple[Plan, tuple[Stretch, ...]]:
    """Return a plan of this structure, and its stretches."""
    return structure.plan, tuple(_walked(structure.plan))


def _with_operations(plan: Plan, found: Iterable[Stretch]) -> Iterator[Stretch]:
    """Yield the stretches of a plan, given those of another one with the same structure."""
    each = iter(found)
    for run in plan.order:
        bodies = [plan.bodies[number] for number in run.bodies]
        left = run.times
        while left:
            like = next(each)
            templates = tuple(
                [
                    Template(its.step, its.position, bodies[its.step][its.position], its.lane, its.previous, its.after)
                    for its in like.templates
                ]
            )
            yield replace(like, templates=templates)
            left -= like.times


def _walked(plan: Plan) -> Iterator[Stretch]:
    walker = _Walker(plan)
    step = 0
    for run in plan.order:
        left = run.times
        while left:
            before = walker.state()
            first_index = walker.index
            templates = walker.walk_steps(run)
            times = left if _recurs(before, walker.state(), len(templates)) else 1
            walker.skip(before, (times - 1) * len(templates))
            yield Stretch(step, first_index, len(run.bodies), times, templates, walker.live())
            step += times * len(run.bodies)
            left -= times


_MOST_KEPT = 20_000  # instances of a plan with repetitions counted once
_NEVER = -1
_Clock: TypeAlias = tuple[int, ...]  # per lane: the latest instance that is surely done
_HOST = LANES.index(HOST)
_MANY_EQUAL = 3  # steps; from here on, looking for recurrence takes less than walking them


@dataclass(slots=True)
class _Done:
    """An instance that others may wait for, and its clock: the instances that are surely done once it is."""

    index: int
    lane: int
    clock: _Clock


@dataclass(slots=True)
class _History:
    """The last accesses to a buffer: its writer, and per lane the latest reader since."""

    writer: _Done | None = None
    readers: dict[int, _Done] = field(default_factory=dict)


class _Walker:
    """The state of a walk."""

    def __init__(self, plan: Plan) -> None:
        self.index = 0
        self._lanes = plan.lanes
        numbers = {lane: number for number, lane in enumerate(self._lanes)}
        self._bodies = [
            [(position, op, numbers[lane_of(op)], reads(op), writes(op)) for position, op in enumerate(body)]
            for body in plan.bodies
        ]
        self._used = sorted({lane for body in self._bodies for _, _, lane, _, _ in body})
        self._n_lanes = len(self._lanes)
        self._start: _Clock = (_NEVER,) * self._n_lanes
        self._buffers = {buffer.name: _History() for buffer in plan.buffers}
        self._tails: list[_Done | None] = [None] * self._n_lanes

    def walk_steps(self, run: Run) -> tuple[Template, ...]:
        """Walk one repetition of a run. Equal steps that follow one another are walked until they recur."""
        found: list[Template] = []
        step = 0
        for body, equal in groupby(run.bodies):
            left = len(list(equal))
            while left:
                before = self.state() if left >= _MANY_EQUAL else None
                templates = [self._visit(step, *decoded) for decoded in self._bodies[body]]
                found += templates
                step += 1
                left -= 1
                if before is not None and _recurs(before, self.state(), len(templates)):
                    self.skip(before, left * len(templates))
                    found += [each.moved(by) for by in range(1, left + 1) for each in templates]
                    step += left
                    left = 0
        return tuple(found)

    def _visit(
        self, step: int, position: int, op: Op, lane: int, read: tuple[str, ...], written: tuple[str, ...]
    ) -> Template:
        predecessor = self._tails[lane]
        clock = predecessor.clock if predecessor else self._start
        needed = [each for each in self._needed(read, written) if clock[each.lane] < each.index]
        after: tuple[int, ...] = ()
        if needed:
            after, clock = _minimal(needed, clock)
        done = _Done(self.index, lane, (*clock[:lane], self.index, *clock[lane + 1 :]))
        self._tails[lane] = done
        if not isinstance(op, Wait):  # it looks at no contents, so no later writer has to wait for it
            for name in read:
                self._buffers[name].readers[lane] = done
        for name in written:
            self._buffers[name] = _History(writer=done)
        previous = self.index - predecessor.index if predecessor else None
        back = tuple([self.index - index for index in after])
        self.index += 1
        return Template(step, position, op, self._lanes[lane], previous, back)

    def _needed(self, read: tuple[str, ...], written: tuple[str, ...]) -> list[_Done]:
        host = self._tails[_HOST]
        needed = [host] if host else []
        buffers = self._buffers
        for name in read + written:
            writer = buffers[name].writer
            if writer:
                needed.append(writer)
        for name in written:
            needed.extend(buffers[name].readers.values())
        return needed

    def live(self) -> tuple[int, ...]:
        """Return the distances to the instances that a later one may come after, furthest first.

        Instances that every lane in use knows to be done are left out.
        """
        clocks = [tail.clock if tail else self._start for tail in (self._tails[lane] for lane in self._used)]
        floor = [min(known) for known in zip(*clocks, strict=True)]
        live = {tail.index for tail in self._tails if tail}
        live |= {done.index for done in self.state() if done and done.index > floor[done.lane]}
        return tuple(self.index - index for index in sorted(live))

    def state(self) -> list[_Done | None]:
        """Return the tails of the lanes and, of each buffer, the writer and the last reader on each lane."""
        slots = list(self._tails)
        for history in self._buffers.values():
            slots.append(history.writer)
            slots.extend(history.readers.get(lane) for lane in range(self._n_lanes))
        return slots

    def skip(self, before: list[_Done | None], n_instances: int) -> None:
        """Skip ahead by `n_instances`, as if the walk from `before` to the present state had been repeated."""
        if not n_instances:
            return

        def moved_index(then: int, now: int) -> int:
            return now if now == then else now + n_instances

        def moved_done(then: _Done | None, now: _Done | None) -> _Done | None:
            if then is None or now is None:
                return None
            clock = tuple(map(moved_index, then.clock, now.clock))
            return _Done(moved_index(then.index, now.index), now.lane, clock)

        moved = [moved_done(then, now) for then, now in zip(before, self.state(), strict=True)]
        self.index += n_instances
        self._tails = moved[: self._n_lanes]
        rest = iter(moved[self._n_lanes :])
        for name in self._buffers:
            writer = next(rest)
            readers = {lane: done for lane in range(self._n_lanes) if (done := next(rest))}
            self._buffers[name] = _History(writer, readers)


def _recurs(before: list[_Done | None], now: list[_Done | None], n_instances: int) -> bool:
    """Tell whether each further repetition of `n_instances` would leave the same state, shifted.

    Every number must have stayed or moved by `n_instances`. A clock that moves may later overtake an instance that
    stays. That would change dependencies. So all such clocks must have passed such instances already.
    """
    n_lanes = max((len(done.clock) for done in now if done), default=0)
    stays_at = [_NEVER] * n_lanes
    moves_from: list[list[int]] = [[] for _ in range(n_lanes)]
    for then, done in zip(before, now, strict=True):
        if then is None or done is None:
            if then is not done:
                return False
            continue
        moves = [at - at_then for at, at_then in zip(done.clock, then.clock, strict=True)]
        if done.lane != then.lane or not {done.index - then.index, *moves} <= {0, n_instances}:
            return False
        if done.index == then.index:
            stays_at[done.lane] = max(stays_at[done.lane], done.index)
        for lane, move in enumerate(moves):
            if move:
                moves_from[lane].append(then.clock[lane])
    return all(min(clocks, default=limit) >= limit for clocks, limit in zip(moves_from, stays_at, strict=True))


def _minimal(needed: list[_Done], clock: _Clock) -> tuple[tuple[int, ...], _Clock]:
    """Drop implied dependencies. Check the latest first, because only a later instance can imply an earlier one."""
    after: list[int] = []
    for done in sorted(needed, key=lambda done: -done.index) if len(needed) > 1 else needed:
        if clock[done.lane] < done.index:
            after.append(done.index)
            clock = tuple(map(max, clock, done.clock))
    after.reverse()
    return tuple(after), clock


def drops_late(plan: Plan) -> dict[int, int]:
    """Return the trace rows of all-reduces with `drop`, in order, each with the row of its step's `Enter`."""
    within = [drops(body) for body in plan.bodies]
    if not any(within):  # a step begins with `Enter`, so none is at 0
        return {}
    steps = zip(plan.first_instances().tolist(), plan.body_of_steps(), strict=False)
    return {first + at: first for first, body in steps if (at := within[body]) is not None}


@dataclass(frozen=True, slots=True)
class Occurrences:
    """One operation of one body, with every step that runs it.

    Args:
        op: The operation.
        steps: The steps, int64 `[n]`, increasing; each once.
        rows: Its rows in a trace, int64 `[n]`.
        micro_batch: The micro-batch of each step that it belongs to.
    """

    op: Op
    steps: NDArray[np.int64]
    rows: NDArray[np.int64]
    micro_batch: int


def occurrences(plan: Plan) -> Iterator[Occurrences]:
    """Yield every operation of every body that runs, body after body, in the order of the program."""
    first = plan.first_instances()[:-1]
    bodies = np.fromiter(plan.body_of_steps(), dtype=np.int64, count=plan.n_steps)
    for number, body in enumerate(plan.bodies):
        steps = np.flatnonzero(bodies == number)
        for position, (op, micro_batch) in enumerate(zip(body, micro_batches(body), strict=True)):
            if len(steps):
                yield Occurrences(op, steps, first[steps] + position, micro_batch)
