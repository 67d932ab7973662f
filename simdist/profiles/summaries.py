"""Summaries of collectives by rank, as TraceLens makes them of the traces of a job (`nccl_summary_long.csv`).

A rank's mean time in a collective includes waiting for later ranks. The rank with the least time is the last to come,
and its time is that of the transfer. A summary has no times of computing, so it makes no scenario.

Source:
    TraceLens, NcclAnalyser of https://github.com/AMD-AGI/TraceLens.
"""

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from simdist.errors import TraceError
from simdist.plan.plan import ITEM_NBYTES
from simdist.profiles.kineto.events import Args
from simdist.profiles.kineto.messages import CollectiveKind, message_of
from simdist.scenario.loading import read_text
from simdist.settings.base import plural
from simdist.settings.units import read_number, read_whole

_NumberT = TypeVar("_NumberT", int, float)

_NEEDED = (
    "rank",
    "Collective name",
    "Group size",
    "dtype",
    "In msg nelems",
    "Out msg nelems",
    "dur_mean",
    "operation_count",
)
_MOST_RANKS = 10**6
_MOST_COUNT = 10**15
_MOST_US = 1e12
_MOSTLY = 0.9  # of the waiting of all; a rank that is last in that much of it is late


@dataclass(frozen=True, slots=True)
class CollectiveSummary:
    """The collectives of one kind, size and type.

    Args:
        kind: Such as `all_gather`.
        dtype: Type of the elements.
        count: Elements of the whole.
        n_ranks: Members of a group.
        calls: Number of calls on each rank.
        seconds: Mean time of a call on the rank that comes last: the time of the transfer.
        last_rank: That rank.
        late_s: How much longer a call takes on the other ranks, median.
        waited_s: Waiting of all ranks in all calls.
    """

    kind: CollectiveKind
    dtype: str
    count: int
    n_ranks: int
    calls: int
    seconds: float
    last_rank: int
    late_s: float
    waited_s: float

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        match self.dtype:
            case "float32" | "float16" | "bfloat16" | "float64":
                return self.count * ITEM_NBYTES[self.dtype]
            case _:
                return self.count


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The collectives of a job with a sharded model.

    Args:
        path: The file.
        collectives: By the time that they take on the ranks that come last, the longest first.
        n_steps: Steps: the unit that is gathered least often is gathered once in each.
        units: Elements of a unit -> number of units of that size, the most numerous first.
        n_gathered_again: Units that are gathered again for the backward pass.
        late_rank: The rank that comes last to most of what ranks wait for; None if it is now one, now another.
    """

    path: str
    collectives: tuple[CollectiveSummary, ...]
    n_steps: int
    units: dict[int, int]
    n_gathered_again: int
    late_rank: int | None

    def of_kind(self, kind: CollectiveKind) -> CollectiveSummary:
        """Return the collectives of a kind that take most."""
        return next(each for each in self.collectives if each.kind == kind)

    @property
    def late_s(self) -> float:
        """How late the late rank is in a step: what the others wait for it in all of its calls, median of ranks."""
        late = [each.calls * each.late_s for each in self.collectives if each.last_rank == self.late_rank]
        return math.fsum(late) / self.n_steps

    @property
    def sentence(self) -> str:
        """Describe the units."""
        gather = self.of_kind("all_gather")
        reduce = self.of_kind("reduce_scatter")
        told = " and ".join(f"{n} {plural(n, 'unit')} of {count:,} elements" for count, n in self.units.items())
        return (
            f"{told}, shared by {gather.n_ranks} ranks, gathered in {gather.dtype}, reduced in {reduce.dtype}; "
            f"{self.n_gathered_again} of {sum(self.units.values())} are gathered again for the backward pass"
        )


def is_summary(path: Path) -> bool:
    """Tell whether a file is a table, and not a trace."""
    return path.suffix == ".csv"


def read_summary(path: Path) -> JobSummary:
    """Read a summary of a job with a sharded model.

    Raises:
        ScenarioError: The file cannot be read, or is not UTF-8.
        TraceError: It is no such summary, or of a job without a sharded model.
    """
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(
                f"{path}: has no column {missing[0]!r}: give traces of the PyTorch profiler, or TraceLens's "
                f"nccl_summary_long.csv"
            )
        rows = [_row(path, number, row) for number, row in enumerate(reader, start=2)]
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num + 1}: is no CSV: {error}") from None
    found: dict[tuple[CollectiveKind, str, int, int], list[tuple[int, float, int]]] = defaultdict(list)
    for key, of_rank in rows:
        found[key].append(of_rank)
    summaries = [_summary(key, of_ranks) for key, of_ranks in found.items()]
    collectives = sorted(summaries, key=lambda each: -each.calls * each.seconds)
    gathers = {each.count: each.calls for each in collectives if each.kind == "all_gather"}
    reductions = {each.count: each.calls for each in collectives if each.kind == "reduce_scatter"}
    if not gathers or not reductions:
        raise TraceError(f"{path}: has no all_gathers and reduce_scatters, so its job does not shard the model")
    n_steps = min(gathers.values())
    units = {count: calls // n_steps for count, calls in sorted(reductions.items(), key=lambda item: -item[1])}
    n_again = sum(calls for count, calls in gathers.items()) // n_steps - sum(units.values())
    return JobSummary(str(path), tuple(collectives), n_steps, units, n_again, _late_rank(collectives))


_Key = tuple[CollectiveKind, str, int, int]


def _row(path: Path, number: int, row: dict[str, str]) -> tuple[_Key, tuple[int, float, int]]:
    """Return what a row is of, and the rank, its mean seconds, and its calls."""
    where = f"{path}:{number}"
    if None in row or None in row.values():
        raise TraceError(f"{where}: has {'more' if None in row else 'fewer'} columns than the first line")
    args = Args(
        collective=row["Collective name"],
        in_nelems=_whole(where, row, "In msg nelems"),
        out_nelems=_whole(where, row, "Out msg nelems"),
        group_size=_whole(where, row, "Group size", least=1, most=_MOST_RANKS),
        dtype=row["dtype"],
    )
    rank = _whole(where, row, "rank", most=_MOST_RANKS)
    mean_us = _cell(where, row, "dur_mean", lambda text: read_number(text, 0, _MOST_US))
    of_rank = rank, 1e-6 * mean_us, _whole(where, row, "operation_count", least=1)
    message = message_of("", args)
    return (message.kind, message.dtype, message.count or 0, message.n_ranks or 1), of_rank


def _whole(where: str, row: dict[str, str], column: str, *, least: int = 0, most: int = _MOST_COUNT) -> int:
    return _cell(where, row, column, lambda text: read_whole(text, least, most))


def _cell(where: str, row: dict[str, str], column: str, read: Callable[[str], _NumberT]) -> _NumberT:
    try:
        return read(row[column])
    except ValueError as error:
        raise TraceError(f"{where}: column {column}: {error}, as TraceLens does") from None


def _summary(key: _Key, of_ranks: Sequence[tuple[int, float, int]]) -> CollectiveSummary:
    kind, dtype, count, n_ranks = key
    last_rank, seconds, calls = min(of_ranks, key=lambda each: each[1])
    waits_s = [mean_s - seconds for rank, mean_s, _ in of_ranks if rank != last_rank]
    late_s = statistics.median(waits_s) if waits_s else 0.0
    return CollectiveSummary(kind, dtype, count, n_ranks, calls, seconds, last_rank, late_s, calls * math.fsum(waits_s))


def _late_rank(collectives: Sequence[CollectiveSummary]) -> int | None:
    waited_s: dict[int, float] = defaultdict(float)
    for each in collectives:
        waited_s[each.last_rank] += each.waited_s
    rank = max(waited_s, key=lambda each: waited_s[each])
    return rank if waited_s[rank] > _MOSTLY * math.fsum(waited_s.values()) else None
