"""What the commands read: scenarios by file or name, the schedules that were asked for, where results go."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from simdist import scenario as scenarios
from simdist.cli.session import Session
from simdist.errors import PlanError, ScenarioError, UnsupportedError
from simdist.runs import run_directory
from simdist.scenario import Scenario, presets
from simdist.schedules import Schedule
from simdist.settings.base import nearest, shown
from simdist.studies.resampling import longest_period, runs_of

_PICTURES = (".png", ".svg", ".pdf")


def read_scenario(session: Session, name: str, *, is_compared: bool = False) -> Scenario:
    """Read a scenario from a file or, if there is none, the preset of that name; tell what has no effect in it.

    Args:
        session: This run of the command line.
        name: Of the file or preset.
        is_compared: It will be run as `simdist.studies.resampling` says, so seeds and steps
            have the effect that they have there.

    Raises:
        ScenarioError: It cannot be read, or is wrong.
    """
    path = Path(name)
    if name == "-":
        raise ScenarioError("-: standard input is not read: write the name of a file, other files are relative to it")
    if path.is_dir():
        raise ScenarioError(f"{name}: is a directory: write the name of a scenario file, or of a preset")
    if not path.exists():
        known = presets.names("scenarios")
        if name not in known:
            raise ScenarioError(f"{name}: there is no such file, nor a preset of that name: {nearest(name, known)}")
        path = presets.path("scenarios", name)
    scenario = scenarios.load(path)
    run = runs_of(scenario, longest_period(scenario, scenario.schedules)).scenario if is_compared else scenario
    for warning in run.warnings:
        session.say(f"warning: {name}: {warning}")
    return scenario


def choose(scenario: Scenario, label: str | None, *, where: str) -> tuple[Schedule, ...]:
    """Return the schedule with a label, or all.

    Raises:
        ScenarioError: There is none of that label.
    """
    chosen = tuple(schedule for schedule in scenario.schedules if label in (None, schedule.name))
    if not chosen:
        labels = [schedule.name for schedule in scenario.schedules]
        raise ScenarioError(f"{where}: no schedule is labelled {shown(label)}: {nearest(label, labels)}")
    return chosen


def read_runs(name: str, label: str | None) -> list[run_directory.RunDirectory]:
    """Read the run directory at a path, or those inside it, of all schedules or of the one with a label.

    Raises:
        ScenarioError: There is none, or none of that label.
        PlanError: A plan or delays are wrong or do not fit.
        TraceError: A trace is damaged, or of another plan.
    """
    found = [run_directory.read(path) for path in run_directory.find(Path(name))]
    labels = [each.scenario.schedules[0].name for each in found]
    chosen = [each for each, each_label in zip(found, labels, strict=True) if label in (None, each_label)]
    if not chosen:
        raise ScenarioError(f"{name}: no run is labelled {label!r}; there are: {', '.join(labels)}")
    return chosen


def measure_command(run: Path, world_size: int) -> str:
    """Return the command that executes a run directory for real, all of its ranks on one machine."""
    return f"torchrun --nproc-per-node {world_size} -m real {run}"


def targets(output: Path, schedules: Sequence[Schedule]) -> list[Path]:
    """Return the run directory of each schedule: `output` itself for one, directories in it for several.

    Raises:
        ScenarioError: A label is no name of a directory.
        PlanError: There is a run directory in the way.
    """
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


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Say where a plan or an engine was when it refused.

    Raises:
        PlanError: As raised inside.
        UnsupportedError: As raised inside.
    """
    try:
        yield
    except (PlanError, UnsupportedError) as error:
        raise type(error)(f"{where}: {error}") from error


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be written, before the work is done.

    Raises:
        ScenarioError: It is of an unknown type, or its directory is missing.
    """
    if path is None:
        return
    if path.suffix not in _PICTURES:
        raise ScenarioError(f"{path}: unknown type of picture {path.suffix!r}: write one of {', '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise ScenarioError(f"{path}: there is no directory {path.parent}: make it first")
