"""Collectives on torch.distributed.

The groups of a plan are made once, before the first step. A mean is a sum of what each member has divided by the size
of the group beforehand, as DistributedDataParallel and torch's averagers do, because gloo has no mean.

The `algorithm` of an operation is the library's choice: gloo reduces in a ring, NCCL chooses by itself. One algorithm
no library has: an all-reduce through parameter servers is made of messages here. Its servers are members of the group;
those beside the ranks exist in simulations only.

A sparse buffer travels in one message: the bytes of its values, then those of its indices.
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

from real.memory import Memory
from real.servers import sum_by_servers
from simdist.errors import RunError
from simdist.groups import Group
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Plan,
    Reduce,
    ReduceScatter,
    op_text,
)

__all__ = ["Members", "ProcessWorld", "check_servers", "groups_of"]


@dataclass(frozen=True, slots=True)
class Members:
    """The group that a rank belongs to.

    Args:
        ranks: Its members, in order.
        process_group: The same for torch; None if it is the rank alone.
    """

    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup | None


def groups_of(plan: Plan) -> list[Group]:
    """Return the groups that the collectives of a plan use, each once, in the order of the program."""
    ops = (op for body in plan.bodies for op in body if isinstance(op, COLLECTIVES))
    return list(dict.fromkeys(op.group for op in ops))


def check_servers(plan: Plan) -> None:
    """Refuse a plan with servers that are no ranks.

    Raises:
        RunError: It has some.
    """
    for op in (op for body in plan.bodies for op in body):
        if isinstance(op, AllReduce) and op.servers and not op.servers.members:
            raise RunError(
                f"plan {plan.name}: {op_text(op)} goes through servers beside the ranks, which can be simulated only; "
                f"to run it, let ranks be the servers"
            )


class ProcessWorld:
    """The ranks are processes.

    Args:
        groups: Who will talk to whom; every rank names the same, in the same order.
        timeout_s: After which a collective gives up.

    The default process group must be there.
    """

    def __init__(self, groups: Iterable[Group], *, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._members: Mapping[Group, Members] = {group: self._join(group, timeout_s) for group in groups}

    def members(self, group: Group) -> Members:
        """Return the members of this rank's group."""
        return self._members[group]

    def warm_up(self, device: torch.device) -> None:
        """Reduce one element in every group, because a backend may connect only when a group is first used."""
        for members in self._members.values():
            if len(members.ranks) > 1:
                dist.all_reduce(torch.zeros(1, device=device), group=members.process_group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def perform(self, op: Collective, memory: Memory) -> None:
        """Perform a collective on the buffers of this rank; returns when its result is there, or enqueued on a GPU."""
        members = self._members[op.group]
        if len(members.ranks) == 1:
            self._alone(op, memory)
            return
        match op:
            case AllReduce():
                buffer = memory.dense(op.buffer)
                _scale(buffer, op, len(members.ranks))
                if op.servers:
                    sum_by_servers(buffer, op.servers, members.ranks, members.process_group)
                else:
                    dist.all_reduce(buffer, group=members.process_group)
            case ReduceScatter():
                source = memory.dense(op.src)
                scaled = source / len(members.ranks) if op.reduction == "mean" else source.clone()
                reduce_scatter_single(memory.dense(op.dst), scaled, group=members.process_group)
            case AllGather():
                _all_gather(memory.tensors(op.src), memory.tensors(op.dst), members)
            case Reduce():
                self._reduce(op, memory.dense(op.buffer), members)
            case Broadcast():
                _broadcast(memory.tensors(op.buffer), members.ranks[op.root], members)
            case _:
                assert_never(op)

    def _reduce(self, op: Reduce, buffer: Tensor, members: Members) -> None:
        """Reduce to the root; torch uses the buffers of the others as scratch, a plan leaves them as they were."""
        root = members.ranks[op.root]
        taken = buffer if self.rank == root else buffer.clone()
        _scale(taken, op, len(members.ranks))
        dist.reduce(taken, dst=root, group=members.process_group)

    def _alone(self, op: Collective, memory: Memory) -> None:
        """Perform a collective of one member: what there is to move, is here."""
        match op:
            case AllReduce() | Reduce() | Broadcast():
                return
            case ReduceScatter() | AllGather():
                for src, dst in zip(memory.tensors(op.src), memory.tensors(op.dst), strict=True):
                    dst.copy_(src)
            case _:
                assert_never(op)

    def _join(self, group: Group, timeout_s: float) -> Members:
        """Make the process groups of a partition; all ranks take part in making each of them."""
        mine: Members | None = None
        everybody = tuple(range(self.world_size))
        for ranks in map(tuple, group.members(self.world_size)):
            if ranks == everybody:
                assert dist.group.WORLD is not None
                mine = Members(ranks, dist.group.WORLD)
                continue
            timeout = datetime.timedelta(seconds=timeout_s)
            made = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
            if self.rank in ranks:
                assert made is None or isinstance(made, dist.ProcessGroup)
                mine = Members(ranks, made)
        assert mine is not None
        return mine


def _scale(buffer: Tensor, op: AllReduce | Reduce, size: int) -> None:
    if op.reduction == "mean":
        torch.div(buffer, size, out=buffer)


def _broadcast(tensors: Sequence[Tensor], source: int, members: Members) -> None:
    if len(tensors) == 1:
        dist.broadcast(tensors[0], src=source, group=members.process_group)
        return
    message = _message(tensors)
    dist.broadcast(message, src=source, group=members.process_group)
    _take(message.unsqueeze(0), tensors)


def _all_gather(srcs: Sequence[Tensor], dsts: Sequence[Tensor], members: Members) -> None:
    if len(srcs) == 1:
        all_gather_single(dsts[0], srcs[0], group=members.process_group)
        return
    message = _message(srcs)
    messages = message.new_empty(len(members.ranks) * message.numel())
    all_gather_single(messages, message, group=members.process_group)
    _take(messages.unflatten(0, (len(members.ranks), -1)), dsts)


def _message(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, one after the other, uint8 `[nbytes]`."""
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors])


def _take(messages: Tensor, tensors: Sequence[Tensor]) -> None:
    """Put messages, uint8 `[n, nbytes]`, back into the tensors, each of which is the concatenation of what they have.

    Bytes are copied as such: the numbers in a message do not lie where a number of their type may.
    """
    rows = [tensor.view(torch.uint8).unflatten(0, (len(messages), -1)) for tensor in tensors]
    for row, part in zip(rows, messages.split([row.shape[1] for row in rows], dim=1), strict=True):
        row.copy_(part)
