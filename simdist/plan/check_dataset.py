"""Check the data set of a plan and its loads. Part of `simdist.plan.check`."""

from collections.abc import Iterator
from typing import get_args

from simdist.plan import LEVELS, Buffer, Dataset, Load, StageIn
from simdist.plan.group import Group
from simdist.plan.plan import MAX_DATASET_NBYTES, MAX_SAMPLE_FILE_NBYTES, MAX_SAMPLES, Eviction, Shuffle

_KEEPS = ("memory", "disk")


def dataset_problems(dataset: Dataset, world_size: int) -> Iterator[str]:
    """Yield what is wrong with the data set of a plan of `world_size` ranks."""
    counts = {
        "batch_size": dataset.batch_size,
        "ranks_per_node": dataset.ranks_per_node,
        "sample_nbytes": dataset.sample_nbytes,
        "readers": dataset.readers,
        "decoders": dataset.decoders,
    }
    yield from (f"{name} {count}; must be at least 1" for name, count in counts.items() if count < 1)
    if dataset.ranks_per_node >= 1 and world_size % dataset.ranks_per_node:
        yield f"ranks_per_node {dataset.ranks_per_node} does not divide {world_size} ranks"
    if not 0 < world_size * dataset.batch_size <= dataset.n_samples:
        needed = f"a step of {world_size} ranks reads {world_size * dataset.batch_size}"
        yield f"n_samples {dataset.n_samples}; {needed}, and an epoch has one step or more"
    if dataset.workers < 0:
        yield f"workers {dataset.workers}; must be at least 0"
    if dataset.n_samples > MAX_SAMPLES:
        yield f"n_samples {dataset.n_samples}; must be at most {MAX_SAMPLES}"
    yield from _size_problems(dataset)
    yield from _word_problems(dataset)
    if dataset.seed < 0:
        yield f"seed {dataset.seed}; must be at least 0"


def _size_problems(dataset: Dataset) -> Iterator[str]:
    sizes = dataset.file_nbytes
    if len(sizes) not in (1, dataset.n_samples):
        yield f"file_nbytes has {len(sizes)} numbers; write one for all files, or {dataset.n_samples}"
    elif min(sizes) < 1:
        yield f"file_nbytes[{sizes.index(min(sizes))}] is {min(sizes)}; a file has at least 1 byte"
    elif max(sizes) > MAX_SAMPLE_FILE_NBYTES:
        yield f"file_nbytes[{sizes.index(max(sizes))}] is {max(sizes)}; a file has at most 2^40 bytes"
    elif (nbytes := sum(sizes) * (dataset.n_samples // len(sizes))) > MAX_DATASET_NBYTES:
        yield f"all files have {nbytes} bytes; must be at most 2^62"
    for name, capacity in (("disk_nbytes", dataset.disk_nbytes), ("memory_nbytes", dataset.memory_nbytes)):
        if capacity is not None and capacity < 0:
            yield f"{name} {capacity}; must be at least 0, or null for no limit"


def _word_problems(dataset: Dataset) -> Iterator[str]:
    for name, word, known in (
        ("shuffle", dataset.shuffle, get_args(Shuffle)),
        ("eviction", dataset.eviction, get_args(Eviction)),
    ):
        if word not in known:
            yield f"{name} {word!r}; known: {', '.join(known)}"


def load_problems(op: Load, dst: Buffer, dataset: Dataset | None) -> Iterator[str]:
    """Yield what is wrong with the levels of a load into `dst`."""
    if dataset is None:
        if op.read or op.keep:
            yield "reads levels of storage, but the plan has no data set; give it one, or leave read and keep empty"
        return
    if not op.read:
        yield "names no level of storage, but the plan has a data set; end its read with storage"
        return
    yield from _level_problems("reads", op.read, LEVELS)
    yield from _level_problems("keeps on", op.keep, _KEEPS)
    if op.read[-1] != "storage":
        yield f"reads {', '.join(op.read)}; only storage surely has every sample, so it comes last"
    nbytes = dataset.batch_size * dataset.sample_nbytes
    if dst.nbytes != nbytes:
        yield f"loads into {op.dst!r} of {dst.nbytes} bytes; a batch of the data set has {nbytes}"


def _level_problems(verb: str, levels: tuple[str, ...], known: tuple[str, ...]) -> Iterator[str]:
    for level in dict.fromkeys(levels):
        if level not in known:
            yield f"{verb} {level!r}; known: {', '.join(known)}"
        if levels.count(level) > 1:
            yield f"{verb} {level} {levels.count(level)} times; name each level once"


def stage_in_problems(op: StageIn, dataset: Dataset | None) -> Iterator[str]:
    """Yield what is wrong with copying files to a node's disk."""
    if dataset is None:
        yield "brings files of a data set, but the plan has none; give it one"
    elif op.group != Group(dataset.ranks_per_node):
        yield f"the {op.group} is no node; those of the data set are a {Group(dataset.ranks_per_node)}"
