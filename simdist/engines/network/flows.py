"""The flows in flight in a network: their state, in the rows that `max_min` works on.

The rows are lists at first. When filling them has taken about as long as loading a compiler, they become arrays, and
functions compiled by numba take over. The results have the same bits.
"""

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np

from simdist.cost.costs import Stage
from simdist.engines.network import max_min

_PATIENCE = 100_000  # pairs of a flow and a resource filled before numba is loaded: about half a second
_NARROW = 8  # up to this many resources they are added one by one: a numpy call has a fixed cost
_BULK = 32  # from this many flows that join together, they are sorted first
_REMEMBERED = 4096  # stages kept
_ROOM = 32  # slots, pairs and components at least
_SLOTS, _PAIRS, _RESOURCES, _COMPONENTS = range(4)
_N_FLOATS = (4, 1, 7, 3)  # rows of the state, see `max_min`
_N_INTS = (10, 4, 9, 11)
_N_COUNTS = 5


def nothing() -> None:
    """Do nothing at the end of a flow that no process waits for."""


class Flow:
    """A stage in flight.

    Args:
        stage: The stage that flows.
        then: Called when it has ended.
        left_nbytes: Bytes left on its most used resource. All of them if left out; inf for a flow without an end.
    """

    __slots__ = ("left_nbytes", "slot", "stage", "then")

    def __init__(self, stage: Stage, then: Callable[[], object], left_nbytes: float | None = None) -> None:
        self.stage = stage
        self.then = then
        self.left_nbytes = left_nbytes
        self.slot = max_min.NONE


class _StageUse(NamedTuple):
    """The bytes of a stage on each resource that it uses, as arrays, and as lists for the code that needs lists."""

    stage: Stage  # kept so that no other stage gets its id
    most_nbytes: float
    resources: list[int]
    weights: list[float]
    resource_array: Any
    weight_array: Any


@functools.cache
def _compiled() -> dict[str, Any]:
    """Return the functions of `max_min` by name, compiled; uncompiled if numba cannot be imported."""
    found = {name: each for name, each in vars(max_min).items() if isinstance(each, FunctionType)}
    functions = {name: each for name, each in found.items() if each.__module__ == max_min.__name__}
    try:
        import numba
    except ImportError:
        text = "numba is not installed, so many flows at a time take longer to simulate"
        warnings.warn(f"{text}: pip install 'simdist-training[fast]'", RuntimeWarning, stacklevel=2)
        return functions
    names = dict(vars(max_min))  # the namespace in which they call each other
    for name, each in functions.items():
        copy = FunctionType(each.__code__, names, name)
        try:
            names[name] = numba.njit(cache=True)(copy)
        except RuntimeError:  # there is no folder for the cache
            names[name] = numba.njit(copy)
    return names


class Flows:
    """Flows that share resources.

    Flows that join count in the rates after the next `settle`. Flows that have ended or left count no longer.

    Args:
        capacity_Bps: Bytes per second of every resource; inf where unlimited.
        patience: Pairs of a flow and a resource to fill before the functions are compiled.
    """

    def __init__(self, capacity_Bps: Sequence[float], *, patience: int = _PATIENCE) -> None:
        self._patience = patience
        self._room = [_ROOM, _ROOM, len(capacity_Bps), _ROOM]
        self._is_array = False
        self._act: Any = max_min.act
        if _compiled.cache_info().currsize:
            self._compile()
        rows: list[Any] = []
        for what in range(4):
            rows.append(self._rows(_N_FLOATS[what], self._room[what], 0.0))
            rows.append(self._rows(_N_INTS[what], self._room[what], 0))
        rows.append(self._rows(1, _N_COUNTS, 0)[0])
        self._state = max_min.State(*rows)
        self._state.resource_floats[max_min.CAPACITY][:] = list(capacity_Bps)
        for row in (max_min.HEAD, max_min.TAIL):
            self._state.resource_ints[row][:] = [max_min.NONE] * len(capacity_Bps)
        self._find_rows()
        self._use_of: dict[int, _StageUse] = {}  # by id of the stage
        self._flows: list[Flow | None] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # free slots, by number of pairs
        self._n_pairs = 0
        self._joining: list[int] = []
        self._n_joined = 0  # pairs

    def _rows(self, n_rows: int, length: int, zero: float) -> Any:
        """Return rows of zeros: floats for 0.0, integers for 0."""
        if self._is_array:
            return np.zeros((n_rows, length), type(zero))
        return [[zero] * length for _ in range(n_rows)]

    def _find_rows(self) -> None:
        """Keep references to the rows that are used most."""
        state = self._state
        self._left = state.flow_floats[max_min.LEFT]
        self._rate = state.flow_floats[max_min.RATE]
        self._first = state.flow_ints[max_min.FIRST]
        self._n_of = state.flow_ints[max_min.N_PAIRS]
        self._joining_row = state.flow_ints[max_min.JOINING]
        self._ending_row = state.flow_ints[max_min.ENDING]
        self._weight = state.pair_floats[max_min.WEIGHT]
        self._resource = state.pair_ints[max_min.RESOURCE]
        self._changed = state.component_ints[max_min.CHANGED]
        self.next_end_s = state.component_floats[max_min.NEXT_END_S]
        """When the first flows of each component end."""

    def _compile(self) -> None:
        """Switch to compiled functions and arrays, if there is a compiler."""
        self._act = _compiled()["act"]
        self._is_array = self._act is not max_min.act
        self._patience = -1

    @property
    def is_compiled(self) -> bool:
        """Whether compiled functions recompute rates."""
        return self._is_array

    def _make_room(self, what: int, n: int) -> None:
        """Make room for at least `n` slots, pairs or components."""
        more = 2 * n - self._room[what]
        self._room[what] += more
        state: list[Any] = list(self._state)
        for at in (2 * what, 2 * what + 1):
            added = self._rows(len(state[at]), more, 0 if at % 2 else 0.0)
            if self._is_array:
                state[at] = np.concatenate([state[at], added], axis=1)
            else:
                state[at] = [row + more_of_it for row, more_of_it in zip(state[at], added, strict=True)]
        self._state = max_min.State(*state)
        self._find_rows()

    def use(self, stage: Stage) -> _StageUse:
        """Return the use that a stage makes of resources."""
        use = self._use_of.get(id(stage))
        if use is None:
            if len(self._use_of) >= _REMEMBERED:
                self._use_of.clear()
            resources = stage.resources
            most_nbytes = float(stage.nbytes.max(initial=0.0))
            nbytes = stage.nbytes if stage.together_nbytes is None else stage.together_nbytes
            if not nbytes.all():
                resources = resources[nbytes > 0]
                nbytes = nbytes[nbytes > 0]
            weights = nbytes / (most_nbytes or 1.0)
            is_listed = len(weights) <= _NARROW or not self._is_array
            listed_resources = resources.tolist() if is_listed else []
            listed_weights = weights.tolist() if is_listed else []
            use = _StageUse(stage, most_nbytes, listed_resources, listed_weights, resources, weights)
            self._use_of[id(stage)] = use
        return use

    def join(self, flow: Flow) -> None:
        """Add a flow."""
        _, most_nbytes, resources, weights, resource_array, weight_array = self.use(flow.stage)
        n_used = len(resource_array)
        free = self._free[n_used]
        if free:
            slot = free.pop()
            first = int(self._first[slot])
            self._flows[slot] = flow
        else:
            slot = len(self._flows)
            first = self._n_pairs
            self._n_pairs += n_used
            if slot >= self._room[_SLOTS]:
                self._make_room(_SLOTS, slot + 1)
                self._make_room(_COMPONENTS, slot + 1)
            if self._n_pairs > self._room[_PAIRS]:
                self._make_room(_PAIRS, self._n_pairs)
            self._flows.append(flow)
            self._first[slot] = first
            self._n_of[slot] = n_used
        flow.slot = slot
        self._n_joined += n_used
        self._left[slot] = most_nbytes if flow.left_nbytes is None else flow.left_nbytes
        if not self._is_array:
            self._resource[first : first + n_used] = resources
            self._weight[first : first + n_used] = weights
        elif n_used <= _NARROW:
            resource_row = self._resource
            weight_row = self._weight
            for at, weight in enumerate(weights, first):
                weight_row[at] = weight
                resource_row[at] = resources[at - first]
        else:
            self._resource[first : first + n_used] = resource_array
            self._weight[first : first + n_used] = weight_array
        self._joining.append(slot)

    def take_out(self, flow: Flow, now_s: float) -> None:
        """Remove a flow before its end."""
        self._act(max_min.LEAVE, flow.slot, now_s, *self._state)
        self._forget(flow.slot)

    def end(self, component: int, now_s: float) -> list[Flow]:
        """Remove and return the flows of a component that end now."""
        n_ending = self._act(max_min.END, component, now_s, *self._state)
        slots = [int(self._ending_row[at]) for at in range(n_ending)]
        return [self._forget(slot) for slot in slots]

    def _forget(self, slot: int) -> Flow:
        flow = cast(Flow, self._flows[slot])
        self._flows[slot] = None
        self._free[int(self._n_of[slot])].append(slot)
        flow.slot = max_min.NONE
        return flow

    def change_capacity(self, resource: int, capacity_Bps: float, now_s: float) -> None:
        """Set the capacity of a resource from now on."""
        self._state.resource_floats[max_min.CAPACITY][resource] = capacity_Bps
        self._act(max_min.CHANGE_CAPACITY, resource, now_s, *self._state)

    def settle(self, now_s: float) -> list[int]:
        """Recompute rates where flows joined or left, or capacities changed. Return the components recomputed."""
        if self._patience >= 0 and self._state.counts[max_min.WORK] + self._n_joined > self._patience:
            self._compile()
            if self._is_array:
                self._state = max_min.State(*(cast(Any, np.array(rows)) for rows in self._state))
                self._find_rows()
        joining = self._joining
        if len(joining) > _BULK:
            self._sort(joining)
        joining_row = self._joining_row
        for at, slot in enumerate(joining):
            joining_row[at] = slot
        n_changed = self._act(max_min.SETTLE, len(joining), now_s, *self._state)
        joining.clear()
        changed = self._changed
        return [int(changed[at]) for at in range(n_changed)]

    def _sort(self, joining: list[int]) -> None:
        """Sort flows by pace. Each is then inserted directly behind the one before it."""
        capacity_Bps = np.array(self._state.resource_floats[max_min.CAPACITY])
        uses = [self.use(cast(Flow, self._flows[slot]).stage) for slot in joining]
        alone_Bps = capacity_Bps[np.concatenate([use.resource_array for use in uses])]
        alone_Bps = alone_Bps / np.concatenate([use.weight_array for use in uses])
        firsts = np.cumsum([0, *(len(use.weight_array) for use in uses[:-1])])
        order = np.argsort(np.minimum.reduceat(alone_Bps, firsts), kind="stable")
        joining[:] = [joining[at] for at in order.tolist()]

    def rate_Bps(self, flow: Flow) -> float:
        """Return the rate of a flow since the last `settle`."""
        return float(self._rate[flow.slot])

    def component_on(self, resource: int) -> int | None:
        """Return the component that uses a resource, if there is one."""
        head = self._state.resource_ints[max_min.HEAD][resource]
        if head == max_min.NONE:
            return None
        flow = self._state.pair_ints[max_min.FLOW][head]
        return int(self._state.flow_ints[max_min.COMPONENT][flow])

    def in_flight(self) -> dict[int, list[Flow]]:
        """Return the flows of every component."""
        found: defaultdict[int, list[Flow]] = defaultdict(list)
        for slot, flow in enumerate(self._flows):
            if flow is not None and slot not in self._joining:
                found[int(self._state.flow_ints[max_min.COMPONENT][slot])].append(flow)
        return found
