"""Train a small network with PyTorch's DistributedDataParallel, `fully_shard` or model averagers, as anybody would.

    torchrun --nproc-per-node 4 train.py --schedule sync --profile traces --times times
    torchrun --nproc-per-node 4 train.py --schedule local --periods 4 --times times
    torchrun --nproc-per-node 4 train.py --schedule hsgd --periods 2:2,4:4 --times times
    torchrun --nproc-per-node 4 train.py --schedule sharded --shard 2 --profile traces --times times

Nothing of the simulator is used here. `--layer-ms` makes every layer take that long in the forward pass and twice as
long in the backward pass, asleep: the device is emulated, so that more ranks than cores do not fight for them.
"""

import argparse
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PROFILER_WARMUP_STEPS = 2
N_CLASSES = 10


class Device(torch.autograd.Function):
    """Takes as long as a layer would on a device of its own, asleep; backward twice as long as forward."""

    @staticmethod
    def forward(context, activations, seconds):  # noqa: D102
        context.seconds = seconds
        time.sleep(seconds)
        return activations.view_as(activations)

    @staticmethod
    def backward(context, gradients):  # noqa: D102
        time.sleep(2 * context.seconds)
        return gradients, None


class Layer(nn.Module):
    """A linear layer that takes a stated time."""

    def __init__(self, width: int, seconds: float, *, has_norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.seconds = seconds

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return activations of the next layer."""
        return Device.apply(torch.relu(self.norm(self.linear(activations))), self.seconds)


class Noise(Dataset):
    """Samples of noise, each with a class; reading the first one of a step may stall.

    Args:
        n_samples: Of all ranks.
        shape: Of a sample.
        seed: Of the samples.
        stall_s: Seconds for which this rank stalls in each step, `[n_steps]`.
        per_step: Samples that a rank reads in a step.
    """

    def __init__(
        self, n_samples: int, shape: tuple[int, ...], seed: int, stall_s: Sequence[float], per_step: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples = torch.randn(n_samples, *shape, generator=generator)
        self.classes = torch.randint(0, N_CLASSES, (n_samples,), generator=generator)
        self.stall_s = stall_s
        self.per_step = per_step
        self.n_read = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        step, place = divmod(self.n_read, self.per_step)
        if place == 0 and self.stall_s[step]:
            time.sleep(self.stall_s[step])
        self.n_read += 1
        return self.samples[index], self.classes[index]


def network(options: argparse.Namespace, slowness: float) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model, and the shape of its samples."""
    if options.model == "convnet":
        return convnet(), (3, 32, 32)
    if options.model == "mlp":
        return mlp(options.width, options.layers), (options.width,)
    seconds = 1e-3 * options.layer_ms * slowness
    layers = [Layer(options.width, seconds, has_norm=options.batchnorm) for _ in range(options.layers)]
    return nn.Sequential(*layers, nn.Linear(options.width, N_CLASSES)), (options.width,)


def convnet() -> nn.Module:
    """Return a small network for pictures of 32 x 32, whose layers take what they take."""
    channels = [3, 32, 64, 128, 128]
    blocks = [
        layer
        for inputs, outputs in pairwise(channels)
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, N_CLASSES))


def mlp(width: int, n_layers: int) -> nn.Module:
    """Return linear layers, which take what they take."""
    hidden = [layer for _ in range(n_layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, N_CLASSES))


def averager(options: argparse.Namespace) -> ModelAverager | None:
    """Return what averages parameters, if gradients are not averaged."""
    match options.schedule:
        case "local":
            return PeriodicModelAverager(period=int(options.periods))
        case "hsgd":
            levels = (level.split(":") for level in options.periods.split(","))
            return HierarchicalModelAverager(OrderedDict((int(period), int(size)) for period, size in levels))
        case _:
            return None


def prepared(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Return the model that a step calls: one that averages gradients, unless parameters are averaged."""
    match options.schedule:
        case "sync":
            return DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb)
        case "sharded":
            return sharded(model, options.shard or dist.get_world_size())
        case _:
            return model


def sharded(model: nn.Module, shard: int) -> nn.Module:
    """Shard each layer over so many consecutive ranks."""
    from torch.distributed.fsdp import fully_shard  # torch 2.6 and newer

    world_size = dist.get_world_size()
    shape, names = (world_size,), ("shard",)
    if shard < world_size:
        shape, names = (world_size // shard, shard), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def profiler(options: argparse.Namespace, rank: int):
    """Return a profiler of the last steps, or something that does nothing."""
    if options.profile is None:
        return nullcontext()
    options.profile.mkdir(parents=True, exist_ok=True)
    path = options.profile / f"rank{rank}.{options.trace_suffix}"
    before = options.steps - options.active_steps - PROFILER_WARMUP_STEPS
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if options.device == "cuda" else [])],
        schedule=schedule(wait=before, warmup=PROFILER_WARMUP_STEPS, active=options.active_steps, repeat=1),
        record_shapes=True,
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)),
    )


def train(options: argparse.Namespace) -> list[list[float]]:
    """Train; return when each step began and ended, on the machine's monotonic clock, and how long this rank slept."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    slowness = options.slow_factor if rank == options.slow_rank else 1.0
    if options.slowness:
        slowness = float(options.slowness.split(",")[rank])
    model, shape = network(options, slowness)
    model.to(options.device)
    average = averager(options)
    trained = prepared(model, options)
    fused = options.schedule != "sharded"  # torch has no fused SGD for slices
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9, fused=fused)
    late_s, stall_s = (_of_steps(path, options.steps, world_size) for path in (options.stragglers, options.stalls))
    per_step = options.batch_size * options.accumulate
    data = Noise(options.steps * per_step * world_size, shape, options.seed, stall_s[:, rank].tolist(), per_step)
    batches = iter(DataLoader(data, options.batch_size, sampler=DistributedSampler(data, seed=options.seed)))
    barriers = {int(step) for step in options.barriers.split(",") if step}
    stamps_s: list[list[float]] = []
    with profiler(options, rank) as recorder:
        for step in range(options.steps):
            if step in barriers:
                dist.barrier()
            began_s = time.monotonic()
            optimizer.zero_grad()
            slept_s = 0.0
            for left in reversed(range(options.accumulate)):
                samples, classes = next(batches)
                adds_only = left and options.schedule == "sync"
                with trained.no_sync() if adds_only else nullcontext():
                    loss = nn.functional.cross_entropy(trained(samples.to(options.device)), classes.to(options.device))
                    computed_s = time.perf_counter()
                    if late_s[step, rank] and not left:
                        time.sleep(late_s[step, rank])
                        slept_s = time.perf_counter() - computed_s
                    loss.backward()
            optimizer.step()
            if average:
                average.average_parameters(trained.parameters())
            if options.device == "cuda":
                torch.cuda.synchronize()
            stamps_s.append([began_s, time.monotonic(), slept_s])
            if recorder:
                recorder.step()
    return stamps_s


def _of_steps(path: Path | None, n_steps: int, world_size: int) -> np.ndarray:
    """Return seconds of each step and rank, `[n_steps, world_size]`."""
    return np.loadtxt(path, delimiter=",", ndmin=2) if path else np.zeros((n_steps, world_size))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the times of this rank's steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=["sync", "local", "hsgd", "sharded"], default="sync")
    parser.add_argument("--periods", default="", help="local: a period; hsgd: period:ranks, ascending, with commas")
    parser.add_argument("--shard", type=int, help="sharded: ranks that share a copy of the model; all by default")
    parser.add_argument(
        "--model", choices=["asleep", "convnet", "mlp"], default="asleep", help="not asleep: computes in earnest"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="all ranks share the first GPU")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=250)
    parser.add_argument("--layer-ms", type=float, default=3.0, help="asleep: forward time of a layer")
    parser.add_argument("--bucket-mb", type=float, default=0.2)
    parser.add_argument("--profile", type=Path, help="folder for a trace of the last steps")
    parser.add_argument("--active-steps", type=int, default=20, help="that the profiler records")
    parser.add_argument("--trace-suffix", default="json", help="json.gz packs them")
    parser.add_argument("--stragglers", type=Path, help="seconds that each rank is late: a line per step, with commas")
    parser.add_argument("--stalls", type=Path, help="seconds that each rank waits for its batch, likewise")
    parser.add_argument("--slowness", default="", help="so many times as long, for each rank, with commas")
    parser.add_argument("--batchnorm", action="store_true", help="asleep: layers have BatchNorm")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step, whose gradients are added up")
    parser.add_argument("--slow-rank", type=int, help="its layers take longer")
    parser.add_argument("--slow-factor", type=float, default=1.0, help="so many times as long")
    parser.add_argument("--barriers", default="", help="steps before which all ranks meet")
    parser.add_argument("--times", type=Path, help="folder for the times of steps, a file per rank")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stamps_s = train(options)
    if options.times:
        options.times.mkdir(parents=True, exist_ok=True)
        path = options.times / f"rank{dist.get_rank()}.json"
        path.write_text(json.dumps(stamps_s), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
