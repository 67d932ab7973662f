"""Many flows that share resources: their state, in the rows that `max_min` works on.

The rows are lists at first. What they cost is counted, and when that is as much as to load a compiler, they become
arrays, and functions that numba has compiled take over; the results have the same bits.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

import numpy as np

from simdist.cost.costs import Stage
from simdist.engines.network import max_min

_PLAIN = 250_000  # pairs of a flow and a resource filled until numba is asked for: about a second
_NARROW = 8  # resources that are taken in one by one: numpy takes longer to begin
_ROOM = 32  # slots, pairs and resources, at least
_N_ROWS = (4, 8, 1, 4, 7, 7)  # of the state, see `max_min`
_SLOTS, _PAIRS, _RESOURCES = range(3)


def nothing() -> None:
    """End as nobody waits for."""


class Flow:
    """A stage in flight.

    Args:
        stage: The stage that flows.
        then: Called when it has ended.
    """

    __slots__ = ("has_zeros", "kind", "left_nbytes", "most_nbytes", "rate_Bps", "resources", "slot", "stage", "then")

    def __init__(self, stage: Stage, then: Callable[[], object]) -> None:
        self.stage = stage
        self.then = then
        self.resources: list[int] = stage.resources.tolist()
        nbytes: list[float] = stage.nbytes.tolist()
        self.most_nbytes = self.left_nbytes = max(nbytes, default=0.0)
        self.has_zeros = 0.0 in nbytes
        self.rate_Bps = 0.0
        self.kind = -1  # number of the stage, among few
        self.slot = max_min.NONE  # among many


@functools.cache
def _compiled() -> dict[str, Any]:
    """Return the functions of `max_min`, compiled, by name; as they are where numba cannot be imported."""
    found = {name: each for name, each in vars(max_min).items() if isinstance(each, FunctionType)}
    functions = {name: each for name, each in found.items() if each.__module__ == max_min.__name__}
    try:
        import numba
    except ImportError:
        text = "numba is not installed, so many flows at a time take longer to simulate"
        warnings.warn(f"{text}: pip install 'simdist-training[fast]'", RuntimeWarning, stacklevel=2)
        return functions
    names = dict(vars(max_min))  # in which they call each other
    for name, each in functions.items():
        copy = FunctionType(each.__code__, names, name)
        try:
            names[name] = numba.njit(cache=True)(copy)
        except RuntimeError:  # there is no folder to keep it in
            names[name] = numba.njit(copy)
    return names


class Kernel:
    """The functions that recompute rates, plain until that has cost as much as to load the compiled ones."""

    __slots__ = ("change_capacities", "is_compiled", "n_filled", "settle")

    def __init__(self, *, n_filled: int = 0) -> None:
        self.n_filled = n_filled
        self.is_compiled = False
        self.settle = max_min.settle
        self.change_capacities = max_min.change_capacities

    def count(self, n_pairs: int) -> None:
        """Count the pairs that are filled next."""
        self.n_filled += n_pairs
        if not self.is_compiled and (self.n_filled > _PLAIN or _compiled.cache_info().currsize):
            self.settle = _compiled()["settle"]
            self.change_capacities = _compiled()["change_capacities"]
            self.is_compiled = self.settle is not max_min.settle


class ManyFlows:
    """Flows that share resources.

    Flows that join or end take part in, or are missing from, the rates as soon as `settle` is called.

    Args:
        capacity_Bps: Bytes per second of every resource; inf where unlimited.
        now_s: Now.
        kernel: What recomputes rates.
    """

    def __init__(self, capacity_Bps: Sequence[float], now_s: float, kernel: Kernel) -> None:
        self._capacity_Bps = capacity_Bps
        self._settled_s = now_s
        self._kernel = kernel
        self._room = [_ROOM, _ROOM, _ROOM]
        self._is_array = kernel.is_compiled
        rows: list[Any] = [self._rows(n, at % 2 == 0, _ROOM) for at, n in enumerate(_N_ROWS)]
        rows.extend(self._rows(1, False, 4))  # counts
        self._state = max_min.State(*rows)
        self._find_rows()
        self._clear_resources(0)
        self._flows: list[Flow | None] = []
        self._free: list[int] = []
        self._added: list[int] = []
        self._leaving: list[int] = []
        self._n_pairs = 0  # those of flows that have left included
        self._has_changed = False
        self._number_of = np.full(len(capacity_Bps), max_min.NONE)
        self._used: set[int] = set()  # those that have a number
        self._n_numbers = 0
        self.n_joined = 0

    def _rows(self, n_rows: int, is_float: bool, length: int) -> Any:
        if self._is_array:
            return np.zeros((n_rows, length), np.float64 if is_float else np.int64)
        return [[0.0 if is_float else 0] * length for _ in range(n_rows)]

    def _find_rows(self) -> None:
        """Have at hand the rows that are used most."""
        self._left, self._rate, *_ = self._state.flow_floats
        self._first, self._n_of, *_, self._added_row, self._leaving_row, self._ending_row, _ = self._state.flow_ints
        self._weight = self._state.pair_floats[max_min.WEIGHT]
        self._resource = self._state.pair_ints[max_min.RESOURCE]

    def __len__(self) -> int:
        return len(self._flows) - len(self._free)

    def join(self, flow: Flow) -> None:
        """Take in a flow that has `left_nbytes` left; where it has no bytes, or no limit, nothing is shared."""
        if self._free:
            slot = self._free.pop()
            self._flows[slot] = flow
        else:
            slot = len(self._flows)
            self._flows.append(flow)
            self._make_room(_SLOTS, slot + 1)
        flow.slot = slot
        first = self._n_pairs
        n_used = len(flow.resources)
        if first + n_used > self._room[_PAIRS]:
            self._make_room(_PAIRS, first + n_used)
        self._added.append(slot)
        self.n_joined += 1
        self._left[slot] = flow.left_nbytes
        self._first[slot] = first
        resources = flow.stage.resources
        nbytes = flow.stage.nbytes
        weights: Any = nbytes / (flow.most_nbytes or 1.0)
        if n_used <= _NARROW and not flow.has_zeros and self._used.issuperset(flow.resources):
            number_of = self._number_of
            resource_row = self._resource
            weight_row = self._weight
            for at, weight in enumerate(weights.tolist()):
                resource_row[first + at] = number_of[flow.resources[at]]
                weight_row[first + at] = weight
            self._n_pairs = first + n_used
            self._n_of[slot] = n_used
            return
        numbers: Any = self._number_of[resources]
        if flow.has_zeros or max_min.NONE in numbers.tolist():
            self._number(resources[numbers == max_min.NONE].tolist())
            numbers = self._number_of[resources]
            used = (numbers != max_min.NONE) & (nbytes > 0)
            numbers = numbers[used]
            weights = weights[used]
        self._n_pairs = end = first + len(numbers)
        if not self._is_array:
            numbers = numbers.tolist()
            weights = weights.tolist()
        self._resource[first:end] = numbers
        self._weight[first:end] = weights
        self._n_of[slot] = len(numbers)

    def _number(self, resources: list[int]) -> None:
        """Number resources that were not used before, unless they are unlimited."""
        self._make_room(_RESOURCES, self._n_numbers + len(resources))
        capacities_Bps = self._state.resource_floats[max_min.CAPACITY]
        for resource in resources:
            if self._capacity_Bps[resource] < math.inf:
                self._number_of[resource] = self._n_numbers
                self._used.add(resource)
                capacities_Bps[self._n_numbers] = self._capacity_Bps[resource]
                self._n_numbers += 1

    def _make_room(self, what: int, n: int) -> None:
        """Make room for so many slots, pairs or resources, and more."""
        if n <= self._room[what]:
            return
        more = 2 * n - self._room[what]
        self._room[what] += more
        state: list[Any] = list(self._state)
        for at in (2 * what, 2 * what + 1):
            added = self._rows(_N_ROWS[at], at % 2 == 0, more)
            if self._is_array:
                state[at] = np.concatenate([state[at], added], axis=1)
            else:
                state[at] = [row + more_of_it for row, more_of_it in zip(state[at], added, strict=True)]
        self._state = max_min.State(*state)
        self._find_rows()
        if what == _RESOURCES:
            self._clear_resources(self._room[what] - more)

    def _clear_resources(self, first: int) -> None:
        """Let nobody use the resources from a number on."""
        for row in (max_min.HEAD, max_min.TAIL, max_min.PLACE):
            self._state.resource_ints[row][first:] = [max_min.NONE] * (self._room[_RESOURCES] - first)

    def change_capacity(self, resource: int, capacity_Bps: float) -> None:
        """Let a resource have another capacity from now on."""
        number = self._number_of[resource]
        if number != max_min.NONE:
            self._state.resource_floats[max_min.CAPACITY][number] = capacity_Bps
            self._has_changed = True

    def take_out(self, flow: Flow) -> None:
        """Let a flow leave."""
        self._leaving.append(flow.slot)

    def end(self) -> list[Flow]:
        """Take out the flows that end now, which is the time that `settle` said last."""
        ended = [int(self._ending_row[at]) for at in range(self._state.counts[max_min.N_ENDING])]
        self._leaving += ended
        return [cast(Flow, self._flows[slot]) for slot in ended]

    def n_staying(self) -> int:
        """Return how many flows are left when those are gone that leave."""
        return len(self) - len(self._leaving)

    def leave(self, now_s: float) -> list[Flow]:
        """Return all flows, with the bytes they have left now. Nothing else may be asked of it afterwards."""
        left = self._left
        rate = self._rate
        elapsed_s = now_s - self._settled_s
        gone = {*self._leaving, *self._free}
        added = {*self._added}
        staying = [(slot, flow) for slot, flow in enumerate(self._flows) if flow is not None and slot not in gone]
        for slot, flow in staying:
            if slot not in added and elapsed_s > 0:
                flow.left_nbytes = max(float(left[slot] - rate[slot] * elapsed_s), 0.0)
            elif slot not in added:
                flow.left_nbytes = float(left[slot])
        return [flow for _, flow in staying]

    def rate_Bps(self, flow: Flow) -> float:
        """Return the rate of a flow since the last `settle`."""
        return float(self._rate[flow.slot])

    def solve(self, flows: Sequence[Flow]) -> list[float]:
        """Return the max-min fair rates of flows that flow nowhere else; nobody else is here then, or was before."""
        if self._flows:
            self._leaving = list(range(len(self._flows)))
            self.settle(0.0)
            # as new, but for the numbers of resources
            self._flows = []
            self._free = []
            self._n_pairs = 0
        for flow in flows:
            self.join(flow)
        self.settle(0.0)
        return [float(self._rate[flow.slot]) for flow in flows]

    def settle(self, now_s: float) -> float:
        """Let all flow at max-min fair rates from now on; return when the next of them ends."""
        if not self._kernel.is_compiled and self._flows:
            self._kernel.count(self._n_pairs * len(self) // len(self._flows))
        if self._kernel.is_compiled and not self._is_array:
            self._state = max_min.State(*(cast(Any, np.array(rows)) for rows in self._state))
            self._is_array = True
            self._find_rows()
        if self._has_changed:
            self._has_changed = False
            self._kernel.change_capacities(self._n_numbers, self._state)
        for at, slot in enumerate(self._added):  # one by one: usually there is one
            self._added_row[at] = slot
        for at, slot in enumerate(self._leaving):
            self._leaving_row[at] = slot
            self._flows[slot] = None
        self._state.counts[max_min.N_SLOTS] = len(self._flows)
        next_s = self._kernel.settle(now_s - self._settled_s, len(self._leaving), len(self._added), *self._state)
        self._free += self._leaving
        self._leaving = []
        self._added = []
        self._settled_s = now_s
        return now_s + next_s
