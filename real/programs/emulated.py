"""A program without a model: it sleeps as long as the scenario says that each operation takes.

So communication, waiting and stragglers can be measured for real on machines without GPUs, many ranks on few cores,
because who sleeps needs no core.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import final

from real.programs.base import Computation, Feed, Program
from real.recording.timing import sleep_s
from simdist.errors import RunError
from simdist.plan import ops

Hold = Callable[[float], None]
"""Holds up a stream for some seconds: a sleep of its thread, or on a GPU a kernel that spins on the current stream."""


@final
class EmulatedProgram(Program):
    """Sleeps.

    Args:
        seconds: How long each operation takes on this rank.
        compute: Holds up the compute stream.
        comm: Holds up the comm stream, which another thread may do at the same time.
        interrupted: Ends the sleep of a load or save early; set when the run has failed.
        load_s: (load, number) -> seconds, of loads that are not in `seconds` because each takes its own time.
        feed: Reads data instead of sleeping.
    """

    def __init__(
        self,
        seconds: Mapping[ops.Op, float],
        *,
        compute: Hold,
        comm: Hold,
        interrupted: threading.Event,
        load_s: Callable[[ops.Load, int], float] | None = None,
        feed: Feed | None = None,
    ) -> None:
        self._load_s, self._feed = load_s, feed
        self._seconds, self._interrupted = seconds, interrupted
        self._hold, self._hold_comm = compute, comm
        self._backward_s: dict[str, float] = {op.dst: s for op, s in seconds.items() if isinstance(op, ops.Backward)}

    def load(self, op: ops.Load, number: int) -> None:
        """Read the batch, or sleep for the seconds that the load takes undisturbed."""
        if self._feed is not None:
            self._feed.load(op, number)
            return
        seconds = self._load_s(op, number) if self._load_s and op not in self._seconds else self._seconds_of(op)
        sleep_s(seconds, self._interrupted)

    def perform(self, op: Computation, step: int) -> None:
        """Bring the node's files; or take the seconds of the operation in its stream, undisturbed where that is io."""
        if isinstance(op, ops.StageIn) and self._feed is not None:
            self._feed.stage_in(op)
            return
        seconds = self._seconds_of(op)
        match ops.stream_of(op):
            case "io":
                sleep_s(seconds, self._interrupted)
            case "comm":
                self._hold_comm(seconds)
            case _:
                self._hold(seconds)

    def backward(self, buckets: Iterable[str], complete: Callable[[], object]) -> None:
        """Take the seconds of each bucket in turn."""
        for bucket in buckets:
            self._hold(self._backward_s[bucket])
            complete()

    def _seconds_of(self, op: ops.Op) -> float:
        seconds = self._seconds.get(op)
        if seconds is None:
            raise RunError(f"no seconds are known for {op}; the emulated program takes them from the scenario's costs")
        return seconds
