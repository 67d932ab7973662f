"""What the host takes for a call of a collective, by whether the program waits for the result.

A program that waits finds its GPU idle at each call, so the host's time comes on top of what the GPU does. In a loop
whose host runs ahead, calls are queued, and the GPU works meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass

from real.recording.timing import now_s
from simdist.settings.units import format_seconds

_N_CALLS = 20  # that are queued


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds of a call of the smallest all_reduce, on the rank where it takes longest.

    Args:
        enqueue_s: Until the call returns, without its result on a GPU.
        queued_s: With results, of a call among many one after the other.
        waited_s: If the host waits for each result, on an idle device.
    """

    enqueue_s: float
    queued_s: float
    waited_s: float

    @property
    def waiting_s(self) -> float:
        """What waiting adds to a call."""
        return max(0.0, self.waited_s - self.queued_s)

    @property
    def in_words(self) -> str:
        """The three times."""
        enqueue, queued, waited = map(format_seconds, (self.enqueue_s, self.queued_s, self.waited_s))
        return f"a call takes the host {enqueue}; with its result {queued} if calls are queued, {waited} if it waits"


def queued_s(act: Callable[[], None], wait: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a call among `_N_CALLS` queued ones: until it returns, and with its result.

    Args:
        act: Calls a collective.
        wait: Returns when the results of all calls are there.
    """
    begin_s = now_s()
    for _ in range(_N_CALLS):
        act()
    called_s = now_s()
    wait()
    return (called_s - begin_s) / _N_CALLS, (now_s() - begin_s) / _N_CALLS
