"""Timelines of a few ranks, drawn by hand: both engines give exactly these times.

A table has a line per operation, in program order, and a column per rank. `2-6` starts at 2 s and ends at 6 s; `2>5-6`
was ready at 2 s and waited for others until 5 s. In the drawings a character is a second: F forward, B backward,
A all-reduce, O optimiser, C copy, L load, D injected delay, w the host waits, . waiting for other ranks.
"""

import math
import re

import numpy as np
import pytest
from engine_runs import des, fast

from simdist.cost import price
from simdist.errors import UnsupportedError
from simdist.plan import AllReduce, Backward, Buffer, Delay, Forward, Load, Optimize, Plan, Wait
from simdist.plan.group import Group
from simdist.plan.text import op_name
from simdist.plan.walk import walk
from simdist.scenario.cluster import Cluster, Device, Link, Storage
from simdist.scenario.workload import Tensor, Workload
from simdist.schedules import InputPath, Job, kinds
from simdist.traces.breakdown import STATES, break_down

ENGINES = pytest.mark.parametrize("engine", [des, fast], ids=["des", "fast"])

IDEAL = Link.ideal()
SLOW = Link(latency_s=0.0, bandwidth_Bps=4.0)  # a float32 a second: its all-reduce between two nodes takes 1 s


def cluster(n, *, network=SLOW, gpus_per_node=1, **settings):
    return Cluster(nodes=n // gpus_per_node, gpus_per_node=gpus_per_node, fabric=IDEAL, network=network, **settings)


def workload(*counts, forward_s=2.0, backward_s=4.0, optimize_s=1.0):
    """Tensors with equal shares of the compute time, whatever their sizes."""
    tensors = tuple(Tensor(name=str(number), count=count, flops=1.0) for number, count in enumerate(counts or (1,)))
    return Workload(tensors=tensors, batch_size=1, forward_s=forward_s, backward_s=backward_s, optimize_s=optimize_s)


BUFFERS = (
    Buffer("param", 1, tensors=(0, 1), initialized=True),
    Buffer("grad", 1, tensors=(0, 1)),
    Buffer("loss", 1),
    Buffer("batch", 8, "uint8", place="host"),
)
FORWARD = Forward(("param",), ("loss",))
BACKWARD = Backward(("param", "loss"), "grad")
OPTIMIZE = Optimize(("param",), ("grad",))


def repeated(*body, n, times):
    return Plan.from_steps("drawn", world_size=n, buffers=BUFFERS, steps=[body] * times)


def host(*steps):
    return {"host": np.array([steps], dtype=np.float64)}


def check(engine, plan, where, what, delays, table):
    """Compare the trace of a plan with a table."""
    trace = engine.simulate(plan, price(plan, where, what), delays)
    rows = [line.split() for line in table.strip().splitlines()]
    assert [row[0] for row in rows] == [op_name(instance.op) for instance in walk(plan)]
    cells = [[times(cell) for cell in row[1:]] for row in rows]
    expected = np.array(cells)
    for place, array in enumerate((trace.ready_s, trace.start_s, trace.end_s)):
        np.testing.assert_array_equal(array, expected[:, :, place])


def times(cell):
    """Read `ready>start-end`; without `ready>` it started when it was ready."""
    ready, start, end = re.fullmatch(r"(?:([\d.]+)>)?([\d.]+)-([\d.]+)", cell).groups()
    return float(ready or start), float(start), float(end)


@ENGINES
def test_host_that_runs_ahead_sleeps_while_its_gpu_works(engine):
    """
    Rank 0 sleeps 3 s in step 0, but 2 s of that while the forward pass runs. Rank 1's second of step 1 is hidden.

        rank 0 host    DDD
               gpu     FF BBBBAOFFBBBBAO
        rank 1 host    D
               gpu     FFBBBB.AOFFBBBBAO
                       0         1
                       01234567890123456
    """
    plan = repeated(FORWARD, Delay("host"), BACKWARD, AllReduce("grad", Group(2)), OPTIMIZE, n=2, times=2)
    delays = host([3, 0], [0, 1])
    table = """
        forward     0-2    0-2
        delay       0-3    0-0
        backward    3-7    2-6
        all_reduce  7-8    6>7-8
        optimize    8-9    8-9
        forward     9-11   9-11
        delay       3-3    0-1
        backward    11-15  11-15
        all_reduce  15-16  15-16
        optimize    16-17  16-17
    """
    check(engine, plan, cluster(2), workload(), delays, table)


@ENGINES
def test_host_that_blocks_at_the_loss_sleeps_while_its_gpu_idles(engine):
    """
    The same delays, after the host has read the loss: each second of them counts.

        rank 0 host    wwDDDwwwwwwww
               gpu     FF   BBBBAOFFBBBB.AO
        rank 1 host    wwwwwwwwwwwwwD
               gpu     FFBBBB...AOFF BBBBAO
                       0         1
                       01234567890123456789
    """
    body = (FORWARD, Wait("loss"), Delay("host"), BACKWARD, AllReduce("grad", Group(2)), OPTIMIZE)
    delays = host([3, 0], [0, 1])
    table = """
        forward     0-2       0-2
        wait        2-2       2-2
        delay       2-5       2-2
        backward    5-9       2-6
        all_reduce  9-10      6>9-10
        optimize    10-11     10-11
        forward     11-13     11-13
        wait        13-13     13-13
        delay       13-13     13-14
        backward    13-17     14-18
        all_reduce  17>18-19  18-19
        optimize    19-20     19-20
    """
    check(engine, repeated(*body, n=2, times=2), cluster(2), workload(), delays, table)


@ENGINES
def test_a_late_rank_holds_up_one_more_neighbour_a_step_in_a_ring(engine):
    """
    Rank 1 is 3 s late in step 0. Its partner waits, and in step 1 the others wait for these two.

        rank 0 BBBB...ABBBBA
        rank 1 DDDBBBBABBBBA
        rank 2 BBBBABBBB...A
        rank 3 BBBBABBBB...A
               0         1
               0123456789012
    """
    turns = [Group(2), Group.of([[1, 2], [3, 0]])]
    bodies = [(Delay("compute"), BACKWARD, AllReduce("grad", turn)) for turn in turns]
    plan = Plan.from_steps("drawn", world_size=4, buffers=BUFFERS, steps=bodies)
    delays = {"compute": np.array([[[0, 3, 0, 0], [0, 0, 0, 0]]], dtype=np.float64)}
    table = """
        delay       0-0    0-3    0-0     0-0
        backward    0-4    3-7    0-4     0-4
        all_reduce  4>7-8  7-8    4-5     4-5
        delay       4-4    7-7    4-4     4-4
        backward    8-12   8-12   5-9     5-9
        all_reduce  12-13  12-13  9>12-13 9>12-13
    """
    check(engine, plan, cluster(4), workload(), delays, table)


@ENGINES
def test_wait_blocks_the_host_until_the_last_writer_is_done(engine):
    """
    The host waits for the gradient, so it begins to sleep when the all-reduce is done; the next forward comes after.

        rank 0 host    wwwwwwwDDwwwwwww
               gpu     FFBBBBAO FFBBBBAO
        rank 1 host    wwwwwwwwwwwwwwww
               gpu     FFBBBBAOFFBBBB.AO
                       0         1
                       01234567890123456
    """
    body = (FORWARD, BACKWARD, AllReduce("grad", Group(2)), OPTIMIZE, Wait("grad"), Delay("host"))
    table = """
        forward     0-2    0-2
        backward    2-6    2-6
        all_reduce  6-7    6-7
        optimize    7-8    7-8
        wait        7-7    7-7
        delay       7-9    7-7
        forward     9-11   8-10
        backward    11-15  10-14
        all_reduce  15-16  14>15-16
        optimize    16-17  16-17
        wait        16-16  16-16
        delay       16-16  16-16
    """
    check(engine, repeated(*body, n=2, times=2), cluster(2), workload(), host([2, 0], [0, 0]), table)


@ENGINES
def test_delay_of_the_compute_stream_hides_behind_nothing(engine):
    """
    The host runs ahead as in the first drawing, but it is the GPU that is held up.

        rank 0 gpu     FFDDDBBBBAO
        rank 1 gpu     FFBBBB...AO
                       0         1
                       01234567890
    """
    plan = repeated(FORWARD, Delay("compute"), BACKWARD, AllReduce("grad", Group(2)), OPTIMIZE, n=2, times=1)
    table = """
        forward     0-2    0-2
        delay       2-5    2-2
        backward    5-9    2-6
        all_reduce  9-10   6>9-10
        optimize    10-11  10-11
    """
    check(engine, plan, cluster(2), workload(), {"compute": np.array([[[3.0, 0.0]]])}, table)


@ENGINES
def test_delay_of_the_io_stream_holds_up_loads_only(engine):
    """
    rank 0 io      DDDLL
           gpu     FFBBBBO
    rank 1 io      LL
           gpu     FFBBBBO
                   0123456
    """
    storage = Storage(latency_s=2.0, bandwidth_Bps=1e9)
    plan = repeated(Delay("io"), Load("batch"), FORWARD, BACKWARD, OPTIMIZE, n=2, times=1)
    where = cluster(2, network=IDEAL, storage=storage)
    trace = engine.simulate(plan, price(plan, where, workload()), {"io": np.array([[[3.0, 0.0]]])})
    assert trace.start_s[:2].tolist() == [[0, 0], [3, 0]]
    assert trace.end_s[1:].tolist() == pytest.approx(np.array([[5, 2], [2, 2], [6, 6], [7, 7]]), abs=1e-7)


@ENGINES
def test_all_reduce_of_a_bucket_overlaps_with_the_rest_of_the_backward_pass(engine):
    """
    The bucket of the last tensor (12 B, 3 s) is ready first; the other one (4 B, 1 s) queues behind it.

        gpu     FFBBBB  O
        comm        AAAA
                012345678
    """
    described = Job(2, 1, 1, tensor_counts=(1, 3), run_ahead_steps=None)
    plan = kinds()["sync"](first_bucket_nbytes=12, bucket_nbytes=4).plan(described)
    table = """
        forward     0-2    0-2
        backward    2-4    2-4
        all_reduce  4-7    4-7
        backward    4-6    4-6
        all_reduce  7-8    7-8
        optimize    8-9    8-9
    """
    check(engine, plan, cluster(2), workload(1, 3), {}, table)


def loading(prefetch):
    """Two ranks read 12 B a step from a server of 8 B/s: 3 s together. A step computes for 3 s, too."""
    described = Job(2, 1, 3, tensor_counts=(1,), batch_nbytes=12, input_path=InputPath("storage", "pinned", prefetch))
    plan = kinds()["sync"]().plan(described)
    where = cluster(2, network=IDEAL, storage=Storage(latency_s=0.0, bandwidth_Bps=8.0))
    return plan, where, workload(forward_s=1.0, backward_s=2.0, optimize_s=0.0)


@ENGINES
def test_one_batch_buffer_lets_a_load_overlap_only_with_the_backward_pass(engine):
    """
    The host waits for the batch and then for the loss before it enqueues the next load.

        io      LLL LLL LLL
        gpu        FBB FBB FBB
                0         1
                01234567890123
    """
    plan, where, what = loading(1)
    table = """
        load        0-3    0-3
        wait        3-3    3-3
        copy        3-3    3-3
        forward     3-4    3-4
        wait        4-4    4-4
        backward    4-6    4-6
        all_reduce  6-6    6-6
        optimize    6-6    6-6
        load        4-7    4-7
        wait        7-7    7-7
        copy        7-7    7-7
        forward     7-8    7-8
        wait        8-8    8-8
        backward    8-10   8-10
        all_reduce  10-10  10-10
        optimize    10-10  10-10
        load        8-11   8-11
        wait        11-11  11-11
        copy        11-11  11-11
        forward     11-12  11-12
        wait        12-12  12-12
        backward    12-14  12-14
        all_reduce  14-14  14-14
        optimize    14-14  14-14
    """
    check(engine, plan, where, what, {}, table)


@ENGINES
def test_two_batch_buffers_keep_storage_busy(engine):
    """
    io      LLLLLLLLL
    gpu        FBBFBBFBB
            0         1
            012345678901
    """
    plan, where, what = loading(2)
    table = """
        load        0-3    0-3
        load        3-6    3-6
        wait        3-3    3-3
        copy        3-3    3-3
        forward     3-4    3-4
        wait        4-4    4-4
        backward    4-6    4-6
        all_reduce  6-6    6-6
        optimize    6-6    6-6
        load        6-9    6-9
        wait        6-6    6-6
        copy        6-6    6-6
        forward     6-7    6-7
        wait        7-7    7-7
        backward    7-9    7-9
        all_reduce  9-9    9-9
        optimize    9-9    9-9
        wait        9-9    9-9
        copy        9-9    9-9
        forward     9-10   9-10
        wait        10-10  10-10
        backward    10-12  10-12
        all_reduce  12-12  12-12
        optimize    12-12  12-12
    """
    check(engine, plan, where, what, {}, table)


@ENGINES
def test_local_sgd_waits_for_the_sum_of_a_period_at_its_average(engine):
    """
    Each rank is 1 s late in one of the two steps: sync SGD would wait twice, local SGD not at all.

        rank 0 gpu     FF BBBBOFFBBBBOA
        rank 1 gpu     FFBBBBOFF BBBBOA
                       0         1
                       0123456789012345
    """
    plan = kinds()["local_sgd"](period=2).plan(Job(2, 1, 2, tensor_counts=(1,), delay_channels=frozenset({"host"})))
    table = """
        forward     0-2    0-2
        wait        2-2    2-2
        delay       2-3    2-2
        backward    3-7    2-6
        optimize    7-8    6-7
        forward     8-10   7-9
        wait        10-10  9-9
        delay       10-10  9-10
        backward    10-14  10-14
        optimize    14-15  14-15
        copy        15-15  15-15
        wait        15-15  15-15
        all_reduce  15-16  15-16
        copy        16-16  16-16
    """
    check(engine, plan, cluster(2), workload(), host([1, 0], [0, 1]), table)


@ENGINES
def test_averages_copy_at_the_speed_of_memory_and_do_not_overlap(engine):
    """
    A copy reads and writes 4 B at 8 B/s: 1 s.

        gpu     FFBBBBOC C
        comm            A
                0123456789
    """
    plan = kinds()["local_sgd"](period=1).plan(Job(2, 1, 1, tensor_counts=(1,), run_ahead_steps=None))
    table = """
        forward     0-2    0-2
        backward    2-6    2-6
        optimize    6-7    6-7
        copy        7-8    7-8
        wait        8-8    8-8
        all_reduce  8-9    8-9
        copy        9-10   9-10
    """
    check(engine, plan, cluster(2, device=Device(memory_bandwidth_Bps=8.0)), workload(), {}, table)


@ENGINES
@pytest.mark.parametrize("tau", range(5))
@pytest.mark.parametrize("comm_s", [1.0, 4.0, 6.0, 14.0, 40.0])
def test_overlap_hides_communication_behind_just_tau_steps(engine, comm_s, tau):
    """Copies are free. A step takes 7 s, and 3 averages are taken; each hides min(comm, 7 tau), to the last bit.

    With tau = 4 an average is taken where the next one is sent, and the last one, which nobody takes, ends the run.
    """
    job = Job(2, 1, 4 * 3 + tau, tensor_counts=(1,), run_ahead_steps=None)
    for schedule in (
        kinds()["local_sgd"](period=4, overlap_steps=tau),
        kinds()["diloco"](period=4, overlap_steps=tau, mixing=0.5),
    ):
        network = Link(latency_s=0.0, bandwidth_Bps=4.0 / comm_s)  # of 4 B between two ranks
        where = cluster(2, network=network, device=Device(memory_bandwidth_Bps=math.inf))
        plan = schedule.plan(job)
        found = engine.simulate(plan, price(plan, where, workload()), {}).makespan_s
        last_s = comm_s if tau == 4 else 0.0
        assert found == 7 * job.n_steps + 3 * (comm_s - min(comm_s, 7 * tau)) + last_s


@pytest.mark.parametrize("fabric_Bps", [math.inf, 40.0])
@pytest.mark.parametrize("tau", range(5))
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("diloco", {"period": 4, "ranks_per_worker": "node"}), ("hierarchical_sgd", {"levels": {4: "world"}})],
)
def test_averages_between_workers_pass_beside_the_all_reduces_within_them(kind, settings, tau, fabric_Bps):
    """Two nodes of two ranks, 16 B of gradients. An average puts 24 B on each NIC and fabric port: 12 s at 2 B/s.

    A step takes 7 s and its all-reduce within the nodes, 16 B on each port. That of the step after an average was sent
    begins 6 s later, and has 2 B/s less.
    """
    job = Job(4, 2, 4 * 3 + tau, tensor_counts=(4,), run_ahead_steps=None)
    links = {"fabric": Link(latency_s=0.0, bandwidth_Bps=fabric_Bps), "network": Link(latency_s=0.0, bandwidth_Bps=2.0)}
    where = Cluster(nodes=2, gpus_per_node=2, device=Device(memory_bandwidth_Bps=math.inf), **links)
    plan = kinds()[kind](**settings, overlap_steps=tau, synchronize=False, algorithm="ring").plan(job)
    costs = price(plan, where, workload(4))
    trace = des.simulate(plan, costs, {})
    alone_s, beside_s = 16 / fabric_Bps, 16 / (fabric_Bps - 2)
    first_s = 7 + beside_s if tau else 0.0
    late_s = {0: 12.0, 1: 12.0 - first_s}.get(tau, 0.0) + (beside_s - alone_s if tau else 0.0)
    last_s = 12.0 if tau == 4 else 0.0
    assert trace.makespan_s == pytest.approx((7 + alone_s) * job.n_steps + 3 * late_s + last_s, rel=1e-12)
    states = break_down(trace)
    assert sum(states.per_step_s(state).item() for state in STATES) == pytest.approx(states.step_s.item(), rel=1e-12)
    assert states.per_step_s("compute").item() == pytest.approx(7.0, rel=1e-12)
    if tau and math.isfinite(fabric_Bps):
        with pytest.raises(UnsupportedError, match="another operation may still use a link"):
            fast.simulate(plan, costs, {})
    else:
        np.testing.assert_array_equal(fast.simulate(plan, costs, {}).end_s, trace.end_s)


@ENGINES
def test_late_rank_delays_its_group_only(engine):
    """
    Four ranks in pairs; rank 1 is late in step 0, rank 2 in step 1; then the pairs have lost as much.

        rank 0   FFBBBB...AOFFBBBBAO
        rank 1   FF   BBBBAOFFBBBBAO
        rank 2   FFBBBBAOFF   BBBBAO
        rank 3   FFBBBBAOFFBBBB...AO
                 0         1
                 0123456789012345678
    """
    body = (FORWARD, Wait("loss"), Delay("host"), BACKWARD, AllReduce("grad", Group(2)), OPTIMIZE)
    table = """
        forward     0-2     0-2     0-2    0-2
        wait        2-2     2-2     2-2    2-2
        delay       2-2     2-5     2-2    2-2
        backward    2-6     5-9     2-6    2-6
        all_reduce  6>9-10  9-10    6-7    6-7
        optimize    10-11   10-11   7-8    7-8
        forward     11-13   11-13   8-10   8-10
        wait        13-13   13-13   10-10  10-10
        delay       13-13   13-13   10-13  10-10
        backward    13-17   13-17   13-17  10-14
        all_reduce  17-18   17-18   17-18  14>17-18
        optimize    18-19   18-19   18-19  18-19
    """
    check(engine, repeated(*body, n=4, times=2), cluster(4), workload(), host([0, 3, 0, 0], [0, 0, 3, 0]), table)


@ENGINES
def test_groups_at_a_stride_are_late_together(engine):
    """Two nodes of two GPUs, groups (0, 2) and (1, 3): with latencies only they share nothing. Rank 3 delays rank 1."""
    plan = repeated(Delay("compute"), FORWARD, BACKWARD, AllReduce("grad", Group(2, stride=2)), n=4, times=1)
    table = """
        delay       0-0    0-0    0-0    0-3
        forward     0-2    0-2    0-2    3-5
        backward    2-6    2-6    2-6    5-9
        all_reduce  6-7    6>9-10 6-7    9-10
    """
    delays = {"compute": np.array([[[0.0, 0.0, 0.0, 3.0]]])}
    latency = Link(latency_s=0.5, bandwidth_Bps=np.inf)
    check(engine, plan, cluster(4, gpus_per_node=2, network=latency), workload(), delays, table)


@ENGINES
def test_host_that_runs_one_step_ahead_sleeps_in_advance(engine):
    """
    In step t the host reads the loss of step t - 1; in step 0 there is none. In step 1 it has read the loss at 2 s, so
    that rank 0 sleeps 4 s while its GPU is still in step 0. In step 2 it reads the loss of step 1 at 10 s; rank 1
    sleeps 9 s, and its GPU needs it at 18 s: 1 s is left.

        rank 0 host    wwDDDDwwww
               gpu     FFBBBBAOFFBBBBAOFFBBBB.AO
        rank 1 host    wwwwwwwwwwDDDDDDDDD
               gpu     FFBBBBAOFFBBBBAOFF BBBBAO
                       0         1         2
                       0123456789012345678901234
    """
    described = Job(2, 1, 3, tensor_counts=(1,), run_ahead_steps=1, delay_channels=frozenset({"host"}))
    plan = kinds()["sync"]().plan(described)
    table = """
        forward     0-2       0-2
        delay       0-0       0-0
        backward    2-6       2-6
        all_reduce  6-7       6-7
        optimize    7-8       7-8
        forward     8-10      8-10
        wait        2-2       2-2
        delay       2-6       2-2
        backward    10-14     10-14
        all_reduce  14-15     14-15
        optimize    15-16     15-16
        forward     16-18     16-18
        wait        10-10     10-10
        delay       10-10     10-19
        backward    18-22     19-23
        all_reduce  22>23-24  23-24
        optimize    24-25     24-25
    """
    check(engine, plan, cluster(2), workload(), host([0, 0], [4, 0], [0, 9]), table)


def on_one_nic(late_s, *, n_times=1):
    """Two nodes of two GPUs: the groups (0, 2) and (1, 3) share the NICs; 8 B take each of them 2 s alone."""
    buffers = (*BUFFERS, Buffer("flat", 2, initialized=True))
    body = (Delay("host"), *[AllReduce("flat", Group(2, stride=2))] * n_times)
    plan = Plan.from_steps("drawn", world_size=4, buffers=buffers, steps=[body])
    return plan, price(plan, cluster(4, gpus_per_node=2), workload()), host([0, late_s, 0, late_s])


@ENGINES
def test_two_groups_on_one_nic_take_twice_as_long(engine):
    """
    group (0, 2)   AAAA
    group (1, 3)   AAAA
    """
    plan, costs, delays = on_one_nic(0)
    trace = engine.simulate(plan, costs, delays)
    assert trace.start_s[1].tolist() == [0, 0, 0, 0]
    assert trace.end_s[1].tolist() == [4, 4, 4, 4]


@ENGINES
def test_late_group_on_one_nic_gets_half_until_the_other_is_done(engine):
    """
    Alone at 4 B/s until 1 s, each at 2 B/s until 3 s, then alone again.

        group (0, 2)   AAA
        group (1, 3)    AAA
    """
    plan, costs, delays = on_one_nic(1)
    trace = engine.simulate(plan, costs, delays)
    assert trace.start_s[1].tolist() == [0, 1, 0, 1]
    assert trace.end_s[1].tolist() == [3, 4, 3, 4]


@ENGINES
def test_groups_on_one_nic_that_are_far_apart_do_not_share_it(engine):
    """
    group (0, 2)   AA
    group (1, 3)      AA
    """
    plan, costs, delays = on_one_nic(3)
    assert engine.simulate(plan, costs, delays).end_s[1].tolist() == [2, 5, 2, 5]


@ENGINES
def test_next_operation_of_an_early_group_slows_down_a_late_one(engine):
    """
    The first B has 4 B left when the second A begins at 3 s, and each gets 2 B/s until the last one is alone.

        group (0, 2)   AAAaaaa
        group (1, 3)    BBBBbbb
    """
    plan, costs, delays = on_one_nic(1, n_times=2)
    trace = engine.simulate(plan, costs, delays)
    assert trace.start_s[1:].tolist() == [[0, 1, 0, 1], [3, 5, 3, 5]]
    assert trace.end_s[1:].tolist() == [[3, 5, 3, 5], [7, 8, 7, 8]]


@pytest.mark.parametrize(
    ("degree", "by", "reduce_s", "return_s", "k"),
    [
        ("node", "all_gather", 8.0, 0.0, 2),  # two groups of two share a NIC, half a buffer each
        (True, "all_gather", 6.0, 6.0, 4),  # a ring through all: 3/4 of the buffer there, and back
        ("node", "broadcast", 12.0, 0.0, 2),
        (True, "broadcast", 12.0, 8.0, 4),  # each of four slices passes a NIC by itself
    ],
)
@ENGINES
def test_step_of_updates_that_some_ranks_share_is_the_sum_of_its_parts(engine, degree, by, reduce_s, return_s, k):
    """8 elements on two nodes of two ranks, a second each between nodes, none inside. Nothing hides the one bucket."""
    schedule = kinds()["sync"](shared_update=degree, updates_sent_by=by, bucket_nbytes=None, algorithm="ring")
    plan = schedule.plan(Job(world_size=4, ranks_per_node=2, n_steps=3, tensor_counts=(8,)))
    costs = price(plan, cluster(4, gpus_per_node=2), workload(8))
    trace = engine.simulate(plan, costs, {})
    assert trace.makespan_s == pytest.approx(3 * (2.0 + 4.0 + reduce_s + 1.0 / k + return_s), rel=1e-12)
