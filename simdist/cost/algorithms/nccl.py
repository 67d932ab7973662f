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
    src/device/all_reduce.h (steps of NVLS, minChunkSizeLL128); src/include/collectives.h (slices). S (1 + 1/n):
    nccl-tests#212.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost.algorithms.double_tree import double_tree, parents
from simdist.cost.algorithms.ring import ring
from simdist.cost.costs import Stage, Transfer
from simdist.cost.topology import Call, LinkCost, Messages, Paths, Topology
from simdist.plan import AllReduce
from simdist.scenario.cluster import Cluster

NcclLibrary: TypeAlias = Literal["nccl", "nccl_simple"]
NcclAlgorithm: TypeAlias = Literal["ring", "double_tree", "auto"]

_TREE_SHARE = 0.9  # tuning.cc: busBw*.9 of every tree
_SMALLEST_NBYTES = 64  # tuning.cc: the factors belong to powers of two from 64 B to 128 MB
_CHUNK_S = 256 * 1024 / 12e9  # tuning.cc: "a 256kB chunk, ~ base lat + 256k/12GB/s (+ as much for the network)"
_RINGS_IN_NODE = 24  # NCCL's log on A100 and H100 behind NVSwitches: "24 coll channels" (nccl-tests#100)
_RINGS_PER_NIC = 2  # the same number on two p4d with 4 NICs: "8 coll channels" (aws-ofi-nccl#65)
_CHANNEL_BPS = {  # tuning.cc: perChMaxTreeLL128Bws and perChMaxTreeBws of two nodes, by generation
    "LL128": {7: 20e9, 8: 20e9, 9: 36.7e9, 10: 73.4e9},
    "Simple": {7: 18.5e9, 8: 23.6e9, 9: 41.4e9, 10: 82.8e9},
}
_TREE_CHUNKS = {  # (largest, ((n, least), ...)): halved down to least bytes while a channel has under n chunks per hop
    "LL128": (576e3, ((64, 2**17), (16, 2**15))),
    "Simple": (512 * 1024.0, ((8, 2**17), (4, 2**16), (1, 2**15))),
}
_SLICE_NBYTES = 32 * 1024  # smallest slice of Simple: 1/32 of a quarter of its 4 MiB buffer
_LINES_NBYTES = 512 * 8  # bytes that the 512 threads of a channel of LL send at once (NCCL_LL_MAX_NTHREADS)
_LEAST_CHUNK_NBYTES = 640 * 60 // 2  # all_reduce.h, minChunkSizeLL128 of 640 threads
_TREE_HOP = 5.0 / 2.7  # tuning.cc: hwLat of LL between nodes, tree over ring; for ppn == 1 the tree's applies


@dataclass(frozen=True, slots=True)
class _Protocol:
    """Constants of a protocol: base seconds, seconds per hop, share of the bandwidth, and factor on bytes for flags.

    `d` is a tree's share of the bandwidth by size, for powers of two from 64 B on.
    """

    base_s: float
    fabric_s: float
    network_s: float
    share: float = 1.0
    wire: float = 1.0
    d: tuple[float, ...] = ()

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
_NVLS_CHUNKS = ((64, 2**16), (8, 2**15), (2, 2**14))  # (n, chunk): at most this chunk for buffers under n rounds
_NVLS_TREE_CHUNKS = ((4, 2**16), (1, 2**15))


def nccl_transfer(
    call: Call, cluster: Cluster, library: NcclLibrary, algorithm: NcclAlgorithm, capacity_Bps: NDArray[np.float64]
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
    found = _candidates(call, cluster, library, algorithm, capacity_Bps)
    transfer, saved_s = min(found, key=lambda each: each[0].alone_s(capacity_Bps))
    (stage,) = transfer.stages
    return Transfer((dataclasses.replace(stage, latency_s=stage.latency_s - saved_s),)) if saved_s else transfer


def _candidates(
    call: Call, cluster: Cluster, library: NcclLibrary, algorithm: NcclAlgorithm, capacity_Bps: NDArray[np.float64]
) -> Iterator[tuple[Transfer, float]]:
    """Yield transfers as NCCL estimates them, each with the seconds by which it is faster than that (< 0: slower).

    The choice uses the estimate. Of equal estimates the first wins.
    """
    capability = cluster.device.compute_capability
    names = ("Simple",) if library == "nccl_simple" else ("LL", "LL128", "Simple")
    has_trees = call.n_nodes > 1 and isinstance(call.op, AllReduce)
    if algorithm != "double_tree":
        plain = _Plain.of(call.topology, ring(call))
        if capability is None:
            yield Transfer((plain.stage,)), 0.0
        else:
            for name in names:
                n_rings = _RINGS_PER_NIC * cluster.nics_per_node
                yield _by_ring(call, plain, name, int(capability), n_rings, capacity_Bps)
            has_nvls = isinstance(call.op, AllReduce) and capability >= 9 and min(map(len, call.by_node())) > 2
            if algorithm == "auto" and cluster.in_switch_reduction and has_nvls:
                yield _by_switch(call, min(int(capability), 10), capacity_Bps), 0.0
    if algorithm == "double_tree" or (algorithm == "auto" and has_trees):
        plain = _Plain.of(call.topology, double_tree(call))
        for name in names:
            if capability is not None or name != "LL":
                generation = None if capability is None else min(max(int(capability), 7), 10)
                n_channels = _RINGS_PER_NIC * min(cluster.nics_per_node, cluster.gpus_per_node)
                yield _by_tree(call, plain, name, generation, n_channels, capacity_Bps)


@dataclass(frozen=True, slots=True)
class _Plain:
    """Messages, and their stage over the unchanged links. Each protocol has its own hops."""

    messages: Messages
    stage: Stage

    @classmethod
    def of(cls, topology: Topology, messages: Iterable[Messages]) -> "_Plain":
        (only,) = messages
        return cls(only, topology.transfer([only]).stages[0])

    def by(self, topology: Topology) -> Stage:
        """Return the stage with the hops of another topology."""
        return dataclasses.replace(self.stage, latency_s=topology.latency_s(self.messages))


def _by_ring(
    call: Call, plain: _Plain, name: str, generation: int, n_rings: int, capacity_Bps: NDArray[np.float64]
) -> tuple[Transfer, float]:
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
    one_each = _TREE_HOP if call.n_nodes == call.n else 1.0
    stage = plain.by(_with_hops(call.topology, protocol, longer, 1.0 if one_node else longer, one_each))
    slowed = _slowed(stage, capacity_Bps, protocol.share, protocol.wire, at_least_s)
    hops_s = stage.latency_s - call.topology.overhead_s - protocol.base_s
    flow_s = slowed.alone_s(capacity_Bps) - stage.latency_s
    return Transfer((slowed,)), hops_s + flow_s - max(lines * hops_s, flow_s) if lines else 0.0


def _by_tree(
    call: Call, plain: _Plain, name: str, generation: int | None, n_channels: int, capacity_Bps: NDArray[np.float64]
) -> tuple[Transfer, float]:
    protocol = _TREES[name]
    topology = call.topology
    fill_s = 0.0
    if generation is None:
        chunk_s = _CHUNK_S if name == "Simple" else 0.0
        fabric_s = topology.fabric.latency_s + chunk_s
        network_s = topology.network.latency_s + 2 * chunk_s
        protocol = dataclasses.replace(protocol, base_s=0.0, fabric_s=fabric_s, network_s=network_s)
    stage = plain.by(_with_hops(topology, protocol, far=1.0 if generation is None else _TREE_HOP))
    if generation is not None:  # the chains of each channel begin at another GPU
        on_fabric = stage.resources < 2 * topology.world_size
        mean_nbytes = stage.nbytes[on_fabric].mean() if on_fabric.any() else 0.0
        stage = dataclasses.replace(stage, nbytes=np.where(on_fabric, mean_nbytes, stage.nbytes))
        fill_s = _fill_s(call, name, generation, n_channels, stage.alone_s(capacity_Bps) - stage.latency_s)
    d = protocol.d_at(call.nbytes)
    has_limit = name == "LL" and call.n_nodes > 1
    at_least_s = 2 * call.nbytes / (d * _ll_most_Bps(call, n_channels)) if has_limit else 0.0
    return Transfer((_slowed(stage, capacity_Bps, protocol.share * d, at_least_s=at_least_s),)), -fill_s


def _ll_most_Bps(call: Call, n_channels: int, n_chunks: int = 1) -> float:
    """Return the bandwidth of LL between nodes. All channels together have it; a small buffer uses few of them."""
    n_taken = min(max(math.ceil(call.nbytes / (_LINES_NBYTES * n_chunks)), 1), n_channels)
    return _LL_MAX_BETWEEN_BPS.get(call.n_nodes, _LL_MAX_FAR_BPS) * n_taken / n_channels


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
    return 2 * (n - 1) * chunk / _CHANNEL_BPS[name][generation] + 2 * math.ceil(math.log2(m)) * network_s


def _by_switch(call: Call, generation: int, capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Price a reduction in the switches and, between nodes, along a double tree."""
    nodes = call.by_node()
    n = min(map(len, nodes))
    m = len(nodes)
    nbytes = call.nbytes
    in_node = np.concatenate(nodes), np.concatenate([np.roll(each, -1) for each in nodes])
    heads = np.array([each[0] for each in nodes])
    below = np.concatenate([heads[parent >= 0] for parent in parents(m)])
    above = np.concatenate([heads[parent[parent >= 0]] for parent in parents(m)])
    messages = Messages(
        np.concatenate([in_node[0], below, above]),
        np.concatenate([in_node[1], above, below]),
        np.concatenate([np.full(call.n, nbytes * (1 + 1 / n)), np.full(2 * len(below), nbytes / 2)]),
        latency=Paths(np.array([0]), np.array([2 * math.ceil(math.log2(m))])),
    )
    (stage,) = _with_hops(call.topology, _RINGS["Simple"], far=_TREE_HOP).transfer([messages]).stages
    n_at_once = n * (32 if m > 1 and generation > 9 else _NVLS_CHANNELS[generation])
    chunk = 2**17
    for n_rounds, smaller in _NVLS_TREE_CHUNKS if m > 1 else _NVLS_CHUNKS:
        chunk = min(chunk, smaller) if nbytes < n_rounds * n_at_once * chunk else chunk
    rounds = nbytes / (n_at_once * chunk)
    n_steps = 3 if m == 1 else 5
    slowed = _slowed(stage, capacity_Bps, _NVLS_SHARES[generation])
    round_s = (slowed.alone_s(capacity_Bps) - stage.latency_s) / max(rounds, 1.0)
    steps_s = (math.ceil(rounds) + n_steps - 1) * _RINGS["Simple"].fabric_s + (n_steps - 1) * round_s
    return Transfer((dataclasses.replace(slowed, latency_s=slowed.latency_s + steps_s),))


def _with_hops(
    topology: Topology, protocol: _Protocol, longer: float = 1.0, base: float = 1.0, far: float = 1.0
) -> Topology:
    """Return the topology with a protocol's base and hops. Between nodes, slower links keep their own latency."""
    return dataclasses.replace(
        topology,
        fabric=_with_latency(topology.fabric, protocol.fabric_s * longer),
        network=_with_latency(topology.network, max(topology.network.latency_s * far, protocol.network_s) * longer),
        overhead_s=topology.overhead_s + protocol.base_s * base,
    )


def _with_latency(link: LinkCost, latency_s: float) -> LinkCost:
    return link if link.table is not None else dataclasses.replace(link, latency_s=latency_s)  # a table is measured


def _slowed(
    stage: Stage, capacity_Bps: NDArray[np.float64], share: float, wire: float = 1.0, at_least_s: float = 0.0
) -> Stage:
    """Return a stage that reaches a share of its bandwidth: `wire` times the bytes flow, and the rest is a wait."""
    flow_s = stage.alone_s(capacity_Bps) - stage.latency_s
    waits_s = max(flow_s * (1 / share - wire), at_least_s - flow_s * wire)
    return dataclasses.replace(stage, latency_s=stage.latency_s + waits_s, nbytes=stage.nbytes * wire)
