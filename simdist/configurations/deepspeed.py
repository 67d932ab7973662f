"""A configuration of DeepSpeed: its JSON file. It states how a model is trained, and no model.

    stage 0     gradients are all-reduced after the backward pass
    stage 1, 2  gradients are reduce-scattered, each rank updates its slice, and slices are gathered
    stage 3     parameters are sharded, too, and gathered for each pass, as with FSDP

A value `auto` is filled in by the Trainer of Hugging Face. It counts as absent here.

Source:
    deepspeedai/DeepSpeed, runtime/config.py, runtime/zero/config.py, runtime/engine.py; Wang et al., ZeRO++, arXiv
    2306.10209 (hpZ); Zhang et al., MiCS, arXiv 2205.00119.
"""

from collections.abc import Mapping
from pathlib import Path

from simdist.configurations.described import GUESS, DescribedJob, Mesh, ScheduleSettings, WorkloadKey
from simdist.configurations.huggingface import json_of
from simdist.configurations.keys import Keys
from simdist.configurations.strategies import DTYPES
from simdist.settings.precision import Precision

_AUTO = "auto"
_OPTIMIZERS = {"adam": None, "adamw": None, "fusedadam": None}
_BUCKET = 500_000_000  # elements
_REDUCED_NBYTES = {"bf16": 2, "fp16": 2}
_COMMUNICATED = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
_ZERO_WITHOUT_EFFECT = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "elastic_checkpoint",
    "gather_16bit_weights_on_model_save",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "max_live_parameters",
    "max_reuse_distance",
    "memory_efficient_linear",
    "mics_hierarchical_params_gather",
    "overlap_comm",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
)
_WITHOUT_EFFECT = (
    "gradient_clipping",
    "gradient_predivide_factor",
    "prescale_gradients",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "dump_state",
)
_SECTIONS_WITHOUT_EFFECT = (
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "csv_monitor",
    "data_types",
    "flops_profiler",
    "scheduler",
    "tensorboard",
    "wandb",
)
#: Sections that change what is computed or sent, and are not modelled.
_REFUSED_SECTIONS = ("compression_training", "curriculum_learning", "progressive_layer_drop", "sparse_attention")


def read_deepspeed(path: Path, *, filled: Mapping[str, object] | None = None) -> DescribedJob:
    """Read a configuration of DeepSpeed.

    Args:
        path: The file.
        filled: Values of keys that are `auto`, by path.

    Raises:
        ScenarioError: It cannot be read, or has something that is not supported.
    """
    return described_deepspeed(Keys(str(path), _filled(json_of(path), filled or {}, "")))


def _filled(values: Mapping[str, object], filled: Mapping[str, object], above: str) -> dict[str, object]:
    """Return keys without those that are `auto` and not filled in."""
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found[key] = _filled(value, filled, f"{above}{key}.")
        else:
            found[key] = filled.get(f"{above}{key}") if value == _AUTO else value
    return found


def described_deepspeed(keys: Keys) -> DescribedJob:
    """Return the job that keys of DeepSpeed describe, without its model; ScenarioError as `read_deepspeed`."""
    zero = keys.section("zero_optimization")
    stage = zero.whole("stage", 0, least=0, most=3)
    _refuse(keys, zero)
    precision, source = _precision(keys)
    optimizer = keys.section("optimizer")
    name = optimizer.word("type", "AdamW")
    if name.lower() not in _OPTIMIZERS:
        raise optimizer.refusal("type", "is not supported: write AdamW")
    workload = [WorkloadKey("optimizer", "adamw", "optimizer.type" if optimizer.has("type") else GUESS)]
    if precision in DTYPES and stage == 0:
        workload.append(WorkloadKey("dtype", DTYPES[precision], f"{source}, and zero_optimization.stage 0"))
    else:
        workload.append(WorkloadKey("dtype", "float32", f"DeepSpeed's copy for the optimizer; {source}"))
    optimizer.skip_all()
    return DescribedJob(
        workload=tuple(workload),
        precision=precision,
        precision_source=source,
        batch_size=_whole(keys, "train_micro_batch_size_per_gpu"),
        batch_size_source="train_micro_batch_size_per_gpu",
        samples_per_step=_whole(keys, "train_batch_size"),
        samples_source="train_batch_size",
        passes=_whole(keys, "gradient_accumulation_steps"),
        passes_source="gradient_accumulation_steps",
        mesh=_mesh(keys, zero, stage, precision),
        is_compiled=_is_compiled(keys),
        remarks=tuple(_unknown(keys, zero, stage)),
    )


def _whole(keys: Keys, key: str) -> int | None:
    return keys.whole(key, most=1_000_000_000) if keys.has(key) else None


def _refuse(keys: Keys, zero: Keys) -> None:
    """Refuse what moves states off the GPU, splits layers or sends numbers in fewer bits."""
    for part in ("offload_optimizer", "offload_param"):
        section = zero.section(part)
        if section.word("device", "none") != "none":
            raise section.refusal("device", "is not supported: states stay on the GPU: write none")
        section.skip_all()
    for key in ("cpu_offload", "cpu_offload_params", "zero_quantized_weights", "zero_quantized_gradients"):
        if zero.flag(key, default=False):
            raise zero.refusal(key, "is not supported: write false")
    tensor = keys.section("tensor_parallel")
    for section, key in ((tensor, "autotp_size"), (keys, "sequence_parallel_size")):
        if section.whole(key, 1, least=0) > 1:
            raise section.refusal(key, "is not supported: only data parallelism is: write 1")
    tensor.skip_all()
    for name in _REFUSED_SECTIONS:
        section = keys.section(name)
        if section.values and section.flag("enabled", default=True):
            raise keys.refusal(name, "is not supported: leave it out")
        section.skip_all()


def _precision(keys: Keys) -> tuple[Precision, str]:
    """Return the precision of the passes, and what states it; `auto` and nothing filled in is a guess."""
    known: dict[str, Precision] = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    sections = {name: keys.section(name) for name in known}
    chosen = [name for name, section in sections.items() if section.flag("enabled", default=False)]
    is_auto = any("enabled" in each.values and not each.has("enabled") for each in sections.values())
    for section in sections.values():
        section.skip_all()
    if chosen:
        return known[chosen[0]], f"{chosen[0]}.enabled"
    return ("bf16", f"{GUESS}: bf16.enabled is auto") if is_auto else ("fp32", "neither bf16 nor fp16")


def _mesh(keys: Keys, zero: Keys, stage: int, precision: Precision) -> Mesh:
    where = f"{keys.file}: zero_optimization.stage"
    communicated = keys.word("communication_data_type", precision, _COMMUNICATED)
    types: ScheduleSettings = ()
    if precision in DTYPES:
        types = (("param_dtype", DTYPES[precision]), ("reduce_dtype", _COMMUNICATED[communicated]))
    n_hpz = zero.whole("zero_hpz_partition_size", 1)
    n_mics = zero.whole("mics_shard_size", -1, least=-1)
    n_elements = zero.whole("reduce_bucket_size", _BUCKET, most=10**12)
    if stage == 3:
        freed = ("reshard_after_forward", n_hpz if n_hpz > 1 else True)
        return Mesh(1 if n_mics < 1 else None, None if n_mics < 1 else n_mics, where, (freed, *types))
    if stage == 0:
        return Mesh(None, 1, where, whole=(("bucket_size", "null"),))
    size = f"{n_elements * _REDUCED_NBYTES.get(precision, 4)} B"
    shared: ScheduleSettings = (("shared_update", True), ("first_bucket_size", size), ("bucket_size", size))
    return Mesh(None, 1, where, whole=(*shared, *types[:1]))


def _is_compiled(keys: Keys) -> bool:
    section = keys.section("compile")
    is_on = bool(section.values) and not section.flag("disable", default=False)
    section.skip_all()
    return is_on


def _unknown(keys: Keys, zero: Keys, stage: int) -> list[str]:
    """Return remarks on what is modelled otherwise, and on keys that are not known."""
    keys.skip(*_WITHOUT_EFFECT)
    zero.skip(*_ZERO_WITHOUT_EFFECT)
    for name in _SECTIONS_WITHOUT_EFFECT:
        keys.section(name).skip_all()
    remarks = []
    if stage == 3:
        remarks.append("zero_optimization.stage 3: blocks are gathered one ahead, as FSDP does, not by bytes")
    if unknown := keys.unread():
        remarks.append(f"not known and not used: {', '.join(unknown)}")
    return remarks
