"""A data-parallel job of which everything is known: who computed when, who waited for whom, and for how long.

A few lines that simulate it on their own, so that what is read from its traces can be checked against numbers that
neither the reader nor the engines of simdist had a part in.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from simdist.profiles.steps.model import MicroBatchTimes, RankStep, TracedCollective
from simdist.profiles.steps.step_parts import StepPart

Device: TypeAlias = Literal["cpu", "cuda"]
Doing: TypeAlias = Literal[
    "load", "copy", "broadcast", "forward", "backward", "accumulate", "all_reduce", "optimize", "item"
]

LAUNCH_S = 5e-6
ITEM_S = 2e-6


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together: their sizes in elements, and the seconds of their backward and all-reduce."""

    counts: tuple[int, ...]
    backward_s: float
    transfer_s: float

    @property
    def nbytes(self) -> int:
        return 4 * sum(self.counts)


@dataclass(frozen=True, slots=True)
class Delay:
    """One rank loses time in one step (from 0): in its data loader, on its host before backward, or computing.

    `bucket`: on its host, within the backward pass, before this bucket is computed. `micro_batch`: the pass that is
    late (from 0); without it, computing is slower in all passes, and the host is late in the last.
    """

    channel: Literal["io", "host", "compute"]
    rank: int
    step: int
    seconds: float
    bucket: int = 0
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The job, as it is without a profiler.

    `jitter` lengthens every component of every rank and step by a random share of up to itself. `run_ahead`: a GPU's
    host never waits for it, and is up to two steps ahead; otherwise it reads the loss after each step. `skew_s`: what
    is added to a rank's clock; ranks of a node have that of its first. `missing`: ranks that leave no trace.
    `micro_batches`: passes of a step, each of `forward_s` and `buckets`; the host is late in the last. `beside`: by
    which share buckets behind the first take longer to compute, beside all_reduces of others, in each step.
    """

    n_ranks: int = 4
    n_steps: int = 6
    input_s: float = 0.001
    copy_s: float = 0.0002
    forward_s: float = 0.010
    host_s: float = 0.0
    optimize_s: float = 0.002
    buckets: tuple[Bucket, ...] = (
        Bucket((10, 7_000, 700, 490_000), 0.008, 0.006),
        Bucket((700, 490_000, 700, 490_000), 0.012, 0.009),
    )
    delays: tuple[Delay, ...] = ()
    jitter: float = 0.0
    seed: int = 0
    skew_s: tuple[float, ...] = ()
    missing: tuple[int, ...] = ()
    first_step: int = 3
    run_ahead: bool = False
    buffer_count: int = 0
    buffer_s: float = 0.0005
    gpus_per_node: int = 8
    batch_size: int = 8
    micro_batches: int = 1
    marks: bool = True
    shapes: bool = True
    noise: bool = False
    beside: tuple[float, ...] = ()

    def skew_of(self, rank: int) -> float:
        return self.skew_s[rank - rank % self.gpus_per_node] if self.skew_s else 0.0

    def delay_s(self, channel: str, rank: int, step: int, bucket: int = 0, micro_batch: int | None = None) -> float:
        """Return what a rank loses in a step; the sum if several delays meet."""
        wanted = (channel, rank, step, bucket, micro_batch)
        return sum(d.seconds for d in self.delays if (d.channel, d.rank, d.step, d.bucket, d.micro_batch) == wanted)


@dataclass(frozen=True, slots=True)
class Work:
    """Something done: when the host dealt with it, and when the device did; on the rank's own clock."""

    doing: Doing
    host: tuple[float, float]
    device: tuple[float, float]
    bucket: int = -1
    tensor: int = -1


@dataclass(frozen=True, slots=True)
class Lived:
    """A step of a rank: what should be read from the trace, and what the trace is written from."""

    step: RankStep
    host: tuple[float, float]
    work: tuple[Work, ...]


@dataclass(slots=True)
class _Rank:
    """Where a rank is while its job is simulated: in true seconds since the job began."""

    truth: Truth
    device: Device
    rank: int
    rng: random.Random
    host_s: float = 0.0
    device_s: float = 0.0
    step_ends_s: list[float] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)  # by place: forward, each bucket, update

    def busy(self, doing: Doing, seconds: float, bucket: int = -1, tensor: int = -1) -> float:
        """Do something; return how long the device had idled before."""
        launch_s = LAUNCH_S if self.device == "cuda" else 0.0
        host0_s, was_s = self.host_s, self.device_s
        start_s = max(self.device_s, host0_s + launch_s)
        self.device_s = start_s + seconds
        self.host_s = self.device_s if self.device == "cpu" else host0_s + launch_s
        self.note(doing, (host0_s, self.host_s), (start_s, self.device_s), bucket, tensor)
        return start_s - was_s

    def note(self, doing: Doing, host: tuple[float, float], device: tuple[float, float], bucket: int, tensor: int = -1):
        skew_s = self.truth.skew_of(self.rank)
        own = [(a + skew_s, b + skew_s) for a, b in (host, device)]
        self.work.append(Work(doing, own[0], own[1], bucket, tensor))

    def longer(self, seconds: float) -> float:
        return seconds * (1 + self.truth.jitter * self.rng.random())


def simulate(truth: Truth, device: Device = "cuda") -> tuple[tuple[Lived, ...], ...]:
    """Return what every rank lived through, `[rank][step]`, missing ranks included."""
    ranks = [_Rank(truth, device, rank, random.Random(f"{truth.seed}/{rank}")) for rank in range(truth.n_ranks)]
    lived: list[list[Lived]] = [[] for _ in ranks]
    for step in range(truth.n_steps):
        for one, of_rank in zip(_step(truth, device, ranks, step), lived, strict=True):
            of_rank.append(one)
    return tuple(tuple(of_rank) for of_rank in lived)


def _step(truth: Truth, device: Device, ranks: list[_Rank], step: int) -> list[Lived]:
    begins = [(rank.host_s, rank.device_s) for rank in ranks]
    inputs_s = [_load(truth, device, rank, step) for rank in ranks]
    broadcasts = _broadcast(truth, device, ranks)
    phases = [_compute(truth, device, rank, step) for rank in ranks]
    ends_s, starts_s = _all_reduces(truth, device, [issued for _, issued in phases], begins)
    lived = []
    for rank, begin, input_s, sent, (parts, issued) in zip(ranks, begins, inputs_s, broadcasts, phases, strict=True):
        skew_s = truth.skew_of(rank.rank)
        calls = [sent[0]] if sent else []
        for b, bucket in enumerate(truth.buckets):
            handed_s, start_s, end_s = issued[b][0], starts_s[rank.rank][b], ends_s[b]
            issue = (handed_s - LAUNCH_S, handed_s)
            rank.note("all_reduce", issue, (start_s, end_s), b)
            all_ranks = tuple(range(truth.n_ranks))
            times_s = (issue[0] + skew_s, start_s + skew_s, end_s + skew_s)
            calls.append(TracedCollective("all_reduce", bucket.nbytes, all_ranks, truth.n_ranks, *times_s, True))
        parts |= _after_reducing(truth, device, rank, ends_s)
        last_s = max(ends_s, default=0.0) + skew_s
        waits_s = last_s - parts["wait_s"]
        calls = [replace(each, exposed_s=max(0.0, each.end_s - max(each.start_s, waits_s))) for each in calls]
        done_s = max(rank.host_s, rank.device_s)
        parts["forward_s"] += parts.pop("read_s") + done_s - rank.device_s
        parts["wait_s"] += sent[1] if sent else 0.0
        input_s -= max(begin) - begin[1]  # the device was done before the mark
        parts["input_s"] = input_s
        parts["of_passes"] = _with_rest(parts)
        times = {"start_s": max(begin) + skew_s, "end_s": done_s + skew_s}
        number = truth.first_step + step
        parts_s = [0.0] * len(StepPart)  # roughly: a step of a known job computes, or waits for an all_reduce
        parts_s[StepPart.ALL_REDUCE], parts_s[StepPart.INPUT] = parts["wait_s"], input_s
        parts_s[StepPart.COMPUTE] = times["end_s"] - times["start_s"] - parts["wait_s"] - input_s
        times["marked_s"] = begin[0] + skew_s
        told = {"parts_s": tuple(parts_s), "calls": tuple(calls), "micro_batches": truth.micro_batches}
        read = RankStep(number=number, **times, **parts, **told)
        lived.append(Lived(read, (begin[0] + skew_s, rank.host_s + skew_s), tuple(rank.work)))
        rank.work.clear()
    return lived


def _with_rest(parts: dict[str, Any]) -> tuple[MicroBatchTimes, ...]:
    """Return the passes of a step, the first with its input, the last with what comes behind it."""
    first, *others = parts["of_passes"]
    *others, last = [replace(first, input_s=parts["input_s"]), *others]
    rest = {name: parts[name] - sum(getattr(each, name) for each in others) for name in ("forward_s", "host_s")}
    return (*others, replace(last, **rest))


def _load(truth: Truth, device: Device, rank: _Rank, step: int) -> float:
    """Load a batch; return how long the device did not have it."""
    begin_s = rank.device_s
    if truth.run_ahead and step >= 2:
        rank.host_s = max(rank.host_s, rank.step_ends_s[step - 2])
    load0_s = rank.host_s
    rank.host_s += rank.longer(truth.input_s) + truth.delay_s("io", rank.rank, step)
    if rank.host_s > load0_s:
        rank.note("load", (load0_s, rank.host_s), (load0_s, rank.host_s), -1)
    if device == "cuda":
        rank.busy("copy", truth.copy_s)
    else:
        rank.device_s = rank.host_s
    return rank.device_s - begin_s


def _broadcast(truth: Truth, device: Device, ranks: list[_Rank]) -> list[tuple[TracedCollective, float] | None]:
    """Send buffers from rank 0 to all; return each rank's call and how long it waited. Rank 0 waits for none."""
    if not truth.buffer_count:
        return [None for _ in ranks]
    sent: list[tuple[TracedCollective, float] | None] = []
    launch_s = LAUNCH_S if device == "cuda" else 0.0
    root_s = max(ranks[0].host_s + launch_s, ranks[0].device_s)
    for rank in ranks:
        issue = (rank.host_s, rank.host_s + LAUNCH_S)
        start_s = max(rank.host_s + launch_s, rank.device_s)
        end_s = max(start_s, root_s) + truth.buffer_s
        rank.note("broadcast", issue, (start_s, end_s), -1)
        wait_s = end_s - rank.device_s
        rank.device_s = end_s
        rank.host_s = end_s if device == "cpu" else issue[1]
        own_s = (each + truth.skew_of(rank.rank) for each in (issue[0], start_s, end_s))
        all_ranks = tuple(range(truth.n_ranks))
        sent.append(
            (TracedCollective("broadcast", 4 * truth.buffer_count, all_ranks, truth.n_ranks, *own_s, False), wait_s)
        )
    return sent


def _compute(truth: Truth, device: Device, rank: _Rank, step: int):
    """Forward, backward; return the phases and, per bucket, when it was issued and when it was ready."""
    computing_s = truth.micro_batches * (truth.forward_s + sum(bucket.backward_s for bucket in truth.buckets))
    always_slower = 1 + truth.delay_s("compute", rank.rank, step) / computing_s
    n_layers = sum(len(bucket.counts) for bucket in truth.buckets)
    rank.held_s = [0.0] * (len(truth.buckets) + 2)
    forwards_s = earlier_s = 0.0
    of_passes = []
    for left in reversed(range(truth.micro_batches)):
        own = {"micro_batch": truth.micro_batches - 1 - left}
        pass_s = computing_s / truth.micro_batches
        slower = always_slower + truth.delay_s("compute", rank.rank, step, **own) / pass_s
        held_before_s = sum(rank.held_s)
        forward_s = rank.longer(truth.forward_s) * slower
        forwards_s += forward_s
        rank.held_s[0] += sum(rank.busy("forward", forward_s / n_layers, tensor=layer) for layer in range(n_layers))
        rank.host_s += 0.0 if left else rank.longer(truth.host_s) + truth.delay_s("host", rank.rank, step)
        rank.host_s += truth.delay_s("host", rank.rank, step, **own)

        buckets_s, issued = [], []
        for b, bucket in enumerate(truth.buckets):
            bucket_s = rank.longer(bucket.backward_s) * slower * (1 + (truth.beside[step] if b and truth.beside else 0))
            paused_s = truth.delay_s("host", rank.rank, step, b) if b and not left else 0.0
            rank.host_s += paused_s
            on_cpu_s = paused_s if device == "cpu" else 0.0  # between operators of a backward pass counts as that pass
            for tensor in range(len(bucket.counts)):
                share_s = bucket_s / len(bucket.counts)
                place = 1 if left else 1 + b
                rank.held_s[place] += rank.busy("backward", 0.9 * share_s, b, tensor)
                rank.held_s[place] += rank.busy("accumulate", 0.1 * share_s, b, tensor)
            rank.held_s[1 + b] -= on_cpu_s
            buckets_s.append(bucket_s + on_cpu_s)
            rank.host_s += LAUNCH_S if device == "cuda" and not left else 0.0
            issued.append((rank.host_s, rank.device_s))
        earlier_s += sum(buckets_s) if left else 0.0
        of_passes.append(MicroBatchTimes(0.0, forward_s, sum(rank.held_s) - held_before_s, sum(buckets_s)))
    parts = {"forward_s": forwards_s, "backward_s": earlier_s + sum(buckets_s), "earlier_s": earlier_s}
    parts |= {"of_passes": of_passes}
    parts |= {"beside_s": sum(buckets_s[1:])} if truth.beside else {}
    return parts | {"buckets_s": (earlier_s + buckets_s[0], *buckets_s[1:])}, issued


def _all_reduces(truth: Truth, device: Device, issued, begins):
    """Return when each bucket was reduced, and when each rank began to wait for that, `[rank][bucket]`.

    NCCL takes one after the other. Gloo has two threads, and the link still takes one after the other.
    """
    free_s = [[0.0, 0.0] for _ in begins]
    starts_s: list[list[float]] = [[] for _ in begins]
    ends_s: list[float] = []
    for b, bucket in enumerate(truth.buckets):
        lane = b % 2 if device == "cpu" else 0
        for rank in range(len(begins)):
            starts_s[rank].append(max(*issued[rank][b], free_s[rank][lane]))
        latest_s = max(of_rank[b] for of_rank in starts_s)
        ends_s.append(max([latest_s, *ends_s[-1:]]) + bucket.transfer_s)
        for rank in range(len(begins)):
            free_s[rank][lane] = ends_s[-1]
    return ends_s, starts_s


def _after_reducing(truth: Truth, device: Device, rank: _Rank, ends_s: list[float]) -> dict[str, Any]:
    """Wait, update the weights, and read the loss if the host waits for its device."""
    computed_s = rank.device_s
    rank.device_s = max([computed_s, *ends_s[-1:]])
    wait_s = rank.device_s - computed_s
    if device == "cpu":
        rank.host_s = rank.device_s
    optimize_s = rank.longer(truth.optimize_s)
    rank.held_s[-1] += sum(rank.busy("optimize", optimize_s / 2, tensor=half) for half in range(2))
    read_s = 0.0
    if device == "cuda" and not truth.run_ahead:
        rank.held_s[0] += rank.busy("item", ITEM_S)
        read_s = ITEM_S
        rank.host_s = max(rank.host_s, rank.device_s) + LAUNCH_S
        work = rank.work.pop()
        rank.work.append(Work("item", (work.host[0], rank.host_s + truth.skew_of(rank.rank)), work.device))
    rank.step_ends_s.append(rank.device_s)
    held_s = {"host_s": sum(rank.held_s), "held_s": tuple(rank.held_s)}
    return held_s | {"wait_s": wait_s, "optimize_s": optimize_s, "read_s": read_s}
