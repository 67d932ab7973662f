"""Remarks: what a user must know beside the numbers of an answer.

Every answer has one list of them, `remarks`, in the same words whoever asks. Commands print it, `document()` has it,
frames carry it in their `attrs`, pages and notebooks show it. The functions of `import simdist` also warn.
"""

import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from simdist.errors import SimdistWarning, naming
from simdist.runs.building import dataset, in_steps, job, lost_share
from simdist.scenario import Interference, Scenario
from simdist.scenario.warnings import unstated, warnings_of
from simdist.settings.units import Elapsed, format_duration, format_share

if TYPE_CHECKING:
    import pandas as pd

Kind: TypeAlias = Literal["input", "derived", "assumption", "result", "accuracy"]

_OF_INPUTS = ("input", "derived")
_DOUBTS = ("input", "accuracy")
_FEW_PERIODS = 10  # of a schedule in a run
_WIDTH = 120  # columns of a sentence
_MOST_SHOWN = 20  # remarks on a table of many points
_CALLERS = 3  # frames from `warnings.warn` to the code of the user
_PATH = re.compile(r"([a-z_]+)((\.\w+|\[\d+\])+|(?=:| has no effect))")


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence beside the numbers of an answer.

    Args:
        kind: `input`: a setting is probably wrong, or has no effect. `derived`: a number follows from settings.
            `assumption`: a number is not stated, or an effect is not modelled. `result`: the table does not show it.
            `accuracy`: a number is less certain than it looks.
        text: The sentence, without full stop.
        place: The path of a setting, such as `disturbances[0]`, or the label of a schedule. Empty: the whole answer.
        points: In a table of results: the points that it is about. Empty: all.
    """

    kind: Kind
    text: str
    place: str = ""
    points: tuple[int | str, ...] = ()

    @property
    def is_of_inputs(self) -> bool:
        """Whether it is known before anything is simulated, so that commands print it first."""
        return self.kind in _OF_INPUTS

    @property
    def is_doubt(self) -> bool:
        """Whether it casts doubt on a number, so that Python warns."""
        return self.kind in _DOUBTS

    def document(self) -> dict[str, object]:
        """Return a remark as JSON.

        Columns:
            kind (str): `input` (a setting is probably wrong, or has no effect), `derived` (a number follows from
                settings), `assumption` (a number is not stated, or an effect is not modelled), `result` (the table
                does not show it) or `accuracy` (a number is less certain than it looks).
            text (str): Sentence.
            place (str): Path of a setting, or label of a schedule. Empty: the whole answer.
            points (list): Only in tables of results, if not all: points that it is about (int or str).
        """
        found: dict[str, object] = {"kind": self.kind, "text": self.text, "place": self.place}
        return found | ({"points": list(self.points)} if self.points else {})

    def __str__(self) -> str:
        return self.text


def documents(remarks: Iterable[Remark]) -> list[dict[str, object]]:
    """Return remarks as JSON has them."""
    return [each.document() for each in remarks]


def of_inputs(remarks: Iterable[Remark]) -> list[Remark]:
    """Return the remarks that a command prints before it simulates; the others stand below its tables."""
    return [each for each in remarks if each.is_of_inputs]


def below_table(remarks: Iterable[Remark]) -> list[str]:
    """Return the remarks that a command prints below its tables, a folded paragraph each."""
    shown = (f"{each}." for each in remarks if not each.is_of_inputs)
    return [textwrap.fill(sentence, _WIDTH, break_on_hyphens=False) for sentence in shown]


def of_table(remarks: Sequence[Remark], n_points: int) -> list[Remark]:
    """Return the remarks on a table of many points as people read them: the first ones, each with its points."""
    found = []
    for each in remarks[:_MOST_SHOWN]:
        of_points = f" ({len(each.points):,} of {n_points:,} points)" if each.points else ""
        found.append(replace(each, text=f"{each}{of_points}"))
    if more := len(remarks) - len(found):
        found.append(Remark("result", f"{more:,} more remarks: `simdist results --json` has all"))
    return found


def with_remarks(frame: "pd.DataFrame", remarks: Iterable[Remark]) -> "pd.DataFrame":
    """Return a frame that carries remarks in its `attrs`."""
    frame.attrs["remarks"] = documents(remarks)
    return frame


def warn_of(name: str, remarks: Sequence[Remark]) -> None:
    """Warn of the doubts among some remarks; a function of `import simdist` calls this, so that its caller is named.

    Python shows each warning once for each line that asks, unless the user's filters say otherwise.
    """
    for each in remarks:
        if each.is_doubt:
            warnings.warn(f"{name}: {each}", SimdistWarning, stacklevel=_CALLERS)


def remarks_of(scenario: Scenario, *, warm_up: int = 0) -> tuple[Remark, ...]:
    """Return the remarks on a scenario: its warnings, what follows from its settings, and what they do not state.

    Args:
        scenario: The scenario.
        warm_up: First steps that are left out of its means.
    """
    sentences: dict[Kind, Iterable[str]] = {
        "input": warnings_of(scenario),
        "derived": _derived(scenario),
        "assumption": unstated(scenario.cluster, scenario.schedules),
    }
    found = [Remark(kind, text, _place(text)) for kind, texts in sentences.items() for text in texts]
    return (*found, *_on_lengths(scenario, warm_up))


def _on_lengths(scenario: Scenario, warm_up: int) -> Iterator[Remark]:
    """Yield a remark on each schedule whose periods the run cuts, or to which the run's end makes a difference.

    That runs are shorter than a period is said elsewhere.
    """
    if dataset(scenario) is not None:
        return
    for i, schedule in enumerate(scenario.schedules):
        cycle = schedule.cycle(job(scenario))
        left_out = warm_up or cycle.start
        n_steps = scenario.steps - left_out
        n_periods = n_steps / len(cycle)
        waits_at_end = getattr(schedule, "overlap_steps", 0) > 0 and not warm_up
        if 1 <= n_periods < _FEW_PERIODS and (n_steps % len(cycle) > 0 or waits_at_end):
            has = f"{schedule.name}: the run has {n_periods:.1f} periods of {len(cycle)} steps"
            enough = left_out + _FEW_PERIODS * len(cycle)
            text = f"{has}, so its end changes the mean: write steps: {enough}"
            yield Remark("accuracy", text, f"schedules[{i}]")


def _place(text: str) -> str:
    """Return the path that a sentence begins with; empty if it begins otherwise."""
    found = _PATH.match(text.removeprefix("the range of "))
    return found[0] if found and found[1] in Scenario.model_fields else ""


def _derived(scenario: Scenario) -> Iterator[str]:
    """Yield numbers that follow from settings: steps between checkpoints, and what a measured machine loses."""
    if scenario.checkpoint and isinstance(scenario.checkpoint.every, Elapsed):
        yield _checkpoint_steps(scenario, scenario.checkpoint.every)
    for i, each in enumerate(scenario.delays):
        if isinstance(each, Interference) and each.machine_samples_per_s:
            share = lost_share(scenario, each)
            lost = f"loses {format_share(share)} of forward and backward beside communication"
            which = f"{each.rate_ranks} GPUs" if each.rate_ranks else "it"
            verb = "were" if each.rate_ranks and each.rate_ranks > 1 else "was"
            rate = f"as {which} {verb} measured at {each.machine_samples_per_s:g} samples/s"
            rate += "" if share else ", more than simulated: forward and backward take too long"
            yield f"disturbances[{i}]: one machine {lost}, {rate}"
        elif isinstance(each, Interference) and each.typical and not lost_share(scenario, each):
            n_measured = scenario.workload.measured_ranks
            n_ranks = scenario.cluster.world_size
            its = f"workload.utilization is that of {n_measured:,} GPUs together and contains them"
            more = f"; waiting for the slowest of {n_ranks:,} GPUs is" if n_ranks > n_measured else ""
            yield f"disturbances[{i}]: typical losses of a machine are not added, because {its}{more}"


def _checkpoint_steps(scenario: Scenario, every: Elapsed) -> str:
    """Say how many steps of each schedule are the time between checkpoints.

    Whether one is due within the simulated steps matters if nothing counts them beyond these, as failures do.
    """
    n_steps = math.inf if scenario.failures else scenario.steps
    found = []
    for schedule in scenario.schedules:
        with naming(scenario.name):
            its = in_steps(scenario, schedule).checkpoint
        steps = its.every if its and isinstance(its.every, int) else 0
        missing = f", none within {n_steps:,} steps" if steps > n_steps else ""
        found.append(f"{steps:,} steps of {schedule.name}{missing}")
    return f"checkpoint: every {format_duration(every.seconds)} is every {'; '.join(found)}"
