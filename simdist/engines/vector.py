"""The fast engine: the same times by `simdist.engines.recurrence`, over all ranks and all seeds at once.

It does the additions and maxima of the discrete-event engine, in the same order. So the results are equal to the last
bit wherever no resource is shared.

**One rank for all.** If a plan has no delays, and every operation takes the same time on all ranks and in all groups,
then all ranks have the same times. They are computed once, with the same bits.

Operations of one lane may share resources: see `simdist.engines.contention`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

import numpy as np

from simdist import plan as plans
from simdist.cost.costs import Costs, Local, Shared, Varying
from simdist.engines.recurrence import GroupMeeting, Price, Recurrence, Times, in_columns, one_for_all
from simdist.errors import UnforeseenError
from simdist.plan import COLLECTIVES, Op, Plan
from simdist.plan.delays import SeedDelays
from simdist.plan.walk import Stretch, Template, drops_late, stretches
from simdist.traces.breakdown import Collector
from simdist.traces.links import LinkRecorder
from simdist.traces.trace import Trace, ended_with_its_last_result

if TYPE_CHECKING:
    from simdist.engines.contention import SharedLinks

_Progress: TypeAlias = Callable[[int, int], None]
_CollectorT = TypeVar("_CollectorT", bound=Collector)
#: Makes what gets all times, given the ranks and the seeds.
_CollectorOf: TypeAlias = Callable[[int, int], _CollectorT]

_BATCH_VALUES = 16_384  # ranks x seeds whose vectors stay in a core's cache
_FEW = 8  # up to this many members, numpy is faster member by member than by a reduction along a short axis


class VectorRun:
    """A run of a plan by recurrences, for all seeds.

    Args:
        plan: A legal plan.
        costs: The price list of all seeds, or one for each.
        delays: The delays of the seeds.
        progress: Called with the steps done and the steps of all seeds.
        links: The links that transfers share; None if they share none.
        reason: Why this engine was chosen.
    """

    name = "fast"

    def __init__(
        self,
        plan: Plan,
        costs: Sequence[Costs],
        delays: SeedDelays,
        progress: _Progress | None,
        links: "SharedLinks | None",
        reason: str = "",
    ) -> None:
        self.plan = plan
        self.delays = delays
        self._costs = costs[:1] if all(each is costs[0] for each in costs) else costs
        self._progress = progress
        self._links = links
        self.reason = reason

    @property
    def has_late(self) -> bool:
        """Whether ranks may come too late for an update. Then seeds are simulated one by one."""
        return bool(drops_late(self.plan))

    def batches(self) -> Iterator[Sequence[int]]:
        """Yield the seeds, in batches whose vectors stay in a core's cache: in one if they have prices of their own."""
        seeds = self.delays.seeds
        n = max(1, _BATCH_VALUES // self.plan.world_size) if len(self._costs) == 1 else len(seeds)
        for first in range(0, len(seeds), n):
            yield seeds[first : first + n]

    def trace(self, seed: int) -> Trace:
        """Return all times of a seed.

        Raises:
            UnforeseenError: Operations meet on a link, although the estimate said that they do not.
        """
        plan = self.plan
        times_s = np.empty((3, plan.n_instances, plan.world_size))  # one block: large enough for Linux's huge pages
        ready_s, start_s, end_s = times_s
        walked = list(stretches(plan))
        table = end_s[:, :, np.newaxis]
        prices = _prices(plan, self._costs, 1, self._links)
        recurrence = Recurrence(plan, 1, prices, delays=self.delays.draw([seed]), table=table)
        recurrence.run(walked, self._report([seed]))
        for stretch in walked:
            _recover_ready_and_start(stretch, ready_s, start_s, end_s)
        for row in drops_late(plan):
            late = recurrence.late[row]
            start_s[row] = np.delete(ready_s[row], late).max()
            start_s[row, late] = ready_s[row, late]
        links = LinkRecorder(self._costs[0].slow).table()
        trace = Trace(plan, ready_s, start_s, end_s, source="simulated by fast", links=links, late=recurrence.late)
        return ended_with_its_last_result(trace)

    def tell(
        self,
        collector_of: _CollectorOf[_CollectorT],
        seeds: Sequence[int],
        *,
        each_rank: bool = False,
        estimates: bool = False,
    ) -> _CollectorT:
        """Return a collector that was told the times of every instance.

        Memory is that of a few steps, whatever the number of steps.

        Args:
            collector_of: Makes it, given the ranks and the seeds of the times. One rank may stand for all.
            seeds: Some of the seeds.
            each_rank: Whether it needs each rank and seed.
            estimates: Whether to estimate times, as if no transfer slowed down another.

        Raises:
            UnforeseenError: See `trace`.
        """
        plan = self.plan
        costs = self._costs
        n = len(seeds)
        if len(costs) == 1 and not each_rank and not _has_delays(plan):
            n = 1  # all seeds are alike
        prices = _prices(plan, costs, n, self._links, estimates=estimates)
        of_one = None if each_rank else _of_one_rank(plan, prices)
        n_ranks = plan.world_size if of_one is None else 1
        collector = collector_of(n_ranks, n)
        source = self.delays.draw(seeds)
        recurrence = Recurrence(plan, n, of_one or prices, delays=source, observer=collector, n_ranks=n_ranks)
        recurrence.run(stretches(plan), self._report(seeds))
        return collector

    def meeting(self) -> str | None:
        """Return where operations of several lanes meet on a link, or too many transfers; None if nowhere.

        Times are estimates: no transfer slows down another.
        """
        try:
            for seeds in self.batches():
                self.tell(_Deaf, seeds, estimates=True)
        except UnforeseenError as error:
            return str(error)
        return None

    def _report(self, seeds: Sequence[int]) -> Callable[[int], None] | None:
        """Return what turns steps of some seeds into steps of all."""
        progress = self._progress
        if progress is None:
            return None
        n_steps = self.plan.n_steps
        before = self.delays.seeds.index(seeds[0]) * n_steps
        total = len(self.delays.seeds) * n_steps
        return lambda step: progress(before + len(seeds) * step, total)


def one_rank_stands_for_all(plan: Plan, costs: Costs, links: "SharedLinks | None") -> bool:
    """Tell whether all ranks surely have the same times."""
    return _of_one_rank(plan, _prices(plan, [costs], 1, links)) is not None


def _has_delays(plan: Plan) -> bool:
    return any(isinstance(op, plans.Delay) for body in plan.bodies for op in body)


def _of_one_rank(plan: Plan, prices: Mapping[Op, Price]) -> dict[Op, Price] | None:
    """Return the prices of one rank that stands for all, or None if ranks may have different times."""
    if _has_delays(plan) or any(isinstance(op, plans.Enter) for body in plan.bodies for op in body):
        return None
    found: dict[Op, Price] = {}
    for op, price in prices.items():
        alike = price.of_one_rank() if isinstance(price, GroupMeeting) else one_for_all(price)
        if alike is None:
            return None
        found[op] = alike
    return found


class _Deaf:
    """A collector that keeps nothing."""

    only_ends: ClassVar[bool] = True

    def __init__(self, n_ranks: int, n_seeds: int) -> None:
        pass

    def add(self, index: int, template: Template, ready_s: Times, start_s: Times, end_s: Times) -> None:
        """Take the times of the next instance."""


def _recover_ready_and_start(stretch: Stretch, ready_s: Times, start_s: Times, end_s: Times) -> None:
    """Derive from all ends when every operation was ready and when it started, over all repetitions at once."""
    n = len(stretch.templates)
    last = stretch.first_index + n * stretch.times
    for at, template in enumerate(stretch.templates, start=stretch.first_index):
        backs = [back for back in (template.previous, *template.after) if back is not None]
        sources = [end_s[at - back : last - back : n] for back in backs]
        ready = ready_s[at:last:n]
        ready[...] = sources[0] if sources else 0.0
        for source in sources[1:]:
            np.maximum(ready, source, out=ready)
    start_s[stretch.first_index : last] = ready_s[stretch.first_index : last]
    for at, template in enumerate(stretch.templates, start=stretch.first_index):
        if isinstance(template.op, COLLECTIVES):
            group = template.op.group
            members = np.moveaxis(group.split(ready_s[at:last:n], axis=1), 2, 0)
            starts = reduce(np.maximum, members) if len(members) <= _FEW else np.maximum.reduce(members)
            of_members = np.moveaxis(np.broadcast_to(starts, members.shape), 0, 2)
            start_s[at:last:n] = group.joined(of_members, axis=1)


def _prices(
    plan: Plan, costs: Sequence[Costs], n_seeds: int, links: "SharedLinks | None", *, estimates: bool = False
) -> dict[Op, Price]:
    """Return the price of each operation: its seconds alone or, where its groups share links, together."""
    contention = None
    if links:
        from simdist.engines.contention import Contention, MeetingEstimate

        contention = (MeetingEstimate if estimates else Contention)(links, n_seeds, may_go_back=not drops_late(plan))
    prices: dict[Op, Price] = {}
    for op, cost in costs[0].of.items():
        if isinstance(cost, Local):
            prices[op] = _alone_s(op, costs)
        if not isinstance(cost, Shared):
            continue
        meeting = partial(GroupMeeting.of, cost.group, plan.world_size, n_seeds)
        if contention and op in contention.uses:
            prices[op] = meeting(seconds=contention.uses[op].seconds, sharing=contention.of(op))
        else:
            prices[op] = meeting(seconds=_alone_s(op, costs), segments=cost.segments, first_come=cost.first_come)
    return prices


def _alone_s(op: Op, costs: Sequence[Costs]) -> float | Times:
    found = (each.of[op] for each in costs)
    seconds = (
        each.seconds if isinstance(each, Local) else each.alone_s for each in found if not isinstance(each, Varying)
    )
    return in_columns(list(seconds))
