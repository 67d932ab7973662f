"""What a rate that GPUs reached together tells of the passes of one of them.

Such a rate contains the update and, of several GPUs, communication that is not hidden. A simulation that computes at
this rate and adds them counts them twice. So the utilization is the one with which the simulated job reaches the rate:

    step time = FLOPs / (peak * utilization) + communication that is not hidden, and the update
"""

from simdist.configurations.rates import Rate
from simdist.cost import compute_s, price
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.runs.building import job
from simdist.scenario.cluster import Cluster
from simdist.scenario.scenario import Scenario
from simdist.scenario.workload import Workload
from simdist.schedules.fsdp import FSDP
from simdist.settings.base import unchecked_copy
from simdist.settings.precision import Precision, Utilization

_N_STEPS = 32  # of which the first one hides less
_SCHEDULE = FSDP(wrap="blocks", param_dtype="bfloat16", reduce_dtype="float32")  # of measured rates
_PURE = ("llm-foundry",)  # sources that reduce in the type of the passes
_N_ITERATIONS = 3  # what is hidden changes little with the utilization


def schedule_of_rate(rate: Rate) -> FSDP:
    """Return the schedule under which a rate was measured."""
    return unchecked_copy(_SCHEDULE, reduce_dtype="bfloat16") if rate.source in _PURE else _SCHEDULE


def utilization_of_rate(rate: Rate, cluster: Cluster, precision: Precision) -> float:
    """Return the utilization with which a simulated job reaches a measured rate.

    Args:
        rate: What was measured.
        cluster: Machines like those of the measurement, of any number.
        precision: Of the arithmetic.

    Raises:
        PlanError: The ranks of the rate cannot share the model.
    """
    per_node = min(rate.n_ranks, cluster.gpus_per_node)
    shape = {"nodes": max(1, rate.n_ranks // per_node), "gpus_per_node": per_node, "slow_devices": (), "uncertain": {}}
    machines = cluster.model_copy(update=shape)

    def at(share: float) -> Workload:
        return unchecked_copy(rate.workload(), utilization=Utilization(**{precision: share}), precision=precision)

    share = float(compute_s(at(1.0), machines)[0]) / rate.step_s
    schedule = schedule_of_rate(rate)
    plan = schedule.plan(job(Scenario(cluster=machines, workload=at(share), schedules=(schedule,), steps=_N_STEPS)))
    for _ in range(_N_ITERATIONS):
        its = at(share)
        trace = run(plan, price(plan, machines, its), {}, observe=WholeTrace())
        simulated_s = trace.makespan_s / _N_STEPS
        computing_s = float(compute_s(its, machines)[0])
        exposed_s = min(simulated_s - computing_s, rate.step_s / 2)
        share *= computing_s / (rate.step_s - exposed_s)
    return share
