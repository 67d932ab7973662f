"""Configurations of Accelerate: machines, mesh and types, and what is refused with its key."""

from pathlib import Path

import pytest

from simdist.configurations.described import DescribedJob, Machines
from simdist.drafts.described_jobs import read_described_job
from simdist.errors import ScenarioError

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_use_orig_params: true
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 16
tpu_env: []
use_cpu: false
"""
FSDP2 = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_activation_checkpointing: true}
mixed_precision: 'no'
num_processes: 8
parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4}
dynamo_config: {dynamo_backend: INDUCTOR}
"""
DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 4, offload_optimizer_device: none}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
BF16 = (("param_dtype", "bfloat16"), ("reduce_dtype", "bfloat16"))


def job(folder: Path, text: str) -> DescribedJob:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return read_described_job([path], sequence=None)


def keys(found: DescribedJob) -> dict[str, object]:
    return {each.key: each.value for each in found.workload}


def test_fsdp_states_machines_mesh_and_types(tmp_path):
    found = job(tmp_path, FSDP)
    assert found.machines == Machines(2, 8, "num_machines, num_processes")
    assert found.precision == "bf16"
    assert found.mesh is not None
    assert (found.mesh.replicate, found.mesh.shard) == (1, None)
    assert found.mesh.settings == (("wrap", "blocks"), *BF16)
    assert keys(found) == {"dtype": "float32"}
    assert (found.has_model, found.is_compiled, found.remarks) == (False, False, ())


@pytest.mark.parametrize(
    ("strategy", "shard", "is_kept"),
    [
        ("FULL_SHARD", 16, False),
        ("1", 16, False),
        ("SHARD_GRAD_OP", 16, True),
        ("NO_SHARD", 1, False),
        ("HYBRID_SHARD", 8, False),
        ("HYBRID_SHARD_ZERO2", 8, True),
        ("5", 8, True),
    ],
)
def test_each_strategy_of_fsdp_shares_copies_among_its_ranks(tmp_path, strategy, shard, is_kept):
    mesh = job(tmp_path, FSDP.replace("FULL_SHARD", strategy)).mesh
    assert mesh is not None
    assert mesh.shard_among(16, 8) == shard
    assert (("reshard_after_forward", False) in mesh.settings) == is_kept


def test_fsdp2_has_a_mesh_of_replicas_and_says_when_units_are_freed(tmp_path):
    found = job(tmp_path, FSDP2)
    assert found.mesh is not None
    assert (found.mesh.replicate, found.mesh.shard) == (2, 4)
    assert found.mesh.settings == (("wrap", "blocks"), ("reshard_after_forward", False))
    assert keys(found)["recompute"] == "100%"
    assert found.is_compiled


def test_deepspeed_inside_it_is_read_as_deepspeed(tmp_path):
    found = job(tmp_path, DEEPSPEED)
    assert found.mesh is not None
    assert found.mesh.settings == (("reshard_after_forward", True), *BF16)
    assert (found.passes, found.precision) == (4, "bf16")
    assert found.machines == Machines(1, 8, "num_machines, num_processes")


def test_a_file_of_deepspeed_gets_the_precision_for_its_auto_values(tmp_path):
    (tmp_path / "zero.json").write_text('{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}')
    text = DEEPSPEED.replace("zero_stage: 3", "deepspeed_config_file: zero.json").replace("bf16", "fp16")
    assert (job(tmp_path, text).precision, job(tmp_path, text).precision_source) == ("fp16", "fp16.enabled")


def test_plain_data_parallelism_has_a_copy_on_every_rank(tmp_path):
    found = job(tmp_path, FSDP.replace("type: FSDP", "type: MULTI_GPU"))
    assert found.mesh is not None
    assert found.mesh.shard_among(16, 8) == 1


def test_unknown_keys_are_remarked(tmp_path):
    [remark] = job(tmp_path, FSDP + "brand_new: 3\n").remarks
    assert remark.endswith("not known and not used: brand_new")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("offload_params: false", "offload_params: true", "fsdp_config.fsdp_offload_params: true is not supported"),
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "fsdp_auto_wrap_policy: 'SIZE_BASED_WRAP' is not supported"),
        ("FULL_SHARD", "FULLSHARD", "fsdp_sharding_strategy: 'FULLSHARD' is not supported: did you mean 'FULL_SHARD'?"),
        ("type: FSDP", "type: MEGATRON_LM", "distributed_type: 'MEGATRON_LM' is not supported"),
        ("use_cpu: false", "use_cpu: true", "use_cpu: true is not supported"),
        ("LOCAL_MACHINE", "AMAZON_SAGEMAKER", "compute_environment: 'AMAZON_SAGEMAKER' is not supported"),
        ("num_processes: 16", "num_processes: 0", "num_processes: 0: write a whole number from 1 to 1000000"),
        ("num_processes: 16", "num_processes: 15", "num_processes: 15 is no multiple of num_machines 2"),
        ("num_processes: 16", "num_processes: .nan", "num_processes: '.nan': write a whole number"),
        ("mixed_precision: bf16", "mixed_precision: int8", "mixed_precision: 'int8' is not supported"),
        ("use_cpu", "parallelism_config: {parallelism_config_tp_size: 2}\nuse_cpu", "tp_size: 2 is not supported"),
    ],
)
def test_what_is_not_supported_is_told_with_the_key(tmp_path, old, new, told):
    assert old in FSDP
    with pytest.raises(ScenarioError) as caught:
        job(tmp_path, FSDP.replace(old, new))
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "accelerate.yaml"))
