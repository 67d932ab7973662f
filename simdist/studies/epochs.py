"""The cost of reading data, epoch by epoch: its time, data stalls, and which level of storage samples came from.

A batch is *late* by the time between the end of the previous compute operation and the end of its load:

    stall = max(0, end of the load - end of the compute operation before the one that reads the batch)

Time in which computing or communicating was slower does not count. With compute time c per step and consecutive loads
of time l, read far enough ahead, a steady step takes max(c, l) and stalls max(0, l - c). GPU utilisation is 1 - stall /
step = min(1, c / l).

The stalls of an epoch are those of the rank that stalls longest in each step, because others wait for it when they
synchronise. This is exact for synchronisation in every step, and an upper bound otherwise. The mean over ranks may be
many times less: a server that serves 15 of 16 ranks in time delays all of them.

An epoch begins when the last rank has ended the previous one; the first begins when files are staged in on all nodes.
Everything here reads traces and counts of reads, simulated or measured. In a trace that ended early, only steps that
all ranks finished count; without such a step there is no epoch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simdist.display import Pictured
from simdist.errors import TraceError, require
from simdist.plan import LEVELS, Load, Plan, StageIn, lane_of, occurrences
from simdist.plan import reads as buffers_read
from simdist.runs import run_directory
from simdist.runs.run_directory import RunDirectory
from simdist.settings.units import format_error, format_share
from simdist.studies.statistics import relative_error
from simdist.studies.validation import finished_steps
from simdist.traces.reads import Reads, differences, expected
from simdist.traces.trace import Trace
from simdist.traces.waiting import step_end_s

if TYPE_CHECKING:
    import pandas as pd


#: Compute hides the loading if stalls are less of an epoch than this.
HIDDEN_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Epoch:
    """A pass over the data set.

    Args:
        number: From 0.
        n_steps: Steps of it, fewer in a last one that the run does not complete.
        seconds: From the end of the epoch before to the last rank's end of its last step.
        stall_s: Seconds of stalls in all steps, in each of the rank that stalled longest.
        mean_stall_s: The same averaged over ranks.
        n_samples: Samples of all ranks, from each of `LEVELS`.
        nbytes: Their bytes: of files from disk and storage, of decoded samples from memory and peers.
    """

    number: int
    n_steps: int
    seconds: float
    stall_s: float
    mean_stall_s: float
    n_samples: tuple[int, ...]
    nbytes: tuple[int, ...]

    @property
    def stall_share(self) -> float:
        """Share of the epoch that is data stalls; 0 of an epoch that takes no time."""
        return self.stall_s / self.seconds if self.seconds else 0.0

    @property
    def is_hidden(self) -> bool:
        """Whether compute hides the loading."""
        return self.stall_share < HIDDEN_SHARE

    @property
    def hits(self) -> dict[str, float]:
        """Share of the samples that came from each level."""
        n_samples = sum(self.n_samples)
        return {level: n / n_samples if n_samples else 0.0 for level, n in zip(LEVELS, self.n_samples, strict=True)}


@dataclass(frozen=True)
class Epochs(Pictured):
    """The epochs of a trace.

    Args:
        schedule: Name of the plan.
        source: Writer of the trace.
        staging_s: Seconds until files were staged in on all nodes, before the first epoch; 0 if none are.
        step_stall_s: Seconds of data stalls of each rank, `[n_steps, world_size]`.
        epochs: In order; none if no step was finished.
    """

    schedule: str
    source: str
    staging_s: float
    step_stall_s: NDArray[np.float64]
    epochs: tuple[Epoch, ...]

    @property
    def seconds(self) -> float:
        """Seconds of staging and all epochs."""
        return self.staging_s + math.fsum(epoch.seconds for epoch in self.epochs)

    @property
    def waiting_s(self) -> float:
        """Seconds of staging and of all stalls."""
        return self.staging_s + math.fsum(epoch.stall_s for epoch in self.epochs)

    def frame(self) -> "pd.DataFrame":
        """Return one row per epoch.

        Columns:
            epoch, steps (int64): Number of the epoch, and of its steps.
            seconds (float64): From the end of the previous epoch, or of staging.
            stall_s, mean_stall_s, stall_share (float64): As in "An epoch of a trace".
            memory, peer, disk, storage (int64): Samples from each level, over all ranks.
            memory_nbytes, peer_nbytes, disk_nbytes, storage_nbytes (int64): Their bytes: decoded, or of files.
        """
        require("pandas", extra="tables", what="a frame of results")
        import pandas as pd

        return pd.DataFrame(
            {
                "epoch": each.number,
                "steps": each.n_steps,
                "seconds": each.seconds,
                "stall_s": each.stall_s,
                "mean_stall_s": each.mean_stall_s,
                "stall_share": each.stall_share,
                **dict(zip(LEVELS, each.n_samples, strict=True)),
                **{f"{level}_nbytes": nbytes for level, nbytes in zip(LEVELS, each.nbytes, strict=True)},
            }
            for each in self.epochs
        )


def find_epochs(trace: Trace, reads: Reads | None = None, *, n_steps: int | None = None) -> Epochs:
    """Return the epochs of a trace.

    Args:
        trace: Of a plan with a data set.
        reads: Storage levels of samples; the planned ones if None.
        n_steps: Number of steps; all that every rank finished if None.

    Raises:
        TraceError: The plan has no data set, or the reads are of another plan.
    """
    plan = trace.plan
    if plan.dataset is None:
        raise TraceError(f"plan {plan.name} has no data set, so it has no epochs")
    reads = expected(plan) if reads is None else reads
    reads.check(plan)
    n_steps = finished_steps(trace) if n_steps is None else n_steps
    feeds = [feed for feed in _feeds(plan) if feed.step < n_steps]
    staging_s = _staging_s(trace)
    stall_s = _stall_s(trace, feeds, staging_s)[:n_steps]
    ends_s = step_end_s(trace)[:n_steps].max(axis=1)
    bounds = _bounds(feeds, plan.dataset.steps_per_epoch(plan.world_size), n_steps)
    found: list[Epoch] = []
    begin_s = staging_s
    for number, (first, stop) in enumerate(bounds):
        batches = [feed.batch for feed in feeds if first <= feed.step < stop]
        found.append(_epoch(number, float(ends_s[stop - 1]) - begin_s, stall_s[first:stop], reads, batches))
        begin_s = float(ends_s[stop - 1])
    return Epochs(plan.name, trace.source, staging_s, stall_s, tuple(found))


@dataclass(frozen=True, slots=True)
class _BatchUse:
    """A batch and the step that reads it first."""

    step: int
    batch: int
    load: int
    before: int | None


def _feeds(plan: Plan) -> Iterator[_BatchUse]:
    """Yield the batches of a plan in the order in which the compute stream reads them."""
    loaded: dict[str, tuple[int, int]] = {}
    batch = row = 0
    before: int | None = None
    for step, body in enumerate(plan.body_of_steps()):
        for op in plan.bodies[body]:
            if isinstance(op, Load):
                loaded[op.dst] = batch, row
                batch += 1
            elif lane_of(op).kind == "compute":
                for name in buffers_read(op):
                    if name in loaded:
                        yield _BatchUse(step, *loaded.pop(name), before)
                before = row
            row += 1


def _staging_s(trace: Trace) -> float:
    rows = [each.rows for each in occurrences(trace.plan) if isinstance(each.op, StageIn)]
    return float(np.nanmax(trace.end_s[np.concatenate(rows)], initial=0.0)) if rows else 0.0


def _stall_s(trace: Trace, feeds: Sequence[_BatchUse], staging_s: float) -> NDArray[np.float64]:
    """Return the data stalls of each rank in seconds, `[n_steps, world_size]`."""
    stall_s = np.zeros((trace.plan.n_steps, trace.plan.world_size))
    for feed in feeds:
        free_s = staging_s if feed.before is None else np.maximum(trace.end_s[feed.before], staging_s)
        stall_s[feed.step] += np.maximum(trace.end_s[feed.load] - free_s, 0.0)
    return stall_s


def _bounds(feeds: Sequence[_BatchUse], steps_per_epoch: int, n_steps: int) -> list[tuple[int, int]]:
    """Return the first step of each epoch and the one after its last. A step is of the epoch of its first batch."""
    firsts: list[int] = []
    for feed in feeds:
        if feed.batch // steps_per_epoch == len(firsts):
            firsts.append(feed.step if firsts else 0)
    return list(zip(firsts, [*firsts[1:], n_steps], strict=True)) if firsts else []


def _epoch(number: int, seconds: float, stall_s: NDArray[np.float64], reads: Reads, batches: Sequence[int]) -> Epoch:
    return Epoch(
        number,
        n_steps=len(stall_s),
        seconds=seconds,
        stall_s=float(stall_s.max(axis=1).sum()),
        mean_stall_s=float(stall_s.mean(axis=1).sum()),
        n_samples=tuple(reads.n_samples[batches].sum(axis=(0, 1)).tolist()),
        nbytes=tuple(reads.nbytes[batches].sum(axis=(0, 1)).tolist()),
    )


@dataclass(frozen=True, slots=True)
class EpochError:
    """An epoch as simulated and as measured; the error is (simulated - measured) / measured.

    Args:
        epoch: Number.
        simulated_s, measured_s: Its time.
        error: Error of that time.
    """

    epoch: int
    simulated_s: float
    measured_s: float
    error: float


def epoch_errors(simulated: Epochs, measured: Epochs) -> tuple[EpochError, ...]:
    """Compare the epochs that two traces of one plan have in common."""
    return tuple(
        EpochError(theirs.number, ours.seconds, theirs.seconds, relative_error(ours.seconds, theirs.seconds))
        for ours, theirs in zip(simulated.epochs, measured.epochs, strict=False)
    )


@dataclass(frozen=True)
class Loading:
    """How a plan reads its data, simulated and, if it was, measured.

    Args:
        simulated: The simulated epochs; if there is a measurement, only epochs that were measured, too.
        measured: The epochs of the measurement.
        errors: Of the simulated epochs.
        differences: In what the counts of the run differ from those of the plan, a sentence for each level; None if
            the run has no counts.
    """

    simulated: Epochs
    measured: Epochs | None = None
    errors: tuple[EpochError, ...] = ()
    differences: tuple[str, ...] | None = None

    @property
    def hits_identical(self) -> bool | None:
        """Whether every load read from the levels that the plan says; None if the run has no counts."""
        return None if self.differences is None else not self.differences

    def sentences(self) -> Iterator[str]:
        """Say how far epochs are from those measured, and whether samples came from the levels that the plan says."""
        found = sorted((each.error for each in self.errors if not math.isnan(each.error)), key=abs)
        if found:
            middle = (abs(found[(len(found) - 1) // 2]) + abs(found[len(found) // 2])) / 2
            yield f"error of an epoch: median {format_share(middle)}, worst {format_error(found[-1])}"
        else:
            yield "error of an epoch: none was finished"
        if self.differences is None:
            yield f"samples by level: the run has no {run_directory.REAL_READS}; shown is what the plan says"
        elif not self.differences:
            yield "samples by level: as the plan says, in every load on every rank"
        else:
            yield from (f"samples by level: not as the plan says: {line}" for line in self.differences)


def compare_loading(run: RunDirectory, simulated: Trace, real: Trace) -> Loading:
    """Compare how a plan with a data set read its data in a simulation and in a real run.

    Args:
        run: Its counts of reads are used, if it has any; else those of the plan.
        simulated: A trace of its plan.
        real: Another.
    """
    path = run.path / run_directory.REAL_READS
    planned = expected(run.plan)
    found = run_directory.read_reads(path, plan=run.plan) if path.exists() else None
    measured = find_epochs(real, found or planned)
    ours = find_epochs(simulated, planned, n_steps=len(measured.step_stall_s))
    differing = None if found is None else differences(found, planned)
    return Loading(ours, measured, epoch_errors(ours, measured), differing)
