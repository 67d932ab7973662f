"""Training scripts as users of other tools write them. Each trains in several ways, for tests to compare.

A script takes a `Way`: it is the same script under DistributedDataParallel, under `real.wrap`, and under a loop that
averages by hand. The processes of a pool run it.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import real
from simdist.errors import SimdistError
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule, Sync
from simdist.schedules.diloco import DiLoCo
from simdist.schedules.torus import Torus

N_STEPS = 6
PERIOD = 2
LAUNCH = real.Launch(ranks_per_node=2)
SCHEDULES: Mapping[str, Schedule] = {
    "sync": Sync(first_bucket_nbytes=100, bucket_nbytes=300),
    "local": LocalSGD(period=PERIOD),
    "diloco": DiLoCo(period=PERIOD),
}


def outer_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@dataclass
class Way:
    """How ranks synchronise.

    Args:
        name: `ddp`; `sync`, `local` or `diloco` by `real.wrap`; `local by hand` or `diloco by hand`.
    """

    name: str
    workers: list[real.Worker] = field(default_factory=list)
    outer: dict[nn.Module, tuple[list[nn.Parameter], torch.optim.Optimizer]] = field(default_factory=dict)
    n_updates: dict[nn.Module, int] = field(default_factory=dict)

    def connect(self, module: nn.Module, optimizer: Any) -> Any:
        """Return the model to call."""
        if self.name == "ddp":
            return DistributedDataParallel(module)
        if self.name in SCHEDULES:
            self.workers.append(real.wrap(module, optimizer, SCHEDULES[self.name], n_steps=N_STEPS, launch=LAUNCH))
            return self.workers[-1]
        anchors = [nn.Parameter(each.detach().clone()) for each in module.parameters()]
        self.outer[module] = anchors, outer_optimizer(anchors)
        self.n_updates[module] = 0
        return module

    def updated(self, module: nn.Module) -> None:
        """Average by hand where it is due. A script calls this after `optimizer.step()`."""
        if module not in self.outer:
            return
        self.n_updates[module] += 1
        if self.n_updates[module] % PERIOD:
            return
        anchors, outer = self.outer[module]
        with torch.no_grad():
            for parameter, anchor in zip(module.parameters(), anchors, strict=True):
                if self.name == "local by hand":
                    mean_of(parameter)
                else:
                    anchor.grad = anchor.detach() - parameter
                    mean_of(anchor.grad)
            if self.name == "diloco by hand":
                outer.step()
                for parameter, anchor in zip(module.parameters(), anchors, strict=True):
                    parameter.copy_(anchor)

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()

    def close(self) -> None:
        for worker in reversed(self.workers):
            worker.close()


def mean_of(tensor: Tensor) -> None:
    tensor.div_(dist.get_world_size())
    dist.all_reduce(tensor)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype))


def batches(dtype: torch.dtype = torch.float64, n_steps: int = N_STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(n_steps):
        yield torch.randn(5, 6, dtype=dtype, generator=generator), torch.randint(3, (5,), generator=generator)


def vector(*modules: nn.Module) -> np.ndarray:
    parameters = [each.detach().double().flatten() for module in modules for each in module.parameters()]
    return torch.cat(parameters).numpy().copy()


# --- optimizers of users ---


class Clipping(torch.optim.SGD):
    """Clips gradients inside its own step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.1)
        return super().step(closure)


class Bounded(Clipping):
    """Clips gradients, and bounds the parameters after the update, as the critic of a WGAN does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                each.clamp_(-0.3, 0.3)
        return loss


class Twice(torch.optim.SGD):
    """Does the step of its base class twice in one step."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation. Like widely used code, it puts parameters back by `parameter.data = kept`.

    Source:
        Foret et al., arXiv 2010.01412, algorithm 1.
    """

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: float) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            self.state[each]["kept"] = each.data.clone()
            each.add_(each.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if "kept" in self.state[each]:
                    each.data = self.state[each]["kept"]
        self.base_optimizer.step()
        self.zero_grad()


def train_simply(way: Way, kind: type[torch.optim.Optimizer], *, closure: bool = False, **options: float) -> np.ndarray:
    """Train by an optimizer of a user, beside other instances of its base classes."""
    module = mlp()
    optimizer = kind(module.parameters(), **options)
    for base in type(optimizer).__mro__[1:-2]:
        if base is not torch.optim.Optimizer and issubclass(base, torch.optim.Optimizer):
            base(nn.Linear(1, 1).parameters(), lr=0.1)  # from now on its step has hooks, too
    model = way.connect(module, optimizer)
    for inputs, targets in batches():

        def compute(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        if closure:
            optimizer.step(compute)
        else:
            compute()
            optimizer.step()
        way.updated(module)
    way.close()
    return vector(module)


def clipping(way: Way) -> np.ndarray:
    return train_simply(way, Clipping, lr=0.5)


def bounded(way: Way) -> np.ndarray:
    return train_simply(way, Bounded, lr=0.5)


def twice(way: Way) -> np.ndarray:
    return train_simply(way, Twice, lr=0.05)


def by_closure(way: Way) -> np.ndarray:
    return train_simply(way, torch.optim.Adam, closure=True, lr=0.01)


def sam(way: Way) -> np.ndarray:
    """Each rank climbs by its own gradient, as the authors of SAM advise under DDP."""
    module = mlp()
    optimizer = SAM(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model = way.connect(module, optimizer.base_optimizer)
    for inputs, targets in batches():
        with way.no_sync(model):
            functional.cross_entropy(model(inputs), targets).backward()
        optimizer.first_step()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.second_step()
        way.updated(module)
    way.close()
    return vector(module)


# --- models ---


class Normalised(nn.Module):
    """A model whose normalisations are in higher precision than its matrices, as in language models."""

    def __init__(self, low: torch.dtype, high: torch.dtype) -> None:
        super().__init__()
        self.low = low
        self.high = high
        self.first = nn.Linear(6, 16, dtype=low)
        self.before = nn.LayerNorm(6, dtype=high)
        self.between = nn.LayerNorm(16, dtype=high)
        self.last = nn.Linear(16, 3, dtype=low)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.before(inputs).to(self.low)))
        return self.last(self.between(hidden.to(self.high)).to(self.low)).to(self.high)


def two_types(way: Way) -> np.ndarray:
    return train_normalised(way, torch.float32, torch.float64)


def bfloat16_with_float32(way: Way) -> np.ndarray:
    return train_normalised(way, torch.bfloat16, torch.float32)


def train_normalised(way: Way, low: torch.dtype, high: torch.dtype) -> np.ndarray:
    module = seeded(lambda: Normalised(low, high))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    model = way.connect(module, optimizer)
    for inputs, targets in batches(high):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        way.updated(module)
    way.close()
    return vector(module)


def gan(way: Way) -> np.ndarray:
    """Two models that train each other. The generator trains through the discriminator in training mode."""
    generator = seeded(lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double())
    critic = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 1)).double())
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    make = way.connect(generator, of_generator)
    judge = way.connect(critic, of_critic)
    noise = torch.Generator().manual_seed(dist.get_rank())
    for real_ones, _ in batches():
        made = make(torch.randn(5, 2, dtype=torch.float64, generator=noise))
        of_critic.zero_grad()
        with way.no_sync(judge):
            functional.softplus(-judge(real_ones)).mean().backward()
        functional.softplus(judge(made.detach())).mean().backward()
        of_critic.step()
        way.updated(critic)
        of_generator.zero_grad()
        with way.no_sync(judge):
            functional.softplus(-judge(made)).mean().backward()
        of_generator.step()
        way.updated(generator)
    way.close()
    return vector(generator, critic)


SCRIPTS: Mapping[str, Callable[[Way], np.ndarray]] = {
    each.__name__: each for each in (clipping, bounded, twice, by_closure, sam, two_types, bfloat16_with_float32, gan)
}


def trained(script: str, way: str) -> np.ndarray:
    """Run a script, and return the parameters at the end."""
    return SCRIPTS[script](Way(way))


# --- batches that are left out ---


def leaving_out(how: str, schedule: str, left_out: Mapping[int, tuple[int, ...]], by_steps: bool) -> np.ndarray:
    """Train, and leave batches out.

    Args:
        how: `before` the forward pass, `after` it, after both passes (`backward`), or `by hand`: without `real.wrap`.
        schedule: Its name in `SCHEDULES`.
        left_out: Step -> ranks that leave out its batch.
        by_steps: The loop asks `worker.steps()`.
    """
    way = Way(f"{schedule} by hand" if how == "by hand" else schedule)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = way.connect(module, optimizer)
    steps = way.workers[0].steps() if by_steps and way.workers else range(N_STEPS)
    for step, (inputs, targets) in zip(steps, batches(), strict=False):
        leaves = dist.get_rank() in left_out.get(step, ())
        optimizer.zero_grad()
        if how == "by hand":
            if not leaves:
                functional.cross_entropy(model(inputs), targets).backward()
            if schedule == "sync" and len(left_out.get(step, ())) < dist.get_world_size():
                for each in module.parameters():
                    each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                    mean_of(each.grad)
            optimizer.step()
            way.updated(module)
            continue
        if leaves and how == "before":
            model.skip()
            continue
        loss = functional.cross_entropy(model(inputs), targets)
        if leaves and how == "after":
            model.skip()
            if step % 2:  # both are allowed
                optimizer.step()
            continue
        loss.backward()
        if leaves:
            model.skip()
            continue
        optimizer.step()
    way.close()
    return vector(module)


def leaving_out_scaled(schedule: str, left_out: Mapping[int, tuple[int, ...]]) -> np.ndarray:
    """Train as `leaving_out`, with a gradient scaler."""
    way = Way(schedule)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = way.connect(module, optimizer)

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    for step, (inputs, targets) in enumerate(batches()):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        if dist.get_rank() in left_out.get(step, ()):
            model.skip(update)
            continue
        scaler.scale(loss).backward()
        update()
    way.close()
    return vector(module)


# --- how ranks are started ---


def on_uneven_nodes(schedule: str, sizes: tuple[int, ...], how: str) -> None:
    """Print what a rank ends with, or is told, if nodes have these numbers of ranks; started as by torchrun."""
    rank = int(os.environ["RANK"])
    node = next(number for number in range(len(sizes)) if rank < sum(sizes[: number + 1]))
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[node])
    os.environ["LOCAL_RANK"] = str(rank - sum(sizes[:node]))
    if how == "own group":
        dist.init_process_group("gloo")
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    try:
        with real.wrap(module, optimizer, ON_NODES[schedule], n_steps=N_STEPS) as worker:
            for inputs, targets in batches():
                optimizer.zero_grad()
                functional.cross_entropy(worker(inputs), targets).backward()
                optimizer.step()
        print(repr(float(vector(module).sum())))
    except SimdistError as error:
        print(f"{type(error).__name__}: {error}")


def gan_alone() -> None:
    """Train two models in the process group that `real.wrap` makes for the first."""
    print(repr(float(gan(Way("local")).sum())))


ON_NODES: Mapping[str, Schedule] = {
    **SCHEDULES,
    "intra": HierarchicalSGD(levels={2: 2, 4: "world"}),
    "levels": HierarchicalSGD(levels={2: 2, 4: "world"}, intra_node_gradients=False),
    "worker": DiLoCo(period=2, ranks_per_worker="node"),
    "torus": Torus(),
}


def leaves_a_batch_out(schedule: str, how: str) -> None:
    """Leave a batch out on rank 2 alone, without a word."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with real.wrap(module, optimizer, SCHEDULES[schedule]) as worker:
        for step, (inputs, targets) in enumerate(batches(n_steps=8)):
            if worker.rank == 2 and step == 3 and how == "before":
                continue
            optimizer.zero_grad()
            loss = functional.cross_entropy(worker(inputs), targets)
            if worker.rank == 2 and step == 3:
                continue
            loss.backward()
            optimizer.step()


def calls_differ(calls: dict[int, dict[int, str]]) -> None:
    """Make calls of the worker before some steps, other ones on each rank: rank -> step -> call."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with real.wrap(module, optimizer, SCHEDULES["local"]) as worker:
        for step, (inputs, targets) in enumerate(batches(n_steps=8)):
            match calls[worker.rank].get(step):
                case "average":
                    worker.average()
                case "average with buffers":
                    worker.average(buffers=True)
                case "close":
                    worker.close()
            optimizer.zero_grad()
            functional.cross_entropy(worker(inputs), targets).backward()
            optimizer.step()


def ends_on_sigterm(folder: Path, n_steps: int) -> None:
    """Train until all ranks have seen that one of them was asked to end, and keep a checkpoint."""
    asked = torch.zeros(1)

    def ask(*_: object) -> None:
        asked.fill_(1.0)

    signal.signal(signal.SIGTERM, ask)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    kept = real.Checkpointing(folder, every=10_000)
    with real.wrap(module, optimizer, LocalSGD(period=4), checkpointing=kept) as worker:
        print(f"begins at {worker.step}")
        for step in worker.steps():
            ends = asked.clone()
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)
            if ends or step == n_steps:
                break
            inputs = torch.full((5, 6), float(step % 7), dtype=torch.float64)
            optimizer.zero_grad()
            worker(inputs).square().mean().backward()
            optimizer.step()
            if step == 5:
                print("is at step 5")
        print(f"ends at {worker.step}")
    print(repr(float(vector(module).sum())))
