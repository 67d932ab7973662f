"""A pairwise cover has every pair, in fewer rows than the product."""

import itertools

import pytest
from covers import cover, pairwise
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_every_pair_of_values_occurs(sizes: list[int]) -> None:
    rows = pairwise(*sizes)
    for i, j in itertools.combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(range(sizes[i]), range(sizes[j])))
    assert len(set(rows)) == len(rows)
    assert all(0 <= value < size for row in rows for value, size in zip(row, sizes, strict=True))


@pytest.mark.parametrize(("sizes", "most"), [((28, 9, 4), 252), ((5, 5, 5, 5), 40), ((3, 3), 9), ((4,), 4)])
def test_a_cover_has_few_rows(sizes: tuple[int, ...], most: int) -> None:
    assert len(pairwise(*sizes)) <= most


def test_rows_that_are_left_out_are_marked() -> None:
    mark = cover(
        number=[1, 2, 3], letter="ab", sign=[True, False], ids={"sign": lambda sign: "+" if sign else "-"}
    ).mark
    names, params = mark.args
    assert names == ("number", "letter", "sign")
    assert [param.values for param in params] == list(itertools.product([1, 2, 3], "ab", [True, False]))
    assert params[0].id == "1-a-+"
    chosen = [param for param in params if not param.marks]
    assert len(chosen) == len(pairwise(3, 2, 2)) < len(params)
    assert {mark.name for param in params for mark in param.marks} == {"full"}
