"""Is this plan legal? Every mistake is reported with the step, the operation and the body it stands in."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NoReturn, assert_never

from simdist.errors import PlanError
from simdist.groups import MAX_WORLD_SIZE
from simdist.plan import (
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Buffer,
    Collective,
    Copy,
    Delay,
    Densify,
    Forward,
    Group,
    Load,
    Op,
    Optimize,
    Plan,
    Reduce,
    ReduceScatter,
    Save,
    Select,
    Wait,
    op_text,
    reads,
    stream_of,
    writes,
)
from simdist.plan.text import body_text

__all__ = ["check", "fail_at"]


def check(plan: Plan) -> None:
    """Refuse a plan that cannot be executed.

    Raises:
        PlanError: With the first mistake found, its place and what would be right.
    """
    for problem in _plan_problems(plan):
        raise PlanError(f"plan {plan.name}: {problem}")
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    written = {buffer.name for buffer in plan.buffers if buffer.initialized}
    seen: set[int] = set()
    for step, number in enumerate(plan.body_of_steps()):
        if number not in seen:
            seen.add(number)
            _check_body(plan, number, step, buffers, written)


def fail_at(plan: Plan, *, step: int, body: int, position: int, problem: str) -> NoReturn:
    """Raise the error that shows where in the plan something is wrong."""
    operation = op_text(plan.bodies[body][position])
    shown = body_text(plan.bodies[body], marked=position)
    raise PlanError(f"plan {plan.name}: {operation} at step {step}: {problem}\nbody {body}:\n{shown}")


def _plan_problems(plan: Plan) -> Iterator[str]:
    if not 1 <= plan.world_size <= MAX_WORLD_SIZE:
        yield f"world_size {plan.world_size}; must be from 1 to {MAX_WORLD_SIZE}"
    for name, n_times in Counter(buffer.name for buffer in plan.buffers).items():
        if n_times > 1:
            yield f"buffer {name!r} is declared {n_times} times; names are unique"
    for buffer in plan.buffers:
        yield from (f"buffer {buffer.name!r}: {problem}" for problem in _buffer_problems(buffer))
    for place, run in enumerate(plan.order):
        for number in run.bodies:
            if not 0 <= number < len(plan.bodies):
                yield f"order[{place}]: body {number} does not exist; bodies are numbered 0 to {len(plan.bodies) - 1}"
        if run.times < 1 or not run.bodies:
            yield f"order[{place}]: {run} has no steps; times and the number of bodies must be at least 1"
    if not plan.order:
        yield "order is empty; a plan has at least one step"
    unused = sorted(set(range(len(plan.bodies))) - {number for run in plan.order for number in run.bodies})
    if unused:
        yield f"body {unused[0]} stands in no run of the order; take it away, or give it a step"


def _buffer_problems(buffer: Buffer) -> Iterator[str]:
    if buffer.count < 1:
        yield f"count {buffer.count}; must be at least 1"
    if buffer.tensors is not None and not 0 <= buffer.tensors[0] < buffer.tensors[1]:
        yield f"tensors {buffer.tensors}; must be a range [first, last) with 0 <= first < last"


def _check_body(plan: Plan, number: int, step: int, buffers: dict[str, Buffer], written: set[str]) -> None:
    for position, op in enumerate(plan.bodies[number]):
        for name in (*reads(op), *writes(op)):
            if name not in buffers:
                known = ", ".join(sorted(buffers))
                problem = f"buffer {name!r} is not declared; declared: {known}"
                fail_at(plan, step=step, body=number, position=position, problem=problem)
        for name in reads(op):
            if name not in written:
                problem = f"reads {name!r}, which nothing has written yet; write it first or declare it initialized"
                fail_at(plan, step=step, body=number, position=position, problem=problem)
        for problem in chain(_place_problems(op, buffers), _op_problems(op, buffers, plan.world_size)):
            fail_at(plan, step=step, body=number, position=position, problem=problem)
        written.update(writes(op))


def _place_problems(op: Op, buffers: dict[str, Buffer]) -> Iterator[str]:
    """The GPU computes and communicates in its own memory; only copies, loads and saves reach the host's."""
    if stream_of(op) not in ("compute", "comm") or isinstance(op, Copy | Delay):
        return
    for name in dict.fromkeys((*reads(op), *writes(op))):
        if buffers[name].place != "device":
            yield f"works on {name!r} in host memory; copy it to a buffer on the device first"


def _op_problems(op: Op, buffers: dict[str, Buffer], world_size: int) -> Iterator[str]:
    match op:
        case Load():
            if buffers[op.dst].place != "host":
                yield f"loads into {op.dst!r} on the device; a load ends in host memory, a copy takes it to the device"
        case Copy():
            yield from _same_size(buffers[op.src], buffers[op.dst])
        case Forward():
            if not op.dsts:
                yield "writes nothing; a forward pass writes at least the loss"
        case Backward():
            if buffers[op.dst].tensors is None:
                yield f"writes {op.dst!r}, which names no tensors; a gradient bucket holds those of a range of tensors"
        case Optimize():
            yield from _optimize_problems(op, buffers)
        case AllReduce() | Reduce() | Broadcast() | ReduceScatter() | AllGather():
            yield from _group_problems(op.group, world_size)
            yield from _algorithm_problems(op)
            yield from _collective_problems(op, buffers)
        case Select():
            yield from _select_problems(op, buffers)
        case Densify():
            if not buffers[op.src].sparse or buffers[op.dst].sparse:
                yield "scatters a sparse buffer into a dense one; declare src sparse and dst not"
        case Delay() | Wait() | Save():
            pass
        case _:
            assert_never(op)


def _group_problems(group: Group, world_size: int) -> Iterator[str]:
    try:
        group.shape(world_size)
    except PlanError as error:
        yield str(error)


def _algorithm_problems(op: Collective) -> Iterator[str]:
    if op.algorithm == "halving_doubling" and op.group.size & (op.group.size - 1):
        yield f"halving_doubling over a {op.group}; it needs a power of two, or choose ring"
    if op.algorithm == "halving_doubling" and isinstance(op, Reduce | Broadcast):
        yield "halving_doubling is no algorithm of a rooted collective; choose ring or tree"
    if op.algorithm == "tree" and isinstance(op, ReduceScatter | AllGather):
        yield "a tree reduces and broadcasts whole buffers, not slices; choose ring or halving_doubling"


def _collective_problems(op: Collective, buffers: dict[str, Buffer]) -> Iterator[str]:
    match op:
        case AllReduce() | Reduce():
            yield from _dense_problems(buffers[op.buffer])
        case Broadcast():
            pass
        case ReduceScatter():
            yield from _dense_problems(buffers[op.src])
            yield from _shard_problems(buffers[op.src], buffers[op.dst], op.group)
        case AllGather():
            yield from _shard_problems(buffers[op.dst], buffers[op.src], op.group)
        case _:
            assert_never(op)
    if isinstance(op, Reduce | Broadcast) and not 0 <= op.root < op.group.size:
        yield f"root {op.root} is no member of a {op.group}; members are numbered 0 to {op.group.size - 1}"


def _dense_problems(buffer: Buffer) -> Iterator[str]:
    if buffer.dtype == "uint8":
        yield f"reduces {buffer.name!r} of bytes (uint8); a reduction takes floating-point numbers"
    if buffer.sparse:
        yield f"reduces the sparse buffer {buffer.name!r}, whose indices differ by rank; all-gather it, then densify"


def _same_size(src: Buffer, dst: Buffer) -> Iterator[str]:
    if (src.count, src.dtype, src.sparse) != (dst.count, dst.dtype, dst.sparse):
        yield f"copies {src.count} x {src.dtype} to {dst.count} x {dst.dtype}; sizes and types must be equal"
    if None not in (src.tensors, dst.tensors) and src.tensors != dst.tensors:
        yield f"copies tensors {src.tensors} over tensors {dst.tensors}; they must be the same"


def _shard_problems(whole: Buffer, shard: Buffer, group: Group) -> Iterator[str]:
    if whole.count != shard.count * group.size:
        yield (
            f"{shard.name!r} has {shard.count} elements; {group.size} equal slices of {whole.name!r} "
            f"({whole.count} elements) would have {whole.count / group.size:,.10g}; pad {whole.name!r} to a multiple "
            f"of {group.size}"
        )
    if (whole.dtype, whole.sparse) != (shard.dtype, shard.sparse):
        yield f"{whole.name!r} and {shard.name!r} differ in element type; they must be equal"


def _optimize_problems(op: Optimize, buffers: dict[str, Buffer]) -> Iterator[str]:
    params, grads = (_tensors(names, buffers) for names in (op.params, op.grads))
    if None in params or None in grads:
        yield "updates buffers that name no tensors; parameters and gradients hold ranges of tensors"
    elif sorted(_covered(params)) != sorted(_covered(grads)):
        yield "the gradients do not cover exactly the tensors of the parameters"
    elif sum(buffers[name].count for name in op.params) != sum(buffers[name].count for name in op.grads):
        yield "the gradients have other numbers of elements than the parameters of the same tensors"
    for name in (*op.params, *op.grads):
        if buffers[name].sparse:
            yield f"updates with the sparse buffer {name!r}; densify it first"


def _tensors(names: tuple[str, ...], buffers: dict[str, Buffer]) -> list[tuple[int, int] | None]:
    return [buffers[name].tensors for name in names]


def _covered(ranges: list[tuple[int, int] | None]) -> Iterator[int]:
    for tensors in ranges:
        yield from range(*tensors) if tensors else ()


def _select_problems(op: Select, buffers: dict[str, Buffer]) -> Iterator[str]:
    src, dst, residual = buffers[op.src], buffers[op.dst], buffers[op.residual]
    if not dst.sparse or dst.count != op.k:
        yield f"selects {op.k} elements into {dst.name!r}; declare it sparse with count {op.k}"
    if not 1 <= op.k <= src.count:
        yield f"k = {op.k} of {src.count} elements; must be from 1 to {src.count}"
    if residual.count != src.count:
        yield f"residual {residual.name!r} has {residual.count} elements; {src.name!r} has {src.count}, so must it"
