"""Requests and answers of NFS version 4.0, in the structures that libnfs takes and gives.

A request is a list of operations, a COMPOUND; only those are here that find and read files. The structures are those
of one ABI, `libnfs.so.13`, on 64 bits: an operation, `nfs_argop4`, takes 136 bytes there, and its result 160.

Source: RFC 7530 (NFSv4.0), RFC 7531 (its XDR: numbers of operations, attributes and errors); libnfs 4.0.0,
`nfsc/libnfs-raw-nfs4.h` (the layout of the structures).
"""

import ctypes
import errno
import os
import struct
from ctypes import POINTER, Structure, Union, c_char_p, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Literal, TypeAlias

READ_NBYTES = 1 << 20  # asked for at once; a server gives less if its own limit is lower
LIST_NBYTES = 1 << 16

GETATTR, LOOKUP, PUTROOTFH, READ, READDIR = 9, 15, 24, 25, 26  # RFC 7531, nfs_opnum4
KIND_AND_NBYTES = 1 << 1 | 1 << 4  # attributes 1, type, and 4, size: RFC 7530, table 3
KINDS: dict[int, Literal["file", "directory", "link"]] = {1: "file", 2: "directory", 5: "link"}  # nfs_ftype4

# RFC 7531, nfsstat4, to errno where they differ. Whatever passes by itself becomes EAGAIN.
_ERRNO = {
    10008: errno.EAGAIN,  # NFS4ERR_DELAY
    10013: errno.EAGAIN,  # NFS4ERR_GRACE: the server has just started
    10018: errno.EAGAIN,  # NFS4ERR_RESOURCE
    10016: errno.EACCES,  # NFS4ERR_WRONGSEC
    10029: errno.ELOOP,  # NFS4ERR_SYMLINK
    10040: errno.EINVAL,  # NFS4ERR_BADCHAR
    10041: errno.EINVAL,  # NFS4ERR_BADNAME
}


class _Bytes(Structure):
    """Any counted bytes: `utf8string`, `bitmap4` (counted in words), `attrlist4`."""

    _fields_ = [("length", c_uint32), ("value", c_void_p)]


class _ReadArguments(Structure):
    _fields_ = [("state_id", c_uint32 * 4), ("offset", c_uint64), ("count", c_uint32)]


class _ReaddirArguments(Structure):
    _fields_ = [
        ("cookie", c_uint64),
        ("verifier", c_uint64),  # 8 bytes that are only handed back
        ("dircount", c_uint32),
        ("maxcount", c_uint32),
        ("attributes", _Bytes),
    ]


class _ArgumentUnion(Union):
    _fields_ = [
        ("lookup", _Bytes),
        ("read", _ReadArguments),
        ("readdir", _ReaddirArguments),
        ("getattr", _Bytes),
        ("size", c_uint64 * 16),  # the largest member is OPEN4args: sizeof(nfs_argop4) is 136
    ]


class Operation(Structure):
    """One operation of a request: `nfs_argop4`."""

    _fields_ = [("number", c_uint32), ("arguments", _ArgumentUnion)]


class _Operations(Structure):
    _fields_ = [("length", c_uint32), ("value", POINTER(Operation))]


class Compound(Structure):
    """A request: `COMPOUND4args`."""

    _fields_ = [("tag", _Bytes), ("minorversion", c_uint32), ("operations", _Operations)]


class _ReadOk(Structure):
    _fields_ = [("eof", c_uint32), ("data", _Bytes)]


class _ReadResult(Structure):
    _fields_ = [("status", c_uint32), ("ok", _ReadOk)]


class _FileAttributes(Structure):
    _fields_ = [("mask", _Bytes), ("values", _Bytes)]


class _GetattrResult(Structure):
    _fields_ = [("status", c_uint32), ("attributes", _FileAttributes)]


class _Entry(Structure):
    pass


_Entry._fields_ = [
    ("cookie", c_uint64),
    ("name", _Bytes),
    ("attributes", _FileAttributes),
    ("next", POINTER(_Entry)),
]


class _ReaddirOk(Structure):
    _fields_ = [("verifier", c_uint64), ("entries", POINTER(_Entry)), ("eof", c_uint32)]


class _ReaddirResult(Structure):
    _fields_ = [("status", c_uint32), ("ok", _ReaddirOk)]


class _ResultUnion(Union):
    _fields_ = [
        ("read", _ReadResult),
        ("readdir", _ReaddirResult),
        ("getattr", _GetattrResult),
        ("size", c_uint64 * 19),  # the largest member is OPEN4res: sizeof(nfs_resop4) is 160
    ]


class _Result(Structure):
    _fields_ = [("number", c_uint32), ("value", _ResultUnion)]


class _Answer(Structure):
    _fields_ = [("status", c_uint32), ("tag", _Bytes), ("n_results", c_uint32), ("results", POINTER(_Result))]


# The bit mask of the attributes that are asked for; requests point to it.
_MASK = (c_uint32 * 1)(KIND_AND_NBYTES)
_ATTRIBUTES = struct.Struct(">IQ")  # their values: XDR is big-endian


@dataclass(frozen=True, slots=True)
class Attributes:
    """Holds what a server says of a file: its kind (`other` for devices and the like) and its size."""

    kind: Literal["file", "directory", "link", "other"]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """Holds a name of a directory, and what it names."""

    name: str
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds bytes of a file, and whether they are its last."""

    content: bytes
    eof: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Holds names of a directory, where to go on, and whether they are the last."""

    entries: tuple[Entry, ...]
    cookie: int
    verifier: int
    eof: bool


Reply: TypeAlias = Piece | Page | Attributes


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Holds a request, and the names that it points to."""

    compound: Compound
    names: tuple[bytes, ...]


def request(path: str, last: Operation) -> Request:
    """Ask to look up `path` from the server's root, and to do one operation there."""
    names = tuple(os.fsencode(name) for name in path.split("/") if name)
    operations = (Operation * (len(names) + 2))(Operation(PUTROOTFH), *map(_lookup, names), last)
    return Request(Compound(_Bytes(), 0, _Operations(len(operations), operations)), names)


def read_at(offset: int) -> Operation:
    """Read from an offset, with the anonymous state id."""
    operation = Operation(READ)
    operation.arguments.read = _ReadArguments((0, 0, 0, 0), offset, READ_NBYTES)
    return operation


def describe() -> Operation:
    """Get kind and size."""
    operation = Operation(GETATTR)
    operation.arguments.getattr = _mask()
    return operation


def list_after(cookie: int, verifier: int) -> Operation:
    """Read a directory after the entry of a cookie; 0 and 0 at first."""
    operation = Operation(READDIR)
    operation.arguments.readdir = _ReaddirArguments(cookie, verifier, LIST_NBYTES, LIST_NBYTES, _mask())
    return operation


def decode(address: int) -> Reply:
    """Copy an answer, a `COMPOUND4res`, out of the library's memory.

    Raises:
        OSError: Instead, the answer of the server, as the kind that a local file would raise; or no valid answer.
    """
    answer = _Answer.from_address(address)
    if answer.status:
        raise _refusal(answer.status)
    result = answer.results[answer.n_results - 1]
    if result.number == READ:
        return Piece(_copy(result.value.read.ok.data), bool(result.value.read.ok.eof))
    if result.number == GETATTR:
        return _decode_attributes(result.value.getattr.attributes)
    if result.number == READDIR:
        return _decode_page(result.value.readdir.ok)
    raise OSError(errno.EIO, f"an answer to operation {result.number}")


def _lookup(name: bytes) -> Operation:
    operation = Operation(LOOKUP)
    operation.arguments.lookup = _Bytes(len(name), ctypes.cast(c_char_p(name), c_void_p))
    return operation


def _mask() -> _Bytes:
    return _Bytes(len(_MASK), ctypes.cast(_MASK, c_void_p))


def _decode_page(page: _ReaddirOk) -> Page:
    entries: list[Entry] = []
    cookie, entry = 0, page.entries
    while entry:
        entries.append(Entry(os.fsdecode(_copy(entry[0].name)), _decode_attributes(entry[0].attributes)))
        cookie, entry = entry[0].cookie, entry[0].next
    return Page(tuple(entries), cookie, page.verifier, bool(page.eof))


def _decode_attributes(attributes: _FileAttributes) -> Attributes:
    values = _copy(attributes.values)
    if len(values) != _ATTRIBUTES.size:
        raise OSError(errno.EIO, f"{len(values)} bytes of attributes")
    kind, nbytes = _ATTRIBUTES.unpack(values)
    return Attributes(KINDS.get(kind, "other"), nbytes)


def _copy(content: _Bytes) -> bytes:
    return ctypes.string_at(content.value, content.length) if content.length else b""


def _refusal(status: int) -> OSError:
    """Return the error for a status of NFSv4; Python makes FileNotFoundError and so on of its number."""
    code = _ERRNO.get(status, status if status < 10000 else errno.EIO)
    return OSError(code, f"{os.strerror(code)} (NFSv4 status {status})")
