"""What the collectives of runs achieved, in the columns of nccl-tests: answers as JSON and as text."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from simdist.runs import run_directory
from simdist.settings.base import picked
from simdist.settings.units import format_share
from simdist.studies.columns import Column, count, seconds
from simdist.studies.tables import table_text
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


@dataclass(frozen=True)
class RunCollectives:
    """What the collectives of a run achieved.

    Args:
        run: The run.
        traces: Its simulated and its measured trace, where present.
    """

    run: run_directory.RunDirectory
    traces: tuple[_TraceCollectives, ...]

    def document(self) -> dict[str, object]:
        """Return the collectives of a run as JSON.

        Columns:
            schedule, run, digest (str): Label, directory, digest of the plan.
            steps, world_size (int): Steps and ranks.
            traces (list): "The collectives of a trace", simulated and measured, where present.

        Columns of traces:
            which (str): `simulated` or `measured`.
            trace, source (str): File and its program.
            wait_share (float or null): Share of waiting in the time of collectives.
            collectives (list): "A kind of collective".
        """
        plan = self.run.plan
        return {
            "schedule": plan.name,
            "run": str(self.run.path),
            "digest": plan.digest(),
            **picked(plan, "world_size", steps="n_steps"),
            "traces": [
                {
                    "which": each.which,
                    "trace": str(each.path),
                    "source": each.source,
                    "wait_share": waiting_share(each.rows),
                    "collectives": [_record(row) for row in each.rows],
                }
                for each in self.traces
            ],
        }

    def text(self) -> str:
        """Return the same as a table."""
        plan = self.run.plan
        sources = "; ".join(_source(each) for each in self.traces)
        about = f"{plan.name}: {plan.world_size:,} ranks, {plan.n_steps:,} steps; {sources}"
        if not any(each.rows for each in self.traces):
            return f"{about}\nno collectives were done"
        kinds = dict.fromkeys(row.kind for each in self.traces for row in each.rows)
        records = [  # the same kind in both traces stands together
            _record(row)
            | {"group": str(kind.group), "type": f"{kind.dtype}{' + index' if kind.sparse else ''}"}
            | {"trace": each.which}
            for kind in kinds
            for each in self.traces
            for row in each.rows
            if row.kind == kind
        ]
        title = "time: median over calls, from when the last member is ready; wait: of members for the last one"
        return "\n".join([about, table_text(title, _COLUMNS, records), *map(_waiting_text, self.traces)])


def run_collectives(run: run_directory.RunDirectory) -> RunCollectives:
    """Return what the collectives of a run achieved, in each of its traces.

    Raises:
        TraceError: A trace is damaged, or of another plan.
    """
    return RunCollectives(run, tuple(_collectives(run)))


def no_trace(run: run_directory.RunDirectory) -> str | None:
    """Say what to do if a run holds no trace; None if it does."""
    if any((run.path / file).exists() for file in run_directory.TRACES.values()):
        return None
    if (run.path / run_directory.PARTIAL).exists():
        early = f"only {run_directory.PARTIAL}, of a run that ended early"
        return f"holds no trace yet; {early}: run it again, or `simdist simulate {run.path}`"
    return f"holds no trace yet; `simdist simulate {run.path}` writes one"


def _collectives(run: run_directory.RunDirectory) -> Iterator[_TraceCollectives]:
    for which, file in zip(("simulated", "measured"), run_directory.TRACES.values(), strict=True):
        path = run.path / file
        if path.exists():
            trace = run_directory.read_trace(path, plan=run.plan)
            yield _TraceCollectives(which, path, trace.source, collective_rows(trace))


def _record(row: CollectiveRow) -> dict[str, object]:
    """Return a kind of collective as JSON.

    Columns:
        op, algorithm, dtype (str): Name, such as `all_reduce`; algorithm of the plan; type of elements.
        group (object): `size` and `stride` (int, distance between members; null if groups are listed).
        nbytes (int): Size of the whole, with indices.
        count (int): Elements. For all_gather and reduce_scatter, of one rank.
        sparse (bool): Elements have indices.
        calls (int): Calls that all members finished.
        time_s (float): From the arrival of the last member to the end, median.
        algbw_Bps, busbw_Bps (float or null): As in nccl-tests.
        wait_median_s, wait_mean_s (float): Waiting for the last member, over calls and members.
        transfer_total_s, wait_total_s (float): Sum of calls and of waiting, over members.
        wait_share (float or null): Share of waiting.
    """
    achieved = {name: value for name, value in asdict(row).items() if name != "kind"}
    return asdict(row.kind) | achieved | {"wait_share": row.wait_share}


def _source(each: _TraceCollectives) -> str:
    return each.source if each.source.startswith(each.which) else f"{each.which}: {each.source}"


def _waiting_text(each: _TraceCollectives) -> str:
    return (
        f"waiting, {each.which}: {format_share(waiting_share(each.rows))} of the time that ranks spent in collectives"
    )
