"""Where a unit of `fully_shard` waits for other ranks: for each gather and each reduction, the moments around it.

`fully_shard` gathers a unit in a hook before its forward pass, and again in a hook on its outputs before its backward
pass. It reduces gradients in a node of autograd behind the unit's inputs. What is left, such as the root, it reduces in
a callback at the end of the backward pass. Each of these has a hook of ours before it, which notes the arrival, and one
after it, which notes the leave. All of them only look.

On a CPU, `fully_shard` waits in these places. On a GPU, it lets the stream of computation wait, and so the moments tell
what of an exchange is not hidden.
"""

from typing import final

import torch
from torch import Tensor, nn

from real.watching.module_hooks import Handle, Meets, not_compiled, tensors_in

_REDUCES = "RegisterPostBackwardFunction"  # torch 2.4-2.13: the node that reduces the gradients of a unit


def attach_to_units(root: nn.Module, meets: Meets) -> list[Handle]:
    """Note where the units of a model wait.

    Returns:
        The hooks.
    """
    end = _EndOfPass(meets)
    return [handle for each in root.modules() if _is_unit(each) for handle in _UnitHooks(meets, end).attach(each)]


def _is_unit(module: nn.Module) -> bool:
    """Tell whether `fully_shard` was applied to a module itself."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)  # so that it need not be imported


@final
class _EndOfPass:
    """Notes the arrival before the last callback of `fully_shard` in a backward pass, and the leave after it."""

    def __init__(self, meets: Meets) -> None:
        self._meets = meets
        self._begun = -1
        self._ended = -1

    def begins(self) -> None:
        """Queue the arrival, before the first unit of the pass queues the callback."""
        number = torch._C._current_graph_task_id()
        if number != self._begun:
            self._begun = number
            torch.autograd.Variable._execution_engine.queue_callback(self._meets.arrive)

    def has_begun(self) -> None:
        """Queue the leave, after the first unit of the pass has queued the callback."""
        number = torch._C._current_graph_task_id()
        if number != self._ended:
            self._ended = number
            torch.autograd.Variable._execution_engine.queue_callback(self._meets.leave)


@final
class _UnitHooks:
    """The hooks of one unit."""

    def __init__(self, meets: Meets, end: _EndOfPass) -> None:
        self._meets = meets
        self._end = end
        self._outputs: list[Tensor] = []

    def attach(self, unit: nn.Module) -> list[Handle]:
        """Add the hooks."""
        return [
            unit.register_forward_pre_hook(not_compiled(self._before_gather), prepend=True, with_kwargs=True),
            unit.register_forward_pre_hook(not_compiled(self._after_gather), with_kwargs=True),
            unit.register_forward_hook(not_compiled(self._has_output), prepend=True),
            unit.register_forward_hook(not_compiled(self._output_has_hooks)),
        ]

    def _before_gather(self, *_: object) -> None:
        self._meets.arrive()

    def _after_gather(self, _unit: nn.Module, *inputs: object) -> None:
        """Note the leave. `fully_shard` has just put its node behind the inputs."""
        self._meets.leave()
        nodes = {each.grad_fn for each in tensors_in(inputs) if each.grad_fn is not None}
        for node in nodes:
            if node.name().startswith(_REDUCES):
                node.register_prehook(self._before_reduction)
                node.register_hook(self._after_reduction)

    def _before_reduction(self, _gradients: object) -> None:
        self._meets.arrive()

    def _after_reduction(self, _gradients: object, _passed_on: object) -> None:
        self._meets.leave()

    def _has_output(self, _unit: nn.Module, _inputs: object, output: object) -> None:
        self._outputs = [each for each in tensors_in(output) if each.requires_grad]
        for each in self._outputs:
            each.register_hook(self._before_regather)

    def _output_has_hooks(self, *_: object) -> None:
        """`fully_shard` has just put its hook on the outputs, and may have replaced them by copies of another type."""
        for each in self._outputs:
            each.register_hook(self._after_regather)
        self._outputs = []

    def _before_regather(self, _gradient: Tensor) -> None:
        self._meets.arrive()
        self._end.begins()

    def _after_regather(self, _gradient: Tensor) -> None:
        self._end.has_begun()
        self._meets.leave()
