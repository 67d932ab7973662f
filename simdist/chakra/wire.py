"""The wire format of protocol buffers, as far as execution traces need it.

A message is a sequence of fields. A field is a key, `number << 3 | wire type` as a varint, and its value: a varint
(wire type 0), eight bytes (1), a length and so many bytes (2), or four bytes (5). A varint holds seven bits a byte, the
lowest first; all bytes but its last have the high bit set.

>>> varint(300).hex(), b"".join(encoded(1, VARINT, 300)).hex()
('ac02', '08ac02')

Source:
    Protocol Buffers Documentation, Encoding, protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator
from typing import NamedTuple

VARINT, I64, LEN, I32 = 0, 1, 2, 5
_WIDTHS = {I64: 8, I32: 4}
_MAX_VARINT_NBYTES = 10  # 64 bits, seven a byte
_MASK_64 = 2**64 - 1


class DamageError(Exception):
    """Bytes that are no message: `at` is where, an index, and the text says what is wrong."""

    def __init__(self, at: int, problem: str) -> None:
        super().__init__(problem)
        self.at = at


class Field(NamedTuple):
    """One field of a message.

    Args:
        number: Which field.
        wire: Its wire type.
        bits: Its value as an unsigned integer; of a field with a length 0.
        start: Where its value begins, for a field with a length behind that.
        stop: Where its value ends.
    """

    number: int
    wire: int
    bits: int
    start: int
    stop: int


def varint(value: int) -> bytes:
    """Return an integer as a varint; a negative one as the 64 bits of its two's complement."""
    if 0 <= value < 0x80:
        return bytes((value,))
    value &= _MASK_64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encoded(number: int, wire: int, value: int | bytes) -> tuple[bytes, ...]:
    """Return the parts of a field: an integer becomes a varint, and bytes stand as they are, after their length."""
    key = varint(number << 3 | wire)
    if isinstance(value, int):
        return key, varint(value)
    return (key, varint(len(value)), value) if wire == LEN else (key, value)


def read_varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return the varint at `at`, and where it ends.

    Raises:
        DamageError: It does not end before `stop`, or is of more than 64 bits.
    """
    if at < stop and data[at] < 0x80:  # most are of one byte
        return data[at], at + 1
    value = 0
    for n, byte in enumerate(data[at : min(stop, at + _MAX_VARINT_NBYTES)]):
        value |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            if value > _MASK_64:
                raise DamageError(at, "a number of more than 64 bits")
            return value, at + n + 1
    raise DamageError(
        at, "a number without end" if at + _MAX_VARINT_NBYTES > stop else "a number of more than 10 bytes"
    )


def fields(data: bytes, start: int, stop: int) -> Iterator[Field]:
    """Yield the fields of the message in `data[start:stop]`.

    Raises:
        DamageError: There is something else.
    """
    at = start
    while at < stop:
        key, value_at = read_varint(data, at, stop)
        number, wire = key >> 3, key & 7
        if not 0 < number < 2**29:
            raise DamageError(at, f"a field of number {number}; they go from 1 to {2**29 - 1}")
        bits = 0
        match wire:
            case 0:
                bits, end = read_varint(data, value_at, stop)
            case 1 | 5:
                end = value_at + _WIDTHS[wire]
                bits = int.from_bytes(data[value_at:end], "little")
            case 2:
                length, value_at = read_varint(data, value_at, stop)
                end = value_at + length
            case _:
                raise DamageError(at, f"field {number} is of wire type {wire}; there are 0, 1, 2 and 5")
        if end > stop:
            raise DamageError(at, f"field {number} goes {end - stop} bytes beyond its message")
        yield Field(number, wire, bits, value_at, end)
        at = end


def packed(data: bytes, field: Field, wire: int) -> Iterator[int]:
    """Yield the numbers of a repeated field, as unsigned integers: one, or many that are packed into a length.

    Raises:
        DamageError: They are not of this wire type.
    """
    if field.wire == wire:
        yield field.bits
        return
    if field.wire != LEN:
        raise DamageError(field.start, f"field {field.number} is of wire type {field.wire}, not {wire}")
    at = field.start
    while at < field.stop:
        if wire == VARINT:
            bits, at = read_varint(data, at, field.stop)
        else:
            first, at = at, at + _WIDTHS[wire]
            if at > field.stop:
                raise DamageError(first, f"field {field.number} ends in the middle of a number")
            bits = int.from_bytes(data[first:at], "little")
        yield bits
