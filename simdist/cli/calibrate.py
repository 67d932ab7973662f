"""`simdist calibrate`.

Columns:
    file (str): Output of nccl-tests.
    op (str): The collective, or `sendrecv`.
    nodes (int): Machines that it was measured on.
    gpus_per_node (int): Ranks of a machine.
    rows (list): [Times of each size](#a-size-of-a-table).
    notes (list): What the table does not tell.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simdist.cli import common, inputs
from simdist.errors import ScenarioError, naming_file
from simdist.scenario import Cluster, dump_cluster
from simdist.settings.units import format_nbytes
from simdist.studies.columns import Column
from simdist.studies.tables import table_text

if TYPE_CHECKING:
    from simdist.runs.nccl_tests import NcclTable


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


@click.command("calibrate")
@click.option(
    "--from-nccl-tests", "file", type=common.path, required=True, metavar="FILE", help="Output of nccl-tests."
)
@click.option("--cluster", type=common.path, required=True, metavar="FILE", help="What FILE leaves open; or a preset.")
@click.option(
    "--op", type=click.Choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "sendrecv"])
)
@click.option("--nodes", type=click.IntRange(min=1), help="Of the measurement, if FILE does not list its ranks.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Likewise.")
@click.option("-o", "--output", type=common.path, metavar="FILE", help="Write the calibrated cluster.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@common.options
def command(
    session: common.Session,
    *,
    file: Path,
    cluster: Path,
    op: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    output: Path | None,
    force: bool,
) -> None:
    """Calibrate a cluster from tables that were measured.

    The largest buffer of the table tells the efficiency of the slower link, the smallest one a latency. All other rows
    show how well the cluster predicts. A table of sendrecv_perf becomes the table of the link.
    """
    from simdist.runs import nccl_tests

    if output and output.exists() and not force:
        raise click.UsageError(f"-o {output}: exists; choose another file, or --force")
    table = nccl_tests.read_table(_text(file), name=str(file), op=op)
    before = nccl_tests.placed(table, inputs.read_cluster(str(cluster)), nodes=nodes, gpus_per_node=gpus_per_node)
    after, notes = nccl_tests.fitted(table, nccl_tests.with_launches(table, before))
    rows = list(_rows(table, before, after))
    for note in notes:
        session.say(f"note: {note}")
    title = f"{table.op} of {before.nodes} x {before.gpus_per_node} GPUs"
    document = {"file": str(file), "op": table.op, "nodes": before.nodes, "gpus_per_node": before.gpus_per_node}
    session.result({**document, "rows": rows, "notes": notes}, table_text(title, _COLUMNS, rows))
    if output:
        source = f"{after.source} Calibrated with {table.op} of nccl-tests, {file.name}.".strip()
        inputs.save_text(output, dump_cluster(after.model_copy(update={"source": source})))
        session.wrote(output)


def _text(file: Path) -> str:
    with naming_file(file, "read", ScenarioError):
        return file.read_text(encoding="utf-8", errors="replace")


def _rows(table: "NcclTable", before: Cluster, after: Cluster) -> "list[dict[str, object]]":
    """Return the sizes of a table as JSON.

    Columns:
        nbytes (int): Size of the whole buffer.
        measured_s (float): Seconds out of place.
        busbw_Bps (float): Bus bandwidth that was measured.
        simulated_s (float): Seconds with the cluster as given.
        error (float): `simulated_s / measured_s - 1`.
        calibrated_s (float): Seconds with the calibrated cluster.
        calibrated_error (float): The error then.
    """
    from simdist.runs.nccl_tests import simulated_s
    from simdist.traces.collectives import bus_factor

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
