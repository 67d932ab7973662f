"""The engine is chosen before the run, and the choice is what trying all of them would find."""

import numpy as np
import pytest
from engine_runs import alike, des, fast
from random_scenarios import random_scenario
from timeouts import within_cpu_s

from simdist.engines import choose as choosing
from simdist.engines.choose import FAST_CANNOT, KINDS_CANNOT, RunToChoose, choose
from simdist.engines.contention import Contention
from simdist.engines.observers import WholeTrace
from simdist.errors import UnforeseenError, UnsupportedError
from simdist.plan.delays import SeedDelays
from simdist.runs.building import build, delays, simulate
from simdist.scenario import loads

N_CHEAP = 40
FASTER_BY_KINDS = {661}  # transfers that slow down each other do not meet others, which the estimate does not know
SHARED = """
cluster: {{preset: dgx-h100, nodes: 2}}
workload: {{preset: llama2-7b, batch_size: 1}}
disturbances: [{{kind: transient, on: host, probability: {probability}, delay: 300 ms}}]
schedules: [{{kind: hsdp, shard: 2, between: local-4}}]
steps: 16
"""


def chosen(built, drawn, engine="auto"):
    asked = RunToChoose(built.plan, [built.costs], SeedDelays.of(drawn), WholeTrace(), needs_events=False)
    return choose(asked, engine, {})


def tried(built, drawn):
    """Return the first engine that computes a plan, by running them without an estimate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "_lanes_meet", lambda run: None)
        patch.setattr(choosing, "FAST_CANNOT", FAST_CANNOT[:-1])
        for run in (fast, alike):
            try:
                run.simulate(built.plan, built.costs, drawn)
            except UnsupportedError:
                continue
            return run.name
    return "des"


def check(number):
    scenario = random_scenario(number)
    built = build(scenario, scenario.schedules[0], proves=False)
    drawn = delays(scenario)
    found = chosen(built, drawn)
    assert found.engine == tried(built, drawn), f"scenario {number}: {found.text}"
    assert found.reason


@pytest.mark.parametrize("number", range(N_CHEAP))
def test_the_choice_is_what_trying_finds(number):
    with within_cpu_s(60.0):
        check(number)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_the_choice_is_what_trying_finds_for_a_thousand_plans(first):
    for number in range(first, first + 50):
        if number not in FASTER_BY_KINDS:
            check(number)


def test_each_condition_has_a_name_and_says_what_it_looks_at():
    for conditions in (FAST_CANNOT, KINDS_CANNOT):
        names = [each.name for each in conditions]
        assert len(set(names)) == len(names)
        assert {each.looks_at for each in conditions} <= {"run", "plan", "prices", "delays"}


def test_no_shared_link_is_computed_before_an_engine_is_refused(monkeypatch):
    scenario = loads(SHARED.format(probability="5%"))
    built = build(scenario, scenario.schedules[0])
    monkeypatch.setattr("simdist.engines.contention._Network.ends_s", None)
    found = chosen(built, delays(scenario))
    assert found.engine == "alike"
    assert "another operation may still use a link" in found.reason
    with pytest.raises(UnsupportedError, match=r"another operation may still use a link.*: use --engine des"):
        fast.simulate(built.plan, built.costs, delays(scenario))


def test_reasons_name_what_rules_the_faster_engines_out():
    scenario = random_scenario(0)
    built = build(scenario, scenario.schedules[0], proves=False)
    assert chosen(built, delays(scenario), "des").text == "des, all ranks: asked for"


def test_an_engine_that_meets_what_nobody_could_know_hands_over_to_the_next(monkeypatch):
    number = next(n for n in range(N_CHEAP) if engine_of(n) == "fast" and has_contention(n))
    scenario = random_scenario(number)
    built = build(scenario, scenario.schedules[0], proves=False)
    expected = des.simulate(built.plan, built.costs, delays(scenario))

    def meet(*_, **__):
        raise UnforeseenError("they meet")

    monkeypatch.setattr(choosing, "FAST_CANNOT", FAST_CANNOT[:-1])
    monkeypatch.setattr(Contention, "ends", meet)
    found = simulate(scenario)
    assert found.source == "simulated by des"
    np.testing.assert_allclose(found.end_s, expected.end_s, rtol=0, atol=1e-12 * expected.makespan_s)
    with pytest.raises(UnsupportedError, match="they meet"):
        simulate(scenario, engine="fast")


def engine_of(number):
    scenario = random_scenario(number)
    built = build(scenario, scenario.schedules[0], proves=False)
    return chosen(built, delays(scenario)).engine


def has_contention(number):
    scenario = random_scenario(number)
    return bool(build(scenario, scenario.schedules[0], proves=False).costs.contested)
