"""Configurations of DeepSpeed: stages, batches, values that are `auto`, and what is refused with its key."""

import json
from pathlib import Path

import pytest

from simdist.configurations.described import DescribedJob
from simdist.configurations.huggingface import read_config
from simdist.drafts.described_jobs import read_described_job, schedules_of
from simdist.errors import ScenarioError

ZERO3 = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_param": {"device": "none"},
    },
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 64,
    "gradient_clipping": 1.0,
}
AUTO = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}


def job(folder: Path, config: object) -> DescribedJob:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return read_described_job([path], sequence=None)


def changed(**zero: object) -> dict[str, object]:
    stage = {"stage": 3} | zero
    return ZERO3 | {"zero_optimization": stage}


def own_schedule(folder: Path, config: object, *, nodes: int = 2, per_node: int = 8) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(GPT2))
    (folder / "ds.json").write_text(json.dumps(config))
    found = read_described_job([folder / "ds.json", path], sequence=None)
    assert found.workload[0].key == read_config(path).workload[0].key
    return schedules_of(found, "ds.json", nodes, per_node)[0]


def test_batches_and_passes_tell_the_number_of_ranks(tmp_path):
    found = job(tmp_path, ZERO3)
    assert (found.batch_size, found.passes, found.samples_per_step, found.n_ranks) == (4, 2, 64, 8)
    assert found.micro_batches(4, 8) == (2, "train_batch_size")
    with pytest.raises(ScenarioError, match="train_batch_size: 64 sequences are 4 passes of 16, not gradient_acc"):
        found.micro_batches(4, 4)


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        (ZERO3, "{kind: fsdp, reshard_after_forward: true, param_dtype: bfloat16, reduce_dtype: bfloat16}"),
        (
            changed(zero_hpz_partition_size=8),
            "{kind: fsdp, reshard_after_forward: 8, param_dtype: bfloat16, reduce_dtype: bfloat16}",
        ),
        (
            changed(mics_shard_size=4),
            "{kind: hsdp, shard: 4, reshard_after_forward: true, param_dtype: bfloat16, reduce_dtype: bfloat16}",
        ),
        (changed(stage=0), '{kind: sync, bucket_size: "null"}'),
        (
            changed(stage=1, reduce_bucket_size=1e6),
            "{kind: sync, shared_update: true, first_bucket_size: 2000000 B, bucket_size: 2000000 B, "
            "param_dtype: bfloat16}",
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000}},
            "{kind: sync, shared_update: true, first_bucket_size: 4000000 B, bucket_size: 4000000 B}",
        ),
    ],
)
def test_each_stage_is_a_schedule(tmp_path, config, schedule):
    assert own_schedule(tmp_path, config).replace('"null"', "null") == schedule.replace('"null"', "null")


def test_values_that_are_auto_are_not_stated(tmp_path):
    found = job(tmp_path, AUTO)
    assert (found.batch_size, found.passes, found.samples_per_step, found.n_ranks) == (None, None, None, None)
    assert (found.precision, found.precision_source) == ("bf16", "guess: bf16.enabled is auto")
    assert found.batch_of(16) == (1, "guess")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            changed(offload_optimizer={"device": "cpu"}),
            "zero_optimization.offload_optimizer.device: 'cpu' is not suppo",
        ),
        (changed(offload_param={"device": "nvme"}), "zero_optimization.offload_param.device: 'nvme' is not supported"),
        (changed(cpu_offload=True), "zero_optimization.cpu_offload: true is not supported"),
        (changed(zero_quantized_weights=True), "zero_optimization.zero_quantized_weights: true is not supported"),
        (changed(stage=4), "zero_optimization.stage: 4: write a whole number from 0 to 3"),
        (changed(reduce_bucket_size=-1), "reduce_bucket_size: -1: write a whole number from 1"),
        (changed(reduce_bucket_size=float("inf")), "reduce_bucket_size: inf: write a whole number from 1"),
        (ZERO3 | {"train_batch_size": 0}, "train_batch_size: 0: write a whole number from 1"),
        (ZERO3 | {"train_micro_batch_size_per_gpu": 1.5}, "train_micro_batch_size_per_gpu: 1.5: write a whole number"),
        (ZERO3 | {"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: 'OneBitAdam' is not supported: write AdamW"),
        (ZERO3 | {"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size: 4 is not supported"),
        (ZERO3 | {"compression_training": {"weight_quantization": {}}}, "compression_training is not supported"),
        (ZERO3 | {"bf16": []}, "bf16: []: write keys below it"),
    ],
)
def test_what_is_not_supported_is_told_with_the_key(tmp_path, config, told):
    with pytest.raises(ScenarioError) as caught:
        job(tmp_path, config)
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "ds.json"))


def test_unknown_keys_are_remarked(tmp_path):
    assert job(tmp_path, AUTO | {"brand": {"new": 3}}).remarks[-1].endswith("not known and not used: brand.new")
