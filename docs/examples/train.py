"""Train a small convolutional network on made-up images; go on from the last epoch if it is in the checkpoint.

torchrun --standalone --nproc-per-node 4 SCRIPT --checkpoint last.pt
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import real
from simdist.schedules import LocalSGD


class Net(nn.Module):
    """Two convolutions with batch normalisation, and a classifier of four kinds of images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(16 * 3 * 3, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Return a score for each kind."""
        return self.classifier(self.features(images).flatten(1))


def made_up_images(n_images: int, seed: int) -> TensorDataset:
    """Make noisy images, 8 x 8; the kind of an image is its brightest quarter."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n_images, 1, 8, 8, generator=generator)
    kinds = torch.randint(4, (n_images,), generator=generator)
    for image, kind in zip(images, kinds.tolist(), strict=True):
        image[0, 4 * (kind // 2) :, 4 * (kind % 2) :][:4, :4] += 1.0
    return TensorDataset(images, kinds)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Decay matrices and kernels, and neither biases nor what batch normalisation learns."""
    decay = [each for each in model.parameters() if each.dim() > 1]
    no_decay = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the part of all ranks' images whose kind is found."""
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, kinds in loader:
        found = model(images.to(device)).argmax(dim=1)
        counts += torch.tensor([(found == kinds.to(device)).sum(), len(kinds)], device=device)
    model.train()
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    """Train, evaluate after each epoch, and keep the newest checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stop-after", type=int, help="epochs of this run, of all")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--accumulate", type=int, default=2, help="batches to one update")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--checkpoint", type=Path, help="file; go on from there")
    parser.add_argument("--compile", metavar="BACKEND", help="such as inductor")
    parser.add_argument("--amp", action="store_true", help="bfloat16 on CPUs, float16 on GPUs")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(17)

    training, held_out = made_up_images(options.images, seed=1), made_up_images(400, seed=2)
    sampler = DistributedSampler(training, seed=5)
    loader = DataLoader(training, options.batch_size, sampler=sampler)
    held_out_loader = DataLoader(held_out, 100, sampler=DistributedSampler(held_out, shuffle=False))
    updates_per_epoch = -(-len(loader) // options.accumulate)

    net = Net().to(device)
    optimizer = make_optimizer(net, options.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.lr, total_steps=options.epochs * updates_per_epoch
    )
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp and on_gpu)
    kept = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "scaler": scaler}
    first_epoch = 0
    if options.checkpoint and options.checkpoint.exists():
        checkpoint = torch.load(options.checkpoint, map_location=device, weights_only=True)
        first_epoch = checkpoint["epoch"]
        for name, each in kept.items():
            each.load_state_dict(checkpoint[name])

    model = torch.compile(net, backend=options.compile) if options.compile else net
    model = real.wrap(model, optimizer, LocalSGD(period=4), first_step=scheduler.last_epoch)

    for epoch in range(first_epoch, min(options.epochs, first_epoch + (options.stop_after or options.epochs))):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for number, (images, kinds) in enumerate(loader, start=1):
            is_update = number % options.accumulate == 0 or number == len(loader)
            with nullcontext() if is_update else model.no_sync():
                with torch.autocast(device.type, torch.float16 if on_gpu else torch.bfloat16, enabled=options.amp):
                    loss = cross_entropy(model(images.to(device)), kinds.to(device)) / options.accumulate
                scaler.scale(loss).backward()
            total += loss.detach()
            if is_update:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
                ema.update_parameters(net)

        model.average()
        dist.all_reduce(total)
        mean = float(total) * options.accumulate / len(loader) / world_size
        found = accuracy(net, held_out_loader, device), accuracy(ema, held_out_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, accuracy {found[0]:.1%}, of the EMA {found[1]:.1%}", flush=True)
            if options.checkpoint:
                states = {name: each.state_dict() for name, each in kept.items()}
                torch.save({"epoch": epoch + 1} | states, options.checkpoint)
        dist.barrier()
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
