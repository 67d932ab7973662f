"""Strategies of hypothesis: plans with clusters, workloads and delays."""

import drawn_plans
import numpy as np
from hypothesis import strategies as st

from simdist.cost import price
from simdist.plan import (
    AllReduce,
    Buffer,
    Delay,
    Load,
    Plan,
    Save,
)
from simdist.plan.check import check
from simdist.plan.delays import delay_shapes
from simdist.plan.delays import delays_of as delaying
from simdist.plan.group import Group
from simdist.scenario.cluster import Cluster, Device, DeviceOverride, Disk, Link, Storage
from simdist.scenario.workload import Tensor, Workload

WITHOUT_STORAGE = tuple(kind for kind in drawn_plans.OP_KINDS if kind not in (Load, Save))


@st.composite
def links(draw):
    kind = draw(st.sampled_from(["ideal", "latency", "line", "line", "table"]))
    if kind == "ideal":
        return Link.ideal()
    if kind == "table":
        return Link(table=((1_000, 20e-6), (100_000, 90e-6), (10_000_000, 1.5e-3)))
    bandwidth_Bps = np.inf if kind == "latency" else draw(st.sampled_from([1e7, 3e8, 1.25e9]))
    return Link(latency_s=draw(st.sampled_from([0.0, 5e-6, 1e-3])), bandwidth_Bps=bandwidth_Bps)


@st.composite
def clusters(draw, world_size, *, uniform=False):
    """Draw any cluster of so many ranks; if `uniform`, all ranks are alike and alone on their nodes."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    gpus_per_node = 1 if uniform else draw(st.sampled_from(sizes))
    slow = st.builds(
        DeviceOverride, ranks=st.tuples(st.integers(0, world_size - 1)), speed=st.sampled_from([0.5, 0.9, 1.7])
    )
    return Cluster(
        nodes=world_size // gpus_per_node,
        gpus_per_node=gpus_per_node,
        fabric=draw(links()),
        network=draw(links()),
        topology={"nics_per_node": draw(st.sampled_from([1, 2])), "oversubscription": draw(st.sampled_from([1, 1, 3]))},
        device=Device(memory_bandwidth_Bps=3e11, host_bandwidth_Bps=1e10),
        slow_devices=() if uniform else draw(st.lists(slow, max_size=2)),
        storage=Storage(latency_s=1e-3, bandwidth_Bps=1e6, client_bandwidth_Bps=draw(st.sampled_from([3e5, 1e9]))),
        disk=Disk(read_Bps=1e6, write_Bps=5e5),
    )


@st.composite
def workloads(draw):
    flops = draw(st.sampled_from([(1.0, 1.0, 1.0, 1.0), (1.0, 0.0, 7.0, 3.0)]))
    tensors = tuple(Tensor(name=str(number), count=1, flops=each) for number, each in enumerate(flops))
    return Workload(
        tensors=tensors,
        batch_size=1,
        forward_s=draw(st.sampled_from([0.0, 0.02])),
        backward_s=draw(st.sampled_from([0.03, 1.0])),
        optimize_s=draw(st.sampled_from([0.0, 1e-3])),
    )


@st.composite
def delays_of(draw, plan, *, n_seeds=1):
    """Draw the delays a plan needs: mostly none, some of a few sizes that make ties likely, some of any size."""
    drawn = {}
    for op in delaying(plan):
        is_split = op.micro_batch is not None
        shape = draw(st.sampled_from(delay_shapes(plan)[is_split:]))
        drawn[op.channel] = draw(arrays((n_seeds, *shape[1:])))
    return drawn


@st.composite
def arrays(draw, shape):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = rng.choice([0.0, 0.0, 0.0, 0.01, 0.03, 1.0], size=shape)
    return sizes + (rng.random(shape) * 0.1 if draw(st.booleans()) else 0.0)


@st.composite
def runs(draw, **limits):
    """Draw a plan, the cost of its operations on some cluster, and its delays."""
    plan = draw(st.one_of(drawn_plans.legal_plans(**limits), drawn_plans.schedule_plans()))
    check(plan)
    tensors = max((buffer.tensors[1] for buffer in plan.buffers if buffer.tensors), default=0)
    assert tensors <= drawn_plans.N_TENSORS
    return plan, price(plan, draw(clusters(plan.world_size)), draw(workloads())), draw(delays_of(plan))


def sharing():
    """Two groups share the NICs and start at different times."""
    buffers = (Buffer("flat", 1_000, initialized=True),)
    body = (Delay("host"), AllReduce("flat", Group(2, stride=2)))
    plan = Plan.from_steps("sharing", world_size=4, buffers=buffers, steps=[body])
    line = Link(latency_s=1e-3, bandwidth_Bps=1e6)
    workload = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1, backward_s=0.2)
    costs = price(plan, Cluster(nodes=2, gpus_per_node=2, fabric=line, network=line), workload)
    return plan, costs, {"host": np.array([[[0.0, 0.001, 0.0, 0.0]]])}
