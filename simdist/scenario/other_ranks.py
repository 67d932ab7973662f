"""Recordings of another number of ranks than a run has: the run takes whole recorded ranks.

A run of more ranks has the recording several times: with M recorded ranks, ranks 0 to M - 1 are the first copy, ranks M
to 2 M - 1 the second. The recorded ranks of a copy keep their order and play the same recorded step, so what makes
several of them late at once still does. The first copy plays the recorded steps in their order. The others begin at
another step, drawn by the seed, and play the first step after the last one: ranks of different copies are independent,
and would otherwise be late in the same steps. If the last copy is incomplete, the seed draws which ranks it has. So it
does for a run of fewer ranks than were recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

_KEY = 2**64 - 1  # as of blocks of recorded steps: what was recorded together stays together
_SHIFTS = 1  # in the counter, which is 0 for blocks
_RANKS = 2


@dataclass(frozen=True, slots=True)
class PlayedRanks:
    """The recorded rank that each rank of a run plays.

    Args:
        recorded: Number of the recorded rank, `[world_size]`.
        copies: Number of the copy, `[world_size]`.
        shifts: Recorded step with which a copy begins, `[n_copies]`; 0 for the first.
    """

    recorded: NDArray[np.int64]
    copies: NDArray[np.int64]
    shifts: NDArray[np.int64]

    def rows(self, steps: NDArray[np.int64], n_steps: int) -> NDArray[np.int64]:
        """Return the recorded step that each rank plays in some steps, `[n_steps, world_size]`.

        Args:
            steps: Steps of the recording for the first copy.
            n_steps: Recorded steps.
        """
        rows = steps[:, np.newaxis] + self.shifts[self.copies]
        return np.where(self.copies > 0, rows % n_steps, rows)


def played_ranks(seed: int, n_steps: int, n_recorded: int, world_size: int) -> PlayedRanks:
    """Return the recorded ranks that the ranks of a run play.

    Args:
        seed: Of the run.
        n_steps: Recorded steps.
        n_recorded: Recorded ranks.
        world_size: Ranks of the run.
    """
    n_copies, n_left = divmod(world_size, n_recorded)
    every = np.arange(n_recorded)
    some = np.sort(np.argsort(_words(seed, _RANKS, n_recorded), kind="stable")[:n_left])
    copies = np.repeat(np.arange(n_copies + 1), [*[n_recorded] * n_copies, n_left])
    shifts = (_words(seed, _SHIFTS, n_copies + 1) % np.uint64(n_steps)).astype(np.int64)
    shifts[0] = 0
    return PlayedRanks(np.concatenate([np.tile(every, n_copies), some]), copies, shifts)


def played_by_seed(
    table: NDArray[np.float64], seeds: Sequence[int], world_size: int, *, rows_per_step: int = 1
) -> list[PlayedRanks] | None:
    """Return what the ranks of a run play with each seed; None if the recording has as many.

    Args:
        table: The recording, its last axis that of the ranks.
        seeds: Of the runs.
        world_size: Ranks of the run.
        rows_per_step: Rows of the recording that make a step.
    """
    if table.shape[-1] == world_size:
        return None
    n_steps = max(1, len(table) // rows_per_step)
    return [played_ranks(seed, n_steps, table.shape[-1], world_size) for seed in seeds]


def _words(seed: int, what: int, count: int) -> NDArray[np.uint64]:
    key = np.array([seed, _KEY], dtype=np.uint64)
    return Philox(key=key, counter=np.array([0, 0, 0, what], dtype=np.uint64)).random_raw(count)


def remark(name: str, n_recorded: int, world_size: int) -> str:
    """Say in a sentence what is done with a recording of another number of ranks."""
    told = f"{name} holds {n_recorded:,} ranks, the cluster has {world_size:,}"
    if n_recorded > world_size:
        return f"{told}: every seed draws which of them are played"
    again = f"ranks from {n_recorded:,} on play recorded ranks again, from a step that the seed draws"
    return f"{told}: {again}; ranks of different copies are independent"
