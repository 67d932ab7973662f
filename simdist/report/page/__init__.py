"""One HTML page that holds all it shows: text, charts, data and scripts. It requests nothing from anywhere.

`read_report` reads run directories, `runs_page` makes the page. The sections stand in `simdist.report.page.sections`;
all that a user wrote goes through `simdist.report.page.html`, which escapes it.
"""

from simdist.report.page.build import runs_page
from simdist.report.page.model import Execution, Report, ReportedRun
from simdist.report.page.reading import read_report
from simdist.report.page.sections.timelines import Shown, shown_runs

__all__ = ["Execution", "Report", "ReportedRun", "Shown", "read_report", "runs_page", "shown_runs"]
