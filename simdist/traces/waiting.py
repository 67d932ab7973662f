"""Tables of a trace: ends of steps, waiting between ranks, times by kind of operation.

All functions read a trace, simulated or measured, and its plan. Operations that did not run (NaN) do not count.
`simdist.traces.breakdown` computes the time of a rank by state. `rank_table` shows it next to the waiting.

**Blame.** In each group of a collective, each member waits `start - ready` seconds. The sum is charged to the member
that was ready last. If several members are last at the same time, they share it equally. So caused and suffered waiting
have the same sum. Blame is direct: a rank that an earlier collective delayed is charged for its own lateness, and
charges others in that earlier collective. Most ties mean that a whole node is late because of one of its ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.display import Pictured
from simdist.errors import require
from simdist.plan import COLLECTIVES, Channel, Delay, Enter, Op, Plan, Wait, lane_of, occurrences
from simdist.plan.delays import Delays, seconds_of
from simdist.plan.group import Group
from simdist.plan.text import op_name
from simdist.plan.walk import stretches
from simdist.traces.breakdown import break_down
from simdist.traces.links import Held
from simdist.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


_Seconds: TypeAlias = NDArray[np.float64]


def step_end_s(trace: Trace) -> _Seconds:
    """Return when each rank was done with each step and all before it.

    Loads and saves do not count, because they belong to later steps or to no step.

    Returns:
        float64 `[n_steps, world_size]`, seconds from the start, non-decreasing along the steps.
    """
    ends_s = np.zeros((trace.plan.n_steps, trace.plan.world_size))
    for each in occurrences(trace.plan):
        if lane_of(each.op).kind not in ("io", "save"):
            ends_s[each.steps] = np.fmax(ends_s[each.steps], trace.end_s[each.rows])
    return np.asarray(np.maximum.accumulate(ends_s, axis=0))


def step_s(trace: Trace) -> _Seconds:
    """Return the length of each step, from the moment when the last rank ended the step before, float64 `[n_steps]`."""
    return np.diff(step_end_s(trace).max(axis=1), prepend=0.0)


def only_steps(trace: Trace, steps: range) -> Trace:
    """Return a trace of the same plan in which only the consecutive `steps` ran."""
    first = trace.plan.first_instances()
    rows = np.arange(trace.plan.n_instances)
    did_run = ((rows >= first[steps.start]) & (rows < first[steps.stop]))[:, None]
    ready_s, start_s, end_s = (
        np.where(did_run, array, np.nan) for array in (trace.ready_s, trace.start_s, trace.end_s)
    )
    return replace(trace, ready_s=ready_s, start_s=start_s, end_s=end_s)


def only_rank(trace: Trace, rank: int) -> Trace:
    """Return a trace of the same plan in which only one rank ran."""
    others = np.arange(trace.plan.world_size) != rank
    ready_s, start_s, end_s = (np.where(others, np.nan, array) for array in (trace.ready_s, trace.start_s, trace.end_s))
    return replace(trace, ready_s=ready_s, start_s=start_s, end_s=end_s)


def first_steps(trace: Trace, n_steps: int) -> Trace:
    """Return the trace of a shorter plan that ends after `n_steps`."""
    plan = trace.plan
    steps = [plan.bodies[body] for body in islice(plan.body_of_steps(), n_steps)]
    shorter = Plan.from_steps(
        plan.name, world_size=plan.world_size, buffers=plan.buffers, steps=steps, dataset=plan.dataset
    )
    stop = shorter.n_instances
    times_s = (trace.ready_s[:stop], trace.start_s[:stop], trace.end_s[:stop])
    late = {row: ranks for row, ranks in trace.late.items() if row < stop}
    return Trace(shorter, *times_s, trace.source, links=trace.links, late=late, real_rank=trace.real_rank)


def injected_s(plan: Plan, delays: Delays) -> dict[Channel, _Seconds]:
    """Return the drawn delays that a plan performs, by channel, `[n_steps, world_size]`; 0 if it performs none.

    Args:
        plan: The plan.
        delays: Those of one seed, see `simdist.plan.delays`.
    """
    found: dict[Channel, _Seconds] = {}
    for each in occurrences(plan):
        if isinstance(each.op, Delay):
            drawn_s = seconds_of(each.op, delays)[0]
            found.setdefault(each.op.channel, np.zeros_like(drawn_s))[each.steps] += drawn_s[each.steps]
    return found


@dataclass(frozen=True)
class Waiting(Pictured):
    """Waiting in collectives, by the rank that waited and the rank that caused it.

    Args:
        caused_s: Seconds that others waited for this rank, float64 `[n_steps, world_size]`.
        suffered_s: Seconds that this rank waited for others, float64 `[n_steps, world_size]`.
        by_link_s: Link -> seconds that ranks waited for others that it held up; not part of `caused_s`.
    """

    caused_s: _Seconds
    suffered_s: _Seconds
    by_link_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Seconds of waiting of all ranks in all steps, equal to the sum caused by ranks and links."""
        return float(self.suffered_s.sum())

    @property
    def caused_by_rank_s(self) -> _Seconds:
        """Seconds that others waited for each rank in the whole run, `[world_size]`."""
        return np.asarray(self.caused_s.sum(axis=0))

    @property
    def suffered_by_rank_s(self) -> _Seconds:
        """Seconds that each rank waited for others in the whole run, `[world_size]`."""
        return np.asarray(self.suffered_s.sum(axis=0))

    def frame(self) -> "pd.DataFrame":
        """Return one row per step and rank: step, rank, caused_s, suffered_s.

        Columns:
            step, rank (int64): Step and rank.
            caused_s, suffered_s (float64): Others waited for it; it waited for others.
        """
        require("pandas", extra="tables", what="a frame of results")
        import pandas as pd

        n_steps, world_size = self.caused_s.shape
        return pd.DataFrame(
            {
                "step": np.repeat(np.arange(n_steps), world_size),
                "rank": np.tile(np.arange(world_size), n_steps),
                "caused_s": self.caused_s.ravel(),
                "suffered_s": self.suffered_s.ravel(),
            }
        )


def attribute_waiting(trace: Trace, held: Held | None = None) -> Waiting:
    """Attribute all waiting in collectives to the last ranks, or to the links that delayed them.

    The dependencies of the last rank are followed back to the last operation in which the rank itself waited. Delays by
    links since then are charged to the last such link, up to the waiting time.
    """
    shape = (trace.plan.n_steps, trace.plan.world_size)
    caused_s = np.zeros(shape)
    suffered_s = np.zeros(shape)
    by_link_s: dict[str, float] = {}
    behind = _held_before(trace, held) if held and held.seconds.any() else None
    for each in occurrences(trace.plan):
        if isinstance(each.op, COLLECTIVES):
            wait_s = trace.start_s[each.rows] - trace.ready_s[each.rows]
            wait_s = np.where(np.isfinite(wait_s), wait_s, 0.0)
            suffered_s[each.steps] += wait_s
            charged_s = _caused_s(wait_s, trace.ready_s[each.rows], each.op.group)
            if held and behind is not None:
                late_s = behind[0][each.rows]
                links = behind[1][each.rows]
                of_links_s = charged_s * _share_within(wait_s, np.where(charged_s > 0, late_s, 0.0), each.op.group)
                for number, name in enumerate(held.names):
                    if (seconds := float(of_links_s[links == number].sum())) > 0:
                        by_link_s[name] = by_link_s.get(name, 0.0) + seconds
                charged_s = charged_s - np.where(links >= 0, of_links_s, 0.0)
            caused_s[each.steps] += charged_s
    return Waiting(caused_s, suffered_s, by_link_s)


def _share_within(wait_s: _Seconds, late_s: _Seconds, group: Group) -> _Seconds:
    """Return the waiting of each group, limited to the delay of its last rank, `[n, world_size]`."""
    each_s = group.split(wait_s, axis=1)
    latest_s = group.split(late_s, axis=1).max(axis=2, keepdims=True)
    within_s = np.minimum(each_s, latest_s).sum(axis=2, keepdims=True)
    total_s = each_s.sum(axis=2, keepdims=True)
    share = np.divide(within_s, total_s, out=np.zeros_like(total_s), where=total_s > 0)
    return group.joined(np.broadcast_to(share, each_s.shape), axis=1)


def _held_before(trace: Trace, held: Held) -> tuple[_Seconds, NDArray[np.int64]]:
    """Return how late links made each instance ready, and the last such link or -1, both shaped like `held.seconds`.

    An instance inherits the lateness of its predecessor, plus the time that links held the predecessor up.
    """
    late_s = np.zeros_like(held.seconds)
    link = np.full_like(held.link, -1)
    ranks = np.arange(trace.plan.world_size)
    index = 0
    for stretch in stretches(trace.plan):
        for template in stretch.templates * stretch.times:
            before = [index - back for back in (template.previous, *template.after) if back is not None]
            if before:
                last = np.array(before)[np.argmax(trace.end_s[before], axis=0)]
                has_waited = trace.start_s[last, ranks] > trace.ready_s[last, ranks]
                late_s[index] = np.where(has_waited, 0.0, late_s[last, ranks]) + held.seconds[last, ranks]
                own = held.link[last, ranks]
                link[index] = np.where(own >= 0, own, np.where(has_waited, -1, link[last, ranks]))
            index += 1
    return late_s, link


def _caused_s(wait_s: _Seconds, ready_s: _Seconds, group: Group) -> _Seconds:
    """Charge the waiting in each group to the members that were ready last; all arrays are `[n, world_size]`."""
    each_s = group.split(ready_s, axis=1)
    last = each_s == np.fmax.reduce(each_s, axis=2, keepdims=True)
    waited_s = group.split(wait_s, axis=1).sum(axis=2, keepdims=True)
    return group.joined(last * (waited_s / np.maximum(last.sum(axis=2, keepdims=True), 1)), axis=1)


@dataclass(frozen=True)
class HostWaits:
    """When hosts were blocked in a `Wait`, or before they could `Enter` a step.

    In a trace, a `Wait` is the moment when it is over. Enqueueing takes no time, so the host has been blocked since the
    end of the previous host operation. On a real machine, this includes the enqueueing.

    Args:
        rows: Rows of the waits in the trace, int64 `[n]`, increasing.
        begin_s: When the host arrived there, float64 `[n, world_size]`.
        end_s: When it continued, float64 `[n, world_size]`.
    """

    rows: NDArray[np.int64]
    begin_s: _Seconds
    end_s: _Seconds


def host_waits(trace: Trace) -> HostWaits:
    """Return when hosts were blocked."""
    on_host = [each for each in occurrences(trace.plan) if lane_of(each.op).kind == "host"]
    if not on_host:
        nothing = np.zeros((0, trace.plan.world_size))
        return HostWaits(np.zeros(0, dtype=np.int64), nothing, nothing)
    rows = np.concatenate([each.rows for each in on_host])
    is_wait = np.concatenate([np.full(len(each.rows), isinstance(each.op, Enter | Wait)) for each in on_host])
    order = np.argsort(rows)
    rows = rows[order]
    is_wait = is_wait[order]
    end_s = trace.end_s[rows]
    begin_s = np.fmin(np.concatenate([np.zeros_like(end_s[:1]), end_s[:-1]]), end_s)
    return HostWaits(rows[is_wait], begin_s[is_wait], end_s[is_wait])


def operation_kind(op: Op) -> tuple[str, str, str]:
    """Return name, stream and group of an operation, as a key to count by; only collectives have a group."""
    return op_name(op), lane_of(op).stream, str(op.group) if isinstance(op, COLLECTIVES) else ""


def rank_table(trace: Trace) -> "pd.DataFrame":
    """Return one row per rank: its time by state, and the waiting it caused and suffered, in seconds of the whole run.

    Columns:
        compute_s, comm_s, wait_s, io_s, host_s (float64): States. `wait_s` includes that at the end.
        hidden_comm_s (float64): Communication behind computing.
        caused_s, suffered_s (float64): Others waited for it; it waited for others, behind computing too.
    """
    require("pandas", extra="tables", what="a frame of results")
    import pandas as pd

    states = break_down(trace)
    waits = attribute_waiting(trace)
    exposed_s = states.comm_s[:, 0]
    return pd.DataFrame(
        {
            "compute_s": states.compute_s[:, 0],
            "comm_s": exposed_s,
            "wait_s": states.wait_s[:, 0],
            "io_s": states.io_s[:, 0],
            "host_s": states.host_s[:, 0],
            "hidden_comm_s": np.maximum(_transfer_s(trace) - exposed_s, 0.0),
            "caused_s": waits.caused_by_rank_s,
            "suffered_s": waits.suffered_by_rank_s,
        },
        index=pd.RangeIndex(trace.plan.world_size, name="rank"),
    )


def _transfer_s(trace: Trace) -> _Seconds:
    """Return the seconds in which each rank's collectives moved bytes, `[world_size]`."""
    transfer_s = np.zeros(trace.plan.world_size)
    for each in occurrences(trace.plan):
        if isinstance(each.op, COLLECTIVES):
            transfer_s += np.nansum(trace.end_s[each.rows] - trace.start_s[each.rows], axis=0)
    return transfer_s
