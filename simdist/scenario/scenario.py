"""A scenario: everything that a comparison of schedules depends on. One that exists is valid."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, Self, TypeAlias, overload

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from simdist.display import Displayed
from simdist.errors import ScenarioError
from simdist.scenario import presets, strict_yaml
from simdist.scenario.checkpoint import CheckpointSettings
from simdist.scenario.cluster import Cluster
from simdist.scenario.data import DataSettings
from simdist.scenario.disturbances import KINDS as DISTURBANCE_KINDS
from simdist.scenario.disturbances import Disturbance, Interference, Recorded, UnevenWork
from simdist.scenario.effects import WITHOUT_DATA, EffectSource, Uses
from simdist.scenario.facts import Imported
from simdist.scenario.failures import Failures
from simdist.scenario.links import (
    ACTOR_KINDS,
    FLOW_KINDS,
    LINK_KINDS,
    CustomActor,
    LinkDisturbance,
    TrafficPattern,
)
from simdist.scenario.loading import SettingsT, read_text, validated
from simdist.scenario.strict_yaml import BASES, path_text
from simdist.scenario.uncertain import Range, check_ranges
from simdist.scenario.workload import Workload, other_batch_fault
from simdist.schedules import KINDS as SCHEDULE_KINDS
from simdist.schedules import GradientSchedule, Schedule, settings_of_name
from simdist.schedules.job import POLICIES_OF_WORKERS, Job, Policy, Shape, uses_disk, uses_memory
from simdist.settings.base import (
    Fault,
    Settings,
    SettingsGroup,
    folder_of,
    plain,
    refuse,
    shown,
    stated,
    unchecked_copy,
    validate_by_kind,
)
from simdist.settings.units import EpochSteps, StepsOrTime, Whole, parse_seconds

_MOST_SHOWN = 8  # schedules in a `repr`
_MAX_STEPS = 10_000_000  # a plan names the body of each
_SHAPE = "a scenario: write cluster, workload, steps and schedules, each as `key: value`"


class Host(Settings):
    """Where the CPU waits for its GPU, and how far it may run ahead.

    Args:
        waits_for: `loss`: before the backward pass of step t the host waits for the loss of step t - `run_ahead_steps`;
            a forward pass comes after the averages before it, so the host waits for those, too. 0 is `loss.item()`
            before `backward()`. More is an event of an earlier step, or a full launch queue; reading an old loss with
            `.item()` is not, because that waits for all that was enqueued before it. `update`: after each optimizer
            step, but before parameters are averaged, it waits for its own update: `loss.item()` or a timer after
            `optimizer.step()`.
        run_ahead_steps: Steps; None never waits.
        graphs: Each pass and each update is a CUDA graph, which the host launches at once.
    """

    waits_for: Literal["loss", "update"] = "loss"
    run_ahead_steps: Annotated[Whole, Field(ge=0)] | None = 0
    graphs: Annotated[bool, Field(exclude_if=lambda graphs: not graphs)] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.waits_for == "update" and self.run_ahead_steps:
            hint = "write 0, or waits_for: loss"
            message = f"{self.run_ahead_steps} with waits_for update, which waits in the same step: {hint}"
            refuse("Host", [(("run_ahead_steps",), message)])
        return self

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each setting without effect."""
        ahead = self.run_ahead_steps
        if self.waits_for == "update" and ahead is None:
            yield "host.waits_for has no effect: with host.run_ahead_steps null the host never waits"
        if ahead is not None and ahead >= uses.n_steps:
            yield f"host.run_ahead_steps has no effect: with {uses.n_steps} steps the host never waits"

    @property
    def hides_pauses(self) -> bool:
        """Whether the device still has work in the plan when its host is late."""
        return self.waits_for == "update" or self.run_ahead_steps != 0


_MOST_WORKERS = 1024
_SHARED_BATCH = ("prefetch", "readers", "decode_workers")  # keys of threads that share a batch


class InputSettings(Settings):
    """How a batch reaches the GPU.

    Args:
        source: `device`: it is there (synthetic data); `memory`: copied from host memory; `storage`: read from the
            cluster's storage, then copied.
        copy_method: `pinned` memory: the host goes on during the copy; `pageable`: it waits. The key is `copy`.
        prefetch: Batches that are read ahead from storage.
        readers: Files of a data set that a rank reads at the same time.
        decode_workers: Samples that a rank decodes at the same time.
        num_workers: Processes of torch's DataLoader, in place of the three keys above. Each reads and decodes whole
            batches, one sample after the other, and begins the next batch when one of its own has been taken. 0: the
            host does so itself, in each step. Every epoch begins without batches.
        prefetch_factor: Batches that each worker loads ahead.
        data: Data set read from storage, sample by sample; absent: a batch is one request.
    """

    source: EffectSource = "device"
    copy_method: Literal["pinned", "pageable"] = Field(default="pinned", alias="copy")
    prefetch: Annotated[Whole, Field(ge=1)] = 2
    readers: Annotated[Whole, Field(ge=1)] = 8
    decode_workers: Annotated[Whole, Field(ge=1)] = 1
    num_workers: Annotated[Whole | None, Field(ge=0, le=_MOST_WORKERS, exclude_if=lambda count: count is None)] = None
    prefetch_factor: Annotated[Whole, Field(ge=1, le=_MOST_WORKERS, exclude_if=lambda factor: factor == 2)] = 2
    data: DataSettings | None = None

    @property
    def n_ahead(self) -> int:
        """Batch buffers in rotation, or with workers, batches that they load ahead of the one that is used."""
        return self.prefetch if self.num_workers is None else self.num_workers * self.prefetch_factor

    @property
    def n_worker_lanes(self) -> int:
        """Workers that load whole batches; 0 if threads share each batch. The host without workers is one of them."""
        return 0 if self.num_workers is None else max(1, self.num_workers)

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each setting without effect."""
        if self.source == "device" and self.copy_method != "pinned":
            yield "input.copy has no effect: with input.source device nothing is copied"
        if self.num_workers is None and self.prefetch_factor != 2:
            yield "input.prefetch_factor has no effect: without input.num_workers, prefetch counts batches"
        if self.num_workers is not None and self.source != "storage":
            yield f"input.num_workers has no effect: with input.source {self.source} nothing is loaded"
        for key in _SHARED_BATCH if self.num_workers is not None else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"input.{key} has no effect: with input.num_workers, each worker loads whole batches"
        if self.source != "storage" and self.prefetch != 2:
            yield f"input.prefetch has no effect: with input.source {self.source} nothing is read ahead"
        if not uses.has_data and self.readers != 8:
            yield f"input.readers {WITHOUT_DATA}"
        if not uses.has_data and self.decode_workers != 1:
            yield f"input.decode_workers {WITHOUT_DATA}"
        if self.data is not None:
            yield from self.data.unused(uses)


#: A scenario, a mapping with its keys, the name of its file, or of one that ships; `load` takes them all.
AnyScenario: TypeAlias = "Scenario | Mapping[str, object] | str | FilePath"


def _expand_cluster(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Cluster:
    cluster: Cluster = handler(presets.expand("cluster", value, folder=folder_of(info)))
    return _forget_base(cluster, value)


def _expand_workload(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Workload:
    workload: Workload = handler(presets.expand("workload", value, folder=folder_of(info)))
    return _forget_base(workload, value)


def _expand_failures(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Failures | None:
    failures: Failures | None = handler(presets.expand("failures", value, folder=folder_of(info)))
    return None if failures is None else _forget_base(failures, value)


def _forget_base(settings: SettingsT, value: object) -> SettingsT:
    """Count as written only what the user wrote, not what a preset or another file says."""
    if isinstance(value, str):
        value = {"preset": value}
    if isinstance(value, dict) and any(key in value for key in BASES):
        _forget_others(settings, value)
    return settings


def _forget_others(settings: Settings, written: Mapping[str, object]) -> None:
    fields = type(settings).model_fields
    settings.model_fields_set.intersection_update({name for name in fields if {name, fields[name].alias} & {*written}})
    for name, value in settings:
        if isinstance(value, SettingsGroup):
            own = written.get(name)
            _forget_others(value, own if isinstance(own, Mapping) else {})


def _choose_disturbance(value: object, info: ValidationInfo) -> Disturbance | LinkDisturbance:
    written = value if isinstance(value, dict) else {}
    on = written.get("on", "host")
    if on != "link" and ("link" in written or written.get("kind") == "outages"):
        refuse("Disturbance", [(("on",), f"{shown(on)}: a disturbance of links: write on: link")])
    disturbance: Disturbance | LinkDisturbance = validate_by_kind(
        value, LINK_KINDS if on == "link" else DISTURBANCE_KINDS, info
    )
    cluster = info.data.get("cluster")
    n_steps = info.data.get("steps")
    if isinstance(disturbance, LinkDisturbance):
        refuse("Disturbance", disturbance.cluster_faults(cluster) if cluster else [])
        return disturbance
    if cluster:
        refuse("Disturbance", disturbance.range_faults(cluster.world_size, cluster.gpus_per_node))
    workload = info.data.get("workload")
    if n_steps and isinstance(disturbance, Recorded):
        refuse("Recorded", disturbance.shape_faults(n_steps, workload.micro_batches if workload else None))
    if n_steps and workload and isinstance(disturbance, UnevenWork):
        refuse("UnevenWork", disturbance.shape_faults(n_steps * workload.micro_batches))
    return disturbance


def _choose_flows(value: object, info: ValidationInfo) -> TrafficPattern:
    flows: TrafficPattern = validate_by_kind(value, FLOW_KINDS, info)
    if cluster := info.data.get("cluster"):
        refuse("Flows", flows.cluster_faults(cluster))
    return flows


def _choose_actor(value: object, info: ValidationInfo) -> CustomActor:
    actor: CustomActor = validate_by_kind(value, ACTOR_KINDS, info)
    return actor


def _choose_schedule(value: object, info: ValidationInfo) -> Schedule:
    schedule: Schedule = validate_by_kind(settings_of_name(value), SCHEDULE_KINDS, info)
    cluster = info.data.get("cluster")
    problems = schedule.problems(Shape(cluster.world_size, cluster.gpus_per_node)) if cluster else []
    workload = info.data.get("workload")
    if workload:
        has_rows = any(tensor.rows for tensor in workload.tensors)
        problems = [*problems, *schedule.workload_problems(workload.optimizer, has_rows=has_rows)]
    fields = type(schedule).model_fields
    faults: list[Fault] = [((fields[field].alias or field,), message) for field, message in problems]
    if cluster and "input" in info.data:
        of_input = _input_problems(schedule, info.data["input"], cluster)
        faults += [(("input", key), message) for key, message in of_input]
    refuse("Schedule", faults)
    return schedule


def _input_problems(schedule: Schedule, path: InputSettings, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield what a schedule asks of the input that the scenario does not have."""
    own = schedule.input
    data = path.data
    for key, value in {"policy": own.policy, "readers": own.readers, "decode_workers": own.decode_workers}.items():
        if data is None and value is not None:
            yield key, "there is no data set to read: write input.data: {samples: ..., file_size: ...} in the scenario"
    for key in _SHARED_BATCH if path.num_workers is not None else ():
        if getattr(own, key) is not None:
            yield key, "with input.num_workers, each worker loads whole batches: leave it out"
    policy = own.policy or (data.policy if data else None)
    if policy and path.num_workers is not None and policy not in POLICIES_OF_WORKERS:
        known = " or ".join(POLICIES_OF_WORKERS)
        yield "policy", f"{policy}: workers of a DataLoader share no memory, and begin at once: write {known}"
    elif policy and (fault := _policy_fault(policy, cluster)):
        yield "policy", fault


def _policy_fault(policy: Policy, cluster: Cluster) -> str | None:
    if uses_disk(policy) and cluster.disk is None:
        return f"{policy} keeps files on local disks: write cluster.disk, e.g. {{read: 2 GB/s, write: 1 GB/s}}"
    if uses_memory(policy) and cluster.memory is None:
        return f"{policy} keeps samples in memory: write cluster.memory, e.g. {{bandwidth: 10 GB/s, capacity: 200 GB}}"
    return None


def _count_epochs(value: object, info: ValidationInfo) -> object:
    """Read `3 epochs` as so many steps of the data set; count those of a scenario that is changed again."""
    if isinstance(value, EpochSteps):
        return EpochSteps.of(value.n_epochs, steps_per_epoch=_steps_per_epoch(info)) if _data_of(info) else value
    words = value.split() if isinstance(value, str) else []
    if len(words) != 2 or words[1] not in ("epoch", "epochs"):
        return value
    if not words[0].isdecimal():
        raise ValueError(f"{shown(value)} is not a whole number of epochs: write e.g. 2 epochs")
    if "input" in info.data and _data_of(info) is None:
        hint = "Write input.data: {samples: ..., file_size: ...}"
        raise ValueError(f"{shown(value)}: how many samples are there? {hint}")
    if not int(words[0]):
        raise ValueError(f"{shown(value)}: write 1 epoch or more")
    return EpochSteps.of(int(words[0]), steps_per_epoch=_steps_per_epoch(info))


def _count_steps(value: object, info: ValidationInfo) -> object:
    """Read `3 epochs` or `100 steps`; refuse a time, which is another number of steps for each schedule."""
    value = _count_epochs(value, info)
    if not isinstance(value, str):
        return value
    words = value.split()
    if len(words) == 2 and words[0].isdecimal() and words[1] in ("step", "steps"):
        return int(words[0])
    try:
        parse_seconds(value)
    except ValueError:
        return value
    raise ValueError(
        f"{shown(value)}: simulated steps are a number, e.g. 500; train_for states the time of a whole job"
    )


def _keep_epochs(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> int:
    """Check a number of steps, which a plain `int` would make of epochs."""
    counted = _count_steps(value, info)
    checked: int = handler(counted)
    return counted if isinstance(counted, EpochSteps) else checked


def _count_epochs_between(value: object, info: ValidationInfo) -> object:
    """Read the distance of checkpoints, if it is a number of epochs, as so many steps."""
    if isinstance(value, CheckpointSettings):
        return unchecked_copy(value, every=_count_epochs(value.every, info))
    if not isinstance(value, dict) or "every" not in value:
        return value
    try:
        return value | {"every": _count_epochs(value["every"], info)}
    except ValueError as error:
        refuse("Scenario", [(("every",), str(error))])
        raise AssertionError from None


def _data_of(info: ValidationInfo) -> DataSettings | None:
    """Return the data set of a scenario whose input has been validated."""
    found: InputSettings | None = info.data.get("input")
    return found.data if found else None


def _steps_per_epoch(info: ValidationInfo) -> int:
    """Return the steps of an epoch, or 1 if one of the settings that tell is wrong: it has an error of its own."""
    data = _data_of(info)
    cluster, workload = (info.data.get(name) for name in ("cluster", "workload"))
    return data.n_samples // (workload.samples_per_step * cluster.world_size) if data and cluster and workload else 1


class Scenario(Settings, Displayed):
    """Question to the simulator: machines, a training job, what disturbs it, and the schedules to compare.

    Args:
        name: For people; the name of the file if absent.
        cluster: In a file also the name of a preset, or `preset: NAME` or `file: NAME` with keys that override it.
        workload: Likewise.
        input: How a batch reaches the GPU.
        steps: Simulated training steps, 1 or more; with a data set also `3 epochs`.
        train_for: Length of the whole job, which is not simulated: steps, a time, or with a data set epochs.
        seed: Of all random numbers.
        host: How far the CPU runs ahead.
        checkpoint: Files that ranks write every so many steps; absent: none.
        disturbances: Delays of ranks, which add up, and links that misbehave, whose shares multiply.
        failures: What ends or disturbs the whole job, and what it takes to go on; not simulated with the steps. In a
            file also a preset or a file, as `cluster` is.
        background: Flows of other jobs over the same links.
        actors: Processes of users beside the plan.
        schedules: One or more, with distinct labels.
        imported: Facts of the real job that it was imported from.
        uncertain: Ranges of numbers that nobody measured, by path, such as `disturbances.0.sigma`.
        doubts: Reasons to doubt its numbers, a sentence each; every command that reads the scenario repeats them.
    """

    name: str = "scenario"
    cluster: Annotated[Cluster, WrapValidator(_expand_cluster)]
    workload: Annotated[Workload, WrapValidator(_expand_workload)]
    input: InputSettings = InputSettings()
    steps: Annotated[Whole, WrapValidator(_keep_epochs), Field(ge=1, le=_MAX_STEPS, examples=[1000])]
    train_for: Annotated[
        StepsOrTime | None, BeforeValidator(_count_epochs), Field(exclude_if=lambda length: length is None)
    ] = None
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 0
    host: Host = Host()
    checkpoint: Annotated[CheckpointSettings | None, BeforeValidator(_count_epochs_between)] = None
    disturbances: tuple[
        Annotated[SerializeAsAny[Disturbance | LinkDisturbance], BeforeValidator(_choose_disturbance)], ...
    ] = ()
    failures: Annotated[
        Failures | None,
        WrapValidator(_expand_failures),
        Field(exclude_if=lambda failures: failures is None),
    ] = None
    background: Annotated[
        tuple[Annotated[TrafficPattern, BeforeValidator(_choose_flows)], ...], Field(exclude_if=lambda flows: not flows)
    ] = ()
    actors: Annotated[
        tuple[Annotated[SerializeAsAny[CustomActor], BeforeValidator(_choose_actor)], ...],
        Field(exclude_if=lambda actors: not actors),
    ] = ()
    schedules: Annotated[
        tuple[Annotated[SerializeAsAny[Schedule], BeforeValidator(_choose_schedule)], ...],
        Field(min_length=1, examples=["[{kind: sync}]"]),
    ]
    imported: Annotated[Imported | None, Field(exclude_if=lambda imported: imported is None)] = None
    uncertain: dict[str, Range] = Field(default_factory=dict, exclude_if=lambda ranges: not ranges)
    doubts: Annotated[tuple[str, ...], Field(exclude_if=lambda doubts: not doubts)] = ()

    @overload
    def changed(self, path: str, value: object, /, **attributes: object) -> Self: ...
    @overload
    def changed(self, fields: Mapping[str, object] = ..., /, **attributes: object) -> Self: ...
    def changed(self, /, *changes: Any, **attributes: object) -> Any:
        """Return a copy with other settings, validated as a whole.

        Args:
            changes: The path of a field and its new value, or a mapping of paths to values. A path is that of error
                messages and sweeps, such as `disturbances[0].probability`. All that it does not name stays, except
                what a preset measured with the old value, such as `launches` beside `forward`, and a range in
                `uncertain` of a changed field.
            attributes: New values of attributes, as settings or as mappings of their attributes.

        Raises:
            ScenarioError: A path leads nowhere, or the changed scenario is not valid.

        >>> from simdist.scenario import load
        >>> scenario = load("cloud-stragglers")
        >>> scenario.changed("cluster.network.bandwidth", "100 Gbit/s").cluster.network.bandwidth_Bps
        12500000000.0
        >>> scenario.changed({"cluster.nodes": 2, "steps": 10}, schedules=["sync", "local-8"]).cluster.nodes
        2
        """
        match changes:
            case ():
                fields: Mapping[str, object] = {}
            case (Mapping() as fields,):
                pass
            case (str() as path, value):
                fields = {path: value}
            case _:
                raise ScenarioError(f"{self.name}: write changed(path, value), or changed({{path: value, ...}})")
        try:
            here = _changed_at_paths(self, fields) if fields else self
            _refuse_other_batch(self.workload, here.workload, fields)
            kept: dict[str, object] = {name: getattr(here, name) for name in type(self).model_fields}
            return type(self).model_validate(kept | attributes)
        except ValidationError as error:
            raise _named(self.name, error) from None
        except ValueError as error:
            raise ScenarioError(f"{self.name}: {error}") from None

    def __repr__(self) -> str:
        cluster = self.cluster
        names = [each.name for each in self.schedules]
        more = [f"{len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else []
        parts = {
            "name": f"{self.name!r}",
            "cluster": f"<{cluster.name or 'unnamed'}: {cluster.nodes} x {cluster.gpus_per_node} GPUs>",
            "workload": f"<{self.workload.name or 'unnamed'}: batch_size {self.workload.batch_size}>",
            "schedules": f"<{', '.join([*names[:_MOST_SHOWN], *more])}>",
            "steps": f"{int(self.steps)}",
        }
        return f"Scenario({', '.join(f'{key}={text}' for key, text in parts.items())})"

    __str__ = __repr__

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference to what is disturbed."""
        is_drawn = any(each.is_random for each in (*self.disturbances, *self.background))
        return is_drawn or any(each and each.ranks_remark(self.cluster.world_size) for each in self.delays)

    @property
    def has_ranges(self) -> bool:
        """Whether a number of its steps is known as a range."""
        return bool(self.cluster.uncertain) or any(not path.startswith("failures") for path in self.uncertain)

    @property
    def is_of_machines(self) -> bool:
        """Whether it is about real machines, whose errors count: something is a range, or is lost to interference."""
        return self.has_ranges or any(isinstance(each, Interference) for each in self.disturbances)

    @property
    def has_links(self) -> bool:
        """Whether a link is disturbed, or other jobs or actors use one."""
        return bool(self.background or self.actors) or any(
            isinstance(each, LinkDisturbance) for each in self.disturbances
        )

    @property
    def policies(self) -> frozenset[Policy]:
        """Policies by which the schedules read the data set; none if nothing reads it."""
        data = self.input.data
        if data is None or self.input.source != "storage":
            return frozenset()
        return frozenset(schedule.input.policy or data.policy for schedule in self.schedules)

    @property
    def uses(self) -> Uses:
        """What it uses, which decides the settings that have an effect."""
        data = self.input.data
        saves_to = self.checkpoint.to if self.checkpoint else None
        servers_apart = any(each.model_dump().get("apart") for each in self.schedules)
        reads_storage = "storage" in (self.input.source, saves_to)
        return Uses(
            n_steps=self.steps,
            source=self.input.source,
            has_data=data is not None,
            policies=self.policies,
            saves_to=saves_to,
            nics=self.cluster.n_domains > 1 or servers_apart or reads_storage,
            n_nodes=self.cluster.nodes,
            hides_pauses=self.host.hides_pauses,
            file_nbytes=data.least_nbytes if data else 0,
            sample_nbytes=self.workload.sample_nbytes,
            decodes=self.workload.decode_s > 0,
        )

    def unused(self) -> Iterator[str]:
        """Yield a sentence for each setting that has no effect."""
        uses = self.uses
        checkpoint = None if self.failures else self.checkpoint  # failures count it beyond the simulated steps
        for part in (self.host, self.input, checkpoint, self.failures, self.cluster, self.workload):
            if part is not None:
                yield from part.unused(uses)
        yield from self._unused_between(uses)
        for i, schedule in enumerate(self.schedules):
            yield from self._unused_in_schedule(schedule, i)
        for i, disturbance in enumerate(self.disturbances):
            yield from disturbance.unused(uses, f"disturbances[{i}]")
        if self.seed and not self.is_random and not (self.failures and self.failures.is_random):
            yield "seed has no effect: nothing is random"

    def _unused_between(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each setting of one part that has no effect because of another part."""
        cluster = self.cluster
        data = self.input.data
        if data and uses.policies:
            if "policy" in data.model_fields_set and all(schedule.input.policy for schedule in self.schedules):
                yield "input.data.policy has no effect: every schedule has its own"
            has_limit = {
                "disk": cluster.disk is not None and cluster.disk.capacity_nbytes is not None,
                "memory": cluster.memory is not None and cluster.memory.capacity_nbytes is not None,
            }
            fills_disk = has_limit["disk"] and bool(uses.policies & {"files", "datacache"})
            if data.eviction != "none" and not fills_disk and not (has_limit["memory"] and uses.memory):
                is_staged = "staged" in uses.policies and has_limit["disk"]
                which = "what is staged in stays, and nothing else" if is_staged else "nothing"
                yield f"input.data.eviction has no effect: {which} that is kept has a capacity"
        ranges = {*cluster.uncertain, *(path.removeprefix("cluster.") for path in self.uncertain)}
        is_nccl = cluster.collectives.library != "gloo" and cluster.device.nccl_capability is not None
        if "fabric.latency" in ranges and is_nccl:
            own = "has no effect on NCCL's rings and trees: they have NCCL's own hops"
            yield f"the range of cluster.fabric.latency {own}"

    def _unused_in_schedule(self, schedule: Schedule, number: int) -> Iterator[str]:
        cluster = self.cluster
        workload = self.workload
        place = f"schedules[{number}]"
        if self.input.source != "storage":
            keys = [key for key, value in schedule.input if value is not None]
            yield from (f"{place}.input.{key} {self.uses.nothing_is_read}" for key in keys)
        job = Job(
            world_size=cluster.world_size,
            ranks_per_node=cluster.gpus_per_node,
            n_steps=self.steps,
            tensor_counts=workload.tensor_counts,
            tensor_rows=workload.tensor_rows,
            speeds=tuple(cluster.device_speed().tolist()),
            units=workload.sharded_units,
        )
        found = (*schedule.unused_settings(job), *schedule.unused_in(job))
        yield from (f"{place} ({schedule.name}) {sentence}" for sentence in found)
        is_nccl = cluster.collectives.library != "gloo" and cluster.device.nccl_capability is not None
        if is_nccl and schedule.algorithm == "tree":
            yield f"{place}.algorithm tree sends whole buffers along one tree: NCCL's Tree is double_tree"
        is_half = isinstance(schedule, GradientSchedule) and schedule.compression == "fp16"
        if is_half and workload.dtype != "float32":
            yield f"{place}.compression has no effect: gradients are of type {workload.dtype} already"

    def without_links(self) -> Self:
        """Return a copy whose links are as they should be, with no other jobs or actors on them."""
        delays = tuple(each for each in self.disturbances if not isinstance(each, LinkDisturbance))
        return unchecked_copy(self, disturbances=delays, background=(), actors=())

    @property
    def traced_sharding(self) -> Schedule | None:
        """The schedule of the job that the scenario was imported from, if it shards the model; None otherwise."""
        first = self.schedules[0]
        return first if self.imported is not None and first.shards else None

    @property
    def delays(self) -> tuple[Disturbance | None, ...]:
        """Disturbances that delay ranks, in their places; None in those of links."""
        return tuple(None if isinstance(each, LinkDisturbance) else each for each in self.disturbances)

    # Agreement of two settings is checked with the later one, so that it is checked even if a third is wrong:
    # `info.data` holds those before it that are valid.

    @field_validator("workload")
    @classmethod
    def _check_workload(cls, workload: Workload, info: ValidationInfo) -> Workload:
        cluster = info.data.get("cluster")
        precision = workload.precision
        if cluster and cluster.device.peak_flops.at(precision) is None and not workload.has_seconds:
            stated = ", ".join(cluster.device.peak_flops.stated) or "none"
            hint = f"write e.g. peak: {{{precision}: 125 TFLOP/s}} there, or workload.forward, e.g. 20 ms"
            fault = f"{precision} is not in cluster.device.peak (stated: {stated}): {hint}"
            refuse("Workload", [(("precision",), fault)])
        return workload

    @field_validator("input")
    @classmethod
    def _check_input(cls, value: InputSettings, info: ValidationInfo) -> InputSettings:
        cluster = info.data.get("cluster")
        workload = info.data.get("workload")
        faults: list[Fault] = []
        if cluster and cluster.storage is None and value.source == "storage":
            faults.append((("source",), "'storage': the cluster has none, write cluster.storage or another source"))
        if workload and workload.sample_nbytes == 0 and value.source != "device":
            hint = "write workload.sample_size, e.g. 150 kB"
            faults.append((("source",), f"{value.source!r}: how large is a sample? {hint}"))
        if value.data and cluster and workload:
            n_read = cluster.world_size * workload.samples_per_step
            needed = f"a step of {cluster.world_size} ranks reads {n_read}, and an epoch has one step or more"
            if n_read > value.data.n_samples:
                faults.append((("data", "samples"), f"{value.data.n_samples}: {needed}"))
        refuse("InputSettings", faults)
        return value

    @field_validator("checkpoint")
    @classmethod
    def _check_checkpoint(cls, value: CheckpointSettings | None, info: ValidationInfo) -> CheckpointSettings | None:
        cluster = info.data.get("cluster")
        if value and cluster:
            refuse("CheckpointSettings", value.faults(cluster))
        return value

    @field_validator("failures")
    @classmethod
    def _check_failures(cls, value: Failures | None, info: ValidationInfo) -> Failures | None:
        cluster = info.data.get("cluster")
        if value and cluster:
            refuse("Failures", value.cluster_faults(cluster))
        return value

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        check_ranges(self, self.uncertain)
        return self

    @field_validator("schedules")
    @classmethod
    def _check_labels(cls, schedules: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
        first: dict[str, int] = {}
        refuse(
            "Schedules",
            (
                ((i, "label"), f"duplicate label {shown(name)}: schedule {first[name]} has it too, write another label")
                for i, name in enumerate(schedule.name for schedule in schedules)
                if first.setdefault(name, i) != i
            ),
        )
        return schedules


def _changed_at_paths(scenario: Scenario, fields: Mapping[str, object]) -> Scenario:
    """Return a scenario with other values at paths, not validated as a whole."""
    from simdist.scenario.fields import changed_at, parse_path

    found = changed_at(scenario, {parse_path(path): plain(value) for path, value in fields.items()})
    assert isinstance(found, Scenario)
    return found


def _refuse_other_batch(before: Workload, after: Workload, paths: Iterable[str]) -> None:
    """Refuse a change of the batch size that leaves seconds which were measured at another one."""
    keys = [text.split(".")[1] for text in paths if text.startswith("workload.")]
    if "batch_size" in keys and (fault := other_batch_fault(before, after.batch_size, keys)):
        raise ValueError(f"workload.batch_size: {fault}")


def _named(name: str, error: ValidationError) -> ScenarioError:
    """Return the error of a scenario that is in no file, a line for every problem."""
    return ScenarioError("\n".join(f"{name}: {path_text(each['loc'])}: {each['msg']}" for each in error.errors()))


def load(scenario: AnyScenario) -> Scenario:
    """Return a scenario from a file, or from a mapping in Python.

    Args:
        scenario: Name of a file; name of a scenario that ships, such as `cloud-stragglers`; a mapping with the keys of
            a file, or with names of attributes; or a scenario, which is returned as it is. In a mapping, a value has
            its unit (`"latency": "5 us"`) or is a number in SI units (`"latency_s": 5e-6`).

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.

    >>> job = {"cluster": "v100x8-25gbit", "workload": "resnet50", "steps": 5}
    >>> load(job | {"schedules": ["sync", "local-4"]}).schedules[1].period
    4
    """
    match scenario:
        case Scenario():
            return scenario
        case Mapping():
            try:
                return Scenario.model_validate(dict(scenario))
            except ValidationError as error:
                raise _named(str(scenario.get("name", "scenario")), error) from None
        case str() | FilePath():
            path = FilePath(scenario)
            if path.parent == FilePath() and not path.suffix and not path.exists():
                path = presets.path("scenarios", str(scenario)) if str(scenario) in presets.names("scenarios") else path
            return loads(read_text(path), name=str(path), folder=path.parent)
        case _:
            raise ScenarioError(f"{shown(scenario)} is no scenario: write the name of a file, a mapping or a Scenario")


def loads(text: str, *, name: str = "<text>", folder: FilePath = FilePath()) -> Scenario:
    """Read a scenario from text.

    Args:
        text: YAML.
        name: Of the file, for messages; its stem names the scenario unless the text does.
        folder: Files that the text names are relative to it.

    Raises:
        ScenarioError: It is wrong; a line for every problem, each beginning with `name` and the line's number.
    """
    document = strict_yaml.parse(text)
    root = document.root
    if isinstance(root, dict) and "scenario" in root and not root.keys() & {"cluster", "workload", "schedules"}:
        raise ScenarioError(f"{name}: is a sweep, and no scenario: simdist sweep {name} -o DIR")
    stem = FilePath(name).stem.strip("<>")
    return validated(Scenario, document, name=name, folder=folder, shape=_SHAPE, defaults={"name": stem})


def dump(scenario: Scenario) -> str:
    """Write YAML that loads to an equal scenario without any other file, recordings excepted.

    It has what the user wrote, so that remarks are the same. What a preset or a file states is its `base`.
    """
    in_file: Any = strict_yaml.with_numbers_as_keys(scenario.model_dump(mode="json"))
    from simdist.scenario.fields import BASED

    kept = [key for key in BASED if getattr(scenario, key) is not None]
    parts = {key: presets.with_base(getattr(scenario, key), in_file[key]) for key in kept}
    return strict_yaml.dump({"name": scenario.name} | stated(scenario, in_file) | parts)
