"""Checkpoints: one file for all ranks, from which a run goes on as if it had never stopped.

`FOLDER/step-0000000200.ckpt` is what every rank knew before step 200. Rank 0 writes it; the others send, one after the
other, what it has not got yet, so it never holds more than two states. The file before it is kept, in case the newest
is damaged. To resume, rank 0 reads the newest complete file and sends each rank its state, so only its machine needs to
reach the folder.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from real.checkpoints import archive
from real.checkpoints.archive import DamagedError, Index, Job
from real.collectives import byte_transfer
from simdist.errors import RunError

T = TypeVar("T")

_N_KEPT = 2


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where to go on.

    Args:
        step: The next step.
        sections: The packed state of this rank: section -> uint8 `[nbytes]`.
    """

    step: int
    sections: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Found:
    """A complete checkpoint."""

    path: Path
    index: Index


@final
class Checkpoints:
    """The checkpoints of one job.

    Args:
        folder: Where they are; only rank 0 uses it.
        job: What they belong to.
        group: Of all ranks, able to move tensors of the host, and patient enough for rank 0 to write.
        wait: Calls a function that waits for other ranks, and ends the wait if one of them has failed.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        *,
        group: dist.ProcessGroup | None,
        wait: Callable[[Callable[[], None]], None],
    ) -> None:
        self._folder, self._job = folder, job
        self._group, self._wait = group, wait
        self._rank = dist.get_rank()

    def save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        """Write a checkpoint; all ranks take part.

        Args:
            step: The next step.
            sections: The packed state of this rank, the same sections on every rank.

        Raises:
            RunError: It cannot be written; all ranks learn so.
        """
        self._wait(lambda: self._save(step, sections))

    def resume(self) -> Resumed | None:
        """Return where to go on, from the newest complete checkpoint; None if there is none. All ranks take part.

        Raises:
            RunError: It is of another job, or all that there are are damaged.
        """
        found: list[Resumed | None] = []
        self._wait(lambda: found.append(self._resume()))
        return found[0]

    def _save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        mine = list(sections.values())
        rows = byte_transfer.gather_rows(torch.stack([_sha256(parcel) for parcel in mine]), group=self._group)
        sha256 = [[bytes(digest.tolist()).hex() for digest in row] for row in rows]
        owners = _first_owners(sha256)
        problem = ""
        if self._rank == 0:
            arriving = (
                (each, byte_transfer.recv(src=rank, group=self._group) if rank else mine[at])
                for each, (rank, at) in owners.items()
            )
            problem = self._write(step, arriving, [dict(zip(sections, row, strict=True)) for row in sha256])
        for rank, at in owners.values():
            if rank == self._rank != 0:
                byte_transfer.send(mine[at], dst=0, group=self._group)
        self._learn(problem)

    def _write(self, step: int, arriving: Iterator[tuple[str, Tensor]], ranks: list[dict[str, str]]) -> str:
        """Write what arrives, and return what went wrong, if anything."""
        path = self._folder / f"step-{step:010d}.ckpt"
        try:
            archive.write(path, step, self._job, arriving, ranks)
            older = [each for each in self._files() if each.name < path.name]
            for old in older[_N_KEPT - 1 :]:
                old.unlink(missing_ok=True)
        except OSError as error:
            for _ in arriving:  # the others send it in any case
                pass
            return f"{path}: cannot be written: {error.strerror or error}"
        return ""

    def _learn(self, problem: str) -> None:
        """Tell everybody what went wrong on rank 0."""
        if problem := byte_transfer.broadcast_text(problem, group=self._group):
            raise RunError(problem)

    def _files(self) -> list[Path]:
        """Return the checkpoints that there are, newest first."""
        return sorted(self._folder.glob("step-*.ckpt"), reverse=True)

    def _resume(self) -> Resumed | None:
        problem, found = "", None
        if self._rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                if not os.access(self._folder, os.W_OK):
                    raise RunError(f"{self._folder}: this user may not write checkpoints there")
                found = self._find()
            except OSError as error:
                problem = f"{self._folder}: cannot hold checkpoints: {error.strerror or error}"
            except RunError as error:
                problem = str(error)
        self._learn(problem)
        known = {"step": found.index.step, "names": list(found.index.ranks[0])} if found else None
        known = json.loads(byte_transfer.broadcast_text(json.dumps(known), group=self._group))
        if known is None:
            return None
        if found:
            return self._distribute(found)
        return Resumed(known["step"], {name: byte_transfer.recv(src=0, group=self._group) for name in known["names"]})

    def _distribute(self, found: _Found) -> Resumed:
        index = found.index
        for rank in range(1, self._job.world_size):
            for number in index.ranks[rank].values():
                byte_transfer.send(archive.read_blob(found.path, index.blobs[number]), dst=rank, group=self._group)
        mine = {name: archive.read_blob(found.path, index.blobs[at]) for name, at in index.ranks[0].items()}
        return Resumed(index.step, mine)

    def _find(self) -> _Found | None:
        """Return the newest complete checkpoint, None if there is no file."""
        archive.forget_unfinished(self._folder)
        damaged: list[str] = []
        for path in self._files():
            try:
                index = archive.read_index(path)
            except DamagedError as error:
                damaged.append(f"{path}: {error}")
                continue
            if index.job != self._job:
                raise RunError(
                    f"{path} is of {index.job}; this is {self._job}: go on as that one, or begin in another folder"
                )
            for text in damaged:
                warnings.warn(f"{text}; going on from {path}", RuntimeWarning, stacklevel=2)
            return _Found(path, index)
        if damaged:
            raise RunError(f"no checkpoint is complete: {'; '.join(damaged)}; delete them to begin anew")
        return None


def _first_owners(sha256: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Return who is the first to have each parcel, and at which place of its row: SHA-256 -> (rank, place)."""
    owners: dict[str, tuple[int, int]] = {}
    for rank, row in enumerate(sha256):
        for at, each in enumerate(row):
            owners.setdefault(each, (rank, at))
    return owners


def _sha256(parcel: Tensor) -> Tensor:
    """Return the SHA-256 of a parcel, uint8 `[32]`."""
    return torch.frombuffer(bytearray(hashlib.sha256(parcel.numpy().data).digest()), dtype=torch.uint8)
