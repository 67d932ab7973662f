"""Seconds of an undisturbed step, and the excess of every step of every rank.

The time of an undisturbed part is a low quantile over all ranks and steps. The delay of a step is its excess over that
time, at least 0. The minimum would be too optimistic: it is the luckiest moment of the run.

There are two tables. The *measured* table separates host, compute and io. Stragglers are searched for in it. The
*recorded* table is for the simulator. It puts each delay where it costs as much in the simulator as it did in the job:

* If input takes no noticeable time, its excess is not a delay of the storage. It counts as a delay of the host.
* If the host waits for the loss, its delay is between forward and backward pass, while the device is idle, as measured.
  If it waits for the update, because the data loader of the next step must not start earlier, or because the host of a
  sharded job reads the loss there, the simulated host would sleep during the forward pass, which would hide the delay.
  There, a pause of the host counts as a delay of compute, which nothing hides.
* If the host never waits, it runs ahead of its device, so delays of the simulated host would have no effect. But the
  measured delays did reach the device. There, all delays count as delays of compute.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from simdist.plan.ops import Channel
from simdist.profiles.job.job import TracedJob
from simdist.profiles.kineto.columns import Floats

#: The quantile that counts as undisturbed.
LOW = 0.05
_SHARED = 0.1  # of computing that overlaps collectives: from here on, the cores that collectives use matter
_NOTICEABLE = 0.01  # of a step; input that takes less only fetches batches that are ready


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of the parts of every step, each `[n_steps, n_traced_ranks]`."""

    input_s: Floats
    forward_s: Floats
    host_s: Floats
    backward_s: Floats
    wait_s: Floats
    optimize_s: Floats
    sharding_s: Floats

    @property
    def step_s(self) -> Floats:
        """Seconds of every step."""
        return self.input_s + self.host_s + self.wait_s + self.compute_s

    @property
    def compute_s(self) -> Floats:
        """Seconds of computing."""
        return self.forward_s + self.backward_s + self.optimize_s + self.sharding_s


@dataclass(frozen=True, slots=True)
class BaseTimes:
    """Seconds of an undisturbed step.

    Args:
        input_s: Seconds until the batch is ready.
        forward_s: Forward pass and loss.
        host_s: Time in which the device is idle because of the host.
        buckets_s: Seconds of one backward pass from each gradient bucket to the next; one number without buckets.
        buckets_nbytes: Bytes of each bucket; None if the traces do not show them; empty without buckets.
        optimize_s: Update.
        sharding_s: What `fully_shard` computes itself in a step: copies, casts and hooks.
        is_loaded: The input takes noticeable time.
        micro_batches: Passes of a step.
        notes: Assumptions.
    """

    input_s: float
    forward_s: float
    host_s: float
    buckets_s: tuple[float, ...]
    buckets_nbytes: tuple[int | None, ...]
    optimize_s: float
    sharding_s: float
    is_loaded: bool
    micro_batches: int
    notes: tuple[str, ...]

    @property
    def backward_s(self) -> float:
        """Seconds of the backward passes."""
        return self.micro_batches * math.fsum(self.buckets_s)

    @property
    def compute_s(self) -> float:
        """Seconds of computing."""
        return self.forward_s + self.backward_s + self.optimize_s + self.sharding_s


def parts(job: TracedJob) -> Parts:
    """Return the parts of all steps as arrays.

    Where `fully_shard` runs beside other parallelism, no scenario shards the model: its work counts as forward.
    """
    in_order = attrgetter("input_s", "forward_s", "host_s", "backward_s", "wait_s", "optimize_s", "sharding_s")
    rows = [[in_order(step) for step in profile.steps] for profile in job.profiles]
    found = Parts(*np.array(rows).transpose(2, 1, 0))
    if job.shards:
        return found
    return replace(found, forward_s=found.forward_s + found.sharding_s, sharding_s=np.zeros_like(found.sharding_s))


def base_times(job: TracedJob, of: Parts) -> BaseTimes:
    """Return the times of an undisturbed step."""
    step_s = float(np.median(of.step_s))
    input_s = _low_s(of.input_s)
    buckets_s, nbytes, notes = _buckets(job, of)
    if shares_cores(job, of):
        reducing_s = _low_s(np.array([step.reducing_s for profile in job.profiles for step in profile.steps]))
        alone = max(0.0, 1 - reducing_s / math.fsum(buckets_s) / job.micro_batches)
        buckets_s = tuple(alone * seconds for seconds in buckets_s)
    forward_s, host_s, optimize_s = map(_low_s, (of.forward_s, of.host_s, of.optimize_s))
    sharding_s = float(np.median(of.sharding_s))  # what is usual of it is no delay of schedules that do not shard
    is_loaded = max(input_s, float((of.input_s - input_s).mean())) > _NOTICEABLE * step_s
    rest = optimize_s, sharding_s, is_loaded, job.micro_batches, tuple(notes)
    return BaseTimes(input_s, forward_s, host_s, buckets_s, nbytes, *rest)


def _low_s(seconds: Floats) -> float:
    return max(0.0, float(np.quantile(seconds, LOW)))


def _buckets(job: TracedJob, of: Parts) -> tuple[tuple[float, ...], tuple[int | None, ...], list[str]]:
    """Return the bytes of the buckets that most steps have, and their seconds of one backward pass.

    Only the last pass of a step shows when a bucket is ready. All passes are taken to be equally long and divided like
    it.
    """
    each_step = (step for profile in job.profiles for step in profile.steps)
    steps = [(step, tuple(call.nbytes for call in step.gradient_calls)) for step in each_step]
    layouts = Counter(sizes for _, sizes in steps)
    silent = layouts.pop((), 0)
    nbytes, times = layouts.most_common(1)[0] if layouts else ((), silent)
    notes = []
    if silent and layouts:
        notes.append(
            f"{silent} of {silent + layouts.total()} steps of ranks exchange no gradients; synchronous SGD in the "
            f"scenario does so in every step"
        )
    if len(layouts) > 1:
        others = layouts.total() - times
        notes.append(
            f"{others} of {others + times} steps of ranks have other gradient buckets than the {len(nbytes)} of most; "
            f"the backward pass up to each bucket is from the latter"
        )
    timed = [step for step, sizes in steps if sizes == nbytes and len(step.buckets_s) == len(nbytes)]
    if nbytes and timed:
        buckets_s = np.array([step.buckets_s for step in timed])
        pass_s = _low_s(buckets_s.sum(axis=1)) / job.micro_batches
        if job.micro_batches > 1:
            buckets_s[:, 0] -= [step.earlier_s for step in timed]
        return scaled_lows(buckets_s, pass_s), nbytes, notes
    if nbytes:
        notes.append("the traces do not tell when each gradient bucket was ready: the backward pass is shared by bytes")
        shares = np.array([each or 1 for each in nbytes], dtype=np.float64)
        return tuple((_low_s(of.backward_s) / job.micro_batches * shares / shares.sum()).tolist()), nbytes, notes
    return (_low_s(of.backward_s) / job.micro_batches,), (), notes


def scaled_lows(buckets_s: Floats, pass_s: float) -> tuple[float, ...]:
    """Return low quantiles of the parts of a pass, scaled to the low quantile of the pass.

    Scaling is necessary because the parts of one step are not all at their lowest at once.

    Args:
        buckets_s: Seconds of each part, such as a gradient bucket, `[n_steps, n_parts]`.
        pass_s: A low quantile of the pass.
    """
    lows_s = np.maximum(0.0, np.quantile(buckets_s, LOW, axis=0))
    sum_s = float(lows_s.sum())
    scale = pass_s / sum_s if sum_s > 0 else 1.0
    return tuple((lows_s * scale).tolist())


_CHANNELS: tuple[Channel, ...] = ("host", "compute", "io")


@dataclass(frozen=True, slots=True)
class HostModel:
    """Behaviour of the simulated host that reproduces the cost of input and pauses.

    Args:
        waits: The host waits for its device in every step.
        load_s: Seconds that the storage needs for a batch; None if batches are ready.
        ahead_s: Seconds for which a batch has been loading when its step begins; 0 if batches are not loaded ahead.
        reads_loss: It waits before the backward pass, not after the update.
    """

    waits: bool
    load_s: float | None
    ahead_s: float = 0.0
    reads_loss: bool = True

    @property
    def loads(self) -> bool:
        """Whether batches come from storage."""
        return self.load_s is not None


def host_model(job: TracedJob, base: BaseTimes, of: Parts) -> HostModel:
    """Return the behaviour of the scenario's host.

    Loader processes that load ahead delay a step only if they need at least a whole step for its batch. If some steps
    wait for input but an undisturbed step does not, the loading time is not visible. It then counts as a delay of the
    host.
    """
    waits = all(profile.host_waits for profile in job.profiles)
    reads_loss = not job.shards or _usually_reads_loss(job)
    is_ahead = any("loader processes" in profile.hints for profile in job.profiles)
    step_s = _low_s(of.step_s)
    if not waits or not base.is_loaded or (is_ahead and base.input_s <= _NOTICEABLE * step_s):
        return HostModel(waits, None, reads_loss=reads_loss)
    return HostModel(waits, step_s, step_s - base.input_s) if is_ahead else HostModel(waits, base.input_s)


def _usually_reads_loss(job: TracedJob) -> bool:
    """Return whether the host waits before the backward pass in most steps."""
    reads = [step.reads_loss for profile in job.profiles for step in profile.steps]
    return 2 * sum(reads) > len(reads)


def excess_times(of: Parts, base: BaseTimes) -> tuple[dict[Channel, Floats], float]:
    """Return the seconds beyond the base times.

    Returns:
        Channel -> seconds, 0 or more, `[n_steps, n_traced_ranks]`; and the mean over steps and ranks of the time below
        the base times, which is clipped to 0.
    """
    excess: dict[Channel, Floats] = {
        "host": of.host_s - base.host_s,
        "compute": of.compute_s - base.compute_s,
        "io": of.input_s - base.input_s,
    }
    clipped_s = math.fsum(float(np.maximum(0.0, -seconds).mean()) for seconds in excess.values())
    return {channel: np.maximum(0.0, seconds) for channel, seconds in excess.items()}, clipped_s


def recorded(
    excess: dict[Channel, Floats], host: HostModel, ranks: Sequence[int], world_size: int
) -> dict[Channel, Floats]:
    """Return the delays that the scenario plays, `[n_steps, world_size]`; channels without any are left out.

    Args:
        excess: Channel -> seconds, `[n_steps, n_known_ranks]`.
        host: How the simulated host behaves.
        ranks: Rank of each column. Every other rank has the typical delay of these ranks in each step.
        world_size: Ranks of the job.
    """
    routed = routed_to(excess, host)
    return {channel: filled(routed[channel], ranks, world_size) for channel in _CHANNELS if routed[channel].any()}


def routed_to(excess: Mapping[Channel, Floats], host: HostModel) -> dict[Channel, Floats]:
    """Return measured excess on the channels on which the simulator plays it."""
    zeros = np.zeros_like(excess["compute"])
    if not host.waits:
        return {"host": zeros, "compute": excess["host"] + excess["compute"] + excess["io"], "io": zeros}
    if host.loads:
        return {"host": zeros, "compute": excess["host"] + excess["compute"], "io": excess["io"]}
    if not host.reads_loss:
        return {"host": zeros, "compute": excess["host"] + excess["compute"] + excess["io"], "io": zeros}
    return {"host": excess["host"] + excess["io"], "compute": excess["compute"], "io": zeros}


def shares_cores(job: TracedJob, of: Parts) -> bool:
    """Return whether enough computing overlaps collectives for the two to compete for cores."""
    beside_s = [step.beside_s for profile in job.profiles for step in profile.steps]
    return float(np.mean(beside_s)) > _SHARED * float(of.compute_s.mean())


def late_backward_s(job: TracedJob, of: Parts, base: BaseTimes) -> tuple[Floats, Floats]:
    """Return how much longer backward passes took, and how much of it exchanges caused; 0 if no cores are shared.

    No exchange overlaps the forward pass of a step, so the relative excess of the forward pass has other causes. The
    rest of the excess of the backward pass is due to exchanges, up to the time beside collectives.

    Returns:
        Both seconds, `[n_steps, n_traced_ranks]`.
    """
    if not shares_cores(job, of):
        return np.zeros_like(of.step_s), np.zeros_like(of.step_s)
    beside_s = np.array([[step.beside_s for step in profile.steps] for profile in job.profiles]).T
    noise = np.maximum(0.0, of.forward_s / base.forward_s - 1) if base.forward_s else 0.0
    late_s = np.maximum(0.0, of.backward_s - base.backward_s)
    return late_s, np.clip(late_s - base.backward_s * noise, 0.0, beside_s)


def with_late_backward(
    delays: dict[Channel, Floats], calm: dict[Channel, Floats], late_s: tuple[Floats, Floats], ranks: Sequence[int]
) -> dict[Channel, Floats]:
    """Move the excess of backward passes into them, and the part due to exchanges into steps with exchanges.

    Args:
        delays: The result of `recorded`, `[n_steps, world_size]`.
        calm: The same without stragglers, which keep their delays.
        late_s: See `late_backward_s`.
        ranks: Ranks of its columns.
    """
    if "compute" not in calm or not late_s[0].any():
        return delays
    backward_s, overlap_s = (
        np.minimum(calm["compute"], filled(each, ranks, calm["compute"].shape[1])) for each in late_s
    )
    moved: dict[Channel, Floats] = {
        "compute": delays["compute"] - backward_s,
        "backward": backward_s - overlap_s,
        "overlap": overlap_s,
    }
    return delays | moved


def typical_s(seconds: Floats) -> Floats:
    """Return the assumed delays of an untraced rank: a low quartile, so that stragglers do not affect it.

    Args:
        seconds: Delays of the traced ranks, `[..., n_traced_ranks]`.
    """
    return np.asarray(np.quantile(seconds, 0.25, axis=-1, method="lower"))


def filled(seconds: Floats, ranks: Sequence[int], world_size: int) -> Floats:
    """Return delays of all ranks, `[..., world_size]`; those without a trace have the typical one.

    Args:
        seconds: Delays of known ranks, `[..., n_known_ranks]`.
        ranks: These ranks.
        world_size: Ranks of the job.
    """
    whole = np.repeat(typical_s(seconds)[..., None], world_size, axis=-1)
    whole[..., list(ranks)] = seconds
    return np.round(whole, 9)  # a profiler counts nanoseconds at best
