"""What is asked in Python has the remarks of the commands, and its doubts are warned of."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import call, write

import simdist
from simdist.errors import ScenarioError, SimdistWarning
from simdist.runs import run_directory
from simdist.traces.trace import Trace

JOB = {
    "name": "job",
    "cluster": {"preset": "v100x8-25gbit", "nodes": 2},
    "workload": {"preset": "resnet50", "forward": "30 ms", "backward": "60 ms"},
    "steps": 8,
    "seed": 3,
    "schedules": ["sync", "local-16"],
}
SEED = "job: seed has no effect: nothing is random"
PARTS = "job: schedules[1] (local-16) never averages over all ranks in 8 steps: their parameters part"


def caught(ask) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        ask()
    assert {each.category for each in found} <= {SimdistWarning}
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    ("ask", "doubts"),
    [
        (lambda: simdist.compare(JOB, n_seeds=1), [PARTS, SEED]),
        (lambda: simdist.simulate(JOB), [PARTS, SEED]),
        (lambda: simdist.whatif(JOB, n_runs=0), [SEED]),  # its runs are long enough for an average
    ],
    ids=["compare", "simulate", "whatif"],
)
def test_doubts_are_warned_of_in_the_line_that_asks(ask, doubts: list[str]) -> None:
    assert caught(ask) == doubts


def test_sweeps_tables_searches_and_runs_warn_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = {"scenario": JOB, "vary": {"steps": [8, 16]}, "seeds": 1}
    doubts = {each.removeprefix("job: ") for each in (PARTS, SEED)}
    asked = {
        "sweep": lambda: simdist.sweep(sweep, tmp_path / "sweep", n_workers=0),
        "results": lambda: simdist.results(tmp_path / "sweep"),
    }
    for name, ask in asked.items():
        assert {each.removesuffix(" (1 of 2 points)") for each in caught(ask)} == {f"{name}: {each}" for each in doubts}
    assert SEED in caught(lambda: simdist.tune(JOB, n_seeds=2))
    file = write(tmp_path / "job.yaml", json.dumps(JOB))
    call(capsys, "simulate", file, "--schedule", "sync", "-o", tmp_path / "run")
    trace = Trace.load(tmp_path / "run" / run_directory.SIMULATED)
    replace(trace, source="real gloo on cpu").save(tmp_path / "run" / run_directory.REAL)
    assert caught(lambda: simdist.validate(tmp_path / "run")) == [f"{tmp_path / 'run'}: {SEED.removeprefix('job: ')}"]


def test_doubts_are_warned_of_once_however_often_a_line_asks() -> None:
    def ask() -> None:
        for _ in range(3):
            simdist.compare(JOB, n_seeds=1)

    assert sorted(caught(ask)) == sorted([PARTS, SEED])


def test_what_only_follows_from_settings_is_no_warning() -> None:
    sound = {key: value for key, value in JOB.items() if key != "seed"} | {"schedules": ["sync"]}
    rows = []
    assert caught(lambda: rows.append(simdist.compare(sound, n_seeds=1))) == []
    assert all(not each.is_doubt for each in rows[0].remarks)


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"global_every": "2"}, "global_every: '2' is not a whole number"),
        ({"memory_nbytes": "16 Gbit"}, "memory_nbytes: '16 Gbit': sizes are in bytes"),
        ({"min_density": "2"}, "min_density: '2' is outside 0 to 1"),
    ],
)
def test_limits_of_tune_are_refused_by_their_names(limits: dict[str, str], what: str) -> None:
    with pytest.raises(ScenarioError, match=what):
        simdist.tune(JOB, **limits)


@pytest.mark.parametrize("number", [True, 2.5, "2", None])
def test_numbers_of_runs_are_whole(number: object) -> None:
    asked = [
        lambda: simdist.compare(JOB, n_seeds=number),
        lambda: simdist.compare(JOB, n_seeds=1, warm_up=number),
        lambda: simdist.whatif(JOB, n_runs=number),
    ]
    for name, ask in zip(("n_seeds", "warm_up", "n_runs"), asked, strict=True):
        with pytest.raises(ScenarioError, match=f"{name}: .* is not a whole number"):
            ask()
