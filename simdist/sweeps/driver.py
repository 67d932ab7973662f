"""Computes the missing rows of a sweep, and survives failures of workers.

Rows go out in batches that take about `_BATCH_S`: long enough that sending them costs nothing, short enough that little
is lost and all workers end together. Points become scenarios only then: a million of them would not fit into memory.

A row that raises, or takes too long, is recorded by the worker (see `simdist.sweeps.tasks`). A row that kills its
worker, or hangs where nothing interrupts it, takes its batch with it, perhaps others, too. When all others are back,
the rows of batches that were lost go out once more, each with nothing else under way, so that it is certain which one
did it; that one is recorded as failed.

Columns:
    point, position (int): Number of the point, place of the schedule.
    case (str): Its case, or empty.
    values, written (list): Varied values, in SI units and as in the sweep.
    schedule, kind (str): Label and kind.
    key (str): Hash of everything that determines the row's numbers, hexadecimal.
"""

import itertools
import json
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from simdist import __version__
from simdist.errors import RunError, ScenarioError, SimdistError
from simdist.jobs.store import Store, read_remarks
from simdist.jobs.workers import GUARD, LocalPool, Workers
from simdist.machine import n_cores
from simdist.scenario.recordings import kept
from simdist.studies.known_delays import Chances
from simdist.studies.remarks import Remark, documents
from simdist.studies.uncertainty import quantities
from simdist.sweeps.definition import Point, RowKey, Sweep
from simdist.sweeps.fields import ARRAYS, kept_choice
from simdist.sweeps.keys import code_version, key_of_point
from simdist.sweeps.table import collected
from simdist.sweeps.tasks import (
    FinishedBatch,
    Record,
    Task,
    TaskBatch,
    evaluate,
    failure,
    late,
    measurement_record,
    remarks_record,
)

_BATCH_S = 0.5
_MAX_BATCH = 2_000  # points
_MAX_LATE = 4  # rows of a batch that may each take as long as a row may
_GRACE_S = 60.0  # for sending and receiving, beyond the limit of each row
_START_S = 300.0  # for a process that starts; some file systems are slow when many do
_TICK_S = 5.0
_REPORT_S = 0.2


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is.

    Args:
        what: `points` are listed first, then `rows` are computed; those that are equal count once.
        n_done: How many are there.
        n_all: How many there will be.
        n_new: Rows that were computed now.
        n_failed: Rows of those that are there that failed.
    """

    what: Literal["points", "rows"]
    n_done: int
    n_all: int
    n_new: int = 0
    n_failed: int = 0


#: Called now and then, at least every few seconds while workers are waited for.
_Progress = Callable[[SweepProgress], None]


@dataclass(frozen=True, slots=True, repr=False)
class Swept:
    """Outcome of a sweep.

    Args:
        name: Name of the sweep.
        folder: Where its rows are.
        n_points: Points of the sweep.
        n_rows: Rows of the sweep: a schedule of a point each. Rows that are equal are computed once.
        n_new: Rows that were computed now.
        n_failed: Rows that failed, now or before.
        damaged: Lines of the rows that were there, from 1, which were torn or damaged and left out.
        remarks: On the scenarios of its points. `simdist.sweeps.read_results` also has those on results.
    """

    name: str
    folder: Path
    n_points: int
    n_rows: int
    n_new: int
    n_failed: int
    damaged: tuple[int, ...] = ()
    remarks: tuple[Remark, ...] = ()

    def document(self) -> dict[str, object]:
        """Return the outcome as JSON.

        Columns:
            sweep, path (str): Name, and folder of the rows.
            points, rows (int): Combinations of varied values, and rows: points x schedules.
            new, failed (int): Rows now computed, and rows that failed.
            runs (int): Only with `--plans`: run directories written.
            remarks (list): "A remark".
        """
        found = {"sweep": self.name, **self._counts(), "path": str(self.folder)}
        return found | {"remarks": documents(self.remarks)}

    def text(self) -> str:
        """Return the outcome, and what shows its rows."""
        summary = ", ".join(f"{n:,} {name}" for name, n in self._counts().items())
        return f"{self.name}: {summary}\nnext: simdist results {self.folder}"

    def _counts(self) -> dict[str, int]:
        return {"points": self.n_points, "rows": self.n_rows, "new": self.n_new, "failed": self.n_failed}

    def __repr__(self) -> str:
        return self.text()


def sweep(
    what: Sweep,
    folder: str | Path,
    *,
    workers: Workers | None = None,
    retry: bool = False,
    progress: _Progress | None = None,
    grace_s: float = _GRACE_S,
) -> Swept:
    """Compute the rows of a sweep that are not in its folder yet.

    Args:
        what: The sweep to compute.
        folder: Where results are appended; see `simdist.jobs.store`.
        workers: Where to compute; a process for each core if None: each imports the script that calls this, which
            must then do so under `if __name__ == "__main__":`. The caller closes those that it gives.
        retry: Compute rows again that failed.
        progress: See `_Progress`.
        grace_s: Seconds beyond the time limit of a row after which its worker is taken to hang.

    Raises:
        ScenarioError: A point of the sweep is no scenario.
        RunError: The folder cannot be written or is in use, all workers are lost, or a file that
            scenarios name changes meanwhile. Finished rows stay.
    """
    if workers is None:
        with LocalPool(n_cores()) as pool:
            return sweep(what, folder, workers=pool, retry=retry, progress=progress, grace_s=grace_s)
    with Store(Path(folder)) as store:
        return _Driver(what, store, workers, progress, grace_s).run(retry=retry)


@dataclass(frozen=True, slots=True)
class _Design:
    """The rows of a sweep in their order: their keys, how many each point has, and the key of each point."""

    keys: list[str]
    n_of_points: "array[int]"
    of_points: list[str]


@dataclass(frozen=True, slots=True)
class _Underway:
    """A batch that a worker has; `is_alone` if no other was under way when it was sent."""

    tasks: tuple[Task, ...]
    is_alone: bool
    sent_s: float
    limit_s: float


@final
class _Driver:
    def __init__(
        self, sweep: Sweep, store: Store, workers: Workers, progress: _Progress | None, grace_s: float
    ) -> None:
        self._sweep = sweep
        self._store = store
        self._workers = workers
        self._progress = progress
        self._grace_s = grace_s
        self._tasks: Iterator[Task] = iter(())
        self._alone: deque[Task] = deque()
        self._underway: dict[Future[FinishedBatch], _Underway] = {}
        self._late: set[Future[FinishedBatch]] = set()
        self._task_s = 0.0  # a running mean; 0 until the first batch is back
        self._n_points_left = sweep.n_points
        self._rows = SweepProgress("rows", 0, 0)

    def run(self, *, retry: bool) -> Swept:
        damaged: list[int] = []
        done = {key: failed for key, failed in self._store.done(damaged).items() if not (retry and failed)}
        design = _Design([], array("L"), [])
        self._store.design(self._lines(design))
        keys = set(design.keys)
        n_done = sum(key in done for key in keys)
        self._rows = SweepProgress("rows", n_done, len(keys), n_failed=sum(done.get(key, False) for key in keys))
        self._remarks = read_remarks(self._store.folder)
        self._tasks = self._missing(design, keys - done.keys(), {*design.of_points} - self._remarks.keys())
        self._report()
        try:
            while self._send():
                self._receive()
        finally:
            for future in self._underway:
                future.cancel()
        self._store.arrange(design.keys, design.of_points)
        of_points = (
            (number, self._remarks.get(key, {}).get("remarks", ())) for number, key in enumerate(design.of_points)
        )
        return Swept(
            self._sweep.name,
            self._store.folder,
            self._sweep.n_points,
            len(design.keys),
            self._rows.n_new,
            self._rows.n_failed,
            tuple(damaged),
            (*collected(of_points), *_whole(self._sweep)),
        )

    def _lines(self, design: _Design) -> Iterator[dict[str, Any]]:
        """Yield the lines of the design, and note which rows there are."""
        yield _header(self._sweep)
        reported_s = time.monotonic()
        for point in self._sweep.points():
            rows = self._sweep.keys(self._tree(point))
            design.keys.extend(row.key for row in rows)
            design.n_of_points.append(len(rows))
            design.of_points.append(key_of_point([row.key for row in rows]))
            choices = [choice and kept_choice(choice, self._store.folder) for choice in point.choices]
            of_point = {
                "point": point.number,
                "case": point.case,
                "values": [choice.number if choice else None for choice in choices],
                "written": [choice.written if choice else None for choice in choices],
            }
            for row in rows:
                of_row = {"position": row.position, "schedule": row.label, "kind": row.kind, "key": row.key}
                yield {**of_point, **of_row}
            if self._progress and time.monotonic() - reported_s > _REPORT_S:
                reported_s = time.monotonic()
                self._progress(SweepProgress("points", point.number + 1, self._sweep.n_points))

    def _missing(self, design: _Design, missing: set[str], without_remarks: set[str]) -> Iterator[Task]:
        """Yield tasks with the rows and remarks that are missing; of equal rows, the first."""
        first = 0
        arrays = self._store.folder.absolute() / ARRAYS
        of_points = zip(self._sweep.points(), design.n_of_points, design.of_points, strict=True)
        for point, n_rows, key in of_points:
            if not (missing or without_remarks):
                return
            keys = design.keys[first : first + n_rows]
            first += n_rows
            self._n_points_left = self._sweep.n_points - point.number - 1
            if missing.isdisjoint(keys) and key not in without_remarks:
                continue
            tree = self._tree(point)
            rows: list[RowKey] = []
            for row in self._sweep.keys(tree):
                if row.key in missing:
                    missing.remove(row.key)
                    rows.append(row)
            there = kept(tree, arrays, name=str(arrays))
            yield Task(point.number, there, tuple(rows), key if key in without_remarks else "")
            without_remarks.discard(key)

    def _tree(self, point: Point) -> dict[str, Any]:
        try:
            return self._sweep.tree_of(point)
        except ValueError as error:
            raise ScenarioError(f"{self._sweep.name}: point {point.number}: {error}") from None

    def _send(self) -> bool:
        """Keep all workers busy, or send one row if it is to go alone; return whether anything is under way."""
        if self._alone:
            if not self._underway:
                self._probe()
                self._submit((self._alone.popleft(),), is_alone=True)
            return True
        n_underway = self._workers.n_underway
        while len(self._underway) < n_underway:
            tasks = tuple(itertools.islice(self._tasks, self._batch_size(n_underway)))
            if not tasks:
                break
            self._submit(tasks, is_alone=False)
        return bool(self._underway)

    def _batch_size(self, n_underway: int) -> int:
        """Return how many tasks take about `_BATCH_S`, but so few at the end that all workers have some."""
        wanted = int(_BATCH_S / self._task_s) if self._task_s else 1
        fair = -(-self._n_points_left // n_underway)
        return max(1, min(wanted, fair, _MAX_BATCH))

    def _submit(self, tasks: tuple[Task, ...], *, is_alone: bool) -> None:
        future = self._submitted(tasks)
        self._underway[future] = _Underway(tasks, is_alone, time.monotonic(), self._limit_s(tasks))

    def _submitted(self, tasks: tuple[Task, ...]) -> Future[FinishedBatch]:
        sweep = self._sweep
        digests = sweep.digests(task.tree for task in tasks)
        folder = sweep.folder.absolute()
        limit_s = sweep.time_limit_s
        batch = TaskBatch(code_version(), folder, digests, tasks, sweep.n_seeds, sweep.engine, limit_s)
        try:
            return self._workers.executor.submit(evaluate, batch)
        except SimdistError:
            raise
        except (OSError, RuntimeError) as error:  # the executor is shut down, or its connection
            raise _lost() from error

    def _limit_s(self, tasks: tuple[Task, ...]) -> float:
        """Return how long a batch may take: one other may be worked on before it."""
        if self._workers.may_wait:
            return math.inf
        n_rows = min(sum(len(task.rows) for task in tasks), _MAX_LATE)
        n_before = _MAX_LATE if self._underway else 0
        return (n_rows + n_before) * self._sweep.time_limit_s + self._grace_s

    def _give_up_s(self, future: Future[FinishedBatch]) -> float:
        """Return when a batch is late; the time in which its process starts is no fault of its rows."""
        sent = self._underway[future]
        up_s = self._workers.up_s(future)
        began_s = sent.sent_s + _START_S if up_s is None else max(sent.sent_s, up_s)
        return began_s + sent.limit_s

    def _receive(self) -> None:
        """Receive finished batches; end workers of batches that take too long."""
        ends_s = (self._give_up_s(future) for future in self._underway if future not in self._late)
        left_s = min(ends_s, default=math.inf) - time.monotonic()
        done, _ = wait(self._underway, min(max(left_s, 0.0), _TICK_S), FIRST_COMPLETED)
        records: list[Record] = []
        remarks: list[bytes] = []
        for future in done:
            finished = self._taken(future, self._underway.pop(future))
            records += finished.records
            remarks += finished.remarks
        self._save(records)
        if remarks:
            self._store.append_remarks(remarks)
            self._remarks.update((each["key"], each) for each in map(json.loads, remarks))
        self._report()
        for future in self._underway:
            if future not in self._late and self._give_up_s(future) <= time.monotonic():
                self._late.add(future)
                self._workers.end(future)

    def _taken(self, future: Future[FinishedBatch], sent: _Underway) -> FinishedBatch:
        """Return what a batch gave, also of a row that killed its worker; other lost rows are queued."""
        try:
            finished = future.result()
        except SimdistError:  # of the worker as a whole, not of a row
            raise
        except CancelledError:
            raise _lost() from None
        except (Exception, SystemExit) as error:
            why = str(late(self._sweep.time_limit_s)) if future in self._late else _why(error)
        else:
            self._learn(finished.seconds / len(sent.tasks))
            return finished
        finally:
            self._late.discard(future)
        if sent.is_alone:
            failed = (measurement_record(row.key, failure("RunError", why)) for task in sent.tasks for row in task.rows)
            remarks = (remarks_record(task.remarked, (), Chances()) for task in sent.tasks if task.remarked)
            return FinishedBatch(tuple(failed), 0.0, tuple(remarks))
        for task in sent.tasks:
            self._alone.extend(Task(task.point, task.tree, (row,)) for row in task.rows)
            self._alone.extend([replace(task, rows=())] if task.remarked else [])
        return FinishedBatch((), 0.0)

    def _learn(self, task_s: float) -> None:
        self._task_s = task_s if not self._task_s else 0.8 * self._task_s + 0.2 * task_s

    def _probe(self) -> None:
        """Check that workers work at all, so that their failures are not blamed on rows."""
        future = self._submitted(())
        try:
            future.result(timeout=None if self._workers.may_wait else _START_S)
        except SimdistError:
            raise
        except CancelledError:
            raise _lost() from None
        except TimeoutError:
            raise RunError(f"workers do not answer within {_START_S:g} s, before they have work") from None
        except (Exception, SystemExit) as error:
            broken = f"what they say stands above; in a script, {GUARD}: each of them imports it"
            why = broken if isinstance(error, BrokenProcessPool) else _why(error)
            raise RunError(f"workers fail before they have work: {why}") from None

    def _save(self, records: list[Record]) -> None:
        if records:
            self._store.append([record.line for record in records])
            self._rows = replace(
                self._rows,
                n_new=self._rows.n_new + len(records),
                n_done=self._rows.n_done + len(records),
                n_failed=self._rows.n_failed + sum(record.failed for record in records),
            )

    def _report(self) -> None:
        if self._progress:
            self._progress(self._rows)


def _header(sweep: Sweep) -> dict[str, Any]:
    """Return the first line of a design, common to all rows.

    Columns:
        simdist (str): Version.
        sweep, scenario (str): Names.
        columns (list): Varied fields (str), in the order of `values`.
        has_cases (bool): The sweep has cases.
        baseline (str): Label or kind.
        seeds (int): Seeds of each row.
        engine (str): `auto`, `fast` or `des`.
        sampling (str): `grid`, `random` or `sobol`.
        n_points (int): Points.
        remarks (list): "A remark", on the sweep as a whole.
    """
    return {
        "simdist": __version__,
        "sweep": sweep.name,
        "scenario": sweep.scenario.name,
        "columns": [each.column for each in sweep.fields],
        "has_cases": bool(sweep.cases),
        "baseline": sweep.baseline,
        "seeds": sweep.n_seeds,
        "engine": sweep.engine,
        "sampling": sweep.sampling.kind,
        "n_points": sweep.n_points,
        "remarks": documents(_whole(sweep)),
    }


def _whole(sweep: Sweep) -> list[Remark]:
    """Return the remarks on a sweep as a whole."""
    if not (sweep.scenario.is_of_machines or quantities(sweep.scenario)):
        return []
    text = "intervals are of seeds only: `simdist compare` also shows what uncertain values and errors leave open"
    return [Remark("assumption", text, "uncertain")]


def _lost() -> RunError:
    return RunError("the connection to the workers is lost; what is done is saved: run it again to go on")


def _why(error: BaseException) -> str:
    died = isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker"  # the latter is Dask's
    text = "out of memory, or killed?" if died else str(error)
    return f"its worker {'died' if died else 'failed'} ({type(error).__name__}): {text}"
