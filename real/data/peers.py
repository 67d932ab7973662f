"""Samples from the memory of other nodes: one process of each node serves its store, all ranks send requests.

A peer that is dead, slow or without the sample is not an error: the answer is `not there`, and the caller reads the
sample from elsewhere. The same holds for strangers, and for other data sets.

**Requests.** After that, a client may send any number of requests: a head and a list of wants. The server answers with
one byte per want, 1 if it has the sample. Then it sends the available samples without copying them. Then it sends one
byte for each of these, 1 if it was still the same sample when its last byte had been sent. Numbers are little-endian.
"""

import contextlib
import hmac
import queue
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from real.data.memory import Loan, MemoryStore, Pixels, Want, flat, wait_for
from real.processes.messages import greet, receive, send_message, welcome
from simdist.errors import RunError

# Number of wants that follow, and the seconds that the server may wait for samples that are about to arrive.
HEAD = struct.Struct("<qd")

_WANT = np.dtype([("sample", "<i8"), ("local_rank", "<i8"), ("number", "<i8")])


def peer_key(token: bytes, data_set: bytes) -> bytes:
    """Return the key that ranks of a run must know to read a data set from each other.

    Args:
        token: Token of the run: random, known only to its ranks.
        data_set: Digest of everything that determines a sample.
    """
    return hmac.digest(token, data_set, "sha256")


def pack_wants(wants: Sequence[Want]) -> bytes:
    """Write wants."""
    return np.array([(want.sample, want.local_rank, want.number) for want in wants], _WANT).tobytes()


def unpack_wants(data: bytes | bytearray) -> list[Want]:
    """Read what `pack_wants` wrote."""
    return [Want(*fields) for fields in np.frombuffer(data, _WANT).tolist()]


# From a rank to a node: a few streams fill a network; one would wait for each answer before the next request.
_MOST_CONNECTIONS = 4
MOST_WAIT_S = 3600.0  # the longest wait of a server for samples that are about to arrive, whatever a client requests

_MOST_WANTS = 1 << 16
_ENOUGH_FILES = 1 << 16  # some child programs iterate over all numbers below the limit
_FILES = resource.RLIMIT_NOFILE
_SHARE = 4  # one of this many open files may be a connection to a peer; the others are files, and those of the user
_Pool: TypeAlias = "queue.LifoQueue[socket.socket | None]"


def most_connections() -> int:
    """Return the number of connections that a process may serve, after raising its limit of open files if possible.

    Source: getrlimit(2), RLIMIT_NOFILE.
    """
    soft, hard = (_ENOUGH_FILES if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(_FILES))
    if soft < min(hard, _ENOUGH_FILES):
        soft = min(hard, _ENOUGH_FILES)
        resource.setrlimit(_FILES, (soft, resource.getrlimit(_FILES)[1]))
    return max(1, soft // _SHARE)


def connections_per_peer(readers: int, *, n_clients: int) -> int:
    """Return the number of connections that a rank may have to each other node.

    Args:
        readers: Number of concurrent requests of the rank.
        n_clients: Ranks that one node serves; they share the open files of its process.
    """
    return max(1, min(readers, _MOST_CONNECTIONS, most_connections() // max(1, n_clients)))


class PeerServer(AbstractContextManager["PeerServer"]):
    """Serves a node's store at `address`, host:port: a thread that accepts, and one for each connection.

    Args:
        store: Store of this node.
        host: Address of this node for others.
        key: The key that clients must know.
        timeout_s: Time limit of a request and its answer, after its beginning.
        most_connections: Largest number of connections; further clients are refused.

    Raises:
        RunError: The server cannot listen on the address.
    """

    def __init__(
        self, store: MemoryStore, *, host: str, key: bytes, timeout_s: float = 10.0, most_connections: int = 1024
    ) -> None:
        self._store = store
        self._key = key
        self._timeout_s = timeout_s
        self._most_connections = most_connections
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        try:
            self._listener = socket.create_server((host, 0), backlog=512)
        except OSError as error:
            raise RunError(f"serving samples at {host}: {error}; give an address of this machine") from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
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

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._stop.wait(0.05):  # else too many open files, or a client that has given up
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
            welcome(connection, self._key, deadline_s=time.monotonic() + self._timeout_s)
            while not self._stop.is_set():
                self._answer(connection)
        with self._lock:
            del self._connections[threading.current_thread()]

    def _answer(self, connection: socket.socket) -> None:
        head = bytearray(HEAD.size)
        receive(connection, head, deadline_s=None)
        n_wants, wait_s = HEAD.unpack(head)
        if not (0 <= n_wants <= _MOST_WANTS and 0 <= wait_s <= MOST_WAIT_S):  # NaN is neither
            raise ConnectionAbortedError(f"a request for {n_wants} samples, to wait {wait_s} s")
        body = bytearray(n_wants * _WANT.itemsize)
        receive(connection, body, deadline_s=time.monotonic() + self._timeout_s)
        loans = self._find(unpack_wants(body), wait_s)
        found = [loan for loan in loans if loan is not None]
        deadline_s = time.monotonic() + self._timeout_s
        flags = bytes(loan is not None for loan in loans)
        send_message(connection, [flags, *(loan.data.data for loan in found)], deadline_s=deadline_s)
        send_message(connection, [bytes(loan.is_intact() for loan in found)], deadline_s=deadline_s)

    def _find(self, wants: Sequence[Want], wait_s: float) -> list[Loan | None]:
        """Wait for all samples that may still arrive, then look them up."""
        store = self._store
        end_s = time.monotonic() + wait_s
        ours = [0 <= want.sample < store.geometry.n_samples for want in wants]
        for want, is_ours in zip(wants, ours, strict=True):
            if is_ours and want.number >= 0 and 0 <= want.local_rank < store.geometry.ranks_per_node:
                left_s = max(0.0, end_s - time.monotonic())
                wait_for(want, store.__contains__, store.board, wait_s=left_s, stop=self._stop)
        return [store.borrow(want.sample) if is_ours else None for want, is_ours in zip(wants, ours, strict=True)]


class PeerClient(AbstractContextManager["PeerClient"]):
    """Requests samples from other nodes; threads of a rank send requests at once over a few connections to each node.

    Args:
        key: The key that servers must know.
        sample_nbytes: Bytes of each sample.
        address_of: Node -> `host:port` of its server; called again for each new connection.
        timeout_s: Time limit of a request and its answer.
        retry_s: Pause before a failed peer is tried again.
        n_connections: Largest number of connections to each node.
    """

    def __init__(
        self,
        key: bytes,
        sample_nbytes: int,
        *,
        address_of: Callable[[int], str],
        timeout_s: float = 10.0,
        retry_s: float = 5.0,
        n_connections: int = _MOST_CONNECTIONS,
    ) -> None:
        self._key = key
        self._sample_nbytes = sample_nbytes
        self._address_of = address_of
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._n_connections = n_connections
        self._lock = threading.Lock()
        self._pools: dict[int, _Pool] = {}
        self._open: set[socket.socket] = set()
        self._not_before_s: dict[int, float] = {}
        self._closed = False

    def get_many(self, node: int, wants: Sequence[Want], outs: Sequence[Pixels], *, wait_s: float = 0.0) -> list[bool]:
        """Copy samples out of a node's memory.

        Args:
            node: The node.
            wants: Samples.
            outs: Target of each sample; undefined if the sample was not there.
            wait_s: How long the node may wait for samples that are about to arrive, at most `MOST_WAIT_S`.

        Returns:
            Whether each sample was there.
        """
        targets = [flat(out, self._sample_nbytes, want.sample) for want, out in zip(wants, outs, strict=True)]
        wait_s = min(wait_s, MOST_WAIT_S)
        patience_s = self._timeout_s + wait_s
        if self._closed or self._is_left_alone(node):
            return [False] * len(wants)
        try:
            with self._borrowed(node, deadline_s=time.monotonic() + patience_s) as connection:
                return _ask(connection, wants, targets, wait_s, deadline_s=time.monotonic() + patience_s)
        except OSError:
            if not self._is_left_alone(node):
                self._not_before_s[node] = time.monotonic() + self._retry_s
            return [False] * len(wants)

    def close(self) -> None:
        """Close all connections; waiting threads get no answer."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                _shut(connection)
                connection.close()
            self._open.clear()

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _borrowed(self, node: int, *, deadline_s: float) -> Iterator[socket.socket]:
        """Yield a connection to a node, an open one if possible; after any failure it is closed."""
        pool = self._pool(node)
        try:
            connection = pool.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("all connections are busy") from None
        try:
            if connection is None:
                connection = self._connect(node, deadline_s)
            yield connection
        except BaseException:
            self._drop(connection)
            connection = None
            raise
        finally:
            pool.put(connection)

    def _pool(self, node: int) -> _Pool:
        """Return the unused connections to a node; None stands for one that is not open."""
        with self._lock:
            if node not in self._pools:
                self._pools[node] = queue.LifoQueue()
                for _ in range(self._n_connections):
                    self._pools[node].put(None)
            return self._pools[node]

    def _connect(self, node: int, deadline_s: float) -> socket.socket:
        if self._is_left_alone(node):  # another thread found the failure while this one waited
            raise ConnectionAbortedError("has failed")
        host, _, port = self._address_of(node).rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=max(0.001, deadline_s - time.monotonic()))
        with self._lock:
            self._open.add(connection)
        try:
            greet(connection, self._key, deadline_s=deadline_s)
            if self._closed:
                raise ConnectionAbortedError("closed")
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _drop(self, connection: socket.socket | None) -> None:
        if connection is not None:
            connection.close()
            with self._lock:
                self._open.discard(connection)

    def _is_left_alone(self, node: int) -> bool:
        return time.monotonic() < self._not_before_s.get(node, 0.0)


def _ask(
    connection: socket.socket,
    wants: Sequence[Want],
    targets: Sequence[NDArray[np.uint8]],
    wait_s: float,
    *,
    deadline_s: float,
) -> list[bool]:
    """Send a request, and receive its answer."""
    send_message(connection, [HEAD.pack(len(wants), wait_s) + pack_wants(wants)], deadline_s=deadline_s)
    found = bytearray(len(wants))
    receive(connection, found, deadline_s=deadline_s)
    for _, target in filter(lambda pair: pair[0], zip(found, targets, strict=True)):
        receive(connection, target, deadline_s=deadline_s)
    intact = bytearray(sum(found))
    receive(connection, intact, deadline_s=deadline_s)
    verdicts = iter(intact)
    return [bool(each and next(verdicts)) for each in found]


def _shut(connection: socket.socket) -> None:
    """Wake the thread that waits on a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
