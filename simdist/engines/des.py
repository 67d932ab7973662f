"""The reference engine: one SimPy environment, with a process for the host and for every other stream of every rank.

A stream takes its operations in order. It waits until the end times of all dependencies are known. Then it computes for
the seconds of the operation, or meets the other members of its group. The last member to arrive starts the transfer. A
transfer that shares resources is a process of its own. The host is one more stream: the operations that it enqueues
come after its last `Wait` or `Delay`.

The end of an operation is known at its start, unless its transfer shares resources. So a stream need not sleep until
then. Its process goes on with a time of its own, ahead of the environment's. It yields an event only to learn a time
that is not known yet. The `Clock` delivers such an event at once when the time becomes known. Only transfers through
the fluid network happen when the environment gets there. No rank can be late for them, because every other time is
known before it comes. Without observers and without links that change, a transfer needs no process either: the network
is told at once when the transfer begins, and reports its end. There are O(1) events per rank and operation.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority
from simpy.resources.resource import Request

from simdist.cost.costs import Costs, Local, Segments, Shared, Transfer, Varying
from simdist.cost.traffic import Traffic
from simdist.engines.actors import Actor, change_shares, fly, perform
from simdist.engines.clock import Clock, Notice, Steps
from simdist.engines.live import ChangeListener, LiveCluster
from simdist.errors import PlanError, UnsupportedError, standstill
from simdist.plan import Delay, Enter, Instance, Lane, Load, Op, Plan, Tick
from simdist.plan.delays import Delays, SeedDelays, check_delays, delays_of, seconds_of
from simdist.plan.first_come import FirstCome, sits_out
from simdist.plan.ops import drops, entering, is_passed_over, tick_s
from simdist.plan.walk import walk
from simdist.traces.trace import Trace, ended_with_its_last_result

_NAN = float("nan")
_ROUNDING_ULPS = 64  # of the time: the rounding error that the stages of a transfer may add up to
_LOADS_AT_HAND = 64  # transfers of loads kept; ranks may be this many loads apart before transfers are computed again
_AT_LAST = EventPriority(3)  # after everything else at this moment
_LATER = EventPriority(4)  # after that
_Key: TypeAlias = tuple[int, int]  # an instance, and a rank or a group
_Row: TypeAlias = "array[float]"  # of an instance, per rank


class EventRun:
    """A run of all events of all ranks, for the seeds that differ, one after the other.

    With actors or observers no process runs ahead of the clock. With actors all transfers go through the network.

    Args:
        plan: A legal plan.
        costs: Its price list.
        delays: The delays of the seeds.
        progress: Called with the steps that the first rank has completed and the steps of all seeds.
        actors: See `simdist.engines.run.Live`; likewise the others.
        observers: See there.
        traffic: See there.
        reason: Why this engine was chosen.
    """

    name = "des"

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        delays: SeedDelays,
        progress: Callable[[int, int], None] | None,
        *,
        actors: Sequence[Actor],
        observers: Sequence[ChangeListener],
        traffic: Callable[[int], Traffic | None] | None,
        reason: str = "",
    ) -> None:
        self.plan = plan
        self.costs = costs
        self.delays = delays if actors else delays.different
        self.n_repeats = len(delays.seeds) // len(self.delays.seeds)
        """How often the seeds that are simulated make all seeds."""
        self.reason = reason
        self._progress = progress
        self._actors = actors
        self._observers = observers
        self._traffic = traffic

    def traces(self) -> Iterator[Trace]:
        """Yield the times of each seed.

        Raises:
            PlanError: The delays do not fit the plan, or the traffic does not fit the prices.
            RunError: An actor failed, or the simulation is stuck.
        """
        for number, seed in enumerate(self.delays.seeds):
            yield self._trace(number, seed)

    def _trace(self, number: int, seed: int) -> Trace:
        plan = self.plan
        costs = self.costs
        delays = self.delays.draw([seed]).take(plan.n_steps)
        check_delays(plan, delays)
        traffic = self._traffic(seed) if self._traffic else None
        traffic = traffic or Traffic()
        if unknown := traffic.causes.keys() - costs.disturbed.keys():
            names = ", ".join(map(costs.resources.name, sorted(unknown)))
            raise PlanError(
                f"plan {plan.name}: its prices do not know that {names} is disturbed: see `price(disturbed=)`"
            )
        segmented = [op for op, cost in costs.of.items() if isinstance(cost, Shared) and cost.segments]
        if self._actors and segmented:
            raise UnsupportedError(
                f"{_text(segmented[0])}: its members end one by one, which actors cannot disturb: set "
                f"cluster.collectives.chunkwise: false"
            )
        progress = self._report(number)
        world = _World(plan, costs, delays, traffic, self._actors, self._observers)
        world.run(progress)
        if progress:
            progress(plan.n_steps)
        shape = -1, plan.world_size
        ready_s, start_s, end_s = (np.frombuffer(bytearray().join(rows)).reshape(shape) for rows in world.rows)
        links = world.cluster.recorder.table()
        trace = Trace(plan, ready_s, start_s, end_s, "simulated by des", links=links, late=world.first_come.late)
        return ended_with_its_last_result(trace)

    def _report(self, number: int) -> Callable[[int], None] | None:
        """Return what turns steps of a seed into steps of all."""
        progress = self._progress
        if progress is None:
            return None
        n_steps = self.plan.n_steps
        total = len(self.delays.seeds) * n_steps
        return lambda step: progress(number * n_steps + step, total)


@dataclass(frozen=True, slots=True)
class _Task:
    """An instance, with everything the streams need to execute it."""

    instance: Instance
    index: int
    step: int
    lane: Lane
    after: tuple[int, ...]
    seconds: Sequence[float]  # per rank: a local operation or an injected delay
    meeting: "_Meeting | None"  # a transfer
    batch: int | None  # number of a load
    period_s: float | None  # of a tick
    is_passed_over: bool  # by a rank that sits out the step
    exchange: int | None  # index of the all-reduce with `drop`: the host sits out the step if it is over


class _Meeting:
    """A collective: its groups, and the transfer that the last member to arrive starts."""

    __slots__ = ("_of_load", "_transfers", "first_come", "group_of", "members", "seconds", "segments")

    def __init__(self, cost: Shared | Varying, world_size: int, seconds: float | NDArray[np.float64] | None) -> None:
        self.members = cost.group.members(world_size)
        self.group_of = [0] * world_size
        for number, ranks in enumerate(self.members):
            for rank in ranks:
                self.group_of[rank] = number
        self._of_load = lru_cache(_LOADS_AT_HAND)(cost.transfers) if isinstance(cost, Varying) else None
        self._transfers = () if isinstance(cost, Varying) else cost.transfers
        self.seconds = None if seconds is None else np.broadcast_to(seconds, len(self.members)).tolist()
        self.segments = cost.segments if isinstance(cost, Shared) and seconds is not None else None
        self.first_come = cost.first_come if isinstance(cost, Shared) else None

    def transfer(self, task: _Task, group: int) -> Transfer:
        """Return the transfer of a group. Each load has its own."""
        if self._of_load is None:
            return self._transfers[group]
        assert task.batch is not None
        return self._of_load(task.batch)[group]


@dataclass(slots=True)
class _Arrivals:
    """Who came when to the first-come all-reduces, each by its index.

    Args:
        came_s: When each rank arrived.
        members: The ranks that are in.
        over_s: When it was over.
        waiting_s: Late ranks without the result, and when they arrived.
        late: See `simdist.traces.trace.Trace`.
        sat_out: Of each rank, the last step that it sat out.
    """

    came_s: defaultdict[int, dict[int, float]]
    members: dict[int, tuple[int, ...]]
    over_s: dict[int, float]
    waiting_s: defaultdict[int, list[tuple[int, float]]]
    late: dict[int, tuple[int, ...]]
    sat_out: list[int]

    @classmethod
    def none(cls, world_size: int) -> "_Arrivals":
        """Return what holds before a run."""
        return cls(defaultdict(dict), {}, {}, defaultdict(list), {}, [-1] * world_size)


class _World:
    """The whole simulation."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        delays: Delays,
        traffic: Traffic,
        actors: Sequence[Actor],
        observers: Sequence[ChangeListener],
    ) -> None:
        self._clock = Clock()
        self._world_size = plan.world_size
        self.cluster = LiveCluster(self._clock, costs, observers, plan.lanes, is_live=bool(actors or observers))
        self._traffic = traffic
        self._is_told_of = self.cluster.is_live or bool(traffic.shares)
        self._actors = actors
        self._tasks = _tasks(plan, costs, delays)
        self.rows: tuple[list[_Row], ...] = tuple(
            [array("d", [_NAN]) * plan.world_size for _ in range(plan.n_instances)] for _ in range(3)
        )  # arrays, because the garbage collector does not scan them
        self._waiting: defaultdict[_Key, Notice] = defaultdict(partial(Notice, self._clock))
        self._n_running = 0
        self._arrivals: dict[_Key, tuple[int, float]] = {}  # missing members of a group, latest arrival so far
        self.first_come = _Arrivals.none(plan.world_size)

    def run(self, progress: Callable[[int], None] | None) -> None:
        for changes in self._traffic.shares:
            self._clock.start(changes.cause, change_shares(changes, self.cluster))
        for background in self._traffic.background:
            self._clock.start(background.cause, fly(background, self.cluster))
        performed = [perform(actor, self.cluster) for actor in self._actors]
        actors = [self._clock.start(name, steps) for name, steps in performed]
        self.cluster.processes += [*self._start_streams(progress), *actors]
        try:
            while self._n_running:
                self._clock.step()
        except simpy.core.EmptySchedule:
            raise standstill(self._clock.now, self._waiting_for()) from None
        finally:
            for _, steps in performed:
                steps.close()

    def _start_streams(self, progress: Callable[[int], None] | None) -> Iterator[simpy.Process]:
        of_lane: dict[Lane, list[_Task]] = {lane: [] for lane in self.cluster.lanes}
        for task in self._tasks:
            of_lane[task.lane].append(task)
        lanes = [(lane, tasks) for lane, tasks in of_lane.items() if tasks]
        reporting = next((tasks for lane, tasks in lanes if lane.kind != "host"), None)
        for rank in range(self._world_size):
            for lane, tasks in lanes:  # rank 0 reports the progress of its compute lane, if there is one
                report = progress if rank == 0 and tasks is reporting else None
                self._n_running += 1
                yield self._clock.start(f"rank {rank} {lane.stream}", self._stream(rank, lane, tasks, report))

    def _waiting_for(self) -> list[str]:
        """Name the transfers that cannot go on, and the processes that wait for operations."""
        wanted = {id(notice): self._tasks[index] for (index, _), notice in self._waiting.items()}
        alive = [process for process in self.cluster.processes if process.is_alive]
        tasks = [(process.name, wanted.get(id(process.target))) for process in alive]
        waiting = [
            f"{who} waits for the end of {_text(task.instance.op)} at step {task.step}" for who, task in tasks if task
        ]
        return [*self.cluster.stopped(), *waiting]

    def _stream(self, rank: int, lane: Lane, tasks: list[_Task], report: Callable[[int], None] | None) -> Steps:  # noqa: C901 (an inner loop: calls would cost more than it does)
        """Take tasks in order. `now_s` is when the stream is free. Yield an event for each time not known yet."""
        waiting = self._waiting
        happen = self._clock.happen
        ready, start, end = self.rows
        is_live = self.cluster.is_live
        clock = self._clock
        now_s = 0.0
        for task in tasks:
            index = task.index
            for other in task.after:
                end_s = end[other][rank]
                if end_s != end_s:
                    yield waiting[other, rank]
                    end_s = end[other][rank]
                if end_s > now_s:
                    now_s = end_s
            if is_live:
                turn = self.cluster.lane_turns[rank, lane.name].request()
                now_s = yield from self._wait_for_lane(turn, task, rank, now_s)
            if task.exchange is not None:
                yield clock.at(max(now_s, clock.now), priority=_LATER)
                self._enter(task, task.exchange, rank, now_s)
            ready[index][rank] = now_s
            if task.meeting is None:
                start[index][rank] = now_s
                if not (task.is_passed_over and self.first_come.sat_out[rank] == task.step):
                    now_s += task.seconds[rank] if task.period_s is None else self._until_tick_s(task, rank, now_s)
                if is_live:
                    yield from self._compute(task, rank, now_s)
                end[index][rank] = now_s
                notice = waiting.pop((index, rank), None)
                if notice is not None:
                    happen(notice)
            else:
                if task.meeting.first_come is not None:
                    yield clock.at(max(now_s, clock.now))
                    self._come(task, task.meeting.first_come, rank, now_s)
                else:
                    self._meet(task, task.meeting, rank, now_s)
                if end[index][rank] != end[index][rank]:
                    yield waiting[index, rank]
                now_s = end[index][rank]
            if is_live:
                turn.resource.release(turn)
            if report:
                report(task.step)
        self._n_running -= 1

    def _wait_for_lane(
        self, turn: Request, task: _Task, rank: int, now_s: float
    ) -> Generator[simpy.Event, object, float]:
        """Wait for the turn of a task on its lane, and return when the stream is free."""
        clock = self._clock
        asked_s = clock.now
        yield turn
        self.cluster.tell(f"rank {rank} {task.lane.stream}", "ready", task.instance)
        return clock.now if clock.now > asked_s else now_s  # later if the lane was held

    def _compute(self, task: _Task, rank: int, end_s: float) -> Steps:
        """Let observers see an operation that needs no other rank."""
        who = f"rank {rank} {task.lane.stream}"
        self.cluster.tell(who, "started", task.instance)
        yield self._clock.at(max(end_s, self._clock.now))  # see `_move`
        self.cluster.tell(who, "ended", task.instance)

    def _enter(self, task: _Task, exchange: int, rank: int, now_s: float) -> None:
        """Begin a step, or sit it out if its all-reduce is over."""
        known = self.first_come
        if sits_out(now_s, known.over_s.get(exchange, math.inf)):
            known.sat_out[rank] = task.step
            known.late[task.index] = tuple(sorted((*known.late.get(task.index, ()), rank)))

    def _until_tick_s(self, task: _Task, rank: int, now_s: float) -> float:
        """Return the seconds from now until a tick that starts now ends."""
        assert task.period_s is not None
        written_s = max((self.rows[2][other][rank] for other in task.after), default=0.0)
        return max(float(tick_s(written_s, task.period_s)) - now_s, 0.0)

    def _meet(self, task: _Task, meeting: _Meeting, rank: int, now_s: float) -> None:
        """Arrive at a collective. The last member to arrive begins it."""
        group = meeting.group_of[rank]
        key = task.index, group
        n_missing, latest_s = self._arrivals.get(key) or (len(meeting.members[group]), now_s)
        if now_s > latest_s:
            latest_s = now_s
        if n_missing > 1:
            self._arrivals[key] = n_missing - 1, latest_s
        else:
            self._arrivals.pop(key, None)
            self._begin(task, meeting, group, latest_s)

    def _come(self, task: _Task, rule: FirstCome, rank: int, now_s: float) -> None:
        """Arrive at a first-come all-reduce. The last member that it waits for begins it."""
        came = self.first_come.came_s[task.index]
        came[rank] = now_s
        if len(came) == rule.n_in:
            self._clock.call_at(now_s, lambda _: self._close(task, rule), priority=_AT_LAST)
        elif task.index in self.first_come.members:
            self._be_late(task, rule, rank, now_s)

    def _close(self, task: _Task, rule: FirstCome) -> None:
        """Begin an all-reduce with the members that arrived first."""
        assert task.meeting is not None
        came = self.first_come.came_s[task.index]
        index = task.index
        chosen = rule.choose((come_s, rank) for rank, come_s in came.items())
        self.first_come.members[index] = chosen.first
        self.first_come.late[index] = tuple(sorted({*task.meeting.members[0]} - {*chosen.first}))
        self._begin(task, task.meeting, 0, chosen.start_s)
        for rank in chosen.late:
            self._be_late(task, rule, rank, came[rank])

    def _be_late(self, task: _Task, rule: FirstCome, rank: int, at_s: float) -> None:
        """Arrive too late: take the result as soon as it exists."""
        self.rows[1][task.index][rank] = at_s
        if self.cluster.is_live:
            self.cluster.tell(f"rank {rank} {task.lane.stream}", "started", task.instance)
        if task.index in self.first_come.over_s:
            self._take(task, rule, rank, at_s)
        else:
            self.first_come.waiting_s[task.index].append((rank, at_s))

    def _take(self, task: _Task, rule: FirstCome, rank: int, come_s: float) -> None:
        """Take the result of an all-reduce that is over."""
        end_s = float(rule.end_s(come_s, self.first_come.over_s[task.index]))
        if self.cluster.is_live:
            self._clock.call_at(end_s, lambda _: self._end(task, [rank], end_s))
        else:
            self._end(task, [rank], end_s)

    def _members(self, task: _Task, meeting: _Meeting, group: int) -> Sequence[int]:
        """Return the ranks that take part in a collective that begins."""
        return meeting.members[group] if meeting.first_come is None else self.first_come.members[task.index]

    def _begin(self, task: _Task, meeting: _Meeting, group: int, start_s: float) -> None:
        members = self._members(task, meeting, group)
        row = self.rows[1][task.index]
        for rank in members:
            row[rank] = start_s
            if self.cluster.is_live:
                self.cluster.tell(f"rank {rank} {task.lane.stream}", "started", task.instance)
        if meeting.segments:
            self._end_each(task, members, meeting.segments, group)
        elif meeting.seconds is not None and not self.cluster.is_live:
            self._end(task, members, start_s + meeting.seconds[group])
        elif not self._is_told_of:
            landed = partial(self._land, task, members)
            now_s = self._clock.now
            transfer = meeting.transfer(task, group)
            self.cluster.network.fly(transfer, landed, start_s=start_s if start_s > now_s else now_s)
        else:
            name = _name(task, group)
            self._clock.start(name, self._move(name, task, meeting, group, start_s))

    def _move(self, name: str, task: _Task, meeting: _Meeting, group: int, start_s: float) -> Steps:
        """Move the bytes of a collective, through the network if others may share its links.

        An undisturbed transfer in the network ends when it would end alone, up to rounding. It is then given exactly
        the end it would have alone, so an actor that disturbs nothing changes nothing.
        """
        cluster = self.cluster
        now_s = self._clock.now
        end_s = None if meeting.seconds is None else start_s + meeting.seconds[group]
        if end_s is None or self._actors:
            transfer = meeting.transfer(task, group)
            yield cluster.carry(name, transfer, start_s=max(start_s, now_s), instance=task.instance)
            now_s = self._clock.now
            if end_s is None or abs(now_s - end_s) > _ROUNDING_ULPS * math.ulp(now_s):
                end_s = now_s
        else:
            cluster.tell(name, "started", task.instance)
            yield self._clock.at(end_s)
            cluster.tell(name, "ended", task.instance)
        self._end(task, self._members(task, meeting, group), end_s)

    def _end_each(self, task: _Task, members: Sequence[int], segments: Segments, group: int) -> None:
        """End a collective with members that begin and end on their own."""
        ready_s = np.array([self.rows[0][task.index][rank] for rank in members])
        ends_s = segments.end_s(ready_s, segments.segment_s[group]).tolist()
        if self.cluster.is_live:
            name = _name(task, group)
            self._clock.start(name, self._end_in_turn(name, task, members, ends_s))
            return
        for rank, end_s in zip(members, ends_s, strict=True):
            self._end(task, [rank], end_s)

    def _end_in_turn(self, name: str, task: _Task, members: Sequence[int], ends_s: Sequence[float]) -> Steps:
        self.cluster.tell(name, "started", task.instance)
        for end_s, rank in sorted(zip(ends_s, members, strict=True)):
            yield self._clock.at(end_s)
            self._end(task, [rank], end_s)
        self.cluster.tell(name, "ended", task.instance)

    def _land(self, task: _Task, members: Sequence[int]) -> None:
        """End a collective now. The processes that wait for it go on before anything else happens."""
        self._end(task, members, self._clock.now)
        self._clock.go_on()

    def _end(self, task: _Task, members: Sequence[int], end_s: float) -> None:
        """Set the end of a collective, from now on known to all."""
        waiting = self._waiting
        happen = self._clock.happen
        row = self.rows[2][task.index]
        for rank in members:
            row[rank] = end_s
            if self.cluster.is_live:
                self.cluster.tell(f"rank {rank} {task.lane.stream}", "ended", task.instance)
            notice = waiting.pop((task.index, rank), None)
            if notice is not None:
                happen(notice)
        rule = task.meeting.first_come if task.meeting else None
        if rule is not None and task.index not in self.first_come.over_s:
            self.first_come.over_s[task.index] = end_s
            for rank, come_s in self.first_come.waiting_s.pop(task.index, ()):
                self._take(task, rule, rank, come_s)


def _text(op: Op) -> str:
    from simdist.plan.text import op_text

    return op_text(op)


def _name(task: _Task, group: int) -> str:
    return f"{type(task.instance.op).__name__} of step {task.step}, group {group}"


def _tasks(plan: Plan, costs: Costs, delays: Delays) -> list[_Task]:
    known: dict[Op, tuple[list[float], _Meeting | None]] = {}
    for op, cost in costs.of.items():
        match cost:
            case Local():
                known[op] = np.broadcast_to(cost.seconds, plan.world_size).tolist(), None
            case Shared():
                seconds = None if op in costs.contested else cost.alone_s
                known[op] = [], _Meeting(cost, plan.world_size, seconds)
            case Varying():
                known[op] = [], _Meeting(cost, plan.world_size, None)
    numbers = count()  # number the loads
    entered = [(entering(body), drops(body)) for body in plan.bodies]
    bodies = [entered[number] for number in plan.body_of_steps()]
    late_s = {op: seconds_of(op, delays)[0] for op in delays_of(plan)}
    return [
        _task(
            instance,
            *known[instance.op],
            next(numbers) if isinstance(instance.op, Load) else None,
            late_s,
            *bodies[instance.step],
        )
        for instance in walk(plan)
    ]


def _task(
    instance: Instance,
    seconds: list[float],
    meeting: _Meeting | None,
    batch: int | None,
    late_s: dict[Delay, NDArray[np.float64]],
    enter: Enter | None,
    exchange: int | None,
) -> _Task:
    if isinstance(instance.op, Delay):
        seconds = late_s[instance.op][instance.step].tolist()
    passes_over = enter is not None and is_passed_over(instance.op, enter)
    if passes_over and enter is not None and enter.absent:
        seconds = [0.0 if rank in enter.absent else each for rank, each in enumerate(seconds)]
    period_s = instance.op.period_s if isinstance(instance.op, Tick) else None
    where = instance.index, instance.step, instance.lane
    over = instance.index + exchange if exchange is not None and instance.op == enter else None
    return _Task(instance, *where, instance.after, seconds, meeting, batch, period_s, passes_over, over)
