"""A client of peers that keeps the failures of each node."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from real.data.peers import PeerClient


class WatchedPeers(PeerClient):
    """Keeps the first failure of each node, after which its samples are read elsewhere for a while."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.failures: dict[int, OSError] = {}

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def _borrowed(self, node: int, *, deadline_s: float) -> Iterator[socket.socket]:
        try:
            with super()._borrowed(node, deadline_s=deadline_s) as connection:
                yield connection
        except OSError as error:
            self.failures.setdefault(node, error)
            raise
