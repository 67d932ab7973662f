"""The page on garbage collection shows what its script computes, and the script computes what it says."""

import dataclasses

import numpy as np
import pytest
from scripts import ROOT, load_script

from simdist.report import insert_tables

HERE = ROOT / "experiments" / "garbage_collection"
run = load_script(HERE / "run.py")
FACTS = run.read_facts(HERE / "published.json")


def test_page_shows_the_tables():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert insert_tables(page, run.tables(FACTS)) == page


def test_pauses_are_placed_as_often_and_in_as_many_steps_as_is_published():
    late_s = run.placed_s(FACTS, run.NOTHING_S, seed=3)[0]
    assert np.count_nonzero(late_s) == 72
    assert np.count_nonzero(late_s.any(axis=1)) == 48
    assert late_s[late_s > 0].min() >= 1.15
    assert late_s.max() <= 1.30


def test_run_is_longer_by_the_longest_pause_of_each_step():
    late_s = run.placed_s(FACTS, run.NOTHING_S, seed=3)[0]
    expected = 300 * FACTS.step_s + late_s.max(axis=1).sum()
    assert run.placed_run_s(FACTS, run.NOTHING_S, seed=3) == pytest.approx(expected, rel=1e-12)


def test_pause_at_any_moment_of_the_update_costs_its_square_over_two_updates():
    """With one pause p a step of T, the part that is not hidden is p^2 / (2 T) in the mean."""
    facts = dataclasses.replace(FACTS, collections=48, pause_s=(1.2, 1.2))
    lost_s = [run.placed_s(facts, (0.0, facts.step_s), seed).sum() / 48 for seed in range(200)]
    assert np.mean(lost_s) == pytest.approx(1.2**2 / (2 * facts.step_s), rel=0.03)


def test_hosts_an_update_ahead_hide_all_of_a_pause_that_is_shorter_than_the_update():
    ahead = run.Host(run_ahead_steps=1)
    assert run.placed_run_s(FACTS, run.NOTHING_S, 0, ahead) == pytest.approx(300 * FACTS.step_s, rel=1e-12)


def test_scenario_states_the_pauses_that_the_script_draws():
    scenario = run.load(HERE / "scenario.yaml")
    assert (scenario.cluster.world_size, scenario.steps) == (FACTS.processes, FACTS.updates)
    (stated,) = scenario.disturbances
    assert (stated.every, stated.first, stated.delay_s) == (FACTS.every, None, FACTS.pause_s)
    assert stated.covered_s == (0.0, pytest.approx(FACTS.step_s, rel=1e-3))


def test_run_that_collects_together_takes_its_published_time():
    """Its step time is taken from there: this is no prediction."""
    assert run.coordinated_run_s(FACTS) == pytest.approx(774.7, rel=1e-9)
