"""Cards of GPUs by rail, and leaf switches with uplinks: closed forms, what shares them, and both engines."""

import numpy as np
import pytest
from engine_runs import simulate
from flat_clusters import grouped
from pydantic import ValidationError

from simdist.cost import Shared, price
from simdist.plan import AllReduce, Broadcast, Buffer, Plan
from simdist.plan.group import Group
from simdist.runs.building import build, delays
from simdist.scenario import loads
from simdist.scenario.cluster import Cluster, Leaf, Link
from simdist.scenario.warnings import warnings_of
from simdist.scenario.workload import Tensor, Workload

WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1)
ALPHA_S, NIC_BPS = 10e-6, 1e9
NETWORK = Link(latency_s=ALPHA_S, bandwidth_Bps=NIC_BPS)
LEAF = Leaf(nodes=2, bandwidth_Bps=0.1e9, uplinks=2, efficiency=0.5, latency_s=1e-3)
MB = 10**6


def machines(nodes=4, gpus=1, **more):
    return Cluster(nodes=nodes, gpus_per_node=gpus, fabric="ideal", network=NETWORK, **grouped(more))


def costs(cluster, group=None, nbytes=24 * MB, algorithm="ring", op=AllReduce):
    whole = Buffer("whole", nbytes // 4, initialized=True)
    each = op("whole", group or Group(cluster.world_size), algorithm=algorithm)
    plan = Plan.from_steps("one", world_size=cluster.world_size, buffers=(whole,), steps=[(each,)])
    found = price(plan, cluster, WORKLOAD)
    assert isinstance(found.of[each], Shared)
    return plan, found, found.of[each]


def seconds(*args, **more):
    return costs(*args, **more)[2].alone_s


def test_a_gpu_with_its_own_cards_sends_at_its_share_of_the_rate_of_its_node():
    """A group with one GPU of each node: 2 (m - 1) / m of the bytes leave each card."""
    group = Group(4, 2)
    latency_s = 6 * ALPHA_S
    flow_s = 6 / 4 * 24 * MB / NIC_BPS
    assert seconds(machines(gpus=2), group) == pytest.approx(latency_s + flow_s)
    assert seconds(machines(gpus=2, rails=True), group) == pytest.approx(latency_s + 2 * flow_s)


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_groups_on_different_rails_do_not_meet(engine):
    """Both groups together take as long as one alone, where they share all cards of their nodes, they take twice."""
    group = Group(4, 2)
    for rails in (False, True):
        plan, found, shared = costs(machines(gpus=2, rails=rails), group)
        together_s = simulate(plan, found, {}, engine=engine).makespan_s
        expected_s = 6 * ALPHA_S + 2 * 6 / 4 * 24 * MB / NIC_BPS
        assert together_s == pytest.approx(expected_s)
        assert (shared.alone_s == pytest.approx(expected_s)) == rails


@pytest.mark.parametrize("algorithm", ["ring", "double_tree", "hierarchical"])
def test_all_gpus_of_a_node_use_all_its_cards(algorithm):
    with_rails, without = (seconds(machines(gpus=2, rails=rails), algorithm=algorithm) for rails in (True, False))
    assert with_rails == pytest.approx(without, rel=1e-12)


def test_a_ring_over_two_leaves_is_as_slow_as_their_uplinks():
    """Of 6 sends in a row over 4 nodes, 3 are between leaves."""
    expected_s = 6 * ALPHA_S + 3 * 1e-3 + 6 / 4 * 24 * MB / 0.1e9
    assert seconds(machines(leaf=LEAF)) == pytest.approx(expected_s)


def test_below_one_leaf_its_uplinks_do_not_count():
    assert seconds(machines(leaf=LEAF), Group(2)) == seconds(machines(), Group(2))
    (transfer, _) = costs(machines(leaf=LEAF), Group(2))[2].transfers
    assert transfer.stages[0].resources.max() < costs(machines())[1].resources.n_resources


def test_hops_of_trees_between_leaves_take_longer():
    """The first tree over 4 nodes is 0 - 2 - (1, 3), the second one 3 - 1 - (0, 2): two hops up from 0 cross once."""
    with_leaf, without = (seconds(machines(leaf=leaf), nbytes=4, algorithm="double_tree") for leaf in (LEAF, None))
    most_far = 2
    assert with_leaf - without == pytest.approx(2 * most_far * 1e-3, rel=1e-3)


def test_a_broadcast_along_a_chain_crosses_once():
    with_leaf, without = (seconds(machines(leaf=leaf), nbytes=4, op=Broadcast) for leaf in (LEAF, None))
    assert with_leaf - without == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_groups_between_leaves_share_uplinks(engine):
    """Groups 0, 2 and 1, 3: each alone sends S over an uplink, both together twice as much."""
    plan, found, shared = costs(machines(leaf=LEAF), Group(2, 2))
    latency_s = 2 * (ALPHA_S + 1e-3)
    assert shared.alone_s == pytest.approx(latency_s + 24 * MB / 0.1e9)
    assert simulate(plan, found, {}, engine=engine).makespan_s == pytest.approx(latency_s + 2 * 24 * MB / 0.1e9)


def test_groups_alike_are_those_with_alike_leaves():
    """Over 6 nodes below leaves of 4, groups 0-1, 2-3 and 4-5 are alike, and 0-2 and 3-5 are not."""
    cluster = machines(6, leaf=LEAF.model_copy(update={"nodes": 4}))
    assert len({transfer.stages[0].latency_s for transfer in costs(cluster, Group(2))[2].transfers}) == 1
    near, far = costs(cluster, Group(3))[2].transfers
    names = [[costs(cluster)[1].resources.name(each) for each in one.stages[0].resources] for one in (near, far)]
    assert not any("leaf" in name for name in names[0])
    assert {name for name in names[1] if "leaf" in name} == {"leaf_up[0]", "leaf_up[1]", "leaf_down[0]", "leaf_down[1]"}


SCENARIO = """
cluster:
  nodes: 6
  gpus_per_node: 2
  topology:
    nics_per_node: 2
    rails: {rails}
    leaf: {leaf}
  fabric: {{latency: 3 us, bandwidth: 10 GB/s}}
  network: {{latency: 20 us, bandwidth: 8 Gbit/s}}
workload:
  tensors: [{{name: a, count: 300000}}, {{name: b, count: 500000}}]
  batch_size: 1
  forward: 1 ms
  backward: 2 ms
  optimize: 1 ms
disturbances: [{{kind: transient, probability: 20%, delay: 3 ms}}]
schedules:
  - {{kind: sync, bucket_size: 1 MB, first_bucket_size: 1 MB}}
  - {{kind: sync, algorithm: hierarchical, label: h}}
  - {{kind: sync, algorithm: double_tree, label: t}}
  - {{kind: local_sgd, period: 2}}
  - {{kind: hsdp, shard: 2}}
  - {{kind: torus}}
steps: 6
"""


@pytest.mark.parametrize("rails", ["true", "false"])
@pytest.mark.parametrize("leaf", ["null", "{nodes: 4, bandwidth: 6 Gbit/s, latency: 50 us}"])
def test_both_engines_agree_on_rails_and_leaves(rails, leaf):
    text = SCENARIO.format(rails=rails, leaf=leaf)
    scenario = loads(text if leaf != "null" else text.replace("    leaf: null\n", ""))
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        des_s, *others_s = (
            simulate(built.plan, built.costs, delays(scenario), engine=engine).makespan_s
            for engine in ("des", "fast", "auto")
        )
        assert others_s == pytest.approx([des_s, des_s], rel=1e-12)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"topology": {"leaf": LEAF, "oversubscription": 2.0}},
            "2 is that of one switch: with leaf, write uplinks and bandwidth",
        ),
        (
            {"topology": {"leaf": LEAF, "nodes_per_domain": 4}},
            "2 nodes per leaf cut domains of 4 nodes: write a multiple",
        ),
        ({"topology": {"leaf": LEAF.model_copy(update={"bandwidth_Bps": np.inf})}}, "unlimited uplinks limit nothing"),
    ],
)
def test_what_leaves_cannot_be_is_refused(more, told):
    with pytest.raises(ValidationError, match=told):
        machines(**more)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (
            "nodes: 2, gpus_per_node: 1, topology: {rails: true}",
            "cluster.topology.rails has no effect: the GPUs of a node share no NICs",
        ),
        (
            "nodes: 2, gpus_per_node: 1, topology: {leaf: {nodes: 4, bandwidth: 1 GB/s}}",
            "cluster.topology.leaf has no effect: 2 nodes are below one leaf of 4",
        ),
    ],
)
def test_rails_and_leaves_without_effect_are_told(cluster, told):
    text = f"cluster: {{{cluster}, fabric: ideal, network: {{latency: 1 us, bandwidth: 1 GB/s, efficiency: 1}}}}\n"
    text += "workload: {tensors: [{name: a, count: 1}], batch_size: 1, forward: 1 ms}\nschedules: [sync]\nsteps: 1\n"
    assert told in warnings_of(loads(text))
