"""Building blocks for schedules of data-parallel training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from simdist.plan import Body, Buffer, Group, Lane, Op, Servers, algorithms, ops
from simdist.plan.lanes import IO, load_by
from simdist.plan.ops import ALONE, Algorithm, Channel
from simdist.plan.optimizers import OPTIMIZERS
from simdist.plan.plan import ITEM_NBYTES, DType
from simdist.schedules.job import Job, levels

Bucket: TypeAlias = tuple[int, int]  # half-open range of tensors
_Names: TypeAlias = tuple[str, ...]

FIRST_BUCKET_NBYTES = 1024**2  # DistributedDataParallel's first bucket is small, so that communication begins early
BUCKET_NBYTES = 25 * 1024**2  # its bucket_cap_mb
WHOLE_MODEL_NBYTES = 2**62  # larger than any model: one bucket
PARAM = "param"
_FLAT = "flat"
_SENT = "sent"
MASTER = "master"
_RATIOS = "ratios"
_RATIOS_SHARE = "ratios.share"

#: The algorithms that can also reduce-scatter and all-gather. The others move whole buffers.


def gradient_buckets(job: Job, *, first_nbytes: int, nbytes: int) -> tuple[Bucket, ...]:
    """Split the tensors into buckets in the order in which the backward pass completes them.

    A bucket is closed by the tensor that makes it reach its limit, as in PyTorch's DistributedDataParallel.

    Source:
        Li et al., PyTorch Distributed, VLDB 2020, section 4.2; torch `compute_bucket_assignment_by_size`.
    """
    buckets: list[Bucket] = []
    last = len(job.tensor_counts)
    held = 0
    for tensor in reversed(range(len(job.tensor_counts))):
        held += job.tensor_counts[tensor] * ITEM_NBYTES[job.dtype]
        if held >= (nbytes if buckets else first_nbytes) or tensor == 0:
            buckets.append((tensor, last))
            last = tensor
            held = 0
    return tuple(buckets)


def even_servers(count: int, n_servers: int, world_size: int) -> Servers:
    """Return servers that hold a buffer of `count` elements in even parts, spread evenly over the ranks."""
    share, rest = divmod(count, n_servers)
    held = tuple(share + (server < rest) for server in range(n_servers))
    return Servers(held, tuple(server * world_size // n_servers for server in range(n_servers)))


def gradient_buffers(job: Job, buckets: Sequence[Bucket], *, multiple: int = 1) -> tuple[Buffer, ...]:
    """Return one buffer for each gradient bucket, padded to a multiple of `multiple` elements."""
    buffers = []
    for number, (first, last) in enumerate(buckets):
        count = sum(job.tensor_counts[first:last])
        padding = -count % multiple
        buffers.append(Buffer(f"grad.{number}", count + padding, job.dtype, tensors=(first, last), padding=padding))
    return tuple(buffers)


def param_buffers(
    job: Job, buckets: Sequence[Bucket], sharers: Group = ALONE, *, in_one: bool = False
) -> tuple[Buffer, ...]:
    """Return the buffers of the parameters, which the ranks that share the update cut into equal slices.

    Args:
        job: The job.
        buckets: Ranges of tensors.
        sharers: Groups that share the update.
        in_one: One buffer holds all parameters. Otherwise there is one per bucket, if the update is shared.
    """
    if sharers == ALONE or in_one:
        everything = (0, len(job.tensor_counts))
        count = sum(job.tensor_counts)
        padding = -count % sharers.size
        return (Buffer(PARAM, count + padding, job.dtype, tensors=everything, initialized=True, padding=padding),)
    return tuple(
        replace(grad, name=grad.name.replace("grad", PARAM), initialized=True)
        for grad in gradient_buffers(job, buckets, multiple=sharers.size)
    )


def training_buffers(
    job: Job,
    buckets: Sequence[Bucket],
    *,
    multiple: int = 1,
    raters: Group = ALONE,
    sharers: Group = ALONE,
    in_one: bool = False,
    params: Mapping[str, Bucket] | None = None,
) -> tuple[Buffer, ...]:
    """Return the buffers of data-parallel training: parameters, gradient buckets, activations, losses and batches.

    Args:
        job: The job.
        buckets: Ranges of tensors.
        multiple: Gradient buckets are padded to a multiple of this many elements.
        raters: Groups that share the trust ratios of LARS, see `optimize`.
        sharers: Groups that share the update.
        in_one: See `param_buffers`.
        params: Buffers of parameters, each with the tensors that it holds. By default those of `param_buffers`.
    """
    whole = param_buffers(job, buckets, sharers, in_one=in_one)
    buffers = [tensor_buffer(job, name, tensors, initialized=True) for name, tensors in (params or {}).items()]
    buffers = buffers or [*whole]
    buffers += gradient_buffers(job, buckets, multiple=multiple)
    buffers.append(Buffer("activations", 1, job.dtype))
    buffers += loss_buffers(job)
    if OPTIMIZERS[job.optimizer].has_trust_ratios:
        buffers += _ratio_buffers(job, raters)
    for number, each in enumerate(whole if sharers != ALONE else ()):
        buffers.append(Buffer(f"updated.{number}", each.count // sharers.size, job.dtype))
    return (*buffers, *input_buffers(job))


def loss_buffers(job: Job) -> tuple[Buffer, ...]:
    """Return the buffers of losses: one for each step that the host runs ahead, and one more."""
    return tuple(Buffer(f"loss.{turn}", 1) for turn in range(_n_losses(job)))


def _ratio_buffers(job: Job, raters: Group) -> tuple[Buffer, ...]:
    share = math.ceil(len(job.tensor_counts) / raters.size)
    whole = Buffer(_RATIOS, share * raters.size)
    return (Buffer(_RATIOS_SHARE, share), whole) if raters.size > 1 else (whole,)


def input_buffers(job: Job) -> tuple[Buffer, ...]:
    """Return the buffers of batches, on the host and on the device."""
    if job.input_path.source == "device":
        return ()
    n_batches = job.input_path.n_buffers if job.input_path.source == "storage" else 1
    ready = job.input_path.source == "memory"
    batches = (
        Buffer(f"batch.{turn}", job.batch_nbytes, "uint8", place="host", initialized=ready) for turn in range(n_batches)
    )
    return (*batches, Buffer("input", job.batch_nbytes, "uint8"))


def _n_losses(job: Job) -> int:
    return 1 + min(job.run_ahead_steps or 0, job.n_steps - 1)


def begins_like(job: Job, step: int) -> int:
    """Return a step for which `begin_step` returns the same, and one step for as many steps as possible."""
    first = job.run_ahead_steps or 0
    turns = _n_losses(job)
    return step if job.input_path.source == "storage" or step < first else first + (step - first) % turns


def begin_step(job: Job, step: int, buckets: Sequence[Bucket], params: _Names = (PARAM,)) -> Body:
    """Return a step's operations up to the last backward pass: input, forward, the host's wait for a loss, delays.

    Passes before the last only compute, as under `no_sync` of PyTorch's DistributedDataParallel. The host delay comes
    between a loss and its backward pass, where the published straggler emulation sleeps.
    """
    body: list[Op] = [*bring_input(job, step)]
    forward = ops.Forward((*params, *input_names(job)), ("activations", loss_name(job, step)))
    for earlier in range(job.micro_batches - 1):
        body += [*late_forward(job, earlier), forward, *before_backward(job, step, earlier)]
        for number in range(len(buckets)):
            body += late_backward(job, buckets, number, earlier, exchanges=False)
            body.append(bucket_backward(number, params, adds=earlier > 0))
    last = job.micro_batches - 1
    return (*body, *late_forward(job, last), forward, *before_backward(job, step, last))


def loss_name(job: Job, step: int) -> str:
    """Return the buffer of a step's loss."""
    return f"loss.{step % _n_losses(job)}"


def input_names(job: Job) -> _Names:
    """Return the buffer of the input on the device, if the job has an input."""
    return () if job.input_path.source == "device" else ("input",)


def before_backward(job: Job, step: int, micro_batch: int) -> Body:
    """Return what the host does between a forward pass and its backward pass: its wait for a loss, its delay.

    It waits in the last micro-batch. If it waits for the loss of its own step and may be late, it also does so in the
    others, so that its device is idle when it sleeps.
    """
    body: list[Op] = []
    is_late = "host" in job.delay_channels
    is_last = micro_batch == job.micro_batches - 1
    ahead = job.run_ahead_steps
    if job.host_waits_for == "loss" and ahead is not None and (is_last or (is_late and ahead == 0)) and step >= ahead:
        body.append(ops.Wait(loss_name(job, step - ahead)))
    if is_late:
        body.append(_delay(job, "host", micro_batch))
    return tuple(body)


def late_forward(job: Job, micro_batch: int) -> Body:
    """Return the delay of the device before a forward pass."""
    return (_delay(job, "compute", micro_batch),) if "compute" in job.delay_channels else ()


def _delay(job: Job, channel: Channel, micro_batch: int | None) -> ops.Delay:
    return ops.Delay(channel, micro_batch if job.micro_batches > 1 else None)


def bring_input(job: Job, step: int) -> Body:
    """Bring the batch of `step` to the device. With storage, also start loads ahead."""
    match job.input_path.source:
        case "device":
            return ()
        case "memory":
            return _copy_input(job, "batch.0")
        case "storage":
            loads: list[Op] = [_load(job, batch) for batch in _upcoming(job, step)]
            if loads and "io" in job.delay_channels:
                loads.insert(len(loads) - 1, _io_delay(loads[-1]))
            if step == 0 and job.input_path.dataset and job.input_path.policy == "staged":
                loads.insert(0, ops.StageIn(Group(job.ranks_per_node)))
            batch = f"batch.{step % job.input_path.n_buffers}"
            return (*loads, ops.Wait(batch), *_copy_input(job, batch))


def _upcoming(job: Job, step: int) -> range:
    """Return the batches with loads that start in a step.

    Workers load `prefetch` batches ahead of the one that the step takes, but none of the next epoch, whose order of
    samples a `DataLoader` draws when the epoch begins. Each starts its next batch when it has finished the one before.
    Without workers, the loads in flight and the batch in use share `prefetch` buffers.
    """
    path = job.input_path
    epoch = path.dataset.steps_per_epoch(job.world_size) if path.dataset and path.workers else job.n_steps
    begin = step - step % epoch
    n_ahead = path.prefetch if path.workers else path.prefetch - 1
    return range(step if step == begin else step + n_ahead, min(step + n_ahead + 1, begin + epoch, job.n_steps))


def _io_delay(load: Op) -> ops.Delay:
    lane = ops.lane_of(load)
    return ops.Delay("io", lane=None if lane == IO else lane)


def _load(job: Job, batch: int) -> ops.Load:
    path = job.input_path
    buffer = f"batch.{batch % path.n_buffers}"
    lane = load_by(batch % path.workers) if path.workers else IO
    if path.dataset is None:
        return ops.Load(buffer, lane=lane)
    return ops.Load(buffer, *levels(path.policy, epoch=batch // path.dataset.steps_per_epoch(job.world_size)), lane)


def _copy_input(job: Job, batch: str) -> Body:
    copy = ops.Copy(batch, "input")
    return (copy, ops.Wait("input")) if job.input_path.copy == "pageable" else (copy,)


def bucket_backward(number: int, params: _Names = (PARAM,), *, adds: bool) -> ops.Backward:
    """Return the backward pass of a bucket. It may add to the gradients of earlier passes of the step."""
    return ops.Backward((*params, "activations"), f"grad.{number}", adds)


def last_backward(
    job: Job, buckets: Sequence[Bucket], params: _Names = (PARAM,), *, all_reduce: Group | None, algorithm: Algorithm
) -> Body:
    """Return the last backward pass, with each bucket's all-reduce over the group `all_reduce`, if any."""
    body: list[Op] = []
    for number in range(len(buckets)):
        body += late_backward(job, buckets, number, job.micro_batches - 1, exchanges=all_reduce is not None)
        body.append(bucket_backward(number, params, adds=job.micro_batches > 1))
        if all_reduce:
            body.append(ops.AllReduce(f"grad.{number}", all_reduce, algorithm=algorithm))
    return tuple(body)


def late_backward(
    job: Job, buckets: Sequence[Bucket], number: int, micro_batch: int, *, exchanges: bool, in_each: bool = False
) -> Body:
    """Return the delays of a backward pass, before the last bucket. With exchanges of other buckets there are two.

    The last bucket is as late as it was, and no earlier bucket is late. This is exact if the step waits for the last
    bucket's backward pass, and if the links have been busy since the first bucket.

    Args:
        job: The job.
        buckets: Ranges of tensors.
        number: The bucket that comes next.
        micro_batch: The micro-batch.
        exchanges: Whether this backward pass exchanges other buckets.
        in_each: Whether all do. If only one does, the delays of `overlap` of the whole step are there.
    """
    if number < len(buckets) - 1:
        return ()
    late = {"backward": _delay(job, "backward", micro_batch)}
    if exchanges and number:
        late["overlap"] = _delay(job, "overlap", micro_batch if in_each else None)
    return tuple(op for channel, op in late.items() if channel in job.delay_channels)


def optimize(
    job: Job,
    buckets: Sequence[Bucket],
    params: _Names = (PARAM,),
    *,
    raters: Group = ALONE,
    algorithm: Algorithm = "auto",
) -> Body:
    """Return the optimizer's step over all gradients, and the host's wait for it, if any.

    Args:
        job: Defines the optimizer. LARS computes the trust ratios of the tensors first.
        buckets: Ranges of tensors.
        params: Buffers of parameters.
        raters: Groups that share the trust ratios. `ALONE`: every rank computes all of them.
        algorithm: Algorithm of the all-gather of shared ratios, if it can gather. Otherwise the library chooses.
    """
    grads = tuple(f"grad.{number}" for number in range(len(buckets)))
    ratios = _RATIOS if OPTIMIZERS[job.optimizer].has_trust_ratios else None
    rating = _rate(params, grads, raters, algorithm) if ratios else ()
    return (*rating, ops.Optimize(params, grads, ratios), *wait_for_update(job, params))


def wait_for_update(job: Job, params: _Names) -> Body:
    """Return the host's wait for its own update, if it waits for updates."""
    waits = job.host_waits_for == "update" and job.run_ahead_steps == 0
    return tuple(map(ops.Wait, params)) if waits else ()


def optimize_slices(
    job: Job, grads: _Names, params: _Names, sharers: Group, algorithm: Algorithm, *, keeps: bool = False
) -> Body:
    """Return an update with one slice of all parameters for each of `sharers`, and the all-gathers of the results.

    With `keeps`, each rank keeps its slices in another type, and sends copies in the type of the parameters.

    Source:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, arXiv
        1910.02054 (stage 1).
    """
    slices = tuple(f"updated.{number}" for number in range(len(params)))
    chosen = algorithm if algorithms.carries(algorithm, ops.AllGather) else "auto"
    gathers = (ops.AllGather(*each, sharers, algorithm=chosen) for each in zip(slices, params, strict=True))
    kept = tuple(f"{MASTER}.{number}" for number in range(len(params))) if keeps else slices
    update = ops.Optimize(params, grads, slices=kept, shared_by=sharers)
    copies = (ops.Copy(*each) for each in zip(kept, slices, strict=True) if keeps)
    return (update, *copies, *gathers, *wait_for_update(job, params))


def _rate(params: _Names, grads: _Names, raters: Group, algorithm: Algorithm) -> Body:
    if raters.size == 1:
        return (ops.TrustRatios(params, grads, _RATIOS, raters),)
    return (
        ops.TrustRatios(params, grads, _RATIOS_SHARE, raters),
        ops.AllGather(_RATIOS_SHARE, _RATIOS, raters, algorithm=algorithm if carries_slices(algorithm) else "auto"),
    )


def tensor_buffer(
    job: Job, name: str, tensors: Bucket, dtype: DType | None = None, *, initialized: bool = False
) -> Buffer:
    """Return a buffer for the parameters of a range of tensors, or for other data of their size."""
    count = sum(job.tensor_counts[slice(*tensors)])
    return Buffer(name, count, dtype or job.dtype, tensors=tensors, initialized=initialized)


def flat_buffers(job: Job, pieces: Mapping[str, Bucket], *, late: bool) -> tuple[Buffer, ...]:
    """Return the buffers in which `send_parameters` averages the pieces of a model, `late` or not."""
    names = (_FLAT, _SENT) if late else (_FLAT,)
    return tuple(tensor_buffer(job, name + piece, tensors) for name in names for piece, tensors in pieces.items())


def send_parameters(
    pieces: Sequence[str], group: Group, *, late: bool, lane: Lane, synchronize: bool, algorithm: Algorithm
) -> Body:
    """Average the parameters over a group, as PyTorch's model averagers do: flatten, wait, all-reduce.

    `take_parameters` writes the average back.

    PyTorch copies into a flat tensor and divides it by the group's size before it waits. Afterwards it makes the
    parameters views of that tensor. Buffers of a plan are not views of one another, so the second pass over memory
    comes after the all-reduce, as a copy back. The time is the same.

    Args:
        pieces: Suffixes of the buffers of parameters: `("",)` for one buffer of all.
        group: The groups that average.
        late: Keep the sent parameters, because a later step applies the average.
        lane: Lane of the all-reduce.
        synchronize: The host waits for its device before the all-reduce (`torch.cuda.synchronize`).
        algorithm: Algorithm of the all-reduce.

    Source:
        torch.distributed.algorithms.model_averaging.utils.average_parameters.
    """
    kept = pieces if late else ()
    return (
        *(ops.Copy(PARAM + piece, _SENT + piece) for piece in kept),
        *(ops.Copy(PARAM + piece, _FLAT + piece) for piece in pieces),
        *((ops.Wait(_FLAT + pieces[-1]),) if synchronize else ()),
        *(ops.AllReduce(_FLAT + piece, group, algorithm=algorithm, lane=lane) for piece in pieces),
    )


def take_parameters(pieces: Sequence[str], *, late: bool) -> Body:
    """Set the parameters to the average. If `late`, add the rank's own progress since it was sent.

    Args:
        pieces: Suffixes of the buffers of parameters.
        late: The average was sent in an earlier step.

    Source:
        Shen et al., Faster Distributed Deep Net Training: Computation and Communication Decoupled Stochastic Gradient
        Descent, IJCAI 2019, arXiv 1906.12043: CoCoD-SGD does so after a whole period.
    """
    if late:
        terms = {piece: (PARAM + piece, _FLAT + piece, _SENT + piece) for piece in pieces}
        return tuple(ops.Combine(each, (1.0, 1.0, -1.0), PARAM + piece) for piece, each in terms.items())
    return tuple(ops.Copy(_FLAT + piece, PARAM + piece) for piece in pieces)


def slicing_problems(algorithm: Algorithm) -> list[tuple[str, str]]:
    """Return `(field, what is wrong)` with the algorithm of a schedule that reduce-scatters or all-gathers."""
    if algorithm in ("server", "broadcasts") or carries_slices(algorithm):  # `Schedule.problems` refuses both
        return []
    known = filter(carries_slices, algorithms.names())
    return [("algorithm", f"{algorithm} moves whole buffers, not slices: write {', '.join(known)}")]


def server_counts(job: Job) -> list[int]:
    """Return the numbers of servers that a search tries: one, one per node, one per rank."""
    return sorted({1, job.world_size // job.ranks_per_node, job.world_size})


def carries_slices(algorithm: Algorithm) -> bool:
    """Tell whether an algorithm reduce-scatters and all-gathers."""
    return algorithms.carries(algorithm, ops.ReduceScatter, ops.AllGather)


def node_peers(job: Job) -> Group:
    """Return the groups that join the j-th GPUs of all nodes."""
    return Group(job.world_size // job.ranks_per_node, stride=job.ranks_per_node)


def shard_of(bucket: Buffer, number: int, job: Job) -> Buffer:
    """Return the buffer of a GPU's slice of a bucket. With one GPU per node, it is the bucket itself."""
    if job.ranks_per_node == 1:
        return bucket
    return Buffer(f"shard.{number}", bucket.count // job.ranks_per_node, bucket.dtype)


def within_nodes(bucket: Buffer, shard: Buffer, between: Body, job: Job, *, algorithm: Algorithm) -> Body:
    """Return collectives on two levels: slices of a bucket within each node, then each slice between nodes.

    reduce_scatter(bucket -> shard)     within the node
    between                             on the shard, over the j-th GPUs of all nodes
    all_gather(shard -> bucket)         within the node
    """
    if shard == bucket:
        return between
    node = Group(job.ranks_per_node)
    return (
        ops.ReduceScatter(bucket.name, shard.name, node, algorithm=algorithm),
        *between,
        ops.AllGather(shard.name, bucket.name, node, algorithm=algorithm),
    )
