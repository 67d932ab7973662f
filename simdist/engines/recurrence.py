"""A pass over a plan with time as a vector: the recurrence of `simdist.engines.vector` and `simdist.engines.replay`.

With time as a vector over `[world_size, n]`, an operation is three lines of max-plus algebra:

    ready = max(end of its predecessor on the stream, ends of what it comes after) + gap
    start = max over its group of ready
    end   = start + seconds

and a few more for a ring with members that begin and end on their own (`simdist.cost.costs.Segments`). One pass over
the instances in program order gives every time, without events. Seconds follow from prices, or are given for every
instance. Gaps exist only if seconds are given. A `Tick` has no duration: it ends at the next tick of its clock.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import repeat
from operator import itemgetter
from typing import Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Segments
from simdist.plan.delays import Delays, DelaySource, seconds_of
from simdist.plan.first_come import FirstCome, sits_out
from simdist.plan.group import Group
from simdist.plan.ops import Delay, Enter, Op, Tick, is_passed_over, tick_s
from simdist.plan.plan import Plan
from simdist.plan.walk import Stretch, Template
from simdist.traces.breakdown import Collector, unpacked

Times: TypeAlias = NDArray[np.float64]
Progress: TypeAlias = Callable[[int], None]
_Seconds: TypeAlias = Times | None  # None: nothing is added

_LARGE = 4096  # values of ranks from which it pays to pack them, and to free rows early, for the cache
_KEPT_NBYTES = 2**28  # of one row per instance: from here on, times that may change are too many to keep
_FREED: Times = np.empty(0)
_BY_TIME = Enter(awaits="")  # for any buffer it may await
_FEW_COLUMNS = 2  # up to this many columns, numpy finds the last of a group faster by `reduceat`


class _Sharing(Protocol):
    """Tells when the groups of an operation end that may share links with other transfers."""

    def ends(self, index: int, step: int, start_s: Times, end_s: Times) -> tuple[Times | None, int]:
        """Return the ends of groups, `[n_groups, n]`, and the first instance with an end that may still change.

        Without ends, the recurrence has to go back to that instance, which has other ends now.

        Args:
            index: Of the instance.
            step: Its step.
            start_s: Of each group, `[n_groups, n]`.
            end_s: Of each group if all start together on idle links, `[n_groups, n]`.
        """
        ...

    def leave(self, until_s: Times) -> bool:
        """Return whether no end can change, because all transfers have ended at some times, `[n]`, if not before.

        Operations that start before these times and share links with them are then refused.
        """
        ...

    def of_one_rank(self) -> "_Sharing":
        """Return what tells the ends of one group, `[1, n]`, that stands for all."""
        ...


class Durations(Protocol):
    """Gives the duration of every instance, in every variant."""

    def gap_s(self, index: int) -> Times | None:
        """Return the seconds from the end of the dependencies of instance `index` until it is ready; None for none.

        Like `seconds`, they broadcast to `[world_size, n]`.
        """
        ...

    def seconds(self, index: int) -> Times | None:
        """Return the seconds of instance `index`, from its start or its group's start to its end; None for none."""
        ...


@dataclass(frozen=True, slots=True)
class GroupMeeting:
    """An operation that each group starts with its last member.

    Args:
        shape: Ranks and columns as `[n_blocks, size, stride, n]`.
        seconds: Of each group, broadcasting over `[n_blocks, 1, stride, n]`. Not used if durations are given.
        sharing: Tells when groups end, if other transfers may want their links.
        firsts: First rank of each group of a few consecutive ranks, if numpy is faster that way; else None.
        segments: How members begin and end on their own. If None, they begin with the last one and end together.
        first_come: The rule, if the first members to arrive do not wait for the others. There is then one group.
        order: Ranks in the order of the groups, if the groups are listed; else None. `shape` follows it.
    """

    shape: tuple[int, int, int, int]
    seconds: float | Times
    sharing: _Sharing | None
    firsts: NDArray[np.int64] | None
    segments: Segments | None = None
    first_come: FirstCome | None = None
    order: NDArray[np.int64] | None = None

    @classmethod
    def of(
        cls,
        group: Group,
        world_size: int,
        n: int,
        *,
        seconds: float | Times = 0.0,
        sharing: _Sharing | None = None,
        segments: Segments | None = None,
        first_come: FirstCome | None = None,
    ) -> "GroupMeeting":
        """Return the meeting of groups that take `seconds`: one number, `[n_groups]`, or `[n_groups or 1, n]`."""
        n_blocks, size, stride = group.shape(world_size)
        if isinstance(seconds, np.ndarray):
            seconds = np.broadcast_to(seconds, (n_blocks * stride, *seconds.shape[1:]))
            seconds = seconds.reshape(n_blocks, 1, stride, -1)
        firsts = np.arange(0, world_size, size) if stride == 1 and n <= _FEW_COLUMNS else None
        order = np.array(group.ranks) if group.ranks else None
        return cls((n_blocks, size, stride, n), seconds, sharing, firsts, segments, first_come, order)

    @property
    def key(self) -> tuple[tuple[int, int, int, int], bytes]:
        """What tells which ranks meet, and in how many columns."""
        return self.shape, b"" if self.order is None else self.order.tobytes()

    def of_one_rank(self) -> "Price | None":
        """Return the price of one rank that stands for all; None if groups or members differ."""
        if self.segments is not None or self.first_come is not None:
            return None
        n_blocks, _, stride, n = self.shape
        seconds = self.seconds
        if isinstance(seconds, np.ndarray):
            row = one_for_all(seconds.reshape(n_blocks * stride, -1))
            if row is None:
                return None
            seconds = np.asarray(row)
        if self.sharing is None:
            return seconds
        seconds = seconds.reshape(1, 1, 1, -1) if isinstance(seconds, np.ndarray) else seconds
        return GroupMeeting((1, 1, 1, n), seconds, self.sharing.of_one_rank(), None)

    def last_of_groups(self, ready: Times) -> Times:
        """Return when the last member of each group is ready, `[n_blocks, 1, stride, n]`.

        Args:
            ready: Of each rank, `[world_size, n]`, or packed. Then one block, or a stride of 1, may stand for all.
        """
        n_blocks, size, stride, n = self.shape
        n_rows = len(ready)
        if n_rows < n_blocks * size * stride:
            if n_rows == 1:
                return ready.reshape(1, 1, 1, n)
            if self.order is None and n_rows % n_blocks == 0 and size % (n_rows // n_blocks) == 0:
                return _last(ready.reshape(n_blocks, -1), n_rows // n_blocks).reshape(n_blocks, 1, 1, n)
            ready = unpacked(ready, n_blocks * size * stride)
        ready = self._in_order(ready)
        if self.firsts is not None:
            return np.maximum.reduceat(ready, self.firsts).reshape(n_blocks, 1, stride, n)
        return _last(ready.reshape(n_blocks, -1), size).reshape(n_blocks, 1, stride, n)

    def of_all_groups(self, times: Times) -> Times:
        """Return times, `[n_blocks or 1, 1, stride or 1, n]`, as `[n_groups, n]`."""
        n_blocks, _, stride, n = self.shape
        if times.size < n_blocks * stride * n:
            times = np.broadcast_to(times, (n_blocks, 1, stride, n))
        return times.reshape(-1, n)

    def packed(self, times: Times) -> Times:
        """Return times of groups, `[n_blocks or 1, 1, stride or 1, n]`, as those of ranks, packed if possible."""
        if self.order is not None and len(times) > 1:
            if not (times == times[:1]).all():
                return self.of_ranks(times)
            times = times[:1]
        if times.shape[2] > 1:
            if not (times == times[:, :, :1]).all():
                return self.of_ranks(times)
            times = times[:, :, :1]
        return times.reshape(len(times), -1)

    def ends(self, ready: Times, segments: Segments) -> Times:
        """Return the end of each member that begins on its own, `[n_blocks, size, stride, n]`."""
        n_blocks, size, stride, _ = self.shape
        ready = self._in_order(unpacked(ready, n_blocks * size * stride))
        segment_s = segments.segment_s.reshape(n_blocks, stride, size).transpose(2, 0, 1)[..., np.newaxis]
        return np.moveaxis(segments.end_s(np.moveaxis(ready.reshape(self.shape), 1, 0), segment_s), 0, 1)

    def of_ranks(self, times: Times) -> Times:
        """Spread times of groups, `[n_blocks, 1, stride, n]`, over their ranks, `[world_size, n]`."""
        n_blocks, size, stride, n = self.shape
        spread = np.empty((n_blocks * size * stride, n))
        self.write(times, spread)
        return spread

    def write(self, times: Times, out: Times) -> None:
        """Write times of groups or members, `[n_blocks, 1 or size, stride, n]`, to `out`, `[world_size, n]`."""
        if self.order is None:
            out.reshape(self.shape)[...] = times
        else:
            out[self.order] = np.broadcast_to(times, self.shape).reshape(out.shape)

    def _in_order(self, ready: Times) -> Times:
        """Return times of all ranks in the order of the groups."""
        return ready if self.order is None else ready[self.order]


Price: TypeAlias = float | Times | GroupMeeting
#: Index, template, ready, start, end: the arguments of `Collector.add`.
_Told: TypeAlias = tuple[int, Template, Times, Times, Times]
#: Template, row of its predecessor, rows of its other dependencies, seconds, meeting, rows that no later one needs.
_Instruction: TypeAlias = tuple[Template, int, tuple[int, ...], _Seconds, GroupMeeting | None, tuple[int, ...]]


class _GoBackError(Exception):
    """An instance has another end now: what comes after it has to be computed again."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


@dataclass(slots=True, eq=False)
class _Repetition:
    """One repetition of a stretch.

    Args:
        stretch: Its stretch.
        carried: How many rows before a repetition each row that it needs lies.
        program: Its instructions.
        index: Its first instance.
        step: Its first step.
        stays: Ends of instances before the stretch that later ones may need.
        rows: Zeros, the rows of earlier instances that it needs, and its own ends.
        n_freed: Number of instructions after which rows have been freed.
    """

    stretch: Stretch
    carried: tuple[int, ...]
    program: list[_Instruction]
    index: int
    step: int
    stays: dict[int, Times] = field(default_factory=dict)
    rows: list[Times] = field(default_factory=list)
    n_freed: int = 0

    def end(self, index: int) -> Times:
        """Return the ends of an instance that it executed or needed."""
        position = index - self.index
        if position >= 0 or -position in self.carried:
            return self.rows[_place(position, self.carried)]
        return self.stays[index]

    def live(self) -> dict[int, Times]:
        """Return the ends that later stretches may need, if this is the last of its stretch."""
        after = self.index + len(self.program)
        return {after - back: self.end(after - back) for back in self.stretch.live}

    def free(self, until: int) -> None:
        """Free the rows that only instructions before number `until` need."""
        for instruction in self.program[self.n_freed : until]:
            for row in instruction[-1]:
                self.rows[row] = _FREED
        self.n_freed = max(self.n_freed, until)


@final
class Recurrence:
    """Executes a plan on vectors `[world_size, n]`; fills `table` with all ends, or reports all times to `observer`.

    The ends of the instances are rows of a list: zeros, the rows of earlier repetitions that may still be needed, and
    the rows of this repetition. An instruction names its operands by their place in that list.

    Args:
        plan: A legal plan.
        n: Columns of a vector: seeds, or variants.
        prices: Price of each operation: a meeting, or seconds as one number, `[world_size]` or `[world_size or 1, n]`.
            An operation without a price takes no time.
        delays: Source of the injected delays.
        durations: Replace the seconds of prices, and delays.
        observer: Gets the times of every instance in program order.
        table: Receives the ends, float64 `[n_instances, world_size, n]`. A plan that drops late ranks needs a table of
            one column.
        n_ranks: Rows of a vector, by default the ranks of the plan; 1 if one rank stands for all.

    Attributes:
        late: See `simdist.traces.trace.Trace`.
    """

    def __init__(
        self,
        plan: Plan,
        n: int,
        prices: Mapping[Op, Price],
        *,
        delays: DelaySource | None = None,
        durations: Durations | None = None,
        observer: Collector | None = None,
        table: Times | None = None,
        n_ranks: int | None = None,
    ) -> None:
        self._prices = {op: _added(price) for op, price in prices.items()}
        has_delays = any(isinstance(op, Delay) for op in plan.distinct_ops)
        self._feed = _DelayFeed(delays, plan.n_steps) if delays and has_delays else None
        self._durations = durations
        self._observer = observer
        self._table = table
        self._zero = np.zeros((n_ranks or plan.world_size, n))
        self._packs = table is None and durations is None and self._zero.size >= _LARGE
        sharing = (meeting.sharing for _, meeting in self._prices.values() if meeting is not None)
        self._sharing = next((each for each in sharing if each is not None), None)
        self._kept: list[_Repetition] = []  # the latest, and those before it with ends that may change
        self._told: list[_Told] = []  # what the observer will be told of instances that may change
        self._tell = None if observer is None else self._tell_later if self._sharing else observer.add
        self.late: dict[int, tuple[int, ...]] = {}

    def run(self, walked: Iterable[Stretch], progress: Progress | None = None) -> None:
        """Execute the plan, given its stretches; `progress` is called with the number of steps done."""
        for stretch in walked:
            carried, program = self._compile(stretch)
            for number in range(stretch.times):
                index = stretch.first_index + number * len(program)
                step = stretch.first_step + number * stretch.n_steps
                self._kept.append(_Repetition(stretch, carried, program, index, step))
                self._perform()
                if progress:
                    progress(step + stretch.n_steps)
        for told in self._told:
            if self._observer is not None:
                self._observer.add(*told)

    def _perform(self) -> None:
        """Execute the latest repetition, and those before it again if their ends change."""
        at = self._kept[-1]
        self._begin(at)
        place = 0
        while True:
            try:
                self._run_once(at.program[place:], at.rows, at.index + place, at.step)
            except _GoBackError as error:
                at = next(each for each in reversed(self._kept) if each.index <= error.index)
                place = error.index - at.index
                del at.rows[_place(place, at.carried) :]
                del self._told[bisect_left(self._told, error.index, key=itemgetter(0)) :]
                continue
            if at is self._kept[-1]:
                return
            at = self._kept[self._kept.index(at) + 1]
            self._begin(at)
            place = 0

    def _begin(self, this: "_Repetition") -> None:
        """Give a repetition the rows that it needs of the one before it."""
        number = self._kept.index(this)
        if number:
            before = self._kept[number - 1]
            if before.stretch is this.stretch:
                this.stays = before.stays
                ends = [before.end(this.index - distance) for distance in this.carried]
            else:
                this.stays = before.live()
                ends = [this.stays.get(this.index - distance, self._zero) for distance in this.carried]
            this.rows = [self._zero, *ends]
        else:
            this.rows = [self._zero] * (1 + len(this.carried))
        if self._sharing is None:
            del self._kept[:number]

    def _tell_later(self, index: int, template: Template, ready_s: Times, start_s: Times, end_s: Times) -> None:
        """Keep times until they cannot change, or until too many are kept.

        Operations of a step usually need what the rank computed before. So what all ranks have computed usually tells
        which transfers no later one can meet.
        """
        self._told.append((index, template, ready_s, start_s, end_s))
        is_much = len(self._told) * self._zero.nbytes > _KEPT_NBYTES
        if is_much and template.lane.kind == "compute" and self._sharing and self._sharing.leave(end_s.min(axis=0)):
            self._settle(index + 1)

    def _settle(self, open_from: int) -> None:
        """Tell the observer of all instances before one, which cannot change any more."""
        n_settled = 0
        for told in self._told:
            if told[0] >= open_from:
                break
            if self._observer is not None:
                self._observer.add(*told)
            n_settled += 1
        del self._told[:n_settled]
        while len(self._kept) > 1 and self._kept[1].index <= open_from:
            del self._kept[0]
        self._kept[0].free(min(open_from - self._kept[0].index, len(self._kept[0].program)))

    def _compile(self, stretch: Stretch) -> tuple[tuple[int, ...], list[_Instruction]]:
        """Return how many rows before a repetition each row that it needs lies, and its instructions."""
        backs = [
            [back for back in (template.previous, *template.after) if back is not None]
            for template in stretch.templates
        ]
        needed = {back - at for at, each in enumerate(backs) for back in each if back > at}
        carried = tuple(sorted(needed, reverse=True))
        program: list[_Instruction] = []
        enter: Enter | None = None
        for at, template in enumerate(stretch.templates):
            if template.position == 0:
                enter = template.op if isinstance(template.op, Enter) else None
            first = 0 if template.previous is None else _place(at - template.previous, carried)
            others = tuple(_place(at - back, carried) for back in template.after)
            seconds, meeting = self._prices.get(template.op, (None, None))
            if enter is not None and enter.absent and is_passed_over(template.op, enter):
                enters = np.ones_like(self._zero)
                enters[list(enter.absent)] = 0.0
                seconds = enters if isinstance(template.op, Delay) else None if seconds is None else seconds * enters
            program.append((template, first, others, seconds, meeting, ()))
        return carried, self._freeing(program, carried, stretch.live)

    def _freeing(
        self, program: list[_Instruction], carried: tuple[int, ...], live: tuple[int, ...]
    ) -> list[_Instruction]:
        """Return instructions with the rows that none after them needs, if it pays to free them."""
        if not self._packs:
            return program
        n = len(program)
        kept = {_place(n - back, carried) for back in (*carried, *live) if back <= n or back - n in carried}
        freed: list[list[int]] = [[] for _ in program]
        last = {at: at - 1 - len(carried) for at in range(1 + len(carried), 1 + len(carried) + n)}
        for at, (_, first, others, _, _, _) in enumerate(program):
            last |= dict.fromkeys((first, *others), at)
        for row, at in last.items():
            if row and row not in kept:
                freed[at].append(row)
        return [(*each[:-1], tuple(rows)) for each, rows in zip(program, freed, strict=True)]

    def _run_once(  # noqa: C901 (an inner loop: calls would cost more than it does)
        self,
        program: list[_Instruction],
        rows: list[Times],
        index: int,
        step: int,
        *,
        outside: NDArray[np.bool_] | None = None,
    ) -> None:
        """Append the ends of instructions. Ranks that sit out the step skip the operations that they then omit."""
        maximum: Callable[..., Times] = _maximum if self._packs else np.maximum
        add: Callable[..., Times] = _add if self._packs else np.add
        tell = self._tell
        lasts = _LastsOfGroups() if self._packs else None
        only_ends = self._observer is not None and self._observer.only_ends
        durations = self._durations
        feed = self._feed
        outs = repeat(None, len(program)) if self._table is None else self._table[index : index + len(program)]
        for at, (instruction, out) in enumerate(zip(program, outs, strict=True), index):
            template, first, others, seconds, meeting, freed = instruction
            ready = rows[first]
            starts: Times | None = None
            if lasts is not None and meeting is not None and not meeting.segments:
                starts = reduce(np.maximum, [lasts.of(meeting, rows[row]) for row in (first, *others)])
            if starts is None or not only_ends:
                for other in others:
                    ready = maximum(ready, rows[other])
            if durations is not None:
                ready, seconds = _given(durations, at, template, ready)
            start = ready
            if meeting is not None and meeting.first_come is not None:
                end = self._take_first(meeting, meeting.first_come, program, rows, index, step, at - index)
            elif meeting is not None:
                start, end = self._meet(meeting, seconds, ready, starts, out, at, step + template.step)
            elif feed is not None and isinstance(template.op, Delay):
                delay_s = feed.delay(template.op, step + template.step, self._kept[0].step)
                end = add(ready, delay_s if seconds is None else delay_s * seconds, out)
            elif seconds is not None:
                end = add(ready, seconds, out)
                if lasts is not None:
                    lasts.follow(ready, seconds, end)
            elif isinstance(template.op, Tick):
                written = reduce(maximum, (rows[other] for other in others), self._zero)
                end = _until_tick(unpacked(ready, len(written)), tick_s(written, template.op.period_s), out)
            else:
                end = ready
            if outside is not None and is_passed_over(template.op, _BY_TIME):
                end = np.where(outside, ready, end)
            if out is not None and end is not out:
                out[...] = end
            rows.append(end)
            if tell is not None:
                tell(at, template, ready, start, end)
            if freed and self._sharing is None:
                for row in freed:
                    rows[row] = _FREED

    def _take_first(
        self,
        meeting: GroupMeeting,
        rule: FirstCome,
        program: list[_Instruction],
        rows: list[Times],
        index: int,
        step: int,
        here: int,
    ) -> Times:
        """Return the ends of a first-come all-reduce, which is number `here` of a program.

        The first to arrive are found as if all ranks had entered the step. This is valid: a rank that sits out would
        have arrived after the end. Then the step is run again for the ranks that sit it out.
        """
        first = here - program[here][0].position
        base = len(rows) - here
        ready = _ready(program[here], rows)
        chosen = rule.choose((come_s, rank) for rank, come_s in enumerate(ready[:, 0].tolist()))
        over_s = chosen.start_s + float(np.ravel(meeting.seconds)[0])
        outside = sits_out(rows[base + first], over_s)
        if outside.any():
            del rows[base + first + 1 :]
            self.late[index + first] = tuple(np.flatnonzero(outside).tolist())
            self._run_once(program[first + 1 : here], rows, index + first + 1, step, outside=outside)
            ready = _ready(program[here], rows)
        self.late[index + here] = tuple(sorted(chosen.late))
        end = rule.end_s(ready, over_s)
        end[list(chosen.first)] = over_s
        return end

    def _meet(
        self,
        meeting: GroupMeeting,
        seconds: _Seconds,
        ready: Times,
        starts: Times | None,
        out: Times | None,
        index: int,
        step: int,
    ) -> tuple[Times, Times]:
        """Start each group with its last member; return starts (unless only ends are kept) and ends.

        Args:
            meeting: The operation.
            seconds: Its seconds.
            ready: When the members are ready, `[world_size, n]` or packed.
            starts: When the last member of each group is ready, if that is known: `ready` may then be too early.
            out: Receives the ends, if they are kept in a table.
            index: Of the instance.
            step: Its step.
        """
        if starts is None:
            starts = meeting.last_of_groups(ready)
        if self._durations is not None:
            start = meeting.of_ranks(starts)
            return start, start if seconds is None else start + seconds
        if meeting.segments:
            ends = meeting.ends(ready, meeting.segments)
        else:
            ends = starts if seconds is None else starts + seconds
        if meeting.sharing:
            n = starts.shape[-1]
            of_groups = map(meeting.of_all_groups, (starts, ends))
            found, open_from = meeting.sharing.ends(index, step, *of_groups)
            if found is None:
                raise _GoBackError(open_from)
            ends = found.reshape(meeting.shape[0], 1, meeting.shape[2], n)
            self._settle(open_from)
        if self._packs and not meeting.segments:
            return meeting.packed(starts), meeting.packed(ends)
        if out is None:
            return meeting.of_ranks(starts), meeting.of_ranks(ends)
        meeting.write(ends, out)
        return ready, out


class _LastsOfGroups:
    """When the last members of groups are ready, for a row of times and for rows that add the same seconds to all.

    The last member stays the last, also after rounding. So a maximum is found once for a chain of operations.
    """

    __slots__ = ("_lasts", "_row")

    def __init__(self) -> None:
        self._row = _FREED
        self._lasts: dict[tuple[tuple[int, int, int, int], bytes], Times] = {}  # by the key of the meeting

    def of(self, meeting: GroupMeeting, row: Times) -> Times:
        """Return what `GroupMeeting.last_of_groups` does."""
        key = meeting.key
        if row is self._row and key in self._lasts:
            return self._lasts[key]
        found = meeting.last_of_groups(row)
        if found.size < row.size:  # else it is no work
            if row is not self._row:
                self._row = row
                self._lasts = {}
            self._lasts[key] = found
        return found

    def follow(self, row: Times, seconds: Times, end: Times) -> None:
        """Go on to a row that has come from another by adding seconds."""
        if row is self._row and (seconds.ndim == 0 or len(seconds) == 1):
            self._row = end
            self._lasts = {key: last + seconds for key, last in self._lasts.items()}


def _last(of_members: Times, size: int) -> Times:
    """Return the last of the times of members, `[n_blocks, size * n]`, as `[n_blocks, n]`.

    Numpy compares long rows with each other in less time than it reduces along a short axis.
    """
    n = of_members.shape[1] // size
    while size > 1 and of_members.size >= _LARGE:
        size, is_odd = divmod(size, 2)
        half = size * n
        halves = np.maximum(of_members[:, :half], of_members[:, half : 2 * half])
        if is_odd:
            np.maximum(halves[:, :n], of_members[:, 2 * half :], out=halves[:, :n])
        of_members = halves
    return of_members if size == 1 else np.asarray(np.maximum.reduce(of_members.reshape(-1, size, n), axis=1))


def _on_packed(function: Callable[[Times, Times], Times], one: Times, other: Times) -> Times:
    """Apply a function to the times of ranks, of which one or both may be packed."""
    more = one if len(one) > len(other) else other
    n_less = min(len(one), len(other))
    if n_less in (1, len(more)):
        return function(one, other)
    if len(more) % n_less:
        n_ranks = math.lcm(len(more), n_less)
        return function(unpacked(one, n_ranks), unpacked(other, n_ranks))
    one, other = (each.reshape(n_less, -1, each.shape[1]) for each in (one, other))
    found = function(one, other)
    return found.reshape(-1, found.shape[2])


def _until_tick(ready: Times, next_s: Times, out: Times | None) -> Times:
    return np.add(ready, np.maximum(next_s - ready, 0.0), out)


def _maximum(one: Times, other: Times) -> Times:
    return _on_packed(np.maximum, one, other)


def _add(times: Times, seconds: Times, out: None) -> Times:
    """Return `np.add` of times that may be packed."""
    return _on_packed(np.add, times, seconds) if seconds.ndim else np.add(times, seconds)


def in_columns(seconds: Sequence[float | Times]) -> float | Times:
    """Return the seconds of each price list as a column, `[n or 1, n_lists]`; if all are equal, the first."""
    if all(np.array_equal(seconds[0], each) for each in seconds[1:]):
        return seconds[0]
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, seconds)), axis=1)


def one_for_all(seconds: float | Times) -> float | Times | None:
    """Return the seconds of each rank or group as those of a single one, `[1, n]`; None if they differ."""
    if not isinstance(seconds, np.ndarray):
        return seconds
    rows = seconds.reshape(len(seconds), -1)
    return rows[:1] if (rows == rows[:1]).all() else None


def _given(durations: Durations, index: int, template: Template, ready: Times) -> tuple[Times, Times | None]:
    """Return when an instance is ready after its gap, and its seconds (None for a tick)."""
    gap_s = durations.gap_s(index)
    seconds = None if isinstance(template.op, Tick) else durations.seconds(index)
    return ready if gap_s is None else ready + gap_s, seconds


def _ready(instruction: _Instruction, rows: list[Times]) -> Times:
    """Return when all dependencies of an instruction have ended."""
    _, first, others, _, _, _ = instruction
    return reduce(np.maximum, (rows[other] for other in others), rows[first])


def _place(position: int, carried: tuple[int, ...]) -> int:
    """Return the row of an instance: at `position` of this repetition or, if negative, before it."""
    return 1 + len(carried) + position if position >= 0 else 1 + carried.index(-position)


def _added(price: Price) -> tuple[_Seconds, GroupMeeting | None]:
    """Return the seconds of a price, in a shape to add to `[world_size, n]`, and its meeting."""
    if isinstance(price, GroupMeeting):
        return np.asarray(price.seconds), price  # an array, because numpy takes longer to add a number
    if isinstance(price, np.ndarray):
        return price.reshape(len(price), -1), None
    return np.asarray(price) if price else None, None


class _DelayFeed:
    """Takes delays from their source in chunks that stay small for any number of ranks and seeds."""

    _CHUNK_VALUES = 1_000_000  # 8 MB

    def __init__(self, source: DelaySource, n_steps: int) -> None:
        self._source = source
        self._n_steps = n_steps
        self._chunk_steps = 1
        self._chunks: list[_DelayChunk] = []
        self._end = 0

    def delay(self, op: Delay, step: int, first_needed: int) -> Times:
        """Return what an operation takes in a step, `[world_size, n_seeds]`. Forget steps before `first_needed`."""
        while step >= self._end:
            n_steps = min(self._chunk_steps, self._n_steps - self._end)
            taken = self._source.take(n_steps)
            kept = [each for each in self._chunks if each.steps.stop > first_needed]
            self._chunks = [*kept, _DelayChunk(range(self._end, self._end + n_steps), taken)]
            self._end += n_steps
            n_values = next(iter(taken.values()))[:, 0].size
            self._chunk_steps = max(1, self._CHUNK_VALUES // n_values)
        chunk = next(each for each in reversed(self._chunks) if step in each.steps)
        delays_s: Times = chunk.of(op)[step - chunk.steps.start]
        return delays_s


@dataclass(frozen=True, slots=True)
class _DelayChunk:
    """The delays of some steps, and what operations take of them, `[n_steps, world_size, n_seeds]`."""

    steps: range
    taken: Delays
    _of: dict[Delay, Times] = field(default_factory=dict)

    def of(self, op: Delay) -> Times:
        found = self._of.get(op)
        if found is None:
            found = self._of[op] = np.moveaxis(seconds_of(op, self.taken), 0, 2)
        return found
