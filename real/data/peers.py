"""Samples from the memory of other nodes: one process of each node serves its store, every rank asks.

A peer that is dead, slow or without the sample is no error: the answer is `not there`, the caller reads the sample from
somewhere else, and `Peers.complaints` says what happened. So it is if a stranger answers. A rank of this run that
serves another data set is an error.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from real.data.board import Want, wait_for
from real.data.connections import Connections, shut
from real.data.hello import Meeting, greet, welcome
from real.data.memory import Loan, MemoryStore
from real.data.open_files import MOST_CONNECTIONS
from real.data.samples import Pixels, flat
from real.data.wire import HEAD, packed, receive, send, unpacked, want_nbytes
from simdist.errors import RunError

MOST_WAIT_S = 3600.0
"""No server waits longer for samples that are about to come, whatever a client asks."""

_MOST_WANTS = 1 << 16


class PeerServer:
    """Serves a node's store: a thread that accepts, and one for each connection.

    Args:
        store: Of this node.
        host: Address of this node that others reach.
        meeting: What clients must know.
        timeout_s: Of a request and its answer, once it has begun.
        most_connections: Who comes when there are so many is sent away.

    Raises:
        RunError: The address cannot be listened on.
    """

    def __init__(
        self,
        store: MemoryStore,
        *,
        host: str,
        meeting: Meeting,
        timeout_s: float = 10.0,
        most_connections: int = 1024,
    ) -> None:
        self._store, self._meeting, self._timeout_s = store, meeting, timeout_s
        self._most_connections = most_connections
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
            shut(connection)
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
                has_room = len(self._connections) < self._most_connections
                if has_room:
                    self._connections[thread] = connection
            if has_room:
                thread.start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            welcome(connection, self._meeting, deadline_s=time.monotonic() + self._timeout_s)
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
        if not 0 <= wait_s <= MOST_WAIT_S:  # what is no number, is not
            raise ConnectionAbortedError(f"a request to wait {wait_s} s")
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
    """Asks other nodes for samples; threads of a rank ask at once, and share a few connections to each node.

    Args:
        meeting: What the servers must know.
        address_of: Node -> `host:port` of its server; called again for each new connection.
        timeout_s: Of a request and its answer.
        retry_s: How long a peer that has failed is left alone.
        n_connections: To each node at most.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        address_of: Callable[[int], str],
        timeout_s: float = 10.0,
        retry_s: float = 5.0,
        n_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self._meeting, self._address_of = meeting, address_of
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._connections = Connections(self._connect, n_per_node=n_connections)
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
            wait_s: How long the node may wait for samples that are about to come; `MOST_WAIT_S` at most.

        Returns:
            Which were there.

        Raises:
            RunError: The peer serves another data set.
        """
        nbytes = self._meeting.geometry.sample_nbytes
        targets = [flat(out, nbytes, want.sample) for want, out in zip(wants, outs, strict=True)]
        wait_s = min(wait_s, MOST_WAIT_S)
        patience_s = self._timeout_s + wait_s
        if self._closed or self._is_left_alone(node):
            return [False] * len(wants)
        try:
            with self._connections.borrowed(node, deadline_s=time.monotonic() + patience_s) as connection:
                return _ask(connection, wants, targets, wait_s, deadline_s=time.monotonic() + patience_s)
        except OSError as error:
            self._give_up(node, error)
            return [False] * len(wants)

    def close(self) -> None:
        """Close all connections; whoever waits for an answer gets none."""
        self._closed = True
        self._connections.close()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, node: int, deadline_s: float) -> socket.socket:
        if self._is_left_alone(node):  # another thread has found out while this one waited
            raise ConnectionAbortedError("has failed")
        host, _, port = self._address_of(node).rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=max(0.001, deadline_s - time.monotonic()))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(connection, self._meeting, who=f"node {node} ({self._address_of(node)})", deadline_s=deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _is_left_alone(self, node: int) -> bool:
        return time.monotonic() < self._not_before_s.get(node, 0.0)

    def _give_up(self, node: int, error: OSError) -> None:
        """Leave a peer alone for a while; the first of its threads that fails says why."""
        if self._is_left_alone(node):
            return
        self._not_before_s[node] = time.monotonic() + self._retry_s
        self._connections.drop_idle(node)
        reason = f"no answer in {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        self._complaints[node] = f"node {node} ({self._address_of(node)}): {reason}"


def _ask(
    connection: socket.socket,
    wants: Sequence[Want],
    targets: Sequence[NDArray[np.uint8]],
    wait_s: float,
    *,
    deadline_s: float,
) -> list[bool]:
    """Send a request, and receive what comes for it."""
    send(connection, [HEAD.pack(len(wants), wait_s) + packed(wants)], deadline_s=deadline_s)
    found = bytearray(len(wants))
    receive(connection, found, deadline_s=deadline_s)
    for _, target in filter(lambda pair: pair[0], zip(found, targets, strict=True)):
        receive(connection, target, deadline_s=deadline_s)
    intact = bytearray(sum(found))
    receive(connection, intact, deadline_s=deadline_s)
    verdicts = iter(intact)
    return [bool(each and next(verdicts)) for each in found]
