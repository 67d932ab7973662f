"""The answer of `simdist learn`: when a model reaches a target under each schedule."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from simdist.display import Pictured
from simdist.errors import naming
from simdist.learning.curves import TRAINING_LOSS, Target
from simdist.learning.summary import Learned, curves_record, learned_row, remarks_on_learning, train_schedules
from simdist.learning.timing import timed
from simdist.learning.training import TaskSetting, Trainer
from simdist.scenario import Scenario
from simdist.settings.base import plural
from simdist.settings.units import in_range
from simdist.studies.columns import (
    SCHEDULE,
    STEP_TIME,
    Column,
    ends_of,
    factor_with_interval,
    frame_of_records,
    seconds_with_interval,
)
from simdist.studies.comparison import find_baseline
from simdist.studies.remarks import Remark, below_table, documents, remarks_of, with_remarks
from simdist.studies.statistics import is_wide
from simdist.studies.tables import table_text

if TYPE_CHECKING:
    import pandas as pd

_ENDS = "final_ranks"  # two numbers, which are two columns of frames
_WIDTH = 120  # of sentences
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


def learning_document(
    about: Mapping[str, object],
    learned: Sequence[Learned],
    rows: Sequence[Mapping[str, object]],
    remarks: Sequence[Remark],
    *,
    title: str,
    task: TaskSetting,
    target: Target | None,
) -> dict[str, Any]:
    """Return schedules that learned a task as JSON. `simdist report` draws it.

    Columns:
        scenario, baseline (str): Name and label.
        task (str): Name, or path of the file.
        target (str or null): In words.
        target_value (float or null): Its value.
        evaluate_every (int): Steps between evaluations.
        title, meaning, metric (str): Title of the table; meaning of its columns; metric of the target.
        rows (list): "A schedule that learns".
        remarks (list): "A remark".
        curves (list): "A curve of a schedule that learns".
    """
    every = task.evaluate_every
    looked = f"Target: {target}, looked at every {every:,} steps. " if target else ""
    return {
        **about,
        "task": task.name,
        "target": target and str(target),
        "evaluate_every": every,
        "meaning": f"{looked}At the end: {(target or TRAINING_LOSS).what}. {_MEANING}",
        "rows": list(rows),
        "remarks": documents(remarks),
        **curves_record(learned, target, title=title),
    }


def learning_text(document: Mapping[str, Any]) -> str:
    """Return a `learning_document` as a table, what its columns mean, and the remarks on it."""
    rows = document["rows"]
    parts = [
        table_text(document["title"], learned_columns(rows), rows),
        *(textwrap.fill(each, _WIDTH) for each in learned_sentences(document)),
        *below_table(Remark(**each) for each in document["remarks"]),
    ]
    if entries := document.get("entries"):
        parts.append(entries)
    return "\n\n".join(parts)


def _cells(key: str, value: Any) -> dict[str, object]:
    return ends_of(key, value) if key == _ENDS else {key: value}


def learned_sentences(document: Mapping[str, Any]) -> list[str]:
    """Return what the columns of a `learning_document` mean, then the verdict of a search."""
    verdict = document.get("verdict")
    return [document["meaning"], *([f"{verdict}."] if verdict else [])]


def learned_columns(rows: Sequence[Mapping[str, object]]) -> list[Column]:
    """Return the columns of rows by `learned_row`."""
    return [each for each in _COLUMNS if each.keys[0] in rows[0]]


@final
class LearnedSchedules(list[Learned], Pictured):
    """Schedules that learned a task, with the same seeds.

    >>> LearnedSchedules([])
    []
    """

    def __init__(
        self,
        rows: Iterable[Learned],
        *,
        target: Target | None = None,
        task: TaskSetting | None = None,
        baseline: int = 0,
        title: str = "learning",
    ) -> None:
        """Take the schedules.

        Args:
            rows: One for each.
            target: What frames, pictures and tables tell of; the training loss if None.
            task: The task. The document needs it.
            baseline: Number of the schedule that speed-ups are over.
            title: Heading of the table.
        """
        super().__init__(rows)
        self.target = target
        self.task = task
        self.baseline = baseline
        self.title = title

    def records(self) -> list[dict[str, Any]]:
        """Return the row of each schedule, see `learned_row`."""
        return [learned_row(each, self[self.baseline], self.target) for each in self]

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What to know beside the table: remarks on the scenario, then on what was learned."""
        base = self[self.baseline]
        return (*remarks_of(base.timed.scenario), *remarks_on_learning(self, base, self.target))

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON, see `learning_document`."""
        assert self.task
        base = self[self.baseline]
        about = {"scenario": base.timed.scenario.name, "baseline": base.timed.schedule.name}
        return learning_document(
            about, self, self.records(), self.remarks, title=self.title, task=self.task, target=self.target
        )

    def text(self) -> str:
        """Return the answer as a table, with sentences about it."""
        return learning_text(self.document())

    def frame(self) -> "pd.DataFrame":
        """Return one row per schedule, with the columns of `simdist learn`.

        The ends of an interval such as `step_s_ci95`, and the two numbers of `final_ranks`, are two columns each.
        """
        rows = [
            {name: cell for key, value in row.items() for name, cell in _cells(key, value).items()}
            for row in self.records()
        ]
        return with_remarks(frame_of_records(rows), self.remarks if self else ())

    def __repr__(self) -> str:
        return self.text() if self else "[]"


def learn(
    scenario: Scenario,
    task: TaskSetting,
    trainer: Trainer,
    *,
    n_seeds: int = 5,
    baseline: str | None = None,
    target: Target | None = None,
) -> LearnedSchedules:
    """Train a task under each schedule of a scenario, and simulate the times of its steps.

    Args:
        scenario: Its number of steps is that of a run.
        task: The task and its training settings.
        trainer: The trainer.
        n_seeds: Training seeds. Seed i meets delay seed i.
        baseline: Label or kind of the schedule that the others are compared with; see
            `simdist.studies.comparison.default_baseline`.
        target: The target, if any.

    Raises:
        ScenarioError: There is no such baseline, or the training program refuses a run.
        PlanError: A schedule does not fit the cluster, or the task's tensors.
        RunError: Runs fail. The results of the others are kept.
    """
    reference = find_baseline(scenario, baseline)
    found = []
    for number, schedule in enumerate(scenario.schedules):
        trainer.progress(f"simulating {schedule.name}", number, len(scenario.schedules))
        with naming(schedule.name):
            found.append(timed(scenario, schedule, task, n_seeds=n_seeds))
    what = f"{scenario.steps:,} steps of {Path(task.name).name}, {n_seeds} {plural(n_seeds, 'seed')}"
    return LearnedSchedules(
        train_schedules(found, task, trainer),
        target=target,
        task=task,
        baseline=scenario.schedules.index(reference),
        title=f"{scenario.name}: {scenario.cluster.world_size:,} ranks, {what}; speed-up over {reference.name}",
    )
