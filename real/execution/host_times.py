"""The host's time for launching operations, as the times of a plan's kernel launches."""

from typing import final

from real.recording.recorder import Recorder
from real.recording.timing import now_s
from simdist.plan import Instance, KernelLaunch
from simdist.plan.launches import MANY_KERNELS
from simdist.plan.ops import launch_kind


@final
class HostTimes:
    """Records how long the host takes to launch each operation that has a `KernelLaunch`.

    The host does one thing after the other. So a launch begins when the last thing before it has ended. It ends when
    its operation, which may stand before or behind it, has been submitted. Where a thread performs operations, as on a
    CPU, it only takes handing them over.

    Args:
        recorder: Takes the times.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._free_s = now_s()
        self._begun: int | None = None  # a launch whose operation comes next

    def submitted(self, instance: Instance) -> None:
        """Note that the host has submitted an instance, or has performed one of its own."""
        at_s = now_s()
        op = instance.op
        if isinstance(op, KernelLaunch):
            self._recorder.begin(instance.index, self._free_s)
            if op.kind in MANY_KERNELS:
                self._recorder.end(instance.index, at_s)
                self._free_s = at_s
            else:
                self._begun = instance.index
            return
        if self._begun is not None:
            self._recorder.end(self._begun, at_s)
            self._begun = None
        elif launch_kind(op) in MANY_KERNELS:
            return  # its launch comes next
        self._free_s = at_s
