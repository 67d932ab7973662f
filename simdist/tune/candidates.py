"""Candidates: schedules with settings of theirs, what may be varied about them, and how far they are from another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from simdist.errors import ScenarioError
from simdist.plan.plan import ITEM_NBYTES
from simdist.scenario import Scenario
from simdist.scenario.checkpoint import Mode
from simdist.schedules import Schedule, kinds
from simdist.schedules.job import POLICIES
from simdist.schedules.powersgd import PowerSGD
from simdist.settings.base import Settings
from simdist.studies.proposals import Levels

#: Value of a setting.
Value: TypeAlias = str | int | float | bool | None

#: Settings that are not the default: attribute and value.
ChangedSettings: TypeAlias = tuple[tuple[str, Value], ...]

#: Kinds that average parameters.
AVERAGING = ("local_sgd", "hierarchical_sgd", "diloco")
_OUTER = "diloco"  # what is learnt depends on another optimizer
_DENSE = ("sync", "torus")
_SERVERS = ("parameter_server",)
_SPARSE = ("hitopk", "gtopk", "naive_ag", "powersgd")  # which send a part of the gradient, entries or factors
_DROPPING = ("backup_workers",)
#: Kinds that are tuned.
KINDS = (*_DENSE, *AVERAGING, *_SERVERS, *_DROPPING, *_SPARSE)

_PASSES = "micro_batches"  # a setting of the workload
_CHECKPOINT = "checkpoint_"  # settings of the scenario's checkpoint begin with it
_MIB = 1024**2
_BUCKETS: tuple[Value, ...] = (_MIB, 4 * _MIB, 10 * _MIB, 25 * _MIB, 50 * _MIB, 100 * _MIB, None)
_SPARSE_BUCKETS: tuple[Value, ...] = (25 * _MIB, None)
_RANKS = (1, 2, 4, 8, 16, 32)
_DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
_PREFETCH = (1, 2, 4, 8)
_OVERLAPS: tuple[Value, ...] = (0, 1, 2, 4)
_FRAGMENTS: tuple[int, ...] = (1, 2, 4)
_TIMES_READERS = (1, 2, 4)
_BACKUP_PARTS = (8, 16, 32, 64)  # one rank in so many is dropped


@dataclass(frozen=True, slots=True)
class Choices:
    """A setting of a schedule, and what it may be.

    Args:
        name: The attribute of the schedule.
        values: In order: neighbours are alike.
        default: Value of a candidate that does not say.
    """

    name: str
    values: tuple[Value, ...]
    default: Value = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that may be the fastest.

    Args:
        kind: As scenarios call it.
        levels: Of schedules that average parameters: how often over how many ranks.
        changed: Settings that are not the default, attribute and value.
    """

    kind: str
    levels: Levels = ()
    changed: ChangedSettings = ()

    @property
    def global_every(self) -> int:
        """Steps from one exchange of all ranks to the next; 1 if all exchange in every step."""
        return self.levels[-1][0] if self.levels else 1

    def in_scenario(self, scenario: Scenario) -> Scenario:
        """Return the scenario, with as many micro-batches a step as the candidate says, and its checkpoints."""
        workload = {name: value for name, value in self.changed if name == _PASSES}
        checkpoint = {
            name.removeprefix(_CHECKPOINT): value for name, value in self.changed if name.startswith(_CHECKPOINT)
        }
        parts: dict[str, Settings] = {"workload": scenario.workload.model_copy(update=workload)}
        if scenario.checkpoint and checkpoint:
            parts["checkpoint"] = scenario.checkpoint.model_copy(update=checkpoint)
        return scenario.model_copy(update=parts)

    def settings(self) -> dict[str, object]:
        """Return the schedule's attributes."""
        settings: dict[str, object] = {"kind": self.kind}
        if self.kind in ("local_sgd", _OUTER):
            settings["period"] = self.levels[-1][0]
        elif self.levels:
            settings |= {"levels": dict(self.levels), "intra_node_gradients": False}
        own = {name: value for name, value in self.changed if name != _PASSES and not name.startswith(_CHECKPOINT)}
        return settings | own


def schedule_of(candidate: Candidate) -> Schedule:
    """Return a candidate's schedule, under a label that tells it from all others.

    >>> schedule_of(Candidate("hierarchical_sgd", ((2, 4), (8, 64)))).name
    'hsgd-2-4,8-64'
    >>> schedule_of(Candidate("sync", changed=(("bucket_nbytes", None),))).name
    'sync-one-bucket'
    """
    schedule = kinds()[candidate.kind].model_validate(candidate.settings())
    own = schedule.default_label()
    of_input = schedule.name
    told = "".join(_label_of(name, value) for name, value in candidate.changed)
    return schedule.model_copy(update={"label": own + told + of_input.removeprefix(own)}) if told else schedule


def _label_of(name: str, value: Value) -> str:
    """Return what the label says of a setting that default labels do not tell."""
    match name, value:
        case "intra_node_gradients", _:
            return "-intra"
        case "bucket_nbytes", int():
            return f"-{value // 1024**2}MiB"
        case "bucket_nbytes", _:
            return "-one-bucket"
        case "micro_batches", _:
            return f"-mb{value}"
        case "checkpoint_every", _:
            return f"-saves-every-{value}"
        case "checkpoint_mode", _:
            return f"-saves-{value}"
        case _:
            return ""


def n_changes(one: Candidate, other: Candidate) -> int:
    """Count the changes from one to the other: a level added, removed or replaced, a setting, the family.

    Local SGD is hierarchical SGD with one level, so they are of one family.

    >>> n_changes(Candidate("local_sgd", ((8, 64),)), Candidate("hierarchical_sgd", ((2, 8), (8, 64))))
    1
    """
    levels = set(one.levels)
    others = set(other.levels)
    changed = {name for name, _ in set(one.changed) ^ set(other.changed)}
    family = family_of(one) != family_of(other)
    return max(len(levels - others), len(others - levels)) + len(changed) + family


def family_of(candidate: Candidate) -> str:
    """Return the kind, or `averaging` of all that average parameters without an outer optimizer."""
    return "averaging" if candidate.levels and candidate.kind != _OUTER else candidate.kind


#: What a search tries only if it may.
Allowed: TypeAlias = Literal["fp16", "servers", "shared-updates", "overlap", "diloco", "backup", "uneven"]


@dataclass(frozen=True, slots=True)
class Extras:
    """Which schedules may be tried.

    Args:
        only: Kinds, of `KINDS`; all that are allowed if empty.
        min_density: Least share of a gradient that may be sent; None: all of it is, so no schedule is sparse.
        allow: Gradients in half precision; parameter servers; ranks that share updates; averages that come some steps
            late; an outer optimizer; updates that drop late gradients; slow devices that do fewer steps.
        micro_batches: Numbers of micro-batches of a step; if any, times are compared per micro-batch. None: the
            scenario's own.
        checkpoint_every: Steps between checkpoints to try; the scenario's own if empty.
        checkpoint_mode: Modes of checkpoints to try; the scenario's own if empty.
    """

    only: tuple[str, ...] = ()
    min_density: float | None = None
    allow: tuple[Allowed, ...] = ()
    micro_batches: tuple[int, ...] = ()
    checkpoint_every: tuple[int, ...] = ()
    checkpoint_mode: tuple[Mode, ...] = ()

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that may be tried.

        Raises:
            ScenarioError: A sparse kind is asked for, but not how sparse it may be; or one that drops gradients, which
                is not allowed.
        """
        sparse = [kind for kind in self.only if kind in _SPARSE]
        if sparse and self.min_density is None:
            raise ScenarioError(
                f"--only {sparse[0]}: it sends a part of the gradient, which changes what is learnt; say how small a "
                f"part it may be, e.g. --min-density 0.001"
            )
        if "backup" not in self.allow and {*self.only} & {*_DROPPING}:
            raise ScenarioError(
                "--only backup_workers: it drops gradients, which changes what is learnt; if it may, --allow backup"
            )
        if self.only:
            return self.only
        kinds = [*_DENSE, *(kind for kind in AVERAGING if kind != _OUTER or "diloco" in self.allow)]
        if "servers" in self.allow:
            kinds += _SERVERS
        if "backup" in self.allow:
            kinds += _DROPPING
        if self.min_density is not None:
            kinds += _SPARSE
        return tuple(kinds)


def own_choices(kind: str, scenario: Scenario, extras: Extras) -> tuple[Choices, ...]:
    """Return what may be varied about how the schedules of a kind synchronise: of these settings, those that it has."""
    workload = scenario.workload
    cluster = scenario.cluster
    fields = kinds()[kind].model_fields
    whole_nbytes = sum(workload.tensor_counts) * ITEM_NBYTES[workload.dtype]
    buckets = _SPARSE_BUCKETS if kind in _SPARSE else _BUCKETS
    values: dict[str, Sequence[Value]] = {
        "bucket_nbytes": [each for each in buckets if not isinstance(each, int) or each < whole_nbytes]
    }
    if "fp16" in extras.allow and workload.dtype == "float32":
        values["compression"] = ("none", "fp16")
    values["servers"] = sorted({1, cluster.nodes, cluster.world_size})
    if kind in _DROPPING:
        values["servers"] = ("node", *(each for each in values["servers"] if each != cluster.nodes))
        values["algorithm"] = ("auto", "ring")
    values |= {"overlap_steps": _OVERLAPS} if "overlap" in extras.allow else {}
    values["fragments"] = [each for each in _FRAGMENTS if each <= len(workload.tensor_counts)]
    values["backup"] = sorted({max(1, cluster.world_size // part) for part in _BACKUP_PARTS})
    if "uneven" in extras.allow and cluster.slow_devices and "overlap" not in extras.allow:  # not both together
        values["inner_steps"] = (None, "by_speed")
    if extras.min_density is not None:
        least = extras.min_density
        values["density"] = (least, *(density for density in _DENSITIES if density > least))
        tensors = workload.tensor_counts, workload.tensor_rows
        values["rank"] = [rank for rank in _RANKS if PowerSGD(rank=rank).sent_share(*tensors) >= least] or _RANKS[-1:]
    if "shared-updates" in extras.allow and workload.optimizer != "lars" and kind not in _SERVERS:
        values["shared_update"] = (False, True)
    found = [Choices(name, tuple(values[name]), fields[name].default) for name in values if name in fields]
    if "intra_node_gradients" in fields:
        has_levels = 1 < cluster.gpus_per_node < cluster.world_size
        found.append(Choices("intra_node_gradients", (False, True) if has_levels else (False,), False))
    return tuple(found)


def pass_choices(scenario: Scenario, extras: Extras) -> tuple[Choices, ...]:
    """Return how many micro-batches a step may have, if that may be varied."""
    values = tuple(sorted({*extras.micro_batches}))
    return (Choices(_PASSES, values, scenario.workload.micro_batches),) if values else ()


def checkpoint_choices(scenario: Scenario, extras: Extras) -> tuple[Choices, ...]:
    """Return how often checkpoints are written, and how, if that may be varied.

    Raises:
        ScenarioError: The scenario has none.
    """
    wanted: dict[str, tuple[Value, ...]] = {
        "every": tuple(sorted({*extras.checkpoint_every})),
        "mode": tuple(dict.fromkeys(extras.checkpoint_mode)),
    }
    varied = {name: values for name, values in wanted.items() if values}
    if varied and scenario.checkpoint is None:
        option = f"--checkpoint-{next(iter(varied))}"
        hint = f"write checkpoint: {{every: 100, what: parameters}} in {scenario.name}"
        raise ScenarioError(f"{option}: the scenario writes no checkpoints; {hint}")
    own = scenario.checkpoint.model_dump() if scenario.checkpoint else {}
    return tuple(Choices(_CHECKPOINT + name, values, own[name]) for name, values in varied.items())


def input_choices(scenario: Scenario) -> tuple[Choices, ...]:
    """Return what may be varied about how batches are read, if they are read from storage."""
    path = scenario.input
    if path.source != "storage":
        return ()
    prefetch = Choices("prefetch", tuple(sorted({*_PREFETCH, path.prefetch})), path.prefetch)
    if scenario.data is None:
        return (prefetch,)
    readers = Choices("readers", tuple(times * path.readers for times in _TIMES_READERS), path.readers)
    return (prefetch, Choices("data", POLICIES, scenario.data.policy), readers)
