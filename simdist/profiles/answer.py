"""What an import found, as JSON and as text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np

from simdist.profiles.estimates.collectives import CollectiveTimes
from simdist.profiles.estimates.links import AVERAGED, SHARDED, as_group, predicted_s
from simdist.profiles.estimates.places import Place
from simdist.profiles.estimates.sharded_model import ShardedModel
from simdist.profiles.estimates.stragglers import CommonDelay, Noise, Repeated, Straggler, repeated
from simdist.profiles.importing import ImportedJob, SlowedJob
from simdist.profiles.job.kind import JobKind
from simdist.profiles.job.sharding import described
from simdist.profiles.job.step_budget import StepBudget
from simdist.profiles.steps.step_parts import StepPart
from simdist.profiles.summaries import CollectiveSummary, JobSummary
from simdist.scenario import strict_yaml
from simdist.settings.base import listed, picked, plural
from simdist.settings.units import format_Bps, format_nbytes, format_seconds
from simdist.studies.columns import Column
from simdist.studies.imported_facts import lost_record, lost_text, where_text
from simdist.studies.remarks import documents
from simdist.studies.tables import table_text
from simdist.traces.collectives import bus_factor

_TOLD = 10  # stragglers


def _predicted(predicted_s: float, measured_s: float) -> str:
    return f"{format_seconds(predicted_s)} ({predicted_s / measured_s - 1:+.0%})" if measured_s else "-"


_COLUMNS = (
    Column("collective", "kind"),
    Column("size", form=str),
    Column("ranks", "n_ranks", form=str),
    Column("calls", form=str),
    Column("time", "seconds", form=format_seconds),
    Column("busbw", form=format_Bps),
    Column("waiting", "wait_share", form="{:.0%}".format),
)
_AHEAD_S = 1e-3  # less is not worth a line
_PREDICTED = Column("predicted", "predicted_s", "seconds", form=_predicted)


_SUMMARY_COLUMNS = (
    Column("collective", "kind"),
    Column("elements", "count", form="{:,}".format),
    Column("type", "dtype", form=str),
    Column("calls", form=str),
    Column("transfer", "seconds", form=format_seconds),
    Column("last rank", "last_rank", form=str),
    Column("others wait", "late_s", form=format_seconds),
)


def summary_text(summary: JobSummary) -> str:
    """Return what a summary of collectives shows as a table."""
    late = "no rank comes last to most of what the others wait for"
    if summary.late_rank is not None:
        late = f"rank {summary.late_rank} comes last: the others wait {format_seconds(summary.late_s)} of a step for it"
    title = f"{plural(summary.n_steps, 'step')} of a sharded model: {summary.sentence}"
    records = [_collective_summary_record(each) for each in summary.collectives]
    return f"{table_text(f'{summary.n_steps} {title}', _SUMMARY_COLUMNS, records)}\n{late}"


def summary_document(summary: JobSummary) -> dict[str, object]:
    """Return what a summary of collectives shows as JSON.

    Columns:
        n_steps, n_gathered_again (int): Steps, and units gathered again for the backward pass.
        units (object): Elements of a unit (str) -> units of that size (int).
        late_rank (int or null): The rank that comes last most often.
        late_s (float): How long the others wait for it in a step, median of ranks.
        collectives (list): "Collectives in a summary".
    """
    return {
        **picked(summary, "n_steps", "n_gathered_again", "late_rank", "late_s"),
        "units": {str(count): n for count, n in summary.units.items()},
        "collectives": [_collective_summary_record(each) for each in summary.collectives],
    }


def _collective_summary_record(each: CollectiveSummary) -> dict[str, object]:
    """Return collectives of a summary as JSON.

    Columns:
        kind, dtype (str): Kind, such as `all_gather`, and type of the elements.
        count, nbytes (int): Elements and bytes of the whole.
        n_ranks (int): Members of a group.
        calls (int): Calls on each rank.
        last_rank (int): The rank that comes last.
        seconds (float): Mean time of a call on it.
        late_s (float): How much longer a call takes on the others, median.
    """
    return picked(each, "kind", "dtype", "count", "nbytes", "n_ranks", "calls", "seconds", "last_rank", "late_s")


def import_document(imported: ImportedJob, written: Sequence[Path]) -> dict[str, object]:
    """Return what was found as JSON has it.

    Columns:
        scenario (str): Name.
        world_size (int): Ranks.
        ranks, missing_ranks (list): Ranks (int) with and without a trace.
        nodes, gpus_per_node (int): Machines, and ranks of one.
        steps (list): Steps (int) that all traces have, as the profiler numbers them.
        step (object): "A measured step and its prediction".
        base (object): "An undisturbed step".
        tensors (int): Tensors, or gradient buckets or units if the traces do not show tensors.
        parameters_nbytes (int): Size of the model.
        sharding (object or null): "A sharded model", if so.
        where (object): "Where a step goes".
        job (object): "The kind of job".
        collectives (list): "Collectives in the traces".
        stragglers (list): "A straggler in the traces".
        repeated (list): "A repeated delay".
        common (list): "A delay of all ranks at once".
        noise (object): Delays within the noise of all: `count` (int), sum in `seconds` (float), `told_from_s` (object):
            channel -> least delay (float or null) that would stand out.
        uneven (list or null): 5th and 95th percentile (float) of the time of batches relative to the median.
        lost (object): "Shares of a step that are lost".
        clock_skew_s, clock_residual_s (float): Largest difference between the clocks of ranks, corrected, and the
            median that remains at the end of a collective.
        remarks (list): "A remark".
        files (list): Files written (str).

    Columns of step:
        measured_s (float): Mean over steps and traced ranks.
        predicted_s (float): The job's schedule with the delays as they happened.
        without_named_s (float): A measured step without all of `lost` but noise.
        error (float): Error of the prediction.

    Columns of base:
        input_s (float): Until the batch is there.
        host_s (float): Device idle, not for communication.
        forward_s, backward_s (float): Forward pass and loss; backward passes.
        buckets_s (list): Seconds (float) of one pass up to each gradient bucket, from the previous one.
        optimize_s (float): Update.
        sharding_s (float): Computing of `fully_shard` itself, median.
    """
    proof = imported.proof
    of_base = ("input_s", "forward_s", "host_s", "backward_s", "buckets_s", "optimize_s", "sharding_s")
    return {
        "scenario": imported.scenario.name,
        **picked(imported.job, "world_size", "ranks", missing_ranks="missing", steps="numbers"),
        **picked(imported.layout, "nodes", "gpus_per_node"),
        "step": {
            **picked(proof, "measured_s", "predicted_s", "error"),
            "without_named_s": imported.without_named_s,
        },
        "base": picked(imported.base, *of_base),
        "tensors": len(imported.model.tensors),
        "parameters_nbytes": imported.model.nbytes,
        "sharding": _sharding_record(imported.model) if isinstance(imported.model, ShardedModel) else None,
        "where": _where_record(imported.budget),
        "job": _kind_record(imported.kind),
        "collectives": [_collective(imported, each) for each in imported.times],
        **_slowed_record(imported),
        **picked(imported.clocks, clock_skew_s="skew_s", clock_residual_s="residual_s"),
        "remarks": documents(imported.remarks),
        "files": [str(path) for path in written],
    }


def _sharding_record(model: ShardedModel) -> dict[str, object]:
    """Return how a job shards its model as JSON has it.

    Columns:
        shard, replicas (int): Ranks that share a copy of the model, and copies.
        param_dtype, reduce_dtype (str): Types of gathered units and of reduced gradients.
        schedule (object): Settings of the schedule.
        units (list): "A unit of a sharded model", in forward order.
        exposed_s (object): What was sent -> exposed seconds (float) of a step, waiting included.
        doubts (list): What the traces do not show.
    """
    sharding = model.sharding
    return {
        **picked(sharding, "shard", "replicas", "param_dtype", "reduce_dtype", "exposed_s"),
        "schedule": model.schedule.model_dump(mode="json", exclude_unset=True) | {"kind": model.schedule.kind},
        "units": [_unit_record(model, number) for number in range(len(sharding.units))],
        "doubts": list(model.notes),
    }


def _unit_record(model: ShardedModel, number: int) -> dict[str, object]:
    """Return a unit of a sharded model as JSON has it.

    Columns:
        name (str): Its modules; empty for the root, and if unknown.
        is_root, is_gathered_again, is_reduced (bool): It holds what other units do not; it is freed after the forward
            pass; it is not frozen.
        elements (int): Elements gathered, with padding.
        forward_s, backward_s (float): Its passes in an undisturbed step.
    """
    unit = model.sharding.units[number]
    forward_s, backward_s = model.seconds_of(number)
    return {
        "is_root": number == model.sharding.root,
        **picked(unit, "name", "is_gathered_again", "is_reduced", elements="count"),
        "forward_s": forward_s,
        "backward_s": backward_s,
    }


def _slowed_record(slowed: SlowedJob) -> dict[str, object]:
    """Return who was late as JSON has it."""
    return {
        "stragglers": [_straggler(slowed, each) for each in slowed.stragglers],
        "repeated": [_repeated_record(each) for each in repeated(slowed.stragglers) if each.each[1:]],
        "common": [_common_record(each) for each in slowed.common],
        "noise": _noise_record(slowed.noise),
        "uneven": list(slowed.uneven.range) if slowed.uneven else None,
        "lost": lost_record(slowed.lost),
    }


def slowed_answer(budget: StepBudget, kind: JobKind, slowed: SlowedJob | None) -> tuple[dict[str, object], str]:
    """Return where the steps of a job go of which no scenario can be made, and what slowed it if that is known."""
    record: dict[str, object] = {"where": _where_record(budget), "job": _kind_record(kind)}
    parts = [_where(budget, kind)]
    if slowed:
        record |= _slowed_record(slowed)
        parts.append(_slowed(slowed))
    return record, "\n\n".join(parts)


def import_text(imported: ImportedJob) -> str:
    """Return what was found, for people."""
    parts = [_head(imported), _where(imported.budget, imported.kind), _slowed(imported), _undisturbed(imported)]
    if isinstance(imported.model, ShardedModel):
        parts.append(_sharded(imported.model))
    if imported.times:
        parts.append(_collectives_table(imported))
    return "\n\n".join(parts)


def _head(imported: ImportedJob) -> str:
    job = imported.job
    proof = imported.proof
    layout = imported.layout
    backend = "gloo" if imported.scenario.cluster.collectives.library == "gloo" else "NCCL"
    lines = [
        f"{job.world_size} ranks on {layout.nodes} {plural(layout.nodes, 'node')}, "
        f"steps {listed(job.numbers)}, {backend}, {job.profiles[0].device_name or job.profiles[0].device.upper()}",
        f"step: {format_seconds(proof.measured_s)} measured, {format_seconds(proof.predicted_s)} reproduced "
        f"({proof.error_text})",
    ]
    if job.world_size > 1:
        skew, rest = (format_seconds(round(each, 9)) for each in (imported.clocks.skew_s, imported.clocks.residual_s))
        lines.append(
            f"clocks: up to {skew} apart, corrected by the ends of collectives; these still differ by {rest} between "
            f"ranks"
        )
    return "\n".join(lines)


def _where_record(budget: StepBudget) -> dict[str, object]:
    """Return where steps went, in all and by rank.

    Columns:
        step_s (float): Sum.
        compute_s (float): A kernel computes, or an operator on a CPU.
        all_reduce_s, reduce_scatter_s, all_gather_s, all_to_all_s, broadcast_s, reduce_s, point_to_point_s, other_s
            (float): Exposed communication, by collective. `other_s`: unknown kinds.
        copy_s (float): Only a copy runs.
        input_s (float): Idle, waiting for the batch.
        queued_s (float): Idle although the next kernel was launched.
        short_gap_s, long_gap_s (float): Idle until the host launches the next kernel, in gaps up to and over 0.5 ms.
        host_pause_s (float): The same, while no thread of the host runs an operator.
        fixed_s (float): Time that no schedule of communication changes.
        removable_s (object): Bottleneck -> seconds (float) that it costs, the largest first.
        verdict (str): The largest of these, in words.
        ranks (list): The parts by `rank` (int), with `ahead_s` (float): median lead of host over device.
    """
    columns = [f"{part.name.lower()}_s" for part in StepPart]
    return {
        **picked(budget, "step_s", "fixed_s", "removable_s", "verdict"),
        **dict(zip(columns, budget.of_all_s.tolist(), strict=True)),
        "ranks": [
            {"rank": rank, "step_s": math.fsum(row), "ahead_s": ahead_s, **dict(zip(columns, row, strict=True))}
            for rank, ahead_s, row in zip(budget.ranks, budget.ahead_s, budget.parts_s.tolist(), strict=True)
        ],
    }


def _kind_record(kind: JobKind) -> dict[str, object]:
    """Return the kind of job as JSON.

    Columns:
        is_modelled (bool): The scenario leaves out at most 2 % of a step.
        names (list): Parallelism besides data parallelism (str).
        left_out (object): Kind of collective left out -> calls `per_step` (float) and `share` (float) of a step.
        fixed (list): Exchanges of no schedule, such as a gradient norm: `kind` (str), `nbytes` (int), number `per_step`
            (float) and exposed `seconds` (float).
        share, unseen_share (float): Share of a step left out in all, and idle for unseen reasons.
    """
    left_out = {each: {"per_step": calls, "share": share} for each, (calls, share) in kind.left_out.items()}
    fixed = [picked(each, "kind", "nbytes", "per_step", "seconds") for each in kind.fixed]
    return picked(kind, "is_modelled", "names", "unseen_share", "share") | {"left_out": left_out, "fixed": fixed}


def _where(budget: StepBudget, kind: JobKind) -> str:
    """Say where a step goes, and what the job is bound by."""
    seen = [part for part in StepPart if budget.parts_s[:, part].any()]
    extremes = {}
    for part in seen:
        of_ranks_s = budget.parts_s[:, part]
        ends = (int(of_ranks_s.argmin()), int(of_ranks_s.argmax()))
        low, high = ((float(of_ranks_s[at]), budget.ranks[at]) for at in ends)
        extremes[part.name.lower()] = low, high
    parts_s = {part.name.lower(): float(budget.of_all_s[part]) for part in seen}
    lines = [where_text("where a step goes", parts_s, extremes if budget.ranks[1:] else None), f"{budget.verdict}."]
    if (ahead_s := max(budget.ahead_s)) > _AHEAD_S:
        lines.append(f"the host is up to {format_seconds(ahead_s)} ahead of its device when it begins a step.")
    if not kind.is_modelled:
        lines.append(f"no scenario of data-parallel training has {kind.sentence}: schedules are not compared.")
    return "\n".join(lines)


def _slowed(slowed: SlowedJob) -> str:
    """Answer what slowed the job."""
    among = " among the traced ranks" if slowed.job.missing else ""
    lines = ["stragglers:" if slowed.stragglers else f"stragglers: none{among}"]
    lines += [f"  {line}" for line in _lines(slowed)]
    if slowed.common:
        lines += ["all ranks at once:", *_common_lines(slowed)]
    if slowed.uneven:
        low, high = slowed.uneven.range
        lines.append(
            f"uneven work: the forward and the backward pass of a batch take {low:.2f} to {high:.2f} times as long as "
            f"typical ones, both in proportion, and its update does not: batches differ, as by lengths of sequences"
        )
    if slowed.noise.count:
        count = slowed.noise.count
        sum_s = format_seconds(slowed.noise.seconds)
        what = f"besides {count} {plural(count, 'delay')} of single ranks and steps"
        lines.append(f"{what}, {sum_s} in sum, that the noise of all explains; {_told_from(slowed.noise)}")
    lines.append(lost_text(slowed.lost, slowed.without_named_s))
    return "\n".join(lines)


def _noise_record(noise: Noise) -> dict[str, object]:
    told_from_s = {
        channel: seconds if math.isfinite(seconds) else None for channel, seconds in noise.told_from_s.items()
    }
    return asdict(noise) | {"told_from_s": told_from_s}


def _told_from(noise: Noise) -> str:
    """Say from how late on a further delay is told from noise: a heavy tail and rare stragglers look alike."""
    finite = {channel: seconds for channel, seconds in noise.told_from_s.items() if math.isfinite(seconds)}
    told = []
    if finite:
        sizes = ", ".join(f"{format_seconds(seconds)} on ({channel})" for channel, seconds in finite.items())
        told.append(f"a further one is told from it from {sizes}")
    if heavy := " and ".join(sorted(noise.told_from_s.keys() - finite.keys())):
        told.append(f"its tail is too heavy, or the steps are too few, to tell a further one from it ({heavy})")
    return "; ".join(told)


def _lines(slowed: SlowedJob) -> Iterator[str]:
    found = repeated(slowed.stragglers)
    for each in found[:_TOLD]:
        first = each.each[0]
        is_seen = set(first.ranks) <= set(slowed.job.ranks)
        who = first.who if is_seen else f"{first.who} (no trace; from the waiting of the others)"
        more = f"{'' if is_seen else 'at least '}+{format_seconds(each.seconds)} ({_percent(slowed, each)})"
        what = f"{first.channel}{_where_in_step(first.place)}"
        if first.kind == "persistent":
            yield f"{who}, persistent: {more} in {first.when(len(slowed.job.numbers))}{_growing(first)}, {what}"
        else:
            yield f"{who}, {plural(len(each.steps), 'step')} {listed(each.steps)}{_every(each.every)}: {more}, {what}"
    if len(found) > _TOLD:
        yield f"... and {len(found) - _TOLD} more; --json has all"
    yield from _guesses(found)


def _guesses(found: Sequence[Repeated]) -> Iterator[str]:
    """Guess what pauses hosts at equal distances."""
    regular = [each for each in found if each.every and each.each[0].channel == "host"]
    ranks = {each.each[0].ranks for each in regular}
    if len(ranks) > 1:
        yield "(several hosts pause, each in its own rhythm: garbage collection? `gc.freeze()`, or all at once?)"
    elif ranks == {(0,)}:
        yield "(only rank 0, in a rhythm: evaluation, logging or checkpoints?)"


def _where_in_step(place: Place | None) -> str:
    return f", {place.text}" if place else ""


def _every(steps: float | None) -> str:
    """Say at which distances delays come again, if they do."""
    if steps is None:
        return ""
    return f" (every {steps:.0f} steps)" if steps == round(steps) else f" (about every {steps:.0f} steps)"


def _growing(straggler: Straggler) -> str:
    if not straggler.growth_s:
        return ""
    first_s, last_s = straggler.step_seconds[[0, -1]].tolist()
    verb = "growing" if straggler.growth_s > 0 else "shrinking"
    return f", {verb} from +{format_seconds(first_s)} to +{format_seconds(last_s)}"


def _common_lines(slowed: SlowedJob) -> Iterator[str]:
    for each in slowed.common:
        share = each.seconds / slowed.step_s
        yield (
            f"  {plural(len(each.steps), 'step')} {listed(each.steps)}{_every(each.every)}: "
            f"+{format_seconds(each.seconds)} (+{share:.0%} of a step), {each.channel}{_where_in_step(each.place)}"
        )
        if each.channel == "io" and each.every:
            yield "  (a loader that starts its workers again each epoch? `persistent_workers=True` keeps them)"


def _percent(slowed: SlowedJob, found: Repeated) -> str:
    """Say how large a delay is: of the whole step or, of a device that is slow in most, of its computing."""
    first = found.each[0]
    if (first.kind, first.channel) == ("persistent", "compute") and slowed.base.compute_s > 0:
        return f"+{found.seconds / slowed.base.compute_s:.0%} of its computing"
    return f"+{found.seconds / slowed.step_s:.0%} of a step"


def _straggler(slowed: SlowedJob, straggler: Straggler) -> dict[str, object]:
    """Return a straggler in the traces as JSON.

    Columns:
        kind (str): `persistent` (in most steps) or `transient`.
        ranks (list): The rank, or the ranks of a node (int).
        node (int or null): The node, if all of its traced ranks are late together.
        is_traced (bool): The ranks have a trace. If not, `seconds` is a lower bound.
        channel (str): `host`, `compute` or `io`.
        steps (list): Steps with the delay (int).
        seconds (float): Exposed delay in each of these steps over a typical rank.
        growth_s (float): Steady growth of the delay per step, or 0.
        place (object or null): "The place of a delay", if known.
        factor (float or null): 1 + `seconds` as a share of undisturbed computing or of the step.
    """
    base_s = slowed.base.compute_s if straggler.channel == "compute" else slowed.step_s
    return asdict(straggler) | {
        "place": _place_record(straggler.place),
        "is_traced": set(straggler.ranks) <= set(slowed.job.ranks),
        "factor": 1 + straggler.seconds / base_s if base_s else None,
    }


def _place_record(place: Place | None) -> dict[str, object] | None:
    """Return the place of a delay as JSON.

    Columns:
        phase (str or null): `input`, `forward`, `backward` or `update`. `null` if several.
        bucket (int or null): Late gradient bucket, from 1. `null` if several.
        n_buckets (int): Gradient buckets of a step.
    """
    return picked(place, "phase", "bucket", "n_buckets") if place else None


def _repeated_record(found: Repeated) -> dict[str, object]:
    """Return a repeated delay as JSON.

    Columns:
        ranks, steps (list): The ranks, and all steps (int).
        channel (str): Channel.
        place (object or null): "The place of a delay".
        seconds (float): Delay of a step, mean.
        every (float or null): Steps between delays, if regular.
    """
    first = found.each[0]
    of_first = {**picked(first, "ranks", "channel"), "place": _place_record(first.place)}
    return of_first | picked(found, "steps", "seconds", "every")


def _common_record(found: CommonDelay) -> dict[str, object]:
    """Return a delay of all ranks at once as JSON.

    Columns:
        channel (str): Channel.
        place (object or null): "The place of a delay".
        steps (list): Steps (int).
        seconds (float): Mean over these steps and all ranks.
        every (float or null): Steps between delays, if regular.
    """
    return picked(found, "channel", "steps", "seconds", "every") | {"place": _place_record(found.place)}


def _undisturbed(imported: ImportedJob) -> str:
    base = imported.base
    parts = {
        "input": base.input_s,
        "forward": base.forward_s,
        "host": base.host_s,
        "backward": base.backward_s,
        "optimizer": base.optimize_s,
        "sharding": base.sharding_s,
    }
    parts_of_model = "units" if isinstance(imported.model, ShardedModel) else "gradient buckets"
    what = "tensors" if imported.model.is_real else parts_of_model
    times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items() if seconds > 0)
    size = f"{len(imported.model.tensors)} {what}, {format_nbytes(imported.model.nbytes)}"
    return f"an undisturbed step without communication: {times or '0 s'} ({size})"


_UNIT_COLUMNS = (
    Column("units", form=str),
    Column("elements", form=str),
    Column("forward", "forward_s", form=format_seconds),
    Column("backward", "backward_s", form=format_seconds),
    Column("after the forward pass", "kept", form=str),
)


def _sharded(model: ShardedModel) -> str:
    """Say how the model is sharded: its units, its schedule, and what of its communication is exposed."""
    sharding = model.sharding
    schedule = model.schedule
    settings = {"kind": schedule.kind} | schedule.model_dump(mode="json", exclude_unset=True, exclude={"kind", "label"})
    exposed = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in sharding.exposed_s.items())
    types = f"gathered in {sharding.param_dtype}, reduced in {sharding.reduce_dtype}"
    lines = [
        table_text(f"{described(sharding)}, {types}", _UNIT_COLUMNS, _alike_units(model)),
        f"exposed in a step, with waiting: {exposed}",
        f"schedule: {strict_yaml.dump_line(settings).strip()}",
    ]
    return "\n".join(lines)


def _alike_units(model: ShardedModel) -> list[dict[str, object]]:
    """Return a row for each run of units of one size that are treated alike, with the mean times of a unit."""
    sharding = model.sharding
    records = []
    keys = [(unit.count, unit.is_gathered_again, number == sharding.root) for number, unit in enumerate(sharding.units)]
    for key, some in groupby(range(len(keys)), key=keys.__getitem__):
        numbers = list(some)
        names = [sharding.name(number) for number in (numbers[0], numbers[-1])]
        forward_s, backward_s = np.mean([model.seconds_of(number) for number in numbers], axis=0).tolist()
        records.append(
            {
                "units": names[0] if len(numbers) == 1 else f"{names[0]} to {names[1]}",
                "elements": key[0],
                "forward_s": forward_s,
                "backward_s": backward_s,
                "kept": "freed" if key[1] else "kept",
            }
        )
    return records


def _collectives_table(imported: ImportedJob) -> str:
    columns = [*_COLUMNS, *([_PREDICTED] if imported.links is None else [])]
    records = [
        _collective(imported, each)
        | {"size": "?" if each.nbytes is None else format_nbytes(each.nbytes), "busbw": _busbw(each)}
        for each in imported.times
    ]
    return table_text("collectives, without waiting for the last rank", columns, records)


def _busbw(each: CollectiveTimes) -> float | None:
    if not each.nbytes or not each.seconds:
        return None
    return each.nbytes / each.seconds * bus_factor(each.kind, len(each.group))


def _predicted_s(imported: ImportedJob, each: CollectiveTimes) -> float | None:
    """Return what the scenario's links make of a collective; None of another kind, or group."""
    cluster = imported.scenario.cluster
    group = as_group(each.group, cluster.world_size)
    kinds = SHARDED if isinstance(imported.model, ShardedModel) else AVERAGED
    if each.kind not in kinds or not each.nbytes or group is None:
        return None
    return predicted_s(cluster, group, each.nbytes, each.kind)


def _collective(imported: ImportedJob, each: CollectiveTimes) -> dict[str, object]:
    """Return collectives in the traces as JSON.

    Columns:
        kind (str): Kind, such as `all_reduce`.
        nbytes (int or null): Size of the whole, if known.
        n_ranks (int): Members of a group.
        between_nodes (bool): Members are on several machines.
        calls (int): Number of calls.
        seconds (float): From the arrival of the last member to the end, median.
        wait_share (float): Share of waiting for the last member in the time of these calls.
        predicted_s (float or null): Time on the scenario's links, if it can be known.
    """
    found = picked(each, "kind", "nbytes", "between_nodes", "calls", "seconds", "wait_share")
    return found | {"n_ranks": len(each.group), "predicted_s": _predicted_s(imported, each)}
