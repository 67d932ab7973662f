"""Resumes a loop from its newest checkpoint, and writes its checkpoints."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from real.checkpoints.distributed import DistributedEncoding, LearnedOfCopy
from real.checkpoints.store import CheckpointStore, Encoding, JobIdentity
from real.checkpoints.zip_file import ZipEncoding
from real.collectives import byte_transfer
from real.execution.executor import Executor
from real.loops.options import Checkpointing
from real.loops.planning import Planned
from real.loops.ranks import Peers, patient_group, wait
from real.loops.shards import Shards, local_part
from real.processes.launch import Connection
from real.programs.rank_state import LEARNED_SECTIONS, RankState, fingerprint
from simdist.errors import RunError
from simdist.plan import Plan


@final
class Resuming:
    """Saves and restores the state of one rank. `resume` makes it.

    Args:
        state: State of this rank.
        connection: To the other ranks.
        first_step: First step of the loop.
        checkpoints: Checkpoints of the job. None writes none.
        every: Steps from one checkpoint to the next.
        random: State of the random numbers in the checkpoint from which the loop resumed; None without one.

    Attributes:
        state: State of this rank.
        first_step: First step of the loop.
        is_resumed: The state comes from a checkpoint.
    """

    def __init__(
        self,
        state: RankState,
        connection: Connection,
        *,
        first_step: int,
        checkpoints: CheckpointStore | None,
        every: int,
        random: Tensor | None,
    ) -> None:
        self.state = state
        self.first_step = first_step
        self.is_resumed = random is not None
        self._connection = connection
        self._checkpoints = checkpoints
        self._every = every
        self._random = random

    def rewind_random(self) -> None:
        """Restore the random numbers of the checkpoint from which the loop resumed, once."""
        if self._random is not None:
            self.state.restore("random", self._random)
            self._random = None

    def after(self, step: int, executor: Executor, *, is_last: bool = False) -> bool:
        """Write a checkpoint if one is due. Tell whether it was.

        Args:
            step: Number of steps that are complete.
            executor: Completes its operations first.
            is_last: The loop has no further step, so a checkpoint is due.
        """
        if not self._checkpoints or (step % self._every and not is_last):
            return False
        executor.drain()
        self._checkpoints.save(step, _packed(self.state, self.state.sections))
        return True

    def take_over(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Give all ranks the state of one of them."""
        take_over(self.state, rank, self._connection.place.rank, group)

    def check_also(self) -> None:
        """Raise an error for `also` in a loop without `steps()`: it would be saved before its step is over."""
        if self._checkpoints and self.state.also:
            names = ", ".join(self.state.also)
            raise RunError(
                f"checkpoints of {names} are written where the loop asks for its next step: "
                f"write `for step in worker.steps():`"
            )


def resume(
    state: RankState,
    connection: Connection,
    found: Planned,
    *,
    first_step: int,
    checkpointing: Checkpointing | None,
    until_closed: ExitStack,
    shards: Shards | None,
    peers: Peers,
) -> Resuming:
    """Give all ranks the state of the newest checkpoint, or that of rank 0 if there is none. All ranks take part.

    Copies of a sharded model get the state of the first copy if there is none.

    Args:
        state: State of this rank.
        connection: To the other ranks.
        found: The plan to perform, and the one that identifies the job.
        first_step: First step without a checkpoint.
        checkpointing: Options for checkpoints. None neither reads nor writes any.
        until_closed: Locks the folder until it is closed.
        shards: The slices of a sharded model. None: each rank has the whole model.
        peers: Ranks with the same slice of a sharded model; otherwise all ranks.

    Raises:
        RunError: The checkpoint is damaged or belongs to another job, or an object cannot be saved.
    """
    if checkpointing is None:
        checkpoints = None
        every = 0
        resumed = None
    else:
        folder = Path(checkpointing.folder)
        checkpoints = _open_checkpoints(state, connection, found.endless, folder, until_closed, shards)
        every = checkpointing.every
        resumed = checkpoints.resume()
    if resumed is None:
        begins = f"first_step={first_step}"
        if shards is None:
            take_over(state, 0, connection.place.rank, connection.group)
        else:
            _take_over_slices(state, connection, peers)
    else:
        begins = f"{folder}: its newest checkpoint is of {resumed.step} steps"
        first_step = resumed.step
        for section in state.sections:
            state.restore(section, resumed.sections[section])
    if not 0 <= first_step <= found.plan.n_steps:
        raise RunError(f"{begins}, and n_steps={found.plan.n_steps}: choose a larger number, or another folder")
    return Resuming(
        state,
        connection,
        first_step=first_step,
        checkpoints=checkpoints,
        every=every,
        random=resumed.sections["random"] if resumed else None,
    )


def _open_checkpoints(
    state: RankState,
    connection: Connection,
    endless: Plan,
    folder: Path,
    until_closed: ExitStack,
    shards: Shards | None,
) -> CheckpointStore:
    state.restore("also", state.pack("also"))  # detect now, not after hours, that it cannot be saved
    model = fingerprint(state.module, state.optimizer)
    job = JobIdentity(endless.name, endless.digest(), endless.world_size, model)
    group = patient_group(connection)

    def wait_for(function: Callable[[], None]) -> None:
        wait(connection, function, "a checkpoint")

    encoding: Encoding = ZipEncoding(group)
    if shards is not None:
        learned = LearnedOfCopy(state.module, state.optimizer, shards.copy_of(connection.place.rank), shards.reshard)
        encoding = DistributedEncoding(learned, group)
    return CheckpointStore(folder, job, encoding, group=group, wait=wait_for, until_closed=until_closed)


def take_over(state: RankState, src: int, rank: int, group: dist.ProcessGroup | None) -> None:
    """Give all ranks the state of rank `src`. All ranks take part.

    Args:
        state: State of this rank.
        src: The rank that sends its state.
        rank: This rank.
        group: Group of all ranks that can move host tensors.
    """
    sent = _packed(state, LEARNED_SECTIONS) if rank == src else {}
    for section in LEARNED_SECTIONS:
        state.restore(section, byte_transfer.broadcast(sent.get(section), src=src, group=group))


@torch.no_grad()
def _take_over_slices(state: RankState, connection: Connection, peers: Peers) -> None:
    """Give all copies of a sharded model the state of the first one, and all ranks the buffers of rank 0.

    All ranks take part.
    """
    updated = (parameter for group in state.optimizer.param_groups for parameter in group["params"])
    tensors: list[Tensor] = [*state.module.parameters()]
    described = []
    for number, parameter in enumerate(updated):
        for name, value in sorted(state.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                tensors.append(value)
                described.append(f"{number} {name} {tuple(value.shape)}")
    digest = hashlib.sha256("; ".join(described).encode()).hexdigest()[:12]
    connection.agree("the optimizer's state", f"{len(described)} tensors ({digest})")
    if len(peers.ranks) > 1:
        for part in map(local_part, tensors):
            dist.broadcast(part, src=peers.ranks[0], group=peers.process_group)
    for buffer in state.module.buffers():
        dist.broadcast(buffer, src=0, group=connection.group)


def _packed(state: RankState, sections: tuple[str, ...]) -> Mapping[str, Tensor]:
    return {section: state.pack(section) for section in sections}
