"""Cost of reading samples: per load and rank, bytes, operations and work on shared resources.

A rank reads a batch with `readers` threads, which fetch files one after the other. `decoders` threads decode the files
that have arrived. Reading and decoding overlap, so the slowest is the bottleneck:

    max(latency + bytes / share of every resource + last, reading + last, file + decoding)

`latency` is that of a first file, `file` the mean time of a file read alone, and `last` the decoding of a last sample.
Reading `n` files with `r` threads takes ceil(n / r) times the mean file:

    from storage   open + requests * latency + bytes / rate        (+ bytes / write rate, if kept on disk)
    from disk      latency + bytes / rate

A reader has one request to storage in flight, so a rank whose client has fewer slots reads with as many threads. Each
batch takes `batch_s` besides.

Samples of peers come in requests of up to ceil(n / r), each to one node. A request occupies a thread for

    from a peer    2 * network latency + latency + bytes / rate

and decoding `n` samples with `w` threads takes ceil(n / w) * `decode_s`. Files from storage use the node's server, its
operations, the client of the node, its NIC and the switch, which gradients use too. Samples of peers use both nodes'
NICs, and are copied out of one memory and into the other. The ranks of a node share its disk, memory and cores. A file
that is read from the disk or kept there takes one of its operations, which is part of the latency of a file. All
decoding counts on the cores, except the last samples': as many as the rank's share of the cores decodes at once. The
engines decide the sharing.

If a data set has workers, each reads and decodes the samples of a batch one after the other:

    max(latency + bytes / share of every resource, sum over files of (time of the file, alone + decoding))

with one request to storage in flight.

This is a lower bound. It assumes that the threads of a rank never all wait at once for bytes on shared resources.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simdist.caching import BatchReads, look_up, staged_samples
from simdist.caching.lookup import DISK, MEMORY, PEER, STORAGE
from simdist.cost.costs import Stage, Transfer
from simdist.cost.topology import Topology
from simdist.errors import PlanError
from simdist.plan import Plan, StageIn
from simdist.scenario.cluster import Cluster, Disk, HostMemory, Storage
from simdist.scenario.workload import Workload


@dataclass(frozen=True, slots=True)
class _Files:
    """Cost of reading one file from storage.

    Args:
        nbytes: Bytes, `[n_samples]`.
        operations: Operations of the server.
        seconds: Seconds of a reader, alone.
    """

    nbytes: NDArray[np.float64]
    operations: NDArray[np.float64]
    seconds: NDArray[np.float64]


class LoadCosts:
    """Prices the loads of a plan with a data set.

    Args:
        plan: A legal plan.
        cluster: With storage, and with the disk and memory that the loads use.
        workload: Costs of decoding.
        topology: Topology of the cluster.
        capacity_Bps: Capacity of every resource.

    Raises:
        PlanError: The cluster lacks a level that the plan reads.
    """

    def __init__(
        self, plan: Plan, cluster: Cluster, workload: Workload, topology: Topology, capacity_Bps: NDArray[np.float64]
    ) -> None:
        assert plan.dataset is not None
        self._plan = plan
        self._dataset = plan.dataset
        self._topology = topology
        self._decode_s = workload.decode_s
        self._storage, self._disk, self._memory = _levels_of(plan, cluster)
        self._disk_first_s = max(self._disk.latency_s - 1 / self._disk.files_per_s, 0.0)  # besides its operation
        self._node = np.arange(topology.world_size) // topology.ranks_per_node
        self._cores_per_rank = (cluster.host.cores_per_node or math.inf) / topology.ranks_per_node
        self._limits = np.isfinite(capacity_Bps)

    @cached_property
    def _files(self) -> _Files:
        storage = self._storage
        nbytes = np.array(self._dataset.file_nbytes, dtype=np.float64)  # one size for all files, or one each
        rate_Bps = min(self._topology.network.capacity_Bps, storage.bandwidth_Bps, storage.client_bandwidth_Bps)
        operations = storage.requests(nbytes) + 1
        seconds = storage.latencies_s(nbytes) + nbytes / rate_Bps
        return _Files(*(np.broadcast_to(each, self._dataset.n_samples) for each in (nbytes, operations, seconds)))

    @property
    def _peer_request_s(self) -> float:
        return 2 * self._topology.network.latency_s + self._memory.latency_s

    @cached_property
    def _storage_readers(self) -> int:
        """Files that a rank reads from storage at once."""
        slots = self._storage.client_requests
        if slots is None:
            return self._dataset.readers
        return min(self._dataset.readers, max(1, slots // self._topology.ranks_per_node))

    @cached_property
    def _waits_for_slot(self) -> float:
        """How many workers of a rank share a request that may be in flight, 1 or more."""
        slots = self._storage.client_requests
        if slots is None:
            return 1.0
        return max(1.0, self._dataset.workers / max(1, slots // self._topology.ranks_per_node))

    @cached_property
    def _batches(self) -> tuple["_Amounts", ...]:
        return tuple(self._amounts(reads) for reads in look_up(self._plan))

    def transfers(self, number: int) -> tuple[Transfer, ...]:
        """Return one transfer per rank that reads batch `number`."""
        return tuple(self._transfers(self._batches[number], number % self._topology.n_workers))

    def used(self) -> tuple[Transfer, ...]:
        """Return, for every rank, one transfer over all resources that any of its loads uses."""
        n_ranks = self._topology.world_size
        n_nodes = self._topology.n_nodes
        shared = np.zeros((n_ranks, self._resources[0].shape[1]))
        counts = np.zeros(n_ranks * n_nodes, dtype=np.int64)
        for amounts in self._batches:
            np.maximum(shared, amounts.shared, out=shared)
            counts[amounts.peers.pairs] = 1
        pairs = np.flatnonzero(counts)
        peers = _Peers(pairs, np.ones(len(pairs), dtype=np.int64))
        return tuple(self._transfers(_Amounts(np.zeros(n_ranks), np.zeros(n_ranks), shared, peers), 0))

    def staging(self, op: StageIn) -> Iterator[Transfer]:
        """Yield transfers that copy each node's files to its disk; none if the files are already there."""
        topology = self._topology
        storage = self._storage
        for node in range(topology.n_nodes):
            samples = staged_samples(self._dataset, node, topology.n_nodes)
            if self._dataset.warm or not len(samples):
                yield Transfer(())
                continue
            nodes = np.array([node])
            ranks = np.flatnonzero(self._node == node)
            nbytes = self._files.nbytes[samples].sum()
            first_s = storage.open_s + storage.latency_s
            file_s = (self._files.seconds[samples] + self._files.nbytes[samples] / self._disk.write_Bps).mean()
            rounds = math.ceil(len(samples) / (op.group.size * self._storage_readers))
            on_disk = [topology.disk_write(nodes), topology.disk_operations(nodes)]
            resources = [*self._from_storage(nodes), *on_disk, topology.readers(ranks)]
            amounts = np.concatenate(
                [
                    [nbytes, self._files.operations[samples].sum(), *[nbytes] * 4, len(samples)],
                    np.full(len(ranks), max(rounds * file_s - first_s, 0.0)),
                ]
            )
            used = np.concatenate(resources)
            limits = (amounts > 0) & self._limits[used]
            yield Transfer((Stage(first_s, used[limits], amounts[limits]),))

    def _from_storage(self, nodes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the resources between the server and nodes: server, operations, client, NIC, switch."""
        topology = self._topology
        switch = np.full_like(nodes, topology.switch)
        return [
            topology.storage_server(nodes),
            topology.storage_operations(nodes),
            topology.storage_client(nodes),
            topology.nic_in(nodes),
            switch,
        ]

    def _amounts(self, reads: BatchReads) -> "_Amounts":
        """Sum the work of the ranks for a load."""
        files = self._files
        dataset = self._dataset
        disk = self._disk
        is_storage, is_disk, is_peer = (reads.level == level for level in (STORAGE, DISK, PEER))
        nbytes = files.nbytes[reads.samples]
        storage_nbytes, disk_nbytes, kept_nbytes = (
            np.where(chosen, nbytes, 0).sum(axis=1) for chosen in (is_storage, is_disk, reads.keeps_disk)
        )
        operations = np.where(is_storage, files.operations[reads.samples], 0).sum(axis=1)
        disk_s = disk.latency_s + nbytes / disk.read_Bps
        kept_s = np.where(reads.keeps_disk, nbytes, 0) / disk.write_Bps
        from_storage_s = np.where(is_storage, files.seconds[reads.samples], 0.0)
        seconds = from_storage_s + kept_s + np.where(is_disk, disk_s, 0.0)
        n_decoded = (reads.level >= DISK).sum(axis=1)  # each of them is a file
        file_s = seconds.sum(axis=1) / np.maximum(n_decoded, 1)
        peers = self._peers(reads, is_peer)
        n_readers = np.where(is_storage.any(axis=1), self._storage_readers, dataset.readers)
        reading_s = file_s * _rounds(n_decoded, n_readers) + self._peers_s(peers)
        first_s = np.select(
            [is_storage.any(axis=1), is_disk.any(axis=1), is_peer.any(axis=1)],
            [self._storage.open_s + self._storage.latency_s, self._disk_first_s, self._peer_request_s],
        )
        decoding_s = _rounds(n_decoded, dataset.decoders) * self._decode_s
        begins_s = np.where(n_decoded > 0, np.maximum(file_s - first_s, 0.0), 0.0)  # of decoding: with the first file
        last_s = np.where(n_decoded > 0, self._decode_s, 0.0)
        if dataset.workers:
            reading_s = seconds.sum(axis=1) * self._waits_for_slot + n_decoded * self._decode_s
            decoding_s, begins_s, last_s = np.zeros((3, len(n_decoded)))
        peer_nbytes = is_peer.sum(axis=1) * float(dataset.sample_nbytes)
        own_nbytes = (reads.level == MEMORY).sum(axis=1) * float(dataset.sample_nbytes)
        n_at_once = 0.0 if dataset.workers else min(dataset.decoders, self._cores_per_rank)
        n_last = np.minimum(n_decoded, n_at_once)
        columns = [
            storage_nbytes,
            operations,
            storage_nbytes,
            storage_nbytes + peer_nbytes,
            storage_nbytes + peer_nbytes,
            disk_nbytes,
            kept_nbytes,
            (is_disk.astype(np.int64) + reads.keeps_disk).sum(axis=1),
            own_nbytes + peer_nbytes,
            (n_decoded - n_last) * self._decode_s + n_at_once * begins_s,
            np.maximum(reading_s - first_s, 0.0),
            begins_s + np.maximum(decoding_s - last_s, 0.0),
        ]
        return _Amounts(first_s + self._storage.batch_s, last_s, np.stack(columns, axis=1), peers)

    def _peers_s(self, peers: "_Peers") -> NDArray[np.float64]:
        """Return how long each rank's readers need for samples of peers."""
        n_ranks = self._topology.world_size
        ranks = peers.pairs // self._topology.n_nodes
        n_samples = np.bincount(ranks, weights=peers.counts, minlength=n_ranks).astype(np.int64)
        size = np.maximum(_rounds(n_samples, self._dataset.readers), 1)
        n_requests = np.bincount(ranks, weights=-(-peers.counts // size[ranks]), minlength=n_ranks)
        n_threads = np.clip(n_requests, 1, self._dataset.readers)
        sample_s = self._dataset.sample_nbytes / self._topology.network.capacity_Bps
        return np.asarray((n_requests * self._peer_request_s + n_samples * sample_s) / n_threads)

    def _peers(self, reads: BatchReads, is_peer: NDArray[np.bool_]) -> "_Peers":
        """Count the samples that each rank reads from each node's memory."""
        pairs = np.nonzero(is_peer)[0] * self._topology.n_nodes + reads.owner[is_peer]
        return _Peers(*np.unique(pairs, return_counts=True))

    @cached_property
    def _resources(self) -> tuple[NDArray[np.int64], ...]:
        """The resources of the columns of each rank's amounts, one row per rank, for each worker."""
        return tuple(self._resources_of(worker) for worker in range(self._topology.n_workers))

    def _resources_of(self, worker: int) -> NDArray[np.int64]:
        topology = self._topology
        nodes = self._node
        ranks = np.arange(topology.world_size)
        columns = [
            *self._from_storage(nodes),
            topology.disk_read(nodes),
            topology.disk_write(nodes),
            topology.disk_operations(nodes),
            topology.memory(nodes),
            topology.cores(nodes),
            topology.readers(ranks, worker),
            topology.decoders(ranks),
        ]
        return np.stack(columns, axis=1)

    def _transfers(self, amounts: "_Amounts", worker: int) -> Iterator[Transfer]:
        ranks, resources, on_each = self._used(amounts, worker)
        ends = np.cumsum(np.bincount(ranks, minlength=len(amounts.shared))).tolist()
        latencies = zip(amounts.first_s.tolist(), amounts.last_s.tolist(), strict=True)
        for (first_s, last_s), begin, end in zip(latencies, [0, *ends], ends, strict=False):
            stage = Stage(first_s, resources[begin:end], on_each[begin:end])
            pause = Stage(last_s, np.empty(0, dtype=np.int64), np.empty(0))
            yield Transfer((stage, pause) if last_s else (stage,))

    def _used(
        self, amounts: "_Amounts", worker: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return the limiting resources of each rank: ranks, resources, and the amount on each."""
        topology = self._topology
        used_by_ranks = self._resources[worker]
        ranks, columns = np.nonzero((amounts.shared > 0) & self._limits[used_by_ranks])
        peers, owners = np.divmod(amounts.peers.pairs, topology.n_nodes)
        nbytes = amounts.peers.counts.astype(np.float64) * self._dataset.sample_nbytes
        resources = [used_by_ranks[ranks, columns], topology.nic_out(owners), topology.memory(owners)]
        of_all = np.concatenate([ranks, peers, peers])
        used = np.concatenate(resources)
        on_each = np.concatenate([amounts.shared[ranks, columns], nbytes, nbytes])
        order = np.argsort(of_all, kind="stable")
        order = order[self._limits[used[order]]]
        return of_all[order], used[order], on_each[order]


@dataclass(frozen=True, slots=True)
class _Peers:
    """The number of samples that ranks read from other nodes' memories.

    Args:
        pairs: Pairs of a reading rank and a node, as rank * n_nodes + node, ascending.
        counts: Samples of each pair.
    """

    pairs: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Amounts:
    """Work of the ranks for one load.

    Args:
        first_s: Latency of a first file, `[world_size]`.
        last_s: Decoding of a last sample.
        shared: Bytes, operations or seconds on the resources of `LoadCosts._resources`, `[world_size, n_columns]`.
        peers: Samples from the memories of other nodes.
    """

    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    shared: NDArray[np.float64]
    peers: _Peers


def _rounds(n: NDArray[np.int64], n_threads: int | NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-n // n_threads)


def _levels_of(plan: Plan, cluster: Cluster) -> tuple[Storage, Disk, HostMemory]:
    """Return the levels of a cluster. Refuse a plan that needs a level that the cluster lacks."""
    ops = [op for body in plan.bodies for op in body]
    used = {level for op in plan.loads() for level in (*op.read, *op.keep)}
    if any(isinstance(op, StageIn) for op in ops):
        used.add("disk")
    for level, found in {"storage": cluster.storage, "disk": cluster.disk, "memory": cluster.memory}.items():
        if level in used and found is None:
            raise PlanError(f"plan {plan.name} uses {level}; cluster {cluster.name} has none: set cluster.{level}")
    nothing = Storage(latency_s=0.0, bandwidth_Bps=math.inf)
    unused_disk = Disk(read_Bps=math.inf, write_Bps=math.inf)
    unused_memory = HostMemory(bandwidth_Bps=math.inf)
    return cluster.storage or nothing, cluster.disk or unused_disk, cluster.memory or unused_memory
