"""One event of a profiler trace, and the arguments of an event that tell something about training.

Only what every event has is decoded at once: a trace holds hundreds of thousands of events, and few of their arguments
are ever looked at. Those stay text until `args_of` is called.
"""

import re
from math import nan
from typing import TypeAlias

from msgspec import DecodeError, Raw, Struct, convert, field
from msgspec.json import Decoder, decode

Dims: TypeAlias = list[list[int | list[int]]]
"""Shapes of an operator's inputs: a list of sizes each, or a list of such lists where an input is a list of tensors."""


class Event(Struct, frozen=True, gc=False):
    """An event of a trace, in the words of the Chrome trace format.

    `id` and `args` are views into the text that was read with this event, some megabytes of it: keep what `args_of`
    returns instead of the event, or the whole trace stays in memory.

    Args:
        ph: Phase: `X` lasts, `i` is a moment, `M` names a process or thread, `s`, `t` and `f` are ends of arrows.
        cat: Category, such as `cpu_op`, `kernel` or `user_annotation`; older names are translated to these.
        name: Such as `aten::mm` or `ProfilerStep#3`.
        ts_us: Start, on the trace's clock; of what has no time, metadata, it may be NaN.
        dur_us: Duration.
        pid: Process, or the GPU's number where the device did the work.
        tid: Thread, or the stream where the device did the work.
        id: Which arrow this is an end of, as text; empty if it is none.
        args: Everything else, as text; empty if there is nothing else.

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
    """The arguments that are known here; an event has few of them, the others keep their defaults.

    Args:
        input_dims: Shapes of the inputs, if the profiler recorded shapes.
        input_types: Their types, such as `float` or `c10::BFloat16`; empty for what is no tensor.
        concrete_inputs: Values of those inputs that are numbers, as text.
        correlation: Number that a kernel and the call that launched it share.
        external_id: Number that an operator and the calls within it share.
        sequence_number: Number that an operator and its backward share.
        device: Which GPU did it.
        stream: On which stream.
        nbytes: Of a copy.
        collective: Such as `allreduce` or `_allgather_base`.
        in_nelems: Elements that a rank puts in.
        out_nelems: Elements that a rank gets out.
        group_size: How many ranks take part.
        dtype: Of a collective, such as `Float` or `BFloat16`.
        group_name: Name of the process group, such as `0`.
        group_ranks: Ranks of the process group as the trace tells them; see `ranks`.
        seq: How many collectives the process group issued before.
        label: The name that a metadata event gives to its process or thread.
    """

    input_dims: Dims = field(default_factory=list, name="Input Dims")
    input_types: list[str] = field(default_factory=list, name="Input type")
    concrete_inputs: list[str] = field(default_factory=list, name="Concrete Inputs")
    correlation: int | None = None
    external_id: int | None = field(default=None, name="External id")
    sequence_number: int | None = field(default=None, name="Sequence number")
    device: int | None = None
    stream: int | None = None
    nbytes: int | None = field(default=None, name="bytes")
    collective: str = field(default="", name="Collective name")
    in_nelems: int | None = field(default=None, name="In msg nelems")
    out_nelems: int | None = field(default=None, name="Out msg nelems")
    group_size: int | None = field(default=None, name="Group size")
    dtype: str = ""
    group_name: str = field(default="", name="Process Group Name")
    group_ranks: str | list[int] = field(default="", name="Process Group Ranks")
    seq: int | None = field(default=None, name="Seq")
    label: str = field(default="", name="name")

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks of the process group in ascending order; None if the trace does not tell, or not all of them."""
        return _ranks(self.group_ranks)


_DECODER = Decoder(Args, strict=False)  # not strict: a number may be quoted
_RANKS = re.compile(r"\s*\[\s*\d+(?:\s*,\s*\d+)*\s*\]\s*")
_OLDER_NAMES = {
    "Input dims": "Input Dims",
    "external id": "External id",
    "In msg size": "In msg nelems",  # elements, too
    "Out msg size": "Out msg nelems",
}


def args_of(event: Event) -> Args:
    """Decode the arguments of an event; what is of an unexpected type keeps its default.

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
        if not _has_older_names(args, text):
            return args
    except (DecodeError, UnicodeDecodeError):
        pass
    return _lenient(text)


def _has_older_names(args: Args, text: bytes) -> bool:
    """Tell whether something stands there under an older name; it is looked for only where the newer one is missing."""
    return (
        (args.external_id is None and b'"external id"' in text)
        or (not args.input_dims and b'"Input dims"' in text)
        or (bool(args.collective) and b' msg size"' in text)
    )


def _lenient(text: bytes) -> Args:
    """Decode value by value, so that one of an unexpected type does not cost the others."""
    try:
        values = decode(text.decode(errors="replace"), type=dict[str, object])
    except DecodeError:
        return Args()
    known: dict[str, object] = {}
    for name, value in values.items():
        name = _OLDER_NAMES.get(name, name)
        try:
            convert({name: value}, Args, strict=False)
        except DecodeError:
            continue
        known[name] = value
    return convert(known, Args, strict=False)


def _ranks(value: str | list[int]) -> tuple[int, ...] | None:
    """Read ranks from a list, or from its text, which profilers cut short with `...` where it is long."""
    if isinstance(value, str):
        if not _RANKS.fullmatch(value):
            return None
        value = decode(value, type=list[int])
    return tuple(sorted(value)) or None
