"""The order in which candidates are tried.

If there are few, all are tried, those with the least lower bound of their time first. Otherwise as many as the budget
allows:

1. *Starts*: for each family and each number of steps between exchanges of all ranks, the candidate that is likely to be
   fastest, because its ranks wait for the fewest others. As few of its settings as possible differ from the default.
   Once every start is measured, the front of step time against that number of steps is sketched.
2. Then, in turn, a *neighbour* of the fastest so far, and a *suggestion* of Optuna. A neighbour is one change away (see
   `n_changes`); neighbours that wait for the fewest ranks come first. Optuna samples the whole space.

Neighbours find improvements near the best start, which a sampler finds only by luck.

Suggestions come from Optuna's tree-structured Parzen estimator, and are made legal. It models every setting by itself,
so a suggestion need not be a legal schedule, nor a new one. The nearest untried candidate takes its place.

Source:
    Bergstra et al., Algorithms for Hyper-Parameter Optimization, NIPS 2011; Akiba et al., Optuna: A Next-generation
    Hyperparameter Optimization Framework, KDD 2019.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

from simdist.errors import ScenarioError
from simdist.schedules.tuning import Axis, TunedValue
from simdist.tuning.candidates import Candidate, family_of, n_changes
from simdist.tuning.evaluating import Evaluated, TooSlow
from simdist.tuning.space import Space

_FAMILY = "family"
_MOST_WAITING = 256  # candidates with plans in memory
_Point: TypeAlias = dict[str, int]  # setting -> index of its value

#: Returns the result of a candidate; None if it is illegal or breaks a constraint.
_Evaluate = Callable[[Candidate], Evaluated | TooSlow | None]
#: Returns a lower bound of the time of a candidate.
_LeastTime = Callable[[Candidate], float]


def search(
    space: Space, evaluate: _Evaluate, *, least_s: _LeastTime, budget: int | None, seed: int
) -> list[Evaluated | TooSlow]:
    """Return the evaluated candidates, each plan once, in order.

    Args:
        space: Schedules that may be tried.
        evaluate: Evaluates a candidate.
        least_s: Returns a lower bound of the time of a candidate.
        budget: Most candidates to evaluate; None: all of the space.
        seed: Seed of the sampler.

    Raises:
        ScenarioError: The budget is smaller than the space, and Optuna is not installed.
    """
    if budget is None or budget >= len(space.candidates):
        return _search_all(space.candidates, evaluate, least_s)
    suggester = _Suggester(space.candidates, space.choices, seed=seed)
    found: dict[int, Evaluated | TooSlow] = {}  # by identity: equal plans share one
    untried = dict.fromkeys(space.candidates)
    proposals = _proposals(starts(space.candidates), suggester, found, untried)
    while untried and len(found) < budget:
        candidate = next(proposals)
        del untried[candidate]
        evaluated = evaluate(candidate)
        if evaluated is not None:
            found.setdefault(id(evaluated), evaluated)
            suggester.tell(candidate, evaluated.step_s)
    return list(found.values())


def _search_all(candidates: Sequence[Candidate], evaluate: _Evaluate, least_s: _LeastTime) -> list[Evaluated | TooSlow]:
    evaluated: dict[Candidate, Evaluated | TooSlow | None] = {}
    for first in range(0, len(candidates), _MOST_WAITING):
        some = candidates[first : first + _MOST_WAITING]
        evaluated |= {each: evaluate(each) for each in sorted(some, key=least_s)}
    found = (evaluated[each] for each in candidates)
    return list({id(each): each for each in found if each is not None}.values())


def _proposals(
    starts: Sequence[Candidate],
    suggester: "_Suggester",
    found: Mapping[int, Evaluated | TooSlow],
    untried: Mapping[Candidate, None],
) -> Iterator[Candidate]:
    """Yield the next candidates to try; `found` and `untried` change meanwhile."""
    yield from starts
    while True:
        if neighbour := _neighbour(found, untried):
            yield neighbour
        if untried:
            yield suggester.suggest(list(untried))


def _neighbour(found: Mapping[int, Evaluated | TooSlow], untried: Mapping[Candidate, None]) -> Candidate | None:
    """Return the first untried neighbour of the fastest so far; None if there is none."""
    tried = [each for each in found.values() if each.candidate]
    if not tried:
        return None
    best = min(tried, key=lambda each: each.step_s).candidate
    return next((each for each in untried if best and n_changes(best, each) == 1), None)


def starts(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first candidate of each family and each number of steps between exchanges of all ranks.

    Args:
        candidates: Candidates, those that are likely to be fast first.
    """
    first: dict[tuple[str, int], Candidate] = {}
    for each in candidates:
        first.setdefault((family_of(each), each.global_every), each)
    return list(first.values())


@final
class _Suggester:
    """Suggests the next candidate to try, given the results so far."""

    def __init__(self, candidates: Sequence[Candidate], choices: Mapping[str, Sequence[Axis]], *, seed: int) -> None:
        """Register all candidates, without results."""
        try:
            import optuna
        except ImportError:
            raise ScenarioError(
                f"{len(candidates):,} candidates are searched with Optuna, which is not installed: "
                f"pip install 'simdist-training[tune]', or write --evaluations {len(candidates)} to try them all"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        self._choices = _choices_of_families(candidates, choices)
        self._points = {candidate: _point(candidate, self._choices[family_of(candidate)]) for candidate in candidates}

    def suggest(self, untried: Sequence[Candidate]) -> Candidate:
        """Return the untried candidate that is nearest to a suggestion. Of equally near ones, return the first."""
        trial = self._study.ask()
        family = trial.suggest_categorical(_FAMILY, sorted(self._choices))
        wanted = {
            name: trial.suggest_int(f"{family} {name}", 0, len(each.values) - 1)
            for name, each in self._choices[family].items()
        }
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # `tell` reports the replacement
        return min(untried, key=lambda each: (family_of(each) != family, _distance(self._points[each], wanted)))

    def tell(self, candidate: Candidate, step_s: float) -> None:
        """Record the result of a candidate, suggested or not."""
        family = family_of(candidate)
        optuna = self._optuna
        distributions = {_FAMILY: optuna.distributions.CategoricalDistribution(sorted(self._choices))} | {
            f"{family} {name}": optuna.distributions.IntDistribution(0, len(each.values) - 1)
            for name, each in self._choices[family].items()
        }
        values = {f"{family} {name}": place for name, place in self._points[candidate].items()}
        params = {_FAMILY: family} | values
        self._study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=step_s))


def _choices_of_families(
    candidates: Sequence[Candidate], choices: Mapping[str, Sequence[Axis]]
) -> dict[str, dict[str, Axis]]:
    """Return the choices of each family by name. For each group size, one choice is the period of its averages."""
    levels = {level for candidate in candidates for level in candidate.levels}
    periods = sorted({period for period, _ in levels})
    found: dict[str, dict[str, Axis]] = {}
    for candidate in {each.kind: each for each in candidates}.values():
        sizes = sorted({ranks for _, ranks in levels}) if candidate.levels else []
        of_levels = [Axis(_over(ranks), (None, *periods)) for ranks in sizes]
        of_family = found.setdefault(family_of(candidate), {})
        of_family |= {each.name: each for each in (*of_levels, *choices[candidate.kind])}
    return found


def _point(candidate: Candidate, of_family: Mapping[str, Axis]) -> _Point:
    values: dict[str, TunedValue] = {_over(ranks): period for period, ranks in candidate.levels}
    values |= dict(candidate.changed)
    return {name: each.values.index(values.get(name, each.default)) for name, each in of_family.items()}


def _over(ranks: int) -> str:
    return f"over {ranks}"


def _distance(one: _Point, other: _Point) -> int:
    """Return the distance between two points of one family, summed over its settings."""
    return sum(abs(one[name] - place) for name, place in other.items() if name in one)
