"""Run one part and print its rows, one JSON object a line. tools/gpu.py starts this.

    python experiments/gpu/part.py NAME [--dry-run] [--keep FOLDER]

Everything else that is printed goes to stderr. The process ends, with those that it has started, when its stdin does:
so no part goes on without tools/gpu.py.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import common  # noqa: E402  of this folder


def follow_stdin() -> None:
    """End this process group when stdin ends."""
    while os.read(0, 1024):  # not through sys.stdin, whose lock a thread must not hold when Python ends
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Run the part that is named."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--followed", action="store_true", help="end with stdin")
    parser.add_argument("--keep", type=Path, help="folder of runs that are kept (default: a temporary one)")
    options = parser.parse_args()
    if options.followed:
        threading.Thread(target=follow_stdin, daemon=True).start()
    if options.dry_run:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other keep CPUs busy
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")

    def emit(row: common.Row) -> None:
        print(json.dumps(row), file=out, flush=True)

    os.dup2(2, 1)  # whatever libraries print is no row
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        part = common.Part(emit, options.dry_run, options.keep or Path(folder))
        importlib.import_module(options.name).run(part)


if __name__ == "__main__":
    main()
