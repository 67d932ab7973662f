"""Groups partition the ranks, and the three ways to see them agree."""

from itertools import pairwise

import numpy as np
import pytest
from drawn_plans import groups
from hypothesis import given
from hypothesis import strategies as st

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
def test_number_and_member_are_the_places_in_members(case: tuple[Group, int]) -> None:
    group, world_size = case
    members = group.members(world_size)
    assert all(members[group.number(rank)][group.member(rank)] == rank for rank in range(world_size))


@given(groups_of_a_world(), st.integers(0, 1))
def test_values_are_split_by_group_and_joined_again(case: tuple[Group, int], axis: int) -> None:
    group, world_size = case
    values = np.moveaxis(np.arange(3 * world_size).reshape(world_size, 3), 0, axis)
    split = group.split(values, axis)
    assert split.shape == (*values.shape[:axis], *group.shape(world_size), *values.shape[axis + 1 :])
    np.testing.assert_array_equal(group.joined(split, axis), values)
    ranks = np.moveaxis(group.split(np.arange(world_size)), 1, 2).reshape(-1, group.size)
    assert ranks.tolist() == group.members(world_size)


@given(groups_of_a_world())
def test_groups_are_the_same_if_their_members_are_listed(case: tuple[Group, int]) -> None:
    group, world_size = case
    listed = Group.of(group.members(world_size)[::-1])
    assert listed == group or group.size == 1  # then any stride gives the same groups


@given(groups_of_a_world())
def test_members_lie_a_stride_apart_unless_they_are_listed(case: tuple[Group, int]) -> None:
    group, world_size = case
    for members in group.members(world_size) if not group.ranks else ():
        assert all(later - earlier == group.stride for earlier, later in pairwise(members))


def test_groups_of_neighbours_are_the_gpus_of_a_node() -> None:
    assert Group(2).members(6) == [[0, 1], [2, 3], [4, 5]]


def test_groups_with_a_stride_are_the_same_gpu_of_every_node() -> None:
    assert Group(2, stride=3).members(12) == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]


def test_groups_by_list_may_be_any_of_one_size() -> None:
    group = Group.of([[5, 0], [2, 4], [1, 3]])
    assert group.members(6) == [[1, 3], [2, 4], [5, 0]]
    assert (str(group), group.text) == ("group of 2 by list", "group of 2 by list: 1+3, 2+4, 5+0")
    with pytest.raises(PlanError, match="group of 2 by list lists 6 ranks; list all 8"):
        group.shape(8)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([[0, 1], [2]], "groups of 1, 2 ranks; write groups of one size"),
        ([], "groups of no ranks; write groups of one size"),
        ([[0, 1], [1, 2]], "groups 0+1, 1+2: list each of the ranks 0 to 3 once"),
        ([[0, 3], [1, 4]], "groups 0+3, 1+4: list each of the ranks 0 to 3 once"),
    ],
)
def test_lists_that_do_not_partition_the_ranks_are_refused(members: list[list[int]], message: str) -> None:
    with pytest.raises(PlanError) as error:
        Group.of(members)
    assert str(error.value).startswith(message)


@given(groups_of_a_world(), st.integers(1, 3))
def test_copies_of_several_ranks_meet_part_by_part_or_as_a_whole(case: tuple[Group, int], n: int) -> None:
    group, n_copies = case
    copies = {frozenset(each) for each in group.members(n_copies)}
    parts = group.over_copies(n).members(n_copies * n)
    assert all(len({rank % n for rank in each}) == 1 for each in parts)
    assert {frozenset(rank // n for rank in each) for each in parts} == copies
    if group.stride == 1:
        whole = group.of_whole_copies(n).members(n_copies * n)
        assert {frozenset(rank // n for rank in each) for each in whole} == copies
        assert {len(each) for each in whole} == {group.size * n}


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
