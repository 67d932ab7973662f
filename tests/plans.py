"""Random legal plans and jobs, as hypothesis strategies: what the property tests of walk, proof and engines run on."""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import get_args

from hypothesis import strategies as st

from simdist.groups import Group
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Backward,
    Body,
    Broadcast,
    Buffer,
    Copy,
    Delay,
    Densify,
    Forward,
    Load,
    Op,
    Optimize,
    Plan,
    Reduce,
    ReduceScatter,
    Run,
    Save,
    Select,
    Wait,
    reads,
    writes,
)
from simdist.schedules import InputPath, Job, kinds

N_TENSORS = 4
"""Tensors of the model that the plans train: a workload that prices them has as many."""

OP_KINDS: tuple[type[Op], ...] = get_args(Op)
CHANNELS = ("host", "compute", "io")
COUNTS = (1, 3, 250, 4_096, 1_000_000)
WHOLE_SIZED = ("whole.0", "whole.1")


def groups(world_size: int) -> st.SearchStrategy[Group]:
    """Draw any group that partitions the ranks."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return st.sampled_from(
        [Group(size, stride) for size in divisors for stride in divisors if Group(size, stride).divides(world_size)]
    )


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
    op_kinds: Iterable[type[Op]] = OP_KINDS,
    channels: Sequence[str] = CHANNELS,
    counts: Sequence[int] = COUNTS,
) -> Plan:
    """Draw a plan that `check` accepts and `price` can price.

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
    """
    world_size = draw(st.sampled_from(world_sizes) if world_sizes else st.integers(1, max_world_size))
    buffers = draw(_buffers(world_size, counts))
    op_kinds = tuple(sorted(op_kinds, key=lambda kind: kind.__name__))
    written = {name for name, buffer in buffers.items() if buffer.initialized}
    bodies: list[Body] = []
    for _ in range(draw(st.integers(1, max_bodies))):
        ops: list[Op] = []
        for _ in range(draw(st.integers(1, max_ops))):
            kind = draw(st.sampled_from(op_kinds))
            op = draw(_op(kind, world_size, buffers, sorted(written), channels))
            if op is not None:
                ops.append(op)
                written.update(writes(op))
        bodies.append(tuple(ops))
    order = draw(_order(len(bodies), max_runs, max_times))
    touched = {name for body in bodies for op in body for name in (*reads(op), *writes(op))}
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
    k = draw(st.sampled_from(sorted({1, max(1, whole // 10), whole})))
    buffers += [Buffer("residual", whole, initialized=True), Buffer("sparse", k, sparse=True)]
    if world_size > 1:
        buffers.append(Buffer("all_sparse", k * world_size, sparse=True))
    return {buffer.name: buffer for buffer in buffers}


@st.composite
def _op(
    draw: st.DrawFn,
    kind: type[Op],
    world_size: int,
    buffers: dict[str, Buffer],
    written: list[str],
    channels: Sequence[str],
) -> Op | None:
    """Draw an operation of a kind that reads only what is written; None if there is none."""
    every = list(buffers)
    group = draw(groups(world_size)) if kind in COLLECTIVES else Group(1)
    reduction = draw(st.sampled_from(["mean", "sum"])) if kind in (AllReduce, Reduce, ReduceScatter) else "mean"
    algorithm = draw(st.sampled_from(_algorithms(kind, group))) if kind in COLLECTIVES else "auto"
    root = draw(st.integers(0, group.size - 1)) if kind in (Reduce, Broadcast) else 0
    dense = [name for name in written if not buffers[name].sparse and buffers[name].place == "device"]
    numbers = [name for name in dense if buffers[name].dtype != "uint8"]
    grads = [name for name in every if name.startswith("grad")]
    match kind.__name__:
        case "Load":
            return Load(draw(st.sampled_from([name for name in every if buffers[name].place == "host"])))
        case "Copy":
            pairs = [(a, b) for a in written for b in every if a != b and _same(buffers[a], buffers[b])]
            return Copy(*draw(st.sampled_from(pairs))) if pairs else None
        case "Forward":
            srcs = draw(st.lists(st.sampled_from(dense), min_size=1, max_size=3, unique=True))
            return Forward(tuple(srcs), tuple(draw(st.sampled_from([["loss"], ["loss", "input"]]))))
        case "Backward":
            srcs = draw(st.lists(st.sampled_from(dense), min_size=1, max_size=3, unique=True))
            return Backward(tuple(srcs), draw(st.sampled_from(grads)))
        case "Optimize":
            ready = [name for name in grads if name in written]
            chosen = draw(st.lists(st.sampled_from(ready), min_size=1, unique=True)) if ready else []
            return Optimize(tuple(name.replace("grad", "param") for name in chosen), tuple(chosen)) if chosen else None
        case "AllReduce":
            return AllReduce(draw(st.sampled_from(numbers)), group, reduction, algorithm)
        case "Reduce":
            return Reduce(draw(st.sampled_from(numbers)), group, root, reduction, algorithm)
        case "Broadcast":
            return Broadcast(draw(st.sampled_from(dense)), group, root, algorithm)
        case "ReduceScatter":
            wholes = [name for name in WHOLE_SIZED if name in written]
            slice_name = f"slice.{group.size}"
            return (
                ReduceScatter(draw(st.sampled_from(wholes)), slice_name, group, reduction, algorithm)
                if wholes
                else None
            )
        case "AllGather":
            if "sparse" in written and group.size == world_size > 1 and draw(st.booleans()):
                return AllGather("sparse", "all_sparse", group, algorithm)
            slice_name = f"slice.{group.size}"
            if slice_name not in written:
                return None
            return AllGather(slice_name, draw(st.sampled_from(WHOLE_SIZED)), group, algorithm)
        case "Select":
            wholes = [name for name in WHOLE_SIZED if name in written]
            method = draw(st.sampled_from(["exact", "mstopk", "dgc"]))
            return Select(wholes[0], "sparse", "residual", buffers["sparse"].count, method) if wholes else None
        case "Densify":
            sparse = [name for name in written if buffers[name].sparse]
            return Densify(draw(st.sampled_from(sparse)), draw(st.sampled_from(WHOLE_SIZED))) if sparse else None
        case "Delay":
            return Delay(draw(st.sampled_from(list(channels)))) if channels else None
        case "Wait":
            return Wait(draw(st.sampled_from(written)))
        case "Save":
            return Save(tuple(draw(st.lists(st.sampled_from(dense), min_size=1, max_size=2, unique=True))))
        case _:
            raise NotImplementedError(f"{kind.__name__}: a new operation needs a case here")


def _same(src: Buffer, dst: Buffer) -> bool:
    same_tensors = None in (src.tensors, dst.tensors) or src.tensors == dst.tensors
    return same_tensors and (src.count, src.dtype, src.sparse) == (dst.count, dst.dtype, dst.sparse)


def _algorithms(kind: type[Op], group: Group) -> list[str]:
    """Return the algorithms that this collective has over this group."""
    names = ["auto", "ring"]
    if kind in (AllReduce, Reduce, Broadcast):
        names.append("tree")
    if kind in (AllReduce, ReduceScatter, AllGather) and not group.size & (group.size - 1):
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
    return Job(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        n_steps=draw(st.integers(1, max_steps)),
        tensor_counts=tuple(draw(st.lists(st.sampled_from([8, 1_000, 500_000]), min_size=1, max_size=N_TENSORS))),
        batch_nbytes=4_096,
        input_path=path,
        run_ahead_steps=draw(st.sampled_from([0, 1, 3, None])),
        delay_channels=frozenset(draw(st.sets(st.sampled_from(CHANNELS)))),
    )


@st.composite
def schedule_plans(draw: st.DrawFn, **settings: object) -> Plan:
    """Draw the plan of any schedule for a job of 8 ranks on 2 nodes; `settings` are those of `jobs`."""
    job = draw(jobs(**settings))  # type: ignore[arg-type]
    schedule = draw(st.sampled_from([cls(**example) for cls in kinds().values() for example in cls.examples]))
    return schedule.plan(job)


def spelled_out(plan: Plan) -> Plan:
    """Return the same plan with an order of single steps, which nobody can recognise as repeating."""
    return dataclasses.replace(plan, order=tuple(Run((body,)) for body in plan.body_of_steps()))
