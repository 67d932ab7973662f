"""What one checkpoint costs, against closed forms."""

import tracemalloc

import pytest

from simdist import scenario
from simdist.errors import ScenarioError
from simdist.plan.only_simulated import only_simulated
from simdist.runs.building import build
from simdist.runs.checkpoint_costs import checkpoint_costs

STEP_S = 0.07
NBYTES, HOST_BPS = 4_000_000, 1e9
NIC_BPS, SERVER_BPS, DISK_WRITE_BPS, DISK_READ_BPS = 50e6, 40e6, 20e6, 80e6
COPY_S = NBYTES / HOST_BPS


def described(nodes=4, gpus=2, network="ideal", schedule="kind: sync", **checkpoint):
    settings = {"every": 3, "size": f"{NBYTES} B", "ranks": "all", **checkpoint}
    written = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return scenario.loads(f"""
cluster:
  nodes: {nodes}
  gpus_per_node: {gpus}
  fabric: ideal
  network: {network}
  device: {{host_bandwidth: {HOST_BPS:.0f} B/s}}
  storage: {{latency: 0 s, bandwidth: {SERVER_BPS:.0f} B/s}}
  disk: {{read: {DISK_READ_BPS:.0f} B/s, write: {DISK_WRITE_BPS:.0f} B/s}}
workload:
  tensors: [{{name: all, count: 1000}}]
  batch_size: 1
  forward: {STEP_S / 7 * 3} s
  backward: {STEP_S / 7 * 4} s
  optimize: 0 s
steps: 12
checkpoint: {{{written}}}
schedules: [{{{schedule}}}]
""")


def costs(**settings):
    wanted = described(**settings)
    found = checkpoint_costs(wanted, wanted.schedules[0])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("checkpoint", "write_s", "read_s"),
    [
        ({"to": "storage"}, 8 * NBYTES / SERVER_BPS, 8 * NBYTES / SERVER_BPS),
        ({"to": "storage", "ranks": "first"}, NBYTES / SERVER_BPS, 8 * NBYTES / SERVER_BPS),
        ({"to": "disk"}, 2 * NBYTES / DISK_WRITE_BPS, 2 * NBYTES / DISK_READ_BPS),
        ({"to": "peer", "network": "{latency: 0 s, bandwidth: 50 MB/s}"}, 2 * NBYTES / NIC_BPS, 2 * NBYTES / NIC_BPS),
    ],
)
def test_all_ranks_share_what_they_write_to_and_load_from(checkpoint, write_s, read_s):
    found = costs(**checkpoint)
    assert found.usable_s == pytest.approx(COPY_S + write_s)
    assert found.load_s == pytest.approx(read_s + COPY_S)
    assert found.stall_s == pytest.approx(found.usable_s)
    assert found.nbytes == NBYTES * (1 if checkpoint.get("ranks") == "first" else 8)


@pytest.mark.parametrize("place", ["disk", "peer"])
def test_a_file_that_one_node_has_is_sent_to_the_others(place):
    """It is read on its node, and then broadcast over NICs, which takes as long as one of them sends it."""
    network = f"{{latency: 0 s, bandwidth: {NIC_BPS / 1e6} MB/s}}"
    of = {"nodes": 4, "gpus": 1, "network": network, "to": place}
    own, only_first = (costs(ranks=ranks, **of).load_s for ranks in ("all", "first"))
    assert only_first - own == pytest.approx(NBYTES / NIC_BPS, rel=1e-3)
    alone = costs(nodes=1, gpus=2, to="disk", ranks="first")
    assert alone.load_s == pytest.approx(2 * NBYTES / DISK_READ_BPS + COPY_S)


def test_written_in_the_background_a_file_costs_its_copy():
    found = costs(mode="async")
    assert found.stall_s == pytest.approx(COPY_S)
    assert found.usable_s == pytest.approx(COPY_S + 8 * NBYTES / SERVER_BPS)


def test_a_write_in_the_background_competes_with_averages_for_the_nic():
    """A write that fills the NIC for longer than a run: what it takes from the averages is a sum over all of it."""
    of = {"mode": "async", "to": "peer", "size": "400 MB", "gpus": 1, "nodes": 2}
    small, large = (
        costs(network="{latency: 0 s, bandwidth: 20 MB/s}", **of | {"size": size}) for size in ("40 MB", "400 MB")
    )
    copies_s = 40e6 / HOST_BPS, 400e6 / HOST_BPS
    beside_s = small.stall_s - copies_s[0], large.stall_s - copies_s[1]
    assert beside_s[0] > 0
    assert beside_s[1] == pytest.approx(10 * beside_s[0], rel=0.1)


def test_a_period_of_several_steps_counts_as_a_whole():
    every_step, averaging = costs(mode="async"), costs(schedule="kind: local_sgd, period: 4", mode="async")
    assert averaging.step_s == pytest.approx(every_step.step_s, rel=1e-3)
    assert averaging.stall_s == pytest.approx(COPY_S)


def test_a_scenario_without_checkpoints_has_no_costs():
    without = scenario.load("cloud-stragglers")
    assert checkpoint_costs(without, without.schedules[0]) is None


def test_a_single_node_has_no_peer():
    with pytest.raises(
        ScenarioError, match=r"checkpoint\.to: 'peer': the cluster has one node, write to: storage or to: disk"
    ):
        described(nodes=1, to="peer")


def test_real_ranks_refuse_a_checkpoint_in_the_memory_of_a_peer():
    wanted = described(to="peer")
    reason = only_simulated(build(wanted, wanted.schedules[0]).plan)
    assert reason is not None
    assert reason.startswith("save(checkpoint.state -> peer)")


def test_memory_does_not_grow_with_the_operations_beside_a_write():
    """Steps beside a write that is slow have thousands of operations, each with an end on each of 2,048 ranks."""
    many = scenario.loads("""
cluster: {preset: dgx-h100, nodes: 256, storage: {latency: 2 ms, bandwidth: 1000 GB/s}}
workload: {preset: llama3-8b, batch_size: 1}
steps: 4
checkpoint: {every: 16, size: 4 GB, ranks: all, mode: async}
schedules: [{kind: hsdp, shard: 8}]
""")
    tracemalloc.start()
    try:
        assert checkpoint_costs(many, many.schedules[0])
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 50e6
