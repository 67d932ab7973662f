"""`simdist init`: what it finds, what it guesses, and that what it writes runs."""

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import Answer, call

from simdist import scenario
from simdist.drafts import surroundings
from simdist.scenario import presets

LAUNCHERS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "SLURM", "OMPI")


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, without a launcher or a GPU; the folder `bin` there is first on PATH."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    pretend(tmp_path, "exit 127")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretend(folder: Path, script: str) -> None:
    """Put a program on PATH that is called nvidia-smi."""
    program = folder / "bin" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)


def listing(*names: str) -> str:
    return "\n".join(f"echo '{name}'" for name in names)


def settings(answer: Answer) -> dict[str, tuple[str, str]]:
    """Return value and source of each setting."""
    assert answer.code == 0, answer.err
    return {each["setting"]: (each["value"], each["source"]) for each in json.loads(answer.out)["settings"]}


def test_options_state_a_scenario_that_compare_runs(bare, capsys):
    answer = call(capsys, "init", "--cluster", "dgx-h100", "--workload", "gpt2", "--nodes", 4, "--steps", 16)
    assert answer.code == 0
    assert answer.err == "wrote scenario.yaml\n"
    assert answer.out.splitlines()[-1] == "next: simdist compare scenario.yaml"
    written = scenario.load(bare / "scenario.yaml")
    assert (written.cluster.nodes, written.cluster.gpus_per_node, written.workload.name) == (4, 8, "GPT-2")
    assert [each.name for each in written.schedules] == ["sync", "local-8", "hsgd-2-8,8-world"]
    compared = call(capsys, "compare", "scenario.yaml", "--seeds", 2)
    assert compared.code == 0
    assert "warning" not in compared.err


def pairs_of_presets() -> Iterator[tuple[str, str]]:
    """Yield all pairs with models whose tensors are files. Transformers by sizes are alike: each has one cluster."""
    for workload in presets.names("workloads"):
        is_file = presets.path("workloads", workload).with_suffix(".csv").exists()
        yield from ((cluster, workload) for cluster in (presets.names("clusters") if is_file else ["dgx-h100"]))


@pytest.mark.parametrize(("cluster", "workload"), [*pairs_of_presets()])
def test_each_pair_of_presets_loads_or_asks_for_the_measured_time(bare, capsys, cluster, workload):
    answer = call(capsys, "init", "--cluster", cluster, "--workload", workload, "--nodes", 2)
    if answer.code:
        assert "write --forward with its measured time" in answer.err
        answer = call(capsys, "init", "--cluster", cluster, "--workload", workload, "--nodes", 2, "--forward", "20 ms")
    assert answer.code == 0
    scenario.load("scenario.yaml")


def test_gpus_and_nodes_are_found_and_named(bare, capsys, monkeypatch):
    pretend(bare, listing(*["NVIDIA H100 80GB HBM3"] * 8))
    monkeypatch.setenv("SLURM_NNODES", "3")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    found = settings(call(capsys, "init", "--json"))
    assert found["cluster"] == ("dgx-h100", "nvidia-smi: 8 x NVIDIA H100 80GB HBM3")
    assert found["nodes"] == ("3", "SLURM_NNODES")
    assert found["GPUs per node"] == ("8", "SLURM_GPUS_ON_NODE")
    assert found["workload"] == ("gpt2", "guess")
    text = (bare / "scenario.yaml").read_text(encoding="utf-8")
    assert "  nodes: 3  # SLURM_NNODES\n" in text
    assert "  preset: dgx-h100  # nvidia-smi: 8 x NVIDIA H100 80GB HBM3; " in text


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA A100-SXM4-40GB", "aws-p4d"),
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA B200", "dgx-b200"),
        ("Tesla V100-SXM2-16GB", "v100x8-25gbit"),
        ("Tesla T4", "gcp-t4x4-32gbit"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_presets_of_gpus(name, preset):
    assert surroundings.preset_of(name) == preset
    assert preset is None or preset in presets.names("clusters")


def test_an_unknown_gpu_is_a_guess_that_names_it(bare, capsys):
    pretend(bare, listing("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"))
    found = settings(call(capsys, "init", "--json"))
    why = "no preset has the GPU of this machine, NVIDIA GeForce RTX 4090"
    assert found["cluster"] == ("v100x8-25gbit", f"guess: {why}")
    assert found["GPUs per node"] == ("2", "nvidia-smi")


def test_gpus_of_two_kinds_are_both_named(bare, capsys):
    pretend(bare, listing("NVIDIA H200", "Tesla T4", "NVIDIA H200"))
    assert settings(call(capsys, "init", "--json"))["cluster"] == (
        "dgx-h200",
        "nvidia-smi: 2 x NVIDIA H200, 1 x Tesla T4",
    )


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'No devices were found'; exit 6", "nvidia-smi failed: No devices were found"),
        ("exit 9", "nvidia-smi failed"),
        ("true", "nvidia-smi lists no GPU"),
        ("sleep 60 & sleep 60", "nvidia-smi did not answer within 0.2 s"),
        ("printf '\\377\\376'; exit 1", "nvidia-smi failed: \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_nvidia_smi_that_fails_or_hangs_is_the_reason_of_a_guess(bare, capsys, monkeypatch, script, why):
    monkeypatch.setattr(surroundings, "_TIMEOUT_S", 0.2 if "sleep" in script else 10.0)
    pretend(bare, script)
    assert settings(call(capsys, "init", "--json"))["cluster"] == ("v100x8-25gbit", f"guess: {why}")


def test_without_nvidia_smi(bare, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(bare))
    assert settings(call(capsys, "init", "--json"))["cluster"][1] == "guess: there is no nvidia-smi here"


def test_nvidia_smi_that_is_no_program(bare, capsys):
    (bare / "bin" / "nvidia-smi").write_bytes(b"\x00\x01")
    source = settings(call(capsys, "init", "--json"))["cluster"][1]
    assert source == "guess: nvidia-smi cannot be run: Exec format error"


@pytest.mark.parametrize(
    ("environ", "nodes", "per_node"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (2, "WORLD_SIZE / LOCAL_WORLD_SIZE"), (4, "LOCAL_WORLD_SIZE")),
        ({"WORLD_SIZE": "8"}, None, None),
        ({"SLURM_JOB_NUM_NODES": "4"}, (4, "SLURM_JOB_NUM_NODES"), None),
        ({"SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "a100:4"}, (2, "SLURM_NNODES"), (4, "SLURM_GPUS_PER_NODE")),
        ({"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "8(x2)"}, (2, "SLURM_NNODES"), (8, "SLURM_TASKS_PER_NODE")),
        (
            {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            (3, "OMPI_COMM_WORLD_SIZE / OMPI_COMM_WORLD_LOCAL_SIZE"),
            (2, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ),
        ({}, None, None),
    ],
)
def test_launchers(environ, nodes, per_node):
    assert surroundings.launched(environ) == surroundings.Launched(nodes, per_node)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        (
            {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"},
            "WORLD_SIZE 6 is no multiple of LOCAL_WORLD_SIZE 4: nodes differ",
        ),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many', no number of nodes, ranks or GPUs"),
        ({"SLURM_NNODES": "-1"}, "SLURM_NNODES is '-1', no number of nodes, ranks or GPUs"),
        ({"SLURM_NNODES": "0"}, "SLURM_NNODES is '0', no number of nodes, ranks or GPUs"),
        (
            {"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "4,2"},
            "SLURM_TASKS_PER_NODE is '4,2', no number of nodes, ranks or GPUs",
        ),
    ],
)
def test_variables_that_cannot_be_used_are_named(capsys, monkeypatch, environ, why):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    answer = call(capsys, "init")
    assert answer.code == 0
    assert f"warning: ignored: {why}\n" in answer.err


def test_a_list_of_visible_gpus_counts_before_nvidia_smi(bare, capsys, monkeypatch):
    pretend(bare, listing(*["Tesla T4"] * 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert settings(call(capsys, "init", "--json"))["GPUs per node"] == ("2", "CUDA_VISIBLE_DEVICES")


def test_an_existing_file_stays_without_force(bare, capsys):
    (bare / "scenario.yaml").write_text("mine", encoding="utf-8")
    answer = call(capsys, "init")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        "error: scenario.yaml: exists already: choose another file with -o, or replace it with --force\n"
    )
    assert (bare / "scenario.yaml").read_text(encoding="utf-8") == "mine"
    assert call(capsys, "init", "--force").code == 0
    scenario.load(bare / "scenario.yaml")


@pytest.mark.parametrize("output", [".", "missing/s.yaml", "-"])
def test_places_that_take_no_file(bare, capsys, output):
    answer = call(capsys, "init", "-o", output)
    assert answer.code == 2
    assert answer.err.startswith(f"error: {output}: ")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--cluster", "dgx"], "there is no such file, nor a preset of that name"),
        (["--workload", "gpt5"], "there is no such file, nor a preset of that name"),
        (["--straggler-rate", "200%"], "--straggler-rate"),
        (["--straggler-delay", "soon"], "--straggler-delay"),
        (["--straggler-delay", "0 s"], "--straggler-delay"),
        (["--forward", "20"], "--forward"),
        (["--schedule", "nonsense"], "there is no schedule"),
        (["--nodes", "2000000"], "at most"),
        (["--workload", "gpt2-medium", "--cluster", "v100x8-25gbit"], "write --forward"),
    ],
)
def test_a_wrong_option_is_refused_and_nothing_is_written(bare, capsys, options, why):
    answer = call(capsys, "init", *options)
    assert answer.code == 2
    assert why in answer.err
    assert not (bare / "scenario.yaml").exists()


def test_files_are_named_from_the_folder_of_the_scenario(bare, capsys):
    (bare / "our cluster.yaml").write_text(
        scenario.presets.path("clusters", "ideal").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (bare / "jobs").mkdir()
    answer = call(capsys, "init", "--cluster", "our cluster.yaml", "-o", "jobs/job.yaml", "--straggler-rate", "0")
    assert answer.code == 0
    text = (bare / "jobs" / "job.yaml").read_text(encoding="utf-8")
    assert '  file: "../our cluster.yaml"' in text
    assert scenario.load(bare / "jobs" / "job.yaml").disturbances == ()


def test_gpus_that_share_a_machine_lose_what_is_typical(bare, capsys):
    lost = scenario.Interference(typical=True)
    expected = {("v100x8-25gbit", 8): [lost], ("v100x8-25gbit", 1): [], ("ideal", 4): []}
    for (cluster, n_gpus), disturbances in expected.items():
        options = ("--cluster", cluster, "--gpus-per-node", n_gpus, "--straggler-rate", "0", "--yes", "--force")
        assert call(capsys, "init", *options).code == 0
        assert list(scenario.load("scenario.yaml").disturbances) == disturbances


def test_one_node_or_one_gpu_needs_no_hierarchical_schedule(bare, capsys):
    for number, options in enumerate((["--nodes", 1], ["--gpus-per-node", 1], ["--nodes", 1, "--gpus-per-node", 1])):
        assert call(capsys, "init", "-o", f"{number}.yaml", *options).code == 0
        assert [each.name for each in scenario.load(f"{number}.yaml").schedules] == ["sync", "local-8"]


class Terminal(io.StringIO):
    """Answers, as someone types them."""

    def isatty(self) -> bool:
        """Return that it is a terminal."""
        return True


def ask(capsys, monkeypatch, *answers: str, options: tuple[object, ...] = ()) -> Answer:
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{each}\n" for each in answers)))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    return call(capsys, "init", *options)


def test_a_terminal_is_asked_and_a_wrong_answer_asked_again(bare, capsys, monkeypatch):
    answers = ("dgx", "ideal", "no", "2", "", "mlp", "", "5%", "100 ms")
    answer = ask(capsys, monkeypatch, *answers, options=("--json",))
    found = settings(answer)
    assert found["cluster"] == ("ideal", "answer")
    assert found["nodes"] == ("2", "answer")
    assert found["GPUs per node"] == ("4", "guess: as in ideal")  # Enter takes a guess, and it stays one
    assert found["straggler rate"] == ("5%", "answer")
    assert "there is no such file, nor a preset of that name" in answer.err
    assert "'no' is no number above 0: write e.g. 4" in answer.err
    written = scenario.load("scenario.yaml")
    assert (written.cluster.world_size, written.workload.name) == (8, "Multilayer perceptron")


def test_options_are_not_asked_for_and_yes_asks_nothing(bare, capsys, monkeypatch):
    answer = ask(capsys, monkeypatch, options=("--yes",))
    assert answer.code == 0
    options = ("--force", "--cluster", "ideal", "--nodes", 2, "--workload", "mlp", "--forward", "1 ms")
    answer = ask(capsys, monkeypatch, "4", "", "0", options=options)
    assert answer.code == 0, answer.err
    assert scenario.load("scenario.yaml").disturbances == ()


def test_an_interrupted_interview_writes_nothing(bare, capsys, monkeypatch):
    answer = ask(capsys, monkeypatch, "ideal")
    assert answer.code == 130
    assert answer.err.endswith("]: \ninterrupted; nothing was saved\n")
    assert not (bare / "scenario.yaml").exists()


TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 128
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
"""
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257}


def test_a_job_of_torchtitan_becomes_a_scenario(bare, capsys):
    (bare / "job.toml").write_text(TORCHTITAN)
    answer = call(capsys, "init", "--from", "job.toml", "--cluster", "dgx-h100", "--json")
    found = settings(answer)
    assert found["nodes"][0] == "2"  # 2 replicas of 8 ranks, and 8 GPUs a node
    assert found["batch size"] == ("2", "training.local_batch_size")
    assert found["utilization"] == ("43.51%", "measured: llama3-8b on 8 H100, compiled, 6,667 tokens/s (torchtitan)")
    written = scenario.load(bare / "scenario.yaml")
    workload = written.workload
    assert sum(workload.tensor_counts) == 8_030_261_248
    assert (workload.batch_size, workload.micro_batches, workload.precision) == (2, 4, "bf16")
    assert workload.recompute == pytest.approx(0.2794)
    [(path, ends)] = written.uncertain.items()
    assert (path, ends.from_, ends.to) == ("workload.utilization.bf16", "42.49%", "44.53%")
    assert workload.utilization_ranks == 8
    schedule, *rivals = written.schedules
    assert [each.name for each in rivals] == [
        "hsdp-8-bfloat16-keep",
        "fsdp-bfloat16",
        "hsdp-8-local-8-bfloat16",
    ]
    assert schedule.model_dump(exclude_defaults=True) == {
        "shard": 8,
        "keep_last_unit": True,
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
    }
    assert schedule.kind == "hsdp"
    text = (bare / "scenario.yaml").read_text(encoding="utf-8")
    assert "  preset: llama3-8b  # model.name, model.flavor\n" in text
    assert "  micro_batches: 4  # training.global_batch_size\n" in text


@pytest.mark.sentinel
def test_a_config_of_hugging_face_becomes_a_scenario_with_a_range(bare, capsys):
    (bare / "config.json").write_text(json.dumps(GPT2_XL))
    given = ("--cluster", "dgx-a100", "--nodes", 2, "--steps", 16, "--json")
    found = settings(call(capsys, "init", "--from", "config.json", *given))
    assert found["utilization"] == ("60.19%", "measured: mpt-1b on 8 A100, 20,513 tokens/s (llm-foundry)")
    written = scenario.load(bare / "scenario.yaml")
    assert sum(written.workload.tensor_counts) == 1_557_611_200
    [(path, ends)] = written.uncertain.items()
    assert (path, ends.from_, ends.to) == ("workload.utilization.bf16", "44.46%", "76.2%")
    assert [each.name for each in written.schedules] == ["sync", "local-8", "hsgd-2-8,8-world"]
    compared = call(capsys, "compare", "scenario.yaml", "--seeds", 2)
    assert compared.code == 0
    assert "warning" not in compared.err


def test_options_replace_what_a_described_job_states(bare, capsys):
    (bare / "config.json").write_text(json.dumps(GPT2_XL))
    given = ("--sequence", 512, "--batch-size", 4, "--forward", "20 ms", "--schedule", "local-4")
    answer = call(capsys, "init", "--from", "config.json", "--cluster", "v100x8-25gbit", *given)
    assert answer.code == 0
    written = scenario.load(bare / "scenario.yaml")
    assert (written.workload.batch_size, written.workload.forward_s) == (4, 0.02)
    assert written.workload.sample_nbytes == 512 * 16
    assert [each.name for each in written.schedules] == ["local-4"]
    assert answer.out.splitlines()[-1] == "next: simdist compare scenario.yaml"
    assert "# Written by `simdist init`. Compare the schedules: simdist compare scenario.yaml\n" in (
        bare / "scenario.yaml"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "cluster"),
    [((), "dgx-h100"), (("--precision", "bf16"), "dgx-h100"), (("--precision", "fp16"), "v100x8-25gbit")],
)
def test_a_described_job_has_a_cluster_that_computes_in_its_precision(bare, capsys, given, cluster):
    (bare / "config.json").write_text(json.dumps(GPT2_XL))
    answer = call(capsys, "init", "--from", "config.json", *given, "--json")
    assert settings(answer)["cluster"][0] == cluster


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--from", "none.toml"), "--from none.toml: there is no such file"),
        (("--from", "job.yaml"), "--from job.yaml: is none of: a torchtitan job (.toml), the config.json of"),
        (("--from", "config.json", "--workload", "gpt2"), "--from beside --workload: write one of them"),
        (("--sequence", 512), "--sequence: is for --from only"),
        (("--from", "config.json", "--cluster", "v100x8-25gbit"), "the peak of V100 SXM2 in bf16 is not known"),
        (
            ("--from", "job.toml", "--cluster", "dgx-h100", "--nodes", 3),
            "2 replicas, each on 8 ranks, do not fit 24 ra",
        ),
        (("--from", "job.toml", "--cluster", "dgx-h100", "--batch-size", 3), "128 sequences are no multiple of 48"),
    ],
)
def test_what_is_wrong_with_a_described_job_is_told(bare, capsys, args, problem):
    (bare / "job.toml").write_text(TORCHTITAN)
    (bare / "config.json").write_text(json.dumps(GPT2_XL))
    (bare / "job.yaml").write_text("{}")
    answer = call(capsys, "init", *args)
    assert answer.code == 2
    assert problem in answer.err
    assert not (bare / "scenario.yaml").exists()


@pytest.mark.parametrize("label", ["hsdp-8", "fsdp-keep", "hsgd-2-4,4-world", "gtopk-0.01", "diloco-8-worker8"])
def test_schedules_to_compare_are_named_by_the_labels_of_tables(bare, capsys, label):
    given = ("--cluster", "v100x8-25gbit", "--workload", "resnet50", "--schedule", label)
    assert call(capsys, "init", *given).code == 0
    assert [each.name for each in scenario.load(bare / "scenario.yaml").schedules] == [label]


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ("hsdpp", "error: --schedule hsdpp: there is no schedule 'hsdpp': write its kind, such as sync; a label"),
        ("hsdp-7", "error: --schedule hsdp-7: 7 does not divide the 128 ranks"),
        ("local-0", "error: --schedule local-0: 0: write at least 1"),
    ],
)
def test_wrong_schedule_is_told_by_its_option_and_not_by_a_line_of_a_file(bare, capsys, label, problem):
    answer = call(capsys, "init", "--cluster", "v100x8-25gbit", "--workload", "resnet50", "--schedule", label)
    assert (answer.code, problem in answer.err, "scenario.yaml:" in answer.err) == (2, True, False)


def test_what_a_job_becomes_is_compared_without_a_warning(bare, capsys):
    for name, nodes in (("dgx-h100", 1), ("aws-p4d", 1), ("gb200-nvl72", 2)):
        given = ("--cluster", name, "--nodes", nodes, "--steps", 8, "--workload", "gpt2", "--force")
        call(capsys, "init", *given, "--straggler-rate", 0)
        compared = call(capsys, "compare", "scenario.yaml", "--seeds", 2)
        assert (compared.code, compared.err) == (0, ""), name


def test_a_measured_rate_lies_in_the_interval_of_its_own_job(bare, capsys):
    text = TORCHTITAN.replace("global_batch_size = 128\n", "").replace("replicate_degree = 2", "replicate_degree = 1")
    (bare / "job.toml").write_text(text)
    given = ("--cluster", "dgx-h100", "--straggler-rate", 0, "--steps", 16)
    assert call(capsys, "init", "--from", "job.toml", *given).code == 0
    answer = call(capsys, "compare", "scenario.yaml", "--seeds", 2, "--json")
    assert "warning" not in answer.err
    row = json.loads(answer.out)["rows"][0]
    measured_s = 2 * 8192 / 6667
    low_s, high_s = row["step_s_range90"]
    assert low_s < measured_s < high_s
    assert row["step_s"] == pytest.approx(measured_s, rel=0.01)


def test_answers_of_enter_stay_guesses(bare, capsys, monkeypatch):
    found = settings(ask(capsys, monkeypatch, *[""] * 8, options=("--json",)))
    assert len(found) == 8
    assert [name for name, (_, source) in found.items() if not source.startswith("guess")] == []
    assert "# answer" not in (bare / "scenario.yaml").read_text(encoding="utf-8")


def test_an_error_cites_no_line_of_a_file_that_was_not_written(bare, capsys):
    answer = call(capsys, "init", "--schedule", "sync", "--schedule", "sync")
    assert (answer.code, "scenario.yaml:" in answer.err) == (2, False)
    assert "--schedule sync: duplicate label 'sync'" in answer.err
    assert not (bare / "scenario.yaml").exists()


ACCELERATE = """
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_activation_checkpointing: true}
mixed_precision: bf16
num_machines: 2
num_processes: 8
gradient_accumulation_steps: 4
"""


def test_a_configuration_without_a_model_takes_that_of_another_file(bare, capsys):
    (bare / "accelerate.yaml").write_text(ACCELERATE)
    (bare / "config.json").write_text(json.dumps(GPT2_XL))
    answer = call(capsys, "init", "--from", "accelerate.yaml", "--from", "config.json", "--cluster", "dgx-a100")
    assert answer.code == 0, answer.err
    written = scenario.load(bare / "scenario.yaml")
    assert (written.cluster.nodes, written.cluster.gpus_per_node) == (2, 4)
    assert sum(written.workload.tensor_counts) == 1_557_611_200
    assert (written.workload.micro_batches, written.workload.recompute) == (4, 1)
    assert [each.name for each in written.schedules][:2] == ["hsdp-4-bfloat16-root", "hsdp-4-bfloat16-keep-root"]


def test_what_a_configuration_switches_off_replaces_the_values_of_a_workload(bare, capsys):
    off = ACCELERATE.replace("checkpointing: true", "checkpointing: false").replace("steps: 4", "steps: 1")
    (bare / "accelerate.yaml").write_text(off)
    (bare / "workload.yaml").write_text(presets.path("workloads", "mpt-30b").read_text() + "\nmicro_batches: 2\n")
    answer = call(capsys, "init", "--from", "accelerate.yaml", "--workload", "workload.yaml", "--cluster", "dgx-a100")
    assert answer.code == 0, answer.err
    written = scenario.load(bare / "scenario.yaml")
    assert (written.workload.micro_batches, written.workload.recompute) == (1, 0)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["accelerate.yaml"], "--from accelerate.yaml: has no model: add --from config.json, --from module:"),
        (["config.json", "config.json"], "--from: two files have a model: leave one of them out"),
        (["config.json", "accelerate.yaml", "other.yaml"], "--from: two files state passes: leave it out of one"),
    ],
)
def test_files_that_do_not_make_one_job_are_refused(bare, capsys, files, told):
    (bare / "accelerate.yaml").write_text(ACCELERATE)
    (bare / "other.yaml").write_text(ACCELERATE.replace("steps: 4", "steps: 2"))
    (bare / "config.json").write_text(json.dumps(GPT2_XL))
    answer = call(capsys, "init", *(each for name in files for each in ("--from", name)), "--cluster", "dgx-a100")
    assert answer.code == 2
    assert told in answer.err
