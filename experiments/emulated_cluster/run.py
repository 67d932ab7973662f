"""Is the simulator right about a cluster? One machine plays it: every byte between ranks crosses a real, slow link.

    python experiments/emulated_cluster/run.py            run everything here and print the tables (root; 12 minutes)
    python experiments/emulated_cluster/run.py --write    also record the results, and write the tables into the README
    python experiments/emulated_cluster/run.py --tables   print the tables of the recorded results (anybody; seconds);
                                                          with --write, write them into the README again
    python experiments/emulated_cluster/run.py --keep D   leave plans and traces in D; --compare D compares them again
    python experiments/emulated_cluster/run.py --tiny     a few steps of everything on fewer ranks, to see that it works
    ... --links ordinary                                  frames of 1500 bytes, usual packets, buckets, scheduler
    ... --study communication                             instead of averages and stragglers: rings, a torus, parameter
                                                          servers and top-k (5 minutes)
    ... --study sharded                                   sharded models: copies on 1, 2, 4 and 8 ranks (9 minutes)
    ... --study sharded-short                             the same with little computation (3 minutes)
    ... --study links                                     links that misbehave, and flows of another job (10 minutes)
    ... --study checkpoints                               checkpoints that all ranks write to one server (5 minutes)
    ... --study storage                                   real files from a real NFS server, read, decoded and kept as
                                                          each policy says (10 minutes)

Each node is a network namespace behind a link of limited rate. The links are calibrated once, on the first shape, with
collectives only. Then every run is predicted from the calibrated links, and performed. The second shape has another
number of nodes and another rate; there, nothing is calibrated again.

Nothing else should compute on the machine meanwhile.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import network
import nfs
import sink
import study
from study import HERE, RESULTS, STUDIES, SYNCHRONIZATION, Result, Shape, Study

from simdist.report import markdown_table, print_tables, write_tables
from simdist.scenario import Cluster, dump_cluster, load_cluster

TIMEOUT_S = 1800.0
STORAGE = "storage"


@contextmanager
def emulated(shape: Shape, chosen: Study) -> Iterator[tuple[list[network.Node], list[str]]]:
    """Give the nodes of a shape, and what `python -m real` is to be told of them."""
    servers_bps = [study.rate_bps(chosen.server_rate)] if chosen.server_rate else []
    rate_bps = study.rate_bps(shape.rate)
    links = _links(chosen)
    with network.cluster(
        shape.nodes, rate_bps=rate_bps, servers_bps=servers_bps, fair=chosen.fair, links=links
    ) as machines:
        nodes = machines[: shape.nodes]
        if chosen.server_rate:
            with sink.serve(machines[-1]) as url:
                yield nodes, ["--checkpoints", url]
        else:
            yield nodes, ["--links", "links:perform"] if chosen.fair else []


def _links(chosen: Study) -> network.Links:
    return network.ORDINARY if chosen.links == "ordinary" else network.TUNED


def _launch(chosen: Study, nodes: list[network.Node], shape: Shape, command: list[str]) -> None:
    scheduling = _links(chosen).scheduling
    texts = network.launch(nodes, shape.ranks_per_node, command, timeout_s=TIMEOUT_S, scheduling=scheduling)
    print("\n".join(filter(None, texts)))


def calibrate(chosen: Study, shape: Shape, folder: Path, *, tiny: bool) -> Cluster:
    """Measure the links of a shape, with collectives only."""
    path = folder / "cluster.yaml"
    budget = ["--budget", "4 s", "--max-size", "8 MB"] if tiny else ["--budget", "40 s", "--max-size", "16 MB"]
    command = [
        "-m",
        "real.calibrate",
        "-o",
        str(path),
        "--links",
        "line",
        "--rate",
        shape.rate,
        "--min-size",
        "64 kB",
        *budget,
    ]
    with emulated(shape, chosen) as (nodes, _):
        _launch(chosen, nodes, shape, command)
    return load_cluster(path)


def perform(chosen: Study, shape: Shape, cluster: Cluster, folder: Path) -> list[Result]:
    """Predict and perform everything on a shape."""
    folders = study.write_runs(folder / shape.name, cluster, chosen)
    with emulated(shape, chosen) as (nodes, options):
        command = [str(HERE / "with_servers.py"), "real", *map(str, folders), "--timeout", "60", *options]
        _launch(chosen, nodes, shape, command)
    return study.compare(folders, cluster, chosen)


def run(chosen: Study, *, tiny: bool, write: bool, keep: Path | None = None) -> dict[Shape, list[Result]]:
    """Calibrate, predict, perform and compare."""
    with tempfile.TemporaryDirectory() if keep is None else nullcontext(keep) as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        shapes = chosen.tiny_shapes if tiny else chosen.shapes
        calibrated = calibrate(chosen, shapes[0], Path(folder), tiny=tiny)
        results = {}
        for shape in shapes:
            cluster = study.cluster_of(shape, calibrated, chosen)
            results[shape] = perform(chosen.tiny() if tiny else chosen, shape, cluster, Path(folder))
            print(study.summary(shape, results[shape]), flush=True)
    if write:
        record(chosen, calibrated, results)
    return results


def compare_again(chosen: Study, folder: Path, *, write: bool) -> dict[Shape, list[Result]]:
    """Compare what an earlier run has left in a folder."""
    calibrated = load_cluster(folder / "cluster.yaml")
    results = {}
    for shape in chosen.shapes:
        folders = sorted((folder / shape.name).iterdir(), key=lambda path: int(path.name))
        results[shape] = study.compare(folders, study.cluster_of(shape, calibrated, chosen), chosen)
    if write:
        record(chosen, calibrated, results)
    return results


def record(chosen: Study, calibrated: Cluster, results: dict[Shape, list[Result]]) -> None:
    """Write what the pages show, and what the tests hold them to."""
    RESULTS.mkdir(exist_ok=True)
    study.cluster_path(chosen).write_text(dump_cluster(calibrated), encoding="utf-8")
    for shape, rows in results.items():
        study.save(chosen, shape, rows)


def tables(chosen: Study, results: dict[Shape, list[Result]]) -> dict[str, str]:
    """Return every table of a study in the README by its name there."""
    overview = "\n".join(f"* {study.summary(shape, rows)}" for shape, rows in results.items())
    found = {f"{chosen.name} overview": overview}
    for shape, rows in results.items():
        found[f"{chosen.name} makespans {shape.name}"] = markdown_table(study.makespan_table(rows, chosen.sleeps_s))
        if chosen.links == "ordinary":
            continue
        found[f"{chosen.name} kinds {shape.name}"] = markdown_table(study.kinds_table(rows))
        if any(row.held for row in rows):
            found[f"{chosen.name} held {shape.name}"] = markdown_table(study.held_table(rows))
    return found


def study_storage(arguments: argparse.Namespace) -> int:
    """Run the study of storage, or print its tables."""
    import storage_run  # it takes torch and Pillow; tables of the other studies take neither
    import storage_tables

    if arguments.json:
        raise SystemExit("--study storage has no --json: see the files in results/")
    if arguments.tables:
        found = storage_run.recorded_tables()
    elif arguments.compare:
        found = storage_run.compare_again(arguments.compare, write=arguments.write)
    elif missing := nfs.missing():
        print(f"skipped: {missing}")
        return 0
    elif arguments.tiny:
        with tempfile.TemporaryDirectory() as folder:
            found = {"storage": markdown_table(storage_tables.epoch_table(storage_run.run_tiny(Path(folder))))}
    else:
        found = storage_run.run(write=arguments.write, keep=arguments.keep)
    if arguments.write:
        storage_run.write_page(found)
    print_tables(found)
    return 0


def main() -> int:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the results, and write the tables into README.md")
    parser.add_argument("--tables", action="store_true", help="print the tables of the recorded results")
    parser.add_argument("--tiny", action="store_true", help="a few steps of everything")
    parser.add_argument("--keep", type=Path, help="leave plans and traces in this folder")
    parser.add_argument("--compare", type=Path, help="compare again what --keep has left in this folder")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--study",
        choices=[*(name for name in STUDIES if not name.endswith("-ordinary")), STORAGE],
        default=SYNCHRONIZATION.name,
        help="what to run",
    )
    parser.add_argument("--links", choices=["tuned", "ordinary"], default="tuned", help="frames, buckets, scheduler")
    arguments = parser.parse_args()
    if arguments.tiny and arguments.write:
        parser.error("--tiny is no result: leave out --write")
    if arguments.study == STORAGE:
        return study_storage(arguments)
    if arguments.links == "ordinary" and f"{arguments.study}-ordinary" not in STUDIES:
        parser.error(f"--study {arguments.study} has tuned links only")
    chosen = STUDIES[f"{arguments.study}-ordinary" if arguments.links == "ordinary" else arguments.study]
    missing = network.missing()
    if missing and not (arguments.tables or arguments.compare):
        print(f"skipped: {missing}")
        return 0
    if arguments.tables:
        results = {shape: study.recorded(chosen, shape) for shape in chosen.shapes}
    elif arguments.compare:
        results = compare_again(chosen, arguments.compare, write=arguments.write)
    else:
        results = run(chosen, tiny=arguments.tiny, write=arguments.write, keep=arguments.keep)
    if arguments.write:
        write_tables(HERE / "README.md", tables(chosen, results))
    if arguments.json:
        print(json.dumps({shape.name: [each.row() for each in rows] for shape, rows in results.items()}))
    else:
        print_tables(tables(chosen, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
