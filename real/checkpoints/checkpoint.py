"""Checkpoints: one file for all ranks, from which a run resumes as if it had never stopped.

`FOLDER/step-0000000200.ckpt` is the state of all ranks before step 200: a ZIP archive without compression. Its members
are named by the SHA-256 of their contents, so common contents of several ranks are stored once. `index.json` maps each
rank's state to its members. A ZIP archive ends with its directory, which has a checksum for each member. So a truncated
or changed archive is detected.

Rank 0 writes the file. The others send, one after the other, the contents that rank 0 does not have yet, so it never
holds more than two states. The previous file is kept in case the newest is damaged. To resume, rank 0 reads the newest
complete file and sends each rank its state. So only its machine needs access to the folder.

`real.load_checkpoint` loads the trained model without the job, for other numbers of ranks, schedules and uses.
"""

import hashlib
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from real.collectives import byte_transfer
from simdist.errors import RunError, naming_file
from simdist.files import MAX_FILE_NBYTES, locked, open_regular, replacing

_N_KEPT = 2
_INDEX_NAME = "index.json"


class DamagedError(Exception):
    """A file is not a complete checkpoint."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job that a checkpoint belongs to. No other job can use it.

    Args:
        plan: Name of the plan, for messages.
        digest: Digest of the plan.
        world_size: Ranks.
        model: See `real.checkpoints.rank_state.fingerprint`.
    """

    plan: str = field(compare=False)
    digest: str
    world_size: int
    model: str

    def __str__(self) -> str:
        return f"plan {self.plan} ({self.digest[:12]}) on {self.world_size} ranks, model {self.model}"


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The contents of a checkpoint.

    Args:
        step: The next step of the job.
        job: The job that it belongs to.
        ranks: For each rank: section -> SHA-256, the name of a member.
    """

    step: int
    job: JobIdentity
    ranks: tuple[dict[str, str], ...]


_INDEX = TypeAdapter(CheckpointIndex)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state to resume from.

    Args:
        step: The next step.
        sections: The packed state of this rank: section -> uint8 `[nbytes]`.
    """

    step: int
    sections: Mapping[str, Tensor]


def write(path: Path, index: CheckpointIndex, members: Iterable[tuple[str, Tensor]]) -> None:
    """Write a checkpoint, and rename it when it is complete and on the disk.

    Args:
        path: The file; its folder is created if missing.
        index: Its contents.
        members: SHA-256 and contents, uint8 `[nbytes]`, of each member.

    Raises:
        RunError: The file cannot be written.
    """
    with naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, on_disk=True) as part, zipfile.ZipFile(part, "w") as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content.numpy().data)
        archive.writestr(zipfile.ZipInfo(_INDEX_NAME), _INDEX.dump_json(index))


def read_index(path: Path) -> CheckpointIndex:
    """Read the contents of a checkpoint, and check all of it.

    Raises:
        DamagedError: The file is incomplete, or has changed.
        OSError: The file cannot be opened.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                _check_sizes(archive, os.fstat(file.fileno()).st_size)
                changed = archive.testzip()
                index = _INDEX.validate_json(archive.read(_INDEX_NAME))
                missing = {name for sections in index.ranks for name in sections.values()} - set(archive.namelist())
        except Exception as error:  # zipfile raises many types for a file that is not an archive
            raise DamagedError(f"cut off or changed: {error}") from None
    if changed or missing or len(index.ranks) != index.job.world_size:
        raise DamagedError(f"damaged: {changed or ', '.join(missing) or 'its index'} has changed")
    return index


def _check_sizes(archive: zipfile.ZipFile, file_nbytes: int) -> None:
    """Refuse members larger than the file, because `write` compresses nothing."""
    members = archive.infolist()
    nbytes = sum(info.file_size for info in members)
    if any(info.compress_type != zipfile.ZIP_STORED for info in members) or nbytes > file_nbytes:
        raise ValueError(f"its members have {nbytes:,} bytes, the file {file_nbytes:,}; a checkpoint is not compressed")
    if archive.getinfo(_INDEX_NAME).file_size > MAX_FILE_NBYTES:
        raise ValueError(f"its index has more than {MAX_FILE_NBYTES:,} bytes")


@final
class Checkpoints:
    """The checkpoints of one job.

    Args:
        folder: Their folder; only rank 0 uses it.
        job: The job that they belong to.
        group: A group of all ranks that can move tensors of the host, with a timeout that is long enough for rank 0 to
            write.
        wait: Calls a function that waits for other ranks, and ends the wait if one of them has failed.
        until_closed: Rank 0 locks the folder until this stack is closed.
    """

    def __init__(
        self,
        folder: Path,
        job: JobIdentity,
        *,
        group: dist.ProcessGroup | None,
        wait: Callable[[Callable[[], None]], None],
        until_closed: ExitStack,
    ) -> None:
        self._folder = folder
        self._job = job
        self._until_closed = until_closed
        self._group = group
        self._wait = wait
        self._rank = dist.get_rank()

    def save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        """Write a checkpoint; all ranks take part.

        Args:
            step: The next step.
            sections: The packed state of this rank, with the same sections on all ranks.

        Raises:
            RunError: The checkpoint cannot be written. All ranks raise it.
        """
        self._wait(lambda: self._save(step, sections))

    def resume(self) -> Resumed | None:
        """Return the state in the newest complete checkpoint; None if there is none. All ranks take part.

        Raises:
            RunError: The checkpoint belongs to another job, or all checkpoints are damaged.
        """
        found: list[Resumed | None] = []
        self._wait(lambda: found.append(self._resume()))
        return found[0]

    def _save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        mine = list(sections.values())
        rows = byte_transfer.gather_rows(torch.stack([_sha256(content) for content in mine]), group=self._group)
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
        byte_transfer.raise_on_all(problem, group=self._group)

    def _write(self, step: int, arriving: Iterator[tuple[str, Tensor]], ranks: list[dict[str, str]]) -> str:
        """Write the arriving contents, and return an error, if any."""
        path = self._folder / f"step-{step:010d}.ckpt"
        try:
            write(path, CheckpointIndex(step, self._job, tuple(ranks)), arriving)
            older = [each for each in self._files() if each.name < path.name]
            with naming_file(path):
                for old in older[_N_KEPT - 1 :]:
                    old.unlink(missing_ok=True)
        except RunError as error:
            for _ in arriving:  # the others send it anyway
                pass
            return str(error)
        return ""

    def _files(self) -> list[Path]:
        """Return the existing checkpoints, newest first."""
        return sorted(self._folder.glob("step-*.ckpt"), reverse=True)

    def _resume(self) -> Resumed | None:
        problem = ""
        found = None
        if self._rank == 0:
            try:
                claim(self._folder, self._until_closed)
                found = self._find()
            except RunError as error:
                problem = str(error)
        byte_transfer.raise_on_all(problem, group=self._group)
        known = {"step": found[1].step, "names": list(found[1].ranks[0])} if found else None
        known = json.loads(byte_transfer.broadcast_text(json.dumps(known), group=self._group))
        if known is None:
            return None
        if found:
            return self._distribute(*found)
        return Resumed(known["step"], {name: byte_transfer.recv(src=0, group=self._group) for name in known["names"]})

    def _distribute(self, path: Path, index: CheckpointIndex) -> Resumed:
        with zipfile.ZipFile(path) as archive:
            for rank in range(1, self._job.world_size):
                for name in index.ranks[rank].values():
                    byte_transfer.send(content_of(archive, name), dst=rank, group=self._group)
            return Resumed(index.step, {section: content_of(archive, name) for section, name in index.ranks[0].items()})

    def _find(self) -> tuple[Path, CheckpointIndex] | None:
        """Return the newest complete checkpoint, None if there is no file; delete partial files of killed writers."""
        for part in self._folder.glob(".*.ckpt.*.part"):
            part.unlink(missing_ok=True)
        if folders := sorted(each for each in self._folder.glob("step-*") if each.is_dir()):
            raise RunError(f"{folders[-1]} is of a model under fully_shard; begin in another folder")
        damaged: list[str] = []
        for path in self._files():
            try:
                index = read_index(path)
            except DamagedError as error:
                damaged.append(f"{path}: {error}")
                continue
            check_job(path, index.job, self._job)
            for text in damaged:
                warnings.warn(f"{text}; going on from {path}", RuntimeWarning, stacklevel=2)
            return path, index
        if damaged:
            raise RunError(f"no checkpoint is complete: {'; '.join(damaged)}; delete them to begin again")
        return None


def claim(folder: Path, until_closed: ExitStack) -> None:
    """Make a folder for checkpoints if it is missing, and lock it.

    Raises:
        RunError: It cannot be made or written, or another job has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise RunError(f"{folder}: this user may not write checkpoints there")
        until_closed.enter_context(locked(folder))
    except OSError as error:
        raise RunError(f"{folder}: cannot hold checkpoints: {error.strerror or error}") from None


def check_job(path: Path, found: JobIdentity, mine: JobIdentity) -> None:
    """Check that a checkpoint belongs to this job.

    Args:
        path: The checkpoint.
        found: The job that it belongs to.
        mine: This job.

    Raises:
        RunError: It belongs to another one.
    """
    if found != mine:
        raise RunError(
            f"{path} is of {found}; this is {mine}: go on as that one, or begin in another folder; to take its model "
            f"and optimizer along, call real.load_checkpoint before real.wrap"
        )


def _first_owners(sha256: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Return the first rank with each content, and its place in that rank's row: SHA-256 -> (rank, place)."""
    owners: dict[str, tuple[int, int]] = {}
    for rank, row in enumerate(sha256):
        for at, each in enumerate(row):
            owners.setdefault(each, (rank, at))
    return owners


def content_of(archive: zipfile.ZipFile, name: str) -> Tensor:
    """Return the content of a member, uint8 `[nbytes]`."""
    return torch.frombuffer(bytearray(archive.read(name)), dtype=torch.uint8)


def _sha256(content: Tensor) -> Tensor:
    """Return the SHA-256 of bytes, uint8 `[32]`."""
    return torch.frombuffer(bytearray(hashlib.sha256(content.numpy().data).digest()), dtype=torch.uint8)
