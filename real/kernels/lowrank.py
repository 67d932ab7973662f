"""Orthonormal columns, for gradients of low rank."""

import torch
from torch import Tensor

_MOST_BY_GRAM_SCHMIDT = 2  # columns; beyond, a QR factorisation takes less


def orthonormalize(matrix: Tensor) -> None:
    """Make the columns of a matrix `[n, rank]` orthonormal, in place; those of a matrix of lower rank, too.

    Like torch's `powerSGD_hook`: by Gram-Schmidt if there are few of them, or in half precision, else by QR. There a
    column of zeros, as of a gradient of zeros, becomes NaN. Here it becomes a unit vector, as QR makes of it.
    """
    n, rank = matrix.shape
    if rank > _MOST_BY_GRAM_SCHMIDT and matrix.dtype in (torch.float32, torch.float64):
        matrix.copy_(torch.linalg.qr(matrix).Q)
        return
    for number in range(rank):
        column = matrix[:, number : number + 1]
        rest = matrix[:, number + 1 :]
        length = torch.linalg.vector_norm(column)
        unit = torch.arange(n, device=matrix.device).view(-1, 1) == number
        column.copy_(torch.where(length > 0, column / length, unit.to(matrix.dtype)))
        rest.sub_(column * (column * rest).sum(0, keepdim=True))
