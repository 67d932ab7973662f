"""The data set on the file server, in which order it is read, and what the nodes keep of it."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainSerializer, PlainValidator, ValidationInfo, model_validator

from simdist.errors import ScenarioError
from simdist.plan.plan import MAX_DATASET_NBYTES, MAX_SAMPLE_FILE_NBYTES, MAX_SAMPLES, Eviction, Shuffle
from simdist.scenario.effects import Uses
from simdist.schedules.job import Policy
from simdist.settings.base import Settings, folder_of, refuse, shown
from simdist.settings.units import Factor, Nbytes, Whole, format_nbytes, parse_nbytes, parse_whole

_KEYS_PER_SIZE_BITS = 53
_MOST_SIGMAS = 8.3  # no quantile of so many bits is farther from the median
_MOST_OF_A_FILE = f"a file has {format_nbytes(MAX_SAMPLE_FILE_NBYTES)} (2^40 B) or less"


class Lognormal(Settings):
    """Sizes of files whose logarithms are normally distributed.

    Args:
        median_nbytes: Half of the files are larger. The mean is `median * exp(sigma^2 / 2)`.
        sigma: Standard deviation of the natural logarithm.
    """

    median_nbytes: Annotated[Nbytes, Field(le=MAX_SAMPLE_FILE_NBYTES)] = Field(alias="median")
    sigma: Annotated[Factor, Field(le=10)]

    def drawn(self, n: int, seed: int) -> NDArray[np.int64]:
        """Return `n` sizes in bytes, at least 1."""
        return self._drawn(n, seed).astype(np.int64)

    def fault(self, n: int, seed: int) -> str | None:
        """Return what is wrong if a file of `n` that are drawn is too large, or all together are."""
        if self.median_nbytes * math.exp(_MOST_SIGMAS * self.sigma) <= min(
            MAX_SAMPLE_FILE_NBYTES, MAX_DATASET_NBYTES / n
        ):
            return None  # no draw can be too large
        sizes = self._drawn(n, seed)
        if (largest := float(sizes.max())) > MAX_SAMPLE_FILE_NBYTES:
            drawn = f"{{median: {format_nbytes(self.median_nbytes)}, sigma: {self.sigma:g}}} draws files of up to"
            return f"{drawn} {format_nbytes(largest)}; {_MOST_OF_A_FILE}: write a smaller median or sigma"
        return _fault_of_all(n, float(sizes.sum()))

    def _drawn(self, n: int, seed: int) -> NDArray[np.float64]:
        keys = np.random.PCG64([seed, n]).random_raw(n) >> np.uint64(64 - _KEYS_PER_SIZE_BITS)
        quantile = (keys.astype(np.float64) + 0.5) * 2.0**-_KEYS_PER_SIZE_BITS
        from simdist.scenario import portable

        sizes = self.median_nbytes * portable.exp(self.sigma * portable.normal_quantile(quantile))
        return np.maximum(np.rint(sizes), 1)


def _fault_of_all(n: int, nbytes: float) -> str | None:
    if nbytes <= MAX_DATASET_NBYTES:
        return None
    most = format_nbytes(MAX_DATASET_NBYTES)
    return f"{n:,} files have {format_nbytes(nbytes)}; all of a data set have {most} (2^62 B) or less"


def read_sizes(path: Path) -> tuple[int, ...]:
    """Read the sizes of the files of a data set from its `index.csv`, in bytes.

    Raises:
        ScenarioError: It cannot be read, or is no index; with the line.
    """
    from simdist.plan.index import parse_entries, read_index

    try:
        content = read_index(path)
    except OSError as error:
        raise ScenarioError(f"cannot read {shown(str(path))}: {error.strerror or error}") from None
    sizes = tuple(entry.nbytes for entry in parse_entries(content, where=str(path)))
    if not sizes:
        raise ScenarioError(f"{path} lists no file")
    return sizes


def _read_file_nbytes(value: object, info: ValidationInfo) -> int | tuple[int, ...] | Lognormal:
    """Read one size, the sizes of all files, how they are drawn, or the index that lists them."""
    match value:
        case Lognormal():
            return value
        case dict() if "index" in value:
            if set(value) != {"index"} or not isinstance(value["index"], str):
                raise ValueError(f"{shown(value)} is not a file: write e.g. {{index: index.csv}}")
            return read_sizes(folder_of(info) / value["index"])
        case dict():
            return Lognormal.model_validate(value, context=info.context)
        case list() | tuple():
            if not value:
                raise ValueError("[]: write the size of one file or more")
            return tuple(_one_file_nbytes(each, info) for each in value)
        case _:
            return _one_file_nbytes(value, info)


def _one_file_nbytes(value: object, info: ValidationInfo) -> int:
    is_plain = info.context is None and isinstance(value, int | float)
    nbytes = parse_whole(value) if is_plain else parse_nbytes(value)
    if nbytes < 1:
        raise ValueError(f"{shown(value)}: a file has 1 B or more")
    if nbytes > MAX_SAMPLE_FILE_NBYTES:
        raise ValueError(f"{shown(value)}: {_MOST_OF_A_FILE}")
    return nbytes


def _written_file_nbytes(value: int | tuple[int, ...] | Lognormal) -> object:
    match value:
        case Lognormal():
            return value.model_dump(mode="json")
        case tuple():
            return [f"{nbytes} B" for nbytes in value]
        case _:
            return f"{value} B"


class DataSettings(Settings):
    """A data set of files on the cluster's storage, one file a sample.

    Args:
        samples: How many; as many as `file_nbytes` lists if absent.
        file_nbytes: Bytes of a file as it is stored; or `{median: 100 kB, sigma: 0.5}`; or `{index: index.csv}`, the
            index of a real data set.
        policy: Reads of ranks, and contents of nodes, unless a schedule says otherwise; see `Policy`.
        shuffle: `global`: each epoch deals all samples to all ranks again; `node`: each node has its own part; `none`.
        eviction: Of a full level: `none` keeps what it has, `lru` drops what was used least recently.
        start: `cold`: all caches are empty; `warm`: the disks hold what an earlier run has left.
        seed: Of the order and of drawn sizes.
    """

    samples: Annotated[Whole, Field(ge=1, le=MAX_SAMPLES)] | None = None
    file_nbytes: Annotated[
        int | tuple[int, ...] | Lognormal,
        PlainValidator(_read_file_nbytes),
        PlainSerializer(_written_file_nbytes, when_used="json"),
        Field(examples=["110 kB"]),
    ]
    policy: Policy = "naive"
    shuffle: Shuffle = "global"
    eviction: Eviction = "none"
    start: Literal["cold", "warm"] = "cold"
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        listed = len(self.file_nbytes) if isinstance(self.file_nbytes, tuple) else None
        if self.samples is None and listed is None:
            refuse("DataSettings", [(("samples",), "how many samples are there? Write e.g. samples: 1281167")])
        if listed is not None and self.samples not in (None, listed):
            refuse("DataSettings", [(("samples",), f"{self.samples}, but file_size lists {listed}: leave samples out")])
        if fault := self._size_fault():
            refuse("DataSettings", [(("file_size",), fault)])
        return self

    def _size_fault(self) -> str | None:
        if isinstance(self.file_nbytes, Lognormal):
            return self.file_nbytes.fault(self.n_samples, self.seed)
        sizes = self.sizes_nbytes()
        return _fault_of_all(self.n_samples, sum(sizes) * self.n_samples // len(sizes))

    @property
    def n_samples(self) -> int:
        """How many samples there are."""
        return len(self.file_nbytes) if isinstance(self.file_nbytes, tuple) else self.samples or 0

    @property
    def least_nbytes(self) -> int:
        """The size of the smallest file, or 1 if sizes are drawn."""
        return 1 if isinstance(self.file_nbytes, Lognormal) else min(self.sizes_nbytes())

    def sizes_nbytes(self) -> tuple[int, ...]:
        """Return the bytes of every file, or one number for all."""
        match self.file_nbytes:
            case Lognormal():
                return tuple(self.file_nbytes.drawn(self.n_samples, self.seed).tolist())
            case tuple():
                return self.file_nbytes
            case _:
                return (self.file_nbytes,)

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each setting without effect."""
        if not uses.policies:
            yield f"input.data {uses.nothing_is_read}"
            return
        if self.start == "warm":
            yield from (f"input.data.start {reason}" for reason in uses.unkept("files"))
        if self.seed and self.shuffle == "none" and not isinstance(self.file_nbytes, Lognormal):
            yield "input.data.seed has no effect: nothing of the data set is random"
