"""What schedules share that reduce gradients in every step: buckets, compression, and who computes trust ratios."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from simdist.errors import PlanError
from simdist.plan import AllReduce, Backward, Body, Buffer, Copy, Group, Op, Plan
from simdist.plan.plan import ITEM_NBYTES
from simdist.proof import Result
from simdist.schedules import parts
from simdist.schedules.base import Schedule
from simdist.schedules.job import Job
from simdist.units import Nbytes

__all__ = ["Exchange", "GradientSchedule"]

_WHOLE_MODEL_NBYTES = 2**62  # one bucket


@dataclass(frozen=True, slots=True)
class Exchange:
    """How one bucket is averaged over the world.

    Args:
        ops: Right after its backward pass. Those on the comm stream overlap with the backward pass of later buckets.
        finish: Before the update, after the backward pass of all buckets: what runs on the compute stream but waits for
            communication stands here, where it holds up no backward pass.
        buffers: What the operations need beside the bucket.
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
    """`fp16`: gradients are copied to half precision after their backward pass, and back before the update."""
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

    def warms_up(self, step: int) -> bool:
        """Tell whether the gradients of `step` are all-reduced instead; by default none are."""
        return False

    def n_slices(self, job: Job) -> int:
        """Return into how many equal slices buckets are cut; they are padded to a multiple of it. 1 by default."""
        return 1

    def result(self, step: int, job: Job) -> Result:
        """Declare that every step averages gradients over the world."""
        return Result(gradients=Group(job.world_size), parameters=Group(1))

    def write(self, job: Job) -> Plan:
        """Write the plan.

        Raises:
            PlanError: `parallel_optimizer` is set, and the job's optimizer computes no trust ratios.
        """
        for field, problem in self.optimizer_problems(job.optimizer):
            raise PlanError(f"plan {self.name}: {field}: {problem}")
        first_nbytes, nbytes = self.limits()
        buckets = parts.gradient_buckets(job, first_nbytes=first_nbytes, nbytes=nbytes)
        sent = [self._sent(grad, job) for grad in parts.gradient_buffers(job, buckets, multiple=self.n_slices(job))]
        exchanges = [self.exchange(buffer, number, job) for number, buffer in enumerate(sent)]
        end = self._end(job, buckets, sent, exchanges)
        warm_end = self._end(job, buckets, sent, [self._all_reduce(buffer, job) for buffer in sent])
        steps = (
            (*parts.begin_step(job, step), *(warm_end if self.warms_up(step) else end)) for step in range(job.n_steps)
        )
        buffers = self._buffers(job, buckets, sent, exchanges)
        return Plan.from_steps(self.name, world_size=job.world_size, buffers=buffers, steps=steps)

    def optimizer_problems(self, optimizer: str) -> list[tuple[str, str]]:
        """Return `(field, what is wrong)` for parameters that do not fit the job's optimizer."""
        if self.parallel_optimizer and optimizer != "lars":
            hint = "write workload.optimizer: lars, or leave it out"
            return [("parallel_optimizer", f"it shares the trust ratios of LARS; the optimizer is {optimizer}: {hint}")]
        return []

    @property
    def traits(self) -> str:
        """What is added to a default label for compression and the parallel optimizer."""
        return ("-fp16" if self.compression == "fp16" else "") + ("-pto" if self.parallel_optimizer else "")

    def limits(self) -> tuple[int, int]:
        """Return the sizes, in bytes, that close the first bucket and the others."""
        if self.bucket_nbytes is None:
            return _WHOLE_MODEL_NBYTES, _WHOLE_MODEL_NBYTES
        return self.first_bucket_nbytes, self.bucket_nbytes

    def _raters(self, job: Job) -> Group:
        return Group(job.world_size if self.parallel_optimizer else 1)

    def _sent(self, grad: Buffer, job: Job) -> Buffer:
        """Return the buffer that is communicated: the bucket, or its copy in half precision."""
        if self.compression == "none" or ITEM_NBYTES[job.dtype] <= ITEM_NBYTES["float16"]:
            return grad
        return replace(grad, name=grad.name.replace("grad", "half"), dtype="float16")

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
        """Return a step from the backward pass on."""
        ops: list[Op] = []
        finish: list[Op] = []
        for number, (buffer, exchange) in enumerate(zip(sent, exchanges, strict=True)):
            grad = f"grad.{number}"
            is_copy = buffer.name != grad
            ops += [Backward(("param", "activations"), grad), *([Copy(grad, buffer.name)] if is_copy else [])]
            ops += exchange.ops
            finish += [*exchange.finish, *([Copy(buffer.name, grad)] if is_copy else [])]
        update = parts.optimize(job, buckets, raters=self._raters(job), algorithm=self.algorithm)
        return (*ops, *finish, *update)
