"""Every error that simdist raises on purpose.

A message says what is wrong, where, the value that was found and what would be right. The command line prints it
without a traceback and exits with 2 for wrong input (the `ValueError` and `NotImplementedError` leaves) or 1 for a run
that failed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path


class SimdistError(Exception):
    """Root of every error that simdist raises on purpose."""


class ScenarioError(SimdistError, ValueError):
    """A scenario file, or a value in it, is wrong."""


class PlanError(SimdistError, ValueError):
    """A plan is not legal, or does not do what its schedule declares."""


class TraceError(SimdistError, ValueError):
    """A trace is damaged, or belongs to another plan."""


class UnsupportedError(SimdistError, NotImplementedError):
    """An engine cannot compute this exactly and refuses to approximate."""


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
