"""Pages of sweeps: many points, the schedules at each, and what the answer depends on."""

from simdist.report.page.document import asset, document, program
from simdist.report.page.sections.sweep_chart import chart_section
from simdist.report.page.sections.sweep_fastest import fastest_section
from simdist.report.page.sections.sweep_heading import sweep_heading
from simdist.report.page.sections.sweep_influence import influence_section
from simdist.report.page.sections.sweep_map import map_section
from simdist.report.page.sections.sweep_rows import failures_section, rows_section
from simdist.report.page.sweep_model import SweepReport

_SCRIPTS = ("data", "chart", "map", "rows")


def sweep_page(report: SweepReport) -> str:
    """Return the page of a sweep, the same for equal folders."""
    sections = [
        fastest_section(report),
        chart_section(report),
        map_section(report),
        influence_section(report),
        rows_section(report),
        failures_section(report),
    ]
    return document(
        f"{report.name}: simdist report",
        header=sweep_heading(report),
        sections=[section for section in sections if section],
        styles=[asset("sweep/sweep.css")],
        scripts=[program(*(f"sweep/{name}" for name in _SCRIPTS))],
    )
