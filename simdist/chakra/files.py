"""Files of execution traces: one per rank, `PREFIX.<rank>.et`, messages that follow one another, each after its length.

The first message is the head, the others are nodes. There is no mark at the beginning and none at the end. A file may
be compressed with gzip, which readers in Python take, and simulators mostly do not. Beside the traces of a job may lie
`PREFIX.json` with its process groups.

Head and nodes have attributes. The classes of the messages are made from `SCHEMA` when they are first needed, by the
library protobuf (extra `chakra`).

>>> node = message_classes().node(id=7, name="forward", type=NodeType.COMP, data_deps=[3])
>>> add_attribute(node, "is_cpu_op", "bool", False)
>>> find(node, "is_cpu_op"), find(node, "num_ops")
(False, None)

Source:
    Sridharan et al., Chakra: Advancing Performance Benchmarking and Co-design using Standardized Execution Traces,
    arXiv 2305.14516; schema ChakraProtoMsg 1.0.0, github.com/mlcommons/chakra (et_def.proto), wire-equal to 0.0.4.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING

from simdist.errors import ScenarioError, TraceError
from simdist.files import open_unpacked, read_content
from simdist.settings.base import shown

if TYPE_CHECKING:
    from google.protobuf.message import Message
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


MAX_MESSAGE_NBYTES = 64 * 1024**2  # nodes take hundreds of bytes, some thousands; a damaged length may say gigabytes
_MAX_LENGTH_NBYTES = 5  # a varint of 32 bits

#: A head that is as long as the code of a bracket begins with it, too, but no name and colon follow.
_JSON = re.compile(rb'\s*(\[\s*)?\{\s*("[^"]{,80}"\s*:|\})')
_TO_ET = "and `chakra_converter PyTorch` makes the .et file of the result"
_JSON_KINDS = (  # what stands near the beginning, and gives the kind away
    (
        re.compile(rb'"(traceEvents|schemaVersion|deviceProperties|ph)"'),
        f"a profiler trace, as Kineto writes it, no Chakra trace: `simdist import` reads it as it is; for Chakra, "
        f"`chakra_trace_link` joins it with the execution trace of the host, {_TO_ET}",
    ),
    (
        re.compile(rb'"(nodes|ctrl_deps)"'),
        f"an execution trace of PyTorch in JSON: `chakra_trace_link` joins that of a host with its profiler trace, "
        f"{_TO_ET}",
    ),
    (
        re.compile(rb'\}\s*\{\s*"(id|name)"'),
        "a Chakra trace that `chakra_jsonizer` turned into JSON, and no tool of Chakra turns back: import the .et file "
        "that it was made of",
    ),
    (re.compile(b""), "JSON, no Chakra trace: import .et files of `chakra_converter` or `simdist chakra export`"),
)


def write_trace(file: IO[bytes], messages: "Iterable[Message]") -> int:
    """Write a head and the nodes behind it; return their size in bytes."""
    contents = (message.SerializeToString() for message in messages)
    return sum(file.write(_varint(len(content)) + content) for content in contents)


def _varint(number: int) -> bytes:
    """Return a number in seven bits a byte, the lowest first; all bytes but its last have the high bit set."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def read_trace(path: Path) -> "Iterator[Message]":
    """Yield the head of a trace, then its nodes; one of them is in memory at a time.

    Args:
        path: The file, plain or compressed with gzip.

    Raises:
        TraceError: It cannot be read or is damaged; names the byte, which of a compressed file is one of its contents.
        UnsupportedError: protobuf is not installed.
    """
    classes = message_classes()
    try:
        with open_unpacked(path) as file:
            _refuse_json(path, file.peek(1))
            messages = _messages(path, file)
            yield _parsed(path, *next(messages), classes.head)
            for at, message in messages:
                yield _parsed(path, at, message, classes.node)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: its compression is damaged: {error}: write or copy it again") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


def _refuse_json(path: Path, start: bytes) -> None:
    if _JSON.match(start):
        kind = next(kind for sign, kind in _JSON_KINDS if sign.search(start))
        raise TraceError(f"{path}: is {kind}")


def _messages(path: Path, file: BufferedReader | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """Yield where each message begins, and its bytes. The first may be empty: a head without a version."""
    at, is_first = 0, True
    while (length := _read_length(path, file, at)) is not None:
        nbytes, at = length
        if not nbytes and not is_first and file.read(1):
            raise TraceError(f"{path}: byte {at}: a message of length 0, which ends a trace, and more behind it")
        if nbytes > MAX_MESSAGE_NBYTES:
            raise TraceError(
                f"{path}: byte {at}: a message of {nbytes:,} bytes, when a node has some hundreds: it is damaged, or "
                f"no Chakra trace; write an .et file of `chakra_converter` or `simdist chakra export`"
            )
        message = file.read(nbytes)
        if len(message) < nbytes:
            raise TraceError(
                f"{path}: byte {at}: ends {nbytes - len(message):,} bytes before the end of a message: it is cut "
                f"off, or no Chakra trace"
            )
        if nbytes or is_first:
            yield at, message
        at, is_first = at + nbytes, False
    if is_first:
        raise TraceError(f"{path}: is empty: a Chakra trace begins with its version")


def _read_length(path: Path, file: BufferedReader | gzip.GzipFile, at: int) -> tuple[int, int] | None:
    """Return the length that stands at byte `at`, and where its message begins; None at the end of the file."""
    length = 0
    for n in range(_MAX_LENGTH_NBYTES):
        byte = file.read(1)
        if not byte and n:
            raise TraceError(f"{path}: byte {at}: ends in the middle of a message's length: write or copy it again")
        if not byte:
            return None
        length |= (byte[0] & 0x7F) << 7 * n
        if byte[0] < 0x80:
            return length, at + n + 1
    raise TraceError(f"{path}: byte {at}: a length of more than {_MAX_LENGTH_NBYTES} bytes: it is no Chakra trace")


def _parsed(path: Path, at: int, data: bytes, kind: "type[Message]") -> "Message":
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    message = kind()
    where = f"{path}: byte {at}: the {'head' if kind is message_classes().head else 'node'} that begins here"
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise TraceError(f"{where} is no message: it is damaged, or no Chakra trace") from None
    for field in UnknownFieldSet(message):  # of another type than the schema's; what it does not have is skipped
        if field.field_number in message.DESCRIPTOR.fields_by_number:
            raise TraceError(
                f"{where} has wire type {field.wire_type} in field {field.field_number}: it is damaged, or no Chakra "
                f"trace"
            )
    return message


def find_traces(names: Sequence[Path]) -> list[Path]:
    """Return the traces that are meant: files, all of a folder, or all that begin with `PREFIX.`.

    Raises:
        ScenarioError: There are none, or a folder holds those of several exports.
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
        return others[:1]  # to read it says what it is instead
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
    """Return the process groups of `PREFIX.json` beside a trace, if there is such a file.

    Raises:
        TraceError: It holds something else.
    """
    file = path.with_name(f"{prefix_of(path)}.json")
    if not file.exists():
        return {}
    try:
        document = json.loads(read_content(file))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(
            f"{file}: cannot be read as process groups: {error}: write it again, or move it away"
        ) from None
    if not isinstance(document, dict):
        raise TraceError(f'{file}: {shown(document)} are no process groups: write e.g. {{"1": [0, 1, 2, 3]}}')
    for name, ranks in document.items():
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise TraceError(f'{file}: group {name}: {shown(ranks)} is no list of ranks: write e.g. "{name}": [0, 1]')
    return {name: tuple(ranks) for name, ranks in document.items()}
