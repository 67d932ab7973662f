"""Slowdown that stragglers cause in a job with data and pipeline parallelism, and its sources.

The equations are those of `simdist.whatif.slowdown`, replayed from a table of operations. T is replayed without the
gaps that the table leaves unexplained, as in Lin et al. The ideal duration is one number for each kind of operation:

    computing        the mean over all workers and steps: if one sequence is longer, another one is shorter, and
                     with stages of equal work all would take that long. Optionally the median
    communication    the median of the transfer, without waiting

A worker has two slowdowns. S_w is that of Lin et al., which needs few replays. It selects the slowest workers. `alone`
is replayed with only the operations of that worker as traced, like the other slowdowns here.

    S_w = min(slowdown of its data-parallel rank, slowdown of its stage)
    M_S = (T - T(all as traced but those of the last stage, ideal)) / (T - T_ideal)

M_S exceeds 1 if the last stage has more work than the others: then no stage takes the mean.

Source:
    Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI 2025, arXiv 2505.05713,
    equations 1 to 5 and section 5.2, and their analyzer, github.com/ByteDance-Seed/StragglerAnalysis (Apache-2.0).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np

from simdist.errors import TraceError
from simdist.whatif.ideal import Contributor
from simdist.whatif.operations import Mask, OperationGraph, operation_graph, replay
from simdist.whatif.slowdown import ROUNDING, Loss, Progress, losses, slowest
from simdist.whatif.table import KINDS, OTHER, Floats, Ints, OperationTable

#: The ideal duration of computing.
IdealCompute: TypeAlias = Literal["mean", "median"]

_BATCH_VALUES = 4_000_000  # operations x variants: 32 MB per array
#: Kinds that belong to one transfer are attributed together, under the names of Lin et al.
_TRANSFERS = {f"{way}-{end}": f"{way}-pp-comm" for way in ("forward", "backward") for end in ("send", "recv")}


@dataclass(frozen=True)
class JobSlowdown:
    """The analysis of a table of operations. Seconds are per step, `[n_steps]`; slowdowns are for the whole job.

    Args:
        table: The operations that took part.
        traced_s: As traced.
        replayed_s: Replayed with everything in the table.
        step_s: Replayed without the gaps between operations: T.
        ideal_s: T_ideal.
        kinds: Costs of each kind of operation, the largest first; seconds per step.
        dp_rank_slowdowns: Slowdown of each data-parallel rank, `[n_dp_ranks]`.
        stage_slowdowns: Slowdown of each stage, `[n_stages]`.
        worker_step_s: Replayed with only this worker as traced, `[n_steps, n_dp_ranks * n_stages]`.
        slowest_workers: Indices of the W of M_W.
        fixed_by_workers: M_W; None if nothing is lost.
        fixed_by_last_stage: M_S; None if nothing is lost.
    """

    table: OperationTable
    traced_s: Floats
    replayed_s: Floats
    step_s: Floats
    ideal_s: Floats
    kinds: tuple[Loss, ...]
    dp_rank_slowdowns: Floats
    stage_slowdowns: Floats
    worker_step_s: Floats
    slowest_workers: tuple[int, ...]
    fixed_by_workers: float | None
    fixed_by_last_stage: float | None

    @property
    def slowdown(self) -> float:
        """T / T_ideal."""
        return float(self.step_s.sum() / self.ideal_s.sum())

    @property
    def step_slowdowns(self) -> Floats:
        """Slowdown of each step, `[n_steps]`."""
        return self.step_s / self.ideal_s

    @property
    def worker_slowdowns(self) -> Floats:
        """S_w, `[n_dp_ranks * n_stages]`."""
        return np.minimum.outer(self.dp_rank_slowdowns, self.stage_slowdowns).ravel()

    @property
    def alone_slowdowns(self) -> Floats:
        """Slowdown with only this worker as traced, `[n_dp_ranks * n_stages]`."""
        return np.asarray(self.worker_step_s.sum(axis=0) / self.ideal_s.sum())


def find_job_slowdown(
    table: OperationTable, *, compute: IdealCompute = "mean", progress: Progress | None = None
) -> JobSlowdown:
    """Analyse a table of operations.

    Args:
        table: See `simdist.whatif.table.read_table`.
        compute: The ideal duration of computing.
        progress: See `Progress`.

    Raises:
        TraceError: No step is complete, its operations form a cycle, or they take no time.
    """
    return _JobAnalysis(operation_graph(table), compute, progress).result()


@final
class _JobAnalysis:
    """One graph, its ideal durations, and the replays that compare the two."""

    def __init__(self, graph: OperationGraph, compute: IdealCompute, progress: Progress | None) -> None:
        self._graph = graph
        self._table = graph.table
        self._progress = progress
        self._ideal_s = _ideal_s(graph, compute)
        kinds = {name: _TRANSFERS.get(name, name) for name in self._table.kinds}
        channels = {kinds[name]: KINDS.get(name, OTHER).channel for name in kinds}
        self._kinds = [Contributor(name, channel) for name, channel in channels.items()]
        self._kind: Ints = np.array([list(channels).index(kinds[name]) for name in kinds])[self._table.kind]
        self._n_done = 0
        self._n_variants = 4 + len(self._kinds) + sum(self._table.ranks.shape) + self._table.n_workers

    def result(self) -> JobSlowdown:
        """Replay all variants and combine the results."""
        table = self._table
        graph = self._graph
        n_dp_ranks, n_stages = table.ranks.shape
        everything = np.ones(len(table.step), dtype=np.bool_)
        step_s = self._kept(everything)
        ideal_s = self._kept(~everything)
        total_s = float(ideal_s.sum())
        if not (ideal_s > 0).all():
            raise TraceError(f"{table.path}: the ideal step takes no time; there is nothing to be slow")
        kinds_s = self._each(self._kind, len(self._kinds)).sum(axis=0)
        dp_rank_slowdowns = self._each(table.dp_rank, n_dp_ranks).sum(axis=0) / total_s
        stage_slowdowns = self._each(table.stage, n_stages).sum(axis=0) / total_s
        slow = slowest(np.minimum.outer(dp_rank_slowdowns, stage_slowdowns).ravel(), numbers=table.ranks.ravel())
        return JobSlowdown(
            table=table,
            traced_s=np.maximum.reduceat(table.end_s, np.flatnonzero(np.diff(table.step, prepend=-1))),
            replayed_s=replay(graph, graph.work_s[:, np.newaxis], graph.gap_s)[:, 0],
            step_s=step_s,
            ideal_s=ideal_s,
            kinds=losses(self._kinds, kinds_s, total_s, len(step_s)),
            dp_rank_slowdowns=dp_rank_slowdowns,
            stage_slowdowns=stage_slowdowns,
            worker_step_s=self._each(table.worker, table.n_workers),
            slowest_workers=tuple(slow),
            fixed_by_workers=self._fixed(np.isin(table.worker, slow), step_s, ideal_s),
            fixed_by_last_stage=self._fixed(table.stage == n_stages - 1, step_s, ideal_s),
        )

    def _kept(self, kept: Mask) -> Floats:
        """Return the seconds of each step with some operations as traced and all others ideal, `[n_steps]`."""
        return self._each(np.where(kept, 0, 1), 1)[:, 0]

    def _each(self, part: Ints, n_parts: int) -> Floats:
        """Return the seconds of each step with one part as traced and all others ideal, `[n_steps, n_parts]`."""
        at_once = max(1, _BATCH_VALUES // len(part))
        found = []
        for first in range(0, n_parts, at_once):
            variants = np.arange(first, min(first + at_once, n_parts))
            traced_s = self._graph.work_s[:, np.newaxis]
            ideal_s = self._ideal_s[:, np.newaxis]
            found.append(replay(self._graph, np.where(part[:, np.newaxis] == variants, traced_s, ideal_s)))
            self._n_done += len(variants)
            if self._progress:
                self._progress(self._n_done, self._n_variants)
        return np.concatenate(found, axis=1)

    def _fixed(self, fixed: Mask, step_s: Floats, ideal_s: Floats) -> float | None:
        """Return the share of the loss that vanishes if some operations are ideal."""
        total_s = float(step_s.sum())
        lost_s = float(step_s.sum() - ideal_s.sum())
        return float(total_s - self._kept(~fixed).sum()) / lost_s if lost_s > ROUNDING * total_s else None


def _ideal_s(graph: OperationGraph, compute: IdealCompute) -> Floats:
    """Return the ideal seconds of each operation, `[n]`."""
    kinds = graph.table.kinds
    typical_s = np.zeros(len(kinds))
    for kind in np.unique(graph.table.kind):
        seconds = graph.work_s[graph.table.kind == kind]
        is_mean = compute == "mean" and KINDS.get(kinds[kind], OTHER).channel != "communication"
        typical_s[kind] = seconds.mean() if is_mean else np.median(seconds)
    return typical_s[graph.table.kind]
