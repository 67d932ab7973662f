"""Columns of tables for people: which fields of a record they show, in the units of people.

Every table that shows the step time, the speed-up or the states of `simdist.traces.breakdown` takes them from here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

from simdist.errors import require
from simdist.settings.units import format_seconds, in_range
from simdist.studies.statistics import is_wide
from simdist.traces.breakdown import STATES as STATE_NAMES

if TYPE_CHECKING:
    import pandas as pd


_ItemT = TypeVar("_ItemT")

_ROUNDING_S = 1e-12  # shorter than anything that is simulated
_ROUNDING = 1e-9
_MOST_EPOCHS = 6  # lines of a table; JSON has all
_NOTHING = "-"


@final
class Column:
    """A column of a table: its heading, and how a record is printed in it."""

    def __init__(
        self, heading: str, *keys: str, form: Callable[..., str] | None = None, words: Callable[..., str] = str
    ) -> None:
        """Describe a column.

        Args:
            heading: Stands above it.
            keys: Fields of a record that it shows; the heading if none is given.
            form: Prints the values of the keys, which are numbers, aligned to the right.
            words: Prints them if they are words, aligned to the left.
        """
        self.heading = heading
        self.keys = keys or (heading,)
        self.form = form or words
        self.is_words = form is None

    def headed(self, heading: str) -> "Column":
        """Return the column with another heading."""
        found = Column(heading, *self.keys)
        found.form = self.form
        found.is_words = self.is_words
        return found

    def cell(self, record: Mapping[str, object]) -> str:
        """Print a record: nothing if it lacks the key, a dash if the value is None."""
        first, *others = self.keys
        if first not in record:
            return ""
        return _NOTHING if record[first] is None else self.form(record[first], *(record[key] for key in others))


def combined(usual: Sequence[Column], more: Sequence[Column]) -> list[Column]:
    """Return columns with more of them: each replaces the one of the same first key, or else stands before the last.

    >>> columns = (Column("schedule"), Column("step time", "step_s"), Column("engine"))
    >>> [each.heading for each in combined(columns, [Column("in ranges", "step_s"), Column("added")])]
    ['schedule', 'in ranges', 'added', 'engine']
    """
    by_key = {each.keys[0]: each for each in more}
    *first, last = [by_key.pop(each.keys[0], each) for each in usual]
    return [*first, *by_key.values(), last]


def without_repeated(
    columns: Sequence[Column], records: Sequence[Mapping[str, object]]
) -> tuple[Sequence[Column], str]:
    """Return the columns that tell records apart, and a sentence with the value of each other column.

    The first column stays: it names the records. All stay, and the sentence is empty, if no other one differs.

    >>> columns = [Column("schedule"), Column("io", form=seconds), Column("wait", form=seconds)]
    >>> records = [{"schedule": "sync", "io": 0.0, "wait": 2.0}, {"schedule": "local-4", "io": 0.0, "wait": 1.0}]
    >>> kept, sentence = without_repeated(columns, records)
    >>> [each.heading for each in kept], sentence
    (['schedule', 'wait'], 'In every row: io 0 s.')
    """
    cells = {column: {column.cell(record) for record in records} for column in columns}
    kept = [column for column in columns if column is columns[0] or len(cells[column]) > 1]
    if len(kept) == 1:
        return columns, ""
    values = {column.heading: " ".join(cells[column].pop().split()) for column in columns if column not in kept}
    said = "; ".join(f"{heading} {value}" for heading, value in values.items() if value)
    return kept, f"In every row: {said}." if said else ""


def shown_epochs(epochs: Sequence[_ItemT]) -> list[_ItemT | None]:
    """Return those of many that a table shows: the first ones and the last; None stands for the others."""
    return list(epochs) if len(epochs) <= _MOST_EPOCHS else [*epochs[: _MOST_EPOCHS - 1], None, epochs[-1]]


def count(n: int) -> str:
    """Print a number of things.

    >>> count(25557032)
    '25,557,032'
    """
    return f"{n:,}"


def factor(value: float) -> str:
    """Print a factor.

    >>> factor(1.3649)
    '1.36'
    """
    return f"{value:.2f}"


def seconds(value: float) -> str:
    """Print a time, without what is left of 0 when floating-point numbers are summed.

    >>> seconds(1.8e-17), seconds(2e-3)
    ('0 s', '2 ms')
    """
    return format_seconds(value if value > _ROUNDING_S else 0.0)


def seconds_with_interval(center_s: float, interval_s: tuple[float, float] | None) -> str:
    """Print a time and, if there is one, its interval.

    >>> seconds_with_interval(0.0835, (0.082, 0.085)), seconds_with_interval(0.0835, (0.0835, 0.0835))
    ('83.5 ms ± 1.5 ms', '83.5 ms')
    >>> seconds_with_interval(0.1, (0.025, 0.4))
    '100 ms (25 ms-400 ms)'
    """
    if interval_s and is_wide(center_s, interval_s):
        return in_range(center_s, *interval_s, form=format_seconds)
    half_s = (interval_s[1] - interval_s[0]) / 2 if interval_s else 0.0
    return format_seconds(center_s) + (f" ± {format_seconds(half_s, 2)}" if half_s > _ROUNDING_S else "")


def factor_with_interval(center: float, interval: tuple[float, float] | None) -> str:
    """Print a speed-up and, if there is one, its interval.

    >>> factor_with_interval(1.36, (1.34, 1.38)), factor_with_interval(1.117, (1.113, 1.121))
    ('1.36 ± 0.02', '1.117 ± 0.004')
    >>> factor_with_interval(1.61, (0.547, 4.743))
    '1.61 (0.55-4.74)'
    """
    if interval and is_wide(center, interval):
        return in_range(center, *interval)
    half = (interval[1] - interval[0]) / 2 if interval else 0.0
    if half <= _ROUNDING * center:
        return f"{center:.2f}"
    digits = 3 if half < 0.01 else 2
    return f"{center:.{digits}f} ± {half:.{digits}f}"


SCHEDULE: Column = Column("schedule")
STEP_TIME: Column = Column("step time", "step_s", "step_s_ci95", form=seconds_with_interval)
SPEEDUP: Column = Column("speed-up", "speedup", "speedup_ci95", form=factor_with_interval)
#: The same where something is uncertain.
IN_RANGES: tuple[Column, ...] = (
    Column(
        "step time", "step_s", "step_s_range90", form=lambda center, ends: in_range(center, *ends, form=format_seconds)
    ),
    Column("speed-up", "speedup", "speedup_range90", form=lambda center, ends: in_range(center, *ends)),
)
#: The same where there is one run, without an interval.
PLAIN_STEP_TIME: Column = Column("step time", "step_s", form=seconds)
PLAIN_SPEEDUP: Column = Column("speed-up", "speedup", form=factor)
#: Seconds per step in each state of `simdist.traces.breakdown`.
STATE_COLUMNS: tuple[Column, ...] = tuple(Column(state, f"{state}_s", form=seconds) for state in STATE_NAMES)
ENGINE: Column = Column("engine")


_INTERVALS = ("_ci95", "_range90")  # end the names of intervals: over seeds, and with uncertain values


def frame_of_records(records: Iterable[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return records as a pandas frame; `step_s_ci95` becomes `step_s_ci95_low` and `step_s_ci95_high`.

    A column without any value is one of numbers, all NaN.

    Raises:
        UnsupportedError: pandas is not installed.
    """
    require("pandas", extra="tables", what="a frame of results")
    import pandas as pd

    found = pd.DataFrame([flat_record(each) for each in records])
    missing = [name for name in found.columns if found[name].isna().all()]
    return found.astype(dict.fromkeys(missing, "float64"))


def flat_record(record: Mapping[str, Any]) -> dict[str, object]:
    """Return a record with each interval in two cells.

    >>> flat_record({"goodput": 0.5, "goodput_ci95": None})
    {'goodput': 0.5, 'goodput_ci95_low': None, 'goodput_ci95_high': None}
    """
    found: dict[str, object] = {}
    for key, cell in record.items():
        found |= ends_of(key, cell) if key.endswith(_INTERVALS) else {key: cell}
    return found


def ends_of(name: str, interval: tuple[float, float] | None) -> dict[str, object]:
    """Return the two columns of an interval, or of other ends.

    >>> ends_of("step_s_ci95", (0.1, 0.2))
    {'step_s_ci95_low': 0.1, 'step_s_ci95_high': 0.2}
    """
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}
