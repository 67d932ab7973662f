"""Max-min fair rates by progressive filling, on flat arrays: the same source runs as it stands, and compiled.

A stage i of a transfer that flows at x[i] bytes per second on its most used resource takes a[r, i] x[i] of resource r,

    a[r, i] = nbytes_i[r] / max(nbytes_i),    0 < a <= 1 on the resources it uses, 0 elsewhere.

Rates are *feasible* if sum_i a[r, i] x[i] <= c[r] for every resource r. They are *max-min fair* if they are feasible,
and no flow can be faster without making one slower that is not faster than itself: for every feasible y with
y[i] > x[i] there is a j with x[j] <= x[i] and y[j] < x[j].

r is a *bottleneck* of i if i uses it, it is full, and no flow on it is faster than i: x[j] <= x[i] for all j with
a[r, j] > 0. Feasible rates are max-min fair if and only if every flow has a bottleneck:

    if       Let r be a bottleneck of i, y feasible, y[i] > x[i]. Both sums over r are at most c[r], and that of x is
             c[r]: some j on r has y[j] < x[j], and x[j] <= x[i].
    only if  Say that i has none: every resource of i has room, or is full and has somebody faster. Raise x[i] by a
             little, and lower those by what that takes; they are still faster than i. So x was not max-min fair.

There is only one such x. If y is another, let i be the one of those with x[i] != y[i] for whom min(x[i], y[i]) is
least, say x[i] < y[i]. Then some j has y[j] < x[j] <= x[i], and its minimum is less: a contradiction.

Progressive filling finds it: raise all rates together; when resources are full, stop everybody on them; go on with the
rest. Who stops on r has a bottleneck in r: others on it stopped before, at less, or stop now. A resource is full at the
level left[r] / load[r], where `left` is what those who stopped leave of it, and `load` the sum of a[r, i] over those
who rise. If w of the load stops at level t <= left / load, then (left - t w) / (load - w) >= left / load: levels never
fall. So one pass suffices, and rounding is not allowed to make a level fall.

What need not be looked at is left out, and changes no bit of a rate:

    paces    A flow is never faster than alone, at its pace min over r of c[r] / a[r, i], where the resources stop it
             that it uses alone. Flows are kept in the order of their paces.
    hubs     A resource that carries all its users at their paces never stops them. What remains, and has several
             users, is a hub.
    levels   Those of hubs never fall, so as long as paces are below the lowest one, nobody looks at them again.

Subtracting leaves rounding behind; a load of which little is left is therefore summed again, at most once for each
factor of a thousand by which its weights differ, or its users become fewer.

State lies in rows, lists or arrays, that the functions below change in place: a float `[n_slots]` of a flow is
`state.flow_floats[LEFT]`, and so on. Flows have slots, their pairs with resources lie one after the other, and every
resource has a doubly linked list of the pairs that use it, in the order in which they came. No function allocates,
raises or calls anything but those above it, so that numba can compile them: without fast math, so that rates, and with
them all times, have the same bits either way.

Source:
    Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2: the definition, bottlenecks and progressive filling,
    there for a[r, i] of 0 or 1.
"""

from typing import NamedTuple, TypeAlias

_SAME = 1e-12  # resources that are full within this share of the level are full together
_PRECISE = 2.0**-10  # a load that subtraction has brought below this share of itself is summed again
_NEARLY = 1.0 - 1e-9  # of its capacity: a resource that carries less at most stops nobody
_TOGETHER = 1e-12  # flows due within this share of the time to the next end end together

LEFT, RATE, PACE, DUE = range(4)  # floats of a flow: bytes left, bytes per second, those alone, seconds to its end
FIRST, N_PAIRS, RISING, ORDER, ADDED, LEAVING, ENDING, STOPPING = range(8)  # integers of a flow; lists of slots
WEIGHT = 0  # float of a pair
RESOURCE, FLOW, NEXT, PREVIOUS = range(4)  # integers of a pair
CAPACITY, LOAD, DEMAND, RISING_LOAD, SUMMED_LOAD, LEFT_BPS, FULL_AT = range(7)  # floats of a resource
HEAD, TAIL, N_USERS, N_RISING, PLACE, HUBS, CHANGED = range(7)  # integers of a resource; a list of resources
N_FLOWS, N_HUBS, N_SLOTS, N_ENDING = range(4)  # counts
NONE = -1

Floats: TypeAlias = list[list[float]]
Ints: TypeAlias = list[list[int]]


class State(NamedTuple):
    """Rows of the same length, lists or an array of two dimensions, for flows, pairs and resources.

    Args:
        flow_floats: Of every slot of a flow, by `LEFT` to `DUE`.
        flow_ints: Likewise, by `FIRST` to `STOPPING`.
        pair_floats: Of every pair of a flow and a resource, by `WEIGHT`.
        pair_ints: Likewise, by `RESOURCE` to `PREVIOUS`.
        resource_floats: Of every resource, by `CAPACITY` to `FULL_AT`.
        resource_ints: Likewise, by `HEAD` to `CHANGED`.
        counts: By `N_FLOWS` to `N_ENDING`.
    """

    flow_floats: Floats
    flow_ints: Ints
    pair_floats: Floats
    pair_ints: Ints
    resource_floats: Floats
    resource_ints: Ints
    counts: list[int]


def place_hub(resource: int, state: State) -> None:
    """Let a resource be a hub if it may stop its users."""
    place = state.resource_ints[PLACE]
    hubs = state.resource_ints[HUBS]
    may_fill = state.resource_floats[DEMAND][resource] > state.resource_floats[CAPACITY][resource] * _NEARLY
    if state.resource_ints[N_USERS][resource] > 1 and may_fill:
        if place[resource] == NONE:
            place[resource] = state.counts[N_HUBS]
            hubs[state.counts[N_HUBS]] = resource
            state.counts[N_HUBS] += 1
    elif place[resource] != NONE:
        state.counts[N_HUBS] -= 1
        last = hubs[state.counts[N_HUBS]]
        hubs[place[resource]] = last
        place[last] = place[resource]
        place[resource] = NONE


def recount(resource: int, state: State) -> None:
    """Sum what the users of a resource take of it."""
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
    place_hub(resource, state)


def advance(elapsed_s: float, state: State) -> None:
    """Let all flow at their rates for some seconds."""
    left = state.flow_floats[LEFT]
    rate = state.flow_floats[RATE]
    order = state.flow_ints[ORDER]
    for at in range(state.counts[N_FLOWS]):
        flow = order[at]
        left[flow] -= rate[flow] * elapsed_s


def remove(n_leaving: int, state: State) -> None:
    """Take out the flows that leave."""
    first = state.flow_ints[FIRST]
    n_pairs = state.flow_ints[N_PAIRS]
    leaving = state.flow_ints[LEAVING]
    order = state.flow_ints[ORDER]
    resource_of = state.pair_ints[RESOURCE]
    following = state.pair_ints[NEXT]
    previous = state.pair_ints[PREVIOUS]
    head = state.resource_ints[HEAD]
    tail = state.resource_ints[TAIL]
    n_users = state.resource_ints[N_USERS]
    changed = state.resource_ints[CHANGED]
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
            changed[resource] = 1
    for number in range(n_leaving):
        flow = leaving[number]
        for pair in range(first[flow], first[flow] + n_pairs[flow]):
            resource = resource_of[pair]
            if changed[resource]:
                changed[resource] = 0
                recount(resource, state)
        state.flow_ints[RISING][flow] = NONE
    n_kept = 0
    for at in range(state.counts[N_FLOWS]):
        flow = order[at]
        if state.flow_ints[RISING][flow] != NONE:
            order[n_kept] = flow
            n_kept += 1
    state.counts[N_FLOWS] = n_kept


def place_by_pace(flow: int, n_before: int, state: State) -> None:
    """Find out how fast a flow is alone, and put it among the first of those in order, after equals."""
    pace = state.flow_floats[PACE]
    order = state.flow_ints[ORDER]
    capacity = state.resource_floats[CAPACITY]
    own = float("inf")
    for pair in range(state.flow_ints[FIRST][flow], state.flow_ints[FIRST][flow] + state.flow_ints[N_PAIRS][flow]):
        alone = capacity[state.pair_ints[RESOURCE][pair]] / state.pair_floats[WEIGHT][pair]
        if alone < own:
            own = alone
    pace[flow] = own
    at = n_before
    while at > 0 and pace[order[at - 1]] > own:
        order[at] = order[at - 1]
        at -= 1
    order[at] = flow


def add(n_added: int, state: State) -> None:
    """Take in flows, of which bytes left, pairs, resources and weights are there."""
    weight = state.pair_floats[WEIGHT]
    resource_of = state.pair_ints[RESOURCE]
    following = state.pair_ints[NEXT]
    previous = state.pair_ints[PREVIOUS]
    head = state.resource_ints[HEAD]
    tail = state.resource_ints[TAIL]
    n_users = state.resource_ints[N_USERS]
    load = state.resource_floats[LOAD]
    demand = state.resource_floats[DEMAND]
    for number in range(n_added):
        flow = state.flow_ints[ADDED][number]
        state.flow_ints[RISING][flow] = 0
        place_by_pace(flow, state.counts[N_FLOWS], state)
        state.counts[N_FLOWS] += 1
        for pair in range(state.flow_ints[FIRST][flow], state.flow_ints[FIRST][flow] + state.flow_ints[N_PAIRS][flow]):
            resource = resource_of[pair]
            state.pair_ints[FLOW][pair] = flow
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
            demand[resource] += weight[pair] * state.flow_floats[PACE][flow]
            place_hub(resource, state)


def give_back(n_stopped: int, level: float, state: State) -> None:
    """Leave to the others what those who have stopped do not use."""
    first = state.flow_ints[FIRST]
    n_pairs = state.flow_ints[N_PAIRS]
    stopping = state.flow_ints[STOPPING]
    weight = state.pair_floats[WEIGHT]
    resource_of = state.pair_ints[RESOURCE]
    load = state.resource_floats[RISING_LOAD]
    left = state.resource_floats[LEFT_BPS]
    full_at = state.resource_floats[FULL_AT]
    n_rising = state.resource_ints[N_RISING]
    place = state.resource_ints[PLACE]
    for number in range(n_stopped):
        flow = stopping[number]
        for pair in range(first[flow], first[flow] + n_pairs[flow]):
            resource = resource_of[pair]
            if place[resource] != NONE:
                n_rising[resource] -= 1
                load[resource] -= weight[pair]
                left[resource] -= weight[pair] * level
    for number in range(n_stopped):
        flow = stopping[number]
        for pair in range(first[flow], first[flow] + n_pairs[flow]):
            resource = resource_of[pair]
            if place[resource] == NONE:
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


def fill(state: State) -> None:
    """Raise all rates together and stop flows, until none rises."""
    rate = state.flow_floats[RATE]
    pace = state.flow_floats[PACE]
    rising = state.flow_ints[RISING]
    order = state.flow_ints[ORDER]
    stopping = state.flow_ints[STOPPING]
    hubs = state.resource_ints[HUBS]
    full_at = state.resource_floats[FULL_AT]
    n_flows = state.counts[N_FLOWS]
    n_hubs = state.counts[N_HUBS]
    for number in range(n_hubs):
        hub = hubs[number]
        load = state.resource_floats[LOAD][hub]
        capacity = state.resource_floats[CAPACITY][hub]
        state.resource_floats[RISING_LOAD][hub] = load
        state.resource_floats[SUMMED_LOAD][hub] = load
        state.resource_floats[LEFT_BPS][hub] = capacity
        full_at[hub] = capacity / load
        state.resource_ints[N_RISING][hub] = state.resource_ints[N_USERS][hub]
    for number in range(n_flows):
        flow = order[number]
        rising[flow] = 1
        rate[flow] = float("inf")
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
            for number in range(n_hubs):
                each = full_at[hubs[number]]
                if each < second:
                    if each < lowest:
                        second = lowest
                        lowest = each
                        lowest_hub = hubs[number]
                    else:
                        second = each
        if min(slowest, lowest) == float("inf"):
            return
        level = max(level, min(slowest, lowest))
        limit = level * (1 + _SAME)
        n_stopped = 0
        n_reasons = 0
        number = at
        while number < n_flows and pace[order[number]] <= limit:
            flow = order[number]
            if rising[flow] == 1:
                rising[flow] = 2
                stopping[n_stopped] = flow
                n_stopped += 1
                n_reasons += 1
            number += 1
        if lowest <= limit:
            for number in range(n_hubs):
                hub = hubs[number]
                if second > limit:
                    hub = lowest_hub
                if full_at[hub] <= limit:
                    n_reasons += 1
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
        if n_reasons > 1:
            n_stopped = 0
            for flow in range(state.counts[N_SLOTS]):
                if rising[flow] == 2:
                    stopping[n_stopped] = flow
                    n_stopped += 1
        for number in range(n_stopped):
            rising[stopping[number]] = 0
            rate[stopping[number]] = level
        n_rising -= n_stopped
        if n_rising > 0:
            give_back(n_stopped, level, state)


def find_next_end(state: State) -> float:
    """Return in how many seconds the first flows end, and list them; a flow of rate 0 does not."""
    left = state.flow_floats[LEFT]
    rate = state.flow_floats[RATE]
    due = state.flow_floats[DUE]
    order = state.flow_ints[ORDER]
    next_s = float("inf")
    for at in range(state.counts[N_FLOWS]):
        flow = order[at]
        if rate[flow] > 0:
            due[flow] = left[flow] / rate[flow]
            if due[flow] < next_s:
                next_s = due[flow]
        else:
            due[flow] = float("inf")
    state.counts[N_ENDING] = 0
    if next_s == float("inf"):
        return next_s
    next_s = max(next_s, 0.0)
    for at in range(state.counts[N_FLOWS]):
        flow = order[at]
        if due[flow] <= next_s * (1 + _TOGETHER):
            state.flow_ints[ENDING][state.counts[N_ENDING]] = flow
            state.counts[N_ENDING] += 1
    return next_s


def settle(
    elapsed_s: float,
    n_leaving: int,
    n_added: int,
    flow_floats: Floats,
    flow_ints: Ints,
    pair_floats: Floats,
    pair_ints: Ints,
    resource_floats: Floats,
    resource_ints: Ints,
    counts: list[int],
) -> float:
    """Let all flow for some seconds, let flows leave and join, recompute all rates; return when the first one ends.

    Args:
        elapsed_s: Seconds since this was called last.
        n_leaving: How many flows leave; which stands in `state.flow_ints[LEAVING]`.
        n_added: How many join, likewise.
        flow_floats: Of the state, whose parts are arguments of their own, which numba takes faster than a tuple.
        flow_ints: Likewise; after it, the flows that end first stand in `ENDING`.
        pair_floats: Likewise.
        pair_ints: Likewise.
        resource_floats: Likewise.
        resource_ints: Likewise.
        counts: Likewise.
    """
    state = State(flow_floats, flow_ints, pair_floats, pair_ints, resource_floats, resource_ints, counts)
    if elapsed_s > 0:
        advance(elapsed_s, state)
    if n_leaving:
        remove(n_leaving, state)
    if n_added:
        add(n_added, state)
    fill(state)
    return find_next_end(state)


def change_capacities(n_resources: int, state: State) -> None:
    """Take note that resources have other capacities than before."""
    for at in range(state.counts[N_FLOWS]):
        flow = state.flow_ints[ORDER][at]
        place_by_pace(flow, at, state)
    for resource in range(n_resources):
        recount(resource, state)
