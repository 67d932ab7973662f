"""Traces of sharded jobs become a scenario that simulates the job: units, degree, schedule and times."""

import random
from pathlib import Path

import pytest
from traced_plans import step_s, without_delays, write_traces

from simdist.profiles.estimates.sharded_model import ShardedModel
from simdist.profiles.importing import ImportedJob, ImportOptions, import_job
from simdist.profiles.steps.ranks import profile_rank
from simdist.runs.building import build
from simdist.scenario import Scenario, loads

N_SETTINGS = 40
PASSES = ("forward_s", "backward_s")


def imported(folder: Path, options: ImportOptions | None = None) -> ImportedJob:
    return import_job([profile_rank(path) for path in sorted(folder.glob("*.gz"))], name="job", options=options)


def random_scenario(seed: int) -> Scenario:
    """Return a job with a sharded model, of random shape; only what traces can show is set."""
    draw = random.Random(seed)
    nodes, gpus = draw.choice([(1, 2), (1, 4), (2, 2), (2, 4)])
    world_size = nodes * gpus
    shard = draw.choice([size for size in (2, 4, 8) if world_size % size == 0])
    n_units = draw.randint(2, 6)
    like = draw.random() < 0.5
    counts = [8 * draw.randint(50_000, 1_000_000)] * n_units
    if not like:
        counts = [8 * draw.randint(50_000, 1_000_000) for _ in range(n_units)]
    tensors = [f"{{name: layers.{n}.w, count: {count}, {times(draw)}}}" for n, count in enumerate(counts)]
    has_root = draw.random() < 0.6
    if has_root:
        root = f"{{name: root.w, count: {8 * draw.randint(1_000, 100_000)}, {times(draw)}}}"
        tensors.insert(draw.choice([0, n_units]), root)
    micro_batches = draw.choice([1, 1, 2, 3])
    settings = {
        "reshard_after_forward": draw.choice(["null", "null", "false", *(["true"] if has_root else [])]),
        "wrap": "blocks" if has_root else "all",
        "forward_prefetch": min(draw.choice([1, 1, 2, 3]), n_units - 1),  # more does not show
        "backward_prefetch": 1,
        "communicators": draw.choice([1, 1, 2]),
    }
    if settings["reshard_after_forward"] == "null" and draw.random() < 0.3:
        settings["keep_last_unit"] = "true"
    elif shard == 4 and draw.random() < 0.3:
        settings["reshard_after_forward"] = "2"
    is_kept = settings["reshard_after_forward"] == "false" or settings.get("keep_last_unit")
    if n_units > 2 and not is_kept:
        settings["backward_prefetch"] = draw.choice([1, 1, 2])
    if micro_batches > 1:
        settings |= {"accumulation": draw.choice(["reduce", "local"])}
        settings |= {"reshard_after_backward": draw.choice(["true", "false"])}
    if draw.random() < 0.5:
        settings |= {"param_dtype": "bfloat16", "reduce_dtype": draw.choice(["float32", "bfloat16"])}
    kind = "fsdp"
    if shard < world_size:
        kind = f"hsdp, shard: {shard}"
        if micro_batches > 1:
            settings["all_reduce"] = draw.choice(["each", "last"])
    host = draw.choice(["run_ahead_steps: null", "waits_for: update", "waits_for: loss"])
    told = "".join(f", {key}: {value}" for key, value in settings.items())
    return loads(f"""
cluster:
  nodes: {nodes}
  gpus_per_node: {gpus}
  fabric: {{latency: 3 us, bandwidth: {draw.randint(20, 400)} GB/s}}
  network: {{latency: 5 us, bandwidth: {draw.randint(10, 50)} GB/s}}
workload:
  tensors: [{", ".join(tensors)}]
  batch_size: 1
  micro_batches: {micro_batches}
  optimize: {draw.randint(1, 5)} ms
host: {{{host}}}
steps: 4
schedules: [{{kind: {kind}{told}}}]
""")


def times(draw: random.Random) -> str:
    return f"forward: {draw.randint(500, 3000)} us, backward: {draw.randint(800, 6000)} us"


def seconds_of(scenario: Scenario) -> list[float]:
    """Return the forward and the backward seconds of units. A root that comes last does not show apart in both passes.

    Its forward pass follows that of the last unit, and its backward pass precedes that of a last unit which was kept.
    """
    *tensors, last = scenario.workload.tensors
    if last.name.startswith("root"):
        *tensors, before = tensors
        last = last.model_copy(update={name: getattr(last, name) + getattr(before, name) for name in PASSES})
    return [getattr(tensor, name) for tensor in (*tensors, last) for name in PASSES]


@pytest.mark.parametrize("seed", range(N_SETTINGS))
def test_traces_of_a_simulated_job_become_its_plan_again(tmp_path: Path, seed: int) -> None:
    scenario = random_scenario(seed)
    trace = write_traces(tmp_path, scenario)
    found = imported(tmp_path)
    assert isinstance(found.model, ShardedModel)
    schedule = found.scenario.schedules[0]
    built = build(found.scenario, schedule)
    assert [without_delays(body) for body in built.plan.bodies] == [without_delays(body) for body in trace.plan.bodies]
    assert built.plan.buffers == trace.plan.buffers
    assert seconds_of(found.scenario) == pytest.approx(seconds_of(scenario), abs=2e-6)
    assert found.proof.measured_s == pytest.approx(step_s(trace), rel=0.01)
    assert found.proof.predicted_s == pytest.approx(step_s(trace), rel=0.01)
