"""The message of a collective, read from its event: the kind, the bytes, and the ranks that take part."""

import re
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, TypeAlias

from simdist.profiles.kineto.events import Args

CollectiveKind: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "point_to_point", "broadcast", "reduce", "other"
]


@dataclass(frozen=True, slots=True)
class Message:
    """The message of a collective.

    Args:
        kind: Kind of communication.
        count: Elements of its largest buffer on this rank, 0 of a barrier; None if the trace does not show them.
        dtype: Such as `float32`; empty if the trace does not show it.
        ranks: Members in ascending order; None if unknown.
        n_ranks: Number of members; None if the trace does not show it.
        communicator: Name of their process group; empty if the trace does not show it.
    """

    kind: CollectiveKind
    count: int | None
    dtype: str
    ranks: tuple[int, ...] | None
    n_ranks: int | None
    communicator: str = ""

    @property
    def nbytes(self) -> int | None:
        """Bytes of its largest buffer on this rank; None if the trace does not show them."""
        if self.count == 0:
            return 0
        return None if self.count is None or self.dtype not in _TYPES else self.count * _TYPES[self.dtype][0]

    def filled_from(self, other: "Message") -> "Message":
        """Return this message completed by another event of the same collective."""
        return Message(
            other.kind if self.kind == "other" else self.kind,
            other.count if self.count is None else self.count,
            self.dtype or other.dtype,
            self.ranks or other.ranks,
            self.n_ranks or other.n_ranks,
            self.communicator or other.communicator,
        )


def message_of(name: str, args: Args) -> Message:
    """Return the message of a collective's event, from its arguments, or else from its name.

    Args:
        name: Name of the event: an operator, an annotation or a kernel.
        args: Arguments of the event.

    Example:
        >>> message_of("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Args()).dtype
        'float32'
        >>> message_of("c10d::_allgather_base_", Args()).kind, message_of("nccl:all_reduce_barrier", Args()).kind
        ('all_gather', 'other')
        >>> message_of("nccl:recv 0<-1", Args()).kind, message_of("ncclDevKernel_SendRecv(...)", Args()).kind
        ('point_to_point', 'other')
        >>> message_of("nccl:all_reduce", Args(in_nelems=-7, dtype="Float")).nbytes is None
        True
        >>> args = Args(input_dims=[[4], [16]], input_types=["float"] * 2)  # the output, then the input
        >>> found = message_of("c10d::_reduce_scatter_base_", args)
        >>> found.count, found.n_ranks
        (16, 4)
    """
    of_inputs = (dtype_of(each) for each in args.input_types)
    dtype = dtype_of(args.dtype) or next(filter(None, of_inputs), "") or _dtype_of_kernel(name)
    kind = _kind_of(args.collective or name)
    n_ranks = args.group_size or len(args.ranks or ()) or _ratio(kind, args)
    count = 0 if _is_barrier(args.collective or name) else _count(kind, args)
    return Message(kind, count, dtype, args.ranks, n_ranks, args.group_name)


def dtype_of(name: str) -> str:
    """Return the usual name of a type: `float32` of `float` or `Float`; empty if it is unknown.

    Example:
        >>> dtype_of("c10::BFloat16"), dtype_of("Float"), dtype_of("TensorList")
        ('bfloat16', 'float32', '')
    """
    return _DTYPES.get(name.removeprefix("c10::").lower(), "")


def element_count(shape: list[int] | list[int | list[int]]) -> int:
    """Return the number of elements of a tensor of some shape, or of a list of tensors.

    Example:
        >>> element_count([2, 3]), element_count([[2, 3], [4]]), element_count([])
        (6, 10, 1)
    """
    tensors = [size for size in shape if isinstance(size, list)]
    return sum(prod(sizes) for sizes in tensors) if tensors else prod(size for size in shape if isinstance(size, int))


# For each type: bytes, and its names in C++, in the arguments of collectives, and in the names of NCCL's kernels.
_TYPES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "float32": (4, ("float", "f32")),
    "float64": (8, ("double", "f64")),
    "float16": (2, ("half", "f16")),
    "bfloat16": (2, ("bfloat16", "bf16")),
    "float8": (1, ("float8_e4m3fn", "float8_e5m2")),
    "int32": (4, ("int",)),
    "int64": (8, ("long", "long int")),
    "int16": (2, ("short", "short int")),
    "int8": (1, ("char", "signed char")),
    "uint8": (1, ("byte", "unsigned char")),
    "bool": (1, ("bool",)),
}
_DTYPES: Final = {name: dtype for dtype, (_, names) in _TYPES.items() for name in names}
_KINDS: Final[tuple[CollectiveKind, ...]] = (
    "reduce_scatter",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
)
_POINT_TO_POINT = re.compile(r"(?<![a-z])i?(?:send|recv)(?![a-z])")


def _is_barrier(name: str) -> bool:
    return "barrier" in name.lower()


def _kind_of(name: str) -> CollectiveKind:
    """Find the collective in a name such as `c10d::_allgather_base_`, ignoring underscores."""
    if _is_barrier(name):
        return "other"
    plain = name.lower().replace("_", "")
    found = next((kind for kind in _KINDS if kind.replace("_", "") in plain), None)
    return found or ("point_to_point" if _POINT_TO_POINT.search(name.lower()) else "other")


_MOST_ELEMENTS = 2**45  # no buffer is larger


def _count(kind: CollectiveKind, args: Args) -> int | None:
    """Return the elements of a message; None if the number is missing or impossible."""
    count = _told_count(kind, args)
    return count if count is not None and 0 <= count <= _MOST_ELEMENTS else None


def _told_count(kind: CollectiveKind, args: Args) -> int | None:
    told = [count for count in (args.in_nelems, args.out_nelems) if count is not None]
    if told:
        return max(told)
    if whole_and_part := _whole_and_part(kind, args):
        return whole_and_part[0]
    counts = [
        element_count(shape)
        for shape, of_type in zip(args.input_dims, args.input_types, strict=False)
        if dtype_of(of_type) or of_type == "TensorList"
    ]
    return sum(counts) if counts else None


def _whole_and_part(kind: CollectiveKind, args: Args) -> tuple[int, int] | None:
    """Return the elements of the whole and of a rank's part, if an operator has one tensor of each as its inputs."""
    types = [dtype_of(each) for each in args.input_types[:2]]
    if kind not in ("all_gather", "reduce_scatter") or len(types) < 2 or not all(types):
        return None
    part, whole = sorted(element_count(shape) for shape in args.input_dims[:2])
    return whole, part


def _ratio(kind: CollectiveKind, args: Args) -> int | None:
    """Return the number of ranks that share a tensor, by the sizes of the whole and of a rank's part."""
    sizes = _whole_and_part(kind, args)
    if args.in_nelems and args.out_nelems and kind in ("all_gather", "reduce_scatter"):
        sizes = max(args.in_nelems, args.out_nelems), min(args.in_nelems, args.out_nelems)
    if sizes is None or sizes[1] < 1 or sizes[0] % sizes[1]:
        return None
    return sizes[0] // sizes[1]


# `..._sum_f32(...)` up to NCCL 2.7, `..._Sum_float(...)` up to 2.18, `..._Sum_f32_RING_LL(...)` from 2.19 on
_KERNEL_DTYPE = re.compile(r"_(?:sum|prod|min|max|minmax|premulsum|sumpostdiv)_([a-z]+\d*)", re.IGNORECASE)


def _dtype_of_kernel(name: str) -> str:
    """Read the type from the name of a reducing kernel; one that only moves bytes is named after a one-byte type."""
    found = _KERNEL_DTYPE.search(name)
    return dtype_of(found[1]) if found else ""
