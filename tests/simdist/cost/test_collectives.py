"""Algorithms of collectives: closed forms, bytes on every NIC, and what no algorithm can do."""

import math

import numpy as np
import pytest
from engine_runs import des, fast
from flat_clusters import grouped
from hypothesis import assume, given
from hypothesis import strategies as st
from tiers import examples

from simdist.cost import Shared, price, pricing
from simdist.cost.algorithms.double_tree import parents
from simdist.errors import PlanError
from simdist.plan import AllGather, AllReduce, Broadcast, Buffer, Plan, Reduce, ReduceScatter, Servers
from simdist.plan.group import Group
from simdist.scenario.cluster import Cluster, Link
from simdist.scenario.workload import Tensor, Workload

IDEAL = Link.ideal()
ALPHA_S, RATE_BPS = 3e-5, 1.1e9
FABRIC_ALPHA_S, FABRIC_BPS = 4e-6, 9e9
NETWORK = Link(latency_s=ALPHA_S, bandwidth_Bps=RATE_BPS)
FABRIC = Link(latency_s=FABRIC_ALPHA_S, bandwidth_Bps=FABRIC_BPS)
WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1)
COUNT = 27_720  # divides by every world here
S = 4 * COUNT


def priced(op, cluster, count=COUNT):
    """Return the plan of one operation on a buffer of `count`, its price list, and the operation's entry."""
    buffers = Buffer("whole", count, initialized=True), Buffer("slice", count // op.group.size, initialized=True)
    plan = Plan.from_steps("one", world_size=cluster.world_size, buffers=buffers, steps=[(op,)])
    costs = price(plan, cluster, WORKLOAD)
    assert isinstance(costs.of[op], Shared)
    return plan, costs, costs.of[op]


def seconds(op, cluster, count=COUNT):
    return priced(op, cluster, count)[2].alone_s


def cluster_of(m, n=1, *, fabric=IDEAL, network=NETWORK, **more):
    return Cluster(nodes=m, gpus_per_node=n, fabric=fabric, network=network, **grouped(more))


def on_nics(op, cluster, count=COUNT):
    """Return the bytes out of the NIC of every machine, and into it."""
    _, costs, cost = priced(op, cluster, count)
    nbytes = np.zeros(costs.resources.n_resources)
    for transfer in cost.transfers:
        for stage in transfer.stages:
            nbytes[stage.resources] += stage.nbytes
    machines = np.arange(costs.resources.n_machines)
    return nbytes[costs.resources.nic_out(machines)], nbytes[costs.resources.nic_in(machines)]


def whole(algorithm="auto", group=None, **more):
    return AllReduce("whole", group, algorithm=algorithm, **more)


def every_kind(group, algorithm):
    return {
        "all_reduce": AllReduce("whole", group, algorithm=algorithm),
        "reduce_scatter": ReduceScatter("whole", "slice", group, algorithm=algorithm),
        "all_gather": AllGather("slice", "whole", group, algorithm=algorithm),
        "reduce": Reduce("whole", group, root=group.size - 1, algorithm=algorithm),
        "broadcast": Broadcast("whole", group, root=group.size - 1, algorithm=algorithm),
    }


# ---------------------------------------------------------------- direct exchange


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize(
    ("kind", "latencies", "buffers"),
    [
        ("all_reduce", 2, lambda n: 2 * (n - 1) / n),
        ("reduce_scatter", 1, lambda n: (n - 1) / n),
        ("all_gather", 1, lambda n: (n - 1) / n),
        ("reduce", 1, lambda n: n - 1),
        ("broadcast", 1, lambda n: n - 1),
    ],
)
def test_direct_exchange_takes_one_latency_a_stage_and_the_bytes_of_the_busiest_port(kind, latencies, buffers, n):
    op = every_kind(Group(n), "direct")[kind]
    count = COUNT // n * n
    expected_s = latencies * ALPHA_S + buffers(n) * 4 * count / RATE_BPS
    assert seconds(op, cluster_of(n), count) == pytest.approx(expected_s, rel=1e-12)
    inside = cluster_of(1, n, fabric=NETWORK, network=IDEAL)
    assert seconds(op, inside, count) == pytest.approx(expected_s, rel=1e-12)


def test_direct_exchange_repeats_over_the_nic_what_a_ring_hands_on_inside_the_node():
    """Of 4 nodes with 3 members each, every member sends a twelfth to each of the 9 members elsewhere."""
    out, into = on_nics(AllGather("slice", "whole", Group(12), algorithm="direct"), cluster_of(4, 3))
    assert out == pytest.approx([3 * 9 * S / 12] * 4)
    assert into == pytest.approx(out)
    ring, _ = on_nics(AllGather("slice", "whole", Group(12), algorithm="ring"), cluster_of(4, 3))
    assert ring == pytest.approx([11 * S / 12] * 4)


def test_direct_exchange_of_too_many_members_is_refused():
    with pytest.raises(PlanError, match="a direct exchange of 8192 members is 67100672 messages; at most 4096 members"):
        priced(whole("direct", Group(8192)), cluster_of(1024, 8), 8192)


# ---------------------------------------------------------------- double binary tree


@pytest.mark.parametrize("n", range(1, 40))
def test_both_trees_span_all_nodes_are_binary_and_as_deep_as_a_binary_tree_must_be(n):
    for parent in parents(n):
        (root,) = np.flatnonzero(parent < 0)
        assert np.bincount(parent[parent >= 0], minlength=n).max() <= 2
        hops = []
        for node in range(n):
            path = [node]
            while path[-1] != root:
                path.append(int(parent[path[-1]]))
            hops.append(len(path) - 1)
        assert max(hops) == math.ceil(math.log2(n))


@pytest.mark.parametrize("n", range(2, 40))
def test_inner_nodes_of_one_tree_are_leaves_of_the_other_but_one_of_an_odd_number(n):
    first, second = (set(parent[parent >= 0].tolist()) for parent in parents(n))
    assert len(first & second) == n % 2


@pytest.mark.parametrize("n", [2, 3, 8])
def test_broadcasts_of_all_slices_take_a_chain_each_and_send_what_a_ring_sends(n):
    gather = AllGather("slice", "whole", Group(n), algorithm="broadcasts")
    cluster = cluster_of(n)
    assert seconds(gather, cluster) == pytest.approx(n * (n - 1) * ALPHA_S + S / RATE_BPS, rel=1e-12)
    for found in on_nics(gather, cluster):
        np.testing.assert_allclose(found, (n - 1) / n * S)


def test_broadcasts_by_gloo_are_those_of_its_tree():
    cluster = cluster_of(4, library="gloo")
    gather = AllGather("slice", "whole", Group(4), algorithm="broadcasts")
    one = Broadcast("slice", Group(4))
    assert seconds(gather, cluster) == pytest.approx(4 * seconds(one, cluster))


@pytest.mark.parametrize(("m", "buffers"), [(2, 1), (3, 1.5), *((m, 2) for m in range(4, 13))])
def test_double_tree_takes_two_times_its_depth_and_twice_the_buffer_at_most(m, buffers):
    count = COUNT // m * m
    expected_s = 2 * math.ceil(math.log2(m)) * ALPHA_S + buffers * 4 * count / RATE_BPS
    found_s = seconds(whole("double_tree", Group(m)), cluster_of(m, library="gloo"), count)
    assert found_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("n", range(3, 9))
def test_double_tree_is_a_chain_inside_a_node(n):
    """Up and down each hop of the chain; those in the middle pass on both halves in both directions."""
    count = COUNT // n * n
    expected_s = 2 * (n - 1) * FABRIC_ALPHA_S + 2 * 4 * count / FABRIC_BPS
    found_s = seconds(whole("double_tree", Group(n)), cluster_of(1, n, fabric=FABRIC, library="gloo"), count)
    assert found_s == pytest.approx(expected_s, rel=1e-12)


def test_double_tree_of_nodes_adds_the_latency_of_the_chain_to_that_of_the_trees():
    op, cluster = whole("double_tree", Group(24)), cluster_of(8, 3, fabric=FABRIC, library="gloo")
    expected_s = 2 * 2 * FABRIC_ALPHA_S + 2 * 3 * ALPHA_S + 2 * S / RATE_BPS
    assert seconds(op, cluster) == pytest.approx(expected_s, rel=1e-12)
    out, into = on_nics(op, cluster)
    assert into.tolist() == out.tolist()
    inner_of_both_children = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0]  # a root has one child, and is a leaf otherwise
    assert out == pytest.approx([buffers * S for buffers in inner_of_both_children])


CHUNK_S = 256 * 1024 / 12e9


@pytest.mark.parametrize(
    ("nbytes", "share"), [(2**6, 0.9), (2**16, 0.6), (2**20, 0.5), (2**23, 0.6), (2**26, 0.8), (2**28, 1), (2**33, 1)]
)
@pytest.mark.parametrize(("m", "buffers"), [(2, 1), (8, 2)])
def test_tree_of_nccl_by_simple_waits_for_chunks_and_loses_what_nccl_counts(m, buffers, nbytes, share):
    """tuning.cc of NCCL: 256 kB at 12 GB/s a hop, twice between nodes; 0.9 of the bandwidth, and less by size."""
    op, cluster = whole("double_tree", Group(3 * m)), cluster_of(m, 3, fabric=FABRIC, library="nccl_simple")
    hops_s = 2 * 2 * (FABRIC_ALPHA_S + CHUNK_S) + 2 * math.log2(m) * (ALPHA_S + 2 * CHUNK_S)
    expected_s = hops_s + buffers * nbytes / RATE_BPS / (0.9 * share)
    assert seconds(op, cluster, nbytes // 4) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(("nbytes", "share"), [(2**6, 1.0), (2**14, 0.8), (2**19, 0.5), (2**22, 0.7)])
def test_tree_of_nccl_by_ll128_takes_the_latency_of_its_links_and_flags_take_bandwidth(nbytes, share):
    op, cluster = whole("double_tree", Group(24)), cluster_of(8, 3, fabric=FABRIC, network=FABRIC)
    expected_s = (2 * 2 + 2 * 3) * FABRIC_ALPHA_S + 2 * nbytes / FABRIC_BPS / (0.9 * 0.915 * share)
    assert seconds(op, cluster, nbytes // 4) == pytest.approx(expected_s, rel=1e-12)


def test_tree_of_nccl_takes_the_faster_protocol_and_a_larger_buffer_never_less_time():
    cluster = cluster_of(8, 3, fabric=FABRIC)
    sizes = [int(2 ** (exponent / 4)) for exponent in range(24, 130)]
    both = [seconds(whole("double_tree", Group(24)), cluster, nbytes) for nbytes in sizes]
    simple_only = cluster.model_copy(update={"collectives": {"library": "nccl_simple"}})
    simple = [seconds(whole("double_tree", Group(24)), simple_only, nbytes) for nbytes in sizes]
    assert both[0] < simple[0]
    assert both[-1] == simple[-1]
    for times in (both, simple):
        assert times == sorted(times)
    assert all(time <= alone for time, alone in zip(both, simple, strict=True))


def test_what_a_tree_of_nccl_lacks_is_time_and_no_bytes():
    op, cluster = whole("double_tree", Group(24)), cluster_of(8, 3, fabric=FABRIC)
    assert (
        on_nics(op, cluster)[0].tolist()
        == on_nics(op, cluster.model_copy(update={"collectives": {"library": "gloo"}}))[0].tolist()
    )


# ---------------------------------------------------------------- levels


@pytest.mark.parametrize(("m", "n"), [(1, 4), (4, 1), (2, 3), (5, 2), (3, 8)])
def test_hierarchical_all_reduce_is_rings_inside_and_between_nodes(m, n):
    expected_s = (
        2 * (n - 1) * FABRIC_ALPHA_S
        + 2 * (n - 1) / n * S / FABRIC_BPS
        + 2 * (m - 1) * ALPHA_S
        + 2 * (m - 1) / m * S / RATE_BPS
    )
    op, cluster = whole("hierarchical", Group(m * n)), cluster_of(m, n, fabric=FABRIC)
    assert seconds(op, cluster) == pytest.approx(expected_s, rel=1e-12)
    out, into = on_nics(op, cluster)
    assert out == pytest.approx([2 * (m - 1) / m * S] * m)
    assert into == pytest.approx(out)


def test_hierarchical_all_reduce_of_16_nodes_puts_on_a_nic_what_the_2d_torus_does():
    """ResNet-50, 25,557,032 elements: 191.68 MB, 61.337 ms at 25 Gbit/s; a flat ring 202.86 MB, 64.915 ms."""
    count, line = 25_557_032, Link(latency_s=0.0, bandwidth_Bps=25e9 / 8)
    for algorithm, nbytes, expected_s in (("hierarchical", 191.68e6, 61.337e-3), ("ring", 202.86e6, 64.915e-3)):
        op, cluster = whole(algorithm, Group(128)), cluster_of(16, 8, network=line)
        assert on_nics(op, cluster, count)[0] == pytest.approx([nbytes] * 16, rel=5e-5)
        assert seconds(op, cluster, count) == pytest.approx(expected_s, rel=5e-5)


@pytest.mark.parametrize("steps", ["2-d torus", "hierarchical top-k"])
def test_schemes_of_three_collectives_put_on_a_nic_what_the_middle_one_does(steps):
    """16 nodes x 8 GPUs: dense, 2(m-1)/m S; top-k of a thousandth, (m-1) rho d (4 + 4)."""
    d, m, n = 25_557_032 // 128 * 128, 16, 8
    k = d // n // 1000
    inside, across = Group(n), Group(m, stride=n)
    buffers = (
        Buffer("whole", d, initialized=True),
        Buffer("slice", d // n, initialized=True),
        Buffer("few", k, sparse=True, initialized=True),
        Buffer("all_few", k * m, sparse=True),
    )
    middle, nbytes = {
        "2-d torus": (AllReduce("slice", across, algorithm="ring"), 2 * (m - 1) / m * 4 * d),
        "hierarchical top-k": (AllGather("few", "all_few", across), (m - 1) * n * k * (4 + 4)),
    }[steps]
    ops = (ReduceScatter("whole", "slice", inside), middle, AllGather("slice", "whole", inside))
    plan = Plan.from_steps("three", world_size=m * n, buffers=buffers, steps=[ops])
    costs = price(plan, cluster_of(m, n, fabric=FABRIC), WORKLOAD)
    used = np.zeros(costs.resources.n_resources)
    for op in ops:
        for transfer in costs.of[op].transfers:
            for stage in transfer.stages:
                used[stage.resources] += stage.nbytes
    for nic in (costs.resources.nic_out, costs.resources.nic_in):
        assert used[nic(np.arange(m))] == pytest.approx([nbytes] * m, rel=1e-12)
    if steps == "2-d torus":
        out, _ = on_nics(whole("hierarchical", Group(m * n)), cluster_of(m, n), d)
        assert out == pytest.approx([nbytes] * m, rel=1e-12)


def test_hierarchical_all_reduce_of_unequal_nodes_is_refused():
    message = "hierarchical needs equally many members on each node; the group of rank 0 has from 1 to 2; use ring"
    with pytest.raises(PlanError, match=message):
        priced(whole("hierarchical", Group(3)), cluster_of(3, 2))


# ---------------------------------------------------------------- parameter servers


def even(n_servers, members=()):
    return Servers((COUNT // n_servers,) * n_servers, members)


@pytest.mark.parametrize("n", [1, 2, 4, 6])
@pytest.mark.parametrize("n_servers", [1, 2, 3, 8])
def test_members_converge_on_servers_apart_until_there_are_as_many_servers(n, n_servers):
    op = whole("server", Group(n), servers=even(n_servers))
    plan, costs, cost = priced(op, cluster_of(n))
    assert cost.alone_s == pytest.approx(2 * (ALPHA_S + max(n / n_servers, 1) * S / RATE_BPS), rel=1e-12)
    for engine in (des, fast):
        assert engine.simulate(plan, costs, {}).makespan_s == cost.alone_s
    out, into = on_nics(op, cluster_of(n))
    assert out == pytest.approx([S] * n + [n * S / n_servers] * n_servers)
    assert into == pytest.approx(out)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_server_on_every_member_costs_what_a_direct_exchange_does(n):
    op = whole("server", Group(n), servers=Servers((COUNT // n,) * n, tuple(range(n))))
    count = COUNT // n * n
    assert seconds(op, cluster_of(n), count) == pytest.approx(
        seconds(whole("direct", Group(n)), cluster_of(n), count), rel=1e-12
    )


def test_server_among_the_members_sends_nothing_to_itself_and_reaches_its_node_by_the_fabric():
    """Member 1, on the first of two nodes with two members each, holds everything."""
    op = whole("server", Group(4), servers=even(1, members=(1,)))
    _, costs, cost = priced(op, cluster_of(2, 2, fabric=FABRIC))
    push, pull = cost.transfers[0].stages
    topology, node = costs.resources, np.arange(2)
    expected = {
        int(topology.fabric_out(np.int64(0))): S,
        int(topology.fabric_in(np.int64(1))): S,
        int(topology.nic_out(node)[1]): 2 * S,
        int(topology.nic_in(node)[0]): 2 * S,
    }
    assert dict(zip(push.resources.tolist(), push.nbytes.tolist(), strict=True)) == expected
    assert {*pull.resources.tolist()} == {
        int(topology.fabric_out(np.int64(1))),
        int(topology.fabric_in(np.int64(0))),
        int(topology.nic_out(node)[0]),
        int(topology.nic_in(node)[1]),
    }
    assert pull.nbytes.max() == 2 * S


def test_unequal_parts_load_their_servers_unequally():
    parts = (COUNT // 4, 0, COUNT // 4 * 3)
    out, into = on_nics(whole("server", Group(2), servers=Servers(parts)), cluster_of(2))
    assert into == pytest.approx([S, S, 2 * S / 4, 0, 2 * S * 3 / 4])
    assert out == pytest.approx(into)


def test_each_group_has_servers_of_its_own_and_a_plan_as_many_as_its_largest_operation_needs():
    pairs, all_four = whole("server", Group(2), servers=even(3)), whole("server", Group(4), servers=even(4))
    buffers = (Buffer("whole", COUNT, initialized=True),)
    plan = Plan.from_steps("some", world_size=4, buffers=buffers, steps=[(pairs, all_four)])
    costs = price(plan, cluster_of(4), WORKLOAD)
    assert costs.resources.n_servers == 2 * 3
    used = [
        {int(each) for stage in transfer.stages for each in stage.resources}
        & {*costs.resources.nic_in(np.arange(4, 10)).tolist()}
        for transfer in costs.of[pairs].transfers
    ]
    assert [len(each) for each in used] == [3, 3]
    assert not used[0] & used[1]


def test_one_server_is_slower_than_a_ring_the_more_members_there_are():
    """Horovod's case against one parameter server: its NIC carries the buffer of every member, twice."""
    for n in (2, 4, 8):
        _, into = on_nics(whole("server", Group(n), servers=even(1)), cluster_of(n))
        ring, _ = on_nics(whole("ring", Group(n)), cluster_of(n))
        assert into.max() / ring.max() == pytest.approx(n * n / (2 * (n - 1)))


# ---------------------------------------------------------------- what a library chooses


@pytest.mark.parametrize(("n", "ranks_per_node", "buffers"), [(2, 1, 1), (4, 1, 3), (8, 1, 6), (8, 2, 6), (8, 4, 4)])
def test_gloo_broadcasts_from_one_nic_to_all_children_at_once(n, ranks_per_node, buffers):
    """Measured: 61.9 ms for 1 MB to one rank of each of 4 nodes at 50 MB/s, 121 ms to two of each: 3 and 6 buffers."""
    line = Link(latency_s=0.0, bandwidth_Bps=RATE_BPS)
    cluster = cluster_of(n // ranks_per_node, ranks_per_node, network=line, library="gloo")
    assert seconds(Broadcast("whole", Group(n)), cluster) == pytest.approx(buffers * S / RATE_BPS, rel=1e-12)


def test_gloo_broadcast_takes_a_latency_for_every_level_of_its_tree():
    cluster = cluster_of(8, library="gloo")
    for root in (0, 5):
        found_s = seconds(Broadcast("whole", Group(8), root=root), cluster)
        assert found_s == pytest.approx(3 * ALPHA_S + 6 * S / RATE_BPS, rel=1e-12)
    inside = cluster_of(1, 8, fabric=NETWORK, network=IDEAL, library="gloo")
    assert seconds(Broadcast("whole", Group(8)), inside) == pytest.approx(3 * ALPHA_S + 6 * S / RATE_BPS, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_gloo_reduces_in_rings_and_gathers_at_the_root(n):
    cluster, count = cluster_of(n, library="gloo"), COUNT // n * n
    nbytes = 4 * count
    ring_s = 2 * (n - 1) * ALPHA_S + 2 * (n - 1) / n * nbytes / RATE_BPS
    expected_s = {
        "all_reduce": ring_s,
        "reduce_scatter": ring_s,
        "all_gather": ring_s / 2,
        "reduce": n * ALPHA_S + 2 * (n - 1) / n * nbytes / RATE_BPS,
    }
    for kind, kind_s in expected_s.items():
        op = every_kind(Group(n), "auto")[kind]
        assert seconds(op, cluster, count) == pytest.approx(kind_s, rel=1e-12), kind


@pytest.mark.parametrize(
    ("m", "n", "count", "chosen"),
    [
        (1, 8, 840, "ring"),  # inside a node
        (8, 1, 840, "double_tree"),  # 6 latencies, not 14
        (8, 1, 84_000_000, "ring"),  # 7/4 of the buffer, not 2
        (2, 8, 84_000_000, "double_tree"),  # two nodes: each is the other's only child
    ],
)
def test_nccl_takes_the_faster_of_ring_and_double_tree(m, n, count, chosen):
    cluster = cluster_of(m, n, fabric=FABRIC)
    found_s = seconds(whole("auto", Group(m * n)), cluster, count)
    by_name = {name: seconds(whole(name, Group(m * n)), cluster, count) for name in ("ring", "double_tree")}
    assert found_s == by_name[chosen]
    assert found_s == min(by_name.values()) or m == 1


@pytest.mark.parametrize(("nbytes", "chosen"), [(8, "ring"), (2**20, "ring"), (2**25, "ring"), (2**27, "double_tree")])
def test_nccl_without_ll128_takes_rings_for_small_buffers_of_few_nodes(nbytes, chosen):
    """16 GPUs, as measured over EFA: a hop of the tree waits for a chunk, however small the buffer is."""
    nvlink, efa = Link(latency_s=3.4e-6, bandwidth_Bps=231e9), Link(latency_s=15e-6, bandwidth_Bps=48e9)
    cluster = cluster_of(2, 8, fabric=nvlink, network=efa, library="nccl_simple")
    auto_s, chosen_s = (seconds(whole(name, Group(16)), cluster, nbytes // 4) for name in ("auto", chosen))
    assert auto_s == chosen_s


def test_nccl_takes_the_ring_inside_a_node_even_where_fewer_and_larger_messages_would_be_faster():
    flat = Link(table=((0, 1e-6), (1_000, 1e-4), (1_000_000_000, 1.01e-4)))
    cluster = cluster_of(1, 8, fabric=flat)
    auto_s, ring_s, chain_s = (seconds(whole(name, Group(8)), cluster) for name in ("auto", "ring", "double_tree"))
    assert chain_s < ring_s == auto_s


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "reduce", "broadcast"])
def test_nccl_takes_the_ring_for_all_but_all_reduce(kind):
    ops = (every_kind(Group(8), algorithm)[kind] for algorithm in ("auto", "ring"))
    auto_s, ring_s = (seconds(op, cluster_of(8), 8) for op in ops)
    assert auto_s == ring_s


# ---------------------------------------------------------------- the PCIe host bridge


def test_gpus_below_one_host_bridge_share_it():
    """A ring of 4 GPUs: at any time 4 messages cross the bridge, each up and down."""
    cluster = cluster_of(1, 4, fabric=FABRIC, host_bridge_Bps=12e9)
    ring_s = 2 * 3 * FABRIC_ALPHA_S + 4 * 2 * 3 / 4 * S / 12e9
    assert seconds(whole("ring", Group(4)), cluster) == pytest.approx(ring_s, rel=1e-12)
    wide = cluster.model_copy(update={"topology": {"host_bridge_Bps": 100e9}})
    alone_s = 2 * 3 * FABRIC_ALPHA_S + 2 * 3 / 4 * S / FABRIC_BPS
    assert seconds(whole("ring", Group(4)), wide) == pytest.approx(alone_s, rel=1e-12)


def test_what_leaves_a_node_crosses_its_host_bridge_once():
    """A ring over 2 nodes of 3: of the 3 messages that the GPUs of a node send, one is for the NIC."""
    cluster = cluster_of(2, 3, host_bridge_Bps=1e9)
    _, costs, cost = priced(whole("ring", Group(6)), cluster)
    (stage,) = cost.transfers[0].stages
    nbytes = np.zeros(costs.resources.n_resources)
    nbytes[stage.resources] = stage.nbytes
    each = 2 * 5 / 6 * S
    assert nbytes[costs.resources.bridge_up(np.arange(2))] == pytest.approx([3 * each] * 2)
    assert nbytes[costs.resources.bridge_down(np.arange(2))] == pytest.approx([3 * each] * 2)
    assert nbytes[costs.resources.nic_out(np.arange(2))] == pytest.approx([each] * 2)
    assert cost.alone_s == pytest.approx(4 * ALPHA_S + 3 * each / 1e9, rel=1e-12)


def test_groups_inside_a_node_contend_for_its_host_bridge_only():
    op, plain = whole("ring", Group(2)), cluster_of(2, 4, fabric=FABRIC)
    assert not priced(op, plain)[1].contested
    bridged = plain.model_copy(update={"topology": {"host_bridge_Bps": 9e9}})
    plan, costs, _ = priced(op, bridged)
    assert costs.contested == {op}
    expected_s = 2 * FABRIC_ALPHA_S + 2 * 2 * S / 9e9  # two pairs, each S up and S down at both ends
    for engine in (des, fast):
        assert engine.simulate(plan, costs, {}).makespan_s == pytest.approx(expected_s, rel=1e-9)
    assert not priced(whole("ring", Group(4)), bridged)[1].contested


def test_servers_apart_have_no_host_bridge():
    op = whole("server", Group(2), servers=even(1))
    slow = cluster_of(2, host_bridge_Bps=RATE_BPS / 4)
    assert seconds(op, slow) == pytest.approx(2 * (ALPHA_S + 4 * S / RATE_BPS), rel=1e-12)


# ---------------------------------------------------------------- what no algorithm can do

ALGORITHMS = {
    "all_reduce": ("auto", "ring", "tree", "double_tree", "halving_doubling", "direct", "hierarchical"),
    "reduce_scatter": ("auto", "ring", "halving_doubling", "direct"),
    "all_gather": ("auto", "ring", "halving_doubling", "direct"),
    "reduce": ("auto", "ring", "tree", "direct"),
    "broadcast": ("auto", "ring", "tree", "direct"),
}
CASES = [(kind, algorithm) for kind, algorithms in ALGORITHMS.items() for algorithm in algorithms]
LINES = st.builds(
    Link, latency_s=st.sampled_from([0.0, 2e-6, 1e-3]), bandwidth_Bps=st.sampled_from([1e8, 3e9, math.inf])
)


@st.composite
def collectives(draw):
    """Draw a collective, a cluster, and the elements of the buffer."""
    kind, algorithm = draw(st.sampled_from(CASES))
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    size = draw(st.sampled_from([size for size in range(2, m * n + 1) if m * n % size == 0] or [1]))
    stride = draw(st.sampled_from([stride for stride in range(1, m * n + 1) if m * n % (size * stride) == 0]))
    assume(algorithm != "halving_doubling" or size & (size - 1) == 0)
    group = Group(size, stride)
    nodes = [np.unique(np.array(each) // n, return_counts=True)[1] for each in group.members(m * n)]
    assume(algorithm != "hierarchical" or all(len(set(counts.tolist())) == 1 for counts in nodes))
    library = draw(st.sampled_from(["nccl", "nccl_simple", "gloo"]))
    cluster = Cluster(
        nodes=m, gpus_per_node=n, fabric=draw(LINES), network=draw(LINES), collectives={"library": library}
    )
    return kind, every_kind(group, algorithm)[kind], cluster, draw(st.integers(1, 10_000)) * size


def least_share(kind, n, k):
    """Return what must cross the NIC of a node with k of n members in one direction, as a share of the buffer.

    Each element of an all_reduce is reduced somewhere: a node sends its summand away, or the sum; the same comes in. Of
    what is scattered or gathered, the node lacks (n - k)/n.
    """
    return (n - k) / n if kind in ("reduce_scatter", "all_gather") else 1.0


@examples(150)
@given(collectives())
def test_no_algorithm_is_faster_than_its_links_allow(case):
    kind, op, cluster, count = case
    _, costs, cost = priced(op, cluster, count)
    alone_s = np.broadcast_to(cost.alone_s, len(cost.transfers))
    groups = op.group.members(cluster.world_size)
    for members, transfer, found_s in zip(groups, cost.transfers, alone_s, strict=True):
        per_node = np.unique(np.array(members) // cluster.gpus_per_node, return_counts=True)[1]
        n, several = len(members), len(per_node) > 1
        link = cluster.network if several else cluster.fabric
        share = max(least_share(kind, n, k if several else 1) for k in per_node.tolist())
        if n == 1:
            assert found_s == 0
            continue
        assert found_s >= link.latency_s + 4 * count * share / link.bandwidth_Bps * (1 - 1e-12)
        assert found_s == pytest.approx(transfer.alone_s(costs.capacity_Bps))


@examples(100)
@given(collectives())
def test_what_leaves_a_port_arrives_at_another(case):
    _, op, cluster, count = case
    _, costs, cost = priced(op, cluster, count)
    topology, nodes, ranks = costs.resources, np.arange(cluster.nodes), np.arange(cluster.world_size)
    for transfer in cost.transfers:
        for stage in transfer.stages:
            nbytes = np.zeros(topology.n_resources)
            nbytes[stage.resources] = stage.nbytes
            assert nbytes[topology.nic_out(nodes)].sum() == pytest.approx(nbytes[topology.nic_in(nodes)].sum())
            assert nbytes[topology.fabric_out(ranks)].sum() == pytest.approx(nbytes[topology.fabric_in(ranks)].sum())


@examples(100)
@given(collectives())
def test_automatic_choice_of_nccl_is_never_slower_than_the_ring(case):
    kind, op, cluster, count = case
    nccl = cluster.model_copy(
        update={
            "collectives": {"library": "nccl" if cluster.collectives.library == "gloo" else cluster.collectives.library}
        }
    )
    auto_s, ring_s = (
        np.max(seconds(every_kind(op.group, algorithm)[kind], nccl, count)) for algorithm in ("auto", "ring")
    )
    assert auto_s <= ring_s


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Broadcast("whole", Group(2), algorithm="double_tree"), "double_tree is an algorithm of all_reduce only"),
        (Reduce("whole", Group(2), algorithm="hierarchical"), "hierarchical is an algorithm of all_reduce only"),
        (whole("server", Group(2)), "server is an algorithm of an all_reduce with `servers`"),
        (whole("halving_doubling", Group(6)), "halving_doubling over a group of 6; it needs a power of two"),
    ],
)
def test_algorithm_that_a_collective_does_not_have_is_refused(op, message):
    with pytest.raises(PlanError, match=message):
        priced(op, cluster_of(6))


def test_a_price_times_a_factor_scales_members_that_end_on_their_own_and_late_ones():
    first_come = priced(AllReduce("whole", Group(4), drop=1), cluster_of(4))[2]
    assert first_come.first_come.late_s > 0
    assert first_come.scaled(3.0).first_come.late_s == 3.0 * first_come.first_come.late_s
    chunkwise = priced(whole("auto", Group(4)), cluster_of(4, library="gloo", chunkwise=True))[2]
    come_s = np.zeros((4, 1))
    ends = [each.segments.end_s(come_s, each.segments.segment_s.T) for each in (chunkwise, chunkwise.scaled(3.0))]
    np.testing.assert_allclose(3.0 * ends[0], ends[1], rtol=1e-12)


# ---------------------------------------------------------------- groups that look alike

MACHINES = st.fixed_dictionaries(
    {
        "device": st.sampled_from(
            [{}, {"compute_capability": 7}, {"compute_capability": 8}, {"compute_capability": 9}]
        ),
        "nics_per_node": st.sampled_from([1, 2]),
        "host_bridge_Bps": st.sampled_from([math.inf, 6e9]),
        "oversubscription": st.sampled_from([1, 3]),
        "in_switch_reduction": st.booleans(),
        "overhead_s": st.sampled_from([0.0, 1e-5]),
        "rails": st.booleans(),
    }
)
LEAVES = st.none() | st.sampled_from([1, 2, 3, 4]).map(
    lambda nodes: {"oversubscription": 1, "leaf": {"nodes": nodes, "bandwidth_Bps": 2e9, "latency_s": 1e-4}}
)


@examples(250)
@given(collectives(), MACHINES, LEAVES, st.booleans())
def test_groups_that_look_alike_cost_to_the_bit_what_they_cost_one_by_one(case, machines, leaves, has_host):
    _, op, cluster, count = case
    machines |= leaves or {}
    if has_host and cluster.collectives.library == "gloo":
        host = {"handover_s": 1e-5, "collective_s": 2e-5, "copy_Bps": 3e9}
        machines = machines | {"host": host, "cores_per_node": 2, "reduction_Bps": 5e9}
    cluster = Cluster.model_validate(dict(cluster) | grouped(machines | {"library": cluster.collectives.library}))
    _, found, cost = priced(op, cluster, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "_OF_LIBRARIES", ())
        _, plain, one_by_one = priced(op, cluster, count)
    assert found.contested == plain.contested
    assert_same(cost, one_by_one)


def assert_same(cost, other):
    assert np.array_equal(cost.alone_s, other.alone_s)
    assert len(cost.transfers) == len(other.transfers)
    for transfer, of_other in zip(cost.transfers, other.transfers, strict=True):
        for stage, alike in zip(transfer.stages, of_other.stages, strict=True):
            assert stage.latency_s == alike.latency_s
            assert np.array_equal(stage.resources, alike.resources)
            assert np.array_equal(stage.nbytes, alike.nbytes)


def test_buffers_of_one_size_are_priced_once_and_those_of_others_are_not(monkeypatch):
    sizes = {"a": 1000, "b": 1000, "c": 2000}
    buffers = tuple(Buffer(name, count, initialized=True) for name, count in sizes.items())
    pairs = Group(2)
    ops = (
        *(AllReduce(name, Group(4)) for name in sizes),
        AllReduce("b", pairs),
        AllReduce("a", Group(4), algorithm="tree"),
        Reduce("b", Group(4), root=1),
        Reduce("a", Group(4), root=2),
    )
    plan = Plan.from_steps("several", world_size=4, buffers=buffers, steps=[ops])
    priced_ops = []
    whole_price = pricing._Pricing._new_collective
    monkeypatch.setattr(
        pricing._Pricing,
        "_new_collective",
        lambda self, op, *rest, **more: (priced_ops.append(op), whole_price(self, op, *rest, **more))[1],
    )
    costs = price(plan, cluster_of(2, 2, fabric=FABRIC), WORKLOAD)
    assert [op for op in ops if op not in priced_ops] == [ops[1]]
    assert costs.of[ops[0]] is costs.of[ops[1]]
    for op in ops:
        alone = Plan.from_steps("one", world_size=4, buffers=buffers, steps=[(op,)])
        assert_same(costs.of[op], price(alone, cluster_of(2, 2, fabric=FABRIC), WORKLOAD).of[op])
