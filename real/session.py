"""One run on one rank: its parts, each of them finished before the next one is made.

    connection    to the other ranks: `connect`, or `meet_ranks` for a training loop
    plan, delays  of a run directory, or of a schedule
    memory        the buffers of the plan
    world         the process groups of the plan
    recorder      the times of this rank
    watch         knows whether a rank has failed

`python -m real` and `real.wrap` both open a session. What performs the plan in it is different: a program of the
command line (`real.execution.running`), or the loop of a user (`real.loops`).
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from real.buffers.memory import Memory
from real.collectives import byte_transfer
from real.collectives.worlds import ProcessWorld, groups_of, late_servers, scratch_nbytes
from real.processes.heartbeat import Guard
from real.processes.launch import Connection
from real.recording.clock import Clocks, common_start_s, compare
from real.recording.recorder import RecordedPart, Recorder, gather, part_path, write_part
from simdist.errors import RunError
from simdist.plan import Plan
from simdist.plan.delays import Delays
from simdist.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Recording:
    """Where the ranks note their times.

    Args:
        folder: Has a file for each rank.
        by_all: Each rank has to reach the folder. Otherwise rank 0 has to, and the others keep their times in memory
            where they cannot.
    """

    folder: Path
    by_all: bool


@dataclass(frozen=True, slots=True)
class Start:
    """The moment from which the times of a run count.

    Args:
        clocks: As they were compared just before it.
        start_s: The moment by this rank's own clock.
    """

    clocks: Clocks
    start_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """Holds the parts of a run on this rank; made by `open_session`.

    Args:
        connection: To the other ranks.
        plan: The plan to perform.
        delays: Channel -> float64 `[1, n_steps, world_size]`, seconds.
        memory: The buffers of this rank.
        world: Performs collectives.
        recorder: For the times; None if they are not wanted.
        watch: Knows whether a rank has failed.
    """

    connection: Connection
    plan: Plan
    delays: Delays
    memory: Memory
    world: ProcessWorld
    recorder: Recorder | None
    watch: Guard

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self.connection.place.rank

    def warm_up(self) -> None:
        """Perform, once, what takes collectives longer the first time; all ranks take part."""
        self.world.warm_up(self.plan, self.connection.device)

    def start(self, begins: Callable[[float], None] | None = None) -> Start:
        """Compare clocks, agree on a common start and wait for it; all ranks take part.

        Args:
            begins: Called at the start with the moment, by this rank's own clock.
        """
        group = self.connection.group
        clocks = compare(group=group)
        start_s = common_start_s(clocks, group=group)
        if begins is not None:
            begins(start_s)
        if self.recorder is not None and self.recorder.path is not None:
            with suppress(OSError):  # a run that fails loses the times of this rank; one that does not needs no part
                write_part(self.recorder.path.parent, RecordedPart(self.rank, self.plan.digest(), start_s))
        return Start(clocks, start_s)

    def gather(self, start: Start, source: str) -> tuple[Trace | None, tuple[Clocks, Clocks]]:
        """Bring the times of all ranks together; all take part.

        Args:
            start: Of the run.
            source: Who made the trace.

        Returns:
            On rank 0 the trace, and None elsewhere; the clocks at the start and now.

        Raises:
            RunError: No times were noted.
        """
        recorder = self.recorder
        if recorder is None:
            raise RunError(f"plan {self.plan.name}: no times were noted, so there is no trace of it")
        recorder.forget_unended()
        group = self.connection.group
        clocks = start.clocks, compare(group=group)
        late = self.world.late(self.plan)
        trace = gather(recorder, self.plan, start_s=start.start_s, clocks=clocks, source=source, group=group, late=late)
        return trace, clocks


def open_session(
    connection: Connection,
    plan: Plan,
    delays: Delays,
    *,
    buffers: Collection[str],
    in_place: Mapping[str, str] = MappingProxyType({}),
    recording: Recording | None = None,
) -> Session:
    """Make the parts of a run that come after the connection, the plan and the delays; all ranks take part.

    Args:
        connection: To the other ranks.
        plan: A legal plan of as many ranks as there are processes.
        delays: For it.
        buffers: Names of the buffers that need memory.
        in_place: Buffers that are another one; see `Memory`.
        recording: Where times are noted; None if they are not wanted.

    Raises:
        RunError: There is not enough memory, or times cannot be noted; or a rank is missing.
    """
    memory = Memory(plan, connection.device, buffers, scratch_nbytes=scratch_nbytes(plan), in_place=in_place)
    world = make_world(connection, plan)
    recorder = None if recording is None else make_recorder(connection, plan, recording)
    return Session(connection, plan, delays, memory, world, recorder, connection.guard)


def make_world(connection: Connection, plan: Plan) -> ProcessWorld:
    """Make the process groups of a plan, which end with the connection; all ranks take part."""
    world = ProcessWorld(
        groups_of(plan),
        timeout_s=connection.timeout_s,
        everyone=connection.group,
        servers=late_servers(plan),
    )
    connection.made.extend(world.made)
    return world


def make_recorder(connection: Connection, plan: Plan, recording: Recording) -> Recorder:
    """Make what notes the times of this rank; all ranks take part.

    Raises:
        RunError: The folder cannot be written where it has to.
    """
    path = part_path(recording.folder, connection.place.rank)
    if recording.by_all:
        try:
            recording.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"cannot be written: {error.strerror or error}; copy the run to where it can"
            raise RunError(f"{recording.folder}: {told}") from None
        return Recorder(plan, path)
    problem = ""
    try:
        recorder = Recorder(plan, path)
    except RunError as error:
        problem = str(error)
        recorder = Recorder(plan)  # another machine need not have the folder
    byte_transfer.raise_on_all(problem, group=connection.group)  # the problem of rank 0, if it has one
    return recorder
