"""Tables of nccl-tests: what is read, what the simulator says, and what a cluster learns from them."""

import pytest

from simdist.errors import ScenarioError
from simdist.runs.nccl_tests import fitted, placed, read_table, simulated_s, with_launches
from simdist.scenario import load_cluster, presets

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
    lines = [f"{n:12} {n // 4:12} float sum -1 {1e6 * s:8.5f} 1.0 2.0 0 {1.1e6 * s:8.2f} 1.0 2.0 0" for n, s in rows]
    return HEAD.format(op=op, ranks="\n".join(ranks)) + "\n".join(lines) + "\n" + TAIL


def preset(name, **update):
    return load_cluster(presets.path("clusters", name)).model_copy(update=update)


def test_a_table_has_the_times_out_of_place_and_the_ranks():
    table = read_table(output([(8, 30e-6), (1024, 31e-6)]), name="t.txt")
    assert (table.op, table.nodes, table.gpus_per_node, table.one_process) == ("all_reduce", 2, 8, False)
    assert table.rows == ((8, pytest.approx(30e-6)), (1024, pytest.approx(31e-6)))


def test_older_columns_and_the_tags_of_mpirun_are_read():
    text = """# bytes
#       size         count    type    time   algbw   busbw  error
[1,0]<stdout>:       1024           256   float   12.50    0.10    0.10    N/A
"""
    table = read_table(text, name="t.txt", op="all_gather")
    assert (table.op, table.rows, table.nodes) == ("all_gather", ((1024, pytest.approx(12.5e-6)),), None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hello", "t.txt: no table of nccl-tests: expected a comment"),
        (
            "# size count type time algbw busbw\n 8 2 float 12.5 0 0\n",
            "t.txt: names no collective: write it, e.g. --op",
        ),
        ("# size count type time algbw busbw\n 8 2 float\n", "t.txt:2: no time in column 4"),
    ],
)
def test_what_is_no_table_is_refused(text, told):
    with pytest.raises(ScenarioError, match=told):
        read_table(text, name="t.txt")


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_a_table_of_a_cluster_gives_its_efficiency_and_latency_back(op):
    network = preset("dgx-a100").network.model_copy(update={"efficiency": 0.7, "latency_s": 9e-6})
    truth = preset("dgx-a100", nodes=2, network=network, nics_per_node=4, uncertain={})
    rows = [(nbytes, simulated_s(truth, op, nbytes)) for nbytes in (8, 2**20, 2**33)]
    table = read_table(output(rows, op=op), name="t.txt")
    start = placed(table, preset("dgx-a100", nics_per_node=4), nodes=None, gpus_per_node=None)
    found, notes = fitted(table, start)
    assert notes == []
    assert found.network.efficiency == pytest.approx(0.7, rel=2e-3)
    assert found.network.latency_s == pytest.approx(9e-6, rel=5e-3)
    assert not {"network.efficiency"} & found.uncertain.keys()


def test_in_one_node_a_table_gives_the_fabric_and_the_overhead():
    fabric = preset("dgx-a100").fabric.model_copy(update={"efficiency": 0.5})
    truth = preset("dgx-a100", nodes=1, fabric=fabric, uncertain={}, collective_overhead_s=11e-6)
    rows = [(nbytes, simulated_s(truth, "all_reduce", nbytes)) for nbytes in (8, 2**33)]
    table = read_table(output(rows, nodes=1), name="t.txt")
    found, _ = fitted(table, placed(table, preset("dgx-a100"), nodes=None, gpus_per_node=None))
    assert found.fabric.efficiency == pytest.approx(0.5, rel=2e-3)
    assert found.collective_overhead_s == pytest.approx(11e-6, rel=2e-3)


def test_what_no_value_gives_is_noted_and_stays():
    table = read_table(output([(8, 1e-9), (2**30, 1e-6)]), name="t.txt")
    start = placed(table, preset("dgx-a100"), nodes=None, gpus_per_node=None)
    found, notes = fitted(table, start)
    assert found.network == start.network
    assert [each.split(" ")[0] for each in notes] == ["network.efficiency", "network.latency"]


def test_one_process_for_all_gpus_is_told_by_its_id_and_gives_the_launch():
    table = read_table(output([(8, 40e-6), (2**30, 8e-3)], nodes=1, one_process=True), name="t.txt")
    assert table.one_process
    assert with_launches(table, preset("dgx-a100", nodes=1)).launch_s == pytest.approx(5e-6)


def test_messages_become_the_table_of_the_link_whose_times_do_not_shrink():
    rows = [(8, 12e-6), (1024, 11e-6), (2**20, 60e-6)]
    table = read_table(output(rows, op="sendrecv", gpus=1), name="t.txt")
    found, _ = fitted(table, placed(table, preset("dgx-a100"), nodes=None, gpus_per_node=None))
    assert [point.time_s for point in found.network.table] == pytest.approx([12e-6, 12e-6, 60e-6])
