"""Where the files of samples come from, and how they become samples: the lower levels, without memory.

A file is taken from the node's disk where it is there, else from the storage server. Whatever comes is compared with
the index: a file that is not what the index says is read once more, and then it is an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from real.data.decoding import Decode
from real.data.index import Index
from real.data.storages import Storage, read_sample
from simdist.caching.batches import DISK, MEMORY, PEER, STORAGE
from simdist.errors import RunError

__all__ = ["DISK", "MEMORY", "PEER", "STORAGE", "Files", "Sources"]


class Files(Protocol):
    """Holds files on a node's disk."""

    def fetch(self, sample: int, read: Callable[[], bytes], *, keep: bool) -> bytes:
        """Return a file that is there, or else read it, and keep it if told."""
        ...

    def evict(self, sample: int) -> object:
        """Drop a file."""
        ...


@dataclass(frozen=True, slots=True)
class Sources:
    """Reads files and decodes them; several threads do at once.

    Args:
        index: Of the data set.
        storage: Of its files.
        decode: File to sample.
        shape: Of a sample.
        files: On this node's disk, if it keeps any.
    """

    index: Index
    storage: Storage
    decode: Decode
    shape: tuple[int, ...]
    files: Files | None = None

    @property
    def sample_nbytes(self) -> int:
        """Bytes of a decoded sample."""
        return int(np.prod(self.shape))

    def read(self, sample: int, *, planned: int = DISK, keep: bool) -> tuple[bytes, int]:
        """Return a sample's file, and where it came from: `DISK` or `STORAGE`.

        Args:
            sample: Which.
            planned: With `STORAGE` the disk is not asked, even if what has left it by plan is still there.
            keep: Whether the disk keeps what comes from storage.

        Raises:
            RunError: Storage does not give it, or not what the index says; names the file.
        """
        came_from = DISK

        def read() -> bytes:
            nonlocal came_from
            came_from = STORAGE
            return read_sample(self.storage, self.index[sample])

        if self.files is None or (planned == STORAGE and not keep):
            return read(), came_from
        if planned == STORAGE:
            data = read()
            self.files.fetch(sample, lambda: data, keep=True)
            return data, came_from
        return self.files.fetch(sample, read, keep=keep), came_from

    def decode_into(self, sample: int, data: bytes, out: NDArray[np.uint8]) -> None:
        """Decode a sample's file.

        Raises:
            RunError: It cannot be decoded; names the file.
        """
        name = self.index.names[sample]
        try:
            self.decode(data, out.reshape(self.shape), name)
        except RunError:
            raise
        except Exception as error:
            raise RunError(f"{name}: decoding it failed: {type(error).__name__}: {error}") from error
