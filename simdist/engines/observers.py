"""What is kept of a run: the whole trace, where the time went, seconds per step, or the times of the first rank.

An observer says what it takes from a run of each engine. So a caller of `simdist.engines.run.run` chooses what to see,
and no engine. A new observer is a subclass of `Observer`.
"""

from abc import ABC, abstractmethod
from functools import partial, reduce
from typing import TYPE_CHECKING, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from simdist.plan.delays import Delays, SeedDelays
from simdist.plan.plan import Plan
from simdist.plan.walk import Template
from simdist.traces.breakdown import Attribution, Breakdown, HeldUp, break_down, side_by_side
from simdist.traces.trace import TIMES_OF_TRACE, Trace

if TYPE_CHECKING:
    from simdist.engines.alike import KindsRun
    from simdist.engines.des import EventRun
    from simdist.engines.vector import VectorRun

_Times: TypeAlias = NDArray[np.float64]
ObservedT = TypeVar("ObservedT")

_RARE = 0.5  # stragglers, in steps of all seeds for each step: up to here, simulating one rank of each kind pays


class Observer(ABC, Generic[ObservedT]):
    """What is kept of a run.

    Attributes:
        of_one_seed: Whether a run has one seed.
        needs_traces: Whether it needs each rank's times, if they cannot be computed by recurrences.
        held: Names the links that hold up operations, if links are slow throughout.
        n_arrays: Arrays with a number for each operation and rank that are in memory in the end.
    """

    of_one_seed: bool = False
    needs_traces: bool = False
    held: HeldUp | None = None
    n_arrays: int = 0

    def prefers_kinds(self, plan: Plan, delays: SeedDelays) -> bool:
        """Return whether one rank of each kind is less work than all ranks by recurrences."""
        return False

    @abstractmethod
    def by_vectors(self, run: "VectorRun") -> ObservedT:
        """Take what a run by recurrences gives."""

    @abstractmethod
    def by_kinds(self, run: "KindsRun") -> ObservedT:
        """Take what a run of one rank of each kind gives."""

    @abstractmethod
    def by_events(self, run: "EventRun") -> ObservedT:
        """Take what a run of all events gives."""


class WholeTrace(Observer[Trace]):
    """The times of all operations on all ranks, of one seed.

    Args:
        n_arrays: See `Observer`; with what the caller makes of the trace.
    """

    of_one_seed = True

    def __init__(self, *, n_arrays: int = len(TIMES_OF_TRACE)) -> None:
        self.n_arrays = n_arrays

    def by_vectors(self, run: "VectorRun") -> Trace:
        """See `Observer`."""
        return run.trace(run.delays.seeds[0])

    def by_kinds(self, run: "KindsRun") -> Trace:
        """See `Observer`."""
        return run.trace()

    def by_events(self, run: "EventRun") -> Trace:
        """See `Observer`."""
        return next(run.traces())


class WhereTimeWent(Observer[tuple[Breakdown, ...]]):
    """The seconds of each rank by state. Each breakdown has some of the seeds, in order.

    Args:
        held: Names the links that hold up operations, if links are slow throughout.
    """

    def __init__(self, held: HeldUp | None = None) -> None:
        self.held = held

    def by_vectors(self, run: "VectorRun") -> tuple[Breakdown, ...]:
        """See `Observer`."""
        plan = run.plan
        found = []
        for seeds in run.batches():
            if run.has_late:
                found.append(side_by_side([break_down(run.trace(seed)) for seed in seeds]))
                continue
            attribution = run.tell(partial(Attribution, held=self.held), seeds, each_rank=self.held is not None)
            found.append(attribution.finish(plan.n_steps).spread(plan.world_size, len(seeds)))
        return tuple(found)

    def by_kinds(self, run: "KindsRun") -> tuple[Breakdown, ...]:
        """See `Observer`."""
        return (run.breakdown(),) * run.n_repeats

    def by_events(self, run: "EventRun") -> tuple[Breakdown, ...]:
        """See `Observer`."""
        return tuple(break_down(trace) for trace in run.traces()) * run.n_repeats


class StepSeconds(Observer[_Times]):
    """The seconds per step of each seed, `[n_seeds]`. This is less work than where the time went.

    Args:
        kinds_first: Whether to simulate one rank of each kind if possible; None: if stragglers are rare.
    """

    def __init__(self, *, kinds_first: bool | None = None) -> None:
        self._kinds_first = kinds_first

    def prefers_kinds(self, plan: Plan, delays: SeedDelays) -> bool:
        """See `Observer`."""
        if self._kinds_first is not None:
            return self._kinds_first
        return _n_unequal(delays.take_all(plan)) <= plan.n_steps * _RARE

    def by_vectors(self, run: "VectorRun") -> _Times:
        """See `Observer`."""
        seeds = run.delays.seeds
        if run.has_late:
            return side_by_side([break_down(run.trace(seed)) for seed in seeds]).step_s
        makespan_s = run.tell(_LastEnds, seeds).makespan_s()
        return np.broadcast_to(makespan_s / run.plan.n_steps, (len(seeds),)).copy()

    def by_kinds(self, run: "KindsRun") -> _Times:
        """See `Observer`."""
        return np.tile(run.makespan_s() / run.plan.n_steps, run.n_repeats)

    def by_events(self, run: "EventRun") -> _Times:
        """See `Observer`."""
        return np.array([break_down(trace).step_s[0] for trace in run.traces()] * run.n_repeats)


class FirstRank(Observer[tuple[_Times, _Times]]):
    """When each operation started and ended on rank 0, of one seed, `[n_instances]` each."""

    of_one_seed = True

    def prefers_kinds(self, plan: Plan, delays: SeedDelays) -> bool:
        """See `Observer`."""
        return True

    def by_vectors(self, run: "VectorRun") -> tuple[_Times, _Times]:
        """See `Observer`."""
        return _of_first_rank(run.trace(run.delays.seeds[0]))

    def by_kinds(self, run: "KindsRun") -> tuple[_Times, _Times]:
        """See `Observer`."""
        return run.times_of_first_rank()

    def by_events(self, run: "EventRun") -> tuple[_Times, _Times]:
        """See `Observer`."""
        return _of_first_rank(next(run.traces()))


class _LastEnds:
    """Keeps when the last operation of each lane ended, of each rank or packed."""

    only_ends: ClassVar[bool] = True

    def __init__(self, n_ranks: int, n_seeds: int) -> None:
        self._n_seeds = n_seeds
        self._of: dict[str, _Times] = {}  # name of the lane -> end

    def add(self, index: int, template: Template, ready_s: _Times, start_s: _Times, end_s: _Times) -> None:
        """Add the times of the next instance."""
        self._of[template.lane.name] = end_s

    def makespan_s(self) -> _Times:
        """Return when the last rank was done, `[n_seeds]`."""
        last_s = (each.max(axis=0) for each in self._of.values())
        return reduce(np.maximum, last_s, np.zeros(self._n_seeds))


def _of_first_rank(trace: Trace) -> tuple[_Times, _Times]:
    return trace.start_s[:, 0], trace.end_s[:, 0]


def _n_unequal(drawn: Delays) -> int:
    """Return in how many steps, over all seeds, ranks have different delays."""
    differs = [(each != each[..., :1]).any(axis=-1) for each in drawn.values()]
    return int(np.any(differs, axis=0).sum()) if differs else 0
