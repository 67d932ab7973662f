"""Where in the model the contents of a plan's buffers lie: atoms, and the slices of ranks."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from simdist.plan import Plan, ops
from simdist.plan.group import Group
from simdist.proof.symbols import AtomPlaces, State, Tag, Value, Weights, lowest_terms


class BrokenError(Exception):
    """An operation is wrong; the proof adds its place."""


class AtomLayout:
    """The atoms of each buffer of a plan.

    All tensors between two bounds of buffers are cut into equally many slices: as many as all groups make that cut the
    contents of a buffer, one after the other. A slice is an atom.
    """

    def __init__(self, plan: Plan) -> None:
        self._world_size = plan.world_size
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._n_slices = math.lcm(*(math.prod(group.size for group in cuts) for cuts in _cuts(plan).values()))
        bounds = {bound for buffer in plan.buffers if buffer.tensors for bound in buffer.tensors}
        self._atom_of_tensor = {bound: atom for atom, bound in enumerate(sorted(bounds))}
        self._places_of: dict[str, AtomPlaces] = {}

    def tensors(self, name: str) -> tuple[int, int] | None:
        """Return the range of tensors of a buffer."""
        return self._buffers[name].tensors

    def sharers(self, name: str) -> Group:
        """Return the groups that a buffer is sharded over."""
        return self._buffers[name].sharded_over

    def is_sparse(self, name: str) -> bool:
        """Tell whether a buffer holds some entries only, with their indices."""
        return self._buffers[name].sparse

    def atoms(self, name: str) -> tuple[int, int]:
        """Return the range of atoms of a buffer's tensors."""
        tensors = self._buffers[name].tensors
        if tensors is None:
            return 0, self._n_slices
        first, last = (self._atom_of_tensor[bound] * self._n_slices for bound in tensors)
        return first, last

    def ranges(self, names: Iterable[str]) -> NDArray[np.bool_]:
        """Tell which places of the model lie in the tensors of some buffers."""
        found = np.zeros(len(self._atom_of_tensor) * self._n_slices, dtype=bool)
        for name in names:
            found[slice(*self.atoms(name))] = True
        return found

    def places(self, name: str) -> AtomPlaces:
        """Return the places that a buffer declares: all of its tensors, or the rank's own slice.

        They are the same object for each buffer of the same tensors, so that equal ones need no comparison.
        """
        known = self._places_of.get(name)
        if known is not None:
            return known
        first, last = self.atoms(name)
        group = self._buffers[name].sharded_over
        key = f"{first}:{last} {group}"
        if key not in self._places_of:
            nowhere = np.zeros(self._world_size, dtype=np.int64)
            whole = AtomPlaces(np.arange(first, last)[np.newaxis], nowhere)
            self._places_of[key] = whole if group == ops.ALONE else self._sliced(group, whole)
        self._places_of[name] = self._places_of[key]
        return self._places_of[name]

    def value(self, name: str, weights: dict[Tag, Weights]) -> Value:
        """Return a value in which every atom of a buffer has the same weights."""
        return Value(self.places(name), weights)

    def as_declared(self, name: str, value: Value) -> Value:
        """Return a value with the places that the buffer declares, if it holds these."""
        places = self.places(name)
        return Value(places, value.weights) if value.places.equals(places) else value

    def demand_places(self, name: str, value: Value) -> None:
        """Require that a buffer holds the places that it declares."""
        if not value.places.equals(self.places(name)):
            raise BrokenError(f"{name} holds other tensors, or slices in another order, than it declares")

    def held_places(self, names: Iterable[str], state: State) -> NDArray[np.bool_]:
        """Tell the places of parameters that every rank holds in some buffers, in order."""
        names = list(names)
        for name in names:
            self.demand_places(name, state[name])
            if self._buffers[name].sharded_over != ops.ALONE:
                raise BrokenError(f"reads slices of parameters in {name}; gather them first")
        return self.ranges(names)

    def own_slices(self, group: Group, value: Value) -> Value:
        """Return on member j the j-th slice of the atoms."""
        weights = {
            tag: each
            if each.numerators.shape[1] == 1
            else lowest_terms(self._own_slice(group, each.numerators), each.denominator)
            for tag, each in value.weights.items()
        }
        return Value(self._sliced(group, value.places), weights)

    def _sliced(self, group: Group, places: AtomPlaces) -> AtomPlaces:
        """Return on member j the j-th slice of the places."""
        if places.n_atoms % group.size:
            raise BrokenError(f"shares {places.n_atoms} slices over a {group}; a buffer is cut once over a group")
        return places.sliced(group)

    def _own_slice(self, group: Group, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return on member j the j-th slice of rows `[rank, atom, source]`."""
        shape = group.shape(self._world_size)
        cut = rows.reshape(*shape, group.size, -1, rows.shape[-1])  # [block, member, offset, slice, ...]
        mine = np.stack([cut[:, member, :, member] for member in range(group.size)], axis=1)
        return mine.reshape(len(rows), -1, rows.shape[-1])


def _cuts(plan: Plan) -> dict[str, frozenset[Group]]:
    """Return the groups over which the contents of each buffer have been cut into slices, one after the other."""
    cuts = {buffer.name: frozenset({buffer.sharded_over} - {ops.ALONE}) for buffer in plan.buffers}
    before: dict[str, frozenset[Group]] = {}
    while before != cuts:
        before = dict(cuts)
        for op in plan.distinct_ops:
            if isinstance(op, ops.Forward | ops.Backward):
                continue  # they compute with whole tensors
            found = frozenset[Group]().union(*(cuts[name] for name in ops.reads(op)))
            if isinstance(op, ops.AllGather):
                found -= {op.group}
            elif isinstance(op, ops.ReduceScatter):
                found |= {op.group}
            elif isinstance(op, ops.Optimize) and op.slices:
                found |= {op.shared_by}
            for name in ops.writes(op):
                cuts[name] |= found
    return cuts
