"""Text with a unit in, SI numbers out: "25 Gbit/s" is 3.125e9 bytes per second.

Inside, everything is in seconds, bytes and FLOP/s, and a name ends in its unit. People write the unit beside the value;
this module is the only place that reads or prints one. SI prefixes are decimal (1 GB = 1e9 B), `Ki`, `Mi`, `Gi`, `Ti`
binary, `B` bytes, `bit` bits. Values are converted in decimal, so "55 ms" is the double nearest to 0.055.

>>> parse_Bps("25 Gbit/s"), parse_seconds("55 ms"), parse_nbytes("1 MiB")
(3125000000.0, 0.055, 1048576)
>>> parse_Bps("25 GBps")
Traceback (most recent call last):
ValueError: '25 GBps': 'GBps' is no unit of bandwidth: write 25 GB/s

In a file the keys carry no unit, so a value must: `latency: 5 us`. In Python the name carries it, so a plain number is
SI: `Link(latency_s=5e-6)`. The validation context tells them apart: `FromFile` for a file, None for Python.
"""

import decimal
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, ValidationInfo

from simdist.errors import ScenarioError
from simdist.settings.base import FromFile, shown

_End = TypeVar("_End", int, float)
_ValueT = TypeVar("_ValueT")
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_NUMBER_AND_UNIT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)", re.ASCII | re.DOTALL)


def _scaled(unit: str, prefixes: Mapping[str, int], scale: Decimal = Decimal(1)) -> dict[str, Decimal]:
    return {prefix + unit: factor * scale for prefix, factor in prefixes.items()}


@dataclass(frozen=True, slots=True)
class _Dimension:
    """A kind of quantity: its name with article, a correct example, and its units in SI."""

    noun: str
    example: str
    units: Mapping[str, Decimal]

    def __str__(self) -> str:
        return f"a {self.noun}"


_MOST_READABLE = 10_000  # of a unit
_LEAST_S = 1e-13  # less is what rounding leaves of a difference
_MOST_WHOLE = 10**9  # of the ends of a range
_MOST_STEPS = 10**15
_MOST_TRAINED_S = 1e12
_MOST_PER_S = 1e9
_ROUNDING_SHARE = 0.0005  # prints as 0.0 %
_BIT = Decimal("0.125")
_SECONDS_PREFIXES = {"": "1", "m": "1e-3", "u": "1e-6", "\N{MICRO SIGN}": "1e-6", "n": "1e-9"}
_SECONDS = {f"{prefix}s": Decimal(factor) for prefix, factor in _SECONDS_PREFIXES.items()}
_DAY_S = Decimal(86_400)
_CLOCK = {"min": Decimal(60), "h": Decimal(3600), "day": _DAY_S, "days": _DAY_S}
_TIME = _Dimension("time", "55 ms", _SECONDS | _CLOCK)
_YEAR_S = 365 * _DAY_S  # 8,760 h, as in annualized failure rates
#: Units of people: name, seconds, and from how many on.
_CALENDAR = (("years", float(_YEAR_S), 3.0), ("days", 86_400.0, 3.0), ("h", 3600.0, 1.0), ("min", 60.0, 2.0))
_PERIODS = _SECONDS | _CLOCK | {"year": _YEAR_S, "years": _YEAR_S}
_RATE = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(%?)\s*per\s+(?:((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*)?(\S+)",
    re.ASCII,
)
_SIZE = _Dimension("size", "45 MB", _scaled("B", _PREFIXES | _BINARY_PREFIXES))
_BITS = _Dimension("number of bits", "8 Mbit", _scaled("bit", _PREFIXES, _BIT))
_BANDWIDTH = _Dimension(
    "bandwidth", "25 Gbit/s", _scaled("bit/s", _PREFIXES, _BIT) | _scaled("B/s", _PREFIXES | _BINARY_PREFIXES)
)
_COMPUTE = _Dimension("computing speed", "125 TFLOP/s", _scaled("FLOP/s", _PREFIXES))
_DIMENSIONS = (_TIME, _SIZE, _BITS, _BANDWIDTH, _COMPUTE)
_MINUTES_AND_HOURS = {"minute": "min", "m": "min", "hour": "h", "d": "days"}
_TIME_WORDS = {"second": "s", "sec": "s", "msec": "ms", "usec": "us", "nsec": "ns"} | _MINUTES_AND_HOURS


def parse_seconds(value: object) -> float:
    """Return the seconds of a time such as "55 ms"; ValueError tells the right form."""
    return _quantity(value, _TIME)


def parse_nbytes(value: object) -> int:
    """Return the bytes of a size such as "45 MB" or "1 MiB"; ValueError tells the right form."""
    nbytes = _quantity(value, _SIZE)
    if not nbytes.is_integer():
        raise ValueError(f"{shown(value)} is not a whole number of bytes: write e.g. {_SIZE.example}")
    return int(nbytes)


def parse_Bps(value: object) -> float:
    """Return the bytes per second of "25 Gbit/s", or infinity of "unlimited"; ValueError tells the right form."""
    return math.inf if value == "unlimited" else _quantity(value, _BANDWIDTH)


def parse_flops(value: object) -> float:
    """Return the operations per second of a speed such as "125 TFLOP/s"; ValueError tells the right form."""
    return _quantity(value, _COMPUTE)


def parse_fraction(value: object) -> float:
    """Return a number in [0, 1] written as 0.02 or "2%"; ValueError tells the right form."""
    match value:
        case str() if match_ := _NUMBER_AND_UNIT.fullmatch(value.strip()):
            number, unit = match_.groups()
            if unit not in ("", "%"):
                raise ValueError(f"{shown(value)}: {unit!r} is no unit of a fraction: write e.g. 2% or 0.02")
            fraction = _decimal(value, number, Decimal("0.01") if unit else Decimal(1))
        case int() | float() if not isinstance(value, bool):
            fraction = _plain(value)
        case _:
            raise ValueError(f"{shown(value)} is not a fraction: write e.g. 2% or 0.02")
    if not 0 <= fraction <= 1:
        raise ValueError(f"{shown(value)} is outside 0 to 1: write e.g. 2% or 0.02")
    return fraction


def parse_factor(value: object) -> float:
    """Return a number above 0; ValueError tells the right form."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shown(value)} is not a number: write a factor above 0, e.g. 1.5")
    factor = _plain(value)
    if not 0 < factor < math.inf:
        raise ValueError(f"{shown(value)} is not a factor: write a finite number above 0, e.g. 1.5")
    return factor


def parse_per_s(value: object) -> float:
    """Return how many per second, above 0, or infinity of "unlimited"; ValueError tells the right form."""
    if value == "unlimited":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shown(value)} is not a number per second: write e.g. 10000, or unlimited")
    rate = _plain(value)
    if not rate > 0:
        raise ValueError(f"{shown(value)} per second: write a number above 0, e.g. 10000, or unlimited")
    return rate


def parse_rate(value: object) -> float:
    """Return how often something happens, per second, of "17 % per year" or "1 per 3.09 h"; a year has 8,760 h.

    Raises:
        ValueError: It is none; the message tells the right form.

    >>> parse_rate("1 per 2 h") * 7200, parse_rate("50 % per year") * 365 * 86_400
    (1.0, 0.5)
    """
    if isinstance(value, int | float) and value == 0:
        return 0.0
    example = "write e.g. 17 % per year, or 1 per 3.09 h"
    parts = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if parts is None:
        raise ValueError(f"{shown(value)} is not a rate: {example}")
    number, percent, count, period = parts.groups()
    if period not in _PERIODS:
        raise ValueError(f"{shown(value)}: {period!r} is no period: write per year, days, h, min or s")
    length_s = Decimal(count or 1) * _PERIODS[period]
    if not length_s:
        raise ValueError(f"{shown(value)}: the period is 0: {example}")
    context = decimal.Context(prec=60, traps=[])
    rate = _decimal(value, number, context.divide(Decimal("0.01") if percent else Decimal(1), length_s))
    if rate < 0:
        raise ValueError(f"{shown(value)} is negative: {example}")
    if rate > _MOST_PER_S:
        raise ValueError(f"{shown(value)}: write {_MOST_PER_S:,.0f} per s or less")
    return rate


def parse_whole(value: object) -> int:
    """Return a whole number, 1e3 included; ValueError for text, truth values and parts."""
    match value:
        case int() if not isinstance(value, bool):
            return value
        case float() if value.is_integer():
            return int(value)
        case _:
            raise ValueError(f"{shown(value)} is not a whole number: write e.g. 8")


def read_number(text: str, least: float, most: float) -> float:
    """Return a number of a table of another program, from `least` to `most`; ValueError tells value and bounds.

    Python reads `nan`, `-5` and `1e300` as numbers. In a column of times or sizes they are damage, or another column.

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
    """Return a whole number of a table of another program, with the arguments and errors of `read_number`.

    >>> read_whole("8", 1, 1000)
    8
    """
    number = int(text) if _WHOLE.fullmatch(text.strip()) else None
    if number is None or not least <= number <= most:
        raise ValueError(f"{shown(text)}: write a whole number from {least} to {most}")
    return number


def parse_whole_or(*words: str) -> Callable[[object], object]:
    """Return what reads a whole number or one of some words; ValueError tells both."""

    def parse(value: object) -> object:
        if isinstance(value, str) and value not in words:
            raise ValueError(f"{shown(value)}: write a whole number, or {' or '.join(words)}")
        return value if value in words else parse_whole(value)

    return parse


@dataclass(frozen=True, slots=True)
class Elapsed:
    """A time of training."""

    seconds: float


class EpochSteps(int):
    """Steps of so many epochs of a data set. They are counted again if other settings of the scenario change."""

    n_epochs: int

    @classmethod
    def of(cls, n_epochs: int, *, steps_per_epoch: int) -> "EpochSteps":
        """Return the steps of some epochs."""
        steps = cls(n_epochs * steps_per_epoch)
        steps.n_epochs = n_epochs
        return steps


def _read_steps_or_time(value: object) -> int | Elapsed:
    """Read a number of steps, or a time."""
    if isinstance(value, Elapsed):
        return value
    words = value.split() if isinstance(value, str) else []
    if len(words) == 2 and words[1] in ("step", "steps"):
        return _read_steps(words[0])
    if isinstance(value, str):
        seconds = parse_seconds(value)
        if not seconds:
            raise ValueError(f"{shown(value)}: write a time above 0 s, e.g. 30 min, or a number of steps")
        if seconds > _MOST_TRAINED_S:
            raise ValueError(f"{shown(value)}: write {_MOST_TRAINED_S:,.0f} s or less")
        return Elapsed(seconds)
    return _read_steps(value)


def _read_steps(value: object) -> int:
    steps = int(value) if isinstance(value, str) and value.isdecimal() else parse_whole(value)
    if steps < 1:
        raise ValueError(f"{steps}: write at least 1")
    if steps > _MOST_STEPS:
        raise ValueError(f"{shown(value)}: write {_MOST_STEPS:,} steps or less")
    return steps


def _written_steps_or_time(value: int | Elapsed) -> int | str:
    return f"{value.seconds!r} s" if isinstance(value, Elapsed) else int(value)


#: A number of steps, or a time.
StepsOrTime: TypeAlias = Annotated[
    int | Elapsed, PlainValidator(_read_steps_or_time), PlainSerializer(_written_steps_or_time, when_used="json")
]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit as it stands behind a number in a file; none if the file has plain numbers.

    Args:
        text: Such as ` Gbit/s`, with the space before it if there is one.
        size: In SI units.
    """

    text: str = ""
    size: Decimal = Decimal(1)

    def count(self, number: float) -> float:
        """Return how many of this unit a number in SI units is."""
        return float(Decimal(repr(number)) / self.size)

    def number(self, count: float) -> float:
        """Return what so many of this unit are in SI units."""
        return float(Decimal(repr(count)) * self.size)

    def written(self, count: float) -> str | float:
        """Write so many of this unit as a file has them."""
        return f"{Decimal(repr(count)).normalize():f}{self.text}" if self.text else count


#: No unit: plain numbers, in SI units.
SI = Unit()


def unit_of(value: object) -> Unit:
    """Return the unit that a value of a file is written in.

    >>> unit_of("25 Gbit/s").count(1.03125e9), unit_of("25 Gbit/s").written(8.25), unit_of("2%").written(0.9)
    (8.25, '8.25 Gbit/s', '0.9%')
    """
    parts = _NUMBER_AND_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if parts is None or not parts[2]:
        return SI
    known = {"%": Decimal("0.01")} | {unit: size for each in _DIMENSIONS for unit, size in each.units.items()}
    return Unit(parts[0][parts.end(1) :], known[parts[2]]) if parts[2] in known else SI


def format_like(written: object, number: float, form: Callable[[float], str]) -> str:
    """Print a number in the unit of a value in a file, if that is readable; else in bits if that is, or as `form` does.

    >>> format_like("2 Gbit/s", 486e6, format_Bps), format_like("250 MB/s", 486e6, format_Bps)
    ('3.89 Gbit/s', '486 MB/s')
    >>> format_like(None, 486e6, format_Bps), format_like("2 Gbit/s", 4e6, format_Bps)
    ('486 MB/s', '32 Mbit/s')
    """
    unit = unit_of(written)
    if not unit.text or not math.isfinite(number):
        return form(number)
    count = float(f"{unit.count(number):.3g}")
    if 1 <= count < _MOST_READABLE:
        return f"{count:,g}{unit.text}"
    bits = {"Tbit/s": 1e12, "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3, "bit/s": 1.0}
    return _format(8 * number, "bit/s", bits, 3) if unit.text.endswith("bit/s") else form(number)


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Print a time for people.

    >>> format_seconds(0.0554321), format_seconds(12e-6), format_seconds(90), format_seconds(999.6e-6)
    ('55.4 ms', '12 us', '90 s', '1 ms')
    """
    seconds = 0.0 if abs(seconds) < _LEAST_S else seconds
    return _format(seconds, "s", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, digits)


def format_duration(seconds: float, digits: int = 3) -> str:
    """Print a time for people in the unit of clocks and calendars that suits it.

    >>> format_duration(0.5), format_duration(1800), format_duration(43_200), format_duration(900_000)
    ('500 ms', '30 min', '12 h', '10.4 days')
    >>> format_duration(1e9), format_duration(1e12)
    ('31.7 years', '31,710 years')
    """
    for name, length_s, least in _CALENDAR:
        if least * length_s <= seconds < math.inf:
            number = seconds / length_s
            return f"{number:,.0f} {name}" if number >= 10**digits else f"{number:.{digits}g} {name}"
    return format_seconds(seconds, digits)


def in_range(center: float, low: float, high: float, *, form: Callable[[float], str] = "{:.2f}".format) -> str:
    """Print a number and, if they differ, the ends of its interval.

    >>> in_range(1.36, 1.312, 1.384), in_range(1.0, 1.0, 1.0), in_range(0.2, 0.18, 0.23, form=format_seconds)
    ('1.36 (1.31-1.38)', '1.00', '200 ms (180 ms-230 ms)')
    """
    return form(center) + (f" ({form(low)}-{form(high)})" if low < high else "")


def format_nbytes(nbytes: float, digits: int = 3) -> str:
    """Print a size for people.

    >>> format_nbytes(44_700_000), format_nbytes(512)
    ('44.7 MB', '512 B')
    """
    return _format(nbytes, "B", {"PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}, digits)


def format_Bps(Bps: float, digits: int = 3) -> str:
    """Print a bandwidth for people, in bytes.

    >>> format_Bps(3.125e9), format_Bps(math.inf)
    ('3.12 GB/s', 'unlimited')
    """
    return "unlimited" if Bps == math.inf else f"{format_nbytes(Bps, digits)}/s"


def format_flops(flops: float, digits: int = 3) -> str:
    """Print an amount of arithmetic for people.

    >>> format_flops(8_178_000_000), format_flops(0)
    ('8.18 GFLOP', '0 FLOP')
    """
    scales = {"PFLOP": 1e15, "TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "kFLOP": 1e3, "FLOP": 1.0}
    return _format(flops, "FLOP", scales, digits)


def format_share(share: float, *, signed: bool = False) -> str:
    """Print a share, or an error, which is signed.

    >>> format_share(0.0213), format_share(-1e-9), format_share(0.5, signed=True), format_share(float("nan"))
    ('2.1 %', '0 %', '+50.0 %', '-')
    """
    if math.isnan(share):
        return "-"
    return f"{100 * share:{'+' if signed else ''}.1f} %" if abs(share) >= _ROUNDING_SHARE else "0 %"


def format_error(error: float) -> str:
    """Print a relative error, with its sign: see `format_share`."""
    return format_share(error, signed=True)


def _quantity(value: object, dimension: _Dimension) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value == 0:
            return 0.0
        raise ValueError(f"{shown(value)}: {dimension} needs a unit: write e.g. {dimension.example}")
    parts = _NUMBER_AND_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if parts is None:
        raise ValueError(f"{shown(value)} is not {dimension}: write e.g. {dimension.example}")
    number, unit = parts.groups()
    if unit not in dimension.units and not (unit == "" and float(number) == 0):
        raise ValueError(f"{shown(value)}: {_unit_fault(number, unit, dimension)}")
    quantity = _decimal(value, number, dimension.units.get(unit, Decimal(1)))
    if quantity < 0:
        raise ValueError(f"{shown(value)} is negative: write e.g. {dimension.example}")
    return quantity


def _decimal(value: object, number: str, scale: Decimal) -> float:
    context = decimal.Context(prec=60, traps=[])  # no traps: overflow gives infinity
    result = float(context.multiply(context.create_decimal(number), scale))
    if not math.isfinite(result):
        raise ValueError(f"{shown(value)} is too large a number")
    return result


def _plain(value: int | float) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{shown(value)} is too large a number") from None
    if math.isnan(number):
        raise ValueError("nan is not a number: write a finite one")
    return number


def _unit_fault(number: str, unit: str, dimension: _Dimension) -> str:
    if not unit:
        return f"{dimension} needs a unit: write e.g. {dimension.example}"
    if dimension is _SIZE and unit in _BITS.units:
        return f"sizes are in bytes, not bits: write e.g. {float(Decimal(number) / 8):g} {unit.replace('bit', 'B')}"
    for other in _DIMENSIONS:
        if unit in other.units and dimension.units.keys().isdisjoint(_meant(unit, dimension)):
            return f"that is {other}, not {dimension}: write e.g. {dimension.example}"
    meant = _meant(unit, dimension)
    hint = " or ".join(f"{number} {candidate}" for candidate in meant) if meant else f"e.g. {dimension.example}"
    return f"{unit!r} is no unit of {dimension.noun}: write {hint}"


def _meant(unit: str, dimension: _Dimension) -> list[str]:
    """Return the units that a wrong spelling may stand for: "Gbps" is "Gbit/s", "gbps" that or "GB/s"."""
    if dimension is _TIME:
        return [word for word in [_TIME_WORDS.get(unit.lower().removesuffix("s"))] if word]
    wrong = {known: _misspellings(known) for known in dimension.units}
    exact = [known for known, spellings in wrong.items() if unit in spellings]
    return exact or [known for known, spellings in wrong.items() if unit.lower() in map(str.lower, spellings)]


def _misspellings(unit: str) -> set[str]:
    wrong = (("k", "K"), ("bit", "b"), ("bit", "bits"), ("FLOP/s", "FLOPS"))
    words = {unit} | {unit.replace(right, spelt) for right, spelt in wrong}
    return words | {word.replace("/s", end) for word in words for end in ("ps", "/sec", "")}


def _format(value: float, base: str, units: Mapping[str, float], digits: int) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f} {base}"
    rounded = float(f"{value:.{digits}g}")  # 999.6 us are 1 ms with three digits, not 1000 us
    unit = next((unit for unit, scale in units.items() if abs(rounded) >= scale), list(units)[-1])
    scaled = value / units[unit]
    whole = scaled.is_integer() or abs(scaled) >= 10**digits
    return f"{scaled:.0f} {unit}" if whole else f"{float(f'{scaled:.{digits}g}'):g} {unit}"


def _validator(parse: Callable[[object], float]) -> Callable[[object, ValidationInfo], float]:
    """Read text as `parse` does; from Python also take plain SI numbers."""

    def validate(value: object, info: ValidationInfo) -> float:
        if isinstance(info.context, FromFile) or isinstance(value, bool) or not isinstance(value, int | float):
            return parse(value)
        if not value >= 0 or (value == math.inf and parse is not parse_Bps):
            raise ValueError(f"{shown(value)}: write a finite number, 0 or more")
        return value

    return validate


def _above_0(value: float) -> float:
    if value == 0:
        raise ValueError("0 would never finish: write a value above 0, or leave the key out")
    return value


def _writer(parse: Callable[[object], float], dimension: _Dimension, *units: str) -> Callable[[float], str]:
    """Return a function that writes the shortest text, in one of `units`, that `parse` reads back as the number."""

    def text(value: float) -> str:
        if value == math.inf:
            return "unlimited"
        exact = Decimal(repr(value))
        candidates = [f"{(exact / dimension.units[unit]).normalize():f} {unit}" for unit in units]
        faithful = [candidate for candidate in candidates if len(candidate) < 40 and parse(candidate) == value]
        return min([*faithful, f"{value!r} {units[0]}"], key=len)

    return text


def _written(parse: Callable[[object], float], dimension: _Dimension, *units: str) -> PlainSerializer:
    return PlainSerializer(_writer(parse, dimension, *units), when_used="json-unless-none")


def _rate_written(rate_per_s: float) -> str:
    """Return the shortest text that reads back as a rate."""
    per_year = rate_per_s * float(_YEAR_S)
    candidates = [f"{100 * per_year:.12g} % per year", f"{per_year:.12g} per year"]
    faithful = [each for each in candidates if parse_rate(each) == rate_per_s]
    return min(faithful, key=len, default=f"{rate_per_s!r} per s")


def _ends_of(
    read: Callable[[object, ValidationInfo], _End], example: str
) -> Callable[[object, ValidationInfo], tuple[_End, _End]]:
    """Read one value, or a list of the least and the most."""

    def validate(value: object, info: ValidationInfo) -> tuple[_End, _End]:
        if not isinstance(value, list | tuple):
            end = read(value, info)
            return end, end
        if len(value) != 2:
            raise ValueError(f"{shown(value)}: write one value, or the least and the most, e.g. {example}")
        low = read(value[0], info)
        high = read(value[1], info)
        if low > high:
            raise ValueError(f"{shown(value)}: the least comes first: write e.g. {example}")
        return low, high

    return validate


def _whole_end(value: object, _: ValidationInfo) -> int:
    number = parse_whole(value)
    if not 0 <= number <= _MOST_WHOLE:
        raise ValueError(f"{shown(value)}: write a whole number from 0 to {_MOST_WHOLE}")
    return number


def _ends_written(write: Callable[[_End], object]) -> PlainSerializer:
    """Write one value if both ends are the same."""

    def written(ends: tuple[_End, _End]) -> object:
        low, high = ends
        return write(low) if low == high else [write(low), write(high)]

    return PlainSerializer(written, when_used="json-unless-none")


Seconds: TypeAlias = Annotated[
    float,
    BeforeValidator(_validator(parse_seconds)),
    _written(parse_seconds, _TIME, "s", "ms", "us"),
    Field(examples=["55 ms"]),
]
Nbytes: TypeAlias = Annotated[
    int,
    BeforeValidator(_validator(parse_nbytes)),
    _written(parse_nbytes, _SIZE, "B", "kB", "MB", "GB"),
    Field(examples=["45 MB"]),
]
BytesPerSecond: TypeAlias = Annotated[
    float,
    BeforeValidator(_validator(parse_Bps)),
    AfterValidator(_above_0),
    _written(parse_Bps, _BANDWIDTH, "B/s", "Gbit/s", "GB/s", "MB/s"),
    Field(examples=["25 Gbit/s"]),
]
FlopsPerSecond: TypeAlias = Annotated[
    float,
    BeforeValidator(_validator(parse_flops)),
    AfterValidator(_above_0),
    _written(parse_flops, _COMPUTE, "FLOP/s", "GFLOP/s", "TFLOP/s"),
    Field(examples=["125 TFLOP/s"]),
]
Fraction: TypeAlias = Annotated[float, BeforeValidator(parse_fraction), Field(examples=["2%"])]
Factor: TypeAlias = Annotated[float, BeforeValidator(parse_factor), Field(examples=[1.5])]
PerSecond: TypeAlias = Annotated[
    float,
    BeforeValidator(parse_per_s),
    PlainSerializer(lambda rate: "unlimited" if rate == math.inf else rate, when_used="json-unless-none"),
    Field(examples=[10000]),
]
#: How often something happens, 0 or more.
RatePerSecond: TypeAlias = Annotated[
    float,
    BeforeValidator(_validator(parse_rate)),
    PlainSerializer(_rate_written, when_used="json-unless-none"),
    Field(examples=["17 % per year"]),
]
Whole: TypeAlias = Annotated[int, BeforeValidator(parse_whole), Field(examples=[8])]
#: The least and the most seconds; a file has one time or a list of both.
SecondsRange: TypeAlias = Annotated[
    tuple[float, float],
    BeforeValidator(_ends_of(_validator(parse_seconds), "[1 s, 2 s]")),
    _ends_written(_writer(parse_seconds, _TIME, "s", "ms", "us")),
    Field(examples=["1.2 s"]),
]
#: The least and the most of whole numbers, 0 or more; a file has one number or a list of both.
WholeRange: TypeAlias = Annotated[
    tuple[int, int],
    BeforeValidator(_ends_of(_whole_end, "[250, 270]")),
    _ends_written(lambda number: number),
    Field(examples=[250]),
]


def parse_option(option: str, text: str, parse: Callable[[object], _ValueT]) -> _ValueT:
    """Return the value of an option of a command.

    Raises:
        ScenarioError: `parse` refuses it.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ScenarioError(f"{option}: {error}") from None
