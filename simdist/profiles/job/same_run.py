"""Whether the traces are of one run: the ends of its collectives stay together on all ranks.

No rank is done with a collective before its last member has come, so its ends differ by less than the time that it
takes from then on. That time is what it took the last one to come, by that rank's own clock: the shortest of all.

Where hosts are busy, ends are seen later than that, so what is beyond is judged by all steps before it is refused. In
one run ends are late by chance in each step, and are near again in the next. In two runs they drift apart, because
each step adds the difference of two lengths that have nothing to do with each other. With d[s] how much later than on
the other ranks the collectives of step s end, in noise mean |d[s + 1] - d[s]| is 1.4 times mean |d - median d|; in the
sum of n independent differences it is about 3.5 / sqrt(n) times that. Where noise lasts for several steps, the lengths
of steps still tell: with a wrong step of the other ranks, ends are further apart.
"""

import numpy as np

from simdist.errors import TraceError
from simdist.profiles.job.job import TracedJob
from simdist.profiles.job.matching import HEARS_ALL, Matched, RankClocks, synchronize
from simdist.profiles.kineto.columns import Floats
from simdist.settings.units import format_seconds

_SLICE_S = 5e-3  # by so much a busy host sees an end late: about a time slice of Linux (sched_base_slice_ns, 3-4 ms)
_FEWEST = 16  # steps that tell noise from drifting apart
_WILD = 5.0  # times the median deviation; what is further apart is taken for as far
_BETTER = 2.5  # product of both ratios; of two runs that drift apart at random, 1 of 100 has it in 20 steps
_WRONG = 3  # steps that wrong pairings are off by, at most
_FEWEST_AGREE = 10  # steps that would do


def check_same_run(job: TracedJob, matched: Matched, clocks: RankClocks) -> None:
    """Refuse a rank whose collectives are not those of the others.

    Raises:
        TraceError: The ends on a rank are further from those on the others, in the median, than the collectives take,
            after its clock was corrected; and they drift apart.
    """
    if not len(matched.end_s) or not len(clocks.apart_s):
        return
    alone_s = float(np.median(np.nanmin(matched.end_s - matched.arrival_s, axis=1)))
    limit_s = max(_SLICE_S, alone_s)
    for rank in np.argsort(-clocks.apart_s).tolist():
        apart_s = float(clocks.apart_s[rank])
        if apart_s <= limit_s:
            return
        later_s, others_s = _by_step(matched, clocks, rank)
        if _stay_together(later_s, others_s):
            continue
        raise TraceError(
            f"{job.profiles[rank].path}: collectives of rank {job.ranks[rank]} end {format_seconds(apart_s)} apart "
            f"from the same ones on other ranks, with clocks corrected, and take only {format_seconds(alone_s)}: it is "
            f"of another run, or its steps are numbered otherwise: give the traces of one run"
            f"{_window(job, matched, limit_s)}"
        )


def _by_step(matched: Matched, clocks: RankClocks, rank: int) -> tuple[Floats, Floats]:
    """Return how much later the collectives of each step end on a rank than on the others, and when on these."""
    heard = np.array([each.kind in HEARS_ALL for each in matched.collectives])
    end_s = clocks.corrected_s(matched.end_s)
    others = np.delete(end_s, rank, axis=1)
    heard &= np.isfinite(end_s[:, rank]) & np.isfinite(others).any(axis=1)
    others_s = np.nanmedian(others[heard], axis=1)
    later_s, step = end_s[heard, rank] - others_s, matched.step[heard]
    rows = [(np.median(later_s[step == each]), others_s[step == each].max()) for each in np.unique(step)]
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


def _stay_together(later_s: Floats, others_s: Floats) -> bool:
    """Tell whether ends are late by chance in each step, and do not drift apart."""
    n_steps, median_s = len(later_s), np.median(later_s)
    wild_s = _WILD * _deviation_s(later_s)
    tamed_s = np.clip(later_s - median_s, -wild_s, wild_s)
    if n_steps < _FEWEST or not wild_s:
        return not wild_s
    nearness = float(np.mean(np.abs(np.diff(tamed_s))) / np.mean(np.abs(tamed_s)))
    own_s = others_s + later_s
    wrong_s = [
        _deviation_s(first_s[by:] - second_s[:-by])
        for by in range(1, _WRONG + 1)
        for first_s, second_s in ((own_s, others_s), (others_s, own_s))
    ]
    worse = float(np.median(wrong_s)) / _deviation_s(later_s)
    return nearness >= 0.95 + 5 / n_steps or nearness * worse >= _BETTER


def _deviation_s(seconds: Floats) -> float:
    return float(np.median(np.abs(seconds - np.median(seconds))))


def _window(job: TracedJob, matched: Matched, limit_s: float) -> str:
    """Return steps in a row in which the ends are near each other on all ranks, as the end of a message."""
    n_steps = len(job.numbers)
    for size in (n_steps // 2, n_steps // 4):
        for first in range(0, n_steps - size + 1, max(1, size // 2)) if size >= _FEWEST_AGREE else ():
            kept = np.flatnonzero((first <= matched.step) & (matched.step < first + size))
            collectives = tuple(matched.collectives[row] for row in kept.tolist())
            arrival_s, end_s, start_s = (each[kept] for each in (matched.arrival_s, matched.end_s, matched.start_s))
            part = Matched(collectives, matched.step[kept], arrival_s, end_s, start_s, ())
            if np.all(synchronize(part).apart_s <= limit_s):
                span = f"{job.numbers[first]}:{job.numbers[first + size - 1] + 1}"
                return f"; if they are, --steps {span} would do, where ends are near each other"
    return ""
