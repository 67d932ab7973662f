"""An all-reduce over the first ranks to arrive. Ranks report to threads of rank 0, which take them in order.

A rank reports its arrival to rank 0. If it is among the first, it sends each server its part of the numbers. Rank 0 is
also a server. When the parts of all first ranks are there, a server adds them up in the order of ranks, so that the sum
depends on the set of first ranks and not on their order. Each rank gets the sum when it asks for it, however late: a
server keeps it until the last rank has it.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from real.buffers.memory import TORCH_DTYPES
from real.processes.messages import greet, receive, send_message, welcome
from simdist.errors import RunError
from simdist.plan import Servers

_HEAD = struct.Struct("<cqqq16s")  # kind, exchange, number of first ranks, bytes, type
_RANK = struct.Struct("<q")
_GRACE_S = 5.0  # for the server's answer on missing ranks
# Kinds of heads. A member that pushes then pulls.
_IS_IT_OVER = b"?"
_COME = b"c"
_PUSH = b"+"
_PULL = b"-"
_OVER = b"o"
_FIRST = b"f"
_LATE = b"l"
_FAILED = b"x"


@dataclass(slots=True)
class _Exchange:
    """State of an exchange on a server: arrivals (on rank 0), parts of the first ranks, their sum, its receivers."""

    n_first: int = 0
    n_came: int = 0
    sent: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    n_have_it: int = 0


class ArrivalServer:
    """The threads of a server, one for each rank; they end when the ranks close their connections.

    Args:
        host: Address of this machine for the others.
        key: The key that ranks must know.
        world_size: Number of ranks.
        timeout_s: How long a rank that has arrived waits for the others.

    Attributes:
        late: Exchange -> ranks that were not among the first, for each finished exchange.
        sat_out: On rank 0: exchange -> ranks that found it finished before they began its step.
    """

    def __init__(self, host: str, key: bytes, world_size: int, timeout_s: float) -> None:
        self.late: dict[int, tuple[int, ...]] = {}
        self.sat_out: dict[int, set[int]] = {}
        self._key = key
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._exchanges: dict[int, _Exchange] = {}
        self._gone: list[int] = []  # in the order of leaving
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
                except OSError:  # not a rank of this run
                    connection.close()
                    continue
                left -= 1
                threading.Thread(target=self._serve, args=(connection, rank), name="arrivals", daemon=True).start()

    def _meet(self, connection: socket.socket) -> int:
        deadline_s = time.monotonic() + _GRACE_S
        welcome(connection, self._key, deadline_s=deadline_s)
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
                    self._gone.append(rank)
                    self._changed.notify_all()

    def _answer(self, connection: socket.socket, rank: int) -> None:
        head = bytearray(_HEAD.size)
        receive(connection, head, deadline_s=None)
        deadline_s = time.monotonic() + self._timeout_s + _GRACE_S
        what, number, n_first, nbytes, dtype = _HEAD.unpack(head)
        with self._changed:
            exchange = self._exchanges.setdefault(number, _Exchange())
            exchange.n_first = n_first or exchange.n_first
            is_over = exchange.total is not None
            if what == _IS_IT_OVER and is_over:
                self.sat_out.setdefault(number, set()).add(rank)
            exchange.n_came += what == _COME
            is_first = what == _COME and exchange.n_came <= n_first
        if what in (_IS_IT_OVER, _COME):
            send_message(connection, [_FIRST if is_first else _OVER if is_over else _LATE], deadline_s=deadline_s)
            return
        if what == _PUSH:
            content = bytearray(nbytes)
            receive(connection, content, deadline_s=deadline_s)
            self._take(
                number, exchange, rank, torch.frombuffer(content, dtype=TORCH_DTYPES[dtype.rstrip(b"\0").decode()])
            )
        total = self._await(exchange)
        deadline_s = time.monotonic() + self._timeout_s + _GRACE_S  # it may first receive the data of others
        if isinstance(total, str):
            text = total.encode()
            send_message(connection, [_FAILED, _RANK.pack(len(text)), text], deadline_s=deadline_s)
            return
        send_message(connection, [_OVER, total.view(torch.uint8).numpy().data], deadline_s=deadline_s)
        with self._changed:
            exchange.n_have_it += 1
            if exchange.n_have_it == self._world_size:
                del self._exchanges[number]

    def _take(self, number: int, exchange: _Exchange, rank: int, sent: Tensor) -> None:
        """Keep the part of one of the first ranks; with the last part, add up."""
        with self._changed:
            exchange.sent[rank] = sent
            if len(exchange.sent) < exchange.n_first:
                return
            self.late[number] = tuple(rank for rank in range(self._world_size) if rank not in exchange.sent)
            parts = [exchange.sent.pop(rank) for rank in sorted(exchange.sent)]
            total = parts[0]
            for part in parts[1:]:
                total += part
            exchange.total = total
            self._changed.notify_all()

    def _await(self, exchange: _Exchange) -> Tensor | str:
        """Return the sum, or the missing ranks."""

        def is_decided() -> bool:
            missing = set(self._gone) - set(exchange.sent)
            return exchange.total is not None or self._world_size - len(missing) < exchange.n_first

        with self._changed:
            self._changed.wait_for(is_decided, self._timeout_s)
            if exchange.total is not None:
                return exchange.total
            missing = sorted(set(range(self._world_size)) - set(exchange.sent))
            left = ", then ".join(f"rank {rank}" for rank in self._gone if rank in missing)
            is_short = is_decided()
        if is_short:
            return f"{exchange.n_first} of {self._world_size} ranks must come, but first {left} left"
        wanted = f"{exchange.n_first - self._world_size + len(missing)} of them"
        has_left = f"; of these, {left} left" if left else ""
        return (
            f"ranks {', '.join(map(str, missing))} have not come within {self._timeout_s:g} s, "
            f"and {wanted} must{has_left}"
        )


class ArrivalClient:
    """A rank's connections to the servers, which are closed when this object is deleted.

    Args:
        addresses: Rank -> address of its server; rank 0 has one.
        key: The key that ranks must know.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: How long a rank that has arrived waits for the others.

    Raises:
        RunError: A server cannot be reached.
    """

    def __init__(self, addresses: Mapping[int, str], key: bytes, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._number = 0
        self._connections: dict[int, socket.socket] = {}
        deadline_s = time.monotonic() + timeout_s  # for all of them together
        for server, address in addresses.items():
            host, _, port = address.rpartition(":")
            with _explained(server):
                self._connections[server] = made = socket.create_connection((host, int(port)), timeout=timeout_s)
                greet(made, key, deadline_s=deadline_s)
                send_message(made, [_RANK.pack(rank)], deadline_s=deadline_s)

    def is_over(self) -> bool:
        """Tell whether the next exchange has happened without this rank."""
        return self._ask(_IS_IT_OVER) == _OVER

    def sum_of_first(self, buffer: Tensor, drop: int, servers: Servers) -> None:
        """Replace a buffer by the sum over the first ranks to arrive, all but `drop`; `servers` hold parts of it.

        As in `real.collectives.servers`, each rank begins with the nearest server.

        Raises:
            RunError: Too few ranks have arrived within the timeout. The error names the missing ones.
        """
        on_host = buffer.cpu().contiguous()
        name = str(buffer.dtype).removeprefix("torch.").encode()
        parts = [part.view(torch.uint8).numpy() for part in on_host.split(list(servers.parts))]
        n_first = self._world_size - drop
        begin = self._rank * len(parts) // self._world_size
        held = [*zip(servers.members, parts, strict=True)]
        held = [(server, part) for server, part in (*held[begin:], *held[:begin]) if part.nbytes]
        is_first = self._ask(_COME, n_first) == _FIRST
        deadline_s = time.monotonic() + 2 * (self._timeout_s + _GRACE_S)
        for server, part in held:
            head = _HEAD.pack(_PUSH if is_first else _PULL, self._number, n_first, part.nbytes, name)
            with _explained(server):
                message = [head, part.data] if is_first else [head]
                send_message(self._connections[server], message, deadline_s=deadline_s)
        for server, part in held:
            with _explained(server):
                self._pull(self._connections[server], part, deadline_s)
        if buffer.is_cuda:
            buffer.copy_(on_host)
        self._number += 1

    def _ask(self, what: bytes, n_first: int = 0) -> bytes:
        """Return the answer of rank 0."""
        deadline_s = time.monotonic() + self._timeout_s + 2 * _GRACE_S
        with _explained(0):
            send_message(self._connections[0], [_HEAD.pack(what, self._number, n_first, 0, b"")], deadline_s=deadline_s)
            return _hear(self._connections[0], 1, deadline_s)

    def _pull(self, connection: socket.socket, part: NDArray[np.uint8], deadline_s: float) -> None:
        if _hear(connection, 1, deadline_s) == _FAILED:
            length = _RANK.unpack(_hear(connection, _RANK.size, deadline_s))[0]
            raise RunError(_hear(connection, length, deadline_s).decode(errors="replace"))
        receive(connection, part, deadline_s=deadline_s)


def _hear(connection: socket.socket, nbytes: int, deadline_s: float) -> bytes:
    heard = bytearray(nbytes)
    receive(connection, heard, deadline_s=deadline_s)
    return bytes(heard)


@contextlib.contextmanager
def _explained(server: int) -> Iterator[None]:
    """Add the place of an exchange to its error."""
    try:
        yield
    except OSError as error:
        raise RunError(f"rank {server}, to which ranks come with their gradients, does not answer: {error}") from None
