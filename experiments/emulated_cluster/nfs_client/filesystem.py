"""A read-only fsspec file system over NFS, for processes that may not mount: `nfs://HOST/EXPORT/path?version=4`.

register()
fsspec.open("nfs://10.0.0.1/export/set/1.jpg?version=4")
"""

import io
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Literal, TypedDict, TypeVar, final
from urllib.parse import parse_qsl, unquote, urlsplit

import fsspec
from fsspec import AbstractFileSystem

from nfs_client.connection import Connection, load_library
from nfs_client.messages import Attributes
from simdist.errors import ScenarioError

PORT = 2049  # RFC 7530, section 3.1
REQUEST_S = 10.0  # for one request, of which a large file takes many
CONNECT_S = 5.0  # to be connected; TCP asks again after 1 and after 3 s

_Answer = TypeVar("_Answer")


class _Info(TypedDict):
    """Fields of fsspec's `info` and `ls`."""

    name: str
    size: int
    type: Literal["file", "directory", "link", "other"]


@final
class NfsFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads files of one NFS server; any number of threads may use it, each request has a connection for itself.

    Connections are kept for the next request; one that failed is not. A forked child starts with none, because two
    processes on one connection would take each other's answers. Symbolic links are not followed.

    Args:
        host: Name or address of the server.
        port: TCP port of NFS there.
        request_s: Longest time for one request.

    Raises:
        RunError: libnfs is not installed.
    """

    protocol = "nfs"
    cachable = False  # closing one must not close another one's connections

    def __init__(self, host: str, *, port: int = PORT, request_s: float = REQUEST_S) -> None:
        super().__init__(use_listings_cache=False)
        self.host = host
        self.port = port
        self.request_s = request_s
        self._library = load_library()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._pid = os.getpid()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        if path.startswith("nfs://"):
            path = unquote(urlsplit(path).path)
        return "/" + path.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str | int]:
        return _server_of(path) if path.startswith("nfs://") else {}

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        """Read a file, or the part from `start` to `end` of it (which reads it all).

        Args:
            path: From the server's root.
            start: As in a slice.
            end: As in a slice.
            timeout_s: For all of it, besides the limit of each request; None: no such limit.

        Raises:
            OSError: Of the kind that says what the server answers; `ConnectionError` or `TimeoutError` in an outage.
        """
        content = self._perform(lambda each, until: each.read(path, deadline_s=until), timeout_s)
        return content if start is None and end is None else content[start:end]

    def info(self, path: str) -> _Info:
        """Say what is at `path`: its name, size and type."""
        path = self._strip_protocol(path)
        return _info(path, self._perform(lambda each, until: each.attributes(path, deadline_s=until), None))

    def ls(self, path: str, detail: bool = True) -> list[_Info] | list[str]:
        """List a directory, or the one file at `path`: names from the server's root, or infos."""
        path = self._strip_protocol(path)
        infos = [self.info(path)]
        if infos[0]["type"] == "directory":
            entries = self._perform(lambda each, until: each.entries(path, deadline_s=until), None)
            infos = [_info(str(PurePosixPath(path, entry.name)), entry.attributes) for entry in entries]
        return infos if detail else [each["name"] for each in infos]

    def close(self) -> None:
        """Drop the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _open(self, path: str, mode: str = "rb", **_options: object) -> io.BytesIO:
        if mode != "rb":
            raise PermissionError(f"{path}: mode {mode}; files are only read here (rb)")
        return io.BytesIO(self.cat_file(path))

    def _perform(self, request: Callable[[Connection, float], _Answer], timeout_s: float | None) -> _Answer:
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        connection = self._take(deadline_s)
        try:
            return request(connection, deadline_s)
        except BaseException as error:
            connection.broken |= not isinstance(error, OSError)  # interrupted: its answer is still to come
            raise
        finally:
            self._put(connection)

    def _take(self, deadline_s: float) -> Connection:
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._idle = os.getpid(), []
            if self._idle:
                return self._idle.pop()
        deadline_s = min(deadline_s, time.monotonic() + min(CONNECT_S, self.request_s))
        return Connection(self._library, self.host, port=self.port, request_s=self.request_s, deadline_s=deadline_s)

    def _put(self, connection: Connection) -> None:
        if connection.broken:
            connection.close()
            self.close()  # those that idle are as broken, most likely: let the next try make a new one
            return
        with self._lock:
            self._idle.append(connection)


def register() -> None:
    """Let fsspec open `nfs://HOST/EXPORT/path?version=4&nfsport=PORT`, as libnfs writes it; only version 4 is read."""
    fsspec.register_implementation("nfs", NfsFileSystem, clobber=True)


def _server_of(url: str) -> dict[str, str | int]:
    """Return host and port of a URL.

    Raises:
        ScenarioError: The URL is wrong.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    version, port = options.pop("version", "4"), options.pop("nfsport", str(PORT))
    if not parts.hostname or not parts.path.strip("/"):
        raise ScenarioError(f"write nfs://HOST/EXPORT/path?version=4&nfsport={PORT}")
    if options:
        raise ScenarioError(f"{sorted(options)[0]} is no option here; these are: version, nfsport")
    if version != "4":
        raise ScenarioError(f"version={version}: only 4 is read without a mount; mount older ones")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ScenarioError(f"nfsport={port}: a port is a number from 1 to 65535")
    return {"host": parts.hostname, "port": int(port)}


def _info(name: str, attributes: Attributes) -> _Info:
    return {"name": name, "size": attributes.nbytes, "type": attributes.kind}
