"""Remarks on a scenario, which are known before it is simulated."""

import re
from collections.abc import Iterable, Iterator

from simdist.errors import naming
from simdist.runs.building import in_steps, lost_share
from simdist.scenario import Interference, Scenario
from simdist.scenario.warnings import unstated, warnings_of
from simdist.settings.units import Elapsed, format_duration, format_share
from simdist.studies.remarks import Kind, Remark

_PATH = re.compile(r"([a-z_]+)((\.\w+|\[\d+\])+|(?=:| has no effect))")


def remarks_of(scenario: Scenario) -> tuple[Remark, ...]:
    """Return the remarks on a scenario: its warnings, what follows from its settings, and what they do not state."""
    sentences: dict[Kind, Iterable[str]] = {
        "input": warnings_of(scenario),
        "derived": _derived(scenario),
        "assumption": unstated(scenario.cluster, scenario.schedules),
    }
    return tuple(Remark(kind, text, _place(text)) for kind, texts in sentences.items() for text in texts)


def _place(text: str) -> str:
    """Return the path that a sentence begins with; empty if it begins otherwise."""
    found = _PATH.match(text.removeprefix("the range of "))
    return found[0] if found and found[1] in Scenario.model_fields else ""


def _derived(scenario: Scenario) -> Iterator[str]:
    """Yield numbers that follow from settings: steps between checkpoints, and what a measured machine loses."""
    if scenario.checkpoint and isinstance(scenario.checkpoint.every, Elapsed):
        yield _checkpoint_steps(scenario, scenario.checkpoint.every)
    for i, each in enumerate(scenario.delays):
        if isinstance(each, Interference) and each.machine_samples_per_s:
            share = lost_share(scenario, each)
            lost = f"loses {format_share(share)} of forward and backward beside communication"
            rate = f"as it was measured at {each.machine_samples_per_s:g} samples/s"
            rate += "" if share else ", more than simulated: forward and backward take too long"
            yield f"disturbances[{i}]: one machine {lost}, {rate}"


def _checkpoint_steps(scenario: Scenario, every: Elapsed) -> str:
    """Say how many steps of each schedule are the time between checkpoints."""
    found = []
    for schedule in scenario.schedules:
        with naming(scenario.name):
            its = in_steps(scenario, schedule).checkpoint
        steps = its.every if its and isinstance(its.every, int) else 0
        missing = f", none within {scenario.steps:,} steps" if steps > scenario.steps else ""
        found.append(f"{steps:,} steps of {schedule.name}{missing}")
    return f"checkpoint: every {format_duration(every.seconds)} is every {'; '.join(found)}"
