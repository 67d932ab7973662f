"""When a training loop writes checkpoints, and how it begins: from the newest one, or with the values of rank 0."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from torch import Tensor

from real.checkpoints.archive import Job
from real.checkpoints.checkpoint import Checkpoints
from real.checkpoints.states import LEARNED, SECTIONS, State, fingerprint
from real.collectives import byte_transfer
from real.execution.executor import Executor
from real.training.peers import Peers
from simdist.errors import RunError
from simdist.plan import Plan


@final
class Resuming:
    """Keeps the state of one rank.

    Args:
        plan: What is performed.
        state: Of this rank.
        peers: The others; all of them make this together.
        folder: For checkpoints; None writes none.
        every: Steps from one to the next.

    Raises:
        RunError: The checkpoint is of another job, or damaged; the state holds what cannot be saved.
    """

    def __init__(self, plan: Plan, state: State, peers: Peers, *, folder: Path | None, every: int) -> None:
        self._plan, self._state, self._peers, self._every = plan, state, peers, every
        self.first_step = 0
        self._random: Tensor | None = None
        self._checkpoints: Checkpoints | None = None
        if folder:
            state.restore("also", state.pack("also"))  # now, and not after the first hours, see that it can be saved
            model = fingerprint(state.module, state.optimizer)
            job = Job(plan.name, plan.digest(), plan.world_size, model)
            self._checkpoints = Checkpoints(folder, job, group=peers.patient_group(), wait=self._wait)
        self._begin()

    def rewind_random(self) -> None:
        """Set the random numbers to where they were before the first step, if that is after a checkpoint."""
        if self._random is not None:
            self._state.restore("random", self._random)

    def after(self, step: int, executor: Executor) -> None:
        """Write a checkpoint, if one is due after so many steps.

        Args:
            step: The next step.
            executor: Is waited for.
        """
        if self._checkpoints and (step % self._every == 0 or step == self._plan.n_steps):
            executor.drain()
            self._checkpoints.save(step, self._packed(SECTIONS))

    def check_also(self) -> None:
        """Refuse what would be saved too early: a loop without `steps()` has not told that its step is over."""
        if self._checkpoints and self._state.also:
            names = ", ".join(self._state.also)
            raise RunError(
                f"checkpoints of {names} are written where the loop asks for its next step: "
                f"write `for step in worker.steps():`"
            )

    def _begin(self) -> None:
        resumed = self._checkpoints.resume() if self._checkpoints else None
        if resumed:
            for section in SECTIONS:
                self._state.restore(section, resumed.sections[section])
            self.first_step, self._random = resumed.step, resumed.sections["random"]
            return
        sent = self._packed(LEARNED) if self._peers.rank == 0 else {}
        for section in LEARNED:
            self._state.restore(section, byte_transfer.broadcast(sent.get(section)))

    def _packed(self, sections: tuple[str, ...]) -> Mapping[str, Tensor]:
        return {section: self._state.pack(section) for section in sections}

    def _wait(self, function: Callable[[], None]) -> None:
        self._peers.wait(function, "a checkpoint")
