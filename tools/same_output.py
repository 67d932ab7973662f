"""Compare what two trees of simdist print and write, byte for byte.

    python tools/same_output.py BEFORE AFTER [--show] [--only PART] [--quick] [--jobs N]
    python tools/same_output.py TREE --keep FILE    keep what a tree gives
    python tools/same_output.py TREE --times        the CPU seconds of each command, the longest first

BEFORE and AFTER are folders that hold `simdist/`, such as worktrees of two commits, or files that --keep wrote. Each
runs the same commands on the same scenarios, tables, traces and recorded runs: as text, as JSON, and the files that
they write. A command that differs is listed; --show prints the lines. Each tree reads its own scenarios, as their keys
may have other names, or those of --inputs.
Runs are shortened, so that all of it takes minutes: see `_MAX_STEPS`. --quick runs each command once or twice, on a
scenario with every kind of schedule.

What a tree does not have is listed apart and is not a difference: a command of `RETIRED`, or a scenario that is gone
from the inputs. A command that moved runs in its new form; if its answer differs, it is listed apart, too, and so is
what differs in --help.

Exit status: 0 if nothing differs, 1 if something does, 2 if a tree fails to run.
"""

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from child_answers import answer_of

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 3600.0
RETIRED: dict[str, tuple[str, ...]] = {  # command that a tree may lack -> its new form, where there is one
    "calibrate": (),
    "chakra export": ("plan",),
    "chakra import": (),
    "comms": ("trace", "--collectives"),
    "data": ("whatif", "--data"),
    "learn": (),
    "limits": ("compare", "--tolerable"),
    "workload": (),
}
_RETIRED_INPUTS = ("whatif docs/examples/pipeline.csv",)  # what AFTER refuses
_RENAMED_OPTIONS = {("chakra export", "-o"): "--chakra"}  # where a command moved
_LACKS = "not in this tree"
_MAX_STEPS = 24
_MOST_RANKS = 50  # of a scenario on which every command runs
_MOST_SHOWN = 40
_SEEDS = ("--seeds", "2")
_FEW = ("--seeds", "2", "--search-seeds", "1", "--evaluations", "4")
_TASK = ("--task", "quadratic", "--steps", "8", "--workers", "0", "--seeds", "1", "--target", "loss <= 0.5")
_PERMITS = ("overlap", "diloco", "backup", "servers", "sharding")
_KINDS = """\
cluster:
  nodes: 4
  gpus_per_node: 2
  fabric: {latency: 5 us, bandwidth: 12 GB/s}
  network: {latency: 30 us, bandwidth: 25 Gbit/s, efficiency: 60%}
  device: {memory_bandwidth: 1 TB/s}
workload: {preset: gpt-nano, batch_size: 4, forward: 10 ms, backward: 20 ms, optimize: 1 ms}
disturbances: [{kind: transient, on: host, probability: 5%, delay: 50 ms}]
steps: 12
schedules:
  - sync
  - {kind: sync, fusion: {buffer: 4 MB, cycle: 5 ms}}
  - {kind: sync, shared_update: true, compression: fp16}
  - {kind: sync, shared_update: 4, updates_sent_by: broadcast, label: zero-4}
  - fsdp
  - {kind: fsdp, reshard_after_forward: false, param_dtype: bfloat16, reduce_dtype: float32}
  - {kind: fsdp, communicators: 2, wrap: blocks, forward_prefetch: 2, label: fsdp-blocks}
  - {kind: hsdp, shard: 2}
  - {kind: hsdp, shard: 2, between: local-4}
  - {kind: hsdp, shard: 2, between: {kind: diloco, period: 4, overlap_steps: 1, mixing: 0.5}}
  - torus
  - {kind: local_sgd, period: 4}
  - {kind: local_sgd, period: 4, overlap_steps: 2}
  - {kind: local_sgd, period: 4, warmup_steps: 1, inner_steps: {1: 2, 6: 3}, label: local-uneven}
  - {kind: hierarchical_sgd, levels: {2: 2, 4: world}}
  - {kind: hierarchical_sgd, levels: {2: 2, 4: world}, intra_node_gradients: false, label: hsgd-local}
  - {kind: diloco, period: 4, ranks_per_worker: node}
  - {kind: diloco, period: 6, fragments: 2, layers: 4, overlap_steps: 4, phase: 1}
  - {kind: parameter_server, servers: 2, placement: tensors}
  - {kind: backup_workers, backup: 2}
  - hitopk
  - gtopk
  - naive_ag
  - powersgd
"""
_TWO = """\
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: {latency: 30 us, bandwidth: 25 Gbit/s}}
workload: {preset: mlp, batch_size: 4, forward: 10 ms, backward: 20 ms, optimize: 1 ms}
disturbances: [{kind: transient, on: host, probability: 5%, delay: 50 ms}]
steps: 8
schedules: [sync, local-4]
"""
_VARIED = """\
scenario: kinds.yaml
vary:
  cluster.network.bandwidth: [10 Gbit/s, 100 Gbit/s]
  disturbances[0].probability: [1%, 10%]
seeds: 2
"""
_MODEL = """\
from torch import nn


def small():
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
"""
_TABLE = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    45.00    0.00    0.00      0    45.00    0.00    0.00      0
     1048576        262144     float     sum      -1   250.00    4.19    7.86      0   250.00    4.19    7.86      0
   268435456      67108864     float     sum      -1  9500.00   28.26   52.98      0  9500.00   28.26   52.98      0
  1073741824     268435456     float     sum      -1 37000.00   29.02   54.41      0 37000.00   29.02   54.41      0
"""
_OUTCOMES = ("equal", "differs", "moved", "help", "not in BEFORE", "not in AFTER")
Group = tuple[tuple[str, ...], ...]  # commands that share a folder, in their order


# ---------------------------------------------------------------- the commands


def prepare(inputs: Path) -> list[str]:
    """Copy the inputs to the current folder, with fewer steps; return the names of the scenarios."""
    for folder in ("docs/examples", "experiments", "notebooks/data", "tests/data/profiles"):
        if (inputs / folder).is_dir():
            shutil.copytree(inputs / folder, folder)
    shipped = next((each for each in sorted(inputs.glob("simdist/**/presets/scenarios"))), None)
    if shipped:
        shutil.copytree(shipped, "presets")
    made = {"kinds.yaml": _KINDS, "two.yaml": _TWO, "varied.yaml": _VARIED, "models.py": _MODEL, "nccl.txt": _TABLE}
    for name, text in made.items():
        Path(name).write_text(text, encoding="utf-8")
    found = ["kinds.yaml"]
    for path in sorted(Path().glob("*/**/*.yaml")):
        text = path.read_text(encoding="utf-8")
        keys = {line.partition(":")[0] for line in text.splitlines()}
        if not {"cluster", "workload", "schedules", "steps"} <= keys or "sweep" in keys:
            continue
        fewer = re.sub(r"^steps: (\d+)\b", lambda match: f"steps: {min(int(match[1]), _MAX_STEPS)}", text, flags=re.M)
        path.write_text(re.sub(r"^steps: \d+ epochs", "steps: 2 epochs", fewer, flags=re.M), encoding="utf-8")
        found.append(path.as_posix())
    return found


def groups(scenarios: list[str], foreign: Path | None, *, quick: bool) -> Iterator[Group]:
    """Yield groups of commands; `OUT` stands for the folder of a group, `RUN` for a copy of a recorded run in it."""
    yield tuple((name, "--help") for name in (*_of_help(), "chakra export", "chakra import"))
    yield from others()
    yield (("tune", "kinds.yaml", *_FEW, *(part for each in _PERMITS for part in ("--allow", each))),)
    yield from on_scenario("kinds.yaml")
    for folder in ("docs/examples/traces", "tests/data/profiles/late", "tests/data/profiles/slow"):
        if not quick or folder.endswith("traces"):
            yield imported(folder)
    if quick:
        yield from on_scenario("docs/examples/stalls.yaml")
        return
    for name in scenarios[1:]:
        if "/results/" in name:
            yield (("compare", name, *_SEEDS),)
        elif not 0 < ranks_of(name) <= _MOST_RANKS:
            yield ("compare", name, "--seeds", "1"), ("plan", name)
        else:
            yield from on_scenario(name)
    for name in ("cloud-data", "cloud-gradients", "cloud-stragglers"):  # with all their steps
        yield (("compare", name, *_SEEDS),)
    for name in ("first", "stragglers", "checkpoints", "recorded", "data-centers", "sharded"):
        if Path(f"docs/examples/{name}.yaml").exists():
            allowed = (part for each in _PERMITS for part in ("--allow", each))
            yield (("tune", f"docs/examples/{name}.yaml", *_FEW, *allowed),)
    learned = ("tune", "two.yaml", *_TASK, "--only", "local_sgd", "--global-every", "2", "-o", "OUT/learned")
    yield learned, (*learned, "--json")
    yield ("sweep", "docs/examples/sweep.yaml", "-o", "OUT/sweep", "--workers", "0"), ("results", "OUT/sweep")
    if foreign:
        for each in sorted(path for path in foreign.iterdir() if path.is_dir()):
            yield imported(str(each))


def _of_help() -> Iterator[str]:
    yield from ("calibrate", "chakra", "comms", "compare", "data", "import", "init", "learn", "limits", "plan")
    yield from ("presets", "report", "results", "simulate", "sweep", "trace", "tune", "validate", "whatif", "workload")


def ranks_of(name: str) -> int:
    """Return the number of ranks that a scenario states; 0 if a preset has them."""
    text = Path(name).read_text(encoding="utf-8")
    sizes = [re.search(rf"\b{key}: (\d+)", text) for key in ("nodes", "gpus_per_node")]
    return int(sizes[0][1]) * int(sizes[1][1] if sizes[1] else 8) if sizes[0] else 0


def on_scenario(name: str) -> Iterator[Group]:
    """Yield what every scenario is asked."""
    yield ("compare", name, *_SEEDS), ("limits", name, "--seeds", "1", "--delay", "50 ms")
    yield (
        ("simulate", name, "-o", "OUT/run"),
        ("results", "OUT/run"),
        ("report", "OUT/run", "-o", "OUT/page.html"),
        ("trace", "OUT/run/FIRST", "--chrome", "OUT/trace.json", "--steps", "2:4"),
        ("comms", "OUT/run/FIRST"),
        ("whatif", "OUT/run/FIRST", "--resamples", "2"),
    )
    yield ("plan", name), ("data", name), ("whatif", name, "--resamples", "2")
    if not name.startswith("experiments/"):
        yield (("tune", name, *_FEW),)


def imported(folder: str) -> Group:
    """Return what a folder of traces is asked."""
    return (
        ("import", folder, "-o", "OUT/job.yaml", "--workers", "1"),
        ("whatif", "OUT/job.yaml", "--resamples", "5"),
        ("compare", "OUT/job.yaml", *_SEEDS),
    )


def others() -> Iterator[Group]:
    """Yield commands on tables, runs, tasks, models and other inputs, each once."""
    yield (
        ("presets",),
        *(("presets", kind) for kind in ("clusters", "workloads", "scenarios")),
        ("presets", "clusters", "dgx-h100"),
        ("presets", "workloads", "gpt2"),
        ("presets", "scenarios", "cloud-data"),
    )
    yield (
        ("whatif", "RUN", "--resamples", "5"),
        ("comms", "RUN"),
        ("validate", "RUN", "--plot", "OUT/errors.png"),
        ("validate", "RUN", "--calibrate", "OUT/cluster.yaml"),
        ("data", "RUN"),
        ("results", "RUN"),
        ("results", "RUN", "--csv", "OUT/table.csv"),
        ("trace", "RUN", "--chrome", "OUT/trace.json"),
        ("report", "RUN", "-o", "OUT/page.html"),
        ("simulate", "RUN", "--plot", "OUT/time.png"),
    )
    yield (
        ("sweep", "varied.yaml", "-o", "OUT/sweep", "--workers", "0"),
        ("results", "OUT/sweep", "--fastest"),
        ("report", "OUT/sweep", "-o", "OUT/page.html"),
    )
    yield (
        ("init", "--yes", "--cluster", "dgx-h100", "--workload", "gpt2", "--nodes", "4", "-o", "OUT/job.yaml"),
        ("compare", "OUT/job.yaml", *_SEEDS),
        ("init", "--from", "docs/examples/llama3-8b.toml", "--cluster", "dgx-h100", "-o", "OUT/llama.yaml"),
    )
    if Path("docs/examples/pipeline.csv").exists():
        yield (("whatif", "docs/examples/pipeline.csv"),)
    learned = ("learn", "two.yaml", *_TASK, "-o", "OUT/learned")
    yield learned, (*learned, "--json"), ("report", "OUT/learned", "-o", "OUT/page.html")
    yield (
        ("workload", "models:small", "--batch-size", "4", "--input", "16", "--forward", "1 ms", "-o", "OUT/work.yaml"),
        (
            "calibrate",
            "--from-nccl-tests",
            "nccl.txt",
            "--cluster",
            "v100x8-25gbit",
            "--nodes",
            "2",
            "--op",
            "all_reduce",
        ),
    )
    yield (
        ("chakra export", "docs/examples/first.yaml", "--steps", "4", "-o", "OUT/chakra"),
        ("chakra import", "OUT/chakra/sync", "--cluster", "v100x8-25gbit", "-o", "OUT/job.yaml"),
    )
    yield (("compare", "docs/examples/first.yaml", "--plot", "OUT/speedups.png", "--engine", "des", *_SEEDS),)
    yield ("plan", "nothing.yaml"), ("compare", "docs/examples/late.csv"), ("nothing",)


# ---------------------------------------------------------------- what a tree gives


def digest(path: Path) -> str:
    """Return a digest of a file: of arrays if it is an archive of them, whose own bytes hold the time of day."""
    import numpy as np

    if path.suffix == ".npz":
        state = hashlib.sha256()
        with np.load(path, allow_pickle=False) as arrays:
            for name in sorted(arrays.files):
                state.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
                state.update(arrays[name].tobytes())
        return state.hexdigest()[:16]
    if path.suffix in (".html", ".jsonl", ".yaml"):
        text = timeless(path.read_text(encoding="utf-8"))
        text = re.sub(r"jsonl</th><td[^>]*>[\d,]+</td><td[^>]*><code>[0-9a-f]{16}", "FILE", text)  # its rows have keys
        text = re.sub(r"\b[0-9a-f]{32}\b", "KEY", text)  # of a row of a sweep: a hash of the code, too
        return hashlib.sha256(re.sub(r'"crc32": \d+', "", text).encode()).hexdigest()[:16]
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def timeless(text: str) -> str:
    """Return a text without what differs from run to run."""
    text = re.sub(r"^[^\n]*: \d+%(, [^\n]* (so far|left))?\n", "", text, flags=re.M)  # progress
    text = re.sub(r"[\d.]+ [kMGT]?B (are free|of memory)", r"SIZE \1", text)
    text = re.sub(r'"(wall|elapsed|cpu|training)_s": [\d.e+-]+', r'"\1_s": TIME', text)
    return re.sub(r"\b20\d\d-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d| UTC)?)?", "DATE", text)


def outputs(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the commands print and write, by command: of each group whose number is this part's."""
    import real  # noqa: F401  of the tree, ahead of this clone's

    found: dict[str, Any] = {}
    part, n_parts = map(int, options.part.split("/"))
    wanted = groups(prepare(options.inputs.resolve()), options.foreign, quick=options.quick)
    for number, group in enumerate(wanted):
        if number % n_parts != part or not any(options.only in " ".join(command) for command in group):
            continue
        for extra in ((), ("--json",)):
            if extra and any(command[-1] in ("--help", "--json") for command in group):
                continue  # such a group says itself what is JSON: a second run would train again
            out = Path(f"out{number}{''.join(extra)}")
            out.mkdir()
            if any("RUN" in command for command in group):
                shutil.copytree("notebooks/data/run", out / "recorded")
            seen = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
            for command in group:
                name = " ".join((*command, *extra))
                if command != group[0] and "OUT/" in name:
                    name += f" (after {' '.join(group[0][:2])})"
                found[name] = run(command, extra, out, seen)
            shutil.rmtree(out)
    return {name: each for name, each in found.items() if options.only in name}


def run(command: tuple[str, ...], extra: tuple[str, ...], out: Path, seen: dict[Path, int]) -> dict[str, Any]:
    """Run a command, in its new form if the tree lacks its old one; return what it prints and writes."""
    answer = run_once(command, extra, out)
    moved = RETIRED.get(command[0], ())
    if _is_lacking(answer["text"]) and moved and command[-1] != "--help":
        kept = (_RENAMED_OPTIONS.get((command[0], word), word) for word in command[1:])
        answer = run_once((moved[0], *kept, *moved[1:]), extra, out) | {"moved": " ".join(moved)}
    if _is_lacking(answer["text"]) and command[0] in RETIRED:
        return {"code": 0, "text": _LACKS, "files": {}, "cpu_s": 0.0}
    answer["files"] = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and seen.get(path) != path.stat().st_mtime_ns:
            seen[path] = path.stat().st_mtime_ns
            answer["files"][str(path.relative_to(out))] = digest(path)
    return answer


def _is_lacking(text: str) -> bool:
    return any(said in text for said in ("No such command", "No such option", "is no longer a command"))


def run_once(command: tuple[str, ...], extra: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Run a command in this process; return its exit code, its text and its CPU seconds."""
    import simdist
    from simdist.cli import main as command_line

    words = command[0].split() + list(command[1:])
    given = [str(out / "recorded") if word == "RUN" else word.replace("OUT", str(out)) for word in words]
    given = [_first_run(Path(word).parent) if word.endswith("/FIRST") else word for word in given]
    printed, said = io.StringIO(), io.StringIO()
    began_s = sum(os.times()[:4])
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            code: object = command_line([*given, *extra])
        except SystemExit as end:
            code = end.code
    text = printed.getvalue() + timeless(said.getvalue())
    for folder, name in ((Path.cwd(), ""), (Path(str(simdist.__file__)).parents[1], ""), (out, "OUT/")):
        text = text.replace(f"{folder}/", name)
    return {"code": code, "text": text.replace(str(out), "OUT"), "cpu_s": round(sum(os.times()[:4]) - began_s, 3)}


def _first_run(folder: Path) -> str:
    """Return the run of sync in a folder of runs, else the first one, or the folder if it is a run itself."""
    runs = sorted((path.parent for path in folder.glob("*/plan.json")), key=lambda path: (path.name != "sync", path))
    return str(runs[0] if runs else folder)


def of(tree: Path, part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a tree gives, run in a process of its own.

    Raises:
        RuntimeError: It fails, or takes longer than an hour.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--only", options.only]
    inputs = options.inputs or (tree if (tree / "docs/examples").is_dir() else ROOT)
    command += ["--inputs", str(inputs.resolve()), *(["--quick"] if options.quick else [])]
    if options.foreign:
        command += ["--foreign", str(options.foreign.resolve())]
    settings = {"COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **settings, "PYTHONPATH": f"{tree.resolve()}{os.pathsep}{folder}"}
        return answer_of(str(tree), command, timeout_s=TIMEOUT_S, environ=environment, folder=folder)


def gathered(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each tree gives: from the files that --keep wrote, and by processes side by side.

    Raises:
        RuntimeError: A tree fails.
    """
    n_parts = max(1, options.jobs // sum(tree.is_dir() for tree in options.trees)) if options.trees else 1
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            [pool.submit(of, tree, f"{part}/{n_parts}", options) for part in range(n_parts)] if tree.is_dir() else []
            for tree in options.trees
        ]
        found = [{name: each for part in parts for name, each in part.result().items()} for parts in waiting]
    for number, tree in enumerate(options.trees):
        if tree.is_file():
            kept: dict[str, Any] = json.loads(tree.read_text(encoding="utf-8"))
            found[number] = {name: each for name, each in kept.items() if options.only in name}
    return found


# ---------------------------------------------------------------- the comparison


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of commands by what became of them."""
    found: dict[str, list[str]] = {name: [] for name in _OUTCOMES}
    for name in dict.fromkeys([*before, *after]):
        of_both = [before.get(name), after.get(name)]
        for each, place in zip(of_both, ("not in BEFORE", "not in AFTER"), strict=True):
            if each is None or each["text"] == _LACKS or (each["code"] and name.startswith(_RETIRED_INPUTS)):
                found[place].append(name)
                break
        else:
            first, second = ({key: each[key] for key in ("code", "text", "files")} for each in of_both if each)
            moved = any(each and "moved" in each for each in of_both)
            other = "help" if name.endswith("--help") else "moved" if moved else "differs"
            found["equal" if first == second else other].append(name)
    return found


def report(before: dict[str, Any], after: dict[str, Any], options: argparse.Namespace) -> int:
    """Print what differs; return the exit status."""
    found = compared(before, after)
    for outcome in ("differs", "moved", "help"):
        for name in found[outcome]:
            print(f"{outcome}: {name}")
            if options.show:
                show(before[name], after[name])
    for place in ("not in BEFORE", "not in AFTER"):
        for first, count in Counter(name.split()[0] for name in found[place]).items():
            print(f"{place}: {count} of {first}")
        if options.show:
            for name in found[place]:
                print(f"    {name}")
    n_both = sum(len(found[outcome]) for outcome in ("equal", "differs", "moved", "help"))
    print(f"{len(found['equal'])} of {n_both} are equal")
    said = {"moved": "differ where a command moved", "help": "differ in --help", "not in AFTER": "are not in AFTER"}
    for outcome, what in said.items():
        if found[outcome]:
            print(f"{len(found[outcome])} {what}")
    return 1 if found["differs"] or not n_both else 0


def show(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print the first lines that differ, and the files."""
    lines = difflib.unified_diff(before["text"].splitlines(), after["text"].splitlines(), lineterm="", n=0)
    for line in list(lines)[2 : 2 + _MOST_SHOWN]:
        print(f"    {line}")
    for name in sorted({*before["files"], *after["files"]}):
        if before["files"].get(name) != after["files"].get(name):
            print(f"    file {name}")


def show_times(answers: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Print the CPU seconds of the longest commands, of each command, and of all."""
    spent = sorted(((each["cpu_s"], name) for name, each in answers), reverse=True)
    for cpu_s, name in spent[:_MOST_SHOWN]:
        print(f"{cpu_s:8.2f} s  {name}")
    of_command: Counter[str] = Counter()
    for cpu_s, name in spent:
        of_command[name.split()[0]] += cpu_s
    print("\n".join(f"{cpu_s:8.2f} s  {name}, all" for name, cpu_s in of_command.most_common()))
    print(f"{sum(cpu_s for cpu_s, _ in spent):8.2f} s  {len(spent)} commands")


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="a folder that holds simdist/, or a file")
    parser.add_argument("--only", default="", metavar="PART", help="only commands that contain this text")
    parser.add_argument("--quick", action="store_true", help="each command once or twice, on every kind of schedule")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time")
    parser.add_argument("--inputs", type=Path, metavar="CLONE", help="take scenarios from here, not from each tree")
    parser.add_argument("--foreign", type=Path, metavar="FOLDER", help="import each folder of traces in it, too")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what the one tree gives")
    parser.add_argument("--times", action="store_true", help="print the CPU seconds of the commands of the last tree")
    parser.add_argument("--show", action="store_true", help="print the lines that differ")
    parser.add_argument("--part", default="", help="print what this process gives for K/N of the commands, as JSON")
    options = parser.parse_args(args)
    if options.part:
        json.dump(outputs(options), sys.stdout)
        return 0
    if len(options.trees) != 2 and not (len(options.trees) == 1 and (options.keep or options.times)):
        parser.error("name two trees, BEFORE and AFTER, or one with --keep or --times")
    try:
        found = gathered(options)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.keep:
        options.keep.write_text(json.dumps(found[0], indent=0), encoding="utf-8")
    if options.times:
        show_times(found[-1].items())
    return report(found[0], found[1], options) if len(found) == 2 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
