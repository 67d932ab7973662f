"""Numbers and nouns in sentences."""


def plural(n: int, noun: str) -> str:
    """Return a regular noun as it stands after a number.

    >>> f"1 {plural(1, 'step')}, 2 {plural(2, 'step')}, 0 {plural(0, 'step')}"
    '1 step, 2 steps, 0 steps'
    """
    return noun if n == 1 else f"{noun}s"
