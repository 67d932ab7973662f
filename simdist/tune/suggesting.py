"""Suggestions of Optuna's tree-structured Parzen estimator, made legal.

Optuna models every axis by itself, so what it suggests need not be a legal schedule, nor a new one. The nearest
candidate that was not tried takes its place, and Optuna is told about that one.

Source:
    Bergstra et al., Algorithms for Hyper-Parameter Optimization, NIPS 2011; Akiba et al., Optuna: A Next-generation
    Hyperparameter Optimization Framework, KDD 2019.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from simdist.errors import ScenarioError
from simdist.tune.candidates import Axis, Candidate, Value, family_of

_FAMILY = "family"
_Point: TypeAlias = dict[str, int]  # axis -> place on its ladder


@final
class Suggester:
    """Suggests what to try next, given what was tried."""

    def __init__(self, candidates: Sequence[Candidate], axes: Mapping[str, Sequence[Axis]], *, seed: int) -> None:
        """Know all candidates and the result of none.

        Args:
            candidates: All there are.
            axes: What their options are, by kind.
            seed: Of the sampler.

        Raises:
            ScenarioError: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError:
            raise ScenarioError(
                f"{len(candidates):,} candidates are searched with Optuna, which is not installed: "
                "pip install optuna, or write --exhaustive to try them all"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        self._axes = _axes_of_families(candidates, axes)
        self._points = {candidate: _point(candidate, self._axes[family_of(candidate)]) for candidate in candidates}

    def suggest(self, untried: Sequence[Candidate]) -> Candidate:
        """Return the untried candidate that is nearest to a suggestion; of equally near ones, the first."""
        trial = self._study.ask()
        family = trial.suggest_categorical(_FAMILY, sorted(self._axes))
        wanted = {
            name: trial.suggest_int(f"{family} {name}", 0, len(axis.values) - 1)
            for name, axis in self._axes[family].items()
        }
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # `tell` says what was tried instead
        return min(untried, key=lambda each: (family_of(each) != family, _distance(self._points[each], wanted)))

    def tell(self, candidate: Candidate, step_s: float) -> None:
        """Take the result of a candidate, whoever suggested it."""
        family, optuna = family_of(candidate), self._optuna
        kinds_of_axes = {_FAMILY: optuna.distributions.CategoricalDistribution(sorted(self._axes))} | {
            f"{family} {name}": optuna.distributions.IntDistribution(0, len(axis.values) - 1)
            for name, axis in self._axes[family].items()
        }
        places = {f"{family} {name}": place for name, place in self._points[candidate].items()}
        params = {_FAMILY: family} | places
        self._study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds_of_axes, value=step_s))


def _axes_of_families(
    candidates: Sequence[Candidate], axes: Mapping[str, Sequence[Axis]]
) -> dict[str, dict[str, Axis]]:
    """Return the axes of each family by name; one for each size of a group is how often groups of it average."""
    levels = {level for candidate in candidates for level in candidate.levels}
    periods = sorted({period for period, _ in levels})
    found: dict[str, dict[str, Axis]] = {}
    for candidate in {each.kind: each for each in candidates}.values():
        sizes = sorted({ranks for _, ranks in levels}) if candidate.levels else []
        of_levels = [Axis(_over(ranks), (None, *periods)) for ranks in sizes]
        of_family = found.setdefault(family_of(candidate), {})
        of_family |= {axis.name: axis for axis in (*of_levels, *axes[candidate.kind])}
    return found


def _point(candidate: Candidate, of_family: Mapping[str, Axis]) -> _Point:
    values: dict[str, Value] = {_over(ranks): period for period, ranks in candidate.levels}
    values |= dict(candidate.options)
    return {name: axis.values.index(values.get(name, axis.default)) for name, axis in of_family.items()}


def _over(ranks: int) -> str:
    return f"over {ranks}"


def _distance(one: _Point, other: _Point) -> int:
    """Return the places between two points of one family, summed over its axes."""
    return sum(abs(one[name] - place) for name, place in other.items() if name in one)
