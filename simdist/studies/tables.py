"""Tables for people: columns over the records that `--json` prints, in the units of people."""

import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from shutil import get_terminal_size

import click

from simdist.settings.units import format_seconds
from simdist.studies import facets
from simdist.studies.columns import Column, without_repeated
from simdist.studies.facets import Told

_WIDTH = 200  # of what is no terminal
_MIN_WORDS = 20  # columns for a column of words that folds
_MIN_SENTENCE = 100  # columns for the title and the sentence of a narrow table


def table_text(title: str, columns: Sequence[Column], records: Iterable[Mapping[str, object]]) -> str:
    """Return a table as text, with a title above it and a line for each record.

    A column that has one value in all rows is left out; a sentence below the table has the value. Words in the last
    column fold into as many lines as it takes; nothing else is ever cut.
    """
    records = list(records)
    columns, repeated = without_repeated(columns, records)
    rows = [[column.heading for column in columns]]
    rows += ([column.cell(record) for column in columns] for record in records)
    on_terminal = sys.stdout.isatty()
    of_terminal = get_terminal_size().columns if on_terminal else _WIDTH
    widths = [max(map(_width, cells)) for cells in zip(*rows, strict=True)]
    if columns[-1].is_words:
        left = of_terminal - sum(widths[:-1]) - 2 * len(columns) - 1
        widths[-1] = min(widths[-1], max(left, _MIN_WORDS))
    heading, *others = [line for row in rows for line in _lines(row, columns, widths)]
    rule = " " + "─" * (sum(widths) + 2 * len(columns) - 1)
    length = max(len(rule), min(_MIN_SENTENCE, of_terminal))
    titles = [line.strip() for line in _folded(title, length)]
    if on_terminal:
        titles = [click.style(line, bold=True) for line in titles]
        heading = click.style(heading, bold=True)
    below = ["", *_folded(repeated, length)] if repeated else []
    return "\n".join([*titles, "", heading, rule, *others, *below])


def facets_text(rows: Sequence[Told], base: Told) -> list[str]:
    """Return the tables of facets as text; `base` is the baseline among the schedules."""
    return [table_text(each.title, each.columns, each.records) for each in facets.tables(rows, base)]


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


#: Simulated and measured seconds.
BOTH = (Column("simulated", "simulated_s", form=format_seconds), Column("measured", "measured_s", form=format_seconds))
