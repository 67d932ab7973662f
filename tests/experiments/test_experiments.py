"""The experiments hold what their pages say."""

import sys
from functools import cache

import pytest
from scripts import ROOT, load_script

from simdist.report import insert_tables, markdown_table
from simdist.scenario.warnings import warnings_of

HSGD = ROOT / "experiments" / "hsgd_stragglers"


run = load_script(HSGD / "run.py")


STUDY = run.Study(n_seeds=20, steps=None)


@cache
def effect(n_gpus, name):
    return run.measure_effect(STUDY, n_gpus, name)


@cache
def limits():
    return run.measure_limits(STUDY)


SMALLEST = min(run.PUBLISHED)
SIZES = pytest.mark.parametrize(
    "n_gpus", [pytest.param(n_gpus, marks=() if n_gpus == SMALLEST else pytest.mark.full) for n_gpus in run.PUBLISHED]
)


def sizes_and_hosts(*hosts):
    """Return sizes with hosts and more values; all sizes by default with the host of the scenario only."""
    return [
        pytest.param(n_gpus, host, *values, marks=pytest.mark.full if n_gpus != SMALLEST and host != "base" else ())
        for n_gpus in run.PUBLISHED
        for host, *values in hosts
    ]


@pytest.mark.parametrize(("n_gpus", "host"), sizes_and_hosts(("base",), ("host waits for averages",)))
def test_rows_come_in_the_published_order(n_gpus, host):
    """Local SGD with period 2 is the lower bound of the hierarchical rows and period 8 the upper; less is faster."""
    rows = effect(n_gpus, host)
    speedups = [rows[f"local-{period}"].speedup for period in (2, 4, 8)]
    assert speedups == sorted(speedups)
    hierarchical = run.hierarchical(rows)
    assert speedups[0] <= min(hierarchical)
    assert max(hierarchical) <= speedups[2]
    assert hierarchical == sorted(hierarchical)


@pytest.mark.parametrize(
    ("n_gpus", "host", "tolerance"),
    sizes_and_hosts(("base", (0.07, 0.06)), ("host waits for averages", (0.25, 0.10))),
)
def test_ends_of_the_published_range_are_met(n_gpus, host, tolerance):
    low, high = run.PUBLISHED[n_gpus]
    hierarchical = run.hierarchical(effect(n_gpus, host))
    assert min(hierarchical) == pytest.approx(low, rel=tolerance[0])
    assert max(hierarchical) == pytest.approx(high, rel=tolerance[1])


@SIZES
def test_blocking_hosts_and_hosts_three_steps_ahead_bracket_the_published_range(n_gpus):
    low, high = run.PUBLISHED[n_gpus]
    blocking = run.hierarchical(effect(n_gpus, "host waits for averages"))
    ahead = run.hierarchical(effect(n_gpus, "averaging hosts 3 ahead"))
    assert min(blocking) <= low <= min(ahead)
    assert max(blocking) <= high <= max(ahead)


@SIZES
def test_hosts_of_synchronous_sgd_that_ran_ahead_would_leave_little_to_gain(n_gpus):
    ahead = effect(n_gpus, "all hosts 3 ahead")
    assert ahead["sync"].step_s < 0.4 * effect(n_gpus, "base")["sync"].step_s
    assert max(run.hierarchical(ahead)) < 1.3


def test_persistent_straggler_is_beyond_help():
    for row in limits()["limit-persistent", "averages"].values():
        assert row.speedup == pytest.approx(1, abs=0.01)


def test_hosts_that_wait_for_their_own_update_gain_even_from_frequent_stragglers():
    """The published account sees no obvious advantage there: what speaks against this account of the host."""
    assert limits()["limit-frequent", "update"]["hsgd-2-8,4-32,8-64"].speedup > 1.3


def test_stragglers_among_30_percent_leave_three_levels_nothing():
    assert limits()["limit-frequent", "averages"]["hsgd-2-8,4-32,8-64"].speedup <= 1.1


def test_stragglers_that_cost_less_than_10_percent_do_not_pay_for_the_averages():
    rows = limits()["limit-mild", "averages"]
    undisturbed_s = rows["sync"].step_s - rows["sync"].wait_s - rows["sync"].host_s
    assert 1.03 < rows["sync"].step_s / undisturbed_s < 1.10
    assert max(run.hierarchical(rows)) <= 1.02


def test_page_shows_the_tables_of_the_code():
    rows = {n_gpus: effect(n_gpus, "base") for n_gpus in run.PUBLISHED}
    tables = {
        "published": markdown_table(run.published_table(rows)),
        "rows": markdown_table(run.rows_table(rows)),
        "limits": markdown_table(run.limits_table(limits())),
    }
    page = (HSGD / "README.md").read_text(encoding="utf-8")
    assert insert_tables(page, tables) == page


@pytest.mark.full
def test_page_shows_the_table_of_effects():
    rows = {n_gpus: {name: effect(n_gpus, name) for name in run.EFFECTS} for n_gpus in run.PUBLISHED}
    page = (HSGD / "README.md").read_text(encoding="utf-8")
    assert insert_tables(page, {"effects": markdown_table(run.effects_table(rows))}) == page


def test_quick_mode_prints_every_table(capsys, monkeypatch):
    monkeypatch.setattr(run, "PUBLISHED", {SMALLEST: run.PUBLISHED[SMALLEST]})
    monkeypatch.setattr(sys, "argv", ["run.py", "--all", "--seeds", "2", "--steps", "16"])
    run.main()
    printed = capsys.readouterr().out
    for name in ("published", "rows", "effects", "limits"):
        assert f"\n{name}\n" in printed


def test_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="0 places for table published"):
        insert_tables("", {"published": ""})


def test_every_scenario_of_the_experiment_loads_without_a_warning():
    from simdist.scenario import load

    files = sorted(HSGD.glob("*.yaml"))
    assert len(files) == 9
    for file in files:
        assert warnings_of(load(file)) == ()
