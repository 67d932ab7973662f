"""Base of all schedules: settings a user writes, a plan, and a declaration of what the plan computes."""

import abc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator

from simdist.errors import PlanError
from simdist.plan import Body, Buffer, Plan, Result, algorithms, ops
from simdist.plan.ops import Algorithm
from simdist.schedules.job import Checkpoint, InputPath, Job, Policy
from simdist.schedules.tuning import Allowance, Axis, ChangedSettings, Levels, Permit, Value
from simdist.settings.base import Settings, folder_of
from simdist.settings.plugins import SCHEDULES, written_kind
from simdist.settings.units import Whole

_MOMENTS = "moments"  # buffer with a momentum of the optimizer for every parameter
_STATE = "state"
_COPY = "checkpoint"
_WRITTEN = Buffer(f"{_COPY}.written", 1, "uint8", place="host")


class Schedule(Settings, abc.ABC):
    """A way to synchronise the ranks.

    A schedule is a subclass, in this package or in any module of a user's own. It sets `kind`, a `Literal` field with
    the name that scenarios use, adds its parameters as fields, and writes `default_label`, `write` and `result`.
    Nothing else is edited: the scenario loader, the command line and `tune` find it.

    Its plan must compute what `result` declares; `simdist.proof` holds it to that.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = ({},)
    """Parameters that are legal on 8 ranks of 2 nodes: what the conformance tests run."""

    family: ClassVar[str] = ""
    """Schedules of one family differ by one setting or level only; its own kind if empty."""
    place: ClassVar[int] = 1000
    """Place of the kind in a search, where candidates promise as much."""
    permit: ClassVar[Permit | None] = None
    """What a user must allow before `tune` tries the kind."""
    permits: ClassVar[tuple[Permit, ...]] = ()
    """What axes of the kind ask the user to allow."""
    sends_part: ClassVar[bool] = False
    """It sends a part of the gradient, so `tune` tries it only with `--min-density`."""
    takes_levels: ClassVar[bool] = False
    """`tune` tries it with periods and groups: see `settings_of`."""
    orthonormalizes: ClassVar[bool] = False
    """Its ranks make matrices orthonormal, which takes the time that the device states for it."""

    kind: str
    label: str = ""
    """Name in tables and files; derived from the parameters if not given."""
    algorithm: Algorithm = "auto"
    """How collectives are carried out: `auto`, an algorithm that ships, or one of a user as `module:NAME`."""
    run_ahead_steps: Whole | None = Field(default=None, ge=0)
    """Under this schedule the host waits for the loss of so many steps ago; absent: as the scenario's `host` says."""

    data: Policy | None = None
    """Reads per level of storage; absent: as the scenario's `data.policy` says."""
    prefetch: Whole | None = Field(default=None, ge=1)
    """Batches that are read ahead; absent: as the scenario's `input` says, like the next two."""
    readers: Whole | None = Field(default=None, ge=1)
    """Files that a rank reads at the same time."""
    decode_workers: Whole | None = Field(default=None, ge=1)
    """Samples that a rank decodes at the same time."""

    @abc.abstractmethod
    def default_label(self) -> str:
        """Return a label that tells the parameters."""

    @abc.abstractmethod
    def write(self, job: Job) -> Plan:
        """Write the plan of this schedule for a job whose `run_ahead_steps` are in force."""

    @abc.abstractmethod
    def result(self, step: int, job: Job) -> Result:
        """Declare what `step` leaves behind."""

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return what `tune` may vary about the kind in a job; nothing by default.

        A subclass adds its own to those of its base.
        """
        return ()

    @classmethod
    def axis(cls, name: str, values: Sequence[Value], permit: Permit | None = None) -> Axis:
        """Return an axis of a field, whose default is that of the field."""
        return Axis(name, tuple(values), cls.model_fields[name].default, permit)

    @classmethod
    def settings_of(cls, levels: Levels, changed: ChangedSettings) -> dict[str, object] | None:
        """Return the settings of a candidate of a search.

        Args:
            levels: How often over how many ranks to average parameters; empty unless the kind `takes_levels`.
            changed: Values of axes that are not the default.

        Returns:
            Values of fields; None if the kind does not average so, or another kind does the same.
        """
        return None if levels else dict(changed)

    @classmethod
    def label_of(cls, name: str, value: Value) -> str:
        """Return what the label of a candidate adds for a value of an axis that `default_label` does not tell."""
        return ""

    def kind_in_files(self) -> str:
        """Return the `kind` by which a scenario finds the class again: `module:Class` for one of a user."""
        return written_kind(type(self), SCHEDULES)

    def workload_problems(self, optimizer: str, *, has_rows: bool = True) -> list[tuple[str, str]]:
        """Return `(field, what is wrong)` for parameters that do not fit the job's optimizer, or tensors.

        Args:
            optimizer: Of the job.
            has_rows: It is known which tensors are matrices.
        """
        return []

    def plan(self, job: Job) -> Plan:
        """Return the plan of this schedule for a job."""
        if self.run_ahead_steps is not None:
            job = replace(job, host_waits_for="loss", run_ahead_steps=self.run_ahead_steps)
        plan = self.write(replace(job, input_path=self._input_path(job.input_path)))
        return plan if job.checkpoint is None else _with_checkpoints(plan, job.checkpoint)

    def _input_path(self, path: InputPath) -> InputPath:
        dataset = path.dataset and replace(
            path.dataset,
            readers=self.readers or path.dataset.readers,
            decoders=self.decode_workers or path.dataset.decoders,
        )
        prefetch = self.prefetch or path.prefetch
        policy = self.data or path.policy
        return replace(path, prefetch=prefetch, dataset=dataset, policy=policy)

    @field_validator("algorithm")
    @classmethod
    def _is_known(cls, algorithm: str, info: ValidationInfo) -> str:
        if algorithm != algorithms.AUTO:
            algorithms.find(algorithm, folder_of(info))
        return algorithm

    @field_validator("label")
    @classmethod
    def _names_a_folder(cls, label: str) -> str:
        legal = label.isprintable() and len(label) <= 100 and label == label.strip() and not set(label) & set("/\\")
        if not legal or label.startswith((".", "-")):
            raise ValueError(
                f"label {label[:40]!r}; it names rows and folders: up to 100 printable characters without / or \\, not "
                f"beginning with a dot, a dash or a space, such as local-4"
            )
        return label

    def problems(self, world_size: int, ranks_per_node: int) -> list[tuple[str, str]]:
        """Return `(field, what is wrong)` for parameters that do not fit the cluster."""
        if self.algorithm == "server":
            return [("algorithm", "server: it needs servers, which are `kind: parameter_server`")]
        if algorithms.needs_power_of_two(self.algorithm) and world_size & (world_size - 1):
            problem = f"{self.algorithm} needs a power of two; the world has {world_size} ranks: choose ring"
            return [("algorithm", problem)]
        return []

    def unused_settings(self, world_size: int, ranks_per_node: int, n_steps: int) -> list[str]:
        """Return what this schedule never gets to do in so many steps, a sentence each; nothing by default."""
        return []

    def unused_in(self, job: Job) -> list[str]:
        """Return which settings have no effect on the job's tensors and devices, a sentence each; none by default."""
        return []

    def cycle(self, job: Job) -> range:
        """Return the first period: from its start on, every `len(cycle)` steps are like those; one step by default."""
        return range(1)

    def cycle_with_checkpoints(self, job: Job) -> range:
        """Return the first period of plans with the job's checkpoints, if it has any."""
        cycle = self.cycle(job)
        every = job.checkpoint.every if job.checkpoint else 1
        return range(cycle.start, cycle.start + math.lcm(len(cycle), every))

    @property
    def name(self) -> str:
        """The label in force."""
        return self.label or self.default_label() + self._input_traits

    @property
    def _input_traits(self) -> str:
        counts = {"prefetch": self.prefetch, "readers": self.readers, "workers": self.decode_workers}
        chosen = [self.data, *(f"{name}{count}" for name, count in counts.items() if count)]
        return "".join(f"+{each}" for each in chosen if each)


def _with_checkpoints(plan: Plan, checkpoint: Checkpoint) -> Plan:
    """Return the plan whose ranks write a checkpoint at the end of every so many steps, after updates and averages.

    copy(param -> checkpoint.param)     on the device: once the last checkpoint is written
    save(checkpoint.param)
    wait(checkpoint.written)            unless it is written in the background
    """
    sources = _sources(plan, checkpoint)
    copies = [replace(each, name=f"{_COPY}.{each.name}", place="host", initialized=False) for each in sources]
    written = None if checkpoint.is_async else _WRITTEN.name
    saving: Body = (
        *(ops.Copy(source.name, copy.name, checkpoint.by) for source, copy in zip(sources, copies, strict=True)),
        ops.Save(tuple(copy.name for copy in copies), written, checkpoint.to, checkpoint.by),
        *((ops.Wait(written),) if written else ()),
    )
    longer = [(*body, *saving) for body in plan.bodies]
    steps = (
        (plan.bodies if (step + 1) % checkpoint.every else longer)[body]
        for step, body in enumerate(plan.body_of_steps())
    )
    added = [*(each for each in sources if each not in plan.buffers), *copies, *((_WRITTEN,) if written else ())]
    return Plan.from_steps(
        plan.name, world_size=plan.world_size, buffers=(*plan.buffers, *added), steps=steps, dataset=plan.dataset
    )


def _sources(plan: Plan, checkpoint: Checkpoint) -> list[Buffer]:
    """Return the buffers on the device that a checkpoint holds."""
    if isinstance(checkpoint.what, int):
        return [Buffer(_STATE, checkpoint.what, "uint8", initialized=True)]
    updates = [op for body in plan.bodies for op in body if isinstance(op, ops.Optimize)]
    names = {name: op.optimizer for op in updates for name in op.params}
    updated = [plan.buffer(name) for name in names]
    if checkpoint.what == "parameters":
        return [buffer for buffer in updated if names[buffer.name] == "inner"]
    slices = [plan.buffer(name) for name in dict.fromkeys(name for op in updates for name in op.slices)]
    if slices and checkpoint.by.size > 1:
        raise PlanError(
            f"plan {plan.name}: checkpoint.ranks: each rank has a slice of the optimizer's state, and not all write "
            f"it: write ranks: all, or what: parameters"
        )
    count = sum(buffer.count - buffer.padding for buffer in slices or updated)
    return [*updated, Buffer(_MOMENTS, count, updated[0].dtype, initialized=True)]
