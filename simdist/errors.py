"""Every error that simdist raises on purpose, and its warning.

A message says what is wrong, where, the value that was found and what would be right. The command line prints it
without a traceback and exits with 2 for wrong input (the `ValueError` and `NotImplementedError` leaves) or 1 for a run
that failed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

_NAMED = 8  # operations that wait, in one message


class SimdistError(Exception):
    """Root of every error that simdist raises on purpose."""


class SimdistWarning(UserWarning):
    """A number of an answer is doubtful; see `simdist.studies.remarks`."""


class ScenarioError(SimdistError, ValueError):
    """A scenario file, or a value in it, is wrong."""


class PlanError(SimdistError, ValueError):
    """A plan is not legal, or does not do what its schedule declares."""


class TraceError(SimdistError, ValueError):
    """A trace is damaged, or belongs to another plan."""


class UnsupportedError(SimdistError, NotImplementedError):
    """An engine cannot compute this exactly and refuses to approximate."""


class UnforeseenError(UnsupportedError):
    """An engine meets in the middle of a run what nobody could know before."""


class RunError(SimdistError, RuntimeError):
    """A run failed: a worker died, a wait timed out, a file could not be written."""


@contextmanager
def naming_file(path: Path, verb: str = "written", error_class: type[SimdistError] = RunError) -> Iterator[None]:
    """Turn an error of the operating system into one that names the file, and says what could not be done.

    Args:
        path: The file, or a directory.
        verb: Such as `read`.
        error_class: Of the new error.
    """
    try:
        yield
    except OSError as error:
        raise error_class(f"{path}: cannot be {verb}: {error.strerror or error}") from None


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Say where a plan, a trace or an engine was when it refused.

    Raises:
        PlanError: As raised inside.
        TraceError: As raised inside.
        UnsupportedError: As raised inside.
    """
    try:
        yield
    except (PlanError, TraceError, UnsupportedError) as error:
        raise type(error)(f"{where}: {error}") from error


def standstill(now_s: float, waiting: Sequence[str]) -> RunError:
    """Return the error of a simulation in which nothing can happen any more.

    Args:
        now_s: When, seconds from the start of the run or of what is simulated at once.
        waiting: What has not ended, each with its operation and its state. The first few are named.
    """
    more = f"; and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
    return RunError(f"nothing can happen any more at {now_s:g} s: {'; '.join(waiting[:_NAMED])}{more}")


def require(package: str, *, extra: str, what: str) -> None:
    """Check that an optional package is installed, before it is imported.

    Args:
        package: Its import name.
        extra: The extra of `simdist-training` that installs it.
        what: What needs it; the message begins with it.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import_module(package)
    except ImportError:
        raise UnsupportedError(
            f"{what} needs {package}, which is not installed: pip install 'simdist-training[{extra}]'"
        ) from None
