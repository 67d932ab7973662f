"""Comparison of schedules with a baseline: speed-ups, and where the time goes.

All schedules are measured with the same injected delays of the same seeds (common random numbers), so that their
differences are not noise. Intervals are 95 % confidence intervals over seeds, from Student's t distribution.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from simdist.cost import tensor_backward_s
from simdist.engines import Delays, DelaySource, DrawnDelays, Engine, choose_engine, fast, first_exact
from simdist.errors import ScenarioError, UnsupportedError, naming
from simdist.plan.delays import no_delays
from simdist.runs.building import Built, build, delay_sampler, in_steps, job, price_of, traffic
from simdist.scenario.scenario import AnyScenario, Scenario, load
from simdist.scenario.strict_yaml import Path
from simdist.scenario.warnings import unstated
from simdist.schedules import Schedule
from simdist.settings.base import plural, unchecked_copy
from simdist.settings.units import format_seconds
from simdist.studies.facets import FACETS, RANGES, Facet, FacetValues, Line, Simulated, ValueT, sentences, told
from simdist.studies.facets import doubts as doubts_of_facets
from simdist.studies.remarks import remarks_of
from simdist.studies.statistics import Interval, is_wide, positive_interval, ratio_interval
from simdist.traces.breakdown import STATES, Breakdown, break_down
from simdist.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from simdist.engines.actors import Actor
    from simdist.studies.epochs import Epochs
    from simdist.studies.published_errors import Doubt


#: Called with a schedule's label, rank-steps done and rank-steps in all.
Progress = Callable[[str, int, int], None]

#: Returns the delays of seeds, from step 0 on.
Draw = Callable[[Sequence[int]], DelaySource]

_INTERVAL = "_ci95"
_TIMES = ("step", "stated")  # of draws
_DISTURBANCES = "disturbances"
_NETWORK = ("cluster", "network")  # no delay depends on it
_MOST_KEPT_VALUES = 2**23  # delays: 64 MiB
_USUAL_SEEDS = 20
_RARE = 0.5  # stragglers, in steps of all seeds for each step: up to here, simulating one rank of each kind pays
_BATCH_VALUES = 16_384  # ranks x seeds whose vectors stay in a core's cache


@dataclass(frozen=True)
class ScheduleTimes:
    """One schedule, simulated for many seeds.

    Args:
        label: The schedule's label.
        engine: `fast` or `des`.
        step_s: Seconds per step of each seed, `[n_seeds]`.
        states_s: Seconds per step in each state, averaged over ranks, by seed: state -> `[n_seeds]`.
        facets: Optional topics, such as epochs.
        drawn: If something is uncertain, and that was measured, of each draw, `[n_draws]`: `step`, its seconds per
            step; `stated`, those of the same seed as stated; and by path its place in the range of a quantity, 0 to 1.
    """

    label: str
    engine: str
    step_s: NDArray[np.float64]
    states_s: dict[str, NDArray[np.float64]]
    drawn: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    facets: FacetValues = field(default_factory=FacetValues)
    scenario: Scenario | None = field(default=None, repr=False)

    def of(self, facet: Facet[ValueT]) -> ValueT:
        """Return the value of a facet."""
        return self.facets.of(facet)

    def line(self, facet: Facet[ValueT]) -> Line[ValueT]:
        """Return what a facet says."""
        return Line(self.label, float(self.step_s.mean()), self.of(facet))

    def divided(self, n_parts: int) -> "ScheduleTimes":
        """Return seconds per part of a step, such as a micro-batch, in place of those per step."""
        states_s = {state: seconds / n_parts for state, seconds in self.states_s.items()}
        drawn = {name: values / (n_parts if name in _TIMES else 1) for name, values in self.drawn.items()}
        step_s = self.step_s / n_parts
        facets = self.facets.divided(n_parts)
        return replace(self, step_s=step_s, states_s=states_s, drawn=drawn, facets=facets)


@dataclass(frozen=True)
class Row:
    """A line of the speed-up table; times in seconds per step, averaged over ranks and seeds.

    `compute_s + comm_s + wait_s + io_s + host_s = step_s`; see `simdist.traces.breakdown` for their meaning. The
    intervals are None with a single seed. `facets` has optional topics, such as epochs: `row.of(EPOCHS)`.

    Only where something is `uncertain` there are ranges, in which the truth lies with 90 %: what the seeds and what the
    uncertain quantities leave open together; in JSON their ends are `step_s_lo` and so on.
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

    def document(self) -> dict[str, object]:
        """Return the line as JSON has it: a key per attribute, and the keys of facets that say something.

        Columns:
            schedule (str): Label.
            step_s (float): Seconds per step.
            step_s_ci95 (list or null): `[low, high]`, the 95 % confidence interval over seeds. `null` with one seed.
            speedup (float): Step time of the baseline / step time of this schedule.
            speedup_ci95 (list or null): `[low, high]`, its 95 % confidence interval.
            compute_s (float): The compute stream works.
            comm_s (float): Exposed communication.
            wait_s (float): Waiting for other ranks.
            io_s (float): Loading, staging, saving.
            host_s (float): The host is late or asleep.
            engine (str): `fast` or `des`.
            seeds (int): Number of seeds.
            epochs (list): Only with a data set: "An epoch of a schedule".
            staging_s (float): Only with a data set: time before the first epoch in which files are staged in.
            added_s (object): Only with `checkpoints` or disturbed `links`: what they add to `step_s`, compared with the
                same seeds without them.
            links_s (object): Only where links held ranks up: link, such as `nic_out[3]`, -> seconds (float) of `comm_s`
                and `io_s`.
            gradients_used (float): Only below 1: share of the batches that contribute to updates. Ranks that sit out or
                arrive too late lose the rest.
            late (object): Only where ranks are too late for at least 90 % of the updates: rank -> that share (float).
            shares (object): Only where something is `uncertain`: its path, `doubt.` and a kind, or `seeds`, -> the
                share (float) of the variance of `speedup` that it causes alone. For the baseline, of `step_s`.
            job_steps (float): Only with `train_for`: steps of the whole job. Of a time, those that fit.
            job_s (float): Only with `train_for`: time of the whole job, at `step_s`.
            memory_nbytes (int): Only of a schedule that shards the model, or needs more than the device has: bytes in
                use on a device when most are, without disturbances.
            memory_of_nbytes (object): The same bytes by what they are for: `parameters`, `optimizer`, `units` (gathered
                parameters), `gradients`, `activations`, `communication`, `other`.
            step_s_lo, step_s_hi (float): Only where something is `uncertain`: ends of the 90 % interval from seeds,
                uncertain values and errors of published rows together.
            speedup_lo, speedup_hi (float): The same of `speedup`.
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
        found: dict[str, object] = {}
        for key, pair in (("step_s", self.step_s_range), ("speedup", self.speedup_range)):
            if pair:
                found[f"{key}_lo"], found[f"{key}_hi"] = pair
        return found


@final
class Comparison(list[Row]):
    """The rows of a comparison. In a notebook it is shown as a table.

    >>> from simdist.scenario import load
    >>> rows = compare(load("cloud-stragglers").changed(steps=8), n_seeds=2)
    >>> rows.frame().columns[:7].tolist()
    ['schedule', 'step_s', 'step_s_low', 'step_s_high', 'speedup', 'speedup_low', 'speedup_high']
    """

    def __init__(self, rows: Iterable[Row], *, scenario: Scenario, baseline: str, title: str) -> None:
        """Take the rows.

        Args:
            rows: A row for each schedule.
            scenario: The scenario that was simulated.
            baseline: Label of the schedule that speed-ups are over.
            title: Heading of tables and pictures.
        """
        super().__init__(rows)
        self.scenario = scenario
        self.baseline = baseline
        self.title = title

    @property
    def base(self) -> Row:
        """The row of the baseline."""
        return next(each for each in self if each.schedule == self.baseline)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the rows do not show: gradients that are not used, numbers that are not stated, too few seeds."""
        of_scenario = unstated(self.scenario.cluster, self.scenario.schedules)
        return (*sentences(self), *of_scenario, *doubts_of_facets(self.scenario, self), *too_few_seeds(self))

    @property
    def remarks(self) -> tuple[str, ...]:
        """All that `simdist compare` says beside the table: `remarks_of` the scenario, then `notes`; no full stops."""
        return (*remarks_of(self.scenario), *self.notes)

    def document(self) -> dict[str, object]:
        """Return the comparison as JSON has it.

        Columns:
            scenario (str): Its name.
            baseline (str): Label.
            rows (list): "A schedule among others".
            remarks (list): Settings without effect or probably wrong, and what the rows do not show (str).
        """
        rows = [each.document() for each in self]
        return {
            "scenario": self.scenario.name,
            "baseline": self.baseline,
            "rows": rows,
            "remarks": list(self.remarks),
        }

    def frame(self) -> "pd.DataFrame":
        """Return the rows as a pandas frame, see `frame`; its `attrs` have the `remarks`."""
        found = frame(self)
        found.attrs["remarks"] = list(self.remarks)
        return found

    def plot(self) -> "Figure":
        """Draw the speed-ups with their intervals, and where the step time goes."""
        from simdist import plot

        return plot(self)

    def __repr__(self) -> str:
        lines = (f"{each.schedule}: {format_seconds(each.step_s)} per step, {each.speedup:.2f}" for each in self)
        return "\n".join([self.title, *lines, *(f"{each}." for each in self.remarks)])

    def _repr_html_(self) -> str:
        from simdist import html_of

        return html_of(self)


def compare(
    scenario: AnyScenario,
    *,
    baseline: str | None = None,
    n_seeds: int = 20,
    engine: Engine = "auto",
    progress: Progress | None = None,
    measured: list[ScheduleTimes] | None = None,
    actors: "Sequence[Actor]" = (),
    facets: Sequence[Facet[Any]] = FACETS,
) -> Comparison:
    """Return the speed-up table of a scenario, in the order of its schedules.

    Args:
        scenario: The scenario to simulate, or what `simdist.scenario.load` takes for one.
        baseline: Label or kind of the schedule that the others are compared with; see `default_baseline`.
        n_seeds: Seeds, counted up from the scenario's.
        engine: `auto` takes the fast engine wherever it is exact.
        progress: See `Progress`.
        measured: The times of each schedule are appended when they are there, before the next one begins. After Ctrl-C,
            a call with the same list goes on with the first schedule that it lacks.
        actors: Processes of the user, see `simdist.engines.actors`; each schedule and seed starts them anew.
        facets: Optional topics, in the order of their keys.

    Raises:
        ScenarioError: There is no such baseline, or `measured` has the times of another scenario.
        PlanError: A schedule does not fit the cluster.
        UnsupportedError: `fast` was asked for and cannot compute a schedule exactly.
    """
    scenario = load(scenario)
    reference = find_baseline(scenario, baseline)
    draw = shared_delays(scenario)
    measured = [] if measured is None else measured
    _check_measured(measured, scenario, n_seeds)
    for schedule in scenario.schedules[len(measured) :]:
        if progress:
            progress(schedule.name, 0, 1)
        with naming(schedule.name):
            its = in_steps(scenario, schedule)
            built = replace(build(its, schedule), actors=tuple(actors))
            times = measure_with_additions(
                its, built, n_seeds=n_seeds, engine=engine, progress=progress, draw=draw, facets=facets
            )
        measured.append(replace(times, scenario=scenario))
    base = measured[scenario.schedules.index(reference)]
    rows = [row(each, base) for each in measured]
    has_ranges = any(each.of(RANGES) or each.step_s_range for each in rows)
    title = _title(scenario, reference.name, n_seeds, has_ranges=has_ranges)
    return Comparison(rows, scenario=scenario, baseline=reference.name, title=title)


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

    The ends of an interval such as `step_s_ci95` are two columns, `step_s_low` and `step_s_high`. Facets that say
    something add theirs.
    """
    from simdist.studies.frames import frame_of_records

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


def shared_delays(scenario: Scenario) -> Draw:
    """Return a function that draws the delays of seeds once for all schedules, where they are few enough to keep."""
    kept: dict[tuple[int, ...], Delays] = {}

    def draw(seeds: Sequence[int]) -> DelaySource:
        n_rows = scenario.steps * scenario.workload.micro_batches
        n_values = n_rows * scenario.cluster.world_size * len(seeds) * len(scenario.disturbances)
        key = tuple(seeds)
        if key not in kept:
            if n_values * (len(kept) + 1) > _MOST_KEPT_VALUES:
                return delay_sampler(scenario, seeds)
            kept[key] = delay_sampler(scenario, seeds).take(scenario.steps)
        return DrawnDelays(kept[key])

    return draw


def measure(
    scenario: Scenario,
    built: Built,
    *,
    n_seeds: int,
    engine: Engine = "auto",
    progress: Progress | None = None,
    draw: Draw | None = None,
    facets: Sequence[Facet[Any]] = FACETS,
) -> ScheduleTimes:
    """Simulate one schedule for many seeds, keeping no traces.

    Args:
        scenario: The schedule's.
        built: The schedule.
        n_seeds: Seeds, counted up from the scenario's.
        engine: `auto` takes the fast engine wherever it is exact.
        progress: See `Progress`.
        draw: Gives the delays of seeds, as `shared_delays` does for several schedules; by default they are drawn here.
        facets: See `compare`; those that take further simulations say nothing.

    Raises:
        ScenarioError: There are no seeds.
        UnsupportedError: `fast` was asked for and cannot compute this exactly.
    """
    if n_seeds < 1:
        raise ScenarioError(f"{n_seeds} seeds; must be at least 1")
    seeds = [scenario.seed + number for number in range(n_seeds)]
    draw = draw or partial(delay_sampler, scenario)

    def by_fast() -> ScheduleTimes:
        _need_no_events(built)
        parts = tuple(_measure_fast(draw, built, seeds, progress))
        return times_of(built.schedule.name, "fast", Simulated(built.plan, parts), facets)

    def by_alike() -> ScheduleTimes:
        parts = (_measure_alike(draw, built, different, progress),) * (len(seeds) // len(different))
        return times_of(built.schedule.name, "des", Simulated(built.plan, parts), facets)

    def by_des() -> ScheduleTimes:
        measured = _measure_des(scenario, draw, built, different, progress)
        parts, epochs = zip(*(measured * (len(seeds) // len(different))), strict=True)
        found = tuple(each for each in epochs if each)
        return times_of(built.schedule.name, "des", Simulated(built.plan, parts, found), facets)

    different = seeds if scenario.is_random or built.actors else seeds[:1]
    needs_events = bool(built.actors or built.plan.dataset)
    return choose_engine(engine, by_fast=by_fast, by_alike=None if needs_events else by_alike, by_des=by_des)


def step_times_s(scenario: Scenario, built: Built, *, n_seeds: int) -> NDArray[np.float64]:
    """Return the seconds per step of one schedule for many seeds, `[n_seeds]`. This is less work than `measure`.

    If stragglers are rare, ranks that are alike are simulated once. Otherwise the fast engine takes all at once.

    Args:
        scenario: The schedule's.
        built: The schedule.
        n_seeds: Seeds, counted up from the scenario's.
    """
    seeds = [scenario.seed + number for number in range(n_seeds)]
    if built.actors or built.plan.dataset:
        return measure(scenario, built, n_seeds=n_seeds, facets=()).step_s
    from simdist.engines import alike

    drawn = delay_sampler(scenario, seeds).take(scenario.steps)

    def by_alike() -> NDArray[np.float64]:
        return alike.step_s(built.plan, built.costs, DrawnDelays(drawn), n_seeds=n_seeds, courses=built.courses)

    def by_fast() -> NDArray[np.float64]:
        return fast.step_s(built.plan, [built.costs] * n_seeds, DrawnDelays(drawn))

    def by_des() -> NDArray[np.float64]:
        return measure(scenario, built, n_seeds=n_seeds, engine="des", facets=()).step_s

    if _n_unequal(drawn) <= scenario.steps * _RARE:
        return first_exact(by_alike, by_fast, by_des)
    return first_exact(by_fast, by_alike, by_des)


def calm_step_s(built: Built) -> float:
    """Return the seconds per step of a schedule if nothing delays a rank.

    Raises:
        UnsupportedError: Ranks of each kind cannot be simulated once.
    """
    from simdist.engines import alike

    delays = DrawnDelays(no_delays(built.plan))
    return float(alike.step_s(built.plan, built.costs, delays, n_seeds=1, courses=built.courses)[0])


def _n_unequal(drawn: Delays) -> int:
    """Return in how many steps, over all seeds, ranks have different delays."""
    differs = [(each != each[..., :1]).any(axis=-1) for each in drawn.values()]
    return int(np.any(differs, axis=0).sum()) if differs else 0


def measure_with_additions(
    scenario: Scenario,
    built: Built,
    *,
    n_seeds: int,
    engine: Engine = "auto",
    progress: Progress | None = None,
    draw: Draw | None = None,
    facets: Sequence[Facet[Any]] = FACETS,
) -> ScheduleTimes:
    """Simulate a schedule as `measure` does, again for facets that ask for it, and under draws."""
    draw = draw or shared_delays(scenario)

    def again(other: Scenario) -> NDArray[np.float64]:
        plain = replace(build(other, built.schedule), actors=built.actors)
        return measure(other, plain, n_seeds=n_seeds, engine=engine, draw=draw, facets=()).step_s

    measured = measure(scenario, built, n_seeds=n_seeds, engine=engine, progress=progress, draw=draw, facets=facets)
    for facet in facets:
        value = facet.measure_again(scenario, measured.step_s, again)
        if value is None:
            value = facet.measure_built(scenario, built)
        if value is not None:
            measured = replace(measured, facets=measured.facets.changed(facet, value))
    return with_draws(scenario, built, measured, progress=progress, draw=draw)


def with_draws(
    scenario: Scenario,
    built: Built,
    measured: ScheduleTimes,
    *,
    progress: Progress | None = None,
    draw: Draw | None = None,
    doubts: "Sequence[Doubt] | None" = None,
    quiet: bool = False,
) -> ScheduleTimes:
    """Simulate a schedule also under draws of uncertain quantities and of the errors of published rows, if any.

    Args:
        scenario: The schedule's.
        built: The schedule; its plan is built again only where a draw changes it.
        measured: Its times as stated.
        progress: See `Progress`.
        draw: As of `measure`.
        doubts: Instead of those of `simdist.studies.published_errors.doubts_of`.
        quiet: Where ranks of each kind are simulated one by one, leave out random disturbances that are not uncertain.
            This is far less work: steps then differ by their prices only, and so do draws, up to second order.
    """
    if not (scenario.is_of_machines or doubts):
        return measured
    from simdist.studies import uncertainty
    from simdist.studies.published_errors import doubted, doubts_of

    doubts = doubts_of(scenario) if doubts is None else doubts
    found = uncertainty.quantities(scenario)
    if not (found or doubts):
        return measured
    n_draws = uncertainty.n_draws(len(found) + len(doubts))
    of_doubts = {each: uncertainty.places(each.name, seed=scenario.seed, n=n_draws) for each in doubts}
    n_priced = n_draws
    if doubts:  # a doubt multiplies prices, so each price list serves several draws
        n_priced = n_draws // 2 if found else 1
    places = {each: uncertainty.places(each.name, seed=scenario.seed, n=n_priced) for each in found}
    priced = [uncertainty.drawn(scenario, {each: at[i] for each, at in places.items()}) for i in range(n_priced)]
    drawn = priced * (n_draws // n_priced)
    places = {each: np.tile(at, n_draws // n_priced) for each, at in places.items()}
    numbers = np.arange(n_draws) % len(measured.step_s)
    seeds = (scenario.seed + numbers).tolist()
    built_again = [_built_again(each, scenario, built) for each in priced] * (n_draws // n_priced)
    if doubts:
        built_again = [
            replace(each, costs=doubted(each.plan, each.costs, {doubt: at[i] for doubt, at in of_doubts.items()}))
            for i, each in enumerate(built_again)
        ]
    engine: Engine = "des" if measured.engine == "des" else "auto"
    is_calm = quiet and _may_be_calm(scenario, [each.path for each in found])
    stated_s = measured.step_s[numbers]

    def together() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        _need_no_events(built)
        if any(each.plan is not built.plan for each in built_again):
            raise UnsupportedError("draws have other plans")
        delays: DelaySource
        if draw and all(each.path[:2] == _NETWORK for each in found):
            source = draw(seeds[: len(measured.step_s)])
            delays = source if n_draws <= len(measured.step_s) else _Chosen(source, numbers)
        else:
            delays = _SideBySide([delay_sampler(each, [seed]) for each, seed in zip(drawn, seeds, strict=True)])
        return fast.step_s(built.plan, [each.costs for each in built_again], delays), stated_s

    def one_by_one() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        runs = (unchecked_copy(each, seed=seed) for each, seed in zip(drawn, seeds, strict=True))
        pairs = zip(runs, built_again, strict=True)
        times_s = np.array([_step_s(run, each, engine, progress, is_calm=is_calm) for run, each in pairs])
        return times_s, np.full(
            n_draws, _step_s(scenario, built, engine, progress, is_calm=True)
        ) if is_calm else stated_s

    both_s = choose_engine("auto", by_fast=together, by_des=one_by_one) if engine == "auto" else one_by_one()
    by_name = {each.name: at for each, at in places.items()} | {each.name: at for each, at in of_doubts.items()}
    return replace(measured, drawn=dict(zip(_TIMES, both_s, strict=True)) | by_name)


def _may_be_calm(scenario: Scenario, uncertain: Sequence[Path]) -> bool:
    """Tell whether draws of uncertain quantities may leave out disturbances: all are random, and none is uncertain."""
    is_drawn = all(each.is_random for each in scenario.disturbances) and not scenario.has_links
    return is_drawn and not any(path[0] == _DISTURBANCES for path in uncertain)


def _step_s(scenario: Scenario, built: Built, engine: Engine, progress: Progress | None, *, is_calm: bool) -> float:
    """Return the seconds per step of one seed, by events: of one rank of each kind if that is possible.

    If it is calm, no rank is delayed.
    """
    from simdist.engines import alike

    def draw(seeds: Sequence[int]) -> DelaySource:
        return DrawnDelays(no_delays(built.plan, n_seeds=len(seeds))) if is_calm else delay_sampler(scenario, seeds)

    def by_alike() -> float:
        return float(alike.step_s(built.plan, built.costs, draw([scenario.seed]), n_seeds=1)[0])

    def measured() -> float:
        found = measure(scenario, built, n_seeds=1, engine=engine, progress=progress, draw=draw, facets=())
        return float(found.step_s[0])

    return measured() if built.actors else first_exact(by_alike, measured)


def range_of_trace(scenario: Scenario, built: Built, trace: Trace) -> Interval | None:
    """Return between which multiples of its makespan the truth of a simulation lies, if something is uncertain.

    Args:
        scenario: Of the simulation, with its seed.
        built: Its schedule.
        trace: Of the simulation.
    """
    simulated = Simulated(built.plan, (break_down(trace),))
    measured = with_draws(scenario, built, times_of(built.schedule.name, "", simulated, ()))
    if not measured.drawn:
        return None
    found = row(measured, measured)
    return found.step_s_range and (found.step_s_range[0] / found.step_s, found.step_s_range[1] / found.step_s)


def _built_again(drawn: Scenario, scenario: Scenario, built: Built) -> Built:
    """Return a schedule with the prices of a draw, and with another plan if the draw changes it."""
    stated_s, drawn_s = (tensor_backward_s(each.workload, each.cluster) for each in (scenario, drawn))
    may_differ = drawn.data != scenario.data or drawn_s != stated_s
    if may_differ and built.schedule.plan(job(drawn)).digest() != built.plan.digest():
        return replace(build(drawn, built.schedule), actors=built.actors)
    return replace(built, costs=price_of(built.plan, drawn))


class _SideBySide:
    """Delays of several sources, each of one seed."""

    def __init__(self, sources: Sequence[DelaySource]) -> None:
        self._sources = sources

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps."""
        taken = [each.take(n_steps) for each in self._sources]
        return {channel: np.concatenate([each[channel] for each in taken]) for channel in taken[0]}


class _Chosen:
    """Delays of some of the seeds of a source, by their numbers, which may recur."""

    def __init__(self, source: DelaySource, numbers: NDArray[np.int64]) -> None:
        self._source = source
        self._numbers = numbers

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps, in memory with the seeds side by side."""
        taken = self._source.take(n_steps)
        return {
            channel: np.moveaxis(np.moveaxis(each, 0, -1)[..., self._numbers], -1, 0) for channel, each in taken.items()
        }


def _need_no_events(built: Built) -> None:
    if built.actors:
        raise UnsupportedError("actors need every event, and the fast engine has none: use engine='des'")


def _measure_fast(draw: Draw, built: Built, seeds: list[int], progress: Progress | None) -> Iterator[Breakdown]:
    world_size = built.plan.world_size
    batch = max(1, _BATCH_VALUES // world_size)
    held = None
    if built.costs.shares:
        from simdist.studies.held import steady_held

        held = steady_held(built.plan, built.costs)
    for first in range(0, len(seeds), batch):
        some = seeds[first : first + batch]
        report = _reporter(progress, built, n_seeds=len(seeds), before=first, each=len(some))
        yield fast.measure(built.plan, built.costs, draw(some), n_seeds=len(some), progress=report, held=held)


def _measure_des(
    scenario: Scenario, draw: Draw, built: Built, seeds: list[int], progress: Progress | None
) -> list[tuple[Breakdown, "Epochs | None"]]:
    found = []
    for number, seed in enumerate(seeds):
        report = _reporter(progress, built, n_seeds=len(seeds), before=number, each=1)
        found.append(_measure_events(scenario, built, draw([seed]), seed, report))
    return found


def _measure_alike(draw: Draw, built: Built, seeds: list[int], progress: Progress | None) -> Breakdown:
    """Simulate one rank of each kind, for all seeds."""
    from simdist.engines import alike

    report = _reporter(progress, built, n_seeds=len(seeds), before=0, each=len(seeds))
    return alike.measure(built.plan, built.costs, draw(seeds), n_seeds=len(seeds), progress=report)


def _measure_events(
    scenario: Scenario, built: Built, delays: DelaySource, seed: int, progress: Callable[[int], None] | None
) -> tuple[Breakdown, "Epochs | None"]:
    from simdist.engines import des
    from simdist.studies.epochs import find_epochs
    from simdist.studies.held import find_held
    from simdist.traces.reads import expected

    drawn = delays.take(scenario.steps)
    links = traffic(scenario, built.costs, seed)
    trace = des.simulate(built.plan, built.costs, drawn, traffic=links, actors=built.actors, progress=progress)
    held = find_held(trace, built.costs) if trace.links else None
    reads = expected(built.plan) if built.plan.dataset else None
    return break_down(trace, held), find_epochs(trace, reads) if reads else None


def _reporter(
    progress: Progress | None, built: Built, *, n_seeds: int, before: int, each: int
) -> Callable[[int], None] | None:
    """Turn steps done in one batch of seeds into rank-steps done in all."""
    if progress is None:
        return None
    world_size = built.plan.world_size
    n_steps = built.plan.n_steps

    def report(step: int) -> None:
        progress(built.schedule.name, world_size * (before * n_steps + each * step), world_size * n_seeds * n_steps)

    return report


def times_of(label: str, engine: str, simulated: Simulated, facets: Sequence[Facet[Any]] = FACETS) -> ScheduleTimes:
    """Return the times of a schedule that was simulated, or measured on machines.

    Args:
        label: The schedule's label.
        engine: `fast` or `des`, or the source of a trace.
        simulated: What it did.
        facets: Optional topics.
    """
    states_s = {state: np.concatenate([part.per_step_s(state) for part in simulated.parts]) for state in STATES}
    values = FacetValues.measured(simulated, facets)
    return ScheduleTimes(label, engine, simulated.step_s, states_s, facets=values)


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
        step_s_ci95=positive_interval(measured.step_s),
        speedup=speedup,
        speedup_ci95=ratio_interval(speedup, baseline.step_s, measured.step_s),
        engine=measured.engine,
        seeds=len(measured.step_s),
        facets=measured.facets,
        **means,
    )
    return with_ranges(found, measured, baseline)


def with_ranges(found: Row, measured: ScheduleTimes, baseline: ScheduleTimes) -> Row:
    """Return a row with intervals that combine seeds and draws of uncertain quantities."""
    if not (measured.drawn and baseline.drawn):
        return found
    from simdist.studies.uncertainty import spread

    places = {name: at for name, at in measured.drawn.items() if name not in _TIMES}
    (ours, stated), (theirs, their_stated) = ([each.drawn[name] for name in _TIMES] for each in (measured, baseline))
    of_step, own = spread(found.step_s, ours - stated, found.step_s_ci95, places)
    of_speedup, shares = spread(found.speedup, theirs / ours - their_stated / stated, found.speedup_ci95, places)
    shares = own if measured is baseline else shares
    facets = found.facets.changed(RANGES, shares)
    return replace(found, step_s_range=of_step, speedup_range=of_speedup, facets=facets)


def too_few_seeds(rows: Sequence[Row]) -> list[str]:
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
    return [f"{n_seeds} seeds are too few to know the times of {', '.join(wide)}: write --seeds {more} or more"]
