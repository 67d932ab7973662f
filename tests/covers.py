"""Covers: few combinations of settings that stand for all of them.

    @cover(schedule=SCHEDULES, path=PATHS, steps=[0, 1, 3], ids={"path": path_id})
    def test(schedule, path, steps): ...

runs the rows of a pairwise cover, and the rest of the product with `-m full`: a fault that shows with two settings
together is found in either.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest


def pairwise(*sizes: int) -> list[tuple[int, ...]]:
    """Return rows of indices below `sizes` in which every pair of values of two columns occurs; few, always the same.

    A row starts with the first pair that is missing, and every other column takes what makes up for most pairs.
    """
    columns = range(len(sizes))
    missing = {
        ((i, a), (j, b)): None
        for i, j in itertools.combinations(columns, 2)
        for a, b in itertools.product(range(sizes[i]), range(sizes[j]))
    }
    rows: list[tuple[int, ...]] = [] if len(sizes) > 1 else [(value,) for value in range(*sizes)]
    while missing:
        row = dict(next(iter(missing)))
        for column in (column for column in columns if column not in row):
            gains = [sum(pair in missing for pair in _pairs(row | {column: value})) for value in range(sizes[column])]
            first = len(rows) % sizes[column]  # of equal ones not always the same
            row[column] = max(range(sizes[column]), key=lambda value: (gains[value], -((value - first) % len(gains))))
        for pair in _pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(row[column] for column in columns))
    return rows


def _pairs(row: Mapping[int, int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    return itertools.combinations(sorted(row.items()), 2)


def cover(*, ids: Mapping[str, Callable[..., str]] | None = None, **settings: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize a test by settings: those of a pairwise cover as usual, the rest of the product marked `full`.

    Args:
        ids: How values of some settings are told in the name of a test; by default with `str`.
        **settings: Values by the names of the test's arguments.
    """
    tellers = [(ids or {}).get(name, str) for name in settings]
    columns = list(settings.values())
    chosen = set(pairwise(*map(len, columns)))
    params = []
    for row in itertools.product(*(range(len(column)) for column in columns)):
        values = [column[index] for column, index in zip(columns, row, strict=True)]
        told = "-".join(tell(value) for tell, value in zip(tellers, values, strict=True))
        params.append(pytest.param(*values, id=told, marks=() if row in chosen else pytest.mark.full))
    return pytest.mark.parametrize(tuple(settings), params)
