"""Train a small network on made-up data, with hierarchical SGD in the place of DistributedDataParallel.

It takes 4 ranks or more, an even number: they average in pairs, and now and then all together.

torchrun --standalone --nproc-per-node 4 docs/examples/train.py
torchrun --standalone --nproc-per-node 4 --max-restarts 3 docs/examples/train.py --checkpoint checkpoints
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn

import real
from simdist.schedules import HierarchicalSGD


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Make the batch of a rank: other inputs in every step and on every rank, and the sine of their sum."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.rand(32, 8, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def main() -> None:
    """Train, and print the loss on a batch that was not trained on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n-steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="folder; go on from the newest checkpoint there")
    options = parser.parse_args()

    torch.manual_seed(int(os.environ["RANK"]))  # each rank drops out its own units; all begin with rank 0's parameters
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.n_steps)

    # Every 2 steps average the parameters of 2 neighbours, every 8 steps those of all ranks.
    schedule = HierarchicalSGD(levels={2: 2, 8: "world"}, intra_node_gradients=False)
    with real.wrap(
        model,
        optimizer,
        schedule,
        n_steps=options.n_steps,
        checkpoint=options.checkpoint,
        every=20,
        also={"scheduler": scheduler},
    ) as worker:
        for step in worker.steps():
            inputs, targets = (each.to(device) for each in batch(step, worker.rank))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if worker.rank == 0 and step % 50 == 49:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)

        model.eval()
        with torch.no_grad():
            inputs, targets = (each.to(device) for each in batch(options.n_steps, 0))
            held_out = nn.functional.mse_loss(model(inputs), targets).item()
        if worker.rank == 0:
            print(f"held out: loss {held_out:.6f}", flush=True)


if __name__ == "__main__":
    main()
