"""How much a rank and its node need to read a plan's data set, and how long they wait: all follows from the plan."""

from real.data.agenda import Place
from real.data.loader import Limits
from real.data.memory import Geometry
from real.feeding.nodes import most_kept
from simdist.plan import Load, Plan, StageIn

__all__ = ["LOADS_PER_WAIT", "geometry", "limits", "n_ahead", "uses_disk", "uses_peers"]

LOADS_PER_WAIT = 10
"""A load may take so many times the longest wait for a file: it reads many, each of which may wait for its server."""


def geometry(plan: Plan, place: Place) -> Geometry:
    """Return the size of a node's memory; what leaves it does so only when nobody reads it any more."""
    dataset = plan.dataset
    assert dataset is not None
    n_slots = most_kept(plan, place.node)
    if n_slots and dataset.eviction != "none":
        n_slots += (2 * n_ahead(plan) + 3) * dataset.batch_size * dataset.ranks_per_node
    n_slots = min(n_slots, dataset.n_samples)
    return Geometry(dataset.n_samples, n_slots, dataset.sample_nbytes, dataset.ranks_per_node)


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
