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

from simdist.plan.ops import Op, Optimize, Wait, lane_of, reads, writes
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
    each_op = {id(op): op for body in plan.bodies for op in body}  # bodies often repeat the same object
    lane_and_uses = {
        number: (lane_of(op).name, [each for each in uses(op) if each[0] in buffers]) for number, op in each_op.items()
    }
    bodies = [[lane_and_uses[id(op)] for op in body] for body in plan.bodies]
    found: list[Lifetime] = []
    alive: dict[str, Lifetime] = {}
    row = 0
    for number in plan.body_of_steps():
        for lane, used in bodies[number]:
            for name, is_new in used:
                life = None if is_new else alive.get(name)
                if life is None:
                    life = alive[name] = Lifetime(buffers[name], row)
                    found.append(life)
                if lane not in life.first:
                    life.first[lane] = row
                life.last[lane] = row
            row += 1
    yield from found


def uses(op: Op) -> list[tuple[str, bool]]:
    """Return the buffers that an operation uses, each with whether it writes them anew."""
    if isinstance(op, Wait):
        return []
    read = reads(op)
    return [(name, name not in read) for name in dict.fromkeys(read + writes(op))]


def carried_buffers(plan: Plan) -> tuple[str, ...]:
    """Return the buffers, without parameters, that some step reads before it writes them."""
    updates = (op for body in plan.bodies for op in body if isinstance(op, Optimize) and op.optimizer == "inner")
    parameters = {name for op in updates for name in op.params}
    carried: dict[str, None] = {}
    for body in plan.bodies:
        written: set[str] = set()
        for op in body:
            carried.update(dict.fromkeys(name for name in reads(op) if name not in written))
            written.update(writes(op))
    return tuple(name for name in carried if name not in parameters)
