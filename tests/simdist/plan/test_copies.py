"""Plans between copies of a sharded model."""

import pytest

from simdist.errors import PlanError, UnsupportedError
from simdist.plan import AllReduce, Dataset, Enter, Group, Optimize, Plan, Save, ops
from simdist.plan.check import check
from simdist.plan.copies import check_copies, over_copies
from simdist.schedules import HierarchicalSGD, Job, LocalSGD, Schedule, Sync
from simdist.schedules.diloco import DiLoCo
from simdist.schedules.powersgd import PowerSGD

JOB = Job(4, 2, 9, tensor_counts=(24, 4, 16, 2), tensor_rows=(6, 4, 4, 2), delay_channels=frozenset({"host"}))


@pytest.mark.parametrize(
    "schedule",
    [
        Sync(),
        LocalSGD(period=3, warmup_steps=1),
        LocalSGD(period=4, inner_steps={1: 2}),
        HierarchicalSGD(levels={2: 2, 4: "world"}),
        DiLoCo(period=2, fragments=2, overlap_steps=1),
    ],
    ids=lambda schedule: schedule.name,
)
def test_only_ranks_with_the_same_slice_exchange_data(schedule: Schedule) -> None:
    of_copies = schedule.plan(JOB)
    plan = over_copies(of_copies, 4)
    check(plan)
    check_copies(plan, 4)
    assert plan.world_size == 4 * of_copies.world_size
    assert (plan.buffers, plan.order) == (of_copies.buffers, of_copies.order)
    for body, of_copy in zip(plan.bodies, of_copies.bodies, strict=True):
        for op, before in zip(body, of_copy, strict=True):
            assert type(op) is type(before)
            if isinstance(op, ops.COLLECTIVES):
                groups = op.group.members(plan.world_size)
                assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
                expected = before.group.members(of_copies.world_size)
                assert {tuple(rank // 4 for rank in group) for group in groups} == set(map(tuple, expected))
                assert all(len({rank % 4 for rank in group}) == 1 for group in groups)


def test_all_ranks_of_a_copy_sit_out_together() -> None:
    plan = Plan.from_steps("tiny", world_size=4, buffers=(), steps=[(Enter((1, 3)),)])
    assert over_copies(plan, 2).bodies[0] == (Enter((2, 3, 6, 7)),)


def test_a_group_of_one_copy_stays_one_of_one_rank() -> None:
    plan = Plan.from_steps("tiny", world_size=1, buffers=(), steps=[(AllReduce("grad", Group(1)),)])
    assert over_copies(plan, 8).bodies[0] == (AllReduce("grad", Group(1)),)


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (Optimize(("param",), ("grad",), slices=("part",)), "slices of whole tensors"),
        (Optimize(("param",), ("grad",), ratios="ratios"), "trust ratios of whole tensors"),
        (ops.TrustRatios(("param",), ("grad",), "ratios", Group(1)), "TrustRatios of whole tensors"),
        (Save(("param",)), "Save of whole tensors"),
    ],
)
def test_what_needs_whole_tensors_is_refused(op: ops.Op, problem: str) -> None:
    plan = Plan.from_steps("tiny", world_size=2, buffers=(), steps=[(op,)])
    with pytest.raises(UnsupportedError, match=f"plan tiny: {problem}, and each rank has a slice of them: take Sync"):
        over_copies(plan, 2)


def test_a_data_set_is_refused() -> None:
    dataset = Dataset(100, 4, 2, 10, (5,))
    plan = Plan.from_steps("tiny", world_size=2, buffers=(), steps=[()], dataset=dataset)
    with pytest.raises(UnsupportedError, match="plan tiny reads a data set, whose samples are dealt to its 2 ranks"):
        over_copies(plan, 2)


@pytest.mark.parametrize("group", [Group(2), Group(4), Group(2, stride=3)])
def test_a_group_that_mixes_slices_is_found(group: Group) -> None:
    plan = Plan.from_steps("tiny", world_size=12, buffers=(), steps=[(AllReduce("grad", group),)])
    with pytest.raises(PlanError, match=r"plan tiny: all_reduce.* would mix slices of different tensors"):
        check_copies(plan, 2)


def test_compressed_gradients_of_slices_are_matrices_of_slices() -> None:
    plan = over_copies(PowerSGD().plan(JOB), 2)
    check(plan)
    check_copies(plan, 2)
