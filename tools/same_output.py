"""Compare what two trees of simdist print and write, byte for byte.

    python tools/same_output.py BEFORE AFTER [--show] [--only PART] [--foreign FOLDER]

BEFORE and AFTER are folders that hold `simdist/`, such as worktrees of two commits, or files that --keep wrote. Each
runs the same commands on the scenarios and recorded runs of this clone: as text, as JSON, and the run directories that
they write. A command that differs is listed; --show prints the lines. Exit status: 0 if nothing differs, 1 if something
does, 2 if a tree fails to run.

    python tools/same_output.py TREE --keep FILE    keep what a tree gives
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from child_answers import answer_of, differing

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 3600.0
_SEEDS = ("--seeds", "2")
_TUNE = ("tune", "--seeds", "2", "--search-seeds", "1", "--evaluations", "12")
_MOST_SHOWN = 40


def commands(foreign: Path | None) -> Iterator[tuple[str, ...]]:
    """Yield commands; `OUT` stands for a folder of the command's own, `RUN` for a copy of a recorded run."""
    from same_bits import scenarios  # beside this file; puts this clone first in the path

    for path in scenarios():
        name = str(path)
        yield ("compare", name, *_SEEDS)
        yield ("simulate", name, "-o", "OUT/run")
        yield ("plan", name)
    for name in ("first", "stragglers", "checkpoints", "real-data", "recorded", "data-centers", "stalls"):
        example = str(ROOT / f"docs/examples/{name}.yaml")
        yield ("whatif", example, "--data")
        yield ("whatif", example, "--resamples", "5")
        yield (*_TUNE, example)
        yield (*_TUNE, example, "--allow", "overlap", "--allow", "diloco", "--allow", "backup", "--allow", "servers")
    yield ("sweep", str(ROOT / "docs/examples/sweep.yaml"), "-o", "OUT/sweep", "--workers", "0")
    run = "RUN"  # a copy, as `simulate` writes there
    for command in ("whatif", "validate", "simulate"):
        yield (command, run)
    yield ("trace", run, "--collectives")
    yield ("whatif", run, "--data")
    yield ("results", run)
    folders = [ROOT / "docs/examples/traces", ROOT / "tests/data/profiles/late", ROOT / "tests/data/profiles/slow"]
    if foreign:
        folders += sorted(each for each in foreign.iterdir() if each.is_dir())
    for folder in folders:
        yield ("import", str(folder), "-o", "OUT/job.yaml")
        yield ("whatif", "OUT/../import/job.yaml", "--resamples", "5")
        yield ("compare", "OUT/../import/job.yaml", *_SEEDS)


def plain(text: str) -> str:
    """Return a text without the folder of this clone, and that of the tree whose code runs."""
    import simdist

    tree = Path(str(simdist.__file__)).parents[1]
    return text.replace(f"{ROOT}/", "").replace(f"{tree}/", "")


def digest(path: Path) -> str:
    """Return a digest of a file: of arrays if it is an archive of them, whose own bytes hold the time of day."""
    import numpy as np

    if path.suffix == ".npz":
        state = hashlib.sha256()
        with np.load(path, allow_pickle=False) as arrays:
            for name in sorted(arrays.files):
                state.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
                state.update(arrays[name].tobytes())
        return state.hexdigest()
    text = path.read_bytes().replace(str(path.parents[1]).encode(), b"")
    return hashlib.sha256(text).hexdigest()


def outputs(only: str, foreign: Path | None) -> dict[str, Any]:
    """Return what the commands print and write, by command."""
    import real  # noqa: F401  of the tree, ahead of this clone's
    from simdist.cli import main as command_line

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        imported = Path(folder, "import")
        recorded = Path(folder, "recorded")
        shutil.copytree(ROOT / "notebooks/data/run", recorded)
        for command in commands(foreign):
            name = plain(" ".join(command))
            if only not in name:
                continue
            for extra in ((), ("--json",)):
                out = imported if command[0] == "import" else Path(folder, str(len(found)))
                out.mkdir(exist_ok=True)
                for old in out.glob("*"):
                    old.unlink()
                given = [part.replace("OUT/../import", str(imported)).replace("OUT", str(out)) for part in command]
                given = [str(recorded) if part == "RUN" else part for part in given]
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                    try:
                        command_line([*given, *extra])
                        code: object = 0
                    except SystemExit as end:
                        code = end.code
                text = plain(printed.getvalue().replace(str(out), "OUT").replace(folder, "TMP"))
                text = re.sub(r"\d+(\.\d+)? (s|min) (so far|left)", "TIME", text)
                files = {str(each.relative_to(out)): digest(each) for each in sorted(out.rglob("*")) if each.is_file()}
                found[f"{name} {' '.join(extra)}".strip()] = {"code": code, "text": text, "files": files}
    return found


def of(tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a tree gives, run in a process of its own; or what a file of --keep holds.

    Raises:
        RuntimeError: It fails, or takes longer than an hour.
    """
    if tree.is_file():
        kept: dict[str, Any] = json.loads(tree.read_text(encoding="utf-8"))
        return {name: each for name, each in kept.items() if options.only in name}
    command = [sys.executable, str(Path(__file__).resolve()), "--here", "--only", options.only]
    if options.foreign:
        command += ["--foreign", str(options.foreign)]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        return answer_of(str(tree), command, timeout_s=TIMEOUT_S, environ=environment, folder=folder)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="a folder that holds simdist/, or a file")
    parser.add_argument("--only", default="", metavar="PART", help="only commands that contain this text")
    parser.add_argument("--foreign", type=Path, metavar="FOLDER", help="import each folder of traces in it, too")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what the one tree gives")
    parser.add_argument("--show", action="store_true", help="print the lines that differ")
    parser.add_argument("--here", action="store_true", help="print what this process gives, as JSON")
    options = parser.parse_args(args)
    if options.here:
        json.dump(outputs(options.only, options.foreign), sys.stdout)
        return 0
    if len(options.trees) != (1 if options.keep else 2):
        parser.error("name two trees, BEFORE and AFTER, or one with --keep")
    try:
        found = [of(tree, options) for tree in options.trees]
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.keep:
        options.keep.write_text(json.dumps(found[0]), encoding="utf-8")
        return 0
    before, after = found
    names = {*before, *after}
    different = differing(before, after)
    for name in different:
        print(f"differs: {name}")
        if options.show and name in before and name in after:
            show(before[name], after[name])
    print(f"{len(names) - len(different)} of {len(names)} are equal")
    return 1 if different else 0


def show(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print the first lines that differ, and the files."""
    lines = difflib.unified_diff(before["text"].splitlines(), after["text"].splitlines(), lineterm="", n=0)
    for line in list(lines)[2 : 2 + _MOST_SHOWN]:
        print(f"    {line}")
    for name in sorted({*before["files"], *after["files"]}):
        if before["files"].get(name) != after["files"].get(name):
            print(f"    file {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
