"""One HTML page that holds all it shows: text, charts, data and scripts. It requests nothing from anywhere.

`read_report` reads run directories and `runs_page` makes the page of them; `read_sweep_report` and `sweep_page` do the
same for a sweep. The sections stand in `simdist.report.page.sections`; all that a user wrote goes through
`simdist.report.page.html`, which escapes it.
"""

from simdist.report.page.model import Execution, ReportedRun, RunsReport
from simdist.report.page.pages import runs_page, sweep_page
from simdist.report.page.reading import read_report
from simdist.report.page.sections.timelines import Shown, shown_runs
from simdist.report.page.sweep_model import SweepReport, read_sweep_report

__all__ = [
    "Execution",
    "ReportedRun",
    "RunsReport",
    "Shown",
    "SweepReport",
    "read_report",
    "read_sweep_report",
    "runs_page",
    "shown_runs",
    "sweep_page",
]
