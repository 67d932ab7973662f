"""What a loop measures: its trace, and which rank is late.

Ranks record the times of a trace in files beside it. At the end they are combined.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from real.collectives import byte_transfer
from real.processes.launch import Connection
from real.recording.recorder import forget, salvage
from real.session import Recording, Session, Start
from real.watching.watch import StepWatch
from simdist.errors import RunError
from simdist.files import locked
from simdist.plan import Plan
from simdist.runs import run_directory


@contextmanager
def kept_times(plan: Plan, connection: Connection, path: Path) -> Iterator[Recording]:
    """Lock the folder beside a trace in which ranks record their times. All ranks take part.

    If the loop fails, `NAME.partial.npz` has the times up to the failure. If it is killed, the next start writes it.

    Raises:
        RunError: Rank 0 cannot write to the folder, or another loop has locked it.
    """
    parts = path.with_suffix(".parts")
    partial = path.with_suffix(".partial.npz")
    rank = connection.place.rank

    def keep() -> str:
        found = salvage(parts, plan)
        if found:
            run_directory.save_trace(found, partial, on_disk=True)
        return f"what was done is in {partial}" if found else ""

    with ExitStack() as stack:
        with byte_transfer.raising_on_all(group=connection.group):
            if rank == 0:
                stack.enter_context(locked(parts))
                if kept := keep():
                    warnings.warn(f"{path}: an earlier run ended early: {kept}", RuntimeWarning, stacklevel=2)
        forget(parts, rank)
        try:
            yield Recording(parts, by_all=False)
        except BaseException as error:
            try:
                note = keep()
            except RunError as full:
                note = f"what was done is still in {parts}, and the next start keeps it ({full})"
            if note:
                error.add_note(note)
            raise
        forget(parts, rank)
    with suppress(OSError):
        parts.rmdir()


@dataclass(frozen=True, slots=True)
class Tracing:
    """Writes the trace of a loop."""

    session: Session
    start: Start
    path: Path

    def finish(self) -> None:
        """Write the trace, unless the loop did no step, such as in a finished job. All ranks take part."""
        connection = self.session.connection
        source = f"training loop, {connection.backend} on {connection.device.type}"
        trace, _ = self.session.gather(self.start, source)
        with byte_transfer.raising_on_all(group=connection.group):
            if trace and not np.isnan(trace.end_s).all():
                run_directory.save_trace(trace, self.path, on_disk=True)


@dataclass(frozen=True, slots=True)
class Measuring:
    """What a loop measures."""

    tracing: Tracing | None
    watch: StepWatch | None
