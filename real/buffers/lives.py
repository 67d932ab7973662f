"""Which buffers of a sharded plan need memory only within a step, and how many bytes they have at a time.

Gathered units, gradients and what is sent are written anew in every step before anything reads them.
"""

from collections.abc import Collection
from itertools import accumulate

from simdist.plan import Plan, ops
from simdist.plan.liveness import uses


def short_lived(plan: Plan) -> set[str]:
    """Return the buffers on the device that nothing reads before a step has written them.

    If a model is not sharded there are none: then the gradients of a step are in memory until the next one.
    """
    if all(buffer.sharded_over == ops.ALONE for buffer in plan.buffers):
        return set()
    found = {buffer.name for buffer in plan.buffers if buffer.place == "device" and not buffer.initialized}
    for body in plan.bodies:
        seen: set[str] = set()
        for op in body:
            found -= {name for name, is_new in uses(op) if name not in seen and not is_new}
            seen.update(name for name, _ in uses(op))
    return found


def in_order_nbytes(plan: Plan, names: Collection[str]) -> int:
    """Return the most bytes that short-lived buffers need at a time if operations run one after the other.

    Operations that run at the same time need more.

    Args:
        plan: The plan.
        names: Names of the buffers, which are short-lived.
    """
    sizes = {buffer.name: buffer.nbytes for buffer in plan.buffers if buffer.name in names}
    most = 0
    for body in plan.bodies:
        changes = [0] * (len(body) + 1)
        last: dict[str, int] = {}  # position of the last use so far
        for position, op in enumerate(body):
            for name, is_new in uses(op):
                if name not in sizes:
                    continue
                if is_new:
                    changes[position] += sizes[name]
                    if name in last:
                        changes[last[name] + 1] -= sizes[name]
                last[name] = position
        for name, position in last.items():
            changes[position + 1] -= sizes[name]
        most = max(most, *accumulate(changes))
    return most
