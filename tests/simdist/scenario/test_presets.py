"""The presets that ship with the package: they load, they say where each number is from, and their totals are right."""

import csv
import functools
import math
import re

import pytest
from pydantic import ValidationError

from simdist import scenario
from simdist.configurations.rates import Rate, estimate, rounded
from simdist.errors import ScenarioError
from simdist.failure_logs.intervals import event_bounds
from simdist.runs.measured_rates import utilization_of_rate
from simdist.scenario import presets
from simdist.settings.units import parse_rate
from simdist.studies.uncertainty import quantities_of_failures

PUBLISHED_PARAMETERS = {
    "bert-large": 335_141_888,  # checkpoint bert-large-uncased
    "gpt2": 124_439_808,  # checkpoint gpt2
    "gpt2-medium": 354_823_168,  # checkpoint gpt2-medium
    "gpt2-large": 774_030_080,  # checkpoint gpt2-large
    "gpt2-xl": 1_557_611_200,  # checkpoint gpt2-xl
    "mpt-125m": 125_311_488,  # mpt: column NumParams of mosaicml/llm-foundry, scripts/train/benchmarking/README.md
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
    "llama2-7b": 6_738_415_616,  # llama, mistral and qwen: parameters of the checkpoints of Hugging Face
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "inception-v3": 27_161_264,  # this and the rest: weights metadata of torchvision 0.28
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}
PUBLISHED_MULTIPLY_ADDS = {  # forward, one image; weights metadata of torchvision 0.28
    "inception-v3": 5.713e9,
    "resnet101": 7.801e9,
    "resnet152": 11.514e9,
    "resnet18": 1.814e9,
    "resnet50": 4.089e9,
    "vgg16": 15.47e9,
    "vgg19": 19.632e9,
}
OWN_PARAMETERS = {  # models of our own, for machines without GPUs; from their shapes
    "gpt-nano": (256 + 128) * 48 + 3 * (12 * 48**2 + 13 * 48) + 2 * 48,
    "mlp": 785 * 256 + 257 * 256 + 257 * 10,
}
PARAMETERS = PUBLISHED_PARAMETERS | OWN_PARAMETERS
BY_SIZES = [name for name in PARAMETERS if name.partition("-")[0] in ("llama2", "llama3", "mistral", "mpt", "qwen2")]
BY_SIZES += ["gpt2-large", "gpt2-xl"]
BY_TENSORS = sorted({*PARAMETERS} - {*BY_SIZES})
CLUSTERS = [
    *("aws-p4d", "aws-p5", "aws-p5e", "aws-p5en", "aws-p6-b200", "azure-nd-a100", "azure-nd-h100", "cray-ex-a100"),
    *(
        "dgx-a100",
        "dgx-b200",
        "dgx-h100",
        "dgx-h200",
        "gb200-nvl72",
        "gcp-a3-mega",
        "gcp-a3-ultra",
        "gcp-a4",
        "gcp-t4x4-32gbit",
    ),
    *("hgx-b300", "ideal", "mi250x", "mi300x", "v100x8-25gbit"),
]


def load(cluster: str = "dgx-a100", workload: str = "resnet18") -> scenario.Scenario:
    return scenario.loads(
        f"name: presets\ncluster: {cluster}\nworkload: {workload}\nschedules:\n  - kind: sync\nsteps: 1\nseed: 0\n"
    )


def test_the_documented_presets_ship() -> None:
    assert sorted(presets.names("clusters")) == CLUSTERS
    assert sorted(presets.names("workloads")) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_workload_has_as_many_parameters_as_expected(name: str) -> None:
    workload = load(workload=name).workload
    assert sum(workload.tensor_counts) == PARAMETERS[name]
    assert workload.nbytes == 4 * PARAMETERS[name]
    assert workload.source


@pytest.mark.parametrize("name", PUBLISHED_MULTIPLY_ADDS)
def test_workload_has_the_published_flops(name: str) -> None:
    assert load(workload=name).workload.flops == pytest.approx(2 * PUBLISHED_MULTIPLY_ADDS[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "width", "n_layers", "length"),
    [("bert-large", 1024, 24, 512), ("gpt2", 768, 12, 1024), ("gpt2-medium", 1024, 24, 1024), ("gpt-nano", 48, 3, 128)],
)
def test_transformer_flops_follow_the_closed_form(name: str, width: int, n_layers: int, length: int) -> None:
    layer = 2 * length * 12 * width**2 + 2 * 2 * length**2 * width  # weights; scores and their product with the values
    logits = 2 * length * width
    head = {
        "bert-large": 2 * width**2,
        "gpt2": logits * 50257,
        "gpt2-medium": logits * 50257,
        "gpt-nano": logits * 256,
    }[name]  # pooler: of one token
    assert load(workload=name).workload.flops == n_layers * layer + head


@pytest.mark.parametrize("name", BY_TENSORS)
def test_tensor_file_holds_what_the_workload_loads(name: str) -> None:
    with presets.path("workloads", name).with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    tensors = load(workload=name).workload.tensors
    assert [(row["name"], int(row["count"]), float(row["flops"])) for row in rows] == [
        (tensor.name, tensor.count, tensor.flops) for tensor in tensors
    ]


def test_logits_of_a_tied_embedding_do_not_delay_the_other_gradients() -> None:
    first, *_, last = load(workload="gpt2").workload.tensors
    assert (first.name, first.flops) == ("token.weight", 0)  # its gradient is complete at the end of backward, alone
    assert last.flops == 2 * 1024 * 768 * 50257


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_loads_and_says_where_it_is_from(name: str) -> None:
    cluster = load(cluster=name).cluster
    assert cluster.source
    assert cluster.name == name
    assert "fp32" in cluster.device.peak_flops.stated


def test_ideal_cluster_communicates_for_nothing() -> None:
    cluster = load(cluster="ideal").cluster
    assert (cluster.world_size, cluster.gpus_per_node) == (64, 4)
    for link in (cluster.fabric, cluster.network):
        assert (link.latency_s, link.bandwidth_Bps) == (0, math.inf)


@pytest.mark.parametrize(
    ("name", "gpus_per_node", "nics_per_node", "line_rate_Bps"),
    [
        ("gcp-t4x4-32gbit", 4, 1, 4e9),
        ("v100x8-25gbit", 8, 1, 3.125e9),
        ("dgx-a100", 8, 8, 25e9),
        ("dgx-h100", 8, 8, 50e9),
        ("dgx-h200", 8, 8, 50e9),
        ("dgx-b200", 8, 8, 50e9),
        ("aws-p4d", 8, 4, 12.5e9),
        ("aws-p5", 8, 32, 12.5e9),
    ],
)
def test_cluster_states_line_rates_and_keeps_below_them(
    name: str, gpus_per_node: int, nics_per_node: int, line_rate_Bps: float
) -> None:
    cluster = load(cluster=name).cluster
    assert (cluster.gpus_per_node, cluster.topology.nics_per_node) == (gpus_per_node, nics_per_node)
    assert cluster.network.bandwidth_Bps == line_rate_Bps
    for link in (cluster.fabric, cluster.network):
        assert 0 < link.latency_s < 1e-4
        assert 0.5 < link.efficiency < 1


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name != "ideal"])
def test_every_hardware_number_of_a_cluster_has_its_source_on_its_line(name: str) -> None:
    measured = re.compile(r" *(latency|bandwidth|efficiency|overhead|\w+_bandwidth|fp32|tf32|fp16|bf16): ")
    lines = [line for line in presets.path("clusters", name).read_text().splitlines() if measured.match(line)]
    assert len(lines) >= 9
    assert [line for line in lines if "  # " not in line] == []


@functools.cache
def on_dgx_h100(rate: Rate) -> float:
    return utilization_of_rate(rate, load(cluster="dgx-h100").cluster, "bf16")


@pytest.mark.parametrize("name", BY_SIZES)
def test_utilization_of_a_transformer_is_that_of_the_nearest_measured_one(name: str) -> None:
    workload = load(workload=name).workload
    cluster = load(cluster="dgx-h100").cluster
    found = estimate(workload, cluster.device, "bf16", is_compiled=False, share_of=on_dgx_h100)
    assert found is not None
    assert workload.utilization.stated == ("bf16",)
    has_own_rate = "no rate of its own" not in presets.path("workloads", name).read_text()
    assert workload.utilization_ranks == (found.n_ranks if has_own_rate else 1)  # another model's leaves its doubt
    assert rounded(found.share) == rounded(workload.utilization.bf16 or 0.0)
    assert f"{found.source.removeprefix('measured: ')}\n" in presets.path("workloads", name).read_text()


@pytest.mark.parametrize("name", BY_TENSORS)
def test_utilization_of_a_workload_is_derived_in_a_comment(name: str) -> None:
    text = presets.path("workloads", name).read_text()
    rate = r"# ([\d.]+) \w+ ?/ ?([\d.]*) ?s"
    derivation = rf"{rate} x 3 x ([\d.]+) GFLOP = ([\d.]+) TFLOP/s of ([\d.]+) TFLOP/s = ([\d.]+)\n"
    derived = re.findall(derivation + r"(?:  #.*\n)*  (\w+): [\d.]+\n", text)
    workload = load(workload=name).workload
    shares = {precision: float(share) for *_, share, precision in derived}
    assert shares == {precision: workload.utilization.at(precision) for precision in workload.utilization.stated}, (
        "write samples/s x 3 x forward GFLOP = TFLOP/s of peak TFLOP/s = share above each share"
    )
    for samples, seconds, gigaflops, achieved, peak, share, _ in derived:
        assert float(gigaflops) == pytest.approx(workload.flops / 1e9, rel=1e-3)
        computed = float(samples) / float(seconds or 1) * 3 * float(gigaflops) / 1e3
        assert float(achieved) == pytest.approx(computed, rel=3e-3)
        assert float(share) == pytest.approx(computed / float(peak), abs=0.0051)


@pytest.mark.parametrize("name", OWN_PARAMETERS)
def test_workload_without_a_gpu_states_measured_seconds_in_place_of_a_utilization(name: str) -> None:
    workload = load(workload=name).workload
    assert workload.utilization.stated == ()
    assert None not in (workload.forward_s, workload.backward_s, workload.optimize_s)


@pytest.mark.parametrize("name", PARAMETERS)
def test_default_precision_of_a_workload_is_fp32_where_a_source_has_it(name: str) -> None:
    workload = load(workload=name).workload
    measured = workload.utilization.stated
    assert workload.precision == ("fp32" if not measured or "fp32" in measured else measured[0])


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ScenarioError, match="resnet50"):
        load(workload="resnet-50")


def expanded(**keys: object) -> dict[str, object]:
    found = presets.expand("workload", {"preset": "llama3-70b", **keys})
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("model", [{"transformer": {"layers": 32}}, {"tensors": [{"name": "a", "count": 4}]}])
def test_recomputation_of_a_preset_does_not_apply_to_another_model_unseen(model) -> None:
    text = "100% is that of the preset's own model: write recompute, e.g. 0% for no activation checkpointing"
    with pytest.raises(ValidationError, match=text):
        expanded(**model)
    assert expanded(**model, recompute="30%")["recompute"] == "30%"


def test_recomputation_of_a_preset_stays_with_its_model_and_zero_replaces_it() -> None:
    assert expanded(transformer={"layers": 80, "sequence": 4096})["recompute"] == "100%"
    assert expanded(recompute=0)["recompute"] == 0


def test_an_empty_mapping_replaces_that_of_the_preset_and_any_other_is_merged_with_it():
    def cluster(more):
        text = f"cluster: {{preset: gcp-a3-mega, {more}}}\nworkload: resnet18\nsteps: 1\nschedules: [sync]\n"
        return scenario.loads(text).cluster

    whole = cluster("nodes: 2")
    assert whole.collectives.library == "nccl_simple"
    assert cluster("nodes: 2, collectives: {overhead: 1 us}").collectives.library == "nccl_simple"
    emptied = cluster("nodes: 2, collectives: {}")
    assert emptied.collectives == type(whole.collectives)()
    assert emptied.network == whole.network
    assert whole.uncertain
    assert cluster("nodes: 2, uncertain: {}").uncertain == {}
    with pytest.raises(ScenarioError, match="required key 'latency' is missing"):
        cluster("nodes: 2, network: {}")


# ---------------------------------------------------------------- failures

YEAR_S = 8760 * 3600.0


@pytest.mark.parametrize("name", presets.names("failures"))
def test_rates_of_failures_have_sources_and_no_recovery(name: str) -> None:
    failures = scenario.load_failures(presets.path("failures", name))
    assert failures.source
    assert failures.recovery.not_stated == ("detect", "diagnose", "schedule", "start", "connect", "warm_up")
    assert failures.uncertain or "No range is published" in " ".join(failures.source.split())
    lines = [line for line in presets.path("failures", name).read_text().splitlines() if "rate: " in line]
    assert [line for line in lines if "cause: " in line and "  # " not in line] == []


def test_rates_of_llama_3_are_those_of_its_interruptions_with_poisson_intervals() -> None:
    """419 interruptions of 16,384 GPUs in 54 days that were not planned are 17.3 % per GPU and year."""
    failures = scenario.load_failures(presets.path("failures", "llama3-h100"))
    counts = []
    for i, cause in enumerate(failures.causes):
        exposure_s = 54 * 86_400.0 * cause.n_components(2048, 8)
        assert cause.rate_per_s is not None
        counts.append(cause.rate_per_s * exposure_s)
        written = failures.uncertain[f"causes[{i}].rate"]
        ends = [parse_rate(end) * exposure_s for end in (written.from_, written.to)]
        assert ends == pytest.approx(event_bounds(round(counts[-1])), rel=1e-3)
    assert counts == pytest.approx([268, 21, 35, 32, 56, 7, 47], rel=1e-3)
    assert sum(counts[:-1]) / (54 / 365 * 16_384) == pytest.approx(0.173, abs=5e-4)


def with_failures(text: str) -> scenario.Scenario:
    return scenario.loads(
        "cluster: {preset: ideal, nodes: 4}\nworkload: {preset: mlp, batch_size: 1, forward: 1 ms}\nsteps: 1\n"
        f"train_for: 1 day\nschedules: [sync]\nfailures: {text}\n"
    )


def test_keys_override_a_preset_of_failures() -> None:
    found = with_failures("{preset: meta-rsc-a100, on_failure: spare, spares: 2, recovery: {schedule: 5 min}}")
    assert found.failures is not None
    assert found.failures.recovery.schedule_s == 300
    assert found.failures.causes[0].rate_per_s == pytest.approx(0.3 / YEAR_S)
    assert [each.ends for each in quantities_of_failures(found)] == [pytest.approx((0.3 / YEAR_S, 1.08 / YEAR_S))]
    assert with_failures("meta-rsc-a100").failures == scenario.load_failures(presets.path("failures", "meta-rsc-a100"))
    assert scenario.loads(scenario.dump(found)) == found


def test_who_states_other_rates_over_a_preset_has_measured_them() -> None:
    other = "causes: [{cause: any, of: gpu, rate: 5 % per year, effect: node}]"
    assert quantities_of_failures(with_failures(f"{{preset: meta-rsc-a100, {other}}}")) == ()
    found = with_failures("meta-rsc-a100").changed("failures.causes[0].rate", "5 % per year")
    assert quantities_of_failures(found) == ()


def test_an_unknown_preset_of_failures_names_the_nearest() -> None:
    with pytest.raises(ScenarioError, match=r"failures: unknown preset 'llama3': did you mean 'llama3-h100'\?"):
        with_failures("llama3")
