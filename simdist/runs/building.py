"""From a scenario to the inputs of the engines: job, plan, price list, delays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from simdist.cost import ComputeCost, Costs, compute_s, price
from simdist.engines import choose
from simdist.engines.choose import Engine
from simdist.engines.observers import WholeTrace
from simdist.engines.run import Live, run
from simdist.errors import ScenarioError
from simdist.plan import Channel, Dataset, Plan
from simdist.plan.check import check
from simdist.plan.ops import LaunchKind
from simdist.proof import prove
from simdist.scenario.cluster import Cluster
from simdist.scenario.disturbances import Interference, mean_of_longest
from simdist.scenario.gpus import Generation
from simdist.scenario.sampling import DelaySampler, sampler
from simdist.scenario.scenario import AnyScenario, Host, Scenario, load
from simdist.scenario.workload import Workload
from simdist.schedules import InputPath, Job, Schedule
from simdist.schedules.job import Shape
from simdist.schedules.sync import Sync
from simdist.settings.base import plural, unchecked_copy
from simdist.traces.trace import Trace

if TYPE_CHECKING:
    from simdist.cost.traffic import Traffic
    from simdist.engines.actors import Actor
    from simdist.engines.alike import Courses
    from simdist.engines.live import ChangeListener


@dataclass(frozen=True, repr=False)
class Built:
    """A schedule, applied to a scenario.

    Args:
        schedule: The schedule.
        plan: Its plan, checked and proved.
        costs: Prices of the plan's operations.
        n_proved_ranks: Number of ranks that the proof traced; 0 if it is still to be proved.
        actors: The user's processes that run beside it, see `simdist.engines.actors`.
    """

    schedule: Schedule
    plan: Plan
    costs: Costs
    n_proved_ranks: int
    actors: "tuple[Actor, ...]" = ()

    @cached_property
    def courses(self) -> "Courses":
        """What has been simulated with these prices of ranks that are alike."""
        from simdist.engines.alike import Courses

        return Courses(self.costs, self.plan.world_size)

    def __repr__(self) -> str:
        return f"<{self.schedule.name}: a plan of {self.plan.n_steps:,} steps on {self.plan.world_size:,} ranks>"


#: Shares of forward and backward that 2 to 8 GPUs of one machine lose, in single and in mixed precision, by compute
#: capability: medians of the medians of published tables. From Hopper on, hosts and links are faster by more than the
#: GPUs are, and NCCL's kernels take 16 to 24 of 132 or more multiprocessors for a shorter time.
#:
#: Source:
#:     V100: NVIDIA/DeepLearningExamples, Oneflow-Inc/DLPerf, lambdal/deeplearning-benchmark, mvsjober/ml-benchmarks
#:     (single 4.8, 5.3, 5.5, 5.0 %; mixed 19, 11, 13, 7, 11 %). A100: NVIDIA/DeepLearningExamples,
#:     mvsjober/ml-benchmarks (single 2.7, 1.8 %; mixed 4.3, 5.6 %). H100: lambdal/deeplearning-benchmark (1.1, 1.5 %).
_TYPICAL_LOST: dict[Generation, tuple[float, float]] = {
    "volta": (0.052, 0.114),
    "ampere": (0.023, 0.05),
    "hopper": (0.011, 0.015),
}
_LOST = (0.05, 0.05)  # of other GPUs: the median of all published machines (experiments/published_rows)


_N_CORRECTIONS = 4  # of a loss whose delays also hide communication
_MOST_PLANS = 16  # kept: those of all schedules of most scenarios
_HALF: dict[str, Literal["float16", "bfloat16"]] = {"fp16": "float16", "bf16": "bfloat16"}


def job(scenario: Scenario) -> Job:
    """Return the facts of a scenario that schedules need."""
    cluster = scenario.cluster
    workload = scenario.workload
    path = scenario.input
    policy = path.data.policy if path.data else "naive"
    compute = ComputeCost(workload, cluster)
    return Job(
        world_size=cluster.world_size,
        ranks_per_node=cluster.gpus_per_node,
        n_steps=scenario.steps,
        tensor_counts=workload.tensor_counts,
        tensor_rows=workload.tensor_rows,
        dtype=workload.dtype,
        optimizer=workload.optimizer,
        micro_batches=workload.micro_batches,
        batch_nbytes=max(1, workload.samples_per_step * workload.sample_nbytes),
        input_path=InputPath(
            path.source, path.copy_method, path.n_ahead, dataset(scenario), policy, path.n_worker_lanes
        ),
        host_waits_for=scenario.host.waits_for,
        run_ahead_steps=scenario.host.run_ahead_steps,
        delay_channels=frozenset(each.on for each in scenario.delays if each),
        tensor_backward_s=compute.tensor_backward_s(),
        checkpoint=scenario.checkpoint.of_job(cluster.world_size) if scenario.checkpoint else None,
        speeds=tuple(cluster.device_speed().tolist()),
        compute_dtype=_HALF.get(workload.precision),
        units=workload.sharded_units,
        launches=frozenset(_launches(scenario, hides_passes=compute.hides_launches)),
    )


def _launches(scenario: Scenario, *, hides_passes: bool) -> Iterator[LaunchKind]:
    """Yield what the host takes time to launch, without what takes the device longer in any case."""
    of_host = scenario.cluster.host.launches
    yield from (kind for kind in of_host.stated() if kind != "graph" or scenario.host.graphs)
    if not (scenario.host.graphs or hides_passes):
        yield from scenario.workload.launches.stated()


def dataset(scenario: Scenario) -> Dataset | None:
    """Return the data set in storage, if there is one."""
    cluster = scenario.cluster
    workload = scenario.workload
    data = scenario.input.data
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
        workers=scenario.input.n_worker_lanes,
    )


def in_steps(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Return a scenario whose checkpoints come every so many steps of a schedule, also if it states a time.

    Raises:
        PlanError: The schedule does not fit the cluster.
        ScenarioError: Steps take no time.
    """
    if scenario.checkpoint is None or isinstance(scenario.checkpoint.every, int):
        return scenario
    from simdist.runs.checkpoint_steps import with_checkpoint_steps

    return with_checkpoint_steps(scenario, schedule, job(scenario))


def build(scenario: Scenario, schedule: Schedule, *, proves: bool = True) -> Built:
    """Write the plan of a schedule, check it, prove that it computes what the schedule declares, and price it.

    Args:
        scenario: The scenario.
        schedule: The schedule.
        proves: Whether to prove it now. A search proves only the plans that it shows.

    Raises:
        PlanError: The plan is invalid, or computes something else.
        ScenarioError: Compute times are neither given nor derivable.
    """
    described = job(in_steps(scenario, schedule))
    plan = _legal_plan(schedule, described)
    n_proved_ranks = _n_proved_ranks(schedule, described) if proves else 0
    return Built(schedule, plan, price_of(plan, scenario), n_proved_ranks, scenario.actors)


@lru_cache(maxsize=_MOST_PLANS)
def _legal_plan(schedule: Schedule, described: Job) -> Plan:
    """Return the plan of a schedule, checked. Scenarios that differ only in prices and delays share it."""
    plan = schedule.plan(described)
    check(plan)
    return plan


@lru_cache(maxsize=_MOST_PLANS)
def _n_proved_ranks(schedule: Schedule, described: Job) -> int:
    """Prove that this plan computes what the schedule declares, and return the number of ranks that were traced."""
    return prove(_legal_plan(schedule, described), lambda step: schedule.result(step, described))


def price_of(plan: Plan, scenario: Scenario) -> Costs:
    """Return the price of each operation of a plan in a scenario, including slow and disturbed links.

    Raises:
        PlanError: See `simdist.cost.price`.
        ScenarioError: See `simdist.cost.price`.
    """
    if not scenario.has_links:
        return price(plan, scenario.cluster, scenario.workload)
    from simdist.runs.traffic import disturbed_price

    return disturbed_price(plan, scenario)


def traffic(scenario: Scenario, costs: Costs, seed: int) -> "Traffic | None":
    """Return the changes of links in the run of a seed; None if they do not change."""
    if not scenario.has_links:
        return None
    from simdist.runs.traffic import link_traffic

    return link_traffic(scenario, costs.resources, seed)


def live_of(
    scenario: Scenario, costs: Costs, *, actors: "Sequence[Actor]" = (), observers: "Sequence[ChangeListener]" = ()
) -> Live:
    """Return what runs beside the plan with the scenario's own seed.

    Args:
        scenario: The scenario.
        costs: Prices from `price_of`.
        actors: The user's processes, beside those that the scenario names.
        observers: See `Live`.
    """
    return Live((*scenario.actors, *actors), observers, lambda _: traffic(scenario, costs, scenario.seed))


def delay_sampler(scenario: Scenario, seeds: Sequence[int]) -> DelaySampler:
    """Return the source of the injected delays of many seeds."""
    return sampler(
        [_known(each, scenario) if isinstance(each, Interference) else each for each in scenario.delays],
        seeds=seeds,
        world_size=scenario.cluster.world_size,
        ranks_per_node=scenario.cluster.gpus_per_node,
        compute_s=compute_s(scenario.workload, scenario.cluster),
        micro_batches=scenario.workload.micro_batches,
    )


def _known(disturbance: Interference, scenario: Scenario) -> Interference:
    """Return the disturbance with the share that it adds to a step of one machine.

    Of a typical loss that `utilization` contains, waiting for the longest of n exponential delays instead of m is left,
    noise x typical x (H_n - H_m) / H_g. This is the longest of n delays that are 1 - H_m / H_n times as long.
    """
    noise = disturbance.noise
    lost = lost_share(scenario, disturbance)
    n_measured = scenario.workload.measured_ranks
    n_ranks = scenario.cluster.world_size
    if disturbance.typical and _contains_typical(scenario) and n_ranks > n_measured:
        lost = noise * _typical_lost(scenario) * (1 - mean_of_longest(n_measured) / mean_of_longest(n_ranks))
        noise = 1.0
    return disturbance.model_copy(
        update={"lost": lost, "noise": noise, "machine_samples_per_s": None, "rate_ranks": None, "typical": False}
    )


def lost_share(scenario: Scenario, disturbance: Interference) -> float:
    """Return the share of forward and backward seconds that a step of one machine loses, 0 or more.

    If the rate of one machine was measured, the machine is simulated without disturbances and with synthetic data,
    under the scenario's first synchronous schedule, or with PyTorch's buckets if it has none. Delays on the compute
    stream lengthen such a step by the longest of them. So the difference is the loss. Of a rate of other ranks, these
    are simulated, and the part of the loss that grows with their number is that of one machine. A utilization that
    several GPUs reached together contains their typical loss.

    Raises:
        ScenarioError: Compute times are neither given nor derivable, machines are not full, or the schedule does not
            fit the ranks of the rate.
    """
    if disturbance.typical:
        return 0.0 if _contains_typical(scenario) else _typical_lost(scenario)
    if disturbance.machine_samples_per_s is None:
        return disturbance.lost or 0.0
    cluster = _ranks_of_rate(scenario, disturbance)
    schedule = _measured_schedule(scenario, cluster)
    settings = tuple((name, value) for name, value in cluster if name != "uncertain")  # which is not hashable
    simulated_s = partial(_constantly_late_s, settings, scenario.workload, scenario.host, schedule)
    passes_s = float(compute_s(scenario.workload, cluster)[0])
    n_samples = cluster.world_size * scenario.workload.samples_per_step
    measured_s = n_samples / disturbance.machine_samples_per_s
    lost = max(0.0, measured_s - simulated_s(0.0)) / passes_s
    for _ in range(0 if isinstance(schedule, Sync) else _N_CORRECTIONS):
        if lost:  # a delay hides communication, so a part of it costs nothing
            lost = max(0.0, lost + (measured_s - simulated_s(lost)) / passes_s)
    if lost > 1:
        which = "of one machine together" if disturbance.rate_ranks is None else "of rate_ranks together"
        raise ScenarioError(
            f"{scenario.name}: machine_samples_per_s {disturbance.machine_samples_per_s:g} is far less than what "
            f"they do when simulated, {n_samples / simulated_s(0.0):g}: write the rate of all {cluster.world_size} "
            f"GPUs {which}"
        )
    return lost / disturbance.growth(cluster.world_size, scenario.cluster.gpus_per_node)


def _ranks_of_rate(scenario: Scenario, disturbance: Interference) -> Cluster:
    """Return the machines whose rate was measured."""
    per_node = scenario.cluster.gpus_per_node
    n_ranks = per_node if disturbance.rate_ranks is None else disturbance.rate_ranks
    if n_ranks > per_node and n_ranks % per_node:
        raise ScenarioError(
            f"{scenario.name}: interference, rate_ranks: {n_ranks} GPUs are no whole number of machines of {per_node}"
        )
    sizes = {"nodes": max(1, n_ranks // per_node), "gpus_per_node": min(n_ranks, per_node)}
    return unchecked_copy(scenario.cluster, **sizes, slow_devices=())


def _measured_schedule(scenario: Scenario, cluster: Cluster) -> Schedule:
    """Return the schedule under which these ranks reached a rate: the first that keeps all equal in each step."""
    from simdist.schedules.sharded import ShardedSchedule

    every_step = (each for each in scenario.schedules if isinstance(each, Sync | ShardedSchedule))
    found: Schedule = next((each for each in every_step if getattr(each, "between", None) is None), Sync())
    problems = found.problems(Shape(cluster.world_size, cluster.gpus_per_node))
    if problems:
        ranks = f"{cluster.world_size} {plural(cluster.world_size, 'GPU')}"
        hint = "write rate_ranks, how many reached it together"
        raise ScenarioError(
            f"{scenario.name}: interference: a rate of {ranks} under {found.name}: {problems[0][1]}: {hint}"
        )
    return found


def _contains_typical(scenario: Scenario) -> bool:
    """Tell whether the utilization is that of several GPUs together, which lost what is typical."""
    return scenario.workload.measured_ranks > 1


def _typical_lost(scenario: Scenario) -> float:
    """Return the median share that published machines of this generation and precision lose."""
    generation = scenario.cluster.device.generation
    if generation is None:
        raise ScenarioError(
            f"{scenario.name}: interference, typical: the loss depends on the generation of the GPUs: write "
            f"cluster.device.compute_capability, such as 9.0, or lost: 5% instead"
        )
    single, mixed = _TYPICAL_LOST.get(generation, _LOST)
    return mixed if scenario.workload.precision in ("fp16", "bf16") else single


@lru_cache(maxsize=64)
def _constantly_late_s(
    settings: tuple[tuple[str, object], ...],
    workload: Workload,
    host: Host,
    schedule: Schedule,
    lost: float,
) -> float:
    """Return the seconds of a step on a cluster of these settings, if each step of a rank loses the same share."""
    n_steps = 4
    cluster = Cluster.model_validate(dict(settings))
    scenario = Scenario(cluster=cluster, workload=workload, host=host, schedules=(schedule,), steps=n_steps)
    late = scenario.changed(disturbances=[Interference(lost=lost, noise=0.0)]) if lost else scenario
    plan = schedule.plan(job(late))
    return run(plan, price(plan, cluster, workload), delays(late), observe=WholeTrace()).makespan_s / n_steps


def simulate(
    scenario: AnyScenario,
    *,
    label: str | None = None,
    engine: Engine = "auto",
    actors: "Sequence[Actor]" = (),
    observers: "Sequence[ChangeListener]" = (),
) -> Trace:
    """Simulate one schedule of a scenario with the delays and link changes of its seed: see `simdist.simulate`."""
    scenario = load(scenario)
    chosen = [schedule for schedule in scenario.schedules if label in (None, schedule.name)]
    if not chosen:
        labels = ", ".join(schedule.name for schedule in scenario.schedules)
        raise ScenarioError(f"{scenario.name}: no schedule is called {label!r}; there are: {labels}")
    built = build(scenario, chosen[0])
    live = live_of(scenario, built.costs, actors=actors, observers=observers)
    return run(built.plan, built.costs, delays(scenario), observe=WholeTrace(), engine=engine, live=live)


def ranks_are_alike(built: Built) -> bool:
    """Tell whether all ranks surely have the same times, so that none waits for another."""
    return choose.all_ranks_are_alike(built.plan, built.costs)


def delays(scenario: Scenario) -> dict[Channel, NDArray[np.float64]]:
    """Draw the delays of the scenario's own seed: channel -> float64 `[1, steps, world_size]`, seconds."""
    return delay_sampler(scenario, [scenario.seed]).take(scenario.steps)
