"""The results of an import, and what is said about them. The stages that find them are in `simdist.profiles.stages`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from simdist.plan.ops import Channel
from simdist.profiles.estimates import collectives
from simdist.profiles.estimates.base import BaseTimes, HostModel
from simdist.profiles.estimates.links import Links
from simdist.profiles.estimates.proof import Proof
from simdist.profiles.estimates.sharded_model import ShardedModel
from simdist.profiles.estimates.stragglers import CommonDelay, Noise, Straggler
from simdist.profiles.estimates.tensors import Model
from simdist.profiles.estimates.uneven import TracedWork
from simdist.profiles.job.exchanges import fixed_note
from simdist.profiles.job.job import TracedJob
from simdist.profiles.job.kind import JobKind, find_kind
from simdist.profiles.job.layout import RankLayout, UnknownLayoutError
from simdist.profiles.job.matching import RankClocks
from simdist.profiles.job.step_budget import StepBudget, step_budget
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.stages import (
    ImportOptions,
    LateRanks,
    ProvenScenario,
    TimedJob,
    find_late_ranks,
    prove_scenario,
    time_job,
)
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.step_parts import StepPart
from simdist.scenario import (
    Imported,
    Scenario,
)
from simdist.scenario.facts import Lost
from simdist.settings.base import listed
from simdist.settings.units import format_seconds
from simdist.studies.remarks import Remark

_WARNING = "warning: "  # begins a note that casts doubt on numbers

_TOLD_AHEAD = 0.01  # of a step
_FEW = 10  # steps; a low quantile of fewer is unreliable


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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
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

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """Assumptions, what the traces do not show, and whether the scenario reproduces them."""
        doubts = [text.removeprefix(_WARNING) for text in self.notes if text.startswith(_WARNING)]
        if self.proof.misses:
            doubts.append(
                f"the scenario does not reproduce the traced steps: {format_seconds(self.proof.predicted_s)}, "
                f"{self.proof.error:+.0%} off what was measured: {self.proof.misses}"
            )
        others = [text for text in self.notes if not text.startswith(_WARNING)]
        return (*(Remark("assumption", each) for each in others), *(Remark("accuracy", each) for each in doubts))

    def __repr__(self) -> str:
        late = len(self.stragglers)
        return f"<job of {self.scenario.cluster.world_size:,} ranks, {self.step_s:.4g} s per step, {late} stragglers>"


def import_job(
    profiles: Sequence[RankProfile],
    *,
    name: str,
    options: ImportOptions | None = None,
    left_out: Sequence[Remark] = (),
) -> ImportedJob:
    """Return the job of these traces as a scenario.

    Args:
        profiles: One per trace file, in any order.
        name: Name of the scenario.
        options: Facts that the user knows.
        left_out: Remarks on traces that could not be read.

    Raises:
        TraceError: The traces are of different jobs, or contain too little.
        ScenarioError: The facts that the user knows contradict them.
    """
    options = options or ImportOptions()
    timed = time_job(profiles, options, is_scenario=True)
    late = find_late_ranks(timed)
    proven = prove_scenario(name, timed, late, options)
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
        notes=(*(f"{_WARNING}{each}" for each in left_out), *_notes(timed, late, proven)),
    )


def what_slowed(profiles: Sequence[RankProfile], options: ImportOptions) -> SlowedJob:
    """Return the causes of delays in a job that cannot become a scenario.

    The cost of stragglers is not simulated. It is the delay of the latest rank of each step, minus the same without
    stragglers.

    Raises:
        TraceError: The traces are of different jobs, or contain too little.
        ScenarioError: The facts that the user knows contradict them.
    """
    try:
        timed = time_job(profiles, options)
    except UnknownLayoutError:
        timed = time_job(profiles, options, is_layout_known=False)
    return _slowed(timed, find_late_ranks(timed), None)


def _slowed(timed: TimedJob, late: LateRanks, proof: Proof | None) -> SlowedJob:
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


def _budget(timed: TimedJob, late: LateRanks, straggling_s: float) -> StepBudget:
    """Return the parts of a step, with separate costs of stragglers and of loading."""
    lasting_s = max((each.seconds for each in late.stragglers if each.kind == "persistent"), default=0.0)
    alone_s = max((each.seconds for each in late.loading), default=0.0)  # the others wait for it in their all_reduces
    return step_budget(
        timed.job.profiles,
        straggling_s=straggling_s,
        lasting_s=lasting_s,
        loading_s=alone_s * (1 - 1 / len(timed.job.ranks)),
    )


def _notes(timed: TimedJob, late: LateRanks, proven: ProvenScenario) -> list[str]:
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


def _facts(slowed: SlowedJob, proven: ProvenScenario, unsure: str) -> Imported:
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


def _caveats(timed: TimedJob, links: Links | None, proof: Proof, kind: JobKind) -> tuple[str, ...]:
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
