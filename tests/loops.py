"""Training loops of a user, wrapped; run by the processes of a pool."""

import copy
import os
import random
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from trainings import Training, loss

import real
from real.programs.rank_state import Stateful
from simdist.errors import RunError, SimdistError
from simdist.files import replacing
from simdist.plan import AllGather, Backward, Buffer, Densify, Forward, Optimize, Plan, Select
from simdist.plan.group import Group
from simdist.schedules import HierarchicalSGD, InputPath, Job, LocalSGD, Schedule, Sync
from simdist.schedules.naive_ag import NaiveAllGather
from simdist.schedules.torus import Torus

LOCAL_TO_THE_END = real.Averaging(final_average=False)
ONE = real.Launch(ranks_per_node=1)  # for scripts that torchrun has not started
TWO = real.Launch(ranks_per_node=2)


@dataclass(frozen=True)
class Loop:
    """A loop of a user.

    Args:
        schedule: The schedule to follow; or a plan or a run directory, without `n_steps`.
        training: The training.
        n_steps: In all.
        plain: Count steps without `worker.steps()`.
        stop_before: End early.
        decay: Has a learning rate scheduler.
        checkpoint: Folder.
        every: Steps.
        trace: File.
        noisy: Batches draw random numbers.
        ranks_per_node: Ranks of one machine.
        final_average: At the end of the loop.
        outer_lr: Learning rate of a plain SGD as outer optimizer, in place of the one that `wrap` would take.
        max_norm: Of gradients, which are clipped; 0 leaves them.
        slow_s: How long the first layer's gradient takes, which is the last one.
    """

    schedule: Schedule | Plan | Path
    training: Training
    n_steps: int | None
    plain: bool = False
    stop_before: int | None = None
    decay: bool = False
    checkpoint: Path | None = None
    every: int = 5
    trace: Path | None = None
    noisy: bool = True
    slow_s: float = 0.0
    ranks_per_node: int = 2
    final_average: bool = True
    outer_lr: float | None = None
    max_norm: float = 0.0


def train(loop: Loop) -> np.ndarray:
    """Train; return the parameters that this rank ends with.

    Batches are noisy by three sources of random numbers, which begin with the rank. Ranks begin with different
    parameters; those of rank 0 should count.
    """
    module, optimizer = loop.training.make()
    rank = dist.get_rank()
    scale(module, 1 + rank)
    if loop.slow_s:
        next(module.parameters()).register_hook(lambda _: time.sleep(loop.slow_s))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7, 9], gamma=0.5) if loop.decay else None
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    averaging = real.Averaging(final_average=loop.final_average)
    if loop.outer_lr is not None:
        averaging = replace(averaging, outer_optimizer=partial(torch.optim.SGD, lr=loop.outer_lr))
    with real.wrap(
        module,
        optimizer,
        loop.schedule,
        n_steps=loop.n_steps,
        averaging=averaging,
        checkpointing=checkpointing(loop.checkpoint, loop.every, {"scheduler": scheduler} if scheduler else {}),
        experiment=real.Experiment(trace=loop.trace),
        launch=real.Launch(ranks_per_node=loop.ranks_per_node),
    ) as worker:
        for step in range(worker.step, worker.n_steps) if loop.plain else worker.steps():
            if step == loop.stop_before:
                break
            inputs, targets = loop.training.batch(step, rank)
            optimizer.zero_grad()
            loss(module(inputs + noise(inputs) if loop.noisy else inputs), targets).backward()
            if loop.max_norm:
                assert worker.clip_grad_norm_(loop.max_norm) > loop.max_norm
            optimizer.step()
            if scheduler:
                scheduler.step()
    return vector(module)


def checkpointing(
    folder: Path | None, every: int, also: Mapping[str, Stateful] = MappingProxyType({})
) -> real.Checkpointing | None:
    """Return the option of `wrap`, which has none without a folder."""
    return None if folder is None else real.Checkpointing(folder, every=every, also=also)


def state_counts(schedule: Schedule) -> int:
    """Return how many elements of the optimizer's state this rank keeps, after two steps."""
    module, optimizer = Training(optimizer="adam").make()
    with real.wrap(module, optimizer, schedule, n_steps=2, launch=TWO) as worker:
        for step in worker.steps():
            one_step(module, optimizer, step)
        worker._executor.drain()
        state = worker._conclusion.resuming.state
        found = (state.updating or optimizer).state_dict()
        states = found.get("pieces", found)["state"].values()
        return sum(each.numel() for one in states for name, each in one.items() if name != "step")


def misuses_of_shared_updates() -> list[str]:
    """Return the errors of loops: one clips gradients, one saves its optimizer, one joins; Adafactor; and two types."""

    def clips() -> None:
        module, optimizer = Training().make()
        with real.wrap(module, optimizer, Sync(shared_update=True), n_steps=1, launch=TWO):
            loss(module(Training().batch(0, 0)[0]), Training().batch(0, 0)[1]).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()

    def saves() -> None:
        module, optimizer = Training().make()
        with real.wrap(module, optimizer, Sync(shared_update=True), n_steps=1, launch=TWO):
            one_step(module, optimizer)
            optimizer.state_dict()

    def joins() -> None:
        module, optimizer = Training().make()
        worker = real.wrap(module, optimizer, Sync(shared_update=True), n_steps=1, launch=TWO)
        with worker, worker.join():
            one_step(module, optimizer)

    def factors() -> None:
        module, _ = Training().make()
        optimizer = torch.optim.Adafactor(module.parameters())
        real.wrap(module, optimizer, Sync(shared_update=True), n_steps=1, launch=TWO)

    def converts() -> None:
        module, optimizer = Training().make()
        schedule = Sync(shared_update=True, param_dtype="bfloat16")
        real.wrap(module, optimizer, schedule, n_steps=1, launch=TWO)

    return [error_of(each) for each in (clips, saves, joins, factors, converts)]


def scale(module: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)


def noise(like: Tensor) -> Tensor:
    return 0.1 * torch.randn_like(like) + 0.1 * random.gauss(0, 1) + 0.1 * np.random.standard_normal()


SINGLE = torch.float32


def vector(module: nn.Module) -> np.ndarray:
    return torch.cat([each.detach().flatten() for each in module.parameters() if each.requires_grad]).numpy().copy()


def error_of(function: Callable[..., object], *args: object, **options: object) -> str:
    """Return what a function raises."""
    try:
        function(*args, **options)
    except SimdistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- loops that do it wrong, on one rank ---


def begin(
    n_steps: int = 5, schedule: Schedule | None = None, **options: object
) -> tuple[nn.Module, torch.optim.Optimizer, real.Worker]:
    module, optimizer = Training().make()
    return (
        module,
        optimizer,
        real.wrap(module, optimizer, schedule or Sync(), n_steps=n_steps, launch=ONE, **options),
    )


def lossy(module: nn.Module, step: int = 0) -> Tensor:
    inputs, targets = Training().batch(step, 0)
    return loss(module(inputs), targets)


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    optimizer.zero_grad()
    lossy(module, step).backward()
    optimizer.step()


def two_forwards() -> None:
    module, _, _ = begin()
    lossy(module)
    lossy(module)


def update_without_backward() -> None:
    module, optimizer, _ = begin()
    lossy(module)
    optimizer.step()


def update_in_eval_mode() -> None:
    module, optimizer, _ = begin()
    module.eval()
    lossy(module).backward()
    optimizer.step()


def clipped_too_early() -> None:
    begin()[2].clip_grad_norm_(1.0)


def two_updates() -> None:
    module, optimizer, _ = begin()
    one_step(module, optimizer)
    optimizer.step()


def closure_again_and_again() -> None:
    module = Training().make()[0]
    optimizer = torch.optim.LBFGS(module.parameters())
    real.wrap(module, optimizer, Sync(), n_steps=5, launch=ONE)

    def closed() -> Tensor:
        optimizer.zero_grad()
        value = lossy(module)
        value.backward()
        return value

    optimizer.step(closed)


def closure_after_a_pass() -> None:
    module, optimizer, _ = begin()
    lossy(module).backward()
    optimizer.step(lambda: lossy(module).item())


class Distant:
    """Holds an optimizer, as wrappers of other libraries do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer


def unknown_wrapper() -> None:
    module, optimizer = Training().make()
    real.wrap(module, Distant(optimizer), Sync(), launch=ONE)


def optimizer_that_shards() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns where it is loaded first

    module, _ = Training().make()
    real.wrap(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1), Sync(), launch=ONE)


def sparse_layer() -> None:
    wrapped(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.EmbeddingBag(5, 2, sparse=True))))


class Lookup(nn.Module):
    """Has sparse gradients without a layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.embedding(inputs, self.table, sparse=True)


def sparse_gradient() -> None:
    module = Lookup()
    worker = real.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), Sync(), n_steps=2, launch=ONE)
    worker(torch.ones(1, 1).long()).sum().backward()


def updated_by_another() -> None:
    """As an optimizer of two passes does that is wrapped itself, or whose first pass is not in `no_sync`."""
    module, _, _ = begin()
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    one_step(module, other)
    one_step(module, other)


def too_many_steps() -> None:
    module, optimizer, _ = begin(n_steps=2)
    for step in range(3):
        one_step(module, optimizer, step)


def no_zero_grad() -> None:
    module, optimizer, _ = begin()
    for step in range(2):
        lossy(module, step).backward()
        optimizer.step()


def never_synchronised() -> None:
    module, optimizer, worker = begin()
    with worker.no_sync():
        lossy(module).backward()
    optimizer.step()


def average_within_a_step() -> None:
    module, _, worker = begin()
    lossy(module)
    worker.average()


def trained_after_close() -> None:
    _, _, worker = begin()
    worker.close()
    lossy(worker.eval())
    lossy(worker.train())


def averaged_after_close() -> None:
    _, _, worker = begin()
    worker.close()
    worker.average()


def accumulation() -> None:
    """Under local SGD, where nothing else would tell: gradients are not exchanged."""
    module, optimizer, _ = begin(schedule=LocalSGD(period=4))
    one_step(module, optimizer)
    optimizer.zero_grad()
    for micro in range(2):
        lossy(module, micro).backward()
    optimizer.step()


def two_backwards() -> None:
    module, _, _ = begin()
    value = lossy(module)
    value.backward(retain_graph=True)
    value.backward()


def idle_loop() -> None:
    _, _, worker = begin()
    for _ in worker.steps():
        pass


def half_step() -> None:
    module, _, worker = begin()
    for step in worker.steps():
        lossy(module, step)


def moved() -> None:
    module, optimizer, _ = begin()
    module.float()
    one_step(module, optimizer)


def differentiated_twice() -> None:
    module, _, _ = begin()
    lossy(module).backward(create_graph=True)


def unfrozen() -> None:
    module, optimizer = Training("frozen").make()
    real.wrap(module, optimizer, Sync(), n_steps=2, launch=ONE)
    module.requires_grad_(True)
    one_step(module, optimizer)


def layer_replaced() -> None:
    module, optimizer, _ = begin()
    module[4] = nn.Linear(8, 3).double()
    one_step(module, optimizer)


def group_added() -> None:
    module, optimizer, _ = begin()
    for step in range(4):
        if step == 3:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        one_step(module, optimizer, step)


# --- wrapping the wrong things ---


def wrapped(
    module: nn.Module, parameters: list[nn.Parameter] | None = None, schedule: object = None, **options
) -> None:
    optimizer = torch.optim.SGD(list(module.parameters()) if parameters is None else parameters, lr=0.1)
    options = {"n_steps": 4, "launch": ONE} | options
    real.wrap(module, optimizer, Sync() if schedule is None else schedule, **options)


def strange_optimizer() -> None:
    wrapped(nn.Linear(2, 2), parameters=list(nn.Linear(2, 2).parameters()))


def two_optimizers() -> None:
    module, optimizer = Training().make()
    real.wrap(module, [optimizer], Sync())


def two_types_in_slices() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    real.plan_for(module, Torus(), 4, n_steps=2, ranks_per_node=2)


def two_types_compressed() -> None:
    wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), schedule=NaiveAllGather(density=0.5), launch=ONE)


def complex_numbers() -> None:
    wrapped(nn.Linear(2, 2, dtype=torch.complex64))


def nothing_to_train() -> None:
    wrapped(nn.Linear(2, 2).requires_grad_(False), parameters=[nn.Parameter(torch.zeros(1))])


def no_steps() -> None:
    wrapped(nn.Linear(2, 2), n_steps=0)


def begun_before_the_beginning() -> None:
    begin(first_step=-1)


def begun_after_the_end() -> None:
    begin(n_steps=2, first_step=3)


def endless_trace() -> None:
    wrapped(nn.Linear(2, 2), n_steps=None, experiment=real.Experiment(trace="trace.npz"))


def endless_delays() -> None:
    wrapped(nn.Linear(2, 2), n_steps=None, experiment=real.Experiment(delays={"host": np.zeros((1, 4, 1))}))


def ddp_inside() -> None:
    wrapped(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2))))


def distributed_tensors() -> None:
    wrapped(distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,))))


def large_nodes() -> None:
    wrapped(nn.Linear(2, 2), launch=real.Launch(ranks_per_node=3))


def schedule_for_more() -> None:
    wrapped(nn.Linear(2, 2), schedule=HierarchicalSGD(levels={2: 2, 4: 4}))


def undelayed_channel() -> None:
    wrapped(nn.Linear(2, 2), experiment=real.Experiment(delays={"io": np.zeros((1, 4, 1))}))


def short_delays() -> None:
    wrapped(nn.Linear(2, 2), experiment=real.Experiment(delays={"host": np.zeros((1, 3, 1))}))


def another_model() -> None:
    wrapped(nn.Linear(2, 2), schedule=Sync().plan(Job(1, 1, 4, tensor_counts=(5, 3))), n_steps=None)


def plan_for_more() -> None:
    wrapped(nn.Linear(2, 2), schedule=Sync().plan(Job(2, 1, 4, tensor_counts=(4, 2))), n_steps=None)


def other_n_steps() -> None:
    wrapped(nn.Linear(2, 2), schedule=Sync().plan(Job(1, 1, 9, tensor_counts=(4, 2))))


def missing_plan() -> None:
    wrapped(nn.Linear(2, 2), schedule="no/such/plan.json", n_steps=None)


def every_zero() -> None:
    wrapped(nn.Linear(2, 2), checkpointing=real.Checkpointing("saved", every=0))


def unnamed_nodes() -> None:
    wrapped(nn.Linear(2, 2), launch=real.Launch())


def half_a_step() -> None:
    wrapped(nn.Linear(2, 2), n_steps=2.5)


def class_of_schedules() -> None:
    wrapped(nn.Linear(2, 2), schedule=LocalSGD)


def epoch_beside() -> None:
    wrapped(nn.Linear(2, 2), checkpointing=real.Checkpointing("saved", also={"epoch": 3}))


def no_patience() -> None:
    wrapped(nn.Linear(2, 2), launch=real.Launch(timeout_s=0.0))


# --- what else users do ---


@dataclass(frozen=True)
class Extras:
    """Actions of a user in a loop: clipping of gradients, a gradient scaler, lower precision, evaluation."""

    clip: bool = False
    overflow: bool = False
    autocast: bool = False
    evaluate: bool = False
    keep_grads: bool = False


def with_extras(extras: Extras, by_ddp: bool) -> tuple[np.ndarray, list[float]]:
    """Train for 6 steps, wrapped or with DistributedDataParallel; return parameters and norms of gradients."""
    training = Training(dtype=torch.float32)
    module, optimizer = training.make()
    rank = dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=extras.overflow)
    model = DistributedDataParallel(module, bucket_cap_mb=2**-11) if by_ddp else module
    worker = None if by_ddp else real.wrap(module, optimizer, SMALL_BUCKETS, n_steps=6, launch=TWO)
    norms = []
    for step in range(6):
        inputs, targets = training.batch(step, rank)
        optimizer.zero_grad(set_to_none=not extras.keep_grads)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=extras.autocast):
            value = loss(model(inputs), targets)
        if extras.overflow and step == 2 and rank == 1:
            value = value * float("inf")
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        norms.append(float(torch.cat([each.grad.flatten() for each in module.parameters()]).norm()))
        if extras.clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if extras.evaluate:
            lossy_in_eval_mode(module, training)
    if worker:
        worker.close()
    return vector(module), norms


def accumulated(
    schedule: Schedule | Plan | Path,
    training: Training,
    n_steps: int,
    trace: Path | None = None,
    by_itself: bool = False,
) -> np.ndarray:
    """Train with several passes a step, all but the last without exchange, as DDP has it in two ways, or not.

    Return the parameters.
    """
    module, optimizer = training.make()
    options = {"averaging": LOCAL_TO_THE_END, "experiment": real.Experiment(trace=trace), "launch": TWO}
    with real.wrap(module, optimizer, schedule, n_steps=None, **options) as worker:
        for step, _ in zip(worker.steps(), range(n_steps), strict=False):
            optimizer.zero_grad()
            for left in reversed(range(training.micro_batches)):
                inputs, targets = training.batch((step + 1) * training.micro_batches - 1 - left, worker.rank)
                worker.require_backward_grad_sync = by_itself or not left or step % 2 == 0
                with worker.no_sync() if left and not by_itself and step % 2 == 0 else nullcontext():
                    loss(worker(inputs), targets).backward()
            optimizer.step()
    return vector(worker.module)


def passes_unlike_the_plan(n_passes: int) -> str:
    """Do so many passes in `no_sync` in the steps of a plan with three, and one; return the error."""
    plan = Sync().plan(Training(micro_batches=3).job(1, 2, ranks_per_node=1))
    return error_of(accumulated, plan, Training(micro_batches=n_passes), 2)


def uneven(by_ddp: bool, optimizer: str) -> np.ndarray:
    """Train for two epochs, of 37 to 40 batches and of none."""
    module, optimizer = Training(optimizer=optimizer).make()
    worker = None if by_ddp else real.wrap(module, optimizer, SMALL_BUCKETS, launch=TWO)
    model = DistributedDataParallel(module) if by_ddp else module
    for epoch in range(1 if by_ddp else 2):
        with model.join() if worker is None else worker.join():
            for number in range(37 + dist.get_rank() if epoch == 0 else 0):
                optimizer.zero_grad()
                loss(model(inputs_of(number)[0]), inputs_of(number)[1]).backward()
                optimizer.step()
    if worker:
        worker.close()
    return vector(module)


def uneven_and_local(by_hand: bool) -> np.ndarray:
    """Train locally on 5 to 8 batches, and in every third step average, also with ranks that are through."""
    module, optimizer = Training().make()
    n_steps, options = 5 + dist.get_rank(), {"averaging": LOCAL_TO_THE_END, "launch": TWO}
    worker = None if by_hand else real.wrap(module, optimizer, LocalSGD(period=3), **options)
    with nullcontext() if worker is None else worker.join():
        for step in range(8 if by_hand else n_steps):
            if step < n_steps:
                optimizer.zero_grad()
                loss(module(inputs_of(step)[0]), inputs_of(step)[1]).backward()
                optimizer.step()
            if by_hand and step % 3 == 2:
                for parameter in module.parameters():
                    dist.all_reduce(parameter.data.div_(4))
    if worker:
        worker.close()
    return vector(module)


def with_scalers(schedule: Schedule, fused: bool) -> tuple[list[str], float]:
    """Let the gradients of rank 1 overflow in step 1 of 4; return what is warned of, and the scale at the end."""
    module = Training(dtype=SINGLE).make()[0]
    optimizer, scaler = torch.optim.AdamW(module.parameters(), fused=fused), torch.amp.GradScaler("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with real.wrap(module, optimizer, schedule, n_steps=4, launch=TWO) as worker:
            for step in worker.steps():
                optimizer.zero_grad()
                value = loss(module(inputs_of(step)[0].float()), inputs_of(step)[1])
                scaler.scale(value * (float("inf") if (worker.rank, step) == (1, 1) else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
    return [str(each.message) for each in caught if each.category is RuntimeWarning], scaler.get_scale()


def in_two_parts(first_step: int, n_steps: int) -> np.ndarray:
    """Train by a schedule with a warm-up; wrap again before a step, as a script does that goes on by itself."""
    module, optimizer = Training(optimizer="sgd").make()
    schedule = LocalSGD(period=4, warmup_steps=6)
    for begin, end in ((0, first_step), (first_step, n_steps)):
        with real.wrap(module, optimizer, schedule, first_step=begin, launch=TWO) as worker:
            for step in range(worker.step, end):
                optimizer.zero_grad()
                loss(module(inputs_of(step)[0]), inputs_of(step)[1]).backward()
                optimizer.step()
    return vector(module)


def averaged_by_hand(period: int, n_steps: int) -> np.ndarray:
    """Train locally, and average by `worker.average()` at the end of each period."""
    module, optimizer = Training().make()
    with real.wrap(module, optimizer, LocalSGD(period=1_000), averaging=LOCAL_TO_THE_END, launch=TWO) as worker:
        for step in range(n_steps):
            optimizer.zero_grad()
            loss(module(inputs_of(step)[0]), inputs_of(step)[1]).backward()
            optimizer.step()
            if step % period == period - 1:
                worker.average()
    return vector(module)


def inputs_of(step: int) -> tuple[Tensor, Tensor]:
    return Training().batch(step, dist.get_rank())


def means_at_the_end(average: bool, buffers: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters and the running means after a loop of local steps."""
    training = Training("conv")
    module, optimizer = training.make()
    averaging = real.Averaging(final_average=average, average_buffers=buffers)
    with real.wrap(module, optimizer, LocalSGD(period=3), n_steps=4, averaging=averaging, launch=TWO) as worker:
        for step in worker.steps():
            inputs, targets = training.batch(step, worker.rank)
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()
    return vector(module), module[1].running_mean.numpy().copy()


def in_epochs(how: str, checkpoint: Path | None) -> np.ndarray:
    """Train for three epochs of four batches."""
    module, optimizer = Training().make()
    options = {"n_steps": 12, "checkpointing": checkpointing(checkpoint, 4), "launch": ONE}
    with real.wrap(module, optimizer, Sync(), **options) as worker:
        for epoch in range(3):
            batches = [Training().batch(4 * epoch + number, 0) for number in range(4)]
            match how:
                case "steps first":
                    pairs = (batch for _, batch in zip(worker.steps(), batches, strict=False))
                case "batches first":
                    pairs = (batch for batch, _ in zip(batches, worker.steps(), strict=False))
                case _:
                    pairs = iter(batches)
            for inputs, targets in pairs:
                optimizer.zero_grad()
                loss(module(inputs), targets).backward()
                optimizer.step()
    return vector(module)


def with_customs(custom: str, optimizer: str, by: str) -> tuple[np.ndarray, list[bool], list[str]]:
    """Train as users do; return parameters, which gradients were None, and the keys of the state.

    Args:
        custom: What is done; models of DDP are not compiled.
        optimizer: Its name.
        by: `wrap`, `ddp`, or `bare`, which does not train.
    """
    module, optimizer = Training(optimizer=optimizer).make()
    if custom == "compiled before" and by != "ddp":
        module = cast(torch.nn.Module, torch.compile(module, backend="aot_eager"))
    worker = real.wrap(module, optimizer, SMALL_BUCKETS, n_steps=10, launch=TWO) if by == "wrap" else None
    model = DistributedDataParallel(module, find_unused_parameters=True) if by == "ddp" else module
    if custom == "compiled" and by == "wrap":
        model = torch.compile(model, backend="aot_eager")
    mean = AveragedModel(worker or module) if custom == "averaged" else None
    for step in range(0 if by == "bare" else 10):
        if custom == "frozen" and step == 3:
            module[2].requires_grad_(False)
        inputs, targets = inputs_of(step)
        optimizer.zero_grad()
        whole = custom == "checkpoint"
        outputs = checkpoint(model, inputs.requires_grad_(), use_reentrant=False) if whole else model(inputs)
        loss(outputs, targets).backward()
        optimizer.step()
        if mean is not None:
            mean.update_parameters(worker or module)
            loss(mean(inputs), targets).backward()
    if worker:
        worker.close()
    unset = [each.grad is None for each in module.parameters()]
    return vector(copy.deepcopy(module) if mean is None else mean), unset, list(module.state_dict())


class Recomputing(nn.Module):
    """Forgets activations and computes them again, and has a layer that it does not use."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, inputs: Tensor) -> dict[str, tuple[Tensor, ...]]:
        hidden = self.layers[0](inputs)
        for layer in self.layers[1:3]:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant).tanh()
        return {"outputs": (hidden,)}


def with_passes_within_passes(how: str, wrapped: bool) -> np.ndarray:
    """Train with activation checkpoints, or a penalty on the gradient with regard to the inputs."""
    torch.manual_seed(0)
    module = Recomputing(reentrant=how == "reentrant")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    worker = real.wrap(module, optimizer, SMALL_BUCKETS, n_steps=3, launch=ONE) if wrapped else None

    def output_of(inputs: Tensor) -> Tensor:
        return module(inputs)["outputs"][0]

    for _ in range(3):
        inputs = torch.rand(2, 6, requires_grad=True)
        optimizer.zero_grad()
        output = checkpoint(output_of, inputs, use_reentrant=True) if how == "whole" else output_of(inputs)
        value = output.square().mean()
        if how == "penalty":
            (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
            value = value + slope.square().sum()
        value.backward()
        optimizer.step()
    if worker:
        worker.close()
    return vector(module)


SMALL_BUCKETS = Sync(first_bucket_nbytes=100, bucket_nbytes=300)


def lossy_in_eval_mode(module: nn.Module, training: Training) -> None:
    inputs, _ = training.batch(0, 0)
    with torch.no_grad():
        module(inputs)
    module.eval()
    module(inputs)
    module.train()


def order_of_hooks() -> list[str]:
    """Return what hooks of the user see of a step."""
    module, optimizer = Training().make()
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append("forward"))
    next(module.parameters()).register_hook(lambda _: seen.append("gradient"))
    optimizer.register_step_post_hook(lambda *_: seen.append("update"))
    with real.wrap(module, optimizer, Sync(), n_steps=1, launch=ONE):
        one_step(module, optimizer)
    return seen


def digests(n_steps: int) -> tuple[str, str]:
    """Return the digest of the plan that `wrap` performs, and of what `plan_for` returns."""
    module, optimizer = Training().make()
    planned = real.plan_for(module, SMALL_BUCKETS, dist.get_world_size(), n_steps=n_steps, ranks_per_node=2)
    with real.wrap(module, optimizer, SMALL_BUCKETS, n_steps=n_steps, launch=TWO) as worker:
        return worker.plan.digest(), planned.digest()


def cpu_s_to_start(n_steps: int | None, schedule: Schedule) -> float:
    """Return the CPU seconds until the first step is done, the least of three times."""
    took_s = []
    for _ in range(3):
        module, optimizer = Training().make()
        start_s = time.process_time()
        with real.wrap(module, optimizer, schedule, n_steps=n_steps, launch=ONE):
            one_step(module, optimizer)
            took_s.append(time.process_time() - start_s)
    return min(took_s)


def doubts(schedule: Schedule, options: dict[str, object], last_only: bool = False) -> list[str]:
    """Return what `wrap` warns of, also with an optimizer of the last layer only."""
    module, optimizer = Training().make()
    if last_only:
        optimizer = torch.optim.SGD(module[4].parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        real.wrap(module, optimizer, schedule, **({"n_steps": 8, "launch": TWO} | options)).close()
    return [str(each.message) for each in caught if each.category is UserWarning]


def brings_its_own_batches() -> list[str]:
    """Return what a loop is told that follows a plan with a batch from storage in each step."""
    training = Training()
    module, optimizer = training.make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = Sync().plan(training.job(1, 3, path=InputPath("storage")))
        with real.wrap(module, optimizer, plan) as worker:
            for step in worker.steps():
                one_step(module, optimizer, step)
    return [str(each.message) for each in caught if "batches" in str(each.message)]


def fails_on_one_rank(how: str) -> None:
    """Print how a loop ends on each rank if one of them fails in step 3; started as torchrun would."""
    training = Training()
    module, optimizer = training.make()
    try:
        with real.wrap(module, optimizer, SMALL_BUCKETS, n_steps=6, launch=real.Launch(timeout_s=30.0)) as worker:
            for step in worker.steps():
                if step == 3 and worker.rank == 1:
                    fail(how)
                if how == "skips a bad batch" and step == 3 and worker.rank == 1:
                    lossy(module)
                    with suppress(RunError):
                        one_step(module, optimizer)
                one_step(module, optimizer, step)
    except (SimdistError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("done")


def fail(how: str) -> None:
    match how:
        case "raises":
            raise ValueError("bad batch")
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)


def never_closed(fails: bool) -> None:
    """Train in a process group of the script's own, and end without a word to the worker."""
    dist.init_process_group("gloo")
    module, optimizer = Training().make()
    worker = real.wrap(module, optimizer, LocalSGD(period=4), launch=real.Launch(timeout_s=30.0))
    for step in range(6):
        if fails and (step, worker.rank) == (3, 1):
            raise ValueError("bad batch")
        one_step(module, optimizer, step)
    dist.destroy_process_group()


def wraps_another_model() -> None:
    """Print what a rank hears if rank 1 wraps something else."""
    rank = int(os.environ["RANK"])
    module = nn.Linear(2, 3 if rank == 1 else 2)
    try:
        real.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), Sync(), n_steps=1)
    except SimdistError as error:
        print(f"{type(error).__name__}: {error}")


# --- checkpoints ---


def resumed(loop: Loop) -> tuple[np.ndarray, list[str]]:
    """Train; return parameters and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        return train(loop), [str(each.message) for each in caught if each.category is RuntimeWarning]


def on_equal_batches(checkpoint: Path | None, begin: Path | None) -> np.ndarray:
    """Train until step 8 on the same batches on all ranks, from a checkpoint on or from the beginning."""
    module, optimizer = Training(optimizer="adam").make()
    first = real.load_checkpoint(begin, module, optimizer) if begin else 0
    options = {"checkpointing": checkpointing(checkpoint, 5), "launch": TWO}
    with real.wrap(module, optimizer, SMALL_BUCKETS, n_steps=8 - first, **options) as worker:
        for step in worker.steps():
            optimizer.zero_grad()
            loss(module(Training().batch(first + step, 0)[0]), Training().batch(first + step, 0)[1]).backward()
            optimizer.step()
    return vector(module)


def train_with_residual(checkpoint: Path | None, stop_before: int | None) -> np.ndarray:
    """Train by a plan of top-k compression, wrapped; return the parameters."""
    plan = top_k_plan(dist.get_world_size(), n_steps=9)
    module, optimizer = Training().make()
    with real.wrap(module, optimizer, plan, checkpointing=checkpointing(checkpoint, 3)) as worker:
        for step in worker.steps():
            if step == stop_before:
                break
            inputs, targets = Training().batch(step, worker.rank)
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()
    return vector(module)


def top_k_plan(world_size: int, n_steps: int) -> Plan:
    counts = Training().job(world_size, n_steps).tensor_counts
    n, k, world = sum(counts), 10, Group(world_size)
    buffers = [
        Buffer("param", n, "float64", tensors=(0, len(counts)), initialized=True),
        Buffer("grad", n, "float64", tensors=(0, len(counts))),
        Buffer("residual", n, "float64", tensors=(0, len(counts)), initialized=True),
        Buffer("taken", k, "float64", sparse=True),
        Buffer("gathered", k * world_size, "float64", sparse=True),
        Buffer("loss", 1),
    ]
    body = (
        Forward(("param",), ("loss",)),
        Backward(("param", "loss"), "grad"),
        Select("grad", "taken", "residual", k),
        AllGather("taken", "gathered", world),
        Densify("gathered", "grad"),
        Optimize(("param",), ("grad",)),
    )
    return Plan.from_steps("top-k", world_size=world_size, buffers=buffers, steps=[body] * n_steps)


class Coded:
    """Has a state that is no plain data."""

    def state_dict(self) -> dict[str, object]:
        return {"function": Coded}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        pass


def clips_with_lars() -> str:
    """Clip gradients whose trust ratios are known already; return the error."""
    module, optimizer = Training(optimizer="lars").make()

    def train() -> None:
        with real.wrap(module, optimizer, Sync(), n_steps=2, launch=TWO) as worker:
            lossy(module, worker.rank).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            optimizer.step()

    return error_of(train)


def lars_after_wrap() -> bool:
    """Tell whether the optimizer computes its own trust ratios when a loop is over."""
    module, optimizer = Training(optimizer="lars").make()
    with real.wrap(module, optimizer, Sync(), n_steps=1, launch=ONE):
        one_step(module, optimizer)
    twin, other = Training(optimizer="lars").make()
    twin.load_state_dict(module.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((module, optimizer), (twin, other)):
        its.zero_grad()
        lossy(each, 1).backward()
        its.step()
    return np.allclose(vector(module), vector(twin), rtol=0, atol=1e-14)


def error_of_loop(loop: Loop) -> str:
    return error_of(train, loop)


def saves_code(folder: Path) -> None:
    begin(checkpointing=real.Checkpointing(folder, also={"coded": Coded()}))


def saves_also_in_plain_loop(folder: Path) -> str:
    return error_of(train, Loop(Sync(), Training(), 6, plain=True, decay=True, checkpoint=folder, ranks_per_node=1))


def killed_while_writing(path: Path) -> None:
    with replacing(path) as part:
        part.write_bytes(b"simdist")
        os.kill(os.getpid(), signal.SIGKILL)


def killed_once(marker: Path, folder: Path) -> None:
    """Train, and be killed on rank 2 after 30 steps, unless the file is there that says that it was."""
    steps = []

    def count(*_: object) -> None:
        steps.append(1)
        if len(steps) == 30 and os.environ["RANK"] == "2" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    restarted(folder)


def restarted(folder: Path | None) -> None:
    """Train by hierarchical SGD, with random numbers and a scheduler of learning rates; rank 0 prints a loss."""
    training = Training("dropout")
    module, optimizer = training.make()
    torch.manual_seed(int(os.environ["RANK"]))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
    schedule = HierarchicalSGD(levels={2: 2, 8: "world"}, intra_node_gradients=False)
    kept = checkpointing(folder, 20, {"scheduler": scheduler})
    with real.wrap(module, optimizer, schedule, n_steps=48, checkpointing=kept) as worker:
        for step in worker.steps():
            inputs, targets = training.batch(step, worker.rank)
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
    if worker.rank == 0:
        print(f"loss {loss(module.eval()(inputs), targets).item()!r}", flush=True)


# --- the script of the documentation ---


def run_example(path: Path, schedule: Schedule | None, *arguments: object) -> None:
    """Run a script, by a schedule in the place of its own; None for one that has none, in float64 unless by `--amp`."""
    torch.set_default_dtype(torch.float32 if "--amp" in arguments else torch.float64)
    sys.argv[:] = [str(path), *map(str, arguments)]
    with mock.patch("simdist.schedules.LocalSGD", return_value=schedule):
        runpy.run_path(str(path), run_name="__main__")
