"""How a plan reads its data, simulated and measured."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from simdist.runs import run_directory
from simdist.runs.run_directory import RunDirectory
from simdist.settings.units import format_error, format_share
from simdist.studies.epochs import EpochError, Epochs, epoch_errors, find_epochs
from simdist.traces.reads import differences, expected
from simdist.traces.trace import Trace


@dataclass(frozen=True)
class Loading:
    """How a plan reads its data, simulated and, if it was, measured.

    Args:
        simulated: The epochs of the simulation; those that were measured too, if any were.
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
        run: Whose counts of what was read are taken, if it has any; else those of the plan.
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
