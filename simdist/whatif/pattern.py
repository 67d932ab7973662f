"""Is it always the same rank, or now this one and now that one?

Three replays tell, of which each takes part of the loss away. What is lost, T - T_ideal, is split into

    persistent     if in every step each operation of a rank took what it takes that rank in its median step
    simultaneous   if on every rank each operation of a step took what it takes the median rank in that step
    transient      the rest: single ranks in single steps

A pause in less than half of the steps leaves no trace in a rank's median step, nor a slow rank in the median rank.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from simdist.whatif.slowdown import Slowdown

Shape: TypeAlias = Literal["even", "persistent", "transient", "simultaneous", "unknown"]

NOTABLE = 1.03  # slowdown from which the analyzer of Lin et al. asks for its causes (its decompose_threshold)


@dataclass(frozen=True, slots=True)
class Pattern:
    """How the loss is spread over ranks and steps.

    Args:
        shape: `even`: hardly anything is lost. `persistent`: mostly by the same ranks in every step. `transient`:
            mostly by some ranks in some steps. `simultaneous`: mostly by all ranks in the same steps. `unknown`: one
            step or one rank cannot tell.
        persistent: Share of the loss; NaN if there is none, or it is unknown.
        transient: Likewise.
        simultaneous: Likewise.
    """

    shape: Shape
    persistent: float
    transient: float
    simultaneous: float


def pattern(found: Slowdown) -> Pattern:
    """Tell persistent from transient stragglers."""
    if found.slowdown < NOTABLE:
        return Pattern("even", np.nan, np.nan, np.nan)
    if found.n_steps < 2 or found.world_size < 2:
        return Pattern("unknown", np.nan, np.nan, np.nan)
    lost_s = found.replayed_s - found.ideal_s
    persistent = _share((found.persistent_s - found.ideal_s) / lost_s)
    simultaneous = _share((found.simultaneous_s - found.ideal_s) / lost_s)
    both = max(1.0, persistent + simultaneous)  # the two replays may overlap: what is lost is lost once
    persistent, simultaneous = persistent / both, simultaneous / both
    transient = _share(1 - persistent - simultaneous)
    shares: dict[Shape, float] = {"persistent": persistent, "transient": transient, "simultaneous": simultaneous}
    return Pattern(max(shares, key=lambda shape: shares[shape]), persistent, transient, simultaneous)


def _share(share: float) -> float:
    return min(max(share, 0.0), 1.0)
