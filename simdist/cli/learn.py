"""`simdist learn`."""

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from simdist.cli import common, inputs
from simdist.cli.sweep import open_workers
from simdist.cli.tables import STEP_TIME, Column, factor_with_interval, seconds_with_interval, table_text
from simdist.errors import ScenarioError
from simdist.learning.curves import TRAINING_LOSS, Target, parse_target
from simdist.learning.summary import learn, learned_row, sentences
from simdist.learning.timing import timed
from simdist.learning.training import Setting, Trainer, describe
from simdist.scenario import Scenario
from simdist.settings.units import parse_seconds
from simdist.studies.comparison import find_baseline
from simdist.sweep.store import ROWS, Store

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WIDTH = 120  # of sentences
_EVALUATIONS = 20  # of a run
_LINE_S = 30.0
_MEANING = (
    "Drift: how far the ranks' parameters are from their average then. Noise scale: samples in a batch of all ranks "
    "beyond which larger ones hardly help. ±: 95 % over seeds."
)


def _value(center: float, interval: tuple[float, float] | None, *, form: str = ".4g") -> str:
    half = (interval[1] - interval[0]) / 2 if interval else 0.0
    return f"{center:{form}}" + (f" ± {half:.2g}" if half else "")


def _columns(target: Target | None) -> list[Column]:
    """Return the columns of the table: per step, and to the target."""
    to_target = [
        Column("there", "reached", "runs", form="{} of {}".format),
        Column("steps to target", "steps_to_target", "steps_to_target_ci95", form=partial(_value, form=",.0f")),
        Column("time to target", "target_s", "target_s_ci95", form=seconds_with_interval),
        Column("speed-up to target", "target_speedup", "target_speedup_ci95", form=factor_with_interval),
    ]
    return [
        *(Column("schedule"), STEP_TIME),
        Column("speed-up per step", "speedup", "speedup_ci95", form=factor_with_interval),
        *(to_target if target else ()),
        Column("at the end", "final", "final_ci95", form=_value),
        Column("drift", form="{:.2g}".format),
        Column("noise scale", "noise_scale", form="{:,.0f}".format),
    ]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How runs are trained, as commands share it: `options`."""

    task: str
    target: str | None
    steps: int | None
    evaluate_every: int | None
    workers: int | None
    scheduler: str | None
    device: str
    time_limit: str

    def setting(self, scenario: Scenario) -> Setting:
        """Return how runs of a scenario are trained; the program that trains tells the task's tensors.

        Raises:
            ScenarioError: There is no such task, or the limit is no time.
        """
        try:
            time_limit_s = parse_seconds(self.time_limit)
        except ValueError as error:
            raise ScenarioError(f"--time-limit: {error}") from None
        every = self.evaluate_every or math.ceil(scenario.steps / _EVALUATIONS)
        return Setting(describe(self.task, seed=scenario.seed), every, self.device, time_limit_s)

    @contextmanager
    def trainer(self, session: common.Session, output: Path | None) -> Iterator[Trainer]:
        """Give what trains, and keeps runs in a folder if there is one."""
        with ExitStack() as stack:
            store = stack.enter_context(Store(output)) if output else None
            bar = stack.enter_context(session.bar(line_every_s=_LINE_S))
            pool = stack.enter_context(open_workers(session, self.workers, self.scheduler))
            try:
                yield Trainer(store, pool, bar.update)
            except KeyboardInterrupt:
                session.saved += [f"finished runs in {output / ROWS}"] if output else []
                raise


def options(function: _Function) -> Callable[..., Any]:
    """Add the options of `TrainingOptions`, but for the task."""
    for option in (
        click.option("--time-limit", default="1 h", metavar="TIME", help="Of a training run; it is ended then."),
        click.option("--device", default="cpu", help="Of training, as torch names it; cuda with --workers 1."),
        click.option("--scheduler", metavar="WHERE", help="Dask's, as of sweep; its workers need torch and FILE."),
        click.option("--workers", type=click.IntRange(0, 10_000), help="Runs at once; 0: in turn; one per core."),
        click.option("--evaluate-every", type=common.positive, metavar="M", help="Steps; else a twentieth of a run."),
        click.option("--steps", type=common.positive, metavar="N", help="Of a run; else as the scenario says."),
        click.option("--target", metavar="TEXT", help="'METRIC >= x' or '<= x'; also rank0.METRIC, or loss."),
    ):
        function = option(function)
    return function


@click.command("learn")
@common.scenario
@click.option("--task", required=True, metavar="FILE|NAME", help="What is learnt: a Python file, or one that ships.")
@click.option("--seeds", "n_seeds", type=common.positive, default=5, help="Of learning, each with one of delays.")
@click.option("--baseline", default="sync", metavar="LABEL", help="Schedule to compare with.")
@click.option("-o", "--output", type=common.path, metavar="DIR", required=True, help="Append runs there; go on.")
@options
@common.plot
@common.options
def command(
    session: common.Session, name: str, *, n_seeds: int, baseline: str, output: Path, plot: Path | None, **how: Any
) -> None:
    """Show when a model reaches a target under each schedule.

    Every schedule trains the task, with the arithmetic of all ranks and for every seed, in a process per core. Times
    are those of the scenario's workload, simulated with the same schedules and steps. Run it again after an
    interruption, or with another target: what is in DIR is not trained again.
    """
    inputs.check_picture(plot)
    asked = TrainingOptions(**how)
    target = parse_target(asked.target) if asked.target else None
    scenario = inputs.read_scenario(session, name)
    scenario = scenario.changed(steps=asked.steps or scenario.steps)
    reference, found = find_baseline(scenario, baseline), []
    setting = asked.setting(scenario)
    with session.bar() as bar:
        for number, schedule in enumerate(scenario.schedules):
            bar.update(f"simulating {schedule.name}", number, len(scenario.schedules))
            with inputs.naming(f"{name}: {schedule.name}"):
                found.append(timed(scenario, schedule, setting.task, n_seeds=n_seeds))
    with asked.trainer(session, output) as trainer:
        learned = learn(found, setting, trainer)
    base = learned[scenario.schedules.index(reference)]
    rows = [learned_row(each, base, target) for each in learned]
    said = list(sentences(learned, base, target)) if target else []
    about = f"{scenario.name}: {scenario.cluster.world_size:,} ranks, {scenario.steps:,} steps"
    title = f"{about}, {n_seeds} seed{'s' * (n_seeds > 1)} of {Path(asked.task).name}; speed-up over {reference.name}"
    document = {"scenario": scenario.name, "baseline": reference.name, "rows": rows, "sentences": said}
    session.result(document | about_target(setting, target), learned_text(title, setting, target, rows, said))
    if plot:
        from simdist.report.learning import learning_figure

        session.draw(learning_figure(learned, target, title=title), plot)


def about_target(setting: Setting, target: Target | None) -> dict[str, object]:
    """Return what JSON says of the task and the target."""
    return {"task": setting.task.name, "target": target and str(target), "evaluate_every": setting.evaluate_every}


def learned_text(
    title: str, setting: Setting, target: Target | None, rows: Sequence[dict[str, Any]], said: Sequence[str]
) -> str:
    """Return the table of `learned_row`s, what its columns mean, and what a reader of it must know."""
    every = f"{setting.evaluate_every:,} steps"
    about = f"Target: {target}, looked at every {every}. " if target else ""
    notes = [f"{about}At the end: {(target or TRAINING_LOSS).what}. {_MEANING}", *(f"{each}." for each in said)]
    return "\n\n".join([table_text(title, _columns(target), rows), *(textwrap.fill(each, _WIDTH) for each in notes)])
