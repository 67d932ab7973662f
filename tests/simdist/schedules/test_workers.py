"""Workers that load whole batches, as those of torch's DataLoader, beside a simulation of its queues alone."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.plan import Forward, Load, lane_of
from simdist.plan.ops import Delay
from simdist.runs.building import Built, build
from simdist.scenario import Scenario, loads
from simdist.scenario.warnings import warnings_of
from simdist.studies.epoch_bounds import epoch_limits
from simdist.studies.epochs import find_epochs
from simdist.traces.breakdown import break_down
from simdist.traces.trace import Trace

READ_S = DECODE_S = 0.01
PER_EPOCH = 30
SCENARIO = """
cluster:
  nodes: 1
  gpus_per_node: {gpus}
  fabric: ideal
  network: ideal
  storage: {{latency: 10 ms, bandwidth: {bandwidth}}}
workload:
  tensors: [{{name: weight, count: 4}}]
  batch_size: {batch}
  forward: {step} s
  backward: 0 s
  optimize: 0 s
  sample_size: 4 B
  decode: 10 ms
input:
  source: storage
  num_workers: {workers}
  prefetch_factor: {factor}
  data: {{samples: {samples}, file_size: 1 kB}}
steps: 2 epochs
schedules: [sync]
"""


def scenario_of(
    workers: int, factor: int = 2, *, step_s: float = 0.1, batch: int = 32, gpus: int = 1, bandwidth: str = "unlimited"
) -> Scenario:
    samples = PER_EPOCH * batch * gpus
    sizes = {"workers": workers, "factor": factor, "step": step_s, "batch": batch, "gpus": gpus}
    return loads(SCENARIO.format(samples=samples, bandwidth=bandwidth, **sizes))


def built(scenario: Scenario) -> Built:
    return build(scenario, scenario.schedules[0])


def simulated(scenario: Scenario) -> Trace:
    found = built(scenario)
    return run(found.plan, found.costs, {}, observe=WholeTrace())


def forward_s(trace: Trace) -> NDArray[np.float64]:
    """Return when the forward passes of rank 0 begin."""
    ops = [op for body in trace.plan.body_of_steps() for op in trace.plan.bodies[body]]
    return trace.start_s[[at for at, op in enumerate(ops) if isinstance(op, Forward)], 0]


def fetched_s(n_workers: int, factor: int, load_s: float, step_s: float) -> list[float]:
    """Return when a training loop gets its batches from a DataLoader.

    The loader puts `factor` batches in the queue of each worker when an epoch begins, and another one when it hands a
    batch over. It hands batches over in order.

    Source:
        torch/utils/data/dataloader.py, _MultiProcessingDataLoaderIter: _reset, _next_data, _try_put_index.
    """
    now_s = 0.0
    found = []
    for _ in range(2):
        free_s = [now_s] * n_workers
        done_s: list[float] = []

        def put(at_s: float, free_s: list[float], done_s: list[float]) -> None:
            worker = len(done_s) % n_workers
            free_s[worker] = max(free_s[worker], at_s) + load_s
            done_s.append(free_s[worker])

        for _ in range(n_workers * factor):
            put(now_s, free_s, done_s)
        for batch in range(PER_EPOCH):
            now_s = max(now_s, done_s[batch])
            put(now_s, free_s, done_s)
            found.append(now_s)
            now_s += step_s
    return found


@pytest.mark.parametrize(
    ("workers", "factor", "step_s", "batch"),
    [
        *((workers, 2, 0.1, 32) for workers in (1, 2, 4, 8)),
        *((workers, factor, 0.05, 16) for workers, factor in itertools.product((2, 3, 7), (1, 3))),
    ],
)
def test_batches_come_when_those_of_a_data_loader_come(workers: int, factor: int, step_s: float, batch: int) -> None:
    trace = simulated(scenario_of(workers, factor, step_s=step_s, batch=batch))
    expected = fetched_s(workers, factor, batch * (READ_S + DECODE_S), step_s)
    np.testing.assert_allclose(forward_s(trace), expected, rtol=1e-12)


def test_without_workers_the_host_loads_each_batch_when_it_needs_it() -> None:
    steps_s = np.diff(forward_s(simulated(scenario_of(0))))
    np.testing.assert_allclose(steps_s, 32 * (READ_S + DECODE_S) + 0.1, rtol=1e-12)


def test_all_workers_begin_each_epoch_and_load_nothing_of_the_next() -> None:
    plan = built(scenario_of(4)).plan
    bodies = [plan.bodies[body] for body in plan.body_of_steps()]
    n_loads = [sum(isinstance(op, Load) for op in body) for body in bodies]
    of_epoch = [9, *[1] * (PER_EPOCH - 9), *[0] * 8]
    assert n_loads == of_epoch * 2
    assert [lane_of(op).name for op in plan.loads()][:5] == ["load 0", "load 1", "load 2", "load 3", "load 0"]
    assert warnings_of(scenario_of(4)) == ()


def test_workers_share_the_bandwidth_of_the_server() -> None:
    """Two ranks read 30 batches of 32 files of 1 kB each, at 16 kB/s together; the last batches come in one burst."""
    read_s = 2 * PER_EPOCH * 32 / 16
    epochs = find_epochs(simulated(scenario_of(8, gpus=2, bandwidth="16 kB/s"))).epochs
    assert all(read_s < each.seconds <= read_s + 8 * 0.1 + 1e-9 for each in epochs)


def test_stalls_are_counted_once_however_many_workers_load_at_the_time() -> None:
    scenario = scenario_of(4)
    trace = simulated(scenario)
    times = break_down(trace)
    total_s = times.compute_s + times.comm_s + times.wait_s + times.io_s + times.host_s
    np.testing.assert_allclose(total_s[0], times.makespan_s, rtol=1e-12)
    stalled_s = sum(each.stall_s for each in find_epochs(trace).epochs)
    assert float(times.io_s.sum()) == pytest.approx(stalled_s, rel=1e-9)
    assert stalled_s == pytest.approx(forward_s(trace)[-1] + 0.1 - 2 * PER_EPOCH * 0.1, rel=1e-9)


def test_an_epoch_takes_at_least_what_its_workers_need() -> None:
    found = built(scenario_of(4))
    limits = epoch_limits(found.plan, found.costs)
    assert limits[0].seconds["reading"] == pytest.approx(PER_EPOCH * 32 * (READ_S + DECODE_S) / 4, rel=1e-9)


def test_a_late_load_delays_its_worker() -> None:
    text = SCENARIO + "disturbances: [{{kind: persistent, on: io, delay: 5 s, ranks: [0]}}]\n"
    sizes = {"workers": 2, "factor": 1, "step": 0.1, "batch": 8, "gpus": 1, "samples": PER_EPOCH * 8}
    plan = built(loads(text.format(bandwidth="unlimited", **sizes))).plan
    second = [
        op for op in plan.bodies[next(itertools.islice(plan.body_of_steps(), 1, None))] if lane_of(op).kind == "io"
    ]
    assert [type(op) for op in second] == [Delay, Load]
    assert lane_of(second[0]) == lane_of(second[1])
