"""What `simdist whatif` prints for people."""

from collections.abc import Iterator
from typing import assert_never

import numpy as np

from simdist.cli.data_text import percent
from simdist.cli.tables import seconds_in_state, table_text
from simdist.settings.units import format_seconds
from simdist.studies.resampling import WORTHWHILE
from simdist.whatif.gains import Gain, Gains
from simdist.whatif.pattern import Pattern
from simdist.whatif.slowdown import Slowdown

_MOST_ROWS = 10  # of a table of ranks, nodes or steps; JSON has all
_ROUNDING_S = 1e-12
_NOTABLE = 0.02  # share of the loss
_SLOW = 1.1  # slowdown of a slow step


def whatif_text(
    schedule: str, source: str, found: Slowdown, spread: Pattern, compared: Gains | None, *, n_planned_steps: int
) -> str:
    """Return the analysis of a job, and what other schedules would gain.

    Args:
        schedule: Label of the schedule that the job has.
        source: Who wrote the trace.
        found: The analysis.
        spread: How the loss is spread over ranks and steps.
        compared: Other schedules, if they were compared.
        n_planned_steps: Steps of the trace.
    """
    return "\n".join(
        [
            *_heading(schedule, source, found, n_planned_steps),
            f"stragglers: {spread_sentence(found, spread)}",
            *_fixed(found),
            _slow_steps(found),
            "",
            "Each line below stands for itself: slowdown if only this is as it was, and all else ideal.",
            "",
            _kinds_text(found),
            "",
            _ranks_text(found),
            *_nodes_text(found),
            "",
            _steps_text(found),
            *(_gains_text(found, spread, compared) if compared else ()),
        ]
    )


def _heading(schedule: str, source: str, found: Slowdown, n_planned_steps: int) -> Iterator[str]:
    last = found.first_step + found.n_steps - 1
    steps = f"{found.n_steps:,} steps" if found.n_steps == n_planned_steps else f"steps {found.first_step} to {last}"
    yield f"{schedule}: {found.world_size:,} ranks, {steps}; {source}"
    lost = "nothing is lost" if found.lost_share < 5e-4 else f"{percent(found.lost_share)} of the time is lost"
    yield (
        f"slowdown {found.slowdown:.2f}: {format_seconds(found.replayed_s)} per step, "
        f"{format_seconds(found.ideal_s)} without stragglers; {lost}"
    )
    unexplained_s = found.replayed_s - found.explained_s
    if unexplained_s > _ROUNDING_S:
        yield (
            f"replayed {format_seconds(found.explained_s)} per step, traced {format_seconds(found.traced_s)}: "
            f"{percent(unexplained_s / found.replayed_s)} is in no operation of the plan; it is kept where it was, as "
            f"`between operations`"
        )


def spread_sentence(found: Slowdown, spread: Pattern) -> str:
    """Say in a sentence whether stragglers are persistent or transient, and where they are late."""
    where = f"mostly on {_channel_text(found.channels[0].name)}"
    ranks = _ranks_named(found.slowest_ranks)
    always = "the same ranks in every step (persistent)"
    sometimes = "now one rank, now another (transient)"
    together = "all ranks at once in some steps (simultaneous)"
    shares = {always: spread.persistent, sometimes: spread.transient, together: spread.simultaneous}
    match spread.shape:
        case "even":
            return "hardly any: the job is about as fast as it would be without"
        case "persistent" | "transient" | "simultaneous":
            ordered = sorted(shares, key=lambda what: -shares[what])
            told = [f"{percent(shares[what])} by {what}" for what in ordered if shares[what] > _NOTABLE]
            first = f"; first of all by {ranks}" if spread.shape == "persistent" else ""
            return f"of the loss {', '.join(told)}{first}; {where}"
        case "unknown":
            return f"{ranks} most of all; one step or one rank cannot tell whether it is always so; {where}"
        case unknown:
            assert_never(unknown)


def _channel_text(channel: str) -> str:
    return {"host": "the host", "compute": "the device", "io": "input and output"}.get(channel, channel)


def _ranks_named(ranks: tuple[int, ...]) -> str:
    some = ", ".join(map(str, ranks[:_MOST_ROWS])) + (", ..." if len(ranks) > _MOST_ROWS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}"


def _fixed(found: Slowdown) -> Iterator[str]:
    if found.fixed_by_ranks is None:
        return
    text = (
        f"with {_ranks_named(found.slowest_ranks)} as fast as is typical, {percent(found.fixed_by_ranks)} of the loss"
    )
    if found.fixed_by_node is not None and len(found.node_slowdowns) > 1 and found.ranks_per_node > 1:
        text += f"; with node {found.slowest_node}, {percent(found.fixed_by_node)}"
    yield f"would be gone: {text}"


def _slow_steps(found: Slowdown) -> str:
    n_slow = int((found.step_slowdowns > _SLOW).sum())
    return f"slow steps: {n_slow:,} of {found.n_steps:,} take more than {_SLOW} times the ideal"


def _kinds_text(found: Slowdown) -> str:
    costly = [part for part in found.kinds if part.lost_s > _ROUNDING_S]
    if not costly:
        return "kinds of operation: none is slower than typical"
    rows = [[part.name, part.channel, f"{part.slowdown:.2f}", seconds_in_state(part.lost_s)] for part in costly]
    header = ("operation", "channel", "slowdown", "lost per step")
    return table_text("kinds of operation", header, rows, words=("operation", "channel"))


def _ranks_text(found: Slowdown) -> str:
    order = np.argsort(-found.rank_slowdowns, kind="stable")[:_MOST_ROWS]
    slow_steps = (found.rank_step_slowdowns > _SLOW).sum(axis=0)
    rows = [
        [
            str(rank),
            str(rank // found.ranks_per_node),
            f"{found.rank_slowdowns[rank]:.2f}",
            seconds_in_state(float(found.rank_slowdowns[rank] - 1) * found.ideal_s),
            f"{slow_steps[rank]:,}",
        ]
        for rank in order.tolist()
    ]
    title = "all ranks" if found.world_size <= _MOST_ROWS else f"the slowest {_MOST_ROWS} of {found.world_size} ranks"
    return table_text(title, ("rank", "node", "slowdown", "lost per step", "slow steps"), rows, words=())


def _nodes_text(found: Slowdown) -> Iterator[str]:
    n_nodes = len(found.node_slowdowns)
    if n_nodes == 1 or found.ranks_per_node == 1:
        return
    order = np.argsort(-found.node_slowdowns, kind="stable")[:_MOST_ROWS]
    rows = [
        [
            str(node),
            f"{found.node_slowdowns[node]:.2f}",
            seconds_in_state(float(found.node_slowdowns[node] - 1) * found.ideal_s),
        ]
        for node in order.tolist()
    ]
    title = "all nodes" if n_nodes <= _MOST_ROWS else f"the slowest {_MOST_ROWS} of {n_nodes} nodes"
    yield ""
    yield table_text(title, ("node", "slowdown", "lost per step"), rows, words=())


def _steps_text(found: Slowdown) -> str:
    slowdowns = np.nan_to_num(found.step_slowdowns, nan=0.0)
    order = np.argsort(-slowdowns, kind="stable")[:_MOST_ROWS]
    rows = [
        [
            str(found.first_step + step),
            format_seconds(float(found.step_s[step])),
            format_seconds(float(found.ideal_step_s[step])),
            f"{slowdowns[step]:.2f}",
            str(int(np.argmax(found.rank_step_s[step]))),
        ]
        for step in order.tolist()
    ]
    title = "all steps" if found.n_steps <= _MOST_ROWS else f"the slowest {_MOST_ROWS} of {found.n_steps:,} steps"
    return table_text(title, ("step", "time", "ideal", "slowdown", "slowest rank"), rows, words=())


def _gains_text(found: Slowdown, spread: Pattern, compared: Gains) -> Iterator[str]:
    rows = [[compared.baseline, format_seconds(compared.baseline_step_s), "1.00", ""]]
    rows += [[row.schedule, format_seconds(row.step_s), f"{row.speedup:.2f}", _interval(row)] for row in compared.rows]
    header = ("schedule", "step time", "speed-up", "95 %")
    yield ""
    yield table_text("schedules", header, rows, words=("schedule",))
    yield _runs_text(compared)
    yield from dict.fromkeys(f"no interval: {row.problem}" for row in compared.rows if row.problem)
    yield verdict_sentence(found, spread, compared)


def _runs_text(compared: Gains) -> str:
    plural = "s" * (compared.n_runs > 1)
    runs = f"{compared.n_runs:,} run{plural} of {compared.n_steps:,} steps or a few more, in whole periods"
    if recording := compared.recording:
        blocks = f"blocks of {recording.block_steps} of {recording.n_steps:,} recorded steps"
        return f"{runs}, put together from {blocks}; 95 %: what that many recorded steps leave open"
    if compared.drawn == "random":
        return f"{runs}, disturbed anew; 95 % of the runs lie in the interval"
    return f"one run of {compared.n_steps:,} steps: nothing is random"


def _interval(row: Gain) -> str:
    return f"{row.interval[0]:.2f} to {row.interval[1]:.2f}" if row.interval else "too few" if row.problem else ""


def verdict_sentence(found: Slowdown, spread: Pattern, compared: Gains) -> str:
    """Say in a sentence which schedule is the fastest for the job and which surely gains, or why none does."""
    fastest, best = compared.fastest, compared.best
    if fastest is None:
        return f"stay with {compared.baseline}: no schedule is faster; {_reason(found, spread)}"
    first = f"fastest: {fastest.schedule}, {fastest.speedup:.2f} times as fast as {compared.baseline}"
    if fastest is best:
        return first + (f" ({_interval(best)})" if best.interval else "")
    doubt = fastest.problem or f"{_interval(fastest)}{_from_what(compared)}"
    if best:
        interval = f" ({_interval(best)}{_from_what(compared)})" if best.interval else ""
        return f"{first}, but not surely ({doubt}); surely faster: {best.schedule}, {best.speedup:.2f} times{interval}"
    if (compared.recording or fastest.problem) and fastest.speedup >= WORTHWHILE:
        return f"stay with {compared.baseline} until something is surely faster; {first}, but not surely ({doubt})"
    return f"stay with {compared.baseline}: no schedule is surely faster; {_reason(found, spread)}"


def _from_what(compared: Gains) -> str:
    return f" from {compared.recording.n_steps:,} recorded steps" if compared.recording else ""


def _reason(found: Slowdown, spread: Pattern) -> str:
    match spread.shape:
        case "persistent":
            who = _ranks_named(found.slowest_ranks)
            verb = "is" if len(found.slowest_ranks) == 1 else "are"
            return f"{who} {verb} late in every step, and whoever averages over all ranks waits for that"
        case "simultaneous":
            return "all ranks are late in the same steps, and there is nobody who could go on meanwhile"
        case "even":
            return "there are hardly any stragglers, and averaging less often saves too little communication"
        case "transient" | "unknown":
            return "what is saved by waiting less often is not more than what chance makes of it"
        case unknown:
            assert_never(unknown)
