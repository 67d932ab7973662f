"""Sources of the runs: the scenario as it stands in the run directories, and the plan of each schedule."""

from simdist.plan.text import plan_text
from simdist.report.page.document import Section
from simdist.report.page.html import Html, join, tag
from simdist.report.page.model import ReportedRun, RunsReport
from simdist.runs import run_directory

_ABOUT = (
    "With these files every number on this page can be computed again: the scenario of each run, and the plan that "
    "was made of it."
)
_SCHEDULES = "\nschedules:"


def sources_section(report: RunsReport) -> Section:
    """Show scenarios and plans, folded."""
    first, *others = report.runs
    base = _yaml(first)
    parts = [_folded(f"scenario.yaml of {first.label}", base)]
    parts += [_scenario(run, base, first.label) for run in others]
    parts += [_folded(f"plan of {run.label}", plan_text(run.run.plan)) for run in report.runs]
    return Section("sources", "Scenario and plans", join([tag("p", _ABOUT), *parts]))


def _yaml(run: ReportedRun) -> str:
    return (run.run.path / run_directory.SCENARIO).read_text(encoding="utf-8")


def _scenario(run: ReportedRun, base: str, base_label: str) -> Html:
    """Show a scenario; of one that differs in its schedule only, only that."""
    text = _yaml(run)
    common, found, schedule = text.partition(_SCHEDULES)
    if found and base.partition(_SCHEDULES)[0] == common:
        return _folded(f"scenario.yaml of {run.label}: as {base_label}, but for the schedule", f"schedules:{schedule}")
    return _folded(f"scenario.yaml of {run.label}", text)


def _folded(summary: str, text: str) -> Html:
    block = tag("pre", tag("code", text.strip()), tabindex=0)
    return tag("details", tag("summary", summary), block)
