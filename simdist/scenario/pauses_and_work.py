"""Draw pauses, and the work of micro-batches whose sequences differ in length.

As in `simdist.scenario.sampling`, each number follows from its place. The interval after a pause is drawn in the step
of that pause, so that a longer run, or one drawn in other chunks, has the same pauses.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.scenario.disturbances import Balance, Pauses, UnevenWork, read_lengths
from simdist.scenario.other_ranks import PlayedRanks, played_by_seed

_Floats: TypeAlias = NDArray[np.float64]
_Wholes: TypeAlias = NDArray[np.int64]

_FIRST, _INTERVAL, _LENGTH, _COVERED = range(4)  # lanes of the numbers of a pause


class Numbers(Protocol):
    """The uniform numbers of one disturbance."""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        ...

    @property
    def ranks(self) -> slice | _Wholes:
        """Ranks that the disturbance selects."""
        ...

    def closed(self, start: int, stop: int, *, lane: int = 0) -> _Floats:
        """Return numbers in [0, 1), `[n_steps, n_ranks, n_seeds]`."""
        ...


@final
class Pausing:
    """The pauses of all ranks and seeds, walked on from step 0."""

    def __init__(self, pauses: Pauses, numbers: Numbers) -> None:
        """Start before step 0."""
        self._pauses = pauses
        self._numbers = numbers
        self._next: _Wholes | None = None

    def delays(self, start: int, stop: int) -> _Floats:
        """Return the seconds of the next steps, `[n_steps, n_ranks, n_seeds]`."""
        pausing = self._walk(start, stop)
        lasts_s = self._seconds(self._pauses.delay_s, start, stop, _LENGTH)
        covered_s = self._seconds(self._pauses.covered_s, start, stop, _COVERED)
        return np.where(pausing, np.maximum(lasts_s - covered_s, 0.0), 0.0)

    def _walk(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which ranks pause in which step."""
        intervals = _whole(self._pauses.every, self._numbers.closed(start, stop, lane=_INTERVAL))
        following = self._first() if self._next is None else self._next
        pausing = np.empty(intervals.shape, dtype=np.bool_)
        for step in range(start, stop):
            is_due = following == step
            pausing[step - start] = is_due
            following = np.where(is_due, step + intervals[step - start], following)
        self._next = following
        return pausing

    def _first(self) -> _Wholes:
        """Return the step of the first pause, `[n_ranks, n_seeds]`."""
        drawn = self._numbers.closed(0, 1, lane=_FIRST)[0]
        if self._pauses.first is not None:
            return _whole(self._pauses.first, drawn)
        return _remaining(self._pauses.every, drawn)

    def _seconds(self, ends_s: tuple[float, float], start: int, stop: int, lane: int) -> _Floats:
        low, high = ends_s
        if low == high:
            return np.full((1, 1, 1), low)
        return low + (high - low) * self._numbers.closed(start, stop, lane=lane)


@final
class Working:
    """The work of the micro-batches of all ranks and seeds."""

    def __init__(
        self, work: UnevenWork, numbers: Numbers, compute_s: _Floats, micro_batches: int, seeds: Sequence[int]
    ) -> None:
        """Read the lengths.

        Args:
            work: Its settings.
            numbers: Its numbers.
            compute_s: Forward and backward seconds of a step, all of the shortest length, of each selected rank.
            micro_batches: Passes of a step.
            seeds: Of the runs.
        """
        self._work = work
        self._numbers = numbers
        self._pass_s = compute_s[:, np.newaxis] / micro_batches
        self._micro_batches = micro_batches
        self._table = read_lengths(work.file) if work.file else None
        self._played: list[PlayedRanks] | None = None
        if self._table is not None and work.order == "recorded":
            self._played = played_by_seed(self._table, seeds, numbers.world_size, rows_per_step=micro_batches)

    def delays(self, start: int, stop: int) -> _Floats:
        """Return what each micro-batch takes longer, seconds `[n_steps, n_micro_batches, n_ranks, n_seeds]`."""
        factors = np.stack([self._factor(start, stop, number) for number in range(self._micro_batches)], axis=1)
        if self._work.balance is not None:
            factors = dealt(factors, self._work.balance)
        return (factors - 1.0) * self._pass_s

    def _factor(self, start: int, stop: int, number: int) -> _Floats:
        """Return how many times as long as the shortest one this micro-batch of each step takes."""
        relative = self._lengths(start, stop, number) / self._shortest()
        quadratic = self._work.quadratic
        return (1.0 - quadratic) * relative + quadratic * relative * relative

    def _shortest(self) -> float:
        if self._table is not None:
            return float(self._table.min())
        assert self._work.lengths is not None
        return float(self._work.lengths[0])

    def _lengths(self, start: int, stop: int, number: int) -> _Floats:
        if self._table is not None and self._work.order == "recorded":
            rows = np.arange(start, stop) * self._micro_batches + number
            if len(rows) and rows[-1] >= len(self._table):
                raise ScenarioError(
                    f"{self._work.file} ends before step {stop}: record {self._micro_batches} rows for each step, or "
                    f"write order: drawn"
                )
            if self._played is None:
                return self._table[rows][:, self._numbers.ranks, np.newaxis]
            n_steps = len(self._table) // self._micro_batches
            steps = np.arange(start, stop)
            of_seeds = [
                self._table[each.rows(steps, n_steps) * self._micro_batches + number, each.recorded]
                for each in self._played
            ]
            return np.stack(of_seeds, axis=2)[:, self._numbers.ranks]
        drawn = self._numbers.closed(start, stop, lane=number)
        if self._table is not None:
            return self._table.ravel()[_whole((0, self._table.size - 1), drawn)]
        assert self._work.lengths is not None
        return _whole(self._work.lengths, drawn).astype(np.float64)


def dealt(work: _Floats, balance: Balance) -> _Floats:
    """Return the work of micro-batches after it was dealt again within each step, the most work first.

    sorted        each rank orders its own
    round_robin   all work of the step, to the ranks in turn: each micro-batch has work of similar size on all ranks
    greedy        likewise, and in each micro-batch the rank with the least work so far takes the most

    Args:
        work: `[n_steps, n_micro_batches, n_ranks, n_seeds]`.
        balance: Which of these.
    """
    if balance == "sorted":
        return -np.sort(-work, axis=1)
    n_steps, _, _, n_seeds = work.shape
    in_turn = -np.sort(-work.reshape(n_steps, -1, n_seeds), axis=1).reshape(work.shape)
    if balance == "round_robin":
        return in_turn
    found = np.empty_like(work)
    so_far = np.zeros_like(work[:, 0])
    for micro_batch in range(work.shape[1]):
        takers = np.argsort(so_far, axis=1, kind="stable")
        np.put_along_axis(found[:, micro_batch], takers, in_turn[:, micro_batch], axis=1)
        so_far += found[:, micro_batch]
    return found


def _whole(ends: tuple[int, int], drawn: _Floats) -> _Wholes:
    """Return a whole number from `ends[0]` to `ends[1]` for each number in [0, 1)."""
    low, high = ends
    return low + np.floor(drawn * (high - low + 1)).astype(np.int64)


def _remaining(every: tuple[int, int], drawn: _Floats) -> _Wholes:
    """Return the steps until the next pause, seen from a random moment: P(k) = P(interval > k) / mean interval."""
    low, high = every
    n_longer = np.clip(high - np.arange(high), 0, high - low + 1)
    ends = np.cumsum(n_longer)
    return np.asarray(np.searchsorted(ends, np.floor(drawn * ends[-1]), side="right"), dtype=np.int64)
