"""The traced job must average the gradients of all its ranks in every step, as schedules here do.

A job with tensor or pipeline parallelism averages over groups of ranks. Traces of the ranks of one such group are a
data-parallel job of their own. Traces from several groups are not. Steps that only add to gradients are passes of the
next step that exchanges them, if exchanges come at regular distances. Any other job is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from operator import attrgetter

import numpy as np

from simdist.errors import TraceError
from simdist.profiles.steps.model import HostMark, RankProfile, RankStep, TracedCollective, usual_micro_batches
from simdist.settings.base import listed

_TOLD = 3  # groups, steps
_SUMMED = ("input_s", "forward_s", "host_s", "backward_s", "wait_s", "optimize_s", "beside_s")
_summed = attrgetter(*_SUMMED)

_Group = tuple[int, ...]


def one_group(profiles: Sequence[RankProfile], world_size: int) -> tuple[list[RankProfile], int, list[str]]:
    """Return the ranks that average gradients with each other, numbered from 0, and their number.

    Returns:
        The profiles, the number of ranks, and the assumptions.

    Raises:
        TraceError: The ranks belong to several groups.
    """
    groups, unnamed = _groups(profiles, world_size)
    if groups <= {tuple(range(world_size))} and not unnamed:
        return list(profiles), world_size, []
    traced = {profile.rank or 0 for profile in profiles}
    if not groups and unnamed == {len(traced)}:
        groups = {tuple(sorted(traced))}
        unnamed = set()
    common = [group for group in groups if traced <= set(group)]
    if len(common) != 1 or len(common[0]) == world_size or unnamed:
        raise _several(profiles, groups, unnamed, world_size)
    group = common[0]
    note = (
        f"gradients are averaged over ranks {listed(group)} of {world_size}: the scenario is of these, as ranks "
        f"0-{len(group) - 1}; what they exchange with others is left out"
    )
    return [_inside(profile, group, world_size) for profile in profiles], len(group), [note]


def join_passes(profiles: Sequence[RankProfile]) -> tuple[tuple[RankProfile, ...], list[str]]:
    """Join steps that the profiler counted per pass, and omit steps with an unusual number of passes.

    Args:
        profiles: Profiles of all ranks, with the same steps.

    Returns:
        The profiles, and notes on the changes. Steps that update, or come at irregular distances, stay as they are.
    """
    steps = profiles[0].steps
    every = _distance(profiles[0])
    lasts = [place for place in _exchanging(profiles[0]) if place + 1 >= every]
    groups = [range(last + 1 - every, last + 1) for last in lasts]
    groups = [each for each in groups if steps[each[-1]].number - steps[each[0]].number == every - 1]
    notes = []
    if every > 1 and groups and not any(steps[place].optimize_s for each in groups for place in each[:-1]):
        profiles = [_joined(profile, groups) for profile in profiles]
        notes.append(
            f"gradients are exchanged once in {every} steps of the profiler, which count as one: its step "
            f"{steps[groups[-1][-1]].number} ends step {profiles[0].steps[-1].number}"
        )
    usual = usual_micro_batches(step for profile in profiles for step in profile.steps)
    odd = {step.number for profile in profiles for step in profile.steps if step.micro_batches != usual}
    if usual > 1 and 0 < len(odd) < len(profiles[0].steps):
        notes.append(f"left out steps {listed(sorted(odd))}: they have other numbers of passes than {usual}")
        profiles = [replace(p, steps=tuple(step for step in p.steps if step.number not in odd)) for p in profiles]
    return tuple(profiles), notes


def _exchanging(profile: RankProfile) -> list[int]:
    return [place for place, step in enumerate(profile.steps) if step.gradient_calls]


def _distance(profile: RankProfile) -> int:
    """Return the number of steps between exchanges of gradients; 1 if it varies."""
    gaps = {after - before for before, after in pairwise(_exchanging(profile))}
    return gaps.pop() if len(gaps) == 1 else 1


def _joined(profile: RankProfile, groups: Sequence[range]) -> RankProfile:
    """Return a profile in which each group of steps is one step."""
    issued = {kind: len(groups[0]) * n_each for kind, n_each in profile.issued.items()}
    steps = tuple(_as_one(profile.steps[each[0] : each[-1] + 1]) for each in groups)
    return replace(profile, steps=steps, issued=issued)


def _as_one(passes: Sequence[RankStep]) -> RankStep:
    first = passes[0]
    last = passes[-1]
    before_s = math.fsum(each.backward_s for each in passes[:-1])
    forward_s, backward_s = (
        accumulate((times_s(each) for each in passes[:-1]), initial=0.0)
        for times_s in (attrgetter("forward_s"), attrgetter("backward_s"))
    )
    later = list(zip(passes, zip(forward_s, backward_s, strict=True), strict=True))
    return replace(
        last,
        number=last.number // len(passes),
        start_s=first.start_s,
        marked_s=first.marked_s,
        parts_s=tuple(map(math.fsum, zip(*(each.parts_s for each in passes), strict=True))),
        buckets_s=(before_s + last.buckets_s[0], *last.buckets_s[1:]) if last.buckets_s else (),
        calls=tuple(_moved_call(call, *spent_s) for each, spent_s in later for call in each.calls),
        copy_outs=tuple(_moved(mark, *spent_s) for each, spent_s in later for mark in each.copy_outs),
        passes=tuple(
            (_moved(begin, *spent_s), _moved(end, *spent_s)) for each, spent_s in later for begin, end in each.passes
        ),
        reads_loss=any(each.reads_loss for each in passes),
        of_passes=tuple(chain.from_iterable(each.of_passes for each in passes)),
        held_s=_held_in_all_s(passes),
        micro_batches=sum(each.micro_batches for each in passes),
        earlier_s=before_s + last.earlier_s,
        **dict(zip(_SUMMED, np.sum([_summed(each) for each in passes], axis=0).tolist(), strict=True)),
    )


def _moved(mark: HostMark, forward_s: float, backward_s: float) -> HostMark:
    """Return a mark of a step that follows so much computing of the same step."""
    return replace(mark, forward_s=mark.forward_s + forward_s, backward_s=mark.backward_s + backward_s)


def _moved_call(call: TracedCollective, forward_s: float, backward_s: float) -> TracedCollective:
    return replace(call, mark=_moved(call.mark, forward_s, backward_s)) if call.mark else call


def _held_in_all_s(passes: Sequence[RankStep]) -> tuple[float, ...]:
    """Return the pauses of all passes by place; backward passes before the last one count for its first bucket."""
    if not all(each.held_s for each in passes):
        return ()
    *before, last = (each.held_s for each in passes)
    forward_s, *buckets_s, update_s = last
    forward_s += math.fsum(each[0] for each in before)
    buckets_s[0] += math.fsum(seconds for each in before for seconds in each[1:-1])
    update_s += math.fsum(each[-1] for each in before)
    return (forward_s, *buckets_s, update_s)


def check_every_step(profile: RankProfile) -> None:
    """Refuse a rank that accumulates gradients of several batches between irregular exchanges.

    Raises:
        TraceError: It does so at regular distances, or in at most half of its steps.
    """
    numbers = [step.number for step in profile.steps]
    places = _exchanging(profile)
    every = _distance(profile)
    if not places or len(places) == len(numbers) or (every == 1 and 2 * len(places) > len(numbers)):
        return
    when = f"every {every} steps" if every > 1 else f"{len(places)} of {len(numbers)} steps"
    told = listed([numbers[place] for place in places[:_TOLD]])
    if len(places) > _TOLD:
        told += ", ..."
    raise TraceError(
        f"{profile.path}: exchanges gradients only in {when} ({told}), so they add up over several batches: call "
        f"profiler.step() once per optimizer.step(), and trace again"
    )


def _groups(profiles: Sequence[RankProfile], world_size: int) -> tuple[set[_Group], set[int]]:
    """Return the groups that average gradients, and the sizes of groups with unknown members."""
    calls = [call for profile in profiles for step in profile.steps for call in step.gradient_calls]
    members = {(call.members(world_size), call.n_ranks) for call in calls}
    unnamed = {n_ranks for group, n_ranks in members if group is None and n_ranks}
    return {group for group, _ in members if group and len(group) > 1}, unnamed


def _several(profiles: Sequence[RankProfile], groups: set[_Group], unnamed: set[int], world_size: int) -> TraceError:
    names = [f"ranks {listed(group)}" for group in sorted(groups)]
    names += [f"groups of {size} ranks" for size in sorted(unnamed)]
    over = ", over ".join(names[:_TOLD])
    if len(names) > _TOLD:
        over += f", and {len(names) - _TOLD} more"
    members = sorted(rank for group in groups for rank in group)
    is_partition = members == sorted(set(members)) and not unnamed
    which = (
        f"such as ranks {listed(min(groups))}" if is_partition else "that is, of ranks with the same part of the model"
    )
    return TraceError(
        f"{profiles[0].path} and others: gradients are averaged over {over}, not over all {world_size} ranks: import "
        f"the traces of one data-parallel group only, {which}"
    )


def _inside(profile: RankProfile, group: _Group, world_size: int) -> RankProfile:
    """Return a member as a rank of its group."""
    steps = tuple(_step_inside(step, group, world_size) for step in profile.steps)
    return replace(profile, rank=group.index(profile.rank or 0), world_size=len(group), steps=steps)


def _step_inside(step: RankStep, group: _Group, world_size: int) -> RankStep:
    """Return a step without collectives outside the group; backward time before them counts for the next bucket."""
    kept = [_is_inside(call, group, world_size) for call in step.calls]
    calls = tuple(
        replace(call, ranks=tuple(range(len(group))), n_ranks=len(group))
        for call, is_kept in zip(step.calls, kept, strict=True)
        if is_kept
    )
    ends_bucket = [is_kept for call, is_kept in zip(step.calls, kept, strict=True) if call.of_gradients]
    held_s = step.held_s
    if len(held_s) == len(ends_bucket) + 2:
        held_s = (held_s[0], *(_up_to_kept(held_s[1:-1], ends_bucket) or (math.fsum(held_s[1:-1]),)), held_s[-1])
    return replace(step, calls=calls, buckets_s=_up_to_kept(step.buckets_s, ends_bucket), held_s=held_s)


def _up_to_kept(seconds: Sequence[float], is_kept: Sequence[bool]) -> tuple[float, ...]:
    """Return the seconds from each kept bucket to the next; the last one includes the rest of the pass."""
    found = list[float]()
    since_s = 0.0
    for each_s, is_end in zip(seconds, is_kept, strict=False):
        since_s += each_s
        if is_end:
            found.append(since_s)
            since_s = 0.0
    if found:
        found[-1] += since_s
    return tuple(found)


def _is_inside(call: TracedCollective, group: _Group, world_size: int) -> bool:
    members = call.members(world_size)
    return call.n_ranks == len(group) if members is None else members == group
