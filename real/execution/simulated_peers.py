"""One real rank among simulated ones: it performs its own program, and meets its peers when the simulation says so.

There are no other processes and no messages. A collective takes as long as simulated, from the moment when its last
member is ready. The rank itself may be that member. Its peers then come later to what follows, as
`simdist.traces.peers` says. For values, each peer holds what this rank holds.
"""

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from real.buffers.memory import Memory
from real.collectives.equals import combine_equal
from real.execution.executor import Executor
from real.execution.gpu import await_kernels, count_memory
from real.execution.running import ProgramSpec, RunReport, report_on
from real.execution.streams import Lanes
from real.recording.recorder import Recorder
from real.recording.timing import Sleeper, now_s, precise_sleeps
from simdist.errors import RunError
from simdist.plan import COLLECTIVES, Plan, ops
from simdist.plan.delays import Delays
from simdist.plan.lanes import Lane
from simdist.plan.walk import walk
from simdist.traces.peers import PeerArrivals

_LOOK_S = 0.25  # interval at which a blocked thread checks whether the run has failed


@final
class SimulatedPeers:
    """Performs collectives with simulated peers, on a CPU.

    Args:
        plan: The plan.
        peers: The peers of the rank.
        failed: Set when the run has failed, which ends all waits.
    """

    def __init__(self, plan: Plan, peers: PeerArrivals, failed: threading.Event) -> None:
        self._peers = peers
        self._failed = failed
        self._sleep = Sleeper(failed)
        self._due = numbers_by_lane(plan)
        self._ends_s = np.full(len(peers) + 1, np.nan)
        self._changed = threading.Condition()

    def start(self, start_s: float) -> None:
        """Let the run begin at a moment of this rank's clock."""
        self._ends_s[0] = start_s

    def ends_s(self) -> NDArray[np.float64]:
        """Return when each collective ended for the peers, seconds since the start, float64 `[n]`."""
        return np.asarray(self._ends_s[1:] - self._ends_s[0])

    def perform(self, op: ops.Collective, memory: Memory) -> None:
        """Wait for the peers, and as long as the collective takes."""
        arrived_s = now_s()
        number = self._due[op.lane].popleft()
        combine_equal(op, memory, self._peers.rank)
        self._await_sources(number)
        end_s = max(arrived_s, self._peers.ready_s(number, self._ends_s)) + self._peers.seconds[number]
        with self._changed:
            self._ends_s[number + 1] = end_s
            self._changed.notify_all()
        self._sleep(end_s - now_s())

    def is_over(self) -> bool:
        """Refuse: late ranks are dropped by other ranks, which are simulated."""
        raise RunError("an all-reduce drops the late, which simulated peers cannot know")

    def _await_sources(self, number: int) -> None:
        """Wait until the collectives have ended, on other streams, that the peers depend on."""
        sources = self._peers.sources_of(number)
        with self._changed:
            while np.isnan(self._ends_s[sources]).any():
                if self._failed.is_set():
                    raise RunError("another stream has failed")
                self._changed.wait(_LOOK_S)


def numbers_by_lane(plan: Plan) -> dict[Lane, deque[int]]:
    """Return the numbers of collectives, as in `PeerArrivals`, by the lane that performs them, in order."""
    found: dict[Lane, deque[int]] = defaultdict(deque)
    for number, instance in enumerate(each for each in walk(plan) if isinstance(each.op, COLLECTIVES)):
        found[instance.lane].append(number)
    return found


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
    plan: Plan, delays: Delays, program: ProgramSpec, peers: PeerArrivals, *, device: torch.device
) -> OneRank:
    """Perform a plan on one real rank whose peers are simulated.

    Args:
        plan: A valid plan.
        delays: Channel -> float64 `[1, n_steps, world_size]`, seconds.
        program: The program that computes.
        peers: The peers of the rank.
        device: Where it computes.

    Raises:
        RunError: Something failed.
    """
    watch = _LocalWatch()
    memory = Memory(plan, device, program.buffers)
    made = program.make(memory, watch.failed)
    world = SimulatedPeers(plan, peers, watch.failed)
    recorder = Recorder(plan)
    executor = Executor(
        plan,
        rank=peers.rank,
        delays=delays,
        world=world,
        program=made,
        memory=memory,
        lanes=Lanes(device, collectives_block=True),
        recorder=recorder,
        watch=watch,
        gives_back=program.gives_back,
    )
    precise_sleeps()
    await_kernels(device)
    executor.prepare()
    count_memory(device)
    start_s = now_s()
    world.start(start_s)
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
    )
    return OneRank(times_s, world.ends_s(), report)
