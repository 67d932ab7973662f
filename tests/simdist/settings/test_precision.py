"""Compute times that follow from FLOPs know the precision: the peak of its arithmetic, and the share reached."""

import pytest

from simdist.cost import compute_s
from simdist.errors import ScenarioError
from simdist.scenario import Cluster, Device, Link, Scenario, Tensor, Workload, dump, loads
from simdist.scenario.warnings import warnings_of

END = "steps: 1\nschedules: [{kind: sync}]\n"


def preset(*, cluster: str = "{preset: ideal, nodes: 1, gpus_per_node: 1}", workload: str) -> Scenario:
    return loads(f"cluster: {cluster}\nworkload: {workload}\n{END}", name="x.yaml")


def small(*, device: str = "peak: 10 TFLOP/s", workload: str = "utilization: 50%") -> str:
    """Return a scenario of 1e12 FLOPs per step; the workload is on line 2."""
    cluster = f"{{nodes: 1, gpus_per_node: 1, fabric: ideal, network: ideal, device: {{{device}}}}}"
    return (
        f"cluster: {cluster}\n"
        f"workload: {{tensors: [{{name: w, count: 10, flops: 1e11}}], batch_size: 10, {workload}}}\n{END}"
    )


def message_of(text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        loads(text, name="x.yaml")
    return str(caught.value)


def step_s(scenario: Scenario) -> float:
    """Return forward plus backward seconds of rank 0."""
    return float(compute_s(scenario.workload, scenario.cluster)[0])


@pytest.mark.parametrize(
    ("cluster", "workload", "published"),
    [
        # NVIDIA/DeepLearningExamples, ConvNets/resnet50v1.5: images/s of one GPU
        ("v100x8-25gbit", "{preset: resnet50}", 367),
        ("v100x8-25gbit", "{preset: resnet50, precision: fp16, utilization: {fp16: 0.236}}", 1200),
        ("dgx-a100", "{preset: resnet50, precision: tf32}", 938),
        ("dgx-a100", "{preset: resnet50, precision: fp16}", 2470),
        # the same, BERT, sequences/s
        ("v100x8-25gbit", "{preset: bert-large}", 7.56),
        ("v100x8-25gbit", "{preset: bert-large, precision: fp16}", 24.3),
        # experiments/gpu, step times of an H200 in bf16: 64 sequences in 170.79 ms; of ResNet-50, 64 images in 29.12 ms
        ("dgx-h200", "{preset: bert-large, precision: bf16, batch_size: 64}", 64 / 0.17079),
        ("dgx-h200", "{preset: resnet50, precision: bf16, utilization: {bf16: 0.055}}", 64 / 0.02912),
        ("dgx-h200", "{preset: gpt2-medium, utilization: {bf16: 0.317}}", 64 / 0.50651),
        # A. Karpathy, Let's reproduce GPT-2 (124M): 16 sequences in 1000, 333 and 93 ms
        ("dgx-a100", "{preset: gpt2}", 16.0),
        ("dgx-a100", "{preset: gpt2, precision: tf32}", 48.05),
        ("dgx-a100", "{preset: gpt2, precision: bf16}", 172.0),
        # TensorFlow benchmarks, images/s of a P100, of which no cluster consists
        ("{preset: ideal, device: {peak: 10.6 TFLOP/s}}", "vgg16", 154),
    ],
)
def test_preset_computes_at_the_published_speed(cluster: str, workload: str, published: float) -> None:
    scenario = preset(cluster=cluster, workload=workload)
    assert scenario.workload.batch_size / step_s(scenario) == pytest.approx(published, rel=0.01)


def test_one_share_of_fp16_overrates_neither_gpu() -> None:
    # The V100 reaches 0.236 of its peak and the A100 0.194; the preset states the smaller, so 1200 images/s become 989.
    scenario = preset(cluster="v100x8-25gbit", workload="{preset: resnet50, precision: fp16}")
    assert scenario.workload.batch_size / step_s(scenario) == pytest.approx(989, rel=0.01)


@pytest.mark.parametrize(
    ("device", "workload", "forward_s"),
    [
        ("peak: 10 TFLOP/s", "utilization: 50%", 0.2),
        ("peak: {fp32: 10 TFLOP/s}", "utilization: {fp32: 0.5}", 0.2),
        ("peak: {fp32: 10 TFLOP/s, fp16: 80 TFLOP/s}", "utilization: 50%", 0.2),
        ("peak: {fp32: 10 TFLOP/s, fp16: 80 TFLOP/s}", "utilization: 50%, precision: fp16", 0.025),
        ("peak: {fp16: 80 TFLOP/s}", "utilization: {fp32: 0.5, fp16: 25%}, precision: fp16", 0.05),
        ("peak: 10 TFLOP/s", "utilization: 135%", 1 / 13.5),
        ("peak: 10 TFLOP/s", "utilization: 2", 0.05),
        ("peak: 10 TFLOP/s", "utilization: {bf16: 0.5}, precision: bf16, forward: 7 ms", 0.007),
    ],
)
def test_forward_pass_takes_flops_over_peak_and_share_of_the_precision(
    device: str, workload: str, forward_s: float
) -> None:
    scenario = loads(small(device=device, workload=workload))
    assert step_s(scenario) == pytest.approx(3 * forward_s, rel=1e-12)


def test_dtype_is_what_travels_and_precision_what_is_computed_with() -> None:
    mixed = preset(workload="{preset: resnet50, precision: fp16}").workload
    half = preset(workload="{preset: resnet50, dtype: float16}").workload
    assert (mixed.nbytes, half.nbytes) == (4 * 25_557_032, 2 * 25_557_032)
    assert (mixed.precision, half.precision) == ("fp16", "fp32")


def test_precision_over_a_preset_is_merged_with_what_the_preset_states() -> None:
    scenario = preset(
        cluster="{preset: dgx-a100, device: {peak: {fp16: 100 TFLOP/s}}}",
        workload="{preset: resnet50, utilization: {bf16: 20%}}",
    )
    assert scenario.cluster.device.peak_flops.stated == ("fp32", "tf32", "fp16", "bf16")
    assert scenario.cluster.device.peak_flops.at("fp16") == 1e14
    assert scenario.workload.utilization.stated == ("fp32", "tf32", "fp16", "bf16")
    one = preset(cluster="{preset: dgx-a100, device: {peak: 1 TFLOP/s}}", workload="{preset: resnet50}")
    assert one.cluster.device.peak_flops.stated == ("fp32",)


def test_null_takes_away_what_a_preset_states() -> None:
    scenario = preset(
        cluster="{preset: dgx-a100, device: {peak: null}}",
        workload="{preset: resnet50, utilization: null, forward: 1 ms}",
    )
    assert (scenario.cluster.device.peak_flops.stated, scenario.workload.utilization.stated) == ((), ())
    assert warnings_of(scenario) == ()


@pytest.mark.parametrize(
    ("device", "workload", "message"),
    [
        (
            "peak: {fp32: 1 TFLOP/s, fp16: 8 TFLOP/s}",
            "utilization: 50%, precision: tf32",
            "x.yaml:2: workload.precision: tf32 is not in cluster.device.peak (stated: fp32, fp16): "
            "write e.g. peak: {tf32: 125 TFLOP/s} there, or workload.forward, e.g. 20 ms",
        ),
        (
            "speed: 1",
            "utilization: 50%",
            "x.yaml:2: workload.precision: fp32 is not in cluster.device.peak (stated: none): "
            "write e.g. peak: {fp32: 125 TFLOP/s} there, or workload.forward, e.g. 20 ms",
        ),
        (
            "peak: 1 TFLOP/s",
            "utilization: {fp16: 50%, tf32: 50%}",
            "x.yaml:2: workload.precision: fp32 is not in workload.utilization (stated: tf32, fp16): "
            "write e.g. utilization: {fp32: 40%}, or forward: 20 ms",
        ),
        (
            "peak: 1 TFLOP/s",
            "utilization: {}",
            "x.yaml:2: workload.forward: how long does the forward pass take? "
            "write its seconds, e.g. forward: 20 ms, or utilization: 40% to derive them from FLOPs",
        ),
        (
            "peak: 1 TFLOP/s",
            "utilization: 50%, precision: fp8",
            "x.yaml:2: workload.precision: 'fp8': write 'fp32', 'tf32', 'fp16' or 'bf16'",
        ),
        (
            "peak: 1 TFLOP/s",
            "utilization: 201%",
            "x.yaml:2: workload.utilization: '201%' is no share of the peak: "
            "write a number above 0 and up to 2, e.g. 40% or 0.4",
        ),
        (
            "peak: 1 TFLOP/s",
            "utilization: {fp16: 0}",
            "x.yaml:2: workload.utilization.fp16: 0 is no share of the peak: "
            "write a number above 0 and up to 2, e.g. 40% or 0.4",
        ),
        (
            "peak: 1 TFLOP/s",
            "utilization: {half: 0.5}",
            "x.yaml:2: workload.utilization.half: unknown key 'half': known: fp32, tf32, fp16, bf16",
        ),
        (
            "peak: {bf16: 5}",
            "utilization: 50%",
            "x.yaml:1: cluster.device.peak.bf16: 5: a computing speed needs a unit: write e.g. 125 TFLOP/s",
        ),
        (
            "peak: {bf16: 0 TFLOP/s}",
            "utilization: 50%",
            "x.yaml:1: cluster.device.peak.bf16: 0 would never finish: write a value above 0, or leave the key out",
        ),
        (
            "peak: 5 GB",
            "forward: 1 ms",
            "x.yaml:1: cluster.device.peak: '5 GB': that is a size, not a computing speed: ",
        ),
        ("peak: [1]", "forward: 1 ms", "x.yaml:1: cluster.device.peak: [1]: not a mapping: "),
        ("peak: 1 TFLOP/s", "utilization: .nan", "x.yaml:2: workload.utilization: '.nan' is no share of the peak: "),
        ("peak: 1 TFLOP/s", "utilization: true", "x.yaml:2: workload.utilization: true is no share of the peak: "),
    ],
)
def test_what_a_precision_lacks_is_one_error_that_names_its_place(device: str, workload: str, message: str) -> None:
    found = message_of(small(device=device, workload=workload))
    assert found.startswith(message)
    assert "\n" not in found


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_precision_that_is_not_stated_does_not_matter_where_times_are(precision: str) -> None:
    scenario = loads(small(device="speed: 1", workload=f"forward: 1 ms, precision: {precision}"))
    idle = ["workload.precision has no effect: workload.forward states the time"]
    assert warnings_of(scenario) == tuple(idle if precision != "fp32" else [])


def test_cost_refuses_a_precision_without_peak_and_names_those_that_have_one() -> None:
    workload = Workload(
        tensors=(Tensor(name="w", count=1, flops=1.0),), batch_size=1, utilization=0.5, precision="bf16"
    )
    device = Device(peak_flops={"fp32": 1e13, "fp16": 8e13})
    cluster = Cluster(nodes=1, gpus_per_node=1, fabric=Link.ideal(), network=Link.ideal(), device=device)
    with pytest.raises(
        ScenarioError, match=r"bf16 both in workload\.utilization .* in cluster\.device\.peak \(stated: fp32, fp16\)"
    ):
        compute_s(workload, cluster)


@pytest.mark.parametrize(
    ("device", "workload", "shortest"),
    [
        ("peak: 10 TFLOP/s", "utilization: 50%", ["peak: 10 TFLOP/s", "utilization: 0.5"]),
        ("peak: {fp32: 1 TFLOP/s}", "utilization: {fp32: 50%}", ["peak: 1 TFLOP/s", "utilization: {fp32: 0.5}"]),
        (
            "peak: {fp16: 8 TFLOP/s}",
            "utilization: {fp16: 150%, fp32: 1}, precision: fp16",
            ["peak: {fp16: 8 TFLOP/s}", "utilization: {fp32: 1.0, fp16: 1.5}", "precision: fp16"],
        ),
        (
            "peak: {fp32: 1 TFLOP/s, tf32: 1 TFLOP/s}",
            "utilization: {fp32: 0.2, tf32: 0.2, fp16: 0.2, bf16: 0.2}",
            ["peak: {fp32: 1 TFLOP/s, tf32: 1 TFLOP/s}", "utilization: 0.2"],
        ),
        ("speed: 1", "forward: 1 ms", ["device: {speed: 1.0}\n"]),
    ],
)
def test_dump_writes_the_shortest_form_that_loads_to_an_equal_scenario(
    device: str, workload: str, shortest: list[str]
) -> None:
    scenario = loads(small(device=device, workload=workload))
    text = dump(scenario)
    assert loads(text) == scenario
    assert warnings_of(loads(text)) == warnings_of(scenario) == ()
    assert [part for part in shortest if part not in text] == []
