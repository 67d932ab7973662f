"""All schedules that may be tried for a scenario, in order of likely speed.

Schedules and the scenario decide what is legal. A candidate is not in the space if one of them refuses it, or if it
reports that a setting has no effect. Nor is it in the space if it breaks a constraint on exchanges in its first steps.

The order is by the number of other ranks that a rank waits for per step: the sum, over all exchanges, of the other
ranks of the group, averaged over steps. It is only a guess for the search to begin with. Simulations decide.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeAlias, final

from pydantic import ValidationError

from simdist.plan import Plan, Result
from simdist.runs.building import job
from simdist.runs.memory import least_nbytes
from simdist.scenario import Scenario
from simdist.schedules import Job, Schedule
from simdist.schedules.tuning import Axis, ChangedSettings, Levels
from simdist.studies.proposals import level_chains
from simdist.tuning import candidates
from simdist.tuning.candidates import Candidate, Extras
from simdist.tuning.constraints import Breach, Constraints, exchanged, late_steps, longest_gap, worst

_FEW_STEPS = 64
_LATEST = 4

#: Called with the name of the stage, the amount done, and the total if it is known.
Progress: TypeAlias = Callable[[str, float, float | None], None]


@dataclass(frozen=True)
class Space:
    """Schedules that may be tried.

    Args:
        candidates: Legal candidates, those that are likely to be fast first.
        choices: Settings that may differ besides the levels, by kind.
        n_illegal: Number that the schedules or the scenario refused, or that have settings without effect.
        refusal: Reason for the first refusal.
        excluded: Number of candidates that each constraint excluded.
        broken: Excluded candidates, with how many times a constraint they need at least.
        longest_gap: Most steps between exchanges of all ranks, over all candidates.
    """

    candidates: tuple[Candidate, ...]
    choices: Mapping[str, tuple[Axis, ...]]
    n_illegal: int = 0
    refusal: str = ""
    excluded: Counter[str] = field(default_factory=Counter)
    broken: tuple[tuple[float, Candidate], ...] = ()
    longest_gap: int = 1


def space(scenario: Scenario, constraints: Constraints, extras: Extras, *, progress: Progress | None = None) -> Space:
    """Return all legal candidates that keep to the constraints, as far as these need neither prices nor times.

    Raises:
        ScenarioError: See `Extras.kinds`.
    """
    window = min(scenario.steps, 2 * constraints.global_every + 1)
    described = replace(job(scenario), n_steps=window)
    own = {kind: candidates.own_choices(kind, scenario, described, extras) for kind in extras.kinds(scenario)}
    of_input = (
        *candidates.input_choices(scenario),
        *candidates.pass_choices(scenario, extras),
        *candidates.checkpoint_choices(scenario, extras),
    )
    inputs = [each for each in _products(of_input) if legal(Candidate("sync", changed=each), scenario)]
    sieve = _Sieve(scenario, constraints, described, inputs)
    each_candidate = list(_candidates(own, scenario, constraints))
    for number, candidate in enumerate(each_candidate):
        if progress:
            progress("candidates", number, len(each_candidate))
        sieve.add(candidate)
    choices = {kind: (*of_kind, *of_input) for kind, of_kind in own.items()}
    return sieve.space(choices)


@final
class _Sieve:
    """Collects the candidates of a space."""

    def __init__(
        self, scenario: Scenario, constraints: Constraints, described: Job, inputs: Sequence[ChangedSettings]
    ) -> None:
        """Begin with no candidates."""
        self._scenario = scenario
        self._constraints = constraints
        self._described = described
        self._inputs = inputs
        self._found: list[tuple[float, Candidate]] = []  # with the number of ranks that a rank waits for per step
        self._broken: list[tuple[float, Candidate]] = []
        self._excluded: Counter[str] = Counter()
        self._longest_gap = 1.0
        self._least_nbytes: dict[int, int] = {}  # by hash of a plan of one step, which takes less memory than plans
        self._latest: deque[tuple[Plan, int]] = deque(maxlen=_LATEST)  # plans of one step, with these bytes
        self._n_illegal = 0
        self._refusal = ""

    def add(self, candidate: Candidate) -> None:
        """Add a candidate with all settings of the input, or count it."""
        described = self._described
        try:
            schedule = in_scenario(candidate, self._scenario)
            results = self._results(schedule)
            breaches = self._breaches(schedule, results)
        except ValueError as error:  # from pydantic for a refused value, from the scenario, or from the plan
            self._n_illegal += len(self._inputs)
            self._refusal = self._refusal or f"{candidate.kind}: {refusal_text(error)}"
            return
        each_with_input = [replace(candidate, changed=(*candidate.changed, *each)) for each in self._inputs]
        if breaches:
            self._excluded.update(dict.fromkeys((each.limit for each in breaches), len(each_with_input)))
            self._broken += [(worst(breaches).excess, each) for each in each_with_input]
            return
        waited_for = sum(each.gradients.size + each.parameters.size - 2 for each in results) / len(results)
        self._found += [(waited_for, each) for each in each_with_input]
        fires = exchanged(results) >= described.world_size
        self._longest_gap = max(self._longest_gap, longest_gap(fires[late_steps(results) :]))

    def space(self, choices: Mapping[str, tuple[Axis, ...]]) -> Space:
        """Return the space."""
        self._found.sort(key=lambda each: (each[0], len(each[1].changed)))
        found = tuple(candidate for _, candidate in self._found)
        counts = (self._n_illegal, self._refusal, self._excluded)
        return Space(found, choices, *counts, tuple(self._broken), int(self._longest_gap))

    def _results(self, schedule: Schedule) -> list[Result]:
        """Return what each step does: of all steps, or of two periods if these are far fewer."""
        described = self._described
        n_steps = described.n_steps
        if unused := schedule.unused_settings(described):
            raise ValueError(f"{schedule.name} {unused[0]}")
        if n_steps > _FEW_STEPS:
            cycle = schedule.cycle(described)
            n_steps = min(n_steps, cycle.stop + len(cycle))
        return [schedule.result(step, described) for step in range(n_steps)]

    def _breaches(self, schedule: Schedule, results: Sequence[Result]) -> list[Breach]:
        """Return the constraints on exchanges that a schedule breaks, and that on memory if the buffers tell."""
        constraints = self._constraints
        sizes = exchanged(results)[late_steps(results) :]
        found = list(constraints.broken_by(sizes, self._described.world_size))
        if math.isfinite(constraints.memory_nbytes):
            one_step = schedule.plan(replace(self._described, n_steps=1))
            found += constraints.broken_by_memory(self._least_of(one_step))
        return found

    def _least_of(self, one_step: Plan) -> int:
        """Return bytes that are surely in use in a step. Schedules that differ in later steps share them."""
        for plan, nbytes in self._latest:  # often the same object, which takes no time to compare
            if plan.bodies == one_step.bodies and plan.buffers == one_step.buffers:
                return nbytes
        content = hash((one_step.buffers, one_step.bodies))
        if content not in self._least_nbytes:
            self._least_nbytes[content] = least_nbytes(one_step, self._scenario.workload)
        self._latest.append((one_step, self._least_nbytes[content]))
        return self._least_nbytes[content]


def legal(candidate: Candidate, scenario: Scenario) -> Schedule | None:
    """Return a candidate's schedule if the schedule itself and the scenario allow it."""
    try:
        return in_scenario(candidate, scenario)
    except ValueError:
        return None


def in_scenario(candidate: Candidate, scenario: Scenario) -> Schedule:
    """Return a candidate's schedule.

    Raises:
        ValueError: The schedule itself, or the scenario, does not allow it.
    """
    schedule = candidates.schedule_of(candidate)
    scenario.changed(schedules=(schedule,))
    return schedule


def refusal_text(error: ValueError) -> str:
    """Return the first line of a refusal's reason."""
    found = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return found.splitlines()[0]


def _candidates(
    own: Mapping[str, tuple[Axis, ...]], scenario: Scenario, constraints: Constraints
) -> Iterator[Candidate]:
    """Yield every kind with all levels and all settings of its own."""
    fixed = {kind: candidates.settings_not_varied(kind, of_kind) for kind, of_kind in own.items()}
    kept = {kind: candidates.own_settings(kind, scenario, names) for kind, names in fixed.items()}
    for kind, of_kind in own.items():
        for levels, changed in product(_levels(kind, scenario, constraints), _products(of_kind)):
            candidate = Candidate(kind, levels, changed, kept[kind])
            if candidate.settings() is not None:
                yield candidate


def _products(choices: Sequence[Axis]) -> list[ChangedSettings]:
    """Return every combination of choices, without values that are the default."""
    return [
        tuple((each.name, value) for each, value in zip(choices, values, strict=True) if value != each.default)
        for values in product(*(each.values for each in choices))
    ]


def _levels(kind: str, scenario: Scenario, constraints: Constraints) -> Iterator[Levels]:
    """Yield the levels of a kind; most kinds take none."""
    if not candidates.class_of(kind).takes_levels:
        yield ()
        return
    yield from level_chains(scenario.cluster.world_size, min(constraints.global_every, scenario.steps))
