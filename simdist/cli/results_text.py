"""The tables of `simdist results`, in the units of people."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simdist.cli.tables import (
    factor_with_interval,
    lead_with_interval,
    seconds_in_state,
    seconds_with_interval,
    table_text,
)
from simdist.sweep.selection import Fastest, short_names
from simdist.sweep.table import Result, Table, shown_text, source_text

_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class _Column:
    """A column for people: its header, and what stands in a row."""

    header: str
    cell: Callable[[Result], str]
    is_words: bool = False


def results_text(table: Table, *, limit: int | None) -> str:
    """Return the table, its first rows if there are more than `limit`."""
    results = table.results
    if not results:
        return "no rows"
    found = [*_of_points(table), *_of_schedules(table)]
    shown = results[:limit]
    title = f"{_count(len(results), 'row')}, {_sources(table)}{_over(table)}"
    cells = [[column.cell(each) for column in found] for each in shown]
    words = [column.header for column in found if column.is_words]
    return table_text(title, [column.header for column in found], cells, words=words) + _more(len(results) - len(shown))


def fastest_text(table: Table, best: Sequence[Fastest], *, limit: int | None) -> str:
    """Return the table of the fastest schedules, its first rows if there are more than `limit`."""
    if not best:
        return "no rows"
    of_points = _of_points(table)
    header = [*(column.header for column in of_points), "fastest", "step time", "speed-up", "next", "lead", "clear"]
    shown = best[:limit]
    cells = [[column.cell(each.result) for column in of_points] + _fastest_cells(each) for each in shown]
    words = [*(column.header for column in of_points if column.is_words), "fastest", "next", "clear"]
    n_points = len({each.result.place for each in best})
    what = f"the fastest schedule at {_count(n_points, 'point')}, {_sources(table)}"
    title = f"{what}{_over(table)}; lead: over the next one"
    text = table_text(title, header, cells, words=words) + _more(len(best) - len(shown))
    return "\n\n".join([text, *_wins(best)])


def failed_text(table: Table, *, limit: int | None) -> str:
    """Return why rows failed, the reasons of most rows first, and which did, the first if there are more than `limit`.

    Args:
        table: Of rows that failed.
        limit: Of rows, and of reasons.
    """
    results = table.results
    if not results:
        return "no rows failed"
    reasons = Counter(_failure(each) for each in results).most_common()
    numbers = {reason: str(number) for number, (reason, _) in enumerate(reasons, start=1)}
    title = f"{_count(len(results), 'row')} failed, for {_count(len(reasons), 'reason')}"
    why = [[numbers[reason], f"{n_rows:,}", reason] for reason, n_rows in reasons[:limit]]
    found = [*_of_points(table), _Column("schedule", lambda each: each.schedule, is_words=True)]
    found.append(_Column("reason", lambda each: numbers[_failure(each)]))
    shown = results[:limit]
    cells = [[column.cell(each) for column in found] for each in shown]
    words = [column.header for column in found if column.is_words]
    where = table_text("where", [column.header for column in found], cells, words=words)
    first = table_text(title, ["reason", "rows", "error"], why, words=["error"])
    return f"{first}\n\n{where}{_more(len(results) - len(shown))}"


def _wins(best: Sequence[Fastest]) -> list[str]:
    """Return a line for each source: which schedule is the fastest at how many points."""
    sources = dict.fromkeys(each.result.source for each in best)
    lines = []
    for source in sources:
        wins = [each for each in best if each.result.source == source]
        clear = Counter(each.result.schedule for each in wins if each.is_clear)
        is_known = any(each.is_clear is not None for each in wins)
        counts = Counter(each.result.schedule for each in wins).most_common()
        clearly = {label: f", {clear[label]:,} clearly" if is_known else "" for label, _ in counts}
        each_one = (f"{label} at {_count(n, 'point')}{clearly[label]}" for label, n in counts)
        what = f" {source_text(source)}" if len(sources) > 1 else ""
        lines.append(f"fastest{what}: {'; '.join(each_one)}")
    return ["\n".join(lines)]


def _sources(table: Table) -> str:
    """Say who took so long: simulated, measured or both."""
    return " and ".join(sorted({source_text(each.source) for each in table.results}, reverse=True))


def _fastest_cells(each: Fastest) -> list[str]:
    lead = _NOTHING if each.lead is None else lead_with_interval(each.lead, each.lead_ci95)
    clear = _NOTHING if each.is_clear is None else ("yes" if each.is_clear else "no")
    return [
        each.result.schedule,
        _step_time(each.result),
        _speedup(each.result),
        each.next_one or _NOTHING,
        lead,
        clear,
    ]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _over(table: Table) -> str:
    over = f"; speed-up over {table.baseline or 'the baseline'}"
    return over + (", 95 % confidence" if any(each.n_seeds > 1 for each in table.results) else "")


def _more(n: int) -> str:
    return f"\n\n{n:,} more row{'s' * (n > 1)}: --all shows them, --csv FILE writes them" if n else ""


def _of_points(table: Table) -> list[_Column]:
    """Return the columns that tell points apart."""
    names = short_names(table.varied)
    found = [_Column("folder", lambda each: each.folder, is_words=True)] if "folder" in table.extras else []
    if {each.point for each in table.results} != {"."}:  # as runs are that are not in folders
        found.append(_Column("point", lambda each: str(each.point), is_words=_has_names(table)))
    if "case" in table.extras:
        found.append(_Column("case", lambda each: each.case, is_words=True))
    found += [_varied(column, name) for column, name in zip(table.varied, names, strict=True)]
    if len({each.source for each in table.results}) > 1:
        found.append(_Column("source", lambda each: source_text(each.source), is_words=True))
    return found


def _has_names(table: Table) -> bool:
    return any(isinstance(each.point, str) for each in table.results)


def _varied(column: str, name: str) -> _Column:
    def cell(result: Result) -> str:
        choice = result.choices.get(column)
        return shown_text(choice) if choice else _NOTHING

    return _Column(name, cell)


def _of_schedules(table: Table) -> list[_Column]:
    """Return the columns of results."""
    found = [_Column("schedule", lambda each: each.schedule, is_words=True)]
    if len({each.n_seeds for each in table.results}) > 1:  # as of a sweep and of runs of it
        found.append(_Column("seeds", lambda each: str(each.n_seeds)))
    found += [
        _Column("step time", _step_time),
        _Column("speed-up", _speedup),
        _Column("compute", lambda each: _seconds(each.row.compute_s if each.row else None)),
        _Column("comm", lambda each: _seconds(each.row.comm_s if each.row else None)),
        _Column("wait", lambda each: _seconds(each.row.wait_s if each.row else None)),
        _Column("io", lambda each: _seconds(each.row.io_s if each.row else None)),
        _Column("host", lambda each: _seconds(each.row.host_s if each.row else None)),
    ]
    if "epoch_first_s" in table.extras:
        found.append(_Column("first epoch", lambda each: _seconds(each.epochs_s[0] if each.epochs_s else None)))
        found.append(_Column("last epoch", lambda each: _seconds(each.epochs_s[-1] if each.epochs_s else None)))
    if "error_ratio" in table.extras:
        found.append(_Column("sim. error", _error_ratio))
    if table.n_failed:
        found.append(_Column("failed", lambda each: each.failed, is_words=True))
    return found


def _error_ratio(result: Result) -> str:
    return _NOTHING if result.error_ratio is None else f"{result.error_ratio:+.1%}"


def _failure(result: Result) -> str:
    return f"{result.failed}: {result.error}"


def _step_time(result: Result) -> str:
    return seconds_with_interval(result.row.step_s, result.row.step_s_ci95) if result.row else _NOTHING


def _speedup(result: Result) -> str:
    if result.row is None or not result.has_baseline:
        return _NOTHING
    return factor_with_interval(result.row.speedup, result.row.speedup_ci95)


def _seconds(seconds: float | None) -> str:
    return _NOTHING if seconds is None else seconds_in_state(seconds)
