"""Write into README.md what its commands print.

    python tools/update_readme.py            write
    python tools/update_readme.py --check    exit with 1 if the README is out of date

`<!-- output: NAME -->` stands before a code block with the output of a command, `<!-- file: PATH -->` before one with the
contents of a file. `make benchmark` fills `<!-- table: speed -->`; speeds differ from run to run and are not checked.
"""

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def demo() -> str:
    """Return what `make demo` prints last."""
    return _printed("experiments/hsgd_stragglers/run.py")


def first() -> str:
    """Return the table of the first scenario."""
    from simdist.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(["compare", "docs/examples/first.yaml"])
    return out.getvalue()


def _printed(script: str) -> str:
    import runpy

    argv, sys.argv = sys.argv, [script]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = argv
    return out.getvalue()


OUTPUTS: dict[str, Callable[[], str]] = {"demo": demo, "first": first}


def updated(text: str) -> str:
    """Return the README with every marked block as it is now."""

    def block(match: re.Match[str]) -> str:
        kind, name = match[2], match[3]
        inside = OUTPUTS[name]() if kind == "output" else (ROOT / name).read_text(encoding="utf-8")
        lines = "\n".join(line.rstrip() for line in inside.strip("\n").splitlines())
        return f"{match[1]}\n{match[4]}\n{lines}\n```\n"

    return re.sub(r"(<!-- (output|file): (\S+) -->)\n(```\w*)\n.*?```\n", block, text, flags=re.S)


def main() -> int:
    """Update or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    os.chdir(ROOT)
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = updated(before)
    if check:
        return int(before != after)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
