"""A link as the user describes it: a line, a table of measured messages, or ideal."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from simdist.settings.base import Fault, Settings, refuse
from simdist.settings.units import BytesPerSecond, Fraction, Nbytes, Seconds, format_nbytes


class TablePoint(Settings):
    """A measured transfer: `size` and `time` in a file; in Python also a tuple `(nbytes, time_s)`."""

    nbytes: Nbytes = Field(alias="size")
    time_s: Seconds = Field(alias="time")

    @model_validator(mode="before")
    @classmethod
    def _from_tuple(cls, value: Any) -> Any:
        return {"nbytes": value[0], "time_s": value[1]} if isinstance(value, tuple) and len(value) == 2 else value


_Points: TypeAlias = tuple[TablePoint, ...]


class Link(Settings):
    """One direction of a link, either as a line or as measured points; the word `ideal` means free and instant.

    Line: time = latency_s + nbytes / (bandwidth_Bps * efficiency). With a table, the line's attributes mean nothing.

    Args:
        latency_s: Seconds before the first byte.
        bandwidth_Bps: Line rate per direction, bytes per second; `math.inf` only in an ideal link.
        efficiency: Share of the line rate that payload reaches, above 0 and at most 1.
        rendezvous_s: Seconds that a message longer than `eager_nbytes` takes besides, because its ends first agree.
        eager_nbytes: Largest message that is sent without asking.
        gap_s: Seconds from one message of a process to its next, at least; twice that for messages longer than a stated
            `eager_nbytes`. Between nodes only.
        ring_step_s: Seconds that each step of a ring takes beside its hops and bytes; not with NCCL's protocol LL, that
            of small buffers. None if nobody measured it: it is then simulated as 0. Between nodes only.
        table: Measured `(nbytes, time_s)`: two points or more, growing sizes, times that do not shrink.
        all_gather: The same of the messages of an all_gather, if it was measured. Without, `table` counts.
        reduce_scatter: The same of a reduce_scatter.
        send_Bps: With a table, of a link whose receiving end takes that time: bytes per second that an end sends.

    >>> Link(latency_s=25e-6, bandwidth_Bps=3.125e9).efficiency
    1.0
    """

    latency_s: Seconds = 0.0
    bandwidth_Bps: BytesPerSecond = math.inf
    efficiency: Annotated[Fraction, Field(gt=0)] = 1.0
    rendezvous_s: Seconds = 0.0
    eager_nbytes: Nbytes = Field(default=0, alias="eager")
    gap_s: Annotated[Seconds, Field(exclude_if=lambda seconds: not seconds)] = 0.0
    ring_step_s: Annotated[Seconds | None, Field(exclude_if=lambda seconds: seconds is None)] = None
    table: Annotated[_Points | None, Field(min_length=2)] = None
    all_gather: Annotated[_Points | None, Field(min_length=2)] = None
    reduce_scatter: Annotated[_Points | None, Field(min_length=2)] = None
    send_Bps: BytesPerSecond | None = Field(default=None, alias="send")

    @classmethod
    def ideal(cls) -> Self:
        """Return a link without latency and with unlimited bandwidth."""
        return cls(latency_s=0.0, bandwidth_Bps=math.inf)

    @model_validator(mode="before")
    @classmethod
    def _spell_out_ideal(cls, value: Any) -> Any:
        return {"latency": "0 s", "bandwidth": "unlimited"} if value == "ideal" else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        beside = {"send": self.send_Bps, **self.tables}
        if self.table is None and (given := [key for key, value in beside.items() if value is not None]):
            refuse("Link", [((key,), f"{key!r} has no meaning without a table: remove it") for key in given])
        refuse("Link", self._line_faults() if self.table is None else self._table_faults())
        return self

    @property
    def tables(self) -> dict[str, tuple[TablePoint, ...] | None]:
        """The tables of single collectives, by key."""
        return {"all_gather": self.all_gather, "reduce_scatter": self.reduce_scatter}

    def _line_faults(self) -> list[Fault]:
        examples = {"latency": "latency: 25 us", "bandwidth": "bandwidth: 25 Gbit/s"}
        given = {"latency": "latency_s", "bandwidth": "bandwidth_Bps"}
        return [
            ((key,), f"required key {key!r} is missing: write e.g. {example}, a table of measured points, or `ideal`")
            for key, example in examples.items()
            if given[key] not in self.model_fields_set
        ]

    def _table_faults(self) -> list[Fault]:
        keys = {"latency_s": "latency", "bandwidth_Bps": "bandwidth", "efficiency": "efficiency"}
        keys |= {"rendezvous_s": "rendezvous", "eager_nbytes": "eager", "gap_s": "gap"}
        keys |= {"ring_step_s": "ring_step"}
        faults: list[Fault] = [
            ((key,), f"{key!r} has no meaning beside a table of measured points: remove one of them")
            for name, key in keys.items()
            if name in self.model_fields_set
        ]
        for key, table in {"table": self.table, **self.tables}.items():
            faults += _point_faults(key, table or ())
        return faults

    @model_serializer(mode="wrap", when_used="json")
    def _shortest(self, handler: SerializerFunctionWrapHandler) -> Any:
        keys = handler(self)
        if self.table is not None:
            kept = ("table", *self.tables, "send")
            return {key: keys[key] for key in kept if keys[key] is not None}
        for key in ("table", *self.tables, "send"):
            del keys[key]
        if not self.rendezvous_s:
            del keys["rendezvous"]
        if not self.rendezvous_s and not self.gap_s:
            del keys["eager"]
        return "ideal" if self == Link.ideal() else keys


def ends_flat(table: Sequence[TablePoint]) -> bool:
    """Tell whether larger messages than those of a table would cost no more, because its last two times are equal."""
    return len(table) > 1 and table[-1].time_s == table[-2].time_s


def _point_faults(key: str, table: _Points) -> list[Fault]:
    """Return what is wrong with the points of a table."""
    faults: list[Fault] = []
    for i, point in enumerate(table):
        nbytes = point.nbytes
        time_s = point.time_s
        if nbytes > 0 and time_s == 0:
            faults.append(((key, i, "time"), f"0 s for {format_nbytes(nbytes)} is an infinite bandwidth"))
        if i and nbytes <= table[i - 1].nbytes:
            faults.append(((key, i, "size"), f"{nbytes} B is not above {table[i - 1].nbytes} B: sort by size"))
        if i and time_s < table[i - 1].time_s:
            faults.append(
                ((key, i, "time"), f"{time_s:g} s is less than the {table[i - 1].time_s:g} s of a smaller size")
            )
    return faults
