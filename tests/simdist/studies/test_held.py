"""Which link held ranks up, and for how long: in closed form, the same from measured traces, and in every command."""

import json
import textwrap
from dataclasses import replace

import numpy as np
import pytest
from commandline import call
from one_transfer import BASE, scenario_with

from simdist.errors import TraceError
from simdist.runs.building import build, simulate
from simdist.studies.comparison import compare
from simdist.studies.facets import LINKS
from simdist.studies.held import find_held, without_links
from simdist.studies.validation import validate
from simdist.traces.breakdown import break_down
from simdist.traces.links import LinkRecorder, link_in_words
from simdist.traces.trace import Trace
from simdist.traces.waiting import attribute_waiting

OUTAGE = "{kind: outages, on: link, link: nic_out, nodes: [1], at: 2.5 s, lasts: 2 s}"
HALF = "{kind: persistent, on: link, link: nic_in, nodes: [0], share: 50%}"
FLOWS = "{kind: steady, from: 0, to: 1, flows: 3}"


def held_in(scenario, engine="auto"):
    trace = simulate(scenario, engine=engine)
    costs = build(scenario, scenario.schedules[0]).costs
    return trace, find_held(trace, costs), costs


@pytest.mark.parametrize(
    ("links", "name", "held_s"),
    [
        ({"disturbances": [OUTAGE]}, "nic_out[1]", 2.0),
        ({"disturbances": [HALF]}, "nic_in[0]", 1.0),
        ({"background": [FLOWS]}, "nic_out[0]", 3.0),
        (
            {"background": ["{kind: periodic, from: 0, to: 1, size: 25 MB, every: 10 s, begin: 2.5 s}"]},
            "nic_out[0]",
            0.25,
        ),
    ],
)
def test_what_a_transfer_takes_longer_is_booked_on_the_link(links, name, held_s):
    trace, held, _ = held_in(scenario_with(**links), engine="des")
    totals = {link: seconds for link, seconds in held.rank_seconds().items() if seconds}
    assert totals == {name: pytest.approx(2 * held_s)}
    where = break_down(trace, held)
    assert where.links_per_step_s()[name] == pytest.approx(held_s)
    assert where.comm_s[:, 0] == pytest.approx([1 + held_s] * 2)
    replayed_s, repaired = without_links(trace, held)
    assert (replayed_s, repaired[name]) == pytest.approx((3 + held_s, 3.0))


def test_of_two_links_the_one_that_explains_more_is_named():
    _, held, _ = held_in(scenario_with(disturbances=[HALF, OUTAGE]))
    assert held.rank_seconds() == {"nic_out[1]": pytest.approx(4.0), "nic_in[0]": 0.0}


def test_nothing_is_booked_where_links_do_what_they_should():
    trace, held, _ = held_in(scenario_with(disturbances=["{kind: outages, on: link, link: nic, at: 0 s, lasts: 1 s}"]))
    assert trace.links
    assert not held.seconds.any()
    assert break_down(trace, held).links_s == {}


def test_what_passes_behind_computing_is_no_part_of_a_step():
    hidden = "{kind: sync, bucket_size: 50 MB, first_bucket_size: 50 MB}"
    text = (
        BASE.replace("[{kind: sync, bucket_size: 1 GB, first_bucket_size: 1 GB}]", f"[{hidden}]")
        .replace("[{name: w, count: 25000000}]", "[{name: a, count: 12500000}, {name: b, count: 12500000}]")
        .replace("backward: 1 s", "backward: 4 s")
    )
    trace, held, _ = held_in(scenario_with(base=text, disturbances=[HALF]))
    assert held.rank_seconds()["nic_in[0]"] == pytest.approx(2 * 1.0)
    assert break_down(trace, held).links_s["nic_in[0]"][:, 0] == pytest.approx([0.5 + 0.0] * 2)


def test_a_slow_link_is_booked_alike_with_and_without_a_trace():
    """A constant share needs no trace: `compare` books what its price says."""
    scenario = scenario_with(disturbances=[HALF], steps=3)
    (by_fast,), (by_des,) = (compare(scenario, n_seeds=2, engine=engine) for engine in ("fast", "des"))
    assert by_fast.of(LINKS) == pytest.approx(by_des.of(LINKS))
    assert by_fast.of(LINKS) == {"nic_in[0]": pytest.approx(1.0)}
    assert by_fast.document()["links_s"] == by_fast.of(LINKS)
    (undisturbed,) = compare(scenario_with(steps=3), n_seeds=2)
    assert "links_s" not in undisturbed.document()


def test_a_measured_trace_is_read_like_a_simulated_one(tmp_path):
    trace, held, costs = held_in(scenario_with(disturbances=[OUTAGE]))
    measured = replace(trace, end_s=trace.end_s * 1.0, source="real gloo")
    measured.save(tmp_path / "trace.npz")
    again = Trace.load(tmp_path / "trace.npz")
    assert again.links == trace.links
    assert np.array_equal(find_held(again, costs).seconds, held.seconds)
    (found,) = validate(again, trace, {}, costs).links
    assert (found.link, found.simulated_s, found.measured_s) == ("nic_out[1]", pytest.approx(4.0), pytest.approx(4.0))
    assert validate(again, trace, {}).links == ()


def test_an_operation_a_little_slower_than_alone_may_be_caught_by_an_outage():
    """Alone it would have ended at 3 s, 20 ms before the link went down; it took 3 % longer, and so 2 s more."""
    caught = scenario_with(disturbances=[OUTAGE.replace("2.5 s", "3.02 s")])
    trace, held, costs = held_in(caught, engine="des")
    assert not held.seconds.any()
    links = {"nic_out[1]": ((0.0, 1.0, 0), (3.02, 0.0, 0), (5.02, 1.0, 0))}
    late_s = np.where(trace.end_s == 3.0, 5.03, trace.end_s)
    measured = replace(trace, end_s=late_s, source="real gloo", links=links)
    assert find_held(measured, costs).rank_seconds() == {"nic_out[1]": pytest.approx(2 * 2.0)}


def test_a_measurement_that_says_nothing_of_links_had_those_of_its_scenario(tmp_path, capsys):
    """What performs links need not note what they do: it follows from the scenario, if real.json says it was done."""
    file, run = tmp_path / "x.yaml", tmp_path / "run"
    flows = "{kind: periodic, from: 1, to: 0, size: 25 MB, every: 10 s, begin: 1 s}"
    file.write_text(f"{BASE}disturbances: [{OUTAGE}, {HALF}]\nbackground: [{flows}]\n")
    assert call(capsys, "simulate", file, "-o", run).code == 0
    trace = Trace.load(run / "trace.simulated.npz")
    replace(trace, source="real gloo on cpu", run="7", links={}).save(run / "trace.real.npz")
    for performed, found in (("cluster:links", ["nic_out[1]"]), (None, [])):
        (run / "real.json").write_text(json.dumps({"run": "7", "links": performed}))
        (row,) = json.loads(call(capsys, "validate", run, "--json").out)["rows"]
        measured = [each["link"] for each in row["links"] if each["measured_s"]]
        assert measured == found
        assert [each["link"] for each in row["links"] if each["simulated_s"]] == ["nic_out[1]"]
        for each in row["links"] if found else ():
            assert each["measured_s"] == pytest.approx(each["simulated_s"])
    (run / "real.json").write_text(json.dumps({"run": "7", "links": "cluster:links"}))
    assert "NIC of node 1, out" in call(capsys, "validate", run).out
    assert "NIC of node 1, out" in call(capsys, "whatif", run, "--resamples", "2").out


def test_a_trace_without_links_has_the_bytes_of_before(tmp_path):
    trace = simulate(scenario_with())
    trace.save(tmp_path / "a.npz")
    assert b"links" not in (tmp_path / "a.npz").read_bytes()


@pytest.mark.parametrize(
    "links", [[], {"nic": [[1.0, 1.0, 0]]}, {"nic": [[0.0, 1.0, 0], [2.0, 1.0, 0], [1.0, 1.0, 0]]}]
)
def test_a_damaged_table_of_links_is_refused(tmp_path, links):
    trace = replace(simulate(scenario_with()), links=links or ["nic"])
    trace.save(tmp_path / "a.npz")
    with pytest.raises(TraceError, match=r"a\.npz: cannot be read as a trace \(links"):
        Trace.load(tmp_path / "a.npz")


HIERARCHY = """
cluster:
  nodes: 2
  gpus_per_node: 2
  fabric: {latency: 0 s, bandwidth: 100 MB/s}
  network: {latency: 0 s, bandwidth: 1 GB/s}
workload:
  tensors: [{name: w, count: 25000000}]
  batch_size: 1
  forward: 1 s
  backward: 1 s
  optimize: 0 s
schedules: [{kind: hierarchical_sgd, levels: {1: 2, 4: 4}}]
steps: 4
"""


def test_ranks_that_come_late_from_a_slow_link_are_not_blamed_for_it():
    slow = "{kind: persistent, on: link, link: fabric_in, nodes: [1], share: 50%}"
    trace, held, _ = held_in(scenario_with(base=HIERARCHY, disturbances=[slow]))
    ranks, links = attribute_waiting(trace), attribute_waiting(trace, held)
    assert ranks.caused_by_rank_s[2:].sum() > 5.9
    assert links.caused_by_rank_s == pytest.approx([0.0] * 4, abs=1e-9)
    assert sum(links.by_link_s.values()) == pytest.approx(ranks.total_s)
    assert set(links.by_link_s) <= {"fabric_in[2]", "fabric_in[3]"}


def test_a_late_host_is_blamed_beside_a_slow_link():
    slow = "{kind: persistent, on: link, link: fabric_in, nodes: [1], share: 50%}"
    late = "{kind: persistent, delay: 300 ms, ranks: [2]}"
    trace, held, _ = held_in(scenario_with(base=HIERARCHY, disturbances=[slow, late]))
    waits = attribute_waiting(trace, held)
    assert waits.caused_by_rank_s[2] > 0.29
    assert sum(waits.by_link_s.values()) + waits.caused_s.sum() == pytest.approx(waits.total_s)


def test_a_recorder_keeps_what_changes():
    recorder = LinkRecorder({"switch": 0.5})
    recorder.set_share(1.0, "switch", 0.5)
    recorder.add_flows(1.0, "switch", 2)
    recorder.add_flows(2.0, "nic_in[0]", 1)
    recorder.set_share(3.0, "nic_in[0]", 1.0)
    assert recorder.table() == {
        "nic_in[0]": ((0.0, 1.0, 0), (2.0, 1.0, 1)),
        "switch": ((0.0, 0.5, 0), (1.0, 0.25, 2)),
    }


def test_links_have_names_in_words():
    assert link_in_words("fabric_in[5]") == "fabric of rank 5, in"
    assert link_in_words("storage_client[2]") == "storage client 2"
    assert link_in_words("switch") == "switch"


@pytest.mark.parametrize("command", ["simulate", "compare", "whatif", "trace", "report"])
def test_commands_name_the_link(command, tmp_path, capsys):
    file, run = tmp_path / "x.yaml", tmp_path / "run"
    file.write_text(f"{BASE}disturbances: [{OUTAGE}]\n".replace("steps: 1", "steps: 3"))
    if command in ("whatif", "trace", "report"):
        assert call(capsys, "simulate", file, "-o", run).code == 0
    match command:
        case "simulate" | "compare":
            answer = call(capsys, command, file)
            assert "NIC of node 1, out" in answer.out
            rows = json.loads(call(capsys, command, file, "--json").out)["rows"]
            assert rows[0]["links_s"] == {"nic_out[1]": pytest.approx(2.0 / 3)}
        case "whatif":
            answer = call(capsys, command, run, "--resamples", "0")
            assert "links: NIC of node 1, out held ranks up: 3 s per step without that, 3.67 s with it" in answer.out
            (record,) = json.loads(call(capsys, command, run, "--resamples", "0", "--json").out)["links"]
            assert record["speedup"] == pytest.approx(11 / 9)
        case "trace":
            assert call(capsys, command, run, "--chrome", tmp_path / "t.json").code == 0
            events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
            (span,) = (each for each in events if each.get("cat") == "link")
            assert (span["name"], span["ts"], span["dur"]) == ("0 % of the rate", 2.5e6, 2e6)
            assert {"name": "NIC of node 1, out"} in [each["args"] for each in events if each["name"] == "thread_name"]
        case "report":
            assert call(capsys, command, run, "-o", tmp_path / "r.html").code == 0
            assert "NIC of node 1, out" in (tmp_path / "r.html").read_text()


def test_whatif_asks_the_links_of_the_run_what_held_it_up_not_those_of_another_cluster(tmp_path, capsys):
    file, run = tmp_path / "x.yaml", tmp_path / "run"
    file.write_text(f"{BASE}disturbances: [{OUTAGE}]\n")
    assert call(capsys, "simulate", file, "-o", run).code == 0
    other = tmp_path / "other.yaml"
    slower = BASE.partition("workload:")[0].replace("100 MB/s", "10 MB/s").partition("cluster:")[2]
    other.write_text(textwrap.dedent(slower))
    found = [call(capsys, "whatif", run, "--resamples", "0", "--json", *more) for more in ([], ["--cluster", other])]
    own, others = (json.loads(each.out)["links"] for each in found)
    assert own == others
    assert own[0]["link"] == "nic_out[1]"


def test_a_run_measured_without_its_links_is_compared_and_reported_without_them(tmp_path, capsys):
    file, run = tmp_path / "x.yaml", tmp_path / "run"
    file.write_text(f"{BASE}disturbances: [{OUTAGE}]\n".replace("steps: 1", "steps: 3"))
    assert call(capsys, "simulate", file, "-o", run).code == 0
    trace = simulate(scenario_with(steps=3))
    replace(trace, plan=Trace.load(run / "trace.simulated.npz").plan, source="real gloo on cpu", run="7").save(
        run / "trace.real.npz"
    )
    (run / "real.json").write_text(json.dumps({"run": "7", "links": "none"}))
    answer = call(capsys, "whatif", run, "--schedules", "local-2", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["gains"]["baseline_step_s"] == pytest.approx(3.0)
    assert call(capsys, "report", run, "-o", tmp_path / "r.html").code == 0
    assert "trace.simulated.npz is not on this page" in (tmp_path / "r.html").read_text()
