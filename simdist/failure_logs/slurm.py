"""What the jobs of Slurm say about failures.

NODE_FAIL, FAILED and OUT_OF_MEMORY are interruptions, and PREEMPTED is a planned one. TIMEOUT and DEADLINE depend on
the job's limit, and CANCELLED is somebody's wish: they are not counted. A job that failed in its first minute did not
train yet. If it was started again after it had failed, that was a try which failed.

`sacct --starttime` lists a job that began before that time with its whole length, if it still ran then. If it had
failed before, it would not be in the list. So only its time after the log's begin counts (delayed entry). The begin is
known if the command stands above the table, or if jobs have the same first start: `--truncate` writes the begin there.
Else it is not known where several jobs ran at once: then all before the end of the first job is left out.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from simdist.errors import ScenarioError
from simdist.failure_logs.records import (
    TRAINS_AFTER_S,
    Exposure,
    Interruption,
    LoggedEffect,
    LoggedFailures,
    LoggedTries,
    joined_events,
)
from simdist.failure_logs.slurm_jobs import COMMAND, SlurmJob
from simdist.settings.base import plural

_CAUSES: dict[str, tuple[str, LoggedEffect]] = {
    "NODE_FAIL": ("node failure", "node"),
    "FAILED": ("failed job", "process"),
    "OUT_OF_MEMORY": ("out of memory", "process"),
    "PREEMPTED": ("preemption", "planned"),
}
_EXPECTED: dict[str, LoggedEffect] = {"node failure": "node", "failed job": "process"}
_ENDS = {
    "TIMEOUT": "reached the time limit",
    "DEADLINE": "reached the deadline",
    "REQUEUED": "requeued on request",
    "BOOT_FAIL": "node did not boot",
    "LAUNCH_FAILED": "launch failed",
    "RESIZING": "resized while running",
}
_ROOT = ("0", "root")
_PART = "+"  # of a heterogeneous job
_GOOD_ENDS = ("COMPLETED", "RUNNING")
_MANY = 5


def slurm_failures(jobs: Sequence[SlurmJob], name: str, *, begin_s: float | None = None) -> LoggedFailures:
    """Return what jobs say.

    Args:
        jobs: All that ran, and each run of a requeued one.
        name: Of the file.
        begin_s: When the log begins, if it says so.

    Raises:
        ScenarioError: No job ran.
    """
    jobs = _whole_jobs(jobs)
    with_gpus = [job for job in jobs if job.n_gpus]
    counted = sorted(with_gpus or jobs, key=lambda job: job.start_s)
    if not any(job.elapsed_s for job in counted):
        raise ScenarioError(f"{name}: no job in it ran: write it with {COMMAND} --starttime and a date")
    n_without = len(jobs) - len(counted)
    notes = [f"{n_without} {plural(n_without, 'job')} without GPUs: left out."] if n_without else []
    is_event = False
    if begin_s is None:
        begin_s, is_event, note = _begin(counted)
        notes += [note] if note else []
    least_s = begin_s if is_event else math.nextafter(begin_s, -math.inf)  # what ended then counts, or does not
    ended = [job for job in counted if job.end_s > least_s]
    events = joined_events(_interruption(job) for job in counted if _is_interruption(job))
    waits_s = {
        "schedule": tuple(_waits_s(counted, planned=False)),
        "lasts": tuple(_waits_s(counted, planned=True)),
    }
    return LoggedFailures(
        name,
        "Slurm",
        _exposure(counted, begin_s),
        tuple(event for event in events if _at_s(event) > least_s),
        _EXPECTED,
        Counter(end for job in ended if (end := _other_end(job))),
        {part: seconds for part, seconds in waits_s.items() if seconds},
        {
            "schedule": "End of a job that failed to its next Start, of requeued jobs",
            "lasts": "End of a preempted job to its next Start",
        },
        (*notes, *_notes(ended)),
        _tries(counted),
    )


def _whole_jobs(jobs: Sequence[SlurmJob]) -> list[SlurmJob]:
    """Return the parts of each run of a heterogeneous job as one job, which ends as its worst part does."""
    found = [job for job in jobs if _PART not in job.job_id]
    current: dict[str, SlurmJob] = {}
    for part in sorted((job for job in jobs if _PART in job.job_id), key=lambda job: job.start_s):
        whole_id = part.job_id.split(_PART)[0]
        before = current.get(whole_id)
        if before is None or part.start_s > before.end_s:  # of the next run
            found += [] if before is None else [before]
            current[whole_id] = replace(part, job_id=whole_id)
        else:
            current[whole_id] = _joined(before, part)
    return [*found, *current.values()]


def _joined(job: SlurmJob, part: SlurmJob) -> SlurmJob:
    worst = min(job, part, key=_rank_of_end)
    has_gpus = job.n_gpus is not None and part.n_gpus is not None
    has_nodes = job.n_nodes is not None and part.n_nodes is not None
    return replace(
        job,
        state=worst.state,
        killed_by=worst.killed_by,
        end_s=max(job.end_s, part.end_s),
        elapsed_s=max(job.elapsed_s, part.elapsed_s),
        n_gpus=(job.n_gpus or 0) + (part.n_gpus or 0) if has_gpus else None,
        n_nodes=(job.n_nodes or 0) + (part.n_nodes or 0) if has_nodes else None,
        hosts=job.hosts | part.hosts,
    )


def _rank_of_end(job: SlurmJob) -> int:
    """Return which end of a part is that of the whole job: of two, the smaller one."""
    if job.state in _CAUSES:
        return [*_CAUSES].index(job.state)
    return len(_CAUSES) + (job.state in _GOOD_ENDS)


def _begin(jobs: Sequence[SlurmJob]) -> tuple[float, bool, str]:
    """Return when the log begins, whether a job's end says so, and a sentence about it.

    Args:
        jobs: In the order of their start.
    """
    first_s = jobs[0].start_s
    if sum(job.start_s == first_s for job in jobs) > 1:  # as --truncate writes it, or started together
        return first_s, False, ""
    first_end_s = min(job.end_s for job in jobs if job.elapsed_s)
    running = sum(job.start_s < first_end_s < job.end_s for job in jobs)
    if not running:
        return first_s, False, ""
    return (
        first_end_s,
        True,
        f"When the log begins is not known: {running} {plural(running, 'job')} ran when the first one ended. Time "
        f"before that end is not counted. A first line such as `# sacct --starttime 2026-03-01` tells the begin.",
    )


def _exposure(jobs: Sequence[SlurmJob], begin_s: float) -> Exposure:
    times = [(job, max(0.0, min(job.elapsed_s, job.end_s - begin_s))) for job in jobs]
    has_nodes = all(job.n_nodes for job in jobs if job.elapsed_s)
    has_gpus = all(job.n_gpus for job in jobs if job.elapsed_s)
    return Exposure(
        math.fsum(seconds for _, seconds in times),
        math.fsum((job.n_nodes or 0) * seconds for job, seconds in times) if has_nodes else None,
        math.fsum((job.n_gpus or 0) * seconds for job, seconds in times) if has_gpus else None,
    )


def _is_interruption(job: SlurmJob) -> bool:
    return job.state in _CAUSES and (job.elapsed_s >= TRAINS_AFTER_S or job.state == "NODE_FAIL")


def _interruption(job: SlurmJob) -> Interruption:
    cause, effect = _CAUSES[job.state]
    return Interruption(job.end_s, cause, effect, job.hosts, frozenset([job.job_id.split("_")[0]]))


def _at_s(event: Interruption) -> float:
    assert event.at_s is not None
    return event.at_s


def _other_end(job: SlurmJob) -> str:
    """Return what the end of a job is, if it is no interruption; empty for jobs that completed or run."""
    if _failed_at_start(job):
        return "ended in the first minute"
    if job.state == "CANCELLED":
        return "cancelled by root" if job.killed_by in _ROOT else "cancelled by a user"
    return _ENDS.get(job.state, "")


def _waits_s(jobs: Sequence[SlurmJob], *, planned: bool) -> Iterator[float]:
    """Yield how long requeued jobs waited for their next start, after what was planned or was not."""
    for job, following in (pair for each in _runs(jobs) for pair in pairwise(each)):
        is_planned = job.state in _CAUSES and _CAUSES[job.state][1] == "planned"
        if _is_interruption(job) and is_planned == planned and following.start_s >= job.end_s:
            yield following.start_s - job.end_s


def _runs(jobs: Sequence[SlurmJob]) -> list[list[SlurmJob]]:
    """Return the runs of each job."""
    runs: dict[str, list[SlurmJob]] = {}
    for job in jobs:
        runs.setdefault(job.job_id, []).append(job)
    return [*runs.values()]


def _tries(jobs: Sequence[SlurmJob]) -> LoggedTries | None:
    """Count the tries to start requeued jobs again after they had failed."""
    n_succeeded = 0
    lost_s: list[float] = []
    back_off_s: list[float] = []
    for runs in _runs(jobs):
        is_down = False
        for job, following in pairwise(runs):
            if is_down and _failed_at_start(job):
                back_off_s.append(max(0.0, following.start_s - job.end_s))
            is_down = _is_interruption(job) or (is_down and _failed_at_start(job))
            if is_down and _failed_at_start(following):
                lost_s.append(following.elapsed_s)
            elif is_down and following.elapsed_s >= TRAINS_AFTER_S:
                n_succeeded += 1
    return LoggedTries(n_succeeded, tuple(lost_s), tuple(back_off_s)) if n_succeeded or lost_s else None


def _failed_at_start(job: SlurmJob) -> bool:
    return job.state in _CAUSES and not _is_interruption(job)


def _notes(jobs: Sequence[SlurmJob]) -> list[str]:
    notes: list[str] = []
    n_runs = Counter(job.job_id for job in jobs)
    hidden = {job.job_id for job in jobs if (job.n_restarts or 0) >= n_runs[job.job_id]}
    if hidden:
        notes.append(f"{len(hidden)} requeued jobs show only their last run: add --duplicates to sacct.")
    n_root = sum(_other_end(job) == "cancelled by root" for job in jobs)
    if n_root:
        notes.append(f"{n_root} jobs were cancelled by root: add them if nodes were drained because they failed.")
    if len(jobs) >= _MANY and all(map(_is_interruption, jobs)):
        notes.append(
            "Every job in it was interrupted: with sacct --state the others are left out, and rates too large."
        )
    if any(job.state == "FAILED" for job in jobs):
        notes.append("FAILED does not tell a fault of a GPU from a mistake in a program: leave out jobs of debugging.")
    return notes
