"""The streams of one rank, each with its lane, and the waits between them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import final

import torch

from real.execution.gpu import GpuClock
from real.execution.host_times import HostTimes
from real.execution.lanes import CudaLane, DirectLane, OnEnd, Perform, Performer, ThreadLane
from real.execution.remaining import RemainingPlan
from real.recording.recorder import Recorder
from simdist.plan import Instance, ops
from simdist.plan.lanes import COMM, COMPUTE, HOST, IO


@dataclass(frozen=True, slots=True)
class Lanes:
    """Settings of a rank's streams.

    Args:
        device: Device of computation.
        collectives_block: Collectives block their caller (gloo), so they need a thread. Those of NCCL are enqueued.
        compute_in_caller: On a CPU, the thread that walks the plan also computes, as in a user's own training loop.
            Otherwise a separate thread computes. On a GPU this makes no difference.
    """

    device: torch.device
    collectives_block: bool
    compute_in_caller: bool = False


@final
class Streams:
    """Performs the instances of a plan in the lanes of their streams.

    Args:
        remaining: The plan.
        lanes: Settings.
        performed: What each lane does with an instance, see `Performer`.
        has_ticks: The plan has ticks, for which a collective's thread sleeps.
        check: Raises if the run has failed.
        waiting: Makes the context in which the host or computation waits for communication.
    """

    def __init__(
        self,
        remaining: RemainingPlan,
        lanes: Lanes,
        *,
        performed: tuple[Perform, Recorder | None, OnEnd],
        has_ticks: bool,
        check: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[object]] | None,
    ) -> None:
        self._remaining = remaining
        self._check_run = check
        self._waiting = waiting
        self._errors: list[BaseException] = []  # from lanes, the first cause first
        self._communicating = {each.stream for each in remaining.plan.lanes if each.kind == "comm"}
        self._lanes = self._made(lanes, performed, has_ticks)
        _, recorder, _ = performed
        is_timed = any(isinstance(op, ops.KernelLaunch) for op in remaining.plan.distinct_ops)
        self._host_times = HostTimes(recorder) if recorder and is_timed else None

    def lane(self, instance: Instance) -> Performer:
        """Return the lane that performs an instance."""
        return self._lanes[instance.lane.stream]

    def submit(self, instance: Instance) -> None:
        """Hand an instance to its lane."""
        self.lane(instance).submit(instance)
        if self._host_times:
            self._host_times.submitted(instance)

    def check(self) -> None:
        """Raise the first error of a lane, or RunError if the run has failed."""
        if self._errors:
            raise self._errors[0]
        self._check_run()

    def await_before(self, instance: Instance) -> None:
        """Let an instance wait for those that it follows in other lanes."""
        cuda_stream = self.lane(instance).cuda_stream
        with self._context_of_wait(instance):
            for index in instance.after:
                if self._remaining.remains(index):
                    self._lanes[self._remaining.stream(index, instance)].order(index, cuda_stream)

    def let_wait(self, stream: str, instances: Mapping[str, int]) -> bool:
        """Let a CUDA stream wait for instances of other streams.

        Args:
            stream: Name of the stream.
            instances: By stream, one that was submitted.

        Returns:
            False if the stream is a thread, which does not wait.
        """
        cuda_stream = self._lanes[stream].cuda_stream
        if cuda_stream is None:
            return False
        for other, index in instances.items():
            self._lanes[other].order(index, cuda_stream)
        return True

    def arriving_in_thread(self) -> Iterator[Instance] | None:
        """Return the next instances of computation as they arrive, if a thread computes, which must be the caller."""
        lane = self._lanes[COMPUTE.stream]
        return lane.instances() if isinstance(lane, ThreadLane) else None

    def drain(self) -> None:
        """Wait until all submitted instances are done."""
        for lane in self._lanes.values():
            lane.drain()
        self.check()

    def close(self) -> None:
        """Tell the threads to end."""
        for lane in self._lanes.values():
            lane.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, with a time limit for each."""
        for lane in self._lanes.values():
            lane.join(timeout_s)

    def _context_of_wait(self, instance: Instance) -> AbstractContextManager[object]:
        """Return the context in which an instance waits for those before it."""
        if self._waiting is None or instance.lane.kind not in {"compute", "host"}:
            return nullcontext()
        streams = (self._remaining.stream(each, instance) for each in instance.after if self._remaining.remains(each))
        return nullcontext() if self._communicating.isdisjoint(streams) else self._waiting()

    def _made(
        self, lanes: Lanes, performed: tuple[Perform, Recorder | None, OnEnd], has_ticks: bool
    ) -> dict[str, Performer]:
        """Make the lane of each stream. Lanes that share a communicator take turns in program order."""
        device = lanes.device

        def thread(stream: str) -> ThreadLane:
            return ThreadLane(*performed, name=stream, device=device, failed=self.check, on_error=self._errors.append)

        compute: Performer
        on_gpu = device.type == "cuda"
        in_thread = not on_gpu or lanes.collectives_block or has_ticks
        used = {COMM, IO, *(ops.lane_of(op) for body in self._remaining.plan.bodies for op in body)}
        if on_gpu:
            enqueued = partial(CudaLane, *performed, clock=GpuClock(torch.cuda.Stream(device)), failed=self.check)
            compute = enqueued(torch.cuda.current_stream(device))
        else:
            compute = DirectLane(*performed) if lanes.compute_in_caller else thread("compute")
        made: dict[str, Performer] = {HOST.stream: DirectLane(*performed), COMPUTE.stream: compute}
        for each in self._remaining.plan.lanes:
            if each in used and each.stream not in made:
                enqueues = each.kind == "comm" and not in_thread
                made[each.stream] = enqueued(torch.cuda.Stream(device)) if enqueues else thread(each.stream)
        return made
