"""A server of the emulated cluster that files are written to: `sink://HOST:PORT/name`, by fsspec.

    with network.cluster(4, rate_bps=400e6, servers_bps=[200e6]) as (*nodes, machine):
        with sink.serve(machine) as url:
            network.launch(nodes, 2, [WITH_SERVERS, "real", "RUN", "--checkpoints", url], timeout_s=300)

It takes files as they come and forgets them, so the link is what limits it. A file is written when the server says that
it has all of it.
"""

import io
import socket
import socketserver
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final
from urllib.parse import urlsplit

import fsspec
from fsspec import AbstractFileSystem

from simdist.errors import RunError

if TYPE_CHECKING:
    import network

_PORT = 7078
_TIMEOUT_S = 60.0
_LENGTH = struct.Struct("!Q")
_TAKEN = b"\1"


@final
class SinkFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Writes files to one server.

    Args:
        host: Its address.
        port: Its TCP port.
    """

    protocol = "sink"
    cachable = False

    def __init__(self, host: str, *, port: int = _PORT) -> None:
        super().__init__(use_listings_cache=False)
        self._place = (host, port)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + (urlsplit(path).path if path.startswith("sink://") else path).strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str | int]:
        parts = urlsplit(path)
        return {"host": parts.hostname or "", "port": parts.port or _PORT}

    def _open(self, path: str, mode: str = "rb", **_: object) -> "_Written":
        if mode != "wb":
            raise NotImplementedError(f"{path}: a sink takes files, and gives none back")
        return _Written(self._place)


class _Written(io.RawIOBase):
    """A file on its way: pieces with their lengths, then a length of 0, then the server's word."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._peer = socket.create_connection(place, timeout=_TIMEOUT_S)

    def writable(self) -> bool:
        return True

    def write(self, content: object) -> int:
        piece = memoryview(content).cast("B")  # type: ignore[arg-type]
        if len(piece):
            self._peer.sendall(_LENGTH.pack(len(piece)))
            self._peer.sendall(piece)
        return len(piece)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        with self._peer:
            self._peer.sendall(_LENGTH.pack(0))
            if self._peer.recv(1) != _TAKEN:
                raise OSError("the server has not taken all of it")


def register() -> None:
    """Let fsspec open `sink://HOST:PORT/name` for writing."""
    fsspec.register_implementation("sink", SinkFileSystem, clobber=True)


@contextmanager
def serve(machine: "network.Node") -> Iterator[str]:
    """Serve from a machine of the emulated cluster, until the block ends; the value is the URL.

    Raises:
        RunError: The server does not start.
    """
    import network

    command = network.realtime([sys.executable, __file__])
    with machine.run(command, output=subprocess.PIPE) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise RunError(f"the sink on {machine.address} does not start")
            yield f"sink://{machine.address}:{_PORT}"
        finally:
            process.kill()


class _Taking(socketserver.BaseRequestHandler):
    """Takes one file."""

    def handle(self) -> None:
        content = bytearray(1 << 20)
        peer: socket.socket = self.request
        while head := peer.recv(_LENGTH.size, socket.MSG_WAITALL):
            (left,) = _LENGTH.unpack(head)
            if not left:
                peer.sendall(_TAKEN)
                return
            while left:
                left -= peer.recv_into(content, min(left, len(content)))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 128


if __name__ == "__main__":
    with _Server(("", _PORT), _Taking) as server:
        print("ready", flush=True)
        server.serve_forever()
