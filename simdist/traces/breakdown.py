"""Breakdown of the time of each rank into states.

At each moment a rank is in exactly one of these states, in this order of precedence:

    compute   its compute stream works (an injected slow GPU counts as work)
    comm      a collective moves bytes: exposed communication
    wait      it is ready for a collective but others are not; also, at the end, until the last rank is done
    io        a load or save is running
    host      none of these: its host is asleep or has not enqueued anything yet (an injected CPU-side straggler)

If several collectives run at once, the first one in the program decides between comm and wait.

The states add up to the makespan. `Attribution` computes them from the rows of a trace, one after the other in program
order. So the numpy engine does not need to keep a trace, and the same code measures both engines and the real backend.

The compute stream runs in order, so all other states lie in the gaps between its operations. Each gap is cut with the
intervals of the collectives and loads that are still open then. A compute operation may itself wait for a load or a
save, not through its host. Then later collectives of the program can run in its gap, such as the gathers of the next
sharded step. So such a gap stays open until no later collective can reach into it.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.display import Pictured
from simdist.errors import TraceError, require
from simdist.plan.lanes import COMM, IO, Lane, LaneKind
from simdist.plan.walk import Template, stretches
from simdist.traces.links import Held
from simdist.traces.trace import Trace, late_shares

if TYPE_CHECKING:
    import pandas as pd

_Times: TypeAlias = NDArray[np.float64]
#: Returns the links that held an instance up, and the seconds at its end, broadcasting to `[world_size, n]`.
HeldUp: TypeAlias = Callable[[int, Template], Iterable[tuple[str, _Times]]]

#: The states of a rank, in the order of precedence; `Breakdown` has the seconds of each as `<state>_s`.
STATES = ("compute", "comm", "wait", "io", "host")

_SMALL = 512  # values of ranks and seeds; up to here, numpy takes longer to start than to compute
_BATCH_VALUES = 16_384  # of gaps that are then cut at once; a core's cache holds them
_MANY = 8  # open collectives; from here on, removing the finished ones pays off
_MOST_GAPS = 8  # that later collectives may reach into; a job without collectives would keep all
_MOST_SEEN = 512  # keys of instances that may come again
_MOST_REPETITIONS = 64  # kept, with all that is open after them


class Collector(Protocol):
    """Receives the times of each instance, in program order, each `[world_size, n_seeds]` or packed.

    Packed times `[n, n_seeds]` are those of n blocks of ranks, which follow one another and are alike: see `unpacked`.

    Attributes:
        only_ends: Whether it needs no other times. They may then be too early, which is less work.
    """

    only_ends: ClassVar[bool]

    def add(self, index: int, template: Template, ready_s: _Times, start_s: _Times, end_s: _Times) -> None:
        """Take the times of instance `index`."""
        ...


@dataclass(frozen=True)
class Breakdown(Pictured):
    """Seconds that ranks spent in each state, summed over all steps.

    Args:
        n_steps: Steps.
        makespan_s: Seconds until the last rank is done, `[n_seeds]`.
        compute_s: Seconds of computing, `[world_size, n_seeds]`.
        comm_s: Seconds of exposed communication, `[world_size, n_seeds]`.
        wait_s: Seconds of waiting for other ranks, `[world_size, n_seeds]`.
        io_s: Seconds of exposed loads and saves, `[world_size, n_seeds]`.
        host_s: Seconds in which the device had no work from the host, `[world_size, n_seeds]`.
        links_s: Name of a misbehaving link -> seconds of communication and loads that it added.
        late: Rank -> share of the updates for which it was too late, averaged over seeds.
    """

    n_steps: int
    makespan_s: _Times
    compute_s: _Times
    comm_s: _Times
    wait_s: _Times
    io_s: _Times
    host_s: _Times
    links_s: dict[str, _Times] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)

    @property
    def step_s(self) -> _Times:
        """Seconds per step, `[n_seeds]`."""
        return self.makespan_s / self.n_steps

    def per_step_s(self, state: str) -> _Times:
        """Return the seconds per step in a state (`compute`, ..., `host`), averaged over ranks, `[n_seeds]`."""
        return np.asarray(self.rank_states_s()[state].mean(axis=0))

    def rank_states_s(self) -> dict[str, _Times]:
        """Return the seconds per step of each rank in each state: state -> `[world_size, n_seeds]`."""
        totals_s = (self.compute_s, self.comm_s, self.wait_s, self.io_s, self.host_s)
        return {state: np.asarray(total_s / self.n_steps) for state, total_s in zip(STATES, totals_s, strict=True)}

    def spread(self, world_size: int, n_seeds: int) -> "Breakdown":
        """Return the breakdown of so many ranks and seeds, where one rank stands for all, or one seed, or both."""

        def over_all(seconds: _Times) -> _Times:
            return np.broadcast_to(seconds, (world_size, n_seeds)).copy()

        return replace(
            self,
            makespan_s=np.broadcast_to(self.makespan_s, (n_seeds,)).copy(),
            compute_s=over_all(self.compute_s),
            comm_s=over_all(self.comm_s),
            wait_s=over_all(self.wait_s),
            io_s=over_all(self.io_s),
            host_s=over_all(self.host_s),
        )

    def frame(self) -> "pd.DataFrame":
        """Return one row per seed and rank.

        Columns:
            seed, rank (int64): Seed, from 0, and rank.
            step_s, compute_s, comm_s, wait_s, io_s, host_s (float64): Times per step.
        """
        require("pandas", extra="tables", what="a frame of results")
        import pandas as pd

        world_size, n_seeds = self.compute_s.shape
        return pd.DataFrame(
            {
                "seed": np.repeat(np.arange(n_seeds), world_size),
                "rank": np.tile(np.arange(world_size), n_seeds),
                "step_s": np.repeat(self.step_s, world_size),
                **{f"{state}_s": seconds.T.ravel() for state, seconds in self.rank_states_s().items()},
            }
        )

    def of_ranks(self, rows: NDArray[np.int64]) -> "Breakdown":
        """Return the breakdown of all ranks, where rows stand for several: those of each rank, `[world_size]`."""
        of_states = {f"{state}_s": getattr(self, f"{state}_s")[rows] for state in STATES}
        return replace(self, **of_states)

    def links_per_step_s(self) -> dict[str, float]:
        """Return the seconds per step that links held ranks up, averaged over ranks and seeds; nothing without any."""
        means_s = {name: float(seconds.mean()) / self.n_steps for name, seconds in self.links_s.items()}
        return {name: mean_s for name, mean_s in means_s.items() if mean_s > 0}


@dataclass(slots=True)
class _Collective:
    index: int
    ready_s: _Times
    start_s: _Times
    end_s: _Times

    @property
    def times_s(self) -> tuple[_Times, _Times, _Times]:
        return self.ready_s, self.start_s, self.end_s

    def later(self, by_s: _Times, n_instances: int) -> "_Collective":
        return _Collective(self.index - n_instances, self.ready_s - by_s, self.start_s - by_s, self.end_s - by_s)


@dataclass(slots=True)
class _Transfer:
    """A load or a save."""

    index: int
    start_s: _Times
    end_s: _Times

    def later(self, by_s: _Times, n_instances: int) -> "_Transfer":
        return _Transfer(self.index - n_instances, self.start_s - by_s, self.end_s - by_s)


@dataclass(slots=True)
class _Open:
    """Spans that may still overlap the next gap of the compute stream."""

    collectives: list[_Collective] = field(default_factory=list)
    loads: list[_Transfer] = field(default_factory=list)
    saves: list[_Transfer] = field(default_factory=list)
    held: list[tuple[str, LaneKind, _Times, _Times]] = field(default_factory=list)

    def copy(self) -> "_Open":
        """Return the same spans, in lists of their own."""
        return _Open([*self.collectives], [*self.loads], [*self.saves], [*self.held])

    def of_rows(self, rows: NDArray[np.int64]) -> "_Open":
        """Return the same spans with other rows of ranks."""
        return _Open(
            [_Collective(each.index, *(at_s[rows] for at_s in each.times_s)) for each in self.collectives],
            [_Transfer(each.index, each.start_s[rows], each.end_s[rows]) for each in self.loads],
            [_Transfer(each.index, each.start_s[rows], each.end_s[rows]) for each in self.saves],
            [(name, kind, start_s[rows], end_s[rows]) for name, kind, start_s, end_s in self.held],
        )

    def awaits_transfer(self, after: set[int]) -> bool:
        """Tell whether one of these instances is a load or a save."""
        return any(each.index in after for each in (*self.loads, *self.saves))

    def parts(self) -> Iterator[object]:
        """Yield what tells these spans from others."""
        for collective in self.collectives:
            yield from (collective.index, *collective.times_s)
        for transfers in (self.loads, self.saves):
            yield len(transfers)
            for each in transfers:
                yield from (each.index, each.start_s, each.end_s)
        yield len(self.held)
        for held in self.held:
            yield from held

    def later(self, by_s: _Times, n_instances: int) -> "_Open":
        """Return the same spans, with times and instances that count from later ones."""
        return _Open(
            [each.later(by_s, n_instances) for each in self.collectives],
            [each.later(by_s, n_instances) for each in self.loads],
            [each.later(by_s, n_instances) for each in self.saves],
            [(name, kind, start_s - by_s, end_s - by_s) for name, kind, start_s, end_s in self.held],
        )


@dataclass(slots=True)
class _Gap:
    """A gap of the compute stream into which later collectives of the program may reach.

    Args:
        begin_s: Its begin.
        next_s: Its end.
        open: Spans that overlap it. The last `n_later` collectives came after it in the program.
        n_later: How many.
    """

    begin_s: _Times
    next_s: _Times
    open: _Open
    n_later: int = 0

    def copy(self) -> "_Gap":
        return _Gap(self.begin_s, self.next_s, self.open.copy(), self.n_later)

    def of_rows(self, rows: NDArray[np.int64]) -> "_Gap":
        return _Gap(self.begin_s[rows], self.next_s[rows], self.open.of_rows(rows), self.n_later)

    def later(self, by_s: _Times, n_instances: int) -> "_Gap":
        return _Gap(self.begin_s - by_s, self.next_s - by_s, self.open.later(by_s, n_instances), self.n_later)


@dataclass(slots=True)
class _Moment:
    """What the instances to come need to know of those before.

    Args:
        compute_end_s: End of the last compute operation.
        queued_s: End of the communication on all lanes.
        has_several: Whether several lanes communicate.
        last_end_s: End of the last operation on each lane, by its name.
        open: Spans that may still overlap a gap.
        gaps: Gaps that later collectives may reach into.
    """

    compute_end_s: _Times
    queued_s: _Times
    has_several: bool
    last_end_s: dict[str, _Times]
    open: _Open
    gaps: list[_Gap] = field(default_factory=list)

    def copy(self) -> "_Moment":
        """Return the same moment, with collections of its own."""
        gaps = [each.copy() for each in self.gaps]
        last_end_s = dict(self.last_end_s)
        return _Moment(self.compute_end_s, self.queued_s, self.has_several, last_end_s, self.open.copy(), gaps)

    def begin_several(self, n_ranks: int) -> None:
        """Let a second lane communicate."""
        self.has_several = True
        if COMM.name in self.last_end_s:
            self.queued_s = unpacked(self.last_end_s[COMM.name], n_ranks)

    def turn(self, by_s: _Times, n_instances: int) -> None:
        """Count times and instances from later ones on."""
        self.compute_end_s = self.compute_end_s - by_s
        self.queued_s = self.queued_s - by_s
        self.last_end_s = {name: end_s - by_s for name, end_s in self.last_end_s.items()}
        self.open = self.open.later(by_s, n_instances)
        self.gaps = [each.later(by_s, n_instances) for each in self.gaps]

    def of_rows(self, rows: NDArray[np.int64]) -> "_Moment":
        """Return the same moment with other rows of ranks."""
        last_end_s = {name: end_s[rows] for name, end_s in self.last_end_s.items()}
        gaps = [each.of_rows(rows) for each in self.gaps]
        ends_s = self.compute_end_s[rows], self.queued_s[rows]
        return _Moment(*ends_s, self.has_several, last_end_s, self.open.of_rows(rows), gaps)

    def digest(self) -> bytes:
        """Return what tells it from other moments."""
        parts: list[object] = [self.has_several, self.compute_end_s, self.queued_s]
        for name, end_s in self.last_end_s.items():
            parts += [name, end_s]
        parts += self.open.parts()
        for gap in self.gaps:
            parts += [gap.begin_s, gap.next_s, gap.n_later, *gap.open.parts()]
        found = hashlib.blake2b(digest_size=16)
        for part in parts:
            found.update(part.tobytes() if isinstance(part, np.ndarray) else f"{part};".encode())
        return found.digest()


class _Totals:
    """Seconds of the gaps of the compute stream, and of what they are lost to, `[world_size, n_seeds]`."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.gap_s, self.comm_s, self.wait_s, self.io_s = (np.zeros(shape) for _ in range(4))

    def take_rows(self, rows: NDArray[np.int64]) -> None:
        """Take other rows of ranks."""
        self.gap_s, self.comm_s, self.wait_s, self.io_s = (total_s[rows] for total_s in self.all)

    @property
    def all(self) -> tuple[_Times, _Times, _Times, _Times]:
        return self.gap_s, self.comm_s, self.wait_s, self.io_s


@dataclass(frozen=True, slots=True)
class _Added:
    """What some instances added to the totals, and the moments before and after them."""

    added_s: tuple[_Times, ...]
    before: _Moment
    after: _Moment

    def of_rows(self, rows: NDArray[np.int64]) -> "_Added":
        """Return the same with other rows of ranks."""
        added_s = tuple(each[rows] for each in self.added_s)
        return _Added(added_s, self.before.of_rows(rows), self.after.of_rows(rows))


class Attribution:
    """Accumulates the states of each rank, instance by instance.

    `on_time` promises that an operation that waits only for its stream starts when its predecessor ends, as in a
    simulation. On real hardware it may start later. `held` names links that held instances up.
    """

    only_ends: ClassVar[bool] = False

    def __init__(self, world_size: int, n_seeds: int, *, on_time: bool = True, held: HeldUp | None = None) -> None:
        self._on_time = on_time
        self._held = held
        self._links_s: dict[str, _Times] = {}
        shape = (world_size, n_seeds)
        self._totals = _Totals(shape)
        self._now = _Moment(np.zeros(shape), np.full(shape, -np.inf), has_several=False, last_end_s={}, open=_Open())
        self._batch = _batch_of(world_size * n_seeds)
        self._gaps: list[tuple[_Times, _Times]] = []  # begin and end
        self._overlaps: list[tuple[int, _Collective]] = []  # number of a gap, and a collective that is open then
        self._begin_s: _Times = np.zeros(n_seeds)  # times count from here on
        self._load_lanes: dict[str, None] = {}  # of workers that load whole batches
        self._seen: set[Hashable] = set()
        self._known: dict[tuple[Hashable, bytes], _Added] = {}

    def add(self, index: int, template: Template, ready_s: _Times, start_s: _Times, end_s: _Times) -> None:
        """Take the times of the next instance."""
        now = self._now
        lane = template.lane
        kind = lane.kind
        n_ranks = len(self._totals.gap_s)
        if kind == "comm" and lane.name != COMM.name and not now.has_several:
            now.begin_several(n_ranks)
        now.last_end_s[lane.name] = end_s
        is_packed = n_ranks > 1 and not len(end_s) == len(start_s) == len(ready_s) == n_ranks
        if is_packed and (kind != "comm" or now.has_several or self._batch or self._held):
            ready_s, start_s, end_s = (unpacked(each, n_ranks) for each in (ready_s, start_s, end_s))
        if kind == "compute":
            if template.after or not self._on_time:
                self._end_gap({index - back for back in template.after}, start_s)
            now.compute_end_s = end_s
        elif kind == "comm":
            if now.has_several:  # besides others: only the part beyond them
                beyond_s = now.queued_s
                now.queued_s = np.maximum(beyond_s, end_s)
                ready_s, start_s, end_s = (np.maximum(at_s, beyond_s) for at_s in (ready_s, start_s, end_s))
            now.open.collectives.append(_Collective(index, ready_s, start_s, end_s))
        elif kind == "io":
            now.open.loads.append(self._load(index, lane, start_s, end_s))
        elif kind == "save":
            now.open.saves.append(_Transfer(index, start_s, end_s))
        if self._held and kind not in ("host", "compute"):
            for name, seconds in self._held(index, template):
                now.open.held.append((name, kind, np.maximum(end_s - seconds, start_s), end_s))
        if now.gaps and kind == "comm":
            self._reach_back()

    def _load(self, index: int, lane: Lane, start_s: _Times, end_s: _Times) -> _Transfer:
        """Return a load; of a worker, only the part that is beyond the earlier loads of other workers."""
        if lane.name != IO.name:
            self._load_lanes[lane.name] = None
            ends_s = self._now.last_end_s
            others = (name for name in self._load_lanes if name != lane.name and name in ends_s)
            for beyond_s in (unpacked(ends_s[name], len(self._totals.gap_s)) for name in others):
                start_s = np.maximum(start_s, beyond_s)
                end_s = np.maximum(end_s, beyond_s)
        return _Transfer(index, start_s, end_s)

    def _end_gap(self, after: set[int], start_s: _Times) -> None:
        """End a gap by a compute operation that waited for `after`."""
        spans = self._now.open
        self._cut(start_s, stays=spans.awaits_transfer(after))
        if spans.collectives or spans.loads or spans.saves or spans.held:
            self._close(after, start_s)

    def turn(self, by_s: _Times, n_instances: int) -> None:
        """Count times from a later moment on, and instances from a later one on.

        Args:
            by_s: How much later, `[n_seeds]`.
            n_instances: How many instances later.
        """
        self._add_up()
        self._begin_s = self._begin_s + by_s
        self._now.turn(by_s, n_instances)

    def split(self, rows: NDArray[np.int64]) -> None:
        """Let ranks that had one row go on in several. No link is held up.

        Args:
            rows: The row before of each row from now on, `[n_rows]`.
        """
        self._add_up()
        self._totals.take_rows(rows)
        self._now = self._now.of_rows(rows)
        self._batch = _batch_of(self._totals.gap_s.size)
        known = [(key, each.of_rows(rows)) for (key, _), each in self._known.items()]
        self._known = {(key, each.before.digest()): each for key, each in known}

    def repeat(self, key: Hashable, add: Callable[[], None]) -> None:
        """Take instances that may have come before. If they did, after an equal moment, they add as much.

        Args:
            key: Equal for instances with equal times, which count from the last turn.
            add: Adds the instances.
        """
        if self._held or key not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
            add()
            return
        self._add_up()
        whole = key, self._now.digest()
        known = self._known.get(whole)
        totals_s = self._totals.all
        if known is not None:
            for total_s, added_s in zip(totals_s, known.added_s, strict=True):
                total_s += added_s
            self._now = known.after.copy()
            return
        before = self._now.copy()
        before_s = [total_s.copy() for total_s in totals_s]
        add()
        self._add_up()
        if len(self._known) >= _MOST_REPETITIONS:
            self._known.clear()
        added = tuple(total_s - earlier_s for total_s, earlier_s in zip(totals_s, before_s, strict=True))
        self._known[whole] = _Added(added, before, self._now.copy())

    def finish(self, n_steps: int) -> Breakdown:
        """Return the totals, after the last instance."""
        self.turn(-self._begin_s, 0)
        finish_s = self._now.compute_end_s
        for end_s in self._now.last_end_s.values():
            finish_s = np.maximum(finish_s, unpacked(end_s, len(finish_s)))
        makespan_s = finish_s.max(axis=0)
        self._add_up()
        compute_s = np.maximum(
            self._now.compute_end_s - self._totals.gap_s, 0.0
        )  # rounding can leave -1e-18, as for the host
        self._cut(finish_s)
        for gap in self._now.gaps:
            self._settle(gap)
        self._add_up()
        host_s = self._totals.gap_s - self._totals.comm_s - self._totals.wait_s - self._totals.io_s
        return Breakdown(
            n_steps=n_steps,
            makespan_s=makespan_s,
            compute_s=compute_s,
            comm_s=self._totals.comm_s,
            wait_s=self._totals.wait_s + (makespan_s - finish_s),
            io_s=self._totals.io_s,
            host_s=np.maximum(host_s, 0.0),
            links_s=self._links_s,
        )

    def _cut(self, next_s: _Times, *, stays: bool = False) -> None:
        """Distribute the gap from the end of the last compute operation to `next_s`."""
        begin_s = self._now.compute_end_s
        if self._batch:
            self._overlaps += [(len(self._gaps), each) for each in self._now.open.collectives]
            self._gaps.append((begin_s, next_s))
            if len(self._gaps) + len(self._overlaps) >= self._batch:
                self._add_up()
        else:
            self._totals.gap_s += next_s - begin_s
            self._cut_collectives(begin_s, next_s)
        if not stays:
            self._cut_transfers(_Gap(begin_s, next_s, self._now.open))
            return
        self._now.gaps.append(_Gap(begin_s, next_s, self._now.open.copy()))
        if len(self._now.gaps) > _MOST_GAPS:
            self._settle(self._now.gaps.pop(0))

    def _reach_back(self) -> None:
        """Add the newest collective to the gaps that it reaches into, and settle those that no later one can."""
        newest = self._now.open.collectives[-1]
        ready_s, end_s = (unpacked(at_s, len(self._totals.gap_s)) for at_s in (newest.ready_s, newest.end_s))
        for gap in self._now.gaps:
            if (ready_s < gap.next_s).any():
                gap.open.collectives.append(newest)
                gap.n_later += 1
        while self._now.gaps and (end_s >= self._now.gaps[0].next_s).all():
            self._settle(self._now.gaps.pop(0))

    def _settle(self, gap: _Gap) -> None:
        """Distribute what waited for later collectives: their parts of a gap, and those of loads and saves."""
        self._add_up()
        n_earlier = len(gap.open.collectives) - gap.n_later
        for each in gap.open.collectives[n_earlier:]:
            times_s = (unpacked(at_s, len(self._totals.gap_s)) for at_s in each.times_s)
            wait_s, comm_s = _cut_out(gap.begin_s, gap.next_s, *times_s)
            self._totals.wait_s += wait_s
            self._totals.comm_s += comm_s
        self._cut_transfers(gap)

    def _cut_transfers(self, gap: _Gap) -> None:
        """Distribute a gap over loads, saves, and links that held instances up."""
        within = partial(_clip, low_s=gap.begin_s, high_s=gap.next_s)
        for load in gap.open.loads:
            _cut_transfer(gap.open, within(load.start_s), within(load.end_s), self._totals.io_s)
        for save in gap.open.saves:
            _cut_save(gap.open, within(save.start_s), within(save.end_s), self._totals.io_s)
        for name, kind, start_s, end_s in gap.open.held:
            total_s = self._links_s.setdefault(name, np.zeros_like(self._totals.gap_s))
            start_s = within(start_s)
            end_s = within(end_s)
            if kind == "comm":
                total_s += end_s - start_s
            elif kind == "io":
                _cut_transfer(gap.open, start_s, end_s, total_s)
            else:
                _cut_save(gap.open, start_s, end_s, total_s)

    def _cut_collectives(self, begin_s: _Times, next_s: _Times) -> None:
        """Distribute a gap over collectives, without unpacking their times. Most lie before the gap, or within it."""
        n_ranks, n_seeds = begin_s.shape
        of_blocks: dict[int, tuple[_Times, _Times, _Times]] = {}  # first and last begin, first end of the gap
        for each in self._now.open.collectives:
            n_blocks = len(each.end_s)
            if n_blocks not in of_blocks:
                begins_s, nexts_s = (at_s.reshape(n_blocks, -1, n_seeds) for at_s in (begin_s, next_s))
                of_blocks[n_blocks] = begins_s.min(axis=1), begins_s.max(axis=1), nexts_s.min(axis=1)
            first_s, last_s, end_s = of_blocks[n_blocks]
            if (each.end_s <= first_s).all():
                continue
            ready_s, start_s, over_s = (_in_blocks(at_s, n_blocks, n_ranks) for at_s in each.times_s)
            if (each.end_s <= end_s).all() and (ready_s >= last_s[:, np.newaxis]).all():
                wait_s = start_s - ready_s
                comm_s = over_s - start_s
            else:
                gap_begin_s, gap_end_s = (at_s.reshape(n_blocks, -1, n_seeds) for at_s in (begin_s, next_s))
                wait_s, comm_s = _cut_out(gap_begin_s, gap_end_s, ready_s, start_s, over_s)
            for total_s, part_s in ((self._totals.wait_s, wait_s), (self._totals.comm_s, comm_s)):
                in_blocks = total_s.reshape(n_blocks, -1, n_seeds)
                in_blocks += part_s

    def _add_up(self) -> None:
        """Add the gaps of a batch, and the parts that collectives cover, to the totals, in their order."""
        if not self._gaps:
            return
        stacked = partial(_stacked, shape=self._totals.gap_s.shape)
        begin_s, next_s = map(stacked, zip(*self._gaps, strict=True))
        _add_in_order(self._totals.gap_s, next_s - begin_s)
        if self._overlaps:
            gaps = [number for number, _ in self._overlaps]
            rows = [each.times_s for _, each in self._overlaps]
            wait_s, comm_s = _cut_out(begin_s[gaps], next_s[gaps], *map(stacked, zip(*rows, strict=True)))
            _add_in_order(self._totals.wait_s, wait_s)
            _add_in_order(self._totals.comm_s, comm_s)
        self._gaps = []
        self._overlaps = []

    def _close(self, after: set[int], start_s: _Times) -> None:
        """Drop operations that ended before the compute operation that waited for `after` starts."""
        awaited = max((each.index for each in self._now.open.collectives if each.index in after), default=-1)
        if not self._now.has_several:
            self._now.open.collectives = [each for each in self._now.open.collectives if each.index > awaited]
        if self._now.has_several or len(self._now.open.collectives) > _MANY:
            n_over = 0  # they end in their order
            for each in self._now.open.collectives:
                if (unpacked(each.end_s, len(start_s)) > start_s).any():
                    break
                n_over += 1
            del self._now.open.collectives[:n_over]
        self._now.open.loads = [each for each in self._now.open.loads if (each.end_s > start_s).any()]
        self._now.open.saves = [each for each in self._now.open.saves if (each.end_s > start_s).any()]
        self._now.open.held = [each for each in self._now.open.held if (each[-1] > start_s).any()]


def _batch_of(n_values: int) -> int:
    """Return how many gaps and parts of them are added up at once; 0: each at once, as they are large."""
    return _BATCH_VALUES // n_values if 0 < n_values <= _SMALL else 0


def side_by_side(seeds: Sequence[Breakdown]) -> Breakdown:
    """Combine the breakdowns of single seeds; none of them has links."""

    def row(name: str) -> _Times:
        return np.concatenate([getattr(each, name) for each in seeds], axis=-1)

    compute_s, comm_s, wait_s, io_s, host_s = (row(f"{state}_s") for state in STATES)
    late = mean_late(seeds)
    return Breakdown(seeds[0].n_steps, row("makespan_s"), compute_s, comm_s, wait_s, io_s, host_s, late=late)


def mean_late(parts: Sequence[Breakdown]) -> dict[int, float]:
    """Return the share of updates for which each rank was too late, averaged over the seeds of all parts."""
    n_seeds = sum(len(each.makespan_s) for each in parts)
    total = Counter[int]()
    for each in parts:
        total.update({rank: share * len(each.makespan_s) for rank, share in each.late.items()})
    return {rank: share / n_seeds for rank, share in sorted(total.items())}


def unpacked(times: _Times, n_ranks: int) -> _Times:
    """Return times of ranks, `[n_ranks, n]`, given those of blocks of ranks that follow one another and are alike.

    >>> unpacked(np.array([[1.0], [2.0]]), 4).ravel().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    if len(times) == n_ranks:
        return times
    if len(times) == 1:
        return np.broadcast_to(times, (n_ranks, times.shape[1]))
    return np.repeat(times, n_ranks // len(times), axis=0)


def _in_blocks(times: _Times, n_blocks: int, n_ranks: int) -> _Times:
    """Return times of ranks or packed ones in a shape that broadcasts to `[n_blocks, n_ranks / n_blocks, n]`."""
    if len(times) in (1, n_blocks):
        return times[:, np.newaxis]
    return unpacked(times, n_ranks).reshape(n_blocks, -1, times.shape[1])


def _cut_save(spans: _Open, free_s: _Times, end_s: _Times, total_s: _Times) -> None:
    """Add the part of a save that neither loads nor collectives cover."""
    for load in spans.loads:
        _cut_transfer(spans, free_s, _clip(load.start_s, free_s, end_s), total_s)
        free_s = _clip(load.end_s, free_s, end_s)
    _cut_transfer(spans, free_s, end_s, total_s)


def _cut_transfer(spans: _Open, free_s: _Times, end_s: _Times, total_s: _Times) -> None:
    """Add the part of a span that no collective covers, piece by piece; a difference of sums can be below 0."""
    for each in spans.collectives:
        ready_s, over_s = (unpacked(at_s, len(total_s)) for at_s in (each.ready_s, each.end_s))
        total_s += _clip(ready_s, free_s, end_s) - free_s
        free_s = _clip(over_s, free_s, end_s)
    total_s += end_s - free_s


def _clip(at_s: _Times, low_s: _Times, high_s: _Times) -> _Times:
    return np.asarray(np.minimum(np.maximum(at_s, low_s), high_s))


def _cut_out(begin_s: _Times, next_s: _Times, ready_s: _Times, start_s: _Times, end_s: _Times) -> tuple[_Times, _Times]:
    """Return the parts of a gap in which a collective waits and in which it moves bytes."""
    ready_s, start_s, end_s = (_clip(at_s, begin_s, next_s) for at_s in (ready_s, start_s, end_s))
    return start_s - ready_s, end_s - start_s


def _stacked(rows: Sequence[_Times], shape: tuple[int, ...]) -> _Times:
    """Stack arrays that broadcast to a shape along a new first axis."""
    whole = [each if each.shape == shape else np.broadcast_to(each, shape) for each in rows]
    return np.concatenate(whole).reshape(-1, *shape)


def _add_in_order(total_s: _Times, seconds: _Times) -> None:
    """Add `seconds`, `[n, ...]`, in order: for a single rank, numpy would sum pairwise."""
    rows = np.concatenate((total_s[np.newaxis], seconds))
    total_s[...] = rows.sum(axis=0) if total_s.size > 1 else rows.cumsum(axis=0)[-1]


def break_down(trace: Trace, held: Held | None = None) -> Breakdown:
    """Return the time of each rank of a trace by state, and the part that misbehaving links added.

    Raises:
        TraceError: An operation did not run on some rank.
    """
    missing = np.argwhere(np.isnan(trace.end_s))
    if len(missing):
        instance, rank = missing[0]
        raise TraceError(
            f"operation instance {instance} of plan {trace.plan.name} did not run on rank {rank} ({len(missing)} such "
            f"entries); only a complete trace can be broken down"
        )
    attribution = Attribution(trace.plan.world_size, 1, on_time=False, held=held.up if held else None)
    index = 0
    for stretch in stretches(trace.plan):
        for template in stretch.templates * stretch.times:
            rows = (array[index][:, None] for array in (trace.ready_s, trace.start_s, trace.end_s))
            attribution.add(index, template, *rows)
            index += 1
    return replace(attribution.finish(trace.plan.n_steps), late=late_shares(trace))
