"""Messages that do not depend on one another."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Round:
    """Messages of one moment. Each carries neighbouring chunks of the vector.

    Args:
        src: Who sends, `[n_messages]`.
        dst: Who receives, likewise.
        first: First chunk of each message, likewise.
        length: Chunks of each message.
        share: Share of the vector's bytes in each message: one number, or one each.
        adds: The receiver adds what it gets; otherwise it puts it in the place of what it had.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    first: NDArray[np.int64]
    length: int
    share: float | NDArray[np.float64]
    adds: bool
