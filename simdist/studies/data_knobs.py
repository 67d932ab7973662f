"""Changes that would shorten the waiting for data: a scenario is simulated again with one thing changed at a time.

Waiting is staging, and the stalls of `simdist.studies.epochs`. A knob removes 1 - (waiting with it) / (waiting as it
is): 1 is all of it; below 0, more is waited for than before. Knobs are not additive: two together may remove less than
the sum, if either suffices, or more, if each needs the other.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simdist.display import Pictured
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.errors import ScenarioError
from simdist.plan.delays import Delays
from simdist.runs.building import build, dataset, live_of
from simdist.scenario import Scenario
from simdist.scenario.cluster import Storage
from simdist.schedules import Schedule
from simdist.schedules.job import POLICIES, POLICIES_OF_WORKERS, uses_disk, uses_memory
from simdist.settings.base import unchecked_copy
from simdist.studies.columns import frame_of_records
from simdist.studies.epochs import Epochs, find_epochs

if TYPE_CHECKING:
    import pandas as pd

_AS_IT_IS = "as it is"

#: Called with what is simulated, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Knob:
    """A thing to change.

    Args:
        name: For people, such as `prefetch 2 -> 4`.
        scenario: The changed scenario.
        schedule: The changed schedule.
        missing: Setting that the scenario lacks for it, such as `cluster.disk`; then it cannot be simulated.
    """

    name: str
    scenario: Scenario
    schedule: Schedule
    missing: str = ""


@dataclass(frozen=True, slots=True)
class KnobEffect:
    """Effect of a knob.

    Args:
        knob: Name.
        seconds, staging_s: Staging and epochs; staging.
        stall_s: Stalls of each epoch (float).
        removed (float or null): Share of the waiting that it removes. Below 0, it adds some.
        removed_by_epoch: The same of each epoch's stalls.
    """

    knob: str
    seconds: float
    staging_s: float
    stall_s: tuple[float, ...]
    removed: float
    removed_by_epoch: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class KnobEffects(Pictured):
    """Effects of all knobs on a schedule.

    Args:
        baseline: The schedule as it is.
        effects: Of each knob, the one with the shortest run first.
        missing: Knobs that need something which the scenario lacks: name -> what.
    """

    baseline: Epochs
    effects: tuple[KnobEffect, ...]
    missing: dict[str, str]

    def records(self) -> list[dict[str, object]]:
        """Return the schedule as it is, and with each knob.

        Columns:
            knob (str): Name; `as it is` in the first row.
            seconds, staging_s, stall_s (float64): Staging and epochs, staging, stalls of all epochs.
            removed (float64): As in "Effect of a knob".
        """
        base = self.baseline
        as_it_is = (_AS_IT_IS, base.seconds, base.staging_s, base.waiting_s - base.staging_s, 0.0)
        changed = [(one.knob, one.seconds, one.staging_s, math.fsum(one.stall_s), one.removed) for one in self.effects]
        names = ("knob", "seconds", "staging_s", "stall_s", "removed")
        return [dict(zip(names, each, strict=True)) for each in (as_it_is, *changed)]

    def frame(self) -> "pd.DataFrame":
        """Return one row per knob, the schedule as it is first; see `records`."""
        return frame_of_records(self.records())


def knobs(scenario: Scenario, schedule: Schedule) -> tuple[Knob, ...]:
    """Return the possible changes to the data loading of a schedule.

    Raises:
        ScenarioError: The scenario has no data set.
    """
    if dataset(scenario) is None:
        raise ScenarioError(f"{scenario.name}: reads no data set: {what_to_write(scenario)}")
    return (*_of_cluster(scenario, schedule), *_of_schedule(scenario, schedule), *_policies(scenario, schedule))


def what_to_write(scenario: Scenario) -> str:
    """Return the missing parts of a scenario that reads no data set."""
    lacks = [] if scenario.input.data else ["input.data: {samples: ..., file_size: ...}"]
    lacks += [] if scenario.input.source == "storage" else ["input.source: storage"]
    return f"write {' and '.join(lacks)}"


def _of_cluster(scenario: Scenario, schedule: Schedule) -> Iterator[Knob]:
    cluster = scenario.cluster
    storage = scenario.cluster.storage
    changes = _of_storage(storage) if storage else {}
    for name, changed in changes.items():
        yield Knob(name, _with_cluster(scenario, storage=changed), schedule)
    cores = cluster.host.cores_per_node
    if cores is not None:
        more = _with_cluster(scenario, host={"cores_per_node": 2 * cores})
        yield Knob(f"cores per node {cores} -> {2 * cores}", more, schedule)


def _of_storage(storage: Storage) -> dict[str, Storage]:
    """Return variants of a server, each twice as good in one respect."""
    factors = {
        "storage bandwidth x 2": {"bandwidth_Bps": 2.0},
        "storage client bandwidth x 2": {"client_bandwidth_Bps": 2.0},
        "storage operations x 2": {"operations_per_s": 2.0},
        "storage latency and open / 2": {"latency_s": 0.5, "open_s": 0.5},
    }
    now = storage.model_dump(by_alias=False)
    changes = {
        name: {key: factor * now[key] for key, factor in each.items() if 0 < now[key] < math.inf}
        for name, each in factors.items()
    }
    return {name: storage.model_copy(update=update) for name, update in changes.items() if update}


def _with_cluster(scenario: Scenario, **update: object) -> Scenario:
    return unchecked_copy(scenario, cluster=scenario.cluster.model_copy(update=update))


def _with_input(scenario: Scenario, **update: object) -> Scenario:
    return unchecked_copy(scenario, input=scenario.input.model_copy(update=update))


def _of_schedule(scenario: Scenario, schedule: Schedule) -> Iterator[Knob]:
    path = scenario.input
    if path.num_workers is not None:
        for key, value in {"num_workers": path.num_workers, "prefetch_factor": path.prefetch_factor}.items():
            more = 2 * value or 1
            yield Knob(f"{key} {value} -> {more}", _with_input(scenario, **{key: more}), schedule)
        return
    now = {
        "decode_workers": schedule.input.decode_workers or path.decode_workers,
        "readers": schedule.input.readers or path.readers,
        "prefetch": schedule.input.prefetch or path.prefetch,
    }
    for key, value in now.items():
        yield Knob(f"{key} {value} -> {2 * value}", scenario, schedule.model_copy(update={"input": {key: 2 * value}}))


def _policies(scenario: Scenario, schedule: Schedule) -> Iterator[Knob]:
    data = scenario.input.data
    now = schedule.input.policy or (data.policy if data else None)
    for policy in POLICIES if scenario.input.num_workers is None else POLICIES_OF_WORKERS:
        if policy != now:
            needs = {"cluster.disk": uses_disk(policy), "cluster.memory": uses_memory(policy)}
            there = {"cluster.disk": scenario.cluster.disk, "cluster.memory": scenario.cluster.memory}
            missing = " and ".join(key for key, needed in needs.items() if needed and there[key] is None)
            yield Knob(
                f"policy: {policy}", scenario, schedule.model_copy(update={"input": {"policy": policy}}), missing
            )


def knob_effects(
    scenario: Scenario, schedule: Schedule, delays: Delays, *, progress: Progress | None = None
) -> KnobEffects:
    """Simulate a schedule as it is, and with every knob turned.

    Args:
        scenario: With a data set.
        schedule: Of the scenario.
        delays: Channel -> float64 `[1, n_steps, world_size]`, seconds; the same with every knob.
        progress: See `Progress`.

    Raises:
        ScenarioError: The scenario has no data set.
        PlanError: The schedule does not fit the cluster.
    """
    found = knobs(scenario, schedule)
    possible = [knob for knob in found if not knob.missing]
    total = (1 + len(possible)) * scenario.steps

    def simulated(knob: Knob, number: int) -> Epochs:
        def report(step: int, _: int) -> None:
            if progress:
                progress(f"{schedule.name}: {knob.name}", number * scenario.steps + step, total)

        built = build(knob.scenario, knob.schedule)
        live = live_of(knob.scenario, built.costs)
        return find_epochs(run(built.plan, built.costs, delays, observe=WholeTrace(), live=live, progress=report))

    baseline = simulated(Knob("as it is", scenario, schedule), 0)
    turned = ((knob, simulated(knob, number)) for number, knob in enumerate(possible, 1))
    effects = [_effect(knob.name, each, baseline) for knob, each in turned]
    effects.sort(key=lambda each: round(each.seconds, 9))  # those that differ by rounding only stay in order
    return KnobEffects(baseline, tuple(effects), {knob.name: knob.missing for knob in found if knob.missing})


def _effect(name: str, turned: Epochs, baseline: Epochs) -> KnobEffect:
    stalls_s = tuple(epoch.stall_s for epoch in turned.epochs)
    before_s = (epoch.stall_s for epoch in baseline.epochs)
    by_epoch = tuple(_removed(now_s, then_s) for now_s, then_s in zip(stalls_s, before_s, strict=True))
    removed = _removed(turned.waiting_s, baseline.waiting_s)
    return KnobEffect(name, turned.seconds, turned.staging_s, stalls_s, removed, by_epoch)


def _removed(now_s: float, then_s: float) -> float:
    return 1 - now_s / then_s if then_s else math.nan
