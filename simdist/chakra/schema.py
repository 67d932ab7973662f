"""The messages of a Chakra execution trace: a head, then nodes, each with attributes.

The classes of the messages are made from `SCHEMA` when they are first needed, by the library protobuf (extra `chakra`).

>>> node = message_classes().node(id=7, name="forward", type=NodeType.COMP, data_deps=[3])
>>> add_attribute(node, "is_cpu_op", "bool", False)
>>> find(node, "is_cpu_op"), find(node, "num_ops")
(False, None)

Source:
    Sridharan et al., Chakra: Advancing Performance Benchmarking and Co-design using Standardized Execution Traces,
    arXiv 2305.14516; schema ChakraProtoMsg 1.0.0, github.com/mlcommons/chakra (et_def.proto), wire-equal to 0.0.4.
"""

from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from simdist.errors import UnsupportedError

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
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
_VALUES = tuple(field for kind in _SCALARS for field in (f"{kind} {kind}_val", f"{kind}_values {kind}_list"))

#: Message -> its fields, which are numbered from 1: type and name, an asterisk after the type of a repeated field.
SCHEMA: dict[str, tuple[str, ...]] = {
    **{f"{kind}_values": (f"{kind}* values",) for kind in _SCALARS},
    "AttributeProto": ("string name", "string doc_string", *_VALUES),  # at most one of its values is set
    "IOInfo": ("string values", "string shapes", "string types"),
    "GlobalMetadata": ("string version", "AttributeProto* attr"),
    "Node": (
        *("uint64 id", "string name", "int32 type", "uint64* ctrl_deps", "uint64* data_deps"),
        *("uint64 start_time_micros", "uint64 duration_micros", "IOInfo inputs", "IOInfo outputs"),
        "AttributeProto* attr",
    ),
}

AttributeValue: TypeAlias = bool | int | float | str | bytes


class MessageClasses(NamedTuple):
    """The classes of what a trace consists of."""

    head: "type[Message]"
    node: "type[Message]"


@cache
def message_classes() -> MessageClasses:
    """Return the classes that protobuf makes of `SCHEMA`.

    Raises:
        UnsupportedError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise UnsupportedError("Chakra traces need protobuf, which is not installed: pip install protobuf") from None
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in SCHEMA.items():
        made = file.message_type.add(name=message)
        for number, (kind, name) in enumerate(map(str.split, fields), 1):
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            field = made.field.add(name=name, number=number, label=label)
            kind = kind.removesuffix("*")
            if kind in _SCALARS:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
            else:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            if name.endswith(("_val", "_list")):
                field.oneof_index = 0
    next(each for each in file.message_type if each.name == "AttributeProto").oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = (f"{_PACKAGE}.GlobalMetadata", f"{_PACKAGE}.Node")
    return MessageClasses(*(message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names))


def add_attribute(message: "Message", name: str, kind: str, value: AttributeValue) -> None:
    """Add a named value of a type such as `int64` to a head or a node."""
    message.attr.add(name=name, **{f"{kind}_val": value})


def find(message: "Message", name: str) -> AttributeValue | tuple[AttributeValue, ...] | None:
    """Return the value of an attribute; None if there is none of that name, or it has no value."""
    return next((_value(each) for each in message.attr if each.name == name), None)


def _value(attribute: "Message") -> AttributeValue | tuple[AttributeValue, ...] | None:
    field = attribute.WhichOneof("value")
    if not field:
        return None
    value = getattr(attribute, field)
    return tuple(value.values) if field.endswith("_list") else value
