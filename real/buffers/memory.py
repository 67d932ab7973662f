"""One tensor per buffer of a plan.

A dense buffer is a flat tensor; a sparse one is a pair of `count` values and `count` int32 indices. No buffer is
allocated before its size has been compared with the available memory: a plan may be an untrusted file.

Collectives need memory besides the buffers. It is kept from call to call, because the kernel allocates fresh memory
page by page, at the first access. For a tensor of many megabytes, that is a page fault for every 4 KiB, which takes as
long as sending them over the network. Allocators return large blocks to the kernel, so new tensors pay this in every
step.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from real.buffers.lives import in_order_nbytes, short_lived
from real.kernels.graphs import Graphs
from real.kernels.topk import KERNELS_FROM
from simdist.errors import RunError
from simdist.machine import free_memory_nbytes
from simdist.plan import Buffer, Plan, ops

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class _SparseTensor:
    """Some values of a vector, with their indices.

    Args:
        values: Shape `[k]`.
        indices: int32 `[k]`.
        n_distinct: Length of slices, from the beginning. Within a slice, no two nonzero values have the same index.
    """

    values: Tensor
    indices: Tensor
    n_distinct: int = 1


class Memory:
    """The buffers of one rank, or of several stacked ranks.

    Args:
        plan: The plan with the buffers.
        device: Device for buffers that the plan places on the device; the others are in host memory.
        names: Names of the buffers to allocate; the others get no tensor.
        n_ranks: Number of ranks to stack. All shapes begin with `n_ranks`, and `row` returns one of them.
        scratch_nbytes: Memory that collectives or computing will need on the device besides the buffers.
        in_place: Name of a buffer -> name of the buffer that it shares memory with, see `buffers_in_place`.
        kernels_from: See `real.kernels.topk.TopK`.
        begins_freed: Short-lived buffers of a sharded plan begin without memory.

    Attributes:
        device: As given.
        n_ranks: Number of stacked ranks; None for one rank without an axis.
        kernels_from: As given.
        graphs: Recorded operations on the buffers; None if they are not on a GPU.

    Raises:
        RunError: The buffers do not fit.
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
        kernels_from: int = KERNELS_FROM,
        begins_freed: bool = False,
    ) -> None:
        wanted = [buffer for buffer in plan.buffers if buffer.name in names and buffer.name not in in_place]
        self.device = device
        self.n_ranks = n_ranks
        self.kernels_from = kernels_from
        self.graphs = Graphs(device) if device.type == "cuda" else None
        self._buffers = {buffer.name: buffer for buffer in wanted}
        self._kept: frozenset[str] = frozenset()
        freed = short_lived(plan) & self._buffers.keys() if begins_freed else set()
        self._check_fits(plan, freed, scratch_nbytes)
        units = distinct_counts(plan)
        self._dense: dict[str, Tensor] = {}
        self._sparse: dict[str, _SparseTensor] = {}
        for buffer in wanted:
            values = self._zeros(buffer, TORCH_DTYPES[buffer.dtype])
            if buffer.sparse:
                self._sparse[buffer.name] = _SparseTensor(values, self._zeros(buffer, torch.int32), units[buffer.name])
            else:
                self._dense[buffer.name] = values
            if buffer.name in freed:
                self.give_back(buffer.name)
        self._dense.update({name: self._dense[other] for name, other in in_place.items() if name in names})

    def __contains__(self, name: object) -> bool:
        return name in self._dense or name in self._sparse

    def dense(self, name: str) -> Tensor:
        """Return the tensor of a dense buffer, shape `[count]`."""
        return self._dense[name]

    def sparse(self, name: str) -> _SparseTensor:
        """Return the values and indices of a sparse buffer."""
        return self._sparse[name]

    @property
    def held_nbytes(self) -> int:
        """Bytes of memory that the buffers have now."""
        sparse = (tensor for each in self._sparse.values() for tensor in (each.values, each.indices))
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in (*self._dense.values(), *sparse)}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    def is_held(self, name: str) -> bool:
        """Tell whether a dense buffer has memory now."""
        return self._dense[name].untyped_storage().nbytes() > 0

    @property
    def kept(self) -> frozenset[str]:
        """Buffers that must keep their memory."""
        return self._kept

    def keep(self, names: Collection[str]) -> None:
        """Let buffers keep their memory."""
        self._kept |= frozenset(names)

    def give_back(self, name: str) -> None:
        """Free the memory of a dense buffer. Its tensor, and views of it, must not be used until it is taken again."""
        self._dense[name].untyped_storage().resize_(0)

    def take(self, name: str) -> None:
        """Allocate memory for a dense buffer that was given back. It holds arbitrary numbers, and zeros as padding."""
        tensor = self._dense[name]
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
        padding = self._buffers[name].padding
        tensor[..., tensor.shape[-1] - padding :].zero_()

    @contextmanager
    def lent(self, names: Iterable[str]) -> Iterator[None]:
        """Let dense buffers have memory in a block. Those without memory get some, and give it back afterwards."""
        taken = [name for name in dict.fromkeys(names) if name in self._dense and not self.is_held(name)]
        for name in taken:
            self.take(name)
        yield
        for name in taken:
            self.give_back(name)

    def own_slice(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """Return the slice of a whole that a rank has in a sharded buffer.

        Args:
            name: The sharded buffer.
            whole: All of it, `[size of the group * count]`.
            rank: The rank.
        """
        group = self._buffers[name].sharded_over
        return whole.view(group.size, -1)[group.member(rank)]

    def tensors(self, name: str) -> tuple[Tensor, ...]:
        """Return the tensors of a buffer: one tensor, or values and indices."""
        sparse = self._sparse.get(name)
        return (sparse.values, sparse.indices) if sparse else (self._dense[name],)

    def row(self, rank: int) -> "Memory":
        """Return the buffers of one of the stacked ranks, as views, not copies."""
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
        pinned = on_host and self.device.type == "cuda"
        shape = (buffer.count,) if self.n_ranks is None else (self.n_ranks, buffer.count)
        return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else self.device, pin_memory=pinned)

    def _check_fits(self, plan: Plan, freed: Collection[str], scratch_nbytes: int) -> None:
        on_gpu = self.device.type == "cuda"
        for place, free_nbytes in (("device", _free_nbytes(self.device)), ("host", _free_nbytes(torch.device("cpu")))):
            kept = (each for each in self._buffers.values() if each.place == place and each.name not in freed)
            nbytes = sum(buffer.nbytes for buffer in kept) * (self.n_ranks or 1)
            nbytes += in_order_nbytes(plan, freed) + scratch_nbytes if place == "device" else 0
            if nbytes > free_nbytes:
                beside = " and beside them" if scratch_nbytes else ""
                where = f"{self.device}" if on_gpu and place == "device" else "the host"
                raise RunError(
                    f"plan {plan.name} needs {nbytes / 1e9:.3g} GB for its buffers{beside}; {where} has "
                    f"{free_nbytes / 1e9:.3g} GB free: run a smaller model, or fewer ranks on this machine"
                )


def distinct_counts(plan: Plan) -> Mapping[str, int]:
    """Return, for each sparse buffer, the length of slices with distinct indices: one rank's selection, or part of it.

    A selection takes no entry twice, and neither does a merge (which may fill up its buffer with zeros). Collectives
    and copies preserve slices. The initial contents of a buffer are unknown.
    """
    lengths = {buffer.name: 1 if buffer.initialized else 0 for buffer in plan.buffers if buffer.sparse}
    counts = {buffer.name: buffer.count for buffer in plan.buffers}
    each_op = dict.fromkeys(op for body in plan.bodies for op in body)
    before: Mapping[str, int] = {}
    while lengths != before:  # the slices of a buffer may come from a buffer that is written later
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
    """Return the buffers that may share another buffer's memory, by name: they copy it only while it is not in use.

    An example is the flat copy of parameters that is averaged and immediately copied back. The other buffer is neither
    read nor written meanwhile, and the contents of the copy before and after are not used.
    """
    kinds = {buffer.name: (buffer.count, buffer.dtype, buffer.place, buffer.sparse) for buffer in plan.buffers}
    found: dict[str, str] = {}
    used_otherwise = {buffer.name for buffer in plan.buffers if buffer.sparse}
    for body in plan.bodies:
        held: dict[str, str] = {}  # copy -> the buffer that is not in use
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
    """Tell whether a buffer is not a copy and has no other copy now, and its copy is not a copy of another buffer."""
    is_first = op.src not in found and op.dst not in found.values() and op.src not in held.values()
    return is_first and found.get(op.dst, op.src) == op.src


def _free_nbytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_nbytes()


# The purpose of scratch memory. Within a collective, each purpose has its own memory.
Purpose: TypeAlias = Literal["reduced", "message", "messages", "on host", "arriving"]


@final
class Scratch:
    """The scratch memory of a rank's collectives that run one after the other."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Purpose, torch.device], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of kept memory."""
        return sum(map(torch.numel, self._kept.values()))

    def take(self, purpose: Purpose, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor with arbitrary contents, `[count]`; it is valid until the next collective."""
        nbytes = count * dtype.itemsize
        kept = self._kept.get((purpose, device))
        if kept is None or kept.numel() < nbytes:
            self._kept.pop((purpose, device), None)  # frees the old one before the new one is allocated
            self._kept[purpose, device] = kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return kept[:nbytes].view(dtype)


def on_host(state: Any) -> Any:
    """Return nested dicts, lists and tuples with copies of their tensors in host memory; nothing else is copied."""
    match state:
        case Tensor():
            return state.detach().to("cpu", copy=True)
        case dict() if type(state) in (dict, OrderedDict):  # subclasses, such as Counter, contain no tensors
            return {key: on_host(value) for key, value in state.items()}
        case list() | tuple() if type(state) in (list, tuple):
            return type(state)(map(on_host, state))
        case _:
            return state
