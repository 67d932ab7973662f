"""The messages of an execution trace as bytes, and back.

The numbers of the fields are those of the schema. Fields that it does not have are skipped, as in every reader of
protocol buffers; a field of another wire type than the schema's is damage.

>>> from simdist.chakra.schema import NodeType
>>> node = Node(7, "forward", NodeType.COMP, data_deps=(3,), attributes=(Attribute("is_cpu_op", "bool", False),))
>>> decode_node(encode_node(node)) == node
True
"""

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import get_args

from simdist.chakra.schema import Attribute, Io, Kind, Metadata, Node, Scalar
from simdist.chakra.wire import I32, I64, LEN, VARINT, DamageError, Field, encoded, fields, packed, varint

_KINDS: tuple[Kind, ...] = get_args(Kind)
_NOTHING = Io()
_FIRST_VALUE = 3  # the n-th kind is field 3 + 2 n of an attribute, a list of it the field after that
_FORMATS: dict[Kind, str] = {
    "double": "<d",
    "float": "<f",
    "fixed32": "<I",
    "fixed64": "<Q",
    "sfixed32": "<i",
    "sfixed64": "<q",
}


def encode_metadata(metadata: Metadata) -> bytes:
    """Return the message."""
    return b"".join([*_text(1, metadata.version), *_attributes(2, metadata.attributes)])


def encode_node(node: Node) -> bytes:
    """Return the message; as in proto3, fields that are 0 or empty are left out."""
    return b"".join(
        [
            *_number(1, node.id),
            *_text(2, node.name),
            *_number(3, node.type),
            *_ids(4, node.ctrl_deps),
            *_ids(5, node.data_deps),
            *_number(6, node.start_us),
            *_number(7, node.duration_us),
            *_io(8, node.inputs),
            *_io(9, node.outputs),
            *_attributes(10, node.attributes),
        ]
    )


def _number(number: int, value: int) -> tuple[bytes, ...]:
    return encoded(number, VARINT, value) if value else ()


def _text(number: int, value: str) -> tuple[bytes, ...]:
    return encoded(number, LEN, value.encode()) if value else ()


def _ids(number: int, values: tuple[int, ...]) -> tuple[bytes, ...]:
    return encoded(number, LEN, b"".join(map(varint, values))) if values else ()


def _io(number: int, io: Io) -> tuple[bytes, ...]:
    if io == _NOTHING:
        return ()
    content = b"".join([*_text(1, io.values), *_text(2, io.shapes), *_text(3, io.types)])
    return encoded(number, LEN, content)


def _attributes(number: int, attributes: tuple[Attribute, ...]) -> Iterator[bytes]:
    return (_attribute(number, attribute) for attribute in attributes)


@lru_cache(maxsize=4096)
def _attribute(number: int, attribute: Attribute) -> bytes:
    """Return a field with an attribute; a trace repeats most of them at many nodes."""
    head = [*_text(1, attribute.name), *_text(2, attribute.doc)]
    return b"".join(encoded(number, LEN, b"".join([*head, *_value(attribute)])))


def _value(attribute: Attribute) -> tuple[bytes, ...]:
    kind, number = attribute.kind, _FIRST_VALUE + 2 * _KINDS.index(attribute.kind)
    match attribute.value:
        case None:
            return ()
        case tuple() as values:
            return encoded(number + 1, LEN, _list(kind, values))
        case value:
            return encoded(number, _wire(kind), _payload(kind, value))


def _list(kind: Kind, values: tuple[Scalar, ...]) -> bytes:
    """Return the message of a list: numbers packed, texts one by one."""
    if _wire(kind) == LEN:
        return b"".join(part for value in values for part in encoded(1, LEN, _payload(kind, value)))
    payloads = (_payload(kind, value) for value in values)
    content = b"".join(varint(each) if isinstance(each, int) else each for each in payloads)
    return b"".join(encoded(1, LEN, content)) if values else b""


def _wire(kind: Kind) -> int:
    if kind in _FORMATS:
        return I64 if struct.calcsize(_FORMATS[kind]) == 8 else I32
    return LEN if kind in ("string", "bytes") else VARINT


def _payload(kind: Kind, value: Scalar) -> int | bytes:
    """Return what stands on the wire for a value: the number of a varint, or bytes."""
    match value:
        case str():
            return value.encode()
        case bytes():
            return value
        case int() | float() if kind in _FORMATS:
            return struct.pack(_FORMATS[kind], value)
        case _:
            number = int(value)
            return number << 1 ^ number >> 63 if kind in ("sint32", "sint64") else number


def decode_metadata(data: bytes) -> Metadata:
    """Read the head of a trace.

    Raises:
        DamageError: It is something else.
    """
    version, attributes = "", []
    for field in fields(data, 0, len(data)):
        match field.number:
            case 1:
                version = _read_text(data, field)
            case 2:
                attributes.append(_read_attribute(data, field))
    return Metadata(version, tuple(attributes))


def decode_node(data: bytes) -> Node:
    """Read a node.

    Raises:
        DamageError: It is something else.
    """
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    deps: dict[int, list[int]] = {4: [], 5: []}
    ios = {8: Io(), 9: Io()}
    name, attributes = "", []
    for field in fields(data, 0, len(data)):
        match field.number:
            case 1 | 3 | 6 | 7 as number:
                numbers[number] = _checked(field, VARINT).bits
            case 2:
                name = _read_text(data, field)
            case 4 | 5 as number:
                deps[number].extend(packed(data, field, VARINT))
            case 8 | 9 as number:
                ios[number] = _read_io(data, field)
            case 10:
                attributes.append(_read_attribute(data, field))
    return Node(
        numbers[1],
        name,
        numbers[3],
        tuple(deps[4]),
        tuple(deps[5]),
        numbers[6],
        numbers[7],
        ios[8],
        ios[9],
        tuple(attributes),
    )


def _checked(field: Field, wire: int) -> Field:
    if field.wire != wire:
        raise DamageError(field.start, f"field {field.number} is of wire type {field.wire}, not {wire}")
    return field


def _read_text(data: bytes, field: Field) -> str:
    try:
        return data[_checked(field, LEN).start : field.stop].decode()
    except UnicodeDecodeError as error:
        raise DamageError(field.start + error.start, f"field {field.number} is no UTF-8 text") from None


def _read_io(data: bytes, field: Field) -> Io:
    _checked(field, LEN)
    texts = {1: "", 2: "", 3: ""}
    for part in fields(data, field.start, field.stop):
        if part.number in texts:
            texts[part.number] = _read_text(data, part)
    return Io(*texts.values())


def _read_attribute(data: bytes, field: Field) -> Attribute:
    """Read an attribute; of several values the last one counts, as in every oneof."""
    _checked(field, LEN)
    name, doc, kind, value = "", "", _KINDS[0], None
    for part in fields(data, field.start, field.stop):
        index, is_list = divmod(part.number - _FIRST_VALUE, 2)
        match part.number:
            case 1:
                name = _read_text(data, part)
            case 2:
                doc = _read_text(data, part)
            case _ if index < len(_KINDS):
                kind = _KINDS[index]
                value = _read_list(data, part, kind) if is_list else _read_scalar(data, part, kind)
    return Attribute(name, kind, value, doc)


def _read_list(data: bytes, field: Field, kind: Kind) -> tuple[Scalar, ...]:
    _checked(field, LEN)
    values: list[Scalar] = []
    for part in fields(data, field.start, field.stop):
        if part.number != 1:
            continue
        if _wire(kind) == LEN:
            values.append(_read_scalar(data, part, kind))
        else:
            values.extend(_from_bits(bits, kind) for bits in packed(data, part, _wire(kind)))
    return tuple(values)


def _read_scalar(data: bytes, field: Field, kind: Kind) -> Scalar:
    _checked(field, _wire(kind))
    if kind == "string":
        return _read_text(data, field)
    return data[field.start : field.stop] if kind == "bytes" else _from_bits(field.bits, kind)


def _from_bits(bits: int, kind: Kind) -> Scalar:
    """Return the number that these bits stand for."""
    if kind in _FORMATS:
        number: float = struct.unpack(_FORMATS[kind], bits.to_bytes(8 if _wire(kind) == I64 else 4, "little"))[0]
        return number
    match kind:
        case "bool":
            return bits != 0
        case "sint32" | "sint64":
            return bits >> 1 ^ -(bits & 1)
        case "uint32":
            return bits & 2**32 - 1
        case "int32":
            return (bits & 2**32 - 1 ^ 2**31) - 2**31
        case _:
            return bits if kind == "uint64" else (bits ^ 2**63) - 2**63
