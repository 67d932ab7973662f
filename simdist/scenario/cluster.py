"""The machines: nodes, GPUs, the links inside and between nodes, and storage."""

import math
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from simdist.groups import MAX_WORLD_SIZE
from simdist.scenario.precision import Peak
from simdist.settings import Fault, Settings, nearest, refuse, shown
from simdist.units import BytesPerSecond, Factor, Fraction, Nbytes, Seconds, Whole, format_nbytes, parse_fraction

__all__ = ["Cluster", "Device", "DeviceOverride", "Library", "Link", "Selection", "Storage", "TablePoint", "Transport"]

Library: TypeAlias = Literal["nccl", "gloo"]
Transport: TypeAlias = Literal["tcp", "rdma"]

Index = Annotated[Whole, Field(ge=0)]
Count = Annotated[Whole, Field(ge=1)]


class TablePoint(Settings):
    """A measured transfer: `size` and `time` in a file; in Python also a tuple `(nbytes, time_s)`."""

    nbytes: Nbytes = Field(alias="size")
    time_s: Seconds = Field(alias="time")

    @model_validator(mode="before")
    @classmethod
    def _from_tuple(cls, value: Any) -> Any:
        return {"nbytes": value[0], "time_s": value[1]} if isinstance(value, tuple) and len(value) == 2 else value


class Link(Settings):
    """One direction of a link, either as a line or as measured points; the word `ideal` means free and instant.

    Line: time = latency_s + nbytes / (bandwidth_Bps * efficiency). With a table, the line's attributes mean nothing.
    Where a file states the efficiency by transport, such as `{tcp: 60%, rdma: 92%}`, the one of `transport` is taken.

    Args:
        latency_s: Seconds before the first byte.
        bandwidth_Bps: Line rate per direction, bytes per second; `math.inf` only in an ideal link.
        transport: Which of several stated efficiencies is taken.
        efficiency: Share of the line rate that payload reaches, above 0 and at most 1.
        table: Measured `(nbytes, time_s)`: two points or more, growing sizes, times that do not shrink.

    >>> Link(latency_s=25e-6, bandwidth_Bps=3.125e9).efficiency
    1.0
    >>> by_transport = {"latency": 25e-6, "bandwidth": 3.125e9, "efficiency": {"tcp": "60%", "rdma": "92%"}}
    >>> Link.model_validate(by_transport | {"transport": "rdma"}).efficiency
    0.92
    """

    latency_s: Seconds = 0.0
    bandwidth_Bps: BytesPerSecond = math.inf
    transport: Transport | None = None
    efficiency: Annotated[Fraction, Field(gt=0)] = 1.0
    table: Annotated[tuple[TablePoint, ...], Field(min_length=2)] | None = None

    @classmethod
    def ideal(cls) -> Self:
        """Return a link without latency and with unlimited bandwidth."""
        return cls(latency_s=0.0, bandwidth_Bps=math.inf)

    @model_validator(mode="before")
    @classmethod
    def _spell_out_ideal(cls, value: Any) -> Any:
        return {"latency": "0 s", "bandwidth": "unlimited"} if value == "ideal" else value

    @model_validator(mode="before")
    @classmethod
    def _take_the_transports_efficiency(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "table" in value:
            return value
        transport, stated = value.get("transport"), value.get("efficiency")
        if isinstance(stated, dict):
            refuse("Link", _transport_faults(transport, stated))
            return value | {"efficiency": stated[transport]}
        if transport is not None:
            example = "efficiency: {tcp: 60%, rdma: 92%}"
            refuse("Link", [(("transport",), f"'transport' without efficiencies to choose from: write e.g. {example}")])
        return value

    @field_validator("bandwidth_Bps")
    @classmethod
    def _positive(cls, value: float) -> float | None:
        return _positive(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse("Link", self._line_faults() if self.table is None else self._table_faults(self.table))
        return self

    def _line_faults(self) -> list[Fault]:
        examples = {"latency": "latency: 25 us", "bandwidth": "bandwidth: 25 Gbit/s"}
        given = {"latency": "latency_s", "bandwidth": "bandwidth_Bps"}
        return [
            ((key,), f"required key {key!r} is missing: write e.g. {example}, a table of measured points, or `ideal`")
            for key, example in examples.items()
            if given[key] not in self.model_fields_set
        ]

    def _table_faults(self, table: tuple[TablePoint, ...]) -> list[Fault]:
        keys = {
            "latency_s": "latency",
            "bandwidth_Bps": "bandwidth",
            "transport": "transport",
            "efficiency": "efficiency",
        }
        faults: list[Fault] = [
            ((key,), f"{key!r} has no meaning beside a table of measured points: remove one of them")
            for name, key in keys.items()
            if name in self.model_fields_set
        ]
        for i, point in enumerate(table):
            nbytes, time_s = point.nbytes, point.time_s
            if nbytes > 0 and time_s == 0:
                faults.append(((("table", i, "time")), f"0 s for {format_nbytes(nbytes)} is an infinite bandwidth"))
            if i and nbytes <= table[i - 1].nbytes:
                faults.append((("table", i, "size"), f"{nbytes} B is not above {table[i - 1].nbytes} B: sort by size"))
            if i and time_s < table[i - 1].time_s:
                faults.append(
                    (("table", i, "time"), f"{time_s:g} s is less than the {table[i - 1].time_s:g} s of a smaller size")
                )
        return faults

    @model_serializer(mode="wrap", when_used="json")
    def _shortest(self, handler: SerializerFunctionWrapHandler) -> Any:
        keys = handler(self)
        if self.table is not None:
            return {"table": keys["table"]}
        del keys["table"]
        if self.transport is None:
            del keys["transport"]
        else:
            keys["efficiency"] = {self.transport: keys["efficiency"]}
        return "ideal" if self == Link.ideal() else keys


def _transport_faults(transport: object, stated: dict[object, object]) -> list[Fault]:
    """Return what is wrong with efficiencies by transport, other than the value of the one that is taken."""
    known: tuple[str, ...] = get_args(Transport)
    faults: list[Fault] = [
        (("efficiency", str(key)), f"unknown transport {shown(key)}: {nearest(key, known)}")
        for key in stated
        if key not in known
    ]
    for key in stated:
        if key != transport and key in known:
            faults += _efficiency_faults(str(key), stated[key])
    if transport is None:
        faults.append((("transport",), "required key 'transport' is missing: it chooses one of the efficiencies"))
    elif not isinstance(transport, str) or transport not in stated:
        fault = f"{shown(transport)} has no efficiency here: {nearest(transport, map(str, stated))}"
        faults.append((("transport",), fault))
    return faults


def _efficiency_faults(transport: str, value: object) -> list[Fault]:
    try:
        fraction = parse_fraction(value)
    except ValueError as error:
        return [(("efficiency", transport), str(error))]
    return [] if fraction > 0 else [(("efficiency", transport), f"{shown(value)}: write more than 0")]


class Device(Settings):
    """One GPU.

    Args:
        name: For people.
        memory_bandwidth_Bps: Bytes per second that elementwise work moves; unlimited if absent.
        host_bandwidth_Bps: Bytes per second of copies between CPU and GPU memory; unlimited if absent.
        peak_flops: FLOP per second by precision, for workloads that state FLOPs instead of seconds; one value is fp32.
        speed: Factor on the speed of compute; 0.5 takes twice the time.
    """

    name: str = ""
    memory_bandwidth_Bps: BytesPerSecond = math.inf
    host_bandwidth_Bps: BytesPerSecond = math.inf
    peak_flops: Peak = Peak()
    speed: Factor = 1.0

    @field_validator("memory_bandwidth_Bps", "host_bandwidth_Bps")
    @classmethod
    def _positive(cls, value: float) -> float | None:
        return _positive(value)


class Selection(Settings):
    """Some of the ranks: those listed, or all ranks of the nodes listed. Without either, all."""

    ranks: Annotated[tuple[Index, ...], Field(min_length=1)] | None = None
    nodes: Annotated[tuple[Index, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.ranks is not None and self.nodes is not None:
            refuse(type(self).__name__, [(("nodes",), "'nodes' beside 'ranks': write one of them")])
        return self

    def selected(self, world_size: int, ranks_per_node: int) -> NDArray[np.int64]:
        """Return the selected ranks in ascending order."""
        if self.ranks is not None:
            return np.unique(np.array(self.ranks, dtype=np.int64))
        if self.nodes is not None:
            first = np.unique(np.array(self.nodes, dtype=np.int64)) * ranks_per_node
            return (first[:, None] + np.arange(ranks_per_node)).ravel()
        return np.arange(world_size, dtype=np.int64)

    def range_faults(self, world_size: int, ranks_per_node: int) -> list[Fault]:
        """Return a fault for every rank or node that the cluster does not have."""
        limits = {
            "ranks": (self.ranks or (), world_size),
            "nodes": (self.nodes or (), world_size // ranks_per_node),
        }
        return [
            ((key, i), f"{number} is out of range: the cluster has {key} 0 to {limit - 1}")
            for key, (numbers, limit) in limits.items()
            for i, number in enumerate(numbers)
            if number >= limit
        ]


class DeviceOverride(Selection):
    """GPUs that are faster or slower than the others, throughout."""

    speed: Factor

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.ranks is None and self.nodes is None:
            refuse("DeviceOverride", [(("ranks",), "which GPUs? Write e.g. ranks: [0, 1] or nodes: [3]")])
        return self


class Storage(Settings):
    """A file server that all nodes read from.

    Args:
        latency_s: Seconds per request.
        bandwidth_Bps: Bytes per second of the server, shared by all nodes.
        client_bandwidth_Bps: Bytes per second that one node can take; unlimited if absent.
        source: Where the numbers are from.
    """

    latency_s: Seconds
    bandwidth_Bps: BytesPerSecond
    client_bandwidth_Bps: BytesPerSecond = math.inf
    source: str = ""

    @field_validator("bandwidth_Bps", "client_bandwidth_Bps")
    @classmethod
    def _positive(cls, value: float) -> float | None:
        return _positive(value)


class Cluster(Settings):
    """`nodes` machines with `gpus_per_node` GPUs each; consecutive ranks share a node.

    Args:
        name: For people.
        source: Where the numbers are from.
        nodes: Machines, 1 or more.
        gpus_per_node: GPUs, and so ranks, of a machine.
        fabric: Link of one GPU to the others of its node.
        network: Link of one NIC to the switch.
        nics_per_node: NICs that the GPUs of a node share evenly.
        collective_overhead_s: Seconds that a collective takes besides its messages: launch, and waking up its members.
        host_bridge_Bps: Bytes per second and direction of the PCIe host bridge that a node's GPUs hang below, for what
            they send one another and the NIC; unlimited if absent.
        oversubscription: Sum of the NICs' bandwidth over what the switch carries, 1 or more.
        library: Whose choice of algorithm `auto` is.
        device: Every GPU.
        slow_devices: GPUs that differ in speed; where several name a rank, their factors multiply.
        storage: The file server, if there is one.
    """

    name: str = ""
    source: str = ""
    nodes: Count
    gpus_per_node: Count
    fabric: Link = Field(examples=["ideal"])
    network: Link = Field(examples=["ideal"])
    nics_per_node: Count = 1
    host_bridge_Bps: BytesPerSecond = math.inf
    oversubscription: Annotated[Factor, Field(ge=1)] = 1.0
    library: Library = "nccl"
    collective_overhead_s: Seconds = 0.0
    device: Device = Device()
    slow_devices: tuple[DeviceOverride, ...] = ()
    storage: Storage | None = None

    @field_validator("host_bridge_Bps")
    @classmethod
    def _positive(cls, value: float) -> float | None:
        return _positive(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse("Cluster", self._faults())
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks: one per GPU."""
        return self.nodes * self.gpus_per_node

    def device_speed(self) -> NDArray[np.float64]:
        """Return the factor on the speed of compute of every rank, shape `[world_size]`."""
        speed = np.full(self.world_size, self.device.speed)
        for override in self.slow_devices:
            speed[override.selected(self.world_size, self.gpus_per_node)] *= override.speed
        return speed

    def _faults(self) -> list[Fault]:
        if self.world_size > MAX_WORLD_SIZE:
            product = f"{self.nodes} nodes x {self.gpus_per_node} GPUs are {self.world_size} ranks"
            return [(("nodes",), f"{product}: at most {MAX_WORLD_SIZE} are supported")]
        return [
            (("slow_devices", i, *path), message)
            for i, override in enumerate(self.slow_devices)
            for path, message in override.range_faults(self.world_size, self.gpus_per_node)
        ]


def _positive(value: float | None) -> float | None:
    if value == 0:
        raise ValueError("0 would never finish: write a value above 0, or leave the key out")
    return value
