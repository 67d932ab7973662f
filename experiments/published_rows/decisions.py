"""Decisions between two measured schedules: does the interval of the speed-up say which one is faster?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import rows as published

from simdist.runs.building import build
from simdist.scenario import Scenario, load
from simdist.studies.comparison import row
from simdist.studies.draws import with_draws
from simdist.studies.measuring import ScheduleTimes, measure
from simdist.studies.published_errors import kinds_of_step, of_published_rows

EXPERIMENTS = Path(__file__).parent.parent
WORTHWHILE = 1.02
N_SEEDS = 4
WITH_HOST = ", with the host's work"
"""Ends the families whose programs' work on the host is known, from their runs of another model (AlexNet)."""
GPUS_OF_BLOG = {64: (2.08, 2.45), 128: (2.57, 2.68), 256: (2.63, 3.25)}


@dataclass(frozen=True)
class Decision:
    """Two schedules, as measured and as simulated.

    Args:
        family: Experiment and model.
        name: Schedules and size.
        measured: Speed-up of the second over the first.
        simulated: The same.
        low: Lower end of its interval.
        high: Upper end.
    """

    family: str
    name: str
    measured: float
    simulated: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval says which one is faster, by 2 % or more."""
        return (self.low > 1 and self.simulated >= WORTHWHILE) or (self.high < 1 and self.simulated <= 1 / WORTHWHILE)

    @property
    def with_host(self) -> bool:
        """Whether the host's work of the program is known."""
        return self.family.endswith(WITH_HOST)

    @property
    def is_right(self) -> bool:
        """Whether the same one is faster as measured."""
        return (self.measured > 1) == (self.simulated > 1)


def decisions() -> Iterator[Decision]:
    """Yield all decisions."""
    yield from _local_sgd()
    yield from _top_k()
    yield from _stragglers()


def _times(scenario: Scenario, hardware: str) -> dict[str, ScheduleTimes]:
    """Return the times of each schedule under the same draws."""
    doubts = kinds_of_step(scenario, hardware, of_published_rows())
    n_seeds = N_SEEDS if scenario.is_random else 1
    found = {}
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        times = measure(scenario, built, n_seeds=n_seeds)
        found[schedule.name] = with_draws(scenario, built, times, doubts=doubts)
    return found


def _decision(family: str, name: str, measured: float, one: ScheduleTimes, other: ScheduleTimes) -> Decision:
    found = row(other, one)
    assert found.speedup_range
    return Decision(family, name, measured, found.speedup, *found.speedup_range)


def _local_sgd() -> Iterator[Decision]:
    """Yield local SGD against synchronous SGD on 4 A10G."""
    rows = [each for each in published.training_rows() if each.family == "A10G local SGD"]
    base = rows[0].scenario()
    scenario = base.changed(steps=64, schedules=[each.schedule for each in rows])
    times = list(_times(scenario, base.cluster.device.generation or "").values())
    for each, found in zip(rows[1:], times[1:], strict=True):
        period = each.schedule["period"]
        measured = each.measured_per_s / rows[0].measured_per_s
        yield _decision(each.family, f"period {period} over sync", measured, times[0], found)


def _top_k() -> Iterator[Decision]:
    """Yield dense and sparse gradients over 1 Gbit/s, without and with the host's work of these programs."""
    run = script("gtopk_1gbe")
    for model, of in run.PUBLISHED.items():
        for number, n_workers in enumerate(run.WORKERS):
            base = run.SCENARIOS[model]
            scenario = base.changed(cluster=base.cluster.model_copy(update={"nodes": n_workers}))
            select_s = run.selection_s(of.n_parameters)
            times = {
                name: each if name == "dense" else _longer(each, select_s)
                for name, each in _times(scenario, "pascal").items()
            }
            of_host_s = {name: each * of.n_parameters for name, each in run.beside_s(n_workers).items()}
            with_host = {name: _longer(each, of_host_s[name]) for name, each in times.items()}
            for family, found in ((f"1 GbE, {model}", times), (f"1 GbE, {model}{WITH_HOST}", with_host)):
                for one, other in (("dense", "topk"), ("dense", "gtopk"), ("topk", "gtopk")):
                    measured = of.together[other][number] / of.together[one][number]
                    name = f"{other} over {one}, {n_workers} workers"
                    yield _decision(family, name, measured, found[one], found[other])


def _stragglers() -> Iterator[Decision]:
    """Yield hierarchical SGD against synchronous SGD with stragglers; published are the least and largest speed-ups."""
    for n_gpus, (least, most) in GPUS_OF_BLOG.items():
        scenario = load(EXPERIMENTS / "hsgd_stragglers" / f"{n_gpus}.yaml").changed(steps=200)
        times = _times(scenario, "volta")
        hierarchical = [each for name, each in times.items() if name.startswith("hsgd")]
        ordered = sorted(hierarchical, key=lambda each: -float(each.step_s.mean()))
        for name, measured, found in (("least", least, ordered[0]), ("most", most, ordered[-1])):
            title = f"{name} hierarchical over sync, {n_gpus} GPUs"
            yield _decision("stragglers", title, measured, times["sync"], found)


def _longer(times: ScheduleTimes, by_s: float) -> ScheduleTimes:
    drawn = {name: each + by_s if name in ("step", "stated") else each for name, each in times.drawn.items()}
    return replace(times, step_s=times.step_s + by_s, drawn=drawn)


def script(experiment: str) -> ModuleType:
    """Import the `run.py` of an experiment."""
    file = EXPERIMENTS / experiment / "run.py"
    spec = spec_from_file_location(f"{experiment}_run", file)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
