"""Checkpoints: what every schedule adds at the end of each step that has one."""

from dataclasses import replace

from simdist.errors import PlanError
from simdist.plan import Body, Buffer, Plan, ops
from simdist.schedules.job import Checkpoint

#: Buffer with a momentum of the optimizer for every parameter.
MOMENTS = "moments"
_STATE = "state"
_COPY = "checkpoint"
_WRITTEN = Buffer(f"{_COPY}.written", 1, "uint8", place="host")


def with_checkpoints(plan: Plan, checkpoint: Checkpoint) -> Plan:
    """Return the plan whose ranks write a checkpoint at the end of every so many steps, after updates and averages.

    copy(param -> checkpoint.param)     on the device: once the last checkpoint is written
    save(checkpoint.param)
    wait(checkpoint.written)            unless it is written in the background
    """
    sources = _sources(plan, checkpoint)
    copies = [replace(each, name=f"{_COPY}.{each.name}", place="host", initialized=False) for each in sources]
    written = None if checkpoint.is_async else _WRITTEN.name
    saving: Body = (
        *(ops.Copy(source.name, copy.name, checkpoint.by) for source, copy in zip(sources, copies, strict=True)),
        ops.Save(tuple(copy.name for copy in copies), written, checkpoint.to, checkpoint.by),
        *((ops.Wait(written),) if written else ()),
    )
    longer = [(*body, *saving) for body in plan.bodies]
    steps = (
        (plan.bodies if (step + 1) % checkpoint.every else longer)[body]
        for step, body in enumerate(plan.body_of_steps())
    )
    added = [*(each for each in sources if each not in plan.buffers), *copies, *((_WRITTEN,) if written else ())]
    return Plan.from_steps(
        plan.name, world_size=plan.world_size, buffers=(*plan.buffers, *added), steps=steps, dataset=plan.dataset
    )


def _sources(plan: Plan, checkpoint: Checkpoint) -> list[Buffer]:
    """Return the buffers on the device that a checkpoint holds."""
    if isinstance(checkpoint.what, int):
        return [Buffer(_STATE, checkpoint.what, "uint8", initialized=True)]
    updates = [op for body in plan.bodies for op in body if isinstance(op, ops.Optimize)]
    names = {name: op.optimizer for op in updates for name in op.params}
    updated = [plan.buffer(name) for name in names]
    if checkpoint.what == "parameters":
        return [buffer for buffer in updated if names[buffer.name] == "inner"]
    slices = [plan.buffer(name) for name in dict.fromkeys(name for op in updates for name in op.slices)]
    if slices and checkpoint.by.size > 1:
        raise PlanError(
            f"plan {plan.name}: checkpoint.ranks: each rank has a slice of the optimizer's state, and not all write "
            f"it: write ranks: all, or what: parameters"
        )
    count = sum(buffer.count - buffer.padding for buffer in slices or updated)
    return [*updated, Buffer(MOMENTS, count, updated[0].dtype, initialized=True)]
