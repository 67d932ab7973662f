"""A run with failures whose measurement is put together from its simulation, so that all of it is known."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run as run_engine
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.runs.run_failures import step_failures
from simdist.scenario import loads
from simdist.traces.attempts import ATTEMPTS, AttemptLog, MeasuredAttempt, MetFailure, attempt_trace_name, join_attempts
from simdist.traces.times_of_steps import times_of_steps
from simdist.traces.trace import Trace

TEXT = """\
cluster:
  {nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal, disk: {latency: 0 s, read: 1 GB/s, write: 16 kB/s}}
workload: {tensors: [{name: weight, count: 2000}], batch_size: 4, forward: 1 s, backward: 2 s}
checkpoint: {every: 10, what: state, to: disk, mode: MODE}
steps: 30
train_for: 30 steps
failures:
  causes:
    - {cause: kill, effect: process, at_steps: [15]}
    - {cause: stuck, effect: hang, at_steps: [22]}
  recovery: {detect: 2 s, timeouts: {collective: 9 s}, start: 4 s, connect: 1 s, load: 0.5 s, warm_up: 0.25 s}
schedules: [{kind: sync}]
"""


def part_of(trace: Trace, first_step: int, last_step: int) -> Trace:
    """Return a trace as an attempt leaves it: it begins with its first step, and has nothing outside its steps."""
    begin_s = times_of_steps(trace).begin_s(first_step, 0)
    step, _, _ = trace._places()
    outside = (step < first_step) | (step >= last_step)
    times = (np.where(outside[:, None], np.nan, each - begin_s) for each in (trace.ready_s, trace.start_s, trace.end_s))
    ready_s, start_s, end_s = times
    return replace(trace, ready_s=ready_s, start_s=start_s, end_s=end_s)


def write_failed_run(folder: Path, mode: str = "blocking") -> Path:
    """Write a run directory whose measurement takes what its simulation does."""
    scenario = loads(TEXT.replace("MODE", mode))
    built = build(scenario, scenario.schedules[0])
    drawn = delays(scenario)
    failures = step_failures(scenario, built.plan, built.costs, drawn)
    run_directory.write(folder, scenario, built.plan, drawn, failures)
    trace = replace(run_engine(built.plan, built.costs, drawn, observe=WholeTrace()), run="it", source="real, emulated")
    times = times_of_steps(trace)
    attempts, met, traces = [], [], []
    now_s = 1e9
    for number, (first, last, found_s) in enumerate([(0, 15, 2.0), (10, 22, 9.0), (20, 30, 0.0)]):
        load_s = 0.5 if first else 0.0
        began_s = now_s + 4.0 + 1.0 + load_s + 0.25
        end_s = began_s + (trace.makespan_s if last == 30 else times.begin_s(last, 0)) - times.begin_s(first, 0)
        attempts.append(
            MeasuredAttempt(first, now_s, now_s + 4.0, now_s + 5.0, began_s, load_s, end_s if last == 30 else None)
        )
        traces.append((first, part_of(trace, first, last)))
        if last < 30:
            met.append(MetFailure(number, last, end_s))
            traces[-1][1].save(folder / attempt_trace_name(number))
        now_s = end_s + found_s
    whole = join_attempts(traces)
    whole.save(folder / run_directory.REAL)
    np.testing.assert_allclose(whole.end_s, trace.end_s, atol=1e-6)
    AttemptLog(tuple(attempts), tuple(met), run="it").save(folder / ATTEMPTS)
    return folder
