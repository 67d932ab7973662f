"""All commands print the same step of one imported job."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import call
from profiled_jobs import Bucket, Delay, Truth, profiles_of, without_input

from simdist.profiles import import_job, write_scenario

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
    "one rank": (replace(PLAIN, n_ranks=1), "cpu"),
    "a rank without a trace": (replace(PLAIN, gpus_per_node=2, missing=(3,), delays=LATE), "cuda"),
    "sixteen ranks on two nodes": (replace(PLAIN, n_ranks=16, n_steps=12, delays=LATE[:2]), "cuda"),
    "one bucket": (replace(PLAIN, buckets=(Bucket((7_000, 490_000), 0.020, 0.015),), delays=LATE), "cuda"),
    "a slow link": (replace(PLAIN, buckets=tuple(Bucket((n,), 0.005, 0.03) for n in (10, 20)), delays=LATE), "cuda"),
    "pauses in backward": (replace(PLAIN, delays=tuple(replace(each, bucket=1) for each in LATE)), "cuda"),
    "a device that gets slower": (
        replace(PLAIN, delays=tuple(Delay("compute", 2, step, 0.001 * step) for step in range(20))),
        "cuda",
    ),
    "all ranks at once": (
        replace(PLAIN, delays=tuple(Delay("host", rank, step, 0.2) for rank in range(4) for step in (4, 11, 18))),
        "cuda",
    ),
    "much noise": (replace(PLAIN, jitter=0.5, delays=LATE), "cpu"),
    "a host that is late in each step": (replace(PLAIN, host_s=0.01, delays=LATE), "cuda"),
    "accumulation on a GPU": (replace(PLAIN, delays=LATE, micro_batches=3, run_ahead=True), "cuda"),
    "late input": (
        Truth(n_ranks=4, n_steps=20, input_s=0.01, delays=tuple(replace(each, channel="io") for each in LATE)),
        "cuda",
    ),
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
    assert said["whatif"]["imported"]["without_named_s"] == pytest.approx(imported.without_named_s, rel=1e-6)
    assert max(0.0, said["whatif"]["lost_share"]) == pytest.approx(imported.lost.total, abs=2e-6)
    assert [step["step"] for step in said["whatif"]["by_step"]] == list(imported.job.numbers)


_COMMANDS = (
    ("simulate",),
    ("compare", "--seeds", "2"),
    ("whatif", "--resamples", "3"),
    ("tune", "--global-every", "2"),
)
