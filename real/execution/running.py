"""One run: a plan performed by connected processes, and its trace."""

import json
import platform
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from real.buffers import transforms
from real.buffers.memory import Memory
from real.collectives.byte_transfer import gather_texts
from real.collectives.worlds import ProcessWorld, check_performable
from real.execution.attempts import PerformedAttempt
from real.execution.executor import Executor, World
from real.execution.failing import FailNode
from real.execution.gpu import await_kernels, count_memory, most_allocated_nbytes
from real.execution.streams import Lanes
from real.kernels.topk import KERNELS_FROM
from real.processes.heartbeat import Guard
from real.processes.launch import Connection
from real.programs.base import Program
from real.recording.clock import Clocks
from real.recording.timing import now_s, precise_sleeps
from real.session import Recording, Session, open_session
from simdist.errors import RunError
from simdist.plan import Collective, Plan
from simdist.plan.delays import Delays
from simdist.plan.text import op_text
from simdist.traces.trace import Trace

MakeProgram = Callable[[Memory, threading.Event], Program]

_N_PROBES = 2000


@dataclass(frozen=True, slots=True)
class RunReport:
    """Describes a run, in addition to its trace.

    Args:
        run, digest: Unique name of the run, digest of the plan.
        program, backend, device: Program; `gloo`, `nccl`, or `simulated` for one real rank among simulated peers;
            device of computation.
        precision: Precision in which a model was computed. Null of a program without one.
        hosts: Machine (str) of each rank.
        versions: Software (str).
        makespan_s: From the common start to the end of the last operation.
        clock_ahead_s, clock_uncertainty_s: Lead of each rank's clock over rank 0's, and its uncertainty: at the start,
            at the end.
        buffers_nbytes: Peak bytes of the plan's buffers on each rank, without gradients that autograd has.
        allocated_nbytes: Peak bytes of all tensors on each rank's GPU (`torch.cuda.max_memory_allocated`). Null on
            CPUs.
        selections: By buffer, how rank 0 finds its largest entries: `torch.topk`; by `groups` on a CPU; by `kernels` of
            simdist on a GPU; `trivial` if all or none are taken. `recorded` as a CUDA graph.
        tracing_s, tracing_share: Time of a rank for recording times, and its share of the makespan.
        reads: With a data set: "Sums of what was read".
        links: Only with misbehaving links: the value of `--links`.
    """

    run: str
    digest: str
    program: str
    precision: str | None
    backend: str
    device: str
    hosts: tuple[str, ...]
    versions: Mapping[str, str]
    makespan_s: float
    clock_ahead_s: tuple[tuple[float, ...], tuple[float, ...]]
    clock_uncertainty_s: tuple[tuple[float, ...], tuple[float, ...]]
    buffers_nbytes: tuple[int, ...]
    allocated_nbytes: tuple[int, ...] | None
    selections: Mapping[str, str]
    tracing_s: float
    tracing_share: float
    reads: Mapping[str, int] | None = None
    links: str | None = None

    def dumps(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The program of a run, made when its memory is available.

    Args:
        name: Name for the report.
        buffers: Names of the buffers that need memory.
        make: Makes the program from the memory and the event that is set when the run has failed.
        precision: Precision in which a model is computed; None without a model.
        gives_back: See `Executor`.
        kernels_from: See `real.kernels.topk.TopK`.
    """

    name: str
    buffers: Collection[str]
    make: MakeProgram
    precision: str | None = None
    gives_back: bool = False
    kernels_from: int = KERNELS_FROM


def perform_run(
    connection: Connection,
    plan: Plan,
    delays: Delays,
    program: ProgramSpec,
    *,
    parts: Path,
    begins: Callable[[float], None] | None = None,
    attempt: PerformedAttempt | None = None,
    fail_node: FailNode | None = None,
) -> tuple[Trace, RunReport] | None:
    """Perform a plan; all ranks take part, rank 0 gets the trace and the report.

    Args:
        connection: Connection to the other ranks.
        plan: A valid plan with one rank per process.
        delays: Channel -> float64 `[1, n_steps, world_size]`, seconds.
        program: The program that computes.
        parts: Folder for the times of the ranks of this machine.
        begins: Called with the start of the run, by this rank's `now_s`.
        attempt: With failures: where the run goes on, and what is to fail.
        fail_node: Lets nodes and links fail; see `FailingProgram`.

    Raises:
        RunError: Something failed, here or elsewhere. The times of finished operations stay in `parts`.
    """
    guard = connection.guard
    meeting = f"{plan.name}: meeting before the first step"
    with guard.explaining(meeting):
        session = open_session(
            connection,
            plan,
            delays,
            buffers=program.buffers,
            recording=Recording(parts, by_all=True),
            kernels_from=program.kernels_from,
            begins_freed=program.gives_back,
        )
    made = program.make(session.memory, guard.failed)
    if attempt is not None:
        made = attempt.failing(made, fail_node)
    first_step = 0 if attempt is None else attempt.first_step
    world = _ExplainedWorld(session.world, guard, plan.name)
    executor = make_executor(session, made, world, first_step=first_step, gives_back=program.gives_back)
    precise_sleeps()
    with guard.explaining(meeting):
        session.warm_up()
        await_kernels(connection.device)
        executor.prepare()
        count_memory(connection.device)
        start = session.start(begins)
        if attempt is not None:
            attempt.begins(start.start_s)
    executor.start_clock(start.start_s)
    executor.run()
    connection.barrier("the end of the run")
    with guard.explaining(f"{plan.name}: bringing the times together"):
        source = f"real {connection.backend} on {connection.device.type}, {program.name}"
        trace, clocks = session.gather(start, source)
        selections = transforms.selections(plan, session.memory)
        report = _report(connection, plan, program, trace, clocks, executor.peak_nbytes, selections)
    if trace is None or report is None:
        return None
    named = replace(trace, run=report.run)
    return (attempt.finished(named) if attempt else named), report


def make_executor(
    session: Session,
    program: Program,
    world: World,
    *,
    first_step: int = 0,
    compute_in_caller: bool = False,
    waiting: Callable[[], AbstractContextManager[object]] | None = None,
    gives_back: bool = False,
) -> Executor:
    """Make the executor of a session's plan on this rank.

    Args:
        session: The parts of the run.
        program: The program that computes.
        world: The world of the session, or a wrapper of it.
        first_step: First step to perform, when resuming from a checkpoint.
        compute_in_caller: See `Lanes`.
        waiting: See `Executor`.
        gives_back: See `Executor`.
    """
    device = session.connection.device
    blocks = session.connection.backend == "gloo"
    return Executor(
        session.plan,
        rank=session.rank,
        delays=session.delays,
        world=world,
        program=program,
        memory=session.memory,
        lanes=Lanes(device, collectives_block=blocks, compute_in_caller=compute_in_caller),
        recorder=session.recorder,
        watch=session.watch,
        first_step=first_step,
        waiting=waiting,
        gives_back=gives_back,
    )


class _ExplainedWorld:
    """Reports a failed collective, and the rank that caused the failure."""

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
        """Name the rank that failed first, because servers know only the ranks that have left."""
        try:
            yield
        except RuntimeError as error:  # includes DistError of torch
            if isinstance(error, RunError) and not self._guard.learns_of_failure():
                raise
            raise self._guard.explain(error, f"{self._name}: {doing}") from error


def _report(
    connection: Connection,
    plan: Plan,
    program: ProgramSpec,
    trace: Trace | None,
    clocks: tuple[Clocks, Clocks],
    peak_nbytes: int,
    selections: Mapping[str, str],
) -> RunReport | None:
    hosts = gather_texts(socket.gethostname())
    device = connection.device
    peaks_nbytes = tuple(map(int, gather_texts(str(peak_nbytes))))
    allocated_nbytes = tuple(map(int, gather_texts(str(most_allocated_nbytes(device)))))
    if trace is None:
        return None
    report = report_on(
        plan,
        program,
        backend=connection.backend,
        device=device,
        makespan_s=trace.makespan_s,
        buffers_nbytes=peaks_nbytes,
        selections=selections,
    )
    return replace(
        report,
        hosts=tuple(hosts),
        clock_ahead_s=(tuple(clocks[0].ahead_s.tolist()), tuple(clocks[1].ahead_s.tolist())),
        clock_uncertainty_s=(tuple(clocks[0].uncertainty_s.tolist()), tuple(clocks[1].uncertainty_s.tolist())),
        allocated_nbytes=allocated_nbytes if device.type == "cuda" else None,
    )


def report_on(
    plan: Plan,
    program: ProgramSpec,
    *,
    backend: str,
    device: torch.device,
    makespan_s: float,
    buffers_nbytes: tuple[int, ...],
    selections: Mapping[str, str],
) -> RunReport:
    """Return the report on a run of this process alone; the arguments are those of `RunReport`."""
    tracing_s = _seconds_of_noting() * plan.n_instances
    return RunReport(
        run=secrets.token_hex(8),
        digest=plan.digest(),
        program=program.name,
        precision=program.precision,
        backend=backend,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        hosts=(socket.gethostname(),),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        makespan_s=makespan_s,
        clock_ahead_s=((0.0,), (0.0,)),
        clock_uncertainty_s=((0.0,), (0.0,)),
        buffers_nbytes=buffers_nbytes,
        allocated_nbytes=(most_allocated_nbytes(device),) if device.type == "cuda" else None,
        selections=selections,
        tracing_s=tracing_s,
        tracing_share=tracing_s / makespan_s if makespan_s else 0.0,
    )


def _seconds_of_noting() -> float:
    """Measure the seconds that recording the times of one instance takes."""
    times = np.full((3, _N_PROBES), np.nan)
    begin_s = now_s()
    for index in range(_N_PROBES):
        times[0, index] = times[1, index] = now_s()
        times[2, index] = now_s()
    return (now_s() - begin_s) / _N_PROBES


def check_world(plan: Plan, world_size: int) -> None:
    """Refuse a plan that these processes cannot perform.

    Raises:
        RunError: The plan is for another number of ranks, or can be simulated only.
    """
    check_performable(plan)
    if plan.world_size != world_size:
        raise RunError(
            f"plan {plan.name} is for {plan.world_size} ranks, but {world_size} processes were started: "
            f"torchrun --nproc-per-node {plan.world_size} -m real ... (or --nnodes M --nproc-per-node N, M x N = "
            f"{plan.world_size})"
        )
