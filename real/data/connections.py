"""A few connections to each other node, which the threads of a process borrow in turn."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator


class Connections:
    """Opens connections when they are needed, and keeps them.

    Args:
        connect: Opens one to a node, until a time of `time.monotonic`.
        n_per_node: At most so many to each.
    """

    def __init__(self, connect: Callable[[int, float], socket.socket], *, n_per_node: int) -> None:
        self._connect, self._n_per_node = connect, n_per_node
        self._lock = threading.Lock()
        self._turns: dict[int, threading.Semaphore] = {}
        self._idle: dict[int, list[socket.socket]] = {}
        self._open: set[socket.socket] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def borrowed(self, node: int, *, deadline_s: float) -> Iterator[socket.socket]:
        """Give a connection to a node; one on which anything fails is closed.

        Raises:
            OSError: None was free in time, or none can be opened.
        """
        with self._lock:
            turns = self._turns.setdefault(node, threading.Semaphore(self._n_per_node))
        if not turns.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise TimeoutError("all connections are busy")
        try:
            connection = self._take(node, deadline_s)
            try:
                yield connection
            except BaseException:
                self._drop(connection)
                raise
            with self._lock:
                self._idle.setdefault(node, []).append(connection)
        finally:
            turns.release()

    def drop_idle(self, node: int) -> None:
        """Close the connections to a node that nobody uses now."""
        with self._lock:
            idle = self._idle.pop(node, [])
        for connection in idle:
            self._drop(connection)

    def close(self) -> None:
        """Close all; whoever uses one finds it broken."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                shut(connection)
                connection.close()
            self._open.clear()
            self._idle.clear()

    def _take(self, node: int, deadline_s: float) -> socket.socket:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            if idle := self._idle.get(node):
                return idle.pop()
        connection = self._connect(node, deadline_s)
        with self._lock:
            if not self._closed:
                self._open.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError("closed")

    def _drop(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)


def shut(connection: socket.socket) -> None:
    """Wake whoever waits on a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
