"""`simdist plan`."""

from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.errors import ScenarioError, naming
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.runs.proved_plan import ProvedPlan
from simdist.runs.run_failures import step_failures
from simdist.scenario import Recorded, Scenario


@click.command("plan")
@common.scenario_or_run
@click.option("-o", "--output", type=common.path_type, metavar="RUN", help="Write a run directory.")
@click.option(
    "--chakra", type=common.path_type, metavar="FOLDER", help="Write Chakra execution traces, LABEL.<rank>.et."
)
@click.option("--steps", "n_steps", type=common.positive, metavar="N", help="Only the first N steps, with --chakra.")
@common.schedule
@click.option("--force", is_flag=True, help="Replace an existing run, or traces; write more of them than is usual.")
@common.options
def command(
    session: common.CliSession,
    name: str,
    *,
    output: Path | None,
    chakra: Path | None,
    n_steps: int | None,
    schedule: str | None,
    force: bool,
) -> None:
    """Write plans and prove what they compute.

    With several schedules, each gets a run directory RUN/LABEL. With --chakra, the plan of a SCENARIO or a RUN is only
    written, as one execution trace per rank with all its steps unrolled.
    """
    if chakra:
        if output:
            raise click.UsageError("--chakra: writes no run directory: leave out -o")
        _export(session, name, chakra, schedule=schedule, n_steps=n_steps, force=force)
        return
    if n_steps is not None:
        raise click.UsageError("--steps: is for --chakra; write steps in the scenario")
    scenario = inputs.read_scenario(session, name)
    schedules = inputs.choose_schedules(scenario, schedule, where=name)
    paths = inputs.targets(output, schedules)
    proved = []
    with session.bar() as bar:
        for number, (each, path) in enumerate(zip(schedules, paths, strict=True)):
            bar.update(f"plan {each.name}", number, len(schedules))
            with naming(name):
                built = build(scenario, each)
            if path:
                one = scenario.model_copy(update={"schedules": (each,)})
                drawn = delays(scenario)
                failures = step_failures(one, built.plan, built.costs, drawn)
                run_directory.write(path, one, built.plan, drawn, failures, force=force)
                session.wrote(path)
            proved.append(ProvedPlan(scenario, built, path))
    document = {"scenario": scenario.name, "plans": [each.document() for each in proved]}
    session.result(document, "\n\n".join(each.text() for each in proved))


def _export(
    session: common.CliSession, name: str, folder: Path, *, schedule: str | None, n_steps: int | None, force: bool
) -> None:
    """Write execution traces."""
    from simdist.chakra.export import Export, Exported, cautions, refuse_size, write_traces

    found = []
    told: Scenario | None = None
    with session.bar() as bar:
        for planned in inputs.planned(session, name, schedule):
            if planned.scenario is not told:
                _tell_draw(session, planned.scenario)
            told = planned.scenario
            label = planned.schedule.name
            plan = planned.plan
            if n_steps and n_steps > plan.n_steps:
                raise ScenarioError(f"{name}: --steps {n_steps:,} are more than its {plan.n_steps:,} steps")
            n_taken = n_steps or plan.n_steps
            export = Export(plan, planned.costs, planned.scenario.workload, planned.drawn_delays(), n_taken)
            if not force:
                refuse_size(export)
            for caution in cautions(plan):
                session.say(f"warning: {label}: {caution}")

            def progress(n_ranks: int, label: str = label, world_size: int = plan.world_size) -> None:
                bar.update(f"write {label}", n_ranks, world_size)

            nbytes = write_traces(export, folder, label, force=force, progress=progress)
            session.saved.append(str(folder / f"{label}.*.et"))
            found.append(Exported(label, export, folder, nbytes))
    session.result({"exports": [each.document() for each in found]}, "\n".join(each.text() for each in found))


def _tell_draw(session: common.CliSession, scenario: Scenario) -> None:
    """Say so if delays were recorded, but are not written as they were."""
    recorded = (each for each in scenario.disturbances if isinstance(each, Recorded))
    block_steps = next((each.resample_steps for each in recorded if each.resample_steps), None)
    if block_steps is not None:
        session.say(
            f"note: {scenario.name}: recorded delays are written as seed {scenario.seed} draws them, in blocks of "
            f"{block_steps:,} steps; without resample_steps they are written as recorded"
        )
