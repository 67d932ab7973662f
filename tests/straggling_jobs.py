"""A job of few ranks that stragglers hold up, and its analysis."""

from engine_runs import simulate

from simdist.runs.building import build, delays
from simdist.scenario import Scenario, loads
from simdist.stragglers import Slowdown, find_slowdown
from simdist.traces.trace import Trace

JOB = """\
cluster:
  nodes: {nodes}
  gpus_per_node: 2
  fabric: ideal
  network: {{latency: 1 ms, bandwidth: unlimited}}
{cluster}workload:
  tensors: [{{name: all, count: 1000}}]
  batch_size: 1
  forward: 20 ms
  backward: 40 ms
  optimize: 0 s
steps: {steps}
seed: 3
disturbances: {disturbances}
schedules: [{{kind: sync}}]
"""


def job(*disturbances: str, steps: int = 40, nodes: int = 4, cluster: str = "") -> Scenario:
    listed = f"[{', '.join(disturbances)}]"
    return loads(JOB.format(disturbances=listed, steps=steps, nodes=nodes, cluster=cluster))


def simulated(scenario: Scenario) -> Trace:
    built = build(scenario, scenario.schedules[0])
    return simulate(built.plan, built.costs, delays(scenario))


def analysed(scenario: Scenario, **options) -> Slowdown:
    return find_slowdown(simulated(scenario), ranks_per_node=scenario.cluster.gpus_per_node, **options)
