"""Where a model waits for other ranks: hooks that note arrivals and leaves, without changing what the model computes.

* `DistributedDataParallel` waits at the end of a backward pass, in a callback that it queues when the last bucket is
  complete. A hook on a few parameters queues a callback of ours before that one, which notes the arrival and queues a
  second callback, which notes the leave. Exchanges that overlap with the backward pass are no waiting. Passes in
  `no_sync` wait for nothing, so they only add work. If the model has buffers, it also waits for those of rank 0 when a
  forward pass begins.
* Sharded models (FSDP) wait for parameters when a forward pass begins, and again for each layer. Only the first wait is
  noted, so a rank that loads or pauses late is visible, and one that computes slowly is not. Under `fully_shard`, that
  is the first wait of a unit with parameters of its own, which the outermost module need not have.

Other models wait where the script says so, in `watch.waiting()`.
"""

from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from simdist.errors import UnsupportedError

_N_PROBES = 8  # parameters with a hook; in a pass that uses none of them, no arrival is noted


class Handle(Protocol):
    """Removes a hook."""

    def remove(self) -> None:
        """Remove the hook."""


class Meets(Protocol):
    """Notes arrivals and leaves."""

    def arrive(self) -> None:
        """Note that this rank begins to wait for others."""

    def leave(self) -> None:
        """Note that the exchange is done."""


def attach(module: nn.Module, meets: Meets) -> list[Handle]:
    """Note where a model waits for other ranks.

    Args:
        module: The model that the loop calls.
        meets: Notes arrivals and leaves.

    Returns:
        The hooks.

    Raises:
        UnsupportedError: `real.wrap` made the model.
    """
    module = _uncompiled(module)
    names = {base.__name__ for base in type(module).__mro__}  # so that the classes need not be imported
    if type(module).__module__ == "real.loops.worker":
        raise UnsupportedError(
            "real.watch of a model that real.wrap made: write "
            "real.wrap(..., experiment=real.Experiment(watching=real.Watching())) instead"
        )
    if isinstance(module, DistributedDataParallel):
        handles = EndOfBackward(meets).attach([each for each in module.parameters() if each.requires_grad])
        if module.will_sync_module_buffers():
            handles += _attach_to_forward(module, module.module, meets)
        return handles
    if "FullyShardedDataParallel" in names:
        inner = module.get_submodule("_fsdp_wrapped_module")
        return _attach_to_forward(module, inner, meets)
    if "FSDPModule" in names:
        return _attach_to_units(module, meets)
    return []


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` has wrapped, or the model itself."""
    return dict(module.named_children()).get("_orig_mod", module)


@final
class EndOfBackward:
    """Notes when a backward pass has computed all gradients, and when it has exchanged them.

    Args:
        meets: Notes arrivals and leaves.
    """

    def __init__(self, meets: Meets) -> None:
        self._meets = meets
        self._pass = -1

    def attach(self, parameters: list[nn.Parameter]) -> list[Handle]:
        """Add hooks to some of the parameters, evenly spread."""
        n_probes = min(_N_PROBES, len(parameters))
        last = len(parameters) - 1
        places = {round(number * last / max(1, n_probes - 1)) for number in range(n_probes)}
        return [parameters[place].register_post_accumulate_grad_hook(self._begins) for place in sorted(places)]

    def _begins(self, _parameter: Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            torch.autograd.Variable._execution_engine.queue_callback(self._arrives)

    def _arrives(self) -> None:
        self._meets.arrive()
        torch.autograd.Variable._execution_engine.queue_callback(self._meets.leave)


def _attach_to_forward(outer: nn.Module, inner: nn.Module, meets: Meets) -> list[Handle]:
    """Note the arrival before all hooks of a model, and the leave before the forward pass of its inner model."""

    def arrive(_module: nn.Module, _inputs: object) -> None:
        if not torch.compiler.is_compiling():
            meets.arrive()

    def leave(_module: nn.Module, _inputs: object) -> None:
        if not torch.compiler.is_compiling():
            meets.leave()

    return [
        outer.register_forward_pre_hook(arrive, prepend=True),
        inner.register_forward_pre_hook(leave, prepend=inner is not outer),
    ]


def _attach_to_units(root: nn.Module, meets: Meets) -> list[Handle]:
    """Note the arrival before all hooks of a model, and the leave when its first unit has its parameters."""
    is_waiting = False

    def arrive(_module: nn.Module, _inputs: object) -> None:
        nonlocal is_waiting
        if not torch.compiler.is_compiling():
            is_waiting = True
            meets.arrive()

    def leave(_module: nn.Module, _inputs: object) -> None:
        nonlocal is_waiting
        if is_waiting and not torch.compiler.is_compiling():
            is_waiting = False
            meets.leave()

    units = [each for each in root.modules() if _is_unit(each)]
    gathering = [each for each in units if _has_own_parameters(each)]
    first = gathering[:1] if gathering[:1] == [root] else gathering
    return [
        root.register_forward_pre_hook(arrive, prepend=True),
        *(each.register_forward_pre_hook(leave) for each in first),
    ]


def _is_unit(module: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _has_own_parameters(unit: nn.Module) -> bool:
    """Tell whether a unit has parameters that no unit within it has."""
    inner = {
        each for module in unit.modules() if module is not unit and _is_unit(module) for each in module.parameters()
    }
    return not inner.issuperset(unit.parameters())
