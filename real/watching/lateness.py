"""Which ranks were late in a window of steps, and what that cost.

With w[s, r] the own work of rank r in step s (`real.watching.work`):

* *Lateness* is w[s, r] less the median of the other ranks in the same step.
* A rank is *persistently* late if the lower median of its lateness over the window is above what noise alone does,
  above 3 % of a step, and above 3 times the spread between the other ranks.
* A rank is *transiently* late in a step if both its lateness and its excess over its own median are above what noise
  alone does, and above 5 % of a step. Of the lateness counts what exceeds the usual one where the rank is persistently
  late or usually early. The noise is that of this window and of some before it.
* The *lost* time of a step is w[s, last] less that of the rank before the last. It is lost to the last rank: that rank
  alone, no later than the next, would save it.

`simdist.profiles.estimates.noise` has the threshold of noise. In noise alone, at most `_FALSE_ALARM` of all windows
name a rank, among up to 128 ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.estimates.noise import USUALLY, by_chance_usually_s, late_once, lower_median_s
from simdist.settings.base import plural

#: Share of windows that name a rank although there is noise alone, at most.
_FALSE_ALARM = 0.02

_CHANNELS = 3  # among which `by_chance_usually_s` divides `USUALLY`; there is one here
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_SPREADS = 3.0
# Shares of a step, as in `simdist import`. Less changes no decision.
_PERSISTENT_SHARE = 0.03
_TRANSIENT_SHARE = 0.05
_FEWEST_STEPS = 3
_MOST_SCALARS = 32
_MOST_COMPARED = 128
_MOST_EARLIER = 150  # steps whose noise counts

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """Own work of ranks in a window of steps.

    Args:
        steps: Numbers of the rows.
        ranks: Numbers of the columns.
        work_s: Own work, `[n_steps, n_ranks]`.
        step_s: Own work and waiting, `[n_steps, n_ranks]`.
    """

    steps: Sequence[int]
    ranks: Sequence[int]
    work_s: _Floats
    step_s: _Floats


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late one rank was in a window.

    Args:
        rank: The rank.
        ms: Mean lateness over the steps of the window. Steps in which the rank was early count as 0.
        worst_step: Step with the largest lateness.
        worst_ms: Lateness in that step; negative if the rank was always early.
        lost_share: Share of the window's time that is lost to this rank.
        kind: None if noise explains the lateness.
        late_steps: Steps in which the rank was transiently late.
    """

    rank: int
    ms: float
    worst_step: int
    worst_ms: float
    lost_share: float
    kind: Literal["persistent", "transient"] | None
    late_steps: tuple[int, ...]

    @property
    def is_late(self) -> bool:
        """Whether noise does not explain the lateness."""
        return self.kind is not None


@dataclass(frozen=True, slots=True)
class LatenessWindow:
    """The lateness of all ranks in a window of steps.

    Args:
        first_step: First step of the window.
        last_step: Last step of the window.
        step_ms: Median duration of a step.
        lost_share: Share of the window's time in which a typical rank waits for the last one.
        ranks: One value for each rank.
        unseen: Which late ranks may not be visible here; empty if all are.
    """

    first_step: int
    last_step: int
    step_ms: float
    lost_share: float
    ranks: tuple[Lateness, ...]
    unseen: str = ""

    @property
    def late(self) -> tuple[Lateness, ...]:
        """Ranks that are late, the latest first."""
        return tuple(sorted((each for each in self.ranks if each.is_late), key=lambda each: -each.ms))

    def scalars(self) -> dict[str, float]:
        """Return the numbers for TensorBoard, Weights & Biases and the like.

        Of more than 32 ranks, the 32 latest have scalars. `simdist/late_ranks` counts the ranks that are named. If late
        ranks may not be visible, no rank has a 0 that says it is not late.
        """
        latest = sorted(self.ranks, key=lambda each: (not each.is_late, -each.ms))[:_MOST_SCALARS]
        found = {
            "simdist/step_ms": self.step_ms,
            "simdist/lost_share": self.lost_share,
            "simdist/late_ranks": float(len(self.late)),
        }
        for each in sorted(latest, key=lambda each: each.rank):
            found[f"simdist/lateness_ms/rank{each.rank}"] = each.ms
            found[f"simdist/lost_share/rank{each.rank}"] = each.lost_share
            if each.is_late or not self.unseen:
                found[f"simdist/late/rank{each.rank}"] = float(each.is_late)
        return found

    def __str__(self) -> str:
        told = [_told(each, self.step_ms) for each in self.late]
        if self.unseen:
            told.append(self.unseen)
        return f"steps {self.first_step}-{self.last_step}, {self.step_ms:.3g} ms each: " + (
            "; ".join(told) or "no rank is late"
        )


def _told(each: Lateness, step_ms: float) -> str:
    if each.kind == "persistent":
        return f"rank {each.rank} is late by {each.ms:.3g} ms ({each.ms / step_ms:.0%} of a step) in most steps"
    n_late = len(each.late_steps)
    often = f"{n_late} {plural(n_late, 'step')}"
    return f"rank {each.rank} is late in {often}, most in step {each.worst_step}, by {each.worst_ms:.3g} ms"


@final
class LatenessFinder:
    """Finds the late ranks of one window after the other. Earlier windows show what is noise in later ones."""

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._earlier_s: _Floats = np.empty((0, 0))

    def find(self, times: WorkTimes) -> LatenessWindow:
        """Return the lateness in the next window."""
        ranks = tuple(times.ranks)
        if ranks != self._ranks:
            self._ranks = ranks
            self._earlier_s = np.empty((0, len(ranks)))
        window, more_s = find_late(times, self._earlier_s)
        self._earlier_s = np.concatenate([self._earlier_s, more_s])[-_MOST_EARLIER:]
        return window


def find_late(times: WorkTimes, earlier_s: _Floats | None = None) -> tuple[LatenessWindow, _Floats]:
    """Return how late each rank was, and which of them noise does not explain.

    Args:
        times: At least one step and one rank.
        earlier_s: Lateness in excess of the usual one in earlier windows, `[n_earlier, n_ranks]`.

    Returns:
        The window, and its lateness in excess of the usual one, `[n_steps, n_ranks]`.
    """
    late_s = lateness_s(times.work_s)
    step_s = float(np.median(times.step_s))
    all_s = max(float(np.median(times.step_s, axis=1).sum()), 1e-12)
    lost_s = _lost_s(times.work_s)
    persistent = _persistent(times.work_s, late_s, step_s)
    more_s = _more_s(times.work_s, late_s, persistent)
    transient = _transient(more_s, more_s[:0] if earlier_s is None else earlier_s, step_s)
    ranks = []
    for column, rank in enumerate(times.ranks):
        worst = int(late_s[:, column].argmax())
        late_steps = tuple(times.steps[row] for row in np.flatnonzero(transient[:, column]).tolist())
        kind: Literal["persistent", "transient"] | None = "transient" if late_steps else None
        each = Lateness(
            rank,
            ms=1e3 * float(np.maximum(late_s[:, column], 0.0).mean()),
            worst_step=times.steps[worst],
            worst_ms=1e3 * float(late_s[worst, column]),
            lost_share=float(lost_s[:, column].sum()) / all_s,
            kind="persistent" if persistent[column] else kind,
            late_steps=late_steps,
        )
        ranks.append(each)
    typical_s = np.median(times.work_s, axis=1)
    lost_share = float((times.work_s.max(axis=1) - typical_s).sum()) / all_s
    steps = times.steps[0], times.steps[-1]
    return LatenessWindow(*steps, 1e3 * step_s, lost_share, tuple(ranks), _too_little(times)), more_s


def _too_little(times: WorkTimes) -> str:
    """Return why a window cannot show a late rank; empty if it can."""
    n_steps, n_ranks = times.work_s.shape
    if n_ranks < 2:
        return f"rank {times.ranks[0]} has no other rank to be late for"
    if n_steps < _FEWEST_STEPS:
        return f"{n_steps} {plural(n_steps, 'step')} cannot show a late rank, {_FEWEST_STEPS} can"
    return ""


def import_lateness() -> None:
    """Load what the first late rank needs. Beside a loop, this would hold up the loop by half a second."""
    work_s = np.ones((_FEWEST_STEPS, 2))
    work_s[:, 0] = 2.0
    find_late(WorkTimes(range(_FEWEST_STEPS), range(2), work_s, work_s))


def lateness_s(work_s: _Floats) -> _Floats:
    """Return the work of each rank beyond the median of the other ranks in the same step, `[n_steps, n_ranks]`.

    One rank alone is never late.

    >>> lateness_s(np.array([[1.0, 2.0, 4.0]])).tolist()
    [[-2.0, -0.5, 2.5]]
    """
    n_ranks = work_s.shape[1]
    if n_ranks == 1:
        return np.zeros_like(work_s)
    order = np.argsort(work_s, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(n_ranks), order.shape), axis=1)
    ascending_s = np.take_along_axis(work_s, order, axis=1)

    def of_others(nth: int) -> _Floats:
        """Return the nth value of the other ranks, in ascending order."""
        return np.asarray(np.take_along_axis(ascending_s, np.where(place <= nth, nth + 1, nth), axis=1))

    low = (n_ranks - 2) // 2
    high = (n_ranks - 1) // 2
    return np.asarray(work_s - (of_others(low) + of_others(high)) / 2)


def _lost_s(work_s: _Floats) -> _Floats:
    """Return the time that each rank alone costs in each step, `[n_steps, n_ranks]`."""
    lost_s = np.zeros_like(work_s)
    if work_s.shape[1] < 2:
        return lost_s
    before_last_s, last_s = np.sort(work_s, axis=1)[:, -2:].T
    rows = np.arange(len(work_s))
    lost_s[rows, work_s.argmax(axis=1)] = last_s - before_last_s
    return lost_s


def _persistent(work_s: _Floats, late_s: _Floats, step_s: float) -> NDArray[np.bool_]:
    """Tell which ranks are late in most steps, `[n_ranks]`."""
    n_steps, n_ranks = work_s.shape
    none = np.zeros(n_ranks, dtype=bool)
    if n_ranks < 2 or n_steps < _FEWEST_STEPS:
        return none
    usual_s = lower_median_s(late_s)
    candidates = usual_s > _PERSISTENT_SHARE * step_s
    if not candidates.any():  # the threshold costs more than all the rest
        return none
    candidates &= usual_s > by_chance_usually_s(work_s[:, _compared(usual_s)])
    for column in np.flatnonzero(candidates).tolist():
        others_s = np.delete(usual_s, column)
        spread_s = _NORMAL * float(np.median(np.abs(others_s - np.median(others_s))))
        candidates[column] = usual_s[column] > _SPREADS * spread_s
    return candidates


def _more_s(work_s: _Floats, late_s: _Floats, persistent: NDArray[np.bool_]) -> _Floats:
    """Return the lateness that may be transient, `[n_steps, n_ranks]`.

    A rank does not become late because the others are early in a step.
    """
    if work_s.shape[1] < 2:
        return np.zeros_like(work_s)
    usual_s = lower_median_s(late_s)
    usual_s = np.where(persistent, usual_s, np.minimum(usual_s, 0.0))
    return np.minimum(late_s - usual_s, work_s - lower_median_s(work_s))


def _transient(more_s: _Floats, earlier_s: _Floats, step_s: float) -> NDArray[np.bool_]:
    """Tell in which steps a rank is later than usual, `[n_steps, n_ranks]`."""
    noticeable = more_s > _TRANSIENT_SHARE * step_s
    if not noticeable.any():  # the threshold costs more than all the rest
        return noticeable
    columns = _compared(more_s.max(axis=0))
    all_s = np.concatenate([earlier_s, more_s])[:, columns]
    is_late = np.zeros_like(noticeable)
    is_late[:, columns] = late_once(all_s, alarm=_FALSE_ALARM - USUALLY / _CHANNELS)[len(earlier_s) :]
    return np.asarray(noticeable & is_late)


def _compared(late_s: _Floats) -> NDArray[np.intp]:
    """Return the ranks among which late ones are told from noise, in ascending order.

    The time for that grows with the square of the number of ranks. Of many ranks, these are the latest and some others.
    """
    n_ranks = len(late_s)
    if n_ranks <= _MOST_COMPARED:
        return np.arange(n_ranks)
    latest = np.argsort(-late_s, kind="stable")[: _MOST_COMPARED // 2]
    others = np.linspace(0, n_ranks - 1, _MOST_COMPARED // 2).astype(np.intp)
    return np.union1d(latest, others)
