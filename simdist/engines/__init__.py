"""Two engines that compute the same times: `des`, the event-driven reference, and `fast`, by numpy recurrences.

If the choice is free and `fast` cannot simulate a plan, events of ranks that are alike are simulated once: see `alike`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from simdist.cost.costs import Costs
from simdist.errors import UnsupportedError
from simdist.plan import Plan
from simdist.plan.delays import Delays, DelaySource, DrawnDelays, check_delays

if TYPE_CHECKING:
    from simdist.cost.traffic import Traffic
    from simdist.engines.actors import Actor
    from simdist.engines.live import Observer
    from simdist.traces.trace import Trace

__all__ = ["DelaySource", "Delays", "DrawnDelays", "Engine", "check_delays", "choose_engine", "first_exact", "simulate"]

Engine: TypeAlias = Literal["auto", "des", "fast"]

_Simulated = TypeVar("_Simulated")


def first_exact(*attempts: Callable[[], _Simulated]) -> _Simulated:
    """Simulate with the first engine that does not refuse. An engine refuses what it cannot compute exactly.

    Args:
        attempts: Simulations by one engine each, in the order in which they are tried.

    Raises:
        UnsupportedError: The last one refuses.
    """
    *others, last = attempts
    for each in others:
        try:
            return each()
        except UnsupportedError:
            pass
    return last()


def choose_engine(
    engine: Engine,
    *,
    by_fast: Callable[[], _Simulated],
    by_alike: Callable[[], _Simulated] | None = None,
    by_des: Callable[[], _Simulated],
) -> _Simulated:
    """Simulate with an engine. `auto` takes the fast engine, then events of ranks that are alike, then all events.

    Raises:
        UnsupportedError: The caller asked for `fast`, which cannot compute this exactly.
    """
    if engine != "auto":
        return by_fast() if engine == "fast" else by_des()
    attempts = (by_fast, by_alike, by_des)
    return first_exact(*(each for each in attempts if each is not None))


def simulate(
    plan: Plan,
    costs: Costs,
    delays: Delays,
    *,
    engine: Engine = "auto",
    traffic: "Traffic | None" = None,
    actors: "Sequence[Actor]" = (),
    observers: "Sequence[Observer]" = (),
    progress: Callable[[int], None] | None = None,
) -> "Trace":
    """Simulate a plan.

    Args:
        plan: A legal plan (see `simdist.plan.check`).
        costs: Its price list (see `simdist.cost`).
        delays: Those of one seed, see `simdist.plan.delays`.
        engine: See `choose_engine`.
        traffic: What links do besides carrying the plan's transfers. `costs` lists the links that it disturbs.
        actors: Processes of the user, see `simdist.engines.actors`. They end with the last rank.
        observers: Called with every `simdist.engines.live.Change`, in order of time.
        progress: Called with the number of steps done.

    Raises:
        PlanError: The delays do not fit the plan.
        UnsupportedError: The caller asked for `fast`, which cannot compute this exactly.
        RunError: An actor failed, or the simulation is stuck.
    """

    def by_fast() -> "Trace":
        if actors or observers:
            raise UnsupportedError(
                "actors and observers need every event, and the fast engine has none: use engine='des'"
            )
        from simdist.engines import fast

        return fast.simulate(plan, costs, delays, progress=progress)

    def by_alike() -> "Trace":
        from simdist.engines import alike

        check_delays(plan, delays)
        return alike.simulate(plan, costs, DrawnDelays(delays), progress=progress)

    def by_des() -> "Trace":
        from simdist.engines import des

        return des.simulate(plan, costs, delays, traffic=traffic, actors=actors, observers=observers, progress=progress)

    needs_events = bool(actors or observers)
    return choose_engine(engine, by_fast=by_fast, by_alike=None if needs_events else by_alike, by_des=by_des)
