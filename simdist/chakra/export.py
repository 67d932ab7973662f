"""A plan as execution traces: the operations of each rank, step by step, without loops.

Each operation of a step becomes a node. Its `data_deps` are the previous operation on its stream and the dependencies
from `simdist.plan.walk`. So a consumer that follows dependencies keeps the order of the plan.

    compute stream      COMP, is_cpu_op false
    comm stream         COMM_COLL, is_cpu_op false; copies into fusion buffers and the like are COMP
    io stream           MEM_LOAD and MEM_STORE, is_cpu_op false
    delays              COMP; of the host and of storage is_cpu_op true, of the compute stream false
    waits, ticks        no node: their successors depend on their dependencies

`duration_micros` is the price of the operation alone, from the price list: without waiting for ranks and without
sharing links. It holds whole microseconds, so `simdist_duration_s` has the exact seconds.

`comm_size` follows the convention of its consumers: the whole buffer, but for an all-gather the part of one rank. A
sparse buffer is an all-gather of its values and indices, `k * (4 + 4)` bytes per rank, because traces have no other
sparse payload. `tensor_size` is the bytes of the buffers that an operation reads and writes.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from numpy.typing import NDArray

from simdist import __version__
from simdist.chakra.schema import CollectiveType, NodeType, add_attribute, message_classes, write_trace
from simdist.cost import Costs, Varying
from simdist.cost.costs import alone_s
from simdist.errors import PlanError, naming_file
from simdist.files import replacing
from simdist.plan import COLLECTIVES, Buffer, Collective, Instance, Op, Plan, op_text, ops, reads, writes
from simdist.plan.delays import Delays, delays_of, seconds_of
from simdist.plan.group import Group
from simdist.plan.text import op_name
from simdist.plan.walk import walk
from simdist.scenario import Workload
from simdist.settings.units import format_nbytes

if TYPE_CHECKING:
    from google.protobuf.message import Message

#: Name of the process group of all ranks in traces.
_WORLD = "0"
_MAX_INT64 = 2**63 - 1
_COLLECTIVES: dict[type[Collective], CollectiveType] = {
    ops.AllReduce: CollectiveType.ALL_REDUCE,
    ops.ReduceScatter: CollectiveType.REDUCE_SCATTER,
    ops.AllGather: CollectiveType.ALL_GATHER,
    ops.Reduce: CollectiveType.REDUCE,
    ops.Broadcast: CollectiveType.BROADCAST,
}
#: All other operations are `COMP`, except collectives of several ranks.
_MEMORY_NODES: dict[type[Op], NodeType] = {
    ops.Load: NodeType.MEM_LOAD,
    ops.StageIn: NodeType.MEM_LOAD,
    ops.Save: NodeType.MEM_STORE,
}


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups of a plan: 0 is the world, other groups are numbered from 1.

    Args:
        world_size: Ranks.
        first: Partition of the ranks -> number of its first group, without the world and single ranks.
    """

    world_size: int
    first: dict[Group, int]

    @classmethod
    def of(cls, plan: Plan) -> "ProcessGroups":
        """Return the groups of a plan, in the order in which its bodies use them."""
        used = dict.fromkeys(op.group for body in plan.bodies for op in body if isinstance(op, COLLECTIVES))
        first = {}
        number = 1
        for group in used:
            if 1 < group.size < plan.world_size:
                first[group] = number
                number += plan.world_size // group.size
        return cls(plan.world_size, first)

    def name(self, group: Group, rank: int) -> str:
        """Return the name of a rank's group in traces."""
        return str(self.first[group] + group.number(rank)) if group in self.first else _WORLD

    def root(self, op: ops.Reduce | ops.Broadcast, rank: int) -> int:
        """Return the root in a rank's group."""
        return op.group.members(self.world_size)[op.group.number(rank)][op.root]

    def document(self) -> dict[str, list[int]]:
        """Return the ranks of each group except the world, by name: the file that simulators read with the traces."""
        return {
            str(first + n): ranks
            for group, first in self.first.items()
            for n, ranks in enumerate(group.members(self.world_size))
        }


class NodeTemplates:
    """Makes nodes with the attributes of an operation that are the same in every step."""

    def __init__(self, plan: Plan, workload: Workload, groups: ProcessGroups) -> None:
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._groups = groups
        flops = (tensor.flops * workload.batch_size for tensor in workload.tensors)
        self._flops = list(accumulate(flops, initial=0.0))  # of the forward pass, before each tensor, and in total

    def make(self, op: Op, rank: int) -> "Message":
        """Return a node with the name, the type and the attributes of an operation on a rank."""
        kind = NodeType.COMM_COLL if _communicates(op) else _MEMORY_NODES.get(type(op), NodeType.COMP)
        node = message_classes().node(name=op_text(op), type=kind)
        add_attribute(node, "is_cpu_op", "bool", _is_of_cpu(op))
        if _communicates(op):
            self._add_communication(node, op, rank)
        else:
            self._add_work(node, op)
        add_attribute(node, "simdist_op", "string", op_name(op))
        return node

    def _add_communication(self, node: "Message", op: Collective, rank: int) -> None:
        add_attribute(node, "comm_type", "int64", _COLLECTIVES[type(op)])
        sent = op.src if isinstance(op, ops.ReduceScatter | ops.AllGather) else op.buffer
        add_attribute(node, "comm_size", "int64", self._buffers[sent].nbytes)
        add_attribute(node, "pg_name", "string", self._groups.name(op.group, rank))
        if isinstance(op, ops.Reduce | ops.Broadcast):
            add_attribute(node, "simdist_root", "int64", self._groups.root(op, rank))

    def _add_work(self, node: "Message", op: Op) -> None:
        match op:
            case ops.Forward():
                flops = math.fsum(self._flops_of(self._buffers[name]) for name in op.srcs)
            case ops.Backward():
                flops = 2 * self._flops_of(self._buffers[op.dst])
            case _:
                flops = 0.0
        if 1 <= flops <= _MAX_INT64:
            add_attribute(node, "num_ops", "int64", round(flops))
        nbytes = sum(self._buffers[name].nbytes for name in dict.fromkeys(reads(op) + writes(op)))
        if nbytes:
            add_attribute(node, "tensor_size", "uint64", nbytes)

    def _flops_of(self, buffer: Buffer) -> float:
        """Return the forward FLOPs of the tensors of a buffer, for a whole batch."""
        first, last = buffer.tensors or (0, 0)
        return self._flops[last] - self._flops[first]


def cautions(plan: Plan) -> list[str]:
    """Return the parts of a plan that consumers will not see or may not accept, one sentence each."""
    used = {op for body in plan.bodies for op in body}
    found = []
    if any(isinstance(op, ops.Reduce | ops.Broadcast) for op in used):
        found.append("it has reduce or broadcast, which some simulators refuse or take for free")
    if any(isinstance(op, ops.Tick) for op in used):
        found.append("ticks of a clock have no node: what waits for one does not wait in the traces")
    if any(isinstance(op, ops.AllReduce) and op.servers for op in used):
        found.append("parameter servers have no node: all-reduces through them stand as all-reduces")
    if any(isinstance(op, ops.Load | ops.StageIn | ops.Save) for op in used):
        found.append("loads and saves are memory nodes: simulators need a model of remote memory for them")
    return found


def _communicates(op: Op) -> TypeGuard[Collective]:
    """Tell whether an operation is a collective of more than one rank."""
    return isinstance(op, COLLECTIVES) and op.group.size > 1


_VERSION = "0.0.4"  # version of the schema that consumers expect; 1.0.0 has the same messages
_NODE_NBYTES = 180  # approximate size of a node: a name, dependencies and 5 to 8 attributes
#: Larger exports are refused unless forced. Without loops, each step is written out.
MAX_EXPORT_NBYTES = 2 * 10**9


@dataclass(frozen=True)
class Export:
    """A plan, and the additional contents of its traces.

    Args:
        plan: The plan of the ranks.
        costs: Its price list.
        workload: The model, for the FLOPs of forward and backward passes.
        delays: Those of one seed, see `simdist.plan.delays`.
        n_steps: Number of steps to write, from the first.
    """

    plan: Plan
    costs: Costs
    workload: Workload
    delays: Delays
    n_steps: int

    def __post_init__(self) -> None:
        if any(map(ops.entering, self.plan.bodies)):
            raise PlanError(
                f"plan {self.plan.name}: ranks sit steps out, and execution traces are the same on every rank and in "
                f"every run: export a schedule in which all ranks take part in every step"
            )

    @property
    def nbytes(self) -> int:
        """Approximate bytes of all traces."""
        counts = [sum(not isinstance(op, ops.Wait | ops.Tick) for op in body) for body in self.plan.bodies]
        n_nodes = sum(counts[body] for body in islice(self.plan.body_of_steps(), self.n_steps))
        return n_nodes * self.plan.world_size * _NODE_NBYTES

    @cached_property
    def groups(self) -> ProcessGroups:
        """The process groups."""
        return ProcessGroups.of(self.plan)

    @cached_property
    def _digest(self) -> str:
        return self.plan.digest()

    def messages(self, rank: int) -> "Iterator[Message]":
        """Yield the trace of a rank: its head, then its nodes in program order.

        The id of a node is the operation's place in the plan, from 1.
        """
        yield self._head(rank)
        templates = NodeTemplates(self.plan, self.workload, self.groups)
        nodes = {op: templates.make(op, rank) for op in self.costs.of}
        priced_s = {op: 0.0 if isinstance(cost, Varying) else alone_s(cost, rank) for op, cost in self.costs.of.items()}
        order = _Order()
        loads_s = iter(self._loads_s)
        late_s = {op: seconds_of(op, self.delays)[0, :, rank] for op in delays_of(self.plan)}
        for instance in takewhile(lambda each: each.step < self.n_steps, walk(self.plan)):
            op = instance.op
            seconds = priced_s[op]
            if isinstance(op, ops.Delay):
                seconds = float(late_s[op][instance.step])
            elif isinstance(op, ops.Load) and (load_s := next(loads_s)) is not None:
                seconds = float(load_s[rank])
            has_node = _has_node(op, seconds, rank)
            after = order.add(instance, has_node=has_node)
            if has_node:
                yield _node(instance, nodes[op], after, seconds)

    def _head(self, rank: int) -> "Message":
        head = message_classes().head(version=_VERSION)
        texts = {"version": __version__, "plan": self.plan.name, "digest": self._digest}
        numbers = {"rank": rank, "world_size": self.plan.world_size, "steps": self.n_steps}
        for kind, values in (("string", texts), ("int64", numbers)):
            for name, value in values.items():
                add_attribute(head, f"simdist_{name}", kind, value)
        return head

    @cached_property
    def _loads_s(self) -> list[NDArray[np.float64] | None]:
        """Seconds of every load that differs from the others of its operation, `[world_size]`."""
        bodies = (self.plan.bodies[body] for body in islice(self.plan.body_of_steps(), self.n_steps))
        costs = (self.costs.of[op] for body in bodies for op in body if isinstance(op, ops.Load))
        varying = (cost.transfers(number) if isinstance(cost, Varying) else None for number, cost in enumerate(costs))
        rates_Bps = self.costs.capacity_Bps
        return [None if each is None else np.array([one.alone_s(rates_Bps) for one in each]) for each in varying]


class _Order:
    """Order of nodes. An operation without a node is replaced by its dependencies."""

    def __init__(self) -> None:
        self._lanes: list[str] = []  # lane of each instance
        self._last: dict[str, int] = {}  # last instance on each lane
        self._stand_ins: dict[int, tuple[int, ...]] = {}

    def add(self, instance: Instance, *, has_node: bool) -> tuple[int, ...]:
        """Return the direct predecessors of this instance: on each lane, the last one with a node."""
        lane = instance.lane.name
        before = self._last.get(lane)
        needed = instance.after if before is None else (before, *instance.after)
        latest: dict[str, int] = {}  # a lane runs in order
        for index in (each for one in needed for each in self._stand_ins.get(one, (one,))):
            latest[self._lanes[index]] = max(index, latest.get(self._lanes[index], index))
        deps = tuple(sorted(latest.values()))
        self._lanes.append(lane)
        self._last[lane] = instance.index
        if not has_node:
            self._stand_ins[instance.index] = deps
        return deps


def _is_of_cpu(op: Op) -> bool:
    return isinstance(op, ops.KernelLaunch) or (isinstance(op, ops.Delay) and op.channel != "compute")


def _has_node(op: Op, seconds: float, rank: int) -> bool:
    """Tell whether an operation is written. Waits, delays of 0, and operations of other ranks are not."""
    is_idle = isinstance(op, ops.Delay) and not seconds
    is_for_others = isinstance(op, ops.Copy | ops.Save) and not op.by.is_first(rank)
    return not (isinstance(op, ops.Wait | ops.Tick) or is_idle or is_for_others)


def _node(instance: Instance, template: "Message", after: tuple[int, ...], seconds: float) -> "Message":
    node = message_classes().node()
    node.CopyFrom(template)
    node.id = instance.index + 1
    node.data_deps.extend(index + 1 for index in after)
    node.duration_micros = round(seconds * 1e6)
    add_attribute(node, "simdist_step", "int64", instance.step)
    add_attribute(node, "simdist_duration_s", "double", seconds)
    return node


def refuse_size(export: Export) -> None:
    """Refuse an export that would be larger than `MAX_EXPORT_NBYTES`.

    Raises:
        PlanError: It would be larger. The message states the size, and the number of steps that fit.
    """
    if export.nbytes <= MAX_EXPORT_NBYTES:
        return
    fitting = int(export.n_steps * MAX_EXPORT_NBYTES / export.nbytes)
    raise PlanError(
        f"plan {export.plan.name}: {export.n_steps:,} steps of {export.plan.world_size:,} ranks would take about "
        f"{format_nbytes(export.nbytes)}, for traces have no loops; "
        + (f"--steps {fitting} takes {format_nbytes(MAX_EXPORT_NBYTES)}" if fitting else "a step is too large already")
        + "; --force writes all"
    )


@dataclass(frozen=True)
class Exported:
    """A plan that was written as traces.

    Args:
        label: Label of its schedule, the prefix of the files.
        export: What was written.
        folder: Where.
        nbytes: Bytes of all traces.
    """

    label: str
    export: Export
    folder: Path
    nbytes: int

    def document(self) -> dict[str, object]:
        """Return an export as JSON.

        Columns:
            schedule, digest (str): Label, digest of the plan.
            world_size (int): Ranks, and files.
            steps (int): Steps written.
            traces, groups (str): Pattern of the files, and file with the ranks of process groups.
            size (int): Bytes of all traces.
            cautions (list): What the traces do not show.
        """
        plan = self.export.plan
        return {
            "schedule": self.label,
            "digest": plan.digest(),
            "world_size": plan.world_size,
            "steps": self.export.n_steps,
            "traces": str(self.folder / f"{self.label}.*.et"),
            "groups": str(self.folder / f"{self.label}.json"),
            "size": self.nbytes,
            "cautions": cautions(plan),
        }

    def text(self) -> str:
        """Return an export in a line."""
        n_ranks = self.export.plan.world_size
        count = f"{n_ranks:,} ranks, {self.export.n_steps:,} steps, {format_nbytes(self.nbytes)}"
        files = self.folder / self.label
        return f"{self.label}: {count}: {files}.<rank>.et, process groups in {files}.json"


def write_traces(
    export: Export, folder: Path, prefix: str, *, force: bool, progress: Callable[[int], None] | None = None
) -> int:
    """Write `PREFIX.<rank>.et` for each rank and `PREFIX.json` with the process groups; return their total bytes.

    Args:
        export: The traces to write.
        folder: Target folder; created if missing.
        prefix: Prefix of the file names.
        force: Replace existing traces.
        progress: Called with the number of finished ranks.

    Raises:
        PlanError: Such traces exist already.
        RunError: The traces cannot be written.
        UnsupportedError: protobuf is not installed.
    """
    message_classes()  # before existing traces are removed
    with naming_file(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder, prefix, force=force)
    nbytes = 0
    for rank in range(export.plan.world_size):
        with replacing(folder / f"{prefix}.{rank}.et") as part, part.open("wb") as file:
            nbytes += write_trace(file, export.messages(rank))
        if progress:
            progress(rank + 1)
    with replacing(folder / f"{prefix}.json") as part:
        part.write_text(json.dumps(export.groups.document()) + "\n", encoding="utf-8")
    return nbytes


def _clear(folder: Path, prefix: str, *, force: bool) -> None:
    """Remove the traces of another export: if it had more ranks, they would count as ranks of this one."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+\.et(\.gz)?|json)")
    there = sorted(file for file in folder.iterdir() if pattern.fullmatch(file.name))
    if there and not force:
        raise PlanError(
            f"{there[0]}: is there already, with {len(there) - 1} more; choose another folder with --chakra, or "
            f"replace them with --force"
        )
    for file in there:
        file.unlink()
