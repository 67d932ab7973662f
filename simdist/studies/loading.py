"""What loading a data set costs, by epoch, and which storage would hide it: answers as JSON and as text."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from simdist.cost import Costs
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.errors import naming
from simdist.plan import LEVELS
from simdist.runs import run_directory
from simdist.runs.building import price_of
from simdist.runs.planned import PlannedSchedule
from simdist.scenario.cluster import Storage
from simdist.settings.base import listed, picked, plural
from simdist.settings.units import format_Bps, format_error, format_like, format_nbytes, format_share
from simdist.studies.columns import Column, seconds, shown_epochs
from simdist.studies.data_knobs import KnobEffects, Progress, knob_effects, what_to_write
from simdist.studies.epoch_bounds import LIMITS, EpochLimits, epoch_limits
from simdist.studies.epochs import HIDDEN_SHARE, Epoch, Epochs, Loading, compare_loading, find_epochs
from simdist.studies.remarks import Remark, below_table, documents, remarks_of
from simdist.studies.tables import table_text
from simdist.traces.trace import Trace

_Record: TypeAlias = dict[str, Any]

_GAP = {"epoch": "..."}
_HIDING = ("computing", "communication")  # what loading may hide behind; every other limit is loading itself


def _per_step(seconds_of_epoch: float, n_steps: int) -> str:
    return seconds(seconds_of_epoch / n_steps)


def _at(level: str) -> Callable[[dict[str, int], dict[str, int]], str]:
    """Return what prints the samples from a level, and their bytes."""
    return lambda samples, nbytes: f"{samples[level]:,} ({format_nbytes(nbytes[level])})" if samples[level] else "-"


def _removed(share: float) -> str:
    return "more than twice" if share < -1 else format_share(share)


_LEVEL_COLUMNS = tuple(Column(level, "samples", "nbytes", form=_at(level)) for level in LEVELS)
_EPOCH_COLUMNS = (
    Column("epoch"),
    Column("time", "seconds", form=seconds),
    Column("step", "seconds", "steps", form=_per_step),
    Column("stall per step", "stall_s", "steps", form=_per_step),
    Column("share", "stall_share", form=format_share),
    Column("mean of ranks", "mean_stall_s", "steps", form=_per_step),
    *_LEVEL_COLUMNS,
)
_BOTH_COLUMNS = (
    Column("epoch"),
    Column("simulated", "simulated_s", form=seconds),
    Column("measured", "measured_s", form=seconds),
    Column("error", form=format_error),
    Column("stall per step, simulated", "simulated_stall_s", "steps", form=_per_step),
    Column("measured", "stall_s", "steps", form=_per_step),
    *_LEVEL_COLUMNS,
)
_LIMIT_COLUMNS = (
    Column("epoch"),
    Column("simulated", "simulated_s", form=seconds),
    Column("at least", "least_s", form=seconds),
    Column("for", "limit"),
)
_KNOB_COLUMNS = (
    Column("change", "knob"),
    Column("run", "seconds", form=seconds),
    Column("waiting", "waiting_s", form=seconds),
    Column("removed", form=_removed),
)


@dataclass(frozen=True)
class LoadingCost:
    """What loading costs under a schedule.

    Args:
        source: The plan that loads.
        loading: Epochs of its traces.
        least: Lower bounds of staging and epochs.
        knobs: What single changes do; None if they were not tried.
        bandwidth: Bandwidth of the storage server as the scenario file writes it; None if it does not.
        remarks: What to know beside the tables.
    """

    source: PlannedSchedule
    loading: Loading
    least: Sequence[EpochLimits]
    knobs: KnobEffects | None
    bandwidth: object
    remarks: tuple[Remark, ...]

    def document(self) -> _Record:
        """Return how a schedule loads its data as JSON.

        Columns:
            schedule, digest (str): Label, digest of the plan.
            run (str or null): Directory.
            traces (list): "The loading of a trace", simulated and measured, where present.
            errors (list): Of a measured run: "The error of an epoch".
            hits_identical (bool or null): Loads read what the plan says from each level.
            hits_differences (list or null): Levels that differ (str).
            limits (list): "Lower bounds of an epoch", also of staging.
            knobs (object or null): With `--knobs`: "Knobs".
            remarks (list): "A remark".
        """
        source = self.source
        traces = {"simulated": self.loading.simulated, "measured": self.loading.measured}
        return {
            "schedule": source.schedule.name,
            "run": str(source.run.path) if source.run else None,
            "digest": source.plan.digest(),
            "traces": [_trace_document(which, found) for which, found in traces.items() if found],
            "errors": [asdict(error) for error in self.loading.errors],
            "hits_identical": self.loading.hits_identical,
            "hits_differences": self.loading.differences,
            "limits": [_limits_record(each) for each in self.least],
            "knobs": _knobs_document(self.knobs) if self.knobs else None,
            "remarks": documents(self.remarks),
        }

    def text(self) -> str:
        """Return the same as tables, with the remarks below that only its results tell."""
        plan = self.source.plan
        simulated = self.loading.simulated
        measured = self.loading.measured
        assert plan.dataset is not None
        per_epoch = plan.dataset.steps_per_epoch(plan.world_size)
        sources = simulated.source + (f"; measured: {measured.source}" if measured else "")
        about = f"{plan.name}: {plan.world_size:,} ranks, {plan.n_steps:,} steps, {per_epoch:,} an epoch; {sources}"
        below = [_limits_text(self.least, simulated, self.source.scenario.cluster.storage, self.bandwidth)]
        below += [_knobs_text(self.knobs)] if self.knobs else []
        below += below_table(self.remarks)
        return "\n".join([about, loading_text(self.loading), *(f"\n{text}" for text in below)])


def loading_cost(
    source: PlannedSchedule, *, turns_knobs: bool = False, bandwidth: object = None, progress: Progress | None = None
) -> LoadingCost:
    """Return what loading costs under a schedule: as simulated and, of a measured run, beside the measurement.

    Args:
        source: A plan with a data set.
        turns_knobs: Also change one setting at a time.
        bandwidth: Bandwidth of the storage server as the scenario file writes it.
        progress: Called with what is simulated, the steps done and all steps.
    """
    loading, missing = _loading(source, None if turns_knobs else progress)
    knobs = None
    if turns_knobs:
        with naming(source.schedule.name):
            knobs = knob_effects(source.scenario, source.schedule, source.drawn_delays(), progress=progress)
    least = epoch_limits(source.plan, source.costs, relieved=_relieved(source))
    of_scenario = remarks_of(source.scenario)
    return LoadingCost(source, loading, least, knobs, bandwidth, (*of_scenario, *missing))


def no_data(source: PlannedSchedule) -> str | None:
    """Say why loading costs nothing, and what to do; None if the plan reads a data set."""
    how = "`simdist simulate` a scenario that has data" if source.run else what_to_write(source.scenario)
    return None if source.plan.dataset else f"reads no data set, so it has no epochs: {how}"


def _relieved(source: PlannedSchedule) -> Costs | None:
    """Return the price list with unlimited bandwidth of the storage server; None without one."""
    cluster = source.scenario.cluster
    if cluster.storage is None:
        return None
    storage = cluster.storage.model_copy(update={"bandwidth_Bps": math.inf})
    relieved = cluster.model_copy(update={"storage": storage})
    return price_of(source.plan, source.scenario.model_copy(update={"cluster": relieved}))


def _loading(source: PlannedSchedule, report: Progress | None) -> tuple[Loading, list[Remark]]:
    """Return the epochs of a plan, and a remark if something is missing of its measurement."""

    def progress(step: int, n_steps: int) -> None:
        if report:
            report(source.schedule.name, step, n_steps)

    trace = _simulated(source, progress)
    if source.run is None or not (source.run.path / run_directory.REAL).exists():
        return Loading(find_epochs(trace)), []
    path = source.run.path / run_directory.REAL
    loading = compare_loading(source.run, trace, run_directory.read_trace(path, plan=source.plan))
    n_steps = len(loading.simulated.step_stall_s)
    if n_steps == source.plan.n_steps:
        return loading, []
    return loading, [Remark("accuracy", f"{path}: only {n_steps} of {source.plan.n_steps} steps were finished")]


def _simulated(source: PlannedSchedule, progress: Callable[[int, int], None]) -> Trace:
    """Read the simulated trace of a run, or make it if there is none."""
    path = source.run.path / run_directory.SIMULATED if source.run else None
    if path and path.exists():
        return run_directory.read_trace(path, plan=source.plan)
    with naming(source.schedule.name):
        delays = source.drawn_delays()
        return run(source.plan, source.costs, delays, observe=WholeTrace(), live=source.live, progress=progress)


def _knobs_document(turned: KnobEffects) -> _Record:
    """Return knobs as JSON.

    Columns:
        seconds (float): Staging and epochs as they are.
        waiting_s (float): Staging and stalls in that.
        effects (list): "Effect of a knob".
        missing (object): Knob -> the part of the scenario (str) that it needs.
    """
    effects = [asdict(effect) for effect in turned.effects]
    return picked(turned.baseline, "seconds", "waiting_s") | {"effects": effects, "missing": turned.missing}


def _trace_document(which: str, found: Epochs) -> _Record:
    """Return the loading of a trace as JSON.

    Columns:
        which, source (str): `simulated` or `measured`; program that wrote the trace.
        staging_s (float): Time of staging.
        epochs (list): "An epoch of a trace".
    """
    epochs = [_epoch_record(epoch) for epoch in found.epochs]
    return {"which": which, **picked(found, "source", "staging_s"), "epochs": epochs}


def _epoch_record(epoch: Epoch) -> _Record:
    """Return an epoch of a trace as JSON.

    Columns:
        epoch, steps (int): Number of the epoch, and of its steps.
        seconds (float): From the end of the previous epoch, or of staging.
        stall_s, stall_share (float): Stalls of the slowest rank of each step, and their share.
        mean_stall_s (float): Stalls averaged over ranks.
        hidden (bool): Less than 1 % is stalled.
        hits (object): Share of the samples (float) from `memory`, `peer` (another node's memory), `disk` and `storage`.
        samples, nbytes (object): Samples and bytes (int) from each level: of files, or of decoded samples.
    """
    times = ("seconds", "stall_s", "stall_share", "mean_stall_s", "hits")
    return picked(epoch, *times, epoch="number", steps="n_steps", hidden="is_hidden") | {
        "samples": dict(zip(LEVELS, epoch.n_samples, strict=True)),
        "nbytes": dict(zip(LEVELS, epoch.nbytes, strict=True)),
    }


def _limits_record(each: EpochLimits) -> _Record:
    """Return lower bounds of an epoch as JSON.

    Columns:
        epoch (int or null): Number. `null`: staging.
        least_s (float): The largest limit.
        limit, next_limit (str): Its name, and that of the largest with unlimited storage bandwidth.
        least_s_by_limit (object): Seconds (float) by limit. `computing` and `communication`: each collective alone.
            `server`, `operations`: storage bandwidth and operations. `clients`: their bandwidth from storage.
            `network`: NICs and switch, gradients included. `disk`, `memory`. `decoding`: workers, cores. `reading`:
            threads of a rank.
        storage_nbytes (float): Bytes read from storage.
        needed_Bps (float or null): Bandwidth at which storage takes as long as `next_limit`.
    """
    own = ("epoch", "least_s", "storage_nbytes", "needed_Bps")
    return picked(each, *own, limit="name", next_limit="next_name", least_s_by_limit="seconds")


def loading_text(loading: Loading) -> str:
    """Return the epochs of a simulation, beside those of the measurement if there was one."""
    simulated = loading.simulated
    measured = loading.measured
    if measured is None:
        records = [_GAP if each is None else _epoch_record(each) for each in shown_epochs(simulated.epochs)]
        title = "stall: for want of a batch, of the slowest rank; samples (bytes) by level"
        return "\n".join([table_text(title, _EPOCH_COLUMNS, records), *_sentences(simulated)])
    pairs = list(zip(loading.errors, simulated.epochs, measured.epochs, strict=True))
    records = [
        _GAP if each is None else _epoch_record(each[2]) | asdict(each[0]) | {"simulated_stall_s": each[1].stall_s}
        for each in shown_epochs(pairs)
    ]
    lines = [table_text("times of epochs; samples (bytes) by level as measured", _BOTH_COLUMNS, records)]
    if simulated.staging_s or measured.staging_s:
        lines.append(f"staging in: simulated {seconds(simulated.staging_s)}, measured {seconds(measured.staging_s)}")
    return "\n".join([*lines, *loading.sentences()])


def _sentences(found: Epochs) -> Iterator[str]:
    if found.staging_s:
        yield f"staging in: {seconds(found.staging_s)} before the first epoch"
    hidden = [each.number for each in found.epochs if each.is_hidden]
    seen = [each.number for each in found.epochs if not each.is_hidden]
    if not found.epochs:
        yield "no epoch: no step was finished by all ranks"
    elif not seen:
        yield f"compute hides the loading: stalls are less than {100 * HIDDEN_SHARE:g} % of every epoch"
    elif not hidden:
        yield f"compute does not hide the loading: stalls are {100 * HIDDEN_SHARE:g} % or more of every epoch"
    else:
        yield f"compute hides the loading in {_numbers(hidden)}, but not in {_numbers(seen)}"


def _numbers(epochs: Sequence[int]) -> str:
    return f"{plural(len(epochs), 'epoch')} {listed(epochs)}"


def _limits_text(least: Sequence[EpochLimits], simulated: Epochs, storage: Storage | None, bandwidth: object) -> str:
    """Return what epochs take at least, by what limits them, beside what they take; and what storage has to do."""
    names = [name for name in LIMITS if any(each.seconds[name] for each in least)]
    simulated_s: dict[int | None, float] = {each.number: each.seconds for each in simulated.epochs}
    simulated_s[None] = simulated.staging_s
    records = [
        _GAP
        if each is None
        else _limits_record(each)
        | {"epoch": "staging" if each.epoch is None else each.epoch, "simulated_s": simulated_s[each.epoch]}
        | {name: each.seconds[name] or None for name in names}
        for each in shown_epochs([each for each in least if each.epoch in simulated_s])
    ]
    title = "limits: what an epoch would take if all but one were free"
    columns = [*_LIMIT_COLUMNS, *(Column(name, form=seconds) for name in names)]
    return "\n".join([table_text(title, columns, records), *_needs(least, storage, bandwidth)])


def _needs(least: Sequence[EpochLimits], storage: Storage | None, bandwidth: object) -> Iterator[str]:
    """Yield what storage has to deliver in the epoch that asks most of it, and what limits that epoch then."""
    needs = [(each.needed_Bps, each) for each in least if each.epoch is not None and each.needed_Bps]
    if not needs or storage is None:
        return
    needed_Bps, found = max(needs, key=lambda each: float(f"{each[0]:.2e}"))  # the first of those that print alike
    would = "has" if needed_Bps <= storage.bandwidth_Bps else "would have"
    then = found.next_name
    until = f"for {then} to hide it in epoch {found.epoch}"
    if then not in _HIDING:
        until = f"for {then} ({seconds(found.relieved_s[then])}) to limit epoch {found.epoch} first"
    needed, now = (format_like(bandwidth, each, format_Bps) for each in (needed_Bps, storage.bandwidth_Bps))
    who = "storage" if storage.servers == 1 else f"the busiest of {storage.servers} storage servers"
    yield f"{who} {would} to deliver {needed} {until}; its bandwidth is {now}"


def _knobs_text(found: KnobEffects) -> str:
    """Return what knobs do to the waiting for data, by epoch and in all."""
    numbers = shown_epochs([each.number for each in found.baseline.epochs])
    now = found.baseline
    records = [{"knob": "as it is", "seconds": now.seconds, "waiting_s": now.waiting_s}]
    for each in found.effects:
        by_epoch = {f"epoch {n}": each.removed_by_epoch[n] for n in numbers if n is not None}
        records.append(asdict(each) | {"waiting_s": each.staging_s + math.fsum(each.stall_s)} | by_epoch)
    title = "one change at a time; waiting: staging and stalls"
    epoch_columns = (Column("..." if n is None else f"epoch {n}", form=_removed) for n in numbers)
    table = table_text(title, [*_KNOB_COLUMNS, *epoch_columns], records)
    return "\n".join([table, *(f"{name}: not simulated, needs {what}" for name, what in found.missing.items())])
