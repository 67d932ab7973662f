"""Plans with the proof of what they compute: answers as JSON and as text."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from simdist.plan import LowRank, Op, Result, Select, plan_text
from simdist.plan.group import Group, group_fields
from simdist.runs.building import Built, job
from simdist.scenario import Scenario
from simdist.settings.base import plural

_APPLIED: dict[type[Op], str] = {
    Select: "the mean of the largest entries of the gradients",
    LowRank: "a low-rank approximation of the mean gradient",
}
_Results: TypeAlias = Counter[tuple[Result, str | None]]  # with what is applied instead of the mean gradient


@dataclass(frozen=True)
class ProvedPlan:
    """A plan and what its steps were proved to leave behind."""

    scenario: Scenario
    built: Built
    path: Path | None = None

    def document(self) -> dict[str, object]:
        """Return a plan as JSON.

        Columns:
            schedule, digest (str): Label; SHA-256 of the operations.
            world_size, steps, operations, bodies (int): Ranks, steps, operation instances of a rank, distinct steps.
            proved_ranks (int): Ranks that the proof followed: at most 256.
            proved (list): "Proof".
            run (str or null): Directory written.
        """
        plan = self.built.plan
        return {
            "schedule": self.built.schedule.name,
            "digest": plan.digest(),
            "world_size": plan.world_size,
            "steps": plan.n_steps,
            "operations": plan.n_instances,
            "bodies": len(plan.bodies),
            "proved_ranks": self.built.n_proved_ranks,
            "proved": [{"steps": n_steps, **_record(*what)} for what, n_steps in self._results().items()],
            "run": str(self.path) if self.path else None,
        }

    def text(self) -> str:
        """Return the plan and its proof."""
        return f"{plan_text(self.built.plan)}\n{_proof_text(self.built, self._results())}"

    def _results(self) -> _Results:
        """Count the steps by what they leave behind, and what is applied if not gradients."""
        return _results(self.scenario, self.built)


def _results(scenario: Scenario, built: Built) -> _Results:
    """Return what the steps were proved to leave behind, what is applied if not gradients, and of how many steps."""
    described = job(scenario)
    steps = enumerate(built.plan.body_of_steps())
    kinds = [{type(op) for op in body} for body in built.plan.bodies]
    applied = [next((_APPLIED[kind] for kind in _APPLIED if kind in each), None) for each in kinds]
    return Counter((built.schedule.result(step, described), applied[body]) for step, body in steps)


def _record(result: Result, applied: str | None) -> dict[str, object]:
    """Return what was proved; besides gradients and parameters, what is not as in most schedules.

    Columns:
        steps (int): Steps with this result.
        micro_batches (int): Passes whose gradients are summed, if several.
        gradients, parameters (object or null): The group that averages gradients, then parameters: `size` and `stride`
            (int, distance between members); `ranks` (list, one group after the other) if they are listed.
        late_steps (int): Steps by which the average is delayed, if any.
        tensors (list): Ranges `[first, stop]` of averaged tensors. Absent: all.
        mixing (float): With an outer optimizer: share of its own parameters that a rank keeps.
        drop (int): Last ranks that the mean gradient leaves out, if any.
        absent (list): Ranks that sit the step out, if any.
        applied (str): What replaces the mean gradient (top-k, PowerSGD), if so.
    """
    always = ("gradients", "parameters")
    usual, fields = (
        asdict(each, dict_factory=group_fields) for each in (Result(result.gradients, result.parameters), result)
    )
    found = {name: value for name, value in fields.items() if name in always or value != usual[name]}
    return found | ({"applied": applied} if applied else {})


def _proof_text(built: Built, results: _Results) -> str:
    world_size = built.plan.world_size
    n_ranks = built.n_proved_ranks
    ranks = (
        f"all {world_size:,} ranks" if n_ranks == world_size else f"{n_ranks} of {world_size:,} ranks, spread evenly"
    )
    lines = [f"proved: by following the contributions of {ranks}"]
    for (result, applied), n_steps in results.items():
        share = f"every step of {n_steps:,}" if len(results) == 1 else f"{n_steps:,} steps of {built.plan.n_steps:,}"
        lines.append(f"    {share}: {_result_text(result, applied, world_size)}")
    return "\n".join(lines)


def _result_text(result: Result, applied: str | None, world_size: int) -> str:
    gradients = _mean_text(result.gradients, world_size, "its own gradient", applied or "the mean gradient")
    absent = f" but {', '.join(map(str, result.absent))}" if result.absent else ""
    gradients = f"every rank{absent} applies {gradients}"
    if result.drop:
        gradients += f", without the last {result.drop} to come"
    if result.micro_batches > 1:
        gradients += f", summed over {result.micro_batches} micro-batches"
    if applied:
        gradients += ", and keeps the rest for the next gradient"
    if result.parameters.size == 1:
        return gradients
    what = "the mean parameters" if result.mixing is None else "the outer optimizer's, by the mean outer gradient"
    late = f" of {result.late_steps} {plural(result.late_steps, 'step')} ago" if result.late_steps else ""
    part = f" in tensors {', '.join(f'{first}:{last}' for first, last in result.tensors)}" if result.tensors else ""
    return f"{gradients}, then takes {_mean_text(result.parameters, world_size, '', what)}{late}{part}"


def _mean_text(group: Group, world_size: int, own: str, mean: str) -> str:
    if group.size == 1:
        return own
    return f"{mean} of {'all ranks' if group.size == world_size else f'its {group}'}"
