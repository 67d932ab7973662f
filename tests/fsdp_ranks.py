"""Ranks under `fully_shard` that are late in different micro-batches: each runs alone, until all agree when they meet.

    rows_of_ranks(drive, settings, late)           torch's own code, see `fsdp_clock.py`
    rows_of_ranks(rows_by_rules, settings, late)   the rules, see `fsdp_rules.py`

All ranks issue the same collectives in the same order. One begins with its last member. So the starts that a rank finds
for itself bound those of its peers, and the ranks run again with these bounds until none of them moves.
"""

import random
from collections.abc import Callable, Sequence

from fsdp_settings import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZE, OneRank, Row, Settings, random_settings

RowsOf = Callable[[Settings, OneRank], list[Row]]


def rows_of_ranks(rows_of: RowsOf, settings: Settings, late: Sequence[OneRank]) -> list[list[Row]]:
    """Return the rows of each rank.

    Args:
        rows_of: Runs one rank.
        settings: Units are gathered by all ranks that share them, also again.
        late: How late each rank is; consecutive ranks share a copy of the model.
    """
    ranks = list(late)
    while True:
        rows = [rows_of(settings, rank) for rank in ranks]
        sent = [[row for row in each if row.kind not in (FORWARD, BACKWARD, OPTIMIZE)] for each in rows]
        begins = [
            tuple(
                max(sent[peer][number].start for peer in _peers(settings, rank, row)) for number, row in enumerate(its)
            )
            for rank, its in enumerate(sent)
        ]
        if begins == [tuple(row.start for row in its) for its in sent]:
            return rows
        ranks = [OneRank(rank.late, its) for rank, its in zip(ranks, begins, strict=True)]


def _peers(settings: Settings, rank: int, row: Row) -> range:
    """Return the ranks that take part in a collective of a rank."""
    if row.kind == ALL_REDUCE:
        return range(rank % settings.shard, settings.shard * settings.replicas, settings.shard)
    first = rank - rank % settings.shard
    return range(first, first + settings.shard)


def late_jobs(n_seeds: int) -> list[tuple[int, Settings]]:
    """Draw jobs of several micro-batches, with their seeds. All that is gathered is gathered by all who share it."""
    found = []
    for seed in range(n_seeds):
        settings = random_settings(seed)
        is_whole = settings.reshard_after_forward in (None, True, False, 1, settings.shard)
        if len(settings.micro_batches) > 1 and settings.shard > 1 and settings.root is None and is_whole:
            found.append((seed, settings))
    return found


def random_lateness(settings: Settings, seed: int) -> list[OneRank]:
    """Draw how late each rank is in each micro-batch."""
    draw = random.Random(seed)
    n_ranks = settings.shard * settings.replicas
    return [OneRank(tuple(_lateness(draw, settings) for _ in range(settings.n_steps))) for _ in range(n_ranks)]


def _lateness(draw: random.Random, settings: Settings) -> tuple[int, ...]:
    return tuple(draw.choice((0, 0, 5, 30, 80)) for _ in settings.micro_batches)
