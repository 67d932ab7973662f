"""Plans of scenarios and of run directories, as studies take them."""

from dataclasses import dataclass
from pathlib import Path

from simdist.cost import Costs
from simdist.engines.run import Live
from simdist.plan import Plan
from simdist.plan.delays import Delays
from simdist.runs.building import delays, live_of
from simdist.runs.run_directory import RunDirectory
from simdist.scenario import Scenario
from simdist.schedules import Schedule


@dataclass(frozen=True)
class PlannedSchedule:
    """A plan to work on.

    Args:
        scenario: The scenario that it is from.
        schedule: The schedule that makes it.
        plan: As the schedule makes it or, in a run directory, as it stands there.
        costs: Its price list.
        delays: Delays to inject; None if those of the scenario's seed were not drawn.
        run: Its run directory, if it is from one.
        output: The run directory to write, if any.
    """

    scenario: Scenario
    schedule: Schedule
    plan: Plan
    costs: Costs
    delays: Delays | None
    run: RunDirectory | None
    output: Path | None

    def drawn_delays(self) -> Delays:
        """Return what to inject, drawn if it was not yet."""
        return delays(self.scenario) if self.delays is None else self.delays

    @property
    def live(self) -> Live:
        """What links do in the run of the scenario's seed."""
        return live_of(self.scenario, self.costs)
