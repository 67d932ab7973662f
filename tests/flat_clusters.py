"""Clusters by flat names: tests vary one number, and need not know its group."""

from collections.abc import Mapping
from typing import Any

from simdist.scenario.cluster import Cluster
from simdist.settings.base import key_of, new_path


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes of a cluster, of which some have no group yet, in their groups.

    >>> grouped({"nodes": 2, "rails": True, "collective_overhead_s": 1e-6})
    {'nodes': 2, 'topology': {'rails': True}, 'collectives': {'overhead_s': 1e-06}}
    """
    found: dict[str, Any] = {}
    for name, value in flat.items():
        path = new_path(Cluster, name)
        if path is not None:
            group, key = path.split(".")
            found.setdefault(group, {})[key + name.removeprefix(key_of(name))] = value
        elif name in ("topology", "collectives", "host"):
            found[name] = dict(value) | found.get(name, {})
        else:
            found[name] = value
    return found
