"""Max-min fair rates by progressive filling, on flat arrays: the same source runs in Python and compiled.

A stage i of a transfer that flows at x[i] bytes per second on its most used resource takes a[r, i] x[i] of resource r,

    a[r, i] = nbytes_i[r] / max(nbytes_i),    0 < a <= 1 on the resources it uses, 0 elsewhere.

Rates are *feasible* if sum_i a[r, i] x[i] <= c[r] for every resource r. They are *max-min fair* if they are feasible
and no flow can be faster unless a flow that is no faster becomes slower: for every feasible y with y[i] > x[i] there is
a j with x[j] <= x[i] and y[j] < x[j].

r is a *bottleneck* of i if i uses it, it is full, and no flow on it is faster than i: x[j] <= x[i] for all j with
a[r, j] > 0. Feasible rates are max-min fair if and only if every flow has a bottleneck:

    if       Let r be a bottleneck of i, y feasible, y[i] > x[i]. On r, the sum of y is at most c[r], and that of x
             is c[r]. So some j on r has y[j] < x[j], and x[j] <= x[i].
    only if  Suppose i has no bottleneck: every resource of i has room, or is full and carries a faster flow. Raise x[i]
             a little, and lower the faster flows by the same load. They are still faster than i. So x was not max-min
             fair.

There is only one such x. Suppose y is another. Of all i with x[i] != y[i], take the one with the least min(x[i], y[i]),
say x[i] < y[i]. Then some j has y[j] < x[j] <= x[i]. Its minimum is smaller: a contradiction.

Progressive filling finds x: raise all rates together. When resources are full, stop every flow on them and continue
with the rest. A flow that stops on r has its bottleneck in r: the other flows on r stopped before, at lower rates, or
stop now. The *level* of r is the rate at which it is full. Levels are found in rising order.

Two shortcuts skip work:

    paces    A flow is never faster than its pace, the rate that it has alone: min over r of c[r] / a[r, i]. Resources
             that only this flow uses stop it there.
    hubs     A resource that can carry all its users at their paces never stops them. Each other resource with several
             users is a hub.

**Changes are local.** When flows join or leave, or capacities change, only some rates change. A flow keeps its rate as
long as its bottleneck keeps its level. So filling begins at the hubs of the flows that joined, and at the bottlenecks
that flows left. On each hub that is filled again,

    rising   are the flows with this bottleneck, and those that joined: their other hubs are filled again, too;
    capped   are the other flows, at their old rates: their own bottlenecks stop them there;
    stopped  are flows that have their new rate.

If a hub is full below the rate of a capped flow, that flow can no longer keep its rate. It rises, too, and its old
bottleneck is filled again. The old bottleneck was not full at any lower level, so filling can go on at this level. When
no hub is left that stops a rising flow, every flow has a bottleneck, and the rates are those of all flows filled from
the beginning.

A flow moves its bytes when its rate changes. A heap has the moment at which each flow starts or ends.

State lies in rows, lists or arrays, that the functions below change in place: a float `[n_slots]` of a flow is
`state.flow_floats[LEFT]`, and so on. Flows have slots. The pairs of a flow with its resources are contiguous. Every
resource has a doubly linked list of the pairs that use it, in order of arrival. No function allocates, raises or calls
anything but the functions above it, so numba can compile them. It compiles without fast math, so rates and times have
the same bits with and without numba.

Source:
    Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2: the definition, bottlenecks and progressive filling,
    there with a[r, i] = 0 or 1.
"""

import math
from typing import Any, NamedTuple, TypeAlias

_INF = math.inf  # numba parses float("inf") each time
_SAME = 1e-12  # rates within this share of each other are the same
_MANY = 4  # flows in the heap for each that gets another rate: up to here, all are put in order at once
_NEARLY = 1.0 - 1e-9  # of its capacity: a resource that carries at most this share stops no flow
TOGETHER = 1e-12  # flows that meet end together if they are due within this share of the time since a change of rate

# Floats of a flow: bytes left at the last change of its rate, its rate, the rate being found, the rate that it has
# alone, when its rate changed, and when it starts or ends
LEFT, RATE, NEXT_RATE, PACE, SETTLED_S, MOMENT_S = range(6)
# Integers of a flow. The last four are lists of flows.
FIRST, N_PAIRS, N_HUBS, STATUS, BOTTLENECK, IS_WAITING, SEQUENCE, HEAP_AT, HEAP, NEW, ENDING, ACTIVE = range(12)
WEIGHT = 0  # float of a pair
RESOURCE, FLOW, NEXT, PREVIOUS = range(4)  # integers of a pair
CAPACITY, DEMAND, LEVEL = range(3)  # floats of a resource
# Integers of a resource. The last two are lists of resources.
HEAD, TAIL, N_USERS, N_GONE, IS_HUB, N_RISING, SUMS, IS_SETTLED, MARK, CHANGE, TOUCHED, CHANGED = range(12)
NOW_S, UNTIL_S, NEXT_S = range(3)  # times
# Counts: what to do and to which, rows' lengths, members of lists, work so far
ACTION, WHICH, SLOTS, PAIRS, RESOURCES, N_HEAP, N_NEW, N_ACTIVE, N_TOUCHED, N_CHANGED, N_SEQUENCE, WORK = range(12)
N_FLOW_FLOATS = 6  # rows
N_FLOW_INTS = 12
N_PAIR_FLOATS = 1
N_PAIR_INTS = 4
N_RESOURCE_FLOATS = 3
N_RESOURCE_INTS = 12
N_TIMES = 3
N_COUNTS = 12

NONE = -1
UNTOUCHED, CAPPED, RISING, STOPPED = range(4)  # `STATUS` of a flow while rates are found
ABSENT, SUMMED, LOW, UNKNOWN = range(4)  # `SUMS` of a hub while rates are found. `LOW`: its level is at least `LEVEL`
UNCHANGED, LEFT_BY_FLOWS, RESIZED = range(3)  # `CHANGE` of a resource since rates were found
ADVANCE, END_DUE, LEAVE, CHANGE_CAPACITY = range(4)  # what `act` does

_Floats: TypeAlias = list[list[float]]
_Ints: TypeAlias = list[list[int]]


class FlowState(NamedTuple):
    """Rows of the same length, as lists or a two-dimensional array, for flows, pairs and resources.

    Args:
        flow_floats: Of every slot of a flow, by `LEFT` to `MOMENT_S`.
        flow_ints: Likewise, by `FIRST` to `ACTIVE`.
        pair_floats: Of every pair of a flow and a resource, by `WEIGHT`.
        pair_ints: Likewise, by `RESOURCE` to `PREVIOUS`.
        resource_floats: Of every resource, by `CAPACITY` to `LEVEL`.
        resource_ints: Likewise, by `HEAD` to `CHANGED`.
        times: By `NOW_S` to `NEXT_S`.
        counts: By `ACTION` to `WORK`.
    """

    flow_floats: _Floats
    flow_ints: _Ints
    pair_floats: _Floats
    pair_ints: _Ints
    resource_floats: _Floats
    resource_ints: _Ints
    times: list[float]
    counts: list[int]


def _is_before(one: int, other: int, state: FlowState) -> bool:
    """Return whether the moment of a flow comes before that of another, or it came first."""
    one_s = state.flow_floats[MOMENT_S][one]
    other_s = state.flow_floats[MOMENT_S][other]
    if one_s == other_s:
        return state.flow_ints[SEQUENCE][one] < state.flow_ints[SEQUENCE][other]
    return one_s < other_s


def _move_up(flow: int, at: int, state: FlowState) -> int:
    """Move a flow towards the top of the heap, from a place. Return its new place."""
    heap = state.flow_ints[HEAP]
    place = state.flow_ints[HEAP_AT]
    while at > 0:
        parent = (at - 1) // 2
        other = heap[parent]
        if not _is_before(flow, other, state):
            break
        heap[at] = other
        place[other] = at
        at = parent
    heap[at] = flow
    place[flow] = at
    return at


def _move_down(flow: int, at: int, state: FlowState) -> None:
    """Move a flow away from the top of the heap, from a place."""
    heap = state.flow_ints[HEAP]
    place = state.flow_ints[HEAP_AT]
    n = state.counts[N_HEAP]
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        if child + 1 < n and _is_before(heap[child + 1], heap[child], state):
            child += 1
        other = heap[child]
        if not _is_before(other, flow, state):
            break
        heap[at] = other
        place[other] = at
        at = child
    heap[at] = flow
    place[flow] = at


def _take_from_heap(flow: int, state: FlowState) -> None:
    """Take a flow out of the heap, if it is there."""
    at = state.flow_ints[HEAP_AT][flow]
    if at == NONE:
        return
    state.flow_ints[HEAP_AT][flow] = NONE
    state.counts[N_HEAP] -= 1
    last = state.flow_ints[HEAP][state.counts[N_HEAP]]
    if last != flow:
        _move_down(last, _move_up(last, at, state), state)


def _set_moment(flow: int, at_s: float, state: FlowState) -> None:
    """Set when a flow starts or ends. A flow without such a moment is not in the heap."""
    if not at_s < _INF:
        _take_from_heap(flow, state)
        return
    at = state.flow_ints[HEAP_AT][flow]
    if at == NONE:
        state.flow_floats[MOMENT_S][flow] = at_s
        state.counts[N_HEAP] += 1
        _move_up(flow, state.counts[N_HEAP] - 1, state)
        return
    is_sooner = at_s < state.flow_floats[MOMENT_S][flow]
    state.flow_floats[MOMENT_S][flow] = at_s
    if is_sooner:
        _move_up(flow, at, state)
    else:
        _move_down(flow, at, state)


def _order_heap(state: FlowState) -> None:
    """Put the heap in order, whatever the moments in it."""
    heap = state.flow_ints[HEAP]
    for number in range(state.counts[N_HEAP] // 2):
        at = state.counts[N_HEAP] // 2 - 1 - number
        _move_down(heap[at], at, state)


def _note_change(resource: int, change: int, state: FlowState) -> None:
    """Add a resource to those that flows have left, or that have another capacity."""
    if state.resource_ints[CHANGE][resource] == UNCHANGED:
        state.resource_ints[CHANGED][state.counts[N_CHANGED]] = resource
        state.counts[N_CHANGED] += 1
    state.resource_ints[CHANGE][resource] = max(change, state.resource_ints[CHANGE][resource])


def _exchange(row: list[Any], one: int, other: int) -> None:
    """Exchange two numbers of a row."""
    number = row[one]
    row[one] = row[other]
    row[other] = number


def _swap(one: int, other: int, state: FlowState) -> None:
    """Let two pairs of a flow change places."""
    if one == other:
        return
    following = state.pair_ints[NEXT]
    previous = state.pair_ints[PREVIOUS]
    resource_of = state.pair_ints[RESOURCE]
    _exchange(resource_of, one, other)
    _exchange(state.pair_floats[WEIGHT], one, other)
    _exchange(following, one, other)
    _exchange(previous, one, other)
    for pair in (one, other):
        if previous[pair] == NONE:
            state.resource_ints[HEAD][resource_of[pair]] = pair
        else:
            following[previous[pair]] = pair
        if following[pair] == NONE:
            state.resource_ints[TAIL][resource_of[pair]] = pair
        else:
            previous[following[pair]] = pair


def _place_hub(resource: int, state: FlowState) -> None:
    """Make a resource a hub if it may stop its users. Each flow has its pairs with hubs first."""
    may_fill = state.resource_floats[DEMAND][resource] > state.resource_floats[CAPACITY][resource] * _NEARLY
    is_hub = 1 if may_fill and state.resource_ints[N_USERS][resource] > 1 else 0
    if is_hub == state.resource_ints[IS_HUB][resource]:
        return
    state.resource_ints[IS_HUB][resource] = is_hub
    first = state.flow_ints[FIRST]
    n_hubs = state.flow_ints[N_HUBS]
    pair = state.resource_ints[HEAD][resource]
    while pair != NONE:
        flow = state.pair_ints[FLOW][pair]
        if not is_hub:
            n_hubs[flow] -= 1
        place = first[flow] + n_hubs[flow]
        _swap(pair, place, state)
        if is_hub:
            n_hubs[flow] += 1
        pair = state.pair_ints[NEXT][place]


def _sum_demand(resource: int, state: FlowState) -> None:
    """Sum what the users of a resource take at their paces."""
    pace = state.flow_floats[PACE]
    weight = state.pair_floats[WEIGHT]
    demand = 0.0
    pair = state.resource_ints[HEAD][resource]
    while pair != NONE:
        demand += weight[pair] * pace[state.pair_ints[FLOW][pair]]
        pair = state.pair_ints[NEXT][pair]
    state.resource_floats[DEMAND][resource] = demand
    state.resource_ints[N_GONE][resource] = 0
    _place_hub(resource, state)


def _find_pace(flow: int, state: FlowState) -> None:
    """Compute the rate that a flow has alone."""
    capacity = state.resource_floats[CAPACITY]
    weight = state.pair_floats[WEIGHT]
    resource_of = state.pair_ints[RESOURCE]
    first = state.flow_ints[FIRST][flow]
    own = _INF
    for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
        alone = capacity[resource_of[pair]] / weight[pair]
        if alone < own:
            own = alone
    state.flow_floats[PACE][flow] = own


def add(flow: int, state: FlowState) -> None:
    """Add a flow to its resources."""
    weight = state.pair_floats[WEIGHT]
    resource_of = state.pair_ints[RESOURCE]
    following = state.pair_ints[NEXT]
    head = state.resource_ints[HEAD]
    tail = state.resource_ints[TAIL]
    n_users = state.resource_ints[N_USERS]
    demand = state.resource_floats[DEMAND]
    _find_pace(flow, state)
    own = state.flow_floats[PACE][flow]
    first = state.flow_ints[FIRST][flow]
    for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
        resource = resource_of[pair]
        state.pair_ints[FLOW][pair] = flow
        following[pair] = NONE
        state.pair_ints[PREVIOUS][pair] = tail[resource]
        if tail[resource] == NONE:
            head[resource] = pair
            demand[resource] = 0.0
        else:
            following[tail[resource]] = pair
        tail[resource] = pair
        n_users[resource] += 1
        demand[resource] += weight[pair] * own
        if state.resource_ints[IS_HUB][resource]:
            _swap(pair, first + state.flow_ints[N_HUBS][flow], state)
            state.flow_ints[N_HUBS][flow] += 1
        else:
            _place_hub(resource, state)


def remove(flow: int, state: FlowState) -> None:
    """Remove a flow from its resources."""
    following = state.pair_ints[NEXT]
    previous = state.pair_ints[PREVIOUS]
    n_users = state.resource_ints[N_USERS]
    n_gone = state.resource_ints[N_GONE]
    first = state.flow_ints[FIRST][flow]
    for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
        resource = state.pair_ints[RESOURCE][pair]
        before = previous[pair]
        after = following[pair]
        if before == NONE:
            state.resource_ints[HEAD][resource] = after
        else:
            following[before] = after
        if after == NONE:
            state.resource_ints[TAIL][resource] = before
        else:
            previous[after] = before
        n_users[resource] -= 1
        n_gone[resource] += 1
        if n_gone[resource] < n_users[resource]:
            own = state.flow_floats[PACE][flow]
            state.resource_floats[DEMAND][resource] -= state.pair_floats[WEIGHT][pair] * own
            _place_hub(resource, state)
        else:
            _sum_demand(resource, state)
        _note_change(resource, LEFT_BY_FLOWS, state)
    _take_from_heap(flow, state)


def _start(flow: int, state: FlowState) -> None:
    """Let a flow begin to flow, at a rate that is found later."""
    state.flow_ints[IS_WAITING][flow] = 0
    state.flow_ints[N_HUBS][flow] = 0
    state.flow_floats[RATE][flow] = 0.0
    state.flow_floats[SETTLED_S][flow] = state.times[NOW_S]
    state.flow_ints[BOTTLENECK][flow] = NONE
    state.flow_ints[STATUS][flow] = RISING
    state.flow_ints[ACTIVE][state.counts[N_ACTIVE]] = flow
    state.counts[N_ACTIVE] += 1
    add(flow, state)


def _rouse(flow: int, state: FlowState) -> None:
    """Let a flow rise, and fill its hubs again."""
    if state.flow_ints[STATUS][flow] == UNTOUCHED:
        state.flow_ints[ACTIVE][state.counts[N_ACTIVE]] = flow
        state.counts[N_ACTIVE] += 1
    state.flow_ints[STATUS][flow] = RISING
    sums = state.resource_ints[SUMS]
    first = state.flow_ints[FIRST][flow]
    for pair in range(first, first + state.flow_ints[N_HUBS][flow]):
        hub = state.pair_ints[RESOURCE][pair]
        if sums[hub] == ABSENT:
            state.resource_ints[TOUCHED][state.counts[N_TOUCHED]] = hub
            state.counts[N_TOUCHED] += 1
        sums[hub] = UNKNOWN


def _take_in(n_known: int, state: FlowState) -> int:
    """Find the status of every flow on the hubs to fill, without the first hubs. Return how many hubs there are."""
    status = state.flow_ints[STATUS]
    bottleneck = state.flow_ints[BOTTLENECK]
    flow_of = state.pair_ints[FLOW]
    following = state.pair_ints[NEXT]
    active = state.flow_ints[ACTIVE]
    while n_known < state.counts[N_TOUCHED]:
        hub = state.resource_ints[TOUCHED][n_known]
        n_known += 1
        state.counts[WORK] += state.resource_ints[N_USERS][hub]
        pair = state.resource_ints[HEAD][hub]
        while pair != NONE:
            flow = flow_of[pair]
            if status[flow] == UNTOUCHED:
                status[flow] = CAPPED
                active[state.counts[N_ACTIVE]] = flow
                state.counts[N_ACTIVE] += 1
            if status[flow] == CAPPED and bottleneck[flow] == hub:
                _rouse(flow, state)
            pair = following[pair]
    return n_known


def _level_below_caps(hub: int, state: FlowState) -> float:
    """Return the level of a hub if its flows that have not stopped rise together, each up to its rate or pace."""
    status = state.flow_ints[STATUS]
    weight = state.pair_floats[WEIGHT]
    flow_of = state.pair_ints[FLOW]
    level = -1.0
    while True:
        left = state.resource_floats[CAPACITY][hub]
        load = 0.0
        pair = state.resource_ints[HEAD][hub]
        while pair != NONE:
            flow = flow_of[pair]
            if status[flow] == STOPPED:
                left -= weight[pair] * state.flow_floats[NEXT_RATE][flow]
            else:
                cap = state.flow_floats[PACE][flow]
                if status[flow] == CAPPED:
                    cap = state.flow_floats[RATE][flow]
                if cap <= level:
                    left -= weight[pair] * cap
                else:
                    load += weight[pair]
            pair = state.pair_ints[NEXT][pair]
        if load == 0.0:
            return _INF
        higher = left / load
        if higher <= level:
            return level
        level = higher


def _find_level(hub: int, state: FlowState) -> None:
    """Find the level of a hub, inf if it stops no flow."""
    status = state.flow_ints[STATUS]
    rate = state.flow_floats[RATE]
    next_rate = state.flow_floats[NEXT_RATE]
    pace = state.flow_floats[PACE]
    weight = state.pair_floats[WEIGHT]
    flow_of = state.pair_ints[FLOW]
    following = state.pair_ints[NEXT]
    capacity = state.resource_floats[CAPACITY][hub]
    left = capacity
    load = 0.0
    lowest = 0.0
    n_rising = 0
    fastest_capped = 0.0
    slowest_rising = _INF
    pair = state.resource_ints[HEAD][hub]
    while pair != NONE:
        flow = flow_of[pair]
        if status[flow] == RISING:
            load += weight[pair]
            n_rising += 1
            slowest_rising = min(slowest_rising, pace[flow])
        elif status[flow] == CAPPED:
            left -= weight[pair] * rate[flow]
            fastest_capped = max(fastest_capped, rate[flow])
        else:
            left -= weight[pair] * next_rate[flow]
            lowest = max(lowest, next_rate[flow])
        pair = following[pair]
    if load > 0.0:
        level = max(left / load, lowest)  # a rising flow with a lower pace has stopped before
        is_settled = fastest_capped <= level * (1 + _SAME) and slowest_rising >= level
    else:
        level = _INF
        is_settled = left >= -capacity * _SAME
    if not is_settled:
        level = _level_below_caps(hub, state)
    state.resource_floats[LEVEL][hub] = max(level, lowest)  # rounding would lower it
    state.resource_ints[IS_SETTLED][hub] = 1 if is_settled else 0
    state.resource_ints[N_RISING][hub] = n_rising
    state.resource_ints[SUMS][hub] = SUMMED


def _stop(flow: int, level: float, bottleneck: int, state: FlowState) -> None:
    """Stop a flow. Its other hubs have more left for the others; one without rising flows stops none."""
    state.flow_floats[NEXT_RATE][flow] = level
    state.flow_ints[BOTTLENECK][flow] = bottleneck
    state.flow_ints[STATUS][flow] = STOPPED
    sums = state.resource_ints[SUMS]
    n_rising = state.resource_ints[N_RISING]
    first = state.flow_ints[FIRST][flow]
    for pair in range(first, first + state.flow_ints[N_HUBS][flow]):
        hub = state.pair_ints[RESOURCE][pair]
        if sums[hub] == SUMMED or sums[hub] == LOW:
            sums[hub] = LOW
            n_rising[hub] -= 1
            if n_rising[hub] == 0 and state.resource_ints[IS_SETTLED][hub]:
                state.resource_floats[LEVEL][hub] = _INF


def _fill_hub(hub: int, state: FlowState) -> None:
    """Stop the rising flows of a full hub. First stop flows at their paces, and rouse capped flows that are faster."""
    status = state.flow_ints[STATUS]
    flow_of = state.pair_ints[FLOW]
    following = state.pair_ints[NEXT]
    level = state.resource_floats[LEVEL][hub]
    if not state.resource_ints[IS_SETTLED][hub]:
        n_changed = 0
        pair = state.resource_ints[HEAD][hub]
        while pair != NONE:
            flow = flow_of[pair]
            if status[flow] == RISING and state.flow_floats[PACE][flow] <= level:
                _stop(flow, state.flow_floats[PACE][flow], NONE, state)
                n_changed += 1
            elif status[flow] == CAPPED and state.flow_floats[RATE][flow] > level * (1 + _SAME):
                _rouse(flow, state)
                n_changed += 1
            pair = following[pair]
        if n_changed:
            state.resource_ints[SUMS][hub] = UNKNOWN
            return
    pair = state.resource_ints[HEAD][hub]
    while pair != NONE:
        flow = flow_of[pair]
        if status[flow] == RISING:
            _stop(flow, level, hub, state)
        pair = following[pair]
    state.resource_floats[LEVEL][hub] = _INF


def _fill(state: FlowState) -> None:
    """Fill hubs in the order of their levels, until none stops a rising flow."""
    touched = state.resource_ints[TOUCHED]
    sums = state.resource_ints[SUMS]
    level = state.resource_floats[LEVEL]
    n_known = 0
    while True:
        n_known = _take_in(n_known, state)
        lowest = _INF
        for number in range(n_known):
            hub = touched[number]
            if sums[hub] == UNKNOWN or (sums[hub] == LOW and level[hub] < lowest):
                _find_level(hub, state)
            lowest = min(lowest, level[hub])
        if lowest == _INF:
            return
        limit = lowest * (1 + _SAME)
        for number in range(n_known):
            hub = touched[number]
            if level[hub] <= limit:
                if sums[hub] != SUMMED:
                    _find_level(hub, state)
                if level[hub] <= limit:
                    _fill_hub(hub, state)


def _set_rate(flow: int, state: FlowState) -> float:
    """Give a flow its new rate from now on, after it has moved its bytes up to now. Return when it then ends."""
    now_s = state.times[NOW_S]
    left = state.flow_floats[LEFT]
    elapsed_s = now_s - state.flow_floats[SETTLED_S][flow]
    if elapsed_s > 0:
        left[flow] -= state.flow_floats[RATE][flow] * elapsed_s
    rate = state.flow_floats[NEXT_RATE][flow]
    state.flow_floats[RATE][flow] = rate
    state.flow_floats[SETTLED_S][flow] = now_s
    return now_s + max(left[flow], 0.0) / rate if rate > 0 else _INF


def settle(state: FlowState) -> None:
    """Find the rates that have changed since flows started or left, or capacities changed."""
    status = state.flow_ints[STATUS]
    active = state.flow_ints[ACTIVE]
    for number in range(state.counts[N_ACTIVE]):
        _rouse(active[number], state)
    for number in range(state.counts[N_CHANGED]):
        resource = state.resource_ints[CHANGED][number]
        pair = state.resource_ints[HEAD][resource]
        while pair != NONE:
            flow = state.pair_ints[FLOW][pair]
            if state.flow_ints[BOTTLENECK][flow] == resource or state.resource_ints[CHANGE][resource] == RESIZED:
                _rouse(flow, state)
            pair = state.pair_ints[NEXT][pair]
        state.resource_ints[CHANGE][resource] = UNCHANGED
    state.counts[N_CHANGED] = 0
    _fill(state)
    for number in range(state.counts[N_TOUCHED]):
        state.resource_ints[SUMS][state.resource_ints[TOUCHED][number]] = ABSENT
    state.counts[N_TOUCHED] = 0
    most_change = _MANY * state.counts[N_ACTIVE] > state.counts[N_HEAP]
    for number in range(state.counts[N_ACTIVE]):
        flow = active[number]
        if status[flow] == RISING:
            _stop(flow, state.flow_floats[PACE][flow], NONE, state)
        if status[flow] == STOPPED and state.flow_floats[NEXT_RATE][flow] != state.flow_floats[RATE][flow]:
            end_s = _set_rate(flow, state)
            if most_change and end_s < _INF and state.flow_ints[HEAP_AT][flow] != NONE:
                state.flow_floats[MOMENT_S][flow] = end_s  # its place in the heap follows
            else:
                _set_moment(flow, end_s, state)
        status[flow] = UNTOUCHED
    state.counts[N_ACTIVE] = 0
    if most_change:
        _order_heap(state)


def _leave(flow: int, state: FlowState) -> None:
    """Remove a flow that has ended, or before its end."""
    remove(flow, state)
    if state.flow_ints[STATUS][flow] != UNTOUCHED:
        state.flow_ints[STATUS][flow] = UNTOUCHED
        active = state.flow_ints[ACTIVE]
        state.counts[N_ACTIVE] -= 1
        at = 0
        while active[at] != flow:
            at += 1
        active[at] = active[state.counts[N_ACTIVE]]


def _mark_resources(flow: int, mark: int, state: FlowState) -> None:
    """Set the marks of a flow's resources."""
    first = state.flow_ints[FIRST][flow]
    for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
        state.resource_ints[MARK][state.pair_ints[RESOURCE][pair]] = mark


def _is_marked(flow: int, state: FlowState) -> bool:
    """Return whether a resource of a flow is marked."""
    first = state.flow_ints[FIRST][flow]
    for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
        if state.resource_ints[MARK][state.pair_ints[RESOURCE][pair]]:
            return True
    return False


def _list_together(n_ending: int, state: FlowState) -> int:
    """Add flows to the list of those that end: the ones that are due nearly now and meet one of them."""
    ending = state.flow_ints[ENDING]
    heap = state.flow_ints[HEAP]
    moment_s = state.flow_floats[MOMENT_S]
    first = ending[0]
    limit_s = moment_s[first] + (moment_s[first] - state.flow_floats[SETTLED_S][first]) * TOGETHER
    if state.counts[N_HEAP] == 0 or moment_s[heap[0]] > limit_s:
        return n_ending
    n_near = n_ending  # all flows that are due nearly now; those that end come first
    while state.counts[N_HEAP] > 0 and moment_s[heap[0]] <= limit_s and not state.flow_ints[IS_WAITING][heap[0]]:
        ending[n_near] = heap[0]
        n_near += 1
        _take_from_heap(heap[0], state)
    for number in range(n_ending):
        _mark_resources(ending[number], 1, state)
    number = n_ending
    while number < n_near:
        flow = ending[number]
        number += 1
        if _is_marked(flow, state):
            _mark_resources(flow, 1, state)
            ending[number - 1] = ending[n_ending]
            ending[n_ending] = flow
            n_ending += 1
            number = n_ending
    for number in range(n_ending):
        _mark_resources(ending[number], 0, state)
    for number in range(n_ending, n_near):
        _set_moment(ending[number], moment_s[ending[number]], state)
    return n_ending


def advance(state: FlowState) -> int:
    """Go on until flows end, but not up to `UNTIL_S`. Settle what has changed before.

    Returns:
        Number of flows that end at `NOW_S`. `state.flow_ints[ENDING]` lists them. `NEXT_S` is when to go on.
    """
    heap = state.flow_ints[HEAP]
    moment_s = state.flow_floats[MOMENT_S]
    times = state.times
    for number in range(state.counts[N_NEW]):
        flow = state.flow_ints[NEW][number]
        state.flow_ints[SEQUENCE][flow] = state.counts[N_SEQUENCE]
        state.counts[N_SEQUENCE] += 1
        if moment_s[flow] > times[NOW_S]:
            state.flow_ints[IS_WAITING][flow] = 1
            _set_moment(flow, moment_s[flow], state)
        else:
            _start(flow, state)
    state.counts[N_NEW] = 0
    while True:
        if state.counts[N_ACTIVE] > 0 or state.counts[N_CHANGED] > 0:
            settle(state)
        next_s = _INF
        if state.counts[N_HEAP] > 0:
            next_s = moment_s[heap[0]]
        times[NEXT_S] = next_s
        if next_s >= times[UNTIL_S]:
            return 0
        times[NOW_S] = next_s
        n_ending = 0
        while state.counts[N_HEAP] > 0 and moment_s[heap[0]] == next_s:
            flow = heap[0]
            _take_from_heap(flow, state)
            if state.flow_ints[IS_WAITING][flow]:
                _start(flow, state)
            else:
                state.flow_ints[ENDING][n_ending] = flow
                n_ending += 1
        if n_ending > 0:
            n_ending = _list_together(n_ending, state)
            for number in range(n_ending):
                _leave(state.flow_ints[ENDING][number], state)
            return n_ending


def _end_due(resource: int, state: FlowState) -> int:
    """Remove the flows on a resource that are due until `UNTIL_S`. Return their number; `ENDING` lists them."""
    n_ending = 0
    pair = state.resource_ints[HEAD][resource]
    while pair != NONE:
        flow = state.pair_ints[FLOW][pair]
        if state.flow_ints[HEAP_AT][flow] != NONE and state.flow_floats[MOMENT_S][flow] <= state.times[UNTIL_S]:
            state.flow_ints[ENDING][n_ending] = flow
            n_ending += 1
        pair = state.pair_ints[NEXT][pair]
    for number in range(n_ending):
        _leave(state.flow_ints[ENDING][number], state)
    return n_ending


def _change_capacity(resource: int, state: FlowState) -> None:
    """Use the capacity that now stands in `CAPACITY` from now on."""
    _note_change(resource, RESIZED, state)
    pair = state.resource_ints[HEAD][resource]
    while pair != NONE:
        flow = state.pair_ints[FLOW][pair]
        _find_pace(flow, state)
        first = state.flow_ints[FIRST][flow]
        for each in range(first, first + state.flow_ints[N_PAIRS][flow]):
            _note_change(state.pair_ints[RESOURCE][each], LEFT_BY_FLOWS, state)
        pair = state.pair_ints[NEXT][pair]
    for number in range(state.counts[N_CHANGED]):
        _sum_demand(state.resource_ints[CHANGED][number], state)


def act(state: FlowState) -> int:
    """Do what `ACTION` says, with `WHICH`. Return the number of flows that end."""
    which = state.counts[WHICH]
    if state.counts[ACTION] == ADVANCE:
        return advance(state)
    if state.counts[ACTION] == END_DUE:
        return _end_due(which, state)
    if state.counts[ACTION] == LEAVE:
        _leave(which, state)
    else:
        _change_capacity(which, state)
    return 0


def state_in(floats: Any, ints: Any) -> FlowState:
    """Return the state whose rows lie one after the other in two arrays, behind `times` and `counts`."""
    n_slots = ints[SLOTS]
    n_pairs = ints[PAIRS]
    n_resources = ints[RESOURCES]
    float_at = N_TIMES
    int_at = N_COUNTS
    flow_floats = floats[float_at : float_at + N_FLOW_FLOATS * n_slots].reshape((N_FLOW_FLOATS, n_slots))
    flow_ints = ints[int_at : int_at + N_FLOW_INTS * n_slots].reshape((N_FLOW_INTS, n_slots))
    float_at += N_FLOW_FLOATS * n_slots
    int_at += N_FLOW_INTS * n_slots
    pair_floats = floats[float_at : float_at + N_PAIR_FLOATS * n_pairs].reshape((N_PAIR_FLOATS, n_pairs))
    pair_ints = ints[int_at : int_at + N_PAIR_INTS * n_pairs].reshape((N_PAIR_INTS, n_pairs))
    float_at += N_PAIR_FLOATS * n_pairs
    int_at += N_PAIR_INTS * n_pairs
    resource_floats = floats[float_at : float_at + N_RESOURCE_FLOATS * n_resources]
    resource_ints = ints[int_at : int_at + N_RESOURCE_INTS * n_resources]
    return FlowState(
        flow_floats,
        flow_ints,
        pair_floats,
        pair_ints,
        resource_floats.reshape((N_RESOURCE_FLOATS, n_resources)),
        resource_ints.reshape((N_RESOURCE_INTS, n_resources)),
        floats[:N_TIMES],
        ints[:N_COUNTS],
    )


def act_in(floats: Any, ints: Any) -> int:
    """Do what `act` does. Numba takes two arrays faster than the rows."""
    return act(state_in(floats, ints))
