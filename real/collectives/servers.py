"""An all-reduce through parameter servers that are ranks, made of messages.

Every member pushes to each server the part of the buffer which that server holds. A server sums what it gets in the
order of the members, so that the result does not depend on who comes first, and every member pulls it back.

**Rounds.** In round j, member i of n talks to server (i n_servers // n + j) mod n_servers: first the nearest one, if
servers are spread over the members, then the next one. So in every round every server, and every node, has about as
many messages as any other. All messages at once would share the links, and flows of TCP do not share them fairly: the
slowest would hold up all.

**Order.** What is received is posted before what is sent. gloo says to a sender that there is room on the connection on
which it sends itself; behind data, the word would come late, and the connection carry data one way only.

**Pieces.** A server has no room for the parts of all members. It receives them piece by piece, each piece from all
members, and adds it up before the next one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from real.buffers.memory import Scratch
from simdist.plan import Servers

ARRIVING_NBYTES = 2**26  # that a server keeps for the pieces of all members

_LEAST_PIECE_NBYTES = 2**16  # smaller messages take as long; where members are very many, a server keeps more

_Messages: TypeAlias = Sequence[tuple[int, Tensor]]  # a member, and what is sent to it or comes from it


def moves_gpu_tensors(process_group: dist.ProcessGroup | None) -> bool:
    """Tell whether a group moves tensors of a GPU with NCCL; gloo moves them through host memory."""
    return "nccl" in dist.get_backend(process_group)


def piece_count(n_members: int, itemsize: int, *, arriving_nbytes: int = ARRIVING_NBYTES) -> int:
    """Return how many elements a piece has.

    Args:
        n_members: That push to a server.
        itemsize: Bytes of an element.
        arriving_nbytes: Bytes that a server keeps.
    """
    return max(arriving_nbytes // n_members, _LEAST_PIECE_NBYTES) // itemsize


def sum_by_servers(
    buffer: Tensor,
    servers: Servers,
    ranks: Sequence[int],
    process_group: dist.ProcessGroup | None,
    scratch: Scratch,
    *,
    arriving_nbytes: int = ARRIVING_NBYTES,
) -> None:
    """Replace a buffer on every member by the sum over all of them.

    Args:
        buffer: Flat, of the same length on every member.
        servers: Members of the group.
        ranks: The members, in order.
        process_group: The same for torch.
        scratch: For pieces that arrive, and for the buffer in host memory if it has to go there.
        arriving_nbytes: Bytes that a server keeps.
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
    """An all-reduce, as one member sees it.

    Args:
        ranks: The members, in order.
        me: Which of them this is.
        servers: Which of them are servers.
        parts: Parts of each server, as this member has them.
        process_group: For messages.
    """

    ranks: Sequence[int]
    me: int
    servers: Sequence[int]
    parts: Sequence[Tensor]
    process_group: dist.ProcessGroup | None

    def push(self, scratch: Scratch, count: int) -> None:
        """Send every server its part, in pieces of so many elements; a server adds up its own."""
        for begin in range(0, max(part.numel() for part in self.parts), count):
            pieces = [part[begin : begin + count] for part in self.parts]
            arriving = self._arriving(pieces, scratch)
            for server, members in self._rounds():
                sent = [(self.servers[server], pieces[server])]
                self._talk(sent, [(member, arriving[member]) for member in members])
            if self._number is not None:
                self._add_up(arriving, pieces[self._number])

    def pull(self) -> None:
        """Get every server's part back."""
        for server, members in self._rounds():
            sent = [] if self._number is None else [(member, self.parts[self._number]) for member in members]
            self._talk(sent, [(self.servers[server], self.parts[server])])

    @property
    def _number(self) -> int | None:
        """Which server this member is."""
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
        """Return where the piece of each member goes, if this one is a server."""
        if self._number is None:
            return ()
        mine = pieces[self._number]
        n_members = len(self.ranks)
        return scratch.take("arriving", n_members * mine.numel(), mine.dtype, mine.device).view(n_members, -1).unbind()

    def _add_up(self, arrived: Sequence[Tensor], mine: Tensor) -> None:
        """Replace a server's piece by the sum of all members', in their order."""
        total = arrived[self.me]  # where nothing arrives
        addends = [*arrived[: self.me], mine, *arrived[self.me + 1 :]]
        total.copy_(addends[0])
        for addend in addends[1:]:
            total += addend
        mine.copy_(total)

    def _talk(self, sent: _Messages, received: _Messages) -> None:
        """Exchange messages of a round, all at once; return when that is done, or enqueued on a GPU."""
        messages = [
            dist.P2POp(act, tensor, self.ranks[member], self.process_group)
            for act, each in ((dist.irecv, received), (dist.isend, sent))
            for member, tensor in each
            if member != self.me and tensor.numel()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
