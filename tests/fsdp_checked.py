"""Which oracles of `fully_shard` agree with which torch.

Some tests compare torch with the oracles of this folder and run no line of simdist. Their outcome changes only with
torch or with the oracles, so `make test` leaves them out while both are those of `real/fsdp/checked.json`.

    python tests/fsdp_checked.py      run these tests, and record what they have checked
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
RECORD = FOLDER / "real" / "fsdp" / "checked.json"
TESTS = tuple(FOLDER / "real" / "fsdp" / name for name in ("test_fsdp_clock.py", "test_fsdp_values.py"))
TORCH = torch.__version__.partition("+")[0]


def unless_checked() -> Sequence[pytest.MarkDecorator]:
    """Return the marks of tests that need to run only with a torch or an oracle that has not been checked."""
    return [pytest.mark.full] if recorded() == {"torch": TORCH, "oracles": digest()} else []


def recorded() -> dict[str, str]:
    """Return which torch, and the digest of which oracles, were checked last."""
    found: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def digest() -> str:
    """Return the SHA-256 of the oracles and of the tests that compare them with torch."""
    oracles = [*FOLDER.glob("fsdp_*.py"), FOLDER / "trainings.py", *TESTS]
    texts = [path.read_text(encoding="utf-8") for path in sorted(oracles)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def main() -> int:
    """Run the tests, record that they pass, and return the exit code of pytest."""
    code = subprocess.run([sys.executable, "-m", "pytest", "-m", "full or not full", *TESTS], check=False).returncode
    if code == 0:
        RECORD.write_text(json.dumps({"torch": TORCH, "oracles": digest()}, indent=2) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
