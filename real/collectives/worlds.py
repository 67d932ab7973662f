"""Collectives on torch.distributed.

The groups of a plan are made once, before the first step. For a mean, each member divides by the size of the group
before the sum, like DistributedDataParallel and torch's averagers, because gloo has no mean.

The library chooses the `algorithm` of an operation: gloo reduces in a ring, NCCL chooses dynamically. An all-gather by
`broadcasts` is one broadcast of the library for each member. No library has an all-reduce through parameter servers, so
it is composed of messages here. Its servers are members of the group. Others exist only in simulations.

A sparse buffer travels in one message: the bytes of its values, then those of its indices.

gloo has no reduce-scatter of its own: torch implements it as an all-reduce of a copy. The same happens here, in memory
that is reused, see `real.buffers.memory`.
"""

import datetime
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

from real.buffers.memory import Memory, Purpose, Scratch
from real.collectives.byte_transfer import broadcast_text, gather_texts
from real.collectives.equals import combine_equal
from real.collectives.first_come import ArrivalClient, ArrivalServer
from real.collectives.servers import moves_gpu_tensors, piece_count, sum_by_servers
from real.processes.rendezvous import own_address
from simdist.errors import RunError
from simdist.plan import Buffer, Plan, ops
from simdist.plan.group import Group
from simdist.plan.lanes import COMM
from simdist.plan.only_simulated import only_simulated
from simdist.plan.walk import drops_late

_TOKEN_NBYTES = 32
_Joined: TypeAlias = tuple[tuple[int, ...], dist.ProcessGroup | None]  # ranks of a group, and its process group


@dataclass(frozen=True, slots=True)
class _Members:
    """The group that a rank belongs to.

    Args:
        ranks: Its members, in order.
        process_group: The same group for torch; None if the rank is alone.
        scratch: Memory for a collective. Collectives of one communicator take turns, so they share it.
    """

    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup | None
    scratch: Scratch


def groups_of(plan: Plan) -> dict[str, list[Group]]:
    """Return the groups of a plan's collectives, each once, by communicator of their lanes; `comm` comes first."""
    found: dict[str, list[Group]] = {COMM.communicator: []}
    for op in (op for body in plan.bodies for op in body if isinstance(op, ops.COLLECTIVES)):
        groups = found.setdefault(op.lane.communicator, [])
        if op.group not in groups:
            groups.append(op.group)
    return found


def check_performable(plan: Plan) -> None:
    """Refuse a plan with something that only the simulator can do.

    Raises:
        RunError: The plan has an algorithm of a user's, servers that are not ranks, or a first-come all-reduce without
            a server.
    """
    if reason := only_simulated(plan):
        raise RunError(f"plan {plan.name}: {reason}")


def check_order_of_issue(plan: Plan, backend: str) -> None:
    """Refuse a plan whose collectives NCCL would get in another order on each rank.

    The host issues collectives in program order, which is the same on all ranks. If a plan has ticks, a thread of each
    stream issues them, and threads take turns by chance. NCCL may then deadlock between two communicators.

    Raises:
        RunError: The plan has ticks and several communicators, and the backend is NCCL.
    """
    has_ticks = any(isinstance(op, ops.Tick) for body in plan.bodies for op in body)
    used = [name for name, groups in groups_of(plan).items() if any(group.size > 1 for group in groups)]
    if backend == "nccl" and has_ticks and len(used) > 1:
        raise RunError(
            f"plan {plan.name} has ticks, and collectives on the streams {' and '.join(used)}: threads would issue "
            f"them in any order, and NCCL may then deadlock; leave out the ticks (`fusion`), or use --backend gloo"
        )


def late_servers(plan: Plan) -> set[int]:
    """Return the ranks that serve a plan's all-reduces that drop late ranks."""
    dropping = (op for body in plan.bodies for op in body if isinstance(op, ops.AllReduce) and op.drop)
    return {member for op in dropping if op.servers for member in op.servers.members}


def scratch_nbytes(plan: Plan) -> int:
    """Return the bytes that a rank's collectives need besides the buffers, on the device of the buffers."""
    return sum(_most_needed(plan).values())


def _most_needed(plan: Plan) -> Mapping[tuple[str, Purpose], int]:
    """Return the bytes that each communicator needs for each purpose."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    needed: dict[tuple[str, Purpose], int] = {}
    for op in dict.fromkeys(op for body in plan.bodies for op in body if isinstance(op, ops.COLLECTIVES)):
        for purpose, nbytes in _needs(op, buffers) if op.group.size > 1 else ():
            use = op.lane.communicator, purpose
            needed[use] = max(needed.get(use, 0), nbytes)
    return needed


def _needs(op: ops.Collective, buffers: Mapping[str, Buffer]) -> Iterator[tuple[Purpose, int]]:
    match op:
        case ops.AllReduce():
            if op.servers and not op.drop:
                itemsize = buffers[op.buffer].nbytes // buffers[op.buffer].count
                count = min(piece_count(op.group.size, itemsize), max(op.servers.parts))
                yield "arriving", op.group.size * count * itemsize
        case ops.ReduceScatter():
            yield "reduced", buffers[op.src].nbytes
        case ops.Reduce():
            yield "reduced", buffers[op.buffer].nbytes
        case ops.AllGather():
            if buffers[op.src].sparse:
                yield "message", buffers[op.src].nbytes
                yield "messages", buffers[op.dst].nbytes
        case ops.Broadcast():
            if buffers[op.buffer].sparse:
                yield "message", buffers[op.buffer].nbytes
        case _:
            assert_never(op)


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """Serves all-reduces that drop late ranks.

    Args:
        server: The server, on ranks that have one. The server of rank 0 knows the late ranks.
        client: The connections to all servers.
    """

    server: ArrivalServer | None
    client: ArrivalClient


class ProcessWorld:
    """The ranks are processes.

    Args:
        groups: Communicator -> the groups that it uses, equal on all ranks and in the same order. Threads may take
            turns differently on each rank, so each group of each communicator has a process group of its own.
        timeout_s: Time limit of a collective.
        everyone: All ranks; by default the default process group. The communicator `comm` uses it.
        servers: Ranks that serve all-reduces that drop late ranks; see `late_servers`.

    Attributes:
        made: Process groups that were made on this rank.
    """

    def __init__(
        self,
        groups: Mapping[str, Iterable[Group]],
        *,
        timeout_s: float,
        everyone: dist.ProcessGroup | None = None,
        servers: Collection[int] = (),
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.made: list[dist.ProcessGroup] = []
        self._everyone = everyone or dist.group.WORLD
        self._members: dict[tuple[str, Group], _Members] = {}
        self._scratch = {communicator: Scratch() for communicator in groups}
        for communicator, members in groups.items():
            whole = self._everyone if communicator == COMM.communicator else None
            made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
            if whole is not None:
                made[tuple(range(self.world_size))] = whole
            for group in members:
                joined = self._join(group, timeout_s, made)
                self._members[communicator, group] = _Members(*joined, self._scratch[communicator])
        self._timeout_s = timeout_s
        self._arrivals = self._meet(servers) if servers else None

    @property
    def scratch_nbytes(self) -> int:
        """Bytes kept for collectives besides the buffers."""
        return sum(scratch.nbytes for scratch in self._scratch.values())

    @property
    def arrivals(self) -> ArrivalClient:
        """The connections to the ranks that serve all-reduces with late ranks.

        Raises:
            RunError: This world was made without such servers.
        """
        if self._arrivals is None:
            raise RunError("an all-reduce drops the late, and the ranks have no servers for that")
        return self._arrivals.client

    def is_over(self) -> bool:
        """Tell whether the next all-reduce that drops late ranks has happened without this rank."""
        return self.arrivals.is_over()

    def late(self, plan: Plan) -> dict[int, tuple[int, ...]]:
        """Return the late ranks of a plan that all ranks have performed, as in a trace; only rank 0 knows them."""
        found: dict[int, tuple[int, ...]] = {}
        server = None if self._arrivals is None else self._arrivals.server
        for number, (row, entering) in enumerate(drops_late(plan).items()):
            if self.rank == 0 and server is not None:
                found[row] = server.late[number]
                found[entering] = tuple(sorted(server.sat_out.get(number, ())))
        return {row: ranks for row, ranks in found.items() if ranks}

    def members(self, group: Group) -> _Members:
        """Return the members of this rank's group."""
        return self._members[COMM.communicator, group]

    def warm_up(self, plan: Plan, device: torch.device) -> None:
        """Warm up all collectives of a plan.

        A backend may connect only when a group is first used. So one element is reduced in each group, and on each
        server. The kernel allocates host memory when it is first written.
        """
        wanted = [(communicator, group) for communicator, groups in groups_of(plan).items() for group in groups]
        for members in map(self._members.__getitem__, wanted):
            if len(members.ranks) > 1:
                dist.all_reduce(torch.zeros(1, device=device), group=members.process_group)
        serves = False
        for op in _served(plan):
            assert op.servers is not None
            members = self._members[op.lane.communicator, op.group]
            ones = replace(op.servers, parts=(1,) * len(op.servers.parts))
            zeros = torch.zeros(len(ones.parts), device=device)
            sum_by_servers(zeros, ones, members.ranks, members.process_group, members.scratch)
            serves = serves or self.rank in (members.ranks[member] for member in ones.members)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return
        for (communicator, purpose), nbytes in _most_needed(plan).items():
            if serves or purpose != "arriving":
                self._scratch[communicator].take(purpose, nbytes, torch.uint8, device).zero_()

    def perform(self, op: ops.Collective, memory: Memory) -> None:
        """Perform a collective on the buffers of this rank; return when its result is ready, or enqueued on a GPU."""
        members = self._members[op.lane.communicator, op.group]
        if len(members.ranks) == 1:
            combine_equal(op, memory, self.rank)
            return
        match op:
            case ops.AllReduce():
                buffer = memory.dense(op.buffer)
                if op.drop and op.servers:
                    self.arrivals.sum_of_first(buffer, op.drop, op.servers)
                    if op.reduction == "mean":
                        buffer /= op.n_in
                    return
                _scaled(buffer, op, buffer)
                if op.servers:
                    sum_by_servers(buffer, op.servers, members.ranks, members.process_group, members.scratch)
                else:
                    dist.all_reduce(buffer, group=members.process_group)
            case ops.ReduceScatter():
                self._reduce_scatter(op, memory.dense(op.src), memory.dense(op.dst), members)
            case ops.AllGather() if op.algorithm == "broadcasts":
                self._broadcast_each(memory.dense(op.src), memory.dense(op.dst), members)
            case ops.AllGather():
                self._all_gather(memory.tensors(op.src), memory.tensors(op.dst), members)
            case ops.Reduce():
                self._reduce(op, memory.dense(op.buffer), members)
            case ops.Broadcast():
                self._broadcast(memory.tensors(op.buffer), members.ranks[op.root], members)
            case _:
                assert_never(op)

    def _reduce_scatter(self, op: ops.ReduceScatter, src: Tensor, dst: Tensor, members: _Members) -> None:
        """Reduce a copy of the source, which stays unchanged."""
        taken = _scaled(src, op, _like(src, members))
        if taken.is_cuda and moves_gpu_tensors(members.process_group):
            reduce_scatter_single(dst, taken, group=members.process_group)
            return
        dist.all_reduce(taken, group=members.process_group)
        dst.copy_(taken.view(len(members.ranks), -1)[members.ranks.index(self.rank)])

    def _reduce(self, op: ops.Reduce, buffer: Tensor, members: _Members) -> None:
        """Reduce to the root. torch uses the buffers of the others as scratch, but in a plan they stay unchanged."""
        root = members.ranks[op.root]
        taken = _scaled(buffer, op, buffer if self.rank == root else _like(buffer, members))
        dist.reduce(taken, dst=root, group=members.process_group)

    def _broadcast(self, tensors: Sequence[Tensor], source: int, members: _Members) -> None:
        if len(tensors) == 1:
            dist.broadcast(tensors[0], src=source, group=members.process_group)
            return
        message = _message(tensors, members)
        dist.broadcast(message, src=source, group=members.process_group)
        _take(message.unsqueeze(0), tensors)

    def _broadcast_each(self, mine: Tensor, whole: Tensor, members: _Members) -> None:
        """Broadcast the slice of each member."""
        parts = whole.view(len(members.ranks), -1)
        me = members.ranks.index(self.rank)
        parts[me].copy_(mine)
        for part, source in zip(parts, members.ranks, strict=True):
            dist.broadcast(part, src=source, group=members.process_group)

    def _all_gather(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], members: _Members) -> None:
        if len(srcs) == 1:
            self._gather(dsts[0], srcs[0], members)
            return
        n = len(members.ranks)
        message = _message(srcs, members)
        messages = members.scratch.take("messages", n * message.numel(), message.dtype, message.device)
        self._gather(messages, message, members)
        _take(messages.view(n, -1), dsts)

    def _gather(self, whole: Tensor, mine: Tensor, members: _Members) -> None:
        """Gather the tensors of all members; a group of two exchanges them in both directions at once.

        gloo's all_gather posts sends before receives. If one of two members arrives first, the data of the other queues
        before its message that it is ready to receive. Then the two halves of the bytes travel one after the other.
        """
        if len(members.ranks) != 2 or mine.is_cuda:
            all_gather_single(whole, mine, group=members.process_group)
            return
        me = members.ranks.index(self.rank)
        parts = whole.view(2, -1)
        other = members.ranks[1 - me]
        receiving = dist.irecv(parts[1 - me], other, group=members.process_group)
        sending = dist.isend(mine, other, group=members.process_group)
        parts[me].copy_(mine.view(-1))
        for work in filter(None, (receiving, sending)):
            work.wait()

    def _meet(self, servers: Collection[int]) -> "_Arrivals":
        """Start this rank's server for all-reduces with late ranks, if any, and connect to all servers."""
        key = broadcast_text(secrets.token_hex(_TOKEN_NBYTES), group=self._everyone).encode()
        server = None
        if self.rank in servers:
            server = ArrivalServer(own_address(), key, self.world_size, self._timeout_s)
        places = enumerate(gather_texts(server.address if server else "", group=self._everyone))
        addresses = {rank: address for rank, address in places if address}
        return _Arrivals(server, ArrivalClient(addresses, key, self.rank, self.world_size, self._timeout_s))

    def _join(self, group: Group, timeout_s: float, made: dict[tuple[int, ...], dist.ProcessGroup | None]) -> _Joined:
        """Make the process groups of a partition, unless `made`; all ranks take part in making each of them."""
        mine: _Joined | None = None
        for ranks in map(tuple, group.members(self.world_size)):
            if len(ranks) > 1 and ranks not in made:
                found = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_s))
                made[ranks] = found if isinstance(found, dist.ProcessGroup) else None  # on other ranks a marker
                self.made += [found] if isinstance(found, dist.ProcessGroup) else []
            if self.rank in ranks:
                mine = ranks, made.get(ranks)
        assert mine is not None
        return mine


def _message(tensors: Sequence[Tensor], members: _Members) -> Tensor:
    """Return the bytes of tensors, one after the other, uint8 `[nbytes]`."""
    parts = [tensor.view(torch.uint8) for tensor in tensors]
    message = members.scratch.take("message", sum(map(torch.numel, parts)), torch.uint8, tensors[0].device)
    return torch.cat(parts, out=message)


def _like(tensor: Tensor, members: _Members) -> Tensor:
    return members.scratch.take("reduced", tensor.numel(), tensor.dtype, tensor.device)


def _served(plan: Plan) -> list[ops.AllReduce]:
    """Return the all-reduces through servers, one for each group and its servers."""
    served = (op for body in plan.bodies for op in body if isinstance(op, ops.AllReduce) and op.servers and not op.drop)
    return list({(op.lane, op.group, op.servers.members): op for op in served if op.servers}.values())


def _scaled(buffer: Tensor, op: ops.AllReduce | ops.Reduce | ops.ReduceScatter, out: Tensor) -> Tensor:
    """Return this member's contribution to the reduction, in `out`, which may be the buffer itself."""
    if op.reduction == "mean":
        return part_of_mean(buffer, op.group.size, out)
    return out if out is buffer else out.copy_(buffer)


def part_of_mean(buffer: Tensor, size: int, out: Tensor) -> Tensor:
    """Return what a member of a group of that size adds to a mean, in `out`, which may be the buffer itself."""
    if size & (size - 1) == 0:  # then the product equals the quotient to the last bit, and is faster
        return torch.mul(buffer, 1 / size, out=out)
    return torch.div(buffer, size, out=out)


def _take(messages: Tensor, tensors: Sequence[Tensor]) -> None:
    """Split messages, uint8 `[n, nbytes]`, into the tensors; each tensor is the concatenation of its parts.

    Bytes are copied as such, because the numbers in a message are not aligned for their type.
    """
    rows = [tensor.view(torch.uint8).unflatten(0, (len(messages), -1)) for tensor in tensors]
    for row, part in zip(rows, messages.split([row.shape[1] for row in rows], dim=1), strict=True):
        row.copy_(part)
