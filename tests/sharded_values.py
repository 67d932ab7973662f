"""Small models trained by sharded plans: in processes, in the virtual world, and by the definition of their average."""

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from trainings import CPU, Training, execute, loss

from real.buffers.memory import Memory
from real.collectives.worlds import ProcessWorld, groups_of
from real.programs.binding import Binding, left_to_autograd
from real.programs.module import ModuleProgram
from simdist.plan import Plan
from simdist.plan.check import check
from simdist.proof import prove
from simdist.schedules.sharded import ShardedSchedule
from simdist.schedules.units import units_of_sizes


def sharded_plan(
    schedule: ShardedSchedule, training: Training, world_size: int, n_steps: int, root: Collection[int] = ()
) -> Plan:
    """Return the checked and proved plan of a model in which each layer is a unit; the root has those of `root`."""
    module, _ = training.make()
    children = [*module.blocks, module.last] if training.model == "checkpointed" else module.children()
    taken: set[torch.nn.Parameter] = set()
    sizes = []
    for child in children:
        own = set(child.parameters()) - taken
        sizes.append(len(own))
        taken |= own
    units = units_of_sizes([size for size in sizes if size])
    units = tuple(replace(unit, is_block=number not in root) for number, unit in enumerate(units))
    job = replace(training.job(world_size, n_steps), units=units)
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    return plan


class PoisonedMemory(Memory):
    """Takes memory that holds NaN."""

    def take(self, name: str) -> None:
        super().take(name)
        padding = self._buffers[name].padding
        self.dense(name)[: self._buffers[name].count - padding].fill_(torch.nan)


def by_sharded_plan(
    plan: Plan, training: Training, in_caller: bool = False, max_norm: float | None = None
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Train on this rank; return the whole parameters, and bytes of buffers: all of them, the most held, those left."""
    rank = dist.get_rank()
    module, optimizer = training.make(rank)
    memory = PoisonedMemory(plan, CPU, Binding.buffers_of(plan) - left_to_autograd(plan).keys(), begins_freed=True)
    all_nbytes = sum(plan.buffer(name).nbytes for name in Binding.buffers_of(plan))
    world = ProcessWorld(groups_of(plan), timeout_s=30.0)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        return training.batch(number, rank)

    program = ModuleProgram(plan, module, loss, optimizer, batch, memory, device=CPU, rank=rank, max_norm=max_norm)
    program.warm_up(1)
    peak_nbytes = execute(plan, program, memory, world, in_caller, gives_back=True)
    left_nbytes = memory.held_nbytes
    program.bring_home(whole_slices_by(world, plan, memory))
    return torch.cat([each.detach().flatten() for each in module.parameters()]).numpy(), (
        all_nbytes,
        peak_nbytes,
        left_nbytes,
    )


def whole_slices_by(world: ProcessWorld, plan: Plan, memory: Memory) -> Callable[[str], Tensor]:
    """Return the function that gathers a sharded buffer."""

    def gather(name: str) -> Tensor:
        members = world.members(plan.buffer(name).sharded_over)
        mine = memory.dense(name)
        slices = [torch.empty_like(mine) for _ in members.ranks]
        dist.all_gather(slices, mine, group=members.process_group)
        return torch.cat(slices)

    return gather


def by_definition_of_local_averages(
    training: Training, world_size: int, shard: int, period: int, n_steps: int, max_norm: float | None = None
) -> np.ndarray:
    """Train copies of the model that average their parameters now and then, one copy after the other; `[copy, n]`."""
    copies = [training.make() for _ in range(world_size // shard)]
    for step in range(n_steps):
        for number, (module, optimizer) in enumerate(copies):
            for rank in range(number * shard, (number + 1) * shard):
                inputs, targets = training.batch(step, rank)
                (loss(module(inputs), targets) / shard).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        if step % period == period - 1:
            for same in zip(*(module.parameters() for module, _ in copies), strict=True):
                mean = torch.stack([each.detach() for each in same]).mean(dim=0)
                for each in same:
                    each.data.copy_(mean)
    vectors = [torch.cat([each.detach().flatten() for each in module.parameters()]) for module, _ in copies]
    return torch.stack(vectors).numpy()
