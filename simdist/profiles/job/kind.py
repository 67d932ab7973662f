"""The kind of the traced job: the communication that a scenario of data-parallel training does not cover.

The scenario averages the gradients of all ranks with all_reduces or, if the model is sharded, gathers units and
reduce-scatters their gradients. Exchanges of a few bytes, such as a gradient norm, are a fixed cost. It leaves out all
other communication, which shows how the model is distributed over the ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from simdist.profiles.job.exchanges import (
    OF_UNITS,
    FixedExchange,
    SentCall,
    are_fixed,
    find_fixed,
    is_covered,
    transfers_of,
)
from simdist.profiles.kineto.events import Hint
from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.model import RankProfile, RankStep
from simdist.settings.units import format_share

_MOST_LEFT_OUT = 0.02  # of a step; beyond it, schedules of the scenario say nothing about the job


@dataclass(frozen=True, slots=True)
class JobKind:
    """Communication that the scenario leaves out.

    Args:
        names: Kinds of parallelism besides data parallelism; empty if unknown.
        left_out: Kind of collective that the scenario does not cover -> calls per step, and their share of it.
        unseen_share: Share of a step in which the device is idle for unknown reasons.
        fixed: Exchanges that are part of no schedule. They are not left out.
    """

    names: tuple[str, ...]
    left_out: dict[CollectiveKind, tuple[float, float]]
    unseen_share: float
    fixed: tuple[FixedExchange, ...]

    @property
    def share(self) -> float:
        """Total share of a step that is left out."""
        return self.unseen_share + math.fsum(share for _, share in self.left_out.values())

    @property
    def is_modelled(self) -> bool:
        """Whether the scenario covers nearly all of a step."""
        return self.share <= _MOST_LEFT_OUT

    @property
    def sentence(self) -> str:
        """Describe the omissions."""
        told = [
            f"{calls:.3g} {kind} a step ({format_share(share)} of it)"
            for kind, (calls, share) in sorted(self.left_out.items(), key=lambda item: -item[1][1])
        ]
        names = f"{' and '.join(self.names) or 'other collectives'}: " if told else ""
        if self.unseen_share > _MOST_LEFT_OUT:
            told.append(f"{format_share(self.unseen_share)} of a step idle for what the traces do not show")
        return f"{names}{', '.join(told)}"


def find_kind(profiles: Sequence[RankProfile], *, waiting_s: float, is_sharded: bool = False) -> JobKind:
    """Return the kind of job that the collectives of its ranks show.

    The time of a rank in a collective includes its wait for others. So the shortest time of a call counts.

    Args:
        profiles: One per traced rank.
        waiting_s: Seconds of a step in which devices are idle for unknown reasons.
        is_sharded: The scenario shards the model: it covers the gathers and reduce-scatters of units.
    """
    step_s = float(np.mean([step.end_s - step.start_s for each in profiles for step in each.steps]))
    transfers = transfers_of(profiles)
    steps = [each.steps for each in profiles]
    fixed = find_fixed(steps, transfers, is_sharded=is_sharded)
    left_out = [
        [_left_out(*of_step, is_sharded=is_sharded) for of_step in zip(*of_rank, strict=True)]
        for of_rank in zip(steps, transfers, strict=True)
    ]
    in_part = {"all_reduce", *(each.kind for each in fixed), *(OF_UNITS if is_sharded else ())}
    found: dict[CollectiveKind, tuple[float, float]] = {}
    for kind in sorted({each.call.kind for each in chain(*chain(*left_out))}):
        calls, seconds = zip(*(_of_kind(of_rank, kind) for of_rank in left_out), strict=True)
        issued = 0.0 if kind in in_part else max(each.issued.get(kind, 0.0) for each in profiles)
        found[kind] = max(*calls, issued), min(seconds) / step_s if step_s else 0.0
    hints = frozenset(hint for each in profiles for hint in each.hints)
    often = {kind for kind, (calls, _) in found.items() if calls >= 1}
    averages = any(step.gradient_calls for each in profiles for step in each.steps)
    if is_sharded:
        hints -= {"sharded model"}
    names = tuple(_names(often, hints, averages=averages))
    return JobKind(names, found, waiting_s / step_s if step_s else 0.0, fixed)


def _left_out(step: RankStep, sent: Sequence[SentCall], *, is_sharded: bool) -> list[SentCall]:
    """Return the calls of a step that the scenario has neither as a part of a schedule nor as a fixed cost."""
    fixed = are_fixed(step, is_sharded=is_sharded)
    return [
        each
        for each, is_fixed in zip(sent, fixed, strict=True)
        if not is_fixed and not is_covered(each.call, is_sharded=is_sharded)
    ]


def _of_kind(steps: Sequence[Sequence[SentCall]], kind: CollectiveKind) -> tuple[float, float]:
    """Return the calls of a kind per rank and step, and their seconds without waiting."""
    calls = [[each for each in step if each.call.kind == kind] for step in steps]
    return len(list(chain(*calls))) / len(steps), math.fsum(map(_union_s, calls)) / len(steps)


def _union_s(transfers: Sequence[SentCall]) -> float:
    """Return for how long at least one is running."""
    total_s = 0.0
    reached_s = -np.inf
    for start_s, end_s in sorted((each.start_s, each.call.end_s) for each in transfers):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s


def _names(kinds: set[CollectiveKind], hints: frozenset[Hint], *, averages: bool) -> Iterator[str]:
    """Return the kinds of parallelism that collectives and names in the traces show."""
    if "all_to_all" in kinds:
        of_all_to_all = {"embeddings": "sharded embeddings", "experts": "expert parallelism"}
        named = [name for hint, name in of_all_to_all.items() if hint in hints]
        yield from named or ["expert or sequence parallelism, or sharded embeddings"]
    if "point_to_point" in kinds:
        yield "pipeline parallelism"
    is_sharded = "all_gather" in kinds and not kinds.isdisjoint({"reduce_scatter", "reduce"})
    if "sharded model" in hints or (is_sharded and "embeddings" not in hints):
        yield "sharded parameters (FSDP or ZeRO)"
    if "all_reduce" in kinds and averages:
        yield "all_reduces of no gradients (tensor parallelism, or statistics)"
    elif "all_reduce" in kinds:
        yield "all_reduces that are not those of DDP (tensor parallelism, statistics, or gradients)"
