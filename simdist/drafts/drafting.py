"""A scenario to begin with: what is stated, found in the surroundings, asked, or guessed."""

import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from simdist.configurations.described import GUESS as _GUESS
from simdist.configurations.described import DescribedJob, Machines, WorkloadKey, combined_job
from simdist.configurations.rates import rounded
from simdist.drafts import described_jobs, surroundings
from simdist.drafts.calibrated_links import CalibratedLinks, calibrate_links
from simdist.drafts.counted_model import CountedModel, count_model, is_model
from simdist.drafts.described_jobs import DESCRIBED
from simdist.drafts.logged_failures import DraftedFailures, draft_failures
from simdist.errors import ScenarioError, SimdistError
from simdist.failure_logs.reading import program_of
from simdist.files import save_text
from simdist.runs.building import build
from simdist.scenario import Cluster, dump_cluster, dump_workload, load_cluster, load_workload, loads
from simdist.scenario.by_name import find_file, read_cluster
from simdist.scenario.scenario import Scenario
from simdist.schedules.rivals import RARELY
from simdist.settings.precision import Precision
from simdist.settings.units import parse_fraction, parse_option, parse_seconds
from simdist.studies.columns import Column
from simdist.studies.tables import table_text

_ValueT = TypeVar("_ValueT")

_CLUSTER = "v100x8-25gbit"  # without any sign of another one
_PRECISION: Precision = "bf16"  # of a model that states none
_CLUSTER_OF_BF16 = "dgx-h100"  # likewise, for a job in bf16, which a V100 does not have
_WORKLOAD = "gpt2"
_RATE = "1%"
_DELAY = "200 ms"
STEPS = 400
_PERIOD = RARELY
_NO_LOGS = (".toml", ".yaml", ".yml")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32")  # the fastest first
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
            setting, value (str): Name and value, as in the file.
            source (str): What states it, or `guess`.
            guessed (bool): Nothing states it.
        """
        return {"setting": self.name, "value": self.value, "source": self.source, "guessed": self.is_guessed}


class Ask(Protocol):
    """Asks a person for a setting."""

    def __call__(self, question: str, default: Any, check: Callable[[str], Any]) -> Any:
        """Return the answer, as `check` reads it; ask again if it refuses."""


@dataclass
class _Interview:
    """Finds settings: by option, by asking a person, or by default."""

    ask: Ask | None
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
        """Return the value of a setting, and remember where it is from."""
        value = default if given is None else given
        source = source if given is None else f"option {option}"
        if given is None and self.ask:
            value = self.ask(f"{name} ({source})", default, check)
            source = source if value == default else "answer"
        self.settings.append(Setting(name, str(value), source))
        return value


@dataclass(frozen=True)
class DraftOptions:
    """What states a new scenario; all else is found, asked or guessed.

    Args:
        sources: Files of other programs, logs of failures, tables of nccl-tests, and at most one PyTorch model,
            `module:function`.
        cluster: File or preset.
        nodes: Machines.
        gpus_per_node: Ranks of each machine.
        workload: File or preset.
        batch_size: Samples per GPU and pass.
        sequence: Tokens of a sample, with `sources`.
        precision: Of forward and backward pass.
        forward: Measured time of a forward pass, such as `20 ms`.
        utilization: Share of the GPU's peak that the passes reach, such as `40%`.
        shape: Shape of a sample of the PyTorch model, such as `3x224x224`.
        device: Where it is counted: `meta` or `cpu`.
        op: Collective of the tables, if they name none.
        straggler_rate: Probability that a rank is late in a step.
        straggler_delay: How late it is then.
        labels: Schedules to compare.
        steps: Steps of a run.
    """

    sources: Sequence[str] = ()
    cluster: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    workload: str | None = None
    batch_size: int | None = None
    sequence: int | None = None
    precision: Precision | None = None
    forward: str | None = None
    utilization: str | None = None
    shape: str | None = None
    device: str = "meta"
    op: str | None = None
    straggler_rate: str | None = None
    straggler_delay: str | None = None
    labels: Sequence[str] = ()
    steps: int = STEPS

    @property
    def model(self) -> str | None:
        """The PyTorch model among the sources."""
        return next(filter(is_model, self.sources), None)

    @property
    def tables(self) -> list[Path]:
        """The tables of nccl-tests among the sources."""
        files = (Path(each) for each in self.sources if not is_model(each))
        known = self.failure_logs
        return [file for file in files if file.is_file() and file.suffix not in DESCRIBED and file not in known]

    @property
    def described(self) -> list[Path]:
        """The other sources: files of other programs."""
        others = [*self.tables, *self.failure_logs]
        return [Path(each) for each in self.sources if not is_model(each) and Path(each) not in others]

    @functools.cached_property
    def failure_logs(self) -> list[Path]:
        """The logs of failures among the sources."""
        files = [Path(each) for each in self.sources if not is_model(each)]
        return [file for file in files if file.suffix not in _NO_LOGS and program_of(file)]


@dataclass(frozen=True)
class Draft:
    """A new scenario.

    Args:
        output: Its file.
        scenario: The scenario.
        body: Text of the file.
        settings: What it states, and where that is from.
        model: The PyTorch model that was counted, if one was.
        calibrations: Calibrations of the links, in their order.
        failures: What logs say about failures, if there are any.
    """

    output: Path
    scenario: Scenario
    body: str
    settings: list[Setting]
    model: CountedModel | None
    calibrations: list[CalibratedLinks]
    failures: DraftedFailures | None = None

    @property
    def following(self) -> str:
        """Command to run next."""
        return f"simdist {'goodput' if self.failures else 'compare'} {shlex.quote(str(self.output))}"

    def write(self) -> None:
        """Write the file.

        Raises:
            RunError: It cannot be written.
        """
        compares = f"simdist compare {shlex.quote(self.output.name)}"
        save_text(self.output, f"# Written by `simdist init`. Compare the schedules: {compares}\n{self.body}")

    def document(self) -> dict[str, object]:
        """Return the answer as JSON.

        Columns:
            scenario, next (str): File written, next command.
            settings (list): "A setting of a new scenario".
            model (object): Only with a PyTorch model: "A counted model".
            calibrations (list): Only with tables of nccl-tests: "Calibrated links".
            failures (object): Only with logs of failures: "Logged failures".
        """
        found: dict[str, object] = {"scenario": str(self.output)}
        found |= {"settings": [each.document() for each in self.settings], "next": self.following}
        if self.model:
            found["model"] = self.model.document()
        if self.calibrations:
            found["calibrations"] = [each.document() for each in self.calibrations]
        if self.failures:
            found["failures"] = self.failures.document()
        return found

    def text(self) -> str:
        """Return the same as tables."""
        scenario = self.scenario
        labels = ", ".join(schedule.name for schedule in scenario.schedules)
        title = f"{scenario.name}: {scenario.cluster.world_size:,} ranks, {scenario.steps:,} steps; {labels}"
        table = table_text(title, _COLUMNS, [each.document() for each in self.settings])
        guessed = [each.name for each in self.settings if each.is_guessed]
        doubt = f"guessed, so check: {', '.join(guessed)}\n" if guessed else ""
        counted = [self.model.text()] if self.model else []
        calibrated = [each.text() for each in self.calibrations]
        failures = [self.failures.text()] if self.failures else []
        first = "write train_for and checkpoint, then " if self.failures else ""
        return "\n\n".join([*counted, *calibrated, *failures, table, f"{doubt}next: {first}{self.following}"])


def draft(
    options: DraftOptions,
    output: Path,
    *,
    ask: Ask | None = None,
    say: Callable[[str], None] = lambda message: None,
    force: bool = False,
) -> Draft:
    """Draft a scenario; files of its workload and its cluster are written beside it, if there are any.

    Args:
        options: What is stated.
        output: The file that it is for.
        ask: Asks a person for what is not stated; None: it is found, or guessed.
        say: Called with each warning and note.
        force: Replace existing files.

    Raises:
        ScenarioError: Something stated is wrong, or a schedule cannot be simulated.
        RunError: A file cannot be written.
    """
    _check_output(output, force=force)
    drafting = _Drafting(options, output, _Interview(ask), say, force)
    body = drafting.text()
    try:
        scenario = loads(body, name=str(output), folder=output.parent)
    except ScenarioError as error:
        raise ScenarioError(_without_lines(str(error), output, options.labels)) from None
    _check(scenario)
    settings = drafting.interview.settings
    return Draft(output, scenario, body, settings, drafting.model, drafting.calibrations, drafting.failures)


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse a file that could not be written, before anything is asked."""
    if str(output) == "-":
        raise ScenarioError("-: standard output is not supported: name the file to write, e.g. scenario.yaml")
    if output.is_dir():
        raise ScenarioError(f"{output}: is a directory; name the file to write, e.g. {output / 'scenario.yaml'}")
    if os.path.lexists(output) and not force:
        raise ScenarioError(f"{output}: exists already: choose another file with -o, or replace it with --force")
    if not output.parent.is_dir():
        raise ScenarioError(f"{output}: there is no directory {output.parent}: make it first")


def _without_lines(message: str, output: Path, labels: Sequence[str]) -> str:
    """Return the message of a scenario that is not written: without lines of a file that nobody can open."""
    message = re.sub(rf"^{re.escape(str(output))}:\d+: ", "", message, flags=re.MULTILINE)
    if not labels:
        return message
    return re.sub(
        r"^schedules\[(\d+)\]", lambda found: f"--schedule {labels[int(found[1])]}", message, flags=re.MULTILINE
    )


def _check(scenario: Scenario) -> None:
    """Refuse a scenario that could not be simulated."""
    for schedule in scenario.schedules:
        try:
            build(scenario, schedule)
        except SimdistError as error:
            raise ScenarioError(f"{schedule.name}: {error}") from error


class _Drafting:
    """The text of a new scenario, put together from what is stated, found, asked and guessed."""

    def __init__(
        self, options: DraftOptions, output: Path, interview: _Interview, say: Callable[[str], None], force: bool
    ) -> None:
        self.options = options
        self.output = output
        self.interview = interview
        self.say = say
        self.force = force
        self.model: CountedModel | None = None
        self.calibrations: list[CalibratedLinks] = []
        self.failures = draft_failures(options.failure_logs) if options.failure_logs else None
        self.ranges = self.failures.range_lines() if self.failures else []

    def text(self) -> str:
        """Return the text of the new scenario; ask for what is not given."""
        options = self.options
        job = self._described_job()
        cluster_text, cluster = self._find_cluster(job)
        if job is None:
            workload_text = self._workload_text(cluster)
            schedules = [_quoted(label) for label in self._labels()]
        else:
            schedules = self._described_schedules(job)
            workload_text = self._described_text(job, cluster)
        remarks = () if job is None else job.remarks
        for each in remarks:
            self.say(f"warning: {each}")
        for each in self.failures.notes() if self.failures else ():
            self.say(f"note: {each}")
        return "\n".join(
            [
                "# A guess is marked. All keys are in docs/reference/scenario.md.",
                *(f"# Not in this scenario: {described_jobs.printable(each)}" for each in remarks),
                cluster_text,
                workload_text,
                *(["uncertain:", *self.ranges] if self.ranges else []),
                self._disturbances(cluster),
                *(self.failures.lines() if self.failures else []),
                "schedules:",
                *(f"  - {each}" for each in schedules),
                f"steps: {options.steps}",
                "seed: 0",
                "",
            ]
        )

    def _disturbances(self, cluster: Cluster) -> str:
        """Return what delays ranks: stragglers, and what the GPUs of a machine lose to each other."""
        options = self.options
        rate = self.interview.setting(
            "straggler rate", "--straggler-rate", options.straggler_rate, _RATE, _GUESS, check=_straggler_rate
        )
        _straggler_rate(rate)
        lines = []
        if parse_fraction(rate):
            delay = self.interview.setting(
                "straggler delay", "--straggler-delay", options.straggler_delay, _DELAY, _GUESS, check=_straggler_delay
            )
            _straggler_delay(delay)
            lines += [
                f"  - {{kind: transient, on: host, probability: {rate}, delay: {delay}}}  # each rank in each step",
                "  # To find yours: `simdist import` in profiler traces, real.watch in a job",
            ]
        is_real = bool(cluster.uncertain) and cluster.device.generation is not None
        if is_real and int(self._values["GPUs per node"]) > 1:
            lines += [
                "  - {kind: interference, typical: true}  # median loss of published machines, in place of",
                "  # machine_samples_per_s, the measured samples/s of one machine",
            ]
        return "\n".join(["disturbances:", *lines]) if lines else "disturbances: []"

    @property
    def _sources(self) -> str:
        """What describes the job, for people."""
        options = self.options
        return " and ".join([*([options.model] if options.model else []), *map(str, options.described)])

    def _described_job(self) -> DescribedJob | None:
        """Return the job that `--from` names, if it was given; its model may be that of `--workload`."""
        options = self.options
        if not options.described and not options.model:
            for given, option in ((options.sequence, "--sequence"), (options.utilization, "--utilization")):
                if given is not None:
                    raise ScenarioError(f"{option}: is for --from only: write it in a workload")
            return None
        job = (
            described_jobs.read_described_job(options.described, sequence=options.sequence)
            if options.described
            else None
        )
        if options.model:
            counted = self._counted_job(options.model)
            if options.workload is not None or (job and job.has_model):
                raise ScenarioError(f"--from {options.model} beside another model: write one of them")
            return combined_job(counted, job) if job else counted
        assert job is not None
        if options.workload is None and not job.has_model:
            raise ScenarioError(
                f"--from {self._sources}: has no model: add --from config.json, --from module:function, or --workload"
            )
        if options.workload is None:
            return job
        if job.has_model:
            raise ScenarioError("--from beside --workload: write one of them")
        return combined_job(described_jobs.model_of_workload(options.workload), job)

    def _counted_job(self, name: str) -> DescribedJob:
        """Count a PyTorch model, and write its workload."""
        options = self.options
        if options.utilization is not None and options.forward is not None:
            raise ScenarioError("--utilization beside --forward: write one of them")
        forward_s = None if options.forward is None else parse_option("--forward", options.forward, parse_seconds)
        self.model = count_model(name, shape=options.shape, device=options.device)
        for remark in self.model.counted["remarks"]:
            self.say(f"warning: {name}: {remark}")
        workload = self.model.workload(
            precision=options.precision or _PRECISION,
            forward_s=forward_s,
            utilization=options.utilization,
            batch_size=options.batch_size,
        )
        file = self._write_part("workload", dump_workload(workload))
        return described_jobs.model_of_workload(str(file), source=f"--from {name}")

    def _write_part(self, part: str, text: str) -> Path:
        """Write a file beside the scenario; return its path."""
        file = self.output.with_name(f"{self.output.stem}-{part}.yaml")
        if os.path.lexists(file) and not self.force:
            raise ScenarioError(f"{file}: exists already: choose another file with -o, or replace it with --force")
        save_text(file, text)
        self.say(f"wrote {file}")
        return file

    def _described_text(self, job: DescribedJob, cluster: Cluster) -> str:
        """Return the workload of a job as text; keep the range of its utilization."""
        options = self.options
        interview = self.interview
        name = self._sources
        interview.settings.append(Setting("workload", options.workload or name, "option --from"))
        precision = interview.setting(
            "precision",
            "--precision",
            options.precision,
            job.precision or _PRECISION,
            job.precision_source or f"{_GUESS}: mixed precision",
            check=_precision,
        )
        world_size = self._world_size
        default, source = job.batch_of(world_size)
        size = interview.setting("batch size", "--batch-size", options.batch_size, default, source, check=_count)
        n_passes, passes_source = job.micro_batches(size, world_size)
        is_other = n_passes != described_jobs.workload_of(job, name).micro_batches
        more = [
            WorkloadKey("batch_size", size, f"samples per GPU and pass; {self._remark('batch size')}"),
            *([WorkloadKey("micro_batches", n_passes, passes_source)] if passes_source and is_other else []),
        ]

        def text(*keys: WorkloadKey) -> list[str]:
            return described_jobs.workload_lines(job, [*more, *keys], self.output.parent)

        if options.forward is not None:
            parse_option("--forward", options.forward, parse_seconds)
            interview.settings.append(Setting("forward pass", options.forward, "option --forward"))
            return "\n".join(text(WorkloadKey("forward", options.forward, "--forward")))
        if described_jobs.states_time(job):
            return "\n".join(text())
        computed = WorkloadKey("precision", precision, self._remark("precision"))
        if options.utilization is not None:
            interview.settings.append(Setting("utilization", options.utilization, "option --utilization"))
            share = WorkloadKey("utilization", {precision: options.utilization}, "--utilization")
            return "\n".join(text(computed, share))
        found = described_jobs.utilization_of(job, name, cluster, precision)
        interview.settings.append(Setting("utilization", rounded(found.share), found.source))
        share = WorkloadKey("utilization", {precision: rounded(found.share)}, self._remark("utilization"))
        ranks = WorkloadKey("utilization_ranks", found.n_ranks, "GPUs of that rate; their communication is taken out")
        lines = text(computed, share, *([ranks] if found.n_ranks > 1 else []))
        self.ranges += described_jobs.range_lines(precision, found)
        return "\n".join(lines)

    def _described_schedules(self, job: DescribedJob) -> list[str]:
        """Return the schedules to compare as a file has them: those given, or else those of the job."""
        values = self._values
        sizes = (int(values["nodes"]), int(values["GPUs per node"]))
        own = described_jobs.schedules_of(job, self._sources, *sizes)
        if self.options.labels or not own:
            return [_quoted(label) for label in self._labels()]
        return list(own)

    @property
    def _values(self) -> dict[str, str]:
        return {each.name: each.value for each in self.interview.settings}

    @property
    def _world_size(self) -> int:
        return int(self._values["nodes"]) * int(self._values["GPUs per node"])

    def _find_cluster(self, described: DescribedJob | None) -> tuple[str, Cluster]:
        """Return the cluster as text, and as the preset or file has it, with its numbers of nodes and GPUs."""
        options = self.options
        interview = self.interview
        job = surroundings.launched(os.environ)
        for problem in job.ignored:
            self.say(f"warning: ignored: {problem}")
        gpus = surroundings.gpus()
        default = surroundings.preset_of(gpus.kind)
        source = f"nvidia-smi: {gpus}"
        if default is None:
            default = _CLUSTER_OF_BF16 if described is not None and self._computes_in_bf16(described) else _CLUSTER
            why = f"no preset has the GPU of this machine, {gpus.kind}" if gpus.names else gpus.problem
            source = f"{_GUESS}: {why}"
        name = interview.setting("cluster", "--cluster", options.cluster, default, source, check=_cluster_name)
        base, cluster = self._calibrated(name)
        machines = self._machines_of(described, cluster)
        nodes = job.nodes or (cluster.nodes, f"{_GUESS}: as in {name}")
        if machines.nodes is not None and (job.nodes is None or not machines.source.startswith(_GUESS)):
            nodes = (machines.nodes, machines.source)
        n_nodes = interview.setting("nodes", "--nodes", options.nodes, *nodes, check=_count)
        seen = job.per_node or surroundings.visible_gpus(os.environ)
        if seen is None and gpus.names:
            seen = len(gpus.names), "nvidia-smi"
        per_node = seen or (cluster.gpus_per_node, f"{_GUESS}: as in {name}")
        if machines.per_node is not None:
            per_node = (machines.per_node, machines.source)
        n_gpus = interview.setting("GPUs per node", "--gpus-per-node", options.gpus_per_node, *per_node, check=_count)
        lines = [
            "cluster:",
            f"  {base}  # {self._remark('cluster')}; to measure links: python -m real.calibrate",
            f"  nodes: {n_nodes}  # {self._remark('nodes')}",
            f"  gpus_per_node: {n_gpus}  # {self._remark('GPUs per node')}",
        ]
        return "\n".join(lines), cluster

    def _calibrated(self, name: str) -> tuple[str, Cluster]:
        """Return the key that names the cluster, and the cluster; calibrate and write it if there are tables."""
        options = self.options
        cluster = read_cluster(name)
        machines = {"nodes": options.nodes, "gpus_per_node": options.gpus_per_node}
        for file in options.tables:
            earlier = self.calibrations[-1] if self.calibrations else None
            found = calibrate_links(file, cluster, op=options.op, **machines, earlier=earlier)
            self.calibrations.append(found)
            cluster = found.after
            for note in found.notes:
                self.say(f"note: {note}")
        if not options.tables:
            return _base(name, self.output), cluster
        file = self._write_part("cluster", dump_cluster(cluster))
        return _base(str(file), self.output), cluster

    def _computes_in_bf16(self, described: DescribedJob) -> bool:
        return (self.options.precision or described.precision or _PRECISION) == _PRECISION

    def _machines_of(self, described: DescribedJob | None, cluster: Cluster) -> Machines:
        """Return the machines that a described job states or fills, as far as it does."""
        if self.calibrations:
            tables = " and ".join(file.name for file in self.options.tables)
            return Machines(cluster.nodes, cluster.gpus_per_node, f"measured: {tables}")
        if described is None:
            return Machines(None, None, "")
        if described.machines is not None:
            return described.machines
        per_node = self.options.gpus_per_node or cluster.gpus_per_node
        n_ranks = described.n_ranks
        if n_ranks is not None:
            fewer = n_ranks if n_ranks < per_node else None
            files = " and ".join(each.name for each in self.options.described)
            return Machines(max(1, n_ranks // per_node), fewer, f"{n_ranks} ranks in {files}")
        fitting = described.fitting_nodes(cluster.nodes, per_node)
        fewer = None if fitting == cluster.nodes else fitting
        return Machines(fewer, None, f"{_GUESS}: among whose ranks {described.samples_source} divides")

    def _workload_text(self, cluster: Cluster) -> str:
        """Return the workload as text."""
        options = self.options
        interview = self.interview
        name = interview.setting("workload", "--workload", options.workload, _WORKLOAD, _GUESS, check=_workload_name)
        workload = load_workload(find_file("workloads", name, option="--workload"))
        lines = ["workload:", f"  {_base(name, self.output)}  # {self._remark('workload')}"]
        forward = options.forward
        if forward is not None:
            parse_option("--forward", forward, parse_seconds)
            interview.settings.append(Setting("forward pass", forward, "option --forward"))
            lines += [f"  forward: {forward}  # --forward; the backward pass takes twice as long unless stated"]
        elif not workload.has_seconds:
            usable = [
                each for each in PRECISIONS if workload.utilization.at(each) and cluster.device.peak_flops.at(each)
            ]
            if not usable and options.precision is None:
                raise ScenarioError(
                    f"workload {name}: how fast {cluster.device.name or 'this device'} computes it is not known: write "
                    f"--forward with its measured time, e.g. --forward '20 ms'"
                )
            source = f"{_GUESS}: the fastest that both state"
            default = usable[0] if usable else workload.precision
            precision = interview.setting(
                "precision", "--precision", options.precision, default, source, check=_precision
            )
            lines += [f"  precision: {precision}  # {self._remark('precision')}"]
            lines += ["  # forward: 20 ms  # a measured time replaces that of FLOPs and utilization; so does backward"]
        if forward is not None or workload.has_seconds:
            lines += [f"  precision: {options.precision}  # --precision"] if options.precision else []
        as_in = f"{_GUESS}: as in {name}"
        size = interview.setting(
            "batch size", "--batch-size", options.batch_size, workload.batch_size, as_in, check=_count
        )
        lines += [f"  batch_size: {size}  # samples per GPU and pass; {self._remark('batch size')}"]
        return "\n".join(lines)

    def _labels(self) -> list[str]:
        """Return the schedules to compare: those given, or else sync, local SGD, and hierarchical SGD where it fits."""
        if self.options.labels:
            return list(self.options.labels)
        values = self._values
        per_node = int(values["GPUs per node"])
        labels = ["sync", f"local-{_PERIOD}"]
        if int(values["nodes"]) > 1 and per_node > 1:
            labels.append(f"hsgd-{_PERIOD // 4}-{per_node},{_PERIOD}-world")
        return labels

    def _remark(self, name: str) -> str:
        """Return where a setting is from, as a comment of one line."""
        return described_jobs.printable(next(each.source for each in self.interview.settings if each.name == name))


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
    load_cluster(find_file("clusters", text))
    return text


def _workload_name(text: str) -> str:
    load_workload(find_file("workloads", text))
    return text


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < len(text) < 10 or not int(text):
        raise ScenarioError(f"{text!r} is no number above 0: write e.g. 4")
    return int(text)


def _precision(text: str) -> Precision:
    found = next((each for each in PRECISIONS if each == text), None)
    if found is None:
        raise ScenarioError(f"{text!r} is no precision: write one of {', '.join(PRECISIONS)}")
    return found


def _straggler_rate(text: str) -> str:
    parse_option("--straggler-rate", text, parse_fraction)
    return text


def _straggler_delay(text: str) -> str:
    if not parse_option("--straggler-delay", text, parse_seconds):
        raise ScenarioError("--straggler-delay: is 0: write a time, e.g. 200 ms, or --straggler-rate 0")
    return text
