"""What `simdist tune` prints, for people and as JSON."""

import math
from dataclasses import asdict

from simdist.cli.tables import factor_with_interval, seconds_with_interval, table_text
from simdist.settings.units import format_nbytes
from simdist.tune import Tuned, Wanted
from simdist.tune.evaluating import Finalist
from simdist.tune.verdict import entry

_HEADER = ("schedule", "all exchange every", "step time", "speed-up", "sent per step", "memory", "front")
_NOT_KNOWN = (
    "Not known here: how averaging more seldom, or sending a part of the gradient, changes what is learnt in a step. "
    "--global-every, --group-every and --min-density are yours to choose. What it would gain to repair slow ranks, "
    "the command whatif tells."
)


def tuned_text(tuned: Tuned, wanted: Wanted) -> str:
    """Return the finalists, the verdict, and the winner as a scenario has it."""
    table = table_text(_title(tuned, wanted), _HEADER, [*map(_cells, tuned.finalists)], words=("schedule", "front"))
    verdict = tuned.verdict
    lines = [table, "", f"{verdict.sentence}.", *(f"  {reason}." for reason in verdict.reasons)]
    if verdict.winner:
        lines += ["", "schedules:", f"  {entry(verdict.winner.schedule)}"]
    return "\n".join([*lines, "", _NOT_KNOWN])


def _title(tuned: Tuned, wanted: Wanted) -> str:
    (baseline,) = (each for each in tuned.finalists if each.is_baseline)
    scenario, n_seeds = tuned.runs.scenario, baseline.row.seeds
    tried = f"{tuned.n_evaluated:,} plan{'s' * (tuned.n_evaluated > 1)} of {tuned.n_candidates:,} candidates tried"
    again = f"finalists again with {n_seeds} other seed{'s' * (n_seeds > 1)}" if scenario.is_random else ""
    return "; ".join(
        part
        for part in (
            f"{scenario.name}: {scenario.cluster.world_size:,} ranks, runs of {scenario.steps:,} steps or a few more",
            tried,
            again,
            f"speed-up over {baseline.schedule.name}{_meaning(tuned) * (n_seeds > 1)}",
        )
        if part
    )


def _meaning(tuned: Tuned) -> str:
    """Say what intervals are about."""
    recording = tuned.runs.recording
    what = f"what {recording.n_steps:,} recorded steps leave open" if recording else "error of the simulation"
    return f", ± {what} (95 %)"


def _cells(finalist: Finalist) -> list[str]:
    row, facts = finalist.row, finalist.facts
    gap = facts.global_gap
    return [
        finalist.schedule.name,
        "never" if math.isinf(gap) else f"{gap:.0f} step{'s' * (gap > 1)}",
        seconds_with_interval(row.step_s, row.step_s_ci95),
        factor_with_interval(row.speedup, row.speedup_ci95) + " ± ?" * (finalist.problem is not None),
        format_nbytes(facts.sent_nbytes),
        format_nbytes(facts.device_nbytes),
        "*" if finalist.on_front else "",
    ]


def tuned_document(tuned: Tuned, wanted: Wanted) -> dict[str, object]:
    """Return all that was found, as JSON has it."""
    verdict, recording = tuned.verdict, tuned.runs.recording
    (baseline,) = (each for each in tuned.finalists if each.is_baseline)
    return {
        "scenario": tuned.runs.scenario.name,
        "steps": tuned.runs.scenario.steps,
        "recorded_steps": recording.n_steps if recording else None,
        "block_steps": recording.block_steps if recording else None,
        "baseline": baseline.schedule.name,
        "constraints": asdict(wanted.constraints),
        "candidates": tuned.n_candidates,
        "evaluated": tuned.n_evaluated,
        "excluded": dict(tuned.excluded),
        "illegal": tuned.n_illegal,
        "change": verdict.winner is not None,
        "outcome": verdict.outcome,
        "best": verdict.best.schedule.name,
        "verdict": verdict.sentence,
        "reasons": list(verdict.reasons),
        "rows": [_row(each) for each in tuned.finalists],
    }


def _row(finalist: Finalist) -> dict[str, object]:
    facts = finalist.facts
    return finalist.row.document() | {
        "search_step_s": finalist.search_step_s,
        "global_every_steps": facts.global_gap,
        "sent_nbytes": facts.sent_nbytes,
        "device_nbytes": facts.device_nbytes,
        "host_nbytes": facts.host_nbytes,
        "on_front": finalist.on_front,
        "problem": finalist.problem,
        "entry": entry(finalist.schedule),
    }
