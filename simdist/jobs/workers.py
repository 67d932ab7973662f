"""The workers for rows: this process, processes of this machine, or a Dask cluster (`simdist.jobs.dask`).

Each is a `concurrent.futures.Executor`. The driver must also know how many batches keep it busy, and how to end a
worker that does not respond. A dead worker is replaced automatically.
"""

import ctypes
import gc
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar, final

from simdist.errors import RunError

_COLLECT_AFTER = 100_000  # objects; Python's default is 700, and imports make many that stay

#: Hint for a script with a `LocalPool`.
GUARD = "write `if __name__ == '__main__':` above what runs the sweep, and indent that"


class Workers(Protocol):
    """A place to compute."""

    @property
    def executor(self) -> Executor:
        """Executor of batches."""
        ...

    @property
    def n_underway(self) -> int:
        """Number of batches to hand out: two for each process, so that none waits for the next. It may change."""
        ...

    @property
    def may_wait(self) -> bool:
        """Whether a batch may wait for work of other users, so that silence does not mean that a worker hangs."""
        ...

    def up_s(self, batch: Future[Any]) -> float | None:
        """Return when the worker of a batch was ready for work, by `time.monotonic`; None if it is still starting."""
        ...

    def end(self, batch: Future[Any]) -> None:
        """End the worker of a batch, which then fails."""
        ...


@final
class InProcess(Executor):
    """This process, one batch after the other."""

    n_underway = 1
    may_wait = False

    @property
    def executor(self) -> Executor:
        """This object."""
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Compute a batch at once."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def up_s(self, batch: Future[Any]) -> float:
        """Return -inf, because this process is always ready."""
        return -math.inf

    def end(self, batch: Future[Any]) -> None:
        """Do nothing: a batch is already done when the driver gets it."""


@final
class _Slot:
    """A process as a pool of one, with its start time and its batches."""

    def __init__(self) -> None:
        self.given: list[Future[Any]] = []
        self.renew()

    def renew(self) -> None:
        # Not forked, because this process has threads. A spawned process imports simdist again, which takes half a
        # second.
        spawn = multiprocessing.get_context("spawn")
        self._up_s = spawn.RawValue("d", math.inf)
        self.pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_initialize, initargs=(self._up_s,))

    def up_s(self) -> float | None:
        """Return when the process had started, by the clock that all processes of a machine share."""
        return self._up_s.value if math.isfinite(self._up_s.value) else None

    def n_waiting(self) -> int:
        self.given = [each for each in self.given if not each.done()]
        return len(self.given)

    def kill(self) -> list[BaseProcess]:
        processes: list[BaseProcess] = list((self.pool._processes or {}).values())
        for process in processes:
            process.kill()
        return processes


@final
class LocalPool(Executor):
    """Processes of this machine. In a `with` statement, they end with it.

    Each process is a pool of its own. If it dies, only its own batches fail, not those of the others.
    """

    may_wait = False

    def __init__(self, n_workers: int) -> None:
        """Start each process when its first batch arrives."""
        self.n_underway = 2 * n_workers
        self._slots = [_Slot() for _ in range(n_workers)]

    @property
    def executor(self) -> Executor:
        """This object."""
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Give a batch to the process that has the fewest."""
        slot = min(self._slots, key=_Slot.n_waiting)
        with _shielded():
            try:
                future = _submitted(slot.pool, fn, *args, **kwargs)
            except BrokenExecutor:  # its process has died
                slot.pool.shutdown(wait=False)
                slot.renew()
                future = _submitted(slot.pool, fn, *args, **kwargs)
        slot.given.append(future)
        return future

    def up_s(self, batch: Future[Any]) -> float | None:
        """Return when the process of a batch had finished its imports."""
        return next((slot.up_s() for slot in self._slots if batch in slot.given), None)

    def end(self, batch: Future[Any]) -> None:
        """Kill the process of a batch."""
        for slot in self._slots:
            if batch in slot.given:
                slot.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Kill the processes."""
        killed = [process for slot in self._slots for process in slot.kill()]
        for slot in self._slots:
            slot.pool.shutdown(wait=False, cancel_futures=True)
        for process in killed:
            process.join()


def _submitted(pool: ProcessPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    try:
        return pool.submit(fn, *args, **kwargs)
    except OSError as error:
        raise RunError(f"cannot start a process: {error.strerror or error}; take fewer --workers") from None


@contextmanager
def _shielded() -> Iterator[None]:
    """Shield processes started meanwhile from Ctrl-C, even while they import; this process handles it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialize(up_s: ctypes.c_double) -> None:
    """Leave Ctrl-C to the parent, end with it, even if it is killed, and report when this process had started."""
    up_s.value = time.monotonic()
    gc.set_threshold(_COLLECT_AFTER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


_ItemT = TypeVar("_ItemT")
_OutcomeT = TypeVar("_OutcomeT")


def finished(
    workers: Workers,
    function: Callable[[_ItemT], _OutcomeT],
    items: Iterable[_ItemT],
    *,
    n_underway: int | None = None,
) -> Generator[tuple[_ItemT, Future[_OutcomeT]], None, None]:
    """Compute a function of each item, and yield items with their finished futures, in the order they finish.

    When the generator is closed, work that still waits for a worker is cancelled.

    Args:
        workers: Where to compute. If a worker dies, its work fails and the worker is replaced.
        function: A function that workers can import.
        items: The items, taken when there is room for them.
        n_underway: Largest number of items handed out at a time; by default enough to keep the workers busy.
    """
    todo = iter(items)
    underway: dict[Future[_OutcomeT], _ItemT] = {}
    try:
        while True:
            most = workers.n_underway if n_underway is None else min(n_underway, workers.n_underway)
            while len(underway) < most:
                try:
                    item = next(todo)
                except StopIteration:
                    break
                underway[workers.executor.submit(function, item)] = item
            if not underway:
                return
            for future in wait(underway, return_when=FIRST_COMPLETED).done:
                yield underway.pop(future), future
    finally:
        for future in underway:
            future.cancel()
