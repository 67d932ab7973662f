"""Base of schedules that reduce gradients in every step: buckets, compression, and shared work on the update."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Literal, TypeAlias, get_args

from pydantic import Field, field_validator

from simdist.errors import PlanError
from simdist.plan import AllGather, AllReduce, Body, Buffer, Copy, Group, Op, Plan, ReduceScatter, Result
from simdist.plan.ops import ALONE
from simdist.plan.optimizers import OPTIMIZERS, OptimizerName
from simdist.plan.plan import ITEM_NBYTES, DType
from simdist.schedules import parts
from simdist.schedules.base import Schedule
from simdist.schedules.job import FloatType, Job, Shape
from simdist.schedules.labels import Piece, piece, texts
from simdist.schedules.tuning import FP16, SHARED_UPDATES, Allowance, Axis, Permit
from simdist.settings.base import shown
from simdist.settings.units import Nbytes, parse_whole

_WARM_UP = "warm-up"
_FIRST = "first step after it"
_USUAL = "later steps"
_MIB = 1024**2
_NODE = "node"
_BUCKETS = (_MIB, 4 * _MIB, 10 * _MIB, 25 * _MIB, 50 * _MIB, 100 * _MIB, None)  # sizes that `tune` tries


Sharing: TypeAlias = bool | int | Literal["node"]


GRADIENT_TRAITS: tuple[Piece, ...] = (
    piece("compression", [("fp16", "-fp16")]),
    piece("parallel_optimizer", [(True, "-pto")]),
    piece("shared_update", [(True, "-shared"), (_NODE, "-shared-node")], before="-shared-"),
    piece("updates_sent_by", [("broadcast", "-broadcast")]),
    piece("param_dtype", [(each, f"-{each}") for each in get_args(FloatType)]),
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The operations that average one bucket over the world.

    Args:
        ops: Operations right after the bucket's backward pass. Those on the comm stream overlap.
        finish: Operations before the update, after the backward pass of all buckets. Operations of the compute stream
            that wait for communication belong here, where they hold up no backward pass.
        buffers: Buffers of the operations besides the bucket.
        shard: A rank's slice of the mean, as input of a shared update. None: the bucket holds all of it.
    """

    ops: Body
    finish: Body = ()
    buffers: tuple[Buffer, ...] = ()
    shard: Buffer | None = None


class GradientSchedule(Schedule, abc.ABC):
    """Average bucketed gradients over the world in every step. Subclasses define how to average a bucket."""

    permits: ClassVar[tuple[Permit, ...]] = (FP16, SHARED_UPDATES)
    searched: ClassVar[tuple[Piece, ...]] = (
        Piece(
            "bucket_size",
            r"-\d+MiB|-one-bucket",
            lambda nbytes: "-one-bucket" if nbytes is None else f"-{nbytes // _MIB}MiB",
            lambda text: None if text == "-one-bucket" else f"{text[1:-3]} MiB",
        ),
    )
    tried_buckets_nbytes: ClassVar[tuple[int | None, ...]] = _BUCKETS
    """Bucket sizes that `tune` tries."""

    first_bucket_nbytes: Nbytes = Field(default=parts.FIRST_BUCKET_NBYTES, alias="first_bucket_size")
    bucket_nbytes: Nbytes | None = Field(default=parts.BUCKET_NBYTES, alias="bucket_size")
    """None: the whole gradient is one bucket, which overlaps with nothing."""
    compression: Literal["none", "fp16"] = "none"
    """`fp16`: gradients are sent in half precision. They are converted after their backward pass and back before the
    update."""
    parallel_optimizer: bool = False
    """Every rank computes the trust ratios of its share of the tensors. An all-gather distributes them.

    With L tensors, P ranks and t seconds for the ratios of all tensors, it saves t (1 - ceil(L/P) / L). It costs an
    all-gather of P ceil(L/P) numbers, which is all latency: (P - 1) alpha with a ring. It pays off if it saves more.

    Source:
        Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
        arXiv 2010.10458 (parallel tensor operator).
    """

    shared_update: Sharing = False
    """Every rank updates its slice of the parameters, and keeps the optimizer state of that slice only. Slices are then
    gathered. Gradients are reduce-scattered if the schedule has a place for that, so no more is sent than without.

    `true`: the slices are those of a node, as `n_slices` cuts them, or else one for each rank of the world. A number of
    consecutive ranks, or those of a `node`: each such group has all slices. Ranks with the same slice in different
    groups all-reduce its gradient.

    Source:
        Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054 (stage 1); Xu et al., Automatic Cross-Replica Sharding of
        Weight Update in Data-Parallel Training, arXiv 2004.13336. By degree: Megatron-LM,
        --num-distributed-optimizer-instances; InternLM/InternEvo, parallel.zero1.
    """
    updates_sent_by: Literal["all_gather", "broadcast"] = "all_gather"
    """How the ranks that share an update get all of it. `all_gather`: the slices of each bucket are gathered.
    `broadcast`: each rank in turn broadcasts its slice of all parameters. Gradients are then all-reduced, not
    reduce-scattered.

    Source:
        torch.distributed.optim.ZeroRedundancyOptimizer and InternEvo's HybridZeroOptimizer (`broadcast`). There each
        rank updates whole tensors, about as many elements as the others.
    """

    param_dtype: FloatType | None = None
    """With `shared_update`: type of the parameters that all ranks hold, and of gradients. Each rank also keeps its
    slice of the parameters in the workload's type, and updates that (mixed precision). If absent, there is one type.

    Source:
        Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 3.1.
    """

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return bucket sizes, precisions of sent gradients, and the sharing of updates."""
        whole_nbytes = sum(job.tensor_counts) * ITEM_NBYTES[job.dtype]
        sizes = [each for each in cls.tried_buckets_nbytes if each is None or each < whole_nbytes]
        found = [cls.axis("bucket_nbytes", sizes)]
        if job.dtype == "float32":
            found.append(cls.axis("compression", ("none", "fp16"), FP16))
        found += cls.sending_axes(job, allowed)
        if not OPTIMIZERS[job.optimizer].has_trust_ratios:
            found.append(cls.axis("shared_update", cls.tried_sharings(job), SHARED_UPDATES))
        return tuple(found)

    @classmethod
    def tried_sharings(cls, job: Job) -> tuple[Sharing, ...]:
        """Return the groups that may share an update in a search: none or all ranks by default."""
        return (False, True)

    @classmethod
    def sending_axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the settings of the kind's exchange that may vary; none by default."""
        return ()

    @abc.abstractmethod
    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Return the operations that average bucket `number` in place, after its backward pass; `sent` holds it."""

    def first_exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Return the operations of the first step after the warm-up; by default the same as in later steps."""
        return self.exchange(sent, number, job)

    def sent(self, grad: Buffer, job: Job) -> Buffer:
        """Return the buffer that is exchanged: the bucket, or its copy in half precision."""
        return self._in_wire_type(grad, job)

    def wire_dtype(self, job: Job) -> DType:
        """Return the type of sent numbers."""
        compresses = self.compression == "fp16" and ITEM_NBYTES[job.dtype] > ITEM_NBYTES["float16"]
        return "float16" if compresses else job.dtype

    @field_validator("shared_update", mode="before")
    @classmethod
    def _is_sharing(cls, value: object) -> object:
        if isinstance(value, bool) or value == _NODE:
            return value
        hint = "write true, false, node, or the number of ranks that share, 2 or more"
        try:
            n_ranks = parse_whole(value)
        except ValueError:
            raise ValueError(f"{shown(value)}: {hint}") from None
        if n_ranks < 2:
            raise ValueError(f"{n_ranks}: {hint}")
        return n_ranks

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what does not fit: ranks that cannot share an update, or an algorithm that cannot gather slices."""
        found = super().problems(shape)
        if not self.shared_update:
            hint = "it is for updates that ranks share: write shared_update: true, or leave it out"
            if self._is_broadcast:
                found.append(("updates_sent_by", f"{self.updates_sent_by}: {hint}"))
            if self.param_dtype:
                found.append(("param_dtype", f"{self.param_dtype}: {hint}"))
            return found
        size = self._sharers(shape).size
        own = self.n_slices(shape)
        if size == 1 < shape.world_size:
            found.append(("shared_update", "node: a node has one rank: write true, or a number of ranks"))
        elif shape.world_size % size:
            found.append(("shared_update", f"{size} does not divide the {shape.world_size} ranks"))
        elif own > 1 and size != own:
            found.append(("shared_update", f"{size}: the {own} ranks of a node share the exchange: write true"))
        return [*found, *parts.slicing_problems(self.algorithm)]

    def warms_up(self, step: int) -> bool:
        """Tell whether `step` all-reduces the gradients instead; by default no step does."""
        return False

    def n_slices(self, shape: Shape) -> int:
        """Return the number of equal slices of a bucket, which is padded to a multiple of it. 1 by default."""
        return 1

    def result(self, step: int, job: Job) -> Result:
        """Declare that every step averages gradients over the world."""
        return Result(gradients=Group(job.world_size), parameters=Group(1), micro_batches=job.micro_batches)

    def write(self, job: Job) -> Plan:
        """Write the plan.

        Raises:
            PlanError: `parallel_optimizer` is set, but the job's optimizer has no trust ratios.
        """
        for field, problem in self.workload_problems(job.optimizer):
            raise PlanError(f"plan {self.name}: {field}: {problem}")
        own_dtype = job.dtype
        job = replace(job, dtype=self.param_dtype or own_dtype)
        first_nbytes, nbytes = self.limits()
        buckets = parts.gradient_buckets(job, first_nbytes=first_nbytes, nbytes=nbytes)
        grads = parts.gradient_buffers(job, buckets, multiple=self._multiple(job))
        sent = [self.sent(grad, job) for grad in grads]
        warm = [self._in_wire_type(grad, job) for grad in grads]
        ways = {_WARM_UP: (warm, self._all_reduce), _FIRST: (sent, self.first_exchange), _USUAL: (sent, self.exchange)}
        exchanges = {
            way: [self._sharing(exchange(buffer, number, job), buffer, job) for number, buffer in enumerate(taken)]
            for way, (taken, exchange) in ways.items()
        }
        masters = self._masters(job, buckets, own_dtype)
        ends = {
            way: self._end(job, buckets, taken, exchanges[way], keeps=bool(masters)) for way, (taken, _) in ways.items()
        }
        after_warm_up = _USUAL if ends[_FIRST] == ends[_USUAL] else _FIRST
        params = self._params(job, buckets)

        def way(step: int) -> str:
            if self.warms_up(step):
                return _WARM_UP
            return after_warm_up if step == 0 or self.warms_up(step - 1) else _USUAL

        @cache
        def body(begins_like: int, way: str) -> Body:
            return (*parts.begin_step(job, begins_like, buckets, params), *ends[way])

        steps = (body(parts.begins_like(job, step), way(step)) for step in range(job.n_steps))
        warms_up = self.warms_up(0)
        halves = dict.fromkeys((*sent, *(warm if warms_up else ())))
        used = [*exchanges[_USUAL], *(exchanges[_WARM_UP] if warms_up else ())]
        buffers = (*self._buffers(job, buckets, tuple(halves), used), *masters)
        return Plan.from_steps(
            self.name, world_size=job.world_size, buffers=buffers, steps=steps, dataset=job.input_path.dataset
        )

    def workload_problems(self, optimizer: OptimizerName, *, has_rows: bool = True) -> list[tuple[str, str]]:
        """Return what does not fit: trust ratios that do not exist, or that a shared update cannot compute."""
        has_ratios = OPTIMIZERS[optimizer].has_trust_ratios
        if self.parallel_optimizer and not has_ratios:
            hint = "write workload.optimizer: lars, or leave it out"
            return [("parallel_optimizer", f"it shares the trust ratios of LARS; the optimizer is {optimizer}: {hint}")]
        if self.shared_update and has_ratios:
            hint = "which take norms of whole tensors, and slices have none: write parallel_optimizer: true instead"
            return [("shared_update", f"LARS has trust ratios, {hint}")]
        return []

    @property
    def traits(self) -> str:
        """Suffix of a default label: compression, and the work that ranks share."""
        return texts(self, GRADIENT_TRAITS)

    def limits(self) -> tuple[int, int]:
        """Return the sizes, in bytes, at which the first bucket and the others are closed."""
        if self.bucket_nbytes is None:
            return parts.WHOLE_MODEL_NBYTES, parts.WHOLE_MODEL_NBYTES
        return self.first_bucket_nbytes, self.bucket_nbytes

    def _raters(self, job: Job) -> Group:
        return Group(job.world_size if self.parallel_optimizer else 1)

    def _sharers(self, shape: Shape) -> Group:
        """Return the groups that share the update."""
        match self.shared_update:
            case False:
                return ALONE
            case True:
                n_slices = self.n_slices(shape)
                return Group(n_slices if n_slices > 1 else shape.world_size)
            case "node":
                return Group(shape.ranks_per_node)
            case n_ranks:
                return Group(n_ranks)

    @property
    def _is_broadcast(self) -> bool:
        return self.updates_sent_by == "broadcast"

    def _multiple(self, job: Job) -> int:
        sharers = ALONE if self._is_broadcast else self._sharers(job)
        return max(self.n_slices(job), sharers.size)

    def _params(self, job: Job, buckets: Sequence[parts.Bucket]) -> tuple[str, ...]:
        buffers = parts.param_buffers(job, buckets, self._sharers(job), in_one=self._is_broadcast)
        return tuple(buffer.name for buffer in buffers)

    def _masters(self, job: Job, buckets: Sequence[parts.Bucket], dtype: DType) -> tuple[Buffer, ...]:
        """Return the slices that ranks keep in a type of their own; none if parameters have that type."""
        sharers = self._sharers(job)
        if dtype == job.dtype or sharers == ALONE:
            return ()
        whole = parts.param_buffers(job, buckets, sharers, in_one=self._is_broadcast)
        return tuple(
            Buffer(f"{parts.MASTER}.{number}", each.count // sharers.size, dtype, initialized=True)
            for number, each in enumerate(whole)
        )

    def _sharing(self, exchange: Exchange, sent: Buffer, job: Job) -> Exchange:
        """Leave out the final gather of an exchange if the ranks that share the update need only their slices."""
        sharers = self._sharers(job)
        if sharers == ALONE or self._is_broadcast or not exchange.ops:
            return exchange
        *before, last = exchange.ops
        if isinstance(last, AllGather) and (last.dst, last.group) == (sent.name, sharers):
            shard = next(buffer for buffer in exchange.buffers if buffer.name == last.src)
            return replace(exchange, ops=tuple(before), shard=shard)
        if not isinstance(last, AllReduce) or before or last.servers is not None:
            return exchange
        if self.n_slices(job) == 1 or last.group == sharers:
            number = sent.name.split(".")[1]
            shard = Buffer(f"shard.{number}", sent.count // sharers.size, sent.dtype)
            scatter = ReduceScatter(sent.name, shard.name, sharers, algorithm=last.algorithm)
            groups = Group(job.world_size // sharers.size, stride=sharers.size)
            between = (AllReduce(shard.name, groups, algorithm=last.algorithm),) if groups.size > 1 else ()
            return replace(exchange, ops=(scatter, *between), buffers=(*exchange.buffers, shard), shard=shard)
        return exchange

    def _in_wire_type(self, grad: Buffer, job: Job) -> Buffer:
        """Return the bucket, or the buffer of its copy in the type that is sent."""
        dtype = self.wire_dtype(job)
        return grad if dtype == grad.dtype else replace(grad, name=grad.name.replace("grad", "half"), dtype=dtype)

    def _all_reduce(self, sent: Buffer, number: int, job: Job) -> Exchange:
        return Exchange((AllReduce(sent.name, Group(job.world_size), algorithm=self.algorithm),))

    def _buffers(
        self, job: Job, buckets: Sequence[parts.Bucket], sent: Sequence[Buffer], exchanges: Sequence[Exchange]
    ) -> tuple[Buffer, ...]:
        """Return all buffers: of training, of half-precision copies, and of the exchanges."""
        training = parts.training_buffers(
            job,
            buckets,
            multiple=self._multiple(job),
            raters=self._raters(job),
            sharers=self._sharers(job),
            in_one=self._is_broadcast,
        )
        halves = (buffer for buffer in sent if buffer not in training)
        shards = (each.shard for each in exchanges if each.shard and each.shard.dtype != job.dtype)
        wide = (replace(shard, name=_wide(shard), dtype=job.dtype) for shard in shards)
        return tuple(dict.fromkeys((*training, *halves, *(each for one in exchanges for each in one.buffers), *wide)))

    def _end(
        self,
        job: Job,
        buckets: Sequence[parts.Bucket],
        sent: Sequence[Buffer],
        exchanges: Sequence[Exchange],
        *,
        keeps: bool,
    ) -> Body:
        """Return the operations of a step from its last backward pass on."""
        ops: list[Op] = []
        finish: list[Op] = []
        grads: list[str] = []
        params = self._params(job, buckets)
        for number, (buffer, exchange) in enumerate(zip(sent, exchanges, strict=True)):
            grad = f"grad.{number}"
            is_copy = buffer.name != grad
            ops += parts.late_backward(job, buckets, number, job.micro_batches - 1, exchanges=True)
            ops.append(parts.bucket_backward(number, params, adds=job.micro_batches > 1))
            ops += [*([Copy(grad, buffer.name)] if is_copy else []), *exchange.ops]
            mean, taken = (exchange.shard.name, _wide(exchange.shard)) if exchange.shard else (buffer.name, grad)
            grads.append(taken if is_copy else mean)
            finish += [*exchange.finish, *([Copy(mean, taken)] if is_copy else [])]
        sharers = self._sharers(job)
        if sharers == ALONE:
            update = parts.optimize(job, buckets, raters=self._raters(job), algorithm=self.algorithm)
        else:
            algorithm = "broadcasts" if self._is_broadcast else self.algorithm
            update = parts.optimize_slices(job, tuple(grads), params, sharers, algorithm, keeps=keeps)
        return (*ops, *finish, *update)


def _wide(shard: Buffer) -> str:
    """Return the name of a slice's copy in the type of the parameters."""
    return f"{shard.name}.wide"
