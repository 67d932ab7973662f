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

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from real.checkpoints.rank_state import carried_buffers
from real.execution.executor import Executor
from real.loops.bound_model import BoundModel
from real.loops.shards import Shards, local_part, uses_of_parameters, whole
from real.loops.step_shape import n_passes
from real.programs.binding import trained_parameters
from real.session import Session
from real.watching.module_hooks import not_compiled, tensors_in
from simdist.errors import RunError
from simdist.plan import Instance, ops


class _At(Enum):
    """Position of the loop in a step."""

    BEGIN = "before the forward pass"
    NEXT = "between two of the accumulated passes"
    FORWARD = "in the forward pass"
    LOSS = "between the forward and the backward pass"
    BACKWARD = "in the backward pass"
    UPDATE = "after the backward pass"


@final
class Hooks:
    """The hooks on one module and its optimizer.

    Args:
        session: Its plan passes `real.loops.step_shape.check_shape`.
        model: The model that the loop calls.
        executor: Executes the plan from `first_step` on. Only the hooks drive it from now on.
        first_step: First step of the loop and of the executor.
        after_step: Called at the end of each step.

    Attributes:
        step: The current step, or the next one between two steps.
        accumulate: Passes only add up gradients on this rank.
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
        plan = session.plan
        self.step = first_step
        self.accumulate = False
        self._plan = plan
        self._guard = session.watch
        self._module = model.module
        self._optimizer = model.optimizer
        self._model = model
        self._use_of_parameters = uses_of_parameters(plan, model.binding.parameter_names) if model.shards else None
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.module.named_parameters()}
        self._binding = model.binding
        self._shared = model.shared
        self._executor = executor
        self._after_step = after_step
        self._before_step: Callable[[], object] | None = None
        self._at = _At.BEGIN
        self._awaits_end = False
        self._n_passes = n_passes(plan)
        self._n_left = self._n_passes
        self._n_left_out = 0
        self._last_left_out = -1
        self._overflows: Tensor | float = 0.0
        carried = (name for name in carried_buffers(plan) if name in session.memory)
        self._carried = [tensor for name in carried for tensor in session.memory.tensors(name)]
        self._reached: dict[type[ops.Op], Instance] = {}  # what the loop does last, by its kind
        self._n_open_updates = 0  # calls of step() under way: a subclass calls that of its base, which has hooks, too
        self._has_updated = False
        self._versions: list[int] = []  # of the parameters that the optimizer updates, after the backward pass
        self._has_skipped = False
        self._has_accumulated = False
        self._first: Tensor | None = None  # the parameter whose gradient came first in this step
        self._n_arrived = 0  # how often its gradient came
        self._kept: tuple[weakref.ref[Tensor] | None, int] = None, 0  # its gradient in the last step, and version
        self._trained = trained_parameters(model.module)
        self._frozen = [parameter for parameter in model.module.parameters() if not parameter.requires_grad]
        self._n_updated = _n_updated(model.optimizer)
        self._guard.step = first_step
        torch.compiler.reset()  # a model that was compiled and called before would not look for new hooks
        model.arrivals.listen(self._gradient_arrives)
        self._handles = [
            model.module.register_forward_pre_hook(
                not_compiled(self._forward_begins), prepend=self._shards is not None
            ),
            model.module.register_forward_hook(not_compiled(self._forward_ends)),
            model.optimizer.register_step_pre_hook(self._update_begins),
            model.optimizer.register_step_post_hook(self._update_ends),
        ]

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def settle(self) -> None:
        """End a step without its update, such as one that a gradient scaler skipped after an overflow."""
        if self._at is _At.UPDATE:
            self._check_unchanged()
            self._n_left_out = self._n_left_out + 1
            self._last_left_out = self.step
            if self._shared:
                self._shared.keep()
            self._end_step(updated=False)

    @property
    def _shards(self) -> Shards | None:
        """The slices of a sharded model."""
        return self._model.shards

    @property
    def left_out(self) -> str:
        """Number of updates that were skipped on this rank, in words."""
        last = f", last in step {self._last_left_out}" if self._n_left_out else ""
        return f"{self._n_left_out + int(self._overflows)}{last}"

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
        if self.step >= self._plan.n_steps or not self._executor.sits_out(self.step):
            return False
        with self._guard.explaining(f"step {self.step}"):
            self._executor.finish_step(self.step)
        self.step += 1
        self._guard.step = self.step
        self._after_step()
        return True

    def idle_step(self) -> None:
        """Take part in a step without a batch and without gradients."""
        self._optimizer.zero_grad()
        self._leave_passes_out()
        self._end_step(updated=False)

    def skip(self, update: Callable[[], object] | None) -> None:
        """Do a step without this rank's batch. After a backward pass, leave out the update."""
        self.check_alone("worker.skip()")
        if self._at in (_At.FORWARD, _At.BACKWARD):
            raise self._refusal(f"worker.skip() {self._at.value}; call it in place of a batch's loss.backward()")
        if self._at is not _At.UPDATE:
            self._leave_batch_out()
            has_gradients = any(parameter.grad is not None for parameter in self._trained)
            if update is not None and has_gradients:  # a scaler without gradients raises an error
                update()
            else:
                self._optimizer.step()
        self.settle()
        for parameter in self._trained:
            parameter.grad = None
        self._has_skipped = True

    def _leave_batch_out(self) -> None:
        """Do the passes of a step without this rank's batch, also after its forward pass."""
        self.check_alone("a step without a batch")
        if self._at is not _At.LOSS:
            self._begin_step()
        if not self._has_accumulated and self._n_left == self._n_passes:
            self._optimizer.zero_grad()
        self._leave_passes_out()

    def _leave_passes_out(self) -> None:
        """Do the passes of a step that are left, without gradients."""
        while self._at is not _At.UPDATE:
            if self._at is not _At.LOSS:
                self._begin_pass()
                self._await_gradients()
            self._at = _At.BACKWARD
            self._binding.buckets.finish()

    def clip_grad_norm(self, max_norm: float, everyone: dist.ProcessGroup | None) -> Tensor:
        """Clip the gradients of the step, also where ranks share updates. Return their norm before."""
        if self._at is not _At.UPDATE:
            raise self._refusal(f"worker.clip_grad_norm_() {self._at.value}; it belongs before optimizer.step()")
        update = self._reached[ops.Optimize].op
        if self._shared and isinstance(update, ops.Optimize) and self._shared.hides(update):
            with self._guard.explaining(f"step {self.step}"):
                return self._shared.clip(update, max_norm, everyone)
        return whole(nn.utils.clip_grad_norm_(self._trained, max_norm))

    def check_alone(self, doing: str) -> None:
        """Raise an error if ranks share a copy of the model: the others wait for this rank in each of their passes."""
        if self._shards and self._shards.ranks_per_copy > 1:
            raise RunError(
                f"{doing} of a model under fully_shard: the ranks that share a copy gather its parameters in every "
                f"pass, and would wait for this rank: do the pass with the loss multiplied by 0, or give all ranks "
                f"equally many batches"
            )

    def check_unshared(self, doing: str) -> None:
        """Raise an error if ranks share updates: others would wait for this rank's slice."""
        if self._shared:
            raise RunError(f"{doing} with shared updates: others would wait for the slice of a rank that is through")

    def check_between_steps(self, doing: str) -> None:
        """Raise an error in the middle of a pass or an update."""
        self.settle()
        if self._at not in (_At.BEGIN, _At.NEXT):
            raise RunError(f"step {self.step}: {doing} {self._at.value}; do that between two steps, on all ranks")

    @property
    def where(self) -> str:
        """Position of the loop in its step, in words."""
        return self._at.value

    def _forward_begins(self, module: nn.Module, _inputs: object) -> None:
        if module is not self._module or not (module.training and torch.is_grad_enabled()):
            return  # a copy, or an evaluation
        if torch._C._current_graph_task_id() >= 0 and self._at not in (_At.BEGIN, _At.NEXT):
            return  # again, for activation checkpoints; for reentrant ones of the whole model, that is the pass
        self.settle()
        if self._at not in (_At.BEGIN, _At.NEXT):
            raise self._refusal(
                f"a second forward pass in training mode, {self._at.value}; a step is one forward "
                f"pass, one backward pass and optimizer.step(). Evaluate in model.eval() or under torch.no_grad(). Put "
                f"a pass that trains another model through this one, as in a GAN, and all passes but a step's last, "
                f"each with its backward pass, in `with worker.no_sync():`. To leave a batch out, call worker.skip()"
            )
        if self._n_left == 1 and self._only_adds():
            if self._n_passes > 1:
                raise self._refusal(f"pass {self._n_passes} in worker.no_sync(); {self._passes_planned}")
            self._at = _At.NEXT
            return
        self._begin_step()
        self._begin_pass()

    def _only_adds(self) -> bool:
        """Tell whether the next pass only adds up gradients on this rank, or on the ranks that share a copy."""
        return self.accumulate or (self._shards is not None and not self._shards.reduces_gradients())

    def _begin_step(self) -> None:
        """Check that the plan has a pass for the loop, and sit steps out before it."""
        while self._n_left == self._n_passes and self.pass_over_step():
            pass
        if self.step >= self._plan.n_steps:
            raise self._refusal(
                f"the plan has {self._plan.n_steps} steps, and all are done; wrap with a larger n_steps"
            )
        self._check_in_place()
        if self._before_step and self._n_left == self._n_passes:
            self._before_step()

    def _begin_pass(self) -> None:
        self._guard.step = self.step + 1
        self._n_open_updates = 0
        self._has_skipped = False
        with self._guard.explaining(f"step {self.step}"):
            self._reach(ops.Forward)
        self._at = _At.FORWARD

    def _forward_ends(self, module: nn.Module, _inputs: object, output: object) -> None:
        if module is not self._module or self._at is not _At.FORWARD:
            return
        self._await_gradients()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._output_gradient_arrives)

    def _await_gradients(self) -> None:
        with self._guard.explaining(f"step {self.step}"):
            self._executor.done(self._reached[ops.Forward])
            first = self._reach(ops.Backward)
            self._binding.buckets.expect(self._executor.buckets(first), self._bucket_is_complete)
        self._at = _At.LOSS

    def _output_gradient_arrives(self, _gradient: Tensor) -> None:
        """Request a callback at the end of this backward pass, not of one nested in it by activation checkpoints."""
        self._awaits_end = True
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        if self._shards:  # after the callback of fully_shard, which it may queue later
            queue_callback(lambda: queue_callback(self._backward_ends))
        else:
            queue_callback(self._backward_ends)

    def _gradient_arrives(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise self._refusal(
                f"the gradient of {self._names.get(parameter)} is sparse, and those of a plan are dense: make its "
                f"layer with sparse=False"
            )
        if self._first is None and self._at in (_At.LOSS, _At.NEXT):
            self._first = parameter
        if parameter is self._first:
            self._n_arrived += 1
            if self._at in (_At.LOSS, _At.BACKWARD) and self._n_left == self._n_passes:
                self._check_was_zeroed(parameter)
        if self._at is _At.BACKWARD:
            return
        if self._at is _At.NEXT:
            self._has_accumulated = True
        if self._at is _At.LOSS:
            if torch.is_grad_enabled():
                raise self._refusal(
                    "loss.backward(create_graph=True); gradients are moved into buckets, and cannot "
                    "be differentiated again: take those that you need by torch.autograd.grad(..., create_graph=True)"
                )
            self._at = _At.BACKWARD
            if not self._awaits_end:  # we know no tensor of the output
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        elif self._at is _At.UPDATE:
            raise self._refusal(
                "a second backward pass before optimizer.step(); gradients are synchronised in "
                "each one: to accumulate them, do all passes but the last in `with worker.no_sync():`"
            )

    def _bucket_is_complete(self) -> None:
        with self._guard.explaining(f"step {self.step}"):
            if self._executor.advance_pass():
                return
            self._n_left -= 1
            if self._n_left:
                self._model.put_gradients()
                self._at = _At.NEXT
                return
            update = self._reach(ops.Optimize).op
            if self._shared and isinstance(update, ops.Optimize):
                self._shared.note(update)
            self._binding.buckets.skip_unused()
            self._model.put_gradients()
            self._note_gradient()
            if not self._has_updated:
                self._versions = _versions(self._optimizer)
            self._at = _At.UPDATE

    def _backward_ends(self) -> None:
        """Complete the buckets of parameters that the loss did not depend on; of a sharded model, all buckets."""
        self._awaits_end = False
        if self._shards and self._at is _At.LOSS:
            self._take_gradients(self._shards)
        if self._at is _At.BACKWARD:
            self._binding.buckets.finish()

    def _take_gradients(self, shards: Shards) -> None:
        """Take the gradients of a sharded model, unless there are none, as after `torch.autograd.grad`."""
        arrived = [parameter for parameter in shards.parameters if parameter.grad is not None]
        if not arrived and shards.reduces_gradients():
            return
        for parameter in arrived:
            self._gradient_arrives(parameter)
        self._model.take_gradients()
        self._at = _At.BACKWARD

    def _update_begins(
        self, _optimizer: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Begin the update at the outermost call of `step`. A closure computes the loss and the gradients first."""
        if self._n_open_updates:
            self._n_open_updates += 1
            return None
        if self._has_skipped and not self._closure_in(args, kwargs):
            return None  # `skip` has done the update, and left no gradients
        replaced = self._call_closure(args, kwargs)
        self._begin_update()
        self._n_open_updates = 1
        return replaced

    def _call_closure(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Call the closure of `step`, if it has one, and return arguments by which the optimizer finds its loss."""
        closure = self._closure_in(args, kwargs)
        if closure is None:
            return None
        if self._at is _At.UPDATE:
            raise self._refusal(
                "optimizer.step(closure) after a backward pass, so a step would have two; compute the gradients in "
                "the closure alone. To accumulate gradients, do all passes but a step's last in "
                "`with worker.no_sync():`; Lightning does with real.frameworks.lightning.schedule_callback. Of an "
                "optimizer with two passes, such as SAM, wrap its base_optimizer"
            )
        with torch.enable_grad():
            loss = closure()
        if loss is None and self._at in (_At.BEGIN, _At.NEXT, _At.LOSS):
            self._leave_batch_out()  # Lightning leaves a batch out whose training step returns None
        n_calls = 0

        def known_loss() -> object:
            nonlocal n_calls
            n_calls += 1
            if n_calls > 1:
                raise self._refusal(
                    f"{type(self._optimizer).__name__}.step(closure) calls its closure several times, and a step of "
                    f"the plan has one backward pass: take an optimizer that calls it once, such as SGD or Adam"
                )
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": known_loss}
        return (args[0], known_loss, *args[2:]), kwargs

    @staticmethod
    def _closure_in(args: tuple[object, ...], kwargs: dict[str, object]) -> Callable[[], object] | None:
        """Return the closure in the arguments of `step`, of which the first is the optimizer."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        return closure if callable(closure) else None

    def _begin_update(self) -> None:
        if self._at is not _At.UPDATE:
            raise self._refusal(
                f"optimizer.step() {self._at.value}; call the model that was wrapped, in training "
                f"mode, then loss.backward(), then optimizer.step(); {self._passes_planned}"
            )
        update = self._reached[ops.Optimize].op
        assert isinstance(update, ops.Optimize)
        if self._model.rating.are_stale(update):
            raise self._refusal(
                "gradients have changed since backward() returned, and their trust ratios are of "
                "before; with Lars, neither clip gradients nor scale the loss"
            )
        if self._shared and self._shared.is_stale():
            raise self._refusal(
                "gradients have changed since backward() returned, and ranks update with slices of the mean, which "
                "are elsewhere; with shared_update, clip by worker.clip_grad_norm_(max_norm), and do not scale the loss"
            )
        if self._shared:
            self._shared.begin(update)
        self._model.rating.give(update)

    def _update_ends(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        if self._has_skipped:
            return
        self._n_open_updates -= 1
        if self._n_open_updates:
            return  # of a base class
        self._has_updated = True
        # A gradient scaler tells a fused optimizer of an overflow, and that one skips by itself.
        if self._shared:
            self._shared.end()
        self._binding.reclaim()
        overflows = vars(self._optimizer).get("found_inf", 0.0)
        self._overflows += overflows
        self._note_gradient()
        self._end_step(updated=not (self._carried and overflows))

    def _end_step(self, *, updated: bool) -> None:
        with self._guard.explaining(f"step {self.step}"):
            self._executor.done(self._reached[ops.Optimize])
            self._finish_step()
            if self._carried and not updated:  # an overflow that compression keeps would be in every later step
                self._executor.drain()
                for kept in self._carried:
                    kept.nan_to_num_(0.0, 0.0, 0.0)
        self._first = None
        self._n_arrived = 0
        self._has_accumulated = False
        self.step += 1
        self._at = _At.BEGIN
        self._n_left = self._n_passes
        self._after_step()

    def _finish_step(self) -> None:
        """Perform the rest of a step. A sharded model takes back its parameters when it is done with them."""
        use = self._use_of_parameters(self.step) if self._use_of_parameters else None
        if use is None or not use.is_any:
            self._executor.finish_step(self.step)
            return
        with self._model.staged():
            self._executor.finish_step(self.step)
            if use.ends_elsewhere:
                self._executor.drain()

    def _reach(self, kind: type[ops.Forward] | type[ops.Backward] | type[ops.Optimize]) -> Instance:
        reached = self._executor.reach(kind)
        if reached is None or reached[0].step != self.step:
            raise self._refusal(f"plan {self._plan.name} has no {kind.__name__} there")
        self._reached[kind] = reached[0]
        return reached[0]

    def _refusal(self, problem: str) -> RunError:
        """Return an error after telling the other ranks, because a script may catch it and continue."""
        error = RunError(f"step {self.step}: {problem}")
        self._guard.fail(str(error))
        return error

    @property
    def _passes_planned(self) -> str:
        planned = f"plan {self._plan.name} has {self._n_passes} passes in a step; " if self._n_passes > 1 else ""
        return f"{planned}the last of the accumulated passes must be outside worker.no_sync()"

    def _note_gradient(self) -> None:
        """Note the first gradient after the backward pass, and again after an update, because clipping writes to it."""
        gradient = self._first.grad if self._first is not None else None
        self._kept = (None, 0) if gradient is None else (weakref.ref(gradient), local_part(gradient)._version)

    def _check_was_zeroed(self, parameter: Tensor) -> None:
        """Raise an error if the first gradient of a step was added to the gradient of the step before.

        In that case, only autograd has written to it since the last update. After a skipped update, only autograd has
        written to it since the last pass. Passes in `no_sync` may add to it if it is cleared before the plan's pass.
        """
        gradient = parameter.grad
        kept, version = self._kept
        if gradient is None or not kept or kept() is not gradient:
            return
        n_writers = self._shards.n_in_memory_of(gradient) if self._shards else 1
        if local_part(gradient)._version == version + self._n_arrived * n_writers:
            raise self._refusal(
                "gradients of the step before are still there, so they would be added up; call "
                "optimizer.zero_grad() in every step; to accumulate them, do all passes but a step's last in "
                "`with worker.no_sync():`"
            )

    def _check_unchanged(self) -> None:
        """Raise an error if parameters have changed, and the optimizer that was wrapped has never done a step."""
        if self._has_updated or self._versions == _versions(self._optimizer):
            return
        name = type(self._optimizer).__name__
        raise self._refusal(
            f"parameters have changed since backward() returned, but not in the step() of {name}: wrap the optimizer "
            f"whose step() changes them. Of an optimizer with two passes, such as SAM, wrap its base_optimizer, and "
            f"do the first pass in `with worker.no_sync():`"
        )

    def _check_in_place(self) -> None:
        if not self._binding.reclaim():
            raise self._refusal(
                "the model was moved, converted or wrapped again after real.wrap, so its parameters "
                "are no longer where they are synchronised; do that before, or after worker.close()"
            )
        if any(each.requires_grad for each in self._frozen) or self._has_others():
            raise self._refusal(
                "parameters were unfrozen, replaced or added after real.wrap, so they would not be "
                "synchronised; do that before. To train a layer later, freeze it after real.wrap, until then"
            )

    def _has_others(self) -> bool:
        """Look for new parameters. The slower check of the module runs only before steps 0, 1, 2, 4, 8 and so on."""
        if _n_updated(self._optimizer) != self._n_updated:
            return True
        if self.step & (self.step - 1):
            return False
        if self._shards:
            self._shards.reshard()  # after an evaluation, modules may still have gathered parameters
        return not set(self._trained).issuperset(trained_parameters(self._module))


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    return [parameter._version for group in optimizer.param_groups for parameter in group["params"]]


def _n_updated(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
