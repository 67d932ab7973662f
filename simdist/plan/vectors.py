"""How long the vectors are whose entries sparse buffers hold.

A sparse buffer does not say, but its indices point into some vector. What is selected from a vector of one length and
scattered into one of another would be written beside it. So every operation on the buffer must imply one length.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from simdist.plan.ops import AllGather, Copy, Densify, Merge, Op, Select
from simdist.plan.plan import Buffer, Plan


@dataclass(frozen=True, slots=True)
class Misfit:
    """An operation that implies another length than one before it.

    Args:
        body: Number of its body.
        position: Where it stands in it.
        problem: What is wrong, in words.
    """

    body: int
    position: int
    problem: str


def misfits(plan: Plan) -> Iterator[Misfit]:
    """Yield the operations that take a sparse buffer for entries of a vector of another length than others do.

    Args:
        plan: Its operations name declared buffers.
    """
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    counts: dict[str, int] = {}  # sparse buffer -> elements of its vector
    n_known = -1
    while len(counts) > n_known:  # what a later operation implies may be news for an earlier one
        n_known = len(counts)
        for body, ops in enumerate(plan.bodies):
            for position, op in enumerate(ops):
                for name, count in _implied(op, buffers, counts):
                    if counts.setdefault(name, count) != count:
                        yield Misfit(body, position, _problem(name, counts[name], count))


def _implied(op: Op, buffers: Mapping[str, Buffer], counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield `(sparse buffer, elements of its vector)`, given those known so far."""
    match op:
        case Select():
            yield op.dst, buffers[op.src].count
        case Densify():
            yield op.src, buffers[op.dst].count
        case Merge():
            yield from ((name, buffers[op.residual].count) for name in (op.src, op.dst))
        case AllGather() | Copy() if buffers[op.src].sparse:
            yield from ((a, counts[b]) for a, b in ((op.dst, op.src), (op.src, op.dst)) if b in counts)
        case _:
            pass


def _problem(name: str, known: int, count: int) -> str:
    return (
        f"takes {name!r} for entries of a vector of {count} elements; elsewhere they are of one of {known}: give the "
        f"entries of each length a buffer of their own"
    )
