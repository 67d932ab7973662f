"""Pages from reports: the sections of each kind of page, in the frame of `document`."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simdist.jobs.store import DESIGN, ROWS
from simdist.plan.text import plan_text
from simdist.report.figures import svg
from simdist.report.learning import learning_figure
from simdist.report.page import html
from simdist.report.page.document import Section, asset, document, program
from simdist.report.page.html import Html, join, tag
from simdist.report.page.model import RunsReport
from simdist.report.page.sections.goodput import goodput_section
from simdist.report.page.sections.heading import heading, sweep_heading, title
from simdist.report.page.sections.making import Making, making_section
from simdist.report.page.sections.memory import memory_section
from simdist.report.page.sections.reality import reality_section
from simdist.report.page.sections.speed import speed_section, states_section
from simdist.report.page.sections.stragglers import stragglers_section
from simdist.report.page.sections.sweep_chart import chart_section, map_section
from simdist.report.page.sections.sweep_fastest import fastest_section
from simdist.report.page.sections.sweep_rows import rows_section
from simdist.report.page.sections.timelines import Shown, timeline_assets, timelines_section
from simdist.report.page.sweep_model import SweepReport
from simdist.runs import run_directory

_ABOUT = (
    "With these files every number on this page can be computed again: the scenario of each run, and the plan that "
    "was made of it."
)
_OF_RUN = (
    run_directory.SCENARIO,
    run_directory.PLAN,
    run_directory.DELAYS,
    run_directory.SIMULATED,
    run_directory.REAL,
    run_directory.REPORT,
)
_SWEEP_SCRIPTS = ("data", "chart", "map", "rows")


def runs_page(report: RunsReport, shown: Sequence[Shown], *, making: Making | None = None) -> str:
    """Return the page of one run or of several, the same for equal files that are made in the same way.

    Args:
        report: The runs.
        shown: Part of each that the timeline shows, see `shown_runs`.
        making: How it is made; None for this call, today.
    """
    first = [speed_section(report)] if len(report.runs) > 1 else []
    others = timelines_section(shown), memory_section(report), stragglers_section(report), reality_section(report)
    failing = goodput_section(report)
    making = making or Making.now("simdist.report.page.pages.runs_page")
    css, script = timeline_assets()
    return document(
        f"{title(report)}: simdist report",
        header=heading(report),
        sections=[
            section
            for section in (
                *first,
                states_section(report),
                *others,
                failing,
                _sources_section(report),
                _made_of_runs(report, making),
            )
            if section
        ],
        styles=[css],
        scripts=[script, program("heat")],
    )


def _made_of_runs(report: RunsReport, making: Making) -> Section:
    files = {f"{name} of {run.label}": run.path / name for run in report.runs for name in _OF_RUN}
    if report.calibrated:
        files["cluster"] = report.calibrated.file
    seeds = dict.fromkeys(str(run.run.scenario.seed) for run in report.runs)
    return making_section(making, files, [("seeds", ", ".join(seeds))])


def sweep_page(report: SweepReport, *, making: Making | None = None) -> str:
    """Return the page of a sweep, the same for equal folders that it is made of in the same way.

    Args:
        report: The sweep.
        making: How it is made; None for this call, today.
    """
    making = making or Making.now("simdist.report.page.pages.sweep_page")
    files = {name: report.folder / name for name in (DESIGN, ROWS)}
    made = making_section(making, files, [("seeds", f"{report.n_seeds:,} for each row, by simdist {report.version}")])
    makers = fastest_section, chart_section, map_section, rows_section
    return document(
        f"{report.name}: simdist report",
        header=sweep_heading(report),
        sections=[*(section for make in makers if (section := make(report))), made],
        styles=[asset("sweep/sweep.css")],
        scripts=[program(*(f"sweep/{name}" for name in _SWEEP_SCRIPTS))],
    )


def learned_page(
    found: Mapping[str, Any],
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    files: Mapping[str, Path],
    making: Making | None = None,
) -> str:
    """Return the page of learning results.

    Args:
        found: Output of `simdist learn --json`.
        header: Columns of its table.
        rows: Cells.
        files: Those of the results, by name.
        making: How it is made; None for this call, today.
    """
    making = making or Making.now("simdist.report.page.pages.learned_page")
    name, _, about = found["title"].partition(": ")
    picture = base64.b64encode(svg(learning_figure(found))).decode()
    image = tag("img", src=f"data:image/svg+xml;base64,{picture}", alt=f"{found['metric']} over steps and over time")
    verdict = [found["verdict"]] if "verdict" in found else []
    said = html.conclusions(f"{each}." for each in (*verdict, *(each["text"] for each in found["remarks"])))
    table = html.table("Per step, and to the target", header, list(rows))
    sections = [
        Section("target", "When the target is reached", join([said, table, tag("p", found["meaning"])])),
        Section("curves", "Curves by step and by time", image),
        making_section(making, files, [("seeds", f"{found['rows'][0]['runs']} for each schedule")]),
    ]
    return document(f"{name}: simdist report", header=join([tag("h1", name), tag("p", about)]), sections=sections)


def _sources_section(report: RunsReport) -> Section:
    """Show scenarios and plans, folded."""
    files = [(run.label, run.path / run_directory.SCENARIO) for run in report.runs]
    parts = [_folded(f"scenario.yaml of {label}", file.read_text(encoding="utf-8")) for label, file in files]
    parts += [_folded(f"plan of {run.label}", plan_text(run.run.plan)) for run in report.runs]
    return Section("sources", "Scenario and plans", join([tag("p", _ABOUT), *parts]))


def _folded(summary: str, text: str) -> Html:
    return tag("details", tag("summary", summary), tag("pre", tag("code", text.strip()), tabindex=0))
