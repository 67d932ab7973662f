"""Sentences about many ranks, said once."""

from collections.abc import Iterable, Sequence


def listed(numbers: Sequence[int]) -> str:
    """Write numbers in ascending order as ranges.

    >>> listed([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def grouped(notes: Iterable[tuple[int | None, str]]) -> list[str]:
    """Say what several ranks say once, in the order in which it comes first.

    >>> grouped([(0, "no input"), (1, "no input"), (1, "no marks")])
    ['ranks 0-1: no input', 'rank 1: no marks']
    """
    ranks: dict[str, list[int]] = {}
    for rank, note in notes:
        ranks.setdefault(note, []).append(rank or 0)
    return [f"rank{'s' * (len(of) > 1)} {listed(sorted(of))}: {note}" for note, of in ranks.items()]
