"""A schedule and a disturbance of a user's own, performed by real ranks and learned with; an algorithm, refused."""

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from commandline import call  # noqa: E402
from processes import answer_in_forks, run, run_as_main  # noqa: E402

from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "node-sgd"
TWO_RANKS = """\
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: {latency: 1 ms, bandwidth: 1 GB/s}}
workload:
  tensors: [{name: weight, count: 5000}]
  batch_size: 1
  forward: 2 ms
  backward: 2 ms
steps: 8
disturbances: [{kind: 'node_sgd:Maintenance', interval: 4, delay: 20 ms}]
schedules: [{kind: 'node_sgd:NodeSGD', period: 4}]
"""


def test_two_ranks_perform_it_and_the_measurement_is_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    scenario = loads(TWO_RANKS)
    run_directory.write(tmp_path / "run", scenario, build(scenario, scenario.schedules[0]).plan, delays(scenario))
    endings = run(run_as_main, 2, "real", True, str(tmp_path / "run"))
    assert [ending.code for ending in endings.values()] == [0, 0], endings[0].output
    assert re.search(r"2 ranks, 8 steps, .* a step \(real gloo on cpu, emulated\)", endings[0].output)
    read = run_directory.read(tmp_path / "run")
    trace = run_directory.read_trace(tmp_path / "run" / run_directory.REAL, plan=read.plan)
    assert trace.plan.n_steps == 8
    found = json.loads(call(capsys, "validate", tmp_path / "run", "--json").out)
    assert [row["schedule"] for row in found["rows"]] == ["node-4"]


def test_an_algorithm_of_ones_own_is_refused_with_what_why_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    scenario = loads(TWO_RANKS.replace("period: 4", "period: 4, algorithm: 'node_sgd:STAR'"))
    run_directory.write(tmp_path / "run", scenario, build(scenario, scenario.schedules[0]).plan, delays(scenario))
    (ending,) = run(run_as_main, 1, "real", True, str(tmp_path / "run")).values()
    assert ending.code == 1
    assert ending.output.splitlines()[-1] == (
        f"real: rank 0: error: {tmp_path / 'run'}: all_reduce(flat, mean over group of 2, node_sgd:STAR) takes an "
        f"algorithm of your own, which can be simulated only: real ranks take those of gloo and NCCL; leave "
        f"`algorithm` out, or leave this run out"
    )


def test_a_model_learns_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    answer_in_forks(monkeypatch)
    file = tmp_path / "two.yaml"
    file.write_text(TWO_RANKS.replace("schedules: [", "schedules: [{kind: sync}, "), encoding="utf-8")
    answer = call(capsys, "learn", file, "--task", "quadratic", "--seeds", 1, "--workers", 0, "--json")
    assert answer.code == 0, answer.err
    assert [row["schedule"] for row in json.loads(answer.out)["rows"]] == ["sync", "node-4"]
