"""The table of results: a row is a schedule of a point, computed in a sweep or run by itself.

The same columns serve pandas, CSV and JSON; `columns` makes them. Columns that a row lacks are None there.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from simdist.display import Pictured
from simdist.errors import SimdistError, require
from simdist.scenario import strict_yaml
from simdist.settings.base import plural
from simdist.studies import facets
from simdist.studies.columns import ends_of
from simdist.studies.comparison import Row, find_label, row, too_few_seeds
from simdist.studies.known_delays import Chances, chance_remarks
from simdist.studies.measuring import ScheduleTimes
from simdist.studies.remarks import Remark, of_table, with_remarks
from simdist.studies.statistics import Interval
from simdist.sweeps.fields import Choice
from simdist.traces.breakdown import STATES

if TYPE_CHECKING:
    import pandas as pd

TraceSource: TypeAlias = Literal["simulated", "real"]
#: Name -> a value for each row; None where there is none.
Columns: TypeAlias = dict[str, list[object]]

#: Endings of columns that are float64 even where nothing stands in them.
_FLOATS = ("_s", "_low", "_high", "speedup", "_ratio")
_COUNTS = ("point", "seeds")

#: The folder for run directories in the folder of a sweep: RUNS/POINT/LABEL.
RUNS = "runs"

_UNIT = re.compile(r"_(per_s|s|Bps|nbytes)$")
_DRAWN = re.compile(r"(\d+\.\d{4,})(?=\s|%|[A-Za-z]|$)")

#: Columns that stand only in tables that have something in them, as those of facets.
_OPTIONAL = frozenset({"folder", "case", "run", "error_ratio"})


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A row: one schedule of one point.

    Args:
        point: Number in its sweep; of runs, the folder that they are in.
        case: Of the sweep.
        choices: Settings of the point, by column.
        source: Whether its times were simulated or measured.
        schedule: Label.
        kind: Of the schedule.
        n_seeds: Over which it was averaged, or would have been.
        measured: Step times of every seed and so on; None if it failed.
        row: The same against the baseline; `row.speedup` means nothing if `has_baseline` is False.
        has_baseline: Whether there was a baseline to compare with.
        failed: Kind of the error, or empty.
        error: Its message.
        run: Run directory, relative to the folder; empty for a row of a sweep.
        error_ratio: (simulated - real) / real of the step times of this run, if it has both traces.
        folder: Where it was found.
    """

    point: int | str
    case: str
    choices: dict[str, Choice]
    source: TraceSource
    schedule: str
    kind: str
    n_seeds: int
    measured: ScheduleTimes | None = None
    row: Row | None = None
    has_baseline: bool = False
    failed: str = ""
    error: str = ""
    run: str = ""
    error_ratio: float | None = None
    folder: str = ""

    @property
    def place(self) -> tuple[object, ...]:
        """Key of a point, common to rows of a sweep and of runs in its folder."""
        return self.folder, self.point, f"/{self.run}".rpartition(f"/{RUNS}/")[0]

    @property
    def group(self) -> tuple[object, ...]:
        """Key that rows have in common that may be compared with each other: with their seeds."""
        return *self.place, self.source, bool(self.run)


@dataclass(frozen=True, repr=False)
class Table(Pictured):
    """Results and their common properties.

    Args:
        varied: Columns of fields that differ between points, in their order.
        results: Rows.
        n_missing: Rows that are not there yet.
        extras: Columns that only some tables have: `folder`, `case`, `run`, facets.
        remarks: What to know beside the rows.
        baseline: Label or kind of the schedule that speed-ups are over; empty if there are several.
    """

    varied: tuple[str, ...]
    results: tuple[ResultRow, ...]
    n_missing: int = 0
    extras: frozenset[str] = frozenset()
    remarks: tuple[Remark, ...] = ()
    baseline: str = ""

    @property
    def n_failed(self) -> int:
        """How many rows failed."""
        return sum(bool(each.failed) for each in self.results)

    @property
    def shown_remarks(self) -> list[Remark]:
        """The remarks as people read them: the first ones, each with its points."""
        return of_table(self.remarks, len({each.point for each in self.results}))

    def frame(self) -> "pd.DataFrame":
        """Return the results as a pandas frame, with the columns of `values_of`; its `attrs` have the `remarks`."""
        return with_remarks(_frame_of(columns(self)), self.remarks)

    def __repr__(self) -> str:
        return f"<results: {len(self.results):,} rows, {self.n_missing:,} missing, {self.n_failed:,} failed>"


def uses_kinds(results: Sequence[ResultRow]) -> bool:
    """Tell whether a kind says which schedule is meant where labels change from point to point, such as local-2."""
    labels = {(each.schedule, each.kind) for each in results}
    if len({kind for _, kind in labels}) == len(labels):
        return False
    return len({(each.point, each.kind) for each in results}) == len(results)


def extras_of(results: Sequence[ResultRow]) -> frozenset[str]:
    """Return which of the columns that only some tables have rows need."""
    found = {
        "run": any(each.run for each in results),
        "case": any(each.case for each in results),
        "error_ratio": any(each.error_ratio is not None for each in results),
    }
    measured = [each.measured for each in results if each.measured]
    found |= {name: True for facet in facets.told(measured) for name in facet.names}
    return frozenset(name for name, there in found.items() if there)


def collected(of_points: Iterable[tuple[int | str, Iterable[Mapping[str, Any] | Remark]]]) -> tuple[Remark, ...]:
    """Return the remarks on points of a table, each once, with the points that it is about; none if on all.

    Args:
        of_points: Each point with its remarks, as remarks or as they are stored.
    """
    points: dict[Remark, dict[int | str, None]] = {}
    known: set[int | str] = set()
    for point, remarks in of_points:
        known.add(point)
        for each in remarks:
            points.setdefault(each if isinstance(each, Remark) else Remark(**each), {})[point] = None
    return tuple(
        each if len(where) == len(known) else replace(each, points=tuple(where)) for each, where in points.items()
    )


def remarks_on_results(results: Sequence[ResultRow], chances: Chances) -> list[Remark]:
    """Return the remarks on the results of the schedules of one point."""
    rows = [each.row for each in results if each.row]
    measured = [each.measured for each in results if each.row and each.measured]
    if not rows:
        return []
    return [*facets.facet_remarks(None, rows), *chance_remarks(chances, measured), *too_few_seeds(rows)]


def joined(tables: Sequence[Table]) -> Table:
    """Return one table with the rows of all, one after the other."""
    baselines = {table.baseline for table in tables}
    return Table(
        tuple(dict.fromkeys(column for table in tables for column in table.varied)),
        tuple(each for table in tables for each in table.results),
        sum(table.n_missing for table in tables),
        frozenset().union(*(table.extras for table in tables)),
        tuple(dict.fromkeys(each for table in tables for each in table.remarks)),
        baselines.pop() if len(baselines) == 1 else "",
    )


def compared(results: Sequence[ResultRow], baseline: str) -> list[ResultRow]:
    """Compare the schedules of one point with the baseline among them.

    Args:
        results: Rows of a point and source, with their measurements.
        baseline: Label or, failing that, kind.
    """
    found = find_label([(each.schedule, each.kind) for each in results], baseline)
    base = results[found].measured if found is not None else None
    return [_compared(each, base) for each in results]


def lonely(n_points: int, baseline: str) -> Remark:
    """Return the remark about points where there is nothing to compare with."""
    points = f"{n_points:,} {plural(n_points, 'point')}"
    return Remark("result", f"no speed-ups at {points}: no schedule called {baseline!r} was measured there")


def _compared(result: ResultRow, base: ScheduleTimes | None) -> ResultRow:
    if result.measured is None:
        return result
    try:
        return replace(result, row=row(result.measured, base or result.measured), has_baseline=base is not None)
    except SimdistError as error:
        return replace(result, measured=None, failed=type(error).__name__, error=str(error))


def columns(table: Table) -> Columns:
    """Return the columns of a table, each with a value for every row."""
    nothing = ResultRow("", "", {}, "simulated", "", "", 0)  # its row has the names of all columns
    rows = [values_of(each, table.varied) for each in (nothing, *table.results)]
    left_out = _OPTIONAL.union(*(facet.names for facet in facets.FACETS)) - table.extras
    return {name: [row[name] for row in rows[1:]] for name in rows[0] if name not in left_out}


def values_of(result: ResultRow, varied: Sequence[str]) -> dict[str, object]:
    """Return the value of a row in each column.

    Columns:
        folder (str): Of several folders: its own.
        point (int or str): Number of the point. Of runs, their folder.
        case (str): In sweeps with cases.
        source (str): `simulated`, or `real` for measured rows.
        run (str): Of runs: directory, relative to the folder.
        schedule, kind (str): Label and kind.
        speedup (float or null): Over the baseline, at the same point.
        step_s_ci95_low, step_s_ci95_high, speedup_ci95_low, speedup_ci95_high (float or null): 95 % confidence
            intervals over seeds, if several.
        step_s, compute_s, comm_s, wait_s, io_s, host_s (float or null): Times per step.
        staging_s, epoch_first_s, epoch_last_s (float or null): With a data set: staging, the first and the last epoch.
        gradients_used (float or null): Share of batches used.
        goodput, ettr (float or null): With failures: shares of the time of the whole job.
        goodput_range90_low, goodput_range90_high (float or null): 90 % interval, with uncertain rates or recoveries.
        engine (str): `fast` or `des`. Of runs, the program that wrote the trace.
        seeds (int): Number of seeds.
        error_ratio (float or null): Error of the step time, where a measured run has a simulation.
        failed, error (str): Kind of the error, or empty, and its message.
    """
    row = result.row
    of_facets = row.facets.cells(facets.FACETS) if row else {}
    compared = row if result.has_baseline else None
    return {
        "folder": result.folder,
        "point": result.point,
        "case": result.case,
        **{name: result.choices[name].number if name in result.choices else None for name in varied},
        "source": result.source,
        "run": result.run,
        "schedule": result.schedule,
        "kind": result.kind,
        **_with_interval("step_s", (row.step_s, row.step_s_ci95) if row else None),
        **_with_interval("speedup", (compared.speedup, compared.speedup_ci95) if compared else None),
        **{f"{state}_s": row and row.states_s[state] for state in STATES},
        **{name: of_facets.get(name) for facet in facets.FACETS for name in facet.names},
        "engine": row.engine if row else "",
        "seeds": result.n_seeds,
        "error_ratio": result.error_ratio,
        "failed": result.failed,
        "error": result.error,
    }


def _frame_of(columns: Columns) -> "pd.DataFrame":
    """Return a frame: numbers as int64 or float64 with NaN where there is none, truth values as bool, others as str."""
    require("pandas", extra="tables", what="a frame of results")
    import pandas as pd

    return pd.DataFrame({name: _series(name, values) for name, values in columns.items()})


def _series(name: str, values: Sequence[object]) -> "pd.Series":
    import pandas as pd

    if not values and name in _COUNTS:
        return pd.Series([], dtype="int64")
    if all(value is None for value in values) and name.endswith(_FLOATS):
        return pd.Series(values, dtype="float64")
    found: pd.Series = pd.Series(list(values))
    return found if found.dtype.kind in "bif" else pd.Series(list(map(text_of, values)), dtype=str)


def text_of(value: object) -> str:
    """Return a value as CSV has it: nothing for None, truth values in small letters."""
    if value is None:
        return ""
    text = str(value).replace("\r", "\n")  # which the writer does not quote
    return text.lower() if isinstance(value, bool) else text


def _with_interval(name: str, found: tuple[float, Interval | None] | None) -> dict[str, object]:
    value, interval = found or (None, None)
    return {name: value} | ends_of(f"{name}_ci95", interval)


def written_text(choice: Choice) -> str:
    """Return a value as a scenario file has it, on one line."""
    return choice.written if isinstance(choice.written, str) else strict_yaml.dump_line(choice.written)


def shown_text(choice: Choice) -> str:
    """Return a value for people: as written; drawn values with four digits.

    >>> shown_text(Choice("1.4589213 GB/s", 1458921300.0)), shown_text(Choice(0.00257267, 0.00257267))
    ('1.459 GB/s', '0.002573')
    """
    return _DRAWN.sub(lambda match: f"{float(match[1]):.4g}", written_text(choice))


def short_names(columns: Sequence[str]) -> list[str]:
    """Return the last parts of columns, as few as tell them apart, without units.

    >>> short_names(["cluster.fabric.latency_s", "cluster.network.latency_s", "cluster.nodes", "schedules[1].period"])
    ['fabric.latency', 'network.latency', 'nodes', 'schedules[1].period']
    """
    return [_short_name(column, [other for other in columns if other != column]) for column in columns]


def _short_name(column: str, others: Sequence[str]) -> str:
    parts = column.split(".")
    for count in range(1, len(parts) + 1):
        tail = ".".join(parts[-count:])
        is_alone = not any(f".{other}".endswith(f".{tail}") for other in others)
        of_item = count == 1 and len(parts) > 1 and parts[-2].endswith("]")  # a period is a period of something
        if is_alone and not of_item:
            break
    return _UNIT.sub("", tail)


def source_text(source: TraceSource) -> str:
    """Return the name of a source."""
    return "measured" if source == "real" else "simulated"
