"""Time divided into phases. Each instant belongs to exactly one, so the phases add up to the total time.

Spans of phases are laid over a base of phases, one after the other. The topmost one counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.kineto.columns import Floats


class StepPhase(IntEnum):
    """A phase of a step on a rank's device; see `RankStep`."""

    INPUT, FORWARD, HOST, BACKWARD, WAIT, OPTIMIZE, SHARDING = range(7)


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase from one instant to another."""

    start_s: float
    end_s: float
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Phases:
    """The phase of each instant.

    Args:
        edges_s: Where pieces begin and end, `[n + 1]`.
        phase: Phase of each piece, `[n]`.
        spent_s: Seconds of each phase before each edge, `[n_phases, n + 1]`.
    """

    edges_s: Floats
    phase: NDArray[np.int8]
    spent_s: Floats

    def before(self, phase: IntEnum, times_s: Floats) -> Floats:
        """Return the total duration of a phase before some instants."""
        spent_s: Floats = np.interp(times_s, self.edges_s, self.spent_s[phase])
        return spent_s

    def at(self, times_s: Floats) -> NDArray[np.int8]:
        """Return the phases of some instants."""
        piece = np.searchsorted(self.edges_s, times_s, side="right") - 1
        return self.phase[np.clip(piece, 0, len(self.phase) - 1)]


def overlaid(edges_s: Floats, base: NDArray[np.int8], spans: Iterable[PhaseSpan]) -> Phases:
    """Lay spans over a base, the last on top; parts outside of the base are cut off.

    Args:
        edges_s: Edges of the pieces of the base, ascending, `[n + 1]`.
        base: The phase of each piece, `[n]`.
        spans: The spans, in the order in which they are laid.

    Example:
        >>> base = np.array([StepPhase.FORWARD], np.int8)
        >>> spans = [PhaseSpan(2.0, 5.0, StepPhase.HOST), PhaseSpan(4.0, 6.0, StepPhase.WAIT)]
        >>> phases = overlaid(np.array([0.0, 10.0]), base, spans)
        >>> phases.spent_s[:, -1].tolist()
        [0.0, 6.0, 2.0, 0.0, 2.0, 0.0, 0.0]
    """
    kept = [span for span in spans if span.start_s < span.end_s]
    borders_s = np.clip([[span.start_s, span.end_s] for span in kept], edges_s[0], edges_s[-1]).reshape(-1, 2)
    cuts_s = np.unique(np.concatenate([edges_s, borders_s.ravel()]))
    pieces = np.searchsorted(edges_s, cuts_s[:-1], side="right") - 1
    phase = base[np.clip(pieces, 0, len(base) - 1)]
    for span, (first, last) in zip(kept, np.searchsorted(cuts_s, borders_s).tolist(), strict=True):
        phase[first:last] = span.phase
    return cut(cuts_s, phase, len(StepPhase))


def cut(edges_s: Floats, phase: NDArray[np.int8], n_phases: int) -> Phases:
    """Return the phase of each piece, `[n]` for `[n + 1]` edges."""
    spent_s = np.zeros((n_phases, len(edges_s)))
    lengths_s = np.diff(edges_s)
    for each in range(n_phases):
        np.cumsum(np.where(phase == each, lengths_s, 0.0), out=spent_s[each, 1:])
    return Phases(edges_s, phase, spent_s)
