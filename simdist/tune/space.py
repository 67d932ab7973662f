"""All schedules that may be tried for a scenario, in order of likely speed.

Schedules and the scenario decide what is legal. A candidate is not in the space if one of them refuses it, or if it
reports that a setting has no effect. Nor is it in the space if it breaks a constraint on exchanges in its first steps.

The order is by the number of other ranks that a rank waits for per step: the sum, over all exchanges, of the other
ranks of the group, averaged over steps. It is only a guess for the search to begin with. Simulations decide.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from pydantic import ValidationError

from simdist.runs.building import job
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.schedules.tuning import Axis, ChangedSettings, Levels
from simdist.studies.proposals import level_chains
from simdist.tune import candidates
from simdist.tune.candidates import Candidate, Extras
from simdist.tune.constraints import Constraints, exchanged, late_steps


@dataclass(frozen=True)
class Space:
    """Schedules that may be tried.

    Args:
        candidates: Legal candidates, those that are likely to be fast first.
        choices: Settings that may differ besides the levels, by kind.
        n_illegal: Number that the schedules or the scenario refused, or that have settings without effect.
        refusal: Reason for the first refusal.
        excluded: Number of candidates that each constraint excluded.
    """

    candidates: tuple[Candidate, ...]
    choices: Mapping[str, tuple[Axis, ...]]
    n_illegal: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    refusal: str = ""


def space(scenario: Scenario, constraints: Constraints, extras: Extras) -> Space:
    """Return all legal candidates that keep to the constraints on exchanges.

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
    found: list[tuple[float, Candidate]] = []  # with the number of ranks that a rank waits for per step
    excluded: Counter[str] = Counter()
    n_illegal = 0
    refusal = ""
    inputs = [each for each in _products(of_input) if legal(Candidate("sync", changed=each), scenario)]
    for candidate in _candidates(own, scenario, constraints):
        try:
            schedule = in_scenario(candidate, scenario)
            unused = schedule.unused_settings(described.world_size, described.ranks_per_node, window)
        except ValueError as error:  # from pydantic for a refused value, or from the scenario
            n_illegal += len(inputs)
            refusal = refusal or f"{candidate.kind}: {refusal_text(error)}"
            continue
        if unused:
            n_illegal += len(inputs)
            refusal = refusal or f"{schedule.name} {unused[0]}"
            continue
        results = [schedule.result(step, described) for step in range(window)]
        sizes = exchanged(results)[late_steps(results) :]
        if faults := tuple(constraints.broken_by(sizes, described.world_size)):
            excluded.update(dict.fromkeys(faults, len(inputs)))
        else:
            waited_for = sum(each.gradients.size + each.parameters.size - 2 for each in results) / window
            found += [(waited_for, replace(candidate, changed=(*candidate.changed, *each))) for each in inputs]
    found.sort(key=lambda each: (each[0], len(each[1].changed)))
    choices = {kind: (*of_kind, *of_input) for kind, of_kind in own.items()}
    return Space(tuple(candidate for _, candidate in found), choices, n_illegal, excluded, refusal)


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
    for kind, of_kind in own.items():
        for levels, changed in product(_levels(kind, scenario, constraints), _products(of_kind)):
            candidate = Candidate(kind, levels, changed)
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
