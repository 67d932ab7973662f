"""The checkpoints of one job, from which it resumes as if it had never stopped.

`FOLDER/step-0000000200` is the state of all ranks before step 200, in one of two encodings:

    zip_file        `step-0000000200.ckpt`, one file for all ranks. Only rank 0 uses the folder.
    distributed     a folder, for a model under `fully_shard`. Each rank writes its part, so all of them use it.

The store names checkpoints, locks the folder, keeps the newest two, and passes over damaged ones. All ranks resume from
the same checkpoint.

`real.load_checkpoint` loads the trained model without the job, for other numbers of ranks, schedules and uses.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, final

import torch.distributed as dist
from torch import Tensor

from real.collectives import byte_transfer
from simdist.errors import RunError, naming_file
from simdist.files import locked

_N_KEPT = 2
_NAME = re.compile(r"step-(\d+)(\.ckpt)?")


class DamagedError(Exception):
    """A checkpoint is incomplete, or has changed."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job that a checkpoint belongs to. No other job can use it.

    Args:
        plan: Name of the plan, for messages.
        digest: Digest of the plan.
        world_size: Ranks.
        model: See `real.programs.rank_state.fingerprint`.
    """

    plan: str = field(compare=False)
    digest: str
    world_size: int
    model: str

    def __str__(self) -> str:
        return f"plan {self.plan} ({self.digest[:12]}) on {self.world_size} ranks, model {self.model}"

    def check(self, path: Path, found: "JobIdentity") -> None:
        """Check that a checkpoint belongs to this job.

        Args:
            path: The checkpoint.
            found: The job that it belongs to.

        Raises:
            RunError: It belongs to another one.
        """
        if found != self:
            raise RunError(
                f"{path} is of {found}; this is {self}: go on as that one, or begin in another folder; to take its "
                f"model and optimizer along, call real.load_checkpoint before real.wrap"
            )


@dataclass(frozen=True, slots=True)
class _Resumed:
    """The state to resume from.

    Args:
        step: The next step.
        sections: The packed state of this rank: section -> uint8 `[nbytes]`.
    """

    step: int
    sections: Mapping[str, Tensor]


class Encoding(Protocol):
    """How a checkpoint is written and read.

    Attributes:
        in_folders: A checkpoint is a folder, not a file.
    """

    in_folders: ClassVar[bool]

    def is_complete(self, path: Path) -> bool:
        """Tell whether an existing checkpoint was written to its end."""

    def delete(self, path: Path) -> None:
        """Delete a checkpoint. An interruption leaves it incomplete."""

    def write(self, path: Path, step: int, job: JobIdentity, sections: Mapping[str, Tensor]) -> None:
        """Write a checkpoint. All ranks take part.

        Args:
            path: The file or folder. What is there is replaced.
            step: The next step.
            job: The job that it belongs to.
            sections: The packed state of this rank, with the same sections on all ranks.

        Raises:
            RunError: It cannot be written. All ranks raise it.
        """

    def read(self, path: Path, job: JobIdentity) -> Mapping[str, Tensor]:
        """Return the packed state of this rank. All ranks take part.

        Raises:
            DamagedError: The checkpoint has changed. All ranks raise it if one of them finds so.
            RunError: It cannot be read, or belongs to another job. All ranks raise it.
        """


@final
class CheckpointStore:
    """The checkpoints of one job.

    Args:
        folder: Their folder.
        job: The job that they belong to.
        encoding: How they are written and read.
        group: A group of all ranks that can move tensors of the host, with a timeout that is long enough to write.
        wait: Calls a function that waits for other ranks, and ends the wait if one of them has failed.
        until_closed: Rank 0 locks the folder until this stack is closed.
    """

    def __init__(
        self,
        folder: Path,
        job: JobIdentity,
        encoding: Encoding,
        *,
        group: dist.ProcessGroup | None,
        wait: Callable[[Callable[[], None]], None],
        until_closed: ExitStack,
    ) -> None:
        self._folder = folder
        self._job = job
        self._encoding = encoding
        self._group = group
        self._wait = wait
        self._until_closed = until_closed
        self._rank = dist.get_rank()

    def save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        """Write a checkpoint, and delete old ones. All ranks take part.

        Args:
            step: The next step.
            sections: The packed state of this rank, with the same sections on all ranks.

        Raises:
            RunError: The checkpoint cannot be written. All ranks raise it.
        """
        self._wait(lambda: self._save(step, sections))

    def resume(self) -> _Resumed | None:
        """Return the state in the newest intact checkpoint; None if there is none. All ranks take part.

        Raises:
            RunError: The checkpoint belongs to another job or cannot be read, or all checkpoints are damaged.
        """
        paths: list[Path] = []
        self._wait(lambda: paths.extend(self._agreed()))
        damaged: list[str] = []
        for path in paths:
            sections: dict[str, Tensor] = {}
            try:
                self._wait(partial(self._read, path, sections))
            except DamagedError as error:
                damaged.append(str(error))
                continue
            for text in damaged if self._rank == 0 else ():
                warnings.warn(f"{text}; going on from {path}", RuntimeWarning, stacklevel=2)
            return _Resumed(_step_of(path), sections)
        if damaged:
            raise RunError(f"no checkpoint is complete: {'; '.join(damaged)}; delete them to begin again")
        return None

    def _read(self, path: Path, sections: dict[str, Tensor]) -> None:
        sections |= self._encoding.read(path, self._job)

    def _save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        path = self._folder / f"step-{step:010d}{'' if self._encoding.in_folders else '.ckpt'}"
        self._encoding.write(path, step, self._job, sections)
        with byte_transfer.raising_on_all(group=self._group):
            if self._rank == 0:
                self._delete_old(step)

    def _delete_old(self, step: int) -> None:
        """Keep the newest checkpoints up to a step. Later ones are damaged, as the job has not resumed from them."""
        old = [each for each in self._complete() if _step_of(each) < step]
        with naming_file(self._folder):
            for path in old[_N_KEPT - 1 :]:
                self._encoding.delete(path)

    def _agreed(self) -> list[Path]:
        """Return the complete checkpoints that rank 0 sees, newest first, on all ranks. Lock their folder."""
        names: list[str] = []
        with byte_transfer.raising_on_all(group=self._group):
            if self._rank == 0:
                self._claim()
                names = [path.name for path in self._complete()]
        names = json.loads(byte_transfer.broadcast_text(json.dumps(names), group=self._group))
        return [self._folder / name for name in names]

    def _claim(self) -> None:
        """Make the folder if it is missing, lock it, and delete partial files of killed writers.

        Raises:
            RunError: It cannot be made or written, another job has locked it, or it has the other encoding.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
                raise RunError(f"{self._folder}: this user may not write checkpoints there")
            self._until_closed.enter_context(locked(self._folder))
        except OSError as error:
            raise RunError(f"{self._folder}: cannot hold checkpoints: {error.strerror or error}") from None
        for part in self._folder.glob(".step-*.part"):
            part.unlink(missing_ok=True)
        if others := [each for each in self._all() if each.is_dir() != self._encoding.in_folders]:
            kind = "a model without" if self._encoding.in_folders else "a model under"
            raise RunError(f"{others[0]} is of {kind} fully_shard; begin in another folder")

    def _complete(self) -> list[Path]:
        """Return the complete checkpoints, newest first."""
        return [path for path in self._all() if self._encoding.is_complete(path)]

    def _all(self) -> list[Path]:
        """Return all checkpoints, of both encodings, newest first."""
        found = [path for path in self._folder.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted((path for path in found if path.is_dir() or path.suffix), key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def raise_problems(path: Path, problems: Mapping[int, BaseException], group: dist.ProcessGroup | None) -> None:
    """Raise an error on all ranks if one of them has a problem with a checkpoint.

    Args:
        path: The checkpoint.
        problems: What this rank knows, by rank.
        group: A group of all ranks that can move tensors of the host.

    Raises:
        DamagedError: The checkpoint is damaged, so an older one may be better.
        RunError: It cannot be read, or belongs to another job.
    """
    mine = {
        rank: [_is_damage(error), problem_with(path, error, f" on rank {rank}")] for rank, error in problems.items()
    }
    found: dict[str, tuple[bool, str]] = {}
    for text in byte_transfer.gather_texts(json.dumps(mine), group=group):
        found |= json.loads(text)
    for is_damage, problem in found.values():
        if not is_damage:
            raise RunError(problem)
    if found:
        raise DamagedError("; ".join(problem for _, problem in list(found.values())[:4]))


def _is_damage(error: BaseException) -> bool:
    """Tell whether an older checkpoint may be better. A disk that cannot be read now may be readable later."""
    return not isinstance(error, (OSError, RunError)) or isinstance(error, FileNotFoundError)


def problem_with(path: Path, error: BaseException, on: str = "") -> str:
    """Describe an error that a rank finds in a checkpoint.

    Args:
        path: The checkpoint.
        error: The error.
        on: Names the rank.
    """
    match error:
        case RunError():
            return str(error)
        case DamagedError():
            return f"{path}: {error}"
        case FileNotFoundError():
            return f"{path}: damaged: {Path(str(error.filename)).name} is missing{on}"
        case OSError():
            return f"{path}: cannot be read{on}: {error.strerror or error}"
        case _:
            return f"{path}: damaged: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or the causes of an error of torch.distributed.checkpoint."""
    failures = getattr(error, "failures", {})
    found = [f"rank {rank}: {cause[0]!r}" for rank, cause in sorted(failures.items())]
    return "; ".join(found[:4]) or (str(error).strip().splitlines() or [repr(error)])[0]
