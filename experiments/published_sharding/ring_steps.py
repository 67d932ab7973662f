"""Gathers over many machines: what one measured row of a site tells of the others, and what is open without it.

The step of a ring is solved for from one row of Leonardo, in which communication decides. No other row is used. Without
it, `simdist` takes it as the range of `simdist.studies.published_errors.ring_step_range`, whose sources are not these
rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from rates_of_rows import N_SEEDS, Published, base_of, published, solved_utilization, step_s
from sharded_doubt import table_without

from simdist.runs.building import build
from simdist.studies.comparison import Row
from simdist.studies.comparison import row as compared
from simdist.studies.draws import with_draws
from simdist.studies.measuring import ScheduleTimes, measure
from simdist.studies.published_errors import kinds_of_step
from simdist.studies.resampling import WORTHWHILE

SITE = "Leonardo"
MEASURED = ("gpt3-2.7b", 64, 1, "full")
"""Model, GPUs, batch and sharding of the row that tells the step of a ring."""
LARGE = 128
"""GPUs from which a row counts as large."""
DIFFERS = 1.05
"""Ratio of two measured steps from which a pair counts."""
_MOST_US = 500.0
_N_HALVINGS = 20


@dataclass(frozen=True)
class Line:
    """A row with its simulation.

    Args:
        row: The row.
        times: Its times, with draws.
    """

    row: Published
    times: ScheduleTimes

    @property
    def found(self) -> Row:
        """Its seconds, with the interval."""
        return compared(self.times, self.times)

    @property
    def error(self) -> float:
        """Relative error of the rate."""
        return self.row.step_s / self.found.step_s - 1

    @property
    def is_held(self) -> bool:
        """Whether the interval holds what was measured."""
        low, high = self.found.step_s_range or (0.0, 0.0)
        return low <= self.row.step_s <= high

    @property
    def is_large(self) -> bool:
        """Whether it gathers over many machines."""
        return self.row.sharding == "full" and self.row.gpus >= LARGE


def series(family: str) -> list[list[Published]]:
    """Return the rows of each series of a family."""
    found: dict[object, list[Published]] = {}
    for row in published():
        if row.family == family:
            found.setdefault(row.series, []).append(row)
    return list(found.values())


@cache
def ring_step() -> str:
    """Return the step of a ring with which the measured row takes as long as it was measured."""
    rows = next(rows for rows in series(SITE) for row in rows if _traits(row) == MEASURED)
    row = next(row for row in rows if _traits(row) == MEASURED)
    low_us = 0.0
    high_us = _MOST_US
    for _ in range(_N_HALVINGS):
        middle_us = (low_us + high_us) / 2
        stepped = [replace(each, ring_step=f"{middle_us} us") for each in (base_of(rows), row)]
        if step_s(stepped[1], solved_utilization(stepped[0]), stepped[0].gpus) < row.step_s:
            low_us = middle_us
        else:
            high_us = middle_us
    return f"{low_us:.1f} us"


def _traits(row: Published) -> tuple[str, int, int, str]:
    return row.model, row.gpus, row.batch_size, row.sharding


@cache
def lines(family: str, step: str = "") -> tuple[Line, ...]:
    """Return the rows of a family but those that are calibrated on, with intervals.

    Both schedules of a pair are in one scenario, so that they have the same draws.

    Args:
        family: Its name.
        step: Measured step of a ring; empty if it is open.
    """
    found = []
    for rows in series(family):
        stepped = [replace(row, ring_step=step) for row in rows]
        base = base_of(stepped)
        utilization = solved_utilization(base)
        for row in stepped:
            if row.gpus == base.gpus:
                continue
            like = [each for each in stepped if each.gpus == row.gpus and _is_like(each, row)]
            own = row.scenario(utilization, base.gpus)
            scenario = own.changed(schedules=[each.scenario(utilization).schedules[0] for each in like])
            built = build(scenario, own.schedules[0])
            doubts = kinds_of_step(scenario, scenario.cluster.device.generation or "", table_without(family))
            times = measure(scenario, built, n_seeds=N_SEEDS)
            found.append(Line(row, with_draws(scenario, built, times, doubts=doubts)))
    return tuple(found)


def _is_like(one: Published, other: Published) -> bool:
    return (one.batch_size, one.micro_batches, one.sequence) == (other.batch_size, other.micro_batches, other.sequence)


def steps_table() -> Iterator[str]:
    """Yield the rows of the site: errors of the rate, and intervals. The step is open, and then it is measured."""
    yield "| model | GPUs | batch | sharding | measured | open | held | error | inside |"
    for one, other in zip(lines(SITE), lines(SITE, ring_step()), strict=True):
        row = one.row
        told = ["told by it", ""] if _traits(row) == MEASURED else [f"{other.error:+.1%}", _yes(other.is_held)]
        cells = [row.model, str(row.gpus), str(row.batch_size), row.sharding, f"{row.tokens_per_s:,.0f}"]
        yield f"| {' | '.join([*cells, f'{one.error:+.1%}', _yes(one.is_held), *told])} |"


def large_table() -> Iterator[str]:
    """Yield how near rows of many GPUs are that gather over all of them, without and with the measured step."""
    yield "| FULL_SHARD on 128 GPUs and more | rows | median error | worst | in the interval |"
    for title, step in (("open", ""), (f"one measured row: {ring_step()}", ring_step())):
        found = [each for each in lines(SITE, step) if each.is_large]
        errors = [each.error for each in found]
        held = sum(each.is_held for each in found)
        worst = max(errors, key=abs)
        yield f"| {title} | {len(found)} | {median(map(abs, errors)):.1%} | {worst:+.0%} | {held} of {len(found)} |"


@dataclass(frozen=True)
class Pair:
    """Two measured schedules of one job: all GPUs share, or those of a machine do.

    Args:
        row: The row in which all share.
        measured: Speed-up of sharing within a machine.
        found: The same, simulated, with its interval.
    """

    row: Published
    measured: float
    found: Row

    @property
    def counts(self) -> bool:
        """Whether they differ enough to count."""
        return max(self.measured, 1 / self.measured) >= DIFFERS

    @property
    def verdict(self) -> str:
        """Clear if the interval excludes 1 and the difference is worthwhile; and whether it is then right."""
        low, high = self.found.speedup_range or (1.0, 1.0)
        faster = low > 1 and self.found.speedup >= WORTHWHILE
        slower = high < 1 and self.found.speedup <= 1 / WORTHWHILE
        if not faster and not slower:
            return "unclear"
        return "clear, right" if faster == (self.measured > 1) else "clear, wrong"

    @property
    def shown(self) -> str:
        """Speed-up with its interval, and the verdict."""
        low, high = self.found.speedup_range or (1.0, 1.0)
        return f"{self.found.speedup:.2f} ({low:.2f}-{high:.2f}) | {self.verdict}"


def pairs(found: Sequence[Line]) -> Iterator[Pair]:
    """Yield the pairs among some rows."""
    for all_share in found:
        for in_machine in found:
            kinds = all_share.row.sharding, in_machine.row.sharding
            same = all_share.row.series == in_machine.row.series and all_share.row.gpus == in_machine.row.gpus
            if same and _is_like(all_share.row, in_machine.row) and kinds in _KINDS:
                measured = all_share.row.step_s / in_machine.row.step_s
                yield Pair(all_share.row, measured, compared(in_machine.times, all_share.times))


_KINDS = (("full", "hybrid"), ("zero1", "zero1-node"))


def decided() -> list[tuple[Pair, Pair | None]]:
    """Return all pairs: with the step open, and with the step of the site where it is measured."""
    of_site = list(zip(pairs(lines(SITE)), pairs(lines(SITE, ring_step())), strict=True))
    return [*of_site, *((pair, None) for pair in pairs(lines("InternEvo")))]


def pairs_table() -> Iterator[str]:
    """Yield the pairs, and how many verdicts on those that differ by 5 % are clear and right."""
    yield "| model | GPUs | batch | measured | open | verdict | with the measured step | verdict |"
    counted: tuple[list[str], list[str]] = ([], [])
    for one, other in decided():
        row = one.row
        passes = f" x {row.micro_batches}" if row.micro_batches > 1 else ""
        cells = [row.model, str(row.gpus), f"{row.batch_size}{passes}", f"{one.measured:.2f}"]
        yield f"| {' | '.join(cells)} | {one.shown} | {other.shown if other else ' | '} |"
        if one.counts:
            counted[0].append(one.verdict)
            counted[1].append((other or one).verdict)
    sums = [f"{of.count('clear, right')} clear and right, {of.count('clear, wrong')} clear and wrong" for of in counted]
    yield f"| **5 % or more apart: {len(counted[0])}** | | | | | {sums[0]} | | {sums[1]} |"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
