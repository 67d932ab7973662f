"""Two engines that give the same times: `des`, event by event, the reference; `fast`, by numpy recurrences."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from simdist.cost.costs import Costs
from simdist.errors import UnsupportedError
from simdist.plan import Plan
from simdist.plan.delays import Delays, DelaySource, DrawnDelays, check_delays

if TYPE_CHECKING:
    from simdist.traces.trace import Trace

__all__ = ["DelaySource", "Delays", "DrawnDelays", "Engine", "check_delays", "choose_engine", "simulate"]

Engine: TypeAlias = Literal["auto", "des", "fast"]

_Simulated = TypeVar("_Simulated")


def choose_engine(engine: Engine, *, by_fast: Callable[[], _Simulated], by_des: Callable[[], _Simulated]) -> _Simulated:
    """Simulate with an engine: `auto` takes the fast one, and the discrete-event one where that one refuses.

    Raises:
        UnsupportedError: `fast` was asked for and cannot compute this exactly.
    """
    if engine != "des":
        try:
            return by_fast()
        except UnsupportedError:
            if engine == "fast":
                raise
    return by_des()


def simulate(
    plan: Plan,
    costs: Costs,
    delays: Delays,
    *,
    engine: Engine = "auto",
    progress: Callable[[int], None] | None = None,
) -> "Trace":
    """Simulate a plan.

    Args:
        plan: A legal plan (see `simdist.plan.check`).
        costs: Its price list (see `simdist.cost`).
        delays: Channel -> float64 `[1, n_steps, world_size]`, seconds.
        engine: See `choose_engine`.
        progress: Called with the number of steps done.

    Raises:
        PlanError: The delays do not fit the plan.
        UnsupportedError: `fast` was asked for and cannot compute this exactly.
    """

    def by_fast() -> "Trace":
        from simdist.engines import fast

        return fast.simulate(plan, costs, delays, progress=progress)

    def by_des() -> "Trace":
        from simdist.engines import des

        return des.simulate(plan, costs, delays, progress=progress)

    return choose_engine(engine, by_fast=by_fast, by_des=by_des)
