"""The only entry of the engines: simulate a plan, and keep what an observer asks for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from simdist.cost.costs import Costs
from simdist.engines.observers import ObservedT, Observer
from simdist.errors import UnsupportedError
from simdist.plan import Plan
from simdist.plan.delays import Delays, SeedDelays, check_delays

if TYPE_CHECKING:
    from simdist.cost.traffic import Traffic
    from simdist.engines.actors import Actor
    from simdist.engines.alike import Courses
    from simdist.engines.live import Observer as LiveObserver

Engine: TypeAlias = Literal["auto", "des", "fast"]
#: `alike` takes one rank of each kind, or refuses.
AnyEngine: TypeAlias = Engine | Literal["alike"]
#: Called with the steps done and the steps of all seeds.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Live:
    """What only a run of all events can have.

    Args:
        actors: Processes of the user. Each seed starts them anew, and they end with the last rank.
        observers: Called with each `simdist.engines.live.Change`, in order of time.
        traffic: Returns what links do with a seed besides carrying the plan's transfers. The prices list the links that
            it disturbs.
    """

    actors: "Sequence[Actor]" = ()
    observers: "Sequence[LiveObserver]" = ()
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
    """
    if not isinstance(delays, SeedDelays):
        if observe.of_one_seed:
            check_delays(plan, delays)
        delays = SeedDelays.of(delays)
    costs = [prices] if isinstance(prices, Costs) else prices
    needs_events = live is not None and bool(live.actors or live.observers)

    def by_vectors() -> ObservedT:
        if needs_events:
            raise UnsupportedError(
                "actors and observers need every event, and the fast engine has none: use engine='des'"
            )
        from simdist.engines.vector import VectorRun

        return observe.by_vectors(VectorRun(plan, costs, delays, progress))

    def by_kinds() -> ObservedT:
        from simdist.engines.alike import KindsRun

        return observe.by_kinds(KindsRun(plan, costs[0], delays, progress, courses))

    def by_events() -> ObservedT:
        from simdist.engines.des import EventRun

        its = live or Live()
        return observe.by_events(
            EventRun(plan, costs[0], delays, progress, actors=its.actors, observers=its.observers, traffic=its.traffic)
        )

    if engine != "auto":
        return {"fast": by_vectors, "alike": by_kinds, "des": by_events}[engine]()
    attempts = [by_vectors] if needs_events or observe.needs_traces else [by_vectors, by_kinds]
    if len(attempts) > 1 and observe.prefers_kinds(plan, delays):
        attempts.reverse()
    for attempt in attempts:
        try:
            return attempt()
        except UnsupportedError:
            pass
    return by_events()
