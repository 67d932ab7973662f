"""Which unit each gather and each reduce-scatter of a sharded model belongs to, by names or by the order of sizes.

Newer profilers name units. Without names, units are told by the sizes of what is sent and by their order: forward
passes gather them in order, backward passes gather and reduce them in reverse order, with few exceptions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sent:
    """What a gather or a reduce-scatter sends.

    Args:
        unit: Name of the unit, empty for the root; None if the trace does not name it.
        count: Elements of the whole unit, with padding.
    """

    unit: str | None
    count: int

    def may_be(self, other: "Sent") -> bool:
        """Tell whether both may be the same unit."""
        return self.count == other.count and (None in (self.unit, other.unit) or self.unit == other.unit)


def find_root(units: Sequence[Sent]) -> int | None:
    """Return the unit that the traces name as the root; None without names or without a root."""
    names = [each.unit for each in units]
    return names.index("") if "" in names else None


def gathered_again(units: Sequence[Sent], gathers: Sequence[Sent], n_reduced_after: int) -> tuple[int, ...] | None:
    """Return the units that a backward pass gathers, in order; None if they cannot be units of the model.

    If several units have one size and no name, the same gathers may skip the first or the last of them. The unit before
    one that is gathered next is reduced after it.

    Args:
        units: In the order of the forward pass.
        gathers: Of the backward pass, in the order in which they were issued.
        n_reduced_after: Reduce-scatters after the last of these gathers.
    """
    found = [order for order in _orders(len(units), find_root(units)) if _fits(units, gathers, order)]
    if not found:
        return _in_order(units, gathers)
    return min(found, key=lambda order: abs(min(order, default=0) + 2 - n_reduced_after))


def reduced(units: Sequence[Sent], reductions: Sequence[Sent]) -> tuple[int, ...] | None:
    """Return the units that a backward pass reduces, in order; None if they cannot be units of the model.

    The root, and then a first unit with raw input, come last. Units whose parameters are all frozen are missing.
    """
    n_units = len(units)
    backward = tuple(reversed(range(n_units)))
    orders = [backward]
    if n_units > 1:
        orders.append((*backward[:-2], 0, 1))  # the root is gathered first
    orders += [(*order[:skipped], *order[skipped + 1 :]) for order in tuple(orders) for skipped in range(n_units)]
    return next((order for order in orders if _fits(units, reductions, order)), _in_order(units, reductions))


def _orders(n_units: int, root: int | None) -> Iterator[tuple[int, ...]]:
    """Yield the units that a backward pass may gather, in order, the most usual first."""
    backward = tuple(reversed(range(n_units)))
    if root is not None:
        rest = tuple(number for number in backward if number != root)
        yield from (rest, (root, *rest), rest[1:], (root, *rest[1:]))
    else:
        yield from (backward, backward[:-1], backward[1:], backward[1:-1], (0, *backward[:-1]))
    yield ()


def _fits(units: Sequence[Sent], sent: Sequence[Sent], order: Sequence[int]) -> bool:
    return len(sent) == len(order) and all(each.may_be(units[number]) for each, number in zip(sent, order, strict=True))


def _in_order(units: Sequence[Sent], sent: Sequence[Sent]) -> tuple[int, ...] | None:
    """Return one unit for each, the nearest to the first unit that is left; None if there is none."""
    left = list(range(len(units)))
    found: list[int] = []
    for each in reversed(sent):
        fitting = [number for number in left if each.may_be(units[number])]
        if not fitting:
            return None
        found.append(fitting[0])
        left.remove(fitting[0])
    return tuple(reversed(found))
