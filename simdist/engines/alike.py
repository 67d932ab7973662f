"""The event engine for jobs with ranks that are alike: one rank of each kind is simulated, and stands for the others.

It computes what `simdist.engines.des` does, up to rounding. The run is cut into *spans*: steps of the plan. Ranks that
begin a span alike and have the same delays in it are alike throughout (`simdist.engines.symmetry`). A straggler differs
from the others in one span, and is often like them in the next.

**Streams run ahead.** A time is computed as soon as the times that it depends on are known. Only transfers that share
links are events. They begin, and flow at max-min fair rates until one ends. Rates of transfers that meet again are
kept.

**Spans recur.** A span has a time of its own, from the moment at which all that came before is over. A span that begins
like an earlier one takes the same course, whichever ranks straggle. So it is simulated once, for all seeds.

A span must not begin to use a link before those before it have ended their transfers on it. If it does, both are one
span. Groups that share no link may be in different steps.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from heapq import heappop, heappush
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Costs, Local, Stage
from simdist.engines.network.flows import Flow, Flows, nothing
from simdist.engines.network.max_min import TOGETHER
from simdist.engines.symmetry import Meetings, Partition, Symmetry, mixed
from simdist.errors import UnforeseenError, standstill
from simdist.plan import Delay, Op, Plan, Tick, op_text
from simdist.plan.delays import DelaySource, SeedDelays, delays_of, seconds_of
from simdist.plan.ops import tick_s
from simdist.plan.walk import Stretch, Template, stretches
from simdist.traces.breakdown import Attribution, Breakdown
from simdist.traces.trace import Trace, ended_with_its_last_result

_Times: TypeAlias = NDArray[np.float64]
_Progress: TypeAlias = Callable[[int, int], None]

_MOST_KINDS = 0.5  # of the ranks; with more, it does not pay
_FEW_RANKS = 64  # each is told apart: to find those that are alike takes longer
_MOST_LATER = 64  # kinds after the first span, if the ranks are few
_MOST_JOINED = 8  # steps in a span; with more, all later ones join it
_MOST_INSTANCES = 300_000  # in a span
_MOST_RATES = 65_536  # combinations of transfers kept
_MOST_PARTITIONS = 256  # kept
_MOST_WORKS = 8  # partitions for which it is kept what operations do
_MOST_STATE_VALUES = 25_000_000  # times of states kept, 200 MB
_MOST_WALKED = 100_000  # instances of a plan that is kept with its patterns
_MOST_VALUES = 8_000_000  # times of spans kept
_BLOCK = 32  # instances with times that are spread over ranks at once
_NAN = float("nan")


class KindsRun:
    """A run of one rank of each kind, for the seeds that differ.

    Args:
        plan: A legal plan.
        delays: The delays of the seeds.
        progress: Called with the steps done and the steps of all seeds.
        courses: What is known of spans with these prices.
        reason: Why this engine was chosen.
    """

    name = "des"

    def __init__(
        self,
        plan: Plan,
        delays: SeedDelays,
        progress: _Progress | None,
        courses: "Courses",
        reason: str = "",
    ) -> None:
        self.plan = plan
        self.delays = delays.different
        self.n_repeats = len(delays.seeds) // len(self.delays.seeds)
        """How often the seeds that differ make all seeds."""
        self.reason = reason
        self._progress = progress
        self._courses = courses

    def trace(self) -> Trace:
        """Return all times of the first seed.

        Raises:
            UnforeseenError: In a later step few ranks are alike, or transfers go on from step to step.
        """
        plan = self.plan
        times_s = np.empty((3, plan.n_instances, plan.world_size))
        for told, *_ in self._steps():
            index = told.step.index
            end = index + len(told.step.pattern.templates)
            for row, found in zip(times_s, told.times_s, strict=True):
                row[index:end] = told.base_s + found[:, told.partition.of_ranks]
        ready_s, start_s, end_s = times_s
        return ended_with_its_last_result(Trace(plan, ready_s, start_s, end_s, source="simulated by des"))

    def times_of_first_rank(self) -> tuple[_Times, _Times]:
        """Return when each operation started and ended on rank 0 with the first seed, `[n_instances]` each.

        Raises:
            UnforeseenError: See `trace`.
        """
        rows: tuple[list[_Times], list[_Times]] = ([], [])
        for told, *_ in self._steps():
            for row, found in zip(rows, told.times_s[1:], strict=True):
                row.append(told.base_s + found[:, told.partition.of_ranks[0]])
        start_s, end_s = (np.concatenate(row) for row in rows)
        return start_s, end_s

    def breakdown(self) -> Breakdown:
        """Return where the time went.

        Raises:
            UnforeseenError: See `trace`.
        """
        alike = _AlikeRanks(self.plan.world_size)
        attribution = Attribution(len(alike.firsts), len(self.delays.seeds))
        n_before = 0
        for of_seeds in self._steps():
            attribution.turn(np.array([told.by_s for told in of_seeds]), n_before)
            rows = alike.split([told.partition for told in of_seeds])
            if rows is not None:
                attribution.split(rows)
            key = tuple([(told.course, told.first, told.partition) for told in of_seeds])
            attribution.repeat(key, partial(_attribute, attribution, of_seeds, alike.firsts))
            n_before = len(of_seeds[0].step.pattern.templates)
        return attribution.finish(self.plan.n_steps).of_ranks(alike.of_ranks)

    def makespan_s(self) -> _Times:
        """Return when the last rank is done, `[n_seeds]`.

        Raises:
            UnforeseenError: See `trace`.
        """
        makespan_s = np.zeros(len(self.delays.seeds))
        for of_seeds in self._steps():
            for seed, told in enumerate(of_seeds):
                makespan_s[seed] = max(makespan_s[seed], told.base_s + told.last_s)
        return makespan_s

    def _steps(self) -> "Iterator[tuple[_Told, ...]]":
        """Simulate the plan, and yield each step, of all seeds."""
        plan = self.plan
        self._courses.begin()
        n_seeds = len(self.delays.seeds)
        seeds = [_Seed(self._courses) for _ in range(n_seeds)]
        told: list[deque[_Told]] = [deque() for _ in seeds]

        def ready() -> "Iterator[tuple[_Told, ...]]":
            while all(told):
                found = tuple(each.popleft() for each in told)
                yield found
                if self._progress:
                    self._progress(n_seeds * (found[0].step.step + 1), n_seeds * plan.n_steps)

        for steps in _steps(plan, self.delays.draw(self.delays.seeds), n_seeds):
            for seed, its, step in zip(seeds, told, steps, strict=True):
                its.extend(seed.add(step))
            yield from ready()
        for seed, its in zip(seeds, told, strict=True):
            its.extend(seed.finish())
        yield from ready()


class _AlikeRanks:
    """The ranks that have been of one kind in all steps and seeds so far.

    Attributes:
        firsts: The first rank of each set of them, `[n_sets]`.
        of_ranks: The set of each rank, `[world_size]`.
    """

    def __init__(self, world_size: int) -> None:
        self.of_ranks = np.arange(world_size) if world_size <= _FEW_RANKS else np.zeros(world_size, dtype=np.int64)
        self.firsts = np.unique(self.of_ranks)
        self._latest: frozenset[Partition] = frozenset()

    def split(self, partitions: Sequence[Partition]) -> NDArray[np.int64] | None:
        """Take the kinds of ranks in a step of each seed.

        Returns:
            The set before of each set from now on; None if all sets stay.
        """
        before = self.of_ranks
        latest = frozenset(partitions)
        for partition in latest - self._latest:
            kinds = partition.of_ranks
            if len(partition.firsts) > 1 and (kinds[self.firsts][self.of_ranks] != kinds).any():
                pairs = self.of_ranks * len(partition.firsts) + kinds
                _, self.firsts, self.of_ranks = np.unique(pairs, return_index=True, return_inverse=True)
        self._latest = latest
        if self.of_ranks is before:
            return None
        world_size = len(before)
        if len(self.firsts) > world_size * _MOST_KINDS:
            self.firsts = self.of_ranks = np.arange(world_size)
        return before[self.firsts]


def _attribute(attribution: Attribution, of_seeds: "Sequence[_Told]", ranks: NDArray[np.int64]) -> None:
    """Take a step of all seeds on some ranks. Its times count from the beginning of its span."""
    templates = of_seeds[0].step.pattern.templates
    for first in range(0, len(templates), _BLOCK):
        some = templates[first : first + _BLOCK]
        times_s = np.empty((3, len(some), len(ranks), len(of_seeds)))
        for seed, told in enumerate(of_seeds):
            for row, found in zip(times_s, told.times_s, strict=True):
                of_kinds = found[first : first + _BLOCK]
                row[..., seed] = of_kinds if of_kinds.shape[1] == 1 else of_kinds[:, told.partition.of_ranks[ranks]]
        for number, template in enumerate(some, first):
            attribution.add(number, template, *times_s[:, number - first])


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What steps have in common that take the same course if they begin alike.

    Args:
        works: What each step does, to tell courses apart.
        templates: Its instances.
        lanes: Names of their lanes, in order.
        needed: How far before the first instance those lie that the others come after, in order.
        lasts: Number of the last instance on each lane.
        kept: How far before the end those lie that later ones may come after, in order.
        furthest: The same of all instances, also those of earlier steps.
    """

    works: "tuple[_StepWork, ...]"
    templates: tuple[Template, ...]
    lanes: tuple[str, ...]
    needed: tuple[int, ...]
    lasts: dict[str, int]
    kept: tuple[int, ...]
    furthest: int

    @property
    def key(self) -> tuple[object, ...]:
        """Tells patterns apart, also by what later steps need of them."""
        return self.works, self.kept, self.furthest

    @classmethod
    def of(
        cls, works: "tuple[_StepWork, ...]", templates: tuple[Template, ...], kept: Sequence[int], furthest: int
    ) -> "_Pattern":
        """Return the pattern of some instances that follow one another."""
        lasts = {template.lane.name: number for number, template in enumerate(templates)}
        needed = {
            back - number for number, template in enumerate(templates) for back in template.after if back > number
        }
        return cls(works, templates, tuple(sorted(lasts)), tuple(sorted(needed)), lasts, tuple(kept), furthest)

    @classmethod
    def of_several(cls, patterns: "Sequence[_Pattern]") -> "_Pattern":
        """Return the pattern of steps that follow one another."""
        works = tuple(work for each in patterns for work in each.works)
        templates = tuple(template for each in patterns for template in each.templates)
        furthest = patterns[-1].furthest
        return cls.of(works, templates, range(1, min(furthest, len(templates)) + 1), furthest)


@dataclass(frozen=True, slots=True)
class _SeedStep:
    """A step of a seed, and its delays."""

    pattern: _Pattern
    index: int
    step: int
    delays_s: dict[Delay, _Times]


class _StepWork:
    """The operations of a step, and the distances to the instances that each comes after."""

    __slots__ = ("_content", "_hash", "_ops")

    def __init__(self, templates: Sequence[Template]) -> None:
        self._ops = tuple([each.op for each in templates])  # as long as they exist, no others have their numbers
        self._content = tuple([(id(each.op), each.after) for each in templates])
        self._hash = hash(self._content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StepWork) and (self is other or self._content == other._content)


class _Patterns:
    """Finds the patterns of steps. Steps with the same operations and the same distances have the same pattern."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Pattern] = {}

    def of(self, stretch: Stretch) -> list[_Pattern]:
        """Return the pattern of each step of a repetition."""
        n = len(stretch.templates)
        step_of = [template.step for template in stretch.templates]
        firsts = [bisect_left(step_of, step) for step in range(stretch.n_steps + 1)]
        ends = [firsts[step + 1] for step in step_of]  # of the step of each instance
        wanted = {(n - distance) % n for distance in stretch.live} if n else set()
        furthest = max(stretch.live, default=0)
        for at, template in enumerate(stretch.templates):
            for back in template.after:
                target = (at - back) % n
                if back > at - firsts[template.step]:
                    wanted.add(target)
                    furthest = max(furthest, back + firsts[template.step] - at)
        found = []
        for step in range(stretch.n_steps):
            first = firsts[step]
            end = firsts[step + 1]
            templates = stretch.templates[first:end]
            kept = sorted(ends[at] - at for at in range(first, end) if at in wanted)
            work = _StepWork(templates)
            key = work, tuple(kept), furthest
            if key not in self._known:
                self._known[key] = _Pattern.of((work,), templates, kept, furthest)
            found.append(self._known[key])
        return found


def _walked(plan: Plan) -> Iterator[tuple[Stretch, list[_Pattern]]]:
    """Yield the stretches of a plan, with the pattern of each step of a repetition."""
    patterns = _Patterns()
    for stretch in stretches(plan):
        yield stretch, patterns.of(stretch)


@lru_cache(maxsize=2)
def _walked_once(plan: Plan) -> list[tuple[Stretch, list[_Pattern]]]:
    """Return the same, which the next simulation of the plan with other prices takes again."""
    return list(_walked(plan))


def _steps(plan: Plan, delays: DelaySource, n_seeds: int) -> Iterator[list[_SeedStep]]:
    """Yield each step, of all seeds."""
    late = delays_of(plan)
    index = 0
    n_templates = sum(len(plan.bodies[body]) for run in plan.order for body in run.bodies)
    for stretch, of_steps in _walked_once(plan) if n_templates <= _MOST_WALKED else _walked(plan):
        for number in range(stretch.times):
            taken = delays.take(stretch.n_steps) if late else {}
            drawn = {op: seconds_of(op, taken) for op in late}
            for at, pattern in enumerate(of_steps):
                step = stretch.first_step + number * stretch.n_steps + at
                yield [
                    _SeedStep(pattern, index, step, {op: seconds_s[seed, at] for op, seconds_s in drawn.items()})
                    for seed in range(n_seeds)
                ]
                index += len(pattern.templates)


@dataclass(frozen=True, slots=True)
class _Told:
    """A step that has been simulated.

    Args:
        step: The step.
        base_s: When its span begins.
        by_s: How much later that is than the beginning of the span of the step before. Spans that recur have the same.
        course: The course of its span.
        first: The number of its first instance in the span.
        partition: The kinds of ranks.
    """

    step: _SeedStep
    base_s: float
    by_s: float
    course: "_Course"
    first: int
    partition: Partition

    @property
    def times_s(self) -> tuple[_Times, _Times, _Times]:
        """When each instance was ready, started and ended, from the base on, by kind of rank, `[n, n_kinds]` each."""
        ready_s, start_s, end_s = self.course.times_s
        rows = slice(self.first, self.first + len(self.step.pattern.templates))
        return ready_s[rows], start_s[rows], end_s[rows]

    @property
    def last_s(self) -> float:
        """When the last instance ended."""
        return float(self.times_s[2].max(initial=0.0))


@dataclass(frozen=True, eq=False, slots=True)
class _Ends:
    """When an instance ended on each rank, by kinds of ranks: there are far fewer kinds than ranks.

    Args:
        of_kinds_s: On each kind, `[n_kinds]`.
        kinds: Of each rank, `[world_size]`.
    """

    of_kinds_s: _Times
    kinds: NDArray[np.int64]

    def of_ranks_s(self) -> _Times:
        """Return when it ended on each rank, `[world_size]`."""
        return self.of_kinds_s[self.kinds]

    def at(self, ranks: NDArray[np.int64]) -> _Times:
        """Return when it ended on some ranks."""
        return self.of_kinds_s[self.kinds[ranks]]

    def later(self, by_s: float) -> "_Ends":
        """Return the same, with times that count from a later moment."""
        return _Ends(self.of_kinds_s - by_s, self.kinds)

    def equals(self, other: "_Ends") -> bool:
        """Return whether all ranks end at the same times."""
        if self.kinds is other.kinds:
            return np.array_equal(self.of_kinds_s, other.of_kinds_s)
        return np.array_equal(self.of_ranks_s(), other.of_ranks_s())


@dataclass(frozen=True, slots=True)
class _State:
    """What a span needs to know of those before it. Times count from the moment `base_s` of the run.

    Args:
        base_s: See above.
        end_s: Ends of earlier instances that later ones may come after, by how far back they lie.
        free_s: When each lane is free, `[world_size]`, by name.
        idle_from_s: When the last transfer on each link that others may want has ended, or later, `[n_links]`.
    """

    base_s: float
    end_s: dict[int, _Ends]
    free_s: dict[str, _Times]
    idle_from_s: _Times

    @property
    def n_values(self) -> int:
        """How many times it holds."""
        of_kinds = sum(each.of_kinds_s.size for each in self.end_s.values())
        return of_kinds + sum(each.size for each in self.free_s.values()) + self.idle_from_s.size

    def later(self, by_s: float) -> "_State":
        """Return the same state, with times that count from a later moment."""
        end_s = {back: each.later(by_s) for back, each in self.end_s.items()}
        free_s = {lane: each - by_s for lane, each in self.free_s.items()}
        return _State(self.base_s + by_s, end_s, free_s, self.idle_from_s - by_s)

    def equals(self, other: "_State") -> bool:
        """Return whether a state is the same from its moment on."""
        if not np.array_equal(self.idle_from_s, other.idle_from_s):
            return False
        if self.end_s.keys() != other.end_s.keys() or self.free_s.keys() != other.free_s.keys():
            return False
        if not all(np.array_equal(each, other.free_s[lane]) for lane, each in self.free_s.items()):
            return False
        return all(each.equals(other.end_s[back]) for back, each in self.end_s.items())


@dataclass(frozen=True, eq=False, slots=True)
class _Course:
    """The course of a span.

    Args:
        times_s: When each instance was ready, started and ended, by kind of rank, `[n, n_kinds]` each.
        first_start_s: When the first transfer began on each kind of link, `[n_kinds]`; inf without any.
        last_end_s: When the last one ended; -inf without any.
    """

    times_s: tuple[_Times, _Times, _Times]
    first_start_s: _Times
    last_end_s: _Times

    @property
    def begin_s(self) -> float:
        """When the first instance was ready; -inf without any."""
        first_s = float(self.times_s[0].min(initial=math.inf))
        return first_s if math.isfinite(first_s) else -math.inf


@dataclass(frozen=True, slots=True)
class _SpanDone:
    """A span that has been simulated.

    Args:
        course: Its course.
        partition: The kinds of ranks and links.
        base_s: When it begins.
        by_s: How much later that is than the beginning of the span before.
        after: The state at its end.
    """

    course: _Course
    partition: Partition
    base_s: float
    by_s: float
    after: _State

    def moved(self, by_s: float) -> "_SpanDone":
        """Return the same span, later."""
        if not by_s:
            return self
        return replace(self, base_s=self.base_s + by_s, after=replace(self.after, base_s=self.after.base_s + by_s))

    def begins_after(self, before: _State) -> bool:
        """Return whether no transfer begins on a link before those of earlier spans on it have ended."""
        first_start_s = self.base_s + self.course.first_start_s[self.partition.of_links]
        return bool((first_start_s >= before.base_s + before.idle_from_s).all())


_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")


class _Table(Generic[_KeyT, _ValueT]):
    """What was found before. When it holds too much, it forgets everything."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._known: dict[_KeyT, _ValueT] = {}
        self.get = self._known.get

    def keep(self, key: _KeyT, value: _ValueT, size: int = 1) -> _ValueT:
        """Keep a value of some size, and return it."""
        if self._size + size > self._most:
            self._known.clear()
            self._size = 0
        if key not in self._known:
            self._size += size
        self._known[key] = value
        return value


class _Seed:
    """The run of one seed, span by span. The latest span waits until the next one is known not to meet it."""

    def __init__(self, run: "Courses") -> None:
        self._run = run
        self._before = _State(0.0, {}, {}, np.full(run.n_links, -math.inf))
        self._pending: list[_SeedStep] = []
        self._done: _SpanDone | None = None

    def add(self, step: _SeedStep) -> list[_Told]:
        """Simulate the next step. Return those that no later one can change."""
        if self._done is None:
            self._pending = [step]
            self._done = self._run.simulate([step], self._before)
            return []
        if len(self._pending) > _MOST_JOINED:
            self._wait_for_more(step)
            return []
        found = self._run.simulate([step], self._done.after)
        if not found.begins_after(self._done.after):
            self._wait_for_more(step)
            if len(self._pending) <= _MOST_JOINED:
                self._simulate_pending()
            return []
        told = self._told(self._done)
        self._before = self._done.after
        self._pending = [step]
        self._done = found
        return told

    def finish(self) -> list[_Told]:
        """Return the steps of the latest span."""
        if len(self._pending) > _MOST_JOINED:
            self._simulate_pending()
        return [] if self._done is None else self._told(self._done)

    def _wait_for_more(self, step: _SeedStep) -> None:
        """Take a step into the latest span. If these are many, all steps to the end of the run follow."""
        self._pending.append(step)
        if sum(len(each.pattern.templates) for each in self._pending) > _MOST_INSTANCES:
            raise UnforeseenError("transfers go on from step to step")

    def _simulate_pending(self) -> None:
        self._done = self._run.simulate(self._pending, self._before)
        if not self._done.begins_after(self._before):
            raise UnforeseenError("transfers of a step still run when a later step begins")

    def _told(self, done: _SpanDone) -> list[_Told]:
        told: list[_Told] = []
        first = 0
        for each in self._pending:
            by_s = 0.0 if told else done.by_s
            told.append(_Told(each, done.base_s, by_s, done.course, first, done.partition))
            first += len(each.pattern.templates)
        return told


class Courses:
    """Simulates spans, and knows those that were simulated: of one plan, or of several with the same steps."""

    def __init__(self, costs: Costs, world_size: int) -> None:
        self._world_size = world_size
        self._costs = costs
        self._symmetry = Symmetry(costs, world_size)
        self.n_links = self._symmetry.n_links
        self._has_ticks = any(isinstance(op, Tick) for op in costs.of)
        own = (cost.seconds for cost in costs.of.values() if isinstance(cost, Local))
        rows = {row.tobytes(): row for row in own if isinstance(row, np.ndarray)}
        self._own = list(rows.values())
        self._rates: _Table[int, _Rates] = _Table(_MOST_PARTITIONS)
        self._courses: _Table[tuple[object, ...], _Course] = _Table(_MOST_VALUES)
        self._done: _Table[tuple[object, ...], _SpanDone] = _Table(_MOST_STATE_VALUES)
        self._again: _Table[tuple[object, ...], tuple[_State, _SpanDone]] = _Table(_MOST_STATE_VALUES)
        self._works: _Table[Partition, dict[int, _KindWork]] = _Table(_MOST_WORKS)
        self._has_begun = False

    def begin(self) -> None:
        """Begin a run."""
        self._has_begun = False

    def simulate(self, steps: Sequence[_SeedStep], before: _State) -> _SpanDone:
        """Simulate some steps that follow one another.

        Raises:
            UnforeseenError: Few ranks are alike.
        """
        pattern = steps[0].pattern if len(steps) == 1 else _Pattern.of_several([each.pattern for each in steps])
        delays_s = [row for each in steps for row in each.delays_s.values()]
        if not before.free_s.keys() >= set(
            pattern.lanes
        ):  # a lane that was never used is free from the start of the run
            return self._simulate(steps, pattern, delays_s, before)
        rows = b"".join(row.tobytes() for row in delays_s)
        key = id(before.end_s), id(before.free_s), id(before.idle_from_s), pattern.key, rows
        known = self._again.get(key)
        if known is None:
            known = before, self._simulate(steps, pattern, delays_s, before)
            self._again.keep(key, known, before.n_values)
        like, done = known
        return done.moved(before.base_s - like.base_s)

    def _simulate(
        self, steps: Sequence[_SeedStep], pattern: _Pattern, delays_s: list[_Times], before: _State
    ) -> _SpanDone:
        by_s = 0.0
        if before.free_s and not self._has_ticks:
            by_s = max(float(each.max()) for each in before.free_s.values())
            before = before.later(by_s)
        free_s = self._free_s(pattern, before)
        distinct, begins = self._begins(pattern, before, free_s, delays_s)
        partition = self._partition(begins)
        of_kinds = begins[partition.firsts]
        key = pattern.works, distinct.tobytes(), of_kinds.tobytes(), partition.form
        course = self._courses.get(key)
        if course is None:
            firsts = partition.firsts
            index = steps[0].index
            tasks = _tasks(steps, partition, self._costs, self._works_of(partition))
            events = _Events(tasks, index, partition, self._rates_of(partition))
            for back in pattern.needed:
                events.ends[index - back] = before.end_s[back].at(firsts).tolist()
            course = events.run({lane: each[firsts].tolist() for lane, each in free_s.items()})
            self._courses.keep(key, course, 3 * course.times_s[0].size)
        after = self._after(pattern, before, course, partition)
        done = _SpanDone(course, partition, before.base_s, by_s, after)
        return self._same(done, (pattern.key, *key))

    def _free_s(self, pattern: _Pattern, before: _State) -> dict[str, _Times]:
        """Return when each lane of a span is free, `[world_size]`."""
        never_s = np.full(self._world_size, -before.base_s)
        return {lane: before.free_s.get(lane, never_s) for lane in pattern.lanes}

    def _begins(
        self, pattern: _Pattern, before: _State, free_s: dict[str, _Times], delays_s: list[_Times]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the different ways to begin a span, and the way of each rank."""
        rows = [*self._own, *(before.end_s[back].of_ranks_s() for back in pattern.needed), *free_s.values(), *delays_s]
        distinct, begins = np.unique(_colours(rows, self._world_size), return_inverse=True)
        return distinct, begins

    def too_many_kinds_at_first(self, plan: Plan, delays: SeedDelays) -> str | None:
        """Say that most ranks are like no other in the first step of the first seed; None if they are not."""
        n_seeds = len(delays.seeds)
        first, *_ = next(_steps(plan, delays.draw(delays.seeds), n_seeds))
        pattern = first.pattern
        before = _State(0.0, {}, {}, np.full(self.n_links, -math.inf))
        _, begins = self._begins(pattern, before, self._free_s(pattern, before), [*first.delays_s.values()])
        return self._too_many(len(self._symmetry.partition(begins).firsts), _MOST_KINDS * self._world_size)

    def _too_many(self, n_kinds: int, most: float) -> str | None:
        return f"{n_kinds} of {self._world_size} ranks are like no other" if n_kinds > most else None

    def _same(self, done: _SpanDone, key: tuple[object, ...]) -> _SpanDone:
        """Return an earlier span with the same course and the same state after it, or else this one.

        The next span then begins with the very rows that an earlier one began with, and `simulate` knows them.
        """
        key = *key, done.partition.of_ranks.tobytes()
        known = self._done.get(key)
        if known is not None and known.after.equals(done.after):
            return replace(known.moved(done.base_s - known.base_s), by_s=done.by_s)
        return self._done.keep(key, done, done.after.n_values)

    def _partition(self, begins: NDArray[np.int64]) -> Partition:
        found = self._symmetry.partition(begins)
        most = _MOST_KINDS * self._world_size
        if self._has_begun:
            most = max(most, _MOST_LATER)
        if problem := self._too_many(len(found.firsts), most):
            raise UnforeseenError(problem)
        self._has_begun = True
        return found

    def _rates_of(self, partition: Partition) -> "_Rates":
        return self._rates.get(partition.form) or self._rates.keep(partition.form, _Rates(partition))

    def _works_of(self, partition: Partition) -> "dict[int, _KindWork]":
        known = self._works.get(partition)
        return self._works.keep(partition, {}) if known is None else known

    def _after(self, pattern: _Pattern, before: _State, course: _Course, partition: Partition) -> _State:
        """Return the state at the end of a span.

        No later span is to begin before this one, so links count as busy until then. With that, the state does not
        depend on how long ago a link was last used.
        """
        _, _, kinds_end_s = course.times_s
        n = len(kinds_end_s)
        of_ranks = partition.of_ranks
        end_s = {back + n: row for back, row in before.end_s.items() if back + n <= pattern.furthest}
        end_s |= {back: _Ends(kinds_end_s[-back], of_ranks) for back in pattern.kept}
        free_s = dict(before.free_s)
        free_s |= {lane: kinds_end_s[number][of_ranks] for lane, number in pattern.lasts.items()}
        ended_s = np.maximum(before.idle_from_s, course.last_end_s[partition.of_links])
        return _State(before.base_s, end_s, free_s, np.maximum(ended_s, course.begin_s))


def _tasks(
    steps: Sequence[_SeedStep], partition: Partition, costs: Costs, known: "dict[int, _KindWork]"
) -> "list[_KindTask]":
    """Return the instances of steps, for ranks that stand for others. Fill `known`: what operations do, by `id`."""
    tasks = []
    for each in steps:
        for at, template in enumerate(each.pattern.templates, each.index):
            op = template.op
            work = known.get(id(op))
            if isinstance(op, Delay):
                work = _KindWork(op, seconds=each.delays_s[op][partition.firsts].tolist())
            elif work is None:
                work = known[id(op)] = _work(op, partition, costs)
            after = tuple([at - back for back in template.after])
            tasks.append(_KindTask(at, template.lane.name, after, work))
    return tasks


def _colours(rows: Sequence[_Times], world_size: int) -> NDArray[np.uint64]:
    """Return a colour for each rank by its values in rows, `[world_size]` each."""
    values = np.array(rows, dtype=np.float64).reshape(-1, world_size) + 0.0  # no -0.0
    numbers = np.arange(len(values), dtype=np.uint64)[:, np.newaxis]
    return np.asarray(mixed(np.broadcast_to(numbers, values.shape), values.view(np.uint64)).sum(axis=0))


class _Stream:
    """A lane of a rank that stands for others."""

    __slots__ = ("at", "kind", "now_s", "tasks")

    def __init__(self, kind: int, tasks: "list[_KindTask]", now_s: float) -> None:
        self.kind = kind
        self.tasks = tasks
        self.now_s = now_s
        self.at = 0


@dataclass(slots=True)
class _KindWork:
    """What an operation does."""

    op: Op
    seconds: list[float] | None = None
    period_s: float | None = None
    meetings: Meetings | None = None
    price: int = 0


@dataclass(slots=True)
class _KindTask:
    """An instance."""

    index: int
    lane: str
    after: tuple[int, ...]
    work: _KindWork


class _Transit:
    """A transfer under way."""

    __slots__ = ("group", "key", "left_nbytes", "place", "rate_Bps", "start_s", "step")

    def __init__(self, step: _KindTask, group: int, start_s: float) -> None:
        self.step = step
        self.group = group
        self.start_s = start_s
        self.place = 0
        self.left_nbytes = 0.0
        self.rate_Bps = 0.0
        self.key = (step.work.price, group, 0)

    @property
    def members(self) -> Sequence[int]:
        """The kinds of ranks that take part."""
        meetings = self.step.work.meetings
        assert meetings is not None
        return meetings.members[self.group]

    def go_on(self) -> Stage | None:
        """Return the next stage, if there is one."""
        meetings = self.step.work.meetings
        assert meetings is not None
        assert meetings.stages is not None
        stages = meetings.stages[self.group]
        if self.place == len(stages):
            return None
        self.key = (self.step.work.price, self.group, self.place)
        self.place += 1
        return stages[self.place - 1]


class _Rates:
    """The rates of transfers that are under way together."""

    def __init__(self, partition: Partition) -> None:
        self._stages = partition.meetings
        self._capacity_Bps = partition.capacity_Bps.tolist()
        self._known: _Table[tuple[tuple[int, int, int], ...], list[float]] = _Table(_MOST_RATES)

    def of(self, flights: "Sequence[_Transit]") -> list[float]:
        """Return bytes per second of each."""
        key = tuple([each.key for each in flights])
        found = self._known.get(key)
        if found is None:
            found = self._known.keep(key, self._found(key))
        return found

    def _found(self, keys: Iterable[tuple[int, int, int]]) -> list[float]:
        flows = Flows(self._capacity_Bps)
        joined = []
        for price, group, place in keys:
            stages = self._stages[price].stages
            assert stages is not None
            flow = Flow(stages[group][place], nothing)
            flows.join(flow, 0.0)
            joined.append(flow)
        flows.settle(0.0)
        return [flows.rate_Bps(flow) for flow in joined]


@dataclass(slots=True)
class _Gathering:
    """Members that a group of an instance still waits for, and the latest so far."""

    n_missing: int
    latest_s: float = field(default=-math.inf)


class _Transfers:
    """The transfers of a span that share links: each begins, and flows until it ends."""

    def __init__(self, rates: _Rates) -> None:
        self._rates = rates
        self._coming: list[tuple[float, int, _Transit]] = []  # a heap: when it flows
        self._flying: list[_Transit] = []
        self._n_begun = 0
        self._used: dict[tuple[int, int], tuple[float, float]] = {}  # price, group -> first start, last end

    def go_on(self, flight: _Transit, now_s: float) -> bool:
        """Begin the next stage of a transfer. Return whether there was none, so that the transfer has ended."""
        stage = flight.go_on()
        if stage is None:
            self._record(flight, now_s)
            return True
        flight.left_nbytes = float(stage.nbytes.max(initial=0.0))
        self._n_begun += 1
        heappush(self._coming, (now_s + stage.latency_s, self._n_begun, flight))
        return False

    def _record(self, flight: _Transit, end_s: float) -> None:
        """Remember when a transfer began and ended."""
        key = flight.step.work.price, flight.group
        first_start_s, last_end_s = self._used.get(key, (math.inf, -math.inf))
        self._used[key] = min(first_start_s, flight.start_s), max(last_end_s, end_s)

    def fly(self) -> Iterator[tuple[list[_Transit], float]]:
        """Let transfers flow, from event to event. Yield those that end together, and when."""
        coming = self._coming
        now_s = -math.inf
        next_end_s = math.inf
        soonest_s = math.inf  # from the last event to the next end
        due_s: list[float] = []
        n_events = 0
        while coming or self._flying:
            n_events += 1
            if n_events > 2 * self._n_begun:  # each stage begins once and ends once
                raise standstill(now_s, [_under_way(each) for each in self._flying])
            begin_s = coming[0][0] if coming else math.inf
            then_s = min(begin_s, next_end_s)
            for flight in self._flying:  # none before the first event
                flight.left_nbytes -= flight.rate_Bps * (then_s - now_s)
            now_s = then_s
            if next_end_s <= then_s:
                yield self._end_due(due_s, soonest_s, now_s), now_s
            while coming and coming[0][0] <= now_s:
                flight = heappop(coming)[2]
                if flight.left_nbytes:
                    self._flying.append(flight)
                elif self.go_on(flight, now_s):
                    yield [flight], now_s
            rates = self._rates.of(self._flying)
            due_s = []
            for flight, rate_Bps in zip(self._flying, rates, strict=True):
                flight.rate_Bps = rate_Bps
                due_s.append(flight.left_nbytes / rate_Bps)
            soonest_s = max(min(due_s, default=math.inf), 0.0)  # rounding may have left less than nothing
            next_end_s = now_s + soonest_s

    def _end_due(self, due_s: Sequence[float], soonest_s: float, now_s: float) -> list[_Transit]:
        """End the stages that are due. Return the transfers that have ended with them."""
        limit_s = soonest_s * (1 + TOGETHER)
        flying = self._flying
        self._flying = [flight for flight, left_s in zip(flying, due_s, strict=True) if left_s > limit_s]
        due = [flight for flight, left_s in zip(flying, due_s, strict=True) if left_s <= limit_s]
        return [flight for flight in due if self.go_on(flight, now_s)]

    def on_links(self, partition: Partition) -> tuple[_Times, _Times]:
        """Return when the first transfer began on each kind of link, and when the last one ended."""
        n_kinds = len(partition.capacity_Bps)
        first_start_s = np.full(n_kinds, math.inf)
        last_end_s = np.full(n_kinds, -math.inf)
        for (price, group), (start_s, end_s) in self._used.items():
            stages = partition.meetings[price].stages
            assert stages is not None
            for stage in stages[group]:
                links = stage.resources
                first_start_s[links] = np.minimum(first_start_s[links], start_s)
                last_end_s[links] = np.maximum(last_end_s[links], end_s)
        return first_start_s, last_end_s


class _Events:
    """The events of a span."""

    def __init__(self, tasks: Sequence[_KindTask], index: int, partition: Partition, rates: _Rates) -> None:
        self._n_kinds = len(partition.firsts)
        self._partition = partition
        self._transfers = _Transfers(rates)
        self._index = index
        nans = [_NAN] * self._n_kinds
        self.ends = {task.index: nans.copy() for task in tasks}
        self._ready = [nans.copy() for _ in tasks]
        self._start = [nans.copy() for _ in tasks]
        self._lanes: dict[str, list[_KindTask]] = {}
        for task in tasks:
            self._lanes.setdefault(task.lane, []).append(task)
        self._waiting: dict[tuple[int, int], list[_Stream]] = {}
        self._awake: deque[_Stream] = deque()
        self._arrivals: dict[tuple[int, int], _Gathering] = {}

    def run(self, free_s: dict[str, list[float]]) -> _Course:
        """Execute all tasks, given when lanes are free."""
        for kind in range(self._n_kinds):
            for lane, tasks in self._lanes.items():
                self._awake.append(_Stream(kind, tasks, free_s[lane][kind]))
        self._run_streams()
        for landed, now_s in self._transfers.fly():
            for flight in landed:
                self._end(flight.step, flight.members, now_s)
            self._run_streams()
        ends = [self.ends[self._index + number] for number in range(len(self._ready))]
        shape = len(ends), self._n_kinds
        ready_s, start_s, end_s = (np.array(each).reshape(shape) for each in (self._ready, self._start, ends))
        return _Course((ready_s, start_s, end_s), *self._transfers.on_links(self._partition))

    def _run_streams(self) -> None:
        awake = self._awake
        while awake:
            self._run_stream(awake.popleft())

    def _run_stream(self, stream: _Stream) -> None:
        """Execute tasks of a stream until it has to wait for a time that is not known yet."""
        ends = self.ends
        kind = stream.kind
        now_s = stream.now_s
        tasks = stream.tasks
        at = stream.at
        while at < len(tasks):
            task = tasks[at]
            for other in task.after:
                end_s = ends[other][kind]
                if end_s != end_s:
                    stream.at = at
                    stream.now_s = now_s
                    self._waiting.setdefault((other, kind), []).append(stream)
                    return
                if end_s > now_s:
                    now_s = end_s
            at += 1
            work = task.work
            number = task.index - self._index
            self._ready[number][kind] = now_s
            if work.meetings is None:
                self._start[number][kind] = now_s
                if work.seconds is not None:
                    now_s += work.seconds[kind]
                elif work.period_s is not None:
                    written_s = max((ends[other][kind] for other in task.after), default=0.0)
                    now_s += max(float(tick_s(written_s, work.period_s)) - now_s, 0.0)
                self._end(task, (kind,), now_s)
                continue
            self._arrive(task, work.meetings, kind, now_s)
            end_s = ends[task.index][kind]
            if end_s != end_s:
                stream.at = at
                self._waiting.setdefault((task.index, kind), []).append(stream)
                return
            now_s = end_s
        stream.at = at

    def _arrive(self, task: _KindTask, meetings: Meetings, kind: int, now_s: float) -> None:
        """Arrive at a collective. The last member to arrive begins it."""
        group = meetings.group_of[kind]
        members = meetings.members[group]
        key = task.index, group
        arrivals = self._arrivals.get(key) or _Gathering(len(members))
        arrivals.latest_s = max(arrivals.latest_s, now_s)
        arrivals.n_missing -= 1
        if arrivals.n_missing:
            self._arrivals[key] = arrivals
            return
        self._arrivals.pop(key, None)
        start_s = arrivals.latest_s
        row = self._start[task.index - self._index]
        for member in members:
            row[member] = start_s
        if meetings.stages is None:
            self._end(task, members, start_s + meetings.alone_s[group])
            return
        if self._transfers.go_on(_Transit(task, group, start_s), start_s):
            self._end(task, members, start_s)

    def _end(self, task: _KindTask, members: Iterable[int], end_s: float) -> None:
        """Set the end of an instance. The streams that wait for it go on."""
        row = self.ends[task.index]
        waiting = self._waiting
        for member in members:
            row[member] = end_s
            streams = waiting.pop((task.index, member), None)
            if streams is None:
                continue
            for stream in streams:
                if end_s > stream.now_s:
                    stream.now_s = end_s
                self._awake.append(stream)


def _under_way(flight: _Transit) -> str:
    return f"{op_text(flight.step.work.op)} still has {flight.left_nbytes:g} bytes at {flight.rate_Bps:g} B/s"


def _work(op: Op, partition: Partition, costs: Costs) -> _KindWork:
    cost = costs.of.get(op)
    if isinstance(op, Tick):
        return _KindWork(op, period_s=op.period_s)
    if isinstance(cost, Local):
        if isinstance(cost.seconds, np.ndarray):
            return _KindWork(op, seconds=cost.seconds[partition.firsts].tolist())
        return _KindWork(op, seconds=[cost.seconds] * len(partition.firsts) if cost.seconds else None)
    if cost is None:
        return _KindWork(op)
    return _KindWork(op, meetings=partition.meetings[id(cost)], price=id(cost))
