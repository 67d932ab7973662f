"""Models under `fully_shard` (FSDP2): the slices that a rank holds, as the tensors of a plan between copies.

`fully_shard` shards a model over the ranks of a mesh, which share a *copy* of the model. It performs all exchanges
within a copy. A plan performs those between copies, which see a copy as one rank:

    ranks          0 1    2 3    4 5    6 7        mesh of 2 ranks: 4 copies
    copy            0      1      2      3         HierarchicalSGD(levels={2: 2, 4: 4}) counts copies
    exchange       0-2, 1-3, ...                   ranks with the same slice of different copies

The plan's world has all ranks, so delays, traces and the watch are those of ranks. Its tensors are *stand-ins* of the
slices: plain tensors, padded along the sharded dimension, so that all ranks have equal sizes, also a rank with an empty
slice. This is the padding of `fully_shard` itself. Slices stay where `fully_shard` put them. Only a step that exchanges
parameters copies them into the stand-ins and back, and stand-ins have memory only meanwhile.

Gradients are complete when `fully_shard` has reduced them, at the end of the backward pass. So the exchange between
copies begins then, once a step, and does not overlap with the backward pass.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # its place before torch 2.5
    from torch.distributed._tensor import DTensor, Replicate, Shard  # type: ignore[attr-defined]

from simdist.errors import RunError, UnsupportedError
from simdist.plan import Body, Plan, op_text, ops
from simdist.plan.plan import StepIndex

_MESH = (
    'init_device_mesh(DEVICE, (COPIES, RANKS), mesh_dim_names=("replicate", "shard"))["shard"], for RANKS consecutive '
    "ranks that share a copy"
)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: all of it, unless the tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
        return part


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor, also if it is sharded or partial. Then all ranks of its mesh take part."""
    if not isinstance(tensor, DTensor):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


@dataclass(frozen=True, slots=True)
class _Slice:
    """A trained parameter of a sharded model.

    Args:
        parameter: The slice of this rank, as `fully_shard` keeps it.
        stand_in: The same as a plain tensor, padded.
        dim: The sharded dimension.
    """

    parameter: nn.Parameter
    stand_in: nn.Parameter
    dim: int

    @property
    def local(self) -> Tensor:
        """The slice, which may be empty."""
        return local_part(self.parameter)

    def unpadded(self, padded: Tensor) -> Tensor:
        """Return the part of a tensor like the stand-in that belongs to the slice."""
        return padded.narrow(self.dim, 0, self.local.shape[self.dim])

    def padded(self, part: Tensor) -> Tensor:
        """Return a tensor like the slice with the padding of the stand-in. Without padding it is the tensor itself."""
        if part.shape == self.stand_in.shape:
            return part
        result = part.new_zeros(self.stand_in.shape)
        self.unpadded(result).copy_(part)
        return result

    def distributed(self, part: Tensor) -> Tensor:
        """Return a tensor like the slice as a part of a sharded tensor, such as a gradient."""
        parameter = self.parameter
        assert isinstance(parameter, DTensor)
        made: Tensor = DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return made


@final
class Shards:
    """The slices of a model under `fully_shard` on this rank. `shards_of` makes it.

    Args:
        units: The modules to which `fully_shard` was applied.
        slices: The trained parameters, by name.
        ranks_per_copy: Ranks that share a copy of the model.
        world_size: Number of ranks.

    Attributes:
        ranks_per_copy: The same.
        n_copies: Number of copies of the model.
        model: A module whose parameters are the stand-ins, with the names of the parameters.
    """

    def __init__(
        self, units: Sequence[nn.Module], slices: Mapping[str, _Slice], ranks_per_copy: int, world_size: int
    ) -> None:
        self.ranks_per_copy = ranks_per_copy
        self.n_copies = world_size // ranks_per_copy
        self.model = _module_of({name: each.stand_in for name, each in slices.items()})
        self._units = units
        self._slices = list(slices.values())
        self._given: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # parameter -> place of its gradient, and gradient

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, as `fully_shard` keeps them."""
        return [each.parameter for each in self._slices]

    @property
    def whole_counts(self) -> tuple[int, ...]:
        """Elements of the whole tensors."""
        return tuple(each.parameter.numel() for each in self._slices)

    def copy_of(self, rank: int) -> int:
        """Return the copy of the model that a rank belongs to."""
        return rank // self.ranks_per_copy

    def groups(self) -> list[tuple[int, ...]]:
        """Return the ranks with the same slice of all copies, for each slice."""
        world_size = self.n_copies * self.ranks_per_copy
        return [tuple(range(member, world_size, self.ranks_per_copy)) for member in range(self.ranks_per_copy)]

    def reshard(self) -> None:
        """Free gathered parameters, such as those that an evaluation has left. Modules then have their slices."""
        for unit in self._units:
            unit.reshard()  # type: ignore[operator]

    def reduces_gradients(self) -> bool:
        """Tell whether the next backward pass reduces gradients, by `set_requires_gradient_sync` and its like.

        Raises:
            RunError: Some units do, others do not.
        """
        found = {_reduces(group) for unit in self._units for group in _groups_of(unit)}
        if len(found) > 1:
            raise RunError(
                "some units of the model reduce gradients in this pass and others do not: call "
                "set_requires_gradient_sync and set_requires_all_reduce of the outermost module, without recurse=False"
            )
        return False not in found

    def n_in_memory_of(self, gradient: Tensor) -> int:
        """Return how many gradients share the memory of one, and so its version."""
        storage = local_part(gradient).untyped_storage().data_ptr()
        gradients = (each.grad for each in self.parameters)
        return sum(each is not None and local_part(each).untyped_storage().data_ptr() == storage for each in gradients)

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Copy slices into the stand-ins.

        Raises:
            RunError: The model was moved or converted.
        """
        for each in self._slices:
            local = each.local
            part = each.unpadded(each.stand_in)
            if (local.shape, local.dtype, local.device) != (part.shape, part.dtype, part.device):
                raise RunError("the model was moved or converted after real.wrap; do that before")
            if part.shape != each.stand_in.shape:
                each.stand_in.zero_()
            part.copy_(local)

    @torch.no_grad()
    def put_parameters(self) -> None:
        """Copy the stand-ins into slices."""
        for each in self._slices:
            each.local.copy_(each.unpadded(each.stand_in))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the stand-ins the gradients of slices."""
        for each in self._slices:
            gradient = each.parameter.grad
            place, given = self._given.get(each.parameter, (None, None))
            if gradient is None:
                each.stand_in.grad = None
            elif gradient is given:
                each.stand_in.grad = place
            else:
                each.stand_in.grad = each.padded(local_part(gradient))

    def put_gradients(self) -> None:
        """Give slices the gradients of the stand-ins, in the memory where the plan has averaged them."""
        for each in self._slices:
            place = each.stand_in.grad
            if place is None:
                each.parameter.grad = None
                continue
            known, gradient = self._given.get(each.parameter, (None, None))
            if gradient is None or known is not place:
                gradient = each.distributed(each.unpadded(place))
                self._given[each.parameter] = place, gradient
            each.parameter.grad = gradient


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """What a step does with buffers of parameters, besides training with them.

    Args:
        is_any: It does something.
        ends_elsewhere: The last operation on one of them is not computation, so it may go on after the step.
    """

    is_any: bool
    ends_elsewhere: bool


def uses_of_parameters(plan: Plan, names: Collection[str]) -> Callable[[int], ParameterUse]:
    """Return the function that tells what a step does with buffers of parameters.

    Raises:
        UnsupportedError: A step uses them before its update, when a sharded model does not lend its parameters.
    """
    steps = StepIndex(plan, [len(body) for body in plan.bodies])
    uses = [_use_of(plan, body, frozenset(names)) for body in plan.bodies]
    return lambda step: uses[steps.body(step)]


def _use_of(plan: Plan, body: Body, names: frozenset[str]) -> ParameterUse:
    last: dict[str, ops.Op] = {}
    is_updated = False
    for op in body:
        if isinstance(op, ops.Optimize) and op.optimizer == "inner":
            is_updated = True
        elif not isinstance(op, ops.Forward | ops.Backward | ops.Wait):
            used = names.intersection((*ops.reads(op), *ops.writes(op)))
            if used and not is_updated:
                raise UnsupportedError(
                    f"plan {plan.name}: {op_text(op)} uses parameters before the update of its step, and fully_shard "
                    f"has them until then: write it after the update"
                )
            last.update(dict.fromkeys(used, op))
    return ParameterUse(bool(last), any(ops.lane_of(op).kind != "compute" for op in last.values()))


def is_fully_sharded(module: nn.Module) -> bool:
    """Tell whether `fully_shard` was applied to a module itself."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)  # its import takes a while


def shards_of(module: nn.Module) -> Shards | None:
    """Return the slices of a model under `fully_shard`; None for another model.

    Raises:
        UnsupportedError: It is sharded in another way than a plan between copies needs. The error says how to shard it.
    """
    units = [each for each in module.modules() if is_fully_sharded(each)]
    if not units:
        return None
    for unit in units:
        unit.reshard()  # type: ignore[operator]
    kind = type(module).__name__
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if left := [name for name, each in trained.items() if not isinstance(each, DTensor)]:
        raise UnsupportedError(
            f"{kind}: fully_shard has left out {', '.join(left[:4])}{' and others' if len(left) > 4 else ''}: apply it "
            f"to the outermost module, too, without ignored_params"
        )
    if not trained:
        return None  # the caller refuses it
    world_size = dist.get_world_size()
    ranks_per_copy = _ranks_per_copy(kind, trained)
    return Shards(units, {name: _slice_of(each) for name, each in trained.items()}, ranks_per_copy, world_size)


def _ranks_per_copy(kind: str, trained: Mapping[str, nn.Parameter]) -> int:
    """Return how many ranks share a copy, once it is known that the mesh fits."""
    sizes = set()
    for name, parameter in trained.items():
        assert isinstance(parameter, DTensor)
        placements = parameter.placements
        mesh = parameter.device_mesh
        is_data_parallel = all(isinstance(each, Replicate) for each in placements[:-1])
        if not is_data_parallel or type(placements[-1]) is not Shard:
            found = ", ".join(map(str, placements))
            raise UnsupportedError(
                f"{kind}: {name} is distributed by ({found}) on a mesh of {tuple(mesh.mesh.shape)}, as in tensor "
                f"parallelism; copies that a plan synchronises are sharded by fully_shard alone, along the last "
                f"dimension of its mesh: mesh={_MESH}"
            )
        if parameter.to_local().device.type != mesh.device_type:
            raise UnsupportedError(
                f"{kind}: {name} is on {parameter.to_local().device.type} and computes on {mesh.device_type}: leave "
                f"CPUOffloadPolicy out"
            )
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] % len(ranks):
            raise UnsupportedError(
                f"{kind}: {name} is sharded over ranks {', '.join(map(str, ranks))}; a copy is shared by consecutive "
                f"ranks: mesh={_MESH}"
            )
        sizes.add(len(ranks))
    if len(sizes) > 1:
        raise UnsupportedError(
            f"{kind}: its parameters are sharded over {' and '.join(map(str, sorted(sizes)))} ranks: apply fully_shard "
            f"with one mesh to all modules"
        )
    (size,) = sizes
    if dist.get_world_size() % size:
        raise UnsupportedError(
            f"{kind}: {size} ranks share a copy, which does not divide the {dist.get_world_size()} ranks: mesh={_MESH}"
        )
    return size


def _slice_of(parameter: nn.Parameter) -> _Slice:
    assert isinstance(parameter, DTensor)
    placement = parameter.placements[-1]
    assert isinstance(placement, Shard)
    dim = placement.dim
    n_sharers = parameter.device_mesh.mesh.shape[-1]
    shape = list(parameter.shape)
    shape[dim] = -(-shape[dim] // n_sharers)
    local = local_part(parameter)
    stand_in = local.new_zeros(shape)
    stand_in.narrow(dim, 0, local.shape[dim]).copy_(local)
    return _Slice(parameter, nn.Parameter(stand_in), dim)


def _module_of(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a module with parameters of these names."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        owner = root
        for each in path:
            if each not in dict(owner.named_children()):
                owner.add_module(each, nn.Module())
            owner = owner.get_submodule(each)
        owner.register_parameter(last, parameter)
    return root


def _groups_of(unit: nn.Module) -> Iterator[Any]:
    """Yield what `fully_shard` knows of the parameters of a unit. It has no public way to ask whether it reduces."""
    state = vars(unit._get_fsdp_state())  # type: ignore[operator]
    yield from state.get("_fsdp_param_groups", ())
    if state.get("_fsdp_param_group") is not None:  # before torch 2.11
        yield state["_fsdp_param_group"]


def _reduces(group: Any) -> bool:
    return bool(group.reduce_grads and group.all_reduce_grads)
