"""A watch names the ranks that are late while they train, in jobs of real processes, and never holds them up."""

import csv
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pool import Pool
from processes import ROOT, start

pytest.importorskip("torch")

import watched_loops
from watched_loops import Sleeps

from real.watching.tracing import TraceMark


def planned_work_s(n_steps: int, seed: int = 3) -> np.ndarray:
    return 0.1 * np.random.default_rng(seed).lognormal(0.0, 0.03, (n_steps, 4))


# --- real sleeps ---

LATE = Sleeps(always_s={2: 0.15}, once_s={(1, 17): 1.0})  # more than a machine under load adds


@pytest.mark.parametrize("kind", ["ddp", "buffers", "accumulated", "by hand", "wrapped", "wrapped local"])
def test_injected_sleeps_are_named_with_rank_step_and_size(four: Pool, kind: str) -> None:
    windows, *others = four.run(watched_loops.train, kind, 24, 12, LATE)
    assert others == [[], [], []]  # only rank 0 reports
    assert [(each.first_step, each.last_step) for each in windows] == [(2, 11), (12, 23)]
    for window in windows:
        assert window.ranks[2].kind == "persistent"
        assert window.ranks[2].ms == pytest.approx(150, rel=0.4)
    assert windows[1].ranks[1].worst_step == 17
    assert windows[1].ranks[1].worst_ms == pytest.approx(1000, rel=0.3)
    assert {each.rank for each in windows[1].ranks if each.kind == "persistent"} == {2}


@pytest.mark.parametrize(("at", "step"), [("loss", 13), ("end", 14)])
def test_a_sleep_counts_to_the_step_whose_exchange_it_holds_up(four: Pool, at: str, step: int) -> None:
    sleeps = Sleeps(once_s={(3, 13): 1.0}, at=at)
    window, *_ = four.run(watched_loops.train, "ddp", 20, 20, sleeps)[0]
    assert window.ranks[3].worst_step == step


def test_a_rank_that_computes_slowly_under_fully_shard_is_named(four: Pool) -> None:
    windows, *_ = four.run(watched_loops.train, "fully_shard", 24, 12, replace(LATE, at="forward"))
    assert [each.ranks[2].kind for each in windows] == ["persistent", "persistent"]
    assert windows[0].ranks[2].ms == pytest.approx(150, rel=0.4)
    assert windows[1].ranks[1].worst_step == 17
    assert [each.unseen for each in windows] == ["", ""]


def test_of_fsdp1_only_ranks_that_load_late_are_named_and_the_windows_say_so(four: Pool) -> None:
    windows, *_ = four.run(watched_loops.train, "fsdp", 24, 12, LATE)
    assert [each.ranks[2].kind for each in windows] == ["persistent", "persistent"]
    assert windows[1].ranks[1].worst_step == 17
    assert all("slow computing is not visible here" in str(each) for each in windows)


# --- planned times, exactly ---


def test_a_clean_job_names_no_rank(four: Pool) -> None:
    windows, mark, _ = four.run(watched_loops.train_as_planned, planned_work_s(90), 30)[0]
    assert [each.late for each in windows] == [(), (), ()]
    assert mark is None


def test_times_of_all_ranks_come_together_to_the_microsecond(four: Pool) -> None:
    work_s = planned_work_s(45)
    work_s[:, 2] += 0.02
    work_s[37, 1] += 0.08
    results = four.run(watched_loops.train_as_planned, work_s, 20)
    windows = results[0][0]
    assert [(each.first_step, each.last_step) for each in windows] == [(2, 19), (20, 39), (40, 44)]
    others_s = np.delete(work_s, 1, axis=1)
    assert windows[1].ranks[1].worst_ms == pytest.approx(1e3 * (work_s[37, 1] - np.median(others_s[37])), abs=2e-3)
    assert windows[1].ranks[1].late_steps == (37,)
    assert [each.kind for each in windows[1].ranks] == [None, "transient", "persistent", None]
    assert windows[1].step_ms == pytest.approx(1e3 * np.median(work_s[20:40].max(axis=1)), abs=2e-3)


def test_all_ranks_learn_which_step_to_trace_before_it_comes(four: Pool) -> None:
    work_s = planned_work_s(80)
    work_s[:, 2] += 0.02
    marks = [mark for _, mark, _ in four.run(watched_loops.train_as_planned, work_s, 20)]
    assert marks == [marks[0]] * 4
    assert isinstance(marks[0], TraceMark)
    assert (marks[0].rank, marks[0].kind) == (2, "persistent")
    assert 40 < marks[0].step < 80


def test_a_step_takes_two_moments(four: Pool) -> None:
    for _, _, n_taken in four.run(watched_loops.train_as_planned, planned_work_s(40), 20):
        assert n_taken == 2 * 40


# --- cost ---


@pytest.mark.parametrize(("kind", "n_moments"), [("ddp", 2), ("buffers", 4), ("accumulated", 2)])
def test_only_the_step_that_ends_a_window_exchanges_and_without_a_collective(
    four: Pool, kind: str, n_moments: int
) -> None:
    results = four.run(watched_loops.operations, kind, 12)
    assert [before for before, *_ in results] == [{}, {}, {}, {}]
    assert [moments for _, _, moments, _ in results] == [n_moments] * 4
    assert [others for *_, others in results] == [[], [], [], []]
    first = results[0][1]
    assert (first["multi_get"], first["set"]) == (1, 1)
    for _, after, _, _ in results[1:]:
        assert after["set"] == 1
        assert set(after) <= {"set", "check", "get", "delete_key"}
        assert sum(after.values()) <= 4


@pytest.mark.full
def test_the_benchmark_tells_machines_what_a_watch_costs() -> None:
    script = ROOT / "benchmarks" / "watch.py"
    with start([sys.executable, str(script)], 2, "--rounds", 2, "--steps", 2, "--json") as ranks:
        endings = ranks.wait()
    found = json.loads(endings[0].output.splitlines()[-1])
    assert 0 < found["lowest"] <= found["ratio"] <= found["highest"]
    assert found["cpu_share"] == pytest.approx(found["cpu_us"] / found["step_ms"] / 1e3)


# --- ranks that fail or end ---


def test_ranks_end_soon_after_one_is_killed_and_keep_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "lateness.csv"
    with start(watched_loops.killed, 4, file, 60) as ranks:
        endings = ranks.wait()
    assert {rank: ending.code for rank, ending in endings.items()} == {0: 3, 1: 3, 2: -signal.SIGKILL, 3: 3}
    assert all("ended after" in endings[rank].output for rank in (0, 1, 3))
    rows = rows_of(file)
    assert {int(row["rank"]) for row in rows if row["first_step"] in {"2", "10"}} == {0, 1, 2, 3}
    assert max(int(row["last_step"]) for row in rows) == 24  # what came after the last whole window, too


def test_ranks_may_do_different_numbers_of_steps(four: Pool) -> None:
    (windows, _), *_ = results = four.run(watched_loops.uneven, [40, 40, 40, 25], 10)
    assert [warnings for _, warnings in results] == [[], [], [], []]
    everyone = [0, 1, 2, 3]
    assert windows[:2] == [(2, 9, everyone), (10, 19, everyone)]
    assert (20, 24, everyone) in windows
    assert {step for first, last, ranks in windows if ranks == [0, 1, 2] for step in range(first, last + 1)} >= set(
        range(30, 40)
    )


def test_the_others_go_on_when_rank_0_ends_first(four: Pool) -> None:
    results = four.run(watched_loops.uneven, [15, 60, 60, 60], 10)
    assert [warnings for _, warnings in results] == [[], [], [], []]
    assert results[0][0][0] == (2, 9, [0, 1, 2, 3])


def test_a_rank_that_does_not_step_is_named_once_and_the_job_goes_on(four: Pool) -> None:
    results = four.run(watched_loops.one_does_not_step, 2, 1.0)
    [warning] = results[0][0]
    assert warning == (
        "real.watch: watches no longer: rank 2 has not written the times of steps up to 9 within 1 s; see the output "
        "there, and that it calls watch.step() in each step"
    )
    assert [told for told, _ in results[1:]] == [[], [], []]
    assert [steps for _, steps in results] == [30, 30, 0, 30]


def test_a_loop_that_does_not_say_where_it_waits_is_told_to(four: Pool) -> None:
    for [warning] in four.run(watched_loops.without_exchanges):
        assert warning == (
            "real.watch: no rank has waited for another so far, so a late one is not visible: pass the "
            "DistributedDataParallel or fully_shard model to real.watch, or exchange gradients within "
            "`with watch.waiting():`"
        )


def test_ranks_that_count_different_steps_are_told(four: Pool) -> None:
    [warning], *others = four.run(watched_loops.different_windows)
    assert warning.startswith(
        "real.watch: watches no longer: ranks count different steps: rank 0: 2-9; rank 1: 102-109; rank 2: 202-209"
    )
    assert others == [[], [], []]


def test_a_script_that_does_not_close_its_watch_ends_normally(tmp_path: Path) -> None:
    file = tmp_path / "lateness.csv"
    code = "import sys, watched_loops; watched_loops.never_closed(sys.argv[1])"
    with start([sys.executable, "-c", code], 2, file) as ranks:
        endings = ranks.wait()
    assert [(ending.code, ending.output) for ending in endings.values()] == [(0, "is over\n")] * 2
    assert {row["last_step"] for row in rows_of(file)} == {"9", "14"}


def test_a_wrapped_model_has_an_option_for_this(four: Pool) -> None:
    for error in four.run(watched_loops.wraps_and_watches):
        assert error == (
            "real.watch of a model that real.wrap made: write "
            "real.wrap(..., experiment=real.Experiment(watching=real.Watching())) instead"
        )


# --- resuming ---


def test_a_job_that_resumes_appends_to_its_file(four: Pool, tmp_path: Path) -> None:
    file = tmp_path / "lateness.csv"
    four.run(watched_loops.train_as_planned, planned_work_s(30), 10, file)
    before = file.read_text()
    file.write_text(before + "20,29,1")  # a machine went down while it wrote
    four.run(watched_loops.train_as_planned, planned_work_s(20), 10, file, 30)
    assert file.read_text().startswith(before)
    spans = list(dict.fromkeys((row["first_step"], row["last_step"]) for row in rows_of(file)))
    assert spans == [("2", "9"), ("10", "19"), ("20", "29"), ("32", "39"), ("40", "49")]
    assert len(rows_of(file)) == 4 * len(spans)


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))
