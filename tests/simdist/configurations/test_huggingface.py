"""`config.json` of Hugging Face: each supported model has the published number of parameters."""

import json
from pathlib import Path

import pytest

from simdist.configurations.huggingface import read_config
from simdist.drafts.described_jobs import schedules_of, workload_of
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
GEMMA = LLAMA | {"model_type": "gemma", "vocab_size": 256000, "tie_word_embeddings": None, "head_dim": 256}
GEMMA2 = GEMMA | {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
GEMMA3 = GEMMA | {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26}
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
    }
    | {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
}
PHI = LLAMA | {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "vocab_size": 51200}
PHI3 = LLAMA | {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": 32}
NEOX = LLAMA | {"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "vocab_size": 65024,
}
BERT = LLAMA | {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
QWEN2_5_VL = LLAMA | {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
    },
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
    "Gemma 2B": (
        GEMMA
        | {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
        | {"num_attention_heads": 8, "num_key_value_heads": 1},
        2_506_172_416,
    ),
    "Gemma 2 2B": (GEMMA2 | {"num_attention_heads": 8, "num_key_value_heads": 4}, 2_614_341_888),
    "Gemma 3 1B": (
        GEMMA3 | {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144},
        999_885_952,
    ),
    "Gemma 3 4B": (GEMMA3_4B, 4_300_079_472),
    "Phi-2": (PHI | {"num_key_value_heads": 32}, 2_779_683_840),
    "Phi-3 mini": (PHI3 | {"vocab_size": 32064}, 3_821_079_552),
    "GPT-NeoX 20B": (
        NEOX | {"num_hidden_layers": 44, "num_key_value_heads": None, "vocab_size": 50432},
        20_554_567_680,
    ),
    "Falcon 7B": (FALCON, 6_921_720_704),
    "Falcon 40B": (
        FALCON
        | {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128}
        | {"num_kv_heads": 8, "new_decoder_architecture": True},
        41_303_293_952,
    ),
    "OLMo 2 7B": (
        LLAMA | {"model_type": "olmo2", "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 100352},
        7_298_617_344,
    ),
    "BERT base": (
        BERT
        | {"num_attention_heads": 12, "num_key_value_heads": None, "vocab_size": 30522}
        | {"max_position_embeddings": 512, "type_vocab_size": 2, "tie_word_embeddings": None},
        109_514_298,
    ),
    "Qwen2.5-VL 7B": (QWEN2_5_VL, 8_292_166_656),
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
        ([], "config.json: [] has no keys"),
        ({"hidden_size": 8}, "has no model_type"),
        (LLAMA | {"model_type": "lama"}, "model_type: 'lama' is not supported: did you mean 'llama'?"),
        (
            LLAMA | {"model_type": "mixtral", "num_local_experts": 8},
            "num_local_experts: 8: mixtures of experts are not",
        ),
        (LLAMA | {"model_type": "qwen2_moe"}, "model_type: 'qwen2_moe': mixtures of experts are not"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "config.json: has no vocab_size"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size: '4096': write a whole number from 1 to 10000000"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers: 0: write a whole number from 1 to 1000"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000: write a whole number from 1 to 1000"),
        (LLAMA | {"hidden_size": float("nan")}, "hidden_size: nan: write a whole number"),
        (LLAMA | {"hidden_size": -4096}, "hidden_size: -4096: write a whole number"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias: true is supported beside attention_bias only"),
        (PHI | {"qk_layernorm": True}, "qk_layernorm: true is not supported"),
        (GEMMA3_4B | {"text_config": []}, "text_config: []: write keys below it"),
        (GEMMA3_4B | {"text_config": {"hidden_size": 0}}, "text_config.hidden_size: 0: write a whole number"),
        (LLAMA | {"tie_word_embeddings": "never"}, "tie_word_embeddings: 'never': write true or false"),
        (LLAMA | {"num_key_value_heads": 5}, "transformer.kv_heads: 5 do not divide the 32 of heads"),
        (OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512 beside hidden_size 768"),
        (MPT | {"expansion_ratio": 2.5}, "expansion_ratio: 2.5: write a whole number from 1 to 1000"),
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
    mixed = "param_dtype: bfloat16, reduce_dtype: float32"
    large = read_config(path)
    kept = f"{{kind: fsdp, {mixed}, reshard_after_forward: false}}"
    own = (f"{{kind: fsdp, {mixed}}}", kept)
    in_node = (f"{{kind: hsdp, shard: 8, {mixed}}}", f"{{kind: hsdp, shard: 8, between: local-8, {mixed}}}")
    assert schedules_of(large, "config.json", 4, 8) == (*own, *in_node)
    assert schedules_of(large, "config.json", 1, 8) == own
    assert schedules_of(large, "config.json", 8, 1) == own
    path.write_text(json.dumps(GPT2))
    assert schedules_of(read_config(path), "config.json", 4, 8) == ()
