"""Dependencies between the operations of a table, and their replay with other durations.

Time is a vector over variants. Operations that start together form a meeting. Most meetings have one member:

    start of a meeting = max over its members and their predecessors of (end of the predecessor + gap of the member)
    end of a member    = start of its meeting + seconds of the member

An operation waits, within a step, for

    the operation before it on its stream of its worker: each kind of transfer has a stream, data-parallel collectives
        have one, and all else, except transfers and collectives that overlap computing, runs on the main stream
    the transfer of its input, if it computes; the computing that produced its content, if it is a send
    the last computing of the same direction before it, if it receives: a receive is posted one operation ahead. The
        first receive of the backward direction is posted after the second last computing before it
    the computing of its chunk that had ended when it started, if it reduces gradients during computing. Work after
        all computing waits for these collectives. The first forward pass of a chunk waits for its parameters

A send meets the receive of the next stage with the same micro-batch and model chunk. The data-parallel ranks of a stage
meet in their collectives. Stages that share embeddings meet in the collectives for these. All workers meet to clip
gradients.

The seconds of a meeting count from the start of its last member: the transfer without the waiting. A gap is the
unexplained time between the end of an operation's predecessors and its start.

Source:
    Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI 2025, arXiv 2505.05713,
    section 3, and the dependencies of their analyzer, github.com/ByteDance-Seed/StragglerAnalysis (Apache-2.0).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias, assert_never, final

import numpy as np
from numpy.typing import NDArray

from simdist.errors import TraceError
from simdist.whatif.table import KINDS, OTHER, UNKNOWN, Floats, Ints, OperationTable

Mask: TypeAlias = NDArray[np.bool_]

_SAME_TIME_S = 5e-5  # within a worker: the tolerance of their analyzer
_CLOCKS_S = 1e-2  # between workers: a note reports operations that end this long before their last member starts
_FORWARD = "forward-compute"
_BACKWARD = "backward-compute"
_TRANSFERS = tuple(kind for kind, of in KINDS.items() if of.members == "ends")
_GATHER = "params-all-gather"
_REDUCE = "grads-reduce-scatter"


@dataclass(frozen=True)
class OperationGraph:
    """Dependencies in a table.

    Args:
        table: The operations that take part.
        meeting: Meeting of each operation, numbered so that each comes after all its predecessors, `[n]`.
        levels: Meetings and edges that can be replayed at once: first and last meeting, first and last edge.
        sources: Operation that each edge waits for, in the order of the waiting meetings, `[n_edges]`.
        targets: Operation that waits, `[n_edges]`.
        edge_starts: First edge of each meeting after those of the first level.
        work_s: Seconds of each operation, without waiting, `[n]`.
        gap_s: Unexplained seconds before each operation, `[n]`.
    """

    table: OperationTable
    meeting: Ints
    levels: tuple[tuple[int, int, int, int], ...]
    sources: Ints
    targets: Ints
    edge_starts: Ints
    work_s: Floats
    gap_s: Floats


def operation_graph(table: OperationTable) -> OperationGraph:
    """Find the dependencies; operations without known dependencies are omitted, with a note.

    Raises:
        TraceError: No step is complete, or operations wait for each other in a cycle.
    """
    while True:
        found = _Dependencies(table)
        left_out = found.left_out()
        if not left_out.any():
            return _graph(replace(table, notes=(*table.notes, *found.assumed)), found.meeting, found.edges())
        table = table.only(~left_out, *found.notes())


def replay(graph: OperationGraph, work_s: Floats, gap_s: Floats | None = None) -> Floats:
    """Return the seconds of each step, `[n_steps, n_variants]`.

    Args:
        graph: The dependencies.
        work_s: Seconds of each operation in each variant, `[n, n_variants]`.
        gap_s: Gaps before each operation, `[n]`; none by default.
    """
    n_variants = work_s.shape[1]
    start_s = np.zeros((int(graph.meeting.max()) + 1, n_variants))
    if gap_s is not None:
        waits = np.bincount(graph.targets, minlength=len(graph.meeting)) > 0
        np.maximum.at(start_s, graph.meeting, np.where(waits, 0.0, gap_s)[:, np.newaxis])
    for first, last, first_edge, last_edge in graph.levels:
        sources = graph.sources[first_edge:last_edge]
        end_s = start_s[graph.meeting[sources]] + work_s[sources]
        if gap_s is not None:
            end_s += gap_s[graph.targets[first_edge:last_edge], np.newaxis]
        latest_s = np.maximum.reduceat(end_s, graph.edge_starts[first:last] - first_edge, axis=0)
        np.maximum(start_s[first:last], latest_s, out=start_s[first:last])
    end_s = start_s[graph.meeting] + work_s
    return np.maximum.reduceat(end_s, np.flatnonzero(np.diff(graph.table.step, prepend=-1)), axis=0)


@final
class _Dependencies:
    """Finds the edges and meetings of a table, and the operations to omit."""

    def __init__(self, table: OperationTable) -> None:
        self._table = table
        self._n_steps = len(table.step_numbers)
        self._n_stages = table.ranks.shape[1]
        self._start_s = table.start_s
        self._end_s = table.end_s
        self._same_s = max(_SAME_TIME_S, 2 * table.resolution_s)
        self._place: Ints = table.step * table.n_workers + table.worker  # worker and step; rows are in this order
        self._bad_steps: dict[int, str] = {}
        self._unused: Mask = np.zeros(len(table.step), dtype=np.bool_)
        self._edges: list[tuple[Ints, Ints]] = []
        self.assumed: list[str] = []
        self.meeting: Ints = np.arange(len(table.step))
        self._find_absent_workers()
        self._add_streams()
        self._add_transfers("forward")
        self._add_transfers("backward")
        self._add_collectives()

    def edges(self) -> tuple[Ints, Ints]:
        """Return both ends of each edge: the operation, and the operation that waits for it."""
        sources, targets = zip(*self._edges, strict=True)
        return np.concatenate(sources), np.concatenate(targets)

    def left_out(self) -> Mask:
        """Return the operations that cannot take part.

        Raises:
            TraceError: No operation can take part.
        """
        found = self._unused | np.isin(self._table.step, list(self._bad_steps))
        if found.all():
            raise TraceError(f"{self._table.path}: no step can be replayed: {self._bad_steps[min(self._bad_steps)]}")
        return found

    def notes(self) -> Iterator[str]:
        """Yield notes about omitted operations."""
        if bad := sorted(self._bad_steps):
            first = self._table.step_numbers[bad[0]]
            numbers = f"{first}, ..." if len(bad) > 1 else f"{first}"
            yield f"left out {len(bad):,} of {self._n_steps:,} steps ({numbers}): {self._bad_steps[bad[0]]}"
        if n := int(self._unused.sum()):
            names = ", ".join(self._table.kinds[kind] for kind in np.unique(self._table.kind[self._unused]))
            yield f"left out {n:,} operations that transfer nothing, before the first stage or after the last: {names}"

    def _rows(self, *kinds: str) -> Ints:
        return np.flatnonzero(self._table.of_kind(*kinds))

    def _refuse(self, places: Ints, what: str) -> None:
        """Omit the steps of some workers; report the first reason."""
        for place in places.tolist():
            step, worker = divmod(place, self._table.n_workers)
            dp_rank, stage = divmod(worker, self._n_stages)
            where = f"step {self._table.step_numbers[step]}, dp_rank {self._table.dp_ranks[dp_rank]}, stage {stage}"
            self._bad_steps.setdefault(step, f"{where}: {what}")

    def _find_absent_workers(self) -> None:
        is_there = np.zeros(self._n_steps * self._table.n_workers, dtype=np.bool_)
        is_there[self._place] = True
        self._refuse(np.flatnonzero(~is_there), "has no rows: every step needs those of all workers")

    def _add_edges(self, sources: Ints, targets: Ints) -> None:
        """Let operations wait for others if both are known."""
        known = (sources != UNKNOWN) & (targets != UNKNOWN)
        self._edges.append((sources[known], targets[known]))

    def _add_streams(self) -> None:
        """Chain the operations of each stream of a worker, and tie collectives to the computing that they overlap."""
        last_s = np.zeros(self._n_steps * self._table.n_workers)
        computes = self._rows(_FORWARD, _BACKWARD)
        collectives = self._rows(_GATHER, _REDUCE)
        np.maximum.at(last_s, self._place[computes], self._end_s[computes])
        is_after = self._start_s >= last_s[self._place] - self._same_s
        is_main = is_after | ~self._table.of_kind(_GATHER, _REDUCE)
        is_main &= ~self._table.of_kind(*_TRANSFERS)
        for rows in (np.flatnonzero(is_main), *map(self._rows, _TRANSFERS), collectives):
            self._add_edges(*_consecutive(rows, self._place))
        self._add_overlapping(collectives[~is_main[collectives]], np.flatnonzero(is_main & is_after))

    def _add_overlapping(self, rows: Ints, tail: Ints) -> None:
        """Tie collectives to the computing before and after them, of their own chunk if the table states it.

        Args:
            rows: Collectives that start before the last computing of their worker has ended.
            tail: Operations on the main stream that start afterwards.
        """
        chunk = self._table.chunk if (self._table.chunk[rows] >= 0).all() else np.zeros_like(self._place)
        by_chunk = self._place * (int(chunk.max()) + 1) + np.maximum(chunk, 0)
        is_gather = self._table.of_kind(_GATHER)[rows]
        gathers = rows[is_gather]
        reduces = rows[~is_gather]
        backwards = self._rows(_BACKWARD)
        starts_s = self._start_s + self._same_s
        ends_s = self._end_s - self._same_s
        for some, others, key in ((gathers, self._rows(_FORWARD), by_chunk), (reduces, tail, self._place)):
            found = _nearest(key[some], ends_s[some], key[others], self._start_s[others], last=False)
            self._add_edges(some, np.append(others, UNKNOWN)[found])
        found = _nearest(by_chunk[reduces], starts_s[reduces], by_chunk[backwards], self._end_s[backwards], last=True)
        self._add_edges(np.append(backwards, UNKNOWN)[found], reduces)

    def _add_transfers(self, direction: str) -> None:
        """Tie transfers to computing, and let the two ends of each meet."""
        is_forward = direction == "forward"
        computes = self._rows(f"{direction}-compute")
        chunk = self._model_chunks()[computes]
        n_chunks = int(chunk.max(initial=0)) + 1
        batch = self._micro_batches(computes, chunk)
        is_first = chunk == 0
        is_last = chunk == n_chunks - 1
        sends, receives = (~is_last, ~is_first) if is_forward else (~is_first, ~is_last)
        send = self._matched(f"{direction}-send", computes, sends)
        receive = self._matched(f"{direction}-recv", computes, receives)
        pipeline = self._place[computes] // self._n_stages
        key = (pipeline * (int(batch.max(initial=0)) + 1) + batch) * n_chunks + chunk
        given = key[sends] + (1 if is_forward else -1)
        wanted = key[receives]
        producers = computes[sends]
        consumers = computes[receives]
        for keys, others, rows in ((wanted, given, consumers), (given, wanted, producers)):
            alone = self._place[rows[~np.isin(keys, others)]]
            self._refuse(alone, f"a {direction}-compute has none of its micro-batch on the stage beside it")
        _, given_at, wanted_at = np.intersect1d(given, wanted, assume_unique=True, return_indices=True)
        producers = producers[given_at]
        consumers = consumers[wanted_at]
        sent = send[producers]
        received = receive[consumers]
        self._add_edges(producers, sent)
        self._add_edges(received, consumers)
        meets = (sent != UNKNOWN) & (received != UNKNOWN)
        self.meeting[received[meets]] = sent[meets]
        last = np.where(sent == UNKNOWN, producers, sent)
        first = np.where(received == UNKNOWN, consumers, received)
        self._add_edges(last[~meets], first[~meets])
        posted = receive.copy()  # without receives in the table, sends wait for their dependencies
        posted[consumers] = np.where(received == UNKNOWN, sent, received)
        before, after = _consecutive(computes, self._place)
        self._add_edges(before, posted[after])
        if not is_forward:
            both = self._rows(_FORWARD, _BACKWARD)
            first = np.searchsorted(both, computes[np.unique(self._place[computes], return_index=True)[1]])
            first = first[first >= 2]
            same = self._place[both[first]] == self._place[both[first - 2]]
            self._add_edges(both[first - 2][same], posted[both[first]][same])

    def _matched(self, name: str, computes: Ints, needed: Mask) -> Ints:
        """Return the send, or receive, of each computing operation, `[n]`; both are in the same order.

        Profilers may record transfers at the ends of the pipeline, where nothing is transferred: one for each computing
        operation, or for all but the first or the last one.
        """
        found = np.full(len(self._place), UNKNOWN)
        rows = self._rows(name)
        n_places = self._n_steps * self._table.n_workers
        if not len(rows):
            if needed.any():
                self.assumed.append(f"no {name} in the table: it takes no time")
            return found
        if not len(computes):
            raise TraceError(f"{self._table.path}: has {name}, but not the computing of that direction: write it, too")
        place = self._place[computes]
        is_receive = name.endswith("recv")
        time_s = self._start_s if is_receive else -self._end_s
        last_s = np.full(n_places, -np.inf)
        np.maximum.at(last_s, place, time_s[computes])
        is_beyond = time_s[rows] > last_s[self._place[rows]] + self._same_s
        self._unused[rows[is_beyond]] = True
        rows = rows[~is_beyond]
        n_rows = np.bincount(self._place[rows], minlength=n_places)
        is_end = np.diff(place, prepend=-1) > 0 if is_receive else np.diff(place, append=n_places) > 0
        is_open = np.ones(n_places, dtype=np.bool_)
        takes = np.zeros_like(needed)
        for taking in (needed, np.ones_like(needed), needed | ~is_end):
            fits = is_open & (np.bincount(place[taking], minlength=n_places) == n_rows)
            takes |= taking & fits[place]
            is_open &= ~fits
        n_needed = np.bincount(place[needed], minlength=n_places)
        for bad in np.flatnonzero(is_open).tolist():
            self._refuse(np.array([bad]), f"{n_rows[bad]:,} {name} for {n_needed[bad]:,} transfers")
        rows = rows[~is_open[self._place[rows]]]
        self._unused[rows[~needed[takes]]] = True
        found[computes[takes & needed]] = rows[needed[takes]]
        return found

    def _model_chunks(self) -> Ints:
        """Return the number of each operation's chunk in the model, if necessary derived from stage and chunk."""
        table = self._table
        computes = self._table.of_kind(_FORWARD, _BACKWARD)
        if (table.model_chunk[computes] != UNKNOWN).all():
            return table.model_chunk
        return np.asarray(np.maximum(table.chunk, 0) * self._n_stages + table.stage)

    def _micro_batches(self, computes: Ints, chunk: Ints) -> Ints:
        """Return micro-batches; derived from the order within worker and chunk if the table does not state all."""
        batch = self._table.micro_batch[computes]
        of_chunk = self._place[computes] * (int(chunk.max(initial=0)) + 1) + chunk
        if (batch != UNKNOWN).all() and len(np.unique(np.stack([of_chunk, batch]), axis=1).T) == len(computes):
            return batch
        return _ordinals(of_chunk)

    def _add_collectives(self) -> None:
        """Let the members of each collective meet, matched by their order on each worker."""
        table = self._table
        n_dp_ranks = len(table.dp_ranks)
        for kind in table.kinds:
            rows = self._rows(kind)
            match KINDS.get(kind, OTHER).members:
                case "alone" | "ends":
                    continue
                case "stage":
                    group = table.step * self._n_stages + table.stage
                    n_members = n_dp_ranks
                case "pipeline":
                    group = table.step * n_dp_ranks + table.dp_rank
                    n_members = len(np.unique(table.stage[rows]))
                case "all":
                    group = table.step
                    n_members = table.n_workers
                case unknown:
                    assert_never(unknown)
            number = _ordinals(self._place[rows])
            key = group[rows] * (int(number.max(initial=0)) + 1) + number
            _, first, inverse, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
            self.meeting[rows] = rows[first][inverse]
            for bad in np.flatnonzero(counts != n_members).tolist():
                what = f"{kind} number {number[first[bad]] + 1} of {counts[bad]:,} workers, not of {n_members:,}"
                self._refuse(self._place[rows[first[bad : bad + 1]]], what)


def _consecutive(rows: Ints, key: Ints) -> tuple[Ints, Ints]:
    """Return operations and their successors of the same key."""
    same = key[rows[1:]] == key[rows[:-1]]
    return rows[:-1][same], rows[1:][same]


def _ordinals(keys: Ints) -> Ints:
    """Return for each value the number of equal values before it.

    >>> _ordinals(np.array([7, 7, 3, 7, 3])).tolist()
    [0, 1, 0, 2, 1]
    """
    import pandas as pd

    return np.asarray(pd.Series(keys).groupby(keys).cumcount(), dtype=np.int64)


def _nearest(key: Ints, time_s: Floats, keys: Ints, times_s: Floats, *, last: bool) -> Ints:
    """Find, for each key and time, the first of others with that key from that time on, or the last one up to it.

    >>> of = np.array([0, 0, 1]), np.array([1.0, 2.0, 3.0])
    >>> _nearest(np.array([0, 0, 1]), np.array([1.5, 2.5, 0.0]), *of, last=False).tolist()
    [1, -1, 2]
    """
    if not len(keys):
        return np.full(len(key), UNKNOWN)
    span_s = 1.0 + max(float(times_s.max()), float(time_s.max(initial=0.0)))
    order = np.lexsort((times_s, keys))
    side: Literal["left", "right"] = "right" if last else "left"
    found = np.searchsorted(keys[order] * span_s + times_s[order], key * span_s + time_s, side=side) - last
    nearest = order[np.clip(found, 0, len(order) - 1)]
    return np.where((found >= 0) & (found < len(order)) & (keys[nearest] == key), nearest, UNKNOWN)


def _graph(table: OperationTable, meeting: Ints, edges: tuple[Ints, Ints]) -> OperationGraph:
    """Sort meetings and edges into an order for the replay, and remove waiting from durations."""
    sources, targets = edges
    _, meeting = np.unique(meeting, return_inverse=True)
    level = _levels(table, meeting, sources, targets)
    number = np.empty_like(level)
    number[np.argsort(level, kind="stable")] = np.arange(len(level))
    meeting = number[meeting]
    order = np.argsort(meeting[targets], kind="stable")
    sources = sources[order]
    targets = targets[order]
    last_start_s = np.zeros(len(level))
    ready_s = np.zeros(len(meeting))
    np.maximum.at(ready_s, targets, table.end_s[sources])
    # If the other end of a transfer is not in the table, the wait for that end's predecessors is not work.
    is_lone = table.of_kind(*_TRANSFERS) & (np.bincount(meeting)[meeting] == 1)
    np.maximum.at(last_start_s, meeting, np.where(is_lone, np.maximum(table.start_s, ready_s), table.start_s))
    work_s = table.end_s - last_start_s[meeting]
    if n_early := int((work_s < -_CLOCKS_S).sum()):
        early = f"ends of {n_early:,} operations lie before the start of their last member: clocks differ"
        table = replace(table, notes=(*table.notes, f"{early}; they count as 0 s"))
    firsts = np.searchsorted(np.sort(level), np.arange(1, int(level.max()) + 2))
    edge_starts = np.searchsorted(meeting[targets], np.arange(len(level) + 1))
    return OperationGraph(
        table=table,
        meeting=meeting,
        levels=tuple((int(a), int(b), int(edge_starts[a]), int(edge_starts[b])) for a, b in pairwise(firsts)),
        sources=sources,
        targets=targets,
        edge_starts=edge_starts,
        work_s=np.maximum(work_s, 0),
        gap_s=np.maximum(table.start_s - ready_s, 0),
    )


def _levels(table: OperationTable, meeting: Ints, sources: Ints, targets: Ints) -> Ints:
    """Return the number of meetings before each one in the longest chain that leads to it.

    Raises:
        TraceError: They wait for each other.
    """
    order = np.argsort(meeting[sources], kind="stable")
    before = meeting[sources][order]
    after = meeting[targets][order]
    n = int(meeting.max()) + 1
    firsts = np.searchsorted(before, np.arange(n + 1))
    n_awaited = np.bincount(after, minlength=n)
    level = np.full(n, UNKNOWN)
    ready = np.flatnonzero(n_awaited == 0)
    number = 0
    while len(ready):
        level[ready] = number
        counts = firsts[ready + 1] - firsts[ready]
        offsets = np.repeat(firsts[ready] - np.cumsum(counts) + counts, counts)
        awaiting, n_done = np.unique(after[offsets + np.arange(len(offsets))], return_counts=True)
        n_awaited[awaiting] -= n_done
        ready = awaiting[n_awaited[awaiting] == 0]
        number = number + 1
    if (level == UNKNOWN).any():
        row = int(np.argmax(level[meeting] == UNKNOWN))
        where = f"step {table.step_numbers[table.step[row]]}, stage {table.stage[row]}: {table.kinds[table.kind[row]]}"
        raise TraceError(f"{table.path}: {where}: waits for itself: the workers do not start operations in one order")
    return level
