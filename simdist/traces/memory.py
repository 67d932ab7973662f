"""Memory of a rank's device over time: which buffers of a plan are in use when, by what they hold.

A buffer takes memory from the start of the operation that writes it to the end of the last one that reads it
(`simdist.plan.liveness`). Parameters, and what else lasts from step to step, take memory throughout. A slice that is
copied in order to be gathered lies in the gathered buffer. PyTorch's allocator reserves a little more: it rounds sizes
up, and keeps a pool for each stream.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from simdist.plan import ops
from simdist.plan.lanes import COMPUTE
from simdist.plan.liveness import lifetimes
from simdist.plan.plan import Buffer, Plan
from simdist.plan.walk import occurrences

#: What memory is for.
#:
#: parameters: what the optimizer updates. optimizer: its state, slices that it keeps in another type, and anchors.
#: units: gathered parameters. gradients: of the backward pass, reduced or not. activations: what the forward pass
#: leaves for the backward pass. communication: inputs and outputs of collectives.
#: other: residuals, inputs, checkpoints.
MemoryKind: TypeAlias = Literal[
    "parameters", "optimizer", "units", "gradients", "activations", "communication", "other"
]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


_SAME = 1e-13  # of the whole time


@dataclass(frozen=True)
class Occupancy:
    """Bytes in use on the device of one rank.

    Args:
        at_s: When the bytes change, seconds `[n]`, ascending.
        nbytes: By kind, the bytes in use from then on, int64 `[n]`.
    """

    at_s: NDArray[np.float64]
    nbytes: Mapping[MemoryKind, NDArray[np.int64]]

    @property
    def total_nbytes(self) -> NDArray[np.int64]:
        """Bytes of all kinds, `[n]`."""
        return np.asarray(np.sum([*self.nbytes.values()], axis=0))

    @property
    def peak_nbytes(self) -> int:
        """Most bytes in use at any time."""
        return int(self.total_nbytes.max())

    @property
    def peak_s(self) -> float:
        """When that is for the first time."""
        return float(self.at_s[np.argmax(self.total_nbytes)])

    @property
    def at_peak(self) -> dict[MemoryKind, int]:
        """Bytes by kind when most are in use."""
        at = int(np.argmax(self.total_nbytes))
        return {kind: int(nbytes[at]) for kind, nbytes in self.nbytes.items()}


def kinds_of(plan: Plan) -> dict[str, MemoryKind]:
    """Return what each buffer on the device is for. Buffers that lie in others are left out."""
    each_op = plan.distinct_ops
    updates = [op for op in each_op if isinstance(op, ops.Optimize)]
    passes = [op for op in each_op if isinstance(op, ops.Forward)]
    inner = {name for op in updates if op.optimizer == "inner" for name in op.params}
    masters = {name for op in updates for name in op.slices}
    outer = {name for op in updates if op.optimizer == "outer" for name in op.params}
    gradients = {op.dst for op in each_op if isinstance(op, ops.Backward)}
    gradients |= {name for op in updates for name in op.grads}
    written = {op.dsts[0] for op in passes}  # the others are losses
    read = {name for op in passes for name in op.srcs}
    sent = {name for op in each_op if isinstance(op, ops.COLLECTIVES) for name in (*ops.reads(op), *ops.writes(op))}

    def kind(buffer: Buffer) -> MemoryKind:
        if buffer.initialized and buffer.tensors and buffer.name in inner:
            return "parameters"
        if buffer.name in outer or (buffer.initialized and buffer.name in masters):
            return "optimizer"
        if buffer.name in gradients:
            return "gradients"
        if buffer.name in written:
            return "activations"
        if buffer.name in read and buffer.tensors:
            return "units"
        return "communication" if buffer.name in sent else "other"

    inside = {op.src for op in each_op if isinstance(op, ops.AllGather)} - inner
    inside &= {op.dst for op in each_op if isinstance(op, ops.Copy)}
    inside -= {name for op in each_op if not isinstance(op, ops.Copy) for name in ops.writes(op)}
    owned = (buffer for buffer in plan.buffers if buffer.place == "device" and buffer.name not in inside)
    return {buffer.name: kind(buffer) for buffer in owned}


def _nbytes_of(buffer: Buffer, kind: MemoryKind) -> int:
    """Return the bytes of a buffer. Whole gradients have no padding before they are copied together."""
    if kind == "gradients" and buffer.padding:
        return buffer.nbytes * (buffer.count - buffer.padding) // buffer.count
    return buffer.nbytes


def occupancy(
    plan: Plan,
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    *,
    state_nbytes: int = 0,
    activation_nbytes: Mapping[str, int] | None = None,
    recomputed_nbytes: Mapping[str, int] | None = None,
) -> Occupancy:
    """Return the memory of a rank, given its times.

    Args:
        plan: The plan.
        start_s: When each instance started on the rank, `[n_instances]`.
        end_s: When it ended.
        state_nbytes: Bytes of the optimizer's state.
        activation_nbytes: Bytes of the activations in a buffer, by name; by default those of the buffer.
        recomputed_nbytes: Bytes of the activations that a `Backward` computes again, by its gradients' buffer.
    """
    kinds = kinds_of(plan)
    known = activation_nbytes or {}
    lasting: defaultdict[MemoryKind, int] = defaultdict(int)
    for buffer in plan.buffers:
        if buffer.initialized and buffer.name in kinds:
            lasting[kinds[buffer.name]] += buffer.nbytes
    lasting["optimizer"] += state_nbytes
    starts_s = start_s.tolist()
    ends_s = end_s.tolist()
    changes: list[tuple[float, int, MemoryKind]] = [(0.0, 0, kind) for kind in MEMORY_KINDS]
    for life in lifetimes(plan):
        if life.buffer.name not in kinds:
            continue
        kind = kinds[life.buffer.name]
        nbytes = known.get(life.buffer.name, _nbytes_of(life.buffer, kind))
        begin_s = starts_s[life.begin]
        last_s = max(ends_s[row] for row in life.ends)
        if last_s > begin_s:
            changes += [(begin_s, nbytes, kind), (last_s, -nbytes, kind)]
    for each in occurrences(plan):
        again = recomputed_nbytes.get(each.op.dst, 0) if recomputed_nbytes and isinstance(each.op, ops.Backward) else 0
        for row in each.rows.tolist() if again else ():
            changes += [(starts_s[row], again, "activations"), (ends_s[row], -again, "activations")]
    at_s = np.array([at for at, _, _ in changes])
    order = np.argsort(at_s, kind="stable")
    first = _first_of_moments(at_s[order])
    moments = at_s[order][first]
    held: dict[MemoryKind, NDArray[np.int64]] = {}
    for kind in MEMORY_KINDS:
        steps = np.array([nbytes if of == kind else 0 for _, nbytes, of in changes], dtype=np.int64)[order]
        held[kind] = lasting[kind] + np.cumsum(np.add.reduceat(steps, first))
    return Occupancy(moments, held)


def least_peak_nbytes(
    plan: Plan,
    *,
    state_nbytes: int,
    activation_nbytes: Mapping[str, int],
    recomputed_nbytes: Mapping[str, int],
    computing: Collection[str],
) -> int:
    """Return bytes that are surely in use at some time, whatever the times of operations.

    Operations of a lane run in order. So contents that a lane uses before and after an operation are in use meanwhile.

    Args:
        plan: The plan.
        state_nbytes: As of `occupancy`; likewise the next two.
        activation_nbytes: See there.
        recomputed_nbytes: See there.
        computing: Buffers of gradients. The backward passes that write them take time.
    """
    kinds = kinds_of(plan)
    lane = COMPUTE.name
    steps = [0] * (plan.n_instances + 1)
    for life in lifetimes(plan):
        name = life.buffer.name
        if name in kinds and lane in life.first:
            nbytes = activation_nbytes.get(name, _nbytes_of(life.buffer, kinds[name]))
            steps[life.first[lane]] += nbytes
            steps[life.last[lane] + 1] -= nbytes
    held = [*accumulate(steps)]
    each_op = (op for number in plan.body_of_steps() for op in plan.bodies[number])
    passes = ((row, op.dst) for row, op in enumerate(each_op) if isinstance(op, ops.Backward))
    most = max((held[row] + recomputed_nbytes.get(dst, 0) for row, dst in passes if dst in computing), default=0)
    lasting = sum(buffer.nbytes for buffer in plan.buffers if buffer.initialized and buffer.name in kinds)
    return lasting + state_nbytes + most


def _first_of_moments(at_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the places at which a moment begins. Times that differ by rounding are one moment."""
    apart = np.diff(at_s) > _SAME * at_s[-1]
    return np.concatenate(([0], 1 + np.flatnonzero(apart)))
