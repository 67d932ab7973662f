"""Output of measurements: the table of nccl-tests, raw results, files."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from real.calibration.calls import CallTimes
from real.calibration.data import DataRates
from real.calibration.line_fit import predicted_task_s
from real.calibration.tables import Measurement
from simdist.errors import RunError, ScenarioError
from simdist.files import replacing
from simdist.scenario import Cluster
from simdist.settings.units import format_Bps, format_seconds
from simdist.traces.collectives import bus_factor

_COLUMNS = ("op", "group", "size", "count", "time", "p10", "p90", "algbw", "busbw", "model")
_UNITS = ("", "", "(B)", "(elements)", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "(us)")


def text(measurements: Sequence[Measurement], cluster: Cluster | None) -> str:
    """Return the measurements in the columns of nccl-tests, and the prediction of the cost model on `cluster`."""
    by_op = sorted(measurements, key=lambda each: (each.task.op, each.task.where, each.task.count))
    rows = [_COLUMNS, _UNITS, *(_row(each, cluster) for each in by_op)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def data_text(rates: DataRates) -> str:
    """Return the measured rates of the levels of storage, one line each."""
    peers = "" if rates.request_s is None else f"; a request of another node {format_seconds(rates.request_s)}"
    of_each = [rates.storage_Bps, rates.client_Bps, rates.disk_read_Bps, rates.disk_write_Bps, rates.memory_Bps]
    storage, client, read, write, memory = map(format_Bps, of_each)
    return "\n".join(
        [
            f"storage: {storage} by all ranks, {client} by one node; {format_seconds(rates.open_s)} a file besides",
            f"disk: {read} read, {write} written by one node; {format_seconds(rates.disk_s)} a file besides",
            f"memory: {memory} by one node{peers}",
            f"decoding: {format_seconds(rates.decode_s)} a sample; a workload states it as `decode`",
        ]
    )


def raw_results(
    measurements: Sequence[Measurement],
    *,
    source: str,
    nodes: int,
    ranks_per_node: int,
    gap_s: float,
    rates: DataRates | None = None,
    calls: CallTimes | None = None,
) -> str:
    """Return the seconds of each repetition as JSON.

    Columns:
        source (str): Program, machines, time.
        nodes, ranks_per_node (int): Machines, and ranks of one.
        gap_s (float): Time without traffic before each repetition.
        data (object): Only with `--data`: "Rates of storage".
        calls (object): Unless `--ops` leaves out all_reduce: "Times of a call".
        measurements (list): "A measured collective".

    Columns of measurements:
        op (str): Collective, or `sendrecv`: half of a message there and back.
        where (str): Members: `node`, `one per node`, `all per node`, `world`, `pair in node`, `pair of nodes`.
        n_members (int): Members of a group.
        nbytes (int): Size of the whole, as in nccl-tests.
        seconds (list): Time of every repetition (float), in every group that took part.
        median_s (float): Their median.
    """
    rows = [
        {
            "op": each.task.op,
            "where": each.task.where,
            "n_members": each.task.n_members,
            "nbytes": each.task.nbytes,
            "seconds": each.seconds,
            "median_s": each.median_s,
        }
        for each in measurements
    ]
    head = {"source": source, "nodes": nodes, "ranks_per_node": ranks_per_node, "gap_s": gap_s}
    of_data = {"data": asdict(rates)} if rates else {}
    of_calls = {"calls": asdict(calls)} if calls else {}
    return json.dumps(head | of_data | of_calls | {"measurements": rows}, indent=1) + "\n"


def check_writable(path: Path, *, force: bool) -> None:
    """Check before the measurement that a file can be written.

    Raises:
        ScenarioError: The file exists already.
        RunError: The folder does not exist, or is not writable.
    """
    if path.exists() and not force:
        raise ScenarioError(f"{path}: is there already; replace it with --force, or choose another name")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise RunError(f"{path}: cannot be written: {path.parent} is no folder that this user may write to")


def write_file(path: Path, content: str, *, force: bool) -> None:
    """Write a file atomically; an interruption leaves the old file or none.

    Raises:
        ScenarioError: Another process wrote the file in the meantime.
        RunError: The file cannot be written.
    """
    check_writable(path, force=force)
    with replacing(path) as part:
        part.write_text(content, encoding="utf-8")


def _row(each: Measurement, cluster: Cluster | None) -> tuple[str, ...]:
    task = each.task
    algbw_Bps = task.nbytes / each.median_s
    busbw_Bps = algbw_Bps * bus_factor(task.op, task.n_members)
    model_s = predicted_task_s(cluster, task) if cluster else None
    return (
        task.op,
        f"{task.where} ({task.n_members})",
        str(task.nbytes),
        str(task.count),
        *(f"{1e6 * seconds:.1f}" for seconds in (each.median_s, each.quantile_s(0.1), each.quantile_s(0.9))),
        *(f"{Bps / 1e9:.4g}" for Bps in (algbw_Bps, busbw_Bps)),
        "" if model_s is None else f"{1e6 * model_s:.1f}",
    )
