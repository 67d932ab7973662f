"""Messages of Chakra execution traces: a head, then nodes, each after its length.

The file has no mark at its beginning or end. Head and nodes have attributes. The library protobuf (extra `chakra`)
makes the classes of the messages from `_SCHEMA` when they are first needed.

>>> node = message_classes().node(id=7, name="forward", type=NodeType.COMP, data_deps=[3])
>>> add_attribute(node, "num_ops", "int64", 12)
>>> node.attr[0].int64_val
12

Source:
    Sridharan et al., Chakra: Advancing Performance Benchmarking and Co-design using Standardized Execution Traces,
    arXiv 2305.14516; schema ChakraProtoMsg 1.0.0, github.com/mlcommons/chakra (et_def.proto), wire-equal to 0.0.4.
"""

from collections.abc import Iterable
from enum import IntEnum
from functools import cache
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

from simdist.errors import require

if TYPE_CHECKING:
    from google.protobuf.message import Message


class NodeType(IntEnum):
    """Type of a node."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CollectiveType(IntEnum):
    """Type of a collective: the attribute `comm_type` of a node."""

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


_PACKAGE = "ChakraProtoMsg"
_SCALARS = (
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
)
_VALUES = tuple(field for kind in _SCALARS for field in (f"{kind} {kind}_val", f"{kind}_values {kind}_list"))

#: Message -> its fields, numbered from 1: type and name, with an asterisk after the type of a repeated field.
_SCHEMA: dict[str, tuple[str, ...]] = {
    **{f"{kind}_values": (f"{kind}* values",) for kind in _SCALARS},
    "AttributeProto": ("string name", "string doc_string", *_VALUES),  # at most one of its values is set
    "IOInfo": ("string values", "string shapes", "string types"),
    "GlobalMetadata": ("string version", "AttributeProto* attr"),
    "Node": (
        "uint64 id",
        "string name",
        "int32 type",
        "uint64* ctrl_deps",
        "uint64* data_deps",
        "uint64 start_time_micros",
        "uint64 duration_micros",
        "IOInfo inputs",
        "IOInfo outputs",
        "AttributeProto* attr",
    ),
}

_AttributeValue: TypeAlias = bool | int | float | str | bytes


class MessageClasses(NamedTuple):
    """The classes of a trace's messages."""

    head: "type[Message]"
    node: "type[Message]"


@cache
def message_classes() -> MessageClasses:
    """Return the classes that protobuf makes from `_SCHEMA`.

    Raises:
        UnsupportedError: protobuf is not installed.
    """
    require("google.protobuf", extra="chakra", what="a Chakra trace")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in _SCHEMA.items():
        made = file.message_type.add(name=message)
        for number, (kind, name) in enumerate(map(str.split, fields), 1):
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            field = made.field.add(name=name, number=number, label=label)
            kind = kind.removesuffix("*")
            if kind in _SCALARS:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
            else:
                field.type = kinds.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
            if name.endswith(("_val", "_list")):
                field.oneof_index = 0
    next(each for each in file.message_type if each.name == "AttributeProto").oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = (f"{_PACKAGE}.GlobalMetadata", f"{_PACKAGE}.Node")
    return MessageClasses(*(message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names))


def add_attribute(message: "Message", name: str, kind: str, value: _AttributeValue) -> None:
    """Add a named value of a type such as `int64` to a head or a node."""
    message.attr.add(name=name, **{f"{kind}_val": value})


def write_trace(file: IO[bytes], messages: "Iterable[Message]") -> int:
    """Write a head and its nodes; return their size in bytes."""
    from google.protobuf.proto import serialize_length_prefixed

    for message in messages:
        serialize_length_prefixed(message, file)
    return file.tell()
