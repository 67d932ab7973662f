"""Slowdown that stragglers cause in a job, and the share of each rank, node, step and operation.

T is the time of the job, replayed with the durations of its trace. T_ideal is replayed with the ideal duration of each
operation (see `simdist.stragglers.ideal`).

    slowdown                     S   = T / T_ideal
    share of the time lost             1 - 1 / S
    by kind of operation         S_t = T(only operations of kind t as traced, all others ideal) / T_ideal
    by rank, by node             S_w = T(only the operations of rank w as traced) / T_ideal
    by step                            the same, step by step
    fixed by the slowest ranks   M_W = (T - T(all as traced but those of W, ideal)) / (T - T_ideal)

W is the 3 % of the ranks with the largest S_w, at least one. Shares by kind or rank do not add up to the whole: two
ranks that are late in the same step cost as much as one of them.

Source:
    Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI 2025, arXiv 2505.05713,
    equations 1 to 5. They estimate S_w from the slowdowns of a worker's data-parallel rank and pipeline stage, because
    replaying each worker takes long. Here each rank is replayed. Nodes, and M of the worst node, are added.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.display import Pictured
from simdist.engines.replay import Timing, replayed_step_end_s, timing
from simdist.errors import TraceError
from simdist.stragglers.ideal import (
    CHANNELS,
    Cause,
    Contributor,
    Ideal,
    Kept,
    Variants,
    ideal,
    persistent,
    shuffled,
    simultaneous,
)
from simdist.studies.columns import frame_of_records
from simdist.traces.trace import Trace
from simdist.traces.waiting import first_steps
from simdist.traces.waiting import step_end_s as traced_end_s

if TYPE_CHECKING:
    import pandas as pd

_Floats: TypeAlias = NDArray[np.float64]
#: Called with the work done and the total work.
_Progress: TypeAlias = Callable[[float, float], None]

_SLOWEST_SHARE = 0.03  # of the ranks: Lin et al., the W of M_W
_BATCH_VALUES = 16_384  # ranks x variants; their vectors stay in a core's cache
_SHUFFLES = 9  # in 9 of 10 jobs, none of them is larger by chance
_NOTABLE_LOSS = 0.002  # of a step: smaller losses have no pattern
_ROUNDING = 1e-9  # of a job's time: smaller losses are not attributed


@dataclass(frozen=True, slots=True)
class Loss:
    """Cost of one kind of operation, or of one channel.

    Args:
        name: Name of the operation. `between operations`: unexplained by the plan.
        channel (str): `host`, `compute`, `io` or `communication`.
        slowdown, lost_s: Slowdown, and time added to the ideal, if only these are as traced.
    """

    name: str
    channel: Cause
    slowdown: float
    lost_s: float


@dataclass(frozen=True, repr=False)
class Slowdown(Pictured):
    """The analysis of one trace. Seconds are per step unless they have an axis of steps.

    Args:
        first_step: First analysed step.
        ranks_per_node: Consecutive ranks that share a node.
        traced_s: As traced.
        replayed_s: Replayed with everything in the trace: T.
        explained_s: Replayed without the gaps between operations.
        ideal_s: T_ideal.
        persistent_s: Replayed with each rank repeating its median step.
        persistent_by_chance_s: The mean of the same over shuffles of the ranks in each step.
        simultaneous_s: Slowdown if all ranks repeated the median rank in each step.
        kinds: Costs of each kind of operation, the largest first.
        channels: Costs of each channel, the largest first.
        rank_slowdowns: S_w, `[world_size]`.
        node_slowdowns: S_w of all ranks of a node together, `[n_nodes]`.
        step_s: Seconds of each step, `[n_steps]`.
        ideal_step_s: Ideal seconds of each step, `[n_steps]`.
        rank_step_s: Seconds of each step with only this rank as traced, `[n_steps, world_size]`.
        slowest_ranks: The W of M_W.
        fixed_by_ranks: M_W; None if nothing is lost.
        slowest_node: The node with the largest slowdown.
        fixed_by_node: The share of the loss that vanishes if that node is made ideal; None if nothing is lost.
    """

    first_step: int
    ranks_per_node: int
    traced_s: float
    replayed_s: float
    explained_s: float
    ideal_s: float
    persistent_s: float
    persistent_by_chance_s: float
    simultaneous_s: float
    kinds: tuple[Loss, ...]
    channels: tuple[Loss, ...]
    rank_slowdowns: _Floats
    node_slowdowns: _Floats
    step_s: _Floats
    ideal_step_s: _Floats
    rank_step_s: _Floats
    slowest_ranks: tuple[int, ...]
    fixed_by_ranks: float | None
    slowest_node: int
    fixed_by_node: float | None

    @property
    def slowdown(self) -> float:
        """T / T_ideal."""
        return self.replayed_s / self.ideal_s

    @property
    def lost_share(self) -> float:
        """Share of the time that stragglers cost."""
        return 1 - self.ideal_s / self.replayed_s

    @property
    def n_steps(self) -> int:
        """Number of analysed steps."""
        return len(self.step_s)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.rank_slowdowns)

    @property
    def step_slowdowns(self) -> _Floats:
        """Slowdown of each step, `[n_steps]`; NaN if the ideal step takes no time."""
        return _ratio(self.step_s, self.ideal_step_s)

    def frame(self) -> "pd.DataFrame":
        """Return one row per rank.

        Columns:
            rank, node (int64): Rank and its node.
            slowdown, lost_s (float64): As in "Cost of a rank".
        """
        return frame_of_records(
            {"rank": rank, "node": rank // self.ranks_per_node, "slowdown": slowdown, "lost_s": lost_s}
            for rank, (slowdown, lost_s) in enumerate(
                zip(self.rank_slowdowns.tolist(), ((self.rank_slowdowns - 1) * self.ideal_s).tolist(), strict=True)
            )
        )

    def __repr__(self) -> str:
        return (
            f"<slowdown {self.replayed_s / self.ideal_s:.3g}: {self.replayed_s:.4g} s per step, {self.ideal_s:.4g} s "
            f"without stragglers>"
        )

    @property
    def rank_step_slowdowns(self) -> _Floats:
        """Slowdown of each step that each rank alone causes, `[n_steps, world_size]`."""
        return _ratio(self.rank_step_s, self.ideal_step_s[:, np.newaxis])


def find_slowdown(
    trace: Trace, *, ranks_per_node: int, steps: range | None = None, progress: _Progress | None = None
) -> Slowdown:
    """Analyse a trace.

    Args:
        trace: A complete trace of real machines or of a simulator.
        ranks_per_node: Consecutive ranks that share a node.
        steps: Consecutive steps to analyse; all by default. Steps before them stay as traced.
        progress: See `_Progress`.

    Raises:
        TraceError: An operation did not run, the trace lacks some of these steps, or it takes no time.
    """
    steps = _checked(trace, steps)
    if steps.stop < trace.plan.n_steps:
        trace = first_steps(trace, steps.stop)
    return _Analysis(trace, steps, ranks_per_node, progress).result()


def typical_step_s(trace: Trace) -> float:
    """Return the seconds of a step without any stragglers: T_ideal of a trace."""
    traced = timing(trace)
    variants = Variants(traced, ideal(trace.plan, traced), [Kept(kinds=frozenset())])
    return float(replayed_step_end_s(trace.plan, variants, n_variants=1)[-1, 0]) / trace.plan.n_steps


def _checked(trace: Trace, steps: range | None) -> range:
    n_steps = trace.plan.n_steps
    found = range(n_steps)[steps.start : steps.stop] if steps is not None else range(n_steps)
    if not found:
        wanted = f"{steps.start}:{steps.stop}" if steps is not None else ":"
        raise TraceError(f"steps {wanted}: plan {trace.plan.name} has the steps 0 to {n_steps - 1}; write e.g. 0:1")
    return found


@final
class _Analysis:
    """One trace, its ideal, and the replays that compare the two."""

    def __init__(self, trace: Trace, steps: range, ranks_per_node: int, progress: _Progress | None) -> None:
        self._trace = trace
        self._steps = steps
        self._ranks_per_node = ranks_per_node
        self._progress = progress
        self._world_size = trace.plan.world_size
        self._n_nodes = -(-self._world_size // ranks_per_node)
        self._traced: Timing = timing(trace)
        self._ideal: Ideal = ideal(trace.plan, self._traced, first_step=steps.start)
        self._n_done = 0
        self._n_variants = 0

    def result(self) -> Slowdown:
        """Replay all variants and put the numbers together."""
        kinds = self._ideal.kinds
        by_channel = [frozenset(kind for kind in kinds if kind.channel == channel) for channel in CHANNELS]
        kept = [
            Kept(),
            Kept(kinds=frozenset()),
            *(Kept(kinds=frozenset({kind})) for kind in kinds),
            *(Kept(kinds=those) for those in by_channel),
            *(Kept(ranks=self._ranks_of(node)) for node in range(self._n_nodes)),
        ]
        of_ranks = [Kept(ranks=frozenset({rank})) for rank in range(self._world_size)]
        self._n_variants = sum(len(set(map(self._as_replayed, some))) for some in (kept, of_ranks))
        step_s = self._step_s(kept)
        rank_step_s = self._step_s(of_ranks)
        total_s = step_s.sum(axis=0)
        rank_total_s = rank_step_s.sum(axis=0)
        if not total_s[1] > 0:
            raise TraceError(f"plan {self._trace.plan.name}: these steps take no time; there is nothing to be slow")
        of_kinds, of_channels, of_nodes = np.split(total_s[2:], np.cumsum([len(kinds), len(CHANNELS)]))
        slow = tuple(_slowest(rank_total_s))
        node = int(np.argmax(of_nodes))
        fixed_by_ranks, fixed_by_node = self._fixed(
            [frozenset(slow), self._ranks_of(node)], float(total_s[0]), float(total_s[1])
        )
        plan = self._trace.plan
        first_step = self._steps.start
        n_steps = len(self._steps)
        persistent_s = self._replayed_s(persistent(plan, self._traced, first_step=first_step)) / n_steps
        return Slowdown(
            first_step=first_step,
            ranks_per_node=self._ranks_per_node,
            traced_s=self._traced_s() / n_steps,
            replayed_s=float(total_s[0]) / n_steps,
            explained_s=self._replayed_s(Timing(None, self._traced.durations_s)) / n_steps,
            ideal_s=float(total_s[1]) / n_steps,
            persistent_s=persistent_s,
            persistent_by_chance_s=self._persistent_by_chance_s(persistent_s, float(total_s[1]) / n_steps),
            simultaneous_s=self._replayed_s(simultaneous(plan, self._traced, first_step=first_step)) / n_steps,
            kinds=_losses(kinds, of_kinds, float(total_s[1]), n_steps),
            channels=_losses([Contributor(name, name) for name in CHANNELS], of_channels, float(total_s[1]), n_steps),
            rank_slowdowns=rank_total_s / total_s[1],
            node_slowdowns=of_nodes / total_s[1],
            step_s=step_s[:, 0],
            ideal_step_s=step_s[:, 1],
            rank_step_s=rank_step_s,
            slowest_ranks=slow,
            fixed_by_ranks=fixed_by_ranks,
            slowest_node=node,
            fixed_by_node=fixed_by_node,
        )

    def _persistent_by_chance_s(self, persistent_s: float, ideal_s: float) -> float:
        """Return the seconds of a step if each rank repeated the median of steps that are shuffled among ranks."""
        if persistent_s - ideal_s <= _NOTABLE_LOSS * ideal_s or len(self._steps) < 2:
            return ideal_s
        plan = self._trace.plan
        first_step = self._steps.start
        rng = np.random.default_rng(0)
        shuffled_s = []
        for _ in range(_SHUFFLES):
            some = shuffled(plan, self._traced, rng, first_step=first_step)
            levelled = persistent(plan, some, first_step=first_step)
            shuffled_s.append(self._replayed_s(levelled) / len(self._steps))
        return max(ideal_s, float(np.mean(shuffled_s))) if persistent_s > max(shuffled_s) else persistent_s

    def _ranks_of(self, node: int) -> frozenset[int]:
        first = node * self._ranks_per_node
        return frozenset(range(first, min(first + self._ranks_per_node, self._world_size)))

    def _as_replayed(self, kept: Kept) -> Kept:
        """Return the variant that has the same durations and stands for it: ranks without a straggler are ideal."""
        if kept.ranks is None or self._ideal.rank_differs[[*kept.ranks]].any():
            return kept
        return Kept(kinds=frozenset())

    def _step_s(self, kept: Sequence[Kept]) -> _Floats:
        """Return the seconds of each step in each variant, `[n_steps, n_variants]`. Replay equal ones once."""
        replayed = [*map(self._as_replayed, kept)]
        places = {each: place for place, each in enumerate(dict.fromkeys(replayed))}
        distinct = [*places]
        at_once = max(1, _BATCH_VALUES // self._world_size)
        parts = []
        for first in range(0, len(distinct), at_once):
            some = distinct[first : first + at_once]
            variants = Variants(self._traced, self._ideal, some)
            ends_s = replayed_step_end_s(
                self._trace.plan, variants, n_variants=len(some), progress=self._reporter(len(some))
            )
            parts.append(_durations_s(ends_s, self._steps))
            self._n_done += len(some)
        return np.take(np.concatenate(parts, axis=1), [places[each] for each in replayed], axis=1)

    def _reporter(self, n_variants: int) -> Callable[[int], None] | None:
        progress = self._progress
        before = self._n_done
        plan = self._trace.plan
        if progress is None:
            return None

        def report(step: int) -> None:
            progress(before + n_variants * step / plan.n_steps, max(self._n_variants, before + n_variants))

        return report

    def _fixed(self, fixed: Sequence[frozenset[int]], total_s: float, ideal_s: float) -> list[float | None]:
        """Return the share of the loss that vanishes if some ranks are ideal."""
        if total_s - ideal_s <= _ROUNDING * total_s:
            return [None] * len(fixed)
        everyone = frozenset(range(self._world_size))
        left_s = self._step_s([Kept(ranks=everyone - ranks) for ranks in fixed]).sum(axis=0)
        return [max(0.0, float((total_s - each_s) / (total_s - ideal_s))) for each_s in left_s]

    def _traced_s(self) -> float:
        """Return the seconds of these steps in the trace."""
        ends_s = traced_end_s(self._trace).max(axis=1, keepdims=True)
        return float(_durations_s(ends_s, self._steps).sum())

    def _replayed_s(self, durations: Timing) -> float:
        """Return the seconds of these steps with other durations."""
        return float(_durations_s(replayed_step_end_s(self._trace.plan, durations, n_variants=1), self._steps).sum())


def _durations_s(ends_s: _Floats, steps: range) -> _Floats:
    """Return the durations of steps from their ends, both `[n_steps, n_variants]`."""
    return np.diff(ends_s, axis=0, prepend=0.0)[steps.start : steps.stop]


def _slowest(costs: _Floats) -> list[int]:
    """Return the most expensive 3 % of the ranks, at least one, ascending. Of equal costs, the lowest counts."""
    n = int(np.ceil(_SLOWEST_SHARE * len(costs)))
    return sorted(np.lexsort((np.arange(len(costs)), -costs))[:n].tolist())


def _losses(kinds: Sequence[Contributor], total_s: _Floats, ideal_s: float, n_steps: int) -> tuple[Loss, ...]:
    """Return the cost of each kind of operation, the largest first.

    Args:
        kinds: Kinds of operations.
        total_s: Seconds of all steps with only these operations as traced, `[n_kinds]`.
        ideal_s: Seconds of all steps with none as traced.
        n_steps: Number of steps.
    """
    found = [
        Loss(kind.name, kind.channel, slowdown=float(each_s / ideal_s), lost_s=float(each_s - ideal_s) / n_steps)
        for kind, each_s in zip(kinds, total_s, strict=True)
    ]
    return tuple(sorted(found, key=lambda each: -each.slowdown))


def _ratio(seconds: _Floats, ideal_s: _Floats) -> _Floats:
    return np.asarray(np.divide(seconds, ideal_s, out=np.full(seconds.shape, np.nan), where=ideal_s > 0))
