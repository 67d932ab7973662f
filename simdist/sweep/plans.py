"""Run directories of a sweep: what is simulated by thousands can be run for real by dozens."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from simdist.errors import PlanError, RunError, ScenarioError, UnsupportedError
from simdist.runs import run_directory
from simdist.runs.build import build, delays
from simdist.scenario import Scenario
from simdist.sweep.definition import Point, Sweep
from simdist.sweep.performed import POINT, PlannedPoint
from simdist.sweep.table import RUNS
from simdist.sweep.tasks import alone

MAX_PLANS = 1_000
"""Run directories that are written at most: someone has to run them."""

Progress = Callable[[int, int], None]
"""Called with points that are done and points in all."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What was written.

    Args:
        runs: The run directories.
        failed: What was left out: where, and why.
    """

    runs: tuple[Path, ...]
    failed: tuple[str, ...]


def write_plans(sweep: Sweep, folder: Path, *, force: bool = False, progress: Progress | None = None) -> Planned:
    """Write a run directory for every row of a sweep: FOLDER/runs/POINT/LABEL.

    They have the delays of the scenario's seed, the first of those that the sweep averages over. What a point sets
    stands beside its runs, so that tables show it. Schedules that fail are left out.

    Args:
        sweep: What to plan.
        folder: That of the sweep.
        force: Replace other runs that are there, and delete their traces.
        progress: See `Progress`.

    Raises:
        ScenarioError: These are too many rows.
        RunError: A file cannot be written.
    """
    check_number(sweep)
    points = [(point, sweep.tree_of(point)) for point in sweep.points()]
    digits = len(str(len(points) - 1))
    runs: list[Path] = []
    failed: list[str] = []
    for number, (point, tree) in enumerate(points):
        if progress:
            progress(number, len(points))
        for row in sweep.keys(tree):
            path = folder / RUNS / f"{point.number:0{digits}}" / row.label
            try:
                _write(alone(tree, row, sweep.folder), path, name=f"{sweep.name}-{point.number}", force=force)
            except (ScenarioError, PlanError, UnsupportedError) as error:
                failed.append(f"point {point.number}, {row.label}: {error}")
            else:
                _write_point(sweep, point, path.with_name(POINT))
                runs.append(path)
    return Planned(tuple(runs), tuple(failed))


def check_number(sweep: Sweep) -> None:
    """Refuse to plan a sweep that has too many rows.

    Raises:
        ScenarioError: It has.
    """
    first = itertools.islice(sweep.points(), MAX_PLANS)
    if sweep.n_points > MAX_PLANS or sum(len(sweep.keys(sweep.tree_of(point))) for point in first) > MAX_PLANS:
        raise ScenarioError(
            f"{sweep.name}: more than {MAX_PLANS:,} run directories, of {sweep.n_points:,} points: vary less, or write "
            f"sample: {{kind: sobol, points: 64}}"
        )


def _write(scenario: Scenario, path: Path, *, name: str, force: bool) -> None:
    """Write the run directory of the only schedule of a scenario."""
    one = scenario.model_copy(update={"name": name})
    run_directory.write(path, one, build(one, one.schedules[0]).plan, delays(one), force=force)


def _write_point(sweep: Sweep, point: Point, path: Path) -> None:
    """Write what a point sets."""
    chosen = zip(sweep.fields, point.choices, strict=True)
    planned = PlannedPoint(point.number, point.case, {field.column: each for field, each in chosen if each})
    try:
        with run_directory.replacing(path) as part:
            part.write_text(planned.dumps(), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None
