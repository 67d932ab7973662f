"""The flows in flight in a network: their state, in the rows that `max_min` works on.

The rows are lists at first. When finding rates has taken about as long as loading a compiler, they become arrays,
and functions compiled by numba take over. The results have the same bits.
"""

import functools
import hashlib
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np

from simdist.cost.costs import Stage
from simdist.engines.network import max_min

_PATIENCE = 100_000  # users of resources looked at before numba is loaded: about half a second
_NARROW = 16  # up to this many resources they are added one by one: a numpy call has a fixed cost
_REMEMBERED = 4096  # stages kept
_ROOM = 32  # slots and pairs at least
_SLOTS, _PAIRS, _RESOURCES = range(3)


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
    """The resources that a stage uses, and its bytes on each as a share of the most."""

    stage: Stage  # kept so that no other stage gets its id
    most_nbytes: float
    resources: Any
    weights: Any


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
    try:
        version = hashlib.sha256(inspect.getsource(max_min).encode()).hexdigest()[:16]
    except OSError:
        version = ""  # without a source numba keeps nothing
    options: Any = {"_nrt": False}  # nothing is allocated, so no references are counted: that took most of the time
    for name, each in functions.items():
        copy = FunctionType(each.__code__, names, name)
        copy.__qualname__ = f"{name}_{version}"  # numba fails at what it has kept of a source whose classes are gone
        try:
            names[name] = numba.njit(cache=True, **options)(copy)
        except RuntimeError:  # there is no folder for the cache
            names[name] = numba.njit(**options)(copy)
    return names


class Flows:
    """Flows that share resources.

    Flows that join, end or leave, and changes of capacities, count in the rates after the next `advance`.

    Args:
        capacity_Bps: Bytes per second of every resource; inf where unlimited.
        patience: Users of resources to look at before the functions are compiled.
    """

    def __init__(self, capacity_Bps: Sequence[float], *, patience: int = _PATIENCE) -> None:
        self._patience = patience
        self._room = [_ROOM, _ROOM, len(capacity_Bps)]
        self._is_array = False
        self._act_in: Any = None
        if _compiled.cache_info().currsize:
            self._compile()
        self._keep(self._empty())
        self._state.resource_floats[max_min.CAPACITY][:] = list(capacity_Bps)
        for row in (max_min.HEAD, max_min.TAIL):
            self._state.resource_ints[row][:] = [max_min.NONE] * len(capacity_Bps)
        self._use_of: dict[int, _StageUse] = {}  # by id of the stage
        self._flows: list[Flow | None] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # free slots, by number of pairs
        self._n_pairs = 0
        self._joining: list[int] = []
        self._n_joined = 0  # pairs
        self.next_s = math.inf
        """When the next flow starts or ends, or now if rates have to be found again."""

    def _empty(self) -> max_min.FlowState:
        """Return a state without flows, in lists or in two arrays."""
        n_slots, n_pairs, n_resources = self._room
        if not self._is_array:
            return max_min.FlowState(
                _lists(max_min.N_FLOW_FLOATS, n_slots, 0.0),
                _lists(max_min.N_FLOW_INTS, n_slots, 0),
                _lists(max_min.N_PAIR_FLOATS, n_pairs, 0.0),
                _lists(max_min.N_PAIR_INTS, n_pairs, 0),
                _lists(max_min.N_RESOURCE_FLOATS, n_resources, 0.0),
                _lists(max_min.N_RESOURCE_INTS, n_resources, 0),
                [0.0] * max_min.N_TIMES,
                [0] * max_min.N_COUNTS,
            )
        n_floats = max_min.N_FLOW_FLOATS * n_slots + max_min.N_PAIR_FLOATS * n_pairs
        n_ints = max_min.N_FLOW_INTS * n_slots + max_min.N_PAIR_INTS * n_pairs
        self._floats = np.zeros(max_min.N_TIMES + n_floats + max_min.N_RESOURCE_FLOATS * n_resources)
        self._ints = np.zeros(max_min.N_COUNTS + n_ints + max_min.N_RESOURCE_INTS * n_resources, np.int64)
        self._ints[[max_min.SLOTS, max_min.PAIRS, max_min.RESOURCES]] = self._room
        return max_min.state_in(self._floats, self._ints)

    def _keep(self, state: max_min.FlowState) -> None:
        """Use a state from now on, and keep references to the rows that are used most."""
        self._state = state
        self._left = self._quick(state.flow_floats[max_min.LEFT])
        self._rate = self._quick(state.flow_floats[max_min.RATE])
        self._moment_s = self._quick(state.flow_floats[max_min.MOMENT_S])
        self._first = self._quick(state.flow_ints[max_min.FIRST])
        self._n_of = self._quick(state.flow_ints[max_min.N_PAIRS])
        self._heap_at = self._quick(state.flow_ints[max_min.HEAP_AT])
        self._new = self._quick(state.flow_ints[max_min.NEW])
        self._ending = self._quick(state.flow_ints[max_min.ENDING])
        self._weight = self._quick(state.pair_floats[max_min.WEIGHT])
        self._resource = self._quick(state.pair_ints[max_min.RESOURCE])
        self._times = self._quick(state.times)
        self._counts = self._quick(state.counts)

    def _quick(self, row: Any) -> Any:
        """Return a row in a form that gives and takes single numbers quickly."""
        return memoryview(row) if self._is_array else row

    def _compile(self) -> None:
        """Switch to compiled functions and arrays, if there is a compiler."""
        self._act_in = _compiled()["act_in"]
        self._is_array = self._act_in is not max_min.act_in
        self._patience = -1

    @property
    def is_compiled(self) -> bool:
        """Whether compiled functions find the rates."""
        return self._is_array

    def _rebuild(self) -> None:
        """Copy the state into one with the present room."""
        before = self._state
        after = self._empty()
        for rows, new_rows in zip(before[:6], after[:6], strict=True):
            for row, new_row in zip(cast(Any, rows), cast(Any, new_rows), strict=True):
                new_row[: len(row)] = row
        after.times[:] = before.times
        after.counts[:] = before.counts
        after.counts[max_min.SLOTS] = self._room[_SLOTS]
        after.counts[max_min.PAIRS] = self._room[_PAIRS]
        after.counts[max_min.RESOURCES] = self._room[_RESOURCES]
        self._keep(after)

    def use(self, stage: Stage) -> _StageUse:
        """Return the use that a stage makes of resources."""
        use = self._use_of.get(id(stage))
        if use is None:
            if len(self._use_of) >= _REMEMBERED:
                self._use_of.clear()
            use = _used(stage)
            self._use_of[id(stage)] = use
        return use

    def join(self, flow: Flow, start_s: float) -> bool:
        """Add a flow, now or at a time to come. Return whether it has bytes: if not, there is nothing to add."""
        stage = flow.stage
        use = self._use_of.get(id(stage)) or self.use(stage)
        most_nbytes = use.most_nbytes
        if not most_nbytes:
            return False
        resources = use.resources
        weights = use.weights
        n_used = len(resources)
        free = self._free[n_used]
        if free:
            slot = free.pop()
            self._flows[slot] = flow
        else:
            slot = self._new_slot(n_used)
            self._flows.append(flow)
        flow.slot = slot
        self._left[slot] = most_nbytes if flow.left_nbytes is None else flow.left_nbytes
        self._moment_s[slot] = start_s
        at = self._first[slot]
        if n_used <= _NARROW:
            resource_row = self._resource
            weight_row = self._weight
            for resource, weight in zip(resources, weights, strict=True):
                resource_row[at] = resource
                weight_row[at] = weight
                at += 1
        elif not self._is_array:
            self._resource[at : at + n_used] = resources.tolist()
            self._weight[at : at + n_used] = weights.tolist()
        else:
            self._state.pair_ints[max_min.RESOURCE][at : at + n_used] = resources
            self._state.pair_floats[max_min.WEIGHT][at : at + n_used] = weights
        self._joining.append(slot)
        self._n_joined += n_used
        if start_s < self.next_s:
            self.next_s = start_s
        return True

    def _new_slot(self, n_used: int) -> int:
        """Return a slot for flows with this many pairs."""
        slot = len(self._flows)
        first = self._n_pairs
        self._n_pairs += n_used
        if slot >= self._room[_SLOTS] or self._n_pairs > self._room[_PAIRS]:
            self._room[_SLOTS] = max(self._room[_SLOTS], 2 * (slot + 1))
            self._room[_PAIRS] = max(self._room[_PAIRS], 2 * self._n_pairs)
            self._rebuild()
        self._first[slot] = first
        self._n_of[slot] = n_used
        self._heap_at[slot] = max_min.NONE
        return slot

    def advance(self, now_s: float, until_s: float) -> Sequence[Flow]:
        """Go on from now to the next end of flows, but not up to a later time. Remove and return these flows.

        `next_s` is then when they end, or when to go on.
        """
        if self._patience >= 0 and self._counts[max_min.WORK] + self._n_joined > self._patience:
            self._compile()
            if self._is_array:
                self._rebuild()
        at = 0
        for slot in self._joining:
            self._new[at] = slot
            at += 1
        self._counts[max_min.N_NEW] = at
        self._joining.clear()
        times = self._times
        times[max_min.NOW_S] = now_s
        times[max_min.UNTIL_S] = until_s
        n_ending = self._act_in(self._floats, self._ints) if self._is_array else max_min.act(self._state)
        if not n_ending:
            self.next_s = times[max_min.NEXT_S]
            return ()
        self.next_s = times[max_min.NOW_S]
        return self._ended(n_ending)

    def settle(self, now_s: float) -> None:
        """Find the rates from now on."""
        self.advance(now_s, now_s)

    def end_due(self, resource: int, now_s: float, until_s: float) -> list[Flow]:
        """Remove and return the flows on a resource that are due until a time: they end now."""
        n_ending = self._act(max_min.END_DUE, resource, now_s, until_s)
        if n_ending:
            self.next_s = now_s
        return self._ended(n_ending)

    def take_out(self, flow: Flow, now_s: float) -> None:
        """Remove a flow that has started before its end."""
        if flow.slot in self._joining:
            self._joining.remove(flow.slot)
        else:
            self._act(max_min.LEAVE, flow.slot, now_s, now_s)
            self.next_s = now_s
        self._forget(flow.slot)

    def change_capacity(self, resource: int, capacity_Bps: float, now_s: float) -> None:
        """Set the capacity of a resource from now on."""
        self._state.resource_floats[max_min.CAPACITY][resource] = capacity_Bps
        self._act(max_min.CHANGE_CAPACITY, resource, now_s, now_s)
        self.next_s = now_s

    def _act(self, action: int, which: int, now_s: float, until_s: float) -> int:
        """Do another thing than to advance."""
        counts = self._counts
        counts[max_min.ACTION] = action
        counts[max_min.WHICH] = which
        self._times[max_min.NOW_S] = now_s
        self._times[max_min.UNTIL_S] = until_s
        n_ending = self._act_in(self._floats, self._ints) if self._is_array else max_min.act(self._state)
        counts[max_min.ACTION] = max_min.ADVANCE
        return cast(int, n_ending)

    def _ended(self, n_ending: int) -> list[Flow]:
        return [self._forget(self._ending[at]) for at in range(n_ending)]

    def _forget(self, slot: int) -> Flow:
        flow = cast(Flow, self._flows[slot])
        self._flows[slot] = None
        self._free[self._n_of[slot]].append(slot)
        flow.slot = max_min.NONE
        return flow

    def rate_Bps(self, flow: Flow) -> float:
        """Return the rate of a flow since the last `advance`."""
        return float(self._rate[flow.slot])

    def in_flight(self) -> list[Flow]:
        """Return the flows that share resources."""
        waiting = self._state.flow_ints[max_min.IS_WAITING]
        found = enumerate(self._flows)
        return [flow for slot, flow in found if flow and slot not in self._joining and not waiting[slot]]


def _lists(n_rows: int, length: int, zero: Any) -> Any:
    return [[zero] * length for _ in range(n_rows)]


def _used(stage: Stage) -> _StageUse:
    """Return the use that a stage makes of resources."""
    most_nbytes = float(stage.nbytes.max(initial=0.0))
    nbytes = stage.nbytes if stage.together_nbytes is None else stage.together_nbytes
    if len(stage.resources) > _NARROW:
        is_used = nbytes > 0
        return _StageUse(stage, most_nbytes, stage.resources[is_used], nbytes[is_used] / (most_nbytes or 1.0))
    resources = stage.resources.tolist()
    amounts = nbytes.tolist()
    if 0.0 in amounts:
        resources = [each for each, amount in zip(resources, amounts, strict=True) if amount > 0]
        amounts = [amount for amount in amounts if amount > 0]
    return _StageUse(stage, most_nbytes, resources, [amount / most_nbytes for amount in amounts])
