"""Ticks: a clock at whose beat a rank begins to communicate, as Horovod's background thread wakes once a cycle.

A tick is waited for by a thread, with a sleep. On a GPU, too, the comm stream of a plan that ticks is a thread, which
waits until the GPU has written the data, sleeps until the tick and then enqueues collectives on its CUDA stream. That
is how Horovod works. To hold up the CUDA stream instead, the host would have to know how long for when it enqueues the
tick; and the host itself must not sleep, because it has the rest of the backward pass to enqueue.

A wait for such a comm stream is on the host, as `synchronize()` does in Horovod.

Which tick it is, the engines' rule says: the first that is not before the latest end of what the tick comes after on
other streams, `Instance.after`. That is the data, unless the comm stream had waited for it already, and what the host
did before it asked for the tick.
"""

import threading
from collections.abc import Callable
from typing import TypeAlias, final

from real.recording.timing import now_s, sleep_s
from simdist.plan import Instance, Plan, Tick, writes
from simdist.plan.ops import tick_s

# Tells when an operation has ended, by this rank's clock; to be asked when it has.
Ended = Callable[[], float]

_End: TypeAlias = tuple[int, Ended]  # an instance's index, and when it ended


@final
class Ticks:
    """The clock of one rank, and when what its ticks come after ended.

    Args:
        plan: Whose ticks.
        interrupted: Ends a wait early; set when the run has failed.
    """

    def __init__(self, plan: Plan, interrupted: threading.Event) -> None:
        self._interrupted = interrupted
        ops = (op for body in plan.bodies for op in body)
        self._watched = {name for op in ops if isinstance(op, Tick) for name in op.srcs}
        self._written: dict[str, _End] = {}  # buffer -> its last writer
        self._by_host: _End | None = None  # what the host did last
        self._before: dict[int, _End] = {}  # tick that was submitted -> what the host had done last
        self.start_s = now_s()  # a tick; the others are whole periods later

    def __bool__(self) -> bool:
        return bool(self._watched)

    def ended(self, instance: Instance, ended: Ended) -> None:
        """Take note of the end of an operation, before others learn of it."""
        if instance.lane.kind == "host":
            self._by_host = instance.index, ended
        for name in self._watched.intersection(writes(instance.op)):
            self._written[name] = instance.index, ended

    def submitted(self, instance: Instance) -> None:
        """Take note of how far the host was when it asked for a tick: it goes on before the tick's turn comes."""
        if self._by_host is not None:
            self._before[instance.index] = self._by_host

    def due_s(self, instance: Instance) -> float:
        """Return when a tick that was submitted falls, by this rank's clock; what it comes after has ended."""
        assert isinstance(instance.op, Tick)
        noted = [self._before.pop(instance.index, None), *map(self._written.get, instance.op.srcs)]
        ends_s = [each[1]() for each in noted if each is not None and each[0] in instance.after]
        return self.start_s + float(tick_s(max([self.start_s, *ends_s]) - self.start_s, instance.op.period_s))

    def wait(self, instance: Instance) -> None:
        """Sleep until then."""
        sleep_s(self.due_s(instance) - now_s(), self._interrupted)
