"""The clock of a simulation: a SimPy environment with named processes and a separate queue for urgent events.

SimPy keeps urgent events (a process begins, an interrupt) on its heap, before all others of the same moment. Here they
wait in a queue of their own, in the order in which they were triggered. The clock empties this queue before it looks at
the heap. A process may therefore know early when something that others wait for will end, such as an operation. It then
lets them go on at once, whatever the clock shows. This costs one entry in a queue.
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
    """An event that carries no value and cannot fail. It happens when it is passed to `Clock.happen`."""

    _ok = True
    _value = None


class Clock(Timeline):
    """A timeline with named processes and a queue of urgent events."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._urgent: deque[simpy.Event] = deque()
        self.happen: Callable[[Notice], None] = self._urgent.append
        """Let a notice happen at once. The processes that wait for it go on before any other."""

    def start(self, name: str, steps: Steps) -> simpy.Process:
        """Begin a process now; `Process.name` is its name."""
        steps.__name__ = name  # type: ignore[attr-defined]  # generators have a name
        return simpy.Process(self, steps)

    def schedule(self, event: simpy.Event, priority: EventPriority = NORMAL, delay: SimTime = 0) -> None:
        """Schedule an event, as SimPy does. An end that no process waits for is not an event; its failure is raised.

        Raises:
            BaseException: What the process raised.
        """
        if isinstance(event, simpy.Process) and not event.callbacks:
            if not event._ok:
                raise event._value
            event.callbacks = None  # type: ignore[assignment]  # it has happened, and no process waited
        elif priority == URGENT and not delay:
            self._urgent.append(event)
        else:
            super().schedule(event, priority, delay)

    def step(self) -> None:
        """Process all urgent events or, if there are none, the next event.

        Raises:
            EmptySchedule: There is no event left.
        """
        if self._urgent:
            self.go_on()
        else:
            super().step()

    def go_on(self) -> None:
        """Process all urgent events. If a process is running, they happen after it has yielded."""
        urgent = self._urgent
        while urgent and self._active_proc is None:
            event = urgent.popleft()
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment]  # as SimPy does
            for callback in callbacks:
                callback(event)
