"""Computes the rows of a sweep that are missing, and survives whatever happens to the workers.

Rows go out in batches that take about `_BATCH_S`: long enough that sending them costs nothing, short enough that little
is lost and all workers end together. Two batches per worker are under way, so that none waits for this process.

A row that raises is recorded by the worker (see `simdist.sweep.tasks`). A row that kills its worker, or never answers,
takes a whole batch with it, and in a local pool all batches that are under way. Their rows then go out once more, one
at a time, so that it is certain which one did it; that one is recorded as failed.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from simdist import __version__
from simdist.errors import RunError, SimdistError
from simdist.sweep.definition import RowKey, Sweep
from simdist.sweep.store import Store
from simdist.sweep.tasks import Batch, Finished, Task, evaluate, failure, late
from simdist.sweep.workers import LocalPool, Workers, n_cores

__all__ = ["Outcome", "Progress", "run"]

Progress = Callable[[int, int, int], None]
"""Called with rows that are there, rows in all, and how many of those that are there failed."""

_BATCH_S = 0.5
_MAX_BATCH = 2_000  # points
_GRACE_S = 60.0  # for starting processes, sending and receiving, beyond the limit of each row


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sweep came to.

    Args:
        n_points: Points of the sweep.
        n_rows: Rows of the sweep: a schedule of a point each. Rows that are equal are computed once.
        n_new: Rows that were computed now.
        n_failed: Rows that failed, now or before.
    """

    n_points: int
    n_rows: int
    n_new: int
    n_failed: int


def run(
    sweep: Sweep,
    folder: Path,
    *,
    workers: Workers | None = None,
    retry: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Compute the rows of a sweep that are not in its folder yet.

    Args:
        sweep: What to compute.
        folder: Where results are appended; see `simdist.sweep.store`.
        workers: Where to compute; a process for each core if None. The caller closes those that it gives.
        retry: Compute rows again that failed.
        progress: See `Progress`.

    Raises:
        RunError: The folder cannot be written or is in use, or all workers are lost. What is done stays.
    """
    mine = None if workers else LocalPool(n_cores())
    try:
        with Store(folder) as store:
            return _Driver(sweep, store, workers or mine or LocalPool(1), progress).run(retry=retry)
    finally:
        if mine:
            mine.close()


@dataclass(slots=True)
class _Underway:
    """A batch that a worker has."""

    tasks: tuple[Task, ...]
    give_up_s: float


@dataclass(slots=True)
class _Queue:
    """Tasks to send: first those that are to go alone."""

    alone: deque[Task] = field(default_factory=deque)
    tasks: deque[Task] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.alone or self.tasks)


@final
class _Driver:
    def __init__(self, sweep: Sweep, store: Store, workers: Workers, progress: Progress | None) -> None:
        self._sweep, self._store, self._workers, self._progress = sweep, store, workers, progress
        self._queue = _Queue()
        self._underway: dict[Future[Finished], _Underway] = {}
        self._task_s = 0.0  # a running mean; 0 until the first batch is back
        self._n_keys = self._n_done = self._n_failed = self._n_new = 0

    def run(self, *, retry: bool) -> Outcome:
        order, tasks = self._plan()
        done = {key: failed for key, failed in self._store.done().items() if not (retry and failed)}
        keys = set(order)
        self._n_keys = len(keys)
        self._n_done = sum(key in done for key in keys)
        self._n_failed = sum(done.get(key, False) for key in keys)
        self._queue.tasks = deque(_missing(tasks, done))
        self._report()
        try:
            while self._queue or self._underway:
                self._send()
                self._receive()
        finally:
            for future in self._underway:
                future.cancel()
        self._store.arrange(order)
        return Outcome(self._sweep.n_points, len(order), self._n_new, self._n_failed)

    def _plan(self) -> tuple[list[str], list[Task]]:
        """Write the design; return the keys of all rows in their order, and the tasks."""
        order: list[str] = []
        tasks: list[Task] = []

        def lines() -> Iterator[dict[str, Any]]:
            yield header(self._sweep)
            for point in self._sweep.points():
                tree = self._sweep.tree_of(point)
                rows = self._sweep.keys(tree)
                tasks.append(Task(point.number, tree, tuple(rows)))
                values = [choice.number if choice else None for choice in point.choices]
                written = [choice.written if choice else None for choice in point.choices]
                for row in rows:
                    order.append(row.key)
                    yield {"point": point.number, "case": point.case, "values": values, "written": written} | {
                        "position": row.position,
                        "key": row.key,
                    }

        self._store.design(lines())
        return order, tasks

    def _send(self) -> None:
        """Keep two batches per worker under way; a task that goes alone goes when nothing else is."""
        if self._queue.alone:
            if not self._underway:
                self._submit((self._queue.alone.popleft(),))
            return
        while self._queue.tasks and len(self._underway) < 2 * self._workers.n_slots:
            self._submit(tuple(self._queue.tasks.popleft() for _ in range(self._batch_size())))

    def _batch_size(self) -> int:
        """Return how many tasks take about `_BATCH_S`, but so few at the end that all workers have some."""
        wanted = int(_BATCH_S / self._task_s) if self._task_s else 1
        fair = -(-len(self._queue.tasks) // (2 * self._workers.n_slots))
        return max(1, min(wanted, fair, _MAX_BATCH, len(self._queue.tasks)))

    def _submit(self, tasks: tuple[Task, ...]) -> None:
        n_rows = sum(len(task.rows) for task in tasks)
        before_s = max((each.give_up_s for each in self._underway.values()), default=time.monotonic())
        try:
            future = self._workers.executor.submit(evaluate, self._batch(tasks))
        except BrokenExecutor as error:  # a worker died just now; what is under way fails, too
            future = Future()
            future.set_exception(error)
        self._underway[future] = _Underway(tasks, before_s + n_rows * self._sweep.time_limit_s + _GRACE_S)

    def _batch(self, tasks: tuple[Task, ...]) -> Batch:
        sweep = self._sweep
        return Batch(__version__, sweep.folder.absolute(), tasks, sweep.n_seeds, sweep.engine, sweep.time_limit_s)

    def _receive(self) -> None:
        """Take what is done, or give up what takes too long."""
        give_up_s = max(each.give_up_s for each in self._underway.values())
        done, _ = wait(self._underway, max(0.0, give_up_s - time.monotonic()), FIRST_COMPLETED)
        records: list[tuple[str, bytes]] = []
        lost = [] if done else [(each, str(late(self._sweep.time_limit_s))) for each in self._underway.values()]
        for future in done:
            sent = self._underway.pop(future)
            try:
                finished = future.result()
            except SimdistError:  # of the worker as a whole, not of a row
                raise
            except (Exception, CancelledError) as error:
                lost.append((sent, _why(error)))
            else:
                records += finished.records
                self._learn(finished.seconds / len(sent.tasks))
        self._save(records)
        if lost:
            self._recover(lost)

    def _learn(self, task_s: float) -> None:
        self._task_s = task_s if not self._task_s else 0.8 * self._task_s + 0.2 * task_s

    def _recover(self, lost: list[tuple[_Underway, str]]) -> None:
        """Record a row that took its worker with it; try the others again, each alone."""
        others = [*self._underway.values()]
        self._underway.clear()
        self._workers.renew()
        self._probe()
        if len(lost) == 1 and not others and _is_one_row(lost[0][0]):
            (sent, why), *_ = lost
            self._save([_lost_row(row, why) for task in sent.tasks for row in task.rows])
        else:
            unfinished = [*(sent for sent, _ in lost), *others]
            self._queue.alone.extend(one for sent in unfinished for task in sent.tasks for one in _rows_alone(task))

    def _probe(self) -> None:
        """See that workers work at all; what they died of is then not a row's fault.

        Raises:
            RunError: They do not.
        """
        future = self._workers.executor.submit(evaluate, self._batch(()))
        try:
            future.result(timeout=_GRACE_S)
        except SimdistError:
            raise
        except (Exception, CancelledError) as error:
            what = type(error).__name__
            raise RunError(
                f"workers die, or do not answer within {_GRACE_S:g} s, before they have work ({what})"
            ) from None

    def _save(self, records: list[tuple[str, bytes]]) -> None:
        if records:
            self._store.append([line for _, line in records])
            self._n_new += len(records)
            self._n_done += len(records)
            self._n_failed += sum(b'"failed"' in line[:200] for _, line in records)
            self._report()

    def _report(self) -> None:
        if self._progress:
            self._progress(self._n_done, self._n_keys, self._n_failed)


def header(sweep: Sweep) -> dict[str, Any]:
    """Return the first line of a design: what all rows have in common."""
    return {
        "simdist": __version__,
        "sweep": sweep.name,
        "scenario": sweep.scenario.name,
        "columns": [each.column for each in sweep.fields],
        "has_cases": bool(sweep.cases),
        "baseline": sweep.baseline,
        "seeds": sweep.n_seeds,
        "engine": sweep.engine,
        "n_points": sweep.n_points,
    }


def _missing(tasks: list[Task], done: dict[str, bool]) -> Iterator[Task]:
    """Yield tasks with the rows that are not done; of equal rows, the first."""
    taken = set(done)
    for task in tasks:
        rows = tuple(row for row in task.rows if row.key not in taken)
        taken.update(row.key for row in rows)
        if rows:
            yield Task(task.point, task.tree, rows)


def _rows_alone(task: Task) -> Iterator[Task]:
    return (Task(task.point, task.tree, (row,)) for row in task.rows)


def _is_one_row(sent: _Underway) -> bool:
    return len(sent.tasks) == 1 and len(sent.tasks[0].rows) == 1


def _lost_row(row: RowKey, why: str) -> tuple[str, bytes]:
    return row.key, json.dumps({"key": row.key, **failure("RunError", why)}).encode()


def _why(error: BaseException) -> str:
    return f"its worker died ({type(error).__name__}): out of memory, or killed?"
