"""The durations of collectives without waiting: for each call, the minimum over its ranks.

The time of a rank in a collective includes the wait for later ranks. The last rank to arrive does not wait. So the
shortest time of any rank in a call is the time of the transfer. A mean over calls would still contain waiting if ranks
take turns at being late.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.model import RankProfile, RankStep, TracedCollective

#: In these kinds, the calls of two ranks do not belong to the same collective.
_APART: tuple[CollectiveKind, ...] = ("point_to_point", "other")

_Key: TypeAlias = tuple[int, CollectiveKind, tuple[int, ...] | None, int | None, int]


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call of one rank, without its waiting for later ranks.

    Args:
        call: The call.
        seconds: Its duration from the moment at which the last rank arrived.
    """

    call: TracedCollective
    seconds: float

    @property
    def start_s(self) -> float:
        """When the last rank arrived, on the clock of this rank."""
        return self.call.end_s - self.seconds

    @property
    def exposed_s(self) -> float:
        """Upper bound of its exposed seconds, which do not overlap with computing."""
        return min(self.call.exposed_s, self.seconds)


def transfers_of(profiles: Sequence[RankProfile]) -> list[list[list[SentCall]]]:
    """Return the calls of each rank and step, without waiting."""
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
    """Yield each call with a key. Calls of several ranks with equal keys are the same collective."""
    seen: Counter[tuple[CollectiveKind, tuple[int, ...] | None, int | None]] = Counter()
    for call in step.calls:
        like = call.kind, call.ranks, call.n_ranks
        yield (step.number, *like, seen[like]), call
        seen[like] += 1
