"""Exit of programs that torchrun starts: one line per rank for an error, and the exit codes of `simdist`."""

import os
import sys
import traceback
from collections.abc import Sequence

import click

from simdist.errors import RunError, SimdistError


def run_command(command: click.Command, args: Sequence[str] | None, *, program: str) -> int:
    """Run a command on one rank and return its exit code: 0; 1 for a run that failed; 2 for wrong input.

    Args:
        command: The command to run.
        args: Arguments of the command line; those of the process if None.
        program: Beginning of an error line, such as `real`. The program is started as `python -m PROGRAM`.
    """
    try:
        code = command.main(args, prog_name=f"python -m {program}", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return _say(program, error.format_message(), 2)
    except click.Abort:
        return _say(program, "interrupted", 130)
    except SimdistError as error:
        if "--debug" in (args or sys.argv):
            traceback.print_exc()
        return _say(program, str(error), 1 if isinstance(error, RunError) else 2)


def _say(program: str, message: str, code: int) -> int:
    rank = f" rank {os.environ['RANK']}:" if "RANK" in os.environ else ""
    click.echo(f"{program}:{rank} error: {' '.join(message.split())}", err=True)
    return code
