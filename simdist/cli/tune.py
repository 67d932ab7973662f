"""`simdist tune`."""

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, TypeAlias, get_args

import click

from simdist.cli import common, inputs, learn
from simdist.cli.where import facts_record, facts_text, not_compared
from simdist.errors import ScenarioError, naming
from simdist.learning.summary import learned_row, sentences
from simdist.learning.timing import TimedSchedule
from simdist.runs.building import dataset
from simdist.scenario import Recorded, Scenario
from simdist.scenario.checkpoint import CheckpointSettings, Mode
from simdist.scenario.workload import MAX_MICRO_BATCHES
from simdist.schedules import Schedule
from simdist.settings.base import picked, plural, shown, unchecked_copy
from simdist.settings.units import format_nbytes, parse_factor, parse_fraction, parse_nbytes
from simdist.studies.columns import SCHEDULE, STEP_TIME, Column, combined, count, factor_with_interval
from simdist.studies.facets import RANGES
from simdist.studies.tables import table_text
from simdist.tuning import Constraints, Extras, Tuned, TuneOptions, tune
from simdist.tuning.candidates import permits, tried_kinds
from simdist.tuning.evaluating import Finalist
from simdist.tuning.tuning import usual_global_every
from simdist.tuning.verdict import entry

_Record: TypeAlias = dict[str, object]

_LINE_S = 2.0  # from one line of progress to the next, where there is no terminal
_FEW_PERIODS = 10  # in fewer, a last one that is cut off saves a schedule an average that others pay for
_NOT_KNOWN = (
    "Not modelled: how less frequent averaging, or sending part of the gradient, changes what is learnt per step. "
    "--global-every, --group-every and --min-density are your choice. What repairing slow ranks would gain, "
    "`simdist whatif` shows."
)


def _gap(n_steps: float) -> str:
    return "never" if math.isinf(n_steps) else f"{n_steps:.0f} {plural(round(n_steps), 'step')}"


def _speedup(center: float, interval: tuple[float, float] | None, problem: str | None) -> str:
    text = factor_with_interval(center, interval)
    return text if problem is None else f"{text} ± ?"


_COLUMNS = (
    SCHEDULE,
    Column("all exchange every", "global_every_steps", form=_gap),
    STEP_TIME,
    Column("speed-up", "speedup", "speedup_ci95", "problem", form=_speedup),
    Column("sent per step", "sent_nbytes", form=format_nbytes),
    Column("memory", "device_nbytes", form=format_nbytes),
    Column("front", "on_front", words=lambda on_front: "*" if on_front else ""),
)
_OF_PASSES = (
    *_COLUMNS[:2],
    Column("micro-batches", "micro_batches", form=count),
    Column("per micro-batch", *STEP_TIME.keys, form=STEP_TIME.form),
    *_COLUMNS[3:],
)


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
@click.option("--task", type=common.file_name, metavar="FILE|NAME", help="With --target: the task, as for learn.")
@click.option(
    "--learning-rates", metavar="F,...", help="With --target: factors on its learning rate to try, e.g. 0.5,1,2."
)
@learn.options
@common.options
def command(
    session: common.Session,
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
) -> None:
    """Find the fastest schedule for a scenario, within limits.

    Simulates all candidate schedules, or those that a search picks if there are many. The best overall, and the best
    for each frequency of global synchronisation, are simulated again with fresh seeds; the table shows only these
    results. If no schedule is faster, it says so and explains why. With --target and --task, it trains candidates and
    finds the schedule that reaches the target first.
    """
    asked = learn.TrainingOptions(**{each.name: more.pop(each.name) for each in fields(learn.TrainingOptions)})
    is_asked = learning_rates is not None or asked != learn.TrainingOptions()
    if (asked.target is None) != (asked.task is None) or (is_asked and asked.task is None):
        raise ScenarioError(
            "--target, --task: write both, or neither and no other option of training; then step times decide"
        )
    texts = {"--max-bytes": max_bytes, "--memory": memory, "--host-memory": host_memory}
    most = (math.inf if text is None else common.parsed(option, text, parse_nbytes) for option, text in texts.items())
    density = None if min_density is None else common.parsed("--min-density", min_density, parse_fraction)
    if density == 0:
        raise ScenarioError("--min-density 0: nothing would be sent; write e.g. 0.001")
    passes = _counts("--micro-batches", "passes of a step, {}, such as 1,2,4", micro_batches, MAX_MICRO_BATCHES)
    scenario = inputs.read_scenario(session, name, is_compared=True)
    every = _counts("--checkpoint-every", "steps, {} (as many as the run has)", checkpoint_every, scenario.steps)
    extras = Extras(only, density, allow, passes, every, checkpoint_mode)
    every_all = global_every or usual_global_every(scenario, more["baseline"])
    wanted = TuneOptions(Constraints(every_all, tuple(map(_pair, group_every)), *most), extras, **more)
    if (facts := scenario.imported) and (sentence := not_compared(scenario)):
        document = {"scenario": scenario.name, "change": False, "outcome": "not compared", "verdict": sentence}
        session.result(document | {"where": facts_record(facts)}, f"{facts_text(facts)}\n\n{sentence}.")
        return
    _warn(session, scenario, wanted)
    if asked.target is not None:
        scenario = scenario.changed(steps=asked.steps or scenario.steps)
        _to_target(session, scenario, wanted, asked, learning_rates)
        return
    with session.bar(line_every_s=_LINE_S) as bar, naming(name):
        tuned = tune(scenario, wanted, progress=bar.update)
    if tuned.runs.remark:
        session.say(f"warning: {name}: {tuned.runs.remark}")
    rows = [_record(each, tuned) for each in tuned.finalists]
    session.result(_document(tuned, wanted, rows), _text(tuned, rows, scenario))


def _counts(option: str, what: str, text: str | None, most: int) -> tuple[int, ...]:
    words = text.split(",") if text is not None else []
    if not all(word.strip().isdecimal() and 1 <= int(word) <= most for word in words):
        raise ScenarioError(f"{option} {shown(text)}: write numbers of {what.format(f'1 to {most:,}')}")
    return tuple(map(int, words))


def _to_target(
    session: common.Session, scenario: Scenario, wanted: TuneOptions, asked: learn.TrainingOptions, rates: str | None
) -> None:
    """Search by time to a target, and print what it finds.

    Columns:
        verdict (str): What to do, in a sentence.
        outcome (str): `change`, `stay` or `unsure`.
        n_entrants (int): Candidates with their learning rates, without those that learn the same as a faster one.
        n_steps (int): Steps that the search trained, in all rungs.
        entries (str or null): Schedule to change to, and other changes, as in a scenario. `null`: stay.
        n_fell (int): Candidates that were eliminated before another one had reached the target.
        n_exhaustive_steps (int): Steps of training all candidates to the end.

    Columns of rows:
        front (str): `*` if no finalist beats it in time to the target and in the final metric.
        entry (str): The line for `schedules` of a scenario.
    """
    from simdist.tuning.racing import tune_to_target

    words = ["1"] if rates is None else rates.split(",")
    factors = [*dict.fromkeys(common.parsed("--learning-rates", each, _factor) for each in words)]
    task, target = asked.described(scenario)
    assert target
    with asked.trainer(session) as trainer:
        raced = tune_to_target(scenario, wanted, target, task, trainer, factors)
    base, *_ = raced.finalists
    rows = [
        learned_row(each, base, target)
        | {"front": "*" if number in raced.on_front else "", "entry": entry(each.timed.schedule)}
        for number, each in enumerate(raced.finalists)
    ]
    n_all = raced.n_entrants * scenario.steps
    its = raced.winner and raced.winner.timed
    tried = f"{raced.n_entrants:,} {plural(raced.n_entrants, 'candidate')} trained for {raced.n_steps:,} steps"
    title = (
        f"{scenario.name}: {scenario.cluster.world_size:,} ranks; {tried}, {raced.n_steps / n_all:.0%} of all for "
        f"{scenario.steps:,}; finalists again with {rows[0]['runs']} other seeds; speed-up over {base.label}"
    )
    about = {
        "scenario": scenario.name,
        "baseline": base.label,
        "verdict": raced.sentence,
        "entries": its and _winner(its, base.timed.scenario.checkpoint, scenario),
        "n_exhaustive_steps": n_all,
        **picked(raced, "outcome", "n_entrants", "n_fell", "n_steps"),
    }
    fell = f"given up early, so perhaps sooner: {raced.n_fell:,} of {raced.n_entrants:,} candidates"
    front = "*: no other finalist is there sooner and better in the end"
    given_up = [fell] if raced.n_fell else []
    said = [raced.sentence, *given_up, *sentences(raced.finalists, base, target), front]
    learn.show(session, title, task, target, about, raced.finalists, rows, said, asked.output)


def _winner(its: TimedSchedule, own: CheckpointSettings | None, scenario: Scenario) -> str:
    """Return the lines that a scenario takes, and a comment where the learning rate is another one."""
    saved = _every_as_written(its.scenario.checkpoint, own, scenario)
    lines = _entries(its.schedule, its.scenario.workload.micro_batches, saved, scenario)
    if its.lr_factor == 1:
        return lines
    return f"{lines}\n# with {its.lr_factor:g} times the learning rate of the task"


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


def _warn(session: common.Session, scenario: Scenario, wanted: TuneOptions) -> None:
    every = wanted.constraints.global_every
    if dataset(scenario) is not None and scenario.steps < _FEW_PERIODS * every:
        session.say(
            f"warning: {scenario.steps} steps of a data set hold fewer than {_FEW_PERIODS} periods of {every} steps, "
            f"so the last steps decide; write steps: {_FEW_PERIODS * every} or more, or a smaller --global-every"
        )
    if wanted.extras.micro_batches and any(scenario.delays):
        session.say("warning: delays are drawn per step: steps of more micro-batches meet fewer of them per sample")
    if any(isinstance(each, Recorded) for each in scenario.disturbances):
        session.say("recorded disturbances: every seed draws its own blocks of the recorded steps")


def _text(tuned: Tuned, rows: Sequence[_Record], scenario: Scenario) -> str:
    """Return the finalists, the verdict, and the winner as a scenario has it."""
    verdict = tuned.verdict
    usual = _COLUMNS if tuned.per == "step" else _OF_PASSES
    columns = combined(usual, RANGES.columns([verdict.best.row.of(RANGES)]))
    table = table_text(_title(tuned), columns, rows)
    lines = [table, "", f"{verdict.sentence}.", *(f"  {reason}." for reason in verdict.reasons)]
    if winner := verdict.winner:
        saved = _every_as_written(winner.checkpoint, tuned.runs.scenario.checkpoint, scenario)
        lines += ["", _entries(winner.schedule, winner.micro_batches, saved, scenario)]
    more = [] if tuned.per == "step" else ["More micro-batches a step also make the batch of an update larger."]
    if len({each.checkpoint.every for each in tuned.finalists if each.checkpoint}) > 1:
        more.append("The further apart checkpoints are, the more work a failure costs.")
    return "\n".join([*lines, "", " ".join([_NOT_KNOWN, *more])])


def _every_as_written(
    saved: CheckpointSettings | None, own: CheckpointSettings | None, scenario: Scenario
) -> CheckpointSettings | None:
    """Return a checkpoint that comes by time, if those of the scenario do and the search has not varied that.

    Args:
        saved: The simulated checkpoint of a candidate, every so many steps.
        own: The scenario's, as it was simulated.
        scenario: As the user wrote it.
    """
    if saved is None or own is None or scenario.checkpoint is None or saved.every != own.every:
        return saved
    return unchecked_copy(saved, every=scenario.checkpoint.every)


def _entries(schedule: Schedule, n_passes: int, saved: CheckpointSettings | None, scenario: Scenario) -> str:
    """Return a candidate as a scenario has it."""
    lines = ["schedules:", f"  {entry(schedule)}"]
    if n_passes != scenario.workload.micro_batches:
        lines.append(f"workload: {{micro_batches: {n_passes}}}  # and its other keys")
    if saved and saved != scenario.checkpoint:
        every = saved.model_dump(mode="json")["every"]
        lines.append(f"checkpoint: {{every: {every}, mode: {saved.mode}}}  # and its other keys")
    return "\n".join(lines)


def _title(tuned: Tuned) -> str:
    (baseline,) = (each for each in tuned.finalists if each.is_baseline)
    scenario = tuned.runs.scenario
    n_seeds = baseline.row.seeds
    n_tried = tuned.search.n_evaluated
    n_candidates = tuned.search.n_candidates
    tried = f"{n_tried:,} {plural(n_tried, 'plan')} of {n_candidates:,} candidates tried"
    if not n_tried:
        tried = "no candidate keeps to the limits"
    again = f"finalists again with {n_seeds} other {plural(n_seeds, 'seed')}; " if scenario.is_random else ""
    about = f"{scenario.name}: {scenario.cluster.world_size:,} ranks, runs of {scenario.steps:,} steps or a few more"
    title = f"{about}; {tried}; {again}speed-up over {baseline.schedule.name}"
    if tuned.verdict.best.row.of(RANGES):
        return f"{title}, in brackets: 90 % intervals"
    if n_seeds == 1:
        return title
    recording = tuned.runs.recording
    what = f"what {recording.n_steps:,} recorded steps leave open" if recording else "error of the simulation"
    return f"{title}, ± {what} (95 %)"


def _document(tuned: Tuned, wanted: TuneOptions, rows: Sequence[_Record]) -> _Record:
    """Return a search for a schedule as JSON.

    Columns:
        scenario (str): Its name.
        steps (int): Steps of each run, and a few more to complete a period.
        recorded_steps (int or null): Steps of the recording, if any.
        block_steps (int or null): Recorded steps that stay together.
        baseline (str): Label.
        constraints (object): "The constraints of a search".
        candidates (int): Legal schedules that exchange as often as required.
        evaluated (int): Different plans that the search simulated.
        excluded (object): Option -> candidates (int) that broke this constraint.
        illegal (int): Candidates that do not fit the cluster.
        change (bool): A change from the baseline is proposed.
        outcome (str): `change`. `stay`: nothing gains. `unsure`: something may gain. `none`: no schedule keeps to the
            constraints.
        best (str): Label of the best finalist that keeps to the constraints, worth a change or not. The baseline if
            there is no other. With `none`, the one that exceeds a constraint least.
        verdict (str): What to do, in a sentence.
        reasons (list): Why, a sentence (str) each.
        rows (list): The finalists and the baseline, the fastest first: "A finalist".
    """
    verdict = tuned.verdict
    recording = tuned.runs.recording
    (baseline,) = (each for each in tuned.finalists if each.is_baseline)
    return {
        "scenario": tuned.runs.scenario.name,
        "steps": tuned.runs.scenario.steps,
        "recorded_steps": recording.n_steps if recording else None,
        "block_steps": recording.block_steps if recording else None,
        "baseline": baseline.schedule.name,
        "constraints": asdict(wanted.constraints),
        **picked(tuned.search, "excluded", candidates="n_candidates", evaluated="n_evaluated", illegal="n_illegal"),
        "change": verdict.winner is not None,
        **picked(verdict, "outcome", "reasons", verdict="sentence"),
        "best": verdict.best.schedule.name,
        "rows": list(rows),
    }


def _record(finalist: Finalist, tuned: Tuned) -> _Record:
    """Return a finalist as JSON.

    Columns:
        search_step_s (float): Step time with the seeds of the search.
        micro_batches (int): Micro-batches of a step, with `--micro-batches`. All times are then per micro-batch.
        checkpoint (object): Only of a scenario with checkpoints: the simulated checkpoint, as in the scenario.
        global_every_steps (float or null): Longest time, in steps, between exchanges of all ranks. `null`: never.
        sent_nbytes (float): Bytes that the busiest node sends per step, on average; in one domain, the busiest GPU.
        device_nbytes (int): Bytes in use on a rank's device when most are: buffers, optimizer state, activations.
        host_nbytes (int): Buffers of a rank in host memory.
        breaks (list): Constraints (str) that it breaks, as on the command line.
        on_front (bool): It keeps to the constraints, and no other one that exchanges as often over all ranks is faster.
        problem (str or null): Why a recording cannot show how certain its speed-up is.
        entry (str): The line for `schedules` of a scenario.
    """
    of_plan = picked(finalist.facts, "sent_nbytes", "device_nbytes", "host_nbytes", global_every_steps="global_gap")
    return (
        finalist.row.document()
        | of_plan
        | {
            "breaks": [each.limit for each in finalist.breaches],
            **picked(finalist, "search_step_s", "on_front", "problem"),
            "entry": entry(finalist.schedule),
            **({} if tuned.per == "step" else {"micro_batches": finalist.micro_batches}),
            **({"checkpoint": finalist.checkpoint.model_dump(mode="json")} if finalist.checkpoint else {}),
        }
    )
