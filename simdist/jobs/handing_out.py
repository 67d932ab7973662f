"""Hand work out to workers, and take each outcome as soon as it is there."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from simdist.jobs.workers import Workers

_ItemT = TypeVar("_ItemT")
_OutcomeT = TypeVar("_OutcomeT")


def finished(
    workers: Workers,
    function: Callable[[_ItemT], _OutcomeT],
    items: Iterable[_ItemT],
    *,
    n_underway: int | None = None,
) -> Generator[tuple[_ItemT, Future[_OutcomeT]], None, None]:
    """Compute something of each item, and yield items with their futures, which are done, in the order they end.

    What waits for a worker when the generator is closed is not begun.

    Args:
        workers: Where. A worker that dies fails what it was given, and is replaced.
        function: That workers can import.
        items: Taken when there is room for them.
        n_underway: How many are handed out at a time, at most; by default as many as keep the workers busy.
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
