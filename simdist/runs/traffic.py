"""From the misbehaving links of a scenario to the inputs of the engines: prices, and the traffic of a seed."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Costs, Resources, Stage
from simdist.cost.pricing import price, resources_of
from simdist.cost.traffic import Background, Flight, LinkShares, Traffic
from simdist.plan import Plan
from simdist.scenario import Scenario
from simdist.scenario.link_sampling import flights, link_shares
from simdist.scenario.links import Endpoint, LinkDisturbance, LinkKind, LinkPersistent, LinkRecorded, TrafficPattern


def disturbed_price(plan: Plan, scenario: Scenario) -> Costs:
    """Return the price of each operation of a plan on links that are slow, or disturbed during the run."""
    resources = resources_of(plan, scenario.cluster)
    shares: defaultdict[int, float] = defaultdict(lambda: 1.0)
    for _, disturbance in _disturbances(scenario):
        if isinstance(disturbance, LinkPersistent) and disturbance.is_whole_run and disturbance.share < 1:
            for place in disturbance.places(scenario.cluster.nodes):
                for resource in _resources(disturbance.link, place, resources):
                    shares[resource] *= disturbance.share
    found = link_traffic(scenario, resources, scenario.seed)
    causes = found.causes if found else {}
    return price(plan, scenario.cluster, scenario.workload, disturbed=causes, shares=dict(shares))


def link_traffic(scenario: Scenario, resources: Resources, seed: int, *, with_constant: bool = False) -> Traffic | None:
    """Return the changes of a scenario's links in the run of a seed; None if there are none.

    Args:
        scenario: The scenario.
        resources: Resources of the plan, such as `costs.resources`.
        seed: Seed of the run.
        with_constant: Include shares that are constant over the run, which prices already contain.
    """
    read = cache(LinkRecorded.table)
    shares = [
        LinkShares(
            tuple(_resources(disturbance.link, place, resources)),
            partial(link_shares, disturbance, seed=seed, index=index, place=place, read=read),
            f"disturbances[{index}] ({disturbance.kind})",
        )
        for index, disturbance in _disturbances(scenario)
        if with_constant or not (isinstance(disturbance, LinkPersistent) and disturbance.is_whole_run)
        for place in disturbance.places(scenario.cluster.nodes)
    ]
    background = [
        Background(stage, partial(_flights, flows, seed, index), f"background[{index}] ({flows.kind})")
        for index, flows in enumerate(scenario.background)
        if len((stage := _stage(flows, scenario, resources)).resources)
        for _ in range(flows.flows)
    ]
    return Traffic(tuple(shares), tuple(background)) if shares or background else None


def _disturbances(scenario: Scenario) -> Iterator[tuple[int, LinkDisturbance]]:
    return ((i, each) for i, each in enumerate(scenario.disturbances) if isinstance(each, LinkDisturbance))


def _flights(flows: TrafficPattern, seed: int, index: int) -> Iterator[Flight]:
    return (Flight(*flight) for flight in flights(flows, seed=seed, index=index))


def _resources(link: LinkKind, node: int, resources: Resources) -> list[int]:
    """Return the resources of a link of a node, or of the cluster."""
    number = np.array([node])
    ranks = node * resources.ranks_per_node + np.arange(resources.ranks_per_node)
    named: dict[str, NDArray[np.int64]] = {
        "switch": np.array([resources.switch]),
        "storage": np.unique(resources.storage_server(np.arange(resources.n_nodes))),
        "nic_out": resources.nic_out(number),
        "nic_in": resources.nic_in(number),
        "fabric_out": resources.fabric_out(ranks),
        "fabric_in": resources.fabric_in(ranks),
    }
    return [resource for name, each in named.items() if name.startswith(link) for resource in each.tolist()]


def _stage(flows: TrafficPattern, scenario: Scenario, resources: Resources) -> Stage:
    """Return one byte for each link that a flow passes, without unlimited links."""
    cluster = scenario.cluster
    ends: tuple[tuple[LinkKind, Endpoint], ...] = (("nic_out", flows.source), ("nic_in", flows.to))
    nodes = [(link, end) for link, end in ends if end != "storage"]
    used: list[int] = []
    if cluster.network.table is not None or math.isfinite(cluster.network.bandwidth_Bps):
        used += [resource for link, node in nodes for resource in _resources(link, node, resources)]
        used += [resources.switch] if _is_switched(scenario) else []
        used += _uplinks(nodes, resources)
    if cluster.storage and len(nodes) == 1:
        node = np.array([nodes[0][1]])
        client = int(resources.storage_client(node)[0])
        server = int(resources.storage_server(node)[0])
        used += [server] if math.isfinite(cluster.storage.bandwidth_Bps) else []
        used += [client] if math.isfinite(cluster.storage.client_bandwidth_Bps) else []
    return Stage(0.0, np.array(used, dtype=np.int64), np.ones(len(used)))


def _uplinks(ends: Sequence[tuple[LinkKind, int]], resources: Resources) -> list[int]:
    """Return the uplinks between two nodes, if these are below different leaf switches."""
    if len(ends) < 2:
        return []
    first, last = (resources.leaf(np.array([node * resources.ranks_per_node])) for _, node in ends)
    return [] if first == last else [int(resources.leaf_up(first)[0]), int(resources.leaf_down(last)[0])]


def _is_switched(scenario: Scenario) -> bool:
    disturbed = (disturbance.link == "switch" for _, disturbance in _disturbances(scenario))
    return scenario.cluster.topology.oversubscription > 1 or any(disturbed)
