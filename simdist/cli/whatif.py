"""`simdist whatif`."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from simdist.cli import common, inputs
from simdist.errors import ScenarioError, TraceError, naming
from simdist.runs import run_directory
from simdist.scenario import Scenario
from simdist.schedules import Schedule, settings_of_name
from simdist.stragglers.answer import WhatifJob, WhatifOptions, answer_whatif, numbers_of, simulated_job
from simdist.stragglers.recording import as_recorded
from simdist.studies.comparison import find_label
from simdist.studies.imported_facts import not_compared
from simdist.studies.loading import loading_cost, no_data
from simdist.studies.proposals import few_schedules
from simdist.studies.remarks import Remark, of_inputs, remarks_of
from simdist.traces.trace import Trace
from simdist.traces.waiting import first_steps

_LINE_S = 30.0
_OF_STRAGGLERS = ("which", "steps", "schedules", "n_runs", "block_steps", "seed", "cluster")


@click.command("whatif")
@click.argument("name", type=common.file_name, metavar="RUN|SCENARIO")
@click.option("--schedule", metavar="LABEL", help="Analyse this schedule; sync, else the first, if omitted.")
@common.which_trace
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Analyse only steps A to B - 1.")
@click.option("--schedules", metavar="LABELS|FILE", help="Compare these schedules, by label or from another scenario.")
@click.option(
    "--resamples", "n_runs", type=click.IntRange(0, 1_000_000), default=200, help="Resampled runs per schedule."
)
@click.option("--block", "block_steps", type=common.positive, metavar="N", help="Block length in steps for resampling.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Seed of the first run; the scenario's if omitted."
)
@click.option(
    "--cluster", type=common.file_name, metavar="FILE|PRESET", help="Simulate with the links of this cluster."
)
@click.option("--data", is_flag=True, help="Show instead what loading the data set costs, by epoch.")
@click.option("--knobs", is_flag=True, help="With --data, also change one setting at a time: which stalls go?")
@common.options
def command(session: common.CliSession, name: str, *, data: bool, knobs: bool, **given: Any) -> None:
    """Show what stragglers cost, and what would help.

    The job without stragglers is a replay in which each operation takes its typical time. The loss against it is shown
    by kind of operation, rank, node and step. The intervals of gains come from runs that are resampled from the
    recorded delays.

    With --data: the time of each epoch, how long ranks stall because no batch is ready, and which level of storage
    samples come from. For a measured RUN, simulated and real side by side.
    """
    if data:
        common.refuse_beside("--data", *_OF_STRAGGLERS)
        _show_loading(session, name, given["schedule"], turns_knobs=knobs)
        return
    common.refuse_without("--data", "knobs")
    options = WhatifOptions(**given)
    with session.bar() as bar:
        bar.update("read", 0, None)
        job = _read_job(session, name, options)
        is_compared = options.n_runs and not not_compared(job.scenario)
        others = _schedules_to_compare(session, job, options.schedules) if is_compared else ()
        found = answer_whatif(job, others, options, bar.update)
    session.result(found.document(), found.text())


def _show_loading(session: common.CliSession, name: str, schedule: str | None, *, turns_knobs: bool) -> None:
    found = []
    with session.bar(line_every_s=_LINE_S) as bar:
        bar.update("read", 0, None)
        bandwidth = inputs.value_in_file(name, "cluster", "storage", "bandwidth")
        sources = inputs.usable(session, name, list(inputs.planned(session, name, schedule)), no_data)
        for number, source in enumerate(sources):

            def progress(what: str, done: float, total: float, number: int = number) -> None:
                bar.update(what, number + done / total, len(sources))

            with naming(name):
                cost = loading_cost(source, turns_knobs=turns_knobs, bandwidth=bandwidth, progress=progress)
            found.append(cost)
    document = {"scenario": name, "rows": [each.document() for each in found]}
    session.result(document, "\n\n\n".join(each.text() for each in found))


def _read_job(session: common.CliSession, name: str, options: WhatifOptions) -> WhatifJob:
    """Read what is looked at: a run directory, a directory with several, or a scenario, which is simulated."""
    if Path(name).is_dir():
        job = _from_directory(session, name, options)
        return (
            replace(job, scenario=inputs.with_links_of_cluster(job.scenario, options.cluster))
            if options.cluster
            else job
        )
    if options.which:
        raise ScenarioError(
            f"{name}: --trace {options.which}: is a scenario, which has no traces; give a run directory"
        )
    scenario = inputs.read_scenario(session, name, is_compared=True)
    if options.cluster:
        scenario = inputs.with_links_of_cluster(scenario, options.cluster)
    if options.seed is not None:
        scenario = scenario.changed(seed=options.seed)
    steps = _places(scenario, options.steps)
    chosen = inputs.choose_schedules(scenario, options.schedule, where=name)
    return simulated_job(name, scenario, chosen[_baseline(chosen)], steps)


def _places(scenario: Scenario, steps: range | None) -> range | None:
    """Return the places of steps with some numbers."""
    if steps is None or not scenario.imported or not scenario.imported.steps:
        return steps
    numbers = numbers_of(scenario, as_recorded(scenario).steps)
    places = range(bisect_left(numbers, steps.start), bisect_left(numbers, steps.stop))
    if not places:
        first = numbers[0]
        raise ScenarioError(
            f"--steps: no traced step is among them; the job was traced in its steps {scenario.imported.steps}: write "
            f"e.g. {first}:{first + 1}"
        )
    return places


def _from_directory(session: common.CliSession, name: str, options: WhatifOptions) -> WhatifJob:
    """Read the run that is looked at; the others tell which schedules to compare."""
    runs = inputs.read_runs(name, None)
    which = options.which
    if options.schedule is not None:
        chosen = inputs.read_runs(name, options.schedule)
    else:
        chosen = [run for run in runs if inputs.trace_file(run, which)] or runs
    run = chosen[_baseline([each.scenario.schedules[0] for each in chosen])]
    file = inputs.required_trace(run, which)
    trace = run_directory.read_trace(file, plan=run.plan)
    if file.name == run_directory.REAL:
        run = run_directory.as_measured(run, trace)
    trace, unfinished = _finished(file, trace)
    remarks = (*remarks_of(run.scenario), *unfinished)
    session.remark(str(run.path), of_inputs(remarks))
    baseline = run.scenario.schedules[0]
    others = {each.scenario.schedules[0].name: each.scenario.schedules[0] for each in runs}
    others.pop(baseline.name)
    return WhatifJob(name, run.scenario, baseline, tuple(others.values()), trace, run, options.steps, remarks)


def _finished(file: Path, trace: Trace) -> tuple[Trace, list[Remark]]:
    """Return the trace of the steps that all ranks have finished, and a remark if some have not finished all."""
    missing = np.flatnonzero(~np.isfinite(trace.end_s).all(axis=1))
    if not len(missing):
        return trace, []
    n_steps = int(np.searchsorted(trace.plan.first_instances(), missing[0], side="right")) - 1
    if not n_steps:
        raise TraceError(f"{file}: no step was finished on all ranks, so there is nothing to replay")
    text = f"{file}: only the first {n_steps} of {trace.plan.n_steps} steps were finished on all ranks"
    return first_steps(trace, n_steps), [Remark("accuracy", text)]


def _baseline(schedules: Sequence[Schedule]) -> int:
    return find_label([(each.name, each.kind) for each in schedules], None) or 0


def _schedules_to_compare(session: common.CliSession, job: WhatifJob, wanted: str | None) -> tuple[Schedule, ...]:
    """Return the schedules to compare with the job's own."""
    if wanted is None:
        return job.others or few_schedules(job.scenario)
    if common.is_file(wanted):
        fitting = job.scenario.changed(schedules=inputs.read_scenario(session, wanted).schedules).schedules
        return tuple(schedule for schedule in fitting if schedule.name != job.baseline.name)
    known = {schedule.name: schedule for schedule in (*job.others, *few_schedules(job.scenario))}
    return tuple(_labelled(job, known, label) for label in _split(wanted, known))


def _split(wanted: str, known: dict[str, Schedule]) -> list[str]:
    """Split at commas, of which labels may have some themselves: each label is the longest that is one."""
    labels: list[str] = []
    parts = wanted.split(",")
    while parts:
        lengths = (n for n in range(len(parts), 0, -1) if _is_label(",".join(parts[:n]), known))
        n_parts = next(lengths, 1)
        labels.append(",".join(parts[:n_parts]))
        del parts[:n_parts]
    return labels


def _is_label(text: str, known: dict[str, Schedule]) -> bool:
    try:
        return text in known or bool(settings_of_name(text))
    except ValueError:
        return False


def _labelled(job: WhatifJob, known: dict[str, Schedule], label: str) -> Schedule:
    if label in known:
        return known[label]
    if not _is_label(label, known):
        raise ScenarioError(
            f"--schedules {label!r}: is no file, and no label of a schedule, such as {', '.join(known) or 'local-8'}"
        )
    return job.scenario.changed(schedules=[label]).schedules[0]
