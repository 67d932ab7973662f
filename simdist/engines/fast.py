"""The fast engine: the same times by numpy recurrences, over all ranks and all seeds at once.

With time as a vector over `[world_size, n_seeds]`, an operation is three lines of max-plus algebra:

    ready = max(end of its predecessor on the stream, ends of what it comes after)
    start = max over its group of ready
    end   = start + seconds

One pass over the instances in program order gives every time, without events. The additions and maxima are those of the
discrete-event engine, in the same order, so the results are equal to the last bit wherever no resource is shared.

Where transfers share a resource, this holds as long as they start together (then the fluid network is solved once,
ahead) or apart. Anything else is refused with `UnsupportedError`; the discrete-event engine can do it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs, Local, Shared, Varying
from simdist.engines.contention import Contention
from simdist.errors import UnsupportedError
from simdist.plan import COLLECTIVES, Channel, Delay, Op, Plan, Tick, op_text
from simdist.plan.delays import Delays, DelaySource, DrawnDelays, check_delays
from simdist.plan.ops import tick_s
from simdist.plan.walk import Stretch, Template, stretches
from simdist.traces.breakdown import Attribution, Breakdown, Observer
from simdist.traces.trace import Trace

Times: TypeAlias = NDArray[np.float64]
Progress: TypeAlias = Callable[[int], None]

_FEW = 8  # members of a group up to which numpy is faster member by member than by a reduction along a short axis
_FEW_SEEDS = 2  # up to which it is faster by `reduceat`


def simulate(plan: Plan, costs: Costs, delays: Delays, *, progress: Progress | None = None) -> Trace:
    """Simulate a plan and keep every time.

    Args:
        plan: A legal plan.
        costs: Its price list.
        delays: Channel -> float64 `[n_steps, world_size]`, seconds.
        progress: Called with the number of steps done.

    Raises:
        PlanError: The delays do not fit the plan.
        UnsupportedError: Transfers share a resource and start at different times, or loads differ from one another.
    """
    check_delays(plan, delays)
    times_s = np.empty((3, plan.n_instances, plan.world_size))  # one block: large enough to get huge pages from Linux
    ready_s, start_s, end_s = times_s
    walked = list(stretches(plan))
    _Machine(plan, costs, 1, table=end_s[:, :, np.newaxis]).run(walked, DrawnDelays(delays), progress)
    for stretch in walked:
        _recover_ready_and_start(stretch, ready_s, start_s, end_s)
    return Trace(plan, ready_s, start_s, end_s, source="simulated by fast")


def measure(
    plan: Plan, costs: Costs, delays: DelaySource, *, n_seeds: int, progress: Progress | None = None
) -> Breakdown:
    """Simulate a plan for many seeds at once and keep only where the time went.

    Memory is that of a few steps, however many there are.

    Args:
        plan: A legal plan.
        costs: Its price list.
        delays: Source of `[n_steps, world_size, n_seeds]` delays.
        n_seeds: Seeds.
        progress: Called with the number of steps done.

    Raises:
        UnsupportedError: Transfers share a resource and start at different times.
    """
    attribution = Attribution(plan.world_size, n_seeds)
    _Machine(plan, costs, n_seeds, observer=attribution).run(stretches(plan), delays, progress)
    return attribution.finish(plan.n_steps)


def _recover_ready_and_start(stretch: Stretch, ready_s: Times, start_s: Times, end_s: Times) -> None:
    """Fill in, from when all ended, when every operation was ready and started, over all repetitions at once."""
    n = len(stretch.templates)
    last = stretch.first_index + n * stretch.times
    for at, template in enumerate(stretch.templates, start=stretch.first_index):
        backs = [back for back in (template.previous, *template.after) if back is not None]
        sources = [end_s[at - back : last - back : n] for back in backs]
        ready = ready_s[at:last:n]
        ready[...] = sources[0] if sources else 0.0
        for source in sources[1:]:
            np.maximum(ready, source, out=ready)
    start_s[stretch.first_index : last] = ready_s[stretch.first_index : last]
    for at, template in enumerate(stretch.templates, start=stretch.first_index):
        if isinstance(template.op, COLLECTIVES):
            shape = (stretch.times, *template.op.group.shape(ready_s.shape[1]))
            members = np.moveaxis(ready_s[at:last:n].reshape(shape), 2, 0)
            starts = reduce(np.maximum, members) if len(members) <= _FEW else np.maximum.reduce(members)
            start_s[at:last:n].reshape(shape)[...] = starts[:, :, np.newaxis]


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The transfers of an operation's groups.

    Args:
        shape: Ranks and seeds as `[n_blocks, size, stride, n_seeds]`.
        seconds: Of each group's transfer, broadcasting over `[n_blocks, 1, stride, n_seeds]`.
        shares: Whether somebody else may want its resources.
        firsts: First rank of every group of few consecutive ranks, if numpy is faster that way; else None.
    """

    shape: tuple[int, int, int, int]
    seconds: float | Times
    shares: bool
    firsts: NDArray[np.int64] | None

    def last_of_groups(self, ready: Times) -> Times:
        """Return when the last member of each group is ready, `[n_blocks, 1, stride, n_seeds]`."""
        if self.firsts is None:
            return np.asarray(np.maximum.reduce(ready.reshape(self.shape), axis=1, keepdims=True))
        n_blocks, _, stride, n_seeds = self.shape
        return np.maximum.reduceat(ready, self.firsts).reshape(n_blocks, 1, stride, n_seeds)


_Instruction: TypeAlias = tuple[Template, int, tuple[int, ...], float | Times | None, _Meeting | None]
"""Template, row of its predecessor, rows of what it comes after, seconds (None: nothing is added), meeting."""


class _Machine:
    """Executes a plan on vectors `[world_size, n_seeds]`; fills `table` with all ends, or tells `observer` all times.

    The ends of the instances stand in a table of rows: zeros, the rows carried over from earlier repetitions that may
    still be referred to, and the rows of this repetition. An instruction names its operands by their place in the
    table.
    """

    def __init__(
        self, plan: Plan, costs: Costs, n_seeds: int, *, observer: Observer | None = None, table: Times | None = None
    ) -> None:
        _refuse_varying(costs)
        self._plan = plan
        self._n_seeds = n_seeds
        self._observer = observer
        self._table = table
        self._zero = np.zeros((plan.world_size, n_seeds))
        self._contention = Contention(costs, n_seeds)
        self._seconds: dict[Op, float | Times | None] = {}
        self._meetings: dict[Op, _Meeting] = {}
        for op, cost in costs.of.items():
            match cost:
                case Local():
                    self._seconds[op] = _column(cost.seconds)
                case Shared():
                    shares = op in costs.contested
                    seconds = self._contention.seconds(op) if shares else cost.alone_s
                    self._meetings[op] = self._meeting(cost, seconds, shares=shares)

    def _meeting(self, cost: Shared, seconds: float | Times, *, shares: bool) -> _Meeting:
        n_blocks, size, stride = cost.group.shape(self._plan.world_size)
        if isinstance(seconds, np.ndarray):
            seconds = seconds.reshape(n_blocks, 1, stride, 1)
        firsts = np.arange(0, self._plan.world_size, size) if stride == 1 and self._n_seeds <= _FEW_SEEDS else None
        return _Meeting((n_blocks, size, stride, self._n_seeds), seconds, shares, firsts)

    def run(self, walked: Iterable[Stretch], delays: DelaySource, progress: Progress | None) -> None:
        """Execute the plan, telling the observer the times of every instance."""
        feed = _Feed(delays, self._plan)
        ends: dict[int, Times] = {}
        for stretch in walked:
            carried, program = self._compile(stretch)
            n = len(program)
            index, step = stretch.first_index, stretch.first_step
            carry = [ends.get(index - distance, self._zero) for distance in carried]
            for _ in range(stretch.times):
                rows = [self._zero, *carry]
                self._run_once(program, rows, feed, index, step)
                carry = [rows[_place(n - distance, carried)] for distance in carried]
                index += n
                step += stretch.n_steps
                if progress:
                    progress(step)
            ends = {
                index - back: rows[_place(n - back, carried)] if back <= n else ends[index - back]
                for back in stretch.live
            }

    def _compile(self, stretch: Stretch) -> tuple[tuple[int, ...], list[_Instruction]]:
        """Return how far before a repetition the rows lie that it needs, and its instructions."""
        n = len(stretch.templates)
        backs = [
            [back for back in (template.previous, *template.after) if back is not None]
            for template in stretch.templates
        ]
        needed = {back - at for at, each in enumerate(backs) for back in each if back > at}
        for distance in tuple(needed):  # what comes from further back passes through the repetitions between
            needed.update(range(distance % n or n, distance, n))
        carried = tuple(sorted(needed, reverse=True))
        program: list[_Instruction] = []
        for at, template in enumerate(stretch.templates):
            first = 0 if template.previous is None else _place(at - template.previous, carried)
            others = tuple(_place(at - back, carried) for back in template.after)
            program.append((template, first, others, self._seconds.get(template.op), self._meetings.get(template.op)))
        return carried, program

    def _run_once(self, program: list[_Instruction], rows: list[Times], feed: "_Feed", index: int, step: int) -> None:
        maximum, add, observer = np.maximum, np.add, self._observer
        outs = self._outs(index, len(program))
        for (template, first, others, seconds, meeting), out in zip(program, outs, strict=True):
            ready = rows[first]
            for other in others:
                ready = maximum(ready, rows[other])
            start = ready
            if meeting is not None:
                start, end = self._meet(meeting, template, ready, out, step)
            elif seconds is not None:
                end = add(ready, seconds, out)
            elif isinstance(template.op, Delay):
                end = add(ready, feed.delay(template.op.channel, step + template.step), out)
            elif isinstance(template.op, Tick):
                written = reduce(maximum, (rows[other] for other in others), self._zero)
                end = add(ready, maximum(tick_s(written, template.op.period_s) - ready, 0.0), out)
            else:
                end = ready
                if out is not None:
                    out[...] = ready
            rows.append(end)
            if observer is not None:
                observer.add(index, template, ready, start, end)
                index += 1

    def _outs(self, index: int, n: int) -> Iterable[Times | None]:
        """Return where the ends of the next instances go: rows of the table, or None for new arrays."""
        return repeat(None, n) if self._table is None else self._table[index : index + n]

    def _meet(
        self, meeting: _Meeting, template: Template, ready: Times, out: Times | None, step: int
    ) -> tuple[Times, Times]:
        """Start each group with its last member; return starts (unless only ends are kept) and ends."""
        starts = meeting.last_of_groups(ready)
        ends = starts + meeting.seconds
        if meeting.shares:
            self._contention.check(template.op, _of_groups(starts), _of_groups(ends), step + template.step)
        end = np.empty_like(ready) if out is None else out
        end.reshape(meeting.shape)[...] = ends
        if out is not None:
            return ready, end
        start = np.empty_like(ready)
        start.reshape(meeting.shape)[...] = starts
        return start, end


def _refuse_varying(costs: Costs) -> None:
    for op, cost in costs.of.items():
        if isinstance(cost, Varying):
            raise UnsupportedError(
                f"{op_text(op)}: every batch takes its own time; the fast engine is exact only for operations that "
                f"repeat themselves: use --engine des (or auto)"
            )


def _of_groups(times_s: Times) -> Times:
    """Flatten `[n_blocks, 1, stride, n_seeds]` to `[n_groups, n_seeds]`."""
    return times_s.reshape(-1, times_s.shape[-1])


def _place(position: int, carried: tuple[int, ...]) -> int:
    """Return the row of an instance: at `position` of this repetition or, if negative, before it."""
    return 1 + len(carried) + position if position >= 0 else 1 + carried.index(-position)


def _column(seconds: float | Times) -> float | Times | None:
    """Shape seconds to be added to `[world_size, n_seeds]`; None if there is nothing to add."""
    if isinstance(seconds, np.ndarray):
        return seconds[:, None]
    return seconds or None


class _Feed:
    """Takes delays from their source in chunks that stay small, however many ranks and seeds there are."""

    _CHUNK_VALUES = 4_000_000

    def __init__(self, source: DelaySource, plan: Plan) -> None:
        self._source = source
        self._n_steps = plan.n_steps
        self._chunk_steps = 1
        self._chunk: Delays = {}
        self._first = self._end = 0

    def delay(self, channel: Channel, step: int) -> Times:
        """Return the delays of a step, `[world_size, n_seeds]`."""
        while step >= self._end:
            self._first = self._end
            n_steps = min(self._chunk_steps, self._n_steps - self._first)
            self._chunk = self._source.take(n_steps)
            self._end += n_steps
            n_values = next(iter(self._chunk.values()))[0].size
            self._chunk_steps = max(1, self._CHUNK_VALUES // n_values)
        delays_s: Times = self._chunk[channel][step - self._first]
        return delays_s
