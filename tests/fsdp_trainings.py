"""Models trained by `fully_shard` on gloo ranks, and what each rank sent.

    parameters, transfers = pool.run(by_fully_shard, Sharded(mesh=(2, 2)), Training("odd", "adamw"), 20)[0]

On CPUs every collective blocks the host, so only values and bytes count here.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from fsdp_settings import ALL_REDUCE, GATHER, REDUCE_SCATTER, MicroBatch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, schedule
from trainings import Training, loss


@dataclass(frozen=True)
class Sharded:
    """How a model is sharded. Each of its children that has parameters is a unit.

    Attributes:
        mesh: Ranks that share a unit, or copies of these and such ranks.
        root_children: Children that are not wrapped, so that the root holds their parameters.
        reshard_after_forward: Of each call of `fully_shard`.
        micro_batches: Of a step; their losses add up.
        max_norm: `clip_grad_norm_` to it before the update.
        param_dtype: Of gathers and of computing; that of the training by default.
        reduce_dtype: Of reduce-scatters and all-reduces; that of the gradients by default.
    """

    mesh: tuple[int, ...]
    root_children: tuple[int, ...] = ()
    reshard_after_forward: bool | int | None = None
    micro_batches: tuple[MicroBatch, ...] = (MicroBatch(),)
    max_norm: float | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def shard(self) -> int:
        return self.mesh[-1]

    @property
    def replicas(self) -> int:
        return math.prod(self.mesh[:-1])


class Transfer(NamedTuple):
    """A collective that one rank took part in: `nbytes` of the gathered, or of the reduced tensor."""

    step: int
    kind: str
    nbytes: int
    n_ranks: int


def by_fully_shard(how: Sharded, training: Training, n_steps: int) -> tuple[np.ndarray, list[Transfer]]:
    """Train on this rank; return the whole parameters, and the collectives of `fully_shard`."""
    module, _ = training.make()
    transfers: list[Transfer] = []
    with _recorded(transfers) as set_step:
        for step in _steps(module, how, training, n_steps):
            set_step(step)
    return _whole_parameters(module), transfers


def profiled(how: Sharded, training: Training, n_steps: int, folder: str) -> None:
    """Train on this rank, and write the trace of PyTorch's profiler. Two steps more come before it."""
    path = Path(folder) / f"rank{dist.get_rank()}.json.gz"
    module, _ = training.make()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=n_steps),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        for step in _steps(module, how, training, n_steps + 2):
            if step:
                profiler.step()
        profiler.step()


def _steps(module: nn.Module, how: Sharded, training: Training, n_steps: int) -> Iterator[int]:
    """Train on this rank; yield the number of each step before it begins."""
    rank = dist.get_rank()
    model = _sharded(module, how, training)
    optimizer = training.optimizer_of(module)
    for step in range(n_steps):
        yield step
        for number, micro_batch in enumerate(how.micro_batches):
            prepare(model, micro_batch)
            inputs, targets = training.batch(step * len(how.micro_batches) + number, rank)
            loss(module(inputs), targets).backward()
        if how.max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), how.max_norm)
        optimizer.step()
        optimizer.zero_grad()


def by_one_process(how: Sharded, training: Training, n_steps: int) -> np.ndarray:
    """Train the same without sharding: add up the gradients of all ranks and micro-batches, divided by the ranks."""
    world_size = math.prod(how.mesh)
    module, optimizer = training.make()
    for step in range(n_steps):
        for number in range(len(how.micro_batches)):
            for rank in range(world_size):
                inputs, targets = training.batch(step * len(how.micro_batches) + number, rank)
                (loss(module(inputs), targets) / world_size).backward()
        if how.max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), how.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).numpy()


def prepare(model: FSDPModule, micro_batch: MicroBatch) -> None:
    """Set what a micro-batch says, before its forward pass."""
    model.set_requires_gradient_sync(micro_batch.reduces)
    if micro_batch.reduces:
        model.set_requires_all_reduce(micro_batch.all_reduces)
    model.set_reshard_after_backward(micro_batch.reshards)
    model.set_is_last_backward(micro_batch.is_last)


def sent_nbytes(transfers: Sequence[Transfer]) -> Fraction:
    """Return the bytes that a rank sends over rings."""
    return sum((_sent_nbytes(each) for each in transfers), Fraction(0))


def _sent_nbytes(transfer: Transfer) -> Fraction:
    once = Fraction(transfer.nbytes * (transfer.n_ranks - 1), transfer.n_ranks)
    return 2 * once if transfer.kind == ALL_REDUCE else once


def units_of(module: nn.Module, how: Sharded) -> list[list[nn.Parameter]]:
    """Return the parameters of each unit; the root, if it holds any, is the last."""
    children = list(module.children())
    units = [list(child.parameters()) for number, child in enumerate(children) if number not in how.root_children]
    of_root = [parameter for number in how.root_children for parameter in children[number].parameters()]
    return [unit for unit in (*units, of_root) if unit]


def padded_count(parameters: Sequence[nn.Parameter], shard: int) -> int:
    """Return the elements of a unit: each parameter is padded along dimension 0 to a multiple of the ranks."""
    return sum(math.ceil(each.shape[0] / shard) * shard * math.prod(each.shape[1:]) for each in parameters)


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _sharded(module: nn.Module, how: Sharded, training: Training) -> FSDPModule:
    settings: dict[str, Any] = {"mesh": _mesh(how.mesh), "reshard_after_forward": how.reshard_after_forward}
    types = {"param_dtype": how.param_dtype, "reduce_dtype": how.reduce_dtype}
    for number, child in enumerate(module.children()):
        has_parameters = any(True for _ in child.parameters())
        if has_parameters and number not in how.root_children:
            fully_shard(child, mp_policy=MixedPrecisionPolicy(**types), **settings)
    policy = MixedPrecisionPolicy(**types, output_dtype=training.dtype)
    return fully_shard(module, mp_policy=policy, **settings)


def _whole_parameters(module: nn.Module) -> np.ndarray:
    whole = []
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
        whole.append(parameter.full_tensor().detach().flatten())
    return torch.cat(whole).numpy()


@contextmanager
def _recorded(transfers: list[Transfer]) -> Iterator[Callable[[int], None]]:
    """Write down each collective that `fully_shard` calls, in the step that the caller sets."""
    step = 0
    all_gather = dist.all_gather_single
    reduce_scatter = dist.reduce_scatter_single
    all_reduce = dist.all_reduce

    def write(kind: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
        transfers.append(Transfer(step, kind, tensor.nbytes, group.size()))

    def set_step(number: int) -> None:
        nonlocal step
        step = number

    def gather(output_tensor: Tensor, input_tensor: Tensor, *, group: dist.ProcessGroup, **settings: Any) -> object:
        write(GATHER, output_tensor, group)
        return all_gather(output_tensor, input_tensor, group=group, **settings)

    def scatter(*, input: Tensor, group: dist.ProcessGroup, **settings: Any) -> object:  # noqa: A002
        write(REDUCE_SCATTER, input, group)
        return reduce_scatter(input=input, group=group, **settings)

    def reduce(tensor: Tensor, *, group: dist.ProcessGroup, **settings: Any) -> object:
        write(ALL_REDUCE, tensor, group)
        return all_reduce(tensor, group=group, **settings)

    with (
        mock.patch.object(dist, "all_gather_single", gather),
        mock.patch.object(dist, "reduce_scatter_single", scatter),
        mock.patch.object(dist, "all_reduce", reduce),
    ):
        yield set_step
