"""Checkpoints: one file for all ranks, from which a run goes on as if it had never stopped.

    step-0000000200.ckpt        what every rank knew before step 200

The file is a line that names the format, then *blobs* one after the other, then an index (JSON) that says which blobs
make up the state of which rank, then the size and SHA-256 of the index. A state that several ranks share is one blob.
Whoever reads the file begins at its end, so a file that was cut off has no index, and a blob that has changed does not
have its SHA-256.

Rank 0 writes. The others send it, one after the other, what it has not got yet, so it never holds more than two states.
The file gets its name only when it is complete and on the disk, and the one before it stays.
"""

import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar, final

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from real import parcels
from simdist.errors import RunError

__all__ = ["Checkpoints", "Job", "Resumed"]

T = TypeVar("T")

_HEAD = b"simdist checkpoint 1\n"
_END = 8 + 32  # size of the index, and its SHA-256
_N_KEPT = 2


@dataclass(frozen=True, slots=True)
class Job:
    """What a checkpoint belongs to; it is of no use to any other.

    Args:
        plan: Name of the plan, for people.
        digest: Of the plan.
        world_size: Ranks.
        model: See `real.states.fingerprint`.
    """

    plan: str
    digest: str
    world_size: int
    model: str

    def __str__(self) -> str:
        return f"plan {self.plan} ({self.digest[:12]}) on {self.world_size} ranks, model {self.model}"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where to go on.

    Args:
        step: The next step.
        sections: The packed state of this rank, by section.
    """

    step: int
    sections: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Blob:
    at: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Index:
    """The end of a file; `ranks[r]` says which blob each section of rank r is."""

    step: int
    job: Job
    blobs: list[_Blob]
    ranks: list[dict[str, int]]


class _DamagedError(Exception):
    """A file is not a complete checkpoint."""


@final
class Checkpoints:
    """The checkpoints of one job.

    Args:
        folder: Where they are; only rank 0 needs to reach it.
        job: What they belong to.
        rank: This rank.
        group: Of all ranks, able to move tensors of the host, and more patient than rank 0 is slow to write.
        patiently: Calls a function that waits for other ranks, and ends the wait if one of them has failed.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        patiently: Callable[[Callable[[], None]], None],
    ) -> None:
        self._folder, self._job, self._rank = folder, job, rank
        self._group, self._patiently = group, patiently

    def save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        """Write a checkpoint; all ranks take part.

        Args:
            step: The next step.
            sections: The packed state of this rank; the same sections on every rank.

        Raises:
            RunError: It cannot be written; all ranks learn so.
        """
        self._patiently(lambda: self._save(step, sections))

    def resume(self) -> Resumed | None:
        """Return where to go on, from the newest complete checkpoint; None if there is none. All ranks take part.

        Raises:
            RunError: It is of another job, or all that there are are damaged.
        """
        found: list[Resumed | None] = []
        self._patiently(lambda: found.append(self._resume()))
        return found[0]

    def _save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        row = torch.stack([_digest(parcel) for parcel in sections.values()])
        owners = _owners(parcels.gather_rows(row, group=self._group))
        mine = list(sections.values())
        if self._rank:
            for rank, section in dict.fromkeys(owners):
                if rank == self._rank:
                    parcels.send(mine[section], dst=0, group=self._group)
            self._say("")
            return
        received = (
            (sha, mine[section] if rank == 0 else parcels.recv(src=rank, group=self._group))
            for (rank, section), sha in _first(owners)
        )
        self._say(self._write(step, list(sections), owners, received))

    def _say(self, problem: str) -> None:
        if problem := parcels.broadcast_text(problem, group=self._group):
            raise RunError(problem)

    def _write(
        self, step: int, names: list[str], owners: list[tuple[int, int]], received: Iterator[tuple[str, Tensor]]
    ) -> str:
        """Write what arrives, and all the same take what arrives after an error; return the error, if any."""
        problem = ""
        path = self._folder / _name(step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _replacing(path) as file:
                blobs = _write_blobs(file, received)
                numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
                n = len(names)
                ranks = [
                    {name: numbers[owners[rank * n + at]] for at, name in enumerate(names)}
                    for rank in range(self._job.world_size)
                ]
                _write_index(file, _Index(step, self._job, blobs, ranks))
            self._forget_old()
        except OSError as error:
            problem = f"{path}: cannot be written: {error.strerror or error}"
        for _ in received:
            pass
        return problem

    def _forget_old(self) -> None:
        for path in self._files()[_N_KEPT:]:
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Return the checkpoints that there are, newest first."""
        return sorted(self._folder.glob("step-*.ckpt"), reverse=True)

    def _resume(self) -> Resumed | None:
        chosen = self._choose() if self._rank == 0 else None
        answer = json.loads(parcels.broadcast_text(json.dumps(_said(chosen)), group=self._group))
        if answer["problem"]:
            raise RunError(answer["problem"])
        if answer["step"] is None:
            return None
        if not isinstance(chosen, tuple):
            return Resumed(answer["step"], {name: parcels.recv(src=0, group=self._group) for name in answer["names"]})
        path, index = chosen
        with path.open("rb") as file:
            for rank, sections in enumerate(index.ranks[1:], start=1):
                for name in answer["names"]:
                    parcels.send(_read_blob(file, index.blobs[sections[name]]), dst=rank, group=self._group)
            mine = {name: _read_blob(file, index.blobs[number]) for name, number in index.ranks[0].items()}
        return Resumed(index.step, mine)

    def _choose(self) -> tuple[Path, _Index] | str | None:
        """Return the newest complete checkpoint, what is wrong with all, or None if there is none."""
        damaged: list[str] = []
        for path in self._files():
            try:
                index = _read_index(path)
            except (_DamagedError, OSError) as error:
                damaged.append(f"{path}: {error}")
                continue
            if index.job != self._job:
                return (
                    f"{path} is of {index.job}; this is {self._job}: go on as that one, or begin anew in another folder"
                )
            for text in damaged:
                warnings.warn(f"{text}: going on from {path}", RuntimeWarning, stacklevel=2)
            return path, index
        if damaged:
            return f"no checkpoint is complete: {'; '.join(damaged)}; delete them to begin anew"
        return None


def _said(chosen: tuple[Path, _Index] | str | None) -> dict[str, object]:
    if isinstance(chosen, tuple):
        return {"problem": "", "step": chosen[1].step, "names": list(chosen[1].ranks[0])}
    return {"problem": chosen or "", "step": None, "names": []}


def _name(step: int) -> str:
    return f"step-{step:010d}.ckpt"


def _digest(parcel: Tensor) -> Tensor:
    """Return the SHA-256 of a parcel, uint8 `[32]`."""
    return torch.frombuffer(bytearray(hashlib.sha256(parcel.numpy()).digest()), dtype=torch.uint8)


def _owners(digests: Tensor) -> list[tuple[str, tuple[int, int]]]:
    raise NotImplementedError
