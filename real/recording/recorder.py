"""The times of one rank, written to a file during the run, so that a killed rank leaves its times so far.

The file is a .npy of float64 `[3, n_instances]` (ready, start, end), mapped into memory. The kernel keeps written data
even if the process is gone. Times are from the rank's own monotonic clock. `gather_trace` combines those of all ranks
into one trace in common time.

Ranks record when they were ready for a collective and when it ended. No rank can know when it *began*: that is when the
last member was ready. It is computed here, after the clocks have been synchronized.
"""

import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from real.collectives.byte_transfer import gather_to_first
from real.recording.clock import Clocks, drift, to_common_s
from simdist.arrays import read_array
from simdist.errors import RunError
from simdist.files import read_content
from simdist.plan import COLLECTIVES, Plan, occurrences
from simdist.plan.group import Group
from simdist.plan.walk import drops_late
from simdist.traces.trace import Trace, ended_with_its_last_result

_ScalarT = TypeVar("_ScalarT", bound=np.generic)

_ATTEMPTS = 10


def memmap(path: Path, values: NDArray[_ScalarT]) -> NDArray[_ScalarT]:
    """Write a .npy file and map it; its blocks are allocated first, because a full disk would kill the process.

    A rank that is done removes the folder if it is empty, possibly just before this one writes to it.

    Raises:
        RunError: The file cannot be written.
    """
    content = io.BytesIO()
    np.save(content, values)
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.getvalue())
            return np.lib.format.open_memmap(path, mode="r+")
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None
    raise AssertionError


class Recorder:
    """The times of one rank.

    Args:
        plan: The plan that is executed.
        path: The file to write; None keeps times in memory.
        known_s: Times to begin with, from an earlier process of the rank; none by default.

    Raises:
        RunError: The file cannot be written.
    """

    def __init__(self, plan: Plan, path: Path | None = None, known_s: NDArray[np.float64] | None = None) -> None:
        self.path = path
        shape = (3, plan.n_instances)
        begin_s: NDArray[np.float64] = np.full(shape, np.nan) if known_s is None else known_s
        self.times_s = begin_s if path is None else memmap(path, begin_s)
        self._ready_s, self._start_s, self._end_s = self.times_s

    def begin(self, index: int, at_s: float) -> None:
        """Record when an instance was ready, and so began; starts delayed by other ranks are computed afterwards."""
        self._ready_s[index] = self._start_s[index] = at_s

    def end(self, index: int, at_s: float) -> None:
        """Record when an instance ended."""
        self._end_s[index] = at_s

    def forget_unended(self) -> None:
        """Discard instances that began but did not end, as in a loop that was left: they count as not run."""
        self.times_s[:, np.isnan(self._end_s)] = np.nan


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """The facts that belong to the times of one rank.

    Args:
        rank: The rank.
        digest: Digest of the plan.
        start_s: The common start by the rank's own clock.
    """

    rank: int
    digest: str
    start_s: float


def part_path(folder: Path, rank: int) -> Path:
    """Return the file for a rank's times."""
    return folder / f"rank-{rank:05d}.npy"


def write_part(folder: Path, part: RecordedPart) -> None:
    """Write the facts about a rank's times next to them."""
    part_path(folder, part.rank).with_suffix(".json").write_text(json.dumps(asdict(part)), encoding="utf-8")


def forget(folder: Path, rank: int) -> None:
    """Delete the times and the counts of a rank, and the folder if it is then empty."""
    for path in folder.glob(f"*-{rank:05d}.*"):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()


def gather_trace(
    recorder: Recorder,
    plan: Plan,
    *,
    start_s: float,
    clocks: tuple[Clocks, Clocks],
    source: str,
    group: dist.ProcessGroup | None = None,
    late: Mapping[int, tuple[int, ...]] | None = None,
) -> Trace | None:
    """Combine the times of all ranks; all take part, rank 0 gets the trace.

    Args:
        recorder: Recorder of this rank.
        plan: The plan that was executed.
        start_s: The common start by this rank's clock.
        clocks: Clock comparisons at the start and at the end.
        source: Program that made the trace.
        group: A group of all ranks that can move tensors of the host.
        late: Late ranks by operation, as in the trace; only rank 0 knows them.
    """
    rank = dist.get_rank()
    noted_s = np.asarray(recorder.times_s)
    mine = torch.from_numpy(to_common_s(noted_s, start_s=start_s, drift=drift(clocks, rank)))
    times_s = np.empty((3, plan.n_instances, plan.world_size))
    for other, theirs in enumerate(gather_to_first(mine, group=group)):
        times_s[:, :, other] = theirs.numpy()
    return None if rank else trace_of(plan, times_s, source, late or {})


def salvage(folder: Path, plan: Plan) -> Trace | None:
    """Make a trace of the times that the ranks of a failed run have left; None if there are none.

    Missing times are NaN. A collective began when the last member known on this machine was ready. Clocks are assumed
    to run at the same rate, because their drift is measured only at the end.
    """
    if not folder.is_dir():
        return None
    times_s = np.stack([left_by(rank, folder, plan) for rank in range(plan.world_size)], axis=2)
    return salvaged_trace(plan, times_s)


def gather_salvaged(folder: Path, plan: Plan, *, group: dist.ProcessGroup | None = None) -> Trace | None:
    """Do as `salvage` with the times that each rank finds on its own machine; all take part, rank 0 gets the trace."""
    rank = dist.get_rank()
    mine = torch.from_numpy(left_by(rank, folder, plan))
    times_s = [theirs.numpy() for theirs in gather_to_first(mine, group=group)]
    return None if rank else salvaged_trace(plan, np.stack(times_s, axis=2))


def left_by(rank: int, folder: Path, plan: Plan) -> NDArray[np.float64]:
    """Return the times that a rank has left, `[3, n_instances]`; NaN if there are none, or those of another plan."""
    unknown: NDArray[np.float64] = np.full((3, plan.n_instances), np.nan)
    path = part_path(folder, rank)
    try:
        part = RecordedPart(**json.loads(read_content(path.with_suffix(".json"))))
        times_s = read_array(path, dtype=np.float64, shape=unknown.shape)
    except (OSError, EOFError, ValueError, TypeError):  # missing or incomplete
        return unknown
    return to_common_s(times_s, start_s=part.start_s) if part.digest == plan.digest() else unknown


def salvaged_trace(plan: Plan, times_s: NDArray[np.float64]) -> Trace | None:
    """Return the trace of what ranks have left, float64 `[3, n_instances, world_size]`; None if that is nothing."""
    times_s[:, np.isnan(times_s[2])] = np.nan  # instances that began but did not end count as not run
    return None if np.isnan(times_s).all() else trace_of(plan, times_s, "real, ended early")


def trace_of(
    plan: Plan, times_s: NDArray[np.float64], source: str, late: Mapping[int, tuple[int, ...]] = MappingProxyType({})
) -> Trace:
    """Return the trace of times in common time, float64 `[3, n_instances, world_size]`."""
    ready_s, start_s, end_s = times_s
    for each in occurrences(plan):
        if isinstance(each.op, COLLECTIVES):
            start_s[each.rows] = _last_ready_s(ready_s[each.rows], each.op.group)
    for row in drops_late(plan):  # a late rank does not wait
        first = np.delete(np.arange(plan.world_size), late.get(row, ()))
        start_s[row] = ready_s[row]
        start_s[row, first] = np.fmax.reduce(ready_s[row, first])
    start_s = np.maximum(np.minimum(start_s, end_s), ready_s)  # clocks are imperfect, and a root may leave early
    end_s = np.maximum(start_s, end_s)
    return ended_with_its_last_result(Trace(plan, ready_s, start_s, end_s, source, late=late))


def _last_ready_s(ready_s: NDArray[np.float64], group: Group) -> NDArray[np.float64]:
    """Return when the last known member of each rank's group was ready; both `[n, world_size]`."""
    members_s = group.split(ready_s, axis=1)
    last_s = np.broadcast_to(np.fmax.reduce(members_s, axis=2, keepdims=True), members_s.shape)
    return group.joined(last_s, axis=1)
