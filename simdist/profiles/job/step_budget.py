"""The parts of a job's steps, averaged per rank and over all ranks, and the largest part that could be removed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from simdist.profiles.job.exchanges import transfers_of
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.step_parts import EXPOSED, StepPart
from simdist.settings.units import format_seconds, format_share

_NOTABLE = 0.05  # of a step; smaller parts give no advice
_STRAGGLING = "straggler-bound"
_COMMUNICATION = "communication-bound"
_WAITING = "bound by waiting"
_LAUNCHES = "launch-bound"
_INPUT = "input-bound"
_HOST = "host-bound"
_UNSEEN = "bound by what is not traced"
# the bottleneck of the job -> the cause of the time, and the remedy
_REMEDIES: Final = {
    _STRAGGLING: ("ranks wait for late ones", "repair these, or see `simdist whatif`"),
    _COMMUNICATION: ("communication is exposed", "communicate less, more seldom, or behind computing"),
    _WAITING: (
        "ranks wait for one another, late in turns by no more than the noise of all",
        "average more seldom, or find what disturbs all ranks",
    ),
    _LAUNCHES: (
        "the device is idle until the host launches its next kernel",
        "larger batches, CUDA graphs, torch.compile or fused operators help",
    ),
    _INPUT: ("the device waits for its batch", "more loader workers, faster storage or a cache help"),
    _HOST: (
        "the host pauses, running no operator",
        "look for Python between operators, garbage collection, logging and checkpoints",
    ),
    _UNSEEN: (
        "the device is idle though kernels are queued, and the traces do not show what they wait for",
        "trace all streams and processes of the device",
    ),
}


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The parts of a job's steps.

    Args:
        ranks: Traced ranks.
        parts_s: Mean seconds of each `StepPart`, `[n_traced_ranks, n_parts]`; the parts of a rank add up to its step.
        ahead_s: Median time by which the host of each rank was ahead of its device when it began a step.
        straggling_s: Seconds of a step that the job loses to stragglers, including the wait of the others.
        lasting_s: Additional seconds of the slowest rank in most steps. Averaging less often does not hide them.
        loading_s: Seconds of exposed communication in which ranks wait for the slowest loader, mean over ranks.
        beside_s: Seconds of a step in which operators run on CPUs beside collectives, mean over ranks.
        waiting_s: Seconds of exposed communication in which ranks wait for later ranks, mean over ranks.
    """

    ranks: tuple[int, ...]
    parts_s: Floats
    ahead_s: tuple[float, ...]
    straggling_s: float
    lasting_s: float
    loading_s: float
    beside_s: float
    waiting_s: float

    @property
    def of_all_s(self) -> Floats:
        """Seconds of each part, mean over ranks, `[n_parts]`."""
        return np.asarray(self.parts_s.mean(axis=0))

    @property
    def step_s(self) -> float:
        """Seconds of a step, mean over ranks."""
        return float(self.of_all_s.sum())

    @property
    def removable_s(self) -> dict[str, float]:
        """Bottleneck -> seconds of a step that it costs, the largest first."""
        of_all_s = self.of_all_s
        straggling_s = min(self.straggling_s, self.step_s)
        exposed_s = float(of_all_s[list(EXPOSED.values())].sum())
        seconds = {
            _STRAGGLING: straggling_s,
            _COMMUNICATION: max(0.0, exposed_s - max(self.waiting_s, straggling_s + self.loading_s)),
            _WAITING: max(0.0, self.waiting_s - straggling_s - self.loading_s),
            _LAUNCHES: float(of_all_s[[StepPart.SHORT_GAP, StepPart.LONG_GAP]].sum()),
            _INPUT: float(of_all_s[StepPart.INPUT]) + self.loading_s,
            _HOST: float(of_all_s[StepPart.HOST_PAUSE]),
            _UNSEEN: float(of_all_s[StepPart.QUEUED]),
        }
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    @property
    def fixed_s(self) -> float:
        """Seconds of a step that no schedule of communication changes."""
        removable_s = self.removable_s
        hidden_s = removable_s[_STRAGGLING] - min(self.lasting_s, removable_s[_STRAGGLING])
        return self.step_s - hidden_s - removable_s[_COMMUNICATION] - removable_s[_WAITING]

    @property
    def verdict(self) -> str:
        """Return a sentence on the job's bottleneck and on the part that no schedule changes."""
        (bound, seconds), *_ = self.removable_s.items()
        fixed = f"no schedule of communication changes {self._of_step(self.fixed_s)}"
        if seconds < _NOTABLE * self.step_s:
            computing = self._of_step(float(self.of_all_s[StepPart.COMPUTE]))
            return f"compute-bound: the device computes for {computing}; {fixed}"
        what, remedy = _REMEDIES[bound]
        return f"{bound}: for {self._of_step(seconds)} {what}; {remedy}; {fixed}"

    def _of_step(self, seconds: float) -> str:
        share = seconds / self.step_s if self.step_s else 0.0
        return f"{format_seconds(seconds)} of a step ({format_share(share)})"


def step_budget(
    profiles: Sequence[RankProfile], *, straggling_s: float = 0.0, lasting_s: float = 0.0, loading_s: float = 0.0
) -> StepBudget:
    """Return the parts of a job's steps.

    Args:
        profiles: One per traced rank.
        straggling_s: Seconds of a step that stragglers cost.
        lasting_s: Additional seconds of the slowest rank in most steps.
        loading_s: Seconds of exposed communication in which ranks wait for the slowest loader.
    """
    parts_s = np.array([np.mean([step.parts_s for step in each.steps], axis=0) for each in profiles])
    ahead_s = (float(np.median([step.start_s - step.marked_s for step in each.steps])) for each in profiles)
    ranks = (number if each.rank is None else each.rank for number, each in enumerate(profiles))
    beside_s = float(np.mean([np.mean([step.beside_s for step in each.steps]) for each in profiles]))
    exposed_s = float(parts_s[:, list(EXPOSED.values())].sum(axis=1).mean())
    sending_s = [
        math.fsum(each.exposed_s for step in steps for each in step) / max(1, len(steps))
        for steps in transfers_of(profiles)
    ]
    waiting_s = max(0.0, exposed_s - float(np.mean(sending_s)))
    return StepBudget(tuple(ranks), parts_s, tuple(ahead_s), straggling_s, lasting_s, loading_s, beside_s, waiting_s)
