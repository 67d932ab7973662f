"""Collectives of a job without waiting, and those of a few bytes that are part of no schedule.

The time of a rank in a collective includes the wait for later ranks. The last rank to arrive does not wait. So the
shortest time of any rank in a call is the time of the transfer.

The norm of gradients, found_inf, a logged loss and metrics are exchanged under every schedule, so they are a fixed
cost. Place, size and type tell them from the exchanges of a model that is split over ranks:

* Behind the last backward pass of a step, no layer computes. There, all exchanges are of this kind if together they
  have at most 1 % of the bytes of gradients. A job that averages gradients by hand exchanges all of them there.
* Anywhere else, exchanges of at most 64 bytes are of this kind, and those of integers with at most 1 % of the bytes of
  gradients, such as DDP's map of unused parameters. Activations and statistics of layers are larger, and no integers.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.model import RankProfile, RankStep, TracedCollective
from simdist.settings.units import format_nbytes, format_seconds

#: What a sharded model exchanges for each unit.
OF_UNITS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
_FEW_NBYTES = 64  # 16 numbers of 32 bits
_SMALL_SHARE = 0.01  # of the bytes of gradients; a norm has one number for each tensor
_OF_NUMBERS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "broadcast", "reduce", "other")
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


@dataclass(frozen=True, slots=True)
class FixedExchange:
    """Exchanges of one kind and size that are part of no schedule.

    Args:
        kind: Kind of collective.
        nbytes: Bytes of each.
        per_step: Number in a step, mean.
        seconds: Exposed seconds of a step that they take without waiting, mean over steps and ranks.
    """

    kind: CollectiveKind
    nbytes: int
    per_step: float
    seconds: float


def is_covered(call: TracedCollective, *, is_sharded: bool) -> bool:
    """Tell whether a scenario has a collective: an all_reduce of gradients or, of a sharded model, those of units."""
    if is_sharded and call.kind in OF_UNITS:
        return not call.after_passes
    return call.kind == "all_reduce" and call.of_gradients


def are_fixed(step: RankStep, *, is_sharded: bool) -> list[bool]:
    """Tell which calls of a step are part of no schedule, in their order.

    Args:
        step: The step.
        is_sharded: The scenario shards the model: it covers the gathers and reduce-scatters of units.
    """
    most_nbytes = _SMALL_SHARE * sum(call.nbytes or 0 for call in step.calls if call.of_gradients)
    others = [call for call in step.calls if not is_covered(call, is_sharded=is_sharded)]
    behind_nbytes = sum(call.nbytes or 0 for call in others if call.after_passes)

    def is_fixed(call: TracedCollective) -> bool:
        if is_covered(call, is_sharded=is_sharded) or call.kind not in _OF_NUMBERS or call.nbytes is None:
            return False
        is_little = call.after_passes and behind_nbytes <= most_nbytes
        counts = call.dtype.startswith(("int", "uint", "bool")) and call.nbytes <= most_nbytes
        return is_little or counts or call.nbytes <= _FEW_NBYTES

    return [is_fixed(call) for call in step.calls]


def find_fixed(
    steps: Sequence[Sequence[RankStep]], transfers: Sequence[Sequence[Sequence[SentCall]]], *, is_sharded: bool
) -> tuple[FixedExchange, ...]:
    """Return the exchanges that are part of no schedule.

    Args:
        steps: The steps of each traced rank, `[n_ranks][n_steps]`.
        transfers: Their calls without waiting, `[n_ranks][n_steps][n_calls]`.
        is_sharded: The scenario shards the model.
    """
    sent_of: dict[tuple[CollectiveKind, int], list[SentCall]] = defaultdict(list)
    for of_rank, sent_of_rank in zip(steps, transfers, strict=True):
        for step, sent in zip(of_rank, sent_of_rank, strict=True):
            for each, is_fixed in zip(sent, are_fixed(step, is_sharded=is_sharded), strict=True):
                if is_fixed:
                    sent_of[each.call.kind, each.call.nbytes or 0].append(each)
    n_steps = sum(map(len, steps))
    return tuple(
        FixedExchange(kind, nbytes, len(sent) / n_steps, math.fsum(each.exposed_s for each in sent) / n_steps)
        for (kind, nbytes), sent in sorted(sent_of.items())
    )


def fixed_s(exchanges: Sequence[FixedExchange]) -> float:
    """Return the seconds of a step that fixed exchanges take."""
    return math.fsum(each.seconds for each in exchanges)


def fixed_note(exchanges: Sequence[FixedExchange]) -> str:
    """Say what the fixed exchanges are, and where their time counts."""
    told = [
        f"{each.per_step:.3g} {'barrier' if each.kind == 'other' else each.kind} of {format_nbytes(each.nbytes)}"
        for each in exchanges
    ]
    return (
        f"{', '.join(told)} a step are part of no schedule, as those of a gradient norm, found_inf, a logged loss or "
        f"metrics: their {format_seconds(fixed_s(exchanges))} count with the forward pass under every schedule; ranks "
        f"also wait for one another in them: a schedule that averages less often needs them as seldom"
    )
