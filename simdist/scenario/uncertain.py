"""Ranges of quantities that nobody measured, and what is wrong with one."""

import math
from collections.abc import Iterator, Mapping

from pydantic import Field

from simdist.scenario.strict_yaml import path_text
from simdist.settings.base import Fault, Settings, refuse, shown

_CHOSEN = ("schedules", "steps", "seed", "imported", "uncertain", "table")  # keys of what no measurement would tell


class Range(Settings):
    """Range of a quantity that was not measured: any value in it is as likely as any other.

    Args:
        from_: Its lower end, as the quantity is written in a file: `40%`, `20 us`.
        to: Its upper end.
        source: Where the ends are from.
        measure: Which measurement would tell the value.
    """

    from_: int | float | str = Field(alias="from")
    to: int | float | str
    source: str = ""
    measure: str = ""


def check_ranges(settings: Settings, ranges: Mapping[str, Range]) -> None:
    """Refuse ranges of what is no number of some settings.

    Args:
        settings: A cluster, or a scenario, otherwise valid.
        ranges: Its `uncertain`, by path.

    Raises:
        ValidationError: A path leads to no number that could be measured, or a range is none of it.
    """
    faults: list[Fault] = []
    for text, each in ranges.items():
        try:
            faults += [(("uncertain", text, *below), message) for below, message in _faults(settings, text, each)]
        except ValueError as error:
            faults.append((("uncertain", text), str(error)))
    refuse("uncertain", faults)


def _faults(settings: Settings, text: str, written: Range) -> Iterator[Fault]:
    from simdist.scenario.fields import find_field, parse_path, value_at

    path = parse_path(text)
    field = find_field(settings, path)
    if not field.is_number or field.is_whole or not {*path}.isdisjoint(_CHOSEN):
        yield (), "is not a measured number: write ranges of times, rates and shares, such as network.efficiency"
        return
    if getattr(value_at(settings, path[:-1]), "table", None) is not None:
        yield (), f"{path_text(path[:-1])} is a table of measured points, in which {path[-1]} means nothing: remove one"
        return
    ends: list[float] = []
    for key, end in (("from", written.from_), ("to", written.to)):
        try:
            ends.append(float(str(field.number(end))))
        except ValueError as error:
            yield (key,), str(error)
        else:
            if not math.isfinite(ends[-1]):
                yield (key,), f"{shown(end)}: write a finite value"
    stated = value_at(settings, path)
    if len(ends) < 2 or not all(map(math.isfinite, ends)):
        return
    if ends[0] >= ends[1]:
        yield ("to",), f"{shown(written.to)} is not above from, {shown(written.from_)}: write the larger one as to"
    elif not isinstance(stated, int | float):
        yield (), "is not stated: write it, too, for the numbers that are computed with one value"
    elif not ends[0] <= stated <= ends[1]:
        value = shown(field.text(stated))
        yield (), f"{path_text(path)} is {value}, outside {shown(written.from_)} to {shown(written.to)}: change one"
