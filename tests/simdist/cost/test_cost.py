"""Cost of operations: textbook formulas to 1e-12, and bytes on every resource of a cluster with two levels."""

from pathlib import Path

import closed_forms
import numpy as np
import pytest
from engine_runs import des, fast
from flat_clusters import grouped
from pydantic import ValidationError

from simdist.cost import Local, Shared, compute_s, price, tensor_backward_s
from simdist.cost.topology import longest_chain_s
from simdist.errors import PlanError, ScenarioError
from simdist.plan import (
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Buffer,
    Copy,
    Delay,
    Densify,
    Forward,
    Load,
    Merge,
    Optimize,
    Plan,
    Reduce,
    ReduceScatter,
    Save,
    Select,
    Wait,
)
from simdist.plan.group import Group
from simdist.scenario.cluster import Cluster, Device, DeviceOverride, Link, Storage
from simdist.scenario.workload import Tensor, Workload

IDEAL = Link.ideal()
ALPHA_S, RATE_BPS = 3e-5, 1.1e9
LINE = Link(latency_s=ALPHA_S, bandwidth_Bps=RATE_BPS)
WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1, backward_s=0.2, optimize_s=0.05)
COUNT = 27_720  # divides by every world here


def cost_of(op, buffers, cluster, workload=WORKLOAD):
    """Return the price list of a plan of one operation, and the operation's entry."""
    plan = Plan.from_steps("one", world_size=cluster.world_size, buffers=buffers, steps=[(op,)])
    costs = price(plan, cluster, workload)
    return plan, costs, costs.of[op]


def whole_and_slice(n, count=COUNT):
    return Buffer("whole", count, initialized=True), Buffer("slice", count // n, initialized=True)


def nodes(n, *, network=LINE, gpus_per_node=1, fabric=IDEAL, **settings):
    return Cluster(nodes=n, gpus_per_node=gpus_per_node, fabric=fabric, network=network, **grouped(settings))


def resource_nbytes(costs, cost):
    """Return the bytes of all transfers of an operation on every resource."""
    totals = np.zeros(costs.resources.n_resources)
    for transfer in cost.transfers:
        for stage in transfer.stages:
            totals[stage.resources] += stage.nbytes
    return totals


TEXTBOOK = [
    ("ring", AllReduce("whole", Group(0), algorithm="ring"), closed_forms.ring_all_reduce_s, range(2, 13)),
    ("auto", AllGather("slice", "whole", Group(0)), closed_forms.ring_half_s, range(2, 13)),
    ("ring", ReduceScatter("whole", "slice", Group(0)), closed_forms.ring_half_s, range(2, 13)),
    ("ring", AllGather("slice", "whole", Group(0)), closed_forms.ring_half_s, range(2, 13)),
    ("tree", AllReduce("whole", Group(0)), closed_forms.tree_all_reduce_s, range(2, 13)),
    ("halving_doubling", AllReduce("whole", Group(0)), closed_forms.halving_doubling_all_reduce_s, (2, 4, 8)),
    ("halving_doubling", ReduceScatter("whole", "slice", Group(0)), closed_forms.halving_doubling_half_s, (2, 4, 8)),
    ("halving_doubling", AllGather("slice", "whole", Group(0)), closed_forms.halving_doubling_half_s, (2, 4, 8)),
    ("tree", Reduce("whole", Group(0)), lambda *a: closed_forms.tree_all_reduce_s(*a) / 2, range(2, 13)),
    ("tree", Broadcast("whole", Group(0)), lambda *a: closed_forms.tree_all_reduce_s(*a) / 2, range(2, 13)),
]


def sized(op, n, algorithm):
    arguments = {name: getattr(op, name) for name in type(op).__dataclass_fields__}
    return type(op)(**{**arguments, "group": Group(n), "algorithm": algorithm})


@pytest.mark.parametrize(
    ("algorithm", "op", "formula", "sizes"),
    TEXTBOOK,
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
@pytest.mark.parametrize("inside", [False, True])
def test_collectives_on_one_kind_of_link_take_the_textbook_time(algorithm, op, formula, sizes, inside):
    for n in sizes:
        cluster = nodes(1, gpus_per_node=n, fabric=LINE, network=IDEAL) if inside else nodes(n)
        count = COUNT if COUNT % n == 0 else COUNT // n * n
        plan, costs, cost = cost_of(sized(op, n, algorithm), whole_and_slice(n, count), cluster)
        expected_s = formula(n, 4 * count, ALPHA_S, RATE_BPS)
        assert cost.alone_s == pytest.approx(expected_s, rel=1e-12)
        assert not costs.contested
        for engine in (des, fast):
            assert engine.simulate(plan, costs, {}).makespan_s == cost.alone_s


@pytest.mark.parametrize("op", [Broadcast("whole", Group(5), root=2), Reduce("whole", Group(5), root=2)])
def test_pipelined_ring_of_a_rooted_collective_takes_a_latency_per_hop_and_carries_everything_once(op):
    _, costs, cost = cost_of(op, whole_and_slice(5), nodes(5))
    assert cost.alone_s == pytest.approx(4 * ALPHA_S + 4 * COUNT / RATE_BPS, rel=1e-12)
    topology, nbytes = costs.resources, resource_nbytes(costs, cost)
    out, into = nbytes[topology.nic_out(np.arange(5))], nbytes[topology.nic_in(np.arange(5))]
    silent, deaf = (1, 2) if isinstance(op, Broadcast) else (2, 3)
    assert (np.flatnonzero(out == 0).tolist(), np.flatnonzero(into == 0).tolist()) == ([silent], [deaf])
    assert set(out) == set(into) == {0.0, 4.0 * COUNT}


@pytest.mark.parametrize(
    "op", [AllReduce("whole", Group(1)), Broadcast("whole", Group(1)), AllGather("whole", "x", Group(1))]
)
def test_group_of_one_moves_nothing(op):
    buffers = (*whole_and_slice(1), Buffer("x", COUNT))
    _, _, cost = cost_of(op, buffers, nodes(4))
    assert (cost.alone_s, cost.transfers[0].stages) == (0.0, ())


def test_ring_through_two_nodes_crosses_each_nic_once():
    """0 -> 1 on the fabric, 1 -> 2 over the network, 2 -> 3, 3 -> 0: 6 rounds of S/4."""
    fabric = Link(latency_s=1e-6, bandwidth_Bps=5e9)
    op = AllReduce("whole", Group(4), algorithm="ring")
    _, costs, cost = cost_of(op, whole_and_slice(4), nodes(2, gpus_per_node=2, fabric=fabric))
    topology, nbytes, ranks = costs.resources, resource_nbytes(costs, cost), np.arange(4)
    shard = 6 * COUNT * 4 / 4
    assert nbytes[topology.nic_out(np.arange(2))].tolist() == [shard, shard]
    assert nbytes[topology.nic_in(np.arange(2))].tolist() == [shard, shard]
    assert nbytes[topology.fabric_out(ranks)].tolist() == [shard, 0, shard, 0]
    assert nbytes[topology.fabric_in(ranks)].tolist() == [0, shard, 0, shard]
    assert nbytes.sum() == 2 * 4 * shard
    chain_s = (2 * 3e-5 + 2 * 1e-6) + (3e-5 + 1e-6)  # 6 successive hops: once around, and 2 more
    assert cost.alone_s == pytest.approx(chain_s + shard / RATE_BPS, rel=1e-12)


def test_latency_of_a_ring_is_that_of_its_slowest_successive_hops():
    """14 hops of 8, every fourth over the network: once around, and 6 more, of which 2 may be."""
    fabric = Link(latency_s=1e-6, bandwidth_Bps=5e9)
    op = AllReduce("whole", Group(8), algorithm="ring")
    _, _, cost = cost_of(op, whole_and_slice(8), nodes(2, gpus_per_node=4, fabric=fabric))
    (stage,) = cost.transfers[0].stages
    assert stage.latency_s == pytest.approx((6 * 1e-6 + 2 * 3e-5) + (4 * 1e-6 + 2 * 3e-5), rel=1e-12)


@pytest.mark.parametrize(
    ("n_sends", "seconds"),
    [(1, 5.0), (2, 7.0), (3, 8.0), (4, 9.0), (6, 9.0 + 7.0)],  # 5 + 2, 1 + 5 + 2 or 5 + 2 + 1, all, all and 5 + 2
)
def test_a_chain_of_sends_takes_the_slowest_successive_hops(n_sends: int, seconds: float) -> None:
    assert longest_chain_s(np.array([1.0, 5.0, 2.0, 1.0]), n_sends) == seconds


@pytest.mark.parametrize("root", range(4))
@pytest.mark.parametrize("algorithm", ["ring", "tree", "direct"])
def test_root_of_a_reduce_sends_nothing_and_that_of_a_broadcast_gets_nothing(algorithm, root):
    for op, is_reduce in (
        (Reduce("whole", Group(4), root, algorithm=algorithm), True),
        (Broadcast("whole", Group(4), root, algorithm=algorithm), False),
    ):
        _, costs, cost = cost_of(op, whole_and_slice(4), nodes(4))
        side = costs.resources.nic_out if is_reduce else costs.resources.nic_in
        nbytes = resource_nbytes(costs, cost)[side(np.arange(4))]
        assert (nbytes == 0).tolist() == [member == root for member in range(4)]


@pytest.mark.parametrize("algorithm", ["tree", "halving_doubling"])
def test_tree_and_halving_send_a_buffer_once_between_two_nodes(algorithm):
    """Neighbours come first. Tree: S up and S down. Halving: two ranks send S/4 each, twice."""
    op = AllReduce("whole", Group(4), algorithm=algorithm)
    _, costs, cost = cost_of(op, whole_and_slice(4), nodes(2, gpus_per_node=2, fabric=LINE))
    topology, nbytes = costs.resources, resource_nbytes(costs, cost)
    assert nbytes[topology.nic_out(np.arange(2))].tolist() == [4 * COUNT] * 2
    assert nbytes[topology.nic_in(np.arange(2))].tolist() == [4 * COUNT] * 2


@pytest.mark.parametrize("ops", ["flat ring", "naive sparse all-gather", "2-d torus", "hierarchical top-k"])
def test_bytes_on_each_nic_of_16_nodes_with_8_gpus(ops):
    """ResNet-50, d = 25,557,032, density 0.001: what four schemes put on a 25 Gbit/s NIC."""
    d, m, n = 25_557_032, 16, 8
    k = d // n // 1000
    across = Group(m, stride=n)
    cases = {
        "flat ring": ([AllReduce("dense", Group(m * n))], 202.86e6, 64.915e-3),
        "naive sparse all-gather": ([AllGather("few", "all_few", Group(m * n))], 25.966e6, 8.309e-3),
        "2-d torus": ([AllReduce("shard", across)], 191.68e6, 61.337e-3),
        "hierarchical top-k": ([AllGather("picked", "all_picked", across)], 3.067e6, 0.981e-3),
    }
    [op], nbytes, seconds = cases[ops]
    buffers = (
        Buffer("dense", d, initialized=True),
        Buffer("shard", d // n, initialized=True),
        Buffer("few", d // 1000, sparse=True, initialized=True),
        Buffer("all_few", d // 1000 * m * n, sparse=True),
        Buffer("picked", k, sparse=True, initialized=True),
        Buffer("all_picked", k * m, sparse=True),
    )
    link = Link(latency_s=0.0, bandwidth_Bps=25e9 / 8)
    plan, costs, cost = cost_of(op, buffers, nodes(m, gpus_per_node=n, network=link))
    out = resource_nbytes(costs, cost)[costs.resources.nic_out(np.arange(m))]
    assert (out == out[0]).all()
    assert out[0] == pytest.approx(nbytes, rel=5e-4)
    assert des.simulate(plan, costs, {}).makespan_s == pytest.approx(seconds, rel=5e-4)
    assert fast.simulate(plan, costs, {}).makespan_s == pytest.approx(seconds, rel=5e-4)


@pytest.mark.parametrize("algorithm", ["auto", "tree"])
def test_overhead_of_a_collective_counts_once_and_not_for_a_single_member(algorithm):
    for size, expected_s in ((4, 0.25), (1, 0.0)):
        op = AllReduce("whole", Group(size), algorithm=algorithm)
        _, _, plain = cost_of(op, whole_and_slice(4), nodes(4))
        _, _, cost = cost_of(op, whole_and_slice(4), nodes(4, overhead_s=0.25))
        assert cost.alone_s - plain.alone_s == pytest.approx(expected_s)


def test_several_nics_multiply_the_capacity_of_a_node_and_oversubscription_divides_that_of_the_switch():
    cluster = nodes(4, gpus_per_node=2, nics_per_node=3, oversubscription=2)
    _, costs, _ = cost_of(AllReduce("whole", Group(8)), whole_and_slice(8), cluster)
    assert (costs.capacity_Bps[costs.resources.nic_out(np.arange(4))] == 3 * RATE_BPS).all()
    assert costs.capacity_Bps[costs.resources.switch] == 4 * 3 * RATE_BPS / 2


def test_oversubscribed_switch_carries_what_all_nodes_send():
    """A ring over 4 nodes sends 4 messages at once; the switch carries 2 of them at line rate."""
    op = AllReduce("whole", Group(4), algorithm="ring")
    _, costs, cost = cost_of(op, whole_and_slice(4), nodes(4, oversubscription=2))
    assert resource_nbytes(costs, cost)[costs.resources.switch] == 4 * 6 * COUNT
    assert cost.alone_s == pytest.approx(6 * ALPHA_S + 2 * 6 * COUNT / RATE_BPS, rel=1e-12)
    assert not costs.contested


def test_efficiency_is_a_share_of_the_line_rate():
    slow = Link(latency_s=ALPHA_S, bandwidth_Bps=RATE_BPS, efficiency=0.4)
    _, _, cost = cost_of(AllReduce("whole", Group(3)), whole_and_slice(3), nodes(3, network=slow))
    assert cost.alone_s == pytest.approx(
        closed_forms.ring_all_reduce_s(3, 4 * COUNT, ALPHA_S, 0.4 * RATE_BPS), rel=1e-12
    )


TABLE = ((1_000, 20e-6), (100_000, 90e-6), (10_000_000, 2e-3))


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [
        (4, 20e-6),  # below the table: its smallest message
        (1_000, 20e-6),
        (50_500, 55e-6),  # half way
        (100_000, 90e-6),
        (10_000_000, 2e-3),
        (19_900_000, 2e-3 + (2e-3 - 90e-6)),  # beyond: the last slope
    ],
)
@pytest.mark.parametrize("n_parallel", [1, 2])
def test_table_of_measured_messages_is_interpolated(nbytes, seconds, n_parallel):
    """A broadcast to one neighbour is one message; two NICs carry what flows after the startup twice as fast."""
    cluster = nodes(2, network=Link(table=TABLE), nics_per_node=n_parallel)
    buffers = (Buffer("bytes", nbytes, "uint8", initialized=True),)
    _, _, cost = cost_of(Broadcast("bytes", Group(2)), buffers, cluster)
    assert cost.alone_s == pytest.approx(20e-6 + (seconds - 20e-6) / n_parallel, rel=1e-12)


def test_flat_end_of_a_table_means_unlimited_bandwidth():
    flat = Link(table=((1_000, 20e-6), (100_000, 20e-6)))
    _, _, cost = cost_of(Broadcast("whole", Group(2)), whole_and_slice(2), nodes(2, network=flat))
    assert cost.alone_s == 20e-6


def test_flat_end_of_a_table_does_not_make_its_beginning_free():
    """Two sizes may take the same time, for lack of resolution; smaller messages still take theirs."""
    flat = Link(table=((1_000, 20e-6), (100_000, 90e-6), (200_000, 90e-6)))
    buffers = (Buffer("bytes", 100_000, "uint8", initialized=True),)
    _, _, cost = cost_of(Broadcast("bytes", Group(2)), buffers, nodes(2, network=flat))
    assert cost.alone_s == pytest.approx(90e-6)


PARAMS = (
    Buffer("param.0", 300, tensors=(0, 2), initialized=True),
    Buffer("param.1", 100, tensors=(2, 3), initialized=True),
    Buffer("grad.0", 300, tensors=(0, 2), initialized=True),
    Buffer("grad.1", 100, tensors=(2, 3), initialized=True),
    Buffer("loss", 1),
)
TENSORS = (Tensor(name="a", count=200, flops=1e6), Tensor(name="b", count=100), Tensor(name="c", count=100, flops=3e6))


def seconds_of(op, buffers=PARAMS, *, workload, **device):
    cost = cost_of(op, buffers, nodes(1, device=Device(**device)), workload)[2]
    assert isinstance(cost, Local)
    return cost.seconds


def test_stated_seconds_are_shared_by_flops():
    workload = Workload(tensors=TENSORS, batch_size=8, forward_s=0.4, backward_s=0.8, optimize_s=0.1)
    assert seconds_of(Forward(("param.0", "param.1"), ("loss",)), workload=workload) == pytest.approx(0.4)
    assert seconds_of(Forward(("param.1",), ("loss",)), workload=workload) == pytest.approx(0.3)
    assert seconds_of(Backward(("loss",), "grad.0"), workload=workload) == pytest.approx(0.2)
    assert seconds_of(Backward(("loss",), "grad.1"), workload=workload) == pytest.approx(0.6)
    assert seconds_of(Optimize(("param.0",), ("grad.0",)), workload=workload) == pytest.approx(0.1 * 300 / 400)


def test_without_flops_stated_seconds_are_shared_by_elements():
    tensors = tuple(Tensor(name=tensor.name, count=tensor.count) for tensor in TENSORS)
    workload = Workload(tensors=tensors, batch_size=8, forward_s=0.4, backward_s=0.8)
    assert seconds_of(Backward(("loss",), "grad.0"), workload=workload) == pytest.approx(0.6)


def test_backward_pass_measured_tensor_by_tensor_takes_each_tensor_its_seconds():
    tensors = [tensor.model_copy(update={"backward_s": s}) for tensor, s in zip(TENSORS, (0.5, 0.1, 0.3), strict=True)]
    workload = Workload(tensors=tuple(tensors), batch_size=8, forward_s=0.4)
    assert seconds_of(Backward(("loss",), "grad.0"), workload=workload, speed=0.5) == pytest.approx(2 * 0.6)
    assert seconds_of(Backward(("loss",), "grad.1"), workload=workload) == pytest.approx(0.3)
    assert seconds_of(Forward(("param.1",), ("loss",)), workload=workload) == pytest.approx(0.4 * 3 / 4)
    assert compute_s(workload, nodes(1)) == pytest.approx(0.4 + 0.9)
    assert tensor_backward_s(workload, nodes(1)) == pytest.approx((0.5, 0.1, 0.3))


def test_backward_pass_measured_as_nothing_takes_no_time():
    tensors = tuple(tensor.model_copy(update={"backward_s": 0.0}) for tensor in TENSORS)
    workload = Workload(tensors=tensors, batch_size=8, forward_s=0.4)
    assert seconds_of(Backward(("loss",), "grad.0"), workload=workload) == 0


@pytest.mark.parametrize(
    ("seconds", "whole", "message"),
    [
        ((0.5, None, 0.1), {}, r"absent, but 'a' states it: write all or none"),
        ((0.5, 0.2, 0.1), {"backward_s": 0.8}, r"800 ms beside seconds of every tensor; it is their sum: leave it out"),
    ],
    ids=["of some", "twice"],
)
def test_backward_seconds_of_tensors_are_all_or_none_and_their_sum_is_the_pass(seconds, whole, message):
    tensors = tuple(tensor.model_copy(update={"backward_s": s}) for tensor, s in zip(TENSORS, seconds, strict=True))
    with pytest.raises(ValidationError, match=message):
        Workload(tensors=tensors, batch_size=8, forward_s=0.4, **whole)


def with_forward(*seconds: float | None) -> tuple[Tensor, ...]:
    return tuple(tensor.model_copy(update={"forward_s": s}) for tensor, s in zip(TENSORS, seconds, strict=True))


def test_forward_pass_measured_tensor_by_tensor_takes_each_tensor_its_seconds():
    workload = Workload(tensors=with_forward(0.5, 0.1, 0.3), batch_size=8, backward_s=0.8)
    assert seconds_of(Forward(("param.0",), ("loss",)), workload=workload, speed=0.5) == pytest.approx(2 * 0.6)
    assert seconds_of(Forward(("param.1",), ("loss",)), workload=workload) == pytest.approx(0.3)
    assert seconds_of(Backward(("loss",), "grad.1"), workload=workload) == pytest.approx(0.6)  # by FLOPs
    assert compute_s(workload, nodes(1)) == pytest.approx(0.9 + 0.8)
    assert workload.has_seconds


@pytest.mark.parametrize(
    ("seconds", "whole", "message"),
    [
        ((0.5, None, 0.1), {}, r"absent, but 'a' states it: write all or none"),
        ((0.5, 0.2, 0.1), {"forward_s": 0.8}, r"800 ms beside seconds of every tensor; it is their sum: leave it out"),
    ],
    ids=["of some", "twice"],
)
def test_forward_seconds_of_tensors_are_all_or_none_and_their_sum_is_the_pass(seconds, whole, message):
    with pytest.raises(ValidationError, match=message):
        Workload(tensors=with_forward(*seconds), batch_size=8, **whole)


def test_flops_over_peak_times_utilization_give_the_seconds_of_a_pass():
    workload = Workload(tensors=TENSORS, batch_size=8, utilization=0.5)
    flops = 8 * 4e6
    whole = Forward(("param.0", "param.1"), ("loss",))
    assert seconds_of(whole, workload=workload, peak_flops=1e12) == pytest.approx(flops / (1e12 * 0.5))
    both_s = seconds_of(Backward(("loss",), "grad.0"), workload=workload, peak_flops=1e12) + seconds_of(
        Backward(("loss",), "grad.1"), workload=workload, peak_flops=1e12
    )
    assert both_s == pytest.approx(2 * flops / (1e12 * 0.5))
    given = Workload(tensors=TENSORS, batch_size=8, forward_s=0.4, utilization=0.5)
    assert seconds_of(whole, workload=given, peak_flops=1e12) == pytest.approx(0.4)


def test_backward_pass_repeats_the_forward_pass_of_checkpointed_blocks():
    tensors = (("embedding", 0.0), ("blocks.0.a", 1e12), ("blocks.1.a", 3e12), ("head", 2e12))

    def times(recompute: float) -> tuple[float, tuple[float, ...]]:
        workload = Workload(
            tensors=tuple(Tensor(name=name, count=10, flops=flops) for name, flops in tensors),
            batch_size=1,
            forward_s=1.2,
            recompute=recompute,
        )
        return float(compute_s(workload, nodes(1))[0]), tensor_backward_s(workload, nodes(1))

    assert times(0) == (pytest.approx(3 * 1.2), pytest.approx((0, 0.4, 1.2, 0.8)))
    assert times(1) == (pytest.approx(3 * 1.2 + 0.8), pytest.approx((0, 0.6, 1.8, 0.8)))
    assert times(0.5)[0] == pytest.approx(3 * 1.2 + 0.4)


def test_a_model_without_blocks_is_checkpointed_as_a_whole():
    workload = Workload(
        tensors=(Tensor(name="a", count=1), Tensor(name="b", count=3)), batch_size=1, forward_s=2.0, recompute=0.25
    )
    assert tensor_backward_s(workload, nodes(1)) == pytest.approx((0.25 * 4.5, 0.75 * 4.5))
    assert compute_s(workload.model_copy(update={"backward_s": 3.0}), nodes(1)) == pytest.approx([5.0])


def test_optimizer_without_stated_seconds_moves_five_times_the_parameters():
    workload = Workload(tensors=TENSORS, batch_size=8, forward_s=0.4, backward_s=0.8)
    op = Optimize(("param.0", "param.1"), ("grad.0", "grad.1"))
    assert seconds_of(op, workload=workload, memory_bandwidth_Bps=1e6) == pytest.approx(5 * 1600 / 1e6)
    assert seconds_of(op, workload=workload) == 0


def test_compute_times_that_nothing_gives_are_an_error():
    workload = Workload(tensors=TENSORS, batch_size=8, utilization=0.5)
    with pytest.raises(ScenarioError, match=r"workload\.forward is not given and cannot be derived"):
        seconds_of(Forward(("param.0",), ("loss",)), workload=workload)


def test_slower_device_takes_longer_on_its_own_rank():
    slow = (DeviceOverride(ranks=(1,), speed=0.5), DeviceOverride(nodes=(1,), speed=0.8))
    cluster = nodes(2, gpus_per_node=2, slow_devices=slow, device=Device(speed=2.0))
    workload = Workload(tensors=TENSORS, batch_size=8, forward_s=0.4, backward_s=0.8, optimize_s=0.1)
    speed = np.array([2.0, 1.0, 1.6, 1.6])
    for op, seconds in ((Forward(("param.0", "param.1"), ("loss",)), 0.4), (Backward(("loss",), "grad.1"), 0.6)):
        np.testing.assert_allclose(cost_of(op, PARAMS, cluster, workload)[2].seconds, seconds / speed, rtol=1e-14)
    np.testing.assert_allclose(compute_s(workload, cluster), 1.2 / speed, rtol=1e-14)


def test_copies_read_and_write_the_device_or_cross_the_bus_once():
    buffers = (
        Buffer("a", 1000, initialized=True),
        Buffer("b", 1000),
        Buffer("c", 1000, place="host", initialized=True),
    )
    device = {"workload": WORKLOAD, "memory_bandwidth_Bps": 1e6, "host_bandwidth_Bps": 1e5}
    assert seconds_of(Copy("a", "b"), buffers, **device) == pytest.approx(8000 / 1e6)
    assert seconds_of(Copy("c", "b"), buffers, **device) == pytest.approx(4000 / 1e5)
    assert seconds_of(Copy("a", "c"), buffers, **device) == pytest.approx(4000 / 1e5)
    for staging_Bps, copied_Bps in ((2e4, 2e4), (float("inf"), 1e5)):
        staged = {**device, "staging_bandwidth_Bps": staging_Bps}
        assert seconds_of(Copy("a", "c"), buffers, **staged) == pytest.approx(4000 / copied_Bps)
        assert seconds_of(Copy("c", "b"), buffers, **staged) == pytest.approx(4000 / 1e5)


def test_selection_reads_the_vector_as_often_as_its_method_says():
    buffers = (
        Buffer("dense", 1000, initialized=True),
        Buffer("residual", 1000, initialized=True),
        Buffer("sparse", 10, sparse=True, initialized=True),
    )
    device = {"workload": WORKLOAD, "memory_bandwidth_Bps": 1e6}
    times = {
        method: seconds_of(Select("dense", "sparse", "residual", 10, method), buffers, **device)
        for method in ("exact", "mstopk", "dgc")
    }
    assert times["exact"] == pytest.approx(((7 + 3) * 4000 + 80) / 1e6)
    assert times["mstopk"] == times["dgc"] == pytest.approx(((1.5 + 3) * 4000 + 80) / 1e6)
    for kernels_from, method in ((1000, "mstopk"), (1001, "exact")):
        op = Select("dense", "sparse", "residual", 10, "mstopk")
        assert seconds_of(op, buffers, **device, select_kernels_from=kernels_from) == times[method]
    assert seconds_of(Densify("sparse", "dense"), buffers, **device) == pytest.approx((4000 + 80 + 80) / 1e6)


def test_page_of_the_cost_model_states_the_passes_that_are_priced():
    page = (Path(__file__).resolve().parents[3] / "docs" / "background" / "cost-model.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| select"))
    vectors = Buffer("dense", 10**6, initialized=True), Buffer("residual", 10**6, initialized=True)
    few = Buffer("few", 10, sparse=True, initialized=True)
    for method, title in (("exact", "exact"), ("mstopk", "MSTopK"), ("dgc", "DGC")):
        op = Select("dense", "few", "residual", 10, method)
        passes = seconds_of(op, (*vectors, few), workload=WORKLOAD, memory_bandwidth_Bps=4e6)
        assert f"{title} {round(passes, 3) - 3:g}" in row
    many = Buffer("many", 1000, sparse=True, initialized=True)
    merging = seconds_of(
        Merge("many", "few", "residual"), (*vectors, many, few), workload=WORKLOAD, memory_bandwidth_Bps=8e3
    )
    assert f"{merging:.0f} passes over the pairs" in page


def test_conversion_reads_one_size_and_writes_the_other():
    buffers = (Buffer("single", 1000, initialized=True), Buffer("half", 1000, "float16", initialized=True))
    device = {"workload": WORKLOAD, "memory_bandwidth_Bps": 1e6}
    for op in (Copy("single", "half"), Copy("half", "single")):
        assert seconds_of(op, buffers, **device) == pytest.approx((4000 + 2000) / 1e6)


def test_sparse_halves_are_selected_from_and_scattered_into_wider_vectors():
    buffers = (
        Buffer("grad", 1000, "float16", initialized=True),
        Buffer("residual", 1000, initialized=True),
        Buffer("few", 10, "float16", sparse=True, initialized=True),
        Buffer("sum", 1000),
    )
    device = {"workload": WORKLOAD, "memory_bandwidth_Bps": 1e6}
    selecting_s = seconds_of(Select("grad", "few", "residual", 10, "dgc"), buffers, **device)
    assert selecting_s == pytest.approx((2000 + (1.5 + 2) * 4000 + 60) / 1e6)
    assert seconds_of(Densify("few", "sum"), buffers, **device) == pytest.approx((4000 + 60 + 80) / 1e6)


def test_waits_and_delays_cost_nothing_by_themselves():
    for op in (Wait("whole"), Delay("host"), Delay("io")):
        assert cost_of(op, whole_and_slice(2), nodes(2))[2] == Local(0.0)


STORAGE = Storage(latency_s=2e-3, bandwidth_Bps=4e6, client_bandwidth_Bps=3e6)
BATCH = (Buffer("batch", 12_000, "uint8", place="host"), Buffer("param", 1_000, initialized=True))


@pytest.mark.parametrize(
    ("cluster", "rate_Bps"),
    [
        (nodes(1, network=IDEAL, storage=STORAGE), 3e6),  # the node's client
        (nodes(2, network=IDEAL, storage=STORAGE), 2e6),  # the server, by two
        (nodes(1, gpus_per_node=3, network=IDEAL, storage=STORAGE), 1e6),  # the client, by three
        (nodes(2, gpus_per_node=4, network=IDEAL, storage=STORAGE), 0.5e6),  # the server, by eight
        (nodes(4, network=Link(latency_s=0.0, bandwidth_Bps=2.5e5), storage=STORAGE), 2.5e5),  # the NIC
    ],
)
def test_readers_share_the_server_the_client_and_the_nic(cluster, rate_Bps):
    plan, costs, _ = cost_of(Load("batch"), BATCH, cluster)
    for engine in (des, fast):
        np.testing.assert_allclose(engine.simulate(plan, costs, {}).end_s, 2e-3 + 12_000 / rate_Bps, rtol=1e-9)


def test_reader_alone_has_the_server_to_itself():
    _, costs, cost = cost_of(Load("batch"), BATCH, nodes(2, network=IDEAL, storage=STORAGE))
    assert cost.alone_s == pytest.approx(2e-3 + 12_000 / 3e6)
    assert costs.contested


def test_checkpoint_goes_out_over_the_nic_and_a_batch_comes_in():
    cluster = nodes(2, storage=STORAGE)
    for op, uses in ((Load("batch"), "nic_in"), (Save(("param",)), "nic_out")):
        _, costs, cost = cost_of(op, BATCH, cluster)
        nbytes = resource_nbytes(costs, cost)
        used = getattr(costs.resources, uses)(np.arange(2))
        assert set(np.flatnonzero(nbytes)) == {
            *used,
            costs.resources.storage_server(0),
            *costs.resources.storage_client(np.arange(2)),
        }
        assert nbytes[costs.resources.storage_server(0)] == 2 * (12_000 if uses == "nic_in" else 4_000)


@pytest.mark.parametrize(
    ("ops", "cluster", "contested"),
    [
        ([AllReduce("whole", Group(8))], nodes(4, gpus_per_node=2), 0),  # the world
        ([AllReduce("whole", Group(2))], nodes(4, gpus_per_node=2, fabric=LINE), 0),  # inside nodes
        ([AllReduce("whole", Group(4))], nodes(4, gpus_per_node=2), 0),  # whole nodes
        ([AllReduce("whole", Group(4, 2))], nodes(4, gpus_per_node=2), 1),  # streams side by side share NICs
        ([AllReduce("whole", Group(4, 2))], nodes(4, gpus_per_node=2, network=IDEAL), 0),
        ([AllReduce("whole", Group(4))], nodes(4, gpus_per_node=2, oversubscription=2), 1),  # groups share the switch
        ([AllReduce("whole", Group(8))], nodes(4, gpus_per_node=2, oversubscription=2), 0),
        ([AllReduce("whole", Group(8)), AllReduce("whole", Group(4, 2))], nodes(4, gpus_per_node=2), 2),
        ([AllReduce("whole", Group(2)), AllReduce("whole", Group(4, 2))], nodes(4, gpus_per_node=2, fabric=LINE), 1),
    ],
)
def test_operations_are_contested_where_a_link_is_not_theirs_alone(ops, cluster, contested):
    plan = Plan.from_steps("some", world_size=8, buffers=whole_and_slice(8), steps=[tuple(ops)])
    costs = price(plan, cluster, WORKLOAD)
    assert all(isinstance(cost, Shared) for cost in costs.of.values())
    assert len(costs.contested) == contested


def test_plan_of_another_world_is_refused():
    plan = Plan.from_steps("small", world_size=2, buffers=whole_and_slice(2), steps=[(AllReduce("whole", Group(2)),)])
    with pytest.raises(
        PlanError, match="plan small is for 2 ranks; cluster big has 2 nodes x 4 GPUs = 8; build the plan"
    ):
        price(plan, nodes(2, gpus_per_node=4, name="big"), WORKLOAD)


def test_storage_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match=r"plan one uses storage; cluster bare has none: set cluster\.storage"):
        cost_of(Load("batch"), BATCH, nodes(2, name="bare"))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            ReduceScatter("whole", "slice", Group(2), algorithm="tree"),
            "tree is an algorithm of all_reduce, reduce, broadcast only; choose ring",
        ),
        (
            Broadcast("whole", Group(2), algorithm="halving_doubling"),
            "halving_doubling is an algorithm of all_reduce, reduce_scatter, all_gather only",
        ),
    ],
)
def test_algorithm_that_a_collective_does_not_have_is_refused(op, message):
    with pytest.raises(PlanError, match=message):
        cost_of(op, whole_and_slice(2), nodes(2))
