"""The attempts of a job that failed and was started again: when each began and failed, and the trace of all together.

launched    the process of rank 0 exists
started     its libraries are loaded
connected   all ranks have met
began       the first step begins; loading of the checkpoint and preparation are done
failed      a failure of the run struck; or else, the last recorded operation ended
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from simdist.errors import TraceError
from simdist.files import read_content, replacing
from simdist.plan.delays import Floats
from simdist.plan.plan import StepIndex
from simdist.traces.trace import Trace

ATTEMPTS = "attempts.json"
_FORMAT = "simdist-attempts-1"


@dataclass(frozen=True, slots=True)
class MeasuredAttempt:
    """One start of a job.

    Args:
        first_step: The first step that it performs.
        launched_s: When the process of rank 0 was started, in seconds since 1970, as the other times.
        started_s: When its libraries were loaded.
        connected_s: When all ranks had met.
        began_s: When the first step began; None if it failed before.
        load_s: Seconds in which rank 0 loaded the checkpoint.
        ended_s: When the last operation ended; None if the attempt failed.
    """

    first_step: int
    launched_s: float
    started_s: float
    connected_s: float
    began_s: float | None = None
    load_s: float = 0.0
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class MetFailure:
    """A failure of the run that has struck.

    Args:
        number: Its place in the failures of the run.
        step: The step at whose start it struck.
        at_s: When, in seconds since 1970.
    """

    number: int
    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Absence:
    """A stretch of steps that count without a rank, because the others went on.

    Args:
        rank: The rank.
        first_step: The first of these steps: those since the last average with it.
        noticed_s: When the others knew that it was gone, in seconds since 1970, as the other times.
        last_step: The step at which it was back; None if it did not come back.
        started_s: When its new process had loaded its libraries.
        ready_s: When that process was ready to join.
    """

    rank: int
    first_step: int
    noticed_s: float
    last_step: int | None = None
    started_s: float | None = None
    ready_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """A time in which the ranks that were there formed their groups anew.

    Args:
        begin_s: When it began, in seconds since 1970.
        waiting_s: They did not know yet that a rank was gone.
        connect_s: They formed their groups.
        load_s: Ranks that were back got the state of another one.
    """

    begin_s: float
    waiting_s: float = 0.0
    connect_s: float = 0.0
    load_s: float = 0.0

    @property
    def length_s(self) -> float:
        """Length of all of it."""
        return self.waiting_s + self.connect_s + self.load_s


@dataclass(frozen=True, slots=True)
class AttemptLog:
    """The attempts of a measurement so far.

    Args:
        attempts: All that got as far as to meet.
        met: The failures that have struck.
        absences: Where ranks were absent, in the order in which they left.
        pauses: Of the ranks that went on.
        run: The measurement, as in its trace; empty until it is complete.
    """

    attempts: tuple[MeasuredAttempt, ...] = ()
    met: tuple[MetFailure, ...] = ()
    absences: tuple[Absence, ...] = ()
    pauses: tuple[Pause, ...] = ()
    run: str = ""

    def dumps(self) -> str:
        """Return it as JSON; `loads` reads it."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str | bytes) -> "AttemptLog":
        """Read it from JSON.

        Raises:
            ValueError: It is something else.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.pop("format", None) != _FORMAT:
            raise ValueError(f"is no file of attempts: its format should be {_FORMAT}")
        return _LOG.validate_python(document)

    def save(self, path: Path) -> None:
        """Write to a file, as a whole or not at all.

        Columns:
            format (str): `simdist-attempts-1`.
            run (str): Unique name of the measurement; empty until it is complete.
            attempts (list): "An attempt".
            met (list): "A failure that has struck".
            absences (list): "A rank that was absent".
            pauses (list): "A pause of the others".

        Raises:
            RunError: It cannot be written.
        """
        with replacing(path, on_disk=True) as part:
            part.write_text(self.dumps(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "AttemptLog":
        """Read from a file.

        Raises:
            TraceError: The file cannot be read.
        """
        try:
            return cls.loads(read_content(path))
        except (OSError, ValueError, RecursionError, ValidationError) as error:
            raise TraceError(f"{path}: cannot be read ({' '.join(str(error).split())}); delete it") from None


_LOG = TypeAdapter(AttemptLog)


def attempt_trace_name(number: int) -> str:
    """Return the name of the file with the trace of an attempt that failed."""
    return f"trace.attempt-{number}.npz"


def join_attempts(attempts: Sequence[tuple[int, Trace]]) -> Trace:
    """Put the traces of attempts together: each step as it was performed last, without the time between attempts.

    Args:
        attempts: First step and trace of each, in order. The last one has finished.
    """
    (_, whole), *later = attempts
    index = StepIndex(whole.plan, [len(body) for body in whole.plan.bodies])
    for first_step, trace in later:
        row = index.before(first_step)
        if np.isfinite(whole.ready_s[row]).any():
            begin_s = np.nanmin(whole.ready_s[row])
        else:
            begin_s = np.nanmax(whole.end_s[:row], initial=0.0)
        shift_s = begin_s - np.nanmin(trace.ready_s[row])
        times = (
            np.concatenate([before[:row], after[row:] + shift_s])
            for before, after in zip(_times(whole), _times(trace), strict=True)
        )
        ready_s, start_s, end_s = times
        late = {at: ranks for at, ranks in whole.late.items() if at < row} | dict(trace.late)
        absent = {
            rank: (
                *((a, min(b, first_step)) for a, b in whole.absent.get(rank, ()) if a < first_step),
                *trace.absent.get(rank, ()),
            )
            for rank in sorted({*whole.absent, *trace.absent})
        }
        whole = replace(trace, ready_s=ready_s, start_s=start_s, end_s=end_s, late=late, absent=absent)
    return whole


def without_absences(trace: Trace, absences: Iterable[Absence], pauses: Sequence[Pause], start_s: float) -> Trace:
    """Leave out what ranks did that the others went on without, and the pauses of the others.

    A step that a rank has not finished before it was back counts as not begun.

    Args:
        trace: Of an attempt.
        absences: Those of this attempt.
        pauses: The same, in order.
        start_s: The start of the trace, in seconds since 1970.
    """
    first = trace.plan.first_instances()
    index = StepIndex(trace.plan, [len(body) for body in trace.plan.bodies])
    times = [array.copy() for array in _times(trace)]
    absent: dict[int, tuple[tuple[int, int], ...]] = {}
    for each in absences:
        last_step = trace.plan.n_steps if each.last_step is None else each.last_step
        begin = each.first_step
        while begin < last_step and np.isfinite(trace.end_s[first[begin] : first[begin + 1], each.rank]).all():
            begin += 1
        for array in times:
            array[index.before(begin) : index.before(last_step), each.rank] = np.nan
        absent[each.rank] = (*absent.get(each.rank, ()), (begin, last_step))
    for pause in reversed(pauses):
        begin_s = pause.begin_s - start_s
        times = [array - np.clip(array - begin_s, 0.0, pause.length_s) for array in times]
    ready_s, began_s, end_s = times
    return replace(trace, ready_s=ready_s, start_s=began_s, end_s=end_s, absent=absent)


def _times(trace: Trace) -> tuple[Floats, Floats, Floats]:
    return trace.ready_s, trace.start_s, trace.end_s
