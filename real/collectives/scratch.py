"""Memory that collectives need beside the buffers, kept from call to call.

The kernel gives fresh memory page by page, each at the first touch. For a tensor of many megabytes that is a fault for
every 4 KiB of it, which takes as long as the network needs to send them. Allocators return large blocks to the kernel,
so a new tensor in every step would pay in every step.
"""

from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

Purpose: TypeAlias = Literal["reduced", "message", "messages", "on host", "arriving"]
"""What it is needed for; within a collective each purpose has memory of its own."""


@final
class Scratch:
    """The scratch memory of one rank, whose collectives take place one after the other."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Purpose, torch.device], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(map(torch.numel, self._kept.values()))

    def take(self, purpose: Purpose, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of any contents, `[count]`; it is lent until the next collective."""
        nbytes = count * dtype.itemsize
        kept = self._kept.get((purpose, device))
        if kept is None or kept.numel() < nbytes:
            self._kept.pop((purpose, device), None)  # before there is another
            self._kept[purpose, device] = kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return kept[:nbytes].view(dtype)
