"""The questions of the commands as functions, with plain arguments: `simdist.tune("job.yaml", global_every=8)`.

Each calls the package that answers the question. `compare`, `simulate` and `load` need no other arguments than the
packages take, so `simdist` exports them from there.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from simdist.errors import TraceError
from simdist.scenario import AnyScenario, load

if TYPE_CHECKING:
    from simdist.learning.answer import LearnedSchedules
    from simdist.profiles import ImportedJob, ImportOptions
    from simdist.stragglers.answer import WhatifAnswer
    from simdist.studies.validated_run import ValidatedRun
    from simdist.sweeps.definition import Sweep
    from simdist.sweeps.driver import Swept
    from simdist.sweeps.table import Table
    from simdist.tuning import Tuned

__all__ = ["import_traces", "learn", "results", "sweep", "tune", "validate", "whatif"]

_EVALUATIONS = 20  # of a training run


def tune(
    scenario: AnyScenario,
    *,
    global_every: int | None = None,
    group_every: Sequence[tuple[int, int]] = (),
    memory_nbytes: float = math.inf,
    allow: Sequence[str] = (),
    min_density: float | None = None,
    baseline: str | None = None,
    n_seeds: int | None = None,
) -> "Tuned":
    """Find the fastest schedule for a scenario, within limits.

    Args:
        scenario: What `simdist.load` takes, or a scenario.
        global_every: All ranks exchange at least once in this many steps. None: 8, or as many as the baseline takes.
        group_every: Pairs of ranks and steps: groups of at least `ranks` exchange at least once in `steps`.
        memory_nbytes: Limit of the bytes in use on a rank's device.
        allow: The words of `simdist tune --allow`, such as `sharding`.
        min_density: Gradients may be sent in part, this share at least. None: no schedule is sparse.
        baseline: Label or kind of the schedule that the others are compared with. None: the scenario's first.
        n_seeds: Fresh seeds of the finalists. None: 20, or 200 of a recording.

    Raises:
        ScenarioError: See `simdist.tuning.tuning.tune`.
        PlanError: The baseline does not fit the cluster.
    """
    from simdist.tuning import Constraints, Extras, TuneOptions, tuning

    found = load(scenario)
    most = global_every or tuning.usual_global_every(found, baseline)
    limits = Constraints(most, tuple(group_every), memory_nbytes=memory_nbytes)
    extras = Extras(min_density=min_density, allow=tuple(allow))
    return tuning.tune(found, TuneOptions(limits, extras, baseline=baseline, n_seeds=n_seeds))


def learn(
    scenario: AnyScenario,
    task: str,
    *,
    target: str | None = None,
    baseline: str | None = None,
    n_seeds: int = 5,
    folder: str | Path | None = None,
    n_workers: int | None = None,
) -> "LearnedSchedules":
    """Train a task under each schedule of a scenario, and simulate when it reaches a target. Training needs torch.

    Args:
        scenario: What `simdist.load` takes, or a scenario. Its number of steps is that of a run.
        task: A task that ships, or the path of its file.
        target: `METRIC >= x` or `METRIC <= x`.
        baseline: Label or kind of the schedule that the others are compared with.
        n_seeds: Training seeds. Seed i meets delay seed i.
        folder: Where finished runs are kept. None: nowhere.
        n_workers: Processes that train. None: one for each core.

    Raises:
        ScenarioError: There is no such task or metric, or the training program refuses a run.
        RunError: Runs fail. The folder keeps the others.
    """
    from simdist.jobs import LocalPool
    from simdist.jobs.store import Store
    from simdist.learning import answer, curves, training
    from simdist.machine import n_cores

    found = load(scenario)
    described = training.describe(task, math.ceil(found.steps / _EVALUATIONS), seed=found.seed)
    with ExitStack() as stack:
        store = stack.enter_context(Store(Path(folder))) if folder else None
        pool = stack.enter_context(LocalPool(n_workers or n_cores()))
        trainer = training.Trainer(store, pool, lambda what, done, n: None)
        wanted = curves.parse_target(target) if target else None
        return answer.learn(found, described, trainer, n_seeds=n_seeds, baseline=baseline, target=wanted)


def whatif(
    scenario: AnyScenario, *, schedules: Sequence[object] = (), n_runs: int = 200, steps: range | None = None
) -> "WhatifAnswer":
    """Say what stragglers cost a job, and what other schedules would gain.

    Args:
        scenario: What `simdist.load` takes, or a scenario, such as one of `import_traces`.
        schedules: Schedules to compare with the job's own: labels, or objects. None: the scenario's others or, if there
            are none, a few that fit.
        n_runs: Runs of each schedule; 0: none are compared.
        steps: Steps to look at; None: all.

    Raises:
        ScenarioError: A schedule does not fit the cluster.
        PlanError: The trace would not fit into memory.
    """
    from simdist.stragglers.answer import WhatifOptions, answer_whatif, simulated_job
    from simdist.studies.comparison import find_baseline
    from simdist.studies.proposals import few_schedules

    found = load(scenario)
    job = simulated_job(found.name, found, find_baseline(found, None), steps)
    others = found.changed(schedules=list(schedules)).schedules if schedules else job.others or few_schedules(found)
    options = WhatifOptions(None, None, steps, None, n_runs, None, None, None)
    return answer_whatif(job, others if n_runs else (), options, lambda what, done, total: None)


def sweep(
    what: "Sweep | str | Path | Mapping[str, object]", folder: str | Path, *, n_workers: int | None = None
) -> "Swept":
    """Compute the rows of a sweep that are not in its folder yet.

    Args:
        what: A sweep, or what `simdist.sweeps.load` takes.
        folder: Where results are appended.
        n_workers: Processes that simulate; 0: this one. None: one for each core. A script that uses processes must run
            under `if __name__ == "__main__":`.

    Raises:
        ScenarioError: The sweep or a point of it is no scenario.
        RunError: See `simdist.sweeps.driver.sweep`.
    """
    from simdist.jobs import InProcess, LocalPool
    from simdist.machine import n_cores
    from simdist.sweeps import driver, reading

    wanted = reading.load(what) if isinstance(what, str | Path | Mapping) else what
    if n_workers == 0:
        return driver.sweep(wanted, folder, workers=InProcess())
    with LocalPool(n_workers or n_cores()) as pool:
        return driver.sweep(wanted, folder, workers=pool)


def results(*folders: str | Path, baseline: str | None = None) -> "Table":
    """Return the results of sweeps and of runs as one table. `frame()` of it is a pandas frame.

    Args:
        folders: Folders of sweeps, or run directories.
        baseline: Label or kind of the schedule that speed-ups are over.

    Raises:
        ScenarioError: See `simdist.sweeps.results.read_results`.
    """
    from simdist.sweeps.results import read_results

    return read_results(folders, baseline=baseline)


def import_traces(
    *traces: str | Path, name: str = "job", options: "ImportOptions | None" = None, n_workers: int | None = None
) -> "ImportedJob":
    """Turn the profiler traces of a job into a scenario, and say what slowed the job.

    Args:
        traces: Files that the PyTorch profiler wrote, one of each rank, or folders with them.
        name: Name of the scenario.
        options: What the traces do not tell.
        n_workers: Processes that read traces. None: one for each core.

    Returns:
        The job. `scenario` of it is the scenario; `simdist.profiles.write_scenario` writes its files.

    Raises:
        TraceError: A trace cannot be read, or the traces make no scenario.
    """
    from simdist.profiles import find_traces, import_job, profile_all

    read = []
    for each in profile_all(find_traces([str(trace) for trace in traces]), n_workers=n_workers):
        if isinstance(each, TraceError):
            raise each
        read.append(each)
    return import_job(read, name=name, options=options)


def validate(run: str | Path, *, cluster: str | Path | None = None) -> "ValidatedRun":
    """Simulate a measured run, and compare both.

    Args:
        run: Run directory that `python -m real` measured.
        cluster: File of a calibrated cluster to simulate instead of the scenario's.

    Raises:
        RunError: There is no such run.
        TraceError: It was not measured, or its trace cannot be read.
    """
    from simdist.runs import run_directory
    from simdist.runs.calibrated import Calibrated
    from simdist.studies.validated_run import validate_run

    return validate_run(run_directory.read(Path(run)), Calibrated.read(Path(cluster)) if cluster else None)
