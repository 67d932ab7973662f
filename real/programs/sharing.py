"""Shared updates: each rank updates its slice of the parameters, and keeps only that slice's optimizer state.

The rank has all parameters, or only its slice of them if the model is sharded.

The user's optimizer temporarily gets *pieces*: flat tensors, the parts of its parameters in this rank's slices. So any
optimizer of torch works that treats each element separately. `problem_of` tests this.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from real.buffers.memory import Memory
from real.programs.binding import Binding, laid_like
from simdist.errors import PlanError, RunError, UnsupportedError
from simdist.plan import Backward, Optimize, Plan
from simdist.plan.ops import ALONE

_TRIED = (4, 6)  # shape of the tensor to try an optimizer on, and the number of its first elements that form a slice
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_TRIED_SLICE = 11
_TRIED_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a parameter that this rank updates.

    Args:
        tensor: The tensor that the optimizer updates, a view of the slice after the update.
        first: Beginning of the part in the parameter's memory.
        number: Number of the parameter's buffer.
        place: Place of the part in the rank's slice of that buffer.
    """

    tensor: Tensor
    first: int
    number: int
    place: slice


def shared_update(
    plan: Plan, binding: Binding, optimizer: torch.optim.Optimizer, memory: Memory, rank: int
) -> "SharedUpdate | None":
    """Return a rank's part of a plan's shared updates; None if there are none."""
    updates = (op for body in plan.bodies for op in body if isinstance(op, Optimize) and op.optimizer == "inner")
    update = next((op for op in updates if op.slices or _is_sharded(plan, op)), None)
    return SharedUpdate(update, plan, binding, optimizer, memory, rank) if update else None


@final
class SharedUpdate:
    """This rank's part of the updates of a plan.

    Args:
        update: One of them; the others have the same slices.
        plan: The plan.
        binding: The binding of the parameters.
        optimizer: Optimizer of the same parameters.
        memory: Buffers of the plan.
        rank: This rank.

    Raises:
        UnsupportedError: The optimizer does not treat each element separately.
    """

    def __init__(
        self,
        update: Optimize,
        plan: Plan,
        binding: Binding,
        optimizer: torch.optim.Optimizer,
        memory: Memory,
        rank: int,
    ) -> None:
        if problem := problem_of(optimizer):
            raise UnsupportedError(f"plan {plan.name} shares updates: {type(optimizer).__name__} {problem}")
        is_sharded = _is_sharded(plan, update)
        if is_sharded:
            _check_order(plan, update)
        self._binding = binding
        self._memory = memory
        self._sharers = plan.buffer(update.params[0]).sharded_over if is_sharded else update.shared_by
        self._copy = self._sharers.number(rank)
        self._slices = _Slices(update, plan, binding, memory, self._sharers.member(rank))
        self._lent = _LentOptimizer(optimizer, self._slices.pieces)
        self._buckets = {op.dst for body in plan.bodies for op in body if isinstance(op, Backward)}
        self._seen: dict[str, int] = {}
        self._unused: set[Tensor] = set()

    def release(self) -> None:
        """Restore the ordinary optimizer, without a state."""
        self._lent.release()

    def update(self, op: Optimize) -> None:
        """Perform an update."""
        self.note(op)
        self.begin(op)
        self._lent.optimizer.step()
        self.end()

    def begin(self, op: Optimize) -> None:
        """Give the optimizer the pieces and their gradients; `end` takes them back."""
        self._lent.split()
        self.keep()
        gradients = self._slices.gradients(op)
        for (parameter, piece), gradient in zip(self._slices.pieces.items(), gradients, strict=True):
            is_unused = parameter in self._unused and not gradient.any() and bool(gradient.signbit().all())
            piece.tensor.grad = None if is_unused else gradient.to(piece.tensor.dtype)
        self._lent.lend()

    def end(self) -> None:
        """Take the pieces back."""
        self._lent.take_back()

    def keep(self) -> None:
        """Set the slices to those of the parameters, as without an update; of slices that last, only the first time."""
        self._slices.keep()

    def note(self, op: Optimize) -> None:
        """Record the gradients that the user sees, if the update uses other ones, and the unused parameters."""
        self._unused = self._binding.buckets.unused
        hidden = self._buckets if self.hides(op) else ()
        self._seen = {name: self._memory.dense(name)._version for name in hidden if name in self._memory}

    def is_stale(self) -> bool:
        """Tell whether gradients have changed since they were recorded."""
        return any(self._memory.dense(name)._version != version for name, version in self._seen.items())

    def hides(self, op: Optimize) -> bool:
        """Tell whether an update uses other gradients than the user sees."""
        return not self._buckets.issuperset(op.grads)

    def clip(self, op: Optimize, max_norm: float, everyone: dist.ProcessGroup | None) -> Tensor:
        """Scale the slices of the gradients so that all slices of a copy have a total norm of at most `max_norm`.

        All ranks take part. If copies of the model have different gradients, each has a norm of its own.

        Returns:
            The norm before, a scalar.
        """
        pieces = self._slices.gradients(op)
        like = self._memory.dense(op.grads[0])
        dtype = torch.promote_types(like.dtype, torch.float32)
        squares = like.new_zeros(dist.get_world_size(everyone) // self._sharers.size, dtype=dtype)
        squares[self._copy] = sum(torch.linalg.vector_norm(each, dtype=dtype).square() for each in pieces)
        dist.all_reduce(squares, group=everyone)
        norm = squares[self._copy].sqrt()
        for each in pieces:
            each.mul_((max_norm / (norm + _CLIP_EPS)).clamp(max=1.0).to(each.dtype))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's pieces; before the first update, the whole state of the optimizer."""
        return self._lent.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore either state."""
        self._lent.load_state_dict(state)


@final
class _Slices:
    """The slices of one rank, and the pieces of parameters in them."""

    def __init__(self, update: Optimize, plan: Plan, binding: Binding, memory: Memory, member: int) -> None:
        self.pieces: dict[nn.Parameter, _Piece] = {}
        self._memory = memory
        self._whole: list[tuple[Tensor, Tensor]] = []  # this rank's slices of the parameters, and their targets
        self._in_whole: dict[str, dict[nn.Parameter, int]] = {}  # places of parameters in whole gradient buffers
        self._has_kept = False
        for number, (name, target) in enumerate(zip(update.params, update.slices or update.params, strict=True)):
            buffer = plan.buffer(name)
            updated = memory.dense(target)
            count = updated.numel()
            first = member * count
            is_sharded = buffer.sharded_over != ALONE
            self._whole.append((updated if is_sharded else memory.dense(name)[first : first + count], updated))
            for parameter, begin, place in binding.pieces(buffer, member, count):
                self.pieces[parameter] = _Piece(updated[place], begin, number, place)
        for buffer in plan.buffers:
            if buffer.tensors is not None and buffer.sharded_over == ALONE:
                places = binding.pieces(buffer, 0, buffer.count)
                self._in_whole[buffer.name] = {parameter: place.start for parameter, _, place in places}

    def keep(self) -> None:
        """Set the slices to those of the parameters; of slices that last, only the first time."""
        for mine, updated in self._whole:
            if mine is not updated and (mine.dtype == updated.dtype or not self._has_kept):
                updated.copy_(mine)
        self._has_kept = True

    def gradients(self, op: Optimize) -> list[Tensor]:
        """Return the gradient of each piece."""
        if op.grads[0] not in self._in_whole:
            slices = [self._memory.dense(name) for name in op.grads]
            return [slices[piece.number][piece.place] for piece in self.pieces.values()]
        firsts = {each: (name, first) for name in op.grads for each, first in self._in_whole[name].items()}
        found = []
        for parameter, piece in self.pieces.items():
            name, first = firsts[parameter]
            begin = first + piece.first
            found.append(self._memory.dense(name)[begin : begin + piece.tensor.numel()])
        return found


@final
class _LentOptimizer:
    """Lends the user's optimizer the pieces of a rank in place of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: Mapping[nn.Parameter, _Piece]) -> None:
        self.optimizer = optimizer
        self._pieces = pieces
        self._state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._groups: list[list[Tensor]] = [[] for _ in optimizer.param_groups]  # parameters, while pieces replace them
        self._is_lent = False
        self._is_split = False
        self._handle = optimizer.register_state_dict_pre_hook(self._refuse_state)

    def release(self) -> None:
        """Restore the ordinary optimizer, without a state."""
        self.take_back()
        self._handle.remove()

    def split(self) -> None:
        """Keep only the part of the optimizer's state for the pieces. Do so once."""
        if self._is_split:
            return
        for parameter, piece in self._pieces.items():
            for name, value in self.optimizer.state.pop(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    flat = value.new_empty(value.numel())
                    laid_like(flat, parameter).copy_(value)
                    value = flat[piece.first : piece.first + piece.tensor.numel()].clone()
                self._state[piece.tensor][name] = value
        self.optimizer.state.clear()
        self._is_split = True

    def lend(self) -> None:
        """Let the optimizer have the pieces and their state."""
        self._groups = [
            [self._pieces[each].tensor for each in group["params"] if each in self._pieces]
            for group in self.optimizer.param_groups
        ]
        self._swap()

    def take_back(self) -> None:
        """Let the optimizer have its parameters, unless it has them."""
        if self._is_lent:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the pieces; before `split`, the whole state of the optimizer."""
        if not self._is_split:
            return {"whole": self.optimizer.state_dict()}
        self.lend()
        state = self.optimizer.state_dict()
        self.take_back()
        return {"pieces": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore either state."""
        if "whole" in state:
            self.optimizer.load_state_dict(state["whole"])
            return
        self._is_split = True
        self.lend()
        self.optimizer.load_state_dict(state["pieces"])
        self.take_back()

    def _swap(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"], self._groups[number] = self._groups[number], group["params"]
        self.optimizer.state, self._state = self._state, self.optimizer.state
        self._is_lent = not self._is_lent

    def _refuse_state(self, _optimizer: torch.optim.Optimizer) -> None:
        if self._is_split and not self._is_lent:
            raise RunError(
                "the state of the optimizer is shared: each rank has a slice of it; let real.wrap(checkpointing=...) "
                "save and restore it"
            )


def _is_sharded(plan: Plan, update: Optimize) -> bool:
    """Tell whether ranks hold only their slices of the parameters that an update names."""
    return plan.buffer(update.params[0]).sharded_over != ALONE


def _check_order(plan: Plan, update: Optimize) -> None:
    """Check that each gradient buffer belongs to the parameters at the same place."""
    params, grads = ([plan.buffer(name).tensors for name in names] for names in (update.params, update.grads))
    if params != grads:
        raise PlanError(
            f"plan {plan.name}: an update has gradients of tensors {grads} for parameters {params}: write both in the "
            f"same order"
        )


def problem_of(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer cannot update slices of parameters; empty if it can.

    A copy of it takes a few steps on a random matrix, and on two pieces of that matrix, in each parameter group.
    """
    generator = torch.Generator().manual_seed(0)
    matrix, *slopes = (torch.randn(_TRIED, dtype=torch.float64, generator=generator) for _ in range(1 + _TRIED_STEPS))
    for number, group in enumerate(optimizer.param_groups):
        try:
            whole = _stepped(optimizer, group, [matrix], [[slope] for slope in slopes])
            flat = matrix.flatten()
            cut = [_TRIED_SLICE, matrix.numel() - _TRIED_SLICE]
            pieces = _stepped(optimizer, group, flat.split(cut), [each.flatten().split(cut) for each in slopes])
        except Exception as error:  # any requirement on its parameters
            return f"updates no slices of parameters ({type(error).__name__}: {error}); take SGD, Adam or AdamW"
        if not torch.allclose(whole, pieces, rtol=1e-9, atol=0.0):
            return (
                f"does not update each element of parameter group {number} by itself: it gives slices of a matrix "
                f"other values than the matrix; take SGD, Adam or AdamW, or leave out shared_update"
            )
    return ""


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Any, gradients: Any) -> Tensor:
    """Return parameters after some steps of a copy of an optimizer, as one vector."""
    tried = copy.copy(optimizer)
    device = next((each.device for each in group["params"]), torch.device("cpu"))
    tensors = [nn.Parameter(each.to(device, copy=True)) for each in parameters]
    tried.state = defaultdict(dict)
    tried.param_groups = [{**group, "params": tensors}]
    for slopes in gradients:
        for tensor, slope in zip(tensors, slopes, strict=True):
            tensor.grad = slope.to(device, copy=True)
        tried.step()
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
