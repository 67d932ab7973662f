"""Where a loop begins: at its first step, or where its newest checkpoint ends; and the checkpoints that it writes."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import final

import torch.distributed as dist
from torch import Tensor

from real.checkpoints.checkpoint import Checkpoints, JobIdentity
from real.checkpoints.rank_state import LEARNED, SECTIONS, RankState, fingerprint
from real.collectives import byte_transfer
from real.execution.executor import Executor
from real.loops.options import Checkpointing
from real.loops.ranks import patient_group, wait
from real.processes.launch import Connection
from simdist.errors import RunError
from simdist.plan import Plan


@final
class Resuming:
    """Keeps the state of one rank; made by `resume`.

    Args:
        state: Of this rank.
        connection: To the others.
        first_step: Where the loop begins.
        checkpoints: Those of the job; None writes none.
        every: Steps from one checkpoint to the next.
        random: The random numbers of the checkpoint that the state is of; None if it is of none.

    Attributes:
        state: Of this rank.
        first_step: Where the loop begins.
        is_resumed: The state is that of a checkpoint.
    """

    def __init__(
        self,
        state: RankState,
        connection: Connection,
        *,
        first_step: int,
        checkpoints: Checkpoints | None,
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
        """Set the random numbers, once, to where they were before the first step, if that is after a checkpoint."""
        if self._random is not None:
            self.state.restore("random", self._random)
            self._random = None

    def after(self, step: int, executor: Executor, *, is_last: bool = False) -> bool:
        """Write a checkpoint, if one is due after so many steps, and tell whether.

        Args:
            step: The next step.
            executor: Is waited for.
            is_last: There is none.
        """
        if not self._checkpoints or (step % self._every and not is_last):
            return False
        executor.drain()
        self._checkpoints.save(step, _packed(self.state, SECTIONS))
        return True

    def take_over(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Let all ranks have what one of them has learned."""
        take_over(self.state, rank, self._connection.place.rank, group)

    def check_also(self) -> None:
        """Refuse what would be saved too early: a loop without `steps()` has not told that its step is over."""
        if self._checkpoints and self.state.also:
            names = ", ".join(self.state.also)
            raise RunError(
                f"checkpoints of {names} are written where the loop asks for its next step: "
                f"write `for step in worker.steps():`"
            )


def resume(
    state: RankState,
    connection: Connection,
    plan: Plan,
    endless: Plan,
    *,
    first_step: int,
    checkpointing: Checkpointing | None,
    until_closed: ExitStack,
) -> Resuming:
    """Let all ranks have the state of the newest checkpoint, or else what rank 0 has learned; all take part.

    Args:
        state: Of this rank.
        connection: To the others.
        plan: The plan to perform.
        endless: What the job is known by.
        first_step: Where to begin without a checkpoint.
        checkpointing: Where checkpoints are, and when they are written; None: nowhere and never.
        until_closed: The folder is locked until then.

    Raises:
        RunError: The checkpoint is of another job, or damaged; the state holds what cannot be saved.
    """
    if checkpointing is None:
        checkpoints = None
        every = 0
        resumed = None
    else:
        folder = Path(checkpointing.folder)
        checkpoints = _open_checkpoints(state, connection, endless, folder, until_closed)
        every = checkpointing.every
        resumed = checkpoints.resume()
    if resumed is None:
        begins = f"first_step={first_step}"
        take_over(state, 0, connection.place.rank, connection.group)
    else:
        begins = f"{folder}: its newest checkpoint is of {resumed.step} steps"
        first_step = resumed.step
        for section in SECTIONS:
            state.restore(section, resumed.sections[section])
    if not 0 <= first_step <= plan.n_steps:
        raise RunError(f"{begins}, and n_steps={plan.n_steps}: choose a larger number, or another folder")
    return Resuming(
        state,
        connection,
        first_step=first_step,
        checkpoints=checkpoints,
        every=every,
        random=resumed.sections["random"] if resumed else None,
    )


def _open_checkpoints(
    state: RankState, connection: Connection, endless: Plan, folder: Path, until_closed: ExitStack
) -> Checkpoints:
    state.restore("also", state.pack("also"))  # now, and not after the first hours, see that it can be saved
    model = fingerprint(state.module, state.optimizer)
    job = JobIdentity(endless.name, endless.digest(), endless.world_size, model)
    group = patient_group(connection)

    def wait_for(function: Callable[[], None]) -> None:
        wait(connection, function, "a checkpoint")

    return Checkpoints(folder, job, group=group, wait=wait_for, until_closed=until_closed)


def take_over(state: RankState, src: int, rank: int, group: dist.ProcessGroup | None) -> None:
    """Let all ranks have what rank `src` has learned; all take part.

    Args:
        state: Of this rank.
        src: The rank that has learned.
        rank: This rank.
        group: Of all ranks, and able to move tensors of the host.
    """
    sent = _packed(state, LEARNED) if rank == src else {}
    for section in LEARNED:
        state.restore(section, byte_transfer.broadcast(sent.get(section), src=src, group=group))


def _packed(state: RankState, sections: tuple[str, ...]) -> Mapping[str, Tensor]:
    return {section: state.pack(section) for section in sections}
