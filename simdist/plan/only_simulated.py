"""What only the simulator can do of a plan: real ranks refuse it, and `simdist validate` says so."""

from simdist.plan import algorithms, ops
from simdist.plan.ops import Op
from simdist.plan.plan import Plan
from simdist.plan.text import op_text


def only_simulated(plan: Plan) -> str | None:
    """Return which operation real ranks cannot perform, why, and what to write instead; None if they can."""
    return next((reason for reason in map(_reason, plan.distinct_ops) if reason), None)


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
