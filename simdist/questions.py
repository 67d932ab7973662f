"""The questions of the commands as functions, with plain arguments: `simdist.tune("job.yaml", global_every=8)`.

Each calls the package that answers the question, and warns of the doubts among the answer's remarks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from simdist.errors import ScenarioError, SimdistError
from simdist.scenario import AnyScenario, load
from simdist.settings.base import plain
from simdist.settings.units import parse_fraction, parse_nbytes, parse_whole

if TYPE_CHECKING:
    from simdist.engines.actors import Actor
    from simdist.engines.choose import Engine
    from simdist.engines.live import ChangeListener
    from simdist.learning.answer import LearnedSchedules
    from simdist.profiles import ImportedJob, ImportOptions
    from simdist.scenario.failures import OnFailure
    from simdist.stragglers.answer import WhatifAnswer
    from simdist.studies.comparison import Comparison
    from simdist.studies.enough_seeds import EnoughSeeds
    from simdist.studies.facets import Facet
    from simdist.studies.goodput import GoodputStudy
    from simdist.studies.measuring import ScheduleTimes
    from simdist.studies.validated_run import ValidatedRun
    from simdist.sweeps.definition import Sweep
    from simdist.sweeps.driver import Swept
    from simdist.sweeps.table import Table
    from simdist.traces.trace import Trace
    from simdist.tuning import Tuned

__all__ = ["compare", "goodput", "import_traces", "learn", "results", "simulate", "sweep", "tune", "validate", "whatif"]

_EVALUATIONS = 20  # of a training run


def compare(  # noqa: PLR0913 (one for each option)
    scenario: AnyScenario,
    *,
    baseline: str | None = None,
    n_seeds: "int | Literal['auto'] | EnoughSeeds" = 20,
    engine: "Engine" = "auto",
    progress: Callable[[str, int, int], None] | None = None,
    measured: "list[ScheduleTimes] | None" = None,
    actors: "Sequence[Actor]" = (),
    facets: "Sequence[Facet[Any]] | None" = None,
    warm_up: int = 0,
) -> "Comparison":
    """Return the speed-up table of a scenario, in the order of its schedules.

    Args:
        scenario: What `simdist.load` takes, or a scenario.
        baseline: Label or kind of the schedule that the others are compared with; `sync` or the first if None.
        n_seeds: Number of seeds. The first is the scenario's, the others follow from it. With `auto`, as many as it
            takes to know every number within 1 %, or with `simdist.studies.enough_seeds.EnoughSeeds` another share.
        engine: `auto` takes the fast engine wherever it is exact.
        progress: Called with a schedule's label, rank-steps done and rank-steps in all.
        measured: The times of each schedule are appended when they are there. After Ctrl-C, a call with the same list
            goes on with the first schedule that it lacks.
        actors: Processes of the user, see `simdist.engines.actors`; each schedule and seed starts them anew.
        facets: Optional topics, see `simdist.studies.facets`. None: those that ship.
        warm_up: First steps that are left out of the means, and with them what the end of a run adds.

    Raises:
        ScenarioError: There is no such baseline, `measured` has the times of another scenario, or `warm_up` does not
            fit.
        PlanError: A schedule does not fit the cluster.
        UnsupportedError: `fast` was asked for and cannot compute a schedule exactly.
    """
    from simdist.studies import comparison, remarks
    from simdist.studies.enough_seeds import EnoughSeeds, compare_with_enough
    from simdist.studies.facets import FACETS

    is_enough = isinstance(n_seeds, EnoughSeeds) or (isinstance(n_seeds, str) and n_seeds == "auto")
    ask: Callable[..., Comparison] = compare_with_enough if is_enough else comparison.compare
    found: Comparison = ask(
        scenario,
        baseline=baseline,
        n_seeds=n_seeds if is_enough else _whole("n_seeds", n_seeds),
        engine=engine,
        progress=progress,
        measured=measured,
        actors=actors,
        facets=FACETS if facets is None else facets,
        warm_up=_whole("warm_up", warm_up),
    )
    remarks.warn_of(found.scenario.name, found.remarks)
    return found


def goodput(
    scenario: AnyScenario,
    *,
    baseline: str | None = None,
    on_failure: "Sequence[OnFailure]" = (),
    n_seeds: int = 20,
    price_per_gpu_hour: float | None = None,
) -> "GoodputStudy":
    """Show how much of a job's time trains the model under failures, where the rest goes, and what would lose less.

    Args:
        scenario: What `simdist.load` takes, or a scenario. It has `failures` and `train_for`.
        baseline: Label or kind of the schedule that the others are compared with; `sync` or the first if None.
        on_failure: Policies, the one to compare with first. If there are none, the scenario's and `restart`.
        n_seeds: Seeds of steps and of failures.
        price_per_gpu_hour: Of every GPU, those of spare nodes too; None: no costs are shown.

    Raises:
        ScenarioError: See `simdist.studies.goodput.goodput`.
        PlanError: A schedule does not fit the cluster.
    """
    from simdist.studies import goodput as study
    from simdist.studies.remarks import warn_of

    n_found = _whole("n_seeds", n_seeds)
    found = study.goodput(
        scenario,
        baseline=baseline,
        on_failure=on_failure,
        n_seeds=n_found,
        price_per_gpu_hour=price_per_gpu_hour,
    )
    warn_of(found.scenario.name, found.remarks)
    return found


def simulate(
    scenario: AnyScenario,
    *,
    label: str | None = None,
    engine: "Engine" = "auto",
    actors: "Sequence[Actor]" = (),
    observers: "Sequence[ChangeListener]" = (),
) -> "Trace":
    """Simulate one schedule of a scenario with the delays and link changes of its seed.

    Args:
        scenario: What `simdist.load` takes, or a scenario.
        label: Label of the schedule; the first schedule if None.
        engine: `auto` takes the fast engine if it is exact.
        actors: The user's processes, see `simdist.engines.actors`. They end with the last rank.
        observers: Called with each `simdist.engines.live.Change`, in order of time.

    Raises:
        ScenarioError: No schedule has that label.
        PlanError: The schedule does not fit the cluster.
        UnsupportedError: `fast` was requested and cannot compute this exactly.
        RunError: An actor failed, or the simulation is deadlocked.
    """
    from simdist.runs import building
    from simdist.studies import known_delays, remarks

    found = load(scenario)
    trace = building.simulate(found, label=label, engine=engine, actors=actors, observers=observers)
    remarks.warn_of(found.name, known_delays.remarks_on_run(found))
    return trace


def tune(  # noqa: PLR0913 (one for each option)
    scenario: AnyScenario,
    *,
    global_every: int | None = None,
    group_every: Sequence[tuple[int, int]] = (),
    memory_nbytes: float | str = math.inf,
    allow: Sequence[str] = (),
    min_density: float | str | None = None,
    baseline: str | None = None,
    n_seeds: int | None = None,
    counts_failures: bool = False,
) -> "Tuned":
    """Find the fastest schedule for a scenario, within limits.

    Args:
        scenario: What `simdist.load` takes, or a scenario.
        global_every: All ranks exchange at least once in this many steps. None: 8, or as many as the baseline takes.
        group_every: Pairs of ranks and steps: groups of at least `ranks` exchange at least once in `steps`.
        memory_nbytes: Limit of the bytes in use on a rank's device: a number, or text such as `16 GB`.
        allow: The words of `simdist tune --allow`, such as `sharding`.
        min_density: Gradients may be sent in part, this share at least, such as 0.01 or `1%`. None: none is.
        baseline: Label or kind of the schedule that the others are compared with. None: the scenario's first.
        n_seeds: Fresh seeds of the finalists. None: 20, or 200 of a recording.
        counts_failures: Whether the time of the whole job per step that counts decides, and not that of a step.

    Raises:
        ScenarioError: See `simdist.tuning.tuning.tune`.
        PlanError: The baseline does not fit the cluster.
    """
    from simdist.studies.remarks import warn_of
    from simdist.tuning import Constraints, Extras, TuneOptions, tuning

    found = load(scenario)
    most = _read("global_every", global_every, parse_whole) or tuning.usual_global_every(found, baseline)
    pairs = [(_read("group_every", a, parse_whole), _read("group_every", b, parse_whole)) for a, b in group_every]
    memory = _read("memory_nbytes", memory_nbytes, lambda each: parse_nbytes(each) if isinstance(each, str) else each)
    limits = Constraints(most, tuple(pairs), memory_nbytes=memory)
    extras = Extras(min_density=_read("min_density", min_density, parse_fraction), allow=tuple(allow))
    seeds = _read("n_seeds", n_seeds, parse_whole)
    tuned = tuning.tune(
        found, TuneOptions(limits, extras, baseline=baseline, n_seeds=seeds, counts_failures=counts_failures)
    )
    warn_of(found.name, tuned.remarks)
    return tuned


def _read(name: str, value: Any, parse: Callable[[Any], Any]) -> Any:
    """Return the value of an argument, which may be of numpy; None stays."""
    try:
        return None if value is None else parse(plain(value))
    except ValueError as error:
        raise ScenarioError(f"{name}: {error}") from None


def _whole(name: str, value: Any) -> int:
    """Return the value of an argument that is a whole number."""
    found: int | None = _read(name, value, parse_whole)
    if found is None:
        raise ScenarioError(f"{name}: null is not a whole number: write e.g. 8")
    return found


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
    from simdist.studies.remarks import warn_of

    found = load(scenario)
    described = training.describe(task, math.ceil(found.steps / _EVALUATIONS), seed=found.seed)
    with ExitStack() as stack:
        store = stack.enter_context(Store(Path(folder))) if folder else None
        pool = stack.enter_context(LocalPool(n_workers or n_cores()))
        trainer = training.Trainer(store, pool, lambda what, done, n: None)
        wanted = curves.parse_target(target) if target else None
        n_found = _whole("n_seeds", n_seeds)
        learned = answer.learn(found, described, trainer, n_seeds=n_found, baseline=baseline, target=wanted)
    warn_of(found.name, learned.remarks)
    return learned


def whatif(
    scenario: AnyScenario, *, schedules: Sequence[object] = (), n_runs: int = 200, steps: range | None = None
) -> "WhatifAnswer":
    """Say what stragglers cost a job, and what other schedules would gain.

    Args:
        scenario: What `simdist.load` takes, or a scenario, such as one of `import_traces`.
        schedules: Schedules to compare with the job's own: labels, or objects. None: the scenario's others, or a few.
        n_runs: Runs of each schedule; 0: none are compared.
        steps: Steps to look at; None: all.

    Raises:
        ScenarioError: A schedule does not fit the cluster.
        PlanError: The trace would not fit into memory.
    """
    from simdist.stragglers.answer import WhatifOptions, answer_whatif, simulated_job
    from simdist.studies.comparison import find_baseline
    from simdist.studies.proposals import few_schedules
    from simdist.studies.remarks import warn_of

    found = load(scenario)
    job = simulated_job(found.name, found, find_baseline(found, None), steps)
    others = found.changed(schedules=list(schedules)).schedules if schedules else job.others or few_schedules(found)
    options = WhatifOptions(None, None, steps, None, _whole("n_runs", n_runs), None, None, None)
    answer = answer_whatif(job, others if options.n_runs else (), options, lambda what, done, total: None)
    warn_of(found.name, answer.remarks)
    return answer


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
    from simdist.studies.remarks import of_table, warn_of
    from simdist.sweeps import driver, reading

    wanted = reading.load(what) if isinstance(what, str | Path | Mapping) else what
    if n_workers == 0:
        swept = driver.sweep(wanted, folder, workers=InProcess())
    else:
        with LocalPool(n_workers or n_cores()) as pool:
            swept = driver.sweep(wanted, folder, workers=pool)
    warn_of(swept.name, of_table(swept.remarks, swept.n_points))
    return swept


def results(*folders: str | Path, baseline: str | None = None) -> "Table":
    """Return the results of sweeps and of runs as one table. `frame()` of it is a pandas frame.

    Args:
        folders: Folders of sweeps, or run directories.
        baseline: Label or kind of the schedule that speed-ups are over.

    Raises:
        ScenarioError: See `simdist.sweeps.results.read_results`.
    """
    from simdist.studies.remarks import warn_of
    from simdist.sweeps.results import read_results

    table = read_results(folders, baseline=baseline)
    warn_of("results", table.shown_remarks)
    return table


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
        The job, without traces that cannot be read, which its remarks name. `scenario` of it is the scenario;
        `simdist.profiles.write_scenario` writes its files.

    Raises:
        TraceError: No trace can be read, or they make no scenario.
    """
    from simdist.profiles import find_traces, import_job, profile_all, readable
    from simdist.studies.remarks import warn_of

    outcomes = profile_all(find_traces([str(trace) for trace in traces]), n_workers=n_workers)
    profiles, left_out = readable(outcomes)
    try:
        imported = import_job(profiles, name=name, options=options, left_out=left_out)
    except SimdistError:
        warn_of(name, left_out)
        raise
    warn_of(name, imported.remarks)
    return imported


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
    from simdist.studies.remarks import warn_of
    from simdist.studies.validated_run import validate_run

    found = validate_run(run_directory.read(Path(run)), Calibrated.read(Path(cluster)) if cluster else None)
    warn_of(str(run), found.remarks)
    return found
