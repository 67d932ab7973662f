"""The virtual world: all ranks of a plan stacked in one process, for values without times.

Each buffer is one tensor `[world_size, count]`, and a collective is a reshape. In the view `[n_blocks, size, stride,
count]` (see `Group.shape`), it reduces, gathers or broadcasts along the axis `size`, for all groups at once. There are
no streams and no time, so the order of the program is the order of events. Waits, ticks and delays change no values.
For an all-reduce that drops late ranks, a trace must state the late ranks.

It is an oracle for the process world, because the two share only the code of the program. It also shows on a laptop how
256 workers converge.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, assert_never, final

import torch
from torch import Tensor, nn

from real.buffers.memory import Memory
from real.execution.batching import LossFunction, Made, per_rank, problem_at_once, stack, stacked_batch
from real.programs.base import Batch
from real.programs.binding import Binding, homes_of, trained_parameters
from real.programs.module import ModuleProgram
from real.programs.optimizers import MakeOptimizer, nesterov
from simdist.errors import RunError
from simdist.plan import Buffer, Group, Plan, ops
from simdist.plan.walk import drops_late

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _VirtualResult:
    """Holds the outcome of training.

    Args:
        parameters: Trained parameters of each rank in the order of `module.parameters()`, `[world_size, n]`.
        losses: Loss of each rank's batch, in the last pass of a step, float64 `[n_steps, world_size]`; NaN before the
            first one.
        modules: The model of each rank.
    """

    parameters: Tensor
    losses: Tensor
    modules: tuple[nn.Module, ...]


def train_together(  # noqa: PLR0913 (what a run is put together from)
    plan: Plan,
    make: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]],
    loss: LossFunction,
    batch: Callable[[int, int], Batch],
    *,
    seed: int = 0,
    on_step: Callable[[int, Sequence[nn.Module]], None] | None = None,
    outer_optimizer: MakeOptimizer = nesterov,
    late: Mapping[int, Sequence[int]] | None = None,
    batched: bool = False,
) -> _VirtualResult:
    """Train a user's model on all ranks of a plan, on the CPU.

    Args:
        plan: A valid plan for this model.
        make: Rank -> its own module, and the optimizer of its parameters. If ranks should start with equal parameters,
            it must return equal ones for all.
        loss: (output of the module, targets) -> mean over the batch.
        batch: (step, rank) -> inputs and targets. With k passes per step, pass i of step s counts as step s k + i.
        seed: Rank r draws (dropout, sampling) the same numbers as a process after `torch.manual_seed(seed + r)`.
        on_step: Called at the end of each step with its number and the modules of all ranks.
        outer_optimizer: Makes the outer optimizer of each rank's anchors, if the plan has any.
        late: Late ranks by operation, as in a trace of the plan.
        batched: Compute all ranks at once if possible; see `World`.

    Raises:
        PlanError: The plan is for another model.
        RunError: Its buffers do not fit into memory, or the late ranks are unknown.
    """
    world = World(plan, lambda rank: (*make(rank), None), loss, batch, outer_optimizer=outer_optimizer, batched=batched)
    losses = torch.full((plan.n_steps, plan.world_size), torch.nan, dtype=torch.float64)

    def end(step: int) -> None:
        losses[step] = world.losses()
        if on_step:
            world.refresh()
            on_step(step, world.modules)

    perform_together(plan, world.programs, world.memory, seed=seed, on_step=end, late=late)
    world.bring_home()
    vectors = [torch.cat([each.detach().flatten() for each in trained_parameters(module)]) for module in world.modules]
    return _VirtualResult(torch.stack(vectors), losses, tuple(world.modules))


@final
class World:
    """The models of all ranks and their programs: one program per rank, or one for all ranks at once.

    At once means that a pass or an update runs on one `StackedModule`. `real.execution.batching` describes when this is
    impossible.

    Args:
        plan: A valid plan for the model.
        make: Rank -> its module, the optimizer of its parameters, and the scheduler of its learning rate, if any.
        loss: As in `train_together`.
        batch: As in `train_together`.
        device: Device to compute on; the modules are made there.
        autocast: Lower precision for forward and backward pass.
        outer_optimizer: As in `train_together`.
        batched: All at once if possible.
        scratch_nbytes: Memory needed besides the buffers.

    Attributes:
        modules: Module of each rank. Its parameters are rows of the plan's buffers.
        optimizers: Optimizer of each rank, or one for all.
        schedulers: Scheduler of each rank, or one for all; empty if the ranks have none. The caller steps them.
        programs: Program of each rank, or one for all.
        memory: The stacked buffers.
        why_not: Why ranks are not computed at once although `batched` is set.

    Raises:
        PlanError: The plan is for another model.
        RunError: Its buffers do not fit into memory.
    """

    def __init__(  # noqa: PLR0913 (what a run is put together from)
        self,
        plan: Plan,
        make: Callable[[int], Made],
        loss: LossFunction,
        batch: Callable[[int, int], Batch],
        *,
        device: torch.device = _CPU,
        autocast: torch.dtype | None = None,
        outer_optimizer: MakeOptimizer = nesterov,
        batched: bool = True,
        scratch_nbytes: int = 0,
    ) -> None:
        self._plan = plan
        n_ranks = plan.world_size
        names = Binding.buffers_of(plan)
        self.memory = Memory(plan, device, names, n_ranks=n_ranks, scratch_nbytes=scratch_nbytes)
        settings: dict[str, Any] = {"device": device, "autocast": autocast, "outer": outer_optimizer}
        made = [make(rank) for rank in range(n_ranks)]
        self.why_not = problem_at_once(plan, made, loss, batch, **settings) if batched else None
        self._losses: Tensor | None = None
        self.modules = [module for module, *_ in made]
        if batched and not self.why_not:
            stacked, optimizer = stack(made)
            program = partial(ModuleProgram, plan, stacked, self._sum_of(loss), optimizer)
            self.programs = [program(partial(stacked_batch, batch, n_ranks), self.memory, **settings)]
            stacked.lend(self.modules)
            made = [(stacked, optimizer, made[0][2])]
        else:
            self.programs = [
                ModuleProgram(
                    plan,
                    module,
                    loss,
                    each,
                    partial(_batch_of, batch, rank),
                    self.memory.row(rank),
                    rank=rank,
                    **settings,
                )
                for rank, (module, each, _) in enumerate(made)
            ]
        self.optimizers = [each for _, each, _ in made]
        self.schedulers = [each for *_, each in made if each]

    def losses(self) -> Tensor:
        """Return the loss of each rank's last pass, float64 `[world_size]`; NaN before the first one."""
        if self._losses is not None:
            return self._losses.to("cpu", torch.float64)
        rows = [math.nan if each.loss is None else each.loss.item() for each in self.programs]
        return torch.tensor(rows, dtype=torch.float64)

    def refresh(self) -> None:
        """If the model is sharded, gather its parameters, as the next step would."""
        for name, home in homes_of(self._plan).items():
            if home.name != name:
                self.memory.dense(home.name).copy_(self._whole(name))

    def bring_home(self) -> None:
        """Give each model whole parameters of its own type, at the end, if it is sharded."""
        for rank, program in enumerate(self.programs):
            program.bring_home(partial(self._whole_of, rank))

    def _whole_of(self, rank: int, name: str) -> Tensor:
        return self._whole(name)[rank]

    def _whole(self, name: str) -> Tensor:
        return _whole_slices(self._plan.buffer(name), self.memory, self._plan.world_size)

    def _sum_of(self, loss: LossFunction) -> LossFunction:
        """Return the sum of the losses of all ranks; its gradient on each rank is that of the rank's own loss."""

        def total(outputs: Tensor, targets: Tensor) -> Tensor:
            losses = per_rank(loss)(outputs, targets)
            self._losses = losses.detach()
            return losses.sum()

        return total


def perform_together(
    plan: Plan,
    programs: Sequence[ModuleProgram],
    memory: Memory,
    *,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
    late: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Perform each operation of a plan on all ranks.

    Args:
        plan: A valid plan.
        programs: One for each rank, with that rank's row of `memory`; or one for all ranks, with all of it.
        memory: The stacked buffers.
        seed: See `train_together`.
        on_step: Called at the end of each step.
        late: See `train_together`.

    Raises:
        RunError: The late ranks are unknown.
    """
    ranks = _Ranks(programs, seed)
    late = late or {}
    index = 0
    if unknown := [row for row in drops_late(plan) if row not in late]:
        raise RunError(
            f"plan {plan.name} drops the late, and nothing says who is late at operation {unknown[0]}: give the `late` "
            f"of a trace of this plan, as simdist.simulate makes one"
        )
    with torch.random.fork_rng(devices=[]):
        passes = [ops.forward_passes(body) for body in plan.bodies]
        for step, number in enumerate(plan.body_of_steps()):
            enter = ops.entering(plan.bodies[number])
            sits_out = (*enter.absent, *late.get(index, ())) if enter else ()
            for position, op in enumerate(plan.bodies[number]):
                passing = sits_out if ops.is_passed_over(op, enter) else ()
                if isinstance(op, ops.COLLECTIVES):
                    _exchange(op, memory, plan.world_size, late.get(index, ()))
                elif isinstance(op, ops.Forward):
                    ranks.forward(passes[number].get(position, ()), step, passing)
                else:
                    ranks.compute(op, step, passing)
                index += 1
            if on_step:
                on_step(step)


@final
class _Ranks:
    """The programs of all ranks, each with its own state of torch's random generator."""

    def __init__(self, programs: Sequence[ModuleProgram], seed: int) -> None:
        self._programs = programs
        seeds = (torch.Generator().manual_seed(seed + rank) for rank in range(len(programs)))
        self._random_states = [generator.get_state() for generator in seeds]
        self._has_gradients = False
        self._n_loaded = 0

    def forward(self, parts: Sequence[ops.Forward], step: int, sits_out: Sequence[int]) -> None:
        """Perform a forward pass when all of its units are gathered; before its last part, `parts` is empty."""
        if parts:
            self._each(lambda program: program.forward(parts, step, _nothing), sits_out)
            self._has_gradients = False

    def compute(self, op: ops.Op, step: int, sits_out: Sequence[int]) -> None:
        """Perform an operation that is not a collective, rank after rank, except on some ranks."""
        self._each(lambda program: self._compute(op, step, program), sits_out)
        self._n_loaded += isinstance(op, ops.Load)
        if isinstance(op, ops.Backward):
            self._has_gradients = True

    def _each(self, compute: Callable[[ModuleProgram], object], sits_out: Sequence[int]) -> None:
        for rank, program in enumerate(self._programs):
            if rank in sits_out:
                continue
            torch.set_rng_state(self._random_states[rank])
            compute(program)
            self._random_states[rank] = torch.get_rng_state()

    def _compute(self, op: ops.Op, step: int, program: ModuleProgram) -> None:
        match op:
            case ops.Load():
                program.load(op, self._n_loaded)
            case ops.Backward():
                if not self._has_gradients:
                    program.differentiate()  # all of them at the first `Backward` after a forward pass
                program.fill_bucket(op)
            case ops.Enter() | ops.Delay() | ops.Wait() | ops.Tick() | ops.KernelLaunch():
                pass
            case ops.AllReduce() | ops.ReduceScatter() | ops.AllGather() | ops.Reduce() | ops.Broadcast():
                raise TypeError(f"{op} takes all ranks")
            case ops.Forward():
                raise TypeError(f"{op} is a part of a pass")
            case _:
                program.perform(op, step)


def _exchange(op: ops.Collective, memory: Memory, world_size: int, late: Sequence[int] = ()) -> None:
    """Perform a collective of all groups.

    Args:
        op: The collective.
        memory: Stacked buffers.
        world_size: Ranks in the stack.
        late: Ranks that arrive too late for a collective that drops them.
    """
    group = op.group
    match op:
        case ops.AllReduce() if op.drop:
            first = [rank for rank in range(world_size) if rank not in late]
            buffer = memory.dense(op.buffer)
            _write(_reduced(_split(buffer, group)[:, first], op.reduction), group, buffer)
        case ops.AllReduce():
            buffer = memory.dense(op.buffer)
            _write(_reduced(_split(buffer, group), op.reduction), group, buffer)
        case ops.Reduce():
            buffer = memory.dense(op.buffer)
            members = _split(buffer, group)
            members[:, op.root] = _reduced(members, op.reduction).squeeze(1)
            _write(members, group, buffer)
        case ops.Broadcast():
            for buffer in memory.tensors(op.buffer):
                _write(_split(buffer, group)[:, [op.root]], group, buffer)
        case ops.ReduceScatter():
            reduced = _reduced(_split(memory.dense(op.src), group), op.reduction)
            slices = reduced.unflatten(3, (group.size, -1))  # [n_blocks, 1, stride, slice, count]
            _write(slices.squeeze(1).transpose(1, 2), group, memory.dense(op.dst))
        case ops.AllGather():
            for src, dst in zip(memory.tensors(op.src), memory.tensors(op.dst), strict=True):
                slices = _split(src, group).transpose(1, 2)  # [n_blocks, stride, slice, count]
                _write(slices.flatten(2).unsqueeze(1), group, dst)
        case _:
            assert_never(op)


def _split(stacked: Tensor, group: Group) -> Tensor:
    """Return the rows of ranks by group, `[n_blocks, size, stride, count]`: a view, or a copy if groups are listed."""
    rows = stacked[list(group.ranks)] if group.ranks else stacked
    members: Tensor = rows.unflatten(0, group.shape(len(stacked)))
    return members


def _write(members: Tensor, group: Group, stacked: Tensor) -> None:
    """Write what members hold, `[n_blocks, 1 or size, stride, count]`, to the rows of their ranks."""
    shape = group.shape(len(stacked))
    if group.ranks:
        stacked[list(group.ranks)] = members.expand(*shape, -1).flatten(0, 2)
    else:
        stacked.unflatten(0, shape).copy_(members)


def _reduced(members: Tensor, reduction: ops.Reduction) -> Tensor:
    """Reduce one by one, because sums of negative zeros must be negative zeros; see `real.programs.binding`."""
    total = reduce(Tensor.add_, members.unbind(1)[1:], members[:, 0].clone()).unsqueeze(1)
    return total / members.shape[1] if reduction == "mean" else total


def _whole_slices(buffer: Buffer, memory: Memory, world_size: int) -> Tensor:
    """Return what the members of each group hold of a sharded buffer, one after the other, `[world_size, count]`."""
    group = buffer.sharded_over
    n_blocks, size, stride = group.shape(world_size)
    slices = memory.dense(buffer.name).view(n_blocks, size, stride, -1).transpose(1, 2).flatten(2)
    return slices.unsqueeze(1).expand(-1, size, -1, -1).reshape(world_size, -1)


def _nothing() -> None:
    pass


def _batch_of(batch: Callable[[int, int], Batch], rank: int, step: int) -> Batch:
    return batch(step, rank)
