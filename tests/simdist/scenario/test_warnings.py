"""Remarks on values whose unit is probably wrong."""

import pytest

from simdist import compare
from simdist.scenario import Scenario, load, presets
from simdist.scenario.warnings import doubtful_units, unstated

RESNET = {"preset": "resnet50", "forward": "30 ms", "backward": "60 ms"}
MEASURED = {"preset": "resnet50", "step_times": [{"batch_size": 32, "time": "90 s"}]}
V100 = {"preset": "v100x8-25gbit", "nodes": 2}


def job(*, network: dict[str, object], fabric: object = "ideal", **changes: object) -> Scenario:
    cluster = {"nodes": 2, "gpus_per_node": 2, "fabric": fabric, "network": network}
    written = {"cluster": cluster, "workload": RESNET, "steps": 2, "schedules": ["sync"], **changes}
    return load(written)


def tcp(bandwidth: str) -> dict[str, object]:
    return {"latency": "25 us", "bandwidth": bandwidth}


def rdma(bandwidth: str) -> dict[str, object]:
    return {"latency": "3 us", "bandwidth": bandwidth}


@pytest.mark.parametrize(
    ("scenario", "remark"),
    [
        (job(network=tcp("25 GB/s")), "200 Gbit/s per network card, and cards of tcp have 100 at most: write 25 "),
        (job(network=tcp("100 GB/s")), "800 Gbit/s per network card, and cards of tcp have 100 at most"),
        (job(network=tcp("10 GB/s")), "80 Gbit/s per network card, and no card has that rate: is 10 Gbit/s meant?"),
        (job(network=rdma("400 GB/s")), "3200 Gbit/s per network card, and cards of rdma have 800 at most"),
        (job(network=rdma("12.5 GB/s"), cluster=V100 | {"network": rdma("50 GB/s")}), "more than twice the 11.2 GB/s"),
        (job(network=rdma("6.25 Gbit/s")), "no card has that rate: is 6.25 GB/s meant?"),
        (job(network=tcp("25 Gbit/s"), fabric=rdma("12 Gbit/s")), "1.5 GB/s, slower than a quarter of PCIe"),
        (job(network=tcp("25 Gbit/s"), fabric=rdma("8 TB/s")), "8 TB/s, faster than NVLink"),
        (job(network=tcp("25 Gbit/s"), workload=RESNET | {"forward": "30 s"}), "workload.forward of 30 s does not fit"),
        (job(network=tcp("25 Gbit/s"), workload=RESNET | {"backward": "60 us"}), "workload.backward of 60 us does not"),
        (job(network={}, cluster=V100, workload=RESNET | {"forward": "5 s"}), "workload.forward of 5 s does not fit"),
        (job(network={}, cluster=V100, workload=MEASURED), "workload.step_times[0] of 90 s does not fit"),
    ],
)
def test_value_of_a_probably_wrong_unit_is_remarked_on(scenario: Scenario, remark: str) -> None:
    (found,) = doubtful_units(scenario)
    assert remark in found
    assert found in [each.text for each in compare(scenario, n_seeds=1).remarks]


@pytest.mark.parametrize("rate", ["1 Gbit/s", "400 Mbit/s", "12.5 GB/s", "25 Gbit/s", "100 Gbit/s", "32 Gbit/s"])
def test_usual_rates_of_cards_are_not_remarked_on(rate: str) -> None:
    assert not list(doubtful_units(job(network=tcp(rate), fabric=rdma("100 GB/s"))))


@pytest.mark.parametrize("name", presets.names("clusters"))
def test_no_cluster_that_ships_is_remarked_on(name: str) -> None:
    assert not list(doubtful_units(job(network={}, cluster=name, workload="resnet50")))


def test_seconds_that_tensors_without_flops_take_are_not_remarked_on() -> None:
    tensors = {"tensors": [{"name": "w", "count": 1_000_000}], "batch_size": 1, "forward": "30 s"}
    assert not list(doubtful_units(job(network=tcp("25 Gbit/s"), workload=tensors)))


@pytest.mark.parametrize(
    ("network", "reached"),
    [
        (tcp("1 Gbit/s"), "72% to 94% of 1 Gbit/s over tcp"),
        (tcp("10 Gbit/s"), "72% to 94% of 10 Gbit/s over tcp"),
        (tcp("25 Gbit/s"), "45% to 70% of 25 Gbit/s over tcp"),
        (tcp("100 Gbit/s"), "32% to 48% of 100 Gbit/s over tcp"),
        (rdma("100 Gbit/s"), "48% to 98% of 100 Gbit/s over rdma"),
    ],
)
def test_an_efficiency_that_nobody_states_is_that_of_transport_and_line_rate(network, reached) -> None:
    (found,) = unstated(job(network=network).cluster, ())
    assert f"is not stated, and so 1; {reached}" in found


def test_efficiency_of_a_preset_is_remarked_on_at_another_line_rate() -> None:
    def remarks(**network: object) -> list[str]:
        return list(doubtful_units(job(network={}, cluster=V100 | {"network": network})))

    (found,) = remarks(bandwidth="10 Gbit/s")
    assert found.startswith("cluster.network.efficiency of 54% is that of another line rate; 72% to 94% of 10 Gbit/s")
    assert not remarks(bandwidth="10 Gbit/s", efficiency="60%")  # who states it has measured it
    assert not remarks(bandwidth="32 Gbit/s")
