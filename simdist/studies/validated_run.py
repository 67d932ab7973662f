"""A run, measured and simulated: the comparison, as JSON and as text."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from simdist.errors import TraceError, naming
from simdist.runs import run_directory
from simdist.runs.building import Built, price_of
from simdist.runs.calibrated import Calibrated, simulate_run, simulated_scenario
from simdist.settings.base import picked
from simdist.settings.units import format_error, format_seconds, format_share
from simdist.studies.columns import Column, count, factor
from simdist.studies.comparison import range_of_trace
from simdist.studies.epochs import Loading, compare_loading
from simdist.studies.held import with_links
from simdist.studies.ranking import Summary
from simdist.studies.remarks import Remark, below_table, documents, remarks_of
from simdist.studies.statistics import Interval
from simdist.studies.tables import BOTH, table_text
from simdist.studies.validated_attempts import AttemptsValidation, validate_attempts
from simdist.studies.validation import Validation
from simdist.studies.validation import validate as validate_traces
from simdist.traces.links import link_in_words
from simdist.traces.trace import Trace

_MOST_RANKS = 16  # lines of a table of ranks; JSON has all
_FOUND = ("simulated_s", "measured_s", "error", "correlation", "overlap", "lead_s", "verdict")


_KIND_COLUMNS = (
    Column("operation", "op"),
    Column("stream"),
    Column("group"),
    Column("count", form=count),
    Column("simulated", "simulated_mean_s", form=format_seconds),
    Column("measured", "measured_mean_s", form=format_seconds),
    Column("error", form=format_error),
    Column("by instance", "signed_instance_error", form=format_error),
    Column("|by instance|", "instance_error", form=format_share),
)
_BLAME_COLUMNS = (
    Column("rank", form=str),
    Column("waiting caused, simulated", "simulated_s", form=format_seconds),
    Column("measured", "measured_s", form=format_seconds),
)
_LINK_COLUMNS = (Column("link"), *BOTH)
_SUMMARY_COLUMNS = (
    Column("schedule"),
    *BOTH,
    Column("error", form=format_error),
    Column("speed-up, simulated", "simulated_speedup", form=factor),
    Column("measured", "measured_speedup", form=factor),
)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A run that real ranks cannot perform.

    Args:
        run: The run.
        reason: What only the simulator can do, why, and what to write instead.
    """

    run: run_directory.RunDirectory
    reason: str

    def document(self) -> dict[str, object]:
        """Return a run that is only simulated as JSON.

        Columns:
            schedule, run, digest (str): Label, directory, digest of the plan.
            only_simulated (str): Why real ranks cannot perform it, and what to write instead.
        """
        return {
            "schedule": self.run.plan.name,
            "run": str(self.run.path),
            "digest": self.run.plan.digest(),
            "only_simulated": self.reason,
        }

    def text(self) -> str:
        """Return the same as a sentence."""
        return f"{self.run.plan.name}: only simulated: {self.reason}"


@dataclass(frozen=True, repr=False)
class ValidatedRun:
    """A run, both traces of it, and how they compare.

    Args:
        run: The run.
        real: The measured trace.
        simulated: The simulated one.
        validation: How they compare.
        loading: Epochs of both, with a data set.
        range_s: Interval of the simulated makespan, if something is uncertain.
        remarks: What to know beside the tables.
        attempts: All attempts of a run with failures.
    """

    run: run_directory.RunDirectory
    real: Trace
    simulated: Trace
    validation: Validation
    loading: Loading | None
    range_s: Interval | None
    remarks: tuple[Remark, ...] = ()
    attempts: AttemptsValidation | None = None

    def __repr__(self) -> str:
        return self.text(None)

    def document(self) -> dict[str, object]:
        """Return a validated run as JSON.

        Columns:
            schedule, run, digest (str): Label, directory, digest of the plan.
            real_rank (int): Only if the peers of one real rank were simulated: that rank, whose times are compared.
            source, simulated_by (str): Program that measured, engine that simulated.
            steps, world_size (int): Compared steps, ranks.
            simulated_s, measured_s, error (float): Makespans and their error.
            simulated_s_range90 (list): With `uncertain` values: `[low, high]`, the 90 % interval.
            kinds (list): "A kind of operation, simulated and measured".
            injections (list): "Injected delays".
            blames (list): "The blame of a rank".
            links (list): Only where links held operations up: "A link that held operations up".
            lead_s (list): Mean lead over the last member at the end of a collective: simulated, measured.
            correlation (float or null): Pearson correlation of simulated and measured blame over ranks.
            overlap (float or null): Share of the measured waiting that is simulated for the same rank and step.
            verdict (str): The rank blamed most, in words.
            epochs (list): Only with a data set: "The error of an epoch".
            hits_identical (bool or null): Only with a data set: see "How a schedule loads its data".
            hits_differences (list or null): Likewise.
            failures (object): Only with failures: "A run with failures".
            remarks (list): "A remark".
        """
        found = self.validation
        document: dict[str, object] = {
            "schedule": found.schedule,
            "run": str(self.run.path),
            "digest": self.run.plan.digest(),
            "simulated_by": self.simulated.source,
            "world_size": self.run.plan.world_size,
            **({} if self.real.real_rank is None else {"real_rank": self.real.real_rank}),
            **picked(found, "source", *_FOUND, steps="n_steps"),
            **({"simulated_s_range90": self.range_s} if self.range_s else {}),
            **{name: [asdict(part) for part in getattr(found, name)] for name in ("kinds", "injections", "blames")},
            **({"links": [asdict(link) for link in found.links]} if found.links else {}),
        }
        if self.loading:
            document["epochs"] = [asdict(error) for error in self.loading.errors]
            document |= picked(self.loading, "hits_identical", hits_differences="differences")
        if self.attempts:
            document["failures"] = self.attempts.document()
        return document | {"remarks": documents(self.remarks)}

    def text(self, cluster: Path | None) -> str:
        """Return the comparison of one run; `cluster` is the file that was simulated instead of its own.

        The remarks that only its results tell are below.
        """
        found = self.validation
        plan = self.run.plan
        machines = str(cluster) if cluster else f"the cluster of {self.run.path / run_directory.SCENARIO}"
        steps = f"{found.n_steps:,} {'' if found.n_steps == plan.n_steps else f'of {plan.n_steps:,} '}steps"
        about = f"{found.schedule}: {plan.world_size:,} ranks, {steps}"
        makespans = f"simulated {format_seconds(found.simulated_s)}, measured {format_seconds(found.measured_s)}"
        return "\n".join(
            [
                f"{about}; measured: {found.source}; simulated: {machines}",
                f"makespan{_of_rank(self.real)}: {makespans}, error {format_error(found.error)}",
                *([_range_text(found.measured_s, *self.range_s)] if self.range_s else ()),
                *(self.attempts.text() if self.attempts else ()),
                "",
                _kinds_text(found),
                "",
                *_injections_text(found),
                _blames_text(found),
                "",
                *_blame_sentences(found),
                *_links_text(found),
                *(self.loading.sentences() if self.loading else ()),
                *(line for each in below_table(self.remarks) for line in ("", each)),
            ]
        )


def validate_run(
    planned: run_directory.RunDirectory,
    calibrated: Calibrated | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ValidatedRun:
    """Simulate a measured run, and compare both.

    Args:
        planned: The run; it holds a measured trace.
        calibrated: The cluster to simulate instead of the scenario's.
        progress: Called with the number of steps simulated and of all.

    Raises:
        TraceError: The run is only simulated, or its trace cannot be read, is no measurement, or holds not one step.
    """
    path = planned.path / run_directory.REAL
    if planned.only_simulated and not path.exists():
        raise TraceError(f"{planned.path}: only simulated: {planned.only_simulated}")
    real = run_directory.read_trace(path, plan=planned.plan)
    if not real.source.startswith("real"):
        raise TraceError(f"{path}: is {real.source!r}, and no measurement: `simdist validate` needs one; move it away")
    run = run_directory.as_measured(planned, real)
    simulated = simulate_run(run, calibrated, real=real, progress=progress)
    with naming(str(path)):
        scenario = simulated_scenario(run, calibrated, real=real)
        costs = price_of(run.plan, scenario) if run.scenario.has_links else None
        real = with_links(run, real, costs) if costs else real
        validation = validate_traces(real, simulated, run.delays, costs)
        bounds = None
        if scenario.is_of_machines:
            built = Built(scenario.schedules[0], run.plan, costs or price_of(run.plan, scenario), 0)
            bounds = range_of_trace(scenario, built, simulated)
    loading = compare_loading(run, simulated, real) if run.plan.dataset else None
    range_s = bounds and (bounds[0] * validation.simulated_s, bounds[1] * validation.simulated_s)
    remarks = [*remarks_of(scenario)]
    if run is not planned:
        text = f"{path}: was measured without its disturbed links, so it is simulated without them"
        remarks.append(Remark("accuracy", text))
    if text := _other_precision(run, real):
        remarks.append(Remark("accuracy", f"{path}: {text}"))
    if validation.n_steps < run.plan.n_steps:
        text = f"{path}: only {validation.n_steps} of {run.plan.n_steps} steps were finished"
        remarks.append(Remark("accuracy", text))
    attempts = validate_attempts(run, scenario, simulated, real)
    return ValidatedRun(run, real, simulated, validation, loading, range_s, tuple(remarks), attempts)


def _other_precision(run: run_directory.RunDirectory, real: Trace) -> str:
    """Say that the model was computed in another precision than its workload states; empty if it was not."""
    computed_in = (run_directory.read_real_report(run.path, real) or {}).get("precision")
    stated = run.scenario.workload.precision
    if computed_in in (None, stated):
        return ""
    return (
        f"was computed in {computed_in}, and workload.precision is {stated}: perform it with --precision {stated}, or "
        f"calibrate with --precision {computed_in}"
    )


def order_document(summary: Summary, remarks: Iterable[Remark]) -> dict[str, object]:
    """Return the order of schedules as JSON.

    Columns:
        baseline (str): Label.
        rows (list): "A schedule in that order".
        n_clear_pairs (int): Pairs that differ by more than 5 %, predicted or measured.
        n_right_pairs (int): Those that differ so as measured, predicted in the same order.
        wrong_pairs (list): The same, not predicted in that order: `[faster, slower]` as measured.
        unmeasured_pairs (list): Pairs that differ so only as predicted: `[faster, slower]`.
        order_agrees (bool): All clear pairs are right.
        median_error, worst_error (float): Median absolute error, and the error farthest from 0.
        remarks (list): "A remark", on runs that are of other machines or of another model.
    """
    found = summary.order
    return {
        **picked(summary, "baseline", "median_error", "worst_error"),
        "rows": [asdict(row) for row in summary.rows],
        **picked(found, n_clear_pairs="n_pairs", wrong_pairs="wrong", unmeasured_pairs="unmeasured"),
        "n_right_pairs": len(found.right),
        "order_agrees": len(found.right) == found.n_pairs,
        "remarks": documents(remarks),
    }


def _range_text(measured_s: float, low_s: float, high_s: float) -> str:
    where = "below" if measured_s < low_s else "above" if measured_s > high_s else "in"
    interval = f"{format_seconds(low_s)} to {format_seconds(high_s)}"
    return f"the measured one is {where} the 90 % interval of what is uncertain, {interval}"


def _of_rank(real: Trace) -> str:
    return "" if real.real_rank is None else f" of rank {real.real_rank}, the network is not tested"


def _kinds_text(found: Validation) -> str:
    records = [
        asdict(kind) | {"simulated_mean_s": kind.simulated_mean_s, "measured_mean_s": kind.measured_mean_s}
        for kind in found.kinds
    ]
    return table_text("means and their error; by instance: medians of the error and of |error|", _KIND_COLUMNS, records)


def _injections_text(found: Validation) -> Iterator[str]:
    for each in found.injections:
        yield (
            f"injected on {each.channel}: {each.count:,} delays, drawn {format_seconds(each.drawn_s)} in all, measured "
            f"{format_seconds(each.measured_s)}; largest difference {1e3 * each.difference_s:+.3g} ms "
            f"(step {each.step}, rank {each.rank})"
        )
    if found.injections:
        yield ""


def _blames_text(found: Validation) -> str:
    worst = sorted(found.blames, key=lambda blame: -max(blame.simulated_s, blame.measured_s))[:_MOST_RANKS]
    n_ranks = len(found.blames)
    title = "all ranks" if n_ranks <= _MOST_RANKS else f"{_MOST_RANKS} of {n_ranks} ranks: those blamed most"
    return table_text(title, _BLAME_COLUMNS, [asdict(blame) for blame in sorted(worst, key=lambda blame: blame.rank)])


def _blame_sentences(found: Validation) -> Iterator[str]:
    yield f"waiting: {found.verdict}"
    if not math.isnan(found.overlap):
        correlation = "" if math.isnan(found.correlation) else f"; correlation over ranks {found.correlation:.2f}"
        share = format_share(found.overlap)
        yield f"waiting: {share} of the measured is blamed on the same rank in the same step{correlation}"
    simulated, measured = map(format_seconds, found.lead_s)
    if any(found.lead_s):
        yield f"collectives: members end before the last one by {simulated} simulated, {measured} measured, in the mean"


def _links_text(found: Validation) -> Iterator[str]:
    if found.links:
        records = [asdict(each) | {"link": link_in_words(each.link)} for each in found.links]
        yield "\n" + table_text(
            "seconds for which links held operations up, all ranks together", _LINK_COLUMNS, records
        )


def verdict_on_order(summary: Summary) -> str:
    """Return the comparison of several schedules."""
    table = table_text(
        f"makespans; speed-up over {summary.baseline}", _SUMMARY_COLUMNS, [asdict(row) for row in summary.rows]
    )
    errors = f"error: median {format_share(summary.median_error)}, worst {format_error(summary.worst_error)}"
    return f"{table}\norder: {summary.order.verdict}\n{errors}"
