"""Files of samples for tests: their contents are random, and the same in every process."""

import zlib

import numpy as np

from real.data.index import Entry, Index, make_index


def entry(name: str, content: bytes, label: int = 0) -> Entry:
    return Entry(name, label, len(content), zlib.crc32(content))


def content_of(sample: int, nbytes: int = 1000) -> bytes:
    return np.random.default_rng(sample).bytes(nbytes)


def index_of(n_samples: int, nbytes: int = 1000) -> Index:
    return make_index(entry(f"{sample}.jpg", content_of(sample, nbytes)) for sample in range(n_samples))
