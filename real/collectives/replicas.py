"""Collectives among the replicas that are there; one that is lost is left out, and the collective is done again.

Each membership has a process group of its own, outside the default one of torch, which has all ranks for ever. A
collective works on a copy until all members have succeeded.

A group that was left is never freed: torch would wait for its unfinished operations and hold the interpreter's lock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from real.buffers.memory import Memory
from real.collectives.worlds import part_of_mean
from real.processes.membership import Members, Membership, Met
from simdist.errors import RunError
from simdist.plan import Plan, ops
from simdist.plan.plan import StepIndex

_Group: TypeAlias = Any  # a ProcessGroupGloo, most of whose methods torch's stubs leave out
_STATE_TAG = 1
_TIMES_TAG = 2


@final
@dataclass(slots=True)
class ReplicaGroups:
    """The process group of the newest membership.

    Args:
        rank: This rank.
        timeout_s: After which the membership gives a collective up.
        reach: Opens a connection to the store of the job.
    """

    rank: int
    timeout_s: float
    reach: Callable[[], Store]
    connect_s: float = field(default=0.0, init=False)
    _made: dict[int, _Group] = field(default_factory=dict, init=False)

    def of(self, members: Members) -> _Group:
        """Return the group of a membership, which all members make at the same time.

        Raises:
            RuntimeError: A member does not come.
        """
        if members.number not in self._made:
            begin_s = time.monotonic()
            place = members.ranks.index(self.rank)
            store = PrefixStore(f"group/{members.number}", self.reach())
            limit = timedelta(seconds=2 * self.timeout_s)  # the membership's own time-out is first
            group: _Group = dist.ProcessGroupGloo(store, place, len(members.ranks), limit)
            one = torch.zeros(1)
            group.allreduce([one]).wait()
            self._made[members.number] = group
            self.connect_s = time.monotonic() - begin_s
        return self._made[members.number]

    def send_state(self, members: Members, pack: Callable[[], Tensor]) -> Tensor | None:
        """Let the first rank that has the state send it to those that join; return it on these.

        Args:
            members: All take part.
            pack: Returns the state, uint8 `[nbytes]`.

        Raises:
            RunError: Nobody has the state.
        """
        if not members.old:
            raise RunError("nobody is left who has the state of the model: all ranks have to begin anew")
        group = self.of(members)
        source = members.old[0]
        if self.rank == source:
            state = pack()
            for rank in members.joining:
                place = members.ranks.index(rank)
                group.send([torch.tensor([len(state)])], place, _STATE_TAG).wait()
                group.send([state], place, _STATE_TAG).wait()
        if self.rank not in members.joining:
            return None
        place = members.ranks.index(source)
        size = torch.zeros(1, dtype=torch.int64)
        group.recv([size], place, _STATE_TAG).wait()
        state = torch.empty(int(size), dtype=torch.uint8)
        group.recv([state], place, _STATE_TAG).wait()
        return state

    def gather(self, members: Members, mine: Tensor) -> dict[int, Tensor]:
        """Return the tensors of all members, of equal shape, by rank on the first of them; nothing elsewhere."""
        if len(members.ranks) == 1:
            return {self.rank: mine}
        group = self.of(members)
        if self.rank != members.ranks[0]:
            group.send([mine], 0, _TIMES_TAG).wait()
            return {}
        found = {self.rank: mine}
        for place, rank in enumerate(members.ranks[1:], start=1):
            found[rank] = torch.empty_like(mine)
            group.recv([found[rank]], place, _TIMES_TAG).wait()
        return found


@final
class ReplicaWorld:
    """Each rank is a replica, and replicas meet in means over all that are there.

    Args:
        plan: A plan of which `only_restarts` says nothing.
        membership: Who is there.
        groups: Their process groups.
        first_step: The first step to perform.
        noted: Called after each collective with its step, the first step since the collective before, and how it went.

    Attributes:
        upcoming: The membership from the next step on, if ranks join then.
    """

    def __init__(
        self,
        plan: Plan,
        membership: Membership,
        groups: ReplicaGroups,
        first_step: int,
        noted: Callable[[int, int, Met[Tensor]], None],
    ) -> None:
        self.upcoming: Members | None = None
        self._membership = membership
        self._groups = groups
        self._noted = noted
        self._n_steps = plan.n_steps
        counts = [sum(isinstance(op, ops.AllReduce) for op in body) for body in plan.bodies]
        self._index = StepIndex(plan, counts)
        self._number = self._index.before(first_step)
        self._copies: dict[tuple[int, torch.dtype], Tensor] = {}

    def is_over(self) -> bool:
        """Tell that no all-reduce drops late ranks."""
        return False

    def perform(self, op: ops.Collective, memory: Memory) -> None:
        """Perform a mean over the replicas that are there."""
        assert isinstance(op, ops.AllReduce)
        buffer = memory.dense(op.buffer)
        number = self._number
        step = self._index.step(number)
        self._number += 1
        is_last = self._number == self._index.before(step + 1)
        admits_at = step + 1 if is_last and step + 1 < self._n_steps else None
        size = buffer.numel(), buffer.dtype
        n_tries = 0

        def mean(members: Members) -> Tensor:
            nonlocal n_tries
            n_tries += 1
            if n_tries > 1 or size not in self._copies:  # an abandoned try may still write to the one before
                self._copies[size] = torch.empty_like(buffer)
            taken = part_of_mean(buffer, len(members.ranks), self._copies[size])
            if len(members.ranks) > 1:
                self._groups.of(members).allreduce([taken]).wait()
            return taken

        met = self._membership.together(f"mean {number}", mean, admits_at=admits_at)
        buffer.copy_(met.result)
        self.upcoming = met.upcoming
        self._noted(step, self._since(number, step), met)

    def _since(self, number: int, step: int) -> int:
        """Return the first step that a collective of a step brings together."""
        return min(step, self._index.step(number - 1) + 1) if number else 0
