"""Proves that a refactoring leaves results as they are: records what simdist computes, and compares with it later.

Usage, from the root of the repository:

    python tools/golden.py record [FILE]                  # before: 224 items, two minutes of CPU time
    python tools/golden.py check [FILE]                   # after: exit 1 if any item differs
    python tools/golden.py check --only 'compare/*'       # these items only; may be repeated
    python tools/golden.py check --list                   # the names of the items

FILE is by default $SIMDIST_GOLDEN, or else runs/golden.json. An item is a command of `simdist`, or a script of
`experiments`: what it prints on stdout, its exit code, and the files that it writes. Only the command line is used, so
the items survive when modules move. Arrays and traces are kept as hashes of their contents, JSON is kept whole, so that
`check` can say where it differs. Not compared: what goes to stderr, comments in YAML files, keys of sweeps (they are
made of simdist's own source), figures, and what needs machines to measure.
"""

import argparse
import base64
import fnmatch
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DEFAULT = Path(os.environ.get("SIMDIST_GOLDEN") or ROOT / "runs" / "golden.json")
KEPT_BYTES = 400_000  # larger JSON files are kept as a hash

PRESETS = ("cloud-data", "cloud-gradients", "cloud-stragglers")
EXAMPLES = "docs/examples"
DEMO = "experiments/demo/scenario.yaml"
RUN = "notebooks/data/run"  # a recorded one: its plan, delays and measured trace
SLOW = ("cloud-data", "experiments/datacache/scenario.yaml")  # full length takes seconds: only plan and simulate
WITH_DATA = (f"{EXAMPLES}/stalls.yaml", f"{EXAMPLES}/real-data.yaml", "experiments/emulated_cluster/storage.yaml")
ONE_BY_ONE = ("experiments/mlperf_storage/scenario.yaml", "experiments/efs_k80/scenario.yaml")
SMALL = {  # scenarios for what is done only to some: steps of them, or None for as many as they have
    f"{EXAMPLES}/first.yaml": 60,
    f"{EXAMPLES}/slow-worker.yaml": 60,
    f"{EXAMPLES}/recorded.yaml": None,
    f"{EXAMPLES}/real-data.yaml": None,
    DEMO: None,
    "cloud-gradients": 2,
    "experiments/emulated_cluster/communication.yaml": 6,
    "experiments/gtopk_1gbe/resnet50.yaml": None,
    "experiments/horovod_scaling/horovod.yaml": None,
    "experiments/horovod_scaling/parameter-server.yaml": None,
    "experiments/hsgd_stragglers/64.yaml": 40,
    "experiments/netai_whatif/scenario.yaml": 3,
}
SCRIPTS = {  # experiments that print the same each time, and need no measurement
    "aws_p3_scaling": ("run.py",),
    "dawnbench_resnet50": ("run.py",),
    "gtopk_1gbe": ("run.py",),
    "hitopk_communication": ("run.py",),
    "horovod_scaling": ("run.py",),
    "nccl_tables": ("run.py",),
    "netai_whatif": ("run.py",),
    "hsgd_stragglers": ("run.py", "--seeds", "2", "--steps", "60"),
    "emulated_cluster-synchronization": ("run.py", "--tables", "--study", "synchronization"),
    "emulated_cluster-communication": ("run.py", "--tables", "--study", "communication"),
    "emulated_cluster-storage": ("run.py", "--tables", "--study", "storage"),
    "profile_round_trip": ("run.py", "--tables"),
}

# --- what an item does ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that is recorded.

    Args:
        name: Such as `compare/docs/examples/first.yaml`.
        make: Returns what is compared, of JSON's types, when given an empty folder to write in.
        may_fail: Whether a refusal is a result, too.
    """

    name: str
    make: Callable[[Path], dict[str, Any]]
    may_fail: bool = False


def simdist(*args: str | Path) -> dict[str, Any]:
    """Run a command line of simdist in this process; return its exit code and what it prints."""
    from simdist.cli import main

    out = StringIO()
    with redirect_stdout(out), redirect_stderr(StringIO()):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as error:
            code = error.code
    return {"exit": code, "stdout": parsed(out.getvalue())}


def script(name: str, args: tuple[str, ...], _: Path) -> dict[str, Any]:
    """Run a script of an experiment in a process of its own; return its exit code and what it prints."""
    folder = ROOT / "experiments" / name.split("-")[0]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, str(folder / args[0]), *args[1:]]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return {"exit": done.returncode, "stdout": done.stdout.splitlines()}


def with_files(folder: Path, *args: str | Path) -> dict[str, Any]:
    """Run a command line that writes into `folder/out`; add what the files there hold."""
    return {**simdist(*args), "files": {path: content(folder / path) for path in files(folder)}}


def files(folder: Path) -> list[str]:
    """Return the files below `folder/out`, and none that a scenario was copied to."""
    found = (path.relative_to(folder).as_posix() for path in folder.glob("out*/**/*") if path.is_file())
    beside = (path.name for path in folder.glob("out*") if path.is_file())
    return sorted({*found, *beside})


def content(path: Path) -> Any:
    """Return what a file holds, as far as it must not change."""
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    match path.suffix:
        case ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: described(archive[name]) for name in archive.files}
        case ".yaml":
            return yaml.safe_load(data)
        case ".jsonl":
            return [{k: v for k, v in json.loads(line).items() if k != "key"} for line in data.splitlines()]
        case ".csv":
            return data.decode().splitlines()
        case ".json" if len(data) <= KEPT_BYTES:
            return {"sha256": sha256, "content": json.loads(data)}
    return {"sha256": sha256, "bytes": len(data)}


def described(array: np.ndarray) -> dict[str, Any]:
    """Return what tells an array from others."""
    sha256 = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": sha256}


def parsed(text: str) -> Any:
    """Return text as the JSON that it is, or else its lines."""
    try:
        return json.loads(text)
    except ValueError:
        return text.splitlines()


def shortened(scenario: str, n_steps: int | None, folder: Path) -> str:
    """Return a scenario of at most so many steps: a copy in `folder`, or the scenario itself if it is short enough."""
    if n_steps is None:
        return scenario
    copies = folder / "scenario"
    if (ROOT / scenario).is_file():
        shutil.copytree((ROOT / scenario).parent, copies)
        copy = copies / Path(scenario).name
    else:
        copies.mkdir()
        copy = copies / f"{scenario}.yaml"
        copy.write_text("\n".join(simdist("presets", "scenarios", scenario)["stdout"]) + "\n")
    text = copy.read_text()
    found = re.search(r"^steps: (\d+)", text, re.MULTILINE)
    if found is None or int(found[1]) <= n_steps:
        return scenario
    copy.write_text(text[: found.start()] + f"steps: {n_steps}" + text[found.end() :])
    return str(copy)


# --- the items -----------------------------------------------------------------------------------------------------


def plan(scenario: str, folder: Path) -> dict[str, Any]:
    return with_files(folder, "plan", scenario, "--json", "-o", folder / "out")


def simulate(scenario: str, engine: str, n_steps: int | None, folder: Path) -> dict[str, Any]:
    short = shortened(scenario, n_steps, folder)
    return with_files(folder, "simulate", short, "--engine", engine, "--json", "-o", folder / "out")


def compare(scenario: str, n_steps: int | None, folder: Path) -> dict[str, Any]:
    short = shortened(scenario, n_steps, folder)
    labels = [row["schedule"] for row in simdist("plan", short, "--json")["stdout"]["plans"]]
    baseline = "sync" if "sync" in labels else labels[0]
    return simdist("compare", short, "--seeds", "2", "--baseline", baseline, "--json")


def of_scenario(command: tuple[str, ...], scenario: str, n_steps: int | None, folder: Path) -> dict[str, Any]:
    return simdist(*command, shortened(scenario, n_steps, folder), "--json")


def of_simulated(command: tuple[str, ...], scenario: str, n_steps: int | None, folder: Path) -> dict[str, Any]:
    runs = folder / "runs"
    simdist("simulate", shortened(scenario, n_steps, folder), "-o", runs)
    return simdist(*command, runs, "--json")


def chrome(scenario: str, n_steps: int | None, folder: Path) -> dict[str, Any]:
    runs = folder / "runs"
    simdist("simulate", shortened(scenario, n_steps, folder), "-o", runs)
    results = {}
    for plan_file in sorted(runs.glob("**/plan.json")):
        label = plan_file.parent.name
        options = ("--steps", "0:2", "--tensors", "--json")
        simdist("trace", plan_file.parent, "--chrome", folder / f"out-{label}.json", *options)
    results["files"] = {path: content(folder / path) for path in files(folder)}
    return {"exit": 0 if results["files"] else 1, **results}


def of_run(command: tuple[str, ...], folder: Path) -> dict[str, Any]:
    copy = folder / "out"
    shutil.copytree(ROOT / RUN, copy)
    (copy / "trace.simulated.npz").unlink(missing_ok=True)
    return with_files(folder, command[0], copy, *command[1:], "--json")


def imported(args: tuple[str, ...], folder: Path) -> dict[str, Any]:
    return with_files(folder, "import", *args, "-o", folder / "out.yaml", "--workers", "1", "--json")


def chakra(scenario: str, n_steps: int | None, folder: Path) -> dict[str, Any]:
    short = shortened(scenario, n_steps, folder)
    return with_files(folder, "chakra", "export", short, "-o", folder / "out", "--steps", "2", "--force", "--json")


def chakra_import(scenario: str, label: str, cluster: str, folder: Path) -> dict[str, Any]:
    traces = folder / "traces"
    simdist("chakra", "export", scenario, "-o", traces, "--schedule", label, "--steps", "2")
    return with_files(folder, "chakra", "import", traces, "-o", folder / "out.yaml", "--cluster", cluster, "--json")


def sweep(base: str, n_steps: int, folder: Path) -> dict[str, Any]:
    short = shortened(f"{EXAMPLES}/first.yaml", n_steps, folder)
    out = folder / "sweep"
    result = simdist("sweep", Path(short).parent / base, "-o", out, "--workers", "0", "--json")
    tables = {name: simdist("results", out, *args, "--json") for name, args in (("all", ()), ("best", ("--fastest",)))}
    return {**result, "rows": content(out / "rows.jsonl"), "results": tables}


def items() -> Iterator[Item]:
    """Yield all items, the longest first as far as it is known."""
    yield from (Item(f"experiment/{name}", partial(script, name, args)) for name, args in SCRIPTS.items())
    everything = [*scenarios(), *PRESETS]
    for name in everything:
        yield Item(f"simulate/{name}", partial(simulate, name, "auto", 200))
        yield Item(f"plan/{name}", partial(plan, name))
        if name not in SLOW and name not in ONE_BY_ONE:
            yield Item(f"compare/{name}", partial(compare, name, 60))
    for base in ("sweep.yaml", "sensitivity.yaml"):
        yield Item(f"sweep/{EXAMPLES}/{base}", partial(sweep, base, 60))
    for name, n_steps in SMALL.items():
        yield Item(f"engine-des/{name}", partial(simulate, name, "des", n_steps))
        yield Item(f"engine-fast/{name}", partial(simulate, name, "fast", n_steps), may_fail=True)
        yield Item(f"comms/{name}", partial(of_simulated, ("comms",), name, n_steps))
        yield Item(f"results/{name}", partial(of_simulated, ("results",), name, n_steps))
        yield Item(f"trace/{name}", partial(chrome, name, n_steps))
        yield Item(f"whatif/{name}", partial(of_scenario, ("whatif", "--resamples", "5"), name, n_steps), may_fail=True)
        yield Item(f"chakra-export/{name}", partial(chakra, name, n_steps), may_fail=True)
    for name in (*WITH_DATA, *ONE_BY_ONE):
        yield Item(f"data/{name}", partial(of_scenario, ("data",), name, None))
    for name in WITH_DATA[:2]:
        yield Item(f"data-knobs/{name}", partial(of_scenario, ("data", "--knobs"), name, None))
    for name in (f"{EXAMPLES}/first.yaml", DEMO):
        tune = ("tune", "--evaluations", "12", "--seeds", "2", "--search-seeds", "1")
        yield Item(f"tune/{name}", partial(of_scenario, tune, name, 60))
    yield Item(
        f"chakra-import/{EXAMPLES}/first.yaml", partial(chakra_import, f"{EXAMPLES}/first.yaml", "sync", "ideal")
    )
    yield Item(f"chakra-import/{DEMO}", partial(chakra_import, DEMO, "sync", "v100x8-25gbit"))
    for command in ("validate", "comms", "whatif", "simulate"):
        yield Item(f"{command}/{RUN}", partial(of_run, (command,)))
    calibrated = ("validate", "--cluster", "notebooks/data/cluster.yaml")
    yield Item(f"validate-cluster/{RUN}", partial(of_run, calibrated))
    traces = f"{EXAMPLES}/traces"
    yield Item(f"import/{traces}", partial(imported, (traces,)))
    yield Item(f"import-steps/{traces}", partial(imported, (traces, "--steps", "85:100", "--nodes", "2")))
    yield Item(f"import-cluster/{traces}", partial(imported, (traces, "--cluster", "ideal")))
    yield Item("import/tests/data/profiles/slow", partial(imported, ("tests/data/profiles/slow",)))
    late = ("tests/data/profiles/late", "--tensors", "mlp", "--cluster", "ideal")
    yield Item("import/tests/data/profiles/late", partial(imported, late))
    yield Item("presets/all", partial(presets))


def presets(_: Path) -> dict[str, Any]:
    listed = simdist("presets", "--json")
    texts = {
        f"{kind}/{entry['name']}": simdist("presets", kind, entry["name"])["stdout"]
        for kind in ("clusters", "workloads", "scenarios")
        for entry in listed["stdout"][kind]
    }
    return {**listed, "yaml": {name: yaml.safe_load("\n".join(lines)) for name, lines in texts.items()}}


def scenarios() -> list[str]:
    """Return the files below docs and experiments that are scenarios, from the root of the repository."""
    paths = [*ROOT.glob(f"{EXAMPLES}/*.yaml"), *ROOT.glob("experiments/*/*.yaml")]
    return sorted(p.relative_to(ROOT).as_posix() for p in paths if re.search(r"^schedules:", p.read_text(), re.M))


# --- recording and checking ----------------------------------------------------------------------------------------


def computed(name: str) -> tuple[str, str, float]:
    """Return the name of an item, its canonical text, and how many seconds of CPU time it took."""
    os.chdir(ROOT)
    os.environ.update(NO_COLOR="1", COLUMNS="120")
    begin = sum(os.times()[:4])
    item = next(item for item in items() if item.name == name)
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        try:
            result = item.make(Path(folder).resolve())
        except Exception as error:  # a bug of what is tested is a result, too: the other items go on
            result = {"exit": None, "failed": f"{type(error).__name__}: {error}"}
        if result["exit"] != 0 and not item.may_fail:
            result = {"failed": f"exit code {result['exit']}", **result}
        text = json.dumps(result, default=str).replace(str(Path(folder).resolve()), "<folder>")
    return name, text.replace(str(ROOT), "<root>"), sum(os.times()[:4]) - begin


def compute(names: list[str], n_jobs: int) -> Iterator[tuple[str, str, float]]:
    """Yield all of `computed` of these items, in order."""
    with ProcessPoolExecutor(n_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(computed, names)


def first_difference(old: Any, new: Any, path: str = "$") -> tuple[str, Any, Any] | None:
    """Return the path where two JSON values first differ, and both values; None if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{path}.{key}"
            if key not in old or key not in new:
                return inner, old.get(key, "(absent)"), new.get(key, "(absent)")
            if found := first_difference(old[key], new[key], inner):
                return found
        return None if list(old) == list(new) else (f"{path} (order of keys)", list(old), list(new))
    if isinstance(old, list) and isinstance(new, list):
        pairs = enumerate(zip_longest(old, new, fillvalue="(absent)"))
        return next(filter(None, (first_difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), None)
    return None if json.dumps(old) == json.dumps(new) else (path, old, new)


def packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode()


def record(path: Path, names: list[str], n_jobs: int) -> int:
    """Write what the items are now; those that are not named stay as they were recorded."""
    recorded = json.loads(path.read_text()) if path.exists() else {}
    n_failed = 0
    for name, text, seconds in compute(names, n_jobs):
        failure = json.loads(text).get("failed")
        n_failed += bool(failure)
        print(f"{seconds:6.1f} s  {name}{f'  FAILED: {failure}' if failure else ''}", flush=True)
        if not failure:
            recorded[name] = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": packed(text)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recorded, indent=0) + "\n")
    print(f"recorded {len(names) - n_failed} of {len(names)} items in {path}")
    return 1 if n_failed else 0


def check(path: Path, names: list[str], n_jobs: int, only: list[str]) -> int:
    """Print how the items differ from what was recorded."""
    recorded = json.loads(path.read_text())
    gone = [name for name in recorded if wanted(name, only) and name not in names]
    unknown = [name for name in names if name not in recorded]
    for name in gone:
        print(f"GONE     {name}")
    for name in unknown:
        print(f"new      {name}: not recorded, so not compared")
    n_different = len(gone)
    known = [name for name in names if name in recorded]
    for name, text, _ in compute(known, n_jobs):
        if hashlib.sha256(text.encode()).hexdigest() == recorded[name]["sha256"]:
            continue
        n_different += 1
        old, new = json.loads(unpacked(recorded[name]["text"])), json.loads(text)
        where, before, after = first_difference(old, new) or ("$", "(equal but for its text)", "")
        if "failed" in new:
            where, before, after = "$.failed", "(it worked)", new["failed"]
        print(f"DIFFERS  {name}\n    at {where}\n    was {shown(before)}\n    is  {shown(after)}", flush=True)
    print(f"{len(known) + len(gone)} items compared with {path}: {n_different or 'none'} differ")
    return 1 if n_different else 0


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def wanted(name: str, only: list[str]) -> bool:
    return not only or any(fnmatch.fnmatch(name, pattern) for pattern in only)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT, metavar="FILE", help=f"by default {DEFAULT}")
    parser.add_argument("--only", action="append", nargs="+", default=[], metavar="PATTERN", help="such as 'compare/*'")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; by default 2")
    parser.add_argument("--list", action="store_true", help="print names of items, and do nothing")
    options = parser.parse_args()
    only = [pattern for patterns in options.only for pattern in patterns]
    names = [item.name for item in items() if wanted(item.name, only)]
    if options.list:
        print("\n".join(names))
        return 0
    if options.action == "check" and not options.file.is_file():
        parser.error(f"{options.file}: not there; `python tools/golden.py record` writes it")
    begin = time.monotonic()
    if options.action == "record":
        code = record(options.file, names, options.jobs)
    else:
        code = check(options.file, names, options.jobs, only)
    print(f"took {time.monotonic() - begin:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
