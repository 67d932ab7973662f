"""From the bytes of a file to a sample: uint8 `[channels, height, width]`, the same shape for all."""

import io
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simdist.errors import RunError

Decode: TypeAlias = Callable[[bytes, NDArray[np.uint8], str], None]
"""Decodes a file into an array of a sample's shape; the name is for errors. Several threads call it at once."""

_MODES = {1: "L", 3: "RGB"}


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
    width, height = min(scale * wanted[0], size[0]), min(scale * wanted[1], size[1])
    left, upper = (size[0] - width) / 2, (size[1] - height) / 2
    return left, upper, min(left + width, size[0]), min(upper + height, size[1])
