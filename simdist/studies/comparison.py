"""Comparison of schedules with a baseline: speed-ups, and where the time goes.

All schedules are measured with the same injected delays of the same seeds (common random numbers), so that their
differences are not noise. Intervals are 95 % confidence intervals over seeds, from Student's t distribution. Means
under rare or heavy delays are corrected by what is known of these, see `simdist.studies.known_delays`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from simdist.display import Pictured
from simdist.engines.choose import Engine
from simdist.errors import ScenarioError, naming
from simdist.plan.delays import Draw
from simdist.runs.building import Built, build, in_steps
from simdist.scenario.sampling import run_seeds
from simdist.scenario.scenario import AnyScenario, Scenario, load
from simdist.schedules import Schedule
from simdist.settings.base import plural
from simdist.settings.units import format_seconds
from simdist.studies.columns import ENGINE, SCHEDULE, SPEEDUP, STATE_COLUMNS, STEP_TIME, combined
from simdist.studies.draws import shared_delays, with_draws
from simdist.studies.facets import FACETS, RANGES, Facet, FacetValues, Line, Simulated, ValueT, facet_remarks, told
from simdist.studies.facets import facet_columns as columns_of_facets
from simdist.studies.known_delays import chance_remarks, chances_of, corrected
from simdist.studies.measuring import Progress, RunsSoFar, ScheduleTimes, measure, times_of
from simdist.studies.remarks import Remark, below_table, documents, remarks_of, with_remarks
from simdist.studies.statistics import (
    NORMAL_QUANTILE,
    TIMES_OF_DRAWS,
    Interval,
    is_wide,
    positive_interval,
    ratio_interval,
)
from simdist.studies.tables import facets_text, table_text
from simdist.traces.breakdown import STATES, break_down
from simdist.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

    from simdist.engines.actors import Actor

_USUAL_SEEDS = 20
_COLUMNS = (SCHEDULE, STEP_TIME, SPEEDUP, *STATE_COLUMNS, ENGINE)


@dataclass(frozen=True)
class Row:
    """A line of the speed-up table; times in seconds per step, averaged over ranks and seeds.

    `compute_s + comm_s + wait_s + io_s + host_s = step_s`; see `simdist.traces.breakdown` for their meaning. The
    intervals are None with a single seed. `facets` has optional topics, such as epochs: `row.of(EPOCHS)`.

    Only where something is `uncertain` there are ranges, in which the truth lies with 90 %: what the seeds and what the
    uncertain quantities leave open together; in JSON they are `step_s_range90` and `speedup_range90`.
    """

    schedule: str
    step_s: float
    step_s_ci95: tuple[float, float] | None
    speedup: float
    speedup_ci95: tuple[float, float] | None
    compute_s: float
    comm_s: float
    wait_s: float
    io_s: float
    host_s: float
    engine: str
    seeds: int
    step_s_range: tuple[float, float] | None = None
    speedup_range: tuple[float, float] | None = None
    facets: FacetValues = field(default_factory=FacetValues)

    def of(self, facet: Facet[ValueT]) -> ValueT:
        """Return the value of a facet."""
        return self.facets.of(facet)

    def line(self, facet: Facet[ValueT]) -> Line[ValueT]:
        """Return what a facet says."""
        return Line(self.schedule, self.step_s, self.of(facet))

    @property
    def states_s(self) -> dict[str, float]:
        """Seconds per step in each state of `simdist.traces.breakdown`."""
        seconds = (self.compute_s, self.comm_s, self.wait_s, self.io_s, self.host_s)
        return dict(zip(STATES, seconds, strict=True))

    def scaled(self, factor: float) -> "Row":
        """Return the line with all times multiplied by a factor, and the same speed-up."""
        states_s: dict[str, Any] = {f"{state}_s": seconds * factor for state, seconds in self.states_s.items()}
        return replace(
            self,
            step_s=self.step_s * factor,
            step_s_ci95=_scaled(self.step_s_ci95, factor),
            step_s_range=_scaled(self.step_s_range, factor),
            **states_s,
        )

    def document(self) -> dict[str, object]:
        """Return the line as JSON has it: a key per attribute, and the keys of facets that say something.

        Columns:
            schedule, engine (str): Label; `fast` or `des`.
            speedup (float): Step time of the baseline / of this schedule.
            step_s_ci95, speedup_ci95 (list or null): `[low, high]`, 95 % confidence intervals over seeds.
            step_s, compute_s, comm_s, wait_s, io_s, host_s (float): Times per step.
            seeds (int): Number of seeds.
            epochs (list): Only with a data set: "An epoch of a schedule".
            staging_s (float): Only with a data set: time of staging before the first epoch.
            added_s (object): What `checkpoints` and disturbed `links`, if any, add to `step_s`.
            links_s, late (object): As in "A simulated schedule".
            gradients_used (float): Likewise.
            shares (object): With `uncertain` values: path, `doubt.` and kind, or `seeds` -> share (float) of the
                variance of `speedup` (of the baseline, `step_s`).
            job_steps, job_s (float): Only with `train_for`: steps and time of the whole job.
            memory_nbytes (int): Of a sharded or too large model: peak bytes on a device.
            memory_of_nbytes (object): The same by use: `parameters`, `optimizer`, `units` (gathered parameters),
                `gradients`, `activations`, `communication`, `other`.
            goodput, ettr (float): Only with `failures`: shares of the whole job, as in "Goodput of a schedule".
            goodput_range90 (list): With uncertain rates or recoveries: `[low, high]`, as there.
            step_s_range90, speedup_range90 (list): With `uncertain` values: `[low, high]`, 90 % intervals from seeds,
                these values and published errors.
        """
        return self._usual() | self.facets.document() | self._ranges()

    def cells(self, facets: Sequence[Facet[Any]]) -> dict[str, object]:
        """Return the line as tables have it, with the columns of some facets."""
        return self._usual() | self.facets.cells(facets) | self._ranges()

    def _usual(self) -> dict[str, object]:
        return {
            "schedule": self.schedule,
            "step_s": self.step_s,
            "step_s_ci95": self.step_s_ci95,
            "speedup": self.speedup,
            "speedup_ci95": self.speedup_ci95,
            **{f"{state}_s": seconds for state, seconds in self.states_s.items()},
            "engine": self.engine,
            "seeds": self.seeds,
        }

    def _ranges(self) -> dict[str, object]:
        pairs = {"step_s_range90": self.step_s_range, "speedup_range90": self.speedup_range}
        return {key: pair for key, pair in pairs.items() if pair}


def _scaled(interval: Interval | None, factor: float) -> Interval | None:
    return (interval[0] * factor, interval[1] * factor) if interval else None


@final
class Comparison(list[Row], Pictured):
    """The rows of a comparison. In a notebook it is shown as a table.

    >>> from simdist.scenario import load
    >>> rows = compare(load("cloud-stragglers").changed(steps=8), n_seeds=2)
    >>> rows.frame().columns[:7].tolist()
    ['schedule', 'step_s', 'step_s_ci95_low', 'step_s_ci95_high', 'speedup', 'speedup_ci95_low', 'speedup_ci95_high']
    """

    def __init__(
        self, rows: Iterable[Row], *, scenario: Scenario, baseline: str, title: str, measured: Sequence[ScheduleTimes]
    ) -> None:
        """Take the rows.

        Args:
            rows: A row for each schedule.
            measured: The times behind each row.
            scenario: The scenario that was simulated.
            baseline: Label of the schedule that speed-ups are over.
            title: Heading of tables and pictures.
        """
        super().__init__(rows)
        self.scenario = scenario
        self.baseline = baseline
        self.title = title
        self.measured = tuple(measured)
        self.warm_up = 0
        self.drawn: Remark | None = None  # on the number of seeds, if they were as many as it takes

    @property
    def base(self) -> Row:
        """The row of the baseline."""
        return next(each for each in self if each.schedule == self.baseline)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What to know beside the table: remarks on the scenario, then on the rows."""
        chances = chances_of(self.scenario, self[0].seeds)
        seeds = [self.drawn] if self.drawn else too_few_seeds(self)
        of_chance = (*chance_remarks(chances, self.measured), *seeds)
        of_rows = (*facet_remarks(self.scenario, self), *unclear(self.scenario, self, self.base))
        return (*remarks_of(self.scenario, warm_up=self.warm_up), *of_rows, *of_chance)

    def document(self) -> dict[str, object]:
        """Return the comparison as JSON has it.

        Columns:
            scenario, baseline (str): Name and label.
            rows (list): "A schedule among others".
            remarks (list): "A remark".
        """
        return {
            "scenario": self.scenario.name,
            "baseline": self.baseline,
            "rows": [each.document() for each in self],
            "remarks": documents(self.remarks),
        }

    def text(self) -> str:
        """Return the comparison as tables, with the remarks below that only its results tell."""
        facets = told(self)
        columns = combined(_COLUMNS, columns_of_facets(self))
        tables = [table_text(self.title, columns, [each.cells(facets) for each in self]), *facets_text(self, self.base)]
        return "\n\n".join([*tables, *below_table(self.remarks)])

    def frame(self, *, per: Literal["schedule", "seed"] = "schedule") -> "pd.DataFrame":
        """Return the rows as a pandas frame, see `frame`; its `attrs` have the `remarks`.

        Args:
            per: `seed` returns a row for each schedule and seed instead, with its times as simulated: `schedule`,
                `seed`, `step_s`, `speedup` and the seconds in each state.
        """
        return with_remarks(frame(self) if per == "schedule" else self._per_seed(), self.remarks)

    def _per_seed(self) -> "pd.DataFrame":
        from simdist.studies.columns import frame_of_records

        runs = [each.as_simulated for each in self.measured]
        base = runs[[each.label for each in runs].index(self.baseline)]
        seeds = run_seeds(self.scenario.seed, len(base.step_s))
        return frame_of_records(
            {
                "schedule": each.label,
                "seed": seed,
                "step_s": step_s,
                "speedup": base.step_s[number] / step_s,
                **{f"{state}_s": seconds[number] for state, seconds in each.states_s.items()},
            }
            for each in runs
            for number, (seed, step_s) in enumerate(zip(seeds, each.step_s, strict=True))
        )

    def __repr__(self) -> str:
        lines = (f"{each.schedule}: {format_seconds(each.step_s)} per step, {each.speedup:.2f}" for each in self)
        return "\n".join([self.title, *lines, *(f"{each}." for each in self.remarks)])


def compare(  # noqa: PLR0913 (one for each option)
    scenario: AnyScenario,
    *,
    baseline: str | None = None,
    n_seeds: int = 20,
    engine: Engine = "auto",
    progress: Progress | None = None,
    measured: list[ScheduleTimes] | None = None,
    actors: "Sequence[Actor]" = (),
    facets: Sequence[Facet[Any]] = FACETS,
    warm_up: int = 0,
    so_far: RunsSoFar | None = None,
) -> Comparison:
    """Return the speed-up table of a scenario, in the order of its schedules.

    Args:
        scenario: The scenario to simulate, or what `simdist.scenario.load` takes for one.
        baseline: Label or kind of the schedule that the others are compared with; see `default_baseline`.
        n_seeds: Number of seeds, see `simdist.scenario.sampling.run_seeds`.
        engine: `auto` takes the fast engine wherever it is exact.
        progress: See `Progress`.
        measured: The times of each schedule are appended when they are there, before the next one begins. After Ctrl-C,
            a call with the same list goes on with the first schedule that it lacks.
        actors: Processes of the user, see `simdist.engines.actors`; each schedule and seed starts them anew.
        facets: Optional topics, in the order of their keys.
        warm_up: First steps that are left out of the means, see `simdist.studies.lengths`.
        so_far: As of `measure`.

    Raises:
        ScenarioError: There is no such baseline, `measured` has the times of another scenario, or `warm_up` does not
            fit.
        PlanError: A schedule does not fit the cluster, or what the job does about failures.
        UnsupportedError: `fast` was asked for and cannot compute a schedule exactly.
    """
    scenario = load(scenario)
    reference = find_baseline(scenario, baseline)
    draw = shared_delays(scenario)
    measured = [] if measured is None else measured
    _check_measured(measured, scenario, n_seeds)
    if scenario.failures is not None and scenario.train_for is not None:
        from simdist.runs.failing_job import check_failures_fit

        for schedule in scenario.schedules:
            with naming(schedule.name):
                check_failures_fit(scenario.failures, schedule, scenario.cluster.world_size)
    for schedule in scenario.schedules[len(measured) :]:
        if progress:
            progress(schedule.name, 0, 1)
        with naming(schedule.name):
            its = in_steps(scenario, schedule)
            built = build(its, schedule)
            built = replace(built, actors=(*built.actors, *actors))
            times = measure_with_additions(
                its, built, n_seeds=n_seeds, engine=engine, progress=progress, draw=draw, facets=facets, so_far=so_far
            )
            if warm_up:
                times = _without_warm_up(its, built, times, warm_up, facets, so_far)
        measured.append(replace(times, scenario=scenario))
    base = measured[scenario.schedules.index(reference)]
    rows = [row(each, base) for each in measured]
    has_ranges = any(each.of(RANGES) or each.step_s_range for each in rows)
    title = _title(scenario, reference.name, n_seeds, has_ranges=has_ranges)
    found = Comparison(rows, scenario=scenario, baseline=reference.name, title=title, measured=measured)
    found.warm_up = warm_up
    return found


def _without_warm_up(
    scenario: Scenario,
    built: Built,
    times: ScheduleTimes,
    warm_up: int,
    facets: Sequence[Facet[Any]],
    so_far: RunsSoFar | None,
) -> ScheduleTimes:
    """Return the times of a schedule without its first steps."""
    from simdist.studies.lengths import scenario_of_warm_up, without_first

    early = scenario_of_warm_up(scenario, warm_up)
    short = replace(build(early, built.schedule), actors=built.actors)
    engine: Engine = "des" if times.engine == "des" else "auto"
    n_seeds = len(times.step_s)
    first = measure_with_additions(early, short, n_seeds=n_seeds, engine=engine, facets=facets, so_far=so_far)
    return without_first(times, first, n_steps=scenario.steps, warm_up=warm_up)


def _check_measured(measured: Sequence[ScheduleTimes], scenario: Scenario, n_seeds: int) -> None:
    """Refuse times that another call has measured, of another scenario or with other seeds."""
    for each, schedule in zip(measured, scenario.schedules, strict=False):
        if each.scenario != scenario or each.label != schedule.name or len(each.step_s) != n_seeds:
            raise ScenarioError(
                f"{scenario.name}: measured has times of {each.label} in another scenario or with other seeds: "
                f"give an empty list, or compare with what was measured"
            )


def _title(scenario: Scenario, baseline: str, n_seeds: int, *, has_ranges: bool) -> str:
    counts = f"{scenario.cluster.world_size:,} ranks, {scenario.steps:,} steps, {n_seeds} {plural(n_seeds, 'seed')}"
    title = f"{scenario.name}: {counts}; speed-up over {baseline}"
    if has_ranges:
        return f"{title}, in brackets: 90 % intervals"
    return f"{title}, 95 % confidence" if n_seeds > 1 else title


def frame(rows: Sequence[Row]) -> "pd.DataFrame":
    """Return a speed-up table as a pandas frame, with the columns of the results of sweeps.

    The ends of an interval such as `step_s_ci95` are two columns, `step_s_ci95_low` and `step_s_ci95_high`.
    """
    from simdist.studies.columns import frame_of_records

    facets = told(rows)
    return frame_of_records(each.cells(facets) for each in rows)


def find_baseline(scenario: Scenario, baseline: str | None) -> Schedule:
    """Return the schedule with that label or, failing that, the first of that kind; None: see `default_baseline`.

    In a scenario that was imported from a job with a sharded model, `sync` stands for the schedule of the job.

    Raises:
        ScenarioError: There is none.
    """
    found = find_label([(schedule.name, schedule.kind) for schedule in scenario.schedules], baseline)
    traced = scenario.traced_sharding
    if found is None and baseline == "sync" and traced is not None:
        return traced
    if found is None:
        labels = ", ".join(schedule.name for schedule in scenario.schedules)
        raise ScenarioError(f"{scenario.name}: no schedule is called {baseline!r} to compare with; there are: {labels}")
    return scenario.schedules[found]


def default_baseline(schedules: Sequence[tuple[str, str]]) -> str:
    """Return what to compare with unless the user says: `sync` if a schedule has that label or kind, else the first.

    Args:
        schedules: Label and kind of each, one or more.

    >>> default_baseline([("local-4", "local_sgd"), ("sync-fp16", "sync")]), default_baseline([("fsdp", "fsdp")])
    ('sync', 'fsdp')
    """
    return schedules[0][0] if find_label(schedules, "sync") is None else "sync"


def find_label(schedules: Sequence[tuple[str, str]], wanted: str | None) -> int | None:
    """Return which of the schedules, given as label and kind, is meant: that label or, failing that, the first kind.

    None means the `default_baseline`.

    >>> find_label([("local-4", "local_sgd"), ("sync", "sync")], "local_sgd")
    0
    """
    wanted = default_baseline(schedules) if wanted is None else wanted
    labels = [label for label, _ in schedules]
    kinds = [kind for _, kind in schedules]
    for names in (labels, kinds):
        if wanted in names:
            return names.index(wanted)
    return None


def measure_with_additions(
    scenario: Scenario,
    built: Built,
    *,
    n_seeds: int,
    engine: Engine = "auto",
    progress: Progress | None = None,
    draw: Draw | None = None,
    facets: Sequence[Facet[Any]] = FACETS,
    so_far: RunsSoFar | None = None,
) -> ScheduleTimes:
    """Simulate a schedule as `measure` does, again for facets that ask for it, and under draws."""
    draw = draw or shared_delays(scenario)

    def again(other: Scenario) -> NDArray[np.float64]:
        plain = build(other, built.schedule)
        plain = replace(plain, actors=(*plain.actors, *built.actors[len(scenario.actors) :]))
        return measure(other, plain, n_seeds=n_seeds, engine=engine, draw=draw, facets=(), so_far=so_far).step_s

    measured = measure(
        scenario, built, n_seeds=n_seeds, engine=engine, progress=progress, draw=draw, facets=facets, so_far=so_far
    )
    for facet in facets:
        value = facet.measure_again(scenario, measured.step_s, again)
        if value is None:
            steps = partial(steps_in, schedule=built.schedule, n_seeds=n_seeds)
            value = facet.measure_built(scenario, built, n_seeds=n_seeds, steps_in=steps)
        if value is not None:
            measured = replace(measured, facets=measured.facets.changed(facet, value))
    return corrected(scenario, built, with_draws(scenario, built, measured, progress=progress, draw=draw))


def steps_in(scenario: Scenario, schedule: Schedule, *, n_seeds: int, draws: bool = False) -> ScheduleTimes:
    """Return the times of a schedule in a scenario without facets; under draws, too, if asked for."""
    built = build(scenario, schedule)
    measured = measure(scenario, built, n_seeds=n_seeds, draw=shared_delays(scenario), facets=())
    return corrected(scenario, built, with_draws(scenario, built, measured) if draws else measured)


def range_of_trace(scenario: Scenario, built: Built, trace: Trace) -> Interval | None:
    """Return between which multiples of its makespan the truth of a simulation lies, if something is uncertain."""
    simulated = Simulated(built.plan, (break_down(trace),))
    measured = with_draws(scenario, built, times_of(built.schedule.name, "", simulated, ()))
    if not measured.drawn:
        return None
    found = row(measured, measured)
    return found.step_s_range and (found.step_s_range[0] / found.step_s, found.step_s_range[1] / found.step_s)


def row(measured: ScheduleTimes, baseline: ScheduleTimes) -> Row:
    """Return the line of the table that compares `measured` with `baseline`.

    Raises:
        ScenarioError: A step takes no time at all.
    """
    for each in (measured, baseline):
        if not each.step_s.all():
            raise ScenarioError(
                f"{each.label}: a step takes no time, so there is no speed-up; give e.g. forward: 20 ms"
            )
    means: dict[str, Any] = {f"{state}_s": float(seconds.mean()) for state, seconds in measured.states_s.items()}
    step_s = float(measured.step_s.mean())
    baseline_s = float(baseline.step_s.mean())
    speedup = baseline_s / step_s
    found = Row(
        schedule=measured.label,
        step_s=step_s,
        step_s_ci95=step_interval(measured),
        speedup=speedup,
        speedup_ci95=speedup_interval(speedup, measured, baseline),
        engine=measured.engine,
        seeds=len(measured.step_s),
        facets=measured.facets,
        **means,
    )
    return with_ranges(found, measured, baseline)


def step_interval(measured: ScheduleTimes) -> Interval | None:
    """Return the 95 % confidence interval of the step time of a schedule; None if it is not known."""
    if math.isinf(measured.unseen_s):
        return None
    return positive_interval(measured.step_s, error=measured.unseen_s / NORMAL_QUANTILE)


def speedup_interval(speedup: float, measured: ScheduleTimes, baseline: ScheduleTimes) -> Interval | None:
    """Return the 95 % confidence interval of the speed-up of a schedule over another; None if it is not known."""
    if measured is baseline:
        return None if len(measured.step_s) == 1 else (1.0, 1.0)
    unseen = math.hypot(*(each.unseen_s / float(each.step_s.mean()) for each in (measured, baseline)))
    if math.isinf(unseen):
        return None
    return ratio_interval(speedup, baseline.step_s, measured.step_s, error=speedup * unseen / NORMAL_QUANTILE)


def with_ranges(found: Row, measured: ScheduleTimes, baseline: ScheduleTimes) -> Row:
    """Return a row with intervals that combine seeds and draws of uncertain quantities."""
    if not (measured.drawn and baseline.drawn):
        return found
    from simdist.studies.uncertainty import spread

    places = {name: at for name, at in measured.drawn.items() if name not in TIMES_OF_DRAWS}
    (ours, stated), (theirs, their_stated) = (
        [each.drawn[name] for name in TIMES_OF_DRAWS] for each in (measured, baseline)
    )
    of_step, own = spread(found.step_s, ours - stated, found.step_s_ci95, places)
    of_speedup, shares = spread(found.speedup, theirs / ours - their_stated / stated, found.speedup_ci95, places)
    shares = own if measured is baseline else shares
    facets = found.facets.changed(RANGES, shares)
    return replace(found, step_s_range=of_step, speedup_range=of_speedup, facets=facets)


def unclear(scenario: Scenario, rows: Sequence[Row], base: Row) -> list[Remark]:
    """Say which schedules may be faster or slower than the baseline, if the step of a ring decides, and what tells."""
    if not any(each.of(RANGES) for each in rows):
        return []
    from simdist.studies.resampling import WORTHWHILE
    from simdist.studies.uncertainty import RING_STEP, quantities

    others = (each for each in rows if each is not base and _holds(each.speedup_range, (1 / WORTHWHILE, WORTHWHILE)))
    shares_of = {each.schedule: each.of(RANGES) for each in others if each.of(RANGES)}
    step = next((each for each in quantities(scenario) if each.name == RING_STEP), None)
    undecided = [label for label, of in shares_of.items() if step and max(of, key=of.__getitem__) == step.name]
    if step is None or not undecided:
        return []
    text = (
        f"unclear whether {', '.join(undecided)} {'differs' if len(undecided) == 1 else 'differ'} from {base.schedule} "
        f"by {100 * (WORTHWHILE - 1):.0f} % or more: measure {step.written.measure}, which tells {step.name}"
    )
    return [Remark("accuracy", text, undecided[0] if len(undecided) == 1 else "")]


def open_step(scenario: Scenario) -> tuple[Remark, ...]:
    """Say that the step of a ring counts as 0, for results whose intervals contain no draws of it."""
    from simdist.studies.uncertainty import RING_STEP, quantities

    step = next((each for each in quantities(scenario) if each.name == RING_STEP), None)
    if step is None:
        return ()
    text = (
        f"unclear how long gathers over many machines take, because {step.name} is not measured and counts as 0: "
        f"measure {step.written.measure}"
    )
    return (Remark("accuracy", text, step.name),)


def _holds(interval: Interval | None, limits: Iterable[float]) -> bool:
    """Tell whether one of some limits is inside an interval."""
    return interval is not None and any(interval[0] < limit < interval[1] for limit in limits)


def too_few_seeds(rows: Sequence[Row]) -> list[Remark]:
    """Say that seeds are too few, if the intervals of some rows are so wide that little is known."""
    wide = [
        each.schedule
        for each in rows
        if (each.step_s_ci95 and is_wide(each.step_s, each.step_s_ci95))
        or (each.speedup_ci95 and is_wide(each.speedup, each.speedup_ci95))
    ]
    if not wide:
        return []
    n_seeds = rows[0].seeds
    more = max(_USUAL_SEEDS, 4 * n_seeds)
    text = f"{n_seeds} seeds are too few to know the times of {', '.join(wide)}: write --seeds {more} or more"
    return [Remark("accuracy", text, wide[0] if len(wide) == 1 else "")]
