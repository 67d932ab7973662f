"""When does a model reach its target? Predicted from values and simulated times, then trained for real.

    python experiments/time_to_accuracy/run.py            run everything and print the tables (root; half an hour)
    python experiments/time_to_accuracy/run.py --write    also record the results, and write the tables into the README
    python experiments/time_to_accuracy/run.py --tables   print the tables of the recorded results (anybody); with
                                                          --write, write them into the README again
    python experiments/time_to_accuracy/run.py --tiny     a few steps on fewer ranks, to see that it works

Each node is a network namespace behind a link of limited rate, as in the emulated cluster; the links are calibrated
once, on the first shape. Every run is predicted first: its losses and models by step from `python -m real.learn`, the
seconds by step from the simulator. Then it is trained by `python -m real` on processes of its own. Afterwards losses
are computed once more, with ranks one after the other and sums in gloo's order, which should leave no difference.

Nothing else should compute on the machine meanwhile.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import torch

HERE = Path(__file__).parent
EMULATED = HERE.parent / "emulated_cluster"
sys.path += [str(HERE), str(EMULATED)]

import network  # noqa: E402
import program  # noqa: E402
import study  # noqa: E402
from study import Shape  # noqa: E402

from real.execution import virtual  # noqa: E402
from real.models import tasks  # noqa: E402
from simdist.learning.curves import parse_target  # noqa: E402
from simdist.learning.summary import Learned  # noqa: E402
from simdist.learning.timing import TimedSchedule, timed  # noqa: E402
from simdist.learning.training import Training, describe, train  # noqa: E402
from simdist.report import markdown_table, print_tables, write_tables  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import Cluster, Scenario, load  # noqa: E402
from simdist.traces.waiting import step_end_s  # noqa: E402

_spec = spec_from_file_location("emulated_cluster_run", EMULATED / "run.py")
assert _spec is not None
assert _spec.loader is not None
emulated = module_from_spec(_spec)  # this file has the same name
_spec.loader.exec_module(emulated)

PAGE, RESULTS = HERE / "README.md", HERE / "results.json"
SHAPES = (Shape(4, 2, "50 Mbit/s"), Shape(2, 2, "100 Mbit/s"))
TARGETS = {"digits": "accuracy >= 0.7", "text": "accuracy >= 0.43", "split": "accuracy >= 0.45"}
TINY = {"digits": "accuracy >= 0.13"}
TIMEOUT_S = 900.0
AT = 100
"""Steps after which losses are compared."""


@dataclass(frozen=True)
class Result:
    """A run, and what was predicted before.

    Args:
        steps: To the target, predicted and measured; None: it was not reached.
        seconds: Likewise.
        step_s: Seconds per step of the whole run, likewise.
        loss_error: Largest difference between evaluations in the first `AT` steps of the ranks' mean loss to the
            predicted one, relative to it.
        exact_error: Largest difference of a loss of any rank in any step to one that is computed with ranks one after
            the other and sums in gloo's order.
    """

    shape: str
    task: str
    schedule: str
    steps: tuple[int | None, int | None]
    seconds: tuple[float | None, float | None]
    step_s: tuple[float, float]
    loss_error: float
    exact_error: float

    @property
    def error(self) -> float | None:
        """Error of the time to the target; None if either does not reach it."""
        predicted, measured = self.seconds
        return predicted / measured - 1 if predicted and measured else None


def scenario_of(task: str, cluster: Cluster, *, steps: int | None) -> Scenario:
    """Return the scenario of a task on a cluster: the task's tensors, passes that sleep."""
    base = load(HERE / "scenario.yaml")
    tensors = [
        {"name": name, "count": int(np.prod(shape)), "rows": shape[0] if len(shape) > 1 else None}
        for name, shape, _ in describe(task, program.EVERY).tensors
    ]
    workload = type(base.workload).model_validate(base.workload.model_dump(exclude={"tensors"}) | {"tensors": tensors})
    return base.changed(name=task, cluster=cluster, workload=workload, steps=steps or base.steps)


def predict(scenario: Scenario) -> list[Learned]:
    """Train with the values of all ranks in one process, and simulate."""
    task, found = describe(scenario.name, program.EVERY), []
    for schedule in scenario.schedules:
        each: TimedSchedule = timed(scenario, schedule, task, n_seeds=1)
        found.append(Learned(each, (train(Training(schedule.name, each.plan, task, scenario.seed)),)))
        print(f"{scenario.name}: {schedule.name} predicted", flush=True)
    return found


def write_runs(scenario: Scenario, folder: Path) -> None:
    """Write a run directory for each schedule, in the order in which they are performed."""
    for number, schedule in enumerate(scenario.schedules):
        alone = scenario.model_copy(update={"schedules": (schedule,)})
        run_directory.write(folder / f"{number}", alone, build(scenario, schedule).plan, delays(scenario))


def measured(scenario: Scenario, shape: Shape, predicted: Sequence[Learned], goal: str, folder: Path) -> list[Result]:
    """Compare what was performed with what was predicted."""
    target, task = parse_target(goal), tasks.TaskFunctions(scenario.name, scenario.seed)
    results = []
    for number, one in enumerate(predicted):
        run = run_directory.read(folder / f"{number}")
        trace = run_directory.read_trace(run.path / run_directory.REAL, plan=run.plan)
        ends_s = np.concatenate([[0.0], step_end_s(trace).max(axis=1)])
        notes = [
            torch.load(folder / f"{scenario.name}-{number}-{rank}.pt") for rank in range(scenario.cluster.world_size)
        ]
        values = [_metrics(task, [each["snapshots"][at] for each in notes]) for at in range(len(one.curves[0].steps))]
        at = target.reached(np.array([each[target.metric] for each in values]))
        steps, seconds = (each[0] for each in one.to_target(target))
        step = None if at is None else one.curves[0].steps[at]
        losses = np.array([each["losses"] for each in notes]).T
        results.append(
            Result(
                shape.title,
                scenario.name,
                one.label,
                (int(steps) if np.isfinite(steps) else None, step),
                (float(seconds) if np.isfinite(seconds) else None, None if step is None else float(ends_s[step])),
                (float(one.timed.ends_s[0, -1]) / scenario.steps, float(ends_s[-1]) / scenario.steps),
                _loss_error(losses.mean(axis=1), one, min(AT, scenario.steps)),
                float(np.abs(losses - exact_losses(one, task)).max()),
            )
        )
    return results


def _loss_error(losses: np.ndarray, one: Learned, n_steps: int) -> float:
    """Compare mean losses of all ranks between evaluations, as far as `n_steps`."""
    curve = one.curves[0]
    pairs = [
        (losses[first:last].mean(), loss)
        for first, last, loss in zip(curve.steps, curve.steps[1:], curve.losses[1:], strict=False)
        if last <= n_steps
    ]
    return max(abs(ours / theirs - 1) for ours, theirs in pairs)


def exact_losses(one: Learned, task: tasks.TaskFunctions) -> np.ndarray:
    """Return the losses of all ranks, `[n_steps, n_ranks]`, one rank after the other, summed as gloo sums."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as real ranks have
    with patch.object(virtual, "_reduced", _summed_as_gloo):
        found = virtual.train_together(one.timed.plan, lambda rank: task.make(rank)[:2], task.loss, task.batch)
    torch.set_num_threads(n_threads)
    return found.losses.numpy()


def _summed_as_gloo(members: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce members, `[n_blocks, n, stride, count]`, as gloo's ring does.

    The values are cut into n chunks. Chunk c begins at member c - 1, and goes down from member to member; each adds its
    own values, the last one is member c.

    Source: gloo, allreduce.cc, `ring`.
    """
    _, n, _, count = members.shape
    n_segments = math.ceil(max(count * members.element_size() / 2**20, 2 * n) / n) * n
    length = math.ceil(count / n_segments) * (n_segments // n)
    total = torch.empty_like(members[:, :1])
    for chunk in range(n):
        part = slice(chunk * length, (chunk + 1) * length)
        rows = [members[:, (chunk - 1 - place) % n, :, part] for place in range(n)]
        total[:, 0, :, part] = reduce(torch.add, rows)
    return total / n if reduction == "mean" else total


def _metrics(task: tasks.TaskFunctions, ranks: Sequence[torch.Tensor]) -> dict[str, float]:
    """Evaluate the average of all ranks' models."""
    module, _, _ = task.make(0)
    average, state, first = torch.stack(list(ranks)).double().mean(dim=0), module.state_dict(), 0
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.copy_(average[first : first + tensor.numel()].view_as(tensor))
            first += tensor.numel()
    with torch.no_grad():
        return dict(task.evaluate(module.eval()))


def run(
    shapes: Sequence[Shape], targets: Mapping[str, str], folder: Path, *, steps: int | None = None, tiny: bool = False
) -> list[Result]:
    """Calibrate, predict, train for real and compare."""
    chosen = study.SYNCHRONIZATION
    calibrated, results = emulated.calibrate(chosen, shapes[0], folder, tiny=tiny), []
    for shape in shapes:
        cluster = study.cluster_of(shape, calibrated, chosen)
        scenarios = [scenario_of(name, cluster, steps=steps) for name in targets]
        predicted = [predict(each) for each in scenarios]
        with emulated.emulated(shape, chosen) as (nodes, _):
            for scenario, found in zip(scenarios, predicted, strict=True):
                place = folder / shape.name / scenario.name
                write_runs(scenario, place)
                environ = {"SIMDIST_LEARNED": str(place), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
                runs = [str(place / f"{number}") for number in range(len(found))]
                command = ["-m", "real", *runs, "--program", f"program:{scenario.name}", "--timeout", "60"]
                network.launch(nodes, shape.ranks_per_node, command, timeout_s=TIMEOUT_S, environ=environ)
                results += measured(scenario, shape, found, targets[scenario.name], place)
                print(f"{shape.title}, {scenario.name}: trained", flush=True)
    return results


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Return the tables of the README by their names."""
    errors = [each.error for each in results if each.error is not None]
    same = sum(each.steps[0] == each.steps[1] for each in results)
    orders = [
        _order(results, shape, task) for shape, task in dict.fromkeys((each.shape, each.task) for each in results)
    ]
    right, pairs = (sum(each) for each in zip(*orders, strict=True))
    summary = (
        f"* Time to the target: median error {median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}, in "
        f"{len(errors)} runs that reach it; {sum(each.error is None for each in results)} do not, as predicted.\n"
        f"* Steps to the target are the predicted ones in {same} of {len(results)} runs.\n"
        f"* Losses of all ranks in all steps are those of the virtual world to the last bit in "
        f"{sum(each.exact_error == 0 for each in results)} of {len(results)} runs, if that computes one rank after the "
        f"other and sums in gloo's order. Those of the prediction, rounded otherwise, differ by at most "
        f"{max(each.loss_error for each in results):.1g} of their size in {AT} steps.\n"
        f"* Of {pairs} pairs of schedules whose measured times to the target are more than 3 % apart, {right} were "
        f"predicted in the right order."
    )
    lines = [
        "| cluster | task | schedule | steps to target, predicted | measured | seconds, predicted | measured | error "
        "| ms per step, predicted | measured | losses differ by |",
    ]
    for each in results:
        steps = " | ".join("never" if number is None else f"{number}" for number in each.steps)
        seconds = " | ".join("" if number is None else f"{number:.2f}" for number in each.seconds)
        error = "" if each.error is None else f"{each.error:+.1%}"
        per_step = " | ".join(f"{1e3 * number:.1f}" for number in each.step_s)
        row = f"{each.shape} | {each.task} | `{each.schedule}` | {steps} | {seconds} | {error}"
        lines.append(f"| {row} | {per_step} | {each.loss_error:.1g} |")
    return {"summary": summary, "runs": markdown_table(lines)}


def _order(results: Sequence[Result], shape: str, task: str) -> tuple[int, int]:
    """Count the pairs of schedules of one job in the right order, and all that are measurably apart."""
    times = [
        tuple(np.inf if each is None else each for each in row.seconds)
        for row in results
        if (row.shape, row.task) == (shape, task)
    ]
    pairs = [(one, other) for at, one in enumerate(times) for other in times[:at] if one[1] != other[1]]
    apart = [(one, other) for one, other in pairs if max(one[1], other[1]) > 1.03 * min(one[1], other[1])]
    return sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in apart), len(apart)


def recorded() -> list[Result]:
    """Read the recorded results."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [
        Result(**{name: tuple(each) if isinstance(each, list) else each for name, each in row.items()}) for row in rows
    ]


def main() -> int:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the results, and write them into the page")
    parser.add_argument("--tables", action="store_true", help="print the tables of the recorded results")
    parser.add_argument("--tiny", action="store_true", help="a few steps of one task on fewer ranks")
    arguments = parser.parse_args()
    if arguments.tables:
        results = recorded()
    elif missing := network.missing():
        print(f"skipped: {missing}")
        return 0
    else:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.tiny:
                results = run((Shape(2, 2, "100 Mbit/s"),), TINY, Path(folder), steps=20, tiny=True)
            else:
                results = run(SHAPES, TARGETS, Path(folder))
        if arguments.write and not arguments.tiny:
            RESULTS.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")
    if arguments.write and not arguments.tiny:
        write_tables(PAGE, tables(results))
    print_tables(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
