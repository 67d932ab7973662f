"""One rank's reader of a plan's data set, opened together with those of the other ranks.

The resources of a rank and its node, and their waiting times, follow from the plan.
"""

import hashlib
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from real.buffers.memory import Memory
from real.data.filecache import FileCache, cold_folder, default_folder, folder_of_set, warm_folder
from real.data.loader import Loader, LoaderLimits, WorkerLoader
from real.data.memory import Board, Geometry, MemoryStore, wait_until_all_staged
from real.data.peers import PeerClient, PeerServer, connections_per_peer, most_connections, peer_key
from real.data.sample_index import SampleIndex, check_index
from real.data.sources import Sources, choose_decode, sample_shape
from real.data.storages import open_storage, read_storage_index
from real.data.tallies import Tally
from real.processes.beats import machine, ranks_have
from real.processes.rendezvous import RankPlace, own_address
from real.programs.base import Batch, Feed
from simdist.caching import look_up, on_disk_at_first, staged_samples
from simdist.errors import PlanError, RunError, ScenarioError
from simdist.plan import Dataset, Load, Plan, StageIn

_TOKEN_NBYTES = 32
# A load may take this many times the longest wait for a file, because it reads many files that may each wait.
_LOADS_PER_WAIT = 10


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The data of a run, and the caches of its nodes.

    Args:
        url: URL of the folder with `index.csv`, for `real.data.storages`.
        cache: Folder on the node's disk; None takes a temporary folder of this user.
        cold: Begin with an empty cache, and leave none.
        timeout_s: Time limit for a file, another rank, or the rest of the node.
    """

    url: str
    cache: Path | None
    cold: bool
    timeout_s: float


class _RankExchange(Protocol):
    """Exchanges values with the other ranks."""

    def exchange(self, what: str, value: str) -> list[str]:
        """Return the values of all ranks, by rank."""

    def share_token(self, nbytes: int) -> bytes:
        """Return random bytes that only the ranks know."""


@contextmanager
def open_input(
    plan: Plan, options: DataOptions, *, rank: int, others: _RankExchange, failed: threading.Event, tally: Tally
) -> Iterator["InputReader"]:
    """Open the reader of a rank; all ranks must call this together.

    Args:
        plan: A valid plan with a data set.
        options: The location of the data.
        rank: This rank.
        others: Exchange with all ranks.
        failed: Set when the run has failed, which ends all waits.
        tally: Receives the counts.

    Raises:
        ScenarioError: The data set is not the one of the plan.
        RunError: The data set cannot be reached, the caches cannot be created, or a node has several machines.
    """
    dataset = plan.dataset
    if dataset is None:
        raise ScenarioError(f"plan {plan.name} has no data set to read: give its scenario `data`, or leave the URL out")
    place = RankPlace(rank, plan.world_size, rank % dataset.ranks_per_node, dataset.ranks_per_node)
    with ExitStack() as stack:
        storage = open_storage(options.url, timeout_s=options.timeout_s, stop=failed)
        index = read_storage_index(storage)
        check_index(index, dataset, options.url)
        shape = sample_shape(dataset.sample_nbytes)
        decode = choose_decode(index, shape, options.url)
        run, token = _meet(others, place, index)
        files = _file_cache(stack, plan, dataset, options, index, run, place) if _uses_disk(plan) else None
        key = peer_key(token, f"{_digest(index)} {shape}".encode())
        store, peers = _open_memories(stack, plan, dataset, place, others, key)
        sources = Sources(index, storage, decode, shape, files)
        limits = LoaderLimits(
            readers=dataset.readers,
            decoders=dataset.decoders,
            wait_s=options.timeout_s,
            timeout_s=_LOADS_PER_WAIT * options.timeout_s,
            grace=n_ahead(plan) + 1,  # ranks of other nodes may have loaded fewer batches ahead
        )
        loader: Loader | WorkerLoader
        if dataset.workers:
            loader = WorkerLoader(look_up(plan), sources, place=place, store=store, failed=failed, limits=limits)
        else:
            loader = Loader(look_up(plan), sources, place=place, store=store, peers=peers, failed=failed, limits=limits)
        stack.enter_context(loader)
        yield InputReader(plan, dataset, options, place, sources, loader, store.board, failed, tally)


@final
@dataclass(frozen=True, slots=True)
class InputReader:
    """Reads the data of one rank; made by `open_input`."""

    plan: Plan
    dataset: Dataset
    options: DataOptions
    place: RankPlace
    sources: Sources
    loader: Loader | WorkerLoader
    board: Board
    failed: threading.Event
    tally: Tally

    def fill(self, number: int, out: Tensor, labels: Tensor) -> None:
        """Read a batch.

        Args:
            number: Number of the load, greater than the one before; with workers, in any order.
            out: uint8 `[batch_size, *shape]`, contiguous, in host memory.
            labels: int64 `[batch_size]`.

        Raises:
            RunError: A sample cannot be read. The error names it.
        """
        try:
            self.tally.note(number, self.loader.load(number, out, labels))
        except RunError as error:
            raise RunError(f"{self.plan.name}: {error}") from error

    def stage_in(self) -> None:
        """Bring this rank's share of the node's files to its disk, and wait for the other ranks of the node.

        Raises:
            RunError: A file cannot be read (the error names it), or a rank of the node is missing.
        """
        place = self.place
        dataset = self.dataset
        n_nodes = self.plan.world_size // place.local_world_size
        share = staged_samples(dataset, place.node, n_nodes)[place.local_rank :: place.local_world_size]
        with ThreadPoolExecutor(dataset.readers, thread_name_prefix="stage") as threads:
            for _ in threads.map(self._stage, share.tolist()):
                if self.failed.is_set():
                    break
        try:
            wait_until_all_staged(
                self.board,
                place.local_rank,
                first_rank=place.rank - place.local_rank,
                timeout_s=_LOADS_PER_WAIT * self.options.timeout_s,
                stop=self.failed,
            )
        except RunError as error:
            raise RunError(f"{self.plan.name}: stage-in of node {place.node}: {error}") from error

    def _stage(self, sample: int) -> None:
        files = self.sources.files
        if self.failed.is_set() or (files is not None and sample in files):
            return
        try:
            self.sources.read(sample, keep=True)
        except RunError as error:
            name = self.sources.index.names[sample]
            raise RunError(
                f"{self.plan.name}: stage-in by rank {self.place.rank}: sample {sample} ({name}): {error}"
            ) from error


def _open_memories(
    stack: ExitStack, plan: Plan, dataset: Dataset, place: RankPlace, others: _RankExchange, key: bytes
) -> tuple[MemoryStore, PeerClient | None]:
    """Open the memory of this node and the connections to those of others."""
    n_slots = most_kept(plan, dataset, place.node)
    sample_nbytes = dataset.sample_nbytes
    per_node = dataset.ranks_per_node
    if n_slots and dataset.eviction != "none":
        # samples of the loads of its `grace` may still be present although they have left by plan
        n_slots += (2 * n_ahead(plan) + 3) * dataset.batch_size * per_node
    geometry = Geometry(dataset.n_samples, min(n_slots, dataset.n_samples), sample_nbytes, per_node)
    store = open_store(stack, geometry, place, others)
    address = ""
    with_peers = per_node < plan.world_size and any("peer" in op.read for op in set(plan.loads()))
    if place.local_rank == 0 and with_peers:
        server = PeerServer(store, host=own_address(), key=key, most_connections=most_connections())
        address = stack.enter_context(server).address
    addresses = others.exchange("where samples are served", address)
    if not with_peers:
        return store, None
    peers = PeerClient(
        key,
        sample_nbytes,
        address_of=lambda node: addresses[node * per_node],
        n_connections=connections_per_peer(dataset.readers, n_clients=plan.world_size - per_node),
    )
    return store, stack.enter_context(peers)


def open_store(stack: ExitStack, geometry: Geometry, place: RankPlace, others: _RankExchange) -> MemoryStore:
    """Open the memory of this node, which its first rank makes; all ranks call this together, then exchange values."""
    store = MemoryStore(geometry) if place.local_rank == 0 else None
    paths = others.exchange("where memory is", "" if store is None else store.path)
    if store is None:
        store = MemoryStore(geometry, path=paths[place.rank - place.local_rank])
    stack.callback(store.close)
    return store


def _meet(others: _RankExchange, place: RankPlace, index: SampleIndex) -> tuple[str, bytes]:
    """Return a unique name for this run, and a token that only its ranks know.

    It also checks that all ranks read the same data set, and that each node is one machine.
    """
    mine = {"machine": machine(), "host": socket.gethostname(), "set": _digest(index), "run": secrets.token_hex(4)}
    ranks = [json.loads(text) for text in others.exchange("the data set", json.dumps(mine))]
    strays = [rank for rank, each in enumerate(ranks) if each["set"] != ranks[0]["set"]]
    if strays:
        raise RunError(f"{ranks_have(strays)} read another index than rank 0: give all ranks the same data set")
    first = place.rank - place.local_rank
    apart = [rank for rank in range(first, first + place.local_world_size) if ranks[rank]["machine"] != mine["machine"]]
    if apart:
        raise RunError(
            f"rank {apart[0]} is on {ranks[apart[0]]['host']}, rank {place.rank} on {mine['host']}, and in the plan "
            f"they share node {place.node}: start {place.local_world_size} ranks on each machine"
        )
    return str(ranks[0]["run"]), others.share_token(_TOKEN_NBYTES)


def _digest(index: SampleIndex) -> str:
    """Return the SHA-256 of an index, including names and labels, so that no rank trains on other ones."""
    columns = [index.labels.tobytes(), index.nbytes.tobytes(), index.crc32.tobytes()]
    return hashlib.sha256(b"\0".join([*(name.encode() for name in index.names), *columns])).hexdigest()


def _file_cache(
    stack: ExitStack, plan: Plan, dataset: Dataset, options: DataOptions, index: SampleIndex, run: str, place: RankPlace
) -> FileCache:
    """Open the cache of this node. With eviction, files leave as planned, but a little later.

    On a disk with a limit, a warm run finds at most the planned files of earlier runs. A run that resumes after a crash
    (not cold, although its plan begins cold) finds the files that it will keep, or nothing if these will be evicted.
    """
    folder = folder_of_set(options.cache or default_folder(), index)
    if options.cold:
        return FileCache(stack.enter_context(cold_folder(folder, run, place.node)), index)
    files = FileCache(warm_folder(folder, place.node), index)
    if dataset.disk_nbytes is not None and place.local_rank == 0:
        stays = dataset.warm or dataset.eviction == "none"
        warm = replace(plan, dataset=replace(dataset, warm=True))
        files.keep_only(on_disk_at_first(warm, place.node).tolist() if stays else ())
    return files


def n_ahead(plan: Plan) -> int:
    """Return the number of batches that a rank may have loaded before it computes with the first."""
    return len({op.dst for body in plan.bodies for op in body if isinstance(op, Load)})


def _uses_disk(plan: Plan) -> bool:
    """Tell whether a plan reads or keeps files on disks."""
    ops = {op for body in plan.bodies for op in body if isinstance(op, Load | StageIn)}
    return any(isinstance(op, StageIn) or "disk" in (*op.read, *op.keep) for op in ops)


def most_kept(plan: Plan, dataset: Dataset, node: int) -> int:
    """Return the largest number of samples in a node's memory, by the plan."""
    if not any("memory" in op.keep for op in set(plan.loads())):
        return 0
    mine = slice(node * dataset.ranks_per_node, (node + 1) * dataset.ranks_per_node)
    held = most = 0
    for batch in look_up(plan):
        held += int(batch.keeps_memory[mine].sum())
        held -= sum(owner == node for owner, _ in batch.evicted_memory)
        most = max(most, held)
    return most


def batch_buffers(plan: Plan) -> set[str]:
    """Return the names of the buffers for loaded batches."""
    return {op.dst for body in plan.bodies for op in body if isinstance(op, Load)}


@final
class BatchFeed(Feed):
    """Loads batches into the buffers of a plan.

    Args:
        plan: The executed plan.
        source: Source of the samples.
        memory: Memory with the buffers for loaded batches, pinned if there is a GPU.

    Raises:
        PlanError: A buffer has another size.
    """

    def __init__(self, plan: Plan, source: InputReader, memory: Memory) -> None:
        self._source = source
        self._loaded: dict[str, Batch] = {}
        shape = source.dataset.batch_size, *source.sources.shape
        for name in batch_buffers(plan):
            buffer = memory.dense(name)
            if buffer.dtype != torch.uint8 or buffer.shape != (torch.Size(shape).numel(),):
                raise PlanError(
                    f"plan {plan.name}: buffer {name} is {buffer.dtype} {list(buffer.shape)}; a batch is uint8 "
                    f"{list(shape)}: set workload.sample_size to the bytes of a decoded sample"
                )
            labels = torch.zeros(source.dataset.batch_size, dtype=torch.int64, pin_memory=buffer.is_pinned())
            self._loaded[name] = buffer.view(shape), labels

    def load(self, op: Load, number: int) -> None:
        """Read batch `number` into its buffer."""
        self._source.fill(number, *self._loaded[op.dst])

    def stage_in(self, op: StageIn) -> None:
        """Bring the node's files to its disk."""
        self._source.stage_in()

    def batch(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the batch in a buffer."""
        return self._loaded[name]
