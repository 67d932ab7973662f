"""What a rate that several GPUs reached together tells of one of them.

Such a rate contains communication that is not hidden. A simulation that computes at this rate and communicates as well
counts it twice. So the utilization is the one with which the simulated job reaches the rate:

    step time = FLOPs / (peak * utilization) + communication that is not hidden
"""

from simdist import engines
from simdist.cost import compute_s, price
from simdist.runs.building import job
from simdist.scenario.cluster import Cluster
from simdist.scenario.scenario import Scenario
from simdist.scenario.workload import Workload
from simdist.schedules import Schedule
from simdist.settings.base import unchecked_copy
from simdist.settings.precision import Precision, Utilization

_N_STEPS = 32  # of which the first one hides less
_N_ITERATIONS = 3  # what is hidden changes little with the utilization


def utilization_of_rate(
    workload: Workload, cluster: Cluster, schedule: Schedule, *, precision: Precision, n_ranks: int, step_s: float
) -> float:
    """Return the utilization with which a job reaches a measured rate; on one GPU, that of the rate itself.

    Args:
        workload: What was measured, with any utilization.
        cluster: Machines like those of the measurement, of any number.
        schedule: What was measured.
        precision: Of the arithmetic.
        n_ranks: GPUs of the measurement.
        step_s: Seconds of its steps.

    Raises:
        PlanError: The schedule does not fit these ranks.
    """
    per_node = min(n_ranks, cluster.gpus_per_node)
    shape = {"nodes": max(1, n_ranks // per_node), "gpus_per_node": per_node, "slow_devices": (), "uncertain": {}}
    machines = cluster.model_copy(update=shape)

    def at(share: float) -> Workload:
        return unchecked_copy(workload, utilization=Utilization(**{precision: share}), precision=precision)

    share = float(compute_s(at(1.0), machines)[0]) / step_s
    if n_ranks == 1:
        return share
    plan = schedule.plan(job(Scenario(cluster=machines, workload=at(share), schedules=(schedule,), steps=_N_STEPS)))
    for _ in range(_N_ITERATIONS):
        its = at(share)
        simulated_s = engines.simulate(plan, price(plan, machines, its), {}).makespan_s / _N_STEPS
        computing_s = float(compute_s(its, machines)[0])
        exposed_s = min(simulated_s - computing_s, step_s / 2)
        share *= computing_s / (step_s - exposed_s)
    return share
