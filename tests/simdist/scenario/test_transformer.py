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
            f"blocks.{number}.{part}.weight"
            for number in range(2)
            for part in ("attention.in", "attention.out", "mlp.in", "mlp.out")
        ),
    ]
    assert [(tensor.count, tensor.rows) for tensor in tensors[:2]] == [(40, 10), (32, 8)]
    assert math.fsum(tensor.flops for tensor in tensors[-2:]) == 2 * 8 * 4 * 10


def test_activations_are_those_of_korthikanti_and_others_without_dropout():
    """They count 34 s h bytes for a layer whose attention is computed again, of which 2 s h are masks of dropout."""
    hidden, heads, sequence, vocabulary = 2304, 24, 2048, 51200
    found = workload(
        f"{{layers: 3, hidden: {hidden}, heads: {heads}, vocabulary: {vocabulary}, sequence: {sequence}}}"
    ).activations
    assert found is not None
    assert set(found.again_nbytes) == {0}
    layers = 3 * sequence * (32 * hidden + 4 * heads)
    loss = sequence * (2 * 2 * hidden + 3 * 4 * vocabulary)  # inputs of the last norm and of the head
    assert sum(found.kept_nbytes) == layers + loss


@pytest.mark.parametrize(("precision", "item_nbytes"), [("bf16", 2), ("tf32", 4)])
def test_recomputed_layers_keep_their_inputs(precision, item_nbytes):
    hidden, kv_width, mlp, heads, sequence, vocabulary = 64, 16, 200, 8, 32, 1000
    sizes = f"layers: 4, hidden: {hidden}, heads: {heads}, kv_heads: 2, intermediate: {mlp}, {LLAMA}"
    text = SCENARIO.format(sizes=f"{{{sizes}, vocabulary: {vocabulary}, sequence: {sequence}}}")
    text = text.replace("bf16", f"{precision}, recompute: 100%")
    found = loads(text).workload.activations
    assert found is not None
    of_layer = item_nbytes * sequence * (6 * hidden + 2 * kv_width + 4 * mlp) + 4 * heads * sequence
    of_input = item_nbytes * sequence * hidden
    of_loss = 2 * of_input + 3 * 4 * sequence * vocabulary
    assert sum(found.kept_nbytes) == 4 * of_input + of_loss
    assert sum(found.again_nbytes) == 4 * (of_layer - of_input)


def test_what_stays_of_a_partly_recomputed_layer_is_not_known():
    partly = loads(SCENARIO.format(sizes=SMALL).replace("40%", "40%, recompute: 30%")).workload
    assert partly.activations is None
    assert loads(SCENARIO.format(sizes=SMALL).replace("40%", "40%, activation_size: 1 MB")).workload.activations


LLAMA = "gated: true, norm: rms, biases: none, fused_qkv: false, positions: 0, tied: false"


def test_layers_of_llama_have_their_matrices_and_no_biases():
    sizes = (
        "{layers: 1, hidden: 8, heads: 4, kv_heads: 2, intermediate: 12, vocabulary: 10, sequence: 6, " + LLAMA + "}"
    )
    tensors = workload(sizes).tensors
    assert [(each.name, each.count, each.rows) for each in tensors] == [
        ("embedding", 80, 10),
        ("blocks.0.norm1.weight", 8, None),
        ("blocks.0.attention.query.weight", 64, 8),
        ("blocks.0.attention.key.weight", 32, 4),
        ("blocks.0.attention.value.weight", 32, 4),
        ("blocks.0.attention.out.weight", 64, 8),
        ("blocks.0.norm2.weight", 8, None),
        ("blocks.0.mlp.gate.weight", 96, 12),
        ("blocks.0.mlp.in.weight", 96, 12),
        ("blocks.0.mlp.out.weight", 96, 8),
        ("norm.weight", 8, None),
        ("head", 80, 10),
    ]
    products = 2 * 6 * (64 + 2 * 32 + 64 + 3 * 96 + 80)
    assert workload(sizes).flops == products + 4 * 6**2 * 8
    assert tensors[-1].flops == 2 * 6 * 80


def test_biases_of_queries_keys_and_values_only():
    sizes = "{layers: 1, hidden: 8, heads: 4, vocabulary: 10, sequence: 6, norm: rms, biases: qkv}"
    assert [each.name for each in workload(sizes).tensors if each.name.endswith("bias")] == [
        "blocks.0.attention.in.bias"
    ]


def test_heads_may_be_wider_than_their_part_of_the_stream():
    sizes = (
        "{layers: 1, hidden: 8, heads: 4, head_dim: 6, kv_heads: 1, vocabulary: 10, sequence: 6, biases: none, "
        "norm: rms, query_key_norm: true}"
    )
    counts = {each.name: each.count for each in workload(sizes).tensors}
    assert counts["blocks.0.attention.in.weight"] == (4 + 1 + 1) * 6 * 8
    assert counts["blocks.0.attention.out.weight"] == 4 * 6 * 8
    assert counts["blocks.0.attention.query_norm.weight"] == counts["blocks.0.attention.key_norm.weight"] == 6


def counts_of(more):
    sizes = "{layers: 1, hidden: 8, heads: 4, vocabulary: 10, sequence: 6, " + more + "}"
    return {each.name: each.count for each in workload(sizes).tensors}


def test_norms_of_all_heads_together_are_as_wide_as_the_queries_and_as_the_keys():
    counts = counts_of("kv_heads: 2, norm: rms, biases: none, query_key_norm: whole")
    assert counts["blocks.0.attention.query_norm.weight"] == 8
    assert counts["blocks.0.attention.key_norm.weight"] == 4


@pytest.mark.parametrize(
    ("n", "names"), [(1, ["norm1"]), (2, ["norm1", "norm2"]), (4, ["norm1", "attention.norm", "norm2", "mlp.norm"])]
)
def test_a_layer_has_one_norm_two_or_four(n, names):
    counts = counts_of(f"norm: rms, biases: none, layer_norms: {n}")
    assert [each for each in counts if "blocks.0" in each and "norm" in each] == [
        f"blocks.0.{each}.weight" for each in names
    ]


def test_biases_of_attention_and_of_norms_only():
    names = [each for each in counts_of("biases: attention, norm_biases: true") if each.endswith("bias")]
    of_layer = ["norm1.bias", "attention.in.bias", "attention.out.bias", "norm2.bias"]
    assert names == [*(f"blocks.0.{each}" for each in of_layer), "norm.bias"]


def test_an_encoder_of_masked_tokens_has_its_norm_in_front_and_a_matrix_before_the_head():
    counts = counts_of("masked: true, head_bias: true")
    names = list(counts)
    assert names[:4] == ["embedding", "positions", "embedding.norm.weight", "embedding.norm.bias"]
    assert names[-5:] == ["head.in.weight", "head.in.bias", "head.norm.weight", "head.norm.bias", "head.bias"]
    assert (
        workload("{layers: 1, hidden: 8, heads: 4, vocabulary: 10, sequence: 6, masked: true}").flops
        - workload("{layers: 1, hidden: 8, heads: 4, vocabulary: 10, sequence: 6}").flops
        == 2 * 6 * 8 * 8
    )


def test_parameters_of_an_encoder_in_front_have_no_flops():
    assert counts_of("encoder_count: 123")["encoder"] == 123
    assert counts_of("encoder_count: 123").keys() - counts_of("tied: true").keys() == {"encoder"}


def test_each_layer_is_a_unit_and_so_is_what_stands_before_and_after():
    found = workload("{layers: 3, hidden: 8, heads: 4, vocabulary: 10, sequence: 6, " + LLAMA + "}").sharded_units
    assert [unit.tensors for unit in found] == [(0, 1), (1, 10), (10, 19), (19, 28), (28, 30)]
    assert [unit.is_block for unit in found] == [False, True, True, True, False]


def test_a_preset_by_sizes_takes_another_sequence():
    text = SCENARIO.replace("{{transformer: {sizes}", "{{preset: llama3-8b, transformer: {sizes}")
    changed = loads(text.format(sizes="{sequence: 16}")).workload
    assert sum(changed.tensor_counts) == 8_030_261_248
    assert changed.flops == 2 * 16 * (8_030_261_248 - 128256 * 4096 - 65 * 4096) + 4 * 16**2 * 4096 * 32


def test_a_scenario_with_sizes_is_written_with_tensors():
    scenario = loads(SCENARIO.format(sizes=SMALL))
    assert loads(dump(scenario)).workload == scenario.workload


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (SMALL.replace("heads: 12", "heads: 12, kv_heads: 5"), "transformer.kv_heads: 5 do not divide the 12 of heads"),
        (
            SMALL.replace("layers", "positions: 512, layers"),
            "positions: 512 are fewer than the 1024 tokens of sequence",
        ),
        (SMALL.replace("layers", "norm: batch, layers"), "workload.transformer.norm: "),
        ("{layers: 12}", "workload.transformer.hidden: "),
        (SMALL.replace("heads: 12", "heads: 7"), "workload.transformer.heads: 7 do not divide the 768 of hidden"),
        (SMALL.replace("layers: 12", "layers: 1e9"), "workload.transformer.layers: "),
        (SMALL.replace("hidden", "hiden"), "workload.transformer.hiden: unknown key 'hiden'"),
        ("12", "workload.transformer: "),
        (f"{SMALL}, tensors: [{{name: a, count: 1}}]", "'transformer' beside 'tensors': write one of them"),
        (f"{SMALL}, tensors_file: a.csv", "'tensors_file' beside 'transformer': write one of them"),
    ],
    ids=["kv heads", "positions", "norm", "lacks", "heads", "too many", "misspelt", "number", "tensors", "file"],
)
def test_what_is_wrong_with_sizes_is_told_with_the_place(sizes, problem):
    with pytest.raises(ScenarioError) as error:
        workload(sizes)
    assert problem in str(error.value)


def test_sizes_replace_the_tensors_of_a_preset():
    text = SCENARIO.replace("{{transformer", "{{preset: resnet50, transformer").format(sizes=SMALL)
    assert sum(loads(text).workload.tensor_counts) == 124_439_808
