"""`simdist compare`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simdist.cli import common, inputs
from simdist.engines.choose import Engine
from simdist.errors import ScenarioError, naming
from simdist.scenario import Scenario
from simdist.scenario.disturbances import Transient
from simdist.settings.units import format_seconds, parse_fraction, parse_option, parse_seconds
from simdist.studies import facets
from simdist.studies.comparison import compare
from simdist.studies.measuring import ScheduleTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simdist.studies.tolerable_rate import Tolerance

_TOLERABLE_SEEDS = 5


@click.command("compare")
@common.scenario
@common.baseline
@click.option("--seeds", "n_seeds", type=click.IntRange(1, 1_000_000), default=20, help="Seeds to average over.")
@common.engine
@click.option("--tolerable", is_flag=True, help="Show instead which rate of stragglers each schedule tolerates.")
@click.option("--delay", metavar="TIME", help="How late a straggler is; as the transient ones of SCENARIO if omitted.")
@click.option("--loss", default="5%", metavar="SHARE", help="Share of the time that may be lost, with --tolerable.")
@common.plot_option
@common.options
def command(session: common.CliSession, name: str, *, tolerable: bool, plot: Path | None, **given: Any) -> None:
    """Show the speed-ups over a baseline.

    All schedules are simulated with the same seeds and delays. Intervals are 95 % confidence intervals over seeds.
    With --tolerable: the largest probability with which each rank may be late in each step, so that no more than
    --loss of the time is lost. All else that disturbs the SCENARIO stays; --seeds is 5 if omitted.
    """
    inputs.check_picture(plot)
    if tolerable:
        common.refuse_beside("--tolerable", "baseline", "engine")
        n_seeds = given["n_seeds"] if common.is_given("n_seeds") else _TOLERABLE_SEEDS
        figure = _tolerances(session, name, n_seeds, given["delay"], given["loss"])
    else:
        common.refuse_without("--tolerable", "delay", "loss")
        figure = _speedups(session, name, given["baseline"], given["n_seeds"], given["engine"])
    if plot:
        session.draw(figure(), plot)


def _speedups(
    session: common.CliSession, name: str, baseline: str | None, n_seeds: int, engine: Engine
) -> "Callable[[], Figure]":
    """Print the speed-ups; return what draws them."""
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
    session.result(rows.document(), rows.text())
    return rows.plot


def _tolerances(
    session: common.CliSession, name: str, n_seeds: int, delay: str | None, loss: str
) -> "Callable[[], Figure]":
    """Print the tolerable rates of stragglers; return what draws them."""
    from simdist.studies.tolerable_rate import probability_text, tolerances

    most_loss = parse_option("--loss", loss, parse_fraction)
    if not 0 < most_loss < 1:
        raise ScenarioError(f"--loss {loss}: write a share above 0% and below 100%, e.g. 5%")
    scenario = inputs.read_scenario(session, name)
    labels = [schedule.name for schedule in scenario.schedules]
    found: list[Tolerance] = []

    def progress(label: str, share: float) -> None:
        bar.update(label, labels.index(label) + share, len(labels))

    try:
        with session.bar() as bar, naming(name):
            rates = tolerances(
                scenario,
                delay_s=_delay_s(scenario, delay),
                most_loss=most_loss,
                n_seeds=n_seeds,
                progress=progress,
                found=found,
            )
    except BaseException:  # what is done is told, whatever ends the rest
        for each in found:
            session.say(f"{each.schedule}: tolerable {probability_text(each.probability)}")
        raise
    session.result(rates.document(), rates.text())
    return rates.plot


def _delay_s(scenario: Scenario, delay: str | None) -> float:
    """Return how late stragglers are."""
    if delay is not None:
        delay_s = parse_option("--delay", delay, parse_seconds)
        if not delay_s:
            raise ScenarioError(f"--delay {delay}: write a time above 0 s, e.g. 100 ms")
        return delay_s
    known = [each.delay_s for each in scenario.disturbances if isinstance(each, Transient) and each.delay_s]
    if not known:
        raise ScenarioError(f"{scenario.name}: has no transient stragglers: write --delay, e.g. --delay 100ms")
    return known[0]
