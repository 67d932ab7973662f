"""Fluid networks in fractions: slow, plain and exact, with nothing kept between events."""

from fractions import Fraction
from math import inf


def exact_rates(flying, capacity_Bps):
    """Fill progressively in fractions, and plainly: no sums are kept."""
    weights = [
        {int(r): Fraction(n) / Fraction(each.nbytes.max()) for r, n in zip(each.resources, each.nbytes, strict=True)}
        for each in flying
    ]
    rates = {}
    while len(rates) < len(flying):
        levels = {}
        for resource in range(len(capacity_Bps)):
            load = sum(each.get(resource, 0) for number, each in enumerate(weights) if number not in rates)
            taken = sum(rate * weights[number].get(resource, 0) for number, rate in rates.items())
            if load:
                levels[resource] = (Fraction(capacity_Bps[resource]) - taken) / load
        level = min(levels.values())
        full = {resource for resource, each in levels.items() if each == level}
        rates |= {n: level for n, each in enumerate(weights) if n not in rates and full & each.keys()}
    return [rates[number] for number in range(len(flying))]


def exact_end_s(starts, capacity_Bps, changes=(), background=()):
    """
    Return when transfers end, in fractions, with all rates recomputed at every event.

    changes: (from when, resource, bytes per second). background: (from when, until when, stage) of endless flows.
    """
    capacity_Bps = [Fraction(each) if each < inf else each for each in map(float, capacity_Bps)]
    todo = {
        number: [step for stage in transfer.stages for step in ((stage.latency_s, None), (None, stage))]
        for number, (_, transfer) in enumerate(starts)
    }
    sleeping = {number: Fraction(start_s) for number, (start_s, _) in enumerate(starts)}
    flowing, now_s, end_s = {}, Fraction(0), [None] * len(starts)
    instants = {Fraction(at_s) for begin_s, until_s, _ in background for at_s in (begin_s, until_s)}
    instants = sorted(instants | {Fraction(at_s) for at_s, _, _ in changes})
    while sleeping or flowing:
        for at_s, resource, Bps in changes:
            if at_s == now_s:
                capacity_Bps[resource] = Fraction(Bps)
        others = [stage for begin_s, until_s, stage in background if begin_s <= now_s < until_s]
        rates = exact_rates([stage for stage, _ in flowing.values()] + others, capacity_Bps)[: len(flowing)]
        due_s = [now_s + left / rate for (_, left), rate in zip(flowing.values(), rates, strict=True) if rate]
        next_s = min([*sleeping.values(), *due_s, *(at_s for at_s in instants if at_s > now_s)])
        flowing = {
            number: (stage, left - rate * (next_s - now_s))
            for (number, (stage, left)), rate in zip(flowing.items(), rates, strict=True)
        }
        now_s = next_s
        over = [n for n, until_s in sleeping.items() if until_s == now_s]
        over += [n for n, (_, left) in flowing.items() if left == 0]
        for number in over:
            sleeping.pop(number, None)
            flowing.pop(number, None)
            if not todo[number]:
                end_s[number] = now_s
                continue
            latency_s, stage = todo[number].pop(0)
            if stage is None:
                sleeping[number] = now_s + Fraction(latency_s)
            else:
                flowing[number] = (stage, Fraction(stage.nbytes.max()))
    return [float(each_s) for each_s in end_s]
