"""The rate of stragglers that a schedule tolerates: it loses no more than a given share of its time.

A straggler is a rank that is late in a step by a given delay, with a probability for each rank and step. The numbers
that decide who is late are the same at every probability, so that more of it never has fewer stragglers, and the
largest tolerable one is found by bisection.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, final

from simdist.display import Pictured
from simdist.errors import ScenarioError, naming
from simdist.runs.building import build
from simdist.scenario import Scenario, load
from simdist.scenario.disturbances import Transient
from simdist.scenario.scenario import AnyScenario
from simdist.schedules import Schedule
from simdist.settings.base import picked, plural
from simdist.settings.units import format_seconds, format_share
from simdist.studies.columns import SCHEDULE, Column, frame_of_records, seconds
from simdist.studies.known_delays import uncorrected_remarks
from simdist.studies.measuring import measure
from simdist.studies.remarks import Remark, below_table, documents, remarks_of, with_remarks
from simdist.studies.tables import table_text

if TYPE_CHECKING:
    import pandas as pd

#: Called with the label of a schedule and the share of it that is done.
_Progress: TypeAlias = Callable[[str, float], None]

_PRECISION = 1.02  # ratio of the probabilities between which the largest tolerable one is


def probability_text(probability: float) -> str:
    """Print a tolerable probability.

    >>> probability_text(0.01234), probability_text(0.0), probability_text(1.0)
    ('1.2 %', 'none', 'always')
    """
    if probability == 1:
        return "always"
    return f"{100 * probability:.2g} %" if probability else "none"


def _steps(n_steps: float) -> str:
    return f"{n_steps:,.3g} steps"


#: Columns of tables for people.
COLUMNS = (
    SCHEDULE,
    Column("step time", "step_s", form=seconds),
    Column("tolerable", "probability", form=probability_text),
    Column("one of all ranks every", "steps_between", form=_steps),
    Column("step time then", "tolerated_step_s", form=seconds),
    Column("lost", "loss", form=format_share),
)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The stragglers that a schedule tolerates.

    Args:
        schedule: Label.
        step_s: Seconds per step without them.
        probability: The largest tolerable one, of each rank in each step: 1 if it tolerates them always, 0 if a single
            one in all simulated steps is too many.
        tolerated_step_s: Seconds per step at that probability.
        world_size: Ranks.
    """

    schedule: str
    step_s: float
    probability: float
    tolerated_step_s: float
    world_size: int

    @property
    def loss(self) -> float:
        """Share of the time that is lost at that probability."""
        return 1 - self.step_s / self.tolerated_step_s

    def record(self) -> dict[str, object]:
        """Return the tolerance of a schedule as JSON.

        Columns:
            schedule (str): Label.
            step_s (float): Seconds per step without stragglers.
            probability (float): Largest tolerable probability that a rank is late in a step.
            steps_between (float or null): Steps between stragglers of the job, if any is tolerable.
            tolerated_step_s, loss (float): Seconds per step, and share lost, at that probability.
        """
        return {
            "schedule": self.schedule,
            "step_s": self.step_s,
            "probability": self.probability,
            "steps_between": 1 / (self.probability * self.world_size) if self.probability else None,
            "tolerated_step_s": self.tolerated_step_s,
            "loss": self.loss,
        }


@final
class Tolerances(list[Tolerance], Pictured):
    """The stragglers that each schedule tolerates.

    >>> Tolerances([], title="no schedule", scenario="job", delay_s=0.2, most_loss=0.05)
    []
    """

    def __init__(
        self,
        rows: Iterable[Tolerance],
        *,
        title: str,
        scenario: str,
        delay_s: float,
        most_loss: float,
        remarks: Iterable[Remark] = (),
    ) -> None:
        """Take the tolerance of each schedule.

        Args:
            rows: One for each.
            title: Heading of tables and pictures.
            scenario: Name of the scenario.
            delay_s: How late a straggler is.
            most_loss: Share of the time that may be lost.
            remarks: What to know beside the table.
        """
        super().__init__(rows)
        self.title = title
        self.scenario = scenario
        self.delay_s = delay_s
        self.most_loss = most_loss
        self.remarks = tuple(remarks)

    def document(self) -> dict[str, object]:
        """Return the answer as JSON.

        Columns:
            scenario (str): Name.
            delay_s, most_loss (float): Delay of a straggler, and share of the time that may be lost.
            rows (list): "Tolerable stragglers".
            remarks (list): "A remark".
        """
        rows = [each.record() for each in self]
        return {**picked(self, "scenario", "delay_s", "most_loss"), "rows": rows, "remarks": documents(self.remarks)}

    def text(self) -> str:
        """Return the same as a table, with the remarks below that only its results tell."""
        return "\n\n".join(
            [table_text(self.title, COLUMNS, [each.record() for each in self]), *below_table(self.remarks)]
        )

    def frame(self) -> "pd.DataFrame":
        """Return one row per schedule, with the columns of `simdist compare --tolerable`."""
        return with_remarks(frame_of_records(each.record() for each in self), self.remarks)


def tolerances(
    scenario: AnyScenario,
    *,
    delay_s: float,
    most_loss: float = 0.05,
    n_seeds: int = 5,
    progress: _Progress | None = None,
    found: list[Tolerance] | None = None,
) -> Tolerances:
    """Return the stragglers that each schedule of a scenario tolerates.

    Args:
        scenario: The scenario, or what `simdist.scenario.load` takes for one. Its transient stragglers are replaced.
        delay_s: How late a straggler is.
        most_loss: Share of the time, above 0 and below 1, that may be lost.
        n_seeds: Seeds to average over.
        progress: Called with the label of a schedule and the share of it that is done.
        found: Takes the tolerance of each schedule as soon as it is known.

    Raises:
        ScenarioError: A number is out of its range, or a step takes no time.
    """
    scenario = load(scenario)
    if not (0 < delay_s < math.inf and 0 < most_loss < 1):
        raise ScenarioError(
            f"delay_s {delay_s}, most_loss {most_loss}: write a delay above 0 s and a share above 0 and below 1"
        )
    found = [] if found is None else found
    for each in scenario.schedules:
        report = partial(progress, each.name) if progress else None
        if report:
            report(0.0)
        with naming(each.name):
            found.append(
                tolerance(scenario, each, delay_s=delay_s, most_loss=most_loss, n_seeds=n_seeds, progress=report)
            )
    title = _title(scenario, delay_s=delay_s, most_loss=most_loss, n_seeds=n_seeds)
    return Tolerances(
        found,
        title=title,
        scenario=scenario.name,
        delay_s=delay_s,
        most_loss=most_loss,
        remarks=_remarks(scenario, n_seeds),
    )


def _remarks(scenario: Scenario, n_seeds: int) -> Iterator[Remark]:
    """Yield the remarks on a scenario whose transient stragglers are replaced."""
    yield from remarks_of(scenario)
    replaced = [f"disturbances[{i}]" for i, each in enumerate(scenario.disturbances) if isinstance(each, Transient)]
    yield from (each for each in uncorrected_remarks(scenario, n_seeds) if each.place not in replaced)


def _title(scenario: Scenario, *, delay_s: float, most_loss: float, n_seeds: int) -> str:
    """Return the heading of what `tolerances` finds."""
    world_size = scenario.cluster.world_size
    counts = f"{world_size:,} ranks, {scenario.steps:,} steps, {n_seeds} {plural(n_seeds, 'seed')}"
    which = f"stragglers of {format_seconds(delay_s)} that cost at most {format_share(most_loss)} of the time"
    return f"{scenario.name}: {counts}; {which}"


def tolerance(
    scenario: Scenario,
    schedule: Schedule,
    *,
    delay_s: float,
    most_loss: float,
    n_seeds: int,
    progress: Callable[[float], None] | None = None,
) -> Tolerance:
    """Return the stragglers that a schedule tolerates.

    Args:
        scenario: With everything else that disturbs the job; its transient stragglers are replaced.
        schedule: One of its schedules.
        delay_s: How late a straggler is.
        most_loss: Share of the time, above 0 and below 1, that may be lost.
        n_seeds: Seeds to average over.
        progress: Called with the share that is done.

    Raises:
        ScenarioError: A step takes no time.
    """
    others = [each for each in scenario.disturbances if not isinstance(each, Transient)]
    world_size = scenario.cluster.world_size
    n_places = scenario.steps * world_size * n_seeds

    def step_s(probability: float) -> float:
        stragglers = [Transient(probability=probability, delay_s=delay_s)] if probability else []
        changed = scenario.changed(disturbances=(*others, *stragglers))
        return float(measure(changed, build(changed, schedule), n_seeds=n_seeds).step_s.mean())

    without_s = step_s(0.0)
    if not without_s:
        raise ScenarioError("a step takes no time; give e.g. forward: 20 ms")
    most_s = without_s / (1 - most_loss)
    if (always_s := step_s(1.0)) <= most_s:
        return Tolerance(schedule.name, without_s, 1.0, always_s, world_size)
    low = 1 / n_places  # fewer are none in most simulations
    high = 1.0
    low_s = step_s(low)
    if low_s > most_s:
        return Tolerance(schedule.name, without_s, 0.0, without_s, world_size)
    n_halvings = math.ceil(math.log2(math.log(high / low) / math.log(_PRECISION)))
    n_done = 0
    while high / low > _PRECISION:
        middle = math.sqrt(low * high)
        middle_s = step_s(middle)
        if middle_s <= most_s:
            low = middle
            low_s = middle_s
        else:
            high = middle
        n_done += 1
        if progress:
            progress(min(n_done / n_halvings, 1.0))
    return Tolerance(schedule.name, without_s, low, low_s, world_size)
