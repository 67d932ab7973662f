"""The engine is chosen before the run, and the choice is what trying all of them would find."""

import warnings

import numpy as np
import pytest
from engine_runs import alike, des, fast
from random_scenarios import random_scenario
from timeouts import within_cpu_s

from simdist.cost import Costs, Local, Resources
from simdist.engines import choose as choosing
from simdist.engines.choose import FAST_CANNOT, KINDS_CANNOT, RunToChoose, choose
from simdist.engines.contention import Contention
from simdist.engines.observers import StepSeconds, WholeTrace
from simdist.engines.run import run
from simdist.engines.vector import _BATCH_VALUES
from simdist.errors import UnforeseenError, UnsupportedError
from simdist.plan import Buffer, Forward, Plan
from simdist.plan.delays import SeedDelays
from simdist.runs.building import build, delays, simulate
from simdist.scenario import loads
from simdist.studies.comparison import measure_with_additions

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


def run_of_many_steps(n_steps, observe, engine="auto"):
    """Run a forward pass of 1,024 ranks again and again. A warning is an error, which ends it before it begins."""
    step = (Forward(("param",), ("loss",)),)
    buffers = (Buffer("param", 1, initialized=True), Buffer("loss", 1))
    short = Plan.from_steps("long", world_size=1024, buffers=buffers, steps=[step, step])
    resources = Resources(1024, 1, 0, 1)
    costs = Costs(resources, np.ones(resources.n_resources), {step[0]: Local(1.0)}, frozenset())
    with warnings.catch_warnings(action="error"):
        return run(short.repeated(range(1), n_steps), costs, {}, observe=observe, engine=engine)


@pytest.mark.parametrize(("engine", "n_steps"), [("fast", 90_000), ("des", 45_000)])
def test_what_takes_more_than_2_gb_says_so_before(engine, n_steps):
    """A trace has 3 arrays, a run of all events as many rows besides; 3 x 8 bytes x 1,024 ranks x 90,000 is 2.2 GB."""
    text = rf"long: the times of {n_steps:,} operations on 1,024 ranks will take about 2\.2 GB of memory"
    with pytest.raises(RuntimeWarning, match=text):
        run_of_many_steps(n_steps, WholeTrace(), engine)


def test_what_keeps_no_times_says_nothing_of_memory():
    assert run_of_many_steps(90_000, StepSeconds()) == pytest.approx([1.0])


def engine_of(number):
    scenario = random_scenario(number)
    built = build(scenario, scenario.schedules[0], proves=False)
    return chosen(built, delays(scenario)).engine


def has_contention(number):
    scenario = random_scenario(number)
    return bool(build(scenario, scenario.schedules[0], proves=False).costs.contested)


def test_draws_with_prices_of_their_own_choose_an_engine_together():
    """Their vectors exceed a cache, and 256 pairs share links, so where transfers meet depends on times."""
    scenario = loads(
        "cluster: {preset: dgx-h100, nodes: 64}\nworkload: {preset: resnet18}\nschedules: [gtopk]\nsteps: 2"
    )
    built = build(scenario, scenario.schedules[0])
    measured = measure_with_additions(scenario, built, n_seeds=1)
    n_draws = len(measured.drawn["step"])
    assert n_draws * scenario.cluster.world_size > _BATCH_VALUES
    assert measured.engine == "fast"
