"""Settings and draws of failures: what a scenario may say, and the same failures for each seed, whatever is asked."""

import math
from itertools import islice, takewhile

import numpy as np
import pytest

from simdist.errors import ScenarioError
from simdist.scenario import dump, loads
from simdist.scenario.failure_sampling import FailureChances, failures_at_steps, failures_of
from simdist.scenario.failures import Failures
from simdist.scenario.warnings import warnings_of
from simdist.settings.units import parse_rate, parse_seconds
from simdist.studies.uncertainty import quantities

YEAR_S = 365 * 86_400.0
BASE = """
cluster: {nodes: 16, gpus_per_node: 1, fabric: ideal, network: {latency: 0 s, bandwidth: 100 MB/s}}
workload: {tensors: [{name: all, count: 1000}], batch_size: 1, forward: 40 ms, backward: 80 ms}
schedules: [sync]
steps: 1
train_for: 54 days
"""
CAUSES = """failures:
  causes:
  - {cause: gpu, of: gpu, rate: 17 % per year, effect: node}
  - {cause: software, of: job, rate: 1 per 3.09 h, effect: process, again: {probability: 30 %, after: 10 min}}
  - {cause: rack, of: domain, domain_nodes: 8, rate: 0.5 % per year, effect: node}
  - {cause: lemons, of: node, rate: 6.5e-3 per day, effect: node, worst: {nodes: 3, share: 50 %}}
  - {cause: hang, of: job, rate: 1 per 30 days, effect: hang}
  - {cause: slow, of: gpu, rate: 1 % per year, effect: slow, factor: 1.5, found_after: 2 h}
  - {cause: flap, of: node, rate: 1 per year, effect: flap, share: 0, lasts: 20 s}
  - {cause: corruption, of: gpu, rate: 0.2 % per year, effect: corruption, found_after: 6 h}
  - {cause: maintenance, effect: planned, at: [10 days], lasts: 1 h}
  - {cause: recorded, effect: process, at: [1 h, 5 h], ranks: [3, 9]}
  - {cause: injected, effect: process, at_steps: [60, 145, 240]}
  recovery:
    timeouts: {heartbeat: 100 s, watchdog: 15 min}
    schedule: 10 min
    alerts: {count: 2, within: 5 min}
    tries: {success: 90 %, most: 5, back_off: 1 min}
  on_failure: spare
  spares: 2
"""


def failures(*causes: dict, **others: object) -> Failures:
    return Failures.model_validate({"causes": list(causes), **others})


GPU = {"cause": "gpu", "of": "gpu", "rate": "100 % per year", "effect": "node"}


def test_a_scenario_with_failures_survives_its_file() -> None:
    scenario = loads(BASE + CAUSES)
    assert loads(dump(scenario)) == scenario
    assert scenario.failures is not None
    assert scenario.failures.causes[0].rate_per_s == pytest.approx(0.17 / YEAR_S)
    assert scenario.failures.longest_timeout_s == 900.0
    assert scenario.failures.recovery.not_stated == ("detect", "diagnose", "start", "connect", "warm_up")


def test_without_failures_nothing_is_written() -> None:
    scenario = loads(BASE)
    assert scenario.failures is None
    assert "failures" not in dump(scenario)
    assert "failures" not in scenario.model_dump(mode="json")


def test_rates_are_varied_and_may_be_ranges_that_no_step_depends_on() -> None:
    text = BASE + CAUSES + "uncertain: {failures.causes.0.rate: {from: 10 % per year, to: 25 % per year}}\n"
    scenario = loads(text)
    assert not [each.path for each in quantities(scenario) if each.path[0] == "failures"]
    changed = scenario.changed("failures.causes[0].rate", "20 % per year")
    assert changed.failures is not None
    assert changed.failures.causes[0].rate_per_s == pytest.approx(0.2 / YEAR_S)
    with pytest.raises(ScenarioError, match="outside '30 % per year' to '40 % per year'"):
        loads(text.replace("from: 10 %", "from: 30 %").replace("to: 25 %", "to: 40 %"))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("rate: 17 % per year", "rate: 17 %", "causes[0].rate: '17 %' is not a rate: write e.g. 17 % per year"),
        ("rate: 17 % per year", "rate: 0.17", "causes[0].rate: 0.17 is not a rate"),
        ("rate: 17 % per year", "rate: 17 % per yr", "'yr' is no period: write per year, days, h, min or s"),
        ("rate: 17 % per year, ", "", "causes[0].rate: how often? Write one of rate"),
        ("of: gpu, rate: 17 %", "rate: 17 %", "causes[0].of: a rate of what?"),
        ("rate: 17 % per year", "every: [2 h, 1 h]", "causes[0].every: the first is longer than the second"),
        ("rate: 17 % per year", "rate: 1e10 per s", "causes[0].rate: '1e10 per s': write 1,000,000,000 per s or less"),
        ("cause: gpu", "cause: ''", "causes[0].cause: '': write a name, e.g. gpu"),
        ("of: domain, ", "of: node, ", "causes[2].domain_nodes: not with of: node: it belongs to of: domain"),
        ("domain_nodes: 8, ", "", "causes[2].domain_nodes: required with of: domain: write e.g. domain_nodes: 8"),
        ("domain_nodes: 8", "domain_nodes: 80", "causes[2].domain_nodes: 80: the cluster has 16 nodes"),
        ("share: 50 %", "share: 1 %", "causes[3].worst.share: 0.01 is less than the 18.8% of any 3 nodes"),
        ("nodes: 3,", "nodes: 16,", "causes[3].worst.nodes: 16 of 16 nodes: write less than all"),
        ("watchdog: 15 min", "watchdog: 0 s", "recovery.timeouts.watchdog: "),
        ("timeouts: {heartbeat: 100 s, watchdog: 15 min}", "detect: 1 s", "causes[4].effect: hang: a time-out finds"),
        ("effect: hang", "effect: hang, found_by: wachdog", "'wachdog' is no time-out of recovery.timeouts: did"),
        ("factor: 1.5, ", "", "causes[5].factor: required with effect: slow: write e.g. factor: 1.5"),
        ("lasts: 20 s", "lasts: 0 s", "causes[6].lasts: 0 s: a flap of no length does nothing"),
        ("share: 0,", "share: 0, link: nic,", "causes[6].link: with share: 0 the job stands still"),
        ("found_after: 6 h", "found_after: 6 h, notice: 1 s", "notice: not with effect: corruption: it belongs to"),
        ("ranks: [3, 9]", "ranks: [3, 99]", "causes[9].ranks[1]: 99 is out of range"),
        ("ranks: [3, 9]", "ranks: [3]", "causes[9].ranks: 1 ranks for 2 failures: write one for each"),
        ("cause: injected", "cause: recorded", "causes[10].cause: duplicate name 'recorded'"),
        ("on_failure: spare", "on_failure: restart", "failures.spares: 2 with on_failure: restart"),
        ("probability: 30 %", "probability: 100 %", "causes[1].again.probability: 100 %: the node would fail for ever"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_at_its_place(before: str, after: str, message: str) -> None:
    assert before in CAUSES
    with pytest.raises(ScenarioError) as error:
        loads(BASE + CAUSES.replace(before, after))
    assert message in str(error.value)


@pytest.mark.parametrize("spares", ["", "  spares: 0\n"])
def test_spare_without_spares_has_no_effect(spares: str) -> None:
    assert warnings_of(loads(BASE + CAUSES)) == ()
    assert warnings_of(loads(BASE + CAUSES.replace("  spares: 2\n", spares))) == (
        "failures.on_failure has no effect: without spares all ranks start again, as with restart: write "
        "failures.spares, e.g. 2, or on_failure: restart",
    )


@pytest.mark.parametrize(
    ("text", "per_s"),
    [("17 % per year", 0.17 / YEAR_S), ("1 per 3.09 h", 1 / (3.09 * 3600)), ("2.5 per 100 days", 2.5 / 8.64e6)],
)
def test_rates_are_read(text: str, per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(per_s, rel=1e-15)
    assert parse_seconds("54 days") == 54 * 86_400.0


def test_injected_failures_come_between_the_shortest_and_the_longest_gap() -> None:
    injected = failures({"cause": "kill", "of": "node", "every": ["45 min", "75 min"], "effect": "node"})
    found = list(islice(failures_of(injected, seed=0, n_nodes=8, gpus_per_node=8), 1000))
    gaps_s = np.diff([0.0, *(each.at_s for each in found)])
    assert gaps_s.min() >= 2700
    assert gaps_s.max() <= 4500
    assert gaps_s.mean() == pytest.approx(3600, abs=3 * 1800 / math.sqrt(12 * 1000))
    assert {each.first_node for each in found} == set(range(8))
    (twice,) = (each.scaled(2.0) for each in injected.causes)
    assert twice.every_s == (1350.0, 2250.0)


def test_failures_come_at_their_rate_and_everywhere() -> None:
    """In 1,000 GPU-years at one per GPU and year, 1,000 come, within three standard errors; gaps are exponential."""
    found = list(
        takewhile(lambda each: each.at_s < YEAR_S, failures_of(failures(GPU), seed=3, n_nodes=125, gpus_per_node=8))
    )
    assert len(found) == pytest.approx(1000, abs=3 * math.sqrt(1000))
    gaps_s = np.diff([0.0, *(each.at_s for each in found)])
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=3 / math.sqrt(len(found)) * 2)
    counts = np.bincount([each.rank for each in found], minlength=1000)
    assert counts.var() == pytest.approx(1.0, abs=0.2)  # Poisson
    assert all(each.first_node == each.rank // 8 for each in found)


def test_failures_are_the_same_everywhere() -> None:
    """To the last bit, on every machine."""
    found = list(islice(failures_of(failures(GPU), seed=0, n_nodes=128, gpus_per_node=8), 3))
    times = ["0x1.229fcc1e56247p+15", "0x1.4698d0f6ecc91p+15", "0x1.5d8f4c9329fffp+15"]
    assert [(each.at_s.hex(), each.rank) for each in found] == list(zip(times, [162, 18, 882], strict=True))
    chances = FailureChances(0)
    assert [chances.next(found[2]).hex() for _ in range(2)] == ["0x1.e84ad56c40f59p-1", "0x1.69325cab8a0fap-2"]


def test_failures_do_not_depend_on_what_else_is_asked_for() -> None:
    software = {"cause": "software", "of": "job", "rate": "1 per 3 h", "effect": "process"}
    alone = list(islice(failures_of(failures(GPU), seed=3, n_nodes=125, gpus_per_node=8), 600))
    both = failures_of(failures(GPU, software, on_failure="continue"), seed=3, n_nodes=125, gpus_per_node=8)
    assert list(islice((each for each in both if each.cause == 0), 600)) == alone
    other = list(islice(failures_of(failures(GPU), seed=4, n_nodes=125, gpus_per_node=8), 600))
    assert {each.at_s for each in other}.isdisjoint(each.at_s for each in alone)
    times_s = [
        each.at_s for each in islice(failures_of(failures(GPU, software), seed=3, n_nodes=125, gpus_per_node=8), 600)
    ]
    assert times_s == sorted(times_s)


def test_worst_nodes_have_their_share_and_others_fail_alike() -> None:
    """3 of 63 nodes had more than half of the exclusions (arXiv 2605.09370)."""
    cause = {
        "cause": "lemons",
        "of": "node",
        "rate": "1 per day",
        "effect": "node",
        "worst": {"nodes": 3, "share": 0.5},
    }
    found = list(islice(failures_of(failures(cause), seed=1, n_nodes=63, gpus_per_node=8), 20_000))
    counts = np.bincount([each.first_node for each in found], minlength=63)
    worst = np.argsort(counts)[-3:]
    assert counts[worst].sum() / 20_000 == pytest.approx(0.5, abs=3 * 0.5 / math.sqrt(20_000))
    usual = np.array([sum(each.first_node == node and not each.is_excess for each in found) for node in range(63)])
    assert usual[worst].mean() == pytest.approx(
        usual.mean(), rel=0.15
    )  # without their excess, they are like the others


@pytest.mark.parametrize(
    ("of", "effect", "expected"),
    [
        ("gpu", "process", (1, 1, 9)),
        ("node", "node", (1, 1, 9)),
        ("domain", "node", (0, 2, 9)),
        ("job", "process", (0, 3, 9)),
    ],
)
def test_a_recorded_failure_hits_what_has_its_rank(of: str, effect: str, expected: tuple[int, int, int]) -> None:
    cause = {"cause": "x", "of": of, "effect": effect, "at_steps": [7], "ranks": [9]}
    cause |= {"domain_nodes": 2} if of == "domain" else {}
    ((step, found),) = failures_at_steps(failures(cause), n_nodes=3, gpus_per_node=8)
    assert (step, found.first_node, found.n_nodes, found.rank) == (7, *expected)


def test_chances_of_a_failure_are_its_own() -> None:
    found = list(islice(failures_of(failures(GPU), seed=3, n_nodes=125, gpus_per_node=8), 600))
    one, two = FailureChances(3), FailureChances(3)
    forward = {each.number: [one.next(each) for _ in range(3)] for each in found}
    backward = {each.number: [two.next(each) for _ in range(3)] for each in reversed(found)}
    assert forward == backward
    assert np.mean(list(forward.values())) == pytest.approx(0.5, abs=3 / math.sqrt(12 * 1800))
