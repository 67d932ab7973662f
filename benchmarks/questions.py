"""How long do people wait for an answer about a real model on a real cluster?

    python benchmarks/questions.py                    tables: cost of each question, and how cost grows
    python benchmarks/questions.py --only bert        questions whose name has this text, and no growth
    python benchmarks/questions.py --against OTHER    the same of another clone of the project, in turn, and the ratio
    python benchmarks/questions.py --quick            so small that the numbers mean nothing; seconds
    python benchmarks/questions.py --json FILE        the numbers for machines, too

Each row is printed, and FILE written again, when its question is answered. A question is a command as users type it, in
a process of its own. CPU seconds are those of all its processes, with the start of Python and the import of packages. A
second process tells where the time goes, by cProfile. Answers of two
clones are compared: there is only a ratio if they are equal.

Growth is that of a comparison with ranges and stragglers, without the start, over three sizes each of ranks, buckets
and steps. The exponent is 1 if cost is in proportion to the size.
"""

import argparse
import hashlib
import json
import os
import platform
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tables import aligned, table  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.studies.comparison import compare  # noqa: E402

TIMEOUT_S = 1800.0
JOB = """\
cluster: {{preset: dgx-h100, nodes: {nodes}}}
workload: {{preset: {model}}}
steps: {steps}
schedules:
  - kind: sync
  - {{kind: local_sgd, period: 8}}
  - {{kind: hierarchical_sgd, levels: {{2: 8, 8: world}}}}
"""
OVERSUBSCRIBED = """\
cluster: {{preset: dgx-h100, nodes: {nodes}, topology: {{oversubscription: 4}}}}
workload: {{name: GPT-1.3B, tensors_file: gpt.csv, batch_size: 4, precision: bf16, utilization: 45%}}
disturbances: [{{kind: transient, probability: 0.1%, delay: 200 ms}}]
schedules:
  - {{kind: sync}}
  - {{kind: torus}}
  - {{kind: local_sgd, period: 8}}
  - {{kind: hierarchical_sgd, levels: {{2: {nodes}, 8: world}}}}
  - {{kind: diloco, period: 100, ranks_per_worker: node}}
  - {{kind: hitopk}}
steps: {steps}
"""
SWEEP = """\
scenario: gpt2.yaml
vary:
  cluster.network.bandwidth: {{geometric: [10 Gbit/s, 400 Gbit/s, {points}]}}
  cluster.network.latency: {{geometric: [2 us, 50 us, {points}]}}
seeds: 4
"""
SHARDED = """\
cluster: {{preset: dgx-h100, nodes: {nodes}}}
workload: {{preset: {model}, batch_size: 1}}
schedules: [fsdp, {{kind: hsdp, shard: 16}}]
steps: 100
"""
LARGE = """\
cluster: {{preset: dgx-h100, nodes: {nodes}}}
workload: {{preset: {model}, batch_size: 1}}
disturbances: [{{kind: transient, probability: 0.1%, delay: 200 ms}}]
schedules: [fsdp]
steps: 100
"""
OF_PASSES = """\
cluster: {{preset: dgx-h100, nodes: {nodes}}}
workload: {{preset: {model}, batch_size: 1, micro_batches: {n}}}
disturbances: [{{kind: transient, probability: 0.1%, delay: 200 ms}}]
schedules: [fsdp]
steps: 8
"""
MANY_GROUPS = """\
cluster: {{preset: dgx-h100, nodes: {nodes}, uncertain: {{}}}}
workload:
  tensors: [{{name: embed, count: 100000}}, {{name: h.0, count: 150000}}, {{name: h.1, count: 150000}}]
  batch_size: 2
  forward: 4 ms
  backward: 9 ms
schedules: [{schedule}]
disturbances: [{{kind: pauses, on: host, every: [3, 5], delay: 50 ms, ranks: [0, 3]}}]
steps: 4
"""
STUDY = """\
cluster: {{preset: gcp-t4x4-32gbit, nodes: {nodes}}}
workload: {{preset: resnet18, forward: 18 ms, backward: 37 ms, optimize: 0 s}}
disturbances: [{{kind: transient, probability: 1%, delay: 1 s}}]
schedules: [{schedules}]
steps: {steps}
"""
GROWING = """\
cluster: {{preset: dgx-h100, nodes: {nodes}}}
workload:
  tensors: [{tensors}]
  batch_size: 1
  forward: 10 ms
  backward: 20 ms
  optimize: 1 ms
disturbances: [{{kind: transient, probability: 1%, delay: 100 ms}}]
schedules:
  - {{kind: sync, first_bucket_size: 1 B, bucket_size: 1 B}}
  - {{kind: hierarchical_sgd, levels: {{2: 8, 8: world}}}}
steps: {steps}
"""
GPUS_PER_NODE = 8
_START = "start"
_MOST_CALLS = 40  # of functions outside simdist, one inside the other


@dataclass(frozen=True, slots=True)
class Question:
    """A command and the files that it is about.

    Args:
        name: In the table.
        arguments: Of `simdist`.
        files: Name -> content of the files that it needs.
        before: Arguments of a command that makes other files for it, whose cost does not count.
    """

    name: str
    arguments: tuple[str, ...]
    files: dict[str, str]
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The cost of an answer.

    Args:
        question: Its name.
        cpu_s: Seconds of all processors.
        peak_MiB: Most memory of its largest process.
        digest: Of what was printed.
        shares: Package -> share of the time of functions, the largest first.
    """

    question: str
    cpu_s: float
    peak_MiB: float
    digest: str
    shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Three sizes of each kind, and the usual size of the others."""

    ranks: tuple[int, ...] = (128, 512, 2048)
    buckets: tuple[int, ...] = (64, 256, 1024)
    steps: tuple[int, ...] = (50, 200, 800)
    seeds: int = 2

    def of(self, kind: str) -> tuple[int, ...]:
        """Return the sizes of a kind."""
        return {"ranks": self.ranks, "buckets": self.buckets, "steps": self.steps}[kind]


QUICK = Sizes((16, 32, 64), (2, 4, 8), (2, 4, 8), 1)


def gpt(n_layers: int = 24, width: int = 2048, vocabulary: int = 50_257, sequence: int = 2048) -> str:
    """Return the tensors of a GPT as a file has them: 1.3 billion parameters by default.

    A multiplication takes 2 operations per parameter and token.
    """
    rows = [("wte", vocabulary * width, 2 * vocabulary * width * sequence), ("wpe", sequence * width, 0)]
    for layer in range(n_layers):
        for name, inputs, outputs in (("qkv", 1, 3), ("proj", 1, 1), ("up", 1, 4), ("down", 4, 1)):
            count = inputs * outputs * width**2
            rows += [(f"h{layer}.{name}.w", count, 2 * count * sequence), (f"h{layer}.{name}.b", outputs * width, 0)]
        rows += [(f"h{layer}.ln{number}", 2 * width, 0) for number in (1, 2)]
    lines = ["name,count,flops", *(",".join(map(str, row)) for row in [*rows, ("lnf", 2 * width, 0)])]
    return "\n".join(lines) + "\n"


def study_schedules(n: int) -> list[str]:
    """Return the schedules of a study on n ranks: synchronous, local, and hierarchical SGD."""
    levels = (
        f"1: {n // 64}, 2: {n // 16}, 4: {n // 4}, 8: {n}",
        f"2: {n // 32}, 4: {n // 4}, 8: {n}",
        f"4: {n // 16}, 8: {n}",
    )
    of_levels = (f"{{kind: hierarchical_sgd, intra_node_gradients: false, levels: {{{each}}}}}" for each in levels)
    return ["sync", *(f"{{kind: local_sgd, period: {period}}}" for period in (2, 4, 8)), *of_levels]


def questions(*, quick: bool) -> list[Question]:
    """Return the questions."""
    few, many, steps, points = (2, 3, 16, 2) if quick else (16, 64, 200, 10)
    found = []
    for model in ("gpt2",) if quick else ("gpt2", "bert-large"):
        for nodes in (few, many):
            content = JOB.format(nodes=nodes, model=model, steps=steps)
            name = f"compare, {model}, {8 * nodes} GPUs"
            found.append(Question(name, ("compare", "job.yaml"), {"job.yaml": content}))
    switch = OVERSUBSCRIBED.format(nodes=2 if quick else 64, steps=8 if quick else 200)
    files = {"job.yaml": switch, "gpt.csv": gpt(2, 64) if quick else gpt()}
    found.append(Question("compare, GPT-1.3B, 512 GPUs, 4:1 switch", ("compare", "job.yaml"), files))
    stragglers = str(ROOT / "docs" / "examples" / ("first.yaml" if quick else "stragglers.yaml"))
    if not quick:
        found.append(Question("compare, the preset cloud-gradients", ("compare", "cloud-gradients"), {}))
        found.append(Question("compare, the first example", ("compare", stragglers), {}))
    n_ranks, n_steps = (128, 16) if quick else (256, 1000)
    study = STUDY.format(nodes=n_ranks // 4, schedules=", ".join(study_schedules(n_ranks)), steps=n_steps)
    name = f"compare, 7 schedules, {n_ranks} GPUs, {n_steps} steps"
    found.append(Question(name, ("compare", "job.yaml"), {"job.yaml": study}))
    gpt2 = {"gpt2.yaml": JOB.format(nodes=few, model="gpt2", steps=steps), "sweep.yaml": SWEEP.format(points=points)}
    found.append(Question(f"sweep, {points**2} points", ("sweep", "sweep.yaml", "-o", "out"), gpt2))
    traces = str(ROOT / "docs" / "examples" / "traces")
    found.append(Question("import, 4 traces", ("import", traces, "-o", "job.yaml", "--steps", "81:113"), {}))
    least = ("--evaluations", "2", "--seeds", "2", "--search-seeds", "1") if quick else ()
    found.append(Question("tune, 16 ranks", ("tune", stragglers, "--global-every", "8", *least), {}))
    sharded = SHARDED.format(nodes=2 if quick else 64, model="gpt2" if quick else "llama2-70b")
    of_sharded = {"job.yaml": sharded}
    n_gpus = 16 if quick else 512
    found.append(
        Question(
            f"compare, sharded copies over nodes, {n_gpus} GPUs",
            ("compare", "job.yaml", "--baseline", "fsdp"),
            of_sharded,
        )
    )
    options = ("--allow", "sharding", "--only", "fsdp", "--only", "hsdp", "--memory", "80 GiB", "--global-every", "16")
    found.append(Question(f"tune, shardings, {n_gpus} GPUs", ("tune", "job.yaml", *options, *least), of_sharded))
    passes = OF_PASSES.format(nodes=2 if quick else 8, model="gpt2" if quick else "llama3-8b", n=2 if quick else 8)
    options = (
        "--allow",
        "sharding",
        *(() if quick else ("--memory", "80 GiB")),
        "--evaluations",
        "2" if quick else "30",
    )
    n_tuned = 16 if quick else 64
    found.append(
        Question(
            f"tune, micro-batches, {n_tuned} GPUs", ("tune", "job.yaml", *options, *least[2:]), {"job.yaml": passes}
        )
    )
    large = LARGE.format(nodes=2 if quick else 128, model="gpt2" if quick else "llama2-70b")
    n_large = 16 if quick else 1024
    by_fast = ("simulate", "job.yaml", "--engine", "fast")
    found.append(Question(f"simulate, fsdp on {n_large:,} GPUs, 100 steps", by_fast, {"job.yaml": large}))
    found.append(Question("whatif, 16 ranks", ("whatif", stragglers), {}))
    n_nodes = 2 if quick else 1024
    schedule = "{kind: fsdp, reshard_after_forward: 4}"
    groups = {"job.yaml": MANY_GROUPS.format(nodes=n_nodes, schedule=schedule)}
    found.append(Question(f"whatif, groups of 4 of {8 * n_nodes:,} GPUs", ("whatif", "job.yaml"), groups))
    simulated = ("simulate", stragglers, "-o", "run")
    found.append(Question("report, 16 ranks", ("report", "run", "-o", "page.html"), {}, before=simulated))
    return found


def ask(question: Question, tree: Path) -> Answer:
    """Ask a question of a clone of the project, and then where the time goes.

    Raises:
        SystemExit: A command failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in question.files.items():
            Path(folder, name).write_text(content, encoding="utf-8")
        if question.before:
            _run(question, question.before, tree, folder)
        usage, printed = _run(question, question.arguments, tree, folder)
    digest = hashlib.sha256(printed).hexdigest()[:12]
    return Answer(question.name, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, digest, {})


def where(question: Question, tree: Path) -> dict[str, float]:
    """Return the share of each package in the time of a question, the largest first.

    Raises:
        SystemExit: A command failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in question.files.items():
            Path(folder, name).write_text(content, encoding="utf-8")
        if question.before:
            _run(question, question.before, tree, folder)
        _run(question, question.arguments, tree, folder, ("-m", "cProfile", "-o", "profile"))
        return _shares(Path(folder, "profile"), tree)


def _run(
    question: Question, arguments: Sequence[str], tree: Path, folder: str, before: Sequence[str] = ()
) -> tuple[resource.struct_rusage, bytes]:
    """Run a command; return what it took and what it printed."""
    command = [sys.executable, *before, "-m", "simdist", *arguments]
    environ = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users' Python keeps the bytecode
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{question.name}: exit code {process.returncode}\n{errors.read().decode()}")
        return usage, output.read()


def _shares(profile: Path, tree: Path) -> dict[str, float]:
    """Return the share of each package of simdist in the time, the largest first.

    The time of a function of Python or numpy counts for its callers. The start has imports, and what has no caller.
    """
    stats = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    seconds: Counter[str] = Counter()
    own_s = {function: each_s for function, (_, _, each_s, _, _) in stats.items()}
    for _ in range(_MOST_CALLS):
        passed_on: Counter[tuple[str, int, str]] = Counter()
        for function, each_s in own_s.items():
            package = _package(Path(function[0]), tree)
            callers = {caller: of[3] for caller, of in stats[function][4].items() if caller != function}
            total_s = sum(callers.values())
            if package or not total_s:
                seconds[package or _START] += each_s
                continue
            for caller, cumulative_s in callers.items():
                passed_on[caller] += each_s * cumulative_s / total_s
        own_s = dict(passed_on)
    seconds[_START] += sum(own_s.values())
    total_s = sum(seconds.values())
    return {name: each_s / total_s for name, each_s in seconds.most_common(5)}


def _package(file: Path, tree: Path) -> str:
    """Return the package of simdist that a file is in, `start` for Python's imports, or nothing."""
    if file.is_relative_to(tree / "simdist"):
        return file.relative_to(tree / "simdist").parts[0].removesuffix(".py")
    return _START if "importlib" in file.name else ""


def growth(sizes: Sizes) -> list[dict[str, object]]:
    """Return how the cost of a comparison grows with each kind of size."""
    usual = {"ranks": sizes.ranks[0], "buckets": sizes.buckets[0], "steps": sizes.steps[0]}
    compared_s(usual, sizes.seeds)  # imports
    found: list[dict[str, object]] = []
    for kind in usual:
        seconds = [compared_s(usual | {kind: size}, sizes.seeds) for size in sizes.of(kind)]
        exponent = np.polyfit(np.log(sizes.of(kind)), np.log(seconds), 1)[0]
        found.append({"of": kind, "sizes": sizes.of(kind), "cpu_s": seconds, "exponent": float(exponent)})
    return found


def compared_s(size: dict[str, int], n_seeds: int) -> float:
    """Return the CPU seconds of a comparison of synchronous and hierarchical SGD, without the start."""
    tensors = ", ".join(f"{{name: t{number}, count: 1000000}}" for number in range(size["buckets"]))
    nodes = size["ranks"] // GPUS_PER_NODE
    scenario = loads(GROWING.format(nodes=nodes, tensors=tensors, steps=size["steps"]))
    began_s = time.process_time()
    compare(scenario, n_seeds=n_seeds)
    return time.process_time() - began_s


def rows(answers: Sequence[Answer], others: Sequence[Answer]) -> Iterator[dict[str, object]]:
    """Yield what is printed of each question."""
    for place, answer in enumerate(answers):
        row: dict[str, object] = {
            "question": answer.question,
            "CPU s": f"{answer.cpu_s:.1f}",
            "MiB": f"{answer.peak_MiB:.0f}",
        }
        if others:
            other = others[place]
            is_same = other.digest == answer.digest
            row |= {
                "other, CPU s": f"{other.cpu_s:.1f}",
                "other / this": f"{other.cpu_s / answer.cpu_s:.1f}" if is_same else "other answer",
            }
        if answer.shares:
            row["where"] = ", ".join(f"{name} {share:.0%}" for name, share in list(answer.shares.items())[:3])
        yield row


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ask all questions that are wanted, and yield what is known after each."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "questions": [],
        "other": [],
        "growth": [],
    }
    for question in questions(quick=options.quick):
        if options.only not in question.name:
            continue
        found["questions"].append(asdict(replace(ask(question, ROOT), shares=where(question, ROOT))))
        if options.against:
            found["other"].append(asdict(ask(question, options.against.resolve())))
        yield found
    if not options.only:
        found["growth"] = growth(QUICK if options.quick else Sizes())
        yield found


def show(found: dict[str, Any], width: int) -> None:
    """Print what was measured last: a question, below the heading if it is the first, or how cost grows.

    Args:
        found: What is known so far.
        width: Characters of the longest name of a question.
    """
    if found["growth"]:
        grown = [
            {
                "growth with": each["of"],
                "sizes": " ".join(map(str, each["sizes"])),
                "CPU s": " ".join(f"{seconds:.2g}" for seconds in each["cpu_s"]),
                "exponent": f"{each['exponent']:.2f}",
            }
            for each in found["growth"]
        ]
        print(table("growth", grown))
        return
    answers, others = ([Answer(**each) for each in found[key][-1:]] for key in ("questions", "other"))
    (row,) = rows(answers, others)
    widths = [width, *(max(len(name), 6) for name in list(row)[1:])]
    if len(found["questions"]) == 1:
        print("questions", aligned(list(row), widths), sep="\n")
    print(aligned([str(cell) for cell in row.values()], widths), flush=True)


def main() -> int:
    """Ask all questions and print what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="questions whose name has this text, and no growth")
    parser.add_argument("--against", type=Path, help="another clone of the project")
    parser.add_argument("--quick", action="store_true", help="so small that the numbers mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers, written after each question")
    options = parser.parse_args()
    width = max(len(each.name) for each in questions(quick=options.quick))
    for found in measured(options):
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        show(found, width)
    return 0


if __name__ == "__main__":
    sys.exit(main())
