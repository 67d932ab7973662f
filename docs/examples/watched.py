"""Train with DistributedDataParallel, where rank 2 is late in every step; report that, and trace it once.

torchrun --standalone --nproc-per-node 4 SCRIPT --traces traces
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile, tensorboard_trace_handler

import real


def main() -> None:
    """Train, watch and trace."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--csv", type=Path, default="lateness.csv")
    parser.add_argument("--traces", type=Path, default="traces")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    watch = real.watch(model, every=20, csv=options.csv, report=print)
    saves = tensorboard_trace_handler(str(options.traces), worker_name=f"rank{rank}")
    with profile(schedule=watch.schedule, on_trace_ready=saves, record_shapes=True) as profiler:
        for _ in range(options.steps):
            if rank == 2:
                time.sleep(0.04)  # a slow data loader
            optimizer.zero_grad()
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
            profiler.step()
            watch.step()
    watch.close()
    dist.barrier()
    mark = watch.trace_mark
    if rank == 0 and mark:
        n_traces = len(list(options.traces.glob("*.json")))
        print(f"{n_traces} traces of a step in which rank {mark.rank} is late ({mark.kind})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
