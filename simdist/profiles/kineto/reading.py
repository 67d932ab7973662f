"""Reading a trace of the PyTorch profiler (Kineto): its events in batches, in bounded memory, and its header.

    trace = TraceFile(Path("rank3.pt.trace.json.gz"))
    for batch in trace.batches():
        for event in batch:
            ...
    header = trace.header()

The header comes last because part of it is after the events in the file. If the trace does not state the rank or the
host, the name of its file may.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from simdist.errors import TraceError
from simdist.profiles.kineto.chunks import CHUNK_NBYTES, Chunks, repaired, take
from simdist.profiles.kineto.events import Event, lenient


@dataclass(frozen=True, slots=True)
class Header:
    """A trace without its events.

    Args:
        path: The file.
        rank: Rank from the trace, or else from the name of the file; None if neither states it.
        world_size: Number of ranks of the job; None if the trace does not state it.
        backend: Such as `nccl` or `gloo`; empty if the trace does not state it.
        groups: Ranks of each process group in ascending order, None if not listed; empty without groups.
        hostname: Name of the machine; None if the trace does not state it.
        file_host: The host in the name of the file; None if it has none. Users also name files.
        gpus: Number of a GPU on the machine -> its name, such as `NVIDIA A100-SXM4-80GB`; empty if it has none, or if
            the trace does not state them.
        n_events: Number of events that were read, including skipped ones.
        notes: Parts left out of the trace, and contradictions in it, one sentence each.
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


def _rank_in_name(path: Path) -> int | None:
    """Return the rank in the name of a file; None if it contains none or several.

    Example:
        >>> _rank_in_name(Path("rank-70.Mar_25_09_12.json.gz")), _rank_in_name(Path("node1_4711.1690.pt.trace.json"))
        (70, None)
    """
    found = {int(digits) for digits in _RANK.findall(path.name)}
    if not found and (worker := _WORKER.fullmatch(path.name.split(".")[0])):
        found = {int(worker[1])}
    return found.pop() if len(found) == 1 else None


def _hostname_in_name(path: Path) -> str | None:
    """Return the host in a name that `torch.profiler.tensorboard_trace_handler` gave: host, process, time."""
    found = _HANDLER.fullmatch(path.name)
    return found["host"] if found and _rank_in_name(path) is None else None


class _Metadata(Struct, rename={"job": "distributedInfo", "gpus": "deviceProperties"}):
    host_name: str = ""
    job: dict[str, object] = {}
    gpus: list[object] = []


class _Job(Struct):
    rank: Annotated[int, Meta(ge=0)] | None = None
    world_size: Annotated[int, Meta(ge=1)] | None = None
    backend: str = ""
    pg_config: list[object] | dict[str, object] = []  # a mapping from names of groups in older traces


class _Gpu(Struct):
    id: int | None = None
    name: str = ""


class _ProcessGroup(Struct):
    ranks: list[int] = []
    pg_size: int | None = None
    group_size: int | None = None  # its name in older traces


def _header_of(path: Path, metadata: dict[str, object], *, n_events: int, notes: list[str], is_cut: bool) -> Header:
    """Make a header from the keys next to the events; values of unexpected types count as missing."""
    told = lenient(metadata, _Metadata)
    job = lenient(told.job, _Job)
    named = _rank_in_name(path)
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
        file_host=_hostname_in_name(path),
        gpus={gpu.id: gpu.name for gpu in gpus if gpu.id is not None},
        n_events=n_events,
        notes=tuple(notes),
        is_cut=is_cut,
    )


def _ranks(group: _ProcessGroup) -> tuple[int, ...] | None:
    """Return the ranks of a group, unless the profiler shortened their list."""
    size = group.group_size if group.pg_size is None else group.pg_size
    return tuple(sorted(group.ranks)) if group.ranks and size in (None, len(group.ranks)) else None


#: Categories that say nothing about steps: Python's call stack, arrows between events, and the profiler's own work.
_SKIPPED = frozenset({"python_function", "fwdbwd", "ac2g", "async_cpu_to_gpu", "async_gpu", "Trace", "overhead"})

_EVENT_NBYTES = 32 << 20  # if an event, or the text before or after all events, is larger, the file is damaged
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_ARROWS = frozenset("sft")
_KEY = re.compile(rb'"([^"\\\n]{1,40})"\s*:')
_OLDER_CATS = {  # of PyTorch 1.8 to 1.11
    "Operator": "cpu_op",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
    "User Annotation": "user_annotation",
}
_WORK = {"cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", "gpu_user_annotation"}
_NO_WORK = _SKIPPED | {"cpu_instant_event", "gpu_memset", "cuda_driver", "cuda_sync", ""}
_OTHER_DEVICE = re.compile(r"(?<![a-z])(?:mtia|xpu|hpu|npu|mlu|gcu|privateuse1)(?![a-z])")
_JSON = json.JSONDecoder(strict=False)
_LONGEST_US = 1e12  # 11 days
_LATEST_US = 1e17  # 3,000 years; starts count from 1970 or from the boot


def _is_timed(event: Event) -> bool:
    """Tell whether an event has a start, and a duration that a profiler can have seen."""
    return abs(event.ts_us) < _LATEST_US and 0 <= event.dur_us <= _LONGEST_US


class TraceFile:
    """A trace file, read once from front to back.

    Args:
        path: The file, plain or compressed with gzip.
        chunk_nbytes: Bytes to read at once.
        event_nbytes: Maximum bytes of one event.
    """

    def __init__(self, path: Path, *, chunk_nbytes: int = CHUNK_NBYTES, event_nbytes: int = _EVENT_NBYTES) -> None:
        self.path = path
        self._chunks = Chunks(path, chunk_nbytes=chunk_nbytes)
        self._event_nbytes = event_nbytes
        self._metadata: dict[str, object] = {}
        self._notes: list[str] = []
        self._cats: set[str] = set()
        self._n_events = self._n_broken = self._n_untimed = 0
        self._is_read = self._is_cut = False

    def batches(self) -> Iterator[list[Event]]:
        """Yield the events in the order of the file, some thousands at a time.

        Raises:
            TraceError: This is not a trace of the profiler, or no part of it could be read.
        """
        chunks = iter(self._chunks)
        text = self._start(chunks)
        is_end = False
        for chunk in chain([b""], chunks, [None]):
            text += chunk or b""
            is_large = len(text) > self._event_nbytes
            taken = take(text, is_last=is_large or chunk is None)
            is_stuck = not taken.events or len(taken.rest) > self._event_nbytes
            if is_large and is_stuck and not taken.is_end:
                size = f"more than {self._event_nbytes:,} bytes"
                raise TraceError(f"{self.path}: event {self._n_events:,} takes {size}; the file is damaged")
            text = taken.rest
            is_end = taken.is_end
            self._n_broken += taken.n_broken
            if events := self._chosen(taken.events):
                yield events
            if is_end:
                break
        self._finish(text, chunks, is_end=is_end)

    def header(self) -> Header:
        """Return the information of the trace apart from its events, and the omissions.

        Raises:
            TraceError: The events were not read to the end.
        """
        if not self._is_read:
            raise TraceError(f"{self.path}: the header is known after the last of the events; read them all first")
        n_events = self._n_events
        notes = self._notes
        return _header_of(self.path, self._metadata, n_events=n_events, notes=notes, is_cut=self._is_cut)

    def _start(self, chunks: Iterator[bytes]) -> bytes:
        """Read the part before the events; return the events that were read with it."""
        text = b""
        for chunk in chunks:
            text += chunk
            if text.lstrip().startswith(b"["):
                return text.lstrip()[1:]
            if starts := list(_EVENTS.finditer(text)):
                return self._after_metadata(text, starts)
            if len(text) > self._event_nbytes:
                break
        keys = ", ".join(f"`{key.decode(errors='replace')}`" for key in _KEY.findall(text[:4096])[:5])
        where = f"{self._chunks.damage}, and " if self._chunks.damage else ""
        raise TraceError(
            f"{self.path}: {where}it has no list `traceEvents` within {len(text):,} bytes; a profiler trace has one. "
            f"Found: {keys or 'no keys'}"
        )

    def _after_metadata(self, text: bytes, starts: list[re.Match[bytes]]) -> bytes:
        for start in starts:  # the first may be within a string
            try:
                self._metadata |= json.loads(repaired(text[: start.start()] + b'"traceEvents": []}'), strict=False)
            except (ValueError, RecursionError):
                continue
            return text[start.end() :]
        self._notes.append("what stands before the events is no JSON and was left out")
        return text[starts[0].end() :]

    def _chosen(self, events: list[Event]) -> list[Event]:
        """Count events, translate older categories, and omit events irrelevant to steps."""
        self._n_events += len(events)
        self._cats |= {event.cat for event in events}
        if self._cats & _OLDER_CATS.keys():
            events = [replace(event, cat=_OLDER_CATS.get(event.cat, event.cat)) for event in events]
            self._cats |= {event.cat for event in events}
        chosen = [event for event in events if event.cat not in _SKIPPED and event.ph not in _ARROWS]
        timed = [event for event in chosen if _is_timed(event) or event.ph == "M"]
        self._n_untimed += len(chosen) - len(timed)
        return timed

    def _finish(self, text: bytes, chunks: Iterator[bytes], *, is_end: bool) -> None:
        """Read the part after the events, and check the result."""
        for chunk in chunks:
            text += chunk
            if len(text) > self._event_nbytes:
                break
        if devices := {found[0].upper() for cat in self._cats if (found := _OTHER_DEVICE.search(cat))}:
            raise TraceError(
                f"{self.path}: of a device that is not supported: {min(devices)}; only jobs on CPUs and on GPUs of "
                f"NVIDIA and AMD are read"
            )
        if not self._cats & _WORK:
            raise self._useless()
        if is_end:
            self._read_behind(text)
            if self._chunks.damage:
                self._notes.append(self._chunks.damage)
        else:
            why = self._chunks.damage or "the file ends early"
            self._is_cut = True
            self._notes.append(f"{why}: what follows its first {self._n_events:,} events is missing")
        if self._n_broken:
            self._notes.append(f"{self._n_broken:,} events are damaged and were left out")
        if self._n_untimed:
            self._notes.append(f"{self._n_untimed:,} events have no start, or no possible duration, and were left out")
        self._is_read = True

    def _read_behind(self, text: bytes) -> None:
        source = repaired(text).decode().strip()
        if not source:
            return
        try:
            metadata, end = _JSON.raw_decode("{" + source.lstrip(","))
        except (ValueError, RecursionError):
            self._notes.append(f"what stands behind the events is no JSON and was left out: {source[:40]!r}")
            return
        self._metadata |= metadata
        if rest := ("{" + source.lstrip(","))[end:].strip():
            self._notes.append(f"what follows the end of the trace was left out: {rest[:40]!r}")

    def _useless(self) -> TraceError:
        damage = f" ({self._chunks.damage})" if self._chunks.damage else ""
        if cats := ", ".join(f"`{cat}`" for cat in sorted(self._cats - _NO_WORK)[:5]):
            return TraceError(
                f"{self.path}: is a Chrome trace, but not of the PyTorch profiler: its categories are {cats}"
            )
        return TraceError(
            f"{self.path}: holds {self._n_events:,} events, but none of operators or kernels{damage}, and "
            f"{self._n_broken:,} things that are no events. Was the PyTorch profiler active?"
        )
