"""`simdist learn`."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from simdist.cli import common, inputs
from simdist.cli.sweep import open_workers
from simdist.errors import naming
from simdist.files import save_text
from simdist.jobs.store import ROWS, Store
from simdist.learning.answer import LearnedSchedules, learn
from simdist.learning.curves import TRAINING_LOSS, Target, parse_target
from simdist.learning.training import TaskSetting, Trainer, describe
from simdist.machine import free_memory_nbytes
from simdist.scenario import Scenario
from simdist.settings.units import parse_option, parse_seconds
from simdist.studies.comparison import find_baseline

if TYPE_CHECKING:
    from simdist.tuning.racing import Raced

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The last answer, in the folder of its runs.
LEARNED = "learned.json"

_EVALUATIONS = 20  # of a run
_LINE_S = 30.0


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
        limit_s = parse_option("--time-limit", self.time_limit, parse_seconds)
        every = self.evaluate_every or math.ceil(scenario.steps / _EVALUATIONS)
        task = describe(str(self.task), every, seed=scenario.seed, time_limit_s=limit_s)
        (target or TRAINING_LOSS).check(task.metrics)
        return replace(task, device=self.device), target

    @contextmanager
    def trainer(self, session: common.CliSession) -> Iterator[Trainer]:
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
        click.option(
            "-o", "--output", type=common.path_type, metavar="DIR", help="Append finished runs; resume from them."
        ),
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
def command(session: common.CliSession, name: str, *, n_seeds: int, baseline: str | None, **how: Any) -> None:
    """Show when a model reaches a target under each schedule.

    Each schedule trains the task for each seed, with the exact arithmetic of all ranks, one process per core. Times
    come from simulating the scenario's workload with the same schedules and steps. Rerun it after an interruption or
    with another target: runs in DIR are not trained again.
    """
    asked = TrainingOptions(**how)
    scenario = inputs.read_scenario(session, name)
    scenario = scenario.changed(steps=asked.steps or scenario.steps)
    find_baseline(scenario, baseline)  # refused before anything starts
    task, target = asked.described(scenario)
    with asked.trainer(session) as trainer, naming(name):
        learned = learn(scenario, task, trainer, n_seeds=n_seeds, baseline=baseline, target=target)
    show(session, learned, asked.output)


def show(session: common.CliSession, answer: "LearnedSchedules | Raced", folder: Path | None) -> None:
    """Print an answer.

    What is printed as JSON is written into the folder, if there is one, for `simdist report`.
    """
    document = answer.document()
    if folder:
        save_text(folder / LEARNED, json.dumps(document, indent=1))
    session.result(document, answer.text())
