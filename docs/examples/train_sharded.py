"""Train a small model that fully_shard shards over 2 ranks; copies of it follow DiLoCo.

torchrun --standalone --nproc-per-node 4 SCRIPT --checkpoints checkpoints
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import real
from simdist.schedules import DiLoCo

RANKS_PER_COPY = 2
BATCH_SIZE = 32


def make_model() -> nn.Module:
    """Return a model whose blocks and the rest are units: each is gathered when it is used."""
    torch.manual_seed(17)
    block = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 32), *block, nn.Linear(32, 4))
    n_copies = int(os.environ["WORLD_SIZE"]) // RANKS_PER_COPY
    mesh = init_device_mesh("cpu", (n_copies, RANKS_PER_COPY), mesh_dim_names=("replicate", "shard"))["shard"]
    for each in block:
        fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    """Train, and go on from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--checkpoints", type=Path, default="checkpoints")
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with real.wrap(
        model,
        optimizer,
        DiLoCo(period=8),
        n_steps=options.steps,
        checkpointing=real.Checkpointing(options.checkpoints, every=16),
        experiment=real.Experiment(trace=options.trace),
    ) as worker:
        for step in worker.steps():
            generator = torch.Generator().manual_seed(1_000 * step + worker.rank)
            inputs = torch.randn(BATCH_SIZE, 16, generator=generator)
            targets = inputs[:, :4].argmax(dim=1)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 8 == 7 and worker.rank == 0:
                print(f"step {step + 1}: loss {loss.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
