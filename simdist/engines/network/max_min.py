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
stop now. A resource is full at the level left[r] / load[r]. Here `left` is the capacity that stopped flows leave, and
`load` the sum of a[r, i] over the rising flows. If w of the load stops at level t <= left / load, then
(left - t w) / (load - w) >= left / load: levels never fall. So one pass suffices, and a level that rounding would lower
is kept.

Three shortcuts skip work and change no bit of a rate:

    paces    A flow is never faster than its pace, the rate that it has alone: min over r of c[r] / a[r, i]. Resources
             that only this flow uses stop it there. Flows are kept in the order of their paces.
    hubs     A resource that can carry all its users at their paces never stops them. Each other resource with several
             users is a hub.
    levels   Levels of hubs never fall. While paces are below the lowest one, hubs are not examined again.

Subtraction leaves rounding errors behind. So a load is summed again when little of it is left. This happens at most
once for each factor of a thousand by which its weights differ or the number of its users falls.

A *component* is a set of flows that share resources, directly or through others. Rates are recomputed only in
components with a change. A flow that joins unites the components on its resources. When flows leave, a component may
fall apart. A component of few flows is examined for this at once. A larger one is examined when several times as many
flows have joined since: until then, to recompute its parts together only costs time.

State lies in rows, lists or arrays, that the functions below change in place: a float `[n_slots]` of a flow is
`state.flow_floats[LEFT]`, and so on. Flows have slots. The pairs of a flow with its resources are contiguous. Every
resource has a doubly linked list of the pairs that use it, in order of arrival. Every component has a doubly linked
list of its flows, in the order of their paces, and one of its hubs. No function allocates, raises or calls anything but
the functions above it, so numba can compile them. It compiles without fast math, so rates and times have the same bits
with and without numba.

Source:
    Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2: the definition, bottlenecks and progressive filling,
    there with a[r, i] = 0 or 1.
"""

from typing import NamedTuple, TypeAlias

_SAME = 1e-12  # resources that are full within this share of the level are full together
_PRECISE = 2.0**-10  # a load that subtraction has brought below this share of itself is summed again
_NEARLY = 1.0 - 1e-9  # of its capacity: a resource that carries at most this share stops no flow
_TOGETHER = 1e-12  # flows end together if they are due within this share of the time to the next end
_FEW = 16  # with up to this many flows, a component is examined whenever one leaves
# A larger one is examined after `_JOINED` flows, and `_JOINED_EACH` for each remaining flow, have joined.
_JOINED = 64
_JOINED_EACH = 16

LEFT, RATE, PACE, DUE = range(4)  # floats of a flow: bytes left, bytes per second, the same alone, seconds to its end
FIRST, N_PAIRS, RISING, COMPONENT, SLOWER, FASTER, JOINING, ENDING, STOPPING, ORDER = range(10)  # ints of a flow; lists
WEIGHT = 0  # float of a pair
RESOURCE, FLOW, NEXT, PREVIOUS = range(4)  # integers of a pair
CAPACITY, LOAD, DEMAND, RISING_LOAD, SUMMED_LOAD, LEFT_BPS, FULL_AT = range(7)  # floats of a resource
HEAD, TAIL, N_USERS, N_RISING, IS_HUB, NEXT_HUB, PREVIOUS_HUB, MARK, HUBS = range(9)  # integers of a resource; a list
SETTLED_S, NEXT_END_S, LATEST_S = range(3)  # floats of a component: last advance, next end, latest that ends with it
# Integers of a component. The last three are lists of components.
SLOWEST, FASTEST, FIRST_HUB, N_FLOWS, N_JOINED, PARENT, IS_CHANGED, HAS_SHRUNK, CHANGED, FREE, GONE = range(11)
N_COMPONENTS, N_CHANGED, N_FREE, N_GONE, WORK = range(5)  # counts
NONE = -1
SETTLE, END, LEAVE, CHANGE_CAPACITY = range(4)  # what `act` does

Floats: TypeAlias = list[list[float]]
Ints: TypeAlias = list[list[int]]


class State(NamedTuple):
    """Rows of the same length, as lists or a two-dimensional array, for flows, pairs, resources and components.

    Args:
        flow_floats: Of every slot of a flow, by `LEFT` to `DUE`.
        flow_ints: Likewise, by `FIRST` to `ORDER`.
        pair_floats: Of every pair of a flow and a resource, by `WEIGHT`.
        pair_ints: Likewise, by `RESOURCE` to `PREVIOUS`.
        resource_floats: Of every resource, by `CAPACITY` to `FULL_AT`.
        resource_ints: Likewise, by `HEAD` to `HUBS`.
        component_floats: Of every component, by `SETTLED_S` to `LATEST_S`; there are no more of them than flows.
        component_ints: Likewise, by `SLOWEST` to `GONE`.
        counts: By `N_COMPONENTS` to `WORK`.
    """

    flow_floats: Floats
    flow_ints: Ints
    pair_floats: Floats
    pair_ints: Ints
    resource_floats: Floats
    resource_ints: Ints
    component_floats: Floats
    component_ints: Ints
    counts: list[int]


def take_out_hub(resource: int, component: int, state: State) -> None:
    """Remove a hub from the list of its component."""
    before = state.resource_ints[PREVIOUS_HUB][resource]
    after = state.resource_ints[NEXT_HUB][resource]
    if before == NONE:
        state.component_ints[FIRST_HUB][component] = after
    else:
        state.resource_ints[NEXT_HUB][before] = after
    if after != NONE:
        state.resource_ints[PREVIOUS_HUB][after] = before
    state.resource_ints[IS_HUB][resource] = 0


def place_hub(resource: int, component: int, state: State) -> None:
    """Make a resource a hub of its component if it may stop its users."""
    is_hub = state.resource_ints[IS_HUB]
    may_fill = state.resource_floats[DEMAND][resource] > state.resource_floats[CAPACITY][resource] * _NEARLY
    if state.resource_ints[N_USERS][resource] > 1 and may_fill:
        if not is_hub[resource]:
            first = state.component_ints[FIRST_HUB][component]
            state.resource_ints[NEXT_HUB][resource] = first
            state.resource_ints[PREVIOUS_HUB][resource] = NONE
            if first != NONE:
                state.resource_ints[PREVIOUS_HUB][first] = resource
            state.component_ints[FIRST_HUB][component] = resource
            is_hub[resource] = 1
    elif is_hub[resource]:
        take_out_hub(resource, component, state)


def recount(resource: int, component: int, state: State) -> None:
    """Sum the use of a resource over its users."""
    pace = state.flow_floats[PACE]
    weight = state.pair_floats[WEIGHT]
    flow_of = state.pair_ints[FLOW]
    following = state.pair_ints[NEXT]
    load = 0.0
    demand = 0.0
    pair = state.resource_ints[HEAD][resource]
    while pair != NONE:
        load += weight[pair]
        demand += weight[pair] * pace[flow_of[pair]]
        pair = following[pair]
    state.resource_floats[LOAD][resource] = load
    state.resource_floats[DEMAND][resource] = demand
    place_hub(resource, component, state)


def find_component(flow: int, state: State) -> int:
    """Return the component of a flow, also after components were united."""
    parent = state.component_ints[PARENT]
    component = state.flow_ints[COMPONENT][flow]
    while parent[component] != component:
        component = parent[component]
    return component


def new_component(now_s: float, state: State) -> int:
    """Return a component without flows."""
    if state.counts[N_FREE]:
        state.counts[N_FREE] -= 1
        component = state.component_ints[FREE][state.counts[N_FREE]]
    else:
        component = state.counts[N_COMPONENTS]
        state.counts[N_COMPONENTS] += 1
    state.component_floats[SETTLED_S][component] = now_s
    state.component_floats[NEXT_END_S][component] = float("inf")
    state.component_ints[SLOWEST][component] = NONE
    state.component_ints[FASTEST][component] = NONE
    state.component_ints[FIRST_HUB][component] = NONE
    state.component_ints[N_FLOWS][component] = 0
    state.component_ints[N_JOINED][component] = 0
    state.component_ints[PARENT][component] = component
    state.component_ints[IS_CHANGED][component] = 0
    state.component_ints[HAS_SHRUNK][component] = 0
    return component


def note_change(component: int, state: State) -> None:
    """Add a component to those to recompute."""
    if not state.component_ints[IS_CHANGED][component]:
        state.component_ints[IS_CHANGED][component] = 1
        state.component_ints[CHANGED][state.counts[N_CHANGED]] = component
        state.counts[N_CHANGED] += 1


def advance(component: int, now_s: float, state: State) -> None:
    """Move the bytes of a component up to now."""
    elapsed_s = now_s - state.component_floats[SETTLED_S][component]
    if elapsed_s > 0:
        state.component_floats[SETTLED_S][component] = now_s
        left = state.flow_floats[LEFT]
        rate = state.flow_floats[RATE]
        faster = state.flow_ints[FASTER]
        flow = state.component_ints[SLOWEST][component]
        while flow != NONE:
            left[flow] -= rate[flow] * elapsed_s
            flow = faster[flow]


def insert(flow: int, after: int, component: int, state: State) -> None:
    """Insert a flow behind another one in the order of paces, or as the first."""
    slower = state.flow_ints[SLOWER]
    faster = state.flow_ints[FASTER]
    if after == NONE:
        following = state.component_ints[SLOWEST][component]
        state.component_ints[SLOWEST][component] = flow
    else:
        following = faster[after]
        faster[after] = flow
    slower[flow] = after
    faster[flow] = following
    if following == NONE:
        state.component_ints[FASTEST][component] = flow
    else:
        slower[following] = flow


def take_out(flow: int, component: int, state: State) -> None:
    """Remove a flow from the order of paces."""
    before = state.flow_ints[SLOWER][flow]
    after = state.flow_ints[FASTER][flow]
    if before == NONE:
        state.component_ints[SLOWEST][component] = after
    else:
        state.flow_ints[FASTER][before] = after
    if after == NONE:
        state.component_ints[FASTEST][component] = before
    else:
        state.flow_ints[SLOWER][after] = before


def place_by_pace(flow: int, component: int, state: State) -> None:
    """Insert a flow into the order of paces of a component, after equal paces."""
    pace = state.flow_floats[PACE]
    slower = state.flow_ints[SLOWER]
    own = pace[flow]
    at = state.component_ints[FASTEST][component]
    while at != NONE and pace[at] > own:
        at = slower[at]
    insert(flow, at, component, state)


def find_pace(flow: int, state: State) -> None:
    """Compute the rate that a flow has alone."""
    capacity = state.resource_floats[CAPACITY]
    weight = state.pair_floats[WEIGHT]
    resource_of = state.pair_ints[RESOURCE]
    first = state.flow_ints[FIRST][flow]
    own = float("inf")
    for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
        alone = capacity[resource_of[pair]] / weight[pair]
        if alone < own:
            own = alone
    state.flow_floats[PACE][flow] = own


def unite(one: int, other: int, state: State) -> int:
    """Unite two components into the larger one. Return it."""
    n_flows = state.component_ints[N_FLOWS]
    if n_flows[other] > n_flows[one]:
        larger = other
        smaller = one
    else:
        larger = one
        smaller = other
    pace = state.flow_floats[PACE]
    slower = state.flow_ints[SLOWER]
    at = state.component_ints[FASTEST][larger]
    flow = state.component_ints[FASTEST][smaller]
    while flow != NONE:
        following = slower[flow]
        state.flow_ints[COMPONENT][flow] = larger
        while at != NONE and pace[at] > pace[flow]:
            at = slower[at]
        insert(flow, at, larger, state)
        flow = following
    first = state.component_ints[FIRST_HUB][smaller]
    if first != NONE:
        next_hub = state.resource_ints[NEXT_HUB]
        last = first
        while next_hub[last] != NONE:
            last = next_hub[last]
        following = state.component_ints[FIRST_HUB][larger]
        next_hub[last] = following
        if following != NONE:
            state.resource_ints[PREVIOUS_HUB][following] = last
        state.component_ints[FIRST_HUB][larger] = first
    n_flows[larger] += n_flows[smaller]
    state.component_ints[N_JOINED][larger] += n_flows[smaller]
    if state.component_ints[HAS_SHRUNK][smaller]:
        state.component_ints[HAS_SHRUNK][larger] = 1
    state.component_ints[SLOWEST][smaller] = NONE  # because its next end may still be planned
    state.component_ints[PARENT][smaller] = larger
    state.component_ints[GONE][state.counts[N_GONE]] = smaller
    state.counts[N_GONE] += 1
    return larger


def join(flow: int, now_s: float, state: State) -> None:
    """Unite the components on the resources of a flow, and add the flow. It gets its place in the order later."""
    weight = state.pair_floats[WEIGHT]
    resource_of = state.pair_ints[RESOURCE]
    flow_of = state.pair_ints[FLOW]
    following = state.pair_ints[NEXT]
    previous = state.pair_ints[PREVIOUS]
    head = state.resource_ints[HEAD]
    tail = state.resource_ints[TAIL]
    n_users = state.resource_ints[N_USERS]
    is_hub = state.resource_ints[IS_HUB]
    load = state.resource_floats[LOAD]
    demand = state.resource_floats[DEMAND]
    capacity = state.resource_floats[CAPACITY]
    component_of = state.flow_ints[COMPONENT]
    first = state.flow_ints[FIRST][flow]
    end = first + state.flow_ints[N_PAIRS][flow]
    component = NONE
    for pair in range(first, end):
        user = head[resource_of[pair]]
        if user != NONE and component_of[flow_of[user]] != component:
            found = find_component(flow_of[user], state)
            if found != component:
                advance(found, now_s, state)
                component = found if component == NONE else unite(component, found, state)
    if component == NONE:
        component = new_component(now_s, state)
    state.flow_ints[COMPONENT][flow] = component
    state.component_ints[N_FLOWS][component] += 1
    state.component_ints[N_JOINED][component] += 1
    note_change(component, state)
    find_pace(flow, state)
    own = state.flow_floats[PACE][flow]
    for pair in range(first, end):
        resource = resource_of[pair]
        flow_of[pair] = flow
        following[pair] = NONE
        previous[pair] = tail[resource]
        if tail[resource] == NONE:
            head[resource] = pair
            load[resource] = 0.0
            demand[resource] = 0.0
        else:
            following[tail[resource]] = pair
        tail[resource] = pair
        n_users[resource] += 1
        load[resource] += weight[pair]
        demand[resource] += weight[pair] * own
        # No hub ceases to be one: a flow that joins only adds to what is demanded of it.
        if not is_hub[resource] and n_users[resource] > 1 and demand[resource] > capacity[resource] * _NEARLY:
            place_hub(resource, component, state)


def recount_around(flow: int, component: int, state: State) -> None:
    """Sum again the use of each marked resource of a flow, and remove the mark."""
    mark = state.resource_ints[MARK]
    first = state.flow_ints[FIRST][flow]
    for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
        resource = state.pair_ints[RESOURCE][pair]
        if mark[resource]:
            mark[resource] = 0
            recount(resource, component, state)


def remove(n_leaving: int, component: int, state: State) -> None:
    """Remove the flows of a component that are listed in `ENDING`."""
    first = state.flow_ints[FIRST]
    n_pairs = state.flow_ints[N_PAIRS]
    leaving = state.flow_ints[ENDING]
    resource_of = state.pair_ints[RESOURCE]
    following = state.pair_ints[NEXT]
    previous = state.pair_ints[PREVIOUS]
    head = state.resource_ints[HEAD]
    tail = state.resource_ints[TAIL]
    n_users = state.resource_ints[N_USERS]
    mark = state.resource_ints[MARK]
    for number in range(n_leaving):
        flow = leaving[number]
        for pair in range(first[flow], first[flow] + n_pairs[flow]):
            resource = resource_of[pair]
            before = previous[pair]
            after = following[pair]
            if before == NONE:
                head[resource] = after
            else:
                following[before] = after
            if after == NONE:
                tail[resource] = before
            else:
                previous[after] = before
            n_users[resource] -= 1
            mark[resource] = 1
        take_out(flow, component, state)
    for number in range(n_leaving):
        recount_around(leaving[number], component, state)
    state.component_ints[N_FLOWS][component] -= n_leaving
    state.component_ints[HAS_SHRUNK][component] = 1
    note_change(component, state)


def mark_connected(component: int, state: State) -> int:
    """List the flows that are connected with the slowest one. Return how many there are."""
    reached = state.flow_ints[STOPPING]
    rising = state.flow_ints[RISING]
    mark = state.resource_ints[MARK]
    following = state.pair_ints[NEXT]
    flow = state.component_ints[SLOWEST][component]
    rising[flow] = 2
    reached[0] = flow
    n_reached = 1
    number = 0
    while number < n_reached:
        flow = reached[number]
        number += 1
        first = state.flow_ints[FIRST][flow]
        for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
            resource = state.pair_ints[RESOURCE][pair]
            if mark[resource]:
                continue
            mark[resource] = 1
            user = state.resource_ints[HEAD][resource]
            while user != NONE:
                other = state.pair_ints[FLOW][user]
                if rising[other] != 2:
                    rising[other] = 2
                    reached[n_reached] = other
                    n_reached += 1
                user = following[user]
    for number in range(n_reached):
        flow = reached[number]
        first = state.flow_ints[FIRST][flow]
        for pair in range(first, first + state.flow_ints[N_PAIRS][flow]):
            mark[state.pair_ints[RESOURCE][pair]] = 0
    return n_reached


def fall_apart(component: int, state: State) -> None:
    """Split off each part of a component that is not connected with the rest."""
    rising = state.flow_ints[RISING]
    while True:
        n_reached = mark_connected(component, state)
        n_flows = state.component_ints[N_FLOWS][component]
        if n_reached < n_flows:
            other = new_component(state.component_floats[SETTLED_S][component], state)
            note_change(other, state)
            flow = state.component_ints[SLOWEST][component]
            while flow != NONE:
                following = state.flow_ints[FASTER][flow]
                if rising[flow] == 2:
                    take_out(flow, component, state)
                    insert(flow, state.component_ints[FASTEST][other], other, state)
                    state.flow_ints[COMPONENT][flow] = other
                flow = following
            hub = state.component_ints[FIRST_HUB][component]
            while hub != NONE:
                following = state.resource_ints[NEXT_HUB][hub]
                if rising[state.pair_ints[FLOW][state.resource_ints[HEAD][hub]]] == 2:
                    take_out_hub(hub, component, state)
                    place_hub(hub, other, state)
                hub = following
            state.component_ints[N_FLOWS][component] = n_flows - n_reached
            state.component_ints[N_FLOWS][other] = n_reached
            state.component_ints[N_JOINED][other] = n_reached
        for number in range(n_reached):
            rising[state.flow_ints[STOPPING][number]] = 0
        if n_reached == n_flows:
            state.component_ints[N_JOINED][component] = n_flows
            return


def give_back(n_stopped: int, level: float, state: State) -> None:
    """Leave the capacity that stopped flows do not use to the others."""
    first = state.flow_ints[FIRST]
    n_pairs = state.flow_ints[N_PAIRS]
    stopping = state.flow_ints[STOPPING]
    weight = state.pair_floats[WEIGHT]
    resource_of = state.pair_ints[RESOURCE]
    load = state.resource_floats[RISING_LOAD]
    left = state.resource_floats[LEFT_BPS]
    full_at = state.resource_floats[FULL_AT]
    n_rising = state.resource_ints[N_RISING]
    is_hub = state.resource_ints[IS_HUB]
    for number in range(n_stopped):
        flow = stopping[number]
        for pair in range(first[flow], first[flow] + n_pairs[flow]):
            resource = resource_of[pair]
            if is_hub[resource]:
                n_rising[resource] -= 1
                load[resource] -= weight[pair]
                left[resource] -= weight[pair] * level
    for number in range(n_stopped):
        flow = stopping[number]
        for pair in range(first[flow], first[flow] + n_pairs[flow]):
            resource = resource_of[pair]
            if not is_hub[resource]:
                continue
            if n_rising[resource] == 0:
                full_at[resource] = float("inf")
                continue
            if load[resource] < state.resource_floats[SUMMED_LOAD][resource] * _PRECISE:
                total = 0.0
                user = state.resource_ints[HEAD][resource]
                while user != NONE:
                    if state.flow_ints[RISING][state.pair_ints[FLOW][user]] == 1:
                        total += weight[user]
                    user = state.pair_ints[NEXT][user]
                load[resource] = total
                state.resource_floats[SUMMED_LOAD][resource] = total
            full_at[resource] = left[resource] / load[resource]


def fill(component: int, state: State) -> None:
    """Raise all rates of a component together and stop flows at their bottlenecks, until none rises."""
    rate = state.flow_floats[RATE]
    pace = state.flow_floats[PACE]
    rising = state.flow_ints[RISING]
    faster = state.flow_ints[FASTER]
    stopping = state.flow_ints[STOPPING]
    next_hub = state.resource_ints[NEXT_HUB]
    full_at = state.resource_floats[FULL_AT]
    hubs = state.resource_ints[HUBS]  # a list is faster to traverse than a chain
    order = state.flow_ints[ORDER]
    work = 0
    n_hubs = 0
    hub = state.component_ints[FIRST_HUB][component]
    while hub != NONE:
        hubs[n_hubs] = hub
        n_hubs += 1
        load = state.resource_floats[LOAD][hub]
        capacity = state.resource_floats[CAPACITY][hub]
        state.resource_floats[RISING_LOAD][hub] = load
        state.resource_floats[SUMMED_LOAD][hub] = load
        state.resource_floats[LEFT_BPS][hub] = capacity
        full_at[hub] = capacity / load
        state.resource_ints[N_RISING][hub] = state.resource_ints[N_USERS][hub]
        hub = next_hub[hub]
    n_flows = 0
    flow = state.component_ints[SLOWEST][component]
    while flow != NONE:
        order[n_flows] = flow
        n_flows += 1
        rising[flow] = 1
        rate[flow] = float("inf")
        work += state.flow_ints[N_PAIRS][flow]
        flow = faster[flow]
    state.counts[WORK] += work
    level = 0.0
    lowest = -1.0
    second = -1.0
    lowest_hub = NONE
    at = 0
    n_rising = n_flows
    while n_rising > 0:
        while rising[order[at]] == 0:
            at += 1
        slowest = pace[order[at]]
        if max(level, slowest) * (1 + _SAME) >= lowest:
            lowest = float("inf")
            second = float("inf")
            n_open = 0
            for number in range(n_hubs):
                hub = hubs[number]
                each = full_at[hub]
                if each == float("inf"):
                    continue  # no flow rises there, and none will
                hubs[n_open] = hub
                n_open += 1
                if each < second:
                    if each < lowest:
                        second = lowest
                        lowest = each
                        lowest_hub = hub
                    else:
                        second = each
            n_hubs = n_open
        if min(slowest, lowest) == float("inf"):
            return
        level = max(level, min(slowest, lowest))
        limit = level * (1 + _SAME)
        n_stopped = 0
        number = at
        while number < n_flows and pace[order[number]] <= limit:
            flow = order[number]
            if rising[flow] == 1:
                rising[flow] = 2
                stopping[n_stopped] = flow
                n_stopped += 1
            number += 1
        if lowest <= limit:
            for number in range(n_hubs):
                hub = hubs[number]
                if second > limit:
                    hub = lowest_hub
                if full_at[hub] <= limit:
                    pair = state.resource_ints[HEAD][hub]
                    while pair != NONE:
                        flow = state.pair_ints[FLOW][pair]
                        if rising[flow] == 1:
                            rising[flow] = 2
                            stopping[n_stopped] = flow
                            n_stopped += 1
                        pair = state.pair_ints[NEXT][pair]
                if second > limit:
                    break
        for number in range(n_stopped):
            rising[stopping[number]] = 0
            rate[stopping[number]] = level
        n_rising -= n_stopped
        if n_rising > 0:
            give_back(n_stopped, level, state)


def find_next_end(component: int, state: State) -> None:
    """Find when the first flows of a component end. A flow of rate 0 has no end."""
    left = state.flow_floats[LEFT]
    rate = state.flow_floats[RATE]
    due = state.flow_floats[DUE]
    faster = state.flow_ints[FASTER]
    next_s = float("inf")
    flow = state.component_ints[SLOWEST][component]
    while flow != NONE:
        if rate[flow] > 0:
            due[flow] = left[flow] / rate[flow]
            if due[flow] < next_s:
                next_s = due[flow]
        else:
            due[flow] = float("inf")
        flow = faster[flow]
    next_s = max(next_s, 0.0)
    state.component_floats[NEXT_END_S][component] = state.component_floats[SETTLED_S][component] + next_s
    state.component_floats[LATEST_S][component] = next_s * (1 + _TOGETHER)


def take_up(n_joining: int, now_s: float, state: State) -> None:
    """Let the flows that are listed in `JOINING` join."""
    for number in range(n_joining):
        join(state.flow_ints[JOINING][number], now_s, state)


def recompute(n_joining: int, now_s: float, state: State) -> int:
    """Recompute the rates of the components that changed. Return how many there are; `CHANGED` lists them."""
    for number in range(n_joining):
        flow = state.flow_ints[JOINING][number]
        component = find_component(flow, state)
        state.flow_ints[COMPONENT][flow] = component
        place_by_pace(flow, component, state)
    changed = state.component_ints[CHANGED]
    at = 0
    n_recomputed = 0
    while at < state.counts[N_CHANGED]:
        component = changed[at]
        at += 1
        state.component_ints[IS_CHANGED][component] = 0
        if state.component_ints[PARENT][component] != component:
            continue
        n_flows = state.component_ints[N_FLOWS][component]
        if n_flows == 0:
            state.component_ints[GONE][state.counts[N_GONE]] = component
            state.counts[N_GONE] += 1
            continue
        is_examined = n_flows <= _FEW or state.component_ints[N_JOINED][component] > _JOINED + _JOINED_EACH * n_flows
        if state.component_ints[HAS_SHRUNK][component] and is_examined:
            fall_apart(component, state)
        state.component_ints[HAS_SHRUNK][component] = 0
        fill(component, state)
        find_next_end(component, state)
        changed[n_recomputed] = component
        n_recomputed += 1
    for number in range(state.counts[N_GONE]):
        state.component_ints[FREE][state.counts[N_FREE]] = state.component_ints[GONE][number]
        state.counts[N_FREE] += 1
    state.counts[N_CHANGED] = 0
    state.counts[N_GONE] = 0
    return n_recomputed


def settle(n_joining: int, now_s: float, state: State) -> int:
    """Let flows join, and recompute the rates of the components that have changed.

    Args:
        n_joining: Number of flows that join. `state.flow_ints[JOINING]` lists them.
        now_s: Now.
        state: The state.

    Returns:
        Number of components recomputed. `state.component_ints[CHANGED]` lists them.
    """
    take_up(n_joining, now_s, state)
    return recompute(n_joining, now_s, state)


def end(component: int, now_s: float, state: State) -> int:
    """Remove the flows of a component that end now. Return their number; `state.flow_ints[ENDING]` lists them."""
    advance(component, now_s, state)
    due = state.flow_floats[DUE]
    faster = state.flow_ints[FASTER]
    ending = state.flow_ints[ENDING]
    latest_s = state.component_floats[LATEST_S][component]
    n_ending = 0
    flow = state.component_ints[SLOWEST][component]
    while flow != NONE:
        if due[flow] <= latest_s:
            ending[n_ending] = flow
            n_ending += 1
        flow = faster[flow]
    if n_ending:
        state.component_floats[NEXT_END_S][component] = float("inf")
        remove(n_ending, component, state)
    return n_ending


def leave(flow: int, now_s: float, state: State) -> None:
    """Remove a flow before its end."""
    component = state.flow_ints[COMPONENT][flow]
    advance(component, now_s, state)
    state.flow_ints[ENDING][0] = flow
    remove(1, component, state)


def change_capacity(resource: int, now_s: float, state: State) -> None:
    """Use the capacity that now stands in `CAPACITY` from now on."""
    head = state.resource_ints[HEAD][resource]
    if head == NONE:
        return
    component = state.flow_ints[COMPONENT][state.pair_ints[FLOW][head]]
    advance(component, now_s, state)
    note_change(component, state)
    pair = head
    while pair != NONE:
        flow = state.pair_ints[FLOW][pair]
        take_out(flow, component, state)
        find_pace(flow, state)
        place_by_pace(flow, component, state)
        first = state.flow_ints[FIRST][flow]
        for each in range(first, first + state.flow_ints[N_PAIRS][flow]):
            state.resource_ints[MARK][state.pair_ints[RESOURCE][each]] = 1
        pair = state.pair_ints[NEXT][pair]
    pair = head
    while pair != NONE:
        recount_around(state.pair_ints[FLOW][pair], component, state)
        pair = state.pair_ints[NEXT][pair]


def act(
    action: int,
    which: int,
    now_s: float,
    flow_floats: Floats,
    flow_ints: Ints,
    pair_floats: Floats,
    pair_ints: Ints,
    resource_floats: Floats,
    resource_ints: Ints,
    component_floats: Floats,
    component_ints: Ints,
    counts: list[int],
) -> int:
    """Do what is asked from outside: the state comes in parts, which numba takes faster than a tuple of them.

    Args:
        action: `SETTLE`, `END`, `LEAVE` or `CHANGE_CAPACITY`: the function to call.
        which: Its first argument.
        now_s: Now.
        flow_floats: Of the state, likewise all that follow.
        flow_ints: Likewise.
        pair_floats: Likewise.
        pair_ints: Likewise.
        resource_floats: Likewise.
        resource_ints: Likewise.
        component_floats: Likewise.
        component_ints: Likewise.
        counts: Likewise.

    Returns:
        What it returns, or 0.
    """
    state = State(
        flow_floats,
        flow_ints,
        pair_floats,
        pair_ints,
        resource_floats,
        resource_ints,
        component_floats,
        component_ints,
        counts,
    )
    if action == SETTLE:
        return settle(which, now_s, state)
    if action == END:
        return end(which, now_s, state)
    if action == LEAVE:
        leave(which, now_s, state)
    else:
        change_capacity(which, now_s, state)
    return 0
