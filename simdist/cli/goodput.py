"""`simdist goodput`."""

from pathlib import Path
from typing import get_args

import click

from simdist.cli import common, inputs
from simdist.errors import ScenarioError, naming
from simdist.scenario.failures import OnFailure
from simdist.settings.base import shown


@click.command("goodput")
@common.scenario
@common.baseline
@click.option(
    "--policies", metavar="P,...", help="Policies to compare, e.g. restart,spare,continue; the first is the baseline's."
)
@click.option("--seeds", "n_seeds", metavar="N", type=common.positive, default=20, help="Seeds of steps and failures.")
@click.option(
    "--price", type=click.FloatRange(min=0), metavar="DOLLARS", help="Of an hour of a GPU; shows what losses cost."
)
@click.option("--csv", type=common.path_type, metavar="FILE", help="Write the rows to a CSV file.")
@common.plot_option
@common.options
def command(
    session: common.CliSession,
    name: str,
    *,
    baseline: str | None,
    policies: str | None,
    n_seeds: int,
    price: float | None,
    csv: Path | None,
    plot: Path | None,
) -> None:
    """Show how much of a job's time trains the model under failures.

    SCENARIO has `failures` and `train_for`. Each schedule meets the same failures. If the policy is not restart, each
    has a row with restart too, unless --policies says which. Also shown: where the rest of the time goes, what each
    cause takes, the interval between checkpoints with which most is trained, and goodput at other rates of failures.
    """
    from simdist.studies.goodput import goodput

    inputs.check_picture(plot)
    if csv:
        inputs.check_folder(csv)
    scenario = inputs.read_scenario(session, name)
    if scenario.failures is None:
        hint = "write failures: {causes: [{cause: gpu, of: gpu, rate: 17 % per year, effect: node}]}, with your rates"
        raise ScenarioError(f"{name}: failures: nothing fails: {hint}")
    labels = [schedule.name for schedule in scenario.schedules]

    def progress(label: str, share: float) -> None:
        bar.update(label, labels.index(label) + share, len(labels))

    with session.bar() as bar, naming(name):
        study = goodput(
            scenario,
            baseline=baseline,
            on_failure=_policies(policies),
            n_seeds=n_seeds,
            price_per_gpu_hour=price,
            progress=progress,
        )
    if csv:
        from simdist.sweeps.results import write_csv

        write_csv(study.columns(), csv)
        session.wrote(csv)
    session.result(study.document(), study.text())
    if plot:
        session.draw(study.plot(), plot)


def _policies(text: str | None) -> list[OnFailure]:
    words = [] if text is None else [word.strip() for word in text.split(",")]
    known: dict[str, OnFailure] = {each: each for each in get_args(OnFailure)}
    for word in words:
        if word not in known:
            raise ScenarioError(f"--policies {shown(word)}: write restart, spare or continue, such as restart,continue")
    return [known[word] for word in words]
