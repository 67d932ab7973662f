"""What is counted in records of ml-goodput-measurement, with the keys of its recorder and of orbax."""

import json
from pathlib import Path

import numpy as np
import pytest

from simdist.errors import ScenarioError
from simdist.failure_logs.goodput import goodput_failures, parse_goodput
from simdist.failure_logs.intervals import event_bounds
from simdist.failure_logs.reading import program_of, read_failures
from simdist.failure_logs.records import LoggedFailures

BEGIN_S = 1_704_070_800.0  # 2024-01-01 01:00 UTC


def record(job: str = "a", **values: object) -> dict[str, object]:
    return {"job_name": job, **values}


def attempt(
    begin_s: float,
    first: int,
    last: int,
    *,
    step_s: float = 3.0,
    first_extra_s: float = 5.0,
    end: bool = False,
    restore_s: float | None = None,
    job: str = "a",
) -> list[dict[str, object]]:
    """Return the records of one start: 2 s to the initialization of 10 s, 20 s of preparation, 4 s of loading."""
    at = BEGIN_S + begin_s
    records = [
        record(job, job_start_time=at),
        record(job, tpu_init_start_time=at + 2),
        record(job, tpu_init_end_time=at + 12),
        record(job, training_prep_start_time=at + 12),
        record(job, training_prep_end_time=at + 32),
        record(job, data_loading_start_time=at + 32),
        record(job, data_loading_end_time=at + 36),
    ]
    if restore_s is not None:
        start = {"checkpoint_manager_start_time": at + 13, "checkpoint_manager_duration_secs": restore_s}
        records.append(record(job, step=first, event_type="restore", directory="gs://x", **start))
    now = at + 36
    for step in range(first, last + 1):
        records.append(record(job, step_count=step, step_start_time=now))
        records.append(record(job, data_loading_start_time=now, custom_badput_event_type="eval"))
        now += step_s + (first_extra_s if step == first else 0.0)
    return [*records, record(job, job_end_time=now)] if end else records


def read(tmp_path: Path, *records: dict[str, object]) -> LoggedFailures:
    path = tmp_path / "goodput.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    assert program_of(path) == "ml-goodput-measurement"
    (found,) = read_failures([path])
    return found


def test_a_start_without_an_end_before_is_an_interruption(tmp_path):
    found = read(tmp_path, *attempt(0, 0, 99), *attempt(1000, 80, 200, restore_s=15.0, end=True))
    (event,) = found.interruptions
    stopped_s = 36 + 5 + 100 * 3
    assert event.at_s == BEGIN_S + stopped_s
    assert found.exposure.job_s == stopped_s + (36 + 5 + 121 * 3)
    assert found.exposure.gpu_s is None
    assert found.recovery_s == {
        "schedule": (pytest.approx(1000 - stopped_s),),
        "start": (2.0,),
        "connect": (10.0,),
        "load": (15.0,),
        "warm_up": (pytest.approx(20 - 15 + 4 + 5),),
    }
    assert any("repeated 20 steps" in note for note in found.notes)


def test_an_elastic_job_that_loses_a_slice_is_interrupted_without_a_new_start(tmp_path):
    waits = [
        record(elastic_wait_event_type=kind, **{f"elastic_wait_{end}_time": BEGIN_S + at})
        for kind, at in (("ELASTIC_SLICE_DOWN", 150.0), ("elastic_scale_up", 250.0))
        for end, at in (("start", at), ("end", at + 30))
    ]
    found = read(tmp_path, *attempt(0, 0, 100, end=True), *waits)
    assert [(each.cause, each.at_s) for each in found.interruptions] == [("lost slice", BEGIN_S + 150)]
    assert found.recovery_s == {}


def test_the_first_step_is_no_typical_one(tmp_path):
    (event,) = read(tmp_path, *attempt(0, 0, 2), *attempt(500, 0, 2)).interruptions
    assert event.at_s == BEGIN_S + 36 + 5 + 3 * 3


def test_a_part_that_no_record_says_is_unknown(tmp_path):
    steps = [record(step_count=i, step_start_time=BEGIN_S + 500 + i) for i in range(5)]
    found = read(tmp_path, *attempt(0, 0, 9), record(job_start_time=BEGIN_S + 400), *steps)
    assert set(found.recovery_s) == {"schedule"}


def test_a_job_that_ended_and_started_again_was_not_interrupted(tmp_path):
    found = read(tmp_path, *attempt(0, 0, 9, end=True), *attempt(500, 10, 19, end=True))
    assert (found.interruptions, found.not_counted) == ((), {"ended, then started again": 1})


def test_a_start_without_a_step_is_a_start_that_failed(tmp_path):
    found = read(tmp_path, *attempt(0, 0, 9), record(job_start_time=BEGIN_S + 300), *attempt(400, 5, 9))
    assert len(found.interruptions) == 1
    assert found.not_counted == {"failed before the first step": 1}


def test_a_preemption_is_planned(tmp_path):
    save = record(event_type="save", reached_preemption=True, checkpoint_manager_blocking_start_time=BEGIN_S + 60)
    (event,) = read(tmp_path, *attempt(0, 0, 20), save, *attempt(400, 21, 30)).interruptions
    assert (event.cause, event.effect) == ("preemption", "planned")


def test_jobs_are_told_apart(tmp_path):
    found = read(tmp_path, *attempt(0, 0, 9), *attempt(10, 0, 9, job="b"), *attempt(500, 5, 9))
    assert len(found.interruptions) == 1


def test_an_export_of_cloud_logging_has_the_newest_entry_first(tmp_path):
    records = [*attempt(0, 0, 99), *attempt(1000, 80, 200, end=True)]
    path = tmp_path / "export.json"
    entries = [{"insertId": "x", "jsonPayload": each, "severity": "INFO"} for each in reversed(records)]
    path.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    assert program_of(path) == "ml-goodput-measurement"
    (found,) = read_failures([path])
    assert found.exposure == read(tmp_path, *records).exposure


def test_records_before_the_first_start_do_not_count(tmp_path):
    early = [record(step_count=i, step_start_time=BEGIN_S - 900 + i) for i in range(9)]
    found = read(tmp_path, *early, *attempt(0, 0, 9, end=True))
    assert found.exposure.job_s == 36 + 5 + 30
    assert any("before their first start" in note for note in found.notes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"job_name": "a", "job_start_time": 170407', ':2: \'{"job_name": "a", "job_start_time": 170407\' is no JSON'),
        ('{"job_name": "a", "job_start_time": "noon"}', ":2: job_start_time 'noon': write seconds since 1970"),
        ('{"job_start_time": 1704070800.0}', ":2: has no job_name"),
        ('{"job_name": "a", "step_start_time": 1704070800.0}', ":2: step_count null: write the number of a step"),
        (
            '{"job_name": "a", "step_start_time": 1704070800.0, "step_count": 1.5}',
            ":2: step_count 1.5: write the number",
        ),
        ('{"job_name": "a", "step_start_time": -5, "step_count": 1}', "step_start_time -5"),
    ],
)
def test_damage_is_named_with_its_line_and_remedy(tmp_path, line, message):
    path = tmp_path / "goodput.jsonl"
    path.write_text(f"{json.dumps(record(job_start_time=BEGIN_S))}\n{line}\n", encoding="utf-8")
    with pytest.raises(ScenarioError) as error:
        read_failures([path])
    assert message in str(error.value)


def test_what_the_client_of_cloud_logging_prints_is_read(tmp_path):
    """Its numbers are floating-point ones, and records of later releases may come first."""
    records = [*attempt(0, 0, 9), *attempt(100, 5, 9)]
    floats = [
        each | ({"step_count": float(str(each["step_count"]))} if "step_count" in each else {}) for each in records
    ]
    assert read(tmp_path, record(new_event_time=BEGIN_S), *floats).notes == read(tmp_path, *records).notes


def test_records_without_a_start_are_refused(tmp_path):
    with pytest.raises(ScenarioError, match="has no job_start_time: give all records of a job"):
        read(tmp_path, record(step_count=1, step_start_time=BEGIN_S))


def test_intervals_contain_the_rate_of_generated_logs():
    rng = np.random.default_rng(11)
    mean_s = 3000.0
    held = 0
    for _ in range(400):
        records: list[dict[str, object]] = []
        at_s = 0.0
        for _ in range(int(rng.integers(3, 12))):
            n_steps = max(2, round(rng.exponential(mean_s) / 200))
            records += attempt(at_s, 0, n_steps, step_s=200.0, first_extra_s=0.0)
            at_s += 36 + 200 * (n_steps + 1) + rng.uniform(50, 500)
        lines = map(json.dumps, records[: -int(rng.integers(1, 6))])
        found = goodput_failures(parse_goodput("\n".join(lines), "log"), "log")
        low, high = event_bounds(len(found.interruptions))
        held += low <= (found.exposure.job_s or 0.0) / (mean_s + 236) <= high
    assert held >= 380
