"""`simdist chakra export` and `simdist chakra import`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simdist.chakra.export import Export, refuse_size, write
from simdist.chakra.files import find_traces
from simdist.chakra.importing import ChakraJob, fit_cluster, import_traces, scenario_of, scenario_text
from simdist.chakra.operations import cautions
from simdist.cli import inputs
from simdist.cli.links import read_cluster
from simdist.cli.session import Session
from simdist.cost import price
from simdist.errors import RunError, ScenarioError
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.scenario import Recorded, Scenario
from simdist.settings.units import format_nbytes, format_seconds


@dataclass(frozen=True, slots=True)
class _Written:
    """An export on disk."""

    label: str
    export: Export
    folder: Path
    nbytes: int

    def document(self) -> dict[str, object]:
        plan = self.export.plan
        return {
            "schedule": self.label,
            "digest": plan.digest(),
            "world_size": plan.world_size,
            "steps": self.export.n_steps,
            "traces": str(self.folder / f"{self.label}.*.et"),
            "groups": str(self.folder / f"{self.label}.json"),
            "size": self.nbytes,
            "cautions": cautions(plan),
        }

    def text(self) -> str:
        plan, prefix = self.export.plan, self.folder / self.label
        count = f"{plan.world_size:,} ranks, {self.export.n_steps:,} steps, {format_nbytes(self.nbytes)}"
        return f"{self.label}: {count}: {prefix}.<rank>.et, process groups in {prefix}.json"


def export(session: Session, name: str, *, output: Path, label: str | None, n_steps: int | None, force: bool) -> None:
    """Write plans as execution traces, one file per rank.

    Args:
        session: This run of the command line.
        name: A scenario, or run directories.
        output: The folder to write to.
        label: Of the one schedule to take.
        n_steps: The first so many steps; None takes all.
        force: Replace traces that are there, and write more than is usual.
    """
    written = []
    with ProgressBar(sys.stderr) as bar:
        for prefix, each in _exports(session, name, label, n_steps):
            if not force:
                refuse_size(each)
            for caution in cautions(each.plan):
                session.say(f"warning: {prefix}: {caution}")

            def progress(n_ranks: int, prefix: str = prefix, world_size: int = each.plan.world_size) -> None:
                bar.update(f"write {prefix}", n_ranks, world_size)

            nbytes = write(each, output, prefix, force=force, progress=progress)
            session.saved.append(str(output / f"{prefix}.*.et"))
            written.append(_Written(prefix, each, output, nbytes))
    session.result({"exports": [each.document() for each in written]}, "\n".join(each.text() for each in written))


def _exports(session: Session, name: str, label: str | None, n_steps: int | None) -> Iterator[tuple[str, Export]]:
    """Yield the label and the export of every plan that is asked for."""
    if Path(name).is_dir():
        for run in inputs.read_runs(name, label):
            _tell_draw(session, run.scenario)
            costs = price(run.plan, run.scenario.cluster, run.scenario.workload)
            n_taken = _n_steps(name, n_steps, run.plan.n_steps)
            yield run.scenario.schedules[0].name, Export(run.plan, costs, run.scenario.workload, run.delays, n_taken)
        return
    scenario = inputs.read_scenario(session, name)
    drawn = delays(scenario)
    _tell_draw(session, scenario)
    for schedule in inputs.choose(scenario, label, where=name):
        with inputs.naming(f"{name}: {schedule.name}"):
            built = build(scenario, schedule)
        n_taken = _n_steps(name, n_steps, built.plan.n_steps)
        yield schedule.name, Export(built.plan, built.costs, scenario.workload, drawn, n_taken)


def _tell_draw(session: Session, scenario: Scenario) -> None:
    """Say so if delays were recorded, but are not written as they were."""
    recorded = (each for each in scenario.disturbances if isinstance(each, Recorded))
    block_steps = next((each.resample_steps for each in recorded if each.resample_steps), None)
    if block_steps is not None:
        session.say(
            f"note: {scenario.name}: recorded delays are written as seed {scenario.seed} draws them, in blocks of "
            f"{block_steps:,} steps; without resample_steps they are written as recorded"
        )


def _n_steps(name: str, asked: int | None, n_steps: int) -> int:
    if asked is not None and asked > n_steps:
        raise ScenarioError(f"{name}: --steps {asked:,} are more than its {n_steps:,} steps")
    return n_steps if asked is None else asked


def import_(
    session: Session, names: tuple[Path, ...], *, output: Path, cluster: str, n_steps: int | None, force: bool
) -> None:
    """Read execution traces of data-parallel training, one per rank, and write a scenario.

    Args:
        session: This run of the command line.
        names: A folder, the prefix of the files' names, or files.
        output: The scenario to write.
        cluster: The machines: a file, or a preset.
        n_steps: How many steps the traces are of; found out if None.
        force: Replace a file that is there.
    """
    if output.exists() and not force:
        raise ScenarioError(f"{output}: is there already; write another with -o, or replace it with --force")
    paths = find_traces(names)
    with ProgressBar(sys.stderr) as bar:
        imported = import_traces(paths, n_steps=n_steps, progress=lambda n: bar.update("read traces", n, len(paths)))
    scenario = scenario_of(
        imported, fit_cluster(read_cluster(cluster), imported.world_size, name=cluster), name=output.stem
    )
    try:
        with run_directory.replacing(output) as part:
            part.write_text(scenario_text(scenario, imported), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{output}: cannot be written: {error.strerror or error}") from None
    session.wrote(output)
    for note in imported.notes:
        session.say(f"note: {note}")
    session.result(_imported_document(imported, output), _imported_text(imported, output))


def _imported_document(imported: ChakraJob, output: Path) -> dict[str, object]:
    workload = imported.workload
    return {
        "scenario": str(output),
        "traces": imported.n_traces,
        "world_size": imported.world_size,
        "steps": imported.n_steps,
        "forward_s": workload.forward_s,
        "backward_s": sum(tensor.backward_s or 0.0 for tensor in workload.tensors),
        "optimize_s": workload.optimize_s,
        "buckets": [
            {"tensor": tensor.name, "count": tensor.count, "backward_s": tensor.backward_s}
            for tensor in reversed(workload.tensors)
        ],
        "notes": list(imported.notes),
    }


def _imported_text(imported: ChakraJob, output: Path) -> str:
    workload = imported.workload
    backward_s = sum(tensor.backward_s or 0.0 for tensor in workload.tensors)
    times = (("forward", workload.forward_s), ("backward", backward_s), ("optimizer", workload.optimize_s))
    return (
        f"{output}: {imported.world_size:,} ranks, {imported.n_steps:,} steps, {len(workload.tensors)} gradient "
        f"buckets of {format_nbytes(workload.nbytes)}; "
        + ", ".join(f"{name} {format_seconds(seconds or 0.0)}" for name, seconds in times)
        + f"\nsimdist compare {output} simulates it; add schedules to compare with"
    )
