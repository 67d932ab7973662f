"""Ticks of a clock at which a rank begins to communicate, like Horovod's background thread, which wakes once a cycle.

A thread waits for a tick by sleeping. If a plan has ticks, its comm stream is a thread on a GPU, too. The thread waits
until the GPU has written the data, sleeps until the tick, and then enqueues collectives on its CUDA stream. Horovod
works the same way. Delaying the CUDA stream instead would require the length of the delay when the host enqueues the
tick. The host itself must not sleep, because it still has to enqueue the rest of the backward pass.

The host waits for such a comm stream, like `synchronize()` in Horovod.

The rule of the engines determines the tick: the first one at or after the latest end of the tick's dependencies on
other streams, `Instance.after`. These are the data, unless the comm stream had already waited for it, and the last
operation of the host before it submitted the tick.
"""

import threading
from collections.abc import Callable
from typing import TypeAlias, final

from real.recording.timing import now_s, sleep_s
from simdist.plan import Instance, Plan, Tick, writes
from simdist.plan.ops import tick_s

# Returns the end of an operation by this rank's clock; to be called after that end.
Ended = Callable[[], float]

_End: TypeAlias = tuple[int, Ended]  # index of an instance, and its end


@final
class Ticks:
    """The clock of one rank, and the ends of its ticks' dependencies.

    Args:
        plan: The plan with the ticks.
        interrupted: Ends a wait early; set when the run has failed.
    """

    def __init__(self, plan: Plan, interrupted: threading.Event) -> None:
        self._interrupted = interrupted
        ops = (op for body in plan.bodies for op in body)
        self._watched = {name for op in ops if isinstance(op, Tick) for name in op.srcs}
        self._written: dict[str, _End] = {}  # buffer -> its last writer
        self._by_host: _End | None = None  # the last operation of the host
        self._before: dict[int, _End] = {}  # submitted tick -> the last operation of the host before it
        self.start_s = now_s()  # the first tick; the others are whole periods later

    def __bool__(self) -> bool:
        return bool(self._watched)

    def ended(self, instance: Instance, ended: Ended) -> None:
        """Record the end of an operation, before others learn of it."""
        if instance.lane.kind == "host":
            self._by_host = instance.index, ended
        for name in self._watched.intersection(writes(instance.op)):
            self._written[name] = instance.index, ended

    def submitted(self, instance: Instance) -> None:
        """Record the progress of the host when it submits a tick, because it continues before the tick's turn."""
        if self._by_host is not None:
            self._before[instance.index] = self._by_host

    def due_s(self, instance: Instance) -> float:
        """Return the time of a submitted tick by this rank's clock; its dependencies must have ended."""
        assert isinstance(instance.op, Tick)
        noted = [self._before.pop(instance.index, None), *map(self._written.get, instance.op.srcs)]
        ends_s = [each[1]() for each in noted if each is not None and each[0] in instance.after]
        return self.start_s + float(tick_s(max([self.start_s, *ends_s]) - self.start_s, instance.op.period_s))

    def wait(self, instance: Instance) -> None:
        """Sleep until a moment of this rank's clock."""
        sleep_s(self.due_s(instance) - now_s(), self._interrupted)
