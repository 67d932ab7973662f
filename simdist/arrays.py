"""Arrays from files: what a file declares is compared with what is expected before memory is taken for it.

Both formats of numpy say in front of an array how large it is. A few kilobytes may declare, and compressed ones even
hold, any number of gigabytes. So an array is read only when its header, the size of its member and the size of the file
agree, and a compressed one only up to a ratio that numbers do not reach unless they are all equal.
"""

import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simdist.files import open_regular

#: Where the shape is not known, an array has no more bytes.
MAX_ARRAY_NBYTES = 1 << 30
_MAX_RATIO = 100  # of equal numbers zlib makes 1,030 times less, of delays of which 2 % are not 0, 30 times
_FREE_NBYTES = 64 << 20  # may have any ratio
_MAX_READ_NBYTES = 1 << 20  # at once; also the directory of an archive, some tens of thousands of members


class ArrayError(ValueError):
    """An array is not as it is declared, or too large."""


class Declared(NamedTuple):
    """Dtype and shape that an array has by its header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
class ArrayFile:
    """The arrays of an .npz file; see `open_arrays`.

    Attributes:
        names: Of the arrays, in the order of the file.
    """

    def __init__(self, archive: zipfile.ZipFile, nbytes: int) -> None:
        self._archive = archive
        self._nbytes = nbytes
        self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        self.names = tuple(self._members)

    def declared(self, name: str) -> Declared:
        """Return what an array is by its header.

        Raises:
            KeyError: There is no such array.
            ArrayError: Its header is not that of the array that follows.
        """
        info = self._members[name]
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArrayError(f"{name} is compressed by method {info.compress_type}; numpy stores, or deflates")
        with self._archive.open(info) as member:
            declared = _header(name, member, info.file_size)
        packed = min(info.compress_size, self._nbytes)
        most_nbytes = packed
        if info.compress_type == zipfile.ZIP_DEFLATED:
            most_nbytes = min(max(_MAX_RATIO * packed, _FREE_NBYTES), MAX_ARRAY_NBYTES)
        if declared.nbytes > most_nbytes:
            raise ArrayError(
                f"{name} has {declared.nbytes:,} bytes in {packed:,} bytes of the file; at most {most_nbytes:,} are "
                f"read: write it with numpy.savez, uncompressed"
            )
        return declared

    def read(self, name: str, *, most_nbytes: int = MAX_ARRAY_NBYTES) -> NDArray[Any]:
        """Return an array.

        Args:
            name: Of the array.
            most_nbytes: A larger one is refused.

        Raises:
            KeyError: There is no such array.
            ArrayError: It is not as it is declared, or too large.
        """
        if (found := self.declared(name)).nbytes > most_nbytes:
            raise ArrayError(
                f"{name} is {found.dtype} {found.shape}: {found.nbytes:,} bytes; write {most_nbytes:,} or less"
            )
        with self._archive.open(self._members[name]) as member:
            return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


@contextmanager
def open_arrays(path: Path | str) -> Iterator[ArrayFile]:
    """Open an .npz file.

    Raises:
        OSError: It cannot be opened, or is no regular file.
        BadZipFile: It is no archive; what damage raises besides, numpy and zipfile do not say.
    """
    with _InParts(open_regular(path).detach()) as file, zipfile.ZipFile(file) as archive:
        yield ArrayFile(archive, os.fstat(file.fileno()).st_size)


def read_array(path: Path | str, *, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the array of an .npy file, which has this dtype and shape.

    Raises:
        OSError: It cannot be opened, or is no regular file.
        ArrayError: It is another array, or not as it is declared.
    """
    with open_regular(path) as file:
        found = _header("the array", file, os.fstat(file.fileno()).st_size)
        if found != (np.dtype(dtype), shape):
            raise ArrayError(f"holds {found.dtype} {found.shape} instead of {np.dtype(dtype)} {shape}")
        file.seek(0)
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


class _InParts(BufferedReader):
    """A file of which nothing is read that a few bytes in it claim to be large."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # the end of an archive, some kilobytes
            return super().read(_MAX_READ_NBYTES)
        if size > _MAX_READ_NBYTES:
            raise ArrayError(f"the directory of the archive has {size:,} bytes: it is damaged")
        return super().read(size)


def _header(name: str, file: IO[bytes], file_nbytes: int) -> Declared:
    """Read the header of an array; the rest of its file must be as long as it says."""
    if (version := np.lib.format.read_magic(file)) != (1, 0):  # later ones are for records with many fields
        raise ArrayError(f"{name} is of version {version} of the format; numpy.save writes (1, 0) for numbers")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    declared = Declared(dtype, shape)
    found = file_nbytes - file.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects instead of numbers")
    if declared.nbytes != found:
        raise ArrayError(f"{name} is {dtype} {shape}, {declared.nbytes:,} bytes, by its header; {found:,} follow")
    return declared
