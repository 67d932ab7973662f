"""Traces of sharded jobs become a scenario that simulates the job: units, degree, schedule and times."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from commandline import call
from sharded_traces import N_UNITS, write_sharded
from traced_plans import Told, step_s, without_delays, write_traces

from simdist.errors import ScenarioError, TraceError
from simdist.profiles import ImportedJob, ImportOptions, import_job
from simdist.profiles.estimates.sharded_model import ShardedModel
from simdist.profiles.steps.ranks import profile_rank
from simdist.profiles.summaries import read_summary
from simdist.runs.building import build
from simdist.scenario import Scenario, loads
from simdist.schedules.sharded import ShardedSchedule

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
  device: {{memory_bandwidth: {50 + 5 * seed} GB/s}}
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
    memory_Bps = scenario.cluster.device.memory_bandwidth_Bps
    assert found.scenario.cluster.device.memory_bandwidth_Bps == pytest.approx(memory_Bps, rel=0.01)
    assert found.proof.measured_s == pytest.approx(step_s(trace), rel=0.01)
    assert found.proof.predicted_s == pytest.approx(step_s(trace), rel=0.01)


# ---------------------------------------------------------------- what traces may lack


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])
def test_without_names_units_are_told_by_sizes_and_order(tmp_path: Path, seed: int) -> None:
    trace = write_traces(tmp_path, random_scenario(seed), Told(units=False))
    found = imported(tmp_path)
    built = build(found.scenario, found.scenario.schedules[0])
    assert [without_delays(body) for body in built.plan.bodies] == [without_delays(body) for body in trace.plan.bodies]


@pytest.mark.parametrize("seed", [1, 9, 13])
def test_compiled_without_copies_prefetching_is_in_doubt(tmp_path: Path, seed: int) -> None:
    scenario = random_scenario(seed)
    trace = write_traces(tmp_path, scenario, Told(units=False, copies=False))
    found = imported(tmp_path)
    (schedule,) = found.scenario.schedules[:1]
    assert isinstance(schedule, ShardedSchedule)
    assert (schedule.forward_prefetch, schedule.backward_prefetch) == (1, 1)
    doubt = "how far gathers of the forward "
    assert any(each.startswith(doubt) for each in found.scenario.doubts)
    counts = [tensor.count for tensor in found.scenario.workload.tensors]
    assert counts == [tensor.count for tensor in scenario.workload.tensors]
    assert found.proof.predicted_s == pytest.approx(step_s(trace), rel=0.03)


@pytest.mark.parametrize(("seed", "communicators", "is_told"), [(11, 2, True), (4, 1, False)])
def test_two_communicators_show_in_names_or_when_they_send_at_once(
    tmp_path: Path, seed: int, communicators: int, is_told: bool
) -> None:
    write_traces(tmp_path, random_scenario(seed), Told(groups=False))
    found = imported(tmp_path)
    (schedule,) = found.scenario.schedules[:1]
    assert isinstance(schedule, ShardedSchedule)
    assert schedule.communicators == communicators
    assert any("taken to share one communicator" in each for each in found.scenario.doubts) == (not is_told)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_units_that_backward_passes_gather_ahead_are_no_further_units(
    tmp_path: Path, ahead: int, micro_batches: int
) -> None:
    """The first of them are gathered before any node of the backward pass has begun."""
    write_sharded(tmp_path, {}, n_ranks=2, n_steps=3, ahead=ahead, micro_batches=micro_batches)
    model = imported(tmp_path, ImportOptions(nodes=1)).model
    assert isinstance(model, ShardedModel)
    assert [unit.count for unit in model.sharding.units] == [1_000_000] * N_UNITS
    assert all(unit.is_gathered_again and unit.is_reduced for unit in model.sharding.units)
    assert model.sharding.root is None


def test_ranks_that_share_a_unit_follow_from_sizes(tmp_path: Path) -> None:
    """No group is told: the sizes of the whole and of a slice tell how many ranks share it."""
    write_traces(tmp_path, random_scenario(0), Told(groups=False, sizes=False))
    found = imported(tmp_path)
    assert isinstance(found.model, ShardedModel)
    assert (found.model.sharding.shard, found.model.sharding.replicas) == (4, 2)
    groups = {each.kind: each.group for each in found.times}
    assert groups == {"all_gather": (0, 1, 2, 3), "reduce_scatter": (0, 1, 2, 3), "all_reduce": (0, 4)}


def test_copies_that_are_never_averaged_are_refused(tmp_path: Path) -> None:
    write_traces(tmp_path, job("hsdp, shard: 2, between: local-8"))
    with pytest.raises(TraceError, match="2 of 4 ranks share the model, and no all_reduce between its 2 copies"):
        imported(tmp_path)


def test_frozen_units_are_in_doubt(tmp_path: Path) -> None:
    write_traces(tmp_path, job("fsdp"))
    for path in tmp_path.glob("*.gz"):
        without_reduction_of(path, "layers.1")
    found = imported(tmp_path)
    assert isinstance(found.model, ShardedModel)
    assert [unit.is_reduced for unit in found.model.sharding.units] == [True, True, False, True]
    doubt = "no gradients of layers.1 are reduced, as if frozen: the scenario reduces those of all units"
    assert doubt in found.scenario.doubts
    seconds = [tensor.backward_s for tensor in found.scenario.workload.tensors]
    assert seconds == pytest.approx([0.002, 0.009, 0.010, 0.008], abs=2e-6)


def without_reduction_of(path: Path, unit: str) -> None:
    """Take the reduce-scatters of a unit, and what copies its gradients, out of a trace."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace["traceEvents"]
    named = [each for each in events if each["name"] == f"FSDP::post_backward_reduce ({unit})"]

    def is_inside(event: dict[str, Any]) -> bool:
        return any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] and event["pid"] == 100 for one in named)

    gone = {each["args"]["correlation"] for each in events if is_inside(each) and "correlation" in each["args"]}
    kept = [each for each in events if not is_inside(each) and each["args"].get("correlation") not in gone]
    path.write_bytes(gzip.compress(json.dumps(trace | {"traceEvents": kept}).encode()))


# ---------------------------------------------------------------- stragglers


def job(kind: str, *, late: str = "", slow: str = "", host: str = "run_ahead_steps: null", nodes: int = 1) -> Scenario:
    return loads(f"""
cluster:
  nodes: {nodes}
  gpus_per_node: 4
  fabric: {{latency: 3 us, bandwidth: 20 GB/s}}
  network: {{latency: 5 us, bandwidth: 50 GB/s}}
  slow_devices: [{slow}]
workload:
  tensors:
    - {{name: root.w, count: 400000, forward: 1 ms, backward: 2 ms}}
    - {{name: layers.0.w, count: 8000000, forward: 5 ms, backward: 9 ms}}
    - {{name: layers.1.w, count: 8000000, forward: 6 ms, backward: 10 ms}}
    - {{name: layers.2.w, count: 8000000, forward: 4 ms, backward: 8 ms}}
  batch_size: 1
  optimize: 12 ms
host: {{{host}}}
disturbances: [{late}]
steps: 10
schedules: [{{kind: {kind}, wrap: blocks, param_dtype: bfloat16, reduce_dtype: float32}}]
""")


@pytest.mark.parametrize(("kind", "nodes", "rank"), [("fsdp", 1, 2), ("hsdp, shard: 4", 2, 5)])
def test_a_slow_device_is_named_with_its_speed(tmp_path: Path, kind: str, nodes: int, rank: int) -> None:
    """It is late in every unit, so each gather and each reduce-scatter of the others waits for it."""
    trace = write_traces(tmp_path, job(kind, nodes=nodes, slow=f"{{ranks: [{rank}], speed: 0.8}}"))
    found = imported(tmp_path)
    (straggler,) = found.stragglers
    assert (straggler.ranks, straggler.kind, straggler.channel) == ((rank,), "persistent", "compute")
    (slow,) = found.scenario.cluster.slow_devices
    assert (slow.ranks, slow.speed) == ((rank,), pytest.approx(0.8, abs=0.002))
    assert found.proof.predicted_s == pytest.approx(step_s(trace), rel=0.01)


@pytest.mark.parametrize(
    ("late", "host", "channel"),
    [
        ("kind: persistent, on: host, ranks: [1], delay: 6 ms", "waits_for: loss", "host"),
        ("kind: persistent, on: compute, ranks: [1], delay: 6 ms", "waits_for: update", "compute"),
    ],
)
def test_a_late_rank_is_named_on_its_channel(tmp_path: Path, late: str, host: str, channel: str) -> None:
    trace = write_traces(tmp_path, job("fsdp", late=f"{{{late}}}", host=host))
    found = imported(tmp_path)
    (straggler,) = found.stragglers
    assert (straggler.ranks, straggler.kind, straggler.channel) == ((1,), "persistent", channel)
    assert straggler.seconds == pytest.approx(0.006, rel=0.01)
    assert found.proof.predicted_s == pytest.approx(step_s(trace), rel=0.01)


def test_an_untraced_straggler_is_told_at_least(tmp_path: Path) -> None:
    write_traces(tmp_path, job("fsdp", slow="{ranks: [2], speed: 0.8}"))
    (tmp_path / "rank2.json.gz").unlink()
    found = imported(tmp_path)
    (straggler,) = found.stragglers
    assert straggler.ranks == (2,)
    assert 0.003 < straggler.seconds < 0.012
    assert any("waiting for late ones among them" in each for each in [found.scenario.imported.unsure])


# ---------------------------------------------------------------- what is said and written


@pytest.mark.sentinel
def test_the_scenario_of_the_files_answers_what_other_shardings_would_take(tmp_path: Path, capsys) -> None:
    write_traces(tmp_path, job("hsdp, shard: 4", nodes=2))
    path = tmp_path / "job.yaml"
    done = call(capsys, "import", tmp_path, "-o", path)
    assert "3 units and a root, each shared by 4 ranks, 2 copies, gathered in bfloat16, reduced in float32" in done.out
    assert "layers.0 to layers.2   8000000" in done.out
    text = path.read_text()
    assert "# forward, backward: seconds of computing from when a unit is copied out" in text
    assert "{kind: hsdp, wrap: blocks, param_dtype: bfloat16, reduce_dtype: float32, shard: 4}" in text
    rows = {row["schedule"] for row in json.loads(call(capsys, "compare", path, "--json").out)["rows"]}
    assert {"hsdp-4-bfloat16-root", "hsdp-4-bfloat16-keep-root", "fsdp-bfloat16-root"} <= rows
    found = json.loads(call(capsys, "import", tmp_path, "-o", path, "--force", "--json").out)["sharding"]
    assert (found["shard"], found["replicas"], [unit["name"] for unit in found["units"]]) == (
        4,
        2,
        ["", "layers.0", "layers.1", "layers.2"],
    )
    tuned = json.loads(call(capsys, "tune", path, "--allow", "sharding", "--json").out)
    assert tuned["rows"]


SUMMARY = """\
rank,Collective name,Group size,dtype,In msg nelems,Out msg nelems,dur_mean,operation_count
0,_allgather_base,2,BFloat16,1000,2000,900.0,10
1,_allgather_base,2,BFloat16,1000,2000,300.0,10
0,_reduce_scatter_base,2,Float,2000,1000,1500.0,6
1,_reduce_scatter_base,2,Float,2000,1000,500.0,6
0,_allgather_base,2,BFloat16,50,100,20.0,2
1,_allgather_base,2,BFloat16,50,100,10.0,2
0,_reduce_scatter_base,2,Float,100,50,20.0,2
1,_reduce_scatter_base,2,Float,100,50,21.0,2
"""


def test_a_summary_of_collectives_tells_units_and_the_late_rank(tmp_path: Path, capsys) -> None:
    path = tmp_path / "nccl_summary_long.csv"
    path.write_text(SUMMARY)
    summary = read_summary(path)
    assert (summary.n_steps, summary.units, summary.n_gathered_again) == (2, {2000: 3, 100: 1}, 2)
    assert summary.late_rank == 1
    assert summary.late_s == pytest.approx((10 * 600e-6 + 6 * 1000e-6 + 2 * 10e-6) / 2)
    done = call(capsys, "import", path, "-o", tmp_path / "job.yaml")
    assert done.code == 2
    assert "3 units of 2,000 elements and 1 unit of 100 elements, shared by 2 ranks" in " ".join(done.out.split())
    assert "rank 1 comes last: the others wait 6.01 ms of a step for it" in done.out
    assert "has no times of computing" in done.err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rank,dtype\n", "has no column 'Collective name'"),
        (
            SUMMARY.replace("900.0", "much"),
            "nccl_summary_long.csv:2: column dur_mean: 'much': write a number from 0 to",
        ),
        (SUMMARY.replace("900.0", "nan"), "nccl_summary_long.csv:2: column dur_mean: 'nan': write"),
        (SUMMARY.replace("900.0", "-900.0"), "nccl_summary_long.csv:2: column dur_mean: '-900.0': write"),
        (
            SUMMARY.replace("10.0,2", "10.0,0"),
            "nccl_summary_long.csv:[0-9]+: column operation_count: '0': write a whole",
        ),
        (SUMMARY.replace(",900.0", ""), "nccl_summary_long.csv:2: has fewer columns than the first line"),
        (SUMMARY.replace("900.0", "3,900.0"), "nccl_summary_long.csv:2: has more columns than the first line"),
        (SUMMARY.splitlines()[0] + "\n", "has no all_gathers and reduce_scatters"),
    ],
)
def test_other_tables_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "nccl_summary_long.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=problem):
        read_summary(path)


def test_a_table_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_summary_long.csv"
    path.write_bytes(b"rank\n\xff")
    with pytest.raises(ScenarioError, match=r"nccl_summary_long.csv:2: byte 0xff is not UTF-8"):
        read_summary(path)
    path.write_text(SUMMARY + "9" * 200_000)
    with pytest.raises(TraceError, match=r"nccl_summary_long.csv:[0-9]+: is no CSV: field larger than"):
        read_summary(path)
