"""Tables for people: columns over the records that `--json` prints, in the units of people."""

import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from shutil import get_terminal_size
from typing import TypeVar, final

import click

from simdist.settings.units import format_seconds, format_share, in_range
from simdist.traces import breakdown
from simdist.traces.links import link_in_words

_ItemT = TypeVar("_ItemT")

_ROUNDING_S = 1e-12  # shorter than anything that is simulated
_ROUNDING = 1e-9
_MOST_EPOCHS = 6  # lines of a table; JSON has all
_WIDTH = 200  # of what is no terminal
_MOST_LINKS = 6  # of a schedule; JSON has all
_MIN_WORDS = 20  # columns for a column of words that folds
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

    def cell(self, record: Mapping[str, object]) -> str:
        """Print a record: nothing if it lacks the key, a dash if the value is None."""
        first, *others = self.keys
        if first not in record:
            return ""
        return _NOTHING if record[first] is None else self.form(record[first], *(record[key] for key in others))


def table_text(title: str, columns: Sequence[Column], records: Iterable[Mapping[str, object]]) -> str:
    """Return a table as text, with a title above it and a line for each record.

    Words in the last column fold into as many lines as it takes; nothing else is ever cut.
    """
    rows = [[column.heading for column in columns]]
    rows += ([column.cell(record) for column in columns] for record in records)
    on_terminal = sys.stdout.isatty()
    widths = [max(map(_width, cells)) for cells in zip(*rows, strict=True)]
    if columns[-1].is_words:
        left = (get_terminal_size().columns if on_terminal else _WIDTH) - sum(widths[:-1]) - 2 * len(columns) - 1
        widths[-1] = min(widths[-1], max(left, _MIN_WORDS))
    heading, *others = [line for row in rows for line in _lines(row, columns, widths)]
    rule = " " + "─" * (sum(widths) + 2 * len(columns) - 1)
    titles = [line.strip() for line in _folded(title, len(rule) + 1)]
    if on_terminal:
        titles = [click.style(line, bold=True) for line in titles]
        heading = click.style(heading, bold=True)
    return "\n".join([*titles, "", heading, rule, *others])


def _lines(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row, of which each cell may have several."""
    for cells in zip_longest(*map(_folded, row, widths), fillvalue=""):
        yield f" {'  '.join(map(_aligned, cells, columns, widths))}".rstrip()


def _aligned(text: str, column: Column, width: int) -> str:
    space = " " * (width - _width(text))
    return text + space if column.is_words else space + text


def _folded(text: str, width: int) -> list[str]:
    """Return the lines of a text, of at most so many columns."""
    if _width(text) <= width:
        return text.splitlines() or [""]
    return [part for line in text.splitlines() for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes; a Chinese character takes two."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


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
    """
    half_s = (interval_s[1] - interval_s[0]) / 2 if interval_s else 0.0
    return format_seconds(center_s) + (f" ± {format_seconds(half_s, 2)}" if half_s > _ROUNDING_S else "")


def factor_with_interval(center: float, interval: tuple[float, float] | None) -> str:
    """Print a speed-up and, if there is one, its interval.

    >>> factor_with_interval(1.36, (1.34, 1.38)), factor_with_interval(1.117, (1.113, 1.121))
    ('1.36 ± 0.02', '1.117 ± 0.004')
    """
    half = (interval[1] - interval[0]) / 2 if interval else 0.0
    if half <= _ROUNDING * center:
        return f"{center:.2f}"
    digits = 3 if half < 0.01 else 2
    return f"{center:.{digits}f} ± {half:.{digits}f}"


_LINKS_TITLE = "links that held ranks up: seconds per step of a rank, in comm and io; others may wait for it besides"


def links_table(rows: Iterable[tuple[str, Mapping[str, float], float]]) -> str:
    """Return a table of the links that held ranks up, most seconds first.

    Args:
        rows: Label of a schedule, seconds per step by link, averaged over ranks, and the seconds of a step.
    """
    records = [
        {"schedule": label, "link": link_in_words(name), "seconds": held_s, "share": held_s / step_s}
        for label, links_s, step_s in rows
        for name, held_s in sorted(links_s.items(), key=lambda item: -item[1])[:_MOST_LINKS]
    ]
    return table_text(_LINKS_TITLE, _LINK_COLUMNS, records)


STEP_TIME = Column("step time", "step_s", "step_s_ci95", form=seconds_with_interval)
SPEEDUP = Column("speed-up", "speedup", "speedup_ci95", form=factor_with_interval)
#: The same where something is uncertain.
IN_RANGES = (
    Column("step time", "step_s", "step_s_lo", "step_s_hi", form=partial(in_range, form=format_seconds)),
    Column("speed-up", "speedup", "speedup_lo", "speedup_hi", form=in_range),
)
#: Seconds per step in each state of `simdist.traces.breakdown`.
BOTH = (Column("simulated", "simulated_s", form=format_seconds), Column("measured", "measured_s", form=format_seconds))
STATES = tuple(Column(state, f"{state}_s", form=seconds) for state in breakdown.STATES)
_LINK_COLUMNS = (
    Column("schedule"),
    Column("link"),
    Column("held up", "seconds", form=seconds),
    Column("of a step", "share", form=format_share),
)
