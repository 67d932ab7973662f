"""NCCL on GPUs of a stated generation: closed forms of its protocols, of reduction in switches, and what it chooses."""

import itertools

import numpy as np
import pytest
from flat_clusters import grouped
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tiers import examples

from simdist import scenario
from simdist.cost import Shared, price
from simdist.errors import PlanError
from simdist.plan import AllGather, AllReduce, Broadcast, Buffer, Plan, ReduceScatter
from simdist.plan.group import Group
from simdist.scenario.cluster import Cluster, Device, Link
from simdist.scenario.warnings import warnings_of
from simdist.scenario.workload import Tensor, Workload

FABRIC_BPS, NETWORK_BPS = 240e9, 100e9
NVLINK, NETWORK = Link(latency_s=3.4e-6, bandwidth_Bps=FABRIC_BPS), Link(latency_s=1e-6, bandwidth_Bps=NETWORK_BPS)
WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1)
KIB, MIB, GIB = 2**10, 2**20, 2**30


def machines(nodes=1, capability=8.0, *, gpus=8, network=NETWORK, **more):
    device = Device(compute_capability=capability)
    return Cluster(nodes=nodes, gpus_per_node=gpus, fabric=NVLINK, network=network, device=device, **grouped(more))


def priced(cluster, nbytes, algorithm="auto", kind="all_reduce", group=None):
    group = group or Group(cluster.world_size)
    op = {
        "all_reduce": AllReduce("whole", group, algorithm=algorithm),
        "reduce_scatter": ReduceScatter("whole", "slice", group, algorithm=algorithm),
        "all_gather": AllGather("slice", "whole", group, algorithm=algorithm),
        "broadcast": Broadcast("whole", group, algorithm=algorithm),
    }[kind]
    count = nbytes // 4
    buffers = Buffer("whole", count, initialized=True), Buffer("slice", count // group.size, initialized=True)
    costs = price(
        Plan.from_steps("one", world_size=cluster.world_size, buffers=buffers, steps=[(op,)]), cluster, WORKLOAD
    )
    assert isinstance(costs.of[op], Shared)
    return costs.of[op]


def seconds(*args, **more):
    return priced(*args, **more).alone_s


def most_nbytes(cluster, nbytes, **more):
    (transfer,) = priced(cluster, nbytes, **more).transfers
    return max(float(stage.nbytes.max()) for stage in transfer.stages)


def ring_s(base, hops_s, share, nbytes, n=8):
    """Return base + hops + 2 (n - 1) / n of the bytes at a share of the fabric."""
    return base + hops_s + 2 * (n - 1) / n * nbytes / (share * FABRIC_BPS)


def test_in_a_node_small_buffers_go_by_ll_larger_by_ll128_large_ones_by_simple():
    ll = 6.6e-6 + 14 * 0.6e-6  # bytes of a line per thread take no longer than hops
    ll128 = ring_s(14e-6, 14 * 1.9e-6, 0.92, 4 * MIB)
    simple = ring_s(8.4e-6, 2 * 14 * 3.4e-6, 1, GIB)  # chunks of more than 32 KiB have two slices
    found = [seconds(machines(), nbytes) for nbytes in (32 * KIB, 4 * MIB, GIB)]
    assert found == pytest.approx([ll, ll128, simple], rel=1e-12)


def test_simple_waits_for_each_slice_of_a_chunk():
    simple_only = machines(library="nccl_simple")
    one, two = 8 * 24 * 32 * KIB, 8 * 24 * 32 * KIB + 32
    assert seconds(simple_only, one) == pytest.approx(ring_s(8.4e-6, 14 * 3.4e-6, 1, one), rel=1e-12)
    assert seconds(simple_only, two) == pytest.approx(ring_s(8.4e-6, 28 * 3.4e-6, 1, two), rel=1e-12)


@pytest.mark.parametrize(("capability", "share", "most_Bps"), [(8.0, 1 / 4, 87.7e9), (9.0, 1 / 2, 141e9)])
@pytest.mark.parametrize(("nbytes", "lines"), [(KIB, 1), (768 * KIB, 1), (768 * KIB + 32, 2), (MIB, 2)])
def test_a_hop_of_ll_takes_as_long_as_its_lines_or_its_bytes(capability, share, most_Bps, nbytes, lines):
    bytes_s = 2 * 7 / 8 * nbytes / min(share * FABRIC_BPS, most_Bps)
    expected_s = 6.6e-6 + max(14 * lines * 0.6e-6, bytes_s)
    assert seconds(machines(capability=capability), nbytes) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("nbytes", [3 * MIB, 3 * MIB + 512 * KIB])
def test_ll128_takes_a_chunk_of_19200_bytes_at_least(nbytes):
    least = 24 * 8 * 19_200
    expected_s = ring_s(14e-6, 14 * 1.9e-6, 0.92, max(nbytes, least))
    assert seconds(machines(), nbytes) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    ("nbytes", "n_channels", "d"), [(2 * KIB, 1, 0.8), (4 * KIB, 1, 0.7), (32 * KIB, 8, 0.7), (128 * KIB, 16, 0.5)]
)
def test_between_nodes_a_small_buffer_has_few_channels_of_what_ll_can(nbytes, n_channels, d):
    fast = NETWORK.model_copy(update={"bandwidth_Bps": 1e15})
    found_s = seconds(machines(2, 8.0, network=fast, nics_per_node=8), nbytes)
    ll_s = 6.8e-6 + 14 * 0.6e-6 + 2 * 5e-6 + 2 * nbytes / (39e9 * d * n_channels / 16)
    assert found_s == pytest.approx(ll_s, rel=1e-12)


def test_flags_of_ll_and_ll128_flow_and_the_rest_that_they_lack_is_waiting():
    ring_nbytes = 2 * 7 / 8
    assert most_nbytes(machines(), 32 * KIB) == pytest.approx(2 * ring_nbytes * 32 * KIB)
    assert most_nbytes(machines(), 4 * MIB) == pytest.approx(ring_nbytes * 4 * MIB / 0.92)
    assert most_nbytes(machines(), GIB) == pytest.approx(ring_nbytes * GIB)


@pytest.mark.parametrize(("kind", "hops", "share"), [("reduce_scatter", 7, 7 / 8), ("all_gather", 7, 7 / 8)])
def test_halves_of_an_all_reduce_go_by_the_same_protocols(kind, hops, share):
    small, large = (seconds(machines(), nbytes, kind=kind) for nbytes in (32 * KIB, GIB))
    assert small == pytest.approx(6.6e-6 + hops * 0.6e-6, rel=1e-12)
    assert large == pytest.approx(8.4e-6 + 2 * hops * 3.4e-6 + share * GIB / FABRIC_BPS, rel=1e-12)


def test_a_small_broadcast_goes_by_ll():
    expected_s = 6.6e-6 + 7 * 0.6e-6
    assert seconds(machines(), 8 * KIB, kind="broadcast") == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(("nbytes", "longer"), [(KIB, 1.0), (MIB, 1.4)])
def test_a_ring_of_simple_between_nodes_waits_longer_from_64_bytes_per_rank_and_channel_on(nbytes, longer):
    cluster = machines(2, library="nccl_simple", nics_per_node=4)
    expected_s = longer * (8.4e-6 + 26 * 3.4e-6 + 4 * 14e-6) + 2 * 15 / 16 * nbytes / (4 * NETWORK_BPS)
    flow_s = 2 * 15 / 16 * nbytes / FABRIC_BPS  # the fabric is slower than four cards
    expected_s += flow_s - 2 * 15 / 16 * nbytes / (4 * NETWORK_BPS)
    assert seconds(cluster, nbytes, "ring") == pytest.approx(expected_s, rel=1e-12)


def test_a_network_slower_than_nccls_own_hop_counts():
    slow = NETWORK.model_copy(update={"latency_s": 20e-6})
    expected_s = 6.8e-6 + 2 * (7 * 0.6e-6 + 20e-6 * 5.0 / 2.7)  # trees have longer ones than rings
    assert seconds(machines(2, network=slow), 8) == pytest.approx(expected_s, rel=1e-4)


def test_chains_of_a_tree_load_the_gpus_of_a_node_alike():
    fast = NETWORK.model_copy(update={"bandwidth_Bps": 1e15})
    (transfer,) = priced(machines(2, network=fast), GIB, "double_tree").transfers
    (stage,) = transfer.stages
    on_fabric = stage.nbytes[stage.resources < 2 * 16]
    assert on_fabric == pytest.approx(np.full(32, 2 * 7 / 8 * GIB))


@pytest.mark.parametrize(("nbytes", "chunk", "d"), [(4 * MIB, 36_000, 0.7), (16 * MIB, 72_000, 0.8)])
@pytest.mark.parametrize(("capability", "channel_Bps"), [(8.0, 20e9), (9.0, 36.7e9)])
def test_the_first_chunk_of_each_channel_fills_the_pipeline_of_a_tree(nbytes, chunk, d, capability, channel_Bps):
    fast = NETWORK.model_copy(update={"bandwidth_Bps": 1e15})
    cluster = machines(2, capability, network=fast, nics_per_node=8)
    flow_s = 2 * 7 / 8 * nbytes / FABRIC_BPS
    expected_s = 14e-6 + 14 * 1.25e-6 + 2 * 8.5e-6 + flow_s / (0.9 * 0.915 * d)
    expected_s += 14 * chunk / channel_Bps + 2 * chunk * 16 / nbytes * flow_s
    assert seconds(cluster, nbytes, "double_tree") == pytest.approx(expected_s, rel=1e-12)


def test_the_fill_of_a_tree_has_no_part_in_what_nccl_chooses():
    cluster = machines(2, 9.0, network=Link(latency_s=1e-6, bandwidth_Bps=20e9), nics_per_node=8)
    tree, ring = (seconds(cluster, 8 * MIB, algorithm) for algorithm in ("double_tree", "ring"))
    assert seconds(cluster, 8 * MIB) == tree > ring


def reduced_s(nbytes, chunk, *, n=8, channels=16, share=0.85, steps=3, hop_s=0.0):
    """Return base + hops between nodes + (rounds + steps - 1) (3.4 us + bytes of a round)."""
    rounds = nbytes / (chunk * n * channels)
    round_s = nbytes * (1 + 1 / n) / (share * FABRIC_BPS) / max(rounds, 1)
    return 8.4e-6 + hop_s + (np.ceil(rounds) + steps - 1) * 3.4e-6 + (max(rounds, 1) + steps - 1) * round_s


@pytest.mark.parametrize(
    ("nbytes", "chunk"), [(4 * MIB, 16), (16 * MIB, 32), (32 * MIB, 32), (64 * MIB, 64), (512 * MIB, 64), (GIB, 128)]
)
def test_switches_of_hopper_reduce_chunk_by_chunk(nbytes, chunk):
    cluster = machines(capability=9.0, in_switch_reduction=True)
    assert seconds(cluster, nbytes, "nvls") == pytest.approx(reduced_s(nbytes, chunk * KIB), rel=1e-12)
    assert (seconds(cluster, nbytes, "nvls") < seconds(cluster, nbytes, "ring")) == (nbytes > 4 * MIB)
    assert most_nbytes(cluster, nbytes, algorithm="nvls") == pytest.approx(nbytes * 9 / 8)


def test_switches_of_blackwell_have_more_channels_and_a_smaller_share():
    cluster = machines(capability=10.0, in_switch_reduction=True)
    expected_s = reduced_s(4 * GIB, 128 * KIB, channels=24, share=0.74)
    assert seconds(cluster, 4 * GIB) == pytest.approx(expected_s, rel=1e-12)


def test_between_nodes_the_switches_reduce_first_and_halves_go_along_two_trees():
    cluster = machines(2, 9.0, in_switch_reduction=True, nics_per_node=8)
    assert seconds(cluster, GIB) == pytest.approx(reduced_s(GIB, 128 * KIB, steps=5, hop_s=2 * 14e-6), rel=1e-12)
    (transfer,) = priced(cluster, GIB).transfers
    assert transfer.stages[0].nbytes[transfer.stages[0].resources >= 32] == pytest.approx(np.full(4, GIB))


@pytest.mark.parametrize(
    "cluster",
    [
        machines(capability=9.0),
        machines(capability=8.0, in_switch_reduction=True),
        machines(gpus=2, capability=9.0, in_switch_reduction=True),
    ],
    ids=["no such switch", "Ampere", "two GPUs"],
)
def test_without_switches_that_reduce_it_is_the_ring(cluster):
    assert seconds(cluster, GIB) == seconds(cluster, GIB, "ring")


def test_without_a_generation_a_ring_is_a_perfect_pipeline_over_the_links():
    cluster = Cluster(
        nodes=1, gpus_per_node=8, fabric=NVLINK, network="ideal", collectives={"in_switch_reduction": True}
    )
    for algorithm in ("auto", "ring"):
        expected_s = 14 * 3.4e-6 + 2 * 7 / 8 * MIB / FABRIC_BPS
        assert seconds(cluster, MIB, algorithm) == pytest.approx(expected_s, rel=1e-12)


def preset(name, n_domains):
    cluster = scenario.load_cluster(scenario.presets.path("clusters", name))
    return cluster.model_copy(update={"nodes": n_domains * cluster.topology.nodes_per_domain})


@pytest.mark.parametrize("name", scenario.presets.names("clusters"))
@pytest.mark.parametrize("n_domains", [1, 2, 3, 20])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_more_bytes_never_take_less_time(name, n_domains, kind):
    cluster = preset(name, n_domains)
    times = [seconds(cluster, 4 * int(2 ** (exponent / 3)), kind=kind) for exponent in range(3, 100)]
    assert all(after >= before * (1 - 1e-12) for before, after in itertools.pairwise(times))


@examples(200)
@given(
    name=st.sampled_from(scenario.presets.names("clusters")),
    n_domains=st.integers(1, 12),
    gpus=st.sampled_from([1, 2, 3, 4, 8]),
    call=st.sampled_from(
        [
            *itertools.product(["all_reduce"], ["auto", "ring", "double_tree"]),
            *itertools.product(["all_gather", "reduce_scatter", "broadcast"], ["auto", "ring"]),
        ]
    ),
    size=st.floats(3, 34),
    larger=st.sampled_from([1e-6, 1e-3, 0.1, 1, 8]),
)
def test_of_any_two_buffers_the_larger_one_takes_no_less_time(name, n_domains, gpus, call, size, larger):
    cluster = preset(name, n_domains)
    cluster = cluster.model_copy(update={"gpus_per_node": min(gpus, cluster.gpus_per_node)})
    kind, algorithm = call
    smaller_s, larger_s = (
        seconds(cluster, 4 * int(2**exponent / 4), algorithm, kind) for exponent in (size, size + larger)
    )
    assert larger_s >= smaller_s * (1 - 1e-12)


def test_just_below_a_larger_chunk_the_switches_take_as_long_as_with_it():
    cluster = machines(capability=9.0, in_switch_reduction=True)
    at_limit = 64 * 8 * 16 * 128 * KIB
    expected_s = reduced_s(at_limit, 128 * KIB)
    assert seconds(cluster, at_limit - 4 * MIB) == pytest.approx(expected_s, rel=1e-12)


RACKS = {
    "collectives": {"in_switch_reduction": True},
    "topology": {"nodes_per_domain": 18, "nics_per_node": 4},
    "gpus": 4,
    "capability": 10.0,
}


def rack(n_racks, **more):
    return machines(18 * n_racks, **RACKS, **more)


@pytest.mark.parametrize(("nbytes", "chunk"), [(GIB, 64), (4 * GIB, 64), (8 * GIB, 128)])
def test_the_switches_of_a_rack_reduce_for_32_heads_with_a_fifth_more_bytes(nbytes, chunk):
    """In 24 channels of 32 GPUs: 1 + 1/5 of the bytes at 0.74 of the links."""
    expected_s = reduced_s(nbytes, chunk * KIB, n=32, channels=24, share=0.74 * (1 + 1 / 32) / (6 / 5))
    assert seconds(rack(1), nbytes) == pytest.approx(expected_s, rel=1e-12)


def test_between_two_racks_all_cards_of_all_hosts_carry_the_halves():
    (transfer,) = priced(rack(2), 8 * GIB).transfers
    (stage,) = transfer.stages
    on_nics = stage.nbytes[(stage.resources >= 2 * 144) & (stage.resources < 2 * 144 + 2 * 36)]
    assert on_nics == pytest.approx(np.full(72, 8 * GIB / 18))


@pytest.mark.parametrize("nbytes", [512 * MIB, 16 * GIB])
def test_between_more_racks_nccl_2_26_takes_trees_of_24_gb_per_second_a_channel(nbytes):
    """A chain of 71 GPUs and 5 levels, a whole chunk in each hop, and the first chunk of 6 channels of 40 GB/s."""
    chunk = {512 * MIB: 128 * KIB, 16 * GIB: 512 * KIB}[nbytes]
    n_channels = int(FABRIC_BPS / 40e9)
    flow_s = max(2 * 71 / 72 * nbytes / FABRIC_BPS, 2 * nbytes / (72 * NETWORK_BPS))
    expected_s = 142 * 28e-6 + 2 * 5 * 50e-6 + 2 * nbytes / (n_channels * 24e9)
    expected_s += 142 * chunk / 24e9 + 2 * 5 * flow_s * chunk * n_channels / nbytes
    assert seconds(rack(20, nccl_version="2.26"), nbytes) == pytest.approx(expected_s, rel=1e-12)


def test_newer_versions_of_nccl_reduce_in_the_switches_of_any_number_of_racks():
    old, new, newest = (seconds(rack(20, nccl_version=version), GIB) for version in ("2.27", "2.28.3", None))
    assert new == newest < old
    assert seconds(rack(2, nccl_version="2.27"), GIB) == seconds(rack(2), GIB)


def test_a_group_inside_a_rack_uses_no_card():
    cluster = rack(2)
    (transfer, _) = priced(cluster, GIB, group=Group(72)).transfers
    assert max(int(stage.resources.max()) for stage in transfer.stages) < 2 * cluster.world_size
    assert seconds(cluster, GIB, group=Group(72)) == pytest.approx(seconds(rack(1), GIB), rel=1e-12)


def test_groups_that_straddle_racks_use_cards_and_those_inside_one_do_not():
    cluster = machines(12, gpus=4, capability=10.0, nodes_per_domain=3)
    transfers = priced(cluster, GIB, group=Group(8)).transfers
    uses_cards = [bool((each.stages[0].resources >= 2 * cluster.world_size).any()) for each in transfers]
    assert uses_cards == [False, True, False] * 2


def test_reduction_in_the_switches_by_name():
    cluster = machines(capability=9.0, in_switch_reduction=True)
    assert seconds(cluster, GIB, "nvls") == seconds(cluster, GIB)
    assert seconds(cluster, 32 * KIB, "nvls") > seconds(cluster, 32 * KIB)
    with pytest.raises(PlanError, match=r"nvls needs cluster.collectives.in_switch_reduction, and a device"):
        seconds(machines(capability=9.0), GIB, "nvls")
    with pytest.raises(PlanError, match=r"nvls needs three or more GPUs of each node; choose auto"):
        seconds(machines(gpus=2, capability=9.0, in_switch_reduction=True), GIB, "nvls")


ASKING = NETWORK.model_copy(update={"rendezvous_s": 50e-6, "eager_nbytes": 8 * KIB})


@pytest.mark.parametrize(("nbytes", "asks"), [(MIB, 0), (MIB + 128, 1)])
def test_a_message_of_a_channel_beyond_an_eager_one_asks_in_each_hop_between_nodes(nbytes, asks):
    """16 ranks and 8 channels: a message of 1 MiB has 8 KiB. A ring over two nodes has four hops between them."""
    without, asking = (
        seconds(machines(2, library="nccl_simple", nics_per_node=4, network=network), nbytes, "ring")
        for network in (NETWORK, ASKING)
    )
    assert asking - without == pytest.approx(asks * 4 * 50e-6, abs=1e-12)


def test_flags_of_ll_make_messages_twice_as_long_and_a_tree_has_two_hops_each_way():
    without, asking = (
        [seconds(machines(2, 9.0, nics_per_node=8, network=network), nbytes) for nbytes in (64 * KIB, 65 * KIB)]
        for network in (NETWORK, ASKING.model_copy(update={"rendezvous_s": 1e-6}))
    )
    assert np.subtract(asking, without) == pytest.approx([0, 2e-6], abs=1e-12)


def test_from_2_23_on_a_hop_of_a_tree_takes_no_whole_chunk():
    cluster = machines(2, 9.0, library="nccl_simple", nccl_version="2.23", nics_per_node=8)
    expected_s = 8.4e-6 + 14 * 4e-6 + 2 * 14e-6
    assert seconds(cluster, 8, "double_tree") == pytest.approx(expected_s, rel=1e-3)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"gpus": 72, "nodes": 1}, "no machine joins more than 16 by NVLink. A GB200 NVL72 is 18 machines of 4 GPUs"),
        (
            {"gpus": 4, "nodes": 20, "topology": {"nodes_per_domain": 18}},
            "20 nodes are no whole number of domains of 18 nodes",
        ),
        (
            {"gpus": 8, "nodes": 18, "topology": {"nodes_per_domain": 18}},
            "144 GPUs in a domain: no times of more than 72 are published",
        ),
    ],
)
def test_domains_that_do_not_exist_are_refused(more, told):
    with pytest.raises(ValidationError, match=told):
        machines(**more)


HOPS = "uncertain: {fabric.latency: {from: 3 us, to: 4 us}}"


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (
            "preset: ideal, collectives: {in_switch_reduction: true}",
            ["cluster.collectives.in_switch_reduction has no effect"],
        ),
        (f"preset: dgx-a100, {HOPS}", ["range of cluster.fabric.latency has no effect on NCCL's rings and trees"]),
        (f"preset: dgx-a100, collectives: {{library: gloo}}, {HOPS}", []),
        ("preset: dgx-a100", []),
    ],
)
def test_what_nccl_does_not_heed_is_told(cluster, told):
    text = f"name: x\ncluster: {{{cluster}}}\nworkload: resnet18\nschedules:\n  - kind: sync\nsteps: 1\nseed: 0\n"
    found = [each for each in warnings_of(scenario.loads(text)) if "switch" in each or "fabric" in each]
    assert [each in sentence for each, sentence in zip(told, found, strict=True)] == [True] * len(told)


MESH = {"fabric": Link(latency_s=0.0, bandwidth_Bps=48e9), "network": "ideal", "topology": {"mesh": True}}


@pytest.mark.parametrize("n", [2, 4, 8])
def test_members_of_a_mesh_use_the_links_among_them(n):
    cluster = Cluster(nodes=1, gpus_per_node=8, **MESH)
    expected_s = 2 * (n - 1) / n * GIB / ((n - 1) * 48e9)
    assert seconds(cluster, GIB, group=Group(n)) == pytest.approx(expected_s, rel=1e-12)


def test_a_mesh_of_several_nodes_is_refused():
    with pytest.raises(ValidationError, match="a mesh of links joins the GPUs of one node"):
        Cluster(nodes=2, gpus_per_node=4, **grouped({"nodes_per_domain": 2, **MESH}))


@pytest.mark.parametrize(("nbytes", "kind"), [(8, "all_reduce"), (2 * MIB, "all_gather")])
def test_one_process_launches_a_collective_on_its_gpus_one_after_the_other(nbytes, kind):
    assert seconds(machines(launch_s=50e-6), nbytes, kind=kind) == pytest.approx(8 * 50e-6, rel=1e-12)
    assert seconds(machines(2, launch_s=50e-6), 8) == pytest.approx(8 * 50e-6, rel=1e-12)


def test_until_2_21_each_further_channel_takes_a_share_of_the_launch():
    cluster = machines(launch_s=50e-6)
    old, new = (cluster.model_copy(update={"collectives": {"nccl_version": version}}) for version in ("2.21", "2.22"))
    assert seconds(old, 32 * 1024) == pytest.approx(8 * 50e-6, rel=1e-12)
    assert seconds(old, 128 * 1024) == pytest.approx(8 * 50e-6 * (1 + 3 * 0.058), rel=1e-12)
    for nbytes in (2**20, 2**21):
        assert seconds(old, nbytes) == pytest.approx(8 * 50e-6 * (1 + 23 * 0.058), rel=1e-12)
        assert seconds(new, nbytes) == pytest.approx(8 * 50e-6, rel=1e-12)
        assert seconds(cluster, nbytes) == pytest.approx(8 * 50e-6, rel=1e-12)


def test_launches_hide_behind_a_large_collective():
    assert seconds(machines(launch_s=50e-6), GIB) == seconds(machines(), GIB)


GAP_S = 500e-6
SPACED = NETWORK.model_copy(update={"gap_s": GAP_S, "eager_nbytes": 8 * KIB})


@pytest.mark.parametrize(("kind", "rounds"), [("all_gather", 15), ("reduce_scatter", 15), ("all_reduce", 30)])
@pytest.mark.parametrize(("nbytes", "gaps"), [(MIB, 1), (MIB + 256, 2)])
def test_each_round_of_a_ring_between_nodes_takes_a_gap_and_two_beyond_an_eager_message(kind, rounds, nbytes, gaps):
    """16 ranks and 8 channels: a message of 1 MiB has 8 KiB."""
    cluster = machines(2, library="nccl_simple", nics_per_node=4, network=SPACED)
    assert seconds(cluster, nbytes, "ring", kind) == pytest.approx(rounds * gaps * GAP_S)


def test_gaps_pass_while_bytes_flow_and_are_no_load_of_a_link():
    cluster = machines(2, library="nccl_simple", nics_per_node=4, network=SPACED)
    without = machines(2, library="nccl_simple", nics_per_node=4)
    assert seconds(cluster, 64 * GIB, "ring") == seconds(without, 64 * GIB, "ring")
    assert most_nbytes(cluster, MIB, algorithm="ring") == most_nbytes(without, MIB, algorithm="ring")


def test_a_ring_inside_a_node_has_no_gaps():
    group = Group(8)
    assert seconds(machines(2, network=SPACED), MIB, "ring", group=group) == seconds(
        machines(2), MIB, "ring", group=group
    )


def test_nccl_chooses_as_if_there_were_no_gaps():
    """Two rings over two nodes: NCCL takes the ring for a large buffer, though the tree would take less."""
    with_gaps, without = (machines(2, nics_per_node=8, network=network) for network in (SPACED, NETWORK))
    nbytes = next(2**i for i in range(20, 40) if seconds(without, 2**i) == seconds(without, 2**i, "ring"))
    larger = nbytes * 2**4
    assert seconds(with_gaps, nbytes) >= 30 * GAP_S > seconds(with_gaps, nbytes, "double_tree")
    assert seconds(with_gaps, larger) >= seconds(with_gaps, nbytes)


def test_rings_of_other_algorithms_take_gaps_too():
    """The torus has 2 (m - 1) rounds between m nodes."""
    with_gaps, without = (
        seconds(machines(4, network=network), 4 * KIB, "hierarchical") for network in (SPACED, NETWORK)
    )
    assert with_gaps - without == pytest.approx(6 * GAP_S - 6 * NETWORK.latency_s, rel=1e-3)


STEP_S = 40e-6
STEPPED = NETWORK.model_copy(update={"ring_step_s": STEP_S})


@pytest.mark.parametrize(("kind", "rounds"), [("all_gather", 15), ("reduce_scatter", 15), ("all_reduce", 30)])
def test_each_step_of_a_ring_between_nodes_takes_its_cost_beside_hops_and_bytes(kind, rounds):
    """Large buffers, too: the cost adds up with the time of the bytes."""
    for nbytes in (MIB, GIB):
        with_steps, without = (
            seconds(machines(2, library="nccl_simple", nics_per_node=8, network=network), nbytes, "ring", kind)
            for network in (STEPPED, NETWORK)
        )
        assert with_steps - without == pytest.approx(rounds * STEP_S)


def test_neither_trees_nor_rings_inside_a_node_nor_ll_take_steps():
    stepped, plain = (machines(2, nics_per_node=8, network=network) for network in (STEPPED, NETWORK))
    group = Group(8)
    assert seconds(stepped, GIB, "ring", group=group) == seconds(plain, GIB, "ring", group=group)
    assert seconds(stepped, GIB, "double_tree") == seconds(plain, GIB, "double_tree")
    assert seconds(stepped, 256, "ring", "all_gather") == seconds(plain, 256, "ring", "all_gather")


def test_nccl_chooses_as_if_steps_cost_nothing():
    stepped, plain = (
        machines(2, nics_per_node=8, network=NETWORK.model_copy(update={"ring_step_s": step_s}))
        for step_s in (10e-3, None)
    )
    nbytes = next(2**i for i in range(20, 40) if seconds(plain, 2**i) == seconds(plain, 2**i, "ring"))
    assert seconds(stepped, nbytes) >= 30 * 10e-3 > seconds(stepped, nbytes, "double_tree")
    times = [seconds(stepped, 2**i) for i in range(10, 38)]
    assert times == sorted(times)


def test_without_a_generation_a_ring_takes_steps_and_is_chosen_without():
    stepped, plain = (machines(4, None, network=network) for network in (STEPPED, NETWORK))
    assert seconds(stepped, GIB, "ring") - seconds(plain, GIB, "ring") == pytest.approx(62 * STEP_S)
    assert seconds(stepped, GIB) in (seconds(stepped, GIB, "ring"), seconds(plain, GIB))


def test_steps_of_gloos_ring_and_of_a_torus_between_nodes_cost_too():
    for algorithm, library, steps in (("auto", "gloo", 62), ("hierarchical", "nccl", 6)):
        with_steps, without = (
            seconds(machines(4, library=library, network=network), GIB, algorithm) for network in (STEPPED, NETWORK)
        )
        assert with_steps - without == pytest.approx(steps * STEP_S)


def test_over_slingshot_ll128_is_not_used_between_nodes():
    cluster, without = machines(2, transport="slingshot"), machines(2, transport="rdma")
    assert seconds(cluster, 8 * MIB, kind="all_gather") > seconds(without, 8 * MIB, kind="all_gather")
    one, other = (machines(1, transport=each) for each in ("slingshot", "rdma"))
    assert seconds(one, 8 * MIB) == seconds(other, 8 * MIB)


@pytest.mark.parametrize("key", ["gap", "ring_step"])
def test_what_only_messages_between_nodes_take_is_refused_of_the_fabric(key):
    with pytest.raises(ValidationError, match=f"{key} is that of messages between nodes: write it in network"):
        Cluster(nodes=1, gpus_per_node=8, fabric=NVLINK.model_copy(update={f"{key}_s": 1e-6}), network=NETWORK)


def test_between_sites_a_channel_has_a_buffer_under_way_in_each_round_trip():
    """8 channels carry 30/16 GiB over each link between nodes: 60 times 4 MiB each."""
    far = NETWORK.model_copy(update={"latency_s": 50e-3})
    cluster = machines(2, library="nccl_simple", nics_per_node=4, network=far)
    hops_s = 1.4 * (8.4e-6 + 26 * 3.4e-6 + 4 * 50e-3)
    assert seconds(cluster, GIB, "ring") == pytest.approx(hops_s + 60 * 2 * 50e-3)


def test_with_rails_a_group_has_the_channels_of_its_gpus_cards():
    """A group with one GPU of each node has one card of eight, and so two channels of sixteen."""
    far = NETWORK.model_copy(update={"latency_s": 50e-3})
    of_rail, of_all = (
        seconds(
            machines(2, library="nccl_simple", nics_per_node=8, network=far, rails=rails),
            GIB,
            "ring",
            group=Group(2, 8),
        )
        for rails in (True, False)
    )
    hops_s = 1.4 * (8.4e-6 + 2 * 50e-3 * 5.0 / 2.7)
    assert of_rail == pytest.approx(hops_s + GIB / 2 / (4 * MIB) * 2 * 50e-3)
    assert of_all == pytest.approx(hops_s + GIB / 16 / (4 * MIB) * 2 * 50e-3)


def test_algorithms_by_nccls_names():
    """NCCL's NVLS and NVLSTree are one here, and its Tree is the double tree. Each costs what NCCL's choice does."""
    one, two = (machines(nodes, 9.0, in_switch_reduction=True, nics_per_node=8) for nodes in (1, 2))
    assert seconds(one, GIB) == seconds(one, GIB, "nvls") < seconds(one, GIB, "ring")
    assert min(seconds(two, GIB, each) for each in ("ring", "double_tree", "nvls")) == seconds(two, GIB)
    assert seconds(two, KIB) == seconds(two, KIB, "double_tree")
    assert seconds(two, GIB, "double_tree") < seconds(two, GIB, "tree")


@pytest.mark.parametrize(
    ("cluster", "is_told"), [("dgx-h100", True), ("v100x8-25gbit, collectives: {library: gloo}", False)]
)
def test_a_tree_that_is_not_nccls_is_told(cluster, is_told):
    text = (
        f"cluster: {{preset: {cluster}}}\nworkload: resnet50\nschedules: [{{kind: sync, algorithm: tree}}]\nsteps: 1\n"
    )
    told = "schedules[0].algorithm tree sends whole buffers along one tree: NCCL's Tree is double_tree"
    assert (told in warnings_of(scenario.loads(text))) == is_told
