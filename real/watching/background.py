"""The thread that measures windows, exchanges their times and finds late ranks, beside the training loop.

The loop hands over the moments of a window and goes on. Nothing that the thread waits for holds up the loop: neither
events of a GPU, nor other ranks, nor a disk. Each wait has a limit. The first error ends the watch on this rank. The
loop finds what is new in `results`, `mark` and `problem`.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar, final

from real.processes.beats import ranks_have
from real.watching.exchange import StoreExchange, WatchNews, WindowPost, common_times
from real.watching.lateness import LatenessFinder, LatenessWindow, WorkTimes
from real.watching.output import append_csv
from real.watching.tracing import TraceMark, TraceMarker
from real.watching.work import StepClock, StepMoments, measured
from simdist.errors import RunError

_MomentT = TypeVar("_MomentT")

_LOOK_S = 0.005  # between two looks whether a GPU has reached an event
_END_S = 1.0  # after the limit of a wait, for the thread to notice it


@dataclass(frozen=True, slots=True)
class WindowMoments(Generic[_MomentT]):
    """The moments of a window of steps on this rank.

    Args:
        number: Number of the window.
        steps: The moments of its steps.
        is_last: No further window follows.
        unseen: Which late ranks the moments may not show; empty if they show all.
    """

    number: int
    steps: Sequence[StepMoments[_MomentT]]
    is_last: bool = False
    unseen: str = ""


@final
class WatchThread(Generic[_MomentT]):
    """Works on windows, one after the other.

    Args:
        clock: Knows how far apart moments are.
        exchange: Reaches the other ranks. None if there are none.
        rank: Number of this rank. Rank 0 finds late ranks.
        csv: File for the lateness of each window, on rank 0.
        timeout_s: Limit for each wait.
        earliest: Tells the first step for which all ranks can still learn that they should trace it.

    Attributes:
        results: The lateness of windows, on rank 0. The loop removes what it has seen.
        mark: The step to trace.
        problem: Why the watch has ended early; empty if it has not.
        is_off: The watch has ended, here or on rank 0.
    """

    def __init__(
        self,
        clock: StepClock[_MomentT],
        exchange: StoreExchange | None,
        *,
        rank: int,
        csv: Path | None,
        timeout_s: float,
        earliest: Callable[[], int],
    ) -> None:
        self.results: deque[LatenessWindow] = deque()
        self.mark: TraceMark | None = None
        self.problem = ""
        self.is_off = False
        self._clock = clock
        self._exchange = exchange
        self._find = _Finding(csv, earliest) if rank == 0 else None
        self._timeout_s = timeout_s
        self._closing_s = float("inf")
        self._queue: queue.SimpleQueue[WindowMoments[_MomentT] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="simdist-watch", daemon=True)
        self._thread.start()

    def put(self, window: WindowMoments[_MomentT]) -> None:
        """Hand over the moments of a window."""
        self._queue.put(window)

    def close(self, timeout_s: float) -> None:
        """Let the thread complete its windows and end. Afterwards it is left behind if it has not ended."""
        self._closing_s = time.monotonic() + timeout_s
        self._queue.put(None)
        self._thread.join(timeout_s + _END_S)

    @property
    def _is_closing(self) -> bool:
        return self._closing_s < float("inf")

    def _run(self) -> None:
        try:
            while (window := self._queue.get()) is not None:
                self._work_on(window)
                if self.is_off:
                    return
        except Exception as error:  # of a store, a file or a GPU: the job goes on without the watch
            if not self._is_closing:
                self.problem = str(error) or type(error).__name__
            self.is_off = True
            self._tell_others(WatchNews(-1, None, is_off=True))

    def _work_on(self, window: WindowMoments[_MomentT]) -> None:
        deadline_s = time.monotonic() + self._timeout_s

        def is_late() -> bool:
            return time.monotonic() > min(deadline_s, self._closing_s)

        self._await_moments(window, is_late)
        post = WindowPost(tuple(measured(each, self._clock) for each in window.steps), window.is_last)
        if self._find is not None:
            self._find_late(self._find, window, post, is_late)
        elif self._exchange is not None:
            self._exchange.post(window.number, post)
            news = self._exchange.news()
            if news is not None:
                self.mark = news.mark
                self.is_off = news.is_off

    def _await_moments(self, window: WindowMoments[_MomentT], is_late: Callable[[], bool]) -> None:
        """Wait until the last moment of a window has passed. Moments pass in order."""
        while window.steps and not self._clock.has_passed(window.steps[-1].end):
            if is_late():
                raise RunError(f"the GPU has not reached the end of step {window.steps[-1].step} in time")
            time.sleep(_LOOK_S)

    def _find_late(
        self, find: "_Finding", window: WindowMoments[_MomentT], post: WindowPost, is_late: Callable[[], bool]
    ) -> None:
        posts = {0: post}
        if self._exchange is not None:
            posts |= self._exchange.gather(window.number, is_late)
            silent = self._exchange.silent({*posts, *(range(1) if post.is_last else ())})
            if silent and not self._is_closing:
                raise RunError(
                    f"{ranks_have(silent)} not written the times of steps up to {_last_step(post)} within "
                    f"{self._timeout_s:g} s; see the output there, and that it calls watch.step() in each step"
                )
        for times in common_times(posts):
            found, self.mark = find.find(times, window.unseen)
            self.results.append(found)
        self._tell_others(WatchNews(window.number, self.mark, is_off=post.is_last))

    def _tell_others(self, news: WatchNews) -> None:
        if self._find is not None and self._exchange is not None:
            try:
                self._exchange.publish(news)
            except RuntimeError:  # the store is gone
                self.is_off = True


@final
class _Finding:
    """Finds late ranks on rank 0."""

    def __init__(self, csv: Path | None, earliest: Callable[[], int]) -> None:
        self._csv = csv
        self._earliest = earliest
        self._finder = LatenessFinder()
        self._marker = TraceMarker()

    def find(self, times: WorkTimes, unseen: str) -> tuple[LatenessWindow, TraceMark | None]:
        """Return the lateness of a window, and the step to trace. Append the lateness to the file."""
        found = self._finder.find(times)
        found = replace(found, unseen=found.unseen or unseen)
        if self._csv is not None:
            append_csv(self._csv, found)
        return found, self._marker.after(found, self._earliest())


def _last_step(post: WindowPost) -> int | str:
    return post.steps[-1].step if post.steps else "the end"
