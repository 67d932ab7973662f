"""From profiles of ranks to a scenario: all steps in their order, without files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simdist.errors import ScenarioError
from simdist.plan.ops import Channel
from simdist.profiles.estimates import collectives, stragglers
from simdist.profiles.estimates.base import (
    BaseTimes,
    HostModel,
    base_times,
    excess_times,
    host_model,
    late_backward_s,
    parts,
    recorded,
    shares_cores,
    with_late_backward,
)
from simdist.profiles.estimates.links import Fabric, Links, derive_links, fabric_of_gpus
from simdist.profiles.estimates.proof import Proof, prove_step
from simdist.profiles.estimates.stragglers import DelayTable, Noise, Straggler
from simdist.profiles.estimates.tensors import Model, find_model
from simdist.profiles.job.job import TracedJob, assemble
from simdist.profiles.job.kind import JobKind, find_kind
from simdist.profiles.job.layout import RankLayout, find_layout
from simdist.profiles.job.matching import RankClocks, check_same_run, match, synchronize
from simdist.profiles.job.step_budget import StepBudget, step_budget
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.step_parts import StepPart
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
from simdist.schedules import Schedule
from simdist.settings.units import format_seconds
from simdist.studies.proposals import traced_schedules

_FEW = 10  # steps; a low quantile of fewer says little
_SAMPLE_NBYTES = 1  # the latency of the storage is all that loading takes


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Facts that the user knows beyond the traces.

    Args:
        nodes: Machines.
        gpus_per_node: Ranks of each.
        cluster: Links and devices, instead of those of the traces; its numbers of nodes and GPUs do not count.
        fabric: The links inside nodes; those between nodes are still from the traces.
        tensors: Of the model, in forward order, instead of those of the traces.
        steps: Only steps with these numbers; all if None.
    """

    nodes: int | None = None
    gpus_per_node: int | None = None
    cluster: Cluster | None = None
    fabric: Fabric | None = None
    tensors: tuple[Tensor, ...] = ()
    steps: range | None = None


@dataclass(frozen=True, slots=True)
class ImportedJob:
    """A traced job as a scenario, and what was found on the way.

    Args:
        job: The traced ranks and steps.
        layout: Which ranks share a machine.
        clocks: Of the ranks.
        times: Times that collectives took.
        links: From the traces; None if the user gave a cluster.
        base: Times of an undisturbed step.
        host: How the simulated host behaves.
        model: Tensors and buckets.
        scenario: The job, without its delays: channels that have any are disturbed by 0 s.
        delays: Channel -> delays for the simulator, `[n_steps, world_size]`.
        stragglers: Who was late.
        noise: Noticeable delays that are no straggler's.
        proof: The step as predicted and as measured.
        budget: Where steps went.
        kind: What kind of job it is.
        notes: Assumptions and omissions, a sentence each.
    """

    job: TracedJob
    layout: RankLayout
    clocks: RankClocks
    times: tuple[collectives.CollectiveTimes, ...]
    links: Links | None
    base: BaseTimes
    host: HostModel
    model: Model
    scenario: Scenario
    delays: dict[Channel, Floats]
    stragglers: tuple[Straggler, ...]
    noise: Noise
    proof: Proof
    budget: StepBudget
    kind: JobKind
    notes: tuple[str, ...]


def import_job(profiles: Sequence[RankProfile], *, name: str, options: ImportOptions | None = None) -> ImportedJob:
    """Return the job that the traces of its ranks show.

    Args:
        profiles: One per trace file, in any order.
        name: Of the scenario.
        options: Facts that the user knows.

    Raises:
        TraceError: The traces are of different jobs, or do not tell enough.
        ScenarioError: The facts that the user knows contradict them.
    """
    options = options or ImportOptions()
    job = assemble(profiles, steps=options.steps)
    layout = find_layout(job, nodes=options.nodes, gpus_per_node=options.gpus_per_node)
    seconds = parts(job)
    step_s = float(np.median(seconds.step_s))
    base = base_times(job, seconds)
    host = host_model(job, base, seconds)
    model = find_model(job, base, options.tensors)
    matched = match(job)
    clocks = synchronize(matched)
    check_same_run(job, matched, clocks)
    untraced = collectives.find_untraced_waits(matched, clocks)
    times = collectives.collective_times(matched, clocks, layout, untraced)
    if shares_cores(job, seconds):
        times = collectives.on_shared_cores(times, matched, clocks)
    cluster, links = _cluster(job, layout, times, options)
    traced, clipped_s = excess_times(seconds, base)
    excess = collectives.with_untraced_rank(DelayTable(traced, job.ranks, job.numbers, step_s), untraced, job)
    late = stragglers.find_stragglers(excess, layout)
    loading = [each for each in late if host.ahead_s and (each.channel, each.kind) == ("io", "persistent")]
    late = tuple(each for each in late if each not in loading)
    seen = [each for each in late if set(each.ranks) <= set(job.ranks)]
    # of a rank without a trace only what is exposed is known: that is a delay, not a slow device
    slow = stragglers.slow_throughout(seen, len(job.numbers))
    without = (stragglers.without(excess, who) for who in (slow, late))
    late_s = late_backward_s(job, seconds, base)
    delays, calm = (recorded(rest, host, excess.ranks, job.world_size) for rest in without)
    delays, calm = (with_late_backward(rest, calm, late_s, job.ranks) for rest in (delays, calm))
    shape = {"nodes": layout.nodes, "gpus_per_node": layout.gpus_per_node}
    has_links = links is None or links.is_complete
    schedules = traced_schedules(model.schedule, len(job.numbers), **shape, has_links=has_links)
    disturbances = tuple(Persistent(on=channel, delay_s=0.0) for channel in delays)
    plain = _scenario(name, job, cluster, model, base, host, disturbances, schedules)
    slow_ones = (*plain.cluster.slow_devices, *stragglers.slow_devices(slow, _computing_s(plain)))
    slowed_cluster = plain.cluster.model_copy(update={"slow_devices": slow_ones})
    slowed = plain.model_copy(update={"cluster": slowed_cluster})
    proof = prove_step(slowed, delays, seconds, job, calm=(plain, calm), ahead_s=host.ahead_s)
    notes = [*job.notes, *layout.notes, *base.notes, *model.notes, *matched.notes, *(links.notes if links else ())]
    notes += _more_notes(job, base, host, clocks, links, clipped_s / step_s if step_s else 0.0)
    notes += [
        f"warning: {each.who} waits {format_seconds(each.seconds)} longer for its batches than others in most steps: "
        f"its loader is the slowest, by however little; where loaders run ahead, it shows the waiting of all"
        for each in loading
    ]
    if proof.is_silent:
        silent = "no gradients are exchanged in the backward passes of the traces"
        notes.append(f"warning: {silent}; schedules of the scenario exchange them")
    if any(not each.is_complete for each in times):
        notes.append(collectives.untraced_note(untraced, job, step_s=step_s))
    lasting_s = max((each.seconds for each in late if each.kind == "persistent"), default=0.0)
    straggling_s = proof.straggling_share * proof.measured_s
    alone_s = max((each.seconds for each in loading), default=0.0)  # the others wait for it in their all_reduces
    loading_s = alone_s * (1 - 1 / len(job.ranks))
    budget = step_budget(job.profiles, straggling_s=straggling_s, lasting_s=lasting_s, loading_s=loading_s)
    kind = find_kind(job.profiles, waiting_s=float(budget.of_all_s[StepPart.QUEUED]))
    told = {
        "doubts": _caveats(job, links, proof, kind),
        "imported": _facts(job, proof, budget, kind, _unsure(job, links)),
    }
    scenario = slowed.model_copy(update=told)
    noise = stragglers.noise_of(excess, late)
    found = job, layout, clocks, times, links, base, host, model
    return ImportedJob(*found, scenario, delays, late, noise, proof, budget, kind, tuple(notes))


def _unsure(job: TracedJob, links: Links | None) -> str:
    """Say why the traces do not tell what another schedule would gain, if so."""
    if not job.missing or links is None:
        return ""
    return f"{job.untraced}, and waiting for late ones among them looks like slow links: trace all ranks"


def _facts(job: TracedJob, proof: Proof, budget: StepBudget, kind: JobKind, unsure: str) -> Imported:
    """Return what the scenario says of the job that it was imported from."""
    parts = {part.name.lower(): round(float(budget.of_all_s[part]), 9) for part in StepPart if budget.of_all_s[part]}
    left_out = "" if kind.is_modelled else kind.sentence
    step_s = round(proof.measured_s, 9)
    error = round(proof.error, 4)
    beside_s = round(budget.beside_s, 9)
    told = {"left_out": left_out, "unsure": unsure, "verdict": budget.verdict, "parts": parts}
    profiler_s = round(float(np.mean([each.recording_s for each in job.profiles])), 9)
    return Imported(step_s=step_s, error=error, beside_s=beside_s, profiler_s=profiler_s, **told)


def _cluster(
    job: TracedJob, layout: RankLayout, times: Sequence[collectives.CollectiveTimes], options: ImportOptions
) -> tuple[Cluster, Links | None]:
    """Return the machines: those given, as many as were traced, or with links from what collectives took."""
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
    links = derive_links(times, bare, given=options.fabric, usual=fabric_of_gpus(job.profiles))
    return bare.model_copy(update={"fabric": links.fabric, "network": links.network}), links


def _computing_s(scenario: Scenario) -> float:
    """Return what a slow device is slower at: all that an undisturbed step computes, in the words of the scenario."""
    workload = scenario.workload
    backward_s = math.fsum(tensor.backward_s or 0.0 for tensor in workload.tensors)
    return workload.micro_batches * ((workload.forward_s or 0.0) + backward_s) + (workload.optimize_s or 0.0)


def _caveats(job: TracedJob, links: Links | None, proof: Proof, kind: JobKind) -> tuple[str, ...]:
    """Return what those who use the scenario must know."""
    caveats = []
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
    job: TracedJob,
    cluster: Cluster,
    model: Model,
    base: BaseTimes,
    host: HostModel,
    disturbances: tuple[Persistent, ...],
    schedules: tuple[Schedule, ...],
) -> Scenario:
    """Return the scenario of the job."""
    batch_size = next((each.batch_size for each in job.profiles if each.batch_size), 1)
    forward_s = (base.forward_s + base.host_s + (0.0 if host.loads else base.input_s)) / base.micro_batches
    workload = Workload(
        name=name,
        tensors=model.tensors,
        dtype=model.dtype,
        batch_size=batch_size,
        micro_batches=base.micro_batches,
        sample_nbytes=_SAMPLE_NBYTES if host.loads else 0,
        forward_s=round(forward_s, 9),
        optimize_s=round(base.optimize_s, 9),
    )
    if host.load_s is not None:
        storage = Storage(latency_s=round(host.load_s, 9), bandwidth_Bps=float("inf"), source="input of the traces")
        cluster = cluster.model_copy(update={"storage": storage})
    return Scenario(
        name=name,
        cluster=cluster,
        workload=workload,
        steps=len(job.numbers),
        host=Host(waits_for="update" if host.loads else "loss", run_ahead_steps=0 if host.waits else None),
        input=InputSettings(source="storage", prefetch=2 if host.ahead_s else 1) if host.loads else InputSettings(),
        disturbances=disturbances,
        schedules=schedules,
    )


def _more_notes(
    job: TracedJob, base: BaseTimes, host: HostModel, clocks: RankClocks, links: Links | None, clipped_share: float
) -> list[str]:
    notes = []
    if links is not None:
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
    if host.loads:
        notes.append(
            "delays of the host are recorded on compute, because the host waits for the update before it loads"
        )
    if not host.waits:
        notes.append("delays are recorded on compute, as the device saw them, because the host never waits for it")
    if not any(each.batch_size for each in job.profiles):
        notes.append("the traces do not tell the batch size: written as 1; only rates of samples depend on it")
    return notes
