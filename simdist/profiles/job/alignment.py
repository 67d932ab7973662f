"""Matching the steps of ranks if a profiler did not number them, or numbered them differently.

A gradient all_reduce ends on all ranks at nearly the same time. With the right pairing, its ends on two ranks differ by
the skew of their clocks, which is the same in every step. With a wrong pairing, the difference also contains the
lengths of the steps in between, which vary. The right pairing is the one in which most steps have the same difference.

The profiler's own step numbers are kept unless another pairing agrees much better: a rank may have called
`profiler.step()` once more or less than the others. Ranks of one host share a clock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from simdist.errors import TraceError
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.steps.model import RankProfile
from simdist.settings.units import format_seconds

_FEWEST = 3  # steps that must overlap
_TOLERATED = 0.01  # of a step
_NOISE = 3.0  # median deviations
_FEWEST_MARKED = 8  # steps that must overlap to doubt their numbers
_FARTHEST = 10  # largest correction of step numbers
_MUCH_BETTER = 3.0  # times the deviation
_LEAST_S = 100e-6  # deviation that clocks and kernels always have
_ONE_CLOCK_S = 3e-3  # largest difference between ends of the same collective on one host
_ONE_RUN_S = 1.0  # largest difference between clocks of hosts with the same name


def shifted(profiles: Sequence[RankProfile]) -> tuple[list[RankProfile], list[str]]:
    """Renumber the steps of ranks to match each other, with notes on unexpected cases.

    Ranks with unmarked steps all count from 0. They are renumbered to start at the first step of any rank.
    """
    if any(not each.steps for each in profiles):
        return list(profiles), []
    if any(each.steps[0].number != 0 for each in profiles):
        return _corrected(profiles)
    reference = _ends_s(profiles[0])
    renumbered = [_renumbered(each, _shift(_ends_s(each), reference)) for each in profiles]
    least = min(each.steps[0].number for each in renumbered)
    return [_renumbered(each, -least) for each in renumbered], []


def _corrected(profiles: Sequence[RankProfile]) -> tuple[list[RankProfile], list[str]]:
    """Renumber the steps of ranks that differ from most ranks."""
    ends_s = [dict(zip((step.number for step in each.steps), _ends_s(each).tolist(), strict=True)) for each in profiles]
    shifts = [_error(each, ends_s[0]) for each in ends_s]
    hosts = [each.hostname or str(at) for at, each in enumerate(profiles)]
    for at, host in enumerate(hosts):
        if (first := hosts.index(host)) != at:
            theirs_s = {number + shifts[first]: end_s for number, end_s in ends_s[first].items()}
            shifts[at] = _by_clock(ends_s[at], theirs_s, shifts[at], (profiles[first], profiles[at]))
    usual = Counter(shifts).most_common(1)[0][0]
    notes = [
        f"warning: {each.path}: steps of rank {each.rank} are numbered {abs(shift - usual)} "
        f"{'lower' if shift > usual else 'higher'} than the same steps of other ranks, as the ends of collectives "
        f"show; numbered like these"
        for each, shift in zip(profiles, shifts, strict=True)
        if shift != usual
    ]
    return [_renumbered(each, shift - usual) for each, shift in zip(profiles, shifts, strict=True)], notes


def _by_clock(
    ends_s: Mapping[int, float], theirs_s: Mapping[int, float], shift: int, of: tuple[RankProfile, RankProfile]
) -> int:
    """Return the offset of a rank's step numbers, from the clock that it shares with a rank of its host.

    If all steps are alike, only the clock shows which steps are the same.
    """
    found = {}
    for each in range(shift - _FARTHEST, shift + _FARTHEST + 1):
        both = [end_s - theirs_s[at + each] for at, end_s in ends_s.items() if at + each in theirs_s]
        known_s = np.array(both)[np.isfinite(both)]
        if len(known_s):
            found[each] = abs(float(np.median(known_s))), float(np.mean(_unusual_s(known_s)))
    if shift not in found:
        return shift
    apart_s, noise_s = found[shift]
    nearest = min(found, key=lambda each: found[each])
    nearest_s, nearest_noise_s = found[nearest]
    if nearest_s > _ONE_RUN_S:
        raise TraceError(
            f"{of[0].path} and {of[1].path}: are of one host, {of[0].hostname}, and on its clock the same steps are "
            f"{format_seconds(apart_s)} apart: they are of two runs: give the traces of one run"
        )
    is_like = nearest_noise_s <= _MUCH_BETTER * max(noise_s, _LEAST_S)
    return nearest if nearest_s < apart_s / 2 and is_like and apart_s > _ONE_CLOCK_S else shift


def _error(ends_s: Mapping[int, float], reference_s: Mapping[int, float]) -> int:
    """Return the offset of a rank's step numbers; 0 unless another offset agrees much better.

    The mean deviation decides: with the right pairing even the ends of unusual steps agree.
    """
    noise_s = {}
    for shift in range(-_FARTHEST, _FARTHEST + 1):
        both = [end_s - reference_s[at + shift] for at, end_s in ends_s.items() if at + shift in reference_s]
        deviations_s = _unusual_s(np.array(both, dtype=np.float64))
        if len(deviations_s) >= max(_FEWEST_MARKED, len(ends_s) // 2):
            noise_s[shift] = float(np.mean(deviations_s))
    if noise_s.get(0, 0.0) <= _LEAST_S:
        return 0
    best = min(noise_s, key=lambda shift: noise_s[shift])
    return best if _MUCH_BETTER * noise_s[best] < noise_s[0] else 0


def _ends_s(profile: RankProfile) -> Floats:
    """Return when the last gradient collective of each step ended, `[n_steps]`; NaN without any."""
    ends_s = ((call.end_s for call in step.gradient_calls) for step in profile.steps)
    return np.array([max(of_step, default=np.nan) for of_step in ends_s])


def _shift(ends_s: Floats, reference_s: Floats) -> int:
    """Return how many steps after the reference this rank began: the offset with the most agreeing steps.

    A step agrees if its difference equals the usual one, within the variation of the best offset.
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


def _deviations_s(ends_s: Floats, reference_s: Floats, shift: int) -> Floats:
    """Return the deviation of each step from the usual difference; steps without collectives are omitted."""
    first = max(0, shift)
    stop = min(len(reference_s), len(ends_s) + shift)
    return _unusual_s(ends_s[first - shift : stop - shift] - reference_s[first:stop])


def _unusual_s(differences_s: Floats) -> Floats:
    known_s = differences_s[np.isfinite(differences_s)]
    return np.asarray(np.abs(known_s - np.median(known_s))) if len(known_s) else known_s


def _renumbered(profile: RankProfile, shift: int) -> RankProfile:
    if shift == 0:
        return profile
    return replace(profile, steps=tuple(replace(step, number=step.number + shift) for step in profile.steps))
