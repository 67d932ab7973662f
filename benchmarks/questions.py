"""How long do people wait for an answer about a real model on a real cluster?

    python benchmarks/questions.py                    a table: CPU seconds and memory of each question
    python benchmarks/questions.py --only bert        questions whose name has this text
    python benchmarks/questions.py --against OTHER    the same of another clone of the project, in turn, and the ratio
    python benchmarks/questions.py --where            also the share of each package in the time, by cProfile
    python benchmarks/questions.py --quick            so small that the numbers mean nothing; seconds
    python benchmarks/questions.py --json             the numbers for machines

Each question is a command as users type it, in a process of its own. CPU seconds are those of all its processes, with
the start of Python and the import of packages. Answers of two clones are compared: there is only a ratio if they are
equal.
"""

import argparse
import hashlib
import json
import os
import pstats
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tables import table  # noqa: E402

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
cluster: {{preset: dgx-h100, nodes: {nodes}, oversubscription: 4}}
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


@dataclass(frozen=True, slots=True)
class Question:
    """A command and the file that it is about.

    Args:
        name: In the table.
        arguments: Of `simdist`.
        files: Name -> content of the files that it needs.
    """

    name: str
    arguments: tuple[str, ...]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """The cost of an answer.

    Args:
        question: Its name.
        cpu_s: Seconds of all processors.
        peak_MiB: Most memory of its largest process.
        digest: Of what was printed.
        shares: Package -> share of the time; empty unless asked for.
    """

    question: str
    cpu_s: float
    peak_MiB: float
    digest: str
    shares: dict[str, float]


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


def questions(*, quick: bool) -> list[Question]:
    """Return the questions."""
    few, many, steps, points = (2, 3, 16, 2) if quick else (16, 64, 200, 10)
    found = []
    for model in ("gpt2",) if quick else ("gpt2", "bert-large"):
        for nodes in (few, many):
            content = JOB.format(nodes=nodes, model=model, steps=steps)
            name = f"compare, {model}, {8 * nodes} GPUs"
            found.append(Question(name, ("compare", "job.yaml"), {"job.yaml": content}))
    switch = OVERSUBSCRIBED.format(nodes=2 if quick else 64, steps=8 if quick else 24)
    files = {"job.yaml": switch, "gpt.csv": gpt(2, 64) if quick else gpt()}
    found.append(Question("compare, GPT-1.3B, 4:1 switch, one seed", ("compare", "job.yaml", "--seeds", "1"), files))
    gpt2 = {"gpt2.yaml": JOB.format(nodes=few, model="gpt2", steps=steps), "sweep.yaml": SWEEP.format(points=points)}
    found.append(Question(f"sweep, {points**2} points", ("sweep", "sweep.yaml", "-o", "out"), gpt2))
    traces = str(ROOT / "docs" / "examples" / "traces")
    found.append(Question("import, 4 traces", ("import", traces, "-o", "job.yaml", "--steps", "81:113"), {}))
    stragglers = str(ROOT / "docs" / "examples" / ("first.yaml" if quick else "stragglers.yaml"))
    found.append(Question("tune, 16 ranks", ("tune", stragglers, "--global-every", "8"), {}))
    found.append(Question("whatif, 16 ranks", ("whatif", stragglers), {}))
    return found


def ask(question: Question, tree: Path, *, where: bool) -> Answer:
    """Ask a question of a clone of the project.

    Raises:
        SystemExit: The command failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in question.files.items():
            Path(folder, name).write_text(content, encoding="utf-8")
        command = [sys.executable, "-m", "simdist", *question.arguments]
        if where:
            command[1:1] = ["-m", "cProfile", "-o", "profile"]
        environ = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            errors.seek(0)
            if process.returncode:
                raise SystemExit(f"{question.name}: exit code {process.returncode}\n{errors.read().decode()}")
            digest = hashlib.sha256(output.read()).hexdigest()[:12]
        shares = _shares(Path(folder, "profile"), tree) if where else {}
    return Answer(question.name, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, digest, shares)


def _shares(profile: Path, tree: Path) -> dict[str, float]:
    """Return the share of each package of simdist in the time that functions take themselves, the largest first."""
    seconds: Counter[str] = Counter()
    for (file, _, _), (_, _, own_s, _, _) in pstats.Stats(str(profile)).stats.items():  # type: ignore[attr-defined]
        inside = Path(file)
        is_ours = inside.is_relative_to(tree / "simdist")
        seconds[inside.relative_to(tree / "simdist").parts[0] if is_ours else "others"] += own_s
    total_s = sum(seconds.values())
    return {name: each_s / total_s for name, each_s in seconds.most_common(5)}


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


def main() -> int:
    """Ask all questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="questions whose name has this text")
    parser.add_argument("--against", type=Path, help="another clone of the project")
    parser.add_argument("--where", action="store_true", help="also the share of each package in the time")
    parser.add_argument("--quick", action="store_true", help="so small that the numbers mean nothing")
    parser.add_argument("--json", action="store_true", help="the numbers for machines")
    options = parser.parse_args()
    answers = []
    others = []
    for question in questions(quick=options.quick):
        if options.only not in question.name:
            continue
        print(f"{question.name} ...", file=sys.stderr, flush=True)
        answers.append(ask(question, ROOT, where=options.where))
        if options.against:
            others.append(ask(question, options.against.resolve(), where=False))
    if options.json:
        print(json.dumps({"this": [asdict(each) for each in answers], "other": [asdict(each) for each in others]}))
        return 0
    print(table("questions", list(rows(answers, others))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
