"""Common parts of commands: a run of the command line, and the options that several of them take."""

import errno
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import click
from click.core import ParameterSource

from simdist.errors import RunError, ScenarioError
from simdist.progress import ProgressBar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simdist.studies.remarks import Remark

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MISSING = {errno.ENOENT, errno.ENOTDIR}  # a command says itself what it needs
_WRONG = _MISSING | {
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.EEXIST,
    errno.EINVAL,
}
_MOST_SHOWN = 160  # characters of a path


@final
class PrintError(RunError):
    """Stdout or stderr takes no more."""


@contextmanager
def printing() -> Iterator[None]:
    """Tell errors of stdout and stderr from all others.

    Raises:
        PrintError: Something cannot be printed.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has seen enough: click ends the program without a word
    except OSError as error:
        raise PrintError(f"cannot print: {error.strerror or error}") from error


@dataclass
class CliSession:
    """State that the commands share.

    Args:
        as_json: The result is wanted as JSON.
        debug: The traceback of an error is wanted.
        saved: Results that are safe on disk, for the message after an interruption.
        last_bar: Of the work in progress, for the same message.
    """

    as_json: bool = False
    debug: bool = False
    saved: list[str] = field(default_factory=list)
    last_bar: ProgressBar | None = None

    def say(self, message: str) -> None:
        """Tell the person; never part of the result."""
        with printing():
            click.echo(message, err=True)

    def remark(self, name: str, remarks: "Iterable[Remark]") -> None:
        """Tell the person remarks.

        Args:
            name: Of what they are on; may be empty.
            remarks: On it.
        """
        for each in remarks:
            self.say(f"{'warning: ' if each.is_doubt else ''}{name}{': ' if name else ''}{each}")

    def result(self, document: object, text: str) -> None:
        """Print the result, as JSON or as text."""
        if self.as_json:  # which has no number for NaN and infinity
            text = json.dumps(json.loads(json.dumps(document), parse_constant=lambda _: None))
        with printing():
            click.echo(_encodable(text))

    def bar(self, *, line_every_s: float | None = None) -> ProgressBar:
        """Return a bar on stderr; see `ProgressBar`."""
        self.last_bar = ProgressBar(sys.stderr, line_every_s=line_every_s)
        return self.last_bar

    def interrupted(self) -> str:
        """Say what an interruption stopped, and which results are safe; all others are lost."""
        reached = self.last_bar.reached if self.last_bar else ""
        kept = f"saved: {', '.join(self.saved)}" if self.saved else "nothing was saved"
        return f"interrupted{f' at {reached}' if reached else ''}; {kept}"

    def wrote(self, path: object) -> None:
        """Remember and tell that a file or directory was written."""
        self.saved.append(str(path))
        self.say(f"wrote {path}")

    def draw(self, figure: "Figure", path: Path) -> None:
        """Write a picture.

        Raises:
            RunError: It cannot be written.
        """
        from simdist import report

        report.save(figure, path)
        self.wrote(path)


def _encodable(text: str) -> str:
    """Return the text with plain characters for those that stdout has not."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("±", "+-").replace("─", "-").encode(encoding, "replace").decode(encoding)
    return text


def _set(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    session = context.ensure_object(CliSession)
    if parameter.name == "as_json":
        session.as_json = value
    else:
        session.debug = value


def options(function: _Function) -> Callable[..., Any]:
    """Add the options that every command has; the command gets the session as its first argument."""
    flag = partial(click.option, is_flag=True, expose_value=False, callback=_set)
    as_json = flag("--json", "as_json", help="Print JSON on stdout.")
    debug = flag("--debug", help="Show the traceback of an error.")
    return as_json(debug(click.pass_obj(_naming_files(function))))


def _naming_files(function: _Function) -> Callable[..., Any]:
    """Name the file that the operating system refuses, where the command has not done so itself."""

    @wraps(function)
    def named(*given: Any, **options: Any) -> Any:
        try:
            return function(*given, **options)
        except BrokenPipeError:
            raise  # of a reader that has seen enough: no file
        except OSError as error:
            why = error.strerror or str(error)
            if error.filename is None:
                raise RunError(f"the operating system refuses: {why}") from error
            text = f"{_shortened(error.filename)}: {why}"
            if error.errno in _WRONG:
                raise ScenarioError(f"{text}: give another path") from error
            raise RunError(text) from error

    return named


def refuse_beside(chosen: str, *names: str) -> None:
    """Refuse options that were given, but mean nothing beside another one.

    Args:
        chosen: The option, as the user writes it.
        names: Parameters of the current command that do not go with it.

    Raises:
        UsageError: One of them was given.
    """
    for option in _given(names):
        raise click.UsageError(f"{option}: means nothing with {chosen}: leave it out")


def refuse_without(needed: str, *names: str) -> None:
    """Refuse options that were given, but mean nothing without another one; see `refuse_beside`."""
    for option in _given(names):
        raise click.UsageError(f"{option}: means nothing without {needed}: leave it out")


def is_given(name: str) -> bool:
    """Tell whether the user wrote an option of the current command."""
    return bool(_given([name]))


def _given(names: Collection[str]) -> list[str]:
    """Return those of some options that the user wrote, as they are written."""
    context = click.get_current_context()
    return [
        each.opts[-1]
        for each in context.command.params
        if each.name in names and context.get_parameter_source(each.name) == ParameterSource.COMMANDLINE
    ]


def slice_of_steps(_: click.Context, __: click.Parameter, value: str | None) -> range | None:
    """Read `A:B`, steps A to B - 1; either may be left out."""
    if value is None:
        return None
    first, colon, stop = value.partition(":")
    if not colon or not (first + stop).isdigit() or not (first or "0").isdigit() or not (stop or "0").isdigit():
        raise click.BadParameter(f"{value!r}: write A:B for the steps A to B - 1, e.g. 0:10")
    return range(int(first or 0), int(stop) if stop else sys.maxsize)


def _shortened(path: object) -> str:
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def is_file(text: str) -> bool:
    """Tell whether a text that may be something else, such as a list of labels, names a file."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


@final
class PathType(click.Path):
    """The path of a file or folder, which need not exist, or the name of something else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; refuse one that the operating system cannot look up."""
        try:
            os.stat(value)
        except OSError as error:
            if error.errno not in _MISSING:
                self.fail(f"{_shortened(value)!r}: {error.strerror or error}: give another path", param, ctx)
        except ValueError as error:  # it holds a zero byte
            self.fail(f"{_shortened(value)!r}: {error}: give another path", param, ctx)
        return super().convert(value, param, ctx)


path_type = PathType(path_type=Path)
file_name = PathType()
positive = click.IntRange(min=1)
scenario = click.argument("name", type=file_name, metavar="SCENARIO")
scenario_or_run = click.argument("name", type=file_name, metavar="SCENARIO|RUN")
run_argument = click.argument("name", type=file_name, metavar="RUN")
schedule = click.option("--schedule", metavar="LABEL", help="Take only the schedule with this label.")
_traces = click.Choice(("simulated", "real"))
which_trace = click.option("--trace", "which", type=_traces, help="Which trace of a RUN; real if there is one.")
baseline = click.option("--baseline", metavar="LABEL", help="Compare with this one; sync, else the first, if omitted.")
_engines = click.Choice(("auto", "des", "fast"))
engine = click.option("--engine", type=_engines, default="auto", help="auto: fast where it is exact, else des.")
plot_option = click.option("--plot", type=path_type, metavar="FILE", help="Draw into a .png, .svg or .pdf file.")
force = click.option("--force", is_flag=True, help="Replace an existing run, including its traces.")
