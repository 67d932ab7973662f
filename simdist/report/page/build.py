"""Pages from reports. Another kind of page puts other sections into the same `document`."""

from collections.abc import Sequence

from simdist.report.page.document import document, program
from simdist.report.page.model import Report
from simdist.report.page.sections.heading import heading, title
from simdist.report.page.sections.reality import reality_section
from simdist.report.page.sections.sources import sources_section
from simdist.report.page.sections.speed import speed_section
from simdist.report.page.sections.states import states_section
from simdist.report.page.sections.stragglers import stragglers_section
from simdist.report.page.sections.timelines import Shown, timelines_section
from simdist.report.page.timeline import timeline_assets


def runs_page(report: Report, shown: Sequence[Shown]) -> str:
    """Return the page of one run or of several, the same for equal files.

    Args:
        report: The runs.
        shown: What the timeline shows of each, see `shown_runs`.
    """
    sections = [
        speed_section(report) if len(report.runs) > 1 else None,
        states_section(report),
        timelines_section(shown),
        stragglers_section(report),
        reality_section(report),
        sources_section(report),
    ]
    css, script = timeline_assets()
    return document(
        f"{title(report)}: simdist report",
        header=heading(report),
        sections=[section for section in sections if section],
        styles=[css],
        scripts=[script, program("heat")],
    )
