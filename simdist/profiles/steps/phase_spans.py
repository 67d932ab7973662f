"""Time, cut into phases: every instant belongs to exactly one, so that phases add up to the time that they share.

Phases are painted one over the other, each a `Stroke` on a ground; what is painted last is seen.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.kineto.timeline import Floats


class Phase(IntEnum):
    """What a rank's device spends time on; `RankStep` says what each means."""

    INPUT = 0
    FORWARD = 1
    HOST = 2
    BACKWARD = 3
    WAIT = 4
    OPTIMIZE = 5


@dataclass(frozen=True, slots=True)
class Stroke:
    """A phase from one instant to another."""

    start_s: float
    end_s: float
    phase: Phase


@dataclass(frozen=True, slots=True)
class Phases:
    """Which phase each instant belongs to.

    Args:
        edges_s: Where pieces begin and end, `[n + 1]`.
        phase: Of each piece, `[n]`.
        spent_s: Of each phase before each edge, `[6, n + 1]`.
    """

    edges_s: Floats
    phase: NDArray[np.int8]
    spent_s: Floats

    def before(self, phase: Phase, times_s: Floats) -> Floats:
        """Return how long a phase lasted altogether before some instants."""
        spent_s: Floats = np.interp(times_s, self.edges_s, self.spent_s[phase])
        return spent_s

    def at(self, times_s: Floats) -> NDArray[np.int8]:
        """Return the phase that some instants belong to."""
        piece = np.searchsorted(self.edges_s, times_s, side="right") - 1
        return self.phase[np.clip(piece, 0, len(self.phase) - 1)]


def paint(edges_s: Floats, ground: NDArray[np.int8], strokes: Iterable[Stroke]) -> Phases:
    """Paint strokes over a ground, the last on top; what lies outside of the ground is cut off.

    Args:
        edges_s: Where pieces of the ground begin and end, ascending, `[n + 1]`.
        ground: The phase of each piece, `[n]`.
        strokes: What to paint, in this order.

    Example:
        >>> ground = np.array([Phase.FORWARD], np.int8)
        >>> phases = paint(np.array([0.0, 10.0]), ground, [Stroke(2.0, 5.0, Phase.HOST), Stroke(4.0, 6.0, Phase.WAIT)])
        >>> phases.spent_s[:, -1].tolist()
        [0.0, 6.0, 2.0, 0.0, 2.0, 0.0]
    """
    kept = [stroke for stroke in strokes if stroke.start_s < stroke.end_s]
    borders_s = np.clip([[stroke.start_s, stroke.end_s] for stroke in kept], edges_s[0], edges_s[-1]).reshape(-1, 2)
    cuts_s = np.unique(np.concatenate([edges_s, borders_s.ravel()]))
    pieces = np.searchsorted(edges_s, cuts_s[:-1], side="right") - 1
    phase = ground[np.clip(pieces, 0, len(ground) - 1)]
    for stroke, (first, last) in zip(kept, np.searchsorted(cuts_s, borders_s).tolist(), strict=True):
        phase[first:last] = stroke.phase
    spent_s = np.zeros((len(Phase), len(cuts_s)))
    lengths_s = np.diff(cuts_s)
    for each in Phase:
        np.cumsum(np.where(phase == each, lengths_s, 0.0), out=spent_s[each, 1:])
    return Phases(cuts_s, phase, spent_s)
