"""`simdist plan`."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

import click

from simdist.cli import common, inputs
from simdist.errors import ScenarioError, naming
from simdist.plan import LowRank, Op, Result, Select, plan_text
from simdist.plan.group import Group
from simdist.runs import run_directory
from simdist.runs.building import Built, build, delays, job
from simdist.scenario import Recorded, Scenario
from simdist.settings.base import plural

_APPLIED: dict[type[Op], str] = {
    Select: "the mean of the largest entries of the gradients",
    LowRank: "a low-rank approximation of the mean gradient",
}
_Results: TypeAlias = Counter[tuple[Result, str | None]]  # with what is applied instead of the mean gradient


@click.command("plan")
@common.scenario_or_run
@click.option("-o", "--output", type=common.path, metavar="RUN", help="Write a run directory.")
@click.option("--chakra", type=common.path, metavar="FOLDER", help="Write Chakra execution traces, LABEL.<rank>.et.")
@click.option("--steps", "n_steps", type=common.positive, metavar="N", help="Only the first N steps, with --chakra.")
@common.schedule
@click.option("--force", is_flag=True, help="Replace an existing run, or traces; write more of them than is usual.")
@common.options
def command(
    session: common.Session,
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
    schedules = inputs.choose(scenario, schedule, where=name)
    paths = inputs.targets(output, schedules)
    plans = []
    texts = []
    with session.bar() as bar:
        for number, (each, path) in enumerate(zip(schedules, paths, strict=True)):
            bar.update(f"plan {each.name}", number, len(schedules))
            with naming(name):
                built = build(scenario, each)
            if path:
                one = scenario.model_copy(update={"schedules": (each,)})
                run_directory.write(path, one, built.plan, delays(scenario), force=force)
                session.wrote(path)
            results = _results(scenario, built)
            plans.append(_document(built, results, path))
            texts.append(f"{plan_text(built.plan)}\n{_proof_text(built, results)}")
    session.result({"scenario": scenario.name, "plans": plans}, "\n\n".join(texts))


def _export(
    session: common.Session, name: str, folder: Path, *, schedule: str | None, n_steps: int | None, force: bool
) -> None:
    """Write execution traces."""
    from simdist.chakra.export import Export, Exported, cautions, refuse_size, write

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

            nbytes = write(export, folder, label, force=force, progress=progress)
            session.saved.append(str(folder / f"{label}.*.et"))
            found.append(Exported(label, export, folder, nbytes))
    session.result({"exports": [each.document() for each in found]}, "\n".join(each.text() for each in found))


def _tell_draw(session: common.Session, scenario: Scenario) -> None:
    """Say so if delays were recorded, but are not written as they were."""
    recorded = (each for each in scenario.disturbances if isinstance(each, Recorded))
    block_steps = next((each.resample_steps for each in recorded if each.resample_steps), None)
    if block_steps is not None:
        session.say(
            f"note: {scenario.name}: recorded delays are written as seed {scenario.seed} draws them, in blocks of "
            f"{block_steps:,} steps; without resample_steps they are written as recorded"
        )


def _results(scenario: Scenario, built: Built) -> _Results:
    """Return what the steps were proved to leave behind, what is applied if not gradients, and of how many steps."""
    described = job(scenario)
    steps = enumerate(built.plan.body_of_steps())
    kinds = [{type(op) for op in body} for body in built.plan.bodies]
    applied = [next((_APPLIED[kind] for kind in _APPLIED if kind in each), None) for each in kinds]
    return Counter((built.schedule.result(step, described), applied[body]) for step, body in steps)


def _document(built: Built, results: _Results, path: Path | None) -> dict[str, object]:
    """Return a plan as JSON.

    Columns:
        schedule (str): Label.
        digest (str): SHA-256 of the plan's operations, hexadecimal.
        world_size (int): Ranks.
        steps (int): Steps.
        operations (int): Operation instances of a rank.
        bodies (int): Distinct steps.
        proved_ranks (int): Ranks that the proof followed. All, up to 256.
        proved (list): Results of the proof: "Proof".
        run (str or null): Directory written.
    """
    plan = built.plan
    return {
        "schedule": built.schedule.name,
        "digest": plan.digest(),
        "world_size": plan.world_size,
        "steps": plan.n_steps,
        "operations": plan.n_instances,
        "bodies": len(plan.bodies),
        "proved_ranks": built.n_proved_ranks,
        "proved": [{"steps": n_steps, **_record(*what)} for what, n_steps in results.items()],
        "run": str(path) if path else None,
    }


def _record(result: Result, applied: str | None) -> dict[str, object]:
    """Return what was proved; besides gradients and parameters, what is not as in most schedules.

    Columns:
        steps (int): Number of steps with this result.
        micro_batches (int): Passes whose gradients are summed. Absent for one pass per step.
        gradients (object or null): The group over which gradients are averaged: `size` (int, ranks) and `stride` (int,
            distance between members).
        parameters (object or null): The group over which parameters are then averaged, in the same form.
        late_steps (int): The average was sent this many steps earlier. Absent for an average of the same step.
        tensors (list): Ranges of tensors that are averaged, each `[first, stop]`. Absent if all are.
        mixing (float): Share of its own parameters that a rank keeps; the anchors make up the rest. Only with an outer
            optimizer.
        drop (int): Number of ranks, the last to arrive, that the mean gradient leaves out. Absent if it leaves out
            none.
        absent (list): Ranks that sit the step out. Absent if none do.
        applied (str): What is applied instead of the mean gradient (top-k, PowerSGD). The rest is kept for the next
            gradient. Absent otherwise.
    """
    always = ("gradients", "parameters")
    plain = asdict(Result(result.gradients, result.parameters))
    found = {name: value for name, value in asdict(result).items() if name in always or value != plain[name]}
    return found | ({"applied": applied} if applied else {})


def _proof_text(built: Built, results: _Results) -> str:
    world_size = built.plan.world_size
    n_ranks = built.n_proved_ranks
    ranks = (
        f"all {world_size:,} ranks" if n_ranks == world_size else f"{n_ranks} of {world_size:,} ranks, spread evenly"
    )
    lines = [f"proved: by following the contributions of {ranks}"]
    for (result, applied), n_steps in results.items():
        share = f"every step of {n_steps:,}" if len(results) == 1 else f"{n_steps:,} steps of {built.plan.n_steps:,}"
        lines.append(f"    {share}: {_result_text(result, applied, world_size)}")
    return "\n".join(lines)


def _result_text(result: Result, applied: str | None, world_size: int) -> str:
    gradients = _mean_text(result.gradients, world_size, "its own gradient", applied or "the mean gradient")
    absent = f" but {', '.join(map(str, result.absent))}" if result.absent else ""
    gradients = f"every rank{absent} applies {gradients}"
    if result.drop:
        gradients += f", without the last {result.drop} to come"
    if result.micro_batches > 1:
        gradients += f", summed over {result.micro_batches} micro-batches"
    if applied:
        gradients += ", and keeps the rest for the next gradient"
    if result.parameters.size == 1:
        return gradients
    what = "the mean parameters" if result.mixing is None else "the outer optimizer's, by the mean outer gradient"
    late = f" of {result.late_steps} {plural(result.late_steps, 'step')} ago" if result.late_steps else ""
    part = f" in tensors {', '.join(f'{first}:{last}' for first, last in result.tensors)}" if result.tensors else ""
    return f"{gradients}, then takes {_mean_text(result.parameters, world_size, '', what)}{late}{part}"


def _mean_text(group: Group, world_size: int, own: str, mean: str) -> str:
    if group.size == 1:
        return own
    return f"{mean} of {'all ranks' if group.size == world_size else f'its {group}'}"
