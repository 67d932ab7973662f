"""Plans that scenarios share."""

from simdist.runs.building import build
from simdist.scenario import loads

JOB = """\
cluster: {{nodes: 2, gpus_per_node: 2, fabric: ideal, network: {{latency: {latency}, bandwidth: 25 Gbit/s}}}}
workload: {{tensors: [{{name: w, count: 1000}}], batch_size: 1, forward: 1 ms, backward: 2 ms}}
schedules: [sync]
steps: {steps}
"""


def built(latency: str, steps: int = 3):
    scenario = loads(JOB.format(latency=latency, steps=steps))
    return build(scenario, scenario.schedules[0])


def test_scenarios_that_differ_in_prices_share_a_plan_and_its_proof():
    near, far = built("1 us"), built("1 ms")
    assert far.plan is near.plan
    assert far.n_proved_ranks == near.n_proved_ranks > 0
    assert far.costs.of != near.costs.of


def test_scenarios_with_other_steps_have_other_plans():
    assert [built("1 us", steps).plan.n_steps for steps in (3, 4, 3)] == [3, 4, 3]
