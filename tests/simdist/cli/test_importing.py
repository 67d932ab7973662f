"""`simdist import`: traces in, a scenario out that the other commands take; and what it says about stragglers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import call
from kineto_traces import Delay, Truth, write_job
from profiled_jobs import profiles_of, without_input

from simdist import scenario as scenarios
from simdist.errors import RunError, ScenarioError
from simdist.profiles import import_job, write_scenario, writing
from simdist.profiles.writing import scenario_text
from simdist.scenario import Imported, Recorded, presets
from simdist.scenario.warnings import warnings_of
from simdist.settings.base import listed

LATE = Truth(
    n_ranks=4,
    n_steps=12,
    input_s=0.0,
    gpus_per_node=1,
    skew_s=(0.0, 1.5, -0.7, 0.0),
    delays=(Delay("host", 1, 7, 0.08), *(Delay("compute", 3, step, 0.012) for step in range(12))),
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    write_job(folder, LATE, device="cpu", version="2.13")
    return folder


def imported(truth, device="cpu"):
    return import_job(profiles_of(truth, device), name="job")


def loaded(truth, path: Path, device="cpu"):
    write_scenario(imported(truth, device), path)
    return scenarios.load(path)


def test_import_writes_a_scenario_and_says_what_slowed_the_job(capsys, traces, tmp_path) -> None:
    answer = call(capsys, "import", traces, "-o", tmp_path / "job.yaml")
    assert answer.code == 0
    assert re.search(r"rank 3, persistent: \+12 ms \(\+3[78]% of its computing\) in every step, compute", answer.out)
    assert re.search(r"rank 1, step 10: \+80 ms \(\+\d+% of a step\), host", answer.out)
    assert re.search(r"% of a step is lost: [\d.]+ % to stragglers", answer.out)
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "job.delays.npz"}
    assert warnings_of(scenarios.load(tmp_path / "job.yaml")) == ()


def test_whatif_counts_steps_as_the_profiler_does(capsys, traces, tmp_path) -> None:
    """The job was traced from its step 3 on. Rank 1 is late in its step 10."""
    path = tmp_path / "job.yaml"
    assert call(capsys, "import", traces, "-o", path).code == 0
    whole, some = (
        json.loads(call(capsys, "whatif", path, "--resamples", "0", "--json", *more).out)
        for more in ((), ("--steps", "9:12"))
    )
    assert [step["step"] for step in whole["by_step"]] == list(range(3, 15))
    assert (some["first_step"], [step["step"] for step in some["by_step"]]) == (9, [9, 10, 11])
    for document in (whole, some):
        slowest = max(document["by_step"], key=lambda step: step["slowdown"])
        assert (slowest["step"], slowest["slowest_rank"]) == (10, 1)
    refused = call(capsys, "whatif", path, "--steps", "0:3")
    assert refused.code != 0
    assert "the job was traced in its steps 3-14: write e.g. 3:4" in refused.err


@pytest.mark.parametrize("steps", ["3", "3-14", "3-5, 9, 11-12", ""])
def test_numbers_of_traced_steps_are_read_as_they_are_written(steps: str) -> None:
    assert listed(Imported(steps=steps, step_s=1.0, error=0.0).numbers) == steps


def test_other_commands_take_the_scenario(capsys, traces, tmp_path) -> None:
    assert call(capsys, "import", traces, "-o", tmp_path / "job.yaml").code == 0
    answer = call(capsys, "compare", tmp_path / "job.yaml", "--seeds", "3", "--json")
    rows = {row["schedule"]: row for row in json.loads(answer.out)["rows"]}
    assert list(rows) == ["sync", "local-2", "local-4", "local-8", "hsgd-2-2,4-4"]
    assert all(row["speedup_ci95"] for row in rows.values())


def test_json_has_everything(capsys, traces, tmp_path) -> None:
    answer = call(capsys, "import", traces, "-o", tmp_path / "job.yaml", "--json", "--steps", "4:12")
    document = json.loads(answer.out)
    assert (document["ranks"], document["steps"]) == ([0, 1, 2, 3], list(range(4, 12)))
    assert [(each["kind"], each["ranks"]) for each in document["stragglers"]] == [
        ("persistent", [3]),
        ("transient", [1]),
    ]
    assert document["stragglers"][0]["factor"] == pytest.approx(1 + 0.012 / 0.032, rel=0.01)
    assert document["step"]["error"] == pytest.approx(0.0, abs=0.02)
    assert [each["nbytes"] for each in document["collectives"]] == [bucket.nbytes for bucket in LATE.buckets]
    assert document["clock_skew_s"] == pytest.approx(2.2, abs=1e-4)
    assert document["files"] == [str(tmp_path / "job.delays.npz"), str(tmp_path / "job.yaml")]


def test_files_are_replaced_by_force_only(capsys, traces, tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("mine", encoding="utf-8")
    answer = call(capsys, "import", traces, "-o", path)
    assert (answer.code, "job.yaml: is there already" in answer.err) == (2, True)
    assert path.read_text(encoding="utf-8") == "mine"
    assert call(capsys, "import", traces, "-o", path, "--force").code == 0
    first = path.read_bytes(), (tmp_path / "job.delays.npz").read_bytes()
    assert call(capsys, "import", traces, "-o", path, "--force").code == 0
    assert (path.read_bytes(), (tmp_path / "job.delays.npz").read_bytes()) == first


WRONG = {
    "no such file": (["nowhere", "-o", "{}/a.yaml"], "nowhere: no such file or folder"),
    "no folder": (["{traces}", "-o", "{}/b/a.yaml"], "there is no directory"),
    "no scenario": (["{traces}", "-o", "{}/a.txt"], "a scenario is a .yaml file"),
    "nodes": (["{traces}", "-o", "{}/a.yaml", "--nodes", "3"], "write one of 1, 2, 4"),
    "cluster": (["{traces}", "-o", "{}/a.yaml", "--cluster", "dgx-a10"], "did you mean 'dgx-a100'?"),
    "tensors": (["{traces}", "-o", "{}/a.yaml", "--tensors", "resnet5"], "there is no such file, nor a preset"),
    "other tensors": (["{traces}", "-o", "{}/a.yaml", "--tensors", "resnet50"], "--tensors: has 25557032 elements"),
    "steps": (["{traces}", "-o", "{}/a.yaml", "--steps", "50:60"], "all ranks have steps 3-14"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_error(capsys, traces, tmp_path, case: str) -> None:
    args, message = WRONG[case]
    answer = call(capsys, "import", *(arg.format(tmp_path, traces=traces) for arg in args))
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_read_is_left_out_by_name(capsys, traces, tmp_path) -> None:
    files = sorted(traces.iterdir())
    broken = tmp_path / files[2].name
    broken.write_text("{", encoding="utf-8")
    answer = call(capsys, "import", *files[:2], broken, files[3], "-o", tmp_path / "job.yaml")
    assert answer.code == 0
    assert f"warning: left out: {broken}" in answer.err
    assert "no trace of rank 2 of 4" in answer.err


def test_a_given_cluster_is_compared_with_what_was_measured(capsys, traces, tmp_path) -> None:
    answer = call(capsys, "import", traces, "-o", tmp_path / "job.yaml", "--cluster", "dgx-a100")
    assert answer.code == 0
    assert re.search(r"^ all_reduce .*\(-9\d%\)", answer.out, re.MULTILINE)
    assert "In every row: ranks 4; calls 12." in answer.out.splitlines()
    assert "warning: the scenario does not reproduce the traced steps" in answer.err
    given = scenarios.load_cluster(presets.path("clusters", "dgx-a100"))
    written = scenarios.load(tmp_path / "job.yaml").cluster
    shape = {"nodes": 4, "gpus_per_node": 1, "slow_devices": written.slow_devices}
    assert written == given.model_copy(update=shape)
    assert [each.ranks for each in written.slow_devices] == [(3,)]


JOBS = {
    "quiet": (without_input(n_steps=4), "cpu"),
    "late": (replace(LATE, jitter=0.1), "cpu"),
    "input": (replace(LATE, input_s=0.01), "cuda"),
    "runs ahead": (replace(LATE, run_ahead=True), "cuda"),
    "nodes": (replace(LATE, gpus_per_node=2), "cuda"),
    "no shapes": (replace(LATE, shapes=False), "cpu"),
    "one rank": (without_input(n_ranks=1, n_steps=4), "cpu"),
}


@pytest.mark.parametrize("case", JOBS)
def test_the_file_says_what_was_imported(case: str, tmp_path) -> None:
    truth, device = JOBS[case]
    job = imported(truth, device)
    read = loaded(truth, tmp_path / "job.yaml", device)
    ours = job.scenario
    assert (read.cluster, read.workload, read.steps, read.host, read.input) == (
        ours.cluster,
        ours.workload,
        ours.steps,
        ours.host,
        ours.input,
    )
    assert read.schedules == ours.schedules
    assert [(type(each), each.on) for each in read.disturbances] == [(Recorded, channel) for channel in job.delays]
    assert (warnings_of(read), read.doubts) == (ours.doubts, ours.doubts)


def test_an_import_that_fails_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    path = tmp_path / "job.yaml"
    write_scenario(imported(LATE), path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("simdist.profiles.writing.write_npz", full)
    with pytest.raises(RunError, match=r"job.delays.npz: cannot be written: No space left on device"):
        write_scenario(imported(replace(LATE, n_steps=8)), path, force=True)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_no_stragglers_are_told_of_traced_ranks_only(capsys, tmp_path) -> None:
    write_job(tmp_path, Truth(n_ranks=4, n_steps=5, input_s=0.0, missing=(2,)), device="cpu", version="2.13")
    answer = call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml")
    assert "stragglers: none among the traced ranks" in answer.out
    assert "warning: times of collectives, and so of links, are upper bounds" in answer.err
    assert "without waiting for traced ranks: an upper bound" in (tmp_path / "job.yaml").read_text(encoding="utf-8")


def test_many_tensors_stand_in_a_file_of_their_own(tmp_path) -> None:
    bucket = LATE.buckets[0]
    truth = replace(LATE, buckets=(replace(bucket, counts=(100,) * 40),))
    read = loaded(truth, tmp_path / "job.yaml")
    assert len(read.workload.tensors) == 40
    assert (tmp_path / "job.workload.yaml").is_file()


def test_a_forced_import_leaves_no_file_of_the_one_before(tmp_path) -> None:
    bucket = LATE.buckets[0]
    write_scenario(imported(replace(LATE, buckets=(replace(bucket, counts=(100,) * 40),))), tmp_path / "job.yaml")
    write_scenario(imported(without_input(n_steps=4)), tmp_path / "job.yaml", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
    with pytest.raises(ScenarioError, match="is there already"):
        write_scenario(imported(LATE), tmp_path / "job.yaml")


def test_what_is_doubtful_stands_in_the_scenario() -> None:
    text = scenario_text(imported(replace(LATE, missing=(2,))), delays="a.npz", workload="b.yaml")
    assert text.startswith("# Imported from profiler traces of 3 of 4 ranks, steps 3-14.")
    assert "# * no trace of rank 2 of 4" in text
    assert "# repeated by every command that reads this\ndoubts: [" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= 120


def test_delays_are_played_as_they_happened_and_the_file_says_how_to_draw_others() -> None:
    text = scenario_text(imported(LATE), delays="a.npz", workload="b.yaml")
    assert "- {kind: recorded, 'on': host, file: a.npz}" in text
    assert "add resample_steps: N to draw other blocks of N steps for every seed" in text.replace("\n# ", " ")


def test_an_import_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch) -> None:
    write_scenario(imported(LATE), tmp_path / "job.yaml")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: object, **names: str) -> str:
        raise OSError(28, "No space left on device", str(tmp_path / ".job.yaml.123.part"))

    monkeypatch.setattr(writing, "scenario_text", full)
    with pytest.raises(RunError, match=rf"{tmp_path}/job.yaml: cannot be written: No space left on device"):
        write_scenario(imported(without_input(n_steps=4)), tmp_path / "job.yaml", force=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that is never writable")
def test_where_nothing_can_be_written_is_told_before_traces_are_read(capsys) -> None:
    answer = call(capsys, "import", "nowhere", "-o", "/proc/job.yaml")
    assert answer.err.startswith("error: /proc/job.yaml: cannot be written: ")


def test_the_name_of_a_scenario_that_is_proposed_has_one_suffix(capsys, tmp_path) -> None:
    answer = call(capsys, "import", "nowhere", "-o", tmp_path / "job.json")
    assert "write e.g. -o job.yaml" in answer.err


def test_the_step_is_said_to_be_reproduced_and_not_predicted(capsys, traces, tmp_path) -> None:
    answer = call(capsys, "import", traces, "-o", tmp_path / "job.yaml")
    assert re.search(r"step: .* measured, .* reproduced \(", answer.out)
    assert "predict" not in answer.out
    assert "reproduced by this scenario's sync with the delays as they happened" in " ".join(
        (tmp_path / "job.yaml").read_text(encoding="utf-8").replace("# ", "").split()
    )
