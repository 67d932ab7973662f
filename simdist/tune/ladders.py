"""The values that settings may take: periods, groups, and the chains of both that hierarchical SGD averages by.

A chain of levels {2: 8, 4: 32, 8: 64} is a chain of periods, each a multiple of the one before, beside a chain of group
sizes, each a multiple of the one before and the last the world. Whether a schedule with them is legal, the schedule
says itself; the chains are only written so that nearly all of them are.
"""

from collections.abc import Iterator, Sequence
from itertools import product

Levels = tuple[tuple[int, int], ...]
"""Pairs of a period in steps and the ranks of a group, both growing."""

MOST_LEVELS = 4  # GPUs, node, rack, world: deeper hierarchies are not built
_EVERY_ONE_TO = 8  # beyond, two periods per doubling are close enough


def periods(most: int) -> tuple[int, ...]:
    """Return the periods to try, up to `most` steps: all up to 8, then 2^k and 3 x 2^k, and `most` itself.

    >>> periods(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20)
    """
    doubled = {base * 2**k for base in (2, 3) for k in range(most.bit_length())}
    every_one = set(range(1, _EVERY_ONE_TO + 1))
    return tuple(sorted(period for period in every_one | doubled | {most} if period <= most))


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number from 2 on, itself included.

    >>> divisors(12)
    (2, 3, 4, 6, 12)
    """
    return tuple(size for size in range(2, number + 1) if number % size == 0)


def chains(last: int, values: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """Yield the growing chains of so many values that end with `last`, in which each divides the next.

    >>> list(chains(8, (1, 2, 4, 8), 3))
    [(1, 2, 8), (1, 4, 8), (2, 4, 8)]
    """
    if length == 1:
        yield (last,)
        return
    for value in values:
        if value < last and last % value == 0:
            yield from ((*chain, last) for chain in chains(value, values, length - 1))


def level_chains(world_size: int, most_steps: int) -> Iterator[Levels]:
    """Yield every way to average over growing groups, the world at least every `most_steps` steps.

    >>> list(level_chains(4, 2))
    [((1, 4),), ((2, 4),), ((1, 2), (2, 4))]
    """
    ladder, sizes = periods(most_steps), divisors(world_size)
    for length in range(1, MOST_LEVELS + 1):
        grown = list(chains(world_size, sizes, length))
        for last in ladder:
            for steps, ranks in product(chains(last, ladder, length), grown):
                yield tuple(zip(steps, ranks, strict=True))
