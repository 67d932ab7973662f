"""Hand-made traces for the tests of what reads traces."""

from collections.abc import Sequence

import numpy as np

from simdist.plan import AllReduce, Backward, Body, Buffer, Forward, Optimize, Plan, reads, writes
from simdist.plan.group import Group
from simdist.traces.trace import Trace

Times = tuple[float | Sequence[float], float | Sequence[float], float | Sequence[float]]
"""ready_s, start_s and end_s of an operation: one number for all ranks, or one per rank."""


def plan_of(*steps: Body, world_size: int, count: int = 1_000) -> Plan:
    """Return a plan with all the buffers that its operations name, each of `count` float32."""
    ops = [op for step in steps for op in step]
    names = dict.fromkeys(name for op in ops for name in (*reads(op), *writes(op)))
    buffers = tuple(Buffer(name, count, initialized=True) for name in names)
    return Plan.from_steps("by hand", world_size=world_size, buffers=buffers, steps=steps)


def trace_of(plan: Plan, times: Sequence[Times]) -> Trace:
    """Return a trace with these times, one triple per operation instance."""
    assert len(times) == plan.n_instances
    arrays = [
        np.array([np.broadcast_to(triple[column], plan.world_size) for triple in times], dtype=np.float64)
        for column in range(3)
    ]
    return Trace(plan, *arrays, source="by hand")


STEP = (
    Forward(("param",), ("loss",)),
    Backward(("loss", "param"), "grad"),
    AllReduce("grad", Group(2)),
    Optimize(("param",), ("grad",)),
)


def two_steps() -> Trace:
    """Return two steps of two ranks: rank 1 computes for 2 s more in the first, and starts the second 1 s late."""
    plan = plan_of(STEP, STEP, world_size=2)
    return trace_of(
        plan,
        [
            (0, 0, [1, 1]),
            ([1, 1], [1, 1], [2, 4]),
            ([2, 4], 4, 5),
            (5, 5, 6),
            ([6, 7], [6, 7], [7, 8]),
            ([7, 8], [7, 8], [8, 9]),
            ([8, 9], 9, 10),
            (10, 10, 11),
        ],
    )
