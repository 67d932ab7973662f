"""The two formulas beside which pages show simulated numbers."""

import pytest
from flat_clusters import grouped

from simdist.cost.plain import linear_s, plain_ring_s
from simdist.scenario import Cluster, Link, Tensor, Workload


def workload(**more: float) -> Workload:
    return Workload(tensors=[Tensor(name="all", count=25_000_000)], batch_size=1, forward_s=0.01, **more)


def cluster(nodes: int, **more: object) -> Cluster:
    fabric, network = Link(latency_s=1.0, bandwidth_Bps=100e9), Link(latency_s=1.0, bandwidth_Bps=1e9, efficiency=0.5)
    return Cluster(nodes=nodes, gpus_per_node=4, fabric=fabric, network=network, **grouped(more))


def test_linear_scaling_is_the_step_of_one_gpu_whatever_the_cluster():
    assert linear_s(workload(backward_s=0.02, optimize_s=0.001), cluster(1)) == pytest.approx(0.031)
    assert linear_s(workload(backward_s=0.02), cluster(8, device={"speed": 0.5})) == pytest.approx(0.06)


def test_plain_ring_passes_the_nic_once_and_hides_behind_the_backward_pass():
    ring_s = 2 * 7 / 8 * 100e6 / 0.5e9
    assert plain_ring_s(workload(backward_s=0.02), cluster(2)) == pytest.approx(0.03 + ring_s - 0.02)
    assert plain_ring_s(workload(backward_s=0.02), cluster(2, nics_per_node=2)) == pytest.approx(
        0.03 + ring_s / 2 - 0.02
    )


def test_plain_ring_of_one_machine_or_one_gpu_hides_all():
    assert plain_ring_s(workload(backward_s=0.02), cluster(1)) == pytest.approx(0.03)
    alone = cluster(1).model_copy(update={"gpus_per_node": 1})
    assert plain_ring_s(workload(backward_s=0.0), alone) == pytest.approx(0.01)


def test_plain_ring_leaves_the_fabric_only_between_domains():
    ring_s = 2 * 15 / 16 * 100e6 / 100e9
    one = cluster(4, nodes_per_domain=4, nics_per_node=2)
    assert plain_ring_s(workload(backward_s=0.0), one) == pytest.approx(0.01 + ring_s)
    two = cluster(4, nodes_per_domain=2, nics_per_node=2)  # 4 NICs carry what leaves a domain
    assert plain_ring_s(workload(backward_s=0.0), two) == pytest.approx(0.01 + ring_s * 100 / (4 * 0.5))
    alone = cluster(4, nodes_per_domain=4).model_copy(update={"gpus_per_node": 1})
    assert plain_ring_s(workload(backward_s=0.0), alone) == pytest.approx(0.01 + 2 * 3 / 4 * 100e6 / 100e9)


def test_plain_ring_of_a_mesh_has_all_links_of_a_gpu():
    ring_s = 2 * 3 / 4 * 100e6 / 300e9
    assert plain_ring_s(workload(backward_s=0.0), cluster(1, mesh=True)) == pytest.approx(0.01 + ring_s)


def test_plain_ring_takes_the_average_rate_of_a_table():
    table = Link(table=[(0, 0.0), (10**9, 1.0)])
    two = cluster(1).model_copy(update={"fabric": table, "gpus_per_node": 2})
    assert plain_ring_s(workload(backward_s=0.0), two) == pytest.approx(0.01 + 0.1)
