"""`simdist whatif`: what it prints of scenarios and runs, and what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commandline import SMALL, Answer, call, edited, write
from straggling_jobs import analysed, job

from simdist.runs import run_directory
from simdist.stragglers import Gain, Gains, find_pattern
from simdist.stragglers.verdict import verdict_sentence
from simdist.studies.resampling import ResampledRecording
from simdist.traces.trace import Trace

REPORT = """\
sync: 8 ranks, 12 steps; simulated by fast
slowdown 1.48: 89.5 ms per step, 60.3 ms without stragglers; 32.6 % of the time is lost
stragglers: of the loss 85.7 % by the same ranks in every step (persistent), 14.3 % by now one rank, now another \
(transient); first of all by rank 6; mostly on the device
would be gone: with rank 6 as fast as is typical, 71.4 % of the loss; with node 1, 71.4 %
slow steps: 12 of 12 take more than 1.1 times the ideal
"""
TABLES = """\
kinds of operation

 operation  channel  slowdown  lost per step
"""
MIXED = edited(
    (
        "disturbances:\n  - {kind: transient, probability: 10%, delay: 50 ms}\n",
        "disturbances:\n  - {kind: recorded, file: late.csv}\n"
        "  - {kind: persistent, delay: 25 ms, ranks: [6], on: compute}\n",
    )
)
LATE = np.zeros((12, 8))
LATE[4, 1] = LATE[9, 3] = 0.05


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Rank 6 is 25 ms late in every step, rank 1 and rank 3 are 50 ms late once."""
    np.savetxt(tmp_path / "late.csv", LATE, delimiter=",")
    return write(tmp_path / "mixed.yaml", MIXED)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.yaml")


@pytest.fixture
def runs(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of each schedule, simulated."""
    answer = call(capsys, "simulate", small, "-o", tmp_path / "runs")
    assert answer.code == 0, answer.err
    return tmp_path / "runs"


def document(answer: Answer) -> dict:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def pretend_measured(run: Path, stretch_s: float = 0.0, *, n_unfinished: int = 0) -> Trace:
    """Write a measured trace: the simulated one, its computing longer on rank 5, its last operations not finished."""
    trace = Trace.load(run / run_directory.SIMULATED)
    times_s = [array.copy() for array in (trace.ready_s, trace.start_s, trace.end_s)]
    if stretch_s:
        for times in times_s:
            times += np.arange(len(times))[:, None] * stretch_s
    if n_unfinished:
        for times in times_s:
            times[-n_unfinished:, 5] = np.nan
    measured = Trace(trace.plan, *times_s, source="real by hand")
    measured.save(run / run_directory.REAL)
    return measured


def test_the_report_of_a_scenario(capsys: pytest.CaptureFixture[str], mixed: Path) -> None:
    answer = call(capsys, "whatif", mixed, "--resamples", "20")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(REPORT)
    assert TABLES in answer.out
    titles = ["all ranks", "all nodes", "the slowest 10 of 12 steps", "schedules"]
    assert [line for line in answer.out.splitlines() if line in titles] == titles
    assert re.search(r"^ +6 +1 +1\.41 +25 ms +12$", answer.out, re.MULTILINE)
    assert re.search(r"^ +4 +1\d\d ms +1\.83 +1$", answer.out, re.MULTILINE)
    assert (
        "20 runs of 40 steps or a few more, in whole periods, put together from blocks of 2 of 12 recorded steps; "
        "95 %: what that many recorded steps leave open"
    ) in answer.out


def test_a_persistent_straggler_is_the_reason_to_stay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = edited(
        ("{kind: transient, probability: 10%, delay: 50 ms}", "{kind: persistent, delay: 50 ms, ranks: [3]}"),
        ("network: {latency: 25 us, bandwidth: 25 Gbit/s}", "network: ideal"),
        ("seed: 1\n", ""),
    )
    answer = call(capsys, "whatif", write(tmp_path / "late.yaml", text))
    assert answer.code == 0, answer.err
    assert answer.out.rstrip().splitlines()[-2:] == [
        "one run of 40 steps: nothing is random",
        "stay with sync: no schedule is faster; rank 3 is late in every step, and an average over all "
        "ranks waits for that",
    ]


def test_transient_stragglers_are_the_reason_to_average_less_often(
    capsys: pytest.CaptureFixture[str], small: Path
) -> None:
    found = document(call(capsys, "whatif", small, "--json", "--resamples", "50"))
    assert found["pattern"]["shape"] == "transient"
    assert found["gains"]["drawn"] == "random"
    assert found["gains"]["best"] == "local-4"
    assert found["verdict"].startswith("fastest: local-4, 1.")


def test_json_has_all_ranks_and_steps(capsys: pytest.CaptureFixture[str], mixed: Path) -> None:
    found = document(call(capsys, "whatif", mixed, "--json", "--resamples", "10"))
    assert sorted(found) == sorted(
        [
            *("job", "schedule", "trace", "world_size", "first_step", "steps", "slowdown", "lost_share", "traced_s"),
            *("replayed_s", "explained_s", "ideal_s", "pattern", "kinds", "channels", "ranks", "nodes", "by_step"),
            *("slowest_ranks", "fixed_by_ranks", "slowest_node", "fixed_by_node", "stragglers", "cluster", "gains"),
            *("verdict", "imported", "remarks"),
        ]
    )
    assert [rank["rank"] for rank in found["ranks"]] == list(range(8))
    assert [step["step"] for step in found["by_step"]] == list(range(12))
    assert found["ranks"][6]["lost_s"] == pytest.approx(0.025)
    assert [step["slowest_rank"] for step in found["by_step"] if step["slowdown"] > 1.7] == [1, 3]
    assert found["slowdown"] == pytest.approx(found["replayed_s"] / found["ideal_s"])
    assert {kind["channel"] for kind in found["kinds"]} == {"host", "compute", "communication"}
    gains = found["gains"]
    assert list(gains) == [
        *("baseline", "baseline_step_s", "drawn", "runs", "steps", "recorded_steps", "block_steps", "rows"),
        *("fastest", "best"),
    ]
    assert [row["schedule"] for row in gains["rows"]] == ["local-4", "hsgd-2-4,4-world"]
    assert sorted(gains["rows"][0]) == [
        *("engine", "is_sure", "problem", "schedule", "speedup", "speedup_95", "step_s"),
    ]


def test_a_scenario_may_be_looked_at_in_part_and_under_another_schedule(
    capsys: pytest.CaptureFixture[str], mixed: Path
) -> None:
    found = document(
        call(capsys, "whatif", mixed, "--json", "--steps", "4:6", "--schedule", "local-4", "--resamples", "0")
    )
    assert (found["first_step"], found["steps"], found["schedule"]) == (4, 2, "local-4")
    assert (found["gains"], found["verdict"]) == (None, None)


def test_a_recording_that_is_resampled_is_looked_at_as_it_happened(
    capsys: pytest.CaptureFixture[str], mixed: Path
) -> None:
    """As with an imported job: step 4 is step 4, and what is longer than the recording was never seen."""
    text = MIXED.replace("file: late.csv}", "file: late.csv, resample_steps: 3}").replace("steps: 12", "steps: 40")
    longer = write(mixed.with_name("longer.yaml"), text)
    found, other = (document(call(capsys, "whatif", path, "--json", "--resamples", "2")) for path in (longer, mixed))
    assert found["by_step"] == other["by_step"]
    assert found["gains"]["block_steps"] == 3


def test_of_a_run_the_delays_that_it_had_are_resampled(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    found = document(call(capsys, "whatif", runs, "--json", "--resamples", "20"))
    assert (found["schedule"], found["trace"]) == ("sync", "simulated by fast")
    assert found["gains"]["drawn"] == "recorded"
    assert (found["gains"]["recorded_steps"], found["gains"]["block_steps"]) == (12, 2)
    assert [row["schedule"] for row in found["gains"]["rows"]] == ["hsgd-2-4,4-world", "local-4"]
    again = document(call(capsys, "whatif", runs, "--json", "--resamples", "20", "--seed", "7"))
    assert again["slowdown"] == found["slowdown"]
    assert again["gains"]["rows"] != found["gains"]["rows"]


def test_a_run_alone_is_compared_with_built_in_schedules(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    found = document(call(capsys, "whatif", runs / "sync", "--json", "--resamples", "5"))
    labels = [row["schedule"] for row in found["gains"]["rows"]]
    assert labels == ["local-2", "local-4", "local-8", "hsgd-2-4,4-8", "hsgd-2-4,8-8"]


def test_schedules_are_chosen_by_label_though_labels_have_commas(
    capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    wanted = "local-8,hsgd-2-4,4-world,local-4"
    found = document(call(capsys, "whatif", runs, "--json", "--resamples", "2", "--schedules", wanted))
    assert [row["schedule"] for row in found["gains"]["rows"]] == ["local-8", "hsgd-2-4,4-world", "local-4"]


def test_schedules_may_stand_in_a_file(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "more.yaml", edited(("{kind: local_sgd, period: 4}", "{kind: local_sgd, period: 3}")))
    found = document(call(capsys, "whatif", runs / "sync", "--json", "--resamples", "2", "--schedules", file))
    assert [row["schedule"] for row in found["gains"]["rows"]] == ["local-3", "hsgd-2-4,4-world"]


def test_the_measured_trace_is_preferred(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    pretend_measured(runs / "sync")
    found = document(call(capsys, "whatif", runs, "--json", "--resamples", "2"))
    assert found["trace"] == "real by hand"
    other = document(call(capsys, "whatif", runs, "--json", "--resamples", "2", "--trace", "simulated"))
    assert other["trace"] == "simulated by fast"
    assert found["slowdown"] == other["slowdown"]


def test_what_is_in_no_operation_is_told_and_kept(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    pretend_measured(runs / "sync", stretch_s=1e-3)
    answer = call(capsys, "whatif", runs / "sync", "--resamples", "2")
    assert re.search(r"^replayed .* per step, traced .* is in no operation of the plan", answer.out, re.MULTILINE)


def test_a_simulation_that_is_far_from_the_measured_step_is_warned_of(
    capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    """Transfers that take 30 ms longer than the scenario says are no delay of any rank."""
    run = runs / "sync"
    trace = pretend_measured(run)
    reduces = [row for row in range(trace.plan.n_instances) if "AllReduce" in type(_op(trace, row)).__name__]
    shift = np.zeros((trace.plan.n_instances, 1))
    for row in reduces:
        trace.end_s[row] += 0.03
        shift[row + 1 :] += 0.03
    for times in (trace.ready_s, trace.start_s, trace.end_s):
        times += shift
    trace.save(run / run_directory.REAL)
    answer = call(capsys, "whatif", run, "--resamples", "2")
    said = " ".join(answer.out.split())
    assert "as simulated: the speed-ups are those of the simulation; `simdist validate` shows which" in said


def _op(trace: Trace, row: int) -> object:
    first = trace.plan.first_instances()
    step = int(np.searchsorted(first, row, side="right")) - 1
    return trace.plan.bodies[list(trace.plan.body_of_steps())[step]][row - int(first[step])]


def test_a_run_that_ended_early_is_looked_at_as_far_as_it_came(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    pretend_measured(runs / "sync", n_unfinished=8)
    answer = call(capsys, "whatif", runs / "sync", "--json", "--resamples", "2")
    found = document(answer)
    assert found["steps"] == 10
    unfinished = "only the first 10 of 12 steps were finished on all ranks"
    assert [each["kind"] for each in found["remarks"] if each["text"].endswith(unfinished)] == ["accuracy"]


def gains_of(*steps_s: tuple[float, tuple[float, float] | None, str | None], n_recorded: int | None = 20) -> Gains:
    """Return gains of local-1, local-2, ...: speed-up, interval, problem."""
    rows = tuple(
        Gain(f"local-{number}", 1 / speedup, speedup, interval, "fast", problem)
        for number, (speedup, interval, problem) in enumerate(steps_s, start=1)
    )
    recording = ResampledRecording(n_recorded, 4, is_stated=False) if n_recorded else None
    return Gains("sync", 1.0, rows, "recorded" if n_recorded else "random", 200, 80, recording, ())


@pytest.mark.parametrize(
    ("compared", "sentence"),
    [
        (
            gains_of((1.1, (1.05, 1.2), None), (1.2, (1.1, 1.3), None)),
            "fastest: local-2, 1.20 times as fast as sync (1.10 to 1.30)",
        ),
        (
            gains_of((1.1, (1.05, 1.2), None), (1.2, None, "20 recorded steps are too few")),
            "fastest: local-2, 1.20 times as fast as sync, but not surely (20 recorded steps are too few); surely "
            "faster: local-1, 1.10 times (1.05 to 1.20 from 20 recorded steps)",
        ),
        (
            gains_of((1.1, (0.9, 1.3), None), (0.9, (0.8, 0.95), None)),
            "stay with sync until something is surely faster; fastest: local-1, 1.10 times as fast as sync, but "
            "not surely (0.90 to 1.30 from 20 recorded steps)",
        ),
        (
            gains_of((1.1, None, "2 runs are too few"), n_recorded=None),
            "stay with sync until something is surely faster; fastest: local-1, 1.10 times as fast as sync, but not "
            "surely (2 runs are too few)",
        ),
        (
            gains_of((1.1, (0.9, 1.3), None), n_recorded=None),
            "stay with sync: no schedule is surely faster; what is saved by waiting less often is not more than what "
            "chance makes of it",
        ),
        (
            gains_of((0.9, (0.8, 0.95), None)),
            "stay with sync: no schedule is faster; what is saved by waiting less often is not more than what chance "
            "makes of it",
        ),
    ],
)
def test_the_verdict_never_calls_a_slower_one_the_fastest(compared: Gains, sentence: str) -> None:
    found = analysed(job("{kind: transient, probability: 5%, delay: 100 ms}"))
    assert verdict_sentence(found, find_pattern(found), compared) == sentence


def test_gains_may_be_those_of_other_links(
    capsys: pytest.CaptureFixture[str], small: Path, runs: Path, tmp_path: Path
) -> None:
    """The loss in the trace stays as it was; seldom averaging gains more the slower the network is."""
    cluster = "nodes: 2\ngpus_per_node: 4\nfabric: ideal\nnetwork: {latency: 25 us, bandwidth: 1 Gbit/s}\n"
    slower = write(tmp_path / "links.yaml", cluster)
    for name in (small, runs):
        own, other = (
            document(call(capsys, "whatif", name, "--json", "--resamples", "50", *more))
            for more in ([], ["--cluster", slower])
        )
        assert (own["cluster"], other["cluster"]) == (None, str(slower))
        gained, gained_more = (
            {row["schedule"]: row["speedup"] for row in each["gains"]["rows"]}["local-4"] for each in (own, other)
        )
        assert gained_more > gained + 0.03
        assert own["trace"] == other["trace"]
    assert other["slowdown"] == own["slowdown"]
    assert call(capsys, "whatif", small, "--resamples", "2", "--cluster", "v100x8-25gbit").code == 0


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("v100", "--cluster v100: there is no such file, nor a preset of that name: "),
        ("four.yaml", "four.yaml: has 4 nodes x 1 GPUs, small has 2 x 4: write as many, or calibrate the machines"),
    ],
)
def test_links_of_other_machines_are_refused(
    capsys: pytest.CaptureFixture[str],
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: str,
    message: str,
) -> None:
    write(small.with_name("four.yaml"), "{nodes: 4, gpus_per_node: 1, fabric: ideal, network: ideal}\n")
    monkeypatch.chdir(small.parent)
    answer = call(capsys, "whatif", small, "--cluster", cluster)
    assert answer.code == 2
    assert message in answer.err


def test_what_a_recording_or_whole_periods_give_an_effect_is_not_called_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`simdist compare` plays 12 steps of the recording as they were; here they are drawn, and local-16 averages."""
    np.savetxt(tmp_path / "late.csv", LATE, delimiter=",")
    drawn = "{kind: transient, probability: 10%, delay: 50 ms}"
    text = edited((drawn, "{kind: recorded, file: late.csv}"), ("period: 4}", "period: 16}"))
    scenario = write(tmp_path / "job.yaml", text)
    assert "seed has no effect" in call(capsys, "compare", scenario, "--seeds", "1").err
    assert call(capsys, "whatif", scenario, "--resamples", "2").err == ""


def test_blocks_that_are_stated_too_short_are_warned_of(capsys: pytest.CaptureFixture[str], mixed: Path) -> None:
    answer = call(capsys, "whatif", mixed, "--resamples", "2", "--block", "3")
    assert "blocks of 3 steps, as stated, are shorter than the longest period, 4 steps" in " ".join(answer.out.split())


def test_a_run_without_a_trace_is_refused(capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path) -> None:
    call(capsys, "plan", small, "-o", tmp_path / "run", "--schedule", "sync")
    answer = call(capsys, "whatif", tmp_path / "run")
    assert answer.code == 2
    assert f"{tmp_path / 'run'}: has no trace.real.npz and no trace.simulated.npz: `simdist simulate" in answer.err
    measured = call(capsys, "whatif", tmp_path / "run", "--trace", "real")
    assert f"{tmp_path / 'run'}: has no trace.real.npz: " in measured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "snyc"], "no schedule is labelled 'snyc': did you mean 'sync'?"),
        (["--schedules", "local-4,lcal-8"], "--schedules 'lcal-8': is no file, and no label of a schedule, such as"),
        (["--trace", "real"], "--trace real: is a scenario, which has no traces; give a run directory"),
        (["--steps", "20:30"], "steps 20:30: plan sync has the steps 0 to 11"),
        (["--block", "0"], "0 is not in the range x>=1"),
        (["--resamples", "999999999"], "999999999 is not in the range 0<=x<=1000000"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str], small: Path, options: list[str], message: str
) -> None:
    answer = call(capsys, "whatif", small, *options)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert "Traceback" not in answer.err


def test_a_block_longer_than_the_recording_is_refused(capsys: pytest.CaptureFixture[str], mixed: Path) -> None:
    answer = call(capsys, "whatif", mixed, "--block", "13")
    assert answer.code == 2
    assert "blocks of 13 steps; 12 were recorded: write --block 2" in answer.err


def test_a_run_without_that_schedule_is_refused(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    answer = call(capsys, "whatif", runs, "--schedule", "local-9")
    assert answer.code == 2
    assert "no run is labelled 'local-9'" in answer.err


def test_a_trace_without_one_finished_step_is_refused(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    pretend_measured(runs / "sync", n_unfinished=10**6)
    answer = call(capsys, "whatif", runs / "sync")
    assert answer.code == 2
    assert "trace.real.npz: no step was finished on all ranks" in answer.err


def test_a_damaged_trace_is_refused(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    (runs / "sync" / run_directory.SIMULATED).write_bytes(b"PK\x03\x04")
    answer = call(capsys, "whatif", runs / "sync")
    assert answer.code == 2
    assert "trace.simulated.npz: cannot be read as a trace" in answer.err


def test_what_is_no_job_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, message in ((tmp_path, "is no run directory"), (tmp_path / "absent.yaml", "there is no such file")):
        answer = call(capsys, "whatif", name)
        assert answer.code == 2
        assert message in answer.err


def test_a_scenario_that_memory_does_not_hold_is_refused_with_steps_that_it_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer = call(capsys, "whatif", write(tmp_path / "long.yaml", SMALL.replace("steps: 12", "steps: 10000000")))
    assert answer.code == 2
    assert "what memory holds: look at fewer steps, e.g. --steps 0:" in answer.err
