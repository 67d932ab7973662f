"""Checkpoints that a plan writes with `Save`: files of each rank, in a folder or at another URL of fsspec.

`step-000099-rank-00003.pt` is what rank 3 has written in step 99, that is, the state before step 100.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, final

from fsspec.implementations.local import LocalFileSystem

from real.data.storages import filesystem_of
from simdist.errors import RunError, naming_file
from simdist.files import replacing

_PIECE_NBYTES = 1024**2
_NAME = re.compile(r"step-(\d+)-rank-(\d+)(\.\w+)")


def _file_name(step: int, rank: int, suffix: str) -> str:
    """Return the name of the file that a rank writes in a step."""
    return f"step-{step:06d}-rank-{rank:05d}{suffix}"


@final
class CheckpointFiles:
    """Writes the files of a rank. When `write` returns, a file is on the disk of the folder, or on its server.

    Args:
        url: A folder, which is created if missing, or another URL of fsspec.
        rank: Rank of the files.
        suffix: End of the names of files of a step.
        keep: Newest files of steps that are kept while another one is written; all if None.

    Attributes:
        url: The folder, or another URL of fsspec.
        rank: Rank of the files.

    Raises:
        ScenarioError: The kind of URL is unknown.
        RunError: A library for it is missing, or the folder cannot be created.
    """

    def __init__(self, url: str, rank: int, suffix: str = ".pt", keep: int | None = None) -> None:
        self.url = url
        self.rank = rank
        self._suffix = suffix
        self._keep = keep
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
        self.delete_old()
        try:
            if isinstance(self._filesystem, LocalFileSystem):
                with replacing(Path(path), on_disk=True) as part, part.open("wb") as file:
                    fill(file)
            else:
                with self._filesystem.open(path, "wb") as file:
                    fill(file)
        except Exception as error:  # from any library
            why = str(error) if isinstance(error, RunError) else f"{self.url}: {name}: cannot be written: {error}"
            raise RunError(f"checkpoint of rank {self.rank}: {why}") from error

    def name(self, step: int) -> str:
        """Return the name of the file that this rank writes in a step."""
        return _file_name(step, self.rank, self._suffix)

    def write_bytes(self, nbytes: int, name: str) -> None:
        """Write a number of arbitrary bytes."""

        def fill(file: IO[bytes]) -> None:
            for _ in range(nbytes // _PIECE_NBYTES):
                file.write(self._piece)
            file.write(self._piece[: nbytes % _PIECE_NBYTES])

        self.write(name, fill)

    def steps(self) -> list[int]:
        """Return the steps in which this rank has written the files that are there, ascending.

        Raises:
            RunError: The folder cannot be read.
        """
        with self._reading(self.url):
            self._filesystem.invalidate_cache()
            names = [str(path).rpartition("/")[2] for path in self._filesystem.ls(self._root, detail=False)]
        found = filter(None, map(_NAME.fullmatch, names))
        return sorted(int(each[1]) for each in found if (int(each[2]), each[3]) == (self.rank, self._suffix))

    def has(self, step: int, rank: int) -> bool:
        """Tell whether the file that a rank writes in a step is there."""
        return bool(self._filesystem.exists(self._path(step, rank)))

    def read(self, step: int, rank: int) -> bytes:
        """Return the file that a rank has written in a step.

        Raises:
            RunError: It cannot be read.
        """
        name = _file_name(step, rank, self._suffix)
        with self._reading(f"{self.url}: {name}"):
            return bytes(self._filesystem.cat_file(self._path(step, rank)))

    def delete_old(self) -> None:
        """Delete files that are not to be kept.

        Raises:
            RunError: One cannot be deleted.
        """
        for step in self.steps()[: -self._keep] if self._keep else []:
            self.delete(step)

    def delete(self, step: int) -> None:
        """Delete the file that this rank has written in a step.

        Raises:
            RunError: It cannot be deleted.
        """
        with self._reading(f"{self.url}: {_file_name(step, self.rank, self._suffix)}"):
            self._filesystem.rm_file(self._path(step, self.rank))

    def _path(self, step: int, rank: int) -> str:
        return f"{self._root}/{_file_name(step, rank, self._suffix)}"

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # from any library
            why = f"{type(error).__name__}: {error}"
            raise RunError(
                f"checkpoint on rank {self.rank}: {what}: cannot be read ({why}); all ranks need to reach the folder"
            ) from error
