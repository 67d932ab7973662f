"""Hand work out to workers, and take each result as soon as it is ready."""

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
