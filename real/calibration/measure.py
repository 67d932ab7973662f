"""Measure collectives and messages on all ranks.

On each rank, a repetition begins at an agreed moment, after a gap without traffic, and on another buffer than the
repetition before. This resembles training, which has gaps, and in which caches hold other buffers. A repetition lasts
from the moment when the last member has begun until the last one has ended. The collective is performed as by the
executor, including the division for a mean.

On a GPU, a job's collectives follow one another on a stream, and the host has enqueued them long before. So a
collective is enqueued behind another one, at which its members meet, and that behind a delay of the stream, in which
the host enqueues both. It lasts from one event of the stream to the next.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from real.buffers.memory import Memory
from real.calibration.calls import CallTimes, queued_s
from real.calibration.tables import FLOAT_NBYTES, Measurement, MeasuringTask, OpName, Where
from real.collectives.byte_transfer import gather_rows
from real.collectives.worlds import ProcessWorld
from real.execution.gpu import NewEvent, await_kernels, timed_event
from real.processes.launch import Connection
from real.recording.clock import Clocks, compare_clocks
from real.recording.timing import now_s, precise_sleeps, sleep_s
from simdist.plan import Buffer, Plan, ops
from simdist.plan.group import Group
from simdist.plan.lanes import COMM

_COLD_NBYTES = 2**25  # buffers of each task take turns
_MOST_BUFFERS = 8
_LEAST_REPETITIONS = 3
_LEAST_NODES = 2  # of a ring between nodes
_MOST_REPETITIONS = 200
_DELAY_CYCLES = 2_000_000  # a millisecond, in which the host enqueues two collectives
_Act: TypeAlias = Callable[[], None]


def tasks(
    n_nodes: int, ranks_per_node: int, sizes: Sequence[int], ops: Sequence[OpName], *, halves: bool = False
) -> list[MeasuringTask]:
    """Return all tasks to measure, small sizes first.

    Sizes are rounded so that each group divides them into equal slices.

    Args:
        n_nodes: Machines.
        ranks_per_node: Ranks of each.
        sizes: Bytes of the whole buffer.
        ops: Collectives.
        halves: Also gather the largest size within half of the nodes, which with all nodes tells the step of a ring.

    >>> [str(task) for task in tasks(1, 2, [1000], ["all_reduce"])]
    ['all_reduce (node, 1 kB)', 'sendrecv (pair in node, 1 kB)']
    """
    n = ranks_per_node
    world_size = n_nodes * ranks_per_node
    inside = Group(n)
    across = Group(n_nodes, stride=n)
    everyone = Group(world_size)
    wheres: list[tuple[Where, Group]] = [("node", inside)] if n > 1 else []
    pairs: list[tuple[Where, Group]] = [("pair in node", inside)] if n > 1 else []
    if n_nodes > 1:
        wheres.append(("one per node", across))
        pairs.append(("pair of nodes", across))
    if n > 1 and n_nodes > 1:
        wheres += [("all per node", across), ("world", everyone)]
    counts = sorted({max(1, round(size / FLOAT_NBYTES / world_size)) * world_size for size in sizes})
    todo = [
        task
        for count in counts
        for task in (
            *(MeasuringTask(op, where, group, count) for op in ops for where, group in wheres),
            *(MeasuringTask("sendrecv", where, group, count) for where, group in pairs),
        )
    ]
    if halves and n_nodes >= 2 * _LEAST_NODES and n_nodes % 2 == 0:
        todo.append(MeasuringTask("all_gather", "half of the nodes", Group(world_size // 2), counts[-1]))
        of_all = MeasuringTask("all_gather", "world", everyone, counts[-1])
        todo += [of_all] if of_all not in todo else []
    return todo


def collective(op: OpName, group: Group) -> ops.Collective:
    """Return the operation of a plan; a message between two ranks has none."""
    made: dict[OpName, ops.Collective] = {
        "all_reduce": ops.AllReduce("whole", group),
        "reduce_scatter": ops.ReduceScatter("whole", "slice", group),
        "all_gather": ops.AllGather("slice", "whole", group),
        "broadcast": ops.Broadcast("whole", group),
        "reduce": ops.Reduce("whole", group),
    }
    return made[op]


def one_op_plan(op: ops.Collective, count: int, world_size: int) -> Plan:
    """Return a plan with only this operation, on `count` float32 elements."""
    buffers = Buffer("whole", count, initialized=True), Buffer("slice", count // op.group.size, initialized=True)
    return Plan.from_steps("calibration", world_size=world_size, buffers=buffers, steps=[(op,)])


def measure_task(
    connection: Connection,
    todo: Sequence[MeasuringTask],
    *,
    budget_s: float,
    gap_s: float,
    sure_nbytes: float = math.inf,
) -> list[Measurement]:
    """Measure; all ranks take part with the same tasks and get the results.

    Args:
        connection: All ranks.
        todo: The tasks to measure.
        budget_s: Seconds for all repetitions, without three of each task that always take place.
        gap_s: Seconds without traffic before each repetition.
        sure_nbytes: Larger sizes are left out when three repetitions would probably outlast the budget.

    Raises:
        RunError: A rank failed or is missing, or a backend lacks an operation.
    """
    groups = list(dict.fromkeys(task.group for task in todo))
    world = ProcessWorld({COMM.communicator: groups}, timeout_s=connection.timeout_s)
    precise_sleeps()
    deadline_s = now_s() + budget_s
    bench = _Bench(connection, world, gap_s, compare_clocks())
    left = math.fsum(map(_weight, todo))
    results: list[Measurement] = []
    for before, task in zip((None, *todo), todo, strict=False):
        if before is None or before.count != task.count:
            same = [each for each in todo if each.count == task.count]
            if task.nbytes > sure_nbytes and bench.agrees(now_s() + _least_s(same, results) > deadline_s):
                break
            bench.compare_clocks()
        share_s = max(0.0, deadline_s - now_s()) * _weight(task) / left
        results.append(bench.measure(task, share_s))
        left -= _weight(task)
    return results


def _least_s(todo: Sequence[MeasuringTask], results: Sequence[Measurement]) -> float:
    """Return about how long the fewest repetitions of tasks of one size take, by those of the size before."""
    known = {(each.task.op, each.task.where): each for each in results}
    alike = [(task, known[task.op, task.where]) for task in todo if (task.op, task.where) in known]
    once_s = math.fsum(each.median_s * task.nbytes / each.task.nbytes for task, each in alike)
    return (1 + _LEAST_REPETITIONS) * once_s


def device_s(act: _Act, delay: _Act, new_event: NewEvent, await_device: _Act) -> float:
    """Return the seconds of an operation on a device's stream, behind an equal one.

    Args:
        act: Enqueues the operation.
        delay: Enqueues a delay that is longer than enqueueing the operation twice.
        new_event: Makes an event.
        await_device: Waits until the stream is done.
    """
    delay()
    act()
    begin = new_event()
    begin.record()
    act()
    end = new_event()
    end.record()
    await_device()
    return float(begin.elapsed_time(end)) / 1e3


def measure_calls(connection: Connection, measured: Sequence[Measurement], *, gap_s: float) -> CallTimes:
    """Measure what the host takes for a call of the smallest all_reduce that was measured; all ranks take part.

    Args:
        connection: All ranks.
        measured: What was measured, with an all_reduce.
        gap_s: Seconds without traffic before calls are queued.
    """
    smallest = min((each for each in measured if each.task.op == "all_reduce"), key=lambda each: each.task.count)
    world = ProcessWorld({COMM.communicator: [smallest.task.group]}, timeout_s=connection.timeout_s)
    return _Bench(connection, world, gap_s, compare_clocks()).calls(smallest.task)


def _weight(task: MeasuringTask) -> int:
    return 4 if task.op == "all_reduce" else 1  # links are derived from it


class _Bench:
    """Repeats operations on this rank, synchronously with the others."""

    def __init__(self, connection: Connection, world: ProcessWorld, gap_s: float, clocks: Clocks) -> None:
        self._connection = connection
        self._world = world
        self._gap_s = gap_s
        self._rank = connection.place.rank
        self._clocks = clocks
        self._agreeing_s = 0.0
        self._enqueues = connection.backend == "nccl"

    def compare_clocks(self) -> None:
        """Compare the clocks again, because they drift."""
        self._clocks = compare_clocks()

    def agrees(self, answer: bool) -> bool:
        """Return the answer of rank 0 to a question that all ranks ask."""
        agreed = torch.tensor([float(answer and self._rank == 0)], dtype=torch.float64)
        dist.all_reduce(agreed)
        return bool(agreed.item())

    def measure(self, task: MeasuringTask, share_s: float) -> Measurement:
        """Repeat a task for about these seconds, by rank 0's clock."""
        with self._connection.guard.explaining(str(task)):
            times = self._repeat(self._act(task), share_s)
        groups = task.taking_part(self._world.world_size)
        seconds = np.concatenate(
            [times[members, :, 1].max(axis=0) - times[members, :, 0].max(axis=0) for members in groups]
        )
        if task.op == "sendrecv":
            seconds /= 2  # round trip
        return Measurement(task, tuple(seconds.tolist()))

    def calls(self, task: MeasuringTask) -> CallTimes:
        """Return the seconds of a call on the slowest rank, queued and with a host that waits."""
        with self._connection.guard.explaining(f"{task}, queued"):
            act = self._act(task)
            found = []
            for _ in range(_LEAST_REPETITIONS + 1):  # the first is a warm-up
                self._meet(more=True)
                times_s = queued_s(act, self._wait)
                self._meet(more=True)
                begin_s = now_s()
                act()
                self._wait()
                found.append((*times_s, now_s() - begin_s))
            ranks_s = gather_rows(torch.tensor(found[1:], dtype=torch.float64).median(dim=0).values)
        return CallTimes(*ranks_s.max(dim=0).values.tolist())

    def _repeat(self, act: _Act, share_s: float) -> NDArray[np.float64]:
        """Return begin and end of each repetition on each rank, `[world_size, n, 2]`; the first is a warm-up."""
        times: list[tuple[float, float]] = []
        begin_s = now_s()
        has_time = True
        while self._meet(len(times) - 1 < _LEAST_REPETITIONS or has_time):
            times.append(self._time(act))
            has_time = now_s() - begin_s < share_s and len(times) - 1 < _MOST_REPETITIONS
        mine = torch.tensor(times[1:], dtype=torch.float64)
        everybodys = torch.zeros(self._world.world_size, *mine.shape, dtype=torch.float64)
        dist.all_gather(list(everybodys.unbind()), mine)
        return everybodys.numpy()

    def _meet(self, more: bool) -> bool:
        """Wait for all, agree on whether and when the next repetition begins, and wait until then; rank 0 decides."""
        self._connection.guard.position += 1
        called_s = self._now_s()
        start_s = called_s + self._agreeing_s + self._gap_s if more else np.nan
        agreed = torch.tensor([start_s if self._rank == 0 else 0.0], dtype=torch.float64)
        dist.all_reduce(agreed)
        self._agreeing_s = self._now_s() - called_s
        if torch.isnan(agreed).any():
            return False
        sleep_s(float(agreed) - self._now_s())
        return True

    def _time(self, act: _Act) -> tuple[float, float]:
        if self._enqueues:
            delay = partial(torch.cuda._sleep, _DELAY_CYCLES)
            return 0.0, device_s(act, delay, timed_event, self._wait)
        begin_s = self._now_s()
        act()
        self._wait()
        return begin_s, self._now_s()

    def _wait(self) -> None:
        await_kernels(self._connection.device)

    def _now_s(self) -> float:
        """Return the time by rank 0's clock."""
        return now_s() - float(self._clocks.ahead_s[self._rank])

    def _act(self, task: MeasuringTask) -> _Act:
        """Return the action of this rank in a repetition."""
        involved = any(self._rank in members for members in task.taking_part(self._world.world_size))
        if not involved:
            return lambda: None
        if task.op == "sendrecv":
            return self._ping(task)
        op = collective(task.op, task.group)
        plan = one_op_plan(op, task.count, self._world.world_size)
        n_buffers = min(_MOST_BUFFERS, max(1, _COLD_NBYTES // task.nbytes))
        memories = [Memory(plan, self._connection.device, {"whole", "slice"}) for _ in range(n_buffers)]
        turns = itertools.cycle(memories)
        return lambda: self._world.perform(op, next(turns))

    def _ping(self, task: MeasuringTask) -> _Act:
        ((first, second),) = task.taking_part(self._world.world_size)
        on_host = self._connection.backend == "gloo"  # gloo sends only from host memory
        message = torch.zeros(task.count, device="cpu" if on_host else self._connection.device)

        def ping() -> None:
            dist.send(message, dst=second)
            dist.recv(message, src=second)

        def pong() -> None:
            dist.recv(message, src=first)
            dist.send(message, dst=first)

        return ping if self._rank == first else pong
