"""`config.json` of Hugging Face: the sizes of a model.

Each supported `model_type` has a function that turns its keys into the sizes of a `Transformer`. Keys that are absent
have the defaults of the class in the library `transformers`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from simdist.configurations.described import DescribedJob, WorkloadKey, positive_whole
from simdist.errors import ScenarioError
from simdist.scenario.loading import read_text
from simdist.settings.base import nearest, shown

_Sizes: TypeAlias = dict[str, object]
_Config: TypeAlias = Mapping[str, object]

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
    try:
        config = json.loads(read_text(path))
    except ValueError as error:
        raise ScenarioError(f"{path}: is no JSON ({error}): write the config.json of a model") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ScenarioError(f"{path}: has no model_type: write the config.json of a Hugging Face model")
    kind = config["model_type"]
    has_experts = [key for key in _EXPERTS if config.get(key)]
    if has_experts or "moe" in kind:
        key = has_experts[0] if has_experts else "model_type"
        raise ScenarioError(
            f"{path}: {key}: {shown(config[key])}: mixtures of experts are not supported, dense models are"
        )
    if kind not in _SIZES:
        raise ScenarioError(f"{path}: model_type: {shown(kind)} is not supported: {nearest(kind, list(_SIZES))}")
    sizes = _SIZES[kind](config, str(path))
    return _described(sizes, path.name, sequence, _remarks(config))


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
        precision_source="guess: mixed precision",
        remarks=remarks,
    )


def _remarks(config: _Config) -> tuple[str, ...]:
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return (f"sliding_window {config['sliding_window']}: attention is counted without a window",)
    return ()


def _llama(config: _Config, where: str) -> _Sizes:
    heads = positive_whole(config, "num_attention_heads", where)
    hidden = positive_whole(config, "hidden_size", where)
    sizes: _Sizes = {
        "layers": positive_whole(config, "num_hidden_layers", where),
        "hidden": hidden,
        "heads": heads,
        "intermediate": positive_whole(config, "intermediate_size", where),
        "vocabulary": positive_whole(config, "vocab_size", where),
        "gated": True,
        "norm": "rms",
        "biases": _llama_biases(config, where),
        "fused_qkv": False,
        "positions": 0,
        "tied": _flag(config, "tie_word_embeddings", where, default=False),
        "longest": positive_whole(config, "max_position_embeddings", where),
    }
    if config.get("num_key_value_heads") is not None:
        sizes["kv_heads"] = positive_whole(config, "num_key_value_heads", where)
    if config.get("head_dim") is not None:
        sizes["head_dim"] = positive_whole(config, "head_dim", where)
    return sizes


def _llama_biases(config: _Config, where: str) -> str:
    of_attention = _flag(config, "attention_bias", where, default=False)
    of_mlp = _flag(config, "mlp_bias", where, default=False)
    if of_attention != of_mlp:
        raise ScenarioError(
            f"{where}: attention_bias {of_attention} and mlp_bias {of_mlp}: biases of one only are not supported"
        )
    return "all" if of_attention else "none"


def _qwen2(config: _Config, where: str) -> _Sizes:
    return _llama(config, where) | {"biases": "qkv"}


def _qwen3(config: _Config, where: str) -> _Sizes:
    return {"head_dim": 128} | _llama(config, where) | {"query_key_norm": True}


def _gpt2(config: _Config, where: str) -> _Sizes:
    n_positions = positive_whole(config, "n_positions", where)
    sizes: _Sizes = {
        "layers": positive_whole(config, "n_layer", where),
        "hidden": positive_whole(config, "n_embd", where),
        "heads": positive_whole(config, "n_head", where),
        "vocabulary": positive_whole(config, "vocab_size", where),
        "positions": n_positions,
        "tied": _flag(config, "tie_word_embeddings", where, default=True),
        "longest": n_positions,
    }
    return sizes | ({"intermediate": positive_whole(config, "n_inner", where)} if config.get("n_inner") else {})


def _opt(config: _Config, where: str) -> _Sizes:
    hidden = positive_whole(config, "hidden_size", where)
    projected = config.get("word_embed_proj_dim", hidden)
    if projected != hidden or not _flag(config, "do_layer_norm_before", where, default=True):
        raise ScenarioError(
            f"{where}: word_embed_proj_dim {shown(projected)} beside hidden_size {hidden}, or do_layer_norm_before "
            f"false, as in OPT-350M, is not supported: other sizes of OPT are"
        )
    n_positions = positive_whole(config, "max_position_embeddings", where)
    return {
        "layers": positive_whole(config, "num_hidden_layers", where),
        "hidden": hidden,
        "heads": positive_whole(config, "num_attention_heads", where),
        "intermediate": positive_whole(config, "ffn_dim", where),
        "vocabulary": positive_whole(config, "vocab_size", where),
        "fused_qkv": False,
        "positions": n_positions + 2,  # OPT keeps two rows for padding
        "tied": _flag(config, "tie_word_embeddings", where, default=True),
        "longest": n_positions,
    }


def _mpt(config: _Config, where: str) -> _Sizes:
    hidden = positive_whole(config, "d_model", where)
    ratio = config.get("expansion_ratio", 4)
    if isinstance(ratio, bool) or not isinstance(ratio, int):
        raise ScenarioError(f"{where}: expansion_ratio: {shown(ratio)} is no whole number")
    return {
        "layers": positive_whole(config, "n_layers", where),
        "hidden": hidden,
        "heads": positive_whole(config, "n_heads", where),
        "intermediate": ratio * hidden,
        "vocabulary": positive_whole(config, "vocab_size", where),
        "biases": "none" if _flag(config, "no_bias", where, default=True) else "all",
        "positions": 0,  # ALiBi
        "longest": positive_whole(config, "max_seq_len", where),
    }


def _flag(config: _Config, key: str, where: str, *, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ScenarioError(f"{where}: {key}: {shown(value)} is neither true nor false")
    return value


_SIZES: dict[str, Callable[[_Config, str], _Sizes]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "mpt": _mpt,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
