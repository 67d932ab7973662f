"""From profiles of ranks to a scenario: all steps in their order, without files."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

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
from simdist.profiles.job.fixed_exchanges import FixedExchange, find_fixed, fixed_note, fixed_s
from simdist.profiles.job.in_turn import in_turn_s
from simdist.profiles.job.job import TracedJob, assemble
from simdist.profiles.job.kind import JobKind, find_kind
from simdist.profiles.job.layout import RankLayout, UnknownLayoutError, find_layout
from simdist.profiles.job.matching import RankClocks, check_same_run, match, synchronize
from simdist.profiles.job.sharding import Sharding, find_sharding
from simdist.profiles.job.step_budget import StepBudget, step_budget
from simdist.profiles.job.transfers import transfers_of
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.step_parts import StepPart
from simdist.runs.building import build
from simdist.scenario import (
    Cluster,
    Host,
    Imported,
    InputSettings,
    Link,
    Persistent,
    Scenario,
    Storage,
    Tensor,
    Workload,
)
from simdist.scenario.facts import Lost
from simdist.schedules import Schedule, Sync
from simdist.settings.base import listed
from simdist.settings.units import format_seconds
from simdist.studies.proposals import sharded_schedules, traced_schedules

_TOLD_AHEAD = 0.01  # of a step
_TOLD_IN_TURN = 0.01  # of a step
_FEW = 10  # steps; a low quantile of fewer is unreliable
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowedJob:
    """A traced job and the causes of its delays. It needs no scenario.

    Args:
        job: The traced ranks and steps.
        base: Times of an undisturbed step.
        stragglers: The late ranks and nodes.
        common: Delays of all ranks at once.
        noise: Noticeable delays that do not belong to stragglers.
        budget: The parts of a step.
        kind: The kind of job.
        step_s: Mean over steps and traced ranks.
        uneven: Work that differs between steps and ranks; None if it is even.
        lost: Shares of a step that are lost.
    """

    job: TracedJob
    base: BaseTimes
    stragglers: tuple[Straggler, ...]
    common: tuple[CommonDelay, ...]
    noise: Noise
    budget: StepBudget
    kind: JobKind
    step_s: float
    uneven: TracedWork | None
    lost: Lost

    @property
    def without_named_s(self) -> float:
        """Seconds of a step without the delays that are named."""
        return (1 - self.lost.named) * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedJob(SlowedJob):
    """A traced job as a scenario, with intermediate results.

    Args:
        layout: Which ranks share a machine.
        clocks: Clocks of the ranks.
        times: Durations of the collectives.
        links: From the traces; None if the user gave a cluster.
        host: How the simulated host behaves.
        model: Tensors and buckets, or units.
        scenario: The job without its delays. Channels with delays are disturbed by 0 s.
        delays: Channel -> delays for the simulator, `[n_steps, world_size]`, or those of micro-batches, `[n_steps,
            n_micro_batches, world_size]`.
        proof: The step as predicted and as measured.
        notes: Assumptions and omissions, one sentence each.
    """

    layout: RankLayout
    clocks: RankClocks
    times: tuple[collectives.CollectiveTimes, ...]
    links: Links | None
    host: HostModel
    model: Model | ShardedModel
    scenario: Scenario
    delays: dict[Channel, Floats]
    proof: Proof
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Timed:
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
        in_turn_s: Seconds of a step that ranks wait because they are late in turn, by noise. 0 if hosts do not wait in
            each exchange.
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
class _Late:
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
class _Proven:
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


def import_job(profiles: Sequence[RankProfile], *, name: str, options: ImportOptions | None = None) -> ImportedJob:
    """Return the job of these traces as a scenario.

    Args:
        profiles: One per trace file, in any order.
        name: Name of the scenario.
        options: Facts that the user knows.

    Raises:
        TraceError: The traces are of different jobs, or contain too little.
        ScenarioError: The facts that the user knows contradict them.
    """
    options = options or ImportOptions()
    timed = _time(profiles, options, is_scenario=True)
    late = _find_late(timed)
    proven = _with_noise(name, timed, late, options)
    slowed = _slowed(timed, late, proven.proof)
    told = {
        "doubts": _caveats(timed, proven.links, proven.proof, slowed.kind),
        "imported": _facts(slowed, proven, _unsure(timed.job, proven.links)),
    }
    return ImportedJob(
        **{each.name: getattr(slowed, each.name) for each in fields(slowed)},
        layout=timed.layout,
        clocks=timed.clocks,
        times=timed.times,
        links=proven.links,
        host=timed.host,
        model=timed.model,
        scenario=proven.scenario.model_copy(update=told),
        delays=late.delays,
        proof=proven.proof,
        notes=tuple(_notes(timed, late, proven)),
    )


def what_slowed(profiles: Sequence[RankProfile], options: ImportOptions) -> SlowedJob:
    """Return the causes of delays in a job that cannot become a scenario.

    The cost of stragglers is not simulated. It is the delay of the latest rank of each step, minus the same without
    stragglers.

    Args:
        profiles: One per trace file, in any order.
        options: Facts that the user knows.

    Raises:
        TraceError: The traces are of different jobs, or contain too little.
        ScenarioError: The facts that the user knows contradict them.
    """
    try:
        timed = _time(profiles, options)
    except UnknownLayoutError:
        timed = _time(profiles, options, is_layout_known=False)
    return _slowed(timed, _find_late(timed), None)


def _slowed(timed: _Timed, late: _Late, proof: Proof | None) -> SlowedJob:
    """Return the causes of delays.

    The cost of stragglers is simulated if a scenario covers nearly all of the job, and reproduces it if it is sharded.
    """
    step_s = float(timed.seconds.step_s.mean())
    unseen_s = float(np.mean([step.parts_s[StepPart.QUEUED] for each in timed.job.profiles for step in each.steps]))
    is_sharded = timed.job.shards
    kind = find_kind(timed.job.profiles, waiting_s=unseen_s, is_sharded=is_sharded)
    is_reproduced = proof is not None and kind.is_modelled and not (is_sharded and proof.misses)
    lost = proof.lost if proof is not None and is_reproduced else late.lost
    return SlowedJob(
        job=timed.job,
        base=timed.base,
        stragglers=late.stragglers,
        common=late.common,
        noise=late.noise,
        budget=_budget(timed, late, lost.stragglers * step_s),
        kind=kind,
        step_s=step_s,
        uneven=late.uneven,
        lost=lost,
    )


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


def _time(
    profiles: Sequence[RankProfile], options: ImportOptions, *, is_layout_known: bool = True, is_scenario: bool = False
) -> _Timed:
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
    return _Timed(job, layout, seconds, base, host, model, clocks, untraced, times, fixed, waits_in_turn_s, notes)


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


def _find_late(timed: _Timed) -> _Late:
    """Find the stragglers, and record their delays."""
    job = timed.job
    host = timed.host
    traced, clipped_s = excess_times(timed.seconds, timed.base)
    uneven = find_uneven_work(timed.seconds)
    whole = DelayTable(traced, job.ranks, job.numbers, timed.step_s)
    delays = replace(whole, of=_with_even_work(traced, uneven))
    excess, whole = (collectives.with_untraced_rank(each, timed.untraced, job) for each in (delays, whole))
    places = Places(job)
    found = stragglers.placed(stragglers.find_stragglers(excess, timed.layout), places)
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
    return _Late(
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


def _prove(name: str, timed: _Timed, late: _Late, options: ImportOptions) -> _Proven:
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
    return _Proven(slowed, links, proof)


def _with_copies(scenario: Scenario, timed: _Timed) -> Scenario:
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


def _with_noise(name: str, timed: _Timed, late: _Late, options: ImportOptions) -> _Proven:
    """Build the scenario. Where ranks are late in turn and no delay shows it, exchanges take longer by this waiting."""
    proven = _prove(name, timed, late, options)
    missing_s = min(timed.in_turn_s, proven.proof.measured_s - proven.proof.predicted_s)
    if proven.links is None or missing_s < _TOLD_IN_TURN * proven.proof.measured_s:
        return proven
    n_steps = len(timed.job.numbers)
    fixed = {(each.kind, each.nbytes) for each in timed.fixed}
    all_s = math.fsum(each.seconds * each.calls for each in timed.times if (each.kind, each.nbytes) not in fixed)
    longer = 1 + missing_s * n_steps / all_s
    times = tuple(replace(each, seconds=longer * each.seconds) for each in timed.times)
    return replace(_prove(name, replace(timed, times=times), late, options), in_turn_s=missing_s)


def _budget(timed: _Timed, late: _Late, straggling_s: float) -> StepBudget:
    """Return the parts of a step, with separate costs of stragglers and of loading."""
    lasting_s = max((each.seconds for each in late.stragglers if each.kind == "persistent"), default=0.0)
    alone_s = max((each.seconds for each in late.loading), default=0.0)  # the others wait for it in their all_reduces
    return step_budget(
        timed.job.profiles,
        straggling_s=straggling_s,
        lasting_s=lasting_s,
        loading_s=alone_s * (1 - 1 / len(timed.job.ranks)),
    )


def _notes(timed: _Timed, late: _Late, proven: _Proven) -> list[str]:
    """Return all assumptions and omissions, one sentence each."""
    links = proven.links
    notes = [*timed.notes, *(links.notes if links else ())]
    if proven.in_turn_s:
        notes.append(
            f"ranks are late in turn, by noise such as that of shared cores, and wait for one another in each "
            f"exchange: {format_seconds(proven.in_turn_s)} of a step count with the exchanges; intervals widen by as "
            f"much, because schedules with fewer exchanges wait less"
        )
    if timed.fixed:
        notes.append(fixed_note(timed.fixed))
    notes += _more_notes(timed.job, timed.base, timed.host, timed.clocks, links, late.clipped_share)
    if late.undivided:
        notes.append(late.undivided)
    notes += [
        f"warning: {each.who} waits {format_seconds(each.seconds)} longer for its batches than others in most steps: "
        f"its loader is the slowest, by however little; where loaders run ahead, it shows the waiting of all"
        for each in late.loading
    ]
    if (ahead_s := proven.proof.ahead_s) > _TOLD_AHEAD * proven.proof.measured_s:
        notes.append(
            f"the first batch had been loading before the traced steps; a simulated run begins with loading it, which "
            f"is {format_seconds(ahead_s)} of each reproduced step: trace more steps to make it less"
        )
    if proven.proof.is_silent:
        silent = "no gradients are exchanged in the backward passes of the traces"
        notes.append(f"warning: {silent}; schedules of the scenario exchange them")
    if any(not each.is_complete for each in timed.times):
        notes.append(collectives.untraced_note(timed.untraced, timed.job, step_s=timed.step_s))
    return notes


def _unsure(job: TracedJob, links: Links | None) -> str:
    """Return the reason if the traces cannot show the gain of another schedule."""
    if not job.missing or links is None:
        return ""
    return f"{job.untraced}, and waiting for late ones among them looks like slow links: trace all ranks"


def _facts(slowed: SlowedJob, proven: _Proven, unsure: str) -> Imported:
    """Return the facts about the imported job for the scenario."""
    proof = proven.proof
    budget = slowed.budget
    parts = {part.name.lower(): round(float(budget.of_all_s[part]), 9) for part in StepPart if budget.of_all_s[part]}
    recording_s = float(np.mean([each.recording_s for each in slowed.job.profiles]))
    return Imported.model_validate(
        {
            "steps": listed(slowed.job.numbers),
            "step_s": round(proof.measured_s, 9),
            "error": round(proof.error, 4),
            "left_out": "" if slowed.kind.is_modelled else slowed.kind.sentence,
            "unsure": unsure,
            "verdict": budget.verdict,
            "parts": parts,
            "beside_s": round(budget.beside_s, 9),
            "in_turn_s": round(proven.in_turn_s, 9),
            "profiler_s": round(recording_s, 9),
            "lost": slowed.lost,
            "late_on": _late_on(slowed.stragglers),
        }
    )


def _late_on(late: Sequence[Straggler]) -> Channel | Literal[""]:
    """Return the channel with the largest total delay of stragglers."""
    seconds: Counter[Channel] = Counter()
    for each in late:
        seconds[each.channel] += round(1e9 * each.seconds) * len(each.steps) * len(each.ranks)
    return seconds.most_common(1)[0][0] if seconds else ""


def _cluster(timed: _Timed, options: ImportOptions) -> tuple[Cluster, Links | None]:
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
    library = "gloo" if is_gloo else "nccl"
    bare = Cluster(**shape, fabric=Link.ideal(), network=Link.ideal(), library=library, device=device)
    kinds = SHARDED if isinstance(timed.model, ShardedModel) else AVERAGED
    usual = fabric_of_gpus(job.profiles)
    links = derive_links(_of_links(timed), bare, kinds=kinds, given=options.fabric, usual=usual)
    return bare.model_copy(update={"fabric": links.fabric, "network": links.network}), links


def _of_links(timed: _Timed) -> tuple[collectives.CollectiveTimes, ...]:
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


def _caveats(timed: _Timed, links: Links | None, proof: Proof, kind: JobKind) -> tuple[str, ...]:
    """Return caveats for users of the scenario."""
    job = timed.job
    caveats: list[str] = []
    if isinstance(timed.model, ShardedModel):
        caveats += timed.model.notes
        if job.profiles[0].device == "cpu":
            caveats.append(
                "on CPUs, fully_shard waits for each collective before it computes on, and so do the schedules here "
                "(blocking: true): on GPUs, communication would be hidden"
            )
    if not kind.is_modelled:
        caveats.append(f"the scenario leaves out what the job does besides averaging gradients: {kind.sentence}")
    if job.missing:
        caveats.append(
            f"{job.untraced}: a straggler among them looks like slow links, so links may be too slow and "
            f"gains of averaging more seldom too large"
        )
    if links is not None and not links.is_complete:
        caveats.append("the links inside nodes were not measured: do not trust schedules with groups inside nodes")
    if proof.misses:
        caveats.append(f"the steps it was imported from are reproduced {proof.error_text} off: {proof.misses}")
    return tuple(caveats)


def _scenario(
    name: str,
    timed: _Timed,
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


def _more_notes(
    job: TracedJob, base: BaseTimes, host: HostModel, clocks: RankClocks, links: Links | None, clipped_share: float
) -> list[str]:
    notes = []
    if base.sharding_s:
        notes.append(
            f"memory_bandwidth: fully_shard itself computes for {format_seconds(base.sharding_s)} of a step, with its "
            f"copies, casts and hooks; schedules without sharding do not"
        )
    elif links is not None:
        notes.append(
            "traces do not tell how fast memory is: compressing gradients takes no time in this scenario until "
            "cluster.device.memory_bandwidth is set"
        )
    if len(job.numbers) < _FEW:
        notes.append(f"{len(job.numbers)} steps are few: trace {_FEW} or more to tell what is usual from what is not")
    if clipped_share > 0.01:
        notes.append(f"parts of steps below the undisturbed times, {clipped_share:.1%} of a step, are left out")
    if clocks.unknown:
        n_unknown = len(clocks.unknown)
        notes.append(f"{n_unknown} ranks share no collective with the others: their clocks are taken as they are")
    if base.is_loaded and not host.loads:
        notes.append(
            f"input of {format_seconds(base.input_s)} counts with the forward pass: the host runs ahead, and how long "
            f"loading itself takes is not seen"
        )
    if host.loads or (host.waits and not host.reads_loss):
        then = "before it loads" if host.loads else "before the next step"
        notes.append(f"delays of the host are recorded on compute, because the host waits for the update {then}")
    if not host.waits:
        notes.append("delays are recorded on compute, as the device saw them, because the host never waits for it")
    if not any(each.batch_size for each in job.profiles):
        notes.append("the traces do not tell the batch size: written as 1; only rates of samples depend on it")
    return notes
