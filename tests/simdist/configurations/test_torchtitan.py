"""Jobs of torchtitan: the same job in the key names of each version, and what is refused or remarked."""

from pathlib import Path

import pytest

from simdist.configurations.described import DescribedJob, Mesh
from simdist.configurations.torchtitan import read_job
from simdist.drafts.described_jobs import schedules_of, workload_of
from simdist.errors import ScenarioError

JOB_OF_2024_04 = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
norm_type = "fused_rmsnorm"
[training]
batch_size = 2
seq_len = 4096
data_parallel_degree = 16
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
fp8_linear = ""
compile = true
dataset = "c4"
[activation_checkpoint]
mode = "full"
"""
JOB_OF_2025_02 = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 2
seq_len = 4096
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 16
compile = true
[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 1
enable_async_tensor_parallel = false
[activation_checkpoint]
mode = "full"
"""
JOB_OF_2026_02 = """
[model]
name = "llama3"
flavor = "8B_flex"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 16
fsdp_reshard_after_forward = "default"
expert_parallel_degree = 1
[compile]
enable = true
components = ["model", "loss"]
[activation_checkpoint]
mode = "full"
[quantize.linear.float8]
filter_fqns = ["output"]
"""


def read(folder: Path, text: str) -> DescribedJob:
    path = folder / "job.toml"
    path.write_text(text)
    return read_job(path)


@pytest.mark.parametrize("text", [JOB_OF_2024_04, JOB_OF_2025_02, JOB_OF_2026_02], ids=["2024", "2025", "2026"])
def test_versions_name_keys_differently(tmp_path, text):
    job = read(tmp_path, text)
    workload = workload_of(job, "job.toml")
    assert sum(workload.tensor_counts) == 8_030_261_248
    assert workload.sample_nbytes == 16 * 4096
    assert workload.recompute == 1
    assert (job.batch_size, job.is_compiled, job.precision, job.remarks) == (2, True, "bf16", ())
    assert job.mesh is not None
    assert (job.mesh.replicate, job.mesh.shard, job.mesh.world_size) == (1, 16, 16)


@pytest.mark.parametrize(
    ("model", "flavor", "n_parameters"),
    [
        ("llama2", "7B", 6_738_415_616),
        ("llama2", "13B", 13_015_864_320),
        ("llama2", "70B", 68_976_648_192),
        ("llama3", "70B", 70_553_706_496),
        ("llama3", "405B", 405_853_388_800),
        ("qwen3", "0.6B", 596_049_920),
        ("qwen3", "8B", 8_190_735_360),
        ("qwen3", "32B", 32_762_123_264),
    ],
)
def test_flavors_have_the_published_parameters(tmp_path, model, flavor, n_parameters):
    job = read(tmp_path, f'[model]\nname = "{model}"\nflavor = "{flavor}"\n')
    assert sum(workload_of(job, "job.toml").tensor_counts) == n_parameters


@pytest.mark.parametrize(
    ("section", "share"),
    [
        ('mode = "none"', 0),
        ('mode = "full"', 1),
        ('mode = "selective"\nselective_ac_option = "2"', 16 / 32),
        ('mode = "selective"\nselective_ac_option = "5"', 6 / 32),
        # of seven matrix products, those of keys, attention output and one of the MLP; attention itself is kept
        (
            'mode = "selective"\nselective_ac_option = "op"',
            (1024 + 4096 + 14336) / (4096 + 2 * 1024 + 4096 + 3 * 14336 + 2 * 2048),
        ),
    ],
)
def test_activation_checkpointing_is_a_share_of_the_forward_pass(tmp_path, section, share):
    job = read(tmp_path, f'[model]\nname = "llama3"\nflavor = "8B"\n[activation_checkpoint]\n{section}\n')
    assert workload_of(job, "job.toml").recompute == pytest.approx(share, abs=5e-5)


PER_LOGIT = 12 * 128_256
BLOCK = 2 * (6 * 4096 + 2 * 1024 + 4 * 14336) + 4 * 32
EVERY_SECOND = 2 * (4 * 4096 + 1024 + 14336) + 4 * 32


@pytest.mark.parametrize(
    ("option", "per_token"),
    [
        ("op", 32 * EVERY_SECOND + 2 * 2 * 4096 + PER_LOGIT),
        ("2", 16 * BLOCK + 16 * 2 * 4096 + 2 * 2 * 4096 + PER_LOGIT),
        ("5", 26 * BLOCK + 6 * 2 * 4096 + 2 * 2 * 4096 + PER_LOGIT),
    ],
)
def test_what_stays_under_selective_checkpointing_is_counted(tmp_path, option, per_token):
    """Of Llama 3 8B in bf16: per block, or its input; outside, two inputs and what the loss needs."""
    text = f'mode = "selective"\nselective_ac_option = "{option}"'
    job = read(tmp_path, f'[model]\nname = "llama3"\nflavor = "8B"\n[activation_checkpoint]\n{text}\n')
    workload = workload_of(job, "job.toml")
    assert workload.activation_nbytes == 2048 * per_token
    assert sum(workload.activations.kept_nbytes) == pytest.approx(2048 * per_token)


def meshes(replicate: int, shard: int) -> str:
    return f"[parallelism]\ndata_parallel_replicate_degree = {replicate}\ndata_parallel_shard_degree = {shard}\n"


@pytest.mark.parametrize(
    ("text", "world_size", "shard"),
    [
        (meshes(1, -1), 64, 64),
        (meshes(4, -1), 64, 16),
        (meshes(4, 16), 64, 16),
        (meshes(64, 1), 64, 1),
        ("[training]\ndata_parallel_degree = -1\n", 24, 24),
        ('[training]\ndata_parallel_degree = -1\ndata_parallel_type = "ddp"\n', 24, 1),
    ],
)
def test_the_mesh_says_how_many_ranks_share_a_replica(tmp_path, text, world_size, shard):
    mesh = read(tmp_path, text).mesh
    assert mesh is not None
    assert mesh.shard_among(world_size, 8) == shard


def test_ranks_that_do_not_form_the_mesh_are_refused(tmp_path):
    mesh = read(tmp_path, meshes(3, -1)).mesh
    assert mesh is not None
    with pytest.raises(ScenarioError) as error:
        mesh.shard_among(64, 8)
    assert "data_parallel_shard_degree: 3 replicas do not fit 64 ranks: change --nodes" in str(error.value)
    with pytest.raises(ScenarioError, match="2 replicas, each on 8 ranks, do not fit 64 ranks"):
        Mesh(2, 8).shard_among(64, 8)


MIXED = "param_dtype: bfloat16, reduce_dtype: float32}"
PLAIN = '[training]\nmixed_precision_param = "float32"\n'


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (meshes(64, 1), "sync"),
        (meshes(1, -1), "{kind: fsdp, keep_last_unit: true, " + MIXED),
        (meshes(1, -1) + PLAIN, "{kind: fsdp, keep_last_unit: true}"),
        (meshes(4, -1), "{kind: hsdp, shard: 16, keep_last_unit: true, " + MIXED),
        (
            meshes(4, 16) + 'fsdp_reshard_after_forward = "never"\n',
            "{kind: hsdp, shard: 16, reshard_after_forward: false, " + MIXED,
        ),
        (
            meshes(4, 16) + 'fsdp_reshard_after_forward = "always"\n' + PLAIN,
            "{kind: hsdp, shard: 16, reshard_after_forward: true}",
        ),
        (
            "[training]\nbatch_size = 1\ndata_parallel_degree = -1\n",
            "{kind: fsdp, wrap: blocks, reshard_after_forward: true, keep_last_unit: true, " + MIXED,
        ),
    ],
)
def test_the_mesh_becomes_a_schedule(tmp_path, text, schedule):
    own, *rivals = schedules_of(read(tmp_path, text), "job.toml", 8, 8)
    assert own == schedule
    assert rivals


@pytest.mark.parametrize(("global_size", "passes"), [(-1, 1), (128, 1), (512, 4)])
def test_the_global_batch_is_a_number_of_passes(tmp_path, global_size, passes):
    job = read(tmp_path, f"[training]\nlocal_batch_size = 2\nglobal_batch_size = {global_size}\n")
    assert job.micro_batches(2, 64)[0] == passes


def test_a_global_batch_of_no_whole_number_of_passes_is_refused(tmp_path):
    job = read(tmp_path, "[training]\nlocal_batch_size = 2\nglobal_batch_size = 100\n")
    with pytest.raises(ScenarioError, match=r"training.global_batch_size: 100 sequences are no multiple of 128"):
        job.micro_batches(2, 64)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[parallelism]\ntensor_parallel_degree = 8\n", "parallelism.tensor_parallel_degree: 8: only data parallelism"),
        ("[experimental]\npipeline_parallel_degree = 2\n", "experimental.pipeline_parallel_degree: 2: only"),
        ("[training]\ntensor_parallel_degree = 2\n", "training.tensor_parallel_degree: 2: only"),
        ("[parallelism]\ncontext_parallel_degree = 2\n", "parallelism.context_parallel_degree: 2: only"),
        ("[parallelism]\nexpert_parallel_degree = 8\n", "parallelism.expert_parallel_degree: 8: only"),
        ('[model]\nname = "llama4"\n', "model.name: 'llama4' is not supported: did you mean 'llama3'?"),
        ('[model]\nname = "qwen3"\nflavor = "30B-A3B"\n', "model.flavor: '30B-A3B' of qwen3 is not supported"),
        ('[training]\nseq_len = "8192"\n', "training.seq_len: '8192' is not a whole number"),
        ("[training]\nseq_len = 0\n", "training.seq_len: 0: write a whole number from 1 to 10000000"),
        ("[training]\nseq_len = -8192\n", "training.seq_len: -8192: write a whole number from 1"),
        ("[training]\nseq_len = 1_000_000_000_000\n", "training.seq_len: 1000000000000: write a whole number from 1"),
        ("[training]\nseq_len = nan\n", "training.seq_len: nan is not a whole number"),
        ("[training]\nlocal_batch_size = 0\n", "training.local_batch_size: 0: write a whole number from 1"),
        ("[training]\nglobal_batch_size = 0\n", "training.global_batch_size: 0: write -1, or 1 to 10000000"),
        (
            "[parallelism]\ndata_parallel_shard_degree = 0\n",
            "data_parallel_shard_degree: 0: write -1, or 1 to 10000000",
        ),
        (
            '[parallelism]\nfsdp_reshard_after_forward = "no"\n',
            "fsdp_reshard_after_forward: 'no': write default, always",
        ),
        ('[training]\nmixed_precision_param = "int8"\n', "training.mixed_precision_param: 'int8': write bfloat16"),
        ('[activation_checkpoint]\nmode = "some"\n', "activation_checkpoint.mode: some, '2': write none, full"),
        ('[compile]\nenable = "yes"\n', "compile.enable: 'yes' is not true or false"),
        ("[training\n", "is no TOML"),
    ],
)
def test_what_is_not_supported_is_told_with_the_key(tmp_path, text, problem):
    with pytest.raises(ScenarioError) as error:
        read(tmp_path, text)
    assert problem in str(error.value)
    assert "job.toml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ('[model]\nconverters = ["float8"]\n', "matrix products in 8 bits are not modelled"),
        ('[model]\nconverters = "quantize.linear.float8"\n', "matrix products in 8 bits are not modelled"),
        ("[float8]\nenable_float8_linear = true\n", "matrix products in 8 bits are not modelled"),
        ('[training]\nfp8_linear = "dynamic"\n', "training.fp8_linear is not modelled"),
        ("[training]\nenable_cpu_offload = true\n", "training.enable_cpu_offload is not modelled"),
        (
            '[fault_tolerance]\nenable = true\nsemi_sync_method = "diloco"\nsync_steps = 10\n',
            "fault_tolerance (diloco) is not modelled",
        ),
        ("[checkpoint]\nenable = true\ninterval = 50\n", "checkpoint is not written: add checkpoint: {every: 50}"),
        ('[activation_checkpoint]\nmode = "memory_budget"\n', "what the compiler computes again is not known"),
        ('[model]\nnorm_type = "layernorm"\n', "model.norm_type: layernorm counts as rmsnorm"),
        ("[parallelism]\nfuture = 3\n[new]\nkey = 1\n", "not known and not used: new.key, parallelism.future"),
    ],
)
def test_what_the_scenario_leaves_out_is_remarked(tmp_path, text, remark):
    [found] = read(tmp_path, text).remarks
    assert remark in found
