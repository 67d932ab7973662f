"""Checkpoints of a model under `fully_shard`, by torch.distributed.checkpoint: each rank writes and reads its own part.

`FOLDER/step-0000000200/` is the state before step 200:

    copy0.model.NAME, copy0.optimizer...    of each copy of the model, as sharded tensors
    rank0.carried, rank0.random, ...        of each rank, as bytes: what plans carry between steps, random numbers, ...
    simdist.json                            the job; rank 0 writes it last, so a folder with it is complete

All ranks need to reach the folder. torch reads a part of it by pickle, which may execute code.
"""

import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from real.checkpoints.checkpoint import DamagedError, JobIdentity, Resumed, check_job, claim
from real.collectives import byte_transfer
from simdist.errors import RunError, naming_file
from simdist.files import open_regular, replacing

_N_KEPT = 2
_INDEX_NAME = "simdist.json"


@dataclass(frozen=True, slots=True)
class ShardedIndex:
    """What a folder is a checkpoint of.

    Args:
        step: The next step of the job.
        job: The job that it belongs to.
    """

    step: int
    job: JobIdentity


_INDEX = TypeAdapter(ShardedIndex)


@dataclass(frozen=True, slots=True)
class Metadata:
    """What torch stores of a checkpoint.

    Args:
        tensors: Size and type of each tensor, by name.
        parts: Name of the tensor and place in a file, for each part of a tensor.
    """

    tensors: Mapping[str, Any]
    parts: Sequence[tuple[str, Any]]

    def places_of(self, prefix: str) -> list[Any]:
        """Return the places of the tensors whose names begin so."""
        return [place for name, place in self.parts if name.startswith(prefix)]

    def places_for(self, rank: int, world_size: int) -> list[Any]:
        """Return the places in the files that a rank checks, so that all ranks together check all of them."""
        names = sorted({place.relative_path for _, place in self.parts})
        share = {*names[rank::world_size]}
        return [place for _, place in self.parts if place.relative_path in share]


@dataclass(frozen=True, slots=True)
class LearnedOfCopy:
    """The sharded state of one copy of a model.

    Args:
        module: The model.
        optimizer: Its optimizer.
        copy: Number of the copy that this rank belongs to.
        reshard: Frees gathered parameters.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    copy: int
    reshard: Callable[[], None]

    def get(self) -> dict[str, Any]:
        """Return the state, as torch.distributed.checkpoint takes it."""
        first = self.optimizer.param_groups[0]["params"][0]
        with _gradients({first: torch.zeros_like(first) if first.grad is None else first.grad}):
            return self._get()  # with a gradient, torch does not step an optimizer that has no state, such as SGD

    def made(self) -> dict[str, Any]:
        """Return a state to load into. If the optimizer has none yet, torch lets it do a step that changes nothing."""
        updated = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        with _gradients(dict.fromkeys(updated)):
            return self._get()

    def set(self, state: Mapping[str, Any]) -> None:
        """Take a state that `get` returned and torch has loaded."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = state[f"copy{self.copy}"]
        set_state_dict(
            self.module, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )

    def _get(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self.reshard()
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {f"copy{self.copy}": {"model": model, "optimizer": optimizer}}


@contextmanager
def _gradients(wanted: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Let parameters have other gradients for a while."""
    kept = {parameter: parameter.grad for parameter in wanted}
    try:
        for parameter, gradient in wanted.items():
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient


@final
class ShardedCheckpoints:
    """The checkpoints of one job whose model is sharded.

    Args:
        folder: Their folder, which all ranks reach.
        job: The job that they belong to.
        learned: The sharded state.
        group: A group of all ranks that can move tensors of the host, with a timeout that is long enough to write.
        wait: Calls a function that waits for other ranks, and ends the wait if one of them has failed.
        until_closed: Rank 0 locks the folder until this stack is closed.
    """

    def __init__(
        self,
        folder: Path,
        job: JobIdentity,
        learned: LearnedOfCopy,
        *,
        group: dist.ProcessGroup | None,
        wait: Callable[[Callable[[], None]], None],
        until_closed: ExitStack,
    ) -> None:
        self._folder = folder
        self._job = job
        self._learned = learned
        self._group = group
        self._wait = wait
        self._until_closed = until_closed
        self._rank = dist.get_rank()

    def save(self, step: int, sections: Mapping[str, Tensor]) -> None:
        """Write a checkpoint; all ranks take part.

        Args:
            step: The next step.
            sections: Further state of this rank, as bytes.

        Raises:
            RunError: The checkpoint cannot be written.
        """
        state = {**self._learned.get(), f"rank{self._rank}": dict(sections)}
        self._wait(lambda: self._save(step, state))

    def resume(self) -> Resumed | None:
        """Load the newest intact checkpoint, and return what belongs to this rank alone; None if there is none.

        All ranks take part.

        Raises:
            RunError: The checkpoint belongs to another job or cannot be read, or all checkpoints are damaged.
        """
        steps: list[int] = []
        self._wait(lambda: steps.extend(self._complete_steps()))
        state = self._learned.made() if steps else {}
        damaged: list[str] = []
        for step in steps:
            sections: dict[str, Tensor] = {}
            state[f"rank{self._rank}"] = sections
            try:
                self._wait(partial(self._load, step, state, sections))
            except DamagedError as error:
                damaged.append(str(error))
                continue
            for text in damaged if self._rank == 0 else ():
                warnings.warn(f"{text}; going on from {self._path(step)}", RuntimeWarning, stacklevel=2)
            self._learned.set(state)
            return Resumed(step, sections)
        if damaged:
            raise RunError(f"no checkpoint is complete: {'; '.join(damaged)}; delete them to begin again")
        return None

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:010d}"

    def _save(self, step: int, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self._path(step)
        problem = ""
        if self._rank == 0:
            try:
                with naming_file(path):
                    self._prepare(path)
            except RunError as error:
                problem = str(error)
        byte_transfer.raise_on_all(problem, group=self._group)
        try:
            saved = save(state, checkpoint_id=path, process_group=self._group)
        except CheckpointException as error:
            raise RunError(f"{path}: cannot be written: {_first_line(error)}") from None
        if self._rank == 0:
            problem = self._complete(path, step, {info.relative_path for info in saved.storage_data.values()})
        byte_transfer.raise_on_all(problem, group=self._group)

    def _prepare(self, path: Path) -> None:
        """Delete what a killed job has left there."""
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)

    def _complete(self, path: Path, step: int, files: set[str]) -> str:
        """Write the index, and delete old checkpoints. Return an error, if any."""
        if missing := sorted(name for name in files if not (path / name).exists()):
            return (
                f"{path}: rank 0 does not see {', '.join(missing[:4])}, which other ranks have written: each rank of a "
                f"sharded model writes its part, so the folder must be on a disk that all of them share"
            )
        try:
            with naming_file(path), replacing(path / _INDEX_NAME, on_disk=True) as part:
                part.write_bytes(_INDEX.dump_json(ShardedIndex(step, self._job)))
            with naming_file(self._folder):
                for old in self._folders()[_N_KEPT:]:
                    (old / _INDEX_NAME).unlink()  # from here on it is incomplete
                    shutil.rmtree(old)
        except RunError as error:
            return str(error)
        return ""

    def _folders(self) -> list[Path]:
        """Return the complete checkpoints, newest first."""
        return sorted((each.parent for each in self._folder.glob(f"step-*/{_INDEX_NAME}")), reverse=True)

    def _complete_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, newest first, on all ranks."""
        problem = ""
        steps: list[int] = []
        if self._rank == 0:
            try:
                claim(self._folder, self._until_closed)
                if files := sorted(self._folder.glob("step-*.ckpt")):
                    raise RunError(f"{files[-1]} is of a model without fully_shard; begin in another folder")
                steps = [int(each.name.removeprefix("step-")) for each in self._folders()]
            except RunError as error:
                problem = str(error)
        byte_transfer.raise_on_all(problem, group=self._group)
        return list(json.loads(byte_transfer.broadcast_text(json.dumps(steps), group=self._group)))

    def _load(self, step: int, state: dict[str, Any], sections: dict[str, Tensor]) -> None:
        """Fill a state, and the sections of this rank in it, whose sizes the checkpoint knows.

        Raises:
            DamagedError: The checkpoint has changed. All ranks raise it if one of them finds so.
            RunError: It cannot be read, or belongs to another job.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        path = self._path(step)
        problems: dict[int, BaseException] = {}
        try:
            if self._rank == 0:
                check_job(path, _read_index(path).job, self._job)
            metadata = _metadata_of(path)
            sections |= _sections_of(metadata, self._rank)
            _check_places(path, metadata.places_for(self._rank, self._job.world_size))
        except Exception as error:  # also what a changed file makes torch raise
            problems[self._rank] = error
        self._raise_on_all(path, problems)
        try:
            load(state, checkpoint_id=path, process_group=self._group)
        except CheckpointException as error:  # all ranks raise the same
            problems = {rank: cause for rank, (cause, _) in error.failures.items()}
        self._raise_on_all(path, problems)

    def _raise_on_all(self, path: Path, problems: Mapping[int, BaseException]) -> None:
        """Raise an error on all ranks if one of them has a problem with a checkpoint.

        Args:
            path: The checkpoint.
            problems: What this rank knows, by rank.
        """
        told = {rank: [_is_damage(error), _cause(path, error, f" on rank {rank}")] for rank, error in problems.items()}
        found: dict[str, tuple[bool, str]] = {}
        for text in byte_transfer.gather_texts(json.dumps(told), group=self._group):
            found |= json.loads(text)
        for is_damage, cause in found.values():
            if not is_damage:
                raise RunError(cause)
        if found:
            raise DamagedError("; ".join(cause for _, cause in list(found.values())[:4]))


def load_copy(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int) -> int:
    """Load the copy of a rank into a model, sharded or not. Each rank that calls this reads what it needs.

    Args:
        path: Folder of the checkpoint.
        module: The model.
        optimizer: Its optimizer; None leaves out the optimizer's state.
        rank: A rank of the job that wrote the checkpoint.

    Returns:
        The number of finished steps.

    Raises:
        RunError: The checkpoint is not complete, or belongs to another model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        index = _read_index(path)
        world_size = index.job.world_size
        if rank not in range(world_size):
            raise RunError(f"{path}: it has no rank {rank}, of {world_size} from 0")
        copy = _check_copy(path, rank, world_size)
    except (DamagedError, OSError) as error:
        raise RunError(_cause(path, error)) from None
    learned = LearnedOfCopy(module, optimizer, copy, _nothing) if optimizer else None
    state = learned.made() if learned else {f"copy{copy}": {"model": get_model_state_dict(module)}}
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is one process
            load(state, checkpoint_id=path, no_dist=True)
    except (CheckpointException, OSError, ValueError, RuntimeError) as error:
        raise RunError(f"{path} is of {index.job.model}, and does not fit: {_first_line(error)}") from None
    if learned:
        learned.set(state)
    else:
        set_model_state_dict(module, state[f"copy{copy}"]["model"])
    return index.step


def _read_index(path: Path) -> ShardedIndex:
    """Return the index of a checkpoint.

    Raises:
        DamagedError: It has changed.
        OSError: It cannot be read.
    """
    with open_regular(path / _INDEX_NAME) as file:
        content = file.read()
    try:
        return _INDEX.validate_json(content)
    except ValidationError:
        raise DamagedError(f"{_INDEX_NAME} has changed") from None


def _metadata_of(path: Path) -> Metadata:
    """Return what torch stores of a checkpoint's tensors, and where.

    Raises:
        DamagedError: Its file has changed.
        OSError: It cannot be read.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        metadata = FileSystemReader(path).read_metadata()
        return Metadata(
            dict(metadata.state_dict_metadata), [(index.fqn, place) for index, place in metadata.storage_data.items()]
        )
    except OSError:
        raise
    except Exception as error:  # a pickle that was cut off or changed raises any type
        raise DamagedError(f".metadata is cut off or has changed ({_first_line(error)})") from None


def _sections_of(metadata: Metadata, rank: int) -> dict[str, Tensor]:
    """Return empty tensors for what belongs to one rank alone."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    prefix = f"rank{rank}."
    sections = {
        name.removeprefix(prefix): torch.empty(stored.size, dtype=torch.uint8)
        for name, stored in metadata.tensors.items()
        if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }
    if not sections:
        raise DamagedError(f".metadata has nothing of rank {rank}")
    return sections


def _check_places(path: Path, places: Iterable[Any]) -> None:
    """Check parts of tensors. Each is a ZIP archive, whose checksum torch ignores.

    Raises:
        DamagedError: A file was cut off, or has changed.
        OSError: It cannot be read.
    """
    for place in places:
        with open_regular(path / place.relative_path) as file:
            file.seek(place.offset)
            _check_part(place.relative_path, file.read(place.length))


def _check_copy(path: Path, rank: int, world_size: int) -> int:
    """Check the copy of the model that a rank had, and return its number.

    Raises:
        DamagedError: It has changed.
        OSError: It cannot be read.
    """
    metadata = _metadata_of(path)
    n_copies = len({name.split(".")[0] for name in metadata.tensors if name.startswith("copy")})
    if not n_copies:
        raise DamagedError(".metadata has no model")
    copy = rank // (world_size // n_copies)
    _check_places(path, metadata.places_of(f"copy{copy}."))
    return copy


def _check_part(name: str, content: bytes) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            changed = archive.testzip()
    except Exception as error:  # zipfile raises many types for a file that is not an archive
        raise DamagedError(f"{name} is cut off or has changed ({_first_line(error)})") from None
    if changed:
        raise DamagedError(f"{name} has changed")


def _is_damage(error: BaseException) -> bool:
    """Return whether an older checkpoint may be better. A disk that cannot be read now may be readable later."""
    return not isinstance(error, (OSError, RunError)) or isinstance(error, FileNotFoundError)


def _cause(path: Path, error: BaseException, on: str = "") -> str:
    """Return what is wrong with a checkpoint, as a rank finds it."""
    match error:
        case RunError():
            return str(error)
        case FileNotFoundError():
            return f"{path}: damaged: {Path(str(error.filename)).name} is missing{on}"
        case OSError():
            return f"{path}: cannot be read{on}: {error.strerror or error}"
        case _:
            return f"{path}: damaged: {_first_line(error)}"


def _nothing() -> None:
    pass


def _first_line(error: BaseException) -> str:
    """Return the causes of an error of torch.distributed.checkpoint without their tracebacks."""
    failures = getattr(error, "failures", {})
    found = [f"rank {rank}: {cause[0]!r}" for rank, cause in sorted(failures.items())]
    return "; ".join(found[:4]) or (str(error).strip().splitlines() or [repr(error)])[0]
