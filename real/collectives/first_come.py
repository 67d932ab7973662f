"""An all-reduce over the first ranks that come: they come to rank 0, whose threads take them in order of arrival.

A rank says that it has come. If it is among the first, it sends its numbers; the sum is taken in the order of ranks
when those of all of them are there, so that it depends on who they are and not on who was first. Every rank gets the
sum when it asks for it, however late that is: rank 0 keeps it until the last rank has it.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from real.buffers.memory import DTYPES
from real.processes.messages import hear_hello, hello, receive, send
from simdist.errors import RunError

_HEAD = struct.Struct("<qqq16s")  # exchange, how many are first, bytes, type; nobody is first: is it over?
_RANK = struct.Struct("<q")
_GRACE_S = 5.0  # for what the server has to say about who is missing
_OVER, _FIRST, _LATE, _FAILED = b"o", b"f", b"l", b"x"


@dataclass(slots=True)
class _Exchange:
    """What rank 0 knows of an exchange: who came, in order, what the first sent, their sum, and who has it."""

    n_first: int
    came: list[int] = field(default_factory=list)
    sent: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    n_have_it: int = 0


class ArrivalServer:
    """Rank 0's threads, one for each rank; they end when the ranks close their connections.

    Args:
        host: Address of this machine that the others reach.
        key: That they must know.
        world_size: How many they are.
        timeout_s: How long a rank that has come waits for the others.

    Attributes:
        late: Of every exchange that is over, the ranks that were not among the first.
        sat_out: Of exchanges that some found over before their step began, those ranks.
    """

    def __init__(self, host: str, key: bytes, world_size: int, timeout_s: float) -> None:
        self.late: dict[int, tuple[int, ...]] = {}
        self.sat_out: dict[int, set[int]] = {}
        self._key, self._world_size, self._timeout_s = key, world_size, timeout_s
        self._exchanges: dict[int, _Exchange] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, name="arrivals", daemon=True).start()

    def _accept(self) -> None:
        left = self._world_size
        with contextlib.suppress(OSError), self._listener:
            self._listener.settimeout(self._timeout_s)
            while left:
                connection, _ = self._listener.accept()
                try:
                    rank = self._meet(connection)
                except OSError:  # a stranger
                    connection.close()
                    continue
                left -= 1
                threading.Thread(target=self._serve, args=(connection, rank), name="arrivals", daemon=True).start()

    def _meet(self, connection: socket.socket) -> int:
        deadline_s = time.monotonic() + _GRACE_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hear_hello(connection, self._key, "client", deadline_s=deadline_s)
        send(connection, [hello(self._key, "server")], deadline_s=deadline_s)
        rank = bytearray(_RANK.size)
        receive(connection, rank, deadline_s=deadline_s)
        return int(_RANK.unpack(rank)[0])

    def _serve(self, connection: socket.socket, rank: int) -> None:
        with connection:
            try:
                while True:
                    self._answer(connection, rank)
            except OSError:
                with self._changed:
                    self._gone.add(rank)
                    self._changed.notify_all()

    def _answer(self, connection: socket.socket, rank: int) -> None:
        head = bytearray(_HEAD.size)
        receive(connection, head, deadline_s=None)
        deadline_s = time.monotonic() + self._timeout_s + _GRACE_S
        number, n_first, nbytes, dtype = _HEAD.unpack(head)
        with self._changed:
            exchange = self._exchanges.get(number)
            if not n_first:
                is_over = exchange is not None and exchange.total is not None
                if is_over:
                    self.sat_out.setdefault(number, set()).add(rank)
            else:
                exchange = self._exchanges.setdefault(number, _Exchange(n_first))
                is_first = len(exchange.came) < n_first
                exchange.came.append(rank)
        if exchange is None or not n_first:
            send(connection, [_OVER if is_over else _LATE], deadline_s=deadline_s)
            return
        send(connection, [_FIRST if is_first else _LATE], deadline_s=deadline_s)
        if is_first:
            content = bytearray(nbytes)
            receive(connection, content, deadline_s=deadline_s)
            self._take(number, exchange, rank, torch.frombuffer(content, dtype=DTYPES[dtype.rstrip(b"\0").decode()]))
        total = self._await(exchange)
        if isinstance(total, str):
            text = total.encode()
            send(connection, [_FAILED, _RANK.pack(len(text)), text], deadline_s=deadline_s)
            return
        send(connection, [_OVER, total.view(torch.uint8).numpy().data], deadline_s=deadline_s)
        with self._changed:
            exchange.n_have_it += 1
            if exchange.n_have_it == self._world_size:
                del self._exchanges[number]

    def _take(self, number: int, exchange: _Exchange, rank: int, sent: Tensor) -> None:
        """Keep what one of the first has sent; with the last of them, add up."""
        with self._changed:
            exchange.sent[rank] = sent
            if len(exchange.sent) < exchange.n_first:
                return
            parts = [exchange.sent.pop(rank) for rank in sorted(exchange.sent)]
            total = parts[0]
            for part in parts[1:]:
                total += part
            exchange.total = total
            first = exchange.came[: exchange.n_first]
            self.late[number] = tuple(rank for rank in range(self._world_size) if rank not in first)
            self._changed.notify_all()

    def _await(self, exchange: _Exchange) -> Tensor | str:
        """Return the sum, or who is missing."""

        def is_decided() -> bool:
            missing = self._gone - set(exchange.sent)
            return exchange.total is not None or self._world_size - len(missing) < exchange.n_first

        with self._changed:
            self._changed.wait_for(is_decided, self._timeout_s)
            if exchange.total is not None:
                return exchange.total
            missing = sorted(set(range(self._world_size)) - set(exchange.sent))
            gone = sorted(self._gone)
        wanted = f"{exchange.n_first - self._world_size + len(missing)} of them"
        left = f"; of these, {', '.join(map(str, gone))} have left" if gone else ""
        return (
            f"ranks {', '.join(map(str, missing))} have not come within {self._timeout_s:g} s, and {wanted} must{left}"
        )


class ArrivalClient:
    """A rank's way to the server; a connection that is closed when this is forgotten.

    Args:
        address: Of the server.
        key: That it must know.
        rank: This rank.
        world_size: All of them.
        timeout_s: How long one that has come waits for the others.

    Raises:
        RunError: The server is not there.
    """

    def __init__(self, address: str, key: bytes, rank: int, world_size: int, timeout_s: float) -> None:
        self._world_size, self._timeout_s = world_size, timeout_s
        self._number = 0
        host, _, port = address.rpartition(":")
        with self._explained(0.0):
            deadline_s = time.monotonic() + timeout_s
            self._connection = socket.create_connection((host, int(port)), timeout=timeout_s)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send(self._connection, [hello(key, "client")], deadline_s=deadline_s)
            hear_hello(self._connection, key, "server", deadline_s=deadline_s)
            send(self._connection, [_RANK.pack(rank)], deadline_s=deadline_s)

    def is_over(self) -> bool:
        """Tell whether the next exchange has happened without this rank."""
        with self._explained(0.0) as deadline_s:
            send(self._connection, [_HEAD.pack(self._number, 0, 0, b"")], deadline_s=deadline_s)
            return self._hear(deadline_s) == _OVER

    def sum_of_first(self, buffer: Tensor, drop: int) -> None:
        """Replace a buffer by the sum over the ranks that come first, all but `drop`.

        Raises:
            RunError: Too few have come within the timeout; it names those that have not.
        """
        on_host = buffer.cpu().contiguous()
        content, name = on_host.view(torch.uint8).numpy(), str(buffer.dtype).removeprefix("torch.")
        with self._explained(self._timeout_s) as deadline_s:
            head = _HEAD.pack(self._number, self._world_size - drop, content.nbytes, name.encode())
            send(self._connection, [head], deadline_s=deadline_s)
            if self._hear(deadline_s) == _FIRST:
                send(self._connection, [content.data], deadline_s=deadline_s)
            if self._hear(deadline_s) == _FAILED:
                length = bytearray(_RANK.size)
                receive(self._connection, length, deadline_s=deadline_s)
                problem = bytearray(_RANK.unpack(length)[0])
                receive(self._connection, problem, deadline_s=deadline_s)
                raise RunError(problem.decode(errors="replace"))
            receive(self._connection, content, deadline_s=deadline_s)
        if buffer.is_cuda:
            buffer.copy_(on_host)
        self._number += 1

    def _hear(self, deadline_s: float) -> bytes:
        answer = bytearray(1)
        receive(self._connection, answer, deadline_s=deadline_s)
        return bytes(answer)

    @contextlib.contextmanager
    def _explained(self, patience_s: float) -> Iterator[float]:
        """Give a deadline; say of an exchange that fails where it was."""
        try:
            yield time.monotonic() + self._timeout_s + patience_s + 2 * _GRACE_S
        except OSError as error:
            raise RunError(f"rank 0, to which all ranks come with their gradients, does not answer: {error}") from None
