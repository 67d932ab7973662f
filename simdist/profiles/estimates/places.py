"""The part of the step in which a delay occurred: input, forward pass, backward pass with its bucket, or update.

The seconds of each channel are divided into places. Computing has the forward pass, the backward pass from each
gradient bucket to the next, and the update. Pauses of the host have the place of the next work.

The excess of a place is its mean over the delayed steps and ranks, minus its median over all steps and all other ranks.
The delay is attributed to a place that has at least 0.8 of the total excess.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from simdist.plan.ops import Channel
from simdist.profiles.job.job import TracedJob
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.steps.model import RankStep

_Phase: TypeAlias = Literal["input", "forward", "backward", "update"]

_MOST_OF_IT = 0.8


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a step.

    Args:
        phase: The phase; None if the delay is spread over several.
        bucket: The gradient bucket that the backward pass was computing, from 1; None if the delay is spread over
            several buckets, or is not in the backward pass.
        n_buckets: Gradient buckets of a step; 0 if none are exchanged.
        follows: The collective that exchanges these buckets.
    """

    phase: _Phase | None
    bucket: int | None = None
    n_buckets: int = 0
    follows: str = "all_reduce"

    @property
    def text(self) -> str:
        """The place in words."""
        match self.phase:
            case None:
                return "throughout the step"
            case "backward" if self.bucket is not None and self.n_buckets > 1:
                return f"in backward before {self.follows} {self.bucket} of {self.n_buckets}"
            case "input":
                return "waiting for input"
            case _:
                return f"in {self.phase}"


class Places:
    """Seconds of all steps by place."""

    def __init__(self, job: TracedJob) -> None:
        sizes = Counter(len(step.gradient_calls) for each in job.profiles for step in each.steps)
        self._n_buckets = sizes.most_common(1)[0][0]
        kinds = Counter(call.kind for each in job.profiles for step in each.steps for call in step.gradient_calls)
        self._follows = kinds.most_common(1)[0][0] if kinds else "all_reduce"
        self._ranks = job.ranks
        self._steps = job.numbers
        rows = [[self._row(step) for step in each.steps] for each in job.profiles]
        self._seconds = np.array(rows, np.float64).transpose(1, 0, 2, 3)  # [n_steps, n_ranks, channel, place]

    def find(self, channel: Channel, ranks: Sequence[int], steps: Sequence[int]) -> Place | None:
        """Return the place of the delay of some ranks in some steps; None if the traces do not show it."""
        columns = [self._ranks.index(rank) for rank in ranks if rank in self._ranks]
        rows = [self._steps.index(step) for step in steps]
        if channel == "io":
            return Place("input") if columns else None
        of_channel = self._seconds[:, :, 0 if channel == "host" else 1]
        own_s = of_channel[np.ix_(rows, columns)].reshape(-1, of_channel.shape[2])
        own_s = own_s[np.isfinite(own_s).all(axis=1)]
        others = np.ones(of_channel.shape[:2], np.bool_)
        others[:, columns] = False
        if len(columns) == len(self._ranks):
            others[:] = True
            others[rows] = False
        others_s = of_channel[others]
        others_s = others_s[np.isfinite(others_s).all(axis=1)]
        if not len(own_s) or not len(others_s):
            return None
        return self._place(np.maximum(0.0, own_s.mean(axis=0) - np.median(others_s, axis=0)))

    def _place(self, more_s: Floats) -> Place | None:
        """Return the place with most of an excess, `[forward, backward to each bucket, update]`."""
        total_s = float(more_s.sum())
        if not total_s:
            return None
        buckets_s = more_s[1:-1]
        phases: dict[_Phase, float] = {
            "forward": float(more_s[0]),
            "backward": float(buckets_s.sum()),
            "update": float(more_s[-1]),
        }
        phase = max(phases, key=lambda name: phases[name])
        if phases[phase] < _MOST_OF_IT * total_s:
            return Place(None)
        if phase != "backward" or not self._n_buckets:
            return Place(phase)
        largest = int(buckets_s.argmax())
        is_one = buckets_s[largest] >= _MOST_OF_IT * phases[phase]
        return Place(phase, 1 + largest if is_one else None, self._n_buckets, self._follows)

    def _row(self, step: RankStep) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the seconds of host and computing by place; NaN if the step has other buckets than most."""
        n_places = max(1, self._n_buckets) + 2
        unknown = (float("nan"),) * n_places
        computing_s = (step.forward_s, *(step.buckets_s or (step.backward_s,)), step.optimize_s)
        return (
            step.held_s if len(step.held_s) == n_places else unknown,
            computing_s if len(computing_s) == n_places else unknown,
        )
