"""Training loops that are watched for late ranks; run by processes that `processes.start` starts."""

import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from processes import leave_group
from torch import nn
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import real
from real.watching.lateness import LatenessWindow
from real.watching.work import StepClock
from simdist.schedules import LocalSGD, Sync

N_INPUTS = 16


@dataclass(frozen=True)
class Sleeps:
    """When ranks sleep.

    Args:
        always_s: In every step, by rank.
        once_s: By rank and step.
        at: Where in the step: before the forward pass, in it, between loss and backward pass, or after the update.
    """

    always_s: Mapping[int, float] = field(default_factory=dict)
    once_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    at: str = "begin"

    def __call__(self, at: str, rank: int, step: int) -> None:
        if at == self.at:
            time.sleep(self.always_s.get(rank, 0.0) + self.once_s.get((rank, step), 0.0))


@dataclass
class Seen:
    """The windows that were reported on this rank."""

    windows: list[LatenessWindow] = field(default_factory=list)

    def __call__(self, window: LatenessWindow) -> None:
        self.windows.append(window)


class PlannedClock(StepClock[float]):
    """Tells the moments of a job that works as planned: all ranks leave each exchange together.

    Args:
        work_s: `[n_steps, n_ranks]`.
        rank: Of this clock.
    """

    def __init__(self, work_s: NDArray[np.float64], rank: int) -> None:
        self.n_taken = 0
        leaves_s = np.cumsum(work_s.max(axis=1))
        arrivals_s = np.concatenate([[0.0], leaves_s[:-1]]) + work_s[:, rank]
        self._moments_s = np.stack([arrivals_s, leaves_s], axis=1).ravel().tolist()

    def take(self) -> float:
        self.n_taken += 1
        return self._moments_s[self.n_taken - 1]

    def has_passed(self, moment: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


@contextmanager
def connected() -> Iterator[int]:
    """Make a process group and give the rank. A rank that fails does not wait for others."""
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()
    leave_group()


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(N_INPUTS)] if kind == "buffers" else []
    module = nn.Sequential(nn.Linear(N_INPUTS, N_INPUTS), *norm, nn.ReLU(), nn.Linear(N_INPUTS, 4))
    match kind:
        case "by hand" | "wrapped" | "wrapped local":
            return module
        case "fsdp":
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"))
        case "fully_shard":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(module[0], mesh=mesh)
            fully_shard(module, mesh=mesh)
            return module
        case _:
            return DistributedDataParallel(module)


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, sleeps: Sleeps) -> None:
    sleeps("begin", rank, step)
    optimizer.zero_grad()
    with pausing(module, sleeps, step, rank):
        loss = module(torch.ones(4, N_INPUTS)).sum()
    sleeps("loss", rank, step)
    loss.backward()
    optimizer.step()
    sleeps("end", rank, step)


@contextmanager
def pausing(module: nn.Module, sleeps: Sleeps, step: int, rank: int) -> Iterator[None]:
    """Sleep within the forward pass, behind the first layer."""
    layer = next(each for each in module.modules() if isinstance(each, nn.ReLU))
    handle = layer.register_forward_hook(lambda *_: sleeps("forward", rank, step))
    yield
    handle.remove()


def train(kind: str, n_steps: int, every: int, sleeps: Sleeps) -> list[LatenessWindow]:
    """Train with the process group that is there; return the windows that this rank has seen."""
    seen = Seen()
    rank = dist.get_rank()
    module = model_of(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if kind.startswith("wrapped"):
        schedule = LocalSGD(period=2) if kind == "wrapped local" else Sync()
        watching = real.Watching(every=every, report=seen)
        experiment = real.Experiment(watching=watching)
        options = {"n_steps": n_steps, "experiment": experiment, "launch": real.Launch(ranks_per_node=1)}
        with real.wrap(module, optimizer, schedule, **options) as worker:
            for step in worker.steps():
                one_step(module, optimizer, step, rank, sleeps)
        return seen.windows
    with real.watch(None if kind == "by hand" else module, every=every, report=seen) as watch:
        for step in range(n_steps):
            if kind == "accumulated":
                with module.no_sync():
                    module(torch.ones(4, N_INPUTS)).sum().backward()
            if kind == "by hand":
                sleeps("begin", rank, step)
                module(torch.ones(4, N_INPUTS)).sum().backward()
                with watch.waiting():
                    for parameter in module.parameters():
                        dist.all_reduce(parameter.grad)
                optimizer.step()
            else:
                one_step(module, optimizer, step, rank, sleeps)
            watch.step()
    return seen.windows


def train_as_planned(
    work_s: NDArray[np.float64], every: int, csv: Path | None = None, first_step: int = 0
) -> tuple[list[LatenessWindow], object, int]:
    """Train with DDP on a clock that tells planned times; return windows, the mark, and the moments that were taken."""
    seen = Seen()
    rank = dist.get_rank()
    module = model_of("ddp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    clock = PlannedClock(work_s, rank)
    with (
        mock.patch("real.watching.watch._clock", return_value=clock),
        real.watch(module, every=every, report=seen, csv=csv, first_step=first_step) as watch,
    ):
        for step in range(len(work_s)):
            one_step(module, optimizer, step, rank, Sleeps())
            watch.step()
            if (step + 1) % every == 0:
                dist.barrier()
                time.sleep(0.2)  # real steps take longer than the exchange
    return seen.windows, watch.trace_mark, clock.n_taken


def uneven(n_steps: list[int], every: int) -> tuple[list[tuple[int, int, list[int]]], list[str]]:
    """Do different numbers of steps; return first step, last step and ranks of each window, and the warnings."""
    seen = Seen()
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with real.watch(every=every, report=seen) as watch:
            for _ in range(n_steps[rank]):
                with watch.waiting():
                    time.sleep(0.002)
                watch.step()
        dist.barrier()
    found = [(each.first_step, each.last_step, [rank.rank for rank in each.ranks]) for each in seen.windows]
    return found, [str(each.message) for each in told]


def one_does_not_step(silent: int, timeout_s: float) -> tuple[list[str], int]:
    """Watch, though one rank never calls `step`; return the warnings and the steps that were done."""
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch = real.watch(every=10, timeout_s=timeout_s)
        for _ in range(30):
            dist.barrier()
            with watch.waiting():
                time.sleep(0.1)
            if rank != silent:
                watch.step()
        dist.barrier()
        watch.close()
    return [str(each.message) for each in told], watch.current_step


class CountingStore:
    """A store that counts its operations."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, prefix: str, store: object) -> None:
        self._store = PrefixStore(prefix, store)

    def __getattr__(self, name: str) -> Callable[..., object]:
        def counted(*args: object) -> object:
            self.counts[name] += 1
            return getattr(self._store, name)(*args)

        return counted


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "gather", "new_group", "send")


def operations(kind: str, every: int) -> tuple[dict[str, int], dict[str, int], int, list[str]]:
    """Return what the store is asked for before a window ends and by then, moments of a step, and other operations."""
    others: list[str] = []
    module = model_of(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    rank = dist.get_rank()
    CountingStore.counts = Counter()
    forbidden = [
        mock.patch.object(dist, name, side_effect=lambda *_, n=name, **__: others.append(n)) for name in COLLECTIVES
    ]
    forbidden.append(mock.patch.object(torch.cuda, "synchronize", side_effect=lambda *_: others.append("synchronize")))
    with mock.patch("real.watching.exchange.PrefixStore", CountingStore):
        watch = real.watch(module, every=every)
        take = watch._recorder.clock.take
        taken: list[float] = []
        watch._recorder.clock.take = lambda: taken.append(take()) or taken[-1]
        for each in forbidden:
            each.start()
        for step in range(every - 1):
            one_step(module, optimizer, step, rank, Sleeps())
            watch.step()
        before = dict(CountingStore.counts)
        one_step(module, optimizer, every - 1, rank, Sleeps())
        watch.step()
        for each in forbidden:
            each.stop()
        dist.barrier()
        time.sleep(1.0)
        after = dict(CountingStore.counts)
        watch.close()
    return before, after, len(taken) // every, others


def killed(csv: Path, n_steps: int) -> None:
    """Train until rank 2 is killed; the others end by the error of their next exchange."""
    with connected() as rank:
        module = model_of("ddp")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        begin_s = 0.0
        try:
            with real.watch(module, every=10, csv=csv) as watch:
                for step in range(n_steps):
                    if step == 25:
                        print("has done 25 steps", flush=True)
                        time.sleep(0.5)
                        if rank == 2:
                            os.kill(os.getpid(), signal.SIGKILL)
                    begin_s = time.monotonic()
                    one_step(module, optimizer, step, rank, Sleeps())
                    watch.step()
        except RuntimeError:
            print(f"ended after {time.monotonic() - begin_s:.1f} s", flush=True)
            os._exit(3)


def never_closed(csv: str) -> None:
    """Leave a watch open at the end of a script."""
    with connected() as rank:
        module = model_of("ddp")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        watch = real.watch(module, every=10, csv=csv)
        for step in range(15):
            one_step(module, optimizer, step, rank, Sleeps())
            watch.step()
    print("is over", flush=True)


def wraps_and_watches() -> str:
    """Watch a model that `real.wrap` made; return the error."""
    module = model_of("wrapped")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with real.wrap(module, optimizer, Sync(), n_steps=1, launch=real.Launch(ranks_per_node=1)) as worker:
        try:
            real.watch(worker)
        except NotImplementedError as error:
            one_step(module, optimizer, 0, 0, Sleeps())
            return str(error)
    return ""


def without_exchanges() -> list[str]:
    """Watch a loop that never says where it waits; return the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with real.watch(every=10) as watch:
            for _ in range(20):
                with nullcontext():
                    time.sleep(0.001)
                watch.step()
        dist.barrier()
    return [str(each.message) for each in told]


def different_windows() -> list[str]:
    """Watch with different windows; return the warnings."""
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with real.watch(every=10, first_step=100 * rank) as watch:
            for _ in range(20):
                with watch.waiting():
                    time.sleep(0.02)
                watch.step()
        dist.barrier()
    return [str(each.message) for each in told]
