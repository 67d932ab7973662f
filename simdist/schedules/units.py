"""Units of a sharded model: the ranges of tensors that are gathered and reduced together.

A unit is what one call of PyTorch's `fully_shard` wraps, such as a layer of a transformer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")  # up to the first component that is a number


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """A range of tensors that are gathered and reduced together.

    Args:
        first: Its first tensor, in forward order.
        last: The tensor after its last one.
        is_block: It is one of the model's repeated blocks. If not, it stands before, between or after them.
    """

    first: int
    last: int
    is_block: bool = True

    @property
    def tensors(self) -> tuple[int, int]:
        """The half-open range of its tensors."""
        return self.first, self.last


def units_of_names(names: Sequence[str]) -> tuple[ModelUnit, ...]:
    """Return the units of a model, one for each numbered block, and one for what stands between blocks.

    A block is named by the components of a tensor's name up to the first number. Without, the model is one unit.

    >>> [unit.tensors for unit in units_of_names(["embedding.weight", "h.0.w", "h.0.b", "h.1.w", "h.1.b", "head.w"])]
    [(0, 1), (1, 3), (3, 5), (5, 6)]
    >>> units_of_names(["weight", "bias"])
    (ModelUnit(first=0, last=2, is_block=False),)
    """
    units: list[ModelUnit] = []
    for block, some in groupby(enumerate(names), key=lambda each: _block(each[1])):
        tensors = [tensor for tensor, _ in some]
        units.append(ModelUnit(tensors[0], tensors[-1] + 1, is_block=block is not None))
    return tuple(units)


def units_of_sizes(n_tensors: Sequence[int]) -> tuple[ModelUnit, ...]:
    """Return units of so many tensors each, in forward order."""
    units = []
    first = 0
    for size in n_tensors:
        units.append(ModelUnit(first, first + size))
        first += size
    return tuple(units)


def _block(name: str) -> str | None:
    found = _BLOCK.match(name)
    return found[0] if found else None
