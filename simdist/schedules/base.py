"""Base of all schedules: settings that a user writes, a plan, and a declaration of the plan's result."""

import abc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from simdist.errors import PlanError
from simdist.plan import Body, Buffer, Group, Plan, Result, algorithms, ops
from simdist.plan.ops import Algorithm
from simdist.plan.optimizers import OptimizerName
from simdist.schedules import labels
from simdist.schedules.job import POLICIES, Checkpoint, InputPath, Job, Policy, Shape
from simdist.schedules.labels import LabelForm, Piece, piece
from simdist.schedules.tuning import Allowance, Axis, ChangedSettings, Levels, Permit, TunedValue
from simdist.settings.base import Settings, SettingsGroup, folder_of, key_of
from simdist.settings.plugins import SCHEDULES, written_kind
from simdist.settings.units import Whole

_MOMENTS = "moments"  # buffer with an optimizer momentum for every parameter
_STATE = "state"
_COPY = "checkpoint"
_INPUT = (
    piece("policy", [(each, f"+{each}") for each in POLICIES]),
    piece("prefetch", before="+prefetch"),
    piece("readers", before="+readers"),
    piece("decode_workers", before="+workers"),
)
_WRITTEN = Buffer(f"{_COPY}.written", 1, "uint8", place="host")


class ScheduleInput(SettingsGroup):
    """How a schedule reads batches, where it differs from the scenario's `input`."""

    policy: Policy | None = None
    """Reads per level of storage, instead of `input.data.policy`."""
    prefetch: Whole | None = Field(default=None, ge=1)
    """Batches read ahead."""
    readers: Whole | None = Field(default=None, ge=1)
    """Files that a rank reads at the same time."""
    decode_workers: Whole | None = Field(default=None, ge=1)
    """Samples that a rank decodes at the same time."""


class Schedule(Settings, abc.ABC):
    """A way to synchronise the ranks.

    A schedule is a subclass, in this package or in any module of the user. It sets `kind`, a `Literal` field with the
    name that scenarios use, adds its parameters as fields, and implements `default_label`, `write` and `result`.
    Nothing else needs an edit: the scenario loader, the command line and `tune` find it.

    Its plan must compute the declared `result`. `simdist.proof` checks that.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = ({},)
    """Legal parameters on 8 ranks of 2 nodes, for the conformance tests."""

    family: ClassVar[str] = ""
    """Schedules of one family differ by a single setting or level; if empty, the kind is a family of its own."""
    place: ClassVar[int] = 1000
    """Place of the kind in a search, among candidates that promise the same."""
    permit: ClassVar[Permit | None] = None
    """The permit that a user must give before `tune` tries the kind."""
    permits: ClassVar[tuple[Permit, ...]] = ()
    """The permits that axes of the kind need."""
    sends_part: ClassVar[bool] = False
    """It sends a part of the gradient, so `tune` tries it only with `--min-density`."""
    takes_levels: ClassVar[bool] = False
    """`tune` tries it with periods and groups (see `settings_of`)."""
    shards: ClassVar[bool] = False
    """Its ranks hold slices of the parameters, which they gather to use them."""
    orthonormalizes: ClassVar[bool] = False
    """Its ranks orthonormalize matrices, in the time that the device states for it."""
    label_form: ClassVar[LabelForm | None] = None
    """What its labels consist of. None: `default_label` writes them, and they are not read."""
    searched: ClassVar[tuple[Piece, ...]] = ()
    """Settings that only the labels of candidates of a search show."""

    kind: str
    label: str = ""
    """Name in tables and files. If not given, derived from the parameters."""
    algorithm: Algorithm = "auto"
    """Algorithm of collectives: `auto`, a shipped one, or a user's as `module:NAME`."""
    run_ahead_steps: Whole | None = Field(default=None, ge=0)
    """The host waits for the loss of this many steps ago. If absent, the scenario's `host` decides."""

    input: Annotated[ScheduleInput, Field(exclude_if=lambda own: own == ScheduleInput())] = ScheduleInput()
    """How batches are read. What it leaves out, the scenario's `input` decides."""

    @abc.abstractmethod
    def default_label(self) -> str:
        """Return a label that shows the parameters."""

    @abc.abstractmethod
    def write(self, job: Job) -> Plan:
        """Write the plan of this schedule for a job. The job's `run_ahead_steps` apply."""

    @abc.abstractmethod
    def result(self, step: int, job: Job) -> Result:
        """Declare the result of `step`."""

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the settings of the kind that `tune` may vary in a job; none by default.

        A subclass adds its own axes to those of its base.
        """
        return ()

    @classmethod
    def axis(cls, name: str, values: Sequence[TunedValue], permit: Permit | None = None) -> Axis:
        """Return an axis of a field, with the default of the field."""
        return Axis(name, tuple(values), cls.model_fields[name].default, permit)

    @classmethod
    def settings_of(cls, levels: Levels, changed: ChangedSettings) -> dict[str, object] | None:
        """Return the settings of a candidate of a search.

        Args:
            levels: Periods and group sizes of parameter averages. Empty unless the kind `takes_levels`.
            changed: Values of axes that are not the default.

        Returns:
            Values of fields. None if the kind cannot average with these levels, or another kind does the same.
        """
        return None if levels else dict(changed)

    @classmethod
    def settings_of_label(cls, label: str) -> dict[str, object] | None:
        """Return the settings that a label shows, so that scenarios can name it; None if it is of another schedule.

        >>> from simdist.schedules import LocalSGD
        >>> LocalSGD.settings_of_label("local-8"), LocalSGD.settings_of_label("sync")
        ({'period': 8}, None)
        """
        if cls.label_form is None:
            return None
        word, pieces = cls.label_form
        own, _, rest = label.partition("+")
        of_input = labels.parse_label(("", _INPUT), "+" + rest if rest else "")
        if of_input is None:
            return None
        for at in [len(own), *(match.start() for match in labels.OTHERS.finditer(own))]:
            found = labels.parse_label((word, (*pieces, *cls.searched)), own[:at])
            others = labels.read_others(own[at:])
            if found is not None and others is not None and others.keys() <= cls.model_fields.keys():
                return found | others | ({"input": of_input} if of_input else {})
        return None

    @classmethod
    def label_of(cls, name: str, value: TunedValue) -> str:
        """Return the part of a candidate's label for an axis value that `default_label` does not show."""
        return "".join(each.text(value) for each in cls.searched if each.field in (name, key_of(name)))

    def kind_in_files(self) -> str:
        """Return the `kind` under which a scenario finds the class again: `module:Class` for a user's class."""
        return written_kind(type(self), SCHEDULES)

    def workload_problems(self, optimizer: OptimizerName, *, has_rows: bool = True) -> list[tuple[str, str]]:
        """Return `(field, what is wrong)` for parameters that do not fit the job's optimizer or tensors.

        Args:
            optimizer: The job's optimizer.
            has_rows: Whether it is known which tensors are matrices.
        """
        return []

    def plan(self, job: Job) -> Plan:
        """Return the plan of this schedule for a job."""
        if self.run_ahead_steps is not None:
            job = replace(job, host_waits_for="loss", run_ahead_steps=self.run_ahead_steps)
        plan = self.write(replace(job, input_path=self._input_path(job.input_path)))
        if job.checkpoint is not None:
            plan = _with_checkpoints(plan, job.checkpoint)
        if not job.launches:
            return plan
        from simdist.plan.launches import with_kernel_launches

        return with_kernel_launches(plan, job.launches)

    def _input_path(self, path: InputPath) -> InputPath:
        own = self.input
        dataset = path.dataset and replace(
            path.dataset,
            readers=own.readers or path.dataset.readers,
            decoders=own.decode_workers or path.dataset.decoders,
        )
        policy = own.policy or path.policy
        return replace(path, prefetch=own.prefetch or path.prefetch, dataset=dataset, policy=policy)

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

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return `(field, what is wrong)` for parameters that do not fit the cluster."""
        if self.algorithm == "server":
            return [("algorithm", "server: it needs servers, which are `kind: parameter_server`")]
        if self.algorithm == "broadcasts":
            hint = "write shared_update: true and updates_sent_by: broadcast instead"
            return [("algorithm", f"broadcasts: it gathers only, and carries updates of parameters: {hint}")]
        if algorithms.needs_power_of_two(self.algorithm) and shape.world_size & (shape.world_size - 1):
            problem = f"{self.algorithm} needs a power of two; the world has {shape.world_size} ranks: choose ring"
            return [("algorithm", problem)]
        return []

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return a sentence for each setting that has no effect in this many steps; none by default."""
        return []

    def unused_in(self, job: Job) -> list[str]:
        """Return a sentence for each setting that has no effect on the job's tensors and devices; none by default."""
        return []

    def cycle(self, job: Job) -> range:
        """Return the first period: from its start on, steps repeat every `len(cycle)`. By default it is one step."""
        return range(1)

    def cycle_with_checkpoints(self, job: Job) -> range:
        """Return the first period of plans that include the job's checkpoints, if any."""
        cycle = self.cycle(job)
        every = job.checkpoint.every if job.checkpoint else 1
        return range(cycle.start, cycle.start + math.lcm(len(cycle), every))

    @property
    def name(self) -> str:
        """The label in force."""
        return self.label or self.default_label() + self._input_traits

    @property
    def _input_traits(self) -> str:
        return labels.texts(self.input, _INPUT)


def _with_checkpoints(plan: Plan, checkpoint: Checkpoint) -> Plan:
    """Add a checkpoint to a plan at the end of every `every` steps, after updates and averages.

    copy(param -> checkpoint.param)     on the device: once the last checkpoint is written
    save(checkpoint.param)
    wait(checkpoint.written)            unless it is written in the background

    If ranks hold slices of parameters, those of the first copy of the model write, unless all do.
    """
    checkpoint = replace(checkpoint, by=_writers(plan, checkpoint))
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


def _writers(plan: Plan, checkpoint: Checkpoint) -> Group:
    """Return the groups whose first member writes a checkpoint."""
    sharded_over = {buffer.sharded_over for buffer in plan.buffers if buffer.initialized} - {ops.ALONE}
    if checkpoint.by.size == 1 or not sharded_over:
        return checkpoint.by
    (group,) = sharded_over
    return Group(plan.world_size // group.size, stride=group.size)


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
    kept = [buffer for buffer in slices if buffer.initialized]
    return [*updated, *kept, Buffer(_MOMENTS, count, (slices or updated)[0].dtype, initialized=True)]
