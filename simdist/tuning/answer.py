"""The result of a search: as a JSON document, as text, as a frame."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from simdist.display import Pictured
from simdist.runs.building import dataset
from simdist.runs.memory import may_not_fit, surely_fits
from simdist.scenario import Recorded, Scenario
from simdist.settings.base import picked, plural, unchecked_copy
from simdist.settings.units import Elapsed, format_duration, format_nbytes, format_seconds
from simdist.studies import comparison
from simdist.studies.columns import (
    SCHEDULE,
    STEP_TIME,
    Column,
    combined,
    count,
    factor_with_interval,
    seconds_with_interval,
)
from simdist.studies.facets import RANGES, facet_remarks
from simdist.studies.known_delays import chance_remarks, chances_of
from simdist.studies.remarks import Remark, below_table, documents, with_remarks
from simdist.studies.resampling import Runs, remarks_as_run
from simdist.studies.tables import table_text
from simdist.tuning.constraints import Constraints
from simdist.tuning.evaluating import Evaluated, Finalist, TooSlow
from simdist.tuning.verdict import Verdict, entry, lines_of_scenario

if TYPE_CHECKING:
    import pandas as pd

_FEW_PERIODS = 10  # in fewer, a last one that is cut off saves a schedule an average that others pay for
_NOT_KNOWN = (
    "Not modelled: how less frequent averaging, or sending part of the gradient, changes what is learnt per step. "
    "--global-every, --group-every and --min-density are your choice. What repairing slow ranks would gain, "
    "`simdist whatif` shows"
)


def _gap(n_steps: float) -> str:
    return "never" if math.isinf(n_steps) else f"{n_steps:.0f} {plural(round(n_steps), 'step')}"


def _speedup(center: float, interval: tuple[float, float] | None, problem: str | None) -> str:
    text = factor_with_interval(center, interval)
    return text if problem is None else f"{text} ± ?"


_COLUMNS = (
    SCHEDULE,
    Column("all exchange every", "global_every_steps", form=_gap),
    STEP_TIME,
    Column("speed-up", "speedup", "speedup_ci95", "problem", form=_speedup),
    Column("sent per step", "sent_nbytes", form=format_nbytes),
    Column("memory", "device_nbytes", form=format_nbytes),
    Column("front", "on_front", words=lambda on_front: "*" if on_front else ""),
)
_OF_PASSES = (
    *_COLUMNS[:2],
    Column("micro-batches", "micro_batches", form=count),
    Column("per micro-batch", "step_s", "step_s_ci95", form=seconds_with_interval),
    *_COLUMNS[3:],
)


def search_remarks(scenario: Scenario, global_every: int) -> tuple[Remark, ...]:
    """Return what to know of a scenario before its schedules are searched.

    Args:
        scenario: As the user wrote it.
        global_every: Maximum steps between exchanges of all ranks.
    """
    found = []
    if dataset(scenario) is not None and scenario.steps < _FEW_PERIODS * global_every:
        text = (
            f"{scenario.steps} steps of a data set hold fewer than {_FEW_PERIODS} periods of {global_every} steps, "
            f"so the last steps decide; write steps: {_FEW_PERIODS * global_every} or more, or a smaller --global-every"
        )
        found.append(Remark("input", text, "steps"))
    if any(isinstance(each, Recorded) for each in scenario.disturbances):
        text = "recorded disturbances: every seed draws its own blocks of the recorded steps"
        found.append(Remark("derived", text, "disturbances"))
    return tuple(found)


@dataclass(frozen=True)
class Searched:
    """Result of the first part of a search: candidates, simulated with the seeds of the search.

    Args:
        runs: The runs of the simulation.
        baseline: The schedule that they are compared with.
        evaluated: Different plans, including the baseline if it is a candidate.
        too_slow: Different plans that were not simulated.
        nearest: If neither a candidate nor the baseline keeps to the constraints, the candidate that exceeds one least.
        n_candidates: Legal candidates that keep to the constraints on exchanges.
        excluded: Number of candidates that each constraint excluded.
        n_illegal: Number of candidates that the schedules or the scenario refused.
        is_complete: False if Ctrl-C ended the search.
    """

    runs: Runs
    baseline: Evaluated
    evaluated: tuple[Evaluated, ...]
    too_slow: tuple[TooSlow, ...]
    nearest: Evaluated | None
    n_candidates: int
    excluded: Counter[str]
    n_illegal: int
    is_complete: bool = True

    @property
    def n_evaluated(self) -> int:
        """Number of different plans that were simulated."""
        return len(self.evaluated)

    @property
    def least_s(self) -> float | None:
        """Seconds per step, or per micro-batch, that the plans that were not simulated take at least."""
        return min((each.step_s for each in self.too_slow), default=None)


def as_searched(scenario: Scenario, *, counts_failures: bool) -> Scenario:
    """Return the scenario that a search simulates: with failures, months of checkpoints are counted instead."""
    return unchecked_copy(scenario, checkpoint=None) if counts_failures else scenario


_OF_JOB = "step times are the time of the whole job per step that counts, with recoveries and repeated steps"


@dataclass(frozen=True, repr=False)
class Tuned(Pictured):
    """Result of a search.

    Args:
        scenario: The scenario to tune, as the user wrote it.
        constraints: Limits that a schedule must keep to.
        runs: The runs of the finalists.
        finalists: The finalists, including the baseline; the fastest first.
        verdict: Whether to change, and why.
        search: Results of the search.
        per: Unit of times: seconds per step, or per micro-batch.
        counts_failures: Whether these are seconds of the whole job per step that counts.
    """

    scenario: Scenario
    constraints: Constraints
    runs: Runs
    finalists: tuple[Finalist, ...]
    verdict: Verdict
    search: Searched
    per: Literal["step", "micro-batch"] = "step"
    counts_failures: bool = False

    @property
    def baseline(self) -> Finalist:
        """The schedule that the others are compared with."""
        return next(each for each in self.finalists if each.is_baseline)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What to know beside the table: remarks on the scenario and the search, then on the finalists."""
        rows = [each.row for each in self.finalists]
        searched = as_searched(self.scenario, counts_failures=self.counts_failures)
        found = [
            *remarks_as_run(searched),
            *search_remarks(searched, self.constraints.global_every),
            *facet_remarks(self.runs.scenario, rows),
            *(each for each in self.runs.remarks if not each.is_of_inputs),
            *chance_remarks(chances_of(self.runs.scenario, rows[0].seeds), [each.measured for each in self.finalists]),
            *comparison.too_few_seeds(rows),
            *self._memory_remarks(),
            *([Remark("result", _OF_JOB)] if self.counts_failures else []),
            *self._not_modelled(),
        ]
        return tuple(dict.fromkeys(found))

    def _memory_remarks(self) -> Iterator[Remark]:
        """Yield which finalists keep to the limit of memory only without what an allocator reserves."""
        limit_nbytes = self.constraints.memory_nbytes
        used = {each.schedule.name: each.facts.device_nbytes for each in self.finalists}
        near = [
            label for label, nbytes in used.items() if nbytes <= limit_nbytes and not surely_fits(nbytes, limit_nbytes)
        ]
        if near:
            yield Remark("accuracy", may_not_fit(near, limit_nbytes))

    def _not_modelled(self) -> Iterator[Remark]:
        yield Remark("assumption", _NOT_KNOWN)
        if self.per != "step":
            yield Remark("assumption", "More micro-batches a step also make the batch of an update larger")
            if any(self.scenario.delays):
                late = "Delays are drawn per step: steps of more micro-batches meet fewer of them per sample"
                yield Remark("assumption", late, "disturbances")
        if len({each.checkpoint.every for each in self.finalists if each.checkpoint}) > 1:
            yield Remark("assumption", "The further apart checkpoints are, the more work a failure costs")

    def document(self) -> dict[str, object]:
        """Return a search for a schedule as JSON.

        Columns:
            scenario, baseline (str): Name and label.
            steps (int): Steps of each run, and a few more to complete a period.
            recorded_steps, block_steps (int or null): Steps of the recording, if any, and how many stay together.
            constraints (object): "The constraints of a search".
            complete (bool): False if Ctrl-C ended the search before all candidates were tried.
            candidates, evaluated, illegal (int): Legal schedules that exchange as often as required; plans simulated;
                candidates that do not fit the cluster.
            not_simulated (int): Plans that are surely too slow for a finalist.
            not_simulated_least_s (float or null): Seconds per step that each of them takes at least.
            excluded (object): Option -> candidates (int) that broke it.
            change (bool): A change from the baseline is proposed.
            outcome (str): `change`, `stay`, `unsure`, or `none`: no schedule keeps to the constraints.
            best (str): Label of the best finalist that keeps to the constraints, or the one that exceeds them least.
            verdict (str): What to do.
            reasons (list): Why (str).
            rows (list): "A finalist", the fastest first, with the baseline.
            remarks (list): "A remark".
        """
        verdict = self.verdict
        recording = self.runs.recording
        return {
            "scenario": self.runs.scenario.name,
            "steps": self.runs.scenario.steps,
            "recorded_steps": recording.n_steps if recording else None,
            "block_steps": recording.block_steps if recording else None,
            "baseline": self.baseline.schedule.name,
            "constraints": asdict(self.constraints),
            "complete": self.search.is_complete,
            **picked(self.search, "excluded", candidates="n_candidates", evaluated="n_evaluated", illegal="n_illegal"),
            "not_simulated": len(self.search.too_slow),
            "not_simulated_least_s": self.search.least_s,
            "change": verdict.winner is not None,
            **picked(verdict, "outcome", "reasons", verdict="sentence"),
            "best": verdict.best.schedule.name,
            "rows": [self.record(each) for each in self.finalists],
            "remarks": documents(self.remarks),
        }

    def record(self, finalist: Finalist) -> dict[str, object]:
        """Return a finalist as JSON.

        Columns:
            search_step_s (float): Step time with the seeds of the search.
            micro_batches (int): With `--micro-batches`: their number. All times are then per micro-batch.
            checkpoint (object): Only with checkpoints: as in the scenario.
            global_every_steps (float or null): Longest time, in steps, between exchanges of all ranks. `null`: never.
            sent_nbytes (float): Bytes that the busiest node sends per step; in one domain, the busiest GPU.
            device_nbytes, host_nbytes (int): Peak bytes of a rank's device; its buffers in host memory.
            breaks (list): Constraints (str) that it breaks, as on the command line.
            on_front (bool): It keeps to the constraints, and none that exchanges as often over all ranks is faster.
            problem (str or null): Why a recording cannot show how certain its speed-up is.
            entry (str): Line for `schedules`.
        """
        of_plan = picked(finalist.facts, "sent_nbytes", "device_nbytes", "host_nbytes", global_every_steps="global_gap")
        found = finalist.row.document() | of_plan
        found["breaks"] = [each.limit for each in finalist.breaches]
        found |= picked(finalist, "search_step_s", "on_front", "problem")
        found["entry"] = entry(finalist.schedule)
        if self.per != "step":
            found["micro_batches"] = finalist.micro_batches
        if finalist.checkpoint:
            found["checkpoint"] = finalist.checkpoint.model_dump(mode="json")
        return found

    def text(self) -> str:
        """Return the finalists as a table, the verdict, and the winner as a scenario has it."""
        verdict = self.verdict
        usual = _COLUMNS if self.per == "step" else _OF_PASSES
        columns = combined(usual, RANGES.columns([verdict.best.row.of(RANGES)]))
        if self.counts_failures:
            heading = f"job per {self.per} that counts"
            columns = [each.headed(heading) if each.keys[0] == "step_s" else each for each in columns]
        table = table_text(self._title(), columns, [self.record(each) for each in self.finalists])
        lines = [table, "", f"{verdict.sentence}.", *(f"  {reason}." for reason in verdict.reasons)]
        if winner := verdict.winner:
            own = self.runs.scenario.checkpoint
            changes = (winner.schedule, winner.micro_batches, winner.checkpoint)
            lines += ["", lines_of_scenario(self.scenario, *changes, own=own)]
        return "\n".join([*lines, *(line for each in below_table(self.remarks) for line in ("", each))])

    def _title(self) -> str:
        scenario = self.runs.scenario
        n_seeds = self.baseline.row.seeds
        n_tried = self.search.n_evaluated + len(self.search.too_slow)
        tried = f"{n_tried:,} {plural(n_tried, 'plan')} of {self.search.n_candidates:,} candidates tried"
        if self.search.least_s is not None:
            least = format_seconds(self.search.least_s)
            tried += f", {len(self.search.too_slow):,} of them not simulated: at least {least} per {self.per}"
        if not n_tried:
            tried = "no candidate keeps to the limits"
        if not self.search.is_complete:
            tried = f"search interrupted, incomplete: {tried}"
        again = f"finalists again with {n_seeds} other {plural(n_seeds, 'seed')}; " if scenario.is_random else ""
        about = f"{scenario.name}: {scenario.cluster.world_size:,} ranks"
        runs = f"runs of {scenario.steps:,} steps or a few more"
        if self.counts_failures:
            length = self.scenario.train_for
            whole = format_duration(length.seconds) if isinstance(length, Elapsed) else f"{length:,} steps"
            runs = f"the whole job of {whole}, with failures"
        title = f"{about}, {runs}; {tried}; {again}speed-up over {self.baseline.schedule.name}"
        if self.verdict.best.row.of(RANGES):
            return f"{title}, in brackets: 90 % intervals"
        if n_seeds == 1:
            return title
        recording = self.runs.recording
        what = f"what {recording.n_steps:,} recorded steps leave open" if recording else "error of the simulation"
        return f"{title}, ± {what} (95 %)"

    def frame(self) -> "pd.DataFrame":
        """Return a row per finalist, with the columns of `simdist.studies.comparison.frame`, the fastest first."""
        return with_remarks(comparison.frame([each.row for each in self.finalists]), self.remarks)

    def __repr__(self) -> str:
        return self.text()
