"""Tables of what is lost: by kind of operation, by the slowest ranks and other parts of a job, by step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simdist.settings.units import format_seconds, format_share
from simdist.studies.columns import Column, factor, seconds
from simdist.studies.tables import table_text

ROUNDING_S = 1e-12
SLOW = 1.1  # slowdown of a slow step
EACH_ALONE = "Each line below stands alone: the slowdown if only this is as recorded and all else is ideal."

SLOWDOWN = Column("slowdown", form=factor)
LOST = Column("lost per step", "lost_s", form=seconds)
STEP_COLUMNS = (
    Column("step", form=str),
    Column("time", "step_s", form=format_seconds),
    Column("ideal", "ideal_s", form=format_seconds),
    SLOWDOWN,
    Column("slowest rank", "slowest_rank", form=str),
)

_KIND_COLUMNS = (Column("operation", "name"), Column("channel"), SLOWDOWN, LOST)
_MOST_ROWS = 10  # of a table of ranks, nodes or steps; JSON has all


def loss_records(slowdowns: NDArray[np.float64], ideal_s: float) -> list[dict[str, Any]]:
    """Return what each rank, or other part of a job, costs."""
    return [{"slowdown": each, "lost_s": (each - 1) * ideal_s} for each in slowdowns.tolist()]


def slowdown_line(slowdown: float, step_s: float, ideal_s: float) -> str:
    """Say how slow a job is, per step, and what share of its time that costs."""
    lost_share = 1 - ideal_s / step_s
    lost = "nothing is lost" if lost_share < 5e-4 else f"{format_share(lost_share)} of the time is lost"
    return (
        f"slowdown {slowdown:.2f}: {format_seconds(step_s)} per step, "
        f"{format_seconds(ideal_s)} without stragglers; {lost}"
    )


def slow_steps_line(slowdowns: NDArray[np.float64]) -> str:
    """Say how many steps are slow."""
    n_slow = int((slowdowns > SLOW).sum())
    return f"slow steps: {n_slow:,} of {len(slowdowns):,} take more than {SLOW} times the ideal"


def kinds_text(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the kinds of operation that cost something."""
    costly = [kind for kind in kinds if kind["lost_s"] > ROUNDING_S]
    if not costly:
        return "kinds of operation: none is slower than typical"
    return table_text("kinds of operation", _KIND_COLUMNS, costly)


def slowest_text(what: str, columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the slowest ranks, nodes or steps."""
    known = [{**record, "slowdown": float(np.nan_to_num(record["slowdown"], nan=0.0))} for record in records]
    slowest = sorted(known, key=lambda record: -record["slowdown"])[:_MOST_ROWS]
    title = f"all {what}" if len(records) <= _MOST_ROWS else f"the slowest {_MOST_ROWS} of {len(records):,} {what}"
    return table_text(title, columns, slowest)
