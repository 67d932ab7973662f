"""Models and optimizers of a user and of other libraries: unwraps them, or says which line to write.

Accelerate      prepare(optimizer) returns an AcceleratedOptimizer, which calls the step() of its .optimizer
Lightning       self.optimizers() returns a LightningOptimizer, which does so, too
SAM             calls the step() of its .base_optimizer once in two passes
"""

from collections.abc import Mapping

import torch
from torch import nn

from real.loops.shards import is_fully_sharded
from real.programs.binding import trained_parameters
from simdist.errors import UnsupportedError
from simdist.plan.plan import DType

# Classes, by name, so that they need not be imported. Their step() calls that of their .optimizer, or leaves it out.
_FORWARDING = {"AcceleratedOptimizer", "LightningOptimizer"}

# Optimizers that synchronise ranks themselves.
_SYNCHRONISING: Mapping[str, str] = {
    "ZeroRedundancyOptimizer": "wrap a plain optimizer, and write Sync(shared_update=True)",
    "PostLocalSGDOptimizer": "real.wrap takes its place, so wrap its .optim",
    "DistributedFusedAdam": "wrap a plain optimizer, and write Sync(shared_update=True)",
}

# Classes, by name, so that they need not be imported: those that synchronise or shard parameters themselves.
_SYNCHRONISED: Mapping[str, str] = {
    "DistributedDataParallel": "real.wrap takes its place, so wrap the bare model, which is its .module",
    "DataParallel": "start one process per device, and wrap the bare model, which is its .module",
    "FullyShardedDataParallel": (
        "it keeps parameters in flat tensors of its own; shard the bare model, which is its .module, by fully_shard "
        "(torch.distributed.fsdp)"
    ),
}
_DISTRIBUTED = (
    "distributed by hand, which a plan does not know: shard the model by fully_shard instead, or wrap it before"
)
# Types of parameters, and their names in plans.
PLAN_DTYPES: Mapping[torch.dtype, DType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the trained parameters.

    Raises:
        UnsupportedError: There are several devices, another data type, sparse gradients or no parameters, or another
            wrapper.
    """
    parameters = trained_parameters(module)
    for each in module.modules():
        for base in type(each).__mro__:
            if advice := _SYNCHRONISED.get(base.__name__):
                raise UnsupportedError(f"{type(module).__name__} has a {base.__name__}: {advice}")
    if not any(map(is_fully_sharded, module.modules())):
        for parameter in parameters:
            if any(base.__name__ == "DTensor" for base in type(parameter).__mro__):
                raise UnsupportedError(f"{type(module).__name__} has a DTensor, {_DISTRIBUTED}")
    _check_layers(module)
    if not parameters:
        raise UnsupportedError(f"{type(module).__name__} has no parameter that is trained")
    devices = {parameter.device for parameter in parameters}
    dtypes = {parameter.dtype for parameter in parameters}
    if len(devices) > 1 or parameters[0].device.type not in {"cpu", "cuda"}:
        found = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(f"{type(module).__name__} is on {found}; a wrapped model is on one CPU or CUDA device")
    if not dtypes <= PLAN_DTYPES.keys():
        found = ", ".join(sorted(map(str, dtypes - PLAN_DTYPES.keys())))
        raise UnsupportedError(
            f"{type(module).__name__} has parameters of {found}; a plan takes {', '.join(PLAN_DTYPES.values())}"
        )
    return parameters[0].device


def optimizer_of(module: nn.Module, optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer of torch that an object is or forwards to. It updates only parameters of the module.

    Raises:
        UnsupportedError: It updates other tensors, or there is none.
    """
    inner = unwrapped(optimizer)
    _check_optimizer(module, inner)
    return inner


def _check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = {id(parameter) for parameter in module.parameters()}
    strange = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if strange:
        raise UnsupportedError(
            f"{type(optimizer).__name__} updates {strange} tensors that are no parameters of {type(module).__name__}, "
            f"so they would not be synchronised: make it of model.parameters()"
        )


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


def _check_layers(module: nn.Module) -> None:
    """Check that no layer has sparse gradients."""
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
