"""Pages from reports: the sections of each kind of page, in the frame of `document`."""

from collections.abc import Sequence

from simdist.report.page.document import asset, document, program
from simdist.report.page.model import RunsReport
from simdist.report.page.sections.heading import heading, sweep_heading, title
from simdist.report.page.sections.reality import reality_section
from simdist.report.page.sections.sources import sources_section
from simdist.report.page.sections.speed import speed_section, states_section
from simdist.report.page.sections.stragglers import stragglers_section
from simdist.report.page.sections.sweep_chart import chart_section, map_section
from simdist.report.page.sections.sweep_fastest import fastest_section
from simdist.report.page.sections.sweep_rows import rows_section
from simdist.report.page.sections.timelines import Shown, timeline_assets, timelines_section
from simdist.report.page.sweep_model import SweepReport

_SWEEP_SCRIPTS = ("data", "chart", "map", "rows")


def runs_page(report: RunsReport, shown: Sequence[Shown]) -> str:
    """Return the page of one run or of several, the same for equal files.

    Args:
        report: The runs.
        shown: Part of each that the timeline shows, see `shown_runs`.
    """
    first = [speed_section(report)] if len(report.runs) > 1 else []
    others = timelines_section(shown), stragglers_section(report), reality_section(report), sources_section(report)
    css, script = timeline_assets()
    return document(
        f"{title(report)}: simdist report",
        header=heading(report),
        sections=[section for section in (*first, states_section(report), *others) if section],
        styles=[css],
        scripts=[script, program("heat")],
    )


def sweep_page(report: SweepReport) -> str:
    """Return the page of a sweep, the same for equal folders."""
    makers = fastest_section, chart_section, map_section, rows_section
    return document(
        f"{report.name}: simdist report",
        header=sweep_heading(report),
        sections=[section for make in makers if (section := make(report))],
        styles=[asset("sweep/sweep.css")],
        scripts=[program(*(f"sweep/{name}" for name in _SWEEP_SCRIPTS))],
    )
