"""A schedule is recommended only if what nobody measured leaves no other one that may be better."""

import re

from simdist import scenario
from simdist.tuning import Constraints, Extras, TuneOptions, tune
from simdist.tuning.evaluating import clearly_faster

TEXT = """\
cluster:
  nodes: 8
  gpus_per_node: 4
  fabric: {latency: 5 us, bandwidth: 12 GB/s}
  network: {latency: 200 us, bandwidth: 25 Gbit/s, efficiency: 0.3}
  uncertain: {fabric.bandwidth: {from: 1 GB/s, to: 12 GB/s, source: data sheets, measure: busbw in a node}}
workload: {preset: resnet18, forward: 20 ms, backward: 35 ms}
steps: 20
schedules: [{kind: sync}]
"""


def tuned(text, *kinds):
    return tune(scenario.loads(text), TuneOptions(Constraints(global_every=2), Extras(only=kinds)))


def test_a_verdict_that_the_range_does_not_support_is_not_given():
    found = tuned(TEXT, "sync", "torus")
    verdict = found.verdict
    assert (verdict.winner, verdict.outcome) == (None, "unsure")
    names, _, why = verdict.sentence.partition(": which one depends on ")
    assert re.fullmatch(r"sync(-\S+)? or torus.*", names)
    assert why == "cluster.fabric.bandwidth (1 GB/s to 12 GB/s, data sheets): measure busbw in a node"
    torus = next(each for each in found.finalists if each.schedule.kind == "torus")
    low, high = torus.row.speedup_range
    assert low < 1 < torus.row.speedup <= high
    (baseline,) = (each for each in found.finalists if each.is_baseline)
    assert not clearly_faster(found.runs, torus, baseline)


def test_the_same_is_recommended_where_the_number_is_known():
    found = tuned(re.sub(r"  uncertain:.*\n", "", TEXT), "sync", "torus")
    assert found.verdict.winner.schedule.kind == "torus"
    assert found.verdict.winner.row.speedup_range is None


def test_a_verdict_that_the_range_supports_is_given_with_its_interval():
    verdict = tuned(TEXT, "local_sgd").verdict
    assert verdict.outcome == "change"
    low, high = verdict.winner.row.speedup_range
    assert f"({low:.2f}-{high:.2f})" in verdict.sentence


def test_staying_is_not_recommended_either_if_the_range_does_not_support_it():
    found = tuned(TEXT.replace("bandwidth: 12 GB/s}", "bandwidth: 1.2 GB/s}"), "torus")
    assert found.verdict.outcome == "unsure"
    assert found.verdict.sentence.startswith("sync or torus")
    assert "cluster.fabric.bandwidth" in found.verdict.sentence


def test_a_network_whose_efficiency_is_not_stated_is_a_doubt():
    found = tuned(TEXT.replace(", efficiency: 0.3", ""), "sync", "torus")
    assert any(each.text.startswith("cluster.network.efficiency is not stated") for each in found.remarks)
