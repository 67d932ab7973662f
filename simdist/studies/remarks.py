"""What a user must know of a scenario before its numbers: the same sentences on the command line and in Python."""

from collections.abc import Iterator

from simdist.errors import naming
from simdist.runs.building import in_steps, lost_share
from simdist.scenario import Interference, Scenario
from simdist.scenario.warnings import warnings_of
from simdist.settings.units import Elapsed, format_duration, format_share
from simdist.studies.published_errors import unknown_gpu


def remarks_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the warnings of a scenario, then what follows from its settings, a sentence each without full stop."""
    return (*warnings_of(scenario), *derived(scenario))


def derived(scenario: Scenario) -> Iterator[str]:
    """Yield what follows from settings: steps between checkpoints, what a measured machine loses, unknown GPUs."""
    yield from _unknown_gpu(scenario)
    if scenario.checkpoint and isinstance(scenario.checkpoint.every, Elapsed):
        yield _checkpoint_steps(scenario, scenario.checkpoint.every)
    for i, each in enumerate(scenario.delays):
        if isinstance(each, Interference) and each.machine_samples_per_s:
            share = lost_share(scenario, each)
            lost = f"loses {format_share(share)} of forward and backward beside communication"
            which = f"{each.rate_ranks} GPUs" if each.rate_ranks else "it"
            verb = "were" if each.rate_ranks and each.rate_ranks > 1 else "was"
            rate = f"as {which} {verb} measured at {each.machine_samples_per_s:g} samples/s"
            rate += "" if share else ", more than simulated: forward and backward take too long"
            yield f"disturbances[{i}]: one machine {lost}, {rate}"
        elif isinstance(each, Interference) and each.typical and not lost_share(scenario, each):
            its = f"workload.utilization is that of {scenario.workload.measured_ranks} GPUs and contains them"
            yield f"disturbances[{i}]: typical losses of a machine are not added: {its}"


def _unknown_gpu(scenario: Scenario) -> Iterator[str]:
    """Say what intervals lack if no published row is of such GPUs."""
    name = unknown_gpu(scenario)
    hint = "write cluster.device.compute_capability"
    if name:
        yield f"cluster.device: no published row is of GPUs like {name}, so results have no interval: {hint}"
    elif name is not None and scenario.has_ranges:
        what = "hold the stated ranges only, no errors of published rows"
        yield f"cluster.device has no name: intervals {what}: write it, or {hint.removeprefix('write ')}"


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
