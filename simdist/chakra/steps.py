"""A recording, cut into training steps: forward pass, the backward pass of each gradient bucket, optimizer.

Traces carry no marks of steps, but those of `simdist chakra export` do. Elsewhere the sequence of all-reduces repeats,
and what stands between the last of a step and the first of the next is the optimizer, then the forward pass, then the
backward pass of the first bucket. Names tell which is which; where they do not, what follows the very last all-reduce
is the optimizer, and the rest counts as forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from simdist.chakra.recording import Call, Event, Recording, Work
from simdist.errors import TraceError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank.

    Args:
        forward_s: Seconds before the first bucket's backward pass.
        buckets_s: Seconds of each bucket's backward pass, in the order of the all-reduces.
        optimize_s: Seconds after the last all-reduce.
        nbytes: Bytes of each all-reduce, in order.
    """

    forward_s: float
    buckets_s: tuple[float, ...]
    optimize_s: float
    nbytes: tuple[int, ...]

    @property
    def compute_s(self) -> float:
        """Seconds of all work."""
        return self.forward_s + sum(self.buckets_s) + self.optimize_s


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How all-reduces make up steps.

    Args:
        n_skipped: All-reduces before the first whole step.
        n_calls: All-reduces of a step.
        n_steps: Steps.
    """

    n_skipped: int
    n_calls: int
    n_steps: int


def find_rhythm(sizes: Sequence[int], n_steps: int | None) -> Rhythm | None:
    """Return how a sequence of all-reduces repeats; None if `n_steps` equal parts do not make it up.

    Of several ways to cut it, the shortest step is taken. A first step may differ, as that of PyTorch's
    DistributedDataParallel does, which makes its buckets anew after it. A sequence that does not repeat is one step.

    >>> find_rhythm([4, 1, 7, 2, 7, 2, 7, 2], None)
    Rhythm(n_skipped=2, n_calls=2, n_steps=3)
    """
    n = len(sizes)
    if n_steps is not None:
        return Rhythm(0, n // n_steps, n_steps) if n % n_steps == 0 else None
    for n_calls in range(1, n // 2 + 1):
        n_equal = 0
        while n_equal < n - n_calls and sizes[n - 1 - n_equal] == sizes[n - 1 - n_equal - n_calls]:
            n_equal += 1
        found = 1 + n_equal // n_calls
        n_skipped = n - found * n_calls
        if found > 1 and n_skipped <= n_calls:
            return Rhythm(n_skipped, n_calls, found)
    return Rhythm(0, n, 1)


def names_phases(recording: Recording) -> bool:
    """Tell whether names in a trace say what belongs to which phase."""
    return any(isinstance(event, Work) and event.phase == "backward" for event in recording.events)


def cut(recording: Recording, rhythm: Rhythm | None) -> list[Step]:
    """Return the steps of a recording.

    Args:
        recording: Of one rank.
        rhythm: How all-reduces make up steps; None if events tell their steps.

    Raises:
        TraceError: Some all-reduces tell their step, and others do not.
        UnsupportedError: Not every step has the same all-reduces.
    """
    parts = _by_mark(recording) if rhythm is None else _by_rhythm(recording.events, rhythm)
    steps = [_step(events) for events in parts]
    for number, step in enumerate(steps):
        if step.nbytes != steps[0].nbytes:
            raise UnsupportedError(
                f"{recording.path}: {_calls_text(step)} in step {number}, {_calls_text(steps[0])} in step 0: only "
                f"training that all-reduces the same gradients in every step can be imported"
            )
    return steps


def _calls_text(step: Step) -> str:
    return f"{len(step.nbytes)} all-reduces of {sum(step.nbytes):,} bytes"


def _by_mark(recording: Recording) -> list[list[Event]]:
    parts: dict[int, list[Event]] = {}
    for event in recording.events:
        if event.step is not None:
            parts.setdefault(event.step, []).append(event)
        elif isinstance(event, Call):
            raise TraceError(f"{event.node} tells no step, other all-reduces do: write --steps to cut by their number")
    return [parts[step] for step in sorted(parts)]


def _by_rhythm(events: Sequence[Event], rhythm: Rhythm) -> list[list[Event]]:
    """Cut events between the last all-reduce of each step and the first of the next."""
    calls = [place for place, event in enumerate(events) if isinstance(event, Call)][rhythm.n_skipped :]
    firsts, lasts = calls[:: rhythm.n_calls], calls[rhythm.n_calls - 1 :: rhythm.n_calls]
    optimize_s = _seconds(events[lasts[-1] + 1 :])
    before = [place for place in range(firsts[0]) if isinstance(events[place], Call)]
    begin = before[-1] + 1 + _border(events[before[-1] + 1 : firsts[0]], optimize_s) if before else 0
    joints = zip(lasts, firsts[1:], strict=False)
    borders = [last + 1 + _border(events[last + 1 : first], optimize_s) for last, first in joints]
    return [list(events[start:stop]) for start, stop in pairwise([begin, *borders, len(events)])]


def _border(joint: Sequence[Event], optimize_s: float) -> int:
    """Return where a step ends in what stands between its last all-reduce and the first of the next step."""
    phases = [event.phase for event in joint if isinstance(event, Work)]
    if "optimize" in phases:
        return len(phases) - phases[::-1].index("optimize")
    if any(phases):
        return next((place for place, phase in enumerate(phases) if phase != "backward"), 0)
    ends_s = list(accumulate((_seconds([event]) for event in joint), initial=0.0))
    return min(range(len(ends_s)), key=lambda place: abs(ends_s[place] - optimize_s))


def _seconds(events: Sequence[Event]) -> float:
    return sum(event.seconds for event in events if isinstance(event, Work))


def _step(events: Sequence[Event]) -> Step:
    """Add up a step. The forward pass ends where the first work is that is known to be of the backward pass."""
    nbytes = tuple(event.nbytes for event in events if isinstance(event, Call))
    buckets_s, forward_s, optimize_s = [0.0] * len(nbytes), 0.0, 0.0
    n_calls, is_backward = 0, False
    for event in events:
        if isinstance(event, Call):
            n_calls += 1
            continue
        is_backward = is_backward or event.phase == "backward"
        if n_calls == 0 and not is_backward:
            forward_s += event.seconds
        elif n_calls < len(nbytes):
            buckets_s[n_calls] += event.seconds
        elif event.phase == "backward" and nbytes:
            buckets_s[-1] += event.seconds
        else:
            optimize_s += event.seconds
    return Step(forward_s, tuple(buckets_s), optimize_s, nbytes)
