"""Sources of files, and their decoding into samples: uint8 `[channels, height, width]`, all of one shape.

A file is read from the node's disk if it is there, else from the storage server. It is compared with the index. On a
mismatch, it is read once more. A second mismatch is an error.
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
    """Reads and decodes files; several threads may use it at once."""

    index: SampleIndex
    storage: DataStorage
    decode: Decode
    shape: tuple[int, ...]
    files: FileCache | None = None

    def read(self, sample: int, *, planned: int = DISK, keep: bool) -> tuple[bytes, int]:
        """Return the file of a sample, and its source: `DISK` or `STORAGE`.

        Args:
            sample: Number of the sample.
            planned: With `STORAGE`, the disk is not tried, even if it still has a file that has left by plan.
            keep: The disk keeps a file from storage.

        Raises:
            RunError: Storage does not return the file, or it does not match the index. The error names the file.
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
            RunError: The file cannot be decoded. The error names it.
        """
        name = self.index.names[sample]
        try:
            self.decode(data, out.reshape(self.shape), name)
        except RunError:
            raise
        except Exception as error:
            raise RunError(f"{name}: decoding it failed: {type(error).__name__}: {error}") from error


def sample_shape(sample_nbytes: int) -> tuple[int, ...]:
    """Return the shape of a decoded sample: a square colour or grey image if the number of bytes fits one.

    >>> sample_shape(3 * 224 * 224), sample_shape(28 * 28), sample_shape(1000)
    ((3, 224, 224), (1, 28, 28), (1000,))
    """
    for n_channels in (3, 1):
        side = math.isqrt(sample_nbytes // n_channels)
        if n_channels * side * side == sample_nbytes:
            return n_channels, side, side
    return (sample_nbytes,)


def choose_decode(index: SampleIndex, shape: tuple[int, ...], url: str) -> Decode:
    """Return the decoder of a data set's files: `.raw` files are samples, others are images.

    Raises:
        ScenarioError: The files cannot become samples of that shape.
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
    """Use the bytes of a file as the sample.

    Raises:
        RunError: The number of bytes differs.
    """
    if len(data) != out.nbytes:
        raise RunError(f"{name}: {len(data)} bytes, a raw sample of shape {list(out.shape)} has {out.nbytes}")
    out[...] = np.frombuffer(data, np.uint8).reshape(out.shape)


def decode_image(data: bytes, out: NDArray[np.uint8], name: str) -> None:
    """Decode an image, scale it so that it just covers the sample's height and width, and crop its centre.

    A JPEG is decoded at an eighth, a quarter or a half of its size if that is still large enough.

    Args:
        data: A file in a format that Pillow reads.
        out: uint8 `[3, height, width]` for colours, `[1, height, width]` for grey.
        name: Name of the file, for errors.

    Raises:
        RunError: The file is not an image or is damaged, or `out` has other channels.
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
    """Return the largest centred box of the required proportions in an image: left, upper, right, lower."""
    scale = min(size[0] / wanted[0], size[1] / wanted[1])
    width = min(scale * wanted[0], size[0])
    height = min(scale * wanted[1], size[1])
    left = (size[0] - width) / 2
    upper = (size[1] - height) / 2
    return left, upper, min(left + width, size[0]), min(upper + height, size[1])
