"""Contents of buffers in a proof: linear combinations of sources, as exact integers over a common denominator."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.errors import UnsupportedError
from simdist.plan.group import Group


@dataclass(frozen=True, slots=True)
class Tag:
    """Kind of a source, its age in steps, up to a limit, and its pass in the step.

    Kinds: `param`, `anchor`, `gradient`; `kept`: left by a top-k selection; `batch` and `used`: input; `forward`;
    `ratios of update` with the number of the update in the step: trust ratios.
    """

    kind: str
    age: int = 0
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of sources, `numerators[rank, atom, source] / denominator`.

    A single atom stands for all atoms of a value, if they have the same weights.
    """

    numerators: NDArray[np.int64]
    denominator: int = 1

    def cut(self, first: int, last: int) -> "Weights":
        """Return the weights of some of the atoms."""
        return self if self.numerators.shape[1] == 1 else Weights(self.numerators[:, first:last], self.denominator)

    def of_atoms(self, n_atoms: int) -> NDArray[np.int64]:
        """Return the numerators of each of `n_atoms` atoms."""
        n_ranks, _, n_sources = self.numerators.shape
        return np.broadcast_to(self.numerators, (n_ranks, n_atoms, n_sources))

    def __add__(self, other: "Weights") -> "Weights":
        common = math.lcm(self.denominator, other.denominator)
        mine = common // self.denominator
        theirs = common // other.denominator
        self.demand_room(2 * mine)
        other.demand_room(2 * theirs)
        return lowest_terms(self.numerators * mine + other.numerators * theirs, common)

    def __mul__(self, factor: Fraction) -> "Weights":
        self.demand_room(abs(factor.numerator))
        return lowest_terms(self.numerators * factor.numerator, self.denominator * factor.denominator)

    def equals(self, other: "Weights") -> bool:
        """Tell whether every atom has the same weights."""
        return self is other or bool((self.numerators * other.denominator == other.numerators * self.denominator).all())

    def demand_room(self, factor: int) -> None:
        """Raise an error if 64 bits may not hold `factor` times the numerators.

        Raises:
            UnsupportedError: 64 bits may not hold them.
        """
        if int(np.abs(self.numerators).max(initial=0)) * factor >= 2**62:
            raise UnsupportedError("the proof's weights outgrow 64 bits; sum less often, or take means")


@dataclass(frozen=True, slots=True, eq=False)
class AtomPlaces:
    """Where in the model the atoms of a buffer lie, on each rank. Ranks that hold the same share one row.

    So slices of a whole world take as much memory as the whole, and the whole on all ranks as much as on one.

    Args:
        rows: Different contents, in the order of the first ranks that have them, `[n_rows, n_atoms]`.
        of_rank: Row of each rank, `[world_size]`.
    """

    rows: NDArray[np.int64]
    of_rank: NDArray[np.int64]

    @classmethod
    def of(cls, rows: NDArray[np.int64], of_rank: NDArray[np.int64]) -> "AtomPlaces":
        """Return the same places with equal rows only once, and all rows in order."""
        known: dict[bytes, int] = {}
        used, first, at = np.unique(of_rank, return_index=True, return_inverse=True)
        order = np.argsort(first)
        numbers = np.empty(len(used), dtype=np.int64)
        for place in order.tolist():
            numbers[place] = known.setdefault(rows[used[place]].tobytes(), len(known))
        _, distinct = np.unique(numbers, return_index=True)
        return cls(rows[used[distinct]], numbers[at])

    @property
    def n_atoms(self) -> int:
        """Number of atoms on each rank."""
        return int(self.rows.shape[1])

    def of_ranks(self) -> NDArray[np.int64]:
        """Return the places of each rank, `[rank, atom]`."""
        return self.rows[self.of_rank]

    def equals(self, other: "AtomPlaces") -> bool:
        """Tell whether every rank has the same places."""
        same_ranks = self is other or np.array_equal(self.of_rank, other.of_rank)
        return same_ranks and (self.rows is other.rows or np.array_equal(self.rows, other.rows))

    def cut(self, first: int, last: int) -> "AtomPlaces":
        """Return the places of some of the atoms."""
        return AtomPlaces.of(self.rows[:, first:last], self.of_rank)

    def in_groups(self, group: Group) -> NDArray[np.int64]:
        """Return the row of each member, `[n_groups, size]`."""
        return np.moveaxis(group.split(self.of_rank), 1, 2).reshape(-1, group.size)

    def sliced(self, group: Group) -> "AtomPlaces":
        """Return on member j the j-th slice of the atoms."""
        shape = group.shape(len(self.of_rank))
        number = group.joined(np.broadcast_to(np.arange(group.size)[:, np.newaxis], shape))
        return AtomPlaces.of(self.rows.reshape(len(self.rows) * group.size, -1), self.of_rank * group.size + number)

    def moved(self, group: Group, move: "Move") -> "AtomPlaces":
        """Return the places after members of groups have exchanged them. Groups that hold the same do so once."""
        members = self.in_groups(group)
        known: dict[bytes, int] = {}  # numpy takes longer to find different rows
        of_group = np.array([known.setdefault(row.tobytes(), len(known)) for row in members])
        _, firsts = np.unique(of_group, return_index=True)
        kinds = members[firsts]
        after = move(self.rows[kinds][:, :, np.newaxis, :, np.newaxis])
        n_blocks, size, stride = shape = group.shape(len(self.of_rank))
        of_blocks = of_group.reshape(n_blocks, 1, stride)
        if after.strides[1] == 0:  # every member has the same
            return AtomPlaces.of(after[:, 0, 0, :, 0], group.joined(np.broadcast_to(of_blocks, shape)))
        number = of_blocks * size + np.arange(size)[:, np.newaxis]
        return AtomPlaces.of(after.reshape(len(kinds) * size, -1), group.joined(number))


@dataclass(frozen=True, slots=True)
class Value:
    """Contents of a buffer on every rank: the places of its atoms in the model, and weights of sources."""

    places: AtomPlaces
    weights: dict[Tag, Weights]

    def has(self, kind: str) -> bool:
        """Tell whether there is a source of that kind, of any age."""
        return any(tag.kind == kind for tag in self.weights)


State: TypeAlias = dict[str, Value]
#: Contents of members before a collective, `[block, member, offset, atom, source]` -> contents after it.
Move: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def joined_atoms(parts: Sequence[AtomPlaces]) -> AtomPlaces:
    """Return the atoms of all parts, one after the other."""
    rows, of_rank = np.unique(np.stack([part.of_rank for part in parts]), axis=1, return_inverse=True)
    pairs = zip(parts, rows, strict=True)
    return AtomPlaces.of(np.concatenate([part.rows[of_part] for part, of_part in pairs], axis=1), of_rank)


def same(found: dict[Tag, Weights], expected: dict[Tag, Weights]) -> bool:
    """Tell whether every atom has the expected weights."""
    return found.keys() == expected.keys() and all(each.equals(expected[tag]) for tag, each in found.items())


def broadcast_to_members(reduced: NDArray[np.int64], view: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give every member the same contents, `[block, member, ...]` from `[block, 1, ...]`."""
    return np.broadcast_to(reduced, view.shape)


def total(view: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give every member the sum over the members."""
    return broadcast_to_members(view.sum(1, keepdims=True), view)


def assembled(parts: Sequence[tuple[slice, Weights]], n_atoms: int) -> Weights:
    """Return the weights of `n_atoms` atoms, given those of some of them. The others are zero."""
    _, first = parts[0]
    is_covered = np.zeros(n_atoms, dtype=bool)
    for atoms, _ in parts:
        is_covered[atoms] = True
    if first.numerators.shape[1] == 1 and is_covered.all() and all(first.equals(part) for _, part in parts[1:]):
        return first
    common = math.lcm(*(part.denominator for _, part in parts))
    n_ranks, _, n_sources = first.numerators.shape
    numerators = np.zeros((n_ranks, n_atoms, n_sources), dtype=np.int64)
    for atoms, part in parts:
        part.demand_room(common // part.denominator)
        numerators[:, atoms] = part.numerators * (common // part.denominator)
    return lowest_terms(numerators, common)


def concatenated(parts: Sequence[Weights], n_atoms: Sequence[int]) -> Weights:
    """Return the atoms of all parts, one after the other, given the number of each."""
    ends = np.cumsum(n_atoms).tolist()
    places = [slice(end - n, end) for end, n in zip(ends, n_atoms, strict=True)]
    return assembled(list(zip(places, parts, strict=True)), ends[-1])


def root_mask(view: NDArray[np.int64], root: int) -> NDArray[np.bool_]:
    """Tell which member is the root, to broadcast with `[block, member, ...]`."""
    return np.reshape(np.arange(view.shape[1]) == root, (1, -1, 1, 1, 1))


def at_root(view: NDArray[np.int64], root: int) -> NDArray[np.int64]:
    """Put the sum over the members at the root. The others keep their contents."""
    return np.where(root_mask(view, root), view.sum(1, keepdims=True), view)


def scatter(view: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum over the members. Member j keeps the j-th slice of the atoms."""
    total = view.sum(1)  # [block, offset, atom, source]
    slices = total.reshape(*total.shape[:2], view.shape[1], -1, total.shape[-1])
    return np.moveaxis(slices, 2, 1)


def gather(view: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the members' atoms. Every member gets them all."""
    blocks, size, stride, atoms, n_sources = view.shape
    whole = np.moveaxis(view, 1, 2).reshape(blocks, 1, stride, size * atoms, n_sources)
    return np.broadcast_to(whole, (blocks, size, stride, size * atoms, n_sources))


def scattered(weights: NDArray[np.int64], n_atoms: int) -> NDArray[np.int64]:
    """Return the weights of members after a reduce-scatter of `n_atoms` atoms."""
    return scatter(weights) if weights.shape[3] == n_atoms else total(weights)


def gathered(weights: NDArray[np.int64], n_atoms: int) -> NDArray[np.int64]:
    """Return the weights of members after an all-gather of `n_atoms` atoms from each."""
    if weights.shape[3] == 1 and (weights == weights[:, :1]).all():
        return weights
    return gather(np.repeat(weights, n_atoms // weights.shape[3], axis=3))


def lowest_terms(numerators: NDArray[np.int64], denominator: int) -> Weights:
    """Return weights in lowest terms."""
    divisor = math.gcd(int(np.gcd.reduce(numerators, axis=None)), denominator)
    return Weights(numerators // divisor, denominator // divisor) if divisor > 1 else Weights(numerators, denominator)


def fraction(number: float) -> Fraction:
    """Return the simple fraction that a float stands for.

    >>> str(fraction(0.1)), str(fraction(1 - 0.9))
    ('1/10', '1/10')
    """
    return Fraction(number).limit_denominator(10**6)


def summed(*terms: tuple[Mapping[Tag, Weights], Fraction]) -> dict[Tag, Weights]:
    """Return a linear combination of the weights of values, without sources that cancel out."""
    weights: dict[Tag, Weights] = {}
    for term, factor in terms:
        for tag, each in term.items():
            part = each if factor == 1 else each * factor
            weights[tag] = weights[tag] + part if tag in weights else part
    return {tag: each for tag, each in weights.items() if each.numerators.any()}


def aged(value: Value, oldest: int) -> Value:
    """Return a value as the next step finds it: every source is a step older, up to a limit."""
    weights: dict[Tag, Weights] = {}
    for tag, each in value.weights.items():
        older = replace(tag, age=min(tag.age + 1, oldest))
        weights[older] = weights[older] + each if older in weights else each
    return Value(value.places, weights)


def digest(state: State) -> bytes:
    """Return a hash of a state. States with the same hash are equal; equal ones may be kept in other ways."""
    digest = hashlib.sha256()
    hashes: dict[int, bytes] = {}  # of places and weights that several buffers hold
    for part in _parts(state, hashes):
        digest.update(part)
    return digest.digest()


def _parts(state: Mapping[str, Value], hashes: dict[int, bytes]) -> Iterator[bytes]:
    for name in sorted(state):
        places = state[name].places
        yield f"{name} {places.rows.shape}".encode()
        if id(places) not in hashes:
            hashes[id(places)] = hashlib.sha256(places.rows.tobytes() + places.of_rank.tobytes()).digest()
        yield hashes[id(places)]
        for tag in sorted(state[name].weights, key=lambda tag: (tag.kind, tag.age, tag.micro_batch)):
            weights = state[name].weights[tag]
            yield f"{name} {tag} {weights.denominator} {weights.numerators.shape}".encode()
            key = id(weights.numerators)
            if key not in hashes:
                hashes[key] = hashlib.sha256(weights.numerators.tobytes()).digest()
            yield hashes[key]


def fraction_text(weights: Weights, rank: int, atom: int, column: int) -> str:
    """Return one weight as text for people."""
    numerator = int(weights.numerators[rank, atom if weights.numerators.shape[1] > 1 else 0, column])
    divisor = math.gcd(numerator, weights.denominator)
    return f"{numerator // divisor}/{weights.denominator // divisor}" if numerator else "nothing"


def tag_text(tag: Tag) -> str:
    """Return the name of a source for people."""
    words = {"param": "parameters", "gradient": "gradient", "kept": "residual"}
    ages = {-1: ", after this step,", 0: "", 1: ", one step old,"}
    of_pass = f" of micro-batch {tag.micro_batch}" if tag.micro_batch else ""
    return (
        words.get(tag.kind, tag.kind)
        + of_pass
        + ages.get(tag.age, f", {'two' if tag.age == 2 else tag.age} or more steps old,")
    )
