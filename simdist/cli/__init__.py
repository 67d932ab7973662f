"""The command line, `simdist`.

A module beside this one is a command: its options, what it does, what it prints. It is imported when it is called, so
that `simdist --help` answers at once.

Results go to stdout, and nothing else does; warnings, progress and errors go to stderr. Exit codes: 0; 1 for a run that
failed; 2 for wrong input, with one message and no traceback (`--debug` shows it); 130 after Ctrl-C.
"""

import gc
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType

import click

from simdist import __version__
from simdist.cli.common import CliSession, PrintError
from simdist.errors import RunError, SimdistError

__all__ = ["cli", "main"]

_COMMANDS = {  # the first sentence of each command's help
    "compare": "Show the speed-ups over a baseline.",
    "goodput": "Show how much of a job's time trains the model under failures.",
    "import": "Turn a profiled job into a scenario.",
    "init": "Write a scenario to begin with.",
    "learn": "Show when a model reaches a target under each schedule.",
    "plan": "Write plans and prove what they compute.",
    "presets": "Show the clusters, workloads, failures and scenarios that ship.",
    "report": "Write one HTML page about runs, a sweep, or learning.",
    "results": "Show the results of sweeps and of runs as one table.",
    "simulate": "Simulate, and show where the time of a step goes.",
    "sweep": "Simulate all points that a SWEEP file describes.",
    "trace": "Convert a trace for viewers, or show its collectives.",
    "tune": "Find the fastest schedule for a scenario, within limits.",
    "validate": "Compare simulation and measurement.",
    "whatif": "Show what stragglers cost, and what would help.",
}
_RETIRED = {  # commands of earlier versions, and where they went; until 1.0
    "chakra": "write `simdist plan SCENARIO --chakra FOLDER` for traces; none are imported any more",
    "calibrate": "write `simdist init --from TABLE` for nccl-tests, `python -m real.calibrate` to measure",
    "comms": "write `simdist trace RUN --collectives`",
    "data": "write `simdist whatif SCENARIO --data`",
    "workload": "write `simdist init --from MODULE:FUNCTION`",
    "limits": "write `simdist compare SCENARIO --tolerable`",
}
_MODULES = {"import": "importing"}  # where a command cannot name one
_ENVIRONMENT = {  # of a process that is a command; what the user has set stays
    "OPENBLAS_NUM_THREADS": "1",  # no command multiplies matrices, so numpy need not start threads for it
    "PYDANTIC_DISABLE_PLUGINS": "__all__",  # so pydantic need not read the metadata of every installed package
}


class _Commands(click.Group):
    """Imports the module of a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _RETIRED:
            raise click.UsageError(f"{cmd_name} is no longer a command: {_RETIRED[cmd_name]}", ctx)
        if cmd_name not in _COMMANDS:
            return None
        name = f"simdist.cli.{_MODULES.get(cmd_name, cmd_name)}"
        command: click.Command = (_imported(name) if name not in sys.modules else sys.modules[name]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def _imported(name: str) -> ModuleType:
    """Import a module. All that this makes stays, so that no collection need look at it, then or later."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        args: Without the program's name; those of the process if None.

    >>> main(["--version"])
    simdist 0.1.0
    0
    """
    session = CliSession()
    if args is None:
        os.environ.update(_ENVIRONMENT | os.environ)
    if sys.stdout is None:  # closed before the start, as `>&-` does
        return _failed(session, RunError("cannot print: stdout is closed; send it to a file, or to /dev/null"), 1)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: session.say(f"warning: {message}")
            code = cli.main(args, prog_name="simdist", standalone_mode=False, obj=session)
    except click.Abort as error:
        if isinstance(error.__cause__, EOFError):  # click takes it for a prompt without an answer; `init` raises none
            raise error.__cause__ from None
        session.say(session.interrupted())
        return 130
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"; see {context.command_path} --help" if context else ""
        said = error.format_message().rstrip(".")
        said = said.replace("a valid integer range", "a whole number").replace("a valid float range", "a number")
        session.say(f"error: {said}{_meant(error)}{hint}")
        return error.exit_code
    except (PrintError, OSError) as error:  # the latter of click's own help: commands tell all others apart
        if args is None:
            _discard_output()
        failure = error if isinstance(error, PrintError) else PrintError(f"cannot print: {error.strerror or error}")
        return _failed(session, failure, 1)
    except SimdistError as error:
        return _failed(session, error, 1 if isinstance(error, RunError) else 2)
    except MemoryError as error:
        return _failed(session, RunError(f"not enough memory: {error}; simulate fewer steps, ranks or samples"), 1)
    return code if isinstance(code, int) else 0


def _meant(error: click.ClickException) -> str:
    """Return the word that a wrong command or choice is nearest to, as the end of a message; empty if there is none."""
    from simdist.settings.base import nearest

    known: Sequence[str] = ()
    if "Did you mean" in error.message:  # click's own
        return ""
    if isinstance(error, click.BadParameter) and error.param and isinstance(error.param.type, click.Choice):
        known = error.param.type.choices
    elif isinstance(error, click.UsageError) and error.ctx and isinstance(error.ctx.command, click.Group):
        known = error.ctx.command.list_commands(error.ctx)
    word = re.search("'([^']+)'", error.message)
    hint = nearest(word[1], known) if word else ""
    return f": {hint.rstrip('?')}" if hint.startswith("did you mean") else ""


def _discard_output() -> None:
    """Send what is left in the buffer of stdout to nowhere: at the end of the process it would fail once more."""
    with suppress(OSError):  # this stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(session: CliSession, error: SimdistError, code: int) -> int:
    if session.debug:
        traceback.print_exc()
    else:
        session.say(f"error:\n{error}" if "\n" in str(error) else f"error: {error}")
    return code


_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=_Commands, invoke_without_command=True, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="simdist", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Simulate, run and compare synchronisation schedules for distributed training.

    SCENARIO is a YAML file, or the name of a scenario that ships (`simdist presets scenarios`). RUN is a directory with
    a plan, its scenario, delays and traces.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
