"""Messages between processes of one run over TCP: authentication, and sends and receives with a deadline.

**Hello.** If a process is gone, another program may take its port, and samples have no checksum. So each side proves
that it knows the key of the run and data set, without sending the key: HMAC-SHA256(key, side). The client begins. A
server does not answer without proof. This excludes strangers, other runs and other data sets. It hides nothing from a
listener between nodes: run on a network that you trust. Source: RFC 2104 (HMAC).
"""

import hmac
import socket
import struct
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

HELLO = struct.Struct("<8s32s")  # `simdist3`, and the proof

_MAGIC = b"simdist3"
_BUFFERS_AT_ONCE = 512  # sendmsg(2) accepts IOV_MAX, 1024 on Linux


def hello(key: bytes, side: Literal["client", "server"]) -> bytes:
    """Return the first message of a side."""
    return HELLO.pack(_MAGIC, hmac.digest(key, side.encode(), "sha256"))


def _hear_hello(
    connection: socket.socket, key: bytes, side: Literal["client", "server"], *, deadline_s: float | None
) -> None:
    """Receive the first message of the other side."""
    message = bytearray(HELLO.size)
    receive(connection, message, deadline_s=deadline_s)
    if not message.startswith(_MAGIC):
        raise ConnectionAbortedError(f"does not serve samples: began with {bytes(message[: len(_MAGIC)])!r}")
    if not hmac.compare_digest(message, hello(key, side)):
        raise ConnectionAbortedError("is not of this run, or has another data set")


def greet(connection: socket.socket, key: bytes, *, deadline_s: float) -> None:
    """Prove to a server that this is a rank of the run, and receive its proof.

    Raises:
        OSError: See `_hear_hello`.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send_message(connection, [hello(key, "client")], deadline_s=deadline_s)
    _hear_hello(connection, key, "server", deadline_s=deadline_s)


def welcome(connection: socket.socket, key: bytes, *, deadline_s: float) -> None:
    """Receive the proof of a client, and send the proof of this server.

    Raises:
        OSError: See `_hear_hello`.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _hear_hello(connection, key, "client", deadline_s=deadline_s)
    send_message(connection, [hello(key, "server")], deadline_s=deadline_s)


def send_message(connection: socket.socket, buffers: Sequence[memoryview | bytes], *, deadline_s: float) -> None:
    """Send buffers one after the other, without copying them.

    Args:
        connection: Connection to the receiver.
        buffers: Bytes to send.
        deadline_s: Time of `time.monotonic`.

    Raises:
        OSError: The connection is broken, or the deadline has passed.
    """
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while left:
        connection.settimeout(_left_s(deadline_s))
        n_sent = connection.sendmsg(left[:_BUFFERS_AT_ONCE])
        n_done = 0
        while n_done < len(left) and n_sent >= len(left[n_done]):
            n_sent -= len(left[n_done])
            n_done += 1
        del left[:n_done]
        if n_sent:
            left[0] = left[0][n_sent:]


def receive(connection: socket.socket, into: bytearray | NDArray[np.uint8], *, deadline_s: float | None) -> None:
    """Fill a buffer.

    Args:
        connection: Connection to the sender.
        into: Buffer, with the number of bytes to receive.
        deadline_s: Time of `time.monotonic`; None waits for ever.

    Raises:
        OSError: The connection is broken or closed, or the deadline has passed.
    """
    left = memoryview(into) if isinstance(into, bytearray) else into.data
    while left:
        connection.settimeout(None if deadline_s is None else _left_s(deadline_s))
        n_received = connection.recv_into(left)
        if not n_received:
            raise ConnectionResetError("closed by the other side")
        left = left[n_received:]


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
