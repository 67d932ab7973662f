"""The reference engine: SimPy processes for every host and stream of every rank.

A host walks the plan and hands operations to its streams; it stops at a `Delay` of the host and at a `Wait`. A stream
takes them in order: it waits for the instances they come after, then computes for its seconds, or meets the other
members of its group; the last to arrive starts the transfer. Transfers whose resources nobody else can use take their
time alone; others go through the fluid network. There are O(1) events per rank and operation.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray

from simdist.cost import Costs, Local, Shared, Transfer
from simdist.engines.delays import Delays, check_delays
from simdist.engines.network import FluidNetwork
from simdist.plan import STREAMS, Delay, Instance, Op, Plan, Tick, walk
from simdist.plan.ticks import tick_s
from simdist.trace import Trace

__all__ = ["simulate"]

_HOST = STREAMS.index("host")
_NAN = float("nan")
Events: TypeAlias = Generator[simpy.Event]


def simulate(
    plan: Plan,
    costs: Costs,
    delays: Delays,
    *,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Simulate a plan event by event.

    Args:
        plan: A legal plan.
        costs: Its price list.
        delays: Channel -> float64 `[n_steps, world_size]`, seconds.
        progress: Called with the number of steps that the first rank has behind it.

    Raises:
        PlanError: The delays do not fit the plan.
    """
    check_delays(plan, delays)
    world = _World(plan, costs, delays, progress)
    world.run()
    if progress:
        progress(plan.n_steps)
    ready_s, start_s, end_s = (np.array(rows, dtype=np.float64).reshape(-1, plan.world_size) for rows in world.rows)
    return Trace(plan, ready_s, start_s, end_s, source="simulated by des")


@dataclass(frozen=True, slots=True)
class _Task:
    """An instance, with what the streams need at hand."""

    index: int
    step: int
    stream: int
    after: tuple[int, ...]
    seconds: list[float] | None  # per rank: a local operation or an injected delay
    meeting: "_Meeting | None"  # a transfer
    period_s: float | None  # of a tick


class _Meeting:
    """A collective: who belongs together, and what the last to arrive starts."""

    __slots__ = ("group_of", "members", "seconds", "transfers")

    def __init__(self, cost: Shared, world_size: int, seconds: float | NDArray[np.float64] | None) -> None:
        self.members = cost.group.members(world_size)
        self.group_of = [0] * world_size
        for number, ranks in enumerate(self.members):
            for rank in ranks:
                self.group_of[rank] = number
        self.transfers: tuple[Transfer, ...] = cost.transfers
        self.seconds = None if seconds is None else np.broadcast_to(seconds, len(self.members)).tolist()


class _Stream:
    """A stream of one rank: the tasks that were handed to it and not begun."""

    __slots__ = ("queue", "wake")

    def __init__(self) -> None:
        self.queue: deque[_Task] = deque()
        self.wake: simpy.Event | None = None


class _World:
    """The whole simulation."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        delays: Delays,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._env = simpy.Environment()
        self._world_size = plan.world_size
        self._network = FluidNetwork(self._env, costs.capacity_Bps)
        self._progress = progress
        self._tasks = _tasks(plan, costs, delays)
        self._streams = [[_Stream() for _ in STREAMS] for _ in range(plan.world_size)]
        self.rows: tuple[list[list[float]], ...] = tuple(
            [[_NAN] * plan.world_size for _ in range(plan.n_instances)] for _ in range(3)
        )
        self._reporting: _Stream | None = None
        self._waiting: dict[tuple[int, int], simpy.Event] = {}
        self._meetings: dict[tuple[int, int], tuple[int, simpy.Event]] = {}

    def run(self) -> None:
        used = sorted({task.stream for task in self._tasks if task.stream != _HOST})
        n_tasks_of = Counter(task.stream for task in self._tasks)
        for rank in range(self._world_size):
            self._env.process(self._host(rank))
            for stream in used:
                if rank == 0 and stream == min(used):  # the compute stream, if there is one
                    self._reporting = self._streams[rank][stream]
                self._env.process(self._stream(rank, self._streams[rank][stream], n_tasks_of[stream]))
        self._env.run()

    def _host(self, rank: int) -> Events:
        env, streams, (ready, start, end) = self._env, self._streams[rank], self.rows
        for task in self._tasks:
            if task.stream != _HOST:
                stream = streams[task.stream]
                stream.queue.append(task)
                if stream.wake is not None:
                    stream.wake.succeed()
                    stream.wake = None
                continue
            for index in task.after:
                if end[index][rank] != end[index][rank]:
                    yield self._done(index, rank)
            ready[task.index][rank] = start[task.index][rank] = env.now
            seconds = task.seconds[rank] if task.seconds else 0.0
            if seconds:
                yield env.timeout(seconds)
            end[task.index][rank] = env.now

    def _stream(self, rank: int, stream: _Stream, n_tasks: int) -> Events:
        env, queue, waiting, (ready, start, end) = self._env, stream.queue, self._waiting, self.rows
        report = self._progress if stream is self._reporting else None
        for _ in range(n_tasks):
            if not queue:
                stream.wake = env.event()
                yield stream.wake
            task = queue.popleft()
            index = task.index
            for other in task.after:
                if end[other][rank] != end[other][rank]:
                    yield self._done(other, rank)
            ready[index][rank] = env.now
            if task.seconds is not None:
                start[index][rank] = env.now
                seconds = task.seconds[rank]
                if task.period_s is not None:
                    written_s = max((end[other][rank] for other in task.after), default=0.0)
                    seconds = max(float(tick_s(written_s, task.period_s)) - env.now, 0.0)
                if seconds:
                    yield env.timeout(seconds)
            else:
                yield self._meet(task, rank)
            end[index][rank] = env.now
            if waiting:
                event = waiting.pop((index, rank), None)
                if event is not None:
                    event.succeed()
            if report:
                report(task.step)

    def _done(self, index: int, rank: int) -> simpy.Event:
        """Return the event of an instance's end on a rank."""
        key = (index, rank)
        event = self._waiting.get(key)
        if event is None:
            event = self._waiting[key] = self._env.event()
        return event

    def _meet(self, task: _Task, rank: int) -> simpy.Event:
        """Arrive at a collective; return the event of its end."""
        meeting = task.meeting
        assert meeting is not None
        group = meeting.group_of[rank]
        key = (task.index, group)
        arrived, over = self._meetings.get(key, (0, None))
        if over is None:
            over = self._env.event()
        arrived += 1
        if arrived < len(meeting.members[group]):
            self._meetings[key] = (arrived, over)
            return over
        self._meetings.pop(key, None)
        return self._begin(task, meeting, group, over)

    def _begin(self, task: _Task, meeting: _Meeting, group: int, over: simpy.Event) -> simpy.Event:
        now, row = self._env.now, self.rows[1][task.index]
        for rank in meeting.members[group]:
            row[rank] = now
        if meeting.seconds is None:
            ended = self._network.start(meeting.transfers[group])
        else:
            ended = self._env.timeout(meeting.seconds[group])
        ended.callbacks.append(over.trigger)
        return over


def _tasks(plan: Plan, costs: Costs, delays: Delays) -> list[_Task]:
    known: dict[Op, tuple[list[float] | None, _Meeting | None]] = {}
    for op, cost in costs.of.items():
        match cost:
            case Local():
                known[op] = np.broadcast_to(cost.seconds, plan.world_size).tolist(), None
            case Shared():
                seconds = None if op in costs.contested else cost.alone_s
                known[op] = None, _Meeting(cost, plan.world_size, seconds)
    return [_task(instance, *known[instance.op], delays) for instance in walk(plan)]


def _task(instance: Instance, seconds: list[float] | None, meeting: _Meeting | None, delays: Delays) -> _Task:
    if isinstance(instance.op, Delay):
        seconds = delays[instance.op.channel][instance.step].tolist()
    period_s = instance.op.period_s if isinstance(instance.op, Tick) else None
    stream = STREAMS.index(instance.stream)
    return _Task(instance.index, instance.step, stream, instance.after, seconds, meeting, period_s)
