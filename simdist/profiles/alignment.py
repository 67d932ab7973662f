"""Which step of one rank is which of another, where a profiler did not count them.

A gradient all_reduce ends on all ranks at nearly the same time. So with the right pairing, the ends on two ranks differ
by the skew of their clocks, the same in every step; with a wrong one, by that and the varying lengths of the steps
between. The pairing in which most steps have the same difference is the right one.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.model import RankProfile, RankStep

__all__ = ["shifted"]

_FEWEST = 3  # steps that must overlap
_TOLERATED = 0.01  # of a step
_NOISE = 3.0  # median deviations


def shifted(profiles: Sequence[RankProfile]) -> list[RankProfile]:
    """Renumber the steps of ranks that count from 0 because their traces have no marks, to match the first rank's."""
    first = profiles[0]
    if any(not each.steps or each.steps[0].number != 0 for each in profiles):
        return list(profiles)
    reference = _ends_s(first)
    renumbered = [_renumbered(each, _shift(_ends_s(each), reference)) for each in profiles]
    least = min(each.steps[0].number for each in renumbered)
    return [_renumbered(each, -least) for each in renumbered]


def _ends_s(profile: RankProfile) -> NDArray[np.float64]:
    """Return when the last gradient collective of each step ended, `[n_steps]`; NaN without any."""
    return np.array([_last_end_s(step) for step in profile.steps])


def _last_end_s(step: RankStep) -> float:
    return max((call.end_s for call in step.calls if call.of_gradients), default=np.nan)


def _shift(ends_s: NDArray[np.float64], reference_s: NDArray[np.float64]) -> int:
    """Return how many steps later than the reference this rank began: what most steps agree on, less those that do not.

    Steps agree whose difference is the usual one, up to what differences vary by at the best.
    """
    fewest = max(_FEWEST, min(len(ends_s), len(reference_s)) // 2)
    shifts = range(fewest - len(ends_s), len(reference_s) - fewest + 1)
    deviations = {shift: _deviations_s(ends_s, reference_s, shift) for shift in shifts}
    deviations = {shift: each for shift, each in deviations.items() if len(each) >= _FEWEST}
    if not deviations:
        return 0
    step_s = float(np.nanmax(reference_s) - np.nanmin(reference_s)) / max(1, len(reference_s) - 1)
    noise_s = min(float(np.median(each)) for each in deviations.values())
    tolerance_s = max(_TOLERATED * step_s, _NOISE * noise_s)
    agree = {shift: int(np.where(each <= tolerance_s, 1, -1).sum()) for shift, each in deviations.items()}
    return max(agree, key=lambda shift: (agree[shift], -abs(shift)))


def _deviations_s(ends_s: NDArray[np.float64], reference_s: NDArray[np.float64], shift: int) -> NDArray[np.float64]:
    """Return by how much each step's difference is not the usual one; steps without collectives are left out."""
    first, stop = max(0, shift), min(len(reference_s), len(ends_s) + shift)
    differences = ends_s[first - shift : stop - shift] - reference_s[first:stop]
    differences = differences[np.isfinite(differences)]
    return np.asarray(np.abs(differences - np.median(differences))) if len(differences) else differences


def _renumbered(profile: RankProfile, shift: int) -> RankProfile:
    if shift == 0:
        return profile
    steps = tuple(replace(step, number=step.number + shift) for step in profile.steps)
    return replace(profile, steps=steps)
