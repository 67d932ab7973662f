"""Validation of a simulation by a measurement: two traces of one plan with the same delays, side by side.

An error is (simulated - measured) / measured: above 0 the simulation is slower than reality. Errors are compared on
four levels, because a total can be right by accident:

    makespan      the answer for a user
    operations    what each kind of operation takes, in all and instance by instance
    injection     whether the delays that were drawn are the delays that happened
    waiting       whether the simulation blames the same ranks for the waiting of others
    links         whether the same links held operations up, where links misbehave

A measured run that ended early is compared over the steps that all ranks finished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs
from simdist.errors import ScenarioError, TraceError, require
from simdist.plan import COLLECTIVES, Channel, Copy, Delay, Enter, KernelLaunch, Save, Wait, lane_of, occurrences
from simdist.plan.delays import Delays
from simdist.plan.group import Group
from simdist.runs import run_directory
from simdist.runs.calibrated import Calibrated, simulate_run
from simdist.runs.run_directory import RunDirectory
from simdist.scenario import Cluster
from simdist.settings.units import format_seconds
from simdist.studies import statistics
from simdist.studies.held import find_held
from simdist.traces.trace import Trace
from simdist.traces.waiting import attribute_waiting, host_waits, injected_s, only_rank, only_steps, operation_kind

if TYPE_CHECKING:
    import pandas as pd


_Seconds: TypeAlias = NDArray[np.float64]
_MOST_OVERHEAD_S = 1.0


@dataclass(frozen=True, slots=True)
class OperationKind:
    """Times of a kind of operation: seconds from start to end, of `wait` the seconds that the host was blocked.

    A collective lasts until its last member is done. In the simulator all members end together, except in rings of a
    `chunkwise` cluster; in a real ring they end one after the other. `Validation.lead_s` shows the difference.

    A kind may have instances of several sizes, and disturbed ones. Its median may then jump between sizes by chance.
    Medians therefore have no error here; sums and instances are compared.

    Args:
        op, stream, group: Name, such as `all_reduce`; stream; group of a collective.
        count: Instances in both traces, over all ranks.
        simulated_s, measured_s: Median.
        simulated_total_s, measured_total_s: Sum.
        error (float or null): Error of the sums; outliers count. `null` where 0 was measured.
        signed_instance_error (float or null): Median error of an instance, without those measured as 0.
        instance_error (float or null): The same of absolute errors.
    """

    op: str
    stream: str
    group: str
    count: int
    simulated_s: float
    measured_s: float
    simulated_total_s: float
    measured_total_s: float
    error: float
    signed_instance_error: float
    instance_error: float

    @property
    def simulated_mean_s(self) -> float:
        """Mean of the simulated."""
        return self.simulated_total_s / self.count

    @property
    def measured_mean_s(self) -> float:
        """Mean of the measured."""
        return self.measured_total_s / self.count


@dataclass(frozen=True, slots=True)
class Injection:
    """Measured lengths of injected delays, compared with the drawn ones.

    Args:
        channel (str): `host`, `compute`, `io`, `backward` or `overlap`.
        count: Delays above 0.
        drawn_s, measured_s: Sum of the delays.
        difference_s: Largest difference, measured - drawn.
        step, rank: Where that is.
    """

    channel: Channel
    count: int
    drawn_s: float
    measured_s: float
    difference_s: float
    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class Blame:
    """Seconds that others waited for a rank in collectives (see `simdist.traces.waiting`).

    Args:
        rank: Rank.
        simulated_s, measured_s: Time for which others waited for it in collectives; of one real rank among simulated
            peers, in the collectives of that rank.
    """

    rank: int
    simulated_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class _HeldUp:
    """Seconds for which a link delayed operations, over all ranks (see `simdist.studies.held`).

    Args:
        link: Link, such as `nic_out[3]`.
        simulated_s, measured_s: Time over all operations and ranks.
    """

    link: str
    simulated_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Validation:
    """A simulation against a measurement of the same plan.

    Args:
        schedule: Name of the plan.
        source: Program that measured.
        n_steps: Steps compared: those that every rank finished.
        simulated_s: Makespan.
        measured_s: Makespan.
        kinds: Times of operations, most measured seconds first.
        injections: Of every channel that the plan delays.
        blames: Of every rank.
        correlation: Of simulated and measured blame over the ranks (Pearson's); NaN if either is the same for all.
        overlap: Share of the measured waiting that the simulation charges to the same rank in the same step.
        links: Of the links that misbehaved, most measured seconds first.
        lead_s: By how much members of collectives end before the last one, simulated and measured, seconds in the mean.
    """

    schedule: str
    source: str
    n_steps: int
    simulated_s: float
    measured_s: float
    kinds: tuple[OperationKind, ...]
    injections: tuple[Injection, ...]
    blames: tuple[Blame, ...]
    correlation: float
    overlap: float
    links: tuple[_HeldUp, ...] = ()
    lead_s: tuple[float, float] = (0.0, 0.0)

    @property
    def error(self) -> float:
        """Error of the makespan."""
        return statistics.relative_error(self.simulated_s, self.measured_s)

    @property
    def verdict(self) -> str:
        """The rank that is blamed most for the waiting of others, in a sentence."""
        return _verdict(self.blames)

    def frame(self) -> "pd.DataFrame":
        """Return one row per kind of operation, with the attributes of `OperationKind` as columns."""
        require("pandas", extra="tables", what="a frame of results")
        import pandas as pd

        return pd.DataFrame([asdict(kind) for kind in self.kinds], columns=list(OperationKind.__dataclass_fields__))


def validate(real: Trace, simulated: Trace, delays: Delays, costs: Costs | None = None) -> Validation:
    """Compare a simulation with a measurement of the same plan.

    Args:
        real: The measured trace; NaN where the run did not get to.
        simulated: The predicted trace.
        delays: Delays injected into both, those of one seed, see `simdist.plan.delays`.
        costs: Prices of the plan, without which nothing is booked on links.

    Raises:
        TraceError: They are traces of different plans, or not one step was finished.
    """
    simulated.difference_s(real)  # refuses traces of different plans
    n_steps = finished_steps(real)
    if n_steps == 0:
        raise TraceError(f"trace of {real.plan.name} ({real.source}): no step was finished by all ranks: run it again")
    real, simulated = (only_steps(trace, range(n_steps)) for trace in (real, simulated))
    if real.real_rank is not None or real.absent:
        simulated = _where_real(simulated, real)
    held = [find_held(trace, costs) if costs and trace.links else None for trace in (simulated, real)]
    both = zip((simulated, real), held, strict=True)
    blamed, measured = (attribute_waiting(trace, by_links).caused_s for trace, by_links in both)
    if real.real_rank is not None:
        real, simulated = (only_rank(trace, real.real_rank) for trace in (real, simulated))
    return Validation(
        schedule=simulated.plan.name,
        source=real.source,
        n_steps=n_steps,
        simulated_s=simulated.makespan_s,
        measured_s=real.makespan_s,
        kinds=_kinds(real, simulated),
        injections=_injections(real, delays),
        blames=_blames(blamed.sum(axis=0), measured.sum(axis=0)),
        correlation=statistics.correlation(blamed.sum(axis=0), measured.sum(axis=0)),
        overlap=statistics.ratio(float(np.minimum(blamed, measured).sum()), float(measured.sum())),
        links=_links(*(each.rank_seconds() if each else {} for each in held)),
        lead_s=(_lead_s(simulated), _lead_s(real)),
    )


def corrected(run: RunDirectory, machines: Calibrated | None, real: Trace) -> tuple[Cluster, str]:
    """Return the cluster with an overhead that reproduces a measured run, and a description of the change.

    The overhead is `host.handover` if the cluster's cores are charged, else `collectives.overhead`.
    The run is no test of that cluster any more; other schedules, models and shapes are.

    Raises:
        ScenarioError: Not even without any overhead is the simulation as fast, or it takes more than a second.
    """
    from scipy.optimize import brentq

    cluster = machines.cluster if machines else run.scenario.cluster
    host = cluster.host
    file = machines.file if machines else run.path / run_directory.SCENARIO
    name = "host.handover" if host.is_charged else "collectives.overhead"
    before_s = host.handover_s if host.is_charged else cluster.collectives.overhead_s

    def having(overhead_s: float) -> Cluster:
        if host.is_charged:
            return cluster.model_copy(update={"host": {"handover_s": overhead_s}})
        return cluster.model_copy(update={"collectives": {"overhead_s": overhead_s}})

    def longer_s(overhead_s: float) -> float:
        return simulate_run(run, Calibrated(file, having(overhead_s)), real=real).makespan_s - real.makespan_s

    if longer_s(0.0) > 0 or longer_s(_MOST_OVERHEAD_S) < 0:
        raise ScenarioError(
            f"{file}: no {name} from 0 s to {format_seconds(_MOST_OVERHEAD_S)} makes {run.plan.name} of {run.path} "
            f"take the measured {format_seconds(real.makespan_s)}: measure the links again"
        )
    after_s = float(brentq(longer_s, 0.0, _MOST_OVERHEAD_S, xtol=1e-9))
    done = (
        f"{name} is {format_seconds(after_s)}, not {format_seconds(before_s)}, so that {run.plan.name} of {run.path} "
        f"takes the measured {format_seconds(real.makespan_s)}"
    )
    return having(after_s).model_copy(update={"source": "; ".join(filter(None, (cluster.source, done)))}), done


def finished_steps(trace: Trace) -> int:
    """Return how many steps, from the first, every real rank finished that was there; loads and saves do not count."""
    finished = np.ones((trace.plan.n_steps, trace.plan.world_size), dtype=np.bool_)
    ranks = slice(None) if trace.real_rank is None else [trace.real_rank]
    for each in occurrences(trace.plan):
        if lane_of(each.op).kind not in ("io", "save"):
            finished[each.steps] &= np.isfinite(trace.end_s[each.rows])
    for rank, stretches in trace.absent.items():
        for first, last in stretches:
            finished[first:last, rank] = True
    return int(np.logical_and.accumulate(finished[:, ranks].all(axis=1)).sum())


def _where_real(simulated: Trace, real: Trace) -> Trace:
    """Return what a simulation says of the times that one real rank and its peers have."""
    known = np.isfinite(real.end_s)
    ready_s, start_s, end_s = (
        np.where(known, array, np.nan) for array in (simulated.ready_s, simulated.start_s, simulated.end_s)
    )
    return replace(simulated, ready_s=ready_s, start_s=start_s, end_s=end_s)


def _kinds(real: Trace, simulated: Trace) -> tuple[OperationKind, ...]:
    """Compare every kind of operation except delays, which are compared with the drawn ones."""
    rows: dict[tuple[str, str, str], dict[Group | None, list[NDArray[np.int64]]]] = {}
    absent: dict[tuple[str, str, str], list[int]] = {}  # ranks that write no checkpoint
    for each in occurrences(real.plan):
        if not isinstance(each.op, Delay | Wait):
            group = each.op.group if isinstance(each.op, COLLECTIVES) else None
            rows.setdefault(operation_kind(each.op), {}).setdefault(group, []).append(each.rows)
        if isinstance(each.op, Copy | Save):
            others = [rank for rank in range(real.plan.world_size) if not each.op.by.is_first(rank)]
            absent[operation_kind(each.op)] = others
    both = (_until_launched(simulated), _until_launched(real))
    spans = {
        key: [
            np.concatenate([_lengths(trace, np.concatenate(parts), group) for group, parts in of_groups.items()])
            for trace in both
        ]
        for key, of_groups in rows.items()
    }
    for key, ranks in absent.items():
        for lengths_s in spans[key]:
            lengths_s[:, ranks] = np.nan
    spans["wait", "host", ""] = [blocked.end_s - blocked.begin_s for blocked in map(host_waits, both)]
    kinds = [_kind(*key, *pair) for key, pair in spans.items()]
    return tuple(sorted((kind for kind in kinds if kind.count), key=lambda kind: -kind.measured_total_s))


def _until_launched(trace: Trace) -> Trace:
    """Return a trace whose operations last until the host has launched their last kernel, as events of a GPU tell."""
    launches = [each.rows for each in occurrences(trace.plan) if isinstance(each.op, KernelLaunch)]
    if not launches:
        return trace
    rows = np.concatenate(launches)
    end_s = trace.end_s.copy()
    end_s[rows - 1] = np.maximum(end_s[rows - 1], end_s[rows])
    return replace(trace, end_s=end_s)


def _lengths(trace: Trace, rows: NDArray[np.int64], group: Group | None) -> _Seconds:
    """Return how long operations took on each rank; of a collective, until its last member was done."""
    if group is None:
        return _spans(trace, rows)
    ends_s = group.split(trace.end_s[rows], axis=1)
    last_s = np.broadcast_to(np.fmax.reduce(ends_s, axis=2, keepdims=True), ends_s.shape)
    return np.asarray(group.joined(last_s, axis=1) - trace.start_s[rows])


def _lead_s(trace: Trace) -> float:
    """Return how much earlier than the last one members of collectives end, in the mean."""
    leads_s = [
        _lengths(trace, each.rows, each.op.group) - _spans(trace, each.rows)
        for each in occurrences(trace.plan)
        if isinstance(each.op, COLLECTIVES)
    ]
    return float(np.nanmean(np.concatenate(leads_s))) if leads_s else 0.0


def _spans(trace: Trace, rows: NDArray[np.int64]) -> _Seconds:
    return np.asarray(trace.end_s[rows] - trace.start_s[rows])


def _kind(op: str, stream: str, group: str, simulated_s: _Seconds, measured_s: _Seconds) -> OperationKind:
    ran = np.isfinite(simulated_s) & np.isfinite(measured_s)
    simulated_s = simulated_s[ran]
    measured_s = measured_s[ran]
    some = measured_s > 0
    errors = (simulated_s[some] - measured_s[some]) / measured_s[some]
    totals_s = float(simulated_s.sum()), float(measured_s.sum())
    return OperationKind(
        op,
        stream,
        group,
        len(measured_s),
        statistics.median(simulated_s),
        statistics.median(measured_s),
        *totals_s,
        error=statistics.relative_error(*totals_s),
        signed_instance_error=statistics.median(errors),
        instance_error=statistics.median(np.abs(errors)),
    )


def _injections(real: Trace, delays: Delays) -> tuple[Injection, ...]:
    """Compare measured and drawn delays by channel and step."""
    drawn_s = injected_s(real.plan, delays)
    measured_s = {channel: np.full_like(seconds, np.nan) for channel, seconds in drawn_s.items()}
    out = _sat_out(real)
    for each in occurrences(real.plan):
        if isinstance(each.op, Delay):
            so_far_s = np.nan_to_num(measured_s[each.op.channel][each.steps])
            spans_s = np.where(out[each.steps], np.nan, _spans(real, each.rows))
            measured_s[each.op.channel][each.steps] = so_far_s + spans_s
    return tuple(_injection(channel, drawn_s[channel], measured_s[channel]) for channel in drawn_s)


def _sat_out(trace: Trace) -> NDArray[np.bool_]:
    """Tell which ranks sat out which steps, `[n_steps, world_size]`."""
    found = np.zeros((trace.plan.n_steps, trace.plan.world_size), dtype=np.bool_)
    for each in occurrences(trace.plan):
        if isinstance(each.op, Enter):
            found[each.steps[:, None], list(each.op.absent)] = True
            for step, row in zip(each.steps, each.rows.tolist(), strict=True):
                found[step, list(trace.late.get(row, ()))] = True
    return found


def _injection(channel: Channel, drawn_s: _Seconds, measured_s: _Seconds) -> Injection:
    difference_s = np.where(np.isfinite(measured_s), measured_s - drawn_s, 0.0)
    drawn_s = np.where(np.isfinite(measured_s), drawn_s, 0.0)
    step, rank = (int(place) for place in np.unravel_index(np.abs(difference_s).argmax(), difference_s.shape))
    return Injection(
        channel,
        count=int((drawn_s > 0).sum()),
        drawn_s=float(drawn_s.sum()),
        measured_s=float(np.nansum(measured_s)),
        difference_s=float(difference_s[step, rank]),
        step=step,
        rank=rank,
    )


def _links(simulated_s: Mapping[str, float], measured_s: Mapping[str, float]) -> tuple[_HeldUp, ...]:
    names = dict.fromkeys((*simulated_s, *measured_s))
    found = [_HeldUp(name, simulated_s.get(name, 0.0), measured_s.get(name, 0.0)) for name in names]
    some = [each for each in found if each.simulated_s or each.measured_s]
    return tuple(sorted(some, key=lambda each: (-each.measured_s, -each.simulated_s)))


def _blames(simulated_s: _Seconds, measured_s: _Seconds) -> tuple[Blame, ...]:
    return tuple(
        Blame(rank, float(a), float(b)) for rank, (a, b) in enumerate(zip(simulated_s, measured_s, strict=True))
    )


def _verdict(blames: Sequence[Blame]) -> str:
    simulated = max(blames, key=lambda each: each.simulated_s)
    measured = max(blames, key=lambda each: each.measured_s)
    if not simulated.simulated_s and not measured.measured_s:
        return "no rank waits for another in either"
    if 0 < simulated.simulated_s * (1 - 1e-9) <= measured.simulated_s:
        return f"rank {measured.rank} is blamed most in both ({_seconds(measured)})"
    return (
        f"simulated, rank {simulated.rank} is blamed most ({_seconds(simulated)}); "
        f"measured, rank {measured.rank} ({_seconds(measured)})"
    )


def _seconds(blame: Blame) -> str:
    return f"simulated {format_seconds(blame.simulated_s)}, measured {format_seconds(blame.measured_s)}"
