"""Build the wheel and the sdist, and try the wheel in fresh environments.

    python tools/wheels.py                          every claimed Python here; no torch, the oldest, the newest
    python tools/wheels.py --python 3.12 --torch none --torch oldest
    python tools/wheels.py --torch 2.13.0+cpu       a release of torch by its number
    python tools/wheels.py -o dist                  keep what was built

Each environment gets the wheel alone, or with `real` and that torch, and then, away from the sources:

- compare: `simdist compare` of an example
- import: `simdist import` of the example's traces, and a comparison of what it wrote
- ranks: a plan is performed by two processes with gloo, and validated; with torch only

pip takes packages from where it always does on this machine, local wheels included; `tools/installs.py` asks the index
alone. Builds of torch with CUDA take 3 GB for each environment.

Exit status: 0 if everything works, 1 if something fails, 2 if something could not be installed: no index answers, or no
claimed Python is here.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from installs import CONFLICTS, ROOT, NoAnswerError, claimed_pythons, interpreter, last_line

CHOICES = ("none", "oldest", "newest")
_SHOWN_LINES = 40  # of a command that failed
TIMEOUT_S = 1800.0  # of one command: torch with CUDA is large
SCENARIO = ROOT / "docs/examples/first.yaml"
TRACES = ROOT / "docs/examples/traces"
TWO_RANKS = """\
cluster:
  nodes: 1
  gpus_per_node: 2
  fabric: {latency: 100 us, bandwidth: 1 GB/s}
  network: ideal
  collectives:
    library: gloo
workload:
  tensors: [{name: weight, count: 100000}, {name: bias, count: 1000}]
  batch_size: 8
  forward: 2 ms
schedules:
  - kind: sync
  - {kind: local_sgd, period: 2}
steps: 8
"""


class FailedError(Exception):
    """A command of the wheel failed; the message is the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one environment.

    Args:
        python: Version of Python.
        torch: Version of torch; empty without it.
        results: `ok`, or what went wrong, by the name of the check.
    """

    python: str
    torch: str
    results: Mapping[str, str]

    @property
    def is_ok(self) -> bool:
        """Say whether every check passed."""
        return all(each == "ok" for each in self.results.values())


def run(command: list[str], folder: Path) -> str:
    """Run a command without paths of Python from outside, and return what it printed.

    Raises:
        FailedError: It failed, or took too long.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=kept, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"no end within {TIMEOUT_S:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise FailedError("\n".join((done.stdout + done.stderr).strip().splitlines()[-_SHOWN_LINES:]))
    return done.stdout


def new_environment(python: str, folder: Path, *packages: str) -> Path:
    """Create an environment with the newest pip and some packages, and return its folder of programs.

    Raises:
        FailedError: The releases do not fit together.
        NoAnswerError: pip failed for another reason.
    """
    programs = folder / "bin"
    install = [str(programs / "python"), "-m", "pip", "install", "--quiet"]
    try:
        run([python, "-m", "venv", str(folder)], folder.parent)
        run([*install, "--upgrade", "pip"], folder.parent)
        run([*install, *packages], folder.parent)
    except FailedError as error:
        if any(words in str(error) for words in CONFLICTS):
            raise
        raise NoAnswerError(last_line(str(error))) from None
    return programs


def build(python: str, folder: Path, out: Path) -> Path:
    """Build the sdist, and of it the wheel, and return the wheel.

    Raises:
        FailedError: The build failed.
        NoAnswerError: The tool for builds cannot be installed.
    """
    programs = new_environment(python, folder / "build", "build")
    run([str(programs / "python"), "-m", "build", "--outdir", str(out), str(ROOT)], folder)
    (wheel,) = out.glob("*.whl")
    return wheel


def claimed_torch(pyproject: Path = ROOT / "pyproject.toml") -> tuple[int, ...]:
    """Return the oldest torch that the extra `real` takes, such as (2, 4)."""
    wanted = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["optional-dependencies"]["real"]
    (text,) = (each for each in wanted if each.startswith("torch"))
    return _numbers(text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version.partition("+")[0]))


def release(listed: str, wanted: str, claimed: tuple[int, ...]) -> str:
    """Return the oldest or newest claimed release in what `pip index versions torch` printed.

    Raises:
        NoAnswerError: There is none.
    """
    _, _, line = listed.partition("Available versions:")
    found = [each.strip() for each in line.partition("\n")[0].split(",") if _numbers(each) >= claimed]
    if not found:
        raise NoAnswerError(f"the index lists no torch from {'.'.join(map(str, claimed))} on")
    return (min if wanted == "oldest" else max)(found, key=_numbers)


def torch_release(python: str, wanted: str, folder: Path) -> str:
    """Return the version of torch that is meant for this Python: empty for `none`.

    Raises:
        NoAnswerError: The index does not say.
    """
    if wanted not in CHOICES:
        return wanted
    if wanted == "none":
        return ""
    try:
        listed = run([python, "-m", "pip", "index", "versions", "torch"], folder)
    except FailedError as error:
        raise NoAnswerError(str(error)) from None
    return release(listed, wanted, claimed_torch())


def compares(programs: Path, folder: Path) -> None:
    """Compare the schedules of an example."""
    run([str(programs / "simdist"), "compare", str(SCENARIO)], folder)


def imports(programs: Path, folder: Path) -> None:
    """Import traces, and compare schedules for the job in them."""
    run([str(programs / "simdist"), "import", str(TRACES), "-o", "job.yaml"], folder)
    run([str(programs / "simdist"), "compare", "job.yaml"], folder)


def performs(programs: Path, folder: Path) -> None:
    """Perform plans with two processes, and compare them with their simulation."""
    (folder / "two.yaml").write_text(TWO_RANKS, encoding="utf-8")
    run([str(programs / "simdist"), "plan", "two.yaml", "-o", "plans"], folder)
    run([str(programs / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "real", "plans"], folder)
    run([str(programs / "simdist"), "validate", "plans"], folder)


CHECKS: Mapping[str, Callable[[Path, Path], None]] = {"compare": compares, "import": imports, "ranks": performs}


def trial(wheel: Path, version: str, torch: str, folder: Path) -> Trial:
    """Install the wheel, with a release of torch or without, and try it.

    Raises:
        NoAnswerError: It cannot be installed.
    """
    python = interpreter(version)
    assert python is not None
    packages = [f"{wheel}[real]", f"torch=={torch}"] if torch else [str(wheel)]
    try:
        programs = new_environment(python, folder / "environment", *packages)
    except FailedError as error:
        return Trial(version, torch, {"install": str(error)})
    results = {"install": "ok"}
    for name, check in CHECKS.items():
        if name == "ranks" and not torch:
            continue
        try:
            check(programs, folder)
        except FailedError as error:
            results[name] = str(error)
        else:
            results[name] = "ok"
    return Trial(version, torch, results)


def rows(trials: list[Trial]) -> Iterator[list[str]]:
    """Yield the table, the headings first."""
    names = ["install", *CHECKS]
    yield ["Python", "torch", *names]
    for each in trials:
        shown = {name: "ok" if result == "ok" else "FAILED" for name, result in each.results.items()}
        yield [each.python, each.torch or "-", *(shown.get(name, "-") for name in names)]


def show(trials: list[Trial]) -> None:
    """Print the table, and what failed."""
    table = list(rows(trials))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for each in trials:
        for name, result in each.results.items():
            if result != "ok":
                print(f"\nPython {each.python}, torch {each.torch or '-'}, {name}:\n{result}")


def pythons(wanted: list[str]) -> list[str]:
    """Return the wanted versions that are here, and say which are not."""
    found = [version for version in wanted if interpreter(version) is not None]
    for version in wanted:
        if version not in found:
            print(f"Python {version} is not on this machine: not tried")
    return found


def tried(versions: list[str], torches: list[str], out: Path | None, folder: Path) -> tuple[list[Trial], int]:
    """Build, and try every Python with every torch; return the trials, and how many could not be installed.

    Raises:
        FailedError: The build failed.
        NoAnswerError: The tool for builds cannot be installed.
    """
    first = interpreter(versions[0])
    assert first is not None
    wheel = build(first, folder, folder / "dist" if out is None else out.resolve())
    print(f"built {wheel.name} and its sdist", flush=True)
    trials: list[Trial] = []
    n_missing = 0
    for version in versions:
        python = interpreter(version) or sys.executable
        for wanted in torches:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                try:
                    trials.append(trial(wheel, version, torch_release(python, wanted, folder), Path(own)))
                except NoAnswerError as error:
                    n_missing += 1
                    print(f"Python {version}, torch {wanted}: cannot be installed: {error}", flush=True)
    return trials, n_missing


def main(args: list[str]) -> int:
    """Build, try and tell."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--python", action="append", metavar="VERSION", help="such as 3.12; default: those claimed")
    parser.add_argument(
        "--torch", action="append", metavar="WHICH", help="none, oldest, newest or a version; default: the first three"
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="where the wheel and the sdist go, an empty folder"
    )
    options = parser.parse_args(args)
    versions = pythons(options.python or claimed_pythons())
    if not versions:
        print("no such Python is on this machine", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            trials, n_missing = tried(versions, options.torch or list(CHOICES), options.out, Path(folder))
        except FailedError as error:
            print(f"the build failed: {error}", file=sys.stderr)
            return 1
        except NoAnswerError as error:
            print(f"no package index answers: {error}", file=sys.stderr)
            return 2
    show(trials)
    if not all(each.is_ok for each in trials):
        return 1
    return 2 if n_missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
