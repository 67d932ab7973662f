"""When something periodic happens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Every:
    """Fire on the last step of each period, counted from step `start`.

    >>> [step for step in range(10) if Every(4, start=2).fires(step)]
    [5, 9]

    Some libraries fire elsewhere: with a `phase`, fire at the steps from `start` on that are `phase` modulo `period`.
    PyTorch's `HierarchicalModelAverager` has phase 0, its `PeriodicModelAverager` phase `warmup_steps % period`.

    >>> [step for step in range(10) if Every(4, start=2, phase=0).fires(step)]
    [4, 8]
    """

    period: int
    start: int = 0
    phase: int | None = None

    def fires(self, step: int) -> bool:
        """Tell whether it happens in `step`."""
        if step < self.start:
            return False
        if self.phase is None:
            return (step - self.start) % self.period == self.period - 1
        return step % self.period == self.phase % self.period
