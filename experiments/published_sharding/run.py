"""Published rates of sharded training, 8 to 128 GPUs: each series from one of its rows, and what memory it takes.

python experiments/published_sharding/run.py           print the tables (some minutes)
python experiments/published_sharding/run.py --write   write them into the README
"""

import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from deferred import deferred_table
from memory import memory_table
from rates_of_rows import Prediction, families, is_alike, predictions
from ring_steps import large_table, pairs_table, steps_table
from sharded_doubt import RESIDUALS, doubt_table, residuals_text

from simdist.report import markdown_table, page_command

HERE = Path(__file__).parent
NEAR = 0.1
SUMMARY_HEAD = (
    "| rows | n | median | worst | within 10 % | linear: median | within 10 % | sum: median | within 10 % "
    "| nearer than linear | than the sum | than both |"
)


@cache
def predicted(family: str) -> tuple[Prediction, ...]:
    """Return the rows of a family with what is predicted for them."""
    return tuple(predictions(family))


def table_name(family: str) -> str:
    """Return the name of a family's table on the page, in which a name has no hyphen."""
    return family.replace("-", " ")


def rows_table(family: str) -> Iterator[str]:
    """Yield the rows of a family."""
    yield "| model | GPUs | batch | sequence | measured | simulated | error | linear | sum |"
    for each in predicted(family):
        row = each.row
        passes = f" x {row.micro_batches}" if row.micro_batches > 1 else ""
        traits = [row.model]
        if row.compiled:
            traits.append("compiled")
        if row.sharding == "grad":
            traits.append("ZeRO-2")
        if row.sharding == "hybrid" and family.startswith("Leonardo"):
            traits.append("HSDP")
        if row.sharding in SHARERS:
            traits.append(f"ZeRO-1 over {SHARERS[row.sharding]}")
        if row.recompute and family.startswith(("llm", "VectorLM")):
            traits.append("checkpointing")
        cells = [
            ", ".join(traits),
            str(row.gpus),
            f"{row.batch_size}{passes}",
            str(row.sequence),
            f"{row.tokens_per_s:,.0f}",
            f"{each.simulated_per_s:,.0f}",
        ]
        if row is each.base:
            cells += [f"calibrated: {each.utilization:.1%}", "", ""]
        else:
            cells += [percent(error) for error in each.errors]
        yield f"| {' | '.join(cells)} |"


SHARERS = {"zero1": "all", "zero1-node": "a machine"}
"""Ranks that share the optimizer's state."""


def degrees_table() -> Iterator[str]:
    """Yield by how much sharing the optimizer's state within a machine is faster than among all GPUs."""
    yield "| GPUs | measured | simulated | linear | sum |"
    found = predicted("InternEvo")
    for gpus in sorted({each.row.gpus for each in found}):
        among_all, in_machine = (
            next(each for each in found if (each.row.gpus, each.row.sharding) == (gpus, sharding))
            for sharding in SHARERS
        )
        gains = [one / other - 1 for one, other in zip(in_machine.rates, among_all.rates, strict=True)]
        yield f"| {gpus} | {' | '.join(map(percent, gains))} |"


def percent(error: float) -> str:
    """Return a relative error as text."""
    return "" if math.isnan(error) else f"{error:+.1%}"


def summary_table() -> Iterator[str]:
    """Yield how near each family comes, without the rows that were calibrated on."""
    yield SUMMARY_HEAD
    every: list[Prediction] = []
    for family in families():
        found = [each for each in predicted(family) if each.row is not each.base]
        yield summary_row(family, found)
        every += found
    same = [each for each in every if each.row.model == each.base.model]
    yield summary_row("**all of a calibrated model**", same)
    yield summary_row("of these, passes alike", [each for each in same if is_alike(each)])
    yield summary_row("**all**", every)


PAID = (0.0, 0.1, 0.3, 1.0)
"""Shares of the communication that a step pays for though it hides it."""


def hidden_table() -> Iterator[str]:
    """Yield how near rows would be if hidden communication slowed computing down.

    Without, that is the simulator. If all is paid, that is the sum. Seconds are interpolated between both.
    """
    yield f"| rows | n | {' | '.join(f'{paid:.0%}' for paid in PAID)} |"
    few = [each for each in predicted("Leonardo") if each.row.sharding == "hybrid" and each.row.gpus <= 64]
    families_of = {name: predicted(name) for name in ("llm-foundry H100", "llm-foundry A100", "InternEvo")}
    for name, found in {**families_of, "Leonardo, HSDP on up to 64 GPUs": few}.items():
        rows = [each for each in found if each.row is not each.base]
        medians = [median(abs(error_if_paid(each, paid)) for each in rows) for paid in PAID]
        yield f"| {name} | {len(rows)} | {' | '.join(f'{each:.1%}' for each in medians)} |"


def error_if_paid(each: Prediction, paid: float) -> float:
    """Return the relative error of a rate if a share of hidden communication is paid."""
    simulated, _, summed = each.errors
    return 1 / ((1 - paid) / (1 + simulated) + paid / (1 + summed)) - 1


def twins_table() -> Iterator[str]:
    """Yield seconds of the steps of InternEvo that were measured with activation checkpointing and without."""
    yield "| GPUs | tokens of a step | measured: without | with | with / without | simulated: with / without |"
    without = {(each.row.gpus, each.row.tokens): each for each in predicted("InternEvo packed")}
    for other in predicted("InternEvo checkpointing"):
        row = other.row
        one = without.get((row.gpus, row.tokens))
        if one:
            simulated = one.simulated_per_s / other.simulated_per_s
            measured = f"{one.row.step_s:.2f} s | {row.step_s:.2f} s | {row.step_s / one.row.step_s:.2f}"
            yield f"| {row.gpus:,} | {row.tokens:,} | {measured} | {simulated:.2f} |"


OTHER_NETWORKS = {"YaFSDP": "50 Gbit/s", "llm-foundry H100": "200 Gbit/s"}
"""Of each of the eight cards, where the source states no network."""


def networks_table() -> Iterator[str]:
    """Yield how near a family comes if the network is a slower one, where the source does not state it."""
    yield SUMMARY_HEAD
    for family, bandwidth in OTHER_NETWORKS.items():
        found = [each for each in predictions(family, network=bandwidth) if each.row is not each.base]
        yield summary_row(f"{family}, 8 x {bandwidth}", found)


def summary_row(name: str, found: Sequence[Prediction]) -> str:
    """Return the row of the summary for some rows."""
    simulated, linear, summed = ([each.errors[number] for each in found] for number in range(3))
    worst = max(simulated, key=abs)
    cells = [name, str(len(found)), f"{median(map(abs, simulated)):.1%}", percent(worst), near(simulated)]
    for errors in (linear, summed):
        cells += [f"{median(map(abs, errors)):.1%}", near(errors)]
    for rivals in ((1,), (2,), (1, 2)):
        n_nearer = sum(abs(each.errors[0]) <= min(abs(each.errors[rival]) for rival in rivals) for each in found)
        cells.append(f"{n_nearer / len(found):.0%}")
    return f"| {' | '.join(cells)} |"


def near(errors: Sequence[float]) -> str:
    """Return how many errors are within 10 %."""
    n_near = sum(abs(error) <= NEAR for error in errors)
    return f"{n_near} ({n_near / len(errors):.0%})"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    by_family = {table_name(family): markdown_table(rows_table(family)) for family in families()}
    return {
        "summary": markdown_table(summary_table()),
        **by_family,
        "degrees": markdown_table(degrees_table()),
        "hidden": markdown_table(hidden_table()),
        "twins": markdown_table(twins_table()),
        "deferred": markdown_table(deferred_table()),
        "networks": markdown_table(networks_table()),
        "steps": markdown_table(steps_table()),
        "pairs": markdown_table(pairs_table()),
        "large": markdown_table(large_table()),
        "doubt": markdown_table(doubt_table()),
        "memory": markdown_table(memory_table()),
    }


def main() -> None:
    """Run the experiment."""
    if "--write" in sys.argv:
        RESIDUALS.write_text(residuals_text(), encoding="utf-8")
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
