"""The attempts of a run with failures: each start after a failure goes on where the newest checkpoint says.

torchrun starts all ranks again when one has failed. What an attempt leaves outlives its processes:

    RUN/attempts.json           attempts and failures so far; rank 0 writes it
    RUN/trace.attempt-0.npz     times of an attempt that failed; the next one writes it
    RUN/struck-00003.jsonl      failures that have struck rank 3; it writes them before it fails
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import final

from real.checkpoints.planned import CheckpointFiles
from real.execution.failing import FailingProgram, FailNode
from real.processes.launch import Connection
from real.programs.base import Program
from real.recording.recorder import gather_salvaged
from real.recording.timing import now_s, sleep_s
from simdist.errors import RunError, naming_file
from simdist.files import read_jsonl, replacing, sync, with_checksum
from simdist.plan import Plan, ops
from simdist.plan.failures import StepFailure
from simdist.plan.plan import StepIndex
from simdist.traces.attempts import ATTEMPTS, AttemptLog, MeasuredAttempt, MetFailure, attempt_trace_name, join_attempts
from simdist.traces.trace import Trace

_POLL_S = 0.05
_HANG_TIMEOUTS = 10  # time-outs after which a hang that nobody has found ends by itself


@final
@dataclass(slots=True)
class PerformedAttempt:
    """An attempt on this rank. `begin_attempt` makes it.

    Args:
        folder: The run directory.
        plan: Its plan.
        connection: To the other ranks.
        files: The checkpoints.
        log: The attempts so far, with this one at the end.
        due: The failures that are to strike this rank, each with its number in the run.
        first_step: The first step to perform.

    Attributes:
        load_s: Seconds in which the checkpoint was loaded.
    """

    folder: Path
    plan: Plan
    connection: Connection
    files: CheckpointFiles
    log: AttemptLog
    due: Sequence[tuple[int, StepFailure]]
    first_step: int
    load_s: float = field(default=0.0, init=False)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.connection.place.rank

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Measure how long the checkpoint takes to load."""
        begin_s = now_s()
        yield
        self.load_s += now_s() - begin_s

    def content(self) -> bytes:
        """Return the file that this rank resumes from: its own, or that of the rank that writes for it.

        Raises:
            RunError: It cannot be read.
        """
        step = self.first_step - 1
        return self.files.read(step, _writer_for(self.rank, self.plan))

    def begins(self, start_s: float) -> None:
        """Note that the steps begin.

        Args:
            start_s: When, by `now_s` of this rank.
        """
        began_s = time.time() - (now_s() - start_s)
        *before, this = self.log.attempts
        this = replace(this, began_s=began_s, load_s=self.load_s)
        self._save(replace(self.log, attempts=(*before, this)))

    def note_failure(self, number: int, step: int) -> None:
        """Note that a failure strikes this rank; what is noted is on the disk."""
        path = _struck_path(self.folder, self.rank)
        record = json.dumps(asdict(MetFailure(number, step, time.time()))).encode()
        with naming_file(path):
            with path.open("ab") as file:
                file.write(with_checksum(record))
            sync(path)

    def failing(
        self,
        program: Program,
        fail_node: FailNode | None,
        *,
        note: Callable[[int, int], None] | None = None,
        begins: Callable[[int], None] | None = None,
    ) -> FailingProgram:
        """Return a program whose rank fails as is due; the arguments are those of `FailingProgram`."""
        return FailingProgram(
            program,
            self.due,
            self.connection.guard.failed,
            note=note or self.note_failure,
            await_saved=self.await_saved,
            most_hang_s=_HANG_TIMEOUTS * self.connection.timeout_s,
            saving=saving_ops(self.plan),
            begins=begins,
            fail_node=fail_node,
        )

    def await_saved(self, step: int, is_planned: bool) -> None:
        """Wait for the files of the newest checkpoint before a step.

        Args:
            step: The step.
            is_planned: All ranks write a checkpoint now. Otherwise, wait only for one for which a rank blocks.

        Raises:
            RunError: A file is late; names the rank that writes it.
        """
        saved = [each for each in saved_steps(self.plan) if each < step]
        at = step - 1 if is_planned else next(reversed(saved), -1)
        save = _save_of(self.plan)
        if save is None or at < 0 or not (save.dst or is_planned):
            return
        until_s = now_s() + self.connection.timeout_s
        for rank in _writers(self.plan):
            while not self.files.has(at, rank):
                self.connection.guard.check()
                if now_s() > until_s:
                    raise RunError(f"rank {rank} has not written the checkpoint of step {at} in time")
                sleep_s(_POLL_S)

    def finished(self, last: Trace) -> Trace:
        """Note that the job is done, and return the trace of all attempts together.

        Args:
            last: Trace of this attempt, with the name of the measurement.
        """
        *before, this = self.log.attempts
        assert this.began_s is not None
        this = replace(this, ended_s=this.began_s + last.makespan_s)
        self._save(replace(self.log, attempts=(*before, this), run=last.run))
        return with_earlier(self.folder, self.log, last)

    def forget(self) -> None:
        """Delete what only a next attempt would need."""
        _struck_path(self.folder, self.rank).unlink(missing_ok=True)

    def _save(self, log: AttemptLog) -> None:
        self.log = log
        if self.rank == 0:
            log.save(self.folder / ATTEMPTS)


def begin_attempt(
    connection: Connection,
    folder: Path,
    plan: Plan,
    failures: Sequence[StepFailure],
    files: CheckpointFiles,
    *,
    parts: Path,
    anew: bool,
    started_s: float,
) -> PerformedAttempt:
    """Find out which attempt this is and where it goes on, and keep what the one before has done. All ranks take part.

    Args:
        connection: To the other ranks.
        folder: The run directory.
        plan: Its plan.
        failures: Its failures.
        files: The checkpoints of this rank.
        parts: Folder with the times that ranks have noted.
        anew: Begin a new measurement, whatever is there.
        started_s: When this process had loaded its libraries, in seconds since 1970.

    Raises:
        RunError: Checkpoints of another measurement are there, or cannot be read.
    """
    rank = connection.place.rank
    connected_s = time.time()
    log = AttemptLog()
    if rank == 0 and (folder / ATTEMPTS).exists() and not anew:
        log = AttemptLog.load(folder / ATTEMPTS)
    n_before = int(connection.exchange("attempt", str(len(log.attempts) if not log.run else 0))[0])
    if n_before:
        trace = gather_salvaged(parts, plan, group=connection.group)
        if trace is not None:
            with replacing(folder / attempt_trace_name(n_before - 1), on_disk=True) as part:
                trace.save(part)
    else:
        log = AttemptLog()
        clear(folder, rank, files, anew=anew)
    files.delete_old()
    mine = {"met": [*read_jsonl(_struck_path(folder, rank))], "steps": files.steps() if n_before else []}
    answers = [json.loads(text) for text in connection.exchange("failures and checkpoints", json.dumps(mine))]
    found = [MetFailure(**each) for answer in answers for each in answer["met"]]
    met = {each.number: each for each in sorted(found, key=lambda each: (each.number, -each.at_s))}
    if n_before and (limit := trusted_before(failures, met)) is not None:
        distrust(files, limit)
        for answer in answers:
            answer["steps"] = [step for step in answer["steps"] if step + 1 < limit]
    first_step = step_after_saved(plan, [answer["steps"] for answer in answers])
    attempt = MeasuredAttempt(first_step, launched_s(), started_s, connected_s)
    log = replace(log, attempts=(*log.attempts, attempt), met=tuple(met.values()))
    performed = PerformedAttempt(folder, plan, connection, files, log, due_on(rank, failures, met), first_step)
    performed._save(log)
    return performed


def due_on(rank: int, failures: Sequence[StepFailure], met: Collection[int]) -> list[tuple[int, StepFailure]]:
    """Return the failures that are to strike a rank, each with its number, after those that have been met."""
    n_ended = len({failures[number].attempt for number in met if failures[number].ends_attempt})
    return [
        (number, each)
        for number, each in enumerate(failures)
        if each.attempt == n_ended and number not in met and rank in each.ranks
    ]


def trusted_before(failures: Sequence[StepFailure], met: Collection[int]) -> int | None:
    """Return the step from which on checkpoints are corrupt; None if none is."""
    ended = [number for number in met if failures[number].ends_attempt]
    return failures[max(ended)].resume_before if ended else None


def with_earlier(folder: Path, log: AttemptLog, last: Trace) -> Trace:
    """Return the trace of the newest attempt of a log, joined to the kept traces of those before."""
    *before, this = log.attempts
    paths = [folder / attempt_trace_name(number) for number in range(len(before))]
    earlier = [(each.first_step, Trace.load(path)) for each, path in zip(before, paths, strict=True) if path.exists()]
    return join_attempts([*earlier, (this.first_step, last)])


def launched_s() -> float:
    """Return when this process was started, in seconds since 1970; now, if the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.time()
    return time.time() - age_s


def saved_steps(plan: Plan) -> list[int]:
    """Return the steps in which a plan writes a checkpoint, ascending."""
    index = StepIndex(plan, [len(body) for body in plan.bodies])
    saving = {number for number, body in enumerate(plan.bodies) if any(isinstance(op, ops.Save) for op in body)}
    return [step for step in range(plan.n_steps) if index.body(step) in saving]


def saving_ops(plan: Plan) -> list[ops.Copy | ops.Save]:
    """Return the operations that write a checkpoint of a plan; none if it has none."""
    save = _save_of(plan)
    everything = dict.fromkeys(op for body in plan.bodies for op in body)
    copies = [op for op in everything if save and isinstance(op, ops.Copy) and op.dst in save.srcs]
    return [*copies, save] if save else []


def _save_of(plan: Plan) -> ops.Save | None:
    """Return the operation that writes a checkpoint; None if the plan has none."""
    return next((op for body in plan.bodies for op in body if isinstance(op, ops.Save)), None)


def _writers(plan: Plan) -> list[int]:
    return sorted({_writer_for(rank, plan) for rank in range(plan.world_size)})


def _writer_for(rank: int, plan: Plan) -> int:
    """Return the rank whose file a rank resumes from."""
    save = _save_of(plan)
    assert save is not None
    return next(members[0] for members in save.by.members(plan.world_size) if rank in members)


def step_after_saved(plan: Plan, written: Sequence[Sequence[int]]) -> int:
    """Return the step after the newest checkpoint whose files are all there; 0 if there is none."""
    if not plan.has_saves:
        return 0
    common = set.intersection(*(set(written[rank]) for rank in _writers(plan)))
    return max(common, default=-1) + 1


def distrust(files: CheckpointFiles, limit: int) -> None:
    """Delete what this rank has written of a state that came after silent corruption."""
    for step in files.steps():
        if step + 1 >= limit:
            files.delete(step)


def clear(folder: Path, rank: int, files: CheckpointFiles, *, anew: bool) -> None:
    """Delete what an earlier measurement has left.

    Raises:
        RunError: Checkpoints are there, and were not to be replaced.
    """
    if (steps := files.steps()) and not anew:
        raise RunError(
            f"{files.url}: rank {rank} has files of steps {steps[0]} to {steps[-1]} there, of another measurement: "
            f"choose another folder for --checkpoints, or replace them with --force"
        )
    for step in steps:
        files.delete(step)
    _struck_path(folder, rank).unlink(missing_ok=True)
    if rank == 0:
        (folder / ATTEMPTS).unlink(missing_ok=True)
        for path in folder.glob(attempt_trace_name(0).replace("0", "*")):
            path.unlink(missing_ok=True)


def _struck_path(folder: Path, rank: int) -> Path:
    return folder / f"struck-{rank:05d}.jsonl"
