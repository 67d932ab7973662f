"""Do the tests notice? Plant bugs one at a time, and run the tests that should fail.

    python tools/mutants.py                     plant all of them; exit with 1 if a bug survives
    python tools/mutants.py --only 'caching'    those whose package or name matches
    python tools/mutants.py --write             record the outcome in benchmarks/results/mutants.json

The bugs stand in `tools/mutants_list.py`. Each is planted in a copy of the tree, so the tree itself may be edited
meanwhile. Its tests must pass without it; then it is killed if they fail, or do not end in time. They run tier by tier
(tests/tiers.py), so the outcome names the lowest tier that kills it.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from mutants_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
COPIED = ("simdist", "real", "tests", "experiments", "docs", "benchmarks", "tools", "pyproject.toml", "README.md")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
TIERS = ("check", "test", "ci")  # each has the tests of those before
_NO_TESTS = 5  # the exit code of pytest
LONGEST_S = 600.0
PATIENCE, LEAST_PATIENCE_S = 5.0, 30.0  # times what the tests take unmutated, and that more: the machine may be busy

InT = TypeVar("InT")
OutT = TypeVar("OutT")
Tests = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of pytest ended.

    Args:
        passed: All tests did, and there were some.
        seconds: That it took.
        last: Its last words.
        is_empty: There was no test.
    """

    passed: bool
    seconds: float
    last: str
    is_empty: bool = False


def stale(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """Return what is wrong with a list of mutants: a sentence for each that cannot be planted."""
    names = Counter((mutant.package, mutant.name) for mutant in mutants)
    found = [f"{package}: {name}: planted {n} times; names are unique" for (package, name), n in names.items() if n > 1]
    for mutant in mutants:
        try:
            mutated(root, mutant)
        except (OSError, ValueError, SyntaxError) as error:
            found.append(f"{mutant.package}: {mutant.name}: {error}")
        paths = [each.partition("::")[0] for each in mutant.tests if each.startswith(("tests/", "simdist/", "real/"))]
        missing = [path for path in paths if not (root / path).exists()]
        if missing or not paths:
            found.append(f"{mutant.package}: {mutant.name}: no such tests: {', '.join(missing) or 'none are named'}")
    return found


def mutated(root: Path, mutant: Mutant) -> str:
    """Return the text of a mutant's file with the bug in it.

    Raises:
        OSError: There is no such file.
        ValueError: The text that it replaces does not stand there exactly once.
        SyntaxError: The bug is no Python.
    """
    text = (root / mutant.file).read_text(encoding="utf-8")
    n_times = text.count(mutant.old)
    if n_times != 1:
        raise ValueError(f"{mutant.file} has {n_times} times: {mutant.old!r}")
    changed = text.replace(mutant.old, mutant.new)
    if ast.dump(ast.parse(changed)) == _dumped(text):
        raise ValueError(f"{mutant.file}: nothing changes: {mutant.new!r}")
    return changed


@cache
def _dumped(text: str) -> str:
    """Return the syntax tree of a file, in which many bugs are planted."""
    return ast.dump(ast.parse(text))


@contextmanager
def planted(root: Path, mutant: Mutant) -> Iterator[None]:
    """Have a mutant in a tree for a while."""
    path = root / mutant.file
    text, changed, before = path.read_bytes(), mutated(root, mutant), path.stat()
    path.write_text(changed, encoding="utf-8")
    os.utime(path, (before.st_atime, time.time() + 1e6))  # Python knows compiled code by time and size of its source
    try:
        yield
    finally:
        path.write_bytes(text)
        os.utime(path, (before.st_atime, before.st_mtime))


def run_tests(root: Path, tests: Tests, timeout_s: float) -> Outcome:
    """Run tests of a tree; those that do not end in time have failed."""
    # hypothesis draws the same examples every time, and looks for no simpler one where a test fails
    environment = {**os.environ, "PYTHONPATH": str(root), "CI": "1", "UNSHRUNK": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # bytecode of a bug of the same length and second would hide the next
    began_s = time.monotonic()
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as said:
        with subprocess.Popen(
            [*PYTEST, *tests], cwd=root, env=environment, stdout=said, stderr=said, start_new_session=True
        ) as process:
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        seconds = time.monotonic() - began_s
        said.seek(0)
        words = [line.strip() for line in said if line.startswith(("FAILED", "ERROR"))]
    last = f"no end within {timeout_s:.0f} s" if code is None else words[-1] if words else f"exit code {code}"
    return Outcome(code == 0, seconds, last, is_empty=code == _NO_TESTS)


@contextmanager
def copies(n: int) -> Iterator["SimpleQueue[Path]"]:
    """Make copies of the tree, for as many workers."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(n):
            copy = Path(folder, str(number))
            copy.mkdir()
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy2(ROOT / name, copy / name)
            free.put(copy)
        yield free


def each_in_a_copy(
    act: Callable[[Path, InT], OutT], items: Sequence[InT], free: "SimpleQueue[Path]", jobs: int
) -> Iterator[OutT]:
    """Act on every item in a free copy, and yield what comes of them, in order."""

    def in_a_copy(item: InT) -> OutT:
        root = free.get()
        try:
            return act(root, item)
        finally:
            free.put(root)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(in_a_copy, items)


def unmutated(root: Path, tests: Tests) -> tuple[Tests, Outcome]:
    """Run tests without a mutant."""
    return tests, run_tests(root, tests, LONGEST_S)


def attacked(usual: Mapping[Tests, Outcome], root: Path, mutant: Mutant) -> tuple[Mutant, Outcome, str | None]:
    """Run a mutant's tests on it, for some times as long as they take without. Return the tier that kills it, too."""
    patience_s = min(LONGEST_S, LEAST_PATIENCE_S + PATIENCE * usual[mutant.tests].seconds)
    with planted(root, mutant):
        for tier in TIERS:
            outcome = run_tests(root, (*mutant.tests, "--tier", tier), patience_s)
            if not (outcome.passed or outcome.is_empty):
                return mutant, outcome, tier
    return mutant, outcome, None


def told_name(mutant: Mutant) -> str:
    """Return how tables call a mutant: those that no test can kill with the reason."""
    return f"{mutant.name} (equivalent: {mutant.equivalent})" if mutant.equivalent else mutant.name


def write(killed_by: Mapping[Mutant, str | None]) -> None:
    """Record the tier that kills each mutant; of those that were not run, what is recorded stays."""
    found = {(mutant.package, told_name(mutant)): tier for mutant, tier in killed_by.items()}
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    known = {(each["package"], each["name"]): each["tier"] for each in before} | found
    names = [(mutant.package, told_name(mutant)) for mutant in MUTANTS]
    rows = [{"package": each[0], "name": each[1], "tier": known[each]} for each in names if each in known]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def main() -> int:
    """Plant the mutants that are asked for, and tell what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="regular expression for 'package: name'")
    parser.add_argument("--jobs", type=int, default=1, help="runs of pytest at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--write", action="store_true", help="record the outcome for the tables of the documentation")
    given = parser.parse_args()
    mutants = [each for each in MUTANTS if re.search(given.only, f"{each.package}: {each.name}")]
    if problems := stale(ROOT, MUTANTS):
        print("\n".join(problems), file=sys.stderr)
        return 1
    if given.list:
        for mutant in mutants:
            print(f"{mutant.package}: {mutant.name}\n    {mutant.file}  {' '.join(mutant.tests)}")
        return 0
    began_s = time.monotonic()
    with copies(given.jobs) as free:
        selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
        usual: dict[Tests, Outcome] = {}
        for tests, usual[tests] in each_in_a_copy(unmutated, selections, free, given.jobs):
            print(f"without   {' '.join(tests)}  [{usual[tests].seconds:.1f} s]", flush=True)
        failing = [f"{' '.join(tests)}: {each.last}" for tests, each in usual.items() if not each.passed]
        mutants = [mutant for mutant in mutants if usual[mutant.tests].passed]
        killed_by: dict[Mutant, str | None] = {}
        for mutant, outcome, tier in each_in_a_copy(partial(attacked, usual), mutants, free, given.jobs):
            killed_by[mutant] = tier
            state = tier or "SURVIVED"
            took = f"[{outcome.seconds:.1f} s] {outcome.last}"
            print(f"{state:9}{mutant.package}: {told_name(mutant)}  {took}", flush=True)
    if given.write:
        write(killed_by)
    by_tier = Counter(killed_by.values())
    killed = ", ".join(f"{by_tier[tier]} killed by {tier}" for tier in TIERS)
    took_s = time.monotonic() - began_s
    print(f"{len(killed_by)} planted, {killed}, {by_tier[None]} survived; {took_s:.0f} s")
    wrong = [mutant for mutant, tier in killed_by.items() if (tier is None) != bool(mutant.equivalent)]
    for mutant in wrong:
        what = "was killed, so is not equivalent" if mutant.equivalent else "survived"
        print(f"{mutant.package}: {mutant.name}: {what}")
    if failing:
        print("these fail without any mutant, so nothing was planted for them:", *failing, sep="\n")
    return int(bool(wrong or failing))


if __name__ == "__main__":
    sys.exit(main())
