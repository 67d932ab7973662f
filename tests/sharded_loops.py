"""Loops of users whose model is under `fully_shard`, wrapped by `real.wrap`; and the same training by hand.

parameters = pool.run(train, ShardedLoop(LocalSGD(period=3), training, n_steps=10))
expected = by_hand(training, n_copies=2, ...)
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trainings import Training, loss

import real
from real.loops.shards import whole
from simdist.errors import SimdistError
from simdist.plan import Plan
from simdist.plan.delays import Delays
from simdist.schedules import Schedule

Copies = list[tuple[nn.Module, torch.optim.Optimizer]]


@dataclass(frozen=True)
class ShardedLoop:
    """A loop of a user.

    Args:
        schedule: The schedule between copies; or a plan or a run directory, without `n_steps`.
        training: The training.
        n_steps: In all.
        shard: Ranks that share a copy of the model.
        native_copies: Copies that `fully_shard` synchronises by itself, and that a plan sees as one.
        n_passes: Micro-batches of a step.
        accumulates: How micro-batches but the last add up: `no_sync` of the worker, or methods of the model that
            switch off the reductions or the all-reduces.
        max_norm: Of gradients, which are clipped; 0 leaves them.
        stop_before: End early.
        checkpoint: Folder.
        trace: File.
        delays: Injected.
        outer: Makes the outer optimizer.
        param_dtype: In which the model computes.
        ranks_per_node: Ranks of one machine.
        evaluates: Call the model in every step before, without training.
    """

    schedule: Schedule | Plan | Path
    training: Training
    n_steps: int | None
    shard: int = 2
    native_copies: int = 1
    n_passes: int = 1
    accumulates: str = "no_sync"
    max_norm: float = 0.0
    stop_before: int | None = None
    checkpoint: Path | None = None
    trace: Path | None = None
    delays: Delays | None = None
    outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    param_dtype: torch.dtype | None = None
    ranks_per_node: int = 2
    evaluates: bool = False


@functools.cache
def mesh_of(shard: int, native_copies: int = 1) -> DeviceMesh:
    """Return the mesh of this rank's copy."""
    n_outer = dist.get_world_size() // shard // native_copies
    mesh = init_device_mesh("cpu", (n_outer, native_copies, shard), mesh_dim_names=("copy", "replicate", "shard"))
    return mesh["shard"] if native_copies == 1 else mesh["replicate", "shard"]


def sharded(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """Make each child with parameters, and the model, a unit."""
    policy = policy or MixedPrecisionPolicy()
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def whole_vector(module: nn.Module) -> np.ndarray:
    """Return the whole parameters of this rank's copy."""
    return torch.cat([whole(each).detach().flatten() for each in module.parameters()]).numpy().copy()


def train(loop: ShardedLoop) -> np.ndarray:
    """Train; return the whole parameters that this rank's copy ends with.

    Copies begin with different parameters; those of the first should count.
    """
    rank = dist.get_rank()
    module, _ = loop.training.make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + rank // (loop.shard * loop.native_copies))
    policy = MixedPrecisionPolicy(param_dtype=loop.param_dtype, output_dtype=loop.training.dtype)
    sharded(module, mesh_of(loop.shard, loop.native_copies), policy)
    optimizer = loop.training.optimizer_of(module)
    averaging = real.Averaging(final_average=False)
    if loop.outer:
        averaging = real.Averaging(final_average=False, outer_optimizer=loop.outer)
    with real.wrap(
        module,
        optimizer,
        loop.schedule,
        n_steps=loop.n_steps,
        averaging=averaging,
        checkpointing=None if loop.checkpoint is None else real.Checkpointing(loop.checkpoint, every=2),
        experiment=real.Experiment(trace=loop.trace, delays=loop.delays),
        launch=real.Launch(ranks_per_node=loop.ranks_per_node, timeout_s=30.0),
    ) as worker:
        for step in worker.steps():
            if step == loop.stop_before:
                break
            if loop.evaluates:
                module.eval()
                with torch.no_grad():
                    module(loop.training.batch(step, rank)[0])
                module.train()
            optimizer.zero_grad()
            for number in range(loop.n_passes):
                inputs, targets = loop.training.batch(step * loop.n_passes + number, rank)
                one_pass(loop, module, worker, inputs, targets, is_last=number == loop.n_passes - 1)
            if loop.max_norm:
                worker.clip_grad_norm_(loop.max_norm)
            optimizer.step()
    return whole_vector(module)


def one_pass(
    loop: ShardedLoop, module: nn.Module, worker: real.Worker, inputs: Tensor, targets: Tensor, *, is_last: bool
) -> None:
    match loop.accumulates:
        case "no_sync" if not is_last:
            with worker.no_sync():
                loss(module(inputs), targets).backward()
            return
        case "whole gradients":
            module.set_requires_gradient_sync(is_last)
        case "slices":
            module.set_requires_all_reduce(is_last)
    loss(module(inputs), targets).backward()


@dataclass(frozen=True)
class ByHand:
    """How to train by hand.

    Args:
        training: The training.
        n_steps: In all.
        n_copies: Copies of the model.
        shard: Ranks that share one.
        n_passes: Micro-batches of a step.
        max_norm: Of gradients, which are clipped; 0 leaves them.
        gradients: Copies average their gradients.
        after_step: Called with the step and the copies.
    """

    training: Training
    n_steps: int
    n_copies: int = 2
    shard: int = 2
    n_passes: int = 1
    max_norm: float = 0.0
    gradients: bool = False
    after_step: Callable[[int, Copies], object] = field(default=lambda _step, _copies: None)


def by_hand(how: ByHand) -> np.ndarray:
    """Train all copies in one process; return their parameters, `[copy, n]`."""
    copies = [how.training.make() for _ in range(how.n_copies)]
    for step in range(how.n_steps):
        for number, (module, optimizer) in enumerate(copies):
            optimizer.zero_grad()
            for micro_batch in range(how.n_passes):
                for rank in range(number * how.shard, (number + 1) * how.shard):
                    inputs, targets = how.training.batch(step * how.n_passes + micro_batch, rank)
                    (loss(module(inputs), targets) / how.shard).backward()
        if how.gradients:
            average([[each.grad for each in module.parameters()] for module, _ in copies])
        for module, optimizer in copies:
            if how.max_norm:
                nn.utils.clip_grad_norm_(module.parameters(), how.max_norm)
            optimizer.step()
        how.after_step(step, copies)
    return np.stack(
        [torch.cat([each.detach().flatten() for each in module.parameters()]).numpy() for module, _ in copies]
    )


@torch.no_grad()
def average(of_copies: list[list[Tensor]]) -> None:
    """Replace tensors of copies by their means."""
    for same in zip(*of_copies, strict=True):
        mean = torch.stack(list(same)).mean(dim=0)
        for each in same:
            each.copy_(mean)


def averaging_over(sizes: Mapping[int, int]) -> Callable[[int, Copies], object]:
    """Return what averages parameters over groups of copies: period -> copies; of several, only the largest."""

    def after_step(step: int, copies: Copies) -> None:
        size = max((size for period, size in sizes.items() if step % period == period - 1), default=1)
        for first in range(0, len(copies), size):
            average([list(module.parameters()) for module, _ in copies[first : first + size]])

    return after_step


class OuterByHand:
    """DiLoCo: SGD with Nesterov momentum of the anchors.

    Args:
        training: The training.
        period: Steps.
    """

    def __init__(self, training: Training, period: int) -> None:
        self.anchors = [each.detach().clone() for each in training.make()[0].parameters()]
        self.momenta = [torch.zeros_like(each) for each in self.anchors]
        self.period = period

    @torch.no_grad()
    def __call__(self, step: int, copies: Copies) -> None:
        if step % self.period != self.period - 1:
            return
        each_parameter = zip(*(module.parameters() for module, _ in copies), strict=True)
        for anchor, momentum, same in zip(self.anchors, self.momenta, each_parameter, strict=True):
            gradient = torch.stack([anchor - each for each in same]).mean(dim=0)
            momentum.mul_(0.9).add_(gradient)
            anchor.sub_(0.7 * (gradient + 0.9 * momentum))
            for each in same:
                each.copy_(anchor)


def error_of(function: Callable[[], object]) -> str:
    """Return what a function raises, or nothing."""
    try:
        function()
    except (SimdistError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
