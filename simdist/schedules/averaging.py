"""What local and hierarchical SGD share: a synchronous warm-up, then local steps and averages of parameters."""

from collections.abc import Callable

from simdist.plan import Body, Group, Plan
from simdist.proof import Result
from simdist.schedules import parts
from simdist.schedules.job import Job

__all__ = ["averaging_plan", "averaging_result"]

Average = Callable[[int, Job], Group | None]

_FIRST_BUCKET_NBYTES = 1024**2
_BUCKET_NBYTES = 25 * 1024**2


def averaging_plan(
    name: str, job: Job, average: Average, *, own_gradients: Group | None, warmup_steps: int, synchronize: bool
) -> Plan:
    """Write a plan that averages parameters where `average` says so.

    Args:
        name: The plan's name.
        job: The job.
        average: Over whom the parameters are averaged at the end of a step; None for nobody.
        own_gradients: Over whom gradients are averaged in every step after the warm-up; None for nobody.
        warmup_steps: First steps that average gradients over the world instead.
        synchronize: The host waits for its device before each average.
    """
    buckets: tuple[parts.Bucket, ...] = ((0, len(job.tensor_counts)),)
    if warmup_steps or own_gradients:
        buckets = parts.gradient_buckets(job, first_nbytes=_FIRST_BUCKET_NBYTES, nbytes=_BUCKET_NBYTES)

    def step_body(step: int) -> Body:
        gradients = Group(job.world_size) if step < warmup_steps else own_gradients
        group = average(step, job)
        end = parts.average_parameters(group, synchronize=synchronize) if group else ()
        return (
            *parts.begin_step(job, step),
            *parts.backward(buckets, all_reduce=gradients),
            parts.optimize(buckets),
            *end,
        )

    buffers = (*parts.training_buffers(job, buckets), parts.flat_buffer(job))
    return Plan.from_steps(
        name, world_size=job.world_size, buffers=buffers, steps=(step_body(step) for step in range(job.n_steps))
    )


def averaging_result(
    step: int, job: Job, average: Average, *, own_gradients: Group | None, warmup_steps: int
) -> Result:
    """Declare what a step of `averaging_plan` leaves behind."""
    gradients = Group(job.world_size) if step < warmup_steps else own_gradients
    return Result(gradients=gradients or Group(1), parameters=average(step, job) or Group(1))
