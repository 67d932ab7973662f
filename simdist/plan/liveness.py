"""Liveness: when the contents of each buffer are in use.

Like dependencies, it follows from what operations read and write, and is never stated. A buffer is taken when an
operation writes it anew, and given back after the last operation that reads these contents. Buffers with contents
before the first step are in use throughout. `Wait` looks at no contents.

>>> from simdist.plan import AllGather, Backward, Forward, Group, Plan
>>> step = (AllGather("shard", "unit", Group(2)), Forward(("unit",), ("loss",)), Backward(("unit", "loss"), "grad"))
>>> sharded = Buffer("shard", 5, tensors=(0, 1), initialized=True, sharded_over=Group(2))
>>> buffers = (sharded, Buffer("unit", 10, tensors=(0, 1)), Buffer("grad", 10, tensors=(0, 1)), Buffer("loss", 1))
>>> plan = Plan.from_steps("tiny", world_size=2, buffers=buffers, steps=[step])
>>> [(life.buffer.name, life.begin, life.ends) for life in lifetimes(plan)]
[('unit', 0, (0, 2)), ('loss', 1, (2,)), ('grad', 2, (2,))]
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from simdist.plan.ops import Op, Wait, lane_of, reads, writes
from simdist.plan.plan import Buffer, Plan


@dataclass(slots=True)
class Lifetime:
    """One use of a buffer.

    Args:
        buffer: The buffer.
        begin: Row in the trace of the operation that writes it.
        first: By lane, the row of the first operation that uses these contents.
        last: By lane, the row of the last one.
    """

    buffer: Buffer
    begin: int
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[int, ...]:
        """Rows of the last operations that use these contents, one for each lane."""
        return tuple(self.last.values())


def lifetimes(plan: Plan) -> Iterator[Lifetime]:
    """Yield the uses of all buffers that have no contents before the first step, in the order of their beginnings."""
    buffers = {buffer.name: buffer for buffer in plan.buffers if not buffer.initialized}
    touched: dict[int, tuple[tuple[str, bool], ...]] = {}  # by identity, which is faster than a hash of an operation
    lanes: dict[int, str] = {}
    for body in plan.bodies:
        for op in body:
            touched[id(op)] = tuple(each for each in uses(op) if each[0] in buffers)
            lanes[id(op)] = lane_of(op).name
    found: list[Lifetime] = []
    alive: dict[str, Lifetime] = {}
    row = 0
    for number in plan.body_of_steps():
        for op in plan.bodies[number]:
            for name, is_new in touched[id(op)]:
                if is_new or name not in alive:
                    alive[name] = Lifetime(buffers[name], row)
                    found.append(alive[name])
                life = alive[name]
                life.first.setdefault(lanes[id(op)], row)
                life.last[lanes[id(op)]] = row
            row += 1
    yield from found


def uses(op: Op) -> Iterator[tuple[str, bool]]:
    """Yield the buffers that an operation uses, each with whether it writes them anew."""
    if isinstance(op, Wait):
        return
    read = reads(op)
    for name in dict.fromkeys((*read, *writes(op))):
        yield name, name not in read
