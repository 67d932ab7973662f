"""All commands print the same step of one imported job."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import call
from profiled_jobs import Delay, Truth, profiles_of, without_input

from simdist.profiles.importing import import_job
from simdist.profiles.writing import write_scenario

LATE = tuple(Delay("host", step % 3, step, 0.05) for step in range(2, 20, 5))
PLAIN = without_input(n_ranks=4, n_steps=20, jitter=0.05)
JOBS: dict[str, tuple[Truth, str]] = {
    "quiet": (PLAIN, "cpu"),
    "late hosts": (replace(PLAIN, delays=LATE), "cpu"),
    "a slow device": (replace(PLAIN, delays=tuple(Delay("compute", 1, step, 0.01) for step in range(20))), "cpu"),
    "a GPU whose host runs ahead": (replace(PLAIN, delays=LATE, run_ahead=True), "cuda"),
    "broadcast buffers": (replace(PLAIN, delays=LATE, buffer_count=20), "cuda"),
    "accumulation": (replace(PLAIN, delays=LATE, micro_batches=2), "cpu"),
    "slow input": (Truth(n_ranks=4, n_steps=20, input_s=0.01, jitter=0.05, delays=LATE), "cpu"),
    "a loader that runs ahead": (Truth(n_ranks=1, n_steps=10, input_s=0.05, jitter=0.02), "loader"),
}


@pytest.mark.parametrize("name", JOBS)
def test_all_commands_print_the_same_step(capsys, tmp_path: Path, name: str) -> None:
    truth, device = JOBS[name]
    profiles = profiles_of(truth, "cpu" if device == "loader" else device)
    if device == "loader":
        profiles = [replace(each, hints=frozenset({"loader processes"})) for each in profiles]
    imported = import_job(profiles, name="job")
    file = tmp_path / "job.yaml"
    write_scenario(imported, file)
    said = {command: json.loads(call(capsys, command, file, *more, "--json").out) for command, *more in _COMMANDS}
    rows = {row["schedule"]: row for row in said["simulate"]["rows"]}
    expected_s = pytest.approx(imported.proof.predicted_s, rel=1e-6)
    assert rows["sync"]["step_s"] == expected_s
    assert next(row["step_s"] for row in said["compare"]["rows"] if row["schedule"] == "sync") == expected_s
    assert said["whatif"]["replayed_s"] == expected_s
    if said["whatif"]["gains"]:
        assert said["whatif"]["gains"]["baseline_step_s"] == expected_s
    assert next(row["step_s"] for row in said["tune"]["rows"] if row["schedule"] == "sync") == expected_s
    assert said["whatif"]["imported"]["without_stragglers_s"] == pytest.approx(imported.without_stragglers_s, rel=1e-6)


_COMMANDS = (
    ("simulate",),
    ("compare", "--seeds", "2"),
    ("whatif", "--resamples", "3"),
    ("tune", "--global-every", "2"),
)
