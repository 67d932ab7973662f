"""A rate of several GPUs: the job that reached it reaches it when it is simulated."""

import pytest
from engine_runs import simulate

from simdist.configurations.rates import Rate, measured_rates
from simdist.runs.building import build
from simdist.runs.measured_rates import schedule_of_rate, utilization_of_rate
from simdist.scenario import Cluster, Scenario, load_cluster, presets
from simdist.settings.precision import Utilization

CLUSTER = load_cluster(presets.path("clusters", "dgx-h100"))
ON_H100 = [each for each in measured_rates() if each.device == "H100" and each.n_ranks <= 32]


def simulated_tokens_per_s(rate: Rate, share: float, cluster: Cluster | None = None) -> float:
    schedule = schedule_of_rate(rate)
    workload = rate.workload().model_copy(update={"utilization": Utilization(bf16=share)})
    cluster = cluster or CLUSTER.model_copy(update={"nodes": max(1, rate.n_ranks // 8), "uncertain": {}})
    built = build(Scenario(cluster=cluster, workload=workload, schedules=(schedule,), steps=32), schedule)
    step_s = simulate(built.plan, built.costs, {}).makespan_s / 32
    return rate.batch_size * rate.sequence / step_s


@pytest.mark.parametrize("rate", ON_H100, ids=lambda each: each.described())
def test_a_simulated_job_reaches_its_measured_rate(rate):
    share = utilization_of_rate(rate, CLUSTER, "bf16")
    reached = rate.utilization(989e12)
    assert reached < share < 1.1 * reached
    assert simulated_tokens_per_s(rate, share) == pytest.approx(rate.tokens_per_s, rel=0.01)


def test_the_update_is_taken_out_of_the_rate_of_one_gpu():
    [rate] = [each for each in measured_rates() if each.n_ranks == 1]
    cluster = load_cluster(presets.path("clusters", "dgx-h200"))
    share = utilization_of_rate(rate, cluster, "bf16")
    assert rate.utilization(989e12) < share < 1.05 * rate.utilization(989e12)
    one = cluster.model_copy(update={"nodes": 1, "gpus_per_node": 1, "uncertain": {}})
    assert simulated_tokens_per_s(rate, share, one) == pytest.approx(rate.tokens_per_s, rel=1e-3)
