"""Schedules that suit a job besides its own, as settings of a scenario."""

from collections.abc import Iterator

RARELY = 8  # steps between averages of parameters


def sharded(shard: int, world_size: int) -> dict[str, object]:
    """Return the kind of schedule in which so many ranks share a copy of the model."""
    return {"kind": "fsdp"} if shard == world_size else {"kind": "hsdp", "shard": shard}


def rivals_of_shards(
    own: dict[str, object], world_size: int, per_node: int, *, is_large: bool
) -> Iterator[dict[str, object]]:
    """Yield other shardings: units that are kept, copies in fewer or all ranks, and copies that average rarely.

    Args:
        own: Settings of the job's own schedule.
        world_size: Ranks.
        per_node: Ranks of a node.
        is_large: The whole model does not fit on a device, so that synchronous SGD is no rival.
    """
    settings = {key: value for key, value in own.items() if key not in ("kind", "shard")}
    yield own | {"reshard_after_forward": False}
    in_node = own.get("shard", per_node)
    yield sharded(world_size, world_size) | settings
    if isinstance(in_node, int) and 1 < in_node < world_size:
        yield sharded(in_node, world_size) | settings
        yield sharded(in_node, world_size) | {"between": f"local-{RARELY}"} | settings
    if not is_large:
        yield {"kind": "sync"}


def rivals_of_copies(own: dict[str, object], n_nodes: int, per_node: int) -> Iterator[dict[str, object]]:
    """Yield synchronous SGD, if the job's own shares updates, and copies that average parameters rarely."""
    if own.get("shared_update"):
        yield {"kind": "sync"}
    if n_nodes * per_node == 1:
        return
    yield {"kind": "local_sgd", "period": RARELY}
    if n_nodes > 1 and per_node > 1:
        yield {"kind": "hierarchical_sgd", "levels": {RARELY // 4: per_node, RARELY: "world"}}
