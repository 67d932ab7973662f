"""Where a magnitude stands between 0, the mean and the maximum: the scale on which MSTopK bisects."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scale:
    """Thresholds at equal distances: 2^N from the mean to the maximum, 2^N from 0 to the mean. All of shape `[]`."""

    mean: Tensor
    up: Tensor
    """Thresholds per unit of magnitude above the mean."""
    down: Tensor
    """Below it."""
    n_bisections: int

    @classmethod
    def of(cls, mean: Tensor, highest: Tensor, n_bisections: int) -> "Scale":
        """Return the scale of magnitudes with that mean and that maximum, in the dtype of the latter.

        Where the distance of two thresholds is too small a number, as between equal magnitudes, it is a little larger.
        """
        mean = torch.minimum(mean.to(highest.dtype), highest)  # of equal numbers, the mean may be rounded up
        densest = torch.finfo(highest.dtype).max
        up, down = ((2**n_bisections / distance).clamp(max=densest) for distance in (highest - mean, mean))
        return cls(mean, up, down, n_bisections)


def heights(magnitudes: Tensor, scale: Scale) -> Tensor:
    """Return whole numbers from -2^N to 2^N - 1: the last threshold that each magnitude reaches; 0 is the mean.

    Args:
        magnitudes: Finite, of the scale's dtype.
        scale: Of the vector that they are from.
    """
    offset = magnitudes - scale.mean
    exact = torch.where(offset >= 0, scale.up, scale.down).mul_(offset)
    return exact.floor_().clamp_(-(2**scale.n_bisections), 2**scale.n_bisections - 1)
