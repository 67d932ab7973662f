"""The times of one rank, written to a file as it runs, so that a rank that is killed leaves what it had.

The file is a .npy of float64 `[3, n_instances]` (ready, start, end), mapped into memory: the kernel keeps what was
written even if the process is gone. Times are of the rank's own monotonic clock; `gather` brings those of all ranks to
one trace in common time.

Ranks note when they were ready for a collective and when they were done with it. When it *began*, none of them can
know: that is when the last member was ready, and it is computed here, after the clocks have been brought together.
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

ScalarT = TypeVar("ScalarT", bound=np.generic)

_ATTEMPTS = 10


def memmap(path: Path, values: NDArray[ScalarT]) -> NDArray[ScalarT]:
    """Write a .npy file and map it; its blocks are there then, because a disk without room would kill who maps it.

    A rank that is done removes the folder if it is empty, perhaps just before this one writes there: it is made again.

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


Times = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class Recorder:
    """The times of one rank.

    Args:
        plan: The plan that is executed.
        path: The file to write; without one, times are kept in memory.

    Raises:
        RunError: The file cannot be written.
    """

    def __init__(self, plan: Plan, path: Path | None = None) -> None:
        self.path = path
        shape = (3, plan.n_instances)
        unknown: NDArray[np.float64] = np.full(shape, np.nan)
        self.times_s = unknown if path is None else memmap(path, unknown)
        self._ready_s, self._start_s, self._end_s = self.times_s

    def begin(self, index: int, at_s: float) -> None:
        """Note when an instance was ready, and so began; who began late because of others is found out later."""
        self._ready_s[index] = self._start_s[index] = at_s

    def end(self, index: int, at_s: float) -> None:
        """Note when an instance was done."""
        self._end_s[index] = at_s

    def forget_unended(self) -> None:
        """Forget what has begun and not ended, as in a loop that was left: it did not run."""
        self.times_s[:, np.isnan(self._end_s)] = np.nan


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """The facts that belong to the times of one rank.

    Args:
        rank: Whose they are.
        digest: Of the plan.
        start_s: The common start by the rank's own clock.
    """

    rank: int
    digest: str
    start_s: float


def part_path(folder: Path, rank: int) -> Path:
    """Return the file in which a rank notes its times."""
    return folder / f"rank-{rank:05d}.npy"


def write_part(folder: Path, part: RecordedPart) -> None:
    """Write what belongs to the times of a rank beside them."""
    part_path(folder, part.rank).with_suffix(".json").write_text(json.dumps(asdict(part)), encoding="utf-8")


def forget(folder: Path, rank: int) -> None:
    """Delete the times and the counts of a rank, and the folder if no other rank's are there."""
    for path in folder.glob(f"*-{rank:05d}.*"):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()


def gather(
    recorder: Recorder,
    plan: Plan,
    *,
    start_s: float,
    clocks: tuple[Clocks, Clocks],
    source: str,
    group: dist.ProcessGroup | None = None,
    late: Mapping[int, tuple[int, ...]] | None = None,
) -> Trace | None:
    """Bring the times of all ranks together; all take part, rank 0 gets the trace.

    Args:
        recorder: Of this rank.
        plan: The plan that was executed.
        start_s: The common start by this rank's clock.
        clocks: At the start and at the end.
        source: Who made the trace.
        group: Of all ranks, and able to move tensors of the host.
        late: Who was late where, as the trace will have it; rank 0 knows.
    """
    rank = dist.get_rank()
    noted_s = np.asarray(recorder.times_s)
    mine = torch.from_numpy(to_common_s(noted_s, start_s=start_s, drift=drift(clocks, rank)))
    times_s = np.empty((3, plan.n_instances, plan.world_size))
    for other, theirs in enumerate(gather_to_first(mine, group=group)):
        times_s[:, :, other] = theirs.numpy()
    return None if rank else assemble(plan, times_s, source, late or {})


def salvage(folder: Path, plan: Plan) -> Trace | None:
    """Make a trace of what the ranks of a failed run have left; None if that is nothing.

    Missing times are NaN; a collective began when the last member was ready of which this machine knows. Clocks are
    taken to run alike: how they drift would have been known at the end.
    """
    if not folder.is_dir():
        return None
    times_s = np.full((3, plan.n_instances, plan.world_size), np.nan)
    for rank in range(plan.world_size):
        path = part_path(folder, rank)
        try:
            part = RecordedPart(**json.loads(read_content(path.with_suffix(".json"))))
            theirs = read_array(path, dtype=np.float64, shape=times_s.shape[:2])
        except (OSError, EOFError, ValueError, TypeError):  # it is not there, or not whole
            continue
        if part.digest == plan.digest():
            times_s[:, :, rank] = to_common_s(theirs, start_s=part.start_s)
    times_s[:, np.isnan(times_s[2])] = np.nan  # what has begun and not ended did not run
    return None if np.isnan(times_s).all() else assemble(plan, times_s, "real, ended early")


def assemble(
    plan: Plan, times_s: NDArray[np.float64], source: str, late: Mapping[int, tuple[int, ...]] = MappingProxyType({})
) -> Trace:
    """Return the trace of times in common time, float64 `[3, n_instances, world_size]`."""
    ready_s, start_s, end_s = times_s
    for each in occurrences(plan):
        if isinstance(each.op, COLLECTIVES):
            start_s[each.rows] = _last_ready_s(ready_s[each.rows], each.op.group)
    for row in drops_late(plan):  # who is late waits for nobody
        first = np.delete(np.arange(plan.world_size), late.get(row, ()))
        start_s[row] = ready_s[row]
        start_s[row, first] = np.fmax.reduce(ready_s[row, first])
    start_s = np.maximum(np.minimum(start_s, end_s), ready_s)  # clocks are not perfect, and a root may leave early
    end_s = np.maximum(start_s, end_s)
    return ended_with_its_last_result(Trace(plan, ready_s, start_s, end_s, source, late=late))


def _last_ready_s(ready_s: NDArray[np.float64], group: Group) -> NDArray[np.float64]:
    """Return when the last member of each rank's group was ready, of those that are known; both `[n, world_size]`."""
    members_s = ready_s.reshape(len(ready_s), *group.shape(ready_s.shape[1]))
    last_s = np.broadcast_to(np.fmax.reduce(members_s, axis=2, keepdims=True), members_s.shape)
    return last_s.reshape(ready_s.shape)
