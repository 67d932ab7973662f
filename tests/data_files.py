"""Files of samples for tests: random and the same in every process, or pictures that show their numbers."""

import sys
import zlib
from pathlib import Path

import numpy as np

from real.data.sample_index import SampleIndex, make_index, write_entries
from simdist.plan.index import Entry, parse_entries

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "emulated_cluster"))
from data_set import SampleSet, generate
from pictures import sample_number

__all__ = ["SampleSet", "content_of", "entry", "generate", "index_of", "read_index", "sample_number", "write_index"]


def entry(name: str, content: bytes, label: int = 0) -> Entry:
    return Entry(name, label, len(content), zlib.crc32(content))


def content_of(sample: int, nbytes: int = 1000) -> bytes:
    return np.random.default_rng(sample).bytes(nbytes)


def index_of(n_samples: int, nbytes: int = 1000) -> SampleIndex:
    return make_index(entry(f"{sample}.jpg", content_of(sample, nbytes)) for sample in range(n_samples))


def write_index(index: SampleIndex, path: Path) -> None:
    write_entries((index[sample] for sample in range(len(index))), path)


def read_index(path: Path) -> SampleIndex:
    return make_index(parse_entries(path.read_bytes(), where=str(path)))
