"""Check that a plan is legal. Every error names the step, the operation and the body."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import NoReturn, assert_never

from simdist.errors import PlanError
from simdist.plan import Body, Buffer, Dataset, Group, Plan, algorithms, ops
from simdist.plan.group import MAX_WORLD_SIZE
from simdist.plan.lanes import KINDS, LANES, Lane, LaneKind
from simdist.plan.plan import ITEM_NBYTES

_MOST_SERVERS = 4096  # servers that take pushes and pulls one by one
_ONE_LANE: tuple[LaneKind, ...] = ("host", "compute")  # a rank has one lane of each of these kinds
_MAX_SELECTED_FROM = 2**31 - 1  # elements; indices are int32


def check(plan: Plan) -> None:
    """Refuse a plan that cannot be executed.

    Raises:
        PlanError: The first mistake found, with its place and the remedy.
    """
    for problem in _plan_problems(plan):
        raise PlanError(f"plan {plan.name}: {problem}")
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    written = {buffer.name for buffer in plan.buffers if buffer.initialized}
    seen: set[int] = set()
    legal: set[ops.Op] = set()  # whatever comes later: buffers that were written stay so
    for step, number in enumerate(plan.body_of_steps()):
        if number not in seen:
            seen.add(number)
            _check_body(plan, number, step, buffers, written, legal)
    for body, position, problem in chain(_lateness(plan), _misfits(plan), _missing_copies(plan)):
        step = next(step for step, number in enumerate(plan.body_of_steps()) if number == body)
        fail_at(plan, step=step, body=body, position=position, problem=problem)


def fail_at(plan: Plan, *, step: int, body: int, position: int, problem: str) -> NoReturn:
    """Raise the error that shows the place of a mistake in the plan."""
    from simdist.plan.text import body_text, op_text

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
        problems = (*_buffer_problems(buffer), *_sharing_problems(buffer.sharded_over, plan.world_size))
        yield from (f"buffer {buffer.name!r}: {problem}" for problem in problems)
    if plan.dataset:
        from simdist.plan.check_dataset import dataset_problems

        yield from (f"data set: {problem}" for problem in dataset_problems(plan.dataset, plan.world_size))
    for place, run in enumerate(plan.order):
        for number in run.bodies:
            if not 0 <= number < len(plan.bodies):
                yield f"order[{place}]: body {number} does not exist; bodies are numbered 0 to {len(plan.bodies) - 1}"
        if run.times < 1 or not run.bodies:
            yield f"order[{place}]: {run} has no steps; times and the number of bodies must be at least 1"
    if not plan.order:
        yield "order is empty; a plan has at least one step"
    yield from _plan_lane_problems(plan)
    unused = sorted(set(range(len(plan.bodies))) - {number for run in plan.order for number in run.bodies})
    if unused:
        yield f"body {unused[0]} stands in no run of the order; take it away, or give it a step"


def _buffer_problems(buffer: Buffer) -> Iterator[str]:
    if buffer.count < 1:
        yield f"count {buffer.count}; must be at least 1"
    if buffer.tensors is not None and not 0 <= buffer.tensors[0] < buffer.tensors[1]:
        yield f"tensors {buffer.tensors}; must be a range [first, last) with 0 <= first < last"
    if not 0 <= buffer.padding < max(buffer.count, 1):
        yield f"padding {buffer.padding}; must be from 0 to {buffer.count - 1}, less than its count"


def _check_body(
    plan: Plan, number: int, step: int, buffers: dict[str, Buffer], written: set[str], legal: set[ops.Op]
) -> None:
    for position, op in enumerate(plan.bodies[number]):
        if op in legal:
            continue
        for problem in _problems(plan, op, buffers, written):
            fail_at(plan, step=step, body=number, position=position, problem=problem)
        written.update(ops.writes(op))
        legal.add(op)


def _problems(plan: Plan, op: ops.Op, buffers: dict[str, Buffer], written: set[str]) -> Iterator[str]:
    for name in (*ops.reads(op), *ops.writes(op)):
        if name not in buffers:
            yield f"buffer {name!r} is not declared; declared: {', '.join(sorted(buffers))}"
    for name in ops.reads(op):
        if name not in written:
            yield f"reads {name!r}, which nothing has written yet; write it first or declare it initialized"
    yield from _lane_problems(op)
    yield from _place_problems(op, buffers)
    yield from _data_problems(op, buffers, plan.dataset)
    yield from _op_problems(op, buffers, plan.world_size)


def _lane_problems(op: ops.Op) -> Iterator[str]:
    lane = ops.lane_of(op)
    kinds = _kinds_for(op)
    if lane.kind not in kinds:
        yield f"runs on the lane {lane.name!r} of kind {lane.kind}; it runs on one of kind {' or '.join(kinds)}"


def _kinds_for(op: ops.Op) -> tuple[LaneKind, ...]:
    """Return the kinds of lanes that an operation may run on."""
    match op:
        case ops.Enter() | ops.KernelLaunch():
            return ("host",)
        case ops.Wait():
            return ("host", "compute", "comm")
        case ops.Delay():
            return KINDS
        case ops.Load() | ops.StageIn():
            return ("io",)
        case ops.Save():
            return ("save",)
        case ops.Forward() | ops.Backward() | ops.TrustRatios() | ops.Optimize():
            return ("compute",)
        case ops.AllReduce() | ops.ReduceScatter() | ops.AllGather() | ops.Reduce() | ops.Broadcast() | ops.Tick():
            return ("comm",)
        case ops.Copy() | ops.Combine() | ops.Pack() | ops.Unpack():
            return ("compute", "comm")
        case ops.Select() | ops.Merge() | ops.Densify() | ops.LowRank():
            return ("compute", "comm")
        case _:
            assert_never(op)


def _plan_lane_problems(plan: Plan) -> Iterator[str]:
    """Yield what is wrong with the lanes of a plan as a whole."""
    by_name: dict[str, Lane] = {}
    for lane in plan.lanes:
        known = by_name.setdefault(lane.name, lane)
        if known != lane:
            yield f"two lanes are called {lane.name!r}: {known} and {lane}; give each lane a name of its own"
        if (lane.kind == "comm") != bool(lane.communicator):
            yield f"lane {lane.name!r} of kind {lane.kind}: a lane of kind comm names a communicator, others do not"
        if lane.kind in _ONE_LANE and lane not in LANES:
            yield f"lane {lane.name!r}: a rank has one lane of kind {lane.kind}; take that one"


def _place_problems(op: ops.Op, buffers: dict[str, Buffer]) -> Iterator[str]:
    """The GPU computes and communicates in its own memory. Only copies, loads and saves access host memory."""
    if ops.lane_of(op).kind not in ("compute", "comm") or isinstance(op, ops.Copy | ops.Delay):
        return
    for name in dict.fromkeys((*ops.reads(op), *ops.writes(op))):
        if buffers[name].place != "device":
            yield f"works on {name!r} in host memory; copy it to a buffer on the device first"


def _data_problems(op: ops.Op, buffers: dict[str, Buffer], dataset: Dataset | None) -> Iterator[str]:
    if not isinstance(op, ops.Load | ops.StageIn):
        return
    from simdist.plan.check_dataset import load_problems, stage_in_problems

    if isinstance(op, ops.Load):
        yield from load_problems(op, buffers[op.dst], dataset)
    else:
        yield from stage_in_problems(op, dataset)


def _op_problems(  # noqa: C901, PLR0915 (one `match` over all operations)
    op: ops.Op, buffers: dict[str, Buffer], world_size: int
) -> Iterator[str]:
    match op:
        case ops.Load():
            if buffers[op.dst].place != "host":
                yield f"loads into {op.dst!r} on the device; a load ends in host memory, a copy takes it to the device"
        case ops.StageIn():
            yield from _sharing_problems(op.group, world_size)
        case ops.Copy():
            yield from _sharing_problems(op.by, world_size)
            yield from _same_size(buffers[op.src], buffers[op.dst])
        case ops.Pack():
            yield from _fusion_problems([buffers[name] for name in op.srcs], buffers[op.dst])
        case ops.Unpack():
            yield from _fusion_problems([buffers[name] for name in op.dsts], buffers[op.src])
            yield from (f"writes {name!r} twice; take each part into a buffer of its own" for name in _twice(op.dsts))
        case ops.Forward():
            if not op.dsts:
                yield "writes nothing; a forward pass writes at least the loss"
        case ops.Backward():
            if buffers[op.dst].tensors is None:
                yield f"writes {op.dst!r}, which names no tensors; a gradient bucket holds those of a range of tensors"
        case ops.TrustRatios():
            yield from _sharing_problems(op.group, world_size)
            yield from _update_problems(op, buffers)
            yield from _share_problems(op, buffers)
        case ops.Optimize() if op.slices:
            yield from _sharing_problems(op.shared_by, world_size)
            yield from _slice_problems(op, buffers)
        case ops.Optimize():
            yield from _update_problems(op, buffers)
            yield from _ratio_problems(op, buffers)
        case ops.Combine():
            yield from _sum_problems(op, buffers)
        case ops.AllReduce() | ops.Reduce() | ops.Broadcast() | ops.ReduceScatter() | ops.AllGather():
            yield from _group_problems(op.group, world_size)
            yield from _algorithm_problems(op)
            yield from _collective_problems(op, buffers)
        case ops.Select():
            yield from _select_problems(op, buffers)
        case ops.Merge():
            yield from _merge_problems(op, buffers)
        case ops.Densify():
            yield from _densify_problems(op, buffers[op.src], buffers[op.dst])
        case ops.LowRank():
            yield from _low_rank_problems(op, buffers)
        case ops.Tick():
            if not op.srcs:
                yield "waits for a tick after nothing; name the buffers that were written before"
            if not 0 < op.period_s < math.inf:
                yield f"ticks every {op.period_s} s; a period is a number of seconds above 0"
        case ops.Save():
            yield from _sharing_problems(op.by, world_size)
            if not op.srcs:
                yield "saves nothing; name the buffers that the file holds"
            if op.dst and buffers[op.dst].place != "host":
                yield f"stands for a file as {op.dst!r} on the device; declare it in host memory"
        case ops.Delay():
            if op.micro_batch is not None and op.micro_batch < 0:
                yield f"delays micro-batch {op.micro_batch}; they are counted from 0"
        case ops.KernelLaunch():
            if op.n_tensors < 0:
                yield f"launches kernels of {op.n_tensors} tensors; they are 0 or more"
        case ops.Enter() | ops.Wait():
            pass
        case _:
            assert_never(op)


def _densify_problems(op: ops.Densify, src: Buffer, dst: Buffer) -> Iterator[str]:
    if not src.sparse or dst.sparse:
        yield "scatters a sparse buffer into a dense one; declare src sparse and dst not"
    elif src.dtype != dst.dtype:
        yield f"scatters {src.dtype} into {dst.dtype}; copy the entries to a sparse buffer of that type first"
    yield from _divisor_problems(op.divisor)


def _lateness(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """Yield body, position and problem of operations by which ranks sit out a step or are late in it."""
    for number, body in enumerate(plan.bodies):
        enter = ops.entering(body)
        exchange = ops.drops(body)
        for position, op in enumerate(body):
            if isinstance(op, ops.Enter) and position:
                yield number, position, "stands in the middle of a step; put it first"
        if enter and enter.absent:
            yield from ((number, position, problem) for position, problem in _absences(body, enter, plan.world_size))
        if exchange is not None:
            yield from ((number, position, problem) for position, problem in _drops(body, exchange, plan.world_size))
        if (enter is not None and enter.awaits is not None) != (exchange is not None):
            yield number, exchange or 0, "a step that may be late waits for its parameters first: enter(awaits=...)"


def _absences(body: Body, enter: ops.Enter, world_size: int) -> Iterator[tuple[int, str]]:
    """Yield position and problem of a step that some ranks sit out by plan."""
    if not set(enter.absent) < set(range(world_size)) or list(enter.absent) != sorted(set(enter.absent)):
        yield 0, f"ranks {enter.absent}; write some of {world_size} in order, each once, but not all"
    if enter.awaits:
        yield 0, "sits out by plan and by time; write one of the two"
    for position in _collectives_in(body)[:1]:
        yield position, "has to wait for ranks that sit the step out; let all of them enter it"


def _drops(body: Body, exchange: int, world_size: int) -> Iterator[tuple[int, str]]:
    """Yield position and problem of a step with an all-reduce that drops late ranks."""
    op = body[exchange]
    assert isinstance(op, ops.AllReduce)
    if not 0 < op.drop < op.group.size or op.group.size != world_size:
        yield exchange, f"drops {op.drop}; write fewer than all {world_size} ranks, over all ranks"
    if op.servers is not None and (op.servers.members[:1] != (0,) or not sum(op.servers.parts[:1])):
        where = "servers that are members, the first of them member 0, with a part"
        yield exchange, f"drops the late, without saying where they come to: {where}"
    for other in [at for at in _collectives_in(body) if at != exchange][:1]:
        yield other, "stands beside an all-reduce that drops the late; a step has one of the two"


def _collectives_in(body: Body) -> list[int]:
    return [at for at, op in enumerate(body) if isinstance(op, ops.COLLECTIVES)]


def _sharing_problems(group: Group, world_size: int) -> Iterator[str]:
    """Yield what is wrong with groups whose members share work or data: they follow a pattern."""
    if group.ranks:
        yield f"shares among a {group.text}; only collectives take groups by list: write a size and a stride"
    else:
        yield from _group_problems(group, world_size)


def _group_problems(group: Group, world_size: int) -> Iterator[str]:
    try:
        group.shape(world_size)
    except PlanError as error:
        yield str(error)


def _algorithm_problems(op: ops.Collective) -> Iterator[str]:
    yield from algorithms.problems(op)
    if isinstance(op, ops.AllReduce) and (op.algorithm == "server") != (op.servers is not None):
        yield "the algorithm `server` and the field `servers` go together; set both or none"
    if isinstance(op, ops.Reduce | ops.Broadcast):
        if (op.algorithm == "server") != (op.server is not None):
            yield "the algorithm `server` and the field `server` go together; set both or none"
        if op.server and not 0 <= op.server.number < _MOST_SERVERS:
            yield f"server {op.server.number}; servers are numbered 0 to {_MOST_SERVERS - 1}"


def _collective_problems(op: ops.Collective, buffers: dict[str, Buffer]) -> Iterator[str]:
    match op:
        case ops.AllReduce():
            yield from _dense_problems(buffers[op.buffer])
            yield from _server_problems(op, buffers[op.buffer])
        case ops.Reduce():
            yield from _dense_problems(buffers[op.buffer])
        case ops.Broadcast():
            pass
        case ops.ReduceScatter():
            yield from _dense_problems(buffers[op.src])
            yield from _shard_problems(buffers[op.src], buffers[op.dst], op.group)
        case ops.AllGather():
            yield from _shard_problems(buffers[op.dst], buffers[op.src], op.group)
        case _:
            assert_never(op)
    if isinstance(op, ops.Reduce | ops.Broadcast) and not 0 <= op.root < op.group.size:
        yield f"root {op.root} is no member of a {op.group}; members are numbered 0 to {op.group.size - 1}"


def _dense_problems(buffer: Buffer) -> Iterator[str]:
    if buffer.dtype == "uint8":
        yield f"reduces {buffer.name!r} of bytes (uint8); a reduction takes floating-point numbers"
    if buffer.sparse:
        yield f"reduces the sparse buffer {buffer.name!r}, whose indices differ by rank; all-gather it, then densify"


def _server_problems(op: ops.AllReduce, buffer: Buffer) -> Iterator[str]:
    if op.servers is None:
        return
    parts = op.servers.parts
    members = op.servers.members
    if not parts or min(parts) < 0 or sum(parts) != buffer.count:
        yield f"servers hold {parts} elements; {buffer.name!r} has {buffer.count}, and they hold all of it"
    if members and (len(members) != len(parts) or len(set(members)) < len(members)):
        yield f"servers are members {members}; write one member for each of the {len(parts)} parts, all different"
    if members and not all(0 <= member < op.group.size for member in members):
        yield f"servers are members {members} of a {op.group}; members are numbered 0 to {op.group.size - 1}"


def _same_size(src: Buffer, dst: Buffer) -> Iterator[str]:
    same_type = src.dtype == dst.dtype or (_is_floating(src) and _is_floating(dst))
    n_slices = dst.sharded_over.size if src.sharded_over.size == 1 else 1  # a copy to slices takes one of them
    if (src.count, src.sparse) != (dst.count * n_slices, dst.sparse) or not same_type:
        yield (
            f"copies {src.count} x {src.dtype} to {dst.count} x {dst.dtype}; sizes must be equal, and types equal or "
            f"both floating-point"
        )
    if None not in (src.tensors, dst.tensors) and src.tensors != dst.tensors:
        yield f"copies tensors {src.tensors} over tensors {dst.tensors}; they must be the same"


def _sum_problems(op: ops.Combine, buffers: dict[str, Buffer]) -> Iterator[str]:
    if not op.srcs or len(op.srcs) != len(op.weights) or not all(map(math.isfinite, op.weights)):
        yield f"adds up {len(op.srcs)} buffers with weights {op.weights}; write one number for each of at least one"
    yield from (f"adds up {name!r} twice; add its weights" for name in _twice(op.srcs))
    for name in (*op.srcs, op.dst):
        yield from _same_size(buffers[name], buffers[op.dst])
        if buffers[name].sparse or not _is_floating(buffers[name]):
            yield f"adds up {name!r}, which is not dense and floating-point"


def _is_floating(buffer: Buffer) -> bool:
    return buffer.dtype != "uint8"


def _fusion_problems(parts: list[Buffer], fused: Buffer) -> Iterator[str]:
    n_elements = sum(part.count for part in parts)
    if not parts or n_elements != fused.count - fused.padding:
        yield f"{len(parts)} buffers have {n_elements} elements; {fused.name!r} holds {fused.count - fused.padding}"
    for buffer in (*parts, fused):
        if buffer.sparse or not _is_floating(buffer):
            yield f"fuses {buffer.name!r}, which is not dense and floating-point"


def _twice(names: tuple[str, ...]) -> list[str]:
    return [name for name, n_times in Counter(names).items() if n_times > 1]


def _shard_problems(whole: Buffer, shard: Buffer, group: Group) -> Iterator[str]:
    if whole.count != shard.count * group.size:
        yield (
            f"{shard.name!r} has {shard.count} elements; {group.size} equal slices of {whole.name!r} "
            f"({whole.count} elements) would have {whole.count / group.size:,.10g}; pad {whole.name!r} to a multiple "
            f"of {group.size}"
        )
    if (whole.dtype, whole.sparse) != (shard.dtype, shard.sparse):
        yield f"{whole.name!r} and {shard.name!r} differ in element type; they must be equal"


def _update_problems(op: ops.Optimize | ops.TrustRatios, buffers: dict[str, Buffer]) -> Iterator[str]:
    params, grads = (_tensors(names, buffers) for names in (op.params, op.grads))
    if None in params or None in grads:
        yield "updates buffers that name no tensors; parameters and gradients hold ranges of tensors"
    elif sorted(_covered(params)) != sorted(_covered(grads)):
        yield "the gradients do not cover exactly the tensors of the parameters"
    elif len({buffers[name].sharded_over for name in (*op.params, *op.grads)}) > 1:
        yield "updates slices together with other slices, or with whole tensors; shard all of them over one group"
    elif _n_elements(op.params, buffers) != _n_elements(op.grads, buffers):
        yield "the gradients have other numbers of elements than the parameters of the same tensors"
    for name in (*op.params, *op.grads):
        if buffers[name].sparse:
            yield f"updates with the sparse buffer {name!r}; densify it first"


def _n_elements(names: tuple[str, ...], buffers: dict[str, Buffer]) -> int:
    return sum(buffers[name].count - buffers[name].padding for name in names)


def _n_tensors(names: tuple[str, ...], buffers: dict[str, Buffer]) -> int:
    return len(set(_covered(_tensors(names, buffers))))


def _share_problems(op: ops.TrustRatios, buffers: dict[str, Buffer]) -> Iterator[str]:
    dst = buffers[op.dst]
    n_tensors = _n_tensors(op.params, buffers)
    share = math.ceil(n_tensors / op.group.size)
    if dst.count != share:
        yield f"{op.dst!r} holds {dst.count} ratios; a share of {n_tensors} tensors over a {op.group} is {share}"
    if dst.sparse or not _is_floating(dst):
        yield f"writes ratios to {op.dst!r}, which is not dense and floating-point"


def _ratio_problems(op: ops.Optimize, buffers: dict[str, Buffer]) -> Iterator[str]:
    if op.ratios is None:
        return
    ratios = buffers[op.ratios]
    n_tensors = _n_tensors(op.params, buffers)
    if ratios.count < n_tensors or ratios.sparse:
        yield f"{op.ratios!r} holds {ratios.count} ratios; there are {n_tensors} tensors, and each takes one"


def _slice_problems(op: ops.Optimize, buffers: dict[str, Buffer]) -> Iterator[str]:
    if op.ratios:
        yield "shares an update with trust ratios, which are of whole tensors; share the ratios instead"
    joins = len(op.params) == len(op.slices) == 1 < len(op.grads)  # several gradients for one buffer of parameters
    if joins:
        yield from _update_problems(op, buffers)
    elif not len(op.params) == len(op.grads) == len(op.slices):
        yield f"has {len(op.params)} parameters, {len(op.grads)} gradients and {len(op.slices)} slices; write one each"
    for param, grad, updated in zip(op.params, op.grads, op.slices, strict=False):
        kept = buffers[updated]
        lasts = kept.initialized and _is_floating(kept)  # it may have a type of its own
        like = replace(kept, dtype=buffers[param].dtype) if lasts else kept
        yield from _shard_problems(buffers[param], like, op.shared_by)
        if buffers[param].tensors is None:
            yield f"updates {param!r}, which names no tensors"
        whole = buffers[param].count
        one = buffers[updated].count
        fits = joins or buffers[grad].count in (whole, whole - buffers[param].padding, one)
        if not fits or buffers[grad].sparse:
            yield f"updates with {buffers[grad].count} elements of {grad!r}; {param!r} takes {one}, or all {whole}"


def _tensors(names: tuple[str, ...], buffers: dict[str, Buffer]) -> list[tuple[int, int] | None]:
    return [buffers[name].tensors for name in names]


def _covered(ranges: list[tuple[int, int] | None]) -> Iterator[int]:
    for tensors in ranges:
        yield from range(*tensors) if tensors else ()


def _select_problems(op: ops.Select, buffers: dict[str, Buffer]) -> Iterator[str]:
    src = buffers[op.src]
    dst = buffers[op.dst]
    residual = buffers[op.residual]
    for buffer in (src, residual):
        if buffer.sparse:
            yield f"selects from the sparse buffer {buffer.name!r}; src and residual are dense"
    if not dst.sparse or dst.count != op.k:
        yield f"selects {op.k} elements into {dst.name!r}; declare it sparse with count {op.k}"
    if not 1 <= op.k <= src.count:
        yield f"k = {op.k} of {src.count} elements; must be from 1 to {src.count}"
    if src.count > _MAX_SELECTED_FROM:
        reach = f"int32 indices reach {_MAX_SELECTED_FROM}"
        yield f"selects from {src.count} elements; {reach}: select from smaller buckets"
    if residual.count != src.count:
        yield f"residual {residual.name!r} has {residual.count} elements; {src.name!r} has {src.count}, so must it"
    yield from _residual_problems(src, dst, residual)


def _low_rank_problems(op: ops.LowRank, buffers: dict[str, Buffer]) -> Iterator[str]:
    unknown = [name for name in (op.grad, op.left, op.right, *op.others) if name not in buffers]
    if unknown:
        yield f"approximates with {unknown[0]!r}, which is no buffer of the plan"
        return
    grad = buffers[op.grad]
    end = 0
    n_grad = grad.count - grad.padding
    for matrix in sorted(op.matrices, key=lambda matrix: matrix.first):
        if matrix.first < end or not 1 <= matrix.rank <= min(matrix.rows, matrix.columns):
            yield f"approximates {matrix}; matrices lie side by side, and have no fewer rows and columns than rank"
        end = matrix.first + matrix.rows * matrix.columns
    if end > n_grad or not op.matrices:
        yield f"approximates {len(op.matrices)} matrices in {end} elements; {op.grad!r} has {n_grad}"
    expected = {
        op.residual: grad.count,
        op.left: sum(matrix.rows * matrix.rank for matrix in op.matrices),
        op.right: sum(matrix.columns * matrix.rank for matrix in op.matrices),
    }
    n_rest = n_grad - sum(matrix.rows * matrix.columns for matrix in op.matrices)
    if bool(op.rest) != bool(n_rest):
        yield f"has {n_rest} elements of other tensors; name a buffer `rest` for them if there are some"
    for name, count in (expected | dict.fromkeys(op.others, n_rest)).items():
        if buffers[name].count != count or buffers[name].sparse or buffers[name].dtype != grad.dtype:
            yield f"{name!r} has {buffers[name].count} x {buffers[name].dtype}; it takes {count} x {grad.dtype}"


def _merge_problems(op: ops.Merge, buffers: dict[str, Buffer]) -> Iterator[str]:
    src = buffers[op.src]
    dst = buffers[op.dst]
    residual = buffers[op.residual]
    if not src.sparse or not dst.sparse or residual.sparse:
        yield "merges a sparse buffer into a sparse one, the rest goes to a dense one; declare them so"
    if not 1 <= dst.count <= src.count:
        yield f"keeps {dst.count} of {src.count} entries; must be from 1 to {src.count}"
    yield from _residual_problems(src, dst, residual)
    yield from _divisor_problems(op.divisor)


def _residual_problems(src: Buffer, dst: Buffer, residual: Buffer) -> Iterator[str]:
    """A residual sums values that are small beside its own, so its type must be at least as precise as theirs."""
    for buffer in (src, dst):
        is_narrower = ITEM_NBYTES[buffer.dtype] < ITEM_NBYTES[residual.dtype]
        if not (_is_floating(buffer) and (is_narrower or buffer.dtype == residual.dtype)):
            yield (
                f"a residual of {residual.dtype} for {buffer.name!r} of {buffer.dtype}; both are floating-point, of "
                f"the same type, or the residual has more bits"
            )


def _divisor_problems(divisor: int) -> Iterator[str]:
    if divisor < 1:
        yield f"divides by {divisor}; a divisor is at least 1"


def _misfits(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """Yield body, position and problem of operations that use one sparse buffer for vectors of two lengths.

    A sparse buffer does not record the length of the vector that its indices point into. An entry selected from a
    vector of one length and scattered into a vector of another could be written out of bounds. So all operations imply
    one length.
    """
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    counts: dict[str, int] = {}  # sparse buffer -> elements of its vector
    n_known = -1
    while len(counts) > n_known:  # a later operation may imply lengths for an earlier one
        n_known = len(counts)
        for number, body in enumerate(plan.bodies):
            for position, op in enumerate(body):
                for name, count in _implied(op, buffers, counts):
                    if counts.setdefault(name, count) != count:
                        yield number, position, _misfit_text(name, counts[name], count)


def _missing_copies(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """Yield body, position and problem of operations that read a copy that only some ranks have."""
    copies = [op for body in plan.bodies for op in body if isinstance(op, ops.Copy)]
    of = {op.dst: op.by for op in copies if op.by.size > 1}
    for number, body in enumerate(plan.bodies):
        for position, op in enumerate(body):
            for name in ops.reads(op):
                saves_it = isinstance(op, ops.Save) and op.by == of.get(name)
                if name in of and not saves_it and not isinstance(op, ops.Wait):
                    yield number, position, f"reads {name!r}, which only the first of each {of[name]} has copied"


def _implied(op: ops.Op, buffers: dict[str, Buffer], counts: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yield `(sparse buffer, elements of its vector)`, given those already known."""
    match op:
        case ops.Select():
            yield op.dst, buffers[op.src].count
        case ops.Densify():
            yield op.src, buffers[op.dst].count
        case ops.Merge():
            yield from ((name, buffers[op.residual].count) for name in (op.src, op.dst))
        case ops.AllGather() | ops.Copy() if buffers[op.src].sparse:
            yield from ((a, counts[b]) for a, b in ((op.dst, op.src), (op.src, op.dst)) if b in counts)
        case _:
            pass


def _misfit_text(name: str, known: int, count: int) -> str:
    return (
        f"takes {name!r} for entries of a vector of {count} elements; elsewhere they are of one of {known}: give the "
        f"entries of each length a buffer of their own"
    )
