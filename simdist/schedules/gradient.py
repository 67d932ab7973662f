"""Base of schedules that reduce gradients in every step: buckets, compression, and who computes trust ratios."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from pydantic import Field

from simdist.errors import PlanError
from simdist.plan import AllReduce, Body, Buffer, Copy, Group, Op, Plan, Result
from simdist.plan.plan import ITEM_NBYTES, DType
from simdist.schedules import parts
from simdist.schedules.base import Schedule
from simdist.schedules.job import Job
from simdist.settings.units import Nbytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """How one bucket is averaged over the world.

    Args:
        ops: Right after its backward pass. Those on the comm stream overlap with the backward pass of later buckets.
        finish: Before the update, after the backward pass of all buckets: what runs on the compute stream but waits for
            communication stands here, where it holds up no backward pass.
        buffers: Buffers of the operations beside the bucket.
    """

    ops: Body
    finish: Body = ()
    buffers: tuple[Buffer, ...] = ()


class GradientSchedule(Schedule, abc.ABC):
    """Average bucketed gradients over the world in every step; a subclass says how a bucket is averaged."""

    first_bucket_nbytes: Nbytes = Field(default=parts.FIRST_BUCKET_NBYTES, alias="first_bucket_size")
    bucket_nbytes: Nbytes | None = Field(default=parts.BUCKET_NBYTES, alias="bucket_size")
    """None: the whole gradient is one bucket, which overlaps with nothing."""
    compression: Literal["none", "fp16"] = "none"
    """`fp16`: what is sent is in half precision; gradients are converted after their backward pass and back before the
    update."""
    parallel_optimizer: bool = False
    """Every rank computes the trust ratios of its share of the tensors; an all-gather hands them round.

    With L tensors, P ranks and t seconds for the ratios of all tensors, it saves t (1 - ceil(L/P) / L), and costs an
    all-gather of P ceil(L/P) numbers, which is latency: (P - 1) alpha by a ring. It pays where it saves more.

    Source:
        Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
        arXiv 2010.10458 (parallel tensor operator).
    """

    @abc.abstractmethod
    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Say how bucket `number`, which `sent` holds after its backward pass, is averaged in place over the world."""

    def sent(self, grad: Buffer, job: Job) -> Buffer:
        """Return the buffer that is exchanged: the bucket, or its copy in half precision."""
        return self._in_wire_type(grad, job)

    def wire_dtype(self, job: Job) -> DType:
        """Return the type of the numbers that are sent."""
        compresses = self.compression == "fp16" and ITEM_NBYTES[job.dtype] > ITEM_NBYTES["float16"]
        return "float16" if compresses else job.dtype

    def unused_settings(self, world_size: int, ranks_per_node: int, n_steps: int) -> list[str]:
        """Return which settings have no effect: the size of a first bucket that is all, or ratios shared by one."""
        found = super().unused_settings(world_size, ranks_per_node, n_steps)
        if self.bucket_nbytes is None and self.first_bucket_nbytes != parts.FIRST_BUCKET_NBYTES:
            found.append("has one bucket, the whole gradient: a size of the first bucket has no effect")
        if self.parallel_optimizer and world_size == 1:
            found.append("has one rank, which computes all trust ratios: parallel_optimizer has no effect")
        return found

    def warms_up(self, step: int) -> bool:
        """Tell whether the gradients of `step` are all-reduced instead; by default none are."""
        return False

    def n_slices(self, job: Job) -> int:
        """Return into how many equal slices buckets are cut; they are padded to a multiple of it. 1 by default."""
        return 1

    def result(self, step: int, job: Job) -> Result:
        """Declare that every step averages gradients over the world."""
        return Result(gradients=Group(job.world_size), parameters=Group(1), micro_batches=job.micro_batches)

    def write(self, job: Job) -> Plan:
        """Write the plan.

        Raises:
            PlanError: `parallel_optimizer` is set, and the job's optimizer computes no trust ratios.
        """
        for field, problem in self.optimizer_problems(job.optimizer):
            raise PlanError(f"plan {self.name}: {field}: {problem}")
        first_nbytes, nbytes = self.limits()
        buckets = parts.gradient_buckets(job, first_nbytes=first_nbytes, nbytes=nbytes)
        grads = parts.gradient_buffers(job, buckets, multiple=self.n_slices(job))
        sent = [self.sent(grad, job) for grad in grads]
        exchanges = [self.exchange(buffer, number, job) for number, buffer in enumerate(sent)]
        end = self._end(job, buckets, sent, exchanges)
        warm = [self._in_wire_type(grad, job) for grad in grads]
        warm_end = self._end(job, buckets, warm, [self._all_reduce(buffer, job) for buffer in warm])

        @cache
        def body(begins_like: int, warms_up: bool) -> Body:
            return (*parts.begin_step(job, begins_like, buckets), *(warm_end if warms_up else end))

        steps = (body(parts.begins_like(job, step), self.warms_up(step)) for step in range(job.n_steps))
        halves = dict.fromkeys((*sent, *(warm if self.warms_up(0) else ())))
        buffers = self._buffers(job, buckets, tuple(halves), exchanges)
        return Plan.from_steps(
            self.name, world_size=job.world_size, buffers=buffers, steps=steps, dataset=job.input_path.dataset
        )

    def optimizer_problems(self, optimizer: str) -> list[tuple[str, str]]:
        """Return `(field, what is wrong)` for parameters that do not fit the job's optimizer."""
        if self.parallel_optimizer and optimizer != "lars":
            hint = "write workload.optimizer: lars, or leave it out"
            return [("parallel_optimizer", f"it shares the trust ratios of LARS; the optimizer is {optimizer}: {hint}")]
        return []

    @property
    def traits(self) -> str:
        """Suffix of a default label: compression and the parallel optimizer."""
        return ("-fp16" if self.compression == "fp16" else "") + ("-pto" if self.parallel_optimizer else "")

    def limits(self) -> tuple[int, int]:
        """Return the sizes, in bytes, that close the first bucket and the others."""
        if self.bucket_nbytes is None:
            return parts.WHOLE_MODEL_NBYTES, parts.WHOLE_MODEL_NBYTES
        return self.first_bucket_nbytes, self.bucket_nbytes

    def _raters(self, job: Job) -> Group:
        return Group(job.world_size if self.parallel_optimizer else 1)

    def _in_wire_type(self, grad: Buffer, job: Job) -> Buffer:
        """Return the bucket, or the buffer for its copy in the type of what is sent."""
        dtype = self.wire_dtype(job)
        return grad if dtype == grad.dtype else replace(grad, name=grad.name.replace("grad", "half"), dtype=dtype)

    def _all_reduce(self, sent: Buffer, job: Job) -> Exchange:
        return Exchange((AllReduce(sent.name, Group(job.world_size), algorithm=self.algorithm),))

    def _buffers(
        self, job: Job, buckets: Sequence[parts.Bucket], sent: Sequence[Buffer], exchanges: Sequence[Exchange]
    ) -> tuple[Buffer, ...]:
        """Return all buffers: those of training, halves, and those of the exchanges."""
        training = parts.training_buffers(job, buckets, multiple=self.n_slices(job), raters=self._raters(job))
        halves = (buffer for buffer in sent if buffer not in training)
        return (*training, *halves, *(buffer for each in exchanges for buffer in each.buffers))

    def _end(
        self, job: Job, buckets: Sequence[parts.Bucket], sent: Sequence[Buffer], exchanges: Sequence[Exchange]
    ) -> Body:
        """Return a step from its last backward pass on."""
        ops: list[Op] = []
        finish: list[Op] = []
        for number, (buffer, exchange) in enumerate(zip(sent, exchanges, strict=True)):
            grad = f"grad.{number}"
            is_copy = buffer.name != grad
            ops.append(parts.bucket_backward(number, adds=job.micro_batches > 1))
            ops += [*([Copy(grad, buffer.name)] if is_copy else []), *exchange.ops]
            finish += [*exchange.finish, *([Copy(buffer.name, grad)] if is_copy else [])]
        update = parts.optimize(job, buckets, raters=self._raters(job), algorithm=self.algorithm)
        return (*ops, *finish, *update)
