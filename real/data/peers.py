"""Samples from the memory of other nodes: one process of each node serves its store, every rank asks.

A peer that is dead, slow or without the sample is no error: the answer is `not there`, the caller reads the sample from
somewhere else, and `Peers.complaints` says what happened. A peer of another data set is an error.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from real.data.board import Want, wait_for
from real.data.memory import Geometry, Loan, MemoryStore
from real.data.samples import Pixels, flat
from real.data.wire import HEAD, HELLO, packed, receive, send, unpacked, want_nbytes
from simdist.errors import RunError

__all__ = ["PeerServer", "Peers"]

_MAGIC = b"simdist1"
_MOST_WANTS = 1 << 16


class PeerServer:
    """Serves a node's store: a thread that accepts, and one for each connection.

    Args:
        store: Of this node.
        host: Address of this node that others reach.
        timeout_s: Of a request and its answer, once it has begun.

    Raises:
        RunError: The address cannot be listened on.
    """

    def __init__(self, store: MemoryStore, *, host: str, timeout_s: float = 10.0) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        try:
            self._listener = socket.create_server((host, 0), backlog=512)
        except OSError as error:
            raise RunError(f"serving samples at {host}: {error}; give an address of this machine") from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """What the other nodes connect to, `host:port`."""
        self._acceptor = threading.Thread(target=self._accept, name="peer-server", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all threads."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections.values():
            _shut(connection)
        for thread in connections:
            thread.join()

    def __enter__(self) -> "PeerServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._stop.wait(0.05):  # else: too many open files, or a client that has given up
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="peer-connection", daemon=True)
            with self._lock:
                self._connections[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _exchange_hellos(connection, self._store.geometry, deadline_s=time.monotonic() + self._timeout_s)
            while not self._stop.is_set():
                self._answer(connection)
        with self._lock:
            del self._connections[threading.current_thread()]

    def _answer(self, connection: socket.socket) -> None:
        head = bytearray(HEAD.size)
        receive(connection, head, deadline_s=None)
        n_wants, wait_s = HEAD.unpack(head)
        if not 0 <= n_wants <= _MOST_WANTS:
            raise ConnectionAbortedError(f"a request for {n_wants} samples")
        body = bytearray(want_nbytes(n_wants))
        receive(connection, body, deadline_s=time.monotonic() + self._timeout_s)
        loans = self._find(unpacked(body), wait_s)
        found = [loan for loan in loans if loan is not None]
        deadline_s = time.monotonic() + self._timeout_s
        flags = bytes(loan is not None for loan in loans)
        send(connection, [flags, *(loan.data.data for loan in found)], deadline_s=deadline_s)
        send(connection, [bytes(loan.is_intact() for loan in found)], deadline_s=deadline_s)

    def _find(self, wants: Sequence[Want], wait_s: float) -> list[Loan | None]:
        """Wait for all that may still come, then look."""
        store, end_s = self._store, time.monotonic() + wait_s
        ours = [0 <= want.sample < store.geometry.n_samples for want in wants]
        for want, is_ours in zip(wants, ours, strict=True):
            if is_ours and want.number >= 0 and 0 <= want.local_rank < store.geometry.ranks_per_node:
                left_s = max(0.0, end_s - time.monotonic())
                wait_for(want, store.__contains__, store.board, wait_s=left_s, stop=self._stop)
        return [store.borrow(want.sample) if is_ours else None for want, is_ours in zip(wants, ours, strict=True)]


class Peers:
    """Asks other nodes for samples; threads of a rank ask at once, each over connections of its own.

    Args:
        geometry: Of the stores: equal data sets, and samples of one size.
        address_of: Node -> `host:port` of its server; called again for each new connection.
        timeout_s: Of a request and its answer.
        retry_s: How long a peer that has failed is left alone.
    """

    def __init__(
        self, geometry: Geometry, *, address_of: Callable[[int], str], timeout_s: float = 10.0, retry_s: float = 5.0
    ) -> None:
        self._geometry, self._address_of = geometry, address_of
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._not_before_s: dict[int, float] = {}
        self._complaints: dict[int, str] = {}
        self._closed = False

    @property
    def complaints(self) -> Mapping[int, str]:
        """What went wrong last, by node."""
        return dict(self._complaints)

    def get_many(self, node: int, wants: Sequence[Want], outs: Sequence[Pixels], *, wait_s: float = 0.0) -> list[bool]:
        """Copy samples out of a node's memory.

        Args:
            node: Which.
            wants: Samples.
            outs: Where each goes; holds anything if it was not there.
            wait_s: How long the node may wait for samples that are about to come.

        Returns:
            Which were there.

        Raises:
            RunError: The peer serves another data set.
        """
        targets = [flat(out, self._geometry.sample_nbytes, want.sample) for want, out in zip(wants, outs, strict=True)]
        if self._closed or time.monotonic() < self._not_before_s.get(node, 0.0):
            return [False] * len(wants)
        deadline_s = time.monotonic() + self._timeout_s + wait_s
        try:
            connection = self._connection(node, deadline_s)
            send(connection, [HEAD.pack(len(wants), wait_s) + packed(wants)], deadline_s=deadline_s)
            found = bytearray(len(wants))
            receive(connection, found, deadline_s=deadline_s)
            for _, target in filter(lambda pair: pair[0], zip(found, targets, strict=True)):
                receive(connection, target, deadline_s=deadline_s)
            intact = bytearray(sum(found))
            receive(connection, intact, deadline_s=deadline_s)
        except OSError as error:
            self._give_up(node, error)
            return [False] * len(wants)
        verdicts = iter(intact)
        return [bool(each and next(verdicts)) for each in found]

    def close(self) -> None:
        """Close all connections; whoever waits for an answer gets none."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                _shut(connection)
                connection.close()
            self._open.clear()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _connections(self) -> dict[int, socket.socket]:
        """Return this thread's connections, by node."""
        try:
            found: dict[int, socket.socket] = self._mine.connections
        except AttributeError:
            found = self._mine.connections = {}
        return found

    def _connection(self, node: int, deadline_s: float) -> socket.socket:
        mine = self._connections()
        if node not in mine:
            host, _, port = self._address_of(node).rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout=max(0.001, deadline_s - time.monotonic()))
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._agree(connection, node, deadline_s)
                self._remember(connection)
            except BaseException:
                connection.close()
                raise
            mine[node] = connection
        return mine[node]

    def _remember(self, connection: socket.socket) -> None:
        """Let `close` find a connection of whichever thread."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            self._open.add(connection)

    def _agree(self, connection: socket.socket, node: int, deadline_s: float) -> None:
        theirs = _exchange_hellos(connection, self._geometry, deadline_s=deadline_s)
        ours = (self._geometry.n_samples, self._geometry.sample_nbytes)
        if theirs != ours:
            raise RunError(
                f"node {node} ({self._address_of(node)}) serves {theirs[0]} samples of {theirs[1]} bytes, this rank "
                f"reads {ours[0]} of {ours[1]}; start all ranks with the same data set"
            )

    def _give_up(self, node: int, error: OSError) -> None:
        """Drop this thread's connection to a peer, and leave the peer alone for a while."""
        connection = self._connections().pop(node, None)
        if connection is not None:
            connection.close()
            with self._lock:
                self._open.discard(connection)
        self._not_before_s[node] = time.monotonic() + self._retry_s
        reason = f"no answer in {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        self._complaints[node] = f"node {node} ({self._address_of(node)}): {reason}"


def _exchange_hellos(connection: socket.socket, geometry: Geometry, *, deadline_s: float) -> tuple[int, int]:
    """Say which data set this side means, and return what the other says: samples, and bytes of each."""
    send(connection, [HELLO.pack(_MAGIC, geometry.n_samples, geometry.sample_nbytes)], deadline_s=deadline_s)
    answer = bytearray(HELLO.size)
    receive(connection, answer, deadline_s=deadline_s)
    magic, n_samples, sample_nbytes = HELLO.unpack(answer)
    if magic != _MAGIC:
        raise ConnectionAbortedError(f"does not serve samples: began with {magic!r}")
    return n_samples, sample_nbytes


def _shut(connection: socket.socket) -> None:
    """Wake whoever waits on a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
