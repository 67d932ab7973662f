"""An all-reduce through parameter servers that are ranks, composed of messages.

Each member pushes to each server the server's part of the buffer. A server sums the parts in the order of the members,
so that the result does not depend on the order of arrival. Then each member pulls the sums back.

**Rounds.** In round j, member i of n talks to server (i n_servers // n + j) mod n_servers: first the nearest one, if
servers are spread over the members, then the next one. So in each round, all servers and all nodes have about the same
number of messages. If all messages were sent at once, they would share the links.

**Order.** Receives are posted before sends. gloo tells a sender that the receive is ready over the connection on which
it also sends data. Behind data, this message would arrive late.

**Pieces.** A server does not have room for the parts of all members. It adds up a piece of each before the next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from real.buffers.memory import Scratch
from simdist.plan import Servers

_ARRIVING_NBYTES = 2**26  # memory of a server for the pieces of all members

_LEAST_PIECE_NBYTES = 2**16  # smaller messages take equally long; with very many members, a server needs more memory

_Messages: TypeAlias = Sequence[tuple[int, Tensor]]  # a member, and the tensor to send to it or receive from it


def moves_gpu_tensors(process_group: dist.ProcessGroup | None) -> bool:
    """Tell whether a group moves tensors of a GPU with NCCL; gloo moves them through host memory."""
    return "nccl" in dist.get_backend(process_group)


def piece_count(n_members: int, itemsize: int, *, arriving_nbytes: int = _ARRIVING_NBYTES) -> int:
    """Return the number of elements of a piece.

    Args:
        n_members: Members that push to a server.
        itemsize: Bytes of an element.
        arriving_nbytes: Memory of a server for arriving pieces.
    """
    return max(arriving_nbytes // n_members, _LEAST_PIECE_NBYTES) // itemsize


def sum_by_servers(
    buffer: Tensor,
    servers: Servers,
    ranks: Sequence[int],
    process_group: dist.ProcessGroup | None,
    scratch: Scratch,
    *,
    arriving_nbytes: int = _ARRIVING_NBYTES,
) -> None:
    """Replace a buffer on each member by the sum over all members.

    Args:
        buffer: A flat buffer, of the same length on each member.
        servers: Members of the group.
        ranks: The members, in order.
        process_group: The same group for torch.
        scratch: Memory for arriving pieces, and for a copy of the buffer in host memory if necessary.
        arriving_nbytes: Memory of a server for arriving pieces.
    """
    on_host = buffer.is_cuda and not moves_gpu_tensors(process_group)
    whole = buffer
    if on_host:
        whole = scratch.take("on host", buffer.numel(), buffer.dtype, torch.device("cpu")).copy_(buffer)
    me = ranks.index(dist.get_rank())
    exchange = _ServedSum(ranks, me, servers.members, whole.split(list(servers.parts)), process_group)
    exchange.push(scratch, piece_count(len(ranks), buffer.element_size(), arriving_nbytes=arriving_nbytes))
    exchange.pull()
    if on_host:
        buffer.copy_(whole)


@dataclass(frozen=True, slots=True)
class _ServedSum:
    """An all-reduce, as one member sees it."""

    ranks: Sequence[int]
    me: int
    servers: Sequence[int]
    parts: Sequence[Tensor]
    process_group: dist.ProcessGroup | None

    def push(self, scratch: Scratch, count: int) -> None:
        """Send each server its part, in pieces of a given number of elements; a server adds up its own."""
        for begin in range(0, max(part.numel() for part in self.parts), count):
            pieces = [part[begin : begin + count] for part in self.parts]
            arriving = self._arriving(pieces, scratch)
            for server, members in self._rounds():
                sent = [(self.servers[server], pieces[server])]
                self._talk(sent, [(member, arriving[member]) for member in members])
            if self._number is not None:
                self._add_up(arriving, pieces[self._number])

    def pull(self) -> None:
        """Get the sums back from each server."""
        for server, members in self._rounds():
            sent = [] if self._number is None else [(member, self.parts[self._number]) for member in members]
            self._talk(sent, [(self.servers[server], self.parts[server])])

    @property
    def _number(self) -> int | None:
        """Index of this member among the servers."""
        return self.servers.index(self.me) if self.me in self.servers else None

    def _rounds(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield, for each round, the server that this member talks to, and the members that talk to it as a server."""
        n_servers = len(self.servers)
        n_members = len(self.ranks)
        number = self._number
        for shift in range(n_servers):
            servers = [(member * n_servers // n_members + shift) % n_servers for member in range(n_members)]
            members = [] if number is None else [member for member in range(n_members) if servers[member] == number]
            yield servers[self.me], members

    def _arriving(self, pieces: Sequence[Tensor], scratch: Scratch) -> Sequence[Tensor]:
        """Return the memory for the piece of each member, if this member is a server."""
        if self._number is None:
            return ()
        mine = pieces[self._number]
        n_members = len(self.ranks)
        return scratch.take("arriving", n_members * mine.numel(), mine.dtype, mine.device).view(n_members, -1).unbind()

    def _add_up(self, arrived: Sequence[Tensor], mine: Tensor) -> None:
        """Replace a server's piece by the sum of the pieces of all members, in their order."""
        total = arrived[self.me]  # its own piece is not received
        addends = [*arrived[: self.me], mine, *arrived[self.me + 1 :]]
        total.copy_(addends[0])
        for addend in addends[1:]:
            total += addend
        mine.copy_(total)

    def _talk(self, sent: _Messages, received: _Messages) -> None:
        """Exchange all messages of a round at once; return when that is done, or enqueued on a GPU."""
        messages = [
            dist.P2POp(act, tensor, self.ranks[member], self.process_group)
            for act, each in ((dist.irecv, received), (dist.isend, sent))
            for member, tensor in each
            if member != self.me and tensor.numel()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
