"""All schedules that may be tried for a scenario, those first that are likely to be fast.

What is legal, the schedules and the scenario say: a candidate that one of them refuses, or that says of itself that a
setting has no effect, is not in the space. Nor is one that breaks a demand on exchanges in its first steps.

The order is by how many others a rank waits for per step: the sum, over all exchanges, of the other ranks of the group,
averaged over steps. It is a guess for the search to begin with; only simulations decide.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from simdist.plan import Result
from simdist.runs.building import job
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.tune.axes import AVERAGING, Extras, input_axes, own_axes
from simdist.tune.candidates import Axis, Candidate, Options, schedule_of
from simdist.tune.constraints import Constraints, exchanged
from simdist.tune.ladders import Levels, level_chains


@dataclass(frozen=True, slots=True)
class Place:
    """A candidate in the space.

    Args:
        candidate: What it is.
        waited_for: Other ranks that a rank waits for per step, as far as the first steps tell.
        global_every: Period of its exchanges of all ranks; 1 if all exchange in every step.
    """

    candidate: Candidate
    waited_for: float
    global_every: int


@dataclass(frozen=True)
class Space:
    """What may be tried.

    Args:
        places: Legal candidates, those that are likely to be fast first.
        axes: What may differ beside the levels, by kind.
        n_illegal: How many the schedules or the scenario refused, or that have settings without effect.
        excluded: How many each constraint excluded.
    """

    places: tuple[Place, ...]
    axes: Mapping[str, tuple[Axis, ...]]
    n_illegal: int = 0
    excluded: Counter[str] = field(default_factory=Counter)


def space(scenario: Scenario, constraints: Constraints, extras: Extras) -> Space:
    """Return all legal candidates that meet the demands on exchanges.

    Raises:
        ScenarioError: See `Extras.kinds`.
    """
    own = {kind: own_axes(kind, scenario, extras) for kind in extras.kinds()}
    of_input = input_axes(scenario)
    places: list[Place] = []
    excluded: Counter[str] = Counter()
    n_illegal = 0
    inputs = [each for each in _products(of_input) if legal(Candidate("sync", options=each), scenario)]
    window = min(scenario.steps, 2 * constraints.global_every + 1)
    described = replace(job(scenario), n_steps=window)
    for candidate in _candidates(own, scenario, constraints):
        schedule = legal(candidate, scenario)
        if schedule is None or schedule.unused_settings(described.world_size, described.ranks_per_node, window):
            n_illegal += len(inputs)
            continue
        results = [schedule.result(step, described) for step in range(window)]
        if faults := tuple(constraints.broken_by(exchanged(results), described.world_size)):
            excluded.update(dict.fromkeys(faults, len(inputs)))
        else:
            places += _places(candidate, results, inputs)
    places.sort(key=lambda place: (place.waited_for, len(place.candidate.options)))
    return Space(tuple(places), {kind: (*axes, *of_input) for kind, axes in own.items()}, n_illegal, excluded)


def legal(candidate: Candidate, scenario: Scenario) -> Schedule | None:
    """Return a candidate's schedule if the schedule itself and the scenario allow it."""
    try:
        schedule = schedule_of(candidate)
        scenario.changed(schedules=(schedule,))
    except ValueError:  # pydantic's, if a value is refused, or that of a scenario
        return None
    return schedule


def _candidates(
    own: Mapping[str, tuple[Axis, ...]], scenario: Scenario, constraints: Constraints
) -> Iterator[Candidate]:
    """Yield every kind with every way to average and every setting of its own."""
    for kind, of_kind in own.items():
        for levels, options in product(_levels(kind, scenario, constraints), _products(of_kind)):
            is_local_sgd = len(levels) == 1 and not options  # which is a kind of its own
            if kind != "hierarchical_sgd" or not is_local_sgd:
                yield Candidate(kind, levels, options)


def _products(axes: Sequence[Axis]) -> list[Options]:
    """Return every choice from axes, without what is the default."""
    choices = product(*(axis.values for axis in axes))
    return [
        tuple((axis.name, value) for axis, value in zip(axes, values, strict=True) if value != axis.default)
        for values in choices
    ]


def _levels(kind: str, scenario: Scenario, constraints: Constraints) -> Iterator[Levels]:
    """Yield how a kind may average parameters; kinds that average gradients have no levels."""
    if kind not in AVERAGING:
        yield ()
        return
    for levels in level_chains(scenario.cluster.world_size, min(constraints.global_every, scenario.steps)):
        if kind == "hierarchical_sgd" or len(levels) == 1:
            yield levels


def _places(candidate: Candidate, results: Sequence[Result], inputs: Sequence[Options]) -> Iterator[Place]:
    """Yield a candidate with every way to read its input."""
    waited_for = sum(each.gradients.size + each.parameters.size - 2 for each in results) / len(results)
    global_every = candidate.levels[-1][0] if candidate.levels else 1
    for each in inputs:
        yield Place(replace(candidate, options=(*candidate.options, *each)), waited_for, global_every)
