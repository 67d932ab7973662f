"""A plan as execution traces: what every rank does, step by step, without loops.

Every operation of a step becomes a node that comes after the operation before it on its stream and after those that
`simdist.plan.walk` says it waits for, all in `data_deps`. So a consumer that follows dependencies meets the order of
the plan, and all ranks reach their collectives in the same order.

    compute stream      COMP, is_cpu_op false
    comm stream         COMM_COLL, is_cpu_op false; copies into fusion buffers and the like are COMP
    io stream           MEM_LOAD and MEM_STORE, is_cpu_op false
    delays              COMP; of the host and of storage is_cpu_op true, of the compute stream false
    waits, ticks        no node: what comes after them comes after what they wait for

`duration_micros` is what the operation costs alone, by the price list: a collective in it waits for nobody and shares
no link. It holds whole microseconds, so `simdist_duration_s` tells the seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from simdist import __version__
from simdist.chakra.groups import Groups
from simdist.chakra.operations import Described, Describing
from simdist.chakra.schema import Attribute, Metadata, Node
from simdist.cost import Costs, Local, OpCost, Shared, Varying
from simdist.plan import STREAMS, Delay, Instance, Load, Op, Plan, Tick, Wait, walk
from simdist.plan.delays import Delays
from simdist.scenario import Workload

SCHEMA = "0.0.4"  # what consumers expect; 1.0.0 has the same messages
_NODE_NBYTES = 180  # of a node, about: a name, dependencies and 5 to 8 attributes


@dataclass(frozen=True)
class Export:
    """A plan, and what its traces tell besides.

    Args:
        plan: What the ranks do.
        costs: Its price list.
        workload: What computes; tells the FLOPs of forward and backward passes.
        delays: Channel -> float64 `[plan.n_steps, plan.world_size]`, seconds.
        n_steps: The first so many steps are written.
    """

    plan: Plan
    costs: Costs
    workload: Workload
    delays: Delays
    n_steps: int

    @property
    def nbytes(self) -> int:
        """Bytes of all traces together, about."""
        counts = [sum(not isinstance(op, Wait | Tick) for op in body) for body in self.plan.bodies]
        n_nodes = sum(counts[body] for body in islice(self.plan.body_of_steps(), self.n_steps))
        return n_nodes * self.plan.world_size * _NODE_NBYTES

    @cached_property
    def groups(self) -> Groups:
        """The process groups."""
        return Groups.of(self.plan)

    @cached_property
    def _digest(self) -> str:
        return self.plan.digest()

    def metadata(self, rank: int) -> Metadata:
        """Return the head of a rank's trace."""
        return Metadata(
            SCHEMA,
            (
                Attribute("simdist_version", "string", __version__),
                Attribute("simdist_plan", "string", self.plan.name),
                Attribute("simdist_digest", "string", self._digest),
                Attribute("simdist_rank", "int64", rank),
                Attribute("simdist_world_size", "int64", self.plan.world_size),
                Attribute("simdist_steps", "int64", self.n_steps),
            ),
        )

    def nodes(self, rank: int) -> Iterator[Node]:
        """Yield the nodes of a rank in program order; the id of a node is the operation's place in the plan, from 1."""
        describing = Describing(self.plan, self.workload, self.groups)
        described = {op: describing.of(op, rank) for op in self.costs.of}
        alone_s = {op: self._alone_s(cost, rank) for op, cost in self.costs.of.items()}
        order, loads_s = _Order(), iter(self._loads_s)
        for instance in takewhile(lambda each: each.step < self.n_steps, walk(self.plan)):
            op, seconds = instance.op, alone_s[instance.op]
            if isinstance(op, Delay):
                seconds = float(self.delays[op.channel][instance.step, rank])
            elif isinstance(op, Load) and (load_s := next(loads_s)) is not None:
                seconds = float(load_s[rank])
            has_node = _has_node(op, seconds)
            after = order.add(instance, has_node=has_node)
            if has_node:
                yield _node(instance, described[op], after, seconds)

    def _alone_s(self, cost: OpCost, rank: int) -> float:
        """Return what an operation takes on a rank that shares its links with nobody; of loads that differ, 0."""
        match cost:
            case Local(seconds):
                return _of(seconds, rank)
            case Shared(group, _, seconds):
                return _of(seconds, self.groups.place(group, rank))
            case Varying():
                return 0.0
            case _:
                assert_never(cost)

    @cached_property
    def _loads_s(self) -> list[NDArray[np.float64] | None]:
        """Seconds of every load that differs from the others of its operation, `[world_size]`."""
        bodies = (self.plan.bodies[body] for body in islice(self.plan.body_of_steps(), self.n_steps))
        ops = (op for body in bodies for op in body if isinstance(op, Load))
        costs = (self.costs.of[op] for op in ops)
        return [self._load_s(cost, number) if isinstance(cost, Varying) else None for number, cost in enumerate(costs)]

    def _load_s(self, cost: Varying, number: int) -> NDArray[np.float64]:
        return np.array([transfer.alone_s(self.costs.capacity_Bps) for transfer in cost.transfers(number)])


class _Order:
    """What comes before what: of an operation without a node, what it waits for stands in for it."""

    def __init__(self) -> None:
        self._streams = bytearray()  # of every instance
        self._last: list[int | None] = [None] * len(STREAMS)  # instance on each stream
        self._stand_ins: dict[int, tuple[int, ...]] = {}

    def add(self, instance: Instance, *, has_node: bool) -> tuple[int, ...]:
        """Return the instances that this one comes directly after: on each stream the last one that has a node."""
        stream = STREAMS.index(instance.stream)
        before = self._last[stream]
        needed = instance.after if before is None else (before, *instance.after)
        latest: dict[int, int] = {}  # a stream runs in order
        for index in (each for one in needed for each in self._stand_ins.get(one, (one,))):
            latest[self._streams[index]] = max(index, latest.get(self._streams[index], index))
        deps = tuple(sorted(latest.values()))
        self._streams.append(stream)
        self._last[stream] = instance.index
        if not has_node:
            self._stand_ins[instance.index] = deps
        return deps


def _of(seconds: float | NDArray[np.float64], place: int) -> float:
    return float(seconds) if isinstance(seconds, float | int) else float(seconds[place])


def _has_node(op: Op, seconds: float) -> bool:
    """Tell whether an operation is written: one that only waits is not, nor is a delay of nothing."""
    return not isinstance(op, Wait | Tick) and not (isinstance(op, Delay) and not seconds)


def _node(instance: Instance, described: Described, after: tuple[int, ...], seconds: float) -> Node:
    return Node(
        instance.index + 1,
        described.name,
        described.type,
        data_deps=tuple(index + 1 for index in after),
        duration_us=round(seconds * 1e6),
        attributes=(
            *described.attributes,
            Attribute("simdist_step", "int64", instance.step),
            Attribute("simdist_duration_s", "double", seconds),
        ),
    )
