"""What collectives take without waiting: of each call, the least over its ranks.

A rank is in a collective while it waits for ranks that come later. The last one to come waits for none: of the ranks
of one call, the one that spends least in it tells the transfer. A mean over calls would not, where ranks are late in
turns.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.model import RankProfile, RankStep, TracedCollective

#: Members of these do different things at different times: the calls of two ranks are not the same one.
_APART: tuple[CollectiveKind, ...] = ("point_to_point", "other")

_Key: TypeAlias = tuple[int, CollectiveKind, tuple[int, ...] | None, int | None, int]


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call of one rank, without its waiting for later ranks.

    Args:
        call: The call.
        seconds: What it takes from when its last rank has come.
    """

    call: TracedCollective
    seconds: float

    @property
    def start_s(self) -> float:
        """When the last rank had come, on the clock of this rank."""
        return self.call.end_s - self.seconds

    @property
    def exposed_s(self) -> float:
        """How much of it nothing is computed beside, at most."""
        return min(self.call.exposed_s, self.seconds)


def transfers_of(profiles: Sequence[RankProfile]) -> list[list[list[SentCall]]]:
    """Return all calls without waiting, for each rank and step."""
    of_rank = [[list(_keys(step)) for step in each.steps] for each in profiles]
    least_s: dict[_Key, float] = defaultdict(lambda: float("inf"))
    for step in (step for steps in of_rank for step in steps):
        for key, call in step:
            least_s[key] = min(least_s[key], call.end_s - call.start_s)
    return [
        [
            [SentCall(call, call.end_s - call.start_s if key[1] in _APART else least_s[key]) for key, call in step]
            for step in steps
        ]
        for steps in of_rank
    ]


def _keys(step: RankStep) -> Iterator[tuple[_Key, TracedCollective]]:
    """Yield each call with what tells which calls of other ranks are the same collective."""
    seen: Counter[tuple[CollectiveKind, tuple[int, ...] | None, int | None]] = Counter()
    for call in step.calls:
        like = call.kind, call.ranks, call.n_ranks
        yield (step.number, *like, seen[like]), call
        seen[like] += 1
