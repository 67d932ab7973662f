"""Where a training loop is in its plan."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import final

from real.execution.executor import Executor
from real.loops.plans import n_passes
from real.session import Session
from simdist.errors import RunError
from simdist.plan import Instance, ops


class At(Enum):
    """Position of a loop in a step."""

    BEGIN = "before the forward pass"
    NEXT = "between two of the accumulated passes"
    FORWARD = "in the forward pass"
    LOSS = "between the forward and the backward pass"
    BACKWARD = "in the backward pass"
    UPDATE = "after the backward pass"


@final
class LoopPosition:
    """The position of a loop. It drives the executor to the operations of the plan that the loop has reached.

    Args:
        session: Its plan passes `real.loops.plans.check_shape`.
        executor: Executes the plan from `first_step` on. Only the hooks drive it from now on.
        first_step: First step of the loop and of the executor.
        after_step: Called at the end of each step.

    Attributes:
        plan: The plan.
        executor: See above.
        step: The current step, or the next one between two steps.
        at: Position in the step.
        n_passes: Passes of the plan in a step.
        has_accumulated: Passes before those of the plan have added up gradients in this step.
    """

    def __init__(
        self, session: Session, executor: Executor, *, first_step: int, after_step: Callable[[], None]
    ) -> None:
        self.plan = session.plan
        self.executor = executor
        self.step = first_step
        self.at = At.BEGIN
        self.has_accumulated = False
        self._guard = session.watch
        self._after_step = after_step
        self._before_step: Callable[[], object] | None = None
        self.n_passes = n_passes(session.plan)
        self._n_left = self.n_passes
        self._reached: dict[type[ops.Op], Instance] = {}  # what the loop does last, by its kind
        self._guard.step = first_step

    @property
    def is_between_passes(self) -> bool:
        """A forward pass may begin."""
        return self.at in (At.BEGIN, At.NEXT)

    @property
    def is_first_pass(self) -> bool:
        """No pass of the plan is complete in this step."""
        return self._n_left == self.n_passes

    @property
    def is_last_pass(self) -> bool:
        """One pass of the plan is left in this step."""
        return self._n_left == 1

    @property
    def update(self) -> ops.Optimize:
        """The update of this step, after its last backward pass."""
        update = self._reached[ops.Optimize].op
        assert isinstance(update, ops.Optimize)
        return update

    @property
    def passes_planned(self) -> str:
        """Number of passes in a step, as a part of a message."""
        planned = f"plan {self.plan.name} has {self.n_passes} passes in a step; " if self.n_passes > 1 else ""
        return f"{planned}the last of the accumulated passes must be outside worker.no_sync()"

    def refusal(self, problem: str) -> RunError:
        """Return an error after telling the other ranks, because a script may catch it and continue."""
        error = RunError(f"step {self.step}: {problem}")
        self._guard.fail(str(error))
        return error

    def explaining(self) -> AbstractContextManager[None]:
        """Say in errors of this context, and to the other ranks, which step this is."""
        return self._guard.explaining(f"step {self.step}")

    @contextmanager
    def joined(self, before_step: Callable[[], object]) -> Iterator[None]:
        """Call a function at the beginning of every step of the plan."""
        self._before_step = before_step
        try:
            yield
        finally:
            self._before_step = None

    def pass_over_step(self) -> bool:
        """Skip the next step if the plan lets this rank sit it out. Tell whether it does."""
        if self.step >= self.plan.n_steps or not self.executor.sits_out(self.step):
            return False
        with self.explaining():
            self.executor.finish_step(self.step)
        self.step += 1
        self._guard.step = self.step
        self._after_step()
        return True

    def find_step(self) -> None:
        """Find the step of the next pass. Before it, sit steps out.

        Raises:
            RunError: The plan has no further step.
        """
        while self.is_first_pass and self.pass_over_step():
            pass
        if self.step >= self.plan.n_steps:
            raise self.refusal(f"the plan has {self.plan.n_steps} steps, and all are done; wrap with a larger n_steps")

    def begin_pass(self) -> None:
        """Do everything up to the forward pass."""
        if self._before_step and self.is_first_pass:
            self._before_step()
        self._guard.step = self.step + 1
        with self.explaining():
            self._reach(ops.Forward)
        self.at = At.FORWARD

    def end_forward(self) -> Instance:
        """Do everything up to the backward pass of the first bucket, and return that."""
        self.executor.done(self._reached[ops.Forward])
        return self._reach(ops.Backward)

    def end_backward(self) -> bool:
        """End a pass. After the last one of the step, do everything up to the update, and return True."""
        self._n_left -= 1
        if self._n_left:
            self.at = At.NEXT
            return False
        self._reach(ops.Optimize)
        return True

    def end_update(self) -> None:
        """Mark the update as done."""
        self.executor.done(self._reached[ops.Optimize])

    def end_step(self) -> None:
        """Go to the next step."""
        self.step += 1
        self.at = At.BEGIN
        self.has_accumulated = False
        self._n_left = self.n_passes
        self._after_step()

    def _reach(self, kind: type[ops.Forward] | type[ops.Backward] | type[ops.Optimize]) -> Instance:
        reached = self.executor.reach(kind)
        if reached is None or reached[0].step != self.step:
            raise self.refusal(f"plan {self.plan.name} has no {kind.__name__} there")
        self._reached[kind] = reached[0]
        return reached[0]
