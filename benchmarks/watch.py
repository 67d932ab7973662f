"""Overhead of `real.watch` in a training loop with DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 benchmarks/watch.py [--rounds 120] [--steps 10] [--json]

Two equal models train on the same processes in turn, one of them watched, round after round, so that whatever else the
machine does meets both. Printed are

    steps/s, watched : not watched    the median over rounds, with an interval of 95 % confidence
    CPU time of the watch             in a step, of its calls and of its thread, and as a share of a step

Two runs on a busy machine differ by more than the watch costs, so the CPU time decides. It is measured without a model.
The program exits with 1 if it is 0.5 % of a step or more.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist
from overhead import BATCH, WIDTH, Step, loop_body, make, seconds
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import real
from real.watching.watch import StepWatch

TARGET = 0.005
EVERY = 50  # steps of a window
N_WINDOWS = 50


@dataclass(frozen=True, slots=True)
class Measured:
    """What a watch costs.

    Args:
        ratio: Steps per second watched over those not watched.
        lowest: Lower end of its interval.
        highest: Upper end of its interval.
        step_ms: A step that is not watched.
        cpu_us: CPU time of the watch in a step, exchanges included.
        cpu_share: The same over the time of a step.
    """

    ratio: float
    lowest: float
    highest: float
    step_ms: float
    cpu_us: float
    cpu_share: float


def train(watched: bool) -> tuple[Step, Callable[[], None]]:
    """Return a training step, and what ends it."""
    module, optimizer = make()
    model = DistributedDataParallel(module, broadcast_buffers=False)
    step = loop_body(model, optimizer.zero_grad, optimizer.step)
    if not watched:
        return step, lambda: None
    watch = real.watch(model, every=EVERY)

    def watched_step(inputs: Tensor, targets: Tensor) -> None:
        step(inputs, targets)
        watch.step()

    return watched_step, watch.close


def cpu_s(n_windows: int) -> float:
    """Return the CPU time that a watch takes in a step, on the rank that takes most."""
    watch = real.watch(every=EVERY)
    begin_s = time.process_time()
    for _ in range(n_windows * EVERY):
        _one_step(watch)
    watch.close()
    taken_s = torch.tensor(time.process_time() - begin_s, dtype=torch.float64)
    dist.all_reduce(taken_s, op=dist.ReduceOp.MAX)
    return float(taken_s) / (n_windows * EVERY)


def _one_step(watch: StepWatch) -> None:
    with watch.waiting():
        pass
    watch.step()


def compare(n_rounds: int, n_steps: int) -> Measured:
    """Train in turn, watched and not."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
    loops = [train(watched) for watched in (False, True)]
    rounds = []
    for number in range(n_rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        taken_s = {which: seconds(loops[which][0], batch, n_steps) for which in order}
        rounds.append((taken_s[0], taken_s[1]))
    for _, close in loops:
        close()
    measured = rounds[1:]  # the first warms up
    ratios = sorted(plain_s / watched_s for plain_s, watched_s in measured)
    step_s = median(plain_s for plain_s, _ in measured) / n_steps
    alone_s = cpu_s(N_WINDOWS)
    away = int(0.98 * n_rounds**0.5) + 1  # places from the middle: an interval of the median, 1.96 sqrt(n) / 2
    lowest = ratios[max(0, n_rounds // 2 - away)]
    highest = ratios[min(n_rounds - 1, n_rounds // 2 + away)]
    return Measured(median(ratios), lowest, highest, 1e3 * step_s, 1e6 * alone_s, alone_s / step_s)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = compare(arguments.rounds, arguments.steps)
    if dist.get_rank() == 0:
        if arguments.json:
            print(json.dumps(asdict(found)))
        else:
            print("| steps/s, watched : not watched | 95 % | step | CPU time of the watch | share |")
            print("|---|---|---|---|---|")
            print(
                f"| {found.ratio:.4f} | {found.lowest:.4f} to {found.highest:.4f} | {found.step_ms:.1f} ms "
                f"| {found.cpu_us:.1f} us | {found.cpu_share:.3%} |"
            )
    dist.destroy_process_group()
    return 0 if found.cpu_share < TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
