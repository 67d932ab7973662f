"""Failures of a run, by step: what goes wrong, on which ranks, in which attempt.

A job that has failed is started again and resumes from its newest checkpoint. Each start is an attempt, counted from 0.
So a step may be performed several times, and a failure names the attempt in which it strikes. Failures of the same step
of an attempt end it together.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from pydantic import TypeAdapter, ValidationError

from simdist.errors import PlanError
from simdist.files import read_content
from simdist.plan.plan import Plan

FailureKind: TypeAlias = Literal["gone", "lost", "hang", "planned", "pause", "slow"]
ENDING: tuple[FailureKind, ...] = ("gone", "lost", "hang", "planned")
"""Kinds of failures that end processes."""
_FORMAT = "simdist-failures-1"


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A failure at the start of a step.

    Args:
        attempt: The attempt in which it strikes.
        step: Step at whose start it strikes.
        ranks: Ranks that it strikes.
        kind (str): `gone`: the processes end without a word. `lost`: so do their nodes. `hang`: they live and take no
            further part, until a time-out finds them. `planned`: they end as announced; unless others go on,
            all write a checkpoint before. `pause`: the links of their nodes carry nothing for a while, or else they
            take no part. `slow`: from then on they pause at the start of each step of the attempt.
        pause_s: Length of a pause.
        resume_before: Checkpoints of this step and later ones are not used after it: silent corruption since then.
            None: all are.
        others_go_on: The other ranks go on without them, until they are back. Otherwise all ranks start again.
    """

    attempt: int
    step: int
    ranks: tuple[int, ...]
    kind: FailureKind
    pause_s: float = 0.0
    resume_before: int | None = None
    others_go_on: bool = False

    @property
    def ends_attempt(self) -> bool:
        """Whether the job has to start again."""
        return self.kind in ENDING and not self.others_go_on


_FAILURES = TypeAdapter(tuple[StepFailure, ...])


def dump_step_failures(failures: Sequence[StepFailure]) -> str:
    """Return the failures of a run as JSON; `read_step_failures` reads it."""
    return json.dumps({"format": _FORMAT, "failures": [asdict(each) for each in failures]}, indent=1) + "\n"


def read_step_failures(path: Path, plan: Plan) -> tuple[StepFailure, ...]:
    """Read the failures of a run.

    Columns:
        format (str): `simdist-failures-1`.
        failures (list): "A failure at the start of a step", in the order in which they strike.

    Raises:
        PlanError: The file is damaged, or does not fit the plan.
    """
    try:
        document = json.loads(read_content(path))
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise PlanError(f"{path}: is no file of failures: its format should be {_FORMAT}")
        failures = _FAILURES.validate_python(document.get("failures"), strict=False)
        check_step_failures(plan, failures)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        raise PlanError(f"{path}: cannot be read as failures ({' '.join(str(error).split())})") from None
    return failures


def check_step_failures(plan: Plan, failures: Sequence[StepFailure]) -> None:
    """Refuse failures that cannot strike in runs of a plan.

    Raises:
        PlanError: It names the failure, and what it should be.
    """
    n_ended = 0
    end: tuple[int, int] | None = None  # attempt and step of the failures that ended the attempt before
    for number, each in enumerate(failures):
        where = f"failures[{number}]"
        if each.kind not in get_args(FailureKind):
            raise PlanError(f"{where}: kind {each.kind!r}: write one of {', '.join(get_args(FailureKind))}")
        if not 0 <= each.step < plan.n_steps:
            raise PlanError(f"{where}: step {each.step}: the plan has steps 0 to {plan.n_steps - 1}")
        if not each.ranks or not set(each.ranks) <= set(range(plan.world_size)):
            raise PlanError(f"{where}: ranks {list(each.ranks)}: name some of 0 to {plan.world_size - 1}")
        is_together = (each.attempt, each.step) == end
        if each.attempt != n_ended and not is_together:
            raise PlanError(f"{where}: attempt {each.attempt}: failures before it end {n_ended} attempts")
        if each.others_go_on and len(set(each.ranks)) == plan.world_size:
            raise PlanError(f"{where}: others_go_on: it strikes all ranks: name fewer, or write false")
        if each.kind in ("pause", "slow") and not 0 < each.pause_s < float("inf"):
            raise PlanError(f"{where}: pause_s {each.pause_s}: write seconds above 0")
        if each.ends_attempt and not is_together:
            n_ended += 1
            end = (each.attempt, each.step)
