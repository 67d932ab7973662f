"""Profiles of single ranks combined into one job: its ranks, a check that they belong together, and common steps."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from simdist.errors import TraceError
from simdist.plan.group import MAX_WORLD_SIZE
from simdist.profiles.job.alignment import shifted
from simdist.profiles.job.averaging import check_every_step, join_passes, one_group
from simdist.profiles.job.sharded_ranks import shards_model, with_groups
from simdist.profiles.steps.model import RankProfile, RankStep, usual_micro_batches
from simdist.settings.base import listed, plural
from simdist.settings.units import parse_seconds


@dataclass(frozen=True, slots=True)
class TracedJob:
    """A job with traces of some ranks, over their common steps.

    Args:
        world_size: Ranks of the job.
        profiles: Profiles of the traced ranks, in ascending order. All have the same step numbers.
        notes: Omissions and assumptions, one sentence each.
        shards: Ranks gather parameters and reduce-scatter gradients: the model is sharded.
    """

    world_size: int
    profiles: tuple[RankProfile, ...]
    notes: tuple[str, ...]
    shards: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that were traced, in ascending order."""
        return tuple(rank for profile in self.profiles if (rank := profile.rank) is not None)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a trace, in ascending order."""
        return tuple(sorted(set(range(self.world_size)) - set(self.ranks)))

    @property
    def untraced(self) -> str:
        """Describe the number of ranks without a trace."""
        return f"{len(self.missing)} of {self.world_size} ranks left no trace"

    @property
    def micro_batches(self) -> int:
        """Passes of a step."""
        return usual_micro_batches(step for profile in self.profiles for step in profile.steps)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the steps, in ascending order."""
        return tuple(step.number for step in self.profiles[0].steps)


_MANY = 10  # steps; if files have fewer, losing steps costs less than losing a rank


def assemble(profiles: Sequence[RankProfile], *, steps: range | None = None, shard: int | None = None) -> TracedJob:
    """Combine the profiles of a job, in any order.

    Args:
        profiles: One per file, of the same run.
        steps: Only steps with these numbers; all if None.
        shard: Ranks that share a copy of a sharded model, if the traces do not show it.

    Raises:
        TraceError: There are no profiles, they are of different jobs, two are of the same rank and step, they have no
            step in common, or they do not average gradients over all ranks in every step.
    """
    if not profiles:
        raise TraceError("no traces: give one file per rank, or the folder that they are in")
    of_ranks, notes = _of_ranks(sorted(profiles, key=lambda each: each.path))
    notes += grouped([(each.rank, note) for each in of_ranks for note in each.notes])
    world_size = _world_size(of_ranks)
    _check_same_job(of_ranks)
    shards = shards_model(of_ranks)
    of_group: list[str] = []
    if shards:
        of_ranks = with_groups(of_ranks, world_size, shard)
    else:
        of_ranks, world_size, of_group = one_group(of_ranks, world_size)
    renumbered, by_collectives = shifted(of_ranks)
    long_enough, short = _without_short(renumbered)
    aligned, more = _common(long_enough, steps)
    agreeing, lost = _agreeing(aligned)
    same, joined = join_passes(agreeing)
    check_every_step(same[0])
    job = TracedJob(world_size, same, (*notes, *of_group, *by_collectives, *short, *more, *lost, *joined), shards)
    if job.missing:
        ranks = f"{plural(len(job.missing), 'rank')} {listed(job.missing)}"
        missing = (
            f"no trace of {ranks} of {world_size}: taken to be like the typical rank of "
            f"each step; a straggler among them shows as waiting of the others"
        )
        job = replace(job, notes=(missing, *job.notes))
    return job


def _of_ranks(profiles: Sequence[RankProfile]) -> tuple[list[RankProfile], list[str]]:
    """Return one profile per rank, in ascending order; unnumbered ranks are numbered in the order of their files."""
    known = {each.rank for each in profiles if each.rank is not None}
    free = iter(sorted(set(range(len(profiles) + len(known))) - known))
    numbered = [each if each.rank is not None else replace(each, rank=next(free)) for each in profiles]
    notes = [
        f"{each.path}: does not tell its rank: taken for rank {each.rank}, by the order of the files' names"
        for each, before in zip(numbered, profiles, strict=True)
        if before.rank is None and len(profiles) > 1
    ]
    by_rank: dict[int, list[RankProfile]] = {}
    for each in numbered:
        by_rank.setdefault(each.rank or 0, []).append(each)
    return [_joined(by_rank[rank]) for rank in sorted(by_rank)], notes


def _joined(windows: Sequence[RankProfile]) -> RankProfile:
    """Combine the profiling windows of one rank into one profile."""
    ordered = sorted((each for each in windows if each.steps), key=lambda each: each.steps[0].number)
    for first, second in pairwise(ordered):
        if second.steps[0].number <= first.steps[-1].number:
            raise TraceError(
                f"{first.path} and {second.path}: both are of rank {first.rank} and have step "
                f"{second.steps[0].number}: give one file per rank, or windows of one run that do not overlap"
            )
    steps = tuple(step for each in ordered for step in each.steps)
    notes = tuple(dict.fromkeys(note for each in windows for note in each.notes))
    return replace(windows[0], steps=steps, notes=notes)


def _world_size(profiles: Sequence[RankProfile]) -> int:
    """Return the stated world size, or else the smallest one that explains the traces."""
    stated = [each for each in profiles if each.world_size is not None]
    for each in stated:
        if each.world_size != stated[0].world_size:
            raise _mixed(stated[0], each, "world size", stated[0].world_size, each.world_size)
    last = profiles[-1]
    if stated:
        world_size = stated[0].world_size or 1
    else:
        calls = [call for each in profiles for step in each.steps for call in step.calls]
        least = (max(call.n_ranks or 1, 1 + max(call.ranks or (0,))) for call in calls)
        world_size = max(1 + (last.rank or 0), *least, 1)
    if (last.rank or 0) >= world_size:
        raise TraceError(
            f"{last.path}: is of rank {last.rank}, but the job has {world_size} {plural(world_size, 'rank')} by "
            f"{stated[0].path}: give the traces of one job"
        )
    if world_size > MAX_WORLD_SIZE:
        raise TraceError(f"{profiles[0].path}: {world_size} ranks; at most {MAX_WORLD_SIZE} are supported")
    return world_size


def _check_same_job(profiles: Sequence[RankProfile]) -> None:
    """Refuse profiles that cannot be of one job."""
    first = profiles[0]
    for each in profiles:
        if each.device != first.device:
            raise _mixed(first, each, "device", first.device, each.device)
        stated = ("backend", first.backend, each.backend), ("type of gradients", first.dtype, each.dtype)
        for what, ours, theirs in stated:
            if ours and theirs and ours != theirs:
                raise _mixed(first, each, what, ours, theirs)
        counts, others = ([gradient.count for gradient in one.gradients] for one in (first, each))
        if counts and others and sorted(counts) != sorted(others):
            ours = f"{len(counts)} of {sum(counts)} elements"
            theirs = f"{len(others)} of {sum(others)} elements"
            raise _mixed(first, each, "parameter tensors", ours, theirs)


def _mixed(first: RankProfile, second: RankProfile, what: str, ours: object, theirs: object) -> TraceError:
    return TraceError(
        f"{first.path} and {second.path}: are not of one job: {what} {ours} against {theirs}: give the traces of one "
        f"run"
    )


def _without_short(profiles: Sequence[RankProfile]) -> tuple[list[RankProfile], list[str]]:
    """Omit files that were cut off before half of many steps: they would cost the other files those steps."""
    usual = int(np.median([len(each.steps) for each in profiles]))
    short = [each for each in profiles if each.is_cut and usual >= _MANY and 2 * len(each.steps) < usual]
    notes = [f"warning: left out: {each.path}: is cut off after {len(each.steps)} of {usual} steps" for each in short]
    return [each for each in profiles if each not in short], notes


def _common(profiles: Sequence[RankProfile], wanted: range | None) -> tuple[tuple[RankProfile, ...], list[str]]:
    """Keep the requested steps that all profiles have."""
    counts = Counter(step.number for each in profiles for step in each.steps)
    shared = {number for number, times in counts.items() if times == len(profiles)}
    if not shared:
        spans = [f"{each.path}: {_span(each)}" for each in (profiles[0], profiles[-1])]
        few = min(profiles, key=lambda each: len(each.steps))
        if not few.steps:
            raise TraceError(f"{few.path}: has no whole step: trace more steps of the training loop")
        raise TraceError(f"no step is in all {len(profiles)} traces: {'; '.join(spans)}: give traces of the same steps")
    kept = shared if wanted is None else {number for number in shared if number in wanted}
    if wanted is not None and not kept:
        raise TraceError(f"--steps: no traced step is among them; all ranks have steps {listed(sorted(shared))}")
    notes = []
    if len(shared) < len(counts):
        alone = listed(sorted(counts.keys() - shared))
        notes.append(f"only the {len(shared)} steps that all ranks have are used; left out: {alone}")
    return tuple(_with_steps(each, kept) for each in profiles), notes


def _with_steps(profile: RankProfile, kept: set[int]) -> RankProfile:
    return replace(profile, steps=tuple(step for step in profile.steps if step.number in kept))


def _span(profile: RankProfile) -> str:
    return f"steps {listed([step.number for step in profile.steps])}" if profile.steps else "no steps"


def _agreeing(profiles: tuple[RankProfile, ...]) -> tuple[tuple[RankProfile, ...], list[str]]:
    """Omit steps in which ranks issued different gradient collectives; refuse ranks that mostly differ.

    A file that was cut off is omitted instead: all events of some threads may be missing at its end.
    """
    numbers = [step.number for step in profiles[0].steps]
    differs = np.zeros((len(profiles), len(numbers)), np.bool_)
    for position in range(len(numbers)):
        found = [_signature(each.steps[position]) for each in profiles]
        whole = [signature for signature, each in zip(found, profiles, strict=True) if not each.is_cut]
        usual = Counter(whole or found).most_common(1)[0][0]
        differs[:, position] = [not _agree(signature, usual) for signature in found]
    for index, own in enumerate(differs):
        if own.any() and 2 * own.sum() >= len(numbers):
            if profiles[index].is_cut and len(profiles) > 1:
                rest, notes = _agreeing(profiles[:index] + profiles[index + 1 :])
                what = "is cut off, and collectives are missing in most of its steps"
                return rest, [f"warning: left out: {profiles[index].path}: {what}", *notes]
            at = int(own.argmax())
            other = int(differs[:, at].argmin())
            ours, theirs = (_shown(profiles[i].steps[at]) for i in (other, index))
            raise _mixed(profiles[other], profiles[index], f"gradient collectives of step {numbers[at]}:", ours, theirs)
    lost = [numbers[position] for position in np.flatnonzero(differs.any(axis=0)).tolist()]
    if not lost:
        return profiles, []
    if len(lost) == len(numbers):
        raise TraceError(f"ranks issued different collectives in every step ({listed(numbers)}): trace one run again")
    note = f"left out steps {listed(lost)}: ranks issued different collectives in them"
    return tuple(_with_steps(each, set(numbers) - set(lost)) for each in profiles), [note]


_Signature = tuple[tuple[str, int | None, int | None], ...]


def _signature(step: RankStep) -> _Signature:
    """Return the gradient collectives of a step, sorted by known size, because threads of gloo may swap them."""
    found = tuple((call.kind, call.nbytes, call.n_ranks) for call in step.gradient_calls)
    has_sizes = all(nbytes is not None for _, nbytes, _ in found)
    return tuple(sorted(found, key=lambda call: call[1] or 0)) if has_sizes else found


def _agree(first: _Signature, second: _Signature) -> bool:
    """Return whether two ranks may have issued the same collectives; unknown values match anything."""
    return len(first) == len(second) and all(
        one is None or other is None or one == other
        for call, like in zip(first, second, strict=True)
        for one, other in zip(call, like, strict=True)
    )


def _shown(step: RankStep) -> str:
    calls = _signature(step)
    sizes = ", ".join(str(nbytes) for _, nbytes, _ in calls[:4])
    if len(calls) > 4:
        sizes += ", ..."
    return f"{len(calls)} ({sizes} B)" if calls else "none"


# A number with its unit, if it has one, that is not the number of a step or a rank, or part of a name.
_AMOUNT = re.compile(
    r"(?<![\w/.=-])(?<!steps )(?<!step )(?<!ranks )(?<!rank )(?<!: )(?<!, )"
    r"(\d+(?:,\d{3})*(?:\.\d+)?)( (?:ns|us|ms|s)\b)?(?![\w/])"
)


def grouped(notes: Iterable[tuple[int | None, str]]) -> list[str]:
    """Merge notes of several ranks that differ in amounts only, in the order of first occurrence.

    >>> grouped([(0, "no input"), (1, "no input"), (1, "no marks")])
    ['ranks 0-1: no input', 'rank 1: no marks']
    >>> grouped([(0, "recording takes 2 ms in step 3"), (1, "recording takes 1 ms in step 3")])
    ['ranks 0-1: recording takes 1 to 2 ms in step 3']
    """
    alike: dict[str, list[tuple[int, str]]] = {}
    for rank, note in notes:
        alike.setdefault(_AMOUNT.sub("", note), []).append((rank or 0, note))
    merged = []
    for of in alike.values():
        ranks = sorted({rank for rank, _ in of})
        merged.append(f"{plural(len(ranks), 'rank')} {listed(ranks)}: {_with_ranges([note for _, note in of])}")
    return merged


def _with_ranges(notes: Sequence[str]) -> str:
    """Return a note with the range of each amount."""
    amounts = zip(*(_AMOUNT.finditer(note) for note in notes), strict=True)
    text = notes[0]
    for found in reversed(list(amounts)):
        first, *_ = found
        least, *_, most = sorted(found, key=_size) if found[1:] else (first, first)
        unit = "" if least[2] == most[2] else least[2] or ""
        which = most[0] if least[0] == most[0] else f"{least[1]}{unit} to {most[0]}"
        text = text[: first.start()] + which + text[first.end() :]
    return text


def _size(amount: re.Match[str]) -> float:
    number, unit = amount.groups()
    return parse_seconds(amount[0]) if unit else float(number.replace(",", ""))
