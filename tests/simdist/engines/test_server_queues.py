"""Parameter servers with queues, drawn by hand; and collectives on the host."""

import numpy as np
import pytest
from engine_runs import des, fast

from simdist.cost import price
from simdist.errors import UnsupportedError
from simdist.plan import AllReduce, Broadcast, Buffer, Group, Plan, Reduce, Server
from simdist.scenario import Cluster, Link, Tensor, Workload
from simdist.schedules.job import Job
from simdist.schedules.parameter_server import ParameterServer
from simdist.traces.breakdown import break_down
from simdist.traces.trace import Trace

COUNTS = (1, 2, 3)
WORKLOAD = Workload(
    tensors=tuple(Tensor(name=f"t{n}", count=count, backward_s=1.0) for n, count in enumerate(COUNTS)),
    batch_size=1,
    forward_s=1.0,
    optimize_s=0.0,
)
CLUSTER = Cluster(nodes=2, gpus_per_node=1, fabric=Link.ideal(), network=Link(latency_s=0.0, bandwidth_Bps=8.0))


def simulated(pull: str, *, n_servers: int = 2, n_steps: int = 1) -> Trace:
    first = {"first_bucket_nbytes": 0, "bucket_nbytes": 0}
    schedule = ParameterServer(servers=n_servers, apart=True, placement="tensors", pull=pull, **first)
    plan = schedule.plan(Job(2, 1, n_steps, tensor_counts=COUNTS))
    return des.simulate(plan, price(plan, CLUSTER, WORKLOAD), {})


@pytest.mark.parametrize(("pull", "expected_s"), [("bucket", 14.0), ("tensor", 9.0), ("step", 10.0)])
def test_servers_take_their_queues_side_by_side(pull: str, expected_s: float) -> None:
    """An element takes a server 1 s from both ranks; t0 and t2 are on the first server, t1 on the second.

    backward          1-2 t2, 2-3 t1, 3-4 t0
    bucket            2-8 t2, 8-12 t1, 12-14 t0, there and back
    tensor  pushed    2-5 t2, 5-6 t0 | 3-5 t1      pulled    5-8 t2, 8-9 t0 | 5-7 t1
    step    pushed    2-5 t2, 5-6 t0 | 3-5 t1      pulled    6-9 t2, 9-10 t0 | 6-8 t1
    """
    assert simulated(pull).end_s.max() == pytest.approx(expected_s, rel=1e-12)


def test_states_of_overlapping_queues_add_up() -> None:
    found = break_down(simulated("step"))
    assert found.compute_s == pytest.approx(np.full((2, 1), 4.0))
    assert found.comm_s == pytest.approx(np.full((2, 1), 6.0))  # 4-10; both servers at once count once


def test_engines_agree_on_one_server_and_fast_refuses_several() -> None:
    schedule = ParameterServer(servers=1, apart=True, placement="tensors", pull="step")
    plan = schedule.plan(Job(2, 1, 5, tensor_counts=COUNTS))
    costs = price(plan, CLUSTER, WORKLOAD)
    by_fast, by_des = fast.simulate(plan, costs, {}), des.simulate(plan, costs, {})
    np.testing.assert_array_equal(by_fast.end_s, by_des.end_s)
    assert by_des.end_s.max() == pytest.approx(5 * (2 + 6 + 6))  # all pushes follow t2's, of 1 and 2-5 s
    several = simulated("step").plan
    with pytest.raises(UnsupportedError, match="des"):
        fast.simulate(several, price(several, CLUSTER, WORKLOAD), {})


@pytest.mark.parametrize(("op", "busiest_s"), [(Reduce, 2 * 1.5), (Broadcast, 2 * 1.0)])
def test_a_receiving_end_that_is_slower_than_the_sending_one(op: type[Reduce | Broadcast], busiest_s: float) -> None:
    """4 B take a receiver 0.5 s and 1.5 s, a sender 1 s; the server receives from two, or sends to two."""
    link = Link(table=((0, 0.5), (4, 2.0)), send_Bps=4.0)
    buffer = Buffer("grad", 1, tensors=(0, 1), initialized=True)
    push = op("grad", Group(2), algorithm="server", server=Server(0, apart=True))
    plan = Plan.from_steps("one", world_size=2, buffers=(buffer,), steps=[(push,)])
    costs = price(plan, CLUSTER.model_copy(update={"network": link}), WORKLOAD)
    assert costs.of[push].alone_s == pytest.approx(0.5 + busiest_s)


def test_collectives_on_the_host_pass_its_processes_and_the_bus() -> None:
    """2 nodes x 2 ranks, a ring of 6 rounds of 4 B: over a process 24 B, over a NIC as many; 16 B copied twice."""
    cluster = CLUSTER.model_copy(update={"gpus_per_node": 2, "host": {"reduction_Bps": 2.0}})
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"host_bandwidth_Bps": 16.0})})
    op = AllReduce("grad", Group(4), algorithm="ring")
    buffer = Buffer("grad", 4, tensors=(0, 1), initialized=True)
    plan = Plan.from_steps("one", world_size=4, buffers=(buffer,), steps=[(op,)])
    assert price(plan, cluster, WORKLOAD).of[op].alone_s == pytest.approx(24 / 2.0 + 2 * 16 / 16.0)
