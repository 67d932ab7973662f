"""Perform what `storage.py` plans: build the cluster and the file server, calibrate, read for real.

calibrate    on the first shape: links by collectives, levels of storage by reading some files
perform      every case on a shape: predicted from that, and run by `python with_servers.py real RUN --data nfs://...`
interrupt    one case, during whose first epoch the server is away
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import network
import nfs
import numpy as np
import storage
import storage_tables
from data_set import SampleSet, generate
from storage import CALIBRATED, CASES, HERE, INTERRUPTED, SHAPES, TINY, Calibrated, Case, Outage, Result, Shape

from real.cli import PARTS
from real.data.tallies import tally_path
from simdist.errors import RunError
from simdist.plan.index import INDEX
from simdist.report import markdown_table, write_tables
from simdist.scenario import load, load_cluster
from simdist.scenario.data import read_sizes

WITH_SERVERS = str(HERE / "with_servers.py")
TIMEOUT_S = 1800.0
AWAY_S = 10.0
N_LOADS_BEFORE = 8  # that the first rank has done when the server goes away
N_EPOCHS_TINY = 2
_CLUSTER, _RAW = "cluster.yaml", "raw.json"
_PATIENCE_S = 120.0
_POLL_S = 0.02


def run(*, write: bool, keep: Path | None) -> dict[str, str]:
    """Calibrate, predict, perform and compare; return the tables of the README."""
    with tempfile.TemporaryDirectory() if keep is None else nullcontext(keep) as given:
        folder = Path(given)
        files = data_set(folder / "files", storage.FILES)
        calibrated = calibrate(folder / "calibration", files)
        results = {}
        for shape in SHAPES:
            results[shape] = perform(folder / shape.name, shape, CASES[shape], calibrated, files)
            print(storage_tables.summary(shape, results[shape]), flush=True)
        usual = next(each for each in results[CALIBRATED] if each.case == INTERRUPTED.name)
        outage = interrupt(folder / "outage", usual, calibrated, files)
    if write:
        storage.save(calibrated, results, outage)
    return tables(results, outage)


def compare_again(folder: Path, *, write: bool) -> dict[str, str]:
    """Compare what an earlier run has left in a folder; return the tables of the README."""
    calibrated = _calibrated(folder / "calibration", folder / "files")
    results = {
        shape: [storage.compare(folder / shape.name / case.folder, case) for case in CASES[shape]] for shape in SHAPES
    }
    usual = next(each for each in results[CALIBRATED] if each.case == INTERRUPTED.name)
    outage = _outage(folder / "outage" / INTERRUPTED.folder, usual)
    if write:
        storage.save(calibrated, results, outage)
    return tables(results, outage)


def run_tiny(folder: Path) -> list[Result]:
    """Perform a few steps of a case on a small cluster, with rates as stated; return how they compare."""
    files = data_set(folder / "files", storage.TINY_FILES)
    stated = load(HERE / "storage.yaml")
    calibrated = Calibrated(stated.cluster, stated.workload.decode_s, read_sizes(files / INDEX))
    return perform(folder / "runs", TINY, [INTERRUPTED], calibrated, files, n_epochs=N_EPOCHS_TINY)


def recorded_tables() -> dict[str, str]:
    """Return the tables of the recorded results."""
    return tables({shape: storage.recorded(shape) for shape in SHAPES}, storage.recorded_outage())


def tables(results: dict[Shape, list[Result]], outage: Outage) -> dict[str, str]:
    """Return every table of the study in the README by its name there."""
    found = {
        "storage overview": "\n".join(f"* {storage_tables.summary(shape, rows)}" for shape, rows in results.items())
    }
    for shape, rows in results.items():
        found[f"storage epochs {shape.name}"] = markdown_table(storage_tables.epoch_table(rows))
    found["storage knobs"] = markdown_table(storage_tables.knob_table(results[CALIBRATED]))
    found["storage outage"] = f"* {storage_tables.outage_line(outage)}"
    return found


def write_page(found: dict[str, str]) -> None:
    """Write the tables into the README."""
    write_tables(HERE / "README.md", found)


@contextmanager
def emulated(shape: Shape, served: Path) -> Iterator[tuple[list[network.Node], nfs.Server]]:
    """Give the nodes of a shape, and the server of a folder."""
    rates = [storage.rate_bps(shape.server_rate)]
    with (
        network.cluster(shape.nodes, rate_bps=storage.rate_bps(shape.rate), servers_bps=rates) as (*nodes, machine),
        nfs.serve(served, machine) as server,
    ):
        yield nodes, server


def data_set(folder: Path, samples: SampleSet) -> Path:
    """Return the folder of a data set, made if it is not there."""
    if not (folder / INDEX).exists():
        generate(folder, samples)
    return folder


def calibrate(folder: Path, files: Path, *, budget_s: float = 40.0) -> Calibrated:
    """Measure links with collectives, and levels of storage by reading some files: no plan, no step."""
    folder.mkdir(parents=True, exist_ok=True)
    shape, written = CALIBRATED, ["-o", str(folder / _CLUSTER), "--json", str(folder / _RAW), "--force"]
    command = [WITH_SERVERS, "real.calibrate", *written]
    command += ["--links", "line", "--rate", shape.rate, "--min-size", "256 kB", "--budget", f"{budget_s} s"]
    command += ["--readers", str(INTERRUPTED.readers), "--sample-size", f"{storage.SAMPLE_NBYTES} B"]
    with emulated(shape, files) as (nodes, server):
        command += ["--data", server.url(), "--cache", str(folder / "cache")]
        _launch(nodes, shape, command)
    return _calibrated(folder, files)


def _calibrated(folder: Path, files: Path) -> Calibrated:
    decode_s = json.loads((folder / _RAW).read_text(encoding="utf-8"))["data"]["decode_s"]
    return Calibrated(load_cluster(folder / _CLUSTER), decode_s, read_sizes(files / INDEX))


def perform(
    folder: Path,
    shape: Shape,
    cases: Sequence[Case],
    calibrated: Calibrated,
    files: Path,
    *,
    n_epochs: int = storage.N_EPOCHS,
) -> list[Result]:
    """Predict and perform cases on a shape.

    A warm case is performed twice: the first time it finds nothing, and leaves what the second one finds.
    """
    reading, sleeping = [], []
    for case in cases:
        scenario = storage.scenario_of(case, shape, calibrated, n_epochs=n_epochs)
        before = [folder / f"before-{case.folder}"] if case.start == "warm" and not case.sleeps else []
        for path in (*before, folder / case.folder):
            storage.write_run(path, scenario)
            (sleeping if case.sleeps else reading).append(path)
    with emulated(shape, files) as (nodes, server):
        commands = [_reading(reading, server, folder), ["-m", "real", *map(str, sleeping)]]
        for command in (command for runs, command in zip((reading, sleeping), commands, strict=True) if runs):
            _launch(nodes, shape, command)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return [storage.compare(folder / case.folder, case) for case in cases]


def interrupt(folder: Path, usual: Result, calibrated: Calibrated, files: Path) -> Outage:
    """Perform a case while the server is away during its first epoch."""
    path = folder / INTERRUPTED.folder
    storage.write_run(path, storage.scenario_of(INTERRUPTED, CALIBRATED, calibrated))
    read_through_outage(path, CALIBRATED, files, away_s=AWAY_S, n_loads_before=N_LOADS_BEFORE)
    return _outage(path, usual)


def _outage(path: Path, usual: Result) -> Outage:
    usual_s = tuple(epoch.measured_s for epoch in usual.epochs)
    return Outage(AWAY_S, usual_s, storage.compare(path, INTERRUPTED))


def read_through_outage(
    path: Path, shape: Shape, files: Path, *, away_s: float, n_loads_before: int, options: Sequence[str] = ()
) -> None:
    """Perform a run, and take the server away once the first rank has done a few loads.

    Args:
        path: Of the run.
        shape: Of the cluster.
        files: The files that are served.
        away_s: For how long it is away.
        n_loads_before: Loads of the first rank.
        options: Of `python -m real`, besides those of the data.
    """
    with emulated(shape, files) as (nodes, server), ThreadPoolExecutor(1) as beside:
        away = beside.submit(_go_away, server, path, away_s, n_loads_before)
        _launch(nodes, shape, [*_reading([path], server, path.parent), *options])
        away.result()


def _go_away(server: nfs.Server, path: Path, away_s: float, n_loads_before: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while _n_loads_done(path) < n_loads_before:
        if time.monotonic() > deadline_s:
            raise RunError(f"{path}: its first rank has not done {n_loads_before} loads within {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    server.stop()
    time.sleep(away_s)
    server.start()


def _n_loads_done(path: Path) -> int:
    """Return how many loads the first rank of a run has done."""
    with suppress(OSError, EOFError, ValueError):  # not there yet, or not whole
        return int(np.load(tally_path(path / PARTS, 0)).any(axis=1).sum())
    return 0


def _reading(runs: Sequence[Path], server: nfs.Server, folder: Path) -> list[str]:
    """Return the command that performs runs with the files of a server."""
    data = ["--data", server.url(), "--cache", str(folder / "cache")]
    return [WITH_SERVERS, "real", *map(str, runs), *data, "--timeout", "60"]


def _launch(nodes: Sequence[network.Node], shape: Shape, command: Sequence[str]) -> None:
    print("\n".join(network.launch(nodes, shape.ranks_per_node, command, timeout_s=TIMEOUT_S)), flush=True)
