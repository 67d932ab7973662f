"""Forward and backward passes of a training loop, as its hooks see them."""

from typing import final

import torch
from torch import Tensor, nn

from real.loops.bound_model import BoundModel
from real.loops.guards import LoopGuards
from real.loops.position import At, LoopPosition
from real.watching.module_hooks import tensors_in


@final
class LoopPasses:
    """Performs the operations of the plan up to the update, as the passes of a loop reach them.

    Attributes:
        accumulate: LoopPasses only add up gradients on this rank.
    """

    def __init__(self, position: LoopPosition, model: BoundModel, guards: LoopGuards) -> None:
        self.accumulate = False
        self._position = position
        self._model = model
        self._guards = guards
        self._awaits_end = False

    def begins_with(self, module: nn.Module) -> bool:
        """Tell whether a forward pass of a module is one of the loop."""
        if module is not self._model.module or not (module.training and torch.is_grad_enabled()):
            return False  # a copy, or an evaluation
        # Activation checkpoints do the pass again. For reentrant ones of the whole model, that is the pass.
        return torch._C._current_graph_task_id() < 0 or self._position.is_between_passes

    def begin(self) -> None:
        """Begin a forward pass of the loop."""
        position = self._position
        if not position.is_between_passes:
            raise position.refusal(
                f"a second forward pass in training mode, {position.at.value}; a step is one forward "
                f"pass, one backward pass and optimizer.step(). Evaluate in model.eval() or under torch.no_grad(). Put "
                f"a pass that trains another model through this one, as in a GAN, and all passes but a step's last, "
                f"each with its backward pass, in `with worker.no_sync():`. To leave a batch out, call worker.skip()"
            )
        if position.is_last_pass and self._only_adds():
            if not position.is_first_pass:
                raise position.refusal(f"pass {position.n_passes} in worker.no_sync(); {position.passes_planned}")
            position.at = At.NEXT
            return
        self._begin_step()
        position.begin_pass()

    def end_forward(self, module: nn.Module, _inputs: object, output: object) -> None:
        """End a forward pass, and wait for what is due before the backward pass."""
        if module is not self._model.module or self._position.at is not At.FORWARD:
            return
        self._await_gradients()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._output_gradient_arrives)

    def gradient_arrives(self, parameter: Tensor) -> None:
        """Begin a backward pass with the first gradient."""
        self._guards.check_gradient(parameter)
        position = self._position
        match position.at:
            case At.NEXT:
                position.has_accumulated = True
            case At.LOSS:
                if torch.is_grad_enabled():
                    raise position.refusal(
                        "loss.backward(create_graph=True); gradients are moved into buckets, and cannot be "
                        "differentiated again: take those that you need by torch.autograd.grad(..., create_graph=True)"
                    )
                position.at = At.BACKWARD
                if not self._awaits_end:  # we know no tensor of the output
                    torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            case At.UPDATE:
                raise position.refusal(
                    "a second backward pass before optimizer.step(); gradients are synchronised in "
                    "each one: to accumulate them, do all passes but the last in `with worker.no_sync():`"
                )

    def leave_batch_out(self) -> None:
        """Do the passes of a step without this rank's batch, also after its forward pass."""
        self._guards.check_alone("a step without a batch")
        position = self._position
        if position.at is not At.LOSS:
            self._begin_step()
        if not position.has_accumulated and position.is_first_pass:
            self._model.optimizer.zero_grad()
        self.leave_passes_out()

    def leave_passes_out(self) -> None:
        """Do the passes of a step that are left, without gradients."""
        while self._position.at is not At.UPDATE:
            if self._position.at is not At.LOSS:
                self._position.begin_pass()
                self._await_gradients()
            self._position.at = At.BACKWARD
            self._model.binding.buckets.finish()

    def _only_adds(self) -> bool:
        """Tell whether the next pass only adds up gradients on this rank, or on the ranks that share a copy."""
        return self.accumulate or (self._model.shards is not None and not self._model.shards.reduces_gradients())

    def _begin_step(self) -> None:
        """Check that the plan has a pass for the loop, and sit steps out before it."""
        self._position.find_step()
        self._guards.check_in_place()

    def _await_gradients(self) -> None:
        position = self._position
        with position.explaining():
            first = position.end_forward()
            self._model.binding.buckets.expect(position.executor.buckets(first), self._bucket_is_complete)
        position.at = At.LOSS

    def _output_gradient_arrives(self, _gradient: Tensor) -> None:
        """Request a callback at the end of this backward pass, not of one nested in it by activation checkpoints."""
        self._awaits_end = True
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        if self._model.shards:  # after the callback of fully_shard, which it may queue later
            queue_callback(lambda: queue_callback(self._end_backward))
        else:
            queue_callback(self._end_backward)

    def _bucket_is_complete(self) -> None:
        position = self._position
        with position.explaining():
            if position.executor.advance_pass():
                return
            is_last = position.end_backward()
            if is_last:
                if self._model.shared:
                    self._model.shared.note(position.update)
                self._model.binding.buckets.skip_unused()
            self._model.put_gradients()
            if is_last:
                self._guards.after_backward()
                position.at = At.UPDATE

    def _end_backward(self) -> None:
        """Complete the buckets of parameters that the loss did not depend on; of a sharded model, all buckets."""
        self._awaits_end = False
        if self._model.shards and self._position.at is At.LOSS:
            self._take_gradients()
        if self._position.at is At.BACKWARD:
            self._model.binding.buckets.finish()

    def _take_gradients(self) -> None:
        """Take the gradients of a sharded model, unless there are none, as after `torch.autograd.grad`."""
        shards = self._model.shards
        assert shards is not None
        arrived = [parameter for parameter in shards.parameters if parameter.grad is not None]
        if not arrived and shards.reduces_gradients():
            return
        for parameter in arrived:
            self.gradient_arrives(parameter)
        self._model.take_gradients()
        self._position.at = At.BACKWARD
