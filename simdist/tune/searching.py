"""Which candidates are tried, and in which order.

All, if there are few. Otherwise as many as the budget allows:

1. *Starts*: of each family and each time between exchanges of all ranks, the candidate that is likely to be fastest
   because its ranks wait for the fewest others, with as few settings as possible that are not the default. If every
   start is measured, the front of step time against that time is laid out already.
2. Then, in turn, a *neighbour* of the fastest so far, which is one change away from it (see `n_changes`), those first
   that wait for the fewest; and a *suggestion* of Optuna, which looks everywhere.

The neighbours find what is near the best start, which the suggestions of a sampler come across by luck; the suggestions
find what the guess behind the starts is wrong about.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from simdist.tune.candidates import Candidate, family_of, n_changes
from simdist.tune.evaluating import Evaluated
from simdist.tune.space import Place, Space
from simdist.tune.suggesting import Suggester

Evaluate = Callable[[Candidate], Evaluated | None]
"""Returns what a candidate achieves; None if it is illegal or breaks a constraint."""


def search(space: Space, evaluate: Evaluate, *, budget: int | None, seed: int) -> list[Evaluated]:
    """Return what was evaluated, each plan once, in order.

    Args:
        space: What may be tried.
        evaluate: How it is tried.
        budget: Most candidates to evaluate; None: all of the space.
        seed: Of the sampler.

    Raises:
        ScenarioError: Not all can be tried, and Optuna is not installed.
    """
    candidates = [place.candidate for place in space.places]
    if budget is None or budget >= len(candidates):
        return _distinct(map(evaluate, candidates))
    suggester = Suggester(candidates, space.axes, seed=seed)
    found: dict[int, Evaluated] = {}  # by identity: equal plans have one
    untried = dict.fromkeys(candidates)
    proposals = _proposals(starts(space.places), suggester, found, untried)
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
    suggester: Suggester,
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


def _distinct(evaluated: Iterable[Evaluated | None]) -> list[Evaluated]:
    return list({id(each): each for each in evaluated if each is not None}.values())


def starts(places: Sequence[Place]) -> list[Candidate]:
    """Return the first candidate of each family and each time between exchanges of all ranks.

    Args:
        places: Those first that are likely to be fast.
    """
    first: dict[tuple[str, int], Candidate] = {}
    for place in places:
        first.setdefault((family_of(place.candidate), place.global_every), place.candidate)
    return list(first.values())
