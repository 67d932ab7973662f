"""Where steps begin and end on a rank's host.

Marked steps reach from one mark to the next, so that no time between them is lost; without marks a step reaches from
one update to the next.
"""

from dataclasses import dataclass

import numpy as np

from simdist.profiles.kineto.classify import What
from simdist.profiles.kineto.timeline import Events, Floats
from simdist.profiles.steps.host import Passes


@dataclass(frozen=True, slots=True)
class Window:
    """A step, as the host began and ended it."""

    number: int
    start_s: float
    end_s: float


def windows_of(own: Events, passes: Passes) -> tuple[list[Window], list[str]]:
    """Return the steps in order, and notes on how they were found.

    Args:
        own: What the main thread did.
        passes: The backward passes.
    """
    marks = own.of(What.STEP)
    if len(marks):
        return _marked(marks), []
    for edges_s, name in _repeating(own, passes):
        if len(edges_s) > 1:
            pairs = zip(edges_s[:-1].tolist(), edges_s[1:].tolist(), strict=True)
            windows = [Window(number, start_s, end_s) for number, (start_s, end_s) in enumerate(pairs)]
            return windows, [
                f"steps carry no marks; they are taken to reach {name}; call `profiler.step()` to mark them"
            ]
    return [], []


def _marked(marks: Events) -> list[Window]:
    """Let a step reach to the next one's mark where that follows; the profiler may have paused between them."""
    numbers, starts_s = marks.link.tolist(), marks.start_s.tolist()
    windows = []
    for i, (number, start_s, end_s) in enumerate(zip(numbers, starts_s, marks.end_s.tolist(), strict=True)):
        is_followed = i + 1 < len(numbers) and numbers[i + 1] == number + 1
        windows.append(Window(number, start_s, starts_s[i + 1] if is_followed else end_s))
    return windows


def _repeating(own: Events, passes: Passes) -> list[tuple[Floats, str]]:
    """Return what repeats once in every step, the most trustworthy first."""
    updates = own.of(What.OPTIMIZER)
    return [
        (_last_updates_s(updates, passes), "from the end of one `Optimizer.step` to the end of the next"),
        (own.of(What.INPUT).start_s, "from one batch of the data loader to the next"),
        (own.of(What.FORWARD).start_s, "from one forward pass to the next"),
        (passes.end_s, "from the end of one backward pass to the end of the next"),
    ]


def _last_updates_s(updates: Events, passes: Passes) -> Floats:
    """Return when updates ended, of several without a backward pass between them the last."""
    n_passes = np.searchsorted(passes.start_s, updates.start_s)
    is_last = np.append(n_passes[1:] > n_passes[:-1], True)[: len(updates)]
    ends_s: Floats = np.sort(updates.end_s)[is_last]
    return ends_s
