"""Runs that read a data set; what ranks do in them, and what a model sees."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from data_files import sample_number
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn

import real
from real.cli import main
from real.data import filecache, inputs
from real.models import TrainingJob
from real.programs import base

SIDE = 37
SAMPLE_NBYTES = 3 * SIDE * SIDE


class Looking(nn.Module):
    """Has four weights, and keeps the images that it has seen last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.images = torch.empty(0)

    def forward(self, images: Tensor) -> Tensor:
        self.images = images
        return self.weight.sum() + images.mean()


class Still:
    """Leaves parameters as they are; an optimizer of torch takes seconds to import."""

    def step(self) -> None:
        pass


def job(batch_size: int, device: torch.device, dtype: torch.dtype, seed: int) -> TrainingJob:
    """Print which samples the images show, and the labels beside them; say `begin` first."""
    module = Looking()
    print("begin", flush=True)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        if int(labels[0]) >= 0:
            print("saw", *shown(module.images), "labelled", *labels.tolist(), flush=True)
        return output

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, 3, SIDE, SIDE), torch.full((batch_size,), -1)

    return TrainingJob(module, loss, Still(), batch)


def shown(images: Tensor) -> list[int]:
    """Return the numbers of samples that normalised images show."""
    pixels = (images * base._DEVIATION + base._MEAN).round().to(torch.uint8)
    return [sample_number(image.numpy()) for image in pixels]


# what a rank does


def perform(*args: object) -> None:
    sys.exit(main([str(arg) for arg in args]))


def perform_and_die(stray: int, number: int, *args: object) -> None:
    """One rank is killed in a load, when its files are there and it has not said so."""
    fill = inputs.InputReader.fill

    def dying(self: inputs.InputReader, at: int, out: Tensor, labels: Tensor) -> None:
        fill(self, at, out, labels)
        if at == number and os.environ["RANK"] == str(stray):
            os.kill(os.getpid(), signal.SIGKILL)

    inputs.InputReader.fill = dying  # type: ignore[assignment]
    perform(*args)


def perform_with_full_disk_and_outage(n_files: int, outage_s: float, *args: object) -> None:
    """The disk takes so many files of each rank, and half of the next; after as many reads the storage is away."""
    write_all, cat_file = filecache._write_all, LocalFileSystem.cat_file
    left = [n_files]
    reads: list[float] = []

    def full(descriptor: int, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            write_all(descriptor, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(descriptor, content)

    def away(self: LocalFileSystem, path: str) -> bytes:
        reads.append(time.monotonic())
        if len(reads) > n_files and time.monotonic() < reads[n_files] + outage_s:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "no NFS server")
        return cat_file(self, path)

    filecache._write_all, LocalFileSystem.cat_file = full, away
    perform(*args)


def train(run: Path, url: Path, cache: Path, checkpoint: Path, seen: Path, die_at: int | None) -> None:
    """Train as a user does, with checkpoints; note what came in each step; rank 1 may be killed."""
    module = Looking()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with real.wrap(module, optimizer, run, checkpointing=real.Checkpointing(checkpoint, every=3)) as worker:
        batches = worker.feed(str(url), cache=cache, timeout_s=20.0)
        with (seen / f"{worker.rank}.txt").open("a", encoding="utf-8") as notes:
            for step, (images, labels) in zip(worker.steps(), batches, strict=False):
                if step == die_at and worker.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                numbers = [sample_number(np.array(image)) for image in images]
                print(step, *numbers, "labelled", *labels.tolist(), file=notes, flush=True)
                optimizer.zero_grad()
                module(images.float()).backward()
                optimizer.step()
        print("left", next(batches, "nothing"), "read", batches.reads["samples_from_storage"])
