"""One run: a plan, performed by the processes that are connected, and the trace that it leaves."""

import json
import platform
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from real.buffers.memory import Memory
from real.collectives.byte_transfer import gather_texts
from real.collectives.worlds import ProcessWorld, check_servers, groups_of, scratch_nbytes
from real.execution.executor import Executor, Lanes
from real.processes.heartbeat import Guard
from real.processes.launch import Connection
from real.programs.base import Program
from real.recording.clock import Clocks, common_start_s, compare
from real.recording.recorder import RecordedPart, Recorder, gather, part_path, write_part
from real.recording.timing import now_s, precise_sleeps
from simdist.errors import RunError
from simdist.plan import Channel, Collective, Plan
from simdist.plan.text import op_text
from simdist.traces.trace import Trace

MakeProgram = Callable[[Memory, threading.Event], Program]

_N_PROBES = 2000


@dataclass(frozen=True, slots=True)
class RunReport:
    """Describes a run beside its trace.

    Args:
        run: Unique name of the run, also in the header of `trace.real.npz`.
        digest: Digest of the plan.
        program: Program that computed.
        backend: Backend of collectives: `gloo` or `nccl`.
        device: Device of computation.
        hosts: Machine (str) of each rank.
        versions: Versions (str) of the software.
        makespan_s: From the common start to the end of the last operation.
        clock_ahead_s: How far the clock of each rank was ahead of rank 0's: a list at the start, another at the end.
        clock_uncertainty_s: Its uncertainty, in the same form. 0 for ranks on the machine of rank 0.
        tracing_s: Time that a rank spent on recording times.
        tracing_share: The same as a share of the makespan.
        reads: Only with a data set: "Sums of what was read".
        links: Only with misbehaving links: what performed that, as given by `--links`.
    """

    run: str
    digest: str
    program: str
    backend: str
    device: str
    hosts: tuple[str, ...]
    versions: Mapping[str, str]
    makespan_s: float
    clock_ahead_s: tuple[tuple[float, ...], tuple[float, ...]]
    clock_uncertainty_s: tuple[tuple[float, ...], tuple[float, ...]]
    tracing_s: float
    tracing_share: float
    reads: Mapping[str, int] | None = None
    links: str | None = None

    def dumps(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def perform(
    connection: Connection,
    plan: Plan,
    delays: Mapping[Channel, NDArray[np.float64]],
    *,
    buffers: set[str],
    program: MakeProgram,
    program_name: str,
    timeout_s: float,
    parts: Path,
    begins: Callable[[float], None] | None = None,
) -> tuple[Trace, RunReport] | None:
    """Perform a plan; all ranks take part, rank 0 gets the trace and the report.

    Args:
        connection: To the other ranks.
        plan: A legal plan of as many ranks as there are processes.
        delays: Channel -> float64 `[1, n_steps, world_size]`, seconds.
        buffers: Names of the buffers that need memory.
        program: Makes the program from the memory, and from what is set when the run has failed.
        program_name: For the report.
        timeout_s: After which a collective gives up.
        parts: Folder for the times that the ranks of this machine note.
        begins: Called with the moment when the run begins, by this rank's `now_s`.

    Raises:
        RunError: Something failed, here or elsewhere; the times of what was done stay in `parts`.
    """
    place = connection.place
    guard = connection.guard
    memory = Memory(plan, connection.device, buffers, scratch_nbytes=scratch_nbytes(plan))
    made = program(memory, guard.failed)
    meeting = f"{plan.name}: meeting before the first step"
    with guard.explaining(meeting):
        world = ProcessWorld(groups_of(plan), timeout_s=timeout_s)
    try:
        parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{parts}: cannot be written: {error.strerror or error}; copy the run to where it can") from None
    recorder = Recorder(plan, part_path(parts, place.rank))
    running = Executor(
        plan,
        rank=place.rank,
        delays=delays,
        world=_ExplainedWorld(world, guard, plan.name),
        program=made,
        memory=memory,
        lanes=Lanes(connection.device, collectives_block=connection.backend == "gloo"),
        recorder=recorder,
        watch=guard,
    )
    precise_sleeps()
    with guard.explaining(meeting):
        world.warm_up(plan, connection.device)
        at_start = compare()
        start_s = common_start_s(at_start)
    if begins is not None:
        begins(start_s)
    write_part(parts, RecordedPart(place.rank, plan.digest(), start_s))
    running.start_clock(start_s)
    running.run()
    connection.barrier("the end of the run")
    with guard.explaining(f"{plan.name}: bringing the times together"):
        at_end = compare()
        source = f"real {connection.backend} on {connection.device.type}, {program_name}"
        late = world.late(plan)
        trace = gather(recorder, plan, start_s=start_s, clocks=(at_start, at_end), source=source, late=late)
        report = _report(connection, plan, program_name, trace, (at_start, at_end))
    return (replace(trace, run=report.run), report) if trace and report else None


def forget(parts: Path, rank: int) -> None:
    """Delete the times and the counts of a rank, and the folder if no other rank's are there."""
    for path in parts.glob(f"*-{rank:05d}.*"):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        parts.rmdir()


class _ExplainedWorld:
    """Says of a collective that failed which one it was, and who is to blame."""

    def __init__(self, world: ProcessWorld, guard: Guard, name: str) -> None:
        self._world = world
        self._guard = guard
        self._name = name

    def perform(self, op: Collective, memory: Memory) -> None:
        with self._explaining(op_text(op)):
            self._world.perform(op, memory)

    def is_over(self) -> bool:
        with self._explaining("entering a step"):
            return self._world.is_over()

    @contextmanager
    def _explaining(self, doing: str) -> Iterator[None]:
        """Name the rank that failed first, where servers know only who has left."""
        try:
            yield
        except RuntimeError as error:  # torch's DistError is one
            if isinstance(error, RunError) and not self._guard.learns_of_failure():
                raise
            raise self._guard.explain(error, f"{self._name}: {doing}") from error


def _report(
    connection: Connection, plan: Plan, program: str, trace: Trace | None, clocks: tuple[Clocks, Clocks]
) -> RunReport | None:
    hosts = gather_texts(socket.gethostname())
    if trace is None:
        return None
    tracing_s = _seconds_of_noting() * plan.n_instances
    device = connection.device
    return RunReport(
        run=secrets.token_hex(8),
        digest=plan.digest(),
        program=program,
        backend=connection.backend,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        hosts=tuple(hosts),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        makespan_s=trace.makespan_s,
        clock_ahead_s=(tuple(clocks[0].ahead_s.tolist()), tuple(clocks[1].ahead_s.tolist())),
        clock_uncertainty_s=(tuple(clocks[0].uncertainty_s.tolist()), tuple(clocks[1].uncertainty_s.tolist())),
        tracing_s=tracing_s,
        tracing_share=tracing_s / trace.makespan_s if trace.makespan_s else 0.0,
    )


def _seconds_of_noting() -> float:
    """Measure what it takes to note the times of one instance."""
    times = np.full((3, _N_PROBES), np.nan)
    begin_s = now_s()
    for index in range(_N_PROBES):
        times[0, index] = times[1, index] = now_s()
        times[2, index] = now_s()
    return (now_s() - begin_s) / _N_PROBES


def check_world(plan: Plan, world_size: int) -> None:
    """Refuse a plan that these processes cannot perform.

    Raises:
        RunError: It is for another number of ranks, or has servers beside them.
    """
    check_servers(plan)
    if plan.world_size != world_size:
        raise RunError(
            f"plan {plan.name} is for {plan.world_size} ranks, but {world_size} processes were started: "
            f"torchrun --nproc-per-node {plan.world_size} -m real ... (or --nnodes M --nproc-per-node N, M x N = "
            f"{plan.world_size})"
        )
