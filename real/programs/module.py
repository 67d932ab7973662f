"""Programs for any model with a user's loss, optimiser and batches: alone, or within the user's training loop."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from real.buffers import transforms
from real.buffers.memory import Memory
from real.programs.base import Batch, Computation, Feed, Program, WriteFile, normalised, on_host
from real.programs.binding import Binding, trained_parameters
from real.programs.optimizers import MakeOptimizer, Outer, Rating, nesterov, takes_ratios
from real.programs.sharing import shared_update
from real.programs.units import UnitHooks
from simdist.errors import PlanError, RunError
from simdist.plan import Plan, ops


@final
class ModuleProgram(Program):
    """Trains a module.

    Args:
        plan: The plan to execute.
        module: The module on the device of `memory`. Its parameters move into the plan's buffers.
        loss: Function of the module's output and the target.
        optimizer: Optimizer of the module's parameters.
        batch: Number of a pass, counted over all steps -> its input and target.
        memory: The plan's buffers.
        device: Device to compute on.
        rank: This rank.
        autocast: Lower precision for forward and backward pass, such as `torch.bfloat16`.
        save: Writes the files of checkpoints; None writes none.
        feed: Reads batches of images in place of `batch`, which then serves only for warm-up and for the input type of
            the module.
        outer: Makes the outer optimizer, if the plan has one.
        max_norm: Clip the gradients of each update to this norm of all of them. Ranks with slices of the model sum
            their norms in the default process group.

    Raises:
        PlanError: The plan is for another model or optimizer, or updates the model in parts.
    """

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        batch: Callable[[int], Batch],
        memory: Memory,
        *,
        device: torch.device,
        rank: int = 0,
        autocast: torch.dtype | None = None,
        save: WriteFile | None = None,
        feed: Feed | None = None,
        outer: MakeOptimizer = nesterov,
        max_norm: float | None = None,
    ) -> None:
        _check_updates(plan, max_norm)
        self._plan = plan
        self._binding = Binding(plan, module, memory, rank=rank)
        self._max_norm = max_norm
        units = self._binding.units()
        types = self._binding.gathered_dtype, self._binding.own_dtype
        self._units = UnitHooks(module, units, memory.is_held, types)
        self._rating = Rating(plan, self._binding, optimizer, memory, rank)
        self._shared = shared_update(plan, self._binding, optimizer, memory, rank)
        self._outer = Outer(plan, self._binding, memory, outer)
        self._module = module
        self._loss_of = loss
        self._optimizer = optimizer
        self._batch = batch
        self._memory = memory
        self._device = device
        self._rank = rank
        self._autocast = autocast
        self._write = save
        self._feed = feed
        self._batches: dict[str, Sequence[Batch]] = {}  # batches of the passes of a step
        self._saved_names = {
            name for body in plan.bodies for op in body if isinstance(op, ops.Save) for name in op.srcs
        }
        copies = [op for body in plan.bodies for op in body if isinstance(op, ops.Copy)]
        self._anchors = {op.dst for op in copies if op.src in self._outer.names}
        self._states: dict[str, object] = {}  # copies of state that is not in buffers, by the name of the copy
        self._n_passes = max(1, *(len(ops.forward_passes(body)) for body in plan.bodies))
        self._at = -1, 0  # step, and its next pass
        self._in_memory = {buffer.name for buffer in plan.buffers if buffer.place == "host" and buffer.initialized}
        self.loss: Tensor | None = None

    def warm_up(self, n_steps: int) -> None:
        """Compute a few gradients, compress them once and discard the results, so that kernels are ready.

        Of a sharded model, also find the units that it uses out of turn, and keep their memory.
        """
        state = [buffer.clone() for buffer in self._module.buffers()]
        inputs, targets = map(self._on_device, self._batch(0))
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            if self._binding.units():
                with torch.no_grad(), self._precision():
                    self._memory.keep(self._units.used_out_of_turn(inputs))
            for _ in range(n_steps):
                self._binding.forget_gradients()
                with self._precision():
                    self._loss_of(self._units.outputs(inputs), targets).backward()
        self._binding.forget_gradients()
        for buffer, before in zip(self._module.buffers(), state, strict=True):
            buffer.copy_(before)
        transforms.warm_up(self._plan, self._memory)

    def load(self, op: ops.Load, number: int) -> None:
        """Read or make batch `number` of the data, on the host."""
        if self._feed is not None:
            self._feed.load(op, number)
        else:
            self._batches[op.dst] = self._of_passes(number)

    def perform(self, op: Computation, step: int) -> None:
        """Perform an operation; generated data is not staged in."""
        match op:
            case ops.StageIn():
                if self._feed is not None:
                    self._feed.stage_in(op)
            case ops.Copy():
                self._copy(op, step)
            case ops.TrustRatios():
                self._rating.rate(op)
            case ops.Optimize() if op.optimizer == "outer":
                self._outer.step(op)
            case ops.Optimize() if self._shared:
                if self._max_norm is not None:
                    self._shared.clip(op, self._max_norm, None)
                self._shared.update(op)
                self._binding.buckets.forget_unused()
            case ops.Optimize():
                self._binding.give_gradients(op)
                self._rating.give(op)
                if self._max_norm is not None:
                    nn.utils.clip_grad_norm_(trained_parameters(self._module), self._max_norm)
                self._optimizer.step()
            case ops.Save():
                self._save(op, step)
            case _:
                transforms.transform(self._memory, op, step=step, rank=self._rank)

    def backward(self, buckets: Sequence[ops.Backward], complete: Callable[[], object]) -> None:
        """Run autograd; its hooks complete the buckets."""
        assert self.loss is not None
        own = self._binding.buckets
        own.expect(buckets, complete)
        self._units.expect_backward(buckets, own.reach)
        self.loss.backward()
        own.finish()
        self._units.finish_backward(own.unused)

    def differentiate(self) -> None:
        """Run all of autograd, for a caller that takes the buckets later with `fill_bucket`."""
        assert self.loss is not None
        if self._memory.n_ranks is None:
            self.loss.backward()
            return
        trained = trained_parameters(self._module)  # `backward` would copy gradients with another memory layout
        for parameter, gradient in zip(
            trained, torch.autograd.grad(self.loss, trained, allow_unused=True), strict=True
        ):
            parameter.grad = gradient

    def bring_home(self, gather: Callable[[str], Tensor]) -> None:
        """Give the model whole parameters of its own type, at the end; see `Binding.bring_home`."""
        self._binding.bring_home(gather)

    def fill_bucket(self, bucket: ops.Backward) -> None:
        """Move the gradients of a bucket into it, or add them to it."""
        self._binding.buckets.fill(bucket)

    def _copy(self, op: ops.Copy, step: int) -> None:
        """Copy a batch to the device, a buffer of parameters or gradients, or other contents of a checkpoint."""
        if not op.by.is_first(self._rank):
            return
        if op.dst in self._memory:
            transforms.copy(self._memory, op, rank=self._rank)
            return
        if op.dst in self._saved_names:
            self._states[op.dst] = self._state_of(op.src)
            return
        if self._feed is not None:
            self._batches[op.dst] = self._from_feed(self._feed, op.src)
            return
        batches = self._of_passes(step) if op.src in self._in_memory else self._batches[op.src]
        self._batches[op.dst] = [(self._on_device(inputs), self._on_device(targets)) for inputs, targets in batches]

    def forward(self, parts: Sequence[ops.Forward], step: int, complete: Callable[[], object]) -> None:
        """Compute the loss of the batch that the plan has copied to the device, or else of the next batch."""
        number = self._at[1] if self._at[0] == step else 0
        self._at = step, number + 1
        names = [name for part in parts for name in part.srcs]
        brought = next((self._batches[name][number] for name in names if name in self._batches), None)
        inputs, targets = brought or map(self._on_device, self._batch(step * self._n_passes + number))
        self._binding.forget_gradients()
        self._units.expect(parts, complete)
        with self._precision():
            self.loss = self._loss_of(self._units.outputs(inputs), targets)
        self._units.finish(len(parts))

    def _state_of(self, name: str) -> object:
        """Return a copy of the state behind a buffer that is not in memory: bytes, or the state of the optimizer."""
        buffer = self._plan.buffer(name)
        if buffer.dtype == "uint8":
            return torch.zeros(buffer.count, dtype=torch.uint8)
        outer = {"outer_optimizer": on_host(self._outer.optimizer.state_dict())} if self._outer.optimizer else {}
        return {"optimizer": on_host((self._shared or self._optimizer).state_dict())} | outer

    def _save(self, op: ops.Save, step: int) -> None:
        """Write a file of this step: `step`, `model` for `load_state_dict`, `optimizer`, and other buffers."""
        if self._write is None or not op.by.is_first(self._rank):
            return
        content: dict[str, Any] = {"step": step, "model": {}}
        for name in op.srcs:
            buffer = self._plan.buffer(name)
            state = self._states.get(name)
            if isinstance(state, dict):
                content |= state
            elif state is not None:
                content[name] = state
            elif buffer.tensors and buffer.sharded_over != ops.ALONE:
                part = "anchor_pieces" if name in self._anchors else "pieces"
                content[part] = content.get(part, {}) | self._binding.named_pieces(buffer)
            elif buffer.tensors and not buffer.sparse:
                part = "anchors" if name in self._anchors else "model"
                content[part] = content.get(part, {}) | self._binding.named(buffer)
            elif name in self._memory:
                content[name] = self._memory.tensors(name)
        self._write(f"step-{step:06d}-rank-{self._rank:05d}.pt", lambda file: torch.save(content, file))

    def _of_passes(self, step: int) -> list[Batch]:
        """Return the batches of the passes of a step."""
        first = step * self._n_passes
        return [self._batch(number) for number in range(first, first + self._n_passes)]

    def _from_feed(self, feed: Feed, name: str) -> list[Batch]:
        """Copy a step's samples to the device, in the module's format; then the buffer may receive the next ones.

        Returns:
            Equal parts of the samples, one for each pass.
        """
        images, labels = feed.batch(name)
        like, _ = self._batch(0)
        inputs = normalised(images, like.shape[1:], self._device, like.dtype)
        labels = labels.to(self._device, non_blocking=True, copy=True)
        return list(zip(inputs.chunk(self._n_passes), labels.chunk(self._n_passes), strict=True))

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, dtype=self._autocast) if self._autocast else nullcontext()


@final
class LoopProgram(Program):
    """Copies, fuses and compresses buffers of the model.

    Args:
        memory: The buffers.
        rating: Trust ratios of the model's optimizer.
        outer: Outer optimizer of the anchors.
        rank: Rank of the buffers.
    """

    def __init__(self, memory: Memory, rating: Rating, outer: Outer, rank: int) -> None:
        self._memory = memory
        self._rating = rating
        self._outer = outer
        self._rank = rank

    def load(self, op: ops.Load, number: int) -> None:
        """Do nothing: the loop has its own data."""

    def perform(self, op: Computation, step: int) -> None:
        """Copy, fuse or compress a buffer of parameters or gradients, or compute trust ratios.

        Raises:
            RunError: The user's loop performs the operation. Or it is a checkpoint, which is written between steps.
        """
        match op:
            case ops.StageIn():
                pass
            case ops.Copy():
                if op.src in self._memory and op.dst in self._memory:  # the loop copies batches to the device itself
                    transforms.copy(self._memory, op, rank=self._rank)
            case ops.TrustRatios():
                self._rating.rate(op)
            case ops.Optimize() if op.optimizer == "outer":
                self._outer.step(op)
            case ops.Optimize() | ops.Save():
                raise RunError(f"{op} is for the training loop to do, not for the plan")
            case _:
                transforms.transform(self._memory, op, step=step, rank=self._rank)

    def forward(self, parts: Sequence[ops.Forward], step: int, complete: Callable[[], object]) -> None:
        """Refuse, because the user's loop performs it."""
        raise RunError(f"{parts[0]} is for the training loop to do, not for the plan")

    def backward(self, buckets: Sequence[ops.Backward], complete: Callable[[], object]) -> None:
        """Refuse, because the user's loop performs it."""
        raise RunError(
            f"Backward of {', '.join(op.dst for op in buckets)} is for the training loop to do, not for the plan"
        )


def _check_updates(plan: Plan, max_norm: float | None) -> None:
    """Refuse plans that update in parts, because an optimizer of torch updates all its parameters at once.

    Clipping after trust ratios were computed would make them wrong.
    """
    if max_norm is not None and takes_ratios(plan):
        raise PlanError(f"plan {plan.name} computes trust ratios from gradients, so they cannot be clipped afterwards")
    for body in plan.bodies:
        updates = [op for op in body if isinstance(op, ops.Optimize) and op.optimizer == "inner"]
        if len(updates) > 1:
            raise PlanError(
                f"plan {plan.name} has {len(updates)} updates in a step; a torch optimizer updates everything at once"
            )
