"""What `simdist init --from` writes of logs that tell failures: a scenario with rates, their intervals and recovery."""

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import call

from simdist import scenario
from simdist.drafts.logged_failures import draft_failures
from simdist.errors import ScenarioError
from simdist.scenario.fields import find_field, parse_path, value_at

HOUR_S = 3600.0
YEAR_S = 8760 * HOUR_S
HEADER = "JobID|State|Start|End|Elapsed|AllocTRES|NodeList"
TRES = "cpu=96,gres/gpu=16,node=2"


def sacct(*states: str, wait_h: int = 1) -> str:
    """Return one job after the other, on 16 GPUs for 22 hours each and with the same number, as if requeued."""
    lines = [HEADER]
    for day, state in enumerate(states, 1):
        times = f"2026-03-{day:02}T0{wait_h}:00:00|2026-03-{day:02}T23:00:00|{23 - wait_h}:00:00"
        lines.append(f"7|{state}|{times}|{TRES}|cn[1-2]")
    return "\n".join(lines) + "\n"


def torchrun(code: int, minutes: int = 90) -> str:
    at = f"0{minutes // 60}:{minutes % 60:02}"
    where = "torch/distributed/elastic/agent/server/api.py:1]"
    return (
        f"I0301 00:00:00.000000 7 {where} [default] Rendezvous complete for workers. Result:\n"
        f"I0301 00:00:00.000000 7 {where}   global_world_sizes=[4, 4, 4, 4]\n"
        f"E0301 {at}:00.000000 7 {where} failed (exitcode: {code}) local_rank: 0 (pid: 9) of binary: python\n"
        f"I0301 {at}:40.000000 7 {where} [default] Rendezvous complete for workers. Result:\n"
    )


def init(capsys, folder: Path, *texts: str) -> tuple[scenario.Scenario, dict[str, Any], str]:
    """Write a scenario from logs; return it, the answer, and its text."""
    paths = [folder / f"log{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    sources = [each for path in paths for each in ("--from", path)]
    output = folder / "scenario.yaml"
    answer = call(
        capsys, "init", "--json", "-o", output, "--cluster", "dgx-h100", "--nodes", 2, "--workload", "gpt2", *sources
    )
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["next"] == f"simdist goodput {output}"
    return scenario.load(output), json.loads(answer.out)["failures"], output.read_text(encoding="utf-8")


def test_a_log_of_slurm_gives_rates_by_component_with_ranges(tmp_path, capsys):
    written, answer, text = init(capsys, tmp_path, sacct("NODE_FAIL", "FAILED", "NODE_FAIL", "TIMEOUT"))
    by_cause = {each.cause: each for each in written.failures.causes}
    assert {name: (each.of, each.effect) for name, each in by_cause.items()} == {
        "node failure": ("node", "node"),
        "failed job": ("gpu", "process"),
    }
    exposure_s = 4 * 22 * HOUR_S
    assert by_cause["node failure"].rate_per_s == pytest.approx(2 / (2 * exposure_s), rel=1e-3)
    assert by_cause["failed job"].rate_per_s == pytest.approx(1 / (16 * exposure_s), rel=1e-3)
    ends = written.uncertain["failures.causes[0].rate"]
    assert ends.source == "95 % interval of 2 events in 176 node-hours"
    assert written.failures.recovery.schedule_s == 2 * HOUR_S
    assert "unknown: detect, diagnose, start, connect, warm_up. Until you write them they take no time." in text
    assert "not counted as failures: 1 reached the time limit." in text
    assert answer["not_counted"] == {"reached the time limit": 1}


def test_the_written_ranges_are_the_intervals(tmp_path, capsys):
    written, answer, _ = init(capsys, tmp_path, sacct(*["FAILED"] * 7))
    for path, ends in written.uncertain.items():
        field = find_field(written, parse_path(path))
        low, high = float(field.number(ends.from_)), float(field.number(ends.to))
        assert low <= value_at(written, parse_path(path)) <= high
        rates = {f"failures.causes[{i}].rate": each for i, each in enumerate(answer["rates"])}
        if path in rates:
            assert (low, high) == pytest.approx((rates[path]["low_per_s"], rates[path]["high_per_s"]), rel=1e-3)
    assert "failures.recovery.schedule" not in written.uncertain  # all waits are the same


def test_no_event_gives_a_rate_above_0_and_a_bound(tmp_path, capsys):
    written, answer, text = init(capsys, tmp_path, sacct("COMPLETED"))
    of_node, of_gpu = answer["rates"]
    assert (of_node["n_events"], of_node["low_per_s"]) == (0, 0.0)
    assert of_node["high_per_s"] == pytest.approx(3.6889 / (44 * HOUR_S), rel=1e-4)
    assert 0 < of_gpu["rate_per_s"] < of_gpu["high_per_s"]
    assert all(each.rate_per_s > 0 for each in written.failures.causes)
    assert "0 events in 44 node-hours" in text
    assert written.failures.recovery.schedule_s is None


def test_a_preemption_is_planned_and_lasts_until_the_next_start(tmp_path, capsys):
    written, _, _ = init(capsys, tmp_path, sacct("PREEMPTED", "COMPLETED"))
    cause = next(each for each in written.failures.causes if each.cause == "preemption")
    assert (cause.effect, cause.of, cause.lasts_s) == ("planned", "job", 2 * HOUR_S)


@pytest.mark.parametrize("code", [1, -9, -11, -6])
def test_a_log_of_torchrun_gives_a_rate_and_the_time_of_a_restart(tmp_path, capsys, code):
    written, _, _ = init(capsys, tmp_path, torchrun(code))
    (cause,) = written.failures.causes
    assert cause.effect == "process"
    assert cause.rate_per_s == pytest.approx(1 / (5400 * (1 if cause.of == "job" else 4)), rel=1e-3)
    assert written.failures.recovery.start_s == 40


def test_a_hang_has_its_time_out(tmp_path, capsys):
    watchdog = (
        "[rank0]:[E301 02:00:00.000000000 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600000 milliseconds before"
    )
    begin, _, *_ = torchrun(1).splitlines()
    written, _, _ = init(capsys, tmp_path, f"{begin}\n{watchdog}\n")
    (cause,) = written.failures.causes
    assert (cause.effect, cause.of) == ("hang", "job")
    assert written.failures.recovery.timeouts == {"collective": 600.0}


def test_records_of_goodput_give_parts_of_the_recovery(tmp_path, capsys):
    records = []
    for begin, first in ((0, 0), (2000, 90), (4000, 180)):
        records += [{"job_start_time": begin}, {"tpu_init_start_time": begin + 5}, {"tpu_init_end_time": begin + 35}]
        records += [{"step_count": first + i, "step_start_time": begin + 100 + 10 * i} for i in range(100)]
    text = "\n".join(json.dumps({"job_name": "a", **each}) for each in records)
    written, answer, _ = init(capsys, tmp_path, text)
    (cause,) = written.failures.causes
    assert (cause.cause, cause.of) == ("interruption", "job")
    recovery = written.failures.recovery
    assert (recovery.schedule_s, recovery.start_s, recovery.connect_s) == (900, 5, 30)
    assert any("repeated 10 steps" in note for note in answer["notes"])


def test_logs_of_a_second_program_do_not_count_the_failures_again(tmp_path, capsys):
    written, answer, _ = init(capsys, tmp_path, sacct("FAILED", "COMPLETED"), torchrun(-9))
    assert [each.cause for each in written.failures.causes] == ["node failure", "failed job"]
    assert (written.failures.recovery.schedule_s, written.failures.recovery.start_s) == (2 * HOUR_S, 40)
    assert any("only parts of the recovery" in note for note in answer["notes"])


def test_without_any_length_the_block_is_a_comment(tmp_path, capsys):
    written, answer, text = init(capsys, tmp_path, "x torchelastic failed (exitcode: -9) local_rank: 0 (pid: 3)\n")
    assert written.failures is None
    assert answer["rates"][0]["rate_per_s"] is None
    assert "#     # killed (SIGKILL): 1 event; rate unknown: how long it ran is not in" in text


def test_a_log_may_stand_beside_a_model(tmp_path, capsys):
    (tmp_path / "sacct.txt").write_text(sacct("NODE_FAIL", "COMPLETED"), encoding="utf-8")
    model = Path(__file__).parents[3] / "docs" / "examples" / "llama3-8b.toml"
    output = tmp_path / "scenario.yaml"
    answer = call(capsys, "init", "-o", output, "--from", model, "--from", tmp_path / "sacct.txt")
    assert answer.code == 0, answer.err
    written = scenario.load(output)
    assert {path.split(".")[0] for path in written.uncertain} == {"workload", "failures"}
    assert "failures in" in answer.out


def test_damage_of_a_log_is_one_error(tmp_path, capsys):
    path = tmp_path / "sacct.txt"
    path.write_text(sacct("NODE_FAIL").replace("22:00:00", "a day"), encoding="utf-8")
    answer = call(capsys, "init", "-o", tmp_path / "scenario.yaml", "--from", path)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.splitlines() == [f"error: {path}:2: Elapsed 'a day': write e.g. 1-02:03:04 or 02:03:04"]
    assert not (tmp_path / "scenario.yaml").exists()


def test_medians_have_intervals_of_six_or_more(tmp_path):
    lines = sacct(*["FAILED"] * 8).splitlines()
    for i in range(2, 9):  # a later start each day: waits from 2 h on
        lines[i] = lines[i].replace("T01:00:00", f"T01:{i:02}:00").replace("22:00:00", f"21:{60 - i}:00")
    (tmp_path / "log").write_text("\n".join(lines), encoding="utf-8")
    (part,) = draft_failures([tmp_path / "log"]).recovery
    found = part.document()
    assert (found["n"], found["median_s"], found["low_s"], found["high_s"]) == (7, 7500.0, 7320.0, 7680.0)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "x").write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match="is no log of"):
        draft_failures([tmp_path / "x"])


def test_tries_that_failed_are_written_with_the_interval_of_their_success(tmp_path, capsys):
    """A node fails; two starts fail within 30 s, 10 minutes after the end before; the third trains."""
    times = ("01T00:00:00|2026-03-01T23:00:00|23:00:00", "02T00:00:00|2026-03-02T00:00:30|00:00:30")
    more = ("02T00:10:30|2026-03-02T00:11:00|00:00:30", "02T00:21:00|2026-03-02T22:21:00|22:00:00")
    states = ("NODE_FAIL", "FAILED", "FAILED", "COMPLETED")
    rows = [f"7|{state}|2026-03-{at}|{TRES}|cn[1-2]" for state, at in zip(states, (*times, *more), strict=True)]
    written, answer, text = init(capsys, tmp_path, "\n".join([HEADER, *rows, ""]))
    tries = written.failures.recovery.tries
    assert (tries.success, tries.lost_s, tries.back_off_s) == (pytest.approx(1 / 3, rel=1e-3), 30.0, 600.0)
    assert "1 of 3 starts lasted a minute; 95 %: 0.8404 % to 90.57 %" in text
    assert written.uncertain["failures.recovery.tries.success"].from_ == "0.8404 %"
    assert answer["tries"]["n_tries"] == 3
    (tmp_path / "scenario.yaml").unlink()
    without, answer, _ = init(capsys, tmp_path, sacct("NODE_FAIL", "COMPLETED"))
    assert without.failures.recovery.tries is None
    assert "tries" not in answer
