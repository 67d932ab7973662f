"""What a loop does between two steps and at its end: checkpoints, the average, and warnings."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from real.loops.bound_model import BoundModel
from real.loops.hooks import Hooks
from real.loops.options import Averaging
from real.loops.planning import ENDLESS_STEPS
from real.loops.ranks import Peers, average, everyone
from real.loops.resuming import Resuming
from real.session import Session
from simdist.errors import RunError
from simdist.plan import Load
from simdist.plan.ops import entering


@final
class Conclusion:
    """Concludes the steps of a loop, each only once.

    Args:
        session: Has the plan, and the connection to the other ranks.
        model: The model of the loop.
        hooks: Know the step and the updates that were left out.
        resuming: Writes checkpoints.
        averaging: Options for the average at the end.
        peers: Ranks with the same slice of a sharded model; otherwise all ranks.

    Attributes:
        resuming: See above.
        is_ended: The end of the loop is concluded.
        reads: The loop reads batches as the plan says.
    """

    def __init__(
        self,
        session: Session,
        model: BoundModel,
        hooks: Hooks,
        resuming: Resuming,
        averaging: Averaging,
        peers: Peers,
    ) -> None:
        self.resuming = resuming
        self.is_ended = False
        self.reads = not any(isinstance(op, Load) for body in session.plan.bodies for op in body)
        self._plan = session.plan
        self._connection = session.connection
        self._model = model
        self._hooks = hooks
        self._averaging = averaging
        self._peers = peers
        self._concluded = resuming.first_step
        self._has_warned = False

    @property
    def _common_step(self) -> int | None:
        """The next step of all ranks. None if ranks sit steps out, as they then count different ones."""
        return None if any(map(entering, self._plan.bodies)) else self._hooks.position.step

    def conclude(self, *, at_end: bool = False) -> None:
        """Write a checkpoint that is due after the last step. At the end of the loop, average."""
        step = self._hooks.position.step
        executor = self._hooks.position.executor
        is_new = step > self._concluded
        self._concluded = step
        is_last = step == self._plan.n_steps or (at_end and self._plan.n_steps == ENDLESS_STEPS)
        ends = meets = (at_end or is_last) and not self.is_ended
        call = "ended its loop" if ends else "wrote a checkpoint"
        with self._connection.guard.calling(f"{call} before step {step}"):
            if ends:
                self.is_ended = True
                with self._leaving_early(step):
                    self._connection.agree("the step at the end of the loop", str(step), before_step=step)
            if is_new and not is_last:
                meets |= self.resuming.after(step, executor)
            if ends:
                executor.drain()
                if self._averaging.final_average:
                    self.average(buffers=self._averaging.average_buffers)
                if is_last and step > self.resuming.first_step:
                    self.resuming.after(step, executor, is_last=True)
            if meets:
                self.warn_of_left_out()
        if is_new and not self.reads and self._connection.place.rank == 0:
            self.reads = True
            warnings.warn(
                f"{self._plan.name} reads its batches, and the loop brings its own, so what the plan says of that has "
                f"no effect and takes no time in a trace: use worker.feed(...), with `data` in the scenario",
                RuntimeWarning,
                stacklevel=2,
            )

    def average(self, *, buffers: bool) -> None:
        """Replace the parameters by their means over the peers, and buffers by their means over all ranks."""
        step = self._common_step
        what = "the average" if step is None else f"the average before step {step}"
        with self._model.staged():
            average(self._connection, self._model.binding.parameter_buffers, self._peers, what=what, before_step=step)
        if buffers:
            floating = [each for each in self._model.module.buffers() if each.is_floating_point()]
            average(
                self._connection, floating, everyone(self._connection), what=f"{what}, of buffers", before_step=step
            )

    def warn_of_left_out(self) -> None:
        """Warn once if ranks have skipped different updates. All ranks take part."""
        found = self._connection.exchange(
            "updates that were left out", self._hooks.updates.left_out, before_step=self._common_step
        )
        if len(set(found)) == 1 or self._has_warned:
            return
        self._has_warned = True
        if self._connection.place.rank == 0:
            named = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(found) if each != "0")
            warnings.warn(
                f"{self._plan.name} until step {self._hooks.position.step}: ranks have left out different "
                f"optimizer.step(), as gradient scalers do after an overflow, so the scales of their scalers may "
                f"differ: {named}",
                RuntimeWarning,
                stacklevel=2,
            )

    @contextmanager
    def _leaving_early(self, step: int) -> Iterator[None]:
        """If the other ranks do not end their loops, say in the error that this rank left."""
        try:
            yield
        except RunError as error:
            if self._plan.n_steps in (step, ENDLESS_STEPS):
                raise
            left = f"this rank left its loop before step {step} of {self._plan.n_steps}"
            raise RunError(f"{left}; all ranks have to leave before the same one: {error}") from None
