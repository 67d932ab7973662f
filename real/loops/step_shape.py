"""Which plans a training loop can perform: forward and backward passes, as many in each step, and one update."""

from simdist.errors import UnsupportedError
from simdist.plan import Body, Plan, ops


def n_passes(plan: Plan) -> int:
    """Return the number of forward passes in a step."""
    return sum(isinstance(op, ops.Forward) for op in plan.bodies[0])


def check_shape(plan: Plan) -> None:
    """Check that a training loop can perform the steps of a plan.

    Raises:
        UnsupportedError: A step has several updates, its passes do not add up, other steps have another number of
            passes, or the order is different.
    """
    n_tensors = max((buffer.tensors[1] for buffer in plan.buffers if buffer.tensors), default=0)
    for number, body in enumerate(plan.bodies):
        if problem := _problem(plan, body, n_tensors):
            raise UnsupportedError(
                f"plan {plan.name}, body {number}: {problem}; a training loop has forward and backward passes, "
                f"as many in each step, and one update of everything: perform this plan with `python -m real`"
            )


def _problem(plan: Plan, body: Body, n_tensors: int) -> str:
    if any(buffer.sharded_over != ops.ALONE for buffer in plan.buffers):
        return "it shards the model, which fully_shard does in a loop; give real.wrap the schedule, or a run directory"
    body = tuple(op for op in body if not (isinstance(op, ops.Optimize) and op.optimizer == "outer"))
    kinds = [type(op) for op in body if isinstance(op, ops.Forward | ops.Backward | ops.Optimize)]
    backwards = [(op.dst, op.adds) for op in body if isinstance(op, ops.Backward)]
    buckets = [name for name, adds in backwards if not adds]
    if kinds != [*[ops.Forward, *[ops.Backward] * len(buckets)] * n_passes(plan), ops.Optimize] or not buckets:
        return f"its passes are {', '.join(kind.__name__ for kind in kinds) or 'none'}"
    if backwards != [(name, number > 0) for number in range(n_passes(plan)) for name in buckets]:
        return "its passes do not add up"
    if ops.drops(body) is not None:
        return (
            "it drops the late, who pass over steps, and so over what loops do in them, such as clipping; in a loop, "
            "LocalSGD(period=...), with overlap_steps or inner_steps, waits less for slow ranks"
        )
    if any(isinstance(op, ops.Save) for op in body):
        return "it saves checkpoints, which `real.wrap` writes by itself (`checkpointing=`)"
    update = next(op for op in body if isinstance(op, ops.Optimize))
    for what, names in (("its backward pass computes", buckets), ("it updates", update.params)):
        covered = sorted(plan.buffer(name).tensors or (0, 0) for name in names)
        if [*(first for first, _ in covered), n_tensors] != [0, *(last for _, last in covered)]:
            return f"{what} tensors {covered} of {n_tensors}"
    if not update.slices and (strange := set(update.grads) - set(buckets)):
        return f"it updates with {', '.join(sorted(strange))}, which is no bucket of its backward pass"
    return ""
