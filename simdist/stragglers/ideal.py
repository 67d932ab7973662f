"""Times of each operation without stragglers.

The ideal duration of an operation is the median of the same operation over all ranks and steps. So a job in which all
ranks are equally slow has no stragglers. The lower of two middle values counts.

Operations are the same if their kind, buffers and group are equal. Buffers used in rotation count separately.

Source:
    Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI 2025, arXiv 2505.05713,
    with its analyzer, github.com/ByteDance-Seed/StragglerAnalysis. Two things differ. For computing they take the mean,
    because sequences give some ranks too much work and others too little. In data-parallel training, all ranks have
    equal work, and no other rank could take over the excess of a slow device. A pause and a slow device cost the same
    here. They also ignore the time between operations, which is a separate kind here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.engines.replay import Timing
from simdist.plan import Copy, Op, Plan, Save, lane_of, occurrences
from simdist.plan.text import op_name

_Floats: TypeAlias = NDArray[np.float64]
Cause: TypeAlias = Literal["host", "compute", "io", "communication"]

# Durations are differences of times.
_ROUNDING = 1e-9
_ROUNDING_S = 1e-12

CHANNELS: tuple[Cause, ...] = ("host", "compute", "io", "communication")


@dataclass(frozen=True, slots=True)
class Contributor:
    """Source of lost time: a kind of operation, and the part of the machine that it occupies."""

    name: str
    channel: Cause


#: Time that a trace of real machines leaves unexplained: launching, and all else that is not an operation of the plan.
_GAPS = Contributor("between operations", "host")


@dataclass(frozen=True)
class Ideal:
    """The ideal durations of a trace.

    Args:
        kinds: Kinds of operations; `_GAPS` is last if there are gaps.
        kind_of: Index of the kind of each instance, int64 `[n_instances]`.
        seconds: Ideal seconds of each instance, float64 `[n_instances]`.
        gap_s: Ideal gap before each instance, float64 `[n_instances]`.
        differs: Whether the seconds on some rank differ from the ideal, bool `[n_instances]`. False outside the
            analysed steps, where nothing is made ideal. Rounding differences stay.
        gap_differs: The same for the gaps.
        rank_differs: Whether a rank has other seconds or gaps than the ideal where some rank's differ, bool
            `[world_size]`. Alone as traced, a rank that does not is like all ranks at the ideal.
    """

    kinds: tuple[Contributor, ...]
    kind_of: NDArray[np.int64]
    seconds: _Floats
    gap_s: _Floats
    differs: NDArray[np.bool_]
    gap_differs: NDArray[np.bool_]
    rank_differs: NDArray[np.bool_]


def ideal(plan: Plan, traced: Timing, *, first_step: int = 0) -> Ideal:
    """Return the ideal durations of a trace from `first_step` on."""
    n = plan.n_instances
    found = Ideal(
        kinds=_kinds(plan, has_gaps=traced.gaps_s is not None),
        kind_of=np.zeros(n, dtype=np.int64),
        seconds=np.zeros(n),
        gap_s=np.zeros(n),
        differs=np.zeros(n, dtype=np.bool_),
        gap_differs=np.zeros(n, dtype=np.bool_),
        rank_differs=np.zeros(plan.world_size, dtype=np.bool_),
    )
    for each in occurrences(plan):
        found.kind_of[each.rows] = found.kinds.index(_kind(each.op))
    for rows, _ in _same_operations(plan, first_step):
        _set_typical(traced.durations_s, rows, found.seconds, found.differs, found.rank_differs)
        if traced.gaps_s is not None:
            _set_typical(traced.gaps_s, rows, found.gap_s, found.gap_differs, found.rank_differs)
    return found


def _set_typical(
    traced_s: _Floats,
    rows: NDArray[np.int64],
    ideal_s: _Floats,
    differs: NDArray[np.bool_],
    rank_differs: NDArray[np.bool_],
) -> None:
    """Write the typical value of some rows. Mark rows that differ on some rank by more than rounding, and its ranks."""
    values = traced_s[rows]
    typical_s = float(_median(values.ravel()))
    ideal_s[rows] = typical_s
    differs[rows] = (np.abs(values - typical_s) > _ROUNDING * typical_s + _ROUNDING_S).any(axis=1)
    rank_differs |= (values[differs[rows]] != typical_s).any(axis=0)


def _median(values: _Floats) -> _Floats:
    """Return the median along the first axis, the lower one of two."""
    middle = (len(values) - 1) // 2
    return np.asarray(np.partition(values, middle, axis=0)[middle])


def persistent(plan: Plan, traced: Timing, *, first_step: int = 0) -> Timing:
    """Return the durations of a job in which each rank repeats its median step, from `first_step` on."""
    return _levelled(plan, traced, first_step, lambda values: _median(values)[np.newaxis])


def shuffled(plan: Plan, traced: Timing, rng: np.random.Generator, *, first_step: int = 0) -> Timing:
    """Return the durations of a job in which ranks are shuffled in each step, from `first_step` on."""
    durations_s = traced.durations_s.copy()
    gaps_s = None if traced.gaps_s is None else traced.gaps_s.copy()
    places = [rng.permutation(plan.world_size) for _ in range(plan.n_steps)]
    for each in occurrences(plan):
        for row, step in zip(each.rows.tolist(), each.steps, strict=True):
            if step >= first_step:
                durations_s[row] = durations_s[row][places[step]]
                if gaps_s is not None:
                    gaps_s[row] = gaps_s[row][places[step]]
    return Timing(gaps_s, durations_s)


def simultaneous(plan: Plan, traced: Timing, *, first_step: int = 0) -> Timing:
    """Return the durations of a job in which all ranks repeat the median rank, from `first_step` on."""
    return _levelled(plan, traced, first_step, lambda values: _median(values.T)[:, np.newaxis])


def _levelled(plan: Plan, traced: Timing, first_step: int, level: Callable[[_Floats], _Floats]) -> Timing:
    """Replace the values of each operation, `[n_occurrences, world_size]`, by values that broadcast over them."""
    durations_s = traced.durations_s.copy()
    gaps_s = None if traced.gaps_s is None else traced.gaps_s.copy()
    for rows, _ in _same_operations(plan, first_step):
        for seconds in (durations_s, gaps_s):
            if seconds is not None:
                seconds[rows] = level(seconds[rows])
    return Timing(gaps_s, durations_s)


def _same_operations(plan: Plan, first_step: int) -> Iterator[tuple[NDArray[np.int64], Op]]:
    """Yield each operation with all its rows from a step on, across bodies.

    Operations of some ranks only, such as writing a checkpoint, have no typical duration and are omitted.
    """
    rows_of: dict[Op, list[NDArray[np.int64]]] = {}
    for each in occurrences(plan):
        if isinstance(each.op, Copy | Save) and each.op.by.size > 1:
            continue
        rows_of.setdefault(each.op, []).append(each.rows[each.steps >= first_step])
    for op, parts in rows_of.items():
        rows = np.concatenate(parts)
        if len(rows):
            yield rows, op


def _kinds(plan: Plan, *, has_gaps: bool) -> tuple[Contributor, ...]:
    """Return the kinds of a plan in the order of the program."""
    found: Sequence[Contributor] = [_kind(op) for body in plan.bodies for op in body]
    return tuple(dict.fromkeys([*found, _GAPS] if has_gaps else found))


def _kind(op: Op) -> Contributor:
    match lane_of(op).kind:
        case "comm":
            return Contributor(op_name(op), "communication")
        case "save":
            return Contributor(op_name(op), "io")
        case kind:
            return Contributor(op_name(op), kind)


@dataclass(frozen=True, slots=True)
class Kept:
    """Operations that a variant keeps as traced: those of these kinds on these ranks; None means all."""

    kinds: frozenset[Contributor] | None = None
    ranks: frozenset[int] | None = None


@final
class Variants:
    """Supplies the durations of variants to `simdist.engines.replay`."""

    def __init__(self, traced: Timing, ideal: Ideal, kept: Sequence[Kept]) -> None:
        """Combine the durations of a trace with its ideal ones, with a column for each of `kept`."""
        self._traced = traced
        self._ideal = ideal
        self._masks = [_mask(kind, kept, traced.durations_s.shape[1]) for kind in ideal.kinds]
        self._gap_mask = self._masks[ideal.kinds.index(_GAPS)] if _GAPS in ideal.kinds else None

    def gap_s(self, index: int) -> _Floats | None:
        """Return the gaps before an instance, broadcasting over `[world_size, n_variants]`."""
        if self._gap_mask is None:
            return None
        traced_s = self._traced.gap_s(index)
        if traced_s is None or not self._ideal.gap_differs[index]:
            return traced_s
        return np.where(self._gap_mask, traced_s, self._ideal.gap_s[index])

    def seconds(self, index: int) -> _Floats:
        """Return the seconds of an instance, broadcasting over `[world_size, n_variants]`."""
        traced_s = self._traced.seconds(index)
        if not self._ideal.differs[index]:
            return traced_s
        return np.where(self._masks[self._ideal.kind_of[index]], traced_s, self._ideal.seconds[index])


def _mask(kind: Contributor, kept: Sequence[Kept], world_size: int) -> NDArray[np.bool_]:
    """Return the ranks on which each variant keeps a kind as traced, `[world_size, n_variants]`."""
    mask = np.zeros((world_size, len(kept)), dtype=np.bool_)
    for column, each in enumerate(kept):
        if each.kinds is None or kind in each.kinds:
            mask[slice(None) if each.ranks is None else sorted(each.ranks), column] = True
    return mask
