"""Where rows are computed: in this process, in a pool of processes, or on a Dask cluster.

All of them are a `concurrent.futures.Executor`; what else the driver must know of one is how many batches it can work
on at the same time, and how to get a new one when a process of it has died.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any, Protocol, final

__all__ = ["InProcess", "LocalPool", "Workers", "n_cores"]


class Workers(Protocol):
    """A place to compute."""

    @property
    def executor(self) -> Executor:
        """What takes batches now."""
        ...

    @property
    def n_slots(self) -> int:
        """How many batches are worked on at the same time, 1 or more."""
        ...

    def renew(self) -> None:
        """End what still runs, and get a working executor."""
        ...

    def close(self) -> None:
        """End what still runs."""
        ...


def n_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@final
class InProcess:
    """This process itself, one batch after the other."""

    def __init__(self) -> None:
        self.executor: Executor = _Immediate()
        self.n_slots = 1

    def renew(self) -> None:
        """Do nothing: what ends this process ends the sweep."""

    def close(self) -> None:
        """Do nothing."""


@final
class _Immediate(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@final
class LocalPool:
    """Processes of this machine."""

    def __init__(self, n_workers: int) -> None:
        """Start them when the first batch comes."""
        self.n_slots = n_workers
        self.executor: Executor = self._new()

    def renew(self) -> None:
        """Kill the processes and start others."""
        self.close()
        self.executor = self._new()

    def close(self) -> None:
        """Kill the processes."""
        pool = self.executor
        assert isinstance(pool, ProcessPoolExecutor)
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()

    def _new(self) -> ProcessPoolExecutor:
        # Not forked: this process has threads. What is spawned imports simdist anew, half a second per process.
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.n_slots, mp_context=spawn, initializer=_initialize)


def _initialize() -> None:
    """Leave Ctrl-C to the parent, and end with it, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
