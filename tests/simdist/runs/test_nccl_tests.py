"""Tables of nccl-tests: what is read, what the simulator says, and what a cluster learns from them."""

import json

import pytest
from commandline import call
from flat_clusters import grouped

from simdist.errors import ScenarioError
from simdist.runs.nccl_tests import (
    fitted,
    parse_nccl_table,
    placed,
    simulated_s,
    tells_ring_step,
    with_launches,
    with_ring_step,
)
from simdist.scenario import dump_cluster, load, load_cluster, presets
from simdist.studies.published_errors import doubts_of
from simdist.traces.collectives import bus_factor

HEAD = """# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20
# Collective test starting: {op}_perf
#
# Using devices
{ranks}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 104.2\n"


def output(rows, *, op="all_reduce", nodes=2, gpus=8, one_process=False):
    """Return what a program prints for rows of bytes and seconds."""
    ranks = [
        f"#  Rank {rank:2} Group  0 Pid {7000 + (rank // gpus if one_process else rank)} on host{rank // gpus} device  "
        f"{rank % gpus} [0x1b] NVIDIA H100 80GB HBM3"
        for rank in range(nodes * gpus)
    ]
    factor = bus_factor(op, nodes * gpus)
    lines = [line(nbytes, seconds, factor) for nbytes, seconds in rows]
    return HEAD.format(op=op, ranks="\n".join(ranks)) + "\n".join(lines) + "\n" + TAIL


def line(nbytes, seconds, factor):
    """Return the line of a size; in place, it takes a tenth longer."""
    parts = [
        f"{1e6 * s:.5f} {1e-9 * nbytes / s:.2f} {1e-9 * factor * nbytes / s:.2f} 0" for s in (seconds, 1.1 * seconds)
    ]
    return f"{nbytes:12} {nbytes // 4:12} float sum -1 {' '.join(parts)}"


def preset(name, **update):
    return load_cluster(presets.path("clusters", name)).model_copy(update=grouped(update))


def test_a_table_has_the_times_out_of_place_and_the_ranks():
    table = parse_nccl_table(output([(8, 30e-6), (1024, 31e-6)]), name="t.txt")
    assert (table.op, table.nodes, table.gpus_per_node, table.one_process) == ("all_reduce", 2, 8, False)
    assert table.rows == ((8, pytest.approx(30e-6)), (1024, pytest.approx(31e-6)))


def test_older_columns_and_the_tags_of_mpirun_are_read():
    text = """# bytes
#       size         count    type    time   algbw   busbw  error
[1,0]<stdout>:       1024           256   float   12.50    0.08    0.08    N/A
"""
    table = parse_nccl_table(text, name="t.txt", op="all_gather")
    assert (table.op, table.rows, table.nodes) == ("all_gather", ((1024, pytest.approx(12.5e-6)),), None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hello", "t.txt: no log of Slurm, .* and no table of nccl-tests, which has a comment"),
        ("", "t.txt: no log of Slurm, .* and no table of nccl-tests"),
        (
            "# size count type time algbw busbw\n 8 2 float 12.5 0 0\n",
            "t.txt: names no collective: write it, e.g. --op",
        ),
        ("# size count type time algbw busbw\n 8 2 float\n", "t.txt:2: column 4: no time: 3 columns, 6 names"),
    ],
)
def test_what_is_no_table_is_refused(text, told):
    with pytest.raises(ScenarioError, match=told):
        parse_nccl_table(text, name="t.txt")


ROW = "1048576 262144 float sum -1 100.5 10.43 19.56 0 100.9 10.39 19.49 N/A"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (ROW.replace("100.5", "nan"), "column 6 (time): 'nan': write a number from 0.001 to 1e+09"),
        (ROW.replace("100.5", "inf"), "column 6 (time): 'inf': write"),
        (ROW.replace("100.5", "-5"), "column 6 (time): '-5': write"),
        (ROW.replace("100.5", "0.00"), "column 6 (time): '0.00': write"),
        (ROW.replace("10.39", "nan"), "column 11 (algbw): 'nan': write a number from 0 to 1e+06"),
        (ROW.replace("1048576", "-1048576"), "column 1 (size): '-1048576': write a whole number from 0 to"),
        (ROW.replace("262144", "262145"), "column 2 (count): 262145 of float beside a size of 1048576 B"),
        (ROW.replace(" sum", ""), "column 13: no #wrong: 12 columns, 13 names"),
        (f"{ROW} 0", "column 14: '0' has no name: 14 columns, 13 names"),
        (ROW[:-30], "column 8: no busbw: 7 columns, 13 names"),
        (ROW.replace("100.5", "10.05"), "column 7 (algbw): 10.43 GB/s, but 1048576 B in 10.05 us are 104.34 GB/s"),
        (ROW.replace("100.9", "10.9"), "column 11 (algbw): 10.39 GB/s, but 1048576 B in 10.9 us are 96.20 GB/s"),
        (ROW.replace("sum -1 100.5 10.43", "sum 100.5 10.43 -1"), "column 6 (time): '10.43'|column 7"),
        (f"{ROW}\n{ROW.replace('19.56', '10.43')}", "column 8 (busbw): is 0.998 to 1.002 times algbw"),
    ],
)
def test_numbers_that_cannot_be_or_contradict_each_other_are_refused_with_their_column(row, told):
    with pytest.raises(ScenarioError) as caught:
        parse_nccl_table(HEAD.format(op="all_reduce", ranks="#") + row, name="t.txt")
    assert str(caught.value).startswith("t.txt:")
    assert any(each in str(caught.value) for each in told.split("|")), caught.value


QUEUED = "calls of nccl-tests are queued"


def test_the_ratio_of_bandwidths_tells_the_number_of_ranks():
    table = parse_nccl_table(HEAD.format(op="all_reduce", ranks="#") + ROW, name="t.txt")
    assert placed(table, preset("dgx-a100"), nodes=2, gpus_per_node=8).world_size == 16
    with pytest.raises(
        ScenarioError, match=r"^nccl-tests: busbw is 1\.\d+ to 1\.\d+ times algbw, but 1.750 in an all_red"
    ):
        placed(table, preset("dgx-a100"), nodes=1, gpus_per_node=8)


@pytest.mark.parametrize("rest", ["N/A N/A N/A N/A", "100.9 10.39 19.49 0"])
def test_times_in_place_may_be_missing(rest):
    row = ROW[: ROW.index("100.9")] + rest
    assert parse_nccl_table(HEAD.format(op="all_reduce", ranks="#") + row, name="t.txt").rows == (
        (2**20, pytest.approx(1.005e-4)),
    )


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_a_table_of_a_cluster_gives_its_efficiency_and_latency_back(op):
    network = preset("dgx-a100").network.model_copy(update={"efficiency": 0.7, "latency_s": 9e-6})
    truth = preset("dgx-a100", nodes=2, network=network, nics_per_node=4, uncertain={})
    rows = [(nbytes, simulated_s(truth, op, nbytes)) for nbytes in (8, 2**20, 2**33)]
    table = parse_nccl_table(output(rows, op=op), name="t.txt")
    start = placed(table, preset("dgx-a100", nics_per_node=4), nodes=None, gpus_per_node=None)
    found, notes = fitted(table, start)
    assert [each.split(",")[0] for each in notes] == [QUEUED]
    assert found.network.efficiency == pytest.approx(0.7, rel=2e-3)
    assert found.network.latency_s == pytest.approx(9e-6, rel=5e-3)
    told = {path: (each.from_, each.to) for path, each in found.uncertain.items() if path.startswith("network.")}
    assert told["network.efficiency"] == ("69.3%", "70.7%")
    assert told.keys() == {"network.efficiency", "network.latency"}


def test_in_one_node_a_table_gives_the_fabric_and_the_overhead():
    fabric = preset("dgx-a100").fabric.model_copy(update={"efficiency": 0.5})
    truth = preset("dgx-a100", nodes=1, fabric=fabric, uncertain={}, overhead_s=11e-6)
    rows = [(nbytes, simulated_s(truth, "all_reduce", nbytes)) for nbytes in (8, 2**33)]
    table = parse_nccl_table(output(rows, nodes=1), name="t.txt")
    found, _ = fitted(table, placed(table, preset("dgx-a100"), nodes=None, gpus_per_node=None))
    assert found.fabric.efficiency == pytest.approx(0.5, rel=2e-3)
    assert found.collectives.overhead_s == pytest.approx(11e-6, rel=2e-3)


def test_what_no_value_gives_is_noted_and_stays():
    table = parse_nccl_table(output([(8, 1e-9), (2**30, 4e-6)]), name="t.txt")
    start = placed(table, preset("dgx-a100"), nodes=None, gpus_per_node=None)
    found, notes = fitted(table, start)
    assert found.network == start.network
    assert found.uncertain == start.uncertain
    assert [each.split(" ")[0] for each in notes] == ["network.efficiency", "network.latency", "calls"]


def test_one_process_for_all_gpus_is_told_by_its_id_and_gives_the_launch():
    table = parse_nccl_table(output([(8, 40e-6), (2**30, 8e-3)], nodes=1, one_process=True), name="t.txt")
    assert table.one_process
    assert with_launches(table, preset("dgx-a100", nodes=1)).collectives.launch_s == pytest.approx(5e-6)


def test_messages_become_the_table_of_the_link_whose_times_do_not_shrink():
    rows = [(8, 12e-6), (1024, 11e-6), (2**20, 60e-6)]
    table = parse_nccl_table(output(rows, op="sendrecv", gpus=1), name="t.txt")
    found, _ = fitted(table, placed(table, preset("dgx-a100"), nodes=None, gpus_per_node=None))
    assert [point.time_s for point in found.network.table] == pytest.approx([12e-6, 12e-6, 60e-6])


def measured(cluster, op, *sizes, **update):
    """Return the table that a program prints on a cluster with other settings."""
    truth = cluster.model_copy(update={"uncertain": {}, **update})
    rows = [(nbytes, simulated_s(truth, op, nbytes)) for nbytes in sizes]
    return parse_nccl_table(output(rows, op=op, nodes=cluster.nodes, gpus=cluster.gpus_per_node), name="t.txt")


def doubts(cluster):
    """Return the kinds of doubts of a job on a cluster."""
    job = load(
        {"cluster": "dgx-a100", "workload": {"preset": "resnet18", "batch_size": 12}, "steps": 5, "schedules": ["sync"]}
    )
    return [each.kind for each in doubts_of(job.changed(cluster=cluster))]


def test_a_rack_is_one_domain_whose_fabric_is_told_and_whose_pairs_use_it():
    rack = preset("gb200-nvl72", nodes=4)
    fabric = rack.fabric.model_copy(update={"efficiency": 0.6})
    found, _ = fitted(measured(rack, "all_reduce", 8, 2**33, fabric=fabric), rack)
    assert found.fabric.efficiency == pytest.approx(0.6, rel=2e-3)
    assert found.network == rack.network
    nbytes = 2**30
    assert simulated_s(rack, "sendrecv", nbytes) == simulated_s(preset("gb200-nvl72", nodes=1), "sendrecv", nbytes)
    messages, _ = fitted(measured(rack, "sendrecv", 8, nbytes), rack)
    assert messages.fabric.table is not None
    assert messages.network.table is None


def test_pairs_of_several_racks_cross_the_network():
    racks = preset("gb200-nvl72", nodes=36)
    slow = racks.network.model_copy(update={"efficiency": 0.48})
    racks = racks.model_copy(update={"uncertain": {}})
    times = [simulated_s(each, "sendrecv", 2**30) for each in (racks, racks.model_copy(update={"network": slow}))]
    assert times[1] == pytest.approx(2 * times[0], rel=1e-2)


@pytest.mark.parametrize(
    ("update", "told"), [({"nodes": 3}, "3 domains"), ({"nodes": 1, "gpus_per_node": 3}, "3 GPUs")]
)
def test_messages_of_what_forms_no_pairs_are_refused(update, told):
    with pytest.raises(ScenarioError, match=f"^sendrecv: {told}.* form no pairs: measure an even number of them$"):
        simulated_s(preset("dgx-a100", **update), "sendrecv", 8)


def test_a_link_that_is_told_has_no_doubt_and_all_others_stay(tmp_path):
    start = preset("dgx-a100", nodes=2)
    both = ["machine", "machines"]
    assert doubts(start) == [*both, "fabric", "network"]
    slower = start.network.model_copy(update={"efficiency": 0.7})
    one_card = start.model_copy(update={"topology": {"nics_per_node": 1}})
    found, notes = fitted(measured(one_card, "all_reduce", 8, 2**33, network=slower), one_card)
    assert [each.split(",")[0] for each in notes] == [QUEUED]
    assert doubts(found) == [*both, "fabric"]
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_cluster(found))
    assert load_cluster(path) == found
    messages, _ = fitted(measured(start, "sendrecv", 8, 2**30), start)
    assert doubts(messages) == [*both, "fabric"]
    only_latency, _ = fitted(parse_nccl_table(output([(8, 200e-6), (2**30, 4e-6)]), name="t.txt"), start)
    assert only_latency.network.latency_s != start.network.latency_s
    assert doubts(only_latency) == [*both, "fabric", "network"]
    node = start.model_copy(update={"nodes": 1})
    fabric = node.fabric.model_copy(update={"efficiency": 0.5})
    in_node, _ = fitted(measured(node, "all_reduce", 8, 2**33, fabric=fabric), node)
    assert doubts(in_node.model_copy(update={"nodes": 2})) == [*both, "network"]


def test_a_range_is_twice_what_sizes_near_by_miss():
    start = preset("dgx-a100", nodes=2, nics_per_node=1)
    [(_, small_s), (_, large_s)] = measured(start, "all_reduce", 2**32, 2**33).rows
    rows = [(8, 60e-6), (2**32, small_s * 1.1), (2**33, large_s * 1.2)]
    table = parse_nccl_table(output(rows), name="t.txt")
    found, _ = fitted(table, start)
    miss = simulated_s(found, "all_reduce", 2**32) / rows[1][1] - 1
    assert miss == pytest.approx(1.2 / 1.1 - 1, rel=0.05)
    each = found.uncertain["network.efficiency"]
    off = 2 * miss / 2**0.5
    ends = [float(end.removesuffix("%")) / 100 / found.network.efficiency for end in (each.from_, each.to)]
    assert ends == pytest.approx([1 - off, min(1 + off, 1 / found.network.efficiency)], rel=5e-3)
    assert each.source.startswith("nccl-tests: twice")


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "told"),
    [
        ("gb200-nvl72", 20, None, "gb200-nvl72 with 20 nodes of 4 GPUs: .*20 nodes are no whole number of domains"),
        ("dgx-a100", 1, 32, "dgx-a100 with 1 nodes of 32 GPUs: .*no machine joins more than"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_in_a_sentence(name, nodes, gpus, told):
    table = parse_nccl_table("# size count type time algbw busbw\n 8 2 float 12.5 0 0\n", name="t.txt", op="all_reduce")
    with pytest.raises(ScenarioError, match=told):
        placed(table, preset(name), nodes=nodes, gpus_per_node=gpus)


def test_messages_of_one_size_are_no_table():
    table = parse_nccl_table(output([(8, 12e-6)], op="sendrecv", gpus=1), name="t.txt")
    with pytest.raises(ScenarioError, match=r"^sendrecv: a table of the network needs two sizes with a time: measure"):
        fitted(table, preset("dgx-a100", nodes=2, gpus_per_node=1))


def test_the_smallest_size_of_one_process_tells_launches_and_no_overhead():
    start = preset("dgx-a100", nodes=1)
    table = parse_nccl_table(output([(8, 40e-6), (2**30, 9e-3)], nodes=1, one_process=True), name="t.txt")
    found, notes = fitted(table, with_launches(table, start))
    assert found.collectives.launch_s == pytest.approx(5e-6)
    assert found.collectives.overhead_s == start.collectives.overhead_s
    assert notes[-2:] == [
        "collectives.overhead stays: the smallest size tells the launches of one process",
        "collectives.launch is of one process for all GPUs: set it to 0 s for a process per GPU",
    ]


def test_messages_of_one_process_include_its_launches():
    rows = [(8, 12e-6), (2**20, 60e-6)]
    table = parse_nccl_table(output(rows, op="sendrecv", nodes=1, gpus=2, one_process=True), name="t.txt")
    start = preset("dgx-a100", nodes=1, gpus_per_node=2)
    found, notes = fitted(table, with_launches(table, start))
    assert found.collectives.launch_s == start.collectives.launch_s == 0
    assert notes == ["the times of messages include launches of one process for all GPUs"]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_one_large_buffer_over_two_numbers_of_gpus_tells_efficiency_and_step_of_a_ring(op):
    start = preset("dgx-a100", nodes=4)
    truth = start.network.model_copy(update={"efficiency": 0.9, "ring_step_s": 40e-6})
    few, many = (measured(start.model_copy(update={"nodes": nodes}), op, 2**28, network=truth) for nodes in (4, 16))
    assert tells_ring_step(few, many)
    for tables in ((few, many), (many, few)):
        found, notes = with_ring_step(tables, start)
        assert (found.nodes, notes) == (16, [])
        assert found.network.ring_step_s == pytest.approx(40e-6, rel=0.02)
        assert found.network.efficiency == pytest.approx(0.9, rel=0.02)
        assert {"network.efficiency", "network.ring_step"} <= found.uncertain.keys()


def test_tables_that_differ_in_more_than_the_ranks_of_a_ring_tell_no_step():
    start = preset("dgx-a100", nodes=4)
    ring, messages = (measured(start, op, 8, 2**28) for op in ("all_gather", "sendrecv"))
    inside = measured(preset("dgx-a100", nodes=1), "all_gather", 2**28)
    assert not tells_ring_step(ring, ring)
    assert not tells_ring_step(ring, messages)
    assert not tells_ring_step(ring, inside)
    many = measured(start.model_copy(update={"nodes": 16}), "all_gather", 2**28)
    slow = parse_nccl_table(output([(2**28, 10.0)], op="all_gather", nodes=16), name="t.txt")
    same, notes = with_ring_step((ring, slow), start)
    assert same == start
    assert notes == [
        "network.ring_step stays: no value gives the times of the largest sizes of all_gather and all_gather"
    ]
    assert tells_ring_step(ring, many)


def test_init_learns_the_step_of_a_ring_from_a_second_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = preset("dgx-a100", nodes=4)
    network = start.network.model_copy(update={"ring_step_s": 25e-6})
    for nodes in (4, 16):
        truth = start.model_copy(update={"nodes": nodes, "uncertain": {}, "network": network})
        rows = [(nbytes, simulated_s(truth, "all_gather", nbytes)) for nbytes in (2**12, 2**28)]
        (tmp_path / f"{nodes}.txt").write_text(output(rows, op="all_gather", nodes=nodes), encoding="utf-8")
    answer = call(capsys, "init", "--from", "4.txt", "--from", "16.txt", "--cluster", "dgx-a100")
    assert answer.code == 0, answer.err
    written = load(tmp_path / "scenario.yaml").cluster
    assert written.nodes == 16
    assert written.network.ring_step_s == pytest.approx(25e-6, rel=0.05)


def test_init_calibrates_the_links_of_a_new_scenario(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "8 2 float sum -1 40.0 1 1 0\n1073741824 268435456 float sum -1 12000 89.48 167.77 0\n"
    (tmp_path / "table.txt").write_text(
        f"# all_reduce_perf\n# size count type redop root time algbw busbw #wrong\n{rows}", encoding="utf-8"
    )
    answer = call(capsys, "init", "--from", "table.txt", "--cluster", "dgx-a100", "--nodes", 2, "--json")
    assert answer.code == 0, answer.err
    [calibration] = json.loads(answer.out)["calibrations"]
    assert (calibration["op"], calibration["nodes"], calibration["gpus_per_node"]) == ("all_reduce", 2, 8)
    assert [row["calibrated_error"] for row in calibration["rows"]] == pytest.approx([0, 0], abs=0.01)
    written = load(tmp_path / "scenario.yaml").cluster
    assert simulated_s(written, "all_reduce", 2**30) == pytest.approx(0.012, rel=0.01)
    assert "nccl-tests, table.txt" in load_cluster(tmp_path / "scenario-cluster.yaml").source
