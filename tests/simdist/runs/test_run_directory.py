"""Run directories: complete, standalone, byte for byte the same, never overwritten by surprise."""

import os
import shutil

import numpy as np
import pytest
from commandline import SMALL, edited
from engine_runs import simulate

from simdist.cost import price
from simdist.errors import PlanError, RunError, ScenarioError, TraceError
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.scenario import load, loads

FILES = ["delays.npz", "plan.json", "scenario.yaml"]


def one(text=SMALL, kind="sync", folder=None):
    """Return a scenario with one of its schedules, the plan of it and its delays."""
    whole = loads(text, folder=folder) if folder else loads(text)
    schedule = next(each for each in whole.schedules if each.kind == kind)
    scenario = whole.model_copy(update={"schedules": (schedule,)})
    return scenario, build(scenario, schedule).plan, delays(scenario)


def trace_of(scenario, plan, drawn):
    return simulate(plan, price(plan, scenario.cluster, scenario.workload), drawn)


def save_half(_, path):
    path.write_bytes(b"half")
    raise KeyboardInterrupt


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    run_directory.write(path, *one())
    return path


@pytest.mark.parametrize("kind", ["sync", "local_sgd", "hierarchical_sgd"])
def test_what_is_written_is_read_back_equal(tmp_path, kind):
    scenario, plan, drawn = one(kind=kind)
    run_directory.write(tmp_path / "a" / "run", scenario, plan, drawn)
    assert sorted(contents(tmp_path / "a" / "run")) == FILES
    found = run_directory.read(tmp_path / "a" / "run")
    assert (found.scenario, found.plan) == (scenario, plan)
    assert found.delays.keys() == {"host"}
    assert np.array_equal(found.delays["host"], drawn["host"])


def test_equal_scenarios_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        run_directory.write(tmp_path / name, *one())
        run_directory.save_trace(trace_of(*one()), tmp_path / name / run_directory.SIMULATED)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_several_channels_of_delays_are_in_the_same_order_whatever_drew_them(tmp_path):
    both = "disturbances:\n  - {kind: jitter, median: 1 ms, sigma: 1, on: compute}\n"
    scenario, plan, drawn = one(edited(("disturbances:\n", both)))
    assert list(drawn) == ["compute", "host"]
    run_directory.write(tmp_path / "a", scenario, plan, drawn)
    run_directory.write(tmp_path / "b", scenario, plan, dict(reversed(drawn.items())))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_recordings_are_part_of_the_directory(tmp_path):
    seconds = np.linspace(0, 1, 15 * 8).reshape(15, 8)
    np.savez(tmp_path / "measured.npz", seconds)
    text = edited(("{kind: transient, probability: 10%, delay: 50 ms}", "{kind: recorded, file: measured.npz}"))
    run_directory.write(tmp_path / "run", *one(text, folder=tmp_path))
    (tmp_path / "measured.npz").unlink()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    found = run_directory.read(tmp_path / "elsewhere")
    assert np.array_equal(found.delays["host"], seconds[np.newaxis, :12])
    assert np.array_equal(delays(found.scenario)["host"], seconds[np.newaxis, :12])


def test_scenario_of_a_run_needs_no_preset(tmp_path):
    text = "cluster: ideal\nworkload: resnet18\nsteps: 2\nschedules: [{kind: sync}]\n"
    run_directory.write(tmp_path, *one(text))
    assert "preset" not in (tmp_path / "scenario.yaml").read_text()
    assert "tensors_file" not in (tmp_path / "scenario.yaml").read_text()
    assert load(tmp_path / "scenario.yaml").workload.tensor_counts == loads(text).workload.tensor_counts


def test_writing_the_same_run_again_keeps_its_traces(run):
    run_directory.save_trace(trace_of(*one()), run / "trace.real.npz")
    before = contents(run)
    run_directory.write(run, *one())
    assert contents(run) == before


def test_another_plan_does_not_replace_a_run(run):
    before = contents(run)
    with pytest.raises(PlanError, match=r"plan\.json: holds another plan, sync .* instead of local-4 .*-o, .*--force"):
        run_directory.write(run, *one(kind="local_sgd"))
    assert contents(run) == before


def test_other_delays_of_the_same_plan_do_not_replace_a_run(run):
    before = contents(run)
    with pytest.raises(
        PlanError, match=r"(scenario\.yaml|delays\.npz): is there already with other contents; .*--force"
    ):
        run_directory.write(run, *one(edited(("seed: 1", "seed: 2"))))
    assert contents(run) == before


def test_scenario_of_the_user_is_not_overwritten(tmp_path):
    (tmp_path / "scenario.yaml").write_text(SMALL)
    with pytest.raises(PlanError, match=r"scenario\.yaml: is there already"):
        run_directory.write(tmp_path, *one())
    assert [file.name for file in tmp_path.iterdir()] == ["scenario.yaml"]


def test_force_replaces_a_run_and_its_traces(run, tmp_path):
    run_directory.save_trace(trace_of(*one()), run / "trace.real.npz")
    run_directory.write(run, *one(kind="local_sgd"), force=True)
    run_directory.write(tmp_path / "new", *one(kind="local_sgd"))
    assert contents(run) == contents(tmp_path / "new")


def test_damaged_plan_is_not_replaced_without_force(run):
    (run / "plan.json").write_text("{")
    with pytest.raises(PlanError, match=r"plan\.json: is there already and cannot be read; .*--force"):
        run_directory.write(run, *one())
    run_directory.write(run, *one(), force=True)
    assert run_directory.read(run).plan == one()[1]


def test_path_that_cannot_be_made_is_a_failed_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file.*cannot be written"):
        run_directory.write(tmp_path / "file" / "run", *one())


def test_runs_are_found_in_a_directory_and_in_those_inside(run, tmp_path):
    assert run_directory.find(run) == [run]
    assert run_directory.find(tmp_path) == [run]
    deep = tmp_path / "sweep" / "runs" / "0" / "sync"
    run_directory.write(deep, *one())
    assert run_directory.find(tmp_path) == [run, deep]
    assert run_directory.find(tmp_path / "sweep") == [deep]
    with pytest.raises(ScenarioError, match=r"is no run directory: it has no plan\.json.*simdist plan SCENARIO -o RUN"):
        run_directory.find(tmp_path / "nothing")


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(run, name):
    (run / name).unlink()
    with pytest.raises(ScenarioError, match=f"is no run directory: {name} missing"):
        run_directory.read(run)


def test_trace_of_another_plan_is_refused(run):
    run_directory.save_trace(trace_of(*one(kind="local_sgd")), run / run_directory.SIMULATED)
    with pytest.raises(
        TraceError, match=r"trace\.simulated\.npz: is a trace of plan local-4 .*plan\.json is sync .*move"
    ):
        run_directory.read(run)


def test_interrupted_trace_leaves_no_file(run, monkeypatch):
    trace = trace_of(*one())
    monkeypatch.setattr(type(trace), "save", save_half)
    with pytest.raises(KeyboardInterrupt):
        run_directory.save_trace(trace, run / run_directory.SIMULATED)
    assert sorted(contents(run)) == FILES


def test_equal_runs_that_are_written_at_the_same_time_all_succeed(run, tmp_path, monkeypatch):
    trace, together, replace, met = trace_of(*one()), tmp_path / "together", os.replace, set()
    run_directory.save_trace(trace, run / run_directory.SIMULATED)

    def write():
        run_directory.write(together, *one())
        run_directory.save_trace(trace, together / run_directory.SIMULATED)

    def replace_after_another(part, path):
        if path not in met:  # this is written, and not yet in place: another does all of the same now
            met.add(path)
            write()
        replace(part, path)

    monkeypatch.setattr(os, "replace", replace_after_another)
    write()
    assert len(met) == 4
    assert contents(together) == contents(run)
