"""Max-min fair rates by progressive filling, on sparse arrays.

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

A round costs one look at the level of every resource, and work for the resources of those who stop in it. Everybody
stops once, and at least one resource is full in a round: with n transfers, m resources and k pairs of both, all is done
in O(k + m min(n, m)). Subtracting leaves rounding behind; a load of which little is left is therefore summed again, at
most once for each factor of a thousand by which its weights differ, or its users become fewer.

Source:
    Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2: the definition, bottlenecks and progressive filling,
    there for a[r, i] of 0 or 1.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Stage

_SAME = 1e-12  # resources that are full within this share of the level are full together
_PRECISE = 2.0**-10  # a load that subtraction has brought below this share of itself is summed again


def max_min_rates(stages: Sequence[Stage], capacity_Bps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the max-min fair rate of each stage, in bytes per second on its most used resource, shape `[n_stages]`.

    A stage that no resource limits, because it has no bytes or because they are all unlimited, has the rate inf.

    Args:
        stages: Stages that flow at the same time.
        capacity_Bps: Of every resource, `[n_resources]`, more than 0; inf where unlimited.

    >>> nic = np.array([0])
    >>> stages = [Stage(0.0, nic, np.array([1e6])), Stage(0.0, nic, np.array([5e6]))]
    >>> max_min_rates(stages, np.array([1e9])).tolist()
    [500000000.0, 500000000.0]
    """
    if not stages:
        return np.empty(0)
    filling = _Filling(_Pairs(stages, len(capacity_Bps)), capacity_Bps)
    while filling.rise():
        pass
    return filling.rates_Bps


class _Pairs:
    """Every pair of a flow and a resource that it uses: a sparse matrix, by rows and by columns.

    Pairs are in the order of the flows; `by_resource` are their places in the order of the resources, of which those in
    use are renumbered. `first_of_flow` and `first_of_resource` tell where the pairs of each begin in its order.
    """

    def __init__(self, stages: Sequence[Stage], n_resources: int) -> None:
        self.n_flows = len(stages)
        flow = np.repeat(np.arange(self.n_flows), [len(stage.resources) for stage in stages])
        resource = np.concatenate([stage.resources for stage in stages])
        nbytes = np.concatenate([stage.nbytes for stage in stages])
        if not nbytes.all():
            used = nbytes > 0
            flow, resource, nbytes = flow[used], resource[used], nbytes[used]
        most_nbytes = np.zeros(self.n_flows)
        np.maximum.at(most_nbytes, flow, nbytes)
        self.flow = flow
        self.weight = nbytes / most_nbytes[flow]
        self.n_of_flow = np.bincount(flow, minlength=self.n_flows)
        self.first_of_flow = np.concatenate(([0], np.cumsum(self.n_of_flow)))
        self._number(resource.astype(np.min_scalar_type(n_resources)))  # small integers are sorted in linear time

    def _number(self, resource: NDArray[np.unsignedinteger]) -> None:
        self.by_resource = np.argsort(resource, kind="stable")
        in_order = resource[self.by_resource]
        is_first = np.ones(len(in_order), dtype=bool)
        np.not_equal(in_order[1:], in_order[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        self.used = in_order[firsts]
        self.resource = np.empty_like(self.by_resource)
        self.resource[self.by_resource] = np.cumsum(is_first) - 1
        self.first_of_resource = np.append(firsts, len(in_order))


class _Filling:
    """Rates on their way up, and how full that makes the resources."""

    def __init__(self, pairs: _Pairs, capacity_Bps: NDArray[np.float64]) -> None:
        self._pairs = pairs
        self._left_Bps = capacity_Bps[pairs.used].astype(np.float64)
        self._load = np.bincount(pairs.resource, weights=pairs.weight)
        self._summed_load = self._load.copy()
        self._n_rising = np.diff(pairs.first_of_resource)
        self._rising = pairs.n_of_flow > 0
        self._full_at_Bps = self._left_Bps / self._load
        self._level_Bps = 0.0
        self.rates_Bps = np.full(pairs.n_flows, np.inf)

    def rise(self) -> bool:
        """Raise the rates until resources are full and stop those who use them; tell whether others rise on."""
        lowest_Bps = float(self._full_at_Bps.min(initial=np.inf))
        if lowest_Bps == np.inf:
            return False
        self._level_Bps = max(self._level_Bps, lowest_Bps)
        full = np.flatnonzero(self._full_at_Bps <= self._level_Bps * (1 + _SAME))
        users = self._pairs.flow[self._pairs.by_resource[_places(self._pairs.first_of_resource, full)]]
        stopped = users[self._rising[users]]
        self._rising[stopped] = False
        self.rates_Bps[stopped] = self._level_Bps
        if not self._rising.any():
            return False
        self._leave(stopped if len(full) == 1 else np.unique(stopped))
        return True

    def _leave(self, stopped: NDArray[np.int64]) -> None:
        """Leave to the others what those who stopped do not use."""
        places = _places(self._pairs.first_of_flow, stopped)
        resource, weight = self._pairs.resource[places], self._pairs.weight[places]
        np.subtract.at(self._n_rising, resource, 1)
        np.subtract.at(self._load, resource, weight)
        np.subtract.at(self._left_Bps, resource, weight * self._level_Bps)
        wanted = self._n_rising[resource] > 0
        lost_precision = wanted & (self._load[resource] < self._summed_load[resource] * _PRECISE)
        if lost_precision.any():
            self._recompute(np.unique(resource[lost_precision]))
        full_at_Bps = np.full(len(resource), np.inf)
        np.divide(self._left_Bps[resource], self._load[resource], out=full_at_Bps, where=wanted)
        self._full_at_Bps[resource] = full_at_Bps

    def _recompute(self, imprecise: NDArray[np.int64]) -> None:
        """Replace what is left of loads after many subtractions, the rounding of which would outweigh it."""
        for resource in imprecise:
            places = self._pairs.by_resource[_places(self._pairs.first_of_resource, np.array([resource]))]
            self._load[resource] = self._pairs.weight[places] @ self._rising[self._pairs.flow[places]]
            self._summed_load[resource] = self._load[resource]


def _places(first: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return where the pairs of these flows, or of these resources, are."""
    if len(numbers) == 1:
        return slice(first[numbers[0]], first[numbers[0] + 1])
    begin, n_pairs = first[numbers], first[numbers + 1] - first[numbers]
    return np.repeat(begin - (np.cumsum(n_pairs) - n_pairs), n_pairs) + np.arange(n_pairs.sum())
