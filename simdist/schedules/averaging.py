"""Base of local and hierarchical SGD and DiLoCo: a synchronous warm-up, then local steps and parameter averages."""

import abc
from collections.abc import Mapping
from functools import cache
from typing import ClassVar, NamedTuple, TypeAlias

from pydantic import Field

from simdist.plan import Body, Buffer, Enter, Group, Lane, Plan, Result
from simdist.plan.lanes import AVERAGE, COMM
from simdist.schedules import parts
from simdist.schedules.base import Schedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import Piece, piece, texts
from simdist.schedules.tuning import OVERLAP, Allowance, Axis, Permit
from simdist.settings.units import Whole

_LOOKED_AT_STEPS = 100_000  # steps searched for an average: a longer period is intended
_LONGEST_PERIOD = 1_000  # of the periods that `cycle` finds
_OVERLAPS = (0, 1, 2, 4)  # overlaps that `tune` tries

AVERAGING_TRAITS: tuple[Piece, ...] = (piece("overlap_steps", before="-overlap", default=0),)

_Average: TypeAlias = tuple[Group, int]  # the group, and the number of the model's fragment


class Turn(NamedTuple):
    """What ranks exchange at the end of a step, after their updates.

    Args:
        sent: The average that is sent.
        taken: The average that parameters are set to.
        ends_warmup: The step is the last of the warm-up.
    """

    sent: _Average | None
    taken: _Average | None
    ends_warmup: bool


class AveragingSchedule(Schedule, abc.ABC):
    """Train locally, and average the parameters over a group in the steps that `average` gives."""

    warmup_steps: Whole = Field(default=0, ge=0)
    """First steps, which run synchronous SGD instead."""
    phase: Whole | None = Field(default=None, ge=0)
    """Average in steps that are `phase` modulo a period, instead of at the end of each period."""
    synchronize: bool = True
    """The host waits for its device before each average, as PyTorch's averagers do."""

    overlap_steps: Whole = Field(default=0, ge=0)
    """Overlap an average with this many next steps: it is sent at the same step, and applied that much later."""

    permits: ClassVar[tuple[Permit, ...]] = (OVERLAP,)

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the numbers of steps that averages may overlap with."""
        return (*super().axes(job, allowed), cls.axis("overlap_steps", _OVERLAPS, OVERLAP))

    @abc.abstractmethod
    def average(self, step: int, shape: Shape) -> Group | None:
        """Return the group that averages parameters at the end of a step; None if none does."""

    def absent(self, step: int, job: Job) -> tuple[int, ...]:
        """Return the ranks that sit out a step, none by default. In steps with an exchange, no rank may sit out."""
        return ()

    def fires(self, period: int, step: int) -> bool:
        """Tell whether `step` is the last of a period, counted from the end of the warm-up.

        Some libraries average elsewhere. With a `phase`, these are the steps after the warm-up that are `phase` modulo
        `period`. PyTorch's `HierarchicalModelAverager` has phase 0. Its `PeriodicModelAverager` has phase
        `warmup_steps % period`.
        """
        if step < self.warmup_steps:
            return False
        if self.phase is None:
            return (step - self.warmup_steps) % period == period - 1
        return step % period == self.phase % period

    def local_gradients(self, job: Job) -> Group | None:
        """Return the group that averages gradients in every step after the warm-up; by default None: none does."""
        return None

    def fragment(self, step: int) -> int:
        """Return the number of the fragment that is averaged at a step. By default the whole model is one fragment."""
        return 0

    def cycle(self, job: Job) -> range:
        """Return the first period after the warm-up by the groups of `average`: at most 1,000 steps."""
        first = self.warmup_steps
        groups = [self.average(first + step, job) for step in range(2 * _LONGEST_PERIOD)]
        periods = range(1, _LONGEST_PERIOD)
        period = next((each for each in periods if groups[each:] == groups[:-each]), _LONGEST_PERIOD)
        return self._repeated(period, job)

    def _repeated(self, period: int, job: Job) -> range:
        """Return the first steps of that period after the warm-up in which averages are both sent and applied."""
        first = self.warmup_steps
        if self.overlap_steps:
            first_sent = next(step for step in range(first, first + period) if self.average(step, job))
            first = max(first + self.overlap_steps, first_sent)
        return range(first, first + period)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what is wrong on this cluster: averages that are applied after the next one has begun."""
        found = super().problems(shape)
        if self.overlap_steps > (shortest := self.shortest_period()):
            problem = (
                f"{self.overlap_steps} steps, and the next average begins after {shortest}: write at most {shortest}"
            )
            found.append(("overlap_steps", problem))
        return found

    def shortest_period(self) -> int:
        """Return the fewest steps between two averages of the same parameters. Practically unlimited by default."""
        return _LOOKED_AT_STEPS

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return a sentence if it never averages over the world."""
        if self.warmup_steps >= shape.n_steps:
            return [f"warms up in all of the {shape.n_steps} steps: it is synchronous SGD"]
        n_taken = shape.n_steps - self.overlap_steps
        steps = range(self.warmup_steps, min(n_taken, self.warmup_steps + _LOOKED_AT_STEPS))
        if len(steps) >= n_taken - self.warmup_steps and Group(shape.world_size) not in {
            self.average(at, shape) for at in steps
        }:
            return [f"never averages over all ranks in {shape.n_steps} steps: their parameters part"]
        return []

    def write(self, job: Job) -> Plan:
        """Write the plan."""
        overlaps = self.warmup_steps > 0 or self.local_gradients(job) is not None
        limits = (parts.FIRST_BUCKET_NBYTES, parts.BUCKET_NBYTES) if overlaps else (parts.WHOLE_MODEL_NBYTES,) * 2
        buckets = parts.gradient_buckets(job, first_nbytes=limits[0], nbytes=limits[1])
        params = self._parameters(job)
        buffers = (*parts.training_buffers(job, buckets, params=params), *self.exchange_buffers(job))
        names = tuple(params)

        @cache
        def body(begins_like: int, gradients: Group | None, turn: Turn, absent: tuple[int, ...]) -> Body:
            return (
                *((Enter(absent),) if absent else ()),
                *parts.begin_step(job, begins_like, buckets, names),
                *parts.last_backward(job, buckets, names, all_reduce=gradients, algorithm=self.algorithm),
                *parts.optimize(job, buckets, names),
                *self.exchange(turn, job),
            )

        steps = (
            body(parts.begins_like(job, step), self.gradients(step, job), self.turn(step, job), self.absent(step, job))
            for step in range(job.n_steps)
        )
        return Plan.from_steps(
            self.name, world_size=job.world_size, buffers=buffers, steps=steps, dataset=job.input_path.dataset
        )

    def turn(self, step: int, job: Job) -> Turn:
        """Return what ranks exchange at the end of a step."""
        taken = self._average(step - self.overlap_steps, job)
        return Turn(self._average(step, job), taken, step == self.warmup_steps - 1)

    def exchange(self, turn: Turn, job: Job) -> Body:
        """Return the operations of an exchange. They read and write the buffers of parameters, `param` or `param.N`."""
        send = self._send(*turn.sent, job) if turn.sent else ()
        take = self._take(turn.taken[1], job) if turn.taken else ()
        return (
            *(self._end_warmup(job) if turn.ends_warmup else ()),
            *((*take, *send) if self.overlap_steps else (*send, *take)),
        )

    def exchange_buffers(self, job: Job) -> tuple[Buffer, ...]:
        """Return the buffers of exchanges, beside those of parameters."""
        return parts.flat_buffers(job, self._pieces(0, job), late=self.overlap_steps > 0)

    def gradients(self, step: int, job: Job) -> Group | None:
        """Return the group that averages gradients in a step; None if none does."""
        return Group(job.world_size) if step < self.warmup_steps else self.local_gradients(job)

    def _average(self, step: int, job: Job) -> _Average | None:
        """Return the average that is sent at a step."""
        group = self.average(step, job) if step >= 0 else None
        return (group, self.fragment(step)) if group else None

    def _parameters(self, job: Job) -> Mapping[str, parts.Bucket]:
        """Return the buffers of parameters, each with the tensors that it holds."""
        n_tensors = len(job.tensor_counts)
        if job.has_param_buffers:
            return {f"{parts.PARAM}.{tensor}": (tensor, tensor + 1) for tensor in range(n_tensors)}
        return {parts.PARAM: (0, n_tensors)}

    def _pieces(self, fragment: int, job: Job) -> dict[str, parts.Bucket]:
        """Return the tensors of a fragment by the suffixes of their buffers' names."""
        return {name.removeprefix(parts.PARAM): tensors for name, tensors in self._parameters(job).items()}

    def _send(self, group: Group, fragment: int, job: Job) -> Body:
        return parts.send_parameters(
            tuple(self._pieces(fragment, job)),
            group,
            late=self.overlap_steps > 0,
            lane=self._lane(job),
            synchronize=self.synchronize,
            algorithm=self.algorithm,
        )

    def _lane(self, job: Job) -> Lane:
        """Return the lane of averages: their own lane if gradients are exchanged while averages are in flight."""
        return AVERAGE if self.overlap_steps > 0 and self.local_gradients(job) is not None else COMM

    def _take(self, fragment: int, job: Job) -> Body:
        return parts.take_parameters(tuple(self._pieces(fragment, job)), late=self.overlap_steps > 0)

    def _end_warmup(self, job: Job) -> Body:
        return ()

    def result(self, step: int, job: Job) -> Result:
        """Declare the group of the gradients that enter the update, and the group that then averages parameters."""
        gradients = self.gradients(step, job) or Group(1)
        taken = self._average(step - self.overlap_steps, job)
        if taken is None:
            return Result(gradients, Group(1), job.micro_batches, absent=self.absent(step, job))
        return Result(gradients, taken[0], job.micro_batches, self.overlap_steps)

    @property
    def traits(self) -> str:
        """Suffix of a default label: overlapped averages."""
        return texts(self, AVERAGING_TRAITS)
