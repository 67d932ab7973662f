"""What consumers of execution traces are told of an operation: the type of its node, and its attributes.

`comm_size` is what its consumers take it for: the whole buffer, but of an all-gather the part of one rank. A sparse
buffer is an all-gather of its values and indices, `k * (4 + 4)` bytes a rank: traces know no other sparse payload.
`tensor_size` is the bytes of the buffers that an operation reads and writes; activations are no buffers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard, assert_never

from simdist.chakra.groups import Groups
from simdist.chakra.schema import Attribute, CollectiveType, NodeType
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Buffer,
    Collective,
    Copy,
    Delay,
    Densify,
    Forward,
    Load,
    Merge,
    Op,
    Optimize,
    Pack,
    Plan,
    Reduce,
    ReduceScatter,
    Save,
    Select,
    StageIn,
    Tick,
    TrustRatios,
    Unpack,
    Wait,
    op_text,
    reads,
    writes,
)
from simdist.plan.text import op_name
from simdist.scenario import Workload

_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Described:
    """What the node of an operation says in every step.

    Args:
        name: The operation as a line of text.
        type: Of the node.
        attributes: All but those that differ from step to step.
    """

    name: str
    type: NodeType
    attributes: tuple[Attribute, ...]


class Describing:
    """Describes the operations of a plan."""

    def __init__(self, plan: Plan, workload: Workload, groups: Groups) -> None:
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._groups = groups
        self._flops = _flops_before(workload)

    def of(self, op: Op, rank: int) -> Described:
        """Return what the node of an operation says on a rank."""
        is_on_host = isinstance(op, Delay) and op.channel != "compute"
        return Described(
            op_text(op),
            _node_type(op),
            (
                Attribute("is_cpu_op", "bool", is_on_host),
                *(self._communication(op, rank) if _communicates(op) else self._work(op)),
                Attribute("simdist_op", "string", op_name(op)),
            ),
        )

    def _communication(self, op: Collective, rank: int) -> Iterator[Attribute]:
        yield Attribute("comm_type", "int64", int(_collective_type(op)))
        yield Attribute("comm_size", "int64", self._buffers[_sent(op)].nbytes)
        yield Attribute("pg_name", "string", self._groups.name(op.group, rank))
        if isinstance(op, Reduce | Broadcast):
            root = self._groups.members(op.group, rank)[op.root]
            yield Attribute("simdist_root", "int64", root)

    def _work(self, op: Op) -> Iterator[Attribute]:
        match op:
            case Forward():
                flops = sum(self._flops_of(self._buffers[name]) for name in op.srcs)
            case Backward():
                flops = 2 * self._flops_of(self._buffers[op.dst])
            case _:
                flops = 0.0
        if 1 <= flops <= _MAX_INT64:
            yield Attribute("num_ops", "int64", round(flops))
        nbytes = sum(self._buffers[name].nbytes for name in dict.fromkeys(reads(op) + writes(op)))
        if nbytes:
            yield Attribute("tensor_size", "uint64", nbytes)

    def _flops_of(self, buffer: Buffer) -> float:
        """Return the forward FLOPs of the tensors of a buffer, of a whole batch."""
        first, last = buffer.tensors or (0, 0)
        return self._flops[last] - self._flops[first]


def cautions(plan: Plan) -> list[str]:
    """Return what consumers of a plan's traces will not see, or may not take, a sentence each."""
    ops = {op for body in plan.bodies for op in body}
    found = []
    if any(isinstance(op, Reduce | Broadcast) for op in ops):
        found.append("it has reduce or broadcast, which some simulators refuse or take for free")
    if any(isinstance(op, Tick) for op in ops):
        found.append("ticks of a clock have no node: what waits for one does not wait in the traces")
    if any(isinstance(op, AllReduce) and op.servers for op in ops):
        found.append("parameter servers have no node: all-reduces through them stand as all-reduces")
    if any(isinstance(op, Load | StageIn | Save) for op in ops):
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


def _sent(op: Collective) -> str:
    """Return the buffer whose bytes are a collective's `comm_size`."""
    match op:
        case AllReduce() | Reduce() | Broadcast():
            return op.buffer
        case ReduceScatter() | AllGather():
            return op.src
        case _:
            assert_never(op)


def _collective_type(op: Collective) -> CollectiveType:
    match op:
        case AllReduce():
            return CollectiveType.ALL_REDUCE
        case ReduceScatter():
            return CollectiveType.REDUCE_SCATTER
        case AllGather():
            return CollectiveType.ALL_GATHER
        case Reduce():
            return CollectiveType.REDUCE
        case Broadcast():
            return CollectiveType.BROADCAST
        case _:
            assert_never(op)


def _node_type(op: Op) -> NodeType:
    match op:
        case AllReduce() | ReduceScatter() | AllGather() | Reduce() | Broadcast():
            return NodeType.COMM_COLL if op.group.size > 1 else NodeType.COMP
        case Load() | StageIn():
            return NodeType.MEM_LOAD
        case Save():
            return NodeType.MEM_STORE
        case Forward() | Backward() | Optimize() | TrustRatios() | Copy() | Pack() | Unpack():
            return NodeType.COMP
        case Select() | Merge() | Densify() | Delay() | Wait() | Tick():
            return NodeType.COMP
        case _:
            assert_never(op)
