"""An all-reduce through parameter servers that are ranks, made of messages.

Every member pushes to each server the part of the buffer which that server holds. A server sums what it gets in the
order of the members, so that the result does not depend on who comes first, and every member pulls it back.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from simdist.plan import Servers

__all__ = ["sum_by_servers"]


def sum_by_servers(
    buffer: Tensor, servers: Servers, ranks: Sequence[int], process_group: dist.ProcessGroup | None
) -> None:
    """Replace a buffer on every member by the sum over all of them.

    Args:
        buffer: Flat, of the same length on every member.
        servers: Members of the group.
        ranks: The members, in order.
        process_group: The same for torch.
    """
    on_host = buffer.is_cuda and "nccl" not in dist.get_backend(process_group)  # gloo sends from host memory only
    whole = buffer.cpu() if on_host else buffer
    parts = dict(zip((ranks[member] for member in servers.members), whole.split(list(servers.parts)), strict=True))
    _push_and_pull({server: part for server, part in parts.items() if part.numel()}, ranks, process_group)
    if on_host:
        buffer.copy_(whole)


def _push_and_pull(parts: Mapping[int, Tensor], ranks: Sequence[int], process_group: dist.ProcessGroup | None) -> None:
    """Sum the parts, server -> its part."""
    rank = dist.get_rank()
    mine = parts.get(rank)
    others = {server: part for server, part in parts.items() if server != rank}
    arriving = {} if mine is None else {member: torch.empty_like(mine) for member in ranks if member != rank}
    _exchange(others, arriving, process_group)
    if mine is not None:
        mine.copy_(_sum([mine if member == rank else arriving[member] for member in ranks]))
    _exchange(dict.fromkeys(arriving, mine) if mine is not None else {}, others, process_group)


def _sum(addends: Sequence[Tensor]) -> Tensor:
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total


def _exchange(
    sent: Mapping[int, Tensor], received: Mapping[int, Tensor], process_group: dist.ProcessGroup | None
) -> None:
    """Send and receive, rank -> tensor, all at once; return when that is done, or enqueued on a GPU."""
    messages = [dist.P2POp(dist.isend, tensor, rank, process_group) for rank, tensor in sent.items()]
    messages += [dist.P2POp(dist.irecv, tensor, rank, process_group) for rank, tensor in received.items()]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
