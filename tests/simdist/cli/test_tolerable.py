"""`simdist compare --tolerable`: the largest tolerable rate of stragglers, against closed forms."""

import json
import re

import numpy as np
import pytest
from commandline import Answer, call, write

from simdist.scenario import load
from simdist.studies import tolerable_rate
from simdist.studies.tolerable_rate import tolerance

SCENARIO = """\
cluster: {nodes: 4, gpus_per_node: 1, fabric: ideal, network: ideal}
workload: {tensors: [{name: all, count: 1000}], batch_size: 1, forward: 40 ms, backward: 60 ms}
schedules: [{kind: sync}, {kind: local_sgd, period: 10}]
disturbances: [{kind: transient, probability: 50%, delay: 100 ms}]
steps: 500
"""


def document(answer: Answer) -> dict:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "s.yaml", SCENARIO)


def test_rate_is_that_of_the_closed_form(path, capsys):
    """A step of 100 ms takes 100 ms more with probability 1 - (1 - p)^4, which is 1/19 at a loss of 5 %."""
    rows = document(call(capsys, "compare", path, "--tolerable", "--seeds", "20", "--json"))["rows"]
    sync, local = rows
    assert sync["step_s"] == pytest.approx(0.1)
    assert sync["probability"] == pytest.approx(1 - (1 - 1 / 19) ** (1 / 4), rel=0.05)
    assert 0.045 < sync["loss"] <= 0.05
    assert sync["steps_between"] == pytest.approx(1 / (4 * sync["probability"]))
    assert local["probability"] > sync["probability"]


def test_delay_and_loss_may_be_stated(path, capsys):
    """Half of the time may be lost: a second for each straggler, so one in ten steps."""
    found = document(call(capsys, "compare", path, "--tolerable", "--delay", "1s", "--loss", "50%", "--json"))
    assert (found["delay_s"], found["most_loss"], len(found["rows"])) == (1.0, 0.5, 2)
    assert found["rows"][0]["probability"] == pytest.approx(1 - 0.9 ** (1 / 4), rel=0.1)


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        (["--delay", "1ms"], ["always", "0.25 steps", "101 ms", "1.0 %"]),
        (["--delay", "1h", "--loss", "1%"], ["none", "-", "100 ms", "0 %"]),
    ],
    ids=["harmless", "fatal"],
)
def test_always_and_never_are_told(path, capsys, options, cells):
    out = call(capsys, "compare", path, "--tolerable", *options).out
    line = next(line for line in out.splitlines() if line.startswith(" sync"))
    assert [cell.strip() for cell in line.split("  ") if cell.strip()][2:] == cells


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--loss", "0%"], "--loss 0%: write a share above 0% and below 100%, e.g. 5%"),
        (["--delay", "0s"], "--delay 0s: write a time above 0 s, e.g. 100 ms"),
        (["--delay", "fast"], "--delay: 'fast' is not a time: write e.g. 55 ms"),
        (["--engine", "des"], "--engine: means nothing with --tolerable: leave it out"),
    ],
)
def test_wrong_options_are_told(path, capsys, options, problem):
    answer = call(capsys, "compare", path, "--tolerable", *options)
    assert answer.code == 2
    assert problem in answer.err


def test_a_scenario_without_stragglers_needs_a_delay(tmp_path, capsys):
    path = write(tmp_path / "s.yaml", SCENARIO.replace("disturbances:", "# "))
    assert "has no transient stragglers: write --delay" in call(capsys, "compare", path, "--tolerable").err
    assert json.loads(call(capsys, "compare", path, "--tolerable", "--delay", "100ms", "--json").out)["delay_s"] == 0.1


def test_progress_is_even_and_ends_at_all(path):
    scenario = load(path)
    told: list[float] = []
    tolerance(scenario, scenario.schedules[0], delay_s=0.1, most_loss=0.05, n_seeds=1, progress=told.append)
    assert told[-1] == 1
    assert np.diff(told) == pytest.approx([1 / len(told)] * (len(told) - 1))


def test_what_is_found_is_told_when_the_rest_is_interrupted(path, capsys, monkeypatch):
    def first_only(scenario, schedule, **given):
        if schedule.name != "sync":
            raise KeyboardInterrupt
        return tolerance(scenario, schedule, **given)

    monkeypatch.setattr(tolerable_rate, "tolerance", first_only)
    answer = call(capsys, "compare", path, "--tolerable", "--seeds", "1")
    assert answer.code == 130
    assert re.search(r"^sync: tolerable [\d.]+ %$", answer.err, re.MULTILINE)
    assert answer.err.endswith("interrupted at local-10, 50%; nothing was saved\n")
