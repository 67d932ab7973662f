"""Measure decoding and the levels that samples are read from: storage server, disk, memory, other nodes.

All measurements use the code of a run. So a scenario gets the rates that a reader of this project reaches, including
checksums, locks and Python. Each level is read three times. One thread of one rank reads file by file, which gives the
seconds of each file. Then `n_readers` threads of each rank read, first on one node, then on all nodes, which gives
their total bytes per second. The median time of a file beyond its bytes at that rate is `open` (of storage, including
its latency) or `latency` (of the disk). If one node alone reads as fast as all together, it has shown no limit of its
own.

Each reading of the storage takes other files, as far as the data set has enough. They are dropped from the nodes' page
caches before. Otherwise a mount would be as fast as memory from the second reading on. It is unknown whether the server
itself has cached files. A server that must read from its disks may be slower. Files on the disk were written shortly
before, so they come from the page cache. The cluster's `source` states this.

A request to another node is measured with a sample that the node does not have, because the network accounts for the
bytes of a sample.
"""

import json
import math
import os
import secrets
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from real.data.filecache import FileCache
from real.data.inputs import open_store
from real.data.memory import Geometry, MemoryStore, Want
from real.data.peers import PeerClient, PeerServer
from real.data.sample_index import SampleIndex
from real.data.sources import Decode
from real.data.storages import DataStorage, read_sample
from real.processes.launch import Connection, RankPlace
from real.processes.rendezvous import own_address
from real.recording.timing import now_s
from simdist.cost.topology import LinkCost
from simdist.scenario import Cluster, Disk, HostMemory, Storage

_N_ALONE = 32  # files that one thread reads


@dataclass(frozen=True, slots=True)
class _Readings:
    """The samples that a rank reads in each of the three readings of a level.

    Args:
        alone: Samples for one thread of rank 0; other ranks skip them.
        of_node: Samples for the ranks of the first node; other ranks skip them.
        of_all: Samples for all ranks.
        n_alone: Number of times to read each of `alone`; the fastest time counts.
        said: Notes on the samples.
    """

    alone: tuple[int, ...]
    of_node: tuple[int, ...]
    of_all: tuple[int, ...]
    n_alone: int
    said: str


def fresh_readings(place: RankPlace, n_each: int, n_samples: int) -> _Readings:
    """Return readings without common samples between ranks or between readings, as far as there are enough samples.

    Args:
        place: Place of this rank.
        n_each: Samples of a rank in a reading.
        n_samples: Samples of the data set.
    """
    n_alone = min(_N_ALONE, n_each)
    begin_of_node = n_alone
    begin_of_all = begin_of_node + place.local_world_size * n_each
    n_wanted = begin_of_all + place.world_size * n_each

    def part(begin: int) -> tuple[int, ...]:
        return tuple(number % n_samples for number in range(begin, begin + n_each))

    said = "every file was read once"
    if n_wanted > n_samples:
        said = f"of {n_wanted} reads {n_wanted - n_samples} were of files read before, for the data set has no more"
    return _Readings(
        alone=tuple(range(n_alone)) if place.rank == 0 else (),
        of_node=part(begin_of_node + place.rank * n_each) if place.rank < place.local_world_size else (),
        of_all=part(begin_of_all + place.rank * n_each),
        n_alone=1,
        said=said,
    )


def _same_readings(samples: Sequence[int]) -> _Readings:
    """Return readings of the same samples, for a level that keeps them."""
    mine = tuple(samples)
    return _Readings(mine[:_N_ALONE], mine, mine, n_alone=2, said="every file was read several times")


def drop_cached(storage: DataStorage, index: SampleIndex, samples: Sequence[int]) -> bool:
    """Drop the files of samples from this machine's page cache; return whether this was possible.

    Source: posix_fadvise(2): POSIX_FADV_DONTNEED frees clean pages, so dirty pages are written first.
    """
    folder = storage.local_folder
    if folder is None:
        return False
    try:
        for sample in samples:
            descriptor = os.open(folder / index.names[sample], os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    except OSError:  # not supported by the file system; or no such file, which reading reports better
        return False
    return True


def kernel_caches(storage: DataStorage, dropped: bool) -> str:
    """Describe the role of the nodes' page caches in reads from a storage."""
    if storage.local_folder is None:
        return "read without a page cache of the nodes"
    if dropped:
        return "pages of the files were dropped from the nodes' caches before"
    return "the nodes' page caches may have held the files"


_N_EACH = 64  # minimum files of each rank
_LIMITED = 0.9  # of the rate of all: a single node below this is limited by itself


@dataclass(frozen=True, slots=True)
class Setup:
    """How and from where to read.

    Args:
        index: Index of the data set.
        storage: Storage with its files.
        decode: Function from file to sample.
        shape: Shape of a sample.
        cache: Folder on the disk to measure. Files written there are removed.
        n_readers: Threads of each rank.
    """

    index: SampleIndex
    storage: DataStorage
    decode: Decode
    shape: tuple[int, ...]
    cache: Path
    n_readers: int


@dataclass(frozen=True, slots=True)
class DataRates:
    """Holds the measured rates and times.

    Args:
        storage_Bps: All ranks together.
        client_Bps, disk_read_Bps, disk_write_Bps, memory_Bps: Ranks of a node together.
        open_s, disk_s: Seconds of a file besides its bytes, from storage and from disk.
        request_s: Seconds of a request to another node besides its bytes, if there is one.
        decode_s: CPU seconds of a sample.
        storage_caches: Caches behind the storage.
    """

    storage_Bps: float
    client_Bps: float
    open_s: float
    disk_read_Bps: float
    disk_write_Bps: float
    disk_s: float
    memory_Bps: float
    request_s: float | None
    decode_s: float
    storage_caches: str


def measure_data(connection: Connection, setup: Setup) -> DataRates:
    """Measure all levels; all ranks take part and return the same result.

    Raises:
        RunError: A file cannot be read, or a rank is missing.
    """
    probe = _Probe(connection, setup)
    read = partial(read_sample, setup.storage)
    entries = setup.index
    fresh = fresh_readings(connection.place, len(probe.mine), len(entries))
    drop = partial(drop_cached, setup.storage, setup.index)
    dropped = drop(fresh.of_all)
    file_s, client_Bps, storage_Bps = probe.compare("storage", lambda sample: len(read(entries[sample])), fresh, drop)
    nbytes = setup.index.nbytes[probe.first].astype(np.float64)
    with ExitStack() as stack:
        setup.cache.mkdir(parents=True, exist_ok=True)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="calibrate-", dir=setup.cache))
        cache = FileCache(Path(folder), setup.index)
        contents = {sample: read(entries[sample]) for sample in probe.mine}
        again = _same_readings(probe.mine)
        _, write_Bps, _ = probe.compare("disk, written", lambda sample: _write(cache, sample, contents[sample]), again)
        disk_s, read_Bps, _ = probe.compare("disk, read", lambda sample: len(cache.get(sample) or b""), again)
        decode_s = probe.alone(lambda sample: _decoded(setup, entries[sample].name, contents[sample]), again)
    memory_Bps, request_s = _memory(probe, setup)
    return DataRates(
        storage_Bps=storage_Bps,
        client_Bps=client_Bps,
        open_s=_beyond_s(file_s, nbytes / max(client_Bps, storage_Bps)),
        disk_read_Bps=read_Bps,
        disk_write_Bps=write_Bps,
        disk_s=_beyond_s(disk_s, nbytes / read_Bps),
        memory_Bps=memory_Bps,
        request_s=request_s,
        decode_s=float(decode_s.mean()),
        storage_caches=f"{kernel_caches(setup.storage, dropped)}; {fresh.said}; the server's caches are not known",
    )


def _beyond_s(seconds: NDArray[np.float64], transfer_s: NDArray[np.float64]) -> float:
    """Return the seconds of a file besides its bytes."""
    return max(float(np.median(seconds - transfer_s)), 0.0)


def with_data(cluster: Cluster, rates: DataRates, *, source: str) -> Cluster:
    """Return a cluster with the levels measured on it."""
    is_limited = cluster.nodes > 1 and rates.client_Bps < _LIMITED * rates.storage_Bps
    latency_s = max((rates.request_s or 0.0) - 2 * LinkCost.of(cluster.network).latency_s, 0.0)
    return cluster.model_copy(
        update={
            "storage": Storage(
                latency_s=0.0,  # included in `open_s`
                open_s=rates.open_s,
                bandwidth_Bps=rates.storage_Bps,
                client_bandwidth_Bps=rates.client_Bps if is_limited else np.inf,
                source=f"{source}; {rates.storage_caches}",
            ),
            "disk": Disk(
                latency_s=rates.disk_s,
                read_Bps=rates.disk_read_Bps,
                write_Bps=rates.disk_write_Bps,
                source=f"{source}; files were read shortly after they were written, from the page cache",
            ),
            "memory": HostMemory(bandwidth_Bps=rates.memory_Bps, latency_s=latency_s, source=source),
        }
    )


class _Probe:
    """Reads files with one thread, with the ranks of the first node, and with all ranks.

    Attributes:
        mine: Samples of this rank.
        first: Samples that one thread reads alone.
    """

    def __init__(self, connection: Connection, setup: Setup) -> None:
        here = connection.place
        self.connection = connection
        self._n_readers = setup.n_readers
        n_each = min(max(_N_EACH, 4 * setup.n_readers), len(setup.index) // here.world_size or 1)
        self.mine = [(here.rank * n_each + number) % len(setup.index) for number in range(n_each)]
        self.first = np.arange(min(_N_ALONE, n_each))

    def compare(
        self,
        name: str,
        read: Callable[[int], int],
        readings: _Readings,
        prepare: Callable[[Sequence[int]], object] = lambda _: None,
    ) -> tuple[NDArray[np.float64], float, float]:
        """Return the seconds of each of `first`, and the bytes per second of the first node and of all.

        Args:
            name: Name for errors.
            read: Reads a sample's file and returns its bytes.
            readings: The samples to read.
            prepare: Called with the samples of this rank before each reading.
        """
        prepare(readings.alone)
        file_s = self.alone(read, readings)
        rates_Bps = []
        for samples in (readings.of_node if self.connection.place.node == 0 else (), readings.of_all):
            prepare(samples)
            rates_Bps.append(self._together(name, read, samples))
        return file_s, rates_Bps[0], rates_Bps[1]

    def alone(self, act: Callable[[int], int], readings: _Readings) -> NDArray[np.float64]:
        """Return the seconds that one rank needs to act on each of `first`, the fastest of several times."""
        seconds: list[float] = []
        self.connection.barrier("one rank reads alone")
        if self.connection.place.rank == 0:
            times = [[_seconds(partial(act, each)) for each in readings.alone] for _ in range(readings.n_alone)]
            seconds = [min(each) for each in zip(*times, strict=True)]
        return np.array(json.loads(self.connection.exchange("seconds of files", json.dumps(seconds))[0]))

    def _together(self, name: str, read: Callable[[int], int], samples: Sequence[int]) -> float:
        """Return the total bytes per second of all ranks with samples to read, with all their threads."""
        self.connection.barrier(f"all read from {name}")
        begin_s = now_s()
        nbytes = 0
        if samples:
            with ThreadPoolExecutor(self._n_readers) as threads:
                nbytes = sum(threads.map(read, samples))
        return self.rate_Bps(name, nbytes, now_s() - begin_s)

    def rate_Bps(self, name: str, nbytes: int, seconds: float) -> float:
        """Return the bytes of all ranks divided by the seconds of the slowest."""
        parts = [
            json.loads(part) for part in self.connection.exchange(f"rate of {name}", json.dumps([nbytes, seconds]))
        ]
        took = [part[1] for part in parts if part[0]]
        return float(math.fsum(part[0] for part in parts) / max(took))


def _memory(probe: _Probe, setup: Setup) -> tuple[float, float | None]:
    """Return the bytes per second of a node's memory, and the seconds of a request besides its bytes."""
    connection = probe.connection
    here = probe.connection.place
    nbytes = int(np.prod(setup.shape))
    n_slots = len(probe.mine)
    geometry = Geometry(len(setup.index), n_slots * here.local_world_size, nbytes, here.local_world_size)
    with ExitStack() as stack:
        store = open_store(stack, geometry, here, connection)
        sample_of = np.zeros(nbytes, dtype=np.uint8)
        for sample in probe.mine:
            store.put(sample, sample_of)
        connection.barrier("the stores are full")
        out = np.ones((n_slots, nbytes), dtype=np.uint8)  # written once, so that its pages are allocated
        seconds = _seconds(partial(store.get_many, probe.mine, list(out)))
        node_Bps = probe.rate_Bps("memory", n_slots * nbytes if here.node == 0 else 0, seconds)
        return node_Bps, _request_s(probe, store, geometry)


def _request_s(probe: _Probe, store: MemoryStore, geometry: Geometry) -> float | None:
    """Return the seconds of a request to another node for a sample that it does not have."""
    connection = probe.connection
    here = probe.connection.place
    if here.world_size == here.local_world_size:
        return None
    with ExitStack() as stack:
        key = bytes.fromhex(connection.exchange("token of samples", secrets.token_bytes(32).hex())[0])
        server = stack.enter_context(PeerServer(store, host=own_address(), key=key))
        addresses = connection.exchange("address of samples", server.address)
        seconds = 0.0
        if here.rank == 0:
            other = addresses[here.local_world_size]  # first rank of the second node
            peers = stack.enter_context(PeerClient(key, geometry.sample_nbytes, address_of=lambda _: other))
            out = np.empty(geometry.sample_nbytes, dtype=np.uint8)
            ask = partial(peers.get_many, 1, [Want(probe.mine[0])], [out])
            seconds = statistics.median(_seconds(ask) for _ in range(_N_ALONE))
        answers = connection.exchange("seconds of a request", repr(seconds))
        return float(answers[0])


def _seconds(act: Callable[[], object]) -> float:
    begin_s = now_s()
    act()
    return now_s() - begin_s


def _write(cache: FileCache, sample: int, content: bytes) -> int:
    """Write a file that may already exist."""
    cache.evict(sample)
    return len(cache.fetch(sample, lambda: content, keep=True))


def _decoded(setup: Setup, name: str, content: bytes) -> int:
    out: NDArray[np.uint8] = np.empty(setup.shape, dtype=np.uint8)
    setup.decode(content, out, name)
    return out.nbytes
