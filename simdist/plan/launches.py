"""Launches: operations of the host that stand for its calls, put into a plan whose host takes time for them.

The device begins with the first kernel of an operation while the host launches the others. So a `KernelLaunch` stands
behind its operation. What comes next is launched after it, and starts after both have ended.

>>> from simdist.plan import AllReduce, Backward, Buffer, Group
>>> buffers = (Buffer("loss", 1), Buffer("grad", 1, tensors=(0, 3)))
>>> step = (Backward(("loss",), "grad"), AllReduce("grad", Group(2)))
>>> plan = Plan.from_steps("tiny", world_size=2, buffers=buffers, steps=[step])
>>> launched = with_kernel_launches(plan, frozenset({"backward", "collective"}))
>>> [type(op).__name__ for op in launched.bodies[0]]
['Backward', 'KernelLaunch', 'AllReduce', 'KernelLaunch']
"""

from collections.abc import Iterator
from dataclasses import replace

from simdist.plan import ops
from simdist.plan.ops import KernelLaunch, LaunchKind, launch_kind
from simdist.plan.plan import Body, Plan


def with_kernel_launches(plan: Plan, kinds: frozenset[LaunchKind]) -> Plan:
    """Return a plan in which launching operations of some kinds takes time of the host.

    Args:
        plan: A plan without launches.
        kinds: The kinds. `graph` is a pass or an update that is one CUDA graph.
    """
    return replace(plan, bodies=tuple(tuple(_launched(plan, body, kinds)) for body in plan.bodies))


def _launched(plan: Plan, body: Body, kinds: frozenset[LaunchKind]) -> Iterator[ops.Op]:
    graph: type[ops.Op] | None = None  # the kind of pass that is under way
    for op in body:
        yield op
        kind = launch_kind(op)
        if kind in kinds and kind is not None:
            yield KernelLaunch(kind, _n_tensors(plan, op))
        if isinstance(op, ops.Forward | ops.Backward | ops.Optimize):
            if "graph" in kinds and type(op) is not graph:
                yield KernelLaunch("graph")
            graph = None if isinstance(op, ops.Optimize) else type(op)


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
