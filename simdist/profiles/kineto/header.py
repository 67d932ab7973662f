"""What a trace tells besides its events, and what the name of its file tells where the trace does not."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the machine.

    Args:
        number: Its index on the machine.
        name: Such as `NVIDIA A100-SXM4-80GB`; empty if the trace does not tell.
    """

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group.

    Args:
        name: By which events refer to it, such as `0`.
        description: Such as `default_pg`; empty if the trace does not tell.
        backend: Such as `cuda:nccl`; empty if the trace does not tell.
        ranks: In ascending order; None if the trace does not tell.
    """

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace tells besides its events.

    Args:
        path: The file.
        schema_version: None if the trace does not tell; so are the others.
        rank: From the trace or, failing that, from the name of the file.
        world_size: How many ranks the job has.
        backend: Such as `nccl` or `gloo`; empty if the trace does not tell.
        groups: Process groups; empty if the trace does not tell.
        hostname: Of the machine, from the trace or, failing that, from the name of the file.
        devices: GPUs of the machine; empty if it has none, or if the trace does not tell.
        has_shapes: The profiler recorded shapes of inputs.
        base_ns: What the trace's clock counts from, as nanoseconds since 1970; None if it counts from an instant that
            the trace does not tell.
        trace_name: The file's name when it was written; empty if the trace does not tell.
        n_events: Events that were read, skipped ones included.
        is_cut: The end of the file is missing.
        notes: What was left out of the trace, and what contradicts itself, a sentence each.
    """

    path: str
    schema_version: int | None
    rank: int | None
    world_size: int | None
    backend: str
    groups: tuple[ProcessGroup, ...]
    hostname: str | None
    devices: tuple[Gpu, ...]
    has_shapes: bool
    base_ns: int | None
    trace_name: str
    n_events: int
    notes: tuple[str, ...]
    is_cut: bool = False


_RANK = re.compile(r"(?<![a-z])(?<!local_)(?<!local-)rank[-_ =]?(\d{1,6})(?!\d)", re.IGNORECASE)
_WORKER = re.compile(r"worker[-_]?(\d{1,6})", re.IGNORECASE)
_HANDLER = re.compile(r"(?P<host>.+)_\d+(?:\.\d+)?\.pt\.trace\.json(?:\.gz)?")


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


def header_of(path: Path, metadata: dict[str, object], *, n_events: int, notes: list[str]) -> Header:
    """Make a header from what stands beside the events; what is of an unexpected type counts as not told."""
    job = _mapping(metadata.get("distributedInfo"))
    rank, named = _at_least(0, job.get("rank")), rank_in_name(path)
    contradiction = [f"the name says rank {named}, the trace says rank {rank}, which counts"]
    return Header(
        path=str(path),
        schema_version=_whole(metadata.get("schemaVersion")),
        rank=named if rank is None else rank,
        world_size=_at_least(1, job.get("world_size")),
        backend=_text(job.get("backend")),
        groups=tuple(_groups(job.get("pg_config"))),
        hostname=_text(metadata.get("host_name")) or hostname_in_name(path),
        devices=tuple(_devices(metadata.get("deviceProperties"))),
        has_shapes=metadata.get("record_shapes") in (1, True, "1", "true"),
        base_ns=_whole(metadata.get("baseTimeNanoseconds", metadata.get("baseTimeNanosecond"))),
        trace_name=_text(metadata.get("traceName")),
        n_events=n_events,
        notes=tuple(notes + (contradiction if None not in (rank, named) and rank != named else [])),
    )


def _groups(value: object) -> list[ProcessGroup]:
    """Read process groups from a list or, in older traces, from a mapping of names."""
    if isinstance(value, dict):
        value = [{"pg_name": name, **_mapping(config)} for name, config in value.items()]
    return [
        ProcessGroup(
            _text(each.get("pg_name")), _text(each.get("pg_desc")), _text(each.get("backend_config")), _ranks(each)
        )
        for each in _mappings(value)
    ]


def _ranks(group: dict[str, object]) -> tuple[int, ...] | None:
    """Return the ranks of a group, unless the profiler cut their list short."""
    value = group.get("ranks")
    ranks = [_whole(each) for each in value] if isinstance(value, list) else []
    told = [rank for rank in ranks if rank is not None]
    size = _whole(group.get("pg_size", group.get("group_size")))
    is_whole = bool(told) and len(told) == len(ranks) and size in (None, len(told))
    return tuple(sorted(told)) if is_whole else None


def _devices(value: object) -> list[Gpu]:
    numbered = [(_whole(each.get("id")), _text(each.get("name"))) for each in _mappings(value)]
    return [Gpu(number, name) for number, name in numbered if number is not None]


def _mappings(value: object) -> list[dict[str, object]]:
    return [_mapping(each) for each in value] if isinstance(value, list) else []


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _at_least(least: int, value: object) -> int | None:
    number = _whole(value)
    return number if number is not None and number >= least else None


def _whole(value: object) -> int | None:
    """Return a whole number that may be written as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
        return int(value)
    return value if isinstance(value, int) else None
