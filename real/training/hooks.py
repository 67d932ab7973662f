"""Performs a plan as a user's own training loop goes along, by the hooks of its module and optimizer.

A step of a training loop is a forward pass, a backward pass and an update; a step of a plan is the same with other
operations in between. So the loop drives:

    forward pass begins        everything up to `Forward`
    forward pass ends       everything up to the first `Backward`: the wait for an earlier loss, delays of the host
    a bucket is complete    what comes after its `Backward`: its all-reduce begins while autograd goes on
    the last bucket is      everything up to `Optimize`: when `backward()` returns, gradients are averaged
    the update ends         the rest of the step: when `optimizer.step()` returns, parameters are averaged

The hooks tell how the loop trains. A loop that does not train in this way is refused at the place where it
leaves it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import final

import torch
from torch import Tensor, nn

from real.buffers.memory import Memory
from real.execution.executor import Executor
from real.programs.binding import Binding, trained_parameters
from real.programs.optimizers import Rating
from real.training.ranks import Ranks
from simdist.errors import RunError, UnsupportedError
from simdist.plan import Body, Instance, Plan, ops


class _At(Enum):
    """Where in a step the loop is."""

    BEGIN = "before the forward pass"
    FORWARD = "in the forward pass"
    LOSS = "between the forward and the backward pass"
    BACKWARD = "in the backward pass"
    UPDATE = "after the backward pass"


@final
class Hooks:
    """The hooks on one module and its optimizer.

    Args:
        plan: Whose bodies have one forward pass, one backward pass and one update.
        module: The model that the loop calls.
        optimizer: Of the module's parameters.
        memory: Of the plan.

    Gradients are seen here before a `Binding` that is made afterwards brings them into their buckets.
    """

    def __init__(self, plan: Plan, module: nn.Module, optimizer: torch.optim.Optimizer, memory: Memory) -> None:
        self.step = 0
        self._plan, self._module, self._optimizer = plan, module, optimizer
        self._at = _At.BEGIN
        self._awaits_end = False
        self._buckets = [memory.dense(name) for name in gradient_buckets(plan)]
        self._versions: dict[int, int] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient_arrives)
            for parameter in trained_parameters(module)
        ]

    def drive(
        self,
        executor: Executor,
        binding: Binding,
        rating: Rating,
        ranks: Ranks,
        *,
        first_step: int,
        after_step: Callable[[], None],
    ) -> None:
        """Drive an executor from now on.

        Args:
            executor: Of the plan, at `first_step`.
            binding: Of the module.
            rating: Of the optimizer.
            ranks: Explain errors.
            first_step: Where both begin.
            after_step: Called at the end of each step.
        """
        self._executor, self._binding, self._rating, self._ranks = executor, binding, rating, ranks
        self.step = first_step
        self._after_step = after_step
        first = trained_parameters(self._module)[0]
        self._anchor = first, first.data_ptr()
        self._handles += [
            self._module.register_forward_pre_hook(self._forward_begins),
            self._module.register_forward_hook(self._forward_ends),
            self._optimizer.register_step_pre_hook(self._update_begins),
            self._optimizer.register_step_post_hook(self._update_ends),
        ]

    def release(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def settle(self) -> None:
        """End a step whose update was left out, as a gradient scaler does when gradients have overflowed."""
        if self._at is _At.UPDATE:
            self._end_step()

    @property
    def where(self) -> str:
        """Where in a step the loop is, in words."""
        return self._at.value

    def _forward_begins(self, module: nn.Module, _inputs: object) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self.settle()
        if self._at is not _At.BEGIN:
            raise RunError(
                f"step {self.step}: a second forward pass in training mode, {self._at.value}; a step is one forward "
                f"pass, one backward pass and optimizer.step(); evaluate in model.eval() or under torch.no_grad()"
            )
        if self.step >= self._plan.n_steps:
            raise RunError(f"the plan has {self._plan.n_steps} steps, and all are done; wrap with a larger n_steps")
        self._check_in_place()
        with self._explained():
            self._forward = self._reach(ops.Forward)
        self._at = _At.FORWARD

    def _forward_ends(self, _module: nn.Module, _inputs: object, output: object) -> None:
        if self._at is not _At.FORWARD:
            return
        with self._explained():
            self._executor.done(self._forward)
            first = self._reach(ops.Backward)
            self._binding.buckets.expect(self._executor.buckets(first), self._bucket_is_complete)
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._output_gradient_arrives)
        self._at = _At.LOSS

    def _output_gradient_arrives(self, _gradient: Tensor) -> None:
        """Ask for news of the end of the pass that begins here; a pass within it, of a checkpoint, is another one."""
        self._awaits_end = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _gradient_arrives(self, parameter: Tensor) -> None:
        if self._at is _At.LOSS:
            self._check_was_zeroed(parameter)
            self._at = _At.BACKWARD
            if not self._awaits_end:  # we know no tensor of the output
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        elif self._at is _At.UPDATE:
            raise RunError(
                f"step {self.step}: a second backward pass before optimizer.step(); gradients are synchronised in "
                f"each one, so they cannot be accumulated over several: use larger batches, or smaller ones and more "
                f"steps"
            )

    def _bucket_is_complete(self) -> None:
        with self._explained():
            if not self._executor.bucket_complete():
                self._update = self._reach(ops.Optimize)
                self._at = _At.UPDATE

    def _backward_ends(self) -> None:
        """Complete the buckets of parameters that the loss did not depend on."""
        self._awaits_end = False
        if self._at is _At.BACKWARD:
            self._binding.buckets.finish()

    def _update_begins(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        if self._at is not _At.UPDATE:
            raise RunError(
                f"step {self.step}: optimizer.step() {self._at.value}; call the model that was wrapped, in training "
                f"mode, then loss.backward(), then optimizer.step() without a closure"
            )
        update = self._update.op
        assert isinstance(update, ops.Optimize)
        if self._rating.are_stale(update):
            raise RunError(
                f"step {self.step}: gradients have changed since backward() returned, and their trust ratios are of "
                f"before; with Lars, neither clip gradients nor scale the loss"
            )
        self._rating.give(update)

    def _update_ends(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        self._end_step()

    def _end_step(self) -> None:
        with self._explained():
            self._executor.done(self._update)
            self._executor.finish_step(self.step)
        self._versions = {_storage(bucket): bucket._version for bucket in self._buckets}
        self.step += 1
        self._at = _At.BEGIN
        self._after_step()

    def _reach(self, kind: type[ops.Forward] | type[ops.Backward] | type[ops.Optimize]) -> Instance:
        reached = self._executor.reach(kind)
        if reached is None or reached[0].step != self.step:
            raise RunError(f"step {self.step}: plan {self._plan.name} has no {kind.__name__} there")
        return reached[0]

    def _check_was_zeroed(self, parameter: Tensor) -> None:
        """Refuse the first gradient of a pass that was added to one of the step before.

        A gradient that stayed lies in its bucket, and since the last update only autograd has written there.
        """
        gradient = parameter.grad
        if gradient is not None and self._versions.get(_storage(gradient)) == gradient._version - 1:
            raise RunError(
                f"step {self.step}: gradients of the step before are still there, so they would be added up; call "
                f"optimizer.zero_grad() in every step; gradients cannot be accumulated over several steps"
            )

    def _check_in_place(self) -> None:
        parameter, address = self._anchor
        if parameter.data_ptr() != address:
            raise RunError(
                f"step {self.step}: the model was moved or converted after real.wrap, so its parameters are no longer "
                f"where they are synchronised; do that before"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except RuntimeError as error:
            raise self._ranks.explain(error, f"step {self.step}") from error


def _tensors_in(output: object) -> Iterator[Tensor]:
    match output:
        case Tensor():
            yield output
        case Mapping():
            for value in output.values():
                yield from _tensors_in(value)
        case list() | tuple():
            for value in output:
                yield from _tensors_in(value)
        case _ if is_dataclass(output):
            for each in fields(output):
                yield from _tensors_in(getattr(output, each.name))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def gradient_buckets(plan: Plan) -> tuple[str, ...]:
    """Return the buffers that backward passes write, each once."""
    return tuple(dict.fromkeys(op.dst for body in plan.bodies for op in body if isinstance(op, ops.Backward)))


def check_shape(plan: Plan) -> None:
    """Refuse a plan whose steps are no steps of a training loop.

    Raises:
        UnsupportedError: A step has several forward passes or updates, or they are in another order.
    """
    n_tensors = max((buffer.tensors[1] for buffer in plan.buffers if buffer.tensors), default=0)
    for number, body in enumerate(plan.bodies):
        if problem := _problem(plan, body, n_tensors):
            raise UnsupportedError(
                f"plan {plan.name}, body {number}: {problem}; a training loop has one forward pass, one backward pass "
                f"and one update of everything in a step: perform this plan with `python -m real`"
            )


def _problem(plan: Plan, body: Body, n_tensors: int) -> str:
    kinds = [type(op) for op in body if isinstance(op, ops.Forward | ops.Backward | ops.Optimize)]
    n_buckets = kinds.count(ops.Backward)
    if kinds != [ops.Forward, *[ops.Backward] * n_buckets, ops.Optimize] or not n_buckets:
        return f"its passes are {', '.join(kind.__name__ for kind in kinds) or 'none'}"
    if any(isinstance(op, ops.Save) for op in body):
        return "it saves in the middle of a step"
    buckets = [op.dst for op in body if isinstance(op, ops.Backward)]
    update = next(op for op in body if isinstance(op, ops.Optimize))
    for what, names in (("its backward pass computes", buckets), ("it updates", update.params)):
        covered = sorted(plan.buffer(name).tensors or (0, 0) for name in names)
        if [*(first for first, _ in covered), n_tensors] != [0, *(last for _, last in covered)]:
            return f"{what} tensors {covered} of {n_tensors}"
    if strange := set(update.grads) - set(buckets):
        return f"it updates with {', '.join(sorted(strange))}, which is no bucket of its backward pass"
    return ""
