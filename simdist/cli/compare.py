"""`simdist compare`."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.cli.tables import (
    IN_RANGES,
    SPEEDUP,
    STATES,
    STEP_TIME,
    Column,
    factor,
    links_table,
    seconds,
    shown_epochs,
    table_text,
)
from simdist.engines import Engine
from simdist.plan import LEVELS
from simdist.runs.building import build
from simdist.scenario import Scenario
from simdist.scenario.unused_settings import unstated
from simdist.settings.base import plural
from simdist.settings.units import format_seconds, format_share
from simdist.studies.comparison import (
    Row,
    ScheduleTimes,
    find_baseline,
    measure_with_additions,
    row,
    shared_delays,
    used_sentence,
)

_WIDTH = 120  # of sentences
_BEFORE = (Column("schedule"),)
_AFTER = (*STATES, Column("engine"))
_EPOCH_COLUMNS = (
    Column("schedule"),
    Column("epoch"),
    Column("time", "seconds", form=seconds),
    Column("speed-up", "speedup", form=factor),
    *(Column(name, form=format_share) for name in ("stalled", *LEVELS)),
)


@click.command("compare")
@common.scenario
@click.option("--baseline", default="sync", metavar="LABEL", help="Schedule to compare with.")
@click.option("--seeds", "n_seeds", type=click.IntRange(1, 1_000_000), default=20, help="Seeds to average over.")
@common.engine
@common.plot
@common.options
def command(
    session: common.Session, name: str, *, baseline: str, n_seeds: int, engine: Engine, plot: Path | None
) -> None:
    """Show the speed-ups over a baseline.

    All schedules meet the same delays of the same seeds. Intervals are 95 % confidence intervals over seeds.
    """
    inputs.check_picture(plot)
    scenario = inputs.read_scenario(session, name)
    reference = find_baseline(scenario, baseline)
    draw = shared_delays(scenario)
    labels = [schedule.name for schedule in scenario.schedules]
    measured: list[ScheduleTimes] = []

    def progress(label: str, done: int, total: int) -> None:
        bar.update(label, labels.index(label) + done / total, len(labels))

    try:
        with session.bar() as bar:
            for schedule in scenario.schedules:
                progress(schedule.name, 0, 1)
                with inputs.naming(f"{name}: {schedule.name}"):
                    built = build(scenario, schedule)
                    measured.append(
                        measure_with_additions(
                            scenario, built, n_seeds=n_seeds, engine=engine, progress=progress, draw=draw
                        )
                    )
    except BaseException:  # what is done is told, whatever ends the rest
        for each in measured:
            session.say(f"{each.label}: {format_seconds(float(each.step_s.mean()))} per step")
        raise
    place = scenario.schedules.index(reference)
    rows = [row(each, measured[place]) for each in measured]
    has_ranges = bool(rows[0].shares)
    title = _title(scenario, reference.name, n_seeds, has_ranges=has_ranges)
    records = [each.document() for each in rows]
    added = [Column(f"{what} add", f"{what}_add_s", form=seconds) for what in rows[0].added_s]
    shown = [
        record | {f"{what}_add_s": added_s for what, added_s in each.added_s.items()}
        for record, each in zip(records, rows, strict=True)
    ]
    times = IN_RANGES if has_ranges else (STEP_TIME, SPEEDUP)
    tables = [table_text(title, (*_BEFORE, *times, *_AFTER[:-1], *added, _AFTER[-1]), shown)]
    if any(each.epochs for each in rows):
        about = "epochs: time, share of it stalled for want of a batch, samples by level"
        tables.append(table_text(about, _EPOCH_COLUMNS, _epoch_records(rows, rows[place])))
    if any(each.links_s for each in rows):
        tables.append(links_table([(each.schedule, each.links_s, each.step_s) for each in rows]))
    document: dict[str, object] = {"scenario": scenario.name, "baseline": reference.name, "rows": records}
    doubts = unstated(scenario.cluster, scenario.schedules)
    if has_ranges:
        from simdist.studies.uncertainty import causes

        doubts += causes(scenario, {each.schedule: each.shares for each in rows})
    if doubts:
        document["doubts"] = doubts
    used = [text for each in rows for text in used_sentence(each.schedule, each.gradients_used, each.late)]
    tables += [textwrap.fill(f"{each}.", _WIDTH, break_on_hyphens=False) for each in (*used, *doubts)]
    session.result(document, "\n\n".join(tables))
    if plot:
        from simdist.report import speedup_figure

        session.draw(speedup_figure(rows, title=title), plot)


def _title(scenario: Scenario, baseline: str, n_seeds: int, *, has_ranges: bool) -> str:
    counts = f"{scenario.cluster.world_size:,} ranks, {scenario.steps:,} steps, {n_seeds} {plural(n_seeds, 'seed')}"
    title = f"{scenario.name}: {counts}; speed-up over {baseline}"
    if has_ranges:
        return f"{title}, in brackets: 95 % intervals"
    return f"{title}, 95 % confidence" if n_seeds > 1 else title


def _epoch_records(rows: Sequence[Row], base: Row) -> Iterator[dict[str, object]]:
    """Yield lines of the table of epochs: of each schedule the first ones and the last."""
    for of_row in rows:
        if of_row.staging_s:
            yield {"schedule": of_row.schedule, "epoch": "staging", "seconds": of_row.staging_s}
        for each in shown_epochs(of_row.epochs):
            if each is None:
                yield {"schedule": of_row.schedule, "epoch": "..."}
                continue
            yield {
                "schedule": of_row.schedule,
                "epoch": each.epoch,
                "seconds": each.seconds,
                "speedup": base.epochs[each.epoch].seconds / each.seconds if each.seconds else None,
                "stalled": each.stall_s / each.seconds if each.seconds else 0.0,
                **each.hits,
            }
