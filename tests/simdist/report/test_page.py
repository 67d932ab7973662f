"""Pages about runs: their numbers are those of the analysis, nothing gets in or out, and everybody can read them."""

import base64
import dataclasses
import getpass
import hashlib
import itertools
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from browser import chromium, opened, wait_until
from commandline import LABELS, call, edited, write
from html_pages import Page, contrast, page_of

import simdist
from simdist.report import page as report_page
from simdist.report.page.charts import ticks
from simdist.report.page.document import DARK, LIGHT, json_block
from simdist.report.page.html import Html, escape, join, tag
from simdist.report.page.model import Execution
from simdist.report.page.sections.speed import speed_conclusion
from simdist.report.page.sections.stragglers import MOST_RANKS, MOST_STEPS, cells, packed, stragglers_conclusion
from simdist.report.page.sections.timelines import fitting_steps
from simdist.runs import run_directory
from simdist.scenario import load
from simdist.settings.units import format_seconds, in_range
from simdist.studies.comparison import Row, compare
from simdist.studies.validation import validate
from simdist.traces.breakdown import STATES, break_down
from simdist.traces.trace import Trace
from simdist.traces.waiting import attribute_waiting, first_steps, injected_s, only_steps, rank_table

EVIL = "<script>alert(1)</script>"
EVIL_LABEL = "<img src=x onerror=alert(2)>"  # without /, because it names a folder


# ---------------------------------------------------------------- runs and pages


def unpacked(text: str) -> np.ndarray:
    """Return the numbers that the script of the page reads, flat."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<f4")


def measured_like(trace: Trace, factor: float = 1.25) -> Trace:
    """Return a trace as a measurement would be that takes longer by a factor."""
    times = (array * factor for array in (trace.ready_s, trace.start_s, trace.end_s))
    return Trace(trace.plan, *times, source="real gloo on cpu, emulated")


def measure(run: Path, factor: float = 1.25, **report: object) -> None:
    simulated = run_directory.read_trace(run / run_directory.SIMULATED)
    run_directory.save_trace(measured_like(simulated, factor), run / run_directory.REAL)
    known = {
        "program": "emulated",
        "backend": "gloo",
        "device": "x86_64",
        "hosts": ["a", "a"],
        "versions": {"torch": "9"},
    }
    (run / run_directory.REPORT).write_text(json.dumps(known | report), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a directory of three runs that were simulated, two of them measured, and the pages of them."""
    from simdist.cli import main

    path = tmp_path_factory.mktemp("report")
    assert main(["simulate", str(write(path / "small.yaml")), "-o", str(path / "runs")]) == 0
    measure(path / "runs" / "sync", 1.25)
    measure(path / "runs" / "local-4", 1.1)
    assert main(["report", str(path / "runs"), "-o", str(path / "page.html")]) == 0
    return path


@pytest.fixture
def one(tmp_path, folder) -> Path:
    """Return a copy of a run that was only simulated."""
    return Path(shutil.copytree(folder / "runs" / "hsgd-2-4,4-world", tmp_path / "run"))


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return page_of(folder / "page.html")


def report(capsys, run: Path, *more: object) -> tuple[Page, str]:
    """Write a page; return it, and what was said."""
    output = run.parent / "page.html"
    answer = call(capsys, "report", run, "-o", output, *more)
    assert answer.code == 0, answer.err
    return page_of(output), answer.out


def traces(folder: Path) -> dict[tuple[str, str], Trace]:
    files = {"simulated": run_directory.SIMULATED, "measured": run_directory.REAL}
    return {
        (label, origin): run_directory.read_trace(folder / "runs" / label / name)
        for label in LABELS
        for origin, name in files.items()
        if (folder / "runs" / label / name).exists()
    }


# ---------------------------------------------------------------- numbers


def test_speed_ups_are_step_times_over_those_of_the_baseline(page, folder):
    table = page.rows("Step time, and speed-up over sync")
    found = traces(folder)
    assert list(table) == ["sync", "hsgd-2-4,4-world", "local-4"]
    for label in LABELS:
        expected = []
        for origin in ("simulated", "measured"):
            if (label, origin) in found:
                step_s, base_s = (found[each, origin].makespan_s / 12 for each in (label, "sync"))
                expected += [pytest.approx(step_s), pytest.approx(base_s / step_s)]
        assert table[label] == (expected if len(expected) == 4 else [*expected, "-", "-"])


def test_the_intervals_of_what_is_uncertain_are_those_of_compare(tmp_path, capsys):
    edits = ("steps: ", "uncertain: {cluster.network.bandwidth: {from: 10 Gbit/s, to: 30 Gbit/s}}\nsteps: ")
    scenario = write(tmp_path / "unsure.yaml", edited(edits))
    assert call(capsys, "simulate", scenario, "-o", tmp_path / "runs").code == 0
    assert call(capsys, "report", tmp_path / "runs", "-o", tmp_path / "page.html").code == 0
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    for row in compare(load(scenario), n_seeds=1):
        assert in_range(row.step_s, *row.step_s_range, form=format_seconds) in html
        assert in_range(row.speedup, *row.speedup_range) in html
    intervals = "the intervals of sync, hsgd-2-4,4-world, local-4 (100 % of the variance)"
    assert f"The largest part of {intervals} is from cluster.network.bandwidth (10 Gbit/s to 30 Gbit/s): " in html


def test_states_are_those_of_the_breakdown(page, folder):
    lines = page.tables["Time per step by state, average over ranks"][1:]
    found = traces(folder)
    assert {(line[0], line[1]) for line in lines} == set(found)
    for label, origin, step_s, *rest in lines:
        where = break_down(found[label, origin])
        assert step_s == where.step_s[0]
        assert rest[:5] == [where.per_step_s(state)[0] for state in STATES]
        assert sum(rest[:5]) == pytest.approx(step_s)


def test_ranks_that_caused_most_are_those_of_the_rank_table(page, folder):
    run = run_directory.read(folder / "runs" / "sync")
    trace = traces(folder)["sync", "measured"]
    table = page.rows("Seconds of waiting and of injected delays, sync, measured: all ranks")
    expected = rank_table(trace)
    assert [line[0] for line in table.values()] == sorted(expected.caused_s, reverse=True)
    for name, (caused_s, _, suffered_s, injected) in table.items():
        rank = int(name.removeprefix("rank "))
        assert (caused_s, suffered_s) == (expected.caused_s[rank], expected.suffered_s[rank])
        assert injected == run.delays["host"][0, :, rank].sum()


def test_comparison_is_that_of_validate(page, folder):
    found = traces(folder)
    run = run_directory.read(folder / "runs" / "local-4")
    validation = validate(found["local-4", "measured"], found["local-4", "simulated"], run.delays)
    assert page.rows("Makespans")["local-4"] == [validation.simulated_s, validation.measured_s, validation.error, "12"]
    (kinds,) = (rows for caption, rows in page.tables.items() if caption.startswith("Times of operations, local-4"))
    assert [row[4:7] for row in kinds[1:]] == [
        [kind.simulated_mean_s, kind.measured_mean_s, kind.error if kind.measured_total_s else "-"]
        for kind in validation.kinds
    ]
    blames = page.rows("Waiting that ranks caused, local-4: all ranks")
    assert list(blames.values()) == [[each.simulated_s, each.measured_s] for each in validation.blames]
    assert f"Stragglers: {validation.verdict}." in page.text
    assert "Waiting that ranks caused, hsgd-2-4,4-world: all ranks" not in page.tables


def test_bars_say_what_the_table_says(page):
    table = page.rows("Step time, and speed-up over sync")
    chart = next(each for each in page.all("svg") if "speed-up" in (each.attributes.get("aria-label") or ""))
    for label, (_, simulated, *_) in table.items():
        assert f"{label}, simulated: {simulated:.2f}" in chart.text
        assert f"simulated {simulated:.2f}" in chart.text


def test_lengths_of_bars_are_in_proportion(page):
    rects = [each.attributes for each in page.all("rect") if (each.attributes.get("class") or "") == "fill simulated"]
    widths = [float(rect["width"].removesuffix("%")) for rect in rects]
    speedups = [line[1] for line in page.rows("Step time, and speed-up over sync").values()]
    assert [width / widths[0] for width in widths] == pytest.approx(speedups, rel=1e-4)


def test_data_of_the_heat_map_are_the_waiting(page, folder):
    (block,) = (each for each in page.all("script") if each.attributes.get("id") == "stragglers-data")
    runs = {each["name"]: each for each in json.loads(block.text)}
    for (label, origin), trace in traces(folder).items():
        data, waits = runs[f"{label}, {origin}"], attribute_waiting(trace)
        assert (data["steps"], data["ranks"], data["stepsPerCell"], data["ranksPerCell"]) == (12, 8, 1, 1)
        for name, expected in (("caused", waits.caused_s), ("suffered", waits.suffered_s)):
            np.testing.assert_allclose(unpacked(data[name]), expected.ravel(), rtol=1e-5, atol=1e-12)


def test_cells_of_many_steps_and_ranks_are_summed_and_nothing_is_lost():
    seconds = np.random.default_rng(1).exponential(size=(3000, 700))
    found = cells(seconds)
    assert (found.steps_per_cell, found.ranks_per_cell) == (3, 3)
    assert found.seconds.shape[0] <= MOST_STEPS
    assert found.seconds.shape[1] <= MOST_RANKS
    assert found.seconds[1, 2] == pytest.approx(seconds[3:6, 6:9].sum())
    assert found.seconds[-1, -1] == pytest.approx(seconds[2997:, 699:].sum())
    np.testing.assert_allclose(unpacked(packed(found.seconds)), found.seconds.ravel(), rtol=1e-5)


def test_injected_are_only_delays_that_the_plan_performs(folder):
    run = run_directory.read(folder / "runs" / "sync")
    assert injected_s(run.plan, run.delays)["host"].sum() == run.delays["host"].sum() > 0
    undelayed = tuple(tuple(op for op in body if type(op).__name__ != "Delay") for body in run.plan.bodies)
    assert injected_s(dataclasses.replace(run.plan, bodies=undelayed), run.delays) == {}


def test_first_steps_are_a_trace_of_a_shorter_plan(folder):
    trace = traces(folder)["local-4", "simulated"]
    shorter = first_steps(trace, 5)
    assert shorter.plan.n_steps == 5
    assert (shorter.end_s == trace.end_s[: shorter.plan.n_instances]).all()
    assert attribute_waiting(shorter).caused_s == pytest.approx(attribute_waiting(trace).caused_s[:5])


def test_only_chosen_steps_did_run(folder):
    trace = traces(folder)["local-4", "simulated"]
    first = trace.plan.first_instances()
    ran = np.isfinite(only_steps(trace, range(3, 5)).end_s).all(axis=1)
    assert list(np.flatnonzero(ran)) == list(range(first[3], first[5]))


@pytest.mark.parametrize("longest", [1e-3, 0.7, 1.0, 1.25, 2.0, 6.0, 192.0, 12345.0])
def test_ticks_are_few_and_round(longest):
    found = ticks(longest)
    assert 3 <= len(found) <= 6
    assert found[0] == 0
    assert longest * 0.6 < found[-1] <= longest
    assert all(re.fullmatch(r"[125]0*|0\.0*[125]|[125]e[+-]\d+", f"{found[1]:g}") for _ in found)


# ---------------------------------------------------------------- sentences


def row(schedule: str, base_s: float, **states_s: float) -> Row:
    times = {f"{state}_s": states_s.get(state, 0.0) for state in STATES}
    step_s = sum(times.values())
    return Row(schedule, step_s, None, base_s / step_s, None, **times, engine="fast", seeds=1)


SENTENCES = {
    "faster": (
        {"compute": 0.1, "comm": 0.05},
        "a is 1.33 times as fast as base; all of the difference is exposed communication (-50 ms a step).",
    ),
    "faster by two states": (
        {"compute": 0.1, "comm": 0.075, "wait": 0.01, "host": -0.01},
        "a is 1.14 times as fast as base; all of the difference is exposed communication (-25 ms a step).",
    ),
    "slower": (
        {"compute": 0.1, "comm": 0.1, "wait": 0.05},
        "no schedule is faster than base; a comes next, 0.80 times as fast: all of the difference is waiting for "
        "others (+50 ms a step).",
    ),
    "as fast": ({"compute": 0.1, "comm": 0.1001}, "no schedule is faster than base; a takes as long, within 0.5 %."),
}


@pytest.mark.parametrize(("states_s", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_conclusion_names_the_factor_and_the_state_that_makes_it(states_s, sentence):
    rows = {"base": row("base", 0.2, compute=0.1, comm=0.1), "a": row("a", 0.2, **states_s)}
    assert speed_conclusion(rows, "base") == sentence


def test_conclusion_claims_no_lead_that_the_uncertain_leave_open():
    rows = {
        "base": row("base", 0.2, compute=0.1, comm=0.1),
        "a": dataclasses.replace(row("a", 0.2, compute=0.1, comm=0.08), speedup_range=(0.9, 1.3)),
    }
    said = "no schedule is surely faster than base; a is 1.11 (0.90-1.30) times as fast."
    assert speed_conclusion(rows, "base") == said


def test_conclusion_does_not_say_most_of_less_than_half():
    rows = {
        "base": row("base", 0.3, compute=0.1, comm=0.1, wait=0.06, host=0.04),
        "a": row("a", 0.3, compute=0.1, comm=0.06, wait=0.03, host=0.01),
    }
    assert "; the largest part of the difference is exposed communication (-40 ms a step)" in speed_conclusion(
        rows, "base"
    )


def test_page_names_the_rank_that_caused_most_and_what_was_injected(page, folder):
    run = run_directory.read(folder / "runs" / "sync")
    caused_s = attribute_waiting(traces(folder)["sync", "simulated"]).caused_by_rank_s
    rank = caused_s.argmax()
    assert f"sync, simulated: rank {rank} caused most waiting, {format_seconds(caused_s[rank])} or " in page.text
    n_delays, total_s = (run.delays["host"] > 0).sum(), run.delays["host"].sum()
    assert f"Injected delays: {n_delays} on host, {format_seconds(total_s)} in all, 50 ms at most." in page.text


def test_rank_that_caused_most_may_be_one_of_several_that_were_delayed_for_longest(folder):
    execution = Execution.of(traces(folder)["sync", "simulated"], origin="simulated", label="sync")
    rank = int(execution.waits.caused_by_rank_s.argmax())
    delays_s = np.full(8, 0.1)
    assert stragglers_conclusion(execution, delays_s).endswith(". No rank was delayed for longer (100 ms).")
    delays_s[rank - 1] = 0.2
    said = f". Delayed for longest was rank {(rank - 1) % 8} (200 ms)."
    assert stragglers_conclusion(execution, delays_s).endswith(said)
    assert "Delayed" not in stragglers_conclusion(execution, np.zeros(8))


def test_page_says_so_if_nobody_waited(capsys, tmp_path):
    text = edited(("probability: 10%", "probability: 0%"))
    call(capsys, "simulate", write(tmp_path / "quiet.yaml", text), "-o", tmp_path / "runs")
    page, _ = report(capsys, tmp_path / "runs")
    assert "In no collective of any run did a rank wait for another." in page.text
    assert "heat-canvas" not in {each.attributes.get("id") for each in page.elements}


# ---------------------------------------------------------------- what is on the page


def test_page_says_what_was_executed_with_what(page):
    facts = dict(zip((e.text for e in page.all("dt")), (e.text for e in page.all("dd")), strict=True))
    assert (facts["ranks"], facts["nodes"], facts["steps"], facts["seed"]) == ("8", "2 x 4 GPUs", "12", "1")
    assert (facts["simulated"], facts["measured"]) == ("by fast", "real gloo on cpu, emulated")
    machines = "program emulated, backend gloo, device x86_64; ranks: 2 on a; torch 9"
    assert facts["machines of sync, local-4"] == machines
    assert "simdist 0." in facts["page by"]
    assert np.__version__ in facts["page by"]


def test_page_has_the_scenario_and_every_plan(page, folder):
    summaries = [each.text for each in page.all("summary")]
    assert [each for each in summaries if each.startswith("plan of")] == [
        f"plan of {label}" for label in ("sync", "hsgd-2-4,4-world", "local-4")
    ]
    assert "scenario.yaml of local-4" in summaries
    codes = [each.text for each in page.all("code")]
    assert (folder / "runs" / "sync" / "scenario.yaml").read_text(encoding="utf-8").strip() in codes
    assert sum("all_reduce(" in code for code in codes) == 3


def test_json_says_what_was_written(capsys, folder, tmp_path):
    output = tmp_path / "page.html"
    answer = json.loads(call(capsys, "report", folder / "runs", "-o", output, "--json").out)
    assert (answer["report"], answer["nbytes"]) == (str(output), output.stat().st_size)
    assert answer["baseline"] == "sync"
    n_instances = {label: run_directory.read(folder / "runs" / label).plan.n_instances for label in LABELS}
    expected = {"sync": 2, "local-4": 2, "hsgd-2-4,4-world": 1}
    assert {run["schedule"]: run["spans"] for run in answer["runs"]} == {
        label: 8 * times * n_instances[label] for label, times in expected.items()
    }
    assert answer["spans"] == sum(run["spans"] for run in answer["runs"])
    assert list(answer["runs"][0]["step_s"]) == ["simulated", "measured"]


def test_equal_files_give_equal_bytes(capsys, folder, tmp_path, monkeypatch):
    copy = shutil.copytree(folder / "runs", tmp_path / "elsewhere" / "runs")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    for source, name in ((folder / "runs", "first"), (copy, "again")):
        call(capsys, "report", source, "-o", tmp_path / f"{name}.html")
    first, again = ((tmp_path / f"{name}.html").read_text(encoding="utf-8") for name in ("first", "again"))
    assert again == first.replace(f"simdist report {folder / 'runs'}<", f"simdist report {copy}<")
    assert "<dd>2026-09-21</dd>" in first


def test_the_page_says_what_it_was_made_of_and_not_by_whom(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    output = tmp_path / "page.html"
    call(capsys, "report", folder / "runs", "-o", output, "--baseline", "local-4", "--steps", "0:2")
    page = page_of(output)
    facts = dict(zip([each.text for each in page.all("dt")], [each.text for each in page.all("dd")], strict=True))
    assert facts["made by"] == "simdist report ~/runs --baseline local-4 --steps 0:2"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["on"])
    assert facts["seeds"] == "1"
    assert facts["with"].startswith(f"simdist {simdist.__version__}, Python ")
    text = output.read_text(encoding="utf-8")
    for label in LABELS:
        digest = hashlib.sha256((folder / "runs" / label / "scenario.yaml").read_bytes()).hexdigest()
        assert f"<code>{digest[:16]}</code>" in text
        assert f"scenario.yaml of {label}" in text
    assert "real.json of sync" in text
    assert "real.json of hsgd" not in text  # was not measured
    assert str(folder) not in text
    assert getpass.getuser() not in facts.values()


def test_single_run_has_no_speed_up(capsys, one):
    page, said = report(capsys, one)
    assert "hsgd-2-4,4-world; simulated; " in said
    assert [each.text for each in page.all("h2")] == [
        "Where the time of a step goes",
        "Timeline",
        "Stragglers: who waited for whom",
        "Scenario and plans",
        "What this page was made of",
    ]
    assert "The schedule hsgd-2-4,4-world, simulated:" in page.text


def test_run_without_a_trace_is_simulated_for_the_page_and_left_as_it_is(capsys, one):
    step_s = run_directory.read_trace(one / run_directory.SIMULATED).makespan_s / 12
    (one / run_directory.SIMULATED).unlink()
    before = {path.name for path in one.iterdir()}
    page, _ = report(capsys, one)
    assert "It had no trace, so it was simulated for this page." in page.text
    assert page.rows("Time per step by state, average over ranks")["hsgd-2-4,4-world"][1] == pytest.approx(step_s)
    assert {path.name for path in one.iterdir()} == before


def test_run_that_was_only_measured_is_shown_as_measured(capsys, one):
    measure(one)
    (one / run_directory.SIMULATED).unlink()
    page, said = report(capsys, one)
    assert "; measured; " in said
    assert [line[1] for line in page.tables["Time per step by state, average over ranks"][1:]] == ["measured"]
    assert "Makespans" not in page.tables


def test_measurement_that_ended_early_is_shown_as_far_as_all_ranks_came(capsys, one):
    real = measured_like(run_directory.read_trace(one / run_directory.SIMULATED))
    cut = real.plan.first_instances()[7]
    real.end_s[cut + 1 :, 3] = np.nan
    run_directory.save_trace(real, one / run_directory.REAL)
    page, _ = report(capsys, one)
    assert "Measured were 7 of 12 steps: only those were finished by all ranks." in page.text
    lines = page.tables["Time per step by state, average over ranks"][1:]
    assert lines[1][2] == pytest.approx(real.end_s[:cut].max() / 7)
    assert page.rows("Makespans")["hsgd-2-4,4-world"][3] == "7"


def test_partial_trace_is_named(capsys, one):
    shutil.copy(one / run_directory.SIMULATED, one / run_directory.PARTIAL)
    assert "trace.partial.npz, of a measurement that ended early, is not on this page." in report(capsys, one)[0].text


def test_trace_of_one_real_rank_is_named(capsys, one):
    trace = run_directory.read_trace(one / run_directory.SIMULATED)
    run_directory.save_trace(dataclasses.replace(trace, source="real", real_rank=1), one / run_directory.REAL)
    expected = "trace.real.npz, of rank 1 among simulated peers, is not on this page."
    assert expected in report(capsys, one)[0].text


def test_baseline_is_the_run_that_was_asked_for_and_stands_first(capsys, folder, tmp_path):
    runs = shutil.copytree(folder / "runs", tmp_path / "runs")
    for name in ("local-4", "local_sgd"):
        page, _ = report(capsys, runs, "--baseline", name)
        table = page.rows("Step time, and speed-up over local-4")
        assert next(iter(table)) == "local-4"
        assert table["local-4"][1] == 1.0


def test_runs_of_other_scenarios_are_told_apart(capsys, folder, tmp_path):
    runs = shutil.copytree(folder / "runs", tmp_path / "runs")
    other = edited(("forward: 20 ms", "forward: 10 ms"), ("probability: 10%", "probability: 30%"))
    write(tmp_path / "other.yaml", other)
    call(capsys, "simulate", tmp_path / "other.yaml", "--schedule", "sync", "-o", runs / "other")
    page, _ = report(capsys, runs, "--baseline", "local-4")
    assert "sync (other) is of another scenario than local-4: other workload, delays." in page.text
    assert "sync (sync) is of" not in page.text


TRACED = """imported:
  step: 10 ms
  error: 0.11
  verdict: 'launch-bound: gaps'
  parts: {compute: 6 ms, short_gap: 3 ms, all_to_all: 1 ms}
"""


@pytest.fixture(scope="module")
def traced(folder, tmp_path_factory) -> Page:
    """Return the page of runs of a scenario that was imported, and reproduces the traced steps 11 % off."""
    from simdist.cli import main

    runs = shutil.copytree(folder / "runs", tmp_path_factory.mktemp("traced") / "runs")
    for path in runs.glob("*/scenario.yaml"):
        write(path, path.read_text() + TRACED)
    assert main(["report", str(runs), "-o", str(runs / "page.html")]) == 0
    return page_of(runs / "page.html")


def test_of_a_traced_job_that_is_not_reproduced_only_measured_runs_have_a_winner(traced):
    off = "the scenario reproduces the traced steps +11.0 % off"
    assert f"Simulated, no schedule is recommended: {off}." in traced.text
    assert "Measured, local-4 is " in traced.text


@pytest.mark.parametrize("n_folders", [1, 5])
def test_too_many_runs_or_folders_are_refused_before_they_are_read(capsys, tmp_path, n_folders):
    runs = tmp_path / "runs"
    n_runs = 25 // n_folders**2
    for number in range(n_runs * n_folders):
        run = runs / f"{number // n_runs}" / f"{number}"
        run.mkdir(parents=True)
        write(run / "plan.json", "no plan")
    answer = call(capsys, "report", runs, "-o", tmp_path / "page.html")
    assert (answer.code, answer.out) == (2, "")
    assert (
        f"{runs}: holds {n_runs * n_folders} runs in {n_folders} folders, a page compares up to 24 in one: choose it, "
        f"such as {runs / '0'}; `simdist results {runs}` shows all as a table"
    ) in answer.err


def test_what_all_runs_share_is_said_once(capsys, folder, tmp_path):
    runs = shutil.copytree(folder / "runs", tmp_path / "runs")
    for label in LABELS:
        for name in (run_directory.SIMULATED, run_directory.REAL):
            (runs / label / name).unlink(missing_ok=True)
    page, _ = report(capsys, runs)
    assert page.text.count("It had no trace, so it was simulated for this page.") == 1
    assert "All runs: It had no trace" in page.text


# ---------------------------------------------------------------- calibrated machines


SLOW_NETWORK = """\
name: as-measured
nodes: 2
gpus_per_node: 4
fabric: ideal
network: {latency: 1 ms, bandwidth: 1 Gbit/s}
"""


def test_calibrated_machines_are_simulated_instead_of_those_of_the_scenario(capsys, one):
    """Of a run that was measured, as `simdist validate --cluster` does; nothing is written."""
    measure(one)
    file = write(one.parent / "calibrated.yaml", SLOW_NETWORK)
    before = {path.name: path.read_bytes() for path in one.iterdir()}
    (expected,) = json.loads(call(capsys, "validate", one, "--cluster", file, "--json").out)["rows"]
    assert expected["simulated_s"] > 1.01 * run_directory.read_trace(one / run_directory.SIMULATED).makespan_s
    page, _ = report(capsys, one, "--cluster", file)
    row = page.rows("Makespans")["hsgd-2-4,4-world"]
    assert row[:3] == [expected["simulated_s"], expected["measured_s"], expected["error"]]
    states = page.tables["Time per step by state, average over ranks"][1:]
    assert [line[2] for line in states] == pytest.approx([row[0] / 12, row[1] / 12])
    assert f"Simulated are the machines of {file} (as-measured), not those of the scenarios." in page.text
    assert {path.name: path.read_bytes() for path in one.iterdir()} == before


def test_json_names_the_calibrated_machines(capsys, one):
    file = write(one.parent / "calibrated.yaml", SLOW_NETWORK)
    answer = json.loads(call(capsys, "report", one, "-o", one.parent / "page.html", "--cluster", file, "--json").out)
    assert answer["cluster"] == str(file)
    assert answer["runs"][0]["simulated_now"]


def test_other_numbers_of_machines_are_refused(capsys, one, tmp_path):
    file = write(tmp_path / "small.yaml", SLOW_NETWORK.replace("nodes: 2", "nodes: 1"))
    answer = call(capsys, "report", one, "-o", tmp_path / "page.html", "--cluster", file)
    assert (answer.code, answer.out) == (2, "")
    assert f"{file}: has 1 nodes x 4 GPUs; {one / 'scenario.yaml'} has 2 x 4: write as many" in answer.err
    assert not (tmp_path / "page.html").exists()


def test_sweep_that_was_computed_takes_no_other_machines(capsys, tmp_path):
    write(tmp_path / "design.jsonl", "")
    answer = call(capsys, "report", tmp_path, "-o", tmp_path / "page.html", "--cluster", tmp_path / "any.yaml")
    assert answer.code == 2
    assert f"--cluster: {tmp_path} holds a sweep, which was computed already: leave it out" in answer.err


# ---------------------------------------------------------------- the part that the timeline shows


def test_steps_choose_what_the_timeline_shows(capsys, one):
    page, _ = report(capsys, one, "--steps", "2:5")
    assert "hsgd-2-4,4-world: the timeline shows steps 2 to 4 of 12: as asked for." in page.text
    (field,) = (each.attributes for each in page.all("input") if each.attributes.get("data-control") == "step")
    assert [field[name] for name in ("min", "max", "value")] == ["2", "4", "2"]
    assert page.rows("Time per step by state, average over ranks")["hsgd-2-4,4-world"][1] > 0


def test_long_runs_are_cut_to_the_first_steps_that_fit(folder):
    plan = run_directory.read(folder / "runs" / "sync").plan
    spans = plan.first_instances()[5] * plan.world_size
    assert fitting_steps(plan, range(12), spans) == range(5)
    assert fitting_steps(plan, range(12), spans - 1) == range(4)
    assert fitting_steps(plan, range(3, 12), spans) == range(3, 8)
    assert fitting_steps(plan, range(12), 1) == range(1)


def test_page_says_that_a_long_run_is_cut(capsys, one, monkeypatch):
    monkeypatch.setattr("simdist.report.page.sections.timelines.MOST_SPANS", 300)
    page, said = report(capsys, one)
    n_steps = len(fitting_steps(run_directory.read(one).plan, range(12), 300))
    assert (
        f"the timeline shows steps 0 to {n_steps - 1} of 12: more would make the page too large; --steps" in page.text
    )
    assert int(re.search(r"([\d,]+) spans", said)[1].replace(",", "")) <= 300


# ---------------------------------------------------------------- nothing gets in, nothing gets out


def test_text_is_escaped_and_html_is_not_escaped_again():
    assert tag("b", EVIL, title='"&') == '<b title="&quot;&amp;">&lt;script&gt;alert(1)&lt;/script&gt;</b>'
    assert tag("p", tag("b", "a & b")) == "<p><b>a &amp; b</b></p>"
    assert join(["<", Html("<br>")], ", ") == "&lt;, <br>"
    assert escape(escape("<")) == "&lt;"
    assert "</script>" not in json_block("x", EVIL).removesuffix("</script>")


def evil_page(capsys, tmp_path: Path) -> Path:
    text = edited(
        ("name: weight", f"name: '{EVIL}'"),
        ("- kind: sync", f"- {{kind: sync, label: '{EVIL_LABEL}'}}"),
        ("seed: 1", f"seed: 1\nname: '{EVIL}'"),
    )
    run = tmp_path / EVIL_LABEL
    answer = call(capsys, "simulate", write(tmp_path / "evil.yaml", text), "--schedule", EVIL_LABEL, "-o", run)
    assert answer.code == 0, answer.err
    measure(run, device=EVIL, hosts=[EVIL], versions={EVIL: EVIL})
    report(capsys, run)
    return tmp_path / "page.html"


def test_backticks_in_labels_and_names_are_shown_as_they_are(capsys, tmp_path):
    text = edited(
        ("- kind: sync", "- {kind: sync, label: 'a`b`c'}"),
        ("gpus_per_node: 4\n", "gpus_per_node: 4\n  name: 'my `own` {x}'\n"),
    )
    call(capsys, "simulate", write(tmp_path / "small.yaml", text), "-o", tmp_path / "runs")
    for run in (tmp_path / "runs").iterdir():
        measure(run)
    call(capsys, "report", tmp_path / "runs", "--steps", "1:3", "--baseline", "a`b`c", "-o", tmp_path / "page.html")
    page = page_of(tmp_path / "page.html")
    for sentence in (
        "How many times as fast as a`b`c each schedule is: the seconds per step of a`b`c over its own.",
        "a`b`c: the timeline shows steps 1 to 2 of 12: as asked for.",
        "Simulated is the cluster of the scenario, my `own` {x}.",
    ):
        assert sentence in page.text
    assert {"simdist compare", "simdist report --cluster FILE"} <= {each.text for each in page.all("code")}


def test_nothing_in_the_files_becomes_an_element(capsys, tmp_path, folder):
    page = page_of(evil_page(capsys, tmp_path))
    assert [each.text for each in page.all("h1")] == [EVIL]
    scripts = [each for each in page.all("script") if not each.attributes.get("type")]
    assert not [each for each in scripts if "alert(" in each.text]
    assert not page.all("img")
    assert page.text.count(EVIL) > 6
    assert page.text.count(EVIL_LABEL) > 6


def test_policy_allows_the_scripts_of_the_page_and_no_request(page):
    (policy,) = (each.attributes["content"] for each in page.all("meta") if "http-equiv" in each.attributes)
    scripts = [each.text for each in page.all("script") if not each.attributes.get("type")]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    assert policy.startswith(f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:")


def test_units_of_time_and_round_steps_stand_once_in_the_scripts():
    assets = (Path(report_page.__file__).parent / "assets").rglob("*.js")
    text = "".join(path.read_text() for path in assets)
    assert text.count('["ms", 1e-3]') == text.count("[1, 2, 5, 10]") == 1
    assert "µs" not in text  # tables write us


def test_page_names_no_other_file(page):
    for element in page.elements:
        assert not {"src", "srcset", "action", "onclick"} & element.attributes.keys()
        assert (element.attributes.get("href") or "#").startswith("#")
    assert not page.all("link")


# ---------------------------------------------------------------- errors


def test_errors_say_what_is_wrong(capsys, folder, one, tmp_path):
    def error(*args: object) -> str:
        answer = call(capsys, "report", *args)
        assert (answer.code, answer.out) == (2, "")
        return answer.err

    page = tmp_path / "page.html"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "nowhere: there is no such run directory; `simdist simulate SCENARIO -o" in error(
        tmp_path / "nowhere", "-o", page
    )
    assert f"{empty}: is no run directory: it has no plan.json" in error(empty, "-o", page)
    assert f"{empty}: is a directory; name the page to write" in error(one, "-o", empty)
    assert "plan.json: is not the name of a page; write e.g. plan.html" in error(one, "-o", one / "plan.json")
    assert "make it first" in error(one, "-o", empty / "more" / "page.html")
    assert "no run is called 'nobody' to compare with; there are: hsgd-2-4,4-world" in error(
        one, "-o", page, "--baseline", "nobody"
    )
    assert "the timeline is to show no step; choose some of 0 to 11" in error(one, "-o", page, "--steps", "12:")
    assert "Missing option '-o'" in error(one)
    assert not page.exists()


def test_run_that_takes_no_time_is_refused(capsys, one, tmp_path):
    trace = run_directory.read_trace(one / run_directory.SIMULATED)
    nothing = np.zeros_like(trace.end_s)
    run_directory.save_trace(
        Trace(trace.plan, nothing, nothing, nothing, "simulated by hand"), one / run_directory.SIMULATED
    )
    answer = call(capsys, "report", one, "-o", tmp_path / "page.html")
    assert (answer.code, answer.out) == (2, "")
    assert "hsgd-2-4,4-world, simulated: no operation takes any time; give e.g. forward: 20 ms" in answer.err


def test_damaged_files_are_named(capsys, one, tmp_path):
    measure(one)
    for name, content in {run_directory.REPORT: b"[]", run_directory.REAL: b"no archive"}.items():
        (one / name).write_bytes(content)
        answer = call(capsys, "report", one, "-o", tmp_path / "page.html")
        assert answer.code == 2
        assert f"{one / name}: " in answer.err
    assert not (tmp_path / "page.html").exists()


def test_page_that_cannot_be_written_leaves_the_old_one(capsys, one, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    page = write(tmp_path / "page.html", "old")
    monkeypatch.setattr("os.replace", refuse)
    answer = call(capsys, "report", one, "-o", page)
    assert (answer.code, answer.out) == (1, "")
    assert f"{page}: cannot be written: No space left on device" in answer.err
    assert page.read_text() == "old"
    assert not [each for each in tmp_path.iterdir() if each.suffix == ".part"]


# ---------------------------------------------------------------- for everybody


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_letters_have_contrast_on_both_grounds(theme):
    for name in ("fg", "muted", "accent"):
        for ground in ("bg", "surface"):
            assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
    for name in ("compute", "comm", "wait", "io", "host"):
        assert contrast(theme[name], theme["bg"]) >= 3, name
    assert contrast(theme["heat-high"], theme["heat-low"]) > contrast(theme["heat-middle"], theme["heat-low"]) > 1.5


def test_style_sheet_names_no_colour_of_its_own(page):
    (style,) = page.all("style")
    rules = (Path(__file__).resolve().parents[3] / "simdist" / "report" / "page" / "assets" / "page.css").read_text()
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?=[;\s)])|rgba?\(", rules)
    assert set(re.findall(r"var\(--([\w-]+)\)", rules)) <= LIGHT.keys() == DARK.keys()
    assert f"--fg: {LIGHT['fg']};" in style.text


def test_page_has_landmarks_and_headings_in_order(page):
    for name in ("header", "nav", "main", "h1"):
        assert len(page.all(name)) == 1, name
    levels = [int(each.name[1]) for each in page.elements if re.fullmatch(r"h[1-6]", each.name)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [each.attributes["id"] for each in page.elements if "id" in each.attributes]
    assert len(ids) == len(set(ids))
    targets = [each.attributes["href"] for each in page.all("a")]
    assert {target.removeprefix("#") for target in targets} <= set(ids)
    assert targets[0] == "#main"
    assert page.all("html")[0].attributes["lang"] == "en"


def test_tables_have_captions_and_scopes(page):
    assert len(page.tables) == len(page.all("table")) > 8
    assert {each.attributes.get("scope") for each in page.all("th")} == {"col", "row"}


def test_controls_have_labels(page):
    labelled = {each.attributes["id"] for each in page.all("select") if "id" in each.attributes}
    assert {"heat-view", "heat-quantity", "heat-scale", "timeline-run"} <= labelled
    for chart in page.all("svg"):
        assert chart.attributes.get("aria-label") or chart.attributes.get("aria-hidden")


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


def read_out(page, key: str) -> str:
    """Press a key in the heat map; return what is read out."""
    page.focus("#heat-canvas")
    page.keyboard.press(key)
    return page.inner_text("#heat-readout")


def draw_heat_map(page, view: str = "0 caused") -> None:
    page.wait_for_selector(f"#heat-canvas[data-ready='{view}']")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_opens_without_a_request_or_a_complaint_in_both_themes(browser, folder, scheme):
    theme = {"light": LIGHT, "dark": DARK}
    with opened(browser, folder / "page.html", color_scheme=scheme) as watched:
        draw_heat_map(watched.page)
        assert ground(watched.page) == rgb(theme[scheme]["bg"])
        watched.page.get_by_role("button", name="Colours").click()
        assert ground(watched.page) == rgb(DARK["bg"])
        watched.page.get_by_role("button", name="Colours").click()
        assert ground(watched.page) == rgb(LIGHT["bg"])


def ground(page) -> str:
    return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")


def rgb(color: str) -> str:
    return f"rgb({', '.join(str(int(color[place : place + 2], 16)) for place in (1, 3, 5))})"


def test_heat_map_reads_out_what_the_analysis_says(browser, folder):
    waits = attribute_waiting(traces(folder)["sync", "simulated"])
    with opened(browser, folder / "page.html") as watched:
        page = watched.page
        draw_heat_map(page)
        largest_s = waits.caused_s.max()
        largest = format_seconds(largest_s)
        step, rank = np.argwhere(waits.caused_s > largest_s * 0.9999)[0]  # the first of those that look the same
        assert read_out(page, "m") == f"step {step}, rank {rank}: others waited for it, {largest}"
        assert page.inner_text("#heat-scale-high") == f"{largest} in a cell"
        for keys, at in ((["Home"], (0, rank)), (["ArrowDown"] * 8, (0, 7)), (["PageDown", "ArrowUp"], (10, 6))):
            said = [read_out(page, key) for key in keys][-1]
            seconds = format_seconds(round(waits.caused_s[at], 12))
            assert said == f"step {at[0]}, rank {at[1]}: others waited for it, {seconds}"
        assert read_out(page, "End").startswith("step 11, rank 6: ")


def test_heat_map_follows_the_choice_of_run_and_quantity(browser, folder):
    suffered_s = attribute_waiting(traces(folder)["local-4", "measured"]).suffered_s
    with opened(browser, folder / "page.html") as watched:
        page = watched.page
        page.select_option("#heat-view", label="local-4, measured")
        page.select_option("#heat-quantity", label="suffered")
        draw_heat_map(page, "4 suffered")
        step, rank = np.argwhere(suffered_s > suffered_s.max() * 0.9999)[0]
        said = f"step {step}, rank {rank}: it waited for others, {format_seconds(suffered_s.max())}"
        assert read_out(page, "M") == said
        visible = page.locator(".heat-details:visible")
        assert visible.count() == 1
        assert visible.locator(".conclusion").inner_text().startswith("local-4, measured: ")
        page.select_option("#heat-scale", label="logarithmic")
        assert page.inner_text("#heat-scale-low").endswith("or less")


CHOOSE_TWICE = """async () => {
  const read = Response.prototype.arrayBuffer;
  let unpacking = null;
  Response.prototype.arrayBuffer = function () { return (unpacking = read.call(this)); };
  const quantity = document.getElementById("heat-quantity");
  for (const name of ["suffered", "caused"]) {
    quantity.value = name;
    quantity.dispatchEvent(new Event("change"));
  }
  await unpacking;
  await new Promise((done) => setTimeout(done));
}"""  # returns when what was chosen first is there, after what was chosen last


def test_the_heat_map_shows_what_was_chosen_last_though_the_first_is_ready_later(browser, folder):
    caused_s = attribute_waiting(traces(folder)["sync", "simulated"]).caused_s
    with opened(browser, folder / "page.html") as watched:
        page = watched.page
        draw_heat_map(page)
        before = read_out(page, "m")
        assert before.endswith(f", {format_seconds(caused_s.max())}")
        page.evaluate(CHOOSE_TWICE)
        assert read_out(page, "m") == before
        assert page.get_attribute("#heat-canvas", "data-ready") == "0 caused"


def test_pointer_reads_out_the_cell_below_it(browser, folder):
    caused_s = attribute_waiting(traces(folder)["sync", "simulated"]).caused_s
    with opened(browser, folder / "page.html") as watched:
        page = watched.page
        draw_heat_map(page)
        page.locator("#heat-canvas").scroll_into_view_if_needed()
        box = page.locator("#heat-canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 4.5 / 12, box["y"] + box["height"] * 2.5 / 8)
        seconds = format_seconds(round(caused_s[4, 2], 12))
        assert page.inner_text("#heat-readout") == f"step 4, rank 2: others waited for it, {seconds}"


HELD_UP = """{
    const read = Response.prototype.arrayBuffer;
    const gate = new Promise((open) => { globalThis.letGo = open; });
    Response.prototype.arrayBuffer = async function () {
        await gate;
        return read.call(this);
    };
}"""  # what is packed in the page stays so until `letGo()`


def test_page_that_is_being_read_says_so_and_keeps_its_room(browser, folder):
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    try:
        page = context.new_page()
        page.add_init_script(HELD_UP)
        page.goto((folder / "page.html").as_uri())
        assert page.inner_text("#heat-cells") == "The map is being read."
        before = [page.locator(name).bounding_box() for name in ("#heat-canvas", "#stragglers", "#sources")]
        page.evaluate("letGo()")
        draw_heat_map(page)
        wait_until(page, "document.querySelector('.timeline').timeline?.firstPaintMs")
        assert page.inner_text("#heat-cells").startswith("A cell is ")
        assert [page.locator(name).bounding_box() for name in ("#heat-canvas", "#stragglers", "#sources")] == before
    finally:
        context.close()


def test_narrow_heat_map_sums_steps_and_says_so(browser, capsys, tmp_path):
    """2,500 steps are packed three to a cell; a phone has fewer pixels than that, so cells are summed again."""
    run = tmp_path / "run"
    text = edited(("steps: 12", "steps: 2500"))
    call(capsys, "simulate", write(tmp_path / "long.yaml", text), "--schedule", "sync", "-o", run)
    report(capsys, run, "--steps", ":10")
    caused_s = attribute_waiting(run_directory.read_trace(run / run_directory.SIMULATED)).caused_s
    with opened(browser, tmp_path / "page.html", viewport={"width": 400, "height": 800}) as watched:
        page = watched.page
        draw_heat_map(page)
        said = page.inner_text("#heat-cells")
        per_cell = int(re.match(r"A cell is (\d+) steps of 1 rank, summed\.", said)[1])
        assert per_cell % 3 == 0
        assert 2500 / per_cell <= page.evaluate("document.getElementById('heat-canvas').clientWidth")
        summed_s = np.add.reduceat(caused_s, np.arange(0, 2500, per_cell), axis=0)
        found = re.match(r"steps (\d+) to (\d+), rank (\d): others waited for it, (.*)", read_out(page, "m"))
        first, last, rank = (int(found[number]) for number in (1, 2, 3))
        assert (first % per_cell, last) == (0, first + per_cell - 1)
        assert found[4] == format_seconds(summed_s[first // per_cell, rank]) == format_seconds(summed_s.max())
        assert read_out(page, "End").startswith(f"steps {2499 // per_cell * per_cell} to 2499, rank {rank}: ")


@pytest.mark.parametrize("width", [400, 2000])
def test_page_fits_the_width_of_a_phone_and_of_a_large_screen(browser, folder, width):
    with opened(browser, folder / "page.html", viewport={"width": width, "height": 900}) as watched:
        draw_heat_map(watched.page)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = watched.page.evaluate(
            "[...document.querySelectorAll('.chart text')].map((text) => parseFloat(getComputedStyle(text).fontSize))"
        )
        assert min(sizes) >= 12
        outside = watched.page.evaluate(
            "[...document.querySelectorAll('.chart text')]"
            ".filter((text) => text.getBoundingClientRect().right > innerWidth).map((text) => text.textContent)"
        )
        assert outside == []


def test_everything_is_reached_by_keyboard(browser, folder):
    with opened(browser, folder / "page.html") as watched:
        page = watched.page
        draw_heat_map(page)
        reached = []
        for _ in range(120):
            page.keyboard.press("Tab")
            focused = page.evaluate("[document.activeElement.id, document.activeElement.tagName]")
            reached.append(focused[0] or focused[1])
            if focused[1] == "BODY":
                break
        assert reached[:2] == ["A", "theme"]
        assert {"timeline-run", "heat-view", "heat-quantity", "heat-scale", "heat-canvas", "SUMMARY"} <= set(reached)
        page.evaluate("document.querySelector('.skip').focus()")
        assert page.locator(".skip").bounding_box()["y"] >= 0
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"


def test_timeline_shows_the_run_that_is_chosen(browser, folder):
    with opened(browser, folder / "page.html") as watched:
        page = watched.page
        assert [page.locator(f"#timeline-{number}").is_visible() for number in range(3)] == [True, False, False]
        page.select_option("#timeline-run", label="local-4")
        assert [page.locator(f"#timeline-{number}").is_visible() for number in range(3)] == [False, False, True]
        wait_until(page, "document.getElementById('timeline-2').timeline?.nFrames > 0")


def test_nothing_in_the_files_runs_as_a_script(browser, capsys, tmp_path):
    path = evil_page(capsys, tmp_path)
    with opened(browser, path) as watched:
        draw_heat_map(watched.page)
        assert watched.page.title() == f"{EVIL}: simdist report"
        assert watched.page.inner_text("h1") == EVIL
