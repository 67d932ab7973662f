"""A candidate: a schedule with its settings, and how far it is from another."""

from collections.abc import Sequence
from dataclasses import dataclass

from simdist.schedules import Schedule, kinds
from simdist.tune.ladders import Levels

Value = str | int | float | bool | None
"""What a setting may be."""

Options = tuple[tuple[str, Value], ...]
"""Settings that are not the default: attribute and value."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting of a schedule, and what it may be.

    Args:
        name: The attribute of the schedule.
        values: In order: neighbours are alike.
        default: What a candidate has that does not say.
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
        options: Settings that are not the default, attribute and value.
    """

    kind: str
    levels: Levels = ()
    options: Options = ()

    def settings(self) -> dict[str, object]:
        """Return the schedule's attributes."""
        settings: dict[str, object] = {"kind": self.kind}
        if self.kind == "local_sgd":
            settings["period"] = self.levels[-1][0]
        elif self.levels:
            settings |= {"levels": dict(self.levels), "intra_node_gradients": False}
        return settings | dict(self.options)


def schedule_of(candidate: Candidate) -> Schedule:
    """Return a candidate's schedule, under a label that tells it from all others.

    >>> schedule_of(Candidate("hierarchical_sgd", ((2, 4), (8, 64)))).name
    'hsgd-2-4,8-64'
    >>> schedule_of(Candidate("sync", options=(("bucket_nbytes", None),))).name
    'sync-one-bucket'
    """
    schedule = kinds()[candidate.kind].model_validate(candidate.settings())
    own, of_input = schedule.default_label(), schedule.name
    told = "".join(_label_of(name, value) for name, value in candidate.options)
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
        case _:
            return ""


def n_changes(one: Candidate, other: Candidate) -> int:
    """Count the changes from one to the other: a level added, removed or replaced, a setting, the family.

    Local SGD is hierarchical SGD with one level, so they are of one family.

    >>> n_changes(Candidate("local_sgd", ((8, 64),)), Candidate("hierarchical_sgd", ((2, 8), (8, 64))))
    1
    """
    levels, others = set(one.levels), set(other.levels)
    options = {name for name, _ in set(one.options) ^ set(other.options)}
    family = family_of(one) != family_of(other)
    return max(len(levels - others), len(others - levels)) + len(options) + family


def family_of(candidate: Candidate) -> str:
    """Return the kind, or `averaging` of all that average parameters."""
    return "averaging" if candidate.levels else candidate.kind


def unlike(labels: Sequence[str], label: str) -> str:
    """Return the label, changed if one of `labels` is the same.

    >>> unlike(["sync"], "sync")
    'sync-tuned'
    """
    while label in labels:
        label += "-tuned"
    return label
