"""The step that a profiler should trace: one in which a rank is expected to be late again."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, final

from real.watching.lateness import LatenessWindow

_BEFORE = 1  # steps that a trace holds before the marked one; the cause may lie at the end of a step
_AFTER_PERIODIC = 1  # and after it, where it may come a step later
_AFTER_PERSISTENT = 8  # ten steps in all, as `simdist import` needs to tell what is usual
_FEWEST = 3  # late steps that show a period
_MOST_KEPT = 16
_TOLERANCE = 0.1  # of a period


@dataclass(frozen=True, slots=True)
class TraceMark:
    """A step to trace.

    Args:
        step: The step in which the rank is expected to be late.
        rank: The rank.
        kind: The rank is late in most steps, or periodically.
    """

    step: int
    rank: int
    kind: Literal["persistent", "periodic"]

    @property
    def first_step(self) -> int:
        """First step of the trace."""
        return self.step - _BEFORE

    @property
    def last_step(self) -> int:
        """Last step of the trace."""
        return self.step + (_AFTER_PERSISTENT if self.kind == "persistent" else _AFTER_PERIODIC)

    def __str__(self) -> str:
        often = "in most steps" if self.kind == "persistent" else "periodically"
        return f"trace step {self.step}: rank {self.rank} is late {often}"


@final
class TraceMarker:
    """Marks a step for each rank that is late persistently or periodically, once for each kind."""

    def __init__(self) -> None:
        self._late: dict[int, list[int]] = defaultdict(list)
        self._marked: set[tuple[int, str]] = set()
        self._latest: TraceMark | None = None

    def after(self, window: LatenessWindow, earliest: int) -> TraceMark | None:
        """Return the step to trace, after the lateness of another window.

        A mark stays until its steps are over. Of several late ranks, the latest is traced first.

        Args:
            window: The next window.
            earliest: First step that all ranks can still learn of in time.
        """
        for each in window.ranks:
            self._late[each.rank] = [*self._late[each.rank], *each.late_steps][-_MOST_KEPT:]
        if self._latest is not None and window.last_step <= self._latest.last_step:
            return self._latest
        for each in window.late:
            found = self._expected(each.rank, each.kind, earliest)
            if found is not None and (found.rank, found.kind) not in self._marked:
                self._marked.add((found.rank, found.kind))
                self._latest = found
                break
        return self._latest

    def _expected(self, rank: int, kind: str | None, earliest: int) -> TraceMark | None:
        if kind == "persistent":
            return TraceMark(earliest, rank, "persistent")
        step = next_occurrence(self._late[rank], earliest)
        return None if step is None else TraceMark(step, rank, "periodic")


def next_occurrence(steps: list[int], earliest: int) -> int | None:
    """Return the next step of a periodic series, from `earliest` on. None if it is not periodic.

    Consecutive steps are one occurrence. The last two or three gaps may differ from their mean by a step or by a tenth.

    >>> next_occurrence([10, 30, 31, 50], earliest=100)
    110
    >>> next_occurrence([10, 30, 61], earliest=100) is None
    True
    """
    begins = [step for number, step in enumerate(steps) if number == 0 or step > steps[number - 1] + 1]
    if len(begins) < _FEWEST:
        return None
    gaps = [after - before for before, after in pairwise(begins)][-_FEWEST:]
    interval = round(sum(gaps) / len(gaps))
    if any(abs(gap - interval) > max(1.0, _TOLERANCE * interval) for gap in gaps):
        return None
    n_intervals = max(1, -((begins[-1] - earliest) // interval))
    return begins[-1] + n_intervals * interval
