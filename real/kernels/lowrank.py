"""Orthonormal columns, for gradients of low rank."""

import torch
from torch import Tensor

_MOST_BY_GRAM_SCHMIDT = 2  # columns; beyond it, a QR factorisation is faster


def orthonormalize(matrix: Tensor) -> None:
    """Make the columns of a matrix `[n, rank]` orthonormal, in place, even if the matrix has a lower rank.

    Like torch's `powerSGD_hook`, it uses Gram-Schmidt for few columns or half precision, else QR. In torch, a column of
    zeros, as from a gradient of zeros, becomes NaN. Here it becomes a unit vector, as with QR.
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
