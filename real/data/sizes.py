"""How much a rank and its node need to read a plan's data set, and how long they wait: all follows from the plan."""

from real.data.loader import LoaderLimits
from real.data.memory import Geometry
from real.data.peers import connections_per_peer
from real.processes.rendezvous import RankPlace
from simdist.caching import look_up
from simdist.plan import Dataset, Load, Plan, StageIn

# A load may take so many times the longest wait for a file: it reads many, each of which may wait for its server.
LOADS_PER_WAIT = 10


def geometry(plan: Plan, place: RankPlace) -> Geometry:
    """Return the size of a node's memory; what leaves it does so only when no rank reads it any more."""
    dataset = dataset_of(plan)
    n_slots = most_kept(plan, place.node)
    if n_slots and dataset.eviction != "none":
        # as many samples may have left by plan, and still be there: those of the loads of its `grace`
        n_slots += (2 * n_ahead(plan) + 3) * dataset.batch_size * dataset.ranks_per_node
    n_slots = min(n_slots, dataset.n_samples)
    return Geometry(dataset.n_samples, n_slots, dataset.sample_nbytes, dataset.ranks_per_node)


def n_connections(plan: Plan) -> int:
    """Return how many connections a rank may have to each other node."""
    dataset = dataset_of(plan)
    return connections_per_peer(dataset.readers, n_clients=plan.world_size - dataset.ranks_per_node)


def limits(plan: Plan, timeout_s: float) -> LoaderLimits:
    """Return how many files a rank reads at once, and how long it waits.

    Samples that leave a memory stay for those ranks of other nodes that have loaded fewer batches ahead.
    """
    dataset = dataset_of(plan)
    return LoaderLimits(
        readers=dataset.readers,
        decoders=dataset.decoders,
        wait_s=timeout_s,
        timeout_s=LOADS_PER_WAIT * timeout_s,
        grace=n_ahead(plan) + 1,
    )


def n_ahead(plan: Plan) -> int:
    """Return how many batches a rank may have loaded before it computes with the first."""
    return len({op.dst for body in plan.bodies for op in body if isinstance(op, Load)})


def uses_disk(plan: Plan) -> bool:
    """Tell whether a plan reads or keeps files on disks."""
    ops = {op for body in plan.bodies for op in body if isinstance(op, Load | StageIn)}
    return any(isinstance(op, StageIn) or "disk" in (*op.read, *op.keep) for op in ops)


def uses_peers(plan: Plan) -> bool:
    """Tell whether nodes read from one another's memories."""
    dataset = dataset_of(plan)
    return dataset.ranks_per_node < plan.world_size and any("peer" in op.read for op in set(plan.loads()))


def most_kept(plan: Plan, node: int) -> int:
    """Return how many samples a node's memory holds at most, by the plan."""
    dataset = dataset_of(plan)
    if not any("memory" in op.keep for op in set(plan.loads())):
        return 0
    mine = slice(node * dataset.ranks_per_node, (node + 1) * dataset.ranks_per_node)
    held = most = 0
    for batch in look_up(plan):
        held += int(batch.keeps_memory[mine].sum())
        held -= sum(owner == node for owner, _ in batch.evicted_memory)
        most = max(most, held)
    return most


def dataset_of(plan: Plan) -> Dataset:
    """Return the data set of a plan that has one."""
    assert plan.dataset is not None
    return plan.dataset
