"""Utilization from measured rates: as published, by GPU, by size, and a roofline where nothing was measured."""

import pytest

from simdist.configurations.rates import estimate, measured_rates
from simdist.cost.compute import compute_s
from simdist.scenario import Cluster, Workload, load_cluster, load_workload, presets
from simdist.settings.precision import Utilization

PUBLISHED_MFU = {  # llm-foundry, column MFU; of models without checkpointing
    ("mpt-125m", "A100"): 0.4479,
    ("mpt-7b", "A100"): 0.6423,
    ("mpt-13b", "A100"): 0.5957,
    ("mpt-760m", "H100"): 0.3490,
    ("mpt-1b", "H100"): 0.4182,
    ("mpt-7b", "H100"): 0.4644,
    ("mpt-13b", "H100"): 0.3979,
}
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


def cluster(name: str) -> Cluster:
    return load_cluster(presets.path("clusters", name))


def workload(name: str) -> Workload:
    return load_workload(presets.path("workloads", name))


@pytest.mark.parametrize(("model", "device"), PUBLISHED_MFU)
def test_utilization_is_the_published_one(model, device):
    [rate] = [each for each in measured_rates() if (each.model, each.device) == (model, device)]
    assert rate.utilization(PEAKS[device]) == pytest.approx(PUBLISHED_MFU[model, device], rel=0.012)


@pytest.mark.parametrize("rate", measured_rates(), ids=lambda each: each.described())
def test_the_workload_of_a_rate_computes_as_many_tokens_per_second(rate):
    preset = {"A100": "dgx-a100", "H100": "dgx-h100", "H200": "dgx-h200"}[rate.device]
    share = Utilization(bf16=rate.utilization(PEAKS[rate.device]))
    its = rate.workload().model_copy(update={"utilization": share})
    seconds = compute_s(its, cluster(preset))[0]
    assert rate.batch_size * rate.sequence / seconds == pytest.approx(rate.tokens_per_s, rel=1e-9)


def test_the_nearest_model_on_the_same_gpu_is_taken():
    on_a100 = estimate(workload("llama3-405b"), cluster("dgx-a100").device, "bf16", is_compiled=False)
    assert on_a100 is not None
    assert on_a100.source == "measured: mpt-70b on 32 A100, 373 tokens/s (llm-foundry)"
    assert (on_a100.low, on_a100.high) == (pytest.approx(0.443, abs=1e-3), pytest.approx(0.735, abs=1e-3))


def test_compiled_models_have_their_own_rates():
    device = cluster("dgx-h100").device
    compiled = estimate(workload("llama2-7b"), device, "bf16", is_compiled=True)
    eager = estimate(workload("llama2-7b"), device, "bf16", is_compiled=False)
    assert compiled is not None
    assert eager is not None
    assert compiled.share / eager.share == pytest.approx(9600 / 7500)
    assert (compiled.low, compiled.high) == (compiled.share, compiled.share)  # it was measured


def test_another_checkpointing_than_measured_is_uncertain():
    other = workload("llama2-7b").model_copy(update={"recompute": 1.0})
    found = estimate(other, cluster("dgx-h100").device, "bf16", is_compiled=False)
    assert found is not None
    assert found.low < found.share < found.high


def test_an_only_rate_is_as_uncertain_as_a_roofline():
    found = estimate(workload("llama3-70b"), cluster("dgx-h200").device, "bf16", is_compiled=False)
    assert found is not None
    assert found.source.endswith("(KempnerForge); all that were measured are compiled")
    assert (found.low, found.high) == (0.53, 0.74)
    assert found.range_source == "1 rate on H200, and the error of rooflines (NeuSight)"


@pytest.mark.parametrize(
    ("name", "precision", "ends"),
    [("dgx-b200", "bf16", (0.53, 0.74)), ("dgx-a100", "fp16", (0.59, 0.88)), ("mi300x", "bf16", (0.53, 0.88))],
)
def test_without_a_rate_a_roofline_has_its_error(name, precision, ends):
    found = estimate(workload("llama3-8b"), cluster(name).device, precision, is_compiled=False)
    assert found is not None
    assert (found.low, found.high) == ends
    assert found.share == pytest.approx(sum(ends) / 2)
    assert found.source.startswith("roofline: ")


def test_a_device_without_a_peak_has_no_estimate():
    assert estimate(workload("llama3-8b"), cluster("v100x8-25gbit").device, "bf16", is_compiled=False) is None


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "A100 SXM4 80 GB", "NVIDIA A100 80GB PCIe"])
def test_a_gpu_is_known_by_the_name_that_its_driver_prints(name):
    device = cluster("dgx-a100").device
    found = estimate(workload("mpt-7b"), device.model_copy(update={"name": name}), "bf16", is_compiled=False)
    assert found == estimate(workload("mpt-7b"), device, "bf16", is_compiled=False)
    assert found is not None
    assert found.n_ranks == 8
