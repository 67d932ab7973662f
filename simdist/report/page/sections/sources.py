"""Sources of the runs: the scenario as it stands in the run directories, and the plan of each schedule."""

from simdist.plan.text import plan_text
from simdist.report.page.document import Section
from simdist.report.page.html import Html, join, tag
from simdist.report.page.model import RunsReport
from simdist.runs import run_directory

_ABOUT = (
    "With these files every number on this page can be computed again: the scenario of each run, and the plan that "
    "was made of it."
)


def sources_section(report: RunsReport) -> Section:
    """Show scenarios and plans, folded."""
    files = [(run.label, run.path / run_directory.SCENARIO) for run in report.runs]
    parts = [_folded(f"scenario.yaml of {label}", file.read_text(encoding="utf-8")) for label, file in files]
    parts += [_folded(f"plan of {run.label}", plan_text(run.run.plan)) for run in report.runs]
    return Section("sources", "Scenario and plans", join([tag("p", _ABOUT), *parts]))


def _folded(summary: str, text: str) -> Html:
    return tag("details", tag("summary", summary), tag("pre", tag("code", text.strip()), tabindex=0))
