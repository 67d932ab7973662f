"""Two one-line formulas, linear scaling and a plain ring, for comparison with the simulator."""

import math

from simdist.cost.compute import ComputeCost, compute_s
from simdist.cost.topology import LinkCost
from simdist.scenario.cluster import Cluster
from simdist.scenario.workload import Workload


def linear_s(workload: Workload, cluster: Cluster) -> float:
    """Return the seconds of a step without any communication: linear scaling of the slowest GPU."""
    return float(compute_s(workload, cluster).max()) + (workload.optimize_s or 0.0)


def plain_ring_s(workload: Workload, cluster: Cluster) -> float:
    """Return the seconds of a step of synchronous SGD: compute + max(0, 2 (n - 1) / n * S / B - backward).

    One ring of all n ranks carries S bytes of gradients, at B bytes per second of the slowest link on its way: of the
    fabric or, between its domains, of all NICs of a domain. A mesh counts as all links of a GPU. The ring overlaps with
    the last backward pass.
    """
    n = cluster.world_size
    speed = float(cluster.device_speed().min())
    links_Bps = []
    if n > cluster.n_domains:
        n_links = cluster.gpus_per_node - 1 if cluster.topology.mesh else 1
        links_Bps.append(LinkCost.of(cluster.fabric, n_parallel=n_links).capacity_Bps)
    if cluster.n_domains > 1:
        n_nics = cluster.topology.nics_per_node * cluster.topology.nodes_per_domain
        links_Bps.append(LinkCost.of(cluster.network, n_parallel=n_nics).capacity_Bps)
    ring_s = 2 * (n - 1) / n * workload.nbytes / min(links_Bps, default=math.inf)
    return linear_s(workload, cluster) + max(0.0, ring_s - ComputeCost(workload, cluster).backward_s / speed)
