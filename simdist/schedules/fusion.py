"""Tensor fusion: a pass over a plan that reduces several small gradients as one large buffer, as in Horovod.

Horovod's coordinator wakes once per cycle. It takes the gradients that have become ready since, and reduces them
together, one fusion buffer at a time:

    backward 2, 1, 0          --->   backward 2, 1, 0
    all_reduce 2                     tick       (gradients 2 and 1 were ready in one cycle)
    all_reduce 1                     pack       2, 1 -> fused.0
    all_reduce 0                     all_reduce fused.0
                                     unpack     fused.0 -> 2, 1
                                     tick
                                     all_reduce 0   (alone: reduced in place, without copies)

The backward pass decides which gradients are ready in the same cycle. A plan has no `if`, so this pass receives the
times at which gradients are ready, on an undisturbed device, from the start of the backward pass. The clock of the run
may have any phase relative to the steps. The `Tick` operations wait for its ticks.

Source:
    Sergeev & Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, arXiv 1802.05799, section 4;
    horovod/common/operations.cc and controller.cc (FuseResponses), defaults: 64 MB and 5 ms until version 0.20, 128 MB
    and 1 ms since (commit 3ffe479e).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, TypeAlias

from pydantic import Field

from simdist.plan import AllReduce, Backward, Body, Buffer, Copy, Op, Pack, Plan, Tick, Unpack
from simdist.plan.ops import next_tick
from simdist.settings.base import Settings
from simdist.settings.units import Nbytes, Seconds


class Fusion(Settings):
    """Settings of tensor fusion.

    Args:
        buffer_nbytes: Size of the fusion buffer. A larger gradient is reduced alone. The key is `buffer`.
        cycle_s: Seconds from one check for ready gradients to the next. None, in a file `null`: there are no cycles,
            and a buffer is reduced when the next gradient would not fit into it.
    """

    buffer_nbytes: Annotated[Nbytes, Field(gt=0)] = Field(default=128 * 1024**2, alias="buffer")
    cycle_s: Annotated[Seconds, Field(gt=0)] | None = 1e-3


def fuse(plan: Plan, fusion: Fusion, ready_s: Mapping[str, float]) -> Plan:
    """Fuse the all-reduces of the gradients in every step.

    Args:
        plan: Its gradients are reduced in the order in which the backward pass completes them.
        fusion: Sizes and times.
        ready_s: Gradient buffer -> seconds from the start of the backward pass until it is complete.

    Returns:
        The plan with fused all-reduces. All other operations stay in place.
    """
    fusing = _Fusing(plan, fusion, ready_s)
    bodies = tuple(tuple(fusing.rewritten(body)) for body in plan.bodies)
    return replace(plan, bodies=bodies, buffers=(*plan.buffers, *fusing.buffers.values()))


_Batch: TypeAlias = tuple[AllReduce, ...]


class _Fusing:
    """Rewrites bodies, and collects their fusion buffers."""

    def __init__(self, plan: Plan, fusion: Fusion, ready_s: Mapping[str, float]) -> None:
        self._of_name = {buffer.name: buffer for buffer in plan.buffers}
        self._fusion = fusion
        self._ready_s = ready_s
        self.buffers: dict[_Batch, Buffer] = {}

    def rewritten(self, body: Body) -> Iterator[Op]:
        """Yield a body that reduces gradients by cycles, each cycle when its last gradient is ready."""
        ready_s = self._gradients_ready_s(body)
        reduced = [op for op in body if isinstance(op, AllReduce) and op.buffer in ready_s]
        due = {cycle[-1]: cycle for cycle in self._cycles(reduced, ready_s)}
        for op in body:
            if not isinstance(op, AllReduce) or op.buffer not in ready_s:
                yield op
            elif op in due:
                yield from self._cycle(due[op])

    def _gradients_ready_s(self, body: Body) -> dict[str, float]:
        """Return when each gradient, or its copy in another precision, is ready."""
        ready_s: dict[str, float] = {}
        for op in body:
            if isinstance(op, Backward):
                ready_s[op.dst] = self._ready_s.get(op.dst, 0.0)
            elif isinstance(op, Copy) and op.src in ready_s:
                ready_s[op.dst] = ready_s[op.src]
        return ready_s

    def _cycles(self, reduced: Sequence[AllReduce], ready_s: Mapping[str, float]) -> list[_Batch]:
        """Return the all-reduces of each cycle."""
        cycle_s = self._fusion.cycle_s
        if cycle_s is None:
            return self._batches(reduced)
        ticks = groupby(reduced, key=lambda op: float(next_tick(ready_s[op.buffer], cycle_s)))
        return [tuple(cycle) for _, cycle in ticks]

    def _cycle(self, cycle: _Batch) -> Iterator[Op]:
        if self._fusion.cycle_s is not None:
            yield Tick(tuple(op.buffer for op in cycle), self._fusion.cycle_s)
        for batch in self._batches(cycle):
            yield from self._reduction(batch)

    def _batches(self, reduced: Sequence[AllReduce]) -> list[_Batch]:
        """Return the all-reduces of each buffer: neighbours that differ only in their data, as many as fit."""
        batches: list[_Batch] = []
        for op in reduced:
            if batches and self._fits(batches[-1], op):
                batches[-1] = (*batches[-1], op)
            else:
                batches.append((op,))
        return batches

    def _fits(self, batch: _Batch, op: AllReduce) -> bool:
        buffers = [self._of_name[each.buffer] for each in (*batch, op)]
        return (
            replace(op, buffer="") == replace(batch[0], buffer="")
            and op.servers is None
            and buffers[0].dtype == buffers[-1].dtype
            and sum(buffer.nbytes for buffer in buffers) <= self._fusion.buffer_nbytes
        )

    def _reduction(self, batch: _Batch) -> Body:
        """Return the all-reduce of a batch. A batch of several is copied into a fusion buffer and back."""
        if len(batch) == 1:
            return batch
        names = tuple(op.buffer for op in batch)
        fused = self._buffer(batch)
        return (Pack(names, fused), replace(batch[0], buffer=fused), Unpack(fused, names))

    def _buffer(self, batch: _Batch) -> str:
        """Return the name of a batch's fusion buffer. Each has its own; all are views of Horovod's single buffer."""
        if batch not in self.buffers:
            parts = [self._of_name[op.buffer] for op in batch]
            name = f"fused.{len(self.buffers)}"
            count = sum(part.count for part in parts)
            self.buffers[batch] = Buffer(name, count, parts[0].dtype)
        return self.buffers[batch].name
