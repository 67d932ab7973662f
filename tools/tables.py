"""Write the tables of README and docs that follow from what was recorded.

    python tools/tables.py            write
    python tools/tables.py --check    exit with 1 if a page is out of date

Text between `<!-- table NAME -->` and `<!-- end -->` is made here, of results that are kept as files: those of
benchmarks and of the demo, those of `tools/mutants.py`, and the tables of errors on the pages of the experiments, which
the tests of these experiments hold to the code.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    cells = (re.fullmatch(r"([+-]?[\d.]+)%?", row[at]) for row in body if where(row))
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
    up = len(where.parent.relative_to(ROOT).parts)
    return f"[{experiment}]({'../' * up}{path.relative_to(ROOT).as_posix()})"


# ---------------------------------------------------------------- the tables


def near(page: Path, _: str) -> list[str]:
    """Return how near each experiment comes to what was published."""

    def is_large(row: list[str]) -> bool:
        return int(row[0]) >= 64 * 2**20

    def is_gtopk(row: list[str]) -> bool:
        return row[1] == "gtopk"

    def is_dense_on(*gpus: str) -> Callable[[list[str]], bool]:
        return lambda row: row[1] == "dense" and row[2] in gpus

    hsgd = [*numbers("hsgd_stragglers", "published", 3), *numbers("hsgd_stragglers", "published", 4)]
    nccl, aws, gtopk = "nccl_tables", "aws_p3_scaling", "gtopk_1gbe"
    off = numbers("mlperf_storage", "published", "points")
    no_limit = [
        *numbers("efs_k80", "ec2", "error", lambda row: row[0] != "AlexNet"),
        *numbers("efs_k80", "gce", "error", lambda row: row[0] != "AlexNet"),
    ]
    alexnet = numbers("efs_k80", "ec2", "error", lambda row: row[0] == "AlexNet" and row[1] in "24")
    measured = numbers("hitopk_communication", "measured", "error")
    between = numbers(nccl, "a100-efa", 4, lambda row: 64 < int(row[0]) < 64 * 2**20)
    table = [
        ("hsgd_stragglers", "speed-ups of hierarchical SGD, 64 to 256 GPUs", percent(hsgd)),
        (
            "horovod_scaling *",
            "Horovod with NCCL, 16 GPUs, TCP and RDMA, three models",
            percent(numbers("horovod_scaling", "nccl", "error")),
        ),
        (
            "",
            "the same on 64 GPUs, TCP; on 128, RDMA",
            f"{percent(numbers('horovod_scaling', 'other', 'error'))}; "
            f"{percent(numbers('horovod_scaling', 'large', 'error'))}",
        ),
        ("", "TensorFlow's parameter servers", percent(numbers("horovod_scaling", "servers", "error"))),
        (
            f"{aws} *",
            "ResNet-50 on 8 to 64 V100; on 128",
            f"{percent(numbers(aws, 'rates', 'error', lambda row: row[0] != '128'))}; "
            f"{percent(numbers(aws, 'rates', 'error', lambda row: row[0] == '128'))}",
        ),
        (
            "dawnbench_resnet50",
            "what 16 machines cost per iteration; bytes on a network card",
            f"{percent(numbers('dawnbench_resnet50', 'extra', 'error'))}; "
            f"{percent(numbers('dawnbench_resnet50', 'nic', 'error'))}",
        ),
        (
            nccl,
            "all-reduce over EFA: 8 B on 16 to 64 GPUs; 64 MiB and more",
            f"{percent(numbers(nccl, 'latency', 3))}; {percent(numbers(nccl, 'a100-efa', 4, is_large))}",
        ),
        (
            "",
            "between these sizes; a ring of 128 MiB and more, which NCCL does not take",
            f"{percent(between)}; {percent(numbers(nccl, 'a100-efa', 6, lambda row: int(row[0]) >= 128 * 2**20))}",
        ),
        (
            "",
            "over NVLink: 512 MiB and more; below",
            f"{percent(numbers(nccl, 'a100-nvlink', 4, lambda row: int(row[0]) >= 512 * 2**20))}; "
            f"{percent(numbers(nccl, 'a100-nvlink', 4, lambda row: int(row[0]) < 512 * 2**20))}",
        ),
        (
            "hitopk_communication",
            "a cloud's hierarchical top-k; its dense training over a faster stack, over TCP",
            f"{percent(measured[2:])}; {percent(measured[1:2])}, {percent(measured[:1])}",
        ),
        (
            gtopk,
            "global top-k over 1 GbE, with host work read off a third model; without",
            f"{percent(numbers(gtopk, 'published', 7, is_gtopk))}; {percent(numbers(gtopk, 'published', 5, is_gtopk))}",
        ),
        (
            "",
            "its rivals, with that work: dense on 4 and 8, on 16 and 32 GPUs; flat top-k",
            f"{percent(numbers(gtopk, 'published', 7, is_dense_on('4', '8')))}, "
            f"{percent(numbers(gtopk, 'published', 7, is_dense_on('16', '32')))}; "
            f"{percent(numbers(gtopk, 'published', 7, lambda row: row[1] == 'topk'))}",
        ),
        (
            "mlperf_storage",
            f"accelerators that a drive of stated bandwidth feeds, MLPerf Storage v1.0: {len(off)} submissions",
            f"utilisation of {sum(abs(each) < 4 for each in off)} within 4 points; the others "
            f"{min(off):+.0f} to {max(off):+.0f} points off",
        ),
        (
            "efs_k80",
            f"images/s with real data, {len(no_limit)} rows for which no limit is predicted: rates are inputs",
            percent(no_limit),
        ),
        (
            "",
            "AlexNet on 2 and 4 GPUs, more than the stated rate of its file system",
            ", ".join(percent([each]) for each in alexnet),
        ),
        ("datacache", "no measurement found: what the levels of a cache save on 1 to 16 machines", ""),
        (
            "netai_whatif",
            "no measurement: another simulator's rules, recomputed",
            f"within {max(map(abs, numbers('netai_whatif', 'published', 4))):.1f} %",
        ),
    ]
    lines = ["| page | published | error |", "|---|---|---|"]
    for name, what, error in table:
        experiment, _, star = name.partition(" ")
        shown = f"{link(experiment, where=page)}{' ' * bool(star)}{star}" if experiment else ""
        lines.append(f"| {shown} | {what} | {error} |")
    return lines


def overview(experiment: str, table: str) -> list[str]:
    """Return the lines of an overview on the page of an experiment."""
    page = (ROOT / "experiments" / experiment / "README.md").read_text(encoding="utf-8")
    return page.partition(f"<!-- table {table} -->\n")[2].partition("<!-- end -->")[0].strip().splitlines()


def said(lines: Iterable[str], pattern: str) -> list[tuple[str, ...]]:
    """Return what the groups of a pattern match in each line; every line must match."""
    found = [re.search(pattern, line) for line in lines]
    assert all(found), pattern
    return [match.groups() for match in found if match]


@dataclass(frozen=True)
class Facts:
    """Numbers of the recorded experiments, as the tables of trust say them."""

    steps: str
    order: str
    other_steps: str
    other_order: str
    stragglers: str
    speedups: str
    scaling: str
    epochs: str
    levels: str
    imported: str
    imported_speedups: str
    imported_stragglers: str
    computing: str
    read: str


@cache
def facts() -> Facts:
    """Collect the numbers."""

    def errors(table: str) -> str:
        medians = said(overview("emulated_cluster", table), r"error median ([\d.]+%), worst ([+-][\d.]+)%")
        worst = max((worst for _, worst in medians), key=lambda each: abs(float(each)))
        return f"median {medians[0][0]} on the calibrated shape, {medians[1][0]} on another; worst {worst}%"

    def order(table: str) -> str:
        pairs = said(overview("emulated_cluster", table), r"order: of (\d+) pairs .* measured, (\d+) are right")
        return f"{sum(int(right) for _, right in pairs)} of {sum(int(every) for every, _ in pairs)}"

    def total(table: str, pattern: str) -> str:
        counted = said(overview("emulated_cluster", table), pattern)
        return f"{sum(int(each[0]) for each in counted)} of {sum(int(each[1]) for each in counted)}"

    sleeping, _, found, computing = overview("profile_round_trip", "summary")
    ((step, speedups),) = said([sleeping], r"predicted (\S+ to \S+) off, .* `sync` (\S+ to \S+),")
    ((injected, seen, size),) = said([found], r"Of (\d+) injected stragglers, (\d+) were .* at most (\S+) off")
    ((busy_step, busy_speedups),) = said([computing], r"predicted (\S+ to \S+) off, .* `sync` (\S+ to \S+),")
    traces = overview("public_traces", "times")[2:]
    times = [pair for line in traces for pair in re.findall(r"([\d.]+) / ([\d.]+)", line)[:-1]]  # but for the host's
    most_ms = max(abs(float(told) - float(shown)) for told, shown in times)
    scaling = [
        *numbers("horovod_scaling", "nccl", "error"),
        *numbers("horovod_scaling", "other", "error"),
        *numbers("horovod_scaling", "large", "error"),
        *numbers("aws_p3_scaling", "rates", "error"),
    ]
    return Facts(
        steps=errors("synchronization overview"),
        order=order("synchronization overview"),
        other_steps=errors("communication overview"),
        other_order=order("communication overview"),
        stragglers=total("synchronization overview", r"(\d+) of (\d+) stragglers"),
        speedups=percent([*numbers("hsgd_stragglers", "published", 3), *numbers("hsgd_stragglers", "published", 4)]),
        scaling=percent(scaling),
        epochs=errors("storage overview"),
        levels=total("storage overview", r"in (\d+) of (\d+) runs"),
        imported=step,
        imported_speedups=speedups,
        imported_stragglers=f"{seen} of {injected} found by rank and step, sizes within {size.lstrip('+')}",
        computing=f"step {busy_step}, speed-ups {busy_speedups}, and none recommended",
        read=f"times of a step within {max(most_ms, 0.1):.1f} ms of a second reader's, in {len(traces)} public traces",
    )


def trust_overview(_: Path, __: str) -> list[str]:
    """Return the answers of the front page."""
    known = facts()
    rows = [
        (
            "which schedule is fastest, links calibrated",
            "yes, among sync, local and hierarchical SGD",
            f"{known.order} pairs in the right order; with torus, servers, top-k {known.other_order}",
        ),
        ("step times, links calibrated", "yes, among these", f"{known.steps}; of the others {known.other_steps}"),
        (
            "what stragglers cost, and who they are",
            "yes",
            f"published speed-ups {known.speedups}; {known.stragglers} injected ones named",
        ),
        (
            "how training scales, from data sheets",
            "where computing dominates",
            f"images/s {known.scaling}; networks below their kind: many times too fast",
        ),
        (
            "your job under another schedule, from its traces (gloo, CPUs)",
            "if cores are not shared",
            f"step {known.imported}, speed-ups {known.imported_speedups}; on shared cores {known.computing}",
        ),
        ("where a step of your job on GPUs goes, from its traces", "yes", known.read),
        ("any other schedule on GPUs", "untested", "no run on GPUs was compared yet"),
    ]
    return [
        "| you want to know | trust it? | errors measured |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def trust(_: Path, old: str) -> list[str]:
    """Return the whole table of trust: its text as it stands on the page, with the errors that were recorded."""
    known = facts()
    errors = {
        "step times of synchronous, local and hierarchical SGD, calibrated": known.steps,
        "step times of torus, parameter servers, top-k, calibrated": known.other_steps,
        "which rank holds up the others": f"named, in the same step, for {known.stragglers} stragglers",
        "what stragglers cost: speed-ups over synchronous SGD": f"speed-ups {known.speedups}",
        "how training scales where communication does not dominate": f"images/s {known.scaling}",
        "times of epochs with caches, calibrated": known.epochs,
        "which level of storage samples come from": f"exact in {known.levels} runs",
        "how TensorFlow's parameter servers scale": (
            f"images/s {percent(numbers('horovod_scaling', 'servers', 'error'))}"
        ),
        "where a step of a job on GPUs goes, imported from its profiler traces": known.read,
        "who slowed an imported job, when, by how much": known.imported_stragglers,
        "what another schedule gains for an imported job": (
            f"speed-ups {known.imported_speedups} in jobs whose layers sleep; with shared cores {known.computing}"
        ),
    }
    lines = [line for line in old.splitlines() if line.startswith("|")]
    for number, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in errors:
            cells[2] = errors.pop(cells[0])
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


def demo(_: Path, __: str) -> list[str]:
    """Return what `make demo` printed last, as it was recorded."""
    printed = (RESULTS / "demo.txt").read_text(encoding="utf-8").rstrip()
    return ["```", *printed.splitlines(), "```"]


def mutants(_: Path, __: str) -> list[str]:
    """Return how many planted bugs the tests notice, from the recorded run of `tools/mutants.py`."""
    found = recorded("mutants.json")
    lines = ["| where | planted | killed | survived |", "|---|---|---|---|"]
    for room in dict.fromkeys(each["room"] for each in found):
        inside = [each for each in found if each["room"] == room]
        survived = [each["name"] for each in inside if not each["killed"]]
        lines.append(f"| {room} | {len(inside)} | {len(inside) - len(survived)} | {', '.join(survived)} |")
    n_killed = sum(each["killed"] for each in found)
    return [*lines, f"| in all | {len(found)} | {n_killed} | {len(found) - n_killed} |"]


def recorded(name: str):
    """Return a recorded result."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


TABLES: Mapping[str, Callable[[Path, str], list[str]]] = {
    "trust overview": trust_overview,
    "trust": trust,
    "near": near,
    "speed": speed,
    "overhead": overhead,
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
