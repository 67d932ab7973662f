"""Times by batch size: what is known of one or two batch sizes predicts others, and the errors are their doubt.

A curve is the time of a step of one GPU by batch size: of one model, GPU, program and precision. Each measured size of
8 or more predicts the others of its curve, in proportion to the batch size, or along the line through the size itself
and a quarter of it. The step of one sample tells how long the host launches kernels. No time is predicted below it.

`curves.csv` has published rates of forward passes on one GPU: `rate_per_s` images, or tokens of which a sample has
`per_sample`, of the source "Throughput Avg" or "Avg throughput" of "Inference performance" in README.md of the folder
`source` of github.com/NVIDIA/DeepLearningExamples at 729963d. Batches that the source leaves out are absent.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from estimate import LEAST_FAMILIES, N_PLACES, Residual, distribution, widened, widening

from simdist.cost.compute import interpolated_step_s
from simdist.scenario.workload import MeasuredStep
from simdist.studies.published_errors import BOUND_BY_GPU

EXPERIMENTS = Path(__file__).parents[1]
CURVES = Path(__file__).with_name("curves.csv")
LEAST_MEASURED = 8
ONE, TWO = "one size", "two sizes"
SMALLER, LARGER = " and launches, smaller", " and launches, larger"
RATIOS = (1 / 128, 1 / 32, 1 / 8, 1 / 2, 1, 2, 8, 32)
"""Batch size over the measured one. An error belongs to the nearest of these."""
SHARES = (1 / 4, 1 / 2, 1, 2, 4)
"""Time that a smaller batch takes the GPU over that of launching its kernels; likewise."""
ENDS = (0.05, 0.95)
"""Places of the ends of an interval in a distribution."""
PLACES = {
    ONE: RATIOS,
    TWO: RATIOS,
    ONE + SMALLER: SHARES,
    ONE + LARGER: RATIOS[4:],
    TWO + SMALLER: SHARES,
    TWO + LARGER: RATIOS[4:],
}
"""Where each class has a distribution. Without launches, and for larger batches: at ratios."""


@dataclass(frozen=True)
class Curve:
    """Measured steps of one GPU.

    Args:
        family: Kind of model and GPU, which are left out together.
        steps: By batch size, ascending.
    """

    family: str
    steps: tuple[MeasuredStep, ...]

    @property
    def launch_s(self) -> float:
        """Seconds of the host, which are those of a step of one sample; 0 if it was not measured."""
        return self.steps[0].time_s if self.steps[0].batch_size == 1 else 0.0


@dataclass(frozen=True)
class Predicted:
    """A step that others of its curve predict.

    Args:
        way: The class of its doubt.
        at: The place of its error in the class, as the class has it.
        predicted_s: Seconds as predicted.
        measured_s: Seconds as measured.
    """

    way: str
    at: float
    predicted_s: float
    measured_s: float

    @property
    def log(self) -> float:
        """Logarithm of measured over predicted."""
        return math.log(self.measured_s / self.predicted_s)

    @property
    def place(self) -> int:
        """The nearest place of its class."""
        places = PLACES[self.way]
        return min(range(len(places)), key=partial(self._apart, places))

    def _apart(self, places: Sequence[float], index: int) -> float:
        return abs(math.log(self.at / places[index]))


def curves() -> Iterator[Curve]:
    """Yield the curves of all measurements on a GPU, and those that were published."""
    for file in sorted((EXPERIMENTS / "gpu" / "results").glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [each for each in found["parts"].get("steps", {"rows": []})["rows"] if each["step_ms"]]
        yield from _curves_of(
            (f"{found['device']}, {row['model']}", row["precision"], row["batch_size"], 1e-3 * row["step_ms"])
            for row in rows
        )
    yield from _curves_of(published())
    rates = json.loads((EXPERIMENTS / "one_machine" / "published.json").read_text(encoding="utf-8"))
    for machine, models in rates["tensorflow"]["machines"].items():
        for model, by_size in models.items():
            if len(by_size) > 1:
                points = ((int(size), int(size) / by_gpus[0]) for size, by_gpus in by_size.items())
                yield from _curves_of((f"{machine}, {model}", "fp32", size, s) for size, s in points)


def published() -> Iterator[tuple[str, str, int, float]]:
    """Yield family, curve, batch size and seconds of the published rates."""
    with CURVES.open(encoding="utf-8", newline="") as opened:
        for row in csv.DictReader(opened):
            size = int(row["batch_size"])
            seconds = size * int(row["per_sample"]) / float(row["rate_per_s"])
            yield f"{row['family']}, {row['gpu']}", f"{row['model']} {row['precision']}", size, seconds


def _curves_of(points: Iterable[tuple[str, str, int, float]]) -> Iterator[Curve]:
    steps: dict[tuple[str, str], list[MeasuredStep]] = {}
    for family, name, size, seconds in points:
        steps.setdefault((family, name), []).append(MeasuredStep(batch_size=size, time_s=seconds))
    for (family, _), of in steps.items():
        yield Curve(family, tuple(sorted(of, key=lambda each: each.batch_size)))


def predictions(curve: Curve) -> Iterator[Predicted]:
    """Yield all predictions within a curve."""
    by_size = {each.batch_size: each for each in curve.steps}
    for measured in curve.steps:
        n = measured.batch_size
        if n < LEAST_MEASURED:
            continue
        yield from of_known(curve, (measured,))
        quarter = by_size.get(n // 4)
        if quarter and n // 4 > 1 and quarter.time_s <= measured.time_s:
            yield from of_known(curve, (quarter, measured))


def of_known(curve: Curve, known: tuple[MeasuredStep, ...]) -> Iterator[Predicted]:
    """Yield what known sizes predict, without and with the step of one sample."""
    count = TWO if len(known) > 1 else ONE
    first, last = known[0].batch_size, known[-1].batch_size
    launch_s = curve.launch_s
    is_bound_by_gpu = known[-1].time_s * first / last >= BOUND_BY_GPU * launch_s
    for asked in curve.steps:
        ratio = asked.batch_size / min(max(asked.batch_size, first), last)
        if ratio == 1:
            continue
        gpu_s = interpolated_step_s(known, asked.batch_size)
        yield Predicted(count, ratio, gpu_s, asked.time_s)
        if not launch_s or asked.batch_size == 1:
            continue
        if ratio < 1 and not gpu_bounds_one(curve, known):
            yield Predicted(count + SMALLER, gpu_s / launch_s, max(gpu_s, launch_s), asked.time_s)
        if ratio > 1 and is_bound_by_gpu:
            yield Predicted(count + LARGER, ratio, gpu_s, asked.time_s)


def gpu_bounds_one(curve: Curve, known: tuple[MeasuredStep, ...]) -> bool:
    """Tell whether the GPU bounds the step of one sample, too, because the line of two sizes lies above it.

    Then the step is a third known size, and not the time of launching.
    """
    return len(known) > 1 and interpolated_step_s(known, 1) > curve.launch_s


@cache
def all_errors() -> tuple[Residual, ...]:
    """Return the errors of all curves. `nbytes` is the place in its class."""
    return tuple(
        Residual(curve.family, "batch", (each.way,), each.log, each.place)
        for curve in curves()
        for each in predictions(curve)
    )


def of_way(residuals: Iterable[Residual], way: str) -> list[list[Residual]]:
    """Return the errors of a class, for each of its places."""
    found = [each for each in residuals if each.classes == (way,)]
    return [[each for each in found if each.nbytes == place] for place in range(len(PLACES[way]))]


def document(residuals: Sequence[Residual]) -> dict[str, Any]:
    """Return the distributions as `simdist/studies/published_errors.json` has them.

    A measured size has no error. A place of larger batches with few families has that of the class without launches.
    """
    classes: dict[str, dict[str, Any]] = {}
    for way, places in PLACES.items():
        by_place = of_way(residuals, way)
        every = [each for some in by_place for each in some]
        factor = widening(every, bucket=lambda each: each.nbytes)
        found: dict[float, Sequence[float]] = {}
        for at, some in zip(places, by_place, strict=True):
            if len({each.family for each in some}) >= LEAST_FAMILIES:
                found[at] = widened(distribution(some, ""), factor).tolist()
            elif at == 1:
                found[at] = [0.0] * N_PLACES
            elif way.endswith(LARGER):
                plain = classes[way.removesuffix(LARGER)]
                found[at] = plain["logs"][plain["at"].index(at)]
        classes[way] = {
            "rows": len(every),
            "families": len({each.family for each in every}),
            "at": list(found),
            "logs": [[round(float(log), 4) for log in logs] for logs in found.values()],
        }
    return {"classes": classes}


@cache
def _of_others() -> Mapping[str, Mapping[str, Any]]:
    """Return for each family the classes that all other families make."""
    residuals = all_errors()
    families = {each.family for each in residuals}
    return {name: document([each for each in residuals if each.family != name])["classes"] for name in families}


def ends(family: str, way: str, at: float) -> tuple[float, float]:
    """Return the ends of the interval from other families, as logarithms; it contains the prediction."""
    found = _of_others()[family][way]
    low, high = (
        float(
            np.interp(
                math.log(at), np.log(found["at"]), [logs[round(place * (N_PLACES - 1))] for logs in found["logs"]]
            )
        )
        for place in ENDS
    )
    return min(0.0, low), max(0.0, high)


def table() -> Iterator[str]:
    """Yield a line for each class and place: quantiles, and the share of errors that other families' intervals hold."""
    residuals = all_errors()
    yield "| known | at | rows | families | 5 % | median | 95 % | held |"
    for way, places in PLACES.items():
        for at, some in zip(places, of_way(residuals, way), strict=True):
            if not some:
                continue
            found = np.exp(distribution(some, ""))
            shown = " | ".join(f"x {found[round(place * (N_PLACES - 1))]:.2f}" for place in (0.05, 0.5, 0.95))
            held = np.mean([_is_inside(each.log, ends(each.family, way, at)) for each in some])
            n_families = len({each.family for each in some})
            fraction = f"{at:g}" if at >= 1 else f"1/{1 / at:g}"
            yield f"| {way} | {fraction} | {len(some)} | {n_families} | {shown} | {held:.0%} |"


def curves_table() -> Iterator[str]:
    """Yield by family how near steps are that the largest batch, a quarter of it and one sample predict."""
    yield "| curves | count | steps | median error | worst | within 10 % | held | width |"
    every: list[tuple[str, Predicted]] = []
    count: dict[str, int] = {}
    for curve in curves():
        found = list(of_largest(curve))
        count[curve.family] = count.get(curve.family, 0) + bool(found)
        every += [(curve.family, each) for each in found]
    for family, n_curves in count.items():
        if n_curves:
            yield _cells(family, n_curves, [each for each in every if each[0] == family])
    yield _cells("all", sum(count.values()), every)


def of_largest(curve: Curve) -> Iterator[Predicted]:
    """Yield what the largest batch, a quarter of it and one sample predict; nothing if one of them lacks.

    Between known sizes there is no doubt, and `way` is that of two sizes without launches.
    """
    by_size = {each.batch_size: each for each in curve.steps}
    largest = curve.steps[-1].batch_size
    quarter = by_size.get(largest // 4)
    if not curve.launch_s or quarter is None or largest // 4 < 2:
        return
    known: tuple[MeasuredStep, ...] = (quarter, curve.steps[-1])
    if gpu_bounds_one(curve, known):
        known = (curve.steps[0], *known)
    yield from (each for each in of_known(curve, known) if each.way == TWO + SMALLER)
    for each in curve.steps:
        if known[0].batch_size < each.batch_size < largest and each not in known:
            gpu_s = interpolated_step_s(known, each.batch_size)
            yield Predicted(TWO, 1, max(gpu_s, curve.launch_s), each.time_s)


def _cells(title: str, n_curves: int, found: Sequence[tuple[str, Predicted]]) -> str:
    errors = [each.predicted_s / each.measured_s - 1 for _, each in found]
    within = np.mean([abs(error) <= 0.1 for error in errors])
    doubted = [(each, ends(family, each.way, each.at)) for family, each in found if each.way != TWO]
    held = np.mean([_is_inside(each.log, both) for each, both in doubted])
    width = median(math.exp(high) - math.exp(low) for _, (low, high) in doubted) / 2
    shown = f"{median(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%} | {within:.0%} | {held:.0%} | ±{width:.0%}"
    return f"| {title} | {n_curves} | {len(errors)} | {shown} |"


def _is_inside(log: float, both: tuple[float, float]) -> bool:
    return both[0] <= log <= both[1]
