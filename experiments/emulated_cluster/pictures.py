"""Pictures like photographs, each with its number in it, as JPEG, PNG or raw files of a wanted size.

A photograph's amplitude spectrum falls as 1/f (Field 1987), which decides how well it compresses: at 500 x 375 pixels
and a high quality a JPEG file takes about 110 kB, ImageNet's average (138 GB in 1,281,167 files). A picture here is the
sum of two cut-outs of one large random field with that spectrum. The wanted size is then met in three steps: the number
of pixels follows the wanted bytes, the quality comes next, and bytes that no decoder looks at fill the rest exactly
(comment segments of JPEG, an ancillary chunk of PNG).

**The number.** The square in the middle of the picture is 6 x 6 cells; a cell brighter than half is a 1. The first 28
cells, by rows, are the number, highest bit first; the other 8 are a check of it. So a sample in the wrong place, or of
another data set, is noticed even after scaling, cutting out the centre, and JPEG's losses: `sample_number` reads it.

Source: Field, *Relations between the statistics of natural images and the response properties of cortical cells*,
JOSA A 4(12), 1987; ITU-T T.81 (JPEG), B.2.4.5: comments; W3C PNG specification, 11 and 5.3: chunks.
"""

import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simdist.errors import RunError, ScenarioError

GRID = 6
NUMBER_BITS, CHECK_BITS = 28, 8
MOST_SAMPLES = 1 << NUMBER_BITS
CONTRAST = 40.0  # how far a cell's mean lies from half: it survives scaling and the lowest quality used
TEXTURE = 38.0  # standard deviation of the brightness within cells, before clipping
FIELD_SIDE = 2048
LARGEST = (2000, 1500)  # width and height; what is larger is filled up
SMALLEST_SIDE = 4 * GRID

PHOTO = (500, 375)  # the commonest size in ImageNet
JPEG_NBYTES_PER_PIXEL = 0.587  # 110 kB / (500 * 375)
PNG_NBYTES_PER_PIXEL = 1.9  # measured on these pictures; only a first guess
QUALITIES = (30, 40, 50, 60, 70, 76, 82, 86, 89, 91, 93, 95)
COMMENT_NBYTES = 65533  # the largest content of a comment segment


@dataclass(frozen=True, slots=True, eq=False)
class NoiseField:
    """Holds the random field that pictures are cut from, float32 `[2, side, side]` of mean 0 and deviation 1."""

    values: NDArray[np.float32]


def make_field(seed: int) -> NoiseField:
    """Draw a field with a 1/f spectrum: brightness, and the smoother course of colour.

    It repeats itself after half its side, farther than any encoder looks.
    """
    side = FIELD_SIDE // 2
    rng = np.random.default_rng([seed, FIELD_SIDE])
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    frequency[0, 0] = np.inf  # no mean
    values = np.empty((2, FIELD_SIDE, FIELD_SIDE), np.float32)
    for plane, power in enumerate((1.0, 1.5)):
        white = np.fft.rfft2(rng.standard_normal((side, side), np.float32))
        plain = np.fft.irfft2(white / frequency**power, s=(side, side))
        values[plane] = np.tile(plain / plain.std(), (2, 2))
    return NoiseField(values)


def paint(field: NoiseField, rng: np.random.Generator, *, sample: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Paint a picture with its number in it.

    Args:
        field: From `make_field`.
        rng: Of this sample.
        sample: Its number, below 2**28.
        size: Width and height in pixels.

    Returns:
        uint8 `[height, width, 3]`.
    """
    brightness = _cut(field.values[0], rng, size) + _cut(field.values[0], rng, size)
    colour = _cut(field.values[1], rng, size)
    brightness *= TEXTURE / np.float32(np.sqrt(2))
    _write_number(brightness, sample)
    tint = rng.uniform(-18, 18, 3).astype(np.float32)
    tint -= tint.mean()
    picture = brightness[..., None] + colour[..., None] * tint
    return np.clip(picture + np.float32(128), 0, 255).astype(np.uint8)


def sample_number(image: NDArray[np.uint8]) -> int:
    """Read the number of a painted picture.

    Args:
        image: uint8 `[3, height, width]`: a decoded sample; its centre must be the picture's centre.

    Raises:
        RunError: It has none that its check confirms.
    """
    cells = _cells(image.mean(axis=0, dtype=np.float32))
    bits = 0
    for cell in cells:
        bits = bits << 1 | int(cell.mean() > 128)
    number = bits >> CHECK_BITS
    if bits != _coded(number):
        raise RunError("the picture holds no sample's number; this reads only those of data_set.py")
    return number


def raw_file(picture: NDArray[np.uint8]) -> bytes:
    """Return the decoded sample itself: uint8 `[3, height, width]`."""
    return np.ascontiguousarray(picture.transpose(2, 0, 1)).tobytes()


def jpeg_file(field: NoiseField, rng: np.random.Generator, *, sample: int, nbytes: int) -> bytes:
    """Paint a picture and encode it as a JPEG file of exactly `nbytes`.

    Raises:
        ScenarioError: No picture is that small.
    """
    size = _size_for(nbytes / JPEG_NBYTES_PER_PIXEL)
    while True:
        picture = Image.fromarray(paint(field, rng, sample=sample, size=size))
        if (content := _best_jpeg(picture, nbytes)) is not None:
            return _comment(content, nbytes - len(content), rng)
        size = _smaller(size, 0.8, nbytes)


def png_file(field: NoiseField, rng: np.random.Generator, *, sample: int, nbytes: int) -> bytes:
    """Paint a picture and encode it as a PNG file of exactly `nbytes`.

    Raises:
        ScenarioError: No picture is that small.
    """
    size = _size_for(nbytes / PNG_NBYTES_PER_PIXEL)
    while True:
        file = io.BytesIO()
        Image.fromarray(paint(field, rng, sample=sample, size=size)).save(file, "png", compress_level=1)
        content = file.getvalue()
        if len(content) == nbytes or len(content) + 12 <= nbytes:
            return _chunk(content, nbytes - len(content), rng)
        size = _smaller(size, min(0.97, (nbytes / len(content)) ** 0.5), nbytes)


def _cut(plane: NDArray[np.float32], rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.float32]:
    width, height = size
    top, left = rng.integers(0, (FIELD_SIDE - height + 1, FIELD_SIDE - width + 1))
    part = plane[top : top + height, left : left + width]
    upright, along = rng.integers(0, 2, 2) * 2 - 1
    return part[::upright, ::along].copy()


def _coded(number: int) -> int:
    """Return the 36 bits that stand for a number: itself and the lowest byte of its CRC-32."""
    return number << CHECK_BITS | zlib.crc32(number.to_bytes(4, "big")) & (1 << CHECK_BITS) - 1


def _cells(brightness: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return views of the cells of the square in the middle, by rows."""
    height, width = brightness.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    edges = [round(at * side / GRID) for at in range(GRID + 1)]
    return [
        brightness[top + edges[row] : top + edges[row + 1], left + edges[column] : left + edges[column + 1]]
        for row in range(GRID)
        for column in range(GRID)
    ]


def _write_number(brightness: NDArray[np.float32], sample: int) -> None:
    """Shift the mean of every cell to one side of 0; -1 is dark."""
    bits = _coded(sample)
    cells = _cells(brightness)
    for place, cell in enumerate(cells):
        bit = bits >> (len(cells) - 1 - place) & 1
        cell += np.float32(CONTRAST if bit else -CONTRAST) - cell.mean()


def _size_for(n_pixels: float) -> tuple[int, int]:
    scale = (n_pixels / (PHOTO[0] * PHOTO[1])) ** 0.5
    width, height = (
        min(most, max(SMALLEST_SIDE, round(scale * side))) for side, most in zip(PHOTO, LARGEST, strict=True)
    )
    return width, height


def _smaller(size: tuple[int, int], factor: float, nbytes: int) -> tuple[int, int]:
    width, height = int(size[0] * factor), int(size[1] * factor)
    if height < SMALLEST_SIDE:
        raise ScenarioError(f"{nbytes} bytes are too few for a picture; write 4 kB or more")
    return width, height


def _best_jpeg(picture: Image.Image, nbytes: int) -> bytes | None:
    """Encode with the best quality that leaves no more than `nbytes`, and a gap that a comment can fill."""
    best: bytes | None = None
    low, high = 0, len(QUALITIES)
    while low < high:
        middle = (low + high) // 2
        file = io.BytesIO()
        picture.save(file, "jpeg", quality=QUALITIES[middle])
        content = file.getvalue()
        if len(content) == nbytes or len(content) + 4 <= nbytes:
            best, low = content, middle + 1
        else:
            high = middle
    return best


def _comment(content: bytes, nbytes: int, rng: np.random.Generator) -> bytes:
    """Put comment segments of `nbytes` in all behind a JPEG file's first marker."""
    segments: list[bytes] = []
    while nbytes:
        length = min(nbytes - 4, COMMENT_NBYTES)
        if 0 < nbytes - 4 - length < 4:  # too little would be left for another segment
            length -= 4
        segments.append(struct.pack(">BBH", 0xFF, 0xFE, length + 2) + rng.bytes(length))
        nbytes -= 4 + length
    return b"".join((content[:2], *segments, content[2:]))


def _chunk(content: bytes, nbytes: int, rng: np.random.Generator) -> bytes:
    """Put a private ancillary chunk of `nbytes` in all before a PNG file's last chunk."""
    if not nbytes:
        return content
    named = b"fiLl" + rng.bytes(nbytes - 12)
    chunk = struct.pack(">I", nbytes - 12) + named + struct.pack(">I", zlib.crc32(named))
    return content[:-12] + chunk + content[-12:]
