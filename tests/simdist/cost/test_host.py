"""What communication takes of CPU cores: closed forms, and nothing where a cluster does not say."""

import pytest
from engine_runs import des, fast
from flat_clusters import grouped
from hypothesis import given
from hypothesis import strategies as st

from simdist.cost import price
from simdist.plan import AllGather, AllReduce, Backward, Buffer, Forward, Optimize, Plan, ReduceScatter, Wait
from simdist.plan.group import Group
from simdist.scenario import Cluster, Link, Tensor, Workload

COLLECTIVE_S, COPY_BPS, HANDOVER_S = 1e-3, 1e9, 1e-4
HOST = {"copy_Bps": COPY_BPS, "collective_s": COLLECTIVE_S, "handover_s": HANDOVER_S}
FABRIC = Link(latency_s=2e-4, bandwidth_Bps=2e9)
NETWORK = Link(latency_s=1e-4, bandwidth_Bps=1e8)
WORKLOAD = Workload(
    tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.01, backward_s=0.02, optimize_s=1e-3
)
COUNT = 2_000_000
NBYTES = 4 * COUNT


def cluster(nodes=1, ranks=2, **given):
    made = grouped({"library": "gloo", "host": HOST, "cores_per_node": 2, **given})
    return Cluster(nodes=nodes, gpus_per_node=ranks, fabric=FABRIC, network=NETWORK, **made)


def alone_s(op, where, count=COUNT):
    buffers = Buffer("whole", count, initialized=True), Buffer("slice", count // op.group.size, initialized=True)
    plan = Plan.from_steps("one", world_size=where.world_size, buffers=buffers, steps=[(op,)])
    found_s = {
        price(plan, where, WORKLOAD).of[op].alone_s,
        des.simulate(plan, price(plan, where, WORKLOAD), {}).makespan_s,
    }
    assert max(found_s) == pytest.approx(min(found_s), rel=1e-12)
    return min(found_s)


@pytest.mark.parametrize(("cores", "crowd"), [(1, 2.0), (2, 1.0), (8, 1.0)])
def test_two_ranks_of_a_node_take_turns_on_its_cores(cores, crowd):
    """Both pass twice over the whole; the ring puts the whole on each port, which is as slow as the cores are few."""
    work_s = COLLECTIVE_S + 2 * NBYTES / COPY_BPS
    flow_s = NBYTES / (FABRIC.bandwidth_Bps / crowd)
    found_s = alone_s(AllReduce("whole", Group(2)), cluster(cores_per_node=cores))
    assert found_s == pytest.approx(crowd * (HANDOVER_S + work_s) + flow_s, rel=1e-12)


@pytest.mark.parametrize(
    ("op", "passes"),
    [
        (AllReduce("whole", Group(4)), 2),
        (ReduceScatter("whole", "slice", Group(4)), 3.25),
        (AllGather("slice", "whole", Group(4)), 3),
    ],
)
@pytest.mark.parametrize(("shared", "crowd"), [(False, 1.0), (True, 2.0)])
def test_containers_of_one_machine_share_its_cores(op, passes, shared, crowd):
    rounds = 3 if isinstance(op, AllGather) else 6
    flow_s = rounds * NBYTES / 4 / NETWORK.bandwidth_Bps
    work_s = HANDOVER_S + COLLECTIVE_S + passes * NBYTES / COPY_BPS
    assert alone_s(op, cluster(4, 1, shares_cores=shared)) == pytest.approx(crowd * work_s + flow_s, rel=1e-12)


@given(st.integers(1, 10**6))
def test_latency_shows_where_segments_are_shorter_than_it(count):
    """Of a ring over one kind of link, a round takes two segments on the wire, or one and a hop's latency."""
    nbytes = 4 * 8 * count
    segment_s = nbytes / 8 / 2 / NETWORK.bandwidth_Bps
    rounds_s = 14 * max(2 * segment_s, segment_s + NETWORK.latency_s)
    work_s = HANDOVER_S + COLLECTIVE_S + 2 * nbytes / COPY_BPS
    assert alone_s(AllReduce("whole", Group(8)), cluster(8, 1), 8 * count) == pytest.approx(work_s + rounds_s, rel=1e-9)


def step_plan(world_size):
    step = (
        Forward(("param",), ("loss",)),
        Wait("loss"),
        Backward(("loss", "param"), "grad"),
        AllReduce("grad", Group(world_size)),
        Optimize(("param",), ("grad",)),
    )
    buffers = tuple(Buffer(name, COUNT, initialized=True) for name in ("param", "loss", "grad"))
    return Plan.from_steps("steps", world_size=world_size, buffers=buffers, steps=[step] * 3)


@pytest.mark.parametrize("chunkwise", [False, True])
def test_every_operation_begins_after_a_handover_in_both_engines(chunkwise):
    where = cluster(4, 1, shares_cores=True, chunkwise=chunkwise)
    without = where.model_copy(update={"host": {"handover_s": 0.0}})
    plan = step_plan(4)
    times_s = [
        [engine.simulate(plan, price(plan, each, WORKLOAD), {}).makespan_s for engine in (des, fast)]
        for each in (where, without)
    ]
    assert times_s[0][0] == times_s[0][1]
    assert times_s[0][0] - times_s[1][0] == pytest.approx(3 * 5 * 2 * HANDOVER_S, rel=1e-9)


def test_cores_alone_change_no_price():
    plan = step_plan(4)
    plain, counted = (cluster(4, 1, host={}, cores_per_node=cores) for cores in (None, 1))
    for op, cost in price(plan, plain, WORKLOAD).of.items():
        other = price(plan, counted, WORKLOAD).of[op]
        assert getattr(cost, "alone_s", None) == getattr(other, "alone_s", None)
        assert getattr(cost, "seconds", None) == getattr(other, "seconds", None)
