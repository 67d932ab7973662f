"""The three stages from profiles to a scenario: times of the job, late ranks, the scenario beside measured steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simdist.cost import Local
from simdist.errors import ScenarioError
from simdist.plan.lanes import COMPUTE
from simdist.plan.ops import Channel, Combine, Copy, lane_of
from simdist.profiles.estimates import collectives, stragglers
from simdist.profiles.estimates.base import (
    BaseTimes,
    HostModel,
    Parts,
    base_times,
    excess_times,
    host_model,
    late_backward_s,
    parts,
    recorded,
    shares_cores,
    with_late_backward,
)
from simdist.profiles.estimates.links import AVERAGED, SHARDED, Fabric, Links, derive_links, fabric_of_gpus
from simdist.profiles.estimates.micro_batches import divided, late_micro_batches, undisturbed_passes
from simdist.profiles.estimates.places import Places
from simdist.profiles.estimates.proof import Proof, prove_step
from simdist.profiles.estimates.sharded_model import ShardedModel, base_of_units, sharded_model
from simdist.profiles.estimates.stragglers import CommonDelay, DelayTable, Noise, Straggler
from simdist.profiles.estimates.tensors import Model, find_model
from simdist.profiles.estimates.uneven import TracedWork, find_uneven_work
from simdist.profiles.job.exchanges import FixedExchange, find_fixed, fixed_s, transfers_of
from simdist.profiles.job.job import TracedJob, assemble
from simdist.profiles.job.layout import RankLayout, find_layout
from simdist.profiles.job.matching import RankClocks, check_same_run, in_turn_s, match, synchronize
from simdist.profiles.job.sharding import Sharding, find_sharding
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.steps.model import RankProfile
from simdist.runs.building import build
from simdist.scenario import (
    Cluster,
    Host,
    InputSettings,
    Link,
    Persistent,
    Scenario,
    Storage,
    Tensor,
    Workload,
)
from simdist.scenario.cluster import ClusterCollectives
from simdist.scenario.facts import Lost
from simdist.schedules import Schedule, Sync
from simdist.settings.units import format_seconds
from simdist.studies.proposals import sharded_schedules, traced_schedules

_TOLD_IN_TURN = 0.01  # of a step
_NO_MODEL = Model((), "float32", 1, 1, is_real=False, notes=())  # of a job that does not become a scenario
_SAMPLE_NBYTES = 1  # loading takes only the latency of the storage


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Facts that the user knows beyond the traces.

    Args:
        nodes: Machines.
        gpus_per_node: Ranks of each machine.
        cluster: Links and devices to use instead of those in the traces; its numbers of nodes and GPUs are ignored.
        fabric: The links inside nodes; those between nodes still come from the traces.
        tensors: Tensors of the model in forward order, instead of those of the traces.
        steps: Only steps with these numbers; all if None.
        shard: Ranks that share a copy of a sharded model, if the traces do not show it.
    """

    nodes: int | None = None
    gpus_per_node: int | None = None
    cluster: Cluster | None = None
    fabric: Fabric | None = None
    tensors: tuple[Tensor, ...] = ()
    steps: range | None = None
    shard: int | None = None


@dataclass(frozen=True, slots=True)
class TimedJob:
    """The first stage: the ranks as one job, and the times of its steps and collectives.

    Args:
        job: The traced ranks and steps.
        layout: Which ranks share a machine.
        seconds: The parts of each step of each rank.
        base: Times of an undisturbed step.
        host: How the simulated host behaves.
        model: Tensors and buckets, or units.
        clocks: Clocks of the ranks.
        untraced: Delays of untraced ranks, from collectives.
        times: Durations of the collectives.
        fixed: Exchanges that are part of no schedule.
        in_turn_s: Seconds of a step that ranks wait because they are late in turn, by noise.
        notes: Assumptions and omissions.
    """

    job: TracedJob
    layout: RankLayout
    seconds: Parts
    base: BaseTimes
    host: HostModel
    model: Model | ShardedModel
    clocks: RankClocks
    untraced: collectives.UntracedWaits
    times: tuple[collectives.CollectiveTimes, ...]
    fixed: tuple[FixedExchange, ...]
    in_turn_s: float
    notes: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Seconds of the median step."""
        return float(np.median(self.seconds.step_s))


@dataclass(frozen=True, slots=True)
class LateRanks:
    """The second stage: the stragglers, and the delays that the simulator plays for them.

    Args:
        stragglers: The late ranks and nodes.
        loading: The rank with the slowest loader, if loaders run ahead. It is not a straggler.
        slow: Devices that are slow in all steps. They are part of the cluster, not of the delays.
        delays: Channel -> delays for the simulator, `[n_steps, world_size]`, or those of micro-batches, `[n_steps,
            n_micro_batches, world_size]`.
        without: The same without stragglers; also without delays of all ranks at once; also with even work.
        common: Delays of all ranks at once.
        uneven: Work that differs between steps and ranks; None if it is even.
        noise: Noticeable delays that do not belong to stragglers.
        clipped_share: Share of a step that was below the undisturbed times and is ignored.
        lost: Shares of a step that are lost if ranks synchronize once per step.
        undivided: A note on delays that are not divided among micro-batches; None if all are.
    """

    stragglers: tuple[Straggler, ...]
    loading: tuple[Straggler, ...]
    slow: tuple[Straggler, ...]
    delays: dict[Channel, Floats]
    without: tuple[dict[Channel, Floats], ...]
    common: tuple[CommonDelay, ...]
    uneven: TracedWork | None
    noise: Noise
    clipped_share: float
    lost: Lost
    undivided: str | None


@dataclass(frozen=True, slots=True)
class ProvenScenario:
    """The third stage: the job as a scenario, next to the measured steps.

    Args:
        scenario: The job, with slow devices, without its delays.
        links: From the traces; None if the user gave a cluster.
        proof: The step as predicted and as measured.
        in_turn_s: Seconds of a step that ranks wait in turn, which count with the exchanges.
    """

    scenario: Scenario
    links: Links | None
    proof: Proof
    in_turn_s: float = 0.0


_APART = 3.0  # times the distance in any other step: from here on, windows opened apart


def _opened_together(job: TracedJob) -> TracedJob:
    """Omit the first step if profilers opened apart: a rank that starts recording early waits for the others in it.

    A straggler in that step looks different: its own step is long, and no rank has a short one.
    """
    step_s = parts(job).step_s
    if len(step_s) < 3 or len(job.ranks) < 2:
        return job
    apart_s = np.ptp(step_s, axis=1)
    usual_s = float(np.median(step_s[1:]))
    if apart_s[0] <= max(_APART * float(apart_s[1:].max()), usual_s) or step_s[0].min() > 2 * usual_s:
        return job
    note = (
        f"left out step {job.numbers[0]}: profilers of ranks opened up to {format_seconds(float(apart_s[0]))} apart, "
        f"and the ranks that were first wait for the others in it"
    )
    rest = tuple(replace(each, steps=each.steps[1:]) for each in job.profiles)
    return replace(job, profiles=rest, notes=(*job.notes, note))


def time_job(
    profiles: Sequence[RankProfile], options: ImportOptions, *, is_layout_known: bool = True, is_scenario: bool = False
) -> TimedJob:
    """Combine the ranks and find the times of steps and collectives.

    If the traces do not show which ranks share a machine, all are assumed to share one. Then no machine is a straggler.
    The units of a sharded model are found only if it is to become a scenario.
    """
    job = _opened_together(assemble(profiles, steps=options.steps, shard=options.shard))
    if is_layout_known:
        layout = find_layout(job, nodes=options.nodes, gpus_per_node=options.gpus_per_node)
    else:
        layout = RankLayout(1, job.world_size, "one machine")
    seconds = parts(job)
    base = base_times(job, seconds)
    sharding = find_sharding(job, options.shard) if is_scenario else None
    if sharding is not None:
        base = base_of_units(base, sharding)
    base = undisturbed_passes(base, job, seconds)
    host = host_model(job, base, seconds)
    fixed = find_fixed([each.steps for each in job.profiles], transfers_of(job.profiles), is_sharded=job.shards)
    matched = match(job)
    clocks = synchronize(matched)
    check_same_run(job, matched, clocks)
    untraced = collectives.find_untraced_waits(matched, clocks)
    times = collectives.collective_times(matched, clocks, layout, untraced)
    waits_in_turn_s = 0.0
    if job.shards and job.profiles[0].device == "cpu":
        times = collectives.of_last_members(times, matched, clocks)
        fixed = tuple(_as_last(each, times) for each in fixed)
        waits_in_turn_s = in_turn_s(matched, clocks, len(job.numbers))
    elif shares_cores(job, seconds):
        times = collectives.on_shared_cores(times, matched, clocks)
    if job.shards and not is_scenario:
        model: Model | ShardedModel = _NO_MODEL
    else:
        model = _model(job, base, _before_s(base, host, fixed), sharding, options)
    notes = (*job.notes, *layout.notes, *base.notes, *model.notes, *matched.notes)
    return TimedJob(job, layout, seconds, base, host, model, clocks, untraced, times, fixed, waits_in_turn_s, notes)


def _as_last(exchange: FixedExchange, times: Sequence[collectives.CollectiveTimes]) -> FixedExchange:
    """Return a fixed exchange that takes what its last member takes, as other exchanges that block their hosts do."""
    found = [each.seconds for each in times if (each.kind, each.nbytes) == (exchange.kind, exchange.nbytes)]
    return replace(exchange, seconds=found[0] * exchange.per_step) if len(found) == 1 else exchange


def _model(
    job: TracedJob, base: BaseTimes, before_s: float, sharding: Sharding | None, options: ImportOptions
) -> Model | ShardedModel:
    """Return the tensors of the job and their schedule."""
    if sharding is None:
        return find_model(job, base, options.tensors)
    if options.tensors:
        raise ScenarioError(
            "--tensors: is for gradient buckets; the units of this sharded model are in its traces: leave it out"
        )
    each_s = before_s / base.micro_batches
    return sharded_model(sharding, base, before_s=each_s, is_blocking=job.profiles[0].device == "cpu")


def _before_s(base: BaseTimes, host: HostModel, fixed: Sequence[FixedExchange]) -> float:
    """Return the seconds of a step that the scenario counts with forward passes, besides their computing."""
    return base.host_s + (0.0 if host.loads else base.input_s) + fixed_s(fixed)


def find_late_ranks(timed: TimedJob) -> LateRanks:
    """Find the stragglers, and record their delays."""
    job = timed.job
    host = timed.host
    traced, clipped_s = excess_times(timed.seconds, timed.base)
    uneven = find_uneven_work(timed.seconds)
    whole = DelayTable(traced, job.ranks, job.numbers, timed.step_s)
    delays = replace(whole, of=_with_even_work(traced, uneven))
    excess, whole = (collectives.with_untraced_rank(each, timed.untraced, job) for each in (delays, whole))
    places = Places(job)
    found = stragglers.with_places(stragglers.find_stragglers(excess, timed.layout), places)
    common = tuple(
        replace(each, place=places.find(each.channel, job.ranks, each.steps)) for each in stragglers.find_common(delays)
    )
    loading = [each for each in found if host.ahead_s and (each.channel, each.kind) == ("io", "persistent")]
    late = tuple(each for each in found if each not in loading)
    seen = [each for each in late if set(each.ranks) <= set(job.ranks)]
    # only the exposed part is known of an untraced rank: that is a delay, not a slow device
    passes = late_micro_batches(job, timed.seconds, timed.base)
    lasting = stragglers.slow_throughout(seen, len(job.numbers))
    slow = tuple(each for each in lasting if passes.has_even(each, delays))
    passes = passes.without(slow, delays)
    without_late = stragglers.without(whole, late)
    steady = stragglers.without_common(without_late, common, job.numbers)
    left = (without_late, steady, _with_even_work(steady, uneven))
    late_s = late_backward_s(job, timed.seconds, timed.base)
    calm = recorded(without_late, host, excess.ranks, job.world_size)
    played = recorded(stragglers.without(whole, slow), host, excess.ranks, job.world_size)
    shares = (passes, passes, passes.evenly() if uneven else passes)
    without = []
    for seconds, of_each in zip(left, shares, strict=True):
        of_channels = recorded(seconds, host, excess.ranks, job.world_size)
        without.append(divided(with_late_backward(of_channels, of_channels, late_s, job.ranks), of_each, job, host))
    return LateRanks(
        stragglers=late,
        loading=tuple(loading),
        slow=slow,
        delays=divided(with_late_backward(played, calm, late_s, job.ranks), passes, job, host),
        without=tuple(without),
        common=common,
        uneven=uneven,
        noise=stragglers.noise_of(excess, late),
        clipped_share=clipped_s / timed.step_s if timed.step_s else 0.0,
        lost=_lost(float(timed.seconds.step_s.mean()), whole.of, left),
        undivided=passes.note,
    )


def _with_even_work(of: Mapping[Channel, Floats], uneven: TracedWork | None) -> dict[Channel, Floats]:
    """Return the delays if all work were typical; ranks without a trace stay as they are."""
    kept = dict(of)
    if uneven is not None:
        computing_s = kept["compute"].copy()
        n_traced = uneven.seconds.shape[1]
        less_s = np.maximum(0.0, computing_s[:, :n_traced] - uneven.seconds)
        computing_s[:, :n_traced] = less_s + float(np.median(uneven.seconds))
        kept["compute"] = computing_s
    return kept


def _lost(step_s: float, delays: Mapping[Channel, Floats], fewer: Sequence[Mapping[Channel, Floats]]) -> Lost:
    """Return the shares of a step that are lost if it is longer by the delay of its latest rank."""
    latest_s, *fewer_s = (_latest_s(each) for each in (delays, *fewer))
    typical_s = float(np.median(np.sum(list(fewer[-1].values()), axis=0)))
    return Lost.of(step_s, [step_s - latest_s + each_s for each_s in (*fewer_s, typical_s)])


def _latest_s(delays: Mapping[Channel, Floats]) -> float:
    """Return the delay of the latest rank of each step, as a mean over the steps."""
    of_all_channels_s = np.sum(list(delays.values()), axis=0)
    return float(of_all_channels_s.max(axis=1).mean())


def _prove_once(name: str, timed: TimedJob, late: LateRanks, options: ImportOptions) -> ProvenScenario:
    """Build the scenario, and simulate the traced steps."""
    job = timed.job
    layout = timed.layout
    cluster, links = _cluster(timed, options)
    schedule = timed.model.schedule
    shape = {"nodes": layout.nodes, "gpus_per_node": layout.gpus_per_node}
    has_links = links is None or links.is_complete
    if isinstance(schedule, Sync):
        schedules = traced_schedules(schedule, len(job.numbers), has_links=has_links, **shape)
    else:
        schedules = sharded_schedules(schedule, len(job.numbers), has_links=has_links, **shape)
    disturbances = tuple(Persistent(on=channel, delay_s=0.0) for channel in late.delays)
    plain = _with_copies(_scenario(name, timed, cluster, disturbances, schedules), timed)
    slow_ones = (*plain.cluster.slow_devices, *stragglers.slow_devices(late.slow, _computing_s(plain, timed.base)))
    slowed_cluster = plain.cluster.model_copy(update={"slow_devices": slow_ones})
    slowed = plain.model_copy(update={"cluster": slowed_cluster})
    ahead_s = timed.host.ahead_s
    proof = prove_step(slowed, late.delays, timed.seconds, job, calm=plain, without=late.without, ahead_s=ahead_s)
    return ProvenScenario(slowed, links, proof)


def _with_copies(scenario: Scenario, timed: TimedJob) -> Scenario:
    """Return the scenario with the memory bandwidth at which copies of units take what `fully_shard` computed itself.

    On a GPU, what is copied beside the wire is part of the exchange, and was not measured.
    """
    device = scenario.cluster.device
    if not timed.base.sharding_s or math.isfinite(device.memory_bandwidth_Bps):
        return scenario
    is_blocking = timed.job.profiles[0].device == "cpu"
    built = build(_with_memory(scenario, 1.0), scenario.schedules[0])  # at 1 B/s, seconds are bytes
    copies = [op for op in built.plan.bodies[0] if isinstance(op, Copy | Combine)]
    costs = [built.costs.of[op] for op in copies if is_blocking or lane_of(op) == COMPUTE]
    nbytes = math.fsum(float(np.max(cost.seconds)) for cost in costs if isinstance(cost, Local))
    return _with_memory(scenario, round(nbytes / timed.base.sharding_s))


def _with_memory(scenario: Scenario, memory_Bps: float) -> Scenario:
    device = scenario.cluster.device.model_copy(update={"memory_bandwidth_Bps": memory_Bps})
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update={"device": device})})


def prove_scenario(name: str, timed: TimedJob, late: LateRanks, options: ImportOptions) -> ProvenScenario:
    """Build the scenario. Where ranks are late in turn and no delay shows it, exchanges take longer by this waiting."""
    proven = _prove_once(name, timed, late, options)
    missing_s = min(timed.in_turn_s, proven.proof.measured_s - proven.proof.predicted_s)
    if proven.links is None or missing_s < _TOLD_IN_TURN * proven.proof.measured_s:
        return proven
    n_steps = len(timed.job.numbers)
    fixed = {(each.kind, each.nbytes) for each in timed.fixed}
    all_s = math.fsum(each.seconds * each.calls for each in timed.times if (each.kind, each.nbytes) not in fixed)
    longer = 1 + missing_s * n_steps / all_s
    times = tuple(replace(each, seconds=longer * each.seconds) for each in timed.times)
    return replace(_prove_once(name, replace(timed, times=times), late, options), in_turn_s=missing_s)


def _cluster(timed: TimedJob, options: ImportOptions) -> tuple[Cluster, Links | None]:
    """Return the given machines, as many as were traced, or machines with links from the times of collectives."""
    job = timed.job
    layout = timed.layout
    if options.fabric and (options.cluster or layout.nodes == 1 or layout.gpus_per_node == 1):
        why = (
            "--cluster has the links inside nodes, too: give one of them"
            if options.cluster
            else f"is for several nodes of several GPUs; the job ran on {layout.nodes} x {layout.gpus_per_node}, where "
            f"all_reduces tell the only kind of links"
        )
        raise ScenarioError(f"--fabric: {why}")
    shape = {"nodes": layout.nodes, "gpus_per_node": layout.gpus_per_node}
    if options.cluster:
        given = options.cluster.model_copy(update=shape | {"storage": None})
        if any(each.ranks or each.nodes for each in given.slow_devices):
            raise ScenarioError("--cluster: has slow_devices, but the traces tell who is slow: leave them out")
        return given, None
    device = {"name": next((each.device_name for each in job.profiles if each.device_name), "")}
    backend = next((each.backend for each in job.profiles if each.backend), "")
    is_gloo = "gloo" in backend or (not backend and job.profiles[0].device == "cpu")
    library = ClusterCollectives(library="gloo" if is_gloo else "nccl")
    bare = Cluster(**shape, fabric=Link.ideal(), network=Link.ideal(), collectives=library, device=device)
    kinds = SHARDED if isinstance(timed.model, ShardedModel) else AVERAGED
    usual = fabric_of_gpus(job.profiles)
    links = derive_links(_of_links(timed), bare, kinds=kinds, given=options.fabric, usual=usual)
    return bare.model_copy(update={"fabric": links.fabric, "network": links.network}), links


def _of_links(timed: TimedJob) -> tuple[collectives.CollectiveTimes, ...]:
    """Return the times of collectives that tell links: not those of a few bytes which take longer than larger ones.

    What such a collective takes beyond that is the host's, or waiting for a busy core.
    """
    fixed = {(each.kind, each.nbytes) for each in timed.fixed}
    least_s = min((each.seconds for each in timed.times if (each.kind, each.nbytes) not in fixed), default=math.inf)
    return tuple(each for each in timed.times if (each.kind, each.nbytes) not in fixed or each.seconds <= least_s)


def _computing_s(scenario: Scenario, base: BaseTimes) -> float:
    """Return the time that a slow device lengthens: the computing of an undisturbed step of the scenario."""
    workload = scenario.workload
    backward_s = math.fsum(tensor.backward_s or 0.0 for tensor in workload.tensors)
    return workload.micro_batches * ((workload.stated_forward_s or 0.0) + backward_s) + base.optimize_s


def _scenario(
    name: str,
    timed: TimedJob,
    cluster: Cluster,
    disturbances: tuple[Persistent, ...],
    schedules: tuple[Schedule, ...],
) -> Scenario:
    """Return the scenario of the job."""
    job = timed.job
    model = timed.model
    base = timed.base
    host = timed.host
    batch_size = next((each.batch_size for each in job.profiles if each.batch_size), 1)
    forward_s: float | None = round((base.forward_s + _before_s(base, host, timed.fixed)) / base.micro_batches, 9)
    optimize_s = base.optimize_s
    if isinstance(model, ShardedModel):
        forward_s = None  # the tensors state theirs
        optimize_s *= model.whole_per_slice
    workload = Workload(
        name=name,
        tensors=model.tensors,
        dtype=model.dtype,
        batch_size=batch_size,
        micro_batches=base.micro_batches,
        sample_nbytes=_SAMPLE_NBYTES if host.loads else 0,
        forward_s=forward_s,
        optimize_s=round(optimize_s, 9),
    )
    if host.load_s is not None:
        storage = Storage(latency_s=round(host.load_s, 9), bandwidth_Bps=float("inf"), source="input of the traces")
        cluster = cluster.model_copy(update={"storage": storage})
    return Scenario(
        name=name,
        cluster=cluster,
        workload=workload,
        steps=len(job.numbers),
        host=Host(
            waits_for="update" if host.loads or (host.waits and not host.reads_loss) else "loss",
            run_ahead_steps=0 if host.waits else None,
        ),
        input=InputSettings(source="storage", prefetch=2 if host.ahead_s else 1) if host.loads else InputSettings(),
        disturbances=disturbances,
        schedules=schedules,
    )
