"""A profiled job of four processes comes back from its traces with the stragglers that were injected; and the page on
the round trip says what was recorded."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scripts import ROOT, load_script

torch = pytest.importorskip("torch")

import processes  # noqa: E402

from simdist.profiles import ImportOptions, find_traces, import_job, write_scenario  # noqa: E402
from simdist.profiles.steps.ranks import profile_rank  # noqa: E402
from simdist.report import insert_tables  # noqa: E402
from simdist.scenario import load  # noqa: E402

FOLDER = ROOT / "experiments" / "profile_round_trip"

RANKS, FIRST, TRACED, LAST = 4, 4, 10, 1
LAYER_S, SLOW_RANK, SLOW_FACTOR = 3e-3, 3, 9.0
LATE_S = {(5, 0): 0.5, (8, 1): 0.7, (11, 2): 0.6}  # step and rank: sizes that no busy machine brings about by itself


def train(folder: str) -> None:
    """Be a rank of the profiled job."""
    options = ["--layer-ms", f"{1e3 * LAYER_S:g}", "--slow-rank", f"{SLOW_RANK}", "--slow-factor", f"{SLOW_FACTOR:g}"]
    options += ["--steps", f"{FIRST + TRACED + LAST}", "--active-steps", f"{TRACED + LAST}", "--profile", folder]
    options += ["--stragglers", f"{folder}/late.csv", "--times", f"{folder}/times"]
    load_script(FOLDER / "train.py").main(options)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder with the traces of a job."""
    folder = tmp_path_factory.mktemp("traces")
    late_s = np.zeros((FIRST + TRACED + LAST, RANKS))
    for place, seconds in LATE_S.items():
        late_s[place] = seconds
    np.savetxt(folder / "late.csv", late_s, delimiter=",")
    endings = processes.run(train, RANKS, str(folder), environ={"GLOO_SOCKET_IFNAME": "lo"})
    assert [ending.code for ending in endings.values()] == [0] * RANKS, endings
    return folder


@pytest.fixture(scope="module")
def imported(traces: Path):
    profiles = [profile_rank(path) for path in find_traces([str(traces)])]
    return import_job(profiles, name="job", options=ImportOptions(steps=range(FIRST, FIRST + TRACED)))


def test_job_comes_back_with_its_ranks_steps_and_tensors(imported) -> None:
    assert imported.job.ranks == tuple(range(RANKS))
    assert imported.job.numbers == tuple(range(FIRST, FIRST + TRACED))
    counts = [tensor.count for tensor in imported.scenario.workload.tensors]
    assert counts == [250 * 250, 250] * 4 + [2500, 10]
    assert imported.scenario.workload.batch_size == 8
    assert imported.scenario.cluster.collectives.library == "gloo"


def test_no_undisturbed_part_of_the_step_is_shorter_than_the_sleeps_in_it(imported) -> None:
    assert imported.base.forward_s >= 4 * LAYER_S
    assert imported.base.backward_s >= 8 * LAYER_S


def test_late_ranks_are_found_in_their_steps_with_what_they_slept(imported, traces: Path) -> None:
    """On a busy machine they sleep longer than they were told."""
    on_host = [each for each in imported.stragglers if (each.kind, each.channel) == ("transient", "host")]
    found_s = {(each.steps[0], each.ranks[0]): each.seconds for each in on_host}
    for step, rank in LATE_S:
        *_, slept_s = json.loads((traces / "times" / f"rank{rank}.json").read_text(encoding="utf-8"))[step]
        assert slept_s >= LATE_S[step, rank]
        assert found_s[step, rank] == pytest.approx(slept_s, rel=0.1)


def test_slow_rank_is_found_as_persistent(imported) -> None:
    slowest = max((each for each in imported.stragglers if each.kind == "persistent"), key=lambda each: each.seconds)
    assert (slowest.ranks, slowest.channel) == ((SLOW_RANK,), "compute")
    assert slowest.seconds == pytest.approx((SLOW_FACTOR - 1) * 12 * LAYER_S, rel=0.1)


def test_scenario_plays_the_delays_and_gives_the_measured_step_back(imported, tmp_path: Path) -> None:
    write_scenario(imported, tmp_path / "job.yaml")
    scenario = load(tmp_path / "job.yaml")
    assert scenario.steps == TRACED
    assert {each.kind for each in scenario.disturbances} == {"recorded"}
    assert imported.proof.predicted_s == pytest.approx(imported.proof.measured_s, rel=0.1)


RUN = load_script(FOLDER / "run.py")
ADVISED = load_script(FOLDER / "advised.py")
CASES = [*RUN.CASES, *RUN.CONVNETS]
each_case = pytest.mark.parametrize("case", [*CASES, *RUN.SHARDED], ids=lambda case: case.slug)


@each_case
def test_recorded_scenarios_still_predict_what_was_recorded(case) -> None:
    (result,) = RUN.recorded([case])
    predicted_s = RUN.predict(load(RUN.RESULTS / f"{case.slug}.yaml"), case)
    assert {each.schedule: each.predicted_s for each in result.timings} == pytest.approx(predicted_s, rel=1e-4)


@pytest.mark.parametrize("case", RUN.CASES, ids=lambda case: case.slug)
def test_recorded_steps_are_predicted_within_ten_per_cent_and_speedups_within_fifteen(case) -> None:
    (result,) = RUN.recorded([case])
    sync, *others = result.timings
    assert abs(sync.error) <= 0.10
    assert others
    assert max(abs(result.speedup_error(each)) for each in others) <= 0.15


@pytest.mark.parametrize("case", RUN.CONVNETS, ids=lambda case: case.slug)
def test_recorded_steps_of_real_arithmetic_are_predicted_within_five_per_cent(case) -> None:
    """Those that were imported, with the profiler: what the machine does in other windows is in the tables."""
    (result,) = RUN.recorded([case])
    assert abs(result.profiled_error) <= 0.05


@pytest.mark.parametrize("case", RUN.SHARDED, ids=lambda case: case.slug)
def test_recorded_steps_under_fully_shard_are_predicted_within_five_per_cent_of_steps_without_a_profiler(case) -> None:
    """Where windows without it differ by more than that, of one of them."""
    (result,) = RUN.recorded([case])
    (timing,) = result.timings
    steps_s = timing.measured_s if result.spread > 0.05 else [timing.step_s]
    assert min(abs(timing.predicted_s / step_s - 1) for step_s in steps_s) <= 0.05


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ < "2.13", reason="names of operators and annotations are those of torch 2.13")
def test_a_job_under_fully_shard_is_profiled_imported_and_predicted(tmp_path: Path) -> None:
    result = RUN.run_tiny(RUN.TINY_SHARDED, tmp_path)
    assert [each.schedule for each in result.timings] == ["fsdp-blocking"]
    assert result.profiled_error == pytest.approx(0.0, abs=0.5)


def test_stragglers_of_sharded_jobs_are_found() -> None:
    delays = [each for result in RUN.recorded(RUN.SHARDED) for each in result.delays]
    injected = [each for each in delays if each.injected_s]
    assert {each.kind for each in injected} == {"transient", "persistent"}
    assert all(each.found_s == pytest.approx(each.injected_s, rel=0.1) for each in injected)


def test_recorded_stragglers_are_those_that_were_injected() -> None:
    delays = [each for result in RUN.recorded(RUN.CASES) for each in result.delays]
    assert {each.kind for each in delays} == {"transient", "persistent"}
    assert all(each.found_s == pytest.approx(each.injected_s, rel=0.1) for each in delays)
    assert len(delays) == 20


def test_results_are_of_the_jobs_and_stragglers_that_the_experiment_has() -> None:
    cases = [*CASES, *RUN.SHARDED]
    for case, result in zip(cases, RUN.recorded(cases), strict=True):
        assert [each.schedule for each in result.timings] == [each.label for each in case.schedules]
        injected = sorted(each.injected_s for each in result.delays if each.kind == "transient" and each.injected_s)
        assert injected == sorted(case.late_s[case.late_s > 0])
        slow = [(each.rank, each.injected_s) for each in result.delays if each.kind == "persistent" and each.injected_s]
        assert slow == ([] if case.slow_rank is None else [(case.slow_rank, pytest.approx(case.slow_s))])


def test_page_shows_the_recorded_results() -> None:
    found = RUN.recorded(CASES)
    page = RUN.PAGE.read_text(encoding="utf-8")
    shown = RUN.tables(found[: len(RUN.CASES)], found[len(RUN.CASES) :])
    assert insert_tables(page, shown | RUN.sharded_tables(RUN.recorded(RUN.SHARDED))) == page


def test_summary_names_the_worst_error_of_every_kind_of_job() -> None:
    asleep, convnets = RUN.recorded(RUN.CASES), RUN.recorded(RUN.CONVNETS)
    emulated, inside, _, earnest = RUN.kept.summary(asleep, convnets)
    assert inside.startswith(f"* Of the {sum(len(result.timings) - 1 for result in asleep)} measured speed-ups")
    for results, line in ((asleep, emulated), (convnets, earnest)):
        speedups = [result.speedup_error(timing) for result in results for timing in result.timings[1:]]
        syncs = [result.timings[0].error for result in results]
        for error in (min(syncs), max(syncs), min(speedups), max(speedups)):
            assert f"{error:+.1%}" in line


def test_error_of_an_averaging_schedule_is_the_sum_of_its_parts() -> None:
    timings = (RUN.Timing("sync", (0.1,), 0.1), RUN.Timing("local-8", (0.050,), 0.056))
    result = RUN.Result("job", timings, 0.1, RUN.Computing("local-8", 0.045, 0.043, 0.042), ())
    *_, row = RUN.kept.computing_table([result])
    assert row == "| job | `local-8` | 45.0 | 43.0 | 42.0 | +6.0 | +1.0 | +2.0 | +3.0 |"


def test_windows_begin_with_a_period_and_end_with_an_average() -> None:
    for case in CASES:
        starts = RUN.round_trip_jobs._starts(case, RUN.LOCAL_8)
        assert len(starts) == RUN.round_trip_jobs.PLAIN_WINDOWS + 1
        assert all(start % 8 == 1 and (start + case.window_steps - 1) % 8 == 0 for start in starts)
        assert all(after - before >= case.window_steps for before, after in pairwise(starts))


# ---------------------------------------------------------------- twenty ordinary jobs


def test_gains_of_advised_schedules_are_in_the_stated_interval_in_eighteen_of_twenty_jobs() -> None:
    found = ADVISED.read()
    assert [each.job for each in found] == [case.name for case in ADVISED.ADVISED]
    assert sum(each.is_inside for each in found) >= 18
    page = ADVISED.PAGE.read_text(encoding="utf-8")
    assert insert_tables(page, ADVISED.tables(found)) == page


def test_a_gain_beside_its_interval_is_told_with_its_side() -> None:
    advice = ADVISED.Advice("job", "local-8", True, (1.1, 1.2), 1.15, (0.1,), (0.08,))
    sides = [advice, replace(advice, measured_s=(0.087,)), replace(advice, measured_s=(0.095,), is_sure=False)]
    assert [each.is_inside for each in sides] == [False, True, False]
    _, _, *rows = ADVISED.tables(sides)["advised"].splitlines()
    assert [row.split(" | ")[-1] for row in rows] == ["above |", "yes |", "below |"]
    assert "`local-8`, not surely" in rows[2]
