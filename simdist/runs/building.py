"""From a scenario to what the engines take: job, plan, price list, delays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simdist import engines
from simdist.cost import Costs, compute_s, price, tensor_backward_s
from simdist.engines import Engine
from simdist.errors import ScenarioError
from simdist.plan import Channel, Dataset, Plan
from simdist.plan.check import check
from simdist.proof import prove
from simdist.scenario.sampling import DelaySampler, sampler
from simdist.scenario.scenario import Scenario
from simdist.schedules import InputPath, Job, Schedule
from simdist.traces.trace import Trace

if TYPE_CHECKING:
    from simdist.cost.traffic import Traffic
    from simdist.engines.actors import Actor
    from simdist.engines.live import Observer


@dataclass(frozen=True)
class Built:
    """A schedule, made concrete for a scenario.

    Args:
        schedule: The schedule.
        plan: Its plan, legal and proved.
        costs: Prices of the plan's operations.
        n_proved_ranks: Ranks whose contributions the proof followed.
    """

    schedule: Schedule
    plan: Plan
    costs: Costs
    n_proved_ranks: int


def job(scenario: Scenario) -> Job:
    """Return what schedules need to know of a scenario."""
    cluster, workload, path = scenario.cluster, scenario.workload, scenario.input
    policy = scenario.data.policy if scenario.data else "naive"
    return Job(
        world_size=cluster.world_size,
        ranks_per_node=cluster.gpus_per_node,
        n_steps=scenario.steps,
        tensor_counts=workload.tensor_counts,
        dtype=workload.dtype,
        optimizer=workload.optimizer,
        micro_batches=workload.micro_batches,
        batch_nbytes=max(1, workload.samples_per_step * workload.sample_nbytes),
        input_path=InputPath(path.source, path.copy_method, path.prefetch, dataset(scenario), policy),
        host_waits_for=scenario.host.waits_for,
        run_ahead_steps=scenario.host.run_ahead_steps,
        delay_channels=frozenset(each.on for each in scenario.delays if each),
        tensor_backward_s=tensor_backward_s(workload, cluster),
        checkpoint=scenario.checkpoint.of_job(cluster.world_size) if scenario.checkpoint else None,
    )


def dataset(scenario: Scenario) -> Dataset | None:
    """Return the data set that is read from storage, if there is one."""
    cluster, workload, data = scenario.cluster, scenario.workload, scenario.data
    if data is None or scenario.input.source != "storage":
        return None
    return Dataset(
        n_samples=data.n_samples,
        batch_size=workload.samples_per_step,
        ranks_per_node=cluster.gpus_per_node,
        sample_nbytes=workload.sample_nbytes,
        file_nbytes=data.sizes_nbytes(),
        shuffle=data.shuffle,
        seed=data.seed,
        disk_nbytes=cluster.disk.capacity_nbytes if cluster.disk else None,
        memory_nbytes=cluster.memory.capacity_nbytes if cluster.memory else None,
        eviction=data.eviction,
        warm=data.start == "warm",
        readers=scenario.input.readers,
        decoders=scenario.input.decode_workers,
    )


def build(scenario: Scenario, schedule: Schedule) -> Built:
    """Write the plan of a schedule, check it, prove that it computes what the schedule declares, and price it.

    Raises:
        PlanError: The plan is not legal, or does something else.
        ScenarioError: Compute times are neither given nor derivable.
    """
    described = job(scenario)
    plan = schedule.plan(described)
    check(plan)
    n_proved_ranks = prove(plan, lambda step: schedule.result(step, described))
    return Built(schedule, plan, price_of(plan, scenario), n_proved_ranks)


def price_of(plan: Plan, scenario: Scenario) -> Costs:
    """Return what every operation of a plan costs in a scenario, on slow and disturbed links too.

    Raises:
        PlanError: As of `simdist.cost.price`.
        ScenarioError: Likewise.
    """
    if not scenario.has_links:
        return price(plan, scenario.cluster, scenario.workload)
    from simdist.runs.traffic import disturbed_price

    return disturbed_price(plan, scenario)


def traffic(scenario: Scenario, costs: Costs, seed: int) -> "Traffic | None":
    """Return what links do in the run of a seed; None if they stay as they are.

    Args:
        scenario: The scenario.
        costs: By `price_of`.
        seed: Of the run.
    """
    if not scenario.has_links:
        return None
    from simdist.runs.traffic import link_traffic

    return link_traffic(scenario, costs.resources, seed)


def delay_sampler(scenario: Scenario, seeds: Sequence[int]) -> DelaySampler:
    """Return the source of the injected delays of many seeds."""
    return sampler(
        scenario.delays,
        seeds=seeds,
        world_size=scenario.cluster.world_size,
        ranks_per_node=scenario.cluster.gpus_per_node,
        compute_s=compute_s(scenario.workload, scenario.cluster),
    )


def simulate(
    scenario: Scenario,
    *,
    label: str | None = None,
    engine: Engine = "auto",
    actors: "Sequence[Actor]" = (),
    observers: "Sequence[Observer]" = (),
) -> Trace:
    """Simulate one schedule of a scenario with the delays, and what links do, of its seed.

    Args:
        scenario: The scenario to simulate.
        label: Which schedule; the first if None.
        engine: `auto` takes the fast engine wherever it is exact.
        actors: Processes of the user, see `simdist.engines.actors`; they end with the last rank.
        observers: Called with every `simdist.engines.live.Change`, in order of time.

    Raises:
        ScenarioError: No schedule has that label.
        PlanError: The schedule does not fit the cluster.
        UnsupportedError: `fast` was asked for and cannot compute this exactly.
        RunError: An actor failed, or nothing can happen any more.
    """
    chosen = [schedule for schedule in scenario.schedules if label in (None, schedule.name)]
    if not chosen:
        labels = ", ".join(schedule.name for schedule in scenario.schedules)
        raise ScenarioError(f"{scenario.name}: no schedule is called {label!r}; there are: {labels}")
    built = build(scenario, chosen[0])
    return engines.simulate(
        built.plan,
        built.costs,
        delays(scenario),
        engine=engine,
        traffic=traffic(scenario, built.costs, scenario.seed),
        actors=actors,
        observers=observers,
    )


def delays(scenario: Scenario) -> dict[Channel, NDArray[np.float64]]:
    """Draw the delays of the scenario's own seed: channel -> float64 `[1, steps, world_size]`, seconds."""
    return delay_sampler(scenario, [scenario.seed]).take(scenario.steps)
