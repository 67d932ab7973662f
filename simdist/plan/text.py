"""A plan as text for people: buffers, a few short bodies, a run-length order."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import assert_never

from simdist.plan import ops
from simdist.plan.group import Group
from simdist.plan.lanes import COMM, Lane
from simdist.plan.plan import Body, Buffer, Dataset, Plan, Run
from simdist.settings.base import plural
from simdist.settings.units import format_nbytes, format_seconds

_MOST_RANKS = 10  # ranks that a text names


def ranks_named(ranks: tuple[int, ...]) -> str:
    """Name ranks. Of many ranks, name the first few."""
    some = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    return f"{plural(len(ranks), 'rank')} {some}"


def op_name(op: ops.Op) -> str:
    """Return the operation's name in the field's spelling.

    >>> from simdist.plan.group import Group
    >>> op_name(ops.AllReduce("grad", Group(8)))
    'all_reduce'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(op).__name__).lower()


def op_text(op: ops.Op) -> str:
    """Return the operation as one line of text.

    >>> from simdist.plan.group import Group
    >>> op_text(ops.AllReduce("grad.2", Group(8)))
    'all_reduce(grad.2, mean over group of 8)'
    """
    return f"{op_name(op)}({_arguments(op)})"


def _arguments(op: ops.Op) -> str:  # noqa: C901 (one `match` over all operations)
    match op:
        case ops.Enter():
            absent = f"without {', '.join(map(str, op.absent))}" if op.absent else ""
            return absent or (f"after {op.awaits}, unless the others are through" if op.awaits else "")
        case ops.Load():
            return f"{_levels(op)}-> {op.dst}"
        case ops.StageIn():
            return f"storage -> disk, {op.group}"
        case ops.Copy():
            return f"{op.src} -> {op.dst}{_by_whom(op.by)}"
        case ops.Pack():
            return f"{', '.join(op.srcs)} -> {op.dst}"
        case ops.Unpack():
            return f"{op.src} -> {', '.join(op.dsts)}"
        case ops.Merge():
            return f"{op.src} -> {op.dst}, rest{_divided(op.divisor)} to {op.residual}"
        case ops.Densify():
            return f"{op.src}{_divided(op.divisor)} -> {op.dst}"
        case ops.TrustRatios():
            return f"{', '.join(op.params)} with {', '.join(op.grads)} -> {op.dst}, shared by {op.group}"
        case ops.Forward():
            return f"{', '.join(op.srcs)} -> {', '.join(op.dsts)}"
        case ops.Backward():
            return f"{', '.join(op.srcs)} -> {op.dst}{', added' if op.adds else ''}"
        case ops.Optimize():
            updated = f" -> {', '.join(op.slices)}, shared by {op.shared_by}" if op.slices else ""
            updated += ", outer optimizer" if op.optimizer == "outer" else ""
            return f"{', '.join(op.params)} with {', '.join(op.grads)}{f', {op.ratios}' if op.ratios else ''}{updated}"
        case ops.Combine():
            return f"{_sum_text(op)} -> {op.dst}"
        case ops.AllReduce():
            where = f"{op.group.text}{_by(op.algorithm)}{_served(op.servers)}"
            where += f", without the last {op.drop}" if op.drop else ""
            return f"{op.buffer}, {op.reduction} over {where}{_beside(op.lane)}"
        case ops.ReduceScatter():
            return f"{op.src} -> {op.dst}, {op.reduction} over {op.group.text}{_by(op.algorithm)}{_beside(op.lane)}"
        case ops.AllGather():
            return f"{op.src} -> {op.dst}, {op.group.text}{_by(op.algorithm)}{_beside(op.lane)}"
        case ops.Reduce():
            where = f"to member {op.root}{_by(op.algorithm)}{_at(op.server)}{_beside(op.lane)}"
            return f"{op.buffer}, {op.reduction} over {op.group.text} {where}"
        case ops.Broadcast():
            where = f"from member {op.root}{_by(op.algorithm)}{_at(op.server)}{_beside(op.lane)}"
            return f"{op.buffer}, {op.group.text} {where}"
        case ops.Select():
            return f"{op.src} -> {op.dst}, {op.k} of it by {op.method}, rest to {op.residual}"
        case ops.LowRank():
            return _low_rank(op)
        case ops.Delay():
            return op.channel + ("" if op.micro_batch is None else f", micro-batch {op.micro_batch}")
        case ops.Tick():
            return f"{', '.join(op.srcs)}, every {format_seconds(op.period_s)}"
        case ops.Wait():
            return op.buffer
        case ops.KernelLaunch():
            return op.kind + (f" of {op.n_tensors} {plural(op.n_tensors, 'tensor')}" if op.n_tensors else "")
        case ops.Save():
            return f"{', '.join(op.srcs)}{'' if op.to == 'storage' else f' -> {op.to}'}{_by_whom(op.by)}"
        case _:
            assert_never(op)


def _low_rank(op: ops.LowRank) -> str:
    ranks = sorted({matrix.rank for matrix in op.matrices})
    n_matrices = f"{len(op.matrices)} {'matrices' if len(op.matrices) > 1 else 'matrix'}"
    matrices = f"{n_matrices} of rank {', '.join(map(str, ranks))}"
    drawn = "" if op.seed is None else f", drawn by seed {op.seed}"
    srcs, dsts = (", ".join(name for name in each(op) if name != op.residual) for each in (ops.reads, ops.writes))
    return f"{op.stage}: {srcs} -> {dsts}, {matrices}{drawn}, rest in {op.residual}"


def _levels(op: ops.Load) -> str:
    """Return the levels that a load reads and keeps samples on, such as `disk, else storage (kept on disk) `."""
    kept = f" (kept on {' and '.join(op.keep)})" if op.keep else ""
    return f"{', else '.join(op.read)}{kept} " if op.read else ""


def _sum_text(op: ops.Combine) -> str:
    """Return a linear combination in the usual notation, such as `anchor - param`."""
    terms = (
        f"{'-' if weight < 0 else '+'} {'' if abs(weight) == 1 else f'{abs(weight):.10g} '}{src}"
        for src, weight in zip(op.srcs, op.weights, strict=True)
    )
    return " ".join(terms).removeprefix("+ ")


def _by(algorithm: str) -> str:
    return "" if algorithm == "auto" else f", {algorithm}"


def _by_whom(group: Group) -> str:
    return "" if group == ops.ALONE else f", by the first of each {group}"


def _divided(divisor: int) -> str:
    return "" if divisor == 1 else f" / {divisor}"


def _served(servers: ops.Servers | None) -> str:
    if servers is None:
        return ""
    where = f"members {', '.join(map(str, servers.members))}" if servers.members else f"{len(servers.parts)} apart"
    return f" ({where})"


def _at(server: ops.Server | None) -> str:
    return f" ({server.number}{' apart' if server.apart else ''})" if server else ""


def _beside(lane: Lane) -> str:
    return "" if lane.communicator == COMM.communicator else ", beside others"


def body_text(body: Body, *, marked: int | None = None) -> str:
    """Return a body as lines of `stream  operation`; an arrow points at position `marked`."""
    if not body:
        return "    nothing"
    return "\n".join(
        f"{'-->' if position == marked else '   '} {ops.lane_of(op).stream:8s} {op_text(op)}"
        for position, op in enumerate(body)
    )


def order_text(order: tuple[Run, ...]) -> str:
    """Return the order as runs, such as `0x10 (0 1)x495`."""
    return " ".join(_run_text(run) for run in order)


def _run_text(run: Run) -> str:
    bodies = " ".join(map(str, run.bodies))
    if run.times == 1:
        return bodies
    return f"{bodies}x{run.times}" if len(run.bodies) == 1 else f"({bodies})x{run.times}"


def plan_text(plan: Plan) -> str:
    """Return the whole plan as text that a person can read."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan {plan.name}: {plan.world_size} ranks, {plan.n_steps} steps, {plan.n_instances:,} operations per rank"
    yield f"digest {plan.digest()}"
    yield "buffers"
    width = max((len(buffer.name) for buffer in plan.buffers), default=0)
    yield from (f"    {_buffer_text(buffer, width)}" for buffer in plan.buffers)
    if plan.dataset:
        yield "data"
        yield f"    {_dataset_text(plan.dataset, plan.world_size)}"
    n_steps = Counter(plan.body_of_steps())
    for number, body in enumerate(plan.bodies):
        yield f"body {number}, {n_steps[number]} {plural(n_steps[number], 'step')}"
        yield body_text(body)
    yield f"order {order_text(plan.order)}"


def _dataset_text(dataset: Dataset, world_size: int) -> str:
    sizes = dataset.file_nbytes
    total = sum(sizes) if len(sizes) > 1 else sizes[0] * dataset.n_samples
    order = {"global": "shuffled", "node": "shuffled within nodes", "none": "in order"}[dataset.shuffle]
    return (
        f"{dataset.n_samples:,} samples, {format_nbytes(total)} of files, {format_nbytes(dataset.sample_nbytes)} each "
        f"decoded; {dataset.steps_per_epoch(world_size)} steps an epoch, {order}"
    )


def _buffer_text(buffer: Buffer, width: int) -> str:
    traits = [
        f"{buffer.name:{width}s} {buffer.count:>13,} x {buffer.dtype}{' + index' if buffer.sparse else ''}",
        f"{format_nbytes(buffer.nbytes):>9s}",
    ]
    if buffer.tensors is not None:
        traits.append(f"tensors {buffer.tensors[0]}:{buffer.tensors[1]}")
    if buffer.place == "host":
        traits.append("in host memory")
    if buffer.initialized:
        traits.append("initialized")
    if buffer.sharded_over.size > 1:
        traits.append(f"sharded over {buffer.sharded_over}")
    if buffer.padding:
        traits.append(f"{buffer.padding} of them padding")
    return "  ".join(traits)
