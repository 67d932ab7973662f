"""Goodput under failures: how much of the time that is paid for trains the model, and where the rest goes.

    goodput   calm steps that count, without their data stalls / time of the job
    ETTR      steps that count, as long as they took / time of the job

So a straggler lowers goodput, as a failure does, and leaves ETTR as it is. Categories have the names of
google/ml-goodput-measurement. All schedules and policies meet the same failures of the same seeds, so that differences
between them are paired. Intervals are 95 % confidence intervals over seeds or, where something is uncertain, 90 %
intervals of seeds and of that: see `simdist.studies.drawn_failures`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, final

from simdist.display import Pictured
from simdist.errors import PlanError, ScenarioError, naming
from simdist.runs.attempts import CATEGORIES
from simdist.runs.failing_job import check_failures_fit
from simdist.runs.recovery import Category
from simdist.scenario.failures import Failures, OnFailure
from simdist.scenario.sampling import run_seeds
from simdist.scenario.scenario import AnyScenario, Scenario, load
from simdist.schedules import Schedule
from simdist.settings.base import plural
from simdist.settings.units import format_duration, format_share, in_range
from simdist.studies.columns import (
    SCHEDULE,
    SPEEDUP,
    Column,
    combined,
    flat_record,
    frame_of_records,
)
from simdist.studies.comparison import find_baseline, steps_in
from simdist.studies.drawn_failures import (
    DrawnJob,
    FailureDraws,
    best_steps_range,
    between_failures_range_s,
    break_even_range_s,
    drawn_job,
    draws_for,
    goodput_range_at,
)
from simdist.studies.remarks import Remark, below_table, documents, remarks_of, with_remarks
from simdist.studies.statistics import Interval, Samples, mean_interval, ratio_interval, share_of_one
from simdist.studies.suffering import (
    SteadySchedule,
    Suffered,
    best_interval,
    for_search,
    policies,
    scaled,
    steady,
    suffer,
    time_between_failures_s,
    under,
    young_s,
)
from simdist.studies.tables import table_text
from simdist.studies.uncertainty import CHANCE, causes

if TYPE_CHECKING:
    import pandas as pd

#: Called with the label of a schedule and the share of it that is done.
Progress: TypeAlias = Callable[[str, float], None]

_HOUR_S = 3600.0
#: Factors of the scenario's rates, of the curve.
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_SHOWN_FACTORS = (0.125, 0.5, 1.0, 2.0, 8.0)  # in text
_NARROW = 0.02  # interval of a speed-up
_LEAST_SHARE = 5e-4  # of the time that a table of text has
#: What ETTR counts as training, and goodput does not.
_ONLY_ETTR: tuple[Category, ...] = ("step_time_deviation", "data_loading", "absent_replicas")


def in_words(category: Category) -> str:
    """Print a category.

    >>> in_words("step_time_deviation"), in_words("wasted_progress")
    ('step-time deviation', 'wasted progress')
    """
    return category.replace("step_time", "step-time").replace("_", " ")


def _percent_with_interval(center: float, interval: Interval | None) -> str:
    half = 50 * (interval[1] - interval[0]) if interval else 0.0
    if interval and half >= 0.05 and (interval[0] == 0 or interval[1] == 1):  # cut off, so not even
        return percent_in_range(center, interval)
    return f"{100 * center:.1f}" + (f" ± {half:.1f} %" if half >= 0.05 else " %")


def _points(center: float, interval: Interval | None) -> str:
    half = 50 * (interval[1] - interval[0]) if interval else 0.0
    return f"{100 * center:+z.1f}" + (f" ± {half:.1f}" if half >= 0.05 else "")


def percent_in_range(center: float, interval: Interval) -> str:
    """Print a share with its range.

    >>> percent_in_range(0.954, (0.931, 0.968))
    '95.4 (93.1-96.8) %'
    """
    return in_range(center, *interval, form=lambda share: f"{100 * share:.1f}") + " %"


def _points_in_range(center: float, interval: Interval) -> str:
    ends = " to ".join(f"{100 * end:+.1f}" for end in interval)
    return f"{100 * center:+.1f}" + (f" ({ends})" if interval[0] < interval[1] else "")


def _speedup_in_range(center: float, interval: Interval) -> str:
    digits = 3 if interval[1] - interval[0] < _NARROW else 2
    return in_range(center, *interval, form=f"{{:.{digits}f}}".format)


def _times_in_range(center_s: float, interval_s: Interval) -> str:
    return in_range(center_s, *interval_s, form=format_duration)


_POLICY = Column("on failure", "on_failure")
_MAIN = (
    SCHEDULE,
    _POLICY,
    Column("goodput", "goodput", "goodput_ci95", form=_percent_with_interval),
    Column("ETTR", "ettr", form=format_share),
    Column("points", "difference", "difference_ci95", form=_points),
    SPEEDUP,
    Column("trained steps", "steps", form=lambda n: f"{n:,.0f}"),
    Column("time", "job_s", form=format_duration),
    Column("cost", "money", form=lambda dollars: f"$ {dollars:,.0f}"),
    Column("checkpoint every", "every_s", form=format_duration),
    Column("best every", "best_s", form=format_duration),
    Column("goodput then", "best_goodput", form=format_share),
    Column("Young", "young_s", form=format_duration),
)
#: The same where something is uncertain.
_IN_RANGES = (
    Column("goodput", "goodput", "goodput_range90", form=percent_in_range),
    Column("points", "difference", "difference_range90", form=_points_in_range),
    Column("speed-up", "speedup", "speedup_range90", form=_speedup_in_range),
    Column("best every", "best_s", "best_s_range90", form=_times_in_range),
)
_BY_CAUSE = (
    SCHEDULE,
    _POLICY,
    Column("cause"),
    Column("failures", "failures", form="{:,.1f}".format),
    Column("lost", "lost_s", form=format_duration),
    Column("of the time", "share", form=format_share),
    Column("costs", "money", form=lambda dollars: f"$ {dollars:,.0f}"),
)


@dataclass(frozen=True)
class CauseRow:
    """What the failures of one cause took, in the mean over seeds.

    Args:
        n_failures: How many came.
        lost_s: Time of the job.
        money: What that time costs; None without a price.
    """

    n_failures: float
    lost_s: float
    money: float | None


@dataclass(frozen=True)
class GoodputRow:
    """A schedule with a policy, under failures. Shares and times are means over seeds.

    Args:
        trained: The schedule while nothing fails.
        on_failure: The policy.
        suffered: What became of it with each seed.
        base: The same of the baseline.
        causes: By name, what they took.
        best_steps: Steps between checkpoints with which most is trained; None without checkpoints or rates.
        best: What becomes of it then, with the seeds of the search.
        young_s: Young's interval.
        price: Of an hour of all GPUs, those of spares too; None if not known.
        drawn: The same under draws; None if nothing is uncertain.
        base_drawn: Likewise, of the baseline.
        best_steps_range: Best steps if failures are as frequent, or as rare, as the ranges of the rates allow.
    """

    trained: SteadySchedule
    on_failure: OnFailure
    suffered: Suffered
    base: Suffered
    causes: Mapping[str, CauseRow]
    best_steps: int | None
    best: Suffered | None
    young_s: float | None
    price: float | None
    drawn: DrawnJob | None = None
    base_drawn: DrawnJob | None = None
    best_steps_range: tuple[int, int] | None = None

    @property
    def schedule(self) -> str:
        """Label of the schedule."""
        return self.trained.label

    @property
    def label(self) -> str:
        """Schedule and policy."""
        return f"{self.schedule}, {self.on_failure}"

    @property
    def goodput(self) -> float:
        """Mean share of the time that trains at the pace of calm steps."""
        return float(self.suffered.goodput.mean())

    @property
    def speedup(self) -> float | None:
        """Trained per second, over the baseline; None if that trains nothing."""
        return _over(self.suffered, self.base)

    @property
    def shares(self) -> dict[Category, float]:
        """Share of the time by category."""
        return {each: float((self.suffered.seconds[each] / self.suffered.total_s).mean()) for each in CATEGORIES}

    def _of_checkpoints(self) -> dict[str, object]:
        files = self.trained.job.checkpoints
        costs = self.trained.costs
        if files is None or costs is None:
            return {}
        step_s = self.trained.job.step_s
        found: dict[str, object] = {
            "every_steps": files.every_steps,
            "every_s": files.every_steps * step_s,
            "stall_s": costs.stall_s,
            "usable_s": costs.usable_s,
            "load_s": costs.load_s,
            "checkpoint_nbytes": costs.nbytes,
        }
        if self.best_steps is not None and self.best is not None:
            found["best_steps"] = self.best_steps
            found["best_s"] = self.best_steps * step_s
            found["best_goodput"] = float(self.best.goodput.mean())
            found["young_s"] = self.young_s
            if self.best_steps_range is not None:
                found["best_s_range90"] = tuple(n_steps * step_s for n_steps in self.best_steps_range)
        return found

    @property
    def doubts(self) -> dict[str, float]:
        """Share of each cause of the variance of goodput or, if that is known, of speed-up; none of chance alone."""
        shares = self._ranges()[1]
        return shares if max(shares, key=shares.__getitem__, default=CHANCE) != CHANCE else {}

    @property
    def goodput_range90(self) -> Interval | None:
        """90 % interval of goodput, from seeds and what is uncertain; None if rates and recovery are certain."""
        return self._ranges()[0].get("goodput_range90")

    def _ranges(self) -> tuple[dict[str, Interval], dict[str, float]]:
        """Return the intervals of what is uncertain, and the shares of their causes."""
        if self.drawn is None or self.base_drawn is None:
            return {}, {}
        found: dict[str, Interval] = {}
        shares: dict[str, float] = {}
        ratio = self.speedup
        if ratio is not None:
            found["speedup_range90"], shares = self.drawn.speedup_range(self.base_drawn, ratio, self._speedup_ci95)
        of_goodput = self.drawn.goodput_range(self.goodput, mean_interval(self.suffered.goodput))
        if of_goodput is not None:
            found["goodput_range90"], shares = of_goodput
        difference = self.drawn.difference_range(
            self.base_drawn, float(self._differences.mean()), mean_interval(self._differences)
        )
        if difference is not None:
            found["difference_range90"] = difference
        return found, shares

    @property
    def _differences(self) -> Samples:
        return self.suffered.goodput - self.base.goodput

    @property
    def _speedup_ci95(self) -> Interval | None:
        ratio = self.speedup
        return None if ratio is None else ratio_interval(ratio, self.suffered.trained_per_s, self.base.trained_per_s)

    def _of_length(self) -> dict[str, object]:
        total_s = float(self.suffered.total_s.mean())
        found: dict[str, object] = {"steps": self.suffered.mean(lambda each: each.n_steps), "job_s": total_s}
        return found | ({} if self.price is None else {"money": self.price * total_s / _HOUR_S})

    def record(self) -> dict[str, object]:
        """Return the row as JSON.

        Columns:
            schedule, on_failure (str): Label; `restart`, `spare` or `continue`.
            goodput, ettr (float): Shares of the time: calm steps that count, without data stalls; steps that count.
            goodput_ci95 (list or null): `[low, high]`, 95 % confidence, with several seeds.
            difference (float): Of goodput to the baseline's, with the same failures.
            difference_ci95 (list or null): Likewise.
            speedup (float or null): Trained per second / that of the baseline, null if that trains nothing. Steps count
                with the share of their samples.
            speedup_ci95 (list or null): Likewise.
            goodput_range90, difference_range90, speedup_range90 (list): Only with `uncertain` values: `[low, high]`,
                90 % intervals from seeds and these values.
            doubts (object): Only with `uncertain` values: path, `doubt.` and kind, or `seeds` -> share (float) of the
                variance of `goodput` or, if rates and recovery are certain, of `speedup`.
            steps, job_s (float): Steps that count, and time of the job.
            money (float): Only with a price: cost of the job, spare nodes included.
            step_s, calm_step_s (float): Seconds per step while nothing fails, and without stragglers too.
            repeated_steps, attempts (float): Steps that were done again; starts of all ranks.
            gave_up (float): Share of the seeds in which the job was given up: no try to start again succeeded, or 1,000
                failures in a row left no newer file.
            shares (object): By category: share of the time.
            causes (object): By cause: `failures` (float), `lost_s` (float), with a price `money` (float).
            every_steps (int): Only with checkpoints: interval as stated, in steps.
            every_s (float): The same in time of training.
            stall_s, usable_s, load_s (float): Only with checkpoints: for how long one holds training up, how long after
                its step it can be loaded, and how long that takes.
            checkpoint_nbytes (int): Only with checkpoints: bytes of all its files.
            best_steps (int): Only with checkpoints and rates: interval with which most is trained, in steps.
            best_s, best_goodput (float): The same in time of training, and goodput then.
            best_s_range90 (list): Only with uncertain rates: the same if failures are as frequent, and as rare.
            young_s (float): Likewise: Young's interval.
        """
        ranges, _ = self._ranges()
        causes = {
            name: {"failures": each.n_failures, "lost_s": each.lost_s}
            | ({} if each.money is None else {"money": each.money})
            for name, each in self.causes.items()
        }
        return {
            "schedule": self.schedule,
            "on_failure": self.on_failure,
            "goodput": self.goodput,
            "goodput_ci95": share_of_one(mean_interval(self.suffered.goodput)),
            "ettr": float(self.suffered.ettr.mean()),
            "difference": float(self._differences.mean()),
            "difference_ci95": mean_interval(self._differences),
            "speedup": self.speedup,
            "speedup_ci95": self._speedup_ci95,
            **ranges,
            **({"doubts": self.doubts} if self.doubts else {}),
            **self._of_length(),
            "step_s": self.trained.job.step_s,
            "calm_step_s": self.trained.job.calm_step_s,
            "repeated_steps": self.suffered.mean(lambda each: each.n_repeated),
            "attempts": self.suffered.mean(lambda each: each.n_attempts),
            "gave_up": self.suffered.mean(lambda each: each.gave_up),
            "shares": self.shares,
            "causes": causes,
            **self._of_checkpoints(),
        }

    def cells(self) -> dict[str, object]:
        """Return the row for tables: a column per category, and none per cause."""
        whole = {key: value for key, value in self.record().items() if not isinstance(value, dict)}
        return whole | {f"{category}_share": share for category, share in self.shares.items()}


@dataclass(frozen=True)
class RatePoint:
    """A row at other rates of failures.

    Args:
        factor: Of the scenario's rates.
        between_failures_s: Mean time between failures that end an attempt.
        goodput: Mean over the seeds of the curve.
        speedup: Trained per second, over the baseline at the same rates; None if that trains nothing.
        goodput_range90: 90 % interval of goodput at these rates; None if all but the rates is certain.
    """

    factor: float
    between_failures_s: float
    goodput: float
    speedup: float | None
    goodput_range90: Interval | None = None

    def record(self) -> dict[str, object]:
        """Return the point as JSON.

        Columns:
            factor, between_failures_s (float): Factor of the scenario's rates; mean time between failures that end an
                attempt.
            goodput (float): As in "Goodput of a schedule".
            goodput_range90 (list): Only with an uncertain recovery: its 90 % interval at these rates.
            speedup (float or null): Likewise.
        """
        known = {} if self.goodput_range90 is None else {"goodput_range90": self.goodput_range90}
        return {
            "factor": self.factor,
            "between_failures_s": self.between_failures_s,
            "goodput": self.goodput,
            **known,
            "speedup": self.speedup,
        }


@dataclass(frozen=True)
class RateCurve:
    """Goodput of a row against the rate of failures, with checkpoints as far apart as the scenario says.

    Args:
        label: Of schedule and policy.
        points: By ascending rate.
        break_even_range_s: 90 % interval of `break_even_s`, if parts of the recovery are uncertain.
    """

    label: str
    points: tuple[RatePoint, ...]
    break_even_range_s: Interval | None = None

    @property
    def break_even_s(self) -> float | None:
        """Time between failures at which as much is trained as by the baseline; None if one is ahead throughout.

        Between two points, the speed-up's logarithm is taken as a line over that of the rate.
        """
        for (left_s, left), (right_s, right) in pairwise(self._gains()):
            if left * right < 0:
                place = left / (left - right)
                return math.exp(math.log(left_s) + place * (math.log(right_s) - math.log(left_s)))
        return None

    @property
    def factors(self) -> list[tuple[float, float, float]]:
        """Factor of the rates, time between failures and speed-up, where both train something."""
        return [(each.factor, each.between_failures_s, each.speedup) for each in self.points if each.speedup]

    @property
    def is_ahead_at_last(self) -> bool:
        """Whether more is trained than by the baseline where failures are most frequent."""
        return self._gains()[-1][1] > 0

    def _gains(self) -> list[tuple[float, float]]:
        """Return the time between failures and the speed-up's logarithm."""
        return [(between_s, math.log(speedup)) for _, between_s, speedup in self.factors]

    def record(self) -> dict[str, object]:
        """Return the curve as JSON.

        Columns:
            label (str): Schedule and policy.
            break_even_s (float or null): Time between failures at which as much is trained as by the baseline.
            break_even_s_range90 (list): Only with an uncertain recovery: its 90 % interval.
            points (list): "A point of a curve of goodput".
        """
        points = [each.record() for each in self.points]
        ends = {} if self.break_even_range_s is None else {"break_even_s_range90": self.break_even_range_s}
        return {"label": self.label, "break_even_s": self.break_even_s, **ends, "points": points}


@final
class GoodputStudy(list[GoodputRow], Pictured):
    """The goodput of each schedule with each policy. In a notebook it is shown as a table."""

    def __init__(
        self,
        rows: Iterable[GoodputRow],
        *,
        scenario: Scenario,
        baseline: GoodputRow,
        title: str,
        curves: Sequence[RateCurve],
        between_range_s: Interval | None = None,
        left_out: Sequence[Remark] = (),
    ) -> None:
        """Take the rows.

        Args:
            rows: One for each schedule and policy.
            scenario: The scenario.
            baseline: The row that others are compared with.
            title: Heading of tables and pictures.
            curves: Goodput against the rate; empty without rates.
            between_range_s: 90 % interval of the time between failures, if rates are uncertain.
            left_out: Why schedules have no row with a policy.
        """
        super().__init__(rows)
        self.scenario = scenario
        self.baseline = baseline
        self.title = title
        self.curves = tuple(curves)
        self.between_range_s = between_range_s
        self.left_out = tuple(left_out)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What to know beside the table."""
        return (
            *remarks_of(self.scenario),
            *self.left_out,
            *_of_recovery(self.scenario),
            *_of_missing_checkpoints(self),
            *_of_corruption(self),
            *_of_rows(self),
            *_of_curves(self),
            *_of_ranges(self),
        )

    def document(self) -> dict[str, object]:
        """Return the study as JSON.

        Columns:
            scenario, baseline (str): Name; label of schedule and policy.
            rows (list): "Goodput of a schedule".
            curves (list): "A curve of goodput".
            remarks (list): "A remark".
        """
        return {
            "scenario": self.scenario.name,
            "baseline": self.baseline.label,
            "rows": [each.record() for each in self],
            "curves": [each.record() for each in self.curves],
            "remarks": documents(self.remarks),
        }

    def text(self) -> str:
        """Return the study as tables, with the remarks below that only its results tell."""
        tables = [table_text(title, columns, records) for title, columns, records in self.tables()]
        return "\n\n".join([*tables, *below_table(self.remarks)])

    def tables(self) -> Iterator[tuple[str, Sequence[Column], Sequence[Mapping[str, object]]]]:
        """Yield the tables for people: title, columns, records."""
        cells = [each.cells() for each in self]
        ranged = [each for each in _IN_RANGES if all(each.keys[-1] in row for row in cells)]
        yield self.title, combined([each for each in _MAIN if each.keys[0] in cells[0]], ranged), cells
        shown = [each for each in CATEGORIES if any(row.shares[each] >= _LEAST_SHARE for row in self)]
        of_time = [Column(in_words(each), f"{each}_share", form=format_share) for each in shown]
        yield "where the time goes", (SCHEDULE, _POLICY, *of_time), cells
        causes = [_of_cause(row, name, each) for row in self for name, each in row.causes.items()]
        yield "what failures took", [each for each in _BY_CAUSE if each.keys[0] in causes[0]], causes
        if self.curves:
            yield (
                "goodput by the time between failures that end an attempt, with checkpoints as far apart",
                *self._curve_table(),
            )

    def _curve_table(self) -> tuple[Sequence[Column], Sequence[Mapping[str, object]]]:
        records = []
        for row, curve in zip(self, self.curves, strict=True):
            of_points = {_between(each): each.goodput for each in curve.points if each.factor in _SHOWN_FACTORS}
            records.append({"schedule": row.schedule, "on_failure": row.on_failure, **of_points})
        headings = [_between(each) for each in self.curves[0].points if each.factor in _SHOWN_FACTORS]
        return (SCHEDULE, _POLICY, *(Column(each, form=format_share) for each in headings)), records

    def frame(self) -> "pd.DataFrame":
        """Return the rows as a pandas frame, with the share of each category; its `attrs` have the `remarks`."""
        return with_remarks(frame_of_records(each.cells() for each in self), self.remarks)

    def columns(self) -> dict[str, list[object]]:
        """Return the rows as columns: those of `frame`."""
        records = [flat_record(each.cells()) for each in self]
        names = dict.fromkeys(name for each in records for name in each)
        return {name: [each.get(name) for each in records] for name in names}

    def __repr__(self) -> str:
        lines = (f"{each.label}: goodput {format_share(each.goodput)}" for each in self)
        return "\n".join([self.title, *lines, *(f"{each}." for each in self.remarks)])


def _between(point: RatePoint) -> str:
    return format_duration(point.between_failures_s)


def _of_cause(row: GoodputRow, name: str, cause: CauseRow) -> dict[str, object]:
    lost = cause.lost_s / float(row.suffered.total_s.mean())
    found = {"schedule": row.schedule, "on_failure": row.on_failure, "cause": name, "failures": cause.n_failures}
    found |= {"lost_s": cause.lost_s, "share": lost}
    return found if cause.money is None else found | {"money": cause.money}


def goodput(
    scenario: AnyScenario,
    *,
    baseline: str | None = None,
    on_failure: Sequence[OnFailure] = (),
    n_seeds: int = 20,
    price_per_gpu_hour: float | None = None,
    progress: Progress | None = None,
) -> GoodputStudy:
    """Return the goodput of each schedule of a scenario with `failures`.

    A schedule has no row with a policy that does not fit it. The baseline must fit.

    Args:
        scenario: The scenario, or what `simdist.scenario.load` takes for one.
        baseline: Label or kind of the schedule that the others are compared with; `sync` or the first if None.
        on_failure: Policies, the one to compare with first. If there are none, the scenario's and `restart`.
        n_seeds: Seeds of steps and of failures.
        price_per_gpu_hour: Of every GPU, those of spare nodes too; None: no costs are shown.
        progress: See `Progress`.

    Raises:
        ScenarioError: The scenario has no `failures` or no `train_for`, there is no such baseline, or a policy has no
            spares.
        PlanError: A schedule does not fit the cluster, or the first policy does not fit the baseline.
        UnsupportedError: More failures are expected than can be simulated.
    """
    scenario = load(scenario)
    if n_seeds < 1:
        raise ScenarioError(f"{n_seeds} seeds; must be at least 1")
    if price_per_gpu_hour is not None and not 0 <= price_per_gpu_hour < math.inf:
        raise ScenarioError(f"price_per_gpu_hour {price_per_gpu_hour}: write 0 or more, e.g. 2.5")
    if scenario.failures is None:
        raise ScenarioError(f"{scenario.name}: failures: nothing fails: write its causes and their rates")
    reference = find_baseline(scenario, baseline)
    seeds = run_seeds(scenario.seed, n_seeds)
    ways = _policies(scenario.failures, on_failure)
    fitting, left_out = _fitting(scenario, ways, reference)
    pairs: list[tuple[SteadySchedule, Failures]] = []
    for schedule, fit in fitting:
        if progress:
            progress(schedule.name, 0.0)
        with naming(schedule.name):
            trained = steady(scenario, schedule, partial(steps_in, schedule=schedule, n_seeds=n_seeds), draws=True)
        pairs += [(trained, failures) for failures in fit]
    draws = draws_for(scenario, [trained for trained, _ in pairs])
    suffered = []
    drawn = []
    for trained, failures in pairs:
        if progress:
            progress(trained.label, 0.5)
        with naming(f"{trained.label}, on_failure: {failures.on_failure}"):
            suffered.append(suffer(failures, trained, seeds))
            drawn.append(drawn_job(draws, failures.on_failure, trained))
    at = next(number for number, (trained, _) in enumerate(pairs) if trained.label == reference.name)
    prices = [_price(price_per_gpu_hour, trained, failures) for trained, failures in pairs]
    rows = [
        replace(
            _row(draws, pair, found, suffered[at], seeds, price),
            drawn=of_draws,
            base_drawn=drawn[at],
        )
        for pair, found, of_draws, price in zip(pairs, suffered, drawn, prices, strict=True)
    ]
    return GoodputStudy(
        rows,
        scenario=scenario,
        baseline=rows[at],
        title=_title(scenario, rows[at], n_seeds),
        curves=_curves(scenario, pairs, rows, at),
        between_range_s=between_failures_range_s(draws, pairs[at][0]),
        left_out=left_out,
    )


def _fitting(
    scenario: Scenario, ways: Sequence[Failures], reference: Schedule
) -> tuple[list[tuple[Schedule, list[Failures]]], list[Remark]]:
    """Return the schedules with the policies that fit them, and what is left out, before anything is simulated."""
    found: list[tuple[Schedule, list[Failures]]] = []
    left_out = []
    for schedule in scenario.schedules:
        fit = []
        for failures in ways:
            try:
                with naming(f"{schedule.name}, on_failure: {failures.on_failure}"):
                    check_failures_fit(failures, schedule, scenario.cluster.world_size)
            except PlanError as error:
                if schedule == reference and failures is ways[0]:
                    raise
                left_out.append(Remark("result", f"no row: {error}", schedule.name))
            else:
                fit.append(failures)
        if fit:
            found.append((schedule, fit))
    return found, left_out


def _policies(failures: Failures, wanted: Sequence[OnFailure]) -> list[Failures]:
    """Return failures with each policy that is compared.

    Raises:
        ScenarioError: One takes spare nodes, and there are none.
    """
    if failures.on_failure != "spare" and "spare" in wanted and not failures.spares:
        raise ScenarioError("--policies spare: failures.spares is 0: write on_failure: spare and spares, e.g. 2")
    return [under(failures, each) for each in dict.fromkeys(wanted or policies(failures))]


def _price(price_per_gpu_hour: float | None, trained: SteadySchedule, failures: Failures) -> float | None:
    """Return the price of an hour of all nodes."""
    if price_per_gpu_hour is None:
        return None
    return price_per_gpu_hour * (trained.job.n_nodes + failures.spares) * trained.job.gpus_per_node


def _row(
    draws: FailureDraws,
    pair: tuple[SteadySchedule, Failures],
    found: Suffered,
    base: Suffered,
    seeds: Sequence[int],
    price: float | None,
) -> GoodputRow:
    trained, failures = pair
    best_steps = best_interval(failures, *for_search(draws.scenario, failures, trained))
    best = suffer(failures, trained.with_interval(best_steps), seeds) if best_steps else None
    best_range = best_steps_range(draws, failures.on_failure, trained, best_steps) if best_steps else None
    return GoodputRow(
        trained=trained,
        on_failure=failures.on_failure,
        suffered=found,
        base=base,
        causes={cause.cause: _cause_row(found, cause.cause, price) for cause in failures.causes},
        best_steps=best_steps,
        best=best,
        young_s=young_s(failures, trained),
        price=price,
        best_steps_range=best_range,
    )


def _cause_row(found: Suffered, name: str, price: float | None) -> CauseRow:
    lost_s = found.mean(lambda each: math.fsum(each.by_cause[name].seconds.values()))
    n_failures = found.mean(lambda each: each.by_cause[name].n_failures)
    return CauseRow(n_failures, lost_s, None if price is None else price * lost_s / _HOUR_S)


def _over(suffered: Suffered, base: Suffered) -> float | None:
    """Return what is trained per second over the same of the baseline; None if that trains nothing."""
    trained_per_s = float(base.trained_per_s.mean())
    return float(suffered.trained_per_s.mean()) / trained_per_s if trained_per_s else None


def _curves(
    scenario: Scenario,
    pairs: Sequence[tuple[SteadySchedule, Failures]],
    rows: Sequence[GoodputRow],
    at: int,
) -> list[RateCurve]:
    """Return the curve of each row; none if no cause has a rate."""
    if not any(math.isfinite(time_between_failures_s(failures, trained.job)) for trained, failures in pairs):
        return []
    points: list[list[RatePoint]] = [[] for _ in rows]
    draws = FailureDraws.of(scenario, rates=False)
    for factor in FACTORS:
        changed = [(trained, scaled(failures, factor)) for trained, failures in pairs]
        found = [suffer(failures, *for_search(scenario, failures, trained)) for trained, failures in changed]
        for number, (trained, failures) in enumerate(changed):
            between_s = time_between_failures_s(failures, trained.job)
            ratio = _over(found[number], found[at])
            mean = float(found[number].goodput.mean())
            ends = goodput_range_at(draws, failures.on_failure, trained, factor=factor, center=mean)
            points[number].append(RatePoint(factor, between_s, mean, ratio, ends))
    curves = [RateCurve(row.label, tuple(of_row)) for row, of_row in zip(rows, points, strict=True)]
    sides = [(failures.on_failure, trained) for trained, failures in pairs]
    return [
        replace(curve, break_even_range_s=break_even_range_s(draws, sides[number], sides[at], curve.factors))
        for number, curve in enumerate(curves)
    ]


def _title(scenario: Scenario, baseline: GoodputRow, n_seeds: int) -> str:
    job = baseline.trained.job
    length = format_duration(job.horizon_s) if job.horizon_s is not None else f"{job.n_steps:,} steps"
    counts = f"{scenario.cluster.world_size:,} ranks, {length}, {n_seeds} {plural(n_seeds, 'seed')}"
    how_sure = "in brackets: 90 % intervals" if baseline.drawn else "95 % confidence"
    return f"{scenario.name}: {counts}; points and speed-up over {baseline.label}, {how_sure}"


def _of_recovery(scenario: Scenario) -> Iterator[Remark]:
    """Say which parts of a recovery count as nothing."""
    assert scenario.failures is not None
    missing = scenario.failures.recovery.not_stated
    if missing:
        text = f"failures.recovery: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not stated, and so 0 s"
        yield Remark("assumption", text, "failures.recovery")


def _of_missing_checkpoints(study: GoodputStudy) -> Iterator[Remark]:
    """Say that steps are lost because no checkpoint has them."""
    if study.scenario.checkpoint is None and any(row.suffered.mean(lambda each: each.n_repeated) for row in study):
        lost = "checkpoint: none is written, so that a failure that ends an attempt loses all steps before it"
        yield Remark("assumption", f"{lost}: write checkpoint, e.g. {{every: 1 h, what: state}}", "checkpoint")


def _of_corruption(study: GoodputStudy) -> Iterator[Remark]:
    """Say which corruption the job does not live to see found."""
    assert study.scenario.failures is not None
    longest_s = max(float(row.suffered.total_s.max()) for row in study)
    for i, cause in enumerate(study.scenario.failures.causes):
        if cause.effect == "corruption" and cause.found_after_s is not None and cause.found_after_s >= longest_s:
            place = f"failures.causes[{i}].found_after"
            after = f"{place}: corruption is found after {format_duration(cause.found_after_s)}"
            lost = f"the job lasts {format_duration(longest_s)}, so that it is never found and costs nothing"
            yield Remark("accuracy", f"{after}, and {lost}: write less, or a longer train_for", place)


def _of_rows(rows: Sequence[GoodputRow]) -> Iterator[Remark]:
    """Say what the table does not show of rows."""
    added: dict[str, str] = {}
    for each in rows:
        share = sum(each.shares[category] for category in _ONLY_ETTR)
        if share >= _LEAST_SHARE:
            added[each.schedule] = f"{each.schedule} {format_share(share)}"
        if gave_up := each.suffered.mean(lambda found: found.gave_up):
            text = f"{each.label}: in {format_share(gave_up)} of the seeds the job was given up: no try to start again "
            text += "succeeded, or 1,000 failures in a row left no newer file"
            yield Remark("accuracy", text, each.schedule)
    if added:
        text = "ETTR counts slow steps, data stalls and absent replicas as training, and goodput does not"
        yield Remark("result", f"{text}: {', '.join(added.values())} of the time")


def _of_curves(study: GoodputStudy) -> Iterator[Remark]:
    """Say where schedules and policies change places."""
    for each in study.curves:
        if (between_s := each.break_even_s) is not None:
            when = "shorter" if each.is_ahead_at_last else "longer"
            place = in_range(between_s, *(each.break_even_range_s or (0.0, 0.0)), form=format_duration)
            text = (
                f"{each.label} trains more than {study.baseline.label} if the time between failures is {when} than "
                f"{place}"
            )
            ends = each.break_even_range_s or (between_s, between_s)
            possible = study.between_range_s
            if possible and possible[0] < ends[1] and ends[0] < possible[1]:
                span = " to ".join(map(format_duration, possible))
                text += f"; uncertain rates allow {span}, so that it is open which trains more"
            yield Remark("result", text, each.label)


def _of_ranges(study: GoodputStudy) -> Iterator[Remark]:
    """Name the measurement that would narrow the intervals most."""
    for text in causes(study.scenario, {each.label: each.doubts for each in study}):
        yield Remark("result", text)
