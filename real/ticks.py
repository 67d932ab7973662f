"""Ticks: a clock at whose beat a rank begins to communicate, as Horovod's background thread wakes once a cycle.

A tick is waited for by a thread, with a sleep. On a GPU, too, the comm stream of a plan that ticks is a thread, which
waits until the GPU has written the data, sleeps until the tick and then enqueues collectives on its CUDA stream. That
is how Horovod works. To hold up the CUDA stream instead, the host would have to know how long for when it enqueues the
tick; and the host itself must not sleep, because it has the rest of the backward pass to enqueue.

Whoever waits for such a comm stream waits on the host, as `synchronize()` does in Horovod.
"""

import math
import threading
from collections.abc import Callable, Collection
from typing import final

from real.timing import now_s, sleep_s
from simdist.plan import Instance, Plan, Tick, writes

__all__ = ["Ended", "Ticks", "next_tick_s"]

Ended = Callable[[], float]
"""Tells when an operation has ended, by this rank's clock; to be asked when it has."""


@final
class Ticks:
    """The clock of one rank, and when what it looks at was written.

    Args:
        plan: Whose ticks.
        interrupted: Ends a wait early; set when the run has failed.
    """

    def __init__(self, plan: Plan, interrupted: threading.Event) -> None:
        self._interrupted = interrupted
        ops = (op for body in plan.bodies for op in body)
        self._watched = {name for op in ops if isinstance(op, Tick) for name in op.srcs}
        self._written: dict[str, tuple[int, Ended]] = {}  # buffer -> its last writer's index and end
        self.start_s = now_s()
        """A tick; the others are whole periods later. By this rank's clock."""

    def __bool__(self) -> bool:
        return bool(self._watched)

    def ended(self, instance: Instance, ended: Ended) -> None:
        """Take note of the end of an operation, before anybody else learns of it."""
        for name in self._watched.intersection(writes(instance.op)):
            self._written[name] = instance.index, ended

    def due_s(self, op: Tick, after: Collection[int]) -> float:
        """Return the first tick that is not before the data was written, which is there now; by this rank's clock.

        Args:
            op: The tick.
            after: The instances of other streams that it comes after.
        """
        writers = [self._written[name] for name in op.srcs if name in self._written]
        written_s = max((ended() for index, ended in writers if index in after), default=self.start_s)
        return self.start_s + next_tick_s(written_s - self.start_s, op.period_s)

    def wait(self, op: Tick, after: Collection[int]) -> None:
        """Sleep until then."""
        sleep_s(self.due_s(op, after) - now_s(), self._interrupted)


def next_tick_s(ready_s: float, period_s: float) -> float:
    """Return the first multiple of a period that is not before a time.

    >>> next_tick_s(0.012, 0.005), next_tick_s(0.015, 0.005)
    (0.015, 0.015)
    """
    return math.ceil(round(ready_s / period_s, 6)) * period_s
