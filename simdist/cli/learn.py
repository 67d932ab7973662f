"""`simdist learn`."""

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click

from simdist.cli import common, inputs
from simdist.cli.sweep import open_workers
from simdist.errors import naming
from simdist.jobs.store import ROWS, Store
from simdist.learning.curves import TRAINING_LOSS, Target, parse_target
from simdist.learning.summary import Learned, curves_record, learn, learned_row, sentences
from simdist.learning.timing import timed
from simdist.learning.training import TaskSetting, Trainer, describe
from simdist.machine import free_memory_nbytes
from simdist.scenario import Scenario
from simdist.settings.base import plural
from simdist.settings.units import in_range, parse_seconds
from simdist.studies.columns import SCHEDULE, STEP_TIME, Column, factor_with_interval, seconds_with_interval
from simdist.studies.comparison import find_baseline
from simdist.studies.statistics import is_wide
from simdist.studies.tables import table_text

_Function = TypeVar("_Function", bound=Callable[..., Any])

_Record: TypeAlias = dict[str, object]
_Rows: TypeAlias = Sequence[dict[str, Any]]

#: The last answer, in the folder of its runs.
LEARNED = "learned.json"

_WIDTH = 120  # of sentences
_EVALUATIONS = 20  # of a run
_LINE_S = 30.0
_MEANING = (
    "Drift: largest distance of the ranks' parameters from their average at an evaluation; averaging there lowers the "
    "loss by curvature x drift^2 / 2. Noise scale: samples in a global batch beyond which larger ones hardly help. "
    "±: 95 % over seeds."
)


def _value(center: float, interval: tuple[float, float] | None, *, form: str = ".4g") -> str:
    if interval and center > 0 and interval[0] > 0 and is_wide(center, interval):
        return in_range(center, *interval, form=lambda number: f"{number:{form}}")
    half = (interval[1] - interval[0]) / 2 if interval else 0.0
    return f"{center:{form}}" + (f" ± {float(f'{half:.2g}'):,g}" if half else "")


_COLUMNS = (
    SCHEDULE,
    STEP_TIME,
    Column("speed-up per step", "speedup", "speedup_ci95", form=factor_with_interval),
    Column("there", "reached", "runs", form="{} of {}".format),
    Column("steps to target", "steps_to_target", "steps_to_target_ci95", form=partial(_value, form=",.0f")),
    Column("time to target", "target_s", "target_s_ci95", form=seconds_with_interval),
    Column("speed-up to target", "target_speedup", "target_speedup_ci95", form=factor_with_interval),
    Column("at the end", "final", "final_ci95", form=_value),
    Column("ranks at the end", "final_ranks", form=lambda ends: " to ".join(f"{each:.3g}" for each in ends)),
    Column("drift", form="{:.2g}".format),
    Column("curvature", form="{:.3g}".format),
    Column("noise scale", "noise_scale", form="{:,.0f}".format),
    Column("front"),
)


@dataclass(frozen=True)
class TrainingOptions:
    """How runs are trained, as commands share it: `options`."""

    task: str | None = None
    target: str | None = None
    steps: int | None = None
    evaluate_every: int | None = None
    workers: int | None = None
    scheduler: str | None = None
    device: str = "cpu"
    time_limit: str = "1 h"
    output: Path | None = None

    def described(self, scenario: Scenario) -> tuple[TaskSetting, Target | None]:
        """Return the task, how runs of a scenario train it, and the target.

        Raises:
            ScenarioError: There is no such task, or it has no such metric, or the limit is no time.
        """
        target = None if self.target is None else parse_target(self.target)
        limit_s = common.parsed("--time-limit", self.time_limit, parse_seconds)
        every = self.evaluate_every or math.ceil(scenario.steps / _EVALUATIONS)
        task = describe(str(self.task), every, seed=scenario.seed, time_limit_s=limit_s)
        (target or TRAINING_LOSS).check(task.metrics)
        return replace(task, device=self.device), target

    @contextmanager
    def trainer(self, session: common.Session) -> Iterator[Trainer]:
        """Give what trains, and keeps runs in a folder if there is one."""
        output = self.output
        with ExitStack() as stack:
            store = stack.enter_context(Store(output)) if output else None
            bar = stack.enter_context(session.bar(line_every_s=_LINE_S))
            pool = stack.enter_context(open_workers(session, self.workers, self.scheduler))
            free_nbytes = free_memory_nbytes() if (self.scheduler, self.device) == (None, "cpu") else None
            trainer = Trainer(store, pool, bar.update, say=session.say, free_nbytes=free_nbytes)
            try:
                yield trainer
            finally:  # told if it is interrupted
                if output and trainer.curves:
                    session.saved.append(f"{len(trainer.curves):,} finished runs in {output / ROWS}")


def options(function: _Function) -> Callable[..., Any]:
    """Add the options of `TrainingOptions`, but for the task."""
    plain = TrainingOptions()
    for option in (
        click.option("-o", "--output", type=common.path, metavar="DIR", help="Append finished runs; resume from them."),
        click.option(
            "--time-limit", default=plain.time_limit, metavar="TIME", help="Stop a training run after this time."
        ),
        click.option(
            "--device",
            default=plain.device,
            type=click.Choice(["cpu", "cuda"]),
            help="Where to train; cuda needs --workers 1.",
        ),
        click.option(
            "--scheduler",
            type=common.file_name,
            metavar="WHERE",
            help="Dask scheduler, as for sweep; its workers need torch and FILE.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(0, 10_000),
            help="Parallel runs; 0: one at a time; one per core if omitted.",
        ),
        click.option(
            "--evaluate-every",
            type=common.positive,
            metavar="M",
            help="Steps between evaluations; a twentieth of a run if omitted.",
        ),
        click.option("--steps", type=common.positive, metavar="N", help="Steps of a run; the scenario's if omitted."),
        click.option("--target", metavar="TEXT", help="'METRIC >= x' or '<= x'; also rank0.METRIC, or loss."),
    ):
        function = option(function)
    return function


@click.command("learn")
@common.scenario
@click.option(
    "--task",
    type=common.file_name,
    required=True,
    metavar="FILE|NAME",
    help="The task: a Python file, or a built-in one.",
)
@click.option(
    "--seeds",
    "n_seeds",
    type=click.IntRange(1, 1_000_000),
    default=5,
    help="Training seeds; seed i meets delay seed i.",
)
@common.baseline
@options
@common.options
def command(session: common.Session, name: str, *, n_seeds: int, baseline: str | None, **how: Any) -> None:
    """Show when a model reaches a target under each schedule.

    Each schedule trains the task for each seed, with the exact arithmetic of all ranks, one process per core. Times
    come from simulating the scenario's workload with the same schedules and steps. Rerun it after an interruption or
    with another target: runs in DIR are not trained again.
    """
    asked = TrainingOptions(**how)
    scenario = inputs.read_scenario(session, name)
    scenario = scenario.changed(steps=asked.steps or scenario.steps)
    reference = find_baseline(scenario, baseline)
    found = []
    task, target = asked.described(scenario)
    with session.bar() as bar:
        for number, schedule in enumerate(scenario.schedules):
            bar.update(f"simulating {schedule.name}", number, len(scenario.schedules))
            with naming(f"{name}: {schedule.name}"):
                found.append(timed(scenario, schedule, task, n_seeds=n_seeds))
    with asked.trainer(session) as trainer:
        learned = learn(found, task, trainer, target=target)
    base = learned[scenario.schedules.index(reference)]
    rows = [learned_row(each, base, target) for each in learned]
    said = list(sentences(learned, base, target))
    what = f"{scenario.steps:,} steps of {Path(task.name).name}, {n_seeds} {plural(n_seeds, 'seed')}"
    title = f"{scenario.name}: {scenario.cluster.world_size:,} ranks, {what}; speed-up over {reference.name}"
    job: _Record = {"scenario": scenario.name, "baseline": reference.name}
    show(session, title, task, target, job, learned, rows, said, asked.output)


def show(
    session: common.Session,
    title: str,
    task: TaskSetting,
    target: Target | None,
    about: _Record,
    learned: Sequence[Learned],
    rows: _Rows,
    said: list[str],
    folder: Path | None,
) -> None:
    """Print the table of `learned_row`s, what its columns mean, and what a reader of it must know.

    What is printed as JSON is written into the folder, if there is one, for `simdist report`.

    Columns:
        scenario (str): Its name.
        baseline (str): Label.
        task (str): Name, or path of the file.
        target (str or null): In words.
        evaluate_every (int): Steps between evaluations.
        title (str): Title of the table.
        meaning (str): Meaning of its columns.
        metric (str): Metric of the target, or the training loss, in words.
        target_value (float or null): Value of the target.
        rows (list): "A schedule that learns".
        sentences (list): What the rows do not show (str).
        curves (list): "A curve of a schedule that learns".
    """
    every = task.evaluate_every
    looked = f"Target: {target}, looked at every {every:,} steps. " if target else ""
    meaning = f"{looked}At the end: {(target or TRAINING_LOSS).what}. {_MEANING}"
    table = table_text(title, columns(rows), rows)
    text = "\n\n".join([table, *(textwrap.fill(each, _WIDTH) for each in (meaning, *(f"{each}." for each in said)))])
    if entries := about.get("entries"):
        text += f"\n\n{entries}"
    about |= {"task": task.name, "target": target and str(target), "evaluate_every": every, "meaning": meaning}
    found = about | {"rows": rows, "sentences": said, **curves_record(learned, target, title=title)}
    if folder:
        inputs.save_text(folder / LEARNED, json.dumps(found, indent=1))
    session.result(found, text)


def columns(rows: _Rows) -> list[Column]:
    """Return the columns of `learned_row`s."""
    return [each for each in _COLUMNS if each.keys[0] in rows[0]]
