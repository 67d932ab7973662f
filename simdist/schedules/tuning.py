"""What a schedule declares to a search: what may vary about it, and what a user must allow first."""

from dataclasses import dataclass
from typing import TypeAlias

#: Value of a setting.
Value: TypeAlias = str | int | float | bool | None

#: Settings by attribute that are not the default.
ChangedSettings: TypeAlias = tuple[tuple[str, Value], ...]

#: Pairs of a period in steps and the ranks of a group, both growing.
Levels: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Permit:
    """What a user must allow before a search tries something, because of what it costs.

    Args:
        word: As of `--allow`.
        cost: What it changes or needs: the end of a sentence that begins with "it".
        even_if_named: The user must allow it even if `--only` names the schedule.
    """

    word: str
    cost: str
    even_if_named: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting, and the values that a search tries.

    Args:
        name: The attribute, of the schedule or of another part of the scenario.
        values: In order: neighbours are alike.
        default: Value of a candidate that does not say.
        permit: What must be allowed first.
    """

    name: str
    values: tuple[Value, ...]
    default: Value = None
    permit: Permit | None = None


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the user of a search allows.

    Args:
        words: Of permits.
        min_density: Least share of a gradient that may be sent; None: all of it is sent.
    """

    words: frozenset[str] = frozenset()
    min_density: float | None = None

    def permits(self, permit: Permit | None) -> bool:
        """Tell whether something may be tried."""
        return permit is None or permit.word in self.words


FP16 = Permit("fp16", "it sends gradients in half precision")
SHARED_UPDATES = Permit("shared-updates", "it gives each rank a slice of the update and of the optimizer's state")
OVERLAP = Permit("overlap", "it takes averages some steps late")
UNEVEN = Permit("uneven", "it lets slow devices do fewer steps")
OUTER_OPTIMIZER = Permit("diloco", "it needs an outer optimizer, on which depends what is learnt")
SERVERS = Permit("servers", "it needs parameter servers")
DROPPED_GRADIENTS = Permit("backup", "it drops gradients, which changes what is learnt", even_if_named=True)
