"""Price lists of one cluster share routes: prices are those of message by message, whatever was priced before."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from flat_clusters import grouped
from hypothesis import assume, given
from hypothesis import strategies as st
from tiers import examples

from simdist.cost import price, pricing, routes, topology
from simdist.cost.routes import Routes, Wiring
from simdist.plan import AllGather, AllReduce, Broadcast, Buffer, Plan, Reduce, ReduceScatter
from simdist.plan.group import Group
from simdist.scenario.cluster import Cluster, Leaf, Link
from simdist.scenario.link import TablePoint
from simdist.scenario.workload import Tensor, Workload
from simdist.studies.comparison import compare

WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1)
KEPT = (routes._kept_routes, pricing.alike, pricing._uses_of_alike, topology._parts)
ALGORITHMS = {
    AllReduce: ("auto", "ring", "double_tree", "nvls", "hierarchical", "tree", "direct"),
    ReduceScatter: ("auto", "ring", "direct"),
    AllGather: ("auto", "ring", "direct"),
    Reduce: ("auto", "ring", "tree", "direct"),
    Broadcast: ("auto", "ring", "tree", "direct"),
}
TABLE = tuple(TablePoint(nbytes=nbytes, time_s=time_s) for nbytes, time_s in ((1, 2e-5), (1000, 3e-5), (10**6, 1e-3)))
LINKS = st.sampled_from(
    [
        Link(latency_s=4e-6, bandwidth_Bps=9e9),
        Link(latency_s=3e-5, bandwidth_Bps=1.1e9),
        Link(latency_s=3e-5, bandwidth_Bps=1.1e9, rendezvous_s=2e-5, eager_nbytes=4096),
        Link.ideal(),
        Link(table=TABLE),
    ]
)


class OneByOne:
    """The routes of messages by their definition: each message puts its bytes on the resources of its way."""

    def __init__(self, wiring: Wiring, src, dst):
        self._wiring = wiring
        self._pairs = list(zip(src.tolist(), dst.tolist(), strict=True))

    def load(self, nbytes):
        wiring, numbers = self._wiring, self._wiring.resources
        totals = defaultdict(float)
        nodes = {self._node(rank) for pair in self._pairs for rank in pair}
        most = max(sum(self._node(rank) == node for rank in self._ranks()) for node in nodes)
        for message, (src, dst) in enumerate(self._pairs):
            is_inside = self._domain(src) == self._domain(dst)
            is_rank = [rank < numbers.world_size for rank in (src, dst)]
            if wiring.has_processes:
                totals[int(numbers.fabric_out(src))] += nbytes["plain"][message] * is_rank[0]
                totals[int(numbers.fabric_in(dst))] += nbytes["plain"][message] * is_rank[1]
            elif is_inside:
                share = (numbers.ranks_per_node - 1) / max(most - 1, 1) if wiring.mesh else 1.0
                totals[int(numbers.fabric_out(src))] += nbytes["fabric"][message] * share
                totals[int(numbers.fabric_in(dst))] += nbytes["fabric"][message] * share
            if not is_inside:
                ways = (("sent", src, numbers.nic_out), ("received", dst, numbers.nic_in))
                for way, rank, nic in ways:
                    sharing = [node for node in nodes if self._domain_of_node(node) == self._domain(rank)]
                    for node in sharing if numbers.nodes_per_domain > 1 else [self._node(rank)]:
                        n_sharing = len(sharing) if numbers.nodes_per_domain > 1 else 1
                        totals[int(nic(node))] += nbytes[way][message] / n_sharing
                if wiring.switched:
                    totals[numbers.switch] += nbytes["received"][message]
                for way, rank, card in (("sent", src, numbers.rail_out), ("received", dst, numbers.rail_in)):
                    gpus = [each for each in self._ranks() if each < numbers.world_size]
                    sharing = [each for each in gpus if self._domain(each) == self._domain(rank)]
                    for gpu in sharing if numbers.railed else []:
                        totals[int(card(gpu))] += nbytes[way][message] / len(sharing)
                if self._leaf(src) != self._leaf(dst):
                    totals[int(numbers.leaf_up(self._leaf(src)))] += nbytes["plain"][message]
                    totals[int(numbers.leaf_down(self._leaf(dst)))] += nbytes["plain"][message]
            if wiring.bridged:
                totals[int(numbers.bridge_up(self._node(src)))] += nbytes["plain"][message] * is_rank[0]
                totals[int(numbers.bridge_down(self._node(dst)))] += nbytes["plain"][message] * is_rank[1]
        used = sorted(resource for resource, total in totals.items() if total > 0)
        return np.array(used, dtype=np.int64), np.array([totals[each] for each in used])

    def chains(self, order, rounds):
        outside = [self._domain(src) != self._domain(dst) for src, dst in self._pairs]
        far = [self._leaf(src) != self._leaf(dst) for src, dst in self._pairs]
        if order == "line":
            return [(outside.count(False), outside.count(True), far.count(True))]
        if order == "slowest":
            kinds = zip(outside, far, strict=True)
            return [(0 if is_outside else rounds, rounds * is_outside, rounds * is_far) for is_outside, is_far in kinds]
        n = len(outside)
        runs = [[(first + at) % n for at in range(rounds)] for first in range(n)]
        counts = [[[marks[at] for at in run].count(True) for marks in (outside, far)] for run in runs]
        return [(rounds - n_outside, n_outside, n_far) for n_outside, n_far in counts]

    def _ranks(self):
        return {rank for pair in self._pairs for rank in pair}

    def _node(self, rank):
        return int(self._wiring.resources.node(np.array(rank)))

    def _domain(self, rank):
        return int(self._wiring.resources.domain(np.array(rank)))

    def _leaf(self, rank):
        return int(self._wiring.resources.leaf(np.array(rank)))

    def _domain_of_node(self, node):
        return self._domain(node * self._wiring.resources.ranks_per_node)


@st.composite
def clusters(draw, nodes, gpus):
    """Draw a cluster of these sizes, with any of the settings that routes or prices depend on."""
    library = draw(st.sampled_from(["nccl", "nccl_simple", "gloo"]))
    more = {
        "device": draw(st.sampled_from([{}, {"compute_capability": 8}, {"compute_capability": 9}])),
        "nics_per_node": draw(st.sampled_from([1, 2])),
        "host_bridge_Bps": draw(st.sampled_from([np.inf, 6e9])),
        "oversubscription": draw(st.sampled_from([1, 3])),
        "in_switch_reduction": draw(st.booleans()),
        "overhead_s": draw(st.sampled_from([0.0, 1e-5])),
        "library": library,
    }
    if draw(st.booleans()):
        more |= {"mesh": True}
    elif nodes % 2 == 0:
        more |= {"nodes_per_domain": draw(st.sampled_from([1, 2]))}
    if draw(st.booleans()):
        leaf_nodes = draw(st.sampled_from([1, 2, 3, 4])) * more.get("nodes_per_domain", 1)
        leaf = Leaf(nodes=leaf_nodes, bandwidth_Bps=2e9, latency_s=draw(st.sampled_from([0.0, 1e-4])))
        more |= {"leaf": leaf, "oversubscription": 1}
    more |= {"rails": draw(st.booleans())}
    if library == "gloo" and draw(st.booleans()):
        more |= {"host": {"handover_s": 1e-5, "collective_s": 2e-5, "copy_Bps": 3e9}}
        more |= {"cores_per_node": 2, "reduction_Bps": 5e9}
    fabric, network = draw(LINKS), draw(LINKS)
    return Cluster(nodes=nodes, gpus_per_node=gpus, fabric=fabric, network=network, **grouped(more))


@st.composite
def collectives(draw):
    """Draw a collective, the elements of its buffer, and a few clusters of one size for it."""
    nodes, gpus = draw(st.sampled_from(list(product([1, 2, 4, 6], [1, 2, 4]))))
    world_size = nodes * gpus
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    assume(sizes)
    size = draw(st.sampled_from(sizes))
    strides = [stride for stride in range(1, world_size + 1) if world_size % (size * stride) == 0]
    group = Group(size, draw(st.sampled_from(strides)))
    kind = draw(st.sampled_from(list(ALGORITHMS)))
    algorithm = draw(st.sampled_from(ALGORITHMS[kind]))
    count = draw(st.sampled_from([1, 1000, 250_000])) * size
    names = ("whole", "slice") if kind is ReduceScatter else ("slice", "whole") if kind is AllGather else ("whole",)
    root = {"root": draw(st.integers(0, size - 1))} if kind in (Reduce, Broadcast) else {}
    op = kind(*names, group, algorithm=algorithm, **root)
    return op, count, draw(st.lists(clusters(nodes, gpus), min_size=2, max_size=3))


def priced(op, count, cluster):
    """Return the entry of an operation in a price list, and whether links may be shared; None if it is refused."""
    buffers = Buffer("whole", count, initialized=True), Buffer("slice", count // op.group.size, initialized=True)
    plan = Plan.from_steps("one", world_size=cluster.world_size, buffers=buffers, steps=[(op,)])
    try:
        costs = price(plan, cluster, WORKLOAD)
    except ValueError as error:
        return str(error)
    stages = [each for transfer in costs.of[op].transfers for each in transfer.stages]
    return costs.of[op].alone_s, stages, costs.contested


def assert_same(found, plain, rtol):
    if isinstance(plain, str):
        assert found == plain
        return
    np.testing.assert_allclose(found[0], plain[0], rtol=rtol)
    assert found[2] == plain[2]
    for stage, other in zip(found[1], plain[1], strict=True):
        assert np.array_equal(stage.resources, other.resources)
        np.testing.assert_allclose(stage.latency_s, other.latency_s, rtol=rtol)
        np.testing.assert_allclose(stage.nbytes, other.nbytes, rtol=rtol)


@examples(150)
@given(collectives())
def test_prices_are_those_of_messages_one_by_one(case):
    op, count, machines = case
    for cluster in machines:
        found = priced(op, count, cluster)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topology, "routes_of", OneByOne)
            plain = priced(op, count, cluster)
        assert_same(found, plain, rtol=1e-12)


@examples(150)
@given(collectives())
def test_prices_do_not_depend_on_what_was_priced_before(case):
    op, count, machines = case
    found = [priced(op, count, cluster) for cluster in machines]
    for cluster, after_others in zip(machines, found, strict=True):
        for each in KEPT:
            each.cache_clear()
        assert_same(after_others, priced(op, count, cluster), rtol=0)


def test_routes_of_other_links_are_the_same_object():
    ranks = np.arange(8)
    wiring = Wiring(pricing.Resources(4, 2, 0, 1), switched=False, bridged=False, mesh=False, has_processes=False)
    kept = routes.routes_of(wiring, ranks, np.roll(ranks, 1))
    assert kept is routes.routes_of(wiring, ranks.copy(), np.roll(ranks, 1))
    assert kept is not routes.routes_of(wiring, np.roll(ranks, 1), ranks)


def test_more_messages_than_are_kept_have_the_same_routes(monkeypatch):
    monkeypatch.setattr(routes, "_MOST_KEPT", 3)
    ranks = np.arange(4)
    wiring = Wiring(pricing.Resources(2, 2, 0, 1), switched=True, bridged=True, mesh=False, has_processes=False)
    made = routes.routes_of(wiring, ranks, ranks[::-1])
    assert made is not routes.routes_of(wiring, ranks, ranks[::-1])
    nbytes = dict.fromkeys(("fabric", "sent", "received", "plain"), np.arange(1.0, 5.0))
    for one, other in zip(made.load(nbytes), Routes(wiring, ranks, ranks[::-1]).load(nbytes), strict=True):
        assert np.array_equal(one, other)


def test_a_comparison_with_ranges_is_the_same_in_any_order():
    def rows(*labels):
        for each in KEPT:
            each.cache_clear()
        from simdist.scenario import loads

        schedules = {"sync": "{kind: sync}", "local": "{kind: local_sgd, period: 2, label: local}"}
        scenario = loads(
            "cluster: {preset: dgx-h100, nodes: 4}\nworkload: {preset: resnet50}\nsteps: 4\n"
            f"schedules: [{', '.join(schedules[each] for each in labels)}]\n"
        )
        return {each.schedule: each.document() for each in compare(scenario, n_seeds=2)}

    one = rows("sync", "local")
    low_s, high_s = one["sync"]["step_s_range90"]
    assert low_s < high_s
    other = rows("local", "sync")
    assert one == other
