"""The host's time for launching operations, as the times of a plan's kernel launches."""

from typing import final

from real.recording.recorder import Recorder
from real.recording.timing import now_s
from simdist.plan import Instance, KernelLaunch
from simdist.plan.ops import launch_kind


@final
class HostTimes:
    """Records how long the host takes to launch each operation that has a `KernelLaunch` behind it.

    The host does one thing after the other. So a launch begins when the last thing before its operation has ended, and
    ends when the host is done with it. Where threads perform operations, as on a CPU, it only takes handing them over.

    Args:
        recorder: Takes the times.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._free_s = now_s()

    def submitted(self, instance: Instance) -> None:
        """Note that the host has submitted an instance, or has performed one of its own."""
        if isinstance(instance.op, KernelLaunch):
            self._recorder.begin(instance.index, self._free_s)
        elif launch_kind(instance.op):
            return  # its launch comes next
        self._free_s = now_s()
        if isinstance(instance.op, KernelLaunch):
            self._recorder.end(instance.index, self._free_s)
