"""Execute the notebooks and write them with their outputs.

    python tools/notebooks.py [NAME ...]             execute NAME.py, by default all, and write NAME.ipynb
    python tools/notebooks.py --check [NAME ...]     execute nothing; exit with 1 if a pair is out of step

A notebook is a pair in `notebooks/`: NAME.py, its source in jupytext's percent format, which reviews read, and
NAME.ipynb, the same cells with what they printed and drew. notebooks/README.md says what a notebook must look like. One
that does not is not written.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient.exceptions import CellExecutionError
from notebook_execution import FOLDER, METADATA, Notebook, execute
from notebook_rules import faults, faults_of_pair


def names(folder: Path = FOLDER) -> list[str]:
    """Return the names of all notebooks, those of which half is missing included."""
    return sorted({path.stem for suffix in ("py", "ipynb") for path in folder.glob(f"[0-9]*.{suffix}")})


def source(name: str, folder: Path = FOLDER) -> Notebook:
    """Read NAME.py as a notebook without outputs; the id of a cell is made of its text and stays if the cell moves."""
    notebook: Notebook = jupytext.reads((folder / f"{name}.py").read_text(encoding="utf-8"), fmt="py:percent")
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def paired(name: str, folder: Path = FOLDER) -> Notebook:
    """Read NAME.ipynb."""
    notebook: Notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    return notebook


def check(name: str, folder: Path = FOLDER) -> list[str]:
    """Return where a pair is out of step, without executing it."""
    for suffix in ("py", "ipynb"):
        if not (folder / f"{name}.{suffix}").exists():
            return [f"{name}.{suffix} is missing"]
    return list(faults_of_pair(source(name, folder), paired(name, folder)))


def write(name: str) -> list[str]:
    """Execute a notebook and write it, unless something is wrong with it; return what is."""
    before_s = time.perf_counter()
    try:
        executed = execute(source(name))
    except (CellExecutionError, RuntimeError) as error:
        return [str(error)]
    wrong = faults(executed)
    if not wrong:
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(executed.notebook, path)
        n_figures, nbytes = len(executed.figures), path.stat().st_size
        print(f"{name}: {n_figures} figures, {nbytes / 1e3:.0f} kB, {time.perf_counter() - before_s:.1f} s")
    return wrong


def main() -> int:
    """Execute or check notebooks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="without suffix; by default all")
    parser.add_argument("--check", action="store_true", help="only say which pairs are out of step")
    arguments = parser.parse_args()
    n_wrong = 0
    for name in arguments.names or names():
        for fault in check(name) if arguments.check else write(name):
            n_wrong += 1
            print(f"{name}: {fault}", file=sys.stderr)
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
