"""Data sets, and plans of nothing but loads, for the tests of caches and of what loads cost."""

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from simdist.plan import LEVELS, Body, Buffer, Dataset, Level, Load, Plan, StageIn
from simdist.plan.group import Group
from simdist.schedules.job import Policy, levels

#: Two machines with everything that samples can be read from and kept in.
DATA_CLUSTER = """\
cluster:
  nodes: 2
  gpus_per_node: 2
  fabric: ideal
  network: {latency: 25 us, bandwidth: 10 Gbit/s}
  storage: {latency: 1 ms, bandwidth: 100 MB/s}
  disk: {read: 1 GB/s, write: 500 MB/s}
  memory: {bandwidth: 8 GB/s}
"""
#: Three epochs of small files; schedules are to be added.
DATA_SCENARIO = f"""{DATA_CLUSTER}\
workload:
  tensors: [{{name: weight, count: 100000}}]
  batch_size: 4
  sample_size: 150 kB
  forward: 10 ms
input: {{source: storage, data: {{samples: 64, file_size: 1 MB}}}}
steps: 3 epochs
"""


def loads_plan(
    dataset: Dataset,
    world_size: int,
    *,
    n_steps: int,
    policy: Policy = "naive",
    reads: Sequence[tuple[tuple[Level, ...], tuple[Level, ...]]] = (),
    staged: bool = False,
) -> Plan:
    """Return a plan that loads a batch in every step, as a policy says, or as `reads` does, over and over."""
    per_epoch = dataset.steps_per_epoch(world_size)
    batch = Buffer("batch", dataset.batch_size * dataset.sample_nbytes, "uint8", place="host")

    def steps() -> Iterator[Body]:
        for step in range(n_steps):
            load = Load("batch", *(reads[step % len(reads)] if reads else levels(policy, step // per_epoch)))
            first = step == 0 and (staged or policy == "staged")
            yield (StageIn(Group(dataset.ranks_per_node)), load) if first else (load,)

    return Plan.from_steps("loads", world_size=world_size, buffers=[batch], steps=steps(), dataset=dataset)


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[Dataset, int]:
    """Draw a data set and a number of ranks."""
    ranks_per_node, n_nodes, batch_size = (draw(st.integers(1, 3)) for _ in range(3))
    world_size = ranks_per_node * n_nodes
    n_samples = world_size * batch_size * draw(st.integers(1, 4)) + draw(st.integers(0, 3))
    sizes = st.lists(st.integers(1, 9), min_size=n_samples, max_size=n_samples)
    dataset = Dataset(
        n_samples=n_samples,
        batch_size=batch_size,
        ranks_per_node=ranks_per_node,
        sample_nbytes=draw(st.integers(1, 5)),
        file_nbytes=tuple(draw(st.one_of(st.just([5]), sizes))),
        shuffle=draw(st.sampled_from(["global", "node", "none"])),
        seed=draw(st.integers(0, 3)),
        disk_nbytes=draw(st.one_of(st.none(), st.integers(0, 60))),
        memory_nbytes=draw(st.one_of(st.none(), st.integers(0, 30))),
        eviction=draw(st.sampled_from(["none", "lru"])),
        warm=draw(st.booleans()),
    )
    return dataset, world_size


@st.composite
def data_plans(draw: st.DrawFn) -> Plan:
    """Draw a plan of loads that read and keep anything on any level."""
    dataset, world_size = draw(data_sets())
    faster = st.permutations(LEVELS[:-1]).flatmap(lambda them: st.integers(0, 3).map(lambda n: tuple(them[:n])))
    kept = st.permutations(("disk", "memory")).flatmap(lambda them: st.integers(0, 2).map(lambda n: tuple(them[:n])))
    reads = draw(st.lists(st.tuples(faster.map(lambda them: (*them, "storage")), kept), min_size=1, max_size=3))
    return loads_plan(dataset, world_size, n_steps=draw(st.integers(1, 16)), reads=reads, staged=draw(st.booleans()))
