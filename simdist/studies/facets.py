"""Facets: optional topics of a comparison, such as epochs or disturbed links.

A facet is one class. It defines a measurement, its keys in JSON, its columns in data frames, and its output on the
screen. `FACETS` lists the built-in facets in the order of their keys. Pass a facet of your own to
`simdist.studies.comparison.compare` with them:

>>> from simdist.scenario import load, presets
>>> from simdist.studies.comparison import compare
>>> class BufferSize(Facet[int]):
...     nothing = 0
...     def measure(self, simulated):
...         return sum(each.nbytes for each in simulated.plan.buffers)
...     def document(self, value):
...         return {"buffers_nbytes": value}
>>> found = load(presets.path("scenarios", "cloud-stragglers")).changed(steps=8)
>>> row, *_ = compare(found, n_seeds=1, facets=(*FACETS, BufferSize()))
>>> row.document()["buffers_nbytes"] > 0
True
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from simdist.plan import LEVELS, Plan
from simdist.plan.text import ranks_named
from simdist.scenario.scenario import Scenario
from simdist.settings.base import unchecked_copy
from simdist.settings.units import Elapsed, format_duration, format_nbytes, format_share, in_range
from simdist.studies.columns import IN_RANGES, SCHEDULE, Column, factor, flat_record, seconds, shown_epochs
from simdist.studies.remarks import Remark
from simdist.studies.statistics import Interval, mean_interval
from simdist.traces.breakdown import Breakdown, mean_late
from simdist.traces.links import link_in_words

if TYPE_CHECKING:
    from simdist.runs.building import Built
    from simdist.studies.epochs import Epochs
    from simdist.studies.suffering import StepsIn
    from simdist.traces.memory import MemoryKind

ValueT = TypeVar("ValueT")

#: Seconds per step of each seed, `[n_seeds]`.
StepTimes: TypeAlias = NDArray[np.float64]
Again: TypeAlias = Callable[[Scenario], StepTimes]
Rest: TypeAlias = Callable[[float, float], float]

_NEARLY_ALL = 0.9  # of the updates: a rank that is late in these contributes almost nothing
_MOST_LINKS = 6  # of a schedule; JSON has all


@dataclass(frozen=True)
class Simulated:
    """Results of one schedule with several seeds, simulated or measured.

    Args:
        plan: The plan of the schedule.
        parts: Breakdown of its time. Each part has some of the seeds.
        epochs: Epochs of each seed, if the schedule has a data set and traces are kept.
    """

    plan: Plan
    parts: Sequence[Breakdown]
    epochs: "Sequence[Epochs]" = ()

    @property
    def step_s(self) -> StepTimes:
        """Seconds per step of each seed, `[n_seeds]`."""
        return np.concatenate([part.step_s for part in self.parts])


@dataclass(frozen=True)
class Line(Generic[ValueT]):
    """The value of a facet for one schedule of a table.

    Args:
        schedule: Label of the schedule.
        step_s: Seconds per step, averaged over seeds.
        value: Value of the facet.
    """

    schedule: str
    step_s: float
    value: ValueT


@dataclass(frozen=True)
class FacetTable:
    """A separate table of a facet, below the table of schedules."""

    title: str
    columns: Sequence[Column]
    records: Sequence[Mapping[str, object]]


class Facet(ABC, Generic[ValueT]):
    """An optional topic of a comparison.

    Attributes:
        nothing: The value of a schedule without results for this facet.
        names: Keys of `cells` in tables of many scenarios, such as results of sweeps.
        brief: Columns of such tables on the screen.
    """

    nothing: ValueT
    names: tuple[str, ...] = ()
    brief: tuple[Column, ...] = ()

    @abstractmethod
    def measure(self, simulated: Simulated) -> ValueT:
        """Return the value of one schedule."""

    def measure_again(self, scenario: Scenario, step_s: StepTimes, again: Again) -> ValueT | None:
        """Return the value if it needs further simulations, else None.

        Args:
            scenario: The scenario that was simulated.
            step_s: Seconds per step of each seed, `[n_seeds]`.
            again: Simulates the schedule in another scenario with the same seeds. Returns its seconds per step.
        """
        return None

    def measure_built(self, scenario: Scenario, built: "Built", *, n_seeds: int, steps_in: "StepsIn") -> ValueT | None:
        """Return the value if it needs the scenario, the schedule or the prices of the plan, else None."""
        return None

    @abstractmethod
    def document(self, value: ValueT) -> dict[str, object]:
        """Return the keys of JSON, which may be none."""

    def cells(self, value: ValueT) -> dict[str, object]:
        """Return the columns of data frames and of the table of schedules. Each holds one number or text."""
        return {key: cell for key, cell in self.document(value).items() if not isinstance(cell, dict | list | tuple)}

    def divided(self, value: ValueT, n_parts: int) -> ValueT:
        """Return the value per part of a step, such as a micro-batch."""
        return value

    def without_first(self, value: ValueT, first: ValueT, rest: Rest) -> ValueT:
        """Return the value of a run without that of its first steps.

        Args:
            value: Of the run.
            first: Of its first steps.
            rest: Takes means over the steps of both, and returns that over the other steps.
        """
        return value

    def kept(self, value: ValueT) -> dict[str, object]:
        """Return the record that a sweep stores."""
        return {}

    def restored(self, record: Mapping[str, Any]) -> ValueT:
        """Return the value from the record that a sweep stored."""
        return self.nothing

    def columns(self, values: Sequence[ValueT]) -> Sequence[Column]:
        """Return columns for the table of schedules; see `simdist.studies.columns.combined`."""
        return ()

    def table(self, lines: Sequence[Line[ValueT]], base: ValueT) -> FacetTable | None:
        """Return a separate table. `base` is the value of the baseline."""
        return None

    def remarks(self, scenario: Scenario | None, lines: Sequence[Line[ValueT]]) -> list[Remark]:
        """Return remarks on schedules of a scenario. It is None for stored results, such as those of sweeps."""
        return []


@dataclass(frozen=True)
class FacetValues:
    """The values of facets, in the order of their keys."""

    values: Mapping[Facet[Any], Any] = field(default_factory=dict)

    @classmethod
    def measured(cls, simulated: Simulated, facets: Sequence[Facet[Any]]) -> "FacetValues":
        """Return the values of one schedule."""
        return cls({each: each.measure(simulated) for each in facets})

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> "FacetValues":
        """Return the values from the record that a sweep stored."""
        return cls({each: each.restored(record) for each in FACETS})

    def of(self, facet: Facet[ValueT]) -> ValueT:
        """Return the value of a facet."""
        return cast(ValueT, self.values.get(facet, facet.nothing))

    def changed(self, facet: Facet[ValueT], value: ValueT) -> "FacetValues":
        """Return the values with a new value of one facet."""
        return FacetValues({**self.values, facet: value})

    def divided(self, n_parts: int) -> "FacetValues":
        """Return the values per part of a step."""
        return FacetValues({facet: facet.divided(value, n_parts) for facet, value in self.values.items()})

    def without_first(self, first: "FacetValues", rest: Rest) -> "FacetValues":
        """Return the values of a run without those of its first steps."""
        values = {facet: facet.without_first(value, first.of(facet), rest) for facet, value in self.values.items()}
        return FacetValues(values)

    def document(self) -> dict[str, object]:
        """Return the keys of JSON."""
        return {key: found for facet, value in self.values.items() for key, found in facet.document(value).items()}

    def kept(self) -> dict[str, object]:
        """Return the record that a sweep stores."""
        return {key: found for facet, value in self.values.items() for key, found in facet.kept(value).items()}

    def cells(self, facets: Sequence[Facet[Any]]) -> dict[str, object]:
        """Return the columns of some facets."""
        return {key: cell for facet in facets for key, cell in facet.cells(self.of(facet)).items()}


class Told(Protocol):
    """A schedule of a table, with its values of facets."""

    @property
    def facets(self) -> FacetValues:
        """The values."""
        ...

    def line(self, facet: Facet[ValueT]) -> Line[ValueT]:
        """Return the line of a facet for this schedule."""
        ...


def told(rows: Sequence[Told]) -> list[Facet[Any]]:
    """Return the facets with results for at least one schedule."""
    facets = dict.fromkeys(facet for each in rows for facet in each.facets.values)
    return [facet for facet in facets if any(facet.document(each.facets.of(facet)) for each in rows)]


def facet_columns(rows: Sequence[Told]) -> list[Column]:
    """Return the columns that facets add to the table of schedules."""
    return [column for facet in told(rows) for column in facet.columns([each.facets.of(facet) for each in rows])]


def tables(rows: Sequence[Told], base: Told) -> list[FacetTable]:
    """Return the tables of facets. `base` is the baseline among the schedules."""
    found = (facet.table([each.line(facet) for each in rows], base.facets.of(facet)) for facet in told(rows))
    return [each for each in found if each]


def facet_remarks(scenario: Scenario | None, rows: Sequence[Told]) -> list[Remark]:
    """Return the remarks of facets on schedules of a scenario; None for stored results."""
    return [each for facet in told(rows) for each in facet.remarks(scenario, [row.line(facet) for row in rows])]


@dataclass(frozen=True, slots=True)
class EpochMeans:
    """An epoch of a schedule with a data set, averaged over seeds. Rows of sweeps keep only its time.

    Args:
        epoch: Number.
        seconds: From the previous epoch or staging.
        stall_s: Data stalls of the rank that stalled longest in each step.
        hits: Share of the samples from each level of storage.
    """

    epoch: int
    seconds: float
    stall_s: float = np.nan
    hits: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _EpochTimes:
    """Epochs of a schedule with a data set."""

    epochs: tuple[EpochMeans, ...] = ()
    staging_s: float = 0.0


@final
class _EpochsFacet(Facet[_EpochTimes]):
    """Epochs of a scenario with a data set: their times, their stalls, and the levels that samples came from."""

    nothing = _EpochTimes()
    names = ("staging_s", "epoch_first_s", "epoch_last_s")
    brief = (
        Column("first epoch", "epoch_first_s", form=seconds),
        Column("last epoch", "epoch_last_s", form=seconds),
    )
    _columns = (
        SCHEDULE,
        Column("epoch"),
        Column("time", "seconds", form=seconds),
        Column("speed-up", "speedup", form=factor),
        *(Column(name, form=format_share) for name in ("stalled", *LEVELS)),
    )

    def measure(self, simulated: Simulated) -> _EpochTimes:
        """Average epochs over seeds. The levels that samples come from are the same with every seed."""
        found = simulated.epochs
        if not found:
            return self.nothing
        epochs = tuple(
            EpochMeans(
                same[0].number,
                seconds=float(np.mean([each.seconds for each in same])),
                stall_s=float(np.mean([each.stall_s for each in same])),
                hits=same[0].hits,
            )
            for same in zip(*(each.epochs for each in found), strict=True)
        )
        return _EpochTimes(epochs, float(np.mean([each.staging_s for each in found])))

    def document(self, value: _EpochTimes) -> dict[str, object]:
        """Return all epochs."""
        if not value.epochs:
            return {}
        return {"epochs": tuple(asdict(each) for each in value.epochs), "staging_s": value.staging_s}

    def cells(self, value: _EpochTimes) -> dict[str, object]:
        """Return the first and the last epoch. Caches are empty in the first one."""
        if not value.epochs:
            return {}
        times_s = (value.staging_s, value.epochs[0].seconds, value.epochs[-1].seconds)
        return dict(zip(self.names, times_s, strict=True))

    def kept(self, value: _EpochTimes) -> dict[str, object]:
        """Return times only."""
        if not value.epochs:
            return {}
        return {"staging_s": value.staging_s, "epochs_s": [each.seconds for each in value.epochs]}

    def restored(self, record: Mapping[str, Any]) -> _EpochTimes:
        """Return times only."""
        epochs = enumerate(record.get("epochs_s", ()))
        means = tuple(EpochMeans(number, float(of_epoch_s)) for number, of_epoch_s in epochs)
        return _EpochTimes(means, float(record.get("staging_s", 0.0)))

    def table(self, lines: Sequence[Line[_EpochTimes]], base: _EpochTimes) -> FacetTable | None:
        """Return the first epochs of each schedule, and the last."""
        if not any(each.value.epochs for each in lines):
            return None
        about = "epochs: time, share of it stalled for want of a batch, samples by level"
        return FacetTable(about, self._columns, [record for each in lines for record in self._records(each, base)])

    def _records(self, line: Line[_EpochTimes], base: _EpochTimes) -> Iterator[dict[str, object]]:
        if line.value.staging_s:
            yield {"schedule": line.schedule, "epoch": "staging", "seconds": line.value.staging_s}
        for each in shown_epochs(line.value.epochs):
            if each is None:
                yield {"schedule": line.schedule, "epoch": "..."}
                continue
            yield {
                "schedule": line.schedule,
                "epoch": each.epoch,
                "seconds": each.seconds,
                "speedup": base.epochs[each.epoch].seconds / each.seconds if each.seconds else None,
                "stalled": each.stall_s / each.seconds if each.seconds else 0.0,
                **each.hits,
            }


@final
class _AddedFacet(Facet[Mapping[str, float]]):
    """Seconds per step that checkpoints and disturbed links add: cause -> seconds.

    The schedule is simulated again without each cause.
    """

    nothing: Mapping[str, float] = {}

    def measure(self, simulated: Simulated) -> Mapping[str, float]:
        """Return nothing: it takes further simulations."""
        return self.nothing

    def measure_again(self, scenario: Scenario, step_s: StepTimes, again: Again) -> Mapping[str, float]:
        """Return the difference to a simulation of the same seeds without each cause."""
        return {what: float((step_s - again(without)).mean()) for what, without in _without(scenario)}

    def document(self, value: Mapping[str, float]) -> dict[str, object]:
        """Return one object."""
        return {"added_s": dict(value)} if value else {}

    def cells(self, value: Mapping[str, float]) -> dict[str, object]:
        """Return a column for each."""
        return {f"{what}_add_s": added_s for what, added_s in value.items()}

    def divided(self, value: Mapping[str, float], n_parts: int) -> Mapping[str, float]:
        """Return seconds per part."""
        return _divided(value, n_parts)

    def without_first(self, value: Mapping[str, float], first: Mapping[str, float], rest: Rest) -> Mapping[str, float]:
        """Return seconds per step without those of the first steps."""
        return {name: rest(of_step_s, first.get(name, 0.0)) for name, of_step_s in value.items()}

    def columns(self, values: Sequence[Mapping[str, float]]) -> Sequence[Column]:
        """Return a column for each."""
        return [Column(f"{what} add", f"{what}_add_s", form=seconds) for what in values[0]]


def _without(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    if scenario.checkpoint:
        yield "checkpoints", unchecked_copy(scenario, checkpoint=None)
    if scenario.has_links:
        yield "links", scenario.without_links()


@dataclass(frozen=True, slots=True)
class _WholeJob:
    """The whole job of a scenario, of which some steps are simulated."""

    n_steps: float
    seconds: float
    is_timed: bool


@final
class _WholeJobFacet(Facet[_WholeJob | None]):
    """What the length of the whole job comes to at the simulated step time: time, or steps if a time is stated."""

    nothing: _WholeJob | None = None

    def measure(self, simulated: Simulated) -> _WholeJob | None:
        """Return nothing: the scenario tells."""
        return None

    def measure_again(self, scenario: Scenario, step_s: StepTimes, again: Again) -> _WholeJob | None:
        """Return steps and time, by the mean step of all seeds."""
        of_step_s = float(step_s.mean())
        match scenario.train_for:
            case None:
                return None
            case Elapsed(seconds=seconds):
                return _WholeJob(seconds / of_step_s if of_step_s else math.inf, seconds, is_timed=True)
            case n_steps:
                return _WholeJob(float(n_steps), n_steps * of_step_s, is_timed=False)

    def without_first(self, value: _WholeJob | None, first: _WholeJob | None, rest: Rest) -> _WholeJob | None:
        """Return steps and time by the mean of the other steps."""
        if value is None or first is None:
            return value
        step_s = rest(value.seconds / value.n_steps, first.seconds / first.n_steps)
        if value.is_timed:
            return replace(value, n_steps=value.seconds / step_s)
        return replace(value, seconds=value.n_steps * step_s)

    def document(self, value: _WholeJob | None) -> dict[str, object]:
        """Return both."""
        return {"job_steps": value.n_steps, "job_s": value.seconds} if value else {}

    def columns(self, values: Sequence[_WholeJob | None]) -> Sequence[Column]:
        """Return the column that the scenario does not state."""
        if values[0] and values[0].is_timed:
            return [Column(f"steps in {format_duration(values[0].seconds)}", "job_steps", form="{:,.0f}".format)]
        return [Column(f"{values[0].n_steps:,.0f} steps", "job_s", form=format_duration)] if values[0] else []


def _divided(value: Mapping[str, float], n_parts: int) -> dict[str, float]:
    return {name: of_step_s / n_parts for name, of_step_s in value.items()}


@final
class _LinksFacet(Facet[Mapping[str, float]]):
    """Disturbed links: the seconds per step for which each held ranks up, averaged over ranks and seeds.

    These seconds are part of `comm` and `io`.
    """

    nothing: Mapping[str, float] = {}
    _title = "links that held ranks up: seconds per step of a rank, in comm and io; others may wait for it besides"
    _columns = (
        SCHEDULE,
        Column("link"),
        Column("held up", "seconds", form=seconds),
        Column("of a step", "share", form=format_share),
    )

    def measure(self, simulated: Simulated) -> Mapping[str, float]:
        """Average over all seeds of all parts. A link without effect in a seed counts as 0."""
        totals_s: dict[str, float] = {}
        for part in simulated.parts:
            for name, of_link_s in part.links_per_step_s().items():
                totals_s[name] = totals_s.get(name, 0.0) + of_link_s * len(part.makespan_s)
        n_seeds = sum(len(part.makespan_s) for part in simulated.parts)
        return {name: total_s / n_seeds for name, total_s in sorted(totals_s.items())}

    def document(self, value: Mapping[str, float]) -> dict[str, object]:
        """Return one object, by link."""
        return {"links_s": dict(value)} if value else {}

    def divided(self, value: Mapping[str, float], n_parts: int) -> Mapping[str, float]:
        """Return seconds per part."""
        return _divided(value, n_parts)

    def without_first(self, value: Mapping[str, float], first: Mapping[str, float], rest: Rest) -> Mapping[str, float]:
        """Return seconds per step without those of the first steps."""
        return {name: rest(of_step_s, first.get(name, 0.0)) for name, of_step_s in value.items()}

    def largest(self, value: Mapping[str, float]) -> list[tuple[str, float]]:
        """Return the links that held ranks up longest, in words."""
        longest = sorted(value.items(), key=lambda item: -item[1])[:_MOST_LINKS]
        return [(link_in_words(name), held_s) for name, held_s in longest]

    def table(self, lines: Sequence[Line[Mapping[str, float]]], base: Mapping[str, float]) -> FacetTable | None:
        """Return the links, most seconds first."""
        records = [
            {"schedule": each.schedule, "link": link, "seconds": held_s, "share": held_s / each.step_s}
            for each in lines
            for link, held_s in self.largest(each.value)
        ]
        return FacetTable(self._title, self._columns, records) if records else None


@final
class _RangesFacet(Facet[Mapping[str, float]]):
    """Uncertain quantities: the share of the result's variance that each causes alone.

    `simdist.studies.comparison.with_ranges` computes the shares from draws, with the ranges of step time and speed-up.
    """

    nothing: Mapping[str, float] = {}

    def measure(self, simulated: Simulated) -> Mapping[str, float]:
        """Return nothing: one schedule alone has no speed-up."""
        return self.nothing

    def document(self, value: Mapping[str, float]) -> dict[str, object]:
        """Return one object, by path of the quantity."""
        return {"shares": dict(value)} if value else {}

    def columns(self, values: Sequence[Mapping[str, float]]) -> Sequence[Column]:
        """Return the columns that show ranges in place of confidence intervals."""
        return IN_RANGES if any(values) else ()

    def remarks(self, scenario: Scenario | None, lines: Sequence[Line[Mapping[str, float]]]) -> list[Remark]:
        """Name the measurement that would narrow the ranges most."""
        known = {each.schedule: each.value for each in lines if each.value}
        if not known or scenario is None:
            return []
        from simdist.studies.uncertainty import causes

        return [Remark("result", text) for text in causes(scenario, known)]


@dataclass(frozen=True)
class GradientsUsed:
    """The gradients that updates use.

    Args:
        share: Share of the batches whose gradients updates use.
        late: Ranks that are too late for nearly all updates -> share of updates that each misses.
    """

    share: float = 1.0
    late: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, late: Mapping[int, float]) -> "GradientsUsed":
        """Return the gradients that a plan uses, given the share of updates that each rank misses."""
        return cls(plan.gradients_used, {rank: share for rank, share in late.items() if share >= _NEARLY_ALL})

    def remarks(self, label: str) -> list[Remark]:
        """Return a remark if updates do not use all gradients. It names the ranks that are too late."""
        if self.share == 1:
            return []
        used = f"{label} uses the gradients of {format_share(self.share)} of the batches"
        text = f"{used}: times are per step, not per sample"
        if self.late:
            least = min(self.late.values())
            share = format_share(least) if len(self.late) == 1 else f"{format_share(least)} or more"
            rarely = "all updates" if least == 1 else f"{share} of the updates"
            text += (
                f"; {ranks_named(tuple(self.late))} {'come' if len(self.late) > 1 else 'comes'} too late for {rarely}"
            )
        return [Remark("result", text, label)]


@final
class _GradientsFacet(Facet[GradientsUsed]):
    """Gradients that updates do not use, such as those of ranks that are too late."""

    nothing = GradientsUsed()
    names = ("gradients_used",)
    brief = (Column("gradients used", "gradients_used", form=format_share),)

    def measure(self, simulated: Simulated) -> GradientsUsed:
        """Average over all seeds."""
        return GradientsUsed.of(simulated.plan, mean_late(simulated.parts))

    def document(self, value: GradientsUsed) -> dict[str, object]:
        """Return the share if it is not 1, and the ranks that are too late."""
        used: dict[str, object] = {} if value.share == 1 else {"gradients_used": value.share}
        return used | ({"late": dict(value.late)} if value.late else {})

    def without_first(self, value: GradientsUsed, first: GradientsUsed, rest: Rest) -> GradientsUsed:
        """Return the share without that of the first steps; ranks that are too late, of all steps."""
        return replace(value, share=rest(value.share, first.share))

    def cells(self, value: GradientsUsed) -> dict[str, object]:
        """Return the share."""
        return {"gradients_used": value.share}

    def kept(self, value: GradientsUsed) -> dict[str, object]:
        """Return the share if it is below 1, and the ranks that are too late."""
        return self.document(value)

    def restored(self, record: Mapping[str, Any]) -> GradientsUsed:
        """Return both."""
        late = {int(rank): float(share) for rank, share in record.get("late", {}).items()}
        return GradientsUsed(float(record.get("gradients_used", 1.0)), late)

    def remarks(self, scenario: Scenario | None, lines: Sequence[Line[GradientsUsed]]) -> list[Remark]:
        """Return the remarks on all schedules."""
        return [remark for each in lines for remark in each.value.remarks(each.schedule)]


@dataclass(frozen=True)
class _PeakMemory:
    """The most memory that a rank's device needs at any time.

    Args:
        nbytes: Bytes in use at that time.
        of: The same by what they are for.
        limit_nbytes: Bytes that the device has; None if not stated.
        not_counted: Says what is not counted, and what to state; empty if all is.
    """

    nbytes: int
    of: "Mapping[MemoryKind, int]"
    limit_nbytes: int | None = None
    not_counted: str = ""

    @property
    def fits(self) -> bool:
        """Whether the device has as many."""
        return self.limit_nbytes is None or self.nbytes <= self.limit_nbytes


@final
class _MemoryFacet(Facet[_PeakMemory | None]):
    """Memory of a device: shown where a schedule shards the model, or one needs more than the device has."""

    nothing: _PeakMemory | None = None
    _title = "memory of a device when most is in use"

    def measure(self, simulated: Simulated) -> _PeakMemory | None:
        """Return nothing: the scenario states sizes that no plan has."""
        return None

    def measure_built(
        self, scenario: Scenario, built: "Built", *, n_seeds: int, steps_in: "StepsIn"
    ) -> _PeakMemory | None:
        """Return the peak, without disturbances."""
        limit_nbytes = scenario.cluster.device.memory_nbytes
        shards = any(each.shards for each in scenario.schedules)
        if not shards and limit_nbytes is None:
            return None
        from simdist.runs.memory import memory_of, most_nbytes, not_counted

        if not shards and most_nbytes(built, scenario.workload) <= (limit_nbytes or 0):
            return None
        found = memory_of(scenario, built)
        peak = _PeakMemory(found.peak_nbytes, found.at_peak, limit_nbytes, not_counted(scenario.workload) or "")
        return peak if shards or not peak.fits else None

    def document(self, value: _PeakMemory | None) -> dict[str, object]:
        """Return the bytes, and what they are for."""
        return {"memory_nbytes": value.nbytes, "memory_of_nbytes": dict(value.of)} if value else {}

    def kept(self, value: _PeakMemory | None) -> dict[str, object]:
        """Return all of it."""
        return {"memory": asdict(value)} if value else {}

    def restored(self, record: Mapping[str, Any]) -> _PeakMemory | None:
        """Return all of it."""
        return _PeakMemory(**record["memory"]) if "memory" in record else None

    def columns(self, values: Sequence[_PeakMemory | None]) -> Sequence[Column]:
        """Return a column of peaks."""
        return [Column("memory", "memory_nbytes", form=format_nbytes)]

    def table(self, lines: Sequence[Line[_PeakMemory | None]], base: _PeakMemory | None) -> FacetTable | None:
        """Return the peaks by what the memory is for."""
        kinds = dict.fromkeys(kind for each in lines if each.value for kind, nbytes in each.value.of.items() if nbytes)
        records = [{"schedule": each.schedule, **each.value.of} for each in lines if each.value]
        of_kinds = [Column(kind, kind, form=format_nbytes) for kind in kinds]
        return FacetTable(self._title, (SCHEDULE, *of_kinds), records) if records else None

    def remarks(self, scenario: Scenario | None, lines: Sequence[Line[_PeakMemory | None]]) -> list[Remark]:
        """Name the schedules that do not fit, and say what is not counted. Only what is counted in full surely fits."""
        from simdist.runs.memory import may_not_fit, not_counted, surely_fits

        found = []
        in_part = next((each.value.not_counted for each in lines if each.value), "")
        if not in_part and scenario is not None and scenario.cluster.device.memory_nbytes is not None:
            in_part = not_counted(scenario.workload) or ""  # also where nothing is shown, because the rest fits
        least = "at least " if in_part else ""
        for each in lines:
            if each.value and not each.value.fits:
                has = format_nbytes(each.value.limit_nbytes or 0)
                needs = f"{least}{format_nbytes(each.value.nbytes)}"
                text = f"{each.schedule} needs {needs} on a device that has {has}"
                found.append(Remark("accuracy", text, each.schedule))
        fitting = [each.schedule for each in lines if each.value and each.value.fits]
        limits = {each.schedule: each.value for each in lines if each.value and each.value.limit_nbytes and not in_part}
        near = [label for label, of in limits.items() if of.fits and not surely_fits(of.nbytes, of.limit_nbytes or 0)]
        if near:
            found.append(Remark("accuracy", may_not_fit(near, limits[near[0]].limit_nbytes or 0)))
            fitting = [label for label in fitting if label not in near]
        if found and fitting and not in_part:
            found.append(Remark("result", f"{', '.join(fitting)} {'fits' if len(fitting) == 1 else 'fit'}"))
        return [*found, Remark("assumption", in_part)] if in_part else found


@dataclass(frozen=True, slots=True)
class _FailingJob:
    """The whole job of a schedule under failures: mean shares of its time, see `simdist.studies.goodput`.

    Args:
        goodput: The mean.
        ettr: The mean.
        range90: 90 % interval of goodput, from seeds and uncertain rates and recovery; None if these are certain.
    """

    goodput: float
    ettr: float
    range90: Interval | None = None


@final
class _GoodputFacet(Facet[_FailingJob | None]):
    """Goodput of the whole job, if the scenario has failures."""

    nothing: _FailingJob | None = None
    names = ("goodput", "ettr", "goodput_range90_low", "goodput_range90_high")
    brief = (Column("goodput", form=format_share),)
    _in_range = Column(
        "goodput",
        "goodput",
        "goodput_range90_low",
        "goodput_range90_high",
        form=lambda center, *ends: in_range(center, *ends, form=format_share),
    )

    def measure(self, simulated: Simulated) -> _FailingJob | None:
        """Return nothing: steps do not tell."""
        return None

    def measure_built(
        self, scenario: Scenario, built: "Built", *, n_seeds: int, steps_in: "StepsIn"
    ) -> _FailingJob | None:
        """Let the job suffer the failures of the same seeds."""
        if scenario.failures is None or scenario.train_for is None:
            return None
        from simdist.scenario.sampling import run_seeds
        from simdist.studies.drawn_failures import FailureDraws, drawn_job
        from simdist.studies.suffering import steady, suffer

        trained = steady(scenario, built.schedule, steps_in)
        found = suffer(scenario.failures, trained, run_seeds(scenario.seed, n_seeds))
        drawn = drawn_job(FailureDraws.of(scenario), scenario.failures.on_failure, trained)
        center = float(found.goodput.mean())
        ranged = drawn and drawn.goodput_range(center, mean_interval(found.goodput))
        return _FailingJob(center, float(found.ettr.mean()), ranged[0] if ranged else None)

    def document(self, value: _FailingJob | None) -> dict[str, object]:
        """Return both shares, and the interval if there is one."""
        if value is None:
            return {}
        found: dict[str, object] = {"goodput": value.goodput, "ettr": value.ettr}
        return found if value.range90 is None else found | {"goodput_range90": value.range90}

    def cells(self, value: _FailingJob | None) -> dict[str, object]:
        """Return the same with the ends of the interval apart."""
        return flat_record(self.document(value))

    def kept(self, value: _FailingJob | None) -> dict[str, object]:
        """Return the document."""
        return self.document(value)

    def restored(self, record: Mapping[str, Any]) -> _FailingJob | None:
        """Return what was kept."""
        ends = record.get("goodput_range90")
        return _FailingJob(record["goodput"], record["ettr"], ends and tuple(ends)) if "goodput" in record else None

    def columns(self, values: Sequence[_FailingJob | None]) -> Sequence[Column]:
        """Return a column of goodput."""
        return (self._in_range,) if all(each and each.range90 for each in values) else self.brief


EPOCHS = _EpochsFacet()
ADDED = _AddedFacet()
LINKS = _LinksFacet()
RANGES = _RangesFacet()
GRADIENTS = _GradientsFacet()
_WHOLE_JOB = _WholeJobFacet()
MEMORY = _MemoryFacet()
GOODPUT = _GoodputFacet()

#: All facets, in the order of their keys.
FACETS: tuple[Facet[Any], ...] = (EPOCHS, ADDED, LINKS, RANGES, GRADIENTS, _WHOLE_JOB, MEMORY, GOODPUT)
