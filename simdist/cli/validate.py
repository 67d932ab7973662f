"""`simdist validate`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.errors import TraceError, naming
from simdist.files import save_text
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.building import Built, price_of
from simdist.runs.calibrated import Calibrated, simulate_run, simulated_scenario
from simdist.scenario import dump_cluster
from simdist.settings.base import picked
from simdist.settings.units import format_error, format_seconds, format_share
from simdist.studies.columns import Column, count, factor
from simdist.studies.comparison import find_label, range_of_trace
from simdist.studies.epochs import Loading, compare_loading
from simdist.studies.held import with_links
from simdist.studies.ranking import Summary, summarize
from simdist.studies.statistics import Interval
from simdist.studies.tables import BOTH, table_text
from simdist.studies.validation import Validation, corrected
from simdist.studies.validation import validate as validate_traces
from simdist.traces.links import link_in_words
from simdist.traces.trace import Trace

_MOST_RANKS = 16  # lines of a table of ranks; JSON has all
_FOUND = ("simulated_s", "measured_s", "error", "correlation", "overlap", "lead_s", "verdict")


@dataclass(frozen=True)
class _Validated:
    """A run, both traces of it, and how they compare."""

    run: run_directory.RunDirectory
    real: Trace
    simulated: Trace
    validation: Validation
    loading: Loading | None
    range_s: Interval | None  # of the simulated makespan, if something is uncertain


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


@click.command("validate")
@common.run
@click.option("--cluster", type=common.path, metavar="FILE", help="Simulate this calibrated cluster instead.")
@click.option("--calibrate", type=common.path, metavar="FILE", help="Fit one overhead to this run; write the cluster.")
@common.schedule
@common.plot
@common.options
def command(
    session: common.Session,
    name: str,
    *,
    cluster: Path | None,
    calibrate: Path | None,
    schedule: str | None,
    plot: Path | None,
) -> None:
    """Compare simulation and measurement.

    RUN holds trace.real.npz; `torchrun --nproc-per-node N -m real RUN` measures it. Errors are (simulated - measured) /
    measured.
    """
    inputs.check_picture(plot)
    with session.bar() as bar:
        bar.update("read the traces", 0, None)
        if calibrate and calibrate.exists():
            raise click.UsageError(f"--calibrate {calibrate}: exists; choose another file, or remove it")
        calibrated = Calibrated.read(cluster) if cluster else None
        runs = inputs.usable(session, name, inputs.read_runs(name, schedule), _missing)
        _warn_of_other_scenarios(session, runs)
        if calibrate and len(runs) > 1:
            raise click.UsageError(f"--calibrate takes one run; {name} has {len(runs)}: choose one with --schedule")
        done = list(_validate(session, runs, calibrated, bar))
    validations = [each.validation for each in done]
    base = runs[find_label([(run.plan.name, run.scenario.schedules[0].kind) for run in runs], None) or 0]
    summary = summarize(validations, baseline=base.plan.name) if len(done) > 1 else None
    texts = [_text(each, cluster) for each in done] + ([_summary_text(summary)] if summary else [])
    correction = _corrected(session, done[0], calibrated, calibrate) if calibrate else None
    texts += [f"corrected: {correction}; this run no longer tests it, other runs do"] if correction else []
    document = {
        "run": name,
        "cluster": str(cluster) if cluster else None,
        "corrected": correction,
        "rows": [_document(each) for each in done],
        "summary": _summary_document(summary) if summary else None,
    }
    session.result(document, "\n\n\n".join(texts))
    if plot:
        from simdist.report import timeline_figure

        for each in done:
            figure = timeline_figure(each.simulated, each.real, n_steps=min(4, each.validation.n_steps))
            session.draw(figure, inputs.picture_path(plot, each.validation.schedule, len(done)))


def _corrected(session: common.Session, each: _Validated, calibrated: Calibrated | None, file: Path) -> str:
    """Write the cluster in which the run takes what was measured; return what was changed."""
    if each.validation.n_steps < each.run.plan.n_steps:
        raise TraceError(f"{each.run.path}: the measurement is incomplete, so nothing is corrected: run it again")
    cluster, done = corrected(each.run, calibrated, each.real)
    save_text(file, dump_cluster(cluster))
    session.wrote(file)
    return done


def _warn_of_other_scenarios(session: common.Session, runs: Sequence[run_directory.RunDirectory]) -> None:
    """Speed-ups between different models or machines say nothing of schedules."""
    first, *others = runs
    for other in others:
        ours, theirs = ((run.scenario.cluster, run.scenario.workload) for run in (first, other))
        if ours != theirs:
            session.say(
                f"warning: {other.path}: other machines or another model than {first.path}: speed-ups mean little"
            )


def _missing(run: run_directory.RunDirectory) -> str | None:
    """Say what to do if a run was not measured to its end."""
    if (run.path / run_directory.REAL).exists():
        return None
    how = inputs.measure_command(run.path, run.plan.world_size, has_links=run.scenario.has_links)
    if (run.path / run_directory.PARTIAL).exists():
        return f"has only {run_directory.PARTIAL}, of a run that ended early; `{how}` measures all of it"
    return f"has no {run_directory.REAL}: it was not measured yet; `{how}` does it"


def _validate(
    session: common.Session, runs: Sequence[run_directory.RunDirectory], calibrated: Calibrated | None, bar: ProgressBar
) -> Iterator[_Validated]:
    for number, run in enumerate(runs):
        path = run.path / run_directory.REAL
        real = run_directory.read_trace(path, plan=run.plan)
        if not real.source.startswith("real"):
            raise TraceError(
                f"{path}: is {real.source!r}, and no measurement: `simdist validate` needs one; move it away"
            )
        planned = run
        run = run_directory.as_measured(run, real)
        if left_out := run is not planned:
            session.say(f"warning: {path}: was measured without its disturbed links, so it is simulated without them")
        n_steps = run.plan.n_steps

        def progress(step: int, number: int = number, label: str = run.plan.name, n_steps: int = n_steps) -> None:
            bar.update(f"simulate {label}", number + step / n_steps, len(runs))

        progress(0)
        simulated = simulate_run(run, calibrated, real=real, progress=progress)
        bar.update(f"compare {run.plan.name}", 0, None)
        kept = run.path / run_directory.SIMULATED
        if not (calibrated or left_out or kept.exists()):
            run_directory.save_trace(simulated, kept)
            session.wrote(kept)
        with naming(str(path)):
            scenario = simulated_scenario(run, calibrated, real=real)
            costs = price_of(run.plan, scenario) if run.scenario.has_links else None
            real = with_links(run, real, costs) if costs else real
            validation = validate_traces(real, simulated, run.delays, costs)
            bounds = None
            if scenario.is_of_machines:
                built = Built(scenario.schedules[0], run.plan, costs or price_of(run.plan, scenario), 0)
                bounds = range_of_trace(scenario, built, simulated)
        if validation.n_steps < run.plan.n_steps:
            session.say(f"warning: {path}: only {validation.n_steps} of {run.plan.n_steps} steps were finished")
        loading = compare_loading(run, simulated, real) if run.plan.dataset else None
        range_s = bounds and (bounds[0] * validation.simulated_s, bounds[1] * validation.simulated_s)
        yield _Validated(run, real, simulated, validation, loading, range_s)


def _document(each: _Validated) -> dict[str, object]:
    """Return a validated run as JSON.

    Columns:
        schedule (str): Label.
        run (str): Its directory.
        digest (str): Digest of the plan.
        source (str): Program that measured.
        simulated_by (str): Engine that simulated.
        steps (int): Steps compared: those that every rank finished.
        world_size (int): Ranks.
        simulated_s (float): Simulated makespan.
        simulated_s_lo, simulated_s_hi (float): Only where something is `uncertain`: ends of its 90 % interval.
        measured_s (float): Measured makespan.
        error (float): Error of the makespan.
        kinds (list): Kinds of operations: "A kind of operation, simulated and measured".
        injections (list): "Injected delays".
        blames (list): Stragglers: "The blame of a rank".
        links (list): Only where links held operations up: "A link that held operations up".
        lead_s (list): How much earlier than the last member the others end a collective, mean: simulated, measured.
            Simulated 0 unless the cluster's collectives are `chunkwise`.
        correlation (float or null): Pearson correlation of simulated and measured blame over the ranks. `null` if
            either is constant.
        overlap (float or null): Share of the measured waiting that the simulation charges to the same rank in the same
            step. `null` if no rank waited.
        verdict (str): The rank that is blamed most, in a sentence.
        epochs (list): Only with a data set: "The error of an epoch", for each epoch.
        hits_identical (bool or null): Only with a data set: see "How a schedule loads its data".
        hits_differences (list or null): Only with a data set: see there.
    """
    found = each.validation
    document: dict[str, object] = {
        "schedule": found.schedule,
        "run": str(each.run.path),
        "digest": each.run.plan.digest(),
        "simulated_by": each.simulated.source,
        "world_size": each.run.plan.world_size,
        **picked(found, "source", *_FOUND, steps="n_steps"),
        **(dict(zip(("simulated_s_lo", "simulated_s_hi"), each.range_s, strict=True)) if each.range_s else {}),
        **{name: [asdict(part) for part in getattr(found, name)] for name in ("kinds", "injections", "blames")},
        **({"links": [asdict(each) for each in found.links]} if found.links else {}),
    }
    if each.loading:
        document["epochs"] = [asdict(error) for error in each.loading.errors]
        document |= picked(each.loading, "hits_identical", hits_differences="differences")
    return document


def _summary_document(summary: Summary) -> dict[str, object]:
    """Return the order of schedules as JSON.

    Columns:
        baseline (str): Label.
        rows (list): "A schedule in that order".
        n_clear_pairs (int): Pairs of schedules whose step times differ by more than 5 %, predicted or measured.
        n_right_pairs (int): Clear pairs that differ by more than 5 % as measured, and are predicted in the same order
            by any margin.
        wrong_pairs (list): Clear pairs that differ by more than 5 % as measured, and are predicted in the other order
            or equal. Each `[faster, slower]` as measured.
        unmeasured_pairs (list): Pairs predicted to differ by more than 5 % and measured within 5 %. Each `[faster,
            slower]` as predicted.
        order_agrees (bool): All clear pairs are right.
        median_error (float): Median of the absolute errors of the makespans.
        worst_error (float): The error farthest from 0.
    """
    found = summary.order
    return {
        **picked(summary, "baseline", "median_error", "worst_error"),
        "rows": [asdict(row) for row in summary.rows],
        **picked(found, n_clear_pairs="n_pairs", wrong_pairs="wrong", unmeasured_pairs="unmeasured"),
        "n_right_pairs": len(found.right),
        "order_agrees": len(found.right) == found.n_pairs,
    }


def _text(each: _Validated, cluster: Path | None) -> str:
    """Return the comparison of one run."""
    found = each.validation
    plan = each.run.plan
    machines = str(cluster) if cluster else f"the cluster of {each.run.path / run_directory.SCENARIO}"
    steps = f"{found.n_steps:,} {'' if found.n_steps == plan.n_steps else f'of {plan.n_steps:,} '}steps"
    about = f"{found.schedule}: {plan.world_size:,} ranks, {steps}"
    makespans = f"simulated {format_seconds(found.simulated_s)}, measured {format_seconds(found.measured_s)}"
    return "\n".join(
        [
            f"{about}; measured: {found.source}; simulated: {machines}",
            f"makespan: {makespans}, error {format_error(found.error)}",
            *([_range_text(found.measured_s, *each.range_s)] if each.range_s else ()),
            "",
            _kinds_text(found),
            "",
            *_injections_text(found),
            _blames_text(found),
            "",
            *_blame_sentences(found),
            *_links_text(found),
            *(each.loading.sentences() if each.loading else ()),
        ]
    )


def _range_text(measured_s: float, low_s: float, high_s: float) -> str:
    where = "below" if measured_s < low_s else "above" if measured_s > high_s else "in"
    interval = f"{format_seconds(low_s)} to {format_seconds(high_s)}"
    return f"the measured one is {where} the 90 % interval of what is uncertain, {interval}"


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


def _summary_text(summary: Summary) -> str:
    """Return the comparison of several schedules."""
    table = table_text(
        f"makespans; speed-up over {summary.baseline}", _SUMMARY_COLUMNS, [asdict(row) for row in summary.rows]
    )
    errors = f"error: median {format_share(summary.median_error)}, worst {format_error(summary.worst_error)}"
    return f"{table}\norder: {summary.order.verdict}\n{errors}"
