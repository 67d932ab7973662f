"""A transformer by its sizes has the tensors and FLOPs of the published models."""

import math

import pytest

from simdist.errors import ScenarioError
from simdist.scenario import Workload, dump, loads

SCENARIO = """\
cluster: dgx-h100
workload: {{transformer: {sizes}, batch_size: 8, precision: bf16, utilization: 40%}}
steps: 10
schedules: [{{kind: sync}}]
"""
SMALL = "{layers: 12, hidden: 768, heads: 12, vocabulary: 50257, sequence: 1024}"


def workload(sizes: str) -> Workload:
    return loads(SCENARIO.format(sizes=sizes)).workload


@pytest.mark.parametrize(
    ("layers", "hidden", "n_elements"),
    [(12, 768, 124_439_808), (24, 1024, 354_823_168), (36, 1280, 774_030_080), (48, 1600, 1_557_611_200)],
    ids=["GPT-2", "medium", "large", "XL"],
)
def test_elements_are_those_of_gpt2(layers, hidden, n_elements):
    sizes = f"{{layers: {layers}, hidden: {hidden}, heads: {hidden // 64}, vocabulary: 50257, sequence: 1024}}"
    assert sum(workload(sizes).tensor_counts) == n_elements


def test_flops_are_those_of_narayanan_and_others():
    """They count 96 s L h^2 (1 + s / 6h + V / 16 L h): layers run four times, logits three times."""
    n_layers, hidden, n_tokens, sequence = 24, 2304, 51200, 2048
    found = workload(
        f"{{layers: {n_layers}, hidden: {hidden}, heads: 24, vocabulary: {n_tokens}, sequence: {sequence}}}"
    )
    factor = 1 + sequence / (6 * hidden) + n_tokens / (16 * n_layers * hidden)
    logits_flops = 2 * sequence * hidden * n_tokens
    all_passes = 4 * (found.flops - logits_flops) + 3 * logits_flops
    assert all_passes == pytest.approx(96 * sequence * n_layers * hidden**2 * factor, rel=1e-12)


def test_matrices_have_rows_and_layers_come_in_their_order():
    tensors = workload("{layers: 2, hidden: 4, heads: 2, vocabulary: 10, sequence: 8}").tensors
    assert [tensor.name for tensor in tensors if tensor.rows] == [
        "embedding",
        "positions",
        *(
            f"layer{number}.{part}.weight"
            for number in range(2)
            for part in ("attention.in", "attention.out", "mlp.in", "mlp.out")
        ),
    ]
    assert [(tensor.count, tensor.rows) for tensor in tensors[:2]] == [(40, 10), (32, 8)]
    assert math.fsum(tensor.flops for tensor in tensors[-2:]) == 2 * 8 * 4 * 10


def test_a_scenario_with_sizes_is_written_with_tensors():
    scenario = loads(SCENARIO.format(sizes=SMALL))
    assert loads(dump(scenario)).workload == scenario.workload


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ("{layers: 12}", "workload.transformer.hidden: "),
        (SMALL.replace("heads: 12", "heads: 7"), "workload.transformer.heads: 7 do not divide the 768 of hidden"),
        (SMALL.replace("layers: 12", "layers: 1e9"), "workload.transformer.layers: "),
        (SMALL.replace("hidden", "hiden"), "workload.transformer.hiden: unknown key 'hiden'"),
        ("12", "workload.transformer: "),
        (f"{SMALL}, tensors: [{{name: a, count: 1}}]", "'transformer' beside 'tensors': write one of them"),
        (f"{SMALL}, tensors_file: a.csv", "'tensors_file' beside 'transformer': write one of them"),
    ],
    ids=["lacks", "heads", "too many", "misspelt", "number", "tensors", "file"],
)
def test_what_is_wrong_with_sizes_is_told_with_the_place(sizes, problem):
    with pytest.raises(ScenarioError) as error:
        workload(sizes)
    assert problem in str(error.value)


def test_sizes_replace_the_tensors_of_a_preset():
    text = SCENARIO.replace("{{transformer", "{{preset: resnet50, transformer").format(sizes=SMALL)
    assert sum(loads(text).workload.tensor_counts) == 124_439_808
