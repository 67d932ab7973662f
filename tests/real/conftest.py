"""Settings of the tests of the real backend."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
from pool import Pool

if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it at its first import


def _pool(world_size: int) -> Iterator[Pool]:
    pool = Pool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one() -> Iterator[Pool]:
    yield from _pool(1)


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    yield from _pool(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    yield from _pool(4)


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    yield from _pool(8)
