"""Loops of users whose model is under `fully_shard`, wrapped by `real.wrap`; and the same training by hand.

parameters = pool.run(train, ShardedLoop(LocalSGD(period=3), training, n_steps=10))
expected = by_hand(training, n_copies=2, ...)
"""

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainings import Training, loss

import real
from real.checkpoints import distributed
from real.checkpoints.store import DamagedError
from real.loops.shards import whole
from real.watching.lateness import Lateness, LatenessWindow
from simdist.errors import SimdistError
from simdist.plan import AllReduce, Optimize, Plan
from simdist.plan.delays import Delays
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule, Sync
from simdist.schedules.hsdp import HSDP

Copies = list[tuple[nn.Module, torch.optim.Optimizer]]
SMALL = Training("even", "sgd")
SLICES = replace(SMALL.job(4, 2), tensor_counts=(24, 4, 16, 2))  # of two ranks each
LOCAL_TO_THE_END = real.Averaging(final_average=False)
TWO = real.Launch(ranks_per_node=2, timeout_s=30.0)


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
        param_dtype: In which the model computes. Gradients are reduced in their own type.
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
    """Make each child with parameters, and the model, a unit. Only the model's output has the type of the policy."""
    policy = policy or MixedPrecisionPolicy()
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, mp_policy=replace(policy, output_dtype=None))
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


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
    dtype = loop.training.dtype
    policy = MixedPrecisionPolicy(param_dtype=loop.param_dtype, reduce_dtype=dtype, output_dtype=dtype)
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
            for number in range(loop.n_passes):
                inputs, targets = loop.training.batch(step * loop.n_passes + number, rank)
                one_pass(loop, module, worker, inputs, targets, is_last=number == loop.n_passes - 1)
            if loop.max_norm:
                worker.clip_grad_norm_(loop.max_norm)
            optimizer.step()
            optimizer.zero_grad()
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
        case "by the plan":
            pass
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
        after_backward: Called with the copies when they have their gradients.
        after_step: Called with the step and the copies.
    """

    training: Training
    n_steps: int
    n_copies: int = 2
    shard: int = 2
    n_passes: int = 1
    max_norm: float = 0.0
    after_backward: Callable[[Copies], object] = field(default=lambda _copies: None)
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
        how.after_backward(copies)
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


def averaging_gradients(copies: Copies) -> None:
    """Average the gradients of all copies."""
    average([[each.grad for each in module.parameters() if each.grad is not None] for module, _ in copies])


def averaging_over(sizes: Mapping[int, int]) -> Callable[[int, Copies], object]:
    """Return what averages parameters over groups of copies: period -> copies; of several, only the largest."""

    def after_step(step: int, copies: Copies) -> None:
        size = max((size for period, size in sizes.items() if step % period == period - 1), default=1)
        for first in range(0, len(copies), size):
            average([list(module.parameters()) for module, _ in copies[first : first + size]])

    return after_step


class LateByHand:
    """Local SGD whose averages come some steps late, to which each copy adds what it did meanwhile.

    Args:
        period: Steps.
        late_steps: How late.
    """

    def __init__(self, period: int, late_steps: int) -> None:
        self.period = period
        self.late_steps = late_steps
        self.sent: list[list[Tensor]] = []

    @torch.no_grad()
    def __call__(self, step: int, copies: Copies) -> None:
        if self.sent and (step - self.late_steps) % self.period == self.period - 1:
            means = [[each.clone() for each in sent] for sent in self.sent]
            average(means)
            for (module, _), sent, mean in zip(copies, self.sent, means, strict=True):
                for parameter, before, common in zip(module.parameters(), sent, mean, strict=True):
                    parameter.add_(common - before)
        if step % self.period == self.period - 1:
            self.sent = [[each.detach().clone() for each in module.parameters()] for module, _ in copies]


class WarmUpByHand:
    """Averages gradients in the first steps.

    Args:
        n_steps: How many.
    """

    def __init__(self, n_steps: int) -> None:
        self.n_left = n_steps

    def __call__(self, copies: Copies) -> None:
        if self.n_left > 0:
            averaging_gradients(copies)
        self.n_left -= 1


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


def model_and_optimizer(shard: int = 2, training: Training = SMALL) -> tuple[nn.Module, torch.optim.Optimizer]:
    module, _ = training.make()
    sharded(module, mesh_of(shard))
    return module, training.optimizer_of(module)


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    inputs, targets = SMALL.batch(step, dist.get_rank())
    optimizer.zero_grad()
    loss(module(inputs), targets).backward()
    optimizer.step()


def train_blocks(compiled: bool) -> np.ndarray:
    """Train a model with activation checkpoints whose blocks are units; it may be compiled."""
    training = Training("checkpointed", "adamw")
    module, _ = training.make()
    for block in module.blocks:
        fully_shard(block, mesh=mesh_of(2))
    fully_shard(module, mesh=mesh_of(2))
    optimizer = training.optimizer_of(module)
    model = torch.compile(module, backend="eager") if compiled else module
    with real.wrap(model, optimizer, Sync(), n_steps=4, launch=TWO) as worker:
        for step in worker.steps():
            inputs, targets = training.batch(step, worker.rank)
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
    return whole_vector(module)


def penalized() -> str:
    """Differentiate the loss before the backward pass, as for a penalty; return the error if a step then lacks one."""
    module, optimizer = model_and_optimizer()
    with real.wrap(module, optimizer, Sync(), n_steps=2, launch=TWO) as worker:
        inputs, targets = SMALL.batch(0, worker.rank)
        value = loss(module(inputs.requires_grad_()), targets)
        torch.autograd.grad(value, inputs, retain_graph=True)
        value.backward()
        optimizer.step()
        return str(worker.step)


def exchanges_between_copies(n_passes: int) -> int:
    """Return how often this rank's worker averages a bucket in one step of several micro-batches."""
    module, optimizer = model_and_optimizer()
    n_calls = 0
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, **options: object) -> object:
        nonlocal n_calls
        n_calls += tensor.numel() > 1
        return all_reduce(tensor, **options)

    with (
        real.wrap(module, optimizer, Sync(), n_steps=1, averaging=LOCAL_TO_THE_END, launch=TWO) as worker,
        mock.patch.object(dist, "all_reduce", counted),
    ):
        for number in range(n_passes):
            inputs, targets = SMALL.batch(number, worker.rank)
            with worker.no_sync() if number < n_passes - 1 else nullcontext():
                loss(module(inputs), targets).backward()
        optimizer.step()
    return n_calls


def distance_of_copies(module: nn.Module) -> float:
    """Return the largest difference between the parameters of copies."""
    mine = torch.from_numpy(whole_vector(module))
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return float((torch.stack(found) - mine).abs().max())


def average_on_demand() -> tuple[float, float, float]:
    """Return how far copies are apart before an average, after it, and at the end of the loop."""
    module, optimizer = model_and_optimizer()
    with real.wrap(module, optimizer, LocalSGD(period=100), n_steps=4, launch=TWO) as worker:
        for step in worker.steps():
            one_step(module, optimizer, step)
            if step == 1:
                before = distance_of_copies(module)
                worker.average()
                after = distance_of_copies(module)
    return before, after, distance_of_copies(module)


def go_on(folder: Path, training: Training, n_steps: int, shard: int) -> np.ndarray:
    """Load a checkpoint into a model that is sharded in another way, and train it further."""
    module, optimizer = model_and_optimizer(shard, training)
    first = real.load_checkpoint(folder, module, optimizer)
    with real.wrap(module, optimizer, Sync(), n_steps=n_steps, first_step=first, launch=TWO) as worker:
        for step in worker.steps():
            inputs, targets = training.batch(step, worker.rank)
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()
    return whole_vector(module)


def watched(schedule: Schedule, shard: int, late_rank: int) -> Sequence[Lateness]:
    """Return what the watch says of all ranks in the last window, if one of them is late in every step."""
    module, optimizer = model_and_optimizer(shard)
    windows: list[LatenessWindow] = []
    experiment = real.Experiment(watching=real.Watching(every=10, report=windows.append))
    with real.wrap(module, optimizer, schedule, n_steps=20, experiment=experiment, launch=TWO) as worker:
        for step in worker.steps():
            if worker.rank == late_rank:
                time.sleep(0.15)
            one_step(module, optimizer, step)
    return windows[-1].ranks if windows else ()


def train_by_own_plan(schedule: Schedule, training: Training, n_steps: int) -> np.ndarray:
    """Train by the plan that `plan_for` writes."""
    module, _ = model_and_optimizer(2, training)
    plan = real.plan_for(module, schedule, dist.get_world_size(), n_steps=n_steps, ranks_per_node=2)
    return train(ShardedLoop(plan, training, None))


def train_by_plan_that_averages_in_place(training: Training, n_steps: int) -> np.ndarray:
    """Train by a plan whose steps end with an all-reduce of the parameters themselves."""
    module, _ = model_and_optimizer(2, training)
    plan = real.plan_for(module, LocalSGD(period=1), dist.get_world_size(), n_steps=n_steps, ranks_per_node=2)
    (body,) = plan.bodies
    (average,) = (op for op in body if isinstance(op, AllReduce))
    update = next(place for place, op in enumerate(body) if isinstance(op, Optimize))
    in_place = (*body[: update + 1], replace(average, buffer="param"))
    return train(ShardedLoop(replace(plan, bodies=(in_place,)), training, None))


def fails_within_a_copy(how: str, timeout_s: float) -> None:
    """Let rank 3 go wrong while rank 2, which shares its copy, gathers; the script has made the process group."""
    dist.init_process_group("gloo")
    module, optimizer = model_and_optimizer()
    launch = real.Launch(ranks_per_node=2, timeout_s=timeout_s)
    with real.wrap(module, optimizer, LocalSGD(period=2), n_steps=6, launch=launch) as worker:
        for step in worker.steps():
            if step == 3 and worker.rank == 3:
                if how == "leaves":
                    break
                raise ValueError("bad batch")
            one_step(module, optimizer, step)


def error_of(function: Callable[[], object]) -> str:
    """Return what a function raises, or nothing."""
    try:
        function()
    except SimdistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def error_of_train(loop: ShardedLoop) -> str:
    return error_of(lambda: train(loop))


def train_warned(loop: ShardedLoop, blind_rank: int | None) -> tuple[np.ndarray, list[str]]:
    """Train, and return the warnings, too. One rank may find all metadata of 8 steps cut off."""
    read = distributed._metadata_of

    def blind(path: Path) -> distributed._Metadata:
        if dist.get_rank() == blind_rank and path.name.endswith("8"):
            raise DamagedError("damaged: .metadata is cut off")
        return read(path)

    with mock.patch.object(distributed, "_metadata_of", blind), warnings.catch_warnings(record=True) as caught:
        return train(loop), [str(each.message) for each in caught]


def error_without_shards(folder: Path) -> str:
    """Return the error of a loop whose model is not sharded."""
    module, optimizer = SMALL.make()
    options = {"n_steps": 2, "checkpointing": real.Checkpointing(folder), "launch": TWO}
    return error_of(lambda: real.wrap(module, optimizer, Sync(), **options).close())


# --- refused ---


def refusals() -> dict[str, str]:
    """Return the error of each misuse."""
    return {
        "another degree": error_of(lambda: wrapped(HSDP(shard=4))),
        "FSDP1": error_of(fsdp1),
        "tensor parallel": error_of(tensor_parallel),
        "distributed by hand": error_of(distributed_by_hand),
        "ranks apart": error_of(ranks_apart),
        "two meshes": error_of(two_meshes),
        "a part only": error_of(a_part_only),
        "shared update": error_of(lambda: wrapped(Sync(shared_update=True))),
        "LARS": error_of(lambda: wrapped(Sync(), "lars")),
        "levels of ranks": error_of(lambda: wrapped(HierarchicalSGD(levels={2: 4}))),
        "plan of ranks": error_of(lambda: wrapped(Sync().plan(SLICES))),
        "plan of hsdp": error_of(lambda: wrapped(HSDP(shard=2).plan(SMALL.job(4, 2)))),
        "not sharded": error_of(not_sharded),
        "feed": error_of(feeds),
        "skip": error_of(skips),
        "join": error_of(joins),
        "no zero_grad": error_of(no_zero_grad),
        "two forward passes": error_of(two_passes),
        "some units do not reduce": error_of(some_units_reduce),
    }


def wrapped(schedule: Schedule | Plan, optimizer: str = "sgd") -> None:
    module, updates = model_and_optimizer(2, replace(SMALL, optimizer=optimizer))
    n_steps = 2 if isinstance(schedule, Schedule) else None
    real.wrap(module, updates, schedule, n_steps=n_steps, launch=TWO).close()


def refused(module: nn.Module) -> None:
    real.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), Sync(), n_steps=2, launch=TWO).close()


def fsdp1() -> None:
    refused(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(module, mesh["tensor"], {"0": RowwiseParallel(), "1": ColwiseParallel()})
    refused(fully_shard(module, mesh=mesh["shard"]))


def distributed_by_hand() -> None:
    refused(distribute_module(nn.Linear(4, 4), init_device_mesh("cpu", (4,))))


def ranks_apart() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))["shard"]
    refused(fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh))


def two_meshes() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module[0], mesh=mesh_of(2))
    refused(fully_shard(module, mesh=mesh_of(4)))


def a_part_only() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module[0], mesh=mesh_of(2))
    refused(module)


def not_sharded() -> None:
    module, optimizer = SMALL.make()
    real.wrap(module, optimizer, HSDP(shard=2), n_steps=2, launch=TWO)


def feeds() -> None:
    module, optimizer = model_and_optimizer()
    with real.wrap(module, optimizer, Sync(), n_steps=2, launch=TWO) as worker:
        worker.feed("folder")


def skips() -> None:
    module, optimizer = model_and_optimizer()
    with real.wrap(module, optimizer, Sync(), n_steps=2, launch=TWO) as worker:
        worker.skip()


def joins() -> None:
    module, optimizer = model_and_optimizer()
    with real.wrap(module, optimizer, Sync(), n_steps=2, launch=TWO) as worker, worker.join():
        pass


def no_zero_grad() -> None:
    module, optimizer = model_and_optimizer()
    with real.wrap(module, optimizer, Sync(), n_steps=2, launch=TWO) as worker:
        for step in worker.steps():
            inputs, targets = SMALL.batch(step, worker.rank)
            loss(module(inputs), targets).backward()
            optimizer.step()


def two_passes() -> None:
    module, optimizer = model_and_optimizer()
    with real.wrap(module, optimizer, Sync(), n_steps=2, launch=TWO) as worker:
        module(SMALL.batch(0, worker.rank)[0])
        module(SMALL.batch(1, worker.rank)[0])


def some_units_reduce() -> None:
    module, optimizer = model_and_optimizer()
    with real.wrap(module, optimizer, Sync(), n_steps=2, launch=TWO):
        module[0].set_requires_gradient_sync(False)
        one_step(module, optimizer)
