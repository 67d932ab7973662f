"""The messages of every algorithm, in rounds.

A vector is cut into chunks, as many as there are members, servers, or pieces in a pipeline. A message carries some of
them, which the receiver adds to its own or puts in their place.
"""

from collections.abc import Iterator
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from expansion.double_tree import double_tree
from expansion.round import Round
from simdist.errors import PlanError
from simdist.plan import AllGather, AllReduce, Broadcast, Collective, Reduce, ReduceScatter, op_text

Ints = NDArray[np.int64]


def rounds(op: Collective, *, n_chunks: int = 1) -> Iterator[Round]:
    """Yield the messages of a collective over one group, whose members are numbered from 0.

    Servers that are machines of their own have the numbers after the members'.

    Args:
        op: With the algorithm written out; `auto` is for a library to decide.
        n_chunks: Pieces into which a pipeline (broadcast and reduce along a ring, double tree) cuts the vector;
            algorithms that cut it by members do not look at it.

    Raises:
        PlanError: The collective has no such algorithm, or is made of several.
    """
    n = op.group.size
    if n == 1:
        return
    match op.algorithm:
        case "ring":
            yield from _ring(op, n, n_chunks)
        case "tree":
            yield from _tree(op, n)
        case "double_tree":
            yield from double_tree(n, n_chunks)
        case "halving_doubling":
            yield from _halving_doubling(op, n)
        case "direct":
            yield from _direct(op, n)
        case "server":
            yield from _server(op, n)
        case "auto" | "hierarchical":
            raise PlanError(f"{op_text(op)}: {op.algorithm} is made of other algorithms; expand those one by one")
        case _:
            assert_never(op.algorithm)


def _ring(op: Collective, n: int, n_chunks: int) -> Iterator[Round]:
    """Pass chunks to the right: first sums on their way, then those that are complete."""
    match op:
        case AllReduce():
            yield from _around(n, adds=True, ahead=0)
            yield from _around(n, adds=False, ahead=1)
        case ReduceScatter():
            yield from _around(n, adds=True, ahead=-1)
        case AllGather():
            yield from _around(n, adds=False, ahead=0)
        case Broadcast():
            yield from _chain(np.roll(np.arange(n), -op.root), n_chunks, adds=False)
        case Reduce():
            yield from _chain(np.roll(np.arange(n), -op.root - 1), n_chunks, adds=True)
        case _:
            assert_never(op)


def _around(n: int, *, adds: bool, ahead: int) -> Iterator[Round]:
    """In round t, member i sends chunk i - t + ahead: the one that it received in round t - 1."""
    members = np.arange(n)
    right = np.roll(members, -1)
    for turn in range(n - 1):
        yield Round(members, right, (members - turn + ahead) % n, 1, 1 / n, adds)


def _chain(chain: Ints, n_chunks: int, *, adds: bool) -> Iterator[Round]:
    """Pass chunk after chunk along a chain: in round t, link i carries chunk t - i."""
    links = np.arange(len(chain) - 1)
    for turn in range(n_chunks + len(links) - 1):
        busy = links[(turn - links >= 0) & (turn - links < n_chunks)]
        yield Round(chain[busy], chain[busy + 1], turn - busy, 1, 1 / n_chunks, adds)


def _tree(op: Collective, n: int) -> Iterator[Round]:
    """Send whole vectors along a binomial tree."""
    match op:
        case AllReduce():
            yield from _binomial(n, 0, towards_root=True)
            yield from _binomial(n, 0, towards_root=False)
        case Reduce():
            yield from _binomial(n, op.root, towards_root=True)
        case Broadcast():
            yield from _binomial(n, op.root, towards_root=False)
        case ReduceScatter() | AllGather():
            raise PlanError(f"{op_text(op)}: a tree reduces and broadcasts whole buffers")
        case _:
            assert_never(op)


def _binomial(n: int, root: int, *, towards_root: bool) -> Iterator[Round]:
    levels = range((n - 1).bit_length())
    for level in levels if towards_root else reversed(levels):
        near = np.arange(0, n - (1 << level), 2 << level)
        far = near + (1 << level)
        src, dst = (far, near) if towards_root else (near, far)
        yield Round((src + root) % n, (dst + root) % n, np.zeros_like(near), 1, 1.0, towards_root)


def _halving_doubling(op: Collective, n: int) -> Iterator[Round]:
    """Exchange halves of what one is responsible for with partners ever farther away; and the same backwards."""
    match op:
        case AllReduce():
            yield from _halving(n)
            yield from _doubling(n)
        case ReduceScatter():
            yield from _halving(n)
        case AllGather():
            yield from _doubling(n)
        case Reduce() | Broadcast():
            raise PlanError(f"{op_text(op)}: halving_doubling is no algorithm of a rooted collective")
        case _:
            assert_never(op)


def _halving(n: int) -> Iterator[Round]:
    """At distance d, member i keeps the half of its chunks that bit d of its number chooses, and sends the other."""
    members = np.arange(n)
    kept, length = np.zeros(n, dtype=np.int64), n
    for level in range(n.bit_length() - 1):
        length //= 2
        upper = (members >> level) & 1
        yield Round(members, members ^ (1 << level), kept + (1 - upper) * length, length, length / n, True)
        kept = kept + upper * length


def _doubling(n: int) -> Iterator[Round]:
    """Send back what halving has left with each, twice as much every time."""
    members = np.arange(n)
    n_levels = n.bit_length() - 1
    held = np.zeros(n, dtype=np.int64)
    for level in range(n_levels):
        held += ((members >> level) & 1) * (n >> (level + 1))
    length = 1
    for level in reversed(range(n_levels)):
        yield Round(members, members ^ (1 << level), held, length, length / n, False)
        held = held - ((members >> level) & 1) * length
        length *= 2


def _direct(op: Collective, n: int) -> Iterator[Round]:
    """Send to everybody at once."""
    match op:
        case AllReduce():
            yield _to_all(n, owned_by_receiver=True)
            yield _to_all(n, owned_by_receiver=False)
        case ReduceScatter():
            yield _to_all(n, owned_by_receiver=True)
        case AllGather():
            yield _to_all(n, owned_by_receiver=False)
        case Reduce():
            others = np.delete(np.arange(n), op.root)
            yield Round(others, np.full(n - 1, op.root), np.zeros_like(others), 1, 1.0, True)
        case Broadcast():
            others = np.delete(np.arange(n), op.root)
            yield Round(np.full(n - 1, op.root), others, np.zeros_like(others), 1, 1.0, False)
        case _:
            assert_never(op)


def _to_all(n: int, *, owned_by_receiver: bool) -> Round:
    """Exchange with all others, first with the neighbour: so all ports are busy all the time."""
    src = np.tile(np.arange(n), n - 1)
    dst = (src + np.repeat(np.arange(1, n), n)) % n
    return Round(src, dst, dst if owned_by_receiver else src, 1, 1 / n, owned_by_receiver)


def _server(op: Collective, n: int) -> Iterator[Round]:
    """Push every part to its server, then pull all of them; member i begins with server i."""
    if not isinstance(op, AllReduce) or op.servers is None:
        raise PlanError(f"{op_text(op)}: an all_reduce with servers has the algorithm `server`")
    parts = np.array(op.servers.parts)
    servers = np.array(op.servers.members) if op.servers.members else n + np.arange(len(parts))
    member = np.tile(np.arange(n), len(parts))
    part = (member + np.repeat(np.arange(len(parts)), n)) % len(parts)
    moves = (member != servers[part]) & (parts[part] > 0)
    member, part = member[moves], part[moves]
    share = parts[part] / parts.sum()
    yield Round(member, servers[part], part, 1, share, True)
    yield Round(servers[part], member, part, 1, share, False)
