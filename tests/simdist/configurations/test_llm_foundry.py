"""Jobs of llm-foundry: sizes of MPT, batch and FSDP, and what is refused with its key."""

from pathlib import Path

import pytest

from simdist.configurations.described import DescribedJob
from simdist.drafts.described_jobs import read_described_job, workload_of
from simdist.errors import ScenarioError

MPT_7B = """
variables:
  max_seq_len: 2048
  data_remote:
max_seq_len: ${variables.max_seq_len}
model:
  name: mpt_causal_lm
  d_model: 4096
  n_heads: 32
  n_layers: 32
  expansion_ratio: 4
  max_seq_len: ${variables.max_seq_len}
  vocab_size: 50432
  no_bias: true
  attn_config: {alibi: true, attn_impl: flash}
train_loader: {dataset: {max_seq_len: "${variables.max_seq_len}"}}
optimizer: {name: decoupled_adamw, lr: 1.2e-4}
global_train_batch_size: 1024
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config:
  sharding_strategy: FULL_SHARD
  mixed_precision: PURE
  activation_checkpointing: true
  activation_cpu_offload: false
"""
LLAMA = '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, ' + (
    '"num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 4096}'
)


def job(folder: Path, text: str, *others: Path) -> DescribedJob:
    path = folder / "mpt.yaml"
    path.write_text(text)
    return read_described_job([path, *others], sequence=None)


def test_a_job_states_model_batch_and_mesh(tmp_path):
    found = job(tmp_path, MPT_7B)
    workload = workload_of(found, "mpt.yaml")
    assert sum(workload.tensor_counts) == 6_649_286_656  # as the checkpoint MPT-7B
    assert (workload.sample_nbytes, workload.recompute, workload.optimizer) == (2048 * 16, 1, "adamw")
    assert (found.batch_size, found.samples_per_step, found.precision) == (8, 1024, "bf16")
    assert found.mesh is not None
    assert found.mesh.settings == (("wrap", "blocks"), ("param_dtype", "bfloat16"), ("reduce_dtype", "bfloat16"))
    assert found.fitting_nodes(16, 8) == 16
    assert found.fitting_nodes(100, 8) == 16


def test_a_job_without_checkpointing_says_so_over_a_preset_that_has_it(tmp_path):
    found = job(tmp_path, MPT_7B.replace("activation_checkpointing: true", "activation_checkpointing: false"))
    assert {each.key: each.value for each in found.workload}["recompute"] == "0%"


@pytest.mark.parametrize(("mixed", "dtypes"), [("DEFAULT", ("bfloat16", "float32")), ("FULL", ())])
def test_mixed_precision_says_in_which_types_is_gathered_and_reduced(tmp_path, mixed, dtypes):
    mesh = job(tmp_path, MPT_7B.replace("PURE", mixed)).mesh
    assert mesh is not None
    assert tuple(value for key, value in mesh.settings if key.endswith("dtype")) == dtypes


def test_learnt_positions_biases_and_few_heads_of_keys_are_counted(tmp_path):
    text = MPT_7B.replace("alibi: true", "attn_type: grouped_query_attention, kv_n_heads: 8").replace("no_bias", "x")
    counts = {each.name: each.count for each in workload_of(job(tmp_path, text), "mpt.yaml").tensors}
    assert counts["positions"] == 2048 * 4096
    assert counts["blocks.0.attention.in.weight"] == (4096 + 2 * 1024) * 4096
    assert counts["blocks.0.attention.in.bias"] == 4096 + 2 * 1024


def test_a_model_of_hugging_face_is_in_a_file_of_its_own_and_takes_the_sequence(tmp_path):
    (tmp_path / "config.json").write_text(LLAMA)
    text = MPT_7B.replace("name: mpt_causal_lm", "name: hf_causal_lm")
    assert not job(tmp_path, text).has_model
    found = job(tmp_path, text, tmp_path / "config.json")
    assert workload_of(found, "both").sample_nbytes == 2048 * 16
    [source] = [each.source for each in found.workload if each.key == "transformer"]
    assert source == "config.json; sequence: max_seq_len"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("mpt_causal_lm", "hf_t5", "model.name: 'hf_t5' is not supported"),
        ("n_layers: 32", "n_layers: 0", "model.n_layers: 0: write a whole number from 1 to 1000"),
        ("d_model: 4096", "d_model: 1e30", "model.d_model: 1e+30: write a whole number"),
        ("expansion_ratio: 4", "expansion_ratio: 0.3333", "model.expansion_ratio: 0.3333: gives no whole width"),
        ("expansion_ratio: 4", "expansion_ratio: -4", "model.expansion_ratio: -4: gives no whole width"),
        ("no_bias: true", "ffn_config: {ffn_type: mb_dmoe}", "model.ffn_config.ffn_type: 'mb_dmoe' is not supported"),
        ("no_bias: true", "peft_config: {r: 8}", "model.peft_config is not supported: leave it out"),
        ("cpu_offload: false", "cpu_offload: true", "fsdp_config.activation_cpu_offload: true is not supported"),
        ("FULL_SHARD", "FULL", "fsdp_config.sharding_strategy: 'FULL' is not supported"),
        ("microbatch_size: 8", "microbatch_size: 0", "device_train_microbatch_size: 0: write a whole number from 1"),
        ("variables.max_seq_len}\nmodel", "variables.none}\nmodel", "max_seq_len: '${variables.none}': write a whole"),
    ],
)
def test_what_is_not_supported_is_told_with_the_key(tmp_path, old, new, told):
    assert old in MPT_7B
    with pytest.raises(ScenarioError) as caught:
        job(tmp_path, MPT_7B.replace(old, new))
    assert told in str(caught.value)


def test_names_that_lead_to_themselves_end(tmp_path):
    with pytest.raises(ScenarioError, match="max_seq_len: "):
        job(tmp_path, MPT_7B.replace("max_seq_len: 2048", "max_seq_len: ${variables.max_seq_len}", 1))
