"""What `simdist import` says: what slowed the job, what a step is made of, what collectives took."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from simdist.cli.tables import table_text
from simdist.profiles.estimates.collectives import CollectiveTimes
from simdist.profiles.estimates.links import as_group, predicted_s
from simdist.profiles.estimates.stragglers import Straggler
from simdist.profiles.importing import ImportedJob
from simdist.profiles.steps.model import listed
from simdist.settings.units import format_Bps, format_nbytes, format_seconds
from simdist.traces.collectives import bus_factor

_TOLD = 10  # stragglers


def document(imported: ImportedJob, written: Sequence[Path]) -> dict[str, object]:
    """Return what was found as JSON has it."""
    job, base, proof = imported.job, imported.base, imported.proof
    return {
        "scenario": imported.scenario.name,
        "world_size": job.world_size,
        "ranks": list(job.ranks),
        "missing_ranks": list(job.missing),
        "nodes": imported.layout.nodes,
        "gpus_per_node": imported.layout.gpus_per_node,
        "steps": list(job.numbers),
        "step": {
            "measured_s": proof.measured_s,
            "predicted_s": proof.predicted_s,
            "without_stragglers_s": proof.calm_s,
            "error": proof.error,
        },
        "base": {
            "input_s": base.input_s,
            "forward_s": base.forward_s,
            "host_s": base.host_s,
            "backward_s": base.backward_s,
            "buckets_s": list(base.buckets_s),
            "optimize_s": base.optimize_s,
        },
        "tensors": len(imported.model.tensors),
        "parameters_nbytes": imported.model.nbytes,
        "collectives": [_collective(imported, each) for each in imported.times],
        "stragglers": [_straggler(imported, each) for each in imported.stragglers],
        "noise": {"count": imported.noise.count, "seconds": imported.noise.seconds},
        "straggling_share": proof.straggling_share,
        "clock_skew_s": imported.clocks.skew_s,
        "clock_residual_s": imported.clocks.residual_s,
        "notes": list(imported.notes),
        "files": [str(path) for path in written],
    }


def text(imported: ImportedJob) -> str:
    """Return what was found, for people."""
    parts = [_head(imported), _slowed(imported), _undisturbed(imported)]
    if imported.times:
        parts.append(_collectives_table(imported))
    return "\n\n".join(parts)


def _head(imported: ImportedJob) -> str:
    job, proof, layout = imported.job, imported.proof, imported.layout
    backend = "gloo" if imported.scenario.cluster.library == "gloo" else "NCCL"
    lines = [
        f"{job.world_size} ranks on {layout.nodes} node{'s' * (layout.nodes > 1)}, "
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


def _slowed(imported: ImportedJob) -> str:
    """Answer what slowed the job."""
    proof = imported.proof
    among = " among the traced ranks" if imported.job.missing else ""
    lines = ["stragglers:" if imported.stragglers else f"stragglers: none{among}"]
    lines += [f"  {line}" for line in _lines(imported)]
    if imported.noise.count:
        count, sum_s = imported.noise.count, format_seconds(imported.noise.seconds)
        what = f"besides {count} delay{'s' * (count > 1)} of single ranks and steps"
        lines.append(f"{what}, {sum_s} in sum, that the noise of all explains")
    if imported.stragglers and proof.straggling_share > 0:
        lines.append(
            f"without them a step would take {format_seconds(proof.calm_s)}: {proof.straggling_share:.0%} of the step "
            f"is lost to them"
        )
    return "\n".join(lines)


def _lines(imported: ImportedJob) -> Iterator[str]:
    for each in imported.stragglers[:_TOLD]:
        is_seen = set(each.ranks) <= set(imported.job.ranks)
        who = each.who if is_seen else f"{each.who} (no trace; from the waiting of the others)"
        more = f"{'' if is_seen else 'at least '}+{format_seconds(each.seconds)} ({_percent(imported, each)})"
        when = each.when(len(imported.job.numbers))
        if each.kind == "persistent":
            yield f"{who}, persistent: {more} in {when}, {each.channel}"
        else:
            yield f"{who}, {when}: {more}, {each.channel}"
    if len(imported.stragglers) > _TOLD:
        yield f"... and {len(imported.stragglers) - _TOLD} more; --json has all"


def _percent(imported: ImportedJob, straggler: Straggler) -> str:
    """Say how large a delay is: of the computing of a step, or of the whole step."""
    if straggler.channel == "compute" and imported.base.compute_s > 0:
        return f"+{straggler.seconds / imported.base.compute_s:.0%} of its computing"
    return f"+{straggler.seconds / imported.proof.measured_s:.0%} of a step"


def _straggler(imported: ImportedJob, straggler: Straggler) -> dict[str, object]:
    base_s = imported.base.compute_s if straggler.channel == "compute" else imported.proof.measured_s
    return {
        "kind": straggler.kind,
        "ranks": list(straggler.ranks),
        "node": straggler.node,
        "is_traced": set(straggler.ranks) <= set(imported.job.ranks),
        "channel": straggler.channel,
        "steps": list(straggler.steps),
        "seconds": straggler.seconds,
        "factor": 1 + straggler.seconds / base_s if base_s else None,
    }


def _undisturbed(imported: ImportedJob) -> str:
    base = imported.base
    parts = {
        "input": base.input_s,
        "forward": base.forward_s,
        "host": base.host_s,
        "backward": base.backward_s,
        "optimizer": base.optimize_s,
    }
    what = "tensors" if imported.model.is_real else "gradient buckets"
    times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items() if seconds > 0)
    size = f"{len(imported.model.tensors)} {what}, {format_nbytes(imported.model.nbytes)}"
    return f"an undisturbed step without communication: {times or '0 s'} ({size})"


def _collectives_table(imported: ImportedJob) -> str:
    given = imported.links is None
    header = ("collective", "size", "ranks", "calls", "time", "busbw", "waiting", *(["predicted"] if given else []))
    rows = [
        [
            each.kind,
            "?" if each.nbytes is None else format_nbytes(each.nbytes),
            str(len(each.group)),
            str(each.calls),
            format_seconds(each.seconds),
            _busbw(each),
            f"{each.wait_share:.0%}",
            *([_predicted_text(imported, each)] if given else []),
        ]
        for each in imported.times
    ]
    return table_text("collectives, without waiting for the last rank", header, rows, words=("collective",))


def _busbw(each: CollectiveTimes) -> str:
    if not each.nbytes or not each.seconds:
        return "-"
    return format_Bps(each.nbytes / each.seconds * bus_factor(each.kind, len(each.group)))


def _predicted_s(imported: ImportedJob, each: CollectiveTimes) -> float | None:
    """Return what the scenario's links make of an all_reduce; None of another collective, or group."""
    cluster = imported.scenario.cluster
    group = as_group(each.group, cluster.world_size)
    if each.kind != "all_reduce" or not each.nbytes or group is None:
        return None
    return predicted_s(cluster, group, each.nbytes)


def _predicted_text(imported: ImportedJob, each: CollectiveTimes) -> str:
    seconds = _predicted_s(imported, each)
    if seconds is None or not each.seconds:
        return "-"
    return f"{format_seconds(seconds)} ({seconds / each.seconds - 1:+.0%})"


def _collective(imported: ImportedJob, each: CollectiveTimes) -> dict[str, object]:
    return {
        "kind": each.kind,
        "nbytes": each.nbytes,
        "n_ranks": len(each.group),
        "between_nodes": each.between_nodes,
        "calls": each.calls,
        "seconds": each.seconds,
        "wait_share": each.wait_share,
        "predicted_s": _predicted_s(imported, each),
    }
