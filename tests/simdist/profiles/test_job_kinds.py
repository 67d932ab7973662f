"""What kind of job was traced, where its steps go, and what follows for advice."""

import json
from pathlib import Path

import pytest
from commandline import call
from kineto_drawing import ALL_REDUCE, GPU, NCCL_STREAM, SIDE_STREAM, TOLD, Drawing, draw_step

from simdist.profiles.job.kind import find_kind
from simdist.profiles.job.step_budget import step_budget
from simdist.profiles.steps.ranks import profile_rank
from simdist.scenario import Imported, Scenario, dump, loads
from simdist.stragglers.gains import Gains, find_gains

EIGHT = {"distributedInfo": GPU["distributedInfo"], "deviceProperties": [{"id": n, "name": "H200"} for n in range(8)]}
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def draw_all_to_all(draw: Drawing, at: float, begin: float, end: float) -> None:
    """Draw an all_to_all, and one of nothing, which has no kernel."""
    for begin_of_op in (at, at + 0.1):
        draw.note("nccl:all_to_all", begin_of_op, begin_of_op + 0.05)
        draw.op(
            "c10d::alltoall_base_", begin_of_op, begin_of_op + 0.04, Input_Dims=[[8], [8]], Input_type=["float"] * 2
        )
    draw.gpu(SEND_RECV, at + 0.01, begin, end, stream=SIDE_STREAM)


def sharded(folder: Path, name: str = "rank0.json") -> Path:
    draw = Drawing(EIGHT)
    for number in range(4):
        draw_step(draw, number)
        draw.note("## all2all_data:kjt values ##", 100 * number + 31, 100 * number + 34)
        draw_all_to_all(draw, 100 * number + 31, 100 * number + 32, 100 * number + 47)
    return draw.write(folder, name)


def test_a_job_with_sharded_embeddings_is_named(tmp_path: Path) -> None:
    kind = find_kind([profile_rank(sharded(tmp_path))], waiting_s=0.0)
    assert (kind.names, kind.is_modelled) == (("sharded embeddings",), False)
    assert kind.left_out["all_to_all"] == (2.0, pytest.approx(0.15))  # one of them of nothing; 15 of 100 ms
    assert kind.sentence == "sharded embeddings: 2 all_to_all a step (15.0 % of it)"


@pytest.mark.parametrize(
    ("kinds", "hint", "names"),
    [
        (["all_to_all"], "moe_layer", ("expert parallelism",)),
        (["send", "recv"], "", ("pipeline parallelism",)),
        (["_all_gather_base", "_reduce_scatter_base"], "", ("sharded parameters (FSDP or ZeRO)",)),
        (["_all_gather_base", "reduce"], "", ("sharded parameters (FSDP or ZeRO)",)),  # ZeRO-2 of DeepSpeed
        (["all_reduce"], "", ("all_reduces of no gradients (tensor parallelism, or statistics)",)),
        (["broadcast"], "", ()),
    ],
)
def test_other_kinds_of_jobs_are_named_by_their_collectives(tmp_path, kinds, hint, names) -> None:
    draw = Drawing(EIGHT)
    draw_step(draw, 0)
    for place, kind in enumerate(kinds):
        draw.note(f"nccl:{kind}", 31 + place, 31.5 + place)
        draw.gpu(SEND_RECV, 31.1 + place, 32 + 5 * place, 36 + 5 * place, stream=NCCL_STREAM)
    if hint:
        draw.note(hint, 31, 32)
    assert find_kind([profile_rank(draw.write(tmp_path))], waiting_s=0.0).names == names


def test_all_reduces_of_a_job_without_ddp_may_be_of_gradients(tmp_path) -> None:
    draw = Drawing(EIGHT)
    draw_step(draw, 0)
    draw.events = [event for event in draw.events if not event["name"].startswith(("c10d", "nccl"))]
    draw.note("nccl:all_reduce", 51.6, 51.7)
    draw.gpu(ALL_REDUCE, 51.65, 68, 84, stream=NCCL_STREAM, **TOLD)
    (name,) = find_kind([profile_rank(draw.write(tmp_path))], waiting_s=0.0).names
    assert name == "all_reduces that are not those of DDP (tensor parallelism, statistics, or gradients)"


def test_of_a_job_that_the_scenario_leaves_a_part_out_no_schedules_are_compared(capsys, tmp_path) -> None:
    path = tmp_path / "job.yaml"
    done = call(capsys, "import", sharded(tmp_path), "--nodes", "1", "-o", path)
    assert "2 all_to_all a step (15.0 % of it): schedules are not compared" in done.out
    tuned = call(capsys, "tune", path, "--json")
    assert tuned.code == 0
    assert json.loads(tuned.out)["outcome"] == "not compared"
    looked = json.loads(call(capsys, "whatif", path, "--json").out)
    assert (looked["gains"], looked["imported"]["parts_s"]["all_to_all"]) == (None, 0.015)
    assert looked["verdict"].startswith("no schedules are compared: the scenario leaves out a part of the job: sharded")


def test_a_question_about_machines_comes_after_what_the_traces_tell(capsys, tmp_path) -> None:
    done = call(capsys, "import", sharded(tmp_path), "-o", tmp_path / "job.yaml")
    assert done.code == 2
    assert "all_to_all, exposed" in done.out
    assert "give --nodes (" in done.err


def test_ranks_of_different_parts_of_a_model_still_say_where_their_time_goes(capsys, tmp_path) -> None:
    first = sharded(tmp_path)
    text = first.read_text().replace('"In msg nelems": 1000', '"In msg nelems": 999').replace('"rank": 0', '"rank": 1')
    (tmp_path / "rank1.json").write_text(text.replace('"Out msg nelems": 1000', '"Out msg nelems": 999'))
    done = call(capsys, "import", tmp_path, "--nodes", "1", "-o", tmp_path / "job.yaml")
    assert done.code == 2
    assert "all_to_all, exposed" in done.out
    assert done.err.rstrip().endswith("; with sharded embeddings ranks may differ; no scenario is written")
    assert not (tmp_path / "job.yaml").exists()


def test_the_largest_part_that_could_go_is_the_verdict(tmp_path: Path) -> None:
    budget = step_budget([profile_rank(sharded(tmp_path))])
    assert budget.parts_s.sum() == pytest.approx(0.1)
    assert budget.verdict.startswith("communication-bound: for 32 ms of a step (32.0 %) communication is exposed")
    assert budget.fixed_s == pytest.approx(0.068)
    late = step_budget([profile_rank(tmp_path / "rank0.json")], straggling_s=0.04)
    assert late.verdict.startswith("straggler-bound: for 40 ms of a step (40.0 %) ranks wait for late ones")
    assert late.fixed_s == pytest.approx(0.06)


def reproduced(error: float) -> Scenario:
    """Return a scenario that reproduces the traced steps with an error."""
    text = """\
cluster: {nodes: 4, gpus_per_node: 1, fabric: ideal, network: {latency: 25 us, bandwidth: 1 GB/s}}
workload: {tensors: [{name: w, count: 1000000}], batch_size: 8, forward: 2 ms, backward: 3 ms}
steps: 40
schedules: [{kind: sync}, {kind: local_sgd, period: 4}]
"""
    parts = {"compute": 0.007, "short_gap": 0.004}
    facts = Imported(step_s=0.011, error=error, verdict="launch-bound: for 4 ms of a step", parts=parts)
    return loads(text).changed(imported=facts)


def gains(error: float) -> Gains:
    scenario = reproduced(error)
    return find_gains(scenario, scenario.schedules[1:], baseline=scenario.schedules[0], n_runs=1)


def test_a_gain_is_no_surer_than_the_steps_are_reproduced() -> None:
    exact, near = gains(0.0), gains(-0.05)
    assert exact.rows[0].interval is None
    speedup = exact.rows[0].speedup
    assert near.rows[0].interval == (pytest.approx(0.95 * speedup), pytest.approx(1.05 * speedup))
    assert near.best
    assert not gains(0.11).best
    assert gains(0.11).problem == "the scenario reproduces the traced steps +11.0 % off"


@pytest.mark.parametrize(("beside_s", "is_problem"), [(0.019, False), (0.021, True)])
def test_operators_beside_collectives_may_take_half_as_long_without(beside_s: float, is_problem: bool) -> None:
    facts = Imported(step_s=0.100, error=-0.005, beside_s=beside_s)
    assert facts.uncertainty == pytest.approx(0.005 + beside_s / 0.200)
    assert ("on shared cores" in (facts.problem or "")) == is_problem


def test_nothing_is_recommended_if_the_steps_are_not_reproduced(capsys, tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(dump(reproduced(0.11)))
    for command in ("tune", "whatif"):
        found = json.loads(call(capsys, command, path, "--json").out)
        assert found["verdict"] == "no schedule is recommended: the scenario reproduces the traced steps +11.0 % off"
        if command == "tune":  # not the shares of a simulated step, whose gaps count as computing
            assert found["reasons"] == ["launch-bound: for 4 ms of a step"]
    path.write_text(dump(reproduced(0.05)))
    tuned = json.loads(call(capsys, "tune", path, "--json").out)
    assert tuned["change"]
    rows = {row["schedule"]: row for row in tuned["rows"]}
    low, high = rows["local-8"]["speedup_ci95"]
    assert (low, high) == (pytest.approx(0.95 * rows["local-8"]["speedup"]), pytest.approx(1.05 / 0.95 * low))
