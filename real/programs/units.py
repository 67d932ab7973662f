"""The units of a sharded model in forward and backward passes.

A forward pass is one call of the model, and in a plan one `Forward` for each unit. A module that has parameters of a
unit uses it as soon as it is called. Before that, a hook continues the plan up to the `Forward` of this unit, which the
plan lets wait for the gathered parameters.

A backward pass continues the plan when the gradients of a bucket are complete. If the loss does not depend on some
unit, they never are. So before autograd uses a unit whose turn has not come, a hook completes the buckets before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from simdist.errors import RunError
from simdist.plan import ops


@dataclass(slots=True)
class _ForwardPass:
    """The last forward pass.

    Args:
        places: Buffer of a unit -> its place in the pass.
        complete: Ends the `Forward` of a unit, and begins the next one. None outside of forward passes.
        at: Place of the unit whose `Forward` has begun.
        called: Units with a module that was called.
    """

    places: Mapping[str, int]
    complete: Callable[[], object] | None
    at: int = 0
    called: set[str] = field(default_factory=set)

    def advance(self, place: int) -> None:
        """Complete the units before a place."""
        while self.at < place:
            assert self.complete is not None
            self.complete()
            self.at += 1


@final
class UnitHooks:
    """Continues a plan before the model uses the next unit.

    Args:
        module: The model.
        units: Buffer of a unit -> its parameters, in forward order.
        is_held: Tells whether a buffer has memory.
        types: Type of gathered parameters, to which floating-point inputs of their modules are converted; and that of
            the model, to which its floating-point outputs are.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Mapping[str, Sequence[nn.Parameter]],
        is_held: Callable[[str], bool],
        types: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self._module = module
        self._units = units
        self._is_held = is_held
        self._gathered, self._own = types
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._pass = _ForwardPass({}, None)
        self._reach: Callable[[str], object] | None = None  # None outside of backward passes
        self._buckets: Mapping[str, str] = {}  # buffer of a unit -> bucket of its gradients
        unit_of = {parameter: name for name, parameters in units.items() for parameter in parameters}
        self._unit_of = unit_of
        self._used_together: list[tuple[str, ...]] = []  # units of each module
        for child in module.modules():
            parameters = child.parameters(recurse=False)
            used = tuple(dict.fromkeys(unit_of[parameter] for parameter in parameters if parameter in unit_of))
            if used:
                self._used_together.append(used)
                child.register_forward_pre_hook(partial(self._is_called, used), prepend=True, with_kwargs=True)
                child.register_forward_hook(partial(self._has_outputs, used))

    def outputs(self, inputs: Tensor) -> Any:
        """Call the model."""
        outputs = self._module(inputs)
        return outputs if self._gathered == self._own else _converted(outputs, self._own)

    def used_out_of_turn(self, inputs: Tensor) -> set[str]:
        """Call the model, and return the units that it uses again after a later one, such as of tied parameters."""
        with _ParameterUses(self._unit_of) as uses:
            self.outputs(inputs)
        places = {name: place for place, name in enumerate(self._units)}
        found: set[str] = set()
        for together in self._used_together:
            found.update(sorted(together, key=places.__getitem__)[:-1])
        furthest = 0
        for name in uses.order:
            furthest = max(furthest, places[name])
            if places[name] < furthest:
                found.add(name)
        return found

    def expect(self, parts: Sequence[ops.Forward], complete: Callable[[], object]) -> None:
        """Prepare for a forward pass; see `real.programs.base.Program.forward`."""
        places = {name: place for place, part in enumerate(parts) for name in part.srcs if name in self._units}
        self._pass = _ForwardPass(places, complete)

    def finish(self, n_parts: int) -> None:
        """Complete the rest of the pass."""
        self._pass.advance(n_parts)
        self._pass.complete = None

    def expect_backward(self, buckets: Sequence[ops.Backward], reach: Callable[[str], object]) -> None:
        """Prepare for a backward pass.

        Args:
            buckets: See `real.programs.base.Program.backward`.
            reach: Completes all buckets before one.
        """
        self._buckets = {name: bucket.dst for bucket in buckets for name in bucket.srcs if name in self._units}
        self._reach = reach

    def finish_backward(self, unused: set[Tensor]) -> None:
        """End a backward pass, and check that the plan knew of all units that the model has used.

        Args:
            unused: Parameters that the loss did not depend on.

        Raises:
            RunError: A unit was used, and no module that has its parameters was called.
        """
        self._reach = None
        places = self._pass.places
        for name in places.keys() - self._pass.called if len(places) > 1 else ():
            used = [self._names[parameter] for parameter in self._units[name] if parameter not in unused]
            if used:
                raise RunError(
                    f"{used[0]} of {name} is used although no module that has parameters of this unit is called, so "
                    f"nothing tells when to gather it: call its module, or put its tensors into the unit of the module "
                    f"that uses them"
                )

    def _is_called(self, used: tuple[str, ...], _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._pass.called.update(used)
        if self._pass.complete is not None:
            self._pass.advance(max(self._pass.places[name] for name in used))
            self._check_held(used)
        self._is_reached(used)  # in a backward pass that computes a part of the forward pass again
        return None if self._gathered == self._own else _converted((args, kwargs), self._gathered)

    def _has_outputs(self, used: tuple[str, ...], _module: nn.Module, _inputs: object, outputs: object) -> None:
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._is_reached, used))

    def _is_reached(self, used: tuple[str, ...], _gradient: Tensor | None = None) -> None:
        """Let a backward pass come to the units of a module, unless they are whole."""
        for name in used if self._reach is not None else ():
            if not self._is_held(name) and name in self._buckets:
                assert self._reach is not None
                self._reach(self._buckets[name])
                self._check_held((name,))

    def _check_held(self, used: tuple[str, ...]) -> None:
        freed = next((name for name in used if not self._is_held(name)), None)
        if freed is not None:
            first = self._names[self._units[freed][0]]
            raise RunError(
                f"{freed}, the unit of {first}, is used again after its turn in the pass, and the plan has freed it: "
                f"let one unit have all layers that use it, or write reshard_after_forward: false"
            )


@final
class _ParameterUses(TorchFunctionMode):
    """Notes the units of all parameters that functions of torch take, in order."""

    def __init__(self, unit_of: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._unit_of = unit_of
        self.order: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = (each for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter))
        self.order += [self._unit_of[each] for each in taken if each in self._unit_of]
        return function(*args, **(kwargs or {}))


def _converted(values: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in nested containers."""

    def convert(value: object) -> object:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(convert, values)
