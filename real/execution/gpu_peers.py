"""One real rank among simulated ones on a GPU: its collectives are kernels that wait by the clock of the GPU."""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from real.buffers.memory import Memory
from real.collectives.equals import combine_equal
from real.execution.gpu import await_kernels
from real.execution.simulated_peers import numbers_by_lane
from real.kernels import triton_meeting
from real.kernels.triton_meeting import PeerTables
from real.recording.timing import now_s
from simdist.errors import RunError
from simdist.plan import Plan, ops
from simdist.plan.text import op_name
from simdist.traces.collectives import bus_factor
from simdist.traces.peers import PeerArrivals

_SCRATCH_NBYTES = 2**27  # more than the caches of GPUs hold
_IDLE = PeerArrivals(0, np.zeros(1, np.int64), np.zeros(1), np.zeros((1, 1), np.int64), np.full((1, 1), -np.inf))


@final
class GpuPeers:
    """Performs collectives with simulated peers on a GPU.

    A kernel on the stream of the collective waits for the peers. The host does not wait.

    Args:
        plan: The plan.
        peers: The peers of the rank.
        device: The GPU.
        channels: Thread blocks that a collective takes and copies with, as NCCL with so many channels. 0: it takes one,
            and copies nothing.
    """

    def __init__(
        self,
        plan: Plan,
        peers: PeerArrivals,
        device: torch.device,
        *,
        channels: int,
    ) -> None:
        self._peers = peers
        self._device = device
        self._channels = channels
        self._due = numbers_by_lane(plan)
        self._meetings = PeerTables.of(peers, device, scratch_nbytes=_SCRATCH_NBYTES if channels else 0)

    def start(self) -> float:
        """Let the run begin now; return when that is, by this rank's clock. Kernels are compiled before."""
        idle = PeerTables.of(_IDLE, self._device, scratch_nbytes=0)
        triton_meeting.note_time(idle.arrived, 0)
        triton_meeting.hold(idle, 0, channels=1, nbytes=0)
        await_kernels(self._device)
        before_s = now_s()
        triton_meeting.note_time(self._meetings.ends, 0)
        await_kernels(self._device)
        return (before_s + now_s()) / 2

    def ends_s(self) -> NDArray[np.float64]:
        """Return when each collective ended for the peers, seconds since the start, float64 `[n]`."""
        ends = self._meetings.ends.cpu().numpy()
        return np.asarray((ends[1:] - ends[0]) / 1e9)

    def perform(self, op: ops.Collective, memory: Memory) -> None:
        """Enqueue the collective on the current stream."""
        number = self._due[op.lane].popleft()
        triton_meeting.note_time(self._meetings.arrived, number)
        combine_equal(op, memory, self._peers.rank)
        moved_nbytes = bus_factor(op_name(op), op.group.size) * _whole_nbytes(op, memory) if self._channels else 0
        triton_meeting.hold(self._meetings, number, channels=max(1, self._channels), nbytes=int(moved_nbytes))

    def is_over(self) -> bool:
        """Refuse: late ranks are dropped by other ranks, which are simulated."""
        raise RunError("an all-reduce drops the late, which simulated peers cannot know")


def _whole_nbytes(op: ops.Collective, memory: Memory) -> int:
    """Return the bytes of the whole that a collective is about: what a rank has before or after it, if that is more."""
    return max(
        sum(tensor.nbytes for name in names for tensor in memory.tensors(name))
        for names in (ops.reads(op), ops.writes(op))
    )
