"""Routes of messages: the resources that each message uses, and the chains of sends that depend on each other.

They depend on the places of ranks and on how links are joined, but not on latencies, capacities or bytes. Price lists
of one cluster with other numbers, such as the draws of uncertain ranges, therefore share them. `routes_of` keeps recent
routes by everything that it is given, and it is given nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Resources

#: How a message counts on a resource: its bytes in the fabric, at the sending or the receiving end of the network, or
#: as they are.
_Way: TypeAlias = Literal["fabric", "sent", "received", "plain"]
#: Which sends depend on each other: none in a round, those along a ring, or all of them.
SendOrder: TypeAlias = Literal["slowest", "ring", "line"]
#: Sends inside a domain, sends between domains, and how many of the latter are between leaves.
_Chain: TypeAlias = tuple[int, int, int]
#: Resources, each once, and the bytes on each.
LinkLoad: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]

_MOST_KEPT = 2**16  # messages; more are not worth 1 MiB


@dataclass(frozen=True, slots=True)
class Wiring:
    """Places of ranks, and how links are joined. See `simdist.cost.topology.Topology`.

    Args:
        resources: Numbers of ranks, machines and resources.
        switched: Whether the switch limits the NICs.
        bridged: Whether a host bridge limits the GPUs of a node.
        mesh: Whether the fabric is a link to each other GPU of a node.
        has_processes: Whether processes of the ranks move all bytes.
    """

    resources: Resources
    switched: bool
    bridged: bool
    mesh: bool
    has_processes: bool


def routes_of(wiring: Wiring, src: NDArray[np.int64], dst: NDArray[np.int64]) -> "Routes":
    """Return the routes of messages from ranks to ranks."""
    if len(src) > _MOST_KEPT:
        return Routes(wiring, src, dst)
    return _kept_routes(wiring, _as_bytes(src), _as_bytes(dst))


def _as_bytes(ranks: NDArray[np.int64]) -> bytes:
    return np.asarray(ranks, dtype=np.int64).tobytes()


@lru_cache(maxsize=256)
def _kept_routes(wiring: Wiring, src: bytes, dst: bytes) -> "Routes":
    return Routes(wiring, np.frombuffer(src, dtype=np.int64), np.frombuffer(dst, dtype=np.int64))


@final
class Routes:
    """The routes of some messages.

    Args:
        wiring: Places and links.
        src: Sending ranks.
        dst: Receiving ranks, of the same shape.
    """

    def __init__(self, wiring: Wiring, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        self._wiring = wiring
        self._src = src
        self._dst = dst
        self._is_outside = wiring.resources.domain(src) != wiring.resources.domain(dst)
        self._is_far = wiring.resources.leaf(src) != wiring.resources.leaf(dst)
        self._chains: dict[tuple[SendOrder, int], tuple[_Chain, ...]] = {}
        parts = self._parts()
        used = np.concatenate([each.resources for each in parts])
        self._resources, self._places = np.unique(used, return_inverse=True)
        self._uses = [each.use for each in parts]

    def load(self, nbytes: Mapping[_Way, NDArray[np.float64]]) -> LinkLoad:
        """Return the bytes on each resource, without resources that carry none.

        Args:
            nbytes: Bytes of each message in all rounds, for each way in which they count.
        """
        weights = np.concatenate([each.nbytes(nbytes[each.way]) for each in self._uses])
        totals = np.bincount(self._places, weights=weights, minlength=len(self._resources)).astype(np.float64)
        flows = totals > 0
        if flows.all():
            return self._resources, totals
        return self._resources[flows], totals[flows]

    def chains(self, order: SendOrder, rounds: int) -> tuple[_Chain, ...]:
        """Return sends inside a domain, between domains, and between leaves, of the chains among which the slowest is.

        Args:
            order: See `SendOrder`.
            rounds: Number of rounds.
        """
        if (order, rounds) not in self._chains:
            self._chains[order, rounds] = tuple(dict.fromkeys(self._new_chains(order, rounds)))
        return self._chains[order, rounds]

    def _new_chains(self, order: SendOrder, rounds: int) -> list[_Chain]:
        n = len(self._is_outside)
        n_outside = int(np.count_nonzero(self._is_outside))
        n_far = int(np.count_nonzero(self._is_far))
        match order:
            case "slowest":
                kinds = set(zip(self._is_outside.tolist(), self._is_far.tolist(), strict=True))
                return [
                    (0 if outside else rounds, rounds if outside else 0, rounds if far else 0) for outside, far in kinds
                ]
            case "line":
                return [(n - n_outside, n_outside, n_far)]
            case "ring":
                times_around, rest = divmod(rounds, n)
                of_rest = zip(_in_windows(self._is_outside, rest), _in_windows(self._is_far, rest), strict=True)
                inside = times_around * (n - n_outside) + rest
                return [
                    (inside - outside, times_around * n_outside + outside, times_around * n_far + far)
                    for outside, far in sorted(set(of_rest))
                ]

    def _parts(self) -> "list[_Part]":
        parts = self._on_processes() if self._wiring.has_processes else self._on_fabric()
        parts += self._on_network()
        return parts + self._on_bridges() if self._wiring.bridged else parts

    def _on_fabric(self) -> "list[_Part]":
        resources = self._wiring.resources
        inside = np.flatnonzero(~self._is_outside)
        use = _Carried("fabric", inside, self._share_of_mesh() if self._wiring.mesh and len(inside) else 1.0)
        src = resources.fabric_out(self._src[inside])
        return [_Part(src, use), _Part(resources.fabric_in(self._dst[inside]), use)]

    def _share_of_mesh(self) -> float:
        """Return the links of a GPU over those to members of its node. Data is spread over the latter."""
        taking_part = np.unique(np.concatenate([self._src, self._dst]))
        most = int(np.bincount(self._wiring.resources.node(taking_part)).max())
        return (self._wiring.resources.ranks_per_node - 1) / max(most - 1, 1)

    def _on_processes(self) -> "list[_Part]":
        resources = self._wiring.resources
        sent = np.flatnonzero(self._src < resources.world_size)
        received = np.flatnonzero(self._dst < resources.world_size)
        out = resources.fabric_out(self._src[sent])
        into = resources.fabric_in(self._dst[received])
        return [_Part(out, _Carried("plain", sent)), _Part(into, _Carried("plain", received))]

    def _on_network(self) -> "list[_Part]":
        resources = self._wiring.resources
        outside = np.flatnonzero(self._is_outside)
        src, sent = self._over_domain("sent", self._src[outside], outside)
        dst, received = self._over_domain("received", self._dst[outside], outside)
        parts = [_Part(resources.nic_out(src), sent), _Part(resources.nic_in(dst), received)]
        if self._wiring.switched:
            parts.append(_Part(np.full_like(outside, resources.switch), _Carried("received", outside)))
        if resources.railed:
            parts += self._on_rails(outside)
        far = np.flatnonzero(self._is_far)
        if len(far):
            use = _Carried("plain", far)
            parts.append(_Part(resources.leaf_up(resources.leaf(self._src[far])), use))
            parts.append(_Part(resources.leaf_down(resources.leaf(self._dst[far])), use))
        return parts

    def _over_domain(
        self, way: _Way, ranks: NDArray[np.int64], messages: NDArray[np.int64]
    ) -> "tuple[NDArray[np.int64], _Carried]":
        """Return the nodes that carry the bytes of ranks: the nodes of their domains that take part, in equal parts."""
        resources = self._wiring.resources
        if resources.nodes_per_domain == 1 or not len(ranks):
            return resources.node(ranks), _Carried(way, messages)
        both = np.concatenate([self._src, self._dst])
        nodes, first = np.unique(resources.node(both), return_index=True)
        return nodes, _Carried(way, messages, sharing=(resources.domain(ranks), resources.domain(both)[first]))

    def _on_rails(self, outside: NDArray[np.int64]) -> "list[_Part]":
        """Return the cards of GPUs: bytes of a domain go over those of its GPUs that take part, in equal parts."""
        resources = self._wiring.resources
        taking_part = np.unique(np.concatenate([self._src, self._dst]))
        gpus = taking_part[taking_part < resources.world_size]
        of_gpus = resources.domain(gpus)
        ends: tuple[tuple[_Way, NDArray[np.int64], NDArray[np.int64]], ...] = (
            ("sent", self._src, resources.rail_out(gpus)),
            ("received", self._dst, resources.rail_in(gpus)),
        )
        parts = []
        for way, ranks, cards in ends:
            of_gpu = outside[ranks[outside] < resources.world_size]
            if len(of_gpu):
                sharing = resources.domain(ranks[of_gpu]), of_gpus
                parts.append(_Part(cards, _Carried(way, of_gpu, sharing=sharing)))
        return parts

    def _on_bridges(self) -> "list[_Part]":
        resources = self._wiring.resources
        from_gpu = np.flatnonzero(self._src < resources.world_size)
        to_gpu = np.flatnonzero(self._dst < resources.world_size)
        up = resources.bridge_up(resources.node(self._src[from_gpu]))
        down = resources.bridge_down(resources.node(self._dst[to_gpu]))
        return [_Part(up, _Carried("plain", from_gpu)), _Part(down, _Carried("plain", to_gpu))]


def _in_windows(marks: NDArray[np.bool_], length: int) -> list[int]:
    """Return how many are marked of `length` places in a row, for each place of a ring that these begin at."""
    ahead = np.concatenate(([0], np.cumsum(np.concatenate((marks, marks[:length])))))
    found: list[int] = (ahead[length:] - ahead[: len(ahead) - length]).tolist()
    return found


@dataclass(frozen=True, slots=True)
class _Carried:
    """Bytes on some resources.

    Args:
        way: How messages count.
        messages: Numbers of the messages.
        factor: On their bytes.
        sharing: If nodes share the bytes of their domain: the domain of each message, and that of each node.
    """

    way: _Way
    messages: NDArray[np.int64]
    factor: float = 1.0
    sharing: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def nbytes(self, of_messages: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes on each resource, given those of each message."""
        nbytes = of_messages[self.messages]
        if self.factor != 1.0:
            nbytes = nbytes * self.factor
        if self.sharing is None:
            return nbytes
        domain_of_message, domain_of_node = self.sharing
        n_sharing = np.bincount(domain_of_node)
        totals = np.bincount(domain_of_message, weights=nbytes, minlength=len(n_sharing))
        return np.asarray(totals[domain_of_node] / n_sharing[domain_of_node])


@dataclass(frozen=True, slots=True)
class _Part:
    """Resources, which may recur, and the use of each."""

    resources: NDArray[np.int64]
    use: _Carried
