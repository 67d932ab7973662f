"""Compares the data set at a URL with that of a plan and with a model, and finds out what its samples look like."""

import math

import numpy as np

from real.data.decoding import Decode, decode_image, decode_raw
from real.data.index import Index
from simdist.errors import ScenarioError
from simdist.plan import Dataset

_RAW = ".raw"


def check_index(index: Index, dataset: Dataset, url: str) -> None:
    """Refuse a data set that is not the one of a plan.

    Raises:
        ScenarioError: It has other samples, or files of other sizes; says which.
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


def check_labels(index: Index, n_classes: int, url: str) -> None:
    """Refuse a data set with labels that a model has no output for.

    Args:
        index: Of the data set.
        n_classes: Outputs of the model; labels are 0 to n_classes - 1.
        url: Of the data set, for the message.

    Raises:
        ScenarioError: A label is another one.
    """
    least, most = int(index.labels.min()), int(index.labels.max())
    if least < 0:
        raise ScenarioError(f"{url}: label {least} is below 0; number the classes from 0: make a new index")
    if most >= n_classes:
        raise ScenarioError(
            f"{url}: labels go up to {most}, the model has {n_classes} outputs: generate the data set with --classes "
            f"{n_classes}, or choose another model"
        )


def sample_shape(sample_nbytes: int) -> tuple[int, ...]:
    """Return the shape of a decoded sample: a square image in colours or in grey, if its bytes make one.

    >>> sample_shape(3 * 224 * 224), sample_shape(28 * 28), sample_shape(1000)
    ((3, 224, 224), (1, 28, 28), (1000,))
    """
    for n_channels in (3, 1):
        side = math.isqrt(sample_nbytes // n_channels)
        if n_channels * side * side == sample_nbytes:
            return n_channels, side, side
    return (sample_nbytes,)


def choose_decode(index: Index, shape: tuple[int, ...], url: str) -> Decode:
    """Return what decodes the files of a data set: `.raw` files are samples as they are, others images.

    Raises:
        ScenarioError: They cannot become samples of that shape.
    """
    sample_nbytes = math.prod(shape)
    n_raw = sum(name.endswith(_RAW) for name in index.names)
    if n_raw == len(index):
        other = np.flatnonzero(index.nbytes != sample_nbytes)
        if len(other):
            raise ScenarioError(
                f"{url}: {index.names[other[0]]} has {index.nbytes[other[0]]:,} bytes; a raw file is a sample of "
                f"workload.sample_size, {sample_nbytes:,} bytes"
            )
        return decode_raw
    if n_raw:
        raise ScenarioError(f"{url}: {n_raw:,} of {len(index):,} files are {_RAW}; samples are all raw, or all images")
    if len(shape) != 3:
        raise ScenarioError(
            f"{url}: images are decoded to squares, and samples of workload.sample_size, {sample_nbytes:,} bytes, are "
            f"none; write e.g. 150528 B for 3 x 224 x 224"
        )
    return decode_image
