"""The index of a data set in columns, compared with a plan and a model. `simdist.plan.index` defines its lines.

`python -m real.data.indexing FOLDER` makes the index of a folder of images.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.files import replacing
from simdist.plan import Dataset
from simdist.plan.index import INDEX_COLUMNS, Entry, refuse_name


@dataclass(frozen=True, slots=True, eq=False)
class SampleIndex:
    """The lines of an index, in columns: sample i is element i of each column.

    Args:
        names: Names of the files, relative to their folder.
        labels: Labels, int64.
        nbytes: Size of each file, int64, at least 1.
        crc32: CRC-32 of each file, uint32.
    """

    names: tuple[str, ...]
    labels: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    crc32: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, sample: int) -> Entry:
        """Return the line of a sample, numbered from 0."""
        return Entry(self.names[sample], int(self.labels[sample]), int(self.nbytes[sample]), int(self.crc32[sample]))


def make_index(entries: Iterable[Entry]) -> SampleIndex:
    """Make an index from its lines."""
    lines = list(entries)
    return SampleIndex(
        names=tuple(each.name for each in lines),
        labels=np.array([each.label for each in lines], dtype=np.int64),
        nbytes=np.array([each.nbytes for each in lines], dtype=np.int64),
        crc32=np.array([each.crc32 for each in lines], dtype=np.uint32),
    )


def write_entries(entries: Iterable[Entry], path: Path) -> int:
    """Write an index to a file atomically; return the number of samples."""
    n_samples = 0
    with replacing(path, on_disk=True) as part, part.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(INDEX_COLUMNS)
        for each in entries:
            refuse_name(each.name, str(path))
            lines.writerow((each.name, each.label, each.nbytes, each.crc32))
            n_samples += 1
    return n_samples


def check_index(index: SampleIndex, dataset: Dataset, url: str) -> None:
    """Refuse a data set that is not that of a plan.

    Raises:
        ScenarioError: It has other samples, or files of other sizes. The error names them.
    """
    advice = "take both from the index: data: {file_size: {index: index.csv}}"
    if len(index) != dataset.n_samples:
        raise ScenarioError(
            f"{url}: has {len(index):,} samples, the plan's data set {dataset.n_samples:,}; give the data set of this "
            f"run, or {advice}"
        )
    planned = np.broadcast_to(np.array(dataset.file_nbytes, dtype=np.int64), len(index))
    different = np.flatnonzero(index.nbytes != planned)
    if len(different):
        first = int(different[0])
        raise ScenarioError(
            f"{url}: {len(different):,} of {len(index):,} files have other sizes than in the plan; the first is sample "
            f"{first} ({index.names[first]}): {index.nbytes[first]:,} bytes, planned are {planned[first]:,}; give the "
            f"data set of this run, or {advice}"
        )


def check_labels(index: SampleIndex, n_classes: int, url: str) -> None:
    """Refuse a data set with labels for which a model has no output.

    Args:
        index: Index of the data set.
        n_classes: Outputs of the model; labels are 0 to n_classes - 1.
        url: URL of the data set, for the message.

    Raises:
        ScenarioError: A label is outside this range.
    """
    least = int(index.labels.min())
    most = int(index.labels.max())
    if least < 0:
        raise ScenarioError(f"{url}: label {least} is below 0; number the classes from 0: make a new index")
    if most >= n_classes:
        raise ScenarioError(
            f"{url}: labels go up to {most}, the model has {n_classes} outputs: number the classes below that, or "
            "choose another model"
        )
