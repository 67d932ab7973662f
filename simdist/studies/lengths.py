"""Mean steps without the begin and the end of a run.

A run of W steps and one of L > W steps with the same delays begin alike and end alike. What the latter takes longer,
over L - W, is a mean step without the begin and the end of a run.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.runs.building import dataset
from simdist.scenario.scenario import Scenario
from simdist.settings.base import unchecked_copy
from simdist.studies.measuring import ScheduleTimes
from simdist.studies.statistics import TIMES_OF_DRAWS


def scenario_of_warm_up(scenario: Scenario, warm_up: int) -> Scenario:
    """Return the scenario of the steps that are left out.

    Raises:
        ScenarioError: It has no such steps, or a data set, whose first steps have no runs of their own.
    """
    if not 0 < warm_up < scenario.steps:
        raise ScenarioError(f"{scenario.name}: warm-up of {warm_up} steps: write 1 to {scenario.steps - 1}")
    if dataset(scenario) is not None:
        raise ScenarioError(
            f"{scenario.name}: a warm-up cannot be left out with a data set: its epochs are shown one by one"
        )
    return unchecked_copy(scenario, steps=warm_up)


def without_first(times: ScheduleTimes, first: ScheduleTimes, *, n_steps: int, warm_up: int) -> ScheduleTimes:
    """Return the times of a schedule without those of its first steps.

    Args:
        times: Of all `n_steps` steps.
        first: Of the first `warm_up` steps, with the same seeds.
        n_steps: Steps of the run.
        warm_up: Steps that are left out.
    """

    def rest(whole: NDArray[np.float64], part: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray((n_steps * whole - warm_up * part) / (n_steps - warm_up))

    def mean_of_rest(whole: float, part: float) -> float:
        return (n_steps * whole - warm_up * part) / (n_steps - warm_up)

    states_s = {state: rest(whole, first.states_s[state]) for state, whole in times.states_s.items()}
    of_draws = {name: rest(times.drawn[name], first.drawn[name]) for name in TIMES_OF_DRAWS if name in times.drawn}
    found = replace(
        times,
        step_s=rest(times.step_s, first.step_s),
        states_s=states_s,
        drawn=times.drawn | of_draws,
        facets=times.facets.without_first(first.facets, mean_of_rest),
        uncorrected=None,
    )
    if times.uncorrected is None and first.uncorrected is None:
        return found
    simulated = without_first(times.as_simulated, first.as_simulated, n_steps=n_steps, warm_up=warm_up)
    return replace(found, uncorrected=simulated)
