"""Which candidates are tried, and in which order.

All, if there are few. Otherwise as many as the budget allows:

1. *Starts*: of each family and each time between exchanges of all ranks, the candidate that is likely to be fastest
   because its ranks wait for the fewest others, with as few settings as possible that are not the default. If every
   start is measured, the front of step time against that time is laid out already.
2. Then, in turn, a *neighbour* of the fastest so far, which is one change away from it (see `n_changes`), those first
   that wait for the fewest; and a *suggestion* of Optuna, which looks everywhere.

The neighbours find what is near the best start, which the suggestions of a sampler come across by luck; the suggestions
find what the guess behind the starts is wrong about.

Suggestions are those of Optuna's tree-structured Parzen estimator, made legal: it models every setting by itself, so
what it suggests need not be a legal schedule, nor a new one. The nearest candidate that was not tried takes its place,
and Optuna is told about that one.

Source:
    Bergstra et al., Algorithms for Hyper-Parameter Optimization, NIPS 2011; Akiba et al., Optuna: A Next-generation
    Hyperparameter Optimization Framework, KDD 2019.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

from simdist.errors import ScenarioError
from simdist.schedules.tuning import Axis, Value
from simdist.tune.candidates import Candidate, family_of, n_changes
from simdist.tune.evaluating import Evaluated
from simdist.tune.space import Space

_FAMILY = "family"
_Point: TypeAlias = dict[str, int]  # setting -> which of its values

#: Returns what a candidate achieves; None if it is illegal or breaks a constraint.
Evaluate = Callable[[Candidate], Evaluated | None]


def search(space: Space, evaluate: Evaluate, *, budget: int | None, seed: int) -> list[Evaluated]:
    """Return what was evaluated, each plan once, in order.

    Args:
        space: Schedules that may be tried.
        evaluate: How it is tried.
        budget: Most candidates to evaluate; None: all of the space.
        seed: Of the sampler.

    Raises:
        ScenarioError: Not all can be tried, and Optuna is not installed.
    """
    if budget is None or budget >= len(space.candidates):
        return list({id(each): each for each in map(evaluate, space.candidates) if each is not None}.values())
    suggester = Suggester(space.candidates, space.choices, seed=seed)
    found: dict[int, Evaluated] = {}  # by identity: equal plans have one
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


def _proposals(
    starts: Sequence[Candidate],
    suggester: "Suggester",
    found: Mapping[int, Evaluated],
    untried: Mapping[Candidate, None],
) -> Iterator[Candidate]:
    """Yield what to try next; `found` and `untried` change meanwhile."""
    yield from starts
    while True:
        if neighbour := _neighbour(found, untried):
            yield neighbour
        if untried:
            yield suggester.suggest(list(untried))


def _neighbour(found: Mapping[int, Evaluated], untried: Mapping[Candidate, None]) -> Candidate | None:
    """Return the first untried neighbour of the fastest so far; None if there is none."""
    tried = [each for each in found.values() if each.candidate]
    if not tried:
        return None
    best = min(tried, key=lambda each: each.step_s).candidate
    return next((each for each in untried if best and n_changes(best, each) == 1), None)


def starts(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first candidate of each family and each time between exchanges of all ranks.

    Args:
        candidates: Those first that are likely to be fast.
    """
    first: dict[tuple[str, int], Candidate] = {}
    for each in candidates:
        first.setdefault((family_of(each), each.global_every), each)
    return list(first.values())


@final
class Suggester:
    """Suggests what to try next, given what was tried."""

    def __init__(self, candidates: Sequence[Candidate], choices: Mapping[str, Sequence[Axis]], *, seed: int) -> None:
        """Know all candidates and the result of none.

        Args:
            candidates: All there are.
            choices: Settings that may differ beside their levels, by kind.
            seed: Of the sampler.

        Raises:
            ScenarioError: Optuna is not installed.
        """
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
        """Return the untried candidate that is nearest to a suggestion; of equally near ones, the first."""
        trial = self._study.ask()
        family = trial.suggest_categorical(_FAMILY, sorted(self._choices))
        wanted = {
            name: trial.suggest_int(f"{family} {name}", 0, len(each.values) - 1)
            for name, each in self._choices[family].items()
        }
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # `tell` says what was tried instead
        return min(untried, key=lambda each: (family_of(each) != family, _distance(self._points[each], wanted)))

    def tell(self, candidate: Candidate, step_s: float) -> None:
        """Take the result of a candidate, suggested or not."""
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
    """Return the choices of each family by name; one for each size of a group is how often groups of it average."""
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
    values: dict[str, Value] = {_over(ranks): period for period, ranks in candidate.levels}
    values |= dict(candidate.changed)
    return {name: each.values.index(values.get(name, each.default)) for name, each in of_family.items()}


def _over(ranks: int) -> str:
    return f"over {ranks}"


def _distance(one: _Point, other: _Point) -> int:
    """Return the distance between two points of one family, summed over its settings."""
    return sum(abs(one[name] - place) for name, place in other.items() if name in one)
