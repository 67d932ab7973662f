"""What options of several commands are called and take; arguments that are written in a form of their own."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from simdist.cli.session import Session

ENGINES = ("auto", "des", "fast")
TRACES = ("simulated", "real")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _set_json(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.ensure_object(Session).as_json = value


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.ensure_object(Session).debug = value


def options(function: _Function) -> _Function:
    """Add the options that every command has."""
    as_json = click.option("--json", is_flag=True, expose_value=False, callback=_set_json, help="Print JSON on stdout.")
    debug = click.option(
        "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show the traceback of an error."
    )
    return as_json(debug(function))


def slice_of_steps(_: click.Context, __: click.Parameter, value: str | None) -> range | None:
    """Read `A:B`, steps A to B - 1; either may be left out."""
    if value is None:
        return None
    first, colon, stop = value.partition(":")
    if not colon or not (first + stop).isdigit() or not (first or "0").isdigit() or not (stop or "0").isdigit():
        raise click.BadParameter(f"{value!r}: write A:B for the steps A to B - 1, e.g. 0:10")
    return range(int(first or 0), int(stop) if stop else sys.maxsize)


def numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read `0,3,8-11`."""
    if value is None:
        return None
    numbers: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(first + last) > 14:
            raise click.BadParameter(f"{value!r}: write ranks and ranges of ranks, e.g. 0,3,8-11")
        numbers.extend(range(int(first), min(int(last), int(first) + 2**20) + 1) if dash else [int(first)])
    return tuple(dict.fromkeys(numbers))


path = click.Path(path_type=Path)
scenario = click.argument("scenario")
schedule = click.option("--schedule", metavar="LABEL", help="Take only the schedule with this label.")
engine = click.option(
    "--engine", type=click.Choice(ENGINES), default="auto", show_default=True, help="auto: fast where it is exact."
)
plot = click.option("--plot", type=path, metavar="FILE", help="Draw into a .png, .svg or .pdf file.")
force = click.option("--force", is_flag=True, help="Replace what another run left there, its traces included.")
