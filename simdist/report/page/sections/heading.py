"""The top of the page: which runs these are, and what was executed with which versions."""

import platform
from collections.abc import Iterator

import numpy as np

import simdist
from simdist.report.page.html import Html, join, prose, tag
from simdist.report.page.machines import Machines
from simdist.report.page.model import Report

__all__ = ["heading"]

_LONG = 24  # letters; more need two columns


def heading(report: Report) -> Html:
    """Return the title of the page, the facts of its runs and what a reader must know of them."""
    facts = join(_fact(name, value) for name, value in _facts(report))
    notes = [*report.notes, *(f"{run.label}: {note}" for run in report.runs for note in run.notes)]
    shown = tag("ul", *(tag("li", prose(note)) for note in notes), class_="notes") if notes else ""
    return join([tag("h1", _title(report)), tag("p", _about(report)), tag("dl", facts, class_="facts"), shown])


def _fact(name: str, value: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value), class_="wide" if len(value) > _LONG else None)


def _title(report: Report) -> str:
    return report.baseline.run.scenario.name


def _about(report: Report) -> str:
    n_runs = len(report.runs)
    one = "" if report.notes else " of one scenario"
    which = f"{n_runs} schedules{one}" if n_runs > 1 else f"the schedule {report.runs[0].label}"
    how = " and ".join(report.origins)
    return f"What {which} did, {how}: speed, where the time went, who waited for whom."


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    scenario, plan = report.baseline.run.scenario, report.baseline.run.plan
    yield "ranks", f"{plan.world_size:,}"
    yield "nodes", f"{scenario.cluster.nodes:,} x {scenario.cluster.gpus_per_node:,} GPUs"
    yield "cluster", scenario.cluster.name or "without a name, see the scenario below"
    yield "model", f"{scenario.workload.name or 'unnamed'}, batch of {scenario.workload.batch_size:,} per rank"
    yield "steps", f"{plan.n_steps:,}"
    yield "seed", f"{scenario.seed}"
    yield "schedules", ", ".join(run.label for run in report.runs)
    for origin in report.origins:
        sources = {each.trace.source for _, each in report.executions() if each.origin == origin}
        yield origin, ", ".join(sorted(source.removeprefix(f"{origin} ") for source in sources))
    yield "page by", f"simdist {simdist.__version__}, Python {platform.python_version()}, numpy {np.__version__}"
    for machines, labels in _measured(report):
        yield f"machines of {labels}", machines


def _measured(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what is known of the machines, once for all runs that were measured on the same."""
    labels: dict[str, list[str]] = {}
    for run in report.runs:
        if run.machines:
            labels.setdefault(_machines_text(run.machines), []).append(run.label)
    for text, same in labels.items():
        yield text, ", ".join(same)


def _machines_text(machines: Machines) -> str:
    hosts = ", ".join(f"{count} on {host}" for host, count in machines.hosts.items())
    parts = [
        f"program {machines.program}, backend {machines.backend}, device {machines.device}",
        f"ranks: {hosts}" if hosts else "",
        ", ".join(f"{name} {version}" for name, version in machines.versions.items()),
    ]
    return "; ".join(part for part in parts if part)
