"""One run on one rank: its parts, in the order in which they are made. Each is complete before the next.

    connection    to the other ranks: `connect`, or `meet_ranks` for a training loop
    plan, delays  from a run directory, or from a schedule
    memory        the buffers of the plan
    world         the process groups of the plan
    recorder      the times of this rank
    watch         knows whether a rank has failed

`python -m real` and `real.wrap` both open a session. A program of the command line (`real.execution.running`) or the
loop of a user (`real.loops`) then performs the plan.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from real.buffers import transforms
from real.buffers.memory import Memory
from real.collectives import byte_transfer
from real.collectives.worlds import ProcessWorld, check_order_of_issue, groups_of, late_servers, scratch_nbytes
from real.kernels.topk import KERNELS_FROM
from real.processes.heartbeat import Guard
from real.processes.launch import Connection
from real.recording.clock import Clocks, agree_on_start_s, compare_clocks
from real.recording.recorder import RecordedPart, Recorder, gather_trace, part_path, write_part
from simdist.errors import RunError
from simdist.plan import Plan
from simdist.plan.delays import Delays
from simdist.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Recording:
    """Where the ranks record their times.

    Args:
        folder: Has a file for each rank.
        by_all: Each rank must reach the folder. Otherwise only rank 0 must, others keep their times in memory.
    """

    folder: Path
    by_all: bool


@dataclass(frozen=True, slots=True)
class Start:
    """The common start of a run, from which its times count.

    Args:
        clocks: The comparison of clocks just before the start.
        start_s: The start, on this rank's own clock.
    """

    clocks: Clocks
    start_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a run on this rank. `open_session` makes it.

    Args:
        connection: To the other ranks.
        plan: The plan to perform.
        delays: Channel -> float64 `[1, n_steps, world_size]`, seconds.
        memory: The buffers of this rank.
        world: Performs collectives.
        recorder: Records times. None records nothing.
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
        """Perform the setup of collectives, so that the first is as fast as later ones. All ranks take part."""
        self.world.warm_up(self.plan, self.connection.device)

    def start(self, begins: Callable[[float], None] | None = None) -> Start:
        """Compare clocks, agree on a common start and wait for it. All ranks take part.

        Args:
            begins: Called with the common start, on this rank's own clock.
        """
        group = self.connection.group
        clocks = compare_clocks(group=group)
        start_s = agree_on_start_s(clocks, group=group)
        if begins is not None:
            begins(start_s)
        if self.recorder is not None and self.recorder.path is not None:
            with suppress(OSError):  # a run that fails loses the times of this rank; one that does not needs no part
                write_part(self.recorder.path.parent, RecordedPart(self.rank, self.plan.digest(), start_s))
        return Start(clocks, start_s)

    def gather(self, start: Start, source: str) -> tuple[Trace | None, tuple[Clocks, Clocks]]:
        """Gather the times of all ranks. All ranks take part.

        Returns:
            The trace on rank 0, None elsewhere; and the clocks at the start and now.

        Raises:
            RunError: No times were recorded.
        """
        recorder = self.recorder
        if recorder is None:
            raise RunError(f"plan {self.plan.name}: no times were noted, so there is no trace of it")
        recorder.forget_unended()
        group = self.connection.group
        clocks = start.clocks, compare_clocks(group=group)
        late = self.world.late(self.plan)
        trace = gather_trace(
            recorder, self.plan, start_s=start.start_s, clocks=clocks, source=source, group=group, late=late
        )
        return trace, clocks


def open_session(
    connection: Connection,
    plan: Plan,
    delays: Delays,
    *,
    buffers: Collection[str],
    in_place: Mapping[str, str] = MappingProxyType({}),
    recording: Recording | None = None,
    kernels_from: int = KERNELS_FROM,
    begins_freed: bool = False,
) -> Session:
    """Make the parts of a run that follow the connection, the plan and the delays. All ranks take part.

    Args:
        connection: To the other ranks.
        plan: A legal plan with one rank per process.
        delays: Injected delays of the plan.
        buffers: Names of the buffers that need memory.
        in_place: Buffers that share the memory of another; see `Memory`.
        recording: Where to record times. None records nothing.
        kernels_from: See `real.kernels.topk.TopK`.
        begins_freed: See `Memory`.

    Raises:
        RunError: There is not enough memory, times cannot be recorded, a rank is missing, or see
            `check_order_of_issue`.
    """
    check_order_of_issue(plan, connection.backend)
    memory = Memory(
        plan,
        connection.device,
        buffers,
        scratch_nbytes=scratch_nbytes(plan) + transforms.selecting_nbytes(plan, connection.device, kernels_from),
        in_place=in_place,
        kernels_from=kernels_from,
        begins_freed=begins_freed,
    )
    world = _make_world(connection, plan)
    recorder = None if recording is None else _make_recorder(connection, plan, recording)
    return Session(connection, plan, delays, memory, world, recorder, connection.guard)


def _make_world(connection: Connection, plan: Plan) -> ProcessWorld:
    """Make the process groups of a plan, which end with the connection. All ranks take part."""
    world = ProcessWorld(
        groups_of(plan),
        timeout_s=connection.timeout_s,
        everyone=connection.group,
        servers=late_servers(plan),
    )
    connection.made.extend(world.made)
    return world


def _make_recorder(connection: Connection, plan: Plan, recording: Recording) -> Recorder:
    """Make the recorder of this rank. All ranks take part."""
    path = part_path(recording.folder, connection.place.rank)
    if recording.by_all:
        try:
            recording.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"cannot be written: {error.strerror or error}; copy the run to where it can"
            raise RunError(f"{recording.folder}: {told}") from None
        return Recorder(plan, path)
    with byte_transfer.raising_on_all(group=connection.group):
        return Recorder(plan, path)
    return Recorder(plan)  # another machine than rank 0's need not have the folder
