"""`config.json` of Hugging Face: the sizes of a model.

Each supported `model_type` has a function that turns its keys into the sizes of a `Transformer`. Keys that are absent
have the defaults of the class in the library `transformers`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from simdist.configurations.described import DescribedJob, WorkloadKey
from simdist.configurations.keys import Keys
from simdist.errors import ScenarioError
from simdist.scenario.loading import read_text
from simdist.settings.base import nearest, shown

_Sizes: TypeAlias = dict[str, object]

_LONGEST = 8192  # tokens of a sequence that is guessed; models state up to a million for inference
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_TOKEN_NBYTES = 16  # input and target, 8 B each


def read_config(path: Path, *, sequence: int | None = None) -> DescribedJob:
    """Read a `config.json`.

    Args:
        path: The file.
        sequence: Tokens of a sample; None for a guess from the positions of the model.

    Raises:
        ScenarioError: It cannot be read, or the model is none that can be described.
    """
    return _described_model(Keys(str(path), json_of(path)), sequence=sequence)


def json_of(path: Path) -> dict[str, object]:
    """Return the keys of a JSON file.

    Raises:
        ScenarioError: It cannot be read, or holds something else.
    """
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{path}: is no JSON ({error}): write the config.json of a model") from None
    if not isinstance(found, dict):
        raise ScenarioError(f"{path}: {shown(found)} has no keys: write the config.json of a model")
    return found


def _described_model(config: Keys, *, sequence: int | None) -> DescribedJob:
    """Return the model that keys describe, with the arguments and errors of `read_config`."""
    if not isinstance(config.get("model_type"), str):
        raise ScenarioError(f"{config.file}: has no model_type: write the config.json of a Hugging Face model")
    kind = config.word("model_type", "")
    _refuse_experts(config)
    _refuse_experts(config.section("text_config"))
    if kind not in _SIZES:
        raise config.refusal("model_type", f"is not supported: {nearest(kind, list(_SIZES))}")
    sizes = _SIZES[kind](config)
    return _described(sizes, Path(config.file).name, sequence, _remarks(config, sizes))


def _refuse_experts(config: Keys) -> None:
    found = [key for key in _EXPERTS if config.get(key)]
    found += ["model_type"] if "moe" in config.word("model_type", "") else []
    if found:
        raise config.refusal(found[0], "mixtures of experts are not supported, dense models are")


def _described(sizes: _Sizes, name: str, sequence: int | None, remarks: tuple[str, ...]) -> DescribedJob:
    longest = sizes.pop("longest")
    assert isinstance(longest, int)
    n_tokens = min(longest, _LONGEST) if sequence is None else sequence
    source = f"guess: at most the {longest:,} positions of {name}" if sequence is None else "option --sequence"
    learnt = sizes.get("positions")
    if isinstance(learnt, int) and learnt and n_tokens > longest:
        raise ScenarioError(f"--sequence {n_tokens}: {name} has {longest:,} positions: write as many or fewer")
    return DescribedJob(
        workload=(
            WorkloadKey("transformer", sizes | {"sequence": n_tokens}, f"{name}; sequence: {source}"),
            WorkloadKey("optimizer", "adamw", "guess"),
            WorkloadKey("sample_size", f"{_TOKEN_NBYTES * n_tokens} B", f"{n_tokens} tokens x (input, target) x 8 B"),
        ),
        remarks=remarks,
    )


def _remarks(config: Keys, sizes: _Sizes) -> tuple[str, ...]:
    found = []
    text = config.section("text_config")
    window = config.get("sliding_window") or text.get("sliding_window")
    if window and config.flag("use_sliding_window", default=text.flag("use_sliding_window", default=True)):
        found.append(f"sliding_window {window}: attention is counted without a window")
    if count := sizes.get("encoder_count"):
        found.append(f"vision_config: the {count:,} parameters of images are sent, but images take no time to compute")
    return tuple(found)


def _decoder(config: Keys, *, tied: bool, **more: object) -> _Sizes:
    """Return the sizes of a decoder by the usual keys: rotary positions, and as many biases as `more` says."""
    sizes: _Sizes = {
        "layers": config.whole("num_hidden_layers", most=1000),
        "hidden": config.whole("hidden_size"),
        "heads": config.whole("num_attention_heads"),
        "intermediate": config.whole("intermediate_size"),
        "vocabulary": config.whole("vocab_size"),
        "biases": "none",
        "fused_qkv": False,
        "positions": 0,
        "tied": config.flag("tie_word_embeddings", default=tied),
        "longest": config.whole("max_position_embeddings", 131072, most=100_000_000),
    }
    for key, name in (("num_key_value_heads", "kv_heads"), ("head_dim", "head_dim")):
        if config.has(key):
            sizes[name] = config.whole(key)
    return sizes | more


def _llama(config: Keys, *, tied: bool = False, **more: object) -> _Sizes:
    return _decoder(config, tied=tied, gated=True, norm="rms", biases=_llama_biases(config)) | more


def _llama_biases(config: Keys) -> str:
    of_attention = config.flag("attention_bias", default=False)
    if config.flag("mlp_bias", default=False):
        if not of_attention:
            raise config.refusal("mlp_bias", "is supported beside attention_bias only")
        return "all"
    return "attention" if of_attention else "none"


def _qwen2(config: Keys) -> _Sizes:
    return _llama(config, biases="qkv")


def _qwen3(config: Keys) -> _Sizes:
    return {"head_dim": 128} | _llama(config, query_key_norm=True)


def _qwen2_5_vl(config: Keys) -> _Sizes:
    return _qwen2(_text_of(config)) | {"encoder_count": _qwen2_5_vision(config.section("vision_config"))}


def _text_of(config: Keys) -> Keys:
    """Return the keys of the decoder of a model of images and text; older files have them beside `vision_config`."""
    text = config.section("text_config")
    if not text.values:
        return config
    shared = {key: config.values[key] for key in ("tie_word_embeddings",) if key in config.values}
    return Keys(config.file, shared | dict(text.values), text.above, config.read)


def _qwen2_5_vision(config: Keys) -> int:
    """Return the parameters of the images' transformer and of the merger of its patches."""
    hidden = config.whole("hidden_size", 1280)
    width = config.whole("intermediate_size", 3420)
    out = config.whole("out_hidden_size", 3584)
    merged = hidden * config.whole("spatial_merge_size", 2, most=100) ** 2
    pixels = config.whole("in_channels", config.whole("in_chans", 3)) * config.whole("temporal_patch_size", 2)
    patch = pixels * config.whole("patch_size", 14, most=1000) ** 2 * hidden
    block = 2 * hidden + 4 * hidden * (hidden + 1) + 2 * (hidden + 1) * width + (width + 1) * hidden
    return patch + config.whole("depth", 32, most=1000) * block + hidden + (merged + 1) * (merged + out)


def _gemma(config: Keys) -> _Sizes:
    return {"head_dim": 256} | _llama(config, tied=True)


def _gemma2(config: Keys) -> _Sizes:
    return _gemma(config) | {"layer_norms": 4}


def _gemma3_text(config: Keys) -> _Sizes:
    defaults = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    defaults |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    given = {key: value for key, value in config.values.items() if value is not None}
    keys = Keys(config.file, defaults | given, config.above, config.read)
    return _gemma2(keys) | {"query_key_norm": True}


def _gemma3(config: Keys) -> _Sizes:
    text = _gemma3_text(_text_of(config))
    hidden = text["hidden"]
    assert isinstance(hidden, int)
    return text | {"encoder_count": _siglip(config.section("vision_config"), hidden)}


def _siglip(config: Keys, out: int) -> int:
    """Return the parameters of the images' transformer and of the projection to the width of the decoder."""
    hidden = config.whole("hidden_size", 768)
    width = config.whole("intermediate_size", 3072)
    size = config.whole("patch_size", 16, most=1000)
    patch = (config.whole("num_channels", 3) * size**2 + 1) * hidden
    positions = (config.whole("image_size", 224) // size) ** 2 * hidden
    block = 4 * hidden + 4 * hidden * (hidden + 1) + (hidden + 1) * width + (width + 1) * hidden
    layers = config.whole("num_hidden_layers", 12, most=1000)
    if config.flag("vision_use_head", default=False):
        raise config.refusal("vision_use_head", "is not supported")
    return patch + positions + layers * block + 2 * hidden + hidden * out + hidden


def _phi(config: Keys) -> _Sizes:
    if config.flag("qk_layernorm", default=False):
        raise config.refusal("qk_layernorm", "is not supported")
    return _decoder(config, tied=False, biases="all", layer_norms=1, head_bias=True)


def _phi3(config: Keys) -> _Sizes:
    return _llama(config, fused_qkv=True)


def _olmo2(config: Keys) -> _Sizes:
    return _llama(config, query_key_norm="whole")


def _smollm3(config: Keys) -> _Sizes:
    return _llama(config, tied=True)


def _cohere(config: Keys) -> _Sizes:
    if config.flag("use_qk_norm", default=False):
        raise config.refusal("use_qk_norm", "is not supported")
    return _decoder(config, tied=True, gated=True, layer_norms=1, biases=_llama_biases(config))


def _stablelm(config: Keys) -> _Sizes:
    if config.flag("qk_layernorm", default=False):
        raise config.refusal("qk_layernorm", "is not supported")
    return _decoder(
        config,
        tied=False,
        gated=True,
        biases="qkv" if config.flag("use_qkv_bias", default=False) else "none",
        norm_biases=True,
        layer_norms=1 if config.flag("use_parallel_residual", default=False) else 2,
    )


def _starcoder2(config: Keys) -> _Sizes:
    biases = "all" if config.flag("use_bias", default=True) else "none"
    return _decoder(config, tied=True, biases=biases, norm_biases=True)


def _gpt_neox(config: Keys) -> _Sizes:
    if not config.flag("attention_bias", default=True):
        raise config.refusal("attention_bias", "is not supported: GPT-NeoX has biases")
    return _decoder(config, tied=False, biases="all", fused_qkv=True)


def _falcon(config: Keys) -> _Sizes:
    hidden = config.whole("hidden_size")
    heads = config.whole("num_attention_heads", config.whole("n_head", 71))
    is_new = config.flag("new_decoder_architecture", default=False)
    few = 1 if config.flag("multi_query", default=True) else heads
    has_one = config.flag("parallel_attn", default=True) and not is_new
    return {
        "layers": config.whole("num_hidden_layers", config.whole("n_layer", 32, most=1000), most=1000),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.whole("num_kv_heads", heads) if is_new else few,
        "intermediate": config.whole("ffn_hidden_size", 4 * hidden),
        "vocabulary": config.whole("vocab_size"),
        "biases": "all" if config.flag("bias", default=False) else "none",
        "norm_biases": True,
        "layer_norms": 1 if has_one or config.whole("num_ln_in_parallel_attn", 2) == 1 else 2,
        "positions": 0,
        "tied": config.flag("tie_word_embeddings", default=True),
        "longest": config.whole("max_position_embeddings", 2048),
    }


def _gpt2(config: Keys) -> _Sizes:
    n_positions = config.whole("n_positions")
    sizes: _Sizes = {
        "layers": config.whole("n_layer", most=1000),
        "hidden": config.whole("n_embd"),
        "heads": config.whole("n_head"),
        "vocabulary": config.whole("vocab_size"),
        "positions": n_positions,
        "tied": config.flag("tie_word_embeddings", default=True),
        "longest": n_positions,
    }
    return sizes | ({"intermediate": config.whole("n_inner")} if config.get("n_inner") else {})


def _gpt_bigcode(config: Keys) -> _Sizes:
    return _gpt2(config) | ({"kv_heads": 1} if config.flag("multi_query", default=True) else {})


def _opt(config: Keys) -> _Sizes:
    hidden = config.whole("hidden_size")
    projected = config.whole("word_embed_proj_dim", hidden)
    if projected != hidden or not config.flag("do_layer_norm_before", default=True):
        raise ScenarioError(
            f"{config.file}: word_embed_proj_dim {projected} beside hidden_size {hidden}, or do_layer_norm_before "
            f"false, as in OPT-350M, is not supported: other sizes of OPT are"
        )
    n_positions = config.whole("max_position_embeddings")
    return {
        "layers": config.whole("num_hidden_layers", most=1000),
        "hidden": hidden,
        "heads": config.whole("num_attention_heads"),
        "intermediate": config.whole("ffn_dim"),
        "vocabulary": config.whole("vocab_size"),
        "fused_qkv": False,
        "positions": n_positions + 2,  # OPT keeps two rows for padding
        "tied": config.flag("tie_word_embeddings", default=True),
        "longest": n_positions,
    }


def _bert(config: Keys) -> _Sizes:
    n_positions = config.whole("max_position_embeddings", 512)
    n_types = config.whole("type_vocab_size", 2)
    return _decoder(
        config,
        tied=True,
        biases="all",
        masked=True,
        head_bias=True,
        positions=n_positions + n_types,
        longest=n_positions,
    )


def _roberta(config: Keys) -> _Sizes:
    sizes = _bert(config)
    return sizes | {"longest": config.whole("max_position_embeddings", 514) - 2}  # two rows are for padding


def _mpt(config: Keys) -> _Sizes:
    hidden = config.whole("d_model")
    return {
        "layers": config.whole("n_layers", most=1000),
        "hidden": hidden,
        "heads": config.whole("n_heads"),
        "intermediate": config.whole("expansion_ratio", 4, most=1000) * hidden,
        "vocabulary": config.whole("vocab_size"),
        "biases": "none" if config.flag("no_bias", default=True) else "all",
        "positions": 0,  # ALiBi
        "longest": config.whole("max_seq_len"),
    }


_SIZES: dict[str, Callable[[Keys], _Sizes]] = {
    "bert": _bert,
    "cohere": _cohere,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "granite": _llama,
    "llama": _llama,
    "mistral": _llama,
    "mpt": _mpt,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3": _qwen3,
    "roberta": _roberta,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
