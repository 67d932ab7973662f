"""`simdist comms`."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.cli.tables import Column, count, seconds, table_text
from simdist.runs import run_directory
from simdist.settings.units import format_share
from simdist.traces.collectives import CollectiveRow, collective_rows, waiting_share


def _in(unit: float, spec: str) -> Callable[[float], str]:
    """Return what prints a number in a unit, or a dash for NaN."""
    return lambda value: "-" if math.isnan(value) else format(value / unit, "," + spec)


_COLUMNS = (
    Column("operation", "op"),
    Column("group"),
    Column("algorithm"),
    Column("size (B)", "nbytes", form=count),
    Column("count", form=count),
    Column("type"),
    Column("trace"),
    Column("calls", form=count),
    Column("time (us)", "time_s", form=_in(1e-6, ".1f")),
    Column("algbw (GB/s)", "algbw_Bps", form=_in(1e9, ".2f")),
    Column("busbw (GB/s)", "busbw_Bps", form=_in(1e9, ".2f")),
    Column("wait, median", "wait_median_s", form=seconds),
    Column("mean", "wait_mean_s", form=seconds),
    Column("share", "wait_share", form=format_share),
)


@dataclass(frozen=True)
class _TraceCollectives:
    """Achievements of the collectives of one trace."""

    which: str
    path: Path
    source: str
    rows: tuple[CollectiveRow, ...]


@click.command("comms")
@common.run
@common.schedule
@common.options
def command(session: common.Session, name: str, *, schedule: str | None) -> None:
    """Show what collectives achieved.

    RUN holds a simulated trace, a measured one, or both. The columns are those of nccl-tests; what members waited for
    the last one is shown apart.
    """
    with session.bar() as bar:
        bar.update("read the traces", 0, None)
        runs = inputs.usable(session, name, inputs.read_runs(name, schedule), _no_trace)
        done = [(run, list(_collectives(run))) for run in runs]
    document = {"run": name, "rows": [_document(run, traces) for run, traces in done]}
    session.result(document, "\n\n\n".join(_text(run, traces) for run, traces in done))


def _collectives(run: run_directory.RunDirectory) -> Iterator[_TraceCollectives]:
    for which, file in zip(("simulated", "measured"), run_directory.TRACES.values(), strict=True):
        path = run.path / file
        if path.exists():
            trace = run_directory.read_trace(path, plan=run.plan)
            yield _TraceCollectives(which, path, trace.source, collective_rows(trace))


def _no_trace(run: run_directory.RunDirectory) -> str | None:
    if any((run.path / file).exists() for file in run_directory.TRACES.values()):
        return None
    if (run.path / run_directory.PARTIAL).exists():
        early = f"only {run_directory.PARTIAL}, of a run that ended early"
        return f"holds no trace yet; {early}: run it again, or `simdist simulate {run.path}`"
    return f"holds no trace yet; `simdist simulate {run.path}` writes one"


def _document(run: run_directory.RunDirectory, traces: Sequence[_TraceCollectives]) -> dict[str, object]:
    return {
        "schedule": run.plan.name,
        "run": str(run.path),
        "digest": run.plan.digest(),
        **common.picked(run.plan, "world_size", steps="n_steps"),
        "traces": [
            {
                "which": each.which,
                "trace": str(each.path),
                "source": each.source,
                "wait_share": waiting_share(each.rows),
                "collectives": [_record(row) for row in each.rows],
            }
            for each in traces
        ],
    }


def _record(row: CollectiveRow) -> dict[str, object]:
    achieved = {name: value for name, value in asdict(row).items() if name != "kind"}
    return asdict(row.kind) | achieved | {"wait_share": row.wait_share}


def _text(run: run_directory.RunDirectory, traces: Sequence[_TraceCollectives]) -> str:
    plan = run.plan
    sources = "; ".join(_source(each) for each in traces)
    about = f"{plan.name}: {plan.world_size:,} ranks, {plan.n_steps:,} steps; {sources}"
    if not any(each.rows for each in traces):
        return f"{about}\nno collectives were done"
    kinds = dict.fromkeys(row.kind for each in traces for row in each.rows)
    records = [  # the same kind in both traces stands together
        _record(row)
        | {"group": str(kind.group), "type": f"{kind.dtype}{' + index' if kind.sparse else ''}", "trace": each.which}
        for kind in kinds
        for each in traces
        for row in each.rows
        if row.kind == kind
    ]
    title = "time: median over calls, from when the last member is ready; wait: of members for the last one"
    return "\n".join([about, table_text(title, _COLUMNS, records), *map(_waiting_text, traces)])


def _source(each: _TraceCollectives) -> str:
    return each.source if each.source.startswith(each.which) else f"{each.which}: {each.source}"


def _waiting_text(each: _TraceCollectives) -> str:
    return (
        f"waiting, {each.which}: {format_share(waiting_share(each.rows))} of the time that ranks spent in collectives"
    )
