"""Variants of one trace: some operations of some ranks take what they took, all others what is ideal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.engines.replay import Timing
from simdist.whatif.ideal import GAPS, Ideal, Kind

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a variant keeps as it was: operations of these kinds on these ranks; None stands for all."""

    kinds: frozenset[Kind] | None = None
    ranks: frozenset[int] | None = None


@final
class Variants:
    """Hands out the durations of variants to `simdist.engines.replay`."""

    def __init__(self, traced: Timing, ideal: Ideal, kept: Sequence[Kept]) -> None:
        """Blend the durations of a trace with its ideal ones, a column for each of `kept`."""
        self._traced = traced
        self._ideal = ideal
        self._masks = [_mask(kind, kept, traced.durations_s.shape[1]) for kind in ideal.kinds]
        self._gap_mask = self._masks[ideal.kinds.index(GAPS)] if GAPS in ideal.kinds else None

    def gap_s(self, index: int) -> Floats | None:
        """Return the gaps before an instance, broadcasting over `[world_size, n_variants]`."""
        if self._gap_mask is None:
            return None
        traced_s = self._traced.gap_s(index)
        if traced_s is None or not self._ideal.gap_differs[index]:
            return traced_s
        return np.where(self._gap_mask, traced_s, self._ideal.gap_s[index])

    def seconds(self, index: int) -> Floats:
        """Return the seconds of an instance, broadcasting over `[world_size, n_variants]`."""
        traced_s = self._traced.seconds(index)
        if not self._ideal.differs[index]:
            return traced_s
        mask = self._masks[self._ideal.kind_of[index]]
        return np.where(mask, traced_s, self._ideal.seconds[index])


def _mask(kind: Kind, kept: Sequence[Kept], world_size: int) -> NDArray[np.bool_]:
    """Return on which ranks each variant keeps a kind as it was, `[world_size, n_variants]`."""
    mask = np.zeros((world_size, len(kept)), dtype=np.bool_)
    for column, each in enumerate(kept):
        if each.kinds is None or kind in each.kinds:
            mask[slice(None) if each.ranks is None else sorted(each.ranks), column] = True
    return mask
