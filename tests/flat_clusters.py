"""Clusters by flat names: tests vary one number, and need not know its group."""

from collections.abc import Mapping
from typing import Any

from simdist.scenario.cluster import Cluster, ClusterCollectives, ClusterHost, ClusterTopology
from simdist.settings.base import Settings

_GROUPS: dict[str, type[Settings]] = {
    "topology": ClusterTopology,
    "collectives": ClusterCollectives,
    "host": ClusterHost,
}
_GROUP_OF = {name: group for group, kind in _GROUPS.items() for name in kind.model_fields.keys() - Cluster.model_fields}


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes of a cluster, of which some have no group yet, in their groups.

    >>> grouped({"nodes": 2, "rails": True, "overhead_s": 1e-6})
    {'nodes': 2, 'topology': {'rails': True}, 'collectives': {'overhead_s': 1e-06}}
    """
    found: dict[str, Any] = {}
    for name, value in flat.items():
        if name in _GROUP_OF:
            found.setdefault(_GROUP_OF[name], {})[name] = value
        elif name in _GROUPS:
            found[name] = dict(value) | found.get(name, {})
        else:
            found[name] = value
    return found
