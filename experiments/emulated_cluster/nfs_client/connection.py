"""A connection to a server of NFS version 4.0, by the C library libnfs.

Where the kernel has no NFS client, or nothing may be mounted, a process reads files by itself. libnfs has a simple
interface (mount, open, read, close) and a raw one, which this module uses, for three reasons.

* **One round trip per file.** A COMPOUND of PUTROOTFH, LOOKUP for every part of the path, and READ answers at once.
  READ takes the anonymous state id, all zero, so the file need not be opened and closed (RFC 7530, 9.1.4.3).
* **No state on the server.** After a restart there is no client id, lease or open file to recover: the next connection
  goes on.
* **No wait without end.** The simple interface polls until the answer comes, and leaves a pointer into its stack
  behind where it gives up. Here the loop is ours: after the deadline the connection is dropped. Every request has a
  deadline of its own, so a large file may take as long as it takes: a server that goes on answering is there.

A connection is for one thread at a time. Calls into the library release the interpreter's lock.

Source: RFC 7530 (NFSv4.0); libnfs 4.0.0, `nfsc/libnfs-raw.h`.
"""

import ctypes
import errno
import math
import os
import select
import socket
import time
from ctypes import POINTER, c_char_p, c_int, c_void_p
from typing import final

from nfs_client.messages import (
    Attributes,
    Compound,
    Entry,
    Operation,
    Page,
    Piece,
    Reply,
    decode,
    describe,
    list_after,
    read_at,
    request,
)
from simdist.errors import RunError

SONAME = "libnfs.so.13"  # libnfs 4; the structures of nfs_client.messages are those of this ABI
MISSING = f"{SONAME} (libnfs 4) is needed to read nfs:// and is not here: `apt-get install libnfs13`, or mount it"

POLL_MS = 100  # between looks at the deadline
NFS_PROGRAM = 100003  # RFC 7531, section 2
NFS_VERSION = 4

_Callback = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_void_p, c_void_p)


def load_library() -> ctypes.CDLL:
    """Load libnfs and declare the functions that are used.

    Raises:
        RunError: it is not installed.
    """
    try:
        library = ctypes.CDLL(SONAME)
    except OSError as error:
        raise RunError(MISSING) from error
    library.rpc_init_context.restype = c_void_p
    library.rpc_get_error.restype = c_char_p
    for function, arguments in (
        (library.rpc_init_context, ()),
        (library.rpc_destroy_context, (c_void_p,)),
        (library.rpc_get_error, (c_void_p,)),
        (library.rpc_get_fd, (c_void_p,)),
        (library.rpc_which_events, (c_void_p,)),
        (library.rpc_service, (c_void_p, c_int)),
        (library.rpc_connect_port_async, (c_void_p, c_char_p, c_int, c_int, c_int, _Callback, c_void_p)),
        (library.rpc_nfs4_compound_async, (c_void_p, _Callback, POINTER(Compound), c_void_p)),
    ):
        function.argtypes = arguments
    return library


@final
class Connection:
    """Reads files of one server, one request at a time; for one thread at a time.

    After an error other than the server's answer about a file the connection is of no use any more: `broken`.

    Args:
        library: From `load_library`.
        host: Name or address of the server.
        port: TCP port of NFS there.
        request_s: Longest time for one request.
        deadline_s: Of `time.monotonic`, for being connected.

    Raises:
        ConnectionError: The server refuses, or cannot be found.
        TimeoutError: It does not answer in time.
    """

    def __init__(self, library: ctypes.CDLL, host: str, *, port: int, request_s: float, deadline_s: float) -> None:
        self.broken = True
        self._library = library
        self._server = f"{host}:{port}"
        self._request_s = request_s
        self._rpc: int | None = library.rpc_init_context()
        self._finished = False
        self._failure: OSError | None = None
        self._hung_up: int | None = None  # errno of the socket, 0 if the server has closed it
        self._reply: Reply | None = None
        self._on_connected = _Callback(self._connected)  # kept: the library calls them as long as the context lives
        self._on_answer = _Callback(self._answered)
        program = (NFS_PROGRAM, NFS_VERSION, self._on_connected, None)
        if self._rpc is None or library.rpc_connect_port_async(self._rpc, host.encode(), port, *program):
            failure = self._broken_off("cannot connect")
            self.close()
            raise failure
        try:
            self._wait(deadline_s)
        except BaseException:
            self.close()
            raise
        self.broken = False

    def read(self, path: str, *, deadline_s: float) -> bytes:
        """Read a file: one round trip for each MiB, or each piece that the server gives.

        Args:
            path: From the server's root, such as `/export/set/1.jpg`. Symbolic links are not followed.
            deadline_s: Of `time.monotonic`, for the whole file.

        Raises:
            FileNotFoundError, PermissionError, IsADirectoryError, OSError: The error that the server answers.
            ConnectionError: The connection is lost.
            TimeoutError: The server does not answer a request in time, or the whole file takes too long.
        """
        pieces: list[bytes] = []
        offset = 0
        while True:
            match self._piece(path, offset, deadline_s):
                case Piece(content, eof):
                    pieces.append(content)
                    offset += len(content)
                    if eof or not content:
                        return b"".join(pieces) if len(pieces) > 1 else content
                case other:
                    raise self._misunderstood(other)

    def attributes(self, path: str, *, deadline_s: float) -> Attributes:
        """Say what is at `path`, in one round trip; raises what `read` raises."""
        match self._ask(path, describe(), deadline_s):
            case Attributes() as attributes:
                return attributes
            case other:
                raise self._misunderstood(other)

    def entries(self, path: str, *, deadline_s: float) -> list[Entry]:
        """List a directory; raises what `read` raises."""
        entries: list[Entry] = []
        cookie, verifier = 0, 0
        while True:
            match self._ask(path, list_after(cookie, verifier), deadline_s):
                case Page(page, cookie, verifier, eof):
                    entries += page
                    if eof or not page:
                        return entries
                case other:
                    raise self._misunderstood(other)

    def close(self) -> None:
        """Drop the connection."""
        self.broken = True
        if self._rpc is not None:
            rpc, self._rpc = self._rpc, None
            self._library.rpc_destroy_context(rpc)  # calls back for a request under way

    def _piece(self, path: str, offset: int, deadline_s: float) -> Reply:
        """Ask for the part of a file that begins at `offset`; who waits in vain says how far the file had come."""
        try:
            return self._ask(path, read_at(offset), deadline_s)
        except TimeoutError as error:
            if not offset:
                raise
            said = f"{error.strerror} in time any more, after {offset:,} bytes"
            raise TimeoutError(error.errno, said, path) from error

    def _ask(self, path: str, last: Operation, deadline_s: float) -> Reply:
        """Look up `path` and do one operation there, in one round trip."""
        asked = request(path, last)
        self._finished, self._failure, self._reply, self._hung_up = False, None, None, None
        if self._library.rpc_nfs4_compound_async(self._rpc, self._on_answer, ctypes.byref(asked.compound), None):
            raise self._broken_off("cannot send")
        try:
            self._wait(min(deadline_s, time.monotonic() + self._request_s))
        except OSError as error:
            error.filename = path
            raise
        if self._reply is None:
            raise self._misunderstood(None)
        return self._reply

    def _wait(self, deadline_s: float) -> None:
        """Serve the connection until the answer is there. Whatever else happens leaves it broken."""
        library, rpc = self._library, self._rpc
        while not self._finished:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self.broken = True
                raise TimeoutError(errno.ETIMEDOUT, f"{self._server} does not answer")
            poll = select.poll()  # each time: while it connects, the library may try another socket
            descriptor = library.rpc_get_fd(rpc)
            poll.register(descriptor, library.rpc_which_events(rpc))
            ready = poll.poll(min(POLL_MS, math.ceil(left_s * 1e3)))
            if ready and ready[0][1] & (select.POLLERR | select.POLLHUP):
                self._hung_up = _pending_error(descriptor)  # the library does not pass on what it is
            if library.rpc_service(rpc, ready[0][1] if ready else 0) < 0 and not self._finished:
                raise self._broken_off("the connection is lost")
        if self._failure is not None:
            raise self._failure

    def _connected(self, _rpc: int | None, status: int, data: int | None, _private: int | None) -> None:
        self._finished = True
        if status:
            self._failure = self._broken_off(_reason(data))

    def _answered(self, _rpc: int | None, status: int, data: int | None, _private: int | None) -> None:
        """Take the answer out of the library's memory, which is only there during this call."""
        self._finished = True
        if status or data is None:
            self._failure = self._broken_off(_reason(data))
            return
        try:
            self._reply = decode(data)
        except OSError as error:
            self._failure = error

    def _broken_off(self, what: str) -> ConnectionError:
        self.broken = True
        return ConnectionError(errno.ECONNABORTED, f"{self._server}: {self._told(what)}")

    def _told(self, what: str) -> str:
        """Say what has happened, once: `what` often is the library's own text."""
        if self._hung_up is not None:
            return os.strerror(self._hung_up).lower() if self._hung_up else "the server has closed the connection"
        said = self._library.rpc_get_error(self._rpc) if self._rpc is not None else None
        text = said.decode(errors="replace") if said else ""
        return what if text in what else f"{what}: {text}"

    def _misunderstood(self, reply: Reply | None) -> OSError:
        self.broken = True
        return OSError(errno.EIO, f"{self._server} answers another question: {type(reply).__name__}")


def _pending_error(descriptor: int) -> int:
    """Take the error of a socket: an errno, or 0."""
    with socket.socket(fileno=os.dup(descriptor)) as twin:
        return twin.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _reason(data: int | None) -> str:
    """Say why a request was given up: where it failed, libnfs hands over a text."""
    text = ctypes.string_at(data).decode(errors="replace") if data else ""
    return text or "no reason given"
