"""The relevant events of a trace, as columns: compact enough for millions of events, and ready for numpy."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder
from numpy.typing import NDArray

from simdist.profiles.kineto.events import (
    Dims,
    Event,
    EventKind,
    Hint,
    args_of,
    hints_of,
    meaning_of,
    unit_of_annotation,
)
from simdist.profiles.kineto.messages import Message, dtype_of, element_count, message_of

#: An array of numbers, mostly seconds.
Floats: TypeAlias = NDArray[np.float64]
#: An array of whole numbers, such as indices.
Ints: TypeAlias = NDArray[np.int64]
#: Sizes of the dimensions of each of some tensors.
Shapes: TypeAlias = tuple[tuple[int, ...], ...]

UNKNOWN = -1
_NOTHING = -1


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events in the order of their start, an enclosing event before its inner ones.

    Args:
        start_s: On the trace's clock, `[n]`.
        end_s: On the trace's clock, `[n]`.
        thread: Number of the thread or stream, an index into `RankEvents.threads`, `[n]`.
        kind: An `EventKind`, `[n]`.
        link: Depends on `kind`. For a `STEP`, its number. For a `UNIT`, the index in `RankEvents.units`. For an
            `ISSUE`, a `TRANSFER` or a `COLLECTIVE`, the index in `RankEvents.messages`. For a `PACK`, the index in
            `RankEvents.shapes`. For `READY`, the elements of the gradient. For a `LAYER`, the samples of its batch.
            For launches and the device's work, the number that links them. -1 if the trace does not show it, `[n]`.
    """

    start_s: Floats
    end_s: Floats
    thread: NDArray[np.int32]
    kind: NDArray[np.int8]
    link: Ints

    def __len__(self) -> int:
        return len(self.start_s)

    def where(self, chosen: NDArray[np.bool_]) -> "EventColumns":
        """Return the chosen events, `[n]`."""
        return EventColumns(
            self.start_s[chosen], self.end_s[chosen], self.thread[chosen], self.kind[chosen], self.link[chosen]
        )

    def of(self, *kinds: EventKind) -> "EventColumns":
        """Return the events of these kinds."""
        return self.where(np.isin(self.kind, kinds))

    def on(self, thread: int) -> "EventColumns":
        """Return the events of one thread or stream."""
        return self.where(self.thread == thread)


@dataclass(frozen=True, slots=True)
class RankEvents:
    """The events of one rank, with information about its collectives.

    Args:
        host: Events of its threads.
        device: Events of its GPU; empty without one.
        threads: Process and thread, or GPU and stream, for each number in `EventColumns.thread`.
        messages: Messages of collectives; see `EventColumns.link`.
        device_messages: Messages of the kernels of collectives, by their `link`.
        dtypes: Number of gradients of each type.
        backends: Backends that annotated their collectives, such as `gloo`.
        hints: Hints in the names of events.
        units: Names of units of a sharded model; see `EventColumns.link`.
        shapes: Shapes of the gradients of units; see `EventColumns.link`.
    """

    host: EventColumns
    device: EventColumns
    threads: tuple[tuple[int | str, int | str], ...]
    messages: tuple[Message, ...]
    device_messages: dict[int, Message]
    dtypes: Counter[str]
    backends: frozenset[str]
    hints: frozenset[Hint]
    units: tuple[str, ...] = ()
    shapes: tuple[Shapes, ...] = ()


def rank_events(batches: Iterable[Sequence[Event]]) -> RankEvents:
    """Read all events once and keep the relevant parts."""
    reading = _Reading()
    for batch in batches:
        reading.read(batch)
    events = reading.events()
    on_device = events.kind >= EventKind.KERNEL
    host = events.where(~on_device)
    device = events.where(on_device)
    threads = tuple(reading.threads)
    messages = tuple(reading.messages)
    backends = frozenset(reading.backends)
    hints = frozenset(reading.hints)
    return RankEvents(
        host,
        device,
        threads,
        messages,
        reading.device_messages,
        reading.dtypes,
        backends,
        hints,
        tuple(reading.units),
        tuple(reading.shapes),
    )


class _Link(Struct, frozen=True, gc=False):
    """The only argument of a kernel or of a launch that is always needed."""

    correlation: int = UNKNOWN


_LINK = Decoder(_Link, strict=False)  # not strict: a number may be quoted
_BACKENDS = frozenset({"gloo", "mpi", "nccl", "ucc"})
_LINKED = EventKind.KERNEL, EventKind.COPY_IN, EventKind.COPY, EventKind.LAUNCH, EventKind.BLOCKING
_TELLING = (
    EventKind.UNIT,
    EventKind.STEP,
    EventKind.ISSUE,
    EventKind.TRANSFER,
    EventKind.READY,
    EventKind.LAYER,
    EventKind.PACK,
    EventKind.COLLECTIVE,
)
_IS_LINKED, _IS_TELLING = (np.isin(np.arange(len(EventKind)), kinds) for kinds in (_LINKED, _TELLING))


def _fitting(number: int) -> int:
    """Return a number that fits a column; larger ones, such as unsigned 64 bits, change, but equal ones stay equal."""
    return number if -(2**63) <= number < 2**63 else number % 2**63


def _correlations(texts: list[Raw]) -> list[int]:
    """Decode the only argument that most events need, all at once; one by one only if some are damaged."""
    try:
        return [_fitting(_LINK.decode(text).correlation) for text in texts]
    except DecodeError:
        if len(texts) == 1:
            return [UNKNOWN]
        return [link for text in texts for link in _correlations([text])]


def _shapes(dims: Dims) -> Shapes:
    """Return the shapes of a list of tensors, the first input of an operator; nothing if the trace has none."""
    tensors = dims[0] if dims else []
    return tuple(tuple(sizes) for sizes in tensors if isinstance(sizes, list))


class _Reading:
    """The state of reading a trace."""

    def __init__(self) -> None:
        self.columns: list[tuple[Floats, Floats, NDArray[np.int32], NDArray[np.int8], Ints]] = []
        self.threads: dict[tuple[int | str, int | str], int] = {}
        self.messages: list[Message] = []
        self.device_messages: dict[int, Message] = {}
        self.dtypes: Counter[str] = Counter()
        self.backends: set[str] = set()
        self.hints: set[Hint] = set()
        self.units: dict[str, int] = {}
        self.shapes: dict[Shapes, int] = {}
        self._meanings: dict[str, dict[str, int]] = {}

    def read(self, batch: Sequence[Event]) -> None:
        """Keep the relevant parts of some events, in whole columns, because there are millions of events."""
        kinds = np.array(self._kinds(batch), np.int8)
        kept = np.flatnonzero(kinds != _NOTHING)
        events = [batch[i] for i in kept.tolist()]
        kind = kinds[kept]
        link = np.full(len(events), UNKNOWN, np.int64)
        linked = np.flatnonzero(_IS_LINKED[kind])
        link[linked] = _correlations([events[i].args for i in linked.tolist()])
        for i in np.flatnonzero(_IS_TELLING[kind]).tolist():
            link[i] = _fitting(self._told(int(kind[i]), events[i]))
        keys = [(event.pid, event.tid) for event in events]
        for key in set(keys) - self.threads.keys():
            self.threads[key] = len(self.threads)
        start_us = np.array([event.ts_us for event in events], np.float64)
        dur_us = np.array([event.dur_us for event in events], np.float64)
        self.columns.append((start_us, dur_us, np.array([self.threads[key] for key in keys], np.int32), kind, link))

    def events(self) -> EventColumns:
        """Return the events in order."""
        none = (np.zeros(0), np.zeros(0), np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros(0, np.int64))
        start_us, dur_us, thread, kind, link = map(np.concatenate, zip(none, *self.columns, strict=True))
        end_us = start_us + dur_us
        order = np.lexsort((-end_us, start_us))
        return EventColumns(1e-6 * start_us[order], 1e-6 * end_us[order], thread[order], kind[order], link[order])

    def _kinds(self, batch: Sequence[Event]) -> list[int]:
        meanings = self._meanings
        try:
            return [meanings[event.cat][event.name] if event.ph == "X" else _NOTHING for event in batch]
        except KeyError:
            for event in batch:
                if event.name not in meanings.setdefault(event.cat, {}):
                    kind = meaning_of(event.cat, event.name)
                    self.hints.update(hints_of(event.name))
                    meanings[event.cat][event.name] = _NOTHING if kind is None else int(kind)
            return self._kinds(batch)

    def _told(self, kind: int, event: Event) -> int:
        if kind == EventKind.STEP:
            number = event.name.partition("#")[2]
            return int(number) if number.isdecimal() else UNKNOWN
        if kind == EventKind.UNIT:
            return self.units.setdefault(unit_of_annotation(event.name), len(self.units))
        args = args_of(event)
        if kind == EventKind.COLLECTIVE:  # without a number, or 0, which no launch has
            link = -2 - len(self.device_messages) if not args.correlation else _fitting(args.correlation)
            self.device_messages[link] = message_of(event.name, args)
            return link
        if kind in (EventKind.ISSUE, EventKind.TRANSFER):
            self.messages.append(message_of(event.name, args))
            self.backends |= {event.name.partition(":")[0]} & _BACKENDS
            return len(self.messages) - 1
        dims = args.input_dims
        if kind == EventKind.PACK:
            shapes = _shapes(dims)
            return self.shapes.setdefault(shapes, len(self.shapes)) if shapes else UNKNOWN
        if kind == EventKind.READY:
            if dims and args.input_types:
                self.dtypes[dtype_of(args.input_types[0])] += 1
            return element_count(dims[0]) if dims else UNKNOWN
        shape = dims[1 if event.name == "aten::embedding" else 0] if len(dims) > 1 else []
        return shape[0] if shape and isinstance(shape[0], int) else UNKNOWN
