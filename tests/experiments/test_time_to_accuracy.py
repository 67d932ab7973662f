"""The page on time to a target: what was recorded keeps to its bounds, and the page shows it."""

from statistics import median

import emulated_ranks
import processes
import pytest
from scripts import ROOT, load_script

pytest.importorskip("torch")

run, search = (load_script(ROOT / "experiments" / "time_to_accuracy" / name) for name in ("run.py", "search.py"))


def test_recorded_times_to_the_target_were_predicted():
    errors = [abs(each.error) for each in run.recorded() if each.error is not None]
    assert len(errors) >= 25
    assert median(errors) <= 0.10
    assert max(errors) <= 0.20


def test_who_never_got_there_was_predicted_not_to():
    assert [each.steps[0] is None for each in run.recorded()] == [each.steps[1] is None for each in run.recorded()]


def test_schedules_were_predicted_in_their_order():
    counts = [run._order(run.recorded(), shape.title, task) for shape in run.SHAPES for task in run.TARGETS]
    right, pairs = (sum(each) for each in zip(*counts, strict=True))
    assert right >= 0.95 * pairs > 40


def test_real_ranks_have_the_losses_of_the_virtual_world():
    assert {each.exact_error for each in run.recorded()} == {0.0}
    averaging = [each.loss_error for each in run.recorded() if "topk" not in each.schedule]
    assert sum(each <= 1e-5 for each in averaging) >= len(averaging) - 1
    assert max(averaging) <= 1e-4


def test_searches_find_the_best_with_a_third_of_the_steps():
    found = search.recorded()
    assert len(found) == 7
    assert all(each.steps[0] <= 0.35 * each.steps[1] for each in found)
    assert [each.found_s for each in found] == [each.best_s for each in found]


@pytest.mark.parametrize("script", [run, search])
def test_the_page_shows_the_recorded_results(script):
    page = script.PAGE.read_text(encoding="utf-8")
    for table in script.tables(script.recorded()).values():
        assert table in page


def test_a_short_run_goes_through(tmp_path, monkeypatch):
    if missing := run.network.missing():
        pytest.skip(missing)
    processes.answer_in_forks(monkeypatch)
    monkeypatch.setattr(run.network, "launch", emulated_ranks.launch)
    (each, *others) = run.run((run.Shape(2, 2, "100 Mbit/s"),), run.TINY, tmp_path, steps=20, tiny=True)
    assert len(others) == 4
    assert each.loss_error < 1e-5
    assert {result.exact_error for result in (each, *others)} == {0.0}
    assert each.steps[0] == each.steps[1]
