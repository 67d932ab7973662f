"""The clock of a simulation: SimPy's environment, in which processes have names and what is urgent happens at once.

SimPy keeps urgent events (a process begins, an interrupt) on its heap, before all others of the same moment. Here they
wait in a queue of their own, in the order in which they were triggered, and happen before the heap is looked at. So a
process that can tell early what another one waits for (when an operation will end) lets it go on at once, whatever the
clock shows, at the price of a queue.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import TypeAlias

import simpy
from simpy.core import SimTime
from simpy.events import NORMAL, URGENT, EventPriority

from simdist.engines.network.fluid import Timeline

Steps: TypeAlias = Generator[simpy.Event, object, None]


class Notice(simpy.Event):
    """An event that carries no value and cannot fail; it happens when the clock is told that it does."""

    _ok = True
    _value = None


class Clock(Timeline):
    """A timeline with named processes and a queue of urgent events."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._urgent: deque[simpy.Event] = deque()
        self.happen: Callable[[Notice], None] = self._urgent.append
        """Let something happen at once: who waits for it goes on before anybody else."""

    def start(self, name: str, steps: Steps) -> simpy.Process:
        """Begin a process now; `Process.name` is its name."""
        steps.__name__ = name  # type: ignore[attr-defined]  # which generators have
        return simpy.Process(self, steps)

    def schedule(self, event: simpy.Event, priority: EventPriority = NORMAL, delay: SimTime = 0) -> None:
        """Schedule an event, as SimPy does; the end of a process that nobody waits for is none, its failure ends all.

        Raises:
            BaseException: What the process raised.
        """
        if isinstance(event, simpy.Process) and not event.callbacks:
            if not event._ok:
                raise event._value
            event.callbacks = None  # type: ignore[assignment]  # it has happened, and nobody waited
        elif priority == URGENT and not delay:
            self._urgent.append(event)
        else:
            super().schedule(event, priority, delay)

    def is_last(self) -> bool:
        """Return whether nothing else is to happen at this moment."""
        return not self._urgent and super().is_last()

    def step(self) -> None:
        """Let everything urgent happen, or else the next event.

        Raises:
            EmptySchedule: There is none.
        """
        if self._urgent:
            self.go_on()
        else:
            super().step()

    def go_on(self) -> None:
        """Let everything urgent happen, unless a process is at work: it happens after that."""
        urgent = self._urgent
        while urgent and self._active_proc is None:
            event = urgent.popleft()
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment]  # as SimPy does
            for callback in callbacks:
                callback(event)
