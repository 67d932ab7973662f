"""The fast engine: the same times by `simdist.engines.recurrence`, over all ranks and all seeds at once.

It does the additions and maxima of the discrete-event engine, in the same order. So the results are equal to the last
bit wherever no resource is shared.

**One rank for all.** If a plan has no delays, and every operation takes the same time on all ranks and in all groups,
then all ranks have the same times. They are computed once, in the same order, so the results are the same to the last
bit.

Operations of one lane may share resources: see `simdist.engines.contention`. Everything else is refused with
`UnsupportedError`; the discrete-event engine can simulate it.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from simdist import plan as plans
from simdist.cost.costs import Costs, Local, Shared, Varying
from simdist.engines.recurrence import GroupMeeting, Price, Progress, Recurrence, Times, in_columns, one_for_all
from simdist.errors import UnsupportedError
from simdist.plan import COLLECTIVES, Op, Plan
from simdist.plan.delays import Delays, DelaySource, DrawnDelays, check_delays
from simdist.plan.walk import Stretch, Template, drops_late, stretches
from simdist.traces.breakdown import Attribution, Breakdown, HeldUp, break_down, side_by_side
from simdist.traces.links import LinkRecorder
from simdist.traces.trace import Trace, ended_with_its_last_result

_FEW = 8  # up to this many members, numpy is faster member by member than by a reduction along a short axis


def simulate(plan: Plan, costs: Costs, delays: Delays, *, progress: Progress | None = None) -> Trace:
    """Simulate a plan and keep every time.

    Args:
        plan: A legal plan.
        costs: Its price list.
        delays: Those of one seed, see `simdist.plan.delays`.
        progress: Called with the number of steps done.

    Raises:
        PlanError: The delays do not fit the plan.
        UnsupportedError: Operations of several lanes may meet on a resource, or loads differ from one another.
    """
    check_delays(plan, delays)
    times_s = np.empty((3, plan.n_instances, plan.world_size))  # one block: large enough for Linux to use huge pages
    ready_s, start_s, end_s = times_s
    walked = list(stretches(plan))
    table = end_s[:, :, np.newaxis]
    recurrence = Recurrence(plan, 1, _prices(plan, [costs], 1), delays=DrawnDelays(delays), table=table)
    recurrence.run(walked, progress)
    for stretch in walked:
        _recover_ready_and_start(stretch, ready_s, start_s, end_s)
    for row in drops_late(plan):
        late = recurrence.late[row]
        start_s[row] = np.delete(ready_s[row], late).max()
        start_s[row, late] = ready_s[row, late]
    links = LinkRecorder(costs.slow).table()
    trace = Trace(plan, ready_s, start_s, end_s, source="simulated by fast", links=links, late=recurrence.late)
    return ended_with_its_last_result(trace)


def measure(
    plan: Plan,
    costs: Costs,
    delays: DelaySource,
    *,
    n_seeds: int,
    progress: Progress | None = None,
    held: HeldUp | None = None,
) -> Breakdown:
    """Simulate a plan for many seeds at once and keep only where the time went.

    Memory is that of a few steps, whatever the number of steps.

    Args:
        plan: A legal plan.
        costs: Its price list.
        delays: Source of the delays of all seeds.
        n_seeds: Seeds.
        progress: Called with the number of steps done.
        held: Names the links that hold up operations.

    Raises:
        UnsupportedError: See `simulate`.
    """
    if drops_late(plan):
        if held:
            raise UnsupportedError("links that are slow throughout hold up who comes first: use --engine des (or auto)")
        taken = delays.take(plan.n_steps)
        drawn = ({channel: each[[seed]] for channel, each in taken.items()} for seed in range(n_seeds))
        return side_by_side([break_down(simulate(plan, costs, each, progress=progress)) for each in drawn])
    n = n_seeds if held or _has_delays(plan) else 1  # without delays, all seeds are alike
    prices = _prices(plan, [costs], n)
    of_one = None if held else _of_one_rank(plan, prices)
    n_ranks = plan.world_size
    if of_one is not None:
        prices = of_one
        n_ranks = 1
    attribution = Attribution(n_ranks, n, held=held)
    recurrence = Recurrence(plan, n, prices, delays=delays, observer=attribution, n_ranks=n_ranks)
    recurrence.run(stretches(plan), progress)
    found = attribution.finish(plan.n_steps)
    if (n_ranks, n) == (plan.world_size, n_seeds):
        return found
    return found.spread(plan.world_size, n_seeds)


def step_s(plan: Plan, costs: Sequence[Costs], delays: DelaySource) -> Times:
    """Return the seconds per step of many seeds, each with its own prices, `[n_seeds]`.

    Args:
        plan: A legal plan.
        costs: A price list for each seed, which may be the same object.
        delays: Source of the delays of all seeds.

    Raises:
        UnsupportedError: See `measure`.
    """
    n_seeds = len(costs)
    if all(each is costs[0] for each in costs):
        costs = costs[:1]
    if drops_late(plan):
        if len(costs) == 1:
            return measure(plan, costs[0], delays, n_seeds=n_seeds).step_s
        raise UnsupportedError("who comes first depends on prices, which differ from seed to seed: use --engine des")
    ends = _LastEnds()
    prices = _prices(plan, costs, n_seeds)
    n_ranks = plan.world_size
    of_one = _of_one_rank(plan, prices)
    if of_one is not None:
        prices = of_one
        n_ranks = 1
    Recurrence(plan, n_seeds, prices, delays=delays, observer=ends, n_ranks=n_ranks).run(stretches(plan))
    last_s = (each.max(axis=0) for each in ends.of.values())
    makespan_s: Times = reduce(np.maximum, last_s, np.zeros(n_seeds))
    return makespan_s / plan.n_steps


def are_alike(plan: Plan, costs: Costs) -> bool:
    """Tell whether all ranks surely have the same times, so that none waits for another.

    Args:
        plan: A legal plan.
        costs: Its price list.
    """
    try:
        return not drops_late(plan) and _of_one_rank(plan, _prices(plan, [costs], 1)) is not None
    except UnsupportedError:
        return False


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


class _LastEnds:
    """Keeps when the last operation of each lane ended, of each rank or packed."""

    def __init__(self) -> None:
        self.of: dict[str, Times] = {}  # name of the lane -> end

    def add(self, index: int, template: Template, ready_s: Times, start_s: Times, end_s: Times) -> None:
        """Add the times of the next instance."""
        self.of[template.lane.name] = end_s


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
            shape = (stretch.times, *template.op.group.shape(ready_s.shape[1]))
            members = np.moveaxis(ready_s[at:last:n].reshape(shape), 2, 0)
            starts = reduce(np.maximum, members) if len(members) <= _FEW else np.maximum.reduce(members)
            start_s[at:last:n].reshape(shape)[...] = starts[:, :, np.newaxis]


def _prices(plan: Plan, costs: Sequence[Costs], n_seeds: int) -> dict[Op, Price]:
    """Return the price of each operation: its seconds alone or, where its groups share resources, together.

    With several price lists, one for each seed, a resource counts as shared if it is shared in one of them.

    Raises:
        UnsupportedError: Loads differ from one another, or segments differ between price lists.
    """
    for op, cost in costs[0].of.items():
        if isinstance(cost, Varying):
            raise UnsupportedError(
                f"{plans.op_text(op)}: every batch takes its own time; the fast engine is exact only for operations "
                f"that repeat themselves: use --engine des (or auto)"
            )
    for each in costs:
        _refuse_disturbed(each)
    contention = None
    if any(each.contested for each in costs):
        from simdist.engines.contention import Contention

        contention = Contention(costs, n_seeds, plan.world_size, may_go_back=not drops_late(plan))
    prices: dict[Op, Price] = {}
    for op, cost in costs[0].of.items():
        match cost:
            case Local():
                prices[op] = _alone_s(op, costs)
            case Shared() if cost.first_come:
                if contention and op in contention.uses:
                    raise UnsupportedError(f"{plans.op_text(op)}: others may use its links: use --engine des (or auto)")
                prices[op] = GroupMeeting.of(
                    cost.group, plan.world_size, n_seeds, seconds=cost.alone_s, first_come=cost.first_come
                )
            case Shared() if contention and op in contention.uses:
                seconds = contention.uses[op].seconds
                sharing = contention.of(op)
                prices[op] = GroupMeeting.of(cost.group, plan.world_size, n_seeds, seconds=seconds, sharing=sharing)
            case Shared():
                alone_s = _alone_s(op, costs)
                segments = cost.segments
                if segments and len(costs) > 1:
                    raise UnsupportedError(f"{plans.op_text(op)}: members begin on their own, at prices that differ")
                prices[op] = GroupMeeting.of(cost.group, plan.world_size, n_seeds, seconds=alone_s, segments=segments)
    return prices


def _alone_s(op: Op, costs: Sequence[Costs]) -> float | Times:
    found = (each.of[op] for each in costs)
    seconds = (
        each.seconds if isinstance(each, Local) else each.alone_s for each in found if not isinstance(each, Varying)
    )
    return in_columns(list(seconds))


def _refuse_disturbed(costs: Costs) -> None:
    """Refuse operations on links that change their rate during the run or that carry traffic of other jobs."""
    for op, cost in costs.of.items():
        for transfer in cost.transfers if isinstance(cost, Shared) and costs.disturbed else ():
            used = {resource for stage in transfer.stages for resource in stage.resources.tolist()}
            for resource in sorted(used & costs.disturbed.keys()):
                raise UnsupportedError(
                    f"{plans.op_text(op)}: {costs.resources.name(resource)} is disturbed by "
                    f"{costs.disturbed[resource]}; the fast engine is exact only for links that stay as they are: use "
                    f"--engine des (or auto)"
                )
