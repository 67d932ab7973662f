"""Times by batch size: what is known of one batch size predicts others, and the errors are the doubt of batch sizes.

A curve is the time of a step of one GPU by batch size: of one model, GPU, program and precision. Each measured size of
8 or more predicts the others of its curve, in three ways:

* in proportion to the batch size;
* in proportion, but not below the time of launching kernels. That is the median time of the two smallest batches in the
  other precisions of the model;
* along the line through the size itself and a quarter of it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from estimate import N_PLACES, Residual, distribution, widened, widening

from simdist.cost.compute import interpolated_step_s
from simdist.scenario.workload import MeasuredStep

EXPERIMENTS = Path(__file__).parents[1]
RATIOS = (1 / 128, 1 / 32, 1 / 8, 1 / 2, 1, 2, 8, 32)
"""Batch size over the measured one. An error belongs to the nearest of these."""
LEAST_MEASURED = 8
WAYS = ("", "launch", "two sizes", "two sizes, launch")
_KNOWN = {
    "": "one batch size",
    "launch": "and the seconds of launching",
    "two sizes": "two batch sizes",
    "two sizes, launch": "and the seconds of launching",
}


@dataclass(frozen=True)
class Curve:
    """Measured steps of one GPU.

    Args:
        family: Model, GPUs and program.
        precision: Of the arithmetic.
        steps: By batch size, ascending.
    """

    family: str
    precision: str
    steps: tuple[MeasuredStep, ...]


def curves() -> Iterator[Curve]:
    """Yield the curves of the newest measurement on a GPU, and those that were published."""
    newest = max((EXPERIMENTS / "gpu" / "results").glob("*.json"), key=lambda file: file.stem.rpartition("-")[2])
    found = json.loads(newest.read_text(encoding="utf-8"))
    steps: dict[tuple[str, str], list[MeasuredStep]] = {}
    for row in found["parts"]["steps"]["rows"]:
        if row["step_ms"]:
            of = steps.setdefault((row["model"], row["precision"]), [])
            of.append(MeasuredStep(batch_size=row["batch_size"], time_s=1e-3 * row["step_ms"]))
    for (model, precision), of in steps.items():
        yield Curve(f"{found['device']}, {model}", precision, tuple(of))
    published = json.loads((EXPERIMENTS / "one_machine" / "published.json").read_text(encoding="utf-8"))
    for machine, models in published["tensorflow"]["machines"].items():
        for model, rates in models.items():
            pairs = sorted((int(size), int(size) / by_gpus[0]) for size, by_gpus in rates.items())
            if len(pairs) > 1:
                yield Curve(
                    f"{machine}, {model}", "fp32", tuple(MeasuredStep(batch_size=n, time_s=s) for n, s in pairs)
                )


def errors(curve: Curve, launch_s: float) -> Iterator[Residual]:
    """Yield the errors of all predictions within a curve. `nbytes` is the place of their ratio in `RATIOS`.

    Args:
        curve: Measured steps.
        launch_s: Seconds of launching kernels; 0 if they are not known.
    """
    by_size = {each.batch_size: each for each in curve.steps}
    for measured in curve.steps:
        n = measured.batch_size
        if n < LEAST_MEASURED:
            continue
        quarter = by_size.get(n // 4)
        pairs = [(quarter, measured)] if quarter and quarter.time_s <= measured.time_s else []
        for known in ((measured,), *pairs):
            way = "two sizes" if len(known) > 1 else ""
            yield from _of_known(curve, known, way, launch_s)


def _apart(ratio: float, place: int) -> float:
    return abs(math.log(ratio / RATIOS[place]))


def _of_known(curve: Curve, known: tuple[MeasuredStep, ...], way: str, launch_s: float) -> Iterator[Residual]:
    first = known[0].batch_size
    last = known[-1].batch_size
    for asked in curve.steps:
        size = asked.batch_size
        ratio = size / min(max(size, first), last)
        if ratio == 1:
            continue
        place = min(range(len(RATIOS)), key=partial(_apart, ratio))
        predicted_s = interpolated_step_s(known, size)
        yield Residual(curve.family, "batch", (way,), math.log(asked.time_s / predicted_s), place)
        if launch_s:
            log = math.log(asked.time_s / max(predicted_s, launch_s))
            yield Residual(curve.family, "batch", (f"{way}, launch".removeprefix(", "),), log, place)


@cache
def all_errors() -> tuple[Residual, ...]:
    """Return the errors of all curves."""
    every = list(curves())
    found: list[Residual] = []
    for curve in every:
        others = [one for one in every if one.family == curve.family and one.precision != curve.precision]
        smallest_s = [each.time_s for one in others for each in one.steps[:2]]
        found += errors(curve, median(smallest_s) if smallest_s else 0.0)
    return tuple(found)


def of_way(residuals: Iterable[Residual], way: str) -> list[list[Residual]]:
    """Return the errors of a way, for each ratio."""
    found = [each for each in residuals if each.classes == (way,)]
    return [[each for each in found if each.nbytes == place] for place in range(len(RATIOS))]


def document(residuals: Sequence[Residual]) -> dict[str, Any]:
    """Return the distributions as `simdist/studies/published_errors.json` has them."""
    classes = {}
    for way in WAYS:
        by_ratio = of_way(residuals, way)
        every = [each for some in by_ratio for each in some]
        factor = widening(every, bucket=lambda each: each.nbytes)
        logs = [widened(distribution(some, ""), factor) if some else np.zeros(N_PLACES) for some in by_ratio]
        classes[way] = {
            "rows": len(every),
            "families": len({each.family for each in every}),
            "logs": [[round(float(log), 4) for log in of] for of in logs],
        }
    return {"ratios": list(RATIOS), "classes": classes}


def table() -> Iterator[str]:
    """Yield a line for each way and ratio: quantiles, and the share of errors that other families' intervals hold."""
    residuals = all_errors()
    families = {each.family for each in residuals}
    without = {name: document([each for each in residuals if each.family != name]) for name in families}
    yield "| known | batch over measured | rows | families | 5 % | median | 95 % | held |"
    for way in WAYS:
        for place, some in enumerate(of_way(residuals, way)):
            if not some:
                continue
            found = np.exp(distribution(some, ""))
            ends = " | ".join(f"x {found[round(at * (N_PLACES - 1))]:.2f}" for at in (0.05, 0.5, 0.95))
            held = np.mean([_is_inside(each, without[each.family]["classes"][way]["logs"][place]) for each in some])
            n_families = len({each.family for each in some})
            ratio = RATIOS[place]
            shown = f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"
            yield f"| {_KNOWN[way]} | {shown} | {len(some)} | {n_families} | {ends} | {held:.0%} |"


def _is_inside(each: Residual, logs: Sequence[float]) -> bool:
    """Tell whether an interval holds what was measured; it contains the prediction."""
    low, high = np.quantile(logs, (0.05, 0.95))
    return min(0.0, float(low)) <= each.log <= max(0.0, float(high))
