"""The top of the page: which runs these are, and what was executed with which versions."""

import platform
from collections.abc import Callable, Iterator

import numpy as np

import simdist
from simdist.report.page.html import Html, join, prose, tag
from simdist.report.page.machines import Machines
from simdist.report.page.model import Report
from simdist.runs.run_directory import RunDirectory

_LONG = 24  # letters; more need two columns


def heading(report: Report) -> Html:
    """Return the title of the page, the facts of its runs and what a reader must know of them."""
    facts = join(_fact(name, value) for name, value in _facts(report))
    notes = [
        *_simulated_on(report),
        *report.notes,
        *_notes_of_runs(report),
    ]
    shown = tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else ""
    return join([tag("h1", title(report)), tag("p", _about(report)), tag("dl", facts, class_="facts"), shown])


def _fact(name: str, value: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value), class_="wide" if len(value) > _LONG else None)


def title(report: Report) -> str:
    """Return the name of the scenario, or of the first of several."""
    first, *others = dict.fromkeys(run.run.scenario.name for run in report.runs)
    more = f"{len(others)} other scenario{'s' * (len(others) > 1)}"
    return f"{first} and {more}" if others else first


def _notes_of_runs(report: Report) -> Iterator[str]:
    """Yield the notes of runs, once for all runs that have the same."""
    labels: dict[str, list[str]] = {}
    for run in report.runs:
        for note in run.notes:
            labels.setdefault(note, []).append(run.label)
    for note, same in labels.items():
        is_all = 1 < len(same) == len(report.runs)
        yield f"{'All runs' if is_all else ', '.join(same)}: {note}"


def _simulated_on(report: Report) -> Iterator[Html]:
    machines = report.calibrated
    if machines is None:
        return
    name = machines.cluster.name
    yield prose(
        "Simulated are the machines of `{file}`{name}, not those of the scenarios. Where the computation was emulated, "
        "it takes what the scenario says.",
        file=str(machines.file),
        name=f" ({name})" if name else "",
    )


def _about(report: Report) -> str:
    n_runs, n_points = len(report.runs), len(report.points)
    one = "" if report.notes else " of one scenario"
    which = f"{n_runs} schedules{one}" if n_runs > 1 else f"the schedule {report.runs[0].label}"
    if n_points > 1:
        which = f"{n_runs} runs in {n_points} folders"
    how = " and ".join(report.origins)
    return f"What {which} did, {how}: speed, where the time went, who waited for whom."


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    for name, text in _COMMON.items():
        yield name, "; ".join(dict.fromkeys(text(run.run) for run in report.runs))
    yield "schedules", ", ".join(dict.fromkeys(_schedules(report)))
    for origin in report.origins:
        sources = {each.trace.source for _, each in report.executions() if each.origin == origin}
        yield origin, ", ".join(sorted(source.removeprefix(f"{origin} ") for source in sources))
    yield "page by", f"simdist {simdist.__version__}, Python {platform.python_version()}, numpy {np.__version__}"
    for machines, labels in _measured(report):
        yield f"machines of {labels}", machines


def _model(run: RunDirectory) -> str:
    workload = run.scenario.workload
    return f"{workload.name or 'unnamed'}, batch of {workload.batch_size:,} per rank"


_COMMON: dict[str, Callable[[RunDirectory], str]] = {
    "ranks": lambda run: f"{run.plan.world_size:,}",
    "nodes": lambda run: f"{run.scenario.cluster.nodes:,} x {run.scenario.cluster.gpus_per_node:,} GPUs",
    "cluster": lambda run: run.scenario.cluster.name or "without a name, see the scenario below",
    "model": _model,
    "steps": lambda run: f"{run.plan.n_steps:,}",
    "seed": lambda run: f"{run.scenario.seed}",
}
"""What runs have in common, as a rule."""


def _schedules(report: Report) -> Iterator[str]:
    """Yield what tells runs apart: labels, and of several folders the labels of schedules."""
    for run in report.runs:
        yield run.label if len(report.points) == 1 else run.run.scenario.schedules[0].name


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
