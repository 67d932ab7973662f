"""Launches: operations of the host that stand for its calls, put into a plan whose host takes time for them.

A pass, an update or a selection has many kernels. The device begins with the first while the host launches the others.
So its `KernelLaunch` stands behind it: what comes next starts after both have ended. Other operations have one kernel,
which starts when the host has launched it. Their `KernelLaunch` stands before them.

>>> from simdist.plan import AllReduce, Backward, Buffer, Group
>>> buffers = (Buffer("loss", 1), Buffer("grad", 1, tensors=(0, 3)))
>>> step = (Backward(("loss",), "grad"), AllReduce("grad", Group(2)))
>>> plan = Plan.from_steps("tiny", world_size=2, buffers=buffers, steps=[step])
>>> launched = with_kernel_launches(plan, frozenset({"backward", "collective"}))
>>> [type(op).__name__ for op in launched.bodies[0]]
['Backward', 'KernelLaunch', 'KernelLaunch', 'AllReduce']
"""

from collections.abc import Iterator
from dataclasses import replace

from simdist.plan import ops
from simdist.plan.ops import KernelLaunch, LaunchKind, launch_kind
from simdist.plan.plan import Body, Plan

#: Operations of many kernels, which the device begins while the host launches the rest.
MANY_KERNELS: frozenset[LaunchKind] = frozenset(
    {"forward", "backward", "optimize", "trust_ratios", "select", "merge", "low_rank"}
)

#: What a CUDA graph contains: all of a pass, or of an update.
IN_GRAPHS: frozenset[LaunchKind] = frozenset({"forward", "backward", "optimize"})


def with_kernel_launches(plan: Plan, kinds: frozenset[LaunchKind]) -> Plan:
    """Return a plan in which launching operations of some kinds takes time of the host.

    Args:
        plan: A plan without launches.
        kinds: The kinds. `graph` is a pass or an update that is one CUDA graph.
    """
    return replace(plan, bodies=tuple(tuple(_launched(plan, body, kinds)) for body in plan.bodies))


def _launched(plan: Plan, body: Body, kinds: frozenset[LaunchKind]) -> Iterator[ops.Op]:
    before: ops.Op | None = None  # the last pass or update
    for op in body:
        kind = launch_kind(op)
        begins_graph = kind in IN_GRAPHS and not (isinstance(op, type(before)) and not isinstance(op, ops.Optimize))
        if kind in IN_GRAPHS:
            before = op
        if "graph" in kinds and begins_graph:
            yield KernelLaunch("graph")
        if kind is None or kind not in kinds:
            yield op
        elif kind in MANY_KERNELS:
            yield from (op, KernelLaunch(kind, _n_tensors(plan, op)))
        else:
            yield from (KernelLaunch(kind), op)


def _n_tensors(plan: Plan, op: ops.Op) -> int:
    """Return the tensors that a pass or an update is of; 0 for other operations."""
    match op:
        case ops.Forward():
            names = op.srcs
        case ops.Backward():
            names = (op.dst,)
        case ops.Optimize():
            names = op.slices or op.params
        case _:
            return 0
    ranges = [buffer.tensors for buffer in map(plan.buffer, names) if buffer.tensors]
    return sum(last - first for first, last in ranges)
