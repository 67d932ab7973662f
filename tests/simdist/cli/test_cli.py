"""The command line: what it prints where, what it leaves on disk, how it ends."""

import functools
import inspect
import io
import json
import os
import re
import signal
import subprocess
import time
import warnings

import numpy as np
import pytest
from commandline import LABELS, call, edited, process, write
from engine_runs import simulate

from simdist import report, scenario
from simdist.cli import cli, inputs, main
from simdist.engines import choose, des, vector
from simdist.errors import RunError
from simdist.progress import ProgressBar
from simdist.runs import building
from simdist.runs.run_directory import PLAN, SIMULATED
from simdist.scenario import presets
from simdist.studies import comparison
from simdist.studies.comparison import compare
from simdist.traces.breakdown import break_down
from simdist.traces.trace import Trace

STATES = ("compute_s", "comm_s", "wait_s", "io_s", "host_s")


@pytest.fixture
def small(tmp_path):
    return write(tmp_path / "small.yaml")


def document(capsys, *args):
    """Run a command with --json; return what it printed, which is nothing but one document on stdout."""
    answer = call(capsys, *args, "--json")
    assert answer.code == 0, answer.err
    assert answer.out.count("\n") == 1
    return json.loads(answer.out)


def outside(*args, code=None, **options):
    """Run a command line in a process of its own."""
    command, environment = process(*args, code=code)
    environment |= options.pop("environment", {})
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **options)


# Common to all commands


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["--version"]])
def test_help_imports_nothing_heavy(args):
    heavy = "numpy pandas matplotlib scipy simpy pydantic pydantic_core yaml rich"
    code = f"""
import sys
from simdist.cli import main
assert main(sys.argv[1:]) == 0
sys.exit(" ".join(name for name in {heavy.split()} if name in sys.modules))
"""
    done = outside(*args, code=code)
    assert done.stderr.strip() == ""
    assert "simdist" in done.stdout


def test_a_command_imports_no_other_command():
    commands = "presets plan simulate compare validate trace sweep results report importing whatif tune"
    code = f"""
import sys
from simdist.cli import main
assert main(["compare", "--help"]) == 0
found = [name for name in {commands.split()} if f"simdist.cli.{{name}}" in sys.modules]
sys.exit(found != ["compare"])
"""
    assert outside(code=code).returncode == 0


def test_help_tells_of_every_command(capsys):
    answer = call(capsys, "--help")
    assert answer.code == 0
    ours = "presets plan simulate compare validate trace sweep results report import whatif tune"
    for command in ours.split():
        assert call(capsys, command, "--help").code == 0
        first, _, _ = cli.get_command(None, command).help.partition("\n")
        assert re.search(rf"^  {command} +{re.escape(first)}$", answer.out, re.MULTILINE)
    assert "..." not in answer.out.partition("Commands:")[2]  # no short help is cut


@pytest.mark.parametrize("args", [["presets"], ["compare", "small.yaml"], ["--help"]])
def test_closed_stdout_is_a_failed_run(small, args):
    done = outside(*args, cwd=small.parent, preexec_fn=functools.partial(os.close, 1))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: cannot print: stdout is closed; send it to a file")


def test_compare_tells_what_checkpoints_add(tmp_path, capsys):
    disk = ("gpus_per_node: 4", "gpus_per_node: 4\n  disk: {read: 1 GB/s, write: 1 MB/s}")
    path = write(
        tmp_path / "s.yaml", edited(disk, ("seed: 1", "seed: 1\ncheckpoint: {every: 4, what: state, to: disk}"))
    )
    assert "checkpoints add" in call(capsys, "compare", path, "--seeds", "2").out
    without = call(capsys, "compare", write(tmp_path / "t.yaml", edited(disk)), "--seeds", "2")
    assert "checkpoints" not in without.out


WARNING = "input.prefetch has no effect"


@pytest.mark.parametrize("command", ["plan", "simulate", "compare"])
def test_stdout_is_the_result_and_nothing_else(tmp_path, capsys, command):
    path = write(tmp_path / "s.yaml", edited(("seed: 1", "seed: 1\ninput: {prefetch: 3}")))
    for output in ([], ["-o", tmp_path / command]) if command != "compare" else ([],):
        answer = call(capsys, command, path, "--json", *output)
        assert answer.code == 0
        json.loads(answer.out)
        assert f"warning: {path}: {WARNING}" in answer.err
        answer = call(capsys, command, path, *output)
        assert WARNING not in answer.out


def test_reader_that_leaves_early_is_no_error(tmp_path):
    many = "\n".join(f"    - {{name: tensor{number}, count: 10}}" for number in range(600))
    text = edited(
        ("    - {name: weight, count: 100000}", many),
        ("kind: sync", "{kind: sync, first_bucket_size: 1 B, bucket_size: 1 B}"),
    )
    command, environment = process("plan", write(tmp_path / "s.yaml", text))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout.read(4) == b"plan"
        running.stdout.close()
        assert running.stderr.read() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_fails_without_a_traceback(small, unbuffered):
    with open("/dev/full", "w") as full:
        command, environment = process("simulate", small)
        environment["PYTHONUNBUFFERED"] = unbuffered
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: cannot print: No space left on device\n")


def test_terminal_without_the_characters_gets_others(small):
    done = outside("compare", small, environment={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "+-" in done.stdout
    assert done.stdout.isascii()


def test_directory_that_cannot_be_written_is_a_failed_run(small, capsys):
    for command in ("plan", "simulate"):
        answer = call(capsys, command, small, "-o", small / "run")
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.startswith(f"error: {small}")
        assert "Not a directory" in answer.err


def test_too_little_memory_is_a_failed_run(small, capsys, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("Unable to allocate 1 PiB")

    monkeypatch.setattr(comparison, "measure_with_additions", fail)
    answer = call(capsys, "compare", small)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "error: not enough memory: Unable to allocate 1 PiB; simulate fewer steps, ranks or samples\n"


def test_mistake_of_the_program_keeps_its_traceback(small, monkeypatch):
    def fail(*_, **__):
        raise EOFError

    monkeypatch.setattr(comparison, "measure_with_additions", fail)
    with pytest.raises(EOFError):
        main(["compare", str(small)])


# presets


def test_presets_lists_what_ships(capsys):
    answer = call(capsys, "presets")
    assert answer.code == 0
    for kind in ("clusters", "workloads", "scenarios"):
        assert all(name in answer.out for name in presets.names(kind))
    facts = document(capsys, "presets", "workloads")
    resnet = next(each for each in facts["workloads"] if each["name"] == "resnet50")
    assert (resnet["parameters"], resnet["nbytes"]) == (25_557_032, 4 * 25_557_032)
    ideal = next(each for each in document(capsys, "presets")["clusters"] if each["name"] == "ideal")
    assert (ideal["ranks"], ideal["network_Bps"]) == (64, None)  # JSON has no number for unlimited


def test_preset_is_shown_as_it_stands_in_its_file(capsys):
    path = presets.path("clusters", "dgx-a100")
    assert call(capsys, "presets", "clusters", "dgx-a100").out == path.read_text()
    shown = document(capsys, "presets", "clusters", "dgx-a100")
    assert shown["settings"]["gpus_per_node"] == 8


@pytest.mark.parametrize("name", presets.names("scenarios"))
def test_scenario_that_ships_goes_by_its_name(capsys, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    loaded = scenario.load(presets.path("scenarios", name))
    label = loaded.schedules[0].name
    plans = document(capsys, "plan", name, "--schedule", label)["plans"]
    assert [(each["schedule"], each["world_size"]) for each in plans] == [(label, loaded.cluster.world_size)]
    shown = next(each for each in document(capsys, "presets", "scenarios")["scenarios"] if each["name"] == name)
    assert shown["schedules"] == [schedule.name for schedule in loaded.schedules]
    write(tmp_path / name, "steps: 1")  # a file is preferred
    assert call(capsys, "plan", name).err.count(f"{name}:1: ") == 3


# plan


def test_plan_prints_plans_and_what_was_proved(small, capsys):
    answer = call(capsys, "plan", small, "--schedule", "local-4")
    assert answer.out.startswith("plan local-4: 8 ranks, 12 steps")
    assert "body 1, 3 steps" in answer.out
    assert answer.out.endswith(
        "proved: by following the contributions of all 8 ranks\n"
        "    9 steps of 12: every rank applies its own gradient\n"
        "    3 steps of 12: every rank applies its own gradient, then takes the mean parameters of all ranks\n"
    )
    assert call(capsys, "plan", small).out.count("\nproved: ") == 3


def test_plan_as_json_tells_digests_and_proofs(small, capsys):
    plans = document(capsys, "plan", small)["plans"]
    assert [each["schedule"] for each in plans] == LABELS
    assert plans[0]["proved"] == [
        {"steps": 12, "gradients": {"size": 8, "stride": 1}, "parameters": {"size": 1, "stride": 1}}
    ]
    loaded = scenario.load(small)
    assert plans[0]["digest"] == building.build(loaded, loaded.schedules[0]).plan.digest()
    assert plans[0]["proved_ranks"] == 8


def test_proof_of_a_sample_says_so(tmp_path, capsys):
    text = edited(("nodes: 2", "nodes: 128"), ("levels: {2: 4, 4: world}", "levels: {2: 4, 4: 512}"))
    answer = call(capsys, "plan", write(tmp_path / "s.yaml", text), "--schedule", "sync")
    assert "proved: by following the contributions of 64 of 512 ranks, spread evenly\n" in answer.out
    assert "every step of 12: every rank applies the mean gradient of all ranks\n" in answer.out


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("{kind: naive_ag}", "the mean of the largest entries of the gradients of all ranks, and keeps the rest for"),
        ("{kind: backup_workers, backup: 1}", "the mean gradient of all ranks, without the last 1 to come\n"),
        (
            "{kind: local_sgd, period: 2, inner_steps: {1: 1}}",
            "6 steps of 12: every rank but 1 applies its own gradient\n",
        ),
        (
            "{kind: local_sgd, period: 2, overlap_steps: 1}",
            "then takes the mean parameters of all ranks of 1 step ago\n",
        ),
    ],
)
def test_proof_tells_what_is_applied(schedule, says, tmp_path, capsys):
    text = edited(("schedules:", f"schedules:\n  - {schedule}"))
    answer = call(capsys, "plan", write(tmp_path / "s.yaml", text))
    assert says in answer.out


def test_several_schedules_make_a_run_each_and_one_makes_one(small, tmp_path, capsys):
    plans = document(capsys, "plan", small, "-o", tmp_path / "runs")["plans"]
    assert [each["run"] for each in plans] == [str(tmp_path / "runs" / label) for label in LABELS]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(LABELS)
    document(capsys, "plan", small, "--schedule", "sync", "-o", tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["delays.npz", "plan.json", "scenario.yaml"]


# simulate


def test_simulate_prints_what_the_library_computes(small, capsys):
    rows = document(capsys, "simulate", small)["rows"]
    loaded = scenario.load(small)
    for row, schedule in zip(rows, loaded.schedules, strict=True):
        built = building.build(loaded, schedule)
        where = break_down(simulate(built.plan, built.costs, building.delays(loaded)))
        assert row["schedule"] == schedule.name
        assert row["step_s"] == where.step_s[0]
        assert [row[state] for state in STATES] == [where.per_step_s(state[:-2])[0] for state in STATES]
        assert sum(row[state] for state in STATES) == pytest.approx(row["step_s"], rel=1e-12)


@pytest.mark.parametrize("engine", ["auto", "fast", "des"])
def test_run_directory_gives_the_times_of_its_scenario(small, tmp_path, capsys, engine):
    direct = document(capsys, "simulate", small, "--engine", engine)["rows"]
    document(capsys, "plan", small, "-o", tmp_path / "runs")
    rows = document(capsys, "simulate", tmp_path / "runs", "--engine", engine)["rows"]
    for row in rows:
        path = tmp_path / "runs" / row["schedule"] / SIMULATED
        assert row.pop("trace") == str(path)
        assert row | {"trace": None} in direct
        assert Trace.load(path).makespan_s == row["makespan_s"]
    assert len(rows) == len(direct)


def test_run_can_be_simulated_into_another_directory(small, tmp_path, capsys):
    document(capsys, "plan", small, "--schedule", "sync", "-o", tmp_path / "a")
    document(capsys, "simulate", tmp_path / "a", "-o", tmp_path / "b")
    assert not (tmp_path / "a" / SIMULATED).exists()
    document(capsys, "simulate", small, "--schedule", "sync", "-o", tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_equal_input_gives_equal_traces_in_any_process(small, tmp_path):
    for seed in ("1", "2"):
        for engine in ("fast", "des"):
            args = ("simulate", small, "--engine", engine, "-o", tmp_path / (engine + seed))
            assert outside(*args, environment={"PYTHONHASHSEED": seed}).returncode == 0
    for label in LABELS:
        for engine in ("fast", "des"):
            first, second = (tmp_path / (engine + seed) / label for seed in ("1", "2"))
            names = sorted(file.name for file in first.iterdir())
            assert names == ["delays.npz", "plan.json", "scenario.yaml", SIMULATED]
            assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
        fast, des = (Trace.load(tmp_path / f"{engine}1" / label / SIMULATED) for engine in ("fast", "des"))
        assert (fast.source, des.source) == ("simulated by fast", "simulated by des")
        for name in ("ready_s", "start_s", "end_s"):
            assert np.array_equal(getattr(fast, name), getattr(des, name))


def test_plan_written_by_hand_is_simulated(small, tmp_path, capsys):
    document(capsys, "plan", small, "--schedule", "sync", "-o", tmp_path / "run")
    path = tmp_path / "run" / "plan.json"
    plan = json.loads(path.read_text())
    plan["bodies"][0] = [op for op in plan["bodies"][0] if op["op"] != "AllReduce"]
    path.write_text(json.dumps(plan))
    answer = call(capsys, "simulate", tmp_path / "run", "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["rows"][0]["comm_s"] == 0


def test_simulate_draws_a_timeline_of_each_schedule(small, tmp_path, capsys):
    assert call(capsys, "simulate", small, "--plot", tmp_path / "one.png", "--schedule", "sync").code == 0
    assert call(capsys, "simulate", small, "--plot", tmp_path / "all.svg").code == 0
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.glob("all*")) == sorted(f"all-{label}.svg" for label in LABELS)


def fail(*_, **__):
    raise AssertionError("done all the same")


@pytest.mark.parametrize("engine", ["auto", "fast"])
@pytest.mark.parametrize("steps", [12, 49])
def test_times_are_the_same_without_a_trace_and_no_trace_is_made(tmp_path, capsys, monkeypatch, engine, steps):
    path = write(tmp_path / "s.yaml", edited(("steps: 12", f"steps: {steps}")))
    traced = document(capsys, "simulate", path, "--engine", engine, "-o", tmp_path / "runs")["rows"]
    table = call(capsys, "simulate", path, "--engine", engine, "--plot", tmp_path / "a.png").out
    for module in (vector, des):
        monkeypatch.setattr(module, "Trace", fail)
    assert document(capsys, "simulate", path, "--engine", engine)["rows"] == [row | {"trace": None} for row in traced]
    assert call(capsys, "simulate", path, "--engine", engine).out == table


def test_without_a_trace_auto_does_by_events_what_fast_refuses(small, capsys, monkeypatch):
    expected = document(capsys, "simulate", small, "--engine", "des")

    refuses = choose.Condition("refuses", "run", lambda run: "not exact")
    monkeypatch.setattr(choose, "FAST_CANNOT", (refuses,))
    found = document(capsys, "simulate", small)
    for row, other in zip(found["rows"], expected["rows"], strict=True):  # one rank of each kind, up to rounding
        assert row["engine"] == "des"
        numbers = {key: value for key, value in other.items() if isinstance(value, float)}
        assert {key: row[key] for key in numbers} == pytest.approx(numbers, rel=1e-12)
    answer = call(capsys, "simulate", small, "--engine", "fast")
    assert (answer.code, answer.out, answer.err) == (
        2,
        "",
        f"error: {small}: sync: not exact: use --engine des (or auto)\n",
    )


def test_plan_just_made_is_not_priced_again(small, capsys, monkeypatch):
    monkeypatch.setattr(inputs, "price_of", fail)
    assert call(capsys, "simulate", small).code == 0


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_picture_that_fails_loses_no_result(small, tmp_path, capsys, monkeypatch, command):
    plain = call(capsys, command, small).out

    def full(_, path):
        raise RunError(f"{path}: cannot be written")

    monkeypatch.setattr(report, "save", full)
    answer = call(capsys, command, small, "--plot", tmp_path / "a.png")
    assert (answer.code, answer.out) == (1, plain)
    assert "cannot be written" in answer.err


def test_labels_with_dollars_are_drawn(tmp_path, capsys):
    text = edited(("kind: sync", "{kind: sync, label: '$x_{$'}"))
    path = write(tmp_path / "$x$ {.yaml", text)
    for command, *options in (("compare", "--baseline", "sync"), ("simulate", "--schedule", "$x_{$")):
        answer = call(capsys, command, path, *options, "--plot", tmp_path / f"{command}.png")
        assert (answer.code, answer.err) == (0, f"wrote {tmp_path / command}.png\n")


# compare


def test_compare_prints_what_the_library_computes(small, capsys):
    found = document(capsys, "compare", small)
    assert found.keys() == {"scenario", "baseline", "rows", "remarks"}
    (unstated,) = found["remarks"]
    assert unstated["text"].startswith("cluster.network.efficiency is not stated, and so 1; ")
    assert (unstated["kind"], unstated["place"]) == ("assumption", "cluster.network.efficiency")
    assert (found["scenario"], found["baseline"]) == ("small", "sync")
    expected = [row.document() for row in compare(scenario.load(small))]
    assert found["rows"] == json.loads(json.dumps(expected))
    assert set(found["rows"][0]) == {
        *("schedule", "step_s", "step_s_ci95", "speedup", "speedup_ci95", *STATES, "engine", "seeds"),
    }


def test_compare_takes_another_baseline_and_keeps_the_order(small, capsys):
    found = document(capsys, "compare", small, "--seeds", "3", "--baseline", "local_sgd", "--engine", "des")
    assert found["baseline"] == "local-4"
    assert [row["schedule"] for row in found["rows"]] == LABELS
    assert [row["speedup"] == 1 for row in found["rows"]] == [False, True, False]
    assert {row["engine"] for row in found["rows"]} == {"des"}


def test_single_seed_has_no_interval(small, capsys):
    for row in document(capsys, "compare", small, "--seeds", "1")["rows"]:
        assert row["step_s_ci95"] is row["speedup_ci95"] is None
    answer = call(capsys, "compare", small, "--seeds", "1")
    assert "±" not in answer.out
    assert "1 seed;" in answer.out


def test_table_is_in_units_of_people(small, capsys):
    out = call(capsys, "compare", small).out
    _, table, repeated, *_ = out.split("\n\n")
    title = out.splitlines()[0]
    header, _, *rows = table.splitlines()
    assert title == "small: 8 ranks, 12 steps, 20 seeds; speed-up over sync, 95 % confidence"
    assert header.split() == ["schedule", "step", "time", "speed-up", "comm", "wait"]
    assert repeated == "In every row: compute 60 ms; io 0 s; host 4.84 ms; engine fast."
    assert [row.split()[0] for row in rows] == LABELS
    assert " ms ± " in rows[0]
    assert " 1.00 " in rows[0]


def test_compare_shows_intervals_of_what_is_uncertain_and_what_to_measure(small, tmp_path, capsys):
    ranges = "network.latency: {from: 10 us, to: 90 ms, source: guessed, measure: a ping}"
    unsure = write(tmp_path / "unsure.yaml", edited(("steps: ", f"uncertain: {{cluster.{ranges}}}\nsteps: ")))
    out = call(capsys, "compare", unsure, "--plot", tmp_path / "table.svg").out
    title, *_ = out.splitlines()
    assert title.endswith("speed-up over sync, in brackets: 90 % intervals")
    assert max(map(len, out.splitlines())) <= 120
    sentence = " ".join(out.split("\n\n")[-1].split())
    assert "from cluster.network.latency (10 us to 90 ms, guessed): measure a ping." in sentence
    found = document(capsys, "compare", unsure)
    for row in found["rows"]:
        (low_s, high_s), (low, high) = row["step_s_range90"], row["speedup_range90"]
        assert low_s <= row["step_s"] < high_s
        assert low <= row["speedup"] <= high
    expected = [row.document() for row in compare(scenario.load(unsure))]
    assert found["rows"] == json.loads(json.dumps(expected))


def test_compare_draws_the_table(small, tmp_path, capsys):
    assert call(capsys, "compare", small, "--plot", tmp_path / "table.svg").code == 0
    assert "<svg" in (tmp_path / "table.svg").read_text()


INTERRUPTIBLE = """
import signal, sys
from simdist.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def test_interruption_of_a_process_ends_it_without_a_traceback(tmp_path):
    path = write(tmp_path / "s.yaml")
    command, environment = process("compare", path, "--engine", "des", "--seeds", "100000", code=INTERRUPTIBLE)
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        time.sleep(5)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in err
    assert re.fullmatch(r"interrupted( at sync, \d+%)?; nothing was saved", err.strip().splitlines()[-1])


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_compare_tells_what_is_done_when_the_rest_is_ended(small, capsys, monkeypatch):
    measure, left = comparison.measure_with_additions, [None]

    def once(*given, **named):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return measure(*given, **named)

    monkeypatch.setattr(comparison, "measure_with_additions", once)
    answer = call(capsys, "compare", small, "--seeds", "2")
    assert answer.code == 130
    assert re.search(r"^sync: [\d.]+ m?s per step$", answer.err, re.MULTILINE)


def test_interruption_without_output_says_that_nothing_was_saved(small, capsys, monkeypatch):
    monkeypatch.setattr(comparison, "measure_with_additions", interrupt)
    answer = call(capsys, "compare", small)
    assert (answer.code, answer.out) == (130, "")
    assert answer.err.strip() == "interrupted at sync, 0%; nothing was saved"


def test_interrupted_simulation_names_the_directories_and_traces_it_wrote(small, tmp_path, capsys, monkeypatch):
    real, calls = des.EventRun.traces, []

    def second_time(*args, **options):
        calls.append(args)
        return real(*args, **options) if len(calls) == 1 else interrupt()

    monkeypatch.setattr(des.EventRun, "traces", second_time)
    answer = call(capsys, "simulate", small, "--engine", "des", "-o", tmp_path / "runs")
    assert answer.code == 130
    sync, local = tmp_path / "runs" / "sync", tmp_path / "runs" / "local-4"
    assert answer.err.strip().endswith(f"interrupted at local-4, 0%; saved: {sync}, {sync / SIMULATED}, {local}")
    assert (local / PLAN).exists()


def test_interrupted_simulation_of_a_run_names_the_copy_it_wrote(small, tmp_path, capsys, monkeypatch):
    document(capsys, "plan", small, "--schedule", "sync", "-o", tmp_path / "run")
    monkeypatch.setattr(des.EventRun, "traces", interrupt)
    answer = call(capsys, "simulate", tmp_path / "run", "--engine", "des", "-o", tmp_path / "copy")
    assert (answer.code, answer.err.strip()) == (130, f"interrupted at sync, 0%; saved: {tmp_path / 'copy'}")


# trace


def test_trace_is_converted_for_viewers(small, tmp_path, capsys):
    run = tmp_path / "run"
    document(capsys, "simulate", small, "--schedule", "sync", "-o", run)
    chrome = tmp_path / "chrome.json"
    about = document(capsys, "trace", run, "--chrome", chrome)
    assert (about["steps"], about["world_size"], about["source"]) == (12, 8, "simulated by fast")
    everything = json.loads(chrome.read_text())["traceEvents"]
    assert {event["pid"] for event in everything} == set(range(8))
    document(capsys, "trace", run / SIMULATED, "--chrome", chrome, "--steps", "2:4")
    some = json.loads(chrome.read_text())["traceEvents"]
    assert {event["args"]["step"] for event in some if "step" in event["args"]} == {2, 3}
    document(capsys, "trace", run, "--chrome", chrome, "--steps", "10:")
    last = json.loads(chrome.read_text())["traceEvents"]
    assert {event["args"]["step"] for event in last if "step" in event["args"]} == {10, 11}


# progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _smart_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_bar_shows_what_is_done_on_a_terminal():
    terminal = Terminal()
    with ProgressBar(terminal, after_s=0.0) as bar:
        bar.update("hsgd-2-8", 3, 4)
    assert "hsgd-2-8" in terminal.getvalue()
    assert "75%" in terminal.getvalue()


def test_bar_shows_nothing_of_short_work():
    terminal = Terminal()
    with ProgressBar(terminal, after_s=3600.0) as bar:
        bar.update("sync", 1, 4)
    assert terminal.getvalue() == ""


def test_bar_prints_lines_where_there_is_no_terminal_and_they_are_asked_for():
    file = io.StringIO()
    with ProgressBar(file, line_every_s=0.0) as bar:
        bar.update("read", 0, None)
        bar.update("sync", 0, 4)
        bar.update("sync", 3, 4)
    assert re.fullmatch(r"read\nsync: 0%\nsync: 75%, 0 min \d+ s left\n", file.getvalue())


def test_bar_prints_no_line_before_its_time_nor_on_a_terminal():
    file, terminal = io.StringIO(), Terminal()
    with ProgressBar(file, line_every_s=3600.0) as bar:
        bar.update("sync", 1, 4)
    with ProgressBar(terminal, after_s=3600.0, line_every_s=0.0) as bar:
        bar.update("sync", 1, 4)
    assert (file.getvalue(), terminal.getvalue()) == ("", "")


def test_bar_shows_nothing_where_nobody_looks():
    file = io.StringIO()
    with ProgressBar(file, after_s=0.0) as bar:
        bar.update("sync", 1, 4)
    assert file.getvalue() == ""


def test_bar_goes_away_when_work_fails():
    terminal = Terminal()
    bar = ProgressBar(terminal, after_s=0.0)
    with pytest.raises(ZeroDivisionError), bar:
        bar.update("sync", 1, 1 / 0)
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")


def test_bar_comes_after_two_seconds():
    assert inspect.signature(ProgressBar).parameters["after_s"].default == 2.0


def test_bar_tells_the_remaining_time_from_the_first_report_on_whatever_was_done_before(monkeypatch):
    from simdist import progress

    now_s = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    terminal = Terminal()
    with ProgressBar(terminal, after_s=0.0) as bar:
        bar.update("rows", 50, 100)  # of an earlier run
        now_s = 3.0
        bar.update("rows, 1 failed", 55, 100)
    assert "0 min 27 s left" in terminal.getvalue()  # 45 at 5 in 3 s


def test_bar_forgets_the_speed_of_other_work(monkeypatch):
    from simdist import progress

    now_s = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    terminal = Terminal()
    with ProgressBar(terminal, after_s=0.0) as bar:
        for now_s, done in ((1.0, 90), (100.0, 0), (101.0, 10)):
            bar.update("sync" if now_s < 2 else "torus", done, 100)
    assert "0 min 9 s left" in terminal.getvalue()


def test_a_table_of_nccl_tests_calibrates_the_cluster_of_a_new_scenario(capsys, tmp_path):
    rows = "8 2 float sum -1 40.00 0.00 0.00 0\n1073741824 268435456 float sum -1 12000 89.48 167.77 0\n"
    file = tmp_path / "table.txt"
    file.write_text(f"all_reduce_perf\n# size count type redop root time algbw busbw #wrong\n{rows}")
    args = (
        "init",
        "--from",
        str(file),
        "--cluster",
        "dgx-a100",
        "--nodes",
        "2",
        "--yes",
        "-o",
        str(tmp_path / "new.yaml"),
    )
    [found] = document(capsys, *args)["calibrations"]
    assert [each["nbytes"] for each in found["rows"]] == [8, 2**30]
    assert [abs(each["calibrated_error"]) < 0.01 for each in found["rows"]] == [True, True]
    assert "Calibrated with all_reduce of nccl-tests, table.txt" in (tmp_path / "new-cluster.yaml").read_text()
    assert "measured (us)" in call(capsys, *args, "--force").out
    refused = call(capsys, *args)
    assert refused.code == 2
    assert "new.yaml" in refused.err


def test_a_warning_is_one_line_without_a_place_in_the_source(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("simdist.engines.run._LARGE_NBYTES", 1000)
    with warnings.catch_warnings(action="always"):
        answer = call(capsys, "simulate", write(tmp_path / "small.yaml"), "-o", tmp_path / "runs", "--schedule", "sync")
    [line] = [line for line in answer.err.splitlines() if "memory" in line]
    assert line.startswith("warning: sync: the times of ")
    assert line.endswith(" of memory: simulate fewer steps or ranks if that is too much")
