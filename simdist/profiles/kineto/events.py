"""One event of a profiler trace: its arguments, and its meaning for training.

Only the fields that every event has are decoded immediately. A trace holds hundreds of thousands of events, and few of
their arguments are used, so arguments stay text until `args_of` is called. The meaning of an event is determined once
per category and name, and then looked up. The names are those of PyTorch's own operators and annotations. Annotations
of users only wrap other events and have no meaning here.

Source: torch/optim/optimizer.py, torch/utils/data/dataloader.py, torch/nn/parallel/distributed.py,
    torch/csrc/autograd/engine.cpp and torch/csrc/distributed/c10d of https://github.com/pytorch/pytorch.
"""

import re
from enum import IntEnum
from math import nan
from typing import Literal, TypeAlias, TypeVar

from msgspec import DecodeError, Raw, Struct, convert, field
from msgspec.json import Decoder, decode

T = TypeVar("T", bound=Struct)
#: Shapes of an operator's inputs: a list of sizes for each input, or a list of such lists if it is a list of tensors.
Dims: TypeAlias = list[list[int | list[int]]]


class Event(Struct, frozen=True, gc=False):
    """An event of a trace, in terms of the Chrome trace format.

    `id` and `args` are views into the chunk of text that contained this event, which is some megabytes long. Keep the
    result of `args_of` instead of the event, or the whole trace stays in memory.

    Args:
        ph: Phase: `X` has a duration, `i` is a moment, `M` names a process or thread, `s`, `t` and `f` are ends of
            arrows.
        cat: Category, such as `cpu_op`, `kernel` or `user_annotation`; older names are translated to these.
        name: Such as `aten::mm` or `ProfilerStep#3`.
        ts_us: Start, on the trace's clock; may be NaN for metadata.
        dur_us: Duration.
        pid: Process, or the number of the GPU for work of the device.
        tid: Thread, or the stream for work of the device.
        id: The arrow that ends here, as text; empty if there is none.
        args: All other fields, as text; empty if there are none.

    Source:
        Trace Event Format, Google, 2016; libkineto/src/output_json.cpp of https://github.com/pytorch/kineto.
    """

    ph: str
    cat: str = ""
    name: str = ""
    ts_us: float = field(default=nan, name="ts")
    dur_us: float = field(default=0.0, name="dur")
    pid: int | str = 0
    tid: int | str = 0
    id: Raw = Raw()
    args: Raw = Raw()


class Args(Struct, frozen=True, gc=False):
    """The arguments that are used here. An event has few of them; the others keep their defaults.

    Args:
        input_dims: Shapes of the inputs, if the profiler recorded shapes.
        input_types: Their types, such as `float` or `c10::BFloat16`; empty if not a tensor.
        correlation: Number that a kernel and the call that launched it share.
        collective: Such as `allreduce` or `_allgather_base`.
        in_nelems: Elements of a rank's input.
        out_nelems: Elements of a rank's output.
        group_size: Number of ranks that take part.
        dtype: Data type of a collective, such as `Float` or `BFloat16`.
        group_ranks: Ranks of the process group as the trace states them; see `ranks`.
        group_name: Name of the process group, which has a communicator of its own.
    """

    input_dims: Dims = field(default_factory=list, name="Input Dims")
    input_types: list[str] = field(default_factory=list, name="Input type")
    correlation: int | None = None
    collective: str = field(default="", name="Collective name")
    in_nelems: int | None = field(default=None, name="In msg nelems")
    out_nelems: int | None = field(default=None, name="Out msg nelems")
    group_size: int | None = field(default=None, name="Group size")
    dtype: str = ""
    group_ranks: str | list[int] = field(default="", name="Process Group Ranks")
    group_name: str = field(default="", name="Process Group Name")

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks of the process group in ascending order; None if the trace does not list them all."""
        return _ranks(self.group_ranks)


_DECODER = Decoder(Args, strict=False)  # not strict: a number may be quoted
_RANKS = re.compile(r"\s*\[\s*\d+(?:\s*,\s*\d+)*\s*\]\s*")
# the size of older profilers is also a number of elements
_OLDER_NAMES = {"Input dims": "Input Dims", "In msg size": "In msg nelems", "Out msg size": "Out msg nelems"}


def args_of(event: Event) -> Args:
    """Decode the arguments of an event; values of unexpected types keep their defaults.

    Example:
        >>> from simdist.profiles.kineto.events import Event, args_of
        >>> args = args_of(Event("X", args=Raw(b'{"dtype": "Float", "In msg nelems": "1000", "Group size": []}')))
        >>> args.dtype, args.in_nelems, args.group_size
        ('Float', 1000, None)
    """
    text = bytes(event.args)
    if not text:
        return Args()
    try:
        args = _DECODER.decode(text)
        # Older names are looked up only if the newer one is missing.
        if (args.input_dims or b'"Input dims"' not in text) and not (args.collective and b' msg size"' in text):
            return args
    except (DecodeError, UnicodeDecodeError):
        pass
    try:
        values = decode(text.decode(errors="replace"), type=dict[str, object])
    except DecodeError:
        return Args()
    return lenient({_OLDER_NAMES.get(name, name): value for name, value in values.items()}, Args)


def lenient(values: object, kind: type[T]) -> T:
    """Convert a mapping value by value, so that a value of an unexpected type does not cost the others."""
    known: dict[str, object] = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        try:
            convert({name: value}, kind, strict=False)
        except DecodeError:
            continue
        known[name] = value
    return convert(known, kind, strict=False)


def _ranks(value: str | list[int]) -> tuple[int, ...] | None:
    """Read ranks from a list or from its text; profilers shorten long lists with `...`."""
    if isinstance(value, str):
        if not _RANKS.fullmatch(value):
            return None
        value = decode(value, type=list[int])
    return tuple(sorted(value)) or None


class EventKind(IntEnum):
    """The meaning of an event for the phases of a step.

    On a thread of the host: `WRAPPER` encloses other events and is not work of its own. `UNIT` is one that encloses
    what `fully_shard` does itself, and may name the unit of the sharded model. `STEP` is the profiler's mark of a step.
    `INPUT` is the next batch of the data loader. `FORWARD` is the forward pass of a DDP module, or the beginning of
    that of a sharded model. `OPTIMIZER` is an update. `BACKWARD` is a node of the backward graph with everything that
    belongs to it, `NODE` the node alone. `READY` is a gradient. `COPY_BACK` copies reduced gradients from their bucket.
    `ISSUE` hands over a collective. `TRANSFER` is a collective on a thread of its backend. `LAYER` is an operator with
    an input that shows the batch size. `COPY_OUT` copies a unit out of what was gathered, `PACK` copies the gradients
    of one together. `WORK` is any other operator. `LAUNCH` hands work to the device, `SYNC` waits for the device, and
    `BLOCKING` does both. On a device: `KERNEL`, `COLLECTIVE`, `COPY_IN` from the host, and `COPY` for any other copy.
    """

    WRAPPER, UNIT, STEP, INPUT, FORWARD, OPTIMIZER = range(6)
    BACKWARD, NODE, READY, COPY_BACK, ISSUE, TRANSFER, LAYER, COPY_OUT, PACK, WORK = range(6, 16)
    LAUNCH, SYNC, BLOCKING = range(16, 19)
    KERNEL, COLLECTIVE, COPY_IN, COPY = range(19, 23)


def meaning_of(category: str, name: str) -> EventKind | None:
    """Return the meaning of an event; None if it is irrelevant to training.

    Example:
        >>> meaning_of("user_annotation", "Optimizer.step#SGD.step")
        <EventKind.OPTIMIZER: 5>
        >>> meaning_of("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
        <EventKind.COLLECTIVE: 20>
        >>> meaning_of("ac2g", "ac2g") is None
        True
    """
    match category:
        case "kernel" if name.startswith(("CopyHostToDevice", "CopyDeviceToHost", "CopyDeviceToDevice", "FillBuffer")):
            return EventKind.COPY_IN if "HostToDevice" in name else EventKind.COPY  # of AMD
        case "cpu_op" | "user_annotation":
            return _on_host(category, name)
        case "cuda_runtime" | "cuda_driver" | "hip_runtime" | "hip_driver":
            return _call_of_driver(name)
        case "kernel":
            return EventKind.COLLECTIVE if _is_collective_kernel(name) else EventKind.KERNEL
        case "gpu_memcpy" | "gpu_memset":
            return EventKind.COPY_IN if "HtoD" in name or "HostToDevice" in name else EventKind.COPY
        case _:
            return None


#: Hints in names of events: distribution of the model over ranks, loading of batches, and memory that copies read.
Hint: TypeAlias = Literal["embeddings", "experts", "sharded model", "loader processes", "pinned", "pageable"]

_HINTS: tuple[tuple[Hint, re.Pattern[str]], ...] = (
    ("embeddings", re.compile(r"fbgemm::|KJT|PooledEmbedding|embedding_?bag", re.IGNORECASE)),  # of TorchRec
    ("experts", re.compile(r"(?<![a-z])moe(?![a-z])|experts?(?![a-z])|DeepEP", re.IGNORECASE)),
    ("sharded model", re.compile(r"fsdp|FullyShard|DeepSpeedZero", re.IGNORECASE)),
    ("loader processes", re.compile(r"_MultiProcessingDataLoaderIter")),
    ("pinned", re.compile(r"Pinned -> Device")),
    ("pageable", re.compile(r"Pageable -> Device")),
)


def hints_of(name: str) -> list[Hint]:
    """Return further hints in the name of an event.

    Example:
        >>> hints_of("FSDP::all_gather"), hints_of("## all2all_data:kjt values ##"), hints_of("aten::mm")
        (['sharded model'], ['embeddings'], [])
    """
    return [hint for hint, pattern in _HINTS if pattern.search(name)]


_PREFIXES = (
    ("ProfilerStep#", EventKind.STEP),
    ("enumerate(DataLoader)#", EventKind.INPUT),
    (("DistributedDataParallel.forward", "FSDP::root_pre_forward"), EventKind.FORWARD),
    ("Optimizer.step#", EventKind.OPTIMIZER),
    ("Optimizer.zero_grad#", EventKind.WORK),
    (("autograd::engine::evaluate_function", "FSDP::root_post_backward_callback"), EventKind.BACKWARD),
    ("torch::autograd::AccumulateGrad", EventKind.READY),
    ("torch.distributed.ddp.reducer::copy_bucket_to_grad", EventKind.COPY_BACK),
    (("gloo:", "mpi:", "ucc:"), EventKind.TRANSFER),
    (("nccl:", "c10d::", "record_param_comms"), EventKind.ISSUE),
    ("fsdp::split_with_sizes_copy", EventKind.COPY_OUT),
    ("fsdp::chunk_cat", EventKind.PACK),
)
_UNIT = re.compile(
    r"FSDP::(?:all_gather|all_gather_copy_out|pre_forward|post_forward|pre_backward"
    r"|post_backward_(?:accumulate|reshard|rs_wait|reduce))(?: \((.*)\))?$"
)
_NODE = re.compile(r"Backwards?\d*$")
_LAYERS = frozenset(f"aten::{name}" for name in ("conv1d", "conv2d", "conv3d", "linear", "embedding"))


def _on_host(category: str, name: str) -> EventKind:
    if name in _LAYERS:
        return EventKind.LAYER
    for prefix, what in _PREFIXES:
        if name.startswith(prefix):
            return what
    if _NODE.search(name) and not name.startswith("aten::"):
        return EventKind.NODE
    if _UNIT.match(name):
        return EventKind.UNIT
    return EventKind.WRAPPER if category == "user_annotation" else EventKind.WORK


def unit_of_annotation(name: str) -> str:
    """Return the unit that an annotation names, by its modules; empty for the root.

    Example:
        >>> unit_of_annotation("FSDP::all_gather (layers.3)"), unit_of_annotation("FSDP::post_backward_reduce")
        ('layers.3', '')
    """
    found = _UNIT.match(name)
    return (found[1] or "") if found else ""


def _call_of_driver(name: str) -> EventKind | None:
    """Recognise calls that launch or wait by parts of their names, for both CUDA and HIP."""
    lower = name.lower()
    if "synchronize" in lower:
        return EventKind.SYNC
    if "launch" in lower or "memset" in lower:
        return EventKind.LAUNCH
    if "memcpy" in lower:
        return EventKind.LAUNCH if "async" in lower else EventKind.BLOCKING
    return None


def _is_collective_kernel(name: str) -> bool:
    lower = name.lower()
    return "nccldev" in lower or "ncclkernel" in lower or lower.startswith(("nccl", "rccl", "msccl"))
