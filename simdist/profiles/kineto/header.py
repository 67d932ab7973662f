"""The rest of a trace besides its events, and what the name of its file tells where the trace does not."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from simdist.profiles.kineto.events import lenient


@dataclass(frozen=True, slots=True)
class Header:
    """The rest of a trace besides its events.

    Args:
        path: The file.
        rank: From the trace or, failing that, from the name of the file; None if neither tells.
        world_size: How many ranks the job has; None if the trace does not tell.
        backend: Such as `nccl` or `gloo`; empty if the trace does not tell.
        groups: Ranks of each process group in ascending order, None where the trace does not tell them; empty if it
            tells no groups.
        hostname: Of the machine; None if the trace does not tell.
        file_host: The host in the name of the file; None if it tells none. Weak: users name files, too.
        gpus: Number of a GPU on the machine -> its name, such as `NVIDIA A100-SXM4-80GB`; empty if it has none, or if
            the trace does not tell.
        n_events: Events that were read, skipped ones included.
        notes: Parts left out of the trace, and contradictions in it, a sentence each.
        is_cut: The end of the file is missing.
    """

    path: str
    rank: int | None
    world_size: int | None
    backend: str
    groups: tuple[tuple[int, ...] | None, ...]
    hostname: str | None
    file_host: str | None
    gpus: dict[int, str]
    n_events: int
    notes: tuple[str, ...]
    is_cut: bool


_RANK = re.compile(r"(?<![a-z])(?<!local_)(?<!local-)rank[-_ =]?(\d{1,6})(?!\d)", re.IGNORECASE)
_WORKER = re.compile(r"worker[-_]?(\d{1,6})", re.IGNORECASE)
_HANDLER = re.compile(r"(?P<host>.+)_\d+\.\d{13,19}\.pt\.trace\.json(?:\.gz)?")  # in ms, or ns since torch 2.1


def rank_in_name(path: Path) -> int | None:
    """Return the rank in the name of a file, or None if it tells none, or several.

    Example:
        >>> rank_in_name(Path("rank-70.Mar_25_09_12.json.gz")), rank_in_name(Path("node1_4711.1690.pt.trace.json"))
        (70, None)
    """
    found = {int(digits) for digits in _RANK.findall(path.name)}
    if not found and (worker := _WORKER.fullmatch(path.name.split(".")[0])):
        found = {int(worker[1])}
    return found.pop() if len(found) == 1 else None


def hostname_in_name(path: Path) -> str | None:
    """Return the host in a name that `torch.profiler.tensorboard_trace_handler` gave: host, process, time."""
    found = _HANDLER.fullmatch(path.name)
    return found["host"] if found and rank_in_name(path) is None else None


class _Metadata(Struct, rename={"job": "distributedInfo", "gpus": "deviceProperties"}):
    host_name: str = ""
    job: dict[str, object] = {}
    gpus: list[object] = []


class _Job(Struct):
    rank: Annotated[int, Meta(ge=0)] | None = None
    world_size: Annotated[int, Meta(ge=1)] | None = None
    backend: str = ""
    pg_config: list[object] | dict[str, object] = []  # older traces map names of groups


class _Gpu(Struct):
    id: int | None = None
    name: str = ""


class _ProcessGroup(Struct):
    ranks: list[int] = []
    pg_size: int | None = None
    group_size: int | None = None  # as older traces call it


def header_of(path: Path, metadata: dict[str, object], *, n_events: int, notes: list[str], is_cut: bool) -> Header:
    """Make a header from what stands beside the events; what is of an unexpected type counts as not told."""
    told = lenient(metadata, _Metadata)
    job, named = lenient(told.job, _Job), rank_in_name(path)
    if None not in (job.rank, named) and job.rank != named:
        notes = [*notes, f"the name says rank {named}, the trace says rank {job.rank}, which counts"]
    gpus = [lenient(each, _Gpu) for each in told.gpus]
    groups = job.pg_config.values() if isinstance(job.pg_config, dict) else job.pg_config
    return Header(
        path=str(path),
        rank=named if job.rank is None else job.rank,
        world_size=job.world_size,
        backend=job.backend,
        groups=tuple(_ranks(lenient(each, _ProcessGroup)) for each in groups),
        hostname=told.host_name or None,
        file_host=hostname_in_name(path),
        gpus={gpu.id: gpu.name for gpu in gpus if gpu.id is not None},
        n_events=n_events,
        notes=tuple(notes),
        is_cut=is_cut,
    )


def _ranks(group: _ProcessGroup) -> tuple[int, ...] | None:
    """Return the ranks of a group, unless the profiler cut their list short."""
    size = group.group_size if group.pg_size is None else group.pg_size
    return tuple(sorted(group.ranks)) if group.ranks and size in (None, len(group.ranks)) else None
