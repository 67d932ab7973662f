"""What one checkpoint of a schedule costs: how long it holds training up, when it can be used, how long it loads.

    usable_s     copy to the host + write, of all ranks that write at once, with nothing beside them
    stall_s      run with one file - run without, both followed by the steps that the file is written beside
    load_s       read + copy to the device, of all ranks at once; a file of one rank that is not on the storage is
                 broadcast

All three are simulated: they are makespans of plans, so that NICs, servers and disks are shared as in any run. Nothing
is disturbed. A file that takes very many steps is measured as one of a fraction of the bytes.
"""

import math
from dataclasses import dataclass, replace

from simdist.plan import ops
from simdist.plan.group import Group
from simdist.plan.ops import Destination
from simdist.plan.plan import Body, Buffer, Plan
from simdist.runs.building import job
from simdist.runs.checkpoint_steps import undisturbed_s, undisturbed_step_s
from simdist.scenario.scenario import Scenario
from simdist.schedules import Job, Schedule
from simdist.schedules.job import Checkpoint
from simdist.settings.base import unchecked_copy

_MOST_STEPS = 16  # that a file is written beside
_SLACK = 1.25  # traffic of training makes a write longer
_FILE = "checkpoint.file"
_STATE = "checkpoint.state"


@dataclass(frozen=True, slots=True)
class CheckpointCosts:
    """Costs of one checkpoint.

    Args:
        stall_s: Seconds by which it makes training longer, if it is written before the next one is due.
        usable_s: Seconds from the end of its step until all of it is written. A failure before that loses it.
        load_s: Seconds in which all ranks read it back to their devices.
        step_s: Seconds of a step without it, undisturbed.
        nbytes: Bytes of all files together.
        is_async: Whether training goes on beside the write.
    """

    stall_s: float
    usable_s: float
    load_s: float
    step_s: float
    nbytes: int
    is_async: bool


def checkpoint_costs(scenario: Scenario, schedule: Schedule) -> CheckpointCosts | None:
    """Return what one checkpoint of a schedule costs; None if the scenario writes none.

    Args:
        scenario: The scenario.
        schedule: A schedule of it.

    Raises:
        PlanError: The schedule does not fit the cluster.
        ScenarioError: Compute times are neither given nor derivable.
    """
    if scenario.checkpoint is None:
        return None
    in_each_step = unchecked_copy(scenario, checkpoint=unchecked_copy(scenario.checkpoint, every=1))
    described = replace(job(in_each_step), delay_channels=frozenset())
    checkpoint = described.checkpoint
    assert checkpoint is not None
    saving = _Saving.of(schedule.plan(replace(described, n_steps=1)))
    calm = replace(described, checkpoint=None)
    usable_s = undisturbed_s(scenario, saving.plan)
    has_it = checkpoint.to == "storage" or scenario.cluster.nodes == 1 or saving.n_writers > 1
    load_s = undisturbed_s(scenario, _loading(saving, checkpoint.to, all_have_it=has_it))
    step_s = undisturbed_step_s(scenario, schedule, calm)
    stall_s = _stall_s(scenario, schedule, calm, checkpoint, saving, usable_s, step_s)
    nbytes = saving.nbytes * saving.n_writers
    return CheckpointCosts(stall_s, usable_s, load_s, step_s, nbytes, is_async=checkpoint.is_async)


@dataclass(frozen=True, slots=True)
class _Saving:
    """The operations that write a checkpoint, as a plan of their own.

    Args:
        plan: Of one step.
        nbytes: Bytes of a rank's file.
        n_writers: Ranks that write one.
    """

    plan: Plan
    nbytes: int
    n_writers: int

    @classmethod
    def of(cls, plan: Plan) -> "_Saving":
        """Take the operations of a plan of one step with a checkpoint."""
        body = next(each for each in plan.bodies if any(isinstance(op, ops.Save) for op in each))
        (save,) = (op for op in body if isinstance(op, ops.Save))
        copies = [op for op in body if isinstance(op, ops.Copy) and op.dst in save.srcs]
        names = {name for op in copies for name in (op.src, op.dst)} | ({save.dst} if save.dst else set())
        buffers = tuple(buffer for buffer in plan.buffers if buffer.name in names)
        only: Body = (*copies, save)
        alone = Plan.from_steps(plan.name, world_size=plan.world_size, buffers=buffers, steps=[only])
        nbytes = sum(plan.buffer(name).nbytes for name in save.srcs)
        n_writers = sum(save.by.is_first(rank) for rank in range(plan.world_size))
        return cls(alone, nbytes, n_writers)


def _loading(saving: _Saving, source: Destination, *, all_have_it: bool) -> Plan:
    """Return a plan in which each rank reads a file and copies it to its device, or takes it from one that has it."""
    nbytes = saving.nbytes
    world_size = saving.plan.world_size
    buffers = (Buffer(_FILE, nbytes, "uint8", place="host"), Buffer(_STATE, nbytes, "uint8"))
    body: Body = (ops.Load(_FILE, read=(source,)), ops.Copy(_FILE, _STATE))
    if not all_have_it:
        body = (*body, ops.Broadcast(_STATE, Group(world_size)))
    return Plan.from_steps("loading", world_size=world_size, buffers=buffers, steps=[body])


def _stall_s(
    scenario: Scenario,
    schedule: Schedule,
    calm: Job,
    checkpoint: Checkpoint,
    saving: _Saving,
    usable_s: float,
    step_s: float,
) -> float:
    """Return the difference between runs with one file and without."""
    cycle = schedule.cycle(calm)
    n_beside = math.ceil(usable_s / step_s) if checkpoint.is_async and step_s else 0
    n_parts = max(1, math.ceil(n_beside / _MOST_STEPS))
    n_after = 1 + math.ceil(_SLACK * n_beside / n_parts)
    every = cycle.start + len(cycle) * math.ceil((n_after + 1) / len(cycle))
    what = checkpoint.what if n_parts == 1 else math.ceil(saving.nbytes / n_parts)
    plain = replace(calm, n_steps=2 * every - 1)
    with_file = replace(plain, checkpoint=replace(checkpoint, every=every, what=what))
    longer_s, shorter_s = (undisturbed_s(scenario, schedule.plan(each)) for each in (with_file, plain))
    return n_parts * (longer_s - shorter_s)
