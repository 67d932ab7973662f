"""Bytes that ranks send each other, as uint8 tensors on the host; they are never unpickled here."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from simdist.errors import RunError

_PIECE_NBYTES = 2**27  # largest size of one send, so that no single wait is long


def broadcast(content: Tensor | None, *, src: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return a rank's bytes on every rank.

    Args:
        content: uint8 `[nbytes]` on that rank; ignored on other ranks.
        src: The rank.
        group: A group of all ranks that can move tensors of the host.
    """
    size = torch.tensor([0 if content is None else len(content)])
    dist.broadcast(size, src=src, group=group)
    if content is None or dist.get_rank() != src:
        content = torch.empty(int(size), dtype=torch.uint8)
    for piece in _pieces(content):
        dist.broadcast(piece, src=src, group=group)
    return content


def broadcast_text(text: str, *, group: dist.ProcessGroup | None = None) -> str:
    """Return rank 0's text on every rank."""
    return bytes(broadcast(_bytes_of(text), group=group).tolist()).decode()


@contextmanager
def raising_on_all(*, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise a RunError of rank 0 on every rank. Those of other ranks have no effect. All ranks enter this context."""
    problem = ""
    try:
        yield
    except RunError as error:
        problem = str(error)
    if problem := broadcast_text(problem, group=group):
        raise RunError(problem)


def gather_rows(row: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the rows of all ranks, `[world_size, *row.shape]`, on every rank."""
    rows = torch.empty((dist.get_world_size(), *row.shape), dtype=row.dtype)
    dist.all_gather(list(rows.unbind()), row, group=group)
    return rows


def gather_texts(text: str, *, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the texts of all ranks, by rank, on every rank."""
    content = _bytes_of(text)
    sizes = gather_rows(torch.tensor([len(content)]), group=group)[:, 0].tolist()
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: len(content)] = content
    rows = gather_rows(padded, group=group)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def gather_to_first(mine: Tensor, *, group: dist.ProcessGroup | None = None) -> Iterator[Tensor]:
    """Yield the tensors of all ranks, of equal shape and type, on rank 0 and none elsewhere; all ranks must iterate."""
    if dist.get_rank():
        dist.send(mine, dst=0, group=group)
        return
    yield mine
    for rank in range(1, dist.get_world_size()):
        theirs = torch.empty_like(mine)
        dist.recv(theirs, src=rank, group=group)
        yield theirs


def send(content: Tensor, *, dst: int, group: dist.ProcessGroup | None = None) -> None:
    """Send bytes to a rank that receives them with `recv`."""
    dist.send(torch.tensor([len(content)]), dst=dst, group=group)
    for piece in _pieces(content):
        dist.send(piece, dst=dst, group=group)


def recv(*, src: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the bytes that a rank sends."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=src, group=group)
    content = torch.empty(int(size), dtype=torch.uint8)
    for piece in _pieces(content):
        dist.recv(piece, src=src, group=group)
    return content


def _bytes_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _pieces(content: Tensor) -> Iterator[Tensor]:
    return (content[at : at + _PIECE_NBYTES] for at in range(0, len(content), _PIECE_NBYTES))
