"""`simdist limits`."""

from functools import partial

import click

from simdist.cli import common, inputs
from simdist.cli.tables import table_text
from simdist.errors import ScenarioError, naming
from simdist.scenario import Scenario
from simdist.scenario.disturbances import Transient
from simdist.settings.units import parse_fraction, parse_seconds
from simdist.studies.tolerable_rate import COLUMNS, Tolerance, probability_text, tolerance, tolerances_title


@click.command("limits")
@common.scenario
@click.option("--delay", metavar="TIME", help="How late a straggler is; as the transient ones of SCENARIO by default.")
@click.option("--loss", default="5%", metavar="SHARE", help="Share of the time that may be lost.")
@click.option("--seeds", "n_seeds", type=click.IntRange(1, 1_000_000), default=5, help="Seeds to average over.")
@common.schedule
@common.options
def command(
    session: common.Session, name: str, *, delay: str | None, loss: str, n_seeds: int, schedule: str | None
) -> None:
    """Show which rate of stragglers is tolerable.

    For each schedule: with which probability each rank may be late in each step, so that no more than --loss of the
    time is lost. All else that disturbs the SCENARIO stays.
    """
    most_loss = common.parsed("--loss", loss, parse_fraction)
    if not 0 < most_loss < 1:
        raise ScenarioError(f"--loss {loss}: write a share above 0% and below 100%, e.g. 5%")
    scenario = inputs.read_scenario(session, name)
    delay_s = _delay_s(scenario, delay)
    chosen = [each for each in scenario.schedules if schedule in (None, each.name)]
    if not chosen:
        labels = ", ".join(each.name for each in scenario.schedules)
        raise ScenarioError(f"{name}: no schedule is called {schedule!r}; there are: {labels}")
    found: list[Tolerance] = []
    try:
        with session.bar() as bar:
            for number, each in enumerate(chosen):
                label = each.name

                def progress(share: float, number: int = number, label: str = label) -> None:
                    bar.update(label, number + share, len(chosen))

                progress(0.0)
                one = partial(tolerance, delay_s=delay_s, most_loss=most_loss, n_seeds=n_seeds, progress=progress)
                with naming(f"{name}: {label}"):
                    found.append(one(scenario, each))
    except BaseException:  # what is done is told, whatever ends the rest
        for done in found:
            session.say(f"{done.schedule}: tolerable {probability_text(done.probability)}")
        raise
    rows = [each.record() for each in found]
    title = tolerances_title(scenario, delay_s=delay_s, most_loss=most_loss, n_seeds=n_seeds)
    text = table_text(title, COLUMNS, rows)
    session.result(_document(scenario, delay_s, most_loss, rows), text)


def _document(scenario: Scenario, delay_s: float, most_loss: float, rows: list[dict[str, object]]) -> dict[str, object]:
    """Return the answer as JSON.

    Columns:
        scenario (str): Name.
        delay_s (float): How late a straggler is.
        most_loss (float): Share of the time that may be lost.
        rows (list): "Tolerable stragglers" of each schedule.
    """
    return {"scenario": scenario.name, "delay_s": delay_s, "most_loss": most_loss, "rows": rows}


def _delay_s(scenario: Scenario, delay: str | None) -> float:
    """Return how late stragglers are."""
    if delay is not None:
        delay_s = common.parsed("--delay", delay, parse_seconds)
        if not delay_s:
            raise ScenarioError(f"--delay {delay}: write a time above 0 s, e.g. 100 ms")
        return delay_s
    known = [each.delay_s for each in scenario.disturbances if isinstance(each, Transient) and each.delay_s]
    if not known:
        raise ScenarioError(f"{scenario.name}: has no transient stragglers: write --delay, e.g. --delay 100ms")
    return known[0]
