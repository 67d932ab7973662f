"""Groups partition the ranks, and the three ways to see them agree."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import groups

from simdist.errors import PlanError
from simdist.plan.group import Group


@st.composite
def groups_of_a_world(draw: st.DrawFn) -> tuple[Group, int]:
    world_size = draw(st.integers(1, 48))
    return draw(groups(world_size)), world_size


@given(groups_of_a_world())
def test_every_rank_is_in_exactly_one_group(case: tuple[Group, int]) -> None:
    group, world_size = case
    members = group.members(world_size)
    assert sorted(rank for each in members for rank in each) == list(range(world_size))
    assert {len(each) for each in members} == {group.size}


@given(groups_of_a_world())
def test_shape_views_the_ranks_as_the_same_groups_as_members(case: tuple[Group, int]) -> None:
    group, world_size = case
    blocks = np.arange(world_size).reshape(group.shape(world_size))
    assert np.moveaxis(blocks, 1, 2).reshape(-1, group.size).tolist() == group.members(world_size)


@given(groups_of_a_world())
def test_members_lie_a_stride_apart(case: tuple[Group, int]) -> None:
    group, world_size = case
    for members in group.members(world_size):
        assert all(later - earlier == group.stride for earlier, later in pairwise(members))


def test_groups_of_neighbours_are_the_gpus_of_a_node() -> None:
    assert Group(2).members(6) == [[0, 1], [2, 3], [4, 5]]


def test_groups_with_a_stride_are_the_same_gpu_of_every_node() -> None:
    assert Group(2, stride=3).members(12) == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]


@pytest.mark.parametrize("group", [Group(3), Group(4, 4), Group(0), Group(-2), Group(2, 0), Group(2, -1), Group(16)])
def test_group_that_does_not_partition_the_ranks_says_so(group: Group) -> None:
    assert not group.divides(8)
    with pytest.raises(PlanError, match=f"{group} does not divide 8 ranks"):
        group.shape(8)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (Group(12), "group of 12 does not divide 64 ranks; sizes that do at stride 1: 1, 2, 4, 8, 16, 32, 64"),
        (Group(3, 8), "group of 3 at stride 8 does not divide 64 ranks; sizes that do at stride 8: 1, 2, 4, 8"),
        (Group(2, 5), "group of 2 at stride 5 does not divide 64 ranks; sizes that do at stride 5: none"),
    ],
)
def test_error_names_the_sizes_that_would_do(group: Group, message: str) -> None:
    with pytest.raises(PlanError) as error:
        group.members(64)
    assert str(error.value) == message
