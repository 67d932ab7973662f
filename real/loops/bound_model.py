"""The model of a loop, tied to the buffers of the plan until the loop is closed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from real.programs.binding import Binding, trained_parameters
from real.programs.optimizers import MakeOptimizer, Outer, Rating
from real.programs.sharing import SharedUpdate, shared_update
from real.session import Session


@final
class GradientArrivals:
    """Tells of each gradient as autograd accumulates it.

    A `Binding` that is made afterwards moves gradients into their buckets, so listeners see them before.

    Args:
        parameters: Those whose gradients are told of.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._listeners: list[Callable[[Tensor], None]] = []
        self._handles = [each.register_post_accumulate_grad_hook(self._tell) for each in parameters]

    def listen(self, listener: Callable[[Tensor], None]) -> None:
        """Call a function with each parameter whose gradient has arrived."""
        self._listeners.append(listener)

    def release(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _tell(self, parameter: Tensor) -> None:
        for listener in self._listeners:
            listener(parameter)


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model, its optimizer, and what ties them to a plan; made by `bound`.

    Args:
        module: The model that the loop calls.
        optimizer: Of the module's parameters.
        arrivals: Tells of gradients before they are in their buckets.
        binding: Of parameters and gradients to buffers.
        rating: Of the optimizer.
        shared: This rank's part of updates that ranks share; None if they share none.
        outer: Updates the anchors, if there are some.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    arrivals: GradientArrivals
    binding: Binding
    rating: Rating
    shared: SharedUpdate | None
    outer: Outer


@contextmanager
def bound(
    session: Session, module: nn.Module, optimizer: torch.optim.Optimizer, make_outer: MakeOptimizer
) -> Iterator[BoundModel]:
    """Tie a model to the plan of a session, and let go of it at the end.

    Args:
        session: Has the plan and its buffers.
        module: The model.
        optimizer: Of the module's parameters.
        make_outer: Makes the outer optimizer, if the plan has one.

    Raises:
        PlanError: The plan is for another model or optimizer.
        UnsupportedError: Ranks cannot share the updates of the optimizer.
    """
    plan = session.plan
    memory = session.memory
    with ExitStack() as stack:
        arrivals = GradientArrivals(trained_parameters(module))
        stack.callback(arrivals.release)
        binding = Binding(plan, module, memory)
        stack.callback(binding.buckets.release)
        rating = Rating(plan, binding, optimizer, memory, session.rank)
        stack.callback(rating.release)
        shared = shared_update(plan, binding, optimizer, memory, session.rank)
        if shared:
            stack.callback(shared.release)
        outer = Outer(plan, binding, memory, make_outer)
        yield BoundModel(module, optimizer, arrivals, binding, rating, shared, outer)
