"""Values: process world = virtual world = numpy for collectives, and = torch's own DDP and averagers for training."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from drawn_plans import ALGORITHMS, legal_plans
from hypothesis import given
from pool import Pool
from tiers import examples
from torch import nn
from trainings import (
    CPU,
    Torch,
    Training,
    Values,
    buffers_by_plan,
    buffers_in_virtual_world,
    by_plan,
    by_torch,
    in_virtual_world,
    loss,
    scratch_by_plan,
    summed_by_servers,
)

from real.buffers.memory import Memory, buffers_in_place
from real.collectives.worlds import scratch_nbytes
from real.execution import virtual
from real.programs.binding import Binding
from real.programs.module import ModuleProgram
from simdist.errors import PlanError, RunError
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Backward,
    Body,
    Broadcast,
    Buffer,
    Collective,
    Copy,
    Densify,
    Forward,
    Group,
    Op,
    Optimize,
    Pack,
    Plan,
    Reduce,
    ReduceScatter,
    Select,
    Servers,
    Unpack,
    Wait,
    op_text,
    reads,
    writes,
)
from simdist.plan.check import check
from simdist.schedules import InputPath, Schedule
from simdist.schedules.hierarchical_sgd import HierarchicalSGD
from simdist.schedules.hitopk import HiTopK
from simdist.schedules.local_sgd import LocalSGD
from simdist.schedules.sync import Sync

N_STEPS = 8  # of sync: DDP forms its buckets again after the first
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
GROUPS = {4: [Group(4), Group(2), Group(2, stride=2), Group(1)], 8: [Group(8), Group(4, stride=2), Group(2, stride=4)]}

four_and_eight = pytest.mark.parametrize("world_size", [4, 8])


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    made = {world_size: Pool(world_size) for world_size in (4, 8)}
    yield made
    for pool in made.values():
        pool.close()


# --- collectives and copies, without a model ---


def numpy_reduced(op: AllReduce | Reduce | ReduceScatter, rows: np.ndarray) -> np.ndarray:
    return rows.mean(axis=0) if op.reduction == "mean" else rows.sum(axis=0)


def by_numpy(op: Collective, values: Values, world_size: int) -> dict[str, list[np.ndarray]]:
    """Perform a collective group by group and member by member."""
    left = {name: [array.copy() for array in arrays] for name, arrays in values.items()}
    for ranks in op.group.members(world_size):
        match op:
            case AllReduce():
                left[op.buffer][0][ranks] = numpy_reduced(op, values[op.buffer][0][ranks])
            case Reduce():
                left[op.buffer][0][ranks[op.root]] = numpy_reduced(op, values[op.buffer][0][ranks])
            case Broadcast():
                for array, before in zip(left[op.buffer], values[op.buffer], strict=True):
                    array[ranks] = before[ranks[op.root]]
            case ReduceScatter():
                slices = np.split(numpy_reduced(op, values[op.src][0][ranks]), len(ranks))
                for rank, part in zip(ranks, slices, strict=True):
                    left[op.dst][0][rank] = part
            case AllGather():
                for array, before in zip(left[op.dst], values[op.src], strict=True):
                    array[ranks] = np.concatenate(before[ranks])
    return left


def drawn(plan: Plan, seed: int = 0) -> dict[str, tuple[np.ndarray, ...]]:
    """Draw the contents of all buffers, different on every rank; indices are within the smallest dense buffer.

    numpy has no bfloat16: those are drawn as float32.
    """
    random = np.random.default_rng(seed)
    reach = min((buffer.count for buffer in plan.buffers if not buffer.sparse), default=100)
    values = {}
    for buffer in plan.buffers:
        shape = (plan.world_size, buffer.count)
        numbers = (
            random.integers(0, 256, shape).astype(np.uint8) if buffer.dtype == "uint8" else random.normal(size=shape)
        )
        dtype = "float32" if buffer.dtype == "bfloat16" else buffer.dtype
        indices = (random.integers(0, reach, shape).astype(np.int32),) if buffer.sparse else ()
        values[buffer.name] = (numbers.astype(dtype), *indices)
    return values


def collectives(group: Group) -> list[Collective]:
    """Return every collective with every setting, each on buffers of its own."""
    last, count = group.size - 1, 3 * group.size
    uneven = Servers((2, 0, count - 2), members=(last, 1, 0)) if last > 1 else Servers((count,), members=(last,))
    return [
        AllReduce("0 whole", group),
        AllReduce("1 whole", group, "sum"),
        AllReduce("2 whole", group, algorithm="server", servers=uneven),
        AllReduce("3 whole", group, "sum", "server", Servers((3,) * group.size, tuple(range(group.size)))),
        Reduce("4 whole", group),
        Reduce("5 whole", group, root=last, reduction="sum"),
        Broadcast("6 whole", group),
        Broadcast("7 whole", group, root=last),
        Broadcast("8 sparse", group, root=last),
        ReduceScatter("9 whole", "9 slice", group),
        ReduceScatter("10 whole", "10 slice", group, "sum"),
        AllGather("11 slice", "11 whole", group),
        AllGather("12 sparse", "12 all sparse", group),
    ]


def plan_of(*ops: Collective, world_size: int) -> Plan:
    """Return a plan that performs collectives of one group one after the other."""
    size = ops[0].group.size
    kinds = {
        "whole": Buffer("", 3 * size, "float64", initialized=True),
        "slice": Buffer("", 3, "float64", initialized=True),
        "sparse": Buffer("", 2, "float64", sparse=True, initialized=True),
        "all sparse": Buffer("", 2 * size, "float64", sparse=True, initialized=True),
    }
    names = {name: None for op in ops for name in (*reads(op), *writes(op))}
    buffers = tuple(dataclasses.replace(kinds[name.lstrip("0123456789 ")], name=name) for name in names)
    return legal(Plan.from_steps("some", world_size=world_size, buffers=buffers, steps=[ops]))


def legal(plan: Plan) -> Plan:
    check(plan)
    return plan


def assert_equal_values(plan: Plan, theirs: Sequence[Values], ours: Values, tolerance: float = 1e-12) -> None:
    for rank, left in enumerate(theirs):
        for name, arrays in left.items():
            for array, stacked in zip(arrays, ours[name], strict=True):
                np.testing.assert_allclose(
                    array, stacked[rank], rtol=tolerance, atol=tolerance, err_msg=f"{rank} {name}"
                )


@pytest.mark.parametrize(
    ("world_size", "group"),
    [pytest.param(size, group, id=f"{size}: {group}") for size, groups in GROUPS.items() for group in groups],
)
def test_collectives_leave_what_numpy_says_in_both_worlds(
    pools: dict[int, Pool], world_size: int, group: Group
) -> None:
    ops = collectives(group)
    plan = plan_of(*ops, world_size=world_size)
    values = drawn(plan)
    expected = values
    for op in ops:
        expected = by_numpy(op, expected, world_size)
    ours = buffers_in_virtual_world(plan, values)
    for name, arrays in expected.items():
        for array, found in zip(arrays, ours[name], strict=True):
            np.testing.assert_allclose(found, array, rtol=1e-14, atol=1e-14, err_msg=name)
    assert_equal_values(plan, pools[world_size].run(buffers_by_plan, plan, values), ours)


def test_servers_add_up_in_the_order_of_the_members_whatever_the_pieces(pools: dict[int, Pool]) -> None:
    """In four pieces of 64 KiB, the last one shorter, from part of the servers none."""
    values = np.random.default_rng(0).normal(size=(4, 45_001)).astype(np.float32)
    servers = Servers((16_384, 28_617, 0), members=(3, 1, 0))
    expected = values[0] + values[1] + values[2] + values[3]
    for rank, (found, nbytes) in enumerate(pools[4].run(summed_by_servers, values, servers, 2**18)):
        np.testing.assert_array_equal(found, expected)
        assert nbytes == (2**18 if rank in (1, 3) else 0)
    servers = Servers((45_001,), members=(2,))
    for rank, (found, nbytes) in enumerate(pools[4].run(summed_by_servers, values, servers, 2**26)):
        np.testing.assert_array_equal(found, expected)
        assert nbytes == (4 * 4 * 45_001 if rank == 2 else 0)


@pytest.mark.parametrize(
    ("op", "nbytes"),
    [
        (AllReduce("whole", Group(4)), 0),
        (Reduce("whole", Group(4)), 8 * 12),
        (ReduceScatter("whole", "slice", Group(4)), 8 * 12),
        (ReduceScatter("whole", "slice", Group(4), "sum"), 8 * 12),
        (AllGather("slice", "whole", Group(4)), 0),
        (AllGather("sparse", "all sparse", Group(4)), 12 * (2 + 8)),
        (Broadcast("sparse", Group(4)), 12 * 2),
        (AllReduce("whole", Group(4), algorithm="server", servers=Servers((5, 7), (0, 2))), 4 * 8 * 7),
    ],
    ids=lambda value: op_text(value) if isinstance(value, COLLECTIVES) else "",
)
def test_collectives_keep_the_memory_that_is_counted_for_them(
    pools: dict[int, Pool], op: Collective, nbytes: int
) -> None:
    plan = plan_of(op, world_size=4)
    twice = dataclasses.replace(plan, order=(dataclasses.replace(plan.order[0], times=2),))
    assert scratch_nbytes(twice) == nbytes
    kept = pools[4].run(scratch_by_plan, twice, drawn(twice))
    assert all(performing <= warm for warm, performing in kept), "the first step would wait for memory"
    assert [max(column) for column in zip(*kept, strict=True)] == [nbytes, nbytes]


def test_memory_for_collectives_is_counted_once_for_each_purpose() -> None:
    ops = (Reduce("whole", Group(4)), ReduceScatter("whole", "slice", Group(4)), Broadcast("sparse", Group(4)))
    alone = plan_of(*ops, world_size=4)
    assert scratch_nbytes(alone) == 8 * 12 + 12 * 2
    with pytest.raises(RunError, match=r"plan some needs 1e\+06 GB for its buffers"):
        Memory(alone, CPU, (), scratch_nbytes=10**15)


@examples(40)
@given(
    plan=legal_plans(
        world_sizes=(4,),
        max_times=2,
        max_runs=1,
        op_kinds=(*COLLECTIVES, Copy, Pack, Unpack, Wait),
        counts=(1, 3, 250),
        algorithms=ALGORITHMS,
    )
)
def test_worlds_agree_on_any_plan_that_moves_data(pools: dict[int, Pool], plan: Plan) -> None:
    wide = [each if each.dtype == "uint8" else dataclasses.replace(each, dtype="float64") for each in plan.buffers]
    bodies = tuple(tuple(map(by_members, body)) for body in plan.bodies)
    plan = legal(dataclasses.replace(plan, buffers=tuple(wide), bodies=bodies))
    values = drawn(plan)
    theirs = pools[4].run(buffers_by_plan, plan, values)
    assert_equal_values(plan, theirs, buffers_in_virtual_world(plan, values), 1e-9)


def by_members(op: Op) -> Op:
    """Let the servers of an all-reduce be the first members of the group, as many as there are servers."""
    if not isinstance(op, AllReduce) or op.servers is None:
        return op
    return dataclasses.replace(op, servers=Servers(op.servers.parts, tuple(range(len(op.servers.parts)))))


@pytest.mark.parametrize("method", ["exact", "mstopk", "dgc"])
def test_worlds_select_send_and_densify_alike(pools: dict[int, Pool], method: str) -> None:
    steps = [
        (
            Select("grad", "sparse", "residual", 7, method),
            AllGather("sparse", "all sparse", Group(2, stride=2)),
            Densify("all sparse", "sum"),
            Copy("all sparse", "kept"),
        )
    ] * 3
    buffers = (
        Buffer("grad", 100, "float64", initialized=True),
        Buffer("residual", 100, "float64", initialized=True),
        Buffer("sparse", 7, "float64", sparse=True),
        Buffer("all sparse", 14, "float64", sparse=True),
        Buffer("kept", 14, "float64", sparse=True),
        Buffer("sum", 100, "float64"),
    )
    plan = legal(Plan.from_steps("select", world_size=4, buffers=buffers, steps=steps))
    values = drawn(plan)
    ours = buffers_in_virtual_world(plan, values)
    assert_equal_values(plan, pools[4].run(buffers_by_plan, plan, values), ours)
    np.testing.assert_array_equal(ours["kept"][1], ours["all sparse"][1])


def test_what_is_selected_leaves_the_residual() -> None:
    buffers = (
        Buffer("grad", 5, "float64", initialized=True),
        Buffer("residual", 5, "float64", initialized=True),
        Buffer("sparse", 2, "float64", sparse=True),
        Buffer("dense", 5, "float64"),
    )
    steps = [(Select("grad", "sparse", "residual", 2), Densify("sparse", "dense"))]
    plan = legal(Plan.from_steps("select", world_size=1, buffers=buffers, steps=steps))
    values = {"grad": (np.array([[1.0, -5.0, 0.5, 3.0, 0.0]]),), "residual": (np.array([[0.0, 1.0, 4.0, -2.5, 0.25]]),)}
    left = buffers_in_virtual_world(plan, values)
    assert left["dense"][0].tolist() == [[0.0, -4.0, 4.5, 0.0, 0.0]]
    assert left["residual"][0].tolist() == [[1.0, 0.0, 0.0, 0.5, 0.25]]
    assert left["grad"][0].tolist() == values["grad"][0].tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_worlds_agree_on_short_numbers(pools: dict[int, Pool], dtype: str) -> None:
    servers = Servers((1, 5), members=(3, 0))
    steps = [
        (
            AllReduce("a", Group(4)),
            ReduceScatter("a", "b", Group(2)),
            AllGather("b", "a", Group(2)),
            AllReduce("a", Group(4), algorithm="server", servers=servers),
            Copy("a", "wide"),
            AllGather("top", "all", Group(4)),  # an odd number of bytes of values, before indices
            Broadcast("all", Group(4), root=2),
        )
    ]
    buffers = (
        Buffer("a", 6, dtype, initialized=True),
        Buffer("b", 3, dtype),
        Buffer("wide", 6, "float64"),
        Buffer("top", 3, dtype, sparse=True, initialized=True),
        Buffer("all", 12, dtype, sparse=True),
    )
    plan = legal(Plan.from_steps("short", world_size=4, buffers=buffers, steps=steps))
    values = {name: drawn(plan)[name] for name in ("a", "top")}
    values["a"] = (np.random.default_rng(0).integers(-8, 9, (4, 6)).astype(np.float32),)
    ours = buffers_in_virtual_world(plan, values)
    assert_equal_values(plan, pools[4].run(buffers_by_plan, plan, values), ours, 0.0)


# --- training ---


def assert_same(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], training: Training) -> None:
    """Compare what the ranks have, relative to the largest number; a rank's result is parameters or losses."""
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.shape == other.shape
        error = np.abs(one - other).max() / np.abs(other).max()
        assert error <= TOLERANCE[training.dtype], f"rank {rank} is off by {error:.2g}"


def assert_worlds_agree(pool: Pool, plan: Plan, training: Training, *, in_caller: bool = False) -> list[np.ndarray]:
    """Train in both worlds, and return the parameters of every rank."""
    parameters, losses = in_virtual_world(plan, training)
    results = pool.run(by_plan, plan, training, in_caller)
    assert_same([result[0] for result in results], parameters, training)
    assert_same([result[1] for result in results], losses, training)
    return [result[0] for result in results]


def assert_all_three_agree(pool: Pool, schedule: Schedule, how: Torch, training: Training, **job: int) -> None:
    """Train for more than two of the longest periods after the warm-up."""
    n_steps = max([N_STEPS, *((how.local_after or 0) + 2 * period + 2 for period, _ in how.levels)])
    plan = legal(schedule.plan(training.job(pool.world_size, n_steps, **job)))
    ours = assert_worlds_agree(pool, plan, training)
    theirs = pool.run(by_torch, how, training, n_steps)
    assert_same(ours, [result[0] for result in theirs], training)


SYNC = Sync(first_bucket_nbytes=100, bucket_nbytes=400)


@pytest.mark.parametrize(
    "training",
    [
        Training(),
        Training(dtype=torch.float32),
        Training(optimizer="adam"),
        Training("frozen"),
        Training("tied", "adam"),
        Training("conv"),
        Training("conv", dtype=torch.float32),
        Training("even backwards"),
    ],
    ids=str,
)
def test_sync_is_distributed_data_parallel(pools: dict[int, Pool], training: Training) -> None:
    plan = SYNC.plan(training.job(4, N_STEPS))
    assert sum(isinstance(op, AllReduce) for op in plan.bodies[0]) > 1
    assert_all_three_agree(pools[4], SYNC, Torch(), training)


def test_sync_of_eight_is_distributed_data_parallel(pools: dict[int, Pool]) -> None:
    assert_all_three_agree(pools[8], SYNC, Torch(), Training())


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_parameter_that_one_rank_uses_is_updated_as_by_ddp(pools: dict[int, Pool], optimizer: str) -> None:
    training = Training("one rank uses it", optimizer)
    assert_all_three_agree(pools[4], SYNC, Torch(find_unused=True), training)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_parameter_that_nobody_uses_is_left_alone_as_by_ddp(pools: dict[int, Pool], optimizer: str) -> None:
    training = Training("all use it or none", optimizer)
    assert_all_three_agree(pools[4], SYNC, Torch(find_unused=True), training)


@pytest.mark.parametrize(
    ("warmup_steps", "training"),
    [(0, Training()), (0, Training(dtype=torch.float32)), (7, Training()), (7, Training("conv", "adam"))],
    ids=str,
)
def test_local_sgd_is_post_local_sgd_with_periodic_averages(
    pools: dict[int, Pool], warmup_steps: int, training: Training
) -> None:
    schedule = LocalSGD(period=4, warmup_steps=warmup_steps, phase=warmup_steps % 4)
    how = Torch(ddp=warmup_steps > 0, local_after=warmup_steps, levels=((4, 4),), plain=True)
    assert_all_three_agree(pools[4], schedule, how, training)


@four_and_eight
@pytest.mark.parametrize(("warmup_steps", "optimizer"), [(0, "adam"), (5, "momentum")])
def test_hierarchical_sgd_is_hierarchical_model_averaging(
    pools: dict[int, Pool], world_size: int, optimizer: str, warmup_steps: int
) -> None:
    levels = ((2, 2), (6, world_size)) if world_size == 4 else ((2, 2), (4, 4), (8, 8))
    schedule = HierarchicalSGD(levels=dict(levels), warmup_steps=warmup_steps, phase=0, intra_node_gradients=False)
    how = Torch(local_after=warmup_steps, levels=levels)
    assert_all_three_agree(pools[world_size], schedule, how, Training(optimizer=optimizer))


@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_hierarchical_sgd_averages_gradients_in_the_node_as_the_hook_does(
    pools: dict[int, Pool], warmup_steps: int
) -> None:
    levels = ((2, 4), (6, 8))
    schedule = HierarchicalSGD(levels=dict(levels), warmup_steps=warmup_steps, phase=0)
    how = Torch(local_after=warmup_steps, node=2, levels=levels)
    assert_all_three_agree(pools[8], schedule, how, Training(), ranks_per_node=2)


@pytest.mark.parametrize(
    ("schedule", "how", "training"),
    [
        (SYNC, Torch(), Training("even backwards", micro_batches=3)),
        (SYNC, Torch(find_unused=True), Training("one rank uses it", "adam", micro_batches=2)),
        (LocalSGD(period=4, phase=0), Torch(ddp=False, levels=((4, 4),), plain=True), Training(micro_batches=2)),
        (
            HierarchicalSGD(levels={2: 2, 4: 4}, phase=0),
            Torch(local_after=0, node=2, levels=((2, 2), (4, 4))),
            Training(micro_batches=2),
        ),
        (HiTopK(density=1.0, method="exact"), Torch(), Training(micro_batches=2)),
    ],
    ids=["sync", "sync, a parameter unused", "local", "hierarchical", "hitopk"],
)
def test_gradients_of_several_passes_are_those_under_no_sync(
    pools: dict[int, Pool], schedule: Schedule, how: Torch, training: Training
) -> None:
    assert_all_three_agree(pools[4], schedule, how, training, ranks_per_node=2)


@pytest.mark.parametrize("schedule", [SYNC, LocalSGD(period=3), HierarchicalSGD(levels={2: 2, 4: 4})], ids=str)
def test_computing_in_the_calling_thread_changes_no_values(pools: dict[int, Pool], schedule: Schedule) -> None:
    training = Training()
    assert_worlds_agree(pools[4], schedule.plan(training.job(4, 8)), training, in_caller=True)


def test_ranks_draw_the_same_random_numbers_in_both_worlds(pools: dict[int, Pool]) -> None:
    training = Training("dropout")
    assert_worlds_agree(pools[4], LocalSGD(period=3).plan(training.job(4, 8)), training)


@pytest.mark.parametrize("source", ["device", "memory", "storage"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_step_trains_on_its_own_batch_whichever_way_it_comes(
    pools: dict[int, Pool], source: str, micro_batches: int
) -> None:
    training = Training(micro_batches=micro_batches)
    path = InputPath(source, prefetch=3)
    ours = assert_worlds_agree(pools[4], SYNC.plan(training.job(4, 8, path=path)), training)
    theirs = pools[4].run(by_torch, Torch(), training, 8)
    assert_same(ours, [result[0] for result in theirs], training)


# --- plans written by hand ---

WORLD = Group(4)
EVEN = Training("even")  # its parameters can be cut into four equal slices
N = 6 * 8 + 8 + 8 * 4 + 4
FORWARD, BACKWARD = Forward(("param",), ("loss",)), Backward(("param", "loss"), "grad")
UPDATE = Optimize(("param",), ("grad",))


def by_hand(body: Body, *more: Buffer, n_steps: int = 8) -> Plan:
    buffers = (
        Buffer("param", N, "float64", tensors=(0, 4), initialized=True),
        Buffer("grad", N, "float64", tensors=(0, 4)),
        Buffer("loss", 1),
        *more,
    )
    return legal(Plan.from_steps("by hand", world_size=4, buffers=buffers, steps=[body] * n_steps))


def sparse(k: int, method: str = "exact") -> Plan:
    """Return top-k with error feedback; the update reads another buffer than the backward pass writes."""
    return by_hand(
        (
            FORWARD,
            BACKWARD,
            Select("grad", "sparse", "residual", k, method),
            AllGather("sparse", "all sparse", WORLD),
            Densify("all sparse", "summed"),
            Optimize(("param",), ("summed",)),
        ),
        Buffer("residual", N, "float64", initialized=True),
        Buffer("sparse", k, "float64", sparse=True),
        Buffer("all sparse", 4 * k, "float64", sparse=True),
        Buffer("summed", N, "float64", tensors=(0, 4)),
    )


@pytest.mark.parametrize("target", ["grad", "whole"])
def test_reduce_scatter_and_all_gather_train_as_all_reduce(pools: dict[int, Pool], target: str) -> None:
    expected, _ = in_virtual_world(by_hand((FORWARD, BACKWARD, AllReduce("grad", WORLD), UPDATE)), EVEN)
    scattered = by_hand(
        (
            FORWARD,
            BACKWARD,
            ReduceScatter("grad", "slice", WORLD),
            AllGather("slice", target, WORLD),
            Optimize(("param",), (target,)),
        ),
        Buffer("slice", N // 4, "float64"),
        *((Buffer("whole", N, "float64", tensors=(0, 4)),) if target == "whole" else ()),
    )
    assert_same(assert_worlds_agree(pools[4], scattered, EVEN), expected, EVEN)


def test_two_levels_of_all_reduce_train_as_one(pools: dict[int, Pool]) -> None:
    expected, _ = in_virtual_world(by_hand((FORWARD, BACKWARD, AllReduce("grad", WORLD), UPDATE)), EVEN)
    levels = (AllReduce("grad", Group(2)), AllReduce("grad", Group(2, stride=2)))
    assert_same(assert_worlds_agree(pools[4], by_hand((FORWARD, BACKWARD, *levels, UPDATE)), EVEN), expected, EVEN)


def test_one_updates_and_sends_the_parameters_to_all(pools: dict[int, Pool]) -> None:
    expected, _ = in_virtual_world(by_hand((FORWARD, BACKWARD, AllReduce("grad", WORLD), UPDATE)), EVEN)
    server = by_hand((FORWARD, BACKWARD, Reduce("grad", WORLD, root=2), UPDATE, Broadcast("param", WORLD, root=2)))
    assert_same(assert_worlds_agree(pools[4], server, EVEN), expected, EVEN)


def test_top_k_of_everything_trains_as_the_dense_sum(pools: dict[int, Pool]) -> None:
    expected, _ = in_virtual_world(by_hand((FORWARD, BACKWARD, AllReduce("grad", WORLD, "sum"), UPDATE)), EVEN)
    assert_same(assert_worlds_agree(pools[4], sparse(N), EVEN), expected, EVEN)


@pytest.mark.parametrize("method", ["exact", "mstopk", "dgc"])
def test_worlds_agree_on_top_k_with_error_feedback(pools: dict[int, Pool], method: str) -> None:
    assert_worlds_agree(pools[4], sparse(9, method), EVEN)


STALE = Plan.from_steps(  # the second bucket's gradient of the step before, used while this step's is computed
    "stale",
    world_size=4,
    buffers=(
        Buffer("param", N, "float64", tensors=(0, 4), initialized=True),
        Buffer("grad.0", 36, "float64", tensors=(2, 4)),
        Buffer("grad.1", 56, "float64", tensors=(0, 2), initialized=True),
        Buffer("old", 56, "float64", tensors=(0, 2)),
        Buffer("loss", 1),
    ),
    steps=[
        (
            FORWARD,
            Backward(("param", "loss"), "grad.0"),
            AllReduce("grad.1", WORLD),
            Copy("grad.1", "old"),
            Backward(("param", "loss"), "grad.1"),
            Optimize(("param",), ("grad.0", "old")),
        )
    ]
    * 10,
)


@pytest.mark.parametrize("backwards", [False, True], ids=["gradients in order", "gradients out of order"])
def test_bucket_keeps_its_contents_until_its_backward_begins(pools: dict[int, Pool], backwards: bool) -> None:
    training = Training("even backwards" if backwards else "even", "sgd")
    plan = legal(STALE if not backwards else _backwards(STALE))
    ours = assert_worlds_agree(pools[4], plan, training)
    assert_same(ours, _trained_with_stale_gradients(training, 10), training)


def _backwards(plan: Plan) -> Plan:
    """Return the plan for the model whose parameters stand in the order in which their gradients come."""
    sizes = {"grad.0": (56, (2, 4)), "grad.1": (36, (0, 2)), "old": (36, (0, 2))}
    buffers = [
        dataclasses.replace(each, count=sizes[each.name][0], tensors=sizes[each.name][1])
        if each.name in sizes
        else each
        for each in plan.buffers
    ]
    return dataclasses.replace(plan, buffers=tuple(buffers))


def _trained_with_stale_gradients(training: Training, n_steps: int) -> list[np.ndarray]:
    """Train without plans: the first two tensors move by the mean gradient of the step before."""
    ranks = [training.make(rank) for rank in range(4)]
    parameters = [list(module.parameters()) for module, _ in ranks]
    stale = [torch.zeros_like(parameter) for parameter in parameters[0][:2]]
    for step in range(n_steps):
        fresh = []
        for rank, (module, optimizer) in enumerate(ranks):
            optimizer.zero_grad()
            inputs, targets = training.batch(step, rank)
            loss(module(inputs), targets).backward()
            fresh.append([parameter.grad for parameter in parameters[rank][:2]])
            for parameter, gradient in zip(parameters[rank][:2], stale, strict=True):
                parameter.grad = gradient
            optimizer.step()
        stale = [torch.stack(column).mean(dim=0) for column in zip(*fresh, strict=True)]
    return [torch.cat([each.detach().flatten() for each in mine]).numpy() for mine in parameters]


def test_update_leaves_alone_what_it_does_not_name(pools: dict[int, Pool]) -> None:
    body = (
        FORWARD,
        Backward(("param.0", "loss"), "grad.1"),
        Backward(("param.0", "loss"), "grad.0"),
        Optimize(("param.0",), ("grad.0",)),
    )
    every_other = (*body[:3], Optimize(("param.0", "param.1"), ("grad.0", "grad.1")))
    forward = Forward(("param.0", "param.1"), ("loss",))
    buffers = (
        Buffer("param.0", 56, "float64", tensors=(0, 2), initialized=True),
        Buffer("param.1", 36, "float64", tensors=(2, 4), initialized=True),
        Buffer("grad.0", 56, "float64", tensors=(0, 2)),
        Buffer("grad.1", 36, "float64", tensors=(2, 4)),
        Buffer("loss", 1),
    )
    steps = [(forward, *body[1:]), (forward, *every_other[1:])] * 5
    plan = legal(Plan.from_steps("in part", world_size=4, buffers=buffers, steps=steps))
    ours = assert_worlds_agree(pools[4], plan, EVEN)
    module, optimizer = EVEN.make()
    for step in range(10):
        optimizer.zero_grad()
        inputs, targets = EVEN.batch(step, 0)
        loss(module(inputs), targets).backward()
        if step % 2 == 0:
            module[2].weight.grad = module[2].bias.grad = None
        optimizer.step()
    assert_same(ours[:1], [torch.cat([each.detach().flatten() for each in module.parameters()]).numpy()], EVEN)


# --- the virtual world alone ---


def test_sync_of_256_ranks_trains_as_one_on_all_their_data() -> None:
    training = Training()
    ours, losses = in_virtual_world(SYNC.plan(training.job(256, 5, ranks_per_node=8)), training)
    module, optimizer = training.make()
    for step in range(5):
        batches = [training.batch(step, rank) for rank in range(256)]
        inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
        optimizer.zero_grad()
        value = loss(module(inputs), targets)
        value.backward()
        optimizer.step()
        assert losses[:, step].mean() == pytest.approx(value.item(), rel=1e-12)
    expected = torch.cat([each.detach().flatten() for each in module.parameters()]).numpy()
    assert_same(ours, [expected] * 256, training)


def test_every_step_is_told_with_the_modules_of_all_ranks() -> None:
    training = Training()
    plan = LocalSGD(period=2).plan(training.job(4, 6))
    told = []

    def tell(step: int, modules: Sequence[nn.Module]) -> None:
        weights = torch.stack([module[0].weight.detach() for module in modules])
        told.append((step, bool((weights == weights[0]).all())))

    virtual.train_together(plan, training.make, loss, training.batch, on_step=tell)
    assert told == [(0, False), (1, True), (2, False), (3, True), (4, False), (5, True)]


def test_training_in_the_virtual_world_leaves_torchs_random_numbers_alone() -> None:
    training = Training("dropout")
    before = torch.get_rng_state()
    virtual.train_together(SYNC.plan(training.job(4, 2)), training.make, loss, training.batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_more_ranks_than_fit_into_memory_are_refused() -> None:
    buffers = (Buffer("param", 10**9, initialized=True), Buffer("flat", 10**9))
    plan = legal(Plan.from_steps("large", world_size=1000, buffers=buffers, steps=[(Copy("param", "flat"),)]))
    with pytest.raises(RunError, match=r"needs 8e\+03 GB for its buffers; the host has"):
        Memory(plan, CPU, {"param", "flat"}, n_ranks=1000)


def test_seed_decides_what_ranks_draw() -> None:
    training = Training("dropout")
    plan = SYNC.plan(training.job(4, 2))
    first, same, other = (
        virtual.train_together(plan, training.make, loss, training.batch, seed=seed).losses for seed in (0, 0, 10)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


# --- what a model is tied to ---


def test_parameters_keep_their_memory_format_in_a_plans_buffer() -> None:
    training = Training("conv")
    plan = SYNC.plan(training.job(1, 1))
    module, _ = training.make()
    before = [(each.detach().clone(), each.stride()) for each in module.parameters()]
    memory = Memory(plan, CPU, Binding.buffers_of(plan))
    Binding(plan, module, memory)
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    for parameter, (values, strides) in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, values)
        assert parameter.stride() == strides
        assert parameter.untyped_storage().data_ptr() == memory.dense("param").untyped_storage().data_ptr()


def test_padding_belongs_to_no_parameter_and_stays_zero() -> None:
    parameter, gradient = (Buffer(name, N + 3, "float64", tensors=(0, 4), padding=3) for name in ("param", "grad"))
    plan = by_hand((FORWARD, BACKWARD, AllReduce("grad", WORLD), UPDATE))
    buffers = (dataclasses.replace(parameter, initialized=True), gradient, *plan.buffers[2:])
    padded = legal(dataclasses.replace(plan, buffers=buffers))
    memory = Memory(padded, CPU, Binding.buffers_of(padded), n_ranks=4)
    programs = []
    for rank in range(4):
        module, optimizer = EVEN.make()
        batch = partial(EVEN.batch, rank=rank)
        programs.append(ModuleProgram(padded, module, loss, optimizer, batch, memory.row(rank), device=CPU, rank=rank))
    virtual.perform_together(padded, programs, memory)
    expected, _ = in_virtual_world(plan, EVEN)
    np.testing.assert_array_equal(memory.dense("param")[:, :N].detach().numpy(), expected)
    assert not memory.dense("param")[:, N:].any()
    assert not memory.dense("grad")[:, N:].any()


def test_only_buffers_of_the_model_take_memory() -> None:
    plan = SYNC.plan(Training().job(4, 4, path=InputPath("storage")))
    names = {buffer.name for buffer in plan.buffers}
    assert Binding.buffers_of(plan) == {name for name in names if name.startswith(("param", "grad"))}
    averaging = LocalSGD(period=2).plan(Training().job(4, 4))
    assert "flat" in Binding.buffers_of(averaging)
    assert {"residual", "sparse", "all sparse", "summed"} <= Binding.buffers_of(sparse(3))


COPIED, TAKEN_BACK, AVERAGED = Copy("param", "flat"), Copy("flat", "param"), AllReduce("flat", WORLD)


@pytest.mark.parametrize(
    ("at_end", "in_place"),
    [
        ((COPIED, AVERAGED, TAKEN_BACK), {"flat": "param"}),
        ((COPIED, AVERAGED), {}),  # taken back later, or never
        ((AVERAGED, COPIED, TAKEN_BACK), {}),  # it carries over what it was
        ((COPIED, UPDATE, TAKEN_BACK), {}),  # the parameters do not rest
        ((COPIED, Copy("param", "other"), TAKEN_BACK, Copy("other", "param")), {}),  # nor with two copies
    ],
)
def test_copies_of_what_rests_are_in_place(at_end: tuple[Op, ...], in_place: dict[str, str]) -> None:
    copies = (Buffer(name, N, "float64", initialized=True) for name in ("flat", "other"))
    plan = by_hand((FORWARD, BACKWARD, UPDATE, *at_end), *copies)
    assert buffers_in_place(plan) == in_place


def test_plan_for_another_model_is_refused() -> None:
    plan = SYNC.plan(Training().job(2, 1))
    with pytest.raises(PlanError, match="for a model of 6 tensors; this one has 4"):
        in_virtual_world(plan, EVEN)
    with pytest.raises(PlanError, match=r"is float64, parameter 0\.weight is torch.float32"):
        in_virtual_world(plan, Training(dtype=torch.float32))
