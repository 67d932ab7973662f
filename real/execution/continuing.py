"""A run in which ranks go on when others fail, until these are back: `failures.on_failure: continue`.

Each rank is a replica with an agent of its own, such as torchrun, which starts it again. It has the state of the model
from a live replica when it joins, at the beginning of a step. If nobody is left, all begin anew from the newest
checkpoint. What is known of a run is in the store of the job, and the first rank that is there writes it:

    RUN/attempts.json           attempts, failures, absences and pauses so far
    RUN/parts/rank-00003.npy    times of rank 3, of all its processes since the attempt began
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar, final

import numpy as np
import torch
from torch import Tensor

from real.buffers import transforms
from real.buffers.memory import Memory
from real.checkpoints.planned import CheckpointFiles
from real.collectives.replicas import ReplicaGroups, ReplicaWorld
from real.execution.attempts import (
    PerformedAttempt,
    clear,
    distrust,
    due_on,
    launched_s,
    step_after_saved,
    trusted_before,
    with_earlier,
)
from real.execution.executor import Executor
from real.execution.failing import FailNode
from real.execution.running import ProgramSpec, RunReport, report_on
from real.execution.streams import Lanes
from real.processes.membership import Members, Met, ReadyProcess, ReplicaConnection
from real.programs.base import Program
from real.recording.clock import to_common_s
from real.recording.recorder import (
    RecordedPart,
    Recorder,
    forget,
    left_by,
    part_path,
    salvaged_trace,
    trace_of,
    write_part,
)
from real.recording.timing import now_s, precise_sleeps, sleep_s
from simdist.files import replacing
from simdist.plan import Plan
from simdist.plan.delays import Delays
from simdist.plan.failures import StepFailure
from simdist.traces.attempts import (
    ATTEMPTS,
    Absence,
    AttemptLog,
    MeasuredAttempt,
    MetFailure,
    Pause,
    attempt_trace_name,
    without_absences,
)
from simdist.traces.trace import Trace

_T = TypeVar("_T")
_START_IN_S = 0.05
MakeSpec = Callable[[PerformedAttempt], ProgramSpec]


@final
@dataclass(slots=True)
class ContinuedRun:
    """A run on one replica, from the start of its process on.

    Args:
        replica: The connection to the job.
        folder: The run directory.
        plan: Its plan.
        delays: Its delays.
        failures: Its failures.
        files: The checkpoints of this rank.
        parts: Folder for times of ranks.
        make_spec: Makes the program of an attempt.
        started_s: When this process had loaded its libraries, in seconds since 1970.
        anew: Replace checkpoints of another measurement.
        fail_node: See `FailingProgram`.
    """

    replica: ReplicaConnection
    folder: Path
    plan: Plan
    delays: Delays
    failures: Sequence[StepFailure]
    files: CheckpointFiles
    parts: Path
    make_spec: MakeSpec
    started_s: float
    anew: bool
    fail_node: FailNode | None = None
    _groups: ReplicaGroups = field(init=False)

    def __post_init__(self) -> None:
        connection = self.replica.connection
        self._groups = ReplicaGroups(self.rank, connection.timeout_s, self.replica.reach)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.replica.connection.place.rank

    def perform(self) -> tuple[Trace, RunReport] | None:
        """Perform what is left of the plan; return trace and report on the first rank that is there at the end.

        Raises:
            RunError: Something failed here, the others went on without this rank, or nobody comes.
        """
        membership = self.replica.membership
        if self.replica.process == 1:
            clear(self.folder, self.rank, self.files, anew=self.anew)
            forget(self.parts, self.rank)
        newest = membership.newest()
        is_late = newest is not None and membership.is_live(newest)
        prepared = self._prepared(0) if is_late else None
        waiting = ReadyProcess(self.replica.process, self.started_s, time.time(), tuple(self.files.steps()))
        members = membership.admitted(waiting, self._first_step)
        if members is None:
            return None
        if self.rank in members.joining:
            assert prepared is not None
            return self._joined(members, prepared)
        return self._began(members)

    # ---------------------------------------------------------------- the store

    def _met(self) -> dict[int, MetFailure]:
        """Return the failures that have struck by number, in the order of the run."""
        store = self.replica.connection.store
        found = {number: store.get(f"met/{number}") for number in range(len(self.failures))}
        return {number: MetFailure(**json.loads(text)) for number, text in found.items() if text}

    def _note_failure(self, number: int, step: int) -> None:
        """Note that a failure strikes this rank."""
        met = MetFailure(number, step, time.time())
        self.replica.connection.store.set(f"met/{number}", json.dumps(asdict(met)))
        if self.failures[number].kind == "planned":
            self.replica.membership.say_gone()

    def _log(self) -> AttemptLog:
        text = self.replica.connection.store.get("log")
        log = AttemptLog() if text is None else AttemptLog.loads(text)
        return replace(log, met=tuple(self._met().values()))

    def _save(self, log: AttemptLog) -> None:
        self.replica.connection.store.set("log", log.dumps())
        log.save(self.folder / ATTEMPTS)

    def _first_step(self, come: Mapping[int, ReadyProcess]) -> int:
        """Return the step after the newest checkpoint that all who come have."""
        limit = trusted_before(self.failures, self._met())
        saved = [[step for step in come[rank].saved if limit is None or step + 1 < limit] for rank in sorted(come)]
        return step_after_saved(self.plan, saved)

    # ---------------------------------------------------------------- begin, and join

    def _began(self, members: Members) -> tuple[Trace, RunReport] | None:
        """Begin with all ranks."""
        membership = self.replica.membership
        membership.together("meet", self._groups.of)
        connected_s = time.time()
        self._keep_attempt_before(members)
        if (limit := trusted_before(self.failures, self._met())) is not None:
            distrust(self.files, limit)
        self.files.delete_old()
        prepared = self._prepared(members.first_step)
        if self.rank == members.ranks[0]:
            attempt = MeasuredAttempt(
                members.first_step, launched_s(), self.started_s, connected_s, load_s=prepared.attempt.load_s
            )
            log = self._log()
            self._save(replace(log, attempts=(*log.attempts, attempt)))
        membership.together("begin", self._groups.of)
        start_s = self._start_s(members)
        if self.rank == members.ranks[0]:
            log = self._log()
            *before, this = log.attempts
            self._save(replace(log, attempts=(*before, replace(this, began_s=start_s))))
        own_start_s = now_s() + start_s - time.time()
        sleep_s(own_start_s - now_s())
        return self._performed(members, prepared, Recorder(self.plan, self._path), own_start_s)

    def _joined(self, members: Members, prepared: "_Prepared") -> tuple[Trace, RunReport] | None:
        """Join those that are there: take the state of one of them, and go on at their step."""
        known_s = left_by(self.rank, self.parts, self.plan)
        met = self._take_in(members, members.first_step, pack=lambda: torch.empty(0, dtype=torch.uint8))
        assert met.result is not None
        prepared.program.take_state(met.result)
        own_start_s = now_s() + self._start_s(members) - time.time()
        return self._performed(members, prepared, Recorder(self.plan, self._path, known_s + own_start_s), own_start_s)

    def _start_s(self, members: Members) -> float:
        """Return when the attempt begins, in seconds since 1970."""
        return float(self.replica.connection.store.propose(f"start/{members.attempt}", str(time.time() + _START_IN_S)))

    @property
    def _path(self) -> Path:
        return part_path(self.parts, self.rank)

    def _prepared(self, first_step: int) -> "_Prepared":
        """Make what computes, with the state of a checkpoint."""
        connection = self.replica.connection
        attempt = PerformedAttempt(self.folder, self.plan, connection, self.files, AttemptLog(), (), first_step)
        spec = self.make_spec(attempt)
        memory = Memory(
            self.plan, connection.device, spec.buffers, kernels_from=spec.kernels_from, begins_freed=spec.gives_back
        )
        return _Prepared(spec, memory, spec.make(memory, connection.guard.failed), attempt)

    def _keep_attempt_before(self, members: Members) -> None:
        """Keep what the attempt before has done, if there was one."""
        if not members.attempt:
            return
        mine = torch.from_numpy(left_by(self.rank, self.parts, self.plan))
        met = self.replica.membership.together("times before", lambda now: self._groups.gather(now, mine))
        if not met.result:
            return
        log = self._log()
        unknown = np.full_like(mine.numpy(), np.nan)
        found = [met.result[rank].numpy() if rank in met.result else unknown for rank in range(self.plan.world_size)]
        trace = salvaged_trace(self.plan, np.stack(found, axis=2))
        if trace is not None and log.attempts:
            with replacing(self.folder / attempt_trace_name(len(log.attempts) - 1), on_disk=True) as part:
                _cleaned(trace, log).save(part)

    # ---------------------------------------------------------------- the steps

    def _performed(
        self, members: Members, prepared: "_Prepared", recorder: Recorder, start_s: float
    ) -> tuple[Trace, RunReport] | None:
        """Perform the steps from the first one of a membership on."""
        connection = self.replica.connection
        membership = self.replica.membership
        write_part(self.parts, RecordedPart(self.rank, self.plan.digest(), start_s))
        world = ReplicaWorld(self.plan, membership, self._groups, members.first_step, self._note_mean)
        prepared.attempt.due = due_on(self.rank, self.failures, self._met())
        program = prepared.attempt.failing(
            prepared.program,
            self.fail_node,
            note=self._note_failure,
            begins=lambda step: self._begin_step(step, world, prepared.program),
        )
        executor = Executor(
            self.plan,
            rank=self.rank,
            delays=self.delays,
            world=world,
            program=program,
            memory=prepared.memory,
            lanes=Lanes(connection.device, collectives_block=True),
            recorder=recorder,
            watch=connection.guard,
            first_step=members.first_step,
            gives_back=prepared.spec.gives_back,
        )
        precise_sleeps()
        executor.prepare()
        executor.start_clock(start_s)
        executor.run()
        recorder.forget_unended()
        mine = torch.from_numpy(to_common_s(np.asarray(recorder.times_s), start_s=start_s))
        gathered = membership.together("end", lambda now: self._groups.gather(now, mine)).result
        membership.end()
        return self._finished(prepared, executor, gathered) if gathered else None

    def _begin_step(self, step: int, world: ReplicaWorld, program: Program) -> None:
        """Take ranks in that join at this step."""
        if world.upcoming is not None and world.upcoming.first_step == step:
            upcoming = world.upcoming
            world.upcoming = None
            self.replica.membership.members = upcoming
            self._take_in(upcoming, step, pack=program.state)

    def _take_in(self, upcoming: Members, step: int, pack: Callable[[], Tensor]) -> "Met[Tensor | None]":
        """Form groups with the ranks that join, and give them the state; all members take part."""
        membership = self.replica.membership
        met = membership.together("join", lambda now: self._groups.send_state(now, pack))
        members = membership.members
        assert members is not None
        membership.members = replace(members, joining=())
        if self.rank == members.old[0]:
            log = self._with_lost(self._log(), met, step, step)
            for rank in members.joining:
                waiting = membership.waiting(rank)
                assert waiting is not None
                absences = [
                    replace(each, last_step=step, started_s=waiting.started_s, ready_s=waiting.ready_s)
                    if each.rank == rank and each.last_step is None
                    else each
                    for each in log.absences
                ]
                log = replace(log, absences=tuple(absences))
            waiting_s = max(met.lost.values(), default=met.begin_s) - met.begin_s
            connect_s = self._groups.connect_s
            load_s = max(0.0, time.time() - met.begin_s - waiting_s - connect_s)
            pause = Pause(met.begin_s, waiting_s, connect_s, load_s)
            self._save(replace(log, pauses=(*log.pauses, pause)))
        return met

    def _note_mean(self, step: int, first_step: int, met: Met[Tensor]) -> None:
        """Note which ranks were lost in a mean."""
        members = self.replica.membership.members
        assert members is not None
        if met.lost and self.rank == members.old[0]:
            log = self._with_lost(self._log(), met, step, first_step)
            waiting_s = max(met.lost.values()) - met.begin_s
            connect_s = self._groups.connect_s if len(members.ranks) > 1 else 0.0
            pause = Pause(met.begin_s, waiting_s, connect_s)
            self._save(replace(log, pauses=(*log.pauses, pause)))

    def _with_lost(self, log: AttemptLog, met: "Met[_T]", step: int, first_step: int) -> AttemptLog:
        """Return the log with ranks that were lost at a step, and whose steps count no more from a first one on."""
        open_ranks = {each.rank for each in log.absences if each.last_step is None}
        lost = [Absence(rank, first_step, at_s) for rank, at_s in met.lost.items() if rank not in open_ranks]
        return replace(log, absences=(*log.absences, *lost))

    # ---------------------------------------------------------------- the end

    def _finished(
        self, prepared: "_Prepared", executor: Executor, found: Mapping[int, Tensor]
    ) -> tuple[Trace, RunReport]:
        """Put the times of all ranks together; those of an absent one as far as they are on this machine."""
        everyone = [
            found[rank].numpy() if rank in found else left_by(rank, self.parts, self.plan)
            for rank in range(self.plan.world_size)
        ]
        spec = prepared.spec
        device = self.replica.connection.device
        log = self._log()
        source = f"real gloo on {device.type}, {spec.name}"
        trace = _cleaned(trace_of(self.plan, np.stack(everyone, axis=2), source), log)
        report = report_on(
            self.plan,
            spec,
            backend="gloo",
            device=device,
            makespan_s=trace.makespan_s,
            buffers_nbytes=(executor.peak_nbytes,),
            selections=transforms.selections(self.plan, prepared.memory),
        )
        trace = replace(trace, run=report.run)
        *before, this = log.attempts
        assert this.began_s is not None
        pauses_s = math.fsum(each.length_s for each in log.pauses if each.begin_s >= this.began_s)
        this = replace(this, ended_s=this.began_s + trace.makespan_s + pauses_s)
        log = replace(log, attempts=(*before, this), run=report.run)
        self._save(log)
        for rank in range(self.plan.world_size):
            forget(self.parts, rank)
        return with_earlier(self.folder, log, trace), report


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What computes on this rank: the program with its memory, and the attempt that it began with."""

    spec: ProgramSpec
    memory: Memory
    program: Program
    attempt: PerformedAttempt


def _cleaned(trace: Trace, log: AttemptLog) -> Trace:
    """Return the trace of the newest attempt, without what others went on without, and without pauses."""
    began_s = log.attempts[-1].began_s or 0.0
    absences = [each for each in log.absences if each.noticed_s >= began_s]
    pauses = [each for each in log.pauses if each.begin_s >= began_s]
    return without_absences(trace, absences, pauses, began_s)
