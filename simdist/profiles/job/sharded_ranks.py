"""Ranks that shard a model: whether they do, and the groups in which they gather and reduce."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from simdist.profiles.steps.model import RankProfile, RankStep, TracedCollective


def shards_model(profiles: Iterable[RankProfile]) -> bool:
    """Tell whether ranks gather parameters and reduce-scatter gradients, and nothing else, in most steps."""
    steps = [step for profile in profiles if "embeddings" not in profile.hints for step in profile.steps]
    return bool(steps) and 2 * sum(map(_is_sharded, steps)) > len(steps)


def _is_sharded(step: RankStep) -> bool:
    kinds = {call.kind for call in step.calls}
    if not step.passes or "all_gather" not in kinds or "all_to_all" in kinds or "point_to_point" in kinds:
        return False
    reductions = [call for call in step.calls if call.kind == "reduce_scatter"]
    first_s = step.passes[0][0].issued_s
    has_early = any(call.issued_s < first_s for call in step.calls if call.kind == "all_gather")
    return has_early and bool(reductions) and all(call.of_gradients for call in reductions)


def with_groups(profiles: Sequence[RankProfile], world_size: int, shard: int | None) -> list[RankProfile]:
    """Return ranks of a sharded job with the members of all groups.

    If the traces do not name them, consecutive ranks share a copy of the model, and ranks with the same slice of
    different copies average it.

    Args:
        profiles: One per rank. Each states its rank.
        world_size: Ranks of the job.
        shard: Ranks that share a copy, if the user states them.
    """
    found = []
    for profile in profiles:
        rank = profile.rank or 0
        steps = tuple(replace(step, calls=_in_groups(step, rank, world_size, shard)) for step in profile.steps)
        found.append(replace(profile, steps=steps))
    return found


def _in_groups(step: RankStep, rank: int, world_size: int, shard: int | None) -> tuple[TracedCollective, ...]:
    reductions = [call for call in step.calls if call.kind == "reduce_scatter"]
    told = {call.n_ranks for call in reductions if call.n_ranks}
    n_sharers = told.pop() if len(told) == 1 else shard
    if not n_sharers or world_size % n_sharers:
        return step.calls
    slices = {call.nbytes // n_sharers for call in reductions if call.nbytes}
    copies = tuple(range(rank % n_sharers, world_size, n_sharers))
    calls = []
    for call in step.calls:
        size = call.n_ranks or n_sharers
        members = call.ranks
        if _is_of_slices(call, slices) and len(members or ()) in (0, world_size):
            members = copies
        elif members is None and call.kind in ("all_gather", "reduce_scatter") and world_size % size == 0:
            first = rank - rank % size
            members = tuple(range(first, first + size))
        calls.append(replace(call, ranks=members, n_ranks=len(members) if members else call.n_ranks))
    return tuple(calls)


def _is_of_slices(call: TracedCollective, slices: set[int]) -> bool:
    """Tell whether a collective averages slices of gradients, as large as reduce-scatters leave them."""
    return call.kind == "all_reduce" and call.of_gradients and call.nbytes in slices
