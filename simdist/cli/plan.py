"""`simdist plan`."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.plan import Result, plan_text
from simdist.plan.group import Group
from simdist.runs import run_directory
from simdist.runs.building import Built, build, delays, job
from simdist.scenario import Scenario


@click.command("plan")
@common.scenario
@click.option("-o", "--output", type=common.path, metavar="RUN", help="Write a run directory.")
@common.schedule
@common.force
@common.options
def command(session: common.Session, name: str, *, output: Path | None, schedule: str | None, force: bool) -> None:
    """Write plans and prove what they compute.

    Several schedules make one run directory each, RUN/LABEL.
    """
    scenario = inputs.read_scenario(session, name)
    schedules = inputs.choose(scenario, schedule, where=name)
    paths = inputs.targets(output, schedules)
    plans, texts = [], []
    with session.bar() as bar:
        for number, (each, path) in enumerate(zip(schedules, paths, strict=True)):
            bar.update(f"plan {each.name}", number, len(schedules))
            with inputs.naming(name):
                built = build(scenario, each)
            if path:
                one = scenario.model_copy(update={"schedules": (each,)})
                run_directory.write(path, one, built.plan, delays(scenario), force=force)
                session.wrote(path)
            results = _results(scenario, built)
            plans.append(_document(built, results, path))
            texts.append(f"{plan_text(built.plan)}\n{_proof_text(built, results)}")
    session.result({"scenario": scenario.name, "plans": plans}, "\n\n".join(texts))


def _results(scenario: Scenario, built: Built) -> Counter[Result]:
    """Return what the steps were proved to leave behind, and how many steps do."""
    described = job(scenario)
    return Counter(built.schedule.result(step, described) for step in range(scenario.steps))


def _document(built: Built, results: Counter[Result], path: Path | None) -> dict[str, object]:
    plan = built.plan
    return {
        "schedule": built.schedule.name,
        "digest": plan.digest(),
        "world_size": plan.world_size,
        "steps": plan.n_steps,
        "operations": plan.n_instances,
        "bodies": len(plan.bodies),
        "proved_ranks": built.n_proved_ranks,
        "proved": [{"steps": n_steps, **_record(result)} for result, n_steps in results.items()],
        "run": str(path) if path else None,
    }


def _record(result: Result) -> dict[str, object]:
    """Return what was proved; besides gradients and parameters, what is not as in most schedules."""
    always, plain = ("gradients", "parameters"), asdict(Result(result.gradients, result.parameters))
    return {name: value for name, value in asdict(result).items() if name in always or value != plain[name]}


def _proof_text(built: Built, results: Counter[Result]) -> str:
    world_size, n_ranks = built.plan.world_size, built.n_proved_ranks
    ranks = (
        f"all {world_size:,} ranks" if n_ranks == world_size else f"{n_ranks} of {world_size:,} ranks, spread evenly"
    )
    lines = [f"proved: by following the contributions of {ranks}"]
    for result, n_steps in results.items():
        share = f"every step of {n_steps:,}" if len(results) == 1 else f"{n_steps:,} steps of {built.plan.n_steps:,}"
        lines.append(f"    {share}: {_result_text(result, world_size)}")
    return "\n".join(lines)


def _result_text(result: Result, world_size: int) -> str:
    gradients = "every rank applies " + _mean_text(
        result.gradients, world_size, "its own gradient", "the mean gradient"
    )
    if result.drop:
        gradients += f", without the last {result.drop} to come"
    if result.absent:
        gradients += f", but ranks {', '.join(map(str, result.absent))}, which sit the step out"
    if result.micro_batches > 1:
        gradients += f", summed over {result.micro_batches} micro-batches"
    if result.parameters.size == 1:
        return gradients
    what = "the mean parameters" if result.mixing is None else "the outer optimizer's, by the mean outer gradient"
    late = f" of {result.late_steps} steps ago" if result.late_steps else ""
    part = f" in tensors {', '.join(f'{first}:{last}' for first, last in result.tensors)}" if result.tensors else ""
    return f"{gradients}, then takes {_mean_text(result.parameters, world_size, '', what)}{late}{part}"


def _mean_text(group: Group, world_size: int, own: str, mean: str) -> str:
    if group.size == 1:
        return own
    return f"{mean} of {'all ranks' if group.size == world_size else f'its {group}'}"
