"""Where a model waits for other ranks: hooks that note arrivals and leaves, without changing what the model computes.

* `DistributedDataParallel` waits at the end of a backward pass, in a callback that it queues when the last bucket is
  complete. A hook on a few parameters queues a callback of ours before that one, which notes the arrival and queues a
  second callback, which notes the leave. Exchanges that overlap with the backward pass are no waiting. Passes in
  `no_sync` wait for nothing, so they only add work. If the model has buffers, it also waits for those of rank 0 when a
  forward pass begins.
* Models under `fully_shard` wait for each unit in both passes. All of these waits are noted (`real.watching.units`).
* `FullyShardedDataParallel` waits likewise, and only the wait at the beginning of a forward pass is noted: a rank that
  loads or pauses late is visible, and one that computes slowly is not.

Other models wait where the script says so, in `watch.waiting()`. `unseen` tells which late ranks the hooks miss.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from real.watching.module_hooks import Handle, Meets
from real.watching.units import attach_to_units
from simdist.errors import UnsupportedError

_N_PROBES = 8  # parameters with a hook; in a pass that uses none of them, no arrival is noted


def attach(module: nn.Module, meets: Meets) -> list[Handle]:
    """Note where a model waits for other ranks.

    Returns:
        The hooks.

    Raises:
        UnsupportedError: `real.wrap` made the model.
    """
    module = _uncompiled(module)
    if type(module).__module__ == "real.loops.worker":
        raise UnsupportedError(
            "real.watch of a model that real.wrap made: write "
            "real.wrap(..., experiment=real.Experiment(watching=real.Watching())) instead"
        )
    if isinstance(module, DistributedDataParallel):
        handles = _EndOfBackward(meets).attach([each for each in module.parameters() if each.requires_grad])
        if module.will_sync_module_buffers():
            handles += _attach_to_forward(module, module.module, meets)
        return handles
    if _is_fsdp1(module):
        inner = module.get_submodule("_fsdp_wrapped_module")
        return _attach_to_forward(module, inner, meets)
    return attach_to_units(module, meets)


def unseen(module: nn.Module) -> str:
    """Return which late ranks the hooks of a model do not show, and what does; empty if they show all."""
    found = _uncompiled(module)
    waits_for_buffers = isinstance(found, DistributedDataParallel) and found.will_sync_module_buffers()
    if found is not module and waits_for_buffers:
        return (
            "a rank that loads late may not be visible here, because it is compiled how the model waits for buffers: "
            "watch DDP(torch.compile(model))"
        )
    if any(isinstance(each, nn.SyncBatchNorm) or _is_fsdp1(each) for each in found.modules()):
        return "slow computing is not visible here, because ranks wait for it within their passes: profile"
    return ""


def _is_fsdp1(module: nn.Module) -> bool:
    return any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__)  # it need not be imported


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` has wrapped, or the model itself."""
    return dict(module.named_children()).get("_orig_mod", module)


@final
class _EndOfBackward:
    """Notes when a backward pass has computed all gradients, and when it has exchanged them."""

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
