"""Random legal plans and jobs, as hypothesis strategies: what the property tests of walk, proof and engines run on."""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import get_args

from hypothesis import strategies as st

from simdist.plan import Body, Buffer, Plan, Run, algorithms, ops
from simdist.plan.group import Group
from simdist.plan.lanes import AVERAGE, COMM, COMPUTE, Lane
from simdist.schedules import InputPath, Job, kinds
from simdist.schedules.job import Checkpoint

N_TENSORS = 4
"""Tensors of the model that the plans train: a workload that prices them has as many."""

OP_KINDS: tuple[type[ops.Op], ...] = tuple(kind for kind in get_args(ops.Op) if kind not in (ops.StageIn, ops.Enter))
"""All but what only a plan with a data set has, and who sits out a step, which stands first."""
CHANNELS = ("host", "compute", "io")
COUNTS = (1, 3, 250, 4_096, 1_000_000)
COMPRESSING = (ops.Select, ops.Merge, ops.Densify, ops.LowRank)
WHOLE_SIZED = ("whole.0", "whole.1")
SPARSE = ("sparse", "all_sparse", "merged")
SIDE = Lane("side", "comm", "side")
"""A lane that no schedule of simdist has."""

ALGORITHMS: tuple[str, ...] = algorithms.names()
PRICED_ALGORITHMS = ("auto", "ring", "tree", "halving_doubling")
"""Those whose cost does not hang on settings of the cluster."""


def groups(world_size: int) -> st.SearchStrategy[Group]:
    """Draw any group that partitions the ranks."""
    return st.sampled_from(every_group(world_size))


def every_group(world_size: int) -> list[Group]:
    """Return all groups at a stride, and some by list: the n-th rank with the n-th last, and a ring's other pairs."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    every = [Group(size, stride) for size in divisors for stride in divisors]
    found = [group for group in every if group.divides(world_size)]
    if world_size % 2 == 0:
        found.append(Group.of([[rank, world_size - 1 - rank] for rank in range(world_size // 2)]))
        found.append(Group.of([[rank, (rank + 1) % world_size] for rank in range(1, world_size, 2)]))
    return list(dict.fromkeys(found))


@st.composite
def legal_plans(
    draw: st.DrawFn,
    *,
    world_sizes: Sequence[int] | None = None,
    max_world_size: int = 8,
    max_bodies: int = 3,
    max_ops: int = 8,
    max_runs: int = 4,
    max_times: int = 4,
    op_kinds: Iterable[type[ops.Op]] = OP_KINDS,
    channels: Sequence[str] = CHANNELS,
    counts: Sequence[int] = COUNTS,
    algorithms: Sequence[str] = PRICED_ALGORITHMS,
) -> Plan:
    """Draw a plan that `check` accepts and, with the default algorithms, `price` can price.

    Args:
        draw: Given by hypothesis.
        world_sizes: Numbers of ranks to choose from; all up to `max_world_size` by default.
        max_world_size: Most ranks.
        max_bodies: Most distinct steps.
        max_ops: Most operations in a body.
        max_runs: Most runs in the order, besides those that bring in each body.
        max_times: Most repetitions of a run.
        op_kinds: Operations to choose from; without `Load` and `Save` no storage is needed.
        channels: Channels of `Delay`.
        counts: Elements of a buffer (of a slice, where it is cut in slices) to choose from.
        algorithms: Algorithms of collectives to choose from, where a collective has them.
    """
    world_size = draw(st.sampled_from(world_sizes) if world_sizes else st.integers(1, max_world_size))
    buffers = draw(_buffers(world_size, counts))
    op_kinds = tuple(sorted(op_kinds, key=lambda kind: kind.__name__))
    written = {name for name, buffer in buffers.items() if buffer.initialized}
    bodies: list[Body] = []
    for _ in range(draw(st.integers(1, max_bodies))):
        operations: list[ops.Op] = []
        for _ in range(draw(st.integers(1, max_ops))):
            kind = draw(st.sampled_from(op_kinds))
            op = draw(_op(kind, world_size, buffers, sorted(written), channels, algorithms))
            if isinstance(op, ops.COLLECTIVES):
                op = dataclasses.replace(op, lane=draw(st.sampled_from([COMM, COMM, AVERAGE, SIDE])))
            if op is not None:
                operations.append(op)
                written.update(ops.writes(op))
        bodies.append(tuple(operations))
    order = draw(_order(len(bodies), max_runs, max_times))
    touched = {name for body in bodies for op in body for name in (*ops.reads(op), *ops.writes(op))}
    if any(isinstance(op, ops.LowRank) for body in bodies for op in body):
        touched |= {"whole.0", "left", "right", "rest"}
    kept = tuple(buffer for name, buffer in buffers.items() if name in touched)
    return Plan("random", world_size, kept, tuple(bodies), order)


@st.composite
def _order(draw: st.DrawFn, n_bodies: int, max_runs: int, max_times: int) -> tuple[Run, ...]:
    """Draw an order in which each body first appears after all before it, as their contents may need."""
    times = st.integers(1, max_times)
    runs = []
    for newest in range(n_bodies):
        earlier = draw(st.lists(st.integers(0, newest), max_size=2))
        runs.append(Run((newest, *earlier), draw(times)))
    for _ in range(draw(st.integers(0, max_runs))):
        bodies = draw(st.lists(st.integers(0, n_bodies - 1), min_size=1, max_size=4))
        runs.append(Run(tuple(bodies), draw(times)))
    return tuple(runs)


@st.composite
def _buffers(draw: st.DrawFn, world_size: int, counts: Sequence[int]) -> dict[str, Buffer]:
    """Draw the buffers of a world: parameters and gradients in buckets, batches, dense, sliced and sparse ones."""
    count = st.sampled_from(counts)
    cuts = draw(st.lists(st.integers(1, N_TENSORS - 1), max_size=2, unique=True))
    bounds = [0, *sorted(cuts), N_TENSORS]
    buffers = []
    for number, tensors in enumerate(pairwise(bounds)):
        n = draw(count)
        buffers.append(Buffer(f"param.{number}", n, tensors=tensors, initialized=True))
        buffers.append(Buffer(f"grad.{number}", n, tensors=tensors))
    buffers.append(Buffer("loss", 1))
    for number in range(2):
        buffers.append(Buffer(f"batch.{number}", 4_096, "uint8", place="host", initialized=draw(st.booleans())))
    buffers.append(Buffer("input", 4_096, "uint8"))
    whole = draw(count) * world_size
    buffers += [Buffer(name, whole, initialized=draw(st.booleans())) for name in WHOLE_SIZED]
    buffers += [Buffer(f"slice.{n}", whole // n) for n in range(1, world_size + 1) if world_size % n == 0]
    buffers += [Buffer("left", 1), Buffer("right", max(1, whole - 1)), Buffer("rest", 1)]  # a row, and one element
    k = draw(st.sampled_from(sorted({1, max(1, whole // 10), whole})))
    sent = draw(st.sampled_from(["float32", "float16"]))
    buffers += [Buffer("residual", whole, initialized=True), Buffer("sparse", k, sent, sparse=True)]
    if world_size > 1:
        buffers.append(Buffer("all_sparse", k * world_size, sent, sparse=True))
    buffers.append(Buffer("merged", draw(st.sampled_from(sorted({1, k}))), sent, sparse=True))
    buffers.append(Buffer("half", whole, draw(st.sampled_from(["float16", "float64"]))))
    padding = draw(st.integers(0, 7))
    n_fused = sum(buffer.count for buffer in buffers if buffer.name.startswith("grad"))
    dtype = draw(st.sampled_from(["float32", "float16"]))
    buffers.append(Buffer("fused", n_fused + padding, dtype, padding=padding))
    buffers += [Buffer(f"ratios.{n}", n) for n in range(1, N_TENSORS + 1)]
    return {buffer.name: buffer for buffer in buffers}


@st.composite
def _op(
    draw: st.DrawFn,
    kind: type[ops.Op],
    world_size: int,
    buffers: dict[str, Buffer],
    written: list[str],
    channels: Sequence[str],
    algorithms: Sequence[str],
) -> ops.Op | None:
    """Draw an operation of a kind that reads only what is written; None if there is none."""
    every = list(buffers)
    group = draw(groups(world_size)) if kind in (*ops.COLLECTIVES, ops.TrustRatios) else Group(1)
    if kind is ops.TrustRatios and group.ranks:
        return None
    reduction = (
        draw(st.sampled_from(["mean", "sum"])) if kind in (ops.AllReduce, ops.Reduce, ops.ReduceScatter) else "mean"
    )
    own = [name for name in _algorithms(kind, group) if name in algorithms]
    algorithm = draw(st.sampled_from(own)) if kind in ops.COLLECTIVES else "auto"
    lane = draw(st.sampled_from([COMPUTE, COMM, SIDE])) if kind in COMPRESSING else COMPUTE
    divisor = draw(st.sampled_from(sorted({1, 3, world_size}))) if kind in (ops.Merge, ops.Densify) else 1
    root = draw(st.integers(0, group.size - 1)) if kind in (ops.Reduce, ops.Broadcast) else 0
    dense = [name for name in written if not buffers[name].sparse and buffers[name].place == "device"]
    numbers = [name for name in dense if buffers[name].dtype != "uint8"]
    grads = [name for name in every if name.startswith("grad")]
    ready_grads = [name for name in grads if name in written]
    sparse = [name for name in SPARSE if name in written]
    match kind.__name__:
        case "Load":
            return ops.Load(draw(st.sampled_from([name for name in every if buffers[name].place == "host"])))
        case "Copy":
            pairs = [(a, b) for a in written for b in every if a != b and _same(buffers[a], buffers[b])]
            return ops.Copy(*draw(st.sampled_from(pairs))) if pairs else None
        case "Forward":
            srcs = draw(st.lists(st.sampled_from(dense), min_size=1, max_size=3, unique=True))
            return ops.Forward(tuple(srcs), tuple(draw(st.sampled_from([["loss"], ["loss", "input"]]))))
        case "Backward":
            srcs = draw(st.lists(st.sampled_from(dense), min_size=1, max_size=3, unique=True))
            bucket = draw(st.sampled_from(grads))
            return ops.Backward(tuple(srcs), bucket, bucket in written and draw(st.booleans()))
        case "Optimize":
            if not ready_grads:
                return None
            params, chosen = draw(_updates(ready_grads))
            enough = [name for name in written if _holds_ratios(buffers, name, params)]
            ratios, optimizer = draw(st.sampled_from([None, *enough])), draw(st.sampled_from(["inner", "outer"]))
            return ops.Optimize(params, chosen, ratios if optimizer == "inner" else None, optimizer=optimizer)
        case "Combine":
            alike = [name for name in WHOLE_SIZED if name in written] or numbers[:1]
            srcs = draw(st.lists(st.sampled_from(alike), min_size=1, unique=True))
            weights = [draw(st.sampled_from([1.0, -1.0, 0.5])) for _ in srcs]
            return ops.Combine(tuple(srcs), tuple(weights), draw(st.sampled_from([srcs[0], *_alike(buffers, srcs[0])])))
        case "TrustRatios":
            if not ready_grads:
                return None
            params, chosen = draw(_updates(ready_grads))
            return ops.TrustRatios(params, chosen, f"ratios.{-(-_n_tensors(buffers, params) // group.size)}", group)
        case "Pack":
            return ops.Pack(tuple(draw(st.permutations(grads))), "fused") if ready_grads == grads else None
        case "Unpack":
            return ops.Unpack("fused", tuple(draw(st.permutations(grads)))) if "fused" in written else None
        case "AllReduce":
            buffer = draw(st.sampled_from(numbers))
            servers = draw(_servers(buffers[buffer].count, group)) if algorithm == "server" else None
            return ops.AllReduce(buffer, group, reduction, algorithm, servers)
        case "Reduce":
            return ops.Reduce(draw(st.sampled_from(numbers)), group, root, reduction, algorithm)
        case "Broadcast":
            return ops.Broadcast(draw(st.sampled_from(dense)), group, root, algorithm)
        case "ReduceScatter":
            wholes = [name for name in WHOLE_SIZED if name in written]
            slice_name = f"slice.{group.size}"
            return (
                ops.ReduceScatter(draw(st.sampled_from(wholes)), slice_name, group, reduction, algorithm)
                if wholes
                else None
            )
        case "AllGather":
            if "sparse" in written and group.size == world_size > 1 and draw(st.booleans()):
                return ops.AllGather("sparse", "all_sparse", group, algorithm)
            slice_name = f"slice.{group.size}"
            if slice_name not in written:
                return None
            return ops.AllGather(slice_name, draw(st.sampled_from(WHOLE_SIZED)), group, algorithm)
        case "Select":
            wholes = [name for name in WHOLE_SIZED if name in written]
            method = draw(st.sampled_from(["exact", "mstopk", "dgc"]))
            k = buffers["sparse"].count
            return ops.Select(wholes[0], "sparse", "residual", k, method, lane) if wholes else None
        case "Merge":
            pairs = [(a, b) for a in sparse for b in SPARSE if a != b and b in every and _shrinks(buffers, a, b)]
            return ops.Merge(*draw(st.sampled_from(pairs)), "residual", divisor, lane) if pairs else None
        case "Densify":
            dense_names = (*WHOLE_SIZED, "half")
            pairs = [(a, b) for a in sparse for b in dense_names if buffers[a].dtype == buffers[b].dtype]
            return ops.Densify(*draw(st.sampled_from(pairs)), divisor, lane) if pairs else None
        case "LowRank":
            row = ops.Matrix(0, 1, buffers["right"].count, 1)
            rest = "rest" if buffers["whole.0"].count > 1 else None
            seed = draw(st.sampled_from([None, 7]))
            stages = [
                ops.LowRank(stage, "whole.0", "residual", "left", "right", (row,), rest, seed, lane)
                for stage in ("left", "right", "product")
            ]
            possible = [op for op in stages if {*ops.reads(op)} <= {*written}]
            return draw(st.sampled_from(possible)) if possible else None
        case "Tick":
            srcs = draw(st.lists(st.sampled_from(dense), min_size=1, max_size=3, unique=True))
            return ops.Tick(tuple(srcs), draw(st.sampled_from([1e-3, 5e-3, 0.3])))
        case "Delay":
            return ops.Delay(draw(st.sampled_from(list(channels)))) if channels else None
        case "Wait":
            return ops.Wait(draw(st.sampled_from(written)))
        case "KernelLaunch":
            return ops.KernelLaunch(draw(st.sampled_from(["backward", "collective"])), draw(st.integers(0, 3)))
        case "Save":
            srcs = draw(st.lists(st.sampled_from(dense), min_size=1, max_size=2, unique=True))
            file = draw(st.sampled_from([None, "batch.0", "batch.1"]))
            return ops.Save(tuple(srcs), file, draw(st.sampled_from(["storage", "disk"])), group)
        case _:
            raise NotImplementedError(f"{kind.__name__}: a new operation needs a case here")


@st.composite
def _updates(draw: st.DrawFn, grads: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Draw parameters, and the gradients to update them with, in any order."""
    chosen = draw(st.lists(st.sampled_from(grads), min_size=1, unique=True))
    return tuple(name.replace("grad", "param") for name in chosen), tuple(draw(st.permutations(chosen)))


def _alike(buffers: dict[str, Buffer], src: str) -> list[str]:
    """Return the dense buffers of numbers that hold what another one does, in any type."""
    kinds = {name: (each.count, each.tensors, each.sparse, each.place) for name, each in buffers.items()}
    return [name for name in kinds if kinds[name] == kinds[src] and buffers[name].dtype != "uint8"]


def _n_tensors(buffers: dict[str, Buffer], params: tuple[str, ...]) -> int:
    ranges = (buffers[name].tensors or (0, 0) for name in params)
    return sum(last - first for first, last in ranges)


def _holds_ratios(buffers: dict[str, Buffer], name: str, params: tuple[str, ...]) -> bool:
    return name.startswith("ratios") and buffers[name].count >= _n_tensors(buffers, params)


def _shrinks(buffers: dict[str, Buffer], src: str, dst: str) -> bool:
    return buffers[dst].count <= buffers[src].count


@st.composite
def _servers(draw: st.DrawFn, count: int, group: Group) -> ops.Servers:
    """Draw parameter servers, some of which may hold nothing: members of the group, or machines of their own."""
    n_servers = draw(st.integers(1, min(4, group.size)))
    cuts = sorted(draw(st.lists(st.integers(0, count), min_size=n_servers - 1, max_size=n_servers - 1)))
    parts = tuple(last - first for first, last in pairwise([0, *cuts, count]))
    members = draw(st.permutations(range(group.size)))[:n_servers]
    return ops.Servers(parts, tuple(members) if draw(st.booleans()) else ())


def _same(src: Buffer, dst: Buffer) -> bool:
    same_tensors = None in (src.tensors, dst.tensors) or src.tensors == dst.tensors
    same_type = src.dtype == dst.dtype or "uint8" not in (src.dtype, dst.dtype)
    return same_tensors and same_type and (src.count, src.sparse) == (dst.count, dst.sparse)


def _algorithms(kind: type[ops.Op], group: Group) -> list[str]:
    """Return the algorithms that this collective has over this group."""
    names = ["auto", "ring", "direct"]
    if kind in (ops.AllReduce, ops.Reduce, ops.Broadcast):
        names.append("tree")
    if kind is ops.AllReduce:
        names += ["double_tree", "hierarchical", "server"]
    if kind in (ops.AllReduce, ops.ReduceScatter, ops.AllGather) and not group.size & (group.size - 1):
        names.append("halving_doubling")
    return names


@st.composite
def jobs(
    draw: st.DrawFn, *, world_size: int = 8, ranks_per_node: int = 4, max_steps: int = 12, storage: bool = True
) -> Job:
    """Draw a training job: any input path, run-ahead and delay channels."""
    sources = ("device", "memory", "storage") if storage else ("device", "memory")
    path = InputPath(
        draw(st.sampled_from(sources)), draw(st.sampled_from(["pinned", "pageable"])), draw(st.integers(1, 3))
    )
    counts = tuple(draw(st.lists(st.sampled_from([8, 1_000, 500_000]), min_size=1, max_size=N_TENSORS)))
    return Job(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        n_steps=draw(st.integers(1, max_steps)),
        tensor_counts=counts,
        micro_batches=draw(st.sampled_from([1, 3])),
        batch_nbytes=4_096,
        input_path=path,
        run_ahead_steps=draw(st.sampled_from([0, 1, 3, None])),
        delay_channels=frozenset(draw(st.sets(st.sampled_from(CHANNELS)))),
        checkpoint=draw(st.one_of(st.none(), checkpoints(world_size))) if storage else None,
        tensor_rows=tuple({8: 8, 1_000: 10, 500_000: 500}[count] for count in counts),
    )


def checkpoints(world_size: int) -> st.SearchStrategy[Checkpoint]:
    """Draw any checkpoint."""
    whats = st.sampled_from(["parameters", "state", 100_000])
    to = st.sampled_from(["storage", "disk"])
    by = groups(world_size).filter(lambda group: not group.ranks)
    return st.builds(Checkpoint, st.integers(1, 5), whats, to, by, st.booleans())


@st.composite
def schedule_plans(draw: st.DrawFn, **settings: object) -> Plan:
    """Draw the plan of any schedule for a job of 8 ranks on 2 nodes; `settings` are those of `jobs`."""
    job = draw(jobs(**settings))
    schedule = draw(st.sampled_from([cls(**example) for cls in kinds().values() for example in cls.examples]))
    if job.checkpoint and "shared" in schedule.name:  # each rank writes its slice of the state
        job = dataclasses.replace(job, checkpoint=dataclasses.replace(job.checkpoint, by=Group(1)))
    return schedule.plan(job)


def spelled_out(plan: Plan) -> Plan:
    """Return the same plan with an order of single steps, which cannot be recognised as repeating."""
    return dataclasses.replace(plan, order=tuple(Run((body,)) for body in plan.body_of_steps()))
