"""The recorded runs of jobs that fail are as near as the page says, and the page shows them."""

import statistics

import pytest
from scripts import ROOT, load_script

from simdist.report import insert_tables

FAILURES = ROOT / "experiments" / "failures"
run = load_script(FAILURES / "run.py")


def test_the_page_has_the_tables_of_the_recorded_results() -> None:
    page = (FAILURES / "README.md").read_text(encoding="utf-8")
    assert insert_tables(page, run.tables(run.recorded())) == page


def test_total_times_are_near_and_repeated_steps_exact() -> None:
    found = run.recorded()
    assert len(found) == len(run.CASES) == 18
    assert [tuple(map(tuple, each.failures)) for each in found] == [tuple(each.failures) for each in run.CASES]
    errors = [abs(each.error) for each in found]
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.10
    assert [each.measured_attempts for each in found] == [each.predicted_attempts for each in found]
    assert sum(each.n_losses for each in found) > 5000
    assert sum(each.n_other_losses for each in found) == 0
    for each in found:
        assert 1 <= len(each.failures) <= 4
        for side, total_s in enumerate((each.predicted_s, each.measured_s)):
            assert sum(seconds[side] for seconds in each.categories.values()) == pytest.approx(total_s)


@pytest.mark.full
def test_a_job_fails_and_goes_on(tmp_path) -> None:
    pytest.importorskip("torch")
    (found,) = run.measure(tiny=True, keep=tmp_path)
    assert found.measured_attempts == found.predicted_attempts == ((0, 7), (5, 12))
    assert found.categories["wasted_progress"][1] > 2 * 0.3
    assert (found.n_losses, found.n_other_losses) == (24, 0)
