"""The data set on the file server, in which order it is read, and what the nodes keep of it."""

import csv
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainSerializer, PlainValidator, ValidationInfo, model_validator

from simdist.plan.dataset import Eviction, Shuffle
from simdist.scenario import portable
from simdist.schedules.data import Policy
from simdist.settings import FromFile, Settings, refuse, shown
from simdist.units import Factor, Nbytes, Whole, parse_nbytes, parse_whole

__all__ = ["Data", "Lognormal", "read_sizes"]

_INDEX_COLUMNS = ["name", "label", "nbytes", "crc32"]
_KEYS_PER_SIZE_BITS = 53


class Lognormal(Settings):
    """Sizes of files whose logarithms are normally distributed.

    Args:
        median_nbytes: Half of the files are larger. The mean is `median * exp(sigma^2 / 2)`.
        sigma: Standard deviation of the natural logarithm.
    """

    median_nbytes: Nbytes = Field(alias="median")
    sigma: Annotated[Factor, Field(le=10)]

    def drawn(self, n: int, seed: int) -> NDArray[np.int64]:
        """Return `n` sizes in bytes, at least 1."""
        keys = np.random.PCG64([seed, n]).random_raw(n) >> np.uint64(64 - _KEYS_PER_SIZE_BITS)
        quantile = (keys.astype(np.float64) + 0.5) * 2.0**-_KEYS_PER_SIZE_BITS
        sizes = self.median_nbytes * portable.exp(self.sigma * portable.normal_quantile(quantile))
        return np.maximum(np.rint(sizes), 1).astype(np.int64)


def read_sizes(path: Path) -> tuple[int, ...]:
    """Read the sizes of the files of a data set from its `index.csv`, in bytes.

    Raises:
        ValueError: It cannot be read, or is no index; with the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            if header != _INDEX_COLUMNS:
                raise ValueError(f"{path} begins with {shown(','.join(header))}: write {','.join(_INDEX_COLUMNS)}")
            sizes = tuple(_size(path, rows.line_num, row) for row in rows)
    except OSError as error:
        raise ValueError(f"cannot read {shown(str(path))}: {error.strerror or error}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no table: {error}; write one as a real data set has: index.csv") from None
    if not sizes:
        raise ValueError(f"{path} lists no file")
    return sizes


def _size(path: Path, line: int, row: list[str]) -> int:
    if len(row) != len(_INDEX_COLUMNS) or not row[2].isdecimal() or int(row[2]) < 1:
        raise ValueError(f"{path}:{line}: {shown(','.join(row))}: write {','.join(_INDEX_COLUMNS)}, nbytes 1 or more")
    return int(row[2])


def _read_file_nbytes(value: object, info: ValidationInfo) -> int | tuple[int, ...] | Lognormal:
    """Read one size, the sizes of all files, how they are drawn, or the index that lists them."""
    match value:
        case Lognormal():
            return value
        case dict() if "index" in value:
            if set(value) != {"index"} or not isinstance(value["index"], str):
                raise ValueError(f"{shown(value)} is no file: write e.g. {{index: index.csv}}")
            folder = info.context.folder if isinstance(info.context, FromFile) else Path()
            return read_sizes(folder / value["index"])
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
    return nbytes


def _written_file_nbytes(value: int | tuple[int, ...] | Lognormal) -> object:
    match value:
        case Lognormal():
            return value.model_dump(mode="json")
        case tuple():
            return [f"{nbytes} B" for nbytes in value]
        case _:
            return f"{value} B"


class Data(Settings):
    """A data set of files on the cluster's storage, one file a sample.

    Args:
        samples: How many; as many as `file_nbytes` lists if absent.
        file_nbytes: Bytes of a file as it is stored; or `{median: 100 kB, sigma: 0.5}`; or `{index: index.csv}`, the
            index of a real data set.
        policy: What ranks read, and what nodes keep, unless a schedule says otherwise; see `Policy`.
        shuffle: `global`: each epoch deals all samples to all ranks anew; `node`: each node has its own part; `none`.
        eviction: Of a full level: `none` keeps what it has, `lru` drops what was used least recently.
        start: `cold`: all caches are empty; `warm`: the disks hold what an earlier run has left.
        seed: Of the order and of drawn sizes.
    """

    samples: Annotated[Whole, Field(ge=1)] | None = None
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
            refuse("Data", [(("samples",), "how many samples are there? Write e.g. samples: 1281167")])
        if listed is not None and self.samples not in (None, listed):
            refuse("Data", [(("samples",), f"{self.samples}, but file_size lists {listed}: leave samples out")])
        return self

    @property
    def n_samples(self) -> int:
        """How many samples there are."""
        return len(self.file_nbytes) if isinstance(self.file_nbytes, tuple) else self.samples or 0

    def sizes_nbytes(self) -> tuple[int, ...]:
        """Return the bytes of every file, or one number for all."""
        match self.file_nbytes:
            case Lognormal():
                return tuple(self.file_nbytes.drawn(self.n_samples, self.seed).tolist())
            case tuple():
                return self.file_nbytes
            case _:
                return (self.file_nbytes,)
