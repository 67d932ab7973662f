"""Plans between copies of a sharded model.

A schedule writes what copies of a model exchange as if each copy were a rank. In `over_copies`, each copy is several
consecutive ranks, which hold one slice each. Ranks with the same slice of different copies exchange it:

    all_reduce(param, Group(4)) of 4 copies     becomes, with 2 ranks each,     all_reduce(param, Group(4, stride=2))

Computation stays one operation for each pass. What the ranks of a copy exchange within it is not in the plan.
"""

from dataclasses import replace

import numpy as np

from simdist.errors import PlanError, UnsupportedError
from simdist.plan import ops
from simdist.plan.ops import ALONE, Op
from simdist.plan.plan import Plan
from simdist.plan.text import op_text


def over_copies(plan: Plan, ranks_per_copy: int) -> Plan:
    """Return a plan in which several ranks do what one rank does in another plan.

    Args:
        plan: A plan in which each rank is a copy of the model. Its buffers have the sizes of one slice.
        ranks_per_copy: Ranks that share a copy.

    Raises:
        UnsupportedError: An operation needs all tensors, or divides work among ranks.

    >>> from simdist.plan import AllReduce, Group
    >>> steps = [(AllReduce("param", Group(4)), AllReduce("param", Group(2)))]
    >>> plan = over_copies(Plan.from_steps("tiny", world_size=4, buffers=(), steps=steps), 2)
    >>> plan.world_size, *(str(op.group) for op in plan.bodies[0])
    (8, 'group of 4 at stride 2', 'group of 2 at stride 2')
    """
    if plan.dataset is not None:
        raise UnsupportedError(
            f"plan {plan.name} reads a data set, whose samples are dealt to its {plan.world_size} ranks: leave `data` "
            f"out of its scenario"
        )
    bodies = tuple(tuple(spread_over_ranks(op, ranks_per_copy, plan.name) for op in body) for body in plan.bodies)
    return replace(plan, world_size=plan.world_size * ranks_per_copy, bodies=bodies)


def check_copies(plan: Plan, ranks_per_copy: int) -> None:
    """Check that only ranks with the same slice of different copies exchange data.

    Raises:
        PlanError: Others do. The error names the operation.
    """
    for op in plan.distinct_ops:
        if not isinstance(op, ops.COLLECTIVES):
            continue
        parts = np.array(op.group.members(plan.world_size)) % ranks_per_copy
        if (parts != parts[:, :1]).any():
            raise PlanError(
                f"plan {plan.name}: {op_text(op)} would mix slices of different tensors, because {ranks_per_copy} "
                f"ranks share a copy of the model: strides that do not are multiples of {ranks_per_copy}; "
                f"real.plan_for writes such a plan"
            )


def spread_over_ranks(op: Op, ranks_per_copy: int, plan_name: str) -> Op:
    """Return what several ranks do where one rank does an operation.

    Args:
        op: An operation of a rank that is a copy of the model.
        ranks_per_copy: Ranks that share a copy.
        plan_name: Name of the plan, for errors.

    Raises:
        UnsupportedError: The operation needs all tensors, or divides work among ranks.
    """
    match op:
        case ops.AllReduce() | ops.ReduceScatter() | ops.AllGather() | ops.Reduce() | ops.Broadcast():
            if op.group.size == 1:
                return replace(op, group=ALONE)
            return replace(op, group=op.group.over_copies(ranks_per_copy))
        case ops.Enter():
            absent = (copy * ranks_per_copy + member for copy in op.absent for member in range(ranks_per_copy))
            return replace(op, absent=tuple(absent))
        case ops.Optimize() if op.slices or op.ratios:
            what = "slices" if op.slices else "trust ratios"
        case ops.TrustRatios() | ops.StageIn() | ops.Save():
            what = type(op).__name__
        case _:
            return op
    raise UnsupportedError(
        f"plan {plan_name}: {what} of whole tensors, and each rank has a slice of them: take Sync(), LocalSGD, "
        f"HierarchicalSGD or DiLoCo, without shared_update, and another optimizer than LARS"
    )
