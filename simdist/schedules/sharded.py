"""Base of schedules that shard the model: each rank keeps a slice of every unit and gathers the unit to use it.

The order of operations and what each of them waits for are those of PyTorch's FSDP2 (`fully_shard`), read in torch
2.13, `torch/distributed/fsdp/_fully_shard`. Streams wait for events there, and lanes wait for buffers here (`Wait`).
"""

import abc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import ClassVar, Literal, Self, TypeAlias, get_args

from pydantic import Field, field_validator

from simdist.errors import PlanError
from simdist.plan import Body, Buffer, Group, Lane, Op, Plan, Result, copies, ops
from simdist.plan.lanes import COMM, COMPUTE
from simdist.plan.ops import ALONE
from simdist.plan.optimizers import OPTIMIZERS, OptimizerName
from simdist.plan.plan import ITEM_NBYTES, DType
from simdist.schedules import parts
from simdist.schedules.averaging import AveragingSchedule, Turn
from simdist.schedules.base import Schedule
from simdist.schedules.job import FloatType, Job, Shape
from simdist.schedules.labels import Piece, piece, texts
from simdist.schedules.sync import Sync
from simdist.schedules.tuning import SHARDING, Allowance, Axis, ChangedSettings, Levels, Permit
from simdist.schedules.units import ModelUnit
from simdist.settings.base import unchecked_copy
from simdist.settings.units import Whole, parse_whole

#: Where slices are copied together before they are gathered, beside the gathers on the wire.
COPY_IN = Lane("copy in", "comm", "copy in")
#: Reduce-scatters, if they have a communicator of their own.
_REDUCE = Lane("reduce", "comm", "reduce")
#: Sums and conversions of reduced slices, beside the reduce-scatters on the wire.
_SUM = Lane("sum", "comm", "sum")
#: Gathers of the backward pass among some of the ranks that share a unit.
_REGATHER = Lane("regather", "comm", "regather")
#: All-reduces between replicas.
_REPLICATE = Lane("replicate", "comm", "replicate")

_Reshard: TypeAlias = bool | int | None
SHARDED_TRAITS: tuple[Piece, ...] = (
    piece("param_dtype", [(each, f"-{each}") for each in get_args(FloatType)]),
    piece("reshard_after_forward", [(False, "-keep"), (True, "-reshard")], before="-reshard-"),
    piece("wrap", [("blocks", "-root")]),
    piece("accumulation", [("local", "-local")]),
    piece("communicators", [(2, "-2-comms")]),
    piece("blocking", [(True, "-blocking")]),
)


class ShardedSchedule(Schedule, abc.ABC):
    """Shard parameters, gradients and optimizer state; gather each unit for its forward and its backward pass.

    Subclasses say how many ranks share a copy of the model, and what the copies exchange.

    Source:
        Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, arXiv 2304.11277;
        Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054.
    """

    shards: ClassVar[bool] = True
    permit: ClassVar[Permit | None] = SHARDING

    reshard_after_forward: _Reshard = None
    """`true` frees units after their forward pass and gathers them again (ZeRO-3). `false` keeps them (ZeRO-2). A
    number keeps a slice for that many ranks, among which they are gathered again (hpZ of ZeRO++). By default all but
    the root are freed."""
    wrap: Literal["all", "blocks"] = "all"
    """`all`: what stands before and after the blocks are units of their own. `blocks`: they form the root, which is
    gathered first, reduced last and kept."""
    keep_last_unit: bool = False
    """Keep the last unit after its forward pass, because its backward pass comes next."""
    forward_prefetch: Whole = Field(default=1, ge=1)
    """Units that are gathered ahead in the forward pass, beside the one that is copied out next."""
    backward_prefetch: Whole = Field(default=1, ge=1)
    """Units that are gathered ahead in the backward pass."""
    reduce_buffers: Whole = Field(default=1, ge=1)
    """Inputs of reduce-scatters that may wait to be sent."""
    communicators: Literal[1, 2] = 1
    """With one, gathers and reduce-scatters queue on the wire."""
    accumulation: Literal["reduce", "local"] = "reduce"
    """With several micro-batches, `reduce` reduce-scatters gradients in each of them. `local` adds up whole gradients
    and reduce-scatters them in the last one."""
    reshard_after_backward: bool = True
    """Free units after the backward pass of every micro-batch, not of the last one only."""
    param_dtype: FloatType | None = None
    """Type of gathered parameters and of their gradients; that of the workload if absent."""
    reduce_dtype: FloatType | None = None
    """Type in which gradients are reduced; `param_dtype` if absent."""
    blocking: bool = False
    """The host waits for each operation before the next one, as on CPUs: no communication is hidden."""

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return when units are freed and gathered, in which type, and when micro-batches reduce their gradients."""
        axes = [
            cls.axis("reshard_after_forward", (None, False)),
            cls.axis("forward_prefetch", (1, 2)),
            cls.axis("backward_prefetch", (1, 2)),
        ]
        if job.compute_dtype and ITEM_NBYTES[job.compute_dtype] < ITEM_NBYTES[job.dtype]:
            axes.append(cls.axis("param_dtype", (None, job.compute_dtype)))
        if job.micro_batches > 1:
            axes.append(cls.axis("accumulation", ("reduce", "local")))
        return tuple(axes)

    @classmethod
    def settings_of(cls, levels: Levels, changed: ChangedSettings) -> dict[str, object] | None:
        """Return the settings of a candidate. If it gathers a shorter type, it still reduces gradients in float32."""
        settings = super().settings_of(levels, changed)
        if settings is None or "param_dtype" not in settings:
            return settings
        return {"reduce_dtype": "float32"} | settings

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _is_whole(cls, value: object) -> object:
        if value is None or isinstance(value, bool):
            return value
        n_ranks = parse_whole(value)
        if n_ranks < 1:
            raise ValueError(f"{n_ranks} ranks keep a unit: write true, false, or 1 and more")
        return n_ranks

    @property
    def traits(self) -> str:
        """Suffix of a default label: the settings that decide when units are gathered."""
        return texts(self, SHARDED_TRAITS)

    @abc.abstractmethod
    def sharers(self, world_size: int) -> int:
        """Return the number of ranks that share a copy of the model."""

    @abc.abstractmethod
    def between_copies(self) -> Sync | AveragingSchedule:
        """Return what copies of the model exchange, as a schedule in which each copy is a rank.

        It averages gradients once a step, also if a step has several micro-batches.
        """

    def all_reduces(self, job: Job, micro_batch: int) -> bool:
        """Tell whether copies that average gradients do so in a micro-batch of a step."""
        return True

    def of_copies(self, job: Job) -> Job:
        """Return the job as copies of the model see it: a rank is a copy, and a tensor is its slice of a unit."""
        n_sharers = self.sharers(job.world_size)
        return replace(
            job,
            world_size=job.world_size // n_sharers,
            ranks_per_node=max(1, job.ranks_per_node // n_sharers),
            tensor_counts=tuple(self.units_of(job).slice_counts()),
            tensor_rows=(),
            tensor_backward_s=(),
            speeds=(),
            units=(),
            has_param_buffers=True,
        )

    def most_gathered_nbytes(self, job: Job) -> int:
        """Return the bytes of the largest unit, which the ranks that share a copy gather at once."""
        dtype = self.param_dtype or job.dtype
        counts = (sum(job.tensor_counts[unit.first : unit.last]) for unit in self.units_of(job).units)
        return max(counts) * ITEM_NBYTES[dtype]

    def of_one_copy(self) -> Self:
        """Return the same schedule without label, and without averages between copies, if it has any."""
        return unchecked_copy(self, label="")

    def cycle(self, job: Job) -> range:
        """Return the first period of what copies exchange."""
        return self.between_copies().cycle(self.of_copies(job))

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what does not fit: numbers of ranks that do not divide, algorithms that cannot gather."""
        found = [*super().problems(shape), *parts.slicing_problems(self.algorithm)]
        n_sharers = self.sharers(shape.world_size)
        kept = self.reshard_after_forward
        if isinstance(kept, int) and not isinstance(kept, bool) and n_sharers % kept:
            found.append(("reshard_after_forward", f"{kept} does not divide the {n_sharers} ranks that share a unit"))
        return found

    def workload_problems(self, optimizer: OptimizerName, *, has_rows: bool = True) -> list[tuple[str, str]]:
        """Return what does not fit: trust ratios are norms of whole tensors, and ranks have slices."""
        if OPTIMIZERS[optimizer].has_trust_ratios:
            return [("kind", "LARS takes norms of whole tensors, and ranks have slices: write workload.optimizer: sgd")]
        return []

    def result(self, step: int, job: Job) -> Result:
        """Declare the group of the gradients that enter the update, and the group that then averages parameters."""
        n_sharers = self.sharers(job.world_size)
        if n_sharers == 1:
            return Result(Group(job.world_size), Group(1), job.micro_batches)
        units = self.units_of(job).units
        of_copies = self.between_copies().result(step, self.of_copies(job))
        gradients = Group(of_copies.gradients.size * n_sharers)
        tensors = tuple((units[first].first, units[last - 1].last) for first, last in of_copies.tensors)
        averages = of_copies.parameters.size > 1
        parameters = of_copies.parameters.of_whole_copies(n_sharers) if averages else ALONE
        return replace(of_copies, gradients=gradients, parameters=parameters, tensors=tensors)

    def write(self, job: Job) -> Plan:
        """Write the plan. If a unit has one rank, nothing is gathered, and the plan is that of `sync`.

        Raises:
            PlanError: The job's optimizer needs whole tensors.
        """
        n_sharers = self.sharers(job.world_size)
        if n_sharers == 1:
            return unchecked_copy(Sync(), label=self.name, algorithm=self.algorithm).write(job)
        for field_name, problem in self.workload_problems(job.optimizer):
            raise PlanError(f"plan {self.name}: {field_name}: {problem}")
        shards = self.units_of(job)

        between = self.between_copies()
        of_copies = self.of_copies(job)
        averaging = between if isinstance(between, AveragingSchedule) else None
        own_body = _bodies(self.of_one_copy(), job)

        @cache
        def body(begins_like: int, gradients: Group, turn: Turn | None) -> Body:
            step = own_body(begins_like, shards.replicas(gradients))
            return (*step, *shards.exchange(averaging, turn, of_copies)) if averaging and turn else step

        def of_step(step: int) -> Body:
            result = between.result(step, of_copies)
            if result.absent:
                raise PlanError(f"plan {self.name}: copies sit out step {step}, whose ranks wait for one another")
            turn = averaging.turn(step, of_copies) if averaging else None
            return body(parts.begins_like(job, step), result.gradients, turn)

        steps = map(of_step, range(job.n_steps))
        buffers = [*shards.buffers(), *parts.loss_buffers(job), *parts.input_buffers(job)]
        if averaging:
            buffers += map(shards.of_slices, averaging.exchange_buffers(of_copies))
        return Plan.from_steps(
            self.name, world_size=job.world_size, buffers=tuple(buffers), steps=steps, dataset=job.input_path.dataset
        )

    def units_of(self, job: Job) -> "_Shards":
        """Return the units of the job's model, and how ranks share them."""
        units = job.units or (ModelUnit(0, len(job.tensor_counts), is_block=False),)
        has_blocks = any(unit.is_block for unit in units)
        in_root = self.wrap == "blocks" and has_blocks
        return _Shards(
            job,
            self,
            units,
            root=tuple(number for number, unit in enumerate(units) if in_root and not unit.is_block),
            n_sharers=self.sharers(job.world_size),
        )


@dataclass(frozen=True, slots=True)
class _Shards:
    """The units of a sharded model, and their buffers."""

    job: Job
    schedule: ShardedSchedule
    units: tuple[ModelUnit, ...]
    root: tuple[int, ...]
    n_sharers: int

    @property
    def group(self) -> Group:
        """The ranks that share a copy of the model."""
        return Group(self.n_sharers)

    def replicas(self, of_copies: Group) -> Group:
        """Return the ranks that have the same slice of the copies in a group of copies."""
        return of_copies.over_copies(self.n_sharers) if of_copies.size > 1 else ALONE

    @property
    def kept_over(self) -> Group | None:
        """The ranks among which units are gathered for the backward pass, if they are fewer; None otherwise."""
        kept = self.schedule.reshard_after_forward
        if kept is None or isinstance(kept, bool) or kept in (1, self.n_sharers):
            return None
        return Group(kept)

    @property
    def param_dtype(self) -> DType:
        return self.schedule.param_dtype or self.job.dtype

    @property
    def reduce_dtype(self) -> DType:
        return self.schedule.reduce_dtype or self.param_dtype

    @property
    def reduces_often(self) -> bool:
        """Whether gradients are reduce-scattered in several micro-batches of a step."""
        return self.job.micro_batches > 1 and self.schedule.accumulation == "reduce"

    @property
    def adds_whole(self) -> bool:
        """Whether whole gradients add up over micro-batches, in the type in which they are reduced."""
        return self.job.micro_batches > 1 and self.schedule.accumulation == "local"

    @property
    def defers(self) -> bool:
        """Whether slices of gradients add up over micro-batches before copies of the model average them."""
        first, last = (self.schedule.all_reduces(self.job, at) for at in (0, self.job.micro_batches - 1))
        return self.reduces_often and last and not first

    @property
    def sums_up(self) -> bool:
        """Whether the gradients of an update are sums of several reductions, or have another type than these."""
        return (self.reduces_often and not self.defers) or self.reduce_dtype != self.job.dtype

    def is_kept(self, number: int) -> bool:
        """Tell whether a unit stays gathered from its forward pass to its backward pass."""
        kept = self.schedule.reshard_after_forward
        if kept is None:
            kept = number not in self.root
        if kept is False or (kept == 1 and not isinstance(kept, bool)):
            return True
        last = max(each for each in range(len(self.units)) if each not in self.root)
        return self.schedule.keep_last_unit and number == last

    def grad(self, number: int) -> str:
        """Return the gradients with which the slice of a unit is updated."""
        return f"mean.{number}" if self.sums_up else f"reduced.{number}"

    @property
    def counts(self) -> tuple[int, ...]:
        """The elements of each unit, each tensor padded by rows to a multiple of the ranks that share it."""
        units = tuple([each.tensors for each in self.units])
        return _padded_counts(units, self.job.tensor_counts, self.job.tensor_rows, self.n_sharers)

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the buffers of all units."""
        return tuple(buffer for number, count in enumerate(self.counts) for buffer in self._of_unit(number, count))

    def slice_counts(self) -> Iterable[int]:
        """Return the elements of a rank's slice of each unit."""
        return (count // self.n_sharers for count in self.counts)

    def of_slices(self, buffer: Buffer) -> Buffer:
        """Return a buffer of a job of copies, whose tensors are slices of units, as a buffer of this job."""
        first, last = buffer.tensors or (0, 0)
        return replace(buffer, tensors=(self.units[first].first, self.units[last - 1].last), sharded_over=self.group)

    def exchange(self, between: AveragingSchedule, turn: Turn, of_copies: Job) -> Body:
        """Return what copies exchange at the end of a step. It does not queue behind gathers."""
        found: list[Op] = []
        for op in between.exchange(turn, of_copies):
            spread = copies.spread_over_ranks(op, self.n_sharers, self.schedule.name)
            if isinstance(spread, ops.AllReduce) and spread.lane == COMM:
                spread = replace(spread, lane=_REPLICATE)
            found.append(spread)
        return tuple(found)

    def _of_unit(self, number: int, whole: int) -> Iterable[Buffer]:
        tensors = self.units[number].tensors
        padding = whole - sum(self.job.tensor_counts[slice(*tensors)])
        of_slice = whole // self.n_sharers
        param = self.param_dtype
        reduced = self.reduce_dtype
        group = self.group
        yield Buffer(f"{parts.PARAM}.{number}", of_slice, self.job.dtype, tensors, initialized=True, sharded_over=group)
        yield Buffer(f"slice.{number}", of_slice, param, tensors, sharded_over=group)
        yield Buffer(f"gathered.{number}", whole, param, tensors, padding=padding)
        yield Buffer(f"unit.{number}", whole, param, tensors, padding=padding)
        if self.kept_over and not self.is_kept(number):
            kept = whole // self.kept_over.size
            yield Buffer(f"kept.{number}", kept, param, tensors, sharded_over=self.kept_over)
        yield Buffer(f"activations.{number}", 1, param)
        yield Buffer(f"grad.{number}", whole, reduced if self.adds_whole else param, tensors, padding=padding)
        yield Buffer(f"ready.{number}", whole, reduced, tensors, padding=padding)
        yield Buffer(f"reduced.{number}", of_slice, reduced, tensors, sharded_over=group)
        if self.sums_up:
            yield Buffer(f"mean.{number}", of_slice, self.job.dtype, tensors, sharded_over=group)
        if self.defers:
            yield Buffer(f"partial.{number}", of_slice, reduced, tensors, sharded_over=group)


@lru_cache(maxsize=64)
def _padded_counts(
    units: tuple[tuple[int, int], ...], tensor_counts: tuple[int, ...], tensor_rows: tuple[int, ...], n_sharers: int
) -> tuple[int, ...]:
    """Return the elements of each unit, see `_Shards.counts`. Candidates of a search often have the same."""
    found = []
    for first, last in units:
        total = 0
        for tensor in range(first, last):
            elements = tensor_counts[tensor]
            n_rows = tensor_rows[tensor] if tensor_rows else elements
            rows = -(-n_rows // n_sharers) * n_sharers
            total += rows * (elements // n_rows)
        found.append(total)
    return tuple(found)


@lru_cache(maxsize=8)
def _bodies(schedule: ShardedSchedule, job: Job) -> Callable[[int, Group], Body]:
    """Return a function that writes steps, each once. Candidates that differ in averages between copies share them."""
    shards = schedule.units_of(job)
    known: dict[Op, Op] = {}  # micro-batches repeat operations

    @cache
    def body(begins_like: int, replicas: Group) -> Body:
        each_op = _Step(schedule, job, shards, begins_like, replicas).body()
        return tuple([known.setdefault(op, op) for op in each_op])

    return body


@dataclass(slots=True)
class _Step:
    """Writes the operations of one step."""

    schedule: ShardedSchedule
    job: Job
    shards: _Shards
    step: int
    replicas: Group
    _ops: list[Op] = field(default_factory=list)
    _whole: set[int] = field(default_factory=set)  # units that are copied out
    _copied_out: list[str] = field(default_factory=list)  # units that this pass has copied out, in order
    _gates: list[str] = field(default_factory=list)  # buffers that the next gather waits for
    _unsent: deque[int] = field(default_factory=deque)  # units with a reduce-scatter that nothing has waited for yet
    _reduced: list[int] = field(default_factory=list)  # units that were reduced in this micro-batch, in order

    def body(self) -> Body:
        """Return the operations of the step."""
        job = self.job
        names = tuple(f"{parts.PARAM}.{number}" for number in self._numbers)
        self._ops += parts.bring_input(job, self.step)
        for micro_batch in range(job.micro_batches):
            self._ops += parts.late_forward(job, micro_batch)
            self._forward()
            self._ops += parts.before_backward(job, self.step, micro_batch)
            self._backward(micro_batch, is_last=micro_batch == job.micro_batches - 1)
        grads = tuple(self.shards.grad(number) for number in self._numbers)
        self._ops += [ops.Optimize(names, grads), *parts.wait_for_update(job, names)]
        return _blocking(self._ops) if self.schedule.blocking else tuple(self._ops)

    @property
    def _numbers(self) -> range:
        return range(len(self.shards.units))

    @property
    def _reduce_lane(self) -> Lane:
        return COMM if self.schedule.communicators == 1 else _REDUCE

    @property
    def _algorithm(self) -> str:
        algorithm = self.schedule.algorithm
        return algorithm if parts.carries_slices(algorithm) else "auto"

    def _forward(self) -> None:
        """Gather each unit, copy it out and compute with it.

        The root is gathered and copied out before everything else. A gather waits until the unit before the one that
        was copied out last has been copied out: gathers run up to two units ahead or, if asked for, more.
        """
        self._copied_out = []
        self._take_root(self._gather)
        ahead = self.schedule.forward_prefetch
        upcoming = deque(number for number in self._numbers if number not in self._whole)
        sources = parts.input_names(self.job)
        for number in self._numbers:
            if upcoming and upcoming[0] == number:
                self._gather_ahead(upcoming.popleft())
            if number not in self._whole and number not in self.shards.root:
                self._copy_out([number])
            if ahead > 1:
                self._gather_named(number, upcoming, ahead, self._gather_ahead)
            loss = (parts.loss_name(self.job, self.step),) if number == self._numbers[-1] else ()
            self._ops.append(ops.Forward((f"unit.{number}", *sources), (f"activations.{number}", *loss)))
            sources = (f"activations.{number}",)
            if number not in self.shards.root:
                self._leave(number)
        for number in self.shards.root:
            self._leave(number)

    @staticmethod
    def _gather_named(number: int, upcoming: deque[int], ahead: int, gather: Callable[[int], None]) -> None:
        """Gather the units that a unit, or the root, names: so many that come next in this pass."""
        while upcoming and abs(upcoming[0] - number) <= ahead:
            gather(upcoming.popleft())

    def _gather_ahead(self, number: int) -> None:
        self._gates += self._copied_out[-2:-1]
        self._gather(number)

    def _leave(self, number: int) -> None:
        """Free a unit after its forward pass, if it is not kept."""
        if self.shards.is_kept(number):
            return
        self._whole.discard(number)
        if self.shards.kept_over:
            self._ops.append(ops.Copy(f"unit.{number}", f"kept.{number}"))

    def _take_root(self, gather: Callable[[int], None]) -> bool:
        """Gather and copy out the root, if it has to be; return whether it had to."""
        root = [number for number in self.shards.root if number not in self._whole]
        for number in root:
            gather(number)
        self._copy_out(root)
        return bool(root)

    def _gather(self, number: int) -> None:
        """Gather a unit from the slices of all ranks that share it."""
        mine = f"slice.{number}"
        self._wait_for_gates(COPY_IN)
        self._ops.append(ops.Copy(f"{parts.PARAM}.{number}", mine, lane=COPY_IN))
        self._ops.append(ops.AllGather(mine, f"gathered.{number}", self.shards.group, self._algorithm, lane=COMM))

    def _gather_again(self, number: int) -> None:
        """Gather a unit for its backward pass. If the forward pass has kept larger slices, gather these."""
        kept_over = self.shards.kept_over
        if kept_over is None:
            self._gather(number)
            return
        self._wait_for_gates(_REGATHER)
        gather = ops.AllGather(f"kept.{number}", f"gathered.{number}", kept_over, self._algorithm, lane=_REGATHER)
        self._ops.append(gather)

    def _wait_for_gates(self, lane: Lane) -> None:
        self._ops += [ops.Wait(name, lane) for name in dict.fromkeys(self._gates)]
        self._gates.clear()

    def _copy_out(self, numbers: Sequence[int]) -> None:
        """Copy units out of what was gathered, all before the next one."""
        self._ops += [ops.Copy(f"gathered.{number}", f"unit.{number}") for number in numbers]
        self._copied_out += [f"unit.{number}" for number in numbers[-1:]]
        self._whole.update(numbers)

    def _backward(self, micro_batch: int, *, is_last: bool) -> None:
        """Compute gradients from the last unit to the first, and reduce each unit's.

        The first gather waits for the last one of the forward pass to be copied out, and hides behind the last unit's
        forward pass. A later one waits until the unit that computes next is copied out.
        """
        root = self.shards.root
        buckets = [self.shards.units[number].tensors for number in reversed(self._numbers)]
        upcoming = deque(n for n in reversed(self._numbers) if n not in self._whole and n not in root)
        reduces = is_last or self.schedule.accumulation == "reduce"
        late = self._reduced_late()
        self._reduced = []
        self._gates += self._copied_out[-1:]
        root_comes_first = self._numbers[-1] in root
        if root_comes_first:
            self._turn_to_root()
        for place, number in enumerate(reversed(self._numbers)):
            if number not in root:
                self._turn_to(number, upcoming)
            elif place == 0:
                self._gather_named(number, upcoming, self.schedule.backward_prefetch, self._gather_again)
            if not root_comes_first and place == 0:
                self._turn_to_root()
            self._ops += parts.late_backward(self.job, buckets, place, micro_batch, exchanges=True, in_each=True)
            adds = micro_batch > 0 and self.schedule.accumulation == "local"
            self._ops.append(ops.Backward((f"unit.{number}", f"activations.{number}"), f"grad.{number}", adds))
            if reduces and number not in late:
                self._reduce(number, micro_batch)
        if reduces:
            self._reduce_rest(late, micro_batch)
        if is_last:
            self._whole.clear()
        else:
            self._end_micro_batch(micro_batch)

    def _turn_to(self, number: int, upcoming: deque[int]) -> None:
        """Copy out a unit for its backward pass, and gather those that come next."""
        if upcoming and upcoming[0] == number:
            self._gather_again(upcoming.popleft())
        if number not in self._whole:
            self._copy_out([number])
            self._gates = [f"unit.{number}"]
        self._gather_named(number, upcoming, self.schedule.backward_prefetch, self._gather_again)

    def _turn_to_root(self) -> None:
        if self._take_root(self._gather_again):
            self._gates = self._copied_out[-1:]

    def _end_micro_batch(self, micro_batch: int) -> None:
        """Wait for all reductions, and let the gathers of the next micro-batch wait for them too."""
        if self.schedule.reshard_after_backward:
            self._whole.clear()
        self._gates = [f"grad.{self._numbers[0]}"]
        if self._reduced:
            self._wait_for_all(micro_batch)
            self._gates = [f"ready.{self._reduced[-1]}", self._result(self._reduced[-1], micro_batch)]

    def _reduced_late(self) -> tuple[int, ...]:
        """Return the units that are reduced after the backward pass: the root, and a first unit with raw input."""
        root = self.shards.root
        return root if 0 in root else (*root, 0)

    def _reduce_rest(self, late: tuple[int, ...], micro_batch: int) -> None:
        """Reduce the root, wait for all reductions so far, and reduce the first unit."""
        root = self.shards.root
        for number in late:
            if root and number not in root:
                self._wait_for_all(micro_batch)
            self._reduce(number, micro_batch)
        self._finish(micro_batch, n_left=0)

    def _reduce(self, number: int, micro_batch: int) -> None:
        """Reduce-scatter a unit's gradients, once there is a buffer for them."""
        while len(self._unsent) >= self.schedule.reduce_buffers:
            self._ops.append(ops.Wait(f"reduced.{self._unsent[0]}", COMPUTE))
            self._finish(micro_batch, n_left=len(self._unsent) - 1)
        ready = f"ready.{number}"
        reduced = f"reduced.{number}"
        group = self.shards.group
        self._ops.append(ops.Copy(f"grad.{number}", ready))
        self._ops.append(ops.ReduceScatter(ready, reduced, group, algorithm=self._algorithm, lane=self._reduce_lane))
        self._unsent.append(number)
        self._reduced.append(number)

    def _wait_for_all(self, micro_batch: int) -> None:
        """Let computation wait for all reductions so far."""
        self._finish(micro_batch, n_left=0)
        self._ops += [ops.Wait(self._result(number, micro_batch), COMPUTE) for number in self._reduced[-1:]]

    def _finish(self, micro_batch: int, *, n_left: int) -> None:
        """Write what comes after reduce-scatters: sums over micro-batches and the exchange between replicas.

        It stands after the wait for the reduce-scatter alone, because a `Wait` is for the last writer so far.
        """
        while len(self._unsent) > n_left:
            self._finish_unit(self._unsent.popleft(), micro_batch)

    def _finish_unit(self, number: int, micro_batch: int) -> None:
        reduced = f"reduced.{number}"
        partial = f"partial.{number}"
        mean = self.shards.grad(number)
        lane = _SUM
        is_last = micro_batch == self.job.micro_batches - 1
        if self.shards.defers:
            if not is_last:
                summed = ops.Combine((partial, reduced), (1.0, 1.0), partial, lane=lane)
                self._ops.append(summed if micro_batch else ops.Copy(reduced, partial, lane=lane))
                return
            self._ops.append(ops.Combine((reduced, partial), (1.0, 1.0), reduced, lane=lane))
        if self.replicas.size > 1 and self.schedule.all_reduces(self.job, micro_batch):
            lane = _REPLICATE
            self._ops.append(ops.AllReduce(reduced, self.replicas, algorithm=self.schedule.algorithm, lane=lane))
        if mean == reduced:
            return
        adds = self.shards.reduces_often and not self.shards.defers and micro_batch > 0
        summed = ops.Combine((mean, reduced), (1.0, 1.0), mean, lane=lane)
        self._ops.append(summed if adds else ops.Copy(reduced, mean, lane=lane))

    def _result(self, number: int, micro_batch: int) -> str:
        """Return the buffer that the last operation of a unit's reduction in a micro-batch writes."""
        is_last = micro_batch == self.job.micro_batches - 1
        return f"partial.{number}" if self.shards.defers and not is_last else self.shards.grad(number)


def _blocking(body: Iterable[Op]) -> Body:
    """Return a body whose host waits for each operation."""
    found: list[Op] = []
    for op in body:
        found.append(op)
        if ops.writes(op):
            found.append(ops.Wait(ops.writes(op)[0]))
    return tuple(found)
