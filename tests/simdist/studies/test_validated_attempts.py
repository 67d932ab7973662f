"""The attempts of a run, simulated against measured."""

from dataclasses import replace
from pathlib import Path

import pytest
from failed_runs import write_failed_run

from simdist.runs import run_directory
from simdist.studies.validated_attempts import n_repeated
from simdist.studies.validated_run import ValidatedRun, validate_run
from simdist.traces.attempts import ATTEMPTS, AttemptLog


def validated(folder: Path, mode: str = "blocking") -> ValidatedRun:
    return validate_run(run_directory.read(write_failed_run(folder, mode)))


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_measurement_like_its_simulation_has_no_error(tmp_path: Path, mode: str) -> None:
    done = validated(tmp_path, mode)
    found = done.attempts
    assert found is not None
    assert found.simulated_steps == found.measured_steps == ((0, 15), (10, 22), (20, 30))
    assert n_repeated(found.measured_steps) == 5 + 2
    assert {each.category: each.measured_s for each in found.categories} == pytest.approx(
        {each.category: each.simulated_s for each in found.categories}, abs=1e-5
    )
    by_category = {each.category: each.measured_s for each in found.categories}
    assert by_category["productive"] == pytest.approx(90.0)
    assert by_category["wasted_progress"] == pytest.approx(21.0)
    assert by_category["infrastructure_recovery"] == pytest.approx(11.0)
    assert by_category["checkpoint_save"] == pytest.approx(3.0 if mode == "blocking" else 1.0)  # the last file
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert done.document()["failures"] == found.document()
    recovery = (
        "recovery: {detect: 2 s, timeouts: {collective: 9 s}, start: 4 s, connect: 1 s, load: 500 ms, warm_up: 250"
    )
    assert recovery in done.text(None)


def test_a_log_of_another_measurement_is_not_compared(tmp_path: Path) -> None:
    validated(tmp_path)
    log = AttemptLog.load(tmp_path / ATTEMPTS)
    replace(log, run="another").save(tmp_path / ATTEMPTS)
    assert validate_run(run_directory.read(tmp_path)).attempts is None


def test_an_attempt_that_ended_by_itself_ends_with_its_trace(tmp_path: Path) -> None:
    known = validated(tmp_path).attempts
    log = AttemptLog.load(tmp_path / ATTEMPTS)
    replace(log, met=()).save(tmp_path / ATTEMPTS)
    found = validate_run(run_directory.read(tmp_path)).attempts
    assert known is not None
    assert found is not None
    assert found.measured_steps == known.measured_steps
    assert [each.measured_s for each in found.categories] == pytest.approx(
        [each.measured_s for each in known.categories], abs=1e-5
    )
    assert found.recovery is not None
    assert (found.recovery.detect_s, found.recovery.timeout_s) == (None, None)
    assert "attempts: 3, steps 0 to 15, 10 to 22, 20 to 30; 7 steps repeated" in found.text()
