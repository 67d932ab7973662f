"""Updates of a training loop: `optimizer.step()`, with or without a closure, and steps without one."""

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from real.loops.bound_model import BoundModel
from real.loops.guards import LoopGuards
from real.loops.passes import LoopPasses
from real.loops.position import At, LoopPosition
from real.loops.shards import uses_of_parameters, whole
from real.programs.binding import trained_parameters
from real.session import Session
from simdist.plan.liveness import carried_buffers

_Arguments = tuple[tuple[object, ...], dict[str, object]]


@final
class LoopUpdates:
    """Performs the operations of the plan after the backward pass, and ends steps.

    Args:
        session: Has the plan and its buffers.
        position: Where the loop is.
        model: The model that the loop calls.
        guards: Checks gradients and parameters.
        passes: Does the passes of a step without a batch.
    """

    def __init__(
        self, session: Session, position: LoopPosition, model: BoundModel, guards: LoopGuards, passes: LoopPasses
    ) -> None:
        plan = session.plan
        self._position = position
        self._model = model
        self._guards = guards
        self._passes = passes
        self._use_of_parameters = uses_of_parameters(plan, model.binding.parameter_names) if model.shards else None
        carried = (name for name in carried_buffers(plan) if name in session.memory)
        self._carried = [tensor for name in carried for tensor in session.memory.tensors(name)]
        self._n_left_out = 0
        self._last_left_out = -1
        self._overflows: Tensor | float = 0.0
        self._n_open = 0  # calls of step() under way: a subclass calls that of its base, which has hooks, too
        self._after_skipped = -1  # the step after one that `skip` has done

    @property
    def left_out(self) -> str:
        """Number of updates that were skipped on this rank, in words."""
        last = f", last in step {self._last_left_out}" if self._n_left_out else ""
        return f"{self._n_left_out + int(self._overflows)}{last}"

    def settle(self) -> None:
        """End a step without its update, such as one that a gradient scaler skipped after an overflow."""
        if self._position.at is At.UPDATE:
            self._guards.check_unchanged()
            self._n_left_out = self._n_left_out + 1
            self._last_left_out = self._position.step
            if self._model.shared:
                self._model.shared.keep()
            self._end_step(updated=False)

    def idle_step(self) -> None:
        """Take part in a step without a batch and without gradients."""
        self._model.optimizer.zero_grad()
        self._passes.leave_passes_out()
        self._end_step(updated=False)

    def skip(self, update: Callable[[], object] | None) -> None:
        """Do a step without this rank's batch. After a backward pass, leave out the update."""
        self._guards.check_alone("worker.skip()")
        at = self._position.at
        if at in (At.FORWARD, At.BACKWARD):
            raise self._position.refusal(f"worker.skip() {at.value}; call it in place of a batch's loss.backward()")
        parameters = trained_parameters(self._model.module)
        if at is not At.UPDATE:
            self._passes.leave_batch_out()
            has_gradients = any(parameter.grad is not None for parameter in parameters)
            if update is not None and has_gradients:  # a scaler without gradients raises an error
                update()
            else:
                self._model.optimizer.step()
        self.settle()
        for parameter in parameters:
            parameter.grad = None
        self._after_skipped = self._position.step

    def clip_grad_norm(self, max_norm: float, everyone: dist.ProcessGroup | None) -> Tensor:
        """Clip the gradients of the step, also where ranks share updates. Return their norm before."""
        position = self._position
        if position.at is not At.UPDATE:
            raise position.refusal(f"worker.clip_grad_norm_() {position.at.value}; it belongs before optimizer.step()")
        shared = self._model.shared
        if shared and shared.hides(position.update):
            with position.explaining():
                return shared.clip(position.update, max_norm, everyone)
        return whole(nn.utils.clip_grad_norm_(trained_parameters(self._model.module), max_norm))

    def begin(self, _optimizer: object, args: tuple[object, ...], kwargs: dict[str, object]) -> _Arguments | None:
        """Begin the update at the outermost call of `step`. A closure computes the loss and the gradients first."""
        if self._n_open:
            self._n_open += 1
            return None
        closure = _closure_in(args, kwargs)
        if self._has_skipped and closure is None:
            return None  # `skip` has done the update, and left no gradients
        replaced = self._call(closure, args, kwargs) if closure else None
        position = self._position
        if position.at is not At.UPDATE:
            raise position.refusal(
                f"optimizer.step() {position.at.value}; call the model that was wrapped, in training "
                f"mode, then loss.backward(), then optimizer.step(); {position.passes_planned}"
            )
        self._guards.check_fresh()
        if self._model.shared:
            self._model.shared.begin(position.update)
        self._model.rating.give(position.update)
        self._n_open = 1
        return replaced

    def end(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        """End the update, and the step, at the outermost call of `step`."""
        if self._has_skipped:
            return
        self._n_open -= 1
        if self._n_open:
            return  # of a base class
        if self._model.shared:
            self._model.shared.end()
        self._model.binding.reclaim()
        # A gradient scaler tells a fused optimizer of an overflow, and that one skips by itself.
        overflows = vars(self._model.optimizer).get("found_inf", 0.0)
        self._overflows += overflows
        self._guards.after_update()
        self._end_step(updated=not (self._carried and overflows))

    @property
    def _has_skipped(self) -> bool:
        """Whether `skip` has done a step, and no pass of the plan has begun since."""
        position = self._position
        return position.step == self._after_skipped and position.is_between_passes and position.is_first_pass

    def _call(self, closure: Callable[[], object], args: tuple[object, ...], kwargs: dict[str, object]) -> _Arguments:
        """Call the closure of `step`, and return arguments by which the optimizer finds its loss."""
        position = self._position
        if position.at is At.UPDATE:
            raise position.refusal(
                "optimizer.step(closure) after a backward pass, so a step would have two; compute the gradients in "
                "the closure alone. To accumulate gradients, do all passes but a step's last in "
                "`with worker.no_sync():`; Lightning does with real.frameworks.lightning.schedule_callback. Of an "
                "optimizer with two passes, such as SAM, wrap its base_optimizer"
            )
        with torch.enable_grad():
            loss = closure()
        if loss is None and (position.is_between_passes or position.at is At.LOSS):
            self._passes.leave_batch_out()  # Lightning leaves a batch out whose training step returns None
        n_calls = 0

        def known_loss() -> object:
            nonlocal n_calls
            n_calls += 1
            if n_calls > 1:
                raise position.refusal(
                    f"{type(self._model.optimizer).__name__}.step(closure) calls its closure several times, and a step "
                    f"of the plan has one backward pass: take an optimizer that calls it once, such as SGD or Adam"
                )
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": known_loss}
        return (args[0], known_loss, *args[2:]), kwargs

    def _end_step(self, *, updated: bool) -> None:
        position = self._position
        with position.explaining():
            position.end_update()
            self._finish_step()
            if self._carried and not updated:  # an overflow that compression keeps would be in every later step
                position.executor.drain()
                for kept in self._carried:
                    kept.nan_to_num_(0.0, 0.0, 0.0)
        self._n_open = 0
        self._guards.end_step()
        position.end_step()

    def _finish_step(self) -> None:
        """Perform the rest of a step. A sharded model takes back its parameters when it is done with them."""
        position = self._position
        use = self._use_of_parameters(position.step) if self._use_of_parameters else None
        if use is None or not use.is_any:
            position.executor.finish_step(position.step)
            return
        with self._model.staged():
            position.executor.finish_step(position.step)
            if use.ends_elsewhere:
                position.executor.drain()


def _closure_in(args: tuple[object, ...], kwargs: dict[str, object]) -> Callable[[], object] | None:
    """Return the closure in the arguments of `step`, of which the first is the optimizer."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None
