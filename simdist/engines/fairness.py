"""Max-min fair rates by progressive filling, on sparse arrays.

A stage i of a transfer that flows at x[i] bytes per second on its most used resource takes a[r, i] x[i] of resource r,

    a[r, i] = nbytes_i[r] / max(nbytes_i),    0 < a <= 1 on the resources it uses, 0 elsewhere.

Rates are *feasible* if sum_i a[r, i] x[i] <= c[r] for every resource r. They are *max-min fair* if they are feasible,
and nobody can be faster without making somebody slower who is not faster than he: for every feasible y with
y[i] > x[i] there is a j with x[j] <= x[i] and y[j] < x[j].

r is a *bottleneck* of i if i uses it, it is full, and nobody on it is faster than i: x[j] <= x[i] for all j with
a[r, j] > 0. Feasible rates are max-min fair if and only if everybody has a bottleneck:

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
stops once: with n transfers, m resources and k pairs of both, all is done in O(k + m min(n, m)).

Source:
    Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2: the definition, bottlenecks and progressive filling,
    there for a[r, i] of 0 or 1.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Stage

__all__ = ["max_min_rates"]

_SAME = 1e-12  # resources that are full within this share of the level are full together
_WORN = 2.0**-10  # a load that subtraction has brought below this share of itself is summed anew


def max_min_rates(stages: Sequence[Stage], capacity_Bps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the max-min fair rate of each stage, in bytes per second on its most used resource, shape `[n_stages]`.

    A stage that no resource limits, because it has no bytes or because they are all unlimited, has the rate inf.

    Args:
        stages: What flows at the same time.
        capacity_Bps: Of every resource, `[n_resources]`, more than 0; inf where unlimited.

    >>> nic = np.array([0])
    >>> stages = [Stage(0.0, nic, np.array([1e6])), Stage(0.0, nic, np.array([5e6]))]
    >>> max_min_rates(stages, np.array([1e9])).tolist()
    [500000000.0, 500000000.0]
    """
    filling = _Filling(stages, capacity_Bps)
    while filling.rise():
        pass
    return filling.rates_Bps


class _Filling:
    """Rates on their way up, in one pass over the pairs of a flow and a resource that it uses.

    Pairs are in the order of the flows; `_by_resource` takes them into that of the resources, which are numbered from 0.
    The pairs of each begin at `_first_of_flow`, and at `_first_of_resource` in that order.
    """

    def __init__(self, stages: Sequence[Stage], capacity_Bps: NDArray[np.float64]) -> None:
        n_pairs = np.array([len(stage.resources) for stage in stages])
        resource = np.concatenate([stage.resources for stage in stages])
        nbytes = np.concatenate([stage.nbytes for stage in stages])
        self._flow = np.repeat(np.arange(len(stages)), n_pairs)
        if not nbytes.all():  # what has no bytes is not used
            used = nbytes > 0
            resource, nbytes, self._flow = resource[used], nbytes[used], self._flow[used]
            n_pairs = np.bincount(self._flow, minlength=len(stages))
        most_nbytes = np.zeros(len(stages))
        np.maximum.at(most_nbytes, self._flow, nbytes)
        self._weight = nbytes / most_nbytes[self._flow]
        self._first_of_flow = np.concatenate(([0], np.cumsum(n_pairs)))

        # Small integers are sorted in linear time.
        self._by_resource = np.argsort(resource.astype(np.min_scalar_type(len(capacity_Bps))), kind="stable")
        in_by_resource = resource[self._by_resource]
        is_first = np.concatenate(([True], in_by_resource[1:] != in_by_resource[:-1]))[: len(in_by_resource)]
        self._resource = np.empty_like(self._by_resource)
        self._resource[self._by_resource] = np.cumsum(is_first) - 1
        begins = np.flatnonzero(is_first)
        self._first_of_resource = np.append(begins, len(in_by_resource))

        self._left_Bps = capacity_Bps[in_by_resource[begins]].astype(np.float64)
        self._load = np.bincount(self._resource, weights=self._weight)
        self._summed_load = self._load.copy()
        self._n_rising = np.diff(self._first_of_resource)
        self._rising = np.ones(len(stages), dtype=bool)
        self._full_Bps = self._left_Bps / self._load
        self._level_Bps = 0.0
        self.rates_Bps = np.full(len(stages), np.inf)

    def rise(self) -> bool:
        """Raise the rates until resources are full, stop those who use them; tell whether any were left to stop."""
        lowest_Bps = self._full_Bps.min(initial=np.inf)
        if lowest_Bps == np.inf:
            return False
        self._level_Bps = max(self._level_Bps, float(lowest_Bps))
        full = np.flatnonzero(self._full_Bps <= self._level_Bps * (1 + _SAME))
        users = self._flow[self._by_resource[_places(self._first_of_resource, full)]]
        stopping = users[self._rising[users]]
        self._stop(stopping if len(full) == 1 else np.unique(stopping))
        return True

    def _stop(self, flows: NDArray[np.int64]) -> None:
        self._rising[flows] = False
        self.rates_Bps[flows] = self._level_Bps
        pairs = _places(self._first_of_flow, flows)
        resource, weight = self._resource[pairs], self._weight[pairs]
        np.subtract.at(self._n_rising, resource, 1)
        np.subtract.at(self._load, resource, weight)
        np.subtract.at(self._left_Bps, resource, weight * self._level_Bps)
        is_used = self._n_rising[resource] > 0
        self._full_Bps[resource[~is_used]] = np.inf
        used = resource[is_used]
        self._sum_anew(used[self._load[used] < self._summed_load[used] * _WORN])
        self._full_Bps[used] = self._left_Bps[used] / self._load[used]

    def _sum_anew(self, worn: NDArray[np.int64]) -> None:
        for resource in np.unique(worn):
            pairs = self._by_resource[self._first_of_resource[resource] : self._first_of_resource[resource + 1]]
            load = self._weight[pairs[self._rising[self._flow[pairs]]]].sum()
            self._load[resource] = self._summed_load[resource] = load


def _places(first: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return where the pairs of these flows, or resources, are."""
    if len(numbers) == 1:
        return slice(first[numbers[0]], first[numbers[0] + 1])
    begin, length = first[numbers], first[numbers + 1] - first[numbers]
    shift = begin - (np.cumsum(length) - length)
    return np.repeat(shift, length) + np.arange(length.sum())
