"""`simdist compare`."""

import textwrap
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.cli.tables import facets_text, table_text
from simdist.engines.run import Engine
from simdist.errors import naming
from simdist.settings.units import format_seconds
from simdist.studies import facets
from simdist.studies.columns import ENGINE, SCHEDULE, SPEEDUP, STATES, STEP_TIME, combined
from simdist.studies.comparison import compare
from simdist.studies.measuring import ScheduleTimes

_WIDTH = 120  # of sentences
_COLUMNS = (SCHEDULE, STEP_TIME, SPEEDUP, *STATES, ENGINE)


@click.command("compare")
@common.scenario
@common.baseline
@click.option("--seeds", "n_seeds", type=click.IntRange(1, 1_000_000), default=20, help="Seeds to average over.")
@common.engine
@common.plot
@common.options
def command(
    session: common.Session, name: str, *, baseline: str | None, n_seeds: int, engine: Engine, plot: Path | None
) -> None:
    """Show the speed-ups over a baseline.

    All schedules are simulated with the same seeds and delays. Intervals are 95 % confidence intervals over seeds.
    """
    inputs.check_picture(plot)
    scenario = inputs.read_scenario(session, name)
    labels = [schedule.name for schedule in scenario.schedules]
    measured: list[ScheduleTimes] = []

    def progress(label: str, done: int, total: int) -> None:
        bar.update(label, labels.index(label) + done / total, len(labels))

    try:
        with session.bar() as bar, naming(name):
            rows = compare(
                scenario,
                baseline=baseline,
                n_seeds=n_seeds,
                engine=engine,
                progress=progress,
                measured=measured,
                facets=facets.FACETS,
            )
    except BaseException:  # what is done is told, whatever ends the rest
        for each in measured:
            session.say(f"{each.label}: {format_seconds(float(each.step_s.mean()))} per step")
        raise
    told = facets.told(rows)
    columns = combined(_COLUMNS, facets.columns(rows))
    tables = [table_text(rows.title, columns, [each.cells(told) for each in rows]), *facets_text(rows, rows.base)]
    tables += [textwrap.fill(f"{each}.", _WIDTH, break_on_hyphens=False) for each in rows.notes]
    session.result(rows.document(), "\n\n".join(tables))
    if plot:
        from simdist.report import speedup_figure

        session.draw(speedup_figure(rows, title=rows.title), plot)
