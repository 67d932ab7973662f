"""Search by time to a target: the best of an exhaustive search, for a part of its steps."""

import json
import math
import random
from dataclasses import replace

import learners
import numpy as np
import pytest
from commandline import call, edited, write

from simdist.learning import training
from simdist.learning.curves import Curve, parse_target
from simdist.learning.summary import Learned
from simdist.learning.timing import timed
from simdist.learning.training import TaskSetting
from simdist.scenario import loads
from simdist.scenario.sampling import run_seeds
from simdist.tuning import racing
from simdist.tuning.candidates import schedule_of
from simdist.tuning.constraints import Constraints
from simdist.tuning.racing import race, within
from simdist.tuning.space import space
from simdist.tuning.tuning import Extras

LARGE = """\
cluster: {nodes: 8, gpus_per_node: 8, fabric: ideal, network: {latency: 25 us, bandwidth: 25 Gbit/s}}
workload: {tensors: [{name: all, count: 12000000}], batch_size: 1, forward: 14 ms, backward: 26 ms}
disturbances: [{kind: exponential, on: compute, mean: 8 ms}]
schedules: [{kind: sync}]
steps: 160
"""
TARGET = parse_target("accuracy >= 0.95")
EVERY = 8


@pytest.fixture(scope="module")
def entrants():
    scenario = loads(LARGE)
    task = TaskSetting("task", (("weight", (40, 10), "float32"),), "", EVERY)
    found = space(scenario, Constraints(8), Extras(only=("sync", "local_sgd", "hierarchical_sgd"))).candidates
    chosen = [each for each in found if not each.changed and each.global_every in (1, 4, 8)]
    simulated = [timed(scenario, schedule_of(each), task, n_seeds=2) for each in chosen]
    return [replace(each, lr_factor=factor) for each in simulated for factor in (0.5, 1.0, 2.0)]


def recorded(entrant, *, chance):
    """Make up a curve: slower the more seldom ranks average, by the learning rate, and somewhat by chance."""
    name = f"{entrant.schedule.name} {entrant.lr_factor} {chance}"
    seldom = 1 + 0.05 * sum(map(int, filter(str.isdigit, entrant.schedule.name)))
    tau = 25 * seldom / entrant.lr_factor**0.7 * random.Random(name).uniform(0.85, 1.15)
    n_steps = entrant.ends_s.shape[1]
    steps = sorted({*range(0, n_steps + 1, EVERY), n_steps})
    accuracy = [1 - math.exp(-step / tau) + random.Random(f"{name} {step}").gauss(0, 0.01) for step in steps]
    return Learned(entrant, [curve(steps, accuracy)])


def curve(steps, accuracy):
    nothing, unknown = [0.0] * len(steps), [None] * len(steps)
    return Curve(steps, nothing, {}, {"accuracy": accuracy}, nothing, unknown, unknown, {}, None)


@pytest.mark.parametrize("chance", range(5))
def test_finds_the_best_of_an_exhaustive_search_for_a_third_of_its_steps(entrants, chance):
    assert len(entrants) >= 30
    trained = {}

    def train(some):
        trained.update({(each.schedule.name, each.lr_factor, each.plan.n_steps): each.plan.n_steps for each in some})
        return [recorded(each, chance=chance) for each in some]

    found, base, _ = race(entrants, train, TARGET, every=EVERY, n_base=3)
    assert base is min(entrants[:3], key=lambda each: recorded(each, chance=chance).to_target(TARGET)[1, 0])
    n_race = sum(trained.values())
    all_s = [recorded(within(each, math.inf, EVERY), chance=chance).to_target(TARGET)[1, 0] for each in entrants]
    best = entrants[int(np.argmin(all_s))]
    assert math.isfinite(min(all_s))
    assert (found[0].schedule.name, found[0].lr_factor) == (best.schedule.name, best.lr_factor)
    assert sorted(map(id, found)) == sorted(map(id, entrants))
    assert n_race <= 0.35 * len(entrants) * 160


def test_what_starts_slowly_gets_a_second_chance(entrants):
    """It is the worst at the first rung, and the first to reach the target."""
    slow = min(entrants, key=lambda each: each.ends_s[:, -1].mean())

    def learned(entrant):
        steps = [*range(0, entrant.plan.n_steps + 1, EVERY)]
        accuracy = [step / 160 if entrant.schedule != slow.schedule else float(step >= 24) for step in steps]
        return Learned(entrant, [curve(steps, accuracy)])

    def train(some):
        return [learned(each) for each in some]

    found, _, n_fell = race([*entrants[-60:], slow], train, parse_target("accuracy >= 0.25"), every=EVERY)
    assert found[0] is slow
    assert n_fell == 0


@pytest.mark.parametrize(
    ("steps", "winner", "outcome", "said"),
    [
        ((80, 80, 80), 2, "change", "times as fast"),  # though another one was before it in the search
        ((80, 152, 160), None, "stay", "stay with"),
        ((80, 152, 80), 2, "change", "times as fast"),
        ((None, 80, None), 1, "change", "reaches the target in all 2 runs, "),
        ((None, None, None), None, "unsure", "no schedule surely reaches"),
        ((0, 0, 0), None, "unsure", "is met before the first step"),
    ],
)
def test_the_verdict_is_the_finalist_that_is_surely_soonest(entrants, steps, winner, outcome, said):
    by_step_s = sorted(entrants[::3], key=lambda each: each.ends_s[:, -1].mean())
    finalists = [by_step_s[-1], by_step_s[len(by_step_s) // 2], by_step_s[0]]
    at = [*range(0, 161, EVERY)]
    curves = [curve(at, [float(there is not None and step >= there) for step in at]) for there in steps]
    found = [Learned(each, [its] * 2) for each, its in zip(finalists, curves, strict=True)]
    best, *verdict = racing._verdict(found, TARGET)
    assert best is (None if winner is None else found[winner])
    assert verdict[0] == outcome
    assert said in verdict[1]


def test_of_schedules_that_learn_the_same_only_the_fastest_is_trained(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "_COMMAND", learners.COMMAND)
    monkeypatch.setenv("LEARNER_LOG", str(tmp_path / "log"))
    buckets = "    - {name: weight, count: 4000000}\n    - {name: bias, count: 4000000}\n"
    small = "    - {name: weight, count: 100000}\n    - {name: bias, count: 1000}\n"
    job = write(tmp_path / "job.yaml", edited((small, buckets), ("steps: 12", "steps: 40")))
    asked = ["--only", "sync", "--task", "toy", "--workers", "0", "--seeds", "2", "--learning-rates", "1,2,9"]
    answer = call(capsys, "tune", job, *asked, "--target", "accuracy >= 0.7", "-o", tmp_path / "d", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert document["n_fell"] == 0
    assert document["n_entrants"] == 3  # of six sizes of buckets that the task does not fill, one
    assert document["rows"][0]["lr_factor"] == 2.0
    assert document["baseline"] == "sync lr x2"
    assert document["outcome"] == "stay"
    assert document["verdict"] == "stay with sync lr x2"
    assert document["n_steps"] < document["n_exhaustive_steps"] == 120
    runs = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    fresh = run_seeds(*run_seeds(1, 1, first=5), 2)
    assert {run["seed"] for run in runs if run["steps"] == 40} >= {*fresh}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "accuracy >= 0.9"], "--target, --task: write both"),
        (["--learning-rates", "1"], "--target, --task: write both"),
        (["--device", "cuda"], "--target, --task: write both"),
        (["--target", "a >= 1", "--task", "toy", "--learning-rates", ""], "--learning-rates: '' is not a factor"),
        (["--target", "a >= 1", "--task", "toy", "--learning-rates", "1,-2"], "--learning-rates: '-2' is not a factor"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, monkeypatch, tmp_path, options, message):
    monkeypatch.setattr(training, "_COMMAND", learners.COMMAND)
    answer = call(capsys, "tune", write(tmp_path / "job.yaml"), *options)
    assert answer.code == 2
    assert message in answer.err
