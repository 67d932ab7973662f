"""Where the files of samples come from, and how they become samples: uint8 `[channels, height, width]`, all alike.

A file is taken from the node's disk where it is there, else from the storage server. Whatever comes is compared with
the index: a file that is not what the index says is read once more, and then it is an error.
"""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from real.data.filecache import FileCache
from real.data.sample_index import SampleIndex
from real.data.storages import DataStorage, read_sample
from simdist.caching.lookup import DISK, STORAGE
from simdist.errors import RunError, ScenarioError

# Decodes a file into an array of a sample's shape; the name is for errors. Several threads call it at once.
Decode: TypeAlias = Callable[[bytes, NDArray[np.uint8], str], None]

_RAW = ".raw"
_MODES = {1: "L", 3: "RGB"}


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

    index: SampleIndex
    storage: DataStorage
    decode: Decode
    shape: tuple[int, ...]
    files: FileCache | None = None

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


def sample_shape(sample_nbytes: int) -> tuple[int, ...]:
    """Return the shape of a decoded sample: a square image in colours or in grey, if its bytes make one.

    >>> sample_shape(3 * 224 * 224), sample_shape(28 * 28), sample_shape(1000)
    ((3, 224, 224), (1, 28, 28), (1000,))
    """
    for n_channels in (3, 1):
        side = math.isqrt(sample_nbytes // n_channels)
        if n_channels * side * side == sample_nbytes:
            return n_channels, side, side
    return (sample_nbytes,)


def choose_decode(index: SampleIndex, shape: tuple[int, ...], url: str) -> Decode:
    """Return what decodes the files of a data set: `.raw` files are samples as they are, others images.

    Raises:
        ScenarioError: They cannot become samples of that shape.
    """
    sample_nbytes = math.prod(shape)
    n_raw = sum(name.endswith(_RAW) for name in index.names)
    if n_raw == len(index):
        other = np.flatnonzero(index.nbytes != sample_nbytes)
        if len(other):
            raise ScenarioError(
                f"{url}: {index.names[other[0]]} has {index.nbytes[other[0]]:,} bytes; a raw file is a sample of "
                f"workload.sample_size, {sample_nbytes:,} bytes"
            )
        return decode_raw
    if n_raw:
        raise ScenarioError(f"{url}: {n_raw:,} of {len(index):,} files are {_RAW}; samples are all raw, or all images")
    if len(shape) != 3:
        raise ScenarioError(
            f"{url}: images are decoded to squares, and samples of workload.sample_size, {sample_nbytes:,} bytes, are "
            f"none; write e.g. 150528 B for 3 x 224 x 224"
        )
    return decode_image


def decode_raw(data: bytes, out: NDArray[np.uint8], name: str) -> None:
    """Take the bytes of a file as the sample.

    Raises:
        RunError: They are not as many.
    """
    if len(data) != out.nbytes:
        raise RunError(f"{name}: {len(data)} bytes, a raw sample of shape {list(out.shape)} has {out.nbytes}")
    out[...] = np.frombuffer(data, np.uint8).reshape(out.shape)


def decode_image(data: bytes, out: NDArray[np.uint8], name: str) -> None:
    """Decode an image, scale it so that it just covers the sample's height and width, and cut out its centre.

    A JPEG is decoded at an eighth, a quarter or a half of its size where that is still large enough: much less work.

    Args:
        data: A file in a format that Pillow reads.
        out: uint8 `[3, height, width]` for colours, `[1, height, width]` for grey.
        name: Of the file, for errors.

    Raises:
        RunError: It is no image, or damaged, or `out` has other channels.
    """
    channels, height, width = out.shape
    if channels not in _MODES:
        raise RunError(f"{name}: images become samples of 1 or 3 channels, not of {channels}")
    mode = _MODES[channels]
    try:
        with Image.open(io.BytesIO(data)) as image:
            scale = max(width / image.width, height / image.height)
            image.draft(mode, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
            coloured = image.convert(mode)
        scaled = coloured.resize((width, height), Image.Resampling.BILINEAR, _centre(coloured.size, (width, height)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RunError(f"{name}: {len(data)} bytes that are no whole image: {error}") from error
    out[...] = np.asarray(scaled).reshape(height, width, channels).transpose(2, 0, 1)


def _centre(size: tuple[int, int], wanted: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the largest box of the wanted proportions in the middle of an image: left, upper, right, lower."""
    scale = min(size[0] / wanted[0], size[1] / wanted[1])
    width = min(scale * wanted[0], size[0])
    height = min(scale * wanted[1], size[1])
    left = (size[0] - width) / 2
    upper = (size[1] - height) / 2
    return left, upper, min(left + width, size[0]), min(upper + height, size[1])
