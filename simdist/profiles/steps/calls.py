"""The collectives of one rank: issue, start, end and message of each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simdist.plan.group import MAX_WORLD_SIZE
from simdist.profiles.kineto.columns import EventColumns, Floats, RankEvents
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.kineto.messages import CollectiveKind, Message
from simdist.profiles.kineto.reading import Header
from simdist.profiles.steps.host import Passes, outermost
from simdist.profiles.steps.model import TracedCollective


@dataclass(frozen=True, slots=True)
class Transfers:
    """Collectives in the order in which they were issued.

    Args:
        issued_s: When the host handed them over, `[n]`.
        start_s: When this rank entered them, `[n]`.
        end_s: When they ended on this rank, `[n]`.
        messages: Their messages.
        blocks: The host waits for each of them before it does anything else, as a sharded model does on CPUs.
    """

    issued_s: Floats
    start_s: Floats
    end_s: Floats
    messages: tuple[Message, ...]
    blocks: bool = False


HAND_OVER_S = 1e-3  # from the operator's end to the beginning of the report by a thread of the backend


def backend_transfers(timeline: RankEvents) -> Transfers:
    """Return the collectives that threads of a backend, such as gloo, report.

    A report begins when a thread takes the collective. In some versions it begins when the host hands the collective
    over, even if the thread is still busy with the one before.
    """
    done = timeline.host.of(EventKind.TRANSFER)
    start_s = done.start_s.copy()
    for thread in np.unique(done.thread):
        on_thread = np.flatnonzero(done.thread == thread)
        free_s = np.maximum.accumulate(done.end_s[on_thread])[:-1]
        start_s[on_thread[1:]] = np.maximum(start_s[on_thread[1:]], np.minimum(free_s, done.end_s[on_thread[1:]]))
    messages = [timeline.messages[link] for link in done.link.tolist()]
    issues = _in_turn(timeline, done)
    if issues is None:
        issued_s = _issued_s(timeline, done)
    else:
        issued_s = start_s = issues.start_s  # the host is held up from then on
        told = [timeline.messages[link] for link in issues.link.tolist()]
        messages = [of_issue.filled_from(each) for of_issue, each in zip(told, messages, strict=True)]
    order = np.argsort(issued_s, kind="stable")
    ordered = tuple(messages[i] for i in order)
    return Transfers(issued_s[order], start_s[order], done.end_s[order], ordered, blocks=issues is not None)


def _in_turn(timeline: RankEvents, done: EventColumns) -> EventColumns | None:
    """Return the operator of each report if each is reported before the next one begins; None otherwise.

    A sharded model on CPUs waits for each collective. There, the operator tells what gloo does not: it reports a
    reduce-scatter as an all_reduce, and a gather by the size of a rank's slice.
    """
    issues = timeline.host.of(EventKind.ISSUE)
    is_outer = np.zeros(len(issues), np.bool_)
    for thread in np.unique(issues.thread):
        is_outer[issues.thread == thread] = outermost(issues.on(int(thread)))
    issues = issues.where(is_outer)
    kinds = {timeline.messages[link].kind for link in issues.link.tolist()}
    if kinds.isdisjoint({"all_gather", "reduce_scatter"}) or len(issues) != len(done):
        return None
    is_alone = np.all(issues.start_s <= done.start_s) and np.all(issues.start_s[1:] >= done.end_s[:-1])
    return issues if is_alone else None


def _issued_s(timeline: RankEvents, done: EventColumns) -> Floats:
    """Return when the operator that issued each collective began.

    A backend takes collectives of a kind in the order in which they are issued. Its threads may begin them in another
    order, but keep this order for collectives of one size. If operators are missing, the operator is the one during or
    right after which a report begins. Without such an operator, the result is the beginning of the report.
    """
    issues = timeline.host.of(EventKind.ISSUE)
    issued, reported = ([timeline.messages[i] for i in each.link.tolist()] for each in (issues, done))
    has_sizes = Counter((each.kind, each.nbytes) for each in issued) == Counter(
        (each.kind, each.nbytes) for each in reported
    )
    keys_issued, keys_done = (
        np.array([f"{each.kind} {each.nbytes if has_sizes else ''}" for each in messages])
        for messages in (issued, reported)
    )
    issued_s = done.start_s.copy()
    for key in set(keys_done.tolist()):
        of_kind = keys_issued == key
        wanted = keys_done == key
        starts_s = issues.start_s[of_kind]
        if len(starts_s) == np.count_nonzero(wanted) and np.all(starts_s <= done.start_s[wanted]):
            issued_s[wanted] = starts_s
        elif len(starts_s):
            issued_s[wanted] = _enclosing_s(issues.where(of_kind), done.start_s[wanted])
    return issued_s


def _enclosing_s(issues: EventColumns, starts_s: Floats) -> Floats:
    before = np.searchsorted(issues.start_s, starts_s, side="right") - 1
    is_operator = (before >= 0) & (starts_s <= issues.end_s[before] + HAND_OVER_S)
    return np.where(is_operator, issues.start_s[before], starts_s)


def calls_of(transfers: Transfers, passes: Passes, header: Header) -> tuple[TracedCollective, ...]:
    """Return the collectives as calls, with messages completed from the trace's header."""
    in_backward = passes.containing(transfers.issued_s).tolist()
    columns = (transfers.issued_s.tolist(), transfers.start_s.tolist(), transfers.end_s.tolist())
    calls = []
    for message, issued_s, start_s, end_s, is_in in zip(transfers.messages, *columns, in_backward, strict=True):
        ranks = message.ranks or _ranks_of_group(header, message.n_ranks)
        n_ranks = message.n_ranks or (len(ranks) if ranks else None)
        calls.append(
            TracedCollective(
                kind=message.kind,
                nbytes=message.nbytes,
                ranks=ranks,
                n_ranks=n_ranks,
                issued_s=issued_s,
                start_s=start_s,
                end_s=end_s,
                of_gradients=is_in and _may_be_gradients(message),
                dtype=message.dtype,
                communicator=message.communicator,
            )
        )
    return tuple(_without_activations(calls))


def _without_activations(calls: Sequence[TracedCollective]) -> Iterator[TracedCollective]:
    """Treat all_reduces of backward passes as not of gradients if equally many of their size and group are outside."""
    inside, outside = (
        Counter((call.nbytes, call.ranks) for call in calls if call.kind == "all_reduce" and call.of_gradients is is_in)
        for is_in in (True, False)
    )
    for call in calls:
        key = call.nbytes, call.ranks
        is_both = call.of_gradients and call.kind == "all_reduce" and outside[key] >= inside[key] and call.nbytes
        yield replace(call, of_gradients=False) if is_both else call


def issued_of(trace: RankEvents, borders_s: Floats) -> dict[CollectiveKind, float]:
    """Return the number of collectives of each kind that the host issued per step; empty ones may not reach a device.

    Args:
        trace: The trace of the rank.
        borders_s: When the host began and ended each step, `[n_steps, 2]`.
    """
    issues = trace.host.of(EventKind.ISSUE)
    found: Counter[CollectiveKind] = Counter()
    for thread in np.unique(issues.thread):
        on_thread = issues.on(int(thread))
        outer = on_thread.where(outermost(on_thread))
        step = np.searchsorted(borders_s[:, 0], outer.start_s, side="right") - 1
        inside = (step >= 0) & (outer.start_s < borders_s[step, 1])
        found.update(trace.messages[link].kind for link in outer.link[inside].tolist())
    return {kind: count / len(borders_s) for kind, count in sorted(found.items())}


def _ranks_of_group(header: Header, n_ranks: int | None) -> tuple[int, ...] | None:
    """Return the ranks of the only process group, or of the only one with `n_ranks`; None if several may be."""
    fitting = [each for each in header.groups if n_ranks in (None, len(each or ()))]
    if len(header.groups) == 1:
        fitting = list(header.groups)
    if len(fitting) == 1:
        return fitting[0]
    if header.groups or header.world_size is None or not 0 < header.world_size <= MAX_WORLD_SIZE:
        return None
    return tuple(range(header.world_size)) if n_ranks in (None, header.world_size) else None


def _may_be_gradients(message: Message) -> bool:
    """Omit broadcasts and gathers, and integers: DDP reduces a bitmap of unused parameters, too."""
    is_reduced = message.kind in ("all_reduce", "reduce_scatter", "reduce")
    return is_reduced and not message.dtype.startswith(("int", "uint", "bool"))
