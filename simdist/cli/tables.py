"""Tables for people, in the units of people."""

import io
import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simdist.settings.units import format_seconds

_ROUNDING_S = 1e-12  # shorter than anything that is simulated
_ROUNDING = 1e-9
_MOST_DIGITS = 5  # of a factor, behind the point
_WIDTH = 200  # of what is no terminal
_MIN_WORDS = 20  # columns for a column of words that folds


def table_text(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str]) -> str:
    """Return a table as text.

    Args:
        title: Stands above it.
        header: Of each column.
        rows: Cells.
        words: Headers of columns that are words, aligned to the left; the others are numbers, aligned to the right.
    """
    folds = header[-1] in words  # into as many lines as it takes; numbers are never cut
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in header:
        justify: Literal["left", "right"] = "left" if name in words else "right"
        table.add_column(name, justify=justify, no_wrap=not folds or name != header[-1], overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    on_terminal = sys.stdout.isatty()
    columns = list(zip(header, *rows, strict=True))
    needed = sum(max(map(len, column)) + 2 for column in columns[: len(columns) - folds]) + 2 + folds * _MIN_WORDS
    width = max(needed, get_terminal_size().columns if on_terminal else _WIDTH)
    text = io.StringIO()
    console = Console(file=text, force_terminal=on_terminal, width=width, height=len(rows) + 9)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")


def seconds_with_interval(center_s: float, interval_s: tuple[float, float] | None) -> str:
    """Print a time and, if there is one, its interval.

    >>> seconds_with_interval(0.0835, (0.082, 0.085)), seconds_with_interval(0.0835, (0.0835, 0.0835))
    ('83.5 ms ± 1.5 ms', '83.5 ms')
    """
    half_s = _half(interval_s) if interval_s else 0.0
    return format_seconds(center_s) + (f" ± {format_seconds(half_s, 2)}" if half_s > _ROUNDING_S else "")


def seconds_in_state(seconds: float) -> str:
    """Print a time, without what is left of 0 when floating-point numbers are summed.

    >>> seconds_in_state(1.8e-17), seconds_in_state(2e-3)
    ('0 s', '2 ms')
    """
    return format_seconds(seconds if seconds > _ROUNDING_S else 0.0)


def factor_with_interval(center: float, interval: tuple[float, float] | None) -> str:
    """Print a speed-up and, if there is one, its interval.

    >>> factor_with_interval(1.36, (1.34, 1.38)), factor_with_interval(1.117, (1.113, 1.121))
    ('1.36 ± 0.02', '1.117 ± 0.004')
    """
    half = _half_of(center, interval)
    return _with_digits(center, half, _digits(half))


def lead_with_interval(center: float, interval: tuple[float, float] | None) -> str:
    """Print a factor near 1 with as many digits as tell on which side of 1 its interval lies.

    >>> lead_with_interval(1.0143, (1.0005, 1.0281)), lead_with_interval(1.025, (1.0248, 1.0252))
    ('1.0143 ± 0.0138', '1.0250 ± 0.0002')
    >>> lead_with_interval(1.09, (1.08, 1.1)), lead_with_interval(1.0004, None), lead_with_interval(1.0, None)
    ('1.09 ± 0.01', '1.0004', '1.00')
    """
    half = _half_of(center, interval)
    digits = _digits(half)
    while digits < _MOST_DIGITS and not _is_told(center, half, digits):
        digits += 1
    return _with_digits(center, half, digits if _is_told(center, half, digits) else _digits(half))


def _is_told(center: float, half: float, digits: int) -> bool:
    """Tell whether a rounded factor says what it says without rounding."""
    ahead, about = round(abs(center - 1), digits), round(half, digits)
    is_clear = abs(center - 1) > half
    return (about > 0 or half == 0) and (ahead > about) == is_clear


def _half_of(center: float, interval: tuple[float, float] | None) -> float:
    half = _half(interval) if interval else 0.0
    return half if half > _ROUNDING * center else 0.0


def _digits(half: float) -> int:
    return 3 if 0 < half < 0.01 else 2


def _with_digits(center: float, half: float, digits: int) -> str:
    return f"{center:.{digits}f}" + (f" ± {half:.{digits}f}" if half else "")


def _half(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / 2
