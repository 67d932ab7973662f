"""The only entry of the engines: simulate a plan, and keep what an observer asks for."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from simdist.cost.costs import Costs
from simdist.engines.choose import USE_OTHERS, AnyEngine, ChosenEngine, RunToChoose, choose
from simdist.engines.observers import ObservedT, Observer
from simdist.errors import UnforeseenError, UnsupportedError
from simdist.plan import Plan
from simdist.plan.delays import Delays, SeedDelays, check_delays
from simdist.traces.trace import TIMES_OF_TRACE

if TYPE_CHECKING:
    from simdist.cost.traffic import Traffic
    from simdist.engines.actors import Actor
    from simdist.engines.alike import Courses
    from simdist.engines.live import ChangeListener

_COLLECT_AFTER = 500_000  # objects; Python's default is 700
_LARGE_NBYTES = 2 * 10**9
_NUMBER_NBYTES = 8
# Arrays of a run of all events, whatever is kept: rows, and a trace from them
_ARRAYS_OF_EVENTS = 2 * len(TIMES_OF_TRACE)

#: Called with the steps done and the steps of all seeds.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Live:
    """What only a run of all events can have.

    Args:
        actors: Processes of the user. Each seed starts them anew, and they end with the last rank.
        observers: Called with each `simdist.engines.live.Change`, in order of time.
        traffic: Returns what links do with a seed besides carrying the plan's transfers.
    """

    actors: "Sequence[Actor]" = ()
    observers: "Sequence[ChangeListener]" = ()
    traffic: "Callable[[int], Traffic | None] | None" = None


def run(
    plan: Plan,
    prices: Costs | Sequence[Costs],
    delays: Delays | SeedDelays,
    *,
    observe: Observer[ObservedT],
    engine: AnyEngine = "auto",
    live: Live | None = None,
    progress: Progress | None = None,
    courses: "Courses | None" = None,
) -> ObservedT:
    """Simulate a plan.

    Args:
        plan: A legal plan (see `simdist.plan.check`).
        prices: Its price list (see `simdist.cost`), or one for each seed.
        delays: Drawn in advance, or of seeds, see `simdist.plan.delays`.
        observe: What to keep, see `simdist.engines.observers`.
        engine: `auto` takes the fastest engine that computes this exactly.
        live: Actors, observers of every event, and traffic of others on the links.
        progress: Called with the steps done and the steps of all seeds.
        courses: What earlier runs with these prices found about ranks that are alike.

    Returns:
        What the observer keeps.

    Raises:
        PlanError: The delays do not fit the plan.
        UnsupportedError: The caller asked for `fast`, which cannot compute this exactly.
        RunError: An actor failed, or the simulation is stuck.

    Warns:
        RuntimeWarning: It will take more than 2 GB of memory.
    """
    if not isinstance(delays, SeedDelays):
        if observe.of_one_seed:
            check_delays(plan, delays)
        delays = SeedDelays.of(delays)
    costs = [prices] if isinstance(prices, Costs) else prices
    its = live or Live()
    asked = RunToChoose(plan, costs, delays, observe, bool(its.actors or its.observers), courses)
    barred: dict[str, str] = {}
    while True:
        choice = choose(asked, engine, barred)
        _warn_of_memory(plan, max(observe.n_arrays, _ARRAYS_OF_EVENTS if choice.engine == "des" else 0))
        try:
            with rare_collections():
                return _observed(asked, choice, its, progress)
        except UnforeseenError as error:
            if engine != "auto":
                raise UnsupportedError(f"{error}: {USE_OTHERS}") from None
            barred[choice.engine] = str(error)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector less often: a simulation makes millions of objects, and hardly any cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _warn_of_memory(plan: Plan, n_arrays: int) -> None:
    """Say before a run what its arrays with a number for each operation and rank will take, if that is much."""
    nbytes = _NUMBER_NBYTES * n_arrays * plan.n_instances * plan.world_size
    if nbytes > _LARGE_NBYTES:
        warnings.warn(
            f"{plan.name}: the times of {plan.n_instances:,} operations on {plan.world_size:,} ranks will take about "
            f"{nbytes / 1e9:.1f} GB of memory: simulate fewer steps or ranks if that is too much",
            RuntimeWarning,
            stacklevel=3,
        )


def _observed(asked: RunToChoose[ObservedT], choice: ChosenEngine, live: Live, progress: Progress | None) -> ObservedT:
    """Simulate a plan with the engine that was chosen."""
    plan = asked.plan
    match choice.engine:
        case "fast":
            from simdist.engines.vector import VectorRun

            links = asked.links
            return asked.observe.by_vectors(VectorRun(plan, asked.costs, asked.delays, progress, links, choice.reason))
        case "alike":
            from simdist.engines.alike import KindsRun

            return asked.observe.by_kinds(KindsRun(plan, asked.delays, progress, asked.courses, choice.reason))
    from simdist.engines.des import EventRun

    run = EventRun(
        plan,
        asked.costs[0],
        asked.delays,
        progress,
        actors=live.actors,
        observers=live.observers,
        traffic=live.traffic,
        reason=choice.reason,
    )
    return asked.observe.by_events(run)
