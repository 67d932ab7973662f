"""Declarations of a schedule for a search: the settings that may vary, and the permits that a user must give."""

from dataclasses import dataclass
from typing import TypeAlias

#: Value of a setting.
TunedValue: TypeAlias = str | int | float | bool | None

#: Settings by attribute that are not the default.
ChangedSettings: TypeAlias = tuple[tuple[str, TunedValue], ...]

#: Pairs of a period in steps and the ranks of a group, both growing.
Levels: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Permit:
    """A permit that a user must give before a search tries something costly.

    Args:
        word: The word for `--allow`.
        cost: The change or requirement: a clause that begins with "it".
        even_if_named: The user must allow it even if `--only` names the schedule.
    """

    word: str
    cost: str
    even_if_named: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting and the values that a search tries.

    Args:
        name: Attribute of the schedule, or of another part of the scenario.
        values: Values in an order that keeps similar ones adjacent.
        default: Value of a candidate that does not set it.
        permit: The permit that is needed, if any.
    """

    name: str
    values: tuple[TunedValue, ...]
    default: TunedValue = None
    permit: Permit | None = None


@dataclass(frozen=True, slots=True)
class Allowance:
    """Permissions that the user gives to a search.

    Args:
        words: Words of the permits.
        min_density: Smallest share of a gradient that a schedule may send. None requires whole gradients.
    """

    words: frozenset[str] = frozenset()
    min_density: float | None = None

    def permits(self, permit: Permit | None) -> bool:
        """Tell whether the user has given a permit, or none is needed."""
        return permit is None or permit.word in self.words


FP16 = Permit("fp16", "it sends gradients in half precision")
SHARED_UPDATES = Permit("shared-updates", "it gives each rank a slice of the update and of the optimizer's state")
SHARDING = Permit("sharding", "it shards the model, for which the training script has to call fully_shard")
OVERLAP = Permit("overlap", "it takes averages some steps late")
UNEVEN = Permit("uneven", "it lets slow devices do fewer steps")
OUTER_OPTIMIZER = Permit("diloco", "it needs an outer optimizer, on which depends what is learnt")
PAIRS = Permit("gossip", "it averages pairs of ranks, whose parameters differ from those of others")
SERVERS = Permit("servers", "it needs parameter servers")
DROPPED_GRADIENTS = Permit("backup", "it drops gradients, which changes what is learnt", even_if_named=True)
