"""A SimPy environment that can be told when something happens, instead of in how many seconds, which would round."""

from collections.abc import Callable
from heapq import heappush

import simpy
from simpy.events import NORMAL, EventPriority

LAST = EventPriority(2)  # SimPy runs events of one moment by priority: 0 urgent, 1 normal


class Timeline(simpy.Environment):
    """An environment with exact times."""

    def call_at(self, at_s: float, then: Callable[[simpy.Event], None], *, priority: EventPriority = NORMAL) -> None:
        """Call a function at a time, which is not before now; its argument is an event of no interest."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        event.callbacks.append(then)
        heappush(self._queue, (at_s, priority, next(self._eid), event))
