"""Texts of errors, all in one file that a reviewer reads from top to bottom: tests/golden/messages.txt.

    assert_message("bad_input/unknown key", str(error), tmp_path)

`WRITE_GOLDEN=1 pytest -n 0 FILES` records what is said now.
"""

import os
import re
from pathlib import Path

FILE = Path(__file__).parent / "golden" / "messages.txt"


def assert_message(case: str, text: str, folder: Path | None = None) -> None:
    """Compare a text with what is recorded for a case; the name of a temporary folder does not count."""
    said = text.replace(str(folder), "DIR") if folder else text
    said = "\n".join(line.rstrip() for line in said.strip("\n").splitlines())
    recorded = _recorded()
    if "WRITE_GOLDEN" in os.environ:
        recorded[case] = said
        FILE.write_text("".join(f"## {name}\n{each}\n\n" for name, each in sorted(recorded.items())), encoding="utf-8")
    assert said == recorded.get(case), f"WRITE_GOLDEN=1 records this as the message of {case!r}:\n{said}"


def _recorded() -> dict[str, str]:
    text = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    return {
        match[1]: match[2].rstrip("\n") for match in re.finditer(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    }
