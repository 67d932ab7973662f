"""NCCL's protocols and algorithms: their times, and the choice between them.

NCCL sends by three protocols. LL sends 4 bytes of data with 4 of flags, LL128 120 bytes with 8. Receivers poll the
flags. Simple sends plain bytes and then signals their arrival, which takes a fence for every slice. When a communicator
is made, NCCL estimates base + hops + size / bandwidth for each algorithm and protocol. The times here are these
estimates, with NCCL's constants:

    us                      LL                LL128              Simple
    ring    base, hops      6.6, 0.6 | 2.7    14, 1.9 | 4.0      8.4, 3.4 | 14        in a node | between nodes
    tree    base, hops      6.8, 0.6 | 5.0    14, 1.25 | 8.5     0, 28 | 50
    ring    of B            1/4, Hopper 1/2   0.92               1
    tree    of B            0.9/3.8 d(S)      0.82 d(S)          0.9 d(S)

LL also has an upper limit, by generation and number of nodes; in trees it is d(S) of that. Hops between nodes are those
of InfiniBand. If the cluster's network takes longer, its latency counts instead. In trees, and in rings with one GPU
per node, it is scaled by the ratio of NCCL's constants.

With LL, NCCL uses one channel for each line of 8 B per thread, of 512 threads, in rings for each rank. In a node a hop
takes 0.6 us per line or the time of its bytes, whichever is longer. The estimate adds up both, and only serves to
choose. Between nodes all channels together carry LL's limit, because its buffers are in the host's memory. A ring of
LL128 sends at least 19,200 B per chunk. Smaller buffers take as long as these, in fewer channels.

A ring of Simple has longer waits for large buffers. Inside a node it waits for both slices of a chunk, once a chunk has
two. Between nodes NCCL multiplies its latency by 1.4 (before Ampere by 1.9). A tree's chains inside a node begin at
another GPU in each channel, so their load is spread evenly. Before all channels flow, the first chunk of LL128 and
Simple goes up and down the tree over one channel, 2 (n - 1) + 2 log2 m hops. NCCL's estimate omits that, so it has no
part in the choice. NCCL halves chunks (32 to 576 kB) until there are enough of them.

NVSwitches since Hopper can reduce (NVLS): every GPU sends and receives S (1 + 1/n) bytes, at 0.85 (Blackwell 0.74) of
the bandwidth of its links. A round carries a chunk of c bytes for each GPU and channel, so S fills b = S / (c n
channels) rounds. Each round passes s = 3 steps: into the buffers, through the switch, out of them. With r seconds for
the bytes of a full round, and b of at least 1:

    8.4 us + (ceil(b) + s - 1) 3.4 us + (b + s - 1) r

c is 16 to 128 KiB, more for larger buffers. Therefore NVLS needs hundreds of MB to come near its plateau. Over several
nodes (NVLS tree) s is 5: the reduced parts also go up and down a double tree, with its hops.

The loss of a protocol is a wait before the bytes flow. Others may send meanwhile. Only flags use the link.

At most a buffer of a channel is under way between two nodes: 4 MiB of Simple, 4.6 MB of LL128, 256 KiB of LL. So its
bytes take a round trip per buffer at least, which counts between sites.

A process sends its messages one after the other, each `gap` of the network, so each of the 2 (n - 1) rounds of a ring
takes a gap at least, and two if a message is longer than an eager one. Each step of a ring of LL128 or Simple also
takes the network's `ring_step`. NCCL knows neither: its choice is that without.
Over Slingshot, cards and GPUs meet at a host bridge, which is too far for LL128.

A cluster that does not state its compute capability has only the double tree, with hops of its links:

    2 (n-1) (alpha_f + c_f) + 2 ceil(log2 m) (alpha_n + c_n) + F / (0.9 e d(S))

    LL128    c_f = 0                             c_n = 0           e = 0.915
    Simple   c_f = 256 KiB / (12 GB/s) = 22 us   c_n = 2 c_f       e = 1

for m nodes of n members and F seconds for the bytes of a perfect pipeline; d(S) is between 0.5 and 1.

Source:
    NCCL, src/graph/tuning.cc: ncclTopoTuneModel and ncclTopoGetAlgoTime at commit 01afd20a77b5 (trees, d), b6475625fbca
    (rings, the limits of Ampere, 1.4-fold) and of NCCL 2.25 (LL of Hopper and Blackwell); nvlsEfficiency in 2.28.
    src/enqueue.cc, getAlgoInfo (channels; threadThresholds are tuning.cc's) and computeCollChunkInfo (chunks of trees
    and NVLS); src/transport/nvls.cc (channels; more than two GPUs); src/transport/net.cc (LL in the host's memory);
    src/include/device.h (NCCL_LL_LINES_PER_THREAD and others, buffers); src/device/all_reduce.h (steps of NVLS,
    minChunkSizeLL128); src/include/collectives.h (slices). S (1 + 1/n): nccl-tests#212. Slingshot:
    HewlettPackard/shs-ccl-docs, nccl_tuning_guide.md (NCCL_NET_GDR_LEVEL=PHB; LL128 needs PXB, tuning.cc).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost.algorithms.double_tree import double_tree
from simdist.cost.algorithms.ring import ring
from simdist.cost.costs import Stage, Transfer
from simdist.cost.routes import Routes
from simdist.cost.topology import Call, Hops, Messages, Topology, slowest_s
from simdist.errors import PlanError
from simdist.plan import AllReduce, op_text
from simdist.scenario.cluster import Cluster

_NcclLibrary: TypeAlias = Literal["nccl", "nccl_simple"]
_NcclAlgorithm: TypeAlias = Literal["ring", "double_tree", "nvls", "auto"]

_TREE_SHARE = 0.9  # tuning.cc: busBw*.9 of every tree
_SMALLEST_NBYTES = 64  # tuning.cc: the factors belong to powers of two from 64 B to 128 MB
_CHUNK_S = 256 * 1024 / 12e9  # tuning.cc: "a 256kB chunk, ~ base lat + 256k/12GB/s (+ as much for the network)"
_RINGS_IN_NODE = 24  # NCCL's log on A100 and H100 behind NVSwitches: "24 coll channels" (nccl-tests#100)
_RINGS_PER_NIC = 2  # the same number on two p4d with 4 NICs: "8 coll channels" (aws-ofi-nccl#65)
_CHANNEL_BPS = {  # tuning.cc: perChMaxTreeLL128Bws and perChMaxTreeBws by generation, of two nodes and of more
    "LL128": {7: (20e9, 20e9), 8: (20e9, 20e9), 9: (36.7e9, 29e9), 10: (31.67e9, 20e9)},
    "Simple": {7: (18.5e9, 10e9), 8: (23.6e9, 17.8e9), 9: (41.4e9, 36e9), 10: (42.8e9, 24e9)},
}
_DOMAIN_CHANNEL_BPS = 40e9  # search.cc, sm100SpeedArrayIntra: the slowest channel of several cards of 400 Gbit/s
_TREE_CHUNKS = {  # (largest, ((n, least), ...)): halved down to least bytes while a channel has under n chunks per hop
    "LL128": (576e3, ((64, 2**17), (16, 2**15))),
    "Simple": (512 * 1024.0, ((8, 2**17), (4, 2**16), (1, 2**15))),
}
_SLICE_NBYTES = 32 * 1024  # smallest slice of Simple: 1/32 of a quarter of its 4 MiB buffer
_BUFFER_NBYTES = {"LL": 256 * 1024, "LL128": 640 * 120 * 8 * 8 * 15 / 16, "Simple": 4 * 1024**2}  # data of a channel
_LINES_NBYTES = 512 * 8  # bytes that the 512 threads of a channel of LL send at once (NCCL_LL_MAX_NTHREADS)
_LEAST_CHUNK_NBYTES = 640 * 60 // 2  # all_reduce.h, minChunkSizeLL128 of 640 threads
_MOST_DOUBLINGS = 36  # to 32 GiB
_TREE_HOP = 5.0 / 2.7  # tuning.cc: hwLat of LL between nodes, tree over ring; for ppn == 1 the tree's applies


@dataclass(frozen=True, slots=True)
class _Protocol:
    """Constants of a protocol: base seconds, seconds per hop, share of the bandwidth, and factor on bytes for flags.

    `d` is a tree's share of the bandwidth by size, for powers of two from 64 B on. `far` is its hop between nodes over
    that of rings.
    """

    base_s: float
    fabric_s: float
    network_s: float
    share: float = 1.0
    wire: float = 1.0
    d: tuple[float, ...] = ()
    far: float = _TREE_HOP

    def d_at(self, nbytes: float) -> float:
        """Return the share of the bandwidth at a size."""
        doublings = math.log2(max(nbytes, _SMALLEST_NBYTES) / _SMALLEST_NBYTES)
        shares = (*self.d, 1.0)  # tuning.cc: no factor for larger sizes
        return float(np.interp(doublings, np.arange(len(shares)), shares))


# fmt: off
_TREES = {  # tuning.cc: baseLat, hwLat, treeCorrectionFactor
    "LL": _Protocol(6.8e-6, 0.6e-6, 5.0e-6, _TREE_SHARE / 3.8, 1.0,
        (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1)),
    "LL128": _Protocol(14e-6, 1.25e-6, 8.5e-6, _TREE_SHARE * 0.915, 1.0,
        (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .5, .6, .6, .7, .7, .8, .9, .9, 1)),
    "Simple": _Protocol(0.0, 28e-6, 50e-6, _TREE_SHARE, 1.0,
        (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .5, .5, .6, .6, .7, .8, .9)),
}
# fmt: on
#: tuning.cc from 2.23 on. A hop between nodes takes as long as in rings.
_SIMPLE_TREE = dataclasses.replace(_TREES["Simple"], base_s=8.4e-6, fabric_s=4e-6, network_s=14e-6, far=1.0)
_RINGS = {
    "LL": _Protocol(6.6e-6, 0.6e-6, 2.7e-6, 1 / 4, 2.0),
    "LL128": _Protocol(14e-6, 1.9e-6, 4.0e-6, 0.92, 1 / 0.92),
    "Simple": _Protocol(8.4e-6, 3.4e-6, 14e-6),
}
_LL_MAX_BPS = {7: 39e9, 8: 87.7e9, 9: 141e9, 10: 282e9}  # in a node, by generation
_LL_MAX_BETWEEN_BPS = {2: 39e9}  # on Intel CPUs
_LL_MAX_FAR_BPS = 20.4e9  # from three nodes on
_NVLS_SHARES = {9: 0.85, 10: 0.74}
_NVLS_CHANNELS = {9: 16, 10: 24}
_NVLS_HEADS = 32  # device.h: NCCL_MAX_NVLS_ARITY
_NVLS_FROM_HOST = 8  # GPUs of a machine with measured bytes of S (1 + 1/n), nccl-tests#212
_NVLS_DOMAIN_WIRE = 6 / 5  # tuning.cc up to 2.27: "ratio *= 5.0/6.0" for NVLS
_FAR_NVLS = (2, 28)  # tuning.cc: up to 2.27, NVLS over more than two nodes has half a card, and loses to trees
_NVLS_CHUNKS = ((64, 2**16), (8, 2**15), (2, 2**14))  # (n, chunk): at most this chunk for buffers under n rounds
_NVLS_TREE_CHUNKS = ((4, 2**16), (1, 2**15))


def nccl_transfer(
    call: Call, cluster: Cluster, library: _NcclLibrary, algorithm: _NcclAlgorithm, capacity_Bps: NDArray[np.float64]
) -> Transfer:
    """Return the transfer of a group by NCCL's fastest protocol and, with `auto`, algorithm.

    Args:
        call: The collective of one group.
        cluster: The machines.
        library: Defines the protocols.
        algorithm: The algorithm, or `auto`.
        capacity_Bps: Capacity of every resource of the topology.

    Raises:
        PlanError: The collective has no such algorithm.
    """

    @cache
    def candidates(nbytes: int) -> list[_Candidate]:
        return list(_candidates(dataclasses.replace(call, nbytes=nbytes), cluster, library, algorithm, capacity_Bps))

    def estimated_s(candidate: _Candidate) -> float:
        return candidate.estimated.alone_s(capacity_Bps)

    network = call.topology.network
    knows_all = not network.ring_step_s and (cluster.device.nccl_capability is None or not network.gap_s)
    if knows_all or call.n_nodes == 1 or not call.nbytes:
        return min(candidates(call.nbytes), key=estimated_s).transfer
    return _chosen_unaware(call.nbytes, candidates, estimated_s, capacity_Bps)


def _chosen_unaware(
    nbytes: int,
    candidates: Callable[[int], "list[_Candidate]"],
    estimated_s: Callable[["_Candidate"], float],
    capacity_Bps: NDArray[np.float64],
) -> Transfer:
    """Return what NCCL chooses, which knows neither gaps between messages nor the cost of a step.

    It may choose a ring where a tree would take less. From some size on it takes the tree. Times just below are cut to
    that of the tree, so that a larger buffer never takes less. Therefore choices change at powers of two only.
    """

    def chosen(nbytes: int, like: int) -> Transfer:
        of_choice = [estimated_s(each) for each in candidates(like)]
        return candidates(nbytes)[of_choice.index(min(of_choice))].transfer

    n_doublings = nbytes.bit_length()
    found = chosen(nbytes, 2 ** (n_doublings - 1))
    larger = (chosen(2**doublings, 2**doublings) for doublings in range(n_doublings, _MOST_DOUBLINGS))
    at_most_s = min((transfer.alone_s(capacity_Bps) for transfer in larger), default=math.inf)
    found_s = found.alone_s(capacity_Bps)
    return found.scaled(at_most_s / found_s) if at_most_s < found_s else found


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A transfer by some algorithm and protocol, and what NCCL estimates it to be."""

    transfer: Transfer
    estimated: Transfer


def _candidates(
    call: Call, cluster: Cluster, library: _NcclLibrary, algorithm: _NcclAlgorithm, capacity_Bps: NDArray[np.float64]
) -> Iterator[_Candidate]:
    """Yield the transfer by each protocol of each algorithm."""
    capability = cluster.device.nccl_capability
    names = _protocols(call, cluster, library)
    has_trees = call.n_nodes > 1 and isinstance(call.op, AllReduce)
    n_nics = _n_nics(call, cluster)
    only_trees = has_trees and _takes_trees_only(call, cluster)
    if algorithm == "ring" or (algorithm == "auto" and not only_trees):
        plain = _Plain.of(call.topology, ring(call))
        if capability is None:
            by_links = plain.stage
            yield _Candidate(Transfer((by_links,)), Transfer((by_links.later(-plain.steps_s),)))
        else:
            for name in names:
                if name == "LL128" and algorithm == "auto" and has_trees and call.n > call.n_nodes:
                    continue  # the tree has less latency, and wins by NCCL's estimate where rings of LL128 would count
                n_rings = _n_channels(cluster, _RINGS_PER_NIC * n_nics)
                by_ring = _by_ring(call, plain, name, int(capability), n_rings, capacity_Bps)
                yield _Candidate(_spaced(plain, by_ring, name, n_rings), by_ring)
    if algorithm == "nvls":
        problem = _lacks_nvls(call, cluster)
        if problem:
            raise PlanError(f"{op_text(call.op)}: {problem}; choose auto")
    if algorithm == "nvls" or (algorithm == "auto" and _takes_nvls(call, cluster)):
        yield _as_estimated(_by_switch(call, min(int(capability or 0), 10), capacity_Bps))
    if algorithm == "double_tree" or (algorithm == "auto" and has_trees):
        plain = _Plain.of(call.topology, double_tree(call))
        for name in names:
            if capability is not None or name != "LL":
                generation = None if capability is None else min(max(int(capability), 7), 10)
                n_gpus = cluster.gpus_per_node * min(cluster.nodes, cluster.topology.nodes_per_domain)
                n_channels = _n_channels(cluster, _RINGS_PER_NIC * min(n_nics, n_gpus))
                protocol = _tree(name, cluster)
                yield _as_estimated(_by_tree(call, plain, name, protocol, generation, n_channels, capacity_Bps))


def _n_nics(call: Call, cluster: Cluster) -> int:
    """Return the cards that a group uses of a node, or of a domain: with rails, those of its GPUs."""
    nodes = min(cluster.nodes, cluster.topology.nodes_per_domain)
    n_nics = cluster.topology.nics_per_node * nodes
    if not cluster.topology.rails:
        return n_nics
    most = max(map(len, call.by_node()))
    return max(1, n_nics * most // (cluster.gpus_per_node * nodes))


def _as_estimated(transfer: Transfer) -> _Candidate:
    return _Candidate(transfer, transfer)


def _protocols(call: Call, cluster: Cluster, library: _NcclLibrary) -> tuple[str, ...]:
    """Return the protocols that NCCL may choose. Over Slingshot, cards are too far from GPUs for LL128."""
    if library == "nccl_simple":
        return ("Simple",)
    is_slingshot = call.n_nodes > 1 and cluster.collectives.transport == "slingshot"
    if is_slingshot and cluster.device.nccl_capability is not None:
        return ("LL", "Simple")
    return ("LL", "LL128", "Simple")


def _tree(name: str, cluster: Cluster) -> _Protocol:
    """Return a protocol of trees. From 2.23 on, NCCL counts no whole chunk for a hop of Simple, see `_SIMPLE_TREE`.

    The published times over 20 domains of 72 GPUs, with 2.26, still take a whole chunk.
    """
    release = cluster.collectives.nccl_release
    is_newer = release is not None and release >= (2, 23)
    return _SIMPLE_TREE if name == "Simple" and is_newer and cluster.topology.nodes_per_domain == 1 else _TREES[name]


def _n_channels(cluster: Cluster, n_channels: int) -> int:
    """Return the channels between nodes; between domains of several nodes, those that the links of one GPU carry."""
    if cluster.topology.nodes_per_domain == 1:
        return n_channels
    link = cluster.fabric
    return max(1, int(min(n_channels, link.bandwidth_Bps * link.efficiency / _DOMAIN_CHANNEL_BPS)))


def _lacks_nvls(call: Call, cluster: Cluster) -> str:
    """Say why the switches cannot reduce a collective; an empty text if they can."""
    if not cluster.collectives.in_switch_reduction or (cluster.device.nccl_capability or 0) < 9:
        return "nvls needs cluster.collectives.in_switch_reduction, and a device.compute_capability of 9.0 or more"
    if min(map(len, call.by_node())) <= 2:
        return "nvls needs three or more GPUs of each node"
    return ""


def _takes_nvls(call: Call, cluster: Cluster) -> bool:
    """Whether NCCL may choose the switches by itself."""
    if not isinstance(call.op, AllReduce) or _lacks_nvls(call, cluster):
        return False
    return not _takes_trees_only(call, cluster)


def _takes_trees_only(call: Call, cluster: Cluster) -> bool:
    """Whether NCCL's tuner takes trees for any size: over more than two domains of several nodes, up to 2.27.

    It counts the same bandwidth for rings, but ten times the latency.
    """
    version = cluster.collectives.nccl_release
    return call.n_nodes > 2 and cluster.topology.nodes_per_domain > 1 and version is not None and version < _FAR_NVLS


@dataclass(frozen=True, slots=True)
class _Plain:
    """Messages, their routes, and their stage over the links as they are. Each protocol has its own hops."""

    topology: Topology
    messages: Messages
    routes: Routes
    stage: Stage

    @classmethod
    def of(cls, topology: Topology, messages: Iterable[Messages]) -> "_Plain":
        (only,) = messages
        return cls(topology, only, topology.routes(only), topology.transfer([only]).stages[0])

    @property
    def steps_s(self) -> float:
        """Seconds of the steps of a ring, see `Topology.steps_s`."""
        return self.topology.steps_s(self.messages)

    def by(self, protocol: "_Protocol", hops: Hops, base: float = 1.0) -> Stage:
        """Return the stage with the base and hops of a protocol.

        Args:
            protocol: The protocol.
            hops: Its hops, see `_hops`.
            base: Factor on its base.
        """
        overhead_s = self.topology.overhead_s + protocol.base_s * base
        latency_s = slowest_s(self.messages, self.routes, hops) + overhead_s
        return Stage(latency_s, self.stage.resources, self.stage.nbytes)


def _spaced(plain: _Plain, transfer: Transfer, name: str, n_channels: int) -> Transfer:
    """Return a ring with what NCCL does not know: `Topology.spaced` and, but of LL, `Topology.steps_s`."""
    (stage,) = transfer.stages
    message_nbytes = float(np.max(plain.messages.nbytes)) / n_channels * (2.0 if name == "LL" else 1.0)
    spaced = plain.topology.spaced(stage, plain.messages, message_nbytes)
    return Transfer((spaced.later(0.0 if name == "LL" else plain.steps_s),))


def _by_ring(
    call: Call, plain: _Plain, name: str, generation: int, n_rings: int, capacity_Bps: NDArray[np.float64]
) -> Transfer:
    protocol = _RINGS[name]
    one_node = call.n_nodes == 1
    at_least_s = 0.0
    chunks_nbytes = float(np.max(plain.messages.nbytes))  # of all channels, per hop
    n_channels = _RINGS_IN_NODE if one_node else n_rings
    longer = 1.0
    lines = 0
    if name == "LL":
        if generation >= 9:
            protocol = dataclasses.replace(protocol, share=1 / 2)
        newest = min(max(generation, 7), 10)
        most_Bps = _LL_MAX_BPS[newest] if one_node else _ll_most_Bps(call, n_channels, call.n)
        at_least_s = chunks_nbytes * plain.messages.rounds / most_Bps
        lines = math.ceil(chunks_nbytes / (n_channels * _LINES_NBYTES)) if one_node else 0
    elif name == "LL128" and chunks_nbytes:
        flow_s = plain.stage.alone_s(capacity_Bps) - plain.stage.latency_s
        at_least_s = flow_s / protocol.share * n_channels * _LEAST_CHUNK_NBYTES / chunks_nbytes
    elif name == "Simple" and one_node:
        longer = 2.0 if call.nbytes > _SLICE_NBYTES * _RINGS_IN_NODE * call.n else 1.0
    elif name == "Simple" and isinstance(call.op, AllReduce) and call.nbytes >= 64 * n_rings * call.n:
        longer = 1.4 if generation >= 8 else 1.9
    if not one_node:
        of_channel = chunks_nbytes * plain.messages.rounds / n_channels
        at_least_s = max(at_least_s, _in_flight_s(call.topology, name, of_channel))
    one_each = _TREE_HOP if call.n_nodes == call.n else 1.0
    message_nbytes = chunks_nbytes * protocol.wire / n_channels
    base = 1.0 if one_node else longer
    stage = plain.by(protocol, _hops(call.topology, protocol, message_nbytes, longer, one_each), base)
    slowed = _slowed(stage, capacity_Bps, protocol.share, protocol.wire, at_least_s)
    if lines:
        hops_s = stage.latency_s - call.topology.overhead_s - protocol.base_s
        flow_s = slowed.alone_s(capacity_Bps) - stage.latency_s
        saved_s = hops_s + flow_s - max(lines * hops_s, flow_s)
        slowed = dataclasses.replace(slowed, latency_s=slowed.latency_s - saved_s)
    return Transfer((slowed,))


def _by_tree(
    call: Call,
    plain: _Plain,
    name: str,
    protocol: _Protocol,
    generation: int | None,
    n_channels: int,
    capacity_Bps: NDArray[np.float64],
) -> Transfer:
    topology = call.topology
    fill_s = 0.0
    if generation is None:
        chunk_s = _CHUNK_S if name == "Simple" else 0.0
        fabric_s = topology.fabric.latency_s + chunk_s
        network_s = topology.network.latency_s + 2 * chunk_s
        protocol = dataclasses.replace(protocol, base_s=0.0, fabric_s=fabric_s, network_s=network_s)
    message_nbytes = call.nbytes / n_channels * (2.0 if name == "LL" else 1.0)
    far = 1.0 if generation is None else protocol.far
    stage = plain.by(protocol, _hops(topology, protocol, message_nbytes, far=far))
    if generation is not None:  # the chains of each channel begin at another GPU
        on_fabric = stage.resources < 2 * topology.world_size
        mean_nbytes = stage.nbytes[on_fabric].mean() if on_fabric.any() else 0.0
        stage = dataclasses.replace(stage, nbytes=np.where(on_fabric, mean_nbytes, stage.nbytes))
        fill_s = _fill_s(call, name, generation, n_channels, stage.alone_s(capacity_Bps) - stage.latency_s)
    d = protocol.d_at(call.nbytes)
    at_least_s = 0.0
    if name == "LL" and call.n_nodes > 1:
        at_least_s = 2 * call.nbytes / (d * _ll_most_Bps(call, n_channels))
    elif generation is not None and call.n_nodes > 1:
        at_least_s = 2 * call.nbytes / (n_channels * _of_nodes(call.n_nodes, _CHANNEL_BPS[name][generation]))
    if generation is not None:
        at_least_s = max(at_least_s, _in_flight_s(topology, name, call.nbytes / n_channels))
    slowed = _slowed(stage, capacity_Bps, protocol.share * d, at_least_s=at_least_s)
    return Transfer((dataclasses.replace(slowed, latency_s=slowed.latency_s + fill_s),))


def _ll_most_Bps(call: Call, n_channels: int, n_chunks: int = 1) -> float:
    """Return the bandwidth of LL between nodes. All channels together have it; a small buffer uses few of them."""
    n_lines = call.nbytes / (_LINES_NBYTES * n_chunks)
    n_taken = min(max(n_lines, 1.0), n_channels)  # a channel with less than a line takes as long as a whole one
    return _LL_MAX_BETWEEN_BPS.get(call.n_nodes, _LL_MAX_FAR_BPS) * n_taken / n_channels


def _in_flight_s(topology: Topology, name: str, nbytes: float) -> float:
    """Return the seconds that the bytes of a channel need at least: a buffer of them is under way at a time.

    The receiver makes room, and the sender learns it, a round trip after it began to fill a buffer.
    """
    return nbytes / _BUFFER_NBYTES[name] * 2 * (topology.network.latency_s + topology.spine_s)


def _of_nodes(n_nodes: int, rates_Bps: tuple[float, float]) -> float:
    """Return the rate of two nodes, or of more."""
    return rates_Bps[0 if n_nodes <= 2 else 1]


def _fill_s(call: Call, name: str, generation: int, n_channels: int, flow_s: float) -> float:
    """Return the seconds to fill the pipeline: the first chunk of each channel goes up and down its tree."""
    if name not in _TREE_CHUNKS:
        return 0.0
    m = call.n_nodes
    n = call.n / m
    depth = math.floor(math.log2(m))
    deep = (1 + depth + n / 10) / n if name == "LL128" else n - 1 + depth
    chunk, halvings = _TREE_CHUNKS[name]  # bytes
    for n_chunks, least in halvings:
        while chunk > least and call.nbytes / (n_channels * chunk) < n_chunks * deep:
            chunk /= 2
    chunk = min(chunk, call.nbytes / n_channels)
    network_s = flow_s * chunk * n_channels / call.nbytes if call.nbytes else 0.0
    fabric_s = chunk / _of_nodes(m, _CHANNEL_BPS[name][generation])
    return 2 * (n - 1) * fabric_s + 2 * math.ceil(math.log2(m)) * network_s


def _by_switch(call: Call, generation: int, capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Price a reduction in the switches and, between nodes, along a double tree."""
    from simdist.cost.algorithms.nvls import nvls

    nodes = call.by_node()
    n = min(map(len, nodes))
    m = len(nodes)
    plain = _Plain.of(call.topology, nvls(call, 1 + 1 / n if n <= _NVLS_FROM_HOST else _NVLS_DOMAIN_WIRE))
    n_heads = min(n, _NVLS_HEADS)
    message_nbytes = call.nbytes / n_heads
    protocol = _RINGS["Simple"]
    stage = plain.by(protocol, _hops(call.topology, protocol, message_nbytes, far=_TREE_HOP))
    n_at_once = n_heads * (32 if m > 1 and generation > 9 else _NVLS_CHANNELS[generation])
    flow_s = stage.alone_s(capacity_Bps) - stage.latency_s
    fabric_s = _fabric_s(stage, call.topology, capacity_Bps) / _NVLS_SHARES[generation]
    rounds_s = _rounds_s(call.nbytes, n_at_once, fabric_s, flow_s, m)
    return Transfer((dataclasses.replace(stage, latency_s=stage.latency_s + rounds_s - flow_s),))


def _fabric_s(stage: Stage, topology: Topology, capacity_Bps: NDArray[np.float64]) -> float:
    """Return the seconds in which the bytes of a stage pass the ports of the GPUs."""
    on_fabric = stage.resources < 2 * topology.world_size
    ports = Stage(0.0, stage.resources[on_fabric], stage.nbytes[on_fabric])
    return ports.alone_s(capacity_Bps) if on_fabric.any() else 0.0


def _rounds_s(nbytes: float, n_at_once: int, fabric_s: float, network_s: float, n_nodes: int) -> float:
    """Return the seconds of all rounds of a reduction in the switches.

    NCCL takes smaller chunks for buffers of few rounds. A buffer just below such a limit has many rounds, each with its
    latency. Its time is at most that of the limit, so that a larger buffer never takes less.

    Args:
        nbytes: Size of the buffer.
        n_at_once: Chunks of a round.
        fabric_s: Seconds of all bytes in the fabric.
        network_s: Seconds of all bytes in the network, or in the fabric without NCCL's loss.
        n_nodes: Number of nodes.
    """
    if not nbytes:
        return 0.0
    n_steps = 3 if n_nodes == 1 else 5
    chunk = 2**17
    at_most_s = math.inf
    for n_rounds, smaller in _NVLS_TREE_CHUNKS if n_nodes > 1 else _NVLS_CHUNKS:
        limit = n_rounds * n_at_once * chunk
        if nbytes < limit and smaller < chunk:
            longer = limit / nbytes
            of_limit_s = _pipeline_s(n_rounds, fabric_s * longer, network_s * longer, n_steps)
            at_most_s = min(at_most_s, of_limit_s)
            chunk = smaller
    return min(at_most_s, _pipeline_s(nbytes / (n_at_once * chunk), fabric_s, network_s, n_steps))


def _pipeline_s(n_rounds: float, fabric_s: float, network_s: float, n_steps: int) -> float:
    """Return the seconds of rounds through all steps: the slower of the GPUs, with a hop in every round, and cards."""
    hop_s = _RINGS["Simple"].fabric_s
    round_s = max(fabric_s, network_s) / max(n_rounds, 1.0)
    return (n_steps - 1) * (hop_s + round_s) + max(fabric_s + math.ceil(n_rounds) * hop_s, network_s)


def _hops(
    topology: Topology, protocol: _Protocol, message_nbytes: float, longer: float = 1.0, far: float = 1.0
) -> Hops:
    """Return the hops of a protocol. Between nodes, slower links keep their own latency; so do measured links.

    Args:
        topology: The links.
        protocol: The protocol.
        message_nbytes: Bytes that a channel sends at once between nodes.
        longer: Factor on all hops.
        far: Factor on the latency of the network.
    """
    fabric_s = protocol.fabric_s * longer
    network = topology.network
    asks_s = network.startup_s(message_nbytes) - network.latency_s
    network_s = max(network.latency_s * far, protocol.network_s) * longer + asks_s
    if topology.fabric.table is not None:
        fabric_s = topology.fabric.latency_s
    if network.table is not None:
        network_s = network.latency_s
    return Hops(fabric_s, network_s, topology.spine_s)


def _slowed(
    stage: Stage, capacity_Bps: NDArray[np.float64], share: float, wire: float = 1.0, at_least_s: float = 0.0
) -> Stage:
    """Return a stage that reaches a share of its bandwidth: `wire` times the bytes flow, and the rest is a wait."""
    flow_s = stage.alone_s(capacity_Bps) - stage.latency_s
    waits_s = max(flow_s * (1 / share - wire), at_least_s - flow_s * wire)
    return dataclasses.replace(stage, latency_s=stage.latency_s + waits_s, nbytes=stage.nbytes * wire)
