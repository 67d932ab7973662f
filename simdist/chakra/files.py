"""Files of execution traces: one per rank, `PREFIX.<rank>.et`, a sequence of messages, each after its length.

The first message is the head, the others are nodes. The file has no mark at its beginning or end. It may be compressed
with gzip, which readers in Python accept but most simulators do not. The folder of a job's traces may contain
`PREFIX.json` with its process groups.

Head and nodes have attributes. The library protobuf (extra `chakra`) makes the classes of the messages from `SCHEMA`
when they are first needed.

>>> node = message_classes().node(id=7, name="forward", type=NodeType.COMP, data_deps=[3])
>>> add_attribute(node, "is_cpu_op", "bool", False)
>>> find(node, "is_cpu_op"), find(node, "num_ops")
(False, None)

Source:
    Sridharan et al., Chakra: Advancing Performance Benchmarking and Co-design using Standardized Execution Traces,
    arXiv 2305.14516; schema ChakraProtoMsg 1.0.0, github.com/mlcommons/chakra (et_def.proto), wire-equal to 0.0.4.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

from pydantic import TypeAdapter

from simdist.errors import ScenarioError, TraceError, require
from simdist.files import open_unpacked, read_content

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


_LENGTH_NBYTES = 10  # of a varint, at most
_MOST_MESSAGE_NBYTES = 64 << 20
_MOST_NEEDLESS = 1000  # messages that are empty, or have the number of another one
_N_RECENT = 65_536  # numbers; more messages than fit into the window of gzip, by which they may repeat
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
SCHEMA: dict[str, tuple[str, ...]] = {
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

AttributeValue: TypeAlias = bool | int | float | str | bytes


class MessageClasses(NamedTuple):
    """The classes of a trace's messages."""

    head: "type[Message]"
    node: "type[Message]"


@cache
def message_classes() -> MessageClasses:
    """Return the classes that protobuf makes from `SCHEMA`.

    Raises:
        UnsupportedError: protobuf is not installed.
    """
    require("google.protobuf", extra="chakra", what="a Chakra trace")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
                field.type = kinds.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
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
    """Return the value of an attribute; None if the attribute or its value is missing."""
    return next((_value(each) for each in message.attr if each.name == name), None)


def _value(attribute: "Message") -> AttributeValue | tuple[AttributeValue, ...] | None:
    field = attribute.WhichOneof("value")
    if not field:
        return None
    value = getattr(attribute, field)
    return tuple(value.values) if field.endswith("_list") else value


#: If the length of a head equals the code of a bracket, the file also begins like JSON, but without a name and colon.
_JSON = re.compile(rb'\s*(\[\s*)?\{\s*("[^"]{,80}"\s*:|\})')


def write_trace(file: IO[bytes], messages: "Iterable[Message]") -> int:
    """Write a head and its nodes; return their size in bytes."""
    from google.protobuf.proto import serialize_length_prefixed

    for message in messages:
        serialize_length_prefixed(message, file)
    return file.tell()


def read_trace(path: Path) -> "Iterator[Message]":
    """Yield the head of a trace, then its nodes, with one message in memory at a time.

    Args:
        path: The file, plain or compressed with gzip.

    Raises:
        TraceError: The file cannot be read or is damaged. The message names the byte, in the contents of a compressed
            file.
        UnsupportedError: protobuf is not installed.
    """
    classes = message_classes()
    try:
        with open_unpacked(path) as file:
            if _JSON.match(file.peek(1)):
                raise TraceError(
                    f"{path}: is JSON, no Chakra trace: import .et files of `chakra_converter` or `simdist chakra "
                    f"export`; profiler traces (Kineto) are for `simdist import`"
                )
            head = _next(path, file, classes.head)
            if head is None:
                raise TraceError(f"{path}: is empty: a Chakra trace begins with its version")
            yield head
            yield from _nodes(path, file, classes.node)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: its compression is damaged: {error}: write or copy it again") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


def _nodes(path: Path, file: BufferedReader | gzip.GzipFile, kind: "type[Message]") -> "Iterator[Message]":
    """Yield the nodes of a trace but empty ones, with which some writers end.

    A few bytes of gzip may unpack to many million messages, all alike. So messages that tell nothing new are counted.
    """
    recent: set[int] = set()
    n_needless = 0
    while (node := _next(path, file, kind)) is not None:
        is_empty = node.ByteSize() == 0
        if is_empty or node.id in recent:
            n_needless += 1
        if n_needless > _MOST_NEEDLESS:
            what = "empty or have the number of another node"
            raise TraceError(
                f"{path}: byte {file.tell()}: more than {_MOST_NEEDLESS:,} nodes are {what}: it is damaged"
            )
        if is_empty:
            continue
        yield node
        if len(recent) == _N_RECENT:
            recent.clear()
        recent.add(node.id)


def _next(path: Path, file: BufferedReader | gzip.GzipFile, kind: "type[Message]") -> "Message | None":
    """Return the next message; None at the end of the file."""
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    at = file.tell()
    message = kind()
    try:
        content = _content(file)
        if content is None:
            return None
        message.ParseFromString(content)
    except (DecodeError, ValueError):
        is_whole = False
    else:  # a field with a type other than the schema's is damage; fields outside the schema are skipped
        known = kind.DESCRIPTOR.fields_by_number
        is_whole = not any(each.field_number in known for each in UnknownFieldSet(message))
    if not is_whole:
        what = "head" if kind is message_classes().head else "node"
        raise TraceError(f"{path}: byte {at}: no {what} begins here: it is damaged, cut off, or no Chakra trace")
    return message


def _content(file: BufferedReader | gzip.GzipFile) -> bytes | None:
    """Return the bytes of the message that follows its length; None at the end of the file; ValueError for damage."""
    nbytes = 0
    for place in range(_LENGTH_NBYTES):
        byte = file.read(1)
        if not byte:
            if place == 0:
                return None
            raise ValueError("the file ends within a length")
        nbytes |= (byte[0] & 0x7F) << (7 * place)
        if byte[0] < 0x80:
            break
    else:
        raise ValueError("a length does not end")
    content = file.read(nbytes) if nbytes <= _MOST_MESSAGE_NBYTES else b""
    if len(content) < nbytes:
        raise ValueError("the message is cut off, or too long")
    return content


def find_traces(names: Sequence[Path]) -> list[Path]:
    """Return the chosen traces: files, all traces of a folder, or all that begin with `PREFIX.`.

    Raises:
        ScenarioError: There are no traces, or a folder contains traces of several exports.
    """
    return [path for name in names for path in _found(name)]


def _found(name: Path) -> list[Path]:
    if name.is_file():
        return [name]
    folder, prefix = (name, "") if name.is_dir() else (name.parent, name.name + ".")
    files = [file for file in folder.glob("*") if file.name.startswith(prefix)] if folder.is_dir() else []
    traces = sorted(file for file in files if file.name.endswith((".et", ".et.gz")))
    others = sorted(file for file in files if file.name.endswith((".json", ".json.gz")))
    if not traces and others:
        return others[:1]  # reading it reports what it is instead
    if not traces:
        raise ScenarioError(
            f"{name}: there are no Chakra traces: write a folder, PREFIX for the files PREFIX.0.et, PREFIX.1.et, ..., "
            f"or the files themselves"
        )
    prefixes = sorted({prefix_of(file) for file in traces})
    if len(prefixes) > 1:
        names = ", ".join(str(folder / each) for each in prefixes)
        raise ScenarioError(f"{name}: holds traces of several jobs; name one of {names}")
    return traces


def prefix_of(path: Path) -> str:
    """Return the part of a trace's name before the rank."""
    return path.name.removesuffix(".gz").removesuffix(".et").rsplit(".", 1)[0]


def groups_beside(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the process groups of `PREFIX.json` next to a trace, if there is such a file.

    Raises:
        TraceError: The file contains something else.
    """
    file = path.with_name(f"{prefix_of(path)}.json")
    if not file.exists():
        return {}
    try:
        return TypeAdapter(dict[str, tuple[int, ...]]).validate_json(read_content(file), strict=True)
    except (OSError, ValueError):
        raise TraceError(
            f'{file}: cannot be read as process groups: write e.g. {{"1": [0, 1, 2, 3]}}, or move it away'
        ) from None
