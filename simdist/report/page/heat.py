"""Heat maps of seconds by step and rank: few enough cells for a page, packed for its script."""

import base64
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_STEPS, MOST_RANKS = 1024, 256  # cells along each side; more than most screens have pixels for
_DROPPED_BITS = 7  # of 23: numbers stay exact to 8e-6 of their size, and pack into two thirds


@dataclass(frozen=True)
class Cells:
    """Seconds summed over steps and ranks that lie beside each other.

    Args:
        seconds: float64 `[columns of steps, rows of ranks]`.
        steps_per_cell: Steps in each cell; fewer in the last column.
        ranks_per_cell: Ranks in each cell; fewer in the last row.
    """

    seconds: NDArray[np.float64]
    steps_per_cell: int
    ranks_per_cell: int


def cells(seconds: NDArray[np.float64]) -> Cells:
    """Sum seconds `[n_steps, world_size]` into as few cells as fit.

    >>> cells(np.ones((2049, 2))).seconds[[0, -1]]
    array([[3., 3.],
           [3., 3.]])
    """
    n_steps, world_size = seconds.shape
    steps, ranks = -(-n_steps // MOST_STEPS), -(-world_size // MOST_RANKS)
    summed = np.add.reduceat(seconds, np.arange(0, n_steps, steps), axis=0)
    return Cells(np.add.reduceat(summed, np.arange(0, world_size, ranks), axis=1), steps, ranks)


def packed(seconds: NDArray[np.float64]) -> str:
    """Return an array as base64 of deflated little-endian float32, step after step."""
    bits = seconds.astype("<f4").view("<u4")
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    rounded = (bits + half) & ~np.uint32((1 << _DROPPED_BITS) - 1)
    return base64.b64encode(zlib.compress(rounded.tobytes(), 9)).decode()


def unpacked(text: str) -> NDArray[np.float32]:
    """Return the numbers that the script of the page reads, flat.

    >>> unpacked(packed(np.array([[0.0, 0.5]]))).tolist()
    [0.0, 0.5]
    """
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<f4")
