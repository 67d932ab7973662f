"""What checkpoints cost: closed forms and a timeline drawn by hand, exact in both engines."""

import math

import numpy as np
import pytest
from engine_runs import des, fast

from simdist import scenario
from simdist.errors import UnsupportedError
from simdist.plan import ops
from simdist.runs.building import build, delays, traffic
from simdist.studies.held import find_held
from simdist.studies.validation import validate
from simdist.traces.breakdown import break_down
from simdist.traces.waiting import step_s

STEP_S = 0.07
PARAM_NBYTES, HOST_BPS = 4_000_000, 1e9
LATENCY_S, SERVER_BPS, CLIENT_BPS, DISK_BPS = 0.01, 40e6, 25e6, 20e6
EVERY, N_CHECKPOINTS = 3, 4


def chosen(nodes=4, gpus=1, schedule="kind: sync", network="ideal", more="", **checkpoint):
    settings = {"every": EVERY, "what": "parameters", **checkpoint}
    written = ", ".join(f"{key}: {value}" for key, value in settings.items() if value is not None)
    return scenario.loads(f"""
cluster:
  nodes: {nodes}
  gpus_per_node: {gpus}
  fabric: ideal
  network: {network}
  device: {{host_bandwidth: {HOST_BPS:.0f} B/s}}
  storage: {{latency: {LATENCY_S} s, bandwidth: {SERVER_BPS:.0f} B/s, client_bandwidth: {CLIENT_BPS:.0f} B/s}}
  disk: {{read: 1 GB/s, write: {DISK_BPS:.0f} B/s, latency: {LATENCY_S} s}}
workload:
  tensors: [{{name: first, count: {PARAM_NBYTES // 4}}}]
  batch_size: 1
  forward: {STEP_S / 7 * 2} s
  backward: {STEP_S / 7 * 4} s
  optimize: {STEP_S / 7} s
steps: {EVERY * N_CHECKPOINTS}
checkpoint: {{{written}}}
{more}
schedules: [{{{schedule}}}]
""")


def simulated(wanted):
    """Return the trace, the same by both engines where `fast` takes it on."""
    built = build(wanted, wanted.schedules[0])
    arguments = built.plan, built.costs, delays(wanted)
    trace = des.simulate(*arguments)
    try:
        again = fast.simulate(*arguments)
    except UnsupportedError:
        assert built.costs.contested
        return trace
    if built.costs.contested:
        np.testing.assert_allclose(again.end_s, trace.end_s, rtol=1e-9)
    else:
        assert (again.end_s == trace.end_s).all()
    return trace


def written_s(n_ranks, nbytes, per_node=1):
    """Return how long all of some ranks write, which begin together."""
    nodes = math.ceil(n_ranks / per_node)
    return LATENCY_S + max(n_ranks * nbytes / SERVER_BPS, n_ranks * nbytes / nodes / CLIENT_BPS)


@pytest.mark.parametrize(
    ("checkpoint", "write_s", "nbytes"),
    [
        ({}, written_s(1, PARAM_NBYTES), PARAM_NBYTES),
        ({"ranks": "all"}, written_s(4, PARAM_NBYTES), PARAM_NBYTES),
        ({"what": "state", "ranks": "all"}, written_s(4, 2 * PARAM_NBYTES), 2 * PARAM_NBYTES),
        ({"what": None, "size": "1 MB", "ranks": "all"}, written_s(4, 1e6), 1e6),
        ({"to": "disk"}, LATENCY_S + PARAM_NBYTES / DISK_BPS, PARAM_NBYTES),
        ({"to": "disk", "ranks": "all"}, LATENCY_S + PARAM_NBYTES / DISK_BPS, PARAM_NBYTES),
    ],
)
def test_blocking_checkpoint_holds_up_the_step_after_it(checkpoint, write_s, nbytes):
    trace = simulated(chosen(**checkpoint))
    with_file_s = STEP_S + nbytes / HOST_BPS + write_s
    expected_s = [STEP_S, STEP_S, with_file_s] * N_CHECKPOINTS
    np.testing.assert_allclose(step_s(trace), expected_s, rtol=1e-9)
    writes = 4 if checkpoint.get("ranks") == "all" else 1
    np.testing.assert_allclose(break_down(trace).io_s[:writes], N_CHECKPOINTS * write_s, rtol=1e-9)
    assert not break_down(trace).io_s[writes:].any()


@pytest.mark.parametrize("every_s", [0.07, 0.5])  # a file takes longer than the steps between two, and shorter
@pytest.mark.parametrize("to", ["storage", "disk"])
@pytest.mark.parametrize("ranks", ["first", "all"])
def test_checkpoint_in_the_background_costs_its_copy_and_what_of_the_file_outlasts_the_steps(every_s, to, ranks):
    wanted = chosen(mode="async", to=to, ranks=ranks)
    wanted = wanted.changed(workload=wanted.workload.model_copy(update={"optimize_s": every_s - STEP_S / 7 * 6}))
    trace = simulated(wanted)
    n_ranks = 4 if ranks == "all" else 1
    file_s = LATENCY_S + PARAM_NBYTES / DISK_BPS if to == "disk" else written_s(n_ranks, PARAM_NBYTES)
    copy_s = PARAM_NBYTES / HOST_BPS
    between_s = copy_s + max(EVERY * every_s, file_s)
    expected_s = EVERY * every_s + copy_s + (N_CHECKPOINTS - 1) * between_s + file_s
    assert trace.makespan_s == pytest.approx(expected_s, rel=1e-9)


def test_ranks_of_a_node_share_its_disk_and_its_client():
    for to, file_s in (("disk", LATENCY_S + 4 * PARAM_NBYTES / DISK_BPS), ("storage", written_s(8, PARAM_NBYTES, 4))):
        trace = simulated(chosen(2, 4, to=to, ranks="all"))
        np.testing.assert_allclose(step_s(trace)[EVERY - 1], STEP_S + PARAM_NBYTES / HOST_BPS + file_s, rtol=1e-9)


def test_a_file_of_one_rank_goes_out_over_its_nic_beside_nothing():
    network = "{latency: 0 s, bandwidth: 10 MB/s}"
    trace = simulated(chosen(2, network=network))
    all_reduce_s = PARAM_NBYTES / 10e6  # of two
    expected_s = STEP_S + all_reduce_s + PARAM_NBYTES / HOST_BPS + LATENCY_S + PARAM_NBYTES / 10e6
    np.testing.assert_allclose(step_s(trace)[EVERY - 1], expected_s, rtol=1e-9)


@pytest.mark.parametrize("ranks", ["first", "all"])
def test_file_for_a_peer_crosses_the_network_to_the_next_node_only(ranks):
    """Two ranks of a node share its NIC. No server and no disk takes part."""
    trace = simulated(chosen(4, 2, network="{latency: 1 ms, bandwidth: 10 MB/s}", to="peer", ranks=ranks))
    n_sending = 2 if ranks == "all" else 1
    undisturbed_s = step_s(trace)[0]
    expected_s = PARAM_NBYTES / HOST_BPS + 1e-3 + n_sending * PARAM_NBYTES / 10e6
    np.testing.assert_allclose(step_s(trace)[EVERY - 1] - undisturbed_s, expected_s, rtol=1e-9)


def test_averages_and_checkpoints_each_keep_their_own_period():
    wanted = chosen(schedule="kind: local_sgd, period: 4")
    plan = build(wanted, wanted.schedules[0]).plan
    bodies = [plan.bodies[number] for number in plan.body_of_steps()]
    kinds = [[type(op) for op in body] for body in bodies]
    assert [step for step, each in enumerate(kinds) if ops.Save in each] == [2, 5, 8, 11]
    assert [step for step, each in enumerate(kinds) if ops.AllReduce in each] == [3, 7, 11]
    assert kinds[11].index(ops.AllReduce) < kinds[11].index(ops.Save)


def test_file_in_the_background_shares_the_server_with_reads():
    """One rank; 100 B/s; a batch has 600 B, a file 400 B. L reads, S writes, # at once, F B O as ever, . idle.

    0     6      13      21        30  34
    LLLLLLLLLLLLL##########               reads: batches 0, 1 and 2, at 0, 6 and 12
    ......FFBBBBOFFBBBBO...FFBBBBO        computing; parameters are copied after O, at 13, 21 and 30
                 ##########SSS    SSSS    files, from 13, 21 and 30
    """
    wanted = scenario.loads("""
cluster:
  nodes: 1
  gpus_per_node: 1
  fabric: ideal
  network: ideal
  storage: {latency: 0 s, bandwidth: 100 B/s}
workload:
  tensors: [{name: weight, count: 100}]
  batch_size: 1
  sample_size: 600 B
  forward: 2 s
  backward: 4 s
  optimize: 1 s
input: {source: storage, prefetch: 2}
checkpoint: {every: 1, what: parameters, mode: async}
steps: 3
schedules: [{kind: sync}]
""")
    trace = simulated(wanted)
    found = {"load": [], "save": []}
    first = trace.plan.first_instances()
    for step, number in enumerate(trace.plan.body_of_steps()):
        for at, op in enumerate(trace.plan.bodies[number]):
            if isinstance(op, ops.Load | ops.Save):
                row = first[step] + at
                times = float(trace.start_s[row, 0]), float(trace.end_s[row, 0])
                found["load" if isinstance(op, ops.Load) else "save"].append(times)
    assert found == {"load": [(0, 6), (6, 12), (12, 23)], "save": [(13, 21), (21, 26), (30, 34)]}
    states = break_down(trace)
    assert (states.compute_s[0, 0], states.io_s[0, 0]) == (21, 13)


def test_a_save_and_a_load_that_an_outage_holds_up_together_count_once():
    settings = """
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal, storage: {latency: 2 ms, bandwidth: 50 MB/s}}
workload: {tensors: [{name: all, count: 2500000}], batch_size: 1, sample_size: 1 MB, forward: 40 ms, backward: 80 ms}
schedules: [{kind: sync}]
steps: 8
input: {source: storage}
checkpoint: {every: 4, what: state, mode: async}
"""
    late = scenario.loads(settings + "disturbances: [{kind: outages, on: link, link: storage, at: 0.3 s, lasts: 2 s}]")
    built, plain = build(late, late.schedules[0]), scenario.loads(settings)
    trace = des.simulate(built.plan, built.costs, {}, traffic=traffic(late, built.costs, 0))
    found = break_down(trace, find_held(trace, built.costs))
    undisturbed = build(plain, plain.schedules[0])
    before = break_down(des.simulate(undisturbed.plan, undisturbed.costs, {}))
    assert found.links_s.keys() == {"storage_server"}
    assert (found.links_s["storage_server"] <= found.io_s).all()
    longer_s = (found.io_s - before.io_s).mean()
    assert found.links_s["storage_server"].mean() == pytest.approx(longer_s, rel=1e-3)


def test_only_ranks_that_write_are_compared_with_a_measurement():
    chosen_first = chosen(ranks="first")
    built = build(chosen_first, chosen_first.schedules[0])
    trace = des.simulate(built.plan, built.costs, {})
    (save,) = (kind for kind in validate(trace, trace, {}).kinds if kind.op.startswith("save"))
    assert save.count == N_CHECKPOINTS
    assert save.simulated_s == pytest.approx(LATENCY_S + PARAM_NBYTES / CLIENT_BPS)
