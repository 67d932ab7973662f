"""The order of samples, and which level every read finds them on: what simulator and real readers both rely on."""

import dataclasses
import math
import tracemalloc

import numpy as np
import pytest
from data_sets import data_plans, data_sets, loads_plan
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from simdist.caching import BatchReads, epoch_order, look_up, node_part, on_disk_at_first, staged_samples
from simdist.caching.lookup import that_fit
from simdist.plan import LEVELS, Dataset, Plan, StageIn

MEMORY, PEER, DISK, STORAGE = range(len(LEVELS))
SMALL = Dataset(n_samples=24, batch_size=2, ranks_per_node=2, sample_nbytes=10, file_nbytes=(4,))  # 3 steps of 4 ranks

GOLDEN_GLOBAL = [[3, 2, 1, 8, 6, 0, 7, 4, 5, 9], [7, 4, 5, 1, 9, 8, 6, 2, 0, 3]]
GOLDEN_NODES = [[3, 4, 0, 2, 1], [6, 7, 9, 5, 8]]
GOLDEN_HUGE_SEED = [9, 0, 3, 1, 4, 6, 8, 7, 5, 2]


def hits_by_epoch(plan: Plan) -> list[list[int]]:
    """Return how many samples are read on each level, `[n_epochs][n_levels]`."""
    counts: dict[int, np.ndarray] = {}
    for reads in look_up(plan):
        counts.setdefault(reads.epoch, np.zeros(len(LEVELS), dtype=int))
        counts[reads.epoch] += np.bincount(reads.level.ravel(), minlength=len(LEVELS))
    return [count.tolist() for count in counts.values()]


# ---------------------------------------------------------------- the order


@given(data_sets())
def test_epoch_reads_every_sample_at_most_once_and_leaves_out_less_than_a_step(drawn: tuple[Dataset, int]) -> None:
    dataset, world_size = drawn
    for epoch in range(3):
        order = epoch_order(dataset, epoch, world_size)
        assert order.shape == (dataset.steps_per_epoch(world_size), world_size, dataset.batch_size)
        assert len(np.unique(order)) == order.size
        assert 0 <= order.min() <= order.max() < dataset.n_samples
        assert dataset.n_samples - order.size < world_size * dataset.batch_size


@given(data_sets())
def test_ranks_of_a_node_read_its_part_only_if_shuffled_within_nodes(drawn: tuple[Dataset, int]) -> None:
    dataset, world_size = drawn
    n_nodes = world_size // dataset.ranks_per_node
    order = epoch_order(dataclasses.replace(dataset, shuffle="node"), 1, world_size)
    parts = [node_part(dataclasses.replace(dataset, shuffle="node"), node, n_nodes) for node in range(n_nodes)]
    by_node = order.reshape(len(order), n_nodes, -1)
    assert all(np.isin(by_node[:, node], parts[node]).all() for node in range(n_nodes))
    assert len(np.unique(np.concatenate(parts))) == n_nodes * len(parts[0])


def test_order_is_the_same_for_ever() -> None:
    """Golden numbers: numpy promises the raw numbers of PCG64, so a run can be repeated with any release."""
    ten = Dataset(n_samples=10, batch_size=1, ranks_per_node=1, sample_nbytes=1, file_nbytes=(1,))
    assert [epoch_order(ten, epoch, 1).ravel().tolist() for epoch in (0, 1)] == GOLDEN_GLOBAL
    halves = dataclasses.replace(ten, shuffle="node", seed=7)
    assert epoch_order(halves, 0, 2)[:, :, 0].T.tolist() == GOLDEN_NODES
    huge = dataclasses.replace(ten, seed=2**63 - 1)
    assert epoch_order(huge, 0, 1).ravel().tolist() == GOLDEN_HUGE_SEED


@pytest.mark.parametrize("shuffle", ["global", "node"])
def test_epochs_and_seeds_differ_and_repeat(shuffle: str) -> None:
    dataset = dataclasses.replace(SMALL, shuffle=shuffle)
    orders = [epoch_order(dataclasses.replace(dataset, seed=seed), epoch, 4) for seed in (0, 1) for epoch in range(3)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert (epoch_order(dataset, 2, 4) == orders[2]).all()


def test_unshuffled_epochs_are_equal() -> None:
    dataset = dataclasses.replace(SMALL, shuffle="none")
    assert (epoch_order(dataset, 5, 4) == epoch_order(dataset, 0, 4)).all()


@given(data_sets(), st.integers(1, 4))
def test_first_steps_of_an_epoch_are_those_of_the_whole(drawn: tuple[Dataset, int], n_steps: int) -> None:
    dataset, world_size = drawn
    order = epoch_order(dataset, 2, world_size)
    assert (epoch_order(dataset, 2, world_size, n_steps=min(n_steps, len(order))) == order[:n_steps]).all()


@pytest.mark.parametrize("n_samples", [2**20 - 1, 2**20 + 1, 3_000_000])
@pytest.mark.parametrize("n_steps", [1, 500, None])
def test_order_is_that_of_random_keys_however_many_are_held_at_once(n_samples: int, n_steps: int | None) -> None:
    dataset = Dataset(n_samples, 1000, 1, 1, (1,), seed=4)
    keys = np.random.PCG64([4, 1, 0]).random_raw(n_samples)
    order = epoch_order(dataset, 1, 2, n_steps=n_steps).swapaxes(1, 2).ravel()
    assert (order == np.argsort(keys, kind="stable")[: len(order)]).all()


@pytest.mark.parametrize("eviction", ["none", "lru"])
@pytest.mark.parametrize("shuffle", ["global", "node", "none"])
def test_memory_goes_with_what_is_read_and_kept_not_with_the_samples_there_are(eviction: str, shuffle: str) -> None:
    dataset = Dataset(2**24, 8, 1, 1, (1,), eviction=eviction, shuffle=shuffle)
    plan = loads_plan(dataset, 4, n_steps=3, policy="naive")
    tracemalloc.start()
    try:
        assert hits_by_epoch(plan) == [[0, 0, 0, 3 * 4 * 8]]
        _, most_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_nbytes < 2**26  # 4 B for each sample that there is


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("policy", "settings", "epochs"),
    [
        ("naive", {}, [(0, 0, 0, 24), (0, 0, 0, 24), (0, 0, 0, 24)]),
        ("files", {"shuffle": "none"}, [(0, 0, 0, 24), (0, 0, 24, 0), (0, 0, 24, 0)]),
        ("files", {"shuffle": "node"}, [(0, 0, 0, 24), (0, 0, 24, 0), (0, 0, 24, 0)]),
        ("files", {"shuffle": "none", "warm": True}, [(0, 0, 24, 0), (0, 0, 24, 0), (0, 0, 24, 0)]),
        ("memory", {"shuffle": "none"}, [(0, 0, 0, 24), (24, 0, 0, 0), (24, 0, 0, 0)]),
        ("memory", {"shuffle": "none", "warm": True}, [(0, 0, 0, 24), (24, 0, 0, 0), (24, 0, 0, 0)]),
        ("datacache", {"shuffle": "node"}, [(0, 0, 0, 24), (24, 0, 0, 0), (24, 0, 0, 0)]),
        ("datacache", {"shuffle": "node", "warm": True}, [(0, 0, 24, 0), (24, 0, 0, 0), (24, 0, 0, 0)]),
        ("datacache", {"shuffle": "none", "memory_nbytes": 0}, [(0, 0, 0, 24), (0, 0, 24, 0), (0, 0, 24, 0)]),
        ("staged", {}, [(0, 0, 24, 0), (0, 0, 24, 0), (0, 0, 24, 0)]),
        ("staged", {"disk_nbytes": 0}, [(0, 0, 0, 24), (0, 0, 0, 24), (0, 0, 0, 24)]),
        ("staged", {"shuffle": "node", "disk_nbytes": 4 * 8}, [(0, 0, 16, 8), (0, 0, 16, 8), (0, 0, 16, 8)]),
    ],
)
@pytest.mark.parametrize("eviction", ["none", "lru"])
def test_policy_finds_samples_where_it_says(policy, settings, epochs, eviction) -> None:
    dataset = dataclasses.replace(SMALL, eviction=eviction, **settings)
    assert hits_by_epoch(loads_plan(dataset, 4, n_steps=9, policy=policy)) == [list(epoch) for epoch in epochs]


def test_with_room_for_all_the_second_epoch_reads_from_memories_only_of_which_one_node_has_each_sample() -> None:
    plan = loads_plan(SMALL, 4, n_steps=9, policy="memory")
    first, second, third = (np.array(epoch) for epoch in hits_by_epoch(plan))
    assert first.tolist() == [0, 0, 0, 24]
    assert (second[MEMORY] + second[PEER], third[MEMORY] + third[PEER]) == (24, 24)
    assert min(second[PEER], third[PEER]) > 0
    kept = [(node, sample) for reads in look_up(plan) for node, sample in kept_in_memory(reads)]
    assert sorted(sample for _, sample in kept) == list(range(24))
    owners = {sample: node for node, sample in kept}
    for reads in look_up(plan):
        if reads.epoch:
            assert reads.owner.ravel().tolist() == [owners[sample] for sample in reads.samples.ravel().tolist()]
            assert ((reads.level == MEMORY) == (reads.owner == np.arange(4)[:, None] // 2)).all()


def kept_in_memory(reads: BatchReads) -> list[tuple[int, int]]:
    ranks = np.nonzero(reads.keeps_memory)[0]
    return list(zip((ranks // 2).tolist(), reads.samples[reads.keeps_memory].tolist(), strict=True))


# ---------------------------------------------------------------- levels that are full


@pytest.mark.parametrize("capacity", [0, 1, 7, 12, 23])
def test_disk_that_keeps_what_it_has_hits_just_its_capacity_from_the_second_epoch_on(capacity: int) -> None:
    """A node alone: whatever the order, an epoch reads every sample once, and so each that is kept."""
    dataset = dataclasses.replace(SMALL, ranks_per_node=4, disk_nbytes=4 * capacity + 3)
    plan = loads_plan(dataset, 4, n_steps=12, policy="files")
    assert hits_by_epoch(plan) == [[0, 0, 0, 24]] + [[0, 0, capacity, 24 - capacity]] * 3


@pytest.mark.parametrize("capacity", [0, 1, 5, 11])
def test_memories_that_keep_what_they_have_hit_the_sum_of_their_capacities(capacity: int) -> None:
    dataset = dataclasses.replace(SMALL, memory_nbytes=10 * capacity + 9)
    epochs = hits_by_epoch(loads_plan(dataset, 4, n_steps=12, policy="memory"))
    assert [(epoch[MEMORY] + epoch[PEER], epoch[STORAGE]) for epoch in epochs] == [(0, 24)] + [
        (2 * capacity, 24 - 2 * capacity)
    ] * 3


def test_capacity_counts_bytes_of_files_each_of_which_is_kept_if_it_fits() -> None:
    sizes = (30, 50, 20, 40, 10, 10)
    dataset = Dataset(6, 1, 1, 1, sizes, shuffle="none", disk_nbytes=100)  # 30 + 50 + 20, and then nothing fits
    assert kept_on_disk(dataset) == [0, 1, 2]
    assert kept_on_disk(dataclasses.replace(dataset, disk_nbytes=95)) == [0, 1, 4]  # 20 and 40 do not fit, 10 does
    assert kept_on_disk(dataclasses.replace(dataset, disk_nbytes=29)) == [2]  # 20; then 9 are left
    assert hits_by_epoch(loads_plan(dataset, 1, n_steps=12, policy="files"))[1] == [0, 0, 3, 3]


def kept_on_disk(dataset: Dataset) -> list[int]:
    first_epoch = list(look_up(loads_plan(dataset, 1, n_steps=6, policy="files")))
    return [sample for reads in first_epoch for sample in reads.samples[reads.keeps_disk].tolist()]


def test_least_recently_used_leaves_for_what_comes() -> None:
    """Room for two files. Sizes 2: a, b in; c pushes a out. A use in between saves a."""
    dataset = Dataset(3, 1, 1, 1, (2,), shuffle="none", disk_nbytes=4, eviction="lru")
    gone = [reads.evicted_disk for reads in look_up(loads_plan(dataset, 1, n_steps=6, policy="files"))]
    assert gone == [(), (), ((0, 0),), ((0, 1),), ((0, 2),), ((0, 0),)]
    mixed = dataclasses.replace(dataset, file_nbytes=(2, 2, 4))
    gone = [reads.evicted_disk for reads in look_up(loads_plan(mixed, 1, n_steps=4, policy="files"))]
    assert gone == [(), (), ((0, 0), (0, 1)), ((0, 2),)]


def test_what_comes_and_goes_within_a_load_is_neither_kept_nor_evicted() -> None:
    """Batches of four samples and room for one: the last of each batch stays, for that of the batch before."""
    dataset = Dataset(8, 4, 1, 1, (1,), shuffle="none", disk_nbytes=1, memory_nbytes=1, eviction="lru")
    batches = list(look_up(loads_plan(dataset, 1, n_steps=3, policy="datacache")))
    for keeps in ([reads.keeps_memory.tolist() for reads in batches], [reads.keeps_disk.tolist() for reads in batches]):
        assert keeps == [[[False, False, False, True]]] * 3
    for gone in ([reads.evicted_memory for reads in batches], [reads.evicted_disk for reads in batches]):
        assert gone == [(), ((0, 3),), ((0, 7),)]


def test_what_goes_and_comes_within_a_load_stays() -> None:
    """Room for two of three files, all of which every batch reads in one order: each ends with the last two."""
    dataset = Dataset(3, 3, 1, 1, (1,), shuffle="none", disk_nbytes=2, eviction="lru")
    first, second = look_up(loads_plan(dataset, 1, n_steps=2, policy="files"))
    assert (first.keeps_disk.tolist(), first.evicted_disk) == ([[False, True, True]], ())
    assert second.level.tolist() == [[STORAGE] * 3]  # each has just gone when it is asked for
    assert (second.keeps_disk.tolist(), second.evicted_disk) == ([[False] * 3], ())


@given(data_plans())
def test_caches_are_within_their_capacity_after_every_load(plan: Plan) -> None:
    dataset = plan.dataset
    disks = {
        (node, s)
        for node in range(plan.world_size // dataset.ranks_per_node)
        for s in on_disk_at_first(plan, node).tolist()
    }
    memories: set[tuple[int, int]] = set()
    sizes = dataset.files_nbytes().tolist()
    for reads in look_up(plan):
        nodes = np.broadcast_to(np.arange(plan.world_size)[:, None] // dataset.ranks_per_node, reads.samples.shape)
        for held, keeps, evicted in (
            (memories, reads.keeps_memory, reads.evicted_memory),
            (disks, reads.keeps_disk, reads.evicted_disk),
        ):
            kept = set(zip(nodes[keeps].tolist(), reads.samples[keeps].tolist(), strict=True))
            assert kept.isdisjoint(held)
            assert held.issuperset(evicted)
            assert kept.isdisjoint(evicted)
            held |= kept
            held -= {*evicted}
        for node in set(nodes.ravel().tolist()):
            on_disk = sum(sizes[sample] for holder, sample in disks if holder == node)
            in_memory = sum(dataset.sample_nbytes for holder, _ in memories if holder == node)
            assert on_disk <= (math.inf if dataset.disk_nbytes is None else dataset.disk_nbytes)
            assert in_memory <= (math.inf if dataset.memory_nbytes is None else dataset.memory_nbytes)


def test_sample_of_a_peer_that_is_read_stays_there() -> None:
    """Two nodes with room for 2 of 6 samples each. Samples that a node reads of the other's memory leave last."""
    dataset = Dataset(6, 1, 1, 1, (1,), memory_nbytes=2, eviction="lru", seed=3)
    plan = loads_plan(dataset, 2, n_steps=30, policy="memory")
    holders: dict[int, list[int]] = {0: [], 1: []}  # least recently used first
    for reads in look_up(plan):
        gone = list(reads.evicted_memory)
        for node in (0, 1):
            sample, level = int(reads.samples[node, 0]), int(reads.level[node, 0])
            if level in (MEMORY, PEER):
                owner = int(reads.owner[node, 0])
                holders[owner].remove(sample)
                holders[owner].append(sample)
            if reads.keeps_memory[node, 0]:
                if len(holders[node]) == 2:
                    assert gone.pop(0) == (node, holders[node].pop(0))
                holders[node].append(sample)
        assert not gone


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_steady_hits_of_a_shuffled_scan_of_an_evicting_disk(share: float) -> None:
    """c + (1 - c) ln(1 - c): far fewer than the share c that a disk hits which keeps what it has."""
    n, n_epochs = 3000, 8
    dataset = Dataset(n, 30, 1, 1, (1,), disk_nbytes=round(share * n), eviction="lru")
    epochs = hits_by_epoch(loads_plan(dataset, 1, n_steps=n_epochs * n // 30, policy="files"))
    rate = sum(epoch[DISK] for epoch in epochs[2:]) / (n * (n_epochs - 2))
    expected = share + (1 - share) * math.log(1 - share)
    error = math.sqrt(expected * (1 - expected) / (n * (n_epochs - 2)))  # of so many independent reads
    assert rate == pytest.approx(expected, abs=4 * error + 1 / n)


@pytest.mark.parametrize("capacity", [1, 12, 23])
def test_evicting_disk_never_hits_in_an_unshuffled_scan_that_it_cannot_hold(capacity: int) -> None:
    dataset = dataclasses.replace(
        SMALL, ranks_per_node=4, shuffle="none", disk_nbytes=4 * capacity, eviction="lru", warm=True
    )
    assert hits_by_epoch(loads_plan(dataset, 4, n_steps=12, policy="files")) == [[0, 0, 0, 24]] * 4
    fits = dataclasses.replace(dataset, disk_nbytes=4 * 24)
    assert hits_by_epoch(loads_plan(fits, 4, n_steps=12, policy="files")) == [[0, 0, 24, 0]] * 4


def test_warm_disks_hold_what_the_whole_run_before_has_left() -> None:
    """As if the run had been twice as long, if the order of the epochs did not go on."""
    dataset = dataclasses.replace(SMALL, shuffle="none", disk_nbytes=4 * 5, eviction="lru")
    twice = list(look_up(loads_plan(dataset, 4, n_steps=18, policy="files")))[9:]
    again = list(look_up(loads_plan(dataclasses.replace(dataset, warm=True), 4, n_steps=9, policy="files")))
    for one, other in zip(twice, again, strict=True):
        assert (one.level == other.level).all()
        assert one.evicted_disk == other.evicted_disk


def test_staging_brings_what_the_node_may_read_as_far_as_it_fits() -> None:
    assert staged_samples(SMALL, 1, 2).tolist() == list(range(24))
    parts = dataclasses.replace(SMALL, shuffle="node")
    assert staged_samples(parts, 1, 2).tolist() == list(range(12, 24))
    assert staged_samples(dataclasses.replace(parts, disk_nbytes=4 * 5 + 3), 1, 2).tolist() == list(range(12, 17))
    mixed = Dataset(4, 1, 1, 1, (5, 9, 3, 1), disk_nbytes=8)
    assert staged_samples(mixed, 0, 1).tolist() == [0, 2]


def test_number_of_batch_buffers_makes_no_difference() -> None:
    """Loads into different buffers are alike: what is kept does not hang on the depth of prefetching."""
    dataset = dataclasses.replace(SMALL, file_nbytes=tuple(range(1, 25)), disk_nbytes=60)
    plan = loads_plan(dataset, 4, n_steps=9, policy="datacache")
    turns = [
        tuple(dataclasses.replace(op, dst=f"batch.{step % 2}") for op in plan.bodies[body])
        for step, body in enumerate(plan.body_of_steps())
    ]
    rotated = Plan.from_steps("rotated", world_size=4, buffers=(), steps=turns, dataset=dataset)
    assert [*map(as_lists, look_up(rotated))] == [*map(as_lists, look_up(plan))]


# ---------------------------------------------------------------- against the obvious implementation


class Shelf:
    """Contents of a disk or a memory, in order of use."""

    def __init__(self, capacity: float, *, evicts: bool) -> None:
        self.capacity, self.evicts = capacity, evicts
        self.held: dict[int, int] = {}

    def use(self, sample: int) -> None:
        self.held[sample] = self.held.pop(sample)

    def take(self, sample: int, size: int) -> tuple[bool, list[int]]:
        if size > self.capacity or (not self.evicts and sum(self.held.values()) + size > self.capacity):
            return False, []
        gone = []
        while sum(self.held.values()) + size > self.capacity:
            gone.append(next(iter(self.held)))
            del self.held[gone[-1]]
        self.held[sample] = size
        return True, gone


def obvious(plan: Plan) -> list[tuple]:
    """Read one sample after the other, and look for each everywhere."""
    dataset = plan.dataset
    n_nodes = plan.world_size // dataset.ranks_per_node
    sizes = dataset.file_nbytes * (dataset.n_samples if len(dataset.file_nbytes) == 1 else 1)
    evicts = dataset.eviction == "lru"
    disks, memories = (
        [Shelf(math.inf if capacity is None else capacity, evicts=evicts) for _ in range(n_nodes)]
        for capacity in (dataset.disk_nbytes, dataset.memory_nbytes)
    )
    if any(isinstance(op, StageIn) for body in plan.bodies for op in body):
        for node, disk in enumerate(disks):
            for sample in node_part(dataset, node, n_nodes).tolist():
                if sum(disk.held.values()) + sizes[sample] <= disk.capacity:
                    disk.held[sample] = sizes[sample]
    if dataset.warm:
        one_run(plan, sizes, disks, memories)
        memories = [Shelf(memory.capacity, evicts=evicts) for memory in memories]
    return one_run(plan, sizes, disks, memories)


def one_run(plan: Plan, sizes: tuple[int, ...], disks: list[Shelf], memories: list[Shelf]) -> list[tuple]:
    dataset, found = plan.dataset, []
    per_epoch = dataset.steps_per_epoch(plan.world_size)
    for number, op in enumerate(plan.loads()):
        epoch = number // per_epoch
        samples = epoch_order(dataset, epoch, plan.world_size)[number % per_epoch]
        rows: list[tuple[int, ...]] = []
        left_memory, left_disk = [], []
        for rank, place in np.ndindex(samples.shape):
            node, sample = rank // dataset.ranks_per_node, int(samples[rank, place])
            holders = [other for other, memory in enumerate(memories) if sample in memory.held]
            level = next(
                name
                for name in op.read
                if name == "storage"
                or (name == "disk" and sample in disks[node].held)
                or (name == "memory" and node in holders)
                or (name == "peer" and holders and node not in holders)
            )
            if level in ("memory", "peer"):
                memories[holders[0]].use(sample)
            if level == "disk":
                disks[node].use(sample)
            in_memory = on_disk = False
            if "memory" in op.keep and level in ("disk", "storage") and not holders:
                in_memory, gone = memories[node].take(sample, dataset.sample_nbytes)
                left_memory += [(node, other) for other in gone]
            if "disk" in op.keep and level == "storage" and sample not in disks[node].held:
                on_disk, gone = disks[node].take(sample, sizes[sample])
                left_disk += [(node, other) for other in gone]
            owner = holders[0] if holders and {"memory", "peer"} & set(op.read) else -1
            rows.append((sample, LEVELS.index(level), owner, in_memory, on_disk))
        nodes = [rank // dataset.ranks_per_node for rank, _ in np.ndindex(samples.shape)]
        for column, left in ((3, left_memory), (4, left_disk)):
            for at, row in enumerate(rows):
                if row[column] and (nodes[at], row[0]) in left:  # came and went, or went and came
                    left.remove((nodes[at], row[0]))
                    rows[at] = (*row[:column], False, *row[column + 1 :])
        found.append((number, epoch, rows, left_memory, left_disk))
    return found


def as_lists(reads: BatchReads) -> tuple:
    columns = (reads.samples, reads.level, reads.owner, reads.keeps_memory, reads.keeps_disk)
    rows = list(zip(*(column.ravel().tolist() for column in columns), strict=True))
    return reads.number, reads.epoch, rows, list(reads.evicted_memory), list(reads.evicted_disk)


@examples(300)
@given(data_plans())
def test_look_up_finds_what_reading_one_by_one_does(plan: Plan) -> None:
    assert [*map(as_lists, look_up(plan))] == obvious(plan)


def test_what_still_fits_is_found_in_any_order() -> None:
    assert that_fit(np.array([], dtype=np.int64), 5.0).tolist() == []
    assert that_fit(np.array([1, 1, 1]), math.inf).all()
    assert that_fit(np.array([9, 5, 4, 1, 1]), 6.0).tolist() == [False, True, False, True, False]
