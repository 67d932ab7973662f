"""Inputs of commands: scenarios, runs and clusters by file or name; and the places for results."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from simdist import scenario as scenarios
from simdist.cli import common
from simdist.errors import PlanError, ScenarioError, naming
from simdist.runs.building import build, delays, price_of
from simdist.scenario import Scenario, presets
from simdist.scenario.by_name import find_file, read_cluster
from simdist.scenario.loading import read_text
from simdist.scenario.strict_yaml import parse
from simdist.schedules import Schedule
from simdist.settings.base import nearest, shown
from simdist.studies.remarks import of_inputs, remarks_of

if TYPE_CHECKING:
    from simdist.runs.planned import PlannedSchedule
    from simdist.runs.run_directory import RunDirectory

_PICTURES = (".png", ".svg", ".pdf")
_OF_LINKS = ("name", "source", "fabric", "network")
_OF_TOPOLOGY = {"nics_per_node", "host_bridge_Bps", "oversubscription"}
_OF_COLLECTIVES = {"library", "overhead_s"}


_FoundT = TypeVar("_FoundT", "RunDirectory", "PlannedSchedule")


def value_in_file(name: str, *keys: str) -> object:
    """Return a value of a scenario as it stands in its file, or in the preset or file of its cluster or workload.

    Args:
        name: Of a scenario, or a run directory.
        keys: Lead to the value, such as `cluster`, `network`, `bandwidth`.

    Returns:
        The value; None if there is none, or in a run directory, which simdist writes.
    """
    if Path(name).is_dir():
        return None
    path = find_file("scenarios", name)
    found: object = parse(read_text(path)).root
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
        if key in ("cluster", "workload"):
            found = presets.expand("cluster" if key == "cluster" else "workload", found, folder=path.parent)
    return found


def read_scenario(session: common.CliSession, name: str, *, is_compared: bool = False) -> Scenario:
    """Read a scenario from a file or, if there is none, the preset of that name; tell what has no effect in it.

    Args:
        session: This run of the command line.
        name: Of the file or preset.
        is_compared: It will be run as `simdist.studies.resampling` says, so seeds and steps
            have the effect that they have there.

    Raises:
        ScenarioError: It cannot be read, or is wrong.
    """
    if name == "-":
        raise ScenarioError("-: standard input is not supported: name a file, as other files are relative to it")
    scenario = scenarios.load(find_file("scenarios", name))
    if is_compared:
        from simdist.studies.resampling import remarks_as_run

        session.remark(name, of_inputs(remarks_as_run(scenario)))
    else:
        session.remark(name, of_inputs(remarks_of(scenario)))
    return scenario


def choose_schedules(scenario: Scenario, label: str | None, *, where: str) -> tuple[Schedule, ...]:
    """Return the schedule with a label, or all.

    Raises:
        ScenarioError: There is none of that label.
    """
    chosen = tuple(schedule for schedule in scenario.schedules if label in (None, schedule.name))
    if not chosen:
        labels = [schedule.name for schedule in scenario.schedules]
        raise ScenarioError(f"{where}: no schedule is labelled {shown(label)}: {nearest(label, labels)}")
    return chosen


def read_runs(name: str, label: str | None) -> "list[RunDirectory]":
    """Read the run directory at a path, or those inside it, of all schedules or of the one with a label.

    Raises:
        ScenarioError: There is none, or none of that label.
        PlanError: A plan or delays are wrong or do not fit.
        TraceError: A trace is damaged, or of another plan.
    """
    from simdist.runs import run_directory

    found = [run_directory.read(path) for path in run_directory.find(Path(name))]
    labels = [each.scenario.schedules[0].name for each in found]
    chosen = [each for each, each_label in zip(found, labels, strict=True) if label in (None, each_label)]
    if not chosen:
        raise ScenarioError(f"{name}: no run is labelled {label!r}; there are: {', '.join(labels)}")
    return chosen


def trace_file(run: "RunDirectory", which: str | None) -> Path | None:
    """Return the trace that is asked for, or else the measured one or the simulated one; None if it is not there."""
    from simdist.runs.run_directory import TRACES

    files = (run.path / TRACES[each] for each in ([which] if which else ["real", "simulated"]))
    return next((file for file in files if file.exists()), None)


def required_trace(run: "RunDirectory", which: str | None) -> Path:
    """Return what `trace_file` does.

    Raises:
        ScenarioError: It is not there.
    """
    from simdist.runs.run_directory import REAL, SIMULATED, TRACES

    if file := trace_file(run, which):
        return file
    missing = TRACES[which] if which else f"{REAL} and no {SIMULATED}"
    how = measure_command(run.path, run.plan.world_size, has_links=run.scenario.has_links)
    raise ScenarioError(
        f"{run.path}: has no {missing}: `simdist simulate {run.path}` makes a simulated trace, `{how}` a measured one"
    )


def usable(
    session: common.CliSession, name: str, found: Sequence[_FoundT], problem_of: Callable[[_FoundT], str | None]
) -> list[_FoundT]:
    """Return the runs, or plans, that a command can use; tell of the others.

    Args:
        session: This run of the command line.
        name: Where they were found.
        found: One or more.
        problem_of: Says why one cannot be used, if so.

    Raises:
        ScenarioError: None can be used.
    """
    problems = [(each, problem_of(each)) for each in found]
    chosen = [each for each, problem in problems if problem is None]
    for each, problem in problems:
        run: Any = getattr(each, "run", each)
        where = run.path if run else name
        if not chosen:
            more = f"; nor can any other run in {name} be used" if len(found) > 1 else ""
            raise ScenarioError(f"{where}: {problem}{more}")
        if problem:
            session.say(f"warning: {where}: left out: {problem}")
    return chosen


def planned(
    session: common.CliSession, name: str, label: str | None, *, output: Path | None = None, draws: bool = True
) -> "Iterator[PlannedSchedule]":
    """Yield the plans of a scenario or of run directories, one after the other.

    Args:
        session: This run of the command line.
        name: Of a scenario, or a run directory, or a directory with several.
        label: Only this schedule.
        output: Where run directories are to be written, see `targets`.
        draws: Draw the delays of a scenario.

    Raises:
        ScenarioError: There is no such scenario, run or label.
        PlanError: A plan is illegal or does not fit, or a run directory is in the way.
    """
    from simdist.runs.planned import PlannedSchedule

    if Path(name).is_dir():
        runs = read_runs(name, label)
        for run, path in zip(runs, targets(output, [each.scenario.schedules[0] for each in runs]), strict=True):
            schedule = run.scenario.schedules[0]
            session.remark(str(run.path), of_inputs(remarks_of(run.scenario)))
            with naming(f"{name}: {schedule.name}"):
                costs = price_of(run.plan, run.scenario)
            yield PlannedSchedule(run.scenario, schedule, run.plan, costs, run.delays, run, path)
        return
    scenario = read_scenario(session, name)
    schedules = choose_schedules(scenario, label, where=name)
    paths = targets(output, schedules)
    drawn = delays(scenario) if draws else None
    for schedule, path in zip(schedules, paths, strict=True):
        with naming(name):
            built = build(scenario, schedule)
        yield PlannedSchedule(scenario, schedule, built.plan, built.costs, drawn, None, path)


def measure_command(run: Path, world_size: int, *, has_links: bool = False) -> str:
    """Return the command that executes a run directory for real, all of its ranks on one machine."""
    links = " --links MODULE:FUNCTION" if has_links else ""
    return f"torchrun --nproc-per-node {world_size} -m real {run}{links}"


def targets(output: Path | None, schedules: Sequence[Schedule]) -> Sequence[Path | None]:
    """Return the run directory of each schedule: `output` itself for one, directories in it for several.

    Without `output` there are none.

    Raises:
        ScenarioError: A label is no name of a directory.
        PlanError: There is a run directory in the way.
    """
    if output is None:
        return [None] * len(schedules)
    from simdist.runs import run_directory

    inside = sorted(file.parent.name for file in output.glob(f"*/{run_directory.PLAN}"))
    if len(schedules) == 1:
        if inside:
            raise PlanError(f"{output}: holds a run for each of {', '.join(inside)}; choose another directory with -o")
        return [output]
    if (output / run_directory.PLAN).exists():
        raise PlanError(
            f"{output}: is the run directory of one plan, {len(schedules)} need another; choose one with -o"
        )
    for schedule in schedules:
        if schedule.name in ("", ".", ".."):
            raise ScenarioError(
                f"label {shown(schedule.name)} cannot name a directory in {output}: write another label"
            )
    return [output / schedule.name for schedule in schedules]


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be written, before the work is done.

    Raises:
        ScenarioError: It is of an unknown type, or its directory is missing.
    """
    if path is None:
        return
    if path.suffix not in _PICTURES:
        raise ScenarioError(f"{path}: unknown type of picture {path.suffix!r}: write one of {', '.join(_PICTURES)}")
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a file whose directory is missing, before the work is done.

    Raises:
        ScenarioError: It is missing.
    """
    if not path.parent.is_dir():
        raise ScenarioError(f"{path}: there is no directory {path.parent}: make it first")


def picture_path(plot: Path, label: str, n_pictures: int) -> Path:
    """Return where a picture goes: into `plot` or, of several, into a file with the label before the suffix."""
    return plot if n_pictures == 1 else plot.with_name(f"{plot.stem}-{label}{plot.suffix}")


def with_links_of_cluster(scenario: Scenario, name: str) -> Scenario:
    """Return a scenario whose ranks communicate over the links of another cluster; all else is its own.

    Args:
        scenario: The scenario to simulate.
        name: See `read_cluster`. A file must have as many nodes and GPUs: links were measured between those. Of a
            preset they do not count.

    Raises:
        ScenarioError: As `read_cluster`; or a file has other numbers of machines.
    """
    theirs = read_cluster(name)
    ours = scenario.cluster
    if Path(name).is_file() and (theirs.nodes, theirs.gpus_per_node) != (ours.nodes, ours.gpus_per_node):
        raise ScenarioError(
            f"--cluster {name}: has {theirs.nodes} nodes x {theirs.gpus_per_node} GPUs, {scenario.name} has "
            f"{ours.nodes} x {ours.gpus_per_node}: write as many, or calibrate the machines of this job"
        )
    links: dict[str, object] = {key: value for key, value in theirs if key in _OF_LINKS}
    links["topology"] = theirs.topology.model_dump(include=_OF_TOPOLOGY)
    links["collectives"] = theirs.collectives.model_dump(include=_OF_COLLECTIVES)
    return scenario.changed(cluster=ours.model_copy(update=links))
