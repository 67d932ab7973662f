"""Where the lateness of windows goes: a CSV file, TensorBoard, Weights & Biases, or a function."""

import csv
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from real.watching.lateness import LatenessWindow
from simdist.errors import RunError, ScenarioError, naming_file

LATENESS_COLUMNS = (
    "first_step",
    "last_step",
    "step_ms",
    "rank",
    "lateness_ms",
    "worst_step",
    "worst_ms",
    "lost_share",
    "kind",
    "late_steps",
)


@runtime_checkable
class _AddsScalars(Protocol):
    """Takes one number at a time, such as TensorBoard's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Take a number."""


@runtime_checkable
class _LogsScalars(Protocol):
    """Takes several numbers at a time, such as the module `wandb` and its runs."""

    def log(self, data: Mapping[str, float], *, commit: bool) -> object:
        """Take numbers. Without `commit`, they belong to the row that the script logs next."""


Report = Callable[[LatenessWindow], object] | _AddsScalars | _LogsScalars


def check_report(report: object) -> None:
    """Check that windows can be reported to an object.

    Raises:
        TypeError: It has neither `add_scalar` nor `log`, and cannot be called.
    """
    if not (report is None or isinstance(report, _AddsScalars | _LogsScalars) or callable(report)):
        raise TypeError(
            f"report={report!r}: write a function of a LatenessWindow, a SummaryWriter of TensorBoard, or wandb"
        )


def tell(report: Report, window: LatenessWindow) -> None:
    """Report a window."""
    match report:
        case _AddsScalars():
            for name, value in window.scalars().items():
                report.add_scalar(name, value, window.last_step)
        case _LogsScalars():
            report.log({**window.scalars(), "simdist/last_step": float(window.last_step)}, commit=False)
        case _:
            report(window)


def check_csv(path: Path) -> None:
    """Prepare a CSV file for more rows: make it with its header, or check the header and cut off half a row.

    Raises:
        ScenarioError: The file has other columns.
        RunError: It cannot be written.
    """
    header = ",".join(LATENESS_COLUMNS) + "\n"
    with naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            found = file.readline(len(header) + 1).decode(errors="replace")
            if not header.startswith(found):
                raise ScenarioError(
                    f"{path}: has the columns {found.strip()!r}, not {header.strip()!r}; give csv= another file"
                )
            if found != header:  # it is new, or a crash has left half a header
                file.truncate(0)
                file.write(header.encode())
                return
            file.truncate(_end_of_last_row(file))


def _end_of_last_row(file: io.BufferedRandom) -> int:
    """Return the size of a file without the half row that a crash of the machine has left."""
    end = file.seek(0, io.SEEK_END)
    while end:
        begin = max(0, end - 4096)
        file.seek(begin)
        at = file.read(end - begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


def append_csv(path: Path, window: LatenessWindow) -> None:
    """Append the rows of a window, and return when they are on the disk.

    Raises:
        RunError: The file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for each in window.ranks:
        writer.writerow(
            [
                window.first_step,
                window.last_step,
                f"{window.step_ms:.6g}",
                each.rank,
                f"{each.ms:.6g}",
                each.worst_step,
                f"{each.worst_ms:.6g}",
                f"{each.lost_share:.6g}",
                each.kind or ("unseen" if window.unseen else ""),
                " ".join(map(str, each.late_steps)),
            ]
        )
    try:
        with path.open("ab") as file:
            file.write(text.getvalue().encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None
