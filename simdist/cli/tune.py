"""`simdist tune`."""

import math
from dataclasses import fields
from typing import Any, get_args

import click

from simdist.cli import common, inputs, learn
from simdist.errors import ScenarioError, naming
from simdist.scenario import Scenario
from simdist.scenario.checkpoint import Mode
from simdist.scenario.workload import MAX_MICRO_BATCHES
from simdist.settings.base import shown
from simdist.settings.units import parse_factor, parse_fraction, parse_nbytes, parse_option
from simdist.studies.imported_facts import facts_record, facts_text, not_compared
from simdist.tuning import Constraints, Extras, TuneOptions, tune
from simdist.tuning.answer import as_searched, search_remarks
from simdist.tuning.candidates import permits, tried_kinds
from simdist.tuning.tuning import usual_global_every

_INTERRUPTED = 130  # exit status
_LINE_S = 2.0  # from one line of progress to the next, where there is no terminal


class _Declared(click.Option):
    """Takes kinds of schedules, or words that they ask a user to allow; help lists those of installed packages.

    Both are open: the scenario may name schedules of its own.
    """

    def make_metavar(self, ctx: click.Context | None = None) -> str:
        """Return all that are declared."""
        kinds = tried_kinds()
        return f"[{'|'.join(kinds if self.name == 'only' else permits(kinds))}]"


@click.command("tune")
@common.scenario
@click.option(
    "--global-every", type=common.positive, metavar="H", help="Maximum steps between global exchanges; 8 or as today."
)
@click.option("--group-every", multiple=True, metavar="RANKS:H", help="Maximum steps between exchanges within groups.")
@click.option("--max-bytes", metavar="SIZE", help="Maximum bytes that a node sends per step, e.g. 20 MB.")
@click.option("--memory", metavar="SIZE", help="Maximum memory in use on the device of a rank.")
@click.option("--host-memory", metavar="SIZE", help="Maximum host memory for the buffers of a rank.")
@click.option("--min-density", metavar="SHARE", help="Also try sparse gradients of this density or more, e.g. 1%.")
@click.option("--micro-batches", metavar="K,...", help="Micro-batches per step to try, e.g. 1,2,4.")
@click.option("--checkpoint-every", metavar="K,...", help="Steps between checkpoints to try, e.g. 100,500.")
@click.option(
    "--checkpoint-mode",
    multiple=True,
    type=click.Choice(get_args(Mode)),
    help="Ways to write checkpoints to try; repeatable.",
)
@click.option("--only", multiple=True, cls=_Declared, help="Only schedules of this kind; may be repeated.")
@click.option("--allow", multiple=True, cls=_Declared, help="Also try these; repeat.")
@click.option("--baseline", metavar="LABEL", help="Label or kind of the schedule to beat; the first if omitted.")
@click.option(
    "--seeds", "n_seeds", type=click.IntRange(2, 1_000_000), help="Seeds of the finalists; 20, with recordings 200."
)
@click.option(
    "--search-seeds", "n_search_seeds", type=click.IntRange(1, 1_000_000), default=5, help="Seeds during the search."
)
@click.option(
    "--evaluations", type=common.positive, metavar="N", help="Maximum candidates to try; 100 if there are over 200."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Random seed of the search.")
@click.option(
    "--failures", "counts_failures", is_flag=True, help="Let the whole job under failures decide, not its steps."
)
@click.option("--task", type=common.file_name, metavar="FILE|NAME", help="With --target: the task, as for learn.")
@click.option(
    "--learning-rates", metavar="F,...", help="With --target: factors on its learning rate to try, e.g. 0.5,1,2."
)
@learn.options
@common.options
def command(  # noqa: PLR0913 (one for each option)
    session: common.CliSession,
    name: str,
    *,
    global_every: int | None,
    group_every: tuple[str, ...],
    max_bytes: str | None,
    memory: str | None,
    host_memory: str | None,
    min_density: str | None,
    micro_batches: str | None,
    checkpoint_every: str | None,
    checkpoint_mode: tuple[Mode, ...],
    only: tuple[str, ...],
    allow: tuple[str, ...],
    learning_rates: str | None,
    **more: Any,
) -> int:
    """Find the fastest schedule for a scenario, within limits.

    Simulates all candidate schedules, or those that a search picks if there are many. The best overall, and the best
    for each frequency of global synchronisation, are simulated again with fresh seeds; the table shows only these
    results. If no schedule is faster, it says so and explains why. Ctrl-C ends the search with the answer
    so far. With --target and --task, it trains candidates and finds the schedule that reaches the target first.
    """
    asked = learn.TrainingOptions(**{each.name: more.pop(each.name) for each in fields(learn.TrainingOptions)})
    is_asked = learning_rates is not None or asked != learn.TrainingOptions()
    if (asked.target is None) != (asked.task is None) or (is_asked and asked.task is None):
        raise ScenarioError(
            "--target, --task: write both, or neither and no other option of training; then step times decide"
        )
    texts = {"--max-bytes": max_bytes, "--memory": memory, "--host-memory": host_memory}
    most = (math.inf if text is None else parse_option(option, text, parse_nbytes) for option, text in texts.items())
    density = None if min_density is None else parse_option("--min-density", min_density, parse_fraction)
    if density == 0:
        raise ScenarioError("--min-density 0: nothing would be sent; write e.g. 0.001")
    passes = _counts("--micro-batches", "passes of a step, {}, such as 1,2,4", micro_batches, MAX_MICRO_BATCHES)
    scenario = inputs.read_scenario(session, name, is_compared=True)
    every = _counts("--checkpoint-every", "steps, {} (as many as the run has)", checkpoint_every, scenario.steps)
    extras = Extras(only, density, allow, passes, every, checkpoint_mode)
    every_all = global_every or usual_global_every(scenario, more["baseline"])
    wanted = TuneOptions(Constraints(every_all, tuple(map(_pair, group_every)), *most), extras, **more)
    if asked.target is not None and wanted.counts_failures:
        raise ScenarioError("--failures with --target: the time to a target has no failures: write one of them")
    if (facts := scenario.imported) and (sentence := not_compared(scenario)):
        document = {"scenario": scenario.name, "change": False, "outcome": "not compared", "verdict": sentence}
        session.result(document | {"where": facts_record(facts)}, f"{facts_text(facts)}\n\n{sentence}.")
        return 0
    session.remark(name, search_remarks(as_searched(scenario, counts_failures=wanted.counts_failures), every_all))
    if asked.target is not None:
        scenario = scenario.changed(steps=asked.steps or scenario.steps)
        _to_target(session, scenario, wanted, asked, learning_rates)
        return 0
    with session.bar(line_every_s=_LINE_S) as bar, naming(name):
        tuned = tune(scenario, wanted, progress=bar.update)
    session.result(tuned.document(), tuned.text())
    return 0 if tuned.search.is_complete else _INTERRUPTED


def _counts(option: str, what: str, text: str | None, most: int) -> tuple[int, ...]:
    words = text.split(",") if text is not None else []
    if not all(word.strip().isdecimal() and 1 <= int(word) <= most for word in words):
        raise ScenarioError(f"{option} {shown(text)}: write numbers of {what.format(f'1 to {most:,}')}")
    return tuple(map(int, words))


def _to_target(
    session: common.CliSession, scenario: Scenario, wanted: TuneOptions, asked: learn.TrainingOptions, rates: str | None
) -> None:
    """Search by time to a target, and print what it finds."""
    from simdist.tuning.racing import tune_to_target

    words = ["1"] if rates is None else rates.split(",")
    factors = [*dict.fromkeys(parse_option("--learning-rates", each, _factor) for each in words)]
    task, target = asked.described(scenario)
    assert target
    with asked.trainer(session) as trainer:
        raced = tune_to_target(scenario, wanted, target, task, trainer, factors)
    learn.show(session, raced, asked.output)


def _factor(text: object) -> float:
    try:
        return parse_factor(float(str(text)))
    except ValueError:
        raise ValueError(f"{shown(text)} is not a factor: write numbers above 0, such as 0.5,1,2") from None


def _pair(text: str) -> tuple[int, int]:
    ranks, _, steps = text.partition(":")
    if not (ranks.isdecimal() and steps.isdecimal() and int(ranks) >= 2 and int(steps) >= 1):
        raise ScenarioError(
            f"--group-every {shown(text)}: write RANKS:STEPS, 2 ranks and 1 step or more, such as 8:2: groups of 8 "
            f"ranks or more exchange every 2 steps"
        )
    return int(ranks), int(steps)
