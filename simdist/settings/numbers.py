"""Numbers in files of other programs: text in, a number within bounds out.

Python reads `nan`, `-5` and `1e300` as numbers. In a table of times, sizes or ranks they are damage, or another column.
"""

import re

from simdist.settings.base import shown

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,19}", re.ASCII)


def read_number(text: str, least: float, most: float) -> float:
    """Return a finite number from `least` to `most`; ValueError tells the value and the bounds.

    >>> read_number("12.50", 0, 100)
    12.5
    >>> read_number("nan", 0, 100)
    Traceback (most recent call last):
    ValueError: 'nan': write a number from 0 to 100
    """
    number = float(text) if _NUMBER.fullmatch(text.strip()) else None
    if number is None or not least <= number <= most:
        raise ValueError(f"{shown(text)}: write a number from {least:g} to {most:g}")
    return number


def read_whole(text: str, least: int, most: int) -> int:
    """Return a whole number from `least` to `most`; ValueError tells the value and the bounds.

    >>> read_whole("8", 1, 1000)
    8
    """
    number = int(text) if _WHOLE.fullmatch(text.strip()) else None
    if number is None or not least <= number <= most:
        raise ValueError(f"{shown(text)}: write a whole number from {least} to {most}")
    return number
