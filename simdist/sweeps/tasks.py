"""Work of a worker: measuring rows. It needs only this package and its arguments.

A row that cannot be measured becomes a record of its error; others are not touched. The same row gives the same bytes
on every machine, so it does not say when or where it was computed.
"""

import ctypes
import json
import math
import platform
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from simdist.engines.choose import Engine
from simdist.errors import RunError, ScenarioError, SimdistError
from simdist.runs.building import build, in_steps
from simdist.scenario import Scenario
from simdist.scenario.strict_yaml import path_text
from simdist.settings.base import FromFile
from simdist.studies import facets
from simdist.studies.comparison import open_step, steps_in
from simdist.studies.known_delays import Chances, chances_of, corrected
from simdist.studies.measuring import ScheduleTimes, measure
from simdist.studies.remarks import Remark, documents, remarks_of
from simdist.sweeps.definition import RowKey
from simdist.sweeps.keys import code_version, file_digest


@dataclass(frozen=True, slots=True)
class Task:
    """A point, and which rows of it are missing.

    Args:
        point: Its number, for messages.
        tree: The scenario as a file has it.
        rows: Rows to measure.
        remarked: Key of the point, if remarks on its scenario are missing; else empty.
    """

    point: int
    tree: Mapping[str, Any]
    rows: tuple[RowKey, ...]
    remarked: str = ""


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """Tasks that travel to a worker together.

    Args:
        version: Of simdist and its code; a worker of another one refuses.
        folder: Files in scenarios are relative to it.
        digests: Hashes of files when rows were named, by their names in scenarios.
        tasks: Tasks to do.
        n_seeds: Number of seeds of delays.
        engine: `auto` takes the fast engine wherever it is exact.
        time_limit_s: Seconds after which a row is given up.
    """

    version: str
    folder: Path
    digests: Mapping[str, str]
    tasks: tuple[Task, ...]
    n_seeds: int
    engine: Engine
    time_limit_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """Stored result of a row.

    Args:
        line: JSON.
        failed: Whether it says why there is no measurement.
    """

    line: bytes
    failed: bool


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    """Results of a batch.

    Args:
        records: Of all its rows.
        seconds: How long it took.
        remarks: Records of the remarks on its points, JSON.
    """

    records: tuple[Record, ...]
    seconds: float
    remarks: tuple[bytes, ...] = ()


def evaluate(batch: TaskBatch) -> FinishedBatch:
    """Measure all rows of a batch; a row that fails becomes a record of its error.

    Raises:
        RunError: This is another version of simdist than the one that asks, or a file is another one.
    """
    if batch.version != code_version():
        raise RunError(f"a worker has simdist {code_version()}; this is {batch.version}: install the same everywhere")
    began_s = time.perf_counter()
    _check_files(batch)
    records: list[Record] = []
    remarks: list[bytes] = []
    for task in batch.tasks:
        scenario = _read(task.tree, batch)
        records += _records(task, scenario, batch)
        remarks += [remarks_record(task.remarked, *_remarks(scenario, batch))] if task.remarked else []
    _check_files(batch)  # what was edited meanwhile is in the records
    return FinishedBatch(tuple(records), time.perf_counter() - began_s, tuple(remarks))


def _check_files(batch: TaskBatch) -> None:
    for name, digest in batch.digests.items():
        path = batch.folder / name
        if file_digest(path) != digest:
            raise RunError(
                f"{path}: has changed since the sweep began, or is another file on {platform.node()}, where a worker "
                "is: see that it is the same everywhere, and run the sweep again; what is done is saved"
            )


def _remarks(scenario: Scenario | None, batch: TaskBatch) -> tuple[tuple[Remark, ...], Chances]:
    """Return the remarks on the scenario of a point; none on one that is wrong, which its rows tell."""
    if scenario is None:
        return (), Chances()
    try:
        with _limited(batch.time_limit_s):
            return (*remarks_of(scenario), *open_step(scenario)), chances_of(scenario, batch.n_seeds)
    except Exception:  # rows tell it
        return (), Chances()


def _records(task: Task, scenario: Scenario | None, batch: TaskBatch) -> Iterator[Record]:
    for row in task.rows:
        try:
            with _limited(batch.time_limit_s):
                found = _measure(task, row, scenario, batch)
        except SimdistError as error:
            found = failure(type(error).__name__, str(error))
        except MemoryError as error:
            found = failure("RunError", f"not enough memory: {error}; vary fewer steps, ranks or samples")
        except (Exception, SystemExit) as error:  # a defect of one row must not take thousands of others with it
            found = failure(type(error).__name__, str(error) or "no message")
        yield measurement_record(row.key, found)


def _measure(task: Task, row: RowKey, scenario: Scenario | None, batch: TaskBatch) -> dict[str, object]:
    one, position = (scenario, row.position) if scenario else (alone(task.tree, row, batch.folder), 0)
    schedule = one.schedules[position]
    its = in_steps(one, schedule)
    built = build(its, schedule)
    measured = measure(its, built, n_seeds=batch.n_seeds, engine=batch.engine, facets=facets.FACETS)
    measured = corrected(its, built, measured)
    steps = partial(steps_in, schedule=schedule, n_seeds=batch.n_seeds)
    for facet in facets.FACETS:
        if (value := facet.measure_built(its, built, n_seeds=batch.n_seeds, steps_in=steps)) is not None:
            measured = replace(measured, facets=measured.facets.changed(facet, value))
    return record(measured)


def record(measured: ScheduleTimes) -> dict[str, object]:
    """Return the stored record of a measured row: seconds per step with every seed, and the means of its parts.

    Columns:
        key, schedule (str): As in the design.
        engine (str): `fast` or `des`.
        step_s (list): Step time (float) with each seed.
        run_s (list): Only where step_s is corrected for rare or heavy delays: as simulated (float).
        unseen_s (float or null): Only with rare delays: half the least width of the interval of step_s.
        compute_s, comm_s, wait_s, io_s, host_s (float): States.
        gradients_used (float): Only below 1: share of batches used.
        late (object): Ranks too late for 90 % of the updates, if any: rank -> that share (float).
        staging_s (float): Only with a data set: time of staging.
        epochs_s (list): Only with a data set: time of each epoch (float), averaged over seeds.
        memory (object): Only of a sharded or too large model: `nbytes` (int), the peak on a device; `of` (object), the
            same by use; `limit_nbytes` (int or null); `not_counted` (str).
        goodput, ettr (float): Only with failures: shares of the time of the whole job.
        goodput_range90 (list): Only with uncertain rates or recoveries: `[low, high]`, the 90 % interval.
        failed, error (str): Kind of the error, and its message.
        crc32 (int): CRC-32 (zlib) of the line before `, "crc32"`, with `}` appended.

    Raises:
        ScenarioError: A step takes no time, or for ever.
    """
    run_s = measured.as_simulated.step_s.tolist()
    if not all(0 < each < math.inf for each in run_s):
        raise ScenarioError(f"{measured.label}: a step takes {run_s[0]:g} s, so nothing can be compared with it")
    return {
        "schedule": measured.label,
        "engine": measured.engine,
        "step_s": measured.step_s.tolist(),
        **({} if measured.uncorrected is None else {"run_s": run_s}),
        **({"unseen_s": measured.unseen_s if math.isfinite(measured.unseen_s) else None} if measured.unseen_s else {}),
        **{f"{state}_s": float(seconds.mean()) for state, seconds in measured.states_s.items()},
        **measured.facets.kept(),
    }


def measurement_record(key: str, found: dict[str, object]) -> Record:
    """Return a measurement, or the failure of one, as it is kept."""
    return Record(json.dumps({"key": key, **found}, allow_nan=False).encode(), "failed" in found)


def remarks_record(key: str, remarks: Iterable[Remark], chances: Chances) -> bytes:
    """Return the remarks on the scenario of a point as they are stored.

    Columns:
        key (str): Hash of the keys of its rows.
        remarks (list): "A remark".
        rare, tails (list): "A remark", on delays that are rarer than runs, and on tails without a variance.
        crc32 (int): As of rows.
    """
    return json.dumps({"key": key, "remarks": documents(remarks), **chances.document()}).encode()


def failure(kind: str, message: str) -> dict[str, object]:
    """Return the stored record of a failed row."""
    return {"failed": kind, "error": message}


def _read(tree: Mapping[str, Any], batch: TaskBatch) -> Scenario | None:
    """Return the scenario of a point, or None if it is wrong as a whole: then each schedule is tried alone.

    The error is then found, and told, once more.
    """
    try:
        with _limited(batch.time_limit_s):
            return Scenario.model_validate({"name": "point", **tree}, context=FromFile(batch.folder))
    except (Exception, SystemExit):
        return None


def alone(tree: Mapping[str, Any], row: RowKey, folder: Path) -> Scenario:
    """Return the scenario of a point with one schedule.

    Raises:
        ScenarioError: It is wrong; a line for every problem.
    """
    schedules = tree.get("schedules")
    one = schedules[row.position : row.position + 1] if isinstance(schedules, list) else schedules
    try:
        return Scenario.model_validate({"name": "point", **tree, "schedules": one}, context=FromFile(folder))
    except ValidationError as error:
        lines = []
        for each in error.errors(include_url=False, include_context=False, include_input=False):
            loc = each["loc"]
            if loc[:2] == ("schedules", 0):
                loc = ("schedules", row.position, *loc[2:])
            lines.append(f"{path_text(loc)}: {each['msg']}")
        raise ScenarioError("\n".join(lines)) from None


def late(limit_s: float) -> RunError:
    """Return the error of a row that takes too long."""
    return RunError(f"not done after {limit_s:g} s: vary fewer steps, ranks or seeds, or write a longer time_limit")


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Interrupt longer work: by a signal where there are any, in threads as Python can."""
    in_main = threading.current_thread() is threading.main_thread()
    with _alarm(limit_s) if in_main and hasattr(signal, "setitimer") else _interrupted(limit_s):
        yield


@contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise late(limit_s)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _timer_s(limit_s))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Late(BaseException):
    """Raised inside a thread by another one."""


@contextmanager
def _interrupted(limit_s: float) -> Iterator[None]:
    """Raise an exception in this thread from a timer's.

    Source:
        `PyThreadState_SetAsyncExc` in the reference of Python's C interface.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    is_over = False

    def ring() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Late))

    timer = threading.Timer(_timer_s(limit_s), ring)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                is_over = True
            timer.cancel()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that rang, but has not come yet
    except _Late:
        raise late(limit_s) from None


def _timer_s(limit_s: float) -> float:
    """Return seconds that every timer takes; 0 would switch one off."""
    return min(max(limit_s, 1e-6), threading.TIMEOUT_MAX)
