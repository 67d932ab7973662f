"""`config.json` of Hugging Face: each supported model has the published number of parameters."""

import json
from pathlib import Path

import pytest

from simdist.cli.described_jobs import schedules_of, workload_of
from simdist.configurations.huggingface import read_config
from simdist.errors import ScenarioError
from simdist.scenario import Workload

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
OPT = {
    "model_type": "opt",
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
MPT = {
    "model_type": "mpt",
    "d_model": 4096,
    "expansion_ratio": 4,
    "max_seq_len": 2048,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "vocab_size": 50432,
}
PUBLISHED = {  # parameters of the checkpoints
    "Llama 3.1 8B": (LLAMA, 8_030_261_248),
    "Llama 3.2 1B": (
        LLAMA
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"head_dim": 64, "tie_word_embeddings": True},
        1_235_814_400,
    ),
    "Mistral 7B": (LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": None}, 7_241_732_096),
    "GPT-2": (GPT2, 124_439_808),
    "OPT 125M": (OPT, 125_239_296),
    "Qwen2 0.5B": (QWEN2, 494_032_768),
    "Qwen3 0.6B": (QWEN3, 596_049_920),
    "MPT 7B": (MPT, 6_649_286_656),
}


def read(folder: Path, config: object, *, sequence: int | None = None) -> Workload:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return workload_of(read_config(path, sequence=sequence), str(path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_published_parameters(tmp_path, name):
    config, n_parameters = PUBLISHED[name]
    assert sum(read(tmp_path, config).tensor_counts) == n_parameters


def test_gpt2_has_the_tensors_of_its_preset(tmp_path):
    counts = read(tmp_path, GPT2).tensor_counts
    assert len(counts) == 2 + 12 * 12 + 2
    assert counts[:3] == (50257 * 768, 1024 * 768, 768)


def test_the_sequence_is_at_most_8192_tokens_unless_stated(tmp_path):
    assert read(tmp_path, LLAMA).sample_nbytes == 16 * 8192
    assert read(tmp_path, LLAMA, sequence=65536).sample_nbytes == 16 * 65536
    assert read(tmp_path, GPT2).sample_nbytes == 16 * 1024
    with pytest.raises(ScenarioError, match=r"--sequence 2048: config.json has 1,024 positions"):
        read(tmp_path, GPT2, sequence=2048)


def test_a_window_of_attention_is_remarked(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"model_type": "mistral", "sliding_window": 4096}))
    [remark] = read_config(path).remarks
    assert remark == "sliding_window 4096: attention is counted without a window"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ([], "has no model_type"),
        ({"hidden_size": 8}, "has no model_type"),
        (LLAMA | {"model_type": "lama"}, "model_type: 'lama' is not supported: did you mean 'llama'?"),
        (
            LLAMA | {"model_type": "mixtral", "num_local_experts": 8},
            "num_local_experts: 8: mixtures of experts are not",
        ),
        (LLAMA | {"model_type": "qwen2_moe"}, "model_type: 'qwen2_moe': mixtures of experts are not"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "has no vocab_size, which tells the size"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size: '4096' is no whole number above 0"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers: 0 is no whole number above 0"),
        (LLAMA | {"attention_bias": True}, "attention_bias True and mlp_bias False: biases of one only"),
        (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is neither true nor false"),
        (LLAMA | {"num_key_value_heads": 5}, "transformer.kv_heads: 5 do not divide the 32 of heads"),
        (OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512 beside hidden_size 768"),
        (MPT | {"expansion_ratio": 2.5}, "expansion_ratio: 2.5 is no whole number"),
    ],
)
def test_what_is_not_supported_is_told_with_the_key(tmp_path, config, problem):
    with pytest.raises(ScenarioError) as error:
        read(tmp_path, config)
    assert problem in str(error.value)
    assert "config.json" in str(error.value)


def test_a_file_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ScenarioError, match=r"config.json: is no JSON .*: write the config.json of a model"):
        read_config(path)


def test_large_models_are_sharded_over_all_ranks_and_over_a_node(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    mixed = "param_dtype: bfloat16, reduce_dtype: float32}"
    large = read_config(path)
    assert schedules_of(large, "config.json", 4, 8) == ("{kind: fsdp, " + mixed, "{kind: hsdp, shard: 8, " + mixed)
    assert schedules_of(large, "config.json", 1, 8) == ("{kind: fsdp, " + mixed,)
    assert schedules_of(large, "config.json", 8, 1) == ("{kind: fsdp, " + mixed,)
    path.write_text(json.dumps(GPT2))
    assert schedules_of(read_config(path), "config.json", 4, 8) == ()
