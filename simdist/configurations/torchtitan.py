"""A job of torchtitan: its TOML file, as versions from 2024-04 to 2026-02 read it.

Names of keys changed: `data_parallel_degree` became a degree of replicas and one of shards, sections moved from
`training` and `experimental` to `parallelism` and `compile`. Every name is understood. Later versions state jobs in
Python, not in TOML.

Source:
    pytorch/torchtitan, torchtitan/config_manager.py, torchtitan/config/job_config.py, model registries and
    distributed/activation_checkpoint.py at several commits.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from simdist.configurations.described import DescribedJob, Mesh, WorkloadKey
from simdist.configurations.keys import MOST
from simdist.errors import ScenarioError
from simdist.scenario.loading import read_text
from simdist.scenario.presets import expand
from simdist.scenario.transformer import Transformer
from simdist.scenario.workload import Tensor
from simdist.settings.base import nearest, shown
from simdist.settings.precision import Precision

_ValueT = TypeVar("_ValueT", int, bool, str)
_Sizes = dict[str, object]

_LLAMA: _Sizes = {
    "gated": True,
    "norm": "rms",
    "biases": "none",
    "fused_qkv": False,
    "positions": 0,
    "tied": False,
}
_LLAMA2 = _LLAMA | {"vocabulary": 32000}
_QWEN3 = _LLAMA | {"vocabulary": 151936, "kv_heads": 8, "head_dim": 128, "query_key_norm": True}


def _sizes(base: _Sizes, layers: int, hidden: int, heads: int, intermediate: int, **more: object) -> _Sizes:
    stated = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": intermediate}
    return base | stated | more


#: Flavors by model: the name of a workload preset, or the sizes.
_FLAVORS: dict[str, dict[str, str | _Sizes]] = {
    "llama2": {
        "debugmodel": _sizes(_LLAMA2, 8, 256, 16, 768),
        "271M": _sizes(_LLAMA2, 16, 1024, 8, 2816),
        "1B": _sizes(_LLAMA2, 18, 2048, 16, 5632),
        "7B": "llama2-7b",
        "13B": "llama2-13b",
        "26B": _sizes(_LLAMA2, 80, 5120, 40, 13824),
        "70B": "llama2-70b",
    },
    "llama3": {
        "debugmodel": _sizes(_LLAMA, 6, 256, 16, 768, vocabulary=2048),
        "8B": "llama3-8b",
        "70B": "llama3-70b",
        "405B": "llama3-405b",
    },
    "qwen3": {
        "0.6B": _sizes(_QWEN3, 28, 1024, 16, 3072, tied=True),
        "1.7B": _sizes(_QWEN3, 28, 2048, 16, 6144, tied=True),
        "4B": _sizes(_QWEN3, 36, 2560, 32, 9728, tied=True),
        "8B": _sizes(_QWEN3, 36, 4096, 32, 12288),
        "14B": _sizes(_QWEN3, 40, 5120, 40, 17408),
        "32B": _sizes(_QWEN3, 64, 5120, 64, 25600),
    },
}
_SUFFIXES = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")  # of flavors with another kernel of attention

#: Keys that are read, by what they mean: the newest name first.
_NAMES = {
    "model": ("model.name",),
    "flavor": ("model.flavor",),
    "norm": ("model.norm_type",),
    "replicate": ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"),
    "shard": ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree"),
    "data parallel": ("training.data_parallel_degree",),
    "data parallel type": ("training.data_parallel_type",),
    "reshard": (
        "parallelism.fsdp_reshard_after_forward",
        "training.fsdp_reshard_after_forward",
        "experimental.fsdp_reshard_after_forward",
    ),
    "batch": ("training.local_batch_size", "training.batch_size"),
    "global batch": ("training.global_batch_size",),
    "sequence": ("training.seq_len",),
    "dtype": ("training.dtype",),
    "param dtype": ("training.mixed_precision_param",),
    "reduce dtype": ("training.mixed_precision_reduce",),
    "optimizer": ("optimizer.name",),
    "compile": ("compile.enable", "training.compile"),
    "checkpointing": ("activation_checkpoint.mode",),
    "selective": ("activation_checkpoint.selective_ac_option",),
}
_OTHER_PARALLELISM = (
    "tensor_parallel_degree",
    "sequence_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
)
_PARALLEL_SECTIONS = ("parallelism", "training", "experimental")
#: Sections and keys that change neither how long a step takes here nor what it sends.
_SECTIONS_WITHOUT_EFFECT = (
    "job",
    "profiling",
    "profiler",
    "metrics",
    "optimizer",
    "lr_scheduler",
    "validation",
    "comm",
    "debug",
    "checkpoint",
    "memory_estimation",
    "data",
    "float8",
    "mx",
    "quantize",
    "fault_tolerance",
    "compile",
    "activation_checkpoint",
    "model",
)
_TRAINING_WITHOUT_EFFECT = (
    "dataloader",
    "dataset",
    "dataset_path",
    "max_norm",
    "warmup_steps",
    "steps",
    "seed",
    "deterministic",
    "gc_freq",
    "gc_debug",
    "fp8_linear",
    "enable_cpu_offload",
)
_PARALLELISM_WITHOUT_EFFECT = (
    "disable_loss_parallel",
    "enable_loss_parallel",
    "enable_async_tensor_parallel",
    *_OTHER_PARALLELISM,
)
_WITHOUT_EFFECT = (
    *_SECTIONS_WITHOUT_EFFECT,
    *(f"training.{key}" for key in _TRAINING_WITHOUT_EFFECT),
    *(f"{section}.{key}" for section in _PARALLEL_SECTIONS for key in _PARALLELISM_WITHOUT_EFFECT),
)
_WITHOUT_EFFECT_PREFIXES = tuple(
    f"{section}.{kind}_parallel_" for section in _PARALLEL_SECTIONS for kind in ("pipeline", "context", "expert")
)
#: Keys of versions in which the root of FSDP held the embedding, the norm and the head.
_OF_OLD_VERSIONS = ("training.batch_size", "training.data_parallel_degree", "training.compile")
_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_TOKEN_NBYTES = 16  # input and target, 8 B each


@dataclass
class _Configuration:
    """Keys of a file by their path, and which were read."""

    path: Path
    values: dict[str, object]
    read: set[str] = field(default_factory=set)

    def where(self, meaning: str) -> str:
        """Return the key that states something, for people."""
        return next((name for name in _NAMES[meaning] if name in self.values), _NAMES[meaning][0])

    def get(self, meaning: str, default: _ValueT) -> _ValueT:
        """Return a value of the type of the default.

        Raises:
            ScenarioError: It is of another type.
        """
        name = self.where(meaning)
        self.read.update(_NAMES[meaning])
        return self.at(name, default)

    def at(self, name: str, default: _ValueT) -> _ValueT:
        """Return the value of a key."""
        value = self.values.get(name, default)
        if type(value) is not type(default):
            kind = {int: "a whole number", bool: "true or false", str: "a text"}[type(default)]
            raise ScenarioError(f"{self.path}: {name}: {shown(value)} is not {kind}")
        return value


def read_job(path: Path, *, sequence: int | None = None) -> DescribedJob:
    """Read a job of torchtitan.

    Args:
        path: Its TOML file.
        sequence: Tokens of a sample, in place of those of the file.

    Raises:
        ScenarioError: It cannot be read, or has a model or a parallelism that is not supported.
    """
    try:
        tree = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: is no TOML ({error}): write the configuration of a torchtitan job") from None
    job = _Configuration(path, dict(_flattened(tree)))
    _check_parallelism(job)
    model = _model(job)
    n_tokens = _positive(job, "sequence", 2048) if sequence is None else sequence
    sequence_source = job.where("sequence") if sequence is None else "option --sequence"
    sizes = _with_sequence(model, n_tokens)
    batch_size = _positive(job, "batch", 8)
    share, share_source, share_remarks = _recomputed(job, sizes)
    precision, precision_source = _precision(job)
    return DescribedJob(
        workload=(
            *_model_entries(job, model, n_tokens, sequence_source),
            WorkloadKey(
                "dtype", "float32" if job.get("dtype", "float32") == "float32" else "bfloat16", "training.dtype"
            ),
            WorkloadKey("optimizer", _optimizer(job), job.where("optimizer")),
            WorkloadKey("recompute", f"{100 * share:.4g}%", share_source),
            *_activations(job, sizes, share, precision),
            WorkloadKey("sample_size", f"{_TOKEN_NBYTES * n_tokens} B", f"{n_tokens} tokens x (input, target) x 8 B"),
        ),
        precision=precision,
        precision_source=precision_source,
        batch_size=batch_size,
        batch_size_source=job.where("batch"),
        samples_per_step=_degree(job, "global batch"),
        samples_source=job.where("global batch"),
        mesh=_mesh(job),
        is_compiled=_is_compiled(job),
        remarks=(*share_remarks, *_remarks(job)),
    )


def _flattened(tree: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _check_parallelism(job: _Configuration) -> None:
    """Refuse what splits a layer, a sequence or the layers among ranks."""
    for section in _PARALLEL_SECTIONS:
        for key in _OTHER_PARALLELISM:
            name = f"{section}.{key}"
            if job.at(name, 1) != 1:
                raise ScenarioError(
                    f"{job.path}: {name}: {job.values[name]}: only data parallelism is supported (replicas and "
                    f"shards): write 1"
                )


def _model(job: _Configuration) -> str | _Sizes:
    """Return the preset or the sizes of the model."""
    name = job.get("model", "llama3")
    flavor = job.get("flavor", "debugmodel")
    for suffix in _SUFFIXES:
        flavor = flavor.removesuffix(suffix)
    if name not in _FLAVORS:
        raise ScenarioError(f"{job.path}: model.name: {shown(name)} is not supported: {nearest(name, list(_FLAVORS))}")
    if flavor not in _FLAVORS[name]:
        known = nearest(flavor, list(_FLAVORS[name]))
        raise ScenarioError(f"{job.path}: model.flavor: {shown(flavor)} of {name} is not supported: {known}")
    return _FLAVORS[name][flavor]


def _with_sequence(model: str | _Sizes, n_tokens: int) -> Transformer:
    sizes: object = model
    if isinstance(model, str):
        preset = expand("workload", model)
        sizes = preset["transformer"] if isinstance(preset, dict) else {}
    assert isinstance(sizes, dict)
    return Transformer.model_validate(sizes | {"sequence": n_tokens})


def _model_entries(
    job: _Configuration, model: str | _Sizes, n_tokens: int, sequence_source: str
) -> Iterator[WorkloadKey]:
    source = f"{job.where('model')}, {job.where('flavor')}"
    if isinstance(model, str):
        yield WorkloadKey("preset", model, source)
        yield WorkloadKey("transformer", {"sequence": n_tokens}, sequence_source)
    else:
        yield WorkloadKey("transformer", model | {"sequence": n_tokens}, f"{source}; {sequence_source}")


def _positive(job: _Configuration, meaning: str, default: int) -> int:
    value = job.get(meaning, default)
    if not 1 <= value <= MOST:
        raise ScenarioError(f"{job.path}: {job.where(meaning)}: {shown(value)}: write a whole number from 1 to {MOST}")
    return value


def _mesh(job: _Configuration) -> Mesh:
    """Return how ranks share copies; -1 shards among all that are there."""
    old = _degree(job, "data parallel")
    if job.get("data parallel type", "") == "ddp":
        return Mesh(old, 1, f"{job.path}: {job.where('data parallel')}")
    settings = _sharding(job)
    if job.where("data parallel") in job.values:
        return Mesh(1, old, f"{job.path}: {job.where('data parallel')}", settings)
    where = f"{job.path}: {job.where('replicate')}, {job.where('shard').rpartition('.')[2]}"
    return Mesh(_positive(job, "replicate", 1), _degree(job, "shard"), where, settings)


def _sharding(job: _Configuration) -> tuple[tuple[str, object], ...]:
    """Return the settings of FSDP.

    Until 2025-07, the embedding, the norm and the head were the root, and freed after the forward pass. Since then,
    the embedding is a unit, and so are norm and head. The last unit is kept unless the policy is `always`.
    """
    policy = job.get("reshard", "default")
    if policy not in ("default", "always", "never"):
        raise ScenarioError(f"{job.path}: {job.where('reshard')}: {shown(policy)}: write default, always or never")
    has_root = any(name in job.values for name in _OF_OLD_VERSIONS)
    settings: dict[str, object] = {"wrap": "blocks"} if has_root else {}
    if has_root or policy != "default":
        settings["reshard_after_forward"] = policy != "never"
    if policy == "default":
        settings["keep_last_unit"] = True
    stored = job.get("dtype", "float32")
    gathered = job.get("param dtype", "bfloat16")
    if gathered != stored:
        settings["param_dtype"] = gathered
        settings["reduce_dtype"] = job.get("reduce dtype", "float32")
    return tuple(settings.items())


def _degree(job: _Configuration, meaning: str) -> int | None:
    """Return a number of ranks; None for -1, all that are left."""
    value = job.get(meaning, -1)
    if value != -1 and not 1 <= value <= MOST:
        raise ScenarioError(f"{job.path}: {job.where(meaning)}: {shown(value)}: write -1, or 1 to {MOST}")
    return None if value == -1 else value


def _optimizer(job: _Configuration) -> str:
    name = job.get("optimizer", "AdamW")
    if name not in ("Adam", "AdamW"):
        raise ScenarioError(f"{job.path}: {job.where('optimizer')}: {shown(name)} is not supported: write AdamW")
    return "adamw"


def _is_compiled(job: _Configuration) -> bool:
    components = job.values.get("compile.components", ["model"])
    return job.get("compile", False) and isinstance(components, list) and "model" in components


def _precision(job: _Configuration) -> tuple[Precision, str]:
    """Return the precision of the passes, and what states it."""
    key = "param dtype" if job.get("dtype", "float32") == "float32" else "dtype"
    name = job.get(key, "bfloat16")
    if name not in _PRECISIONS:
        raise ScenarioError(f"{job.path}: {job.where(key)}: {shown(name)}: write bfloat16, float16 or float32")
    return _PRECISIONS[name], job.where(key)


def _recomputed(job: _Configuration, sizes: Transformer) -> tuple[float, str, tuple[str, ...]]:
    """Return the share of the blocks' forward pass that is computed again, what states it, and remarks."""
    mode = job.get("checkpointing", "selective")
    option = job.get("selective", "2")
    source = f"{job.where('checkpointing')}: {mode}"
    match mode:
        case "none":
            return 0.0, source, ()
        case "full":
            return 1.0, source, ()
        case "selective" if option == "op":
            return _share_of_every_second(sizes), f"{source}, every second matrix product", ()
        case "selective" if option.isdecimal() and int(option):
            n_layers = sizes.layers // int(option)
            return n_layers / sizes.layers, f"{source}, {n_layers} of {sizes.layers} layers", ()
        case "memory_budget":
            return 0.0, source, (f"{source}: what the compiler computes again is not known: write workload.recompute",)
        case _:
            raise ScenarioError(
                f"{job.path}: {source}, {shown(option)}: write none, full, or selective with op or a number"
            )


def _share_of_every_second(sizes: Transformer) -> float:
    """Return the share of a layer's FLOPs in every second matrix product: that of keys, attention output and MLP."""
    product_flops = 2.0 * sizes.sequence * sizes.hidden
    attention_flops = 4.0 * sizes.sequence**2 * sizes.query_width
    width = sizes.intermediate or 4 * sizes.hidden
    kept = product_flops * (sizes.query_width + sizes.key_width + 2 * width)
    again = product_flops * (sizes.key_width + sizes.query_width + width)
    return again / (kept + again + attention_flops)


def _activations(job: _Configuration, sizes: Transformer, share: float, precision: Precision) -> Iterator[WorkloadKey]:
    """Yield the bytes that the forward pass of a sample leaves, if a part of the blocks is computed again.

    The largest of what is there for a short time counts on top: what the loss needs, or what a block computes again.

    Source:
        Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, arXiv
        2205.05198, section 4.1, changed for flash attention, gated MLPs and fewer heads of keys. Which products stay:
        pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py.
    """
    if not 0 < share < 1:
        return
    item_nbytes = 2 if precision in ("fp16", "bf16") else 4
    is_by_layer = job.get("selective", "2") != "op"
    records = [Tensor.model_validate(each) for each in sizes.tensors()]
    left = {each.name: item_nbytes * each.activations + 4 * each.float32_activations for each in records}
    block = sum(nbytes for name, nbytes in left.items() if name.startswith("blocks.0."))
    stream = item_nbytes * sizes.sequence * sizes.hidden
    again = round(share * sizes.layers) if is_by_layer else sizes.layers
    stays = stream if is_by_layer else stream + _every_second_nbytes(sizes, item_nbytes)
    outside = sum(nbytes for name, nbytes in left.items() if not name.startswith("blocks."))
    of_loss = 4 * max(each.float32_activations for each in records)
    nbytes = (sizes.layers - again) * block + again * stays + outside - of_loss + max(of_loss, block - stays)
    what = f"without what {again} of {sizes.layers} layers compute again, as the backward pass begins"
    yield WorkloadKey("activation_size", f"{nbytes} B", what)


def _every_second_nbytes(sizes: Transformer, item_nbytes: int) -> int:
    """Return the bytes that stay of a layer, beside its input, if every second matrix product is computed again.

    Those of queries, values, the first of the MLP and its output stay, and attention: its output, and float32 numbers.
    """
    width = sizes.intermediate or 4 * sizes.hidden
    numbers = sizes.query_width + sizes.key_width + width + sizes.hidden + sizes.query_width
    return sizes.sequence * (item_nbytes * numbers + 4 * sizes.heads)


def _remarks(job: _Configuration) -> Iterator[str]:
    """Yield what the scenario leaves out."""
    values = job.values
    converters = str(values.get("model.converters", ""))
    if "float8" in converters or "mx" in converters or values.get("float8.enable_float8_linear"):
        yield "matrix products in 8 bits are not modelled: the passes take the time of bf16"
    elif values.get("training.fp8_linear"):
        yield "training.fp8_linear is not modelled: the passes take the time of bf16"
    if values.get("training.enable_cpu_offload"):
        yield "training.enable_cpu_offload is not modelled: parameters and optimizer stay on the GPU"
    if values.get("fault_tolerance.enable"):
        method = values.get("fault_tolerance.semi_sync_method", "none")
        yield f"fault_tolerance ({method}) is not modelled: add a schedule such as diloco-10 for replicas that average"
    if job.get("norm", "rmsnorm") not in ("rmsnorm", "fused_rmsnorm"):
        yield f"{job.where('norm')}: {values['model.norm_type']} counts as rmsnorm"
    if values.get("checkpoint.enable") or values.get("checkpoint.enable_checkpoint"):
        yield f"checkpoint is not written: add checkpoint: {{every: {values.get('checkpoint.interval', 500)}}}"
    unknown = sorted(name for name in values if name not in job.read and not _has_no_effect(name))
    if unknown:
        yield f"not known and not used: {', '.join(unknown)}"


def _has_no_effect(name: str) -> bool:
    is_listed = any(name == each or name.startswith(f"{each}.") for each in _WITHOUT_EFFECT)
    return is_listed or name.startswith(_WITHOUT_EFFECT_PREFIXES)
