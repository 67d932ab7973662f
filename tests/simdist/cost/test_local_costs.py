"""Cost of fusion, merging, trust ratios and ticks on a rank: bytes over the memory's bandwidth, counted by hand."""

import numpy as np
import pytest

from simdist.cost import Local, price
from simdist.plan import Buffer, LowRank, Matrix, Merge, Op, Optimize, Pack, Plan, Tick, TrustRatios, Unpack
from simdist.plan.group import Group
from simdist.plan.ops import tick_s
from simdist.scenario.cluster import Cluster, Device, Link
from simdist.scenario.workload import Tensor, Workload

RATE_BPS = 1e6
COUNTS = (100, 10, 30, 60, 5)
TENSORS = tuple(Tensor(name=str(number), count=count) for number, count in enumerate(COUNTS))
WORKLOAD = Workload(tensors=TENSORS, batch_size=1, forward_s=0.1, backward_s=0.2)
BUFFERS = (
    Buffer("param.0", 110, tensors=(0, 2), initialized=True),
    Buffer("param.1", 95, tensors=(2, 5), initialized=True),
    Buffer("grad.0", 110, tensors=(0, 2), initialized=True),
    Buffer("grad.1", 95, tensors=(2, 5), initialized=True),
    Buffer("fused", 208, padding=3, initialized=True),
    Buffer("half", 208, "float16", padding=3, initialized=True),
    Buffer("residual", 205, initialized=True),
    Buffer("many", 40, sparse=True, initialized=True),
    Buffer("few", 20, sparse=True),
    *(Buffer(f"ratios.{n}", n) for n in range(1, 6)),
    Buffer("left", 2 * (10 + 5), initialized=True),
    Buffer("right", 2 * (8 + 4), initialized=True),
    Buffer("rest", 110 - 80 - 20),
    Buffer("kept.110", 110, initialized=True),
    Buffer("slice.0", 55),
)
MATRICES = (Matrix(0, 10, 8, 2), Matrix(90, 5, 4, 2))
PARAMS, GRADS = ("param.0", "param.1"), ("grad.0", "grad.1")


def seconds_of(op: Op, *, world_size: int = 1, rate_Bps: float = RATE_BPS, **settings: object) -> object:
    ideal = Link.ideal()
    device = Device(memory_bandwidth_Bps=rate_Bps, **settings)
    cluster = Cluster(nodes=world_size, gpus_per_node=1, fabric=ideal, network=ideal, device=device)
    plan = Plan.from_steps("one", world_size=world_size, buffers=BUFFERS, steps=[(op,)])
    cost = price(plan, cluster, WORKLOAD).of[op]
    assert isinstance(cost, Local)
    return cost.seconds


@pytest.mark.parametrize(
    ("fused", "nbytes"),
    [("fused", 4 * 205 + 4 * 205), ("half", 4 * 205 + 2 * 205)],
    ids=["same type", "converted"],
)
def test_fusion_reads_one_side_and_writes_the_other_without_the_padding(fused: str, nbytes: int) -> None:
    assert seconds_of(Pack(GRADS, fused)) == pytest.approx(nbytes / RATE_BPS)
    assert seconds_of(Unpack(fused, GRADS)) == pytest.approx(nbytes / RATE_BPS)
    assert seconds_of(Pack(GRADS, fused), rate_Bps=4 * RATE_BPS) == pytest.approx(nbytes / RATE_BPS / 4)


def test_merging_sorts_what_comes_in_and_writes_what_goes_out() -> None:
    """18 passes over 40 pairs of value and index, of 8 bytes each; 20 pairs are kept."""
    assert seconds_of(Merge("many", "few", "residual")) == pytest.approx((18 * 40 * 8 + 20 * 8) / RATE_BPS)


@pytest.mark.parametrize(
    ("group", "counts_of_ranks"),
    [
        (Group(1), [205] * 6),  # every rank all of them
        (Group(2), [140, 65] * 3),  # 3 tensors and 2
        (Group(3), [110, 90, 5] * 2),  # 2, 2 and 1
        (Group(3, 2), [110, 110, 90, 90, 5, 5]),
        (Group(6), [100, 10, 30, 60, 5, 0]),  # one each; the last has none
    ],
    ids=str,
)
def test_trust_ratios_read_parameters_and_gradients_of_the_members_share(
    group: Group, counts_of_ranks: list[int]
) -> None:
    op = TrustRatios(PARAMS, GRADS, f"ratios.{-(-5 // group.size)}", group)
    expected_s = 2 * 4 * np.array(counts_of_ranks) / RATE_BPS
    np.testing.assert_allclose(np.broadcast_to(seconds_of(op, world_size=6), 6), expected_s, rtol=1e-12)


def test_trust_ratios_of_some_parameters_read_only_those() -> None:
    op = TrustRatios(("param.1",), ("grad.1",), "ratios.2", Group(2))  # of tensors of 30, 60 and 5 elements
    np.testing.assert_allclose(seconds_of(op, world_size=2), 2 * 4 * np.array([90, 5]) / RATE_BPS, rtol=1e-12)


def low_rank(stage: str) -> LowRank:
    return LowRank(stage, "grad.0", "kept.110", "left", "right", MATRICES, "rest")


def test_stages_of_powersgd_pass_over_matrices_and_multiply_by_factors() -> None:
    """100 elements of 4 bytes, factors of 2 (10 + 8) and 2 (5 + 4); beside them 10 elements that are no such matrix."""
    product = 4 * (100 + 54)
    column = {"left": 4 * (8 + 4) * (3 * 2 + 4), "right": 4 * (10 + 5) * (3 * 2 + 4)}  # by Gram-Schmidt
    assert seconds_of(low_rank("left")) == pytest.approx((3 * 400 + product + column["left"]) / RATE_BPS)
    assert seconds_of(low_rank("right")) == pytest.approx((product + column["right"]) / RATE_BPS)
    assert seconds_of(low_rank("product")) == pytest.approx((3 * 400 + product + 2 * 40) / RATE_BPS)
    measured = seconds_of(low_rank("right"), orthonormalize_s=3e-3)
    assert measured == pytest.approx(product / RATE_BPS + 4 * 3e-3)  # 2 columns of each of 2 matrices
    slow = seconds_of(low_rank("product"), peak_flops=100.0)
    assert slow == pytest.approx((3 * 400 + 2 * 40) / RATE_BPS + 2 * 2 * 100 / 100.0)


def test_a_shared_update_takes_its_share() -> None:
    alone = seconds_of(Optimize(("param.0",), ("grad.0",)))
    shared = Optimize(("param.0",), ("grad.0",), slices=("slice.0",), shared_by=Group(2))
    assert seconds_of(shared, world_size=2) == pytest.approx(alone / 2)


def test_a_tick_takes_no_time_by_itself() -> None:
    assert seconds_of(Tick(("grad.0",), 0.005)) == 0.0


@pytest.mark.parametrize(
    ("written_s", "ticked_s"),
    [
        (0.0, 0.0),
        (1e-6, 0.005),
        (0.005, 0.005),
        (0.005001, 0.01),
        (3 * 0.005, 0.015),  # 0.015 in binary is a little less than 3 x 0.005
        (0.1 + 0.2, 0.3),  # rounded to a little more than 60 periods: on the tick all the same
        (1000.0, 1000.0),
    ],
)
def test_a_clock_of_5_ms_ticks_at_its_multiples(written_s: float, ticked_s: float) -> None:
    assert float(tick_s(written_s, 0.005)) == pytest.approx(ticked_s, rel=1e-12)
    assert float(tick_s(written_s, 0.005)) >= written_s
