"""Checkpoints that a plan writes with `Save`: files of each rank, in a folder or at another URL of fsspec."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, final

from fsspec.implementations.local import LocalFileSystem

from real.data.storages import filesystem_of
from simdist.errors import RunError, naming_file
from simdist.files import replacing

_PIECE_NBYTES = 1024**2


@final
class CheckpointFiles:
    """Writes the files of a rank. When `write` returns, a file is on the disk of the folder, or on its server.

    Args:
        url: A folder, which is created if missing, or another URL of fsspec.
        rank: Rank of the files.

    Raises:
        ScenarioError: The kind of URL is unknown.
        RunError: A library for it is missing, or the folder cannot be created.
    """

    def __init__(self, url: str, rank: int) -> None:
        self._url = url
        self.rank = rank
        self._piece = os.urandom(_PIECE_NBYTES)  # drawn beforehand, so that only writing takes time
        self._filesystem, self._root = filesystem_of(url)
        if isinstance(self._filesystem, LocalFileSystem):
            with naming_file(Path(self._root), "made a folder"):
                Path(self._root).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, fill: Callable[[IO[bytes]], object]) -> None:
        """Write a file of this rank; it replaces a file of the same name.

        Args:
            name: Such as `rank-00003.bin`.
            fill: Writes its contents.

        Raises:
            RunError: The file cannot be written. The error names rank and file.
        """
        path = f"{self._root}/{name}"
        try:
            if isinstance(self._filesystem, LocalFileSystem):
                with replacing(Path(path), on_disk=True) as part, part.open("wb") as file:
                    fill(file)
            else:
                with self._filesystem.open(path, "wb") as file:
                    fill(file)
        except Exception as error:  # from any library
            why = str(error) if isinstance(error, RunError) else f"{self._url}: {name}: cannot be written: {error}"
            raise RunError(f"checkpoint of rank {self.rank}: {why}") from error

    def write_bytes(self, nbytes: int) -> None:
        """Write a number of arbitrary bytes; they replace those of the last time."""

        def fill(file: IO[bytes]) -> None:
            for _ in range(nbytes // _PIECE_NBYTES):
                file.write(self._piece)
            file.write(self._piece[: nbytes % _PIECE_NBYTES])

        self.write(f"rank-{self.rank:05d}.bin", fill)
