"""`simdist comms`."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from simdist.cli import inputs
from simdist.cli.session import Session
from simdist.cli.tables import table_text
from simdist.errors import ScenarioError
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.run_directory import RunDirectory
from simdist.settings.units import format_seconds
from simdist.traces.collectives import CollectiveRow, collective_rows, waiting_share

_TRACES = {"simulated": run_directory.SIMULATED, "measured": run_directory.REAL}


@dataclass(frozen=True)
class _Collectives:
    """What the collectives of one trace achieved."""

    which: str
    path: Path
    source: str
    rows: tuple[CollectiveRow, ...]


def comms(session: Session, name: str, *, label: str | None) -> None:
    """Print what collectives achieved, simulated and measured.

    Args:
        session: This run of the command line.
        name: A run directory, or a directory with several.
        label: Only this schedule.
    """
    with ProgressBar(sys.stderr) as bar:
        bar.update("read the traces", 0, None)
        runs = _with_traces(session, name, inputs.read_runs(name, label))
        done = [(run, _collectives(run)) for run in runs]
    document = {"run": name, "rows": [_document(run, traces) for run, traces in done]}
    session.result(document, "\n\n\n".join(_text(run, traces) for run, traces in done))


def _with_traces(session: Session, name: str, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Return the runs that hold a trace; tell of the others."""
    empty = [run for run in runs if not any((run.path / file).exists() for file in _TRACES.values())]
    if len(empty) == len(runs):
        raise ScenarioError(f"{name}: holds no trace yet; {_how(empty[0])}")
    for run in empty:
        session.say(f"warning: {run.path}: holds no trace yet; left out; {_how(run)}")
    return [run for run in runs if run not in empty]


def _how(run: RunDirectory) -> str:
    if (run.path / run_directory.PARTIAL).exists():
        return (
            f"only {run_directory.PARTIAL}, of a run that ended early: run it again, or `simdist simulate {run.path}`"
        )
    return f"`simdist simulate {run.path}` writes one"


def _collectives(run: RunDirectory) -> list[_Collectives]:
    paths = {which: run.path / file for which, file in _TRACES.items()}
    traces = {which: run_directory.read_trace(path, plan=run.plan) for which, path in paths.items() if path.exists()}
    return [_Collectives(which, paths[which], trace.source, collective_rows(trace)) for which, trace in traces.items()]


def _document(run: RunDirectory, traces: Sequence[_Collectives]) -> dict[str, object]:
    return {
        "schedule": run.plan.name,
        "run": str(run.path),
        "digest": run.plan.digest(),
        "steps": run.plan.n_steps,
        "world_size": run.plan.world_size,
        "traces": [
            {
                "which": each.which,
                "trace": str(each.path),
                "source": each.source,
                "wait_share": waiting_share(each.rows),
                "collectives": [_row_document(row) for row in each.rows],
            }
            for each in traces
        ],
    }


def _row_document(row: CollectiveRow) -> dict[str, object]:
    achieved = {name: value for name, value in asdict(row).items() if name != "kind"}
    return asdict(row.kind) | achieved | {"wait_share": row.wait_share}


_HEADER = (
    *("operation", "group", "algorithm", "size (B)", "count", "type", "trace", "calls"),
    *("time (us)", "algbw (GB/s)", "busbw (GB/s)", "wait, median", "mean", "share"),
)


def _text(run: RunDirectory, traces: Sequence[_Collectives]) -> str:
    plan = run.plan
    sources = "; ".join(_source(each) for each in traces)
    about = f"{plan.name}: {plan.world_size:,} ranks, {plan.n_steps:,} steps; {sources}"
    if not any(each.rows for each in traces):
        return f"{about}\nno collectives were done"
    rows = [cells for _, cells in sorted(_cells(traces), key=lambda item: item[0])]
    title = "time: median over calls, from when the last member is ready; wait: of members for the last one"
    table = table_text(title, _HEADER, rows, words=("operation", "group", "algorithm", "type", "trace"))
    return "\n".join([about, table, *map(_waiting_text, traces)])


def _source(each: _Collectives) -> str:
    return each.source if each.source.startswith(each.which) else f"{each.which}: {each.source}"


def _cells(traces: Sequence[_Collectives]) -> list[tuple[tuple[int, int], list[str]]]:
    """Return the cells of every row, to be sorted so that the same kind in both traces stands together."""
    kinds = list(dict.fromkeys(row.kind for each in traces for row in each.rows))
    return [
        ((kinds.index(row.kind), number), _row_cells(row, each.which))
        for number, each in enumerate(traces)
        for row in each.rows
    ]


def _row_cells(row: CollectiveRow, which: str) -> list[str]:
    kind = row.kind
    return [
        kind.op,
        str(kind.group),
        kind.algorithm,
        f"{kind.nbytes:,}",
        f"{kind.count:,}",
        f"{kind.dtype}{' + index' if kind.sparse else ''}",
        which,
        f"{row.calls:,}",
        _number(row.time_s, 1e-6, ".1f"),
        _number(row.algbw_Bps, 1e9, ".2f"),
        _number(row.busbw_Bps, 1e9, ".2f"),
        format_seconds(row.wait_median_s),
        format_seconds(row.wait_mean_s),
        _percent(row.wait_share),
    ]


def _waiting_text(each: _Collectives) -> str:
    return f"waiting, {each.which}: {_percent(waiting_share(each.rows))} of the time that ranks spent in collectives"


def _number(value: float, unit: float, spec: str) -> str:
    return "-" if math.isnan(value) else format(value / unit, "," + spec)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"
