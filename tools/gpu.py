"""Find out in eight minutes whether simdist works on the GPUs at hand, and how true it is there.

    python tools/gpu.py                 all parts; results go to experiments/gpu/results
    python tools/gpu.py --only peers    one part; may be repeated
    python tools/gpu.py --dry-run       all parts on CPUs at toy sizes, to see that they work

Uses the Python that it is started with, installs nothing and needs no network. simdist need not be installed. Parts run
in order of importance, each within a limit of its own. One that fails, or takes too long, is recorded, and the rest
goes on. On several GPUs, some parts give way to the comparison of ranks on all of them. Results are written with every
row that is measured, so whatever ends this command, they are kept. Clusters, workloads and traces, from which
predictions can be made again, go to an archive beside them after every part.

Parts have limits for errors and times; what holds and what misses them is printed.

Exit status: 0 if every part is done, also if it misses a limit; 1 if one is not, or if a test failed; 2 if packages or
the GPU are missing.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.util
import io
import json
import lzma
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "experiments" / "gpu"
sys.path.insert(0, str(HERE))
RESULTS = HERE / "results"
DRY_RESULTS = ROOT / "runs" / "gpu-dry-run"
FORMAT = "simdist-gpu-2"
ARCHIVE = ".tar.xz"  # of what is kept beside a file of results
LIMIT_S = 470.0
DRY_FACTOR = 2.5  # of all limits in a dry run: other work may share the CPUs
ENDS = "SIMDIST_GPU_PART_ENDS_S"  # tells a part when it is ended, by time.monotonic
SHORTEST_S = 5.0  # no part is started with less time than this

# What all parts import, by its name on the package index.
PACKAGES = {
    "click": "click",
    "fsspec": "fsspec",
    "matplotlib": "matplotlib",
    "msgspec": "msgspec",
    "numba": "numba",
    "numpy": "numpy",
    "pandas": "pandas",
    "PIL": "pillow",
    "pydantic": "pydantic",
    "rich": "rich",
    "scipy": "scipy",
    "simpy": "simpy",
    "torch": "torch",
    "yaml": "PyYAML",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the experiment.

    Args:
        name: Of its module in experiments/gpu.
        what: In a few words.
        limit_s: After so long it is ended.
        needs: Packages beside those of all parts: import name -> name on the package index.
        gpus: On how many GPUs it runs, unless it is asked for.
    """

    name: str
    what: str
    limit_s: float
    needs: dict[str, str] = field(default_factory=dict)
    gpus: Literal["any number", "one", "several"] = "any number"

    def runs_on(self, n_gpus: int) -> bool:
        """Tell whether it runs on so many GPUs unless it is asked for."""
        return self.gpus == "any number" or (self.gpus == "one") == (n_gpus == 1)


# The most important first. The last one gets what is left, as torch takes some of LIMIT_S to start.
PARTS = (
    Part("alone", "one rank alone, calibrated in the step", 70.0),
    Part("nccl", "plans of ranks on several GPUs, over NCCL", 140.0, gpus="several"),
    Part("peers", "one real rank among simulated ones", 90.0, {"triton": "triton"}),
    Part("shared_gpu", "values of two ranks over NCCL on one GPU", 20.0, gpus="one"),
    Part(
        "suite",
        "tests that need a GPU",
        100.0,
        {"pytest": "pytest", "hypothesis": "hypothesis", "xdist": "pytest-xdist"},
    ),
    Part("selection", "kernels that select the largest entries", 20.0, {"triton": "triton"}),
    Part("delays", "delays on the stream of the device", 15.0),
    Part("sharding", "memory of sharded plans beside their column", 25.0, gpus="one"),
    Part("single", "one process over NCCL beside DistributedDataParallel", 35.0),
    Part("plans", "plans of four ranks that share the GPU, as a test of function", 30.0, gpus="one"),
    Part("profiled", "stragglers of a profiled job", 20.0, gpus="one"),
    Part("steps", "step times by batch size and precision", 45.0, gpus="one"),
)


class Results:
    """The file of results, written anew with every row.

    Attributes:
        path: The file.
        kept: Folder of what its parts keep, until the end.
    """

    def __init__(self, path: Path, about: dict[str, object]) -> None:
        self.path = path
        self.kept = path.with_suffix("")
        self._packed: list[Path] = []
        self._document: dict[str, Any] = {"format": FORMAT, **about, "parts": {}}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def begin(self, part: Part) -> None:
        """Record that a part has begun; it stays so if nobody says how it ended."""
        self._document["parts"][part.name] = {"status": "interrupted", "seconds": 0.0, "error": None, "rows": []}
        self.write()

    def add(self, part: Part, row: dict[str, object], seconds: float) -> None:
        """Keep a row."""
        self._document["parts"][part.name]["rows"].append(row)
        self._document["parts"][part.name]["seconds"] = round(seconds, 1)
        self.write()

    def end(self, part: Part, status: str, seconds: float, error: str | None) -> None:
        """Record how a part ended."""
        self._document["parts"][part.name] |= {"status": status, "seconds": round(seconds, 1), "error": error}
        self.write()

    def keep(self) -> None:
        """Write what parts have kept so far into one archive beside the file."""
        found = files_in(self.kept)
        if found != self._packed:
            pack(self.kept, self.path.with_suffix(ARCHIVE))
        self._packed = found

    def close(self) -> None:
        """Remove the folder of what was kept: the archive has it."""
        self.keep()
        shutil.rmtree(self.kept, ignore_errors=True)

    def rows(self, part: Part) -> list[dict[str, object]]:
        """Return the rows of a part so far."""
        found: list[dict[str, object]] = self._document["parts"][part.name]["rows"]
        return found

    def write(self) -> None:
        """Replace the file in one step: a reader sees all of it, or what was there before."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self._document, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def files_in(folder: Path) -> list[Path]:
    """Return the files in a folder that are whole, in order."""
    return sorted(each for each in folder.rglob("*") if each.is_file() and not each.name.startswith("."))


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a folder into one archive; equal files give equal bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in files_in(folder):
            content = path.read_bytes()
            about = tarfile.TarInfo(path.relative_to(folder).as_posix())
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    part = archive.with_suffix(".part")
    part.write_bytes(lzma.compress(packed.getvalue(), preset=1))  # a second instead of four, for an eighth more bytes
    part.replace(archive)


def missing(parts: tuple[Part, ...]) -> dict[str, list[str]]:
    """Return the packages that are not here -> the parts that need them."""
    needed = {name: ["all parts"] for name in PACKAGES}
    for part in parts:
        for name in part.needs:
            needed.setdefault(name, []).append(part.name)
    names = PACKAGES | {name: package for part in parts for name, package in part.needs.items()}
    return {names[name]: of for name, of in needed.items() if importlib.util.find_spec(name) is None}


@contextlib.contextmanager
def started(
    name: str, dry_run: bool, limit_s: float = math.inf, keep: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], IO[bytes]]]:
    """Start a part in a process group of its own, and end the whole group; it ends by itself when this process does."""
    options = [*(["--dry-run"] if dry_run else []), *(["--keep", str(keep.resolve())] if keep else [])]
    command = [sys.executable, str(HERE / "part.py"), name, "--followed", *options]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=os.environ | {ENDS: str(time.monotonic() + limit_s)},
        )
        try:
            yield process, errors
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lines_of(process: subprocess.Popen[str], limit_s: float) -> Iterator[str]:
    """Yield what a process prints, line by line.

    Raises:
        TimeoutError: It has not ended within the limit.
    """
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            line = found.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        yield line


def run_part(part: Part, results: Results, limit_s: float, dry_run: bool) -> str:
    """Run a part, keep its rows, and return how it ended: done, skipped, failed, or out of time."""
    begin_s = time.monotonic()
    results.begin(part)
    status, error = "done", None
    with started(part.name, dry_run, limit_s, results.kept) as (process, errors):
        try:
            for line in lines_of(process, limit_s):
                row = json.loads(line)
                if "skipped" in row:
                    status, error = "skipped", row["skipped"]
                else:
                    results.add(part, row, time.monotonic() - begin_s)
            if process.wait(timeout=30):
                status, error = "failed", tail(errors)
        except TimeoutError:
            status, error = "out of time", f"ended after {limit_s:.0f} s: {tail(errors)}"
        except (ValueError, subprocess.TimeoutExpired) as wrong:
            status, error = "failed", f"{wrong}: {tail(errors)}"
    results.end(part, status, time.monotonic() - begin_s, error)
    results.keep()
    return status


def tail(errors: IO[bytes]) -> str:
    """Return the end of what a part has written to stderr."""
    errors.seek(0)
    return errors.read().decode(errors="replace")[-6000:].strip()


def machine(dry_run: bool) -> dict[str, Any]:
    """Return the GPU and the releases of what matters; `device` is None where torch finds no GPU."""
    with started("machine", dry_run) as (process, errors):
        try:
            lines = list(lines_of(process, 120.0))
        except TimeoutError:
            sys.exit(f"torch does not start within 120 s: {tail(errors)}")
        if process.wait(timeout=30) or not lines:
            sys.exit(f"torch does not start: {tail(errors)}")
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def commit() -> dict[str, object]:
    """Return the commit of this clone, and whether files differ from it; nulls where there is no git or no history.

    Results of earlier runs do not count.
    """
    unknown: dict[str, object] = {"commit": None, "dirty": None}
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return unknown

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
        return {"commit": git("rev-parse", "--short=12", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return unknown


def chosen(names: list[str] | None) -> tuple[Part, ...]:
    """Return the parts to run."""
    return tuple(part for part in PARTS if not names or part.name in names)


def refuse_missing(parts: tuple[Part, ...], skip: bool) -> tuple[Part, ...] | None:
    """Name what is missing, and return the parts that run without it; None if there are none, or not asked to skip."""
    absent = missing(parts)
    for package, of in absent.items():
        print(f"missing: {package}, which {', '.join(of)} need", file=sys.stderr)
    if not absent:
        return parts
    without = tuple(part for part in parts if not any(part.name in of or "all parts" in of for of in absent.values()))
    if skip and without:
        return without
    print(
        f"nothing was run. Install what is missing: {sys.executable} -m pip install {' '.join(absent)}\n"
        "Without a network, carry wheels: pip download --no-deps --only-binary=:all: on another machine.\n"
        "Or run the parts that do without it: --skip-missing",
        file=sys.stderr,
    )
    return None


def parsed(args: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder of the results (default: experiments/gpu/results)")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="a part; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="on CPUs at toy sizes; results go to runs/gpu-dry-run")
    parser.add_argument("--skip-missing", action="store_true", help="leave out parts whose packages are missing")
    parser.add_argument("--limit", type=float, metavar="S", help="of all parts (default: 470, of a dry run more)")
    options = parser.parse_args(args)
    if options.limit is None:
        options.limit = sum(part.limit_s for part in PARTS) * DRY_FACTOR if options.dry_run else LIMIT_S
    options.output = options.output or (DRY_RESULTS if options.dry_run else RESULTS)
    if options.dry_run and options.output.resolve() == RESULTS:
        parser.error(f"-o {options.output}: is for results of GPUs, and these would be of a dry run; choose another")
    return options


def main(args: list[str]) -> int:
    options = parsed(args)
    parts = refuse_missing(chosen(options.only), options.skip_missing)
    if parts is None:
        return 2
    begin_s = time.monotonic()
    facts = machine(options.dry_run)
    broken = facts.pop("broken", [])
    if broken:
        print("\n".join(f"cannot be imported: {each}" for each in broken), file=sys.stderr)
        return 2
    if facts["device"] is None and not options.dry_run:
        print("torch finds no GPU here. --dry-run sees on CPUs that the parts work.", file=sys.stderr)
        return 2
    now = datetime.datetime.now(datetime.UTC)
    about = facts | {"dry_run": options.dry_run, "date": now.strftime("%Y-%m-%d"), **commit()}
    if options.dry_run:
        about["device"] = "no GPU: a dry run on CPUs at toy sizes"
    device = "dry-run" if options.dry_run else re.sub(r"[^A-Za-z0-9.]+", "-", str(facts["device"]))
    results = Results(options.output / f"{device}-{now.strftime('%Y%m%dT%H%M%S')}.json", about)
    print(f"{about['device']}; results go to {results.path}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parts = tuple(part for part in parts if options.dry_run or options.only or part.runs_on(facts["gpus"]))
    try:
        passed = run_all(parts, results, options, begin_s)
        for line in summary(parts, results):
            print(line, flush=True)
        return 0 if passed else 1
    finally:
        results.close()


def run_all(parts: tuple[Part, ...], results: Results, options: argparse.Namespace, begin_s: float) -> bool:
    """Run the parts one after the other, and return whether all of them are done, and no test failed."""
    passed = True
    for part in parts:
        most_s = part.limit_s * (DRY_FACTOR if options.dry_run else 1.0)
        limit_s = min(most_s, options.limit - (time.monotonic() - begin_s))
        if limit_s < SHORTEST_S:
            results.begin(part)
            results.end(part, "not run", 0.0, "no time was left")
            status = "not run"
        else:
            status = run_part(part, results, limit_s, options.dry_run)
        rows = results.rows(part)
        n_failed = sum(row.get("outcome") == "failed" for row in rows)
        passed &= status in ("done", "skipped") and not n_failed
        failed = f", {n_failed} failed" if n_failed else ""
        print(f"{part.name}: {status}, {len(rows)} rows{failed} ({part.what})", flush=True)
    return passed


def summary(parts: tuple[Part, ...], results: Results) -> list[str]:
    """Return the lines on the limits of the parts that have rows for them."""
    verdicts = importlib.import_module("verdicts").verdicts  # of the experiment
    found = [(part, verdict) for part in parts for verdict in verdicts(part.name, results.rows(part))]
    if not found:
        return []
    n_held = sum(verdict.is_held for _, verdict in found)
    lines = [f"limits: {n_held} of {len(found)} are held"]
    return lines + [f"  {part.name}: {verdict}" for part, verdict in found]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
        sys.exit(130)
