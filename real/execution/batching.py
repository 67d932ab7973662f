"""All ranks of the virtual world in one forward pass, one backward pass and one update.

A rank with a small model does not keep a core busy: its operators take less time than the interpreter between them. So
the models of all ranks are stacked, with parameters and buffers of shape `[n_ranks, *shape]`. The forward pass is
vectorised over the first axis (`torch.func.vmap`). Each row of the gradient of the summed losses is the gradient of one
rank. An optimizer that treats each element separately updates the stack as it would update each rank.

This requires that ranks differ only in their values, and that the forward pass depends on nothing else.
`problem_at_once` checks these conditions where possible and tests the rest: the first batch of two ranks must have the
same losses, gradients and buffers both ways.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from real.programs.base import Batch
from real.programs.binding import laid_like
from real.programs.optimizers import MakeOptimizer
from real.programs.sharing import problem_of
from simdist.errors import RunError
from simdist.plan import Plan, ops

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler
Made: TypeAlias = tuple[nn.Module, torch.optim.Optimizer, Scheduler | None]
LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@final
class StackedModule(nn.Module):
    """The modules of several ranks as one.

    Args:
        modules: Modules that differ only in the values of their parameters and buffers, which are copied.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._one = (modules[0],)  # in a tuple, so that its parameters do not count as this module's
        for name, first in modules[0].named_parameters():
            rows = _stacked([module.get_parameter(name) for module in modules])
            self._parameters[name] = nn.Parameter(rows, requires_grad=first.requires_grad)
        for name, _ in modules[0].named_buffers():
            self._buffers[name] = _stacked([module.get_buffer(name) for module in modules])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of all ranks; all shapes begin with the number of ranks."""
        with sdpa_kernel(SDPBackend.MATH):  # the other backends cannot be vectorised
            return per_rank(self._call)(dict(self._parameters), dict(self._buffers), inputs)

    def lend(self, modules: Iterable[nn.Module]) -> None:
        """Make parameters and buffers of the modules rows of this module's."""
        for rank, module in enumerate(modules):
            own = [*self.parameters(), *self.buffers()]
            for tensor, rows in zip([*module.parameters(), *module.buffers()], own, strict=True):
                tensor.data = rows[rank].detach()

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._one[0], (parameters, buffers), (inputs,))
        return outputs


def per_rank(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function of stacked arguments; it refuses to draw random numbers, because they would differ."""
    return vmap(function, randomness="error")


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return a copy of the ranks' tensors, `[n_ranks, *shape]`; each row keeps its memory layout."""
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
    try:
        return torch.stack(inputs), torch.stack(targets)
    except RuntimeError as error:
        raise RunError(f"batch {number}: all ranks need inputs and targets of one shape: {error}") from None


def problem_at_once(
    plan: Plan,
    made: Sequence[Made],
    loss: LossFunction,
    batch: Callable[[int, int], Batch],
    *,
    outer: MakeOptimizer,
    device: torch.device,
    autocast: torch.dtype | None,
) -> str | None:
    """Return why ranks must be computed one after the other, in a sentence; None if they can be computed at once.

    Args:
        plan: The plan.
        made: Module, optimizer and scheduler of each rank.
        loss: Function of outputs and targets.
        batch: (number of the pass, rank) -> batch.
        outer: Makes the outer optimizer.
        device: Where to compute.
        autocast: Lower precision, if any.
    """
    plan_ops = {op for body in plan.bodies for op in body}
    kinds = [_kind_of(*each) for each in made]
    odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    used = [made[0][1]]
    if any(isinstance(op, ops.Optimize) and op.optimizer == "outer" for op in plan_ops):
        used.append(outer([nn.Parameter(torch.zeros(1))]))
    try:
        if plan.world_size == 1:
            return "there is one rank only"
        if problem := _problem_of_plan(plan, plan_ops):
            return problem
        if any(each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks for _, each, _ in made):
            return "the optimizer has hooks"
        if any(None in group["params"] for group in kinds[0][-1]):
            return "the optimizer updates what is not in the model"
        if odd is not None:
            return f"rank {odd} has another model, optimizer, learning rate or other setting of it than rank 0"
        for optimizer in used:  # Adagrad has state from the beginning, which the trial would miss
            if type(optimizer) is not torch.optim.Adagrad and (problem := problem_of(optimizer)):
                return f"{type(optimizer).__name__} {problem.split('; take')[0]}"
        return _difference([module for module, *_ in made], loss, batch, device, autocast)
    except RunError as error:
        return str(error)
    except Exception as error:  # any operation of a model that cannot be vectorised
        return f"torch.func.vmap refuses the model: {type(error).__name__}: {str(error).partition('. ')[0].strip()}"


def _problem_of_plan(plan: Plan, plan_ops: set[ops.Op]) -> str | None:
    """Return why a plan needs a program for each rank."""
    if any(isinstance(op, ops.Enter) for op in plan_ops):
        return "ranks sit steps of the plan out"
    if any(isinstance(op, ops.Optimize) and (op.slices or op.ratios) for op in plan_ops):
        return "the plan shares updates between ranks, or takes trust ratios"
    if any(buffer.sharded_over != ops.ALONE for buffer in plan.buffers):
        return "the plan shards the model"
    return None


def stack(made: Sequence[Made]) -> tuple[StackedModule, torch.optim.Optimizer]:
    """Return one module, and one optimizer of its parameters, that of rank 0. Modules keep their size."""
    modules = [each[0] for each in made]
    optimizer = made[0][1]
    module = StackedModule(modules)
    for place, *rows in zip(module.parameters(), *(each.parameters() for each in modules), strict=True):
        for group in optimizer.param_groups:
            group["params"] = [place if each is rows[0] else each for each in group["params"]]
        states = [own.state.pop(row, {}) for (_, own, _), row in zip(made, rows, strict=True)]
        for key, value in states[0].items():
            is_row = isinstance(value, Tensor) and key != "step" and value.shape == rows[0].shape
            optimizer.state[place][key] = _stacked([state[key] for state in states]) if is_row else value
    return module, optimizer


def _difference(
    modules: Sequence[nn.Module],
    loss: LossFunction,
    batch: Callable[[int, int], Batch],
    device: torch.device,
    autocast: torch.dtype | None,
) -> str | None:
    """Try the first batch of two ranks both ways."""
    before = torch.get_rng_state()
    inputs, targets = (each.to(device)[[0, -1]] for each in stacked_batch(batch, len(modules), 0))
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        return "batches are drawn from torch's default generator, of which every rank has its own"
    pair = [copy.deepcopy(modules[rank]) for rank in (0, -1)]
    both = StackedModule(pair)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        losses = per_rank(loss)(both(inputs), targets)
        each_loss = [loss(module(inputs[row]), targets[row]) for row, module in enumerate(pair)]
    torch.autograd.backward([losses.sum(), *each_loss])
    for row, module in enumerate(pair):
        gradients = [(each.grad, its.grad) for each, its in zip(both.parameters(), module.parameters(), strict=True)]
        pairs = {
            "loss": [(losses[row], each_loss[row])],
            "gradient": [(ours[row], its) for ours, its in gradients if ours is not None and its is not None],
            "buffers": [(ours[row], its) for ours, its in zip(both.buffers(), module.buffers(), strict=True)],
        }
        for name, values in pairs.items():
            if values:
                one, other = (
                    torch.cat([each.detach().double().flatten() for each in some]) for some in zip(*values, strict=True)
                )
                eps = torch.finfo(autocast or losses.dtype).eps
                if (one - other).norm() > (eps if autocast else eps**0.5) * other.norm():
                    return f"with all ranks at once, the {name} of a rank would not be the same"
    return None


def _kind_of(module: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None) -> tuple[Any, ...]:
    """Return the properties that must be equal on all ranks."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    tensors = [(name, each.shape, each.dtype, each.stride(), each.requires_grad) for each, name in names.items()]
    groups = [group | {"params": [names.get(each) for each in group["params"]]} for group in optimizer.param_groups]
    schedule = scheduler and (type(scheduler), scheduler.state_dict())
    return str(module), tensors, [each.training for each in module.modules()], type(optimizer), schedule, groups
