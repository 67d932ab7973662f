"""Counts of reads: samples and bytes per load, rank and level of storage.

The expected reads from the levels follow from the plan alone (`simdist.caching`). A real run counts its own reads. Both
are `Reads`, so subtraction finds a cache that deviated from the plan. Bytes are the transferred ones: those of the
stored file from disk and storage, those of the decoded sample from memories.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.arrays import MAX_ARRAY_NBYTES, Declared
from simdist.errors import TraceError
from simdist.plan import LEVELS, Plan
from simdist.settings.units import format_nbytes
from simdist.traces.trace import read_with_header, write_with_header

_FORMAT = "simdist-reads-1"
_ARRAYS = ("n_samples", "nbytes")
_WRITERS = "a real run with a data set writes one, `torchrun ... -m real RUN`"
_FROM_MEMORY = ("memory", "peer")
_COUNTED_NBYTES = 2**63  # int64


@dataclass(frozen=True)
class Reads:
    """Samples and bytes that each load of each rank took from each level.

    Args:
        n_samples: int64 `[n_loads, world_size, len(LEVELS)]`, 0 or more.
        nbytes: Bytes, of the same type and shape.
        digest: Digest of the plan that reads.
    """

    n_samples: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    digest: str

    def __post_init__(self) -> None:
        arrays = dict(zip(_ARRAYS, (self.n_samples, self.nbytes), strict=True))
        _check_declared({}, {name: Declared(array.dtype, array.shape) for name, array in arrays.items()})
        for name, array in arrays.items():
            wrong = np.argwhere(array < 0)
            if len(wrong):
                load, rank, level = wrong[0].tolist()
                where = f"load {load}, rank {rank}, from {LEVELS[level]}"
                raise TraceError(f"{name} is {array[load, rank, level]} at {where}; counts are 0 or more")

    def save(self, path: Path | str) -> None:
        """Write to an .npz file; equal reads give equal bytes.

        Columns:
            header (uint8 [length]): JSON as bytes: `format` (`simdist-reads-1`), `levels`, and the `digest` of the
                plan.
            n_samples, nbytes (int64 [loads, world_size, 4]): Samples from each level, and their bytes.
        """
        arrays = {"n_samples": self.n_samples, "nbytes": self.nbytes}
        write_with_header(path, {"format": _FORMAT, "levels": LEVELS, "digest": self.digest}, arrays)

    @classmethod
    def load(cls, path: Path | str) -> "Reads":
        """Read from an .npz file.

        Raises:
            TraceError: The file cannot be read, contains no reads, or is damaged.
        """
        header, (n_samples, nbytes) = read_with_header(
            path, _FORMAT, _ARRAYS, _check_declared, what="counts of reads", hint=_WRITERS
        )
        levels = header.get("levels")
        if levels != [*LEVELS]:
            raise TraceError(f"{path}: counts by the levels {levels}; they are {', '.join(LEVELS)}: {_WRITERS}")
        try:
            return cls(n_samples, nbytes, str(header.get("digest")))
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None

    def check(self, plan: Plan) -> None:
        """Refuse reads of another plan.

        Raises:
            TraceError: The reads belong to another plan, or to other loads or ranks.
        """
        if self.digest != plan.digest():
            raise TraceError(
                f"reads of another plan ({self.digest[:12]}); this one is {plan.name} ({plan.digest()[:12]})"
            )
        shape = (sum(1 for _ in plan.loads()), plan.world_size)
        if self.n_samples.shape[:2] != shape:
            raise TraceError(f"reads of {self.n_samples.shape[:2]} loads and ranks; plan {plan.name} has {shape}")


def _check_declared(header: dict[str, object], declared: Mapping[str, Declared]) -> dict[str, object]:
    """Refuse arrays that are not reads, and too large ones; their plan is checked after reading them."""
    for name, found in declared.items():
        if found.dtype != np.int64 or len(found.shape) != 3 or found.shape[2] != len(LEVELS):
            raise TraceError(
                f"{name} is {found.dtype} {found.shape}; reads are int64 (loads, ranks, {len(LEVELS)}), the last "
                f"for {', '.join(LEVELS)}"
            )
        if found.nbytes > MAX_ARRAY_NBYTES:
            raise TraceError(f"{name} is {found.shape}, {found.nbytes:,} bytes; write {MAX_ARRAY_NBYTES:,} or less")
    n_samples, nbytes = (declared[name].shape for name in _ARRAYS)
    if n_samples != nbytes:
        raise TraceError(f"n_samples is of shape {n_samples}, nbytes {nbytes}; write one")
    return header


def expected(plan: Plan) -> Reads:
    """Return the reads of a plan's loads without failures.

    Raises:
        TraceError: The plan has no data set, or may read more bytes than the counter can hold.
    """
    from simdist.caching import look_up

    dataset = plan.dataset
    if dataset is None:
        raise TraceError(f"plan {plan.name} has no data set, so no samples are counted")
    shape = (sum(1 for _ in plan.loads()), plan.world_size, len(LEVELS))
    n_reads = shape[0] * plan.world_size * dataset.batch_size
    if (most_nbytes := n_reads * max(*dataset.file_nbytes, dataset.sample_nbytes)) >= _COUNTED_NBYTES:
        counted = f"{format_nbytes(_COUNTED_NBYTES)} (2^63 B) can be counted"
        raise TraceError(f"plan {plan.name} reads up to {format_nbytes(most_nbytes)}; {counted}")
    n_samples = np.zeros(shape, dtype=np.int64)
    nbytes = np.zeros(shape, dtype=np.int64)
    file_nbytes = np.broadcast_to(np.array(dataset.file_nbytes, dtype=np.int64), dataset.n_samples)
    for batch in look_up(plan):
        of_files = file_nbytes[batch.samples]
        for level, name in enumerate(LEVELS):
            chosen = batch.level == level
            n_samples[batch.number, :, level] = chosen.sum(axis=1)
            sizes = dataset.sample_nbytes if name in _FROM_MEMORY else of_files
            nbytes[batch.number, :, level] = (chosen * sizes).sum(axis=1)
    return Reads(n_samples, nbytes, plan.digest())


def differences(found: Reads, wanted: Reads) -> tuple[str, ...]:
    """Return a sentence for each level with different reads; none if all are equal.

    Raises:
        TraceError: The reads belong to different plans.
    """
    if found.digest != wanted.digest or found.n_samples.shape != wanted.n_samples.shape:
        raise TraceError(
            f"reads of different plans ({found.digest[:12]} and {wanted.digest[:12]}) or shapes "
            f"({found.n_samples.shape} and {wanted.n_samples.shape}); only those of one plan can be compared"
        )
    return tuple(_differences(found, wanted))


def _differences(found: Reads, wanted: Reads) -> Iterator[str]:
    both = ("samples", found.n_samples, wanted.n_samples), ("bytes", found.nbytes, wanted.nbytes)
    for level, name in enumerate(LEVELS):
        for what, ours, theirs in both:
            differs = ours[:, :, level] != theirs[:, :, level]
            if differs.any():
                load, rank = np.argwhere(differs)[0].tolist()
                totals = f"{ours[:, :, level].sum():,} {what} instead of {theirs[:, :, level].sum():,}"
                n_loads = f"{differs.any(axis=1).sum():,} of {len(differs):,} loads differ"
                yield f"{name}: {totals}; {n_loads}, the first is {load} on rank {rank}"
                break
