"""Synchronous SGD: gradients are averaged over all ranks in every step."""

from typing import Literal, final

from pydantic import Field

from simdist.plan import Group, Plan
from simdist.proof import Result
from simdist.schedules import parts
from simdist.schedules.base import Schedule
from simdist.schedules.job import Job
from simdist.units import Nbytes

__all__ = ["Sync"]


@final
class Sync(Schedule):
    """Average bucketed gradients over all ranks in every step; buckets overlap with the rest of the backward pass.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
    """

    kind: Literal["sync"] = "sync"
    first_bucket_nbytes: Nbytes = Field(default=parts.FIRST_BUCKET_NBYTES, alias="first_bucket_size")
    bucket_nbytes: Nbytes = Field(default=parts.BUCKET_NBYTES, alias="bucket_size")

    def default_label(self) -> str:
        """Return the label."""
        return "sync"

    def write(self, job: Job) -> Plan:
        """Write the plan."""
        world = Group(job.world_size)
        buckets = parts.gradient_buckets(job, first_nbytes=self.first_bucket_nbytes, nbytes=self.bucket_nbytes)
        end = (*parts.backward(buckets, all_reduce=world, algorithm=self.algorithm), *parts.optimize(job, buckets))
        steps = ((*parts.begin_step(job, step), *end) for step in range(job.n_steps))
        buffers = parts.training_buffers(job, buckets)
        return Plan.from_steps(self.name, world_size=job.world_size, buffers=buffers, steps=steps)

    def result(self, step: int, job: Job) -> Result:
        """Declare that every step averages gradients over the world."""
        return Result(gradients=Group(job.world_size), parameters=Group(1))
