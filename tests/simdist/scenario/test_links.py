"""What links do: the same whatever else is asked for, as the settings say, and refused where they say nonsense."""

import math
from itertools import islice, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import assert_message
from pydantic import ValidationError

from simdist.cost import Resources
from simdist.errors import ScenarioError
from simdist.runs.traffic import link_traffic
from simdist.scenario import dump, loads
from simdist.scenario.link_sampling import flights, link_shares
from simdist.scenario.links import (
    LinkBursts,
    LinkJitter,
    LinkOutages,
    LinkPersistent,
    LinkRecorded,
    OnOff,
    Periodic,
    Steady,
)
from simdist.scenario.warnings import warnings_of

RANDOM = [
    LinkJitter(link="nic", period_s=0.5, median=0.7, sigma=0.4),
    LinkBursts(link="nic", period_s=0.5, enter=0.1, leave=0.3, share=0.2),
    LinkOutages(link="nic", up_s=3.0, down_s=1.0),
]
BASE = """
cluster:
  nodes: 4
  gpus_per_node: 2
  fabric: {latency: 1 us, bandwidth: 100 GB/s}
  network: {latency: 10 us, bandwidth: 1 GB/s}
workload: {tensors: [{name: w, count: 1000}], batch_size: 1, forward: 4 ms, backward: 8 ms}
schedules: [{kind: sync}]
steps: 2
"""


def until(disturbance, end_s=100.0, *, seed=1, index=0, place=0):
    drawn = link_shares(disturbance, seed=seed, index=index, place=place)
    return list(takewhile(lambda change: change[0] < end_s, drawn))


def mean_share(disturbance, end_s, **drawn):
    times_s, shares = zip(*until(disturbance, end_s, **drawn), strict=True)
    return float((np.diff([*times_s, end_s]) * shares).sum()) / end_s


@pytest.mark.parametrize("disturbance", RANDOM, ids=lambda disturbance: disturbance.kind)
def test_a_link_has_its_numbers_by_seed_place_and_disturbance(disturbance):
    drawn = until(disturbance)
    assert drawn == until(disturbance)
    assert len({tuple(drawn), *(tuple(until(disturbance, **{key: 7})) for key in ("seed", "index", "place"))}) == 4


@given(st.sampled_from(RANDOM), st.integers(0, 2**64 - 1), st.integers(0, 20), st.integers(0, 100))
def test_shares_are_from_0_to_1_at_times_that_ascend_from_0(disturbance, seed, index, place):
    times_s, shares = zip(*islice(link_shares(disturbance, seed=seed, index=index, place=place), 600), strict=True)
    assert times_s[0] == 0.0
    assert (np.diff(times_s) > 0).all()
    assert 0 <= min(shares) <= max(shares) <= 1


def test_jitter_changes_every_period_and_has_the_stated_median():
    times_s, shares = zip(*until(RANDOM[0], 10_000.0), strict=True)
    assert np.array_equal(times_s, 0.5 * np.arange(20_000))
    assert np.median(shares) == pytest.approx(0.7, abs=0.01)
    assert np.mean(np.equal(shares, 1.0)) == pytest.approx(
        0.5 * math.erfc(-math.log(0.7) / 0.4 / math.sqrt(2)), abs=0.01
    )


def test_bursts_and_outages_last_as_long_as_stated():
    seeds = range(100)
    bursts = np.array([mean_share(RANDOM[1], 500.0, seed=seed) for seed in seeds])
    down = np.array([1 - mean_share(RANDOM[2], 500.0, seed=seed) for seed in seeds])
    for found, right in ((bursts, 1 - 0.8 * 0.25), (down, 0.25)):
        assert abs(found.mean() - right) < 3 * found.std(ddof=1) / math.sqrt(len(seeds))


def test_a_chain_that_never_turns_tells_its_state_now_and_then():
    never = LinkBursts(link="nic", period_s=1.0, enter=0.0, leave=0.5, share=0.5)
    assert [share for _, share in islice(link_shares(never, seed=0, index=0, place=0), 5)] == [1.0] * 5


def test_windows_and_outages_are_where_they_are_stated():
    assert until(LinkPersistent(link="switch", share=0.25)) == [(0.0, 0.25)]
    assert until(LinkPersistent(link="nic", share=0.5, end_s=2.0)) == [(0.0, 0.5), (2.0, 1.0)]
    once, often = LinkOutages(link="nic", at_s=3, lasts_s=2), LinkOutages(link="nic", at_s=0, lasts_s=1, every_s=4)
    assert until(once) == [(0.0, 1.0), (3.0, 0.0), (5.0, 1.0)]
    assert until(often, 6.0) == [(0.0, 0.0), (1.0, 1.0), (4.0, 0.0), (5.0, 1.0)]


def test_recorded_shares_are_those_of_the_file(tmp_path):
    text = "# time, node 1, node 3\n0, 1, 0.5\n2.5, 0, 1\n3, 0.25, 1\n"
    (tmp_path / "rates.csv").write_text(text)
    table = np.loadtxt(tmp_path / "rates.csv", delimiter=",")
    np.savez(tmp_path / "rates.npz", table)
    for name in ("rates.csv", "rates.npz"):
        line = f"disturbances: [{{kind: recorded, on: link, link: nic_in, nodes: [3, 1], file: {name}}}]"
        (recorded,) = loads(BASE + line, folder=tmp_path).disturbances
        assert until(recorded, place=1) == [(0.0, 1.0), (2.5, 0.0), (3.0, 0.25)]
        assert until(recorded, place=3) == [(0.0, 0.5), (2.5, 1.0), (3.0, 1.0)]


def test_flows_begin_and_end_where_they_are_stated():
    ends = {"source": 0, "to": 1}
    assert list(flights(Steady(**ends, begin_s=1.0), seed=0, index=0)) == [(1.0, None, math.inf)]
    periodic = flights(Periodic(**ends, nbytes=10, every_s=2.0, begin_s=1.0), seed=0, index=0)
    assert list(islice(periodic, 3)) == [(1.0, 10.0, None), (3.0, 10.0, None), (5.0, 10.0, None)]
    fixed = flights(OnOff(**ends, on_s=1.0, off_s=3.0, lengths="fixed"), seed=0, index=0)
    assert list(islice(fixed, 2)) == [(0.0, None, 1.0), (4.0, None, 5.0)]


def test_flows_are_on_for_their_share_of_the_time_and_by_counters_of_their_own():
    flows = OnOff(source=0, to=1, on_s=1.0, off_s=3.0)

    def on_s(seed, index=0):
        spans = takewhile(lambda flight: flight[0] < 400, flights(flows, seed=seed, index=index))
        return sum(min(end_s, 400) - begin_s for begin_s, _, end_s in spans)

    found = np.array([on_s(seed) / 400 for seed in range(100)])
    assert abs(found.mean() - 0.25) < 3 * found.std(ddof=1) / 10
    outages = until(LinkOutages(link="nic", up_s=3.0, down_s=1.0))
    assert len({on_s(0), on_s(0, index=1), sum(at_s for at_s, share in outages if not share)}) == 3


def test_a_scenario_with_links_reads_back_as_it_was_written(tmp_path):
    (tmp_path / "rates.csv").write_text("0,1,1,1,1\n")
    scenario = loads(
        BASE
        + """
disturbances:
- {kind: transient, probability: 1%, delay: 1 s}
- {kind: persistent, on: link, link: fabric_in, nodes: [3], share: 50%, begin: 1 s, end: 2 s}
- {kind: jitter, on: link, link: nic, period: 10 ms, median: 0.9, sigma: 0.3}
- {kind: bursts, on: link, link: switch, period: 10 ms, enter: 1%, leave: 5%, share: 10%}
- {kind: outages, on: link, link: nic_out, at: 1 s, lasts: 2 s, every: 5 s}
- {kind: recorded, on: link, link: nic, file: rates.csv}
background:
- {kind: steady, from: 0, to: 1, flows: 3}
- {kind: periodic, from: 2, to: 3, size: 10 MB, every: 1 s}
- {kind: on_off, from: 1, to: 0, on: 1 s, off: 2 s}
""",
        folder=tmp_path,
    )
    assert loads(dump(scenario)) == scenario
    assert scenario.is_random
    assert scenario.has_links
    assert "background" not in dump(loads(BASE))


WRONG = {
    "disturbances": [
        "{kind: persistent, on: link, share: 50%}",
        "{kind: persistent, on: link, link: nics, share: 50%}",
        "{kind: persistent, on: link, link: nic, share: 0}",
        "{kind: persistent, on: link, link: nic, share: 1.5}",
        "{kind: persistent, on: link, link: nic, share: 50%, ranks: [1]}",
        "{kind: persistent, on: link, link: nic, share: 50%, nodes: [7]}",
        "{kind: persistent, on: link, link: switch, share: 50%, nodes: [1]}",
        "{kind: persistent, on: link, link: storage, share: 50%}",
        "{kind: persistent, on: link, link: nic, share: 50%, begin: 2 s, end: 1 s}",
        "{kind: persistent, link: nic, share: 50%}",
        "{kind: transient, on: link, link: nic, share: 50%}",
        "{kind: jitter, on: link, link: nic, median: 50%, sigma: 1}",
        "{kind: bursts, on: link, link: nic, period: 1 s, enter: 0, leave: 0, share: 50%}",
        "{kind: outages, link: nic, at: 1 s, lasts: 1 s}",
        "{kind: outages, on: link, link: nic, at: 1 s}",
        "{kind: outages, on: link, link: nic, at: 1 s, lasts: 1 s, up: 1 s, down: 1 s}",
        "{kind: outages, on: link, link: nic, at: 1 s, lasts: 2 s, every: 2 s}",
        "{kind: recorded, on: link, link: nic, file: narrow.csv}",
        "{kind: recorded, on: link, link: nic, file: late.csv}",
        "{kind: recorded, on: link, link: nic, file: faster.csv}",
        "{kind: recorded, on: link, link: nic, file: dead.csv}",
        "{kind: recorded, on: link, link: nic, file: none.csv}",
    ],
    "background": [
        "{from: 0, to: 1}",
        "{kind: steady, from: 0}",
        "{kind: steady, from: 0, to: 0}",
        "{kind: steady, from: 0, to: 4}",
        "{kind: steady, from: 0, to: storage}",
        "{kind: steady, from: first, to: 1}",
        "{kind: steady, from: 0, to: 1, flows: 0}",
        "{kind: periodic, from: 0, to: 1, size: 10 MB, every: 0 s}",
        "{kind: on_off, from: 0, to: 1, on: 1 s, off: 1 s, lengths: short}",
    ],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_wrong_settings_of_links_are_named(key, value, tmp_path):
    for name, text in {
        "narrow": "0,1,1\n",
        "late": "1,1,1,1,1\n",
        "faster": "0,1,1,2,1\n",
        "dead": "0,1,1,0,1\n",
    }.items():
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(ScenarioError) as caught:
        loads(f"{BASE}{key}: [{value}]\n", name="x.yaml", folder=tmp_path)
    assert_message(f"links: {key}: {value}", str(caught.value), tmp_path)


@pytest.mark.parametrize("link", ["nic", "switch", "fabric"])
def test_a_share_of_an_unlimited_link_is_refused(link):
    text = BASE.replace("{latency: 10 us, bandwidth: 1 GB/s}", "ideal").replace(
        "{latency: 1 us, bandwidth: 100 GB/s}", "ideal"
    )
    with pytest.raises(ScenarioError) as caught:
        loads(f"{text}disturbances: [{{kind: persistent, on: link, link: {link}, share: 50%}}]\n", name="x.yaml")
    assert_message(f"links: unlimited {link}", str(caught.value))


def test_a_disturbance_in_python_is_checked_too():
    with pytest.raises(ValidationError, match="either at and lasts"):
        LinkOutages(link="nic")


@pytest.mark.parametrize(
    ("value", "warned"),
    [
        ("{kind: persistent, on: link, link: nic, share: 1}", "it leaves its links as they are"),
        ("{kind: bursts, on: link, link: nic, period: 1 s, enter: 0, leave: 1, share: 50%}", "it leaves its links"),
    ],
)
def test_disturbances_without_effect_are_told(value, warned):
    (sentence,) = warnings_of(loads(f"{BASE}disturbances: [{value}]\n"))
    assert warned in sentence


def test_files_of_recordings_may_have_one_link(tmp_path):
    (tmp_path / "rate.csv").write_text("0, 0.5\n")
    assert until(LinkRecorded(link="switch", file=tmp_path / "rate.csv")) == [(0.0, 0.5)]


SAVING = """
input: {source: device}
checkpoint: {every: 1, what: parameters}
disturbances:
  - {kind: persistent, on: link, link: storage, share: 50%}
  - {kind: persistent, on: link, link: nic_out, share: 50%}
"""


def test_links_that_only_checkpoints_use_have_an_effect():
    stored = BASE.replace("workload:", "  storage: {latency: 1 ms, bandwidth: 1 GB/s}\nworkload:").replace(
        "nodes: 4", "nodes: 1"
    )
    without = SAVING.replace("checkpoint: {every: 1, what: parameters}\n", "")
    assert not [each for each in warnings_of(loads(stored + SAVING)) if each.startswith("disturbances")]
    assert len([each for each in warnings_of(loads(stored + without)) if each.startswith("disturbances")]) == 2


def test_a_recording_of_many_links_is_read_once_for_a_run(tmp_path, monkeypatch):
    (tmp_path / "shares.csv").write_text("0,1,1,1,1\n1,0.5,0.6,0.7,0.8\n")
    recorded = "disturbances: [{kind: recorded, on: link, link: nic, file: shares.csv}]\n"
    scenario = loads(BASE + recorded, name="x.yaml", folder=tmp_path)
    table, n_reads = LinkRecorded.table, []
    monkeypatch.setattr(LinkRecorded, "table", lambda self: n_reads.append(self) or table(self))
    traffic = link_traffic(scenario, Resources(4, 2, 0, 1), scenario.seed)
    assert [list(each.shares())[1] for each in traffic.shares] == [(1.0, 0.5), (1.0, 0.6), (1.0, 0.7), (1.0, 0.8)]
    assert len(n_reads) == 1
