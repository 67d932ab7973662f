"""Checkpoints of a model under `fully_shard`, by torch.distributed.checkpoint: each rank writes and reads its own part.

`FOLDER/step-0000000200/` is the state before step 200:

    copy0.model.NAME, copy0.optimizer...    of each copy of the model, as sharded tensors
    rank0.carried, rank0.random, ...        of each rank, as bytes: what plans carry between steps, random numbers, ...
    simdist.json                            the job; rank 0 writes it last, so a folder with it is complete

All ranks need to reach the folder. torch reads a part of it by pickle, which may execute code.
"""

import io
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from real.checkpoints.store import DamagedError, JobIdentity, first_line, problem_with, raise_problems
from real.collectives import byte_transfer
from simdist.errors import RunError, naming_file
from simdist.files import open_regular, replacing

_INDEX_NAME = "simdist.json"


@dataclass(frozen=True, slots=True)
class _Index:
    """What a folder is a checkpoint of.

    Args:
        step: The next step of the job.
        job: The job that it belongs to.
    """

    step: int
    job: JobIdentity


_INDEX = TypeAdapter(_Index)


@dataclass(frozen=True, slots=True)
class _Metadata:
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
@dataclass(frozen=True, slots=True)
class DistributedEncoding:
    """Writes and reads folders by torch.distributed.checkpoint.

    Args:
        learned: The sharded state.
        group: A group of all ranks that can move tensors of the host.
    """

    in_folders: ClassVar[bool] = True
    learned: LearnedOfCopy
    group: dist.ProcessGroup | None

    def is_complete(self, path: Path) -> bool:
        """Tell whether a folder has its index, which is written last."""
        return (path / _INDEX_NAME).exists()

    def delete(self, path: Path) -> None:
        """Delete a folder, its index first."""
        (path / _INDEX_NAME).unlink()
        shutil.rmtree(path)

    def write(self, path: Path, step: int, job: JobIdentity, sections: Mapping[str, Tensor]) -> None:
        """Write a checkpoint, see `Encoding`."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        rank = dist.get_rank()
        state = {**self.learned.get(), f"rank{rank}": dict(sections)}
        with byte_transfer.raising_on_all(group=self.group):
            if rank == 0:
                _make_empty(path)
        try:
            saved = save(state, checkpoint_id=path, process_group=self.group)
        except CheckpointException as error:
            raise RunError(f"{path}: cannot be written: {first_line(error)}") from None
        with byte_transfer.raising_on_all(group=self.group):
            if rank == 0:
                _check_written(path, {info.relative_path for info in saved.storage_data.values()})
                with naming_file(path), replacing(path / _INDEX_NAME, on_disk=True) as part:
                    part.write_bytes(_INDEX.dump_json(_Index(step, job)))

    def read(self, path: Path, job: JobIdentity) -> Mapping[str, Tensor]:
        """Load the model and its optimizer, and return the packed state of this rank, see `Encoding`."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        rank = dist.get_rank()
        sections: dict[str, Tensor] = {}
        problems: dict[int, BaseException] = {}
        try:
            if rank == 0:
                job.check(path, _read_index(path).job)
            metadata = _metadata_of(path)
            sections = _sections_of(metadata, rank)
            _check_places(path, metadata.places_for(rank, job.world_size))
        except Exception as error:  # also what a changed file makes torch raise
            problems[rank] = error
        raise_problems(path, problems, self.group)
        state = {**self.learned.made(), f"rank{rank}": sections}
        try:
            load(state, checkpoint_id=path, process_group=self.group)
        except CheckpointException as error:  # all ranks raise the same
            problems = {rank: cause for rank, (cause, _) in error.failures.items()}
        raise_problems(path, problems, self.group)
        self.learned.set(state)
        return sections


def _make_empty(path: Path) -> None:
    """Make a folder without what a killed job has left there.

    Raises:
        RunError: It cannot be made.
    """
    with naming_file(path):
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)


def _check_written(path: Path, names: set[str]) -> None:
    """Check on rank 0 that the files of all ranks are there.

    Raises:
        RunError: Some are missing.
    """
    if missing := sorted(name for name in names if not (path / name).exists()):
        raise RunError(
            f"{path}: rank 0 does not see {', '.join(missing[:4])}, which other ranks have written: each rank of a "
            f"sharded model writes its part, so the folder must be on a disk that all of them share"
        )


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
        raise RunError(problem_with(path, error)) from None
    learned = LearnedOfCopy(module, optimizer, copy, _nothing) if optimizer else None
    state = learned.made() if learned else {f"copy{copy}": {"model": get_model_state_dict(module)}}
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is one process
            load(state, checkpoint_id=path, no_dist=True)
    except (CheckpointException, OSError, ValueError, RuntimeError) as error:
        raise RunError(f"{path} is of {index.job.model}, and does not fit: {first_line(error)}") from None
    if learned:
        learned.set(state)
    else:
        set_model_state_dict(module, state[f"copy{copy}"]["model"])
    return index.step


def _read_index(path: Path) -> _Index:
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
        raise DamagedError(f"damaged: {_INDEX_NAME} has changed") from None


def _metadata_of(path: Path) -> _Metadata:
    """Return what torch stores of a checkpoint's tensors, and where.

    Raises:
        DamagedError: Its file has changed.
        OSError: It cannot be read.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        metadata = FileSystemReader(path).read_metadata()
        return _Metadata(
            dict(metadata.state_dict_metadata), [(index.fqn, place) for index, place in metadata.storage_data.items()]
        )
    except OSError:
        raise
    except Exception as error:  # a pickle that was cut off or changed raises any type
        raise DamagedError(f"damaged: .metadata is cut off or has changed ({first_line(error)})") from None


def _sections_of(metadata: _Metadata, rank: int) -> dict[str, Tensor]:
    """Return empty tensors for what belongs to one rank alone."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    prefix = f"rank{rank}."
    sections = {
        name.removeprefix(prefix): torch.empty(stored.size, dtype=torch.uint8)
        for name, stored in metadata.tensors.items()
        if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }
    if not sections:
        raise DamagedError(f"damaged: .metadata has nothing of rank {rank}")
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
        raise DamagedError("damaged: .metadata has no model")
    copy = rank // (world_size // n_copies)
    _check_places(path, metadata.places_of(f"copy{copy}."))
    return copy


def _check_part(name: str, content: bytes) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            changed = archive.testzip()
    except Exception as error:  # zipfile raises many types for a file that is not an archive
        raise DamagedError(f"damaged: {name} is cut off or has changed ({first_line(error)})") from None
    if changed:
        raise DamagedError(f"damaged: {name} has changed")


def _nothing() -> None:
    pass
