"""`simdist init`."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from simdist.cli import common, described_jobs, inputs, surroundings
from simdist.configurations.described import GUESS as _GUESS
from simdist.configurations.described import DescribedJob, Machines, WorkloadKey, combined
from simdist.configurations.rates import rounded
from simdist.errors import ScenarioError, SimdistError
from simdist.runs.building import build
from simdist.scenario import Cluster, load_cluster, load_workload, loads
from simdist.scenario.scenario import Scenario
from simdist.schedules.rivals import RARELY
from simdist.settings.precision import Precision
from simdist.settings.units import parse_fraction, parse_seconds
from simdist.studies.columns import Column
from simdist.studies.tables import table_text

_ValueT = TypeVar("_ValueT")

_CLUSTER = "v100x8-25gbit"  # without any sign of another one
_PRECISION: Precision = "bf16"  # of a model that states none
_CLUSTER_OF_BF16 = "dgx-h100"  # likewise, for a job in bf16, which a V100 does not have
_WORKLOAD = "gpt2"
_RATE = "1%"
_DELAY = "200 ms"
_STEPS = 400
_PERIOD = RARELY
_PREFERRED: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32")  # the fastest first
_COLUMNS = (Column("setting"), Column("value"), Column("from", "source"))


@dataclass(frozen=True)
class Setting:
    """A setting of the new scenario.

    Args:
        name: As the table shows it.
        value: As the file has it.
        source: Where it is from; begins with `guess` if nothing states it.
    """

    name: str
    value: str
    source: str

    @property
    def is_guessed(self) -> bool:
        """Nothing states it."""
        return self.source.startswith(_GUESS)

    def document(self) -> dict[str, object]:
        """Return it as JSON.

        Columns:
            setting (str): Name.
            value (str): As the file has it.
            source (str): Option, answer, environment variable or program that states it, or `guess`.
            guessed (bool): Nothing states it.
        """
        return {"setting": self.name, "value": self.value, "source": self.source, "guessed": self.is_guessed}


@dataclass
class _Interview:
    """Finds settings: by option, by asking on a terminal, or by default."""

    asks: bool
    settings: list[Setting] = field(default_factory=list)

    def setting(
        self,
        name: str,
        option: str,
        given: _ValueT | None,
        default: _ValueT,
        source: str,
        *,
        check: Callable[[str], _ValueT],
    ) -> _ValueT:
        """Return the value of a setting, and remember where it is from.

        Args:
            name: Of the setting.
            option: That states it.
            given: Its value; None if it was not given.
            default: Value without an option or another answer.
            source: Where the default is from.
            check: Returns the value of an answer, or raises ScenarioError.
        """
        value = default if given is None else given
        source = source if given is None else f"option {option}"
        if given is None and self.asks:
            value = _ask(f"{name} ({source})", default, check)
            source = source if value == default else "answer"
        self.settings.append(Setting(name, str(value), source))
        return value


def _ask(question: str, default: _ValueT, check: Callable[[str], _ValueT]) -> _ValueT:
    try:
        answer: _ValueT = click.prompt(question, default=default, value_proc=_asked_again(check), err=True)
    except click.Abort:
        click.echo(err=True)  # the question has no end of line
        raise
    return answer


def _asked_again(check: Callable[[str], _ValueT]) -> Callable[[object], _ValueT]:
    """Turn a refusal into one after which click asks again."""

    def checked(text: object) -> _ValueT:
        try:
            return check(str(text))
        except ScenarioError as error:
            raise click.UsageError(str(error)) from None

    return checked


@click.command("init")
@click.option("-o", "--output", type=common.path, metavar="FILE", default="scenario.yaml", help="The file to write.")
@click.option(
    "--from", "described", type=common.path, multiple=True, metavar="FILE", help="A job, see below; repeat it."
)
@click.option("--cluster", type=common.file_name, metavar="FILE|PRESET", help="Machines and links.")
@click.option("--nodes", type=common.positive, metavar="N", help="Machines.")
@click.option("--gpus-per-node", type=common.positive, metavar="N", help="Ranks of each machine.")
@click.option("--workload", type=common.file_name, metavar="FILE|PRESET", help="Model and batch.")
@click.option("--batch-size", type=common.positive, metavar="N", help="Samples per GPU and pass.")
@click.option("--sequence", type=common.positive, metavar="N", help="Tokens of a sample, with --from.")
@click.option("--precision", type=click.Choice(_PREFERRED), help="Of forward and backward pass.")
@click.option("--forward", metavar="TIME", help="Measured time of a forward pass, such as '20 ms'.")
@click.option("--straggler-rate", metavar="SHARE", help="Probability that a rank is late in a step; 0 for none.")
@click.option("--straggler-delay", metavar="TIME", help="How late it is then.")
@click.option("--schedule", "labels", multiple=True, metavar="LABEL", help="To compare, such as local-8; repeat it.")
@click.option("--steps", type=common.positive, metavar="N", default=_STEPS, help="Steps of a run.")
@click.option("--yes", is_flag=True, help="Ask nothing, also on a terminal.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@common.options
def command(session: common.Session, *, output: Path, force: bool, yes: bool, **given: Any) -> None:
    """Write a scenario to begin with.

    Options state it. On a terminal, the command asks for the others. It looks for a job's environment (torchrun,
    Slurm, Open MPI) and for the GPUs of this machine, and marks each guess. --from reads a job of torchtitan (.toml) or
    llm-foundry (.yaml), the config.json of a Hugging Face model, and a configuration of Accelerate (.yaml) or DeepSpeed
    (.json). The last two have no model: add --from config.json or --workload.
    """
    _check_output(output, force=force)
    interview = _Interview(asks=not yes and sys.stdin.isatty() and sys.stderr.isatty())
    text = _draft(session, interview, output, given)
    try:
        scenario = loads(text, name=str(output), folder=output.parent)
    except ScenarioError as error:
        raise ScenarioError(_without_lines(str(error), output, given["labels"])) from None
    _check(scenario)
    compares = f"simdist compare {shlex.quote(output.name)}"
    inputs.save_text(output, f"# Written by `simdist init`. Compare the schedules: {compares}\n{text}")
    session.wrote(output)
    following = f"simdist compare {shlex.quote(str(output))}"
    session.result(_document(output, interview.settings, following), _text(scenario, interview.settings, following))


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse a file that could not be written, before anything is asked."""
    if str(output) == "-":
        raise ScenarioError("-: standard output is not supported: name the file to write, e.g. scenario.yaml")
    if output.is_dir():
        raise ScenarioError(f"{output}: is a directory; name the file to write, e.g. {output / 'scenario.yaml'}")
    if os.path.lexists(output) and not force:
        raise ScenarioError(f"{output}: exists already: choose another file with -o, or replace it with --force")
    inputs.check_folder(output)


def _without_lines(message: str, output: Path, labels: Sequence[str]) -> str:
    """Return the message of a scenario that is not written: without lines of a file that nobody can open."""
    message = re.sub(rf"^{re.escape(str(output))}:\d+: ", "", message, flags=re.MULTILINE)
    if not labels:
        return message
    return re.sub(
        r"^schedules\[(\d+)\]", lambda found: f"--schedule {labels[int(found[1])]}", message, flags=re.MULTILINE
    )


def _check(scenario: Scenario) -> None:
    """Refuse a scenario that could not be simulated.

    Raises:
        ScenarioError: A schedule cannot be built or priced.
    """
    for schedule in scenario.schedules:
        try:
            build(scenario, schedule)
        except SimdistError as error:
            raise ScenarioError(f"{schedule.name}: {error}") from error


def _document(output: Path, settings: list[Setting], following: str) -> dict[str, object]:
    """Return the answer as JSON.

    Columns:
        scenario (str): File written.
        settings (list): "A setting of a new scenario".
        next (str): Command to run next.
    """
    return {"scenario": str(output), "settings": [each.document() for each in settings], "next": following}


def _text(scenario: Scenario, settings: list[Setting], following: str) -> str:
    labels = ", ".join(schedule.name for schedule in scenario.schedules)
    title = f"{scenario.name}: {scenario.cluster.world_size:,} ranks, {scenario.steps:,} steps; {labels}"
    table = table_text(title, _COLUMNS, [each.document() for each in settings])
    guessed = [each.name for each in settings if each.is_guessed]
    doubt = f"guessed, so check: {', '.join(guessed)}\n" if guessed else ""
    return f"{table}\n\n{doubt}next: {following}"


def _draft(session: common.Session, interview: _Interview, output: Path, given: dict[str, Any]) -> str:
    """Return the text of the new scenario; ask for what is not given."""
    job = _described_job(given)
    cluster_text, cluster = _find_cluster(session, interview, output, given, job)
    if job is None:
        workload_text = _workload_text(interview, output, cluster, given)
        schedules = [_quoted(label) for label in _labels(interview, given)]
    else:
        schedules = _described_schedules(interview, job, given)
        workload_text = _described_text(interview, job, cluster, given)
    remarks = () if job is None else job.remarks
    for each in remarks:
        session.say(f"warning: {each}")
    rate = interview.setting(
        "straggler rate", "--straggler-rate", given["straggler_rate"], _RATE, _GUESS, check=_straggler_rate
    )
    _straggler_rate(rate)
    late = "disturbances: []"
    if parse_fraction(rate):
        delay = interview.setting(
            "straggler delay", "--straggler-delay", given["straggler_delay"], _DELAY, _GUESS, check=_straggler_delay
        )
        _straggler_delay(delay)
        late = f"disturbances:\n  - {{kind: transient, on: host, probability: {rate}, delay: {delay}}}"
        late += (
            "  # each rank in each step\n  # To find yours: `simdist import` in profiler traces, real.watch in a job"
        )
    return "\n".join(
        [
            "# A guess is marked. All keys are in docs/reference/scenario.md.",
            *(f"# Not in this scenario: {described_jobs.printable(each)}" for each in remarks),
            cluster_text,
            workload_text,
            late,
            "schedules:",
            *(f"  - {each}" for each in schedules),
            f"steps: {given['steps']}",
            "seed: 0",
            "",
        ]
    )


def _names(given: dict[str, Any]) -> str:
    """Return the files of `--from`."""
    return " and ".join(map(str, given["described"]))


def _described_job(given: dict[str, Any]) -> DescribedJob | None:
    """Return the job that `--from` names, if it was given; its model may be that of `--workload`."""
    if not given["described"]:
        if given["sequence"] is not None:
            raise ScenarioError("--sequence: is for --from only: write transformer: {sequence: N} in a workload")
        return None
    job = described_jobs.read(given["described"], sequence=given["sequence"])
    if given["workload"] is None and not job.has_model:
        raise ScenarioError(f"--from {_names(given)}: has no model: add --from config.json, or --workload")
    if given["workload"] is None:
        return job
    if job.has_model:
        raise ScenarioError("--from beside --workload: write one of them")
    return combined(described_jobs.model_of_workload(given["workload"]), job)


def _described_text(interview: _Interview, job: DescribedJob, cluster: Cluster, given: dict[str, Any]) -> str:
    """Return the workload of a job as text, and the range of its utilization."""
    name = _names(given)
    interview.settings.append(Setting("workload", given["workload"] or name, "option --from"))
    precision = interview.setting(
        "precision",
        "--precision",
        given["precision"],
        job.precision or _PRECISION,
        job.precision_source or f"{_GUESS}: mixed precision",
        check=_precision,
    )
    world_size = _world_size(interview)
    default, source = job.batch_of(world_size)
    size = interview.setting("batch size", "--batch-size", given["batch_size"], default, source, check=_count)
    n_passes, passes_source = job.micro_batches(size, world_size)
    more = [
        WorkloadKey("batch_size", size, f"samples per GPU and pass; {_remark(interview, 'batch size')}"),
        *([WorkloadKey("micro_batches", n_passes, passes_source)] if n_passes > 1 else []),
    ]
    if given["forward"] is not None:
        common.parsed("--forward", given["forward"], parse_seconds)
        interview.settings.append(Setting("forward pass", given["forward"], "option --forward"))
        return "\n".join(
            described_jobs.workload_lines(job, [*more, WorkloadKey("forward", given["forward"], "--forward")])
        )
    if described_jobs.states_time(job):
        return "\n".join(described_jobs.workload_lines(job, more))
    found = described_jobs.utilization_of(job, name, cluster, precision)
    interview.settings.append(Setting("utilization", rounded(found.share), found.source))
    more.append(WorkloadKey("precision", precision, _remark(interview, "precision")))
    share = WorkloadKey("utilization", {precision: rounded(found.share)}, _remark(interview, "utilization"))
    ranks = WorkloadKey("utilization_ranks", found.n_ranks, "GPUs of that rate; their communication is taken out")
    lines = described_jobs.workload_lines(job, [*more, share, *([ranks] if found.n_ranks > 1 else [])])
    return "\n".join([*lines, *described_jobs.range_lines(precision, found)])


def _described_schedules(interview: _Interview, job: DescribedJob, given: dict[str, Any]) -> list[str]:
    """Return the schedules to compare as a file has them: those given, or else those of the job."""
    values = {each.name: each.value for each in interview.settings}
    sizes = (int(values["nodes"]), int(values["GPUs per node"]))
    own = described_jobs.schedules_of(job, _names(given), *sizes)
    if given["labels"] or not own:
        return [_quoted(label) for label in _labels(interview, given)]
    return list(own)


def _world_size(interview: _Interview) -> int:
    values = {each.name: each.value for each in interview.settings}
    return int(values["nodes"]) * int(values["GPUs per node"])


def _find_cluster(
    session: common.Session, interview: _Interview, output: Path, given: dict[str, Any], described: DescribedJob | None
) -> tuple[str, Cluster]:
    """Return the cluster as text, and as the preset or file has it, with its numbers of nodes and GPUs."""
    job = surroundings.launched(os.environ)
    for problem in job.ignored:
        session.say(f"warning: ignored: {problem}")
    with session.bar() as bar:
        bar.update("ask nvidia-smi for the GPUs of this machine", 0, None)
        gpus = surroundings.gpus()
    default = surroundings.preset_of(gpus.kind)
    source = f"nvidia-smi: {gpus}"
    if default is None:
        default = _CLUSTER_OF_BF16 if described is not None and _computes_in_bf16(described, given) else _CLUSTER
        why = f"no preset has the GPU of this machine, {gpus.kind}" if gpus.names else gpus.problem
        source = f"{_GUESS}: {why}"
    name = interview.setting("cluster", "--cluster", given["cluster"], default, source, check=_cluster_name)
    cluster = inputs.read_cluster(name)
    machines = _machines_of(described, cluster, given)
    nodes = job.nodes or (cluster.nodes, f"{_GUESS}: as in {name}")
    if machines.nodes is not None and (job.nodes is None or not machines.source.startswith(_GUESS)):
        nodes = (machines.nodes, machines.source)
    n_nodes = interview.setting("nodes", "--nodes", given["nodes"], *nodes, check=_count)
    seen = job.per_node or surroundings.visible_gpus(os.environ)
    if seen is None and gpus.names:
        seen = len(gpus.names), "nvidia-smi"
    per_node = seen or (cluster.gpus_per_node, f"{_GUESS}: as in {name}")
    if machines.per_node is not None:
        per_node = (machines.per_node, machines.source)
    n_gpus = interview.setting("GPUs per node", "--gpus-per-node", given["gpus_per_node"], *per_node, check=_count)
    lines = [
        "cluster:",
        f"  {_base(name, output)}  # {_remark(interview, 'cluster')}; to measure links: python -m real.calibrate",
        f"  nodes: {n_nodes}  # {_remark(interview, 'nodes')}",
        f"  gpus_per_node: {n_gpus}  # {_remark(interview, 'GPUs per node')}",
    ]
    return "\n".join(lines), cluster


def _computes_in_bf16(described: DescribedJob, given: dict[str, Any]) -> bool:
    return (given["precision"] or described.precision or _PRECISION) == _PRECISION


def _machines_of(described: DescribedJob | None, cluster: Cluster, given: dict[str, Any]) -> Machines:
    """Return the machines that a described job states or fills, as far as it does."""
    if described is None:
        return Machines(None, None, "")
    if described.machines is not None:
        return described.machines
    per_node = given["gpus_per_node"] or cluster.gpus_per_node
    n_ranks = described.n_ranks
    if n_ranks is not None:
        fewer = n_ranks if n_ranks < per_node else None
        files = " and ".join(each.name for each in given["described"])
        return Machines(max(1, n_ranks // per_node), fewer, f"{n_ranks} ranks in {files}")
    fitting = described.fitting_nodes(cluster.nodes, per_node)
    fewer = None if fitting == cluster.nodes else fitting
    return Machines(fewer, None, f"{_GUESS}: among whose ranks {described.samples_source} divides")


def _workload_text(interview: _Interview, output: Path, cluster: Cluster, given: dict[str, Any]) -> str:
    """Return the workload as text."""
    name = interview.setting("workload", "--workload", given["workload"], _WORKLOAD, _GUESS, check=_workload_name)
    workload = load_workload(inputs.find_file("workloads", name, option="--workload"))
    lines = ["workload:", f"  {_base(name, output)}  # {_remark(interview, 'workload')}"]
    if given["forward"] is not None:
        common.parsed("--forward", given["forward"], parse_seconds)
        interview.settings.append(Setting("forward pass", given["forward"], "option --forward"))
        lines += [f"  forward: {given['forward']}  # --forward; the backward pass takes twice as long unless stated"]
    elif not workload.has_seconds:
        usable = [each for each in _PREFERRED if workload.utilization.at(each) and cluster.device.peak_flops.at(each)]
        if not usable and given["precision"] is None:
            raise ScenarioError(
                f"workload {name}: how fast {cluster.device.name or 'this device'} computes it is not known: write "
                f"--forward with its measured time, e.g. --forward '20 ms'"
            )
        source = f"{_GUESS}: the fastest that both state"
        default = usable[0] if usable else workload.precision
        precision = interview.setting("precision", "--precision", given["precision"], default, source, check=_precision)
        lines += [f"  precision: {precision}  # {_remark(interview, 'precision')}"]
        lines += ["  # forward: 20 ms  # a measured time replaces that of FLOPs and utilization; so does backward"]
    if given["forward"] is not None or workload.has_seconds:
        lines += [f"  precision: {given['precision']}  # --precision"] if given["precision"] else []
    size = interview.setting(
        "batch size", "--batch-size", given["batch_size"], workload.batch_size, f"{_GUESS}: as in {name}", check=_count
    )
    lines += [f"  batch_size: {size}  # samples per GPU and pass; {_remark(interview, 'batch size')}"]
    return "\n".join(lines)


def _labels(interview: _Interview, given: dict[str, Any]) -> list[str]:
    """Return the schedules to compare: those given, or else sync, local SGD, and hierarchical SGD where it fits."""
    if given["labels"]:
        return list(given["labels"])
    values = {each.name: each.value for each in interview.settings}
    per_node = int(values["GPUs per node"])
    labels = ["sync", f"local-{_PERIOD}"]
    if int(values["nodes"]) > 1 and per_node > 1:
        labels.append(f"hsgd-{_PERIOD // 4}-{per_node},{_PERIOD}-world")
    return labels


def _remark(interview: _Interview, name: str) -> str:
    """Return where a setting is from, as a comment of one line."""
    return described_jobs.printable(next(each.source for each in interview.settings if each.name == name))


def _base(name: str, output: Path) -> str:
    """Return the key that names a preset, or a file relative to the scenario."""
    if not Path(name).is_file():
        return f"preset: {name}"
    relative = os.path.relpath(name, output.parent) if not Path(name).is_absolute() else name
    return f"file: {_quoted(relative)}"


def _quoted(text: str) -> str:
    """Return a text as YAML has it, quoted unless it is plain."""
    return text if re.fullmatch(r"[A-Za-z][\w.,/-]*", text, re.ASCII) else json.dumps(text)


def _cluster_name(text: str) -> str:
    load_cluster(inputs.find_file("clusters", text))
    return text


def _workload_name(text: str) -> str:
    load_workload(inputs.find_file("workloads", text))
    return text


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < len(text) < 10 or not int(text):
        raise ScenarioError(f"{text!r} is no number above 0: write e.g. 4")
    return int(text)


def _precision(text: str) -> Precision:
    found = next((each for each in _PREFERRED if each == text), None)
    if found is None:
        raise ScenarioError(f"{text!r} is no precision: write one of {', '.join(_PREFERRED)}")
    return found


def _straggler_rate(text: str) -> str:
    common.parsed("--straggler-rate", text, parse_fraction)
    return text


def _straggler_delay(text: str) -> str:
    if not common.parsed("--straggler-delay", text, parse_seconds):
        raise ScenarioError("--straggler-delay: is 0: write a time, e.g. 200 ms, or --straggler-rate 0")
    return text
