"""What stragglers cost a job, and what would help: the answer of `simdist whatif` as JSON and as text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from simdist.cost import Costs
from simdist.engines.observers import WholeTrace
from simdist.engines.replay import Timing, timing
from simdist.engines.run import run
from simdist.errors import PlanError, RunError, naming
from simdist.plan.ops import Channel
from simdist.plan.text import ranks_named
from simdist.runs import run_directory
from simdist.runs.building import build, delays, live_of, price_of
from simdist.scenario import Imported, Scenario
from simdist.schedules import Schedule
from simdist.settings.base import picked, plural
from simdist.settings.units import format_seconds, format_share
from simdist.stragglers import losses
from simdist.stragglers.gains import Gain, Gains, find_gains
from simdist.stragglers.losses import LOST, SLOWDOWN, STEP_COLUMNS, loss_records, slowest_text
from simdist.stragglers.recording import as_recorded, delays_of_steps, measured_delays, with_recording
from simdist.stragglers.slowdown import Slowdown, find_slowdown
from simdist.stragglers.verdict import Pattern, find_pattern, interval_text, spread_sentence, verdict_sentence
from simdist.studies.columns import PLAIN_SPEEDUP, PLAIN_STEP_TIME, SCHEDULE, Column
from simdist.studies.facets import GradientsUsed
from simdist.studies.held import find_held, with_links, without_links
from simdist.studies.imported_facts import facts_record, facts_text, lost_text, not_compared
from simdist.studies.remarks import Remark, below_table, documents
from simdist.studies.resampling import remarks_as_run
from simdist.studies.tables import table_text
from simdist.traces.links import Held, link_in_words
from simdist.traces.trace import Trace, late_shares

_Record: TypeAlias = dict[str, Any]
#: Called with what is done, the work done and all work.
_Progress: TypeAlias = Callable[[str, float, float], None]

_MOST_LINKS = 6  # lines of a table; JSON has all
_MOST_VALUES = 150_000_000  # of operations x ranks in a trace: 3.6 GB
_ARRAYS = 7  # of a trace, of its durations, and of levelled and shuffled ones
_PROBED_STEPS = 64
_REPLAY_ERROR = 0.01
_SIMULATION_ERROR = 0.1

_FOUND = (
    "world_size",
    "slowdown",
    "lost_share",
    "traced_s",
    "replayed_s",
    "explained_s",
    "ideal_s",
    "slowest_ranks",
    "fixed_by_ranks",
    "slowest_node",
    "fixed_by_node",
)
_OF_GAIN = ("schedule", "step_s", "speedup", "is_sure", "problem", "engine")

_RANK_COLUMNS = (
    Column("rank", form=str),
    Column("node", form=str),
    SLOWDOWN,
    LOST,
    Column("slow steps", form="{:,}".format),
)
_NODE_COLUMNS = (Column("node", form=str), SLOWDOWN, LOST)
_LINK_COLUMNS = (
    Column("link"),
    Column("held up", "held_s", form=format_seconds),
    PLAIN_STEP_TIME,
    PLAIN_SPEEDUP,
)
_GAIN_COLUMNS = (
    SCHEDULE,
    PLAIN_STEP_TIME,
    PLAIN_SPEEDUP,
    Column("95 %", "interval", form=str),
)


@dataclass(frozen=True, slots=True)
class WhatifOptions:
    """The options, which click gives by the names of these fields.

    Args:
        schedule: Label of that whose trace is looked at; None: `sync`, or the first that is synchronous SGD, or the
            first.
        which: Trace of a run directory, of `run_directory.TRACES`; None: the measured one if there is one.
        steps: Consecutive steps to look at; None: all.
        schedules: See `schedules_to_compare`.
        n_runs: Runs of each schedule; 0: schedules are not compared.
        block_steps: Steps of a block of a recording; None: chosen.
        seed: Of the first run; None: the scenario's.
        cluster: File or preset whose links schedules are simulated with; None: the job's own.
    """

    schedule: str | None
    which: str | None
    steps: range | None
    schedules: str | None
    n_runs: int
    block_steps: int | None
    seed: int | None
    cluster: str | None


@dataclass(frozen=True)
class WhatifJob:
    """The job under analysis.

    Args:
        name: Name that the user wrote.
        scenario: Scenario of the job, disturbed as it says.
        baseline: The schedule that it has.
        others: Other schedules that came with it.
        trace: Trace of the job.
        run: Its run directory, if it has one.
        steps: Places of the steps to look at in the trace; None: all.
        remarks: What to know of the job before it is analysed.
    """

    name: str
    scenario: Scenario
    baseline: Schedule
    others: tuple[Schedule, ...]
    trace: Trace
    run: run_directory.RunDirectory | None
    steps: range | None
    remarks: tuple[Remark, ...] = ()

    @property
    def numbers(self) -> Sequence[int]:
        """Number of each step of the trace: the profiler's if the job was imported."""
        return range(self.trace.plan.n_steps) if self.run else numbers_of(self.scenario, self.trace.plan.n_steps)

    @property
    def is_measured(self) -> bool:
        """Whether real machines wrote the trace."""
        return self.trace.source.startswith("real")


def numbers_of(scenario: Scenario, n_steps: int) -> Sequence[int]:
    """Return the numbers of the steps of a scenario: of an imported one, those of the profiler."""
    traced = scenario.imported.numbers if scenario.imported else ()
    return traced[:n_steps] if len(traced) >= n_steps else range(n_steps)


@dataclass(frozen=True, repr=False)
class WhatifAnswer:
    """What stragglers cost a job, and what other schedules would gain.

    Args:
        job: The job.
        slowdown: What stragglers cost.
        pattern: How the loss is spread.
        gains: What other schedules gain; None if none are compared.
        links: What repairing each link would gain, see `_links`.
        cluster: File or preset whose links schedules are simulated with; None for the job's own.
    """

    job: WhatifJob
    slowdown: Slowdown
    pattern: Pattern
    gains: Gains | None
    links: list[_Record]
    cluster: str | None = None

    def document(self) -> _Record:
        """Return all that was found; seconds are per step unless they are of one step.

        Columns:
            job, schedule, trace (str): RUN or SCENARIO, label, program that wrote the trace.
            world_size, first_step, steps (int): Ranks, first analysed step, number of steps.
            slowdown (float): `replayed_s` / `ideal_s`.
            lost_share (float): Share of the time that stragglers cost.
            traced_s, replayed_s, explained_s, ideal_s (float): Step as in the trace; replayed; without the time between
                operations; with ideal durations.
            pattern (object): "How a loss is spread".
            kinds (list): "Cost of a kind of operation", most first.
            ranks (list): "Cost of a rank".
            channels, nodes (list): The same of each `channel` and each `node`: `slowdown`, `lost_s`.
            by_step (list): "The slowdown of a step".
            slowest_ranks (list): The costliest 3 % of the ranks (int).
            slowest_node (int): The node that costs most.
            fixed_by_ranks, fixed_by_node (float or null): Share of the loss that vanishes if these are ideal.
            stragglers (str): `pattern` in words.
            cluster (str or null): Value of `--cluster`.
            gains (object or null): "Gains of other schedules", if compared.
            verdict (str or null): The fastest schedule, or why there is none.
            links (list): Only where links misbehaved: "What repairing a link would gain", most first.
            gradients_used (float): Only below 1: share of batches used.
            imported (object or null): Of an imported scenario: `step_s` and `error` (float) of the traced step, its
                `parts_s` (object), `lost` (object): "Shares of a step that are lost", `without_named_s` (float),
                `left_out` and `verdict` (str).
            remarks (list): "A remark".

        Columns of ranks:
            rank, node (int): Rank and its node.
            slowdown, lost_s (float): Slowdown, and time added to the ideal, if only this rank is as traced.

        Columns of by_step:
            step (int): Step; of an imported job, as the profiler numbers it.
            step_s, ideal_s (float): Its time, and its ideal time.
            slowdown (float or null): The ratio. `null` if the ideal is 0.
            slowest_rank (int): The rank that alone costs this step most.
        """
        job = self.job
        found = self.slowdown
        spread = self.pattern
        compared = self.gains
        ranks = loss_records(found.rank_slowdowns, found.ideal_s)
        nodes = loss_records(found.node_slowdowns, found.ideal_s)
        return {
            "job": job.name,
            "schedule": job.baseline.name,
            "trace": job.trace.source,
            "first_step": job.numbers[found.first_step],
            **picked(found, *_FOUND, steps="n_steps"),
            "pattern": asdict(spread),
            "kinds": [asdict(part) for part in found.kinds],
            "channels": [
                {key: value for key, value in asdict(each).items() if key != "name"} for each in found.channels
            ],
            "ranks": [{"rank": n, "node": n // found.ranks_per_node} | each for n, each in enumerate(ranks)],
            "nodes": [{"node": n} | each for n, each in enumerate(nodes)],
            "by_step": [
                {
                    "step": job.numbers[found.first_step + step],
                    "step_s": float(found.step_s[step]),
                    "ideal_s": float(found.ideal_step_s[step]),
                    "slowdown": float(found.step_slowdowns[step]),
                    "slowest_rank": int(found.rank_step_s[step].argmax()),
                }
                for step in range(found.n_steps)
            ],
            "stragglers": spread_sentence(found, spread, late_on=_late_on(job)),
            "cluster": self.cluster,
            "gains": _gains_document(compared) if compared else None,
            "verdict": verdict_sentence(found, spread, compared) if compared else not_compared(job.scenario),
            **({"gradients_used": used} if (used := job.trace.plan.gradients_used) < 1 else {}),
            "imported": facts_record(job.scenario.imported) if job.scenario.imported else None,
            **({"links": self.links} if self.links else {}),
            "remarks": documents(self.remarks),
        }

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the analysis of a job, and what other schedules would gain, as tables."""
        document = self.document()
        job = self.job
        found = self.slowdown
        compared = self.gains
        return "\n".join(
            [
                *_heading(job, found),
                f"stragglers: {document['stragglers']}",
                *_worst_link(document.get("links", []), found),
                *_fixed(found),
                losses.slow_steps_line(found.step_slowdowns),
                *_named(job.scenario.imported),
                "",
                losses.EACH_ALONE,
                "",
                losses.kinds_text(document["kinds"]),
                "",
                _ranks_text(found, document["ranks"]),
                *_nodes_text(found, document["nodes"]),
                *_links_text(document.get("links", [])),
                "",
                slowest_text("steps", STEP_COLUMNS, document["by_step"]),
                *(_gains_text(compared, document["gains"]["rows"]) if compared else ()),
                *([f"\n{facts_text(job.scenario.imported)}"] if job.scenario.imported else ()),
                *([document["verdict"]] if document["verdict"] else ()),
                *(line for each in below_table(self.remarks) for line in ("", each)),
            ]
        )

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What to know beside the tables: remarks on the job, gradients that are not used, numbers that disagree."""
        job = self.job
        used = GradientsUsed.of(job.trace.plan, late_shares(job.trace))
        found = (*job.remarks, *used.remarks(job.baseline.name), *self._disagreeing(), *self._of_gains())
        return tuple(dict.fromkeys(found))

    def _disagreeing(self) -> Iterator[Remark]:
        """Yield where numbers that should be the same are not."""
        found = self.slowdown
        compared = self.gains
        traced = format_seconds(found.traced_s)
        replayed = format_seconds(found.replayed_s)
        if abs(found.replayed_s - found.traced_s) > _REPLAY_ERROR * found.traced_s:
            text = f"the trace contradicts its plan: replayed {replayed} per step, traced {traced}"
            yield Remark("accuracy", text)
        if not (compared and self.job.is_measured):
            return
        if abs(compared.baseline_step_s - found.traced_s) > _SIMULATION_ERROR * found.traced_s:
            text = (
                f"{compared.baseline} takes {traced} per step as measured, "
                f"{format_seconds(compared.baseline_step_s)} as simulated: the speed-ups are those of the simulation; "
                f"`simdist validate` shows which operations differ"
            )
            yield Remark("accuracy", text, compared.baseline)

    def _of_gains(self) -> Iterator[Remark]:
        if self.gains is None:
            return
        yield from self.gains.remarks
        for row in self.gains.rows:
            yield from GradientsUsed(row.gradients_used).remarks(row.schedule)
        for problem in dict.fromkeys(row.problem for row in self.gains.rows if row.problem):
            yield Remark("accuracy", f"no interval: {problem}")


def simulated_job(name: str, scenario: Scenario, baseline: Schedule, steps: range | None = None) -> WhatifJob:
    """Simulate a schedule of a scenario with the delays of its seed.

    Args:
        name: Name for messages.
        scenario: The scenario, with what it records.
        baseline: One of its schedules.
        steps: Places of the steps to look at; None: all.

    Raises:
        PlanError: The schedule does not fit the cluster, or the trace would not fit into memory.
    """
    simulated = as_recorded(scenario)
    if steps and steps.stop < simulated.steps:
        simulated = simulated.changed(steps=max(1, steps.stop))
    with naming(name):
        _refuse_large(simulated, baseline)
        built = build(simulated, baseline)
        live = live_of(simulated, built.costs)
        trace = run(built.plan, built.costs, delays(simulated), observe=WholeTrace(n_arrays=_ARRAYS), live=live)
    others = tuple(schedule for schedule in scenario.schedules if schedule is not baseline)
    return WhatifJob(name, scenario, baseline, others, trace, None, steps, remarks_as_run(scenario))


def _refuse_large(scenario: Scenario, schedule: Schedule) -> None:
    """Refuse what memory would not hold, before it is simulated. The first steps tell how large the others are."""
    first = min(scenario.steps, _PROBED_STEPS)
    plan = build(scenario.changed(steps=first), schedule).plan
    n_values = plan.n_instances * plan.world_size * scenario.steps // first
    if n_values > _MOST_VALUES:
        raise PlanError(
            f"{n_values:,} operations on all ranks are more than {_MOST_VALUES:,}, what memory holds: look at fewer "
            f"steps, e.g. --steps 0:{max(1, scenario.steps * _MOST_VALUES // n_values)}"
        )


def answer_whatif(
    job: WhatifJob, others: Sequence[Schedule], options: WhatifOptions, progress: _Progress
) -> WhatifAnswer:
    """Return what stragglers cost a job, and what other schedules would gain.

    Args:
        job: The job.
        others: Schedules to compare with its own; none are compared if there are none.
        options: How they are compared.
        progress: Called with what is done, the work done and all work.

    Raises:
        TraceError: There is nothing to replay.
        ScenarioError: A schedule takes no time, or a block is longer than the recording.
        PlanError: A schedule does not fit the cluster.
        RunError: There is no temporary directory.
    """
    with naming(str(job.run.path) if job.run else job.name):
        found = find_slowdown(
            job.trace,
            ranks_per_node=job.scenario.cluster.gpus_per_node,
            steps=job.steps,
            progress=partial(progress, "replay"),
        )
    links = _links(job)
    if options.n_runs and not (others or not_compared(job.scenario)):
        nothing = Remark("result", "no other schedule fits it, so there is nothing to compare with", job.baseline.name)
        job = replace(job, remarks=(*job.remarks, nothing))
    compared = _gains(job, others, options, progress) if others else None
    return WhatifAnswer(job, found, find_pattern(found), compared, links, options.cluster)


def _gains(job: WhatifJob, schedules: Sequence[Schedule], options: WhatifOptions, progress_of_all: _Progress) -> Gains:
    """Compare schedules under what disturbed the job; a recording of that is needed only meanwhile."""
    n_total = len(schedules) + 1
    labels = [job.baseline.name, *(schedule.name for schedule in schedules)]

    def progress(label: str, done: int, total: int) -> None:
        progress_of_all(label, labels.index(label) + done / total, n_total)

    try:
        with TemporaryDirectory(prefix="simdist-") as folder, naming(job.name):
            return find_gains(
                _disturbed(job, options, Path(folder)),
                schedules,
                baseline=job.baseline,
                n_runs=options.n_runs,
                block_steps=options.block_steps,
                progress=progress,
            )
    except OSError as error:
        raise RunError(f"no temporary directory: {error.strerror or error}; set TMPDIR") from None


def _held(job: WhatifJob) -> tuple[Trace, Costs, Held]:
    """Return the trace with what links did, its prices on the cluster that it is of, and what links held up."""
    costs = price_of(job.trace.plan, job.run.scenario if job.run else job.scenario)
    trace = with_links(job.run, job.trace, costs) if job.run and job.is_measured else job.trace
    return trace, costs, find_held(trace, costs)


def _links(job: WhatifJob) -> list[_Record]:
    """Return what repairing each link would gain, most first.

    Columns:
        link (str): Link, such as `nic_out[3]`.
        held_s (float): Time for which it held operations up, over all steps and ranks.
        step_s, speedup (float): Step time and speed-up of a replay without that.
    """
    if not job.scenario.has_links:
        return []
    trace, _, held = _held(job)
    replayed_s, repaired = without_links(trace, held)
    n_steps = trace.plan.n_steps
    records: list[_Record] = [
        {
            "link": name,
            "held_s": held_s,
            "step_s": repaired[name] / n_steps,
            "speedup": replayed_s / repaired[name] if repaired[name] else 1.0,
        }
        for name, held_s in held.rank_seconds().items()
        if held_s > 0
    ]
    return sorted(records, key=lambda record: -record["speedup"])


def _disturbed(job: WhatifJob, options: WhatifOptions, folder: Path) -> Scenario:
    """Return the scenario in which schedules are compared; that of a run replays what disturbed the run."""
    if job.run is None:
        return job.scenario
    traced = range(job.trace.plan.n_steps)
    chosen = traced[job.steps.start : job.steps.stop] if job.steps else traced
    if job.is_measured:
        trace, costs, held = _held(job)
        timed = timing(trace)
        undisturbed = Timing(timed.gaps_s, timed.durations_s - held.seconds)  # the scenario disturbs links itself
        late_s = measured_delays(trace, undisturbed, costs)
    else:
        late_s = dict(job.run.delays)
    scenario = with_recording(job.scenario, delays_of_steps(late_s, chosen), folder)
    return scenario if options.seed is None else scenario.changed(seed=options.seed)


def _late_on(job: WhatifJob) -> Channel | None:
    """Return on what stragglers of an imported job are late: its delays may be played elsewhere."""
    return (job.scenario.imported.late_on or None) if job.scenario.imported else None


def _optional_columns(row: Gain) -> list[str]:
    return ["gradients_used"] if row.gradients_used < 1 else []


def _gains_document(compared: Gains) -> _Record:
    """Return gains of other schedules as JSON.

    Columns:
        baseline (str): Label.
        baseline_step_s (float): Its step time, averaged over runs.
        drawn (str): Runs: `recorded` (from blocks of a recording), `random` or `fixed` (nothing is random).
        runs, steps (int): Runs of each schedule, and steps of a run, without those that complete a period.
        recorded_steps, block_steps (int or null): Steps of the recording, and how many stay together.
        rows (list): "The gain of a schedule".
        fastest, best (str or null): The fastest on average, and of those that are surely faster.

    Columns of rows:
        schedule (str): Label.
        step_s, speedup (float): Averaged over runs.
        speedup_95 (list or null): `[low, high]`. Random disturbances: of 95 % of the runs. A recording: as certain as
            its steps allow.
        is_sure (bool): All of it is above 1.
        problem (str or null): Why there is no interval, if something is random.
        engine (str): `fast` or `des`.
        gradients_used (float): Only below 1: share of batches used.
    """
    best = compared.best
    fastest = compared.fastest
    return {
        **picked(compared, "baseline", "baseline_step_s", "drawn", runs="n_runs", steps="n_steps"),
        "recorded_steps": compared.recording.n_steps if compared.recording else None,
        "block_steps": compared.recording.block_steps if compared.recording else None,
        "rows": [picked(row, *_OF_GAIN, *_optional_columns(row), speedup_95="interval") for row in compared.rows],
        "fastest": fastest.schedule if fastest else None,
        "best": best.schedule if best else None,
    }


def _heading(job: WhatifJob, found: Slowdown) -> Iterator[str]:
    first, last = (job.numbers[place] for place in (found.first_step, found.first_step + found.n_steps - 1))
    steps = f"{found.n_steps:,} steps" if found.n_steps == job.trace.plan.n_steps else f"steps {first} to {last}"
    yield f"{job.baseline.name}: {found.world_size:,} ranks, {steps}; {job.trace.source}"
    yield losses.slowdown_line(found.slowdown, found.replayed_s, found.ideal_s)
    unexplained_s = found.replayed_s - found.explained_s
    if unexplained_s > losses.ROUNDING_S:
        explained = format_seconds(found.explained_s)
        traced = format_seconds(found.traced_s)
        yield (
            f"replayed {explained} per step, traced {traced}: {format_share(unexplained_s / found.replayed_s)} is in "
            f"no operation of the plan; it is kept where it was, as `between operations`"
        )


def _named(facts: Imported | None) -> Iterator[str]:
    """Say what is lost to what the import names, as the import does."""
    if facts:
        yield f"as imported, {lost_text(facts.lost, facts.without_named_s)}"


def _fixed(found: Slowdown) -> Iterator[str]:
    if found.fixed_by_ranks is None:
        return
    gone = format_share(found.fixed_by_ranks)
    text = f"with {ranks_named(found.slowest_ranks)} as fast as is typical, {gone} of the loss"
    if found.fixed_by_node is not None and len(found.node_slowdowns) > 1 and found.ranks_per_node > 1:
        text += f"; with node {found.slowest_node}, {format_share(found.fixed_by_node)}"
    yield f"would be gone: {text}"


def _ranks_text(found: Slowdown, ranks: Sequence[_Record]) -> str:
    slow_steps = (found.rank_step_slowdowns > losses.SLOW).sum(axis=0).tolist()
    records = [rank | {"slow steps": n_steps} for rank, n_steps in zip(ranks, slow_steps, strict=True)]
    return slowest_text("ranks", _RANK_COLUMNS, records)


def _nodes_text(found: Slowdown, nodes: Sequence[_Record]) -> Iterator[str]:
    if len(nodes) > 1 and found.ranks_per_node > 1:
        yield ""
        yield slowest_text("nodes", _NODE_COLUMNS, nodes)


def _worst_link(records: Sequence[_Record], found: Slowdown) -> Iterator[str]:
    for worst in records[:1]:
        step = format_seconds(found.replayed_s)
        without = format_seconds(worst["step_s"])
        yield f"links: {link_in_words(worst['link'])} held ranks up: {without} per step without that, {step} with it"


def _links_text(records: Sequence[_Record]) -> Iterator[str]:
    if records:
        shown = [record | {"link": link_in_words(record["link"])} for record in records[:_MOST_LINKS]]
        yield ""
        yield table_text("links: held up, seconds of all ranks; a step without that", _LINK_COLUMNS, shown)


def _gains_text(compared: Gains, rows: Sequence[_Record]) -> Iterator[str]:
    base = {"schedule": compared.baseline, "step_s": compared.baseline_step_s, "speedup": 1.0}
    records = [row | {"interval": interval_text(gain)} for row, gain in zip(rows, compared.rows, strict=True)]
    yield ""
    yield table_text("schedules", _GAIN_COLUMNS, [base, *records])
    yield _runs_text(compared)


def _runs_text(compared: Gains) -> str:
    n_runs = f"{compared.n_runs:,} {plural(compared.n_runs, 'run')}"
    runs = f"{n_runs} of {compared.n_steps:,} steps or a few more, in whole periods"
    if recording := compared.recording:
        blocks = f"blocks of {recording.block_steps} of {recording.n_steps:,} recorded steps"
        return f"{runs}, put together from {blocks}; 95 %: what that many recorded steps leave open"
    if compared.drawn == "random":
        return f"{runs}, disturbed by other draws; 95 % of the runs lie in the interval"
    return f"one run of {compared.n_steps:,} steps: nothing is random"
