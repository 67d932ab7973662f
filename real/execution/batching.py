"""All ranks of the virtual world in one forward pass, one backward pass and one update.

A rank of a small model keeps no core busy: its operators take less time than the interpreter takes between them. So the
models of all ranks are stacked, parameters and buffers `[n_ranks, *shape]`; the forward pass is vectorised over the
first axis (`torch.func.vmap`), and the gradient of the sum of all losses is, row by row, each rank's own. An optimizer
that treats each element by itself updates the stack as it updates each rank.

That needs ranks that differ in their values only, and a forward pass that depends on nothing else. `Candidate` looks
for what it can, and tries the rest out: the first batch of two ranks must have the same losses, gradients and buffers
in both ways.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from real.programs.base import Batch
from real.programs.binding import laid_like, trained_parameters
from real.programs.optimizers import MakeOptimizer
from real.programs.sharing import problem_of
from simdist.errors import RunError
from simdist.plan import Plan, ops

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler
Made: TypeAlias = tuple[nn.Module, torch.optim.Optimizer, Scheduler | None]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@final
class StackedModule(nn.Module):
    """The modules of several ranks as one.

    Args:
        modules: Alike but for the values of their parameters and buffers, which are copied.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._one = (modules[0],)  # in a tuple: its parameters are not this module's
        for name, first in modules[0].named_parameters():
            rows = stacked([module.get_parameter(name) for module in modules])
            self._parameters[name] = nn.Parameter(rows, requires_grad=first.requires_grad)
        for name, _ in modules[0].named_buffers():
            self._buffers[name] = stacked([module.get_buffer(name) for module in modules])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of all ranks; all shapes begin with their number."""
        with sdpa_kernel(SDPBackend.MATH):  # the others are not vectorised
            return per_rank(self._call)(dict(self._parameters), dict(self._buffers), inputs)

    def lend(self, modules: Iterable[nn.Module]) -> None:
        """Let parameters and buffers of the modules be rows of this one's."""
        for rank, module in enumerate(modules):
            for own, theirs in (
                (self._parameters, module.named_parameters()),
                (self._buffers, module.named_buffers()),
            ):
                for name, tensor in theirs:
                    tensor.data = cast(Tensor, own[name])[rank].detach()

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._one[0], (parameters, buffers), (inputs,))
        return outputs


def per_rank(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function of stacked arguments; it refuses to draw random numbers, which would be others."""
    return vmap(function, randomness="error")


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return a copy of the ranks' tensors, `[n_ranks, *shape]`, each row laid in memory as they are."""
    first = rows[0].detach()
    found = laid_like(first.new_empty(len(rows), first.numel()), first.expand(len(rows), *first.shape))
    for place, row in zip(found, rows, strict=True):
        place.copy_(row.detach())
    return found


def stacked_batch(batch: Callable[[int, int], Batch], n_ranks: int, number: int) -> Batch:
    """Return the batches of all ranks, `[n_ranks, batch, ...]`.

    Raises:
        RunError: Their shapes differ.
    """
    inputs, targets = zip(*(batch(number, rank) for rank in range(n_ranks)), strict=True)
    for kind in (inputs, targets):
        if odd := [rank for rank, tensor in enumerate(kind) if tensor.shape != kind[0].shape]:
            raise RunError(
                f"batch {number} of rank {odd[0]} has the shape {list(kind[odd[0]].shape)}, that of rank 0 "
                f"{list(kind[0].shape)}: all ranks need batches of one shape"
            )
    return torch.stack(inputs), torch.stack(targets)


@final
class Candidate:
    """Ranks that may be computed at once.

    Args:
        plan: The plan.
        made: Module and optimizer of every rank, and the scheduler of its learning rate.
        loss: Of outputs and targets.
        batch: (number of the pass, rank) -> batch.
        outer: Makes the outer optimizer.
        device: Where to compute.
        autocast: Lower precision, if any.
    """

    def __init__(
        self,
        plan: Plan,
        made: Sequence[Made],
        loss: Loss,
        batch: Callable[[int, int], Batch],
        outer: MakeOptimizer,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self._plan, self._loss, self._batch, self._outer = plan, loss, batch, outer
        self._made = made
        self._modules, self._optimizers = [each[0] for each in made], [each[1] for each in made]
        self._device, self._autocast = device, autocast

    def problem(self) -> str | None:
        """Return why they must be computed one after the other, in a sentence; None if they need not."""
        plan_ops = {op for body in self._plan.bodies for op in body}
        if self._plan.world_size == 1:
            return "there is one rank only"
        if any(isinstance(op, ops.Enter) for op in plan_ops):
            return "ranks sit steps of the plan out"
        if any(isinstance(op, ops.Optimize) and (op.slices or op.ratios) for op in plan_ops):
            return "the plan shares updates between ranks, or takes trust ratios"
        if any(each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks for each in self._optimizers):
            return "the optimizer has hooks"
        kinds = [_kind_of(*each) for each in self._made]
        if any(None in group["params"] for group in kinds[0][-1]):
            return "the optimizer updates what is not in the model"
        if odd := [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]:
            return f"rank {odd[0]} has another model, optimizer, learning rate or other setting of it than rank 0"
        used = [self._optimizers[0]]
        if any(isinstance(op, ops.Optimize) and op.optimizer == "outer" for op in plan_ops):
            used.append(self._outer([nn.Parameter(torch.zeros(1))]))
        for optimizer in used:  # Adagrad has a state from the beginning, which the trial would miss
            if type(optimizer) is not torch.optim.Adagrad and (problem := problem_of(optimizer)):
                return f"{type(optimizer).__name__} {problem.split('; take')[0]}"
        try:
            return self._difference()
        except Exception as error:  # whatever a model does that cannot be vectorised
            return f"torch.func.vmap refuses the model: {type(error).__name__}: {str(error).partition('. ')[0].strip()}"

    def stack(self) -> tuple[StackedModule, torch.optim.Optimizer]:
        """Return one module, and one optimizer of its parameters: that of rank 0."""
        module, optimizer = StackedModule(self._modules), self._optimizers[0]
        parameters = [dict(each.named_parameters()) for each in self._modules]
        name_of = {parameter: name for name, parameter in parameters[0].items()}
        for group in optimizer.param_groups:
            group["params"] = [module._parameters[name_of[each]] for each in group["params"]]
        states = [dict(each.state) for each in self._optimizers]
        optimizer.state.clear()
        for first, name in name_of.items():
            rows = [state.get(own[name], {}) for state, own in zip(states, parameters, strict=True)]
            if rows[0]:
                optimizer.state[cast(Tensor, module._parameters[name])] = {
                    key: stacked([row[key] for row in rows])
                    if isinstance(value, Tensor) and key != "step" and value.shape == first.shape
                    else value
                    for key, value in rows[0].items()
                }
        return module, optimizer

    def _difference(self) -> str | None:
        """Try the first batch of two ranks in both ways."""
        before = torch.get_rng_state()
        inputs, targets = (each.to(self._device) for each in stacked_batch(self._batch, self._plan.world_size, 0))
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            return "batches are drawn from torch's default generator, of which every rank has its own"
        inputs, targets = inputs[[0, -1]], targets[[0, -1]]
        pair = [copy.deepcopy(self._modules[rank]) for rank in (0, -1)]
        both = StackedModule(pair)
        with self._precision():
            losses = per_rank(self._loss)(both(inputs), targets)
        losses.sum().backward()
        for row, module in enumerate(pair):
            with self._precision():
                loss = self._loss(module(inputs[row]), targets[row])
            loss.backward()
            theirs = [_vector(each.grad for each in trained_parameters(module)), _vector(module.buffers())]
            ours = [
                _vector(None if each.grad is None else each.grad[row] for each in trained_parameters(both)),
                _vector(each[row] for each in both.buffers()),
            ]
            names = ("loss", "gradient", "buffers")
            for name, one, other in zip(names, [losses[row : row + 1], *ours], [loss.view(1), *theirs], strict=True):
                tolerance = torch.finfo(self._autocast or one.dtype).eps ** 0.5
                if one.shape != other.shape or (one - other).norm() > tolerance * other.norm():
                    return f"the {name} of a rank would be another if all were computed at once"
        return None

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, dtype=self._autocast) if self._autocast else nullcontext()


def _kind_of(module: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None) -> tuple[Any, ...]:
    """Return what must be the same on all ranks."""
    tensors = [
        [(name, each.shape, each.dtype, each.stride(), each.requires_grad) for name, each in some]
        for some in (module.named_parameters(), module.named_buffers())
    ]
    name_of: Mapping[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    groups: list[dict[str, Any]] = [
        group | {"params": [name_of.get(each) for each in group["params"]]} for group in optimizer.param_groups
    ]
    schedule = None if scheduler is None else (type(scheduler), scheduler.state_dict())
    return str(module), tensors, [each.training for each in module.modules()], type(optimizer), schedule, groups


def _vector(tensors: Iterable[Tensor | None]) -> Tensor:
    found = [each.detach().flatten() for each in tensors if each is not None and each.is_floating_point()]
    return torch.cat(found) if found else torch.zeros(0)
