"""Links of a cluster, calibrated with tables that nccl-tests measured."""

from dataclasses import dataclass, replace
from pathlib import Path

from simdist.errors import ScenarioError, naming_file
from simdist.runs.nccl_tests import (
    NcclTable,
    fitted,
    parse_nccl_table,
    placed,
    simulated_s,
    tells_ring_step,
    with_launches,
    with_ring_step,
)
from simdist.scenario import Cluster
from simdist.settings.base import picked
from simdist.settings.units import format_nbytes
from simdist.studies.columns import Column
from simdist.studies.tables import table_text
from simdist.traces.collectives import bus_factor


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"


def _error(share: float) -> str:
    return f"{share:+.0%}"


def _GBps(rate: float) -> str:
    return f"{rate / 1e9:.2f}"


_COLUMNS = (
    Column("size", "nbytes", form=format_nbytes),
    Column("measured (us)", "measured_s", form=_us),
    Column("busbw (GB/s)", "busbw_Bps", form=_GBps),
    Column("simulated (us)", "simulated_s", form=_us),
    Column("error", "error", form=_error),
    Column("calibrated (us)", "calibrated_s", form=_us),
    Column("error then", "calibrated_error", form=_error),
)


@dataclass(frozen=True)
class CalibratedLinks:
    """A cluster that was calibrated with a table of nccl-tests.

    Args:
        file: The table.
        table: What is in it, with its machines.
        before: The cluster as given, with the machines of the measurement.
        after: The calibrated cluster.
        rows: Times of each size, see `_rows`.
        notes: What the table does not tell.
    """

    file: Path
    table: NcclTable
    before: Cluster
    after: Cluster
    rows: list[dict[str, object]]
    notes: list[str]

    def document(self) -> dict[str, object]:
        """Return the calibration as JSON.

        Columns:
            file, op (str): Output of nccl-tests; collective or `sendrecv`.
            nodes, gpus_per_node (int): Machines, and ranks of one.
            rows (list): "A size of a table".
            notes (list): What the table does not show.
        """
        about = {"file": str(self.file), **picked(self.table, "op"), **picked(self.before, "nodes", "gpus_per_node")}
        return {**about, **picked(self, "rows", "notes")}

    def text(self) -> str:
        """Return the measured and the simulated times as a table."""
        title = f"{self.table.op} of {self.before.nodes} x {self.before.gpus_per_node} GPUs"
        return table_text(title, _COLUMNS, self.rows)


def calibrate_links(
    file: Path,
    cluster: Cluster,
    *,
    op: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    earlier: CalibratedLinks | None = None,
) -> CalibratedLinks:
    """Calibrate a cluster with a table of nccl-tests.

    The largest buffer of the table tells the efficiency of the slower link, the smallest one a latency. All other rows
    show how well the cluster predicts. A table of sendrecv_perf becomes the table of the link. With an earlier table of
    rings over another number of GPUs, the largest buffers of both tell efficiency and step of a ring.

    Args:
        file: Output of a program of nccl-tests.
        cluster: What the table leaves open.
        op: The collective; None for the one that the output names.
        nodes: Machines of the measurement, if the output does not list its ranks.
        gpus_per_node: Ranks of each, likewise.
        earlier: The calibration with the table before, if there is one.

    Raises:
        ScenarioError: The file holds no such table, or it contradicts itself or the machines.
    """
    with naming_file(file, "read", ScenarioError):
        text = file.read_text(encoding="utf-8", errors="replace")
    table = parse_nccl_table(text, name=str(file), op=op)
    before = placed(table, cluster, nodes=table.nodes or nodes, gpus_per_node=table.gpus_per_node or gpus_per_node)
    table = replace(table, nodes=before.nodes, gpus_per_node=before.gpus_per_node)
    if earlier and tells_ring_step(earlier.table, table):
        after, notes = with_ring_step((earlier.table, table), before)
    else:
        after, notes = fitted(table, with_launches(table, before))
    source = f"{after.source} Calibrated with {table.op} of nccl-tests, {file.name}.".strip()
    rows = _rows(table, before, after)
    return CalibratedLinks(file, table, before, after.model_copy(update={"source": source}), rows, notes)


def _rows(table: NcclTable, before: Cluster, after: Cluster) -> list[dict[str, object]]:
    """Return the sizes of a table as JSON.

    Columns:
        nbytes (int): Size of the whole buffer.
        measured_s, busbw_Bps (float): Measured out of place.
        simulated_s, error, calibrated_s, calibrated_error (float): With the cluster as given, then calibrated.
    """
    n = 2 if table.op == "sendrecv" else before.world_size
    found: list[dict[str, object]] = []
    for nbytes, measured_s in table.rows:
        ours_s = simulated_s(before, table.op, nbytes)
        then_s = simulated_s(after, table.op, nbytes)
        factor = 1.0 if table.op == "sendrecv" else bus_factor(table.op, n)
        found.append(
            {
                "nbytes": nbytes,
                "measured_s": measured_s,
                "busbw_Bps": factor * nbytes / measured_s,
                "simulated_s": ours_s,
                "error": ours_s / measured_s - 1,
                "calibrated_s": then_s,
                "calibrated_error": then_s / measured_s - 1,
            }
        )
    return found
