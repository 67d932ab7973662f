"""Optimizers and layers of other libraries: unwraps them, or says which line to write.

Accelerate      prepare(optimizer) returns an AcceleratedOptimizer, which calls the step() of its .optimizer
Lightning       self.optimizers() returns a LightningOptimizer, which does so, too
SAM             calls the step() of its .base_optimizer once in two passes
"""

from collections.abc import Mapping

import torch
from torch import nn

from simdist.errors import UnsupportedError

# Classes, by name, so that they need not be imported. Their step() calls that of their .optimizer, or leaves it out.
_FORWARDING = {"AcceleratedOptimizer", "LightningOptimizer"}

# Optimizers that synchronise ranks themselves.
_SYNCHRONISING: Mapping[str, str] = {
    "ZeroRedundancyOptimizer": "wrap a plain optimizer, and write Sync(shared_update=True)",
    "PostLocalSGDOptimizer": "real.wrap takes its place, so wrap its .optim",
    "DistributedFusedAdam": "wrap a plain optimizer, and write Sync(shared_update=True)",
}


def unwrapped(optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer of torch that an object is, or forwards its updates to.

    Raises:
        UnsupportedError: There is none. The error says which optimizer to wrap, if one is known.
    """
    name = type(optimizer).__name__
    bases = [base.__name__ for base in type(optimizer).__mro__]
    if not _FORWARDING.isdisjoint(bases):
        return unwrapped(getattr(optimizer, "optimizer", None))
    for base in bases:
        if advice := _SYNCHRONISING.get(base):
            raise UnsupportedError(f"{name} synchronises ranks itself: {advice}")
    has_hooks = "_optimizer_step_pre_hooks" in getattr(optimizer, "__dict__", {})
    if isinstance(optimizer, torch.optim.Optimizer) and has_hooks:
        return optimizer
    if held := _held_by(optimizer):
        raise UnsupportedError(
            f"{name} does not call torch.optim.Optimizer.__init__, so it has no hooks on its step(), but its .{held} "
            f"is an optimizer of torch: write real.wrap(model, optimizer.{held}, schedule), unless {name} changes "
            f"parameters after that one's step()"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"{name} does not call torch.optim.Optimizer.__init__: write super().__init__(...) there"
        )
    raise UnsupportedError(
        f"{name} is no torch.optim.Optimizer: write real.wrap(model, optimizer, schedule); of several optimizers, the "
        f"one whose step comes last"
    )


def check_layers(module: nn.Module) -> None:
    """Check that no layer has sparse gradients.

    Raises:
        UnsupportedError: One has. The error names it.
    """
    for name, layer in module.named_modules():
        is_trained = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        if is_trained and getattr(layer, "sparse", False) is True:
            where = f"layer {name!r} ({type(layer).__name__})" if name else type(layer).__name__
            raise UnsupportedError(
                f"{type(module).__name__}: {where} has sparse gradients, and those of a plan are dense: make it with "
                f"sparse=False, and take SGD or Adam in place of SparseAdam"
            )


def _held_by(optimizer: object) -> str:
    """Return the attribute of an object that is an optimizer of torch; nothing if it has none."""
    held = getattr(optimizer, "__dict__", {})
    names = [*held, "optimizer", "base_optimizer"]
    return next((name for name in names if isinstance(getattr(optimizer, name, None), torch.optim.Optimizer)), "")
