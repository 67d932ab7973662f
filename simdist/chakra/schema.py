"""The messages of a Chakra execution trace: a head, then nodes, each with attributes.

How they are written is in `simdist.chakra.messages`.

>>> node = Node(7, "forward", NodeType.COMP, data_deps=(3,), attributes=(Attribute("is_cpu_op", "bool", False),))
>>> node.find("is_cpu_op"), node.find("num_ops")
(False, None)

Source:
    Sridharan et al., Chakra: Advancing Performance Benchmarking and Co-design using Standardized Execution Traces,
    arXiv 2305.14516; schema ChakraProtoMsg 1.0.0, github.com/mlcommons/chakra (et_def.proto), wire-equal to 0.0.4.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeAlias


class NodeType(IntEnum):
    """What a node does."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CollectiveType(IntEnum):
    """What a collective does: the attribute `comm_type` of a node."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


Kind: TypeAlias = Literal[
    "double",
    "float",
    "int32",
    "int64",
    "uint32",
    "uint64",
    "sint32",
    "sint64",
    "fixed32",
    "fixed64",
    "sfixed32",
    "sfixed64",
    "bool",
    "string",
    "bytes",
]
Scalar: TypeAlias = bool | int | float | str | bytes


@dataclass(frozen=True, slots=True)
class Attribute:
    """A named value.

    Args:
        name: What it is called.
        kind: Its type.
        value: One value, or a tuple of values for a list; None if the trace gives none.
        doc: A description.
    """

    name: str
    kind: Kind
    value: Scalar | tuple[Scalar, ...] | None
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Io:
    """Describes the inputs or the outputs of a node, as text."""

    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The head of a trace.

    Args:
        version: Of the schema. A head without one is of length 0, which readers take for the end of the trace.
        attributes: Further facts.
    """

    version: str
    attributes: tuple[Attribute, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of one rank.

    Args:
        id: Unique in the trace.
        name: For people.
        type: A `NodeType`, or a number that it does not have.
        ctrl_deps: Nodes that this one was called from.
        data_deps: Nodes that must be done before this one starts.
        start_us: When it started, microseconds.
        duration_us: How long it took, microseconds.
        inputs: What went in.
        outputs: What came out.
        attributes: Further facts.
    """

    id: int
    name: str
    type: int
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    start_us: int = 0
    duration_us: int = 0
    inputs: Io = Io()
    outputs: Io = Io()
    attributes: tuple[Attribute, ...] = ()

    def find(self, name: str) -> Scalar | tuple[Scalar, ...] | None:
        """Return the value of an attribute, or None if there is none of that name."""
        return next((attribute.value for attribute in self.attributes if attribute.name == name), None)
