"""All ranks of the virtual world at once, beside a step written by hand with torch.func, and beside one rank by one.

    python benchmarks/virtual_world.py [--steps 12] [--batch-size 4] [--json]

Synchronous SGD on one thread, in seconds of the CPU by the median of steps, which other programs disturb less than the
clock. The step by hand draws the same batches, and differentiates, clears and updates the same stacks; it exchanges
nothing. Exits with 1 if the virtual world takes more than 1.3 times as long.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from real.execution.virtual import World, perform_together
from real.models.classifiers import conv_bn, mlp
from simdist.schedules import Job, Sync

TARGET = 1.3
LR, MOMENTUM = 0.05, 0.9


def convnet() -> nn.Module:
    """Return a network for images `[batch, 1, 8, 8]`."""
    return nn.Sequential(conv_bn(1, 8, 3), conv_bn(8, 16, 3, stride=2), nn.Flatten(), nn.Linear(256, 10))


def small_mlp() -> nn.Module:
    """Return a network of 10,062 parameters for `[batch, 1, 8, 8]`."""
    return nn.Sequential(nn.Flatten(), mlp(64, 100, 32, 10))


class Contest:
    """One model on so many ranks."""

    def __init__(self, model: Callable[[], nn.Module], n_ranks: int, batch_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randn(4096, 1, 8, 8, generator=generator)
        self._labels = torch.randint(10, (4096,), generator=generator)
        self._model, self._n_ranks, self._batch_size = model, n_ranks, batch_size

    def make(self, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, None]:
        """Return the module and the optimizer of any rank."""
        torch.manual_seed(0)
        module = self._model()
        return module, torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM), None

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        first = (step * 104_729 + rank * 7_919) % (4096 - self._batch_size)
        return self._images[first : first + self._batch_size], self._labels[first : first + self._batch_size]

    def by_simdist(self, n_steps: int, *, batched: bool) -> float:
        """Return the seconds of a step."""
        counts = tuple(each.numel() for each in self.make(0)[0].parameters())
        plan = Sync().plan(Job(self._n_ranks, 8, n_steps, tensor_counts=counts))
        world = World(plan, self.make, functional.cross_entropy, self.batch, batched=batched)
        ends_s = [time.process_time()]

        def end(_step: int) -> None:
            world.losses()
            ends_s.append(time.process_time())

        perform_together(plan, world.programs, world.memory, on_step=end)
        return median(after - before for before, after in pairwise(ends_s[1:]))

    def by_hand(self, n_steps: int) -> float:
        """Return the seconds of a step."""
        module = self._model()
        stacks = [
            {name: each.detach().expand(self._n_ranks, *each.shape).clone() for name, each in some}
            for some in (module.named_parameters(), module.named_buffers())
        ]
        optimizer = torch.optim.SGD([each.requires_grad_() for each in stacks[0].values()], lr=LR, momentum=MOMENTUM)

        def loss(parameters: dict, buffers: dict, inputs: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(functional_call(module, (parameters, buffers), (inputs,)), targets)

        ends_s = [time.process_time()]
        for step in range(n_steps):
            batches = (self.batch(step, rank) for rank in range(self._n_ranks))
            inputs, targets = map(torch.stack, zip(*batches, strict=True))
            optimizer.zero_grad()
            losses = vmap(loss)(*stacks, inputs, targets)
            losses.sum().backward()
            optimizer.step()
            losses.tolist()
            ends_s.append(time.process_time())
        return median(after - before for before, after in pairwise(ends_s[1:]))


def main() -> int:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, model, n_ranks in (("ConvNet", convnet, 64), ("MLP", small_mlp, 64), ("MLP", small_mlp, 256)):
        contest = Contest(model, n_ranks, options.batch_size)
        rounds = [(contest.by_hand(options.steps), contest.by_simdist(options.steps, batched=True)) for _ in range(3)]
        one_by_one_s = contest.by_simdist(max(3, options.steps // 4), batched=False)
        at_once_s = min(ours for _, ours in rounds)
        over = min(ours for _, ours in rounds) / min(hand for hand, _ in rounds)
        rows.append(
            {"model": name, "ranks": n_ranks, "ms": 1e3 * at_once_s, "by_hand": over, "gain": one_by_one_s / at_once_s}
        )
    if options.json:
        print(json.dumps(rows))
    else:
        print("| model | ranks | step at once | over by hand | gain over one by one |\n|---|---|---|---|---|")
        for row in rows:
            print("| {model} | {ranks} | {ms:.1f} ms | {by_hand:.2f} | {gain:.1f} |".format(**row))
    return 0 if max(row["by_hand"] for row in rows) <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
