"""Performs a plan from within a user's own training loop, by hooks of its module and optimizer.

A step of a training loop is a forward pass, a backward pass and an update. A step of a plan has other operations in
between. The events of the loop perform them:

    forward pass begins        everything up to `Forward`
    forward pass ends       everything up to the first `Backward`: the wait for an earlier loss, delays of the host
    a bucket is complete    what comes after its `Backward`: its all-reduce begins while autograd goes on
    the last bucket is      everything up to `Optimize`: when `backward()` returns, gradients are averaged
    the update ends         the rest of the step: when `optimizer.step()` returns, parameters are averaged

A plan with k micro-batches has k forward and backward passes in a step. All passes but the last only compute. If the
plan has one pass, passes in `no_sync` do not belong to the plan. It performs the pass that follows them.

The hooks also check the order of events. A loop that leaves this order gets an error at that place.

A model under `fully_shard` has complete gradients when `backward()` is about to return. All buckets are complete then.
Passes without `set_requires_gradient_sync` do not belong to the plan, like those in `no_sync`.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import nn

from real.execution.executor import Executor
from real.loops.bound_model import BoundModel
from real.loops.guards import LoopGuards
from real.loops.passes import LoopPasses
from real.loops.position import LoopPosition
from real.loops.updates import LoopUpdates
from real.session import Session
from real.watching.module_hooks import not_compiled
from simdist.errors import RunError


@final
class Hooks:
    """The hooks on one module and its optimizer.

    Args:
        session: Its plan passes `real.loops.plans.check_shape`.
        model: The model that the loop calls.
        executor: Executes the plan from `first_step` on. Only the hooks drive it from now on.
        first_step: First step of the loop and of the executor.
        after_step: Called at the end of each step.

    Attributes:
        position: Where the loop is.
        guards: Checks that the plan can follow the loop.
        passes: Forward and backward passes.
        updates: Updates, and steps without one.
    """

    def __init__(
        self,
        session: Session,
        model: BoundModel,
        executor: Executor,
        *,
        first_step: int,
        after_step: Callable[[], None],
    ) -> None:
        self.position = LoopPosition(session, executor, first_step=first_step, after_step=after_step)
        self.guards = LoopGuards(self.position, model)
        self.passes = LoopPasses(self.position, model, self.guards)
        self.updates = LoopUpdates(session, self.position, model, self.guards, self.passes)
        torch.compiler.reset()  # a model that was compiled and called before would not look for new hooks
        model.arrivals.listen(self.passes.gradient_arrives)
        before = not_compiled(self._forward_begins)
        self._handles = [
            model.module.register_forward_pre_hook(before, prepend=model.shards is not None),
            model.module.register_forward_hook(not_compiled(self.passes.end_forward)),
            model.optimizer.register_step_pre_hook(self.updates.begin),
            model.optimizer.register_step_post_hook(self.updates.end),
        ]

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def check_between_steps(self, doing: str) -> None:
        """Raise an error in the middle of a pass or an update."""
        self.updates.settle()
        if not self.position.is_between_passes:
            at = self.position.at.value
            raise RunError(f"step {self.position.step}: {doing} {at}; do that between two steps, on all ranks")

    def _forward_begins(self, module: nn.Module, _inputs: object) -> None:
        if self.passes.begins_with(module):
            self.updates.settle()
            self.passes.begin()
