"""`simdist compare`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from simdist.cli import common, inputs
from simdist.errors import ScenarioError, naming
from simdist.scenario import Scenario
from simdist.scenario.disturbances import Transient
from simdist.settings.units import format_seconds, parse_fraction, parse_option, parse_seconds
from simdist.studies import facets
from simdist.studies.comparison import Comparison, compare
from simdist.studies.measuring import ScheduleTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simdist.studies.enough_seeds import EnoughSeeds
    from simdist.studies.tolerable_rate import Tolerance

_TOLERABLE_SEEDS = 5


class _Seeds(click.IntRange):
    """A number of seeds, or `auto`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or `auto` as it is."""
        return value if value == "auto" else super().convert(value, param, ctx)


@click.command("compare")
@common.scenario
@common.baseline
@click.option(
    "--seeds",
    "n_seeds",
    metavar="N",
    type=_Seeds(1, 1_000_000),
    default=20,
    help="Seeds to average over; auto: as many as it takes to know every number within --width.",
)
@click.option(
    "--warm-up", metavar="N", type=click.IntRange(min=0), default=0, help="First steps to leave out of means."
)
@click.option("--width", default="1%", metavar="SHARE", help="Half the width of intervals, with --seeds auto.")
@click.option("--most-seeds", type=common.positive, metavar="N", help="Budget of --seeds auto; 1,000 if omitted.")
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
        common.refuse_beside("--tolerable", "baseline", "engine", "width", "most_seeds", "warm_up")
        if given["n_seeds"] == "auto":
            raise click.UsageError("--seeds auto: means nothing with --tolerable: write a number")
        n_seeds = given["n_seeds"] if common.is_given("n_seeds") else _TOLERABLE_SEEDS
        figure = _tolerances(session, name, n_seeds, given["delay"], given["loss"])
    else:
        common.refuse_without("--tolerable", "delay", "loss")
        asked = {key: given[key] for key in ("baseline", "engine", "warm_up")}
        figure = _speedups(session, name, _n_seeds(given["n_seeds"], given["width"], given["most_seeds"]), asked)
    if plot:
        session.draw(figure(), plot)


def _n_seeds(n_seeds: int | Literal["auto"], width: str, most: int | None) -> "int | EnoughSeeds":
    """Return how many seeds are asked for."""
    if n_seeds != "auto":
        common.refuse_without("--seeds auto", "width", "most_seeds")
        return n_seeds
    from simdist.studies.enough_seeds import EnoughSeeds

    share = parse_option("--width", width, parse_fraction)
    if not 0 < share < 1:
        raise ScenarioError(f"--width {width}: write a share above 0% and below 100%, e.g. 1%")
    return EnoughSeeds(width=share) if most is None else EnoughSeeds(width=share, most=most)


def _speedups(
    session: common.CliSession, name: str, n_seeds: "int | EnoughSeeds", asked: Mapping[str, Any]
) -> "Callable[[], Figure]":
    """Print the speed-ups as they are asked for; return what draws them."""
    scenario = inputs.read_scenario(session, name)
    labels = [schedule.name for schedule in scenario.schedules]
    measured: list[ScheduleTimes] = []

    def progress(label: str, done: int, total: int) -> None:
        bar.update(label, labels.index(label) + done / total, len(labels))

    try:
        with session.bar() as bar, naming(name):
            ask: Callable[..., Comparison] = compare
            if not isinstance(n_seeds, int):
                from simdist.studies.enough_seeds import compare_with_enough

                ask = compare_with_enough
            rows = ask(
                scenario,
                n_seeds=n_seeds,
                progress=progress,
                measured=measured,
                facets=facets.FACETS,
                **asked,
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
