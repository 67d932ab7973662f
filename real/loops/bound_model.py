"""The model of a loop. It is bound to the buffers of the plan until the loop is closed.

Of a model under `fully_shard`, stand-ins of its slices are bound. See `real.loops.shards`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from real.buffers.memory import Memory
from real.loops.shards import Shards
from real.programs.binding import Binding, trained_parameters
from real.programs.optimizers import MakeOptimizer, Outer, Rating
from real.programs.sharing import SharedUpdate, shared_update
from real.session import Session


@final
class _GradientArrivals:
    """Notifies listeners of each gradient when autograd has accumulated it.

    Make it before the `Binding`, which moves gradients into their buckets. Listeners then see them before the move.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._listeners: list[Callable[[Tensor], None]] = []
        self._handles = [each.register_post_accumulate_grad_hook(self._tell) for each in parameters]

    def listen(self, listener: Callable[[Tensor], None]) -> None:
        """Add a function to call with each parameter when its gradient has arrived."""
        self._listeners.append(listener)

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _tell(self, parameter: Tensor) -> None:
        for listener in self._listeners:
            listener(parameter)


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model, its optimizer, and the objects that bind them to a plan. `bound` makes it.

    Args:
        module: The model that the loop calls.
        optimizer: Optimizer of the module's parameters.
        arrivals: Reports gradients before they are in their buckets.
        binding: Binds parameters and gradients to buffers.
        rating: Computes trust ratios for the optimizer.
        shared: This rank's part of shared updates. None if ranks share no updates.
        outer: Updates the anchors, if the plan has any.
        memory: The buffers.
        shards: The slices of a model under `fully_shard`. None: each rank has the whole model.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    arrivals: _GradientArrivals
    binding: Binding
    rating: Rating
    shared: SharedUpdate | None
    outer: Outer
    memory: Memory
    shards: Shards | None = None

    @contextmanager
    def staged(self) -> Iterator[None]:
        """Let the buffers of parameters have the values of the model, and the model theirs afterwards."""
        if self.shards is None:
            yield
            return
        self.shards.reshard()
        for name in self.binding.parameter_names:
            self.memory.take(name)
        self.shards.take_parameters()
        yield
        self.shards.put_parameters()
        self.give_back()

    def take_gradients(self) -> None:
        """Let the buckets find the gradients of a sharded model."""
        if self.shards is not None and self.binding.buckets.moves_gradients:
            self.shards.take_gradients()

    def put_gradients(self) -> None:
        """Let a sharded model have the gradients of the buckets."""
        if self.shards is not None and self.binding.buckets.moves_gradients:
            self.shards.put_gradients()

    def give_back(self) -> None:
        """Free the buffers of parameters, which hold copies of a sharded model."""
        for name in self.binding.parameter_names:
            self.memory.give_back(name)


@contextmanager
def bound(
    session: Session,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    make_outer: MakeOptimizer,
    shards: Shards | None = None,
) -> Iterator[BoundModel]:
    """Bind a model to the plan of a session, and release it at the end.

    Args:
        session: Has the plan and its buffers.
        module: The model.
        optimizer: Optimizer of the module's parameters.
        make_outer: Makes the outer optimizer, if the plan has one.
        shards: The slices of a model under `fully_shard`. None: each rank has the whole model.

    Raises:
        PlanError: The plan is for another model or optimizer.
        UnsupportedError: Ranks cannot share the updates of the optimizer.
    """
    plan = session.plan
    memory = session.memory
    with ExitStack() as stack:
        arrivals = _GradientArrivals([] if shards else trained_parameters(module))
        stack.callback(arrivals.release)
        binding = Binding(plan, shards.model if shards else module, memory)
        stack.callback(binding.buckets.release)
        rating = Rating(plan, binding, optimizer, memory, session.rank)
        stack.callback(rating.release)
        shared = shared_update(plan, binding, optimizer, memory, session.rank)
        if shared:
            stack.callback(shared.release)
        outer = Outer(plan, binding, memory, make_outer)
        model = BoundModel(module, optimizer, arrivals, binding, rating, shared, outer, memory, shards)
        if shards:
            model.give_back()
        yield model
