"""The verdict of an analysis: the ranks that hold the job up, always or at times, and whether another schedule helps.

Three replays show whether it is always the same ranks. Each removes part of the loss. The loss, T - T_ideal, has
three parts:

    persistent     if each operation of a rank always took as long as in the rank's median step
    simultaneous   if each operation of a step took as long on all ranks as on the step's median rank
    transient      the rest: single ranks in single steps

A pause in less than half of the steps does not affect a rank's median step, and a slow rank does not affect the median
rank. The medians of equal ranks differ by chance, and the slowest rank determines the time. So the persistent share is
the excess over the same replay with steps shuffled among ranks. It is 0 unless it exceeds every shuffle.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import numpy as np

from simdist.plan.text import ranks_named
from simdist.settings.units import format_share
from simdist.stragglers.gains import Gain, Gains
from simdist.stragglers.slowdown import Slowdown
from simdist.studies.resampling import WORTHWHILE

_Shape: TypeAlias = Literal["even", "persistent", "transient", "simultaneous", "unknown"]

_NOTABLE_SLOWDOWN = 1.03  # from here on, the analyzer of Lin et al. looks for causes (its decompose_threshold)
_NOTABLE_SHARE = 0.02  # of the loss


@dataclass(frozen=True, slots=True)
class Pattern:
    """How the loss is spread over ranks and steps.

    Args:
        shape (str): The largest part: `persistent`, `transient` or `simultaneous`. `even` if hardly anything is lost,
            `unknown` with one step or one rank.
        persistent, transient, simultaneous (float or null): Share of the loss by the same ranks in every step, by
            single ranks in single steps, by all ranks in the same steps.
    """

    shape: _Shape
    persistent: float
    transient: float
    simultaneous: float


def find_pattern(found: Slowdown) -> Pattern:
    """Distinguish persistent from transient stragglers."""
    if found.slowdown < _NOTABLE_SLOWDOWN:
        return Pattern("even", np.nan, np.nan, np.nan)
    if found.n_steps < 2 or found.world_size < 2:
        return Pattern("unknown", np.nan, np.nan, np.nan)
    lost_s = found.replayed_s - found.ideal_s
    persistent = _share((found.persistent_s - found.persistent_by_chance_s) / lost_s)
    simultaneous = _share((found.simultaneous_s - found.ideal_s) / lost_s)
    both = max(1.0, persistent + simultaneous)  # the two replays may overlap, but a loss counts once
    persistent = persistent / both
    simultaneous = simultaneous / both
    transient = _share(1 - persistent - simultaneous)
    shares: dict[_Shape, float] = {"persistent": persistent, "transient": transient, "simultaneous": simultaneous}
    return Pattern(max(shares, key=lambda shape: shares[shape]), persistent, transient, simultaneous)


def _share(share: float) -> float:
    return min(max(share, 0.0), 1.0)


def spread_sentence(found: Slowdown, spread: Pattern, *, late_on: str | None = None) -> str:
    """State in a sentence whether stragglers are persistent or transient, and where they are late.

    Args:
        found: The analysis.
        spread: Its pattern.
        late_on: The channel on which they are late, if known from a source other than the trace.
    """
    where = f"mostly on {_channel_text(late_on or found.channels[0].name)}"
    ranks = ranks_named(found.slowest_ranks)
    always = "the same ranks in every step (persistent)"
    sometimes = "now one rank, now another (transient)"
    together = "all ranks at once in some steps (simultaneous)"
    shares = {always: spread.persistent, sometimes: spread.transient, together: spread.simultaneous}
    match spread.shape:
        case "even":
            return "hardly any: the job is about as fast as it would be without"
        case "persistent" | "transient" | "simultaneous":
            ordered = sorted(shares, key=lambda what: -shares[what])
            told = [f"{format_share(shares[what])} by {what}" for what in ordered if shares[what] > _NOTABLE_SHARE]
            first = f"; first of all by {ranks}" if spread.shape == "persistent" else ""
            return f"of the loss {', '.join(told)}{first}; {where}"
        case "unknown":
            return f"{ranks} most of all; one step or one rank cannot tell whether it is always so; {where}"
        case unknown:
            assert_never(unknown)


def _channel_text(channel: str) -> str:
    return {"host": "the host", "compute": "the device", "io": "input and output"}.get(channel, channel)


def verdict_sentence(found: Slowdown, spread: Pattern, compared: Gains) -> str:
    """State in a sentence the fastest schedule for the job and one with a certain gain, or why there is none."""
    fastest = compared.fastest
    best = compared.best
    if compared.problem:
        return f"no schedule is recommended: {compared.problem}"
    if fastest is None:
        return f"stay with {compared.baseline}: no schedule is faster; {_reason(found, spread)}"
    first = f"fastest: {fastest.schedule}, {fastest.speedup:.2f} times as fast as {compared.baseline}"
    if fastest is best:
        return first + (f" ({interval_text(best)})" if best.interval else "")
    doubt = fastest.problem or f"{interval_text(fastest)}{_from_what(compared)}"
    if best:
        interval = f" ({interval_text(best)}{_from_what(compared)})" if best.interval else ""
        return f"{first}, but not surely ({doubt}); surely faster: {best.schedule}, {best.speedup:.2f} times{interval}"
    if (compared.recording or fastest.problem) and fastest.speedup >= WORTHWHILE:
        return f"stay with {compared.baseline} until something is surely faster; {first}, but not surely ({doubt})"
    return f"stay with {compared.baseline}: no schedule is surely faster; {_reason(found, spread)}"


def _from_what(compared: Gains) -> str:
    return f" from {compared.recording.n_steps:,} recorded steps" if compared.recording else ""


def _reason(found: Slowdown, spread: Pattern) -> str:
    match spread.shape:
        case "persistent":
            who = ranks_named(found.slowest_ranks)
            verb = "is" if len(found.slowest_ranks) == 1 else "are"
            return f"{who} {verb} late in every step, and an average over all ranks waits for that"
        case "simultaneous":
            return "all ranks are late in the same steps, so none could go on meanwhile"
        case "even":
            return "there are hardly any stragglers, and averaging less often saves too little communication"
        case "transient" | "unknown":
            return "what is saved by waiting less often is not more than what chance makes of it"
        case unknown:
            assert_never(unknown)


def interval_text(row: Gain) -> str:
    """Print the interval of a gain; nothing if the gain is not random."""
    return f"{row.interval[0]:.2f} to {row.interval[1]:.2f}" if row.interval else "too few" if row.problem else ""
