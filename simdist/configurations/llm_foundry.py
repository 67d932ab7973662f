"""A training job of llm-foundry: its YAML file, which states model, batch and FSDP, and not the number of GPUs.

Source:
    mosaicml/llm-foundry, llmfoundry/models/mpt/configuration_mpt.py and scripts/train/yamls; mosaicml/composer,
    composer/trainer/mosaic_fsdp_utils.py: `PURE` reduces in the type of the passes, `DEFAULT` in float32.
"""

from simdist.configurations.described import GUESS, DescribedJob, Mesh, ScheduleSettings, WorkloadKey
from simdist.configurations.keys import Keys
from simdist.configurations.strategies import DTYPES, interpolated, mesh_of
from simdist.settings.precision import Precision

_TOKEN_NBYTES = 16  # input and target, 8 B each
_PRECISIONS: dict[str, Precision] = {"amp_bf16": "bf16", "amp_fp16": "fp16", "amp_fp8": "bf16", "fp32": "fp32"}
_MIXED = {"PURE": None, "DEFAULT": None, "FULL": None}
_OPTIMIZERS = {"decoupled_adamw": "adamw", "adamw": "adamw", "adam": "adamw", "decoupled_lionw": "sgd"}
_ATTENTION = {"multihead_attention": None, "multiquery_attention": None, "grouped_query_attention": None}
_MLPS = {"mptmlp": False, "te_ln_mlp": False, "mptglu": True}
_NO_MODEL = "hf_causal_lm"
_MICRO = "device_train_microbatch_size"


def described_llm_foundry(keys: Keys, *, sequence: int | None) -> DescribedJob:
    """Return the job that keys of llm-foundry describe; without a model if that is one of Hugging Face.

    Args:
        keys: Of the file.
        sequence: Tokens of a sample, in place of those of the file.

    Raises:
        ScenarioError: It has something that is not supported.
    """
    keys = Keys(keys.file, interpolated(keys.values))
    model = keys.section("model")
    kind = model.word("name", "", {"mpt_causal_lm": None, _NO_MODEL: None})
    _refuse(keys, model)
    precision = _PRECISIONS[keys.word("precision", "amp_bf16", _PRECISIONS)]
    n_tokens = keys.whole("max_seq_len", 2048) if sequence is None else sequence
    source = "max_seq_len" if sequence is None else "option --sequence"
    section = keys.section("fsdp_config")
    has_batch = keys.get(_MICRO) not in (None, "auto")
    has_samples = keys.has("global_train_batch_size")
    sizes = [] if kind == _NO_MODEL else list(_model(model, n_tokens, source))
    return DescribedJob(
        workload=(*sizes, *_training(keys, section)),
        precision=precision,
        precision_source="precision",
        batch_size=keys.whole(_MICRO, most=1_000_000) if has_batch else 1,
        batch_size_source=_MICRO if has_batch else f"{GUESS}: {_MICRO} is not stated",
        samples_per_step=keys.whole("global_train_batch_size", most=1_000_000_000) if has_samples else None,
        samples_source="global_train_batch_size",
        sequence=n_tokens if kind == _NO_MODEL else None,
        sequence_source=source,
        mesh=_mesh(keys, section, precision),
        is_compiled=bool(keys.section("compile_config").values),
        remarks=tuple(_remarks(keys)),
    )


def _refuse(keys: Keys, model: Keys) -> None:
    section = keys.section("fsdp_config")
    for key in ("activation_cpu_offload", "cpu_offload"):
        if section.flag(key, default=False):
            raise section.refusal(key, "is not supported: write false")
    for above, key in ((keys, "tp_config"), (model, "peft_config"), (model, "block_overrides")):
        if above.has(key):
            raise above.refusal(key, "is not supported: leave it out")


def _model(model: Keys, n_tokens: int, source: str) -> "list[WorkloadKey]":
    """Return the sizes of an MPT, and the bytes of its samples."""
    attention = model.section("attn_config")
    mlp = model.section("ffn_config")
    kind = attention.word("attn_type", "multihead_attention", _ATTENTION)
    heads = model.whole("n_heads")
    has_no_rows = attention.flag("alibi", default=False) or attention.flag("rope", default=False)
    has_rows = model.flag("learned_pos_emb", default=True) and not has_no_rows
    sizes: dict[str, object] = {
        "layers": model.whole("n_layers", most=1000),
        "hidden": model.whole("d_model"),
        "heads": heads,
        "intermediate": _width(model, mlp),
        "vocabulary": model.whole("vocab_size", 50368),
        "gated": _MLPS[mlp.word("ffn_type", "mptmlp", _MLPS)],
        "norm": "rms" if "rms" in model.word("norm_type", "low_precision_layernorm") else "layer",
        "biases": "none" if model.flag("no_bias", default=False) else "all",
        "fused_qkv": attention.flag("fused_qkv", default=True),
        "positions": model.whole("max_seq_len", n_tokens) if has_rows else 0,
        "tied": model.flag("tie_word_embeddings", default=True),
    }
    if kind != "multihead_attention":
        sizes["kv_heads"] = 1 if kind == "multiquery_attention" else attention.whole("kv_n_heads")
    if model.has("head_dim"):
        sizes["head_dim"] = model.whole("head_dim")
    if model.has("attention_bias"):
        raise model.refusal("attention_bias", "is not supported: leave it out")
    for key, norms in (("qk_ln", "whole"), ("qk_gn", True)):
        if attention.flag(key, default=False):
            sizes["query_key_norm"] = norms
    return [
        WorkloadKey("transformer", sizes | {"sequence": n_tokens}, f"model; sequence: {source}"),
        WorkloadKey("sample_size", f"{_TOKEN_NBYTES * n_tokens} B", f"{n_tokens} tokens x (input, target) x 8 B"),
    ]


def _width(model: Keys, mlp: Keys) -> int:
    """Return the width of the MLP."""
    if mlp.has("ffn_hidden_size"):
        return mlp.whole("ffn_hidden_size")
    ratio = model.get("expansion_ratio")
    width = (4 if ratio is None else ratio) * model.whole("d_model") if isinstance(ratio, int | float | None) else 0
    if isinstance(ratio, bool) or not width or not 1 <= width < 10**7 or width != int(width):
        raise model.refusal("expansion_ratio", "gives no whole width of the MLP: write e.g. 4")
    return int(width)


def _training(keys: Keys, section: Keys) -> "list[WorkloadKey]":
    name = keys.section("optimizer").word("name", "")
    optimizer = _OPTIMIZERS.get(name)
    lion = f"optimizer.name: {name} has one moment"
    source = f"{GUESS}: {name or 'none'} is not known" if optimizer is None else "optimizer.name"
    is_repeated = section.flag("activation_checkpointing", default=False)
    return [
        WorkloadKey("dtype", "float32", "llm-foundry"),
        WorkloadKey("optimizer", optimizer or "adamw", lion if optimizer == "sgd" else source),
        WorkloadKey("recompute", "100%" if is_repeated else "0%", "fsdp_config.activation_checkpointing"),
    ]


def _mesh(keys: Keys, section: Keys, precision: Precision) -> Mesh:
    if not section.values:
        return Mesh(None, 1, f"{keys.file}: no fsdp_config")
    mixed = section.word("mixed_precision", "DEFAULT", _MIXED)
    settings: ScheduleSettings = ()
    if precision in DTYPES and mixed != "FULL":
        reduced = DTYPES[precision] if mixed == "PURE" else "float32"
        settings = (("param_dtype", DTYPES[precision]), ("reduce_dtype", reduced))
    return mesh_of(section, "sharding_strategy", settings)


def _remarks(keys: Keys) -> list[str]:
    """Return what the scenario leaves out."""
    found = []
    if keys.word("precision", "") == "amp_fp8":
        found.append("precision amp_fp8 is not modelled: the passes take the time of bf16")
    if keys.has("save_interval"):
        found.append(f"save_interval {keys.get('save_interval')}: checkpoints are not written: add checkpoint")
    return found
