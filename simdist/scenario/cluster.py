"""The machines: nodes, GPUs, the links inside and between nodes, and storage."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo, model_validator

from simdist.plan.group import MAX_WORLD_SIZE
from simdist.plan.ops import LaunchKind
from simdist.scenario.effects import WITHOUT_DATA, Uses
from simdist.scenario.gpus import Generation, generation_of
from simdist.scenario.link import Link
from simdist.scenario.uncertain import Range, check_ranges
from simdist.settings.base import Fault, Settings, SettingsGroup, refuse, validate_by_kind
from simdist.settings.plugins import STORAGES, OpenKinds, kind_of, written_kind
from simdist.settings.precision import Peak
from simdist.settings.units import (
    BytesPerSecond,
    Factor,
    Fraction,
    Nbytes,
    PerSecond,
    Seconds,
    Whole,
    format_nbytes,
    format_seconds,
)

Library: TypeAlias = Literal["nccl", "nccl_simple", "gloo"]
Transport: TypeAlias = Literal["rdma", "efa", "tcp", "tcpxo", "slingshot"]

_MAX_STORAGE_SERVERS = 1_000_000
_SEEK_S = 1e-3  # heads that move take longer, flash is faster: 4.16 ms and 70 us (Seagate Exos X18, Samsung PM9A3)
_MOST_NICS = 4  # of a GPU: AWS p5 has 32 for 8
_OF_RDMA_S = 8e-6  # a hop takes 2.9 us (InfiniBand) to 5.7 us (RoCE), over TCP 30 us
_OLDEST_OF_NCCL = 7.0  # tuning.cc: its tables begin with Volta
_MAX_GPUS_OF_HOST = 16  # DGX-2; 8 from A100 on
_MAX_GPUS_OF_DOMAIN = 72  # NVIDIA GB200 NVL72

_Index = Annotated[Whole, Field(ge=0)]
Count = Annotated[Whole, Field(ge=1)]
SecondsOrNone = Annotated[Seconds, Field(exclude_if=lambda seconds: not seconds)]


class SecondsOfKinds(SettingsGroup):
    """Seconds of operations by their kind, 0 of those that are not stated."""

    def of(self, kind: LaunchKind) -> float:
        """Return the seconds of a kind."""
        return float(getattr(self, f"{kind}_s", 0.0))

    def stated(self) -> Iterator[LaunchKind]:
        """Yield the kinds that take time."""
        yield from (kind for kind in get_args(LaunchKind) if self.of(kind))


class SecondsOfSmall(SecondsOfKinds):
    """Seconds of operations besides passes, updates and collectives.

    Args:
        trust_ratios_s: Seconds of the trust ratios of LARS.
        select_s: Seconds of a selection of the largest entries, with its residual.
        merge_s: Seconds of summing entries and keeping the largest.
        densify_s: Seconds of adding entries to a vector.
        low_rank_s: Seconds of a stage of PowerSGD.
        copy_s: Seconds of a copy or a sum of buffers.
        pack_s: Seconds of filling a fusion buffer.
        unpack_s: Seconds of emptying one.
    """

    trust_ratios_s: SecondsOrNone = 0.0
    select_s: SecondsOrNone = 0.0
    merge_s: SecondsOrNone = 0.0
    densify_s: SecondsOrNone = 0.0
    low_rank_s: SecondsOrNone = 0.0
    copy_s: SecondsOrNone = 0.0
    pack_s: SecondsOrNone = 0.0
    unpack_s: SecondsOrNone = 0.0


class HostLaunches(SecondsOfSmall):
    """The host's time for launching one operation that is no part of a pass.

    Args:
        collective_s: Seconds of a call of a collective.
        event_s: Seconds of letting a stream wait for another one, where a plan does so beside its buffers.
        graph_s: Seconds of launching a CUDA graph, which holds a pass or an update.
    """

    collective_s: SecondsOrNone = 0.0
    event_s: SecondsOrNone = 0.0
    graph_s: SecondsOrNone = 0.0


class DeviceFloors(SecondsOfSmall):
    """The least time of an operation on the device, however few bytes it moves.

    Args:
        optimize_s: Seconds of an update.
    """

    optimize_s: SecondsOrNone = 0.0


class Device(Settings):
    """One GPU.

    Args:
        name: For people. Without `compute_capability`, it tells the generation.
        memory_nbytes: Bytes of its memory that a job can use, for a warning if a schedule needs more; unlimited if
            absent.
        memory_bandwidth_Bps: Bytes per second that elementwise work moves; unlimited if absent.
        host_bandwidth_Bps: Bytes per second of copies between CPU and GPU memory; unlimited if absent.
        staging_bandwidth_Bps: Of copies of checkpoints to the host, whose memory may be pageable; not above
            `host_bandwidth_Bps`, which it is if absent.
        peak_flops: FLOP per second by precision, for workloads that state FLOPs instead of seconds; one value is fp32.
        speed: Factor on the speed of compute; 0.5 takes twice the time.
        compute_capability: As CUDA has it, such as 8.0 for an A100: of GPUs joined by NVLink, NCCL's protocols by
            generation. If absent or below 7.0, NCCL's rings are perfect pipelines over the cluster's links.
        orthonormalize_s: Seconds to make one column of a factor orthogonal to those before, and of length 1; if absent
            as memory traffic alone.
        floors: The least seconds of an operation, however few bytes it moves.
        select_kernels_from: Elements of a vector from which the kernels of `real.kernels` select its largest entries
            faster than `torch.topk`, which serves shorter ones; if absent not measured.
    """

    name: str = ""
    memory_nbytes: Annotated[Nbytes | None, Field(exclude_if=lambda nbytes: nbytes is None)] = None
    memory_bandwidth_Bps: BytesPerSecond = math.inf
    host_bandwidth_Bps: BytesPerSecond = math.inf
    staging_bandwidth_Bps: Annotated[BytesPerSecond | None, Field(exclude_if=lambda rate: rate is None)] = None
    peak_flops: Peak = Peak()
    speed: Factor = 1.0
    compute_capability: Annotated[Factor, Field(ge=3, lt=20)] | None = None
    orthonormalize_s: Annotated[Seconds | None, Field(exclude_if=lambda seconds: seconds is None)] = None
    floors: Annotated[DeviceFloors, Field(exclude_if=lambda floors: floors == DeviceFloors())] = DeviceFloors()
    select_kernels_from: Annotated[Count | None, Field(exclude_if=lambda count: count is None)] = None

    @property
    def generation(self) -> Generation | None:
        """The class of the GPU among published rows; None if nothing is known of it."""
        return generation_of(self.name, self.compute_capability)

    @property
    def nccl_capability(self) -> float | None:
        """Its compute capability where NCCL's protocols by generation are known; else None."""
        capability = self.compute_capability
        return None if capability is None or capability < _OLDEST_OF_NCCL else capability


class Selection(Settings):
    """Some of the ranks: those listed, or all ranks of the nodes listed. Without either, all."""

    ranks: Annotated[tuple[_Index, ...], Field(min_length=1)] | None = None
    nodes: Annotated[tuple[_Index, ...], Field(min_length=1)] | None = None

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
        limits = {"ranks": (self.ranks or (), world_size), "nodes": (self.nodes or (), world_size // ranks_per_node)}
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
    """File servers that nodes read from, such as NFS. Each has all files.

    A storage of a user's own is a subclass with a `kind`, which overrides `requests` or `latencies_s`.

    Reading a file takes `open_s`, and then `latency_s` for each request of up to `request_nbytes`; of the server's
    operations it takes one more than it has requests. Each reader of a rank has one request in flight.

    Args:
        latency_s: Seconds per request.
        bandwidth_Bps: Bytes per second of a server, shared by its nodes.
        servers: Number of equal servers. Node n uses server n modulo this number.
        client_bandwidth_Bps: Bytes per second that one node can take; unlimited if absent.
        open_s: Seconds per file besides its requests: to find, open and close it.
        operations_per_s: Operations per second of a server, shared by its nodes; unlimited if absent.
        request_nbytes: Bytes of a file that one request brings (`rsize` of a mount).
        client_requests: Requests that a node has in flight at most, such as the slots of an NFS session; its ranks
            share them evenly. Unlimited if absent.
        batch_s: Seconds that a batch takes besides its files: to put it together and hand it over.
        source: Where the numbers are from.
    """

    latency_s: Seconds
    bandwidth_Bps: BytesPerSecond
    servers: Annotated[Whole, Field(ge=1, le=_MAX_STORAGE_SERVERS, exclude_if=lambda servers: servers == 1)] = 1
    client_bandwidth_Bps: BytesPerSecond = math.inf
    open_s: Seconds = 0.0
    operations_per_s: PerSecond = math.inf
    request_nbytes: Annotated[Nbytes, Field(ge=1)] = 1024**2  # the largest `rsize` that Linux negotiates
    client_requests: Annotated[Count | None, Field(exclude_if=lambda count: count is None)] = None
    batch_s: Annotated[Seconds, Field(exclude_if=lambda seconds: not seconds)] = 0.0
    source: str = ""

    def requests(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how many requests each file of a data set takes, given its bytes."""
        return np.asarray(np.ceil(nbytes / self.request_nbytes))

    def latencies_s(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds that a reader waits for each file of a data set besides the transfer of its bytes."""
        return self.open_s + self.requests(nbytes) * self.latency_s

    def kind_in_files(self) -> str | None:
        """Return the `kind` by which a scenario finds the class of a user again; None for this one."""
        return written_kind(type(self), STORAGES) if kind_of(type(self)) else None

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each setting without effect."""
        if uses.source == "storage" and not uses.has_data:
            of_files = {"open_s": "open", "operations_per_s": "operations_per_s", "request_nbytes": "request_size"}
            of_files |= {"client_requests": "client_requests", "batch_s": "batch"}
            keys = [key for name, key in of_files.items() if name in self.model_fields_set]
            yield from (f"cluster.storage.{key} {WITHOUT_DATA}" for key in keys)
        if not uses.storage:
            yield f"cluster.storage has no effect: with input.source {uses.source} nothing reads from it"


#: The classes of storage that `kind` may name. None ships: without `kind`, it is `Storage`.
STORAGE_KINDS: OpenKinds[Storage] = OpenKinds("storage", STORAGES, lambda: (Storage,), dict, lambda _: None)


def _choose_storage(value: object, info: ValidationInfo) -> object:
    return validate_by_kind(value, STORAGE_KINDS, info) if isinstance(value, dict) and "kind" in value else value


class Disk(Settings):
    """The local disk of a node, where it keeps files.

    Args:
        read_Bps: Bytes per second read, shared by the ranks of the node.
        write_Bps: Bytes per second written.
        latency_s: Seconds per file.
        operations_per_s: Files per second that are read or written, shared by the ranks of the node. If absent, a disk
            with the latency of a hard disk does 1 / `latency_s`. A faster one does any number.
        capacity_nbytes: Bytes that it keeps at most; unlimited if absent.
        source: Where the numbers are from.
    """

    read_Bps: BytesPerSecond
    write_Bps: BytesPerSecond
    latency_s: Seconds = 0.0
    operations_per_s: Annotated[PerSecond | None, Field(exclude_if=lambda rate: rate is None)] = None
    capacity_nbytes: Nbytes | None = Field(default=None, alias="capacity")
    source: str = ""

    @property
    def files_per_s(self) -> float:
        """Files per second that the node reads or writes at most."""
        if self.operations_per_s is not None:
            return self.operations_per_s
        return 1 / self.latency_s if self.latency_s >= _SEEK_S else math.inf

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence if the disk has no effect."""
        if uses.saves_to != "disk":
            yield from (f"cluster.disk {reason}" for reason in uses.unkept("files"))

    def remarks(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each value that is doubtful if nodes keep files."""
        if self.operations_per_s is None and math.isfinite(self.files_per_s):
            yield (
                f"cluster.disk.latency of {format_seconds(self.latency_s)} is that of a hard disk, which does "
                f"{self.files_per_s:.4g} files per second: write operations_per_s if yours does more"
            )
        yield from _too_small("disk", self.capacity_nbytes, "file", uses.file_nbytes)


class HostMemory(Settings):
    """The memory of a node, where it keeps decoded samples.

    Args:
        bandwidth_Bps: Bytes per second at which samples are copied, shared by the ranks of the node: out of its memory
            for them and for other nodes, and into their batches from other nodes.
        capacity_nbytes: Bytes that it keeps at most; unlimited if absent.
        latency_s: Seconds per request of another node, besides the network's.
        source: Where the numbers are from.
    """

    bandwidth_Bps: BytesPerSecond
    capacity_nbytes: Nbytes | None = Field(default=None, alias="capacity")
    latency_s: Seconds = 0.0
    source: str = ""

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence if the memory has no effect."""
        yield from (f"cluster.memory {reason}" for reason in uses.unkept("samples"))

    def remarks(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each value that is doubtful if nodes keep samples."""
        yield from _too_small("memory", self.capacity_nbytes, "sample", uses.sample_nbytes)


def _too_small(level: str, capacity_nbytes: int | None, what: str, least_nbytes: int) -> Iterator[str]:
    if capacity_nbytes is not None and capacity_nbytes < least_nbytes:
        yield f"cluster.{level} has no effect: its capacity of {format_nbytes(capacity_nbytes)} holds no {what}"


class ClusterHost(SettingsGroup):
    """The CPU cores of a node, and what communication takes of them if ranks move their data themselves, as with gloo.

    Args:
        cores_per_node: CPU cores for decoding samples and for communication, shared by the ranks of a node; unlimited
            if absent.
        shares_cores: Whether all nodes are containers of one machine, and share its `cores_per_node`.
        reduction_Bps: Bytes per second that the process of a rank moves and adds up, if its collectives run on the CPU
            (MPI, gloo): all messages pass it, and buffers are copied at `device.host_bandwidth`; unlimited for GPUs.
        copy_Bps: Bytes per second at which one core passes over a buffer: scales it, adds it up, or copies it.
        collective_s: Seconds of a core that every member of a collective takes besides.
        handover_s: Seconds of a core that every operation takes before it begins: a thread has to wake up. All ranks
            of a machine do so at the same time.
        launches: Seconds of launching an operation, of the process of a rank: see `Workload.launches` for passes.
        source: Where the numbers are from.
    """

    cores_per_node: Count | None = None
    shares_cores: Annotated[bool, Field(exclude_if=lambda shares: not shares)] = False
    reduction_Bps: Annotated[BytesPerSecond, Field(exclude_if=math.isinf)] = math.inf
    copy_Bps: Annotated[BytesPerSecond, Field(exclude_if=math.isinf)] = math.inf
    collective_s: Annotated[Seconds, Field(exclude_if=lambda seconds: not seconds)] = 0.0
    handover_s: Annotated[Seconds, Field(exclude_if=lambda seconds: not seconds)] = 0.0
    launches: Annotated[HostLaunches, Field(exclude_if=lambda launches: launches == HostLaunches())] = HostLaunches()
    source: Annotated[str, Field(exclude_if=lambda text: not text)] = ""

    @property
    def is_charged(self) -> bool:
        """Whether communication takes time of CPU cores. The line of `fabric` is then of ranks with a core each."""
        return math.isfinite(self.copy_Bps) or self.collective_s > 0 or self.handover_s > 0


class Leaf(Settings):
    """The switches that nodes hang below, and their links to the others: leaf and spine, or two sites.

    Args:
        nodes: Consecutive nodes below one leaf switch, or at one site. The last leaf may have fewer.
        uplinks: Links of a leaf to the spine, or to the other site, side by side.
        bandwidth_Bps: Line rate of an uplink per direction.
        efficiency: Share of it that payload reaches.
        latency_s: Seconds that a message between leaves takes besides the latency of `network`.
    """

    nodes: Count
    bandwidth_Bps: BytesPerSecond
    uplinks: Count = 1
    efficiency: Annotated[Fraction, Field(gt=0)] = 1.0
    latency_s: Seconds = 0.0

    @property
    def uplinks_Bps(self) -> float:
        """Bytes per second of all uplinks of a leaf, per direction."""
        return self.uplinks * self.bandwidth_Bps * self.efficiency


class ClusterTopology(SettingsGroup):
    """How GPUs and machines are wired.

    Args:
        mesh: Whether `fabric` is the link to each other GPU of the node, as in an MI300X, and not that to a switch.
        nodes_per_domain: Machines whose GPUs the fabric joins: 18 of 4 GPUs in a GB200 NVL72. Consecutive nodes share a
            domain. Fewer nodes than that are one domain.
        nics_per_node: NICs that the GPUs of a node share evenly.
        rails: Whether each GPU sends over its own share of the NICs, as where the i-th GPUs of all nodes have a switch
            of their own; if not, all NICs of a node carry what one of its GPUs sends.
        leaf: Leaf switches, if the network has them. If not, one switch joins all nodes.
        oversubscription: Sum of the NICs' bandwidth over what the switch carries, 1 or more.
        host_bridge_Bps: Bytes per second and direction of the PCIe host bridge that a node's GPUs hang below, for what
            they send one another and the NIC; unlimited if absent.
    """

    mesh: Annotated[bool, Field(exclude_if=lambda mesh: not mesh)] = False
    nodes_per_domain: Annotated[Count, Field(exclude_if=lambda count: count == 1)] = 1
    nics_per_node: Count = 1
    rails: Annotated[bool, Field(exclude_if=lambda rails: not rails)] = False
    leaf: Annotated[Leaf | None, Field(exclude_if=lambda leaf: leaf is None)] = None
    oversubscription: Annotated[Factor, Field(ge=1)] = 1.0
    host_bridge_Bps: BytesPerSecond = math.inf


class ClusterCollectives(SettingsGroup):
    """The library that performs collectives, and its own time.

    Args:
        library: Whose choice of algorithm `auto` is; `nccl_simple` is NCCL where it has its protocol Simple only.
        nccl_version: Version of NCCL, such as "2.26", where its tuner or its launches make a difference; the newest if
            absent.
        transport: Kind of the network, for the errors of published rows. If absent, it follows from latency and
            rendezvous of `network`. Over `slingshot`, NCCL does not use LL128.
        in_switch_reduction: Whether the switches of the fabric reduce (NVSwitch from Hopper on), and NCCL lets them.
        chunkwise: With gloo, members of a ring begin when they come and end when their own segments are through;
            without, they begin with the last and end together.
        overhead_s: Seconds that a collective takes besides its messages: launch, waking up its members, and the host's
            time per call if the program waits for each result.
        launch_s: Seconds in which the thread of a process that drives all GPUs of a node launches a collective on one
            of them (`all_reduce_perf -g 8`); 0 with a process for each GPU.
    """

    library: Library = "nccl"
    nccl_version: Annotated[
        str | None, Field(pattern=r"^2\.\d{1,2}(\.\d{1,2})?$", exclude_if=lambda version: version is None)
    ] = None
    transport: Annotated[Transport | None, Field(exclude_if=lambda transport: transport is None)] = None
    in_switch_reduction: bool = False
    chunkwise: bool = False
    overhead_s: Seconds = 0.0
    launch_s: Annotated[Seconds, Field(exclude_if=lambda seconds: not seconds)] = 0.0

    @property
    def nccl_release(self) -> tuple[int, int] | None:
        """Major and minor number of NCCL's version, if it is stated."""
        if self.nccl_version is None:
            return None
        major, minor = self.nccl_version.split(".")[:2]
        return int(major), int(minor)


class Cluster(Settings):
    """`nodes` machines with `gpus_per_node` GPUs each; consecutive ranks share a node.

    Args:
        name: For people.
        source: Where the numbers are from.
        nodes: Machines, 1 or more.
        gpus_per_node: GPUs, and so ranks, of a machine.
        fabric: Link of one GPU to the others of its node, or of its domain.
        network: Link of one NIC to the switch.
        topology: How GPUs and machines are wired.
        collectives: The library that performs collectives.
        device: Every GPU.
        slow_devices: GPUs that differ in speed; where several name a rank, their factors multiply.
        storage: The file server, if there is one.
        disk: The local disk of every node, if it is used.
        memory: The memory of every node, if samples are kept there.
        host: The CPU cores of every node.
        uncertain: Ranges of numbers that nobody measured, by path, such as `network.efficiency`.
    """

    name: str = ""
    source: str = ""
    nodes: Count
    gpus_per_node: Count
    fabric: Link = Field(examples=["ideal"])
    network: Link = Field(examples=["ideal"])
    topology: ClusterTopology = ClusterTopology()
    collectives: ClusterCollectives = ClusterCollectives()
    device: Device = Device()
    slow_devices: tuple[DeviceOverride, ...] = ()
    storage: Annotated[SerializeAsAny[Storage] | None, BeforeValidator(_choose_storage)] = None
    disk: Disk | None = None
    memory: HostMemory | None = None
    host: Annotated[ClusterHost, Field(exclude_if=lambda host: host == ClusterHost())] = ClusterHost()
    uncertain: dict[str, Range] = Field(default_factory=dict, exclude_if=lambda ranges: not ranges)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse("Cluster", self._faults())
        check_ranges(self, self.uncertain)
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks: one per GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def likely_transport(self) -> Transport:
        """Kind of the network. Only EFA has a rendezvous in clusters that do not state their transport."""
        if self.collectives.transport is not None:
            return self.collectives.transport
        if self.network.rendezvous_s:
            return "efa"
        return "rdma" if self.network.latency_s < _OF_RDMA_S else "tcp"

    @property
    def n_domains(self) -> int:
        """Number of groups of nodes whose GPUs the fabric joins."""
        return -(-self.nodes // self.topology.nodes_per_domain)

    @property
    def ranks_per_core(self) -> float:
        """How many ranks share a core when all of a machine work, 1 or more."""
        n_ranks = self.world_size if self.host.shares_cores else self.gpus_per_node
        return max(1.0, n_ranks / (self.host.cores_per_node or math.inf))

    def device_speed(self) -> NDArray[np.float64]:
        """Return the factor on the speed of compute of every rank, shape `[world_size]`."""
        speed = np.full(self.world_size, self.device.speed)
        for override in self.slow_devices:
            speed[override.selected(self.world_size, self.gpus_per_node)] *= override.speed
        return speed

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each setting without effect."""
        written = self.model_fields_set
        if "cores_per_node" in self.host.model_fields_set and not self.host.is_charged:
            if not uses.has_data:
                yield f"cluster.host.cores_per_node {WITHOUT_DATA}"
            elif uses.policies and not uses.decodes:
                yield "cluster.host.cores_per_node has no effect: workload.decode is 0"
        parts = {"storage": self.storage, "disk": self.disk, "memory": self.memory}
        for key, part in parts.items():
            if part is not None and key in written:
                yield from part.unused(uses)
        if self.disk and uses.disk:
            yield from self.disk.remarks(uses)
        if self.memory and uses.memory:
            yield from self.memory.remarks(uses)
        if self.storage and self.storage.servers > self.nodes:
            counts = f"{self.storage.servers} for {self.nodes} nodes"
            yield f"cluster.storage.servers: {counts}: each uses one, others idle"
        yield from self._unused_links(uses)
        yield from self._unused_in_collectives()

    def _unused_links(self, uses: Uses) -> Iterator[str]:
        topology = self.topology
        if topology.oversubscription != 1 and not uses.nics:
            reason = f"{uses.one_domain} sends nothing through a switch"
            yield f"cluster.topology.oversubscription has no effect: {reason}"
        if topology.rails and (self.gpus_per_node == 1 or not uses.nics):
            yield "cluster.topology.rails has no effect: the GPUs of a node share no NICs"
        if topology.leaf and self.nodes <= topology.leaf.nodes:
            reason = f"{self.nodes} nodes are below one leaf of {topology.leaf.nodes}"
            yield f"cluster.topology.leaf has no effect: {reason}"
        if topology.nics_per_node > _MOST_NICS * self.gpus_per_node:
            per_gpu = topology.nics_per_node / self.gpus_per_node
            found = f"gives a GPU {per_gpu:g} NICs, more than its PCIe carries: state those that it has"
            yield f"cluster.topology.nics_per_node {found}"

    def _unused_in_collectives(self) -> Iterator[str]:
        library = self.collectives.library
        capability = self.device.compute_capability or 0
        if self.collectives.in_switch_reduction and (library == "gloo" or capability < 9):
            reason = "it is NCCL's with device.compute_capability 9.0 or more"
            yield f"cluster.collectives.in_switch_reduction has no effect: {reason}"
        if self.host.is_charged and library != "gloo":
            yield f"cluster.host is what gloo takes of CPU cores, and is charged though library is {library}"
        if self.collectives.chunkwise and library != "gloo":
            reason = f"it models rings of gloo only, and library is {library}"
            yield f"cluster.collectives.chunkwise has no effect: {reason}"

    @property
    def has_unknown_gpus(self) -> bool:
        """Whether it names GPUs of which nothing is known, so that no interval contains the errors of a prediction."""
        is_known = not self.device.name or self.device.generation is not None
        return not is_known and self.collectives.library != "gloo"

    def _faults(self) -> list[Fault]:
        if self.world_size > MAX_WORLD_SIZE:
            product = f"{self.nodes} nodes x {self.gpus_per_node} GPUs are {self.world_size} ranks"
            return [(("nodes",), f"{product}: at most {MAX_WORLD_SIZE} are supported")]
        of_network = {"gap": self.fabric.gap_s, "ring_step": self.fabric.ring_step_s}
        return [
            *self._domain_faults(),
            *(
                (("fabric", key), f"{key} is that of messages between nodes: write it in network")
                for key, seconds in of_network.items()
                if seconds
            ),
            *self._leaf_faults(),
            *(
                (("slow_devices", i, *path), message)
                for i, override in enumerate(self.slow_devices)
                for path, message in override.range_faults(self.world_size, self.gpus_per_node)
            ),
        ]

    def _leaf_faults(self) -> Iterator[Fault]:
        """Yield what is wrong with the leaf switches."""
        leaf = self.topology.leaf
        if leaf is None:
            return
        if self.topology.oversubscription > 1:
            text = "is that of one switch: with leaf, write uplinks and bandwidth of a leaf instead"
            yield ("topology", "oversubscription"), f"{self.topology.oversubscription:g} {text}"
        if math.isinf(leaf.bandwidth_Bps):
            yield ("topology", "leaf", "bandwidth"), "unlimited uplinks limit nothing: write a rate, or remove leaf"
        if leaf.nodes % self.topology.nodes_per_domain:
            yield (
                ("topology", "leaf", "nodes"),
                f"{leaf.nodes} nodes per leaf cut domains of {self.topology.nodes_per_domain} nodes: write a multiple",
            )

    def _domain_faults(self) -> Iterator[Fault]:
        """Yield what is wrong with the GPUs that the fabric joins."""
        joined = self.topology.nodes_per_domain
        n_gpus = self.gpus_per_node * min(self.nodes, joined)
        if self.device.nccl_capability and self.gpus_per_node > _MAX_GPUS_OF_HOST:
            yield (
                ("gpus_per_node",),
                f"{self.gpus_per_node} GPUs: no machine joins more than {_MAX_GPUS_OF_HOST} by NVLink. A GB200 NVL72 "
                f"is 18 machines of 4 GPUs in one NVLink domain: write {{preset: gb200-nvl72, nodes: 18}} for a rack, "
                f"or gpus_per_node: 4, topology: {{nodes_per_domain: 18}}",
            )
        elif self.topology.mesh and joined > 1:
            yield (("topology", "mesh"), "a mesh of links joins the GPUs of one node: remove mesh, or nodes_per_domain")
        elif self.nodes > joined and self.nodes % joined:
            yield (
                ("nodes",),
                f"{self.nodes} nodes are no whole number of domains of {joined} nodes: write a "
                f"multiple, or at most {joined}",
            )
        elif self.device.nccl_capability and joined > 1 and n_gpus > _MAX_GPUS_OF_DOMAIN:
            yield (
                ("topology", "nodes_per_domain"),
                f"{n_gpus} GPUs in a domain: no times of more than {_MAX_GPUS_OF_DOMAIN} are published: write fewer",
            )
