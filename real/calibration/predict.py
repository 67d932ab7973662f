"""What the cost model says that an operation takes which was measured, or will be."""

from collections.abc import Sequence

import numpy as np

from real.calibration.measure import Task, collective, one_op_plan
from simdist.cost import Costs, Shared, Stage, price
from simdist.scenario import Cluster, Tensor, Workload

_WORKLOAD = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)


def predicted_s(cluster: Cluster, task: Task) -> float | None:
    """Return what the cost model says that a collective takes; None for a message, which is no operation of a plan.

    Groups that share a link share it evenly, as in the simulator.
    """
    if task.op == "sendrecv":
        return None
    op = collective(task.op, task.group)
    costs = price(one_op_plan(op, task.count, cluster.world_size), cluster, _WORKLOAD)
    shared = costs.of[op]
    assert isinstance(shared, Shared)  # as of every collective
    transfers = shared.transfers[: len(task.taking_part(cluster.world_size))]
    return sum(_stage_s(stages, costs) for stages in zip(*(each.stages for each in transfers), strict=True))


def _stage_s(stages: Sequence[Stage], costs: Costs) -> float:
    """Return what equal stages take that all groups go through at the same time."""
    nbytes = np.zeros(costs.topology.n_resources)
    for stage in stages:
        nbytes[stage.resources] += stage.nbytes
    return max(stage.latency_s for stage in stages) + float((nbytes / costs.capacity_Bps).max())
