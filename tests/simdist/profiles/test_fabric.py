"""The links inside nodes of a job whose collectives all ran between nodes: by the kind of GPU, or as stated."""

import math
from dataclasses import replace

import pytest
from commandline import call
from kineto_traces import Truth, write_job
from profiled_jobs import profiles_of, without_input

from simdist import scenario as scenarios
from simdist.errors import ScenarioError
from simdist.plan.group import Group
from simdist.profiles import ImportOptions, import_job
from simdist.profiles.estimates.links import Fabric, fabric_of_gpus, fitted_line, predicted_s
from simdist.scenario import Link, presets

TRUTH = without_input(n_ranks=8, n_steps=4, gpus_per_node=4)
FAST = Fabric(Link(latency_s=3e-6, bandwidth_Bps=240e9), "known")
A100 = "NVIDIA A100-SXM4-80GB"


def named(*names: str):
    """Return profiles of ranks with these GPUs."""
    profiles = profiles_of(TRUTH, "cuda")
    return [replace(each, device_name=names[rank % len(names)]) for rank, each in enumerate(profiles)]


def is_explained(imported) -> bool:
    """Tell whether the scenario's links give the measured times of all buckets back, and the step."""
    cluster = imported.scenario.cluster
    ratios = [predicted_s(cluster, Group(8), bucket.nbytes) / bucket.transfer_s for bucket in TRUTH.buckets]
    return all(math.isclose(ratio, 1, rel_tol=1e-2) for ratio in ratios) and abs(imported.proof.error) < 0.01


def test_the_network_is_fitted_around_the_nvlink_of_known_gpus() -> None:
    imported = import_job(named(A100), name="job")
    cluster = imported.scenario.cluster
    assert cluster.fabric == scenarios.load_cluster(presets.path("clusters", "dgx-a100")).fabric
    assert cluster.network != cluster.fabric
    assert imported.links.measured == ("network",)
    assert is_explained(imported)
    assert any(name.startswith("hsgd") for name in (each.name for each in imported.scenario.schedules))


@pytest.mark.parametrize("link", [FAST.link, Link(latency_s=30e-6, bandwidth_Bps=10e9), Link.ideal()])
def test_the_network_is_fitted_around_a_fabric_that_is_stated(link) -> None:
    imported = import_job(named(A100), name="job", options=ImportOptions(fabric=Fabric(link, "known")))
    assert imported.scenario.cluster.fabric == link
    assert is_explained(imported)


def test_hierarchical_schedules_are_left_out_where_the_fabric_is_unknown() -> None:
    imported = import_job(named("NVIDIA L4"), name="job")
    assert imported.scenario.cluster.fabric == imported.scenario.cluster.network
    assert [each.name for each in imported.scenario.schedules] == ["sync", "local-2", "local-4"]
    assert any(
        "hierarchical schedules, which depend on it, are left out: give --fabric" in each for each in imported.notes
    )


KINDS = {
    ("NVIDIA A100-SXM4-40GB",): "dgx-a100",
    ("NVIDIA H100 80GB HBM3",): "dgx-h100",
    ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"): "v100x8-25gbit",
    ("NVIDIA A100 80GB PCIe",): None,
    ("NVIDIA H100 NVL",): None,
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb",): None,
    (A100, "NVIDIA H100 80GB HBM3"): None,
    (A100, "NVIDIA L4"): None,
    ("",): None,
}


@pytest.mark.parametrize("names", KINDS)
def test_only_gpus_that_always_have_nvlink_tell_the_fabric(names) -> None:
    fabric = fabric_of_gpus(named(*names))
    assert (fabric.link if fabric else None) == (
        scenarios.load_cluster(presets.path("clusters", KINDS[names])).fabric if KINDS[names] else None
    )


def test_a_fabric_is_refused_where_it_says_nothing() -> None:
    one_node = profiles_of(replace(TRUTH, gpus_per_node=8), "cuda")
    with pytest.raises(ScenarioError, match=r"--fabric: is for several nodes of several GPUs; the job ran on 1 x 8"):
        import_job(one_node, name="job", options=ImportOptions(fabric=FAST))
    given = scenarios.load_cluster(presets.path("clusters", "dgx-a100"))
    with pytest.raises(ScenarioError, match=r"--fabric: --cluster has the links inside nodes, too"):
        import_job(named(A100), name="job", options=ImportOptions(cluster=given, fabric=FAST))


def test_a_line_is_found_from_its_times() -> None:
    truth = Link(latency_s=2e-4, bandwidth_Bps=3e9)

    def ratios(link: Link) -> list[float]:
        of = [(each.latency_s + nbytes / each.bandwidth_Bps) for each in (truth, link) for nbytes in (1e5, 1e6, 4e6)]
        return [true / tried for true, tried in zip(of[:3], of[3:], strict=True)]

    found = fitted_line(Link(latency_s=1e-5, bandwidth_Bps=1e9), ratios)
    assert (found.latency_s, found.bandwidth_Bps) == pytest.approx((2e-4, 3e9), rel=1e-2)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    write_job(folder, Truth(n_ranks=4, n_steps=4, gpus_per_node=2))
    return folder


def test_the_command_takes_a_link_or_that_of_a_cluster(capsys, traces, tmp_path) -> None:
    for option, link in {
        "3 us, 240 GB/s": FAST.link,
        "v100x8-25gbit": scenarios.load_cluster(presets.path("clusters", "v100x8-25gbit")).fabric,
    }.items():
        answer = call(capsys, "import", traces, "-o", tmp_path / "job.yaml", "--fabric", option, "--force")
        assert answer.code == 0
        assert scenarios.load(tmp_path / "job.yaml").cluster.fabric == link
        assert f"# fabric: not measured: --fabric {option}" in (tmp_path / "job.yaml").read_text(encoding="utf-8")


WRONG = {
    "3 us": "this is no link such as '3 us, 240 GB/s', and there is no such file, nor a preset",
    "3 us, 4 ms": "that is a time, not a bandwidth",
    "3, 4 GB/s": "a time needs a unit",
    "3 us, 0 GB/s": "a link is e.g. '3 us, 240 GB/s'",
    "dgx-a10": "did you mean 'dgx-a100'?",
}


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_fabric_gets_one_error(capsys, traces, tmp_path, option: str) -> None:
    answer = call(capsys, "import", traces, "-o", tmp_path / "job.yaml", "--fabric", option)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: --fabric ")
    assert WRONG[option] in answer.err
