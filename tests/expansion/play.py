"""Messages on their way: every port sends, and receives, one after the other."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expansion.round import Round

Times = NDArray[np.float64]
Ints = NDArray[np.int64]

_FREE, _READY, _ARRIVED = range(3)  # what happens, in this order


@dataclass(frozen=True, slots=True)
class Wire:
    """A kind of link: seconds until the first byte arrives, and bytes per second."""

    latency_s: float
    bandwidth_Bps: float


@dataclass(frozen=True, slots=True)
class Wires:
    """Who is joined to whom: every member has a port to the others of its node, every node one to the other nodes.

    Args:
        node: Node of each member, from 0, `[n_members]`.
        fabric: Between members of a node.
        network: Between nodes; all members of a node share its port.
    """

    node: Ints
    fabric: Wire
    network: Wire


@dataclass(frozen=True, slots=True)
class Played:
    """Result of a play.

    Args:
        end_s: When each member has sent and received everything, `[n_members]`.
        sent_nbytes: Bytes out of every port: first those of the members, then those of the nodes.
        received_nbytes: Bytes into every port, likewise.
        n_messages: Messages sent.
    """

    end_s: Times
    sent_nbytes: Times
    received_nbytes: Times
    n_messages: int


def play(messages: Iterable[Round], wires: Wires, *, nbytes: float, start_s: Times | None = None) -> Played:
    """Send the messages of a collective over an idle network.

    A message leaves when its sender has received what earlier rounds send it of the same chunks, when the receiver has
    begun, and when both ports are free; who is ready first goes first. It takes the sender's port for bytes /
    bandwidth and, the latency later, the receiver's for as long.

    >>> from expansion import rounds
    >>> from simdist.plan import AllReduce, Group
    >>> wires = Wires(np.arange(4), fabric=Wire(0.0, 1e9), network=Wire(1e-3, 1e9))
    >>> played = play(rounds(AllReduce("grad", Group(4), algorithm="ring")), wires, nbytes=4e6)
    >>> played.end_s.round(9).tolist(), played.n_messages  # 6 hops of 1 ms latency and 1 MB
    ([0.012, 0.012, 0.012, 0.012], 24)

    Args:
        messages: See `expansion.rounds`.
        wires: The network.
        nbytes: Bytes of the whole vector.
        start_s: When each member begins, `[n_members]`; all at 0 if absent.
    """
    messages = [each for each in messages if len(each.src)]
    flights = [_flight(each, wires, nbytes) for each in messages]
    network = _Network(wires, np.zeros(len(wires.node)) if start_s is None else start_s, _n_chunks(messages))
    if all(_all_differ(flight.out_port) and _all_differ(flight.in_port) for flight in flights):
        for each, flight in zip(messages, flights, strict=True):
            network.send_round(each, flight)
    else:
        network.send_by_readiness(messages, flights)
    return network.played(flights)


@dataclass(frozen=True, slots=True)
class _Flight:
    """Times of the messages of a round, `[n_messages]` each."""

    out_port: Ints
    in_port: Ints
    nbytes: Times
    busy_s: Times
    latency_s: Times


def _flight(each: Round, wires: Wires, nbytes: float) -> _Flight:
    n_members = len(wires.node)
    src_node, dst_node = wires.node[each.src], wires.node[each.dst]
    inside = src_node == dst_node
    shares = np.broadcast_to(nbytes * np.asarray(each.share), each.src.shape)
    return _Flight(
        np.where(inside, each.src, n_members + src_node),
        np.where(inside, each.dst, n_members + dst_node),
        shares,
        shares / np.where(inside, wires.fabric.bandwidth_Bps, wires.network.bandwidth_Bps),
        np.where(inside, wires.fabric.latency_s, wires.network.latency_s),
    )


def _n_chunks(messages: Sequence[Round]) -> int:
    return max((int(each.first.max()) + each.length for each in messages), default=1)


def _all_differ(ports: Ints) -> bool:
    return int(np.bincount(ports).max()) == 1


class _Network:
    """When chunks have arrived at members, and from when on ports are free."""

    def __init__(self, wires: Wires, start_s: Times, n_chunks: int) -> None:
        n_members = len(wires.node)
        n_ports = n_members + int(wires.node.max()) + 1
        self._start_s = start_s
        self._arrived_s = np.repeat(start_s[:, None], n_chunks, axis=1)
        self._out_free_s, self._in_free_s = np.zeros(n_ports), np.zeros(n_ports)
        self._end_s = start_s.copy()

    def played(self, flights: Sequence[_Flight]) -> Played:
        n_ports = len(self._out_free_s)
        sent, received = np.zeros(n_ports), np.zeros(n_ports)
        for flight in flights:
            sent += np.bincount(flight.out_port, weights=flight.nbytes, minlength=n_ports)
            received += np.bincount(flight.in_port, weights=flight.nbytes, minlength=n_ports)
        return Played(self._end_s, sent, received, sum(len(flight.nbytes) for flight in flights))

    def send_round(self, each: Round, flight: _Flight) -> None:
        """Send messages that share no port, all at once."""
        carried = each.first[:, None] + np.arange(each.length)
        ready_s = self._arrived_s[each.src[:, None], carried].max(axis=1)
        ready_s = np.maximum(ready_s, self._start_s[each.dst] - flight.latency_s)
        receiver_s = self._in_free_s[flight.in_port] - flight.latency_s
        leaves_s = np.maximum(ready_s, np.maximum(self._out_free_s[flight.out_port], receiver_s))
        sent_s = leaves_s + flight.busy_s
        arrived_s = sent_s + flight.latency_s
        self._out_free_s[flight.out_port], self._in_free_s[flight.in_port] = sent_s, arrived_s
        places = each.dst[:, None], carried
        self._arrived_s[places] = np.maximum(self._arrived_s[places], arrived_s[:, None])
        np.maximum.at(self._end_s, each.dst, arrived_s)
        np.maximum.at(self._end_s, each.src, sent_s)

    def send_by_readiness(self, messages: Sequence[Round], flights: Sequence[_Flight]) -> None:
        """Send message by message: whenever something happens, all that are ready and find both their ports free."""
        singles = _singles(messages, flights, self._start_s)
        needed, waiting = _Needed(messages), _Waiting(singles, len(self._out_free_s))
        happens = [
            (each.ready_s, _READY, number) for number, each in enumerate(singles) if not needed.n_missing[number]
        ]
        heapq.heapify(happens)
        while happens:
            now_s, what, message = heapq.heappop(happens)
            if what == _ARRIVED:
                candidates = []
                for each in needed.arrived(message):
                    if singles[each].ready_s > now_s:
                        heapq.heappush(happens, (singles[each].ready_s, _READY, each))
                    else:
                        waiting.add(each)
                        candidates.append(each)
            else:
                ports = [waiting.look_at(what, message)]
                while happens and happens[0][0] == now_s and happens[0][1] != _ARRIVED:  # together
                    _, what, message = heapq.heappop(happens)
                    ports.append(waiting.look_at(what, message))
                candidates = waiting.first_of(ports)
            for each in sorted(candidates):
                if waiting.can_leave(each):  # still, after those before it
                    waiting.leave(each)
                    heapq.heappush(happens, (now_s + singles[each].busy_s, _FREE, each))
                    heapq.heappush(happens, (self._leave(singles[each], now_s), _ARRIVED, each))

    def _leave(self, each: "_Single", now_s: float) -> float:
        """Occupy the ports; return when the message arrives."""
        sent_s = now_s + each.busy_s
        self._end_s[each.src] = max(self._end_s[each.src], sent_s)
        self._end_s[each.dst] = max(self._end_s[each.dst], sent_s + each.latency_s)
        return sent_s + each.latency_s


@dataclass(frozen=True, slots=True)
class _Single:
    """One message, which cannot leave before sender and receiver have begun."""

    src: int
    dst: int
    out_port: int
    in_port: int
    busy_s: float
    latency_s: float
    ready_s: float


def _singles(messages: Sequence[Round], flights: Sequence[_Flight], start_s: Times) -> list[_Single]:
    singles = []
    for each, flight in zip(messages, flights, strict=True):
        begin_s = np.maximum(np.maximum(start_s[each.src], start_s[each.dst] - flight.latency_s), 0.0)
        columns = (each.src, each.dst, flight.out_port, flight.in_port, flight.busy_s, flight.latency_s, begin_s)
        singles += [_Single(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return singles


class _Waiting:
    """Messages that are ready, in a heap for every pair of an outgoing and an incoming port, and the free ports."""

    def __init__(self, singles: Sequence[_Single], n_ports: int) -> None:
        self._singles = singles
        self._of_pair: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._wanted_by_out: list[set[int]] = [set() for _ in range(n_ports)]  # incoming ports
        self._wanted_by_in: list[set[int]] = [set() for _ in range(n_ports)]
        self._free_out, self._free_in = set(range(n_ports)), set(range(n_ports))

    def add(self, message: int) -> None:
        each = self._singles[message]
        heapq.heappush(self._of_pair[each.out_port, each.in_port], message)
        self._wanted_by_out[each.out_port].add(each.in_port)
        self._wanted_by_in[each.in_port].add(each.out_port)

    def look_at(self, what: int, message: int) -> tuple[int, int]:
        """Add a message that has become ready, or free the ports of one that has been sent; return its ports."""
        each = self._singles[message]
        if what == _READY:
            self.add(message)
        else:
            self._free_out.add(each.out_port)
            self._free_in.add(each.in_port)
        return each.out_port, each.in_port

    def first_of(self, ports: Iterable[tuple[int, int]]) -> set[int]:
        """Return the first that waits for each pair of free ports, of which one is among these."""
        found = set()
        for out_port, in_port in ports:
            if out_port in self._free_out:
                found |= {self._of_pair[out_port, each][0] for each in self._wanted_by_out[out_port] & self._free_in}
            if in_port in self._free_in:
                found |= {self._of_pair[each, in_port][0] for each in self._wanted_by_in[in_port] & self._free_out}
        return found

    def can_leave(self, message: int) -> bool:
        each = self._singles[message]
        return each.out_port in self._free_out and each.in_port in self._free_in

    def leave(self, message: int) -> None:
        """Take out the first message of its pair, and its ports."""
        each = self._singles[message]
        pair = each.out_port, each.in_port
        heapq.heappop(self._of_pair[pair])
        if not self._of_pair[pair]:
            self._wanted_by_out[each.out_port].remove(each.in_port)
            self._wanted_by_in[each.in_port].remove(each.out_port)
        self._free_out.remove(each.out_port)
        self._free_in.remove(each.in_port)


class _Needed:
    """Which messages wait for which: for those of earlier rounds that bring their sender the same chunks."""

    def __init__(self, messages: Sequence[Round]) -> None:
        brought: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # (member, chunk) -> messages
        self.n_missing: list[int] = []
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        for each in messages:
            first_message = len(self.n_missing)
            for src, first in zip(each.src.tolist(), each.first.tolist(), strict=True):
                needed = {one for chunk in range(first, first + each.length) for one in brought[src, chunk]}
                for one in needed:
                    self._followers[one].append(len(self.n_missing))
                self.n_missing.append(len(needed))
            for message, (dst, first) in enumerate(zip(each.dst.tolist(), each.first.tolist(), strict=True)):
                for chunk in range(first, first + each.length):
                    brought[dst, chunk].append(first_message + message)

    def arrived(self, message: int) -> list[int]:
        """Return the messages that waited for this one last."""
        for follower in self._followers[message]:
            self.n_missing[follower] -= 1
        return [follower for follower in self._followers[message] if not self.n_missing[follower]]
