"""What `simdist validate` prints for people."""

import math
from collections.abc import Iterator

from simdist.cli.tables import table_text
from simdist.settings.units import format_seconds
from simdist.studies.ranking import Summary
from simdist.studies.validation import Validation

_MOST_RANKS = 16  # lines of a table of ranks; JSON has all


def validation_text(found: Validation, *, world_size: int, n_planned_steps: int, machines: str) -> str:
    """Return the comparison of one run.

    Args:
        found: What to print.
        world_size: Ranks.
        n_planned_steps: Steps of the plan.
        machines: What was simulated, in words.
    """
    steps = f"{found.n_steps:,} {'' if found.n_steps == n_planned_steps else f'of {n_planned_steps:,} '}steps"
    about = f"{found.schedule}: {world_size:,} ranks, {steps}"
    makespans = f"simulated {format_seconds(found.simulated_s)}, measured {format_seconds(found.measured_s)}"
    return "\n".join(
        [
            f"{about}; measured: {found.source}; simulated: {machines}",
            f"makespan: {makespans}, error {_percent(found.error)}",
            "",
            _kinds_text(found),
            "",
            *_injections_text(found),
            _blames_text(found),
            "",
            *_blame_sentences(found),
        ]
    )


def _kinds_text(found: Validation) -> str:
    header = ("operation", "stream", "group", "count", "simulated", "measured", "error", "by instance", "|by instance|")
    rows = [
        [
            kind.op,
            kind.stream,
            kind.group,
            f"{kind.count:,}",
            format_seconds(kind.simulated_mean_s),
            format_seconds(kind.measured_mean_s),
            _percent(kind.error),
            _percent(kind.signed_instance_error),
            _percent(kind.instance_error, signed=False),
        ]
        for kind in found.kinds
    ]
    title = "means and their error; by instance: medians of the error and of |error|"
    return table_text(title, header, rows, words=("operation", "stream", "group"))


def _injections_text(found: Validation) -> Iterator[str]:
    for each in found.injections:
        yield (
            f"injected on {each.channel}: {each.count:,} delays, drawn {format_seconds(each.drawn_s)} in all, measured "
            f"{format_seconds(each.measured_s)}; largest difference {1e3 * each.difference_s:+.3g} ms "
            f"(step {each.step}, rank {each.rank})"
        )
    if found.injections:
        yield ""


def _blames_text(found: Validation) -> str:
    worst = sorted(found.blames, key=lambda blame: -max(blame.simulated_s, blame.measured_s))[:_MOST_RANKS]
    rows = [
        [str(blame.rank), format_seconds(blame.simulated_s), format_seconds(blame.measured_s)]
        for blame in sorted(worst, key=lambda blame: blame.rank)
    ]
    n_ranks = len(found.blames)
    title = "all ranks" if n_ranks <= _MOST_RANKS else f"{_MOST_RANKS} of {n_ranks} ranks: those blamed most"
    return table_text(title, ("rank", "waiting caused, simulated", "measured"), rows, words=())


def _blame_sentences(found: Validation) -> Iterator[str]:
    yield f"waiting: {found.verdict}"
    if not math.isnan(found.overlap):
        correlation = "" if math.isnan(found.correlation) else f"; correlation over ranks {found.correlation:.2f}"
        share = _percent(found.overlap, signed=False)
        yield f"waiting: {share} of the measured is blamed on the same rank in the same step{correlation}"


def summary_text(summary: Summary) -> str:
    """Return the comparison of several schedules."""
    header = ("schedule", "simulated", "measured", "error", "speed-up, simulated", "measured")
    rows = [
        [
            row.schedule,
            format_seconds(row.simulated_s),
            format_seconds(row.measured_s),
            _percent(row.error),
            f"{row.simulated_speedup:.2f}",
            f"{row.measured_speedup:.2f}",
        ]
        for row in summary.rows
    ]
    title = f"makespans; speed-up over {summary.baseline}"
    table = table_text(title, header, rows, words=("schedule",))
    errors = f"error: median {_percent(summary.median_error, signed=False)}, worst {_percent(summary.worst_error)}"
    return f"{table}\norder: {summary.order.verdict}\n{errors}"


def _percent(share: float, *, signed: bool = True) -> str:
    if math.isnan(share):
        return "-"
    return f"{100 * share:{'+' if signed else ''}.1f} %"
