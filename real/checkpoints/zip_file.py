"""Checkpoints as one file for all ranks: a ZIP archive without compression.

Its members are named by the SHA-256 of their contents, so common contents of several ranks are stored once.
`index.json` maps each rank's state to its members. A ZIP archive ends with its directory, which has a checksum for each
member. So a truncated or changed archive is detected.

Rank 0 writes the file. The others send, one after the other, the contents that rank 0 does not have yet, so it never
holds more than two states. To resume, rank 0 reads the file and sends each rank its state. So only its machine needs
access to the folder.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from real.checkpoints.store import DamagedError, JobIdentity, raise_problems
from real.collectives import byte_transfer
from simdist.errors import RunError, naming_file
from simdist.files import MAX_DOCUMENT_NBYTES, open_regular, replacing

_INDEX_NAME = "index.json"


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


def write_zip(path: Path, index: CheckpointIndex, members: Iterable[tuple[str, Tensor]]) -> None:
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


def read_zip_index(path: Path) -> CheckpointIndex:
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
    """Refuse members larger than the file, because `write_zip` compresses nothing."""
    members = archive.infolist()
    nbytes = sum(info.file_size for info in members)
    if any(info.compress_type != zipfile.ZIP_STORED for info in members) or nbytes > file_nbytes:
        raise ValueError(f"its members have {nbytes:,} bytes, the file {file_nbytes:,}; a checkpoint is not compressed")
    if archive.getinfo(_INDEX_NAME).file_size > MAX_DOCUMENT_NBYTES:
        raise ValueError(f"its index has more than {MAX_DOCUMENT_NBYTES:,} bytes")


@final
@dataclass(frozen=True, slots=True)
class ZipEncoding:
    """Writes and reads ZIP archives.

    Args:
        group: A group of all ranks that can move tensors of the host.
    """

    in_folders: ClassVar[bool] = False
    group: dist.ProcessGroup | None

    def is_complete(self, path: Path) -> bool:
        """Tell that an existing file is complete, because it was renamed when it was."""
        return path.is_file()

    def delete(self, path: Path) -> None:
        """Delete a file."""
        path.unlink(missing_ok=True)

    def write(self, path: Path, step: int, job: JobIdentity, sections: Mapping[str, Tensor]) -> None:
        """Write a checkpoint, see `Encoding`."""
        rank = dist.get_rank()
        mine = list(sections.values())
        rows = byte_transfer.gather_rows(torch.stack([_sha256(content) for content in mine]), group=self.group)
        sha256 = [[bytes(digest.tolist()).hex() for digest in row] for row in rows]
        owners = _first_owners(sha256)
        with byte_transfer.raising_on_all(group=self.group):
            if rank == 0:
                arriving = (
                    (each, byte_transfer.recv(src=owner, group=self.group) if owner else mine[at])
                    for each, (owner, at) in owners.items()
                )
                index = CheckpointIndex(step, job, tuple(dict(zip(sections, row, strict=True)) for row in sha256))
                try:
                    write_zip(path, index, arriving)
                except RunError:
                    for _ in arriving:  # the others send it anyway
                        pass
                    raise
            else:
                for owner, at in owners.values():
                    if owner == rank:
                        byte_transfer.send(mine[at], dst=0, group=self.group)

    def read(self, path: Path, job: JobIdentity) -> Mapping[str, Tensor]:
        """Return the packed state of this rank, see `Encoding`."""
        ranks: tuple[dict[str, str], ...] = ()
        problems: dict[int, BaseException] = {}
        if dist.get_rank() == 0:
            try:
                index = read_zip_index(path)
                job.check(path, index.job)
                ranks = index.ranks
            except (DamagedError, OSError, RunError) as error:
                problems[0] = error
        raise_problems(path, problems, self.group)
        names = json.loads(byte_transfer.broadcast_text(json.dumps(list(ranks[0]) if ranks else []), group=self.group))
        if not ranks:
            return {name: byte_transfer.recv(src=0, group=self.group) for name in names}
        with zipfile.ZipFile(path) as archive:
            for rank in range(1, job.world_size):
                for member in ranks[rank].values():
                    byte_transfer.send(content_of(archive, member), dst=rank, group=self.group)
            return {section: content_of(archive, member) for section, member in ranks[0].items()}


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
