"""Candidates: schedules with their settings, the settings that may vary, and the distance between two candidates."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from simdist.errors import ScenarioError
from simdist.scenario import Scenario
from simdist.scenario.checkpoint import Mode
from simdist.schedules import KINDS, Schedule
from simdist.schedules.job import POLICIES, POLICIES_OF_WORKERS, Job
from simdist.schedules.tuning import Allowance, Axis, ChangedSettings, Levels, Permit, TunedValue
from simdist.settings.base import Settings, nearest, shown, unchecked_copy
from simdist.settings.plugins import is_reference, kind_of

_PASSES = "micro_batches"  # a setting of the workload
_CHECKPOINT = "checkpoint_"  # prefix of the settings of the scenario's checkpoint
_PREFETCH = (1, 2, 4, 8)
_TIMES_READERS = (1, 2, 4)
_OF_SCRIPT = ("param_dtype", "reduce_dtype")  # stated once, they hold for all candidates
_INPUT = "input."  # prefix of the settings of a schedule's input
_SOME_LEVELS: tuple[Levels, ...] = ((), ((2, 2),))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that may be the fastest.

    Args:
        kind: Name in scenarios.
        levels: Periods and group sizes, if the schedule averages parameters.
        changed: Settings that are not the default, attribute and value.
        own: Settings of the scenario's own schedule that all candidates of the kind have.
    """

    kind: str
    levels: Levels = ()
    changed: ChangedSettings = ()
    own: tuple[tuple[str, object], ...] = field(default=(), compare=False)

    @property
    def global_every(self) -> int:
        """Steps from one exchange of all ranks to the next; 1 if all ranks exchange in every step."""
        return self.levels[-1][0] if self.levels else 1

    def in_scenario(self, scenario: Scenario) -> Scenario:
        """Return the scenario with the candidate's micro-batches per step and checkpoints."""
        workload = {name: value for name, value in self.changed if name == _PASSES}
        checkpoint = {
            name.removeprefix(_CHECKPOINT): value for name, value in self.changed if name.startswith(_CHECKPOINT)
        }
        parts: dict[str, Settings] = {"workload": scenario.workload.model_copy(update=workload)}
        if scenario.checkpoint and checkpoint:
            parts["checkpoint"] = scenario.checkpoint.model_copy(update=checkpoint)
        return unchecked_copy(scenario, **parts)

    @property
    def own_changed(self) -> ChangedSettings:
        """Changed settings of the schedule itself."""
        return tuple(
            (name, value)
            for name, value in self.changed
            if name != _PASSES and not name.startswith((_CHECKPOINT, _INPUT))
        )

    def settings(self) -> dict[str, object] | None:
        """Return the schedule's attributes; None if another kind does the same."""
        cls = class_of(self.kind)
        settings = cls.settings_of(self.levels, self.own_changed)
        if settings is None:
            return None
        of_input = {name.removeprefix(_INPUT): value for name, value in self.changed if name.startswith(_INPUT)}
        nested = {"input": of_input} if of_input else {}
        return {"kind": kind_of(cls)} | dict(self.own) | settings | nested


@lru_cache(maxsize=256)
def class_of(kind: str) -> type[Schedule]:
    """Return the class of a kind, or of a name such as `module:Class`.

    Raises:
        ScenarioError: There is none.
    """
    try:
        found = KINDS.find(kind)
    except ValueError as error:
        raise ScenarioError(str(error)) from None
    if found is None:
        raise ScenarioError(f"unknown kind {shown(kind)}: {nearest(kind, KINDS.names())}")
    return found


def schedule_of(candidate: Candidate) -> Schedule:
    """Return a candidate's schedule, with a label that is unique among all candidates.

    >>> schedule_of(Candidate("hierarchical_sgd", ((2, 4), (8, 64)))).name
    'hsgd-2-4,8-64'
    >>> schedule_of(Candidate("sync", changed=(("bucket_nbytes", None),))).name
    'sync-one-bucket'
    """
    schedule = class_of(candidate.kind).model_validate(candidate.settings())
    own = schedule.default_label()
    of_input = schedule.name
    told = "".join(_label_of(schedule, name, value) for name, value in candidate.changed)
    return unchecked_copy(schedule, label=own + told + of_input.removeprefix(own)) if told else schedule


def _label_of(schedule: Schedule, name: str, value: TunedValue) -> str:
    """Return the label's part for a setting that default labels do not show."""
    if name == _PASSES:
        return f"-mb{value}"
    if name == f"{_CHECKPOINT}every":
        return f"-saves-every-{value}"
    if name == f"{_CHECKPOINT}mode":
        return f"-saves-{value}"
    if name.startswith(_INPUT):  # labels show it
        return ""
    if found := schedule.label_of(name, value):
        return found
    field = type(schedule).model_fields[name]
    if field.is_required():
        is_told = str(value) in schedule.name
    else:
        is_told = unchecked_copy(schedule, **{name: field.get_default()}).name != schedule.name
    return "" if is_told else f"-{name}-{value}"


def n_changes(one: Candidate, other: Candidate) -> int:
    """Count the changes from one candidate to the other: a level added, removed or replaced, a setting, the family.

    Local SGD is hierarchical SGD with one level, so both belong to one family.

    >>> n_changes(Candidate("local_sgd", ((8, 64),)), Candidate("hierarchical_sgd", ((2, 8), (8, 64))))
    1
    """
    levels = set(one.levels)
    others = set(other.levels)
    changed = {name for name, _ in set(one.changed) ^ set(other.changed)}
    family = family_of(one) != family_of(other)
    return max(len(levels - others), len(others - levels)) + len(changed) + family


def family_of(candidate: Candidate) -> str:
    """Return the family that the schedule declares, or else its kind."""
    return class_of(candidate.kind).family or candidate.kind


@dataclass(frozen=True, slots=True)
class Extras:
    """The schedules that may be tried.

    Args:
        only: Kinds to try; if empty, all that are allowed.
        min_density: Smallest share of a gradient that may be sent. None: whole gradients, so no sparse schedules.
        allow: Words of the permits that the user gives; see `permits`.
        micro_batches: Numbers of micro-batches per step to try. None: the scenario's own number.
        checkpoint_every: Steps between checkpoints to try; if empty, the scenario's own.
        checkpoint_mode: Modes of checkpoints to try; if empty, the scenario's own.
    """

    only: tuple[str, ...] = ()
    min_density: float | None = None
    allow: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    checkpoint_every: tuple[int, ...] = ()
    checkpoint_mode: tuple[Mode, ...] = ()

    @property
    def allowance(self) -> Allowance:
        """The permissions for schedules."""
        return Allowance(frozenset(self.allow), self.min_density)

    def kinds(self, scenario: Scenario | None = None) -> tuple[str, ...]:
        """Return the kinds that may be tried.

        Args:
            scenario: Its schedules of users' own classes are also tried.

        Raises:
            ScenarioError: A kind is unknown. Or a sparse kind is named without `min_density`, or a kind without its
                permit.
        """
        named = [each.kind_in_files() for each in scenario.schedules] if scenario else []
        own = [kind for kind in dict.fromkeys((*self.only, *named)) if is_reference(kind)]
        known = tried_kinds(own)
        words = permits(known)
        if unknown := [word for word in self.allow if word not in words]:
            raise ScenarioError(f"--allow {shown(unknown[0])}: unknown; {nearest(unknown[0], words)}")
        if unknown := [kind for kind in self.only if kind not in known]:
            raise ScenarioError(f"--only {shown(unknown[0])}: unknown kind; {nearest(unknown[0], known)}")
        for kind in self.only:
            self._check_named(kind)
        return self.only or tuple(kind for kind in known if self._takes(class_of(kind)))

    def _check_named(self, kind: str) -> None:
        cls = class_of(kind)
        if cls.sends_part and self.min_density is None:
            raise ScenarioError(
                f"--only {kind}: it sends a part of the gradient, which changes what is learnt; say how small a "
                f"part it may be, e.g. --min-density 0.001"
            )
        permit = cls.permit
        if permit and permit.even_if_named and not self.allowance.permits(permit):
            raise ScenarioError(f"--only {kind}: {permit.cost}; if it may, --allow {permit.word}")

    def _takes(self, cls: type[Schedule]) -> bool:
        is_sparse_enough = self.min_density is not None or not cls.sends_part
        return is_sparse_enough and self.allowance.permits(cls.permit)


def tried_kinds(own: Iterable[str] = ()) -> tuple[str, ...]:
    """Return all kinds that may be tried, in the order of their declared places.

    Args:
        own: Names such as `module:Class` of users' classes that no installed package declares.

    Raises:
        ScenarioError: An installed package declares an invalid schedule.
    """
    try:
        installed = KINDS.installed()
    except ValueError as error:
        raise ScenarioError(str(error)) from None
    return tuple(sorted((*installed, *own), key=lambda kind: (class_of(kind).place, kind)))


def permits(known: Collection[str]) -> dict[str, Permit]:
    """Return the permits of the kinds, by the words of `--allow`."""
    asked = (each for kind in known for each in (class_of(kind).permit, *class_of(kind).permits) if each)
    return {permit.word: permit for permit in asked}


def own_choices(kind: str, scenario: Scenario, described: Job, extras: Extras) -> tuple[Axis, ...]:
    """Return the axes that may vary in schedules of a kind: those that it declares, as far as permitted.

    They also take the values of the scenario's own schedules of the kind.

    Raises:
        ScenarioError: `only` names the kind, and a required field has no known value.
    """
    cls = class_of(kind)
    allowed = extras.allowance
    axes = [each for each in cls.axes(described, allowed) if allowed.permits(each.permit)]
    axes += [cls.axis(name, ()) for name in _not_varied(cls, axes, scenario.cluster.world_size)]
    stated = dict(own_settings(kind, scenario, _OF_SCRIPT))
    found = [_with_written(each, cls, scenario) for each in axes if each.name not in stated]
    missing = next((each.name for each in found if not each.values), None)
    if missing and kind in extras.only:
        raise ScenarioError(
            f"--only {kind}: no value of {missing} is known, which must be written: write a schedule of this kind in "
            f"{scenario.name}, or an axis of {missing} in {cls.__name__}.axes"
        )
    return tuple(found)


def own_settings(kind: str, scenario: Scenario, names: Collection[str]) -> tuple[tuple[str, object], ...]:
    """Return the settings of the scenario's own schedule that are not the default, among some names.

    The own schedule is the first one of the kind. If the kind shards the model, it is the first one that does.
    """
    cls = class_of(kind)
    own = next((each for each in scenario.schedules if type(each) is cls or (cls.shards and each.shards)), None)
    written = dict(own) if own else {}
    fields = cls.model_fields
    return tuple((name, written[name]) for name in names if name in written and written[name] != fields[name].default)


def settings_not_varied(kind: str, axes: Sequence[Axis]) -> list[str]:
    """Return the settings of a kind that no search varies."""
    cls = class_of(kind)
    varied = {"kind", "label", "input", *(each.name for each in axes), *_given_by_levels(cls, world_size=2)}
    return [name for name in cls.model_fields if name not in varied]


def _with_written(axis: Axis, cls: type[Schedule], scenario: Scenario) -> Axis:
    """Return an axis with the values of the scenario's own schedules, too, unless they are the default."""
    default = cls.model_fields[axis.name].default
    written = (dict(each)[axis.name] for each in scenario.schedules if type(each) is cls)
    values = (value for value in written if _is_value(value) and value != default)
    return replace(axis, values=tuple(dict.fromkeys((*axis.values, *values))))


def _not_varied(cls: type[Schedule], axes: Sequence[Axis], world_size: int) -> list[str]:
    """Return the required fields that get no value from axes or levels."""
    given = {each.name for each in axes} | _given_by_levels(cls, world_size)
    return [name for name, field in cls.model_fields.items() if field.is_required() and name not in given]


def _given_by_levels(cls: type[Schedule], world_size: int) -> set[str]:
    """Return the fields that get their values from levels."""
    given: set[str] = set()
    for levels in _SOME_LEVELS if cls.takes_levels else ():
        given |= (cls.settings_of((*levels, (4, world_size)), ()) or {}).keys()
    return given


def _is_value(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def pass_choices(scenario: Scenario, extras: Extras) -> tuple[Axis, ...]:
    """Return the axis of micro-batches per step, if it may vary."""
    values = tuple(sorted({*extras.micro_batches}))
    return (Axis(_PASSES, values, scenario.workload.micro_batches),) if values else ()


def checkpoint_choices(scenario: Scenario, extras: Extras) -> tuple[Axis, ...]:
    """Return the axes of the checkpoint's period and mode, if they may vary.

    Raises:
        ScenarioError: The scenario has no checkpoint.
    """
    wanted: dict[str, tuple[TunedValue, ...]] = {
        "every": tuple(sorted({*extras.checkpoint_every})),
        "mode": tuple(dict.fromkeys(extras.checkpoint_mode)),
    }
    varied = {name: values for name, values in wanted.items() if values}
    if varied and scenario.checkpoint is None:
        option = f"--checkpoint-{next(iter(varied))}"
        hint = f"write checkpoint: {{every: 100, what: parameters}} in {scenario.name}"
        raise ScenarioError(f"{option}: the scenario writes no checkpoints; {hint}")
    own = scenario.checkpoint.model_dump() if scenario.checkpoint else {}
    return tuple(Axis(_CHECKPOINT + name, values, own[name]) for name, values in varied.items())


def input_choices(scenario: Scenario) -> tuple[Axis, ...]:
    """Return the axes of reading batches, if they are read from storage."""
    path = scenario.input
    if path.source != "storage":
        return ()
    if path.num_workers is not None:
        return (Axis("input.policy", POLICIES_OF_WORKERS, path.data.policy),) if path.data else ()
    prefetch = Axis("input.prefetch", tuple(sorted({*_PREFETCH, path.prefetch})), path.prefetch)
    if path.data is None:
        return (prefetch,)
    readers = Axis("input.readers", tuple(times * path.readers for times in _TIMES_READERS), path.readers)
    return (prefetch, Axis("input.policy", POLICIES, path.data.policy), readers)
