"""The tensors of a model in the order of their first use, and the FLOPs that a forward pass spends on each.

The model may be on torch's `meta` device, whose tensors have shapes but no values. A backward pass that walks the
tensors from last to first finishes each gradient at the right moment:

* A parameter that is not trained has no gradient and is no tensor.
* A tied parameter is one tensor, at its first use: its gradient is complete when the backward pass gets there.
* FLOPs are those of `torch.utils.flop_counter`, 2 for each multiply-add of a matrix product or convolution. Biases,
  normalisations, embeddings, activations and pooling count 0: they cost memory traffic, not arithmetic.
* A product counts for the parameter that was first used last: its own, or for attention scores and the logits of a
  tied embedding the one before. The backward pass does it just before that gradient is complete.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_COMPILED = "_orig_mod."  # of names in a module that torch.compile has wrapped


@dataclass(frozen=True, slots=True)
class _TensorUse:
    """A tensor of a model."""

    name: str
    count: int
    rows: int
    flops: int
    dtype: str
    is_used: bool


def count_tensors(module: nn.Module, forward: Callable[[], object] | None) -> list[_TensorUse]:
    """Return the trained tensors of a model in forward order. Tensors that are not used come last.

    Args:
        module: The model.
        forward: A forward pass of a batch; without one, the order is that of `named_parameters`, without FLOPs.
    """
    if forward is None:
        return [_tensor(name, each, 0, is_used=True) for name, each in _trained(module).items()]
    with torch.no_grad():
        if any(isinstance(each, UninitializedParameter) for each in module.parameters()):
            forward()  # lazy modules get their parameters
        trained = _trained(module)
        with _Counting(trained) as counting:
            forward()
    order = [*counting.flops, *(name for name in trained if name not in counting.flops)]
    return [_tensor(name, trained[name], counting.flops.get(name, 0), is_used=name in counting.flops) for name in order]


def _trained(module: nn.Module) -> Mapping[str, nn.Parameter]:
    named = ((name.replace(_COMPILED, ""), each) for name, each in module.named_parameters())
    return {name: each for name, each in named if each.requires_grad}


def _tensor(name: str, parameter: nn.Parameter, flops: int, *, is_used: bool) -> _TensorUse:
    rows = parameter.shape[0] if parameter.dim() else 1
    return _TensorUse(name, parameter.numel(), rows, flops, str(parameter.dtype).removeprefix("torch."), is_used)


@final
class _Counting(TorchDispatchMode):
    """Notes which parameters operations use, and their FLOPs.

    Attributes: flops: FLOPs by the name of a used parameter, in the order of first use.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: dict[str, int] = {}
        self._trained = trained
        self._names: dict[int, list[str]] = {}
        for name, parameter in trained.items():
            self._names.setdefault(_storage(parameter), []).append(name)
        self._early_flops = 0  # before the first trained parameter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        used = self._used(tree_leaves((args, options)))
        for name in used:
            self.flops.setdefault(name, 0)
        count = _FORMULAS.get(func.overloadpacket)
        self._book(used, count(*args, **options, out_val=result) if count else 0)
        return result

    def _used(self, values: list[object]) -> list[str]:
        """Return the parameters among the arguments of an operation, and those that arguments are views of."""
        storages = {_storage(each) for each in values if isinstance(each, Tensor)}
        found = {name for storage in storages for name in self._names.get(storage, ())}
        return [name for name in self._trained if name in found] if found else []

    def _book(self, used: list[str], flops: int) -> None:
        if not self.flops:
            self._early_flops += flops
            return
        latest = next(reversed(self.flops))
        if latest in used:  # a matrix rather than its bias
            latest = max(used, key=lambda name: self._trained[name].dim())
        self.flops[latest] += flops + self._early_flops
        self._early_flops = 0


def _storage(tensor: Tensor) -> int:
    """Identify the memory of a tensor, which its views share, also where it has no address."""
    return int(tensor.untyped_storage()._cdata)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    **flop_registry,
}
