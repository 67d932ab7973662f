"""Published rows beside today's predictions, and the doubts that follow from their errors.

python experiments/published_rows/run.py           print the tables
python experiments/published_rows/run.py --write   predict all rows again, in some minutes: write residuals.csv,
                                                   decisions.csv, simdist/studies/published_errors.json and the tables
"""

import csv
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

sys.path.insert(0, str(Path(__file__).parent))  # modules beside this one

import batches
import estimate
import numpy as np
import predict
import rows as published
import sharded_rows
import storages
from decisions import WITH_HOST, Decision, decisions
from estimate import Residual

from simdist.report import markdown_table, page_command
from simdist.scenario import Cluster, Interference
from simdist.studies.comparison import row
from simdist.studies.draws import with_draws
from simdist.studies.published_errors import (
    Doubt,
    collective_doubt,
    kinds_of_step,
    link_class,
    of_published_rows,
)
from simdist.studies.uncertainty import n_draws, places, spread

HERE = Path(__file__).parent
RESIDUALS = HERE / "residuals.csv"
DECISIONS = HERE / "decisions.csv"
DOUBTS = HERE.parents[1] / "simdist" / "studies" / "published_errors.json"
NOT_ALIKE = {
    "16 H100 in two machines over InfiniBand, reported as slow": "its user reports that it is slow",
    "16 A100 in two machines over RoCE, Oracle's tutorial": "it carries a third of what its like do",
    "32 B200 in four machines over EFA, its ranks come at different times": "as its source says",
    "A10G local SGD": "its link is PCIe without peer-to-peer copies",
    **{f"HKBU 2080 Ti {way}": "as that of the A10G" for way in ("BSP", "WFBP", "MG-WFBP")},
    storages.CACHED: "it reads up to 2.4 times what its file system delivers, so files were in memory",
}
"""Families that no doubt is estimated from, with the reason. They are predicted like all others."""
HOSTS = ("queued by PyTorch", "PyTorch waits", "one process")
"""How calls of published collectives were launched, where a family has several ways."""
NEW = ("ampere", "hopper")
"""Generations of GPUs that are sold today, among those with rows of training."""
TITLES = {
    "machine": "one GPU to a machine",
    "machines": "a machine to several",
    "storage": "reading, longer than computing",
    "input": "reading, shorter than computing",
}
"""Titles of kinds without bytes."""


@dataclass(frozen=True)
class Line:
    """A row with what the simulator and formulas say, in seconds.

    Args:
        family: Its family.
        name: What tells it from others of its family.
        kinds: Kinds of step from what was measured to it, joined by `+`.
        classes: Classes of hardware that it belongs to, joined by `+`.
        nbytes: Of a collective; 0 of training.
        n_gpus: Number of GPUs.
        measured_s: Published.
        simulated_s: As stated.
        linear_s: Linear scaling; 0 of a collective.
        ring_s: The plain ring.
        torch_s: PyTorch's `comm_analysis`; 0 where it has no answer.
        lost: Share that a machine is assumed to lose. Doubts are those of a simulation without it.
        low_s: Lower end of the 90 % interval from the doubts of other families.
        high_s: Its upper end.
    """

    family: str
    name: str
    kinds: str
    classes: str
    nbytes: int
    n_gpus: int
    measured_s: float
    simulated_s: float
    linear_s: float
    ring_s: float
    torch_s: float
    lost: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0

    @property
    def residuals(self) -> Iterator[Residual]:
        """What an estimate learns from the row: nothing if several kinds of step lead to it."""
        if "+" not in self.kinds and self.family not in NOT_ALIKE:
            log = math.log(self.measured_s / self.simulated_s * (1 + self.lost))
            yield Residual(self.family, self.kinds, tuple(self.classes.split("+")), log, max(self.nbytes, 1))

    @property
    def is_inside(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def width(self) -> float:
        """Half the interval over the simulated time."""
        return (self.high_s - self.low_s) / 2 / self.simulated_s

    def error(self, seconds: float) -> float:
        """Return how much longer a time is than the measured one, as a share."""
        return seconds / self.measured_s - 1


def of_training(row_: published.Training) -> Line:
    """Predict a row of training."""
    scenario = row_.scenario()
    built = predict.built_of(scenario)
    times = predict.simulated(scenario, built)
    linear_s, ring_s = predict.training_formulas_s(row_)
    hardware = scenario.cluster.device.generation or ""
    return Line(
        row_.family,
        f"{row_.name}, {row_.n_gpus} GPUs",
        "+".join(row_.kinds),
        f"{hardware}+{hardware} {row_.precision}",
        0,
        row_.n_gpus,
        row_.measured_s,
        float(times.step_s.mean()),
        linear_s,
        ring_s,
        0.0,
        math.fsum(each.lost or 0.0 for each in scenario.disturbances if isinstance(each, Interference)),
    )


def of_collective(row_: published.Collective) -> Line:
    """Predict a row of a collective."""
    cluster = predict.cluster_of(row_)
    return Line(
        row_.family,
        f"{row_.collective} of {row_.nbytes} B, {row_.n_gpus} GPUs{row_.how and f', {row_.how}'}",
        "collective",
        f"{_kind(cluster)}+{link_class(cluster, _kind(cluster))}",
        row_.nbytes,
        row_.n_gpus,
        row_.measured_s,
        predict.collective_s(row_, cluster),
        0.0,
        predict.ring_s(row_, cluster),
        predict.of_torch_s(row_) or 0.0,
    )


def _kind(cluster: Cluster) -> Literal["fabric", "network"]:
    return "network" if cluster.n_domains > 1 else "fabric"


def of_storage(row_: storages.Reading) -> Line:
    """Predict a step that reads from storage."""
    built = row_.built()
    simulated_s = row_.step_s(built, built.costs)
    kind = row_.kind(simulated_s)
    classes = f"{kind}+{estimate.SHORT}" if row_.computing_s < estimate.SHORT_S else kind
    return Line(row_.family, row_.name, kind, classes, 0, row_.n_gpus, row_.measured_s, simulated_s, 0.0, 0.0, 0.0)


Predicted = tuple[published.Training | published.Collective | storages.Reading, Line]


def predicted() -> list[Predicted]:
    """Predict all rows as stated."""
    training = [(each, of_training(each)) for each in _told(published.training_rows())]
    collectives = [(each, of_collective(each)) for each in _told(published.collective_rows())]
    return [*training, *collectives, *((each, of_storage(each)) for each in _told(storages.rows()))]


def _told(rows: Iterable[Any]) -> Iterator[Any]:
    """Yield rows, and show on a terminal how many are done."""
    for number, each in enumerate(rows):
        if sys.stderr.isatty():
            print(f"\r{number} ", end="", file=sys.stderr)
        yield each


def left_out(found: Sequence[Predicted]) -> list[Line]:
    """Return all rows with intervals from the doubts of other families."""
    residuals = [*(each for _, line in found for each in line.residuals), *sharded_rows.residuals()]

    @cache
    def without(family: str) -> dict[str, Any]:
        return estimate.table(each for each in residuals if each.family != family)

    return [_with_interval(row_, line, without(line.family)) for row_, line in _told(found)]


def _with_interval(row_: Any, line: Line, table: dict[str, Any]) -> Line:
    if isinstance(row_, storages.Reading):
        low_s, high_s = row_.interval(line.simulated_s, table)
    else:
        interval = _of_training if isinstance(row_, published.Training) else _of_collective
        low_s, high_s = interval(row_, line, table)
    return replace(line, low_s=low_s, high_s=high_s)


def _of_training(row_: published.Training, line: Line, table: dict[str, Any]) -> tuple[float, float]:
    """Return the interval as `compare` has it."""
    scenario = row_.scenario()
    doubts = kinds_of_step(scenario, line.classes.partition("+")[0], table)
    built = predict.built_of(scenario)
    times = predict.studied(scenario, built)
    times = with_draws(scenario, built, times, doubts=doubts)
    found = row(times, times).step_s_range
    assert found
    return found


def _of_collective(row_: published.Collective, line: Line, table: dict[str, Any]) -> tuple[float, float]:
    """Return the interval of one collective, with draws of its cluster's ranges."""
    cluster = predict.cluster_of(row_)
    kind = _kind(cluster)
    doubt: Doubt = collective_doubt(table, kind, link_class(cluster, kind))
    ranged = predict.by_place(row_, cluster)
    n = n_draws(1 + len(ranged))
    at = {name: places(name, seed=0, n=n) for name in (doubt.name, *ranged)}
    seconds = []
    for i in range(n):
        drawn_s = line.simulated_s * math.prod(ranged[name](at[name][i]) for name in ranged)
        host_s = predict.ranged_overhead_s(cluster, {name: at[name][i] for name in ranged})
        seconds.append(host_s + (drawn_s - host_s) * doubt.factor(at[doubt.name][i], row_.nbytes))
    changes = np.array(seconds) - line.simulated_s
    return spread(line.simulated_s, changes, None, at)[0]


def doubts_document(lines: Iterable[Line]) -> dict[str, Any]:
    """Return what simdist reads."""
    about = {
        "source": "experiments/published_rows: published rows and today's predictions; estimated, not fitted",
        "unit": "natural logarithm of measured over simulated seconds, at 41 evenly spaced places from 0 to 1",
        "date": "2026-11",
    }
    of_rows = estimate.table([*(each for line in lines for each in line.residuals), *sharded_rows.residuals()])
    return about | of_rows | {"batch": batches.document(batches.all_errors())}


RecordT = TypeVar("RecordT", Line, Decision)


def save(lines: Sequence[Line]) -> None:
    """Write rows and doubts, and then the decisions that follow."""
    _write(RESIDUALS, lines)
    DOUBTS.write_text(dumped(doubts_document(lines)), encoding="utf-8")
    of_published_rows.cache_clear()
    _write(DECISIONS, list(decisions()))
    saved.cache_clear()
    saved_decisions.cache_clear()


def dumped(document: dict[str, Any]) -> str:
    """Return JSON with a list of numbers on each line."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\[\s+(-?[\d.][^\[\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _write(file: Path, records: Sequence[Line] | Sequence[Decision]) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(each.name for each in fields(records[0]))
        for record in records:
            writer.writerow(f"{each:.6g}" if isinstance(each, float) else each for each in astuple(record))


def _read(file: Path, of: type[RecordT]) -> tuple[RecordT, ...]:
    types = {each.name: each.type for each in fields(of)}
    with file.open(encoding="utf-8", newline="") as lines:
        return tuple(of(**{key: types[key](text) for key, text in each.items()}) for each in csv.DictReader(lines))


@cache
def saved() -> tuple[Line, ...]:
    """Return the rows as they were written."""
    return _read(RESIDUALS, Line)


@cache
def saved_decisions() -> tuple[Decision, ...]:
    """Return the decisions as they were written."""
    return _read(DECISIONS, Decision)


def group(line: Line) -> str:
    """Return the title of a row's kind."""
    if line.nbytes:
        return ("collectives below 64 KiB", "64 KiB to 64 MiB", "64 MiB and more")[estimate.size_class(line.nbytes)]
    return TITLES.get(line.kinds, "one GPU to several")


def by(lines: Iterable[Line], key: Callable[[Line], str]) -> dict[str, list[Line]]:
    """Return lines by a key, in order."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        found[key(line)].append(line)
    return dict(found)


def cells(lines: Sequence[Line]) -> str:
    """Return what tables show of some rows."""
    simulated = [line.error(line.simulated_s) for line in lines]
    formulas = [
        f"{median(errors):.1%}" if (errors := [abs(line.error(s)) for line in lines if (s := of(line))]) else ""
        for of in (lambda line: line.linear_s, lambda line: line.ring_s, lambda line: line.torch_s)
    ]
    held = sum(line.is_inside for line in lines) / len(lines)
    errors_ = f"{median(map(abs, simulated)):.1%} | {min(simulated):+.0%} to {max(simulated):+.0%}"
    width = median(line.width for line in lines)
    return f"{len(lines)} | {errors_} | {' | '.join(formulas)} | {held:.0%} | ±{width:.0%} |"


HEADINGS = "rows | median error | errors | linear | plain ring | PyTorch | held | width |"


def kinds_table() -> Iterator[str]:
    """Yield a line for each kind."""
    yield f"| kind | {HEADINGS}"
    for title, lines in by(saved(), group).items():
        yield f"| {title} | {cells(lines)}"
    training = [line for line in saved() if is_training(line)]
    storage = [line for line in saved() if line.kinds in estimate.STORAGE]
    collectives = [line for line in saved() if line.nbytes]
    yield f"| all training | {cells(training)}"
    for title, is_new in (("Ampere and Hopper", True), ("older GPUs", False)):
        some = [line for line in training if (line.classes.split("+")[0] in NEW) == is_new]
        yield f"| training: {title} | {cells(some)}"
    yield f"| all that read from storage | {cells(storage)}"
    yield f"| all collectives | {cells(collectives)}"
    alike = [line for line in collectives if _is_alike(line)]
    for title, lines in by(alike, group).items():
        yield f"| alike: {title.removeprefix('collectives ')} | {cells(lines)}"
    yield f"| alike: all collectives | {cells(alike)}"


def is_training(line: Line) -> bool:
    """Tell whether a row is of training with data that are in memory."""
    return not line.nbytes and line.kinds not in estimate.STORAGE


def _is_alike(line: Line) -> bool:
    """Tell whether other families tell something of a cluster."""
    return line.family not in NOT_ALIKE and estimate.ALONE.isdisjoint(line.classes.split("+"))


def families_table() -> Iterator[str]:
    """Yield a line for each family and kind."""
    yield f"| family | kind | {HEADINGS}"
    for title, lines in by(saved(), lambda line: f"{line.family} | {group(line)}").items():
        yield f"| {title} | {cells(lines)}"


def host_table() -> Iterator[str]:
    """Yield how near all-reduces are whose host was queued ahead or waited."""
    yield "| GPUs | calls | rows | median error: below 64 KiB | to 64 MiB | above | held |"
    for how in HOSTS:
        found = by((line for line in saved() if line.name.endswith(f", {how}")), lambda line: line.family)
        for family, lines in found.items():
            of_sizes = by(lines, lambda line: str(estimate.size_class(line.nbytes)))
            errors = [
                f"{median(line.error(line.simulated_s) for line in of_sizes[size]):+.0%}" if size in of_sizes else ""
                for size in "012"
            ]
            held = sum(line.is_inside for line in lines) / len(lines)
            yield f"| {family} | {how} | {len(lines)} | {' | '.join(errors)} | {held:.0%} |"


def worse_table() -> Iterator[str]:
    """Yield the families that a formula predicts better."""
    yield "| family | kind | rows | simulated | linear | plain ring |"
    for title, lines in by(saved(), lambda line: f"{line.family} | {group(line)}").items():
        ours, linear, ring = (
            median(abs(line.error(of(line))) for line in lines)
            for of in (lambda line: line.simulated_s, lambda line: line.linear_s, lambda line: line.ring_s)
        )
        best = ring if lines[0].nbytes else min(linear, ring)
        if ours > best + 0.005:
            shown = "" if lines[0].nbytes else f"{linear:.1%}"
            yield f"| {title} | {len(lines)} | {ours:.1%} | {shown} | {ring:.1%} |"


def doubts_table() -> Iterator[str]:
    """Yield the 5 % and 95 % quantiles of each class."""
    document = json.loads(DOUBTS.read_text(encoding="utf-8"))
    yield "| kind | hardware | rows | families | 5 % | median | 95 % |"
    for kind, classes in document["training"].items():
        for name, entry in classes.items():
            yield f"| {kind} | {name or 'all'} | {entry['rows']} | {entry['families']} | {_ends(entry['logs'][0])}"
    sizes = ("16 KiB", "2 MiB", "256 MiB")
    for kind, entry in document["storage"]["classes"].items():
        for length, logs in zip(("short steps", "long steps"), entry["logs"], strict=True):
            yield f"| {kind} | {length} | {entry['rows']} | {entry['families']} | {_ends(logs)}"
    for name, entry in document["collectives"]["classes"].items():
        for size, logs in zip(sizes, entry["logs"], strict=True):
            counts = f"{entry['rows']} | {entry['families']}"
            yield f"| collectives, {size} | {name or 'all'} | {counts} | {_ends(logs)}"


def _ends(logs: Sequence[float]) -> str:
    last = len(logs) - 1
    return " | ".join(f"{math.exp(logs[round(at * last)]) - 1:+.0%}" for at in (0.05, 0.5, 0.95)) + " |"


def decisions_table() -> Iterator[str]:
    """Yield by family how many decisions are clear, and right."""
    yield "| measured | decisions | clear | of these right |"
    by_family: dict[str, list[Decision]] = defaultdict(list)
    for each in saved_decisions():
        by_family[each.family].append(each)
    plain = [each for each in saved_decisions() if not each.with_host]
    known = {each.family.removesuffix(WITH_HOST) for each in saved_decisions() if each.with_host}
    informed = [each for each in saved_decisions() if each.with_host or each.family not in known]
    for family, found in {**by_family, "all": plain, f"all{WITH_HOST} where it is known": informed}.items():
        clear = [each for each in found if each.is_clear]
        yield f"| {family} | {len(found)} | {len(clear)} | {sum(each.is_right for each in clear)} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    every = {
        "kinds": kinds_table,
        "decisions": decisions_table,
        "host": host_table,
        "doubts": doubts_table,
        "curves": batches.curves_table,
        "batches": batches.table,
        "worse": worse_table,
        "families": families_table,
    }
    return {name: markdown_table(table()) for name, table in every.items()}


def main() -> None:
    """Run the experiment."""
    if "--write" in sys.argv:
        save(left_out(predicted()))
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
