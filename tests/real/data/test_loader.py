"""Every sample once and right, from where the plan says, or from the next place; whatever fails."""

import errno
import io
import json
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from PIL import Image
from processes import ROOT
from watched_peers import WatchedPeers

from real.data.filecache import FileCache
from real.data.loader import Leaving, Loader, LoaderLimits, WorkerLoader
from real.data.memory import Geometry, MemoryStore
from real.data.peers import PeerServer
from real.data.sample_index import make_index
from real.data.sources import Sources, decode_image, decode_raw
from real.data.storages import DataStorage
from real.processes.rendezvous import RankPlace
from simdist.caching import BatchReads, look_up
from simdist.caching.lookup import DISK, STORAGE
from simdist.errors import RunError
from simdist.plan import Buffer, Dataset, Load, Plan
from simdist.plan.index import Entry
from simdist.plan.lanes import load_by

SHAPE = (1, 4, 25)
NBYTES = 100
N_SAMPLES, BATCH, EPOCHS = 52, 3, 3
WORKERS = 3
POLICIES = {
    "naive": ("storage",),
    "files": ("disk", "storage"),
    "memory": ("memory", "peer", "storage"),
    "datacache": ("memory", "peer", "disk", "storage"),
}
KEEP = {"naive": (), "files": ("disk",), "memory": ("memory",), "datacache": ("disk", "memory")}


def content(sample):
    return np.random.default_rng(sample).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()


INDEX = make_index(
    Entry(f"c{sample % 3}/{sample}.raw", sample % 3, NBYTES, zlib.crc32(content(sample))) for sample in range(N_SAMPLES)
)
BY_NAME = {name: content(sample) for sample, name in enumerate(INDEX.names)}


class Shelf(DataStorage):
    """Holds all files in memory; a test may let it fail."""

    def __init__(self, files=BY_NAME):
        super().__init__("shelf:", None, "", timeout_s=1)
        self.files = dict(files)
        self.reads = []
        self.before = lambda name: None

    def read(self, name):
        self.before(name)
        self.reads.append(name)
        return self.files[name]


@dataclass
class Cluster:
    """Nodes of two ranks, in threads: a store, a disk and a server per node."""

    folder: object
    plan: Plan
    n_slots: int = N_SAMPLES
    storage: Shelf = field(default_factory=Shelf)
    limits: LoaderLimits = field(default_factory=lambda: LoaderLimits(readers=3, decoders=2, wait_s=60, timeout_s=120))
    decode: object = staticmethod(decode_raw)
    with_peers: bool = True

    def __post_init__(self):
        self.stack, self.failed = ExitStack(), threading.Event()
        geometry = Geometry(N_SAMPLES, self.n_slots, NBYTES, self.per_node)
        key = b"key of a test"
        self.loaders, self.caches, self.stores, servers, self.peers = [], [], [], [], []
        for node in range(self.plan.world_size // self.per_node):
            first = MemoryStore(geometry, folder=self.folder)
            self.stores += [first, *(MemoryStore(geometry, path=first.path) for _ in range(self.per_node - 1))]
            self.caches.append(FileCache(self.folder / f"disk{node}", INDEX))
            servers.append(PeerServer(self.stores[-1], host="127.0.0.1", key=key, timeout_s=60))
        self.servers = servers
        addresses = [server.address for server in servers]
        for rank, store in enumerate(self.stores):
            place = RankPlace(rank, self.plan.world_size, rank % self.per_node, self.per_node)
            files = self.caches[place.node]
            self.peers.append(WatchedPeers(key, NBYTES, address_of=addresses.__getitem__, timeout_s=60))
            self.loaders.append(
                Loader(
                    look_up(self.plan),
                    Sources(INDEX, self.storage, self.decode, SHAPE, files),
                    place=place,
                    store=store,
                    failed=self.failed,
                    peers=self.peers[-1] if self.with_peers else None,
                    limits=self.limits,
                )
            )

    @property
    def per_node(self):
        return self.plan.dataset.ranks_per_node

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for group in (self.loaders, self.peers, self.servers, self.stores):
            for each in group:
                each.close()

    def load(self, rank, number):
        """Return what a load brought: samples by their content, labels, counts."""
        out, labels = torch.zeros(BATCH, *SHAPE, dtype=torch.uint8), torch.zeros(BATCH, dtype=torch.int64)
        counts = self.loaders[rank].load(number, out, labels)
        return [bytes(row.numpy().tobytes()) for row in out], labels.tolist(), counts

    def run(self, first=0, until=None):
        """Let all ranks run freely; check every batch, and return how many samples came from where."""
        reads = list(look_up(self.plan))[first:until]
        n_samples = np.zeros((len(reads), self.plan.world_size, 4), np.int64)

        def work(rank):
            n_elsewhere = 0
            for at, batch in enumerate(reads):
                rows, labels, counts = self.load(rank, batch.number)
                wanted = batch.samples[rank].tolist()
                assert rows == [content(sample) for sample in wanted]
                assert labels == [sample % 3 for sample in wanted]
                assert counts.nbytes.tolist() == (counts.n_samples * NBYTES).tolist()
                n_samples[at, rank] = counts.n_samples
                n_elsewhere += counts.n_elsewhere
            return n_elsewhere

        with ThreadPoolExecutor(self.plan.world_size) as pool:
            self.n_elsewhere = sum(pool.map(work, range(self.plan.world_size)))
        assert (n_samples.sum(axis=2) == BATCH).all()
        return n_samples


def planned(plan):
    return np.array([[np.bincount(row, minlength=4) for row in batch.level] for batch in look_up(plan)])


def plan_of(policy="datacache", *, nodes=2, per_node=2, epochs=EPOCHS, **options):
    dataset = Dataset(N_SAMPLES, BATCH, per_node, NBYTES, (NBYTES,), **options)
    n_steps = epochs * dataset.steps_per_epoch(nodes * per_node)
    body = (Load("in", read=POLICIES[policy], keep=KEEP[policy]),)
    buffers = [Buffer("in", BATCH * NBYTES, dtype="uint8", place="host")]
    return Plan.from_steps(
        policy, world_size=nodes * per_node, buffers=buffers, steps=[body] * n_steps, dataset=dataset
    )


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    before = set(threading.enumerate())
    yield
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before
    assert list(tmp_path.glob("memory*/*")) == []


@pytest.mark.parametrize("shuffle", ["global", "node", "none"])
@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_run_freely_read_what_the_plan_says(tmp_path, policy, shuffle):
    plan = plan_of(policy, shuffle=shuffle)
    with Cluster(tmp_path, plan) as cluster:
        assert (cluster.run() == planned(plan)).all()
        assert cluster.n_elsewhere == 0


def test_second_epoch_asks_storage_for_what_was_left_out_before_only(tmp_path):
    plan = plan_of("datacache")
    with Cluster(tmp_path, plan) as cluster:
        cluster.run()
        assert max(cluster.storage.reads.count(name) for name in INDEX.names) <= 2  # once per node


@pytest.mark.parametrize("n_kept", [1, 5, 15])  # a batch of a node is of 6
@pytest.mark.parametrize("policy", ["files", "memory", "datacache"])
def test_caches_that_evict_follow_the_plan_and_hold_what_it_says_when_all_have_closed(tmp_path, policy, n_kept):
    capacity = {"memory_nbytes": n_kept * NBYTES, "disk_nbytes": n_kept * NBYTES}
    plan = plan_of(policy, eviction="lru", shuffle="node", **capacity)
    assert any(batch.evicted_memory or batch.evicted_disk for batch in look_up(plan))
    limits = LoaderLimits(readers=3, decoders=2, wait_s=60, timeout_s=120, grace=3)
    with Cluster(tmp_path, plan, n_slots=N_SAMPLES, limits=limits) as cluster:
        assert (cluster.run() == planned(plan)).all()
        for loader in cluster.loaders:
            loader.close()
        in_memory, on_disk = held_after(plan)
        for node, (store, cache) in enumerate(zip(cluster.stores[::2], cluster.caches, strict=True)):
            assert {sample for sample in range(N_SAMPLES) if sample in store} == in_memory[node]
            assert {sample for sample in range(N_SAMPLES) if sample in cache} == on_disk[node]


def held_after(plan):
    """Return what memories and disks hold when all loads are over, by the plan: sets of samples, by node."""
    nodes = range(plan.world_size // plan.dataset.ranks_per_node)
    memory, disk = ([set() for _ in nodes] for _ in range(2))
    for batch in look_up(plan):
        for held, keeps, evicted in (
            (memory, batch.keeps_memory, batch.evicted_memory),
            (disk, batch.keeps_disk, batch.evicted_disk),
        ):
            for rank, place in np.argwhere(keeps).tolist():
                held[rank // plan.dataset.ranks_per_node].add(int(batch.samples[rank, place]))
            for node, sample in evicted:
                held[node].remove(sample)
    return memory, disk


def test_loader_that_is_closed_before_the_others_have_read_all_leaves_what_they_need(tmp_path):
    plan = plan_of("files", nodes=1, epochs=1, eviction="lru", disk_nbytes=6 * NBYTES)

    def n_files():
        return len(list(tmp_path.glob("disk0/[0-9a-f][0-9a-f]/*")))

    with Cluster(tmp_path, plan) as cluster:
        for number in range(plan.n_steps):
            cluster.load(0, number)
        before = n_files()
        cluster.loaders[0].close()
        assert n_files() == before > 6
        for number in range(plan.n_steps):
            cluster.load(1, number)
        cluster.loaders[1].close()
        assert n_files() == 6


def test_rank_does_not_wait_for_room_that_it_alone_can_make(tmp_path, monkeypatch):
    """Samples that leave with its own last loads leave when it goes on."""
    plan = plan_of("memory", nodes=1, per_node=1, eviction="lru", memory_nbytes=NBYTES)
    with Cluster(tmp_path, plan, n_slots=1, limits=LoaderLimits(grace=3, wait_s=600)) as cluster:
        waits = []
        monkeypatch.setattr(cluster.failed, "wait", lambda timeout_s: not waits.append(timeout_s))
        results = [cluster.load(0, number) for number in range(plan.n_steps)]
        assert sum(counts.n_not_kept for _, _, counts in results) > 0
        assert waits == []


def test_memory_without_room_to_spare_only_costs_time(tmp_path):
    """A fast rank finds it full of what the slow one still needs, waits a moment, and does not keep its samples."""
    plan = plan_of("memory", nodes=1, eviction="lru", memory_nbytes=10 * NBYTES)
    with Cluster(tmp_path, plan, n_slots=10, limits=LoaderLimits(readers=3, wait_s=0.02)) as cluster:
        n_samples = cluster.run()
        assert len(cluster.stores[0]) <= 10
    assert n_samples[:, :, 0].sum() > 0


def test_rank_keeps_its_samples_when_the_other_has_made_room(tmp_path):
    plan = plan_of("memory", nodes=1, eviction="lru", memory_nbytes=6 * NBYTES)
    with (
        Cluster(tmp_path, plan, n_slots=6, limits=LoaderLimits(readers=3, wait_s=60)) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        for rank in (0, 1):
            cluster.load(rank, 0)
        early = pool.submit(cluster.load, 0, 1)
        cluster.load(1, 1)
        assert early.result(timeout=60)[2].n_not_kept == 0
        assert all(sample in cluster.stores[0] for sample in list(look_up(plan))[1].samples.reshape(-1).tolist())


def test_sample_stays_until_the_slow_rank_has_passed(tmp_path):
    plan = plan_of("memory", nodes=1, eviction="lru", memory_nbytes=12 * NBYTES)
    first = next(batch for batch in look_up(plan) if batch.evicted_memory)
    leaving = [sample for _, sample in first.evicted_memory]
    with Cluster(tmp_path, plan, n_slots=40) as cluster:
        store = cluster.stores[0]
        for number in range(first.number):
            for rank in (0, 1):
                cluster.load(rank, number)
        cluster.load(0, first.number)
        assert all(sample in store for sample in leaving)
        cluster.load(1, first.number)
        assert not any(sample in store for sample in leaving)


def test_grace_keeps_samples_for_slow_ranks_of_other_nodes(tmp_path):
    plan = plan_of("memory", nodes=1, per_node=1, eviction="lru", memory_nbytes=12 * NBYTES)
    first = next(batch for batch in look_up(plan) if batch.evicted_memory)
    _, sample = first.evicted_memory[0]
    with Cluster(tmp_path, plan, limits=LoaderLimits(grace=2)) as cluster:
        for number in range(first.number + 2):
            cluster.load(0, number)
        assert sample in cluster.stores[0]
        cluster.load(0, first.number + 2)
        assert sample not in cluster.stores[0]


def reads_of(number, samples, *, places, keeps_memory=False, keeps_disk=False, evicted=((), ())):
    array = np.array(samples)
    where = np.broadcast_to(np.array(places, dtype=np.uint8), array.shape)
    flags = [np.full(array.shape, flag) for flag in (keeps_memory, keeps_disk)]
    return BatchReads(number, 0, array, where, np.full(array.shape, -1), *flags, *evicted)


def test_sample_that_a_fast_rank_brought_back_does_not_leave(tmp_path):
    store = MemoryStore(Geometry(9, 4, NBYTES), folder=tmp_path)
    leaving = Leaving(RankPlace(0, 1, 0, 1))
    data = np.zeros(NBYTES, np.uint8)
    for sample, number in ((1, 0), (2, 6)):
        store.put(sample, data, number=number)
    leaving.note(reads_of(5, [[1, 2]], places=STORAGE, evicted=(((0, 1), (0, 2), (3, 4)), ())))
    leaving.carry_out(5, store, None, store.board)
    assert 1 in store
    leaving.carry_out(6, store, None, store.board)
    assert (1 in store, 2 in store) == (False, True)
    store.close()


def test_file_that_a_fast_rank_brought_back_does_not_leave(tmp_path):
    store = MemoryStore(Geometry(9, 0, NBYTES, 2), folder=tmp_path)
    board, evicted = store.board, []
    board.kept_on_disk[[1, 2]] = 6, 7  # in load 5, and in load 6

    class Disk:
        def evict(self, sample):
            evicted.append(sample)

    for local in (0, 1):
        leaving = Leaving(RankPlace(local, 2, local, 2))
        leaving.note(reads_of(5, [[1, 2]], places=STORAGE, evicted=((), ((0, 1), (0, 2)))))
        leaving.carry_out(6, store, Disk(), board)
    assert evicted == [1]  # once, by the first that comes
    board.keep_on_disk(1, 7)
    leaving = Leaving(RankPlace(0, 2, 0, 2))
    leaving.note(reads_of(9, [[3, 4]], places=STORAGE, evicted=((), ((0, 1),))))
    leaving.carry_out(10, store, Disk(), board)
    assert evicted == [1, 1]  # once more, since it had come back
    store.close()


def test_rank_waits_for_a_sample_that_another_one_is_about_to_bring(tmp_path):
    plan = plan_of("memory", nodes=1)
    per_epoch = plan.dataset.steps_per_epoch(2)
    reads = list(look_up(plan))
    last = reads[per_epoch - 1]
    with Cluster(tmp_path, plan, limits=LoaderLimits(readers=3, wait_s=60)) as cluster:
        for number in range(per_epoch - 1):
            for rank in (0, 1):
                cluster.load(rank, number)
        cluster.load(0, last.number)
        shared = set(last.samples[1].tolist())
        number = next(n for n in range(per_epoch, 2 * per_epoch) if shared & set(reads[n].samples[0].tolist()))
        with ThreadPoolExecutor(1) as pool:
            early = [pool.submit(cluster.load, 0, each) for each in range(per_epoch, number + 1)]
            cluster.load(1, last.number)
            assert all(each.result(timeout=60)[2].n_elsewhere == 0 for each in early)


def test_rank_that_waits_in_vain_reads_for_itself(tmp_path):
    plan = plan_of("memory", nodes=1)
    per_epoch = plan.dataset.steps_per_epoch(2)
    with Cluster(tmp_path, plan, limits=LoaderLimits(readers=3, wait_s=0.01)) as cluster:
        results = [cluster.load(0, number) for number in range(2 * per_epoch)]  # rank 1 does nothing
    reads = list(look_up(plan))
    for (rows, _, _), batch in zip(results, reads, strict=False):
        assert rows == [content(sample) for sample in batch.samples[0].tolist()]
    assert sum(counts.n_elsewhere for _, _, counts in results) > 0
    assert sum(counts.n_samples[STORAGE] for _, _, counts in results[per_epoch:]) > 0


def test_samples_come_from_disk_or_storage_when_a_peer_dies(tmp_path):
    plan = plan_of("memory")
    per_epoch = plan.dataset.steps_per_epoch(4)
    with Cluster(tmp_path, plan) as cluster:
        cluster.run(until=per_epoch)
        for server in cluster.servers:
            server.close()
        n_samples = cluster.run(first=per_epoch)
        expected = planned(plan)[per_epoch:]
        assert n_samples[:, :, 1].sum() == 0
        assert n_samples[:, :, 0].tolist() == expected[:, :, 0].tolist()
        assert cluster.n_elsewhere == expected[:, :, 1].sum() > 0
        assert n_samples[:, :, STORAGE].sum() == expected[:, :, [1, STORAGE]].sum()
        assert all(peers.failures for peers in cluster.peers)


def test_without_peers_every_node_reads_for_itself(tmp_path):
    plan = plan_of("datacache")
    with Cluster(tmp_path, plan, with_peers=False) as cluster:
        assert cluster.run()[:, :, 1].sum() == 0


def test_sample_that_is_missing_in_memory_is_brought_back(tmp_path):
    plan = plan_of("memory", nodes=1)
    per_epoch = plan.dataset.steps_per_epoch(2)
    with Cluster(tmp_path, plan) as cluster:
        cluster.run(until=per_epoch)
        lost = next(s for s in list(look_up(plan))[per_epoch].samples[1].tolist() if s in cluster.stores[0])
        assert cluster.stores[0].evict(lost)
        _, _, counts = cluster.load(1, per_epoch)
        assert counts.n_elsewhere == 1
        assert lost in cluster.stores[0]


@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_damaged_files_are_read_again_and_put_back(tmp_path, damage):
    plan = plan_of("files", nodes=1)
    per_epoch = plan.dataset.steps_per_epoch(2)
    with Cluster(tmp_path, plan) as cluster:
        cluster.run(until=per_epoch)
        files = sorted(path for path in (tmp_path / "disk0").glob("[0-9a-f][0-9a-f]/*"))[:5]
        assert len(files) == 5
        for path in files:
            match damage:
                case "cut":
                    path.write_bytes(path.read_bytes()[:-7])
                case "changed":
                    path.write_bytes(b"x" * NBYTES)
                case "removed":
                    path.unlink()
        cluster.storage.reads.clear()
        cluster.run(first=per_epoch)
        n_new = planned(plan)[per_epoch:, :, STORAGE].sum()
        assert cluster.n_elsewhere == len(cluster.storage.reads) - n_new
        assert 0 < cluster.n_elsewhere <= 2 * 5  # both ranks may find a file damaged at once


def test_disk_that_is_full_only_costs_time(tmp_path, monkeypatch):
    plan = plan_of("files", nodes=1)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("real.data.filecache._write_all", refuse)
    cluster = Cluster(tmp_path, plan)
    with cluster, pytest.warns(RuntimeWarning, match="disk is full"):
        n_samples = cluster.run()
    assert n_samples[:, :, STORAGE].sum() == n_samples.sum()


def test_store_that_is_too_small_only_costs_time(tmp_path):
    plan = plan_of("datacache", nodes=1)
    with Cluster(tmp_path, plan, n_slots=5) as cluster:
        n_samples = cluster.run()
    per_epoch = plan.dataset.steps_per_epoch(2)
    assert n_samples[per_epoch:, :, 0].sum() <= 2 * 5
    assert n_samples[per_epoch:, :, DISK].sum() > 0


def test_storage_that_fails_is_one_error_that_names_the_sample(tmp_path):
    def fail(name):
        raise RunError(f"shelf: {name}: cannot be read; tried for 60 s")

    with Cluster(tmp_path, plan_of("naive")) as cluster:
        cluster.storage.before = fail
        with pytest.raises(RunError, match=r"^load 0 of rank 3: sample (\d+) \((c\d/\1\.raw)\): shelf: \2: cannot"):
            cluster.load(3, 0)


def test_changed_file_on_storage_is_one_error_that_names_the_sample(tmp_path):
    with Cluster(tmp_path, plan_of("datacache", shuffle="none")) as cluster:
        cluster.storage.files[INDEX.names[4]] = b"y" * NBYTES
        with pytest.raises(RunError, match=r"load 0 of rank 0: sample 4 \(c1/4\.raw\): .*has changed on the storage"):
            cluster.load(0, 0)


def test_storage_that_gives_half_a_file_once_is_asked_again(tmp_path):
    with Cluster(tmp_path, plan_of("datacache", shuffle="none")) as cluster:
        whole, name = cluster.storage.files[INDEX.names[4]], INDEX.names[4]
        cluster.storage.files[name] = whole[:50]

        def mend(read):
            if cluster.storage.reads.count(name):
                cluster.storage.files[name] = whole

        cluster.storage.before = mend
        rows, _, _ = cluster.load(0, 0)
        assert whole in rows


def test_decoder_that_fails_is_one_error_that_names_the_sample(tmp_path):
    def decode(data, out, name):
        raise ZeroDivisionError("in a decoder")

    cluster = Cluster(tmp_path, plan_of("naive"), decode=decode)
    with (
        cluster,
        pytest.raises(RunError, match=r"load 0 of rank 1: sample \d+ .*: decoding it failed: ZeroDivisionError: in a"),
    ):
        cluster.load(1, 0)


def test_late_storage_is_one_error_that_counts_and_names(tmp_path):
    go = threading.Event()
    with Cluster(tmp_path, plan_of("naive"), limits=LoaderLimits(readers=2, timeout_s=0.1)) as cluster:
        cluster.storage.before = lambda _: go.wait(60)
        with pytest.raises(
            RunError, match=r"rank 0: 3 samples have not come in 0\.1 s, among .*, planned from storage"
        ):
            cluster.load(0, 0)
        go.set()


def test_run_that_has_failed_elsewhere_ends_a_load(tmp_path):
    go = threading.Event()
    with Cluster(tmp_path, plan_of("naive")) as cluster:
        cluster.storage.before = lambda _: (cluster.failed.set(), go.wait(60))
        with pytest.raises(RunError, match="load 0 of rank 0: the run has failed"):
            cluster.load(0, 0)
        go.set()


def test_loads_go_forward_only_and_end_with_the_plan(tmp_path):
    plan = plan_of("naive", epochs=1)
    with Cluster(tmp_path, plan) as cluster:
        cluster.load(0, 2)
        with pytest.raises(RunError, match="load 2 of rank 0: the next one is 3"):
            cluster.load(0, 2)
        with pytest.raises(RunError, match="load 99 of rank 0: the plan has no such load"):
            cluster.load(0, 99)


def test_ranks_that_begin_in_the_middle_fill_their_caches_again(tmp_path):
    plan = plan_of("memory", nodes=1)
    per_epoch = plan.dataset.steps_per_epoch(2)
    with Cluster(tmp_path, plan) as cluster:
        cluster.run(first=per_epoch)
        assert cluster.n_elsewhere > 0
        assert sum(sample in cluster.stores[0] for sample in range(N_SAMPLES)) >= per_epoch * 2 * BATCH


def test_rank_that_begins_in_the_middle_lets_nobody_wait_for_what_was_before(tmp_path):
    seen = []

    def decode(data, out, name):
        seen.append((cluster.stores[0].board.n_read.tolist(), cluster.stores[0].board.n_kept.tolist()))
        decode_raw(data, out, name)

    with Cluster(tmp_path, plan_of("naive", nodes=1), decode=decode) as cluster:
        cluster.load(1, 5)
    assert seen == [([0, 5], [0, 5])] * BATCH


def test_loader_that_was_closed_says_so(tmp_path):
    with Cluster(tmp_path, plan_of("naive")) as cluster:
        cluster.loaders[0].close()
        with pytest.raises(RunError, match="the loader was closed"):
            cluster.load(0, 0)


def picture(kind="JPEG", size=(640, 480), mode="RGB"):
    ramp = np.linspace(0, 255, size[0])[None, :] * np.ones((size[1], 1))
    image = Image.fromarray(ramp.astype(np.uint8)).convert(mode)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("size", "mode"), [((640, 480), "RGB"), ((480, 640), "L"), ((100, 90), "RGB")])
def test_images_of_any_size_become_samples_whose_centre_is_theirs(kind, size, mode):
    out = np.zeros((3, 64, 96), np.uint8)
    decode_image(picture(kind, size, mode), out, "a")
    left, middle, right = (float(out[:, :, column].mean()) for column in (0, 47, 95))
    assert middle == pytest.approx(127, abs=4)
    assert left + right == pytest.approx(254, abs=4)
    visible = min(size[0], size[1] * 96 / 64) / size[0]  # the share of the ramp that is not cut off
    assert right - left == pytest.approx(255 * visible, rel=0.05)
    assert np.ptp(out, axis=1).max() <= 6  # the ramp goes to the right


def test_grey_samples_have_one_channel():
    out = np.zeros((1, 32, 32), np.uint8)
    decode_image(picture(), out, "a")
    assert out.mean() == pytest.approx(127, abs=3)


def test_large_jpegs_are_decoded_small(monkeypatch):
    sizes, resize = [], Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, *args: sizes.append(self.size) or resize(self, *args))
    decode_image(picture(size=(1600, 1200)), np.zeros((3, 224, 224), np.uint8), "a")
    assert sizes == [(400, 300)]  # a quarter: an eighth would be too small


@pytest.mark.parametrize("data", [b"", b"no image", picture()[:2000], picture("PNG")[:300]])
def test_damaged_image_is_named(data):
    with pytest.raises(RunError, match=rf"dog/7\.jpg: {len(data)} bytes that are no whole image"):
        decode_image(data, np.zeros((3, 32, 32), np.uint8), "dog/7.jpg")


def test_samples_of_images_have_the_channels_of_images():
    with pytest.raises(RunError, match=r"a\.jpg: images become samples of 1 or 3 channels, not of 4"):
        decode_image(picture(), np.zeros((4, 32, 32), np.uint8), "a.jpg")


def test_raw_sample_of_another_size_is_named():
    with pytest.raises(RunError, match=r"a\.raw: 99 bytes, a raw sample of shape \[1, 4, 25\] has 100"):
        decode_raw(b"x" * 99, np.zeros(SHAPE, np.uint8), "a.raw")


@pytest.mark.full
def test_benchmark_tells_machines_what_it_measured():
    command = [sys.executable, ROOT / "benchmarks" / "loader.py", "--quick", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["memory"]["get over memcpy"] > 0
    assert found["loader"]["loader over DataLoader"] > 0
    assert [target["reached"] for target in found["targets"]] == [
        found["memory"]["get over memcpy"],
        found["loader"]["loader over DataLoader"],
    ]


# workers that load whole batches, each in a thread of its own


def plan_of_workers(n_loads):
    dataset = Dataset(N_SAMPLES, BATCH, 1, NBYTES, (NBYTES,), workers=WORKERS)
    loads = [Load(f"batch.{k % WORKERS}", POLICIES["files"], ("disk",), load_by(k % WORKERS)) for k in range(n_loads)]
    buffers = [Buffer(f"batch.{k}", BATCH * NBYTES, "uint8", place="host") for k in range(WORKERS)]
    return Plan.from_steps("w", world_size=1, buffers=buffers, steps=[(load,) for load in loads], dataset=dataset)


@pytest.fixture
def store(tmp_path):
    made = MemoryStore(Geometry(N_SAMPLES, 1, NBYTES, 1), folder=tmp_path)
    yield made
    made.close()


def worker_loader(plan, store, folder, storage):
    limits = LoaderLimits(wait_s=30, timeout_s=60, grace=WORKERS + 1)
    sources = Sources(INDEX, storage, decode_raw, SHAPE, FileCache(folder / "disk", INDEX))
    place = RankPlace(0, 1, 0, 1)
    return WorkerLoader(look_up(plan), sources, place=place, store=store, failed=threading.Event(), limits=limits)


def empty_batch():
    return torch.zeros(BATCH, *SHAPE, dtype=torch.uint8), torch.zeros(BATCH, dtype=torch.int64)


def test_threads_that_load_in_turn_read_each_sample_from_where_the_plan_says(tmp_path, store):
    plan = plan_of_workers(2 * (N_SAMPLES // BATCH))
    reads = list(look_up(plan))
    shelf = Shelf()

    def work(number):
        out, labels = empty_batch()
        return number, (loader.load(number, out, labels), out, labels)

    with worker_loader(plan, store, tmp_path, shelf) as loader, ThreadPoolExecutor(WORKERS) as threads:
        rounds = [range(first, min(first + WORKERS, len(reads))) for first in range(0, len(reads), WORKERS)]
        found = dict(each for numbers in rounds for each in threads.map(work, reversed(numbers)))
    for number, (counts, out, labels) in found.items():
        samples = reads[number].samples[0]
        assert [bytes(row) for row in out.numpy().reshape(BATCH, -1)] == [content(sample) for sample in samples]
        assert labels.tolist() == INDEX.labels[samples].tolist()
        planned = np.bincount(reads[number].level[0], minlength=STORAGE + 1)
        assert (counts.n_samples.tolist(), counts.n_elsewhere) == (planned.tolist(), 0)
    second = sum(counts.n_samples for number, (counts, *_) in found.items() if number >= (N_SAMPLES // BATCH))
    assert second[DISK] == BATCH * (N_SAMPLES // BATCH) - second[STORAGE] > 0
    assert len(shelf.reads) == len(set(shelf.reads))  # what is on the disk is not read again
    assert store.board.n_read[0] == len(reads)


def test_others_see_the_loads_up_to_the_first_that_has_not_ended(tmp_path, store):
    plan = plan_of_workers(6)
    with worker_loader(plan, store, tmp_path, Shelf()) as loader:
        seen = []
        for number in (2, 1, 3, 4):  # a run that resumes: load 0 belongs to the run before
            loader.load(number, *empty_batch())
            seen.append(int(store.board.n_read[0]))
        assert seen == [3, 3, 4, 5]
        with pytest.raises(RunError, match="load 3 of rank 0: it was asked for before"):
            loader.load(3, *empty_batch())


def test_an_error_names_load_and_sample(tmp_path, store):
    shelf = Shelf()

    def away(name):
        raise RunError("the server is away")

    shelf.before = away
    with (
        worker_loader(plan_of_workers(1), store, tmp_path, shelf) as loader,
        pytest.raises(RunError, match=r"load 0 of rank 0: sample \d+ \(c.*\): the server is away"),
    ):
        loader.load(0, *empty_batch())
