"""Write the tables of README and docs that follow from what was recorded.

    python tools/tables.py            write
    python tools/tables.py --check    exit with 1 if a page is out of date

Text between `<!-- table NAME -->` and `<!-- end -->` is made here, of results that are kept as files: those of
benchmarks and of the demo, those of `tools/mutants.py`, and the tables of errors on the pages of the experiments, which
the tests of these experiments hold to the code.
"""

import argparse
import functools
import json
import math
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUMBER = re.compile(r"([+-]?[\d.]+)%?")
_ON_GPUS = "step times on GPUs"
MARKED = re.compile(r"(<!-- table ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.S)


# ---------------------------------------------------------------- numbers on the pages of experiments


@cache
def rows(experiment: str, table: str) -> list[list[str]]:
    """Return the cells of a table on the page of an experiment; the first row are the headings."""
    page = (ROOT / "experiments" / experiment / "README.md").read_text(encoding="utf-8")
    text = page.partition(f"<!-- table {table} -->\n")[2].partition("<!-- end -->")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def numbers(
    experiment: str, table: str, column: str | int, where: Callable[[list[str]], bool] = lambda _: True
) -> list[float]:
    """Return the numbers in a column, by heading or by place, of the rows for which `where` holds.

    Cells that hold no number, such as `not simulated`, are left out.
    """
    heading, *body = rows(experiment, table)
    at = column if isinstance(column, int) else heading.index(column)
    cells = (NUMBER.fullmatch(row[at]) for row in body if where(row))
    return [float(cell[1]) for cell in cells if cell]


def percent(values: Iterable[float]) -> str:
    """Return a range of errors as text.

    >>> percent([1.2, -4.6])
    '-5 to +1 %'
    >>> percent([13.4])
    '+13 %'
    """
    found = sorted(_rounded(value) for value in values)
    low, high = _signed(found[0]), _signed(found[-1])
    return f"{low} %" if low == high else f"{low} to {high} %"


def _rounded(value: float) -> int:
    return math.floor(abs(value) + 0.5) * (1 if value > 0 else -1)


def _signed(value: int) -> str:
    return f"{value:+d}" if value else "0"


def link(experiment: str, *, where: Path) -> str:
    path = ROOT / "experiments" / experiment / "README.md"
    return f"[{experiment}]({Path(os.path.relpath(path, where.parent)).as_posix()})"


# ---------------------------------------------------------------- the tables


@dataclass(frozen=True)
class Family:
    """Published rows of one kind, in a table on the page of an experiment.

    Args:
        what: In words.
        table: Its name, or those of several of the same columns, with " + " between.
        error: Heading or place of the column of errors, in percent.
        where: Which rows of the table.
        unit: Of the errors.
        counts: Whether they are predictions of measurements, and so count in the sum of all.
    """

    what: str
    table: str
    error: str | int = "error"
    where: Callable[[list[str]], bool] = lambda _: True
    unit: str = "%"
    counts: bool = True

    def column(self, experiment: str, heading: str | int) -> list[str]:
        """Return the cells of a column of its rows that have an error; none if there is no such column."""
        tables = [rows(experiment, name) for name in self.table.split(" + ")]
        headings, body = tables[0][0], [row for _, *body in tables for row in body]
        error = self.error if isinstance(self.error, int) else headings.index(self.error)
        if isinstance(heading, str) and heading not in headings:
            return []
        at = heading if isinstance(heading, int) else headings.index(heading)
        return [row[at] for row in body if self.where(row) and NUMBER.fullmatch(row[error])]

    def values(self, experiment: str, heading: str | int) -> list[float]:
        """Return the numbers in a column."""
        return [float(match[1]) for cell in self.column(experiment, heading) if (match := NUMBER.fullmatch(cell))]

    def found(self, experiment: str) -> "Found":
        """Return how near the simulator and the formulas come."""
        errors = self.values(experiment, self.error)
        inside = self.column(experiment, "inside") or [""] * len(errors)
        return Found(
            errors,
            [{"yes": True, "no": False}.get(cell) for cell in inside],
            self.values(experiment, "linear"),
            self.values(experiment, "plain ring"),
            self.unit,
        )


@dataclass(frozen=True)
class Found:
    """Errors of rows, and whether what was published is in their intervals, if they have some."""

    errors: list[float]
    inside: list[bool | None]
    linear: list[float]
    ring: list[float]
    unit: str = "%"

    def cells(self) -> list[str]:
        """Return the cells of a row of the table."""
        low, high = min(self.errors), max(self.errors)
        shown = percent([low, high]).replace("%", self.unit)
        near = sum(abs(error) <= 10 for error in self.errors)
        intervals = self.in_intervals
        inside = f"{sum(intervals)} of {len(intervals)}" if intervals else ""
        plain = [f"{median(map(abs, each)):.0f} %" if each else "" for each in (self.linear, self.ring)]
        middle = f"{median(map(abs, self.errors)):.1f} {self.unit}"
        return [str(len(self.errors)), shown, middle, str(near), inside, *plain]

    @property
    def in_intervals(self) -> list[bool]:
        """Whether what was published is in the interval, of rows that have one."""
        return [each for each in self.inside if each is not None]

    @property
    def n_met(self) -> int:
        """Rows within 10 % or in their interval."""
        return sum(abs(error) <= 10 or bool(inside) for error, inside in zip(self.errors, self.inside, strict=True))

    @property
    def is_worse_than_plain(self) -> bool:
        """Whether a plain formula has the smaller median error."""
        plain = [median(map(abs, each)) for each in (self.linear, self.ring) if each]
        return bool(plain) and median(map(abs, self.errors)) > min(plain)

    def __add__(self, other: "Found") -> "Found":
        return Found(
            self.errors + other.errors, self.inside + other.inside, self.linear + other.linear, self.ring + other.ring
        )


def _has_bytes(low: int, high: int) -> Callable[[list[str]], bool]:
    return lambda row: low <= int(row[0]) < high


def _by_size(what: str, tables: str) -> list[Family]:
    ranges = {"below 64 KiB": (0, 2**16), "64 KiB to 32 MiB": (2**16, 2**25), "32 MiB and more": (2**25, 2**62)}
    return [Family(f"{what}, {title}", tables, where=_has_bytes(*of)) for title, of in ranges.items()]


def _is_dense_on(*gpus: str) -> Callable[[list[str]], bool]:
    return lambda row: row[1] == "dense" and row[2] in gpus


def _is_stream(row: list[str]) -> bool:
    return "Streaming" in row[1]


def _is_any_moment(row: list[str]) -> bool:
    return "at any moment" in row[0]


def _is_single(row: list[str]) -> bool:
    return "AMP" not in row[1] and "TensorFlow" not in row[1]


_FSDP = "llm foundry H100 + llm foundry A100 + torchtitan"
FAMILIES: dict[str, list[Family]] = {
    "hsgd_stragglers": [
        Family("speed-ups of hierarchical SGD, 64 to 256 GPUs: the lowest", "published", 3),
        Family("the highest", "published", 4),
    ],
    "one_machine": [
        Family("one GPU to 2, 4 and 8: P100 and K80, single precision", "tensorflow"),
        Family("V100 and A100, single precision", "tensor cores", where=_is_single),
        Family("V100 and A100, mixed precision", "tensor cores", where=lambda row: not _is_single(row)),
    ],
    "horovod_scaling": [
        Family("Horovod with NCCL, 16 GPUs, TCP and RDMA, three models", "nccl"),
        Family("the same on 64 GPUs, TCP", "other"),
        Family("on 128 and 512 GPUs, RDMA", "large"),
        Family("TensorFlow's parameter servers, 16 and 64 GPUs", "servers"),
        Family("Horovod with MPI on CPUs, 16 and 64 GPUs", "mpi"),
    ],
    "aws_p3_scaling": [
        Family("16 to 128 V100, from one GPU and one machine", "rates"),
        Family("three other users, likewise", "others"),
        Family("8 to 128 V100, from one GPU", "one gpu", counts=False),
    ],
    "dawnbench_resnet50": [
        Family("an iteration on 16 machines", "extra", "iteration: simulated"),
        Family("what 16 machines add to it", "extra", counts=False),
        Family("bytes on a network card", "nic"),
    ],
    "published_sharding": [
        Family("FSDP on 16 to 128 H100 and A100, from the fewest GPUs: llm-foundry, torchtitan", _FSDP),
        Family("256 H100 from 128: llm-foundry; 4 A100 from 2: VectorLM", "llm foundry H100 large + VectorLM"),
        Family("ZeRO-1 by degree on 8 to 1,024 A100, from the first row: InternEvo", "InternEvo"),
        Family("ZeRO-1 within machines, packed samples, likewise", "InternEvo packed + InternEvo checkpointing"),
        Family("FSDP and HSDP on 16 to 256 A100, from 8, and one gather: Leonardo", "steps"),
        Family("no row of the same model: 13B to 70B from 7B, IBM", "IBM A100 + IBM H100", counts=False),
        Family("on a network that is not published: YaFSDP", "YaFSDP", counts=False),
    ],
    "nccl_tables": [
        *_by_size("all-reduce of 8 H100 or H200 in one machine", "h100 + h200"),
        *_by_size("of 8 A100 in one machine", "a100 + a100-oci"),
        *_by_size("of 16 to 32 A100 over networks", "p4de + a100-oke + a100-ib"),
        *_by_size("of 16 to 32 H100 and B200 over networks", "p5 + h100-nebius + a3mega + b200-4"),
        Family("on two clusters that carry a third of their like, all sizes", "a100-oci-2 + h100-ib"),
        Family("of 8 B on 16 to 64 V100 over EFA", "latency"),
    ],
    "hitopk_communication": [
        Family("a cloud's hierarchical top-k", "measured", where=lambda row: "LightCC" in row[0]),
        Family("its dense training", "measured", where=lambda row: "Horovod" in row[0]),
    ],
    "gtopk_1gbe": [
        Family(
            "global top-k over 1 GbE, with what another model's runs took beside",
            "published",
            7,
            lambda row: row[1] == "gtopk",
        ),
        Family("dense on 4 and 8 GPUs", "published", 7, _is_dense_on("4", "8")),
        Family("dense on 16 and 32 GPUs", "published", 7, _is_dense_on("16", "32")),
        Family("flat top-k", "published", 7, lambda row: row[1] == "topk"),
    ],
    "mlperf_storage": [
        Family(
            "utilisation of accelerators that a drive of stated bandwidth feeds", "published", "points", unit="points"
        ),
    ],
    "efs_k80": [
        Family(
            "images/s with real data where no limit is predicted: rates are inputs, Amazon",
            "ec2",
            where=lambda row: row[0] != "AlexNet",
        ),
        Family("Google", "gce"),
        Family("8 to 64 K80 with parameter servers, from one machine", "clusters"),
        Family("AlexNet on Amazon's file system", "ec2", where=lambda row: row[0] == "AlexNet"),
    ],
    "backup_workers": [
        Family("normalised speed-up of 50 workers and 3 more: one parameter, of the same source", "steps")
    ],
    "garbage_collection": [
        Family(
            "seconds that collecting garbage together saves 64 processes, from their pauses",
            "saved",
            where=_is_any_moment,
        )
    ],
    "streaming_diloco": [
        Family(
            "no measurement: bandwidth of another simulator: data parallelism and DiLoCo",
            "bandwidth",
            where=lambda row: not _is_stream(row),
            counts=False,
        ),
        Family("its streams, which send before they can", "bandwidth", where=_is_stream, counts=False),
    ],
    "netai_whatif": [Family("no measurement: another simulator's rules, recomputed", "published", 4, counts=False)],
}
"""Experiment -> what was published there."""


@cache
def all_rows(*, collectives: bool) -> Found:
    """Return all rows that are predictions of something measured: of single collectives, or all others."""
    found = [
        each.found(experiment)
        for experiment, of in FAMILIES.items()
        for each in of
        if each.counts and (experiment == "nccl_tables") == collectives
    ]
    return functools.reduce(operator.add, found)


def near(page: Path, _: str) -> list[str]:
    """Return how near each experiment comes to what was published."""
    headings = (
        "page",
        "published",
        "rows",
        "error",
        "median",
        "within 10 %",
        "in the interval",
        "linear scaling",
        "plain ring",
    )
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for experiment, families in FAMILIES.items():
        shown = link(experiment, where=page)
        for each in families:
            what = each.what if each.counts else f"*{each.what}*"
            lines.append(f"| {shown} | {what} | {' | '.join(each.found(experiment).cells())} |")
            shown = ""
    return lines + [f"| | **{what}** | {' | '.join(every.cells())} |" for what, every in _sums().items()]


def _sums() -> dict[str, Found]:
    """Return all rows that count, by what they are about."""
    return {"training, storage": all_rows(collectives=False), "single all-reduces": all_rows(collectives=True)}


def near_in_short(_: Path, __: str) -> list[str]:
    """Return how near all published rows are, in a few lines."""
    sums = _sums()
    worse = [
        each.what
        for experiment, families in FAMILIES.items()
        for each in families
        if each.found(experiment).is_worse_than_plain
    ]
    lines = []
    for what, every in sums.items():
        n_rows = len(every.errors)
        lines.append(
            f"* Of {n_rows} rows of {what}, {every.n_met} ({every.n_met / n_rows:.0%}) are within 10 % or in their "
            f"interval; the median error is {median(map(abs, every.errors)):.1f} %."
        )
    held = [each for every in sums.values() for each in every.in_intervals]
    return [
        *lines,
        f"* Intervals of 90 or 95 % hold {sum(held)} of {len(held)} rows ({sum(held) / len(held):.0%}).",
        f"* A plain formula has the smaller median error for: {'; '.join(worse) or 'none'}.",
    ]


def overview(experiment: str, table: str) -> list[str]:
    """Return the lines of an overview on the page of an experiment."""
    page = (ROOT / "experiments" / experiment / "README.md").read_text(encoding="utf-8")
    return page.partition(f"<!-- table {table} -->\n")[2].partition("<!-- end -->")[0].strip().splitlines()


def said(lines: Iterable[str], pattern: str) -> list[tuple[str, ...]]:
    """Return what the groups of a pattern match in each line; every line must match."""
    found = [re.search(pattern, line) for line in lines]
    assert all(found), pattern
    return [match.groups() for match in found if match]


def in_short(experiment: str) -> str:
    """Return the errors and intervals of the published rows of an experiment that count."""
    found = functools.reduce(operator.add, (each.found(experiment) for each in FAMILIES[experiment] if each.counts))
    n_inside, n_rows = sum(found.in_intervals), len(found.errors)
    return (
        f"images/s of {sum(abs(error) <= 10 for error in found.errors)} of {n_rows} rows within 10 %, all "
        f"{percent(found.errors)}; {n_inside} of {len(found.in_intervals)} in their interval"
    )


@dataclass(frozen=True)
class Facts:
    """Numbers of the recorded experiments, as the tables of trust say them."""

    steps: str
    order: str
    other_steps: str
    other_order: str
    rivals: str
    sharded: str
    degrees: str
    serial: str
    bandwidths: tuple[str, str]
    stragglers: str
    speedups: str
    scaling: str
    one_machine: str
    machines: str
    epochs: str
    levels: str
    imported: str
    imported_speedups: str
    imported_stragglers: str
    n_imported: int
    failing: str
    computing: str
    computing_speedups: str
    slow_networks: str
    read: str
    targets: str
    on_gpus: Mapping[str, str]


@cache
def facts() -> Facts:
    """Collect the numbers."""

    def errors(table: str) -> str:
        medians = said(overview("emulated_cluster", table), r"error median ([\d.]+%), worst ([+-][\d.]+)%")
        worst = max((worst for _, worst in medians), key=lambda each: abs(float(each)))
        others = f"{' and '.join(each for each, _ in medians[1:])} on {'another' if len(medians) == 2 else 'others'}"
        return f"median {medians[0][0]} on the calibrated shape, {others}; worst {worst}%"

    def order(table: str) -> str:
        pairs = said(overview("emulated_cluster", table), r"order: of (\d+) pairs .* measured, (\d+) are right")
        return f"{sum(int(right) for _, right in pairs)} of {sum(int(every) for every, _ in pairs)}"

    def total(table: str, pattern: str) -> str:
        counted = said(overview("emulated_cluster", table), pattern)
        return f"{sum(int(each[0]) for each in counted)} of {sum(int(each[1]) for each in counted)}"

    sleeping, _, found, computing = overview("profile_round_trip", "summary")
    ((step, speedups, n_sleeping),) = said([sleeping], r"predicted (\S+ to \S+) off, .* `sync` (\S+ to \S+), in (\d+)")
    ((injected, seen, size),) = said([found], r"Of (\d+) injected stragglers, (\d+) were .* at most (\S+) off")
    ((busy_step, busy_speedups, n_busy),) = said(
        [computing], r"predicted (\S+ to \S+) off, .* `sync` (\S+ to \S+), in (\d+)"
    )
    ((serial,),) = said(overview("profile_round_trip", "sharded summary"), r"step predicted (\S+ to \S+) off,")
    traces = overview("public_traces", "times")[2:]
    times = [pair for line in traces for pair in re.findall(r"([\d.]+) / ([\d.]+)", line)[:-1]]  # but for the host's
    most_ms = max(abs(float(told) - float(shown)) for told, shown in times)
    seconds, _, losses, orders = overview("time_to_accuracy", "summary")
    (to_target,) = said([seconds], r"median error (\S+), worst (\S+),")
    ((n_exact, n_runs),) = said([losses], r"to the last bit in (\d+) of (\d+) runs")
    ((pairs, right),) = said([orders], r"Of (\d+) pairs .*, (\d+) were predicted in the right order")
    scaling = [
        *numbers("horovod_scaling", "nccl", "error"),
        *numbers("horovod_scaling", "other", "error"),
        *numbers("horovod_scaling", "large", "error"),
    ]
    return Facts(
        steps=errors("synchronization overview"),
        order=order("synchronization overview"),
        other_steps=errors("communication overview"),
        other_order=order("communication overview"),
        rivals=errors("rivals overview"),
        sharded=errors("sharded overview"),
        degrees=total("sharded overview", r"the best degree is predicted right in (\d+) of (\d+) scenarios"),
        serial=serial,
        bandwidths=(
            percent(numbers("streaming_diloco", "bandwidth", "error", lambda row: not _is_stream(row))),
            percent(numbers("streaming_diloco", "bandwidth", "error", _is_stream)),
        ),
        stragglers=total("synchronization overview", r"(\d+) of (\d+) stragglers"),
        speedups=percent([*numbers("hsgd_stragglers", "published", 3), *numbers("hsgd_stragglers", "published", 4)]),
        scaling=percent(scaling),
        one_machine=in_short("one_machine"),
        machines=in_short("aws_p3_scaling"),
        epochs=errors("storage overview"),
        levels=total("storage overview", r"in (\d+) of (\d+) runs"),
        imported=step,
        imported_speedups=speedups,
        imported_stragglers=f"{seen} of {injected} found by rank and step, sizes within {size.lstrip('+')}",
        n_imported=int(n_sleeping) + int(n_busy),
        computing_speedups=busy_speedups,
        slow_networks=slow_networks(),
        failing=failing_jobs(),
        computing=f"step {busy_step}, speed-ups {busy_speedups}; few are recommended",
        read=f"times of a step within {max(most_ms, 0.1):.1f} ms of a second reader's, in {len(traces)} public traces",
        targets=f"time to the target: median {to_target[0]}, worst {to_target[1]}; {right} of {pairs} pairs in order; "
        f"losses equal to the last bit in {n_exact} of {n_runs} runs",
        on_gpus=on_gpus(),
    )


def failing_jobs() -> str:
    """Return how near the times of jobs with failures are."""
    pattern = r"Of (\d+) runs, .* is (\S+) in the median and (\S+) at worst.* steps of (\d+) are exactly"
    ((n_runs, middle, worst, n_exact),) = said(overview("failures", "overview"), pattern)
    return f"total time: median {middle}, worst {worst}; repeated steps exact in {n_exact} of {n_runs} runs"


def slow_networks() -> str:
    """Return by how much dense training is predicted too fast over networks that carry less than their kind."""

    def times(experiment: str, table: str, column: str | int, where: Callable[[list[str]], bool]) -> str:
        return f"{1 + max(numbers(experiment, table, column, where)) / 100:.0f} times"

    ethernet = times("gtopk_1gbe", "published", 5, lambda row: row[1] == "dense")
    cloud = times("hitopk_communication", "measured", "error", lambda row: "Horovod" in row[0])
    return f"dense training up to {ethernet} too fast over 1 Gbit/s, {cloud} over a cloud's TCP"


def other_batch_sizes() -> str:
    """Return how near steps are to what two sizes of their curve and one sample predict."""
    _, n_curves, n_steps, middle, worst, within, held, _ = rows("published_rows", "curves")[-1]
    return (
        f"{n_steps} steps of {n_curves} curves: median {middle}, worst {worst}; {within} within 10 %; "
        f"of smaller sizes, {held} in the interval"
    )


def on_gpus() -> dict[str, str]:
    """Return what was compared with a GPU -> its errors, as the page of the experiment has them, or `never`."""
    return {row[0]: row[1] for row in rows("gpu", "summary")[1:]}


def trust_overview(page: Path, _: str) -> list[str]:
    """Return the comparisons that the front page names: what, with what, how many rows, how near, and where to read."""
    known = facts()
    training = all_rows(collectives=False)
    reductions = all_rows(collectives=True)
    speedups = [*numbers("hsgd_stragglers", "published", 3), *numbers("hsgd_stragglers", "published", 4)]

    def near(every: Found) -> str:
        median_error = f"median {median(map(abs, every.errors)):.1f} %"
        return f"{median_error}; {every.n_met} within 10 % or in the stated interval; all {percent(every.errors)}"

    rows = [
        (
            "step times of sync, local and hierarchical SGD, links calibrated",
            "the same plans run on CPUs, three emulated clusters",
            f"{known.order.partition(' of ')[2]} pairs",
            f"{known.steps}; {known.order} in the right order",
            link("emulated_cluster", where=page),
        ),
        (
            "what stragglers cost: speed-ups over sync",
            "a paper, 64 to 256 GPUs",
            str(len(speedups)),
            known.speedups,
            link("hsgd_stragglers", where=page),
        ),
        (
            "training rates, storage, from data sheets and rates of one GPU or machine",
            "papers, benchmarks and logs, up to 512 GPUs",
            str(len(training.errors)),
            near(training),
            "[every row](experiments/README.md#how-near-to-published-numbers)",
        ),
        (
            "single all-reduces of NCCL, 8 B to 16 GiB",
            "published tables, A100 to B200",
            str(len(reductions.errors)),
            near(reductions),
            link("nccl_tables", where=page),
        ),
        (
            "speed-up of an imported job under another schedule (gloo, CPUs)",
            "the job trained again with it",
            f"{known.n_imported} runs",
            f"{known.imported_speedups}; where computing shares cores with communication {known.computing_speedups}",
            link("profile_round_trip", where=page),
        ),
        (
            _ON_GPUS,
            "the same plans run",
            "",
            "; ".join(f"{name}: {errors}" for name, errors in known.on_gpus.items()),
            link("gpu", where=page),
        ),
    ]
    return [
        "| predicted | compared with | rows | error | read more |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def trust(_: Path, old: str) -> list[str]:
    """Return the whole table of trust: its text as it stands on the page, with the errors that were recorded."""
    known = facts()
    errors = {
        "step times of synchronous, local and hierarchical SGD, calibrated": known.steps,
        "step times of torus, parameter servers, top-k, calibrated": known.other_steps,
        "step times of DiLoCo, late averages, PowerSGD, shared updates, backup workers, calibrated": known.rivals,
        "step times of sharded models (`fsdp`, `hsdp`), calibrated": known.sharded,
        "how many ranks should share a copy of a model, calibrated": f"right in {known.degrees} scenarios",
        "the step of a job under `fully_shard` on CPUs, imported: its collectives block": known.serial,
        "what backup workers gain, from the mean delay alone": (
            f"normalised speed-up {percent(numbers('backup_workers', 'steps', 'error'))}"
        ),
        "what unsynchronised garbage collection costs, from its pauses": (
            "seconds saved by synchronising it "
            + percent(numbers("garbage_collection", "saved", "error", _is_any_moment))
        ),
        "which bandwidth DiLoCo and its stream need between data centers": (
            f"{known.bandwidths[0]} for DiLoCo and data parallelism, {known.bandwidths[1]} for the streams"
        ),
        "how long a job with failures takes, calibrated": known.failing,
        "which rank holds up the others": f"named, in the same step, for {known.stragglers} stragglers",
        "what stragglers cost: speed-ups over synchronous SGD": f"speed-ups {known.speedups}",
        "what all GPUs of a machine do, from the rate of one": known.one_machine,
        "what more machines do, from the rates of one GPU and one machine": known.machines,
        "how training scales where communication does not dominate": f"images/s {known.scaling}",
        "how it scales where communication dominates": known.slow_networks,
        "when a model reaches a target, tasks that ship": known.targets,
        "times of epochs with caches, calibrated": known.epochs,
        "which level of storage samples come from": f"exact in {known.levels} runs",
        "how TensorFlow's parameter servers scale": (
            f"images/s {percent(numbers('horovod_scaling', 'servers', 'error'))}"
        ),
        "how reduction on CPUs scales": f"images/s {percent(numbers('horovod_scaling', 'mpi', 'error'))}",
        "where a step of a job on GPUs goes, imported from its profiler traces": known.read,
        "who slowed an imported job, when, by how much": known.imported_stragglers,
        "what another schedule gains for an imported job": (
            f"speed-ups {known.imported_speedups} in jobs whose layers sleep; with shared cores {known.computing}"
        ),
        "times of other batch sizes, from two sizes on the same GPU": other_batch_sizes(),
        **{f"{_ON_GPUS}: {name}": errors for name, errors in known.on_gpus.items()},
    }
    lines = [line for line in old.splitlines() if line.startswith("|")]
    for number, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in errors:
            cells[2] = errors.pop(cells[0])
            if cells[0].startswith(_ON_GPUS):
                cells[1] = "unknown" if cells[2] == "never" else "as its errors"
            lines[number] = f"| {' | '.join(cells)} |"
    assert not errors, f"no such rows: {list(errors)}"
    assert f"{known.order} are in the right order" in lines[2], known.order
    assert f"{known.other_order}," in lines[2], known.other_order
    return lines


def speed(_: Path, __: str) -> list[str]:
    """Return how fast the engines are, from the recorded benchmark."""
    measured = recorded("engines.json")
    sizes, whole, large = measured["sizes"], measured["compare"], measured["scaling"]["by_ranks"][-1]
    lines = [
        f"| {sizes['ranks']} ranks x {sizes['steps']} steps | `des`, rank-ops/s | `fast`, rank-ops/s | ratio "
        f"| `fast`, {sizes['batch_seeds']} seeds at once, no trace |",
        "|---|---|---|---|---|",
    ]
    for row in measured["engines"]:
        lines.append(
            f"| {row['schedule']} | {row['des_rank_ops_per_s'] / 1e6:.2f} M | {row['fast_rank_ops_per_s'] / 1e6:.0f} M "
            f"| {row['fast_over_des']:.0f} | {row['batch_rank_ops_per_s'] / 1e6:,.0f} M |"
        )
    return [
        *lines,
        "",
        f"* Comparing {whole['schedules']} schedules on {whole['ranks']} GPUs, {whole['steps']} steps x "
        f"{whole['seeds']} seeds: {whole['seconds']:.1f} s.",
        f"* Hierarchical SGD on {large['ranks']:,} ranks, {large['steps']} steps, building and proving the plan "
        f"included: {large['build_s'] + large['measure_s']:.1f} s and {large['peak_MiB']:.0f} MiB.",
    ]


def questions(_: Path, __: str) -> list[str]:
    """Return what answers about real models cost, from the recorded benchmark."""
    measured = recorded("questions.json")
    lines = ["| question | CPU seconds | memory |", "|---|---|---|"]
    for row in measured["questions"]:
        lines.append(f"| {row['question']} | {row['cpu_s']:.1f} | {row['peak_MiB']:.0f} MiB |")
    return lines


def overhead(_: Path, __: str) -> list[str]:
    """Return what a wrapped loop costs, from the recorded benchmark."""
    return [
        "| schedule | steps/s, simdist : torch's own | step by hand |",
        "|---|---|---|",
        *(
            f"| {name} | {row['ratio']:.3f} | {row['by_hand_ms']:.1f} ms |"
            for name, row in recorded("overhead.json").items()
        ),
    ]


def watch(_: Path, __: str) -> list[str]:
    """Return what a watched loop costs, from the recorded benchmark."""
    found = recorded("watch.json")
    return [
        "| steps/s, watched : not watched | 95 % | step | CPU time of the watch in a step | share |",
        "|---|---|---|---|---|",
        f"| {found['ratio']:.3f} | {found['lowest']:.3f} to {found['highest']:.3f} | {found['step_ms']:.1f} ms "
        f"| {found['cpu_us']:.0f} us | {found['cpu_share']:.2%} |",
    ]


def demo(_: Path, __: str) -> list[str]:
    """Return what `make demo` printed last, as it was recorded."""
    printed = (RESULTS / "demo.txt").read_text(encoding="utf-8").rstrip()
    return ["```", *printed.splitlines(), "```"]


def mutants(_: Path, __: str) -> list[str]:
    """Return which tier of tests notices how many planted bugs, from the recorded run of `tools/mutants.py`."""
    found = recorded("mutants.json")
    by_tier = Counter(each["tier"] for each in found)
    survived = [each for each in found if each["tier"] is None]
    n_packages = len({each["package"] for each in found})
    n_noticed = len(found) - len(survived)
    return [
        f"Of {len(found)} bugs in {n_packages} packages, {n_noticed} are noticed: {by_tier['check']} by `make check`, "
        f"{by_tier['test']} more by `make test`, and {by_tier['ci']} more by `make ci`. Not noticed:",
        "",
        *(f"* {each['package']}: {each['name']}" for each in survived),
    ]


def recorded(name: str) -> Any:
    """Return a recorded result."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


TABLES: Mapping[str, Callable[[Path, str], list[str]]] = {
    "trust overview": trust_overview,
    "trust": trust,
    "near": near,
    "near in short": near_in_short,
    "speed": speed,
    "questions": questions,
    "overhead": overhead,
    "watch": watch,
    "demo": demo,
    "mutants": mutants,
}


def updated(page: Path) -> str:
    """Return a page with the tables of this module as they should be now."""

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            return match[0]
        return match[1] + "\n".join(TABLES[match[2]](page, match[3])) + "\n" + match[4]

    return MARKED.sub(table, page.read_text(encoding="utf-8"))


def main() -> int:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = [page for page in PAGES if updated(page) != page.read_text(encoding="utf-8")]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'out of date' if check else 'written'}")
        if not check:
            page.write_text(updated(page), encoding="utf-8")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
