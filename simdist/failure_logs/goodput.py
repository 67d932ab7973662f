"""What records of ml-goodput-measurement say about failures: a line of JSON each, or an array, as of Cloud Logging.

A job that starts again without a record of its end was interrupted after its last step. The records do not say when, so
it is taken to have been when that step would have ended; nor do they say by what, nor on how many accelerators. So
rates are per job.

An elastic job that loses a slice goes on without a new start. Its recorder notes when it begins to wait for slices,
which is an interruption unless the job grows. How long it waits is no part of a recovery here.

Names of the parts here and there:

    schedule   infrastructure recovery: the end of the last step to the job's start; detection is in it
    start      the job's start to the initialization of the accelerators
    connect    initialization of the accelerators
    load       restore of the checkpoint
    warm_up    the rest of the training preparation, the first loading of data, and what the first step takes longer

Source:
    AI-Hypercomputer/ml-goodput-measurement, ml_goodput_measurement/src/goodput.py (keys of records), and
    checkpoint_badput_calculator.py (of checkpoints, which orbax writes), goodput_elastic.py (of elastic jobs).
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from simdist.errors import ScenarioError
from simdist.failure_logs.records import Exposure, Interruption, LoggedFailures
from simdist.settings.base import plural, shown

_START = "job_start_time"
_END = "job_end_time"
_STEP = "step_start_time"
_SPANS = ("tpu_init", "training_prep", "data_loading")
_WAIT = "elastic_wait_start_time"
_GROWTH = "scale_up"  # in the type of a wait
_RESTORES = ("restore", "emergency_restore")
_RESTORE_S = "checkpoint_manager_duration_secs"
_MOMENTS = {
    _START,
    _END,
    _STEP,
    *(
        f"{span}_{end}_time"
        for span in (*_SPANS, "custom_badput_event", "elastic_wait", "elastic_reinit")
        for end in ("start", "end")
    ),
    "checkpoint_manager_start_time",
    "checkpoint_manager_blocking_start_time",
    "elastic_slice_counts_timestamp",
}
_MOST_S = 1e11
_PARTS = ("schedule", "lasts", "start", "connect", "load", "warm_up")
_SOURCES = {
    "schedule": "end of the last step to the next start of the job; detection is in it",
    "lasts": "end of the last step before a preemption to the next start of the job",
    "start": "start of the job to tpu_init_start_time",
    "connect": "tpu_init",
    "load": f"{_RESTORE_S} of restores",
    "warm_up": "training_prep without the restore, the first data_loading, and what the first step takes longer",
}


@dataclass(frozen=True, slots=True)
class GoodputRecord:
    """One record.

    Args:
        job: Name of the job.
        at_s: Its time.
        values: All keys.
    """

    job: str
    at_s: float
    values: Mapping[str, object]

    def seconds(self, key: str) -> float | None:
        """Return a time; None if it is absent."""
        value = self.values.get(key)
        return float(value) if isinstance(value, int | float) else None


@dataclass(slots=True)
class _Attempt:
    """One start of a job, until the next one."""

    begin_s: float
    last_s: float
    steps: dict[int, float] = field(default_factory=dict)
    moments: dict[str, float] = field(default_factory=dict)
    restore_s: float | None = None
    lost_slices_s: list[float] = field(default_factory=list)
    has_ended: bool = False
    is_preempted: bool = False

    @property
    def step_s(self) -> float | None:
        """A typical step, without the first one; None of fewer than three steps."""
        times = [after - at for at, after in pairwise(self.steps.values())]
        return median(times[1:]) if len(times) > 1 else None

    def span_s(self, name: str) -> float | None:
        """Return how long a part took; None if the records do not say it."""
        begin_s, end_s = (self.moments.get(f"{name}_{end}_time") for end in ("start", "end"))
        return None if begin_s is None or end_s is None or end_s < begin_s else end_s - begin_s


def is_goodput_record(values: object) -> bool:
    """Tell whether an object of JSON is a record, or a log entry around one."""
    payload = _payload(values)
    keys = _MOMENTS | {"checkpointer_start_time"}
    return isinstance(payload, dict) and "job_name" in payload and not keys.isdisjoint(payload)


def _payload(values: object) -> object:
    return values.get("jsonPayload", values) if isinstance(values, dict) else values


def parse_goodput(text: str, name: str) -> list[GoodputRecord]:
    """Return the records of a file.

    Args:
        text: Of the file.
        name: Of the file, for errors.

    Raises:
        ScenarioError: A line is no record, or a time is none.
    """
    return [each for where, values in _objects(text, name) if (each := _record(values, where)) is not None]


def _objects(text: str, name: str) -> Iterator[tuple[str, object]]:
    """Yield where an object is, and the object."""
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScenarioError(f"{name}: is no JSON: {error}") from None
        yield from ((f"{name}: [{number}]", each) for number, each in enumerate(entries))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield f"{name}:{number}", json.loads(line)
        except (ValueError, RecursionError):
            raise ScenarioError(
                f"{name}:{number}: {shown(line[:80])} is no JSON: write one record of ml-goodput-measurement per line"
            ) from None


def _record(values: object, where: str) -> GoodputRecord | None:
    """Return a record; None of one without a time, such as a restore."""
    payload = _payload(values)
    if not isinstance(payload, dict) or not isinstance(payload.get("job_name"), str):
        raise ScenarioError(f'{where}: has no job_name: write a record such as {{"job_name": "a", "{_START}": 1.7e9}}')
    for key in _MOMENTS & payload.keys():
        value = payload[key]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_S
        ):
            raise ScenarioError(f"{where}: {key} {shown(value)}: write seconds since 1970, such as 1704070800.0")
    at_s = [float(payload[key]) for key in sorted(_MOMENTS & payload.keys()) if payload[key] is not None]
    if _STEP in payload:
        step = payload.get("step_count")
        if isinstance(step, bool) or not isinstance(step, int | float) or step % 1:
            raise ScenarioError(f"{where}: step_count {shown(step)}: write the number of a step")
    return GoodputRecord(payload["job_name"], min(at_s), payload) if at_s else None


def goodput_failures(records: Sequence[GoodputRecord], name: str) -> LoggedFailures:
    """Return what records say.

    Args:
        records: Of all files, in any order.
        name: Of the files.

    Raises:
        ScenarioError: There is no start of a job.
    """
    jobs: dict[str, list[GoodputRecord]] = {}
    for each in sorted(records, key=lambda record: record.at_s):
        jobs.setdefault(each.job, []).append(each)
    runs = {job: _attempts(of_job) for job, of_job in jobs.items()}
    attempts = [each for run in runs.values() for each in run]
    if not attempts:
        raise ScenarioError(f"{name}: has no {_START}: give all records of a job")
    interruptions: list[Interruption] = []
    parts: dict[str, list[float]] = {part: [] for part in _PARTS}
    repeated: list[int] = []
    ends: Counter[str] = Counter()
    for job, run in runs.items():
        lost_s = [at_s for attempt in run for at_s in attempt.lost_slices_s]
        interruptions += [Interruption(at_s, "lost slice", "process", jobs=frozenset([job])) for at_s in lost_s]
        for attempt, following in pairwise(run):
            end = _end(attempt)
            if end:
                ends[end] += 1
                continue
            interruptions.append(_interruption(attempt, following, job))
            for part, seconds in _recovery(attempt, following):
                parts["lasts" if part == "schedule" and attempt.is_preempted else part].append(seconds)
            if following.steps:
                repeated.append(max(0, max(attempt.steps) - min(following.steps) + 1))
    n_before = sum(_is_before_start(of_job) for of_job in jobs.values())
    return LoggedFailures(
        name,
        "ml-goodput-measurement",
        Exposure(math.fsum(map(_job_s, runs.values()))),
        tuple(sorted(interruptions, key=lambda each: each.at_s or 0.0)),
        {"interruption": "process"},
        ends,
        {part: tuple(seconds) for part, seconds in parts.items() if seconds},
        _SOURCES,
        tuple(_notes(repeated, n_before)),
    )


def _attempts(records: Sequence[GoodputRecord]) -> list[_Attempt]:
    """Return the starts of a job. Records before the first one are of an attempt whose start is not in the log."""
    attempts: list[_Attempt] = []
    for record in records:
        begin_s = record.seconds(_START)
        if begin_s is not None:
            attempts.append(_Attempt(begin_s, begin_s))
        if attempts:
            _note(attempts[-1], record)
    return attempts


def _note(attempt: _Attempt, record: GoodputRecord) -> None:
    attempt.last_s = max(attempt.last_s, record.at_s)
    values = record.values
    step_s = record.seconds(_STEP)
    if step_s is not None:
        attempt.steps.setdefault(int(float(str(values["step_count"]))), step_s)
    wait_s = record.seconds(_WAIT)
    if wait_s is not None and _GROWTH not in str(values.get("elastic_wait_event_type", "")).lower():
        attempt.lost_slices_s.append(wait_s)
    if record.seconds(_END) is not None:
        attempt.has_ended = True
    for key in _MOMENTS & values.keys():
        at_s = record.seconds(key)
        if at_s is not None:
            attempt.moments.setdefault(key, at_s)
    if values.get("event_type") in _RESTORES and attempt.restore_s is None:
        attempt.restore_s = record.seconds(_RESTORE_S)
    attempt.is_preempted = attempt.is_preempted or values.get("reached_preemption") is True


def _is_before_start(records: Sequence[GoodputRecord]) -> bool:
    return _START not in records[0].values


def _end(attempt: _Attempt) -> str:
    """Return what the end of an attempt is, before another one, if it is no interruption."""
    if attempt.has_ended:
        return "ended, then started again"
    return "" if attempt.steps else "failed before the first step"


def _stopped_s(attempt: _Attempt, following: _Attempt) -> float:
    """Return when an attempt was interrupted: when its last step would have ended, but not after the next start."""
    return min(following.begin_s, max(attempt.steps.values()) + (attempt.step_s or 0.0))


def _interruption(attempt: _Attempt, following: _Attempt, job: str) -> Interruption:
    at_s = _stopped_s(attempt, following)
    if attempt.is_preempted:
        return Interruption(at_s, "preemption", "planned", jobs=frozenset([job]))
    return Interruption(at_s, "interruption", "process", jobs=frozenset([job]))


def _job_s(run: Sequence[_Attempt]) -> float:
    """Return how long the attempts of a job ran, as far as the records say it."""
    ends_s = [_stopped_s(*pair) if not _end(pair[0]) else pair[0].last_s for pair in pairwise(run)]
    ends_s += [run[-1].last_s] if run else []
    return math.fsum(max(0.0, end_s - each.begin_s) for each, end_s in zip(run, ends_s, strict=True))


def _recovery(attempt: _Attempt, following: _Attempt) -> Iterator[tuple[str, float]]:
    """Yield the parts of a recovery that the records say, each with its seconds."""
    yield "schedule", following.begin_s - _stopped_s(attempt, following)
    init_s = following.moments.get("tpu_init_start_time")
    if init_s is not None and init_s >= following.begin_s:
        yield "start", init_s - following.begin_s
    connect_s = following.span_s("tpu_init")
    if connect_s is not None:
        yield "connect", connect_s
    if following.restore_s is not None:
        yield "load", following.restore_s
    prepare_s = following.span_s("training_prep")
    times = [after - at for at, after in pairwise(following.steps.values())]
    if prepare_s is not None and following.step_s is not None:
        longer_s = max(0.0, times[0] - following.step_s)
        yield (
            "warm_up",
            max(0.0, prepare_s - (following.restore_s or 0.0)) + longer_s + (following.span_s("data_loading") or 0.0),
        )


def _notes(repeated: Sequence[int], n_before: int) -> Iterator[str]:
    yield "The records do not say how many accelerators a job had: rates are per job of this size."
    if repeated:
        yield f"An interruption repeated {median(repeated):g} steps (median of {len(repeated)})."
    if n_before:
        yield f"Records of {n_before} {plural(n_before, 'job')} before their first start are not counted."
