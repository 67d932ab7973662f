"""Bytes that ranks send each other, as uint8 tensors on the host; whatever they hold is not unpickled here."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE_NBYTES = 2**27  # sent at once, so that no single wait is long


def broadcast(parcel: Tensor | None, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return rank 0's parcel on every rank.

    Args:
        parcel: uint8 `[nbytes]` on rank 0; not looked at elsewhere.
        group: Of all ranks, and able to move tensors of the host.
    """
    size = torch.tensor([0 if parcel is None else len(parcel)])
    dist.broadcast(size, src=0, group=group)
    if parcel is None or dist.get_rank():
        parcel = torch.empty(int(size), dtype=torch.uint8)
    for piece in _pieces(parcel):
        dist.broadcast(piece, src=0, group=group)
    return parcel


def broadcast_text(text: str, *, group: dist.ProcessGroup | None = None) -> str:
    """Return rank 0's text on every rank."""
    data = bytearray(text.encode())
    parcel = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return bytes(broadcast(parcel, group=group).tolist()).decode()


def gather_rows(row: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the rows of all ranks, `[world_size, *row.shape]`, on every rank."""
    rows = torch.empty((dist.get_world_size(), *row.shape), dtype=row.dtype)
    dist.all_gather(list(rows.unbind()), row, group=group)
    return rows


def send(parcel: Tensor, *, dst: int, group: dist.ProcessGroup | None = None) -> None:
    """Send a parcel to a rank that receives it with `recv`."""
    dist.send(torch.tensor([len(parcel)]), dst=dst, group=group)
    for piece in _pieces(parcel):
        dist.send(piece, dst=dst, group=group)


def recv(*, src: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the parcel that a rank sends."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=src, group=group)
    parcel = torch.empty(int(size), dtype=torch.uint8)
    for piece in _pieces(parcel):
        dist.recv(piece, src=src, group=group)
    return parcel


def _pieces(parcel: Tensor) -> Iterator[Tensor]:
    return (parcel[at : at + _PIECE_NBYTES] for at in range(0, len(parcel), _PIECE_NBYTES))
