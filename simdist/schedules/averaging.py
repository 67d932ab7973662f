"""Base of local and hierarchical SGD: a synchronous warm-up, then local steps and averages of parameters."""

import abc
from functools import cache

from pydantic import Field

from simdist.plan import Body, Group, Plan, Result
from simdist.schedules import parts
from simdist.schedules.base import Schedule
from simdist.schedules.job import Job
from simdist.settings.units import Whole

_LOOKED_AT_STEPS = 100_000  # to find an average; a longer period is meant
_LONGEST_PERIOD = 1_000  # that is found by looking


class AveragingSchedule(Schedule, abc.ABC):
    """Train locally, and average the parameters over a group where `average` says so."""

    warmup_steps: Whole = Field(default=0, ge=0)
    """First steps that run synchronous SGD instead."""
    phase: Whole | None = Field(default=None, ge=0)
    """Average where the step is `phase` modulo a period, instead of at the end of each period."""
    synchronize: bool = True
    """The host waits for its device before each average, as PyTorch's averagers do."""

    @abc.abstractmethod
    def average(self, step: int, job: Job) -> Group | None:
        """Return over whom the parameters are averaged at the end of a step; None if they are not."""

    def fires(self, period: int, step: int) -> bool:
        """Tell whether `step` is the last of a period, counted from the end of the warm-up.

        Some libraries average elsewhere: with a `phase`, at the steps after the warm-up that are `phase` modulo
        `period`. PyTorch's `HierarchicalModelAverager` has phase 0, its `PeriodicModelAverager` phase
        `warmup_steps % period`.
        """
        if step < self.warmup_steps:
            return False
        if self.phase is None:
            return (step - self.warmup_steps) % period == period - 1
        return step % period == self.phase % period

    def local_gradients(self, job: Job) -> Group | None:
        """Return over whom gradients are averaged in every step after the warm-up; by default None: they are not."""
        return None

    def cycle(self, job: Job) -> range:
        """Return the first period after the warm-up, as far as `average` shows it: of 1,000 steps at most."""
        first = self.warmup_steps
        groups = [self.average(first + step, job) for step in range(2 * _LONGEST_PERIOD)]
        periods = range(1, _LONGEST_PERIOD)
        period = next((each for each in periods if groups[each:] == groups[:-each]), _LONGEST_PERIOD)
        return range(first, first + period)

    def unused_settings(self, world_size: int, ranks_per_node: int, n_steps: int) -> list[str]:
        """Return whether it never averages over the world."""
        job = Job(world_size, ranks_per_node, n_steps, tensor_counts=(1,))
        if self.warmup_steps >= n_steps:
            return [f"warms up in all of the {n_steps} steps: it is synchronous SGD"]
        steps = range(self.warmup_steps, min(n_steps, self.warmup_steps + _LOOKED_AT_STEPS))
        if len(steps) == n_steps - self.warmup_steps and Group(world_size) not in {
            self.average(at, job) for at in steps
        }:
            return [f"never averages over all ranks in {n_steps} steps: their parameters part"]
        return []

    def write(self, job: Job) -> Plan:
        """Write the plan."""
        overlaps = self.warmup_steps > 0 or self.local_gradients(job) is not None
        limits = (parts.FIRST_BUCKET_NBYTES, parts.BUCKET_NBYTES) if overlaps else (parts.WHOLE_MODEL_NBYTES,) * 2
        buckets = parts.gradient_buckets(job, first_nbytes=limits[0], nbytes=limits[1])
        buffers = (*parts.training_buffers(job, buckets), parts.flat_buffer(job))

        @cache
        def body(begins_like: int, gradients: Group | None, average: Group | None) -> Body:
            return (
                *parts.begin_step(job, begins_like, buckets),
                *parts.last_backward(job, buckets, all_reduce=gradients, algorithm=self.algorithm),
                *parts.optimize(job, buckets),
                *(self._average(average) if average else ()),
            )

        steps = (
            body(parts.begins_like(job, step), self._gradients(step, job), self.average(step, job))
            for step in range(job.n_steps)
        )
        return Plan.from_steps(
            self.name, world_size=job.world_size, buffers=buffers, steps=steps, dataset=job.input_path.dataset
        )

    def _average(self, group: Group) -> Body:
        return parts.average_parameters(group, synchronize=self.synchronize, algorithm=self.algorithm)

    def result(self, step: int, job: Job) -> Result:
        """Declare whose gradients enter the update, and over whom the parameters are averaged then."""
        gradients, parameters = self._gradients(step, job) or Group(1), self.average(step, job) or Group(1)
        return Result(gradients, parameters, job.micro_batches)

    def _gradients(self, step: int, job: Job) -> Group | None:
        return Group(job.world_size) if step < self.warmup_steps else self.local_gradients(job)
