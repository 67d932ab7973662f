"""Memory of a device over time: closed forms of sharded and unsharded training."""

import numpy as np
import pytest
from engine_runs import simulate
from sharded import Seconds, plan_of, priced

from simdist.plan import Plan, ops
from simdist.plan.liveness import lifetimes
from simdist.runs.building import build
from simdist.runs.memory import memory_of, most_nbytes
from simdist.scenario import loads
from simdist.schedules.fsdp import FSDP
from simdist.schedules.sharded import ShardedSchedule
from simdist.traces.memory import Occupancy, occupancy
from simdist.traces.trace import Trace

UNIT = 24 * 4  # bytes of a gathered unit
N_UNITS = 10
COMPUTE_BOUND = Seconds(forward=4, backward=8, gather=2, reduce=3)


def traced(schedule: ShardedSchedule) -> Trace:
    plan = plan_of(schedule, N_UNITS)
    return simulate(plan, priced(plan, COMPUTE_BOUND), {}, engine="fast")


def most_gathered(trace: Trace, kind: type[ops.Op]) -> int:
    """Return the most units that are whole, gathered or being gathered while an operation of a kind computes."""
    found: Occupancy = occupancy(trace.plan, trace.start_s[:, 0], trace.end_s[:, 0])
    rows = [each for each, op in enumerate(ops_of(trace.plan)) if isinstance(op, kind)]
    begin_s, end_s = trace.start_s[rows, 0].min(), trace.end_s[rows, 0].max()
    now = (found.at_s >= begin_s) & (found.at_s < end_s)
    whole = found.nbytes["units"] + found.nbytes["communication"]
    inputs = np.zeros_like(whole)
    for life in lifetimes(trace.plan):
        if life.buffer.name.startswith("ready"):
            last_s = max(trace.end_s[row, 0] for row in life.ends)
            inputs += np.where((found.at_s >= trace.start_s[life.begin, 0]) & (found.at_s < last_s), UNIT, 0)
    return int((whole - inputs)[now].max()) // UNIT


def ops_of(plan: Plan) -> list[ops.Op]:
    return [op for number in plan.body_of_steps() for op in plan.bodies[number]]


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({}, 3, 2),
        ({"reshard_after_forward": False}, N_UNITS, N_UNITS),
        ({"forward_prefetch": 2, "backward_prefetch": 2}, 4, 3),
        ({"forward_prefetch": 3}, 5, 2),
    ],
)
def test_units_in_memory_at_once(settings: dict[str, object], forward: int, backward: int) -> None:
    trace = traced(FSDP(**settings))
    assert most_gathered(trace, ops.Forward) == forward
    assert most_gathered(trace, ops.Backward) == backward


def test_a_backward_pass_holds_two_units_a_gradient_and_an_input_of_a_reduce_scatter() -> None:
    trace = traced(FSDP())
    found = occupancy(trace.plan, trace.start_s[:, 0], trace.end_s[:, 0])
    slices = [found.nbytes["parameters"][0]] * 2  # parameters and, when all are reduced, gradients
    assert found.peak_nbytes <= 4 * UNIT + sum(slices) + N_UNITS * 4
    assert found.peak_nbytes >= 3 * UNIT + slices[0]
    assert found.at_s[0] == 0.0
    assert sum(found.at_peak.values()) == found.peak_nbytes


SCENARIO = """
cluster: {nodes: 2, gpus_per_node: 4, fabric: ideal, network: ideal}
workload:
  tensors: [{name: "blocks.0.w", count: 8000, rows: 8}, {name: "blocks.1.w", count: 8000, rows: 8}]
  batch_size: 2
  forward: 10 ms
  optimizer: OPTIMIZER
  activation_size: 1 kB
schedules: [sync, fsdp, {kind: sync, shared_update: true, label: zero-1}]
steps: 4
"""


@pytest.mark.parametrize(("optimizer", "n_states"), [("sgd", 1), ("adamw", 2)])
def test_lasting_memory_is_that_of_zero(optimizer: str, n_states: int) -> None:
    """Parameters of 4 bytes, and states of the optimizer: whole, in slices, or (ZeRO-1) states in slices."""
    by_degree = (
        "{kind: sync, shared_update: 2, label: by-2}, "
        "{kind: sync, shared_update: node, updates_sent_by: broadcast, label: by-node}"
    )
    text = SCENARIO.replace("label: zero-1}]", f"label: zero-1}}, {by_degree}]")
    scenario = loads(text.replace("OPTIMIZER", optimizer))
    whole = 16_000 * 4
    found = {}
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        memory = memory_of(scenario, built)
        assert memory.peak_nbytes <= most_nbytes(built, scenario.workload)
        found[schedule.name] = [int(memory.nbytes[kind][0]) for kind in ("parameters", "optimizer")]
    assert found["sync"] == [whole, n_states * whole]
    assert found["fsdp"] == [whole // 8, n_states * whole // 8]
    assert found["zero-1"] == [whole, n_states * whole // 8]
    assert found["by-2"] == [whole, n_states * whole // 2]
    assert found["by-node"] == [whole, n_states * whole // 4]


@pytest.mark.parametrize(("degree", "k"), [("2", 2), ("node", 4), ("true", 8)])
@pytest.mark.parametrize("by", ["all_gather", "broadcast"])
def test_mixed_types_need_the_memory_of_zero_1(by: str, degree: str, k: int) -> None:
    """4 P + 12 P / k of P parameters with AdamW (arXiv 1910.02054): 2 + 2 in half precision, 12 in single precision.

    A reduce-scatter ends the life of a gradient, which is in use to the update with all-reduces.
    """
    schedule = f"{{kind: sync, shared_update: {degree}, updates_sent_by: {by}, param_dtype: bfloat16}}"
    before, _, after = SCENARIO.replace("OPTIMIZER", "adamw").partition("schedules: ")
    scenario = loads(f"{before}schedules: [{schedule}]\n{after.partition(chr(10))[2]}")
    memory = memory_of(scenario, build(scenario, scenario.schedules[0]))
    n_params = 16_000
    assert memory.nbytes["parameters"].tolist() == [2 * n_params] * len(memory.at_s)
    assert set(memory.nbytes["optimizer"].tolist()) == {12 * n_params // k}
    assert memory.nbytes["gradients"].max() == 2 * n_params
    activations = 2 * 1_000
    assert memory.peak_nbytes <= 4 * n_params + 12 * n_params // k + activations


def test_activations_rise_in_the_forward_pass_and_fall_in_the_backward_pass() -> None:
    scenario = loads(SCENARIO.replace("OPTIMIZER", "sgd"))
    built = build(scenario, scenario.schedules[1])
    held = memory_of(scenario, built).nbytes["activations"]
    assert held.max() == 2 * 1_000  # samples of a pass
    assert set(held.tolist()) == {0, 1_000, 2_000}


def test_recomputed_activations_are_there_in_their_units_backward_pass_only() -> None:
    text = SCENARIO.replace("OPTIMIZER", "sgd").replace("1 kB", "1 kB\n  kept_activation_size: 100 B")
    scenario = loads(text)
    built = build(scenario, scenario.schedules[1])
    held = memory_of(scenario, built).nbytes["activations"]
    assert held.max() == 2 * (100 + 900 // 2)


def test_logits_and_a_layer_that_is_computed_again_are_not_there_together() -> None:
    """Kept inputs of 2 layers, and the larger of what the loss needs and what a layer computes again."""
    scenario = loads("""
    cluster: {nodes: 1, gpus_per_node: 4, fabric: ideal, network: ideal}
    workload:
      transformer: {layers: 2, hidden: 8, heads: 2, vocabulary: 40, sequence: 4, tied: false, positions: 0}
      precision: bf16
      batch_size: 3
      forward: 10 ms
      recompute: 100%
    schedules: [fsdp]
    steps: 4
    """)
    held = memory_of(scenario, build(scenario, scenario.schedules[0])).nbytes["activations"]
    inputs = 2 * (2 * 4 * 8)
    loss = 2 * (2 * 4 * 8) + 3 * 4 * 4 * 40
    layer = 2 * 4 * (5 + 2 + 8) * 8 + 4 * 4 * 2
    assert held.max() == 3 * (inputs + max(loss, layer))
    assert 3 * (inputs + layer) in held


def test_compare_says_which_activations_are_not_counted() -> None:
    from simdist.studies.comparison import compare
    from simdist.studies.facets import MEMORY

    partly = loads(SCENARIO.replace("OPTIMIZER", "sgd").replace("  activation_size: 1 kB", "  recompute: 30%"))
    rows = compare(partly, n_seeds=1)
    (found,) = MEMORY.remarks(partly, [row.line(MEMORY) for row in rows])
    assert found.text.endswith("and kept_activation_size, because recompute of 30% does not tell which stay")


def test_compare_does_not_say_that_something_fits_of_which_a_part_is_not_counted() -> None:
    from simdist.studies.comparison import compare
    from simdist.studies.facets import MEMORY

    text = SCENARIO.replace("OPTIMIZER", "adamw").replace("nodes: 2", "nodes: 2, device: {memory_size: 160 kB}")
    partly = loads(text.replace("  activation_size: 1 kB\n", ""))
    rows = compare(partly, n_seeds=1)
    needs, in_part = MEMORY.remarks(partly, [row.line(MEMORY) for row in rows])
    assert needs.text.startswith("sync needs at least ")
    assert in_part.text.startswith("memory is counted without activations: write workload.activation_size")


def test_compare_names_what_does_not_fit() -> None:
    from simdist.studies.comparison import compare
    from simdist.studies.facets import MEMORY

    text = SCENARIO.replace("OPTIMIZER", "adamw").replace("nodes: 2", "nodes: 2, device: {memory_size: 160 kB}")
    scenario = loads(text)
    rows = compare(scenario, n_seeds=1)
    assert 100_000 < rows[1].document()["memory_nbytes"] < 160_000
    remarks = MEMORY.remarks(scenario, [row.line(MEMORY) for row in rows])
    near = "zero-1 may not fit in 160 kB: PyTorch's allocator reserves up to 18% more than is in use"
    assert [each.text.split(" needs")[0] for each in remarks] == ["sync", near, "fsdp fits"]
    assert rows.frame()["memory_nbytes"].notna().all()


def test_a_limit_tells_that_activations_are_not_counted_also_where_nothing_is_shown() -> None:
    from simdist.studies.comparison import compare
    from simdist.studies.facets import MEMORY

    text = SCENARIO.replace("OPTIMIZER", "sgd").replace("nodes: 2", "nodes: 2, device: {memory_size: 80 GB}")
    scenario = loads(text.replace("  activation_size: 1 kB\n", "")).changed(schedules=["sync"])
    (row,) = compare(scenario, n_seeds=1)
    (found,) = MEMORY.remarks(scenario, [row.line(MEMORY)])
    assert row.of(MEMORY) is None
    assert found.text.startswith("memory is counted without activations")


def test_the_bytes_of_an_optimizer_may_be_stated() -> None:
    def held(more: str) -> int:
        scenario = loads(SCENARIO.replace("OPTIMIZER", f"adamw{more}"))
        return int(memory_of(scenario, build(scenario, scenario.schedules[1])).nbytes["optimizer"].max())

    assert held("\n  optimizer_size: 8 B") == held("")
    assert held("\n  optimizer_size: 22 B") == held("") * 22 // 8
    assert held("\n  optimizer_size: 2 B") == held("") // 4
