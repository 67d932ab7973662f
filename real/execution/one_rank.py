"""A plan, performed by one real rank among simulated ones, in this process alone."""

import threading
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray

from real.buffers import transforms
from real.buffers.memory import Memory
from real.execution.executor import Executor, World
from real.execution.gpu import await_kernels, count_memory
from real.execution.running import ProgramSpec, RunReport, report_on
from real.execution.simulated_peers import SimulatedPeers
from real.execution.streams import Lanes
from real.recording.recorder import Recorder
from real.recording.timing import precise_sleeps
from simdist.errors import RunError
from simdist.plan import Plan
from simdist.plan.delays import Delays
from simdist.traces.peers import PeerArrivals


@final
class _LocalWatch:
    """Watches a run of one process: it fails when a thread of it fails.

    Attributes:
        position: See `Executor`.
        failed: Set when the run has failed.
    """

    def __init__(self) -> None:
        self.position = -1
        self.failed = threading.Event()

    def check(self) -> None:
        """Raise RunError if the run has failed."""
        if self.failed.is_set():
            raise RunError("the run has failed")


class _TimedWorld(World, Protocol):
    """A world that also knows when its run begins, and when its collectives ended."""

    def start(self) -> float:
        """Let the run begin now; return when that is, by this rank's clock."""

    def ends_s(self) -> NDArray[np.float64]:
        """Return when each collective ended for the peers, seconds since the start, float64 `[n]`."""


def _world(
    plan: Plan, peers: PeerArrivals, device: torch.device, channels: int, failed: threading.Event
) -> _TimedWorld:
    if device.type != "cuda":
        return SimulatedPeers(plan, peers, failed)
    from real.execution.gpu_peers import GpuPeers  # its kernels take a second to load, and are only useful with a GPU

    return GpuPeers(plan, peers, device, channels=channels)


@dataclass(frozen=True, slots=True)
class OneRank:
    """What one real rank did among its simulated peers.

    Args:
        times_s: When each operation was ready, and when it ended, seconds since the start, float64 `[2, n_instances]`.
        ends_s: When each collective ended for the peers, float64 `[n]`, as numbered in `PeerArrivals`.
        report: Describes the run.
    """

    times_s: NDArray[np.float64]
    ends_s: NDArray[np.float64]
    report: RunReport


def perform_among_simulated(
    plan: Plan, delays: Delays, program: ProgramSpec, peers: PeerArrivals, *, device: torch.device, channels: int = 0
) -> OneRank:
    """Perform a plan on one real rank whose peers are simulated.

    Args:
        plan: A valid plan.
        delays: Channel -> float64 `[1, n_steps, world_size]`, seconds.
        program: The program that computes.
        peers: The peers of the rank.
        device: Where it computes.
        channels: See `GpuPeers`.

    Raises:
        RunError: Something failed.
    """
    watch = _LocalWatch()
    memory = Memory(
        plan,
        device,
        program.buffers,
        scratch_nbytes=transforms.selecting_nbytes(plan, device, program.kernels_from),
        kernels_from=program.kernels_from,
        begins_freed=program.gives_back,
    )
    made = program.make(memory, watch.failed)
    on_gpu = device.type == "cuda"
    world = _world(plan, peers, device, channels, watch.failed)
    recorder = Recorder(plan)
    executor = Executor(
        plan,
        rank=peers.rank,
        delays=delays,
        world=world,
        program=made,
        memory=memory,
        lanes=Lanes(device, collectives_block=not on_gpu),
        recorder=recorder,
        watch=watch,
        gives_back=program.gives_back,
    )
    precise_sleeps()
    await_kernels(device)
    executor.prepare()
    count_memory(device)
    start_s = world.start()
    executor.start_clock(start_s)
    try:
        executor.run()
    except BaseException:
        watch.failed.set()
        raise
    times_s = recorder.times_s[[0, 2]] - start_s
    makespan_s = float(times_s[1].max())
    report = report_on(
        plan,
        program,
        backend="simulated",
        device=device,
        makespan_s=makespan_s,
        buffers_nbytes=(executor.peak_nbytes,),
        selections=transforms.selections(plan, memory),
    )
    return OneRank(times_s, world.ends_s(), report)
