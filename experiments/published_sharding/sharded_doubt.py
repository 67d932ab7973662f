"""The doubt of sharded models on more machines: which rows it is estimated from, and whether it holds others.

A row teaches if its machines, passes and recomputation are like those of its calibrated row, if it has more GPUs, and
if computing decides: even with the slowest step of a ring, the simulated step is hardly longer than by linear scaling.
None of this depends on what was measured. What communication adds has doubts of its own.
"""

import csv
import io
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from rates_of_rows import HERE, Prediction, families, is_alike, predictions, step_s

sys.path.append(str(HERE.parent / "published_rows"))

import sharded_rows
from estimate import N_PLACES, Residual, of_training

from simdist.studies.published_errors import of_published_rows

RESIDUALS = sharded_rows.FILE
SLOWEST_STEP = "80 us"
"""Of a ring: the upper end of the range where nobody measured it."""
LONGER = 1.05
SOURCES = {
    "llm-foundry H100 large": "llm-foundry H100",
    "InternEvo packed": "InternEvo",
    "InternEvo checkpointing": "InternEvo",
}
"""Families of one source and cluster."""


def source(family: str) -> str:
    """Return the source and cluster that a family of rows belongs to."""
    return SOURCES.get(family, family)


def teaches(each: Prediction) -> bool:
    """Tell whether a row is one to estimate from."""
    row = each.row
    if row.gpus <= each.base.gpus or row.gpus == row.gpus_per_node or not is_alike(each):
        return False
    slowest_s = step_s(replace(row, ring_step=SLOWEST_STEP), each.utilization, each.base.gpus)
    return slowest_s <= LONGER * row.tokens / each.linear_per_s


def residuals_text() -> str:
    """Return the errors of the rows as `residuals.csv` has them."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["family", "model", "gpus", "batch_size", "micro_batches", "sharding", "log"])
    for family in families():
        for each in predictions(family):
            if teaches(each):
                row = each.row
                log = math.log(each.simulated_per_s / row.tokens_per_s)
                traits = [row.model, row.gpus, row.batch_size, row.micro_batches, row.sharding]
                writer.writerow([source(family), *traits, f"{log:.5f}"])
    return lines.getvalue()


@cache
def table_without(family: str) -> Mapping[str, Any]:
    """Return the distributions with that of sharded models estimated from the other sources."""
    others = [each for each in sharded_rows.residuals() if each.family != source(family)]
    every = of_published_rows()
    return {**every, "training": {**every["training"], "sharded": of_training(others, "sharded")}}


def doubt_table() -> Iterator[str]:
    """Yield by source: rows, the ends of the distribution of the others, and how many rows they hold."""
    yield "| source | rows | others: 5 % | 95 % | held |"
    found: dict[str, list[Residual]] = {}
    for each in sharded_rows.residuals():
        found.setdefault(each.family, []).append(each)
    n_held = 0
    for name, rows in found.items():
        (logs,) = table_without(name)["training"]["sharded"][""]["logs"]
        low, high = logs[N_PLACES // 20], logs[-1 - N_PLACES // 20]
        held = sum(min(low, 0) <= each.log <= max(high, 0) for each in rows)
        n_held += held
        yield f"| {name} | {len(rows)} | {math.exp(low) - 1:+.0%} | {math.exp(high) - 1:+.0%} | {held} |"
    yield f"| **all** | {sum(map(len, found.values()))} | | | {n_held} |"
