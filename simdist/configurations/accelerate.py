"""A configuration of Hugging Face Accelerate: the YAML file that `accelerate config` writes.

It states machines, ranks and parallelism, and no model.

Source:
    huggingface/accelerate, src/accelerate/utils/dataclasses.py (FullyShardedDataParallelPlugin, ParallelismConfig),
    utils/fsdp_utils.py, commands/config/config_args.py: mixed precision gathers and reduces in the same type and keeps
    parameters in float32.
"""

from pathlib import Path

from simdist.configurations.deepspeed import described_deepspeed, read_deepspeed
from simdist.configurations.described import DescribedJob, Machines, Mesh, ScheduleSettings, WorkloadKey, combined_job
from simdist.configurations.keys import Keys
from simdist.configurations.strategies import DTYPES, mesh_of
from simdist.errors import ScenarioError
from simdist.settings.precision import Precision

_TYPES = {"NO": None, "MULTI_GPU": None, "FSDP": None, "DEEPSPEED": None}
_PRECISIONS: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
_POLICIES = {"TRANSFORMER_BASED_WRAP": None}
_PREFETCHES = {"BACKWARD_PRE": None, "BACKWARD_POST": None, "NO_PREFETCH": None}
_PARALLEL = ("tp_size", "cp_size", "sp_size")
_SECTIONS_WITHOUT_EFFECT = ("fp8_config", "ipex_config", "mpirun_config", "tpu_env")
_WITHOUT_EFFECT = (
    "debug",
    "downcast_bf16",
    "dynamo_config",
    "enable_cpu_affinity",
    "fsdp_config",
    "deepspeed_config",
    "gpu_ids",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_name",
    "tpu_zone",
    "commands",
    "command_file",
)
_FSDP_WITHOUT_EFFECT = (
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_forward_prefetch",
    "fsdp_ignored_modules",
    "fsdp_state_dict_type",
    "fsdp_sync_module_states",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_use_orig_params",
    "fsdp_min_num_params",
)


def described_accelerate(keys: Keys) -> DescribedJob:
    """Return the job that a configuration of Accelerate describes, without its model.

    Raises:
        ScenarioError: It has something that is not supported.
    """
    for key in ("use_cpu", "tpu_use_cluster"):
        if keys.flag(key, default=False):
            raise keys.refusal(key, "is not supported: jobs on GPUs are")
    if keys.word("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise keys.refusal("compute_environment", "is not supported: write LOCAL_MACHINE")
    _refuse_parallelism(keys)
    name = keys.word("mixed_precision", "no", _PRECISIONS)
    kind = keys.word("distributed_type", "NO", _TYPES)
    passes = keys.whole("gradient_accumulation_steps") if keys.has("gradient_accumulation_steps") else None
    job = DescribedJob(
        precision=_PRECISIONS[name],
        precision_source="mixed_precision",
        passes=passes,
        passes_source="gradient_accumulation_steps",
        machines=_machines(keys),
        is_compiled=_is_compiled(keys),
        remarks=("mixed_precision fp8 is not modelled: the passes take the time of bf16",) if name == "fp8" else (),
    )
    found = _with_parallelism(keys, kind, job, name)
    return combined_job(found, DescribedJob(remarks=tuple(_unknown(keys))))


def _with_parallelism(keys: Keys, kind: str, job: DescribedJob, precision: str) -> DescribedJob:
    where = f"{keys.file}: distributed_type"
    match kind:
        case "FSDP":
            return combined_job(job, _fsdp(keys, _PRECISIONS[precision]))
        case "DEEPSPEED":
            return _deepspeed(keys, job, precision)
        case "NO":
            return combined_job(job, DescribedJob(mesh=Mesh(1, 1, where)))
        case _:
            return combined_job(job, DescribedJob(mesh=Mesh(None, 1, where)))


def _refuse_parallelism(keys: Keys) -> None:
    """Refuse what splits a layer or a sequence."""
    section = keys.section("parallelism_config")
    for size in _PARALLEL:
        if section.whole(f"parallelism_config_{size}", 1) != 1:
            raise section.refusal(f"parallelism_config_{size}", "is not supported: only data parallelism is: write 1")
    section.skip(*(key for key in section.values if key.startswith(("parallelism_config_cp", "parallelism_config_sp"))))
    tensor = keys.section("tp_config")
    if tensor.whole("tp_size", 1) != 1:
        raise tensor.refusal("tp_size", "is not supported: only data parallelism is: write 1")


def _machines(keys: Keys) -> Machines | None:
    if not keys.has("num_processes"):
        return None
    n_ranks = keys.whole("num_processes", most=1_000_000)
    nodes = keys.whole("num_machines", 1, most=1_000_000)
    if n_ranks % nodes:
        raise keys.refusal("num_processes", f"is no multiple of num_machines {nodes}")
    return Machines(nodes, n_ranks // nodes, "num_machines, num_processes")


def _is_compiled(keys: Keys) -> bool:
    section = keys.section("dynamo_config")
    backend = section.word("dynamo_backend", keys.word("dynamo_backend", "NO"))
    section.skip_all()
    return backend.upper() != "NO"


def _fsdp(keys: Keys, precision: Precision) -> DescribedJob:
    section = keys.section("fsdp_config")
    if section.flag("fsdp_offload_params", default=False):
        raise section.refusal("fsdp_offload_params", "is not supported: parameters stay on the GPU: write false")
    section.word("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", _POLICIES)
    section.skip(*_FSDP_WITHOUT_EFFECT)
    settings: ScheduleSettings = ()
    if precision in DTYPES:
        settings = (("param_dtype", DTYPES[precision]), ("reduce_dtype", DTYPES[precision]))
    prefetch = section.word("fsdp_backward_prefetch", "BACKWARD_PRE", _PREFETCHES)
    slow = f"fsdp_backward_prefetch {prefetch} counts as BACKWARD_PRE"
    workload = [WorkloadKey("dtype", "float32", "Accelerate")]
    key = "fsdp_activation_checkpointing"
    if section.has(key):
        share = "100%" if section.flag(key, default=False) else "0%"
        workload.append(WorkloadKey("recompute", share, f"fsdp_config.{key}"))
    return DescribedJob(
        workload=tuple(workload),
        mesh=_mesh(keys, section, settings),
        remarks=() if prefetch == "BACKWARD_PRE" else (slow,),
    )


def _mesh(keys: Keys, section: Keys, settings: ScheduleSettings) -> Mesh:
    """Return the mesh: of version 1 by its strategy; of version 2 all ranks, or as `parallelism_config` says."""
    if section.whole("fsdp_version", 1, most=2) == 1:
        key = "fsdp_sharding_strategy"
        if not section.has(key) and isinstance(section.get("fsdp_reshard_after_forward"), str):
            key = "fsdp_reshard_after_forward"
        section.skip("fsdp_reshard_after_forward", "fsdp_sharding_strategy")
        return mesh_of(section, key, settings)
    section.skip("fsdp_sharding_strategy")
    freed = ("reshard_after_forward", section.flag("fsdp_reshard_after_forward", default=True))
    sizes = keys.section("parallelism_config")
    replicate = sizes.whole("parallelism_config_dp_replicate_size", 1)
    has_shards = sizes.has("parallelism_config_dp_shard_size")
    shard = sizes.whole("parallelism_config_dp_shard_size") if has_shards else None
    where = f"{keys.file}: {sizes.above[:-1] if sizes.values else 'distributed_type'}"
    return Mesh(replicate, shard, where, (("wrap", "blocks"), freed, *settings))


def _deepspeed(keys: Keys, job: DescribedJob, precision: str) -> DescribedJob:
    """Return the job with DeepSpeed's settings, of the file that they name or of this one."""
    section = keys.section("deepspeed_config")
    stated = {"bf16.enabled": precision == "bf16", "fp16.enabled": precision == "fp16"}
    name = section.word("deepspeed_config_file", "")
    if name:
        section.skip_all()
        path = Path(keys.file).parent / name
        if not path.is_file():
            raise ScenarioError(f"{keys.file}: {section.above}deepspeed_config_file: there is no file {path}")
        filled = stated if keys.has("mixed_precision") else {}
        theirs = read_deepspeed(path, filled=filled)
        ours = DescribedJob(machines=job.machines, is_compiled=job.is_compiled or None, remarks=job.remarks)
        return combined_job(theirs, ours)
    zero: dict[str, object] = {"stage": section.whole("zero_stage", 2, least=0, most=3)}
    for part in ("optimizer", "param"):
        device = section.word(f"offload_{part}_device", "none")
        if device != "none":
            raise section.refusal(f"offload_{part}_device", "is not supported: write none")
    values: dict[str, object] = {key.partition(".")[0]: {"enabled": value} for key, value in stated.items()}
    values |= {"zero_optimization": zero}
    if section.has("gradient_accumulation_steps"):
        values["gradient_accumulation_steps"] = section.whole("gradient_accumulation_steps")
    section.skip_all()
    theirs = described_deepspeed(Keys(keys.file, values))
    return combined_job(theirs, DescribedJob(machines=job.machines, is_compiled=job.is_compiled, remarks=job.remarks))


def _unknown(keys: Keys) -> list[str]:
    keys.skip(*_WITHOUT_EFFECT)
    for name in _SECTIONS_WITHOUT_EFFECT:
        if isinstance(keys.values.get(name), dict):
            keys.section(name).skip_all()
    unknown = [each for each in keys.unread() if keys.values.get(each) not in ({}, [], "")]
    return [f"not known and not used: {', '.join(unknown)}"] if unknown else []
