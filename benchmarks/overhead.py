"""Overhead of a training loop whose schedule simdist performs, against loops written by hand with torch's own tools.

    torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py [--rounds 36] [--steps 8] [--json]

The same model trains on the same processes in turn, some steps with torch's own and some with `real.wrap`, round after
round, so that whatever else the machine does meets both. A ratio is steps per second with simdist over those with
torch's own, by the median over rounds:

    sync     DistributedDataParallel
    local    PostLocalSGDOptimizer and PeriodicModelAverager
    hsgd     HierarchicalModelAverager, as the PyTorch blog on hierarchical SGD uses it

Exits with 1 if a ratio is below 0.97.
"""

import argparse
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import real
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule, Sync

TARGET = 0.97
PERIOD = 4
WIDTH, BATCH = 640, 256

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Contest:
    """Two ways to do the same."""

    name: str
    by_hand: Step
    with_simdist: Step
    close: Callable[[], None]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of about 5 MB in several layers, and its optimizer."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loop_body(model: nn.Module, zero_grad: Callable[[], None], update: Callable[[], object]) -> Step:
    """Return one step of a training loop, as everybody writes it."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        update()

    return step


def torch_sync() -> Step:
    """Train with DistributedDataParallel."""
    model, optimizer = make()
    return loop_body(DistributedDataParallel(model, broadcast_buffers=False), optimizer.zero_grad, optimizer.step)


def torch_local() -> Step:
    """Train locally and average with torch's periodic averager."""
    model, optimizer = make()
    averaging = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=PERIOD, warmup_steps=0))
    return loop_body(model, optimizer.zero_grad, averaging.step)


def torch_hierarchical(levels: dict[int, int]) -> Step:
    """Train locally and average with torch's hierarchical averager, which the loop calls itself."""
    model, optimizer = make()
    averager = HierarchicalModelAverager(period_group_size_dict=OrderedDict(levels), warmup_steps=0)

    def update() -> None:
        optimizer.step()
        averager.average_parameters(model.parameters())

    return loop_body(model, optimizer.zero_grad, update)


def contest(name: str, by_hand: Step, schedule: Schedule, n_steps: int) -> Contest:
    """Set torch's own step against that of a wrapped model."""
    model, optimizer = make()
    worker = real.wrap(model, optimizer, schedule, n_steps=n_steps)
    return Contest(name, by_hand, loop_body(model, optimizer.zero_grad, optimizer.step), worker.close)


def seconds(step: Step, batch: tuple[Tensor, Tensor], n_steps: int) -> float:
    """Return how long the slowest rank takes for some steps."""
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(n_steps):
        step(*batch)
    taken_s = torch.tensor(time.perf_counter() - begin_s)
    dist.all_reduce(taken_s, op=dist.ReduceOp.MAX)
    return float(taken_s)


def ratio(each: Contest, batch: tuple[Tensor, Tensor], n_rounds: int, n_steps: int) -> tuple[float, float]:
    """Return steps per second with simdist over those by hand, and the milliseconds of a step by hand."""
    rounds = []
    for number in range(n_rounds + 1):
        pair = [(0, each.by_hand), (1, each.with_simdist)]
        taken = {which: seconds(step, batch, n_steps) for which, step in (pair if number % 2 else reversed(pair))}
        rounds.append((taken[0], taken[1]))
    measured = rounds[1:]  # the first warms up
    return median(hand / ours for hand, ours in measured), 1e3 * median(hand for hand, _ in measured) / n_steps


def main() -> int:
    """Run all contests and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--steps", type=int, default=8, help="of a round; a multiple of 8 has all averages in it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, n_steps = dist.get_world_size(), (arguments.rounds + 1) * arguments.steps
    levels = {2: 2, PERIOD: world} if world > 2 else {PERIOD: world}
    contests = [
        contest("sync", torch_sync(), Sync(), n_steps),
        contest(f"local-{PERIOD}", torch_local(), LocalSGD(period=PERIOD, phase=0), n_steps),
        contest(
            "hsgd",
            torch_hierarchical(levels),
            HierarchicalSGD(levels=dict(levels), intra_node_gradients=False, phase=0),
            n_steps,
        ),
    ]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
    results = {each.name: ratio(each, batch, arguments.rounds, arguments.steps) for each in contests}
    for each in contests:
        each.close()
    if dist.get_rank() == 0:
        report(results, as_json=arguments.json)
    dist.destroy_process_group()
    return 0 if min(quotient for quotient, _ in results.values()) >= TARGET else 1


def report(results: dict[str, tuple[float, float]], *, as_json: bool) -> None:
    """Print the ratios."""
    if as_json:
        print(json.dumps({name: {"ratio": quotient, "by_hand_ms": ms} for name, (quotient, ms) in results.items()}))
        return
    print("| schedule | steps/s, simdist : torch's own | step by hand |\n|---|---|---|")
    for name, (quotient, by_hand_ms) in results.items():
        print(f"| {name} | {quotient:.3f} | {by_hand_ms:.1f} ms |")


if __name__ == "__main__":
    sys.exit(main())
