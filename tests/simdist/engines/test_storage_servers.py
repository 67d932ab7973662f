"""Several storage servers: closed forms of reading and writing, exact in both engines."""

import json

import numpy as np
import pytest
from commandline import call, write
from engine_runs import des, fast

from simdist.errors import ScenarioError
from simdist.runs.building import build, delays, traffic
from simdist.scenario import dump, loads
from simdist.studies.comparison import compare
from simdist.studies.epoch_bounds import epoch_limits

LATENCY_S, SERVER_BPS = 0.01, 1e6
N_SAMPLE_BYTES = 30_000  # 0.03 s from a server alone

SCENARIO = """
cluster:
  nodes: NODES
  gpus_per_node: GPUS
  fabric: ideal
  network: ideal
  storage: {latency: 10 ms, bandwidth: 1 MB/s, servers: SERVERS}
workload: {tensors: [{name: w, count: 10000}], batch_size: 1, sample_size: 30 kB, forward: 1 ms, backward: 1 ms}
steps: 1
MORE
schedules: [{kind: sync}]
"""
READING = "input: {source: storage}"
SAVING = "checkpoint: {every: 1, what: parameters, ranks: all}"


def scenario_of(nodes: int, servers: int, more: str, gpus: int = 1):
    values = {"NODES": nodes, "SERVERS": servers, "GPUS": gpus, "MORE": more}
    text = SCENARIO
    for name, value in values.items():
        text = text.replace(name, str(value))
    return loads(text)


def simulated(scenario):
    """Return the trace of the event engine, which the fast one equals."""
    built = build(scenario, scenario.schedules[0])
    trace = des.simulate(built.plan, built.costs, delays(scenario), traffic=traffic(scenario, built.costs, 0))
    if not scenario.has_links and not scenario.input.data:  # of which fast takes none
        again = fast.simulate(built.plan, built.costs, delays(scenario))
        np.testing.assert_allclose(again.end_s, trace.end_s, rtol=1e-9)
    return trace


@pytest.mark.parametrize(
    ("nodes", "gpus", "servers", "readers"),  # readers of the busiest server
    [(4, 1, 1, 4), (4, 1, 2, 2), (4, 1, 4, 1), (5, 1, 2, 3), (3, 2, 2, 4), (2, 1, 7, 1), (6, 1, 4, 2)],
)
def test_ranks_share_the_server_of_their_node(nodes: int, gpus: int, servers: int, readers: int) -> None:
    trace = simulated(scenario_of(nodes, servers, READING, gpus))
    assert trace.makespan_s == pytest.approx(LATENCY_S + readers * N_SAMPLE_BYTES / SERVER_BPS + 0.002)


def test_each_server_has_its_own_bandwidth() -> None:
    """Of three nodes, 0 and 2 share a server, and node 1 has the other for itself."""
    ends_s = simulated(scenario_of(3, 2, READING)).end_s
    assert np.isclose(ends_s, LATENCY_S + 0.03).any()
    assert np.isclose(ends_s, LATENCY_S + 0.06).any()


@pytest.mark.parametrize(("servers", "writers"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_files_are_written_to_the_server_of_the_node(servers: int, writers: int) -> None:
    """A rank writes 40 kB."""
    trace = simulated(scenario_of(4, servers, SAVING))
    assert trace.makespan_s == pytest.approx(0.002 + LATENCY_S + writers * 0.04)


def test_one_server_is_as_before_and_is_not_written_down() -> None:
    scenario = scenario_of(2, 1, READING)
    assert "servers" not in dump(scenario)
    assert "servers: 3" in dump(scenario_of(2, 3, READING))


DATA = """
cluster:
  nodes: 3
  gpus_per_node: 1
  fabric: ideal
  network: ideal
  storage: {latency: 0 s, bandwidth: 1 MB/s, operations_per_s: 10, servers: SERVERS}
workload: {tensors: [{name: w, count: 10}], batch_size: 4, sample_size: 1 kB, forward: 1 ms}
input: {source: storage, data: {samples: 24, file_size: 100 kB}}
steps: 1 epoch
schedules: [{kind: sync}]
"""


@pytest.mark.parametrize(("servers", "nodes"), [(1, 3), (2, 2), (3, 1)])
def test_limits_are_those_of_the_busiest_server(servers: int, nodes: int, tmp_path, capsys) -> None:
    """A node reads 8 files of 100 kB, and a file takes 2 operations."""
    scenario = loads(DATA.replace("SERVERS", str(servers)))
    built = build(scenario, scenario.schedules[0])
    [limits] = epoch_limits(built.plan, built.costs)
    assert limits.seconds["server"] == pytest.approx(nodes * 8 * 0.1)
    assert limits.seconds["operations"] == pytest.approx(nodes * 8 * 2 / 10)
    assert (limits.storage_nbytes, limits.server_nbytes) == (24e5, nodes * 8e5)
    assert limits.needed_Bps == pytest.approx(nodes * 8e5 / (nodes * 8 * 2 / 10))
    assert simulated(scenario).makespan_s >= limits.least_s
    path = write(tmp_path / "x.yaml", DATA.replace("SERVERS", str(servers)))
    answer = call(capsys, "whatif", path, "--data")
    who = "storage would have" if servers == 1 else f"the busiest of {servers} storage servers would have"
    assert f"{who.removesuffix(' would have')} has to deliver 500 kB/s" in " ".join(answer.out.split())
    assert json.loads(call(capsys, "whatif", path, "--data", "--json").out)["rows"][0]["limits"][0]["needed_Bps"] == 5e5


def test_staging_shares_the_server_of_the_node() -> None:
    text = DATA.replace("samples: 24", "samples: 24, policy: staged").replace("operations_per_s: 10, ", "")
    text = text.replace("  network: ideal", "  network: ideal\n  disk: {read: unlimited, write: unlimited}")
    alone, all_on_one = (loads(text.replace("SERVERS", str(n)).replace("24", "24")) for n in (3, 1))
    nbytes = 24 * 1e5  # shuffled over all ranks, every node stages all files
    assert simulated(alone).makespan_s == pytest.approx(nbytes / 1e6, rel=0.02)
    assert simulated(all_on_one).makespan_s == pytest.approx(3 * nbytes / 1e6, rel=0.02)


def test_disturbed_storage_is_every_server() -> None:
    slow = "disturbances: [{kind: persistent, on: link, link: storage, share: 50%}]"
    trace = simulated(scenario_of(4, 2, f"{READING}\n{slow}"))
    assert trace.makespan_s == pytest.approx(LATENCY_S + 2 * 2 * 0.03 + 0.002)


def test_flow_of_another_job_shares_the_server_of_its_node_only() -> None:
    """A flow to node 0 takes half of what node 0 gets; node 1 has another server."""
    others = "background: [{kind: steady, from: storage, to: 0}]"
    busy = simulated(scenario_of(2, 2, f"{READING}\n{others}"))
    assert busy.makespan_s == pytest.approx(LATENCY_S + 2 * 0.03 + 0.002)
    elsewhere = simulated(scenario_of(2, 2, f"{READING}\n{others.replace('to: 0', 'to: 1')}"))
    assert elsewhere.makespan_s == busy.makespan_s


@pytest.mark.parametrize("servers", ["0", "1.5", "two", "-1", "1e7", "[a, b]"])
def test_number_of_servers_that_is_none_is_refused(servers: str) -> None:
    with pytest.raises(ScenarioError, match=r"cluster\.storage\.servers"):
        loads(SCENARIO.replace("SERVERS", servers).replace("NODES", "2").replace("GPUS", "1").replace("MORE", ""))


def test_servers_that_no_node_uses_are_named(tmp_path, capsys) -> None:
    text = dump(scenario_of(2, 3, READING))
    answer = call(capsys, "simulate", write(tmp_path / "x.yaml", text))
    assert "cluster.storage.servers: 3 for 2 nodes: each uses one, others idle" in answer.err


@pytest.mark.parametrize("more", [READING, SAVING, f"{READING}\n{SAVING}"])
@pytest.mark.parametrize(("nodes", "servers"), [(3, 2), (5, 2), (4, 2)])
def test_means_of_both_engines_agree_where_servers_have_unequal_numbers_of_nodes(nodes, servers, more) -> None:
    scenario = scenario_of(nodes, servers, more).changed(steps=6)
    means_s = []
    for engine in ("des", "auto"):
        [row] = compare(scenario, n_seeds=1, engine=engine)
        means_s.append(row.step_s)
    assert means_s[0] == pytest.approx(means_s[1], rel=1e-9)
