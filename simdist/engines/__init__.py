"""Two engines that give the same times: `des`, event by event, the reference; `fast`, by numpy recurrences."""

from typing import Literal, TypeAlias

from simdist.cost import Costs
from simdist.engines import des, fast
from simdist.errors import UnsupportedError
from simdist.plan import Plan
from simdist.plan.delays import Delays, DelaySource, DrawnDelays, check_delays
from simdist.traces.trace import Trace

__all__ = ["DelaySource", "Delays", "DrawnDelays", "Engine", "check_delays", "des", "fast", "simulate"]

Engine: TypeAlias = Literal["auto", "des", "fast"]


def simulate(
    plan: Plan, costs: Costs, delays: Delays, *, engine: Engine = "auto", progress: fast.Progress | None = None
) -> Trace:
    """Simulate a plan.

    Args:
        plan: A legal plan (see `simdist.plan.check`).
        costs: Its price list (see `simdist.cost`).
        delays: Channel -> float64 `[n_steps, world_size]`, seconds.
        engine: `auto` takes the fast engine, and the discrete-event engine where that one refuses.
        progress: Called with the number of steps done.

    Raises:
        PlanError: The delays do not fit the plan.
        UnsupportedError: `fast` was asked for and cannot compute this exactly.
    """
    if engine != "des":
        try:
            return fast.simulate(plan, costs, delays, progress=progress)
        except UnsupportedError:
            if engine == "fast":
                raise
    return des.simulate(plan, costs, delays, progress=progress)
