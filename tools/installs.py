"""Resolve what the Makefile installs, on every Python that the project claims, from the package index alone.

    python tools/installs.py                      every claimed Python, also those that this machine does not have
    python tools/installs.py --python python3.12  one of them; may be repeated
    python tools/installs.py --packages           also each package, with its version and size

Nothing is installed. For each Python a temporary environment gets the newest pip, as in the Makefile. This pip resolves
the bare package, `.[real]` and `.[dev,triton]`, with constraints.txt and without. Local wheels, extra indexes and pip's
configuration files play no part: a machine of a stranger does not have them. For a Python that is not on this machine,
the newest one that is there resolves, from wheels alone.

Exit status: 0 if everything resolves, 1 on a conflict, 2 if no index answers or no claimed Python is here.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
TARGETS = (".", ".[real]", ".[dev,triton]")
SHOWN = ("torch", "triton", "numba", "numpy")  # columns of the table
TIMEOUT_S = 900.0
# `--python-version` selects files for another Python, but pip evaluates markers for its own.
PIP_OF_ANOTHER_PYTHON = """
import runpy, sys
from pip._vendor.packaging import markers
version = sys.argv.pop(1)
own = markers.default_environment()
markers.default_environment = lambda: own | {"python_version": version, "python_full_version": version + ".0"}
runpy.run_module("pip", run_name="__main__")
"""
# How pip reaches an index; every other setting of pip is left out.
KEPT = {"PIP_CERT", "PIP_CLIENT_CERT", "PIP_DEFAULT_TIMEOUT", "PIP_INDEX_URL", "PIP_PROXY", "PIP_TRUSTED_HOST"}
# What pip says when releases do not fit together. Anything else that it fails with is no answer to the question.
CONFLICTS = (
    "ResolutionImpossible",
    "No matching distribution found",
    "conflicting dependencies",
    "requires a different Python",
)


class NoAnswerError(Exception):
    """The index did not answer, or pip failed for a reason other than a conflict."""


@dataclass(frozen=True, slots=True)
class Python:
    """A Python to resolve for: its version or path, and the interpreter that runs pip, its own or another's."""

    name: str
    path: str
    is_own: bool


@dataclass(frozen=True, slots=True)
class Package:
    """One file that would be installed; `nbytes` is None if the index does not tell."""

    name: str
    version: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Resolution:
    """What pip found for one target on one Python: packages, or its words about a conflict."""

    python: str
    target: str
    constrained: bool
    packages: tuple[Package, ...] = ()
    conflict: str = ""

    @property
    def nbytes(self) -> int:
        """Return the size of the files to download. Files of unknown size do not count."""
        return sum(package.nbytes or 0 for package in self.packages)


def claimed_pythons(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """Return the versions in the classifiers, such as 3.11."""
    classifiers = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["classifiers"]
    prefix = "Programming Language :: Python :: 3."
    return [each.rpartition(" ")[2] for each in classifiers if each.startswith(prefix)]


def interpreter(version: str) -> str | None:
    """Return the path of a Python of this version, on PATH or among pyenv's; None if there is none."""
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    of_pyenv = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    for path in [on_path, *map(str, reversed(of_pyenv))]:
        if path is not None and _works(path):  # a shim of pyenv is on PATH also where its version is switched off
            return path
    return None


def pythons_to_resolve() -> list[Python]:
    """Return all claimed Pythons, and say which of them are not here; nothing if none is."""
    at_hand = {version: path for version in claimed_pythons() if (path := interpreter(version)) is not None}
    if not at_hand:
        return []
    newest, path_of_newest = [*at_hand.items()][-1]
    for version in claimed_pythons():
        if version not in at_hand:
            print(f"Python {version} is not on this machine: the pip of Python {newest} resolves for it")
    return [Python(version, at_hand.get(version, path_of_newest), version in at_hand) for version in claimed_pythons()]


def _works(path: str) -> bool:
    try:
        subprocess.run([path, "-c", "import venv"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for pip: without those that name local wheels, other indexes or configuration files."""
    kept = {name: value for name, value in environ.items() if not name.startswith("PIP_") or name in KEPT}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run pip or venv within the time limit.

    Raises:
        NoAnswerError: It did not end in time.
    """
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment(os.environ),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {TIMEOUT_S:.0f} s: {' '.join(command)}") from None


def new_environment(python: str, folder: Path) -> str:
    """Create an environment with the newest pip and return the path of its Python.

    Raises:
        NoAnswerError: The index did not serve pip.
    """
    path = str(folder / "bin" / "python")
    for command in ([python, "-m", "venv", str(folder)], [path, "-m", "pip", "install", "--quiet", "--upgrade", "pip"]):
        done = run(command)
        if done.returncode:
            raise NoAnswerError(last_line(done.stderr))
    return path


def resolve(python: Python, pip_python: str, target: str, constraints: Path | None) -> Resolution:
    """Ask the pip of an environment what it would install.

    `fast-deps` reads metadata from the end of a wheel where an index does not serve it apart, so that gigabytes of CUDA
    packages are not downloaded only to learn what they require.

    Raises:
        NoAnswerError: pip failed for another reason than a conflict.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        if python.is_own:
            command = [pip_python, "-m", "pip", "install"]
        else:
            command = [pip_python, "-c", PIP_OF_ANOTHER_PYTHON, python.name, "install"]
            command += ["--python-version", python.name, "--only-binary", ":all:"]
        command += ["--dry-run", "--ignore-installed"]
        command += ["--use-feature=fast-deps", "--report", report.name]
        if constraints is not None:
            command += ["--constraint", str(constraints)]
        done = run([*command, target])
        if done.returncode:
            if any(words in done.stderr for words in CONFLICTS):
                return Resolution(python.name, target, constraints is not None, conflict=explanation(done))
            raise NoAnswerError(f"Python {python.name}, {target}: {last_line(done.stderr)}")
        found = json.loads(Path(report.name).read_text(encoding="utf-8"))["install"]
    packages = (
        Package(each["metadata"]["name"], each["metadata"]["version"], file_nbytes(each["download_info"]["url"]))
        for each in found
        if "archive_info" in each["download_info"]  # not the project itself
    )
    return Resolution(python.name, target, constraints is not None, tuple(packages))


def explanation(done: subprocess.CompletedProcess[str]) -> str:
    """Return what pip says of a conflict: its errors, and on stdout which requirements do not fit together."""
    errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    _, heading, causes = done.stdout.partition("The conflict is caused by:")
    return "\n".join([*errors, heading + causes.partition("To fix this")[0]]).strip()


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "pip said nothing"


@functools.cache
def file_nbytes(url: str) -> int | None:
    """Return the size of a file by its headers; None if the server does not tell."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as answer:
            length = answer.headers.get("Content-Length")
    except (OSError, ValueError):
        return None
    return None if length is None else int(length)


def rows(found: list[Resolution]) -> Iterator[list[str]]:
    """Yield the table, the headings first."""
    yield ["Python", "target", "constraints", "packages", "MB", *SHOWN]
    for each in found:
        cells = [each.python, each.target, "with" if each.constrained else "without"]
        if each.conflict:
            yield [*cells, "CONFLICT"]
            continue
        versions = {package.name: package.version for package in each.packages}
        unknown = sum(package.nbytes is None for package in each.packages)
        size = f"{each.nbytes / 1e6:,.0f}" + (f" + {unknown} unknown" if unknown else "")
        yield [*cells, str(len(each.packages)), size, *(versions.get(name, "-") for name in SHOWN)]


def show(found: list[Resolution], packages: bool) -> None:
    """Print the table, the conflicts in pip's words, and each package if wanted."""
    table = list(rows(found))
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    for each in found:
        title = f"Python {each.python}, {each.target}, {'with' if each.constrained else 'without'} constraints.txt"
        if each.conflict:
            print(f"\n{title}:\n{each.conflict}")
        elif packages:
            print(f"\n{title}:")
            for package in sorted(each.packages, key=lambda package: -(package.nbytes or 0)):
                size = "?" if package.nbytes is None else f"{package.nbytes / 1e6:,.1f}"
                print(f"{size:>10} MB  {package.name} {package.version}")


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--python", action="append", metavar="PATH", help="a Python; default: those the project claims")
    parser.add_argument("--packages", action="store_true", help="print each package")
    parser.add_argument(
        "--constraints", type=Path, default=CONSTRAINTS, metavar="FILE", help="default: constraints.txt"
    )
    parser.add_argument("--jobs", type=int, default=6, metavar="N", help="resolutions at a time (default: 6)")
    options = parser.parse_args(args)
    for path in options.python or ():
        if not _works(path):
            parser.error(f"--python {path}: is no Python that works, or has no module venv")
    if options.python:
        pythons = [Python(path, path, True) for path in options.python]
    else:
        pythons = pythons_to_resolve()
    if not pythons:
        print("no claimed Python is on this machine", file=sys.stderr)
        return 2
    paths = sorted({python.path for python in pythons})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        try:
            made = {
                path: threads.submit(new_environment, path, Path(folder) / str(number))
                for number, path in enumerate(paths)
            }
            asked = [
                threads.submit(resolve, python, made[python.path].result(), target, constraints)
                for python in pythons
                for target in TARGETS
                for constraints in (options.constraints.resolve(), None)
            ]
            found = [each.result() for each in asked]
        except NoAnswerError as error:
            threads.shutdown(cancel_futures=True)
            print(f"no package index answers: {error}", file=sys.stderr)
            return 2
    show(found, options.packages)
    return 1 if any(each.conflict for each in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
