"""One tensor per buffer of a plan.

A dense buffer is a flat tensor; a sparse one is a pair of `count` values and `count` int32 indices. Nothing is
allocated before its size has been compared with the memory that there is, because a plan is a file from elsewhere.

Collectives need memory beside the buffers. It is kept from call to call, because the kernel gives fresh memory page by
page, each at the first touch. For a tensor of many megabytes that is a fault for every 4 KiB of it, which takes as long
as the network needs to send them; allocators return large blocks to the kernel, so a new tensor in every step would pay
in every step.
"""

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from simdist.errors import RunError
from simdist.machine import free_memory_nbytes
from simdist.plan import Buffer, Plan, ops

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class SparseTensor:
    """Some values of a vector and where they stand.

    Args:
        values: Shape `[k]`.
        indices: int32 `[k]`.
        n_distinct: Of so many at a time, from the beginning, no two that are not 0 have the same index.
    """

    values: Tensor
    indices: Tensor
    n_distinct: int = 1


class Memory:
    """The buffers of one rank, or of several that are stacked.

    Args:
        plan: Whose buffers.
        device: Where buffers placed on the device live; the others are in host memory.
        names: Which buffers are wanted; the others stay without a tensor.
        n_ranks: Stack the buffers of so many ranks: all shapes begin with `n_ranks`, and `row` is one of them.
        scratch_nbytes: Memory that collectives, or computing, will need on the device beside the buffers.
        in_place: Buffers, by name, that are another one, as `buffers_in_place` says.

    Attributes:
        n_ranks: Ranks that are stacked; None if there is one rank without an axis for it.

    Raises:
        RunError: They do not fit.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        names: Collection[str],
        *,
        n_ranks: int | None = None,
        scratch_nbytes: int = 0,
        in_place: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        wanted = [buffer for buffer in plan.buffers if buffer.name in names and buffer.name not in in_place]
        self._device = device
        self.n_ranks = n_ranks
        self._buffers = {buffer.name: buffer for buffer in wanted}
        self._check_fits(plan, scratch_nbytes)
        units = distinct_counts(plan)
        self._dense: dict[str, Tensor] = {}
        self._sparse: dict[str, SparseTensor] = {}
        for buffer in wanted:
            values = self._zeros(buffer, DTYPES[buffer.dtype])
            if buffer.sparse:
                self._sparse[buffer.name] = SparseTensor(values, self._zeros(buffer, torch.int32), units[buffer.name])
            else:
                self._dense[buffer.name] = values
        self._dense.update({name: self._dense[other] for name, other in in_place.items() if name in names})

    def __contains__(self, name: object) -> bool:
        return name in self._dense or name in self._sparse

    def dense(self, name: str) -> Tensor:
        """Return the tensor of a dense buffer, shape `[count]`."""
        return self._dense[name]

    def sparse(self, name: str) -> SparseTensor:
        """Return the values and indices of a sparse buffer."""
        return self._sparse[name]

    def tensors(self, name: str) -> tuple[Tensor, ...]:
        """Return the tensors of a buffer: one, or values and indices."""
        sparse = self._sparse.get(name)
        return (sparse.values, sparse.indices) if sparse else (self._dense[name],)

    def row(self, rank: int) -> "Memory":
        """Return the buffers of one of the ranks that are stacked here: views, not copies."""
        row = copy.copy(self)
        row.n_ranks = None
        row._dense = {name: tensor[rank] for name, tensor in self._dense.items()}
        row._sparse = {
            name: replace(tensor, values=tensor.values[rank], indices=tensor.indices[rank])
            for name, tensor in self._sparse.items()
        }
        return row

    def _zeros(self, buffer: Buffer, dtype: torch.dtype) -> Tensor:
        on_host = buffer.place == "host"
        pinned = on_host and self._device.type == "cuda"
        shape = (buffer.count,) if self.n_ranks is None else (self.n_ranks, buffer.count)
        return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else self._device, pin_memory=pinned)

    def _check_fits(self, plan: Plan, scratch_nbytes: int) -> None:
        on_gpu = self._device.type == "cuda"
        for place, free_nbytes in (("device", _free_nbytes(self._device)), ("host", _free_nbytes(torch.device("cpu")))):
            nbytes = sum(buffer.nbytes for buffer in self._buffers.values() if buffer.place == place)
            nbytes = nbytes * (self.n_ranks or 1) + (scratch_nbytes if place == "device" else 0)
            if nbytes > free_nbytes:
                beside = " and beside them" if scratch_nbytes else ""
                where = f"{self._device}" if on_gpu and place == "device" else "the host"
                raise RunError(
                    f"plan {plan.name} needs {nbytes / 1e9:.3g} GB for its buffers{beside}; {where} has "
                    f"{free_nbytes / 1e9:.3g} GB free: run a smaller model, or fewer ranks on this machine"
                )


def distinct_counts(plan: Plan) -> Mapping[str, int]:
    """Return, for each sparse buffer, in slices of what length indices differ: one rank's selection, or part of it.

    A selection takes no entry twice, nor does a merge (which may fill up its buffer with zeros). Collectives and copies
    keep slices as they are. Of what a buffer holds at the beginning nothing is known.
    """
    lengths = {buffer.name: 1 if buffer.initialized else 0 for buffer in plan.buffers if buffer.sparse}
    counts = {buffer.name: buffer.count for buffer in plan.buffers}
    each_op = dict.fromkeys(op for body in plan.bodies for op in body)
    before: Mapping[str, int] = {}
    while lengths != before:  # the slices of a buffer may come from one that is written further down
        before = dict(lengths)
        for op in each_op:
            match op:
                case ops.Select() | ops.Merge():
                    lengths[op.dst] = math.gcd(lengths[op.dst], counts[op.dst])
                case ops.AllGather() | ops.Copy():
                    if op.dst in lengths:
                        lengths[op.dst] = math.gcd(lengths[op.dst], lengths[op.src])
                case _:
                    pass
    return lengths


def buffers_in_place(plan: Plan) -> Mapping[str, str]:
    """Return the buffers that may be another one, by name: they hold a copy of it only while it rests.

    So is the flat copy of parameters that is averaged and copied back at once. The other buffer is neither read nor
    written meanwhile, and what the copy holds before and afterwards is not looked at.
    """
    kinds = {buffer.name: (buffer.count, buffer.dtype, buffer.place, buffer.sparse) for buffer in plan.buffers}
    found: dict[str, str] = {}
    used_otherwise = {buffer.name for buffer in plan.buffers if buffer.sparse}
    for body in plan.bodies:
        held: dict[str, str] = {}  # copy -> the buffer that rests
        for op in body:
            match op:
                case ops.Copy() if held.get(op.src) == op.dst:
                    del held[op.src]
                case ops.Copy() if kinds[op.src] == kinds[op.dst] and _may_lend(op, found, held):
                    held[op.dst] = found[op.dst] = op.src
                case _:
                    used = {*ops.reads(op), *ops.writes(op)}
                    used_otherwise |= (used - held.keys()) | {copy for copy, other in held.items() if other in used}
        used_otherwise |= held.keys()
    return {copy: other for copy, other in found.items() if copy not in used_otherwise}


def _may_lend(op: ops.Copy, found: Mapping[str, str], held: Mapping[str, str]) -> bool:
    """Tell whether a buffer is no copy itself and has no other copy now, and its copy is one of nothing else."""
    is_first = op.src not in found and op.dst not in found.values() and op.src not in held.values()
    return is_first and found.get(op.dst, op.src) == op.src


def _free_nbytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_nbytes()


# The use of scratch memory; within a collective each purpose has memory of its own.
Purpose: TypeAlias = Literal["reduced", "message", "messages", "on host", "arriving"]


@final
class Scratch:
    """The scratch memory of collectives of a rank that take place one after the other."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Purpose, torch.device], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(map(torch.numel, self._kept.values()))

    def take(self, purpose: Purpose, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of any contents, `[count]`; it is lent until the next collective."""
        nbytes = count * dtype.itemsize
        kept = self._kept.get((purpose, device))
        if kept is None or kept.numel() < nbytes:
            self._kept.pop((purpose, device), None)  # before there is another
            self._kept[purpose, device] = kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return kept[:nbytes].view(dtype)
