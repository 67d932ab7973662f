"""What only the simulator can do of a plan: real ranks refuse it, and `simdist validate` says so."""

from simdist.plan import algorithms, ops
from simdist.plan.lanes import COMM
from simdist.plan.liveness import carried_buffers
from simdist.plan.ops import Op
from simdist.plan.plan import Plan
from simdist.plan.text import op_text


def only_simulated(plan: Plan) -> str | None:
    """Return which operation real ranks cannot perform, why, and what to write instead; None if they can."""
    return next((reason for reason in map(_reason, plan.distinct_ops) if reason), None)


def only_restarts(plan: Plan) -> str | None:
    """Return why real ranks cannot go on without one of them, and what to write instead; None if they can.

    They can if they meet only in means over all ranks, of buffers that no later step reads before it writes them.
    """
    collectives = [op for op in plan.distinct_ops if isinstance(op, ops.COLLECTIVES)]
    carried = set(carried_buffers(plan))
    for op in collectives:
        is_mean = isinstance(op, ops.AllReduce) and op.reduction == "mean" and not op.servers and not op.drop
        in_flight = carried.intersection((*ops.reads(op), *ops.writes(op)))
        if not is_mean or op.group.size != plan.world_size or in_flight or op.lane != COMM:
            why = " that is in flight during later steps" if is_mean and in_flight else ""
            return (
                f"failures.on_failure: continue: plan {plan.name} has {op_text(op)}{why}; real ranks go on without one "
                f"of them only where all meet in means over all ranks (sync, local_sgd, diloco, without compression, "
                f"shared updates and overlapped averages): write restart, or leave this run out"
            )
    return None


def _reason(op: Op) -> str | None:
    if isinstance(op, ops.COLLECTIVES) and op.group.size > 1 and algorithms.is_of_user(op.algorithm):
        return (
            f"{op_text(op)} takes an algorithm of your own, which can be simulated only: real ranks take those of gloo "
            f"and NCCL; leave `algorithm` out, or leave this run out"
        )
    if isinstance(op, ops.AllReduce) and op.drop and op.servers is None:
        return (
            f"{op_text(op)} is an all-reduce among those that come first, which can be simulated only: a process group "
            f"has its members before anybody comes; let ranks come to servers (leave `algorithm` out), or leave this "
            f"run out"
        )
    beside = isinstance(op, ops.AllReduce) and op.servers and not op.servers.members
    if beside or (isinstance(op, ops.Reduce | ops.Broadcast) and op.server and op.server.apart):
        return (
            f"{op_text(op)} goes through servers beside the ranks, which can be simulated only; let ranks be the "
            f"servers (apart: false), or leave this run out"
        )
    if isinstance(op, ops.Save) and op.to == "peer":
        return (
            f"{op_text(op)} keeps a checkpoint in the memory of a peer, which can be simulated only; write to: disk or "
            f"to: storage, or leave this run out"
        )
    return None
