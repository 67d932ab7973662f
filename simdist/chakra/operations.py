"""Description of an operation for consumers of execution traces: the type of its node, and its attributes.

`comm_size` is what its consumers take it for: the whole buffer, but of an all-gather the part of one rank. A sparse
buffer is an all-gather of its values and indices, `k * (4 + 4)` bytes a rank: traces know no other sparse payload.
`tensor_size` is the bytes of the buffers that an operation reads and writes; activations are no buffers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from simdist.chakra.schema import CollectiveType, NodeType, add_attribute, message_classes
from simdist.plan import COLLECTIVES, Buffer, Collective, Op, Plan, op_text, ops, reads, writes
from simdist.plan.group import Group
from simdist.plan.text import op_name
from simdist.scenario import Workload

if TYPE_CHECKING:
    from google.protobuf.message import Message

#: Name of the process group of all ranks in traces.
WORLD = "0"
_MAX_INT64 = 2**63 - 1
_COLLECTIVES: dict[type[Collective], CollectiveType] = {
    ops.AllReduce: CollectiveType.ALL_REDUCE,
    ops.ReduceScatter: CollectiveType.REDUCE_SCATTER,
    ops.AllGather: CollectiveType.ALL_GATHER,
    ops.Reduce: CollectiveType.REDUCE,
    ops.Broadcast: CollectiveType.BROADCAST,
}
#: All other operations that are no collectives of several ranks are `COMP`.
_MEMORY_NODES: dict[type[Op], NodeType] = {
    ops.Load: NodeType.MEM_LOAD,
    ops.StageIn: NodeType.MEM_LOAD,
    ops.Save: NodeType.MEM_STORE,
}


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups of a plan: 0 is the world, and every other group has a number from 1.

    Args:
        world_size: Ranks.
        first: Number of the first group of each partition of the ranks that is neither the world nor single ranks.
    """

    world_size: int
    first: dict[Group, int]

    @classmethod
    def of(cls, plan: Plan) -> "ProcessGroups":
        """Return the groups of a plan, in the order in which its bodies use them."""
        used = dict.fromkeys(op.group for body in plan.bodies for op in body if isinstance(op, COLLECTIVES))
        first, number = {}, 1
        for group in used:
            if 1 < group.size < plan.world_size:
                first[group] = number
                number += plan.world_size // group.size
        return cls(plan.world_size, first)

    def place(self, group: Group, rank: int) -> int:
        """Return which of the groups of a partition a rank belongs to, as in `Group.members`.

        >>> ProcessGroups(8, {}).place(Group(2, stride=4), rank=7)
        3
        """
        return rank // (group.size * group.stride) * group.stride + rank % group.stride

    def name(self, group: Group, rank: int) -> str:
        """Return what traces call the group of a rank."""
        return str(self.first[group] + self.place(group, rank)) if group in self.first else WORLD

    def document(self) -> dict[str, list[int]]:
        """Return the ranks of every group but the world, by name: the file that simulators take beside the traces."""
        return {
            str(first + n): ranks
            for group, first in self.first.items()
            for n, ranks in enumerate(group.members(self.world_size))
        }


class NodeTemplates:
    """Makes nodes that say of an operation what is the same in every step."""

    def __init__(self, plan: Plan, workload: Workload, groups: ProcessGroups) -> None:
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._groups = groups
        self._flops = _flops_before(workload)

    def make(self, op: Op, rank: int) -> "Message":
        """Return a node with the name, the type and the attributes of an operation on a rank."""
        node = message_classes().node(name=op_text(op), type=_node_type(op))
        add_attribute(node, "is_cpu_op", "bool", isinstance(op, ops.Delay) and op.channel != "compute")
        if _communicates(op):
            self._add_communication(node, op, rank)
        else:
            self._add_work(node, op)
        add_attribute(node, "simdist_op", "string", op_name(op))
        return node

    def _add_communication(self, node: "Message", op: Collective, rank: int) -> None:
        add_attribute(node, "comm_type", "int64", _COLLECTIVES[type(op)])
        add_attribute(node, "comm_size", "int64", self._buffers[_sent_buffer(op)].nbytes)
        add_attribute(node, "pg_name", "string", self._groups.name(op.group, rank))
        if isinstance(op, ops.Reduce | ops.Broadcast):
            offset = rank % (op.group.size * op.group.stride) // op.group.stride  # of the rank among its group
            add_attribute(node, "simdist_root", "int64", rank + (op.root - offset) * op.group.stride)

    def _add_work(self, node: "Message", op: Op) -> None:
        match op:
            case ops.Forward():
                flops = sum(self._flops_of(self._buffers[name]) for name in op.srcs)
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
        """Return the forward FLOPs of the tensors of a buffer, of a whole batch."""
        first, last = buffer.tensors or (0, 0)
        return self._flops[last] - self._flops[first]


def cautions(plan: Plan) -> list[str]:
    """Return what consumers of a plan's traces will not see, or may not take, a sentence each."""
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


def _flops_before(workload: Workload) -> list[float]:
    """Return the forward FLOPs of a batch before each tensor, and of all."""
    before = [0.0]
    for tensor in workload.tensors:
        before.append(before[-1] + tensor.flops * workload.batch_size)
    return before


def _communicates(op: Op) -> TypeGuard[Collective]:
    """Tell whether an operation is a collective, and of more than one rank."""
    return isinstance(op, COLLECTIVES) and op.group.size > 1


def _sent_buffer(op: Collective) -> str:
    """Return the buffer whose bytes are the `comm_size` of a collective."""
    return op.src if isinstance(op, ops.ReduceScatter | ops.AllGather) else op.buffer


def _node_type(op: Op) -> NodeType:
    return NodeType.COMM_COLL if _communicates(op) else _MEMORY_NODES.get(type(op), NodeType.COMP)
