"""Rings whose members begin and end on their own: as gloo's loop does it, and alike in both engines."""

import numpy as np
import pytest
from engine_runs import des, fast
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from tiers import examples

from simdist.cost import Shared, price
from simdist.errors import UnsupportedError
from simdist.plan import AllReduce, Buffer, Group, Plan
from simdist.runs.building import build, delays, simulate
from simdist.scenario import Cluster, Link, Tensor, Workload, loads
from simdist.scenario.warnings import warnings_of

FABRIC, NETWORK = Link(latency_s=10e-6, bandwidth_Bps=2e9), Link(latency_s=50e-6, bandwidth_Bps=50e6)
NBYTES = 8_000_000
SCENARIO = """
cluster:
  nodes: 4
  gpus_per_node: 2
  fabric: {latency: 10 us, bandwidth: 2 GB/s}
  network: {latency: 50 us, bandwidth: 400 Mbit/s}
  collectives:
    library: gloo
    chunkwise: true
    overhead: 1 ms
workload: {tensors: [{name: w, count: 500000}, {name: v, count: 250000}], batch_size: 1, forward: 10 ms}
schedules:
  - {kind: sync, bucket_size: 1 MB, first_bucket_size: 1 MB}
  - {kind: hierarchical_sgd, levels: {2: 2, 4: world}, intra_node_gradients: false}
  - {kind: local_sgd, period: 4}
disturbances: [{kind: exponential, mean: 30 ms}]
steps: 16
"""


def ring(nodes, per_node, nbytes=NBYTES, overhead_s=0.0, **settings):
    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=per_node,
        fabric=FABRIC,
        network=NETWORK,
        collectives={"library": "gloo", "chunkwise": True, "overhead_s": overhead_s},
    )
    op = AllReduce("sum", Group(nodes * per_node))
    workload = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)
    buffers = (Buffer("sum", nbytes // 4, initialized=True),)
    plan = Plan.from_steps("ring", world_size=nodes * per_node, buffers=buffers, steps=[(op,)])
    cost = price(plan, cluster, workload).of[op]
    assert isinstance(cost, Shared)
    return cost


def by_members(cost, come_s):
    """Carry out the loop of gloo/allreduce.cc by every member for itself: who can go on does, until all are through."""
    n = len(come_s)
    (of_phase, _), (segment_s,) = cost.segments.n_of_phases, cost.segments.segment_s
    now = [at_s + cost.segments.overhead_s for at_s in come_s]
    at = [(0, 0)] * n  # phase and iteration
    posted, through = {}, {}  # (receiver, phase, number) -> when receiver and sender have posted; when it is through
    while any(place != (2, 0) for place in at):
        for me in range(n):
            phase, number = at[me]
            before, mine = (me - 1) % n, (me, phase, number - 2)
            sent = (before, phase, number - 2)
            if phase == 2 or (number >= 2 and not {mine, sent} <= through.keys()):
                continue
            if number >= 2:
                now[me] = max(now[me], through[mine], through[sent])
            if number < of_phase:
                for receiver, who in ((me, "receiver"), (before, "sender")):
                    posted.setdefault((receiver, phase, number), {})[who] = now[me]
            at[me] = (phase, number + 1) if number + 1 < of_phase + 2 else (phase + 1, 0)
        for (receiver, phase, number), both in sorted(posted.items(), key=lambda item: item[0][1:]):
            earlier = (receiver, phase, number - 1) if number else (receiver, phase - 1, of_phase - 1)
            if len(both) == 2 and (earlier in through or (phase, number) == (0, 0)):
                begin_s = max(*both.values(), through.get(earlier, 0.0))
                through[receiver, phase, number] = begin_s + segment_s[receiver]
    return np.array(now)


@examples(25)
@given(
    shape=st.sampled_from([(1, 2), (4, 2), (2, 4), (3, 1), (5, 1)]),
    nbytes=st.sampled_from([4_000, 8_000_000, 60_000_000]),
    data=st.data(),
)
def test_members_end_when_the_loop_of_gloo_lets_them(shape, nbytes, data):
    cost = ring(*shape, nbytes=nbytes, overhead_s=1e-3)
    n = shape[0] * shape[1]
    come_s = np.array(data.draw(st.lists(st.floats(0, 0.5), min_size=n, max_size=n)))
    assert cost.segments.end_s(come_s, cost.segments.segment_s[0]) == pytest.approx(by_members(cost, come_s), rel=1e-12)


@pytest.mark.parametrize("shape", [(1, 2), (4, 2), (2, 4), (6, 1)])
def test_if_all_come_together_the_last_ends_when_the_ring_does(shape):
    cost = ring(*shape, overhead_s=1e-3)
    ends_s = cost.segments.end_s(np.zeros(shape[0] * shape[1]), cost.segments.segment_s[0])
    assert ends_s.max() == pytest.approx(cost.alone_s, rel=1e-12)


def test_who_is_far_from_the_last_ends_first():
    """Six machines, 10 segments a phase: the one opposite has one behind it when the last comes, of the first phase."""
    cost = ring(6, 1, nbytes=6_000_000)
    segment_s = float(cost.segments.segment_s[0, 0])
    late = np.zeros(6)
    late[0] = 10.0
    left = (cost.segments.end_s(late, cost.segments.segment_s[0]) - 10.0) / segment_s
    assert left == pytest.approx([20, 20, 20, 19, 20, 20])


def test_engines_agree_to_the_last_bit_and_with_who_looks_on():
    scenario = loads(SCENARIO)
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        by_des = des.simulate(built.plan, built.costs, delays(scenario))
        by_fast = fast.simulate(built.plan, built.costs, delays(scenario))
        seen = []
        watched = des.simulate(built.plan, built.costs, delays(scenario), observers=[seen.append])
        for times in ("ready_s", "start_s", "end_s"):
            assert_array_equal(getattr(by_des, times), getattr(by_fast, times))
            assert_array_equal(getattr(by_des, times), getattr(watched, times))
        assert [each.time_s for each in seen] == sorted(each.time_s for each in seen)
        together = simulate(
            scenario.changed(cluster=scenario.cluster.model_copy(update={"collectives": {"chunkwise": False}})),
            label=schedule.name,
        )
        assert by_des.makespan_s < together.makespan_s * (1 + 1e-9)


def test_actors_and_other_libraries_are_told():
    scenario = loads(SCENARIO)

    def watch(cluster):
        yield cluster.timeout(1.0)

    with pytest.raises(UnsupportedError, match="chunkwise: false"):
        simulate(scenario, actors=[watch])
    nccl = scenario.changed(cluster=scenario.cluster.model_copy(update={"collectives": {"library": "nccl"}}))
    assert any("cluster.collectives.chunkwise has no effect" in each for each in warnings_of(nccl))
