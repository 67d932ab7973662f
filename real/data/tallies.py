"""Counts of a rank's reads per load, written immediately, so that a killed rank leaves its counts so far.

The file is a .npy of int64 `[n_loads, 2 * len(LEVELS) + 2]`, mapped into memory: samples from each level, bytes from
each level, samples from another level than planned, and samples for which memory had no room.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from real.collectives.byte_transfer import gather_to_first
from real.data.loader import LoadCounts
from real.recording.recorder import memmap
from simdist.arrays import read_array
from simdist.plan import LEVELS, Plan
from simdist.traces.reads import Reads

_N = len(LEVELS)
_SAMPLES = slice(0, _N)
_NBYTES = slice(_N, 2 * _N)
_ELSEWHERE = 2 * _N
_NOT_KEPT = 2 * _N + 1
_N_COLUMNS = 2 * _N + 2


class Tally:
    """Counts the reads of one rank.

    Args:
        n_loads: Number of loads of the plan.
        path: The file to write; None keeps counts in memory.

    Raises:
        RunError: The file cannot be written.
    """

    def __init__(self, n_loads: int, path: Path | None = None) -> None:
        zeros = np.zeros((n_loads, _N_COLUMNS), dtype=np.int64)
        self.rows: NDArray[np.int64] = zeros if path is None else memmap(path, zeros)

    def note(self, number: int, counts: LoadCounts) -> None:
        """Record a load."""
        row = self.rows[number]
        row[_SAMPLES] = counts.n_samples
        row[_NBYTES] = counts.nbytes
        row[_ELSEWHERE] = counts.n_elsewhere
        row[_NOT_KEPT] = counts.n_not_kept


def tally_path(parts: Path, rank: int) -> Path:
    """Return the file for the counts of a rank."""
    return parts / f"reads-{rank:05d}.npy"


def gather_tallies(tally: Tally) -> NDArray[np.int64] | None:
    """Combine the counts of all ranks; all take part, rank 0 gets int64 `[world_size, n_loads, n_columns]`."""
    rows = list(gather_to_first(torch.from_numpy(np.array(tally.rows))))
    return torch.stack(rows).numpy() if rows else None


def salvage_tallies(parts: Path, plan: Plan) -> NDArray[np.int64] | None:
    """Return the counts of a failed run's ranks, with 0 for loads that did not run; None if there are none."""
    n_loads = sum(1 for _ in plan.loads())
    rows = np.zeros((plan.world_size, n_loads, _N_COLUMNS), dtype=np.int64)
    for rank in range(plan.world_size):
        with suppress(OSError, EOFError, ValueError):  # missing or incomplete
            rows[rank] = read_array(tally_path(parts, rank), dtype=np.int64, shape=rows.shape[1:])
    return rows if rows.any() else None


def reads_of(rows: NDArray[np.int64], plan: Plan) -> Reads:
    """Return the counts of all ranks in the form of `simdist.traces.reads`."""
    by_load = rows.swapaxes(0, 1)
    n_samples, nbytes = (np.ascontiguousarray(by_load[:, :, columns]) for columns in (_SAMPLES, _NBYTES))
    return Reads(n_samples, nbytes, plan.digest())


def totals(rows: NDArray[np.int64]) -> Mapping[str, int]:
    """Return the sums of the counts of all ranks, by name.

    Columns:
        samples_from_memory, samples_from_peer, samples_from_disk, samples_from_storage (int): Samples from each level.
        bytes_from_memory, bytes_from_peer, bytes_from_disk, bytes_from_storage (int): Their bytes: decoded, or of
            files.
        samples_not_as_planned (int): Samples from another level than planned.
        samples_not_kept (int): Samples that memory had no room for.
    """
    sums = rows.sum(axis=(0, 1)).tolist()
    samples = {f"samples_from_{name}": sums[at] for at, name in enumerate(LEVELS)}
    nbytes = {f"bytes_from_{name}": sums[_N + at] for at, name in enumerate(LEVELS)}
    return {**samples, **nbytes, "samples_not_as_planned": sums[_ELSEWHERE], "samples_not_kept": sums[_NOT_KEPT]}
