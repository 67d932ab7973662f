"""How much a rank and its node need to read a plan's data set, and how long they wait: all follows from the plan."""

from real.data.agenda import Place
from real.data.loader import Limits
from real.data.memory import Geometry
from real.data.nodes import most_kept
from real.data.open_files import connections_per_peer
from simdist.plan import Load, Plan, StageIn

LOADS_PER_WAIT = 10
"""A load may take so many times the longest wait for a file: it reads many, each of which may wait for its server."""


def geometry(plan: Plan, place: Place) -> Geometry:
    """Return the size of a node's memory; what leaves it does so only when nobody reads it any more."""
    dataset = plan.dataset
    assert dataset is not None
    n_slots = most_kept(plan, place.node)
    if n_slots and dataset.eviction != "none":
        n_slots += _still_to_leave(plan)
    n_slots = min(n_slots, dataset.n_samples)
    return Geometry(dataset.n_samples, n_slots, dataset.sample_nbytes, dataset.ranks_per_node)


def disk_ceiling_nbytes(plan: Plan) -> int | None:
    """Return what a node's disk may hold at most at any time; None if the plan sets no limit.

    It is more than the plan says, because what leaves it does so only when nobody reads it any more.
    """
    dataset = plan.dataset
    assert dataset is not None
    if dataset.disk_nbytes is None or dataset.eviction == "none":
        return dataset.disk_nbytes
    return dataset.disk_nbytes + _still_to_leave(plan) * max(dataset.file_nbytes)


def _still_to_leave(plan: Plan) -> int:
    """Return how many samples of a node may have left by plan, and be there: those of the loads of its `grace`."""
    dataset = plan.dataset
    assert dataset is not None
    return (2 * n_ahead(plan) + 3) * dataset.batch_size * dataset.ranks_per_node


def n_connections(plan: Plan) -> int:
    """Return how many connections a rank may have to each other node."""
    dataset = plan.dataset
    assert dataset is not None
    return connections_per_peer(dataset.readers, n_clients=plan.world_size - dataset.ranks_per_node)


def limits(plan: Plan, timeout_s: float) -> Limits:
    """Return how many files a rank reads at once, and how long it waits.

    What leaves a memory stays for those ranks of other nodes that have loaded fewer batches ahead.
    """
    dataset = plan.dataset
    assert dataset is not None
    return Limits(
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
    dataset = plan.dataset
    assert dataset is not None
    return dataset.ranks_per_node < plan.world_size and any("peer" in op.read for op in set(plan.loads()))
