"""Programs for any model with a user's loss, optimiser and batches: alone, or within the user's training loop."""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from real.buffers import transforms
from real.buffers.memory import Memory, on_host
from real.programs.base import Batch, Computation, Feed, Program, WriteFile
from real.programs.batches import PassBatches
from real.programs.binding import Binding, trained_parameters
from real.programs.optimizers import MakeOptimizer, Outer, Rating, nesterov, takes_ratios
from real.programs.rank_state import SHARED_SECTIONS, RankState
from real.programs.sharing import shared_update
from real.programs.units import UnitHooks
from simdist.errors import PlanError, RunError
from simdist.plan import Plan, ops
from simdist.plan.liveness import carried_buffers


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
        feed: Reads batches of images in place of `batch`, which then serves only for warm-up.
        outer: Makes the outer optimizer, if the plan has one.
        max_norm: Clip the gradients of each update to this norm of all of them. Ranks with slices of the model sum
            their norms in the default process group.

    Raises:
        PlanError: The plan is for another model or optimizer, or updates the model in parts.
    """

    def __init__(  # noqa: PLR0913 (what a run is put together from)
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
        self._module = module
        self._memory = memory
        self._rank = rank
        self._loss_of = loss
        self._binding = Binding(plan, module, memory, rank=rank)
        types = self._binding.gathered_dtype, self._binding.own_dtype
        self._units = UnitHooks(module, self._binding.units(), memory.is_held, types)
        self._batches = PassBatches(plan, batch, feed, device)
        self._updates = _Updates(plan, module, self._binding, optimizer, memory, rank, outer, max_norm)
        self._saves = _Saves(plan, save, self._binding, self._updates, memory, rank)
        self._precision: Callable[[], AbstractContextManager[object]] = nullcontext
        if autocast:
            self._precision = partial(torch.autocast, device.type, dtype=autocast)
        self.loss: Tensor | None = None

    def warm_up(self, n_steps: int) -> None:
        """Compute a few gradients, compress them once and discard the results, so that kernels are ready.

        Of a sharded model, also find the units that it uses out of turn, and keep their memory.
        """
        state = [buffer.clone() for buffer in self._module.buffers()]
        inputs, targets = self._batches.made(0)
        with torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
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
        transforms.warm_up_transforms(self._plan, self._memory)

    def restore(self, content: Mapping[str, Any]) -> None:
        """Take the state in a checkpoint that the plan has written."""
        self._saves.restore(content)

    def state(self) -> Tensor:
        """Return parameters, optimizers, and the buffers of the plan that a step passes to later ones."""
        state = self._rank_state()
        file = io.BytesIO()
        torch.save({section: state.pack(section) for section in SHARED_SECTIONS}, file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    def take_state(self, state: Tensor) -> None:
        """Take these."""
        packed = torch.load(io.BytesIO(state.numpy().data), weights_only=True)
        for section in SHARED_SECTIONS:
            self._rank_state().restore(section, packed[section])

    def _rank_state(self) -> RankState:
        carried = {name: self._memory.tensors(name) for name in carried_buffers(self._plan) if name in self._memory}
        return RankState(
            self._module,
            self._updates.inner,
            carried,
            self._memory.device,
            updating=self._updates.state,
            outer=self._updates.outer.optimizer,
        )

    def load(self, op: ops.Load, number: int) -> None:
        """Read or make batch `number` of the data, on the host."""
        self._batches.load(op, number)

    def perform(self, op: Computation, step: int) -> None:
        """Perform an operation; generated data is not staged in."""
        match op:
            case ops.StageIn():
                self._batches.stage_in(op)
            case ops.Copy():
                self._copy(op, step)
            case ops.TrustRatios():
                self._updates.rating.rate(op)
            case ops.Optimize():
                self._updates.update(op)
            case ops.Save():
                self._saves.save(op, step)
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
        if self._binding.copy_gradients(op):
            return
        if op.dst in self._memory:
            transforms.copy(self._memory, op, rank=self._rank)
        elif not self._saves.copy(op):
            self._batches.copy(op, step)

    def forward(self, parts: Sequence[ops.Forward], step: int, complete: Callable[[], object]) -> None:
        """Compute the loss of the batch that the plan has copied to the device, or else of the next batch."""
        inputs, targets = self._batches.next((name for part in parts for name in part.srcs), step)
        self._binding.forget_gradients()
        self._units.expect(parts, complete)
        with self._precision():
            self.loss = self._loss_of(self._units.outputs(inputs), targets)
        self._units.finish(len(parts))


@final
class _Updates:
    """Updates parameters and anchors.

    Attributes:
        rating: Computes trust ratios.
        outer: The outer optimizer.
        state: Has the state of the optimizer.
        inner: The optimizer.
    """

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        binding: Binding,
        optimizer: torch.optim.Optimizer,
        memory: Memory,
        rank: int,
        outer: MakeOptimizer,
        max_norm: float | None,
    ) -> None:
        self._module = module
        self._binding = binding
        self.inner = optimizer
        self._max_norm = max_norm
        self.rating = Rating(plan, binding, optimizer, memory, rank)
        self._shared = shared_update(plan, binding, optimizer, memory, rank)
        self.outer = Outer(plan, binding, memory, outer)
        self.state = self._shared or optimizer

    def update(self, op: ops.Optimize) -> None:
        """Perform an update."""
        if op.optimizer == "outer":
            self.outer.step(op)
        elif self._shared:
            if self._max_norm is not None:
                self._shared.clip(op, self._max_norm, None)
            self._shared.update(op)
            self._binding.buckets.forget_unused()
        else:
            self._binding.give_gradients(op)
            self.rating.give(op)
            if self._max_norm is not None:
                nn.utils.clip_grad_norm_(trained_parameters(self._module), self._max_norm)
            self.inner.step()


@final
class _Saves:
    """Writes the files of checkpoints."""

    def __init__(
        self, plan: Plan, write: WriteFile | None, binding: Binding, updates: _Updates, memory: Memory, rank: int
    ) -> None:
        self._plan = plan
        self._write = write
        self._binding = binding
        self._updates = updates
        self._memory = memory
        self._rank = rank
        everything = [op for body in plan.bodies for op in body]
        self._names = {name for op in everything if isinstance(op, ops.Save) for name in op.srcs}
        self._anchors = {op.dst for op in everything if isinstance(op, ops.Copy) and op.src in updates.outer.names}
        self._states: dict[str, object] = {}  # copies of state that is not in buffers, by the name of the copy

    def copy(self, op: ops.Copy) -> bool:
        """Copy the state behind a buffer that is not in memory. Tell whether the copy is for a checkpoint."""
        if op.dst not in self._names:
            return False
        buffer = self._plan.buffer(op.src)
        if buffer.dtype == "uint8":
            self._states[op.dst] = torch.zeros(buffer.count, dtype=torch.uint8)
            return True
        outer = self._updates.outer.optimizer
        state = {"outer_optimizer": on_host(outer.state_dict())} if outer else {}
        self._states[op.dst] = {"optimizer": on_host(self._updates.state.state_dict())} | state
        return True

    def save(self, op: ops.Save, step: int) -> None:
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

    @torch.no_grad()
    def restore(self, content: Mapping[str, Any]) -> None:
        """Copy the contents of a file to where they come from."""
        everything = [op for body in self._plan.bodies for op in body]
        sources = {op.dst: op.src for op in everything if isinstance(op, ops.Copy)}
        for name in sorted(self._names):
            buffer = self._plan.buffer(sources[name])
            is_anchor = name in self._anchors
            if buffer.tensors and buffer.sharded_over != ops.ALONE:
                found = content["anchor_pieces" if is_anchor else "pieces"]
                for tensor, (_, piece) in self._binding.named_pieces(buffer).items():
                    piece.copy_(found[tensor][1])
            elif buffer.tensors and not buffer.sparse:
                found = content["anchors" if is_anchor else "model"]
                for tensor, part in self._binding.named(buffer).items():
                    part.copy_(found[tensor])
            elif buffer.name in self._memory:
                for part, kept in zip(self._memory.tensors(buffer.name), content[name], strict=True):
                    part.copy_(kept)
        if "optimizer" in content:
            self._updates.state.load_state_dict(content["optimizer"])
        if self._updates.outer.optimizer and "outer_optimizer" in content:
            self._updates.outer.optimizer.load_state_dict(content["outer_optimizer"])


@final
class LoopProgram(Program):
    """Copies, fuses and compresses buffers of the model."""

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
