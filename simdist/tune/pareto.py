"""What is not beaten in both of two respects."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return which points no other one beats: as small or smaller in both numbers, and smaller in one.

    Of equal points the first counts. They are in the order of the first number, so that the second falls.

    >>> front([(1, 9.0), (2, 9.5), (4, 5.0), (8, 5.0), (8, 3.0)])
    [0, 2, 4]
    """
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (*points[index], index)):
        if not found or points[index][1] < points[found[-1]][1]:
            found.append(index)
    return found
