"""The verdict: whether to change the schedule, in a sentence, with reasons."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from simdist.plan import COLLECTIVES, occurrences
from simdist.runs.building import build, ranks_are_alike, simulate
from simdist.scenario import Scenario, strict_yaml
from simdist.scenario.checkpoint import CheckpointSettings
from simdist.schedules import Schedule
from simdist.settings.base import unchecked_copy
from simdist.settings.units import format_seconds
from simdist.studies.comparison import row
from simdist.studies.facets import RANGES
from simdist.studies.resampling import WORTHWHILE, Runs
from simdist.studies.statistics import Interval
from simdist.traces.waiting import attribute_waiting
from simdist.tuning.constraints import Breach, worst
from simdist.tuning.evaluating import Finalist, chosen, clearly_faster

_LOOKED_AT_STEPS = 200
_MOST_OF_THE_WAITING = 0.8
_NEARLY_ALL_STEPS = 0.8
_FEW_RANKS = 1 / 8  # of the world
_NOTICEABLE = 0.02  # of a step
_FEW_STEPS = 10  # with fewer recorded steps, a rank that is late twice seems to be always late

Outcome = Literal["change", "stay", "unsure", "none"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The recommendation.

    Args:
        winner: The schedule to change to; None: stay with the baseline.
        best: The fastest finalist that keeps to the constraints; the baseline if there is no other.
        sentence: The verdict for people.
        reasons: Sentences that explain it.
        outcome: `change`; `stay`, if nothing gains; `unsure`, if something may; `none`, if no schedule keeps to the
            constraints: `best` is then the one that exceeds one least.
    """

    winner: Finalist | None
    best: Finalist
    sentence: str
    reasons: tuple[str, ...]
    outcome: Outcome


def verdict(runs: Runs, found: Sequence[Finalist]) -> Verdict:
    """Say whether to change from the baseline to the best finalist. Only one that keeps to the constraints is proposed.

    Args:
        runs: The runs of the finalists.
        found: The finalists, including the baseline, the fastest first.
    """
    (baseline,) = (each for each in found if each.is_baseline)
    kept = [each for each in found if not each.breaches]
    if not kept:
        return _none_keeps(found)
    others = [each for each in kept if not each.is_baseline] or [baseline]
    best = chosen(runs, others, baseline=baseline.schedule)
    if baseline.breaches:
        return _instead(runs, baseline, best, kept)
    sure = best if _is_worthwhile(best) else next(filter(_is_worthwhile, others), None)
    if unsure := _dependence(runs.scenario, sure or baseline, kept):
        return Verdict(None, best, unsure, (), "unsure")
    if sure:
        doubt = (_doubt(best),) if best.row.speedup > sure.row.speedup else ()
        reasons = (*doubt, *_ties(runs, sure, kept), *_waits(runs, baseline, sure))
        return Verdict(sure, best, f"{named(sure.schedule)} is {_times_as_fast(sure, baseline)}", reasons, "change")
    if problem := _problem(runs):
        return Verdict(None, best, problem, (_shares(runs.scenario, baseline),), "unsure")
    reasons = tuple(_why_not(runs, baseline, best))
    outcome, sentence = staying(baseline.schedule.name, best.row.speedup, _interval(best))
    return Verdict(None, best, sentence, reasons, outcome)


def _instead(runs: Runs, baseline: Finalist, best: Finalist, kept: Sequence[Finalist]) -> Verdict:
    """Propose the best that keeps to the constraints in place of a baseline that breaks one, even if it is slower."""
    fault = worst(baseline.breaches)
    breaks = f"{baseline.schedule.name} breaks {fault.limit}: {fault.amount}"
    if problem := _problem(runs):
        return Verdict(None, best, problem, (breaks,), "unsure")
    sentence = (
        f"{breaks}; the best that keeps to all limits is {named(best.schedule)}, {_times_as_fast(best, baseline)}"
    )
    depends = _dependence(runs.scenario, best, kept)
    reasons = (depends,) if depends else tuple(_ties(runs, best, kept))
    return Verdict(best, best, sentence, reasons, "change")


def _none_keeps(found: Sequence[Finalist]) -> Verdict:
    """Say which schedule exceeds the constraints least, and by how much."""
    nearest = min(found, key=lambda each: worst(each.breaches).excess)
    return Verdict(None, nearest, nothing_keeps(nearest.schedule, nearest.breaches), (), "none")


def nothing_keeps(nearest: Schedule, breaches: Sequence[Breach]) -> str:
    """Return the sentence that no schedule keeps to the constraints, given the nearest one and what it breaks."""
    fault = worst(breaches)
    if math.isinf(fault.value):
        return f"no schedule keeps to {fault.limit}: none ever exchanges so"
    return (
        f"no schedule keeps to {fault.limit}: {named(nearest)} comes nearest, {fault.amount}, {fault.too_much} too much"
    )


def _times_as_fast(finalist: Finalist, baseline: Finalist) -> str:
    per_sample = " per sample" if finalist.micro_batches != baseline.micro_batches else ""
    return f"{_factor(finalist)} times as fast as {baseline.schedule.name}{per_sample}"


def _problem(runs: Runs) -> str | None:
    """Say why no schedule is recommended for an imported job, if so."""
    imported = runs.scenario.imported
    return f"no schedule is recommended: {imported.problem}" if imported and imported.problem else None


def staying(baseline: str, speedup: float, interval: Interval | None) -> tuple[Outcome, str]:
    """Return the outcome and the sentence if nothing surely gains, given the speed-up of the best and its interval."""
    if not _may_gain(speedup, interval):
        return "stay", f"stay with {baseline}"
    return "unsure", f"stay with {baseline} until something is surely faster"


def _may_gain(speedup: float, interval: Interval | None) -> bool:
    """Tell whether a speed-up may be 2 % or more."""
    return max(speedup, interval[1] if interval else 0.0) >= WORTHWHILE


def _is_worthwhile(finalist: Finalist) -> bool:
    """Tell whether a schedule is at least 2 % faster than the baseline, with a confidence interval above 1."""
    return not finalist.problem and surely_gains(finalist.row.speedup, _interval(finalist))


def _dependence(scenario: Scenario, one: Finalist, found: Sequence[Finalist]) -> str | None:
    """Name the schedules that may be better than the best, and the uncertain quantity that decides it, if any."""
    if one.problem or not one.measured.drawn:
        return None
    from simdist.studies.uncertainty import TAIL, main_cause

    ours = one.row.step_s * one.measured.drawn["step"] / one.measured.drawn["stated"]
    rivals: dict[str, Mapping[str, float]] = {}
    for each in found:
        theirs = each.row.step_s * each.measured.drawn["step"] / each.measured.drawn["stated"]
        if (ours > WORTHWHILE * theirs).mean() > TAIL:
            rivals[each.schedule.name] = row(one.measured, each.measured).of(RANGES)
    if not rivals:
        return None
    names = " or ".join([one.schedule.name, *rivals])
    return f"{names}: which one depends on {main_cause(scenario, next(iter(rivals.values())))}"


def named(schedule: Schedule) -> str:
    """Return a schedule's name for people: hierarchical SGD by its levels, others by their label."""
    levels = schedule.model_dump().get("levels")
    text = f"{schedule.kind} {strict_yaml.dump_line(levels)}" if levels else schedule.name
    return text + (" with intra-node gradients" if levels and schedule.name.endswith("-intra") else "")


def entry(schedule: Schedule) -> str:
    """Return the line of YAML for a scenario's `schedules`."""
    written = schedule.model_dump(mode="json", exclude_unset=True)
    if written.get("label") in ("", schedule.default_label()):
        written.pop("label")
    if "levels" in written:  # their periods are text in JSON
        written["levels"] = {int(period): size for period, size in written["levels"].items()}
    return "- " + strict_yaml.dump_line({"kind": schedule.kind_in_files()} | written)


def lines_of_scenario(
    scenario: Scenario,
    schedule: Schedule,
    n_passes: int,
    saved: CheckpointSettings | None,
    *,
    own: CheckpointSettings | None,
) -> str:
    """Return the lines that a scenario takes to change to a candidate.

    Args:
        scenario: As the user wrote it.
        schedule: The candidate's.
        n_passes: Its micro-batches.
        saved: Its checkpoint, as it was simulated, every so many steps.
        own: The scenario's checkpoint, as it was simulated.
    """
    lines = ["schedules:", f"  {entry(schedule)}"]
    if n_passes != scenario.workload.micro_batches:
        lines.append(f"workload: {{micro_batches: {n_passes}}}  # and its other keys")
    if saved and own and scenario.checkpoint and saved.every == own.every:  # the search has not varied the interval
        saved = unchecked_copy(saved, every=scenario.checkpoint.every)
    if saved and saved != scenario.checkpoint:
        every = saved.model_dump(mode="json")["every"]
        lines.append(f"checkpoint: {{every: {every}, mode: {saved.mode}}}  # and its other keys")
    return "\n".join(lines)


def _factor(finalist: Finalist) -> str:
    return factor_text(finalist.row.speedup, _interval(finalist))


def _interval(finalist: Finalist) -> Interval | None:
    return finalist.row.speedup_range or finalist.row.speedup_ci95


def surely_gains(speedup: float, interval: Interval | None) -> bool:
    """Tell whether a speed-up is 2 % or more, with a confidence interval above 1."""
    return speedup >= WORTHWHILE and (interval is None or interval[0] > 1)


def factor_text(speedup: float, interval: Interval | None) -> str:
    """Return a speed-up, with its confidence interval if there is one.

    >>> factor_text(1.5, (1.4, 1.6))
    '1.50 (1.40-1.60)'
    """
    return f"{speedup:.2f}" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")


def _doubt(finalist: Finalist) -> str:
    why = finalist.problem or "its interval holds 1"
    return f"{named(finalist.schedule)} may be faster, {_factor(finalist)} times, but not surely: {why}"


def _ties(runs: Runs, best: Finalist, found: Sequence[Finalist]) -> tuple[str, ...]:
    """Name the finalists that may be equally fast."""
    others = (each for each in found if each is not best and not each.is_baseline and not each.problem)
    equal = [each.schedule.name for each in others if not clearly_faster(runs, best, each)]
    return (f"it is statistically indistinguishable from {', '.join(equal)} by their step times",) if equal else ()


@dataclass(frozen=True, slots=True)
class _Culprits:
    """Persistent stragglers: ranks that cause nearly all waiting, in nearly all steps.

    Args:
        ranks: The ranks.
        share: Share of all waiting that they cause.
        steps: Share of the steps with collectives in which they cause nearly all waiting.
        waited_s: Mean seconds per step that a rank waits for them. Some of it may overlap with computing.
    """

    ranks: tuple[int, ...]
    share: float
    steps: float
    waited_s: float


def culprits(scenario: Scenario, schedule: Schedule) -> _Culprits | None:
    """Return the few ranks that others nearly always wait for, the persistent stragglers, if there are any.

    Args:
        scenario: Simulated for at most 200 steps, with its own seed.
        schedule: The schedule of the simulation.
    """
    short = scenario.changed(steps=min(scenario.steps, _LOOKED_AT_STEPS), schedules=(schedule,))
    if ranks_are_alike(build(short, schedule)):
        return None
    trace = simulate(short)
    caused_s = attribute_waiting(trace).caused_s
    by_rank_s = caused_s.sum(axis=0)
    total_s = float(caused_s.sum())
    if not total_s:
        return None
    order = np.argsort(-by_rank_s, kind="stable")
    n_needed = int(np.searchsorted(np.cumsum(by_rank_s[order]), _MOST_OF_THE_WAITING * total_s)) + 1
    ranks = np.sort(order[:n_needed])
    in_steps_s = caused_s.sum(axis=1)
    is_theirs = (in_steps_s > 0) & (caused_s[:, ranks].sum(axis=1) >= _MOST_OF_THE_WAITING * in_steps_s)
    collectives = [each.steps for each in occurrences(trace.plan) if isinstance(each.op, COLLECTIVES)]
    steps = float(is_theirs[np.unique(np.concatenate(collectives))].mean())
    if n_needed > max(1, _FEW_RANKS * len(by_rank_s)) or steps < _NEARLY_ALL_STEPS:
        return None
    for_them_s = float(by_rank_s[ranks].sum())
    return _Culprits(tuple(ranks.tolist()), for_them_s / total_s, steps, for_them_s / caused_s.size)


def _why_not(runs: Runs, baseline: Finalist, best: Finalist) -> tuple[str, ...]:
    """Explain with the simulations why nothing is gained."""
    if best.is_baseline:
        return ("no other candidate keeps to the constraints",)
    first = f"the choice of the search, {named(best.schedule)}, is {_factor(best)} times as fast"
    return (first, *_too_few(runs, best), *_waits(runs, baseline, best), _shares(runs.scenario, baseline))


def _too_few(runs: Runs, best: Finalist) -> tuple[str, ...]:
    """Say which number to increase to be sure of a gain, if there seems to be one."""
    if not _may_gain(best.row.speedup, _interval(best)):
        return ()
    if shares := best.row.of(RANGES):
        from simdist.studies.uncertainty import causes

        return tuple(causes(runs.scenario, {best.schedule.name: shares}))
    if runs.recording is None:
        return (f"{best.row.seeds} seeds are too few to be sure of that: write more with --seeds",)
    return (best.problem or f"{runs.recording.n_steps} recorded steps are too few to be sure of that: record more",)


def _waits(runs: Runs, baseline: Finalist, best: Finalist) -> tuple[str, ...]:
    """Name the ranks that the others wait for, under both schedules, if they are nearly always the same."""
    is_another_job = (best.micro_batches, best.checkpoint) != (baseline.micro_batches, baseline.checkpoint)
    if is_another_job or (runs.recording and runs.recording.n_steps < _FEW_STEPS):
        return ()
    found = culprits(runs.scenario, baseline.schedule)
    if found is None or found.waited_s < _NOTICEABLE * baseline.row.step_s:
        return ()
    still = culprits(runs.scenario, best.schedule)
    plural, them = ("s", "them") if len(found.ranks) > 1 else ("", "it")
    straggler = f"persistent straggler{plural}, rank{plural} {', '.join(map(str, found.ranks))}"
    waits = f"{format_seconds(found.waited_s)} per step for {them} with {baseline.schedule.name}"
    stays = f", {format_seconds(still.waited_s)} with {best.schedule.name}" if still else ""
    return (
        f"{'' if plural else 'a '}{straggler}: {found.share:.0%} of the waiting is for {them}, in {found.steps:.0%} of "
        f"the steps; a rank waits {waits}{stays}",
    )


def _shares(scenario: Scenario, baseline: Finalist) -> str:
    """State the largest possible gain. For an imported job, use its traces, which tell gaps from computing."""
    if scenario.imported and scenario.imported.verdict:
        return scenario.imported.verdict
    row = baseline.row
    shares = (("exposed communication", row.comm_s), ("waiting", row.wait_s), ("input", row.io_s), ("host", row.host_s))
    parts = ", ".join(f"{name} {time_s / row.step_s:.1%}" for name, time_s in shares)
    return f"of a step of {baseline.schedule.name}, computing is {row.compute_s / row.step_s:.1%}, {parts}"
