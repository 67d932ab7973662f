"""The recorded shares of intervals that hold, and the command that measures them."""

import json
import re
from typing import Any

import pytest
from scripts import ROOT, load_script

coverage = load_script(ROOT / "experiments" / "coverage" / "run.py")
learned = load_script(ROOT / "experiments" / "coverage" / "learned.py")
LEAST_OF_FEW = 89  # of one cell: 6 schedules, 400 repeats, 3 standard errors below 92 to 95


def table(page, name: str) -> list[str]:
    (found,) = re.findall(rf"<!-- table {name} -->\n(.*?)\n<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    return found.split("\n")


def test_the_page_on_trust_shows_the_recorded_table_in_short() -> None:
    assert table(coverage.VALIDITY, "coverage in short") == coverage.in_short(table(coverage.PAGE, "coverage")).split(
        "\n"
    )


def test_recorded_intervals_hold_as_often_as_they_say_except_where_a_remark_says_that_they_cannot() -> None:
    for line in table(coverage.PAGE, "coverage")[2:]:
        name, _, step, speedup, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        if not name.endswith("*"):
            assert min(float(span.split(" to ")[0]) for span in (step, speedup)) >= LEAST_OF_FEW, line


def small_pools(disturbance: str, monkeypatch: pytest.MonkeyPatch, n_repeats: int) -> tuple[Any, list[Any]]:
    monkeypatch.setattr(coverage, "SEEDS", (3,))
    monkeypatch.setattr(coverage, "PILOTED", 3)
    monkeypatch.setattr(coverage, "OTHERS", 400)
    scenario = coverage.loads(coverage.SCENARIO.format(disturbance=disturbance))
    return scenario, [coverage.pool(scenario, each, n_repeats) for each in scenario.schedules[:2]]


def test_shares_of_a_small_pool_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, pools = small_pools(coverage.DELAYS["0.02 % x 2 s"], monkeypatch, 20)
    known = [coverage.known_delays(scenario, coverage.run_seeds(repeat, 3)) for repeat in range(20)]
    true_s = [each.truth.mean_s for each in pools]
    assert true_s == pytest.approx([0.11475, 0.1157], rel=3e-3), "the mean of 8,000 seeds"
    held = {}
    for corrected_for in (known, [()] * 20):
        repeats = coverage.repeated(pools[1], pools[0], corrected_for, 3, scenario.steps)
        held[corrected_for is known] = coverage.shares(repeats, true_s[1], true_s[0])[0]
    assert held[True] >= 0.9
    assert held[False] < 0.8


@pytest.mark.parametrize("name", ["0.1 % x 1 s", "bursts", "exponential", "lognormal, sigma 2", "Pareto, shape 2.5"])
def test_closed_form_of_sync_is_the_mean_of_many_runs(name: str) -> None:
    scenario = coverage.loads(coverage.SCENARIO.format(disturbance=coverage.DELAYS[name]))
    built = coverage.build(scenario, scenario.schedules[0])
    truth = coverage.truth_of(scenario, built, 1)
    assert (truth.source, truth.error_s) == ("closed form", 0.0)
    step_s = coverage.step_s_of_seeds(scenario, built, list(range(1000)))
    assert abs(truth.mean_s - step_s.mean()) < 4 * step_s.std() / 1000**0.5


def test_truth_by_the_number_of_delays_is_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A persistent disturbance that delays nothing leaves `sync` as it is, but not to the closed form."""
    rare = "{kind: transient, probability: 0.1%, delay: 1 s}"
    nothing = "{kind: persistent, on: compute, factor: 1}"
    alone, beside = (
        coverage.loads(coverage.SCENARIO.format(disturbance=each)) for each in (rare, f"{nothing}, {rare}")
    )
    closed, counted = (
        coverage.truth_of(each, coverage.build(each, each.schedules[0]), 800) for each in (alone, beside)
    )
    assert (closed.source, counted.source) == ("closed form", "number of delays")
    assert counted.mean_s == pytest.approx(closed.mean_s, abs=4 * counted.error_s)


def test_recorded_corrections_have_no_bias_beyond_chance() -> None:
    """Of differences to means that are known otherwise, each with a 95 % interval."""
    cells = [cell.split(" ± ") for line in table(coverage.PAGE, "bias")[2:] for cell in line.split("|")[2:-1]]
    pairs = [(float(bias), float(half)) for bias, half in (each for each in cells if len(each) == 2)]
    assert len(pairs) >= 6
    assert all(abs(bias) <= 2 * half + 0.011 for bias, half in pairs)
    assert sum(abs(bias) <= half + 0.006 for bias, half in pairs) >= 0.85 * len(pairs)


def test_recorded_intervals_of_learn_hold() -> None:
    for line in table(coverage.PAGE, "learned")[2:]:
        spans = [cell.strip() for cell in line.strip("|").split("|")][2:5]
        ends = [float(end) for span in spans for end in span.split(" to ")]
        assert 90 <= min(ends) <= max(ends) <= 99, line


def test_table_of_learn_is_made_of_recorded_training_runs() -> None:
    recorded = json.loads(learned.RECORDED.read_text(encoding="utf-8"))
    curves = {name: [learned.curve(each) for each in of_seeds] for name, of_seeds in recorded.items()}
    assert {len(each) for each in curves.values()} == {learned.TRAINED}
    scenario = learned.loads(learned.SCENARIO.format(disturbance=learned.DELAYS["0.1 % x 2 s"]))
    built = learned.build(scenario, scenario.schedules[0])
    ends_s = learned.ends_s_of(scenario, built, learned.run_seeds(0, 3))
    found = learned.learned(scenario, built, curves["sync"][:3], ends_s, corrected=True)
    row = learned.learned_row(found, found, learned.TARGET)
    assert row["reached"] == 3
    calm_s = 0.1
    assert row["target_s"] > calm_s * row["steps_to_target"]
