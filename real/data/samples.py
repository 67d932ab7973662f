"""What every store of decoded samples can do, whatever it is made of."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from simdist.errors import RunError

Pixels: TypeAlias = NDArray[np.uint8] | Tensor
"""A decoded sample in host memory, uint8, contiguous."""


class SampleStore(Protocol):
    """Keeps decoded samples."""

    def put(self, sample: int, data: Pixels, *, number: int = 0) -> bool:
        """Keep a sample from load `number` on; return False if there is no room."""
        ...

    def get(self, sample: int, out: Pixels) -> bool:
        """Copy a sample to `out`; return False if it is not there, and then `out` holds anything."""
        ...

    def get_many(self, samples: Sequence[int], outs: Sequence[Pixels]) -> list[bool]:
        """Copy several samples; return which were there."""
        ...

    def evict(self, sample: int, *, number: int | None = None) -> bool:
        """Drop a sample, unless a load after `number` has kept it again; return whether it was dropped."""
        ...

    def __contains__(self, sample: int) -> bool:
        """Return whether a sample is there now."""
        ...


def flat(data: Pixels, nbytes: int, sample: int) -> NDArray[np.uint8]:
    """Return a sample's bytes as a vector, without a copy.

    Raises:
        RunError: It has another size or type, or is not contiguous.
    """
    array: NDArray[np.uint8] = data.numpy() if isinstance(data, Tensor) else data
    if array.dtype != np.uint8 or array.nbytes != nbytes or not array.flags.c_contiguous:
        raise RunError(
            f"sample {sample}: {array.dtype} {list(array.shape)} of strides {array.strides}; "
            f"must be contiguous uint8 of {nbytes} bytes"
        )
    return array.reshape(-1)
