"""One file that holds the states of all ranks, and knows whether it is complete.

A line that names the format; then *blobs*, one after the other; then an index (JSON) that says which blobs make up the
state of which rank; then the size and SHA-256 of the index. A state that several ranks share is one blob. Whoever reads
the file begins at its end: one that was cut off has no index, and a blob that has changed has not its SHA-256.
"""

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

_HEAD = b"simdist checkpoint 1\n"
_END_NBYTES = 8 + 32
_PIECE_NBYTES = 2**24
_UNFINISHED = ".ckpt.part"


class DamagedError(Exception):
    """A file is not a complete checkpoint."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a checkpoint belongs to; it is of no use to any other.

    Args:
        plan: Name of the plan, for people.
        digest: Of the plan.
        world_size: Ranks.
        model: See `real.checkpoints.states.fingerprint`.
    """

    plan: str = field(compare=False)
    digest: str
    world_size: int
    model: str

    def __str__(self) -> str:
        return f"plan {self.plan} ({self.digest[:12]}) on {self.world_size} ranks, model {self.model}"


@dataclass(frozen=True, slots=True)
class Blob:
    """A stretch of the file.

    Args:
        at: Its first byte.
        nbytes: Its length.
        sha256: Of its contents, in hexadecimal.
    """

    at: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Index:
    """What is in a file.

    Args:
        step: The next step of the job.
        job: What it belongs to.
        blobs: All stretches.
        ranks: For every rank: section -> number of the blob.
    """

    step: int
    job: Job
    blobs: tuple[Blob, ...]
    ranks: tuple[dict[str, int], ...]


_INDEX = TypeAdapter(Index)


def write(
    path: Path, step: int, job: Job, parcels: Iterable[tuple[str, Tensor]], ranks: Sequence[Mapping[str, str]]
) -> None:
    """Write a file; it gets its name when it is complete and on the disk.

    Args:
        path: The file; its folder is made if it is not there.
        step: The next step.
        job: What it belongs to.
        parcels: SHA-256 and contents of every blob, in turn.
        ranks: For every rank: section -> SHA-256.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        blobs: list[Blob] = []
        file.write(_HEAD)
        for sha256, parcel in parcels:
            blobs.append(Blob(file.tell(), len(parcel), sha256))
            file.write(parcel.numpy().data)
        number = {blob.sha256: at for at, blob in enumerate(blobs)}
        states = tuple({name: number[sha256] for name, sha256 in sections.items()} for sections in ranks)
        index = _INDEX.dump_json(Index(step, job, tuple(blobs), states))
        file.write(index + len(index).to_bytes(8, "little") + hashlib.sha256(index).digest())


def forget_unfinished(folder: Path) -> None:
    """Delete what writers have left that were killed while they wrote."""
    for part in folder.glob(f".*{_UNFINISHED}"):
        part.unlink(missing_ok=True)


def read_index(path: Path) -> Index:
    """Read what is in a file, and check all of it.

    Raises:
        DamagedError: It is not complete, or has changed.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        index = _end(file, path.stat().st_size)
        for blob in index.blobs:
            if _sha256(file, blob) != blob.sha256:
                raise DamagedError(f"damaged: bytes {blob.at} to {blob.at + blob.nbytes} have changed")
    return index


def read_blob(path: Path, blob: Blob) -> Tensor:
    """Return a blob as uint8 `[nbytes]`."""
    with path.open("rb") as file:
        file.seek(blob.at)
        return torch.frombuffer(bytearray(file.read(blob.nbytes)), dtype=torch.uint8)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` at the end; an interruption leaves the old one or none."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name is on the disk, too
        finally:
            os.close(folder)
    finally:
        part.unlink(missing_ok=True)


def _end(file: BinaryIO, size: int) -> Index:
    if size < len(_HEAD) + _END_NBYTES or file.read(len(_HEAD)) != _HEAD:
        raise DamagedError("no checkpoint, or cut off at once")
    file.seek(size - _END_NBYTES)
    end = file.read(_END_NBYTES)
    nbytes = int.from_bytes(end[:8], "little")
    if nbytes > size - _END_NBYTES - len(_HEAD):
        raise DamagedError("cut off")
    file.seek(size - _END_NBYTES - nbytes)
    text = file.read(nbytes)
    if hashlib.sha256(text).digest() != end[8:]:
        raise DamagedError("cut off, or its index has changed")
    try:
        index = _INDEX.validate_json(text)
    except ValidationError as error:
        raise DamagedError(f"its index is none: {error.errors()[0]['msg']}") from None
    if not _is_sound(index, size):
        raise DamagedError("its index contradicts itself")
    return index


def _is_sound(index: Index, size: int) -> bool:
    numbers = {number for sections in index.ranks for number in sections.values()}
    return (
        index.step >= 0
        and len(index.ranks) == index.job.world_size >= 1
        and all(blob.at >= 0 and 0 <= blob.nbytes <= size - blob.at for blob in index.blobs)
        and all(0 <= number < len(index.blobs) for number in numbers)
        and all(list(sections) == list(index.ranks[0]) for sections in index.ranks)
    )


def _sha256(file: BinaryIO, blob: Blob) -> str:
    hasher = hashlib.sha256()
    file.seek(blob.at)
    left = blob.nbytes
    while left and (piece := file.read(min(left, _PIECE_NBYTES))):
        hasher.update(piece)
        left -= len(piece)
    return hasher.hexdigest()
